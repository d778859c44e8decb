"""A preempted request is looked up again: what was stored of it since it first asked is loaded, not computed."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from tests.kit.fake_clock import FakeClock
from tests.kit.server.clients import BLOCK, CHUNK, SmallEngine
from tests.kit.server.probe import wait_for
from tiered_kv.vllm.engine_role import EngineRole
from tiered_kv.vllm.identity.adapters import Adapters
from tiered_kv.vllm.kv_groups import CacheGroup, CacheGroups
from tiered_kv.vllm.scheduler import SchedulerSide
from tiered_kv.vllm.wait_policy import FRESH_S

pytestmark = pytest.mark.vllm

GROUPS = CacheGroups([CacheGroup(0, BLOCK, CHUNK // BLOCK, CHUNK // BLOCK)])
BOTH = EngineRole(may_load=True, may_store=False, has_prefix_caching=False)


def side_of(engine: SmallEngine) -> SchedulerSide:
    return SchedulerSide(engine.config, engine.client, Adapters(""), GROUPS, BOTH)


def request(name: str, first_token: int, **more: Any) -> Request:
    tokens = list(range(first_token, first_token + 3 * CHUNK + 5))
    return Request(name, tokens, SamplingParams(max_tokens=9, **more), None)


def matched(side: SchedulerSide, asked: Request) -> int:
    """What vLLM is told once it is no longer told to ask again."""
    answer: list[int | None] = [None]

    def is_answered() -> bool:
        answer[0] = side.matched_tokens(asked, 0)
        return answer[0] is not None

    wait_for(is_answered, "the answer")
    assert answer[0] is not None
    return answer[0]


def step(side: SchedulerSide, *preempted: str) -> None:
    """A step of vLLM's scheduler in which nothing is scheduled."""
    side.plan_step(SimpleNamespace(preempted_req_ids=set(preempted), num_scheduled_tokens={}))


def test_a_preempted_request_loads_what_was_stored_meanwhile(engine: SmallEngine) -> None:
    side, asked = side_of(engine), request("r", 10_000)
    side.add_request(asked)
    assert matched(side, asked) == 0
    engine.store(3, first_token=10_000)
    engine.wait_hits(3, first_token=10_000)
    step(side)
    assert matched(side, asked) == 0, "asked once, answered once"
    step(side, "r", "unknown")
    assert matched(side, asked) == 3 * CHUNK
    side.finish_request(asked, ())
    assert not engine.client.lookups


def test_controls_and_vllm_itself_can_forbid_loading(engine: SmallEngine) -> None:
    side = side_of(engine)
    engine.store(3, first_token=20_000)
    engine.wait_hits(3, first_token=20_000)
    control = {"extra_args": {"kv_transfer_params": {"tiered_kv.skip_load": True}}}
    for name, more, expected in (
        ("plain", {}, 3 * CHUNK),
        ("skip_load", control, 0),
        ("logprobs", {"prompt_logprobs": 1}, 0),
        ("skip_reading", {"skip_reading_prefix_cache": True}, 0),
    ):
        asked = request(name, 20_000, **more)
        side.add_request(asked)
        assert matched(side, asked) == expected, name
        step(side, name)
        assert matched(side, asked) == expected, name
        side.finish_request(asked, ())
    assert not engine.client.lookups
    assert side.counters["requests_reading_nothing"] == 3, "an operator has to see why such requests never hit"


def test_a_load_that_fails_after_its_request_was_aborted_takes_no_room_from_others(engine: SmallEngine) -> None:
    """vLLM reports such a load, too; nobody would ever take it from the count again."""
    blocks = CHUNK // BLOCK
    groups = CacheGroups(
        [CacheGroup(0, BLOCK, blocks, blocks), CacheGroup(1, BLOCK, blocks, 1, window_tokens=BLOCK + 1)]
    )
    side = SchedulerSide(engine.config, engine.client, Adapters(""), groups, BOTH)
    side.bind_block_pool(SimpleNamespace(num_gpu_blocks=4 * blocks))
    engine.store(3, first_token=30_000)
    engine.wait_hits(3, first_token=30_000)
    table = list(range(1, 3 * blocks + 1))
    for name, is_aborted, failed in (
        ("aborted", True, {"aborted"}),
        ("failed", False, {"failed"}),
        ("fine", False, set()),
    ):
        asked = request(name, 30_000)
        side.add_request(asked)
        assert matched(side, asked) == 3 * CHUNK, f"{name}: somebody before it left the count as it was"
        side.allocated(asked, (table, [0] * (3 * blocks - 1) + [99]), 3 * CHUNK)
        if is_aborted:
            side.finish_request(asked, ())
        side.loads_finished({name}, failed)
        assert engine.client.is_resting == is_aborted, "vLLM does not step again for a request that is over"
        if not is_aborted:
            side.plan_step(SimpleNamespace(preempted_req_ids=set(), num_scheduled_tokens={name: 5}))
            side.finish_request(asked, ())


