"""vLLM asks at every step; where nothing has changed the answer comes early, and is what the whole look would give.

Two scheduler sides hear the same of two sockets, at the same times; one of them always takes the whole look. What they
serve is drawn with the rest: groups of layers, priorities, and for each request what it is, a streaming session's, an
adapter's, one that another engine has promised chunks for, or whatever else an early answer has to heed.
"""

import contextlib
import math
import random
import socket
import tempfile
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, StreamingUpdate

from tests.kit.counts import count
from tests.kit.fake_clock import FakeClock
from tests.kit.server.clients import BLOCK, CHUNK
from tests.kit.server.clients import settings as cache_settings
from tests.kit.server.probe import wait_for
from tiered_kv.keys.namespace import REQUIRED_FIELDS, Namespace
from tiered_kv.server import protocol as m
from tiered_kv.server.client import SchedulerClient
from tiered_kv.tiering.types import Arrival, LookupAnswer, Tail
from tiered_kv.vllm import request_lookups, requests
from tiered_kv.vllm.engine_metrics import SchedulerMeter
from tiered_kv.vllm.engine_role import EngineRole
from tiered_kv.vllm.hooks import SchedulerHooks
from tiered_kv.vllm.identity.adapters import Adapters
from tiered_kv.vllm.identity.loader_watch import adapter_stamps, stamps_text
from tiered_kv.vllm.kv_groups import CacheGroup, CacheGroups
from tiered_kv.vllm.logs import WARNINGS_EVERY_S, WARNINGS_MAX
from tiered_kv.vllm.request_lookups import HASHING_MAX_S
from tiered_kv.vllm.scheduler import SchedulerSide
from tiered_kv.vllm.step import SaveReport

pytestmark = pytest.mark.vllm

PER_CHUNK = CHUNK // BLOCK
FULL = CacheGroup(0, BLOCK, PER_CHUNK, PER_CHUNK)
WINDOW = CacheGroup(1, BLOCK, PER_CHUNK, 2, window_tokens=2 * BLOCK + 1)
GROUPS = {
    "full attention": CacheGroups([FULL]),
    "and a window": CacheGroups([FULL, WINDOW]),
    "and recurrent layers": CacheGroups([FULL], states=(1,)),
}
CHUNKS = 8
REQUESTS = 3
NOT_COMPARED = ("wait", "step_s", "request", "extras")
LONG = 3 * CHUNK
"""Keys of longer prompts another thread computes, where the test says so."""

KINDS = ("plain", "plain", "streaming", "adapter", "promised", "unread")
ETAS = (None, 0.0, 0.001, 0.01, 0.05, 0.2, 1.0, 30.0, math.inf)
TABLES = [list(range(1, 2 * CHUNKS * PER_CHUNK))] * 2


def ready(epoch: int = 0) -> m.Ready:
    """The session is open; under another number nothing has the names that it had."""
    fields = dict.fromkeys(REQUIRED_FIELDS) | {"format_version": 1, "epoch": f"base-{epoch}"}
    record = Namespace.from_fields(fields).record
    return m.Ready(record, 8192, 4096, [0], 100, ["host", "disk", "object"], 1 << 30)


