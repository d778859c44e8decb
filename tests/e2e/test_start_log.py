"""What an engine says when it starts, on a real one: its settings, what it changed of vLLM's, what will not fit."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cached_engine import CHUNK, cached_engine
from vllm_harness import generate, random_prompt

from tiered_kv.vllm.connector import TieredKVConnector

pytestmark = pytest.mark.vllm

MAX_MODEL_LEN = 4096


@contextmanager
def heard() -> Iterator[list[logging.LogRecord]]:
    """Records of ours and of vLLM's loggers, neither of which gives them to the root."""
    records: list[logging.LogRecord] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    ear, loggers = Ear(), [logging.getLogger(name) for name in ("tiered_kv", "vllm")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(ear)
        logger.setLevel(logging.INFO)  # vLLM's own default; the tests ask it for less
    try:
        yield records
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(ear)
            logger.setLevel(level)


def told(records: list[logging.LogRecord], beginning: str) -> logging.LogRecord:
    (record,) = [record for record in records if record.getMessage().startswith(beginning)]
    return record


def test_an_engine_says_what_it_was_set_to_what_it_changed_and_what_will_not_fit(
    tiny_model: Path, tmp_path: Path
) -> None:
    extra = {"host_bytes": "4MiB"}
    with heard() as records, cached_engine(tiny_model, tmp_path, extra, max_model_len=MAX_MODEL_LEN) as engine:
        generate(engine.llm, [random_prompt(1, 2 * CHUNK)])
        config = engine.scheduler.vllm_config.kv_transfer_config
        slot_bytes = engine.scheduler_side._client.info.slot_bytes

    policy = told(records, "kv_load_failure_policy")
    assert policy.getMessage() == "kv_load_failure_policy was 'fail', now 'recompute'"
    assert policy.levelno == logging.INFO
    assert config.kv_load_failure_policy == "recompute"

    settings = told(records, "settings: ").getMessage()
    for expected in (f"file://{tmp_path}", "host_bytes", "4194304", "strict", "lookup_timeout_ms"):
        assert expected in settings

    warning = told(records, "the longest prompt cannot be loaded whole")
    assert warning.levelno == logging.WARNING
    chunks = int(4 * (1 << 20) * 0.375) // slot_bytes
    assert f"max_model_len {MAX_MODEL_LEN} tokens one request may load {chunks * CHUNK}" in warning.getMessage()
    (needed,) = re.findall(r"Set host_bytes to (\d+)MiB or more", warning.getMessage())
    assert int(int(needed) * (1 << 20) * 0.375) // slot_bytes * CHUNK >= MAX_MODEL_LEN


def test_a_role_that_is_neither_is_an_error(tiny_model: Path, tmp_path: Path) -> None:
    """A vLLM that brings a third one must not be served as if it were a scheduler."""
    with cached_engine(tiny_model, tmp_path) as engine:
        ours = engine.scheduler.connector
        with pytest.raises(ValueError, match="a connector is made for the scheduler or for a worker. role='observer'"):
            TieredKVConnector(engine.scheduler.vllm_config, "observer", ours._kv_cache_config)  # type: ignore[arg-type]
