"""What the connector measures, on its way through vLLM: added up, sent as msgpack, logged, shown by Prometheus."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tests.kit.samples.figures import flow, operation, server, tier
from tiered_kv.metrics.exposition import FiguresCollector
from tiered_kv.metrics.names import ENGINE_PREFIX, MetricKind
from tiered_kv.vllm import row_metrics
from tiered_kv.vllm.compat import OffloadingCounterMetadata
from tiered_kv.vllm.connector import TieredKVConnector
from tiered_kv.vllm.engine_metrics import SAMPLES_MAX, TieredKVStats, stats_of
from tiered_kv.vllm.prometheus import SHOWN_OF_SERVER, definitions, server_values

pytestmark = pytest.mark.vllm

TRANSFER = {"kv_connector": "TieredKVConnector", "kv_role": "kv_both", "kv_connector_module_path": "tiered_kv.vllm"}


def measured(tokens: int, *seconds: float) -> TieredKVStats:
    stats = TieredKVStats()
    stats.count("hit_tokens", tokens, "host")
    stats.count("asked_tokens", 2 * tokens, "host")
    stats.set("connected", 1.0)
    for one in seconds:
        stats.sample("load_seconds", one)
    return stats


def test_counters_add_up_gauges_are_replaced_and_samples_kept() -> None:
    stats = measured(100, 0.1).aggregate(measured(50, 0.2, 0.3))
    stats.aggregate(TieredKVStats(data={"counters": {}, "gauges": {"connected": {"": 0.0}}, "samples": {}}))
    assert stats.data == {
        "counters": {"hit_tokens": {"host": 150}, "asked_tokens": {"host": 300}},
        "gauges": {"connected": {"": 0.0}},
        "samples": {"load_seconds": [0.1, 0.2, 0.3]},
    }


def test_nothing_is_empty_and_a_reset_makes_it_so() -> None:
    stats = TieredKVStats()
    stats.count("hit_tokens", 0, "host")
    assert stats.is_empty()
    stats = measured(1)
    assert not stats.is_empty()
    stats.reset()
    assert stats.is_empty()
    assert stats.aggregate(measured(1)).counted("hit_tokens") == 1


def test_what_nobody_takes_is_bounded() -> None:
    stats = TieredKVStats()
    for _ in range(SAMPLES_MAX + 10):
        stats.sample("load_seconds", 0.1)
    assert len(stats.samples("load_seconds")) == SAMPLES_MAX


def test_it_survives_the_way_to_the_api_server() -> None:
    sent = SchedulerStats(kv_connector_stats=measured(7, 0.5).to_dict())
    received = MsgpackDecoder(SchedulerStats).decode(MsgpackEncoder().encode(sent))
    assert stats_of(received.kv_connector_stats).data == measured(7, 0.5).data
    assert TieredKVConnector.build_kv_connector_stats().is_empty()


def test_the_log_line_sums_an_interval_up() -> None:
    logging = KVConnectorLogging(KVTransferConfig(**TRANSFER))
    lines: list[str] = []
    for _ in range(2):
        logging.observe(measured(100, 0.010, 0.030).to_dict())
    logging.log(lambda text, *values: lines.append(text % values))
    logging.log(lambda text, *values: lines.append(text % values))
    assert lines == ["KV Transfer metrics: Asked tokens=400, Hit rate (%)=50.0, Mean load (ms)=20.0"]


# -- Prometheus --------------------------------------------------------------------------------------------------------


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> CollectorRegistry:
    """A registry of its own for metrics that are made without naming one, as vLLM's are."""
    own = CollectorRegistry()
    for kind in (Counter, Gauge, Histogram):
        monkeypatch.setitem(kind.__init__.__kwdefaults__ or {}, "registry", own)
        defaults = list(kind.__init__.__defaults__ or ())
        monkeypatch.setattr(
            kind.__init__, "__defaults__", tuple(own if isinstance(d, CollectorRegistry) else d for d in defaults)
        )
    return own


def prom(registry: CollectorRegistry, connector: dict[str, Any]) -> KVConnectorProm:
    """vLLM's own door to a connector's metrics, with two data-parallel engines."""
    del registry
    config: Any = SimpleNamespace(kv_transfer_config=KVTransferConfig(**connector))
    return KVConnectorProm(config, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]})


def test_each_engine_has_its_own_series(registry: CollectorRegistry) -> None:
    metrics = prom(registry, TRANSFER)
    metrics.observe(measured(100, 0.02).to_dict(), engine_idx=0)
    metrics.observe(measured(30).to_dict(), engine_idx=1)
    metrics.observe(measured(3).to_dict(), engine_idx=1)

    def value(name: str, engine: str, **labels: str) -> float | None:
        return registry.get_sample_value(ENGINE_PREFIX + name, {"model_name": "m", "engine": engine} | labels)

    assert [value("hit_tokens_total", engine, tier="host") for engine in "01"] == [100, 33]
    assert [value("load_seconds_count", engine) for engine in "01"] == [1, 0]
    assert [value("connected", engine) for engine in "01"] == [1, 1]
    assert [value("lookups_total", engine) for engine in "01"] == [0, 0]