class LateKeys(Future[Any]):
    """Keys of a prompt that are computed when the test says so, or when somebody waits for them."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__()
        self._work = work

    def result(self, timeout: float | None = None) -> Any:
        self.finish()
        return super().result(timeout)

    def finish(self) -> None:
        if self.done() or not (self.running() or self.set_running_or_notify_cancel()):
            return
        try:
            self.set_result(self._work())
        except Exception as exc:  # noqa: BLE001  # as an executor hands it over
            self.set_exception(exc)


class LateHasher:
    """In place of the thread that computes keys. Threads: one."""

    def __init__(self) -> None:
        self.asked: deque[LateKeys] = deque()

    def submit(self, work: Callable[..., object], *given: object) -> LateKeys:
        self.asked.append(LateKeys(partial(work, *given)))
        return self.asked[-1]

    def begin(self) -> None:
        """The first that waits is being computed: it can be called off no more."""
        first = next((one for one in self.asked if not one.done() and not one.running()), None)
        if first is not None:
            first.set_running_or_notify_cancel()

    def finish(self) -> None:
        """The first is done."""
        while self.asked:
            first = self.asked.popleft()
            if not first.done():
                first.finish()
                return

    def shutdown(self, *, cancel_futures: bool) -> None:
        self.asked.clear()


class Engine:
    """A scheduler side on a socket whose other end the test holds. Threads: one."""

    def __init__(
        self,
        root: Path,
        clock: FakeClock,
        *,
        is_quick: bool,
        kinds: tuple[str, ...] = ("plain",) * REQUESTS,
        groups: str = "full attention",
        is_by_priority: bool = False,
        adapter: Path | None = None,
        **more: Any,
    ) -> None:
        config = cache_settings(root, **more)
        self.kinds, self.adapter = kinds, adapter
        self.client = SchedulerClient(config, "e", 1, monotonic=clock.monotonic)
        self.server: socket.socket | None = None
        self.said = bytearray()
        role = EngineRole(may_load=True, may_store=True, has_prefix_caching=False, is_by_priority=is_by_priority)
        self.adapters = Adapters("")
        self.side = SchedulerSide(config, self.client, self.adapters, GROUPS[groups], role, clock.monotonic)
        self.meter = SchedulerMeter(self.client, self.side.counters, CHUNK, clock.monotonic)
        self.hooks = object.__new__(SchedulerHooks)
        self.hooks.side, self.hooks._meter = self.side, self.meter
        self.quick: Counter[str] = Counter()
        self.made = 0
        self.epoch = 0
        goes_on_waiting = self.side.goes_on_waiting

        def counted(request: Request, computed: int) -> bool:
            goes_on = is_quick and goes_on_waiting(request, computed)
            state = self.side.state(request.request_id)
            is_hashed = state is not None and state.hashing is None
            self.quick[self.kind_of(request) if is_hashed else "hashed beside"] += goes_on
            return goes_on

        self.side.goes_on_waiting = counted  # type: ignore[method-assign]
        self.asked = [self._request(number) for number in range(REQUESTS)]
        self.join()
        for one in self.asked:
            self.side.add_request(one)

    def kind_of(self, request: Request) -> str:
        return self.kinds[self.asked.index(request)]

    def _request(self, number: int) -> Request:
        kind, self.made = self.kinds[number], self.made + 1
        tokens = [*range(10_000 * number, 10_000 * number + CHUNKS * CHUNK), 1]
        parameters = SamplingParams(
            max_tokens=4,
            prompt_logprobs=1 if kind == "unread" else None,
            extra_args={"kv_transfer_params": {"tiered_kv.stored_tokens": CHUNKS * CHUNK}}
            if kind == "promised"
            else None,
        )
        lora = None
        if kind == "adapter":
            assert self.adapter is not None
            lora = LoRARequest("adapter", 1, str(self.adapter))
        return Request(
            f"r{number}.{self.made}",
            tokens,
            parameters,
            None,
            lora_request=lora,
            priority=REQUESTS - number,
            resumable=kind == "streaming",
        )

    def join(self) -> None:
        """A session, in place of the one that there was."""
        if self.server is not None:
            self.server.close()
            self.client.poll()
        ours, self.server = socket.socketpair()
        ours.setblocking(False)
        self.client._joined.append((self.client.generation, ours))
        self.client.poll()
        self.tell(ready())
        self.client.poll()

    def reset(self) -> None:
        """The weights change; the server has said before what it would say to that."""
        self.epoch += 1
        self.tell(ready(self.epoch))
        self.side.reset()

    def replace(self, number: int) -> None:
        """A request is over or called off, and another one of the same prompt comes."""
        self.side.finish_request(self.asked[number], ())
        self.asked[number] = self._request(number)
        self.side.add_request(self.asked[number])

    def grow(self, number: int, tokens: list[int]) -> None:
        """A streaming session is given more input, as vLLM does it; then its blocks are taken. Others generate."""
        request = self.asked[number]
        if not request.resumable:
            request.append_output_token_ids(tokens[:1])
            return
        request.num_computed_tokens = request.num_tokens
        update = StreamingUpdate(None, tokens, 4, 0.0, request.sampling_params)
        owner = SimpleNamespace(hash_block_size=BLOCK, log_stats=False, num_waiting_for_streaming_input=0)
        Scheduler._update_request_as_session(owner, request, update)
        request.num_computed_tokens = 0

    def report(self, stamps: str) -> None:
        """The only worker has loaded the adapter's files that have these stamps."""
        self.side.saves_finished(SaveReport(adapters={1: {0: stamps}}))

    def ask(self, number: int, computed: int = 0) -> int | None:
        """What vLLM hears of a request when it asks."""
        return self.hooks.matched_tokens(self.asked[number], computed)

    def load(self, number: int, tokens: int) -> None:
        """VLLM has blocks for what was offered."""
        self.hooks.allocated(self.asked[number], SimpleNamespace(get_block_ids=lambda: TABLES), tokens)

    def loaded(self, number: int, *, is_failed: bool) -> set[str]:
        """The worker has reported a load; says which vLLM does not hear of yet."""
        name = self.asked[number].request_id
        return self.side.loads_finished({name}, {name} if is_failed else set())

    def step(self, preempted: set[str] | None = None, scheduled: dict[str, int] | None = None) -> Any:
        return self.side.plan_step(
            SimpleNamespace(
                preempted_req_ids=preempted,
                num_scheduled_tokens=scheduled or {},
                kv_connector_block_state=SimpleNamespace(boundary_state_offloads={}),
            )
        )

    def tell(self, message: m.Message) -> None:
        assert self.server is not None
        self.server.sendall(m.frame(message))

    def hear(self) -> bytes:
        """What it has said so far."""
        assert self.server is not None
        with contextlib.suppress(BlockingIOError):
            while data := self.server.recv(1 << 20, socket.MSG_DONTWAIT):
                self.said += data
        return bytes(self.said)

    def states(self) -> list[Any]:
        """All that is known of the requests, but for what was remembered for early answers."""
        shown: list[Any] = [self.side._waiting_queue._is_held_up, self.side._loading]
        for one in self.asked:
            state = self.side.state(one.request_id)
            assert state is not None
            fields = [field for field in requests.RequestState.__slots__ if field not in NOT_COMPARED]
            kept = {name: getattr(state, name) for name in fields if name not in ("keys", "hashing")}
            names = state.keys.keys if state.keys else None
            shown.append((kept, names, state.is_hashing, state.extras.reason))
        return shown

    def stats(self) -> Any:
        """What was measured of lookups that ended."""
        while self.client.ended:
            self.meter.lookup_ended(self.client.ended.popleft())
        return self.meter._stats.data

    def close(self) -> None:
        self.side.close()
        if self.server is not None:
            self.server.close()


