"""Performs tiering's jobs on real tiers and a real arena, and turns how they ended into an outcome.

The only place where tier exceptions become outcomes. Called from the executor's threads.
"""

import logging
import mmap
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec

from tiered_kv.chunks.arena import Arena
from tiered_kv.chunks.header import BlobFormat, verified_fields
from tiered_kv.engine.clock import Clock
from tiered_kv.engine.lent_rows import LentRows, RowGone
from tiered_kv.errors import CapacityExceeded, ChunkCorrupt, ChunkMismatch, Closed, TierUnavailable
from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.keys.naming import relative_path
from tiered_kv.keys.tail_keys import tail_tokens
from tiered_kv.tiering.slots import SLOTS_PER_SLAB_MAX
from tiered_kv.tiering.types import (
    HOST,
    Copy,
    Delete,
    Grow,
    Job,
    Outcome,
    Probe,
    Read,
    ReadRow,
    Seal,
    SlotId,
    Write,
    WriteRow,
)
from tiered_kv.tiers.base import BlobName, Tier

logger = logging.getLogger(__name__)

WARN_INTERVAL_S = 10.0
"""Between two lines about the same outcome of the same tier: a dead medium fails thousands of times, and counters count
them."""


Follows = Callable[[Callable[[], bool]], bool]


class JobResult(msgspec.Struct, frozen=True, gc=False):
    """How a job ended; not known to the garbage collector, as jobs are not.

    Attributes:
        tag: Of a read, whose the chunk is, as its header says.
        stored_by: Of a read, who stored it, as its header says.
        held: Of a probe, how many of its blobs are there, from the first on; of a write, of those that it goes behind.
    """

    outcome: Outcome
    tag: bytes | None = None
    stored_by: str | None = None
    held: int = 0


_OK, _MISSING = JobResult(Outcome.OK), JobResult(Outcome.MISSING)
_ROW_GONE, _ROW_CHANGED = JobResult(Outcome.ROW_GONE), JobResult(Outcome.ROW_CHANGED)
_NO_PARENT = JobResult(Outcome.NO_PARENT)


