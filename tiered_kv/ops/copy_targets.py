"""Targets of a copy: a tier that is written directly, or a directory through its server.

Made for ``copying.py``; called by ``cli/warm.py``.
"""

import os
import threading
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from tiered_kv.chunks.header import ParsedHeader
from tiered_kv.config import MIN_FREE_BYTES_DEFAULT, Config, size_text
from tiered_kv.errors import CapacityExceeded, ChunkMismatch, ConfigError, TierUnavailable
from tiered_kv.keys.namespace import Namespace
from tiered_kv.keys.naming import BlobName
from tiered_kv.keys.stored_by import stored_by
from tiered_kv.location import Location, directory_uri
from tiered_kv.ops.copying import Target
from tiered_kv.ops.disk_storage import DiskStorage
from tiered_kv.ops.eviction import used_bytes
from tiered_kv.ops.open import open_storage
from tiered_kv.ops.server_link import ServerLink
from tiered_kv.ops.storage import NamespaceRecord, Storage
from tiered_kv.server import protocol as m
from tiered_kv.server.client import SchedulerClient, SessionInfo
from tiered_kv.server.directory import read_info
from tiered_kv.server.members import recorded_geometry
from tiered_kv.server.worker_client import WorkerClient, pages_on_the_wire
from tiered_kv.tiering.slots import SLOTS_PER_SLAB_MAX
from tiered_kv.tiering.types import SlotId
from tiered_kv.tiers.disk.files import DIRECTORY_MODE, free_bytes
from tiered_kv.version import __version__


class StorageTarget:
    """A tier that is written directly."""

    def __init__(self, storage: Storage, room_bytes: int | None) -> None:
        """Take an open storage.

        Args:
            room_bytes: What may still be written; None: the storage knows by itself.
        """
        is_disk = isinstance(storage, DiskStorage)
        kept = size_text(MIN_FREE_BYTES_DEFAULT)
        self._limit = f", less {kept} that stay free on a disk without --set disk_bytes=SIZE" if is_disk else ""
        self.uri = storage.uri
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
                    f"only {max(self._room_bytes, 0)} bytes were left there{self._limit}, and a copy evicts nothing"
                )
            self._room_bytes -= size_bytes

    def end(self) -> Collection[bytes]:
        return ()


def check_apart(source: Location, target: Location) -> None:
    """Refuse a target that is the source, or a directory in it: the source is only read.

    A prefix below the source's is let be: that is how a bucket's content moves to a prefix of its own.

    Raises:
        ConfigError: It is.
    """
    outer, inner = _directory(source), _directory(target)
    if inner == outer if outer is not None else source.identity == target.identity:
        raise ConfigError("source and target are the same tier")
    if outer is not None and inner is not None and outer in inner.parents:
        raise ConfigError(f"the target lies in the source, which is only read: name a place beside it. path={inner}")


def _directory(location: Location) -> Path | None:
    """Where it is on a file system, whatever it is called there; None for another medium."""
    is_local = location.kind == "disk" or location.scheme == "shared+file"
    return Path(os.path.realpath(location.path)) if is_local else None


