"""The estimate of a tier's speed: over busy periods, and only from what says something."""

import pytest

from tiered_kv.engine.throughput import Throughput


def measured(*reads):
    """The estimate after reads of (start, end, bytes), in order of their events."""
    events = sorted(
        [(start, 0, None) for start, _, _ in reads] + [(end, 1, size) for _, end, size in reads], key=_order
    )
    throughput = Throughput()
    for at_s, kind, size in events:
        throughput.finished(at_s, size) if kind else throughput.started(at_s)
    return throughput.bytes_per_s


def _order(event):
    return event[0], event[1]


def test_there_is_no_estimate_without_reads():
    assert Throughput().bytes_per_s is None


def test_one_read_is_its_bytes_over_its_time():
    assert measured((10.0, 10.5, 100)) == 200


def test_concurrent_reads_are_counted_once_and_idle_time_not_at_all():
    assert measured((0.0, 0.4, 50), (0.1, 0.5, 50), (100.0, 100.5, 100)) == pytest.approx(200)


def test_the_newest_period_moves_the_estimate_by_its_weight():
    assert measured((0.0, 0.5, 100), (1.0, 1.5, 1100)) == pytest.approx(200 + 0.3 * 2000)


def test_a_tier_that_is_never_idle_is_sampled_all_the_same():
    assert measured((0.0, 2.0, 300), (0.5, 3.5, 900)) == pytest.approx(150 + 0.3 * (600 - 150))


def test_time_of_failed_reads_counts_once_there_is_an_estimate():
    assert measured((0.0, 0.5, 0)) is None
    assert measured((0.0, 0.5, 100), (1.0, 1.5, 0)) == pytest.approx(140)


def test_a_blob_that_is_not_there_says_nothing_about_speed():
    assert measured((0.0, 0.5, 100), (1.0, 1.1, None), (2.0, 2.1, None)) == 200
    assert measured((0.0, 0.5, None)) is None
    assert measured((0.0, 0.5, 100), (0.0, 0.2, None)) == 200
