"""Whose a directory is: the marker by which a cache knows its own directory, and what is refused without one.

Owns ``tiered_kv.json``, the first file that is written into a directory of ours::

    {"package": "tiered_kv", "content": "cache directory", "version": 1}

Nothing is created, changed or removed in a directory that is neither empty nor marked; with a marker, a file is removed
at open only if its name, its place and its owner are ours, too (``sweep.py``, ``scan.py``). A directory of an
earlier version has no marker and is recognised by what only this package writes: a blob, a namespace's record, or,
where it holds neither, a lock file beside nothing but files of ours.

Called before the lock is taken, by everybody who may be the first to write: ``tier.py``, the server for its log and its
private directory, the command line. Several may do so at once: a marker is published whole under a name that is free,
all write the same, and who finds the directory changed meanwhile looks again.
"""

import contextlib
import enum
import errno
import json
import logging
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

from tiered_kv.errors import ChunkCorrupt, ChunkMismatch, ConfigError
from tiered_kv.keys.namespace import Namespace
from tiered_kv.keys.naming import NAME_BYTES, parse_path
from tiered_kv.tiers.disk.files import is_of_the_file, mapped_errors, read_small_file, write_new_file
from tiered_kv.tiers.disk.lock import ARENA_LOCK, LOCK_FILE
from tiered_kv.tiers.disk.scan import NAMESPACE_FILE, RECORD_BYTES_MAX, read_named_header
from tiered_kv.tiers.disk.sweep import SMALL_TEMP_NAME, TEMP_NAME

logger = logging.getLogger(__name__)

MARKER_FILE: Final = "tiered_kv.json"
VERSION: Final = 1
CONTENT: Final = b'{"package": "tiered_kv", "content": "cache directory", "version": 1}\n'
BYTES_MAX: Final = 4096

FRESH_FILE_SYSTEM: Final = "lost+found"
LOOKS_MAX: Final = 3
"""How often a directory that changes under the look is looked at again."""

BLOBS_LOOKED_AT: Final = 64
FOUND_SHOWN: Final = 3

_SCRATCH_NAME = re.compile(r"doctor-[a-z0-9_]{8}")
_FILES = re.compile(
    r"server\.(lock|json|log|log\.1)|pins\.(json|lock)|epochs\.(json|tmp)|epochs\.damaged-[0-9a-f]{8}\.(json|tmp)"
    rf"|{ARENA_LOCK.pattern}"
)
_DIRECTORIES = re.compile(r"blobs|tmp|index(\.damaged-\d+)?")
_DIGEST_NAME = re.compile(rf"[0-9a-f]{{{2 * NAME_BYTES}}}")


class Standing(enum.Enum):
    """What a directory is to us."""

    OURS = "ours"
    EMPTY = "empty"
    EARLIER = "earlier"
    FOREIGN = "foreign"


@dataclass(frozen=True, slots=True)
class Directory:
    """What was seen of a directory.

    Attributes:
        reason: Why it is not ours, and what to do: a sentence. Empty for every other standing.
        owner: User id of the marker; -1 where there is none.
        is_half_written: There is a marker that says nothing, as a power failure may leave one.
    """

    standing: Standing
    reason: str = ""
    owner: int = -1
    is_half_written: bool = False


def look_at(root: Path, *, is_private: bool = False) -> Directory:
    """Say what the directory is to us. Changes nothing; one that is not there is empty.

    Args:
        is_private: Its place is ours already (a server's directory for a bucket), so an earlier version's is known by
            the names of its files alone.

    Raises:
        OSError: It cannot be listed, or what is in it cannot be read for a reason that may pass.
    """
    seen = _look_once(root, is_private=is_private)
    if seen.standing is Standing.FOREIGN and os.path.lexists(root / MARKER_FILE):
        # Another process may have marked the directory, and begun to fill it, while it was listed.
        seen = _look_once(root, is_private=is_private)
    return seen


def require_ours(root: Path) -> None:
    """Refuse a directory that is not ours, without touching it; an empty one is fine.

    Raises:
        ConfigError: It is somebody else's; the message says what to do.
        TierUnavailable: It cannot be looked at.
    """
    with mapped_errors("open", root):
        seen = look_at(root)
    if seen.standing is Standing.FOREIGN:
        raise ConfigError(seen.reason)


