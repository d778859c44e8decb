"""A server on 127.0.0.1 whose every answer is a function of the test: for what no real S3 server can be made to do.

Threads: one accepts, one per connection; ``close`` ends them all.
"""

import http.client
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from email.message import Message
from types import TracebackType
from typing import BinaryIO, Self

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


def refusal(status: int, code: str) -> bytes:
    """An error as S3 words it."""
    body = f"<Error><Code>{code}</Code><Message>ordered by a test</Message></Error>".encode()
    return f"HTTP/1.1 {status} Refused\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


@dataclass(slots=True)
class Asked:
    """A request whose head was read; ``body`` reads what follows, ``nth`` counts the connection's requests from 0."""

    line: str
    headers: Message
    stream: BinaryIO = field(repr=False)
    connection: socket.socket
    nth: int

    def read_body(self) -> bytes:
        return self.stream.read(int(self.headers.get("Content-Length", "0")))


class RawServer:
    """Answers each request with what ``answer`` returns; None: the connection ends. A context manager.

    Attributes:
        asked: Every request so far.
        connections_count: Connections so far.
    """

    def __init__(self, answer: Callable[[Asked], bytes | None], tls: ssl.SSLContext | None = None) -> None:
        self.asked: list[Asked] = []
        self.connections_count = 0
        self._answer = answer
        self._tls = tls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self.url = f"{'http' if tls is None else 'https'}://localhost:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._open:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(30)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections_count += 1
            self._open.append(connection)
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, plain: socket.socket) -> None:
        with plain, suppress(OSError):
            connection = plain if self._tls is None else self._tls.wrap_socket(plain, server_side=True)
            with connection, connection.makefile("rb") as stream:
                nth = 0
                while line := stream.readline():
                    asked = Asked(line.decode().strip(), http.client.parse_headers(stream), stream, connection, nth)
                    self.asked.append(asked)
                    answer = self._answer(asked)
                    if answer is None:
                        return
                    connection.sendall(answer)
                    nth += 1
