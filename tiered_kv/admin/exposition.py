"""A server's figures as Prometheus metrics. What each means is told in docs/operations.md, which a test compares with a
scrape. Who answers scrapes is ``operations_port.py``.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from tiered_kv.metrics.figures import HOST, ServerFigures, TierFigures

_ADMISSIONS: Final = ["tier", "decision"]


class FiguresCollector(Collector):
    """One answer of a server as metrics."""

    def __init__(self, figures: ServerFigures, age_s: float) -> None:
        self._figures = figures
        self._age_s = age_s

    def collect(self) -> Iterator[Metric]:
        """Every metric, also those without a sample at the moment."""
        yield InfoMetricFamily("tiered_kv_build", "Version of the server.", {"version": self._figures.version})
        yield _gauge("start_time_seconds", "When the server started.", self._figures.started_unix_s)
        yield _gauge("figures_age_seconds", "Age of these figures; above 0 while the server is busy.", self._age_s)
        yield from self._clients()
        yield from self._tokens()
        yield from self._tiers()
        yield from self._flows()
        yield from self._operations()
        yield from self._events()

    def _clients(self) -> Iterator[Metric]:
        figures = self._figures
        states = [session.state for session in figures.sessions]
        yield _gauge("clients", "Connections to the server, this one included.", figures.clients)
        yield _gauge(
            "sessions",
            "Engines that take part.",
            {(state,): float(states.count(state)) for state in ("joining", "ready", "lost")},
            ["state"],
        )
        yield _gauge("open_lookups", "Lookups that have not ended.", figures.hierarchy["lookups"])
        yield _gauge("leased_bytes", "Host memory that lookups hold.", figures.hierarchy["leased_bytes"])
        yield _gauge("pending_writes", "Chunks written before the server ends.", figures.pending_writes)

    def _tokens(self) -> Iterator[Metric]:
        tokens = self._figures.tokens
        hits = {(hit.tier,): float(hit.tokens) for hit in tokens.hits}
        yield _counter("lookups", "Lookups that ended.", tokens.lookups)
        yield _counter("prompt_tokens", "Tokens of prompts looked up, in whole chunks.", tokens.prompt_tokens)
        yield _counter("asked_tokens", "Of those, tokens the engine did not have itself.", tokens.asked_tokens)
        yield _counter("hit_tokens", "Asked tokens that were got, by the tier that gave them.", hits, ["tier"])
        decisions = {(decision,): float(count) for decision, count in tokens.decisions.items()}
        yield _counter("decisions", "Lookups by what became of them.", decisions, ["decision"])
        yield _counter("missed_tokens", "Asked tokens that were not got.", tokens.missed_tokens)

    def _tiers(self) -> Iterator[Metric]:
        host, tiers = self._figures.hierarchy, self._figures.tiers

        def each(value: Callable[[TierFigures], float | None], of_host: float | None = None) -> dict[Any, float]:
            values = [(HOST, of_host), *((tier.name, value(tier)) for tier in tiers)]
            return {(name,): float(number) for name, number in values if number is not None}

        used = each(lambda tier: tier.used_bytes, host["host_assigned_bytes"])
        capacity = each(lambda tier: tier.capacity_bytes, host["host_capacity_bytes"])
        chunks = each(lambda tier: tier.blobs, host["host_ready_chunks"])
        jobs = {(tier.name, kind): float(count) for tier in tiers for kind, count in tier.jobs.items()}
        yield _gauge("used_bytes", "Bytes held; of a bucket by all servers.", used, ["tier"])
        yield _gauge("capacity_bytes", "Limit; no sample where there is none.", capacity, ["tier"])
        yield _gauge("chunks", "Chunks held; of a bucket by all servers.", chunks, ["tier"])
        yield _gauge("queue_chunks", "Chunks that wait to be written.", each(lambda t: t.backlog_chunks), ["tier"])
        yield _gauge("queue_bytes", "Host memory held by waiting writes.", each(lambda t: t.queued_bytes), ["tier"])
        yield _gauge("jobs", "Operations handed to threads and not ended.", jobs, ["tier", "operation"])
        is_open = each(lambda tier: None if tier.breaker is None else tier.breaker != "closed")
        yield _gauge("breaker_open", "1 while the tier is left out.", is_open, ["tier"])
        opened = each(lambda tier: tier.breaker_opened)
        yield _counter("breaker_opened", "How often the tier was left out.", opened, ["tier"])
        yield _counter("corrupt_reads", "Reads whose bytes were damaged.", each(lambda t: t.corrupt), ["tier"])
        admissions = {(tier.name, "admitted"): float(tier.admitted_chunks) for tier in tiers}
        admissions |= {(tier.name, "declined"): float(tier.declined_chunks) for tier in tiers}
        yield _counter("admissions", "Chunks that came, by whether they were to be written.", admissions, _ADMISSIONS)
        leads = each(lambda tier: None if tier.bucket is None else tier.bucket.role == "leader")
        yield _gauge("bucket_leader", "1 where this server keeps the bucket within its limits.", leads, ["tier"])

    def _flows(self) -> Iterator[Metric]:
        flows = self._figures.flows
        stored = {(flow.tier, how): float(count) for flow in flows for how, count in flow.stored.items()}
        removed = {(flow.tier, why): float(count) for flow in flows for why, count in flow.removed.items()}
        yield _counter("stored_chunks", "Chunks that came into a tier, by how.", stored, ["tier", "how"])
        yield _counter("removed_chunks", "Chunks that left a tier, by why.", removed, ["tier", "why"])
        sizes = {(flow.tier,): float(flow.stored_bytes) for flow in flows}
        yield _counter("stored_bytes", "Bytes that came into a tier.", sizes, ["tier"])
        sizes = {(flow.tier,): float(flow.removed_bytes) for flow in flows}
        yield _counter("removed_bytes", "Bytes that left a tier.", sizes, ["tier"])
        chunks = {(flow.tier,): float(flow.resident_chunks) for flow in flows}
        yield _gauge("resident_chunks", "Chunks this server knows to be there: stored less removed.", chunks, ["tier"])
        sizes = {(flow.tier,): float(flow.resident_bytes) for flow in flows}
        yield _gauge("resident_bytes", "Their bytes, less those that others stored.", sizes, ["tier"])

    def _operations(self) -> Iterator[Metric]:
        rows, labels = self._figures.operations, ["tier", "operation", "outcome"]
        calls = {(row.tier, row.operation, row.outcome): float(row.calls) for row in rows}
        seconds = {(row.tier, row.operation, row.outcome): row.seconds for row in rows}
        moved = {(row.tier, row.operation): float(row.bytes) for row in rows if row.outcome == "ok"}
        yield _counter("operations", "Operations on tiers that ended.", calls, labels)
        yield _counter("operation_seconds", "Time they took together.", seconds, labels)
        yield _counter("operation_bytes", "Bytes moved by those that were ok.", moved, labels[:2])

    def _events(self) -> Iterator[Metric]:
        counters = dict(self._figures.counters)
        evicted = {(HOST,): float(counters.pop("host_evicted", 0))}
        lower = float(counters.pop("lower_evicted", 0))
        for tier in self._figures.tiers:
            bucket = tier.bucket
            evicted[tier.name,] = lower if bucket is None else float(bucket.evicted_blobs + bucket.expired_blobs)
        drops = {(name,): float(count) for name, count in counters.items() if "_dropped" in name}
        others = {(name,): float(count) for name, count in counters.items() if "_dropped" not in name}
        yield _counter("evicted_chunks", "Chunks removed by this server to make room.", evicted, ["tier"])
        yield _counter("dropped_chunks", "Chunks that were not written, by the reason.", drops, ["reason"])
        yield _counter("events", "Everything else that is counted.", others, ["event"])


def _gauge(name: str, text: str, value: Any, labels: list[str] | None = None) -> Metric:
    return _fill(GaugeMetricFamily(f"tiered_kv_{name}", text, labels=labels or []), value)


def _counter(name: str, text: str, value: Any, labels: list[str] | None = None) -> Metric:
    return _fill(CounterMetricFamily(f"tiered_kv_{name}", text, labels=labels or []), value)


def _fill(family: Any, value: Any) -> Metric:
    """Add a number, or numbers by their labels' values."""
    for labels, number in value.items() if isinstance(value, dict) else [((), value)]:
        family.add_metric(labels, number)
    filled: Metric = family
    return filled
