"""A server's figures for Prometheus, over HTTP.

Runs in threads of the serving process and asks the server through its own socket, as ``tiered-kv stat`` does, so it
shares no state with the loop and cannot hold it up. What each metric means is told in docs/operations.md, which a test
compares with a scrape.
"""

import logging
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from tiered_kv.admin.server_link import ServerLink
from tiered_kv.errors import ConfigError, TieredKVError, TierUnavailable
from tiered_kv.metrics.figures import HOST, ServerFigures, TierFigures

logger = logging.getLogger(__name__)

PATH: Final = "/metrics"
ASK_S: Final = 2.0
"""How long a scrape waits for a server that is busy."""

STALE_S: Final = 60.0
"""How long the last figures are told instead."""

FRESH_S: Final = 0.2
"""Scrapes that come together share one question to the server."""

HTTP_S: Final = 10.0
"""A client that does not send its request for this long is left."""


class LastFigures:
    """Asks a server; remembers its last answer for when it is busy.

    Threads: any; one asks at a time, under the lock that guards every field.
    """

    def __init__(self, ask: Callable[[], ServerFigures], clock: Callable[[], float] = time.monotonic) -> None:
        self._ask = ask
        self._clock = clock
        self._lock = threading.Lock()
        self._last: ServerFigures | None = None
        self._asked_at = 0.0

    def get(self) -> tuple[ServerFigures, float]:
        """The figures and their age in seconds.

        Raises:
            TierUnavailable: The server does not answer, and has not for a while.
        """
        with self._lock:
            age_s = self._clock() - self._asked_at
            if self._last is not None and age_s < FRESH_S:
                return self._last, age_s
            try:
                self._last = self._ask()
            except TieredKVError as exc:
                age_s = self._clock() - self._asked_at
                if self._last is None or age_s > STALE_S:
                    raise TierUnavailable(f"the cache server does not answer: {exc}") from exc
                return self._last, age_s
            self._asked_at = self._clock()
            return self._last, 0.0


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


# -- HTTP -------------------------------------------------------------------------------------------------------------


class _Handler(BaseHTTPRequestHandler):
    """Answers GET /metrics."""

    server: "_Listener"
    timeout = HTTP_S
    server_version = "tiered-kv"
    sys_version = ""

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != PATH:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", f"there is only {PATH} here\n".encode())
            return
        try:
            figures, age_s = self.server.figures.get()
        except TierUnavailable as exc:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", f"{exc}\n".encode())
            return
        registry = CollectorRegistry()
        registry.register(FiguresCollector(figures, age_s))
        encode, content_type = choose_encoder(self.headers.get("Accept") or "")
        self._answer(HTTPStatus.OK, content_type, encode(registry))

    def _answer(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - named by http.server
        logger.debug(format, *args)


class _Listener(socketserver.ThreadingMixIn, HTTPServer):
    """One thread per connection."""

    daemon_threads = True
    figures: LastFigures

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # not HTTPServer's, which asks DNS for its own name
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        del request
        logger.debug("a scrape was cut off. client=%s: %r", client_address, sys.exception())


class MetricsServer:
    """Listens from its construction on; answers from :meth:`start` on.

    Attributes:
        url: Where to scrape.
    """

    def __init__(self, host: str, port: int) -> None:
        """Take the port; 0: any that is free.

        Raises:
            ConfigError: It cannot be had.
        """
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            kind = type("_Listener", (_Listener,), {"address_family": family})
            self._http: _Listener = kind(address, _Handler)
        except (OSError, OverflowError, UnicodeError) as exc:
            raise ConfigError(
                f"option --metrics-port: nothing can listen at {host} port {port}: {exc}. Name another port, or 0 for "
                "any that is free"
            ) from exc
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._http.server_port}{PATH}"
        self._thread: threading.Thread | None = None

    def start(self, socket_path: str) -> None:
        """Answer scrapes with the figures of the server that listens there."""

        def ask() -> ServerFigures:
            with ServerLink.of_socket(f"unix://{socket_path}", ASK_S) as link:
                return link.stat()

        self._http.figures = LastFigures(ask)
        self._thread = threading.Thread(target=self._http.serve_forever, name="tiered_kv-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Give the port back. Idempotent."""
        if self._thread is not None:
            self._http.shutdown()
            self._thread.join()
            self._thread = None
        self._http.server_close()
