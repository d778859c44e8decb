"""Metrics, health and readiness of a server over HTTP, for Prometheus and whoever starts and stops servers; and hints.

Runs in threads of the serving process and asks the server through its own socket, as ``tiered-kv stat`` does, so it
shares no state with the loop and cannot hold it up::

    /healthz  200 while the server starts, and while its loop has answered within the last minute; else 503: restart it
    /readyz   200 while engines can join and every tier but peers is used; else 503, and a line says why
    /metrics  for Prometheus; 503 while there are no figures

With a token, gateways also POST hints here (``hint_requests.py``).
"""

import contextlib
import io
import json
import logging
import math
import os
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.client import LineTooLong
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, Final

import msgspec

from tiered_kv.errors import ConfigError, ProtocolError, TieredKVError, TierUnavailable
from tiered_kv.metrics.figures import PEERS_NAME, ServerFigures
from tiered_kv.server import protocol as m
from tiered_kv.server.connect import SCHEME, Answer, answer_to, connect, shake_hands
from tiered_kv.server.hint_requests import ACTIONS, BODY_BYTES_MAX, HintRefused, HintRequests, HintsToken, admit
from tiered_kv.version import __version__

logger = logging.getLogger(__name__)

METRICS: Final = "/metrics"
HEALTH: Final = "/healthz"
READINESS: Final = "/readyz"

ASK_S: Final = 2.0
"""How long an answer waits for a server that is busy."""

STALE_S: Final = 60.0
"""How long the last figures are told instead."""

FRESH_S: Final = 0.2
"""Questions that come together share one to the server."""

HTTP_S: Final = 10.0
"""A client that sends nothing more of its request for this long, or takes nothing of its answer, is left."""

REQUEST_S: Final = 30.0
"""Longest time in which a request comes, so that who trickles holds no thread."""

HEAD_BYTES_MAX: Final = 32 << 10
"""Of a request's head, behind its first line; a hundred lines of 64 KiB are what Python takes, on each connection."""

DROPPED_AT_ONCE: Final = 64 << 10
"""Bytes of a body that is refused and taken in unread."""

CONNECTIONS_MAX: Final = 128
"""At once, each with a thread and a descriptor of the server's process; past it new ones are closed."""

REQUESTS_MAX: Final = 64
"""Of these, requests that are still coming; past it the oldest goes, so that who is silent locks no probe out."""


HINTS_REFUSED: Final = "hint_requests_refused"
"""Counted here and shown among what the server counts: it never hears of these."""


def ask_server(socket_path: str, message: m.Message, expected: type[Answer], timeout_s: float) -> Answer:
    """What the server that listens there answers.

    Raises:
        ConfigError, ProtocolError: It refuses, or is of another version.
        TierUnavailable: Nobody answers in time.
    """
    sock = connect(socket_path)
    if sock is None:
        raise TierUnavailable(f"no server answers at {SCHEME}{socket_path}")
    with sock:
        shake_hands(sock, m.Hello(m.PROTOCOL, __version__, "admin", os.getpid()), timeout_s)
        return answer_to(sock, message, expected)


def ask_figures(socket_path: str, timeout_s: float) -> ServerFigures:
    """The figures of the server that listens there.

    Raises:
        ConfigError, ProtocolError, TierUnavailable: As :func:`ask_server`.
    """
    answer = ask_server(socket_path, m.StatRequest(), m.Stat, timeout_s)
    try:
        return msgspec.json.decode(answer.figures, type=ServerFigures)
    except msgspec.DecodeError as exc:  # ValidationError is one
        raise ProtocolError(f"the server's figures cannot be understood: {exc}") from exc


class LastFigures:
    """Asks a server; remembers its last answer for when it is busy.

    Threads: any; one asks at a time, under the lock that guards every field.
    """

    def __init__(self, ask: Callable[[], ServerFigures], clock: Callable[[], float] = time.monotonic) -> None:
        self._ask = ask
        self._clock = clock
        self._lock = threading.Lock()
        self._last: ServerFigures | None = None
        self._asked_at = clock()
        self._failed_at = float("-inf")
        self._failure = TieredKVError()

    def silent_s(self) -> float:
        """Seconds since the server answered, or since it was asked to."""
        return self._clock() - self._asked_at

    def get(self) -> tuple[ServerFigures, float]:
        """The figures and their age in seconds.

        Raises:
            TierUnavailable: The server does not answer, and has not for a while.
        """
        came_s = self._clock()
        with self._lock:
            age_s = self._clock() - self._asked_at
            if self._last is not None and age_s < FRESH_S:
                return self._last, age_s
            if self._failed_at > came_s:  # who waited in line waits once, not once for each in front
                return self._after(self._failure)
            try:
                self._last = self._ask()
            except TieredKVError as exc:
                self._failed_at, self._failure = self._clock(), exc
                return self._after(exc)
            self._asked_at = self._clock()
            return self._last, 0.0

    def _after(self, failure: TieredKVError) -> tuple[ServerFigures, float]:
        """The last figures, if they can still be told; the caller holds the lock."""
        age_s = self._clock() - self._asked_at
        if self._last is None or age_s > STALE_S:
            raise TierUnavailable(f"the cache server does not answer: {failure}") from failure
        return self._last, age_s


