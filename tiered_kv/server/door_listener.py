"""Who is connected to the door, for how long, and what they ask: TLS connections with a thread each.

Encryption and system calls of a whole piece run without Python's lock, so that one process uses as many cores as there
are connections (0042). Owns connections, their limits and HTTP's framing, which is h11's. Knows no blob: a handler
answers. Called by ``door.py``.
"""

import contextlib
import logging
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import h11

from tiered_kv.server.door_pace import OwnPace, Pace, QuickThreads, give_way
from tiered_kv.tiers.tls import Tls

logger = logging.getLogger(__name__)

STRANGERS_MAX: Final = 128
"""Connections that have not shown a token yet. Past it the oldest one goes, of the address that has most of them: who
opens many has them closed, and nobody else waits for it."""

STRANGERS_OF_ONE: Final = 32
"""Of these from one address."""

CONNECTIONS_MAX: Final = 512
"""In all; past it new ones are closed at once."""

FIRST_S: Final = 5.0
"""Longest time from a connection to its first whole question with a token."""

IDLE_S: Final = 30.0
"""Longest time between an answer and the next whole question; a peer lets go of what lay idle for half of it."""

ANSWER_S: Final = 60.0
"""Longest time in which a reader takes an answer, unless it may wait longer for one."""

SWEEP_S: Final = 0.5
WARN_INTERVAL_S: Final = 60.0
HEAD_BYTES_MAX: Final = 4096
BODY_BYTES_MAX: Final = 64 << 10
RECEIVED_BYTES: Final = 64 << 10
BACKLOG: Final = 128
RETRY_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Question:
    """A whole request whose sender has shown a token."""

    method: str
    target: str
    body: bytes


class DoorWire:
    """A connected socket, encrypted, whose other end began it. Whoever ends it shuts the socket down.

    Threads: one at a time, the connection's.
    """

    def __init__(self, connected: socket.socket, context: ssl.SSLContext) -> None:
        """Nothing was said yet."""
        self._socket = connected
        self._tls = Tls(context, None, room_bytes=RECEIVED_BYTES)

    def shake_hands(self) -> None:
        """Agree on keys.

        Raises:
            OSError: They could not; ssl.SSLError is one.
        """
        self._tls.shake_hands(self._socket.recv_into, self._socket.sendall)

    def recv(self, size_bytes: int) -> bytes:
        """What has come, at least a byte; empty: the stream ended."""
        part = bytearray(size_bytes)
        count = self._tls.recv_into(memoryview(part), self._socket.recv_into, self._socket.sendall)
        return bytes(part[:count])

    def sendall(self, part: bytes | memoryview) -> None:
        with memoryview(part) as view:
            self._tls.sendall(view, self._socket.sendall)


class Reply:
    """The answers of a connection: to each question :meth:`head` once, then :meth:`data` until the length is reached.

    Attributes:
        wire, http: The connection and its framing.
        pace: Of the thread that answers.

    Threads: one at a time, the connection's.
    """

    def __init__(self, wire: DoorWire, http: h11.Connection, pace: OwnPace) -> None:
        self.wire = wire
        self.http = http
        self.pace = pace
        self._piece = memoryview(b"")

    def piece(self, size_bytes: int) -> memoryview:
        """Memory for a part of the body, the same one for each."""
        if len(self._piece) < size_bytes:
            self._piece = memoryview(bytearray(size_bytes))
        return self._piece[:size_bytes]

    def head(self, status: int, size_bytes: int = 0, *, is_last: bool = False) -> None:
        """Begin an answer with a body of so many bytes; ``is_last``: the connection ends with it."""
        headers = [("Content-Length", str(size_bytes))]
        if is_last:
            headers.append(("Connection", "close"))
        self._send(h11.Response(status_code=status, headers=headers))

    def data(self, part: bytes | memoryview) -> None:
        """Send a part of the body."""
        self.pace.sends(len(part))
        event = h11.Data(data=part)  # type: ignore[arg-type]  # whatever has a length passes through
        for sent in self.http.send_with_data_passthrough(event) or ():
            self.wire.sendall(sent)

    def end(self) -> None:
        """The body is whole.

        Raises:
            h11.LocalProtocolError: It is not.
        """
        self._send(h11.EndOfMessage())

    def refuse(self, status: int) -> None:
        """Answer without a body, and end the connection with it."""
        self.head(status, is_last=True)
        self.end()

    def _send(self, event: h11.Response | h11.EndOfMessage) -> None:
        if text := self.http.send(event):  # in one piece, where the passing through would give each line by itself
            self.wire.sendall(text)


