"""A server that stands still costs one request its patience; the next ones wait for nothing until it is heard again."""

from collections.abc import Iterator

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from tests.kit.server.clients import BLOCK, CHUNK, SmallEngine, lone_engine
from tests.kit.server.probe import wait_for
from tests.kit.server.processes import stopped_server
from tiered_kv.vllm.engine_role import EngineRole
from tiered_kv.vllm.identity.adapters import Adapters
from tiered_kv.vllm.kv_groups import CacheGroup, CacheGroups
from tiered_kv.vllm.scheduler import SchedulerSide

pytestmark = pytest.mark.vllm

FULL = CacheGroup(0, BLOCK, CHUNK // BLOCK, CHUNK // BLOCK)
GROUPS = CacheGroups([FULL])
WINDOWED = CacheGroups([FULL, CacheGroup(1, BLOCK, CHUNK // BLOCK, 1, window_tokens=BLOCK + 1)])
ROLE = EngineRole(may_load=True, may_store=False, has_prefix_caching=False)
CHUNKS = 3


@pytest.fixture
def engine() -> Iterator[SmallEngine]:
    with lone_engine(lookup_timeout_ms=300) as engine:
        engine.store(CHUNKS)
        engine.wait_hits(CHUNKS)
        yield engine


def request(name: str) -> Request:
    return Request(name, [*range(CHUNKS * CHUNK), 1], SamplingParams(max_tokens=1), None)


def answers(side: SchedulerSide, name: str) -> list[int | None]:
    """What vLLM hears until it is told a number."""
    asked = request(name)
    side.add_request(asked)
    heard: list[int | None] = []

    def is_told() -> bool:
        heard.append(side.matched_tokens(asked, 0))
        return heard[-1] is not None

    wait_for(is_told, "an answer")
    side.finish_request(asked, [])
    return heard


def test_only_the_first_request_waits_for_a_server_that_stands_still(engine: SmallEngine) -> None:
    side = SchedulerSide(engine.config, engine.client, Adapters(""), GROUPS, ROLE)
    with stopped_server(engine.root):
        first = answers(side, "first")
        others = [answers(side, f"other-{number}") for number in range(5)]
    assert (first[0], first[-1]) == (None, 0)
    assert others == [[0]] * 5, "a request waited for a server that had stopped to answer"
    assert side.counters["lookup_timeout"] == 6

    def is_heard() -> bool:
        side.poll()
        return not engine.client.is_silent

    wait_for(is_heard, "the server")
    assert answers(side, "after")[-1] == CHUNKS * CHUNK


def test_a_request_whose_prefix_the_gpu_has_waits_for_no_answer(engine: SmallEngine) -> None:
    """Nothing that is held could add to it: no request is slower with the cache than with vLLM's own alone."""
    side = SchedulerSide(engine.config, engine.client, Adapters(""), GROUPS, ROLE)
    with stopped_server(engine.root):
        asked = request("asked")
        side.add_request(asked)
        assert side.matched_tokens(asked, (CHUNKS - 1) * CHUNK) is None
        assert side.matched_tokens(asked, CHUNKS * CHUNK) == 0
        # Until it is admitted the GPU may lose it again.
        assert side.matched_tokens(asked, (CHUNKS - 1) * CHUNK) is None
        side.finish_request(asked, [])


@pytest.mark.parametrize("may_store", [False, True])
def test_where_windows_pass_a_request_that_may_be_stored_waits(engine: SmallEngine, may_store: bool) -> None:
    """Its chunks are queued once it is known what is held; a step later vLLM would have taken their blocks back."""
    role = EngineRole(may_load=True, may_store=may_store, has_prefix_caching=True)
    side = SchedulerSide(engine.config, engine.client, Adapters(""), WINDOWED, role)
    with stopped_server(engine.root):
        asked = request("asked")
        side.add_request(asked)
        assert side.matched_tokens(asked, CHUNKS * CHUNK) == (None if may_store else 0)
    wait_for(lambda: side.matched_tokens(asked, CHUNKS * CHUNK) == 0, "the answer")
    side.finish_request(asked, [[], []])
