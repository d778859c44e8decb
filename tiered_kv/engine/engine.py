"""The engine: one owner that feeds the hierarchy, performs its jobs in threads and hands out its updates.

Called by the server's loop, by the in-process cache and, with a stepping executor, by tests. Nothing in here blocks
except :meth:`Engine.start` (scans), :meth:`Engine.open_session` (writes one small file) and :meth:`Engine.close`.

    field                                 owner
    hierarchy, _throughput, _geometries   the caller of ``step``
    tiers, arena                          executor threads; the owner only asks tiers for usage and notes recency
    _finished                             appended by executor threads, emptied by the owner (both are atomic)
    _is_flushing                          set by the owner, cleared by the flushing thread
"""

import logging
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from tiered_kv.chunks.arena import SLAB_BYTES, Arena
from tiered_kv.chunks.geometry import ChunkGeometry
from tiered_kv.chunks.header import BlobFormat
from tiered_kv.engine.clock import Clock
from tiered_kv.engine.executor import Executor, Pool
from tiered_kv.engine.performer import Performer
from tiered_kv.engine.throughput import Throughput
from tiered_kv.errors import ConfigError, TierUnavailable
from tiered_kv.hierarchy.hierarchy import Hierarchy, Limits
from tiered_kv.hierarchy.plan import ChunkRecord, Delete, Grow, Job, Outcome, Read, Seal, SlotId, Update, Write
from tiered_kv.keys.namespace import Namespace
from tiered_kv.tiers.base import BlobName, Tier

logger = logging.getLogger(__name__)

FLUSH_INTERVAL_S = 5.0
"""How often recency and sizes are persisted: what a SIGKILL may lose of the order of eviction."""

RETRY_INTERVAL_S = 30.0
"""How long the arena does not grow after the machine refused it memory, and a full medium is not asked to delete."""

MINIMUM_SLOTS = 4
"""Chunks the arena must hold at least: one to load, one to store, and one of each in flight."""

