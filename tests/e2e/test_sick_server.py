"""A real engine whose cache server stands still, or answers nonsense: its steps go on, and so do its requests."""

import linecache
import logging
import math
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import pytest

from tests.kit.counts import count, seed
from tests.kit.faults.hostile_messages import INTEGERS
from tests.kit.server.probe import server_pid, wait_for, wait_written
from tests.kit.server.processes import freeze
from tests.kit.vllm.cached_engine import CHUNK, TAIL, CachedEngine, assert_same, cached_engine
from tests.kit.vllm.harness import Answer, drain, generate, random_prompt, reset_gpu_cache
from tiered_kv.errors import ProtocolError
from tiered_kv.server import protocol as m
from tiered_kv.tiering.types import Arrival, LookupAnswer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

LENGTH = 2 * CHUNK + TAIL
SALT = "planted-salt-4711"
WAITS = {"sleep", "select", "poll", "connect", "accept", "sendall", "fsync", "flock", "communicate", "wait"}
"""Calls that may wait; those on sockets wait unless the socket has a timeout of zero."""
SOCKET_CALLS = {"recv", "recv_into", "recvmsg", "send", "sendmsg"}


@pytest.fixture(scope="module")
def logged() -> Iterator[list[str]]:
    """Everything the connector says in this process, at every level."""
    lines: list[str] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(self.format(record))

    keeper = Keeper(logging.DEBUG)
    loggers = [logging.getLogger(name) for name in ("tiered_kv", "vllm.tiered_kv")]
    for one in loggers:
        one.addHandler(keeper)
        one.setLevel(logging.DEBUG)
    yield lines
    for one in loggers:
        one.removeHandler(keeper)
        one.setLevel(logging.NOTSET)


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, logged: list[str]) -> Iterator[CachedEngine]:
    root = tmp_path_factory.mktemp("sick")
    with cached_engine(tiny_model, root, {"start_timeout_s": 10}) as one:
        yield one


@contextmanager
def no_waiting() -> Iterator[Counter[str]]:
    """Note every call below our code in this thread, vLLM's, that could wait for somebody."""
    found: Counter[str] = Counter()

    def look(frame: FrameType, event: str, function: Any) -> None:
        if event != "c_call":
            return
        name = getattr(function, "__name__", "")
        if name in SOCKET_CALLS:
            found["looked at"] += 1
        waits = name in WAITS or (name in SOCKET_CALLS and function.__self__.gettimeout() != 0.0)
        if name == "poll" and ".poll(0)" in linecache.getline(frame.f_code.co_filename, frame.f_lineno):
            waits = False  # it only looks
        if waits and (ours := _ours(frame)):
            found[f"{name} in {ours}"] += 1

    sys.setprofile(look)
    try:
        yield found
    finally:
        sys.setprofile(None)


def _ours(frame: FrameType | None) -> str:
    for _ in range(12):
        if frame is None:
            return ""
        if "/tiered_kv/" in frame.f_code.co_filename:
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def prompts(first: int, number: int) -> list[list[int]]:
    return [random_prompt(first + i, LENGTH) for i in range(number)]


@contextmanager
def impatient(engine: CachedEngine) -> Iterator[None]:
    """Lookups that nobody answers are given up soon; answers of a server that is well are waited for on any machine."""
    lookups = engine.scheduler_side._lookups
    patient = lookups._config
    lookups._config = replace(patient, lookup_timeout_ms=100.0)
    try:
        yield
    finally:
        lookups._config = patient


def wait_heard(engine: CachedEngine) -> None:
    """Until the server has answered again."""

    def is_heard() -> bool:
        engine.scheduler_side.poll()
        return not engine.scheduler_side._client.is_silent

    wait_for(is_heard, "an answer of the server that goes on")


def asked(engine: CachedEngine, *given: list[int]) -> list[Answer]:
    """Answer without waiting for what the cache still does: its server may never answer."""
    reset_gpu_cache(engine.llm)
    return generate(engine.llm, given)


def test_no_step_waits_for_a_server_that_stands_still(engine: CachedEngine) -> None:
    known = prompts(100, 3)
    cold = engine.ask(*known)
    warm = engine.ask(*known)
    assert [answer.cached_tokens for answer in warm] == [2 * CHUNK] * 3
    wait_written(engine.root)
    counters = engine.scheduler_side.counters
    before, pid = counters["lookup_timeout"], server_pid(engine.root)
    reset_gpu_cache(engine.llm)
    try:
        freeze(pid)
        with impatient(engine), no_waiting() as waits:
            frozen = generate(engine.llm, [*known, *prompts(200, 3)])
            assert engine.scheduler_side._client.is_ready, "the session ended: nothing was asked of the frozen server"
    finally:
        os.kill(pid, signal.SIGCONT)
    assert waits.pop("looked at") > 0, "no call on a socket was seen"
    assert waits == Counter()
    assert [answer.cached_tokens for answer in frozen] == [0] * 6
    assert counters["lookup_timeout"] - before == 6  # the first waited in vain, and nobody after it
    for ours, theirs in zip(frozen[:3], cold, strict=True):
        assert_same(ours, theirs)
    drain(engine.llm)
    assert not engine.scheduler_side.saves.has_work
    wait_heard(engine)
    again = engine.ask(*known)
    assert [answer.cached_tokens for answer in again] == [2 * CHUNK] * 3
    for ours, theirs in zip(again, cold, strict=True):
        assert_same(ours, theirs)


