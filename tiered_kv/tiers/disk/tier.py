"""The local disk tier: one file per blob, bounded in bytes, kept across restarts.

Owns one directory exclusively::

    server.lock                                  held while the tier is open (``lock.py``)
    server.json                                  who holds it; written by the server, read here
    blobs/<namespace>/<kk>/<key>.safetensors     one blob each; kk = first two hex digits of the key
    blobs/<namespace>/namespace.json             the namespace's readable record
    tiered_kv.json                               says whose it is, before anything else is written (``marker.py``)
    tmp/                                         writes in flight; ours are removed at open (``sweep.py``)
    index/                                       sizes and recency (``index.py``)
    pins.json                                    what must stay (``pins.py``); read again by every flush

Must not verify payloads (``wrappers/verified.py``), retry, start threads or log per blob. Called by the engine's I/O
threads and by the CLI, through ``tiers/open.py``.

A blob is written to a temp file and renamed, without fsync: readers see all of it or nothing, and what a power failure
tears is found by its checksums. Bytes are reserved before the write and accounted from ``st_blocks`` after it, so
blobs, temp files and the metadata reserve stay within the capacity at every moment. (A file deleted while a get still
reads it gives its blocks back a moment later than its bytes.)

    field        guarded by
    _ledger      its own lock: rows, bytes, recency
    _calls       its own lock: close() waits for calls in flight before the directory is unlocked
    _stripes     one lock per key byte mod 64: rename or unlink and their bookkeeping are one step for a name
    _index       its own lock
    _first_reads its own lock
    _pinned      replaced as a whole by flush
    _left        a deque: any thread appends, a flush takes
    _room        replaced as a whole, as is _linkless: looks of any thread, good for ``LOOK_AGE_S``
"""

import contextlib
import dataclasses
import itertools
import json
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Final

from tiered_kv.chunks.geometry import align_up
from tiered_kv.chunks.header import PEEK_BYTES, peek, refuse_foreign
from tiered_kv.config import MIN_FREE_BYTES_DEFAULT
from tiered_kv.errors import CapacityExceeded, ChunkCorrupt, ChunkMismatch, ConfigError, TierUnavailable
from tiered_kv.keys.namespace import FIRST_STORED_BY
from tiered_kv.keys.naming import relative_path
from tiered_kv.tiers.base import BlobInfo, BlobName, Tier, TierTraits, Usage
from tiered_kv.tiers.disk.calls import Calls
from tiered_kv.tiers.disk.files import (
    create_file,
    free_bytes,
    has_huge_pages,
    is_aligned,
    make_directories,
    make_root,
    mapped_errors,
    read_file,
    read_head,
    read_small_file,
    refuse_links,
    replace_small_file,
    supports_direct_io,
    writable_by_others,
    write_file,
)
from tiered_kv.tiers.disk.first_reads import FirstReads
from tiered_kv.tiers.disk.index import (
    DiskIndex,
    foreign_index,
    is_expanded,
    is_on_local_disk,
    is_on_network,
    reads_by_address,
)
from tiered_kv.tiers.disk.ledger import DiskLedger
from tiered_kv.tiers.disk.lock import DirectoryLock
from tiered_kv.tiers.disk.marker import claim
from tiered_kv.tiers.disk.pins import read_pins
from tiered_kv.tiers.disk.scan import NAMESPACE_FILE, RECORD_BYTES_MAX, DirectoryContent, reconcile
from tiered_kv.tiers.disk.sweep import SweepLog, sweep_namespaces, sweep_temp_files

logger = logging.getLogger(__name__)

LOOK_AGE_S: Final = 0.01
"""So old a look may be at what hardly changes between two writes: each costs a turn of the interpreter's lock."""

MIN_METADATA_RESERVE_BYTES = 64 << 20
MIN_BLOB_SPACE_BYTES = 1 << 20
_STRIPES = 64


