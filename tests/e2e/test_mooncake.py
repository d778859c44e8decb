"""KV of a real engine in a Mooncake pool: another machine's engine loads it byte for byte."""

from pathlib import Path

import pytest

from tests.kit.server.object_nodes import wait_uploaded
from tests.kit.server.probe import wait_ended
from tests.kit.stores.mooncake import Pool
from tests.kit.vllm.cached_engine import CHUNK, TAIL, assert_same, cached_engine
from tests.kit.vllm.harness import kv_fingerprint, random_prompt

pytestmark = pytest.mark.vllm

PREFIX = random_prompt(710, 4 * CHUNK + TAIL)
WHOLE = len(PREFIX) // CHUNK * CHUNK


def test_an_engine_on_another_machine_loads_from_the_pool_byte_for_byte(
    tiny_model: Path, mooncake: Pool, tmp_path: Path
) -> None:
    mooncake.member()
    extra = {"storage_uri": mooncake.uri(), "storage_timeout_s": 4.0}
    with cached_engine(tiny_model, tmp_path / "a", extra | {"disk_path": str(tmp_path / "a")}) as engine:
        (cold,) = engine.ask(PREFIX)
        computed = kv_fingerprint(engine.llm)
        wait_uploaded(tmp_path / "a")
    wait_ended(tmp_path / "a")

    with cached_engine(tiny_model, tmp_path / "b", extra | {"disk_path": str(tmp_path / "b")}) as engine:
        (warm,) = engine.ask(PREFIX)
        loaded = kv_fingerprint(engine.llm)
    wait_ended(tmp_path / "b")
    assert (cold.cached_tokens, warm.cached_tokens) == (0, WHOLE)
    assert loaded == computed
    assert_same(warm, cold)
