"""What ``stat`` shows of a hierarchy: bytes and counts now. Pure. Called by the hierarchy."""

from __future__ import annotations

from collections.abc import Collection

from tiered_kv.hierarchy.credits import Session
from tiered_kv.hierarchy.host import HostMemory
from tiered_kv.hierarchy.index import Index
from tiered_kv.hierarchy.stack import LowerTiers


def usage(index: Index, host: HostMemory, lower: LowerTiers, sessions: Collection[Session]) -> dict[str, int]:
    """Figures by name; those of lower tiers begin with the tier's number."""
    return {
        "chunks": len(index),
        "host_assigned_bytes": host.slots.assigned_bytes,
        "host_capacity_bytes": host.slots.host_bytes,
        "host_ready_chunks": host.ready_count,
        "leased_bytes": host.leased_bytes,
        "reserved_slots": sum(len(session.reserved) for session in sessions),
        "sessions": len(sessions),
        **lower.figures(),
    }
