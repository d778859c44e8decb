"""What "these requests share KV, and those do not" means on a real engine; called by the tests of isolation.

What vLLM computed with no cached token stands for plain vLLM.
"""

from typing import Any, Final

from tests.kit.vllm.cached_engine import CHUNK, TAIL, CachedEngine, assert_same
from tests.kit.vllm.harness import Answer, as_answer, drain, kv_fingerprint, reset_gpu_cache

HIT: Final = 2 * CHUNK
LENGTH: Final = HIT + TAIL
"""Tokens of the prompts, and how many of them a hit saves."""


def ask(engine: CachedEngine, prompt: dict[str, Any], adapter: Any = None) -> Answer:
    """Answer one prompt with an empty GPU prefix cache and all earlier stores done."""
    from vllm import SamplingParams

    reset_gpu_cache(engine.llm)
    parameters = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, detokenize=False, logprobs=2)
    (output,) = engine.llm.generate([prompt], parameters, lora_request=adapter, use_tqdm=False)
    drain(engine.llm)
    return as_answer(output)


def assert_apart(engine: CachedEngine, *cases: tuple[dict[str, Any], Any]) -> list[Answer]:
    """Each case is computed although all before it are stored, then each one hits what it stored itself."""
    cold, computed = [], []
    for case in cases:
        cold.append(ask(engine, *case))
        computed.append(kv_fingerprint(engine.llm))
    assert [answer.cached_tokens for answer in cold] == [0] * len(cases)
    for case, before, bytes_before in zip(cases, cold, computed, strict=True):
        warm = ask(engine, *case)
        assert warm.cached_tokens == HIT
        assert kv_fingerprint(engine.llm) == bytes_before
        assert_same(warm, before)
    return cold
