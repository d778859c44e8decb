"""The walk over a disk directory's blobs, and their reconciliation with what the index remembers.

Reads directory entries and, for files the index does not know, their headers. ``walk`` and ``directories`` change
nothing: a tier walks at open, the operator's tools go through directories whenever they look, also beside a server.
``reconcile`` removes only files that were ours and are certainly broken; ``tier.py`` calls it once, at open, before any
write and under the directory lock.

    file                                            kind        what an open does
    named right, in the index, same allocation      INDEXED     the index row stands, no read
    named right, not in the index                   READ        row from its header, recency unknown
    named right, header corrupt or of another key   DAMAGED     removed, and logged: no get could ever return it
    the same, of another user                       DAMAGED     foreign
    named right, another namespace or version       FOREIGN     foreign: counted as used, never deleted
    named otherwise, not a regular file             STRAY       foreign
    named right, cannot be read                     UNREADABLE  the open fails
    row without a file                                          dropped
"""

import enum
import os
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from tiered_kv.chunks.header import MAX_HEADER_BYTES, PEEK_BYTES, BlobHeader, peek, read_header
from tiered_kv.errors import ChunkCorrupt, ChunkMismatch
from tiered_kv.keys.chunk_record import CHUNK_INDEX_MAX
from tiered_kv.keys.naming import SUFFIX, parse_path, relative_path
from tiered_kv.tiers.base import BlobName
from tiered_kv.tiers.disk.entries import Entries, read_entries
from tiered_kv.tiers.disk.files import allocated_bytes, is_own_file, read_head
from tiered_kv.tiers.disk.index import IndexRow, Shard, ShardRows
from tiered_kv.tiers.disk.read_ahead import ReadAhead

NAMESPACE_FILE = "namespace.json"
RECORD_BYTES_MAX = 16 << 20
"""Of a namespace.json: a record of the largest size, set for people."""

READ_AHEAD_FROM: Final = 50_000
"""Blobs from which on other processes read directories ahead: two of them start in the time of 5,000 files."""


class Kind(enum.Enum):
    """What a file below ``blobs`` is; see the module's table."""

    INDEXED = "indexed"
    READ = "read"
    DAMAGED = "damaged"
    FOREIGN = "foreign"
    STRAY = "stray"
    UNREADABLE = "unreadable"


class FoundFile(msgspec.Struct, frozen=True):
    """One file below ``blobs``. The garbage collector knows of it, because an exception's frames may refer to it.

    Attributes:
        blobs: Path of ``blobs``.
        name: The blob that its path names, with its ancestry where that is known; None for a stray.
        size_bytes: Bytes it takes from the disk.
        written_s: When it was written, seconds since 1970.
        row: What the index says of that name, whether or not it is still true.
        header: Its header, where the file had to be read and is a blob.
        reason: Why it is damaged, foreign or unreadable.
        stray: Path of a stray below ``blobs``.
    """

    kind: Kind
    blobs: str
    name: BlobName | None
    size_bytes: int
    written_s: float
    row: IndexRow | None = None
    header: BlobHeader | None = None
    reason: Exception | None = None
    stray: str = ""

    @property
    def relative(self) -> str:
        """Path below ``blobs``."""
        return self.stray if self.name is None else relative_path(self.name)

    @property
    def path(self) -> str:
        """Path to open it by."""
        return f"{self.blobs}/{self.relative}"


class ListedDirectory(NamedTuple):
    """One directory below ``blobs``, or itself.

    Attributes:
        path: Below ``blobs``, with a slash at its end; empty for ``blobs`` itself.
        entries: What has a blob's name, and what has not.
        strays: What has not and is there for no other reason either.
    """

    path: str
    entries: Entries
    strays: list[FoundFile]


