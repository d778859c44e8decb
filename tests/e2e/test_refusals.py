"""What cannot be cached is refused with a reason, or served without the cache when ``strict`` is off."""

import json
from pathlib import Path
from typing import Any

import pytest
from cached_engine import cached_engine, settings
from vllm_harness import generate, make_llm, random_prompt, running

from tiered_kv.errors import ConfigError, TieredKVError, UnsupportedModel
from tiered_kv.testing.model import TINY, build_model

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


def _sliding_window_model(path: Path) -> Path:
    """The tiny model's weights as a Mistral whose every layer attends to a window of 128 tokens."""
    build_model(path, shape=TINY)
    config = json.loads((path / "config.json").read_text())
    config.update(model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=128)
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_model_of_sliding_windows_only_is_refused_or_served_without_cache(tmp_path: Path) -> None:
    model = _sliding_window_model(tmp_path / "model")
    prompt = random_prompt(2, 600)
    with running(model) as llm:
        (plain,) = generate(llm, [prompt])

    try:
        with cached_engine(model, tmp_path / "cache") as engine:
            answers = [engine.ask(prompt)[0] for _ in range(2)]
        cached = answers[1].cached_tokens
    except UnsupportedModel as refusal:
        assert "window" in str(refusal)
        with cached_engine(model, tmp_path / "cache", {"strict": False}) as engine:
            answers = [engine.ask(prompt)[0] for _ in range(2)]
        cached = 0

    assert [a.cached_tokens for a in answers] == [0, cached]
    assert {a.tokens for a in answers} == {plain.tokens}
