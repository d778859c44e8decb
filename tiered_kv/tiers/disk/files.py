"""System calls of the disk tier: write one file, read one file, and what their errors mean.

Owns the choice between O_DIRECT and the page cache and the mapping of ``OSError`` to the error tree. Must not know
names, capacity or recency. Called by ``tier.py``; the small files beside the blobs are read and written through it by
whoever owns them. Nothing here follows a symbolic link at the end of a path, waits for a FIFO, or reads without bound:
others may be able to write into the directory (docs/security.md).

Writes go around the page cache where the file system allows it. Reads of a local disk do, too, unless the file is in
it or comes back (``tier.py``): they read into a thread's *staging memory*, whose huge page lets the device move half a
MiB at a time, and copy from there. Why, with figures: docs/decisions/0003.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import shlex
import stat
import threading
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from tiered_kv.chunks.geometry import ALIGNMENT_BYTES, align_up
from tiered_kv.errors import CapacityExceeded, ChunkCorrupt, TierBusy, TierUnavailable

READ_PIECE_BYTES = 512 << 10
"""Bytes of one read. Files are read by pieces that stay in a core's cache until they are hashed, and so small that the
kernel's read-ahead works on the next one meanwhile: a verified read takes less than a plain read of the whole file in
one call, which the kernel serves request by request (benchmarks/verification.py; docs/decisions/0014). Reads around the
page cache have pieces of the same size, of all that were tried the fastest."""

READ_LAST_BYTES = READ_PIECE_BYTES * 5 // 2
"""Around the page cache the last piece, or the only one, is up to so long: each waits for the disk, and then for the
interpreter's lock."""

_HUGE_PAGE_BYTES = 2 << 20
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_CACHESTAT = 451
"""The number of this system call on every architecture; Linux 6.5 and later have it."""

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700

_OF_A_FILE = frozenset({errno.EACCES, errno.EPERM, errno.ELOOP, errno.EINVAL, errno.EFBIG, errno.EISDIR, errno.ENXIO})
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_REFUSED_READ_ONLY = {"put": CapacityExceeded, "describe": CapacityExceeded, "delete": TierBusy}
"""By a file system that was remounted so. No breaker counts these: what is there can still be read."""

_CREATE = os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class mapped_errors:  # noqa: N801 - a context, named as those of contextlib
    """Turn what the operating system raises into the error tree, naming operation, path and errno.

    No generator: around each read of a small blob that would take as long as a system call.

    Raises:
        CapacityExceeded: The file system, a quota or a file size limit is reached; a write to a read-only file system.
        TierBusy: A deletion there.
        TierUnavailable: Anything else went wrong.
    """

    __slots__ = ("_operation", "_path")

    def __init__(self, operation: str, path: Path | str) -> None:
        self._operation = operation
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, exc: BaseException | None, _traceback: object) -> None:
        if not isinstance(exc, OSError) or isinstance(exc, TierUnavailable):  # an OSError, too; mapped already
            return
        said = f"operation={self._operation} errno={errno.errorcode.get(exc.errno or 0, exc.errno)} path={self._path}"
        if exc.errno in _NO_ROOM:
            raise CapacityExceeded(f"no room on the file system. {said}") from exc
        if exc.errno == errno.EROFS and self._operation in _REFUSED_READ_ONLY:
            raise _REFUSED_READ_ONLY[self._operation](f"the file system is read-only. {said}") from exc
        raise TierUnavailable(f"disk operation failed: {exc.strerror or exc}. {said}") from exc


def is_of_the_file(exc: OSError) -> bool:
    """Whether an error tells what a file is or whose: it stays. Others, of the medium or the machine, may pass."""
    return exc.errno in _OF_A_FILE


def make_root(path: Path) -> None:
    """Create a directory and its missing parents, each for the owner only, whatever the umask is.

    Raises:
        OSError: That cannot be, or there is a file in its place.
    """
    try:
        for directory in reversed([path, *path.parents]):
            if not directory.exists():
                with contextlib.suppress(FileExistsError):  # another process was quicker
                    directory.mkdir(DIRECTORY_MODE)
    except PermissionError as exc:
        if exc.errno != errno.EACCES:  # EPERM is the file system's, whoever asks
            raise
        command = f"install -d -m 0700 -o USER {shlex.quote(str(path))}"
        said = f"this user may not make it: as root, {command}, where USER may enter what is above it"
        raise PermissionError(exc.errno, said, str(path)) from exc
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "a file stands in its place", str(path))


