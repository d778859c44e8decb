"""A real engine whose copies go through the copy engine of a device, on memory of the CPU.

vLLM's own runner calls the hooks: loads begin before the forward pass, saves when the next step begins (runner V1).
"""

from pathlib import Path

import pytest

from tests.kit.gpu.immediate import copies_as_on_a_device
from tests.kit.vllm.cached_engine import CHUNK, TAIL, cached_engine
from tests.kit.vllm.harness import drain, generate, kv_fingerprint, random_prompt, reset_gpu_cache

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("direct_bytes", [1, 1 << 40], ids=["direct", "staged"])
def test_a_hit_brings_equal_bytes(tiny_model: Path, tmp_path: Path, direct_bytes: int) -> None:
    prompt = random_prompt(1, 4 * CHUNK + TAIL)
    with copies_as_on_a_device(direct_bytes=direct_bytes) as made, cached_engine(tiny_model, tmp_path) as engine:
        (cold,) = engine.ask(prompt)
        computed = kv_fingerprint(engine.llm)
        (warm,) = engine.ask(prompt)
        loaded = kv_fingerprint(engine.llm)
        assert not engine.worker_side._held

        (copies,) = made
        assert all(lane.turns > 0 for lane in copies._lanes.values())
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 4 * CHUNK)
    assert loaded == computed
    assert warm.tokens == cold.tokens


def test_the_last_steps_save_is_copied_when_the_engine_is_reset(tiny_model: Path, tmp_path: Path) -> None:
    """No step follows it: vLLM asks for its blocks instead, and the copy that was held is made then."""
    prompt = random_prompt(2, 2 * CHUNK + TAIL)
    with copies_as_on_a_device(direct_bytes=1 << 40), cached_engine(tiny_model, tmp_path) as engine:
        generate(engine.llm, [prompt], max_tokens=1)
        assert engine.llm.reset_prefix_cache() is True, "no block is held"
        drain(engine.llm)
        (again,) = generate(engine.llm, [prompt], max_tokens=1)
        reset_gpu_cache(engine.llm)
        assert again.cached_tokens == 2 * CHUNK
