"""Rows of an engine's own memory that it lent: mapped one by one, each behind room for a blob's header.

A blob is a header and a payload, and tiers move whole blobs. A *mapped row* is a range of addresses whose first part is
memory of ours and whose rest is the row itself, so a row is read into and written out of as a slot is, without a copy::

    mapped row    [ header: ours ][ payload: the engine's row, shared ]

The engine uses a row again the moment it hears that a use of it is over. So a use ends early in two steps: no thread
may begin with it any more, and where a thread reads into a mapped row, that is *revoked*: other memory is mapped in its
place. A thread that hangs in a read then fills that, however late; reads of files copy by address (a device that reads
around the page cache writes elsewhere), so once the mapping is replaced nothing of this process can change the row. A
write only reads its row, and the rule is in :meth:`LentRows.check`: what was sealed after the use ended is not stored.

The region is the engine's file, which cannot be sealed against being cut. So its size is compared before each use, and
what the kernel finds cut in the middle of a read or a write is an error of that call. (Hashing a row that is cut at
that moment, or copying into it, ends this process; vLLM's file has no name by then, and nobody cuts it.)
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import mmap
import os
import signal
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from tiered_kv.errors import ConfigError, TierUnavailable
from tiered_kv.tiering.types import RowUse

logger = logging.getLogger(__name__)

IDLE_MAX: Final = 1 << 14
"""Rows of all regions that stay mapped between uses: mapping one takes as long as reading 256 KiB. Each takes two of
the 65,530 mappings that Linux allows a process, without which it gets no memory and no thread either."""

_PAGE: Final = mmap.PAGESIZE
_MAP_FIXED, _MAP_POPULATE, _MAP_NORESERVE = 0x10, 0x8000, 0x4000
_FAILED: Final = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class RowGone(TierUnavailable):
    """A lent row may not be used any more: its engine took it back, has left, or has cut its memory."""


def _map(address: int | None, size_bytes: int, protection: int, flags: int, fd: int = -1, offset: int = 0) -> int:
    found = _libc.mmap(address, size_bytes, protection, flags, fd, offset)
    if found == _FAILED or found is None:
        code = ctypes.get_errno()
        raise TierUnavailable(f"cannot map an engine's row. errno={code} {os.strerror(code)} size_bytes={size_bytes}")
    return int(found)


_READ_WRITE: Final = mmap.PROT_READ | mmap.PROT_WRITE
_OWN: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class _MappedRow:
    """One row behind room for a header.

    Attributes:
        blob: The whole of it. Nobody may keep a view of it once it is closed.
    """

    def __init__(self, fd: int, row: int, row_bytes: int, header_bytes: int) -> None:
        self.row = row
        self.header_bytes = header_bytes
        self.is_revoked = False
        self._row_bytes = row_bytes
        self._size_bytes = header_bytes + row_bytes
        # The header alone counts as memory of ours: the row's part is addresses until the row is there.
        self._address = _map(None, self._size_bytes, _READ_WRITE, _OWN | _MAP_NORESERVE)
        try:
            flags = mmap.MAP_SHARED | _MAP_FIXED | _MAP_POPULATE
            _map(self._address + header_bytes, row_bytes, _READ_WRITE, flags, fd, row * row_bytes)
        except TierUnavailable:
            self.close()
            raise
        self.blob = memoryview((ctypes.c_ubyte * self._size_bytes).from_address(self._address)).cast("B")

    def revoke(self) -> None:
        """Put other memory in the row's place; when this returns, nobody can change the row through it."""
        if self.is_revoked:
            return
        try:
            _map(self._address + self.header_bytes, self._row_bytes, _READ_WRITE, _OWN | _MAP_FIXED | _MAP_NORESERVE)
        except TierUnavailable:
            # A row that cannot be revoked may be written when its engine uses it again. The end of this process costs
            # misses, and revokes all of them.
            logger.critical("an engine's row cannot be unmapped: the server ends", exc_info=True)
            os.kill(os.getpid(), signal.SIGKILL)
        self.is_revoked = True

    def close(self) -> None:
        """Unmap it; nobody may use it any more."""
        _libc.munmap(self._address, self._size_bytes)


