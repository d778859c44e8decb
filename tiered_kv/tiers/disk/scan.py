"""The walk over a disk directory's blobs, and their reconciliation with what the index remembers.

Reads directory entries and, for files the index does not know, their headers. ``walk`` changes nothing: a tier uses it
at open, the operator's tools whenever they look, also beside a server. ``reconcile`` removes only files that were ours
and are certainly broken; ``tier.py`` calls it once, at open, before any write and under the directory lock.

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
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from tiered_kv.chunks.header import MAX_HEADER_BYTES, PEEK_BYTES, BlobHeader, peek, read_header
from tiered_kv.errors import ChunkCorrupt, ChunkMismatch
from tiered_kv.keys.naming import SUFFIX, parse_path
from tiered_kv.tiers.base import BlobName
from tiered_kv.tiers.disk.files import allocated_bytes, is_own_file, read_head
from tiered_kv.tiers.disk.index import IndexRow, Shard, ShardRows

NAMESPACE_FILE = "namespace.json"
RECORD_BYTES_MAX = 16 << 20
"""Of a namespace.json: a record of the largest size, set for people."""

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Kind(enum.Enum):
    """What a file below ``blobs`` is; see the module's table."""

    INDEXED = "indexed"
    READ = "read"
    DAMAGED = "damaged"
    FOREIGN = "foreign"
    STRAY = "stray"
    UNREADABLE = "unreadable"


class FoundFile(NamedTuple):
    """One file below ``blobs``.

    Attributes:
        relative: Path below ``blobs``.
        name: The blob that its path names, with its ancestry where that is known; None for a stray.
        row: What the index says of that name, whether or not it is still true.
        header: Its header, where the file had to be read and is a blob.
        reason: Why it is damaged, foreign or unreadable.
    """

    kind: Kind
    relative: str
    path: str
    status: os.stat_result
    name: BlobName | None
    row: IndexRow | None = None
    header: BlobHeader | None = None
    reason: Exception | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes it takes from the disk."""
        return allocated_bytes(self.status)


def walk(blobs: Path, index: ShardRows, on_directory: Callable[[], None] | None = None) -> Iterator[FoundFile]:
    """Yield every file below ``blobs`` but the namespaces' records; what vanishes meanwhile is left out.

    Args:
        index: Rows by shard, as the index remembers them; headers are read only of files that it does not know.
        on_directory: Called after each directory.

    Raises:
        OSError: A directory cannot be listed.
    """
    pending = [("", str(blobs))]
    while pending:
        prefix, directory = pending.pop()
        try:
            descriptor = os.open(directory, _DIRECTORY)
        except FileNotFoundError:
            continue  # removed while it is listed
        try:
            # By descriptor: the kernel then looks up a name, not a path, which takes a third off.
            with os.scandir(descriptor) as entries:
                yield from _files(prefix, directory, entries, index, pending)
        finally:
            os.close(descriptor)
        if on_directory is not None:
            on_directory()


def _files(
    prefix: str,
    directory: str,
    entries: "Iterator[os.DirEntry[str]]",
    index: ShardRows,
    pending: list[tuple[str, str]],
) -> Iterator[FoundFile]:
    """The files of one directory; directories below it go to ``pending``."""
    shard = _shard_of(prefix)
    rows = index.get(shard, {}) if shard is not None else {}
    known = {f"{key.hex()}{SUFFIX}": row for key, row in rows.items()}
    indexed = Kind.INDEXED
    for entry in entries:
        row, path = known.get(entry.name), f"{directory}/{entry.name}"
        if row is None and entry.is_dir(follow_symlinks=False):
            pending.append((f"{prefix}{entry.name}/", path))
            continue
        if entry.name == NAMESPACE_FILE:
            continue
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue  # evicted while it is listed: an ordinary miss
        if row is not None and shard is not None:
            if allocated_bytes(status) == row.size_bytes and stat.S_ISREG(status.st_mode):
                name = BlobName.of(row.record)
                yield FoundFile(indexed, f"{prefix}{entry.name}", path, status, name, row)
                continue
            if stat.S_ISDIR(status.st_mode):
                pending.append((f"{prefix}{entry.name}/", path))
                continue
        found = _unknown(f"{prefix}{entry.name}", path, status, row)
        if found is not None:
            yield found


def _unknown(relative: str, path: str, status: os.stat_result, row: IndexRow | None) -> FoundFile | None:
    """A file that the index does not know, or knows otherwise, by its header; None: it is gone."""
    name = parse_path(relative)
    if name is None or not stat.S_ISREG(status.st_mode):
        return FoundFile(Kind.STRAY, relative, path, status, None, row)
    try:
        header = read_named_header(name, path)
    except FileNotFoundError:
        return None
    except ChunkMismatch as exc:
        return FoundFile(Kind.FOREIGN, relative, path, status, name, row, reason=exc)
    except ChunkCorrupt as exc:
        return FoundFile(Kind.DAMAGED, relative, path, status, name, row, reason=exc)
    except OSError as exc:
        return FoundFile(Kind.UNREADABLE, relative, path, status, name, row, reason=exc)
    whole = BlobName.of(header.record)
    return FoundFile(Kind.READ, relative, path, status, whole, row, header)


def _shard_of(prefix: str) -> Shard | None:
    """The shard whose blobs a directory holds, by its path below ``blobs``."""
    name = parse_path(f"{prefix}{prefix[-3:-1]}{'0' * 30}{SUFFIX}")
    return None if name is None else Shard.of(name)


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
    return header
