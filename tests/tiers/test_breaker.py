"""A breaker opens after failures in a row, costs nothing while it is open, and closes after a trial."""

import pytest

from tests.kit.fake_clock import FakeClock
from tiered_kv.errors import CapacityExceeded, TierUnavailable
from tiered_kv.testing.blobs import SampleChain
from tiered_kv.testing.faults import Fault, FaultyTier
from tiered_kv.testing.memory import MemoryTier
from tiered_kv.tiers.wrappers.breaker import (
    FAILURES_MAX,
    OPEN_FIRST_S,
    OPEN_LAST_S,
    Breaker,
    BreakerState,
    GuardedTier,
)

CHAIN = SampleChain()
NAME = CHAIN.name(0)


class Medium:
    """A memory tier that fails while ``fault`` says so, its breaker, and the clock."""

    def __init__(self):
        self.fault = None
        self.clock = FakeClock()
        self.breaker = Breaker(self.clock.monotonic)
        self.faulty = FaultyTier(MemoryTier(), lambda _number: self.fault)
        self.tier = GuardedTier(self.faulty, self.breaker)

    def ask(self, times=1):
        for _ in range(times):
            with pytest.raises(TierUnavailable):
                self.tier.contains(NAME)


@pytest.fixture
def medium():
    return Medium()


def test_failures_in_a_row_open_it_and_then_nothing_reaches_the_medium(medium):
    medium.fault = Fault.ERROR
    medium.ask(FAILURES_MAX)
    assert medium.breaker.state is BreakerState.OPEN and "operation=contains" in medium.breaker.reason
    before = medium.faulty.operation_count
    medium.fault = None
    for call in (
        lambda: medium.tier.contains(NAME),
        lambda: medium.tier.get_into(NAME, memoryview(bytearray(10))),
        lambda: medium.tier.put(NAME, CHAIN.blob(0).view()),
        lambda: medium.tier.delete(NAME),
        lambda: medium.tier.describe(bytes(16), b"{}"),
    ):
        with pytest.raises(TierUnavailable, match="left alone until a trial succeeds"):
            call()
    medium.tier.flush()
    assert medium.faulty.operation_count == before


def test_a_scan_passes_an_open_breaker_so_that_a_server_can_start(medium):
    medium.tier.put(NAME, CHAIN.blob(0).view())
    medium.breaker.trip("the self-test at start failed")
    assert [info.name for info in medium.tier.scan()] == [NAME]
    assert medium.breaker.is_open


def test_an_answer_in_between_starts_the_count_again(medium):
    for _ in range(20):
        medium.fault = Fault.ERROR
        medium.ask(FAILURES_MAX - 1)
        medium.fault = None
        assert not medium.tier.contains(NAME)
    assert medium.breaker.state is BreakerState.CLOSED and medium.breaker.opened_count == 0


def test_probes_that_are_answered_do_not_hide_reads_that_fail(medium):
    for _ in range(FAILURES_MAX):
        medium.fault = None
        assert not medium.tier.contains(NAME)
        medium.fault = Fault.ERROR
        with pytest.raises(TierUnavailable):
            medium.tier.get_into(NAME, memoryview(bytearray(10)))
    assert medium.breaker.is_open and "operation=get" in medium.breaker.reason


def test_puts_that_are_not_wanted_do_not_hide_those_before_them_that_fail(medium):
    for _ in range(FAILURES_MAX):
        medium.fault = None
        assert not medium.tier.put_if(NAME, CHAIN.blob(0).view(), lambda: False)
        medium.fault = Fault.ERROR
        with pytest.raises(TierUnavailable):
            medium.tier.put_if(NAME, CHAIN.blob(0).view(), lambda: True)
    assert medium.breaker.is_open and "operation=put" in medium.breaker.reason


def test_a_put_that_was_wanted_starts_the_count_again(medium):
    for _ in range(2 * FAILURES_MAX):
        medium.fault = Fault.ERROR
        with pytest.raises(TierUnavailable):
            medium.tier.put_if(NAME, CHAIN.blob(0).view(), lambda: True)
        medium.fault = None
        assert medium.tier.put_if(NAME, CHAIN.blob(0).view(), lambda: True)
    assert not medium.breaker.is_open


def test_a_full_medium_is_not_a_broken_one(medium):
    medium.fault = Fault.FULL
    for _ in range(2 * FAILURES_MAX):
        with pytest.raises(CapacityExceeded):
            medium.tier.put(NAME, CHAIN.blob(0).view())
    assert not medium.breaker.is_open


def test_a_trial_comes_later_and_later_while_it_fails_and_closes_when_it_succeeds(medium):
    breaker, clock = medium.breaker, medium.clock
    breaker.trip("it was said so")
    waited = []
    for _ in range(8):
        start_s = clock.now_s
        while not breaker.begin_trial():
            clock.advance(0.25)
        waited.append(clock.now_s - start_s)
        assert breaker.state is BreakerState.HALF_OPEN and not breaker.begin_trial()
        medium.ask()
        breaker.end_trial("still down")
    assert waited[0] == OPEN_FIRST_S and waited[-1] == OPEN_LAST_S and waited == sorted(waited)
    clock.advance(OPEN_LAST_S)
    assert breaker.begin_trial()
    breaker.end_trial(None)
    assert breaker.state is BreakerState.CLOSED and not medium.tier.contains(NAME)


def test_after_a_recovery_it_opens_for_a_short_time_again(medium):
    breaker, clock = medium.breaker, medium.clock
    for failure in ("down", "down", None):
        if not breaker.is_open:
            breaker.trip("down")
        clock.advance(OPEN_LAST_S)
        assert breaker.begin_trial()
        breaker.end_trial(failure)
    breaker.trip("down again")
    clock.advance(OPEN_FIRST_S)
    assert breaker.begin_trial() and breaker.opened_count == 2
