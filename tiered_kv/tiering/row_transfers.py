"""Transfers between rows that engines lent and the first secondary tier: no slot, no host memory.

An engine's own host memory is the cache above this machine's disk then (vLLM's offloading): a row is written out of
it, and read into it. A chunk whose row is being written is held by nobody until it is in the tier, so no lookup waits
for it; one that is read into a row is not in host memory afterwards either.

A *use* of a row begins with :meth:`RowTransfers.store` or :meth:`~RowTransfers.load` and ends once, in
:meth:`~RowTransfers.take_ended`. Whoever ends one early (:meth:`~RowTransfers.take_back`) makes sure first that no
thread touches the row for it any more (``engine/lent_rows.py``); what its job reports later changes nothing for it.

Pure: no I/O, no clock, no threads. Called by ``tiering.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.tiering.index import BlobState, Entry, HostState, Index
from tiered_kv.tiering.stats import HitStats, Outbox
from tiered_kv.tiering.tiers import SecondaryTiers
from tiered_kv.tiering.types import Outcome, ReadRow, RowsEnded, RowUse

TAKEN_BACK_AT_ONCE = 32
"""Uses of sessions that are over that end in one step: less than a millisecond."""


@dataclass(slots=True)
class _RowsToTell:
    """What one session is to be told.

    Attributes:
        loads: By load, rows to be read that have ended: the tiers that gave them, and None for those that did not come.
    """

    good: list[int] = field(default_factory=list)
    bad: list[int] = field(default_factory=list)
    elsewhere: list[int] = field(default_factory=list)
    loads: dict[int, list[int | None]] = field(default_factory=dict)

    def read(self, use: RowUse, tier: int | None) -> None:
        """A row was read from a tier; None: it was not."""
        (self.bad if tier is None else self.good).append(use.id)
        self.loads.setdefault(use.load, []).append(tier)


class RowTransfers:
    """All uses of lent rows.

    Threads: one owner, tiering.
    """

    def __init__(self, index: Index, tiers: SecondaryTiers, outbox: Outbox, hit_stats: HitStats) -> None:
        self._index = index
        self._tiers = tiers
        self._jobs = outbox.jobs
        self._hit_stats = hit_stats
        self._open: dict[RowUse, Entry | None] = {}  # with the chunk that is written
        self._waiting: dict[Entry, list[RowUse]] = {}  # uses whose chunk is written from another row
        self._reads: dict[bytes, set[RowUse]] = {}  # by key: reads that began since the chunk was written last
        self._ended: dict[int, _RowsToTell] = {}
        self._leaving: dict[RowUse, None] = {}  # uses of sessions that are over, those behind last

    def __len__(self) -> int:
        return len(self._open)

    def store(self, entry: Entry, use: RowUse, slot_bytes: int) -> None:
        """Write a row's chunk, which is in no tier and on its way to none."""
        write_through = self._tiers.write_through
        assert write_through is not None
        self._open[use] = entry
        entry.slot_bytes = slot_bytes
        write_through.store_row(entry, use)
        self.collect()

    def store_duplicate(self, entry: Entry, use: RowUse) -> None:
        """A row of a chunk that is in a tier or in host memory, or on its way.

        One that is just written from another row is in no file yet: this use ends as that write does.
        """
        write_through = self._tiers.write_through
        assert write_through is not None
        if entry not in write_through.rows:
            self.stored_already(use, is_good=True)
        elif write_through.rows[entry] not in self._open:  # that row was taken back: nothing is stored
            self.stored_already(use, is_good=False)
        else:
            self._open[use] = entry
            self._waiting.setdefault(entry, []).append(use)

    def stored_already(self, use: RowUse, *, is_good: bool) -> None:
        """Nothing is to be written of a row."""
        ended = self._ended.setdefault(use.session, _RowsToTell())
        (ended.good if is_good else ended.bad).append(use.id)

    def load(self, entry: Entry | None, use: RowUse) -> None:
        """Read a chunk into a row, if a tier of this machine has it and host memory has not."""
        ended = self._ended.setdefault(use.session, _RowsToTell())
        source = None if entry is None else self._index.source(entry)
        if entry is None or (source is None and entry.host is HostState.ABSENT):
            ended.read(use, None)
        elif entry.host is not HostState.ABSENT or source is None or self._tiers[source].is_shared:
            ended.elsewhere.append(use.id)
        else:
            self._open[use] = None
            self._reads.setdefault(entry.record.key, set()).add(use)
            self._jobs.append(ReadRow(source, entry.record, use))

    def written(self, record: ChunkRecord) -> None:
        """A chunk is in a tier: reads that began before may tell of an earlier blob, which was evicted meanwhile."""
        self._reads.pop(record.key, None)

    def read(self, job: ReadRow, outcome: Outcome) -> None:
        """A read ended; what a failed one leaves behind is rule 4, unless a promotion finds the same out."""
        entry, tier = self._index.get(job.record.key), self._tiers[job.tier]
        if (
            self._is_of_this_blob(job)
            and outcome not in (Outcome.OK, Outcome.ROW_GONE)  # of which the tier knows nothing
            and entry is not None
            and entry.record.namespace == job.record.namespace
        ):
            is_here = entry.blobs[job.tier] is BlobState.PRESENT
            if is_here and not tier.is_used(entry):
                tier.read_failed(entry, outcome)
                self._index.remove_if_gone(entry)
        if job.use in self._open:
            del self._open[job.use]
            ended = self._ended.setdefault(job.use.session, _RowsToTell())
            is_there = outcome is Outcome.OK and job.use not in self._leaving  # else it may have read elsewhere
            ended.read(job.use, job.tier if is_there else None)
        self.collect()

    def _is_of_this_blob(self, job: ReadRow) -> bool:
        """Whether no blob of the chunk was written since a read began that has ended now."""
        reads = self._reads.get(job.record.key, set())
        is_known = job.use in reads
        reads.discard(job.use)
        if not reads:
            self._reads.pop(job.record.key, None)
        return is_known

    def take_back(self, uses: Iterable[RowUse]) -> None:
        """End uses early, badly; those that are over already are ignored."""
        write_through = self._tiers.write_through
        for use in reversed(list(uses)):  # those behind first, or they would be dropped with the first one
            if use not in self._open:
                continue
            entry = self._open.pop(use)
            ended = self._ended.setdefault(use.session, _RowsToTell())
            if entry is None:
                ended.read(use, None)
            else:
                ended.bad.append(use.id)
            if entry is not None and write_through is not None and write_through.rows.get(entry) == use:
                write_through.take_back_row(entry)
        self.collect()

    def session_over(self, session: int) -> None:
        """End what is left of a session, in parts: a prompt may have thousands of rows."""
        self._leaving.update(dict.fromkeys(self.of_session(session)))

    @property
    def wants_turn(self) -> bool:
        """Whether uses of sessions that are over are left."""
        return bool(self._leaving)

    def take_back_some(self) -> None:
        """Go on with these, those behind first."""
        part = [self._leaving.popitem()[0] for _ in range(min(len(self._leaving), TAKEN_BACK_AT_ONCE))]
        self.take_back(reversed(part))

    def of_session(self, session: int) -> list[RowUse]:
        """Its uses that are not over."""
        return [use for use in self._open if use.session == session]

    def collect(self) -> None:
        """Take in the writes that are over; call it after whatever may have ended one."""
        write_through = self._tiers.write_through
        while write_through is not None and write_through.rows_over:
            entry, use, is_there = write_through.rows_over.pop()
            for ended in (use, *self._waiting.pop(entry, ())):
                if ended in self._open:
                    del self._open[ended]
                    self.stored_already(ended, is_good=is_there)
            if self._index.get(entry.record.key) is entry:
                self._index.remove_if_gone(entry)

    def take_ended(self, namespaces: dict[int, bytes]) -> list[RowsEnded]:
        """What sessions are to be told, by the namespaces of those that are here; loads are counted."""
        self.collect()
        ended, self._ended = self._ended, {}
        for session, one in ended.items():
            for load, tiers in one.loads.items() if session in namespaces else ():
                sources = [tier for tier in tiers if tier is not None]
                part_of = (session, load) if load else None
                self._hit_stats.ended(namespaces[session], len(tiers), 0, sources, has_more=False, part_of=part_of)
        return [
            RowsEnded(session, tuple(one.good), tuple(one.bad), tuple(one.elsewhere))
            for session, one in ended.items()
            if session in namespaces
        ]

    def check_integrity(self) -> None:
        """Assert that each row that is written is somebody's, or was taken back; and that a use waits for a write."""
        write_through = self._tiers.write_through
        rows = {} if write_through is None else write_through.rows
        assert self._waiting.keys() <= rows.keys(), "a use waits for a write that ended"
        for use, entry in self._open.items():
            assert entry is None or rows.get(entry) == use or use in self._waiting.get(entry, ())


def is_stored(entry: Entry, record: ChunkRecord, tier: int, *, is_damaged: bool) -> bool:
    """Whether a chunk need not be written: it is in host memory or the tier, or on its way there.

    Where its slot was found damaged neither that nor what is written from there counts.
    """
    if is_damaged:
        return entry.record == record and entry.blobs[tier] is BlobState.PRESENT
    moving = (BlobState.PRESENT, BlobState.QUEUED, BlobState.WRITING)
    return entry.record == record and (entry.host is not HostState.ABSENT or entry.blobs[tier] in moving)
