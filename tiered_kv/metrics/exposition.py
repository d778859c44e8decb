"""A server's figures as Prometheus metrics, under the names of ``names.py``.

docs/metrics.md explains each metric; a test compares it with a scrape. ``server/http.py`` answers scrapes.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from tiered_kv.metrics.figures import HOST_NAME, ServerFigures, TierFigures
from tiered_kv.metrics.names import SERVER_METRICS, SERVER_PREFIX, MetricKind, ShownIn, server_event

_METRICS: Final = {metric.name: metric for metric in SERVER_METRICS}
_FAMILIES: Final[dict[MetricKind, Any]] = {
    MetricKind.COUNTER: CounterMetricFamily,
    MetricKind.GAUGE: GaugeMetricFamily,
}


class FiguresCollector(Collector):
    """One answer of a server as metrics."""

    def __init__(self, figures: ServerFigures, age_s: float) -> None:
        self._figures = figures
        self._age_s = age_s

    def collect(self) -> Iterator[Metric]:
        """Every metric, also those without a sample at the moment."""
        build = _METRICS["build"]
        yield InfoMetricFamily(SERVER_PREFIX + build.name, build.help, {"version": self._figures.version})
        yield _family("start_time_seconds", self._figures.started_unix_s)
        yield _family("figures_age_seconds", self._age_s)
        yield from self._clients()
        yield from self._tokens()
        yield from self._tiers()
        yield from self._flows()
        yield from self._operations()
        yield self._curves()
        yield from self._events()

    def _clients(self) -> Iterator[Metric]:
        figures = self._figures
        states = [session.state for session in figures.sessions]
        yield _family("clients", figures.clients)
        yield _family("sessions", {(state,): float(states.count(state)) for state in ("joining", "ready", "lost")})
        yield _family("pinned_bytes", sum(session.pinned_bytes for session in figures.sessions))
        yield _family("pinning_seconds", sum(session.pinning_s for session in figures.sessions))
        yield _family("open_lookups", figures.hierarchy["lookups"])
        yield _family("leased_bytes", figures.hierarchy["leased_bytes"])
        yield _family("pending_writes", figures.pending_writes)

    def _tokens(self) -> Iterator[Metric]:
        tokens = self._figures.tokens
        hits = {(hit.tier,): float(hit.tokens) for hit in tokens.hits}
        yield _family("lookups", tokens.lookups)
        yield _family("prompt_tokens", tokens.prompt_tokens)
        yield _family("asked_tokens", tokens.asked_tokens)
        yield _family("hit_tokens", hits)
        decisions = {(decision,): float(count) for decision, count in tokens.decisions.items()}
        yield _family("decisions", decisions)
        yield _family("missed_tokens", tokens.missed_tokens)

    def _tiers(self) -> Iterator[Metric]:
        host, tiers = self._figures.hierarchy, self._figures.tiers

        def each(value: Callable[[TierFigures], float | None], of_host: float | None = None) -> dict[Any, float]:
            values = [(HOST_NAME, of_host), *((tier.name, value(tier)) for tier in tiers)]
            return {(name,): float(number) for name, number in values if number is not None}

        used = each(lambda tier: tier.used_bytes, host["host_assigned_bytes"])
        capacity = each(lambda tier: tier.capacity_bytes, host["host_capacity_bytes"])
        chunks = each(lambda tier: tier.blobs, host["host_ready_chunks"])
        jobs = {(tier.name, kind): float(count) for tier in tiers for kind, count in tier.jobs.items()}
        yield _family("used_bytes", used)
        yield _family("capacity_bytes", capacity)
        yield _family("chunks", chunks)
        yield _family("queue_chunks", each(lambda t: t.backlog_chunks))
        yield _family("queue_bytes", each(lambda t: t.queued_bytes))
        yield _family("jobs", jobs)
        is_open = each(lambda tier: None if tier.breaker is None else tier.breaker != "closed")
        yield _family("breaker_open", is_open)
        opened = each(lambda tier: tier.breaker_opened)
        yield _family("breaker_opened", opened)
        yield _family("corrupt_reads", each(lambda t: t.corrupt))
        admissions = {(tier.name, "admitted"): float(tier.admitted_chunks) for tier in tiers}
        admissions |= {(tier.name, "declined"): float(tier.declined_chunks) for tier in tiers}
        yield _family("admissions", admissions)
        leads = each(lambda tier: None if tier.bucket is None else tier.bucket.role == "leader")
        yield _family("bucket_leader", leads)

    def _flows(self) -> Iterator[Metric]:
        flows = self._figures.flows
        stored = {(flow.tier, how): float(count) for flow in flows for how, count in flow.stored.items()}
        removed = {(flow.tier, why): float(count) for flow in flows for why, count in flow.removed.items()}
        yield _family("stored_chunks", stored)
        yield _family("removed_chunks", removed)
        sizes = {(flow.tier,): float(flow.stored_bytes) for flow in flows}
        yield _family("stored_bytes", sizes)
        sizes = {(flow.tier,): float(flow.removed_bytes) for flow in flows}
        yield _family("removed_bytes", sizes)
        chunks = {(flow.tier,): float(flow.resident_chunks) for flow in flows}
        yield _family("resident_chunks", chunks)
        sizes = {(flow.tier,): float(flow.resident_bytes) for flow in flows}
        yield _family("resident_bytes", sizes)

    def _operations(self) -> Iterator[Metric]:
        rows = self._figures.operations
        calls = {(row.tier, row.operation, row.outcome): float(row.calls) for row in rows}
        seconds = {(row.tier, row.operation, row.outcome): row.seconds for row in rows}
        moved = {(row.tier, row.operation): float(row.bytes) for row in rows if row.outcome == "ok"}
        yield _family("operations", calls)
        yield _family("operation_seconds", seconds)
        yield _family("operation_bytes", moved)

    def _curves(self) -> Metric:
        shares = {
            (curve.namespace, point.tier, f"{point.times:g}"): point.found_share
            for curve in self._figures.curves
            for point in curve.points
        }
        return _family("curve_found_share", shares)

    def _events(self) -> Iterator[Metric]:
        counters = self._figures.counters
        evicted = {(HOST_NAME,): float(counters.get("host_evicted", 0))}
        for number, tier in enumerate(self._figures.tiers):
            # Tiering makes room in the first of them alone; below it lies what other machines use, too.
            lower = 0 if number else counters.get("lower_evicted", 0)
            bucket = tier.bucket
            evicted[tier.name,] = float(lower if bucket is None else bucket.evicted_blobs + bucket.expired_blobs)
        yield _family("evicted_chunks", evicted)
        yield _family("dropped_chunks", self._counted(ShownIn.DROPPED_CHUNKS))
        yield _family("events", self._counted(ShownIn.EVENTS))

    def _counted(self, where: ShownIn) -> dict[tuple[str], float]:
        """Counters that are shown in one metric, by its label."""
        events = ((server_event(name), count) for name, count in self._figures.counters.items())
        return {(event.label or event.name,): float(count) for event, count in events if event.shown_in is where}


def _family(name: str, value: Any) -> Metric:
    """The metric of that name with a number, or with numbers by its labels' values."""
    metric = _METRICS[name]
    family = _FAMILIES[metric.kind](SERVER_PREFIX + name, metric.help, labels=metric.labels)
    for labels, number in value.items() if isinstance(value, dict) else [((), value)]:
        family.add_metric(labels, number)
    filled: Metric = family
    return filled
