"""The files by which a server is found and by which it owns its directory; all derived from the directory.

The server's identity is its locked directory: that of its disk tier, or without one a private directory for its URI.
``server.json`` in it names the owner, ``arena-<id>.lock`` is held by each process that maps that server's arena, and
the socket lies in a private directory with a short path.
"""

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from tiered_kv.config import Config
from tiered_kv.errors import ConfigError, TierUnavailable
from tiered_kv.tiers.disk.files import is_of_the_file, is_own_file, make_root, read_small_file, replace_small_file
from tiered_kv.tiers.disk.lock import ARENA_LOCK

logger = logging.getLogger(__name__)

SOCKET_PATH_MAX = 100
"""Unix socket paths end at 108 bytes; some room for the terminator and for other systems."""

INFO_BYTES_MAX = 64 << 10
LOOK_INTERVAL_S = 1.0
YOUNG_S = 6 * 3600.0
"""How often files that a server needs are given a new date: cleaners of /tmp take what nobody used for days."""

_KEPT_YOUNG = ("server.json", "server.lock", "tiered_kv.json", "epochs.json")
_NOT_OURS = "server.json in the cache directory is not what a cache server writes, so it stays: move it away"
_SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Of what the process or the machine lacks to look at a file."""


class ServerInfo(msgspec.Struct, frozen=True):
    """What ``server.json`` says."""

    socket: str
    pid: int
    version: str
    protocol: int
    server_id: str
    config_digest: str


class _AnyServerInfo(msgspec.Struct, frozen=True):
    """What ``server.json`` says in every version."""

    socket: str
    pid: int
    version: str


def server_directory(config: Config) -> Path:
    """The directory that a server of these settings owns, without symbolic links.

    One that is not a disk tier's is made here, and must belong to this user alone.

    Raises:
        ConfigError: No private directory can be had.
    """
    directory = config.server_directory()
    if config.disk_root() is None:
        _make_private(directory.parent, "XDG_STATE_HOME")
        _make_private(directory, "XDG_STATE_HOME")
    return Path(os.path.realpath(directory))


def info_path(root: Path) -> Path:
    return root / "server.json"


def log_path(root: Path) -> Path:
    return root / "server.log"


def read_info(root: Path) -> ServerInfo | None:
    """Who says to own the directory, or None when nobody does or the file cannot be read as such."""
    try:
        return msgspec.json.decode(read_small_file(info_path(root), INFO_BYTES_MAX), type=ServerInfo)
    except (OSError, ValueError, RecursionError):
        return None  # absent, unreadable, or of another version: a server that is started will say what is wrong


def refuse_foreign_info(root: Path) -> None:
    """Check that what is called ``server.json`` in our directory is ours to replace: nothing, or some server's.

    Raises:
        ConfigError: It is somebody else's; it stays as it is.
        TierUnavailable: It cannot be looked at.
    """
    path = info_path(root)
    try:
        data = read_small_file(path, INFO_BYTES_MAX)
    except FileNotFoundError:
        return
    except OSError as exc:
        if not is_of_the_file(exc):
            raise TierUnavailable(f"cannot look at who owns the directory. path={path}: {exc}") from exc
        raise ConfigError(f"{_NOT_OURS}. path={path}: {exc.strerror}") from exc
    if not data.strip(b"\0"):  # what a power failure leaves of it
        return
    try:
        msgspec.json.decode(data, type=_AnyServerInfo)
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"{_NOT_OURS}. path={path}: {exc!s:.100}") from exc


def write_info(root: Path, info: ServerInfo) -> None:
    """Publish who owns the directory; readers see the old or the new file.

    Raises:
        ConfigError: The name is taken by a file of somebody else.
    """
    refuse_foreign_info(root)
    replace_small_file(info_path(root), msgspec.json.encode(info))


def make_socket_directory(path: Path) -> None:
    """Make the private directory of the socket ``path``.

    Raises:
        ConfigError: It cannot be had.
    """
    _make_private(path.parent, "XDG_RUNTIME_DIR")


def socket_place(root: Path) -> Path:
    """The socket of a directory's server: a short path in a private directory, whatever the directory is called.

    Nothing is made.

    Raises:
        ConfigError: No directory for it can be written, or all have long paths.
    """
    name = f"tiered_kv-{os.getuid()}/{hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:16]}.sock"
    places = [os.environ.get("XDG_RUNTIME_DIR"), "/tmp"]
    with contextlib.suppress(FileNotFoundError):  # a container whose file system is read-only has none
        places.insert(1, tempfile.gettempdir())
    paths = [Path(place) / name for place in places if place]
    path = next(
        (p for p in paths if len(os.fsencode(p)) <= SOCKET_PATH_MAX and os.access(p.parent.parent, os.W_OK)), None
    )
    if path is None:
        raise ConfigError(f"no writable directory with a short path for the socket; set XDG_RUNTIME_DIR. tried={paths}")
    return path


def _make_private(directory: Path, variable: str) -> None:
    """Make a directory that only this user can look into; ``variable`` is what to set if that cannot be."""
    try:
        make_root(directory.parent)
        directory.mkdir(mode=0o700, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"cannot make the server's directory; set {variable}. path={directory}: {exc}") from exc
    check_private(directory, variable)


def check_private(directory: Path, variable: str) -> None:
    """Refuse a directory that others can look into.

    Raises:
        ConfigError: It is one, or cannot be looked at.
    """
    try:
        found = directory.lstat()
    except OSError as exc:
        raise ConfigError(f"cannot look at the server's directory; set {variable}. path={directory}: {exc}") from exc
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            "the server's directory must belong to this user alone (mode 0700). "
            f"path={directory} owner={found.st_uid} mode={stat.S_IMODE(found.st_mode):o}: "
            f"remove it or set {variable}"
        )


def hold_arena_lock(root: Path, server_id: str) -> int:
    """Note that this process maps the arena of ``server_id``; close the returned descriptor after unmapping.

    Raises:
        ConfigError: The directory cannot be written from here.
    """
    try:
        fd = os.open(_lock_path(root, server_id), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise ConfigError(f"cannot lock the arena in the server's directory: {exc}") from exc
    fcntl.flock(fd, fcntl.LOCK_SH)
    return fd


def release_stale_arena_locks(root: Path, own_id: str) -> int:
    """Remove the lock files of other servers that nobody holds; returns how many are held still, as far as one can see.

    Where a process has no descriptor or memory left to ask, they may be: memory that is mapped still must not be taken
    for free.
    """
    held = 0
    try:
        paths = list(root.glob("arena-*.lock"))
    except OSError as exc:
        if exc.errno not in _SHORT:
            raise
        return 1
    for path in paths:
        if path == _lock_path(root, own_id) or ARENA_LOCK.fullmatch(path.name) is None:
            continue
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:  # another server was quicker
            continue
        except OSError as exc:
            if exc.errno in _SHORT:
                held += 1
            else:
                logger.warning("not a lock file of ours, or it cannot be asked; left alone. path=%s: %s", path, exc)
            continue
        try:
            status = os.fstat(fd)
            if status.st_size or not is_own_file(status, (os.geteuid(),)):
                logger.warning("not a lock file of ours, left alone. path=%s owner=%d", path, status.st_uid)
                continue
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            logger.info("removed: the lock of an arena that nobody maps any more. path=%s", path)
        except BlockingIOError:
            held += 1
        finally:
            os.close(fd)
    return held


def keep_young(root: Path) -> None:
    """Give a new date to the files of a server that runs; most are written once and then only held open.

    Without a disk tier they often lie in /tmp: a server whose description is taken ends, one whose epochs are taken
    forgets resets, and without a lock an arena that is still mapped is taken for free.
    """
    paths = [root / name for name in _KEPT_YOUNG]
    with contextlib.suppress(OSError):  # no descriptor is left, or the medium does not answer: the next time
        paths += (path for path in root.glob("arena-*.lock") if ARENA_LOCK.fullmatch(path.name) is not None)
    for path in paths:
        with contextlib.suppress(OSError):  # it is not there, or nobody's to change
            os.utime(path, follow_symlinks=False)


def _lock_path(root: Path, server_id: str) -> Path:
    return root / f"arena-{server_id}.lock"


class DirectoryWatch:
    """The ``server.json`` of one server.

    Threads: one owner. It is looked at in the background, one look at a time: a file system that hangs must not hold
    up the server's loop.
    """

    def __init__(
        self, root: Path, info: ServerInfo, in_background: Callable[[Callable[[], None]], None],
        monotonic: Callable[[], float],
    ) -> None:  # fmt: skip
        """Publish who owns the directory."""
        write_info(root, info)
        self._path = info_path(root)
        self._in_background = in_background
        self._monotonic = monotonic
        self._file = self._identity()
        self._seen = self._file
        self._is_looking = False
        self._due_s = self._young_due_s = monotonic()
        self._is_lost = False

    def is_found(self) -> bool:
        """Whether the directory still named this server at the last look. Once it does not, that is final."""
        if not self._is_looking and self._monotonic() >= self._due_s:
            self._is_looking = True
            self._in_background(self.look)
        if not self._is_lost and self._seen != self._file:
            self._is_lost = True
            logger.error(
                "the directory of this server was removed or taken over, so it ends and its engines start another one. "
                "path=%s", self._path,
            )  # fmt: skip
        return not self._is_lost

    def look(self) -> None:
        """Look at the file; blocks for as long as the file system does."""
        try:
            self._seen = self._identity()
            if self._seen == self._file and self._monotonic() >= self._young_due_s:
                keep_young(self._path.parent)
                self._young_due_s = self._monotonic() + YOUNG_S
        finally:  # or nobody would look again
            self._due_s = self._monotonic() + LOOK_INTERVAL_S
            self._is_looking = False

    def _identity(self) -> tuple[int, int] | None:
        try:
            status = os.stat(self._path, follow_symlinks=False)
        except FileNotFoundError:
            return None
        except OSError:  # the medium does not answer: no reason to leave
            return self._file
        return status.st_dev, status.st_ino
