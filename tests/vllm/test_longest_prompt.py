"""The warning that one request may hold less than the longest prompt needs: when, how often, with which numbers."""

import logging
import re
from types import SimpleNamespace
from typing import Any

import pytest

from tiered_kv.config import Config
from tiered_kv.tiering.types import Limits
from tiered_kv.vllm.load_admission import LongestPrompt

pytestmark = pytest.mark.vllm

CHUNK, MIB = 256, 1 << 20


class Session:
    """What the server told a scheduler's client: slots of 8 MiB."""

    def __init__(self, host_bytes: int, share: float = 1.0) -> None:
        self.host_bytes = host_bytes
        self.chunks_leased_max = int(host_bytes * share * Limits().request_share) // (8 * MIB)
        self.info: Any = None

    def open(self, generation: int) -> None:
        self.info = SimpleNamespace(generation=generation, slot_bytes=8 * MIB)


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def look(
    caplog: pytest.LogCaptureFixture, host_bytes: int, max_model_len: int, state_parts: int = 0, **more: Any
) -> list[str]:
    """What is said of a session that opens, in two looks."""
    caplog.clear()
    config = Config(storage_uri="file:///unused", chunk_tokens=CHUNK, host_bytes=host_bytes, **more)
    session = Session(host_bytes, more.get("max_share", 1.0))
    prompt = LongestPrompt(config, session, max_model_len, state_parts)  # type: ignore[arg-type]
    prompt.check()
    assert warned(caplog) == [], "not before the session is open"
    session.open(0)
    prompt.check()
    prompt.check()
    return warned(caplog)


@pytest.mark.parametrize("more", [{}, {"max_share": 0.5}])
def test_it_names_what_fits_and_what_to_set_and_that_is_enough(caplog: pytest.LogCaptureFixture, more: Any) -> None:
    (text,) = look(caplog, 512 * MIB, 32768, **more)
    chunks = 24 if not more else 12
    assert (
        f"of max_model_len 32768 tokens one request may load {chunks * CHUNK}, because it may hold {chunks} chunks"
        in text
    )
    assert "chunks of 8 MiB of the 512 MiB of host memory" in text
    assert ("max_share" in text) is bool(more)
    (needed,) = re.findall(r"Set host_bytes to (\d+)MiB or more", text)
    assert look(caplog, int(needed) * MIB, 32768, **more) == []
    assert look(caplog, (int(needed) - 1) * MIB, 32768, **more) != [], "the least"


def test_nothing_is_said_where_it_fits(caplog: pytest.LogCaptureFixture) -> None:
    assert look(caplog, 512 * MIB, 24 * CHUNK) == []
    assert len(look(caplog, 512 * MIB, 24 * CHUNK + 1)) == 1


def test_the_state_at_a_hits_end_takes_of_what_one_request_may_hold(caplog: pytest.LogCaptureFixture) -> None:
    assert look(caplog, 512 * MIB, 21 * CHUNK, 3) == []
    (text,) = look(caplog, 512 * MIB, 21 * CHUNK + 1, 3)
    assert f"one request may load {21 * CHUNK}, because it may hold 24 chunks" in text
    assert "3 of them for the state of its recurrent layers" in text
    (needed,) = re.findall(r"Set host_bytes to (\d+)MiB or more", text)
    assert look(caplog, int(needed) * MIB, 21 * CHUNK + 1, 3) == []


def test_each_session_is_looked_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """The next server may have other limits."""
    config = Config(storage_uri="file:///unused", chunk_tokens=CHUNK, host_bytes=512 * MIB)
    session = Session(512 * MIB)
    prompt = LongestPrompt(config, session, 32768, 0)  # type: ignore[arg-type]
    for generation in (0, 0, 1, 1):
        session.open(generation)
        prompt.check()
    assert len(warned(caplog)) == 2