_POOL: dict[type, tuple[Pool, int]] = {
    Read: (Pool.LOAD, 0),
    Grow: (Pool.LOAD, 0),
    Seal: (Pool.LOAD, 1),
    Delete: (Pool.STORE, 0),
    Write: (Pool.STORE, 1),
}


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
        self._clock = clock
        self._performer = Performer(self.tiers, arena, clock, formats)
        self._throughput = [Throughput() for _ in self.tiers]
        self._geometries: dict[bytes, ChunkGeometry] = {}
        self._finished: deque[tuple[Job, Outcome]] = deque()
        self._flush_due_s = clock.monotonic() + FLUSH_INTERVAL_S
        self._retry_due_s = clock.monotonic() + RETRY_INTERVAL_S
        self._is_flushing = False

    @staticmethod
    def build_hierarchy(host_bytes: int, tiers: Sequence[Tier], limits: Limits | None = None) -> Hierarchy:
        """The hierarchy that fits these tiers."""
        return Hierarchy(host_bytes, [tier.usage().capacity_bytes for tier in tiers], limits)

    def start(self) -> None:
        """Learn what the tiers hold. Blocks for the time of the scans."""
        for number, tier in enumerate(self.tiers):
            started_s = self._clock.monotonic()
            count = size_bytes = 0
            for info in tier.scan():
                record = ChunkRecord(
                    info.name.namespace, info.name.key, info.parent, info.chunk_index, info.prefix_sha256
                )
                self.hierarchy.restore(number, record, info.size_bytes)
                count += 1
                size_bytes += info.size_bytes
            self.hierarchy.restored(number, max(0, tier.usage().used_bytes - size_bytes))
            seconds = self._clock.monotonic() - started_s
            logger.info("tier scanned. tier=%s blobs=%d seconds=%.3f", tier.traits.name, count, seconds)
        self._submit_jobs()

    def sample_read(self, tier: int, size_bytes: int, seconds: float) -> None:
        """Add a measured read of a tier, e.g. the self-test's, as the first sample of its throughput."""
        self._throughput[tier].sample(size_bytes, seconds)

    # -- sessions ----------------------------------------------------------------------------------------------

    def open_session(self, namespace: Namespace, geometry: ChunkGeometry) -> tuple[int, BlobFormat]:
        """Start a session for chunks of one namespace.

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
            try:
                tier.describe(namespace.digest, namespace.record)
            except TierUnavailable as exc:
                self.hierarchy.counters["describe_failed"] += 1
                logger.warning("namespace.json was not written. %s", exc)
        self._performer.formats[namespace.digest] = blob_format
        self._geometries[namespace.digest] = geometry
        session = self.hierarchy.open_session(namespace.digest, blob_format.blob_bytes)
        self._submit_jobs()
        return session, blob_format

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
            job, outcome = self._finished.popleft()
            self._report(job, outcome)
        now_s = self._clock.monotonic()
        if now_s >= self._retry_due_s:
            self._retry_due_s = now_s + RETRY_INTERVAL_S
            self.hierarchy.try_again()
        self._submit_jobs()
        self._persist_uses(now_s)
        return self.hierarchy.take_updates()

    def eta_s(self, tier: int, size_bytes: int) -> float | None:
        """Seconds a promotion of so many bytes should take; None without samples."""
        rate = self._throughput[tier].bytes_per_s
        return size_bytes / rate if rate else None

    def read_bytes_per_s(self, tier: int) -> float | None:
        """How fast promotions from a tier run; None without samples."""
        return self._throughput[tier].bytes_per_s

    def _submit_jobs(self) -> None:
        for job in self.hierarchy.take_jobs():
            if isinstance(job, Read):
                self._throughput[job.tier].started(self._clock.monotonic())
            pool, priority = _POOL[type(job)]
            self.executor.submit(pool, priority, partial(self._run, job))

    def _run(self, job: Job) -> None:
        self._finished.append((job, self._performer.perform(job)))
        self.executor.notify()

    def _report(self, job: Job, outcome: Outcome) -> None:
        match job:
            case Seal():
                self.hierarchy.sealed(job, outcome)
            case Write():
                self.hierarchy.written(job, outcome)
            case Read():
                self._throughput[job.tier].finished(self._clock.monotonic(), self._bytes_read(job, outcome))
                self.hierarchy.read(job, outcome)
            case Delete():
                self.hierarchy.deleted(job.tier, job.record, outcome)
            case Grow():
                self.hierarchy.grown(job, outcome)

    def _bytes_read(self, job: Read, outcome: Outcome) -> int | None:
        """What a read moved: all of the blob even if it was bad, nothing if it failed, None if there was no blob."""
        if outcome is Outcome.MISSING:
            return None
        return 0 if outcome is Outcome.UNAVAILABLE else self._performer.formats[job.record.namespace].blob_bytes

    def _persist_uses(self, now_s: float) -> None:
        uses = [BlobName(record.namespace, record.key) for record in self.hierarchy.take_uses()]
        for tier in self.tiers if uses else ():
            tier.record_use(uses)
        if now_s < self._flush_due_s or self._is_flushing:
            return
        self._is_flushing = True
        self._flush_due_s = now_s + FLUSH_INTERVAL_S
        self.executor.submit(Pool.STORE, 0, self._flush)

    def _flush(self) -> None:
        try:
            for tier in self.tiers:
                tier.flush()
        except TierUnavailable as exc:
            logger.warning("recency was not persisted. %s", exc)
        finally:
            self._is_flushing = False

    def close(self) -> None:
        """End the threads and close tiers and arena, all of them. What was not written yet is lost; drain first."""
        with ExitStack() as closing:
            closing.callback(self.arena.close)
            for tier in self.tiers:
                closing.callback(tier.close)
            self.executor.close()