Handler = Callable[[Question, Reply], None]
Accepts = Callable[[str], bool]
"""Whether a token is good."""


@dataclass(slots=True, eq=False)
class DoorConnection:
    """One connection.

    Attributes:
        ends_s: When it is cut off.
        is_known: A token was shown on it.
        is_cut: It was cut off; its thread will see.
    """

    wire: socket.socket
    address: str
    ends_s: float
    is_known: bool = False
    is_cut: bool = False

    def cut(self) -> None:
        """Have the thread that waits on it find its end."""
        self.is_cut = True
        with contextlib.suppress(OSError):  # the other side ended it just now
            self.wire.shutdown(socket.SHUT_RDWR)


class DoorConnections:
    """All connections and their limits.

    Threads: any; every field is guarded by one lock, which also keeps a socket from being closed while it is cut.
    """

    def __init__(self, monotonic: Callable[[], float], answer_s: float = ANSWER_S) -> None:
        """None is open yet; ``answer_s``: how long one may take to read an answer."""
        self._monotonic = monotonic
        self._answer_s = answer_s
        self._lock = threading.Lock()
        self._open: dict[DoorConnection, None] = {}  # oldest first

    def admit(self, wire: socket.socket, address: str) -> DoorConnection | None:
        """Take a new connection in, in the place of another stranger's if need be; None: there are too many."""
        with self._lock:
            if len(self._open) >= CONNECTIONS_MAX:
                return None
            strangers = [one for one in self._open if not one.is_known and not one.is_cut]
            counts = Counter(one.address for one in strangers)
            most = address if counts[address] >= STRANGERS_OF_ONE else None
            if most is None and len(strangers) >= STRANGERS_MAX:
                most = counts.most_common(1)[0][0]
            if most is not None:
                next(one for one in strangers if one.address == most).cut()
            connection = DoorConnection(wire, address, self._monotonic() + FIRST_S)
            self._open[connection] = None
            return connection

    def greet(self, connection: DoorConnection) -> None:
        """A token was shown: an answer is sent from now on."""
        with self._lock:
            connection.is_known = True
            connection.ends_s = self._monotonic() + self._answer_s

    def rest(self, connection: DoorConnection) -> None:
        """The answer was sent: the next question may take its time."""
        with self._lock:
            connection.ends_s = self._monotonic() + IDLE_S

    def sweep(self) -> None:
        """Cut off what has had its time."""
        now_s = self._monotonic()
        with self._lock:
            for one in self._open:
                if now_s >= one.ends_s and not one.is_cut:
                    one.cut()

    def end(self, connection: DoorConnection) -> None:
        """Close a connection that nobody uses any more."""
        with self._lock:
            del self._open[connection]
            connection.wire.close()


