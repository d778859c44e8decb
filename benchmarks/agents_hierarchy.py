"""The product's tiering under agents' turns, in virtual time: its decisions are real, its media are queues.

A turn asks for its prefix when it arrives, waits until all that the tiering promised is in host memory, is loaded,
computes the rest, and stores, its answer too, which takes no time. One medium serves one operation after the other at
its bandwidth, and each takes its latency on top. The GPU computes every turn as if alone. What vLLM's prefix cache
holds is an LRU of whole chunks; a turn whose parent is still there whole finds the parent's answer, too, in blocks of
16 tokens.

With tails (decisions/0036) a turn leaves one where its answer ends; a turn that goes on from there finds and drops it.
By default those do that the product takes for likely to be gone on from (decisions/0048), by its own code. On disk they
are where the product writes them; ``tails_on_disk`` False: never.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from agents_trace import Turn
from trace_hierarchy import CHUNK, NAMESPACE
from trace_policies import Lru

from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.keys.tail_keys import HASH_BYTES, KEY_MARK, LENGTH_BYTES, tail_tokens
from tiered_kv.tiering.lookups import LookupRequest
from tiered_kv.tiering.tiering import Tiering
from tiered_kv.tiering.types import (
    Copy,
    Delete,
    Grow,
    Job,
    LeaseEnd,
    Limits,
    LookupAnswer,
    LookupUpdate,
    Outcome,
    Read,
    Seal,
    SlotGrant,
    SlotId,
    TierSpec,
    Update,
    Write,
)
from tiered_kv.vllm.conversations import Conversations

GPU_BLOCK_TOKENS = 16
DISK, BUCKET = 1, 2
CHUNKS_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of every level, in tokens; ``disk`` None: no limit."""

    gpu: int
    host: int
    disk: int | None
    has_bucket: bool = True


@dataclass(frozen=True, slots=True)
class Speeds:
    """Of the machine that is simulated.

    Attributes:
        latency_s: Per operation of disk and bucket.
        bytes_per_s: Of disk and bucket, reads and writes together.
    """

    token_bytes: int = 128 * 1024
    prefill_tokens_per_s: float = 10_000
    load_bytes_per_s: float = 20e9
    latency_s: tuple[float, float] = (0.0002, 0.03)
    bytes_per_s: tuple[float, float] = (4e9, 1e9)


@dataclass(frozen=True, slots=True)
class Served:
    """What became of one turn.

    Attributes:
        found: Tokens that were not computed.
        below_chunks: Chunks that came from host memory, disk or bucket.
        wait_s: From arrival until all that was found is in the GPU.
        first_token_s: The same until the rest is computed, too.
    """

    turn: Turn
    found: int
    below_chunks: int
    wait_s: float
    first_token_s: float


