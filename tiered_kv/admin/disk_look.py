"""A look at everything below a disk directory, without a lock and without changing anything.

Owns how a listing is made quick: names and sizes come from directory entries, ancestry and use from the index that a
server keeps beside them, so that headers are read only of files that the index does not know. 100,000 indexed blobs
take less than a second (benchmarks/cli.py); half of it are the kernel's answers to ``stat``. Called by
``disk_storage.py``.
"""

import contextlib
import gc
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from tiered_kv.admin.storage import FOR_GOOD, Content, Progress, StoredBlob, Stray
from tiered_kv.admin.words import without_paths
from tiered_kv.errors import ChunkCorrupt, ChunkMismatch, TierUnavailable
from tiered_kv.keys.naming import SUFFIX, BlobName, parse_path
from tiered_kv.tiers.disk_index import INDEX_DIRECTORY, IndexRow, Shard, ShardRows, read_index
from tiered_kv.tiers.disk_io import allocated_bytes
from tiered_kv.tiers.disk_pins import read_pins
from tiered_kv.tiers.disk_scan import NAMESPACE_FILE, read_named_header
from tiered_kv.tiers.disk_sweep import TEMP_NAME

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def look_at(root: Path, progress: Progress) -> Content:
    """Everything in the directory but its records.

    Raises:
        TierUnavailable: It cannot be listed.
    """
    with _uncollected():
        look = _Look(root)
        try:
            look.take_blobs(progress)
        except OSError as exc:
            raise TierUnavailable(f"the directory cannot be listed. path={root / 'blobs'}: {exc}") from exc
    look.take_temp_files()
    look.content.own_bytes = sum(_allocated(path) for path in _own_files(root))
    return look.content


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


class _Look:
    """One look at one directory."""

    def __init__(self, root: Path) -> None:
        self.content = Content()
        self._root = root
        self._index = self._read_index()
        self._pins = self._pinned_until()

    def _read_index(self) -> ShardRows:
        try:
            return read_index(self._root)
        except TierUnavailable as exc:
            self.content.notes.append(f"times of use are those of writing, because the index cannot be read: {exc}")
            return {}

    def _pinned_until(self) -> dict[bytes, float]:
        try:
            return {name.key: until_s or FOR_GOOD for name, until_s in read_pins(self._root).items()}
        except TierUnavailable as exc:
            self.content.notes.append(str(exc))
            return {}

    def take_blobs(self, progress: Progress) -> None:
        total = sum(len(rows) for rows in self._index.values()) or None
        blobs = self._root / "blobs"
        pending = [("", str(blobs))] if blobs.is_dir() else []
        while pending:
            prefix, directory = pending.pop()
            try:
                descriptor = os.open(directory, _DIRECTORY)
            except FileNotFoundError:
                continue  # removed while we list
            try:
                # By descriptor: the kernel then looks up a name, not a path, which takes a third off.
                with os.scandir(descriptor) as entries:
                    for entry, row in self._take_known(prefix, entries):
                        path = f"{directory}/{entry.name}"
                        if entry.is_dir(follow_symlinks=False):
                            pending.append((f"{prefix}{entry.name}/", path))
                        elif entry.name != NAMESPACE_FILE:
                            self._take_unknown(f"{prefix}{entry.name}", path, entry, row)
            finally:
                os.close(descriptor)
            progress(len(self.content.blobs), total)

    def _take_known(
        self, prefix: str, entries: "Iterator[os.DirEntry[str]]"
    ) -> "Iterator[tuple[os.DirEntry[str], IndexRow | None]]":
        """Take the blobs of a directory that are as the index says; yields the other entries, with their rows."""
        shard = _shard_of(prefix)
        rows = self._index.pop(shard, {}) if shard is not None else {}
        known = {f"{key.hex()}{SUFFIX}": row for key, row in rows.items()}
        take, pins = self.content.blobs.append, self._pins
        for entry in entries:
            row = known.get(entry.name)
            if row is None or shard is None:
                yield entry, None
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # evicted while we list
            key, parent, _, chunk_index, size_bytes, tag, stored_by, _, used = row
            if allocated_bytes(status) != size_bytes or not stat.S_ISREG(status.st_mode):
                yield entry, row
                continue
            written_s = status.st_mtime
            used_s = float(used) if used > written_s else written_s
            name = BlobName(shard.namespace, key, parent, chunk_index)
            take(StoredBlob(name, size_bytes, written_s, used_s, pins.get(key, 0.0), tag, stored_by))

    def _take_unknown(self, relative: str, path: str, entry: "os.DirEntry[str]", row: IndexRow | None) -> None:
        """A file that the index does not know, or knows otherwise: its header tells what it is."""
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            return  # evicted while we list
        size, written_s = allocated_bytes(status), status.st_mtime
        name = parse_path(relative)
        if name is None or not stat.S_ISREG(status.st_mode):
            self._stray(relative, status, "name", "not a name that a blob has")
            return
        try:
            header = read_named_header(name, path)
        except FileNotFoundError:
            return
        except (ChunkMismatch, ChunkCorrupt) as exc:
            self._stray(
                relative, status, "foreign" if isinstance(exc, ChunkMismatch) else "damaged", without_paths(exc)
            )
            return
        except OSError as exc:
            self._stray(relative, status, "damaged", f"cannot be read: {exc.strerror}")
            return
        whole = BlobName(name.namespace, name.key, header.parent, header.chunk_index)
        used_s = max(written_s, 0.0 if row is None else float(row.used_s))
        pinned_until_s = self._pins.get(name.key, 0.0)
        whose = header.tag, header.stored_by
        self.content.blobs.append(StoredBlob(whole, size, written_s, used_s, pinned_until_s, *whose))

    def _stray(self, relative: str, status: os.stat_result, kind: str, reason: str) -> None:
        stray = Stray(f"blobs/{relative}", allocated_bytes(status), status.st_mtime, kind, reason)
        self.content.strays.append(stray)

    def take_temp_files(self) -> None:
        temp = self._root / "tmp"
        for path in temp.iterdir() if temp.is_dir() else ():
            with contextlib.suppress(FileNotFoundError):
                status = path.lstat()
                kind, reason = "name", "not a name that a temp file of ours has"
                if TEMP_NAME.fullmatch(path.name) is not None and stat.S_ISREG(status.st_mode):
                    kind, reason = "temp", "a write that is going on, or was cut off"
                self.content.strays.append(
                    Stray(f"tmp/{path.name}", allocated_bytes(status), status.st_mtime, kind, reason)
                )


def _shard_of(prefix: str) -> Shard | None:
    """The shard whose blobs a directory holds, by its path below ``blobs``."""
    name = parse_path(f"{prefix}{prefix[-3:-1]}{'0' * 30}{SUFFIX}")
    return None if name is None else Shard.of(name)


def _own_files(root: Path) -> Iterator[Path]:
    yield from (path for path in root.iterdir() if path.is_file())
    yield from (root / INDEX_DIRECTORY).glob("*")
    yield from (root / "blobs").glob(f"*/{NAMESPACE_FILE}")


def _allocated(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return allocated_bytes(path.lstat())
    return 0
