"""One engine behind the cache: hits really happen, and what they bring is equal byte for byte.

Every test pairs the two claims. The engine runs in this process, its cache server in another, as in production.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.server.probe import figures, wait_written
from tests.kit.vllm.cached_engine import CHUNK, MARGIN, TAIL, CachedEngine, assert_same, cached_engine
from tests.kit.vllm.harness import Answer, drain, generate, kv_fingerprint, random_prompt, reset_gpu_cache, running

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def prefix() -> list[int]:
    return random_prompt(1, 4 * CHUNK + TAIL)


@pytest.fixture(scope="module")
def shared_prompts() -> list[list[int]]:
    """16 prompts that share prefixes of different lengths with one another."""
    stem = random_prompt(50, 1200)
    return [stem[: 100 * (i % 8) + 300] + random_prompt(100 + i, 60 + 7 * i) for i in range(16)]


@pytest.fixture(scope="module")
def plain(tiny_model: Path, shared_prompts: list[list[int]]) -> list[Answer]:
    """What vLLM answers without any cache of ours."""
    with running(tiny_model) as llm:
        return generate(llm, shared_prompts, max_tokens=4)


@pytest.fixture(scope="module")
def setup(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, plain: list[Answer]) -> Iterator[CachedEngine]:
    with cached_engine(tiny_model, tmp_path_factory.mktemp("cache")) as engine:
        yield engine


def test_prefix_is_loaded_from_host_memory_byte_for_byte(setup: CachedEngine, prefix: list[int]) -> None:
    (cold,) = setup.ask(prefix)
    computed = kv_fingerprint(setup.llm)

    (warm,) = setup.ask(prefix)
    loaded = kv_fingerprint(setup.llm)

    assert cold.cached_tokens == 0
    assert warm.cached_tokens == 4 * CHUNK
    assert loaded == computed
    assert warm.tokens == cold.tokens


def test_gpu_prefix_cache_covers_a_part_and_the_rest_is_loaded(setup: CachedEngine, prefix: list[int]) -> None:
    setup.ask(prefix)
    computed = kv_fingerprint(setup.llm)

    (short,) = setup.ask(prefix[:300])  # 9 blocks of 32 tokens are in the GPU's prefix cache now
    loads = setup.scheduler_side.counters["load_tokens"]
    (warm,) = generate(setup.llm, [prefix])
    drain(setup.llm)

    assert short.cached_tokens == CHUNK
    assert warm.cached_tokens == 4 * CHUNK
    assert setup.scheduler_side.counters["load_tokens"] - loads == 4 * CHUNK - 288
    assert {k: v for k, v in kv_fingerprint(setup.llm).items() if k in computed} == computed


def test_other_suffix_hits_the_shared_chunks_only(setup: CachedEngine, prefix: list[int]) -> None:
    setup.ask(prefix)
    (other,) = setup.ask(prefix[:700] + random_prompt(2, 300))

    assert other.cached_tokens == 2 * CHUNK


def test_prompt_of_whole_chunks_is_loaded_whole(setup: CachedEngine, prefix: list[int]) -> None:
    (cold,) = setup.ask(prefix[: 3 * CHUNK])
    (warm,) = setup.ask(prefix[: 3 * CHUNK])

    assert warm.cached_tokens >= 3 * CHUNK - 1
    assert_same(warm, cold)


def test_unrelated_prompt_is_a_miss(setup: CachedEngine, prefix: list[int]) -> None:
    setup.ask(prefix)
    (other,) = setup.ask(random_prompt(3, 1100))

    assert other.cached_tokens == 0


def test_sixteen_concurrent_prompts_give_plain_tokens(
    setup: CachedEngine, shared_prompts: list[list[int]], plain: list[Answer]
) -> None:
    cold = setup.ask(*shared_prompts, max_tokens=4)
    warm = setup.ask(*shared_prompts, max_tokens=4)

    assert sum(answer.margin >= MARGIN for answer in plain) >= 4, "the plain run is sure of too few answers"
    assert sum(a.cached_tokens for a in warm) >= sum(len(p) // CHUNK * CHUNK for p in shared_prompts) * 0.9
    for ours, theirs in zip(cold + warm, plain + plain, strict=True):
        assert ours.finish_reason == "length"
        assert_same(ours, theirs)


def test_salted_prompt_never_meets_an_unsalted_one(setup: CachedEngine, prefix: list[int]) -> None:
    from vllm import SamplingParams

    setup.ask(prefix)

    def cached(salt: str | None) -> int:
        reset_gpu_cache(setup.llm)
        prompt: dict[str, Any] = {"prompt_token_ids": prefix} | ({"cache_salt": salt} if salt else {})
        (output,) = setup.llm.generate([prompt], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
        drain(setup.llm)
        return output.num_cached_tokens or 0

    assert [cached("a"), cached("b"), cached("a"), cached("b"), cached(None)] == [0, 0, 1024, 1024, 1024]


def test_failed_load_is_recomputed_and_the_request_succeeds(
    setup: CachedEngine, prefix: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    (cold,) = setup.ask(prefix)
    before = setup.scheduler_side.counters.copy()
    copy = setup.worker_side._copy

    def failing(kind: str, *arguments: Any) -> None:
        if kind == "load":
            raise OSError("injected")
        copy(kind, *arguments)

    monkeypatch.setattr(setup.worker_side, "_copy", failing)
    (hit,) = setup.ask(prefix)
    monkeypatch.undo()
    (after,) = setup.ask(prefix)

    assert setup.scheduler_side.counters["loads_failed"] - before["loads_failed"] == 1
    assert setup.scheduler_side.counters["loads"] - before["loads"] == 2, "a failed load is tried once, not for ever"
    assert (hit.tokens, hit.finish_reason, hit.cached_tokens) == (cold.tokens, "length", 0)
    assert after.cached_tokens == 4 * CHUNK


def test_leases_and_pins_are_gone_when_idle(setup: CachedEngine, shared_prompts: list[list[int]]) -> None:
    setup.ask(*shared_prompts, max_tokens=2)
    wait_written(setup.root)

    state = figures(setup.root)
    pool = setup.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    assert state["hierarchy"]["leased_bytes"] == 0
    assert state["hierarchy"]["lookups"] == 0
    assert not setup.scheduler_side.has_work
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # all but the null block


def test_reset_of_the_cache_forgets_everything_for_this_engine(setup: CachedEngine) -> None:
    prompt = random_prompt(4, 600)
    setup.ask(prompt)
    (hit,) = setup.ask(prompt)
    assert setup.llm.llm_engine.reset_prefix_cache(reset_connector=True) is True

    (after_reset,) = setup.ask(prompt)
    (again,) = setup.ask(prompt)

    assert hit.cached_tokens == 2 * CHUNK
    assert after_reset.cached_tokens == 0
    assert again.cached_tokens == 2 * CHUNK
    assert again.tokens == after_reset.tokens
