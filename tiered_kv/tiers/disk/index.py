"""What a disk directory remembers across restarts: size, ancestry and last use of every blob, kept in diskcache.

Owns ``<root>/index``. Must hold nothing that the blobs cannot give back (except recency), must never be on the data
path and never pickles: a value is bytes in our own format with a checksum. Called by ``tier.py``, at start and on
``flush``.

One database row per fan-out directory, not per blob: a start reads 256 values per namespace instead of every blob's
own row, and a flush writes only the directories that changed (figures: docs/decisions/0002-disk-index.md). A value::

    0   4    magic "TKX4"
    4   8    xxh3_64 of the rest with seed 4, little-endian
    12  4    how many lines: who stored blobs here (``keys/stored_by.py``), each once
    16       one line: length u8 | that many bytes of ASCII; then the next line ...
        108  one blob: key 16 | parent 16 | prefix_sha256 32 | chunk_index u32 | size u64 | tag 16 | number of its line
             u32, from 0 | use_seq u64 | used_s u32
        108  the next blob ...

"TKX3", of format version 2, had no lines and seed 3; "TKX2", of version 1, no tag and no seed either. Their rows are
read, because a scan could not tell them: blobs of another version are left alone, and these were counted, and evicted,
as what they are. An index of any other version is emptied and rebuilt by a scan; a damaged or locked database is moved
aside before that. On a network mount there is no index at all: SQLite's locks and its shared-memory file do not work
there. Nor is there one where ``index/`` holds what we do not write (:func:`foreign_index`): it stays as it is. Nor
where diskcache would use another directory (:func:`is_expanded`).
"""

import contextlib
import logging
import os
import re
import sqlite3
import stat
import struct
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import diskcache
import msgspec
import xxhash

from tiered_kv.errors import TierUnavailable
from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.keys.stored_by import UNKNOWN, shared_line
from tiered_kv.keys.tags import NO_TAG, TAG_BYTES, shared_tag
from tiered_kv.tiers.base import BlobName
from tiered_kv.tiers.disk.files import make_directories

logger = logging.getLogger(__name__)

INDEX_DIRECTORY = "index"
_DAMAGED_PREFIX = "index.damaged-"
DATABASE_FILES: Final = (diskcache.core.DBNAME, f"{diskcache.core.DBNAME}-wal")
"""What a flush writes to."""

_FILES = {f"{diskcache.core.DBNAME}{end}" for end in ("", "-wal", "-shm", "-journal")}
_TABLES = {"Cache", "Settings", "sqlite_sequence", "sqlite_stat1"}
_DIGITS_MAX = 19
_MAGIC = b"TKX4"
_MAGIC_BEFORE_LINES = b"TKX3"
_MAGIC_BEFORE_TAGS = b"TKX2"
_SEEDS = {_MAGIC: 4, _MAGIC_BEFORE_LINES: 3, _MAGIC_BEFORE_TAGS: 0}
"""A magic that a flipped bit made another one fails its checksum."""
_HEAD = struct.Struct("<4sQ")
_COUNT = struct.Struct("<I")
_ROW = struct.Struct("<16s16s32sIQ16sIQI")
_ROW_BEFORE_LINES = struct.Struct("<16s16s32sIQ16sQI")
_ROW_BEFORE_TAGS = struct.Struct("<16s16s32sIQQI")
_LISTED = {
    _MAGIC: struct.Struct("<16s16s32xIQ20s8xI"),
    _MAGIC_BEFORE_LINES: struct.Struct("<16s16s32xIQ16s8xI"),
    _MAGIC_BEFORE_TAGS: struct.Struct("<16s16s32xIQ0s8xI"),
}
"""The same rows as a ``ListedRow``: without digest and counter of uses, tag and number of the line in one piece."""
_LINE_NUMBER = struct.Struct("<92xI12x")
_UNBOUNDED = 1 << 62
_LOCK_WAIT_S = 5.0
"""Bound on waiting for another process (someone's sqlite3 shell); after it the rows stay dirty for the next flush."""

_NO_ROOM = frozenset(
    (
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR_WRITE,  # what a quota gives
        sqlite3.SQLITE_IOERR_SHMSIZE,  # no room for what readers and writers share
        sqlite3.SQLITE_CANTOPEN,  # no inode for it
    )
)
"""How SQLite says that it cannot write on a full disk; it may say so before it has looked into the database."""

