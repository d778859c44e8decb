"""The server's host memory as its door reads it: chunks that are lent for the time of one answer.

The door asks over the server's socket and reads slots through descriptors that it cannot write to. A part of a slot
counts only if the socket, read to its end after that part, does not say that the loan is over: so no byte leaves this
machine that was read from a slot somebody else had by then. A server that does not answer costs a question
``ANSWER_S``, then nothing for a while. Called by ``door_blobs.py``.
"""

import contextlib
import itertools
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tiered_kv.errors import ProtocolError, TierBusy, TieredKVError
from tiered_kv.server import protocol as m
from tiered_kv.server.connect import connect, shake_hands
from tiered_kv.server.directory import hold_arena_lock
from tiered_kv.server.worker_client import receive_slabs
from tiered_kv.tiering.slots import SLOTS_PER_SLAB_MAX
from tiered_kv.tiering.types import Outcome
from tiered_kv.version import __version__

logger = logging.getLogger(__name__)

ANSWER_S: Final = 0.3
"""Longest wait for the server: a peer's question waits half a second, all peers together."""

ROOM_S: Final = 0.5
"""Longest wait for a loan while all is lent that may be: a peer asks for some blobs at once, and waits 1 s for each."""

SILENT_S: Final = 1.0
"""How long a server that gave no answer is not asked."""

JOIN_S: Final = 10.0
RETRY_S: Final = 0.1
RETRY_MAX_S: Final = 10.0
"""Between two tries to join: a server of another version refuses each, and has a line in its log for it."""

RECEIVED_BYTES: Final = 64 << 10

TOLD_S: Final = 1.0
"""Between two messages about what peers have read."""

REPAID_BYTES: Final = 256
"""Of messages about the ends of loans that wait for the next question while other chunks are lent: some ten of them."""

TOLD_MAX: Final = 1024
"""Chunks of one such message. What is read beyond them in that time is told when it is read again."""


@dataclass(eq=False)
class _Question:
    """What somebody waits for."""

    is_answered: threading.Event = field(default_factory=threading.Event)
    answer: m.Held | m.Lent | None = None


class LentBlob:
    """A sealed blob in a slot, for as long as it is lent.

    Attributes:
        size_bytes: Of all of it.

    Threads: one, the connection's.
    """

    def __init__(self, descriptor: int, start: int, size_bytes: int, is_lent: Callable[[], bool]) -> None:
        self.size_bytes = size_bytes
        self._descriptor = descriptor
        self._start = start
        self._is_lent = is_lent

    def read_into(self, piece: memoryview, offset: int) -> int:
        """Read what follows ``offset``, no further than the blob; returns how many bytes.

        Raises:
            ConnectionResetError: The loan is over.
        """
        count = os.preadv(self._descriptor, [piece], self._start + offset)
        if not self._is_lent():
            raise ConnectionResetError("a blob in host memory took too long, and is not sent to its end")
        return count


