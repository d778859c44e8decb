"""What must always hold of a hierarchy as a whole; asserted by tests and by an idle server in debug mode.

Reads the fields of :class:`~tiered_kv.hierarchy.hierarchy.Hierarchy` that are private to everybody else, and changes
none. What concerns one part alone is in that part's own check.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiered_kv.hierarchy.index import LowerState

if TYPE_CHECKING:
    from tiered_kv.hierarchy.hierarchy import Hierarchy


def check_hierarchy(hierarchy: Hierarchy) -> None:
    """Assert every invariant that ties the parts together, and those of each part."""
    sessions = hierarchy._sessions.values()
    reserved = {slot: session.namespace for session in sessions for slot in session.reserved}
    assert len(reserved) == sum(len(session.reserved) for session in sessions), "a slot was granted twice"
    reserved_bytes = sum(len(s.reserved) * s.slot_bytes for s in sessions)
    assert hierarchy._credits.reserved_bytes == reserved_bytes, "credits drifted"
    entries = hierarchy.index.entries()
    for entry in entries:
        pending = sum(state in (LowerState.QUEUED, LowerState.WRITING) for state in entry.lower[:1])
        assert entry.holds == entry.leases + pending, "holds do not match leases and writes"
        assert not entry.is_gone, "an entry nobody holds"
    hierarchy.index.check_integrity()
    hierarchy._host.check_integrity(reserved)
    hierarchy._lookups.check_integrity(entries)
    hierarchy._lower.check_integrity()
