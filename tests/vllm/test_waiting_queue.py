"""Whose turn it is among waiting requests: who is held up at nobody's cost, and who is looked up ahead of its turn."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.kit.fake_clock import FakeClock
from tiered_kv.vllm.requests import RequestState
from tiered_kv.vllm.wait_policy import FRESH_S, LOOK_EVERY_S, NEXT_MAX, TURNS_MAX, WaitingQueue

LONGEST_S = 10.0


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def queue_of(clock: FakeClock, *, is_by_priority: bool = False) -> WaitingQueue:
    return WaitingQueue(clock.monotonic, LONGEST_S, is_by_priority=is_by_priority)


def request(queue: WaitingQueue, name: str, priority: int = 0) -> RequestState:
    extras: Any = None
    state = RequestState(SimpleNamespace(request_id=name, priority=priority, num_prompt_tokens=1), extras)
    queue.add(state)
    return state


def names(states: list[RequestState]) -> list[str]:
    return [state.request.request_id for state in states]


def test_the_next_requests_are_those_that_came_first(clock: FakeClock) -> None:
    queue = queue_of(clock)
    for number in range(2 * NEXT_MAX):
        request(queue, f"r{number}", priority=-number)
    queue.remove("r1")
    assert names(queue.end_step()) == ["r0", *(f"r{n}" for n in range(2, NEXT_MAX + 1))]
    assert queue.end_step() == [], "every step would cost too much"
    clock.advance(LOOK_EVERY_S)
    assert queue.end_step()


def test_with_the_priority_policy_they_are_those_of_the_lowest_number(clock: FakeClock) -> None:
    queue = queue_of(clock, is_by_priority=True)
    states = [request(queue, f"r{number}", priority=-(number % 2)) for number in range(4)]
    assert names(queue.end_step()) == ["r1", "r3", "r0", "r2"]
    assert sorted(states, key=queue.turn_of) == [states[1], states[3], states[0], states[2]]


def test_who_waits_for_room_is_held_up_while_one_before_it_waits_for_the_cache(clock: FakeClock) -> None:
    queue = queue_of(clock)
    first, second = request(queue, "first"), request(queue, "second")
    queue.asked(first)
    queue.hold_up_others()
    queue.asked(second)
    assert queue.is_held_up(second) and second.turn_s is None
    queue.end_step()
    clock.advance(0.1)
    queue.asked(second)
    assert not queue.is_held_up(second) and second.turn_s == clock.monotonic(), "it has not paid for what it waited"


def test_a_load_holds_up_who_waits_for_its_room_and_not_for_ever(clock: FakeClock) -> None:
    queue = queue_of(clock)
    state = request(queue, "second")
    queue.load_began("first")
    queue.asked(state)
    assert queue.is_held_up(state)
    clock.advance(LONGEST_S / 2)
    queue.load_began("other")  # one after the other
    clock.advance(LONGEST_S / 2 + 1)
    queue.asked(state)
    assert not queue.is_held_up(state), "nobody is before it any more"
    later = request(queue, "later")
    assert queue.is_held_up(later)
    queue.load_ended("first")
    queue.load_ended("other")
    assert not queue.is_held_up(later)


def test_a_turn_begins_anew_when_vllm_did_not_ask_for_a_while(clock: FakeClock) -> None:
    queue = queue_of(clock)
    state = request(queue, "r")
    queue.asked(state)
    state.is_asked_anew = True
    begun_s = state.turn_s
    for _ in range(5):
        clock.advance(FRESH_S)
        queue.asked(state)
    assert (state.turn_s, state.is_asked_anew) == (begun_s, True) and queue.is_asked_for(state)
    pause(queue, clock)
    assert not queue.is_asked_for(state)
    queue.asked(state)
    assert (state.turn_s, state.is_asked_anew) == (clock.monotonic(), False)


def pause(queue: WaitingQueue, clock: FakeClock) -> None:
    """vLLM takes steps in which it does not ask."""
    queue.end_step()
    queue.end_step()
    clock.advance(FRESH_S + 0.1)


def test_a_step_that_takes_long_begins_no_turn(clock: FakeClock) -> None:
    queue = queue_of(clock)
    state = request(queue, "r")
    queue.asked(state)
    begun_s = state.turn_s
    for _ in range(5):
        queue.end_step()
        clock.advance(3 * FRESH_S)
        queue.asked(state)
    assert state.turn_s == begun_s


def test_pauses_do_not_begin_turns_for_ever(clock: FakeClock) -> None:
    queue = queue_of(clock)
    state = request(queue, "r")
    begun = set()
    for _ in range(3 * TURNS_MAX):
        queue.asked(state)
        begun.add(state.turn_s)
        pause(queue, clock)
    assert len(begun) == TURNS_MAX


def test_a_preempted_request_keeps_its_turn(clock: FakeClock) -> None:
    queue = queue_of(clock)
    first, second = request(queue, "first"), request(queue, "second")
    queue.remove("first")
    queue.add(first)
    assert queue.turn_of(first) < queue.turn_of(second)


def test_a_stream_of_urgent_requests_does_not_hold_up_for_ever(clock: FakeClock) -> None:
    queue = queue_of(clock, is_by_priority=True)
    state = request(queue, "patient", priority=9)
    steps = 0
    is_held_up = True
    while is_held_up and steps < 1000:
        urgent = request(queue, f"urgent {steps}")
        queue.asked(urgent)
        queue.hold_up_others()
        queue.asked(state)
        is_held_up = queue.is_held_up(state)
        queue.end_step()
        queue.remove(f"urgent {steps - 1}")
        clock.advance(0.1)
        steps += 1
    assert steps * 0.1 <= LONGEST_S + 1
