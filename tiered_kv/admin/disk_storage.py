"""The disk tier as an operator sees it: a directory that a server may own at the same moment.

Listing reads directory entries and the index a server keeps beside them, and headers only of files the index does not
know; 100,000 blobs take about a second (figures: docs/operations.md). Changes go through the server if one runs;
otherwise the directory is opened as a tier of its own, with its lock, so that accounts and index stay right.
"""

import contextlib
import json
import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from tiered_kv.admin.server_link import ServerLink
from tiered_kv.admin.storage import (
    FOR_GOOD,
    Content,
    NamespaceRecord,
    Progress,
    Removal,
    Storage,
    StoredBlob,
    Stray,
    no_progress,
)
from tiered_kv.errors import ChunkCorrupt, ChunkMismatch, ConfigError, DirectoryLocked, TierUnavailable
from tiered_kv.keys.namespace import Namespace
from tiered_kv.keys.naming import BlobName, parse_path, relative_path
from tiered_kv.tiers.disk import DiskTier
from tiered_kv.tiers.disk_index import INDEX_DIRECTORY, IndexRow, Shard, ShardRows, read_index
from tiered_kv.tiers.disk_io import allocated_bytes, read_head
from tiered_kv.tiers.disk_pins import changing_pins, read_pins
from tiered_kv.tiers.disk_scan import NAMESPACE_FILE, files, read_named_header

STRIDE: Final = 1000
REMOVAL_WAIT_S: Final = 60.0
"""How long a server may take to delete what it was told to delete before the command stops to watch."""