@contextlib.contextmanager
def twins(clock: FakeClock, followed_chunks: int = 0, **more: Any) -> Iterator[tuple[Engine, Engine]]:
    with tempfile.TemporaryDirectory() as work, pytest.MonkeyPatch.context() as patched:
        patched.setattr(SchedulerClient, "_start_joining", lambda self, delay_s: None)
        patched.setattr(request_lookups, "FOLLOWED_CHUNKS", followed_chunks)
        both = [Engine(Path(work), clock, is_quick=is_quick, **more) for is_quick in (True, False)]
        try:
            yield both[0], both[1]
        finally:
            for one in both:
                one.close()


@contextlib.contextmanager
def drawn_twins(source: random.Random, clock: FakeClock, **more: Any) -> Iterator[tuple[Engine, Engine]]:
    """Twins of any kind, with a thread of the test's own for keys."""
    kinds = tuple(source.choice(KINDS) for _ in range(REQUESTS))
    with tempfile.TemporaryDirectory() as work, pytest.MonkeyPatch.context() as patched:
        if source.random() < 0.5:
            patched.setattr(requests, "HASHED_AT_ONCE", LONG)
        patched.setattr("tiered_kv.keys.prefix_keys.YIELD_S", 0.0)
        patched.setattr("tiered_kv.vllm.request_lookups.ThreadPoolExecutor", lambda *_, **__: LateHasher())
        given = {"groups": source.choice(sorted(GROUPS)), "is_by_priority": source.random() < 0.5}
        given["followed_chunks"] = source.choice((0, 0, CHUNKS))
        with twins(clock, kinds=kinds, adapter=adapter_in(Path(work)), **given, **more) as both:
            yield both


def adapter_in(folder: Path) -> Path:
    """Files that could be an adapter's."""
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    return folder


