"""Operate on an object store: one LIST returns every blob with its ancestry.

Changes are made directly, as every server makes them: what is deleted behind a server's back is an ordinary miss there,
and the leader's next LIST corrects its accounts. Leases, reports and logs of the servers are read and never written.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from tiered_kv.errors import ChunkCorrupt
from tiered_kv.fleet import layout
from tiered_kv.fleet.recency import UseReader
from tiered_kv.keys.namespace import MAX_RECORD_BYTES, Namespace
from tiered_kv.keys.naming import BlobName, object_path, parse_object_path
from tiered_kv.keys.stored_by import UNKNOWN
from tiered_kv.location import Location
from tiered_kv.ops.storage import (
    FOR_GOOD,
    BaseEpochs,
    Content,
    NamespaceRecord,
    Progress,
    RemovalTotals,
    Storage,
    StoredBlob,
    Stray,
    deepest_first,
    no_progress,
    parse_digest,
)
from tiered_kv.server.epochs import begin_with, read_shared_epochs
from tiered_kv.tiers.disk.scan import NAMESPACE_FILE
from tiered_kv.tiers.object.medium import ObjectInfo
from tiered_kv.tiers.object.shared_directory import TEMPORARY, is_own_temporary
from tiered_kv.tiers.object.store import ObjectStore

STRIDE: Final = 1000
DELETE_AT_ONCE: Final = 1000
CUT_OFF: Final = "left by a server or a command that was cut off, or in use at the moment"
REPORT_VALID_S: Final = 600.0
"""A server that keeps a limit reports every few seconds; a report that is older was left by one that died."""


class _Uses:
    """When keys were used, by the store's clock."""

    def __init__(self) -> None:
        self.by_key: dict[bytes, float] = {}

    def use(self, key: bytes, used_s: int) -> None:
        self.by_key[key] = max(used_s, self.by_key.get(key, 0))


