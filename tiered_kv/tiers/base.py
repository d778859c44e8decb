"""The contract every tier fulfils: blobs by name, blocking, thread-safe, bytes only.

A tier stores whole blobs (header and payload, see docs/format.md) and nothing else. It never looks into a payload,
never starts a thread, never retries and never logs per blob: verification, retries and metering are wrappers
(``tiers/wrappers``), stacked in one place (``tiers/open.py``). Called by the engine's I/O threads and by the CLI.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.keys.naming import BlobName

__all__ = ["BlobInfo", "BlobName", "Tier", "TierTraits", "Usage"]


@dataclass(frozen=True, slots=True)
class BlobInfo:
    """What a scan tells about one stored blob without reading its payload.

    Attributes:
        size_bytes: Bytes the blob takes from the tier's capacity (allocated bytes where the medium has blocks).
    """

    record: ChunkRecord
    size_bytes: int

    @property
    def name(self) -> BlobName:
        """What it is stored under."""
        return BlobName.of(self.record)


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes and blobs a tier holds now, against what it may hold (None: unbounded)."""

    used_bytes: int
    capacity_bytes: int | None
    blob_count: int


@dataclass(frozen=True, slots=True)
class TierTraits:
    """How media differ, as data rather than as types to ask for.

    Attributes:
        name: Short name used in logs, metrics and messages: ``host``, ``disk``, ``object``.
        io_concurrency: How many operations the medium profits from at once.
        is_shared: Other machines may add and remove blobs behind our back: what it holds is not known from a scan at
            start, and not this machine alone keeps it within its capacity.
        flush_interval_s: How often ``flush`` is called.
        is_read_only: Nothing is written here: every put is refused with CapacityExceeded, and tiering makes none.
        keeps_first: A put under a name that is taken leaves the blob that is there.
        names_at_once: Blobs that one question may name (``count_held``); 1: each takes a question of its own.
        is_asked_while_out: While its breaker is open it is asked all the same, and what it then says it has can be
            read: a part of it is somewhere else.
        reads_by_address: A get only ever copies to its buffer's addresses: other memory that is mapped there keeps a
            get that hangs from changing what was there before. Not so where its pages are handed to a device or to
            another process, which fills them when it likes (FUSE with direct_io, virtiofs, 9p, RDMA).
    """

    name: str
    io_concurrency: int
    is_shared: bool
    keeps_first: bool = False
    is_read_only: bool = False
    names_at_once: int = 1
    is_asked_while_out: bool = False
    reads_by_address: bool = False
    flush_interval_s: float = 5.0