def drawn_answer(source: random.Random, tails: tuple[Tail, ...] = (), parts: int = 0) -> LookupAnswer:
    """Any state of a lookup, also ones that no server would describe."""
    held = source.randrange(CHUNKS + 1)
    count = source.randrange(held + 1)
    ready = source.randrange(count + 1)
    is_done = source.random() < 0.2
    unknown = source.choice((0, 0, 0, CHUNKS - held))
    runs = []
    left = 0 if is_done else count - ready
    while left:
        part = source.randrange(1, left + 1)
        runs.append(Arrival(source.randrange(1, 3), part, source.choice(ETAS)))
        left -= part
    queued = source.choice((0, 0, 0, 0, held - count))
    return LookupAnswer(
        held=held,
        slots=tuple(range(count)),
        ready=ready,
        is_done=is_done,
        arriving=tuple(runs),
        unknown=unknown,
        search_s=source.choice((None, 0.0, 0.001, 0.1)),
        sources=bytes(source.randrange(3) for _ in range(count)),
        queued=queued,
        is_answered=source.random() < 0.95,
        boundary=min(held, max(0, count - parts)) if parts else 0,
        tails=tails,
        unbegun=source.choice((0, queued, source.randrange(queued + 1))),
    )


def drawn_tails(source: random.Random, state: requests.RequestState) -> tuple[int, tuple[Tail, ...]]:
    """Where a request may find tails, and some: its own prompt's and another's."""
    if source.random() < 0.7 or state.keys is None or len(state.keys.keys) < 2:
        return 0, ()
    chunk, tokens = source.randrange(1, len(state.keys.keys)), BLOCK * source.randrange(1, PER_CHUNK)
    try:
        extras = state.extras.extras_for(chunk)
    except Exception:  # noqa: BLE001  # it is left alone by now, and finds none
        return 0, ()
    own = state.keys.tail(state.request.all_token_ids, chunk, tokens, extras)[1]
    slot = source.choice((None, 77))
    return chunk, (Tail(tokens, own, slot), Tail(tokens, bytes(32), 78))[source.randrange(2) :]


def drawn_progress(source: random.Random, lookup: int, before: LookupAnswer) -> m.Progressed:
    """More of a lookup is ready, and mostly so that it pays to wait on."""
    ready = source.randrange(before.ready, len(before.slots) + 1)
    left = len(before.slots) - ready
    eta_s = source.choice((*ETAS, 0.001, 0.001, 0.001))
    runs = [Arrival(1, 1, eta_s), Arrival(1, left - 1, eta_s)] if left > 1 else [Arrival(1, 1, eta_s)] * left
    return m.Progressed(lookup, ready, not left and not before.unknown, tuple(runs))


