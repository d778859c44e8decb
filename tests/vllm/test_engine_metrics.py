"""What one engine's scheduler side is counted as, from real sessions with a real server."""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Gauge, Histogram
from prometheus_client import Counter as PromCounter

from tests.kit.server.clients import CHUNK, SmallEngine, poll_until, settings
from tests.kit.server.probe import figures, wait_ended, wait_written
from tests.kit.server.processes import end_server
from tests.sim.vllm.asking import come_to_rest, parameters, random_tokens
from tests.sim.vllm.asking import settings as patient
from tests.sim.vllm.engine import Setup, SimulatedEngine
from tiered_kv.vllm import engine_metrics as module
from tiered_kv.vllm.connector import TieredKVConnector
from tiered_kv.vllm.engine_metrics import CopyMeter, SchedulerMeter, TieredKVStats, hit_sources
from tiered_kv.vllm.requests import RequestState, SentLookup

pytestmark = pytest.mark.vllm


class Request:
    """What the meter reads of vLLM's."""

    request_id = "r"
    num_prompt_tokens = 1000


class Measured:
    """A small engine, whose lookups are counted as vLLM's requests are."""

    def __init__(self, root: Path) -> None:
        self.engine = SmallEngine.start(settings(root))
        self.client = self.engine.client
        self.counters: Counter[str] = Counter()
        self.now_s = 100.0
        self.meter = SchedulerMeter(self.client, self.counters, CHUNK, lambda: self.now_s)

    def look_up(self, chunks: int, start: int = 0, *, wait: bool = True) -> RequestState:
        """A request whose lookup is answered, after 0.25 s of its clock."""
        keys = self.engine.keys(chunks)
        number = self.client.lookup(keys.keys, keys.digests, start)
        assert number is not None
        lookup = SentLookup(number, self.client.generation, start, self.now_s)
        if wait:
            poll_until(self.client, lambda: self.client.lookups[number].is_done, "the answer")
            self.now_s += 0.25
            lookup.answered_s = self.now_s
        extras: Any = None
        return RequestState(Request(), extras, keys=keys, lookup=lookup)

    def search_goes_on(self, lookup: int) -> None:
        """The answer is as while a bucket is searched for two chunks more."""
        answer = self.client.lookups[lookup]
        self.client.lookups[lookup] = msgspec.structs.replace(answer, is_done=False, unknown=2)

    def give_up(self, state: RequestState) -> None:
        """The request is answered 0."""
        assert state.lookup is not None
        state.lookup.given_up = True
        self.client.release(state.lookup.id)
        self.meter.offered(state, 0)

    def take(self) -> TieredKVStats:
        while self.client.ended:
            self.meter.lookup_ended(self.client.ended.popleft())
        return self.meter.take() or TieredKVStats()

    def close(self) -> None:
        self.engine.close()


@pytest.fixture
def measured(root: Path) -> Iterator[Measured]:
    one = Measured(root)
    yield one
    one.close()


def counters(stats: TieredKVStats) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = stats.data["counters"]
    return found


def test_a_lookup_asks_one_tier_after_the_other(measured: Measured, root: Path) -> None:
    measured.engine.store(2)
    measured.engine.wait_hits(2)
    measured.take()
    state = measured.look_up(5, start=1)
    measured.meter.offered(state, CHUNK)
    measured.client.release(state.lookup.id)  # type: ignore[union-attr]
    taken = counters(measured.take())
    slot = measured.client.info.slot_bytes  # type: ignore[union-attr]
    assert taken["asked_tokens"] == {"host": 4 * CHUNK, "disk": 3 * CHUNK}
    assert taken["hit_tokens"] == {"host": CHUNK}
    assert taken["missed_tokens"] == {"host": 3 * CHUNK, "disk": 3 * CHUNK}
    assert taken["asked_bytes"] == {"host": 4 * slot, "disk": 3 * slot}
    assert taken["decisions"] == {"ready": 1}
    wait_written(root)


