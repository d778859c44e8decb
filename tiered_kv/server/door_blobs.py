"""What the door answers: a blob of this machine, and how much of a prefix is there.

Read only, and nothing is listed: who asks names namespace and keys. What is on disk it reads by itself, so the server's
loop has no part in it; the server is asked for what is not, and lends it from host memory. Handed by ``door.py`` to the
connections' threads (``door_listener.py``).
"""

import contextlib
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from tiered_kv.errors import TierBusy
from tiered_kv.keys.naming import NAME_BYTES, BlobName, relative_path
from tiered_kv.server.door_listener import Question, Reply
from tiered_kv.server.door_memory import HostMemory
from tiered_kv.tiers.disk.files import open_to_read
from tiered_kv.tiers.peers.peer import BLOBS_PATH, NAMES_MAX, PREFIX_PATH

BODIES_MAX: Final = 64
"""Blobs that are sent at once; who asks for more is told to come again (503)."""

BURST_S: Final = 1.0
"""How much of ``peer_serve_bytes_s`` may be used ahead."""

PIECE_BYTES: Final = 256 << 10
"""Bytes that are read, and encrypted while they are in the core's cache."""

_BLOB = re.compile(BLOBS_PATH + r"/([0-9a-f]{32})/([0-9a-f]{32})")


class Budget:
    """Bytes per second that may be sent.

    Threads: one at a time. Units: bytes, seconds.
    """

    def __init__(self, bytes_per_s: int | None) -> None:
        """None: as fast as it goes."""
        self._bytes_per_s = bytes_per_s
        self._paid_until_s = 0.0

    def has_room(self, now_s: float) -> bool:
        """Whether a body may be sent now."""
        return self._bytes_per_s is None or self._paid_until_s <= now_s + BURST_S

    def take(self, size_bytes: int, now_s: float) -> bool:
        """Take room for a body; False: there is none now."""
        if self._bytes_per_s is None:
            return True
        if not self.has_room(now_s):
            return False
        self._paid_until_s = max(self._paid_until_s, now_s) + size_bytes / self._bytes_per_s
        return True


ReadInto = Callable[[memoryview, int], int]
"""Reads into a piece of memory what follows an offset; returns how many bytes."""


class DoorBlobs:
    """The blobs of a machine: files below a disk tier's directory, and what its server lends from host memory.

    Threads: any; the budget and the number of bodies are guarded by one lock.
    """

    def __init__(self, root: Path | None, serve_bytes_s: int | None, memory: HostMemory | None = None) -> None:
        """Give what the machine has.

        Args:
            root: Of the disk tier; None: there is none.
            serve_bytes_s: None: as fast as it goes.
            memory: None: nothing is given from host memory.
        """
        self._blobs = None if root is None else root / "blobs"
        self._memory = memory
        self._lock = threading.Lock()
        self._budget = Budget(serve_bytes_s)
        self._bodies = 0

    def answer(self, question: Question, reply: Reply) -> None:
        """Answer whoever has shown a token."""
        if question.method == "POST" and question.target == PREFIX_PATH:
            self._count(question.body, reply)
            return
        found = _BLOB.fullmatch(question.target) if question.method == "GET" else None
        if found is None:
            reply.head(404)
            return
        namespace, key = bytes.fromhex(found[1]), bytes.fromhex(found[2])
        if self._give_any(namespace, key, reply) and self._memory is not None:
            self._memory.given(namespace, key)

    def _give_any(self, namespace: bytes, key: bytes, reply: Reply) -> bool:
        """Give a blob from wherever it is; False: it was refused."""
        descriptor = self._open(namespace, key)
        if descriptor is None:
            return self._give_lent(namespace, key, reply)
        try:
            return self._give(os.fstat(descriptor).st_size, _reader_of(descriptor), reply)
        finally:
            os.close(descriptor)

    def _count(self, names: bytes, reply: Reply) -> None:
        """Say how many of these blobs are there, from the first on: a namespace and keys, one after the other."""
        if len(names) % NAME_BYTES or not 2 <= len(names) // NAME_BYTES <= 1 + NAMES_MAX:
            reply.head(400)
            return
        namespace, count, start = names[:NAME_BYTES], 0, NAME_BYTES
        while start < len(names) and self._has(namespace, names[start : start + NAME_BYTES]):
            start += NAME_BYTES
            count += 1
        if start < len(names) and self._memory is not None:
            count += self._memory.count_held(namespace, names[start:])
        text = str(count).encode()
        reply.head(200, len(text))
        reply.data(text)

    def _path(self, namespace: bytes, key: bytes) -> str:
        return f"{self._blobs}/{relative_path(BlobName(namespace, key))}"

    def _has(self, namespace: bytes, key: bytes) -> bool:
        if self._blobs is None:
            return False
        try:
            return stat.S_ISREG(os.lstat(self._path(namespace, key)).st_mode)
        except OSError:  # a miss, whatever it is: the disk tier of this machine's own server tells of a sick disk
            return False

    def _open(self, namespace: bytes, key: bytes) -> int | None:
        """Open a blob's file; None: there is none, or something that is no plain file has its name."""
        if self._blobs is None:
            return None
        try:
            descriptor = open_to_read(Path(self._path(namespace, key)))
        except OSError:  # a miss, as above
            return None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            return None
        return descriptor

    def _give_lent(self, namespace: bytes, key: bytes, reply: Reply) -> bool:
        """Give a blob that is in host memory alone; False: it was refused."""
        if self._memory is None:
            reply.head(404)
        elif not self._has_room():  # the server need not be asked
            reply.head(503)
        else:
            try:
                with self._memory.lent(namespace, key) as blob:
                    if blob is not None:
                        return self._give(blob.size_bytes, blob.read_into, reply)
                    reply.head(404)
            except TierBusy:
                reply.head(503)
        return False

    def _has_room(self) -> bool:
        with self._lock:
            return self._bodies < BODIES_MAX and self._budget.has_room(time.monotonic())

    def _give(self, size_bytes: int, read_into: ReadInto, reply: Reply) -> bool:
        with self._turn(size_bytes) as has_turn:
            if has_turn:
                reply.head(200, size_bytes)
                _send(size_bytes, read_into, reply)
            else:
                reply.head(503)
        return has_turn

    @contextlib.contextmanager
    def _turn(self, size_bytes: int) -> Iterator[bool]:
        """One of the bodies that are sent at once, for the length of a ``with`` block; False: there are too many."""
        with self._lock:
            has_turn = self._bodies < BODIES_MAX and self._budget.take(size_bytes, time.monotonic())
            self._bodies += has_turn
        try:
            yield has_turn
        finally:
            with self._lock:
                self._bodies -= has_turn


def _reader_of(descriptor: int) -> ReadInto:
    def read_into(piece: memoryview, offset: int) -> int:
        return os.preadv(descriptor, [piece], offset)

    return read_into


def _send(size_bytes: int, read_into: ReadInto, reply: Reply) -> None:
    piece = reply.piece(min(PIECE_BYTES, size_bytes))
    offset = 0
    while offset < size_bytes:
        count = read_into(piece[: size_bytes - offset], offset)
        if not count:
            raise ConnectionResetError("the blob was cut while it was sent")
        reply.data(piece[:count])
        offset += count