class DiskStorage(Storage):
    """Blobs below one directory.

    Threads: one at a time.
    """

    def __init__(self, root: Path, *, limit_bytes: int | None = None) -> None:
        """Name the directory, which must exist; nothing is opened.

        Args:
            limit_bytes: What may be written below it where no server has a limit; None: as much as the disk holds.

        Raises:
            ConfigError: There is no such directory.
            TierUnavailable: It cannot be read.
        """
        self.kind = "disk"
        self.uri = f"file://{root}"
        self.root = Path(os.path.realpath(root))
        self._blobs = self.root / "blobs"
        self._limit_bytes = limit_bytes
        self._tier: DiskTier | None = None
        if not self.root.is_dir():
            raise ConfigError(f"there is no such directory. path={root}")
        if not os.access(self.root, os.R_OK | os.X_OK):
            raise TierUnavailable(f"the directory cannot be read. path={root}")

    def server(self) -> ServerLink | None:
        """A connection to the server that owns the directory now; None when there is none. The caller closes it."""
        return ServerLink.of_directory(self.root)

    # -- looking ------------------------------------------------------------------------------------------------------

    def look(self, progress: Progress = no_progress) -> Content:
        content = Content()
        index = self._read_index(content)
        pins = self._pinned_until(content)
        total = sum(len(rows) for rows in index.values()) or None
        if self._blobs.is_dir():
            try:
                for number, (prefix, entry) in enumerate(files(self._blobs)):
                    self._take(content, index, pins, prefix + entry.name, entry)
                    if number % STRIDE == STRIDE - 1:
                        progress(number + 1, total)
            except OSError as exc:
                raise TierUnavailable(f"the directory cannot be listed. path={self._blobs}: {exc}") from exc
        self._take_temp_files(content)
        content.records = self.records()
        content.own_bytes = sum(_allocated(path) for path in self._own_files())
        progress(len(content.blobs), len(content.blobs))
        return content

    def _read_index(self, content: Content) -> ShardRows:
        try:
            return read_index(self.root)
        except TierUnavailable as exc:
            content.notes.append(f"times of use are those of writing, because the index cannot be read: {exc}")
            return {}

    def _pinned_until(self, content: Content) -> dict[bytes, float]:
        try:
            return {name.key: until_s or FOR_GOOD for name, until_s in read_pins(self.root).items()}
        except TierUnavailable as exc:
            content.notes.append(str(exc))
            return {}

    def _take(
        self,
        content: Content,
        index: ShardRows,
        pins: Mapping[bytes, float],
        relative: str,
        entry: "os.DirEntry[str]",
    ) -> None:
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            return  # evicted while we list
        size, path = allocated_bytes(status), f"blobs/{relative}"
        name = parse_path(relative)
        if name is None or not stat.S_ISREG(status.st_mode):
            content.strays.append(Stray(path, size, status.st_mtime, "name", "not a name that a blob has"))
            return
        row = index.get(Shard.of(name), {}).get(name.key)
        if row is None or row.size_bytes != size:
            row = self._row_of(content, name, entry.path, size, row)
            if row is None:
                return
        whole = BlobName(name.namespace, name.key, row.parent, row.chunk_index)
        used_s = max(status.st_mtime, row.used_s)
        content.blobs.append(StoredBlob(whole, size, status.st_mtime, used_s, pins.get(name.key, 0.0)))

    def _row_of(
        self, content: Content, name: BlobName, path: str, size_bytes: int, old: IndexRow | None
    ) -> IndexRow | None:
        relative = os.path.relpath(path, self.root)
        try:
            header = read_named_header(name, Path(path))
        except FileNotFoundError:
            return None
        except (ChunkMismatch, ChunkCorrupt) as exc:
            kind = "foreign" if isinstance(exc, ChunkMismatch) else "damaged"
            with contextlib.suppress(FileNotFoundError):
                content.strays.append(Stray(relative, size_bytes, os.lstat(path).st_mtime, kind, _unplaced(exc)))
            return None
        except OSError as exc:
            content.strays.append(Stray(relative, size_bytes, 0.0, "damaged", f"cannot be read: {exc.strerror}"))
            return None
        used_s = 0 if old is None else old.used_s
        return IndexRow(name.key, header.parent, header.prefix_sha256, header.chunk_index, size_bytes, 0, used_s)

    def _take_temp_files(self, content: Content) -> None:
        temp = self.root / "tmp"
        for path in temp.iterdir() if temp.is_dir() else ():
            with contextlib.suppress(FileNotFoundError):
                status = path.lstat()
                reason = "a write that is going on, or was cut off"
                content.strays.append(
                    Stray(f"tmp/{path.name}", allocated_bytes(status), status.st_mtime, "temp", reason)
                )

    def _own_files(self) -> Iterator[Path]:
        yield from (path for path in self.root.iterdir() if path.is_file())
        yield from (self.root / INDEX_DIRECTORY).glob("*")
        yield from self._blobs.glob(f"*/{NAMESPACE_FILE}")

    def records(self) -> dict[bytes, NamespaceRecord]:
        records = {}
        for directory in sorted(self._blobs.iterdir()) if self._blobs.is_dir() else ():
            try:
                digest = bytes.fromhex(directory.name)
            except ValueError:
                continue
            if len(digest) == 16 and directory.is_dir():
                records[digest] = read_record(digest, _content(directory / NAMESPACE_FILE))
        return records

    def contains(self, names: Sequence[BlobName]) -> list[bool]:
        return [(self._blobs / relative_path(name)).is_file() for name in names]

    def read(self, blob: StoredBlob | BlobName, length: int | None = None) -> bytes | None:
        name = blob.name if isinstance(blob, StoredBlob) else blob
        path = self._blobs / relative_path(name)
        try:
            if length is not None:
                return read_head(path, length)
            return path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise TierUnavailable(f"the blob cannot be read. path={path}: {exc}") from exc

    # -- changing -----------------------------------------------------------------------------------------------------

    def write(self, name: BlobName, blob: memoryview) -> bool:
        tier = self._open()
        if tier.contains(name):
            return False
        tier.put(name, blob)
        return True

    def write_record(self, namespace: Namespace) -> None:
        self._open().describe(namespace.digest, namespace.record)

    def remove(self, blobs: Sequence[StoredBlob], progress: Progress = no_progress, *, holes: bool = False) -> Removal:
        ordered = sorted(blobs, key=lambda blob: -blob.name.chunk_index)
        link = self.server() if self._tier is None else None
        if link is None:
            return self._remove_alone(ordered, progress)
        with link:
            return self._remove_through(link, ordered, progress, holes=holes)

    def _remove_alone(self, blobs: Sequence[StoredBlob], progress: Progress) -> Removal:
        tier, result = self._open(), Removal()
        for number, blob in enumerate(blobs):
            if tier.delete(blob.name):
                result.removed += 1
                result.removed_bytes += blob.size_bytes
            else:
                result.missing += 1
            progress(number + 1, len(blobs))
        return result

    def _remove_through(
        self, link: ServerLink, blobs: Sequence[StoredBlob], progress: Progress, *, holes: bool
    ) -> Removal:
        """Tell the server, then watch its deletions arrive on the disk."""
        result = Removal()
        by_space: dict[bytes, list[bytes]] = {}
        for blob in blobs:
            by_space.setdefault(blob.name.namespace, []).append(blob.name.key)
        ordered = 0
        for space, keys in by_space.items():
            taken, kept, missing = link.evict("disk", space, keys, holes=holes)
            ordered += taken
            result.kept += kept
            result.missing += missing
        left, until_s = list(blobs), time.monotonic() + REMOVAL_WAIT_S
        while len(left) > result.kept + result.missing and time.monotonic() < until_s:
            left = [b for b, is_there in zip(left, self.contains([b.name for b in left]), strict=True) if is_there]
            progress(len(blobs) - len(left), len(blobs))
            time.sleep(0.02)
        result.removed = min(ordered, len(blobs) - len(left))
        gone_bytes = sum(blob.size_bytes for blob in blobs) - sum(blob.size_bytes for blob in left)
        result.removed_bytes = gone_bytes if result.removed else 0
        return result

    def remove_strays(self, strays: Sequence[Stray]) -> int:
        self._open()  # its sweep of temp files included
        count = 0
        for stray in strays:
            path = self.root / stray.path
            try:
                path.unlink()
            except FileNotFoundError:
                count += stray.kind == "temp"
                continue
            except OSError as exc:
                raise TierUnavailable(f"cannot be removed. path={path}: {exc}") from exc
            count += 1
        return count

    def _open(self) -> DiskTier:
        """The directory as a tier of our own.

        Raises:
            DirectoryLocked: A server or another command has it.
        """
        if self._tier is None:
            try:
                self._tier = DiskTier(self.root, self._limit_bytes or _all_of(self.root), min_free_bytes=0)
            except DirectoryLocked as exc:
                raise DirectoryLocked(f"{exc}: let the server do it, end it, or wait for the other command") from exc
        return self._tier

    # -- pins and limits ----------------------------------------------------------------------------------------------

    def pins(self) -> Mapping[BlobName, float]:
        return {name: until_s or FOR_GOOD for name, until_s in read_pins(self.root).items()}

    def pin(self, names: Iterable[BlobName], until_s: float) -> None:
        with changing_pins(self.root) as pins:
            pins.update(dict.fromkeys(names, 0.0 if until_s == FOR_GOOD else until_s))

    def unpin(self, names: Iterable[BlobName]) -> int:
        with changing_pins(self.root) as pins:
            return sum(pins.pop(name, None) is not None for name in names)

    def capacity_bytes(self) -> int | None:
        link = self.server()
        if link is None:
            return self._limit_bytes
        with link:
            disk = next((tier for tier in link.figures()["tiers"] if tier["name"] == "disk"), None)
        return None if disk is None else disk["capacity_bytes"]

    def close(self) -> None:
        if self._tier is not None:
            self._tier.close()
            self._tier = None


