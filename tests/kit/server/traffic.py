"""Traffic of an engine without vLLM that outlives its server: prompts that share beginnings are looked up, compared,
held for a while and stored, as an engine would; nothing here waits for the server.

A chunk's payload is a function of its key, so whoever has the key can tell right bytes from wrong ones. Every loaded
chunk is compared twice: when it is offered, and when its lease ends, because nobody may write to it in between.
"""

import hashlib
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.kit.server.clients import CHUNK, SmallEngine, payload_bytes, worker_part
from tiered_kv.config import Config
from tiered_kv.errors import TieredKVError
from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.keys.prefix_keys import PrefixKeys
from tiered_kv.server.client import SchedulerClient
from tiered_kv.server.worker_client import WorkerClient
from tiered_kv.tiering.types import LookupAnswer

PATIENCE_S = 1.0
"""A request goes on with what is ready after so long; one whose answer has not even come goes on without it."""

FOLLOWED_AFTER_S = 0.1
"""Half of the requests whose lookups are not followed from the beginning do so after this long on average; the others
hear of what comes and of the end."""

REJOIN_S = 0.05
PIN_S = 10.0
DOCUMENT_CHUNKS = 6
ENDING_CHUNKS = 4
_ENDINGS_FROM = 1 << 24
_FRESH_FROM = 1 << 30


def payload_of(key: bytes) -> bytes:
    """What the chunk of this key holds."""
    return hashlib.shake_128(key).digest(payload_bytes())


