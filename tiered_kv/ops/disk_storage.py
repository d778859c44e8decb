"""Operate on a disk tier: a directory that a server may own at the same time.

Listing takes no lock and changes nothing: names and sizes come from the directory walk of the tier itself
(``tiers/disk/scan.py``), ancestry and use from the index, headers only of files that the index does not know. Changes
go through the server if one runs; otherwise the directory is opened as a tier, with its lock, so that accounts and
index stay right. What only some commands need is imported where it is used: listing is what people wait for.
"""

import contextlib
import gc
import math
import os
import stat
import threading
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tiered_kv.chunks.arena import SLAB_BYTES
from tiered_kv.errors import ConfigError, DirectoryLocked, TierUnavailable
from tiered_kv.keys.namespace import Namespace
from tiered_kv.keys.naming import SUFFIX, BlobName, relative_path
from tiered_kv.keys.stored_by import UNKNOWN
from tiered_kv.location import directory_uri
from tiered_kv.ops.blob_table import BlobTable
from tiered_kv.ops.storage import (
    FOR_GOOD,
    BaseEpochs,
    Content,
    NamespaceRecord,
    Origin,
    Progress,
    RemovalTotals,
    Storage,
    StoredBlob,
    Stray,
    deepest_first,
    no_progress,
    numbered,
    parse_digest,
)
from tiered_kv.ops.text import without_paths
from tiered_kv.server.directory import read_info
from tiered_kv.tiers.disk import marker
from tiered_kv.tiers.disk.files import allocated_bytes, mapped_errors, read_head, read_small_file
from tiered_kv.tiers.disk.index import (
    DATABASE_FILES,
    INDEX_DIRECTORY,
    LISTED_SIZE,
    LISTED_USE,
    PackedShard,
    Shard,
    read_index,
)
from tiered_kv.tiers.disk.pins import changing_pins, read_pins
from tiered_kv.tiers.disk.scan import (
    NAMESPACE_FILE,
    RECORD_BYTES_MAX,
    FoundFile,
    Kind,
    ListedDirectory,
    directories,
    reading_ahead,
    unknown_file,
)
from tiered_kv.tiers.disk.sweep import TEMP_NAME, is_own_temp_file

if TYPE_CHECKING:
    from tiered_kv.ops.server_link import ServerLink
    from tiered_kv.tiers.disk.tier import DiskTier

REMOVAL_WAIT_S: Final = 60.0
"""How long no deletion of a server shows on the disk before the command reports what is left."""

FLUSH_TAKES_S: Final = 60.0
"""An index does not have what was written in so long before its last flush ended, and may have another blob there."""

UNKNOWN_WAIT_S: Final = 5.0
"""The same where all that is left may be files that the server does not know."""


