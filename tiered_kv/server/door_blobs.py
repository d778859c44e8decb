"""What the door answers: a blob of this machine's disk, and how much of a prefix is there.

Read only, and nothing is listed: who asks names namespace and keys. Reads the disk tier's files by itself, so the
server's loop has no part in it. Called by the connections' threads (``door_listener.py``).
"""

import os
import re
import stat
import threading
import time
from pathlib import Path
from typing import Final

from tiered_kv.keys.naming import NAME_BYTES, BlobName, relative_path
from tiered_kv.server.door_listener import Question, Reply
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

    def take(self, size_bytes: int, now_s: float) -> bool:
        """Take room for a body; False: there is none now."""
        if self._bytes_per_s is None:
            return True
        if self._paid_until_s > now_s + BURST_S:
            return False
        self._paid_until_s = max(self._paid_until_s, now_s) + size_bytes / self._bytes_per_s
        return True


class DoorBlobs:
    """The blobs below a disk tier's directory.

    Threads: any; the budget and the number of bodies are guarded by one lock.
    """

    def __init__(self, root: Path, serve_bytes_s: int | None) -> None:
        """Give what lies in the disk tier at ``root``; ``serve_bytes_s`` None: as fast as it goes."""
        self._blobs = root / "blobs"
        self._lock = threading.Lock()
        self._budget = Budget(serve_bytes_s)
        self._bodies = 0

    def answer(self, question: Question, reply: Reply) -> None:
        """Answer whoever has shown a token."""
        if question.method == "POST" and question.target == PREFIX_PATH:
            self._count(question.body, reply)
            return
        found = _BLOB.fullmatch(question.target) if question.method == "GET" else None
        descriptor = None if found is None else self._open(bytes.fromhex(found[1]), bytes.fromhex(found[2]))
        if descriptor is None:
            reply.head(404)
            return
        try:
            self._give(descriptor, reply)
        finally:
            os.close(descriptor)

    def _count(self, names: bytes, reply: Reply) -> None:
        """Say how many of these blobs are there, from the first on: a namespace and keys, one after the other."""
        if len(names) % NAME_BYTES or not 2 <= len(names) // NAME_BYTES <= 1 + NAMES_MAX:
            reply.head(400)
            return
        namespace, count = names[:NAME_BYTES], 0
        for start in range(NAME_BYTES, len(names), NAME_BYTES):
            if not self._has(namespace, names[start : start + NAME_BYTES]):
                break
            count += 1
        text = str(count).encode()
        reply.head(200, len(text))
        reply.data(text)

    def _path(self, namespace: bytes, key: bytes) -> str:
        return f"{self._blobs}/{relative_path(BlobName(namespace, key))}"

    def _has(self, namespace: bytes, key: bytes) -> bool:
        try:
            return stat.S_ISREG(os.lstat(self._path(namespace, key)).st_mode)
        except OSError:  # a miss, whatever it is: the disk tier of this machine's own server tells of a sick disk
            return False

    def _open(self, namespace: bytes, key: bytes) -> int | None:
        """Open a blob's file; None: there is none, or something that is no plain file has its name."""
        try:
            descriptor = open_to_read(Path(self._path(namespace, key)))
        except OSError:  # a miss, as above
            return None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            return None
        return descriptor

    def _give(self, descriptor: int, reply: Reply) -> None:
        size_bytes = os.fstat(descriptor).st_size
        with self._lock:
            if self._bodies >= BODIES_MAX or not self._budget.take(size_bytes, time.monotonic()):
                size_bytes = -1
            else:
                self._bodies += 1
        if size_bytes < 0:
            reply.head(503)
            return
        try:
            reply.head(200, size_bytes)
            _send(descriptor, size_bytes, reply)
        finally:
            with self._lock:
                self._bodies -= 1


def _send(descriptor: int, size_bytes: int, reply: Reply) -> None:
    piece = memoryview(bytearray(min(PIECE_BYTES, size_bytes)))
    offset = 0
    while offset < size_bytes:
        count = os.preadv(descriptor, [piece[: size_bytes - offset]], offset)
        if not count:
            raise ConnectionResetError("the blob was cut while it was sent")
        reply.data(piece[:count])
        offset += count
