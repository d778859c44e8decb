"""A prompt that is computed in one step, with nothing after it, is stored to its last whole chunk.

The request ends with the step that computes its prompt, and vLLM has no reason to make another: what is not on its way
by then must be taken along when the request ends, or it is lost.
"""

from pathlib import Path

import pytest

from tests.kit.counts import count, seed
from tests.kit.vllm.cached_engine import CHUNK, CachedEngine, assert_same, cached_engine
from tests.kit.vllm.harness import drain, generate, random_prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

CHUNKS = 8
LENGTH = CHUNKS * CHUNK + 16
REPEATS = count("WHOLE_PROMPTS", 6)


def prompt(number: int) -> list[int]:
    return random_prompt(7000 + 100 * seed() + number, LENGTH)


def accounts(engine: CachedEngine) -> dict[str, int]:
    """Where computed chunks went."""
    counters = engine.scheduler_side.counters
    return {name: n for name, n in counters.items() if n and name.startswith("store")}


@pytest.mark.parametrize("blocks", [80, 256, 2000])
def test_a_prompt_of_one_step_is_stored_whole(tiny_model: Path, tmp_path: Path, blocks: int) -> None:
    """80 blocks hold this prompt and little more; in 256, a tenth is not enough for its chunks."""
    stored: list[int] = []
    with cached_engine(tiny_model, tmp_path, num_gpu_blocks_override=blocks, max_model_len=2304) as engine:
        before = 0
        for number in range(REPEATS):
            (answer,) = generate(engine.llm, [prompt(number)], max_tokens=1)
            assert answer.cached_tokens == 0
            drain(engine.llm)
            counters = engine.scheduler_side.counters
            stored.append(counters["stores"] - before)
            before = counters["stores"]
        assert stored == [CHUNKS] * REPEATS
        assert accounts(engine) == {"stores": CHUNKS * REPEATS, "store_chunks": CHUNKS * REPEATS}
        (again,) = engine.ask(prompt(REPEATS - 1), max_tokens=1)
        assert again.cached_tokens == CHUNKS * CHUNK
        assert_same(again, answer)


def test_what_the_last_step_of_an_engine_copied_is_stored(tiny_model: Path, tmp_path: Path) -> None:
    """An engine in its caller's process is stepped by ``generate`` alone, and here nothing is asked of it again."""
    with cached_engine(tiny_model, tmp_path) as engine:
        (cold,) = generate(engine.llm, [prompt(0)], max_tokens=1)
        assert engine.scheduler_side.counters["stores"] == 0, "a step after the last one: this test proves nothing"
    with cached_engine(tiny_model, tmp_path) as engine:
        (warm,) = engine.ask(prompt(0), max_tokens=1)
    assert (cold.cached_tokens, warm.cached_tokens) == (0, CHUNKS * CHUNK)
    assert_same(warm, cold)
