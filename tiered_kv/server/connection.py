"""One client's socket as the server sees it: non-blocking, bounded both ways, able to pass descriptors."""

import array
import contextlib
import os
import socket
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tiered_kv.errors import ProtocolError
from tiered_kv.machine import peer_of
from tiered_kv.server.protocol import FRAME_BYTES_MAX, HELLO_BYTES_MAX, FrameReader, FromClient, Message, frame

OUTBOX_BYTES_MAX = 8 << 20
"""A client that does not read this much is lost: its session ends, its engine goes on without the cache."""
READ_BYTES = 64 << 10
"""Less than the allocator would ask the kernel for (``keep_heap_small``): that waits while a thread maps memory."""

READS_MAX = 4
"""Of one turn: what a socket's buffer holds, so that what a client said last is heard whole."""

DESCRIPTORS_MAX = 2
"""That a client's message may bring (``LendRows``); the kernel closes what is more."""

_ROOM = socket.CMSG_SPACE(DESCRIPTORS_MAX * array.array("i").itemsize)


class Connection:
    """A connected client.

    Threads: the server's loop only.

    Attributes:
        pid: The process that connected; 0 where this server cannot see it (another PID namespace).
        has_ended: The client closed its end.
        has_joined: It takes part in a session; at most once.
        lacks_descriptors: It sent some that were not taken: this process has no room for them, or they were too many.
    """

    def __init__(self, sock: socket.socket, accepted_s: float = 0.0) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.role = ""
        self.engine_id = ""
        self.generation = 0
        self.pid, self.uid = peer_of(sock)
        self.accepted_s = accepted_s
        self.is_closing = False
        self.has_ended = False
        self.has_joined = False
        self.lacks_descriptors = False
        self._descriptors: list[int] = []
        self._reader = FrameReader(FromClient, HELLO_BYTES_MAX)
        self._outbox: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self._outbox_bytes = 0

    @property
    def wants_write(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._outbox)

    @property
    def outbox_bytes(self) -> int:
        """Bytes that wait to be sent."""
        return self._outbox_bytes

    def welcome(self, role: str, engine_id: str, generation: int) -> None:
        """The client has said who it is; from now on it may send frames of any allowed length."""
        self.role, self.engine_id, self.generation = role, engine_id, generation
        self._reader.frame_bytes_max = FRAME_BYTES_MAX

    def has_input(self) -> bool:
        """Whether received bytes, or the end of the connection, wait to be read."""
        try:
            self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return False  # broken: nothing more will come
        return True

    def receive(self) -> Iterator[Any]:
        """Messages that are complete now.

        Raises:
            ProtocolError: The client sent something else than messages.
            ConnectionError: The client is gone.
        """
        for number in range(READS_MAX):
            try:
                data, ancillary, flags, _ = self.sock.recvmsg(READ_BYTES, _ROOM, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except ConnectionError:
                self.has_ended = True
                raise
            self._take_descriptors(ancillary)
            self.lacks_descriptors |= bool(flags & socket.MSG_CTRUNC)
            if not data:
                if number:
                    return  # what came before is dealt with first; the end is found again
                self.has_ended = True
                raise ConnectionResetError("the client closed its connection")
            yield from self._reader.feed(data)

    def _take_descriptors(self, ancillary: list[tuple[int, int, bytes]]) -> None:
        self._descriptors += descriptors_in(ancillary)
        if len(self._descriptors) > DESCRIPTORS_MAX:
            raise ProtocolError(f"the client sends descriptors that no message takes. max={DESCRIPTORS_MAX}")

    def take_descriptors(self) -> list[int]:
        """Those that came with the message that is being handled; the caller's from now on."""
        taken, self._descriptors = self._descriptors, []
        return taken

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Queue a message and send what the socket takes now.

        Raises:
            ProtocolError: The client reads too slowly to be kept.
            ConnectionError: The client is gone.
        """
        data = frame(message)
        self._outbox.append((memoryview(data), tuple(descriptors)))
        self._outbox_bytes += len(data)
        self.flush()
        if self._outbox_bytes > OUTBOX_BYTES_MAX:
            raise ProtocolError(f"the client does not read. pid={self.pid} waiting_bytes={self._outbox_bytes}")

    def flush(self) -> None:
        """Send what the socket takes now.

        Raises:
            ConnectionError: The client is gone.
        """
        while self._outbox:
            data, descriptors = self._outbox[0]
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
            try:
                sent = self.sock.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            self._outbox_bytes -= sent
            if sent < len(data):
                self._outbox[0] = (data[sent:], ())
                return
            self._outbox.popleft()

    def open_pidfd(self) -> int | None:
        """A descriptor that is readable when the client's process has exited; None if it cannot be seen from here.

        Raises:
            ProcessLookupError: The process has exited already.
        """
        return os.pidfd_open(self.pid) if self.pid > 0 else None

    def close_soon(self) -> None:
        """Let the loop close this connection once the current messages are dealt with."""
        self.is_closing = True

    def hang_up(self) -> None:
        """Say nothing more; what the client says can still be received."""
        with contextlib.suppress(OSError):  # it has ended already
            self.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """End the connection, close the socket and descriptors that no message took. Idempotent."""
        # The client sees the end at once: a process that is just being started has the descriptor, too, for a moment.
        with contextlib.suppress(OSError):  # it has ended already
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
        for fd in self.take_descriptors():
            os.close(fd)


def descriptors_in(ancillary: Iterable[tuple[int, int, bytes]]) -> list[int]:
    """The descriptors that came with a message, which are the caller's from now on."""
    received = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
    return received.tolist()
