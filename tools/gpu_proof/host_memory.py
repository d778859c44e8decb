"""Host memory as the cache has it: a memfd, mapped and shared, that a GPU's driver may pin."""

import ctypes
import os
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tiered_kv.chunks.cuda import Cuda

MIB: Final = 1 << 20
GIB: Final = 1 << 30
HUGE_PAGE_BYTES: Final = 2 * MIB

_PROT_NONE, _PROT_READ_WRITE = 0, 3
_MAP_SHARED_FIXED, _MAP_PRIVATE_ANONYMOUS = 0x11, 0x22
_POPULATE_WRITE, _COLLAPSE = 23, 25
_PUNCH_HOLE = 0x03

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class HostMemory:
    """A range of shared memory, mapped at a multiple of 2 MiB.

    Attributes:
        bytes: The range; not to be used after ``close``.
        is_huge: Whether its pages could be made huge ones, where that was asked for.
    """

    def __init__(self, size: int, *, fd: int | None = None, is_populated: bool = True, huge: bool = False) -> None:
        """Map it.

        Args:
            fd: Of a memfd that another mapping made; it is this object's from now on. None: a new one.
            is_populated: Its pages are there before anything uses them.
            huge: Ask for huge pages.

        Raises:
            OSError: There is not enough memory or address space.
        """
        self.size: Final = size
        self.fd: Final = os.memfd_create("tiered_kv-proof", os.MFD_CLOEXEC) if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, size)
        self.address = _map_aligned(self.fd, size)
        self._cuda: Cuda | None = None
        self._registered: list[int] = []
        self.populate_s = timed(lambda: self._advise(_POPULATE_WRITE)) if is_populated else 0.0
        self.is_huge = huge and self._advise(_COLLAPSE) == 0
        self._buffer = memoryview((ctypes.c_uint8 * size).from_address(self.address)).cast("B")
        self.bytes: npt.NDArray[np.uint8] | None = np.frombuffer(self._buffer, dtype=np.uint8)

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The bytes of memory that is not closed."""
        assert self.bytes is not None
        return self.bytes

    def view(self, start: int, size: int) -> memoryview:
        """A part of the bytes, as the cache hands a slot out."""
        assert self.bytes is not None
        return self._buffer[start : start + size]

    def register(self, cuda: Cuda, *, window_bytes: int = 0) -> float:
        """Pin it; the seconds it took.

        Args:
            window_bytes: Each part between two multiples of this address by a call of its own; 0: all by one.
        """
        self._cuda = cuda
        started_s = time.perf_counter()
        for address, size in self.windows(window_bytes):
            cuda.register(address, size)
            self._registered.append(address)
        return time.perf_counter() - started_s

    def windows(self, window_bytes: int) -> list[tuple[int, int]]:
        """Address and size of each part that lies between two multiples of ``window_bytes``."""
        parts, at, end = [], self.address, self.address + self.size
        while at < end:
            stop = min(end, (at // window_bytes + 1) * window_bytes) if window_bytes else end
            parts.append((at, stop - at))
            at = stop
        return parts

    def unregister(self) -> float:
        """End that; the seconds it took."""
        assert self._cuda is not None
        started_s = time.perf_counter()
        while self._registered:
            self._cuda.unregister(self._registered.pop())
        return time.perf_counter() - started_s

    def punch(self, start: int, size: int) -> None:
        """Give pages back: the next use gets new ones, which are zero."""
        if _libc.fallocate(self.fd, _PUNCH_HOLE, start, size) != 0:
            raise OSError(ctypes.get_errno(), "no hole could be punched")

    def close(self) -> None:
        """Unregister, unmap and forget it."""
        if self.bytes is None:
            return
        if self._registered:
            self.unregister()
        self.bytes = None
        _libc.munmap(self.address, self.size)
        os.close(self.fd)

    def _advise(self, advice: int) -> int:
        return int(_libc.madvise(self.address, self.size, advice))


def _map_aligned(fd: int, size: int) -> int:
    base = _libc.mmap(None, size + HUGE_PAGE_BYTES, _PROT_NONE, _MAP_PRIVATE_ANONYMOUS, -1, 0)
    if base in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), f"no address space. size={size}")
    address = (base + HUGE_PAGE_BYTES - 1) & -HUGE_PAGE_BYTES
    if _libc.mmap(address, size, _PROT_READ_WRITE, _MAP_SHARED_FIXED, fd, 0) != address:
        raise OSError(ctypes.get_errno(), f"the memory cannot be mapped. size={size}")
    return int(address)


def timed(action: Callable[[], Any]) -> float:
    """Run it; the seconds it took."""
    started_s = time.perf_counter()
    action()
    return time.perf_counter() - started_s
