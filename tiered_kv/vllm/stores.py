"""The store path of the scheduler's side: which chunks are saved, and who pins their blocks until all ranks copied.

A chunk's blocks are pinned with ``block_pool.touch`` when it is queued and let go when the copy into the slot is
reported by all ranks: milliseconds, and never for disk or network. Stores are the first thing to be dropped: without a
free slot they wait a little, and then their pins end.
"""

import itertools
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tiered_kv.config import Config
from tiered_kv.hierarchy.plan import ChunkRecord, SlotId
from tiered_kv.keys.rolling import PrefixKeys
from tiered_kv.server.client import SchedulerClient
from tiered_kv.vllm.groups import BlockTables, CacheGroups
from tiered_kv.vllm.metadata import SaveJob, SaveReport

QUEUED_MAX_S = 2.0
"""A queued chunk that got no slot for this long is dropped: its blocks are worth more to vLLM."""

ALL_DONE = sys.maxsize
"""What :meth:`Stores.queue` returns for a request of which nothing more can be stored."""

STORED_KEYS_MAX = 1 << 16
"""Keys remembered as stored, so that concurrent requests with one prefix do not store it twice."""


@dataclass(slots=True)
class _Chunk:
    record: ChunkRecord
    blocks: tuple[Any, ...]
    block_ids: tuple[tuple[int, ...], ...]
    queued_s: float


@dataclass(slots=True)
class _Job:
    generation: int
    resets: int
    chunks: list[tuple[SlotId, _Chunk]]
    ranks_done: int = 0
    is_failed: bool = False
    is_let_go: bool = False