_NETWORK_FILE_SYSTEMS = ("nfs", "cifs", "smb", "fuse.sshfs", "9p")

_READ_BY_ADDRESS = frozenset(("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "tmpfs", "overlay", "nfs", "nfs4"))
"""Whose reads without O_DIRECT come out of the page cache, whatever the mount's options. Others may have pages of the
reader filled by somebody else: FUSE where its daemon says so (``direct_io``), virtiofs, 9p and CIFS without a cache,
ZFS with ``direct=always``."""

_LOCAL_FILE_SYSTEMS = frozenset(("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs"))

_ESCAPE = re.compile(r"\\([0-7]{3})")
"""How the kernel writes spaces and the like in a mount point; all else is there as it is."""


class IndexDamaged(Exception):
    """The database does not hold what we wrote; it is disposable."""


class IndexOfAnotherVersion(IndexDamaged):
    """The database holds what another version wrote; nothing is wrong with it."""


class IndexRow(msgspec.Struct, frozen=True, gc=False):
    """One blob as the index remembers it. Python's garbage collector does not walk rows: there are as many as blobs.

    Attributes:
        size_bytes: What it takes of the disk.
        use_seq: Counts uses across restarts: the order of eviction, which no clock may turn around.
        used_s: When it was last used, seconds since 1970: for people. 0 where it is not known.
    """

    record: ChunkRecord
    size_bytes: int
    use_seq: int
    used_s: int


class Shard(NamedTuple):
    """One fan-out directory: a namespace digest and the first byte of the keys in it."""

    namespace: bytes
    fan_out: int

    @classmethod
    def of(cls, name: BlobName) -> "Shard":
        return cls(name.namespace, name.key[0])

    def __str__(self) -> str:
        return f"{self.namespace.hex()}/{self.fan_out:02x}"


ShardRows = dict[Shard, dict[bytes, IndexRow]]

ListedRow = tuple[bytes, bytes, int, int, bytes, int]
"""What a listing takes of a row: key, parent, chunk_index, size_bytes, origin for ``PackedShard.origins``, used_s."""

LISTED_SIZE: Final = 3
LISTED_USE: Final = 5
"""Where it has its size and its last use."""


class PackedShard:
    """One shard as the index holds it, checked. Its rows are made when they are asked for: not all at once.

    Attributes:
        namespace: That of all its blobs.
    """

    def __init__(self, value: bytes, namespace: bytes) -> None:
        """Check a shard's value, so that nothing that is asked of it later fails.

        Raises:
            IndexOfAnotherVersion: Its magic is one that another version may give.
            IndexDamaged: It is not what ``pack_rows`` makes or made.
        """
        self.namespace = namespace
        if len(value) < _HEAD.size:
            raise IndexDamaged(f"a shard has an impossible length. observed={len(value)}")
        self._magic, digest = _HEAD.unpack_from(value)
        body = memoryview(value)[_HEAD.size :]
        if self._magic not in _SEEDS:
            is_of_another = self._magic[:3] == _MAGIC[:3] and self._magic[3:].isdigit()
            kind = IndexOfAnotherVersion if is_of_another else IndexDamaged
            raise kind(f"expected={_MAGIC!r} observed={self._magic!r}")
        if digest != xxhash.xxh3_64_intdigest(body, seed=_SEEDS[self._magic]):
            raise IndexDamaged(f"a shard fails its checksum. length={len(value)}")
        try:
            self._lines, at = _read_lines(body) if self._magic == _MAGIC else ([UNKNOWN], 0)
            self._body = body[at:]
            rest = len(self._body) % _LISTED[self._magic].size
            if rest or (self._magic == _MAGIC and self._highest_line() >= len(self._lines)):
                raise ValueError(f"bytes behind the last row: {rest}, or a row names a line that is not there")
        except (struct.error, ValueError, IndexError) as exc:
            raise IndexDamaged(
                f"a shard cannot be read, though its checksum is right. length={len(value)}: {exc}"
            ) from exc

    def _highest_line(self) -> int:
        return max((number for (number,) in _LINE_NUMBER.iter_unpack(self._body)), default=-1)

    def __len__(self) -> int:
        return len(self._body) // _LISTED[self._magic].size

    def rows(self) -> dict[bytes, IndexRow]:
        """All of it, by key."""
        return {row.record.key: row for row in _unpack(self._magic, self._body, self.namespace, self._lines)}

    def listed(self) -> dict[bytes, ListedRow]:
        """What a listing takes of it, by key."""
        return {row[0]: row for row in _LISTED[self._magic].iter_unpack(self._body)}

    def origins(self, packed: Sequence[bytes]) -> list[tuple[bytes, str]]:
        """Tag and storer of rows; one object for all rows of the same."""
        told = {one: self._origin(one) for one in set(packed)}
        return list(map(told.__getitem__, packed))

    def _origin(self, packed: bytes) -> tuple[bytes, str]:
        """Older versions have no line, or no tag either."""
        number = int.from_bytes(packed[TAG_BYTES:], "little")
        return shared_tag(packed[:TAG_BYTES] or NO_TAG), self._lines[number]


class BytesOnlyDisk(diskcache.Disk):  # type: ignore[misc]  # diskcache is untyped
    """diskcache's serialisation without pickle and without files: text keys and bytes values inside SQLite only.

    diskcache unpickles whatever a row claims to be pickled and opens whatever file a row names; a database that
    somebody else could write to must not be able to ask for either.
    """

    def put(self, key: object) -> tuple[str, bool]:
        if not isinstance(key, str):
            raise TypeError(f"index keys are text. observed={type(key).__name__}")
        return key, True

    def get(self, key: object, raw: object) -> str:
        if not raw or not isinstance(key, str):
            raise IndexDamaged("an index key is not text")
        return key

    def store(self, value: object, read: bool, key: object = None) -> tuple[int, int, None, bytes]:
        del key
        if read or not isinstance(value, bytes):
            raise TypeError(f"index values are bytes. observed={type(value).__name__}")
        return 0, diskcache.core.MODE_RAW, None, value

    def fetch(self, mode: object, filename: object, value: object, read: bool) -> bytes:
        if read or mode != diskcache.core.MODE_RAW or filename is not None or not isinstance(value, bytes):
            raise IndexDamaged("an index value is not plain bytes")
        return value

    def remove(self, file_path: str) -> None:
        del file_path  # we never make files, so there is none to remove, whatever a row says


class BytesOnlyCache(diskcache.Cache):  # type: ignore[misc]  # diskcache is untyped
    """A database of ``BytesOnlyDisk``; of one that cannot be opened no connection stays open."""

    def __init__(self, directory: Path) -> None:
        try:
            super().__init__(
                str(directory),
                timeout=_LOCK_WAIT_S,
                disk=BytesOnlyDisk,
                eviction_policy="none",
                size_limit=_UNBOUNDED,
                cull_limit=0,
                disk_min_file_size=_UNBOUNDED,
                # A mapped database that somebody truncates would end the process with SIGBUS.
                sqlite_mmap_size=0,
                # No fsync: disposable, checksummed, rebuilt by a scan.
                sqlite_synchronous=0,
            )
        except BaseException:
            self.close()
            raise


class DiskIndex:
    """Persistent rows of a directory.

    Threads: any; one lock serialises the calls, and each call ends with no open SQLite connection.
    """

    def __init__(self, root: Path, owners: Collection[int] | None = None) -> None:
        """Name the place; nothing is opened before ``load``. ``root`` must not be on a network mount.

        Args:
            owners: Users whose damaged indexes of earlier times may be removed; None: this process's.
        """
        self._root = root
        self._owners = (os.geteuid(),) if owners is None else owners
        self._directory = root / INDEX_DIRECTORY
        self._lock = threading.Lock()
        self._cache: Any = None

    def load(self) -> ShardRows:
        """Read everything. A damaged or locked database is moved aside and yields nothing: the scan rebuilds it.

        One that is whole is only read where the disk is too full for what SQLite writes to open it.

        Raises:
            TierUnavailable: Not even a new database can be made here.
        """
        with self._lock:
            try:
                with self._open() as cache:
                    return self._read(cache)
            except (sqlite3.Error, diskcache.Timeout, IndexDamaged, OSError) as exc:
                if (rows := self._only_read(exc)) is not None:
                    return rows
                self._move_aside(exc)
                return {}

    def _only_read(self, cause: Exception) -> ShardRows | None:
        """What a database says that cannot be written for want of room; None: it is something else, or damaged, too."""
        if getattr(cause, "sqlite_errorcode", None) not in _NO_ROOM:
            return None
        try:
            rows = {shard: packed.rows() for shard, packed in read_index(self._root).items()}
        except TierUnavailable as exc:
            logger.debug("a disk index without room cannot be read either: %s", exc)
            return None
        # Its text: who keeps log records would keep the error's frames.
        logger.warning("disk index is only read, there is no room. path=%s cause=%s", self._directory, repr(cause))
        return rows

    def _read(self, cache: Any) -> ShardRows:
        try:
            return dict(_read_shards(cache))
        except IndexOfAnotherVersion as exc:
            logger.info("disk index is of another version: rebuilding it by a scan. path=%s %s", self._directory, exc)
            cache.clear()
            return {}

    def write(self, shards: Mapping[Shard, Sequence[IndexRow]]) -> bool:
        """Replace these shards' rows in one transaction; an empty shard is removed.

        Returns:
            False when the database was found damaged and moved aside: write all shards again.

        Raises:
            TierUnavailable: The database is locked or the disk is full; the shards are not persisted.
        """
        with self._lock:
            try:
                with self._open() as cache, cache.transact():
                    for shard, rows in shards.items():
                        if rows:
                            cache.set(str(shard), pack_rows(rows))
                        else:
                            cache.delete(str(shard))
                return True
            except (sqlite3.OperationalError, diskcache.Timeout, OSError) as exc:
                raise TierUnavailable(f"cannot write the disk index. path={self._directory} cause={exc!r}") from exc
            except (sqlite3.DatabaseError, IndexDamaged) as exc:
                self._move_aside(exc)
                return False

    @contextlib.contextmanager
    def _open(self) -> Iterator[Any]:
        if self._cache is None:
            make_directories(self._directory, self._root)
            _probe(self._directory / diskcache.core.DBNAME)
            self._cache = _open_cache(self._directory)
        try:
            yield self._cache
        finally:
            # diskcache keeps one connection per calling thread; none of them shall outlive its call.
            self._cache.close()

    def _move_aside(self, cause: Exception) -> None:
        self._cache = None
        try:
            found = list(self._root.glob(_DAMAGED_PREFIX + "*"))
            number = max(map(_damaged_number, found), default=0) + 1
            target = self._root / f"{_DAMAGED_PREFIX}{number}"
            if os.path.lexists(self._directory):
                os.rename(self._directory, target)
            for old in found:
                if (what := _foreign(old, self._owners)) is not None or not _damaged_number(old):
                    logger.warning("left alone: it is called as a damaged index is. path=%s %s", old, what or "")
                    continue
                for file in old.iterdir():
                    file.unlink()
                old.rmdir()
                logger.warning("removed: a damaged index of earlier times. path=%s", old)
        except OSError as exc:
            raise TierUnavailable(f"cannot move the damaged disk index aside. path={self._directory}") from exc
        logger.warning(
            "disk index unusable, rebuilding it by a scan. path=%s cause=%r kept=%s",
            self._directory,
            cause,
            target.name,
        )


def foreign_index(root: Path, owners: Collection[int]) -> str | None:
    """Why ``index/`` is not one that we made, in words; None: it is ours, damaged or not, or there is none.

    A damaged database is ours by its name, its place and its owner; one that works and has other tables is not.

    Raises:
        OSError: It cannot be looked at.
    """
    directory = root / INDEX_DIRECTORY
    if not os.path.lexists(directory) or directory.is_symlink() or not directory.is_dir():
        return None  # a link or a file in its place is moved aside as it is, and what it names is not touched
    if (what := _foreign(directory, owners)) is not None:
        return what
    database = directory / diskcache.core.DBNAME
    with contextlib.suppress(sqlite3.Error, OSError):  # damaged
        if stat.S_ISREG(os.lstat(database).st_mode):
            # "immutable": not even a reader's lock and its files beside the database.
            uri = f"{database.absolute().as_uri()}?mode=ro&immutable=1"
            with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=0)) as connection:
                tables = {
                    str(row[0]) for row in connection.execute("SELECT name FROM sqlite_master WHERE type='table'")
                }
            if others := sorted(tables - _TABLES):
                return f"tables={', '.join(others)[:100]!a}"
    return None


