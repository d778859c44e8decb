"""The cache's metrics in vLLM's own ``/metrics``.

Two kinds, distinguished by name, because engines share a server:

- ``vllm:tiered_kv_*``: counters and histograms of this engine, made by its own scheduler and workers. Adding them up
  over engines is right.
- ``vllm:tiered_kv_server_*``: gauges with what the engine's cache server says of itself, a few seconds old at most
  while the engine works. Engines that share a server all show the same: take the maximum, never the sum.

vLLM removes metrics whose names begin with ``vllm:`` when an engine starts again in the same process; hence the prefix.
Called in the API server's process, with one call of ``observe`` per engine step that measured something.
"""

import logging
from collections.abc import Iterator
from typing import Any, Final

from prometheus_client import Counter, Gauge, Histogram

from tiered_kv.metrics.exposition import FiguresCollector
from tiered_kv.metrics.figures import ServerFigures
from tiered_kv.metrics.names import (
    ENGINE_METRICS,
    ENGINE_PREFIX,
    SERVER_METRICS,
    SERVER_PREFIX,
    MetricKind,
    MetricName,
)
from tiered_kv.vllm.compat import KVConnectorPromMetrics

logger = logging.getLogger(__name__)

SERVER: Final = "server_"
SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


SHOWN_OF_SERVER: Final = {metric.name: metric for metric in SERVER_METRICS if metric.is_shown_by_engines}
"""Metrics of ``serve --metrics-port`` that engines show, too."""

COUNTED_BY_SERVER: Final = {
    SERVER + metric.name for metric in SHOWN_OF_SERVER.values() if metric.kind is MetricKind.COUNTER
}
"""Gauges that a server begins at 0: what one counted must not stand behind its end, beside what the next one counts."""


def server_values(figures: ServerFigures) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """Name, label values and value of each metric of the server that engines show."""
    for family in FiguresCollector(figures, 0.0).collect():
        name = family.name.removeprefix(SERVER_PREFIX)
        if name in SHOWN_OF_SERVER:
            for sample in family.samples:
                yield SERVER + name, tuple(sample.labels[label] for label in SHOWN_OF_SERVER[name].labels), sample.value


def definitions() -> Iterator[MetricName]:
    """Every metric."""
    yield from ENGINE_METRICS
    for metric in SHOWN_OF_SERVER.values():
        text = f"{metric.help} Of the server, the same in every engine that shares it."
        yield MetricName(SERVER + metric.name, MetricKind.GAUGE, text, metric.labels, metric.unit)


class TieredKVPromMetrics(KVConnectorPromMetrics):
    """Registers every metric once and takes the engines' stats.

    A metric has a child per engine (data-parallel rank) and combination of labels. Only its own methods write its
    fields. Threads: the API server's event loop only.
    """

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._definitions: dict[str, MetricName] = {}
        self._metrics: dict[str, Any] = {}
        self._children: dict[tuple[int, str, str], Any] = {}
        classes = {
            MetricKind.COUNTER: metric_types[Counter],
            MetricKind.GAUGE: metric_types[Gauge],
            MetricKind.HISTOGRAM: metric_types[Histogram],
        }
        for one in definitions():
            more: dict[str, Any] = {}
            if one.kind is MetricKind.HISTOGRAM:
                more["buckets"] = SECONDS
            elif one.kind is MetricKind.GAUGE:
                more["multiprocess_mode"] = "mostrecent"
            self._definitions[one.name] = one
            self._metrics[one.name] = classes[one.kind](
                name=ENGINE_PREFIX + one.name, documentation=one.help, labelnames=[*labelnames, *one.labels], **more
            )
            # An engine whose model is refused says nothing, ever, and must not look like one that is not there.
            begins_at_0 = one.name == "connected" or one.kind is not MetricKind.GAUGE
            for engine in per_engine_labelvalues if begins_at_0 and not one.labels else ():
                self._child(engine, one.name, "")

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take one engine's stats."""
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
        """The child of an engine and its labels; None for an undefined metric, which is logged once."""
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
