"""What a disk directory holds, in memory: one row per blob, bytes used and reserved, order of use.

Pure bookkeeping under one lock. Must not touch the disk: ``tier.py`` does the I/O and tells the ledger before (reserve)
and after (commit, forget). The order of use is a counter that goes on across restarts, never a clock: a clock that
jumps would turn the order of eviction around. The time of use beside it is for people.

Ownership: every field is guarded by ``_lock``; rows are immutable tuples, so a copied list of them is a snapshot.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from tiered_kv.errors import CapacityExceeded
from tiered_kv.tiers.base import BlobInfo, BlobName
from tiered_kv.tiers.disk.index import IndexRow, Shard, ShardRows

USED_S_MAX: Final = (1 << 32) - 1


class DiskLedger:
    """Byte-exact accounts of a directory with a limit.

    Threads: any.
    """

    def __init__(self, limit_bytes: int, unix_s: Callable[[], float] = time.time) -> None:
        self.limit_bytes = limit_bytes
        self._unix_s = unix_s
        self._lock = threading.Lock()
        self._shards: ShardRows = {}
        self._dirty: set[Shard] = set()
        self._foreign: frozenset[BlobName] = frozenset()
        self._used = 0
        self._reserved = 0
        self._count = 0
        self._next_seq = 1

    def restore(
        self, shards: ShardRows, dirty: Iterable[Shard], foreign: Iterable[BlobName], foreign_bytes: int
    ) -> None:
        """Start from what a scan of the directory found; once, before any other call."""
        with self._lock:
            self._shards = shards
            self._dirty = set(dirty)
            self._foreign = frozenset(foreign)
            rows = [row for shard in shards.values() for row in shard.values()]
            self._count = len(rows)
            self._used = foreign_bytes + sum(row.size_bytes for row in rows)
            self._next_seq = max((row.use_seq for row in rows), default=0) + 1

    @property
    def used_bytes(self) -> int:
        """What blobs and foreign files take, without writes in flight."""
        return self._used

    def reserve(self, size_bytes: int, free_bytes: int) -> None:
        """Set bytes aside for a write that is about to start.

        Args:
            size_bytes: Bytes the write will allocate.
            free_bytes: What the file system may still give away.

        Raises:
            CapacityExceeded: The limit or the file system's free space does not allow them.
        """
        with self._lock:
            total = self._used + self._reserved + size_bytes
            if total > self.limit_bytes:
                raise CapacityExceeded(
                    f"disk tier is full. used={self._used} reserved={self._reserved} needed={size_bytes} "
                    f"limit={self.limit_bytes}"
                )
            # Bytes of writes in flight may not be allocated yet, so they are subtracted as if none of them were.
            if free_bytes - self._reserved < size_bytes:
                raise CapacityExceeded(
                    f"file system is too full. free_above_minimum={free_bytes} reserved={self._reserved} "
                    f"needed={size_bytes}"
                )
            self._reserved += size_bytes

    def release(self, size_bytes: int) -> None:
        """Give a reservation back: the write failed and its temp file is gone."""
        with self._lock:
            self._reserved -= size_bytes
            assert self._reserved >= 0

    def commit(self, info: BlobInfo, reserved_bytes: int) -> None:
        """Turn a reservation into a stored blob, replacing what the name held before."""
        name = info.name
        with self._lock:
            rows = self._shards.setdefault(Shard.of(name), {})
            old = rows.get(name.key)
            if old is None:
                self._count += 1
            else:
                self._used -= old.size_bytes
            rows[name.key] = IndexRow(info.record, info.size_bytes, self._next_seq, self._now())
            self._next_seq += 1
            self._used += info.size_bytes
            self._reserved -= reserved_bytes
            self._dirty.add(Shard.of(name))

    def forget(self, name: BlobName) -> bool:
        """The blob is gone: give its bytes back; says whether none is left in its shard. Unknown names are ignored."""
        shard = Shard.of(name)
        with self._lock:
            rows = self._shards.get(shard, {})
            row = rows.pop(name.key, None)
            if row is not None:
                self._count -= 1
                self._used -= row.size_bytes
                self._dirty.add(shard)
            if not rows:  # namespaces come and go: thousands of empty shards would stay
                self._shards.pop(shard, None)
            return not rows

    def touch(self, names: Sequence[BlobName]) -> None:
        """Note uses, oldest first. Unknown names are ignored: they were evicted meanwhile."""
        now = self._now()
        with self._lock:
            for name in names:
                shard = Shard.of(name)
                rows = self._shards.get(shard, {})
                row = rows.get(name.key)
                if row is not None:
                    rows[name.key] = IndexRow(row.record, row.size_bytes, self._next_seq, now)
                    self._next_seq += 1
                    self._dirty.add(shard)

    def _now(self) -> int:
        return min(max(0, int(self._unix_s())), USED_S_MAX)

    def is_foreign(self, name: BlobName) -> bool:
        """Whether the name is taken by a well-formed file that is not ours to touch."""
        return name in self._foreign

    def totals(self) -> tuple[int, int]:
        """Bytes used, including writes in flight, and blobs stored."""
        with self._lock:
            return self._used + self._reserved, self._count

    def namespaces(self) -> set[bytes]:
        """Those that have blobs."""
        with self._lock:
            return {shard.namespace for shard in self._shards}

    def snapshot(self) -> Iterator[BlobInfo]:
        """All blobs, least recently used first.

        Blobs of unknown recency (sequence 0) come first, the deepest of a prefix before its beginning, because a
        chunk is worthless without its parent.
        """
        with self._lock:
            rows = [row for rows in self._shards.values() for row in rows.values()]
        rows.sort(key=lambda row: (row.use_seq, -row.record.chunk_index))
        return (BlobInfo(row.record, row.size_bytes) for row in rows)

    def take_dirty(self) -> dict[Shard, list[IndexRow]]:
        """Rows of every shard that changed since the last call; an empty list means the shard is empty now."""
        with self._lock:
            dirty, self._dirty = self._dirty, set()
        taken: dict[Shard, list[IndexRow]] = {}
        for shard in dirty:  # one by one: whoever notes a use waits for the lock, and there may be a million rows
            with self._lock:
                taken[shard] = list(self._shards.get(shard, {}).values())
        return taken

    def mark_dirty(self, shards: Iterable[Shard]) -> None:
        """These shards were taken but could not be persisted: keep them for the next time."""
        with self._lock:
            self._dirty.update(shards)

    def mark_all_dirty(self) -> None:
        """The persisted index was lost: every shard has to be written again."""
        with self._lock:
            self._dirty.update(self._shards)