class Listener:
    """Accepts connections, and serves each in a thread until it ends.

    Attributes:
        port: Where it listens.
    """

    def __init__(
        self,
        host: str,
        port: int,
        context: ssl.SSLContext,
        accepts: Accepts,
        answer: Handler,
        monotonic: Callable[[], float] = time.monotonic,
        answer_s: float = ANSWER_S,
    ) -> None:
        """Take the port; 0: any that is free.

        Args:
            answer_s: Longest time in which a reader takes an answer.

        Raises:
            OSError: It cannot be had.
        """
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        is_both = address[0] == "::" and socket.has_dualstack_ipv6()  # others may reach this machine by IPv4 alone
        self._socket = socket.create_server(address[:2], family=family, backlog=BACKLOG, dualstack_ipv6=is_both)
        self._socket.settimeout(SWEEP_S)
        self.port = int(self._socket.getsockname()[1])
        self._context = context
        self._accepts = accepts
        self._answer = answer
        self._monotonic = monotonic
        self._connections = DoorConnections(monotonic, answer_s)
        self._pace = Pace(monotonic)
        self._quick = QuickThreads()
        self._is_closing = threading.Event()
        self._quiet_until_s = 0.0

    def close(self) -> None:
        """Have :meth:`run` end. Connections end with the process."""
        self._is_closing.set()

    def run(self) -> None:
        """Accept until :meth:`close`, and cut off who takes too long."""
        swept_s = 0.0
        self._quick.begin()
        while not self._is_closing.is_set():
            try:
                plain, address = self._socket.accept()
            except TimeoutError:
                pass
            except OSError as exc:  # no descriptor is left, or the other side was gone at once
                self._complain(f"a connection could not be accepted. cause={exc}")
                time.sleep(RETRY_S)
            else:
                self._begin(plain, str(address[0]))
            now_s = self._monotonic()
            if now_s - swept_s >= SWEEP_S:
                swept_s = now_s
                self._connections.sweep()
        self._quick.end()
        self._socket.close()

    def _begin(self, plain: socket.socket, address: str) -> None:
        """Give a connection a thread, or close it."""
        try:
            plain.settimeout(None)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:  # gone already
            plain.close()
            return
        connection = self._connections.admit(plain, address)
        if connection is None:
            self._complain(f"too many connections; one more is closed. address={address} most={CONNECTIONS_MAX}")
            plain.close()
            return
        try:
            threading.Thread(target=self._serve, args=(connection,), name="tiered_kv-door", daemon=True).start()
        except RuntimeError as exc:
            self._no_thread(connection, str(exc))

    def _no_thread(self, connection: DoorConnection, cause: str) -> None:
        self._complain(f"no thread for a connection. cause={cause}")
        self._connections.end(connection)

    def _complain(self, text: str) -> None:
        now_s = self._monotonic()
        if now_s >= self._quiet_until_s:
            self._quiet_until_s = now_s + WARN_INTERVAL_S
            logger.warning("%s", text)

    def _serve(self, connection: DoorConnection) -> None:
        """Begin a connection, out of the engine's way: who has shown no token yet gets no more than is left."""
        if not give_way():
            self._complain("connections go at the engine's priority, always: this process may not lower its own")
        try:
            wire = DoorWire(connection.wire, self._context)
            wire.shake_hands()
        except BaseException as exc:
            self._connections.end(connection)
            if not isinstance(exc, OSError):  # ssl.SSLError is one
                raise
            logger.debug("a connection ended. address=%s cause=%s", connection.address, exc)
            return
        http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES_MAX)
        self._talk(connection, Reply(wire, http, OwnPace(self._pace, is_quick=False)))

    def _talk(self, connection: DoorConnection, reply: Reply, question: Question | None = None) -> None:
        """Answer one question after the other, until the connection ends or another thread goes on with it.

        Args:
            question: The first one, which another thread has heard: this one goes at the engine's priority.
        """
        if question is not None:
            reply.pace = OwnPace(self._pace, is_quick=True)
        goes_on_elsewhere = False
        try:
            while True:
                if question is None and (question := self._hear(connection, reply)) is None:
                    return
                if not reply.pace.is_quick and self._pace.may_begin():
                    goes_on_elsewhere = True
                    self._quick.start(
                        partial(self._talk, connection, reply, question), partial(self._no_thread, connection)
                    )
                    return
                reply.pace.look()
                self._answer(question, reply)
                reply.end()
                if reply.http.our_state is not h11.DONE or reply.http.their_state is not h11.DONE:
                    return
                reply.http.start_next_cycle()
                self._connections.rest(connection)
                question = None
        except OSError as exc:
            logger.debug("a connection ended. address=%s cause=%s", connection.address, exc)
        finally:
            if not goes_on_elsewhere:
                self._connections.end(connection)

    def _hear(self, connection: DoorConnection, reply: Reply) -> Question | None:
        """The next question of somebody who has shown a token; None: the connection is to end."""
        try:
            found = _next_question(reply.wire, reply.http)
        except h11.RemoteProtocolError as exc:
            if reply.http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                reply.refuse(exc.error_status_hint)
            return None
        if found is None:
            return None
        question, token = found
        if not self._accepts(token):
            reply.refuse(401)
            return None
        if question is None:
            reply.refuse(413)
            return None
        self._connections.greet(connection)
        return question


def _next_question(wire: DoorWire, http: h11.Connection) -> tuple[Question | None, str] | None:
    """The next whole request and the token it shows; None: there is no further one. No question: it is too long."""
    request: h11.Request | None = None
    token, body = "", b""
    while True:
        event = http.next_event()
        if event is h11.NEED_DATA:
            http.receive_data(wire.recv(RECEIVED_BYTES))
        elif isinstance(event, h11.Request):
            request = event
            scheme, _, token = dict(event.headers).get(b"authorization", b"").decode("latin-1").partition(" ")
            token = token if scheme == "Bearer" else ""
        elif isinstance(event, h11.Data):
            body += event.data
            if len(body) > BODY_BYTES_MAX:
                return None, token
        elif isinstance(event, h11.EndOfMessage):
            assert request is not None, "h11 ends no message that did not begin"
            return Question(request.method.decode(), request.target.decode("latin-1"), body), token
        else:  # ConnectionClosed, or a wish to switch protocols
            return None