def metadata_reserve(capacity_bytes: int) -> int:
    """Bytes set aside for directories, extents and the index: 1 %, at least 64 MiB."""
    return max(MIN_METADATA_RESERVE_BYTES, capacity_bytes // 100)


class DiskTier(Tier):
    """Blobs in files below one directory.

    Attributes:
        direct_io: Writes bypass the page cache (buffers that are not 4096-aligned never do).
        direct_reads: So do reads of what is not in it and was not read lately, while the disk is fast.
        unreadable_count: Files the scan at open left out: foreign, misnamed, or broken and removed.
    """

    traits = TierTraits(name="disk", io_concurrency=4, is_shared=False)

    def __init__(
        self,
        root: Path,
        capacity_bytes: int,
        *,
        min_free_bytes: int = MIN_FREE_BYTES_DEFAULT,
        metadata_reserve_bytes: int | None = None,
        direct_io: bool | None = None,
    ) -> None:
        """Claim and lock the directory, sweep temp files, load the index and reconcile it with the files.

        Args:
            capacity_bytes: Limit of blobs, temp files and the metadata reserve together.
            min_free_bytes: Refuse writes that would leave less than this on the file system.
            metadata_reserve_bytes: Taken off the capacity first; None: ``metadata_reserve``.
            direct_io: Whether writes use O_DIRECT; None: where a probe succeeds. False: reads do not, either.

        Raises:
            ConfigError: The capacity is too small, ``direct_io`` is demanded where it does not work, or the directory
                is somebody else's: then nothing in it was touched.
            DirectoryLocked: Another process owns the directory.
            TierUnavailable: The directory cannot be made, read or written.
        """
        reserve = metadata_reserve(capacity_bytes) if metadata_reserve_bytes is None else metadata_reserve_bytes
        if capacity_bytes < reserve + MIN_BLOB_SPACE_BYTES:
            raise ConfigError(
                f"disk capacity leaves no room for blobs. capacity={capacity_bytes} metadata_reserve={reserve} "
                f"least={reserve + MIN_BLOB_SPACE_BYTES}: raise disk_bytes, by default a tenth of the free space"
            )
        self._root = Path(os.path.realpath(root))
        self._blobs, self._tmp = self._root / "blobs", self._root / "tmp"
        self._min_free_bytes = min_free_bytes
        self._ledger = DiskLedger(capacity_bytes - reserve)
        self._calls = Calls(root)
        self._stripes = [threading.Lock() for _ in range(_STRIPES)]
        self._flushing = threading.Lock()
        self._is_flush_failing = False
        self._first_reads = FirstReads()
        self._pinned: frozenset[bytes] | None = None
        self._has_warned_of_pins = False
        self._temp_numbers = itertools.count()
        self._left: deque[tuple[str, int]] = deque()  # temp files that could not be removed, and their bytes
        self._room = -math.inf, 0  # when the file system was looked at, and what it and blobs had together
        self._linkless = "", -math.inf  # the directory above others that was looked at last, and when
        with mapped_errors("open", self._root):
            make_root(self._root)
            self._owners = owners = claim(self._root)
        self._lock = DirectoryLock(self._root)
        try:
            with mapped_errors("open", self._root):
                make_directories(self._blobs, self._root)
                make_directories(self._tmp, self._root)
                log = SweepLog(self._root)
                sweep_temp_files(self._root, self._tmp, owners, log)
                self.direct_io = self._choose_direct_io(direct_io)
                self.direct_reads = self.direct_io and has_huge_pages() and is_on_local_disk(self._root, _mounts())
                self.traits = dataclasses.replace(self.traits, reads_by_address=reads_by_address(self._root, _mounts()))
                self._index = self._choose_index(owners)
                content = self._restore(owners, log)
                log.end()
                self._read_pins()
                self.unreadable_count = content.unreadable_count
                self._log_open(content)
        except BaseException:
            self._lock.release()
            raise

    # -- opening ------------------------------------------------------------------------------------------------------

    def _choose_direct_io(self, wanted: bool | None) -> bool:
        if wanted is False:
            return False
        works = supports_direct_io(self._tmp)
        if wanted and not works:
            raise ConfigError(f"direct_io was asked for, but the file system refuses it. path={self._root}")
        return works

    def _choose_index(self, owners: Collection[int]) -> DiskIndex | None:
        if is_on_network(self._root, _mounts()):
            logger.warning("disk directory is on a network mount: no index, every start scans it. path=%s", self._root)
            return None
        if is_expanded(self._root):
            logger.warning("a part of the path reads as a variable: no index, every start scans. path=%s", self._root)
            return None
        if (what := foreign_index(self._root, owners)) is not None:
            logger.warning("index/ is not ours and stays: no index, every start scans. path=%s %s", self._root, what)
            return None
        return DiskIndex(self._root, owners)

    def _restore(self, owners: Collection[int], log: SweepLog) -> DirectoryContent:
        known = self._index.load() if self._index else {}
        content = reconcile(self._blobs, known, owners, log.removed)
        self._ledger.restore(content.shards, content.dirty, content.foreign, content.foreign_bytes)
        return content

    def _log_open(self, content: DirectoryContent) -> None:
        for place in writable_by_others((self._root, self._blobs, self._tmp)):
            logger.warning("another user may write into the disk directory, and so into answers: chmod 0700. %s", place)
        used, count = self._ledger.totals()
        logger.info(
            "disk tier open. path=%s blobs=%d used=%d limit=%d direct_io=%s direct_reads=%s",
            self._root, count, used, self._ledger.limit_bytes, self.direct_io, self.direct_reads,
        )  # fmt: skip
        if content.unreadable_count:
            logger.warning(
                "disk tier holds files that are not blobs of ours. path=%s left_out=%d removed=%d foreign_bytes=%d",
                self._root, content.unreadable_count, content.removed_count, content.foreign_bytes,
            )  # fmt: skip

    def remove_ended_namespaces(self) -> None:
        """Remove the records of namespaces without blobs. For who will write them again: before a session opens.

        Raises:
            TierUnavailable: The directory cannot be read.
        """
        with mapped_errors("open", self._root):
            log = SweepLog(self._root)
            sweep_namespaces(self._blobs, self._ledger.namespaces(), self._owners, log)
            log.end()

    # -- the tier contract --------------------------------------------------------------------------------------------

    def put(self, name: BlobName, blob: memoryview) -> None:
        """Store ``blob``; see ``Tier.put``.

        Raises:
            ChunkCorrupt: The blob does not begin with a header; nothing was stored.
            ChunkMismatch: The header is of another format version, or a foreign file has the name; it is left alone.
        """
        self.put_if(name, blob, lambda: True)

    def put_if(self, name: BlobName, blob: memoryview, is_wanted: Callable[[], bool]) -> bool:
        """The same; asks between the write of the file and its renaming."""
        header, path = peek(blob[:PEEK_BYTES]), self._file(name)
        with self._calls:
            if self._ledger.is_foreign(name):
                raise ChunkMismatch(f"a foreign file has this name. path={path}")
            reserved = align_up(blob.nbytes)
            self._reserve(reserved)
            temp = ""
            try:
                with mapped_errors("put", path):
                    self._lock.check(LOOK_AGE_S)
                    is_direct = self.direct_io and is_aligned(blob)
                    descriptor, temp = self._create_temp(direct=is_direct)
                    allocated = write_file(descriptor, temp, blob, direct=is_direct)
                    if allocated > reserved:
                        self._reserve(allocated - reserved)
                        reserved = allocated
                    if not is_wanted():
                        self._abandon(temp, reserved)
                        return False
                    self._lock.check()  # again: it may have waited for long, and the directory be another server's
                    # The reservation, not a smaller allocation: ZFS and btrfs tell the final one seconds later.
                    info = BlobInfo(header.record, reserved)
                    self._publish(temp, path, info, reserved)
                    return True
            except BaseException:
                self._abandon(temp, reserved)
                raise

    def _reserve(self, size_bytes: int) -> None:
        """Set bytes aside for a write; that there are none is not said by an old look at the file system."""
        looked_s, room_bytes = self._room
        if time.monotonic() - looked_s < LOOK_AGE_S:
            with contextlib.suppress(CapacityExceeded):
                self._ledger.reserve(size_bytes, room_bytes - self._ledger.used_bytes)
                return
        used_bytes = self._ledger.used_bytes
        with mapped_errors("statvfs", self._root):
            free = free_bytes(self._root) - self._min_free_bytes
        self._room = time.monotonic(), free + used_bytes
        self._ledger.reserve(size_bytes, free)

    def _create_temp(self, *, direct: bool) -> tuple[int, str]:
        """A new file in ``tmp``: its descriptor and its name."""
        is_made = False
        while True:
            temp = f"{self._tmp}/{os.getpid()}-{next(self._temp_numbers)}"
            try:
                return create_file(temp, direct=direct), temp
            except FileExistsError:  # what the sweep has left there is not overwritten, nor removed as ours
                continue
            except FileNotFoundError:  # somebody cleared the directory
                if is_made:
                    raise
                self._lock.check()  # or removed it: made anew it would be a directory of nobody, which servers refuse
                is_made = True
                make_directories(self._tmp, self._root)

    def _publish(self, temp: str, target: str, info: BlobInfo, reserved_bytes: int) -> None:
        name, directory = info.name, target[: target.rindex("/")]
        with self._stripe(name):
            try:
                self._refuse_links(directory)
                os.replace(temp, target)
            except FileNotFoundError:  # the first blob of its directory
                make_directories(Path(directory), self._root)
                os.replace(temp, target)
            self._ledger.commit(info, reserved_bytes)

    def _refuse_links(self, directory: str) -> None:
        """As :func:`files.refuse_links`; of what is above the directory an old look will do."""
        above, now_s = directory[: directory.rindex("/")], time.monotonic()
        refuse_links(directory, above)
        looked_at, looked_s = self._linkless
        if looked_at != above or now_s - looked_s >= LOOK_AGE_S:
            refuse_links(above, self._root)
            self._linkless = above, now_s

    def _abandon(self, temp: str, reserved_bytes: int) -> None:
        """Remove a temp file, if one was made, and give its bytes back."""
        if (code := self._remove_temp(temp, reserved_bytes)) is not None:
            logger.warning("cannot remove a temp file. path=%s errno=%s", temp, code)

    def _remove_temp(self, temp: str, reserved_bytes: int) -> int | None:
        """The same; what cannot be removed is kept in mind. Returns why, not as an error, which holds its frames."""
        try:
            if temp:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temp)
        except OSError as exc:
            # Its bytes stay reserved, because they stay on the disk until a flush can remove it, or the next open.
            self._left.append((temp, reserved_bytes))
            return exc.errno
        self._ledger.release(reserved_bytes)
        return None

    def _remove_left(self) -> None:
        """Temp files of writes that failed, which could not be removed either, while the directory was out of order."""
        try:
            self._lock.check()
        except TierUnavailable as exc:
            logger.debug("temp files stay: %s", exc)
            return
        with self._flushing:
            for _ in range(len(self._left)):
                self._remove_temp(*self._left.popleft())

    def get_into(self, name: BlobName, buffer: memoryview) -> bool:
        """Read the blob into ``buffer``; see ``Tier.get_into``."""
        return self.get_into_by_pieces(name, buffer, lambda _: None)

    def get_into_by_pieces(self, name: BlobName, buffer: memoryview, on_piece: Callable[[int], None]) -> bool:
        path = self._file(name)
        with self._calls, mapped_errors("get", path):
            try:
                is_first, begun_s = self.direct_reads and self._first_reads.begins(name.key), time.monotonic()
                found = read_file(path, buffer, on_piece, direct=is_first and self._first_reads.are_fast)
                if is_first and found:
                    self._first_reads.took(buffer.nbytes, time.monotonic() - begun_s)
            except ChunkCorrupt:
                with contextlib.suppress(OSError):  # gone by now, or no file: damaged is all that can be said
                    refuse_foreign(read_head(path, PEEK_BYTES), name.namespace)
                raise
            if not found:
                self._forget_vanished(name, path)
            return found

    def contains(self, name: BlobName) -> bool:
        """Ask the directory, not the ledger: a vanished file is a miss."""
        path = self._file(name)
        with self._calls, mapped_errors("contains", path):
            try:
                os.stat(path, follow_symlinks=False)
            except FileNotFoundError:
                self._forget_vanished(name, path)
                return False
            return True

    def _forget_vanished(self, name: BlobName, path: str) -> None:
        with self._stripe(name):
            if not os.path.lexists(path):  # again, now that no put can publish it meanwhile
                self._ledger.forget(name)

    def delete(self, name: BlobName) -> bool:
        """Remove the blob; a foreign file under its name is not one and stays."""
        path = self._path(name)
        with self._calls, mapped_errors("delete", path), self._stripe(name):
            if self._ledger.is_foreign(name):
                return False
            try:
                refuse_links(path.parent, self._root)
                os.unlink(path)
            except FileNotFoundError:
                self._ledger.forget(name)
                return False
            if self._ledger.forget(name):
                # With each reset comes a namespace: what is left of old ones would take an inode for each directory. No
                # put is about to use this one: all of its names have one stripe.
                with contextlib.suppress(OSError):
                    os.rmdir(path.parent)
            return True

    def scan(self) -> Iterator[BlobInfo]:
        """Yield a snapshot of the blobs, least recently used first; those of unknown recency come first."""
        with self._calls:
            return self._ledger.snapshot()

    def usage(self) -> Usage:
        """Allocated bytes of blobs, of foreign files and of writes in flight; capacity without the metadata reserve."""
        with self._calls:
            used, count = self._ledger.totals()
            return Usage(used, self._ledger.limit_bytes, count)

    def record_use(self, names: Iterable[BlobName]) -> None:
        """Note uses in memory; ``flush`` persists them."""
        with self._calls:
            self._ledger.touch(list(names))

    def flush(self) -> None:
        """Write the index rows that changed, read the pins. A failure is logged once and tried again next time.

        So is the removal of temp files that failed.
        """
        with self._calls:
            if self._left:
                self._remove_left()
            self._write_index()
            self._read_pins()

    def pinned(self) -> Collection[bytes] | None:
        return self._pinned

    def _read_pins(self) -> None:
        try:
            self._pinned = frozenset(name.key for name in read_pins(self._root))
            self._has_warned_of_pins = False
        except TierUnavailable as exc:  # what was pinned stays so: nobody said otherwise
            if not self._has_warned_of_pins:
                if self._pinned is None:
                    logger.warning("the pins cannot be read, and nothing is evicted until they can be. cause=%s", exc)
                else:
                    logger.warning("the pins stay as they were. cause=%s", exc)
            self._has_warned_of_pins = True

    def _write_index(self) -> None:
        if self._index is None:
            return
        with self._flushing:
            dirty = self._ledger.take_dirty()
            try:
                self._lock.check()
                if dirty and not self._index.write(dirty):
                    self._ledger.mark_all_dirty()
                    dirty = self._ledger.take_dirty()
                    self._index.write(dirty)
                self._is_flush_failing = False
            except TierUnavailable as exc:
                self._ledger.mark_dirty(dirty)
                if not self._is_flush_failing:
                    logger.warning("disk index not written, recency is kept in memory. cause=%s", exc)
                self._is_flush_failing = True

    def describe(self, namespace: bytes, record: bytes) -> None:
        """Write ``namespace.json`` unless it already says the same."""
        path = self._blobs / namespace.hex() / NAMESPACE_FILE
        with self._calls, mapped_errors("describe", path):
            self._lock.check()
            make_directories(path.parent, self._root)
            if not _says_the_same(path, record):
                text = json.dumps(json.loads(record), indent=2, sort_keys=True, ensure_ascii=False)
                make_directories(self._tmp, self._root)  # somebody may have cleared it
                replace_small_file(path, text.encode() + b"\n", temp_in=self._tmp)

    def close(self) -> None:
        """Wait for calls in flight, persist the index and unlock the directory. Idempotent."""
        if not self._calls.close():
            return
        try:
            self._write_index()
        finally:
            self._lock.release()

    # -- plumbing -----------------------------------------------------------------------------------------------------

    def _path(self, name: BlobName) -> Path:
        return Path(self._file(name))

    def _file(self, name: BlobName) -> str:
        """The same as text: reading a small blob takes little more than making a ``Path``."""
        return f"{self._blobs}/{relative_path(name)}"

    def _stripe(self, name: BlobName) -> threading.Lock:
        return self._stripes[name.key[0] % _STRIPES]


def _mounts() -> str:
    return Path("/proc/self/mounts").read_text("utf-8", "surrogateescape")


def _says_the_same(path: Path, record: bytes) -> bool:
    """Whether the file parses to ``record``, whoever was the first to store there.

    A power failure may have left it empty; then it is written again.
    """
    try:
        there, ours = json.loads(read_small_file(path, RECORD_BYTES_MAX)), json.loads(record)
        ours.pop(FIRST_STORED_BY, None)
        return isinstance(there, dict) and {**there, FIRST_STORED_BY: None} == {**ours, FIRST_STORED_BY: None}
    except (OSError, ValueError, RecursionError):
        return False
