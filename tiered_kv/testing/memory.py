"""A tier in a dictionary: the medium for tests that are not about a medium.

Owns its blobs. Behaves like the disk tier to its callers: bytes are copied, capacity is never passed, a closed tier
refuses calls, use is remembered. ``raw_put`` and ``raw_get`` reach behind its back, as a broken medium would.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator

from tiered_kv.chunks.header import PEEK_BYTES, peek, refuse_foreign
from tiered_kv.errors import CapacityExceeded, ChunkCorrupt, ChunkMismatch, Closed
from tiered_kv.tiers.base import BlobInfo, BlobName, Tier, TierTraits, Usage


class MemoryTier(Tier):
    """Blobs in memory, least recently used first.

    Threads: any; everything is guarded by one lock.
    """

    def __init__(self, capacity_bytes: int | None = None, name: str = "memory", *, is_shared: bool = False) -> None:
        self.traits = TierTraits(name=name, io_concurrency=4, is_shared=is_shared)
        self.descriptions: dict[bytes, bytes] = {}
        self._capacity_bytes = capacity_bytes
        self._blobs: OrderedDict[BlobName, bytes] = OrderedDict()
        self._charged: dict[BlobName, int] = {}
        self._used_bytes = 0
        self._lock = threading.Lock()
        self._is_closed = False

    def put(self, name: BlobName, blob: memoryview) -> None:
        peek(blob[:PEEK_BYTES])
        data = bytes(blob)
        with self._lock:
            self._check_open()
            used = self._used_bytes - self._charged.get(name, 0) + len(data)
            if self._capacity_bytes is not None and used > self._capacity_bytes:
                raise CapacityExceeded(f"memory tier is full. needed={used} limit={self._capacity_bytes}")
            self._used_bytes = used
            self._blobs[name], self._charged[name] = data, len(data)
            self._blobs.move_to_end(name)

    def get_into(self, name: BlobName, buffer: memoryview) -> bool:
        with self._lock:
            self._check_open()
            data = self._blobs.get(name)
        if data is None:
            return False
        if len(data) != len(buffer):
            refuse_foreign(data[:PEEK_BYTES], name.namespace)
            raise ChunkCorrupt(f"blob has the wrong size. observed={len(data)} expected={len(buffer)}")
        buffer[:] = data
        return True

    def contains(self, name: BlobName) -> bool:
        with self._lock:
            self._check_open()
            return name in self._blobs

    def delete(self, name: BlobName) -> bool:
        with self._lock:
            self._check_open()
            if self._blobs.pop(name, None) is None:
                return False
            self._used_bytes -= self._charged.pop(name)
            return True

    def scan(self) -> Iterator[BlobInfo]:
        with self._lock:
            self._check_open()
            blobs = [(data, self._charged[name]) for name, data in self._blobs.items()]
        return iter([info for info in (_info(*blob) for blob in blobs) if info is not None])

    def usage(self) -> Usage:
        with self._lock:
            return Usage(self._used_bytes, self._capacity_bytes, len(self._blobs))

    def record_use(self, names: Iterable[BlobName]) -> None:
        with self._lock:
            for name in names:
                if name in self._blobs:
                    self._blobs.move_to_end(name)

    def describe(self, namespace: bytes, record: bytes) -> None:
        with self._lock:
            self._check_open()
            self.descriptions[namespace] = record

    def close(self) -> None:
        self._is_closed = True

    def reopen(self, capacity_bytes: int | None) -> None:
        """Start again with the same blobs, as a restarted process would."""
        self._is_closed = False
        self._capacity_bytes = capacity_bytes

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed("the memory tier is closed")

    # -- behind its back ----------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[BlobName]:
        """Names of all blobs, least recently used first."""
        with self._lock:
            return list(self._blobs)

    def raw_put(self, name: BlobName, data: bytes) -> None:
        """Replace a stored blob's bytes; what it counts against the capacity stays."""
        with self._lock:
            self._blobs[name] = data
            if name not in self._charged:
                self._charged[name] = len(data)
                self._used_bytes += len(data)

    def raw_get(self, name: BlobName) -> bytes | None:
        """A blob's bytes, whatever they are."""
        with self._lock:
            return self._blobs.get(name)


def _info(data: bytes, size_bytes: int) -> BlobInfo | None:
    try:
        header = peek(data[:PEEK_BYTES])
    except (ChunkCorrupt, ChunkMismatch):
        return None
    return BlobInfo(header.record, size_bytes)