@dataclass(frozen=True, slots=True)
class Prompts:
    """What is asked: documents that many prompts begin with, endings that some share, and prompts asked once only.

    Popularity falls with the rank, as in request logs.

    Attributes:
        documents, endings: How many there are; endings are counted per document.
        fresh: Share of prompts that share nothing with others.
        fresh_count: How many of those there are; so many that nobody asks one a second time, unless it is said.
        new: Share of prompts that nobody asked before or asks again, whatever ``fresh_count`` says.
    """

    documents: int = 40
    endings: int = 30
    fresh: float = 0.3
    fresh_count: int = 1 << 20
    new: float = 0.0

    def draw(self, draw: random.Random) -> list[int]:
        """The tokens of the next prompt, whole chunks."""
        if self.new and draw.random() < self.new:
            return [draw.randrange(_ENDINGS_FROM) for _ in range(draw.randint(1, DOCUMENT_CHUNKS) * CHUNK)]
        if draw.random() < self.fresh:
            first = _FRESH_FROM + draw.randrange(self.fresh_count) * 1024
            return list(range(first, first + (1 + first // 1024 % DOCUMENT_CHUNKS) * CHUNK))
        document = _popular(draw, self.documents)
        ending = document * self.endings + _popular(draw, self.endings)
        shared = (1 + document % DOCUMENT_CHUNKS) * CHUNK
        rest = (1 + ending % ENDING_CHUNKS) * CHUNK
        start, end = document * 1024, _ENDINGS_FROM + ending * 1024
        return [*range(start, start + shared), *range(end, end + rest)]


def _popular(draw: random.Random, count: int) -> int:
    """A rank from 0 whose probability falls about as 1 / rank."""
    return int((count + 1) ** draw.random()) - 1


@dataclass(frozen=True, slots=True)
class Habits:
    """What an engine asks, and how.

    Attributes:
        requests_max: Requests under way at once.
        hold_s: How long, on average, a request holds its leases.
        gap_s: Time between two requests, on average.
        weights: Names the model.
        pin_share: Share of prompts whose sender wants them kept for a while.
    """

    prompts: Prompts = Prompts()
    requests_max: int = 6
    hold_s: float = 0.1
    gap_s: float = 0.0
    weights: str = "w"
    pin_share: float = 0.0


@dataclass(slots=True)
class _Request:
    """A prompt under way; ``held_until_s`` is None until its chunks were offered, ``follow_s`` once it is followed."""

    keys: PrefixKeys
    lookup: int
    asked_s: float
    follow_s: float | None = None
    held_until_s: float | None = None
    answer: LookupAnswer = field(default_factory=LookupAnswer)


class EngineTraffic:
    """One engine of one rank and its requests.

    Threads: one owner.

    Attributes:
        counts: ``requests``, ``asked_chunks``, ``hit_chunks``, ``stored_chunks``, ``compared_bytes``,
            ``wrong_chunks``, ``sessions`` (opened), ``impatient`` (answers not waited for), ``followed``
            (lookups, from the middle on), ``failed_joins``.
        durable, gone: With ``is_watching``: keys that are in the disk tier, and that left it, as the server said last.
        asked: With ``is_watching``: every prompt that was offered for storing, by the key of its last chunk.
        is_asking: Whether new requests begin; what is under way goes on.
        may_join: Whether a lost session is followed by the next, for which a server is started if there is none.
    """

    def __init__(
        self, config: Config, engine_id: str, draw: random.Random, habits: Habits, *, is_watching: bool = False
    ) -> None:
        """Begin to join; blocks until the worker has, as an engine that starts does.

        Raises:
            TieredKVError: No server, or it refuses.
        """
        self._draw, self._habits = draw, habits
        self._is_watching = is_watching
        worker = WorkerClient(config, engine_id, 0, worker_part(weights=habits.weights))
        client = SchedulerClient(config, engine_id, 1, is_watching=is_watching)
        self.engine = SmallEngine(client, worker, config, engine_id, habits.weights)
        self._requests: list[_Request] = []
        self._has_worker, self._was_ready = True, False
        self._next_ask_s = self._next_join_s = 0.0
        self.counts: Counter[str] = Counter()
        self.durable: set[bytes] = set()
        self.gone: set[bytes] = set()
        self.asked: dict[bytes, PrefixKeys] = {}
        self.is_asking = self.may_join = True

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._requests

    def turn(self) -> bool:
        """Do what can be done now; whether the session is open."""
        client = self.engine.client
        client.poll()
        self._take_moves()
        if not self._has_worker or client.generation != self.engine.worker.generation:
            self._rejoin()
        if not client.is_ready:
            self._was_ready = False
            return False
        self.counts["sessions"] += not self._was_ready
        self._was_ready = True
        now_s = time.monotonic()
        self._requests = [request for request in self._requests if self._goes_on(request, now_s)]
        if self.is_asking and len(self._requests) < self._habits.requests_max and now_s >= self._next_ask_s:
            self._next_ask_s = now_s + self._habits.gap_s * 2 * self._draw.random()
            self._ask(now_s)
        return True

    def let_go(self) -> None:
        """Unmap the arena: a server that follows one that died waits for that."""
        self._requests.clear()
        if self._has_worker:
            self.engine.worker.leave()
        self._has_worker = False

    def close(self) -> None:
        self.engine.client.close()
        self.let_go()

    # -- a session that was lost ---------------------------------------------------------------------------------

    def _rejoin(self) -> None:
        if not self.may_join or time.monotonic() < self._next_join_s:
            return
        self._next_join_s = time.monotonic() + REJOIN_S
        self.let_go()
        one = self.engine
        try:
            part = worker_part(weights=one.weights)
            one.worker = WorkerClient(one.config, one.engine_id, one.client.generation, part)
        except TieredKVError:  # no server yet, or the generation is over already
            self.counts["failed_joins"] += 1
            return
        self._has_worker = True

    # -- requests ------------------------------------------------------------------------------------------------

    def _ask(self, now_s: float) -> None:
        client = self.engine.client
        assert client.namespace is not None
        keys = PrefixKeys(client.namespace, CHUNK)
        keys.extend(self._habits.prompts.draw(self._draw))
        is_followed, is_patient = self._draw.random() < 0.5, self._draw.random() < 0.5
        lookup = client.lookup(keys.keys, keys.digests, is_followed=is_followed)
        if lookup is not None:
            self.counts["requests"] += 1
            self.counts["asked_chunks"] += len(keys.keys)
            waits = is_followed or is_patient
            follow_s = None if waits else now_s + FOLLOWED_AFTER_S * 2 * self._draw.random()
            self._requests.append(_Request(keys, lookup, now_s, follow_s))

    def _goes_on(self, request: _Request, now_s: float) -> bool:
        """Advance a request; False when it has ended."""
        client = self.engine.client
        answer = client.lookups.get(request.lookup)
        if answer is None:  # its session was lost
            return False
        if request.held_until_s is None:
            is_here = answer.is_answered and answer.is_done
            if not is_here and now_s - request.asked_s < PATIENCE_S:
                if request.follow_s is not None and now_s > request.follow_s:
                    request.follow_s = None
                    self.counts["followed"] += 1
                    client.follow(request.lookup)
                return True
            self.counts["impatient"] += not is_here
            request.answer = answer
            request.held_until_s = now_s + self._habits.hold_s * 2 * self._draw.random()
            self.counts["hit_chunks"] += answer.ready
            self._compare(request)
            return True
        if now_s < request.held_until_s:
            return True
        self._compare(request)
        client.release(request.lookup)
        if request.answer.is_answered:
            self._store(request)
        return False

    def _compare(self, request: _Request) -> None:
        for slot, key in zip(request.answer.slots[: request.answer.ready], request.keys.keys, strict=False):
            with self.engine.payload(slot) as view:
                is_right = bytes(view) == payload_of(key)
            self.counts["compared_bytes"] += payload_bytes()
            self.counts["wrong_chunks"] += not is_right

    def _store(self, request: _Request) -> None:
        """What the server did not hold, as far as slots were granted."""
        client, keys = self.engine.client, request.keys
        assert client.namespace is not None
        digest = client.namespace.digest
        if self._is_watching:
            self.asked[keys.keys[-1]] = keys
        for index in range(request.answer.held, len(keys.keys)):
            slot = client.take_slot()
            if slot is None:
                return
            with self.engine.payload(slot) as view:
                view[:] = payload_of(keys.keys[index])
            client.commit(
                [(slot, ChunkRecord(digest, keys.keys[index], keys.parent(index), index, keys.digests[index]))]
            )
            self.counts["stored_chunks"] += 1
        if self._habits.pin_share > self._draw.random():
            self.counts["pins"] += client.pin(keys.keys[-1], PIN_S)

    def _take_moves(self) -> None:
        client = self.engine.client
        while client.moves:
            move = client.moves.popleft()
            if client.tiers[move.tier] != "disk":
                continue
            keys = [move.keys[at : at + 16] for at in range(0, len(move.keys), 16)]
            came, left = (self.durable, self.gone) if move.is_here else (self.gone, self.durable)
            came.update(keys)
            left.difference_update(keys)


def turn_until(
    engines: list[EngineTraffic], condition: Callable[[], bool], what: str, deadline_s: float = 60.0
) -> None:
    """Let engines take turns until ``condition()`` holds.

    Raises:
        TimeoutError: It did not within the deadline.
    """
    end_s = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError(f"still waiting after {deadline_s:g} s for {what}")
        for one in engines:
            one.turn()
        time.sleep(0.0005)
