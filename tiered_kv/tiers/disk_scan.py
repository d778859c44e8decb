"""Reconcile what the index remembers with what the directory really holds; the directory is right.

Reads directory entries and, for files the index does not know, their first 4096 bytes. Removes only files that were
ours and are certainly broken. Called by ``disk.py`` once, at open, before any write and under the directory lock.

    file                                            what happens
    named right, in the index, same allocation      the index row stands, no read
    named right, not in the index                   row from its header, recency unknown
    named right, header corrupt or of another key   removed, and logged: no get could ever return it
    the same, of another user                       foreign
    named right, another namespace or version       foreign: counted as used, never deleted
    named otherwise, not a regular file             foreign
    row without a file                              dropped
"""

import os
import stat
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tiered_kv.chunks.header import MAX_HEADER_BYTES, PEEK_BYTES, BlobHeader, peek, read_header
from tiered_kv.errors import ChunkCorrupt, ChunkMismatch
from tiered_kv.keys.naming import parse_path
from tiered_kv.tiers.base import BlobName
from tiered_kv.tiers.disk_index import IndexRow, Shard, ShardRows
from tiered_kv.tiers.disk_io import allocated_bytes, is_own_file, read_head

NAMESPACE_FILE = "namespace.json"
RECORD_BYTES_MAX = 16 << 20
"""Of a namespace.json: a record of the largest size, set for people."""


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
        owners, on_removed: See ``reconcile``.
    """

    shards: ShardRows = field(default_factory=dict)
    dirty: set[Shard] = field(default_factory=set)
    foreign: set[BlobName] = field(default_factory=set)
    foreign_bytes: int = 0
    unreadable_count: int = 0
    removed_count: int = 0
    owners: Collection[int] = ()
    on_removed: Callable[[str, str], None] | None = None


def reconcile(
    blobs: Path, known: ShardRows, owners: Collection[int], on_removed: Callable[[str, str], None]
) -> DirectoryContent:
    """Walk ``blobs`` and return what is really there.

    Args:
        owners: Users whose broken blobs may be removed (``disk_marker.claim``).
        on_removed: Told of each that was: its path, and why.

    Raises:
        OSError: The directory cannot be read.
    """
    content = DirectoryContent(owners=owners, on_removed=on_removed)
    for prefix, entry in files(blobs):
        _take(content, known, prefix + entry.name, entry)
    content.dirty.update(shard for shard in known if len(known[shard]) != len(content.shards.get(shard, ())))
    return content


def files(blobs: Path) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Everything below ``blobs`` that is no directory, with the path of its directory relative to ``blobs``."""
    pending = [("", str(blobs))]
    while pending:
        prefix, directory = pending.pop()
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append((f"{prefix}{entry.name}/", entry.path))
                elif entry.name != NAMESPACE_FILE:
                    yield prefix, entry


def _take(content: DirectoryContent, known: ShardRows, relative: str, entry: "os.DirEntry[str]") -> None:
    try:
        status = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return  # vanished between the listing and the look: an ordinary miss
    size = allocated_bytes(status)
    name = parse_path(relative)
    if name is None or not stat.S_ISREG(status.st_mode):
        _leave(content, size)
        return
    shard = Shard.of(name)
    row = known.get(shard, {}).get(name.key)
    if row is None or row.size_bytes != size:
        row = _read_row(content, name, entry.path, size, row)
        if row is None:
            return
        content.dirty.add(shard)
    content.shards.setdefault(shard, {})[name.key] = row


def _read_row(
    content: DirectoryContent, name: BlobName, path: str, size_bytes: int, old: IndexRow | None
) -> IndexRow | None:
    try:
        header = read_named_header(name, Path(path))
    except ChunkMismatch:
        content.foreign.add(name)
        _leave(content, size_bytes)
        return None
    except ChunkCorrupt:
        if not is_own_file(os.lstat(path), content.owners):
            content.foreign.add(name)
            _leave(content, size_bytes)
            return None
        os.unlink(path)
        if content.on_removed is not None:
            content.on_removed(path, "its header is not that of the blob whose name it has")
        content.unreadable_count += 1
        content.removed_count += 1
        return None
    use_seq, used_s = (0, 0) if old is None else (old.use_seq, old.used_s)
    return IndexRow.of(header, size_bytes, use_seq, used_s)


def read_named_header(name: BlobName, path: Path | str) -> BlobHeader:
    """Read what ties the blob to its prefix.

    Raises:
        ChunkCorrupt: It is no blob, or one that no get of this name could ever return.
        ChunkMismatch: It is an intact blob of another version or namespace.
    """
    try:
        header = peek(read_head(path, PEEK_BYTES))
        if header.namespace != name.namespace:
            raise ChunkMismatch(f"another namespace. path={path} observed={header.namespace.hex()}")
    except ChunkMismatch:
        # Only a header whose own hash is right is somebody else's; a flipped bit of ours must not stay for ever.
        read_header(memoryview(read_head(path, MAX_HEADER_BYTES)))
        raise
    if header.key != name.key:
        raise ChunkCorrupt(f"another key. path={path} observed={header.key.hex()}")
    return header


def _leave(content: DirectoryContent, size_bytes: int) -> None:
    content.unreadable_count += 1
    content.foreign_bytes += size_bytes
