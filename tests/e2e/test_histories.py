"""Random histories on real engines that compute in float32, where answers can be compared a hundred times as sharply.

Shared beginnings, next turns, priorities, preemption, aborts, requests that may not read caches; between the steps
vLLM's own cache is emptied, the server killed, blobs are lost. Each answer's log-probabilities are those of an engine
without any cache, to a thousandth. What is only computed in other batches differs by a hundred-thousandth, and loads of
nothing by more (the last test).

Minutes in all, so it runs under ``make prove`` or with ``TIERED_KV_MODELS=1``.
"""

import os
import random
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from tests.kit.counts import count, only_in_proofs, seed
from tests.kit.server.probe import is_serving, server_pid
from tests.kit.storage.disk_probe import blob_files
from tests.kit.vllm.cached_engine import CachedEngine, cached_engine
from tests.kit.vllm.harness import BLOCK_TOKENS, Answer, drain, generate, running
from tests.kit.vllm.mixed_requests import Outcome, Wish, run_mix, wishes
from tests.kit.vllm.tiny_drafts import eagle_head
from tests.kit.vllm.tiny_models import build_kind
from tests.kit.vllm.wrong_loads import zeroed_attention

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), only_in_proofs]

TOLERANCE: Final = 0.001
REQUESTS: Final = count("HISTORY_REQUESTS", 40)
OPTIONS: Final[Mapping[str, Any]] = {"dtype": "float32", "max_model_len": 1344}
PRESSED: Final[Mapping[str, Any]] = {
    "num_gpu_blocks_override": 44,
    "max_num_batched_tokens": 384,
    "scheduling_policy": "priority",
}
"""Blocks for one of the longest requests."""

NO_PREFIX_CACHING: Final = {"enable_prefix_caching": False}
TINY_STEPS: Final = {"max_num_batched_tokens": BLOCK_TOKENS + 16, "max_num_seqs": 8}
WINDOWS: Final = {"num_gpu_blocks_override": 110}
BLOCK_CHUNKS: Final = {"chunk_tokens": BLOCK_TOKENS}

KINDS: Final[Mapping[str, tuple[str, dict[str, Any], dict[str, Any]]]] = {
    "llama": ("", {}, {}),
    "llama, tiny steps": ("", TINY_STEPS, {}),
    "llama, a chunk a block": ("", {}, BLOCK_CHUNKS),
    "llama, no prefix caching": ("", NO_PREFIX_CACHING, {}),
    "gemma3": ("gemma3", WINDOWS, {}),
    "gemma3, a chunk a block": ("gemma3", WINDOWS, BLOCK_CHUNKS),
    "gemma3, no prefix caching": ("gemma3", WINDOWS | NO_PREFIX_CACHING, {}),
    "gemma3_wide": ("gemma3_wide", WINDOWS, {}),
    "mistral": ("mistral", {}, {}),
    "eagle": ("eagle", {"num_gpu_blocks_override": 60}, {}),
}
"""By name: the model, vLLM's options and ours."""


class Troubles:
    """What happens between the steps of an engine."""

    def __init__(self, engine: CachedEngine) -> None:
        self._engine = engine

    def __call__(self, source: random.Random) -> None:
        if source.random() < 0.02:
            happens: Callable[[random.Random], None] = source.choice([self._forget, self._kill, self._lose])
            happens(source)

    def _forget(self, source: random.Random) -> None:
        self._engine.llm.llm_engine.reset_prefix_cache()  # refused, where requests have blocks

    def _kill(self, source: random.Random) -> None:
        if is_serving(self._engine.root):
            os.kill(server_pid(self._engine.root), signal.SIGKILL)

    def _lose(self, source: random.Random) -> None:
        for blob in blob_files(self._engine.root):
            if source.random() < 0.3:
                blob.unlink(missing_ok=True)


def alone(mix: list[Wish]) -> list[Wish]:
    """Without what vLLM itself refuses or gets wrong beside drafts on the CPU: several answers to one prompt."""
    return [replace(wish, n=1) for wish in mix]


def differences(outcome: Outcome, model: Path) -> list[str]:
    """Answers that an engine without any cache does not give; each prompt once, as long as the longest answer to it."""
    lengths: dict[tuple[int, ...], int] = {}
    for prompt, answer in outcome.answers:
        lengths[prompt] = max(lengths.get(prompt, 0), len(answer.tokens))
    with running(model, **OPTIONS, **NO_PREFIX_CACHING) as llm:
        plain: dict[tuple[int, ...], Answer] = {}
        for length in sorted(set(lengths.values())):
            prompts = [prompt for prompt in lengths if lengths[prompt] == length]
            plain |= zip(prompts, generate(llm, prompts, max_tokens=length), strict=True)
    return [
        f"{len(prompt)} tokens, {answer.cached_tokens} cached, at {place} of {len(answer.tokens)}"
        for prompt, answer in outcome.answers
        if (place := first_difference(answer, plain[prompt])) is not None
    ]


def first_difference(ours: Answer, theirs: Answer) -> int | None:
    """Where an answer differs by more than rounding; behind a tie anything may come."""
    for place, (mine, other) in enumerate(zip(ours.tokens, theirs.tokens, strict=False)):
        here, there = ours.logprobs[place][:2], theirs.logprobs[place][:2]
        if max(abs(a - b) for a, b in zip(here, there, strict=True)) > TOLERANCE:
            return place
        if mine != other:
            return place if there[0] - there[1] > TOLERANCE else None
    return None


def history(kind: str, tiny_model: Path, root: Path, troubles: type[Troubles] | None) -> tuple[Path, Outcome, int]:
    """Run one; returns the model, what was answered, and the tokens that were loaded."""
    name, options, settings = KINDS[kind]
    options = {**OPTIONS, **PRESSED, **options}
    model, mix = tiny_model, wishes(seed(), REQUESTS)
    if name == "eagle":
        head = eagle_head(root / "head", tiny_model)
        drafts = {"method": "eagle", "model": str(head), "num_speculative_tokens": 2}
        options, mix = options | {"speculative_config": drafts}, alone(mix)
    elif name:
        model = build_kind(tiny_model.parent, name)
    with cached_engine(model, root / "cache", {"pinned_share": 0.5} | settings, **options) as engine:
        between = None if troubles is None else troubles(engine)
        outcome = run_mix(engine.llm, mix, seed(), follow_up_share=0.3, longest=1200, between=between)
        drain(engine.llm)
        loaded = engine.scheduler_side.counters["load_tokens"]
        pool = engine.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    return model, outcome, loaded


@pytest.mark.parametrize("kind", KINDS)
def test_every_answer_of_a_history_is_that_without_a_cache(tiny_model: Path, tmp_path: Path, kind: str) -> None:
    model, outcome, loaded = history(kind, tiny_model, tmp_path, Troubles)

    assert loaded > 0, f"nothing was loaded. seed={seed()}"
    assert differences(outcome, model) == [], f"seed={seed()}"


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_it_notices_loads_that_bring_nothing(tiny_model: Path, tmp_path: Path, kind: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        zeroed_attention(patch, None)  # type: ignore[arg-type] # it looks at no engine
        model, outcome, loaded = history(kind, tiny_model, tmp_path, None)

    assert loaded > 0, f"nothing was loaded. seed={seed()}"
    assert differences(outcome, model) != []
