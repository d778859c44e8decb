"""KV that outlives a machine: engines whose host memory and disk are empty, or another's, on one S3 bucket."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.kit.counts import only_in_proofs
from tests.kit.s3 import S3
from tests.kit.server.object_nodes import FOUND_S, Place, blob_paths, s3_place, wait_uploaded
from tests.kit.server.probe import figures, wait_ended, wait_for
from tests.kit.vllm.cached_engine import CHUNK, TAIL, assert_same, cached_engine, settings
from tests.kit.vllm.engine_process import EngineProcess
from tests.kit.vllm.harness import Answer, kv_fingerprint, random_prompt

pytestmark = pytest.mark.vllm

PREFIX = random_prompt(700, 4 * CHUNK + TAIL)
WHOLE = len(PREFIX) // CHUNK * CHUNK


@pytest.fixture
def prefix(s3: S3) -> str:
    return s3.new_prefix()


def behind(place: Place, disk: Path) -> dict[str, Any]:
    """What makes an engine's settings those of a node on the bucket."""
    return {"storage_uri": place.uri, "storage_options": place.options, "disk_path": str(disk)}


def test_an_engine_on_an_empty_machine_loads_from_the_bucket_byte_for_byte(
    tiny_model: Path, s3: S3, prefix: str, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    extra = behind(s3_place(s3, prefix), disk)
    with cached_engine(tiny_model, disk, extra) as engine:
        (cold,) = engine.ask(PREFIX)
        computed = kv_fingerprint(engine.llm)
        wait_uploaded(disk)
    wait_ended(disk)
    shutil.rmtree(disk)

    with cached_engine(tiny_model, disk, extra) as engine:
        (warm,) = engine.ask(PREFIX)
        loaded = kv_fingerprint(engine.llm)
        (longer,) = engine.ask([*PREFIX[: 3 * CHUNK], *random_prompt(701, 300)])
        wait_uploaded(disk)
        counters = figures(disk)["counters"]

    assert (cold.cached_tokens, warm.cached_tokens) == (0, WHOLE)
    assert warm.cached_tokens >= 0.9 * len(PREFIX)
    assert warm.tokens == cold.tokens
    assert loaded == computed
    assert longer.cached_tokens == 3 * CHUNK
    assert counters["uploaded"] == 1, "only the new prompt's last chunk was not in the bucket"
    assert len(blob_paths(s3, prefix)) == 5


@only_in_proofs  # test_disaggregated.py has a producer and a consumer on one bucket, the demo an engine after another
@pytest.mark.timeout(300)
def test_two_engines_with_servers_of_their_own_share_while_both_run(
    tiny_model: Path, s3: S3, prefix: str, tmp_path: Path
) -> None:
    theirs = random_prompt(702, 800)
    place, log = s3_place(s3, prefix), tmp_path / "other.log"
    other = EngineProcess(tiny_model, settings(tmp_path / "b", **behind(place, tmp_path / "b")), log)
    try:
        with cached_engine(tiny_model, tmp_path / "a", behind(place, tmp_path / "a")) as own:
            (cold,) = own.ask(PREFIX)
            wait_uploaded(tmp_path / "a")
            (answer,) = other.ask(PREFIX)
            warm = Answer(
                tuple(answer["tokens"]), tuple(map(tuple, answer["logprobs"])), answer["cached_tokens"], "length"
            )
            (their_cold,) = other.ask(theirs)
            wait_uploaded(tmp_path / "b")
            wait_for(lambda: len(blob_paths(s3, prefix)) == 7, "both prompts in the bucket", deadline_s=FOUND_S)
            (their_warm,) = own.ask(theirs)
            servers = {figures(tmp_path / name)["pid"] for name in "ab"}
    finally:
        other.close()

    assert len(servers) == 2
    assert (cold.cached_tokens, warm.cached_tokens) == (0, WHOLE)
    assert_same(warm, cold)
    assert (their_cold["cached_tokens"], their_warm.cached_tokens) == (0, 3 * CHUNK)
    assert their_warm.logprobs[0][0] == pytest.approx(their_cold["logprobs"][0][0], abs=0.1)
