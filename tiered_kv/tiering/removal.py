"""Removing chunks because an operator said so, not because room is needed.

Pure, like tiering that calls it. What is in use stays, and what was removed is an ordinary miss from then on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from tiered_kv.tiering.index import Entry, HostState, Index
from tiered_kv.tiering.key_map import KeyMap
from tiered_kv.tiering.types import Removal, RemovalCount

IsMeant = Callable[[Entry], bool]
"""Whether an erasure means a chunk, by what is known of it."""

ByDepth = defaultdict[int, list[Entry]]
"""Entries by their position in their prefix."""

ERASED_AT_ONCE = 200_000
"""Each is a job that waits for its medium: 40 MB."""


class RemovableTier(Protocol):
    """What removal needs of a tier, whichever it is."""

    def contains(self, entry: Entry) -> bool:
        """Whether the chunk is here or is going to be."""

    def remove(self, entry: Entry, *, leaves_hole: bool) -> Removal:
        """Remove a chunk unless it is in use, or chunks that depend on it would be left behind a hole."""


STEP: Final = 64
REMOVED_AT_ONCE: Final = 16
"""Chunks that one step of a removal looks at, or removes: up to 0.3 ms."""


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
    wanted = None if keys is None else dict.fromkeys(keys)
    by_depth: ByDepth = defaultdict(list)
    for number, entry in enumerate(index.walk() if wanted is None else map(index.get, wanted), 1):
        if entry is not None and namespace in (b"", entry.record.namespace):
            by_depth[entry.record.chunk_index].append(entry)
        if not number % STEP:
            yield None
    removed = kept = 0
    for number, entry in enumerate(_deepest_first(by_depth), 1):
        if index.get(entry.record.key) is entry:
            end = tier.remove(entry, leaves_hole=leaves_holes)
            removed += end is Removal.REMOVED
            kept += end is Removal.KEPT
        if not number % REMOVED_AT_ONCE:
            yield None
    yield RemovalCount(removed, kept, 0 if wanted is None else len(wanted) - removed - kept)


def erasing(
    index: Index,
    tier: RemovableTier,
    cancel_writes: Callable[[Entry], None],
    forget: Callable[[Entry], None],
    judge_on_arrival: Callable[[Entry, IsMeant], None],
    namespace: bytes,
    is_meant: IsMeant,
) -> Iterator[RemovalCount | None]:
    """Remove what is meant, and everything behind it, from host memory or from one secondary tier.

    What is meant: what was stored under a tag, or by somebody. What lies behind a chunk was computed from it, or from
    what was loaded in its place. Of a chunk that is just being read from a shared tier only its header tells that.

    In no tier is any of it written that was not begun. A chunk stays while one behind it is in use, in whatever tier:
    without it that one could not be found any more. In steps, between which anything may happen: what is stored
    meanwhile may stay.

    The index is looked at once, in parts, however many counts it takes to remove what was found then; and once more
    after that if there were several, for what came in all that time, and for what could not be deleted.

    Args:
        cancel_writes: Drops a chunk's writes to all tiers that were not begun.
        forget: Forgets that shared tiers have a chunk. Others erase those, and who stores it after that is its first
            owner: it must not be found under this one's tag.
        judge_on_arrival: Has a chunk that is being read dropped when it comes, with all behind it, if it is meant by
            then.
        namespace: Empty: of every namespace.

    Yields:
        None after a step, and counts: ``left`` were not looked at because ``ERASED_AT_ONCE`` are going, go on with the
        same steps. The last one has none left. ``kept`` is complete only there.
    """
    removed = parts = 0
    while True:
        found = yield from _looking(index, tier, cancel_writes, judge_on_arrival, namespace, is_meant)
        parts_before, kept = parts, 0
        staying: set[Entry] = set()
        for number, entry in enumerate(_deepest_first(found.by_depth), 1):
            if not number % REMOVED_AT_ONCE:
                yield None
            if removed == ERASED_AT_ONCE and tier.contains(entry):
                yield RemovalCount(removed, kept, max(found.here, 1))
                removed, parts = 0, parts + 1
            found.here -= bool(found.was_here.pop(entry.record.key))
            if index.get(entry.record.key) is not entry:
                continue  # gone meanwhile
            cancel_writes(entry)  # somebody may have asked for it since
            is_needed = any(child in staying for child in entry.children)
            if is_needed:
                end = Removal.KEPT if tier.contains(entry) else Removal.ABSENT
            else:
                end = tier.remove(entry, leaves_hole=False)
            if is_needed or end is Removal.KEPT or entry.is_busy:
                staying.add(entry)
            else:
                forget(entry)
            removed += end is Removal.REMOVED
            kept += end is Removal.KEPT
        if parts == parts_before:
            yield RemovalCount(removed, kept, 0)
            return


@dataclass(slots=True)
class _Found:
    """What one look at the index found.

    Attributes:
        was_here: Whether the tier had it then.
        here: How many it had of those that are in ``was_here``.
    """

    by_depth: ByDepth = field(default_factory=lambda: defaultdict(list))
    was_here: KeyMap[bool] = field(default_factory=KeyMap)
    here: int = 0


def _looking(
    index: Index,
    tier: RemovableTier,
    cancel_writes: Callable[[Entry], None],
    judge_on_arrival: Callable[[Entry, IsMeant], None],
    namespace: bytes,
    is_meant: IsMeant,
) -> Generator[None, None, _Found]:
    """Look at the index for what is meant and what lies behind it; drops its writes."""
    found = _Found()
    for number, entry in enumerate(index.walk(), 1):
        pending: list[Entry] = []
        if namespace in (b"", entry.record.namespace):
            if is_meant(entry):
                pending.append(entry)
            elif entry.host is HostState.PROMOTING:
                judge_on_arrival(entry, is_meant)
        while pending:
            one = pending.pop()
            if one.record.key not in found.was_here:
                found.was_here[one.record.key] = is_here = tier.contains(one)
                found.here += is_here
                found.by_depth[one.record.chunk_index].append(one)
                cancel_writes(one)
                pending.extend(one.children)
                if not len(found.was_here) % STEP:
                    yield
        if not number % STEP:
            yield
    return found


def _deepest_first(by_depth: ByDepth) -> Iterator[Entry]:
    """Take the entries out one by one: a million that are let go of at once take 0.1 to 0.2 s."""
    for depth in sorted(by_depth, reverse=True):
        entries = by_depth.pop(depth)
        while entries:
            yield entries.pop()