class ObjectStorage(Storage):
    """Blobs below one prefix of an object store.

    Threads: one at a time, but for ``read``.
    """

    kind = "object"

    def __init__(self, location: Location, *, timeout_s: float, concurrency: int) -> None:
        """Name the store; sends no request.

        Raises:
            ConfigError: The package for its scheme is not installed.
        """
        self.uri = str(location)
        self.readers = concurrency
        self.store = ObjectStore(location, timeout_s=timeout_s, concurrency=concurrency)

    # -- looking ------------------------------------------------------------------------------------------------------

    def look(self, progress: Progress = no_progress) -> Content:
        content, spaces, pins = Content(), dict[bytes, float](), dict[bytes, float]()
        found: list[tuple[BlobName, ObjectInfo]] = []
        for number, info in enumerate(self.store.list("")):
            name = parse_object_path(info.path)
            if name is not None:
                found.append((name, info))
                spaces.setdefault(name.namespace, 0.0)
            elif layout.is_probe(info.path):
                content.strays.append(Stray(info.path, info.size_bytes, info.modified_s, "temp", CUT_OFF))
            elif info.path.startswith(f"{layout.ROOT}/"):
                content.own_bytes += info.size_bytes
                if (pin := _pin_in_force(info.path)) is not None:
                    pins[pin[0].key] = max(pin[1], pins.get(pin[0].key, 0.0))
            elif (space := _space_of_record(info.path)) is not None:
                content.own_bytes += info.size_bytes
                spaces[space] = info.modified_s
            else:
                reason = "not a name that a blob has"
                content.strays.append(Stray(info.path, info.size_bytes, info.modified_s, "name", reason))
            if number % STRIDE == STRIDE - 1:
                progress(number + 1, None)
        uses = self._uses(content)
        content.has_uses = bool(uses.by_key)  # servers log uses where one of them keeps a limit
        content.blobs = [
            StoredBlob(
                name,
                info.size_bytes,
                info.modified_s,
                max(info.modified_s, uses.by_key.get(name.key, 0.0)),
                pins.get(name.key, 0.0),
            )
            for name, info in found
        ]
        content.strays += self._temp_files()
        content.records = {space: self._record(space, spaces[space]) for space in sorted(spaces)}
        progress(len(found), len(found))
        return content

    def _temp_files(self) -> list[Stray]:
        """Of a directory that machines mount: its list leaves them out, and no other store has any."""
        if not self.uri.startswith("shared+file:"):
            return []
        found = [info for info in self.store.list(f"{TEMPORARY}/") if is_own_temporary(info.path)]
        return [Stray(info.path, info.size_bytes, info.modified_s, "temp", CUT_OFF) for info in found]

    def _uses(self, content: Content) -> _Uses:
        uses, reader = _Uses(), UseReader(self.store)
        for _ in reader.read(uses):
            pass
        if reader.malformed:
            content.notes.append(f"{len(reader.malformed)} logs of use cannot be understood and were left out")
        return uses

    def records(self) -> dict[bytes, NamespaceRecord]:
        """See ``Reader.records``. Lists everything: S3 has no directories."""
        listed = ((_space_of_record(info.path), info.modified_s) for info in self.store.list(""))
        spaces = {space: written_s for space, written_s in listed if space is not None}
        return {space: self._record(space, spaces[space]) for space in sorted(spaces)}

    def _record(self, space: bytes, written_s: float) -> NamespaceRecord:
        try:
            data = self.store.get(self.record_path(space), 2 * MAX_RECORD_BYTES)
        except ChunkCorrupt as exc:
            return NamespaceRecord(space, None, f"namespace.json cannot be understood: {exc}", written_s)
        return NamespaceRecord.parse(space, data, written_s)

    def contains(self, names: Sequence[BlobName]) -> list[bool]:
        return [self.store.head(object_path(name)) is not None for name in names]

    def read(self, blob: StoredBlob | BlobName, length: int | None = None) -> bytes | None:
        path = object_path(blob.name if isinstance(blob, StoredBlob) else blob)
        return self.store.get(path) if length is None else self.store.get_head(path, length)

    def path(self, name: BlobName) -> str:
        return object_path(name)

    def record_path(self, namespace: bytes) -> str:
        return f"{namespace.hex()}/{NAMESPACE_FILE}"

    def is_served(self) -> bool:
        return False  # by many, perhaps, and owned by none

    def live_namespaces(self) -> set[bytes]:
        """Those in the reports of servers that keep a limit here; others do not report."""
        found = set[bytes]()
        for info in self.store.list(layout.SERVERS):
            if layout.parse_session_path(info.path) is not None and info.modified_s > time.time() - REPORT_VALID_S:
                report = layout.decode(self.store.get(info.path, layout.JSON_BYTES_MAX), layout.MemberReport)
                found.update(filter(None, map(parse_digest, report.namespaces if report is not None else ())))
        return found

    def epochs(self) -> BaseEpochs:
        return BaseEpochs("shared", read_shared_epochs(self.store))

    # -- changing -----------------------------------------------------------------------------------------------------

    def write(self, name: BlobName, blob: memoryview) -> bool:
        path = object_path(name)
        if self.store.creates_atomically():
            return bool(self.store.create(path, blob))
        if self.store.head(path) is not None:
            return False
        self.store.put(path, blob)
        return True

    def write_record(self, namespace: Namespace, first_stored_by: str = UNKNOWN) -> None:
        path = f"{namespace.digest.hex()}/{NAMESPACE_FILE}"
        if self.store.head(path) is None:
            self.store.put(path, namespace.described(first_stored_by))

    def begin_with(self, base: bytes, number: int) -> int:
        return begin_with(self.store, base, number)

    def remove(
        self, blobs: Sequence[StoredBlob], progress: Progress = no_progress, *, holes: bool = False
    ) -> RemovalTotals:
        """See ``Remover.remove``. Counts all as removed: a store does not report missing ones."""
        del holes  # readers take a gap for the end of a prefix
        result = RemovalTotals()
        ordered = deepest_first(blobs)
        for start in range(0, len(ordered), DELETE_AT_ONCE):
            part = ordered[start : start + DELETE_AT_ONCE]
            self.store.delete([object_path(blob.name) for blob in part])
            result.removed += len(part)
            result.removed_bytes += sum(blob.size_bytes for blob in part)
            progress(result.removed, len(ordered))
        return result

    def discard(self, names: Sequence[BlobName]) -> None:
        self.store.delete([object_path(name) for name in names])

    def remove_namespace(self, namespace: bytes) -> bool:
        path = self.record_path(namespace)
        if any(info.path != path for info in self.store.list(f"{namespace.hex()}/")):
            return False
        self.store.delete([path])
        return True

    def remove_strays(self, strays: Sequence[Stray]) -> RemovalTotals:
        self.store.delete([stray.path for stray in strays])
        return RemovalTotals(len(strays), sum(stray.size_bytes for stray in strays))

    # -- pins and limits ----------------------------------------------------------------------------------------------

    def pins(self) -> Mapping[BlobName, float]:
        found: dict[BlobName, float] = {}
        for info in self.store.list(layout.PINS):
            if (pin := _pin_in_force(info.path)) is not None:
                found[pin[0]] = max(pin[1], found.get(pin[0], 0.0))
        return found

    def pin(self, names: Iterable[BlobName], until_s: float) -> None:
        names = list(names)
        old = self._pin_paths(names)
        new = [layout.pin_path(name, 0 if until_s == FOR_GOOD else int(until_s)) for name in names]
        for path in new:
            self.store.put(path, b"")
        self.store.delete([path for path in old if path not in new])

    def unpin(self, names: Iterable[BlobName]) -> int:
        names = list(names)
        paths = self._pin_paths(names)
        self.store.delete(paths)
        return len({pin[0] for path in paths if (pin := layout.parse_pin_path(path)) is not None})

    def _pin_paths(self, names: Sequence[BlobName]) -> list[str]:
        prefixes = {f"{layout.PINS}{name.namespace.hex()}/{name.key.hex()}." for name in names}
        return [info.path for prefix in sorted(prefixes) for info in self.store.list(prefix)]

    def capacity_bytes(self) -> int | None:
        """What the servers agreed on: the limit in the newest lease."""
        lease = newest_lease(self.store)
        return None if lease is None or lease.content is None else lease.content.capacity_bytes

    def close(self) -> None:
        self.store.close()


