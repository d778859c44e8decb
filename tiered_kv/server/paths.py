"""Where a node's server is found: its lock, its socket, its description and its log, all derived from the directory.

The server's identity is its locked directory: that of its disk tier, or without one a private directory for its URI.
``server.json`` in it says who holds the lock.
"""

import errno
import hashlib
import os
import stat
import tempfile
from pathlib import Path

import msgspec

from tiered_kv.config import Config
from tiered_kv.errors import ConfigError, TierUnavailable
from tiered_kv.tiers.disk_io import make_root, read_small_file, replace_small_file

SOCKET_PATH_MAX = 100
"""Unix socket paths end at 108 bytes; some room for the terminator and for other systems."""

INFO_BYTES_MAX = 64 << 10


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


_NOT_OURS = "server.json in the cache directory is not what a cache server writes, so it stays: move it away"


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
        if exc.errno == errno.EIO:
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


def socket_path(root: Path) -> Path:
    """The socket of a directory's server: a short path in a private directory, whatever the directory is called.

    Raises:
        ConfigError: No private directory can be had.
    """
    path = socket_place(root)
    _make_private(path.parent, "XDG_RUNTIME_DIR")
    return path


def socket_place(root: Path) -> Path:
    """Where :func:`socket_path` puts the socket; nothing is made.

    Raises:
        ConfigError: No directory for it can be written, or all have long paths.
    """
    name = f"tiered_kv-{os.getuid()}/{hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:16]}.sock"
    places = [os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"]
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
