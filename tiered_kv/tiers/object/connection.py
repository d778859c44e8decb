"""Kept-alive HTTP connections whose every wait ends with a deadline, straight to and from the caller's memory.

Owns sockets and the pool of those that are idle. Knows nothing of S3 and of peers: what is asked and what an answer
means is the business of ``thread_bodies.py`` and ``peers/peer.py``, its callers.

What is not obvious: on plain TCP one system call moves a whole body (``MSG_WAITALL``, and a blocking send), bounded by
the kernel's own timeouts. Python's timeouts would poll before each of some hundred pieces and ask for the GIL after it,
and beside a busy Python thread each asking costs 5 ms (docs/decisions/0032-s3-bodies.md). TLS goes through memory for
the same reason (``tiers/tls.py``).
"""

import contextlib
import http.client
import io
import math
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tiered_kv.tiers.object.medium import CallRunner, Deadline
from tiered_kv.tiers.tls import Tls

IDLE_MAX_S: Final = 15.0
"""A connection that lay idle for longer is not used again: load balancers and firewalls forget without a word."""

IDLE_CHECK_S: Final = 5.0
"""Between looks at what is idle: what the server has ended waits for so long until our side is closed, too."""

IDLE_SUSPECT_S: Final = 1.0
"""A server may have closed what lay idle for so long just as it was used again; earlier, a failure is the request's."""

_TIMEVAL: Final = struct.Struct("@ll")


class SilentError(TimeoutError):
    """The other side took or gave no byte for the longest wait, before the deadline."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a connection leads; ``context`` is None for plain HTTP."""

    host: str
    port: int
    context: ssl.SSLContext | None


class Wire:
    """A connected socket with a deadline; what ``http.client`` takes for a socket.

    Threads: one at a time, the one whose call has the connection.

    Raises:
        TimeoutError: The deadline has passed; SilentError if it was nothing but silence.
    """

    def __init__(self, connected: socket.socket, silence_s: float, tls: Tls | None = None) -> None:
        """Use a socket; ``tls`` has to shake hands over it first."""
        self._socket = connected
        self._tls = tls
        self._silence_s = silence_s
        self._deadline = Deadline(0)
        self.reader = io.BufferedReader(_WireReader(self))
        connected.settimeout(None)

    def start(self, deadline: Deadline) -> None:
        """Obey this deadline from now on."""
        self._deadline = deadline

    def shake_hands(self) -> None:
        """Agree on keys, if there are any to agree on; the deadline bounds it all.

        Raises:
            OSError: They could not; ssl.SSLError is one.
        """
        if self._tls is not None:
            self._tls.shake_hands(self._receive, self._transmit)

    def makefile(self, mode: str) -> "io.BufferedReader[_WireReader]":
        """A new buffered reader, for one answer; closing it leaves the socket open."""
        assert mode == "rb", mode
        self.reader = io.BufferedReader(_WireReader(self))
        return self.reader

    def sendall(self, data: bytes | memoryview) -> None:
        with memoryview(data) as view:  # every view is released here, also those of an error's traceback
            if self._tls is None:
                self._transmit(view)
            else:
                self._tls.sendall(view, self._transmit)

    def _transmit(self, data: bytes | memoryview) -> None:
        offset = 0
        with memoryview(data) as view:
            while offset < len(view):
                self._arm(socket.SO_SNDTIMEO)
                try:
                    with view[offset:] as part:
                        offset += self._socket.send(part)
                except (BlockingIOError, TimeoutError) as exc:
                    raise self._over() from exc

    def recv_into(self, view: memoryview, flags: int = 0) -> int:
        """Read what has come, at least a byte; 0: the stream ended."""
        if self._tls is None:
            return self._receive(view, flags)
        return self._tls.recv_into(view, self._receive, self._transmit)

    def _receive(self, view: memoryview, flags: int = 0) -> int:
        self._arm(socket.SO_RCVTIMEO)
        try:
            return self._socket.recv_into(view, 0, flags)
        except (BlockingIOError, TimeoutError) as exc:
            raise self._over() from exc

    def fill(self, view: memoryview, on_piece: Callable[[int], object] = lambda _: None) -> int:
        """Read until ``view`` is full or the stream ends: the number of bytes read.

        Args:
            on_piece: Told how many of them are there whenever more are; once, unless they come encrypted.
        """
        self.acknowledge()
        offset = self.reader.readinto1(view)  # what came together with the head
        while 0 < offset < len(view):
            with view[offset:] as rest:  # released here, also where an error's traceback would keep it
                count = self.recv_into(rest, socket.MSG_WAITALL)
            if count == 0:
                break
            offset += count
            on_piece(offset)
        return offset

    def acknowledge(self) -> None:
        """Acknowledge an answer's head now. The kernel waits 40 ms to do it with our next bytes, and a server that uses
        Nagle's algorithm waits with it before it sends the first bytes of a body."""
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)

    def is_quiet(self) -> bool:
        """Whether nothing came while idle: what comes without a question is the end, or nothing we could use."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(0) and (self._tls is None or self._tls.is_quiet())

    def close(self) -> None:
        """Nothing: ``http.client`` closes its socket while a last answer's body is still to be read. See ``end``."""

    def end(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _arm(self, option: int) -> None:
        """Bound the next system call: of all its waits the kernel counts the sum."""
        seconds, rest = divmod(max(self._deadline.wait_s(self._silence_s), 1e-3), 1.0)
        self._socket.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(seconds), int(rest * 1e6)))

    def _over(self) -> TimeoutError:
        if self._deadline.left_s() <= 1e-3:
            return TimeoutError("the call's time is over")
        return SilentError(f"no byte within {self._silence_s:g} s")