class Performer:
    """Blocking execution of jobs.

    Threads: any number; jobs never share a slot.

        field             guarded by
        formats           filled by the owner before the first job of a namespace; read by all
        lent              as formats; by session
        _quiet_until_s    _lock; by outcome and tier
    """

    def __init__(self, tiers: Mapping[int, Tier], arena: Arena, clock: Clock, formats: dict[bytes, BlobFormat]) -> None:
        self._tiers = tiers
        self._arena = arena
        self._clock = clock
        self.formats = formats
        self.lent: dict[int, LentRows] = {}
        self._lock = threading.Lock()
        self._quiet_until_s: dict[tuple[Outcome, int], float] = {}

    def slot_view(self, slot: SlotId, size_bytes: int) -> memoryview:
        """The bytes of a slot."""
        slab, index = divmod(slot, SLOTS_PER_SLAB_MAX)
        return self._arena.view(slab, index * size_bytes, size_bytes)

    def perform(self, job: Job) -> JobResult:
        """Do the job; never raises."""
        return self._outcome(job, partial(self._perform, job))

    def write_row(self, job: WriteRow, follows: Follows) -> JobResult:
        """Seal a row and put it; never raises.

        Args:
            follows: Waits for the write of the chunk before it as long as this one's is wanted, and says whether that
                is in the tier.
        """
        return self._outcome(job, partial(self._write_row, job, follows))

    def _outcome(self, job: Job, perform: Callable[[], JobResult]) -> JobResult:
        try:
            return perform()
        except ChunkCorrupt as exc:
            return self._failed(job, Outcome.CORRUPT, exc)
        except ChunkMismatch as exc:
            return self._failed(job, Outcome.FOREIGN, exc)
        except CapacityExceeded as exc:
            return self._failed(job, Outcome.NO_ROOM, exc)
        except RowGone as exc:  # nothing is wrong with the tier
            logger.debug("a lent row was not used. operation=%s cause=%s", type(job).__name__.lower(), exc)
            return _ROW_GONE
        except (TierUnavailable, Closed, MemoryError) as exc:
            return self._failed(job, Outcome.UNAVAILABLE, exc)
        except Exception:  # a storage event may never end a thread; a miss is always right
            logger.exception("job failed in a way no tier declared. job=%s", type(job).__name__)
            return JobResult(Outcome.UNAVAILABLE)

    def _failed(self, job: Job, outcome: Outcome, reason: Exception) -> JobResult:
        """Say what failed, where and why: once in a while, because the medium may fail for thousands of blobs."""
        tier = HOST if isinstance(job, Seal | Grow) else job.tier
        now_s = self._clock.monotonic()
        with self._lock:
            is_quiet = now_s < self._quiet_until_s.get((outcome, tier), now_s)
            if not is_quiet:
                self._quiet_until_s[outcome, tier] = now_s + WARN_INTERVAL_S
        # A shared tier without room is every day's work where it has a limit: the write is put off, not lost.
        is_usual = outcome is Outcome.NO_ROOM and tier != HOST and self._tiers[tier].traits.is_shared
        logger.log(
            logging.DEBUG if is_quiet or is_usual else logging.WARNING,
            "a blob could not be handled. outcome=%s operation=%s tier=%s blob=%s cause=%s",
            outcome.value,
            type(job).__name__.lower(),
            "host" if tier == HOST else self._tiers[tier].traits.name,
            "" if isinstance(job, Grow) else relative_path(BlobName.of(job.record)),
            # Its text, not the exception: a handler that keeps records would keep the traceback's views of the arena.
            str(reason) or type(reason).__name__,
        )
        return JobResult(outcome)

    def _perform(self, job: Job) -> JobResult:
        match job:
            case Seal(record, slot):
                with self._blob(record, slot) as blob:
                    self.formats[record.namespace].seal(blob, record, self._clock.wall())
            case Write(tier, record, slot, behind):
                if (held := self._count_behind(tier, behind)) < len(behind):
                    return JobResult(Outcome.NO_PARENT, held=held)
                with self._blob(record, slot) as blob:
                    if tail_tokens(record.key):  # sealed only now: few are ever written
                        self.formats[record.namespace].seal(blob, record, self._clock.wall())
                    self._tiers[tier].put(BlobName.of(record), blob)
            case Read(tier, record, slot):
                with self._blob(record, slot) as blob:
                    return self._read(tier, record, blob)
            case WriteRow():
                raise AssertionError("a row is written by write_row, behind the chunk before it")
            case ReadRow(tier, record, use):
                header_bytes = self.formats[record.namespace].header_bytes
                with self._lent(job).mapped(use, header_bytes, is_read=True) as blob:
                    return self._read(tier, record, blob)
            case Delete(tier, record):
                return _OK if self._tiers[tier].delete(BlobName.of(record)) else _MISSING
            case Copy():
                return self._copy(job)
            case Probe(tier, records, hint):
                return JobResult(Outcome.OK, held=self._tiers[tier].count_held(list(map(BlobName.of, records)), hint))
            case Grow(slab, size_bytes):
                self._arena.allocate(slab, size_bytes)
        return _OK

    def _read(self, tier: int, record: ChunkRecord, blob: memoryview) -> JobResult:
        if not self._tiers[tier].get_into(BlobName.of(record), blob):
            return _MISSING
        digest, tag, stored_by = verified_fields(blob)  # the tier has checked every byte
        if digest != record.prefix_sha256:
            raise ChunkCorrupt(f"prefix digest differs from the index. key={record.key.hex()}")
        return JobResult(Outcome.OK, tag, stored_by)

    def _lent(self, job: WriteRow | ReadRow) -> LentRows:
        lent = self.lent.get(job.use.session)
        if lent is None:
            raise RowGone(f"the engine that lent the row has left. row={job.use.row}")
        return lent

    def _write_row(self, job: WriteRow, follows: Follows) -> JobResult:
        """Seal a row and put it. What was sealed while the row was lent has its own hash, whatever becomes of it."""
        form, lent, tier = self.formats[job.record.namespace], self._lent(job), self._tiers[job.tier]
        with lent.mapped(job.use, form.header_bytes, is_read=False) as blob:
            form.seal(blob, job.record, self._clock.wall())
            lent.check(job.use)

            def is_lent() -> bool:
                return lent.is_open(job.use)

            if not tier.put_if(BlobName.of(job.record), blob, lambda: follows(is_lent) and is_lent()):
                lent.check(job.use)
                return _NO_PARENT
        try:
            lent.check(job.use)
        except RowGone:  # it may have changed while it was written
            return _ROW_CHANGED
        return _OK

    def _copy(self, job: Copy) -> JobResult:
        """Read from the tier above into memory of our own, verified, and put it below."""
        name, target = BlobName.of(job.record), self._tiers[job.tier]
        if (held := self._count_behind(job.tier, job.behind)) < len(job.behind):
            return JobResult(Outcome.NO_PARENT, held=held)
        if job.is_asked_first and target.contains(name):
            return _OK
        with mmap.mmap(-1, self.formats[job.record.namespace].blob_bytes) as memory:  # page-aligned, as slots are
            with memoryview(memory) as blob:
                try:
                    if self._read(job.source, job.record, blob).outcome is not Outcome.OK:
                        return JobResult(Outcome.NO_SOURCE)
                except (ChunkCorrupt, ChunkMismatch, TierUnavailable) as exc:
                    return self._failed(job, Outcome.NO_SOURCE, exc)
                target.put(name, blob)
        return _OK

    def _count_behind(self, tier: int, behind: Sequence[ChunkRecord]) -> int:
        """How many of the chunks that a blob goes behind are there, from the first on."""
        is_there = self._tiers[tier].contains
        return next((n for n, record in enumerate(behind) if not is_there(BlobName.of(record))), len(behind))

    def _blob(self, record: ChunkRecord, slot: SlotId) -> memoryview:
        return self.slot_view(slot, self.formats[record.namespace].blob_bytes)
