"""What must always hold of a lower tier's bookkeeping; asserted by tests and by an idle server in debug mode.

Reads the fields of :class:`~tiered_kv.hierarchy.lower.LowerTier` that are private to everybody else, and changes none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiered_kv.hierarchy.index import CLAIMED, Entry, LowerState

if TYPE_CHECKING:
    from tiered_kv.hierarchy.lower import LowerTier


def check_lower(lower: LowerTier) -> None:
    """Assert that counts match the entries and that no write waits for nothing."""
    by_state: dict[LowerState, set[Entry]] = {state: set() for state in LowerState}
    for entry in lower._index.entries():
        by_state[entry.lower[lower.tier]].add(entry)
    entries = lower._index.entries()
    queued, writing = by_state[LowerState.QUEUED], by_state[LowerState.WRITING]
    assert all(map(lower.admission.admits, queued | writing)), "a chunk is written that was not admitted"
    assert lower.used_bytes == sum(entry.lower_bytes[lower.tier] for entry in entries), "used bytes drifted"
    kept = (e for e in entries if e.lower[lower.tier] is not LowerState.DELETING)
    lower.taken.check_integrity((e.record.namespace, e.lower_bytes[lower.tier]) for e in kept)
    assert queued == set(lower._queue), "the queue and the states disagree"
    assert lower._writing == len(writing), "writing count drifted"
    here = by_state[LowerState.PRESENT] | by_state[LowerState.CORRUPT]
    flow, here_bytes = lower._index.flows[lower.tier], sum(entry.lower_bytes[lower.tier] for entry in here)
    assert len(lower.order) == len(here)
    assert (flow.chunks, flow.size_bytes) == (len(here), here_bytes), "what came and left is not what is there"
    assert all(e in lower.order for e in by_state[LowerState.PRESENT]), "a blob can never be evicted"
    lower.order.check_integrity()
    deleting = by_state[LowerState.DELETING]
    assert lower._deleting_bytes == sum(e.lower_bytes[lower.tier] for e in deleting), "deleting bytes drifted"
    assert by_state[LowerState.CORRUPT] <= lower._corrupt <= by_state[LowerState.CORRUPT] | deleting
    assert lower._claims_after_delete <= deleting, "a claim waits for a deletion that ended"
    assert all(parent.lower[lower.tier] in CLAIMED for parent in lower._waiting), "a write waits for a lost parent"
    for entry in queued:
        _check_queued(lower, entry)
    if lower.capacity_bytes is not None:
        limit = max(lower.capacity_bytes, lower._found_bytes)
        assert lower.used_bytes <= limit, "a tier passes its capacity"


def _check_queued(lower: LowerTier, entry: Entry) -> None:
    parent = lower._index.parent(entry)
    if entry.record.chunk_index:
        assert parent is not None and parent.lower[lower.tier] in CLAIMED, "a child is queued without its parent"
    if lower._may_write(entry):
        assert entry in lower._ready, "a write was forgotten"
        is_busy = lower._writing == lower._writes_max or lower._deleting_bytes
        assert is_busy or not lower.takes_writes, "a write waits for nothing"
    elif lower._has_source(entry):
        assert parent is not None and entry in lower._waiting.get(parent, ()), (
            "a write waits for a parent that forgot it"
        )
