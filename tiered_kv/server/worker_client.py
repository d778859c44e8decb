"""The worker's client: says what its KV cache looks like, maps the server's arena, and later lets go of it again.

Blocking; called from ``register_kv_caches`` at start and from a background thread when the session was lost.
"""

from __future__ import annotations

import array
import contextlib
import logging
import math
import os
import select
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tiered_kv.chunks.arena import Arena
from tiered_kv.chunks.geometry import LayerPage
from tiered_kv.config import Config
from tiered_kv.errors import ProtocolError, TieredKVError, TierUnavailable
from tiered_kv.machine import forgotten_in_children
from tiered_kv.server import protocol as m
from tiered_kv.server.connect import HELLO_RETRY_S, read_exactly, read_message_after, refusal_error, say_hello
from tiered_kv.server.connection import descriptors_in
from tiered_kv.server.directory import hold_arena_lock, server_directory
from tiered_kv.server.row_loan import RowLoan, server_pidfd

if TYPE_CHECKING:
    from tiered_kv.chunks.pinned import PinnedArena  # its numpy is there only where vLLM is

logger = logging.getLogger(__name__)

POPULATE_EVERY_MS = 250
"""Between two looks for slabs that were given memory; the server has them grow before the last slot is taken."""


class WorkerClient:
    """A worker's place in a session: the mapped arena.

    Attributes:
        is_lost: For the owner, who says here that the server is gone, so that no copy begins any more.
        pinned: For the owner, who gives it where a GPU copies: the arena's registrations, ended by :meth:`leave`.
        pins_ahead: For the owner, who says here that memory may be pinned before its first use.

    Threads: one at a time; :meth:`wait_lost` in one of its own, and :meth:`leave` from any.
    """

    def __init__(self, config: Config, engine_id: str, generation: int, join: m.JoinWorker) -> None:
        """Join and map the arena; blocks.

        Raises:
            ConfigError: The server refuses this worker.
            TierUnavailable: No server answered.
        """
        self.generation = generation
        self.is_lost = False
        self.pinned: PinnedArena | None = None
        self.pins_ahead = False
        self._told = m.Pinned(0, 0.0)
        self._rest_ms = 0
        self._pins_from_s = 0.0
        self._lock_fd = -1
        self._leaving = threading.Lock()
        deadline_s = time.monotonic() + config.start_timeout_s
        while True:
            try:
                self.arena = self._join(config, engine_id, join)
                forgotten_in_children(self)
                return
            except TieredKVError:
                raise
            except OSError as exc:  # the server was just ending; the next one is found or started
                if time.monotonic() > deadline_s:
                    raise TierUnavailable(f"the cache server went away while joining: {exc}") from exc
                time.sleep(HELLO_RETRY_S)  # it may not be ending, but out of descriptors

    def _join(self, config: Config, engine_id: str, join: m.JoinWorker) -> Arena:
        self._sock, welcome = say_hello(config, "worker", engine_id, self.generation)
        lock_fd = -1
        try:
            # Before the arena is asked for: a server that is started after this one died waits for this lock.
            lock_fd = hold_arena_lock(server_directory(config), welcome.server_id)
            with contextlib.suppress(BrokenPipeError):  # refused already: the reason waits to be read
                self._sock.sendall(m.frame(join))
            arena = self._map(welcome.slab_count)
        except BaseException:
            self._sock.close()
            if lock_fd >= 0:
                os.close(lock_fd)
            raise
        self._lock_fd = lock_fd
        return arena

    def _map(self, slab_count: int) -> Arena:
        """Map the arena, or say that nothing of it is mapped: else the server waits for this process to end."""
        try:
            return Arena(receive_slabs(self._sock, slab_count))
        except BaseException:
            with contextlib.suppress(OSError):  # the server is gone, or has refused this worker
                self._sock.sendall(m.frame(m.Unmapped()))
            raise

    def lend_rows(self, region_fd: int, rows: int, row_bytes: int) -> RowLoan | str:
        """Lend the engine's rows, once, before :meth:`wait_lost`; blocks. Gives why not where they are not taken.

        Args:
            region_fd: Of a file that holds them one after the other, from its start; stays the caller's.

        Raises:
            TieredKVError, OSError: The server refuses this worker, or is gone.
        """
        pidfd = server_pidfd(self._sock)
        if pidfd is None:
            return "the server's process cannot be seen from here, or not be ended if it stood still"
        try:
            watched_fd, lifeline_fd = os.pipe2(os.O_CLOEXEC)
        except OSError:  # out of descriptors, and it is tried again
            os.close(pidfd)
            raise
        loan = RowLoan(self.generation, watched_fd, pidfd)
        try:
            try:
                socket.send_fds(self._sock, [m.frame(m.LendRows(rows, row_bytes))], [region_fd, lifeline_fd])
            finally:
                os.close(lifeline_fd)
            answer = read_message_after(self._sock, read_exactly(self._sock, m.LENGTH.size))
        except BaseException:
            loan.forget()
            raise
        if isinstance(answer, m.RowsTaken) and not answer.refusal:
            return loan
        loan.forget()
        if isinstance(answer, m.RowsTaken):
            return answer.refusal
        if isinstance(answer, m.Refused):
            raise refusal_error(answer)
        raise ProtocolError(f"expected an answer to LendRows, got {type(answer).__name__}")

    def wait_lost(self) -> None:
        """Block until the server is gone or :meth:`leave` was called; meanwhile map and pin what slabs have got."""
        watched = select.poll()
        with self._leaving:
            if self._lock_fd < 0:
                return  # left before this thread came to run
            watched.register(self._sock, select.POLLIN)  # the server has nothing more to say: this is its end
        while not watched.poll(self._rest_ms if self._populate_some() else POPULATE_EVERY_MS):
            if self._lock_fd < 0:
                return  # left meanwhile: the number of the socket may be another file's by now

    def _populate_some(self) -> bool:
        """Map or pin one part; says whether there may be more, after ``_rest_ms``."""
        self._rest_ms = 0
        with self._leaving:
            if self._lock_fd < 0:
                return False
            if self.arena.populate_some():
                return True
            if self.pinned is None:
                return False
            if self.pins_ahead and self._pin_some(self.pinned):
                return True
            self._tell_pinned(self.pinned)
            return False

    def _pin_some(self, pinned: PinnedArena) -> bool:
        """Pin a window, or go on resting after the one before: memory that comes meanwhile is mapped all the same."""
        if time.monotonic() >= self._pins_from_s:
            if not pinned.pin_some():
                return False
            self._pins_from_s = time.monotonic() + pinned.rest_s
        left_s = max(0.0, self._pins_from_s - time.monotonic())
        self._rest_ms = min(math.ceil(1e3 * left_s), POPULATE_EVERY_MS)
        return True

    def _tell_pinned(self, pinned: PinnedArena) -> None:
        """Say what is pinned by now, if that has changed; later where the server does not read."""
        now = m.Pinned(pinned.pinned_bytes, pinned.pinning_s)
        if now == self._told:
            return
        try:
            self._sock.send(m.frame(now), socket.MSG_DONTWAIT)  # a Unix socket takes so little whole or not at all
        except BlockingIOError:
            return
        except OSError as exc:
            logger.debug("the server is gone: %s", exc)
        self._told = now
        logger.info("host memory pinned. bytes=%d seconds=%.3f", now.size_bytes, now.seconds)

    def leave(self) -> None:
        """Unmap the arena and say so. No copy may be running. Idempotent."""
        with self._leaving:
            if self._lock_fd < 0:
                return
            # Unmapping ends no registration: copies would go to pages that the driver still holds.
            kept = self.pinned.release() if self.pinned is not None else set()
            self.arena.close(left_mapped=kept)
            try:
                self._sock.sendall(m.frame(m.Unmapped()))
                self._sock.shutdown(socket.SHUT_RDWR)  # wakes wait_lost
            except OSError as exc:
                logger.debug("the server is gone already: %s", exc)
            self._sock.close()
            os.close(self._lock_fd)
            self._lock_fd = -1

    def forget_after_fork(self) -> None:
        """In a child of this process: keep no lock of the arena, which lets go of its memory itself.

        The server is told nothing: the parent goes on.
        """
        if self._lock_fd < 0:
            return
        lock_fd, self._lock_fd = self._lock_fd, -1
        os.close(lock_fd)
        self._sock.close()


