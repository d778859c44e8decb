"""Sum up a tier by namespace and by age, and sort its chunks. Pure.

Called by ``cli/ls.py`` and ``cli/du.py``; other modules describe namespaces with it.
"""

import heapq
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from tiered_kv.keys.conditions import Conditions
from tiered_kv.keys.namespace import SELF_TEST_NAMESPACE
from tiered_kv.keys.naming import relative_path
from tiered_kv.keys.stored_by import UNKNOWN
from tiered_kv.ops.forest import Forest
from tiered_kv.ops.storage import Content, NamespaceRecord, StoredBlob, Stray
from tiered_kv.ops.text import printable

AGES: Final = (("hour", 3600.0), ("day", 86400.0), ("week", 7 * 86400.0), ("month", 30 * 86400.0), ("older", None))
"""Classes of last use: within an hour, else within a day, and so on."""

DESCRIPTION_MAX: Final = 80


class LsNamespace(msgspec.Struct, frozen=True, kw_only=True):
    """One namespace: one model, run in one way.

    Attributes:
        namespace: Its digest.
        model: The model in a few words, as the namespace's record says; null where there is none that can be read.
        problem: Why there is no ``model``; null where there is.
        epoch: Changes when the cache is reset; null if unknown.
        chunks: Chunks stored, parts of states among them.
        size_bytes: What they take of the tier.
        states: Boundaries at which the state of the model's recurrent layers is stored; 0 where it has none.
        state_parts: Chunks that are parts of states, also of such that lack others.
        state_bytes: What these take of the tier.
        chunks_behind_states: Chunks behind the last state of their prefix, which no hit brings.
        tails: Chunks that are tails.
        tail_bytes: What these take of the tier.
        chunk_tokens: Tokens of a chunk; null if unknown.
        used_s: Last use of any chunk; null without chunks.
        first_stored_by: Who opened the namespace here first: package, engine, encoding; null where that is not said.
        stored_by: How many of its chunks each stored, whether ``--stored-by`` means them or not; empty in a bucket
            where no header is read.
    """

    namespace: str
    model: str | None
    problem: str | None
    epoch: str | None
    chunks: int
    size_bytes: int
    states: int
    state_parts: int
    state_bytes: int
    chunks_behind_states: int
    tails: int
    tail_bytes: int
    chunk_tokens: int | None
    used_s: float | None
    first_stored_by: str | None
    stored_by: dict[str, int]


class DuAge(msgspec.Struct, frozen=True, kw_only=True):
    """What was last used in one span of time.

    Attributes:
        last_use: ``hour``: within the last hour; ``day``: before that, within a day; likewise ``week`` and ``month``,
            which is 30 days; ``older``.
        chunks: Chunks last used then; a use of a chunk is a use of the prefix before it.
        size_bytes: What they take of the tier.
    """

    last_use: str
    chunks: int
    size_bytes: int


def sum_up(
    records: Mapping[bytes, NamespaceRecord],
    forest: Forest,
    used: Sequence[float],
    now_s: float,
    namespace: bytes | None = None,
) -> tuple[list[LsNamespace], list[DuAge]]:
    """Sum up a tier, or one namespace of it.

    Args:
        used: Last uses by row, from ``Forest.last_uses``.

    Returns:
        Namespaces, the largest first, then those that have only a record; and all classes of ``AGES``, in their order.
    """
    spaces: dict[bytes, list[StoredBlob]] = {space: [] for space in records}
    newest: dict[bytes, float] = {}
    bounds = sorted(now_s - limit_s for _, limit_s in AGES if limit_s is not None)
    counts, sizes = [0] * len(AGES), [0] * len(AGES)
    for blob, used_s in zip(forest.blobs, used, strict=True):  # a million: nothing is called but what it takes
        space = blob.name.namespace
        if namespace is None or namespace == space:
            if space not in newest:
                spaces.setdefault(space, [])
                newest[space] = used_s
            elif used_s > newest[space]:
                newest[space] = used_s
            spaces[space].append(blob)
            age = bisect_right(bounds, used_s)
            counts[age] += 1
            sizes[age] += blob.size_bytes
    found = [
        _sum_of(records.get(space) or NamespaceRecord.missing(space), space, blobs, newest.get(space), forest)
        for space, blobs in spaces.items()
        if namespace in (None, space)
    ]
    ages = [
        DuAge(last_use=name, chunks=count, size_bytes=size_bytes)
        for (name, _), count, size_bytes in zip(AGES, reversed(counts), reversed(sizes), strict=True)
    ]
    return sorted(found, key=lambda one: (-one.size_bytes, one.namespace)), ages


