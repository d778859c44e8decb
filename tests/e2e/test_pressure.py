"""The cache under pressure: too few GPU blocks, too little host memory, prompts cut into steps, requests aborted.

Nothing of this may change an answer; and with all of it over, no lease, pin or slot is left.
"""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.kit.counts import seed
from tests.kit.server.probe import figures, wait_for, wait_written
from tests.kit.vllm.cached_engine import CHUNK, CachedEngine, assert_same, cached_engine
from tests.kit.vllm.harness import Answer, drain, generate, random_prompt, reset_gpu_cache, running

pytestmark = pytest.mark.vllm

STEM = random_prompt(300, 1300)
PROMPTS = [STEM[: 150 * (i % 6) + 400] + random_prompt(310 + i, 80 + 11 * i) for i in range(12)]


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> list[Answer]:
    with running(tiny_model) as llm:
        return generate(llm, PROMPTS, max_tokens=12)


def assert_quiet(engine: CachedEngine) -> None:
    """Nothing is leased, pinned or waiting once the engine is idle."""
    drain(engine.llm)
    wait_written(engine.root)
    wait_for(lambda: figures(engine.root)["hierarchy"]["lookups"] == 0, "released lookups")
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert figures(engine.root)["hierarchy"]["leased_bytes"] == 0
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    assert not engine.scheduler_side._requests
    assert not engine.scheduler_side.has_work


def test_preempted_and_chunked_requests_give_plain_tokens(
    tiny_model: Path, tmp_path: Path, plain: list[Answer]
) -> None:
    options = {"num_gpu_blocks_override": 80, "max_num_batched_tokens": 384, "max_model_len": 2048}
    with cached_engine(tiny_model, tmp_path, **options) as engine:
        preemptions = engine.watch_preemptions()
        cold = engine.ask(*PROMPTS[:8], max_tokens=70)  # each request grows by two blocks while others hold theirs
        warm = engine.ask(*PROMPTS[:8], max_tokens=70)
        assert_quiet(engine)
        counters = engine.scheduler_side.counters

    assert preemptions, "the pool was large enough: nothing was put under pressure"
    assert counters["load_tokens"] >= 4 * CHUNK  # the rest of what they share comes from the GPU
    for ours, theirs in zip(cold + warm, plain[:8] * 2, strict=True):
        assert ours.finish_reason == "length"
        assert_same(replace(ours, tokens=ours.tokens[:12], logprobs=ours.logprobs[:12]), theirs)


def test_host_memory_for_few_chunks_still_serves_from_disk(
    tiny_model: Path, tmp_path: Path, plain: list[Answer]
) -> None:
    chunk_bytes = 528_384
    with cached_engine(tiny_model, tmp_path, {"host_bytes": 12 * chunk_bytes}) as engine:
        cold = engine.ask(*PROMPTS, max_tokens=12)
        one_by_one = [engine.ask(prompt, max_tokens=12)[0] for prompt in PROMPTS]
        together = engine.ask(*PROMPTS, max_tokens=12)
        assert_quiet(engine)
        state = figures(tmp_path)

    assert state["hierarchy"]["host_assigned_bytes"] <= 12 * chunk_bytes
    assert sum(a.cached_tokens for a in one_by_one) > 0
    for ours, theirs in zip(cold + one_by_one + together, plain * 3, strict=True):
        assert_same(ours, theirs)


def test_aborts_at_random_moments_leave_nothing_behind(tiny_model: Path, tmp_path: Path, plain: list[Answer]) -> None:
    from vllm import SamplingParams

    source = random.Random(seed())
    with cached_engine(tiny_model, tmp_path, max_num_batched_tokens=384) as engine:
        engine.ask(*PROMPTS[:6], max_tokens=4)
        for turn in range(6):
            reset_gpu_cache(engine.llm)
            core = engine.llm.llm_engine
            parameters = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)
            ids = []
            for i, prompt in enumerate(PROMPTS):
                core.add_request(f"{turn}-{i}", {"prompt_token_ids": prompt}, parameters)
                ids.append(f"{turn}-{i}")
            victims = source.sample(ids, 8)
            for _ in range(40):
                if victims and source.random() < 0.5:
                    core.abort_request([victims.pop()])
                if not core.has_unfinished_requests():
                    break
                core.step()
            core.abort_request(ids)
            drain(engine.llm)
        answers = engine.ask(*PROMPTS, max_tokens=12)
        assert_quiet(engine)

    for ours, theirs in zip(answers, plain, strict=True):
        assert_same(ours, theirs)
