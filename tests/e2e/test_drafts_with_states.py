"""Drafts beside recurrent layers: the state is stored with the draft's width, and a hit is as long as vLLM's own.

vLLM's CPU build lacks two kernels for this, so these engines run with ``mamba_draft_shim.py``. Loads are into zeroed
blocks; what a load brings is judged by log-probabilities to the last digit.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.counts import count
from tests.kit.server.probe import wait_ended, wait_written
from tests.kit.vllm.cached_engine import CachedEngine, cached_engine
from tests.kit.vllm.harness import Answer, generate, random_prompt, reset_gpu_cache, running, zero_kv
from tests.kit.vllm.mamba_draft_shim import mamba_drafts
from tests.kit.vllm.tiny_drafts import qwen3_next_mtp
from tests.kit.vllm.wrong_loads import abort_during_load, failing_copies, zeroed_state

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

B = 256
LENGTHS = (B, B + 1, 2 * B, 2 * B + 1, 3 * B + 7) if count("MODELS", 0) else (2 * B, 3 * B + 7)
LAST = LENGTHS[-1]
MAX_TOKENS = 6

Engines = tuple[Path, dict[str, Any]]


def mtp(models: Path, folder: Path, tiny: Path) -> Engines:
    return qwen3_next_mtp(folder / "model", models), {"method": "mtp", "num_speculative_tokens": 2}


KINDS: dict[str, Callable[[Path, Path, Path], Engines]] = {"mtp": mtp}


class Run:
    """Answers by where they are from and the prompt's length."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.answers: dict[str, dict[int, Answer]] = {}
        self.facts: dict[str, Any] = {}

    def ask(self, engine: CachedEngine, where: str, *lengths: int) -> None:
        for length in lengths:
            reset_gpu_cache(engine.llm)
            zero_kv(engine.llm)
            (answer,) = engine.ask(random_prompt(length, length), max_tokens=MAX_TOKENS)
            self.answers.setdefault(where, {})[length] = answer

    def hits(self, *lengths: int) -> dict[int, int]:
        """vLLM's own: with MTP the block before the last boundary is computed, whatever lies behind that."""
        if self.kind == "mtp":
            return {length: max(0, length // B - 1) * B for length in lengths}
        return {length: (length - 1) // B * B for length in lengths}


@pytest.fixture(scope="module", params=list(KINDS))
def run(
    request: pytest.FixtureRequest, repository: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp(request.param)
    model, draft = KINDS[request.param](repository / "build" / "models", folder, tiny_model)
    options = {"block_size": None, "max_num_seqs": 16, "speculative_config": draft}
    with mamba_drafts():
        yield _run(request.param, model, options, folder / "cache")


def _run(kind: str, model: Path, options: dict[str, Any], root: Path) -> Run:
    run = Run(kind)
    with running(model, **options) as llm:
        for where in ("plain", "own"):
            prompts = {length: random_prompt(length, length) for length in LENGTHS}
            run.answers[where] = {
                length: generate(llm, [prompt], max_tokens=MAX_TOKENS)[0] for length, prompt in prompts.items()
            }
    with cached_engine(model, root, **options) as engine:
        run.ask(engine, "cold", *LENGTHS)
        run.ask(engine, "memory", *LENGTHS)
        with failing_copies(engine, lambda number, copies: number == copies - 1) as failed:
            run.ask(engine, "failed", LAST)
        run.facts["failed"] = len(failed)
        run.facts["aborted"] = abort_during_load(engine, random_prompt(LAST, LAST))
        run.ask(engine, "after the abort", LAST)
        with pytest.MonkeyPatch.context() as patch:
            zeroed_state(patch, engine)
            run.ask(engine, "zeroed state", LAST)
        wait_written(root)
        pool = engine.scheduler.kv_cache_manager.block_pool
        run.facts["left"] = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        run.facts["counters"] = dict(engine.scheduler_side.counters)
    wait_ended(root)
    with cached_engine(model, root, **options) as engine:
        run.ask(engine, "disk", *LENGTHS)
    return run


def assert_right(run: Run, where: str) -> None:
    for length, ours in run.answers[where].items():
        theirs = run.answers["plain"][length]
        assert (where, length, ours.tokens) == (where, length, theirs.tokens)
        assert (where, length, ours.logprobs) == (where, length, theirs.logprobs)


def cached(run: Run, where: str) -> dict[int, int]:
    return {length: answer.cached_tokens for length, answer in run.answers[where].items()}


@pytest.mark.parametrize("where", ["own", "memory", "disk"])
def test_hits_are_as_long_as_vllms_own_and_answers_the_same(run: Run, where: str) -> None:
    assert cached(run, "cold") == dict.fromkeys(LENGTHS, 0)
    assert cached(run, where) == run.hits(*LENGTHS)
    assert_right(run, "cold")
    assert_right(run, where)
    assert run.facts["counters"]["states"] == sum(map(bool, run.hits(*LENGTHS).values()))


def test_failed_and_aborted_loads_leave_nothing(run: Run) -> None:
    assert run.facts["failed"] and run.facts["aborted"]
    assert cached(run, "failed") == {LAST: 0} and cached(run, "after the abort") == run.hits(LAST)
    assert_right(run, "failed")
    assert_right(run, "after the abort")
    assert run.facts["left"] == 0


def test_a_state_that_is_wrong_is_noticed(run: Run) -> None:
    ours = run.answers["zeroed state"][LAST]
    assert ours.cached_tokens == run.hits(LAST)[LAST]
    assert ours.logprobs != run.answers["plain"][LAST].logprobs
