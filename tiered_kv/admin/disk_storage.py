"""The disk tier as an operator sees it: a directory that a server may own at the same moment.

Looking is done by ``disk_look.py``. Changes go through the server if one runs; otherwise the directory is opened as a
tier of its own, with its lock, so that accounts and index stay right. What only changes need is imported by them:
looking is what people wait for.
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tiered_kv.admin.disk_look import look_at
from tiered_kv.admin.epochs import BaseEpochs
from tiered_kv.admin.storage import (
    FOR_GOOD,
    Content,
    NamespaceRecord,
    Origin,
    Progress,
    Removal,
    Storage,
    StoredBlob,
    Stray,
    no_progress,
)
from tiered_kv.chunks.arena import SLAB_BYTES
from tiered_kv.errors import ConfigError, DirectoryLocked, TierUnavailable
from tiered_kv.keys.namespace import Namespace
from tiered_kv.keys.naming import BlobName, relative_path
from tiered_kv.keys.stored_by import UNKNOWN, shared_line
from tiered_kv.server.paths import read_info
from tiered_kv.tiers.disk_io import mapped_errors, read_head, read_small_file
from tiered_kv.tiers.disk_pins import changing_pins, read_pins
from tiered_kv.tiers.disk_scan import NAMESPACE_FILE, RECORD_BYTES_MAX
from tiered_kv.tiers.disk_sweep import is_own_temp_file

if TYPE_CHECKING:
    from tiered_kv.admin.server_link import ServerLink
    from tiered_kv.tiers.disk import DiskTier

REMOVAL_WAIT_S: Final = 60.0
"""How long a server may take to delete what it was told to delete before the command stops to watch."""


class DiskStorage(Storage):
    """Blobs below one directory.

    Threads: one at a time, but for ``read``.
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
        self._opening = threading.Lock()
        if not self.root.is_dir():
            raise ConfigError(f"there is no such directory. path={root}")
        if not os.access(self.root, os.R_OK | os.X_OK):
            raise TierUnavailable(f"the directory cannot be read. path={root}")

    def server(self) -> "ServerLink | None":
        """A connection to the server that owns the directory now; None when there is none. The caller closes it."""
        if read_info(self.root) is None:
            return None
        from tiered_kv.admin.server_link import ServerLink  # noqa: PLC0415 - it takes a twentieth of a second

        return ServerLink.of_directory(self.root)

    # -- looking ------------------------------------------------------------------------------------------------------

    def look(self, progress: Progress = no_progress) -> Content:
        content = look_at(self.root, progress)
        content.records = self.records()
        progress(len(content.blobs), len(content.blobs))
        return content

    def records(self) -> dict[bytes, NamespaceRecord]:
        records = {}
        for directory in sorted(self._blobs.iterdir()) if self._blobs.is_dir() else ():
            try:
                digest = bytes.fromhex(directory.name)
            except ValueError:
                continue
            if len(digest) == 16 and directory.is_dir():
                path = directory / NAMESPACE_FILE
                try:
                    records[digest] = read_record(digest, _content(path), _written_s(path))
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
        from tiered_kv.server.epochs import read_epochs  # noqa: PLC0415 - for `gc` only

        try:
            numbers = read_epochs(self.root)
        except ValueError as exc:
            raise TierUnavailable(f"epochs.json cannot be understood: {exc}") from exc
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
        self, link: "ServerLink", blobs: Sequence[StoredBlob], progress: Progress, *, holes: bool
    ) -> Removal:
        """Tell the server, then watch its deletions arrive on the disk, where it may store the same chunk again."""
        result = Removal()
        before = {blob.name: self._file_of(blob.name) for blob in blobs}
        by_space: dict[bytes, list[bytes]] = {}
        for blob in blobs:
            by_space.setdefault(blob.name.namespace, []).append(blob.name.key)
        ordered = 0
        for space, keys in by_space.items():
            taken, kept, missing = link.evict("disk", space, keys, holes=holes)
            ordered += taken
            result.kept += kept
            result.missing += missing
        left = self._wait_gone(blobs, before, result.kept + result.missing, progress)
        result.removed = min(ordered, len(blobs) - len(left))
        gone_bytes = sum(blob.size_bytes for blob in blobs) - sum(blob.size_bytes for blob in left)
        result.removed_bytes = gone_bytes if result.removed else 0
        return result

    def erase(
        self, blobs: Sequence[StoredBlob], origin: Origin, namespace: bytes | None, progress: Progress = no_progress
    ) -> Removal:
        """See ``Storage.erase``. A server that runs drops what it has not written yet, too."""
        link = self.server() if self._tier is None else None
        if link is None:
            return super().erase(blobs, origin, namespace, progress)
        with link:
            self.unpin([blob.name for blob in blobs if blob.pinned_until_s])
            before = {blob.name: self._file_of(blob.name) for blob in blobs}
            removed, kept, _ = link.erase("disk", namespace or b"", origin)
            left = self._wait_gone(blobs, before, kept, progress)
            # What the server has as another's than its file says, and what somebody has put there behind its back;
            # once nothing stays for its own sake, which would go with it.
            for blob in sorted(left, key=lambda blob: -blob.name.chunk_index) if not kept else ():
                taken, used, missing = link.evict("disk", blob.name.namespace, [blob.name.key], holes=False)
                removed, kept = removed + taken, kept + used
                if missing:
                    self.discard([blob.name])
            left = self._wait_gone(left, before, kept, progress)
        result = Removal(max(removed, len(blobs) - len(left)), kept=max(kept, len(left)))
        result.removed_bytes = sum(blob.size_bytes for blob in blobs) - sum(blob.size_bytes for blob in left)
        return result

    def _wait_gone(
        self,
        blobs: Sequence[StoredBlob],
        before: Mapping[BlobName, tuple[int, int] | None],
        staying: int,
        progress: Progress,
    ) -> list[StoredBlob]:
        """Watch a server's deletions arrive, until no more than ``staying`` are left; returns those."""
        left, until_s = list(blobs), time.monotonic() + REMOVAL_WAIT_S
        while len(left) > staying and time.monotonic() < until_s:
            left = [b for b in left if (now := self._file_of(b.name)) is not None and now == before[b.name]]
            progress(len(blobs) - len(left), len(blobs))
            time.sleep(0.02)
        return left

    def _file_of(self, name: BlobName) -> tuple[int, int] | None:
        """What tells a blob's file from one that is stored under its name later; None: there is none."""
        try:
            status = os.stat(self._blobs / relative_path(name), follow_symlinks=False)
        except OSError:
            return None
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

    def remove_strays(self, strays: Sequence[Stray]) -> int:
        """See ``Storage.remove_strays``; of temp files ours only, which the open may have removed already."""
        self._open()
        owners, count = self._claim(), 0
        for stray in strays:
            path = self.root / stray.path
            try:
                is_ours = stray.kind != "temp" or is_own_temp_file(path.name, path.lstat(), owners)
            except FileNotFoundError:
                count += stray.kind == "temp"
                continue
            if is_ours:
                count += _unlink(path)
        return count

    def _open(self) -> "DiskTier":
        """The directory as a tier of our own.

        Raises:
            DirectoryLocked: A server or another command has it.
        """
        with self._opening:
            if self._tier is None:
                from tiered_kv.tiers.disk import DiskTier  # noqa: PLC0415 - for changes only

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
        from tiered_kv.tiers.disk_marker import claim  # noqa: PLC0415 - for changes only

        with mapped_errors("open", self.root):
            return claim(self.root)

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


def read_record(digest: bytes, data: bytes | None, written_s: float = 0.0) -> NamespaceRecord:
    """A stored record, which may have been written for people: only what it says counts."""
    if data is None:
        return NamespaceRecord(digest, None, "there is no namespace.json")
    try:
        namespace, first = Namespace.from_described(data)
    except ConfigError as exc:
        return NamespaceRecord(digest, None, f"namespace.json cannot be understood: {exc}", written_s)
    if namespace.digest != digest:
        return NamespaceRecord(digest, None, f"namespace.json is that of {namespace.digest.hex()}", written_s)
    return NamespaceRecord(digest, namespace, written_s=written_s, first_stored_by=_line(first))


def _line(value: object) -> str:
    """Who stored there first, as somebody wrote it down; what is none counts as not said."""
    try:
        return shared_line(value) if isinstance(value, str) else UNKNOWN
    except ValueError:
        return UNKNOWN


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
    with contextlib.suppress(OSError):  # there is none: told by its content
        return path.lstat().st_mtime
    return 0.0


def _all_of(root: Path) -> int:
    """No limit but the disk's: a command that deletes must be able to open a directory of any size."""
    space = os.statvfs(root)
    return space.f_blocks * space.f_frsize + (1 << 40)
