"""An engine's end of a loan: its rows, which the server reads and writes for uses that the engine begins.

The engine uses a row again once it has heard that a use of it is over. From a server that does not say so it has to
know that no thread of it can touch a row any more: when the server's end of a pipe is closed. The server closes it
once it has let go of all rows, and the kernel when the process has ended, which unmaps its memory before. A server that
stands still does neither; it is ended by force (``end_server``), because the requests that wait for those rows would
wait for as long as it does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket

from tiered_kv.machine import peer_of

logger = logging.getLogger(__name__)


class RowLoan:
    """One session's.

    Threads: one owner.

    Attributes:
        generation: Of the session.
    """

    def __init__(self, generation: int, watched_fd: int, pidfd: int) -> None:
        """Take the descriptors, which are this object's from now on: a pipe's end for reading, and of the server."""
        self.generation = generation
        self._watched_fd = watched_fd
        self._pidfd = pidfd
        self._is_over = False
        self._is_ended = False
        self._poll = select.poll()
        self._poll.register(watched_fd, 0)  # that the other end is closed is told always

    @property
    def is_over(self) -> bool:
        """Whether the server can touch no row any more."""
        if not self._is_over and self._poll.poll(0):
            self.forget()
        return self._is_over

    def end_server(self) -> None:
        """End the server's process: it does not answer, and has rows. Does it once."""
        if self.is_over or self._is_ended:
            return
        self._is_ended = True
        text = "the cache server stands still with rows of this engine, and is ended. generation=%d"
        logger.error(text, self.generation)
        with contextlib.suppress(ProcessLookupError):  # it is just ending, and the pipe will say so
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def forget(self) -> None:
        """Watch it no more. Idempotent."""
        if not self._is_over:
            self._is_over = True
            os.close(self._watched_fd)
            os.close(self._pidfd)


def server_pidfd(sock: socket.socket) -> int | None:
    """A descriptor of the process at the other end; None where it cannot be seen from here, or must not be ended.

    As in another PID namespace, or where a security module or another user forbids it.
    """
    pid, _ = peer_of(sock)
    if pid <= 0:
        return None
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as exc:
        logger.debug("the server's process cannot be watched: %s", exc)
        return None
    try:
        signal.pidfd_send_signal(pidfd, 0)
    except OSError as exc:
        logger.debug("the server's process cannot be ended from here: %s", exc)
        os.close(pidfd)
        return None
    return pidfd
