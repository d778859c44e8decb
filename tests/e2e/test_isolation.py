"""Requests share KV if and only if everything that makes it is equal: adapter, salt, embeddings.

Each test has two sides on a real engine: the same identity hits, with the answer and the KV bytes of a request that was
computed, and another one never does, though its tokens are the same. Images are in ``test_images.py``.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.vllm.cached_engine import CHUNK, CachedEngine, assert_same, cached_engine
from tests.kit.vllm.harness import random_prompt
from tests.kit.vllm.sharing import HIT, LENGTH, ask, assert_apart
from tests.kit.vllm.tiny_adapters import RANK, write_adapter
from tiered_kv.vllm.identity.adapters import CLOCKS_APART_NS

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[CachedEngine]:
    options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK, "enable_prompt_embeds": True}
    with cached_engine(tiny_model, tmp_path_factory.mktemp("cache"), **options) as made:
        yield made


_numbers = iter(range(1, 100))


def adapter_named(name: str, folder: Path) -> Any:
    """vLLM's request for an adapter; every call is a new adapter to vLLM."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, next(_numbers), str(folder))


def tokens(seed: int, salt: str | None = None) -> dict[str, Any]:
    return {"prompt_token_ids": random_prompt(seed, LENGTH)} | ({"cache_salt": salt} if salt else {})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters older than the engine by more than clocks may be apart: others are looked up once ranks have them."""
    made = tmp_path_factory.mktemp("adapters")
    for name, seed in (("a", 1), ("b", 2), ("a-elsewhere", 1)):
        write_adapter(made / name, seed=seed)
    time.sleep(CLOCKS_APART_NS / 1e9)
    return made


def test_adapters_and_base_model_never_share(engine, folder):
    a, b = adapter_named("a", folder / "a"), adapter_named("b", folder / "b")

    answers = assert_apart(engine, (tokens(1), None), (tokens(1), a), (tokens(1), b))

    # Or nothing above would have been noticed.
    assert len({answer.tokens for answer in answers}) == 3, "an adapter does not change the answer"


def test_adapter_is_its_weights_whatever_its_name_and_place(engine, folder):
    stored = ask(engine, tokens(2), adapter_named("first", folder / "a"))
    twin = ask(engine, tokens(2), adapter_named("second", folder / "a-elsewhere"))
    other = ask(engine, tokens(2), adapter_named("first", folder / "b"))

    assert (stored.cached_tokens, twin.cached_tokens, other.cached_tokens) == (0, HIT, 0)
    assert_same(twin, stored)
    assert other.tokens != stored.tokens


def test_adapter_named_like_a_salt_never_meets_that_salt(engine, folder):
    named = adapter_named("tenant", folder / "a")

    assert_apart(
        engine,
        (tokens(3, salt="tenant"), None),
        (tokens(3), named),
        (tokens(3, salt="tenant"), named),
        (tokens(3), None),
        (tokens(3, salt=str(folder / "a")), None),
    )


def test_adapter_whose_files_change_is_left_alone_from_then_on(engine, tmp_path):
    changing = adapter_named("changing", write_adapter(tmp_path / "c", seed=3))
    before = [ask(engine, tokens(4), changing) for _ in range(2)]
    left_alone = engine.scheduler_side.counters["request_unaccountable"]

    write_adapter(tmp_path / "c", seed=4)
    os.utime(tmp_path / "c" / "adapter_model.safetensors", ns=(1, 1))
    after = [ask(engine, tokens(4), changing) for _ in range(2)]

    assert [answer.cached_tokens for answer in before + after] == [0, HIT, 0, 0]
    assert engine.scheduler_side.counters["request_unaccountable"] - left_alone == 2
    # vLLM holds the weights it loaded first, so the hit that was refused would have been right; a restart's would not.
    assert {answer.tokens for answer in after} == {before[0].tokens}


def test_adapter_is_what_was_loaded_not_what_lies_there_later(engine, tmp_path):
    """``add_lora`` is what ``/v1/load_lora_adapter`` and ``--lora-modules`` call."""
    folder = tmp_path / "latest"
    first = adapter_named("v1", write_adapter(folder, seed=11))
    assert engine.llm.llm_engine.add_lora(first)
    write_adapter(folder, seed=12)

    old = [ask(engine, tokens(6), first) for _ in range(2)]
    second = adapter_named("v2", folder)
    new = [ask(engine, tokens(6), second) for _ in range(2)]

    assert [answer.cached_tokens for answer in old + new] == [0, 0, 0, HIT]
    assert_same(new[1], new[0])
    assert new[0].tokens != old[0].tokens, "both steps answer alike: this test proves nothing"


def test_adapter_loaded_anew_under_one_id_is_left_alone(engine, tmp_path):
    """``load_inplace``: what a running request computed before and after is of two adapters."""
    from vllm.lora.request import LoRARequest

    first = adapter_named("inplace", write_adapter(tmp_path / "1", seed=13))
    before = [ask(engine, tokens(7), first) for _ in range(2)]
    write_adapter(tmp_path / "2", seed=14)
    assert engine.llm.llm_engine.add_lora(
        LoRARequest("inplace", first.lora_int_id, str(tmp_path / "2"), load_inplace=True)
    )
    after = [ask(engine, tokens(7), first) for _ in range(2)]  # asks for the first and is answered by the second

    assert [answer.cached_tokens for answer in before] == [0, HIT]
    assert after[1].cached_tokens == 0
    elsewhere = adapter_named("twin", write_adapter(tmp_path / "3", seed=13))
    twin = [ask(engine, tokens(7), elsewhere) for _ in range(2)]
    assert twin[1].cached_tokens == HIT
    assert_same(twin[0], before[0])
    assert_same(twin[1], before[0])


def rows(seed: int) -> Any:
    """Embeddings for a prompt, as large as the model's own."""
    import torch

    values = torch.empty(LENGTH, 256).normal_(0.0, 0.08, generator=torch.Generator().manual_seed(seed))
    return values.to(torch.bfloat16)


def test_prompt_embeddings_share_with_equal_ones_only(engine):
    assert_apart(engine, ({"prompt_embeds": rows(1)}, None), ({"prompt_embeds": rows(2)}, None))

    changed = rows(1)
    changed[CHUNK + 5] += 1.0
    assert ask(engine, {"prompt_embeds": changed}).cached_tokens == CHUNK, "the first chunk is the same"


def test_prompt_embeddings_never_meet_the_tokens_vllm_writes_for_them(engine):
    # vLLM puts the token 0 where an embedding stands.
    zeros = {"prompt_token_ids": [0] * LENGTH}

    first, second = assert_apart(engine, ({"prompt_embeds": rows(3)}, None), (zeros, None))

    assert first.tokens != second.tokens


def test_embeddings_of_tokens_are_not_those_tokens(engine):
    worker = engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    prompt = tokens(5)
    import torch

    embedded = worker.model_runner.model.embed_input_ids(torch.tensor(prompt["prompt_token_ids"]))

    by_token, by_row = assert_apart(engine, (prompt, None), ({"prompt_embeds": embedded.clone()}, None))

    assert_same(by_row, by_token)
