"""What a tier holds in numbers: by namespace, by age, and which chunks come first in an order. Pure.

Called by ``cli/ls.py``, ``cli/du.py`` and whoever else has to name a namespace in a few words.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from tiered_kv.admin.forest import Forest, Ident
from tiered_kv.admin.storage import Content, NamespaceRecord, StoredBlob, Stray
from tiered_kv.engine.self_test import SELF_TEST_NAMESPACE
from tiered_kv.keys.naming import relative_path
from tiered_kv.keys.stored_by import UNKNOWN

AGES: Final = (("hour", 3600.0), ("day", 86400.0), ("week", 7 * 86400.0), ("month", 30 * 86400.0), ("older", None))
"""Classes of last use: within an hour, else within a day, and so on."""

DESCRIPTION_MAX: Final = 80


@dataclass(slots=True)
class NamespaceSum:
    """What a namespace holds.

    Attributes:
        used_s: The last use of any of its chunks; None while it has none.
        storers: How many chunks each stored, as far as a listing tells.
    """

    digest: bytes
    record: NamespaceRecord
    chunks: int = 0
    size_bytes: int = 0
    used_s: float | None = None
    storers: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class AgeSum:
    """Chunks whose last use falls into one class of ``AGES``."""

    name: str
    chunks: int = 0
    size_bytes: int = 0


@dataclass(slots=True)
class Usage:
    """What a tier holds, summed up.

    Attributes:
        namespaces: Those with chunks, the largest first, then those that have only a record.
        ages: In the order of ``AGES``, also the empty ones.
    """

    namespaces: list[NamespaceSum] = field(default_factory=list)
    ages: list[AgeSum] = field(default_factory=list)


def sum_up(
    records: Mapping[bytes, NamespaceRecord],
    forest: Forest,
    used: Mapping[Ident, float],
    now_s: float,
    namespace: bytes | None = None,
) -> Usage:
    """Sum up a tier, or one namespace of it.

    Args:
        used: Last uses, as ``Forest.last_uses`` tells them.
    """
    sums = {space: NamespaceSum(space, record) for space, record in records.items()}
    ages = [AgeSum(name) for name, _ in AGES]
    bounds = [(now_s - limit_s, age) for (_, limit_s), age in zip(AGES, ages, strict=True) if limit_s is not None]
    for key, blob in forest.blobs.items():
        space = key[0]
        if namespace is not None and space != namespace:
            continue
        found = sums.get(space)
        if found is None:
            found = sums[space] = NamespaceSum(space, NamespaceRecord(space, None, "there is no namespace.json"))
        used_s = used[key]
        found.chunks += 1
        found.size_bytes += blob.size_bytes
        found.storers[blob.stored_by or UNKNOWN] += 1
        if found.used_s is None or found.used_s < used_s:
            found.used_s = used_s
        age = ages[-1]
        for since_s, candidate in bounds:
            if used_s >= since_s:
                age = candidate
                break
        age.chunks += 1
        age.size_bytes += blob.size_bytes
    chosen = [found for space, found in sums.items() if namespace in (None, space)]
    return Usage(sorted(chosen, key=lambda found: (-found.size_bytes, found.digest)), ages)


def set_self_test_apart(content: Content) -> None:
    """Count what a server's self-test left as strays, not as a namespace: no model is behind it, and `gc` removes it.

    A test deletes its blob; what is left is the empty directory of its namespace, and a blob where the server was
    killed or may not delete.
    """
    content.records.pop(SELF_TEST_NAMESPACE, None)
    tests = [blob for blob in content.blobs if blob.name.namespace == SELF_TEST_NAMESPACE]
    if tests:
        content.blobs = [blob for blob in content.blobs if blob.name.namespace != SELF_TEST_NAMESPACE]
        reason = "left by the self-test of a server that was killed or may not delete"
        content.strays += [
            Stray(relative_path(blob.name), blob.size_bytes, blob.written_s, "temp", reason) for blob in tests
        ]


def orders(used: Mapping[Ident, float]) -> dict[str, Callable[[StoredBlob], float | bytes]]:
    """Ways to sort chunks, by name; what is asked for most often comes first."""
    return {
        "used": lambda blob: -used[blob.name.namespace, blob.name.key],
        "size": lambda blob: -blob.size_bytes,
        "age": lambda blob: -blob.written_s,
        "key": lambda blob: blob.name.key,
        "depth": lambda blob: blob.name.chunk_index,
    }


def first(
    blobs: Iterable[StoredBlob], order: Callable[[StoredBlob], float | bytes], limit: int | None, *, is_reversed: bool
) -> list[StoredBlob]:
    """The first chunks of an order, or the last ones, last first. Ties are broken by key, so that two calls agree."""

    def by(blob: StoredBlob) -> tuple[float | bytes, bytes]:
        return order(blob), blob.name.key

    if limit is None:
        return sorted(blobs, key=by, reverse=is_reversed)
    return heapq.nlargest(limit, blobs, key=by) if is_reversed else heapq.nsmallest(limit, blobs, key=by)


def matching(
    forest: Forest, used: Mapping[Ident, float], namespace: bytes | None, used_before_s: float | None
) -> list[StoredBlob]:
    """Chunks of a namespace, or of all, that were not used since a time, if one is given."""
    return [
        blob
        for key, blob in forest.blobs.items()
        if (namespace is None or key[0] == namespace) and (used_before_s is None or used[key] < used_before_s)
    ]


def describe(record: NamespaceRecord) -> str:
    """A namespace in a few words, as its record says: kind of model, weights, dtype; else why nobody knows."""
    if record.namespace is None:
        return record.problem
    fields = record.namespace.fields
    config = fields.get("text_config")
    kind = config.get("model_type") if isinstance(config, dict) else None
    weights = str(fields["weights"])
    scheme, _, digits = weights.partition(":")
    if scheme in ("hf", "sha256", "sha256v2") and "+" not in weights:
        weights = f"{scheme}:{digits[:12]}"  # enough to tell two of them apart
    parts = [str(part) for part in (kind, weights, fields["kv_dtype"]) if part is not None]
    parts += [f"{name}={fields[name]}" for name in ("tp", "pp", "dcp") if fields[name] not in (None, 1)]
    return printable(" ".join(parts), DESCRIPTION_MAX)


def epoch_of(record: NamespaceRecord) -> str | None:
    """The epoch of a namespace; None where its record does not say."""
    value = None if record.namespace is None else record.namespace.fields["epoch"]
    return None if value is None else printable(str(value), DESCRIPTION_MAX)


def printable(text: str, length_max: int) -> str:
    """Text that somebody else wrote, fit for a terminal: no control characters, not longer than this."""
    clean = "".join(letter if letter.isprintable() else "?" for letter in text)
    return clean if len(clean) <= length_max else f"{clean[: length_max - 3]}..."
