"""An object store as an operator sees it: one LIST tells every blob and its ancestry.

Changes are made directly, as every server makes them: what is deleted behind a server's back is an ordinary miss there,
and the leader's next LIST corrects its accounts. Leases, reports and logs of the servers are read and never written.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from tiered_kv.admin.disk_storage import read_record
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
from tiered_kv.keys.namespace import MAX_RECORD_BYTES, Namespace
from tiered_kv.keys.naming import BlobName, object_path, parse_object_path
from tiered_kv.location import Location
from tiered_kv.tiers.bucket.layout import (
    JSON_BYTES_MAX,
    LEASES,
    RECENCY,
    ROOT,
    Term,
    decode,
    lease_path,
    parse_lease_path,
)
from tiered_kv.tiers.bucket.pins import PINS, parse_pin_path, pin_path
from tiered_kv.tiers.bucket.recency import UseReader
from tiered_kv.tiers.disk_scan import NAMESPACE_FILE
from tiered_kv.tiers.object_store import ObjectInfo, ObjectStore

STRIDE: Final = 1000
DELETE_AT_ONCE: Final = 1000


class _Uses:
    """When keys were used, by the store's clock."""

    def __init__(self) -> None:
        self.by_key: dict[bytes, float] = {}

    def use(self, key: bytes, used_s: int) -> None:
        self.by_key[key] = max(used_s, self.by_key.get(key, 0))