def test_what_is_no_metric_here_ends_no_engine(registry: CollectorRegistry, caplog: pytest.LogCaptureFixture) -> None:
    metrics = prom(registry, TRANSFER)
    for _ in range(2):
        metrics.observe({"counters": {"unheard_of": {"": 1}, "lookups": {"a,b": 1}}}, engine_idx=0)
        metrics.observe({}, engine_idx=0)
    assert len([record for record in caplog.records if "it is no metric here" in record.message]) == 2


def test_a_multi_connector_carries_and_shows_them(registry: CollectorRegistry) -> None:
    multi = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [TRANSFER, TRANSFER]},
    }
    stats = MultiConnector.build_kv_connector_stats()
    assert stats is not None
    stats.data["TieredKVConnector"] = measured(5)
    received = MultiConnector.build_kv_connector_stats(json.loads(json.dumps(stats.to_dict())))
    assert received is not None
    received = received.aggregate(stats)
    assert received.reduce()["TieredKVConnector"]["Asked tokens"] == 20
    metrics = prom_of_multi(multi)
    metrics.observe(stats.to_dict(), 1)
    labels = {"model_name": "m", "engine": "1", "tier": "host"}
    assert registry.get_sample_value(f"{ENGINE_PREFIX}hit_tokens_total", labels) == 5


def prom_of_multi(transfer: dict[str, Any]) -> Any:
    config: Any = SimpleNamespace(kv_transfer_config=KVTransferConfig(**transfer))
    return MultiConnector.build_prom_metrics(
        config,
        {Counter: Counter, Gauge: Gauge, Histogram: Histogram},
        ["model_name", "engine"],
        {0: ["m", "0"], 1: ["m", "1"]},
    )


# -- names -------------------------------------------------------------------------------------------------------------


def test_what_engines_show_of_the_server_are_metrics_of_the_server_with_its_labels() -> None:
    figures = server(
        1.0,
        counters={"write_dropped_for_load": 3},
        operations=[operation("disk", "get", "ok", 4, 4000, 0.5)],
        flows=[flow("host", 9, evicted=2)],
        tiers=[tier("disk", breaker="open")],
    )
    families = {family.name: family for family in FiguresCollector(figures, 0.0).collect()}
    for name, metric in SHOWN_OF_SERVER.items():
        samples = families[f"tiered_kv_{name}"].samples
        assert samples and all(set(sample.labels) == set(metric.labels) for sample in samples), name
    values = {(name, labels): value for name, labels, value in server_values(figures)}
    assert values["server_removed_chunks", ("host", "evicted")] == 2
    assert values["server_breaker_open", ("disk",)] == 1
    assert values["server_dropped_chunks", ("write_dropped_for_load",)] == 3
    assert {name for name, _ in values} == {f"server_{name}" for name in SHOWN_OF_SERVER}


def test_help_says_what_may_be_added_up_over_engines() -> None:
    for one in definitions():
        is_of_server = one.name.startswith("server_") and one.name != "server_figures_time_seconds"
        assert is_of_server == one.help.endswith("Of the server, the same in every engine that shares it."), one.name
        assert (
            is_of_server
            or "engine" in one.help
            or "per rank" in one.help
            or "Of those" in one.help
            or ("as bytes of blobs" in one.help)
        ), one.name
        assert not is_of_server or one.kind is MetricKind.GAUGE


def test_the_page_lists_every_metric_with_its_labels(repository: Path) -> None:
    page = (repository / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `vllm:tiered_kv_(\w+)(?:\{([a-z, ]+)\})?` \| (\w+) \|", page, flags=re.MULTILINE)
    listed = [(name, tuple(filter(None, labels.split(", "))), kind) for name, labels, kind in rows]
    expected = [
        (one.name + ("_total" if one.kind is MetricKind.COUNTER else ""), one.labels, one.kind.value)
        for one in definitions()
    ]
    for name, row in row_metrics.definitions().items():  # of the other door
        is_counter = isinstance(row, OffloadingCounterMetadata)
        kind = MetricKind.COUNTER if is_counter else MetricKind.GAUGE
        whole = name.removeprefix("vllm:tiered_kv_") + ("_total" if is_counter else "")
        expected.append((whole, tuple(row.labelnames), kind.value))
    assert listed == sorted(expected, key=lambda row: [name for name, *_ in listed].index(row[0]))
    assert len(listed) == len(set(listed))


def test_label_names_are_fixed_and_hold_no_comma() -> None:
    assert all(label.isidentifier() for one in definitions() for label in one.labels)
