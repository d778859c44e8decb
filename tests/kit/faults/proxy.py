"""A proxy between a client and a real S3 server that fails on demand, and counts what it is asked.

Fault model: what a network, a load balancer or an overloaded server does to one request. Bytes at rest are the
business of other tests. Which requests fail is a value (``Fault``) set by the test while the proxy runs; the choice by
probability depends on seed, method, path and how often that was asked before, never on the order of threads.

Nothing is rewritten: SigV4 signs the Host header, the client signs the proxy's host and port, and radosgw and MinIO
check the signature against the Host header they get, whatever their own address is. It has to be path-style addressing:
in virtual-host style the bucket would be part of the host.

Threads: one accepts, one per client connection; ``close`` ends them all. Owns sockets only.
"""

import http.client
import io
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.message import Message
from types import TracebackType
from typing import BinaryIO, Self
from urllib.parse import urlsplit

from tests.kit.faults.model import Fault, Mode, Request, describe, error_answer

__all__ = ["Fault", "FaultProxy", "Mode", "Request"]

PIECE_BYTES = 64 << 10
UPSTREAM_TIMEOUT_S = 60.0

_Source = BinaryIO | http.client.HTTPResponse


class ConnectionOver(Exception):
    """The client's connection is finished; ``is_reset``: by RST."""

    def __init__(self, *, is_reset: bool) -> None:
        super().__init__()
        self.is_reset = is_reset


@dataclass(slots=True)
class _Rule:
    """A fault in force, and how often it has struck. Guarded by the proxy's lock."""

    fault: Fault
    struck: int = 0
    lifted: threading.Event = field(default_factory=threading.Event)


