"""A server's figures as metrics: the values are the figures'."""

from prometheus_client import CollectorRegistry

from tests.kit.samples.figures import curve, operation, server, tier, tokens
from tiered_kv.metrics.exposition import FiguresCollector
from tiered_kv.metrics.figures import SessionFigures


def test_values_are_those_of_the_figures():
    figures = server(
        5.0,
        tokens=tokens(1000, host=500, disk=100, object=50),
        counters={"host_evicted": 3, "lower_evicted": 2, "write_dropped_for_load": 7, "written": 11},
        operations=[operation("disk", "get", "ok", 4, 4000, 0.5), operation("disk", "get", "corrupt", 1, 0, 0.1)],
        tiers=[
            tier("disk", breaker="open", corrupt=1, breaker_opened=2, backlog_chunks=9, declined_chunks=6),
            *server(1.0).tiers[1:],
        ],
        curves=[curve("ab", 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)],
        sessions=[
            SessionFigures(
                engine=f"e/{n}", namespace=None, workers=1, declined=0, state="ready", pinned_bytes=n, pinning_s=n / 2
            )
            for n in (1, 2)
        ],
    )
    registry = CollectorRegistry()
    registry.register(FiguresCollector(figures, 1.5))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"tiered_kv_{name}", labels)

    assert value("build_info", version="1") == 1
    assert value("figures_age_seconds") == 1.5
    assert (value("pinned_bytes"), value("pinning_seconds")) == (3, 1.5)
    assert (value("asked_tokens_total"), value("missed_tokens_total")) == (1000, 350)
    assert [value("hit_tokens_total", tier=name) for name in ("host", "disk", "object")] == [500, 100, 50]
    assert [value("capacity_bytes", tier=name) for name in ("host", "disk", "object")] == [4000, 5000, None]
    assert [value("evicted_chunks_total", tier=name) for name in ("host", "disk", "object")] == [3, 2, 4]
    assert [value("breaker_open", tier=name) for name in ("disk", "object")] == [1, 0]
    assert (value("breaker_opened_total", tier="disk"), value("corrupt_reads_total", tier="disk")) == (2, 1)
    assert value("queue_chunks", tier="disk") == 9
    assert [value("admissions_total", tier="disk", decision=one) for one in ("admitted", "declined")] == [0, 6]
    assert value("operations_total", tier="disk", operation="get", outcome="corrupt") == 1
    assert value("operation_seconds_total", tier="disk", operation="get", outcome="ok") == 0.5
    assert value("operation_bytes_total", tier="disk", operation="get") == 4000
    assert value("dropped_chunks_total", reason="write_dropped_for_load") == 7
    assert value("events_total", event="written") == 11 and value("events_total", event="host_evicted") is None
    assert value("bucket_leader", tier="object") == 1
    shares = [value("curve_found_share", namespace="ab", tier="disk", times=times) for times in ("0.5", "1", "2", "4")]
    assert shares == [0.5, 0.6, 0.7, 0.8]


def test_evictions_of_the_disk_are_not_those_of_what_lies_below_it():
    peers = tier("peers", capacity_bytes=None)
    counters = {"host_evicted": 3, "lower_evicted": 2}
    registry = CollectorRegistry()
    registry.register(FiguresCollector(server(5.0, counters=counters, tiers=[tier("disk"), peers]), 0.0))
    shown = [registry.get_sample_value("tiered_kv_evicted_chunks_total", {"tier": name}) for name in ("disk", "peers")]
    assert shown == [2, 0]
