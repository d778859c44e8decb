"""What an engine says when it starts, on a real one: its settings, what it changed of vLLM's, what will not fit."""

import logging
import re
from pathlib import Path

import pytest

from tests.kit.vllm.cached_engine import CHUNK, cached_engine
from tests.kit.vllm.harness import generate, random_prompt
from tiered_kv.vllm.connector import TieredKVConnector

pytestmark = pytest.mark.vllm

MAX_MODEL_LEN = 4096


def told(said: str, beginning: str) -> tuple[str, str]:
    """The line that begins so, of all that an engine wrote: its level, and what it says."""
    (found,) = re.findall(rf"(INFO|WARNING|ERROR) [^\]]*\] ({re.escape(beginning)}.*)", said)
    return found


def test_an_engine_says_what_it_was_set_to_what_it_changed_and_what_will_not_fit(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")  # vLLM's own default; an engine reads it when it starts
    # An earlier engine of this process gave ours the handlers of its time, which write to where stdout was then.
    monkeypatch.setattr(logging.getLogger("tiered_kv"), "handlers", [])
    with cached_engine(tiny_model, tmp_path, {"host_bytes": "4MiB"}, max_model_len=MAX_MODEL_LEN) as engine:
        generate(engine.llm, [random_prompt(1, 2 * CHUNK)])
        config = engine.scheduler.vllm_config.kv_transfer_config
        slot_bytes = engine.scheduler_side._client.info.slot_bytes
    said = capfd.readouterr().out

    assert told(said, "kv_load_failure_policy") == ("INFO", "kv_load_failure_policy was 'fail', now 'recompute'")
    assert config.kv_load_failure_policy == "recompute"

    level, settings = told(said, "settings: ")
    assert level == "INFO"
    for expected in (f"file://{tmp_path}", "host_bytes", "4194304", "strict", "lookup_timeout_ms"):
        assert expected in settings

    level, warning = told(said, "the longest prompt cannot be loaded whole")
    assert level == "WARNING"
    chunks = int(4 * (1 << 20) * 0.375) // slot_bytes
    assert f"max_model_len {MAX_MODEL_LEN} tokens one request may load {chunks * CHUNK}" in warning
    (needed,) = re.findall(r"Set host_bytes to (\d+)MiB or more", warning)
    assert int(int(needed) * (1 << 20) * 0.375) // slot_bytes * CHUNK >= MAX_MODEL_LEN


def test_a_role_that_is_neither_is_an_error(tiny_model: Path, tmp_path: Path) -> None:
    """A vLLM that brings a third one must not be served as if it were a scheduler."""
    with cached_engine(tiny_model, tmp_path) as engine:
        ours = engine.scheduler.connector
        with pytest.raises(ValueError, match="a connector is made for the scheduler or for a worker. role='observer'"):
            TieredKVConnector(engine.scheduler.vllm_config, "observer", ours._kv_cache_config)  # type: ignore[arg-type]
