"""A vLLM engine that states a share finds its prompts again, with the same answers, however busy its neighbour is."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.server.clients import SmallEngine
from tests.kit.server.clients import settings as neighbour_settings
from tests.kit.server.probe import figures, wait_written
from tests.kit.vllm.cached_engine import CHUNK, TAIL, CachedEngine, assert_same, cached_engine
from tests.kit.vllm.harness import random_prompt
from tiered_kv.ops.server_link import ServerLink

pytestmark = pytest.mark.vllm

LIMITS = {"host_bytes": "32MiB", "disk_bytes": "96MiB"}
PROMPTS = [random_prompt(seed, 2 * CHUNK + TAIL) for seed in range(4)]
NEIGHBOURS_PROMPTS = 200
"""Of 8 chunks of 36 KiB each: more than the disk tier holds. They are written before more come: what is stored faster
than the disk takes it is dropped, and presses nobody."""


@pytest.fixture(params=[0.25, 0.0], ids=["with-a-minimum", "without"])
def engine(request: pytest.FixtureRequest, tiny_model: Path, tmp_path: Path) -> Iterator[CachedEngine]:
    with cached_engine(tiny_model, tmp_path / "cache", LIMITS | {"min_share": request.param}) as made:
        yield made


def test_a_busy_neighbour_pushes_out_what_is_not_kept(engine: CachedEngine, request: pytest.FixtureRequest) -> None:
    is_kept = request.node.callspec.params["engine"] > 0
    assert figures(engine.root)["hierarchy"]["reserved_slots"] == 0, "an engine that was asked nothing holds slots"
    computed = engine.ask(*PROMPTS)
    wait_written(engine.root)
    reserved = figures(engine.root)["hierarchy"]["reserved_slots"]
    assert reserved == 0, "an idle engine holds slots that chunks of another size may need"
    neighbour = SmallEngine.start(neighbour_settings(engine.root, **LIMITS), "neighbour", weights="other")
    try:
        for prompt in range(NEIGHBOURS_PROMPTS):
            neighbour.store(8, first_token=prompt * 1_000_000)
            wait_written(engine.root)
        assert figures(engine.root)["counters"]["lower_evicted"] > 200, "nobody was pressed"
        with ServerLink.of_directory(engine.root) as link:  # which sizes of chunk share equally, whoever is busy
            link.evict("host", b"", None, holes=True)
    finally:
        neighbour.close()

    again = engine.ask(*PROMPTS)

    assert [answer.cached_tokens for answer in computed] == [0] * len(PROMPTS)
    assert [answer.cached_tokens for answer in again] == [2 * CHUNK if is_kept else 0] * len(PROMPTS)
    for ours, theirs in zip(again, computed, strict=True):
        assert_same(ours, theirs)
