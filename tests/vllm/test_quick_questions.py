"""vLLM asks at every step; where nothing has changed the answer comes early, and is what the whole look would give.

Two scheduler sides hear the same of two sockets, at the same times; one of them always takes the whole look.
"""

import contextlib
import math
import random
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from tests.kit.counts import count
from tests.kit.fake_clock import FakeClock
from tests.kit.server.clients import BLOCK, CHUNK
from tests.kit.server.clients import settings as cache_settings
from tests.kit.server.probe import wait_for
from tiered_kv.keys.namespace import REQUIRED_FIELDS, Namespace
from tiered_kv.server import protocol as m
from tiered_kv.server.client import SchedulerClient
from tiered_kv.tiering.types import Arrival, LookupAnswer
from tiered_kv.vllm import requests
from tiered_kv.vllm.engine_metrics import SchedulerMeter
from tiered_kv.vllm.engine_role import EngineRole
from tiered_kv.vllm.hooks import SchedulerHooks
from tiered_kv.vllm.identity.adapters import Adapters
from tiered_kv.vllm.kv_groups import CacheGroup, CacheGroups
from tiered_kv.vllm.request_lookups import HASHING_MAX_S
from tiered_kv.vllm.scheduler import SchedulerSide

pytestmark = pytest.mark.vllm