def make_directories(path: Path, below: Path) -> None:
    """Create ``path`` and its missing parents down from ``below``, each for the owner only.

    Raises:
        NotADirectoryError: One of them is a symbolic link, or a file.
    """
    for directory in reversed([path, *path.parents]):
        if not directory.is_relative_to(below):
            continue
        if not os.path.lexists(directory):
            with contextlib.suppress(FileExistsError):  # another thread was quicker
                directory.mkdir(DIRECTORY_MODE)
        refuse_links(directory, below)


def refuse_links(path: Path | str, below: Path | str) -> None:
    """Check that every directory from ``path`` up to ``below`` is one, and no link to a place that is not ours.

    Raises:
        NotADirectoryError: One is a symbolic link, or a file.
    """
    directory, end = os.fspath(path), os.fspath(below)  # text: a put makes no ``Path``, which takes longer than a look
    while directory != end:
        if not stat.S_ISDIR(os.lstat(directory).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "a symbolic link or a file stands in its place", directory)
        directory = directory[: max(directory.rindex("/"), 1)]


def writable_by_others(directories: Iterable[Path]) -> list[str]:
    """Those of the directories that are there into which another user may write, as a log line shows them."""
    found = []
    for directory in directories:
        with contextlib.suppress(FileNotFoundError):
            status = os.lstat(directory)
            if status.st_mode & 0o022 or status.st_uid != os.geteuid():
                found.append(f"{directory} owner={status.st_uid} mode={stat.S_IMODE(status.st_mode):04o}")
    return found


def supports_direct_io(directory: Path) -> bool:
    """Whether a file in ``directory`` really can be written and read back with O_DIRECT.

    Asking by doing: tmpfs, overlay and network file systems differ by kernel, and some accept the flag at open and
    refuse the write. Where there is no room to ask, a file that opens so is enough: a write that is refused goes
    through the page cache by itself, and the answer counts for as long as the directory is open.
    """
    path = directory / f"probe-{os.getpid()}-{secrets.token_hex(4)}"
    page = mmap.mmap(-1, ALIGNMENT_BYTES)
    page.write(b"\xa5" * ALIGNMENT_BYTES)
    try:
        descriptor = os.open(path, os.O_RDWR | _CREATE | os.O_DIRECT, FILE_MODE)
        try:
            wrote = os.pwrite(descriptor, page, 0)
            return wrote == ALIGNMENT_BYTES and os.preadv(descriptor, [page], 0) == ALIGNMENT_BYTES
        finally:
            os.close(descriptor)
    except OSError as exc:
        if exc.errno in _NO_ROOM:
            return _opens_around(directory.parent)
        if exc.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        raise
    finally:
        page.close()
        # Some file systems make the file before they refuse the flag: the name, eight random digits, is ours alone.
        path.unlink(missing_ok=True)


def _opens_around(directory: Path) -> bool:
    """Whether the files that are there can be opened around the page cache; False where there is none."""
    with os.scandir(directory) as entries:
        there = [entry.path for entry in entries if entry.is_file(follow_symlinks=False)]
    descriptor = _open_around(there[0]) if there else None
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is not None


def is_aligned(view: memoryview) -> bool:
    """Whether O_DIRECT can take this buffer: address and length are multiples of ``ALIGNMENT_BYTES``."""
    if view.readonly or not view.nbytes or view.nbytes % ALIGNMENT_BYTES:
        return False  # ctypes tells no address of a read-only buffer; arena slots are writable
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) % ALIGNMENT_BYTES == 0


def create_file(path: Path | str, *, direct: bool) -> int:
    """A descriptor of a new file, to write; with ``direct`` past the page cache.

    Raises:
        FileExistsError: Something has that name.
    """
    return os.open(path, os.O_WRONLY | _CREATE | (os.O_DIRECT if direct else 0), FILE_MODE)


def write_file(descriptor: int, path: Path | str, blob: memoryview, *, direct: bool) -> int:
    """Fill the new file ``path`` with the bytes of ``blob``, close it and return the bytes allocated for it.

    No fsync: this is a cache. After a power failure a renamed file may hold anything, and the checksums in its
    header find out; an fsync per blob would cost up to half of the throughput for nothing.
    """
    try:
        _write_all(descriptor, blob.cast("B"), direct)
        allocated = allocated_bytes(os.fstat(descriptor))
    finally:
        os.close(descriptor)
    if allocated <= align_up(blob.nbytes):
        return allocated
    # Before the close some file systems count space they preallocated and give back.
    return allocated_bytes(os.stat(path, follow_symlinks=False))