class DiskStorage(Storage):
    """Blobs below one directory.

    Threads: one at a time, but for ``read``.
    """

    kind = "disk"
    readers = 4

    def __init__(self, root: Path, *, limit_bytes: int | None = None) -> None:
        """Name the directory, which must exist; nothing is opened.

        Args:
            limit_bytes: What may be written below it where no server has a limit; None: as much as the disk holds.

        Raises:
            ConfigError: There is no such directory.
            TierUnavailable: It cannot be read.
        """
        self.uri = directory_uri(root)
        self.root = Path(os.path.realpath(root))
        self._blobs = self.root / "blobs"
        self._limit_bytes = limit_bytes
        self._tier: DiskTier | None = None
        self._opening = threading.Lock()
        if not self.root.is_dir():
            raise ConfigError(f"there is no such directory. path={root}")
        if not os.access(self.root, os.R_OK | os.X_OK):
            raise TierUnavailable(f"the directory cannot be read. path={root}")

    def server(self) -> "ServerLink | None":
        """A connection to the server that owns the directory now; None when there is none. The caller closes it."""
        if read_info(self.root) is None:
            return None
        from tiered_kv.ops.server_link import ServerLink  # noqa: PLC0415 - it takes a twentieth of a second

        return ServerLink.of_directory(self.root)

    # -- looking ------------------------------------------------------------------------------------------------------

    def look(self, progress: Progress = no_progress) -> Content:
        table = BlobTable()
        content = Content(table)
        content.unsure_since_s = self._flushed_s() - FLUSH_TAKES_S  # before the index is read
        index = self._index(content)
        content.has_uses = bool(index) or bool(content.notes)  # which say what became of the index
        shards = {f"{shard}/": packed for shard, packed in index.items()}
        counts = {shard: len(packed) for shard, packed in index.items()}
        total = sum(counts.values()) or None
        try:
            with _uncollected(), reading_ahead(self._blobs, counts) as ahead:
                pins = {name.key: until_s for name, until_s in self._pins(content).items()}
                for directory in directories(self._blobs, ahead):
                    _take(content, table, str(self._blobs), directory, shards.get(directory.path), pins)
                    progress(len(table), total)
        except OSError as exc:
            raise TierUnavailable(f"the directory cannot be listed. path={self._blobs}: {exc}") from exc
        content.strays += _temp_files(self.root / "tmp")
        content.own_bytes = sum(_allocated(path) for path in self._own_files())
        content.records = self.records()
        if not content.blobs and not content.records:
            content.notes += self._standing()
        progress(len(content.blobs), len(content.blobs))
        return content

    def _index(self, content: Content) -> Mapping[Shard, PackedShard]:
        try:
            return read_index(self.root)
        except TierUnavailable as exc:
            content.notes.append(f"times of use are those of writing, because the index cannot be read: {exc}")
            return {}

    def _flushed_s(self) -> float:
        """When the index was written last, in seconds since 1970; without one every header is read anyway."""
        files = [self.root / INDEX_DIRECTORY / name for name in DATABASE_FILES]
        return max(map(_written_s, files)) or math.inf

    def _pins(self, content: Content) -> Mapping[BlobName, float]:
        try:
            return self.pins()
        except TierUnavailable as exc:
            content.notes.append(str(exc))
            return {}

    def _own_files(self) -> Iterator[Path]:
        yield from (path for path in self.root.iterdir() if path.is_file())
        yield from (self.root / INDEX_DIRECTORY).glob("*")
        yield from self._blobs.glob(f"*/{NAMESPACE_FILE}")

    def _standing(self) -> list[str]:
        """Notes on a directory without any content of ours: after a mistyped path, "no chunks" would mislead."""
        try:
            with mapped_errors("look at", self.root):
                seen = marker.look_at(self.root)
        except TierUnavailable as exc:
            return [str(exc)]
        if seen.standing is not marker.Standing.FOREIGN:
            return []
        if os.path.lexists(self.root / marker.MARKER_FILE):
            return [seen.reason]
        why = f"is not empty and has no marker of tiered_kv ({marker.MARKER_FILE}), and nothing of ours is in it"
        return [f"the directory {why}: is it the one you mean? path={self.root}"]

    def records(self) -> dict[bytes, NamespaceRecord]:
        records = {}
        for directory in sorted(self._blobs.iterdir()) if self._blobs.is_dir() else ():
            digest = parse_digest(directory.name)
            if digest is not None and directory.is_dir():
                path = directory / NAMESPACE_FILE
                try:
                    records[digest] = NamespaceRecord.parse(digest, _content(path), _written_s(path))
                except TierUnavailable as exc:  # a directory or a FIFO of that name, or one of 20 GB
                    records[digest] = NamespaceRecord(digest, None, str(exc))
        return records

    def contains(self, names: Sequence[BlobName]) -> list[bool]:
        return [(self._blobs / relative_path(name)).is_file() for name in names]

    def read(self, blob: StoredBlob | BlobName, length: int | None = None) -> bytes | None:
        name = blob.name if isinstance(blob, StoredBlob) else blob
        path = self._blobs / relative_path(name)
        try:
            if length is not None:
                return read_head(path, length)
            return read_small_file(path, SLAB_BYTES)
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise TierUnavailable(f"the blob cannot be read. path={path}: {exc}") from exc

    def path(self, name: BlobName) -> str:
        return f"blobs/{relative_path(name)}"

    def record_path(self, namespace: bytes) -> str:
        return f"blobs/{namespace.hex()}/{NAMESPACE_FILE}"

    def is_served(self) -> bool:
        link = self.server() if self._tier is None else None
        if link is not None:
            link.close()
        return link is not None

    def live_namespaces(self) -> set[bytes]:
        link = self.server() if self._tier is None else None
        if link is None:
            return set()
        with link:
            return {bytes.fromhex(session.namespace) for session in link.stat().sessions if session.namespace}

    def epochs(self) -> BaseEpochs:
        from tiered_kv.server.epochs import EPOCHS_FILE, read_epochs  # noqa: PLC0415 - for `gc` only

        try:
            numbers = read_epochs(self.root)
        except ValueError as exc:
            raise TierUnavailable(
                "epochs.json cannot be understood, and it says what resets retired: put a sound copy of it back, or "
                "start a server there, which begins afresh and finds nothing of what is stored. "
                f"path={self.root / EPOCHS_FILE}: {exc}"
            ) from exc
        return BaseEpochs("base", numbers, numbers.pop("", 0))

    # -- changing -----------------------------------------------------------------------------------------------------

    def write(self, name: BlobName, blob: memoryview) -> bool:
        tier = self._open()
        if tier.contains(name):
            return False
        tier.put(name, blob)
        return True

    def write_record(self, namespace: Namespace, first_stored_by: str = UNKNOWN) -> None:
        self._open().describe(namespace.digest, namespace.described(first_stored_by))

    def begin_with(self, base: bytes, number: int) -> int | None:
        from tiered_kv.server.epochs import begin_directory_with  # noqa: PLC0415 - for `cp` only

        self._open()
        is_used = any(self._has_other(record, base, number) for record in self.records().values())
        return begin_directory_with(self.root, base, number, is_used=is_used)

    def _has_other(self, record: NamespaceRecord, base: bytes, number: int) -> bool:
        """Whether chunks of this model and of another epoch of the directory lie there; without a record they may."""
        if record.namespace is None:
            return any((self._blobs / record.digest.hex()).glob(f"*/*{SUFFIX}"))
        # A bucket's epochs do not count: the disk stood in front of it. Nor does this number: it was copied before.
        found = numbered(record.namespace, "base")
        return found is not None and found[0] == base and found[1] != number

    def remove(
        self, blobs: Sequence[StoredBlob], progress: Progress = no_progress, *, holes: bool = False
    ) -> RemovalTotals:
        ordered = deepest_first(blobs)
        link = self.server() if self._tier is None else None
        if link is None:
            return self._remove_alone(ordered, progress)
        with link:
            return self._remove_through(link, ordered, progress, holes=holes)

    def _remove_alone(self, blobs: Sequence[StoredBlob], progress: Progress) -> RemovalTotals:
        tier, result = self._open(), RemovalTotals()
        for number, blob in enumerate(blobs):
            if tier.delete(blob.name):
                result.removed += 1
                result.removed_bytes += blob.size_bytes
            else:
                result.missing += 1
            progress(number + 1, len(blobs))
        return result

    def _remove_through(
        self, link: "ServerLink", blobs: Sequence[StoredBlob], progress: Progress, *, holes: bool
    ) -> RemovalTotals:
        """Tell the server, then watch its deletions arrive on the disk, where it may store the same chunk again."""
        before = self._files_of(blobs)
        there = [blob for blob in blobs if blob.name in before]
        by_space: dict[bytes, list[bytes]] = {}
        for blob in blobs:  # also what has vanished: to the server it may be there, and needed
            by_space.setdefault(blob.name.namespace, []).append(blob.name.key)
        kept = unknown = 0
        for space, keys in by_space.items():
            answer = link.evict("disk", space, keys, holes=holes)
            kept += answer.kept
            unknown += answer.missing
        left = self._wait_gone(there, before, kept + unknown, progress)
        if unknown:  # it may have evicted these itself meanwhile, while others are still going
            left = self._wait_gone(left, before, kept, progress, UNKNOWN_WAIT_S)
        kept = min(kept, len(left))
        return _totals(there, left, kept=kept, missing=len(blobs) - len(there), failed=len(left) - kept)

    def erase(
        self, blobs: Sequence[StoredBlob], origin: Origin, namespace: bytes | None, progress: Progress = no_progress
    ) -> RemovalTotals:
        """See ``Remover.erase``. A server that runs drops what it has not written yet, too."""
        link = self.server() if self._tier is None else None
        if link is None:
            return super().erase(blobs, origin, namespace, progress)
        with link:
            self.unpin([blob.name for blob in blobs if blob.pinned_until_s])
            before = self._files_of(blobs)
            there = [blob for blob in blobs if blob.name in before]
            ordered = link.erase("disk", namespace or b"", origin)
            left, kept = self._wait_gone(there, before, ordered.kept, progress), ordered.kept
            known = len(there) - len(left)  # of what the server removed; the rest of that was not listed
            # What the server attributes to another origin than its file does, and files it does not know; only once
            # no chunk is kept because it is in use, which would be removed with them.
            for blob in deepest_first(left) if not ordered.kept else ():
                answer = link.evict("disk", blob.name.namespace, [blob.name.key], holes=False)
                kept += answer.kept
                if answer.missing:
                    self.discard([blob.name])
            left = self._wait_gone(left, before, kept, progress)
        failed = max(0, len(left) - kept)
        if failed and not ordered.kept:
            failed, kept = len(left), 0  # none was in use: a chunk is kept because one behind it could not be deleted
        result = _totals(there, left, kept=kept, failed=failed)
        result.removed += max(0, ordered.removed - known - failed)
        return result

    def _wait_gone(
        self,
        blobs: Sequence[StoredBlob],
        before: Mapping[BlobName, tuple[int, int]],
        staying: int,
        progress: Progress,
        wait_s: float | None = None,
    ) -> list[StoredBlob]:
        """Watch a server's deletions arrive, until no more than ``staying`` are left; returns those."""
        left, wait_s = list(blobs), REMOVAL_WAIT_S if wait_s is None else wait_s
        until_s = time.monotonic() + wait_s
        while len(left) > staying and time.monotonic() < until_s:
            seen = len(left)
            left = [blob for blob in left if self._file_of(blob.name) == before[blob.name]]
            if len(left) < seen:  # a million take longer
                until_s = time.monotonic() + wait_s
            progress(len(blobs) - len(left), len(blobs))
            time.sleep(0.02)
        return left

    def _files_of(self, blobs: Iterable[StoredBlob]) -> dict[BlobName, tuple[int, int]]:
        return {blob.name: file for blob in blobs if (file := self._file_of(blob.name)) is not None}

    def _file_of(self, name: BlobName) -> tuple[int, int] | None:
        """Identifies a blob's file, unlike a later one of the same name; None: there is no file.

        Raises:
            TierUnavailable: Whether there is one cannot be said: what is not seen must not be told to be gone.
        """
        path = self._blobs / relative_path(name)
        try:
            status = os.stat(path, follow_symlinks=False)
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise TierUnavailable(f"whether a chunk is gone cannot be seen. path={path}: {exc.strerror}") from exc
        return status.st_ino, status.st_mtime_ns

    def discard(self, names: Sequence[BlobName]) -> None:
        for name in names:
            if self._tier is not None:
                self._tier.delete(name)
            else:
                _unlink(self._blobs / relative_path(name))

    def remove_namespace(self, namespace: bytes) -> bool:
        self._open()
        directory = self._blobs / namespace.hex()
        try:
            below = sorted(directory.rglob("*"), reverse=True)  # what is in a directory before the directory
            record = directory / NAMESPACE_FILE
            if any(path.is_symlink() or not path.is_dir() for path in below if path != record):
                return False
            _unlink(record)
            for path in (*below, directory):
                if path != record:
                    path.rmdir()
        except FileNotFoundError:
            return False
        except OSError as exc:
            raise TierUnavailable(f"cannot be removed. path={directory}: {exc}") from exc
        return True

    def remove_strays(self, strays: Sequence[Stray]) -> RemovalTotals:
        """See ``Remover.remove_strays``; of temp files ours only, which the open may have removed already."""
        self._open()
        owners, result = self._claim(), RemovalTotals()
        for stray in strays:
            path = self.root / stray.path
            try:
                is_gone, is_ours = False, stray.kind != "temp" or is_own_temp_file(path.name, path.lstat(), owners)
            except FileNotFoundError:
                is_gone, is_ours = stray.kind == "temp", False
            if is_gone or (is_ours and _unlink(path)):
                result.removed += 1
                result.removed_bytes += stray.size_bytes
            elif not is_ours and os.path.lexists(path):
                result.kept += 1
        return result

    def _open(self) -> "DiskTier":
        """The directory as a tier of our own.

        Raises:
            DirectoryLocked: A server or another command has it.
        """
        with self._opening:
            if self._tier is None:
                from tiered_kv.tiers.disk.tier import DiskTier  # noqa: PLC0415 - for changes only

                try:
                    self._tier = DiskTier(self.root, self._limit_bytes or _all_of(self.root), min_free_bytes=0)
                except DirectoryLocked as exc:
                    hint = "let the server do it, end it, or wait for the other command"
                    raise DirectoryLocked(f"{exc}: {hint}") from exc
            return self._tier

    # -- pins and limits ----------------------------------------------------------------------------------------------

    def pins(self) -> Mapping[BlobName, float]:
        return {name: until_s or FOR_GOOD for name, until_s in read_pins(self.root).items()}

    def pin(self, names: Iterable[BlobName], until_s: float) -> None:
        self._claim()
        with changing_pins(self.root) as pins:
            pins.update(dict.fromkeys(names, 0.0 if until_s == FOR_GOOD else until_s))

    def unpin(self, names: Iterable[BlobName]) -> int:
        self._claim()
        with changing_pins(self.root) as pins:
            return sum(pins.pop(name, None) is not None for name in names)

    def _claim(self) -> frozenset[int]:
        """Make sure that the directory is ours before the first file is written without its tier."""
        with mapped_errors("open", self.root):
            return marker.claim(self.root)

    def capacity_bytes(self) -> int | None:
        link = self.server()
        if link is None:
            return self._limit_bytes
        with link:
            disk = next((tier for tier in link.stat().tiers if tier.name == "disk"), None)
        return None if disk is None else disk.capacity_bytes

    def close(self) -> None:
        if self._tier is not None:
            self._tier.close()
            self._tier = None