def _sum_of(
    record: NamespaceRecord, space: bytes, blobs: Sequence[StoredBlob], used_s: float | None, forest: Forest
) -> LsNamespace:
    states = forest.sum_up_states(blobs, record.state_parts)
    tails = [blob for blob in blobs if blob.tail_tokens]
    storers = Counter(blob.stored_by or UNKNOWN for blob in blobs)
    return LsNamespace(
        namespace=space.hex(),
        model=None if record.problem else describe(record),
        problem=record.problem or None,
        epoch=epoch_of(record),
        chunks=len(blobs),
        size_bytes=sum(blob.size_bytes for blob in blobs),
        states=states.states,
        state_parts=states.parts,
        state_bytes=states.size_bytes,
        chunks_behind_states=states.chunks_behind,
        tails=len(tails),
        tail_bytes=sum(blob.size_bytes for blob in tails),
        chunk_tokens=record.chunk_tokens,
        used_s=used_s,
        first_stored_by=record.first_stored_by or None,
        stored_by={line: count for line, count in storers.most_common() if line},
    )


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


def orders(forest: Forest, used: Sequence[float]) -> dict[str, Callable[[int], float | bytes]]:
    """Sort keys of chunks, by row, by the name of the order."""
    blobs = forest.blobs
    return {
        "used": lambda row: -used[row],
        "size": lambda row: -blobs[row].size_bytes,
        "age": lambda row: -blobs[row].written_s,
        "key": lambda row: blobs[row].name.key,
        "depth": lambda row: blobs[row].name.chunk_index,
    }


def first(
    forest: Forest,
    rows: Sequence[int],
    order: Callable[[int], float | bytes],
    limit: int | None,
    *,
    is_reversed: bool,
) -> list[int]:
    """The first chunks of an order, or the last ones, last first. Ties are broken by key, so that two calls agree."""
    if limit is not None and limit < len(rows):
        # A few of a million: first by the order alone, which takes a third of comparing pairs.
        values: list[Any] = list(map(order, rows))
        last = (heapq.nlargest if is_reversed else heapq.nsmallest)(limit, values)[-1]
        rows = [
            row
            for row, value in zip(rows, values, strict=True)
            if value == last or (value > last if is_reversed else value < last)
        ]
    return sorted(rows, key=lambda row: (order(row), forest.blobs[row].name.key), reverse=is_reversed)[:limit]


def matching(
    forest: Forest,
    used: Sequence[float],
    namespace: bytes | None = None,
    used_before_s: float | None = None,
    tag: bytes | None = None,
    stored_by: Conditions | None = None,
) -> Sequence[int]:
    """Rows of the chunks that meet every condition that is given, ``used_before_s``: not used since that time."""
    if (namespace, used_before_s, tag, stored_by) == (None, None, None, None):
        return range(len(forest.blobs))
    return [
        row
        for row, blob in enumerate(forest.blobs)
        if namespace in (None, blob.name.namespace)
        and (used_before_s is None or used[row] < used_before_s)
        and tag in (None, blob.tag)
        and (stored_by is None or stored_by.matches(blob.stored_by or UNKNOWN))
    ]


def describe(record: NamespaceRecord) -> str:
    """A namespace in a few words: kind of model, weights, dtype; without a readable record the reason."""
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
