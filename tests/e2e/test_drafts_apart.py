"""Drafts where prefill and decode are apart, generated tokens are stored, and GPU blocks are few.

A producer computes prompts, answers and stores both (``save_decode``); a consumer with too few blocks loads them, with
all paged KV zeroed before. That the draft's KV came with the model's shows in how many guesses are right, for a draft
that has the model's own weights.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_drafts import KINDS, SMALL_CHUNKS, counting, is_beside_windows
from tests.kit.counts import count
from tests.kit.server.operator_server import operator_server, transfer
from tests.kit.server.probe import wait_written
from tests.kit.vllm.cached_engine import CachedEngine, cached_engine, settings
from tests.kit.vllm.harness import (
    BLOCK_TOKENS,
    Answer,
    drain,
    generate,
    random_prompt,
    reset_gpu_cache,
    running,
    zero_kv,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

B = BLOCK_TOKENS
FIRST = random_prompt(40, 133)
ANSWER_TOKENS = 60
GUESSED = 48
POOL_BLOCKS = 34
MANY = [random_prompt(50 + number, 4 * B + 12 * number) for number in range(8)]
MANY_TOKENS = 40


class Run:
    """What the engines did: answers and right guesses, by where they are from."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.answers: dict[str, Answer] = {}
        self.many: dict[str, list[Answer]] = {}
        self.guesses: dict[str, tuple[int, int]] = {}
        self.facts: dict[str, Any] = {}

    @property
    def second(self) -> list[int]:
        """The next turn: the first one's prompt, its answer, and more."""
        return [*FIRST, *self.answers["first"].tokens, *random_prompt(41, 20)]

    def ask(self, llm: Any, where: str, prompt: list[int], max_tokens: int) -> None:
        reset_gpu_cache(llm)
        zero_kv(llm)
        counts: list[int] = []
        with counting(llm, counts):
            (self.answers[where],) = generate(llm, [prompt], max_tokens=max_tokens)
            drain(llm)
        self.guesses[where] = (counts[0], counts[1])

    def dropped(self) -> int:
        """What vLLM's own hit gives up of the last block it matched."""
        return 0 if self.kind == "draft_model" else B


OF_ONE_GROUP = [kind for kind in KINDS if not is_beside_windows(kind)]
"""The pool of few blocks is too small for what vLLM reserves for several groups."""


@pytest.fixture(scope="module", params=OF_ONE_GROUP if count("MODELS", 0) else ["draft_model"])
def run(request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp(request.param)
    model, options = KINDS[request.param](tiny_model, folder)
    options |= {"max_model_len": 512}  # which is in the draft's name
    run, root = Run(request.param), folder / "cache"
    with running(model, **options) as llm:
        run.ask(llm, "first", FIRST, ANSWER_TOKENS)
        run.ask(llm, "second", run.second, GUESSED)
        (again,) = generate(llm, [run.second], max_tokens=1)
        run.answers["second, own hit"] = again
        reset_gpu_cache(llm)
        run.many["plain"] = generate(llm, MANY, max_tokens=MANY_TOKENS)
    with operator_server(root) as server:
        extra = settings(root, server=server, save_decode=True, **SMALL_CHUNKS)
        with cached_engine(model, root, kv_transfer_config=transfer(extra, "kv_producer"), **options) as producer:
            run.ask(producer.llm, "produced", FIRST, ANSWER_TOKENS)
            run.many["produced"] = producer.ask(*MANY, max_tokens=MANY_TOKENS)
            wait_written(root)
        few = options | {"num_gpu_blocks_override": POOL_BLOCKS}
        with cached_engine(model, root, kv_transfer_config=transfer(extra, "kv_consumer"), **few) as consumer:
            _consume(run, consumer)
    return run


def _consume(run: Run, engine: CachedEngine) -> None:
    run.ask(engine.llm, "consumed", FIRST, ANSWER_TOKENS)
    run.ask(engine.llm, "consumed, second", run.second, GUESSED)
    preempted = engine.watch_preemptions()
    zero_kv(engine.llm)
    run.many["few blocks"] = engine.ask(*MANY, max_tokens=MANY_TOKENS)
    run.facts["preempted"] = len(preempted)
    pool = engine.scheduler.kv_cache_manager.block_pool
    run.facts["left"] = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
    run.facts["counters"] = dict(engine.scheduler_side.counters)


def test_a_consumer_goes_on_from_what_a_producer_computed(run: Run) -> None:
    produced, consumed, plain = (run.answers[name] for name in ("produced", "consumed", "first"))
    assert produced.cached_tokens == 0
    assert consumed.cached_tokens == (len(FIRST) - 1) // B * B - run.dropped()
    for ours in (produced, consumed):
        assert (ours.tokens, ours.logprobs) == (plain.tokens, plain.logprobs)
    assert run.facts["counters"].get("stores", 0) == 0, "a consumer only loads"


def test_generated_tokens_come_back_with_the_drafts_kv(run: Run) -> None:
    """All but what the last generated token is in: that was never computed."""
    ours, plain = run.answers["consumed, second"], run.answers["second"]
    stored = (len(FIRST) + ANSWER_TOKENS - 1) // B * B
    assert ours.cached_tokens == stored - run.dropped() > len(FIRST)
    assert run.answers["second, own hit"].cached_tokens >= ours.cached_tokens
    assert ours.tokens == plain.tokens
    assert run.guesses["consumed"] == run.guesses["first"]
    assert run.guesses["consumed, second"] == run.guesses["second"]
    if run.kind == "draft_model":
        right, guesses = run.guesses["second"]
        assert 2 * right > guesses > 0, "a draft with the model's own weights is mostly right"


def test_few_blocks_change_no_answer(run: Run) -> None:
    assert run.facts["preempted"], "there were blocks enough: nothing was preempted"
    assert run.facts["counters"]["load_tokens"] > 0
    for where in ("produced", "few blocks"):
        assert [answer.tokens for answer in run.many[where]] == [answer.tokens for answer in run.many["plain"]]
    assert run.facts["left"] == 0