def test_what_came_from_disk_is_a_hit_of_the_disk_and_a_miss_of_memory(root: Path) -> None:
    first = SmallEngine.start(settings(root))
    first.store(3)
    first.wait_hits(3)
    wait_written(root)
    first.close()
    wait_ended(root)
    measured = Measured(root)
    state = measured.look_up(3)
    measured.meter.offered(state, None)
    measured.now_s += 0.5
    measured.meter.offered(state, None)
    measured.meter.offered(state, 3 * CHUNK)
    state.offer, state.loading_lookup = (16, 3 * CHUNK - 16), state.lookup
    measured.meter.allocated(state, 3 * CHUNK - 16)
    assert measured.meter.sources("r") == {"disk": 3 * CHUNK - 16}
    measured.meter.loads_finished({"r", "another connector's"}, set())
    measured.client.release(state.lookup.id)  # type: ignore[union-attr]
    stats = measured.take()
    measured.close()
    taken = counters(stats)
    assert taken["asked_tokens"] == {"host": 3 * CHUNK, "disk": 3 * CHUNK}
    assert taken["hit_tokens"] == {"disk": 3 * CHUNK}
    assert taken["missed_tokens"] == {"host": 3 * CHUNK}
    assert taken["loaded_tokens"] == {"disk": 3 * CHUNK - 16}
    assert taken["decisions"] == {"awaited": 1}
    assert stats.samples("lookup_wait_seconds") == [0.25]
    assert stats.samples("promotion_wait_seconds") == [0.5]


def test_a_request_that_got_nothing_is_counted_once(measured: Measured) -> None:
    state = measured.look_up(2)
    measured.give_up(state)
    for _ in range(3):  # vLLM asks again until the request is admitted
        measured.meter.offered(state, 0)
        assert counters(measured.take()).get("decisions", {"miss": 1}) == {"miss": 1}
        measured.meter.offered(state, 0)
    assert not measured.meter._outcomes


def test_a_request_that_was_told_to_go_on_without_a_promotion_is_a_decision(measured: Measured) -> None:
    state = measured.look_up(2)
    assert state.lookup is not None
    measured.search_goes_on(state.lookup.id)
    measured.give_up(state)
    assert counters(measured.take())["decisions"] == {"not_awaited": 1}


def test_a_request_that_waits_no_longer_takes_what_arrived(measured: Measured) -> None:
    measured.engine.store(2)
    measured.engine.wait_hits(2)
    measured.take()
    state = measured.look_up(4)
    assert state.lookup is not None
    measured.search_goes_on(state.lookup.id)
    measured.meter.offered(state, None)
    measured.meter.offered(state, 2 * CHUNK)
    measured.client.release(state.lookup.id)
    assert counters(measured.take())["decisions"] == {"took_what_arrived": 1}


def test_failed_loads_load_nothing(measured: Measured) -> None:
    measured.engine.store(1)
    measured.engine.wait_hits(1)
    measured.take()
    state = measured.look_up(1)
    state.offer, state.loading_lookup = (0, CHUNK), state.lookup
    measured.meter.allocated(state, CHUNK)
    measured.meter.loads_finished({"r"}, {"r"})
    assert "loaded_tokens" not in counters(measured.take())


def test_counters_of_the_scheduler_side_are_told_as_what_they_are(measured: Measured) -> None:
    measured.take()
    measured.counters.update(
        lookups=3, loads=2, stores=4, lookup_timeout=1, store_dropped_no_slot=5, load_tokens=9, pins_sent=2
    )
    assert counters(measured.take()) == {
        "lookups": {"": 3},
        "loads": {"": 2},
        "stored_tokens": {"": 4 * CHUNK},
        "failures": {"lookup_timeout": 1},
        "dropped_chunks": {"no_slot": 5},
        "events": {"pins_sent": 2},
    }
    measured.counters["lookups"] += 1
    assert counters(measured.take()) == {"lookups": {"": 1}}
    assert measured.meter.take() is None


def test_figures_are_asked_for_now_and_then_and_never_waited_for(measured: Measured) -> None:
    assert measured.meter.take() is not None  # asks
    poll_until(measured.client, lambda: measured.client.figures is not None, "the figures")
    stats = measured.meter.take()
    assert stats is not None
    assert stats.data["gauges"]["server_capacity_bytes"]["host"] == 8 << 20
    assert stats.data["gauges"]["server_resident_chunks"] == {"host": 0.0, "disk": 0.0}
    for _ in range(3):
        measured.client.poll()
        assert measured.meter.take() is None
    measured.now_s += module.FIGURES_INTERVAL_S
    measured.meter.take()
    poll_until(measured.client, lambda: measured.client.figures is not None, "the next figures")