GROUPS = CacheGroups([CacheGroup(0, BLOCK, CHUNK // BLOCK, CHUNK // BLOCK)])
ROLE = EngineRole(may_load=True, may_store=True, has_prefix_caching=False)
RECORD = Namespace.from_fields(dict.fromkeys(REQUIRED_FIELDS) | {"format_version": 1, "epoch": "base-0"}).record
READY = m.Ready(RECORD, 8192, 4096, [0], 100, ["host", "disk", "object"], 1 << 30)
CHUNKS = 8
REQUESTS = 3
ETAS = (None, 0.0, 0.001, 0.01, 0.05, 0.2, 1.0, 30.0, math.inf)


class Engine:
    """A scheduler side on a socket whose other end the test holds. Threads: one."""

    def __init__(self, root: Path, clock: FakeClock, *, is_quick: bool, **more: Any) -> None:
        config = cache_settings(root, **more)
        self.client = SchedulerClient(config, "e", 1)
        self.server: socket.socket | None = None
        self.said = bytearray()
        self.side = SchedulerSide(config, self.client, Adapters(""), GROUPS, ROLE, clock.monotonic)
        self.meter = SchedulerMeter(self.client, self.side.counters, CHUNK, clock.monotonic)
        self.hooks = object.__new__(SchedulerHooks)
        self.hooks.side, self.hooks._meter = self.side, self.meter
        self.quick = 0
        goes_on_waiting = self.side.goes_on_waiting

        def counted(*asked: Any) -> bool:
            goes_on = is_quick and goes_on_waiting(*asked)
            self.quick += goes_on
            return goes_on

        self.side.goes_on_waiting = counted  # type: ignore[method-assign]
        self.asked = [self._request(number) for number in range(REQUESTS)]
        self.join()
        for one in self.asked:
            self.side.add_request(one)

    def _request(self, number: int) -> Request:
        tokens = [*range(10_000 * number, 10_000 * number + CHUNKS * CHUNK), 1]
        return Request(f"r{number}", tokens, SamplingParams(max_tokens=4), None)

    def join(self) -> None:
        """A session, in place of the one that there was."""
        if self.server is not None:
            self.server.close()
            self.client.poll()
        ours, self.server = socket.socketpair()
        ours.setblocking(False)
        self.client._joined.append((self.client.generation, ours))
        self.client.poll()
        self.tell(READY)
        self.client.poll()

    def replace(self, number: int) -> None:
        """A request is over, and another one of the same prompt comes."""
        self.side.finish_request(self.asked[number], ())
        self.asked[number] = self._request(number)
        self.side.add_request(self.asked[number])

    def ask(self, number: int, computed: int = 0) -> int | None:
        """What vLLM hears of a request when it asks."""
        return self.hooks.matched_tokens(self.asked[number], computed)

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
        shown = []
        for one in self.asked:
            state = self.side.state(one.request_id)
            assert state is not None
            fields = [field for field in requests.RequestState.__slots__ if field not in ("wait", "request", "extras")]
            shown.append({name: getattr(state, name) for name in fields if name not in ("keys", "hashing")})
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
def twins(clock: FakeClock, **more: Any) -> Iterator[tuple[Engine, Engine]]:
    with tempfile.TemporaryDirectory() as work, pytest.MonkeyPatch.context() as patched:
        patched.setattr(SchedulerClient, "_start_joining", lambda self, delay_s: None)
        both = [Engine(Path(work), clock, is_quick=is_quick, **more) for is_quick in (True, False)]
        try:
            yield both[0], both[1]
        finally:
            for one in both:
                one.close()


def drawn_answer(source: random.Random) -> LookupAnswer:
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
    return LookupAnswer(
        held=held,
        slots=tuple(range(count)),
        ready=ready,
        is_done=is_done,
        arriving=tuple(runs),
        unknown=unknown,
        search_s=source.choice((None, 0.0, 0.001, 0.1)),
        sources=bytes(source.randrange(3) for _ in range(count)),
        queued=source.choice((0, 0, 0, 0, held - count)),
        is_answered=source.random() < 0.95,
    )


def drawn_progress(source: random.Random, lookup: int, before: LookupAnswer) -> m.Progressed:
    """More of a lookup is ready, and mostly so that it pays to wait on."""
    ready = source.randrange(before.ready, len(before.slots) + 1)
    left = len(before.slots) - ready
    eta_s = source.choice((*ETAS, 0.001, 0.001, 0.001))
    runs = [Arrival(1, 1, eta_s), Arrival(1, left - 1, eta_s)] if left > 1 else [Arrival(1, 1, eta_s)] * left
    return m.Progressed(lookup, ready, not left and not before.unknown, tuple(runs))


def play(source: random.Random, engines: tuple[Engine, Engine], clock: FakeClock, events: int) -> None:
    """Steps of an engine, as vLLM makes them, with anything happening between two of them."""
    quick, whole = engines
    rates = (2_000, 20_000, 200_000)
    gpu = [0] * REQUESTS
    told: dict[int, LookupAnswer] = {}
    for _ in range(events):
        for _ in range(source.randrange(3)):
            _happen(source, engines, source.choice(rates), gpu, told)
        asked = [number for number in range(REQUESTS) if source.random() < 0.8]
        for number in asked:
            heard = [one.ask(number, gpu[number]) for one in engines]
            assert heard[0] == heard[1], "an early answer is not that of the whole look"
            if heard[0] is not None and source.random() < 0.6:
                for one in engines:
                    one.replace(number)
        if source.random() < 0.7:
            for one in engines:
                one.side.plan_step(SimpleNamespace(preempted_req_ids=None, num_scheduled_tokens={}))
        assert quick.states() == whole.states()
        assert quick.side.counters == whole.side.counters
        assert quick.hear() == whole.hear()
        assert quick.stats() == whole.stats()
        clock.advance(source.choice((0.0, 0.001, 0.001, 0.005, 0.03, 0.2, 1.1)))


def _happen(
    source: random.Random,
    engines: tuple[Engine, Engine],
    rate: int,
    gpu: list[int],
    told: dict[int, LookupAnswer],
) -> None:
    """Something that an early answer has to heed, or need not; ``told`` is what was said last of each lookup."""
    what = source.random()
    number = source.randrange(REQUESTS)
    state = engines[1].side.state(f"r{number}")
    assert state is not None
    ids = list(engines[1].client.lookups)
    known = [name for name in ids if name in told and told[name].slots]
    if what < 0.4 and known:
        name = source.choice(known)
        progress = drawn_progress(source, name, told[name])
        told[name] = progress.after(told[name])
        for one in engines:
            one.tell(progress)
    elif what < 0.6 and ids:
        name = source.choice(ids)
        told[name] = drawn_answer(source)
        for one in engines:
            one.tell(m.Updated(name, told[name]))
    elif what < 0.7:
        for one in engines:
            one.tell(m.Credits([]))
    elif what < 0.75 and state.lookup is not None:
        for one in engines:
            one.tell(m.Ended(state.lookup.id))
        told.pop(state.lookup.id, None)
    elif what < 0.8:
        for one in engines:
            one.side.prefill._sample(rate, 1.0)
    elif what < 0.85:
        gpu[number] = CHUNK * source.choice((0, 0, 1, CHUNKS))
    elif what < 0.88:
        for one in engines:
            one.side.plan_step(SimpleNamespace(preempted_req_ids={f"r{number}"}, num_scheduled_tokens={}))
    elif what < 0.9:
        told.clear()
        for one in engines:
            one.join()


@settings(max_examples=count("QUICK_QUESTIONS", 150))
@given(seed=st.integers(0, 1 << 32), fixed=st.sampled_from((None, None, 0, 400)))
def test_an_early_answer_is_that_of_the_whole_look(seed: int, fixed: int | None) -> None:
    clock = FakeClock()
    with twins(clock, promotion_wait_ms=fixed, lookup_timeout_ms=60) as engines:
        play(random.Random(seed), engines, clock, 40)


def test_most_questions_of_a_wait_end_early() -> None:
    """Also those that find more of what is waited for; not the first that finds anything, nor the last."""
    clock = FakeClock()
    with twins(clock, promotion_wait_ms=30_000) as (quick, _):
        for number in range(50):
            assert quick.ask(0) is None, number
        assert quick.quick == 49, "the server has not answered yet"
        lookup = next(iter(quick.client.lookups))
        told = LookupAnswer(CHUNKS, tuple(range(CHUNKS)), sources=bytes(CHUNKS), is_answered=True)
        quick.tell(m.Updated(lookup, told))
        for ready in range(1, CHUNKS):
            for _ in range(10):
                clock.advance(0.001)
                assert quick.ask(0) is None
            quick.tell(m.Progressed(lookup, ready, False, (Arrival(1, CHUNKS - ready, 0.1),)))
        assert quick.quick == 49 + 10 * (CHUNKS - 1) - 1
        quick.tell(m.Progressed(lookup, CHUNKS, True, ()))
        assert quick.ask(0) == CHUNKS * CHUNK
        assert quick.quick == 49 + 10 * (CHUNKS - 1) - 1


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
        assert engines[0].quick == 20 - 1 and not engines[0].client.lookups
        clock.advance(HASHING_MAX_S)
        gate.set()
        for one in engines:
            wait_for(partial(_looks_up, one), "the lookup")


def _looks_up(engine: Engine) -> bool:
    state = engine.side.state("r0")
    assert state is not None
    return engine.ask(0) is None and state.lookup is not None
