"""The object-store tier: one object per blob, named so that a LIST tells every blob's ancestry.

Owns the layout of blobs below the store's root and the accounting of its own calls. Decides nothing about room or age:
a ``Keeper`` (``fleet``) does, together with the other servers that share the bucket. Knows no fsspec
(``tiers/object/store.py``) and, like every tier, verifies no payload (``tiers/wrappers``).
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final, Protocol

from tiered_kv.chunks.header import PEEK_BYTES, peek, refuse_foreign
from tiered_kv.errors import CapacityExceeded, ChunkCorrupt, ChunkMismatch, Closed, TierUnavailable
from tiered_kv.fleet.layout import BucketUsage
from tiered_kv.keys.naming import object_path, parse_object_path
from tiered_kv.tiers.base import BlobInfo, BlobName, Tier, TierTraits, Usage
from tiered_kv.tiers.object.errors import is_full
from tiered_kv.tiers.object.medium import ObjectInfo
from tiered_kv.tiers.object.store import ObjectStore

logger = logging.getLogger(__name__)

SCAN_CONCURRENCY: Final = 8
"""Headers that a scan reads at once."""

DESCRIBED_CHECK_S: Final = 600.0
"""Between looks, a HEAD each, at whether namespaces that blobs were put into still have their record: a bucket may be
emptied, and a server goes on for weeks."""

DESCRIBED_MAX: Final = 1024
"""Namespaces whose records are remembered for that, some KiB each: every reset opens a new one."""


class Keeper(Protocol):
    """Who keeps a shared bucket within its limits; every method from any thread, ``turn`` from one at a time."""

    def reserve(self, size_bytes: int) -> None:
        """Take room for a blob that is about to be put.

        Raises:
            CapacityExceeded: The grant is used up.
        """

    def finished(self, size_bytes: int, stored: bool | None) -> None:
        """That put is over; None: nobody knows whether it got through."""

    def expect(self) -> None:
        """Puts will follow soon."""

    def record_use(self, names: Iterable[BlobName]) -> None:
        """Remember that these blobs were used."""

    def turn(self) -> None:
        """One heartbeat; talks to the store."""

    def serve(self, namespace: bytes) -> None:
        """This server works with that namespace: its blobs may be evicted."""

    def figures(self) -> Mapping[str, object]:
        """What ``stat`` shows."""

    @property
    def capacity_bytes(self) -> int | None:
        """The limit of the bucket; None: unlimited."""

    def usage(self) -> BucketUsage:
        """Last known use of the whole bucket, own changes since included."""

    def forget(self, size_bytes: int) -> None:
        """A blob was deleted by us."""

    def close(self) -> None:
        """Write down what is known and give the lead away."""


class ObjectTier(Tier):
    """Blobs in an object store that other machines use, too.

    Threads: any. Without a keeper there is no limit, and ``usage`` counts only what this tier put and deleted since it
    was opened: nobody lists a bucket to know better.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        keeper: Keeper | None = None,
        io_concurrency: int = 16,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Use ``store``, which the tier closes; nothing is read until the first call."""
        self.traits = TierTraits("object", io_concurrency, is_shared=True, keeps_first=True, flush_interval_s=1.0)
        self._store = store
        self._keeper = keeper
        self._timeout_s = store.timeout_s
        self._state = threading.Condition()
        self._in_flight_count = 0
        self._is_closed = False
        self._used_bytes = 0
        self._blob_count = 0
        self._monotonic = monotonic
        self._described: dict[bytes, bytes] = {}
        self._unchecked: dict[bytes, None] = {}  # in their order
        self._check_s = monotonic() + DESCRIBED_CHECK_S

    def put(self, name: BlobName, blob: memoryview) -> None:
        """Store a blob unless the name is taken: equal names mean equal bytes, so then it is there already.

        On a store that cannot refuse a taken name the blob is replaced.

        Raises:
            ValueError: The name does not tell the blob's ancestry.
            CapacityExceeded, TierUnavailable: As in the contract; after TierUnavailable the blob may be there.
        """
        path = object_path(name)
        with self._using():
            try:
                # Asked before room is taken, which holds for as long as one put takes: the first answer takes several.
                self._store.creates_atomically()
                self._put_reserved(path, blob)
                with self._state:
                    self._unchecked[name.namespace] = None
            except TierUnavailable as exc:
                if _has_no_room(exc):
                    raise CapacityExceeded(f"the object store has no room left. store={self._store.uri}") from exc
                raise

    def _put_reserved(self, path: str, blob: memoryview) -> None:
        if self._keeper is not None:
            self._keeper.reserve(len(blob))
        stored: bool | None = None
        try:
            stored = self._create(path, blob)
        except TierUnavailable as exc:
            stored = False if _has_no_room(exc) else None
            raise
        finally:
            if self._keeper is not None:
                self._keeper.finished(len(blob), stored)
        if stored:
            self._count(len(blob), 1)

    def _create(self, path: str, data: memoryview) -> bool | None:
        if self._store.creates_atomically():
            return self._store.create(path, data)
        self._store.put(path, data)
        return True

    def get_into(self, name: BlobName, buffer: memoryview) -> bool:
        """Read a blob into ``buffer`` in one request.

        Raises:
            ValueError: The name does not tell the blob's ancestry.
            ChunkMismatch: A sound blob of another namespace or version lies there.
            ChunkCorrupt, TierUnavailable: As in the contract.
        """
        path = object_path(name)
        with self._using():
            try:
                return self._store.get_into(path, buffer)
            except ChunkCorrupt:  # not of the size it must have, so it was not read: its header says whose it is
                refuse_foreign(self._store.get_head(path, PEEK_BYTES) or b"", name.namespace)
                raise

    def contains(self, name: BlobName) -> bool:
        path = object_path(name)
        with self._using():
            is_there = self._store.head(path) is not None
        if not is_there and self._keeper is not None:
            self._keeper.expect()  # what a prompt does not find here is computed, and put
        return is_there

    def delete(self, name: BlobName) -> bool:
        """Remove a blob; False when it was not there. Of two that delete it at once both may hear True."""
        path = object_path(name)
        with self._using():
            found = self._store.head(path)
            if found is None:
                return False
            self._store.delete([path])
            if self._keeper is not None:
                self._keeper.forget(found.size_bytes)
            self._count(-found.size_bytes, -1)
            return True

    def scan(self) -> Iterator[BlobInfo]:
        """Yield every blob, oldest first: one LIST, then a request per blob for its header.

        For tools and tests: a bucket may hold millions of blobs, and a server never scans it.
        """
        with self._using():  # a closed tier refuses here, not at the first blob
            return self._scan()

    def _scan(self) -> Iterator[BlobInfo]:
        found = [info for info in self._store.list("") if parse_object_path(info.path) is not None]
        found.sort(key=lambda info: (info.modified_s, info.path))
        with ThreadPoolExecutor(SCAN_CONCURRENCY, thread_name_prefix="object-scan") as pool:
            window: deque[Future[BlobInfo | None]] = deque()
            try:
                for info in found:
                    window.append(pool.submit(self._blob_info, info))
                    if len(window) >= 2 * SCAN_CONCURRENCY:
                        yield from _present(window.popleft().result())
                while window:
                    yield from _present(window.popleft().result())
            finally:
                pool.shutdown(cancel_futures=True)

    def _blob_info(self, info: ObjectInfo) -> BlobInfo | None:
        """What the header says; None for an object that is gone by now, or is not what its name says."""
        name = parse_object_path(info.path)
        first = self._store.get_head(info.path, PEEK_BYTES)
        if name is None or first is None:
            return None
        try:
            header = peek(first)
        except (ChunkCorrupt, ChunkMismatch):
            return None
        return BlobInfo(header.record, info.size_bytes) if name.is_whole_name_of(header.record) else None

    def usage(self) -> Usage:
        """The whole bucket's use as the keeper knows it; without one, what this tier changed since it was opened."""
        if self._keeper is not None:
            known = self._keeper.usage()
            return Usage(known.used_bytes, self._keeper.capacity_bytes, known.blob_count)
        with self._state:
            return Usage(max(self._used_bytes, 0), None, max(self._blob_count, 0))

    def figures(self) -> dict[str, object]:
        return {} if self._keeper is None else {"bucket": dict(self._keeper.figures())}

    def record_use(self, names: Iterable[BlobName]) -> None:
        if self._keeper is not None:
            self._keeper.record_use(names)

    def flush(self) -> None:
        """Let the keeper work for one turn, and put records of namespaces again that are gone. Blocks on the store."""
        with self._using():
            if self._keeper is not None:
                self._keeper.turn()
            if self._unchecked and self._monotonic() >= self._check_s:
                self._check_s = self._monotonic() + DESCRIBED_CHECK_S
                self._describe_again()

    def describe(self, namespace: bytes, record: bytes) -> None:
        if self._keeper is not None:
            self._keeper.serve(namespace)
        with self._using():
            self._describe(namespace, record)
            with self._state:
                self._described.pop(namespace, None)
                self._described[namespace] = record
                while len(self._described) > DESCRIBED_MAX:
                    del self._described[next(iter(self._described))]

    def _describe_again(self) -> None:
        """Look at the records of namespaces that blobs were put into; what cannot be asked for stays due."""
        with self._state:
            unchecked = list(self._unchecked)
        for namespace in unchecked:
            if (record := self._described.get(namespace)) is not None:
                try:
                    self._describe(namespace, record)
                except TierUnavailable as exc:
                    logger.warning("whether namespaces have their records is asked again later: %s", exc)
                    with self._state:  # behind the others
                        self._unchecked.pop(namespace, None)
                        self._unchecked[namespace] = None
                    return
            with self._state:
                self._unchecked.pop(namespace, None)

    def _describe(self, namespace: bytes, record: bytes) -> None:
        path = f"{namespace.hex()}/namespace.json"
        if namespace not in self._described or self._store.head(path) is None:  # somebody may have emptied it
            self._create(path, memoryview(record))

    def close(self) -> None:
        """Wait for calls in flight (at most the store's deadline), end the keeper, then the store. Idempotent."""
        with self._state:
            was_closed, self._is_closed = self._is_closed, True
            if was_closed:
                return
            self._state.wait_for(lambda: self._in_flight_count == 0, self._timeout_s)
        try:
            if self._keeper is not None:
                self._keeper.close()
        finally:
            self._store.close()

    @contextmanager
    def _using(self) -> Iterator[None]:
        with self._state:
            if self._is_closed:
                raise Closed("the object tier is closed")
            self._in_flight_count += 1
        try:
            yield
        finally:
            with self._state:
                self._in_flight_count -= 1
                self._state.notify_all()

    def _count(self, size_bytes: int, blobs: int) -> None:
        with self._state:
            self._used_bytes += size_bytes
            self._blob_count += blobs


def _has_no_room(exc: TierUnavailable) -> bool:
    return exc.__cause__ is not None and is_full(exc.__cause__)


def _present(info: BlobInfo | None) -> Iterator[BlobInfo]:
    if info is not None:
        yield info
