"""A running server, as the command line talks to it: found by its directory or its socket, asked, never started."""

import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from tiered_kv import __version__
from tiered_kv.errors import ConfigError, ProtocolError, TierUnavailable
from tiered_kv.server import messages as m
from tiered_kv.server.handshake import read_message, shake_hands
from tiered_kv.server.paths import read_info
from tiered_kv.server.spawn import SCHEME, connect

TIMEOUT_S: Final = 10.0
KEYS_AT_ONCE: Final = 10_000
"""Of one message: well below the longest frame, and little enough for the server's loop."""

Answer = TypeVar("Answer", bound=m.Message)


class ServerLink:
    """A connection to a running server.

    Threads: one at a time.

    Attributes:
        directory: The directory the server owns.
    """

    def __init__(self, sock: socket.socket) -> None:
        """Take a connected socket and say hello.

        Raises:
            ConfigError, ProtocolError, TierUnavailable: The server refused, is of another version, or is gone.
        """
        self._sock = sock
        try:
            welcome = shake_hands(sock, m.Hello(m.PROTOCOL, __version__, "admin", os.getpid()), TIMEOUT_S)
        except BaseException:
            sock.close()
            raise
        self.directory = Path(welcome.directory)
        self.pid = welcome.pid

    @classmethod
    def of_directory(cls, root: Path) -> Self | None:
        """The server of a directory; None when none answers."""
        info = read_info(root)
        sock = connect(info.socket) if info is not None else None
        return None if sock is None else cls(sock)

    @classmethod
    def of_socket(cls, address: str) -> Self:
        """The server that listens at ``unix:///path``.

        Raises:
            ConfigError: It is no such address.
            TierUnavailable: Nobody answers there.
        """
        if not address.startswith(f"{SCHEME}/"):
            raise ConfigError(f"option --server: expected unix:///path/of/socket, got {address!r}")
        sock = connect(address.removeprefix(SCHEME))
        if sock is None:
            raise TierUnavailable(f"no server answers at {address}")
        return cls(sock)

    def figures(self) -> dict[str, Any]:
        """Everything the server tells of itself; see docs/operations.md."""
        figures: dict[str, Any] = json.loads(self._ask(m.StatRequest(), m.Stat).figures)
        return figures

    def evict(self, tier: str, namespace: bytes, keys: Sequence[bytes], *, holes: bool) -> tuple[int, int, int]:
        """Have chunks removed from one tier; returns how many were taken out, kept because in use, and not there."""
        removed = kept = missing = 0
        for start in range(0, len(keys), KEYS_AT_ONCE):
            part = b"".join(keys[start : start + KEYS_AT_ONCE])
            answer = self._ask(m.Evict(tier, namespace, part, holes), m.Evicted)
            removed, kept, missing = removed + answer.removed, kept + answer.kept, missing + answer.missing
        return removed, kept, missing

    def _ask(self, question: m.Message, kind: type[Answer]) -> Answer:
        try:
            self._sock.sendall(m.frame(question))
            answer = read_message(self._sock)
        except OSError as exc:
            raise TierUnavailable(f"the server went away while it was asked: {exc}") from exc
        if not isinstance(answer, kind):
            raise ProtocolError(f"expected {kind.__name__}, got {type(answer).__name__}")
        return answer

    def close(self) -> None:
        """Leave. Idempotent."""
        self._sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()
