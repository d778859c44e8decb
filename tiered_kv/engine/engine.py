"""The engine: one owner that feeds the hierarchy, performs its jobs in threads and hands out its updates.

Called by the server's loop, by the in-process cache and, with a stepping executor, by tests. Nothing in here blocks
except :meth:`Engine.start` (scans), :meth:`Engine.open_session` (writes one small file) and :meth:`Engine.close`.

    field                                         owner
    hierarchy, guards, _throughput, _probe_times,
    _geometries, _served, _jobs                   the caller of ``step``
    tiers, arena                                  executor threads; the owner asks for usage and notes recency
    _finished                                     appended by executor threads, emptied by the owner (both are atomic)
    _flushing                                     a tier's number is added by the owner, removed by the flushing thread
    _stalls                                       told by executor threads, asked by the owner
    _pins                                         set by the flushing thread, taken by the owner (both are atomic)
"""

import logging
import math
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import MappingProxyType

from tiered_kv.chunks.arena import SLAB_BYTES, Arena
from tiered_kv.chunks.geometry import ChunkGeometry
from tiered_kv.chunks.header import BlobFormat
from tiered_kv.engine.clock import Clock
from tiered_kv.engine.executor import Executor, Pool
from tiered_kv.engine.guards import Guards
from tiered_kv.engine.performer import Ended, Performer
from tiered_kv.engine.served import Totals
from tiered_kv.engine.stalls import Stalls
from tiered_kv.engine.throughput import ProbeTimes, Throughput
from tiered_kv.errors import CapacityExceeded, Closed, ConfigError, TierUnavailable
from tiered_kv.hierarchy.admission import ALL
from tiered_kv.hierarchy.hierarchy import Hierarchy
from tiered_kv.hierarchy.limits import Limits
from tiered_kv.hierarchy.plan import (
    Arriving,
    ChunkRecord,
    Copy,
    Delete,
    Grow,
    Job,
    Outcome,
    Probe,
    Read,
    Seal,
    SlotId,
    Update,
    Write,
)
from tiered_kv.keys.namespace import Namespace
from tiered_kv.keys.stored_by import UNKNOWN
from tiered_kv.tiers.base import BlobName, Tier

logger = logging.getLogger(__name__)

RETRY_INTERVAL_S = 30.0
"""How long the arena does not grow after the machine refused it memory, and a full medium is not asked to delete."""

RESUME_INTERVAL_S = 1.0
"""How long writes to a shared tier pause after one found no room or no answer."""

ABSENT_S = 10.0
"""How long, at most, a chunk counts as absent from a shared tier after a probe did not find it."""

MINIMUM_SLOTS = 4
"""Chunks the arena must hold at least: one to load, one to store, and one of each in flight."""

_POOL: dict[type, tuple[Pool, int]] = {
    Read: (Pool.LOAD, 0),
    Grow: (Pool.LOAD, 0),
    Seal: (Pool.LOAD, 1),
    Delete: (Pool.STORE, 0),
    Write: (Pool.STORE, 1),
}

_REMOTE_POOL: dict[type, tuple[Pool, int]] = {
    Probe: (Pool.REMOTE_LOAD, 0),
    Read: (Pool.REMOTE_LOAD, 1),
    Delete: (Pool.REMOTE_STORE, 0),
    Write: (Pool.REMOTE_STORE, 1),
    Copy: (Pool.REMOTE_STORE, 1),
}

_KINDS: dict[type, str] = {Read: "get", Write: "put", Copy: "put", Probe: "contains", Delete: "delete"}