def _foreign(directory: Path, owners: Collection[int]) -> str | None:
    """What in a directory is no file of a database of ours, in words."""
    if directory.is_symlink() or not directory.is_dir():
        return "kind=no directory"
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name not in _FILES:
                return f"found={entry.name[:40]!a}"
            if entry.stat(follow_symlinks=False).st_uid not in owners:
                return f"owner={entry.stat(follow_symlinks=False).st_uid} found={entry.name}"
    return None


def _open_cache(directory: Path) -> "BytesOnlyCache":
    try:
        return BytesOnlyCache(directory)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as exc:
        # It trusts the settings that it finds in the database, as arguments and as parts of its statements.
        raise IndexDamaged(f"the settings in the database are not diskcache's own: {exc!r:.200}") from exc


def read_index(root: Path) -> dict[Shard, PackedShard]:
    """What the index of a directory says, without changing it: for tools, while a server runs or while none does.

    Raises:
        TierUnavailable: It cannot be read, now or ever: it is damaged, or locked.
    """
    database = root / INDEX_DIRECTORY / diskcache.core.DBNAME
    try:
        _require_regular(database)
        if not _has_content(database.with_name(f"{database.name}-wal")):
            # Nobody is writing. Without "immutable" even a reader leaves files beside the database.
            with contextlib.suppress(sqlite3.Error, IndexDamaged):  # somebody began to: read it in the usual way
                return _read_shards_of(f"{database.as_uri()}?mode=ro&immutable=1")
        return _read_shards_of(f"{database.as_uri()}?mode=ro")
    except FileNotFoundError:  # and nothing else: what is there and cannot be looked at may be a whole index
        return {}
    except (sqlite3.Error, IndexDamaged, TypeError, OSError) as exc:
        raise TierUnavailable(f"cannot read the disk index. path={database.parent} cause={exc!r}") from exc


