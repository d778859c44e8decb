"""Requests with a LoRA adapter and without one in the same steps, which vLLM 0.32's CPU build mixes up.

It takes the adapter of the last place for those that have none (``lora_ops.py`` indexes with -1), so that the base
model's KV is another's. In vLLM's own cache that ends with the engine; stored, it would be everybody's for ever.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.kit.vllm.cached_engine import CachedEngine, assert_same, cached_engine
from tests.kit.vllm.harness import Answer, computed_alone, drain, random_prompt, reset_gpu_cache
from tests.kit.vllm.sharing import HIT, LENGTH, ask
from tests.kit.vllm.tiny_adapters import RANK, lora, write_adapter

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

PROMPTS = {name: random_prompt(5100 + number, LENGTH) for number, name in enumerate(("alone", "beside", "adapted"))}
LONG, SHORT = 1500, 6
"""Tokens of the answers with an adapter, so that it still goes on when the other one ends, and without."""


def tokens(name: str) -> dict[str, Any]:
    return {"prompt_token_ids": PROMPTS[name]}


def ask_beside(engine: CachedEngine, adapter: Any) -> None:
    """Have a request without an adapter computed while one with an adapter generates, which is aborted then."""
    reset_gpu_cache(engine.llm)
    core = engine.llm.llm_engine
    core.add_request("adapted", tokens("adapted"), parameters(LONG), lora_request=adapter)
    while not any(request.num_output_tokens for request in engine.scheduler.running):
        core.step()
    core.add_request("beside", tokens("beside"), parameters(SHORT))
    while not any(one.request_id == "beside" and one.finished for one in core.step()):
        assert engine.scheduler.running, "the request with an adapter ended too early"
    core.abort_request(["adapted"])
    drain(engine.llm)


def parameters(max_tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)


def test_what_the_base_model_computed_beside_an_adapter_is_nobodys(tiny_model: Path, tmp_path: Path) -> None:
    plain: dict[str, Answer] = computed_alone(tiny_model, PROMPTS, max_tokens=SHORT)
    adapter = lora("a", write_adapter(tmp_path / "a", seed=1))
    with cached_engine(tiny_model, tmp_path / "kv", enable_lora=True, max_lora_rank=RANK, max_loras=1) as engine:
        counters = engine.scheduler_side.counters
        base = [ask(engine, tokens("alone")) for _ in range(2)]
        assert [one.cached_tokens for one in base] == [0, HIT]
        ask(engine, tokens("adapted"), adapter)
        assert counters["request_unaccountable"] == 0
        ask_beside(engine, adapter)
        assert counters["request_unaccountable"] == 1
        after = ask(engine, tokens("beside"))
        assert (after.cached_tokens, counters["request_unaccountable"]) == (0, 2)
        assert_same(after, plain["beside"])
        assert ask(engine, tokens("adapted"), adapter).cached_tokens == HIT, "an adapter's KV is right"
    with cached_engine(tiny_model, tmp_path / "kv") as engine:
        for name, hit in (("alone", HIT), ("beside", 0)):
            answer = ask(engine, tokens(name))
            assert answer.cached_tokens == hit
            assert_same(answer, plain[name])