class HostMemory:
    """Host memory of the server at a socket.

    Threads: any; :meth:`run` has one of its own. One lock guards the socket, who waits, what is lent and how many loans
    have ended: whoever holds it reads the socket to its end.
    """

    def __init__(self, path: str, directory: Path, *, tells_reads: bool = False) -> None:
        """Ask nobody yet.

        Args:
            path: Of the socket.
            directory: The server's, where those are known who have its arena.
            tells_reads: The server hears what was :meth:`given`.
        """
        self._path = path
        self._directory = directory
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        self._slabs: list[int] = []
        self._reader = m.FrameReader(m.FromServer)
        self._numbers = itertools.count(1)
        self._waiting: dict[int, _Question] = {}
        self._lent: set[int] = set()
        self._ended = 0
        self._repaid = b""  # messages that the next one takes along: each by itself would wake the server's loop
        self._one_ended = threading.Condition(self._lock)
        self._silent_until_s = 0.0
        self._tells_reads = tells_reads
        self._tell_due_s = 0.0
        self._read: dict[tuple[bytes, bytes], None] = {}  # by peers, since the server was told; guarded by the lock

    def count_held(self, namespace: bytes, keys: bytes) -> int:
        """How many of these chunks, 16 bytes of key each, the server has, from the first on; 0 without an answer."""
        number = next(self._numbers)
        try:
            answer = self._ask(number, m.HeldRequest(number, namespace, keys))
        except TierBusy:
            return 0
        return answer.count if isinstance(answer, m.Held) else 0

    def given(self, namespace: bytes, key: bytes) -> None:
        """A peer has read a chunk, wherever it came from."""
        if self._tells_reads:
            with self._lock:
                if len(self._read) < TOLD_MAX:
                    self._read[namespace, key] = None

    @contextlib.contextmanager
    def lent(self, namespace: bytes, key: bytes) -> Iterator[LentBlob | None]:
        """A chunk, for the length of a ``with`` block; None: host memory has none.

        Raises:
            TierBusy: The server does not answer, or has lent too much.
        """
        number, answer = self._borrow(namespace, key)
        if answer.outcome != Outcome.OK.value:
            yield None
            return
        try:
            slab, index = divmod(answer.slot, SLOTS_PER_SLAB_MAX)
            start, size_bytes = index * answer.size_bytes, answer.size_bytes
            yield LentBlob(self._slabs[slab], start, size_bytes, lambda: self._is_lent(number))
        finally:
            with self._lock:
                self._repay(number)

    def _borrow(self, namespace: bytes, key: bytes) -> tuple[int, m.Lent]:
        """Ask for a loan, again when another one has ended if there was no room; its number, and the answer.

        Raises:
            TierBusy: The server does not answer, or has lent too much.
        """
        until_s = time.monotonic() + ROOM_S
        while True:
            number, ended = next(self._numbers), self._ended
            answer = self._ask(number, m.Borrow(number, namespace, key))
            if isinstance(answer, m.Lent) and answer.outcome != Outcome.NO_ROOM.value:
                return number, answer
            with self._one_ended:
                left_s = until_s - time.monotonic()
                if left_s <= 0 or (self._ended == ended and not self._one_ended.wait(left_s)):
                    raise TierBusy("the server lends no more now")

    def _ask(self, number: int, message: m.HeldRequest | m.Borrow) -> m.Held | m.Lent:
        """Ask the server.

        Raises:
            TierBusy: There is no answer.
        """
        question = _Question()
        with self._lock:
            is_sent = time.monotonic() >= self._silent_until_s and self._send(message)
            if is_sent:
                self._waiting[number] = question
        if is_sent and not question.is_answered.wait(ANSWER_S):
            with self._lock:
                self._read_all()  # it may have come just now
                if self._waiting.pop(number, None) is not None:
                    self._silent_until_s = time.monotonic() + SILENT_S
        if question.answer is None:
            raise TierBusy("the server does not answer the door")
        return question.answer

    def _is_lent(self, number: int) -> bool:
        with self._lock:
            self._read_all()
            return number in self._lent

    def _repay(self, number: int) -> None:
        """End a loan, with the lock held; one that cannot be told of ends by the server's clock."""
        if number not in self._lent:
            return
        self._over(number)
        self._repaid += m.frame(m.Repay(number))
        if not self._lent or len(self._repaid) > REPAID_BYTES:
            self._send()

    def _over(self, number: int) -> None:
        """A loan has ended, with the lock held: one of those that wait for room may have it."""
        self._lent.discard(number)
        self._ended += 1
        self._one_ended.notify()

    def _send(self, message: m.Message | None = None) -> bool:
        """Send without waiting, with the lock held, what was repaid before; says whether the server will hear it."""
        if self._sock is None:
            return False
        data, self._repaid = self._repaid + (b"" if message is None else m.frame(message)), b""
        try:
            sent = self._sock.send(data, socket.MSG_NOSIGNAL)
        except BlockingIOError:  # it does not read; loans that it does not hear the end of end by its clock
            return False
        except OSError as exc:
            self._lose(str(exc))
            return False
        if sent < len(data):
            self._lose("the server does not read")
            return False
        return True

    def _read_all(self) -> bool:
        """Take in all that the server has said by now, with the lock held; says whether it is there still."""
        while self._sock is not None:
            try:
                data = self._sock.recv(RECEIVED_BYTES)
                for message in self._reader.feed(data):
                    self._hear(message)
            except BlockingIOError:
                return True
            except (OSError, ProtocolError) as exc:
                self._lose(str(exc))
            else:
                if not data:
                    self._lose("the server has ended the connection")
        return False

    def _hear(self, message: object) -> None:
        match message:
            case m.Lent(number, outcome):
                if outcome == Outcome.OK.value:
                    self._lent.add(number)
                    if number not in self._waiting:  # too late
                        self._repay(number)
                self._answer(number, message)
            case m.Held(number):
                self._answer(number, message)
            case m.Reclaimed(number):
                self._over(number)
            case _:
                raise ProtocolError(f"a door did not ask for {type(message).__name__}")

    def _answer(self, number: int, answer: m.Held | m.Lent) -> None:
        question = self._waiting.pop(number, None)
        if question is not None:
            question.answer = answer
            question.is_answered.set()

    def _lose(self, reason: str) -> None:
        """The server is gone, with the lock held. Descriptors stay: somebody may be reading through them."""
        logger.info("the door is without host memory from now on. %s", reason)
        assert self._sock is not None, "what is lost was there"
        with contextlib.suppress(OSError):  # the server has ended it already
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes ``run``, which closes it
        self._sock = None
        self._lent.clear()
        waiting, self._waiting = self._waiting, {}
        for question in waiting.values():
            question.is_answered.set()

    def run(self) -> None:
        """Join the server, and listen to it until it is gone; at most once."""
        sock = self._joined()
        with self._lock:
            self._sock = sock
        watched = select.poll()
        watched.register(sock, select.POLLIN)
        is_there = True
        while is_there:
            is_idle = not watched.poll(1e3 * TOLD_S)
            with self._lock:
                is_there = self._read_all()
                if is_idle and self._repaid:
                    self._send()
                self._tell()
        sock.close()

    def _tell(self) -> None:
        """Tell the server what was read, now and then, with the lock held."""
        now_s = time.monotonic()
        if not self._read or now_s < self._tell_due_s:
            return
        self._tell_due_s = now_s + TOLD_S
        of: dict[bytes, list[bytes]] = {}
        for namespace, key in self._read:
            of.setdefault(namespace, []).append(key)
        self._read.clear()
        for namespace, keys in of.items():
            self._send(m.Given(namespace, b"".join(keys)))

    def _joined(self) -> socket.socket:
        """Wait for the server, and have its arena."""
        said, wait_s = "", RETRY_S
        while True:
            sock = connect(self._path)
            if sock is not None:
                try:
                    self._slabs = self._join(sock)
                except (TieredKVError, OSError) as exc:
                    sock.close()
                    wait_s = min(2 * wait_s, RETRY_MAX_S)
                    if str(exc) != said:
                        said = str(exc)
                        logger.warning("the door gives what is on disk alone, until its server takes it in. %s", exc)
                else:
                    return sock
            time.sleep(wait_s)

    def _join(self, sock: socket.socket) -> list[int]:
        welcome = shake_hands(sock, m.Hello(m.PROTOCOL, __version__, "door", os.getpid()), JOIN_S)
        # Held as long as this process lives, and before the arena is asked for: a server that is started after this one
        # died waits for it, or its memory would be taken twice.
        lock = hold_arena_lock(self._directory, welcome.server_id)
        try:
            sock.sendall(m.frame(m.JoinDoor()))
            slabs = receive_slabs(sock, welcome.slab_count)
        except BaseException:
            os.close(lock)
            raise
        sock.setblocking(False)
        return slabs