def _write_all(descriptor: int, blob: memoryview, direct: bool) -> None:
    offset = 0
    while offset < len(blob):
        try:
            offset += os.pwrite(descriptor, blob[offset:], offset)
        except OSError as exc:
            if exc.errno != errno.EINVAL or not direct:
                raise
            # A file size limit or a nearly full disk can cut a write off the alignment. Going on through the page
            # cache either works or yields the errno that says what is wrong.
            direct = False
            _go_through(descriptor)


def open_to_read(path: Path | str) -> int:
    """A descriptor of a blob's file, or of what has its name: no link is followed, and a FIFO does not block."""
    return os.open(path, _READ)


def read_file(path: Path | str, buffer: memoryview, on_piece: Callable[[int], None], *, direct: bool = False) -> bool:
    """Fill ``buffer`` from the file, piece by piece; False when there is none.

    Args:
        on_piece: Called with the bytes read so far, after each piece.
        direct: Read around the page cache, if the file is not in it and both it and ``buffer`` can be. The device
            writes into memory of this thread, and the bytes get to ``buffer`` by address, as those of a plain read do.

    Raises:
        ChunkCorrupt: The file's size is not the buffer's.
    """
    staging = _staging.memory() if direct and not buffer.nbytes % ALIGNMENT_BYTES and not buffer.readonly else None
    try:
        descriptor = None if staging is None else _open_around(path)
        if descriptor is None:
            descriptor, staging = open_to_read(path), None
    except FileNotFoundError:
        return False
    try:
        found = os.fstat(descriptor).st_size
        if found != buffer.nbytes:
            raise ChunkCorrupt(f"blob has the wrong size. path={path} observed={found} expected={buffer.nbytes}")
        if staging is not None and is_cached(descriptor, found):
            _go_through(descriptor)
            staging = None
        _read_all(descriptor, buffer.cast("B"), path, on_piece, staging)
    finally:
        os.close(descriptor)
    return True


def _open_around(path: Path | str) -> int | None:
    """As :func:`open_to_read`, around the page cache; None where its file system, which is not the probe's, refuses."""
    try:
        return os.open(path, _READ | os.O_DIRECT)
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
        return None


def _go_through(descriptor: int) -> None:
    """Have reads and writes of a file go through the page cache."""
    fcntl.fcntl(descriptor, fcntl.F_SETFL, 0)  # of what it sets, none of our files has anything else that matters


def _read_all(
    descriptor: int, buffer: memoryview, path: Path | str, on_piece: Callable[[int], None], staging: memoryview | None
) -> None:
    target = ctypes.addressof(ctypes.c_char.from_buffer(buffer)) if staging else 0
    source = ctypes.addressof(ctypes.c_char.from_buffer(staging)) if staging else 0
    offset = 0
    while offset < len(buffer):
        rest = len(buffer) - offset
        piece = rest if staging and rest <= READ_LAST_BYTES else min(READ_PIECE_BYTES, rest)
        into = staging[:piece] if staging else buffer[offset : offset + piece]
        try:
            count = os.preadv(descriptor, [into], offset)
        except OSError as exc:
            if exc.errno != errno.EINVAL or staging is None:
                raise
            _go_through(descriptor)  # as a write does: it either works or yields the errno that says what is wrong
            staging = None
            continue
        if count == 0:
            raise ChunkCorrupt(f"blob was cut while it was read. path={path} observed={offset} expected={len(buffer)}")
        if staging:
            ctypes.memmove(target + offset, source, count)  # without the GIL, which a slice's assignment holds
        offset += count
        on_piece(offset)