def claim(root: Path, *, is_private: bool = False) -> frozenset[int]:
    """Make sure that the directory, which must exist, is marked as ours; returns the owners of what is ours in it.

    Raises:
        ConfigError: It is somebody else's, and nothing in it was touched; the message says what to do.
        OSError: It cannot be looked at or marked.
    """
    for _ in range(LOOKS_MAX):
        seen = look_at(root, is_private=is_private)
        if seen.standing is Standing.FOREIGN:
            raise ConfigError(seen.reason)
        if seen.standing is Standing.OURS:
            # Not this process's alone: root may tidy up in the directory of a user, and a mount may map users.
            return frozenset((seen.owner, os.geteuid()))
        _mark(root, replace=seen.is_half_written)
        if seen.standing is Standing.EARLIER:
            logger.info("a cache directory of an earlier version is marked as ours. path=%s file=%s", root, MARKER_FILE)
    raise OSError(errno.EAGAIN, "the directory changes while it is looked at", str(root))


# -- looking ----------------------------------------------------------------------------------------------------------


def _look_once(root: Path, *, is_private: bool) -> Directory:
    try:
        names = sorted(os.listdir(root))
    except FileNotFoundError:
        return Directory(Standing.EMPTY)
    marker = _read_marker(root) if MARKER_FILE in names else None
    if marker is not None and not marker.is_half_written:
        return marker
    content = [name for name in names if name != MARKER_FILE and not _is_nothing(root, name)]
    is_half_written = marker is not None
    if not content:
        return Directory(Standing.EMPTY, is_half_written=is_half_written)
    if _holds_a_record(root) or _holds_a_blob(root) or _holds_only_own(root, content, is_private=is_private):
        return Directory(Standing.EARLIER, is_half_written=is_half_written)
    shown = ", ".join(ascii(name[:40])[1:-1] for name in content[:FOUND_SHOWN])
    more = f" and {len(content) - FOUND_SHOWN} more" if len(content) > FOUND_SHOWN else ""
    has = f"its {MARKER_FILE} says nothing" if is_half_written else f"has no {MARKER_FILE}"
    return Directory(
        Standing.FOREIGN,
        f"the directory is not empty and {has}, so what is in it ({shown}{more}) may be somebody else's and nothing "
        f"was touched: name a new or an empty directory, for instance one below it. path={root}",
    )


def _read_marker(root: Path) -> Directory | None:
    """What the marker says; None: it went meanwhile."""
    path = root / MARKER_FILE
    try:
        status = os.lstat(path)
        data = read_small_file(path, BYTES_MAX)
    except FileNotFoundError:
        return None
    except OSError as exc:
        if not is_of_the_file(exc):
            raise
        hint = "run as the user whose it is, or name another directory"
        return _refused(path, f"it cannot be read ({exc.strerror}): {hint}")
    if CONTENT.startswith(data) or not data.strip(b"\0"):
        if data != CONTENT:  # ours was being written when the power went
            return Directory(Standing.EMPTY, is_half_written=True)
        return Directory(Standing.OURS, owner=status.st_uid)
    try:
        said = json.loads(data)
        package, version = said["package"], said["version"]
    except (ValueError, KeyError, TypeError, RecursionError):
        package, version = None, None
    if package != "tiered_kv" or not isinstance(version, int) or isinstance(version, bool) or version < 1:
        return _refused(path, "it is not what this package writes: name a new or an empty directory")
    if version > VERSION:
        return _refused(path, f"it is of version {version}, newer than {VERSION}: use a newer tiered_kv, or a new one")
    return Directory(Standing.OURS, owner=status.st_uid)


def _refused(marker: Path, what: str) -> Directory:
    reason = f"the marker of the directory is not one of ours, so nothing was touched: {what}. path={marker}"
    return Directory(Standing.FOREIGN, reason)


def _is_nothing(root: Path, name: str) -> bool:
    """What does not count as content: what a fresh file system has, and what is there for a moment before a marker."""
    if name == FRESH_FILE_SYSTEM or _SCRATCH_NAME.fullmatch(name):
        return _kind(root / name) == stat.S_IFDIR
    if ARENA_LOCK.fullmatch(name):  # of an engine whose server's directory was emptied
        return _is_empty_file(root / name)
    return name.startswith(f"{MARKER_FILE}.") and SMALL_TEMP_NAME.fullmatch(name) is not None