def _has_content(log: Path) -> bool:
    """Whether a database's log is there and says something: who had no room to open the database leaves it empty."""
    try:
        return log.stat().st_size > 0
    except FileNotFoundError:
        return False


def _read_shards_of(uri: str) -> dict[Shard, PackedShard]:
    with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=1)) as connection:
        rows = connection.execute(
            "SELECT key, value FROM Cache WHERE raw = 1 AND mode = ? AND filename IS NULL", (diskcache.core.MODE_RAW,)
        )
        return {shard: PackedShard(value, shard.namespace) for key, value in rows for shard in [_parse_shard(key)]}


def _probe(database: Path) -> None:
    """Fail at once where diskcache would retry for a minute (locked) or make a file others can read (new)."""
    os.close(os.open(database, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    _require_regular(database)
    with contextlib.closing(sqlite3.connect(database, timeout=0, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")


def _require_regular(database: Path) -> None:
    """SQLite follows links, and waits for ever for a FIFO."""
    status = os.lstat(database)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        raise IndexDamaged("the database is a link, has a second name, or is no file")


def _read_shards(cache: Any) -> Iterator[tuple[Shard, dict[bytes, IndexRow]]]:
    for key in list(cache.iterkeys()):
        shard = _parse_shard(key)
        value = cache.get(key)
        if value is not None:
            yield shard, unpack_rows(value, shard.namespace)


def _parse_shard(key: object) -> Shard:
    space, _, fan_out = str(key).partition("/")
    try:
        shard = Shard(bytes.fromhex(space), int(fan_out, 16))
    except ValueError as exc:
        raise IndexDamaged(f"not a shard. key={key!r}") from exc
    if str(shard) != key:
        raise IndexDamaged(f"not a shard. key={key!r}")
    return shard


def pack_rows(rows: Sequence[IndexRow]) -> bytes:
    """One shard's value; see the module's drawing."""
    numbers: dict[str, int] = {}
    packed = [
        _ROW.pack(
            row.record.key,
            row.record.parent,
            row.record.prefix_sha256,
            row.record.chunk_index,
            row.size_bytes,
            row.record.tag,
            numbers.setdefault(row.record.stored_by, len(numbers)),
            row.use_seq,
            row.used_s,
        )
        for row in rows
    ]
    lines = [bytes((len(line),)) + line.encode("ascii") for line in numbers]
    body = b"".join([_COUNT.pack(len(lines)), *lines, *packed])
    return _HEAD.pack(_MAGIC, xxhash.xxh3_64_intdigest(body, seed=_SEEDS[_MAGIC])) + body


def unpack_rows(value: bytes, namespace: bytes) -> dict[bytes, IndexRow]:
    """Read one shard's value; all its blobs are of one namespace.

    Raises:
        IndexOfAnotherVersion, IndexDamaged: As ``PackedShard``.
    """
    return PackedShard(value, namespace).rows()


def _read_lines(body: memoryview) -> tuple[list[str], int]:
    """Who stored blobs of a shard, and where its rows begin."""
    lines, at = [], _COUNT.size
    for _ in range(_COUNT.unpack_from(body)[0]):
        end = at + 1 + body[at]
        lines.append(shared_line(str(body[at + 1 : end], "ascii")))
        at = end
    return lines, at


def _unpack(magic: bytes, body: memoryview, namespace: bytes, lines: Sequence[str]) -> Iterator[IndexRow]:
    if magic == _MAGIC_BEFORE_TAGS:
        for key, parent, digest, position, size_bytes, use_seq, used_s in _ROW_BEFORE_TAGS.iter_unpack(body):
            yield IndexRow(ChunkRecord(namespace, key, parent, position, digest), size_bytes, use_seq, used_s)
        return
    # One object for each tag and line, not for each row: there may be a million rows.
    if magic == _MAGIC_BEFORE_LINES:
        for key, parent, digest, position, size_bytes, tag, use_seq, used_s in _ROW_BEFORE_LINES.iter_unpack(body):
            record = ChunkRecord(namespace, key, parent, position, digest, shared_tag(tag))
            yield IndexRow(record, size_bytes, use_seq, used_s)
        return
    for key, parent, digest, position, size_bytes, tag, line, use_seq, used_s in _ROW.iter_unpack(body):
        record = ChunkRecord(namespace, key, parent, position, digest, shared_tag(tag), lines[line])
        yield IndexRow(record, size_bytes, use_seq, used_s)


def _damaged_number(path: Path) -> int:
    """Of an index that was moved aside; 0 for what is only called similarly."""
    number = path.name.removeprefix(_DAMAGED_PREFIX)
    return int(number) if number.isascii() and number.isdecimal() and len(number) < _DIGITS_MAX else 0


def is_on_network(path: Path, mounts: str) -> bool:
    """Whether ``path`` lies on a network file system.

    Args:
        path: An absolute path without symbolic links.
        mounts: Content of ``/proc/self/mounts``; an entry further down hides those before it.
    """
    return file_system(path, mounts).startswith(_NETWORK_FILE_SYSTEMS)


def is_expanded(root: Path) -> bool:
    """Whether diskcache takes a part of this path for a variable of the environment, and so goes to another place."""
    directory = os.fspath(root / INDEX_DIRECTORY)
    return os.path.expandvars(directory) != directory


def reads_by_address(path: Path, mounts: str) -> bool:
    """Whether a plain read of a file below ``path`` copies to the caller's addresses; arguments as above."""
    return file_system(path, mounts) in _READ_BY_ADDRESS


def is_on_local_disk(path: Path, mounts: str) -> bool:
    """Whether ``path`` lies on a file system over a device of this machine, known to us; arguments as above."""
    return file_system(path, mounts) in _LOCAL_FILE_SYSTEMS


def file_system(path: Path, mounts: str) -> str:
    """The type of the file system that ``path`` lies on; arguments as above."""
    best, kind = -1, ""
    for line in mounts.split("\n"):  # a name may hold what else ends a line of text
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = Path(_ESCAPE.sub(lambda found: chr(int(found[1], 8)), fields[1]))
        if path.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), fields[2]
    return kind