class Play:
    """Steps of an engine, as vLLM makes them, with anything happening between two of them."""

    def __init__(self, source: random.Random, engines: tuple[Engine, Engine], clock: FakeClock) -> None:
        self.source, self.engines, self.clock = source, engines, clock
        self.rates = (2_000, 20_000, 200_000)
        self.gpu = [0] * REQUESTS
        self.told: dict[int, LookupAnswer] = {}
        self.loading: set[int] = set()
        self.events: Counter[str] = Counter()

    def run(self, steps: int) -> None:
        source, (quick, whole) = self.source, self.engines
        for _ in range(steps):
            for _ in range(source.randrange(3)):
                self._happen()
            for number in source.sample(range(REQUESTS), REQUESTS):
                self._ask_often(number, source.choice((0, 1, 1, 1, 6)))
            if source.random() < 0.7:
                assert quick.step() == whole.step()
            self.check()
            self.clock.advance(source.choice((0.0, 0.001, 0.001, 0.005, 0.03, 0.2, 1.1)))

    def check(self) -> None:
        quick, whole = self.engines
        assert quick.states() == whole.states()
        assert quick.side.counters == whole.side.counters
        assert quick.hear() == whole.hear()
        assert quick.stats() == whole.stats()

    def _ask_often(self, number: int, times: int) -> None:
        """Steps that compute nothing, for a request that waits, and now and then something else in between."""
        for asked in range(times):
            if number in self.loading:
                return
            self._ask(number)
            if asked and self.source.random() < 0.3:
                self._happen()
            if asked and self.source.random() < 0.5:
                self._each(lambda one: one.step())
                self.clock.advance(self.source.choice((0.0, 0.001, 0.11)))

    def _ask(self, number: int) -> None:
        heard = [one.ask(number, self.gpu[number]) for one in self.engines]
        assert heard[0] == heard[1], "an early answer is not that of the whole look"
        if not self._state(number).may_read:
            self._each(lambda one: one.side.poll())  # the whole look did not: sooner or later is no other answer
        tokens = heard[0]
        if tokens is not None and self.source.random() < 0.6:
            if tokens and self.source.random() < 0.5:
                self._each(lambda one: one.load(number, tokens))
                self.loading.add(number)
                self.events["load"] += 1
            else:
                self._replace(number)

    def _replace(self, number: int) -> None:
        self._each(lambda one: one.replace(number))
        self.loading.discard(number)
        self.gpu[number] = 0

    def _each(self, act: Callable[[Engine], object]) -> None:
        first, second = [act(one) for one in self.engines]
        assert first == second

    def _happen(self) -> None:
        """Something that an early answer has to heed, or need not."""
        source = self.source
        number = source.randrange(REQUESTS)
        happens: list[tuple[float, str, Callable[[int], object]]] = [
            (0.34, "progress", self._progress),
            (0.20, "answer", self._answer),
            (0.06, "news of nothing", lambda _: self._each(lambda one: one.tell(m.Credits([])))),
            (0.05, "leases end", self._end),
            (0.05, "rate", self._rate),
            (0.05, "GPU", self._gpu),
            (0.04, "preempted", self._preempted),
            (0.03, "called off", self._replace),
            (0.04, "grows", self._grow),
            (0.03, "adapter", self._adapter),
            (0.05, "keys", lambda _: self._each(lambda one: one.side._lookups._hasher.finish())),  # type: ignore[attr-defined]
            (0.02, "keys begun", lambda _: self._each(lambda one: one.side._lookups._hasher.begin())),  # type: ignore[attr-defined]
            (0.05, "loaded", self._loaded),
            (0.01, "reset", lambda _: self._each(lambda one: one.reset())),
            (0.02, "another session", self._join),
        ]  # fmt: skip
        (_, name, act) = source.choices(happens, [share for share, _, _ in happens])[0]
        self.events[name] += 1
        act(number)

    def _state(self, number: int) -> requests.RequestState:
        whole = self.engines[1]
        state = whole.side.state(whole.asked[number].request_id)
        assert state is not None
        return state

    def _progress(self, number: int) -> None:
        ids = self.engines[1].client.lookups
        known = [name for name in ids if name in self.told and self.told[name].slots]
        if known:
            name = self.source.choice(known)
            progress = drawn_progress(self.source, name, self.told[name])
            self.told[name] = progress.after(self.told[name])
            self._each(lambda one: one.tell(progress))

    def _answer(self, number: int) -> None:
        state = self._state(number)
        if state.lookup is None or state.lookup.id not in self.engines[1].client.lookups:
            return
        name = self.source.choice([one.id for one in (state.lookup, state.renewal) if one is not None])
        chunk, tails = drawn_tails(self.source, state)
        answer = drawn_answer(self.source, tails, len(self.engines[1].side._groups.states))
        if tails and chunk >= answer.ready:
            slots = tuple(range(chunk))
            answer = LookupAnswer(
                chunk, slots, chunk, bool(tails[0].slot), sources=bytes(chunk), is_answered=True, tails=tails
            )
        self.told[name] = answer
        self._each(lambda one: one.tell(m.Updated(name, answer)))

    def _end(self, number: int) -> None:
        lookup = self._state(number).lookup
        if lookup is not None:
            self._each(lambda one: one.tell(m.Ended(lookup.id)))
            self.told.pop(lookup.id, None)

    def _rate(self, number: int) -> None:
        rate = self.source.choice(self.rates)
        self._each(lambda one: one.side.prefill._sample(rate, 1.0))

    def _gpu(self, number: int) -> None:
        self.gpu[number] = CHUNK * self.source.choice((0, 0, 1, CHUNKS))

    def _preempted(self, number: int) -> None:
        """Also in the very step in which it runs again, as after a reset of the GPU's cache."""
        if number in self.loading:
            return
        is_back = self.source.random() < 0.3
        self.gpu[number] = 0
        for one in self.engines:
            name = one.asked[number].request_id
            one.step({name}, {name: 1} if is_back else None)

    def _grow(self, number: int) -> None:
        tokens = [self.source.randrange(2, 500) for _ in range(self.source.choice((1, 20, CHUNK + 5)))]
        if number not in self.loading:
            self._each(lambda one: one.grow(number, list(tokens)))

    def _adapter(self, number: int) -> None:
        """Its files are loaded, or others of its name, or somebody writes to them."""
        folder = self.engines[0].adapter
        assert folder is not None
        what = self.source.random()
        if what < 0.7:
            stamps = stamps_text(adapter_stamps(str(folder)))
            self._each(lambda one: one.report(stamps))
        elif what < 0.8:
            self._each(lambda one: one.report("others"))
        else:
            (folder / "adapter_model.safetensors").write_bytes(self.source.randbytes(8))

    def _loaded(self, number: int) -> None:
        if number not in self.loading:
            return
        is_failed = self.source.random() < 0.3
        name = self.engines[0].asked[number].request_id
        stale = [one.loaded(number, is_failed=is_failed) for one in self.engines]
        assert stale[0] == stale[1]
        if name not in stale[0]:
            self.loading.discard(number)
            if not is_failed:
                self._replace(number)

    def _join(self, number: int) -> None:
        self.told.clear()
        self._each(lambda one: one.join())