def _kind(path: Path) -> int | None:
    try:
        return stat.S_IFMT(os.lstat(path).st_mode)
    except FileNotFoundError:
        return None


# -- directories of earlier versions ----------------------------------------------------------------------------------


def _spaces(root: Path) -> Iterator[Path]:
    """Directories below ``blobs`` that are called as a namespace is."""
    if _kind(root / "blobs") == stat.S_IFDIR:
        for name in sorted(os.listdir(root / "blobs")):
            path = root / "blobs" / name
            if _DIGEST_NAME.fullmatch(name) and _kind(path) == stat.S_IFDIR:
                yield path


def _holds_a_record(root: Path) -> bool:
    """Whether a namespace's record lies where its own digest says."""
    for space in _spaces(root):
        with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):  # ConfigError is a ValueError
            namespace, _ = Namespace.from_described(read_small_file(space / NAMESPACE_FILE, RECORD_BYTES_MAX))
            if namespace.digest.hex() == space.name:
                return True
    return False


def _holds_a_blob(root: Path) -> bool:
    """Whether one of some files with a blob's name is a blob, of whatever version."""
    for path in islice(_files_of_blobs(root), BLOBS_LOOKED_AT):
        name = parse_path(str(path.relative_to(root / "blobs")))
        if name is None or _kind(path) != stat.S_IFREG:
            continue
        with contextlib.suppress(ChunkCorrupt, OSError):
            try:
                read_named_header(name, path)
            except ChunkMismatch:
                return True  # its header's own hash is right
            return True
    return False


def _files_of_blobs(root: Path) -> Iterator[Path]:
    for space in _spaces(root):
        for fan_out in sorted(os.listdir(space)):
            if re.fullmatch("[0-9a-f]{2}", fan_out) and _kind(space / fan_out) == stat.S_IFDIR:
                yield from (space / fan_out / name for name in sorted(os.listdir(space / fan_out)))


def _holds_only_own(root: Path, content: list[str], *, is_private: bool) -> bool:
    """Whether this is a directory of ours without a blob: our lock, and nothing beside it that is not ours by name."""
    if not is_private and not (_is_empty_file(root / LOCK_FILE) and "blobs" in content):
        return False
    return all(_has_own_name(root, name) for name in content) and all(
        _kind(path) == stat.S_IFDIR or (pattern.fullmatch(path.name) and _kind(path) == stat.S_IFREG)
        for place, pattern in (("tmp", TEMP_NAME), ("blobs", re.compile(NAMESPACE_FILE.replace(".", r"\."))))
        if place in content
        for path in (root / place).rglob("*")
    )


def _has_own_name(root: Path, name: str) -> bool:
    kind = _kind(root / name)
    if kind == stat.S_IFDIR:
        return _DIRECTORIES.fullmatch(name) is not None
    return kind == stat.S_IFREG and (_FILES.fullmatch(name) or SMALL_TEMP_NAME.fullmatch(name)) is not None


def _is_empty_file(path: Path) -> bool:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size == 0


# -- marking ----------------------------------------------------------------------------------------------------------


def _mark(root: Path, *, replace: bool) -> None:
    """Publish the marker, lasting, under its name: unless that is taken, or in place of one that says nothing."""
    place = root / MARKER_FILE
    temp = root / f"{MARKER_FILE}.{os.getpid()}-{secrets.token_hex(4)}"
    try:
        write_new_file(temp, CONTENT, is_lasting=True, like=_owner_of(root))
        if replace:
            os.replace(temp, place)
        else:
            _publish(temp, place)
    finally:
        temp.unlink(missing_ok=True)
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _publish(temp: Path, place: Path, link: Callable[[Path, Path], None] = os.link) -> None:
    try:
        link(temp, place)
    except FileExistsError:
        return  # another process was quicker; whose it is will be looked at
    except OSError as exc:
        if exc.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        # A file system without a second name for a file: all that may be replaced here is the same marker.
        if not os.path.lexists(place):
            os.replace(temp, place)


def _owner_of(root: Path) -> os.stat_result | None:
    """Whose the marker shall be, where root marks the directory of a user: else that user could not read it."""
    return os.stat(root) if os.geteuid() == 0 else None