class FaultProxy:
    """A proxy on 127.0.0.1 in front of ``upstream_url`` (plain http). A context manager; starts up and passing.

    Threads: every method from any thread.
    """

    def __init__(self, upstream_url: str) -> None:
        parts = urlsplit(upstream_url)
        if parts.scheme != "http" or parts.hostname is None:
            raise ValueError(f"the proxy speaks plain http only. url={upstream_url}")
        self._upstream = (parts.hostname, parts.port or 80)
        self._lock = threading.Lock()
        self._rules: list[_Rule] = []
        self._requests: list[Request] = []
        self._nth: Counter[tuple[str, str]] = Counter()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener: socket.socket | None = None
        self._port = 0
        self.up()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    # --- control -----------------------------------------------------------------------------------------------------

    def set(self, *faults: Fault) -> None:
        """Replace the faults in force; the first that fits a request decides. None given: everything passes."""
        with self._lock:
            old, self._rules = self._rules, [_Rule(fault) for fault in faults]
        for rule in old:
            rule.lifted.set()

    @contextmanager
    def failing(self, *faults: Fault) -> Iterator[None]:
        """Have these faults in force for the block, then none."""
        self.set(*faults)
        try:
            yield
        finally:
            self.set()

    def down(self) -> None:
        """Close the port and reset every connection: connecting is refused until ``up``."""
        with self._lock:
            listener, self._listener = self._listener, None
            connections = list(self._open)
            self._open.clear()
        if listener is not None:
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept, which close alone would not
            listener.close()
        for connection in connections:
            # Ends a wait for the client's bytes without a word to it; its thread then closes, and that is the RST.
            with suppress(OSError):
                _make_closing_a_reset(connection)
                connection.shutdown(socket.SHUT_RD)

    def up(self) -> None:
        """Listen again on the same port; nothing to do where it listens."""
        with self._lock:
            if self._listener is not None:
                return
            self._listener = socket.create_server(("127.0.0.1", self._port), backlog=128)
            self._port = self._listener.getsockname()[1]
            thread = threading.Thread(target=self._accept, args=(self._listener,), name="fault-proxy", daemon=True)
            self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        """End all connections and threads. Idempotent."""
        self.set()
        self.down()
        while self._threads:
            thread = self._threads.pop()
            thread.join(UPSTREAM_TIMEOUT_S)
            if thread.is_alive():
                raise RuntimeError(f"a thread of the fault proxy does not end. thread={thread.name}")

    # --- counts ------------------------------------------------------------------------------------------------------

    @property
    def requests(self) -> list[Request]:
        """Everything asked since the start or ``forget``, in order of arrival."""
        with self._lock:
            return list(self._requests)

    def count(self, kind: str = "", path: str = "") -> int:
        """Requests of a kind whose path contains ``path``; empty: any."""
        return sum(kind in ("", request.kind) and path in request.path for request in self.requests)

    def counts(self) -> dict[str, int]:
        """Requests per kind."""
        return dict(Counter(request.kind for request in self.requests))

    def forget(self) -> None:
        """Count from zero again. The choice by probability goes on where it was."""
        with self._lock:
            self._requests.clear()

    def _admit(self, request: Request) -> _Rule | None:
        """Count a request and choose its fault."""
        with self._lock:
            self._requests.append(request)
            self._nth[request.kind, request.path] += 1
            nth = self._nth[request.kind, request.path]
            for rule in self._rules:
                fault = rule.fault
                if (fault.kinds and request.kind not in fault.kinds) or fault.path not in request.path:
                    continue
                if fault.first is not None and rule.struck >= fault.first:
                    continue
                drawn = random.Random(f"{fault.seed} {request.kind} {request.path} {nth}").random()
                if drawn < fault.probability:
                    rule.struck += 1
                    return rule
        return None

    # --- connections -------------------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return  # down
            with self._lock:
                if self._listener is not listener:
                    connection.close()
                    return
                self._open.add(connection)
                self._threads = [t for t in self._threads if t.is_alive()]
                thread = threading.Thread(target=self._serve, args=(connection,), name="fault-proxy", daemon=True)
                thread.start()
                self._threads.append(thread)

    def _serve(self, connection: socket.socket) -> None:
        """Answer the requests of one connection until one side ends it."""
        try:
            with connection.makefile("rb") as stream:
                while self._answer(connection, stream):
                    pass
        except ConnectionOver as over:
            if over.is_reset:
                _make_closing_a_reset(connection)
        except (OSError, http.client.HTTPException):
            # The client left or the server is gone; the client sees what a server that dies shows it.
            with suppress(OSError):
                _make_closing_a_reset(connection)
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()

    def _answer(self, connection: socket.socket, stream: BinaryIO) -> bool:
        """Handle one request; False when the client has closed."""
        line = stream.readline(PIECE_BYTES)
        if not line.endswith(b"\n"):
            return False
        method, target, _ = line.decode("latin-1").split(" ", 2)
        headers = http.client.parse_headers(stream)
        with self._lock:
            if connection not in self._open:  # down came while we read: what we have may be half a request
                raise ConnectionOver(is_reset=True)
        request = describe(method, target, headers)
        rule = self._admit(request)
        mode = None if rule is None else rule.fault.mode
        if headers.get("Expect", "").lower() == "100-continue" and mode is not Mode.SILENCE:
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        if rule is not None:
            if mode is Mode.SILENCE:
                self._say_nothing(connection, rule)
            if mode is Mode.STATUS:
                self._discard(stream, request.content_bytes)
                connection.sendall(error_answer(request, rule.fault.status))
                return True
        self._forward(connection, stream, (request, target, headers), rule)
        return True

    def _say_nothing(self, connection: socket.socket, rule: _Rule) -> None:
        """Hold the request until the fault is lifted, the proxy goes down or the client has hung up."""
        connection.setblocking(False)
        while not rule.lifted.wait(0.02):
            with self._lock:
                if connection not in self._open:
                    break
            with suppress(BlockingIOError):
                if not connection.recv(1, socket.MSG_PEEK):
                    break
        raise ConnectionOver(is_reset=True)

    def _forward(
        self,
        connection: socket.socket,
        stream: BinaryIO,
        asked: tuple[Request, str, Message],
        rule: _Rule | None,
    ) -> None:
        """Pass a request on and its answer back, damaged as the rule says. A connection of its own per request:
        a stale one would be a fault nobody ordered."""
        request, target, headers = asked
        mode = None if rule is None else rule.fault.mode
        upstream = http.client.HTTPConnection(*self._upstream, timeout=UPSTREAM_TIMEOUT_S)
        try:
            upstream.putrequest(request.method, target, skip_host=True, skip_accept_encoding=True)
            for name, value in headers.items():
                upstream.putheader(name, value)
            upstream.endheaders()
            upload = request.content_bytes // 2 if mode is Mode.RESET else request.content_bytes
            for piece in self._pieces(stream, upload, rule):
                upstream.send(piece)
            if mode is Mode.RESET and (request.content_bytes or request.method not in ("GET", "POST")):
                raise ConnectionOver(is_reset=True)
            answer = upstream.getresponse()
            if mode is Mode.LOST:
                answer.read()
                raise ConnectionOver(is_reset=True)
            self._return(connection, request, answer, rule)
        finally:
            upstream.close()

    def _return(
        self, connection: socket.socket, request: Request, answer: http.client.HTTPResponse, rule: _Rule | None
    ) -> None:
        """Send the answer's head and body to the client."""
        mode = None if rule is None else rule.fault.mode
        source: _Source = answer
        length = answer.length
        if length is None:  # chunked: a list or an error, small; passed on with its length
            whole = answer.read()
            source, length = io.BytesIO(whole), len(whole)
        head = [f"HTTP/1.1 {answer.status} {answer.reason}"]
        skipped = {"transfer-encoding", "content-length", "connection"}
        head += [f"{name}: {value}" for name, value in answer.getheaders() if name.lower() not in skipped]
        promised = answer.headers.get("Content-Length", length) if request.method == "HEAD" else length
        if answer.status not in (204, 304):
            head.append(f"Content-Length: {promised}")
        connection.sendall("\r\n".join(head).encode("latin-1") + b"\r\n\r\n")
        cut = mode in (Mode.RESET, Mode.TRUNCATE)
        passed = 0
        for piece in self._pieces(source, length // 2 if cut else length, rule):
            if mode is Mode.FLIP and passed <= length // 2 < passed + len(piece):
                piece = _flip(piece, length // 2 - passed)
            connection.sendall(piece)
            passed += len(piece)
        if cut:
            raise ConnectionOver(is_reset=mode is Mode.RESET)

    def _pieces(self, source: _Source, size: int, rule: _Rule | None) -> Iterator[bytes]:
        """The next ``size`` bytes of a body, at the speed the rule says."""
        drip = rule.fault.bytes_per_s if rule is not None and rule.fault.mode is Mode.DRIP else 0
        while size > 0:
            piece = source.read(min(size, max(1, drip // 10) if drip else PIECE_BYTES))
            if not piece:
                raise ConnectionOver(is_reset=True)
            if drip and rule is not None and rule.lifted.wait(len(piece) / drip):
                drip = 0
            size -= len(piece)
            yield piece

    def _discard(self, stream: BinaryIO, size: int) -> None:
        for _ in self._pieces(stream, size, None):
            pass


def _flip(piece: bytes, offset: int) -> bytes:
    return piece[:offset] + bytes([piece[offset] ^ 1]) + piece[offset + 1 :]


def _make_closing_a_reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
