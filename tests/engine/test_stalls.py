"""What runs on a tier, and for how long: also of what fails, and of one tier beside another."""

import pytest

from tests.kit.fake_clock import FakeClock
from tiered_kv.engine.stalls import Stalls


def test_the_oldest_operation_of_each_tier_counts_while_it_runs() -> None:
    clock = FakeClock()
    stalls = Stalls(clock)

    def read() -> None:
        clock.advance(3)
        stalls.run(1, clock.advance, 2)
        stalls.run(2, write)
        seen.append((stalls.oldest_s(1), stalls.oldest_s(2)))

    def write() -> None:
        clock.advance(4)
        seen.append((stalls.oldest_s(1), stalls.oldest_s(2)))

    seen: list[tuple[float, float]] = []
    stalls.run(1, read)
    assert seen == [(9, 4), (9, 0)]
    assert stalls.oldest_s(1) == 0


def test_an_operation_that_raises_has_ended() -> None:
    clock = FakeClock()
    stalls = Stalls(clock)
    with pytest.raises(ZeroDivisionError):
        stalls.run(1, lambda: 1 // 0)
    clock.advance(100)
    assert stalls.oldest_s(1) == 0


def test_what_was_noticed_is_left_out_of_one_tier_and_of_no_other() -> None:
    clock = FakeClock()
    stalls = Stalls(clock)

    def hangs() -> tuple[float, float]:
        clock.advance(20)
        stalls.forget(1)
        return stalls.oldest_s(1), stalls.oldest_s(2)

    assert stalls.run(1, stalls.run, 2, stalls.run, 1, hangs) == (0, 20)
    assert stalls.oldest_s(2) == 0
