"""One tier as an operator sees it: what is stored, who may remove it, how to read and write it.

Reading takes no lock and changes nothing, so it works beside a running server. Removing and writing go through the
server of a disk directory if one runs, else under the directory's lock; an object store is changed directly, because
other machines do the same. Called by the other modules of this package.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, NamedTuple, Self

from tiered_kv.admin.epochs import BaseEpochs
from tiered_kv.keys.namespace import Namespace
from tiered_kv.keys.naming import BlobName
from tiered_kv.keys.stored_by import UNKNOWN

FOR_GOOD: Final = float("inf")
"""End of a pin that has none."""

Progress = Callable[[int, int | None], None]
"""Told how many are done and how many there are, if that is known. Called often; must be cheap."""


def no_progress(done: int, total: int | None) -> None:
    """Nobody watches."""
    del done, total


class StoredBlob(NamedTuple):
    """One blob of a tier.

    Attributes:
        name: With its ancestry: parent and chunk index are known.
        size_bytes: What it takes of the tier's capacity (allocated bytes where the medium has blocks).
        written_s, used_s: Seconds since 1970; a blob that was never read since counts as used when it was written.
        pinned_until_s: ``FOR_GOOD`` for a pin without an end; 0 while it is not pinned.
        tag: Digest of whose it is (``keys/tags.py``); None where only its header tells, and nobody has read that.
        stored_by: Who stored it (``keys/stored_by.py``); None likewise; empty where it is of an older format, of which
            no header tells.
    """

    name: BlobName
    size_bytes: int
    written_s: float
    used_s: float
    pinned_until_s: float
    tag: bytes | None = None
    stored_by: str | None = None


@dataclass(frozen=True, slots=True)
class Origin:
    """By what an erasure finds its chunks: one of the two.

    Attributes:
        tag: The digest of whose they are.
        stored_by: Conditions on who stored them (``keys/conditions.py``).
    """

    tag: bytes = b""
    stored_by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Stray:
    """Something in the tier that is no blob, or not one that can be read there.

    Attributes:
        path: Relative to the tier's root.
        kind: ``name``: its name is not one that we give. ``damaged``: a blob's name, but no header of it.
            ``foreign``: a sound header of another namespace or format version. ``temp``: left by a write that was cut
            off.
    """

    path: str
    size_bytes: int
    modified_s: float
    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class NamespaceRecord:
    """What lies beside a namespace's blobs.

    Attributes:
        namespace: None where there is no record, or none that can be read; then ``problem`` says why.
        written_s: When the record was written; 0 where there is none.
        first_stored_by: Who opened the namespace here first (``keys/stored_by.py``); empty where that is not said.
    """

    digest: bytes
    namespace: Namespace | None
    problem: str = ""
    written_s: float = 0.0
    first_stored_by: str = UNKNOWN

    @property
    def chunk_tokens(self) -> int | None:
        """Tokens of a chunk."""
        value = self.namespace.fields.get("chunk_tokens") if self.namespace is not None else None
        return value if isinstance(value, int) else None


@dataclass(slots=True)
class Content:
    """A look at everything in a tier.

    Attributes:
        blobs: In no order.
        own_bytes: What we keep there besides blobs: records, indexes, leases, logs.
        notes: What may make it incomplete, in words, e.g. that the index could not be read.
    """

    blobs: list[StoredBlob] = field(default_factory=list)
    strays: list[Stray] = field(default_factory=list)
    records: dict[bytes, NamespaceRecord] = field(default_factory=dict)
    own_bytes: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def blob_bytes(self) -> int:
        return sum(blob.size_bytes for blob in self.blobs)


@dataclass(slots=True)
class Removal:
    """What a removal did.

    Attributes:
        kept: Blobs that stay because a server uses them at the moment, or that others need.
        missing: Gone already.
    """

    removed: int = 0
    removed_bytes: int = 0
    kept: int = 0
    missing: int = 0


class Storage(ABC):
    """One tier, opened for an operator.

    Threads: one at a time, but for ``contains``, ``read`` and ``write``, which several may call at once.

    Attributes:
        uri: As it may be shown.
        kind: ``disk`` or ``object``.
        readers: How many reads at once the medium profits from.
    """

    uri: str
    kind: str
    readers: int = 4

    @abstractmethod
    def look(self, progress: Progress = no_progress) -> Content:
        """List everything. Reads no payload; of files that no index knows it reads the headers.

        Raises:
            TierUnavailable: The medium cannot be read.
        """

    @abstractmethod
    def records(self) -> dict[bytes, NamespaceRecord]:
        """The namespaces there are, by digest, without listing their blobs where the medium allows it."""

    @abstractmethod
    def contains(self, names: Sequence[BlobName]) -> list[bool]:
        """Which of these blobs are there now."""

    @abstractmethod
    def read(self, blob: StoredBlob | BlobName, length: int | None = None) -> bytes | None:
        """A blob's bytes, unverified, or its first ``length``; None when it is not there."""

    @abstractmethod
    def path(self, name: BlobName) -> str:
        """Where a blob lies, relative to the tier's root."""

    @abstractmethod
    def record_path(self, namespace: bytes) -> str:
        """Where a namespace's record lies, relative to the tier's root."""

    @abstractmethod
    def is_served(self) -> bool:
        """Whether a server owns the tier, so that nobody else may remove more than blobs."""

    @abstractmethod
    def live_namespaces(self) -> set[bytes]:
        """Namespaces that engines use now, as far as their servers say so here."""

    @abstractmethod
    def epochs(self) -> BaseEpochs:
        """Which namespaces resets have retired.

        Raises:
            TierUnavailable: It cannot be read.
        """

    @abstractmethod
    def write(self, name: BlobName, blob: memoryview) -> bool:
        """Store a verified blob; False when it is there already.

        Raises:
            CapacityExceeded: There is no room for it.
            DirectoryLocked: Another command works on the directory.
        """

    @abstractmethod
    def write_record(self, namespace: Namespace, first_stored_by: str = UNKNOWN) -> None:
        """Store a namespace's record beside its blobs, with who stored there first, unless it is there."""

    @abstractmethod
    def remove(self, blobs: Sequence[StoredBlob], progress: Progress = no_progress, *, holes: bool = False) -> Removal:
        """Remove blobs, the deepest first.

        Args:
            holes: Also those on which chunks depend that stay. Without it a server that runs keeps them.

        Raises:
            DirectoryLocked: Another command works on the directory.
        """

    def erase(
        self, blobs: Sequence[StoredBlob], origin: Origin, namespace: bytes | None, progress: Progress = no_progress
    ) -> Removal:
        """Remove what is of an origin and all behind it, also what nobody has listed; end the pins on it.

        Args:
            blobs: What of it was listed, with all behind it.
            namespace: Only there; None: everywhere.

        Raises:
            DirectoryLocked: Another command works on the directory.
        """
        del origin, namespace  # what was listed is all there is
        self.unpin([blob.name for blob in blobs if blob.pinned_until_s])
        return self.remove(blobs, progress)

    @abstractmethod
    def discard(self, names: Sequence[BlobName]) -> None:
        """Remove what lies under these names, whatever it is, and ask no server: to it, it has vanished."""

    @abstractmethod
    def remove_namespace(self, namespace: bytes) -> bool:
        """Remove a namespace's record and directories; False: something else lies there, so nothing was removed.

        Raises:
            DirectoryLocked: A server runs on the directory.
        """

    @abstractmethod
    def remove_strays(self, strays: Sequence[Stray]) -> int:
        """Remove what is no blob; returns how many are gone.

        Raises:
            DirectoryLocked: A server runs on the directory; it removes its temp files by itself.
        """

    @abstractmethod
    def pins(self) -> Mapping[BlobName, float]:
        """Pinned chunks and until when, seconds since 1970; those that have ended are left out."""

    @abstractmethod
    def pin(self, names: Iterable[BlobName], until_s: float) -> None:
        """Keep these chunks, and what they depend on, from eviction; ``until_s`` may be ``FOR_GOOD``."""

    @abstractmethod
    def unpin(self, names: Iterable[BlobName]) -> int:
        """End pins; returns how many there were."""

    @abstractmethod
    def capacity_bytes(self) -> int | None:
        """The limit that is in force, as far as it can be known from here: from who enforces it now."""

    def close(self) -> None:
        """Give back what is held. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
