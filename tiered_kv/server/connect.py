"""Finding a directory's server, starting one, shaking hands with it, and reading messages from it while blocking.

Blocking; called at start-up and from background threads, never from a hook of vLLM. :class:`Background` starts those
threads.
"""

import contextlib
import logging
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec

from tiered_kv.config import Config
from tiered_kv.errors import ConfigError, ProtocolError, TieredKVError, TierUnavailable
from tiered_kv.machine import peer_of
from tiered_kv.server import protocol as m
from tiered_kv.server.directory import read_info, server_directory
from tiered_kv.version import __version__

logger = logging.getLogger(__name__)

SCHEME = "unix://"
CONNECT_TIMEOUT_S = 2.0
RETRY_S = 0.02
HELLO_RETRY_S = 0.05
THREAD_RETRY_S = 10.0
"""Between two tries to start a thread that the machine refused."""

SILENT: Final = "the cache server does not answer: it hangs, was stopped, or has too much to do"
OUTPUT_SHOWN = 1000
SHOWN_MAX: Final = 2000
"""Characters of what a server says that an error or a log line repeats."""

SLABS_MAX: Final = 1 << 16
Answer = TypeVar("Answer", bound=m.Message)

_SERVER_ID = re.compile(r"[0-9a-f]{16}")


def connect(path: str) -> socket.socket | None:
    """A connected socket, or None when nobody answers there."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    sock.settimeout(CONNECT_TIMEOUT_S)
    try:
        sock.connect(path)
    except (OSError, ValueError) as exc:  # ValueError: a damaged description names a path that cannot be one
        logger.debug("no server at %s: %s", path, exc)
        sock.close()
        return None
    return sock


def is_answering(path: str) -> bool:
    """Whether some process accepts connections there."""
    sock = connect(path)
    if sock is None:
        return False
    sock.close()
    return True


def find_server(config: Config, deadline_s: float | None = None) -> socket.socket:
    """Connect to the server that is named, or to the directory's, starting it if need be.

    Args:
        deadline_s: Monotonic time until which to try; None: ``start_timeout_s`` from now.

    Raises:
        ConfigError: The server refused to start for a reason the user must mend.
        TierUnavailable: No server answered in time.
    """
    if deadline_s is None:
        deadline_s = time.monotonic() + config.start_timeout_s
    if config.server is not None:
        return _named_server(config.server, deadline_s)
    root = server_directory(config)
    reason = other = ""
    while True:
        info = read_info(root)
        sock = connect(info.socket) if info is not None else None
        if sock is not None:
            return sock
        if time.monotonic() > deadline_s:
            if other and info is not None and not os.path.exists(info.socket):
                reason = f"its socket is not seen from here; containers share its directory (XDG_RUNTIME_DIR). {reason}"
            raise TierUnavailable(
                f"no cache server answered. directory={root} waited_s={config.start_timeout_s:g}: {reason}"
            )
        try:
            other = _start(config, deadline_s)
            reason = other or reason
        except TimeoutError:
            reason = reason or "the one that was started may still be reading its directory"
        time.sleep(RETRY_S)


def _named_server(server: str, deadline_s: float) -> socket.socket:
    while True:
        sock = connect(server.removeprefix(SCHEME))
        if sock is not None:
            return sock
        if time.monotonic() > deadline_s:
            raise TierUnavailable(f"no cache server answers at {server}; start it with `tiered-kv serve`")
        time.sleep(0.2)


def _start(config: Config, deadline_s: float) -> str:
    """Start a server and wait until it serves, or says that another one does; returns what it says of that one.

    Raises:
        ConfigError: It says why it cannot.
        TierUnavailable: It ended without a word.
        TimeoutError: It is not ready in time; it goes on by itself.
    """
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "tiered_kv.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
            env=_environment(),
        )
    except OSError as exc:
        raise TierUnavailable(f"the cache server cannot be started: {exc}") from exc
    try:
        output, errors = process.communicate(
            msgspec.json.encode(config.to_mapping()), timeout=max(deadline_s - time.monotonic(), RETRY_S)
        )
    except subprocess.TimeoutExpired as exc:
        # It has left for a session of its own and holds the pipe until it is ready: not waited for, and not killed,
        # because a long scan that starts again with every try would never end.
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        process.kill()
        process.wait()
        raise TimeoutError from exc
    word, _, reason = output.decode(errors="replace").strip().partition(" ")
    if word == "error":
        raise ConfigError(f"the cache server cannot start: {reason}")
    if word not in ("ready", "locked"):
        said = (output + errors).decode(errors="replace").strip()[-OUTPUT_SHOWN:]
        raise TierUnavailable(f"the cache server ended before it was ready. output={said!r}")
    return reason


def _environment() -> dict[str, str]:
    """This process's environment, less what is meant for the engine alone; paths stay true in another directory."""
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    if "PYTHONPATH" in environment:
        parts = [os.path.abspath(part) for part in environment["PYTHONPATH"].split(os.pathsep)]
        environment["PYTHONPATH"] = os.pathsep.join(parts)
    return environment


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
            welcome = shake_hands(sock, hello, max(deadline_s - time.monotonic(), HELLO_RETRY_S))
            if config.server is not None:
                _check_directory(config, welcome)
        except TieredKVError as exc:
            sock.close()
            if not isinstance(exc, TierUnavailable) or time.monotonic() > deadline_s:
                raise
            time.sleep(HELLO_RETRY_S)
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
        "" if config.is_guest else config.location().storage,
    )


