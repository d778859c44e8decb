"""Shaking hands with a server: find it, say hello, judge what it answers; and reading whole messages while blocking.

Used by every client when it starts or reconnects, never from a hook of vLLM.
"""

import contextlib
import os
import socket
import struct
import time

from tiered_kv import __version__
from tiered_kv.config import Config
from tiered_kv.errors import ConfigError, ProtocolError, TieredKVError, TierUnavailable
from tiered_kv.server import messages as m
from tiered_kv.server.checks import check_welcome, shown
from tiered_kv.server.paths import read_info, server_directory
from tiered_kv.server.spawn import find_server

RETRY_S = 0.05
_PEER = struct.Struct("3i")


def say_hello(config: Config, role: str, engine_id: str, generation: int) -> tuple[socket.socket, m.Welcome]:
    """Find the server and shake hands; blocks for at most about ``start_timeout_s``.

    A server that goes away meanwhile was just ending: the next one is looked for.

    Raises:
        ConfigError: The server refuses these settings or this version.
        TierUnavailable: No server.
    """
    deadline_s = time.monotonic() + config.start_timeout_s
    hello = hello_of(config, role, engine_id, generation)
    while True:
        sock = find_server(config, deadline_s)
        try:
            welcome = shake_hands(sock, hello, max(deadline_s - time.monotonic(), RETRY_S))
            if config.server is not None:
                _check_directory(config, welcome)
        except TieredKVError as exc:
            sock.close()
            if not isinstance(exc, TierUnavailable) or time.monotonic() > deadline_s:
                raise
            time.sleep(RETRY_S)
        else:
            sock.settimeout(config.start_timeout_s)
            return sock, welcome


def hello_of(config: Config, role: str, engine_id: str = "", generation: int = 0) -> m.Hello:
    """What a client of these settings says first, the limits it expects included."""
    return m.Hello(
        m.PROTOCOL,
        __version__,
        role,
        os.getpid(),
        engine_id,
        generation,
        config.host_bytes,
        config.disk_bytes,
        config.expected_min_free_bytes,
        config.location().storage,
    )


def shake_hands(sock: socket.socket, hello: m.Hello, timeout_s: float) -> m.Welcome:
    """Say hello on a connected socket.

    Raises:
        ConfigError: The server refuses this client, or belongs to another user.
        ProtocolError: What answered is not a cache server, or a garbled one.
        TierUnavailable: The server went away, or is too busy to answer.
    """
    _, uid, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if uid != os.getuid():
        raise ConfigError(f"the cache server runs as another user. server_uid={uid} client_uid={os.getuid()}")
    sock.settimeout(timeout_s)
    try:
        with contextlib.suppress(BrokenPipeError):  # it refused before it heard us: the reason waits to be read
            sock.sendall(m.frame(hello))
        welcome = read_message(sock)
    except OSError as exc:
        raise TierUnavailable(f"the cache server went away while shaking hands: {exc}") from exc
    if isinstance(welcome, m.Refused):
        raise refusal_error(welcome)
    if not isinstance(welcome, m.Welcome):
        raise ProtocolError(f"expected Welcome, got {type(welcome).__name__}")
    if welcome.protocol != m.PROTOCOL:
        raise ConfigError(
            f"the server (pid {welcome.pid}, version {shown(welcome.version)}) speaks protocol {welcome.protocol}, "
            f"this client (version {__version__}) speaks {m.PROTOCOL}: stop the older one"
        )
    check_welcome(welcome)
    return welcome


def refusal_error(refused: m.Refused) -> TieredKVError:
    """The error that a refusal is for the client: a wrong setting, or something that may pass."""
    if refused.kind == "unavailable":
        return TierUnavailable(f"the cache server is not available: {shown(refused.reason)}")
    return ConfigError(f"the cache server refused: {shown(refused.reason)}")


def _check_directory(config: Config, welcome: m.Welcome) -> None:
    """A named server must be the one of the directory: what maps its arena is known by a lock in there.

    Judged by what the directory says and not by its path, which differs where it is mounted in several places.
    """
    directory = server_directory(config)
    info = read_info(directory)
    if info is None or info.server_id != welcome.server_id:
        raise ConfigError(
            f"the server at {config.server} serves {shown(welcome.directory)}, and storage_uri names {directory}: "
            "name the same directory in both"
        )


def read_message(sock: socket.socket) -> object:
    """Read one whole message from a blocking socket.

    Raises:
        ProtocolError: It is not a message.
        OSError: The connection ended or timed out.
    """
    return read_message_after(sock, read_exactly(sock, m.LENGTH.size))


def read_message_after(sock: socket.socket, prefix: bytes) -> object:
    """Read the rest of a message whose length prefix was read already; raises like :func:`read_message`."""
    (length,) = m.LENGTH.unpack(prefix)
    if length > m.FRAME_BYTES_MAX:
        raise ProtocolError(f"frame too long. bytes={length} max={m.FRAME_BYTES_MAX}")
    (message,) = m.FrameReader(m.FromServer).feed(prefix + read_exactly(sock, length))
    return message


def read_exactly(sock: socket.socket, count: int) -> bytes:
    """Read ``count`` bytes.

    Raises:
        OSError: The connection ended or timed out before.
    """
    data = bytearray()
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            raise ConnectionResetError("the server closed the connection")
        data += part
    return bytes(data)
