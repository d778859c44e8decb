"""Weights change under a running engine: after a reset no KV of the old ones is ever an answer, and hits go on.

Weights are replaced in place, as reinforcement learning does it: by the worker's ``reload_weights``. An engine with the
new weights must answer as a plain engine that was started with them, and does not where the reset is left out.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.kit.server.probe import wait_ended, wait_written
from tests.kit.storage.disk_probe import blob_files
from tests.kit.vllm.cached_engine import CHUNK, MARGIN, TAIL, CachedEngine, assert_same, cached_engine
from tests.kit.vllm.harness import (
    Answer,
    as_answer,
    drain,
    generate,
    kv_fingerprint,
    random_prompt,
    reset_gpu_cache,
    running,
)

pytestmark = pytest.mark.vllm

CANDIDATES = [random_prompt(3000 + i, 4 * CHUNK + TAIL) for i in range(9)]
PROMPTS = CANDIDATES[:4]
"""Replaced, before anything is asked, by those whose answers rounding cannot turn: which, depends on the CPU."""
WHOLE = 4 * CHUNK
LATER = random_prompt(3100, 2 * CHUNK + TAIL)
PROMISE = {"model_id": "policy"}
"""Equal weights whatever happens, says this name: so only resets keep KV of different weights apart."""
STEPS_MAX = 200_000


@pytest.fixture(scope="module")
def new_plain(new_model: Path) -> list[Answer]:
    """What an engine answers that was started with the new weights, without any cache of ours."""
    with running(new_model, enable_prefix_caching=False) as llm:
        *found, later = generate(llm, [*CANDIDATES, LATER])
    surest = sorted(zip(found, CANDIDATES, strict=True), key=lambda pair: -pair[0].margin)[: len(PROMPTS)]
    PROMPTS[:] = [prompt for _, prompt in surest]
    answers = [*(answer for answer, _ in surest), later]
    assert sum(answer.margin >= MARGIN for answer in answers) >= 2, "the plain run is sure of too few answers"
    return answers


@dataclass
class Started:
    """The engine that all tests share, and how the last one ends it."""

    engine: CachedEngine
    end: Callable[[], None]


@pytest.fixture(scope="module")
def started(
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
    new_plain: list[Answer],  # first: one engine at a time fits into a process
) -> Iterator[Started]:
    root = tmp_path_factory.mktemp("cache")
    with ExitStack() as at_end:
        engine = at_end.enter_context(cached_engine(tiny_model, root, PROMISE))
        engine.ask(*PROMPTS[:2])
        wait_written(root)
        assert epoch(engine) == "base-0", "the last test looks for what was stored in the epoch that all engines share"
        yield Started(engine, at_end.close)


@pytest.fixture
def engine(started: Started, tiny_model: Path) -> CachedEngine:
    """The engine with its first weights and nothing in any cache."""
    drain(started.engine.llm)
    replace_weights(started.engine, tiny_model)
    assert started.engine.llm.reset_prefix_cache(reset_connector=True) is True
    return started.engine


def replace_weights(engine: CachedEngine, model: Path) -> None:
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(model)})


def epoch(engine: CachedEngine) -> str:
    return str(engine.scheduler_side._client.namespace.fields["epoch"])


def differing(ours: list[Answer], theirs: list[Answer]) -> int:
    return sum(a.tokens != b.tokens for a, b in zip(ours, theirs, strict=True) if b.margin >= MARGIN)


def cached(answers: list[Answer]) -> list[int]:
    return [answer.cached_tokens for answer in answers]


def hold_copies(engine: CachedEngine, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Copies between paged KV and slots start from now on, and go on when the event is set."""
    may_copy, copy = threading.Event(), engine.worker_side._copy

    def held_up(*arguments: Any) -> None:
        assert may_copy.wait(60)
        copy(*arguments)

    monkeypatch.setattr(engine.worker_side, "_copy", held_up)
    return may_copy


class Running:
    """A request that is stepped by hand."""

    def __init__(self, engine: CachedEngine, name: str, prompt: list[int], *, max_tokens: int = 8) -> None:
        from vllm import SamplingParams

        self.engine = engine
        options = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, logprobs=2)
        engine.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, options)

    def step_until(self, condition: Callable[[], bool]) -> None:
        for _ in range(STEPS_MAX):
            if condition():
                return
            self.engine.llm.llm_engine.step()
            os.sched_yield()
        raise AssertionError("the request did not come so far")

    def finish(self) -> Answer:
        for _ in range(STEPS_MAX):
            for output in self.engine.llm.llm_engine.step():
                if output.finished:
                    drain(self.engine.llm)
                    return as_answer(output)
            os.sched_yield()
        raise AssertionError("the request did not end")


def test_new_weights_are_never_answered_from_old_kv_and_hit_their_own(
    engine: CachedEngine, new_model: Path, new_plain: list[Answer]
) -> None:
    old = engine.ask(*PROMPTS)
    replace_weights(engine, new_model)
    stale = engine.ask(*PROMPTS)

    assert cached(stale) == [WHOLE] * 4
    assert differing(old, new_plain[:4]) >= 2
    assert differing(stale, new_plain[:4]) >= 2, "old KV under new weights shows in no token: this test proves nothing"

    assert engine.llm.reset_prefix_cache(reset_connector=True) is True
    assert engine.scheduler_side._client.is_ready, "the reset returned before it was durable"
    cold = engine.ask(*PROMPTS)
    computed = kv_fingerprint(engine.llm)
    warm = engine.ask(*PROMPTS)

    assert (cached(cold), cached(warm)) == ([0] * 4, [WHOLE] * 4)
    for ours, theirs in zip(cold + warm, new_plain[:4] * 2, strict=True):
        assert_same(ours, theirs)
    assert kv_fingerprint(engine.llm) == computed


