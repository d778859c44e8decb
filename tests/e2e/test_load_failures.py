"""F13: loads that fail at their first, a middle, the last or every chunk, under requests that share the prefix.

The copy into the paged KV raises, which is the only way a load can fail once its bytes were verified in host memory
(the loss of a server: test_restart.py). What was copied before stays in the blocks, so wrong text would follow if a
single one of them were believed. vLLM must compute anew, each request at most once.
"""

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.kit.server.probe import figures, wait_written
from tests.kit.vllm.cached_engine import CHUNK, CachedEngine, assert_same, cached_engine
from tests.kit.vllm.harness import Answer, as_answer, drain, generate, random_prompt, reset_gpu_cache, running

pytestmark = pytest.mark.vllm

STEM = random_prompt(700, 3 * CHUNK)
PROMPTS = [STEM + random_prompt(701 + i, 40 + 30 * i) for i in range(3)]
MAX_TOKENS = 6
FAILING = {"first": {0}, "middle": {1}, "last": {2}, "all": {0, 1, 2}}


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> list[Answer]:
    with running(tiny_model) as llm:
        return generate(llm, PROMPTS, max_tokens=MAX_TOKENS)


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def engine(
    tiny_model: Path, request: Any, plain: list[Answer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CachedEngine]:
    """After the plain one: a process has one engine at a time."""
    root = tmp_path_factory.mktemp("cache")
    with cached_engine(tiny_model, root, async_scheduling=request.param) as one:
        one.ask(*PROMPTS, max_tokens=MAX_TOKENS)
        wait_written(root)
        yield one


class Scatters:
    """Counts the chunks of each load, fails some of them, and may hold a load up."""

    def __init__(self, engine: CachedEngine, failing: set[int]) -> None:
        self.failing = failing
        self.failed = 0
        self.running = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()
        self._copy = engine.worker_side._copy
        self._paged = engine.worker_side._paged

    def copy(self, kind: str, client: Any, session: Any, copies: Any, mark: Any) -> None:
        if kind != "load":
            self._copy(kind, client, session, copies, mark)
            return
        self.running.set()
        assert self.go_on.wait(60)
        chosen = {len(copies) - 1 if index == 2 else index for index in self.failing}
        for index, one in enumerate(copies):
            if index in chosen:
                self.failed += 1
                raise OSError(f"injected at chunk {index} of {len(copies)}")
            self._copy(kind, client, session, (one,), mark)


@contextmanager
def failing_loads(engine: CachedEngine, failing: set[int]) -> Iterator[Scatters]:
    scatters = Scatters(engine, failing)
    engine.worker_side._copy = scatters.copy
    try:
        yield scatters
    finally:
        scatters.go_on.set()
        del engine.worker_side._copy


def assert_well(engine: CachedEngine, answers: list[Answer], plain: list[Answer]) -> None:
    for ours, theirs in zip(answers, plain, strict=True):
        assert ours.finish_reason == "length"
        assert all(math.isfinite(best) for best, *_ in ours.logprobs)
        assert_same(ours, theirs)
    assert_idle(engine)


def assert_idle(engine: CachedEngine) -> None:
    """I4: no lease, lookup or block is left."""
    drain(engine.llm)
    wait_written(engine.root)
    state = figures(engine.root)["hierarchy"]
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert (state["leased_bytes"], state["lookups"]) == (0, 0)
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    assert not engine.scheduler_side.has_work


@pytest.mark.parametrize("failing", FAILING.values(), ids=FAILING)
def test_failed_chunks_are_computed_anew_and_no_request_loads_twice(
    engine: CachedEngine, plain: list[Answer], failing: set[int]
) -> None:
    before = engine.scheduler_side.counters.copy()
    with failing_loads(engine, failing) as scatters:
        during = engine.ask(*PROMPTS, max_tokens=MAX_TOKENS)
    counters = engine.scheduler_side.counters
    tried = counters["loads"] - before["loads"]
    after = engine.ask(*PROMPTS, max_tokens=MAX_TOKENS)

    assert scatters.failed == counters["loads_failed"] - before["loads_failed"] > 0
    assert tried <= len(PROMPTS), "a request whose load failed was loaded again"
    assert [answer.cached_tokens for answer in after] == [3 * CHUNK] * 3, "hits come back"
    assert_well(engine, during + after, plain + plain)


def test_a_request_aborted_while_its_load_runs_and_fails_harms_nobody(
    engine: CachedEngine, plain: list[Answer]
) -> None:
    from vllm import SamplingParams

    reset_gpu_cache(engine.llm)
    core = engine.llm.llm_engine
    parameters = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False, logprobs=2)
    done: dict[str, Answer] = {}

    def step() -> None:
        for output in core.step():
            if output.finished:
                done[output.request_id] = as_answer(output)

    with failing_loads(engine, FAILING["middle"]) as scatters:
        scatters.go_on.clear()
        for number, prompt in enumerate(PROMPTS):
            core.add_request(f"shared-{number}", {"prompt_token_ids": prompt}, parameters)
        while not scatters.running.is_set():
            step()
        core.abort_request(["shared-0"])
        for _ in range(3):
            step()
        scatters.go_on.set()
        while core.has_unfinished_requests():
            step()
    assert scatters.failed >= 1
    assert_well(engine, [done["shared-1"], done["shared-2"]], plain[1:])
    (after,) = engine.ask(PROMPTS[0], max_tokens=MAX_TOKENS)
    assert after.cached_tokens == 3 * CHUNK
    assert_well(engine, [after], plain[:1])
