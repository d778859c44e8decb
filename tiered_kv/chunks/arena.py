"""The host arena: slabs of shared memory that hold blobs, as memory views.

Owned by the server (or by an in-process cache), mapped by every worker. A slab is a memfd: it has no name, obeys no
/dev/shm limit, is passed over the Unix socket by SCM_RIGHTS, and is gone when the last process that mapped it is gone.
Knows nothing of slots' contents or states (``tiering/slots.py``) and nothing of torch.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Collection, Sequence

from tiered_kv.chunks.numa import interleaved
from tiered_kv.errors import CapacityExceeded, ConfigError
from tiered_kv.machine import forgotten_in_children

SLAB_BYTES = 1 << 30
"""Address range of a slab. Memory is given to a part of it when the slab is assigned, and to no more than that."""

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_POPULATE_READ, _POPULATE_WRITE = 22, 23  # Linux 5.14; older kernels refuse, and pages come with their first use

_LEFT_MAPPED: list[mmap.mmap] = []
"""Slabs that :meth:`Arena.close` had to leave: the GPU's driver still writes to their addresses' old pages."""

_LIMITS = {
    errno.EFBIG: "a file's size (ulimit -f), which holds for memory of this kind, too, to 1 GiB or more",
    errno.EMFILE: "open files (ulimit -n), of which each slab takes two",
    errno.ENOMEM: "the address space (ulimit -v)",
}
"""What a process lacks for its slabs, by the error that it meets."""

POPULATE_STEP_BYTES = 16 << 20
"""Mapped at once by :meth:`Arena.populate_some`: some milliseconds."""

CLEAR_STEP_BYTES = 1 << 20
"""Cleared and mapped at once by :meth:`Arena.allocate`: 0.3 ms of CPU, 6 where a hypervisor has to find the memory. No
thread of the process can map anything meanwhile, the one that answers lookups neither; and a thread that is taken off
its core in the middle keeps all of them waiting until it is back."""


def create_slabs(count: int) -> list[int]:
    """Make ``count`` empty slabs, sealed against resizing; returns their file descriptors.

    Raises:
        ConfigError: A limit of this process does not allow them; none is left then.
    """
    slabs: list[int] = []
    try:
        for index in range(count):
            slabs.append(os.memfd_create(f"tiered_kv-slab-{index}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
            os.ftruncate(slabs[-1], SLAB_BYTES)
            fcntl.fcntl(slabs[-1], fcntl.F_ADD_SEALS, _SEALS)
    except OSError as exc:
        while slabs:
            os.close(slabs.pop())
        if exc.errno not in _LIMITS:
            raise
        raise _limited(exc, count) from exc
    return slabs


def _limited(exc: OSError, slab_count: int) -> ConfigError:
    limit = _LIMITS.get(exc.errno or 0)
    advice = f"; raise the limit of {limit}" if limit else ""
    return ConfigError(f"cannot make the host arena{advice}. slabs={slab_count}: {exc}")


class Arena:
    """Slabs mapped into this process.

    Threads: ``view`` may be called from any thread; ``allocate`` by one thread per slab at a time; ``keep_pages`` by
    another at any time.
    """

    def __init__(self, slab_fds: Sequence[int]) -> None:
        """Map slabs, which are this object's from now on.

        Raises:
            ConfigError: One is not a slab, or a limit of this process does not allow it.
        """
        self.slab_fds = list(slab_fds)
        self._maps: list[mmap.mmap] = []
        try:
            for fd in self.slab_fds:
                _check_slab(fd)
                self._maps.append(mmap.mmap(fd, SLAB_BYTES, flags=mmap.MAP_SHARED))
        except ConfigError:
            self.close()
            raise
        except OSError as exc:
            self.close()
            raise _limited(exc, len(slab_fds)) from exc
        self._views = [memoryview(slab) for slab in self._maps]
        self._populated = [0] * len(self._maps)
        self._punching = threading.Lock()
        self._keeps_pages = False  # under _punching
        forgotten_in_children(self)

    def keep_pages(self, sizes: Sequence[int], *, is_kept: bool) -> None:
        """From now on no slab changes the pages that it has, or slabs may again.

        First whatever a slab has beyond its size is given back: what was taken from a slot size, and not used again.
        Call before a process that pins slabs maps them, and after its mapping is gone.

        Args:
            sizes: Bytes per slab that it is to have, as of :meth:`allocate`, also of one that runs.
        """
        with self._punching:
            self._keeps_pages = False
            try:
                for slab, size_bytes in enumerate(sizes):
                    self._give_back(slab, size_bytes)
            finally:
                self._keeps_pages = is_kept  # whatever was not given back: a hole below a registration is worse

    def _give_back(self, slab: int, size_bytes: int) -> None:
        """Take the memory behind ``size_bytes`` from a slab, unless its pages are kept; with ``_punching`` held."""
        if not self._keeps_pages and size_bytes < SLAB_BYTES:
            _punch_hole(self.slab_fds[slab], size_bytes, SLAB_BYTES - size_bytes)

    def allocate(self, slab: int, size_bytes: int) -> None:
        """Give the first ``size_bytes`` of a slab physical memory, and take it from the rest unless pages are kept.

        Raises:
            CapacityExceeded: The machine or the cgroup has not got the memory. The slab has none then, or what it kept.
        """
        try:
            with self._punching:
                self._give_back(slab, size_bytes)
            with interleaved():
                os.posix_fallocate(self.slab_fds[slab], 0, size_bytes)
                # Memory that was only promised is cleared page by page when it is first touched, ten times slower than
                # a copy: here, not while an engine waits for its first stores.
                for start in range(0, size_bytes, CLEAR_STEP_BYTES):
                    self._populate(slab, start, min(CLEAR_STEP_BYTES, size_bytes - start), _POPULATE_WRITE)
            # Once more: a worker that mapped a step of what was just taken brought it back.
            with self._punching:
                self._give_back(slab, size_bytes)
        except OSError as exc:
            with self._punching:
                self._give_back(slab, 0)
            if exc.errno in (errno.ENOMEM, errno.ENOSPC, errno.EINTR):
                raise CapacityExceeded(f"no memory for a slab of the host arena. size_bytes={size_bytes}") from exc
            raise

    def populate_some(self) -> bool:
        """Map a part of what :meth:`allocate` gave, here or in another process; says whether there may be more.

        What is not mapped yet costs a page fault per 4 KiB at its first use. Takes no memory.
        """
        for slab in range(len(self.slab_fds)):
            start, size_bytes = self._populated[slab], self.memory_bytes(slab)
            if start < size_bytes:
                # Asked anew for every step: memory that was taken from a slab meanwhile would come back by reading it.
                step = min(POPULATE_STEP_BYTES, size_bytes - start)
                self._populate(slab, start, step, _POPULATE_READ)
                self._populated[slab] = start + step
                return True
        return False

    def _populate(self, slab: int, start: int, size_bytes: int, advice: int) -> None:
        """Best effort, and without the GIL, which mmap.madvise would hold."""
        libc = ctypes.CDLL(None)
        with self._views[slab][start : start + size_bytes] as part:
            first = ctypes.c_char.from_buffer(part)
            libc.madvise(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size_bytes), ctypes.c_int(advice))
            del first  # it holds the view

    def memory_bytes(self, slab: int) -> int:
        """How much memory a slab has, given here or in another process; it begins with it."""
        return os.fstat(self.slab_fds[slab]).st_blocks * 512

    def address(self, slab: int) -> int:
        """Where a slab begins in this process."""
        first = ctypes.c_char.from_buffer(self._maps[slab])
        return ctypes.addressof(first)

    def view(self, slab: int, offset_bytes: int, size_bytes: int) -> memoryview:
        """The bytes of one slot, writable, without a copy."""
        return self._views[slab][offset_bytes : offset_bytes + size_bytes]

    def close(self, left_mapped: Collection[int] = ()) -> None:
        """Unmap the slabs and close their descriptors. Views handed out must be gone; idempotent.

        Args:
            left_mapped: Slabs whose addresses nothing else may get while this process lives.

        Raises:
            BufferError: One is not; that slab, and those before it, are unmapped by the next call.
        """
        for view in getattr(self, "_views", []):
            view.release()
        self._views = []
        while self._maps:
            slab = self._maps[-1]
            if len(self._maps) - 1 in left_mapped:
                _LEFT_MAPPED.append(slab)
            else:
                slab.close()
            self._maps.pop()  # not before: a slab that is still looked at is the next call's
        while self.slab_fds:
            os.close(self.slab_fds.pop())

    def forget_after_fork(self) -> None:
        """In a child of this process: have none of the memory, which would live as long as the child does."""
        for let_go in (*(view.release for view in self._views), *(slab.close for slab in self._maps)):
            with contextlib.suppress(BufferError):  # somebody's view, which goes with the child
                let_go()
        self._views, self._maps = [], []
        self.close()


def _check_slab(fd: int) -> None:
    """A file that its maker may cut shorter later would end every process that maps it with SIGBUS."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0  # no memfd
    size_bytes = os.fstat(fd).st_size
    if size_bytes != SLAB_BYTES or not seals & fcntl.F_SEAL_SHRINK:
        raise ConfigError(f"not a slab: size_bytes={size_bytes} expected={SLAB_BYTES} seals={seals:#x}")


def _punch_hole(fd: int, offset_bytes: int, size_bytes: int) -> None:
    """Give a range's memory back. Python has no fallocate(2) with a mode, so libc is called."""
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (ctypes.c_int(fd), ctypes.c_int(_PUNCH_HOLE), ctypes.c_int64(offset_bytes), ctypes.c_int64(size_bytes))
    if libc.fallocate(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