def test_what_a_server_counted_is_zero_with_the_next_server(measured: Measured, root: Path) -> None:
    shown: dict[str, dict[str, float]] = {}

    def show() -> None:
        """Take the server's figures of now, as the API server does, whose gauges keep what was told last."""
        measured.now_s += module.FIGURES_INTERVAL_S
        measured.take()
        poll_until(measured.client, lambda: measured.client.figures is not None, "the figures")
        for name, values in measured.take().data["gauges"].items():
            shown.setdefault(name, {}).update(values)

    measured.engine.store(3)
    wait_written(root)
    show()
    assert shown["server_stored_chunks"] == {"host,new": 3, "disk,written": 3}
    assert shown["server_operations"]["disk,put,ok"] == 3
    end_server(root)
    measured.engine.wait_lost()
    measured.engine.rejoin()
    show()
    assert shown["server_stored_chunks"] == {"host,new": 0, "disk,written": 0, "disk,found": 3}
    assert shown["server_operations"]["disk,put,ok"] == 0
    assert shown["server_operation_bytes"]["disk,put"] == 0
    assert shown["server_capacity_bytes"]["host"] == 8 << 20


def test_figures_of_another_version_are_left_alone(measured: Measured, caplog: pytest.LogCaptureFixture) -> None:
    measured.meter.take()
    for _ in range(2):
        measured.client.figures = b'{"version": 7}'
        measured.meter.take()
    assert len([one for one in caplog.records if "it is of another version" in one.message]) == 1


def test_a_lost_session_is_shown_and_forgets_what_was_not_counted(measured: Measured, root: Path) -> None:
    measured.take()
    state = measured.look_up(1)
    measured.meter.offered(state, None)
    assert measured.meter._outcomes
    end_server(root)
    measured.engine.wait_lost()
    stats = measured.take()
    assert stats.data["gauges"]["connected"] == {"": 0.0}
    assert not measured.meter._outcomes
    measured.meter.offered(state, 0)
    assert not measured.meter._outcomes


def test_an_engine_that_never_says_anything_is_shown_as_one_without_a_session() -> None:
    """One whose model is refused when it starts has no part of ours that could say so."""
    registry, config = CollectorRegistry(), SimpleNamespace(kv_transfer_config=None)
    kinds = {kind: partial(kind, registry=registry) for kind in (PromCounter, Gauge, Histogram)}
    engines: dict[int, list[object]] = {number: ["m", str(number)] for number in (0, 1)}
    shown = TieredKVConnector.build_prom_metrics(config, kinds, ["model_name", "engine"], engines)

    shown.observe({"gauges": {"connected": {"": 1.0}}}, engine_idx=1)

    said = [
        registry.get_sample_value("vllm:tiered_kv_connected", {"model_name": "m", "engine": str(number)})
        for number in engines
    ]
    assert said == [0.0, 1.0]


def test_copies_are_counted_per_rank() -> None:
    meter = CopyMeter()
    assert meter.take() is None
    meter.ended("load", 0.5, 100)
    meter.ended("save", 0.25, 30)
    meter.ended("load", 0.75, 10)
    taken = meter.take()
    assert taken is not None
    assert counters(taken) == {"loaded_bytes": {"": 110}, "stored_bytes": {"": 30}}
    assert taken.samples("load_seconds") == [0.5, 0.75]
    assert meter.take() is None


def test_vllm_is_told_where_hits_came_from_in_its_own_words() -> None:
    pytest.importorskip("vllm.v1.metrics.cache_hit_source", reason="vLLM asks since 0.32")
    sources = hit_sources({"host": 3, "disk": 4, "object": 5})
    assert {source.value: count for source, count in sources.items()} == {
        "host": 3,
        "disk": 4,
        "external_unspecified": 5,
    }


@pytest.mark.slow
def test_a_request_whose_blocks_the_gpu_evicted_before_its_turn_counts_as_one_lookup(root: Path) -> None:
    engine, tokens = SimulatedEngine(Setup(connector=patient(root), pool_blocks=64)), random_tokens(Random(1), 43)
    try:
        engine.add("first", tokens, parameters(1))
        come_to_rest(engine)
        before = figures(root)["tokens"]
        engine.add("second", tokens, parameters(1))
        assert engine.scheduler.reset_prefix_cache()
        come_to_rest(engine)
        told = figures(root)["tokens"]
        assert engine.connector._scheduler.side.counters["lookups"] == 3
        assert [told[name] - before[name] for name in ("lookups", "asked_chunks", "hit_chunks")] == [1, 5, 5]
    finally:
        engine.close()
        end_server(root)