def receive_slabs(sock: socket.socket, count: int) -> list[int]:
    """The arena's descriptors, which a server sends to who has joined; the caller closes them.

    Raises:
        ConfigError, ProtocolError, TierUnavailable: The server sent something else, or refuses.
        OSError: It is gone.
    """
    fds: list[int] = []
    try:
        while len(fds) < count:
            _receive_frame(sock, fds)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return fds


def _receive_frame(sock: socket.socket, fds: list[int]) -> None:
    """Add the descriptors of one ``Slabs`` frame, which come with its first byte."""
    before = len(fds)
    size = m.SLABS_PER_FRAME * array.array("i").itemsize
    prefix, ancillary, _, _ = sock.recvmsg(m.LENGTH.size, socket.CMSG_SPACE(size), socket.MSG_CMSG_CLOEXEC)
    fds += descriptors_in(ancillary)
    if not prefix:
        raise ConnectionResetError("the server closed the connection")
    message = read_message_after(sock, prefix + read_exactly(sock, m.LENGTH.size - len(prefix)))
    if isinstance(message, m.Refused):
        raise refusal_error(message)
    if not isinstance(message, m.Slabs) or message.count < 1 or message.count != len(fds) - before:
        raise ProtocolError(
            f"expected slabs, got {type(message).__name__} with {len(fds) - before} descriptors; "
            "is the limit of open files (ulimit -n) too low?"
        )


def pages_on_the_wire(pages: Sequence[LayerPage], encodings: Mapping[str, str] | None = None) -> list[m.Page]:
    """Pages as message parts; ``encodings``: by layer, what the bytes mean where nothing else says it."""
    said = encodings or {}
    return [
        m.Page(
            page.layer, page.dtype, page.shape, page.axes, page.blocks, said.get(page.layer, ""), page.tokens_per_state
        )
        for page in pages
    ]


def decline(config: Config, engine_id: str, reason: str) -> None:
    """Say that a worker cannot take part, so that its scheduler side need not wait; blocks.

    Raises:
        TieredKVError: The server could not be told.
    """
    sock, _ = say_hello(config, "worker", engine_id, 0)
    with sock:
        try:
            sock.sendall(m.frame(m.Decline(reason)))
        except OSError as exc:
            raise TierUnavailable(f"the cache server went away: {exc}") from exc
