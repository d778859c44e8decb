"""Removing chunks because an operator said so, not because room is needed.

Pure, like the hierarchy that calls it. What is in use stays, and what was removed is an ordinary miss from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tiered_kv.hierarchy.host import HostMemory
from tiered_kv.hierarchy.index import CLAIMED, Entry, HostState, Index
from tiered_kv.hierarchy.lower import LowerTier

ERASED_AT_ONCE = 20_000
"""The owner answers nobody meanwhile: half a second, where 300,000 at once took four."""


def remove(
    index: Index, tier: HostMemory | LowerTier, namespace: bytes, keys: Sequence[bytes] | None, *, leaves_holes: bool
) -> tuple[int, int, int]:
    """Remove chunks of a namespace from host memory or from a lower tier that is not shared, the deepest first.

    Args:
        namespace: Empty: of every namespace.
        keys: None: all of the namespace.
        leaves_holes: Also those on which chunks depend that stay in the lower tier; host memory has no such rule.

    Returns:
        How many are going, how many stay because they are in use or needed, and how many are not there.
    """
    found = index.entries() if keys is None else [index.get(key) for key in dict.fromkeys(keys)]
    entries = [entry for entry in found if entry is not None and namespace in (b"", entry.record.namespace)]
    removed = kept = 0
    for entry in sorted(entries, key=lambda entry: -entry.record.chunk_index):
        is_going = tier.remove(entry) if isinstance(tier, HostMemory) else tier.remove(entry, leaves_hole=leaves_holes)
        removed += is_going is True
        kept += is_going is False
    return removed, kept, 0 if keys is None else len(found) - removed - kept


def erase(
    index: Index,
    tier: HostMemory | LowerTier,
    lower: Iterable[LowerTier],
    namespace: bytes,
    is_meant: Callable[[Entry], bool],
) -> tuple[int, int, int]:
    """Remove what is meant, and everything behind it, from host memory or from one lower tier.

    What is meant: what was stored under a tag, or by somebody. What lies behind a chunk was computed from it, or from
    what was loaded in its place.

    In no tier is any of it written that was not begun. A chunk stays while one behind it is in use, in whatever tier:
    without it that one could not be found any more.

    Args:
        lower: All lower tiers.
        namespace: Empty: of every namespace.

    Returns:
        How many are going, how many stay because they or some behind them are in use, and how many were not looked at
        because ``ERASED_AT_ONCE`` are going: then it is to be said again, and who stays is told by the last answer.
    """
    doomed = _behind(e for e in index.entries() if namespace in (b"", e.record.namespace) and is_meant(e))
    for entry in doomed:
        for one in lower:
            one.disclaim(entry)
    removed = kept = 0
    staying: set[Entry] = set()
    deepest_first = sorted(doomed, key=lambda entry: -entry.record.chunk_index)
    for number, entry in enumerate(deepest_first):
        if removed == ERASED_AT_ONCE:
            return removed, kept, sum(_is_in(tier, one) for one in deepest_first[number:])
        is_needed = any(child in staying for child in entry.children or ())
        if is_needed:
            is_going = False if _is_in(tier, entry) else None
        elif isinstance(tier, HostMemory):
            is_going = tier.remove(entry)
        else:
            is_going = tier.remove(entry, leaves_hole=False)
        if is_needed or is_going is False or entry.is_busy:
            staying.add(entry)
        removed += is_going is True
        kept += is_going is False
    return removed, kept, 0


def _behind(entries: Iterable[Entry]) -> set[Entry]:
    """These chunks and all that depend on them."""
    found: set[Entry] = set()
    pending = list(entries)
    while pending:
        entry = pending.pop()
        if entry not in found:
            found.add(entry)
            pending.extend(entry.children or ())
    return found


def _is_in(tier: HostMemory | LowerTier, entry: Entry) -> bool:
    if isinstance(tier, HostMemory):
        return entry.host is not HostState.ABSENT
    return entry.lower[tier.tier] in CLAIMED