@contextmanager
def opened_target(uri: str, settings: Mapping[str, object]) -> Iterator[tuple[Storage, Target]]:
    """A tier to copy to; a directory that does not exist is made.

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
        with link:
            info = read_info(storage.root)
            if info is None:
                raise ConfigError("the directory's server was just ending: say it again")
            joining = {"storage_uri": directory_uri(storage.root), "server": f"unix://{info.socket}"}
            target = ServerTarget(storage, link, Config.from_mapping(joining).as_guest())
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
        return free_bytes(storage.root) - MIN_FREE_BYTES_DEFAULT
    capacity = storage.capacity_bytes()
    return None if capacity is None else capacity - used_bytes(storage, storage.look())


# -- a directory that a server owns -----------------------------------------------------------------------------------
#
# Its server alone may write into it, so chunks are handed to it as an engine of that model would. A session is joined
# for each namespace, with the facts of its record; chunks go into granted slots of the server's memory, and the server
# seals them and writes them through. It has engines to serve at the same moment: few chunks are on their way at once,
# only room that is free is filled, and what it drops is counted.

UNWRITTEN_MAX: Final = 8
"""Chunks that the server has and has not written yet: more would be put off, and dropped when memory is short."""
WRITTEN_WITHIN_S: Final = 20.0
"""Then a chunk counts as dropped, and so does, when one has been, what takes longer than the next."""
WRITTEN_AFTER_DROP_S: Final = 1.0
SLOT_WITHIN_S: Final = 30.0
POLL_S: Final = 0.002

_OWN_FIELDS: Final = ("geometry", "epoch", "block_tokens", "chunk_tokens")
"""Fields of a record that the server fills in by itself."""


class CopySession:
    """A session of one namespace, with a worker for every rank of its world. It rests unless it is told to wake.

    Threads: one at a time.
    """

    def __init__(self, config: Config, namespace: Namespace, first_stored_by: str) -> None:
        """Join; blocks until the session is open.

        Args:
            first_stored_by: What the source has beside the record; empty: nothing.

        Raises:
            ConfigError: The server refuses it, the record is no model's, or its epoch is not in force there.
            TierUnavailable: The server went away.
        """
        fields = namespace.fields
        ranks = recorded_geometry(fields).ranks
        engine_id = f"copy-{uuid.uuid4().hex}"
        given = msgspec.json.encode({name: value for name, value in fields.items() if name not in _OWN_FIELDS})
        sizes = fields["block_tokens"], fields["chunk_tokens"]
        line = first_stored_by or stored_by(__version__, "copy", __version__, None)
        self._workers: list[WorkerClient] = []
        self.client: SchedulerClient | None = None
        try:
            for rank, pages in enumerate(ranks):
                join = m.JoinWorker(rank, len(ranks), *sizes, given, pages_on_the_wire(pages), stored_by=line)
                self._workers.append(WorkerClient(config, engine_id, 0, join))
            self.client = SchedulerClient(config, engine_id, len(ranks))
            if not self.client.wait_ready(config.start_timeout_s):
                raise ConfigError(self.client.refusal or "the server opened no session in time")
            assert self.client.namespace is not None
            if self.client.namespace.digest != namespace.digest:
                other = self.client.namespace.fields["epoch"]
                raise ConfigError(
                    f"the server uses epoch {other} of this model, and these chunks are of epoch {fields['epoch']}: a "
                    "reset of the cache retired them, or of the two places one is an object store or in front of one, "
                    "and the other is not, or each began by itself: two buckets, or a directory and one that was reset "
                    "before (`tiered-kv cp` from one to the other, before engines use the second and, where that is a "
                    "directory, its server starts, has it begin with the same epoch)"
                )
            self.client.rest()
        except BaseException:
            self.close()
            raise

    def store(self, name: BlobName, blob: memoryview, parsed: ParsedHeader) -> None:
        """Send the server one chunk; its parent must have been sent before.

        Raises:
            ChunkMismatch: It is not of the form of this namespace.
            TierUnavailable: The server went away, or gives no slot.
        """
        client = self.client
        assert client is not None
        info = client.info
        if info is not None and (len(blob), parsed.header.header_bytes) != (info.slot_bytes, info.payload_offset):
            raise ChunkMismatch(f"blob has another size. expected={info.slot_bytes} observed={len(blob)}")
        slot, info = self._take_slot(client)
        slab, index = divmod(slot, SLOTS_PER_SLAB_MAX)
        start, size_bytes = index * info.slot_bytes + info.payload_offset, info.slot_bytes - info.payload_offset
        with self._workers[0].arena.view(slab, start, size_bytes) as view:
            view[:] = blob[info.payload_offset :]
        client.commit([(slot, parsed.header.record)])
        client.pin(name.key, 0)  # an operator wants it there, whatever the server takes from engines

    def _take_slot(self, client: SchedulerClient) -> tuple[SlotId, SessionInfo]:
        until_s = time.monotonic() + SLOT_WITHIN_S
        while (slot := client.take_slot()) is None:
            if time.monotonic() > until_s:
                raise TierUnavailable(f"the server gave no memory to copy into. waited_s={SLOT_WITHIN_S:g}")
            time.sleep(POLL_S)
            self.poll()
        assert client.info is not None
        return slot, client.info

    def poll(self) -> None:
        """Move messages.

        Raises:
            TierUnavailable: The server went away.
        """
        assert self.client is not None
        self.client.poll()
        if self.client.generation:
            raise TierUnavailable("the server went away while chunks were copied; say it again")

    def close(self) -> None:
        """Leave. Idempotent."""
        if self.client is not None:
            self.client.close()
        for worker in self._workers:
            worker.leave()


class ServerTarget:
    """A disk directory that a server owns.

    Threads: any; chunks are handed over one at a time.
    """

    def __init__(self, storage: DiskStorage, link: ServerLink, config: Config) -> None:
        """Take the directory and its server.

        Args:
            config: Names the directory and the server's socket, so that no server is started.
        """
        self.uri = storage.uri
        self._storage = storage
        self._config = config
        disk = next((tier for tier in link.stat().tiers if tier.name == "disk"), None)
        if disk is None:
            raise ConfigError("the server of this directory keeps no chunks in it")
        self._room_bytes = None if disk.capacity_bytes is None else disk.capacity_bytes - disk.used_bytes
        self._sessions: dict[bytes, CopySession] = {}
        self._awake: CopySession | None = None  # one alone: what is granted ahead to all would be all there is
        self._unwritten: dict[BlobName, float] = {}
        self._dropped: set[bytes] = set()
        self._lock = threading.Lock()

    def begin(self, record: NamespaceRecord) -> str:
        """Join a session of the namespace."""
        if record.namespace is None:
            return f"a running server must be told which model it is, and {record.problem}"
        try:
            self._sessions[record.digest] = CopySession(self._config, record.namespace, record.first_stored_by)
        except ConfigError as exc:
            return str(exc)
        return ""

    def has(self, name: BlobName) -> bool:
        return self._storage.contains([name])[0]

    def put(self, name: BlobName, blob: memoryview, parsed: ParsedHeader) -> bool:
        """Give the server a chunk; a short wait keeps few of them unwritten."""
        with self._lock:
            if name.parent in self._dropped:  # it would not be written either
                self._dropped.add(name.key)
                return True
            if self._room_bytes is not None:
                if len(blob) > self._room_bytes:
                    raise CapacityExceeded("the rest of the server's disk_bytes is in use, and a copy evicts nothing")
                self._room_bytes -= len(blob)
            self._wait_until(UNWRITTEN_MAX - 1)
            self._awakened(name.namespace).store(name, blob, parsed)
            self._unwritten[name] = time.monotonic()
            return True

    def _awakened(self, namespace: bytes) -> CopySession:
        session = self._sessions[namespace]
        if session is not self._awake:
            if self._awake is not None and self._awake.client is not None:
                self._awake.client.rest()
            assert session.client is not None
            session.client.wake()
            self._awake = session
        return session

    def end(self) -> Collection[bytes]:
        with self._lock:
            self._wait_until(0)
            return self._dropped

    def _wait_until(self, unwritten: int) -> None:
        """Until at most so many chunks are not on the disk yet, or are given up."""
        while True:
            for session in self._sessions.values():
                session.poll()
            names, now_s = list(self._unwritten), time.monotonic()
            for name, is_there in zip(names, self._storage.contains(names), strict=True):
                if is_there:
                    del self._unwritten[name]
                elif now_s - self._unwritten[name] > (WRITTEN_AFTER_DROP_S if self._dropped else WRITTEN_WITHIN_S):
                    del self._unwritten[name]
                    self._dropped.add(name.key)
            if len(self._unwritten) <= unwritten:
                return
            time.sleep(POLL_S)

    def close(self) -> None:
        """Leave the server. Idempotent."""
        for session in self._sessions.values():
            session.close()
        self._sessions.clear()
