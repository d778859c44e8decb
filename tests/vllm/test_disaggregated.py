"""Disaggregated prefill: what a producer tells, and how long a consumer waits for it."""

import logging
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.kit.server.probe import figures
from tests.kit.server.processes import end_server
from tests.sim.vllm.asking import come_to_rest, parameters, random_tokens, settings
from tests.sim.vllm.checks import leaks, server_leaks
from tests.sim.vllm.engine import Setup, SimulatedEngine
from tiered_kv.config import Config
from tiered_kv.keys.tags import tag_digest
from tiered_kv.vllm.disaggregated import ASK_AGAIN_S, DisaggregatedPrefill
from tiered_kv.vllm.drafts import Drafts
from tiered_kv.vllm.engine_role import EngineRole
from tiered_kv.vllm.kv_groups import CacheGroup, CacheGroups
from tiered_kv.vllm.request_lookups import RequestLookups
from tiered_kv.vllm.request_params import RequestParams, RequestParamsReader
from tiered_kv.vllm.requests import RequestState, SentLookup
from tiered_kv.vllm.save_queue import ALL_DONE

pytestmark = pytest.mark.vllm

CHUNK = 64
RATE = 1024.0
GROUPS = CacheGroups([CacheGroup(0, CHUNK // 2, 2, 2)])


class Client:
    """A session of which only releases are seen."""

    def __init__(self) -> None:
        self.released: list[int] = []
        self.lookups: dict[int, Any] = {}
        self.is_ready = True
        self.generation = 0

    def release(self, lookup_id: int, *, is_asked_anew: bool = False) -> None:
        self.released.append(lookup_id)


class World:
    def __init__(
        self,
        *,
        is_producer: bool = False,
        drafts: Drafts | None = None,
        chunks_per_s: float = RATE / CHUNK,
        **more: Any,
    ) -> None:
        self.client, self.counters, self.now_s = Client(), Counter[str](), 100.0
        config = Config(storage_uri="file:///unused", chunk_tokens=CHUNK, **more)
        unused: Any = None
        client: Any = self.client
        role = EngineRole(may_load=not is_producer, may_store=True, has_prefix_caching=True, drafts=drafts)
        lookups = RequestLookups(config, client, GROUPS, role, unused, unused, self.counters, lambda: self.now_s)
        prefill: Any = SimpleNamespace(tokens_per_s=chunks_per_s * CHUNK)
        self.prefill = DisaggregatedPrefill(
            config,
            client,
            GROUPS,
            role,
            lookups,
            prefill,
            self.counters,
            lambda: self.now_s,
        )

    def request(self, tokens: int, **params: Any) -> RequestState:
        request = SimpleNamespace(
            request_id="r", num_prompt_tokens=tokens, num_tokens=tokens, skip_reading_prefix_cache=False
        )
        request.kv_transfer_params = None
        plain: Any = SimpleNamespace(may_look_up=True)  # extras of a request without an adapter
        self.state = RequestState(request, plain, RequestParams(**params))
        return self.state


def test_producer_tells_the_whole_chunks_it_dealt_with():
    world = World(is_producer=True)
    world.request(5 * CHUNK + 10)
    world.state.stored = 5
    assert world.prefill.promise(world.state) == {"tiered_kv.stored_tokens": 5 * CHUNK}


def test_nothing_is_told_twice_nor_by_who_loads_nor_of_what_was_not_stored():
    world = World(is_producer=True)
    world.request(5 * CHUNK)
    assert world.prefill.promise(world.state) is None
    world.state.stored = ALL_DONE  # a window passed before its chunk was stored
    assert world.prefill.promise(world.state) is None
    world.state.stored = 5
    assert World().prefill.promise(world.state) is None
    assert world.prefill.promise(world.state) is not None
    assert world.prefill.promise(world.state) is None, "two of ours below MultiConnector must not tell the same name"


@pytest.mark.parametrize(
    ("params", "is_told"), [({"do_remote_decode": True}, True), ({"do_remote_decode": False}, False), ([], False)]
)
def test_engine_that_does_both_tells_where_the_router_said_that_the_request_goes_on(params: Any, is_told: bool):
    world = World()
    world.request(2 * CHUNK).request.kv_transfer_params = params
    world.state.stored = 2
    assert (world.prefill.promise(world.state) is not None) is is_told


def test_the_tag_goes_with_it_so_that_the_consumer_stores_under_it() -> None:
    world = World(is_producer=True)
    world.request(5 * CHUNK)
    world.state.stored = 5
    world.state.request.kv_transfer_params = {"tiered_kv.tag": "tenant-a"}
    world.state.params = RequestParams(tag=tag_digest("tenant-a"))
    assert world.prefill.promise(world.state) == {"tiered_kv.stored_tokens": 5 * CHUNK, "tiered_kv.tag": "tenant-a"}


@pytest.mark.parametrize("params", [{}, {"stored_tokens": 0}])
def test_request_that_was_told_nothing_is_answered_at_once(params: dict[str, Any]):
    world = World()
    assert world.prefill.matched(world.request(4 * CHUNK, **params), 0, 0) == 0


def test_consumer_asks_again_until_all_is_there_and_then_takes_it():
    world = World()
    world.request(4 * CHUNK + 5, stored_tokens=4 * CHUNK)
    world.state.lookup = SentLookup(7, 0, 0, world.now_s)
    assert world.prefill.matched(world.state, 0, 2 * CHUNK) is None
    assert world.state.lookup is None and world.client.released == [7]
    world.state.lookup = SentLookup(8, 0, 0, world.now_s)
    assert world.prefill.matched(world.state, 0, None) is None, "the new lookup has no answer yet"
    world.now_s += ASK_AGAIN_S / 2
    assert world.prefill.matched(world.state, 0, 3 * CHUNK) is None
    assert world.client.released == [7], "not asked again at every step"
    assert world.prefill.matched(world.state, 0, 4 * CHUNK) == 4 * CHUNK
    assert world.counters == {"handovers_awaited": 1}


@pytest.mark.parametrize("drops_block", [True, False])
def test_consumer_with_a_draft_does_not_wait_for_what_it_could_not_load(drops_block: bool):
    """A prompt of whole chunks is stored whole; vLLM computes its last block, and the one before it for EAGLE."""
    world = World(drafts=Drafts(drops_block=drops_block, draft_tokens=2, drafted_len=4096))
    world.request(4 * CHUNK, stored_tokens=4 * CHUNK)
    blocks = 2 if drops_block else 1
    loadable = 4 * CHUNK - blocks * GROUPS.block_tokens
    assert world.prefill.matched(world.state, 0, loadable) == loadable
    assert not world.counters
    assert world.prefill.matched(world.state, 0, loadable - GROUPS.block_tokens) is None, "it waits for the rest"


def test_wait_is_no_longer_than_computing_what_is_missing():
    world = World()
    world.request(4 * CHUNK, stored_tokens=4 * CHUNK)
    assert world.prefill.matched(world.state, CHUNK, CHUNK) is None
    world.now_s += 2 * CHUNK / RATE
    assert world.prefill.matched(world.state, CHUNK, CHUNK) is None
    world.now_s += 0.001
    for _ in range(2):
        assert world.prefill.matched(world.state, CHUNK, CHUNK) == CHUNK
    assert world.counters == {"handovers_awaited": 1, "handovers_short": 1}


def test_wait_that_the_settings_fix_is_kept():
    world = World(promotion_wait_ms=5000.0)
    world.request(4 * CHUNK, stored_tokens=4 * CHUNK)
    assert world.prefill.matched(world.state, 0, 0) is None
    world.now_s += 5.0
    assert world.prefill.matched(world.state, 0, 0) is None
    world.now_s += 0.001
    assert world.prefill.matched(world.state, 0, 0) == 0


def test_claim_longer_than_the_prompt_waits_for_no_more_than_the_prompt():
    world = World()
    assert world.prefill.matched(world.request(4 * CHUNK + 9, stored_tokens=1 << 30), 0, 4 * CHUNK) == 4 * CHUNK


@pytest.mark.parametrize("claim", [10**5, 1 << 31, 1 << 63, 1 << 200])
def test_a_false_claim_costs_the_server_a_handful_of_lookups(claim: int):
    """Asked for at every step of an engine, by a client that tells what nobody stored, for as long as it may wait."""
    world = World(chunks_per_s=0.1)
    world.request(1000 * CHUNK, stored_tokens=claim)
    longest_s, answers, lookups = 10.0, [], 0
    for _ in range(12_000):
        world.state.lookup = SentLookup(len(answers), 0, 0, world.now_s)  # the side sends a new one when it is asked
        answers.append(world.prefill.matched(world.state, 0, 0))
        lookups += world.state.lookup is None
        world.now_s += 0.001
    waited_s = answers.index(0) * 0.001
    assert longest_s - 0.01 < waited_s <= longest_s + 0.01
    assert set(answers[answers.index(0) :]) == {0}, "waited for once"
    assert lookups == len(world.client.released) and 5 <= lookups <= 11
    assert world.counters == {"handovers_awaited": 1, "handovers_short": 1}


@pytest.mark.parametrize("value", [-1, True, 1.5, float("nan"), float("inf"), "10000", [4096], {"tokens": 1}])
def test_what_is_no_number_of_tokens_is_not_waited_for(value: Any):
    counters: Counter[str] = Counter()
    request = SimpleNamespace(request_id="r", kv_transfer_params={"tiered_kv.stored_tokens": value})
    controls = RequestParamsReader(counters, lambda: 0.0).read(request)
    assert (controls.stored_tokens, counters["control_refused"]) == (0, 1)


@pytest.mark.parametrize("change", ["failed", "unread", "no session"])
def test_nothing_is_awaited_that_could_not_be_loaded(change: str):
    world = World()
    world.request(4 * CHUNK, stored_tokens=4 * CHUNK, skips_load=change == "unread")
    world.state.is_load_failed = change == "failed"
    world.client.is_ready = change != "no session"
    assert world.prefill.matched(world.state, 0, 0) == 0


@pytest.mark.slow
@pytest.mark.parametrize("held", [0, 2])
def test_a_request_that_waits_for_a_handover_in_vain_counts_as_one_lookup(held: int, tmp_path: Path):
    """However often it looked for the rest."""
    logging.disable(logging.ERROR)
    root, source = tmp_path / "cache", random.Random(1)
    engine = SimulatedEngine(Setup(connector=settings(root) | {"promotion_wait_ms": 200}, pool_blocks=64))
    try:
        prompt = random_tokens(source, 5 * 8 + 3)
        if held:
            engine.add("stores", prompt[: held * 8], parameters(1))
            come_to_rest(engine)
            assert engine.scheduler.reset_prefix_cache()
        before = Counter(flat(figures(root)["tokens"]))
        awaits = parameters(1)
        awaits.extra_args = {"kv_transfer_params": {"tiered_kv.stored_tokens": 5 * 8}}
        engine.add("awaits", prompt, awaits)
        come_to_rest(engine)
        side = engine.connector._scheduler.side
        assert side.counters["handovers_short"] == 1 and side.counters["lookups"] - bool(held) > 2
        told = Counter(flat(figures(root)["tokens"]))
        told.subtract(before)
        counted = {name: told[name] for name in ("lookups", "prompt_chunks", "asked_chunks", "hit_chunks")}
        assert counted == {"lookups": 1, "prompt_chunks": 5, "asked_chunks": 5, "hit_chunks": held}
        assert engine.findings.wrong == [] and leaks(engine) == [] and server_leaks(engine, root) == []
    finally:
        engine.close()
        end_server(root)
        logging.disable(logging.NOTSET)


def flat(told: dict[str, Any]) -> dict[str, int]:
    return {name: value for name, value in told.items() if isinstance(value, int)}
