"""How long a request waits for a slower tier: as long as it pays, and never long where no cache would be faster."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.vllm.wait_policy import (
    PREFILL_TOKENS_PER_S_DEFAULT,
    TRUSTED_SHARE,
    UNPROVEN_SHARE,
    PrefillRate,
    WaitPolicy,
    WaitState,
    longest_wait_s,
)

RATE = 1000.0
CHUNK = 256
STEP_S = 0.001


def is_worth_waiting(waited_s: float, wait: WaitState, rate: float) -> bool:
    return waited_s <= longest_wait_s(wait, rate)


@pytest.mark.parametrize(
    ("waited_s", "arrived", "missing", "eta_s", "expected"),
    [
        (0.24, 0, 1000, 0.1, True),  # twice what it should need, and 5 % of a second
        (0.26, 0, 1000, 0.1, False),
        (0.54, 0, 1000, 0.4, True),  # never more than half of the second that computing takes, and 5 % of it
        (0.56, 0, 1000, 0.4, False),
        (0.04, 0, 1000, 0.6, True),  # hardly faster than computing: the unproven share alone
        (0.06, 0, 1000, 0.6, False),
        (0.44, 400, 1000, 0.6, True),  # but what arrived has saved 0.4 s
        (0.46, 400, 1000, 0.6, False),
        (0.64, 400, 1000, 0.1, True),
        (0.66, 400, 1000, 0.1, False),
        (0.00, 0, 1000, 1.1, False),  # slower than computing: not a moment
        (0.00, 400, 1000, 1.1, False),  # nor is what arrived spent on it
        (0.00, 400, 1000, math.inf, False),  # the tier delivers nothing
        (0.04, 0, 1000, None, True),  # never measured: the unproven share
        (0.06, 0, 1000, None, False),
        (0.06, 400, 1000, None, False),
        (0.00, 1000, 0, 0.0, False),  # all here: nothing to wait for
    ],
)
def test_waits_while_it_pays(waited_s: float, arrived: int, missing: int, eta_s: float | None, expected: bool) -> None:
    first = (1, None if eta_s is None else min(eta_s, 0.05))
    parts = [first, (missing, eta_s)] if missing else []
    assert is_worth_waiting(waited_s, WaitState(0.0, arrived, parts), RATE) is expected


def test_a_tier_that_is_hardly_faster_is_not_waited_for_if_its_first_chunk_takes_too_long() -> None:
    assert is_worth_waiting(0.04, WaitState(0.0, 0, [(250, 0.05), (1000, 0.6)]), RATE)
    assert not is_worth_waiting(0.00, WaitState(0.0, 0, [(250, 0.3), (1000, 0.6)]), RATE)
    assert is_worth_waiting(0.40, WaitState(0.0, 400, [(250, 0.3), (1000, 0.6)]), RATE), "what arrived pays for it"


def test_a_fast_tiers_part_is_waited_for_although_the_rest_comes_from_a_slow_one() -> None:
    """The disk has 1,000 tokens and the bucket 3,000 more, which would take longer than computing them."""
    assert is_worth_waiting(0.2, WaitState(0.0, 0, [(1000, 0.1), (4000, 9.0)]), RATE)
    assert not is_worth_waiting(0.2, WaitState(0.0, 0, [(4000, 9.0)]), RATE)
    assert not is_worth_waiting(0.2, WaitState(0.0, 1000, [(3000, 8.9)]), RATE), "the disk's part is here"


@pytest.mark.parametrize(
    ("waited_s", "arrived", "missing", "search_s", "expected"),
    [
        (0.04, 0, 0, None, True),  # a search may cost 5 % of what it may find
        (0.06, 0, 0, None, False),
        (0.04, 0, 0, 0.04, True),
        (0.00, 0, 0, 0.06, False),  # the first answer alone would take longer
        (0.06, 500, 0, 0.01, False),  # what is here already pays for no search
        (0.70, 500, 500, 0.01, True),  # but for what is on its way it does
    ],
)
def test_a_search_gets_the_unproven_share(
    waited_s: float, arrived: int, missing: int, search_s: float | None, expected: bool
) -> None:
    wait = WaitState(0.0, arrived, [(missing, 0.1)], unknown_tokens=1000, search_s=search_s)
    assert is_worth_waiting(waited_s, wait, RATE) is expected


def test_deadline_ends_every_wait_that_pays() -> None:
    wait = WaitState(0.0, 90_000, [(10_000, 0.1)])
    assert longest_wait_s(wait, PREFILL_TOKENS_PER_S_DEFAULT) > 2.0
    assert WaitPolicy(PrefillRate(), None, 2_000).longest_s(wait) == 2.0
    assert WaitPolicy(PrefillRate(), None, 1_000).longest_s(wait) == 1.0


def test_a_fixed_wait_asks_no_measurement() -> None:
    policy = WaitPolicy(PrefillRate(), 500, 100)
    assert policy.longest_s(WaitState(0.0, 0, [(256, math.inf)])) == 0.5
    assert policy.longest_s(WaitState(0.0, 0, [(100_000, 0.1)])) == 0.5


def played(arrivals: list[float], rate: float, eta_s: float | None) -> float:
    """Seconds until the first token: wait for any schedule of arriving chunks as told, and compute the rest."""
    now_s = told_s = 0.0
    before = 0
    while True:
        arrived = CHUNK * sum(at <= now_s for at in arrivals)
        missing = CHUNK * len(arrivals) - arrived
        if arrived > before:
            before, told_s = arrived, now_s
        if not is_worth_waiting(now_s, WaitState(told_s, arrived, [(missing, eta_s)]), rate):
            return now_s + missing / rate
        now_s += STEP_S


ARRIVALS = st.lists(st.floats(0, 20), min_size=1, max_size=30).map(sorted)


@given(arrivals=ARRIVALS, rate=st.floats(100, 50_000), eta_s=st.one_of(st.none(), st.floats(0, 30)))
def test_whatever_arrives_when_the_request_is_late_by_no_more_than_the_shares(
    arrivals: list[float], rate: float, eta_s: float | None
) -> None:
    """Any prediction, any truth: a trusted one that is wrong costs the trusted share, any other one the unproven."""
    computed_s = CHUNK * len(arrivals) / rate
    is_trusted = eta_s is not None and eta_s <= computed_s  # for a part of the chunks it may be, later
    share = UNPROVEN_SHARE + (TRUSTED_SHARE if is_trusted else 0.0)
    assert played(arrivals, rate, eta_s) <= (1 + share) * computed_s + 2 * STEP_S


@given(arrivals=ARRIVALS, rate=st.floats(100, 50_000))
def test_a_true_prediction_never_costs_more_than_the_unproven_share(arrivals: list[float], rate: float) -> None:
    computed_s = CHUNK * len(arrivals) / rate
    now_s = 0.0
    while True:
        arrived = CHUNK * sum(at <= now_s for at in arrivals)
        missing = CHUNK * len(arrivals) - arrived
        if not is_worth_waiting(now_s, WaitState(now_s, arrived, [(missing, arrivals[-1] - now_s)]), rate):
            break
        now_s += STEP_S
    assert now_s + missing / rate <= (1 + UNPROVEN_SHARE) * computed_s + 2 * STEP_S


@given(chunks=st.integers(4, 30), rate=st.floats(100, 50_000), share=st.floats(0.0, 0.5), late=st.floats(0.5, 1.9))
def test_a_tier_that_is_twice_as_fast_as_computing_gives_its_full_benefit(
    chunks: int, rate: float, share: float, late: float
) -> None:
    """All chunks come at once, as a store with a high latency gives them, and up to 1.9 times as late as predicted."""
    computed_s = CHUNK * chunks / rate
    eta_s = share * computed_s
    came_s = min(late * eta_s, TRUSTED_SHARE * computed_s)
    assert played([came_s] * chunks, rate, eta_s) <= came_s + 2 * STEP_S


def test_prefill_rate_comes_from_busy_prefill_steps_only() -> None:
    rate = PrefillRate()
    assert rate.tokens_per_s == PREFILL_TOKENS_PER_S_DEFAULT

    rate.note(0.0, {"a": 1000}, prefill_tokens=1000)
    rate.note(60.0, {"b": 500}, prefill_tokens=500)  # another request: the engine may have been idle for a minute
    assert rate.tokens_per_s == PREFILL_TOKENS_PER_S_DEFAULT

    rate.note(60.5, {"b": 1, "c": 7}, prefill_tokens=7)
    assert rate.tokens_per_s == pytest.approx(1000.0)

    rate.note(70.5, {"b": 1, "c": 1}, prefill_tokens=0)  # the step before was mostly decode
    assert rate.tokens_per_s == pytest.approx(1000.0)


def test_prefill_rate_comes_from_first_tokens_where_nothing_is_decoded() -> None:
    """A prefill engine: each request ends with the step that computed its prompt, and the next comes at any time."""
    rate = PrefillRate()
    rate.note(0.0, {"a": 1000}, prefill_tokens=1000)
    rate.finished(0.1, "b")
    assert rate.tokens_per_s == PREFILL_TOKENS_PER_S_DEFAULT, "of another step"
    rate.finished(2.0, "a")
    assert rate.tokens_per_s == pytest.approx(500.0)
    rate.finished(9.0, "a")
    rate.note(60.0, {"a": 1}, prefill_tokens=0)
    assert rate.tokens_per_s == pytest.approx(500.0), "a step counts once"


def test_prefill_rate_follows_changes() -> None:
    rate = PrefillRate()
    for second in range(40):
        rate.note(float(second), {"a": 2000}, prefill_tokens=2000)

    assert rate.tokens_per_s == pytest.approx(2000.0, rel=0.01)
