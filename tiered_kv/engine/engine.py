"""The engine: one owner that feeds tiering, performs its jobs in threads and hands out its updates.

Called by the server's loop, by the in-process cache and, with a stepping executor, by tests. Nothing in here blocks
except :meth:`Engine.start` (scans) and :meth:`Engine.close`.

    field                                         owner
    tiering, guards, _throughput, _probe_times,
    _geometries, _served, _jobs, _shared          the caller of ``step``
    tiers, arena                                  executor threads; the owner asks for usage and notes recency
    _finished                                     appended by executor threads, emptied by the owner (both are atomic)
    _flushing, _describing                        a tier's number is added by the owner, removed by the thread that does
    _undescribed                                  a tier's are added by the owner, removed by the describing thread
    _stalls                                       told by executor threads, asked by the owner
    _uses                                         a tier's are appended by the owner, emptied by the flushing thread
    _pins                                         set by the flushing thread, taken by the owner (both are atomic)
"""

import logging
import math
import select
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Final

import msgspec

from tiered_kv.chunks.arena import SLAB_BYTES, Arena
from tiered_kv.chunks.geometry import ChunkGeometry
from tiered_kv.chunks.header import BlobFormat
from tiered_kv.engine.clock import Clock
from tiered_kv.engine.executor import Executor, Pool
from tiered_kv.engine.guards import Guards
from tiered_kv.engine.lent_rows import LentRows
from tiered_kv.engine.performer import JobResult, Performer
from tiered_kv.engine.row_writes import RowWrite, RowWrites
from tiered_kv.engine.self_test import SelfTest
from tiered_kv.engine.served import Totals
from tiered_kv.engine.shared_jobs import READERS, SharedJob, SharedJobs, tasks_for
from tiered_kv.engine.stalls import Stalls
from tiered_kv.engine.throughput import ProbeTimes, Throughput
from tiered_kv.errors import CapacityExceeded, Closed, ConfigError, TierUnavailable
from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.keys.namespace import Namespace
from tiered_kv.keys.stored_by import UNKNOWN
from tiered_kv.keys.tags import NO_TAG
from tiered_kv.tiering.admission import ALL, NONE
from tiered_kv.tiering.lookups import LookupRequest
from tiered_kv.tiering.miss_ratio import Curve
from tiered_kv.tiering.owners import ReleaseCount
from tiered_kv.tiering.quotas import Quota
from tiered_kv.tiering.stats import TierStats
from tiered_kv.tiering.tiering import Tiering
from tiered_kv.tiering.types import (
    HOST,
    PINNED_SHARE_MAX,
    PROGRESS_INTERVAL_S,
    Arrival,
    Copy,
    Delete,
    Grow,
    Job,
    Limits,
    LookupAnswer,
    Outcome,
    Probe,
    Read,
    ReadRow,
    RemovalCount,
    RowsEnded,
    RowUse,
    Seal,
    SlotId,
    SlotLoan,
    TierSpec,
    TierUsage,
    Update,
    Write,
    WriteRow,
)
from tiered_kv.tiers.base import BlobName, Tier

logger = logging.getLogger(__name__)

RETRY_INTERVAL_S = 30.0
"""How long the arena does not grow after the machine refused it memory, and a full medium is not asked to delete."""

RESUME_INTERVAL_S = 1.0
"""How long writes to a shared tier pause after one found no room or no answer."""

MAKE_ROOM_S = 10.0
"""How long a start waits until a disk that others have filled has deleted something."""

SLICE_S = 0.0004
"""How long a step takes in what has ended; the rest is for the next one."""

ENDED_MAX = 2000
"""Jobs that have ended and were not taken in: from so many on nobody should bring more work (``Engine.is_behind``), and
sessions are granted no slots: what they hold is all that may yet come. The same of seals that were not taken in, which
may all end at once."""

USES_MAX: Final = 1 << 18
"""Uses that wait to be told to a tier; while it hangs the oldest are forgotten."""

USES_TAKEN: Final = 1 << 14
"""Of these, so many are looked through for those of the same chunks: it is told the last one alone."""

USES_AT_ONCE: Final = 256
"""A tier is told at once: its threads wait for each other meanwhile."""

DATES_INTERVAL_S: Final = 0.05
"""Between two times that prefixes are dated which come piece by piece: each takes as long as the prefix is."""

ABSENT_S = 10.0
"""How long, at most, a chunk counts as absent from a shared tier after a probe did not find it."""

CONFIRMED_S = 600.0
"""How long, at most, chunks are written to a shared tier behind one that was there, without asking for that again."""

MINIMUM_SLOTS = 4
"""Chunks the arena must hold at least: one to load, one to store, and one of each in flight."""

_POOL: dict[type, tuple[Pool, int]] = {
    Read: (Pool.LOAD, 0),
    ReadRow: (Pool.LOAD, 0),
    Grow: (Pool.LOAD, 0),
    Seal: (Pool.LOAD, 1),
    Delete: (Pool.STORE, 0),
    Write: (Pool.STORE, 1),
    WriteRow: (Pool.STORE, 1),
}