def shake_hands(sock: socket.socket, hello: m.Hello, timeout_s: float) -> m.Welcome:
    """Say hello on a connected socket.

    Raises:
        ConfigError: The server refuses this client, or belongs to another user.
        ProtocolError: What answered is not a cache server, or a garbled one.
        TierUnavailable: The server went away, or is too busy to answer.
    """
    _, uid = peer_of(sock)
    if uid != os.getuid():
        raise ConfigError(f"the cache server runs as another user. server_uid={uid} client_uid={os.getuid()}")
    sock.settimeout(timeout_s)
    try:
        with contextlib.suppress(BrokenPipeError):  # it refused before it heard us: the reason waits to be read
            sock.sendall(m.frame(hello))
        answer = read_message(sock)
    except TimeoutError as exc:
        raise TierUnavailable(f"{SILENT}. waited_s={timeout_s:g}") from exc
    except OSError as exc:
        raise TierUnavailable(f"the cache server went away while shaking hands: {exc}") from exc
    welcome = _expected(answer, m.Welcome)
    if welcome.protocol != m.PROTOCOL:
        raise ConfigError(
            f"the server (pid {welcome.pid}, version {shown(welcome.version)}) speaks protocol {welcome.protocol}, "
            f"this client (version {__version__}) speaks {m.PROTOCOL}: stop the older one"
        )
    check_welcome(welcome)
    return welcome


def answer_to(sock: socket.socket, question: m.Message, kind: type[Answer]) -> Answer:
    """What a server answers on a socket that it has welcomed.

    Raises:
        ConfigError, ProtocolError: It refuses, or answers something else.
        TierUnavailable: It went away, or does not answer in the socket's time.
    """
    try:
        sock.sendall(m.frame(question))
        answer = read_message(sock)
    except TimeoutError as exc:
        raise TierUnavailable(f"{SILENT}. waited_s={sock.gettimeout() or 0:g}") from exc
    except OSError as exc:
        raise TierUnavailable(f"the server went away while it was asked: {exc}") from exc
    return _expected(answer, kind)


def _expected(answer: object, kind: type[Answer]) -> Answer:
    if isinstance(answer, m.Refused):
        raise refusal_error(answer)
    if not isinstance(answer, kind):
        raise ProtocolError(f"expected {kind.__name__}, got {type(answer).__name__}")
    return answer


def check_welcome(welcome: m.Welcome) -> None:
    """Check what names files and counts descriptors.

    Raises:
        ProtocolError: The server's id is none, or the slabs are out of range.
    """
    if _SERVER_ID.fullmatch(welcome.server_id) is None:
        raise ProtocolError(f"the server's id is not 16 hex digits. server_id={welcome.server_id[:40]!a}")
    if not 0 <= welcome.slab_count <= SLABS_MAX:
        raise ProtocolError(f"slabs out of range. slab_count={welcome.slab_count} max={SLABS_MAX}")


def refusal_error(refused: m.Refused) -> TieredKVError:
    """The error that a refusal is for the client: a wrong setting, or something that may pass."""
    if refused.kind == "unavailable":
        return TierUnavailable(f"the cache server is not available: {shown(refused.reason)}")
    return ConfigError(f"the cache server refused: {shown(refused.reason)}")


def shown(text: str) -> str:
    """A server's words as a log line may repeat them: on one line, and not too many."""
    cut = text[:SHOWN_MAX]
    return "".join(character if character.isprintable() else " " for character in cut)


def _check_directory(config: Config, welcome: m.Welcome) -> None:
    """A named server must be the one of the directory: what maps its arena is known by a lock in there.

    Judged by what the directory says and not by its path, which differs where it is mounted in several places.
    """
    directory = server_directory(config)
    info = read_info(directory)
    if info is None:
        raise ConfigError(
            f"the server at {config.server} serves {shown(welcome.directory)}, and storage_uri names {directory}, "
            "where nothing is seen of a server: name the same directory in both, and where they run in containers, "
            "mount it in both"
        )
    if info.server_id != welcome.server_id:
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


class Background:
    """Starter of short-lived threads.

    Threads: one owner, who calls :meth:`go_on` now and then.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, Callable[[], None]] = {}
        self._again_s = 0.0

    def start(self, name: str, task: Callable[[], None]) -> None:
        """Run ``task`` in a thread of its own; where none can be had, later, unless a newer task took its name."""
        self._waiting.pop(name, None)
        try:
            threading.Thread(target=task, name=f"tiered_kv-{name}", daemon=True).start()
        except RuntimeError as exc:
            self._waiting[name] = task
            self._again_s = time.monotonic() + THREAD_RETRY_S
            logger.warning("cannot start a thread; trying again in %g s. thread=%s %s", THREAD_RETRY_S, name, exc)

    def go_on(self) -> None:
        """Try again what could not be started."""
        if self._waiting and time.monotonic() >= self._again_s:
            for name, task in list(self._waiting.items()):
                self.start(name, task)
