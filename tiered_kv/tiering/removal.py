"""Removing chunks because an operator said so, not because room is needed.

Pure, like tiering that calls it. What is in use stays, and what was removed is an ordinary miss from then on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

from tiered_kv.tiering.index import Entry, Index
from tiered_kv.tiering.types import Removal, RemovalCount

ERASED_AT_ONCE = 200_000
"""Each is a job that waits for its medium: 40 MB."""


class RemovableTier(Protocol):
    """What removal needs of a tier, whichever it is."""

    def contains(self, entry: Entry) -> bool:
        """Whether the chunk is here or is going to be."""

    def remove(self, entry: Entry, *, leaves_hole: bool) -> Removal:
        """Remove a chunk unless it is in use, or chunks that depend on it would be left behind a hole."""


STEP: Final = 256
"""Chunks that one step of a removal looks at."""


def removing(
    index: Index, tier: RemovableTier, namespace: bytes, keys: Sequence[bytes] | None, *, leaves_holes: bool
) -> Iterator[RemovalCount | None]:
    """Remove chunks of a namespace from host memory or from a tier that is not shared, the deepest first.

    In steps, between which anything may happen: what is stored meanwhile may stay.

    Args:
        namespace: Empty: of every namespace.
        keys: None: all of the namespace.
        leaves_holes: Also those on which chunks depend that stay in the tier; host memory has no such rule.

    Yields:
        None after a step, and at last how many are going, how many stay because they are in use or needed, and how many
        are not there.
    """
    found = index.entries() if keys is None else [index.get(key) for key in dict.fromkeys(keys)]
    by_depth: defaultdict[int, list[Entry]] = defaultdict(list)
    for number, entry in enumerate(found, 1):
        if entry is not None and namespace in (b"", entry.record.namespace):
            by_depth[entry.record.chunk_index].append(entry)
        if not number % STEP:
            yield None
    removed = kept = looked_at = 0
    for depth in sorted(by_depth, reverse=True):
        for entry in by_depth.pop(depth):
            looked_at += 1
            if index.get(entry.record.key) is entry:
                end = tier.remove(entry, leaves_hole=leaves_holes)
                removed += end is Removal.REMOVED
                kept += end is Removal.KEPT
            if not looked_at % STEP:
                yield None
    yield RemovalCount(removed, kept, 0 if keys is None else len(found) - removed - kept)


def erasing(
    index: Index,
    tier: RemovableTier,
    cancel_writes: Callable[[Entry], None],
    namespace: bytes,
    is_meant: Callable[[Entry], bool],
) -> Iterator[RemovalCount | None]:
    """Remove what is meant, and everything behind it, from host memory or from one secondary tier.

    What is meant: what was stored under a tag, or by somebody. What lies behind a chunk was computed from it, or from
    what was loaded in its place.

    In no tier is any of it written that was not begun. A chunk stays while one behind it is in use, in whatever tier:
    without it that one could not be found any more. In steps, between which anything may happen: what is stored
    meanwhile may stay.

    Args:
        cancel_writes: Drops a chunk's writes to all tiers that were not begun.
        namespace: Empty: of every namespace.

    Yields:
        None after a step, and at last the counts: ``left`` were not looked at because ``ERASED_AT_ONCE`` are going,
        call again. ``kept`` is complete only in the last answer.
    """
    found: set[Entry] = set()
    by_depth: defaultdict[int, list[Entry]] = defaultdict(list)
    for number, entry in enumerate(index.entries(), 1):
        pending = [entry] if namespace in (b"", entry.record.namespace) and is_meant(entry) else []
        while pending:
            one = pending.pop()
            if one not in found:
                found.add(one)
                by_depth[one.record.chunk_index].append(one)
                cancel_writes(one)
                pending.extend(one.children)
                if not len(found) % STEP:
                    yield None
        if not number % STEP:
            yield None
    removed = kept = left = 0
    staying: set[Entry] = set()
    deepest_first = (entry for depth in sorted(by_depth, reverse=True) for entry in by_depth.pop(depth))
    for number, entry in enumerate(deepest_first, 1):
        if index.get(entry.record.key) is not entry:
            continue  # gone meanwhile
        if removed == ERASED_AT_ONCE:
            left += tier.contains(entry)
        else:
            cancel_writes(entry)  # somebody may have asked for it since
            is_needed = any(child in staying for child in entry.children)
            if is_needed:
                end = Removal.KEPT if tier.contains(entry) else Removal.ABSENT
            else:
                end = tier.remove(entry, leaves_hole=False)
            if is_needed or end is Removal.KEPT or entry.is_busy:
                staying.add(entry)
            removed += end is Removal.REMOVED
            kept += end is Removal.KEPT
        if not number % STEP:
            yield None
    yield RemovalCount(removed, kept, left)