def test_a_load_whose_request_was_aborted_keeps_its_room_until_it_ends(engine: SmallEngine) -> None:
    """vLLM gives its blocks to nobody before the load was reported."""
    blocks = CHUNK // BLOCK
    groups = CacheGroups(
        [CacheGroup(0, BLOCK, blocks, blocks), CacheGroup(1, BLOCK, blocks, 1, window_tokens=BLOCK + 1)]
    )
    side = SchedulerSide(engine.config, engine.client, Adapters(""), groups, BOTH)
    side.bind_block_pool(SimpleNamespace(num_gpu_blocks=5 * blocks))
    engine.store(3, first_token=40_000)
    engine.wait_hits(3, first_token=40_000)
    table = list(range(1, 3 * blocks + 1))
    aborted, other = request("aborted", 40_000), request("other", 40_000)
    side.add_request(aborted)
    assert matched(side, aborted) == 3 * CHUNK
    side.allocated(aborted, (table, [0] * (3 * blocks - 1) + [99]), 3 * CHUNK)
    side.finish_request(aborted, ())
    side._loading.clear()  # so that nothing but the room is in the way of the same prefix
    side.add_request(other)
    (lookup,) = (id_ for id_ in engine.client.lookups if id_ != side.state("aborted").loading_lookup.id)
    wait_for(lambda: engine.client.poll() or engine.client.lookups[lookup].ready == 3, "the answer")
    assert side.matched_tokens(other, 0) is None, "both loads hold more blocks than there are"
    side.loads_finished({"aborted"}, set())
    assert matched(side, other) == 3 * CHUNK
    side.finish_request(other, ())
    assert not engine.client.lookups


def test_a_request_is_admitted_while_every_step_takes_long(engine: SmallEngine) -> None:
    """A lookup is old then whenever its request is asked for: it is made anew once, not each time."""
    clock = FakeClock()
    side = SchedulerSide(engine.config, engine.client, Adapters(""), GROUPS, BOTH, clock.monotonic)
    asked = request("long steps", 60_000)  # what is found is less than all
    side.add_request(asked)
    answers = []
    for _ in range(5):
        clock.advance(3 * FRESH_S)
        wait_for(lambda: is_answered(engine), "the server's answer")
        answers.append(side.matched_tokens(asked, 0))
        step(side)
    side.finish_request(asked, ())
    assert answers == [None, 0, 0, 0, 0]


def test_a_request_that_waits_for_its_turn_says_what_its_lookups_have_counted(engine: SmallEngine) -> None:
    clock = FakeClock()
    side = SchedulerSide(engine.config, engine.client, Adapters(""), GROUPS, BOTH, clock.monotonic)
    engine.store(2, first_token=80_000)
    engine.wait_hits(2, first_token=80_000)
    asked = request("waits", 80_000)  # what is found is less than all
    side.add_request(asked)
    counted = []
    for _ in range(3):
        wait_for(lambda: is_answered(engine), "the server's answer")
        clock.advance(2 * FRESH_S)
        step(side)  # takes the renewal before, sends another one
        lookup, renewal = side.state("waits").lookup, side.state("waits").renewal
        assert lookup is not None and renewal is not None
        counted.append((lookup.counted, renewal.counted))
    assert counted == [(0, 2), (2, 2), (2, 2)]
    wait_for(lambda: is_answered(engine), "the server's answer")
    assert matched(side, asked) == 2 * CHUNK
    side.finish_request(asked, ())


def is_answered(engine: SmallEngine) -> bool:
    engine.client.poll()
    return all(answer.is_answered for answer in engine.client.lookups.values())


def test_one_that_is_back_when_its_preemption_is_told_waits_for_nothing(engine: SmallEngine) -> None:
    """vLLM preempts what runs when its cache is reset, and may admit it before the connector hears of that."""
    side, asked = side_of(engine), request("back", 70_000)
    side.add_request(asked)
    assert matched(side, asked) == 0
    side.allocated(asked, (), 0)
    told = SimpleNamespace(preempted_req_ids={"back"}, num_scheduled_tokens={"back": 1})
    side.plan_step(told)
    assert not engine.client.lookups, "it holds leases that nobody will use"
    side.finish_request(asked, ())
