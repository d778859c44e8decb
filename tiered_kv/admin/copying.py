"""Copy chunks from one tier to another: a bucket to a new node's disk, a disk to a bucket, a directory to a directory.

The most recently used prefixes first, parents before their children and no child without its parent, so that whatever
is copied can be used, also when the target is full or the command is interrupted. Every blob is verified before it is
written. Nothing is overwritten; blobs and records are copied and nothing else. Where to: ``targets.py``. Called by
``cli/warm.py``.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Protocol

from tiered_kv.admin.forest import Forest, Ident, ident
from tiered_kv.admin.storage import Content, NamespaceRecord, Progress, Storage, StoredBlob, no_progress
from tiered_kv.chunks.header import ParsedHeader, check_blob
from tiered_kv.errors import CapacityExceeded, ChunkCorrupt, ChunkMismatch
from tiered_kv.keys.naming import BlobName

AT_ONCE: Final = {"disk": 2, "object": 16}
"""Copies in flight by the kind of the source or target, whichever has more: an object store answers late."""
IN_FLIGHT_BYTES_MAX: Final = 256 << 20
"""Memory that copies in flight may take."""


class Outcome(Enum):
    """What became of one chunk."""

    COPIED = "copied"
    THERE = "there"
    CORRUPT = "corrupt"
    VANISHED = "vanished"
    NO_PARENT = "no_parent"
    LEFT_OUT = "left_out"


HELD: Final = frozenset({Outcome.COPIED, Outcome.THERE})
"""Outcomes after which the target has the chunk."""


class Target(Protocol):
    """Where chunks are copied to. ``has`` and ``put`` are called by several threads at once."""

    def begin(self, record: NamespaceRecord) -> str:
        """Get ready for a namespace's chunks; returns why it takes none of them, empty if it does."""

    def has(self, name: BlobName) -> bool:
        """Whether the chunk is there already."""

    def put(self, name: BlobName, blob: memoryview, parsed: ParsedHeader) -> bool:
        """Take a verified blob whose parent is there; False: it was there already.

        Raises:
            CapacityExceeded: There is no room.
            ChunkMismatch: It does not have the form that the namespace's record declares.
        """

    def end(self) -> Collection[bytes]:
        """No more come; returns the keys of those that were taken and not kept."""


