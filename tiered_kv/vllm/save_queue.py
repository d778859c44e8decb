"""The save queue: chunks on their way from paged KV into slots, blocks pinned.

A chunk's blocks are pinned with ``block_pool.touch`` for its copy into a slot, and let go when all ranks have reported
it: milliseconds, and never for disk or network. Without a slot a chunk waits, and costs vLLM nothing that it asks for::

    its request     its blocks are kept meanwhile by                  it waits until
    lives           the request: nothing is pinned                    a slot comes, it is preempted
    lives, windows  a pin, within ``pinned_share``: vLLM frees them   a slot comes, vLLM lacks blocks, none came for 2 s
    has ended       a pin                                             a slot comes, vLLM lacks blocks, none came for 2 s

What windows pass before its chunk is whole is pinned, too (``passed_blocks.py``).

Every chunk that was computed and may be stored ends in exactly one counter: ``store_held``, ``stores``,
``stores_failed`` or a ``store_dropped_<reason>`` (decisions/0026). Every state that vLLM offered ends in one of
``state_held``, ``states``, ``states_failed`` or a ``state_dropped_<reason>``, once for all its parts. Every tail ends
in ``tail_held``, ``tails``, ``tails_failed`` or a ``tail_dropped_<reason>``: it is pinned for a slot that is free, or
dropped.
"""

import itertools
import math
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from tiered_kv.config import Config
from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.keys.prefix_keys import PrefixKeys
from tiered_kv.keys.state_keys import state_records
from tiered_kv.server.client import SchedulerClient
from tiered_kv.tiering.tails import TAILS_MAX
from tiered_kv.tiering.types import SlotId
from tiered_kv.vllm.compat import PagedBlocks
from tiered_kv.vllm.kv_groups import BlockTables, CacheGroups
from tiered_kv.vllm.passed_blocks import PassedBlocks
from tiered_kv.vllm.step import SaveJob, SaveReport

QUEUED_MAX_S = 2.0
"""Chunks wait for slots as long as some come; after so long without any, what waited for all of it is dropped."""

COPY_SOON_S = 0.1
"""A copy that runs for longer hangs, and waiting for its blocks would stop vLLM: it preempts instead."""

ALL_DONE = sys.maxsize
"""How far a request was stored of which nothing more can be stored."""

STORED = "stores"
"""The counter of chunks that were stored."""

STATE_COUNTERS = {STORED: "states", "stores_failed": "states_failed"}
"""Counters of states by those of chunks, where another word stands in front than ``state_dropped``."""

TAIL_COUNTERS = {STORED: "tails", "stores_failed": "tails_failed"}
"""The same of tails."""

STORED_KEYS_MAX = 1 << 16
"""Keys remembered as stored, so that concurrent requests with one prefix do not store it twice."""


TAIL_PARENTS_MAX = 1 << 12
"""Chunks of which the tails stored here are remembered, so that what continues them has them dropped."""


class Queued(NamedTuple):
    """How far :meth:`SaveQueue.queue` came.

    Attributes:
        reached: The first chunk that was not dealt with.
        has_passed: Because its window has: no later chunk of the request could be found either. Else no slot is free
            for it now, and the request keeps its blocks; or all were dealt with.
    """

    reached: int
    has_passed: bool = False


@dataclass(slots=True)
class _State:
    """A state whose parts are on their way.

    Attributes:
        parts_left: Parts of which the end is not known yet.
        outcome: The counter that it ends in, of its chunks' names: that of the first part that was not stored.
    """

    parts_left: int
    outcome: str = STORED


