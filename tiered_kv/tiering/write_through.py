"""Writes to the first secondary tier: their bytes come from the slots of host memory, or from rows that engines lent.

A queued write holds its chunk in its slot. How much may be held so is bounded; past it, and while the tier takes no
writes, writes are deferred: the chunk is remembered and may be evicted before its turn comes, if nothing else can be.
A lent row takes no host memory and is never deferred: its engine waits for it, and is told when the write is over.
Called by ``tiers.py`` and by the tier it feeds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from tiered_kv.tiering.eviction_policy import EvictionPolicy
from tiered_kv.tiering.host_tier import HostTier
from tiered_kv.tiering.index import CLAIMED, BlobState, Entry, HostState, Index
from tiered_kv.tiering.quotas import Quotas
from tiered_kv.tiering.secondary_tier import SecondaryTier
from tiered_kv.tiering.stats import Outbox
from tiered_kv.tiering.types import HOST, Job, RowUse, TierSpec, Write, WriteRow
from tiered_kv.tiering.upload import Upload

DEFERRED_MAX = 1 << 16
"""Chunks remembered to be written when the queue has room again; a bound on memory, above what most arenas hold."""

REFILLED_AT_ONCE = 64
"""Of these, in one turn: a tier that is back after an hour has room for as many as the queue holds."""

WRITES_MAX = 16
"""Writes handed out at once: enough for every thread to have the next one; the rest can still be dropped."""


WRITABLE = (HostState.SEALING, HostState.READY)
"""States of a chunk whose bytes the server is sure to have soon. One that is being read may yet fail to come, and is
offered once it is here (:meth:`WriteThrough.keep_promoted`)."""


class WriteThrough:
    """The source of the first secondary tier; see :class:`~tiered_kv.tiering.secondary_tier.Source`.

    Attributes:
        tier: The tier that it feeds.
        queued_bytes: Host memory that pending writes hold. Written here only.
        rows: Chunks whose bytes come from a lent row, until their write is over. Written here only.
        rows_over: Uses of rows that are over, and whether the chunk is there now, until tiering takes them.
        is_refilling: :meth:`refill` has more to do at once.

    Threads: one owner, tiering. Units: bytes.
    """

    waiting_first = False

    def __init__(
        self,
        spec: TierSpec,
        index: Index,
        host: HostTier,
        quotas: Quotas,
        policy: type[EvictionPolicy],
        outbox: Outbox,
        *,
        queue_limit_bytes: int,
        next_source: Upload | None,
    ) -> None:
        """Start with an empty tier.

        Args:
            queue_limit_bytes: Host memory that pending writes may hold.
            next_source: Takes its bytes from this tier.
        """
        self.queued_bytes = 0
        self.rows: dict[Entry, RowUse] = {}
        self.rows_over: list[tuple[Entry, RowUse, bool]] = []
        self.is_refilling = False
        self._queue_limit_bytes = queue_limit_bytes
        self._deferred: OrderedDict[Entry, None] = OrderedDict()  # stored while the queue was full; may be evicted
        self._index = index
        self._host = host
        self._counters = outbox.counters
        self.tier = SecondaryTier(HOST + 1, spec, self, index, quotas, policy, outbox, WRITES_MAX, next_source)

    # -- asked by the tier -------------------------------------------------------------------------------------

    @property
    def is_available(self) -> bool:
        return True

    def has_bytes(self, entry: Entry) -> bool:
        return entry in self.rows or entry.host is HostState.READY

    def may_follow(self, entry: Entry, parent: Entry) -> bool:
        return entry in self.rows and parent in self.rows  # ``engine/row_writes.py`` keeps their order

    def size_bytes(self, entry: Entry) -> int:
        return entry.slot_bytes

    def job(self, entry: Entry) -> Job:
        if (use := self.rows.get(entry)) is not None:
            return WriteRow(self.tier.number, entry.record, use)
        assert entry.slot is not None
        return Write(self.tier.number, entry.record, entry.slot, self.tier.unconfirmed_before(entry))

    def drop_counter(self, entry: Entry) -> str:
        return "row_dropped" if entry in self.rows else "write_dropped"

    def release(self, entry: Entry) -> None:
        if entry in self.rows:
            self._row_over(entry)
        else:
            self.queued_bytes -= entry.slot_bytes
        self._host.let_go(entry)
        if entry.tail_tokens and entry.host is HostState.READY and not entry.holds:
            self._host.give(self._host.evict(entry))  # host memory was letting go of it (``tails.py``)

    def queue_again(self, chunks: Sequence[Entry]) -> bool:
        size_bytes = sum(entry.slot_bytes for entry in chunks)
        if self.queued_bytes + size_bytes > self._queue_limit_bytes:
            return False
        self.queued_bytes += size_bytes
        for entry in chunks:
            if entry in self._deferred:
                self._undefer(entry)
            self._host.hold(entry)
        return True

    def _row_over(self, entry: Entry) -> None:
        is_there = entry.blobs[self.tier.number] is BlobState.PRESENT
        self.rows_over.append((entry, self.rows.pop(entry), is_there))

    def put_back(self, entry: Entry) -> None:
        self.tier.release_bytes(entry, BlobState.ABSENT)
        self.release(entry)
        self._defer_prefix(entry)

    # -- writes ------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """Chunks deferred, queued or being written."""
        return len(self._deferred) + self.tier.backlog

    @property
    def backlog(self) -> int:
        """The same: a drain waits for all of them."""
        return self.pending

    def store_row(self, entry: Entry, use: RowUse) -> None:
        """Write a chunk that is in no tier from a lent row, now or once its bad blob is deleted; not later."""
        assert entry not in self.rows
        self.rows[entry] = use
        self.tier.enqueue_after_delete(entry)
        if entry.blobs[self.tier.number] is not BlobState.DELETING:
            self._enqueue_row(entry)

    def _enqueue_row(self, entry: Entry) -> None:
        parent = self._index.parent(entry)
        if entry.record.chunk_index and (parent is None or not self.tier.is_coming(parent)):
            self._counters["row_dropped_no_parent"] += 1
        elif entry.blobs[self.tier.number] is BlobState.ABSENT and self.tier.takes_writes:
            self.tier.queue(entry)
            self._host.hold(entry)
            self.tier.start_or_wait(entry)
            self.tier.start_writes()
            return
        else:
            self._counters["row_dropped_not_now"] += 1
        self._row_over(entry)

    def take_back_row(self, entry: Entry) -> None:
        """The engine wants its row back: its write is dropped, unless it was begun."""
        if entry.blobs[self.tier.number] is BlobState.QUEUED:
            self.tier.drop(entry, "taken_back")
        elif entry.blobs[self.tier.number] is not BlobState.WRITING:
            self._row_over(entry)

    def not_deleted(self, entry: Entry) -> None:
        if entry in self.rows:  # it waited for that; a chunk in a slot goes on without
            self._counters["row_dropped_not_now"] += entry.blobs[self.tier.number] is BlobState.CORRUPT
            self._row_over(entry)

    def enqueue_write(self, entry: Entry) -> None:
        if entry in self.rows:
            if entry.blobs[self.tier.number] is BlobState.ABSENT:  # its bad blob is gone now
                self._enqueue_row(entry)
            return
        if entry.host not in WRITABLE or entry.tail_tokens or entry in self._index.damaged:
            return
        is_new = entry.blobs[self.tier.number] is BlobState.ABSENT and entry not in self._deferred
        if not self.tier.admission.admits(entry):
            self.tier.admission.declined += is_new
            return
        self.tier.admission.admitted += is_new
        self._queue_or_defer(entry)

    def enqueue_if_used(self, entry: Entry) -> None:
        """The chunk is used: a write that was dropped gets another chance."""
        self.enqueue_write(entry)

    def enqueue_recovered(self, entry: Entry) -> None:
        """Chunks that were found at start have no slot: there is nothing to write."""

    def writes_tail(self, entry: Entry, *, may_wait: bool) -> bool:
        """Queue the write of a tail that is idle; says whether it was.

        It begins with the next ``start_writes`` of the tier: not while somebody looks for a slot, because it may have
        other blobs evicted.

        Args:
            may_wait: Defer it where there is no room in the queue.
        """
        is_absent = entry.blobs[self.tier.number] is BlobState.ABSENT
        if not is_absent or not self.tier.admission.admits(entry) or entry in self._deferred:
            return False
        if self.tier.takes_writes and self.queued_bytes + entry.slot_bytes <= self._queue_limit_bytes:
            self._queue(entry)
            self.tier.start_or_wait(entry)
            return True
        if may_wait:
            self._defer(entry)
        return entry in self._deferred

    def _queue_or_defer(self, entry: Entry) -> None:
        tier = self.tier
        tier.enqueue_after_delete(entry)
        if entry.blobs[tier.number] is not BlobState.ABSENT:
            return
        parent = self._index.parent(entry)
        is_first = entry.record.chunk_index == 0
        if not is_first and (parent is None or not tier.is_coming(parent)):
            if parent is not None and parent in self._deferred:
                self._defer_prefix(entry)
            else:
                self._counters["write_dropped_no_parent"] += 1
        elif not tier.takes_writes or self.queued_bytes + entry.slot_bytes > self._queue_limit_bytes:
            self._defer_prefix(entry)
        else:
            self._enqueue(entry)

    def _enqueue(self, entry: Entry) -> None:
        if entry in self._deferred:
            self._undefer(entry)
        self._queue(entry)
        if entry.host is HostState.READY:
            self.sealed(entry)

    def _queue(self, entry: Entry) -> None:
        self.tier.queue(entry)
        self.queued_bytes += entry.slot_bytes
        self._host.hold(entry)

    def _defer(self, entry: Entry) -> None:
        if entry in self._deferred or entry in self._index.damaged:
            return
        if len(self._deferred) >= DEFERRED_MAX:
            self._counters["write_dropped_queue_full"] += 1
            return
        self._counters["write_deferred"] += 1
        self._deferred[entry] = None
        self._host.set_unwritten(entry, True)

    def _defer_prefix(self, entry: Entry) -> None:
        """Defer a chunk and, after it, the queued ones behind it: those waited until its bad blob was deleted.

        One behind it that was deferred before is deferred anew when its turn comes (:meth:`_queue_or_defer`).
        """
        self._defer(entry)
        for chunk in self.tier.drop_descendants(entry, lambda one: one not in self.rows):
            self._defer(chunk)

    def _undefer(self, entry: Entry) -> None:
        del self._deferred[entry]
        self._host.set_unwritten(entry, False)

    def keep_promoted(self, entry: Entry) -> None:
        """Write a chunk that was promoted from further below, and those behind it that were promoted before it."""
        number = self.tier.number
        stack = [entry]
        while stack:
            chunk = stack.pop()
            if chunk.host is not HostState.READY or chunk.blobs[number] is not BlobState.ABSENT:
                continue
            if not self.tier.admission.admits(chunk):
                continue
            parent = self._index.parent(chunk)
            if chunk.record.chunk_index == 0 or (parent is not None and parent.blobs[number] in CLAIMED):
                self.enqueue_write(chunk)
                stack.extend(chunk.children)

    def cancel_write(self, entry: Entry) -> None:
        if entry in self._deferred:
            self._undefer(entry)
            self._counters["write_dropped_erased"] += 1
        self.tier.cancel_write(entry)
        if entry in self.rows and entry.blobs[self.tier.number] is not BlobState.WRITING:
            self._counters["row_dropped_erased"] += 1  # it waited for the deletion of a bad blob
            self._row_over(entry)

    def refill(self) -> None:
        """Queue some of what was deferred, oldest first, as far as the queue has room again."""
        self.is_refilling = False
        for _ in range(min(len(self._deferred), REFILLED_AT_ONCE)):
            if not self.tier.takes_writes:
                return
            entry = next(iter(self._deferred))
            if self._index.get(entry.record.key) is entry and entry.host in WRITABLE:
                if self.queued_bytes + entry.slot_bytes > self._queue_limit_bytes:
                    return
                self._undefer(entry)
                self._queue_or_defer(entry)
            else:
                self._undefer(entry)
                self._counters["write_dropped_evicted"] += 1
        self.is_refilling = bool(self._deferred) and self.tier.takes_writes

    def sealed(self, entry: Entry) -> None:
        """The entry's slot is sealed: a write that waits for it may begin."""
        if entry.blobs[self.tier.number] is BlobState.QUEUED and entry not in self.rows:
            self.tier.start_or_wait(entry)
            self.tier.start_writes()

    def give_up_store(self, slot_bytes: int, may_go: Callable[[Entry], bool]) -> Entry | None:
        """Drop the newest queued write whose slot a load can have; returns the chunk.

        It is idle then; a tail has left its slot, which is free.
        """
        for entry in self.tier.newest_queued():
            is_fit = entry.slot_bytes == slot_bytes and entry.host is HostState.READY and entry.holds == 1
            if is_fit and may_go(entry):
                self.tier.drop(entry, "for_load")
                return entry
        return None

    def found(self, entry: Entry) -> None:
        self.tier.found(entry)

    def check_integrity(self) -> None:
        """Assert the tier's invariants, and that bytes and slots match the pending writes."""
        number = self.tier.number
        self.tier.check_integrity()
        entries = self._index.entries()
        pending = [
            e for e in entries if e.blobs[number] in (BlobState.QUEUED, BlobState.WRITING) and e not in self.rows
        ]
        assert self.queued_bytes == sum(entry.slot_bytes for entry in pending), "queued bytes drifted"
        assert all(entry.slot is not None for entry in pending), "a pending write has no slot"
        pending_rows = {e for e in self.rows if e.blobs[number] in (BlobState.QUEUED, BlobState.WRITING)}
        assert pending_rows <= set(entries), "a row's write lost its chunk"
        known = {entry for entry in self._deferred if self._index.get(entry.record.key) is entry}
        assert all(map(self.tier.admission.admits, known)), "a write is deferred that was not admitted"
        assert known == {entry for entry in entries if entry.is_unwritten}, "a deferred write is forgotten"
