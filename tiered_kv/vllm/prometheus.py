"""The metrics that vLLM's own ``/metrics`` shows of the cache, and how measured numbers get into them.

Two kinds, told apart by name, because engines share a server:

- ``vllm:tiered_kv_*``: counters and histograms of this engine, made by its own scheduler and workers. Adding them up
  over engines is right.
- ``vllm:tiered_kv_server_*``: gauges with what the engine's cache server says of itself, a few seconds old at most
  while the engine works. Engines that share a server all show the same: take the maximum, never the sum.

vLLM removes metrics whose names begin with ``vllm:`` when an engine starts again in the same process; hence the prefix.
Called in the API server's process, with one call of ``observe`` per engine step that measured something.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

from tiered_kv.admin.exposition import FiguresCollector
from tiered_kv.metrics.figures import ServerFigures, TokenFigures

logger = logging.getLogger(__name__)

PREFIX: Final = "vllm:tiered_kv_"
SERVER: Final = "server_"
SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@dataclass(frozen=True, slots=True)
class MetricDefinition:
    """One metric; ``name`` is without prefix and, of counters, without ``_total``."""

    kind: type[Counter] | type[Gauge] | type[Histogram]
    name: str
    text: str
    labels: tuple[str, ...] = ()


ENGINE_METRICS: Final = (
    MetricDefinition(Counter, "lookups", "Lookups that this engine sent."),
    MetricDefinition(
        Counter,
        "asked_tokens",
        "Tokens this engine asked a tier for: what its GPU and the tiers above did not have.",
        ("tier",),
    ),
    MetricDefinition(Counter, "hit_tokens", "Of those, tokens the tier gave.", ("tier",)),
    MetricDefinition(Counter, "missed_tokens", "Of those, tokens the tier did not give.", ("tier",)),
    MetricDefinition(Counter, "asked_bytes", "The asked tokens as bytes of blobs.", ("tier",)),
    MetricDefinition(Counter, "hit_bytes", "The hit tokens as bytes of blobs.", ("tier",)),
    MetricDefinition(Counter, "loads", "Requests whose KV this engine began to load."),
    MetricDefinition(
        Counter,
        "loaded_tokens",
        "Tokens loaded into this engine's GPU blocks, by the tier that gave them to the lookup.",
        ("tier",),
    ),
    MetricDefinition(
        Counter, "loaded_bytes", "Bytes copied from host memory into this engine's GPU blocks, all ranks."
    ),
    MetricDefinition(Counter, "stored_tokens", "Tokens this engine stored into host memory."),
    MetricDefinition(Counter, "stored_bytes", "Bytes copied from this engine's GPU blocks to host memory, all ranks."),
    MetricDefinition(
        Counter,
        "decisions",
        "What lookups of this engine ended in: ready, awaited, took_what_arrived, not_awaited, miss.",
        ("decision",),
    ),
    MetricDefinition(Counter, "failures", "What this engine tried and did not get, by the reason.", ("reason",)),
    MetricDefinition(Counter, "dropped_chunks", "Chunks this engine did not store, by the reason.", ("reason",)),
    MetricDefinition(Counter, "events", "Everything else that this engine's scheduler side counts.", ("event",)),
    MetricDefinition(Histogram, "lookup_wait_seconds", "Time from a lookup until its answer, seen by this engine."),
    MetricDefinition(
        Histogram, "promotion_wait_seconds", "Time a request of this engine waited for chunks on their way from below."
    ),
    MetricDefinition(Histogram, "load_seconds", "Time of one request's copy from host memory to the GPU, per rank."),
    MetricDefinition(Histogram, "save_seconds", "Time of one step's copies from the GPU to host memory, per rank."),
    MetricDefinition(Gauge, "connected", "1 while this engine has a session with its cache server."),
    MetricDefinition(
        Gauge,
        "server_figures_time_seconds",
        "When the cache server last told this engine the server_ figures, unix time.",
    ),
)

SHOWN_OF_SERVER: Final = {
    "used_bytes": ("tier",),
    "capacity_bytes": ("tier",),
    "chunks": ("tier",),
    "stored_chunks": ("tier", "how"),
    "stored_bytes": ("tier",),
    "removed_chunks": ("tier", "why"),
    "removed_bytes": ("tier",),
    "resident_chunks": ("tier",),
    "resident_bytes": ("tier",),
    "evicted_chunks": ("tier",),
    "queue_chunks": ("tier",),
    "breaker_open": ("tier",),
    "breaker_opened": ("tier",),
    "corrupt_reads": ("tier",),
    "dropped_chunks": ("reason",),
    "operations": ("tier", "operation", "outcome"),
    "operation_seconds": ("tier", "operation", "outcome"),
    "operation_bytes": ("tier", "operation"),
    "leased_bytes": (),
    "pending_writes": (),
}
"""Metrics of ``serve --metrics-port`` that engines show, too, with their labels."""


def server_values(figures: ServerFigures) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """Name, label values and value of everything a server tells that is shown."""
    for family in FiguresCollector(figures, 0.0).collect():
        name = family.name.removeprefix("tiered_kv_")
        if name in SHOWN_OF_SERVER:
            for sample in family.samples:
                yield SERVER + name, tuple(sample.labels[label] for label in SHOWN_OF_SERVER[name]), sample.value


def definitions() -> Iterator[MetricDefinition]:
    """Every metric."""
    yield from ENGINE_METRICS
    texts = {family.name.removeprefix("tiered_kv_"): family.documentation for family in _families()}
    for name, labels in SHOWN_OF_SERVER.items():
        yield MetricDefinition(
            Gauge, SERVER + name, f"{texts[name]} Of the server, the same in every engine that shares it.", labels
        )


def _families() -> Iterator[Any]:
    """The server's metrics without a sample, for their names and texts."""
    host = dict.fromkeys(
        ("lookups", "leased_bytes", "host_assigned_bytes", "host_capacity_bytes", "host_ready_chunks"), 0
    )
    no_tokens: dict[str, Any] = dict.fromkeys(TokenFigures.__struct_fields__, 0) | {"hits": [], "decisions": {}}
    empty: dict[str, Any] = dict.fromkeys(ServerFigures.__struct_fields__, 0)
    empty |= {"version": "", "tokens": TokenFigures(**no_tokens), "hierarchy": host, "counters": {}}
    empty |= {name: [] for name in ("tiers", "flows", "sessions", "namespaces", "operations")}
    return FiguresCollector(ServerFigures(**empty), 0.0).collect()


