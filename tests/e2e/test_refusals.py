"""What cannot be cached is refused with a reason, or served without the cache when ``strict`` is off."""

from pathlib import Path
from typing import Any

import pytest

from tests.kit.vllm.cached_engine import cached_engine, settings
from tests.kit.vllm.harness import generate, make_llm, random_prompt, running
from tests.kit.vllm.tiny_models import build_kind
from tiered_kv.errors import ConfigError, TieredKVError, UnsupportedModel

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"storage_url": "file:///tmp/x"}, "did you mean storage_uri"),
        ({"host_bytes": "lots"}, "host_bytes: expected a size such as 4GiB"),
        ({"chunk_tokens": 100}, "chunk_tokens=100 block_size=32 nearest=128"),
        ({"host_bytes": "1MiB"}, "at least 4 are needed"),
        ({"server": "unix:///nowhere/there.sock", "start_timeout_s": 1}, "no cache server answers at unix:///nowhere"),
    ],
)
def test_bad_setting_stops_a_strict_engine_with_a_sentence(
    tiny_model: Path, tmp_path: Path, extra: dict[str, Any], message: str
) -> None:
    with pytest.raises(TieredKVError, match=message):
        make_llm(tiny_model, settings(tmp_path, **extra))


def test_missing_uri_is_named(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="storage_uri is required"):
        make_llm(tiny_model, {})


def test_engine_without_strict_serves_without_a_server(tiny_model: Path, tmp_path: Path) -> None:
    extra = {"strict": False, "server": "unix:///nowhere/there.sock", "start_timeout_s": 1}
    with cached_engine(tiny_model, tmp_path, extra) as engine:
        prompt = random_prompt(1, 600)
        answers = [engine.ask(prompt)[0] for _ in range(2)]

    assert [a.cached_tokens for a in answers] == [0, 0]
    assert answers[0].tokens == answers[1].tokens


STATEFUL = {
    "mamba2": ({}, "recurrent layers are kept at no boundary|recurrent layers only"),
    "lfm2": ({"enable_prefix_caching": False}, "Start vLLM with --enable-prefix-caching"),
}
"""Layers with a state instead of KV: only such; and mixed with attention, where vLLM keeps no states."""


@pytest.mark.parametrize("kind", STATEFUL)
def test_model_whose_states_cannot_be_stored_is_refused_when_strict_and_else_served_without_the_cache(
    repository: Path, tmp_path: Path, kind: str
) -> None:
    model, (options, reason) = build_kind(repository / "build" / "models", kind), STATEFUL[kind]
    prompt = random_prompt(2, 600)
    with running(model, **options) as llm:
        (plain,) = generate(llm, [prompt], max_tokens=4)

    with pytest.raises(UnsupportedModel, match=reason):
        make_llm(model, settings(tmp_path / "strict"), **options)
    with cached_engine(model, tmp_path / "cache", {"strict": False}, **options) as engine:
        answers = [engine.ask(prompt, max_tokens=4)[0] for _ in range(2)]
        assert engine.scheduler.connector._scheduler is None

    assert [answer.cached_tokens for answer in answers] == [0, 0]
    assert {answer.tokens for answer in answers} == {plain.tokens}


def test_kv_narrower_than_what_the_cpu_backend_computes_is_refused_when_strict_and_else_served_without_the_cache(
    tiny_model: Path, tmp_path: Path
) -> None:
    """vLLM keeps a block's KV in other blocks' pages, with and without a cache: what was stored was not the block's."""
    options = {"dtype": "float32", "kv_cache_dtype": "bfloat16"}
    prompt = random_prompt(3, 600)

    with pytest.raises(UnsupportedModel, match="kv_cache_dtype=torch.bfloat16 dtype=torch.float32"):
        make_llm(tiny_model, settings(tmp_path / "strict"), **options)
    with cached_engine(tiny_model, tmp_path / "cache", {"strict": False}, **options) as engine:
        answers = [engine.ask(prompt, max_tokens=4)[0] for _ in range(2)]

    assert [answer.cached_tokens for answer in answers] == [0, 0]