def read_record(digest: bytes, data: bytes | None) -> NamespaceRecord:
    """A stored record, which may have been written for people: only what it says counts."""
    if data is None:
        return NamespaceRecord(digest, None, "there is no namespace.json")
    try:
        fields = json.loads(data)
        if not isinstance(fields, dict):
            raise ConfigError("namespace.json holds no object")
        namespace = Namespace.from_fields(fields)
    except (ValueError, RecursionError) as exc:  # ConfigError is one
        return NamespaceRecord(digest, None, f"namespace.json cannot be understood: {exc}")
    if namespace.digest != digest:
        return NamespaceRecord(digest, None, f"namespace.json is that of {namespace.digest.hex()}")
    return NamespaceRecord(digest, namespace)


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise TierUnavailable(f"cannot be read. path={path}: {exc}") from exc


def _allocated(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return allocated_bytes(path.lstat())
    return 0


def _all_of(root: Path) -> int:
    """No limit but the disk's: a command that deletes must be able to open a directory of any size."""
    space = os.statvfs(root)
    return space.f_blocks * space.f_frsize + (1 << 40)


def _unplaced(exc: Exception) -> str:
    """The reason without the file's absolute place, which is told beside it."""
    return " ".join(word for word in str(exc).split(" ") if not word.startswith("path="))
