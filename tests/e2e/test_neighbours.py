"""Two real engines on one server: one's long queue takes no hits from the other and no slot from under its copies.

The neighbour is a vLLM in a process of its own whose queue of 24 prompts lies on disk; host memory holds 8 of them.
"""

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import pytest
import xxhash

from tests.kit.counts import only_in_proofs
from tests.kit.server.probe import figures, wait_for, wait_written
from tests.kit.server.processes import freeze
from tests.kit.vllm.cached_engine import CHUNK, TAIL, CachedEngine, assert_same, cached_engine, settings
from tests.kit.vllm.engine_process import IN_ONE_PROCESS, EngineProcess
from tests.kit.vllm.harness import (
    Answer,
    as_answer,
    drain,
    generate,
    kv_fingerprint,
    random_prompt,
    reset_gpu_cache,
    running,
    zero_kv,
)
from tiered_kv.ops.server_link import ServerLink

pytestmark = [pytest.mark.vllm, pytest.mark.cores, pytest.mark.timeout(900), only_in_proofs]

CHUNK_BYTES = 528_384
CHUNKS = 3
HIT = CHUNKS * CHUNK
QUEUE = [random_prompt(2_000 + n, HIT + TAIL) for n in range(24)]
OURS = [random_prompt(2_100 + n, HIT + TAIL) for n in range(6)]
LIMITS = {"host_bytes": 8 * CHUNKS * CHUNK_BYTES, "disk_bytes": "256MiB"}
CAP_PROMPTS = 4
"""Prompts that all leases together may hold: half of host memory."""
MAX_TOKENS = 8
QUEUE_TOKENS = 128
"""The neighbour says more, one request at a time, so that its queue is still there while the other engine asks."""
COPY_S = 120.0
"""How long a copy is held up at most, so that a test that fails ends."""