def _totals(
    blobs: Sequence[StoredBlob], left: Sequence[StoredBlob], *, kept: int, failed: int, missing: int = 0
) -> RemovalTotals:
    """What a server did with blobs that were there when it was told."""
    size_bytes = sum(blob.size_bytes for blob in blobs) - sum(blob.size_bytes for blob in left)
    return RemovalTotals(len(blobs) - len(left), size_bytes, kept, missing, failed)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """A listing makes a million objects that all stay: to look for garbage among them takes a tenth of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _take(
    content: Content,
    table: BlobTable,
    root: str,
    directory: ListedDirectory,
    shard: PackedShard | None,
    pins: Mapping[bytes, float],
) -> None:
    """Add the files of one directory to a listing, those that are as the index says column by column.

    Args:
        root: Path of ``blobs``.
        shard: What the index says of the directory; None: nothing.
        pins: By key.
    """
    entries, known = directory.entries, {} if shard is None else shard.listed()
    # A million in all: nothing is called for each but what it takes, and what a directory has is added at once.
    rows, sizes, times = list(map(known.get, entries.keys())), entries.sizes, entries.written_s
    is_same = [row is not None and row[LISTED_SIZE] == size for row, size in zip(rows, sizes, strict=True)]
    if not all(is_same):
        for row, is_known, (key, size_bytes, written_s) in zip(rows, is_same, entries.files(), strict=True):
            if not is_known and (found := unknown_file(root, directory.path, key, size_bytes, written_s)) is not None:
                _take_other(content, table, found, 0.0 if row is None else row[LISTED_USE], pins)
        sizes, times = array("q", compress(sizes, is_same)), array("d", compress(times, is_same))
    same = [row for row, is_known in zip(rows, is_same, strict=True) if row is not None and is_known]
    if shard is not None and same:
        start = len(table)
        keys, parents, depths, _, packed, uses = zip(*same, strict=True)
        used = [used_s if used_s > written_s else written_s for used_s, written_s in zip(uses, times, strict=True)]
        table.extend(shard.namespace, keys, parents, depths, sizes, times, used, shard.origins(packed))
        if pins:
            table.pinned.update((row, pins[key]) for row, key in enumerate(keys, start) if key in pins)
    for stray in directory.strays:
        _take_other(content, table, stray, 0.0, pins)


def _take_other(
    content: Content, table: BlobTable, found: FoundFile, used_s: float, pins: Mapping[bytes, float]
) -> None:
    """A file that the index does not know, or not as it is; ``used_s``: when it was used last, as the index says."""
    kind, name, size_bytes, written_s = found.kind, found.name, found.size_bytes, found.written_s
    if kind is Kind.READ and name is not None and found.header is not None:
        record, until_s = found.header.record, pins.get(name.key, 0.0)
        used_s = max(written_s, used_s)
        table.append(StoredBlob(name, size_bytes, written_s, used_s, until_s, record.tag, record.stored_by))
        return
    word, reason = "damaged", without_paths(found.reason)
    if kind is Kind.STRAY:
        word, reason = "name", "not a name that a blob has"
    elif isinstance(found.reason, OSError):
        word, reason = "unreadable", f"cannot be read: {found.reason.strerror}"
    elif kind is Kind.FOREIGN:
        word = "foreign"
    content.strays.append(Stray(f"blobs/{found.relative}", size_bytes, written_s, word, reason))


def _temp_files(directory: Path) -> Iterator[Stray]:
    for path in directory.iterdir() if directory.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            kind, reason = "name", "not a name that a temp file of ours has"
            if TEMP_NAME.fullmatch(path.name) is not None and stat.S_ISREG(status.st_mode):
                kind, reason = "temp", "a write that is going on, or was cut off"
            yield Stray(f"tmp/{path.name}", allocated_bytes(status), status.st_mtime, kind, reason)


def _allocated(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return allocated_bytes(path.lstat())
    return 0


def _unlink(path: Path) -> bool:
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    except OSError as exc:
        raise TierUnavailable(f"cannot be removed. path={path}: {exc}") from exc
    return True


def _content(path: Path) -> bytes | None:
    try:
        return read_small_file(path, RECORD_BYTES_MAX)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise TierUnavailable(f"cannot be read. path={path}: {exc}") from exc


def _written_s(path: Path) -> float:
    with contextlib.suppress(OSError):  # there is none: its content is reported as missing
        return path.lstat().st_mtime
    return 0.0


def _all_of(root: Path) -> int:
    """No limit but the disk's: a command that deletes must be able to open a directory of any size."""
    space = os.statvfs(root)
    return space.f_blocks * space.f_frsize + (1 << 40)