class LeaseObject(NamedTuple):
    """The lease of a bucket's leader.

    Attributes:
        term: Its number.
        renewed_s: When the leader renewed it, by the store's clock.
        content: None where it cannot be read.
    """

    term: int
    renewed_s: float
    content: layout.Term | None


def newest_lease(store: ObjectStore) -> LeaseObject | None:
    """The lease with the highest number; None: no server ever led this bucket.

    Raises:
        TierUnavailable: The store cannot be read.
    """
    found = {term: i for i in store.list(layout.LEASES) if (term := layout.parse_lease_path(i.path)) is not None}
    if not found:
        return None
    term = max(found)
    content = layout.decode(store.get(found[term].path, layout.JSON_BYTES_MAX), layout.Term)
    return LeaseObject(term, found[term].modified_s, content)


def _pin_in_force(path: str) -> tuple[BlobName, float] | None:
    """A pin and its end; None for one that has ended, by this machine's clock, and for anything else."""
    pin = layout.parse_pin_path(path)
    if pin is None or 0 < pin[1] <= time.time():
        return None
    return pin[0], pin[1] or FOR_GOOD


def _space_of_record(path: str) -> bytes | None:
    """The namespace whose record lies at this path; None: no record does."""
    space, _, name = path.partition("/")
    return parse_digest(space) if name == NAMESPACE_FILE else None
