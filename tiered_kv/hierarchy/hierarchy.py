"""The state machine that decides which chunk is where: lookups, leases, stores, promotions, evictions.

Pure: no I/O, no clock, no threads. Every public method changes state and leaves jobs and updates to be collected
with :meth:`Hierarchy.take_jobs` and :meth:`Hierarchy.take_updates`; the engine performs the jobs and reports how each
ended. One owner; nothing here waits. Host memory is in ``host.py``, tiers below it in ``lower.py``, leases in
``lookups.py``, empty slots held by sessions in ``credits.py``; this file is where they meet.

Life of a chunk::

    commit -> host SEALING -> READY -> lower QUEUED -> WRITING -> PRESENT -> (host evicted) -> PROMOTING -> READY
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from tiered_kv.hierarchy.credits import Credits, Session
from tiered_kv.hierarchy.host import HostMemory
from tiered_kv.hierarchy.index import Entry, HostState, Index, LowerState
from tiered_kv.hierarchy.lookups import Lookup, Lookups
from tiered_kv.hierarchy.lower import LowerTier
from tiered_kv.hierarchy.plan import (
    ChunkRecord,
    CreditRecall,
    Grow,
    Job,
    Outcome,
    Read,
    Seal,
    SlotId,
    Update,
    Write,
)
from tiered_kv.hierarchy.slots import slab_of


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the hierarchy, as shares of host memory.

    Attributes:
        leased_share: Host memory that lookups may hold at once.
        request_share: Host memory one lookup may hold.
        credit_share: Host memory that empty granted slots may hold, all sessions together; up to twice as much if that
            is what it takes to give every session one.
        write_queue_share: Host memory that may be held for its write to a lower tier; past it writes are put off, and
            chunks that are evicted before their turn are never written.
    """

    leased_share: float = 0.5
    request_share: float = 0.375
    credit_share: float = 0.25
    write_queue_share: float = 0.5


