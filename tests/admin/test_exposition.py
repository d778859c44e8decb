"""Metrics over HTTP: what a scrape says, and what it does when the server is busy or gone."""

import socket
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from figure_samples import operation, server, tier, tokens
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from tiered_kv.admin import exposition
from tiered_kv.admin.exposition import FiguresCollector, LastFigures, MetricsServer
from tiered_kv.errors import ConfigError, TierUnavailable
from tiered_kv.metrics.figures import ServerFigures


class Asked:
    """A server that answers as a test says, and a clock."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.answer: ServerFigures | None = server(1.0)
        self.count = 0
        self.last = LastFigures(self.ask, lambda: self.now_s)

    def ask(self) -> ServerFigures:
        self.count += 1
        if self.answer is None:
            raise TierUnavailable("busy")
        return self.answer


def test_a_busy_server_is_told_of_by_its_last_figures_for_a_while():
    asked = Asked()
    assert asked.last.get() == (asked.answer, 0.0)
    before, asked.answer = asked.answer, None
    asked.now_s += 30
    assert asked.last.get() == (before, 30.0)
    asked.now_s += 31
    with pytest.raises(TierUnavailable, match="does not answer: busy"):
        asked.last.get()
    asked.answer = server(90.0)
    assert asked.last.get() == (asked.answer, 0.0)


def test_a_server_that_never_answered_has_no_last_figures():
    asked = Asked()
    asked.answer = None
    with pytest.raises(TierUnavailable, match="does not answer: busy"):
        asked.last.get()


def test_scrapes_that_come_together_share_one_question():
    asked = Asked()
    first, _ = asked.last.get()
    asked.now_s += exposition.FRESH_S / 2
    assert asked.last.get()[0] is first
    assert asked.count == 1
    asked.now_s += exposition.FRESH_S
    asked.last.get()
    assert asked.count == 2


def test_values_are_those_of_the_figures():
    figures = server(
        5.0,
        tokens=tokens(1000, host=500, disk=100, object=50),
        counters={"host_evicted": 3, "lower_evicted": 2, "write_dropped_for_load": 7, "written": 11},
        operations=[operation("disk", "get", "ok", 4, 4000, 0.5), operation("disk", "get", "corrupt", 1, 0, 0.1)],
        tiers=[tier("disk", breaker="open", corrupt=1, breaker_opened=2, backlog_chunks=9), *server(1.0).tiers[1:]],
    )
    registry = CollectorRegistry()
    registry.register(FiguresCollector(figures, 1.5))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"tiered_kv_{name}", labels)

    assert value("build_info", version="1") == 1
    assert value("figures_age_seconds") == 1.5
    assert (value("asked_tokens_total"), value("missed_tokens_total")) == (1000, 350)
    assert [value("hit_tokens_total", tier=name) for name in ("host", "disk", "object")] == [500, 100, 50]
    assert [value("capacity_bytes", tier=name) for name in ("host", "disk", "object")] == [4000, 5000, None]
    assert [value("evicted_chunks_total", tier=name) for name in ("host", "disk", "object")] == [3, 2, 4]
    assert [value("breaker_open", tier=name) for name in ("disk", "object")] == [1, 0]
    assert (value("breaker_opened_total", tier="disk"), value("corrupt_reads_total", tier="disk")) == (2, 1)
    assert value("queue_chunks", tier="disk") == 9
    assert value("operations_total", tier="disk", operation="get", outcome="corrupt") == 1
    assert value("operation_seconds_total", tier="disk", operation="get", outcome="ok") == 0.5
    assert value("operation_bytes_total", tier="disk", operation="get") == 4000
    assert value("dropped_chunks_total", reason="write_dropped_for_load") == 7
    assert value("events_total", event="written") == 11 and value("events_total", event="host_evicted") is None
    assert value("bucket_leader", tier="object") == 1


@pytest.fixture
def metrics() -> Iterator[MetricsServer]:
    one = MetricsServer("127.0.0.1", 0)
    yield one
    one.close()


def fetch(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code, exc.read().decode()


def test_a_server_that_does_not_answer_costs_a_scrape_a_moment_and_is_a_503(
    metrics: MetricsServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(exposition, "ASK_S", 0.2)
    with tempfile.TemporaryDirectory(prefix="tkv-") as directory, socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"{directory}/s")
        silent.listen()
        metrics.start(f"{directory}/s")
        status, text = fetch(metrics.url)
    assert status == 503
    assert "does not answer" in text


def test_nobody_there_is_a_503_and_any_other_path_a_404(metrics: MetricsServer, tmp_path: Path):
    metrics.start(str(tmp_path / "none"))
    status, text = fetch(metrics.url)
    assert status == 503
    assert "no server answers" in text
    assert fetch(metrics.url.replace("/metrics", "/")) == (404, "there is only /metrics here\n")


def test_a_scrape_is_in_the_format_that_is_asked_for(metrics: MetricsServer, tmp_path: Path):
    metrics.start(str(tmp_path / "none"))
    metrics._http.figures = LastFigures(lambda: server(1.0))
    families = {family.name for family in text_string_to_metric_families(fetch(metrics.url)[1])}
    assert {"tiered_kv_asked_tokens", "tiered_kv_used_bytes"} <= families
    request = urllib.request.Request(metrics.url, headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
        assert answer.read().endswith(b"# EOF\n")


def test_a_port_that_is_taken_is_a_wrong_setting(metrics: MetricsServer):
    port = int(metrics.url.rpartition(":")[2].partition("/")[0])
    with pytest.raises(ConfigError, match=rf"--metrics-port: nothing can listen at 127.0.0.1 port {port}"):
        MetricsServer("127.0.0.1", port)


def test_an_address_of_the_other_kind_is_listened_at_too(tmp_path: Path):
    try:
        one = MetricsServer("::1", 0)
    except ConfigError as exc:
        pytest.skip(f"no IPv6 here: {exc}")
    one.start(str(tmp_path / "none"))
    assert one.url.startswith("http://[::1]:")
    assert fetch(one.url)[0] == 503
    one.close()
