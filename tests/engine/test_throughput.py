"""The estimates of a tier's speed: over busy periods, from what says something, and quick to become pessimistic."""

import math

import pytest

from tiered_kv.engine.throughput import ProbeTimes, Throughput


def measured(*reads):
    """What is known after reads of (start, end, bytes that arrived), in order of their events; each wants 100."""
    events = sorted(
        [(start, 0, None) for start, _, _ in reads] + [(end, 1, size) for _, end, size in reads], key=_order
    )
    throughput = Throughput()
    for at_s, kind, size in events:
        throughput.finished(at_s, 100, size) if kind else throughput.started(at_s, 100)
    return throughput


def _order(event):
    return event[0], event[1]


def rate(*reads):
    return measured(*reads).bytes_per_s


def test_there_is_no_estimate_without_reads():
    assert Throughput().bytes_per_s is None
    assert Throughput().eta_s(100, 100, 0.0) is None


def test_one_read_is_its_bytes_over_its_time():
    assert rate((10.0, 10.5, 100)) == pytest.approx(200)


def test_concurrent_reads_are_counted_once_and_idle_time_not_at_all():
    assert rate((0.0, 0.4, 50), (0.1, 0.5, 50), (100.0, 100.5, 100)) == pytest.approx(200)


def test_a_medium_that_became_slow_shows_at_once_and_one_that_became_fast_at_its_second_sample():
    fast, slow = (0.1, 100), (0.9, 100)

    def after(*periods):
        return rate(*((2.0 * number, 2.0 * number + s, size) for number, (s, size) in enumerate(periods)))

    assert after(fast, fast, fast, slow) == pytest.approx(100 / 0.9)
    assert after(slow, slow, slow, fast) == pytest.approx(100 / 0.9)
    assert after(slow, slow, slow, fast, fast) == pytest.approx(1000)


def test_a_tier_that_is_never_idle_is_sampled_all_the_same():
    assert rate((0.0, 2.0, 300), (0.5, 3.5, 900)) == pytest.approx(150)  # 300 in 2 s; then 900 in 1.5 s


def test_after_reads_that_failed_nothing_is_expected_until_one_succeeds():
    assert rate((0.0, 0.5, 0)) is None
    failed = ((0.0, 0.5, 100), (1.0, 1.5, 0))
    assert rate(*failed) == 0
    assert measured(*failed).eta_s(100, 100, 2.0) == math.inf
    assert rate(*failed, (2.0, 2.5, 100)) == pytest.approx(200)


def test_a_blob_that_is_not_there_says_nothing_about_speed():
    assert rate((0.0, 0.5, 100), (1.0, 1.1, None), (2.0, 2.1, None)) == pytest.approx(200)
    assert rate((0.0, 0.5, None)) is None
    assert rate((0.0, 0.5, 100), (0.0, 0.2, None)) == pytest.approx(200)


def test_what_arrives_takes_its_bytes_and_those_before_it_and_at_least_what_the_first_took():
    throughput = measured((0.0, 0.3, 100), (0.0, 0.5, 100))
    assert throughput.eta_s(800, 800, 1.0) == pytest.approx(2.0)
    assert throughput.eta_s(1, 1, 1.0) == pytest.approx(0.3)
    for _ in range(10):
        throughput.started(1.0, 100)
    assert throughput.eta_s(200, 400, 1.0) == pytest.approx((600 + 200) / 400)


def test_a_tier_that_is_overdue_is_expected_to_give_nothing_until_it_does():
    throughput = measured((0.0, 0.1, 100))
    throughput.started(1.0, 100)
    assert throughput.eta_s(100, 100, 1.39) == pytest.approx(0.1)
    assert throughput.eta_s(100, 100, 1.41) == math.inf
    throughput.finished(1.5, 100, 100)
    assert throughput.eta_s(100, 100, 9.0) == pytest.approx(0.5)


def test_the_self_test_is_the_first_sample():
    throughput = Throughput()
    throughput.sample(16 << 20, 0.08, 0.02)
    assert throughput.eta_s(8 << 20, 8 << 20, 0.0) == pytest.approx(0.04)
    assert throughput.eta_s(1, 1, 0.0) == pytest.approx(0.02)


def test_questions_are_timed_one_by_one():
    times = ProbeTimes()
    assert times.slow_s is None
    times.started(b"a", 0.0)
    times.started(b"b", 0.0)
    times.finished(b"b", 0.1)
    assert times.slow_s == pytest.approx(0.1)
    times.finished(b"a", 0.4)
    assert times.slow_s == pytest.approx(0.4)
