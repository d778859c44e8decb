"""How long a request waits for a slower tier: never so long that no cache at all would have been faster."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.vllm.waiting import PREFILL_TOKENS_PER_S_DEFAULT, UNPROVEN_SHARE, PrefillRate, Wait, is_worth_waiting

RATE = 1000.0
DEADLINE_S = 100.0


@pytest.mark.parametrize(
    ("waited_s", "arrived", "wanted", "eta_s", "expected"),
    [
        (0.0, 0, 1000, 0.1, True),  # nothing lost yet
        (0.04, 0, 1000, 0.1, True),  # inside 5 % of one second
        (0.06, 0, 1000, 0.1, False),  # nothing has arrived in the unproven share
        (0.30, 400, 1000, 0.1, True),  # what arrived has saved 0.4 s
        (0.50, 400, 1000, 0.1, False),  # and now it has not
        (0.30, 400, 1000, 5.0, False),  # the rest would take longer than computing it
        (0.02, 400, 1000, None, True),  # never measured: the unproven share only
        (0.04, 400, 1000, None, False),
        (0.00, 1000, 1000, 0.0, False),  # all here: nothing to wait for
    ],
)
def test_waits_while_it_pays(waited_s: float, arrived: int, wanted: int, eta_s: float | None, expected: bool) -> None:
    assert is_worth_waiting(Wait(waited_s, arrived, wanted, eta_s), RATE, DEADLINE_S) is expected


@pytest.mark.parametrize(
    ("waited_s", "arrived", "wanted", "unknown", "expected"),
    [
        (0.04, 0, 0, 1000, True),  # a search may cost 5 % of what it may find
        (0.06, 0, 0, 1000, False),
        (0.06, 500, 500, 1000, False),  # what is here already pays for no search
        (0.54, 500, 600, 1000, True),  # but for what is on its way it does
        (0.56, 500, 600, 1000, False),
    ],
)
def test_a_search_gets_the_unproven_share(
    waited_s: float, arrived: int, wanted: int, unknown: int, expected: bool
) -> None:
    assert is_worth_waiting(Wait(waited_s, arrived, wanted, 0.01, unknown), RATE, DEADLINE_S) is expected


def test_deadline_ends_every_wait() -> None:
    assert not is_worth_waiting(Wait(2.0, 90_000, 100_000, 0.1), RATE, deadline_s=1.0)


@given(
    arrivals=st.lists(st.floats(0, 20), min_size=1, max_size=30).map(sorted),
    rate=st.floats(100, 50_000),
    eta_s=st.one_of(st.none(), st.floats(0, 30)),
)
def test_total_time_never_passes_recomputing_by_more_than_the_share(
    arrivals: list[float], rate: float, eta_s: float | None
) -> None:
    """Play any schedule of arriving chunks at a step of 1 ms, stop when told to, and add the prefill of the rest."""
    chunk, step_s = 256, 0.001
    wanted = chunk * len(arrivals)
    now_s = 0.0
    while True:
        arrived = chunk * sum(at <= now_s for at in arrivals)
        if not is_worth_waiting(Wait(now_s, arrived, wanted, eta_s), rate, DEADLINE_S):
            break
        now_s += step_s

    with_cache = now_s + (wanted - arrived) / rate
    assert with_cache <= (1 + UNPROVEN_SHARE) * wanted / rate + 2 * step_s


def test_prefill_rate_comes_from_busy_prefill_steps_only() -> None:
    rate = PrefillRate()
    assert rate.tokens_per_s == PREFILL_TOKENS_PER_S_DEFAULT

    rate.step(0.0, {"a": 1000}, prefill_tokens=1000)
    rate.step(60.0, {"b": 500}, prefill_tokens=500)  # another request: the engine may have been idle for a minute
    assert rate.tokens_per_s == PREFILL_TOKENS_PER_S_DEFAULT

    rate.step(60.5, {"b": 1, "c": 7}, prefill_tokens=7)
    assert rate.tokens_per_s == pytest.approx(1000.0)

    rate.step(70.5, {"b": 1, "c": 1}, prefill_tokens=0)  # the step before was mostly decode
    assert rate.tokens_per_s == pytest.approx(1000.0)


def test_prefill_rate_follows_changes() -> None:
    rate = PrefillRate()
    for second in range(40):
        rate.step(float(second), {"a": 2000}, prefill_tokens=2000)

    assert rate.tokens_per_s == pytest.approx(2000.0, rel=0.01)