class _IdleRows:
    """Mapped rows that nobody is in, of all regions of the process: it has so many mappings, however many engines.

    Threads: any; one lock. Rows are unmapped without it, and without that of their region: it takes up to a
    millisecond for a row, and the owner must not wait for that.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: OrderedDict[tuple[int, int], _MappedRow] = OrderedDict()  # longest unused first

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, region: int, row: int) -> _MappedRow | None:
        with self._lock:
            return self._rows.pop((region, row), None)

    def put(self, region: int, mapped: _MappedRow) -> list[_MappedRow]:
        """Keep a row; gives those that are too many now, for the caller to close."""
        with self._lock:
            surplus = [self._rows[region, mapped.row]] if (region, mapped.row) in self._rows else []
            self._rows[region, mapped.row] = mapped
            while len(self._rows) > IDLE_MAX:
                surplus.append(self._rows.popitem(last=False)[1])
            return surplus

    def unmap(self, region: int) -> None:
        """Unmap those of a region, in a thread: all of them take up to a second, and the owner serves others."""
        with self._lock:
            surplus = [self._rows.pop(key) for key in [key for key in self._rows if key[0] == region]]
        if surplus:
            threading.Thread(target=_close_all, args=(surplus,), name="tiered_kv-unmap", daemon=True).start()


def _close_all(rows: Iterable[_MappedRow]) -> None:
    for one in rows:
        one.close()


_idle: Final = _IdleRows()
_numbers: Final = itertools.count()


@dataclass(slots=True)
class _RunningUse:
    """A use that a thread is in."""

    mapped: _MappedRow
    is_read: bool


class LentRows:
    """One engine's region.

    Threads: the owner calls :meth:`begin`, :meth:`end` and :meth:`close`; I/O threads are in :meth:`mapped`. One lock
    guards every field.

        _open       numbers of uses that may be begun or go on
        _running    those that a thread is in, also where they are not open any more
        _mapping    threads that map a row: the region's descriptor is closed behind the last one
    """

    def __init__(self, region_fd: int, lifeline_fd: int, rows: int, row_bytes: int) -> None:
        """Take the descriptors, which are this object's from now on.

        Args:
            lifeline_fd: Is closed once no use can touch a row any more, by this or by the end of the process: what the
                engine watches.

        Raises:
            ConfigError: It is no such region.
        """
        self.rows = rows
        self.row_bytes = row_bytes
        self._region_fd = region_fd
        self._lifeline_fd = lifeline_fd
        self._is_closed = False
        self._mapping = 0
        self._lock = threading.Lock()
        self._open: set[int] = set()
        self._running: dict[int, _RunningUse] = {}
        self._number = next(_numbers)  # among the regions of the process
        try:
            self._check_region()
            _MappedRow(region_fd, 0, row_bytes, _PAGE).close()  # else each use would fail, and nothing be stored
        except TierUnavailable as exc:
            self.close()
            raise ConfigError(str(exc)) from exc
        except ConfigError:
            self.close()
            raise

    def _check_region(self) -> None:
        status = os.fstat(self._region_fd)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"lent rows lie in no regular file. mode={status.st_mode:o}")
        if self.row_bytes % _PAGE or not (self.rows > 0 and self.row_bytes > 0):
            raise ConfigError(f"lent rows are no whole pages. rows={self.rows} row_bytes={self.row_bytes}")
        if status.st_size < self.rows * self.row_bytes:
            raise RowGone(
                f"lent rows lie behind their file's end. size_bytes={status.st_size} rows={self.rows} "
                f"row_bytes={self.row_bytes}"
            )

    def begin(self, use: RowUse) -> None:
        """A use may be performed from now on, once."""
        with self._lock:
            self._open.add(use.id)

    def end(self, uses: Iterable[int]) -> None:
        """These are over, whatever a thread does: when this returns, nobody changes their rows for them any more."""
        with self._lock:
            for use in uses:
                self._open.discard(use)
                running = self._running.get(use)
                if running is not None and running.is_read:
                    running.mapped.revoke()

    def is_open(self, use: RowUse) -> bool:
        """Whether a use is not over."""
        return use.id in self._open  # one look, of a set that the owner changes before it says so to anybody

    def check(self, use: RowUse) -> None:
        """Pass while a use is open: what was read from its row until now is what the engine lent.

        Raises:
            RowGone: It is over.
        """
        if not self.is_open(use):
            raise RowGone(f"the engine took its row back. row={use.row}")

    @contextmanager
    def mapped(self, use: RowUse, header_bytes: int, *, is_read: bool) -> Iterator[memoryview]:
        """The mapped row, for one thread.

        Args:
            is_read: A blob is read into it, rather than written out of it.

        Raises:
            RowGone: The use is over, or the region was cut.
            TierUnavailable: It cannot be mapped.
        """
        with self._lock:
            self.check(use)
            self._check_region()
            mapped = _idle.take(self._number, use.row)
            self._mapping += mapped is None
        if mapped is None:  # not with the lock: mapping a large row takes milliseconds
            try:
                mapped = _MappedRow(self._region_fd, use.row, self.row_bytes, header_bytes)
            finally:
                with self._lock:
                    self._mapping -= 1
                    self._let_go_of_region()
        assert mapped.header_bytes == header_bytes, "a region has rows of one format"
        try:
            with self._lock:
                self.check(use)
                self._running[use.id] = _RunningUse(mapped, is_read)
            yield mapped.blob
        finally:
            with self._lock:
                self._running.pop(use.id, None)
                # With the lock: close() comes before or after.
                is_kept = not mapped.is_revoked and not self._is_closed
                surplus = _idle.put(self._number, mapped) if is_kept else [mapped]
            _close_all(surplus)

    def close(self) -> None:
        """All uses are over: let the engine see it, and map none of its rows any more, also while a disk hangs.

        Idempotent.
        """
        with self._lock:
            self._open.clear()
            for running in self._running.values():
                running.mapped.revoke()  # a write, too: one row that is mapped keeps all of the engine's memory taken
            if not self._is_closed:
                self._is_closed = True
                os.close(self._lifeline_fd)
                self._let_go_of_region()
        _idle.unmap(self._number)

    def _let_go_of_region(self) -> None:
        """With the lock: close the descriptor once the loan is over, and nobody maps a row of it."""
        if self._is_closed and not self._mapping and self._region_fd >= 0:
            os.close(self._region_fd)
            self._region_fd = -1
