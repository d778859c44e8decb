"""Connect to a running server by its directory or socket, and query it. Never starts one."""

import os
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Self

import msgspec

from tiered_kv.errors import ConfigError, ProtocolError, TierUnavailable
from tiered_kv.metrics.figures import ServerFigures
from tiered_kv.ops.storage import Origin, RemovalTotals
from tiered_kv.server import protocol as m
from tiered_kv.server.connect import SCHEME, Answer, answer_to, connect, shake_hands
from tiered_kv.server.directory import read_info
from tiered_kv.version import __version__

TIMEOUT_S: Final = 10.0
ORDER_TIMEOUT_S: Final = 600.0
"""Of an order to evict: a server works at it beside all else, and it may be of millions of chunks."""

KEYS_AT_ONCE: Final = 10_000
"""Of one message: well below the longest frame, and little enough for the server's loop."""


class ServerLink:
    """A connection to a running server.

    Threads: one at a time.

    Attributes:
        directory: The directory the server owns, as it sees it.
    """

    def __init__(self, sock: socket.socket, hello: m.Hello | None = None, *, timeout_s: float = TIMEOUT_S) -> None:
        """Take a connected socket and say hello.

        Args:
            hello: With limits that the server must have; None: whatever it has is fine.
            timeout_s: How long each answer may take.

        Raises:
            ConfigError, ProtocolError, TierUnavailable: The server refused, is of another version, or is gone.
        """
        self._sock = sock
        try:
            welcome = shake_hands(sock, hello or m.Hello(m.PROTOCOL, __version__, "admin", os.getpid()), timeout_s)
        except BaseException:
            sock.close()
            raise
        self.directory = Path(welcome.directory)
        self.pid = welcome.pid
        self._server_id = welcome.server_id

    @classmethod
    def of_directory(cls, root: Path, hello: m.Hello | None = None) -> Self | None:
        """The server of a directory; None when none answers."""
        info = read_info(root)
        sock = connect(info.socket) if info is not None else None
        return None if sock is None else cls(sock, hello)

    @classmethod
    def of_socket(cls, address: str, timeout_s: float = TIMEOUT_S) -> Self:
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
        return cls(sock, timeout_s=timeout_s)

    def owns(self, root: Path) -> bool:
        """Whether the directory that has this path here is the server's. In a container it may see other mounts."""
        info = read_info(root)
        return info is not None and info.server_id == self._server_id

    def stat(self) -> ServerFigures:
        """The server's statistics.

        Raises:
            ProtocolError: The answer is not one of this version.
            TierUnavailable: It went away, or is too busy to answer.
        """
        try:
            return msgspec.json.decode(self._ask(m.StatRequest(), m.Stat).figures, type=ServerFigures)
        except msgspec.DecodeError as exc:  # ValidationError is one
            raise ProtocolError(f"the server's figures cannot be understood: {exc}") from exc

    def evict(self, tier: str, namespace: bytes, keys: Sequence[bytes] | None, *, holes: bool) -> RemovalTotals:
        """Have chunks removed from one tier. The answer has no byte counts.

        Args:
            namespace: Empty: of every namespace; then there are no keys.
            keys: None: all of the namespace.
            holes: Also those on which chunks depend that stay.
        """
        result = RemovalTotals()
        parts = [b""] if keys is None else [b"".join(part) for part in _parts(keys)]
        for part in parts:
            answer = self._ask(m.Evict(tier, namespace, part, holes), m.Evicted)
            result.removed += answer.removed
            result.kept += answer.kept
            result.missing += answer.missing
        return result

    def erase(self, tier: str, namespace: bytes, origin: Origin) -> RemovalTotals:
        """Have what is of an origin, and all behind it, removed from one tier; what is in use stays.

        Args:
            namespace: Empty: of every namespace.
        """
        removed, left = 0, sys.maxsize
        while True:
            order = m.Evict(tier, namespace, b"", holes=False, tag=origin.tag, stored_by=origin.stored_by)
            answer = self._ask(order, m.Evicted)
            removed += answer.removed
            if not 0 < answer.left < left:  # no fewer than before: what goes comes back, because it cannot be deleted
                return RemovalTotals(removed, kept=answer.kept + answer.left, missing=answer.missing)
            left = answer.left

    def _ask(self, question: m.Message, kind: type[Answer]) -> Answer:
        before_s = self._sock.gettimeout()
        if isinstance(question, m.Evict):
            self._sock.settimeout(ORDER_TIMEOUT_S)
        try:
            return answer_to(self._sock, question, kind)
        finally:
            self._sock.settimeout(before_s)

    def close(self) -> None:
        """Leave. Idempotent."""
        self._sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def _parts(keys: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Keys in pieces that fit into a message, none of them empty: that would mean the whole namespace."""
    return (keys[start : start + KEYS_AT_ONCE] for start in range(0, len(keys), KEYS_AT_ONCE))
