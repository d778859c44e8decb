"""The first lower tier: written through from the slots of host memory.

A queued write holds its chunk in its slot. How much may be held so is bounded; past it, and while the tier takes no
writes, writes are put off: the chunk is remembered and may be evicted before its turn comes, if nothing else can be.
Called by the hierarchy.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable

from tiered_kv.hierarchy.host import HostMemory
from tiered_kv.hierarchy.index import CLAIMED, Entry, HostState, Index, LowerState
from tiered_kv.hierarchy.lower import LowerTier
from tiered_kv.hierarchy.plan import Job, Write

DEFERRED_MAX = 1 << 16
"""Chunks remembered to be written when the queue has room again; a bound on memory, above what most arenas hold."""


class FrontTier(LowerTier):
    """Bookkeeping of the tier right below host memory.

    Attributes:
        queue_limit_bytes: Host memory that pending writes may hold; set by the hierarchy.
    """

    def __init__(
        self, capacity_bytes: int | None, index: Index, host: HostMemory, jobs: list[Job], counters: Counter[str]
    ):
        super().__init__(0, capacity_bytes, index, jobs, counters)
        self.queue_limit_bytes = 0
        self._deferred: OrderedDict[Entry, None] = OrderedDict()  # stored while the queue was full; may be evicted
        self._host = host

    @property
    def pending(self) -> int:
        """Chunks put off, queued or being written."""
        return len(self._deferred) + len(self._queue) + self._writing

    @property
    def backlog(self) -> int:
        return self.pending

    def claim(self, entry: Entry) -> None:
        if entry.host is HostState.ABSENT:
            return
        is_new = entry.lower[self.tier] is LowerState.ABSENT and entry not in self._deferred
        if not self.admission.admits(entry):
            self.admission.declined += is_new
            return
        self.admission.admitted += is_new
        self._queue_or_defer(entry)

    def _queue_or_defer(self, entry: Entry) -> None:
        self._claim_after_delete(entry)
        if entry.lower[self.tier] is not LowerState.ABSENT:
            return
        parent = self._index.parent(entry)
        is_first = entry.record.chunk_index == 0
        if not is_first and (parent is None or parent.lower[self.tier] not in CLAIMED):
            if parent is not None and parent in self._deferred:
                self._defer(entry)
            else:
                self._counters["write_dropped_no_parent"] += 1
        elif not self.takes_writes or self.queued_bytes + entry.slot_bytes > self.queue_limit_bytes:
            self._defer(entry)
        else:
            self._enqueue(entry)

    def _enqueue(self, entry: Entry) -> None:
        if entry in self._deferred:
            self._undefer(entry)
        self._index.set_lower(entry, self.tier, LowerState.QUEUED)
        self._queue[entry] = None
        self.queued_bytes += entry.slot_bytes
        self._host.hold(entry)
        if entry.host is HostState.READY:
            self.start(entry)

    def _defer(self, entry: Entry) -> None:
        if entry in self._deferred:
            return
        if len(self._deferred) >= DEFERRED_MAX:
            self._counters["write_dropped_queue_full"] += 1
            return
        self._counters["write_deferred"] += 1
        self._deferred[entry] = None
        self._host.set_unwritten(entry, True)

    def _undefer(self, entry: Entry) -> None:
        del self._deferred[entry]
        self._host.set_unwritten(entry, False)

    def disclaim(self, entry: Entry) -> None:
        if entry in self._deferred:
            self._undefer(entry)
            self._counters["write_dropped_erased"] += 1
        super().disclaim(entry)

    def refill(self) -> None:
        """Claim what was put off, oldest first, as far as the queue has room again."""
        while self._deferred and self.takes_writes:
            entry = next(iter(self._deferred))
            if self._index.get(entry.record.key) is entry and entry.host is not HostState.ABSENT:
                if self.queued_bytes + entry.slot_bytes > self.queue_limit_bytes:
                    return
                self._undefer(entry)
                self._queue_or_defer(entry)
            else:
                self._undefer(entry)
                self._counters["write_dropped_evicted"] += 1

    def start(self, entry: Entry) -> None:
        """The entry's slot is sealed: a write that waits for it may begin."""
        if entry.lower[self.tier] is LowerState.QUEUED:
            self._start_or_wait(entry)
            self._pump()

    def give_up_store(self, slot_bytes: int, may_go: Callable[[Entry], bool]) -> Entry | None:
        """Drop the newest queued write whose slot a load can have; returns the chunk, which is idle then."""
        for entry in reversed(self._queue):
            is_fit = entry.slot_bytes == slot_bytes and entry.host is HostState.READY and entry.holds == 1
            if is_fit and may_go(entry):
                self.drop(entry, "for_load")
                return entry
        return None

    def _has_source(self, entry: Entry) -> bool:
        return entry.host is HostState.READY

    def _size_bytes(self, entry: Entry) -> int:
        return entry.slot_bytes

    def _begin(self, entry: Entry) -> None:
        assert entry.slot is not None
        self._jobs.append(Write(self.tier, entry.record, entry.slot))

    def _end(self, entry: Entry) -> None:
        self.queued_bytes -= entry.slot_bytes
        self._host.let_go(entry)

    def _put_off(self, entry: Entry) -> None:
        self.forget(entry, LowerState.ABSENT)
        behind = self._drop_descendants(entry)
        self._end(entry)
        for chunk in (entry, *behind):
            self._defer(chunk)

    def check_integrity(self) -> None:
        super().check_integrity()
        entries = self._index.entries()
        pending = [e for e in entries if e.lower[self.tier] in (LowerState.QUEUED, LowerState.WRITING)]
        assert self.queued_bytes == sum(entry.slot_bytes for entry in pending), "queued bytes drifted"
        assert all(entry.slot is not None for entry in pending), "a pending write has no slot"
        known = {entry for entry in self._deferred if self._index.get(entry.record.key) is entry}
        assert all(map(self.admission.admits, known)), "a write is put off that was not admitted"
        assert known == {entry for entry in entries if entry.is_unwritten}, "a put-off write is forgotten"
