"""When a request's pin is told to the server, and of which chunk."""

import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.kit.server.processes import end_server
from tests.sim.vllm.asking import come_to_rest, parameters, random_tokens, settings
from tests.sim.vllm.engine import Setup, SimulatedEngine
from tiered_kv.keys.tags import NO_TAG
from tiered_kv.vllm import save_queue
from tiered_kv.vllm.request_pins import WAITING_MAX, RequestPins, SessionEnd

pytestmark = pytest.mark.vllm

KEYS = [bytes([i]) * 16 for i in range(5)]


@dataclass
class Around:
    """What pins need of the session and of the store path, and what came of them."""

    generation: int = 0
    is_ready: bool = True
    takes: bool = True
    stored: set[bytes] = field(default_factory=set)
    under_way: set[bytes] = field(default_factory=set)
    pinned: list[tuple[bytes, float]] = field(default_factory=list)
    told: list[tuple[bytes, bytes | str]] = field(default_factory=list)
    counters: Counter[str] = field(default_factory=Counter)

    def pin(self, key: bytes, ttl_s: float, tag: bytes) -> bool:
        assert tag == NO_TAG
        self.pinned += [(key, ttl_s)] if self.takes else []
        return self.takes

    def tell_state(self, session: bytes, tag: bytes, key: bytes) -> bool:
        assert tag == NO_TAG
        self.told += [(session, key)] if self.takes else []
        return self.takes

    def hint(self, action: str, session: bytes, tag: bytes) -> bool:
        assert tag == NO_TAG
        self.told += [(session, action)] if self.takes else []
        return self.takes

    def is_stored(self, key: bytes) -> bool:
        return key in self.stored

    def is_under_way(self, key: bytes) -> bool:
        return key in self.under_way

    def pins(self) -> RequestPins:
        both: Any = self
        return RequestPins(both, both, self.counters)


@pytest.mark.parametrize(
    ("held", "stored", "expected"), [(5, (), 4), (9, (), 4), (2, (), 1), (2, (2, 3), 3), (0, (0,), 0), (2, (0,), 1)]
)
def test_the_deepest_chunk_that_is_held_is_pinned(held: int, stored: tuple[int, ...], expected: int) -> None:
    around = Around(stored={KEYS[i] for i in stored})
    around.pins().want(KEYS, held, 60)
    assert around.pinned == [(KEYS[expected], 60)]
    assert around.counters == {"pins_sent": 1}


def test_a_pin_waits_for_its_copies_and_takes_what_became_of_them() -> None:
    around = Around(under_way={KEYS[3], KEYS[4]})
    pins = around.pins()
    pins.want(KEYS, 3, 60)
    around.under_way, around.stored = {KEYS[4]}, {KEYS[3]}
    pins.send()
    assert around.pinned == []
    around.under_way = set()  # the last chunk got no slot
    pins.send()
    pins.send()
    assert around.pinned == [(KEYS[3], 60)]


def test_nothing_that_is_held_means_no_pin() -> None:
    around = Around()
    around.pins().want(KEYS, 0, 60)
    around.pins().want([], 0, 60)
    assert around.pinned == [] and around.counters == {"pins_of_nothing": 2}


def test_pins_of_a_session_that_is_over_or_reset_are_dropped() -> None:
    around = Around(under_way=set(KEYS))
    pins = around.pins()
    pins.want(KEYS, 0, 60)
    around.under_way, around.generation = set(), 1
    pins.send()
    around.under_way = set(KEYS)
    pins.want(KEYS, 0, 60)
    pins.reset()
    around.under_way = set()
    pins.send()
    around.takes = False
    pins.want(KEYS, 5, 60)
    assert around.pinned == [] and around.counters == {"pins_dropped": 3}


def test_waiting_pins_are_bounded() -> None:
    around = Around(under_way=set(KEYS))
    pins = around.pins()
    for _ in range(WAITING_MAX + 7):
        pins.want(KEYS, 0, 60)
    assert around.counters == {"pins_dropped": 7}


def test_what_another_engine_goes_on_with_is_told_in_the_same_way_and_counted_apart() -> None:
    around = Around(stored={KEYS[3]}, under_way={KEYS[4]})
    pins = around.pins()
    pins.want(KEYS, 2, 0)
    assert not around.pinned, "a copy that runs may still be dropped"
    around.under_way.clear()
    pins.send()
    assert around.pinned == [(KEYS[3], 0)] and around.counters == {"handovers_sent": 1}


def test_a_sessions_state_is_told_before_its_pin_and_its_end_after_it() -> None:
    around = Around(stored={KEYS[3]}, under_way={KEYS[4]})
    pins = around.pins()
    pins.want_state(KEYS, 2, SessionEnd(b"run", NO_TAG, ("demote", "release")))
    pins.want(KEYS, 2, 60)
    assert not around.told and not around.pinned, "a copy that runs may still be dropped"
    around.under_way.clear()
    pins.send()
    assert around.told == [(b"run", KEYS[3]), (b"run", "demote"), (b"run", "release")]
    assert around.counters == {"session_states_sent": 1, "hints_sent": 2, "pins_sent": 1}


def test_a_session_ends_also_where_nothing_of_its_last_request_is_held() -> None:
    around = Around()
    around.pins().want_state([], 0, SessionEnd(b"run", NO_TAG, ("release",)))
    assert around.told == [(b"run", "release")]
    assert around.counters == {"session_states_of_nothing": 1, "hints_sent": 1}
    around.takes = False
    around.pins().want_state(KEYS, 5, SessionEnd(b"run", NO_TAG, ("release",)))
    around.pins().prefetch(b"run", NO_TAG)
    assert around.counters["session_states_dropped"] == 1 and around.counters["hints_dropped"] == 2


@pytest.mark.slow
def test_what_waits_is_told_when_its_chunks_are_dropped_for_want_of_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No copy ends then, and the engine may be idle from there on."""
    monkeypatch.setattr(save_queue, "QUEUED_MAX_S", 0.1)
    root, source = tmp_path / "cache", random.Random(1)
    engine = SimulatedEngine(Setup(connector=settings(root), pool_blocks=64))
    try:
        side, prompt = engine.connector._scheduler.side, random_tokens(source, 5 * 8 + 3)
        engine.add("stores", prompt[: 2 * 8], parameters(1))
        come_to_rest(engine)
        monkeypatch.setattr(side.client, "take_slot", lambda: None)
        ends = parameters(1)
        ends.extra_args = {
            "kv_transfer_params": {"tiered_kv.session_id": "s", "tiered_kv.release": True, "tiered_kv.pin_ttl_s": 60}
        }
        engine.add("ends", prompt, ends)
        come_to_rest(engine)
        assert side.counters["store_dropped_no_slot"] == 3
        told = {name: side.counters[name] for name in ("session_states_sent", "hints_sent", "pins_sent")}
        assert told == {"session_states_sent": 1, "hints_sent": 1, "pins_sent": 1}
    finally:
        engine.close()
        end_server(root)