def test_the_look_at_calls_that_wait_sees_one(engine: CachedEngine) -> None:
    """The control of the test above: a client that waits for its socket is found."""
    client = engine.scheduler_side._client
    reset_gpu_cache(engine.llm)
    client._sock.settimeout(0.001)
    try:
        with impatient(engine), no_waiting() as waits, pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(client), "_check_patience", lambda self: None)
            generate(engine.llm, prompts(300, 1))  # a time-out ends the session, and nothing else
    finally:
        if client._sock is not None:
            client._sock.setblocking(False)
    assert any("in client.py" in what for what in waits)
    drain(engine.llm)


def garbled(source: random.Random, message: Any) -> Any:
    """A server's message with some fields of the right type and any content."""
    if source.random() < 0.5:
        return message
    drawn = source.choice
    few = [drawn(INTEGERS) if source.random() < 0.5 else source.randrange(64) for _ in range(drawn((0, 1, 2, 5)))]
    match message:
        case m.Updated():
            sources = bytes(drawn((0, len(few), len(few))))
            ready = drawn((0, len(few), len(few) + 1, drawn(INTEGERS)))
            held = drawn((0, 2, drawn(INTEGERS)))
            arriving = (Arrival(1, drawn(INTEGERS), drawn((None, 0.0, -1.0, math.nan, math.inf))),)
            is_done, unknown = source.random() < 0.7, drawn((0, 3))
            search_s = drawn((None, -1.0))
            answer = LookupAnswer(held, tuple(few), ready, is_done, arriving, unknown, search_s, sources, 0, True)
            answer = msgspec.structs.replace(answer, queued=drawn((0, 2)), unbegun=drawn((0, 0, 2)))
            return m.Updated(message.lookup, answer)
        case m.Progressed():
            arriving = (Arrival(1, drawn(INTEGERS), drawn((None, 0.0, -1.0, math.nan, math.inf))),)
            return m.Progressed(message.lookup, drawn((0, 1, 2, drawn(INTEGERS))), drawn((True, False)), arriving)
        case m.Credits():
            return m.Credits(few)
        case m.Stat():
            return m.Stat(drawn((b"[" * 100_000, b"{}", b"\xff", message.figures[:-5])))
        case m.Ready():
            size = drawn((0, 4096, 1 << 40))
            return m.Ready(message.record, size, 4096, message.rank_offsets, 1, message.tiers, message.host_bytes)
    return message


def test_an_engine_outlives_a_server_that_answers_nonsense(
    engine: CachedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, source = engine.scheduler_side._client, random.Random(seed())
    take, told = client._take, Counter[str]()

    def take_garbled(message: Any) -> None:
        other = garbled(source, message)
        told[type(message).__name__] += other is not message
        take(other)

    # The engine's own waiting before it joins again, which would be most of the test.
    monkeypatch.setattr("tiered_kv.server.client.BACKOFF_LAST_S", 0.2)
    monkeypatch.setattr("tiered_kv.vllm.worker.BACKOFF_LAST_S", 0.2)
    monkeypatch.setattr("tiered_kv.vllm.engine_metrics.FIGURES_INTERVAL_S", 0.0)
    monkeypatch.setattr(client, "_take", take_garbled)
    stored, asked_min = prompts(400, 4), count("GARBLED_PROMPTS", 12)
    with impatient(engine):
        for number in range(10 * asked_min):
            if number >= asked_min and told["Updated"] > 1:
                break  # on a busy machine most prompts may find no session yet, and ask nothing
            answers = asked(engine, stored[number % 4], random_prompt(500 + number, LENGTH))
            assert [len(answer.tokens) for answer in answers] == [8, 8]  # any: the server is trusted with bytes
            if not client.is_ready:
                client.wait_ready(2.0)
    monkeypatch.setattr(client, "_take", take)
    assert told["Updated"] > 1 and client.generation > 0
    drain(engine.llm)
    if client._sock is not None:
        client._lose(ProtocolError("what was told is forgotten: slots that nobody granted"))
    for number in range(30):  # the worker hears of the next session by a step
        asked(engine, random_prompt(700 + number, TAIL))
        if client.wait_ready(2.0):
            break
    wait_heard(engine)
    fresh = prompts(900, 2)
    cold = engine.ask(*fresh)
    warm = engine.ask(*fresh)
    assert [answer.cached_tokens for answer in warm] == [2 * CHUNK] * 2
    for ours, theirs in zip(warm, cold, strict=True):
        assert_same(ours, theirs)
    pool = engine.scheduler.kv_cache_manager.block_pool
    reset_gpu_cache(engine.llm)
    assert pool.num_gpu_blocks - pool.get_num_free_blocks() == 1, "blocks are lost; the null block is always in use"


def test_the_connector_says_nothing_of_prompts_and_salts(engine: CachedEngine, logged: list[str]) -> None:
    from vllm import SamplingParams

    tokens = random_prompt(1000, LENGTH)
    prompt = {"prompt_token_ids": tokens, "cache_salt": SALT}
    parameters = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)
    for _ in range(2):
        reset_gpu_cache(engine.llm)
        engine.llm.generate([prompt], parameters, use_tqdm=False)
        drain(engine.llm)
    wait_written(engine.root)
    said = "\n".join(logged)
    assert "cache session open" in said, "nothing was kept of what was said"
    files = [path for path in engine.root.rglob("*") if path.is_file()]
    assert any(path.suffix == ".safetensors" for path in files)
    for text in (SALT, *(", ".join(map(str, tokens[i : i + 3])) for i in range(0, LENGTH - 3, 50))):
        assert text not in said
        assert not [path for path in files if text.encode() in path.read_bytes()]