def reading_ahead(blobs: Path, counts: Mapping[Shard, int]) -> ReadAhead:
    """Other processes begin to read what the index knows, if that is much; the caller closes it.

    Args:
        counts: Blobs by shard, as the index remembers them.
    """
    is_large = sum(counts.values()) >= READ_AHEAD_FROM
    return ReadAhead(
        [f"{blobs}/{path}" for path in sorted(f"{shard}/" for shard in counts)] if is_large else [], SUFFIX
    )


def directories(blobs: Path, ahead: ReadAhead) -> Iterator[ListedDirectory]:
    """Yield every directory below ``blobs``; what vanishes meanwhile is left out.

    Raises:
        OSError: A directory cannot be listed.
    """
    root, pending = str(blobs), [""]
    while pending:
        path = pending.pop()
        try:
            entries = ahead.take(f"{root}/{path}") or read_entries(f"{root}/{path}", SUFFIX)
        except FileNotFoundError:
            continue  # removed while it is listed
        below: list[str] = []
        found = (_other(root, f"{path}{name}", below) for name in entries.others)
        yield ListedDirectory(path, entries, [stray for stray in found if stray is not None])
        pending += sorted(below, reverse=True)  # taken from the end, in the order in which they are read ahead


def walk(blobs: Path, index: ShardRows) -> Iterator[FoundFile]:
    """Yield every file below ``blobs`` but the namespaces' records; what vanishes meanwhile is left out.

    Args:
        index: Rows by shard, as the index remembers them; headers are read only of files that it does not know.

    Raises:
        OSError: A directory cannot be listed.
    """
    root, shards = str(blobs), {f"{shard}/": rows for shard, rows in index.items()}
    with reading_ahead(blobs, {shard: len(rows) for shard, rows in index.items()}) as ahead:
        for directory in directories(blobs, ahead):
            yield from _blobs(root, directory.path, directory.entries, shards.get(directory.path, {}))
            yield from directory.strays


def _blobs(root: str, prefix: str, entries: Entries, rows: Mapping[bytes, IndexRow]) -> Iterator[FoundFile]:
    """The files of one directory that have a blob's name. Nothing is called for each of them but what it takes."""
    indexed = Kind.INDEXED
    for key, size_bytes, written_s in entries.files():
        row = rows.get(key)
        if row is not None and row.size_bytes == size_bytes:
            record = row.record
            name = BlobName(record.namespace, record.key, record.parent, record.chunk_index)
            yield FoundFile(indexed, root, name, size_bytes, written_s, row)
        elif (found := unknown_file(root, prefix, key, size_bytes, written_s, row)) is not None:
            yield found


def _other(root: str, relative: str, below: list[str]) -> FoundFile | None:
    """What has no blob's name, or is no file: a stray; None for what is none. Directories go to ``below``."""
    try:
        status = os.lstat(f"{root}/{relative}")
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(status.st_mode):
        below.append(f"{relative}/")
        return None
    if relative.rpartition("/")[2] == NAMESPACE_FILE:
        return None
    return FoundFile(Kind.STRAY, root, None, allocated_bytes(status), status.st_mtime, stray=relative)


def unknown_file(
    root: str, directory: str, key: bytes, size_bytes: int, written_s: float, row: IndexRow | None = None
) -> FoundFile | None:
    """A file that the index does not know, or knows otherwise, by its header; None: it is gone.

    Args:
        root: Path of ``blobs``.
        directory: Its directory's path below that, with a slash at its end.
        key: The one that its name tells.
    """
    relative = f"{directory}{key.hex()}{SUFFIX}"
    name, path = parse_path(relative), f"{root}/{relative}"
    if name is None:
        return FoundFile(Kind.STRAY, root, None, size_bytes, written_s, stray=relative)
    try:
        header = read_named_header(name, path)
        return FoundFile(Kind.READ, root, BlobName.of(header.record), size_bytes, written_s, row, header)
    except FileNotFoundError:
        return None
    except ChunkMismatch as exc:
        return FoundFile(Kind.FOREIGN, root, name, size_bytes, written_s, row, reason=exc)
    except ChunkCorrupt as exc:
        return FoundFile(Kind.DAMAGED, root, name, size_bytes, written_s, row, reason=exc)
    except OSError as exc:
        return FoundFile(Kind.UNREADABLE, root, name, size_bytes, written_s, row, reason=exc)