class Tier(ABC):
    """One medium.

    Threads: every method may be called from any thread at any time until ``close``.
    """

    traits: TierTraits

    @abstractmethod
    def put(self, name: BlobName, blob: memoryview) -> None:
        """Store ``blob`` under ``name``; readers see all of it or nothing.

        What was there is replaced, or kept where the traits say so: equal names mean equal bytes.

        Raises:
            CapacityExceeded: No room under the tier's limit or on the medium; nothing was stored.
            TierUnavailable: The medium failed; nothing was published.
        """

    def put_if(self, name: BlobName, blob: memoryview, is_wanted: Callable[[], bool]) -> bool:
        """``put`` that asks before readers can see the blob whether it is wanted still; says whether it was stored.

        Args:
            is_wanted: Called once, in the calling thread, after the bytes were written where the medium can do that;
                it may wait for a put that began earlier.
        """
        if not is_wanted():
            return False
        self.put(name, blob)
        return True

    @abstractmethod
    def get_into(self, name: BlobName, buffer: memoryview) -> bool:
        """Read the blob into ``buffer``, whose length is the blob's expected size; False when it is not there.

        Raises:
            ChunkCorrupt: The stored size differs from ``len(buffer)``. The buffer's content is undefined.
            TierUnavailable: The medium failed. The buffer's content is undefined.
        """

    def get_into_by_pieces(
        self,
        name: BlobName,
        buffer: memoryview,
        on_piece: Callable[[int], None],  # noqa: ARG002  # for media that read in order
    ) -> bool:
        """``get_into`` that tells how far it is, so that what was read can be worked on while it is in the cache.

        Args:
            on_piece: Called with the number of bytes, from the buffer's start, that will not change any more; ever
                more, in the calling thread. A medium that fills a buffer otherwise never calls it.
        """
        return self.get_into(name, buffer)

    @abstractmethod
    def contains(self, name: BlobName) -> bool:
        """Whether a blob of that name is there now.

        Raises:
            TierUnavailable: The medium failed.
        """

    def count_held(self, names: Sequence[BlobName], hint: str = "") -> int:  # noqa: ARG002  # for media of many places
        """How many of these blobs are there now, from the first on: all before the first that is not.

        Args:
            names: Of one namespace, a chunk behind its parent, no more than the traits say.
            hint: Where to look first, as the medium names its places; what it does not know it ignores.

        Raises:
            TierUnavailable: The medium failed.
        """
        for count, name in enumerate(names):
            if not self.contains(name):
                return count
        return len(names)

    @abstractmethod
    def delete(self, name: BlobName) -> bool:
        """Remove the blob and give its bytes back; False when it was not there.

        Raises:
            TierUnavailable: The medium failed; the blob may still be there.
        """

    @abstractmethod
    def scan(self) -> Iterator[BlobInfo]:
        """Yield every stored blob, least recently used first; what is not a blob is left out.

        Raises:
            TierUnavailable: The medium failed.
        """

    @abstractmethod
    def usage(self) -> Usage:
        """Bytes and blobs held now; cheap enough to call once a second."""

    @abstractmethod
    def close(self) -> None:
        """Persist what the tier remembers and release what it holds. Idempotent."""

    def record_use(self, names: Iterable[BlobName]) -> None:
        """Note that these blobs were used, oldest use first. Tiers without a memory of recency ignore it."""
        del names

    def flush(self) -> None:
        """Persist recency and sizes so that a killed process loses little of them. May block on the medium."""

    def pinned(self) -> Collection[bytes] | None:
        """Keys an operator wants kept here, as of the last ``flush``; None: that could not be read yet.

        A shared tier's keeper looks after its own.
        """
        return ()

    def figures(self) -> dict[str, object]:
        """What else ``stat`` shows of this tier: plain values, cheap."""
        return {}

    def describe(self, namespace: bytes, record: bytes) -> None:
        """Keep the namespace's readable record (JSON, see ``Namespace.described``) beside its blobs, once.

        Raises:
            CapacityExceeded: There is no room for it.
            TierUnavailable: The medium failed.
        """
        del namespace, record


class TierWrapper(Tier):
    """A tier around another one: forwards every call, and a subclass overrides what it changes.

    ``get_into_by_pieces`` is not forwarded: it ends in ``get_into`` here, so a wrapper that changes how a blob is read
    changes both; nor is ``put_if``, which ends in ``put``. ``count_held`` is: who changes ``contains`` changes both.

    Threads: as thread-safe as ``inner``.
    """

    def __init__(self, inner: Tier) -> None:
        self.traits = inner.traits
        self.inner = inner

    def put(self, name: BlobName, blob: memoryview) -> None:
        self.inner.put(name, blob)

    def get_into(self, name: BlobName, buffer: memoryview) -> bool:
        return self.inner.get_into(name, buffer)

    def contains(self, name: BlobName) -> bool:
        return self.inner.contains(name)

    def count_held(self, names: Sequence[BlobName], hint: str = "") -> int:
        return self.inner.count_held(names, hint)

    def delete(self, name: BlobName) -> bool:
        return self.inner.delete(name)

    def scan(self) -> Iterator[BlobInfo]:
        return self.inner.scan()

    def usage(self) -> Usage:
        return self.inner.usage()

    def record_use(self, names: Iterable[BlobName]) -> None:
        self.inner.record_use(names)

    def flush(self) -> None:
        self.inner.flush()

    def pinned(self) -> Collection[bytes] | None:
        return self.inner.pinned()

    def figures(self) -> dict[str, object]:
        return self.inner.figures()

    def describe(self, namespace: bytes, record: bytes) -> None:
        self.inner.describe(namespace, record)

    def close(self) -> None:
        self.inner.close()