@settings(max_examples=count("QUICK_QUESTIONS", 60), deadline=None)
@given(seed=st.integers(0, 1 << 32), fixed=st.sampled_from((None, None, 0, 400)))
def test_an_early_answer_is_that_of_the_whole_look(seed: int, fixed: int | None) -> None:
    clock, source = FakeClock(), random.Random(seed)
    with drawn_twins(source, clock, promotion_wait_ms=fixed, lookup_timeout_ms=60) as engines:
        Play(source, engines, clock).run(40)


def test_requests_of_all_kinds_are_answered_early_and_everything_happens_to_them() -> None:
    """What the test before compares; what may not be read is never waited for, and so never answered early."""
    early, events = Counter[str](), Counter[str]()
    for seed in range(20):
        clock, source = FakeClock(), random.Random(f"kinds {seed}")
        with drawn_twins(source, clock, promotion_wait_ms=400, lookup_timeout_ms=60) as engines:
            play = Play(source, engines, clock)
            play.run(40)
            early += engines[0].quick
            events += play.events
    assert set(early) == {"plain", "streaming", "adapter", "promised", "hashed beside"}, early
    assert min(early.values()) >= 5 and min(events.values()) >= 5 and len(events) == 16, (early, events)


def test_most_questions_of_a_wait_end_early() -> None:
    """But for the first that finds what is held, the one before the end of the wait is near, each that finds more, and
    the last.
    """
    clock = FakeClock()
    with twins(clock, promotion_wait_ms=30_000) as (quick, _):
        for number in range(50):
            assert quick.ask(0) is None, number
        assert quick.quick.total() == 49, "the server has not answered yet"
        lookup = next(iter(quick.client.lookups))
        told = LookupAnswer(CHUNKS, tuple(range(CHUNKS)), sources=bytes(CHUNKS), is_answered=True)
        quick.tell(m.Updated(lookup, told))
        for _ in range(1000):
            clock.advance(0.02)
            assert quick.ask(0) is None
        assert quick.quick.total() == 49 + 999 and b"Follow" not in quick.hear()
        clock.advance(9.95)
        assert quick.ask(0) is None and b"Follow" in quick.hear()
        assert quick.quick.total() == 49 + 999
        for ready in range(1, CHUNKS):
            quick.tell(m.Progressed(lookup, ready, False, (Arrival(1, CHUNKS - ready, 0.1),)))
            for _ in range(10):
                assert quick.ask(0) is None
        assert quick.quick.total() == 49 + 999 + 9 * (CHUNKS - 1)
        quick.tell(m.Progressed(lookup, CHUNKS, True, ()))
        assert quick.ask(0) == CHUNKS * CHUNK
        assert quick.quick.total() == 49 + 999 + 9 * (CHUNKS - 1)


@pytest.mark.parametrize("is_heard", [True, False])
def test_a_wait_ends_when_its_bound_says_so_with_all_that_is_here_by_then(is_heard: bool) -> None:
    """Before it ends the server is asked what is ready; one that does not answer keeps nobody for long."""
    clock = FakeClock()
    with twins(clock, promotion_wait_ms=400) as both:
        lookup = next(iter(both[0].client.lookups))
        slots = tuple(range(CHUNKS))
        comes = (Arrival(1, CHUNKS, 0.1),)
        for one in both:
            one.tell(m.Updated(lookup, LookupAnswer(CHUNKS, slots, 0, False, comes, 0, None, bytes(CHUNKS), 0, True)))
        began_s, asked_s, answer = clock.monotonic(), 0.0, None
        while answer is None:
            heard = [one.ask(0) for one in both]
            assert heard[0] == heard[1] and [one.step() for one in both]
            assert both[0].hear() == both[1].hear()
            answer = heard[0]
            if not asked_s and b"Follow" in both[0].hear():
                asked_s = clock.monotonic() - began_s
                for one in both if is_heard else ():
                    one.tell(m.Progressed(lookup, 5, False, (Arrival(1, CHUNKS - 5, 0.1),)))
            clock.advance(0.005)
        waited_s = clock.monotonic() - began_s - 0.005
        assert answer == (5 * CHUNK if is_heard else 0)
        assert 0.37 <= asked_s <= 0.4 < waited_s <= (0.41 if is_heard else 0.45)
        assert both[0].hear().count(b"Follow") == 1


