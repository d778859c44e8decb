"""LoRA below vLLM's own offloading: an adapter is its content, whatever its name and path say."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.kit.server.probe import wait_ended, wait_for, wait_written
from tests.kit.storage.disk_probe import blob_files
from tests.kit.vllm.cached_engine import assert_same
from tests.kit.vllm.harness import Answer, as_answer, random_prompt, reset_gpu_cache, running, zero_kv
from tests.kit.vllm.offloading_engine import ROW_TOKENS, offloading_engine, on_disk, step
from tests.kit.vllm.tiny_adapters import RANK, lora, write_adapter

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

HIT = 3 * ROW_TOKENS
PROMPT = random_prompt(31, HIT + 20)
OPTIONS = {"enable_lora": True, "max_lora_rank": RANK, "max_loras": 1}


def answered(llm: Any, adapter: Any) -> Answer:
    from vllm import SamplingParams

    reset_gpu_cache(llm)
    zero_kv(llm)
    parameters = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, detokenize=False, logprobs=2)
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}], parameters, lora_request=adapter, use_tqdm=False)
    return as_answer(output)


def ask(llm: Any, *adapters: Any) -> list[Answer]:
    """Answer the prompt with each adapter; what is stored has left vLLM's rows when this returns."""
    answers = [answered(llm, adapter) for adapter in adapters]
    wait_for(lambda: not step(llm), "jobs to end")
    return answers


def test_an_adapter_is_found_by_what_was_loaded_and_its_successor_at_the_same_path_is_not(
    tiny_model: Path, tmp_path: Path
) -> None:
    root, one, other = tmp_path / "cache", tmp_path / "adapter", tmp_path / "other"
    write_adapter(one, seed=1)
    write_adapter(other, seed=2)
    asked = [lora("one", one, 1), lora("other", other, 2), None]
    with offloading_engine(tiny_model, on_disk(root), options=OPTIONS) as llm:
        cold = ask(llm, *asked)
        wait_written(root)
    wait_ended(root)
    assert [answer.cached_tokens for answer in cold] == [0, 0, 0]
    assert len({answer.logprobs for answer in cold}) == 3, "the adapters do not change the answer"
    assert len(blob_files(root)) == 3 * 3

    with offloading_engine(tiny_model, on_disk(root), options=OPTIONS) as llm:
        warm = ask(llm, *asked)
    wait_ended(root)
    assert [answer.cached_tokens for answer in warm] == [HIT, HIT, HIT]
    for again, first in zip(warm, cold, strict=True):
        assert_same(again, first)

    shutil.rmtree(one)
    write_adapter(one, seed=3)
    with running(tiny_model, **OPTIONS) as llm:
        plain = answered(llm, asked[0])
    with offloading_engine(tiny_model, on_disk(root), options=OPTIONS) as llm:
        replaced = [*ask(llm, asked[0]), *ask(llm, asked[1])]
        wait_written(root)
    wait_ended(root)
    assert [answer.cached_tokens for answer in replaced] == [0, HIT]
    assert_same(replaced[0], plain)
    assert replaced[0].logprobs != cold[0].logprobs, "the new files do not change the answer"

    with offloading_engine(tiny_model, on_disk(root)) as llm:  # takes no adapters at all
        (base,) = ask(llm, None)
    assert base.cached_tokens == HIT
    assert_same(base, cold[2])


def test_an_adapter_that_is_replaced_while_the_engine_runs_is_left_alone(tiny_model: Path, tmp_path: Path) -> None:
    root, folder = tmp_path / "cache", tmp_path / "adapter"
    write_adapter(folder, seed=1)
    with offloading_engine(tiny_model, on_disk(root), options=OPTIONS) as llm:
        ask(llm, lora("one", folder))
        wait_written(root)
        assert len(blob_files(root)) == 3
        shutil.rmtree(folder)
        write_adapter(folder, seed=3)
        llm.llm_engine.remove_lora(1)
        longer = [*PROMPT, *random_prompt(32, ROW_TOKENS)]
        from vllm import SamplingParams

        llm.generate([{"prompt_token_ids": longer}], SamplingParams(max_tokens=1), lora_request=lora("one", folder))
        wait_for(lambda: not step(llm), "jobs to end")
        wait_written(root)
        assert len(blob_files(root)) == 3, "rows of an adapter that nobody knows were stored"