class Stores:
    """Chunks on their way from paged KV into granted slots.

    Threads: vLLM's scheduler thread only.
    """

    def __init__(
        self,
        config: Config,
        client: SchedulerClient,
        groups: CacheGroups,
        counters: Counter[str],
        monotonic: Callable[[], float],
    ) -> None:
        self._config = config
        self._client = client
        self._groups = groups
        self._counters = counters
        self._monotonic = monotonic
        self._block_pool: Any = None
        self._queue: deque[_Chunk] = deque()
        self._jobs: OrderedDict[int, _Job] = OrderedDict()
        self._job_ids = itertools.count(1)
        self._stored: OrderedDict[bytes, None] = OrderedDict()
        self._in_flight: set[bytes] = set()
        self._pinned = 0
        self._resets = 0

    def bind_block_pool(self, block_pool: Any) -> None:
        """Take vLLM's block pool."""
        self._block_pool = block_pool

    @property
    def has_work(self) -> bool:
        """Whether blocks are pinned or copies run."""
        return self._pinned > 0 or bool(self._jobs)

    @property
    def has_pins(self) -> bool:
        """Whether blocks are pinned."""
        return self._pinned > 0

    def queue(self, keys: PrefixKeys, tables: BlockTables, chunks: range, *, held: int, tag: bytes) -> int:
        """Queue chunks of a request that are not known to be stored; pins their blocks.

        Args:
            tables: The request's blocks, per KV cache group.
            tag: Whose they are.

        Returns the first chunk that was not dealt with, because too many blocks are pinned already; or ``ALL_DONE``
        when a chunk's window has passed, so that no later chunk of the request could be found either.
        """
        namespace = self._client.namespace
        assert namespace is not None
        per_chunk = self._groups.stored_blocks
        pinned_max = max(per_chunk, int(self._block_pool.num_gpu_blocks * self._config.pinned_share))
        for index in range(chunks.start, min(chunks.stop, len(keys.keys))):
            key = keys.keys[index]
            if index < held or key in self._stored or key in self._in_flight:
                continue
            if self._pinned + per_chunk > pinned_max:
                self._counters["store_deferred_pins"] += 1
                return index
            ids = self._groups.stored_ids(tables, index)
            if ids is None:
                self._counters["store_window_passed"] += 1
                return ALL_DONE
            blocks = tuple(self._block_pool.blocks[i] for of_group in ids for i in of_group)
            self._block_pool.touch(blocks)
            self._pinned += len(blocks)
            record = ChunkRecord(namespace.digest, key, keys.parent(index), index, keys.digests[index], tag)
            self._queue.append(_Chunk(record, blocks, ids, self._monotonic()))
            self._in_flight.add(key)
        return chunks.stop

    def is_stored(self, key: bytes) -> bool:
        """Whether a chunk was stored through here and is not known to be gone."""
        return key in self._stored

    def is_under_way(self, key: bytes) -> bool:
        """Whether a chunk waits for a slot or is being copied: it may still be dropped."""
        return key in self._in_flight

    def start_jobs(self) -> tuple[SaveJob, ...]:
        """Give queued chunks the slots that were granted; one job for all that can start in this step."""
        chunks: list[tuple[SlotId, _Chunk]] = []
        while self._queue:
            slot = self._client.take_slot()
            if slot is None:
                break
            chunks.append((slot, self._queue.popleft()))
        self._drop_waiting_too_long()
        if not chunks:
            return ()
        job_id = next(self._job_ids)
        self._jobs[job_id] = _Job(self._client.generation, self._resets, chunks)
        copies = tuple(self._groups.whole_copy(slot, chunk.block_ids) for slot, chunk in chunks)
        return (SaveJob(job_id, self._client.generation, copies),)

    def finished(self, report: SaveReport) -> None:
        """Ranks have reported jobs: let go of the blocks of those that all ranks have done, and commit their slots."""
        info = self._client.info
        world_size = self._client.world_size
        for job_id, ranks in sorted(report.ranks_done.items()):
            job = self._jobs[job_id]
            job.ranks_done += ranks
            job.is_failed = job.is_failed or job_id in report.failed
            if job.ranks_done < world_size:
                continue
            del self._jobs[job_id]
            if not job.is_let_go:
                self._unpin([chunk for _, chunk in job.chunks])
            if info is None or job.generation != self._client.generation:
                continue  # the session that owned the slots is over
            if job.is_failed or job.is_let_go or job.resets != self._resets:
                self._counters["stores_failed"] += len(job.chunks)
                self._client.give_back([slot for slot, _ in job.chunks])
            else:
                self._counters["stores"] += len(job.chunks)
                self._client.commit([(slot, chunk.record) for slot, chunk in job.chunks])
                self._remember(chunk.record.key for _, chunk in job.chunks)

    def not_held(self, keys: Iterable[bytes]) -> None:
        """The hierarchy does not hold these keys, whatever was stored before: they may be stored again."""
        for key in keys:
            self._stored.pop(key, None)

    def session_lost(self) -> None:
        """Slots are gone and what was stored may be: queued chunks are dropped, running copies only reported."""
        self._drop_queue("store_dropped_session_lost")
        self._stored.clear()

    def reset(self) -> None:
        """Everything computed so far is invalid."""
        self._resets += 1
        self._drop_queue("store_dropped_reset")
        self._stored.clear()

    def let_go(self) -> None:
        """vLLM wants its pool empty: give the blocks back if nobody else holds any.

        A copy that runs may then read blocks that are in use again; what it brings is thrown away.
        """
        jobs = [job for job in self._jobs.values() if not job.is_let_go]
        chunks = [*self._queue, *(chunk for job in jobs for _, chunk in job.chunks)]
        pins = Counter(block.block_id for chunk in chunks for block in chunk.blocks)
        pool = self._block_pool
        is_alone = all(pool.blocks[block_id].ref_cnt == count for block_id, count in pins.items())
        if not pins or not is_alone or pool.num_gpu_blocks - pool.get_num_free_blocks() != len(pins) + 1:
            return  # the null block is always in use
        self._queue.clear()
        for job in jobs:
            job.is_let_go = True
        self._unpin(chunks)
        self._counters["store_dropped_pool_emptied"] += len(chunks)

    def _drop_queue(self, counter: str) -> None:
        dropped = list(self._queue)
        self._queue.clear()
        self._counters[counter] += len(dropped)
        self._unpin(dropped)

    def _drop_waiting_too_long(self) -> None:
        """Drop chunks that waited too long, and with each its queued descendants: without it they are dead weight."""
        if not self._queue or self._monotonic() - self._queue[0].queued_s <= QUEUED_MAX_S:
            return
        expired_s = self._monotonic() - QUEUED_MAX_S
        dropped: dict[bytes, _Chunk] = {}
        for chunk in self._queue:  # a prefix is queued in order, so a chunk follows its parent
            if chunk.queued_s < expired_s or chunk.record.parent in dropped:
                dropped[chunk.record.key] = chunk
        self._queue = deque(chunk for chunk in self._queue if chunk.record.key not in dropped)
        self._counters["store_dropped_no_slot"] += len(dropped)
        self._unpin(dropped.values())

    def _unpin(self, chunks: Iterable[_Chunk]) -> None:
        for chunk in chunks:
            self._block_pool.free_blocks(reversed(chunk.blocks))
            self._pinned -= len(chunk.blocks)
            self._in_flight.discard(chunk.record.key)

    def _remember(self, keys: Iterable[bytes]) -> None:
        self._stored.update((key, None) for key in keys)
        while len(self._stored) > STORED_KEYS_MAX:
            self._stored.popitem(last=False)