class Hierarchy:
    """Where every chunk is and what moves next.

    Threads: one owner. Units: bytes.
    """

    def __init__(self, host_bytes: int, lower_capacities: Sequence[int | None], limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.index = Index(len(lower_capacities))
        self.counters: Counter[str] = Counter()
        self._jobs: list[Job] = []
        self._host = HostMemory(host_bytes, self.index, self._jobs, self.counters)
        self.slots = self._host.slots
        self._lower = [
            LowerTier(tier, capacity, self.index, self._host, self._jobs, self.counters)
            for tier, capacity in enumerate(lower_capacities)
        ]
        for lower in self._lower:
            lower.queue_limit_bytes = int(host_bytes * self.limits.write_queue_share)
        self._credits = Credits(self._host, self.limits.credit_share)
        self._sessions: dict[int, Session] = {}
        self._lookups = Lookups(self._host, self.counters)
        self._early_reads: dict[int, list[Read]] = {}  # by the slab whose memory they wait for
        self._recalls: list[CreditRecall] = []
        self._last_session = 0
        self._used: deque[ChunkRecord] = deque()

    # -- collected by the engine -------------------------------------------------------------------------------

    def take_jobs(self) -> list[Job]:
        """Jobs to perform now, in order; each ends in exactly one call of the method that reports it.

        Also shares out what became free since the last call; updates are complete only after it.
        """
        self._share_out()
        jobs = list(self._jobs)
        self._jobs.clear()
        return jobs

    def take_updates(self) -> list[Update]:
        """What sessions must be told: one update per changed lookup, then new credits and recalls."""
        updates: list[Update] = list(self._lookups.take_updates())
        updates.extend(self._credits.take_grants(self._sessions.values()))
        updates.extend(self._recalls)
        self._recalls.clear()
        return updates

    def take_uses(self) -> list[ChunkRecord]:
        """Chunks used since the last call, oldest use first: what tiers persist as recency."""
        uses = list(self._used)
        self._used.clear()
        return uses

    def _share_out(self) -> None:
        for lower in self._lower:
            lower.refill()
        self._credits.top_up(self._sessions.values())
        self._host.finish_drains()
        if self._host.take_new_drains():
            self._recalls.extend(self._credits.recalls(self._sessions.values()))

    # -- sessions ----------------------------------------------------------------------------------------------

    def open_session(self, namespace: bytes, slot_bytes: int) -> int:
        """Start a session that fills slots of ``slot_bytes``; returns its id.

        All chunks of one namespace have one size: the caller's duty, because the namespace names their geometry.
        """
        self._last_session += 1
        session = Session(self._last_session, namespace, slot_bytes)
        self._sessions[session.id] = session
        self._host.add_user(slot_bytes)
        return session.id

    def suspend_session(self, session_id: int) -> None:
        """The client is lost, but processes may still copy: keep its slots and leases, tell and grant nothing more."""
        session = self._sessions[session_id]
        session.is_suspended = True
        untold, session.untold = session.untold, []
        self._credits.take_back(session, untold)

    def close_session(self, session_id: int) -> None:
        """No process touches the session's slots any more: take everything back."""
        session = self._sessions.pop(session_id)
        for lookup_id in sorted(session.lookups):
            self.release(session_id, lookup_id)
        self._credits.take_back(session, list(session.reserved))
        self._host.remove_user(session.slot_bytes)

    # -- lookups -----------------------------------------------------------------------------------------------

    def lookup(self, session_id: int, keys: Sequence[bytes], digests: Sequence[bytes], start: int = 0) -> int:
        """Lease the longest prefix that is in host memory or can be promoted now; returns the lookup's id.

        Chunks before ``start`` are not wanted (the GPU has them): they are used, but neither leased nor promoted. An
        update follows at once; more follow while promotions end, until one is done.
        """
        session = self._sessions[session_id]
        held = self.index.held_prefix(session.namespace, keys, digests)
        self._record_use(held, session.slot_bytes)
        lookup = self._lookups.open(session, held, start, (self.limits.leased_share, self.limits.request_share))
        self._promote(lookup)
        self._lookups.wait(lookup)
        for entry in held:  # root first: a write that was dropped gets another chance
            if entry.host is HostState.READY:
                self._claim_write(entry)
        return lookup.id

    def release(self, session_id: int, lookup_id: int) -> None:
        """End a lookup and its leases. Unknown ids are ignored: the session may have been told late."""
        lookup = self._lookups.get(lookup_id)
        if lookup is not None and lookup.session.id == session_id:
            self._lookups.close(lookup)

    def _promote(self, lookup: Lookup) -> None:
        """Start reading what is not in host memory; takes slots that can be had now and never waits for more."""
        slot_bytes = lookup.session.slot_bytes
        for position, entry in enumerate(lookup.entries):
            if entry.host is not HostState.ABSENT:
                continue
            slot = self._host.take_for_load(slot_bytes)
            if slot is None:
                slot = self._take_from_stores(slot_bytes)
            if slot is None:
                self.counters["promotion_without_slot"] += 1
                self._lookups.truncate(lookup, position)
                return
            self._host.place(entry, slot, slot_bytes, HostState.PROMOTING)
            job = Read(entry.lower.index(LowerState.PRESENT), entry.record, slot)
            if self.slots.has_memory(slot):
                self._jobs.append(job)
            else:
                self._early_reads.setdefault(slab_of(slot), []).append(job)

    def _take_from_stores(self, slot_bytes: int) -> SlotId | None:
        """The slot of a chunk that waits for its write: under pressure stores are dropped first, loads never."""
        for lower in self._lower:
            while (entry := lower.give_up_store(slot_bytes)) is not None:
                slot = self._host.evict(entry)
                if not self.slots.is_draining(slot):
                    return slot
                self._host.give(slot)
        return None

    # -- stores ------------------------------------------------------------------------------------------------

    def commit(self, session_id: int, slot: SlotId, record: ChunkRecord) -> None:
        """A granted slot was filled by every rank: take it into the cache, or back if the chunk is known already.

        Raises:
            KeyError: The slot was not granted to this session.
        """
        session = self._sessions[session_id]
        self._credits.spend(session, slot)
        entry = self.index.get(record.key)
        if record.namespace != session.namespace or (entry is not None and entry.record != record):
            self.counters["store_collision"] += 1
            self._host.give(slot)
        elif entry is not None and entry.host is not HostState.ABSENT:
            self.counters["store_duplicate"] += 1
            self._host.give(slot)
        else:
            entry = entry or self.index.add(record)
            self._host.place(entry, slot, session.slot_bytes, HostState.SEALING)
            self._jobs.append(Seal(record, slot))
            self._claim_write(entry)

    def give_back(self, session_id: int, slot: SlotId) -> None:
        """A granted slot will not be filled.

        Raises:
            KeyError: The slot was not granted to this session.
        """
        self._credits.take_back(self._sessions[session_id], [slot])

    def touch_prefix(self, key: bytes) -> None:
        """Note a use of a chunk and all its ancestors, after a batch of commits along one prefix."""
        entry = self.index.get(key)
        if entry is not None:
            self._record_use(self.index.prefix(entry)[::-1], entry.slot_bytes)

    def _claim_write(self, entry: Entry) -> None:
        """Queue the chunk's write to the first lower tier, if its prefix is there and the queue has room."""
        if self._lower:
            self._lower[0].claim(entry)

    def sealed(self, job: Seal, outcome: Outcome) -> None:
        """A seal ended: the chunk is visible now, or gone."""
        entry = self._entry(job.record)
        if outcome is Outcome.OK:
            self._now_ready(entry)
            for lower in self._lower:
                lower.start(entry)
        else:
            self.counters["seal_failed"] += 1
            for lower in self._lower:
                lower.drop(entry, "seal_failed")
            self._leave_host(entry)

    # -- transfers ---------------------------------------------------------------------------------------------

    def read(self, job: Read, outcome: Outcome) -> None:
        """A promotion ended. Failures shorten the lookups that waited; what they leave behind is DESIGN rule 4."""
        entry = self._entry(job.record)
        if outcome is Outcome.OK:
            self._now_ready(entry)
            return
        self._lower[job.tier].read_failed(entry, outcome)
        self._leave_host(entry)

    def written(self, job: Write, outcome: Outcome) -> None:
        """A write to a lower tier ended."""
        entry = self._entry(job.record)
        self._lower[job.tier].written(entry, outcome)
        if outcome is Outcome.CORRUPT and entry.holds == 0:  # not what was sealed: somebody wrote into the slot
            self._host.give(self._host.evict(entry))

    def deleted(self, tier: int, record: ChunkRecord, outcome: Outcome) -> None:
        """A deletion from a lower tier ended."""
        self._lower[tier].deleted(self._entry(record), outcome)

    def grown(self, job: Grow, outcome: Outcome) -> None:
        """A slab has its memory, or the machine refused it; then nothing grows until :meth:`try_again`."""
        early_reads = self._early_reads.pop(job.slab, [])
        if outcome is Outcome.OK:
            self._jobs.extend(early_reads)
        else:
            for read in early_reads:
                self._leave_host(self._entry(read.record))
        self._host.grown(job, outcome)

    def try_again(self) -> None:
        """The machine may have memory again, and media may delete again. Call it now and then, not at once."""
        self.slots.allow_growth()
        for lower in self._lower:
            lower.evict_to_capacity()

    def restore(self, tier: int, record: ChunkRecord, size_bytes: int) -> None:
        """A blob found in a lower tier at start. Call least recently used first, before any session."""
        entry = self.index.get(record.key) or self.index.add(record)
        if entry.record != record or entry.lower[tier] is not LowerState.ABSENT:
            self.counters["restore_conflict"] += 1  # two namespaces claim one key: the first is kept
            return
        self._lower[tier].restore(entry, size_bytes)

    def restored(self, tier: int, unlisted_bytes: int = 0) -> None:
        """All blobs of the tier were told: evict what passes its capacity (it may have shrunk).

        Args:
            unlisted_bytes: What the medium counts beyond them, e.g. foreign files; it leaves that much less room.
        """
        self._lower[tier].restored(unlisted_bytes)

    def evict_lower(self, tier: int, size_bytes: int) -> int:
        """Evict at least ``size_bytes`` from a lower tier, leaves first; returns the bytes that will come back."""
        return self._lower[tier].evict(size_bytes)

    def _entry(self, record: ChunkRecord) -> Entry:
        entry = self.index.get(record.key)
        assert entry is not None, "a job outlived its entry"
        return entry

    def _now_ready(self, entry: Entry) -> None:
        self._host.now_ready(entry)
        self._lookups.chunk_ready(entry)

    def _leave_host(self, entry: Entry) -> None:
        """Free the slot of an entry whose fill failed."""
        self._lookups.chunk_failed(entry)
        self._host.give(self._host.vacate(entry))
        self.index.remove_if_gone(entry)

    def _record_use(self, prefix: Sequence[Entry], slot_bytes: int) -> None:
        """Touch a prefix, given root first, in every tier: deepest chunk first, so that suffixes age first."""
        keys = [entry.record.key for entry in reversed(prefix)]
        self._host.record_use(slot_bytes, keys)
        for lower in self._lower:
            lower.order.record_use(keys)
        self._used.extend(entry.record for entry in reversed(prefix))

    # -- what can be seen --------------------------------------------------------------------------------------

    def usage(self) -> dict[str, int]:
        """Figures for ``stat``: bytes and counts now."""
        figures = {
            "chunks": len(self.index),
            "host_assigned_bytes": self.slots.assigned_bytes,
            "host_capacity_bytes": self.slots.host_bytes,
            "host_ready_chunks": self._host.ready_count,
            "leased_bytes": self._host.leased_bytes,
            "lookups": len(self._lookups),
            "reserved_slots": sum(len(s.reserved) for s in self._sessions.values()),
            "sessions": len(self._sessions),
        }
        for tier, lower in enumerate(self._lower):
            figures[f"tier{tier}_used_bytes"] = lower.used_bytes
            figures[f"tier{tier}_queued_bytes"] = lower.queued_bytes
            figures[f"tier{tier}_chunks"] = lower.blob_count
        return figures

    @property
    def pending_writes(self) -> int:
        """Chunks in host memory that are to be written to the first lower tier: what a drain waits for."""
        return self._lower[0].pending if self._lower else self._host.sealing_count

    def check_integrity(self) -> None:
        """Assert every invariant that ties the parts together; for tests and for an idle server in debug mode."""
        sessions = self._sessions.values()
        reserved = [slot for session in sessions for slot in session.reserved]
        assert len(reserved) == len(set(reserved)), "a slot was granted twice"
        assert self._credits.reserved_bytes == sum(len(s.reserved) * s.slot_bytes for s in sessions), "credits drifted"
        entries = self.index.entries()
        for entry in entries:
            pending = sum(state in (LowerState.QUEUED, LowerState.WRITING) for state in entry.lower)
            assert entry.holds == entry.leases + pending, "holds do not match leases and writes"
            assert not entry.is_gone, "an entry nobody holds"
        self.index.check_integrity()
        self._host.check_integrity(set(reserved))
        self._lookups.check_integrity(entries)
        for lower in self._lower:
            lower.check_integrity()