class Neighbour(EngineProcess):
    """A vLLM whose scheduler and worker are one process, which answers one request at a time."""

    def __init__(self, model: Path, root: Path, log: Path) -> None:
        super().__init__(model, settings(root, **LIMITS), log, environment=IN_ONE_PROCESS, max_num_seqs=1)

    def freeze(self) -> None:
        freeze(self._process.pid)

    def thaw(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> list[Answer]:
    """What both engines' prompts give without a cache, the neighbour's first."""
    with running(tiny_model) as llm:
        return generate(llm, QUEUE, max_tokens=QUEUE_TOKENS) + generate(llm, OURS, max_tokens=MAX_TOKENS)


@pytest.fixture(scope="module")
def engines(
    tiny_model: Path, plain: list[Answer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[CachedEngine, Neighbour]]:
    """This process's engine, after the plain one, and its neighbour; all prompts are on disk."""
    folder = tmp_path_factory.mktemp("neighbours")
    root = folder / "cache"
    with cached_engine(tiny_model, root, LIMITS | {"lease_s": 2.0}) as engine:
        neighbour = Neighbour(tiny_model, root, folder / "neighbour.log")
        try:
            for prompts, ask in ((OURS, engine.ask), (QUEUE, neighbour.ask)):
                for prompt in prompts:
                    ask(prompt, max_tokens=1)
                    wait_written(root)
            assert chunks_on_disk(root) == CHUNKS * len(OURS + QUEUE)
            yield engine, neighbour
        finally:
            neighbour.close()


@pytest.fixture
def engine(engines: tuple[CachedEngine, Neighbour]) -> CachedEngine:
    """This process's engine; nothing is in host memory."""
    ours, neighbour = engines
    assert neighbour.reset()
    reset_gpu_cache(ours.llm)
    empty_host(ours.root)
    return ours


@pytest.fixture
def neighbour(engines: tuple[CachedEngine, Neighbour], engine: CachedEngine) -> Iterator[Neighbour]:
    one = engines[1]
    try:
        yield one
    finally:
        one.thaw()
        one.discard()


def empty_host(root: Path) -> None:
    with ServerLink.of_directory(root) as link:
        link.evict("host", b"", None, holes=True)


def counted(root: Path, name: str) -> int:
    return int(figures(root)["counters"].get(name, 0))


def chunks_on_disk(root: Path) -> int:
    return next(flow["resident_chunks"] for flow in figures(root)["flows"] if flow["tier"] == "disk")


def open_lookups(root: Path) -> int:
    return int(figures(root)["hierarchy"]["lookups"])


def assert_queue_is_well(neighbour: Neighbour, plain: list[Answer]) -> None:
    """The neighbour's own answers hit, and are right."""
    said = neighbour.receive()
    cached = [answer["cached_tokens"] for answer in said]
    assert sum(cached) >= 0.95 * HIT * len(QUEUE), cached
    for answer, theirs in zip(said, plain, strict=False):
        ours = Answer(tuple(answer["tokens"]), tuple(map(tuple, answer["logprobs"])), 0, answer["finish_reason"])
        assert_same(ours, theirs)


# -- hits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_frozen", [False, True], ids=["busy", "frozen"])
def test_an_engine_hits_beside_a_neighbour_with_a_long_queue_what_it_hits_alone(
    engine: CachedEngine, neighbour: Neighbour, plain: list[Answer], is_frozen: bool
) -> None:
    """The neighbour works its queue off meanwhile, or has been stopped in the middle of it."""
    alone = [engine.ask(prompt, max_tokens=MAX_TOKENS)[0] for prompt in OURS]
    empty_host(engine.root)
    before = counted(engine.root, "lease_cap_reached")
    neighbour.send(*QUEUE, max_tokens=QUEUE_TOKENS)
    wait_for(lambda: counted(engine.root, "lease_cap_reached") > before, "a queue longer than the cap")
    wait_for(lambda: open_lookups(engine.root) >= len(QUEUE) // 2, "the lookups of a long queue")
    if is_frozen:
        neighbour.freeze()

    beside = []
    for prompt in OURS:
        zero_kv(engine.llm)
        beside += engine.ask(prompt, max_tokens=MAX_TOKENS)
        assert open_lookups(engine.root) > CAP_PROMPTS, "the queue was over: nothing was proved"
    neighbour.thaw()

    assert [answer.cached_tokens for answer in alone] == [HIT] * len(OURS)
    assert sum(answer.cached_tokens for answer in beside) >= 0.95 * HIT * len(OURS), beside
    for ours, theirs in zip(alone + beside, plain[len(QUEUE) :] * 2, strict=True):
        assert_same(ours, theirs)
    assert_queue_is_well(neighbour, plain)


# -- leases that end under a copy -------------------------------------------------------------------------------------


class SlowLoads:
    """The worker's copies out of slots: what they read, and a load that stands still in front of its second chunk."""

    def __init__(self, engine: CachedEngine) -> None:
        self.read: list[str] = []
        self.is_copying = threading.Event()
        self.go_on = threading.Event()
        self._scatter = engine.worker_side._paged.scatter

    def scatter(self, view: memoryview, runs: Any, job: Any) -> None:
        if len(self.read) == 1:
            self.is_copying.set()
            assert self.go_on.wait(COPY_S)
        self.read.append(xxhash.xxh3_128_hexdigest(view))
        self._scatter(view, runs, job)


@contextmanager
def slow_loads(engine: CachedEngine) -> Iterator[SlowLoads]:
    slow = SlowLoads(engine)
    engine.worker_side._paged.scatter = slow.scatter
    try:
        yield slow
    finally:
        slow.go_on.set()
        drain(engine.llm)
        del engine.worker_side._paged.scatter


class Steps:
    """An engine that is stepped by hand, so that it can be looked at while a load runs."""

    def __init__(self, engine: CachedEngine) -> None:
        self._core = engine.llm.llm_engine
        self._names: list[str] = []
        self.done: dict[str, Answer] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Abort what a failed test left: ``generate`` would wait for it for ever."""
        self._core.abort_request([name for name in self._names if name not in self.done], internal=False)

    def add(self, name: str, prompt: Sequence[int]) -> None:
        from vllm import SamplingParams

        parameters = SamplingParams(
            temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False, logprobs=2
        )
        self._names.append(name)
        self._core.add_request(name, {"prompt_token_ids": list(prompt)}, parameters)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        def is_met() -> bool:
            self.done |= {one.request_id: as_answer(one) for one in self._core.step() if one.finished}
            return condition()

        wait_for(is_met, what)


@pytest.fixture
def undisturbed(engine: CachedEngine) -> tuple[list[str], dict[str, str]]:
    """What the slots of our first two prompts hold, and the KV that a load makes of the first one."""
    with slow_loads(engine) as slow:
        slow.go_on.set()
        engine.ask(OURS[0], max_tokens=1)
        loaded = kv_fingerprint(engine.llm)
        engine.ask(OURS[1], max_tokens=1)
    assert len(slow.read) == 2 * CHUNKS and len(loaded) >= HIT // 32
    reset_gpu_cache(engine.llm)
    empty_host(engine.root)
    zero_kv(engine.llm)
    return slow.read, loaded


def use_every_slot(engine: CachedEngine, neighbour: Neighbour) -> None:
    """The neighbour's queue goes through host memory three times over."""
    answers = neighbour.ask(*QUEUE, max_tokens=1)
    assert sum(answer["cached_tokens"] for answer in answers) >= 0.95 * HIT * len(QUEUE)


def test_an_engine_hits_beside_one_that_stands_still_with_loads_of_all_that_may_be_leased(
    engine: CachedEngine, neighbour: Neighbour, undisturbed: tuple[list[str], dict[str, str]], plain: list[Answer]
) -> None:
    """vLLM begins the loads of all its queue in one step where nothing runs yet; nothing may end them."""
    scheduler, held_up = engine.scheduler_side, OURS[:CAP_PROMPTS]
    before = Counter(scheduler.counters)
    with slow_loads(engine) as slow, Steps(engine) as steps:
        for number, prompt in enumerate(held_up):
            steps.add(str(number), prompt)
        steps.until(lambda: scheduler.counters["loads"] - before["loads"] == CAP_PROMPTS, "loads of the whole queue")
        assert slow.is_copying.wait(COPY_S)
        held_bytes = figures(engine.root)["hierarchy"]["leased_bytes"]
        assert held_bytes == CAP_PROMPTS * CHUNKS * CHUNK_BYTES == LIMITS["host_bytes"] // 2

        answers = [neighbour.ask(prompt, max_tokens=MAX_TOKENS)[0] for prompt in QUEUE[:4]]

        assert figures(engine.root)["hierarchy"]["leased_bytes"] >= held_bytes, "they had let go"
        slow.go_on.set()
        steps.until(lambda: len(steps.done) == CAP_PROMPTS, "all answers")
    assert [answer["cached_tokens"] for answer in answers] == [HIT] * len(answers)
    for answer, theirs in zip(answers, plain, strict=False):
        assert answer["tokens"] == list(theirs.tokens[:MAX_TOKENS])
    for number, theirs in enumerate(plain[len(QUEUE) :][:CAP_PROMPTS]):
        assert steps.done[str(number)].cached_tokens == HIT
        assert_same(steps.done[str(number)], theirs)


def test_a_copy_that_lasts_longer_than_a_lease_reads_what_it_was_promised(
    engine: CachedEngine, neighbour: Neighbour, undisturbed: tuple[list[str], dict[str, str]], plain: list[Answer]
) -> None:
    """Nothing ends a lease that a load has claimed, whatever the clock says and whoever wants the room."""
    expected, loaded = undisturbed
    before = Counter(engine.scheduler_side.counters)
    expired = counted(engine.root, "lease_expired")
    with slow_loads(engine) as slow, Steps(engine) as steps:
        steps.add("copied", OURS[0])
        steps.until(slow.is_copying.is_set, "the copy")
        steps.add("younger", OURS[1])  # its leases are as long, began later and are claimed by nobody
        wait_for(lambda: counted(engine.root, "lease_expired") > expired, "the end of a younger lease")
        use_every_slot(engine, neighbour)
        slow.go_on.set()
        steps.until(lambda: len(steps.done) == 2, "both answers")

    for name, theirs in zip(("copied", "younger"), plain[len(QUEUE) :], strict=False):
        assert_same(steps.done[name], theirs)
        assert steps.done[name].cached_tokens == HIT
    now = kv_fingerprint(engine.llm)
    assert {key: now[key] for key in loaded} == loaded
    assert slow.read == expected, "a slot was used again under the copy"
    counters = Counter(engine.scheduler_side.counters) - before
    assert (counters["loads_too_late"], counters["loads_failed"]) == (0, 0)


def test_a_load_whose_lease_ends_under_its_copy_is_computed_anew(
    engine: CachedEngine, neighbour: Neighbour, undisturbed: tuple[list[str], dict[str, str]], plain: list[Answer]
) -> None:
    """The engine's claim stays in its own outbox, as when its socket is full, so the server may use the slots again."""
    expected, _ = undisturbed
    before = Counter(engine.scheduler_side.counters)
    client, expired = engine.scheduler_side.client, counted(engine.root, "lease_expired")
    claim, flush = client.claim, client._flush

    def claim_late(lookup: int) -> None:
        client._flush = lambda: None
        claim(lookup)

    client.claim = claim_late
    try:
        with slow_loads(engine) as slow, Steps(engine) as steps:
            steps.add("late", OURS[0])
            steps.until(slow.is_copying.is_set, "the copy")
            wait_for(lambda: counted(engine.root, "lease_expired") > expired, "the end of the load's leases")
            use_every_slot(engine, neighbour)
            slow.go_on.set()
            steps.until(lambda: len(slow.read) == CHUNKS, "the end of the copy")
            client._flush = flush
            steps.until(lambda: bool(steps.done), "the answer")
    finally:
        client.claim, client._flush = claim, flush

    assert slow.read[0] == expected[0]
    assert not set(slow.read[1:]) & set(expected), "no slot was used again under the copy: nothing was proved"
    assert_same(steps.done["late"], plain[len(QUEUE)])
    counters = Counter(engine.scheduler_side.counters) - before
    assert (counters["loads"], counters["loads_too_late"], counters["loads_failed"]) == (1, 1, 1)
    (again,) = engine.ask(OURS[0], max_tokens=MAX_TOKENS)
    assert again.cached_tokens == HIT, "what could not be loaded once is still there"
    assert_same(again, plain[len(QUEUE)])
