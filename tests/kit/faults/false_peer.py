"""A peer with the right certificate that does what no door does: a TLS server whose answer a test writes by hand."""

import contextlib
import re
import socket
import ssl
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from tiered_kv.tiers.peers.fleet_key import FleetKey

Answer = Callable[[ssl.SSLSocket], None]


class FalsePeer:
    """Reads each request to its end and has ``answer`` send whatever it likes; then the connection ends.

    Threads: one that accepts and one per connection.
    """

    def __init__(self, key: FleetKey, answer: Answer) -> None:
        self._answer = answer
        self._context = key.server_context()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ended = threading.Event()
        self.url = f"https://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def wait_end(self, seconds: float) -> bool:
        """Wait for the test's end; for answers that take their time."""
        return self._ended.wait(seconds)

    def _accept(self) -> None:
        while True:
            try:
                plain, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._talk, args=(plain,), daemon=True).start()

    def _talk(self, plain: socket.socket) -> None:
        with contextlib.suppress(OSError), self._context.wrap_socket(plain, server_side=True) as wire:
            request = b""
            while not _is_whole(request):
                part = wire.recv(4096)
                if not part:
                    return
                request += part
            self._answer(wire)


def _is_whole(request: bytes) -> bool:
    head, end, body = request.partition(b"\r\n\r\n")
    length = re.search(rb"Content-Length: ([0-9]+)", head)
    return bool(end) and len(body) >= (int(length[1]) if length else 0)


def head(length: int, status: str = "200 OK") -> bytes:
    """The head of an answer with a body of so many bytes."""
    return f"HTTP/1.1 {status}\r\nContent-Length: {length}\r\n\r\n".encode()


def body(data: bytes) -> Answer:
    """Answers with this body."""
    return lambda wire: wire.sendall(head(len(data)) + data)
