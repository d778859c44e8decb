"""A real engine that starts while its bucket does not answer: alone at first, and one of the fleet once it does."""

from pathlib import Path

import pytest

from tests.kit.faults.proxy import Fault, FaultProxy, Mode
from tests.kit.s3 import S3
from tests.kit.server.object_nodes import s3_place, wait_uploaded
from tests.kit.server.probe import wait_ended, wait_for
from tests.kit.vllm.cached_engine import CHUNK, assert_same, cached_engine
from tests.kit.vllm.harness import random_prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

CHUNKS = 2
STORED, OTHER = (random_prompt(seed, CHUNKS * CHUNK + 60) for seed in range(2))


def test_it_answers_meanwhile_and_has_what_others_stored_when_the_bucket_is_back(
    tiny_model: Path, tmp_path: Path, s3: S3
) -> None:
    prefix = s3.new_prefix()
    near = s3_place(s3, prefix)
    there = {"storage_uri": near.uri, "storage_options": near.options, "disk_path": str(tmp_path / "a")}
    with cached_engine(tiny_model, tmp_path / "a", there) as other:
        (plain,) = other.ask(STORED)
        wait_uploaded(tmp_path / "a")
    wait_ended(tmp_path / "a")

    with FaultProxy(s3.endpoint_url) as proxy:
        far = s3_place(s3, prefix, proxy.url)
        storage = {"storage_uri": far.uri, "storage_options": far.options, "disk_path": str(tmp_path / "b")}
        proxy.set(Fault(Mode.STATUS, kinds={"LIST"}, path="/epochs/", status=503))
        with cached_engine(tiny_model, tmp_path / "b", storage) as engine:
            (alone,) = engine.ask(STORED)
            assert_same(alone, plain)
            assert alone.cached_tokens == 0
            proxy.set()

            def is_shared() -> bool:
                engine.ask(OTHER, max_tokens=1)  # an engine hears of its session when it steps
                (answer,) = engine.ask(STORED)
                assert_same(answer, plain)
                epoch = str(engine.scheduler_side._client.namespace.fields["epoch"])
                return epoch.startswith("shared-") and answer.cached_tokens == CHUNKS * CHUNK

            wait_for(is_shared, "what the other machine stored, in the next session", deadline_s=100)