def not_ready(figures: ServerFigures) -> str:
    """Why the server is not ready: tiers that are left alone, but for other machines' disks; empty if it is."""
    tiers = [tier for tier in figures.tiers if tier.breaker not in (None, "closed") and tier.name != PEERS_NAME]
    return "; ".join(f"{tier.name} tier is left alone ({tier.breaker}): {tier.breaker_reason}" for tier in tiers)


class _Head(io.BufferedIOBase):
    """The lines of a head, which together have a limit."""

    def __init__(self, file: io.BufferedIOBase) -> None:
        self._file = file
        self._left = HEAD_BYTES_MAX

    def readline(self, limit: int | None = -1, /) -> bytes:
        """The next line.

        Raises:
            LineTooLong: All of them together are too long.
        """
        room = self._left + 1
        line = self._file.readline(room if limit is None or limit < 0 else min(limit, room))
        self._left -= len(line)
        if self._left < 0:
            raise LineTooLong("head")
        return line


class _Handler(BaseHTTPRequestHandler):
    """Answers GET, and POST where hints are on; the server may still be starting."""

    server: "_Listener"
    timeout = HTTP_S
    server_version = "tiered-kv"
    sys_version = ""
    _has_body = False

    def parse_request(self) -> bool:
        """Read the head, unless it is too long, which is answered here."""
        whole = self.rfile
        self.rfile = _Head(whole)
        try:
            return super().parse_request()
        finally:
            self.rfile = whole

    def do_GET(self) -> None:
        self.server.has_come(self.connection)
        path = self.path.partition("?")[0]
        answers = {METRICS: self._metrics, HEALTH: self._health, READINESS: self._readiness}
        if path not in answers:
            known = ", ".join(answers)
            self._say(HTTPStatus.NOT_FOUND, f"there is no {path[:100]!a} here, but {known}")
        elif self.server.figures is not None:
            answers[path](self.server.figures)
        else:
            self._say(HTTPStatus.OK if path == HEALTH else HTTPStatus.SERVICE_UNAVAILABLE, "starting")

    def do_POST(self) -> None:
        path = self.path.partition("?")[0]
        try:
            if path.removeprefix("/") not in ACTIONS:
                known = ", ".join(f"/{action}" for action in ACTIONS)
                raise HintRefused(
                    HTTPStatus.NOT_FOUND, f"there is nothing to post to at {path[:100]!a}, but at {known}"
                )
            if (token := self.server.hints_token) is None:
                raise HintRefused(HTTPStatus.FORBIDDEN, "hints are off: start the server with --hints-token-file")
            hints = self.server.hints
            if hints is None:
                raise HintRefused(HTTPStatus.SERVICE_UNAVAILABLE, "the server is starting: try again")
            length = admit(token.now(), self.headers)
            status, answer = hints.answer(path.removeprefix("/"), lambda: self._body(length))
        except HintRefused as exc:
            self.server.count_refusal()
            status, answer = exc.status, {"error": str(exc)}
        self._answer(status, "application/json", json.dumps(answer).encode() + b"\n")
        self._drop_body()

    def _drop_body(self) -> None:
        """Take in what was not read of a body: who sends all of it before reading would find a reset, and no answer."""
        length = self.headers.get("Content-Length") or ""
        if self._has_body or not length.isdecimal():
            return
        with contextlib.suppress(OSError, ValueError):  # the client is gone or takes too long; digits without end
            left = min(int(length), BODY_BYTES_MAX)
            while left > 0 and (data := self.rfile.read1(min(left, DROPPED_AT_ONCE))):
                left -= len(data)

    def _body(self, length: int) -> bytes:
        """The body of a request.

        Raises:
            HintRefused: It does not come in time.
        """
        try:
            data = self.rfile.read(length)
        except TimeoutError as exc:
            raise HintRefused(HTTPStatus.REQUEST_TIMEOUT, f"expected a body of {length} bytes at once") from exc
        if len(data) < length:
            raise HintRefused(HTTPStatus.BAD_REQUEST, f"expected a body of {length} bytes, got {len(data)}")
        self._has_body = True
        self.server.has_come(self.connection)
        return data

    def _metrics(self, last: LastFigures) -> None:
        try:
            figures, age_s = last.get()
        except TierUnavailable as exc:
            self._say(HTTPStatus.SERVICE_UNAVAILABLE, str(exc))
            return
        counters = figures.counters | {HINTS_REFUSED: self.server.hints_refused}
        figures = msgspec.structs.replace(figures, counters=counters)
        # Imported by the first scrape: a server that nobody scrapes need not hold the client.
        from prometheus_client import CollectorRegistry  # noqa: PLC0415
        from prometheus_client.exposition import choose_encoder  # noqa: PLC0415

        from tiered_kv.metrics.exposition import FiguresCollector  # noqa: PLC0415

        registry = CollectorRegistry()
        registry.register(FiguresCollector(figures, age_s))
        try:
            encode, content_type = choose_encoder(self.headers.get("Accept") or "")
        except (TypeError, ValueError):  # it asks for a version that is no number
            encode, content_type = choose_encoder("")
        self._answer(HTTPStatus.OK, content_type, encode(registry))

    def _health(self, last: LastFigures) -> None:
        try:
            last.get()
        except TierUnavailable as exc:
            if last.silent_s() > STALE_S:
                self._say(HTTPStatus.SERVICE_UNAVAILABLE, str(exc))
                return
        self._say(HTTPStatus.OK, "ok")

    def _readiness(self, last: LastFigures) -> None:
        try:
            figures, age_s = last.get()
            why = not_ready(figures) if age_s <= FRESH_S else f"the cache server does not answer since {age_s:.0f} s"
        except TierUnavailable as exc:
            why = str(exc)
        self._say(HTTPStatus.SERVICE_UNAVAILABLE if why else HTTPStatus.OK, why or "ready")

    def _say(self, status: HTTPStatus, text: str) -> None:
        self._answer(status, "text/plain; charset=utf-8", f"{text}\n".encode())

    def _answer(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - named by http.server
        logger.debug(format, *args)


class _Listener(socketserver.ThreadingMixIn, HTTPServer):
    """One thread per connection, and not more of these than the limits above."""

    daemon_threads = True
    request_queue_size = CONNECTIONS_MAX
    figures: LastFigures | None = None
    hints: HintRequests | None = None
    hints_token: HintsToken | None = None

    def __init__(self, *given: Any) -> None:
        self._lock = threading.Lock()
        self._open: dict[Any, float] = {}  # oldest first: until when its request has to be here
        self.hints_refused = 0
        super().__init__(*given)

    def count_refusal(self) -> None:
        """A hint was answered with an error; called by every connection's thread."""
        with self._lock:
            self.hints_refused += 1

    def has_come(self, connection: socket.socket) -> None:
        """A whole request is here, and its answer has times of its own; called by the connection's thread."""
        with self._lock:
            self._open[connection] = math.inf

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            is_full = len(self._open) >= CONNECTIONS_MAX
            if not is_full:
                coming = [one for one, until_s in self._open.items() if until_s < math.inf]
                if len(coming) >= REQUESTS_MAX:
                    self._cut(coming[0])
                self._open[request] = time.monotonic() + REQUEST_S
        if is_full:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def service_actions(self) -> None:
        now_s = time.monotonic()
        with self._lock:
            for one in [one for one, until_s in self._open.items() if until_s <= now_s]:
                self._cut(one)

    def _cut(self, connection: socket.socket) -> None:
        """Have the thread that waits on it find its end; the caller holds the lock."""
        self._open[connection] = math.inf
        with contextlib.suppress(OSError):  # the client ended it just now
            connection.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # not HTTPServer's, which asks DNS for its own name
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        del request
        logger.debug("a scrape was cut off. client=%s: %r", client_address, sys.exception())


class OperationsPort:
    """Listens and answers from its construction on, with figures from :meth:`start` on.

    Attributes:
        url: Where metrics are scraped; the others are beside it.
    """

    def __init__(self, host: str, port: int, hints_token: HintsToken | None = None) -> None:
        """Take the port; 0: any that is free. Who shows the token may post hints; None: nobody may.

        Raises:
            ConfigError: It cannot be had.
        """
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            kind = type("_Listener", (_Listener,), {"address_family": family})
            self._http: _Listener = kind(address, _Handler)
            self._http.hints_token = hints_token
        except (OSError, OverflowError, UnicodeError) as exc:
            raise ConfigError(
                f"option --metrics-port: nothing can listen at {host} port {port}: {exc}. Name another port, or 0 for "
                "any that is free"
            ) from exc
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._http.server_port}{METRICS}"
        self._thread = threading.Thread(target=self._http.serve_forever, name="tiered_kv-http", daemon=True)
        self._thread.start()

    def start(self, socket_path: str) -> None:
        """Answer with the figures of the server that listens there."""

        def ask() -> ServerFigures:
            return ask_figures(socket_path, ASK_S)

        def pass_on(message: m.Message, expected: type[Any]) -> Any:
            return ask_server(socket_path, message, expected, ASK_S)

        self._http.hints = HintRequests(pass_on)
        self._http.figures = LastFigures(ask)

    def close(self) -> None:
        """Give the port back. Idempotent."""
        if self._thread.is_alive():
            self._http.shutdown()
            self._thread.join()
        self._http.server_close()
