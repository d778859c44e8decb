"""The media of the cache simulation: a disk that survives its servers, and a bucket that belongs to nobody.

Both take virtual time for every call and show what real ones show in the middle of it: a disk's write is a temp file
until it is renamed, an object is there when its request ends, which may be after its client gave up. A reader sees what
was there when it began. Whatever is published is compared with the oracle, and every change with the limits.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tests.sim.cache.faults import Damage, FaultSource
from tests.sim.cache.oracle import is_right, label
from tests.sim.virtual_time import EPOCH_S, Hub, Killed, SimClock, require
from tiered_kv.chunks.header import PEEK_BYTES, peek, read_header, refuse_foreign
from tiered_kv.errors import ChunkCorrupt, ChunkMismatch, TierUnavailable
from tiered_kv.fleet.layout import Found
from tiered_kv.keys.naming import parse_object_path
from tiered_kv.tiers.base import BlobInfo, BlobName, Tier, TierTraits, Usage
from tiered_kv.tiers.disk.index import IndexRow, Shard
from tiered_kv.tiers.disk.ledger import DiskLedger
from tiered_kv.tiers.object.medium import ObjectInfo

FREE_BYTES = 1 << 40
SETTLE_S = 2.0
"""How long after its client gave up a request may still change the bucket."""


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast a medium is."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, hub: Hub, size_bytes: int = 0) -> float:
        """How long one call takes, with jitter."""
        return (self.latency_s + size_bytes / self.bytes_per_s) * hub.draw.uniform(0.5, 1.5)


# -- the disk ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Disk:
    """What is on one machine's disk, whoever serves it.

    Attributes:
        temps: Bytes of temp files, by number.
        rows: The index as of the last flush: order of use, sizes, ancestry.
        pins: What an operator wants kept, and a number that counts his wishes.
        published: When each blob was published: what a power failure may tear.
        is_tampered: Somebody else changed what is there, so nobody's accounts can be right.
    """

    capacity_bytes: int
    blobs: dict[BlobName, bytes] = field(default_factory=dict)
    temps: dict[int, int] = field(default_factory=dict)
    rows: dict[bytes, IndexRow] = field(default_factory=dict)
    pins: dict[bytes, BlobName] = field(default_factory=dict)
    damage: Damage = field(default_factory=Damage)
    published: dict[BlobName, float] = field(default_factory=dict)
    temp_count: int = 0
    is_tampered: bool = False

    @property
    def used_bytes(self) -> int:
        return sum(map(len, self.blobs.values())) + sum(self.temps.values())

    def check(self) -> None:
        """Assert that it holds no more than it may."""
        used = self.used_bytes
        require(
            used <= self.capacity_bytes, f"the disk is over its capacity. used={used} capacity={self.capacity_bytes}"
        )


class SimDisk(Tier):
    """A server's view of its disk: the real ledger, and files that are entries of a dictionary."""

    # The real one is flushed every 5 s. One operation at once, because only the simulation's own tasks may wait in its
    # time, and a self-test reads in threads where a medium profits from more.
    traits = TierTraits(name="disk", io_concurrency=1, is_shared=False, flush_interval_s=1.0)

    def __init__(self, hub: Hub, disk: Disk, speed: Speed, faults: FaultSource, clock: SimClock) -> None:
        self._hub = hub
        self._disk = disk
        self._speed = speed
        self._faults = faults
        self._ledger = DiskLedger(disk.capacity_bytes, lambda: float(clock.wall()))
        self._pinned: frozenset[bytes] = frozenset(disk.pins)
        disk.temps.clear()  # swept
        self._restore()

    def _restore(self) -> None:
        """Reconcile the rows with the files, as ``tiers/disk/scan.py`` does."""
        shards: dict[Shard, dict[bytes, IndexRow]] = {}
        foreign, foreign_bytes = set(), 0
        for name, data in list(self._disk.blobs.items()):
            row = self._disk.rows.get(name.key)
            if row is None or row.size_bytes != len(data):
                try:
                    row = _read_row(name, data, row)
                except ChunkCorrupt:
                    del self._disk.blobs[name]
                    continue
                except ChunkMismatch:
                    foreign.add(name)
                    foreign_bytes += len(data)
                    continue
            shards.setdefault(Shard.of(name), {})[name.key] = row
        self._ledger.restore(shards, (), foreign, foreign_bytes)

    def _wait(self, size_bytes: int = 0) -> None:
        self._hub.sleep(self._faults.delay_s(self._speed.seconds(self._hub, size_bytes)))

    def put(self, name: BlobName, blob: memoryview) -> None:
        header = peek(blob[:PEEK_BYTES])
        if self._ledger.is_foreign(name):
            raise ChunkMismatch(f"a foreign file has this name. key={name.key.hex()}")
        size = len(blob)
        self._ledger.reserve(size, FREE_BYTES)
        disk = self._disk
        disk.temp_count += 1
        temp, disk.temps[disk.temp_count] = disk.temp_count, size
        disk.check()
        try:
            first = bytes(blob[: size // 2])
            self._wait(size)
            data = first + bytes(blob[size // 2 :])
            del disk.temps[temp]
            self._publish(name, data)
            self._ledger.commit(BlobInfo(header.record, size), size)
            self._hub.note(f"disk put {label(name)}")
        except Killed:
            raise  # its temp file stays until the sweep
        except BaseException:
            disk.temps.pop(temp, None)
            self._ledger.release(size)
            raise

    def _publish(self, name: BlobName, data: bytes) -> None:
        require(is_right(name, data) or name in self._disk.damage, f"a wrong blob was written. chunk={label(name)}")
        self._disk.blobs.pop(name, None)
        self._disk.blobs[name] = data
        self._disk.published[name] = self._hub.now_s
        self._faults.published(name)
        self._disk.check()

    def get_into(self, name: BlobName, buffer: memoryview) -> bool:
        data = self._disk.blobs.get(name)  # an open file stays readable when it is deleted
        if data is None:
            self._wait()
            self._is_there(name)
            return False
        if len(data) != len(buffer):
            refuse_foreign(data[:PEEK_BYTES], name.namespace)
            raise ChunkCorrupt(f"blob has the wrong size. observed={len(data)} expected={len(buffer)}")
        half = len(data) // 2
        buffer[:half] = data[:half]
        self._wait(len(data))
        buffer[half:] = data[half:]
        return True

    def contains(self, name: BlobName) -> bool:
        self._wait()
        return self._is_there(name)

    def _is_there(self, name: BlobName) -> bool:
        if name not in self._disk.blobs:
            self._ledger.forget(name)
            return False
        return True

    def delete(self, name: BlobName) -> bool:
        self._wait()
        if self._ledger.is_foreign(name):
            return False
        self._ledger.forget(name)
        found = self._disk.blobs.pop(name, None) is not None
        self._faults.deleted(name)
        self._hub.note(f"disk delete {label(name)} {found}")
        return found

    def scan(self) -> Iterator[BlobInfo]:
        return self._ledger.snapshot()

    def usage(self) -> Usage:
        used, count = self._ledger.totals()
        return Usage(used, self._ledger.limit_bytes, count)

    def record_use(self, names: Iterable[BlobName]) -> None:
        self._ledger.touch(list(names))

    def flush(self) -> None:
        dirty = self._ledger.take_dirty()
        self._wait()
        for rows in dirty.values():
            self._disk.rows.update({row.record.key: row for row in rows})
        self._pinned = frozenset(self._disk.pins)

    def pinned(self) -> Collection[bytes]:
        return self._pinned

    def close(self) -> None:
        self.flush()


def _read_row(name: BlobName, data: bytes, old: IndexRow | None) -> IndexRow:
    """What a file's header says; raises as ``scan.read_named_header`` does."""
    header = peek(data[:PEEK_BYTES])
    if header.record.namespace != name.namespace:
        read_header(memoryview(data))  # damaged, or really somebody else's
        raise ChunkMismatch(f"another namespace. observed={header.record.namespace.hex()}")
    if header.record.key != name.key:
        raise ChunkCorrupt(f"another key. observed={header.record.key.hex()}")
    use_seq = 0 if old is None else old.use_seq
    return IndexRow(header.record, len(data), use_seq, 0)


# -- the bucket --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Bucket:
    """Objects by path, and the limit of all blobs together.

    Attributes:
        arrived: Every blob that was ever put: within a limit, its servers may evict it a moment later.
    """

    capacity_bytes: int | None
    objects: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    damage: Damage = field(default_factory=Damage)
    blob_bytes: int = 0
    arrived: set[BlobName] = field(default_factory=set)

    def put(self, hub: Hub, path: str, data: bytes) -> None:
        name = parse_object_path(path)
        if name is not None:
            require(is_right(name, data) or name in self.damage, f"a wrong blob was uploaded. chunk={label(name)}")
            self.blob_bytes += len(data) - len(self.objects.get(path, (b"", 0.0))[0])
            self.arrived.add(name)
            hub.note(f"bucket put {label(name)}")
        self.objects[path] = (data, EPOCH_S + hub.now_s)
        self.check()

    def remove(self, hub: Hub, path: str) -> None:
        name = parse_object_path(path)
        data, _ = self.objects.pop(path, (b"", 0.0))
        if name is not None and data:
            self.blob_bytes -= len(data)
            hub.note(f"bucket delete {label(name)}")

    def check(self) -> None:
        """Assert that it holds no more than it may."""
        if self.capacity_bytes is not None:
            require(
                self.blob_bytes <= self.capacity_bytes,
                f"the bucket is over its capacity. used={self.blob_bytes} capacity={self.capacity_bytes}",
            )

    def names(self) -> list[BlobName]:
        return [name for name in map(parse_object_path, self.objects) if name is not None]


class SimStore:
    """The bucket as one server sees it: what ``ObjectStore`` offers, every request ends within its deadline."""

    uri = "sim://bucket"

    def __init__(self, hub: Hub, bucket: Bucket, speed: Speed, faults: FaultSource, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._hub = hub
        self._bucket = bucket
        self._speed = speed
        self._faults = faults

    def _request(self, operation: str, size_bytes: int = 0) -> float:
        """Wait for the answer, or for the deadline; returns how long after now the store acts on a request too late.

        Raises:
            TierUnavailable: There was no answer.
        """
        seconds = self._faults.delay_s(self._speed.seconds(self._hub, size_bytes))
        if self._faults.is_failing():
            self._hub.sleep(min(seconds, self.timeout_s))
            raise TierUnavailable(f"the simulated store failed. operation={operation}")
        self._hub.sleep(min(seconds, self.timeout_s))
        return max(0.0, seconds - self.timeout_s)

    def _change(self, path: str, body: bytes | memoryview, *, only_if_absent: bool) -> bool:
        first = bytes(body[: len(body) // 2])
        late_s = self._request("put", len(body))
        data = first + bytes(body[len(body) // 2 :])
        if late_s:
            if late_s < SETTLE_S * 0.9:

                def land() -> None:
                    self._land(path, data, only_if_absent=only_if_absent)

                self._hub.after(late_s, land)
            raise TierUnavailable("the simulated store did not answer in time. operation=put")
        return self._land(path, data, only_if_absent=only_if_absent)

    def _land(self, path: str, data: bytes, *, only_if_absent: bool) -> bool:
        if only_if_absent and path in self._bucket.objects:
            return False
        self._bucket.put(self._hub, path, data)
        return True

    def _read(self, operation: str, size_bytes: int = 0) -> None:
        if self._request(operation, size_bytes):
            raise TierUnavailable(f"the simulated store did not answer in time. operation={operation}")

    def get(self, path: str, size_max: int | None = None) -> bytes | None:
        del size_max
        self._read("get")
        return self._bucket.objects.get(path, (None, 0.0))[0]

    def get_many(self, paths: Sequence[str], size_max: int) -> list[Found]:
        """One after the other, which is one of the orders in which answers may come."""
        found: list[Found] = []
        for path in paths:
            try:
                found.append(self.get(path, size_max))
            except TierUnavailable as exc:
                found.append(exc)
        return found

    def get_head(self, path: str, length: int) -> bytes | None:
        data = self.get(path)
        return None if data is None else data[:length]

    def get_into(self, path: str, buffer: memoryview) -> bool:
        data, _ = self._bucket.objects.get(path, (None, 0.0))
        if data is not None and len(data) == len(buffer):
            buffer[: len(data) // 2] = data[: len(data) // 2]
        self._read("get", len(buffer))
        if data is None:
            return False
        if len(data) != len(buffer):
            raise ChunkCorrupt(f"object has the wrong size. observed={len(data)} expected={len(buffer)}")
        buffer[:] = data
        return True

    def put(self, path: str, data: bytes | memoryview) -> None:
        self._change(path, data, only_if_absent=False)

    def create(self, path: str, data: bytes | memoryview) -> bool:
        return self._change(path, data, only_if_absent=True)

    def head(self, path: str) -> ObjectInfo | None:
        self._read("head")
        found = self._bucket.objects.get(path)
        return ObjectInfo(path, len(found[0]), float(int(found[1]))) if found else None

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self._read("list")
        for path in sorted(path for path in self._bucket.objects if path.startswith(prefix)):
            found = self._bucket.objects.get(path)
            if found is not None:
                yield ObjectInfo(path, len(found[0]), float(int(found[1])))

    def delete(self, paths: Sequence[str]) -> None:
        if not paths:
            return
        self._read("delete")
        for path in paths:
            self._bucket.remove(self._hub, path)

    def creates_atomically(self) -> bool:
        return True

    def close(self) -> None:
        """Nothing is held."""


# -- damage at rest ----------------------------------------------------------------------------------------------------


def damaged(data: bytes, how: str, position: int) -> bytes:
    """What a medium makes of bytes that lie there."""
    if not data:
        return data
    if how == "cut":
        return data[: position % len(data)]
    if how == "zeros":
        start = position % len(data)
        return data[:start] + bytes(len(data) - start)
    at = position % len(data)
    return data[:at] + bytes([data[at] ^ 1 << position % 8]) + data[at + 1 :]
