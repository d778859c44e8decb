"""How much is remembered of a shared tier: others fill it too, so there is no end to what may be found there.

Called by ``lower.py`` when a blob was written or found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiered_kv.hierarchy.index import Index, LowerState

if TYPE_CHECKING:
    from tiered_kv.hierarchy.lower import LowerTier

HINTS_MAX = 1 << 18
"""Blobs of a shared tier that are remembered: 4 TiB of 16 MiB chunks; what is forgotten is found again by a search."""


def forget_oldest(lower: LowerTier, index: Index) -> None:
    """Keep the number of remembered blobs of a shared tier bounded: leaves first, as everywhere."""
    while lower.is_shared and len(lower.order) > HINTS_MAX:
        entry = next((e for e in lower.order if not e.lower_children[lower.tier] and not lower.is_used(e)), None)
        if entry is None:
            return
        lower.order.remove(entry)
        index.flows.left(entry, lower.tier, "forgotten")
        lower.forget(entry, LowerState.ABSENT)
        index.remove_if_gone(entry)