def test_a_server_that_dies_as_it_is_asked_what_is_ready_costs_the_request_its_hit_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its socket was read to the end just before: that it is gone is seen by what is sent."""
    clock = FakeClock()
    with twins(clock, promotion_wait_ms=10) as both:
        lookup = next(iter(both[0].client.lookups))
        told = LookupAnswer(CHUNKS, tuple(range(CHUNKS)), sources=bytes(CHUNKS), is_answered=True)
        for one in both:
            one.tell(m.Updated(lookup, told))
            monkeypatch.setattr(one.client, "follow", partial(_dies_and_follows, one, one.client.follow))
        for one in both:
            assert one.ask(0) is None
            assert one.client.generation == 1 and not one.client.lookups
            assert one.ask(0) == 0
            assert one.side.counters["lookup_session_lost"] == 1


def _dies_and_follows(engine: Engine, follow: Callable[[int], None], lookup: int) -> None:
    assert engine.server is not None
    engine.server.close()
    follow(lookup)


def test_what_was_told_long_before_a_turn_is_asked_for_anew_before_the_request_goes_on_without_it() -> None:
    """Told of a slow tier at first; by the request's turn most is here, and the rest comes soon."""
    clock = FakeClock()
    with twins(clock) as both:
        lookup = next(iter(both[0].client.lookups))
        slow = LookupAnswer(CHUNKS, tuple(range(CHUNKS)), 0, False, (Arrival(1, CHUNKS, 30.0),), 0, None, bytes(CHUNKS))
        for one in both:
            one.tell(m.Updated(lookup, msgspec.structs.replace(slow, is_answered=True)))
            one.side.poll()
        clock.advance(5.0)
        assert [one.ask(0) for one in both] == [None, None]
        assert all(one.hear().count(b"Follow") == 1 for one in both)
        for one in both:
            one.tell(m.Progressed(lookup, CHUNKS - 1, False, (Arrival(1, 1, 30.0),)))
        clock.advance(0.001)
        assert [one.ask(0) for one in both] == [(CHUNKS - 1) * CHUNK] * 2


@pytest.mark.parametrize(
    ("given", "is_followed"),
    [({}, False), ({"followed_chunks": CHUNKS - 1}, False), ({"followed_chunks": CHUNKS}, True),
     ({"promotion_wait_ms": 0}, True)],
)  # fmt: skip
def test_short_lookups_and_those_that_nothing_is_waited_for_are_followed_from_their_beginning(
    given: dict[str, Any], is_followed: bool
) -> None:
    with twins(FakeClock(), **given) as both:
        sent = list(m.FrameReader(m.FromClient).feed(both[0].hear()))
        assert [one.is_followed for one in sent if isinstance(one, m.Lookup)] == [is_followed] * REQUESTS


def test_a_short_wait_is_followed_from_its_first_answer_on() -> None:
    """An eighth has come within it and says that the tier is fast: the rest is waited for."""
    clock = FakeClock()
    with twins(clock) as both:
        lookup = next(iter(both[0].client.lookups))
        unmeasured = LookupAnswer(
            CHUNKS, tuple(range(CHUNKS)), 0, False, (Arrival(1, CHUNKS),), sources=bytes(CHUNKS), is_answered=True
        )
        for one in both:
            one.side.prefill._sample(20 * CHUNKS * CHUNK, 1.0)  # 50 ms to compute all, 2.5 of which may be waited
            one.tell(m.Updated(lookup, unmeasured))
        assert [one.ask(0) for one in both] == [None, None]
        assert all(one.hear().count(b"Follow") == 1 for one in both)
        for one in both:
            one.tell(m.Progressed(lookup, 1, False, (Arrival(1, CHUNKS - 1, 0.006),)))
        for _ in range(8):
            clock.advance(0.001)
            assert [one.ask(0) for one in both] == [None, None]
        for one in both:
            one.tell(m.Progressed(lookup, CHUNKS, True, ()))
        assert [one.ask(0) for one in both] == [CHUNKS * CHUNK] * 2


