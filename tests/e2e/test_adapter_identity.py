"""An adapter is its weights and how vLLM applies them: engines that apply it to other modules never share its KV."""

from pathlib import Path
from typing import Any

import pytest

from tests.kit.vllm.cached_engine import assert_same, cached_engine
from tests.kit.vllm.harness import random_prompt
from tests.kit.vllm.sharing import HIT, LENGTH, ask
from tests.kit.vllm.tiny_adapters import RANK, write_adapter

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]


def adapter(folder: Path) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest("a", 1, str(folder))


def tokens(seed: int) -> dict[str, Any]:
    return {"prompt_token_ids": random_prompt(seed, LENGTH)}


def test_adapter_on_fewer_modules_is_another_adapter_and_the_base_model_is_one(
    tiny_model: Path, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "a", seed=1)
    both = {"enable_lora": True, "max_lora_rank": RANK, "max_loras": 1}
    few = both | {"lora_target_modules": ["o_proj"]}
    with cached_engine(tiny_model, tmp_path / "kv", **both) as engine:
        stored = ask(engine, tokens(31), adapter(folder))
        base = ask(engine, tokens(32))
    with cached_engine(tiny_model, tmp_path / "kv", **few) as engine:
        other = [ask(engine, tokens(31), adapter(folder)) for _ in range(2)]
        base_again = ask(engine, tokens(32))
    with cached_engine(tiny_model, tmp_path / "apart", **few) as engine:
        plain = ask(engine, tokens(31), adapter(folder))
    with cached_engine(tiny_model, tmp_path / "kv") as engine:
        base_without_lora = ask(engine, tokens(32))

    assert [a.cached_tokens for a in (stored, *other)] == [0, 0, HIT]
    assert_same(other[0], plain)
    assert_same(other[1], plain)
    assert stored.logprobs != plain.logprobs, "the modules do not change the answer"
    assert [a.cached_tokens for a in (base, base_again, base_without_lora)] == [0, HIT, HIT]
    assert_same(base_again, base)
    assert_same(base_without_lora, base)
