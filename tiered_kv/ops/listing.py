"""Sum up a tier by namespace and by age, and sort its chunks. Pure.

Called by ``cli/ls.py`` and ``cli/du.py``; other modules describe namespaces with it.
"""

import heapq
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple

import msgspec

from tiered_kv.keys.conditions import Conditions
from tiered_kv.keys.namespace import SELF_TEST_NAMESPACE
from tiered_kv.keys.naming import relative_path
from tiered_kv.keys.stored_by import UNKNOWN
from tiered_kv.ops.blob_table import BlobTable, part
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
        chunks: Chunks stored, parts of states among them; one that lies under two names counts twice.
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
    table = forest.table
    spaces: dict[bytes, Sequence[int]] = dict.fromkeys(records, ()) | dict(table.rows())
    if namespace is not None:
        spaces = {namespace: spaces.get(namespace, ())}
    copies: dict[bytes, list[StoredBlob]] = {}
    for (space, _), several in forest.copies.items():
        copies.setdefault(space, []).extend(several)
    found = [
        _sum_of(records.get(space) or NamespaceRecord.missing(space), space, rows, used, forest, copies.get(space, ()))
        for space, rows in spaces.items()
    ]
    counts, sizes = [0] * len(AGES), [0] * len(AGES)
    bounds = sorted(now_s - limit_s for _, limit_s in AGES if limit_s is not None)
    for space, rows in spaces.items():
        of_twice = ((used[forest.row(blob)], blob.size_bytes) for blob in copies.get(space, ()))
        # A million: nothing is called for each but what it takes.
        for used_s, size_bytes in chain(zip(part(used, rows), part(table.sizes, rows), strict=True), of_twice):
            age = bisect_right(bounds, used_s)
            counts[age] += 1
            sizes[age] += size_bytes
    ages = [
        DuAge(last_use=name, chunks=count, size_bytes=size_bytes)
        for (name, _), count, size_bytes in zip(AGES, reversed(counts), reversed(sizes), strict=True)
    ]
    return sorted(found, key=lambda one: (-one.size_bytes, one.namespace)), ages


def _sum_of(
    record: NamespaceRecord,
    space: bytes,
    rows: Sequence[int],
    used: Sequence[float],
    forest: Forest,
    copies: Sequence[StoredBlob],
) -> LsNamespace:
    table = forest.table
    states = forest.sum_up_states(map(table.__getitem__, rows), record.state_parts)
    tails = [row for row in rows if row in table.tails] if table.tails else []
    storers = Counter[str]()
    for (_, stored_by), count in Counter(part(table.origins, rows)).items():
        storers[stored_by or UNKNOWN] += count
    return LsNamespace(
        namespace=space.hex(),
        model=None if record.problem else describe(record),
        problem=record.problem or None,
        epoch=epoch_of(record),
        chunks=len(rows) + len(copies),
        size_bytes=sum(part(table.sizes, rows)) + sum(blob.size_bytes for blob in copies),
        states=states.states,
        state_parts=states.parts,
        state_bytes=states.size_bytes,
        chunks_behind_states=states.chunks_behind,
        tails=len(tails),
        tail_bytes=sum(part(table.sizes, tails)),
        chunk_tokens=record.chunk_tokens,
        used_s=max(part(used, rows), default=None),
        first_stored_by=record.first_stored_by or None,
        stored_by={line: count for line, count in storers.most_common() if line},
    )


def set_self_test_apart(content: Content) -> None:
    """Count what a server's self-test left as strays, not as a namespace: no model is behind it, and `gc` removes it.

    A test deletes its blob; what is left is the empty directory of its namespace, and a blob where the server was
    killed or may not delete.
    """
    content.records.pop(SELF_TEST_NAMESPACE, None)
    content.blobs = table = BlobTable.of(content.blobs)
    if rows := table.rows().get(SELF_TEST_NAMESPACE):
        tests = [table[row] for row in rows]
        content.blobs = BlobTable.of(blob for blob in table if blob.name.namespace != SELF_TEST_NAMESPACE)
        reason = "left by the self-test of a server that was killed or may not delete"
        content.strays += [
            Stray(relative_path(blob.name), blob.size_bytes, blob.written_s, "temp", reason) for blob in tests
        ]


class Order(NamedTuple):
    """An order of chunks.

    Attributes:
        column: What is compared, by row.
        is_descending: Whether the largest comes first; numbers only.
    """

    column: Sequence[Any]
    is_descending: bool


def orders(forest: Forest, used: Sequence[float]) -> dict[str, Order]:
    """Orders by their names."""
    table = forest.table
    return {
        "used": Order(used, is_descending=True),
        "size": Order(table.sizes, is_descending=True),
        "age": Order(table.written_s, is_descending=True),
        "key": Order(table.keys, is_descending=False),
        "depth": Order(table.depths, is_descending=False),
    }


def first(forest: Forest, rows: Sequence[int], order: Order, limit: int | None, *, is_reversed: bool) -> list[int]:
    """The first chunks of an order, or the last ones, last first. Ties are broken by key, so that two calls agree."""
    column, keys = order.column, forest.table.keys
    if limit is not None and limit < len(rows):
        # A few of a million: first by the order alone, which takes a third of comparing pairs.
        values = part(column, rows)
        if order.is_descending != is_reversed:
            last = heapq.nlargest(limit, values)[-1]
            rows = [row for row, value in zip(rows, values, strict=True) if value >= last]
        else:
            last = heapq.nsmallest(limit, values)[-1]
            rows = [row for row, value in zip(rows, values, strict=True) if value <= last]
    if order.is_descending:
        return sorted(rows, key=lambda row: (-column[row], keys[row]), reverse=is_reversed)[:limit]
    return sorted(rows, key=lambda row: (column[row], keys[row]), reverse=is_reversed)[:limit]


def matching(
    forest: Forest,
    used: Sequence[float],
    namespace: bytes | None = None,
    used_before_s: float | None = None,
    tag: bytes | None = None,
    stored_by: Conditions | None = None,
) -> Sequence[int]:
    """Rows of the chunks that meet every condition that is given, ``used_before_s``: not used since that time."""
    table = forest.table
    rows: Sequence[int] = range(len(table)) if namespace is None else table.rows().get(namespace, ())
    if (used_before_s, tag, stored_by) == (None, None, None):
        return rows
    return [
        row
        for row in rows
        for its_tag, its_storer in [table.origins[row]]
        if (used_before_s is None or used[row] < used_before_s)
        and tag in (None, its_tag)
        and (stored_by is None or stored_by.matches(its_storer or UNKNOWN))
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
