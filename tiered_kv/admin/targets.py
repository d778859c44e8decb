"""Where chunks are copied to: a tier that is written directly, or a directory through the server that owns it.

Made for ``copying.py``; called by ``cli/warm.py``.
"""

import os
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tiered_kv.admin.copying import Target
from tiered_kv.admin.disk_storage import DiskStorage
from tiered_kv.admin.eviction import used_bytes
from tiered_kv.admin.open import open_storage
from tiered_kv.admin.storage import NamespaceRecord, Storage
from tiered_kv.chunks.header import ParsedHeader
from tiered_kv.config import MIN_FREE_BYTES_DEFAULT, Config
from tiered_kv.errors import CapacityExceeded, ConfigError
from tiered_kv.keys.naming import BlobName

DIRECTORY_MODE: Final = 0o700


class StorageTarget:
    """A tier that is written directly."""

    def __init__(self, storage: Storage, room_bytes: int | None) -> None:
        """Take an open storage.

        Args:
            room_bytes: What may still be written; None: the storage knows by itself.
        """
        self._storage = storage
        self._room_bytes = room_bytes
        self._lock = threading.Lock()

    def begin(self, record: NamespaceRecord) -> str:
        """Write the namespace's record before its first blob; blobs without one are copied, too."""
        if record.namespace is not None:
            self._storage.write_record(record.namespace, record.first_stored_by)
        return ""

    def has(self, name: BlobName) -> bool:
        return self._storage.contains([name])[0]

    def put(self, name: BlobName, blob: memoryview, parsed: ParsedHeader) -> bool:
        del parsed
        self._reserve(len(blob))
        is_new = self._storage.write(name, blob)
        if not is_new:
            self._reserve(-len(blob))
        return is_new

    def _reserve(self, size_bytes: int) -> None:
        with self._lock:
            if self._room_bytes is None:
                return
            if size_bytes > self._room_bytes:
                raise CapacityExceeded(
                    f"only {max(self._room_bytes, 0)} bytes were left there, and a copy evicts nothing"
                )
            self._room_bytes -= size_bytes

    def end(self) -> Collection[bytes]:
        return ()


@contextmanager
def opened_target(uri: str, settings: Mapping[str, object], source: Config) -> Iterator[tuple[Storage, Target]]:
    """A tier to copy to; a directory that does not exist is made.

    Args:
        source: Settings of the tier that is copied from: a server in front of that very object store is joined by them.

    Raises:
        ConfigError: The URI or a setting is wrong, or a server runs there that cannot be joined.
        TierUnavailable: The tier cannot be reached.
    """
    config = Config.from_mapping({"storage_uri": uri} | dict(settings))
    location = config.location()
    if location.kind == "disk":
        _make_directory(Path(location.path))
    with open_storage(uri, settings, to_change=True) as storage:
        link = storage.server() if isinstance(storage, DiskStorage) else None
        if link is None:
            yield storage, StorageTarget(storage, _room_bytes(storage, config))
            return
        assert isinstance(storage, DiskStorage)
        from tiered_kv.admin.through_server import ServerTarget  # noqa: PLC0415 - only beside a server
        from tiered_kv.server.paths import read_info  # noqa: PLC0415 - as above

        with link:
            info = read_info(storage.root)
            if info is None:
                raise ConfigError("the directory's server was just ending: say it again")
            joining = _joining(link.stat().storage, storage.root, f"unix://{info.socket}", source)
            target = ServerTarget(storage, link, joining)
            try:
                yield storage, target
            finally:
                target.close()


def _make_directory(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(DIRECTORY_MODE, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"the directory cannot be made: {exc.strerror}. path={path}") from exc


def _room_bytes(storage: Storage, config: Config) -> int | None:
    """What a copy may write where nothing else holds a limit against it."""
    if isinstance(storage, DiskStorage):
        if config.disk_bytes is not None:
            return None  # the directory is opened with it
        space = os.statvfs(storage.root)
        return space.f_bavail * space.f_frsize - MIN_FREE_BYTES_DEFAULT
    capacity = storage.capacity_bytes()
    return None if capacity is None else capacity - used_bytes(storage, storage.look())


def _joining(storage: str, root: Path, server: str, source: Config) -> Config:
    """Settings to join the server of a directory with: it refuses who names another storage than it has."""
    if storage.startswith("file://"):
        return Config.from_mapping({"storage_uri": f"file://{root}", "server": server})
    given: dict[str, object] = {"storage_uri": storage}
    if str(source.location()) == storage:
        given = {"storage_uri": source.storage_uri, "storage_options": source.storage_options or None}
    return Config.from_mapping(given | {"disk_path": str(root), "server": server})
