"""Finding the server of a directory, and starting one when there is none.

Blocking; called at start-up and from background threads, never from a hook of vLLM.
"""

import logging
import os
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from tiered_kv.config import Config
from tiered_kv.errors import ConfigError, TierUnavailable
from tiered_kv.server.paths import read_info, server_directory

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 2.0
RETRY_S = 0.02
BACKLOG = 64
OUTPUT_SHOWN = 1000

SCHEME = "unix://"


def bind(path: Path) -> socket.socket:
    """A listening socket, mode 0600. The caller holds the directory's lock, so an old socket of it is stale.

    Raises:
        ConfigError: The place is taken by another server or by something else, or cannot be used.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        _clear(path)
        listener.bind(str(path))
        path.chmod(0o600)  # before listen: nobody can have connected yet. A umask would be the whole process's
        listener.listen(BACKLOG)
    except OSError as exc:
        listener.close()
        raise ConfigError(f"cannot make the socket. path={path}: {exc}") from exc
    except ConfigError:
        listener.close()
        raise
    return listener


def _clear(path: Path) -> None:
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ConfigError(f"the socket's place is taken by something that is not a socket. path={path}")
    except FileNotFoundError:
        return
    if is_answering(str(path)):
        raise ConfigError(f"another server listens there. path={path}")
    path.unlink(missing_ok=True)


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
    reason = ""
    while True:
        info = read_info(root)
        sock = connect(info.socket) if info is not None else None
        if sock is not None:
            return sock
        if time.monotonic() > deadline_s:
            raise TierUnavailable(
                f"no cache server answered. directory={root} waited_s={config.start_timeout_s:g}: {reason}"
            )
        try:
            reason = _start(config, deadline_s) or reason
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