def test_a_load_that_runs_while_the_cache_is_reset_answers_nothing(
    engine: CachedEngine, new_model: Path, new_plain: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    (old,) = engine.ask(LATER)
    reset_gpu_cache(engine.llm)
    may_copy = hold_copies(engine, monkeypatch)
    request = Running(engine, "loading", LATER)
    request.step_until(lambda: engine.worker_side._running > 0)
    replace_weights(engine, new_model)
    before = engine.scheduler_side.counters.copy()
    assert engine.llm.reset_prefix_cache(reset_connector=True) is False, "vLLM knows that the request holds blocks"
    may_copy.set()
    answer = request.finish()

    assert engine.scheduler_side.counters["loads_failed"] - before["loads_failed"] == 1
    assert answer.cached_tokens == 0
    assert_same(answer, new_plain[-1])
    assert old.tokens != answer.tokens


def test_a_request_from_before_a_reset_is_computed_anew_and_never_stored(
    engine: CachedEngine, new_model: Path, new_plain: list[Answer]
) -> None:
    request = Running(engine, "older", LATER)
    request.step_until(lambda: any(one.num_output_tokens > 2 for one in engine.scheduler.running))
    replace_weights(engine, new_model)
    assert engine.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True) is True
    answer = request.finish()
    (cold,) = engine.ask(LATER)
    (warm,) = engine.ask(LATER)

    assert answer.finish_reason == "length"
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 2 * CHUNK)
    for ours in (cold, warm):
        assert_same(ours, new_plain[-1])


CALLS: dict[str, tuple[Callable[[Any], object], bool]] = {
    "reset_prefix_cache(reset_connector=True)": (lambda llm: llm.reset_prefix_cache(reset_connector=True), True),
    "reset_prefix_cache()": (lambda llm: llm.reset_prefix_cache(), False),
    "sleep(level=0)": (lambda llm: (llm.sleep(level=0), llm.wake_up(tags=["scheduling"])), False),
    "sleep(level=1)": (lambda llm: (llm.sleep(level=1), llm.wake_up()), True),
    "sleep(level=2)": (lambda llm: (llm.sleep(level=2), llm.wake_up()), True),
    "pause_generation()": (lambda llm: in_core(llm, "pause_scheduler", "abort", True), True),
    "clear_cache=True": (lambda llm: in_core(llm, "pause_scheduler", "keep", True), True),
    "pause_generation(clear_cache=False)": (lambda llm: in_core(llm, "pause_scheduler", "abort", False), False),
}
"""By how docs/operations.md names them."""


@pytest.mark.parametrize("name", CALLS)
def test_what_vllm_calls_reaches_the_cache_right_after_an_answer(
    engine: CachedEngine, name: str, repository: Path
) -> None:
    """An engine of this kind makes no step after its last answer, so copies of that are still under way."""
    call, resets = CALLS[name]
    generate(engine.llm, [LATER], max_tokens=1)
    before = epoch(engine)
    assert engine.scheduler_side.saves.has_work, "no copy is under way: this test proves nothing"
    call(engine.llm)

    assert (epoch(engine) != before) == resets
    if resets:
        cold, warm = engine.ask(LATER), engine.ask(LATER)
        assert (cached(cold), cached(warm)) == ([0], [2 * CHUNK])
    (row,) = [
        row
        for row in (repository / "docs" / "operations.md").read_text().splitlines()
        if row.startswith("|") and f"`{name}`" in row
    ]
    assert row.endswith(f"| {'yes' if resets else 'no'} |")


def in_core(llm: Any, method: str, *arguments: object) -> None:
    core = llm.llm_engine.engine_core.engine_core
    getattr(core, method)(*arguments)
    core.resume_scheduler()


def test_memory_of_the_kv_cache_does_not_go_while_it_is_copied(
    engine: CachedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What vLLM 0.33 and later call in a worker that goes to sleep."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    may_copy = hold_copies(engine, monkeypatch)
    generate(engine.llm, [LATER], max_tokens=1)
    assert engine.worker_side._running == 1
    connector: Any = get_kv_transfer_group()
    sleeping = threading.Thread(target=connector.unregister_kv_caches)
    sleeping.start()
    sleeping.join(0.1)
    assert sleeping.is_alive()

    may_copy.set()
    sleeping.join(60)
    assert not sleeping.is_alive() and engine.worker_side._running == 0


def test_after_a_restart_nothing_from_before_a_reset_is_found(
    engine: CachedEngine, started: Started, new_model: Path, new_plain: list[Answer]
) -> None:
    """Of what was stored before the first reset, in the epoch of all engines, and since, in those of this one alone."""
    replace_weights(engine, new_model)
    assert engine.llm.reset_prefix_cache(reset_connector=True) is True
    engine.ask(PROMPTS[2])
    wait_written(engine.root)
    stored = len(blob_files(engine.root))
    started.end()
    wait_ended(engine.root)

    with cached_engine(new_model, engine.root, PROMISE) as later:
        cold = later.ask(*PROMPTS[:3])
        warm = later.ask(*PROMPTS[:3])

    assert stored >= 3 * 4
    assert cached(cold) == [0] * 3
    assert cached(warm) == [WHOLE] * 3
    for ours, theirs in zip(cold + warm, new_plain[:3] * 2, strict=True):
        assert_same(ours, theirs)