class Engine:
    """Hierarchy, tiers, arena and threads as one cache.

    Threads: one owner; see the module's ownership table.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        arena: Arena,
        hierarchy: Hierarchy,
        executor: Executor,
        clock: Clock,
        formats: dict[bytes, BlobFormat],
    ) -> None:
        """Take the parts; ``formats`` is shared with the verifying wrappers and filled as sessions open."""
        self.tiers = list(tiers)
        self.arena = arena
        self.hierarchy = hierarchy
        self.executor = executor
        self.clock = clock
        self._performer = Performer(self.tiers, arena, clock, formats)
        self._throughput = [Throughput() for _ in self.tiers]
        self._probe_times = ProbeTimes()
        self._geometries: dict[bytes, ChunkGeometry] = {}
        self._served = Totals()
        self._jobs: Counter[tuple[int, str]] = Counter()
        self._finished: deque[tuple[Job, Ended]] = deque()
        now_s = clock.monotonic()
        self._flush_due_s = [now_s + tier.traits.flush_interval_s for tier in self.tiers]
        self._flushing: set[int] = set()
        self._pins: dict[int, Collection[bytes]] = {}
        self._retry_due_s = now_s + RETRY_INTERVAL_S
        self._resume_due_s = now_s + RESUME_INTERVAL_S
        self._absent_due_s = now_s + ABSENT_S / 2
        self._stalls = Stalls(clock)
        self.guards = Guards(hierarchy, executor, clock, self._stalls)

    @staticmethod
    def build_hierarchy(
        host_bytes: int,
        tiers: Sequence[Tier],
        limits: Limits | None = None,
        *,
        eviction: str = "multi-queue",
        admissions: Mapping[str, str] = MappingProxyType({}),
    ) -> Hierarchy:
        """The hierarchy that fits these tiers; only the last may be shared. ``admissions`` are by their names."""
        capacities = [None if tier.traits.is_shared else tier.usage().capacity_bytes for tier in tiers]
        is_last_shared = bool(tiers) and tiers[-1].traits.is_shared
        rules = [admissions.get(tier.traits.name, ALL) for tier in tiers]
        return Hierarchy(
            host_bytes, capacities, limits, is_last_shared=is_last_shared, eviction=eviction, admissions=rules
        )

    def start(self) -> None:
        """Learn what this machine's tiers hold. Blocks for the time of the scans; a shared tier is not scanned."""
        for number, tier in enumerate(self.tiers):
            if tier.traits.is_shared:
                self.hierarchy.restored(number)
                continue
            started_s = self.clock.monotonic()
            count = size_bytes = 0
            for info in tier.scan():
                place = info.name.namespace, info.name.key, info.parent, info.chunk_index, info.prefix_sha256
                record = ChunkRecord(*place, info.tag, info.stored_by)
                self.hierarchy.restore(number, record, info.size_bytes)
                count += 1
                size_bytes += info.size_bytes
            self.hierarchy.set_pinned(number, tier.pinned())
            self.hierarchy.restored(number, max(0, tier.usage().used_bytes - size_bytes))
            seconds = self.clock.monotonic() - started_s
            logger.info("tier scanned. tier=%s blobs=%d seconds=%.3f", tier.traits.name, count, seconds)
        self._submit_jobs()

    def sample_read(self, tier: int, size_bytes: int, seconds: float) -> None:
        """Add a measured read of a tier, e.g. the self-test's, as the first sample of its throughput."""
        self._throughput[tier].sample(size_bytes, seconds)

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
        slots = self.hierarchy.slots.slot_count_max(blob_format.blob_bytes)
        if slots < MINIMUM_SLOTS:
            raise ConfigError(
                f"host_bytes={self.hierarchy.slots.host_bytes} holds {slots} chunks of {blob_format.blob_bytes} bytes; "
                f"at least {MINIMUM_SLOTS} are needed: set host_bytes to {MINIMUM_SLOTS * blob_format.blob_bytes} or "
                "more, or chunk_tokens to less"
            )
        for tier in self.tiers:
            if tier.traits.is_shared:
                self.executor.submit(Pool.UPKEEP, 1, partial(self._describe, tier, namespace, stored_by))
            else:
                self._describe(tier, namespace, stored_by)
        self._performer.formats[namespace.digest] = blob_format
        self._geometries[namespace.digest] = geometry
        session = self.hierarchy.open_session(namespace.digest, blob_format.blob_bytes, lease_s)
        self._submit_jobs()
        return session, blob_format

    @staticmethod
    def _describe(tier: Tier, namespace: Namespace, stored_by: str) -> None:
        try:
            tier.describe(namespace.digest, namespace.described(stored_by))
        except (TierUnavailable, CapacityExceeded, Closed) as exc:
            logger.warning("namespace.json was not written. tier=%s %s", tier.traits.name, exc)

    def has_memory(self, slot_bytes: int) -> bool:
        """Whether slots of this size exist, or none will soon: then a session opens without, rather than never."""
        slots = self.hierarchy.slots
        if slots.slot_count(slot_bytes):
            return True
        return not slots.is_growing(slot_bytes) or self.hierarchy.counters["slab_refused"] > 0

    def format_of(self, namespace: bytes) -> BlobFormat | None:
        """The blob format of a namespace that some session opened."""
        return self._performer.formats.get(namespace)

    def slot_view(self, slot: SlotId, size_bytes: int) -> memoryview:
        """The bytes of a slot, for callers in this process."""
        return self._performer.slot_view(slot, size_bytes)

    # -- work --------------------------------------------------------------------------------------------------

    def step(self) -> list[Update]:
        """Take in what ended, start what follows; returns what sessions must be told. Does not block.

        Call after every change made through ``hierarchy`` and whenever the executor notifies.
        """
        self.executor.drain_notifications()
        while self._finished:
            self._report(*self._finished.popleft())
        for number, result in self.guards.step():
            if result.size_bytes:
                self.sample_read(number, result.size_bytes, result.read_s)
        now_s = self.clock.monotonic()
        self.hierarchy.expire_leases(now_s)
        self._keep_time(now_s)
        while self._pins:
            self.hierarchy.set_pinned(*self._pins.popitem())
        self._submit_jobs()
        self._persist_uses(now_s)
        return self.hierarchy.take_updates()

    def _keep_time(self, now_s: float) -> None:
        if now_s >= self._retry_due_s:
            self._retry_due_s = now_s + RETRY_INTERVAL_S
            self.hierarchy.try_again()
        if now_s >= self._resume_due_s:
            self._resume_due_s = now_s + RESUME_INTERVAL_S
            self.hierarchy.resume_writes()
        if now_s >= self._absent_due_s:
            self._absent_due_s = now_s + ABSENT_S / 2
            self.hierarchy.age_absences()

    def arrivals(self, namespace: bytes, runs: Arriving) -> list[tuple[int, float | None]]:
        """For chunks that arrive: the first alone, then those up to the end of each run, and the seconds until they
        should be here.

        The time is None from the first tier on that was never measured. Tiers are read at the same time.
        """
        if runs and runs[0][1] > 1:
            (tier, chunks), *rest = runs
            runs = [(tier, 1), (tier, chunks - 1), *rest]
        blob_bytes = self._performer.formats[namespace].blob_bytes
        now_s = self.clock.monotonic()
        own = Counter[int]()
        for tier, chunks in runs:
            if tier is not None:
                own[tier] += chunks * blob_bytes
        parts: list[tuple[int, float | None]] = []
        until, eta_s = 0, 0.0
        read = Counter[int]()
        for tier, chunks in runs:
            until += chunks
            if tier is not None:
                read[tier] += chunks * blob_bytes
                part_s = self._throughput[tier].eta_s(read[tier], own[tier], now_s)
                if part_s is None:
                    return [*parts, (sum(chunks for _, chunks in runs), None)]
                eta_s = max(eta_s, part_s)
            parts.append((until, eta_s))
        return parts

    def search_s(self) -> float | None:
        """Seconds that a question to a shared tier takes; None without samples."""
        return self._probe_times.slow_s

    def read_bytes_per_s(self, tier: int) -> float | None:
        """How fast promotions from a tier run; None without samples."""
        return self._throughput[tier].bytes_per_s

    def served(self) -> Totals:
        """What ended lookups asked for and got since the start. The caller does not change it."""
        for namespace, chunks in self.hierarchy.served.take().items():
            self._served.add(chunks, self._geometries[namespace].chunk_tokens)
        return self._served

    def jobs(self, tier: int) -> dict[str, int]:
        """Operations of a tier that were handed to threads and have not ended, by kind."""
        return {kind: self._jobs[tier, kind] for kind in dict.fromkeys(_KINDS.values())}

    def _submit_jobs(self) -> None:
        for job in self.hierarchy.take_jobs():
            if not isinstance(job, Seal | Grow):
                self._jobs[job.tier, _KINDS[type(job)]] += 1
            if isinstance(job, Read):
                self._throughput[job.tier].started(self.clock.monotonic(), self._blob_bytes(job))
            if isinstance(job, Probe):
                self._probe_times.started(job.record.key, self.clock.monotonic())
            is_remote = not isinstance(job, Seal | Grow) and self.tiers[job.tier].traits.is_shared
            pool, priority = (_REMOTE_POOL if is_remote else _POOL)[type(job)]
            self.executor.submit(pool, priority, partial(self._run, job))

    def _run(self, job: Job) -> None:
        if isinstance(job, Seal | Grow) or self.tiers[job.tier].traits.is_shared:  # memory, or a client with deadlines
            ended = self._performer.perform(job)
        else:
            with self._stalls.running(job.tier):
                ended = self._performer.perform(job)
        self._finished.append((job, ended))
        self.executor.notify()

    def _report(self, job: Job, ended: Ended) -> None:
        outcome = ended.outcome
        if not isinstance(job, Seal | Grow):
            self._jobs[job.tier, _KINDS[type(job)]] -= 1
        match job:
            case Seal():
                self.hierarchy.sealed(job, outcome)
            case Write():
                self.hierarchy.written(job, outcome)
            case Read():
                now_s, size_bytes = self.clock.monotonic(), self._blob_bytes(job)
                self._throughput[job.tier].finished(now_s, size_bytes, _arrived(size_bytes, outcome))
                self.hierarchy.read(job, outcome, ended.tag, ended.stored_by)
            case Copy():
                self.hierarchy.copied(job, outcome)
            case Probe():
                self._probe_times.finished(job.record.key, self.clock.monotonic())
                self.hierarchy.probed(job, outcome)
            case Delete():
                self.hierarchy.deleted(job.tier, job.record, outcome)
            case Grow():
                self.hierarchy.grown(job, outcome)

    def _blob_bytes(self, job: Read) -> int:
        return self._performer.formats[job.record.namespace].blob_bytes

    def _persist_uses(self, now_s: float) -> None:
        uses = [BlobName(r.namespace, r.key, r.parent, r.chunk_index) for r in self.hierarchy.take_uses()]
        for number, tier in enumerate(self.tiers):
            if uses:
                tier.record_use(uses)
            if now_s >= self._flush_due_s[number] and number not in self._flushing:
                self._flushing.add(number)
                self._flush_due_s[number] = now_s + tier.traits.flush_interval_s
                self.executor.submit(Pool.UPKEEP, 0, partial(self._flush, number))

    def _flush(self, number: int) -> None:
        try:
            self.tiers[number].flush()
            self._pins[number] = self.tiers[number].pinned()
        except TierUnavailable as exc:
            logger.warning("recency was not persisted. tier=%s %s", self.tiers[number].traits.name, exc)
        finally:
            self._flushing.discard(number)

    def close(self) -> None:
        """End the threads and close tiers and arena, all of them. What was not written yet is lost; drain first."""
        with ExitStack() as closing:
            closing.callback(self.arena.close)
            for tier in self.tiers:
                closing.callback(tier.close)
            self.executor.close()


def _arrived(size_bytes: int, outcome: Outcome) -> int | None:
    """What a read moved: all of the blob even if it was bad, nothing if it failed, None if there was no blob."""
    if outcome is Outcome.MISSING:
        return None
    return 0 if outcome is Outcome.UNAVAILABLE else size_bytes