class TieredKVPromMetrics(KVConnectorPromMetrics):
    """Registers every metric once, with a child per engine (data-parallel rank) and labels as they come.

    Threads: the API server's event loop only.
    """

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._definitions: dict[str, MetricDefinition] = {}
        self._metrics: dict[str, Any] = {}
        self._children: dict[tuple[int, str, str], Any] = {}
        classes = {Counter: self._counter_cls, Gauge: self._gauge_cls, Histogram: self._histogram_cls}
        for one in definitions():
            more: dict[str, Any] = {}
            if one.kind is Histogram:
                more["buckets"] = SECONDS
            elif one.kind is Gauge:
                more["multiprocess_mode"] = "mostrecent"
            self._definitions[one.name] = one
            self._metrics[one.name] = classes[one.kind](
                name=PREFIX + one.name, documentation=one.text, labelnames=[*labelnames, *one.labels], **more
            )
            for engine in per_engine_labelvalues if not one.labels and one.kind is not Gauge else ():
                self._child(engine, one.name, "")  # is shown as 0 from the start

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take in what one engine measured."""
        for name, values in transfer_stats_data.get("counters", {}).items():
            for labels, amount in values.items():
                if (child := self._child(engine_idx, name, labels)) is not None:
                    child.inc(amount)
        for name, values in transfer_stats_data.get("gauges", {}).items():
            for labels, value in values.items():
                if (child := self._child(engine_idx, name, labels)) is not None:
                    child.set(value)
        for name, samples in transfer_stats_data.get("samples", {}).items():
            if (child := self._child(engine_idx, name, "")) is not None:
                for seconds in samples:
                    child.observe(seconds)

    def _child(self, engine: int, name: str, labels: str) -> Any:
        """The child of an engine and its labels; None for what is not defined here, which is told once."""
        key = (engine, name, labels)
        if key not in self._children:
            definition = self._definitions.get(name)
            values = labels.split(",") if labels else []
            child = None
            if definition is None or len(values) != len(definition.labels):
                logger.warning("not shown, it is no metric here. name=%s labels=%s", name, labels)
            else:
                child = self._metrics[name].labels(*self.per_engine_labelvalues[engine], *values)
            self._children[key] = child
        return self._children[key]