class ObjectStorage(Storage):
    """Blobs below one prefix of an object store.

    Threads: one at a time.
    """

    def __init__(self, location: Location, *, timeout_s: float, concurrency: int) -> None:
        """Name the store; nothing is asked yet.

        Raises:
            ConfigError: The package for its scheme is not installed.
        """
        self.kind = "object"
        self.uri = str(location)
        self.store = ObjectStore(location, timeout_s=timeout_s, concurrency=concurrency)

    # -- looking ------------------------------------------------------------------------------------------------------

    def look(self, progress: Progress = no_progress) -> Content:
        content, spaces, pins = Content(), set[bytes](), dict[bytes, float]()
        found: list[tuple[BlobName, ObjectInfo]] = []
        for number, info in enumerate(self.store.list("")):
            name = parse_object_path(info.path)
            if name is not None:
                found.append((name, info))
                spaces.add(name.namespace)
            elif info.path.startswith(f"{ROOT}/"):
                content.own_bytes += info.size_bytes
                if (pin := parse_pin_path(info.path)) is not None:
                    pins[pin[0].key] = max(pin[1] or FOR_GOOD, pins.get(pin[0].key, 0.0))
            elif (space := _space_of_record(info.path)) is not None:
                content.own_bytes += info.size_bytes
                spaces.add(space)
            else:
                reason = "not a name that a blob has"
                content.strays.append(Stray(info.path, info.size_bytes, info.modified_s, "name", reason))
            if number % STRIDE == STRIDE - 1:
                progress(number + 1, None)
        uses = self._uses(content)
        for name, info in found:
            used_s = max(info.modified_s, uses.by_key.get(name.key, 0.0))
            content.blobs.append(StoredBlob(name, info.size_bytes, info.modified_s, used_s, pins.get(name.key, 0.0)))
        content.records = {space: self._record(space) for space in sorted(spaces)}
        progress(len(found), len(found))
        return content

    def _uses(self, content: Content) -> _Uses:
        uses, reader = _Uses(), UseReader(self.store)
        for source in self.store.list(RECENCY):
            reader.read(source, uses)
        if reader.malformed_count:
            content.notes.append(f"{reader.malformed_count} logs of use cannot be understood and were left out")
        return uses

    def records(self) -> dict[bytes, NamespaceRecord]:
        """Of every namespace that has one: S3 tells no directories, so this lists everything."""
        spaces = {space for info in self.store.list("") if (space := _space_of_record(info.path)) is not None}
        return {space: self._record(space) for space in sorted(spaces)}

    def _record(self, space: bytes) -> NamespaceRecord:
        return read_record(space, self.store.get(f"{space.hex()}/{NAMESPACE_FILE}", 2 * MAX_RECORD_BYTES))

    def contains(self, names: Sequence[BlobName]) -> list[bool]:
        return [self.store.head(object_path(name)) is not None for name in names]

    def read(self, blob: StoredBlob | BlobName, length: int | None = None) -> bytes | None:
        path = object_path(blob.name if isinstance(blob, StoredBlob) else blob)
        return self.store.get(path) if length is None else self.store.get_head(path, length)

    # -- changing -----------------------------------------------------------------------------------------------------

    def write(self, name: BlobName, blob: memoryview) -> bool:
        path = object_path(name)
        if self.store.creates_atomically():
            return self.store.create(path, blob)
        if self.store.head(path) is not None:
            return False
        self.store.put(path, blob)
        return True

    def write_record(self, namespace: Namespace) -> None:
        path = f"{namespace.digest.hex()}/{NAMESPACE_FILE}"
        if self.store.head(path) is None:
            self.store.put(path, namespace.record)

    def remove(self, blobs: Sequence[StoredBlob], progress: Progress = no_progress, *, holes: bool = False) -> Removal:
        """Remove blobs, the deepest first; nobody can say which of them were gone already."""
        del holes  # whoever reads here takes a gap for the end of a prefix
        result = Removal()
        ordered = sorted(blobs, key=lambda blob: -blob.name.chunk_index)
        for start in range(0, len(ordered), DELETE_AT_ONCE):
            part = ordered[start : start + DELETE_AT_ONCE]
            self.store.delete([object_path(blob.name) for blob in part])
            result.removed += len(part)
            result.removed_bytes += sum(blob.size_bytes for blob in part)
            progress(result.removed, len(ordered))
        return result

    def remove_strays(self, strays: Sequence[Stray]) -> int:
        self.store.delete([stray.path for stray in strays])
        return len(strays)

    # -- pins and limits ----------------------------------------------------------------------------------------------

    def pins(self) -> Mapping[BlobName, float]:
        found: dict[BlobName, float] = {}
        for info in self.store.list(PINS):
            if (pin := parse_pin_path(info.path)) is not None:
                found[pin[0]] = max(pin[1] or FOR_GOOD, found.get(pin[0], 0.0))
        return found

    def pin(self, names: Iterable[BlobName], until_s: float) -> None:
        names = list(names)
        old = self._pin_paths(names)
        new = [pin_path(name, 0 if until_s == FOR_GOOD else int(until_s)) for name in names]
        for path in new:
            self.store.put(path, b"")
        self.store.delete([path for path in old if path not in new])

    def unpin(self, names: Iterable[BlobName]) -> int:
        names = list(names)
        paths = self._pin_paths(names)
        self.store.delete(paths)
        return len({pin[0] for path in paths if (pin := parse_pin_path(path)) is not None})

    def _pin_paths(self, names: Sequence[BlobName]) -> list[str]:
        prefixes = {f"{PINS}{name.namespace.hex()}/{name.key.hex()}." for name in names}
        return [info.path for prefix in sorted(prefixes) for info in self.store.list(prefix)]

    def capacity_bytes(self) -> int | None:
        """What the servers agreed on: the limit in the newest lease."""
        terms = [term for info in self.store.list(LEASES) if (term := parse_lease_path(info.path)) is not None]
        if not terms:
            return None
        content = decode(self.store.get(lease_path(max(terms)), JSON_BYTES_MAX), Term)
        return None if content is None else content.capacity_bytes

    def close(self) -> None:
        self.store.close()


def _space_of_record(path: str) -> bytes | None:
    """The namespace whose record this is the path of."""
    space, _, name = path.partition("/")
    try:
        digest = bytes.fromhex(space)
    except ValueError:
        return None
    return digest if name == NAMESPACE_FILE and len(digest) == 16 else None
