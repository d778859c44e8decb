"""The socket where clients find a server: made once, and again where somebody removes its file.

Owns the file; who connects is the server's matter (``server.py``). Called by ``compose.py``.
"""

import contextlib
import logging
import os
import socket
import stat
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Self

from tiered_kv.errors import ConfigError
from tiered_kv.server.directory import LOOK_INTERVAL_S, make_socket_directory

logger = logging.getLogger(__name__)

BACKLOG = 64
ASK_INTERVAL_S = 60.0


class Listening:
    """The socket where clients find a server; made anew where its file is gone.

    Cleaners of /tmp take it, and so does the end of a user's last login, with all of XDG_RUNTIME_DIR. A server that
    nobody finds would go on, and keep every other one out of its directory. It comes back where it was, or not at all:
    that is where ``server.json`` and the server's door look for it.

    Attributes:
        path: Where it is.
        socket: The first one. The end of the context closes the last one and removes its file.

    Threads: one owner; the file is looked at in the background, one look at a time, as ``server.json`` is.
    """

    def __init__(
        self,
        path: Path,
        in_background: Callable[[Callable[[], None]], None],
        monotonic: Callable[[], float],
        *,
        is_private: bool,
    ) -> None:
        """Listen at ``path``.

        Args:
            is_private: Its directory is made here, for this user alone.

        Raises:
            ConfigError: That cannot be.
        """
        self.path = path
        self._in_background = in_background
        self._monotonic = monotonic
        self._is_private = is_private
        self.socket = self._latest = self._listen()
        self._fresh: deque[socket.socket] = deque()
        self._is_looking = False
        self._is_closed = False
        self._lock = threading.Lock()  # of the last four: the end may come while a look makes another socket
        self._is_missed = False
        self._due_s = self._ask_due_s = monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._is_closed = True
            # Whose directory was removed may have a successor, with a socket of its own in this place.
            is_there = self._is_there()
            self._latest.close()
            if is_there:
                self.path.unlink(missing_ok=True)

    def anew(self) -> socket.socket | None:
        """The socket to listen at from now on, where there is a new one; the one before is the caller's to close."""
        if not self._is_looking and self._monotonic() >= self._due_s:
            self._is_looking = True
            self._in_background(self._look)
        return self._fresh.popleft() if self._fresh else None

    def _look(self) -> None:
        try:
            with self._lock:
                if self._is_there():
                    self._is_missed = False
                elif not self._is_closed:
                    self._listen_anew()
        finally:  # or nobody would look again
            self._due_s = self._monotonic() + LOOK_INTERVAL_S
            self._is_looking = False

    def _is_there(self) -> bool:
        """Whether its file lies in its place; the open socket keeps the file's number from being given to another."""
        try:
            return os.path.samestat(self.path.lstat(), self._file)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # the medium does not answer: no reason to make another
            return True

    def _listen_anew(self) -> None:
        try:
            if os.path.lexists(self.path) and not self._is_left():
                raise ConfigError(f"its place is taken; what lies there stays until it is removed. path={self.path}")
            listener = self._listen()
        except (ConfigError, OSError) as exc:
            if not self._is_missed:
                self._is_missed = True
                logger.error(
                    "the socket of this server was removed and cannot be made anew: who is connected is served on, and "
                    "nobody else can join until it can. cause=%s",
                    exc,
                )
            return
        logger.warning("the socket of this server was removed, and was made anew. path=%s", self.path)
        self._is_missed = False
        self._latest = listener
        self._fresh.append(listener)

    def _is_left(self) -> bool:
        """Whether what lies in its place is a dead server's socket, as far as was asked: each question takes a place in
        the queue of a living one."""
        now_s = self._monotonic()
        if now_s < self._ask_due_s:
            return False
        self._ask_due_s = now_s + ASK_INTERVAL_S
        return stat.S_ISSOCK(self.path.lstat().st_mode) and _is_dead(self.path)

    def _listen(self) -> socket.socket:
        if self._is_private:
            make_socket_directory(self.path)
        listener = bind(self.path)
        try:
            self._file = self.path.lstat()
        except OSError:
            _undo(listener, self.path)
            raise
        return listener


def bind(path: Path) -> socket.socket:
    """A listening socket, mode 0600. The caller holds the directory's lock, so an old socket of it is stale.

    Raises:
        ConfigError: The place is taken by another server or by something else, or cannot be used.
    """
    try:
        _clear(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            listener.bind(str(path))
        except OSError:
            listener.close()
            raise
        try:
            path.chmod(0o600)  # before listen: nobody can have connected yet. A umask would be the whole process's
            listener.listen(BACKLOG)
        except OSError:
            _undo(listener, path)
            raise
    except OSError as exc:
        raise ConfigError(f"cannot make the socket. path={path}: {exc}") from exc
    return listener


def _undo(listener: socket.socket, path: Path) -> None:
    """Take back a socket that is not complete: left there, it would keep the place for nobody."""
    listener.close()
    with contextlib.suppress(OSError):  # what failed before is told of
        path.unlink()


def _clear(path: Path) -> None:
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ConfigError(f"the socket's place is taken by something that is not a socket. path={path}")
    except FileNotFoundError:
        return
    if not _is_dead(path):
        raise ConfigError(
            f"another server listens there, of another directory: name another --socket, or set XDG_RUNTIME_DIR, where "
            f"containers share that and have different directories at one path. path={path}"
        )
    path.unlink(missing_ok=True)


def _is_dead(path: Path) -> bool:
    """Whether nobody has a socket there any more. One that is stopped has a full queue, others are of another kind."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return True
        except OSError:  # it does not take us in now, or not at all: somebody's it is
            return False
    return False
