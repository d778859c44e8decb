"""Pooling models on a real engine: embeddings behind the cache are those without it, or the model is refused.

An embedding may be made of the last token alone, and then a hit saves the rest. One that is made of all tokens, or of
the first, needs what a hit leaves out: vLLM 0.32 ends the whole engine where such a prompt is not computed in one step.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.kit.vllm.cached_engine import CHUNK, TAIL, CachedEngine, settings
from tests.kit.vllm.harness import close_llm, drain, make_llm, random_prompt, reset_gpu_cache
from tiered_kv.errors import UnsupportedModel

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

PROMPT = random_prompt(4100, 2 * CHUNK + TAIL)
PROMPTS = [PROMPT, PROMPT, PROMPT[:CHUNK] + random_prompt(4101, 60), random_prompt(4102, 60)]
HITS = [0, 2 * CHUNK, CHUNK, 0]
TOLERANCE = 0.02
"""Of components of a vector of length 1, in bfloat16."""


def options(pooling: str) -> dict[str, Any]:
    from vllm.config.pooler import PoolerConfig

    pooler = PoolerConfig(seq_pooling_type=pooling)
    return {"runner": "pooling", "convert": "embed", "pooler_config": pooler, "skip_tokenizer_init": False}


@contextmanager
def pooling_engine(model: Path, pooling: str, connector: dict[str, Any] | None) -> Iterator[Any]:
    llm = make_llm(model, connector, **options(pooling))
    try:
        yield llm
    finally:
        close_llm(llm)


def embed(llm: Any, prompts: Sequence[list[int]]) -> list[tuple[list[float], int]]:
    """Each prompt's embedding and cached tokens, asked for alone and with an empty GPU prefix cache."""
    found = []
    for prompt in prompts:
        reset_gpu_cache(llm)
        (output,) = llm.embed([{"prompt_token_ids": prompt}], use_tqdm=False)
        drain(llm)
        found.append((list(output.outputs.embedding), int(output.num_cached_tokens or 0)))
    return found


def embed_tokens(llm: Any, prompt: list[int]) -> list[list[float]]:
    """A vector for each of a prompt's tokens, with an empty GPU prefix cache; vLLM's ``LLM`` has one task only."""
    from vllm import PoolingParams

    reset_gpu_cache(llm)
    core, outputs = llm.llm_engine, list[Any]()
    core.add_request("tokens", {"prompt_token_ids": prompt}, PoolingParams(task="token_embed"))
    while core.has_unfinished_requests():
        outputs += core.step()
    drain(llm)
    return [list(map(float, row)) for row in outputs[-1].outputs.data]


def assert_same_vectors(ours: Sequence[tuple[list[float], int]], theirs: Sequence[tuple[list[float], int]]) -> None:
    for (one, _), (other, _) in zip(ours, theirs, strict=True):
        assert max(abs(a - b) for a, b in zip(one, other, strict=True)) <= TOLERANCE
    assert max(abs(a - b) for a, b in zip(theirs[0][0], theirs[3][0], strict=True)) > 2 * TOLERANCE, "all are alike"


def test_an_embedding_of_the_last_token_is_the_same_behind_a_hit(tiny_model: Path, tmp_path: Path) -> None:
    with pooling_engine(tiny_model, "LAST", None) as llm:
        plain = embed(llm, PROMPTS)

    with pooling_engine(tiny_model, "LAST", settings(tmp_path / "cache")) as llm:
        ours = embed(llm, PROMPTS)

    assert [cached for _, cached in ours] == HITS
    assert_same_vectors(ours, plain)


def test_vectors_of_all_tokens_are_computed_whatever_is_held_and_counted(tiny_model: Path, tmp_path: Path) -> None:
    with pooling_engine(tiny_model, "LAST", None) as llm:
        plain = embed_tokens(llm, PROMPT)

    with pooling_engine(tiny_model, "LAST", settings(tmp_path / "cache")) as llm:
        embed(llm, [PROMPT])
        ours = embed_tokens(llm, PROMPT)
        counters = CachedEngine(llm, tmp_path / "cache").scheduler_side.counters
        assert (counters["loads"], counters["requests_reading_nothing"]) == (0, 1)
        assert embed(llm, [PROMPT])[0][1] == 2 * CHUNK

    assert len(ours) == len(plain) == len(PROMPT)
    assert max(abs(a - b) for one, other in zip(ours, plain, strict=True) for a, b in zip(one, other, strict=True)) <= (
        TOLERANCE
    )


@pytest.mark.parametrize("pooling", ["MEAN", "CLS"])
def test_an_embedding_that_a_hit_would_cut_is_refused_or_computed_without_the_cache(
    tiny_model: Path, tmp_path: Path, pooling: str
) -> None:
    with pooling_engine(tiny_model, pooling, None) as llm:
        plain = embed(llm, PROMPTS)

    with pooling_engine(tiny_model, pooling, settings(tmp_path / "cache", strict=False)) as llm:
        ours = embed(llm, PROMPTS)

    assert [cached for _, cached in ours] == [0] * len(PROMPTS)
    assert_same_vectors(ours, plain)
    with pytest.raises(UnsupportedModel, match=f"needs all of a prompt's tokens .*seq_pooling_type={pooling}"):
        make_llm(tiny_model, settings(tmp_path / "strict"), **options(pooling))