_REMOTE_POOL: dict[type, tuple[Pool, int]] = {
    Probe: (Pool.REMOTE_LOAD, 0),
    Read: (Pool.REMOTE_LOAD, 1),
    Delete: (Pool.REMOTE_STORE, 0),
    Write: (Pool.REMOTE_STORE, 1),
    Copy: (Pool.REMOTE_STORE, 1),
}

_KINDS: dict[type, str] = {
    Read: "get",
    ReadRow: "get",
    Write: "put",
    WriteRow: "put",
    Copy: "put",
    Probe: "contains",
    Delete: "delete",
}


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What is where and what happened.

    Attributes:
        counters: What happened how often, since the start.
        host: Host memory and chunks, by name.
        secondary: The secondary tiers, by number.
        events: What was inserted into each tier and removed from it, by number.
        usage: Bytes of each namespace in each tier, by number.
        quotas: Of the namespaces that have one.
        curves: What tiers of other sizes would find, by namespace.
    """

    counters: dict[str, int]
    host: dict[str, int]
    secondary: dict[int, TierUsage]
    events: dict[int, TierStats]
    usage: dict[int, dict[bytes, int]]
    quotas: dict[bytes, Quota]
    curves: dict[bytes, Curve]


class Engine:
    """Tiering, tiers, arena and threads as one cache.

    Attributes:
        tiers: The secondary tiers by number, highest first.

    Threads: one owner; see the module's ownership table.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        arena: Arena,
        tiering: Tiering,
        executor: Executor,
        clock: Clock,
        formats: dict[bytes, BlobFormat],
    ) -> None:
        """Take the parts.

        Args:
            tiers: The secondary tiers, highest first.
            formats: Shared with the verifying wrappers; filled as sessions open.
        """
        self.tiers = dict(enumerate(tiers, HOST + 1))
        self.arena = arena
        self.tiering = tiering
        self.executor = executor
        self.clock = clock
        self._performer = Performer(self.tiers, arena, clock, formats)
        self._row_writes = RowWrites(executor, _POOL[WriteRow][1], self._write_row, clock)
        self._shared: dict[tuple[int, int], SharedJobs] = {}  # by tier, HOST for seals, and number of tasks
        self._throughput = {number: Throughput() for number in self.tiers}
        self._probe_times = ProbeTimes()
        self._geometries: dict[bytes, ChunkGeometry] = {}
        self._served = Totals()
        self._jobs: Counter[tuple[int, str]] = Counter()
        self._finished: deque[tuple[Job, JobResult]] = deque()
        now_s = clock.monotonic()
        self._flush_due_s = {number: now_s + tier.traits.flush_interval_s for number, tier in self.tiers.items()}
        self._flushing: set[int] = set()
        self._pins: dict[int, Collection[bytes] | None] = {}
        self._pinning: tuple[int, Iterator[None]] | None = None  # a tier, and the steps that are left
        self._full_of_pins: set[int] = set()  # tiers of which that was said
        self._describing: set[int] = set()
        self._undescribed: dict[int, dict[bytes, tuple[Namespace, str]]] = {number: {} for number in self.tiers}
        self._uses: dict[int, deque[ChunkRecord]] = {number: deque(maxlen=USES_MAX) for number in self.tiers}
        self._retry_due_s = now_s + RETRY_INTERVAL_S
        self._resume_due_s = now_s + RESUME_INTERVAL_S
        self._absent_due_s = now_s + ABSENT_S / 2
        self._confirmed_due_s = now_s + CONFIRMED_S / 2
        self._progress_due_s = self._dates_due_s = now_s
        self._stalls = Stalls(clock)
        self.guards = Guards(tiering, executor, clock, self._stalls, self._taken_out)

    @staticmethod
    def build_tiering(
        host_bytes: int,
        tiers: Sequence[Tier],
        limits: Limits | None = None,
        *,
        eviction: str = "multi-queue",
        admissions: Mapping[str, str] = MappingProxyType({}),
    ) -> Tiering:
        """Tiering that fits these tiers; only the last may be shared. ``admissions`` are by their names."""
        specs = [
            TierSpec(
                capacity_bytes=None if tier.traits.is_shared else tier.usage().capacity_bytes,
                admission=NONE if tier.traits.is_read_only else admissions.get(tier.traits.name, ALL),
                is_shared=tier.traits.is_shared,
                names_at_once=tier.traits.names_at_once,
                is_asked_while_out=tier.traits.is_asked_while_out,
            )
            for tier in tiers
        ]
        return Tiering(host_bytes, specs, limits, eviction=eviction)

    def start(self) -> None:
        """Learn what this machine's tiers hold. Blocks for the time of the scans; a shared tier is not scanned."""
        for number, tier in self.tiers.items():
            if tier.traits.is_shared:
                self.tiering.restored(number)
                continue
            started_s = self.clock.monotonic()
            count = size_bytes = 0
            for info in tier.scan():
                self.tiering.restore(number, info.record, info.size_bytes)
                count += 1
                size_bytes += info.size_bytes
            self.tiering.set_pinned(number, tier.pinned())
            self._warn_of_pins(number)
            self.tiering.restored(number, max(0, tier.usage().used_bytes - size_bytes))
            seconds = self.clock.monotonic() - started_s
            logger.info("tier scanned. tier=%s blobs=%d seconds=%.3f", tier.traits.name, count, seconds)
        self._submit_jobs()

    def make_room(self, size_bytes: int) -> bool:
        """Have this machine's disk delete so much of the least worth, for what a start has to write beside the blobs.

        Blocks until some of it is gone; False where none is. Before the first session: nothing is told to anybody.
        """
        disk = self.tiers.get(HOST + 1)
        if disk is None or disk.traits.is_shared or disk.traits.is_read_only:
            return False
        before, until_s = disk.usage().used_bytes, self.clock.monotonic() + MAKE_ROOM_S
        if self.tiering.make_room(HOST + 1, size_bytes):
            while disk.usage().used_bytes >= before and self.clock.monotonic() < until_s:
                self.step()
                select.select([self.executor.fileno()], [], [], MAKE_ROOM_S / 100)
        return disk.usage().used_bytes < before

    def sample_reads(self, tier: int, result: SelfTest) -> None:
        """Add the reads of a tier's self-test as a sample of its throughput."""
        self._throughput[tier].sample(result.reads_at_once * result.size_bytes, result.together_s, result.read_s)

    # -- sessions ----------------------------------------------------------------------------------------------

    def open_session(
        self,
        namespace: Namespace,
        geometry: ChunkGeometry,
        stored_by: str = UNKNOWN,
        lease_s: float = math.inf,
    ) -> tuple[int, BlobFormat]:
        """Start a session for chunks of one namespace; its lookups hold leases unclaimed for ``lease_s``.

        Args:
            stored_by: Who will store them; a tier that has no record of the namespace yet keeps it beside that.

        Raises:
            ConfigError: Host memory cannot hold enough chunks of this size, or the namespace has another geometry.
        """
        if self._geometries.get(namespace.digest, geometry) != geometry:
            raise ConfigError(f"the namespace was opened with another geometry. namespace={namespace.digest.hex()}")
        blob_format = BlobFormat(namespace.digest, geometry)
        if blob_format.blob_bytes > SLAB_BYTES:
            raise ConfigError(
                f"a chunk takes {blob_format.blob_bytes} bytes, more than the {SLAB_BYTES} of a slab: "
                "set chunk_tokens to less"
            )
        slots = self.tiering.slots.slot_count_max(blob_format.blob_bytes)
        if slots < MINIMUM_SLOTS:
            raise ConfigError(
                f"host_bytes={self.tiering.slots.host_bytes} holds {slots} chunks of {blob_format.blob_bytes} bytes; "
                f"at least {MINIMUM_SLOTS} are needed: set host_bytes to {MINIMUM_SLOTS * blob_format.blob_bytes} or "
                "more, or chunk_tokens to less"
            )
        if self.tiering.slots.keeps_memory and blob_format.blob_bytes > self.tiering.slots.slab_bytes_max:
            logger.warning(
                "chunks are larger than a slab, and slabs keep their memory for engines that pin it: they get only "
                "what no slab has yet; set host_bytes to more or chunk_tokens to less. chunk_bytes=%d slab_bytes=%d",
                blob_format.blob_bytes,
                self.tiering.slots.slab_bytes_max,
            )
        for number in self.tiers:
            self._undescribed[number][namespace.digest] = namespace, stored_by
            self._describing.add(number)
            self.executor.submit(Pool.UPKEEP, 1, partial(self._describe, number))
        self._performer.formats[namespace.digest] = blob_format
        self._geometries[namespace.digest] = geometry
        session = self.tiering.open_session(namespace.digest, blob_format.blob_bytes, lease_s)
        self._submit_jobs()
        return session, blob_format

    def _describe(self, number: int) -> None:
        """Write the records of namespaces that a tier was not yet told of; those that it does not take are left."""
        tier, undescribed = self.tiers[number], self._undescribed[number]
        try:
            for digest, (namespace, stored_by) in list(undescribed.items()):
                tier.describe(digest, namespace.described(stored_by))
                undescribed.pop(digest, None)
        except (TierUnavailable, CapacityExceeded, Closed) as exc:
            logger.warning("namespace.json was not written, and is tried again. tier=%s %s", tier.traits.name, exc)
        finally:
            self._describing.discard(number)

    def keep_memory(self, *, is_kept: bool) -> None:
        """Whether slabs keep the memory they get: as long as a process may have pinned it for its GPU."""
        slots = self.tiering.slots
        if slots.keeps_memory == is_kept:
            return
        slots.keep_memory(is_kept=is_kept)
        self.arena.keep_pages([slots.memory_bytes(slab) for slab in range(slots.slab_count)], is_kept=is_kept)
        logger.info("slabs %s. engines_pin=%s", "keep their memory" if is_kept else "may give memory back", is_kept)

    def has_memory(self, slot_bytes: int) -> bool:
        """Whether slots of this size exist, or none will soon: then a session opens without, rather than never."""
        slots = self.tiering.slots
        if slots.slot_count(slot_bytes):
            return True
        return not slots.is_growing(slot_bytes) or self.tiering.counters["slab_refused"] > 0

    def format_of(self, namespace: bytes) -> BlobFormat | None:
        """The blob format of a namespace that some session opened."""
        return self._performer.formats.get(namespace)

    def slot_view(self, slot: SlotId, size_bytes: int) -> memoryview:
        """The bytes of a slot, for callers in this process."""
        return self._performer.slot_view(slot, size_bytes)

    # -- what sessions do --------------------------------------------------------------------------------------
    # Each changes state only; what follows from it is done by the next :meth:`step`.

    def watch(self, session: int, namespace: bytes) -> None:
        """Send a session the events of its namespace from now on."""
        self.tiering.stats.watch(session, namespace)

    def suspend_session(self, session: int) -> None:
        """The client is lost, but processes may still copy; see :meth:`Tiering.suspend_session`."""
        self._revoke_rows(session)
        self.tiering.suspend_session(session)

    def close_session(self, session: int) -> None:
        """No process touches the session's slots any more."""
        self._revoke_rows(session)
        self._performer.lent.pop(session, None)
        self.tiering.close_session(session)

    def lookup(self, session: int, wish: LookupRequest) -> int:
        """Lease the longest prefix that is held; see :meth:`Tiering.lookup`. Returns the lookup's id."""
        return self.tiering.lookup(session, wish)

    def claim(self, session: int, lookup: int) -> None:
        """A load begins of what is ready: the leases stay until :meth:`release`."""
        self.tiering.claim(session, lookup)

    def follow(self, session: int, lookup: int) -> None:
        """Have the session told at the next :meth:`step` how much of a lookup is ready, and of parts from then on."""
        self.tiering.follow(session, lookup)

    def release(self, session: int, lookup: int, *, is_asked_anew: bool = False) -> None:
        """End a lookup and its leases; see :meth:`Tiering.release`."""
        self.tiering.release(session, lookup, is_asked_anew=is_asked_anew)

    def commit(self, session: int, slot: SlotId, record: ChunkRecord, *, is_answer: bool = False) -> None:
        """A granted slot was filled by every rank; see :meth:`Tiering.commit`.

        Raises:
            KeyError: The slot was not granted to this session.
        """
        self.tiering.commit(session, slot, record, is_answer=is_answer)

    def commit_tail(self, session: int, slot: SlotId, record: ChunkRecord) -> None:
        """The same of a tail.

        Raises:
            KeyError: The slot was not granted to this session.
        """
        self.tiering.commit_tail(session, slot, record)

    def drop_tails(self, session: int, keys: Iterable[bytes]) -> None:
        """What was stored now continues these tails."""
        self.tiering.drop_tails(session, keys)

    def save_tails(self) -> None:
        """The server ends: have tails written that are worth it; they are pending writes then."""
        self.tiering.save_tails()

    def touch_prefix(self, key: bytes) -> None:
        """Note a use of a chunk and all its ancestors, after a batch of commits along one prefix."""
        self.tiering.touch_prefix(key)

    def give_back(self, session: int, slot: SlotId) -> None:
        """A granted slot will not be filled.

        Raises:
            KeyError: The slot was not granted to this session.
        """
        self.tiering.give_back(session, slot)

    def rest(self, session: int) -> None:
        """The session fills no slots until it wakes: it has none; see :meth:`Tiering.rest`."""
        self.tiering.rest(session)

    def wake(self, session: int) -> None:
        """The session wants slots again."""
        self.tiering.wake(session)

    def want(self, namespace: bytes, key: bytes) -> None:
        """A client will ask for a chunk: it and the prefix before it are worth a write to every tier now."""
        self.tiering.want(namespace, key)

    def take_ownership(self, namespace: bytes, key: bytes, owner: bytes) -> list[bytes]:
        """The newest state of a user's session ends with a chunk; keys of its prefix, root first, if it is known."""
        return self.tiering.take_ownership(namespace, key, owner)

    def known_prefix(self, keys: Iterable[bytes], owner: bytes) -> list[ChunkRecord]:
        """What is known of a session's state, root first; see :meth:`Tiering.known_prefix`."""
        return self.tiering.known_prefix(keys, owner)

    def releasing(
        self, keys: Iterable[bytes], owner: bytes, kept: Iterable[Sequence[bytes]], is_pinned: Callable[[bytes], bool]
    ) -> Iterator[ReleaseCount | None]:
        """Remove a session's own chunks from memory and disk, in steps; see :meth:`Tiering.releasing`."""
        return self.tiering.releasing(keys, owner, kept, is_pinned)

    def demoting(self, keys: Iterable[bytes], owner: bytes) -> Iterator[ReleaseCount | None]:
        """Let a session's own chunks leave host memory, in steps; see :meth:`Tiering.demoting`."""
        return self.tiering.demoting(keys, owner)

    def demoting_end(
        self, keys: Iterable[bytes], owner: bytes, kept: Iterable[Sequence[bytes]]
    ) -> Iterator[ReleaseCount | None]:
        """The same of what one state has and others have not; see :meth:`Tiering.demoting_end`."""
        return self.tiering.demoting_end(keys, owner, kept)

    # -- rows that engines lent --------------------------------------------------------------------------------

    def takes_rows(self) -> str:
        """Why chunks cannot go between lent rows and the first secondary tier; empty: they can."""
        first = self.tiers.get(HOST + 1)
        if first is None or first.traits.is_shared or first.traits.is_read_only:
            return "the first tier below host memory is not a disk of this machine"
        if not first.traits.reads_by_address:
            return "a read of that file system that hangs may still fill memory it was given, after it was taken back"
        if self.tiering.needs_uses(HOST + 1):
            return "not every chunk is written to disk (disk_admission), and host memory keeps those that are not"
        return ""

    def take_rows(self, session: int, rows: LentRows) -> None:
        """Uses of a session are of these rows."""
        self._performer.lent[session] = rows

    def store_rows(self, session: int, rows: Sequence[tuple[RowUse, ChunkRecord]]) -> None:
        """Write chunks from lent rows; see :meth:`Tiering.store_rows`."""
        for use, _ in rows:
            self._performer.lent[session].begin(use)
        self.tiering.store_rows(session, rows)

    def load_rows(self, session: int, rows: Sequence[tuple[RowUse, bytes, bytes]], owner: bytes) -> None:
        """Read chunks into lent rows; see :meth:`Tiering.load_rows`."""
        for use, _, _ in rows:
            self._performer.lent[session].begin(use)
        self.tiering.load_rows(session, rows, owner)

    def load_ended(self, session: int, load: int) -> None:
        """All that was looked up and read for a load has ended: it is counted as one lookup."""
        self.tiering.load_ended(session, load)

    def end_rows(self, session: int, uses: Collection[RowUse]) -> None:
        """End uses of lent rows early. Nobody touches the rows when this returns."""
        lent = self._performer.lent.get(session)
        if lent is not None:
            lent.end([use.id for use in uses])
            self.tiering.take_rows_back(uses)

    def _revoke_rows(self, session: int) -> None:
        """Nobody touches a row for a session any more when this returns; tiering ends what is left of its uses."""
        lent = self._performer.lent.get(session)
        if lent is not None:
            lent.end([use.id for use in self.tiering.open_rows(session)])

    # -- what other machines read ------------------------------------------------------------------------------

    def held_here(self, namespace: bytes, keys: Iterable[bytes]) -> int:
        """How many of these chunks this machine can give, from the first on; see :meth:`Tiering.held_here`."""
        return self.tiering.held_here(namespace, keys)

    def lend(self, namespace: bytes, key: bytes) -> SlotLoan | Outcome:
        """Keep a chunk in its slot until :meth:`end_loan`; see :meth:`Tiering.lend`."""
        return self.tiering.lend(namespace, key)

    def end_loan(self, loan: int) -> None:
        """The chunk is read no more."""
        self.tiering.end_loan(loan)

    def read_by_peers(self, namespace: bytes, keys: Iterable[bytes]) -> None:
        """Other machines have read these chunks; see :meth:`Tiering.read_by_peers`."""
        self.tiering.read_by_peers(namespace, keys)

    # -- what operators do -------------------------------------------------------------------------------------

    def removing(
        self, tier: int, namespace: bytes, keys: Sequence[bytes] | None, *, leaves_holes: bool
    ) -> Iterator[RemovalCount | None]:
        """Remove chunks from one tier, in steps; see :func:`~tiered_kv.tiering.removal.removing`."""
        return self.tiering.removing(tier, namespace, keys, leaves_holes=leaves_holes)

    def erasing(self, tier: int, namespace: bytes, tag: bytes) -> Iterator[RemovalCount | None]:
        """Remove what was stored under a tag, and all behind it; see :func:`~tiered_kv.tiering.removal.erasing`."""
        return self.tiering.erasing(tier, namespace, tag)

    def erasing_stored_by(
        self, tier: int, namespace: bytes, is_meant: Callable[[str], bool]
    ) -> Iterator[RemovalCount | None]:
        """The same for what was stored by those that ``is_meant`` accepts."""
        return self.tiering.erasing_stored_by(tier, namespace, is_meant)

    def set_quota(self, namespace: bytes, quota: Quota) -> None:
        """What a namespace keeps and takes from now on; a quota that asks for nothing is none."""
        self.tiering.quotas.set(namespace, quota)

    def quota_of(self, namespace: bytes) -> Quota | None:
        """What a namespace keeps and takes of each tier; None: it has no quota."""
        return self.tiering.quotas.get(namespace)

    # -- what is where -----------------------------------------------------------------------------------------

    @property
    def host_bytes(self) -> int:
        """Memory that slots may take together."""
        return self.tiering.slots.host_bytes

    @property
    def pending_writes(self) -> int:
        """Chunks that are to be written: what a drain waits for."""
        return self.tiering.pending_writes

    def capacity_bytes(self, tier: int) -> int | None:
        """What quotas are of; None: the tier has no limit here, and quotas mean nothing."""
        return self.tiering.usage_of(tier).capacity_bytes

    def chunks_leased_max(self, namespace: bytes) -> int:
        """The most chunks one lookup of an opened namespace may lease."""
        most_bytes = self.tiering.usage_of(HOST).most_bytes(namespace)
        return int(most_bytes * self.tiering.limits.request_share) // self._performer.formats[namespace].blob_bytes

    def prefix_of(self, key: bytes) -> dict[bytes, int] | None:
        """Keys of a chunk, of its ancestors and of their states, with their bytes on the first secondary tier.

        None: the chunk is not known.
        """
        index = self.tiering.index
        entry = index.get(key)
        if entry is None:
            return None
        return {e.record.key: e.blob_bytes[HOST + 1] for e in index.with_states(index.prefix(entry))}

    def tag_of(self, key: bytes) -> bytes:
        """The tag under which a chunk was stored, as far as it is known."""
        entry = self.tiering.index.get(key)
        return NO_TAG if entry is None else entry.record.tag

    def held_chunks(self, namespace: bytes, keys: Sequence[bytes], digests: Sequence[bytes]) -> int:
        """How many leading chunks of a prefix some tier holds, as far as it is known here."""
        return len(self.tiering.index.held_prefix(namespace, keys, digests))

    def count(self, name: str, times: int = 1) -> None:
        """Count an event that happened outside of tiering."""
        self.tiering.counters[name] += times

    def stats(self) -> EngineStats:
        """What is where, what happened, and what namespaces keep and take, as of now. No I/O."""
        numbers = (HOST, *self.tiers)
        quotas = self.tiering.quotas
        return EngineStats(
            counters=dict(self.tiering.counters),
            host=self.tiering.usage(),
            secondary={number: self.tiering.tier_usage(number) for number in self.tiers},
            events={number: self.tiering.stats[number] for number in numbers},
            usage={number: self.tiering.usage_of(number).by_namespace() for number in numbers},
            quotas={namespace: quotas.get(namespace) or Quota() for namespace in quotas.namespaces()},
            curves=self.tiering.miss_ratio.curves(),
        )

    # -- work --------------------------------------------------------------------------------------------------

    def step(self) -> list[Update]:
        """Take in what ended, start what follows; returns what sessions must be told. Does not block.

        Call after every change made through ``tiering`` and whenever the executor notifies.
        """
        self.executor.drain_notifications()
        until_s = self.clock.monotonic() + (2 if self.is_behind else 1) * SLICE_S
        while self._finished:
            self._report(*self._finished.popleft())
            if self.clock.monotonic() >= until_s:
                break
        for number, result in self.guards.step():
            if result.size_bytes:
                self.sample_reads(number, result)
        now_s = self.clock.monotonic()
        self.tiering.expire_leases(now_s)
        self._keep_time(now_s)
        self._keep_pinned()
        self._submit_jobs()
        self._keep_uses(now_s)
        is_due = now_s >= self._progress_due_s
        if is_due and self.tiering.has_progress:
            self._progress_due_s = now_s + PROGRESS_INTERVAL_S
        updates = self.tiering.take_updates(with_progress=is_due)
        for update in updates:
            if isinstance(update, RowsEnded) and (lent := self._performer.lent.get(update.session)) is not None:
                lent.end((*update.good, *update.bad, *update.elsewhere))
        return updates

    def _keep_pinned(self) -> None:
        """Go on with what the last look at the pins found, a part with each step."""
        while self._pinning is not None or self._pins:
            if self._pinning is None:  # a later look waits until an earlier one has had its effect
                number, keys = self._pins.popitem()
                self._pinning = number, self.tiering.pinning(number, keys)
            number, steps = self._pinning
            if next(steps, self) is not self:
                return
            self._pinning = None
            self._warn_of_pins(number)

    def _warn_of_pins(self, number: int) -> None:
        """Say once where pins leave a tier no room for anything else."""
        pinned_bytes = self.tiering.tier_usage(number).pinned_bytes
        capacity_bytes = self.tiers[number].usage().capacity_bytes
        if capacity_bytes is None or pinned_bytes <= PINNED_SHARE_MAX * capacity_bytes:
            self._full_of_pins.discard(number)
        elif number not in self._full_of_pins:
            self._full_of_pins.add(number)
            logger.warning(
                "pins keep most of a tier, or more than its limit, so hardly anything else is stored there: unpin what "
                "nobody needs, or raise the limit. tier=%s pinned_bytes=%d capacity_bytes=%d",
                self.tiers[number].traits.name,
                pinned_bytes,
                capacity_bytes,
            )

    @property
    def is_behind(self) -> bool:
        """Whether more jobs have ended, or more seals are under way, than :meth:`step` takes in soon.

        Who brings work is to bring less.
        """
        return max(len(self._finished), self.tiering.sealing_count) >= ENDED_MAX

    @property
    def wait_s(self) -> float | None:
        """How long :meth:`step` may be left uncalled if nothing happens; None: for ever."""
        if self._finished or self._pinning is not None or self.tiering.wants_turn:
            return 0.0
        return max(0.0, self._progress_due_s - self.clock.monotonic()) if self.tiering.has_progress else None

    def _taken_out(self, number: int) -> None:
        """What a tier gives and says while it is out comes from another place, as fast as that is."""
        if self.tiers[number].traits.is_asked_while_out:
            self._throughput[number].forget()
            self._probe_times.forget()

    def _keep_time(self, now_s: float) -> None:
        if now_s >= self._retry_due_s:
            self._retry_due_s = now_s + RETRY_INTERVAL_S
            self.tiering.try_again()
            for number, undescribed in self._undescribed.items():
                if undescribed and number not in self._describing and self.tiering.index.readable[number]:
                    self._describing.add(number)
                    self.executor.submit(Pool.UPKEEP, 1, partial(self._describe, number))
        if now_s >= self._resume_due_s:
            self._resume_due_s = now_s + RESUME_INTERVAL_S
            self.tiering.resume_writes()
        if now_s >= self._absent_due_s:
            self._absent_due_s = now_s + ABSENT_S / 2
            self.tiering.age_absences()
        if now_s >= self._confirmed_due_s:
            self._confirmed_due_s = now_s + CONFIRMED_S / 2
            self.tiering.age_confirmed()

    def timed(self, namespace: bytes, answer: LookupAnswer) -> LookupAnswer:
        """A lookup's answer with the times until its chunks should be here, as far as tiers were measured."""
        return msgspec.structs.replace(
            answer,
            arriving=self._arrivals(namespace, answer.arriving, is_read=bool(answer.slots)),
            search_s=self._probe_times.slow_s if answer.unknown else 0.0,
        )

    def _arrivals(self, namespace: bytes, runs: Sequence[Arrival], *, is_read: bool) -> tuple[Arrival, ...]:
        """The first chunk alone, then the rest of its run and the others, each with the time until it should be here.

        The time is None from the first tier on that was never measured. Tiers are read at the same time. What is only
        asked about is read by nobody yet (``is_read``).
        """
        if runs and runs[0].chunks > 1:
            first, *rest = runs
            runs = [Arrival(first.tier, 1), Arrival(first.tier, first.chunks - 1), *rest]
        blob_bytes = self._performer.formats[namespace].blob_bytes
        now_s = self.clock.monotonic()
        own = Counter[int]()
        for run in runs if is_read else ():
            own[run.tier] += run.chunks * blob_bytes
        timed: list[Arrival] = []
        eta_s: float | None = 0.0
        read = Counter[int]()
        for run in runs:
            read[run.tier] += run.chunks * blob_bytes
            if run.tier != HOST and eta_s is not None:
                run_s = self._throughput[run.tier].eta_s(read[run.tier], own[run.tier], now_s)
                eta_s = None if run_s is None else max(eta_s, run_s)
            timed.append(Arrival(run.tier, run.chunks, eta_s))
        return tuple(timed)

    def read_bytes_per_s(self, tier: int) -> float | None:
        """How fast promotions from a tier run; None without samples."""
        return self._throughput[tier].bytes_per_s

    def served(self) -> Totals:
        """What ended lookups asked for and got since the start. The caller does not change it."""
        for namespace, chunks in self.tiering.hit_stats.take().items():
            self._served.add(chunks, self._geometries[namespace].chunk_tokens)
        return self._served

    def jobs(self, tier: int) -> dict[str, int]:
        """Operations of a tier that were handed to threads and have not ended, by kind."""
        return {kind: self._jobs[tier, kind] for kind in dict.fromkeys(_KINDS.values())}

    def _submit_jobs(self) -> None:
        reads: defaultdict[int, list[Read | ReadRow]] = defaultdict(list)
        seals: list[Seal] = []
        now_s = self.clock.monotonic()
        if dates := now_s >= self._dates_due_s:
            self._dates_due_s = now_s + DATES_INTERVAL_S
        for job in self.tiering.take_jobs(grants=not self.is_behind, dates=dates):
            if not isinstance(job, Seal | Grow):
                self._jobs[job.tier, _KINDS[type(job)]] += 1
            if isinstance(job, Read | ReadRow):
                self._throughput[job.tier].started(self.clock.monotonic(), self._blob_bytes(job))
            if isinstance(job, Probe):
                self._probe_times.started(job.record.key, self.clock.monotonic())
            is_remote = not isinstance(job, Seal | Grow) and self.tiers[job.tier].traits.is_shared
            if isinstance(job, Read | ReadRow) and not is_remote:
                reads[job.tier].append(job)
                continue
            if isinstance(job, WriteRow):
                self._row_writes.add(job)
                continue
            if isinstance(job, Seal):
                seals.append(job)
                continue
            pool, priority = (_REMOTE_POOL if is_remote else _POOL)[type(job)]
            self.executor.submit(pool, priority, partial(self._run, job))
        self._row_writes.all_added()
        for number, jobs in reads.items():
            self._share(number, jobs)
        if seals:
            self._share(HOST, seals)
        for shared in self._shared.values():
            shared.begin_tasks()

    def _share(self, tier: int, jobs: Sequence[SharedJob]) -> None:
        """Hand reads of a local tier, or seals, to threads: each a task, or many to a few tasks that share them."""
        turn = _POOL[type(jobs[0])]
        if len(jobs) <= READERS:
            for job in jobs:
                self.executor.submit(*turn, partial(self._run, job))
            return
        tasks = tasks_for(self._blob_bytes(jobs[0]))
        if (tier, tasks) not in self._shared:
            self._shared[tier, tasks] = SharedJobs(self.executor, turn, self._end, self.clock, tasks)
        self._shared[tier, tasks].add(jobs)

    def _end(self, job: Job) -> None:
        self._finished.append((job, self._perform(job)))

    def _run(self, job: Job) -> None:
        self._end(job)
        self.executor.notify()

    def _write_row(self, write: RowWrite) -> bool:
        result = self._stalls.run(write.job.tier, self._performer.write_row, write.job, write.follows)
        self._finished.append((write.job, result))
        return result.outcome is Outcome.OK

    def _perform(self, job: Job) -> JobResult:
        if isinstance(job, Seal | Grow) or self.tiers[job.tier].traits.is_shared:  # memory, or a client with deadlines
            return self._performer.perform(job)
        return self._stalls.run(job.tier, self._performer.perform, job)

    def _report(self, job: Job, ended: JobResult) -> None:
        outcome = ended.outcome
        if not isinstance(job, Seal | Grow):
            self._jobs[job.tier, _KINDS[type(job)]] -= 1
        match job:
            case Seal():
                self.tiering.sealed(job, outcome)
            case Write():
                self.tiering.written(job, outcome, ended.held)
            case Read():
                self._read_ended(job, outcome)
                self.tiering.read(job, outcome, ended.tag, ended.stored_by)
            case WriteRow():
                self._row_writes.reported(job)
                self.tiering.row_written(job, outcome)
            case ReadRow():
                self._read_ended(job, outcome)
                self.tiering.row_read(job, outcome, ended.tag, ended.stored_by)
            case Copy():
                self.tiering.copied(job, outcome, ended.held)
            case Probe():
                self._probe_times.finished(job.record.key, self.clock.monotonic())
                self.tiering.probed(job, ended.held if outcome is Outcome.OK else None)
            case Delete():
                self.tiering.deleted(job.tier, job.record, outcome)
            case Grow():
                self.tiering.grown(job, outcome)

    def _read_ended(self, job: Read | ReadRow, outcome: Outcome) -> None:
        now_s, size_bytes = self.clock.monotonic(), self._blob_bytes(job)
        self._throughput[job.tier].finished(now_s, size_bytes, _arrived(size_bytes, outcome))

    def _blob_bytes(self, job: Read | ReadRow | Seal) -> int:
        return self._performer.formats[job.record.namespace].blob_bytes

    def _keep_uses(self, now_s: float) -> None:
        """Note uses for the next flush: a tier's ledger may be locked for as long as its rows are copied."""
        uses = self.tiering.take_uses()
        for number, tier in self.tiers.items():
            self._uses[number].extend(uses)
            if now_s >= self._flush_due_s[number] and number not in self._flushing:
                self._flushing.add(number)
                self._flush_due_s[number] = now_s + tier.traits.flush_interval_s
                self.executor.submit(Pool.UPKEEP, 0, partial(self._flush, number))

    def _tell_uses(self, number: int) -> None:
        uses = self._uses[number]
        while uses:
            taken = [uses.popleft() for _ in range(min(len(uses), USES_TAKEN))]
            last = {record.key: record for record in reversed(taken)}  # a prompt's beginning comes with each part of it
            names = [BlobName.of(record) for record in reversed(last.values())]
            for first in range(0, len(names), USES_AT_ONCE):
                self.tiers[number].record_use(names[first : first + USES_AT_ONCE])

    def _flush(self, number: int) -> None:
        try:
            self._tell_uses(number)
            self.tiers[number].flush()
            self._pins[number] = self.tiers[number].pinned()
        except TierUnavailable as exc:
            logger.warning("recency was not persisted. tier=%s %s", self.tiers[number].traits.name, exc)
        finally:
            self._flushing.discard(number)

    def close(self) -> None:
        """End the threads and close tiers and arena, all of them. What was not written yet is lost; drain first."""
        self._row_writes.close()
        for shared in self._shared.values():
            shared.close()
        with ExitStack() as closing:
            closing.callback(self.arena.close)
            for tier in self.tiers.values():
                closing.callback(tier.close)
            for number in self.tiers:
                closing.callback(self._tell_uses, number)
            self.executor.close()


def _arrived(size_bytes: int, outcome: Outcome) -> int | None:
    """What a read moved: all of the blob even if it was bad, nothing if it failed, None if none was to be read.

    As where its row was taken back before it began: that is no failure of the tier.
    """
    if outcome in (Outcome.MISSING, Outcome.ROW_GONE):
        return None
    return 0 if outcome is Outcome.UNAVAILABLE else size_bytes