class _Staging(threading.local):
    """A thread's memory for reads around the page cache: one huge page."""

    _memory: memoryview | None = None

    def memory(self) -> memoryview | None:
        """``READ_LAST_BYTES``, aligned; the same for all reads of this thread. None: there is none to be had now."""
        if self._memory is None:
            try:
                mapped = mmap.mmap(-1, 2 * _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                begin = -ctypes.addressof(ctypes.c_char.from_buffer(mapped)) % _HUGE_PAGE_BYTES
                mapped.madvise(mmap.MADV_HUGEPAGE, begin, _HUGE_PAGE_BYTES)
            except OSError:  # of memory or of mappings; the page cache needs neither, and the disk is well
                return None
            self._memory = memoryview(mapped)[begin : begin + READ_LAST_BYTES]
        return self._memory


_staging = _Staging()


def has_huge_pages() -> bool:
    """Whether this machine gives a process huge pages that asks for them.

    Without them staging memory is scattered pages of 4 KiB, and many devices take a request for few of them: a virtio
    disk read 1.2 GB/s into such memory, 3.0 into a huge page, and 2.1 through the page cache.
    """
    try:
        return "[never]" not in _HUGE_PAGES.read_text()
    except OSError:  # a kernel without them
        return False


class _CacheRange(ctypes.Structure):
    _fields_ = (("begin", ctypes.c_uint64), ("size_bytes", ctypes.c_uint64))


class _CacheStat(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "evicted_lately"))


# It asks the kernel's memory only: that takes a microsecond, and to get the interpreter's lock back much longer.
_syscall = ctypes.PyDLL(None).syscall
_syscall.argtypes = ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint


def is_cached(descriptor: int, size_bytes: int) -> bool:
    """Whether all of a file is in the page cache; False where the kernel cannot tell (before Linux 6.5)."""
    found = _CacheStat()
    if _syscall(_CACHESTAT, descriptor, ctypes.byref(_CacheRange(0, size_bytes)), ctypes.byref(found), 0):
        return False
    return bool(found.cached * mmap.PAGESIZE >= size_bytes)


def replace_small_file(path: Path, content: bytes, *, is_lasting: bool = False, temp_in: Path | None = None) -> None:
    """Publish a small file under ``path`` by writing another one and renaming it.

    What stands under ``path`` is replaced, whatever it is: whoever calls knows that it is ours.

    Args:
        is_lasting: It must survive a power failure once it is there; fsync, then.
        temp_in: Where to write it meanwhile; None: beside it. Its name has eight random digits, so that it is taken
            by nobody else's file and can be told from one (``sweep.py``).
    """
    temp = (temp_in or path.parent) / f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}"
    write_new_file(temp, content, is_lasting=is_lasting)
    try:
        os.replace(temp, path)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise


def write_new_file(path: Path, content: bytes, *, is_lasting: bool = False, like: os.stat_result | None = None) -> None:
    """Create a small file, of which nothing is left behind when that fails.

    Args:
        is_lasting: Its bytes must survive a power failure; fsync, then.
        like: Give it to the owner and the group of this.

    Raises:
        OSError: The name is taken, or the file cannot be written.
    """
    descriptor = os.open(path, os.O_WRONLY | _CREATE, FILE_MODE)
    try:
        if like is not None:
            os.fchown(descriptor, like.st_uid, like.st_gid)
        _write_all(descriptor, memoryview(content), direct=False)
        if is_lasting:
            os.fsync(descriptor)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def is_own_file(status: os.stat_result, owners: Collection[int]) -> bool:
    """Whether this is a plain file of one of these users: we make no other. It may have a second name, as in a backup
    of hard links, which loses nothing by the removal of this one."""
    return stat.S_ISREG(status.st_mode) and status.st_uid in owners


def read_head(path: Path | str, length: int) -> bytes:
    """The first ``length`` bytes of a file, fewer when it is shorter."""
    descriptor = open_to_read(path)
    try:
        return os.pread(descriptor, length, 0)
    finally:
        os.close(descriptor)


def read_small_file(path: Path, bytes_max: int) -> bytes:
    """All of a small file.

    Raises:
        OSError: There is none, it is no regular file, or it is larger than ``bytes_max`` (EFBIG).
    """
    descriptor = open_to_read(path)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if status.st_size > bytes_max:
            raise OSError(errno.EFBIG, f"larger than {bytes_max} bytes", str(path))
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(bytes_max)
    finally:
        os.close(descriptor)


def allocated_bytes(status: os.stat_result) -> int:
    """What a file takes from the disk, which is not its length: ``st_blocks`` counts 512-byte units everywhere."""
    return status.st_blocks * 512


def free_bytes(directory: Path) -> int:
    """Bytes an unprivileged writer can still allocate on the file system of ``directory``."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize
