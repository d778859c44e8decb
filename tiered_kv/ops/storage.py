"""The operator's view of one tier: blobs, records, strays, pins, and protocols to change them.

A function takes the smallest protocol that it needs: ``Reader`` to look, ``Writer`` to copy, ``Remover`` to remove,
``PinStore`` for pins. ``DiskStorage`` and ``ObjectStorage`` are all of them. Reading takes no lock and changes nothing,
so it works beside a running server.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, Self

import msgspec

from tiered_kv.errors import ConfigError
from tiered_kv.keys.namespace import Namespace
from tiered_kv.keys.naming import BlobName, parse_path
from tiered_kv.keys.state_keys import is_state
from tiered_kv.keys.stored_by import UNKNOWN, shared_line
from tiered_kv.keys.tail_keys import tail_tokens

FOR_GOOD: Final = float("inf")
"""End of a pin that has none."""

Progress = Callable[[int, int | None], None]
"""Called with the count done and the total, if that is known. Called often; must be cheap."""


def no_progress(done: int, total: int | None) -> None:
    """No display."""
    del done, total


class StoredBlob(msgspec.Struct, frozen=True, gc=False):
    """One blob of a tier. The garbage collector does not know of it: there may be a million.

    Attributes:
        name: With its ancestry: parent and chunk index are known.
        size_bytes: What it takes of the tier's capacity (allocated bytes where the medium has blocks).
        written_s, used_s: Seconds since 1970; a blob that was never read since counts as used when it was written.
        pinned_until_s: ``FOR_GOOD`` for a pin without an end; 0 while it is not pinned.
        tag: Digest of the owner (``keys/tags.py``); None where only its header has it, which has not been read.
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

    @property
    def is_state(self) -> bool:
        """Whether it is a part of a state and no chunk."""
        return is_state(self.name)

    @property
    def tail_tokens(self) -> int:
        """Of a tail its length; 0: it is none."""
        return tail_tokens(self.name.key)


@dataclass(frozen=True, slots=True)
class Origin:
    """What an erasure selects chunks by: one of the two.

    Attributes:
        tag: The digest of their owner's tag.
        stored_by: Conditions on who stored them (``keys/conditions.py``).
    """

    tag: bytes = b""
    stored_by: tuple[str, ...] = ()


NAMED_AS_BLOBS: Final = frozenset({"damaged", "unreadable", "foreign"})
"""Kinds of strays that have a blob's name."""


@dataclass(frozen=True, slots=True)
class Stray:
    """Something in the tier that is no blob, or not one that can be read there.

    Attributes:
        path: Relative to the tier's root.
        kind: ``name``: its name is not one that we give. ``damaged``: a blob's name, but no header of it.
            ``unreadable``: the same, and the medium does not give its header. ``foreign``: a sound header of another
            namespace or format version. ``temp``: left by a write that was cut off.
    """

    path: str
    size_bytes: int
    modified_s: float
    kind: str
    reason: str

    def as_blob(self) -> StoredBlob | None:
        """The blob that a file of a directory has the name of, without being one; None for any other stray."""
        name = parse_path(self.path.removeprefix("blobs/")) if self.kind in NAMED_AS_BLOBS else None
        return None if name is None else StoredBlob(name, self.size_bytes, self.modified_s, self.modified_s, 0.0)


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

    @classmethod
    def missing(cls, digest: bytes) -> Self:
        """What stands for the record of a namespace that has none."""
        return cls(digest, None, "there is no namespace.json")

    @classmethod
    def parse(cls, digest: bytes, data: bytes | None, written_s: float = 0.0) -> Self:
        """Read a stored record, which may have been edited by hand; ``data`` None: there is none."""
        if data is None:
            return cls.missing(digest)
        try:
            namespace, first = Namespace.from_described(data)
        except ConfigError as exc:
            return cls(digest, None, f"namespace.json cannot be understood: {exc}", written_s)
        if namespace.digest != digest:
            return cls(digest, None, f"namespace.json is that of {namespace.digest.hex()}", written_s)
        try:
            line = shared_line(first) if isinstance(first, str) else UNKNOWN
        except ValueError:
            line = UNKNOWN
        return cls(digest, namespace, written_s=written_s, first_stored_by=line)

    @property
    def chunk_tokens(self) -> int | None:
        """Tokens of a chunk."""
        value = self.namespace.fields.get("chunk_tokens") if self.namespace is not None else None
        return value if isinstance(value, int) else None

    @property
    def is_of_rows(self) -> bool:
        """Whether its chunks are rows of vLLM's own offloading, which vLLM's block hashes name (``row_names.py``)."""
        return self.namespace is not None and "rows" in self.namespace.fields

    @property
    def state_parts(self) -> int:
        """Parts of a state of its recurrent layers; 0 where it has none, or where that is unknown."""
        value = self.namespace.fields.get("recurrent_state") if self.namespace is not None else None
        return len(value) if isinstance(value, list) else 0


@dataclass(slots=True)
class Content:
    """A look at everything in a tier.

    Attributes:
        blobs: In no order; of a directory a ``BlobTable``.
        own_bytes: What we keep there besides blobs: records, indexes, leases, logs.
        notes: What may make it incomplete, in words, e.g. that the index could not be read.
        is_whole: False where only the beginning was listed.
        has_uses: False where every time of use is that of writing, because nothing there says more, and no note does.
        unsure_since_s: Seconds since 1970. Of blobs that were written since then the tags and storers may be those of
            what lay there before: their headers tell.
        unread: Chunks whose headers were asked for their origins, and the medium does not give them now.
        unjudged: Likewise those whose headers do not tell: damaged, or of another format version or namespace.
    """

    blobs: Sequence[StoredBlob] = ()
    strays: list[Stray] = field(default_factory=list)
    records: dict[bytes, NamespaceRecord] = field(default_factory=dict)
    own_bytes: int = 0
    notes: list[str] = field(default_factory=list)
    is_whole: bool = True
    has_uses: bool = True
    unsure_since_s: float = float("inf")
    unread: int = 0
    unjudged: int = 0

    @property
    def blob_bytes(self) -> int:
        return sum(blob.size_bytes for blob in self.blobs)

    def count_strays(self, *kinds: str, namespace: bytes | None = None) -> int:
        """Files of a directory under names of blobs that are none, of these kinds; of one namespace or of all."""
        below = "blobs/" if namespace is None else f"blobs/{namespace.hex()}/"
        return sum(stray.kind in kinds and stray.path.startswith(below) for stray in self.strays)

    def state_parts(self) -> dict[bytes, int]:
        """Parts of a state by namespace, of those that have states."""
        return {space: record.state_parts for space, record in self.records.items() if record.state_parts}


@dataclass(slots=True)
class RemovalTotals:
    """What a removal did.

    Attributes:
        kept: Blobs that stay because a server uses them at the moment, or that others need.
        missing: Gone already.
        failed: Blobs that stay although a server was told: it could not delete them, or does not know of them.
    """

    removed: int = 0
    removed_bytes: int = 0
    kept: int = 0
    missing: int = 0
    failed: int = 0


_NUMBERED: Final = re.compile(r"(base|shared)-([0-9]{1,18})")
_PRIVATE: Final = "private-"


@dataclass(frozen=True, slots=True)
class BaseEpochs:
    """The epochs that sessions of a tier open with.

    Attributes:
        kind: ``base`` in a directory, ``shared`` in a bucket.
        numbers: By digest of the record with an empty epoch, in hex.
        floor: Added to every number.
    """

    kind: str
    numbers: Mapping[str, int] = field(default_factory=dict)
    floor: int = 0

    def has_retired(self, namespace: Namespace) -> bool:
        """Whether a reset made this namespace one that no session opens again.

        Epochs of another kind cannot be judged here and count as in force, e.g. those that a directory holds in front
        of a bucket.
        """
        found = numbered(namespace, self.kind)
        return found is not None and found[1] < self.in_force(found[0])

    @property
    def has_begun(self) -> bool:
        """Whether any number is known: of the namespaces of a tier without one, no reset there has retired any."""
        return bool(self.floor) or any(parse_digest(name) is not None for name in self.numbers)

    def in_force(self, base: bytes) -> int:
        """The number that sessions of a model open with.

        Args:
            base: The digest of the model's record with an empty epoch.
        """
        return self.floor + self.numbers.get(base.hex(), 0)


def numbered(namespace: Namespace, kind: str) -> tuple[bytes, int] | None:
    """A namespace's digest with an empty epoch, and the number of its epoch; None where that is not of this kind."""
    found = _NUMBERED.fullmatch(str(namespace.fields["epoch"]))
    if found is None or found[1] != kind:
        return None
    return namespace.in_epoch("").digest, int(found[2])


def parse_digest(digits: str) -> bytes | None:
    """The namespace whose directory or prefix has this name; None for any other name."""
    try:
        digest = bytes.fromhex(digits)
    except ValueError:
        return None
    return digest if len(digest) == 16 and digest.hex() == digits else None


def deepest_first(blobs: Iterable[StoredBlob]) -> list[StoredBlob]:
    """Children before their parents: the order in which chunks are removed."""
    return sorted(blobs, key=lambda blob: -blob.name.chunk_index)


def is_private(namespace: Namespace) -> bool:
    """Whether only one engine uses the namespace, since a reset: no other engine ever opens it."""
    return str(namespace.fields["epoch"]).startswith(_PRIVATE)


class Reader(Protocol):
    """What a look at a tier takes: no lock, and nothing changes.

    Threads: one at a time, but for ``contains`` and ``read``, which several may call at once.

    Attributes:
        uri: As it may be shown.
        kind: ``disk`` or ``object``.
        readers: How many reads at once the medium profits from.
    """

    uri: str
    kind: str
    readers: int

    def look(self, progress: Progress = no_progress) -> Content:
        """List everything. Reads no payload; of files that no index knows it reads the headers.

        Raises:
            TierUnavailable: The medium cannot be read.
        """

    def records(self) -> dict[bytes, NamespaceRecord]:
        """The namespaces there are, by digest, without listing their blobs where the medium allows it."""

    def contains(self, names: Sequence[BlobName]) -> list[bool]:
        """Which of these blobs are there now."""

    def read(self, blob: StoredBlob | BlobName, length: int | None = None) -> bytes | None:
        """A blob's bytes, unverified, or its first ``length``; None when it is not there."""

    def path(self, name: BlobName) -> str:
        """Where a blob lies, relative to the tier's root."""

    def record_path(self, namespace: bytes) -> str:
        """Where a namespace's record lies, relative to the tier's root."""

    def epochs(self) -> BaseEpochs:
        """Which namespaces resets have retired.

        Raises:
            TierUnavailable: It cannot be read.
        """

    def capacity_bytes(self) -> int | None:
        """The limit in force, from the server that enforces it now; None: unlimited, or unknown here."""


class Writer(Protocol):
    """What a copy into a tier takes. Threads: ``write`` may be called by several at once."""

    def write(self, name: BlobName, blob: memoryview) -> bool:
        """Store a verified blob; False when it is there already.

        Raises:
            CapacityExceeded: There is no room for it.
            DirectoryLocked: Another command works on the directory.
        """

    def write_record(self, namespace: Namespace, first_stored_by: str = UNKNOWN) -> None:
        """Store a namespace's record beside its blobs, with who stored there first, unless it is there."""

    def begin_with(self, base: bytes, number: int) -> int | None:
        """Have a tier without a server begin with this epoch of a model, if it has none.

        Returns the number in force; None: what the tier says of its epochs cannot be understood, and stays.

        Args:
            base: The digest of the model's record with an empty epoch.
            number: 0 only asks.

        Raises:
            DirectoryLocked: Another command works on the directory.
            TierUnavailable: The medium cannot be read or written.
        """


class Remover(Protocol):
    """What a removal takes: its operations, and what is in use."""

    def is_served(self) -> bool:
        """Whether a server owns the tier: then other processes may remove blobs only."""

    def live_namespaces(self) -> set[bytes]:
        """Namespaces that engines use now, as far as their servers report it here."""

    def remove(
        self, blobs: Sequence[StoredBlob], progress: Progress = no_progress, *, holes: bool = False
    ) -> RemovalTotals:
        """Remove blobs, the deepest first.

        Args:
            holes: Also those on which chunks depend that stay. Without it a server that runs keeps them.

        Raises:
            DirectoryLocked: Another command works on the directory.
        """

    def erase(
        self, blobs: Sequence[StoredBlob], origin: Origin, namespace: bytes | None, progress: Progress = no_progress
    ) -> RemovalTotals:
        """Remove all chunks of an origin and all behind them, listed or not; end the pins on them.

        Args:
            blobs: What of it was listed, with all behind it.
            namespace: Only there; None: everywhere.

        Raises:
            DirectoryLocked: Another command works on the directory.
        """

    def discard(self, names: Sequence[BlobName]) -> None:
        """Remove whatever lies under these names without the server, to which the files have vanished."""

    def remove_namespace(self, namespace: bytes) -> bool:
        """Remove a namespace's record and directories; False: something else lies there, so nothing was removed.

        Raises:
            DirectoryLocked: A server runs on the directory.
        """

    def remove_strays(self, strays: Sequence[Stray]) -> RemovalTotals:
        """Remove what is no blob; ``kept``: what turns out to be somebody else's.

        Raises:
            DirectoryLocked: A server runs on the directory; it removes its temp files by itself.
        """


class PinStore(Protocol):
    """The pins of a tier."""

    def pins(self) -> Mapping[BlobName, float]:
        """Pinned chunks and until when, seconds since 1970; those that have ended are left out."""

    def pin(self, names: Iterable[BlobName], until_s: float) -> None:
        """Keep these chunks, and what they depend on, from eviction; ``until_s`` may be ``FOR_GOOD``."""

    def unpin(self, names: Iterable[BlobName]) -> int:
        """End pins; returns how many there were."""


class Storage(Reader, Writer, Remover, PinStore, Protocol):
    """One tier, opened for an operator: the whole of it, as ``open_storage`` gives it.

    Removing and writing go through the server of a disk directory if one runs, else under the directory's lock; an
    object store is changed directly, because other machines do the same.
    """

    def erase(
        self, blobs: Sequence[StoredBlob], origin: Origin, namespace: bytes | None, progress: Progress = no_progress
    ) -> RemovalTotals:
        """See ``Remover.erase``: without a server, what was listed is all there is."""
        del origin, namespace
        self.unpin([blob.name for blob in blobs if blob.pinned_until_s])
        return self.remove(blobs, progress)

    def close(self) -> None:
        """Give back what is held. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()