class GpuPool:
    """vLLM's own prefix cache, as far as it matters here."""

    def __init__(self, tokens: int, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._chunks = Lru(tokens // chunk_tokens)

    def found(self, turn: Turn) -> int:
        """Tokens of the turn's prompt that are here."""
        chunks = 0
        while chunks < len(turn.chunks) and turn.chunks[chunks] in self._chunks:
            chunks += 1
        tokens = chunks * self._chunk_tokens
        if 0 < turn.shared // self._chunk_tokens <= chunks:  # the parent is here, and so is what it answered
            tokens = max(tokens, turn.found_ever(GPU_BLOCK_TOKENS, with_answers=True))
        return min(tokens, (turn.tokens - 1) // GPU_BLOCK_TOKENS * GPU_BLOCK_TOKENS)

    def use(self, turn: Turn) -> None:
        """The turn was computed."""
        self._chunks.use(turn.chunks)


@dataclass(slots=True)
class _Medium:
    """Serves one operation after the other."""

    bytes_per_s: float
    latency_s: float
    free_s: float = 0.0

    def end_s(self, now_s: float, size_bytes: float) -> float:
        self.free_s = max(self.free_s, now_s) + size_bytes / self.bytes_per_s
        return self.free_s + self.latency_s


@dataclass(slots=True)
class _Waiting:
    """A turn whose lookup is not answered."""

    turn: Turn
    gpu_tokens: int
    start: int


def _tail_name(number: int, tokens: int) -> bytes:
    """Key of the tail of so many tokens that a turn leaves, as ``keys/tail_keys.py``; twice it is its digest."""
    return (1 << 63 | number).to_bytes(HASH_BYTES, "big") + KEY_MARK + tokens.to_bytes(LENGTH_BYTES, "little")


@dataclass(slots=True)
class AgentReplay:
    """A hierarchy and its virtual clock.

    Attributes:
        served: Turns in the order in which they had their first token.
        operations: Jobs by tier and kind: ``(DISK, "Write")``.
        answers: What becomes of answers: ``asked``: as the product keeps them, written when they are asked for;
            ``at once``: as prompts are; ``none``: they are not stored.
        dropped: Chunks that were not stored because no slot was free.
        tail_tokens: Unit of tails; 0: none are kept.
        tails_of_all: Every turn leaves one, not only those that the product would take.
        tails_on_disk: Otherwise host memory loses them, as if all prompts were short.
        tails_left: Tails that were stored.
        tails_found: Turns that a tail gave something.
        tails_most: Most tails that were in host memory at once.
        tails_written, tails_read: Tails that were written to disk and read from there.
    """

    sizes: Sizes
    chunk_tokens: int
    eviction: str = "multi-queue"
    admission: str = "all"
    answers: str = "asked"
    speeds: Speeds = field(default_factory=Speeds)
    tail_tokens: int = 0
    tails_of_all: bool = False
    tails_on_disk: bool = True
    served: list[Served] = field(default_factory=list)
    operations: Counter[tuple[int, str]] = field(default_factory=Counter)
    dropped: int = 0
    tails_left: int = 0
    tails_found: int = 0
    tails_most: int = 0
    tails_written: int = 0
    tails_read: int = 0
    tiering: Tiering = field(init=False)
    _now_s: float = field(default=0.0, init=False)
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list, init=False)
    _sequence: count[int] = field(default_factory=count, init=False)
    _gpu: GpuPool = field(init=False)
    _media: dict[int, _Medium] = field(init=False)
    _waiting: dict[int, _Waiting] = field(default_factory=dict, init=False)
    _credits: list[SlotId] = field(default_factory=list, init=False)
    _session: int = field(init=False)
    _conversations: Conversations = field(default_factory=Conversations, init=False)
    _asked: dict[int, Turn] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        sizes, chunk = self.sizes, self.chunk_tokens
        self._gpu = GpuPool(sizes.gpu, chunk)
        tiers = [TierSpec(None if sizes.disk is None else sizes.disk // chunk * CHUNK, self.admission)]
        if sizes.has_bucket:
            tiers.append(TierSpec(None, self.admission))
        limits = Limits() if self.tails_on_disk else Limits(few_chunks=CHUNKS_MAX, short_tails_share=1.0)
        self.tiering = Tiering(sizes.host // chunk * CHUNK, tiers, limits, eviction=self.eviction)
        self._media = {}
        for number, _ in enumerate(tiers, DISK):
            self.tiering.restored(number)
            at = number - DISK
            self._media[number] = _Medium(self.speeds.bytes_per_s[at], self.speeds.latency_s[at])
        self._session = self.tiering.open_session(NAMESPACE, CHUNK)
        self._settle()

    @property
    def _chunk_bytes(self) -> int:
        return self.chunk_tokens * self.speeds.token_bytes

    def run(self, turns: Iterable[Turn]) -> None:
        """Serve the turns, given by arrival, and end every job."""
        for turn in turns:
            self._advance(turn.time_s)
            self.tiering.resume_writes()
            self._ask(turn)
        self._advance(float("inf"))
        assert not self._waiting, "a turn was never answered"

    def _advance(self, until_s: float) -> None:
        while self._events and self._events[0][0] <= until_s:
            self._now_s, _, act = heapq.heappop(self._events)
            act()
            self._settle()
        self._now_s = max(self._now_s, until_s)

    def _at(self, time_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._sequence), act))

    def _ask(self, turn: Turn) -> None:
        self._asked[turn.number] = turn
        gpu = self._gpu.found(turn)
        start = min(gpu // self.chunk_tokens, len(turn.chunks))
        keys = [chunk.to_bytes(16, "big") for chunk in turn.chunks]
        wish = LookupRequest(keys, [key * 2 for key in keys], start, wants_tails=bool(self.tail_tokens))
        lookup = self.tiering.lookup(self._session, wish)
        self._waiting[lookup] = _Waiting(turn, gpu, start)
        self._settle()

    def _settle(self) -> None:
        while (jobs := self.tiering.take_jobs()) or (updates := self.tiering.take_updates()):
            for job in jobs:
                self._begin(job)
            if not jobs:
                for update in updates:
                    self._told(update)
        self.tiering.take_uses()

    def _begin(self, job: Job) -> None:
        match job:
            case Seal():
                self.tiering.sealed(job, Outcome.OK)
            case Grow():
                self.tiering.grown(job, Outcome.OK)
            case Delete(tier, record):
                self._count(tier, job)
                self.tiering.deleted(tier, record, Outcome.OK)
            case Write(tier, record):
                self._count(tier, job)
                self.tails_written += tail_tokens(record.key) > 0
                self._at(self._end_s(tier), partial(self.tiering.written, job, Outcome.OK))
            case Read(tier, record):
                self._count(tier, job)
                self.tails_read += tail_tokens(record.key) > 0
                self._at(self._end_s(tier), partial(self.tiering.read, job, Outcome.OK))
            case Copy(tier, source):
                self._count(tier, job)
                end_s = max(self._end_s(source), self._end_s(tier))
                self._at(end_s, partial(self.tiering.copied, job, Outcome.OK))
            case _:
                raise AssertionError(f"unexpected job: {job}")

    def _count(self, tier: int, job: Job) -> None:
        self.operations[tier, type(job).__name__] += 1
        if isinstance(job, Copy) and job.is_asked_first:
            self.operations[tier, "Head"] += 1

    def _end_s(self, tier: int) -> float:
        return self._media[tier].end_s(self._now_s, self._chunk_bytes)

    def _told(self, update: Update) -> None:
        match update:
            case SlotGrant(_, slots):
                self._credits.extend(slots)
            case LookupUpdate(_, lookup, answer) if answer.is_done and lookup in self._waiting:
                self._answered(lookup, self._waiting.pop(lookup), answer)
            case LeaseEnd(_, lookup):  # its room went to another turn: ask again
                self.tiering.release(self._session, lookup, is_asked_anew=True)
                if (waiting := self._waiting.pop(lookup, None)) is not None:
                    self._at(self._now_s, partial(self._ask, waiting.turn))

    def _answered(self, lookup: int, waiting: _Waiting, answer: LookupAnswer) -> None:
        turn = waiting.turn
        self.tiering.claim(self._session, lookup)
        loadable = (turn.tokens - 1) // self.chunk_tokens - waiting.start
        below = max(0, min(answer.ready, loadable))
        found = max(waiting.gpu_tokens, (waiting.start + below) * self.chunk_tokens if below else 0)
        older, end = self._its_tail(turn, answer)
        if end > found and waiting.start + answer.ready == answer.held:
            found = end
            self.tails_found += 1
        loaded_s = self._now_s + below * self._chunk_bytes / self.speeds.load_bytes_per_s
        first_s = loaded_s + (turn.tokens - found) / self.speeds.prefill_tokens_per_s
        self._at(loaded_s, partial(self.tiering.release, self._session, lookup))
        self._at(first_s, partial(self._store, turn, answer.held, older))
        self.served.append(Served(turn, found, below, loaded_s - turn.time_s, first_s - turn.time_s))

    def _its_tail(self, turn: Turn, answer: LookupAnswer) -> tuple[list[bytes], int]:
        """Of the tails that were told, that of the turn's parent if the turn goes on from it; and where it ends."""
        shared = turn.shared if self.answers == "none" else turn.shared_answered
        for tail in answer.tails:
            end = answer.held * self.chunk_tokens + tail.tokens
            name = _tail_name(turn.parent, tail.tokens)
            if tail.digest == name * 2 and end <= min(shared, turn.tokens - 1):
                return [name], end if tail.slot is not None else 0
        return [], 0

    def _is_likely_gone_on_from(self, turn: Turn, older: list[bytes]) -> bool:
        """What ``vllm/request_saves.py`` asks."""

        def name(chunks: int, tokens: int) -> bytes:
            """The same of all turns that have these tokens: of the first one that had them."""
            end, first = chunks * self.chunk_tokens + tokens, turn
            while first.parent >= 0 and end <= first.shared:
                first = self._asked[first.parent]
            return b"%d %d" % (first.number, end)

        keys = [chunk.to_bytes(16, "big") for chunk in turn.chunks]
        rest = turn.tokens % self.chunk_tokens
        return self._conversations.goes_on(keys, rest - rest % self.tail_tokens, name) or bool(older)

    def _leave_tail(self, turn: Turn, older: list[bytes]) -> None:
        """Keep the end of a turn, if it is worth a slot that is free; what it goes on from goes."""
        is_kept = self._is_likely_gone_on_from(turn, older) or self.tails_of_all
        chunks, end = (turn.chunks, turn.tokens) if self.answers == "none" else (turn.answered, turn.answered_tokens)
        rest = end % self.chunk_tokens // self.tail_tokens * self.tail_tokens
        if is_kept and rest and chunks and self._credits:
            self.tails_left += 1
            key, parent = _tail_name(turn.number, rest), chunks[-1].to_bytes(16, "big")
            record = ChunkRecord(NAMESPACE, key, parent, len(chunks), key * 2)
            self.tiering.commit_tail(self._session, self._credits.pop(), record)
        self.tiering.drop_tails(self._session, older)
        self.tails_most = max(self.tails_most, self.tiering.usage()["host_tails"])

    def _store(self, turn: Turn, held: int, older: list[bytes]) -> None:
        """The turn is computed: what no tier held when it asked is stored."""
        self._gpu.use(turn)
        kept = turn.chunks if self.answers == "none" else turn.answered
        keys = [chunk.to_bytes(16, "big") for chunk in kept]
        for index in range(held, len(keys)):
            if not self._credits:
                self._settle()
            if not self._credits:
                self.dropped += len(keys) - index
                break
            parent = keys[index - 1] if index else NAMESPACE
            record = ChunkRecord(NAMESPACE, keys[index], parent, index, keys[index] * 2)
            is_answer = self.answers == "asked" and index >= len(turn.chunks)
            self.tiering.commit(self._session, self._credits.pop(), record, is_answer=is_answer)
        if held < len(keys):
            self.tiering.touch_prefix(keys[-1])
        if self.tail_tokens:
            self._leave_tail(turn, older)
