"""Removing chunks because an operator said so, not because room is needed.

Pure, like the hierarchy that calls it. What is in use stays, and what was removed is an ordinary miss from then on.
"""

from __future__ import annotations

from collections.abc import Sequence

from tiered_kv.hierarchy.host import HostMemory
from tiered_kv.hierarchy.index import Index
from tiered_kv.hierarchy.lower import LowerTier


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