@dataclass(slots=True)
class _Chunk:
    """A chunk, or a part of a state: then ``block_ids`` is one block of one group; or a tail.

    Attributes:
        is_answer: Generated tokens are in it, or before the state.
        tail_tokens: Length of the tail that it is; 0: it is none.
        older_tails: Keys of tails that it continues.
    """

    record: ChunkRecord
    block_ids: tuple[tuple[int, ...], ...]
    queued_s: float
    is_answer: bool
    state_part: int | None = None
    state: _State | None = None
    tail_tokens: int = 0
    older_tails: Sequence[bytes] = ()

    @property
    def blocks(self) -> tuple[int, ...]:
        """Those of all groups: what is pinned."""
        blocks = itertools.chain.from_iterable(self.block_ids)
        return tuple(dict.fromkeys(blocks) if self.tail_tokens else blocks)  # a tail names its last one several times


@dataclass(slots=True)
class _Job:
    generation: int
    resets: int
    chunks: list[tuple[SlotId, _Chunk]]
    started_s: float
    ranks_done: int = 0
    is_failed: bool = False
    is_let_go: bool = False


class SaveQueue:
    """Chunks on their way from paged KV into granted slots.

    Only its own methods write its fields; the blocks it pins are vLLM's. Threads: vLLM's scheduler thread only.

    Attributes:
        passed: Blocks pinned before their chunk is whole.
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
        self._blocks: PagedBlocks | None = None
        self.passed = PassedBlocks(groups)
        self._queue: deque[_Chunk] = deque()
        self._jobs: OrderedDict[int, _Job] = OrderedDict()
        self._job_ids = itertools.count(1)
        self._stored: OrderedDict[bytes, float] = OrderedDict()  # when, by key
        self._in_flight: set[bytes] = set()
        self._tails: OrderedDict[bytes, dict[bytes, int]] = OrderedDict()  # tokens by key, by their parent's key
        self._pinned = 0
        self._slot_s = float("-inf")  # when a slot was taken last
        self._resets = 0

    def bind_block_pool(self, block_pool: Any) -> None:
        """Take vLLM's block pool."""
        self._blocks = PagedBlocks(block_pool)
        self.passed.bind(self._blocks)

    @property
    def has_work(self) -> bool:
        """Whether blocks are pinned or copies run."""
        return self._pinned > 0 or bool(self._jobs)

    @property
    def has_waiting(self) -> bool:
        """Whether pinned chunks wait for a slot."""
        return bool(self._queue)

    def queue(
        self,
        keys: PrefixKeys,
        tables: BlockTables,
        chunks: range,
        *,
        held: int,
        tag: bytes,
        prompt_chunks: int = sys.maxsize,
        older_tails: Mapping[int, Sequence[bytes]] = MappingProxyType({}),
        is_ending: bool = False,
    ) -> "Queued":
        """Queue chunks of a request that are not known to be stored; pins their blocks.

        Args:
            tables: The request's blocks, per KV cache group.
            held: Leading chunks the hierarchy is known to hold.
            tag: Of their owner.
            prompt_chunks: Leading chunks of the request without a generated token.
            older_tails: Keys of tails that are a chunk's beginning, by its index.
            is_ending: vLLM takes the blocks back right after this.
        """
        namespace = self._client.namespace
        assert namespace is not None
        for index in range(chunks.start, min(chunks.stop, len(keys.keys))):
            key = keys.keys[index]
            if index < held or key in self._stored or key in self._in_flight:
                self._counters["store_held"] += 1
                continue
            if not is_ending and not self._may_pin():
                return Queued(index)
            ids = self._groups.stored_ids(tables, index)
            if ids is None:
                return Queued(index, has_passed=True)
            record = ChunkRecord(namespace.digest, key, keys.parent(index), index, keys.digests[index], tag)
            older = older_tails.get(index, ())
            self._pin(_Chunk(record, ids, self._monotonic(), index >= prompt_chunks, older_tails=older))
        return Queued(chunks.stop)

    def queue_tail(
        self,
        keys: PrefixKeys,
        tables: BlockTables,
        chunks: int,
        tokens: int,
        name: tuple[bytes, bytes],
        tag: bytes,
        older_tails: Sequence[bytes],
    ) -> str | None:
        """Queue the tail of so many tokens behind so many chunks of a request that ends; or the counter it ends in.

        Args:
            name: Its key and digest.
            older_tails: Keys of shorter tails that it continues.
        """
        namespace = self._client.namespace
        assert namespace is not None
        key, digest = name
        if key in self._in_flight:
            return "tail_held"
        if len(self._queue) >= max(self._client.credit_count, self._waiting_max):
            return "tail_dropped_no_slot"
        ids = self._groups.tail_ids(tables, chunks, tokens)
        if ids is None:
            return "tail_dropped_not_storable"
        record = ChunkRecord(namespace.digest, key, keys.parent(chunks), chunks, digest, tag)
        self._pin(_Chunk(record, ids, self._monotonic(), is_answer=False, tail_tokens=tokens, older_tails=older_tails))
        self._remember_tail(record.parent, key, tokens)
        return None

    def _remember_tail(self, parent: bytes, key: bytes, tokens: int) -> None:
        """Remember the newest tails behind a chunk: of more the server keeps none."""
        tails = self._tails.setdefault(parent, {})
        tails.pop(key, None)
        tails[key] = tokens
        if len(tails) > TAILS_MAX:
            del tails[next(iter(tails))]
        while len(self._tails) > TAIL_PARENTS_MAX:
            self._tails.popitem(last=False)

    def tails_behind(self, key: bytes) -> Mapping[bytes, int]:
        """The newest tails queued here behind a chunk and not continued since, with their tokens; some may be gone."""
        return self._tails.get(key, {})

    def queue_state(
        self, keys: PrefixKeys, chunks: int, block_ids: Sequence[int], tag: bytes, *, is_answer: bool = False
    ) -> None:
        """Queue the state behind so many chunks of a request, part by part, unless it is on its way already.

        What was stored before is not remembered: a state is the first to be evicted, and the server knows what it has.

        Args:
            block_ids: The block of each part. vLLM uses them again after the step in which it handed them over, so
                they are pinned now or never.
            is_answer: Generated tokens are before it.
        """
        namespace = self._client.namespace
        assert namespace is not None
        last = chunks - 1
        chunk = ChunkRecord(namespace.digest, keys.keys[last], keys.parent(last), last, keys.digests[last], tag)
        records = state_records(chunk, len(block_ids))
        if all(record.key in self._in_flight for record in records):
            self._counters["state_held"] += 1
            return
        if len(self._queue) + len(records) > max(self._client.credit_count, self._waiting_max):
            self._counters["state_dropped_no_slot"] += 1
            return
        state = _State(len(records))
        for part, (record, block_id) in enumerate(zip(records, block_ids, strict=True)):
            self._pin(_Chunk(record, ((block_id,),), self._monotonic(), is_answer, part, state))

    def _may_pin(self) -> bool:
        """Whether one more chunk of a live request may be pinned: for a slot that is free, or before vLLM frees it."""
        parts = len(self._groups.states)  # vLLM offers a state once, and its chunks are of no use without it
        if len(self._queue) + parts < self._client.credit_count:
            return True
        return self._groups.has_windows and len(self._queue) < self._waiting_max

    @property
    def _waiting_max(self) -> int:
        """Chunks that may be pinned without a slot where vLLM could use their blocks."""
        assert self._blocks is not None
        share_blocks = int(self._blocks.count * self._config.pinned_share)
        return max(1, len(self._groups.states), share_blocks // self._groups.stored_blocks)

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
        now_s = self._monotonic()
        self._slot_s = now_s if chunks else self._slot_s
        self._drop_waiting_too_long(now_s - QUEUED_MAX_S)
        if not chunks:
            return ()
        job_id = next(self._job_ids)
        self._jobs[job_id] = _Job(self._client.generation, self._resets, chunks, now_s)
        copies = tuple(
            self._groups.whole_copy(slot, chunk.block_ids)
            if chunk.state_part is None
            else self._groups.state_copy(slot, chunk.state_part, chunk.block_ids[0][0])
            for slot, chunk in chunks
        )
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
            outcome = self._outcome(job)
            self._count(outcome, [chunk for _, chunk in job.chunks])
            if info is None or job.generation != self._client.generation:
                continue  # the session that owned the slots is over
            if outcome != STORED:
                self._client.give_back([slot for slot, _ in job.chunks])
            else:
                self._commit(job.chunks)

    def _commit(self, filled: Collection[tuple[SlotId, _Chunk]]) -> None:
        """Hand filled slots to the server; then what they continue may go."""
        whole = [(slot, chunk) for slot, chunk in filled if not chunk.tail_tokens]
        answers = [slot for slot, chunk in whole if chunk.is_answer]
        self._client.commit([(slot, chunk.record) for slot, chunk in whole], answers)
        for slot, chunk in filled:
            if chunk.tail_tokens:
                self._client.commit_tail(slot, chunk.record)
            if chunk.older_tails:
                self._client.drop_tails(chunk.older_tails)
                self._forget_tails(chunk)
        self._remember(chunk.record.key for _, chunk in whole if chunk.state_part is None)

    def _forget_tails(self, chunk: _Chunk) -> None:
        """The tails that a chunk or another tail continues, all of one parent."""
        tails = self._tails.get(chunk.record.parent, {})
        for key in chunk.older_tails:
            tails.pop(key, None)
        if not tails:
            self._tails.pop(chunk.record.parent, None)

    def _count(self, outcome: str, chunks: Collection[_Chunk]) -> None:
        """Count what became of chunks; parts of states count apart, and their state when all of them have ended.

        Tails count apart, too.
        """
        states = [chunk.state for chunk in chunks if chunk.state is not None]
        tails = sum(chunk.tail_tokens > 0 for chunk in chunks)
        self._counters[outcome] += len(chunks) - len(states) - tails
        if tails:
            self._counters[TAIL_COUNTERS.get(outcome) or f"tail_{outcome.removeprefix('store_')}"] += tails
        if states:
            self._counters["state_parts_stored" if outcome == STORED else "state_parts_dropped"] += len(states)
        for state in states:
            state.parts_left -= 1
            state.outcome = outcome if state.outcome == STORED else state.outcome
            if not state.parts_left:
                self._counters[
                    STATE_COUNTERS.get(state.outcome) or f"state_{state.outcome.removeprefix('store_')}"
                ] += 1

    def _outcome(self, job: _Job) -> str:
        """The counter that the chunks of a job end in."""
        if self._client.info is None or job.generation != self._client.generation:
            return "store_dropped_session_lost"
        if job.is_let_go:
            return "store_dropped_pool_emptied"
        if job.resets != self._resets:
            return "store_dropped_reset"
        return "stores_failed" if job.is_failed else STORED

    def not_held(self, keys: Iterable[bytes], asked_s: float) -> None:
        """Forget that these keys were stored: no tier held them at ``asked_s``, so they may be stored again.

        What was stored after that the answer knows nothing of.
        """
        for key in keys:
            if self._stored.get(key, math.inf) <= asked_s:
                del self._stored[key]

    def session_lost(self) -> None:
        """The slots are gone, and stored chunks may be: drop queued chunks; running copies are only reported."""
        self._drop_queue("store_dropped_session_lost")
        self._stored.clear()
        self._tails.clear()

    def reset(self) -> None:
        """Everything computed so far is invalid."""
        self._resets += 1
        self.passed.let_all_go()
        self._drop_queue("store_dropped_reset")
        self._stored.clear()
        self._tails.clear()

    def let_go(self) -> None:
        """vLLM wants its pool empty: give the blocks back if no request holds any.

        A copy that runs may then read blocks that are in use again; its bytes are thrown away.
        """
        jobs = [job for job in self._jobs.values() if not job.is_let_go]
        chunks = [*self._queue, *(chunk for job in jobs for _, chunk in job.chunks)]
        pins = Counter(block for chunk in chunks for block in chunk.blocks) + Counter(self.passed.blocks)
        blocks = self._blocks
        if not pins or blocks is None or any(blocks.holders(block) != count for block, count in pins.items()):
            return
        if blocks.count - blocks.free != len(pins) + 1:
            return  # the null block is always in use
        self._count("store_dropped_pool_emptied", self._queue)  # those of a job when it is reported
        self._queue.clear()
        self.passed.let_all_go()
        for job in jobs:
            job.is_let_go = True
        self._unpin(chunks)

    def frees_soon(self) -> bool:
        """vLLM lacks blocks for a running request: drop what waits for a slot; returns whether waiting brings any.

        Where it brings none, vLLM preempts. What runs holds its blocks whatever this answers (rule 1), so only
        copies that should end within milliseconds are worth a step without this request, and only where no request
        holds their blocks.
        """
        assert self._blocks is not None
        free = self._blocks.free
        self._drop_queue("store_dropped_blocks_wanted")
        self.passed.let_idle_go()
        if self._blocks.free > free:
            return True  # they are there already; vLLM looks again in its next step
        since_s = self._monotonic() - COPY_SOON_S
        jobs = [job for job in self._jobs.values() if not job.is_let_go]
        pins = Counter(block for job in jobs for _, chunk in job.chunks for block in chunk.blocks)
        young = (chunk for job in jobs if job.started_s >= since_s for _, chunk in job.chunks)
        return any(self._blocks.holders(block) == pins[block] for chunk in young for block in chunk.blocks)

    def make_room(self, *, is_standing: bool) -> None:
        """A request waits for blocks: drop what waits for a slot beyond its share of them.

        Args:
            is_standing: Nothing runs, so no other blocks come back: it keeps none.
        """
        if is_standing:
            self.passed.let_idle_go()
        most = 0 if is_standing else self._waiting_max
        dropped = [self._queue.pop() for _ in range(len(self._queue) - most)]  # the last ones: no parent of the others
        while dropped and self._queue and dropped[-1].state is not None and self._queue[-1].state is dropped[-1].state:
            dropped.append(self._queue.pop())  # a part alone is of no use
        self._count("store_dropped_blocks_wanted", dropped)
        self._unpin(dropped)

    def _drop_queue(self, counter: str) -> None:
        dropped = list(self._queue)
        self._queue.clear()
        self._count(counter, dropped)
        self._unpin(dropped)

    def _drop_waiting_too_long(self, expired_s: float) -> None:
        """Drop chunks that waited too long, each with its queued descendants: without it they are never found."""
        if not self._queue or self._slot_s >= expired_s:
            return
        dropped: list[_Chunk] = []
        kept: deque[_Chunk] = deque()
        keys: set[bytes] = set()
        for chunk in self._queue:  # a prefix is queued in order, so a chunk follows its parent
            if chunk.queued_s < expired_s or chunk.record.parent in keys:
                dropped.append(chunk)  # a part of a state may be queued twice
                keys.add(chunk.record.key)
            else:
                kept.append(chunk)
        self._queue = kept
        self._count("store_dropped_no_slot", dropped)
        self._unpin(dropped)

    def _pin(self, chunk: _Chunk) -> None:
        assert self._blocks is not None
        self._blocks.hold(chunk.blocks)
        self._pinned += len(chunk.blocks)
        self._queue.append(chunk)
        self._in_flight.add(chunk.record.key)

    def _unpin(self, chunks: Iterable[_Chunk]) -> None:
        for chunk in chunks:
            assert self._blocks is not None
            self._blocks.let_go(chunk.blocks)
            self._pinned -= len(chunk.blocks)
            self._in_flight.discard(chunk.record.key)

    def _remember(self, keys: Iterable[bytes]) -> None:
        now_s = self._monotonic()
        self._stored.update((key, now_s) for key in keys)
        while len(self._stored) > STORED_KEYS_MAX:
            self._stored.popitem(last=False)