@dataclass(slots=True)
class DirectoryContent:
    """What a reconciliation found.

    Attributes:
        shards: One row per blob, sizes as allocated now.
        dirty: Shards whose rows differ from the index.
        foreign: Names taken by files that are not ours to touch.
        foreign_bytes: Bytes of everything that is counted but is not a blob.
        unreadable_count: Files left out, for whatever reason.
        removed_count: Those of them that were broken blobs of ours and are gone now.
    """

    shards: ShardRows = field(default_factory=dict)
    dirty: set[Shard] = field(default_factory=set)
    foreign: set[BlobName] = field(default_factory=set)
    foreign_bytes: int = 0
    unreadable_count: int = 0
    removed_count: int = 0


def reconcile(
    blobs: Path, known: ShardRows, owners: Collection[int], on_removed: Callable[[str, str], None]
) -> DirectoryContent:
    """Walk ``blobs`` and return what is really there: where index and directory differ, the directory is right.

    Args:
        owners: Users whose broken blobs may be removed (``marker.claim``).
        on_removed: Called for each that was, with its path and why.

    Raises:
        OSError: The directory, or a file in it, cannot be read.
    """
    content = DirectoryContent()
    for found in walk(blobs, known):
        if found.reason is not None and found.kind is Kind.UNREADABLE:
            raise found.reason
        if found.kind is Kind.DAMAGED and is_own_file(os.lstat(found.path), owners):
            os.unlink(found.path)
            on_removed(found.path, "its header is not that of the blob whose name it has")
            content.unreadable_count += 1
            content.removed_count += 1
        elif found.name is not None and (row := _row_of(found)) is not None:
            shard = Shard.of(found.name)
            content.shards.setdefault(shard, {})[row.record.key] = row
            if found.kind is Kind.READ:
                content.dirty.add(shard)
        else:
            if found.name is not None:
                content.foreign.add(found.name)
            content.unreadable_count += 1
            content.foreign_bytes += found.size_bytes
    content.dirty.update(shard for shard in known if len(known[shard]) != len(content.shards.get(shard, ())))
    return content


def _row_of(found: FoundFile) -> IndexRow | None:
    """The row of a blob; None for any other file."""
    if found.kind is Kind.INDEXED:
        return found.row
    if found.header is None:
        return None
    use_seq, used_s = (0, 0) if found.row is None else (found.row.use_seq, found.row.used_s)
    return IndexRow(found.header.record, found.size_bytes, use_seq, used_s)


def read_named_header(name: BlobName, path: Path | str) -> BlobHeader:
    """Read what ties the blob to its prefix.

    Raises:
        ChunkCorrupt: It is no blob, or one that no get of this name could ever return.
        ChunkMismatch: It is an intact blob of another version or namespace.
    """
    try:
        header = peek(read_head(path, PEEK_BYTES))
        if header.record.namespace != name.namespace:
            raise ChunkMismatch(f"another namespace. path={path} observed={header.record.namespace.hex()}")
    except ChunkMismatch:
        # Only a header whose own hash is right is somebody else's; a flipped bit of ours must not stay for ever.
        read_header(memoryview(read_head(path, MAX_HEADER_BYTES)))
        raise
    if header.record.key != name.key:
        raise ChunkCorrupt(f"another key. path={path} observed={header.record.key.hex()}")
    if header.record.chunk_index > CHUNK_INDEX_MAX:  # more than the index has room for: its write would fail as a whole
        raise ChunkCorrupt(f"no chunk has this position. path={path} observed={header.record.chunk_index}")
    return header