@dataclass(slots=True)
class Copied:
    """What a copy did.

    Attributes:
        selected, selected_bytes: Chunks that were to be there, and what they take in the source.
        copied, copied_bytes: Written now.
        there: Were there already.
        corrupt: Damaged or misplaced in the source; left there.
        vanished: Gone from the source meanwhile.
        left_out: Not copied, because the target is full or a chunk before them is not there.
        dropped: Taken by a running server and not written, because it had something better to do.
        full: Why the target took no more; empty while it did.
        notes: Namespaces that were left out, and why.
    """

    selected: int = 0
    selected_bytes: int = 0
    copied: int = 0
    copied_bytes: int = 0
    there: int = 0
    corrupt: int = 0
    vanished: int = 0
    left_out: int = 0
    dropped: int = 0
    full: str = ""
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What of a source is copied.

    Attributes:
        namespace: Only this one.
        key: Only this chunk and the prefix before it.
        size_bytes: At most so much of the source: its most recently used prefixes.
    """

    namespace: bytes | None = None
    key: StoredBlob | None = None
    size_bytes: int | None = None


def choose(forest: Forest, wanted: Wanted) -> list[StoredBlob]:
    """Chunks to copy, in order: the most recently used prefix first, each from its beginning on."""
    if wanted.key is not None:
        found = forest.prefix(wanted.key)[::-1]
        blobs = found if found[0].name.chunk_index == 0 else []
    else:
        blobs = _by_recency(forest, wanted.namespace)
    if wanted.size_bytes is None:
        return blobs
    total, limited = 0, []
    for blob in blobs:
        total += blob.size_bytes
        if total > wanted.size_bytes:
            break
        limited.append(blob)
    return limited


def _by_recency(forest: Forest, namespace: bytes | None) -> list[StoredBlob]:
    """What requests can reach: chunks used together stay together, and no child comes before its parent."""
    used = forest.last_uses()
    walked = [blob for _, blob in forest.walk(lambda blob: -used[ident(blob)])]
    wanted = [blob for blob in walked if namespace in (None, blob.name.namespace)]
    return sorted(wanted, key=lambda blob: -used[ident(blob)])  # stable, and a parent was used no earlier


def copy(
    source: Storage,
    target: Target,
    blobs: Sequence[StoredBlob],
    content: Content,
    at_once: int,
    progress: Progress = no_progress,
) -> Copied:
    """Copy what :func:`choose` chose of a source's content.

    The order holds but for the last ``at_once`` chunks that fit: which of those in flight get the room is chance.

    Raises:
        TierUnavailable: One side failed. What was copied until then is there and can be used.
    """
    result = Copied()
    refused: dict[bytes, bool] = {}
    for space in dict.fromkeys(blob.name.namespace for blob in blobs):
        record = content.records.get(space) or NamespaceRecord(space, None, "there is no namespace.json")
        reason = target.begin(record)
        refused[space] = bool(reason)
        if reason:
            result.notes.append(f"namespace {space.hex()} was left out: {reason}")
    taken = [blob for blob in blobs if not refused[blob.name.namespace]]
    result.selected, result.selected_bytes = len(taken), sum(blob.size_bytes for blob in taken)
    run = _Run(source, target)
    counts: Counter[Outcome] = Counter()
    with ThreadPoolExecutor(at_once, thread_name_prefix="tiered_kv-copy") as pool:
        for done, (blob, outcome) in enumerate(run.all(pool, taken, at_once), start=1):
            counts[outcome] += 1
            result.copied_bytes += blob.size_bytes if outcome is Outcome.COPIED else 0
            progress(done, len(taken))
    dropped = target.end()
    result.dropped = len(dropped)
    result.copied = counts[Outcome.COPIED] - result.dropped
    result.copied_bytes -= sum(blob.size_bytes for blob in taken if blob.name.key in dropped)
    result.there, result.corrupt = counts[Outcome.THERE], counts[Outcome.CORRUPT]
    result.vanished, result.left_out = counts[Outcome.VANISHED], counts[Outcome.NO_PARENT] + counts[Outcome.LEFT_OUT]
    result.full = run.full
    return result


def carry_epochs(source: Storage, target: Storage, records: Iterable[NamespaceRecord]) -> list[str]:
    """From a bucket to another: have it begin with the epochs in force in the first, or nobody finds the copies there.

    A bucket that has an epoch of a model keeps it. Returns what that means, in words.

    Raises:
        TierUnavailable: One of them does not answer.
    """
    from tiered_kv.admin.object_storage import ObjectStorage  # noqa: PLC0415 - its client takes long to import

    if not isinstance(source, ObjectStorage) or not isinstance(target, ObjectStorage):
        return []
    epochs, notes = source.epochs(), []
    for record in records:
        found = None if record.namespace is None else epochs.in_force(record.namespace)
        if found is None:
            continue  # retired there, too, or of another kind
        theirs = target.begin_with(*found)
        if theirs != found[1]:
            notes.append(
                f"engines in front of {target.uri} do not find the chunks of namespace {record.digest.hex()}: they are "
                f"of epoch shared-{found[1]}, and that bucket has begun shared-{theirs} of this model"
            )
    return notes


class _Run:
    """Chunks in flight. A chunk waits for its parent, which was handed out before it and is never behind it."""

    def __init__(self, source: Storage, target: Target) -> None:
        self._source = source
        self._target = target
        self._is_stopped = threading.Event()
        self.full = ""

    def all(
        self, pool: ThreadPoolExecutor, blobs: Sequence[StoredBlob], at_once: int
    ) -> Iterator[tuple[StoredBlob, Outcome]]:
        """Every chunk with its outcome, in order."""
        futures: dict[Ident, Future[Outcome]] = {}
        flying: deque[tuple[StoredBlob, Future[Outcome]]] = deque()
        flying_bytes = 0
        try:
            for blob in blobs:
                while flying and (len(flying) >= at_once or flying_bytes + blob.size_bytes > IN_FLIGHT_BYTES_MAX):
                    flying_bytes -= flying[0][0].size_bytes
                    yield _ended(flying)
                parent = futures.get((blob.name.namespace, blob.name.parent))
                future = pool.submit(self._one, blob, parent)
                futures[ident(blob)] = future
                flying.append((blob, future))
                flying_bytes += blob.size_bytes
            while flying:
                yield _ended(flying)
        finally:
            self._is_stopped.set()  # when one raised, or nobody takes the rest

    def _one(self, blob: StoredBlob, parent: Future[Outcome] | None) -> Outcome:
        if self._is_stopped.is_set():
            return Outcome.LEFT_OUT
        if self._target.has(blob.name):
            return Outcome.THERE
        data = self._source.read(blob)
        if data is None:
            return Outcome.VANISHED
        try:
            parsed = check_named(data, blob.name)
            if blob.name.chunk_index and (parent is None or parent.result() not in HELD):
                return Outcome.NO_PARENT
            if self._is_stopped.is_set():
                return Outcome.LEFT_OUT
            return Outcome.COPIED if self._target.put(blob.name, memoryview(data), parsed) else Outcome.THERE
        except (ChunkCorrupt, ChunkMismatch):
            return Outcome.CORRUPT
        except CapacityExceeded as exc:
            self.full = str(exc)
            self._is_stopped.set()
            return Outcome.LEFT_OUT


def _ended(flying: deque[tuple[StoredBlob, Future[Outcome]]]) -> tuple[StoredBlob, Outcome]:
    blob, future = flying.popleft()
    return blob, future.result()


def check_named(data: bytes, name: BlobName) -> ParsedHeader:
    """Verify a blob, and that it is the one its name says.

    Raises:
        ChunkCorrupt, ChunkMismatch: It is not.
    """
    parsed = check_blob(memoryview(data))
    header = parsed.header
    found = (header.namespace, header.key, header.parent, header.chunk_index)
    if found != (name.namespace, name.key, name.parent, name.chunk_index):
        raise ChunkCorrupt(f"a blob lies under another's name. expected={name.key.hex()} observed={header.key.hex()}")
    return parsed
