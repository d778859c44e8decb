"""One tier below host memory, as the hierarchy sees it: its write queue, its capacity, its order of eviction.

Pure, like the hierarchy it belongs to. Two rules shape it (DESIGN rule 5): a child is written only after its parent is
present in the tier, and dropping a chunk drops its queued descendants; so what a tier holds is closed under prefixes,
up to the holes that failures leave.

Life of a write::

    claim -> QUEUED -> (slot sealed, parent PRESENT, room) -> WRITING -> PRESENT
                |  drop                                          |  failed
                +---------------------> ABSENT <-----------------+          a pending write holds the slot
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque

from tiered_kv.hierarchy.host import HostMemory
from tiered_kv.hierarchy.index import CLAIMED, Entry, HostState, Index, LowerState
from tiered_kv.hierarchy.order import Order
from tiered_kv.hierarchy.plan import Delete, Job, Outcome, Write

WRITING_MAX = 16
"""Writes handed out at once: enough for every thread to have the next one; the rest can still be dropped."""


DEFERRED_MAX = 1 << 16
"""Chunks remembered to be written when the queue has room again; a bound on memory, above what most arenas hold."""


class LowerTier:
    """Bookkeeping of one lower tier.

    Attributes:
        queue_limit_bytes: Host memory that pending writes may hold; set by the hierarchy.
        reserved_bytes: Bytes on the medium that are not ours to evict (foreign files found at start).

    Threads: one owner, the hierarchy. Units: bytes.
    """

    def __init__(
        self,
        tier: int,
        capacity_bytes: int | None,
        index: Index,
        host: HostMemory,
        jobs: list[Job],
        counters: Counter[str],
    ) -> None:
        self.tier = tier
        self.capacity_bytes = capacity_bytes
        self.order = Order(1 + tier, index)  # blobs that may be evicted: PRESENT or CORRUPT
        self.used_bytes = 0
        self.reserved_bytes = 0
        self.queued_bytes = 0
        self.queue_limit_bytes = 0
        self._found_bytes = 0  # used at start, which may be more than the capacity
        self._deleting_bytes = 0
        self._ready: deque[Entry] = deque()  # may be written as soon as there is room; may hold dropped ones
        self._queue: OrderedDict[Entry, None] = OrderedDict()  # QUEUED, oldest claim first
        self._deferred: OrderedDict[Entry, None] = OrderedDict()  # stored while the queue was full; may be evicted
        self._writing = 0
        self._corrupt: set[Entry] = set()  # CORRUPT, or DELETING because of it
        self._claims_after_delete: set[Entry] = set()  # DELETING but stored again
        self._index = index
        self._host = host
        self._jobs = jobs
        self._counters = counters

    @property
    def pending(self) -> int:
        """Chunks put off, queued or being written."""
        return len(self._deferred) + len(self._queue) + self._writing

    @property
    def blob_count(self) -> int:
        """Blobs that can be had from here."""
        return len(self.order)

    # -- stores ------------------------------------------------------------------------------------------------

    def claim(self, entry: Entry) -> None:
        """Queue the entry's write if its parent is or will be here; otherwise it stays in host memory only.

        While the queue is full the write is put off: the chunk may be evicted before its turn comes, if nothing else
        can be.
        """
        state = entry.lower[self.tier]
        if state is LowerState.CORRUPT:
            self.order.remove(entry)
            self._delete(entry)
            state = LowerState.DELETING
        if state is LowerState.DELETING:
            self._claims_after_delete.add(entry)
        if state is not LowerState.ABSENT:
            return
        parent = self._index.parent(entry)
        is_first = entry.record.chunk_index == 0
        if not is_first and (parent is None or parent.lower[self.tier] not in CLAIMED):
            if parent is not None and parent in self._deferred:
                self._defer(entry)
            else:
                self._counters["write_dropped_no_parent"] += 1
        elif self.queued_bytes + entry.slot_bytes > self.queue_limit_bytes:
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

    def refill(self) -> None:
        """Claim what was put off, oldest first, as far as the queue has room again."""
        while self._deferred:
            entry = next(iter(self._deferred))
            if self._index.get(entry.record.key) is entry and entry.host is not HostState.ABSENT:
                if self.queued_bytes + entry.slot_bytes > self.queue_limit_bytes:
                    return
                self._undefer(entry)
                self.claim(entry)
            else:
                self._undefer(entry)
                self._counters["write_dropped_evicted"] += 1

    def start(self, entry: Entry) -> None:
        """The entry's slot is sealed: write it now if its parent is here, else when the parent gets here."""
        if entry.lower[self.tier] is not LowerState.QUEUED:
            return
        if self._may_write(entry):
            self._ready.append(entry)
            self._pump()
            return
        parent = self._index.parent(entry)
        assert parent is not None and parent.lower[self.tier] in CLAIMED, "a queued write waits for nobody"
        parent.waiting = parent.waiting or []
        parent.waiting.append(entry)

    def _may_write(self, entry: Entry) -> bool:
        if entry.lower[self.tier] is not LowerState.QUEUED or entry.host is not HostState.READY:
            return False
        parent = self._index.parent(entry)
        return entry.record.chunk_index == 0 or (parent is not None and parent.lower[self.tier] is LowerState.PRESENT)

    def _pump(self) -> None:
        """Start every write that fits; make room for the next one."""
        while self._ready and self._writing < WRITING_MAX:
            entry = self._ready[0]
            if not self._may_write(entry):  # dropped meanwhile; if it was claimed again, it is queued behind again
                self._ready.popleft()
                continue
            if not self._has_room(entry):
                if self._deleting_bytes:
                    return
                self.drop(entry, "no_room")
                continue
            self._ready.popleft()
            self._begin(entry)

    def _has_room(self, entry: Entry) -> bool:
        """Whether the write fits now; otherwise starts to delete what is in its way, if that can help."""
        if self.capacity_bytes is None:
            return True
        size = entry.slot_bytes
        limit = self.capacity_bytes - self.reserved_bytes
        excess = self.used_bytes + size - limit
        if excess > self._deleting_bytes and size <= limit:
            self.evict(excess - self._deleting_bytes)
        return excess <= 0

    def _begin(self, entry: Entry) -> None:
        size = entry.slot_bytes
        assert entry.slot is not None
        self._index.set_lower(entry, self.tier, LowerState.WRITING)
        del self._queue[entry]
        self._writing += 1
        self.used_bytes += size
        entry.lower_bytes[self.tier] = size
        self._jobs.append(Write(self.tier, entry.record, entry.slot))

    def written(self, entry: Entry, outcome: Outcome) -> None:
        """A write ended."""
        self._writing -= 1
        self.queued_bytes -= entry.slot_bytes
        waiting, entry.waiting = entry.waiting or [], None
        if outcome is Outcome.OK:
            self._index.set_lower(entry, self.tier, LowerState.PRESENT)
            self.order.add(entry)
            self._counters["written"] += 1
            self._ready.extend(waiting)
        else:
            self._counters[f"write_failed_{outcome.value}"] += 1
            self._forget(entry, LowerState.FOREIGN if outcome is Outcome.FOREIGN else LowerState.ABSENT)
            self._drop_descendants(entry)
            if outcome is Outcome.NO_ROOM:
                self.evict(entry.slot_bytes)  # the medium is fuller than we thought: make room for the next one
        self._host.let_go(entry)
        self._pump()

    def drop(self, entry: Entry, reason: str) -> None:
        """Give up a queued write and those of its descendants; their bytes stay in host memory until evicted."""
        if entry.lower[self.tier] is LowerState.QUEUED:
            self._unqueue(entry, reason)
            self._drop_descendants(entry)

    def give_up_store(self, slot_bytes: int) -> Entry | None:
        """Drop the newest queued write whose slot a load can have; returns the chunk, which is idle then."""
        for entry in reversed(self._queue):
            if entry.slot_bytes == slot_bytes and entry.host is HostState.READY and entry.holds == 1:
                self.drop(entry, "for_load")
                return entry
        return None

    def _unqueue(self, entry: Entry, reason: str) -> None:
        self._index.set_lower(entry, self.tier, LowerState.ABSENT)
        del self._queue[entry]
        self.queued_bytes -= entry.slot_bytes
        self._counters[f"write_dropped_{reason}"] += 1
        self._host.let_go(entry)

    def _drop_descendants(self, entry: Entry) -> None:
        entry.waiting = None
        stack = list(entry.children or ()) if entry.lower_children[self.tier] else []
        while stack:
            child = stack.pop()
            if child.lower[self.tier] is not LowerState.QUEUED:
                continue
            self._unqueue(child, "no_parent")
            child.waiting = None
            stack.extend(child.children or ())

    # -- failures ----------------------------------------------------------------------------------------------

    def read_failed(self, entry: Entry, outcome: Outcome) -> None:
        """What a failed promotion leaves behind (DESIGN rule 4)."""
        self._counters[f"read_failed_{outcome.value}"] += 1
        if outcome not in (Outcome.MISSING, Outcome.CORRUPT, Outcome.FOREIGN):
            return
        assert entry.lower[self.tier] is LowerState.PRESENT, "a blob was evicted while it was read"
        self.order.remove(entry)
        if outcome is Outcome.MISSING:
            self._forget(entry, LowerState.ABSENT)
        elif outcome is Outcome.CORRUPT:
            self._corrupt.add(entry)
            self._delete(entry)
        else:
            self._index.set_lower(entry, self.tier, LowerState.FOREIGN)  # its bytes still take their room
        self._drop_descendants(entry)
        self._pump()

    def _forget(self, entry: Entry, state: LowerState) -> None:
        self.used_bytes -= entry.lower_bytes[self.tier]
        entry.lower_bytes[self.tier] = 0
        self._index.set_lower(entry, self.tier, state)

    # -- capacity ----------------------------------------------------------------------------------------------

    def evict(self, size_bytes: int) -> int:
        """Start deleting at least ``size_bytes``, least recently used leaves first; returns what was found."""
        found = 0
        victims: list[Entry] = []
        for entry in self.order:
            if found >= size_bytes:
                break
            if entry.lower_children[self.tier] or entry.host is HostState.PROMOTING:
                continue
            found += entry.lower_bytes[self.tier]
            victims.append(entry)
            self._delete(entry)  # its parent, which comes later in the order, is a leaf now
        for entry in victims:
            self.order.remove(entry)
        self._counters["lower_evicted"] += len(victims)
        return found

    def _delete(self, entry: Entry) -> None:
        size = entry.lower_bytes[self.tier]
        self._deleting_bytes += size
        self._index.set_lower(entry, self.tier, LowerState.DELETING)
        self._jobs.append(Delete(self.tier, entry.record, size))

    def deleted(self, entry: Entry, outcome: Outcome) -> None:
        """A deletion ended. One that failed leaves the blob where it is and costs the write that needed its room."""
        self._deleting_bytes -= entry.lower_bytes[self.tier]
        is_claimed = entry in self._claims_after_delete
        self._claims_after_delete.discard(entry)
        if outcome in (Outcome.OK, Outcome.MISSING):
            self._corrupt.discard(entry)
            self._forget(entry, LowerState.ABSENT)
            if is_claimed and entry.host is not HostState.ABSENT:
                self.claim(entry)
            self._index.remove_if_gone(entry)
        else:
            self._counters["delete_failed"] += 1
            state = LowerState.CORRUPT if entry in self._corrupt else LowerState.PRESENT
            self._index.set_lower(entry, self.tier, state)
            self.order.add(entry)
            if self._ready:
                self.drop(self._ready[0], "no_room")
        self._pump()

    def restore(self, entry: Entry, size_bytes: int) -> None:
        """A blob found at start."""
        self._index.set_lower(entry, self.tier, LowerState.PRESENT)
        entry.lower_bytes[self.tier] = size_bytes
        self.used_bytes += size_bytes
        self.order.add(entry)

    def restored(self, unlisted_bytes: int) -> None:
        """All blobs found at start were told: start deleting what passes the capacity (it may have shrunk)."""
        self.reserved_bytes = unlisted_bytes
        self._found_bytes = self.used_bytes
        self.evict_to_capacity()

    def evict_to_capacity(self) -> None:
        """Start deleting what passes the capacity: after a start, until the medium has really done it."""
        if self.capacity_bytes is None:
            return
        excess = self.used_bytes + self.reserved_bytes - self.capacity_bytes - self._deleting_bytes
        if excess > 0:
            self.evict(excess)

    # -- tests -------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Assert that counts match the entries and that no write waits for nothing."""
        by_state: dict[LowerState, set[Entry]] = {state: set() for state in LowerState}
        for entry in self._index.entries():
            by_state[entry.lower[self.tier]].add(entry)
        entries = self._index.entries()
        queued, writing = by_state[LowerState.QUEUED], by_state[LowerState.WRITING]
        assert self.used_bytes == sum(entry.lower_bytes[self.tier] for entry in entries), "used bytes drifted"
        assert queued == set(self._queue), "the queue and the states disagree"
        assert self._writing == len(writing), "writing count drifted"
        assert len(self.order) == len(by_state[LowerState.PRESENT] | by_state[LowerState.CORRUPT])
        assert all(e in self.order for e in by_state[LowerState.PRESENT]), "a blob can never be evicted"
        assert self.queued_bytes == sum(entry.slot_bytes for entry in queued | writing), "queued bytes drifted"
        assert all(entry.slot is not None for entry in queued | writing), "a pending write has no slot"
        self.order.check_integrity()
        known = {entry for entry in self._deferred if self._index.get(entry.record.key) is entry}
        assert known == {entry for entry in entries if entry.is_unwritten} or self.tier, "a put-off write is forgotten"
        deleting = by_state[LowerState.DELETING]
        assert self._deleting_bytes == sum(e.lower_bytes[self.tier] for e in deleting), "deleting bytes drifted"
        assert by_state[LowerState.CORRUPT] <= self._corrupt <= by_state[LowerState.CORRUPT] | deleting
        assert self._claims_after_delete <= deleting, "a claim waits for a deletion that ended"
        for entry in queued:
            self._check_queued(entry)
        if self.capacity_bytes is not None:
            limit = max(self.capacity_bytes, self._found_bytes)
            assert self.used_bytes <= limit, "a tier passes its capacity"

    def _check_queued(self, entry: Entry) -> None:
        parent = self._index.parent(entry)
        if entry.record.chunk_index:
            assert parent is not None and parent.lower[self.tier] in CLAIMED, "a child is queued without its parent"
        if self._may_write(entry):
            assert entry in self._ready, "a write was forgotten"
            assert self._writing == WRITING_MAX or self._deleting_bytes, "a write waits for nothing"
        elif entry.host is HostState.READY:
            assert parent is not None and entry in (parent.waiting or ()), "a write waits for a parent that forgot it"