def test_questions_end_early_while_another_thread_computes_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each begins the turn anew, because what the request waits for is not the cache's to answer yet."""
    monkeypatch.setattr(requests, "HASHED_AT_ONCE", CHUNK)
    clock, gate = FakeClock(), threading.Event()
    submit = ThreadPoolExecutor.submit

    def submit_late(self: ThreadPoolExecutor, work: Callable[..., object], *given: object) -> Future[Any]:
        return submit(self, lambda: (gate.wait(), work(*given))[1])

    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit_late)
    with twins(clock) as engines:
        for _ in range(20):
            assert [one.ask(0) for one in engines] == [None, None]
            assert engines[0].states() == engines[1].states()
            clock.advance(0.001)
        assert engines[0].quick.total() == 20 - 1 and not engines[0].client.lookups
        clock.advance(HASHING_MAX_S)
        gate.set()
        for one in engines:
            wait_for(partial(_looks_up, one), "the lookup")


def _looks_up(engine: Engine) -> bool:
    state = engine.side.state(engine.asked[0].request_id)
    assert state is not None
    return engine.ask(0) is None and state.lookup is not None


def test_a_request_whose_adapter_has_changed_waits_for_no_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is computed, and at once: what is held under the keys that are being computed is another adapter's."""
    monkeypatch.setattr(requests, "HASHED_AT_ONCE", CHUNK)
    monkeypatch.setattr("tiered_kv.vllm.request_lookups.ThreadPoolExecutor", lambda *_, **__: LateHasher())
    adapter = adapter_in(tmp_path)
    with twins(FakeClock(), kinds=("adapter",) * REQUESTS, adapter=adapter) as engines:
        for one in engines:
            one.report(stamps_text(adapter_stamps(str(adapter))))
        assert [[one.ask(0) for one in engines] for _ in range(3)] == [[None, None]] * 3
        assert engines[0].quick.total() == 2
        (adapter / "adapter_model.safetensors").write_bytes(b"other weights")
        assert [one.ask(0) for one in engines] == [0, 0]


def test_the_socket_is_asked_once_where_nothing_has_come_and_read_to_its_end_where_something_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is not about the request that waits is taken in, and the answer comes early."""
    with twins(FakeClock(), promotion_wait_ms=30_000) as (quick, _):
        lookup = next(iter(quick.client.lookups))
        quick.tell(
            m.Updated(lookup, LookupAnswer(CHUNKS, tuple(range(CHUNKS)), 1, sources=bytes(CHUNKS), is_answered=True))
        )
        assert quick.ask(0) is None
        news, asked = quick.client._news, list[int]()
        monkeypatch.setattr(quick.client, "_news", SimpleNamespace(poll=lambda ms: asked.append(ms) or news.poll(ms)))
        assert quick.ask(0) is None and len(asked) == 1, "nothing has come"
        before = quick.quick.total()
        quick.tell(m.Credits([7]))
        assert quick.ask(0) is None and len(asked) == 3
        assert quick.quick.total() == before + 1 and quick.client.credit_count == 1
        quick.tell(m.Progressed(lookup, 2, False, (Arrival(1, CHUNKS - 2, 0.1),)))
        assert quick.ask(0) is None
        assert quick.quick.total() == before + 1, "it is looked at whole"
        assert quick.client.lookups[lookup].ready == 2 and quick.client.is_leased(lookup, quick.client.generation)


def test_requests_that_are_left_alone_do_not_fill_the_log(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """An engine whose adapters cannot be read serves on like this for weeks, and each is counted."""
    clock = FakeClock()
    with twins(clock, kinds=("adapter",) * REQUESTS, adapter=tmp_path / "none") as (one, _):
        clock.advance(WARNINGS_EVERY_S)
        before = one.side.counters["request_unaccountable"]
        caplog.clear()
        for _ in range(3 * WARNINGS_MAX):
            one.side.add_request(one._request(0))
        assert one.side.counters["request_unaccountable"] == before + 3 * WARNINGS_MAX
        texts = [record.getMessage() for record in caplog.records]
        assert len([text for text in texts if "neither looked up nor stored" in text]) == WARNINGS_MAX
        clock.advance(WARNINGS_EVERY_S)
        one.side.add_request(one._request(0))
        assert "neither looked up nor stored. reason=adapter's files cannot be read" in caplog.records[-1].getMessage()