def _connect_any(place: Place, end_s: float) -> socket.socket:
    """Connect to one of a host's addresses; one that does not answer leaves time for those after it.

    Raises:
        OSError: None could be connected to.
    """
    found = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
    failure: OSError = TimeoutError("no address answers")
    for left, (family, kind, protocol, _, address) in zip(range(len(found), 0, -1), found, strict=True):
        wait_s = (end_s - time.monotonic()) / left
        if wait_s <= 0:
            break
        made = socket.socket(family, kind, protocol)
        try:
            made.settimeout(wait_s)
            made.connect(address)
        except OSError as exc:
            failure = exc
            made.close()
        else:
            return made
    raise failure


class _WireReader(io.RawIOBase):
    """A wire as a raw stream; ``http.client`` buffers and closes one per answer."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._wire.recv_into(memoryview(buffer).cast("B"))


class HttpConnection(http.client.HTTPConnection):
    """One connection to a place, made already.

    Threads: one at a time.
    """

    def __init__(self, place: Place, wire: Wire) -> None:
        super().__init__(place.host, place.port)
        self.place = place
        self.wire = wire
        self.sock: Any = wire
        self.idle_since_s = math.inf  # not yet idle
        self.auto_open = 0  # a request on a closed connection fails instead of connecting without our deadline

    @property
    def is_suspect(self) -> bool:
        """Whether a failure may be the server's closing of what lay idle, and none of the request's."""
        return time.monotonic() - self.idle_since_s >= IDLE_SUSPECT_S

    def ask(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes | memoryview, deadline: Deadline
    ) -> http.client.HTTPResponse:
        """Send a request and read the head of its answer.

        Raises:
            TimeoutError: As of :class:`Wire`.
            OSError, http.client.HTTPException: The connection ended, or no HTTP came.
        """
        self.wire.start(deadline)
        self.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
        for name, value in headers.items():
            self.putheader(name, value)
        try:
            self.endheaders()
            if len(body):
                self.send(body)
        except (BrokenPipeError, ConnectionResetError, SilentError):
            # A server may refuse before it has read it all, and what it said is worth more than how it left.
            with contextlib.suppress(OSError, http.client.HTTPException):
                return self._refusal()
            raise
        return self._answer()

    def _answer(self) -> http.client.HTTPResponse:
        answer = self.getresponse()
        if answer.status < 200:  # http.client knows of 100 alone; the real one would be taken for the next request's
            raise http.client.HTTPException(f"an interim answer. status={answer.status}")
        return answer

    def _refusal(self) -> http.client.HTTPResponse:
        answer = self._answer()
        answer.will_close = True  # what was not sent of the body would be taken for the next request
        return answer


class ConnectionPool:
    """Idle connections, those used last first.

    Threads: any. A connection is in the pool or in one call, never in both. A thread of its own closes what the server
    has ended and what lay idle for too long, and ends itself once nothing is idle.
    """

    def __init__(self, idle_max: int, connect_timeout_s: float, silence_s: float) -> None:
        """Keep at most ``idle_max`` connections; ``silence_s`` bounds a single wait for the other side."""
        self._idle_max = idle_max
        self._connect_timeout_s = connect_timeout_s
        self._silence_s = silence_s
        self._runner = CallRunner(connect_timeout_s)
        self._lock = threading.Lock()
        self._idle: list[HttpConnection] = []
        self._is_watched = False
        self._closing = threading.Event()

    def take(self, place: Place) -> HttpConnection | None:
        """An idle connection that seems alive; None: there is none."""
        while True:
            with self._lock:
                found = next((c for c in reversed(self._idle) if c.place == place), None)
                if found is None:
                    return None
                self._idle.remove(found)
            if _is_usable(found):
                return found
            found.wire.end()

    def connect(self, place: Place, deadline: Deadline) -> HttpConnection:
        """A new connection. Made in a thread of its own: nothing else bounds a name server or a handshake.

        Raises:
            TimeoutError: It took too long; what comes of it later is closed.
            OSError: It could not be made; ssl.SSLError and socket.gaierror are such.
        """
        wait_s = deadline.wait_s(self._connect_timeout_s)
        wire = self._runner.run(self._dial, place, wait_s, timeout_s=wait_s, late=Wire.end)
        return HttpConnection(place, wire)

    def _dial(self, place: Place, timeout_s: float) -> Wire:
        deadline = Deadline(timeout_s)
        plain = _connect_any(place, time.monotonic() + timeout_s)
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            tls = None if place.context is None else Tls(place.context, place.host)
            wire = Wire(plain, self._silence_s, tls)
            wire.start(deadline)
            wire.shake_hands()
            return wire
        except BaseException:
            plain.close()
            raise

    def give(self, connection: HttpConnection) -> None:
        """Keep a connection whose answer was read to its end; what is idle for longest makes room."""
        connection.idle_since_s = time.monotonic()
        with self._lock:
            everything = [*self._idle, connection]
            self._idle = [] if self._closing.is_set() else everything[-self._idle_max :]
            dropped = everything[: len(everything) - len(self._idle)]
            is_to_start = bool(self._idle) and not self._is_watched
            self._is_watched |= is_to_start
        for one in dropped:
            one.wire.end()
        if is_to_start:
            self._start_watch()

    def _start_watch(self) -> None:
        try:
            threading.Thread(target=self._watch, name="idle-connections", daemon=True).start()
        except RuntimeError:  # no thread can be had now: ``take`` looks as well, and the next one given tries again
            with self._lock:
                self._is_watched = False

    def _watch(self) -> None:
        """Close idle connections that nobody can use, until none is idle."""
        while not self._closing.wait(IDLE_CHECK_S):
            with self._lock:  # so that none is taken while it is looked at, which asks the kernel and waits for nothing
                everything = self._idle
                self._idle = [one for one in everything if _is_usable(one)]
                self._is_watched = bool(self._idle)
                dropped = [one for one in everything if one not in self._idle]
                is_over = not self._is_watched
            for one in dropped:
                one.wire.end()
            if is_over:
                return

    def close(self) -> None:
        """Close what is idle now, and from now on what is given back. Idempotent."""
        with self._lock:
            self._closing.set()
            idle, self._idle = self._idle, []
        for one in idle:
            one.wire.end()


def _is_usable(idle: HttpConnection) -> bool:
    return time.monotonic() - idle.idle_since_s < IDLE_MAX_S and idle.wire.is_quiet()
