"""Copy chunks from one tier to another, e.g. from a bucket to a new node's disk.

The most recently used prefixes first, parents before their children and no child without its parent, so that whatever
is copied can be used, also when the target is full or the command is interrupted. Every blob is verified before it is
written. Nothing is overwritten; blobs and records are copied and nothing else. Where to: ``copy_targets.py``. Called by
``cli/warm.py``.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Protocol

from tiered_kv.chunks.header import ParsedHeader, check_blob
from tiered_kv.errors import CapacityExceeded, ChunkCorrupt, ChunkMismatch, TierUnavailable
from tiered_kv.keys.naming import BlobName
from tiered_kv.ops.eviction import check_key_within
from tiered_kv.ops.forest import Forest, Ident, ident
from tiered_kv.ops.report import Report
from tiered_kv.ops.storage import (
    NAMED_AS_BLOBS,
    Content,
    NamespaceRecord,
    Progress,
    Reader,
    Storage,
    StoredBlob,
    no_progress,
    numbered,
)
from tiered_kv.ops.text import counted

_PLACES: Final = {"disk": ("directory", "base"), "object": ("bucket", "shared")}
"""How a kind of tier is called, and the kind of the epochs that its engines use."""
AT_ONCE: Final = {"disk": 2, "object": 16}
"""Copies in flight by the kind of the source or target, whichever has more: an object store answers late."""
IN_FLIGHT_BYTES_MAX: Final = 256 << 20
"""Memory that copies in flight may take."""
RETIRED: Final = "a reset there retired it, so a copy goes unused, or has engines load what was stored before the reset"
UNKNOWN_EPOCH: Final = "whether a reset there retired it is not known, so engines might load what was stored before it"


class CopyOutcome(Enum):
    """What became of one chunk."""

    COPIED = "copied"
    THERE = "there"
    CORRUPT = "corrupt"
    FOREIGN = "foreign"
    """Of another format version, or of another namespace than its name says."""
    VANISHED = "vanished"
    NO_PARENT = "no_parent"
    LEFT_OUT = "left_out"


HELD: Final = frozenset({CopyOutcome.COPIED, CopyOutcome.THERE})
"""Outcomes after which the target has the chunk."""


class Target(Protocol):
    """Where chunks are copied to. ``has`` and ``put`` are called by several threads at once.

    Attributes:
        uri: As it may be shown.
    """

    @property
    def uri(self) -> str: ...

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


class WarmReport(Report, frozen=True, kw_only=True):
    """What ``warm`` or ``cp`` copied.

    Attributes:
        source: The tier that was copied from.
        target: The tier that was copied to.
        selected: Chunks of the source that were to be in the target.
        selected_bytes: What they take in the source.
        copied: Chunks that were written; where a server runs, also those that another command gave it at the same time.
        copied_bytes: What they take in the source.
        there: Chunks that the target had already.
        corrupt: Damaged or misplaced blobs of the source; they were not copied.
        foreign: Blobs of another format version or namespace; they were not copied.
        vanished: Chunks that went from the source meanwhile.
        left_out: Chunks that were not copied, because the target is full or a chunk before them is not there.
        dropped: Chunks that the target's running server took and did not write.
        refused: Chunks of the namespaces that were left out; none of the others' numbers counts them.
        full: Why the target took no more; null while it did.
        notes: What may make this incomplete, in words: namespaces that were left out, and why.
    """

    source: str
    target: str
    selected: int
    selected_bytes: int
    copied: int
    copied_bytes: int
    there: int
    corrupt: int
    foreign: int
    vanished: int
    left_out: int
    dropped: int
    refused: int
    full: str | None
    notes: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What of a source is copied.

    Attributes:
        namespace: Only this one.
        key: Only this chunk, the prefix before it and the states along it.
        size_bytes: At most so much of the source: its most recently used prefixes.
        barred: Namespaces of which nothing is copied, and why.
    """

    namespace: bytes | None = None
    key: StoredBlob | None = None
    size_bytes: int | None = None
    barred: Mapping[bytes, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check that the chunk lies in the namespace.

        Raises:
            ConfigError: It does not.
        """
        check_key_within(self.key, self.namespace)

    def means(self, blob: StoredBlob) -> bool:
        """Whether the chunk lies where copies are wanted from; no tail is wanted."""
        return self.namespace in (None, blob.name.namespace) and not blob.tail_tokens


def note_on_strays(content: Content, below: str) -> list[str]:
    """Say that files that lie under names of chunks are none that can be copied.

    Args:
        below: The path of the only namespace that is copied; empty: all are.
    """
    count = sum(stray.kind in NAMED_AS_BLOBS and stray.path.startswith(below) for stray in content.strays)
    if not count:
        return []
    return [f"{counted(count, 'file')} under the name of a chunk, damaged or of another format version, not copied"]


def is_any_wanted(blobs: Iterable[StoredBlob], wanted: Wanted) -> bool:
    """Whether a source has any chunk of what is wanted, reachable or not."""
    if wanted.key is not None:
        return True
    return any(wanted.means(blob) and blob.name.namespace not in wanted.barred for blob in blobs)


def choose(forest: Forest, wanted: Wanted) -> list[StoredBlob]:
    """Chunks to copy, in order: the most recently used prefix first, each from its beginning on.

    No tails: the next turn makes each of them useless, and no bucket has any.
    """
    if wanted.key is not None:
        is_whole = forest.prefix(wanted.key)[-1].name.chunk_index == 0
        blobs = forest.with_states([wanted.key]) if is_whole else []
    else:
        blobs = _by_recency(forest, wanted.namespace)
    blobs = [blob for blob in blobs if not blob.tail_tokens and blob.name.namespace not in wanted.barred]
    if wanted.size_bytes is None:
        return blobs
    total, limited = 0, []
    for blob in blobs:
        total += blob.size_bytes
        if total > wanted.size_bytes:
            break
        limited.append(blob)
    return _without_partial_state(forest, limited)


def _without_partial_state(forest: Forest, blobs: list[StoredBlob]) -> list[StoredBlob]:
    """Less the parts of a state of which not all fit."""
    chosen = set(map(ident, blobs))
    return [
        blob for blob in blobs if not blob.is_state or all(ident(part) in chosen for part in forest.whole_state(blob))
    ]


def _by_recency(forest: Forest, namespace: bytes | None) -> list[StoredBlob]:
    """What requests can reach: chunks used together stay together, and no child comes before its parent."""
    used = forest.last_uses()
    walked = forest.walk(lambda blob: -used[forest.row(blob)])
    wanted = [blob for blob in walked if namespace in (None, blob.name.namespace)]
    return sorted(wanted, key=lambda blob: -used[forest.row(blob)])  # stable, and a parent was used no earlier


def copy(
    source: Reader,
    target: Target,
    blobs: Sequence[StoredBlob],
    content: Content,
    at_once: int,
    progress: Progress = no_progress,
    refusals: dict[bytes, str] | None = None,
) -> WarmReport:
    """Copy what :func:`choose` chose of a source's content.

    The order holds but for the last ``at_once`` chunks that fit: which of those in flight get the room is chance.

    Args:
        refusals: Namespaces that are left out, and why; those that the target refuses are added.

    Raises:
        TierUnavailable: One side failed. What was copied until then is there and can be used.
    """
    notes, refusals = list(content.notes), {} if refusals is None else refusals
    for space in dict.fromkeys(blob.name.namespace for blob in blobs):
        reason = refusals.get(space) or target.begin(content.records.get(space) or NamespaceRecord.missing(space))
        if reason:
            refusals[space] = reason
            notes.append(f"namespace {space.hex()} was left out: {reason}")
    taken = [blob for blob in blobs if blob.name.namespace not in refusals]
    run = _Copier(source, target)
    counts: Counter[CopyOutcome] = Counter()
    copied_bytes = 0
    with ThreadPoolExecutor(at_once, thread_name_prefix="tiered_kv-copy") as pool:
        for done, (blob, outcome) in enumerate(run.all(pool, taken, at_once), start=1):
            counts[outcome] += 1
            copied_bytes += blob.size_bytes if outcome is CopyOutcome.COPIED else 0
            progress(done, len(taken))
    dropped = target.end()
    return WarmReport(
        source=source.uri,
        target=target.uri,
        selected=len(taken),
        selected_bytes=sum(blob.size_bytes for blob in taken),
        copied=counts[CopyOutcome.COPIED] - len(dropped),
        copied_bytes=copied_bytes - sum(blob.size_bytes for blob in taken if blob.name.key in dropped),
        there=counts[CopyOutcome.THERE],
        corrupt=counts[CopyOutcome.CORRUPT],
        foreign=counts[CopyOutcome.FOREIGN],
        vanished=counts[CopyOutcome.VANISHED],
        left_out=counts[CopyOutcome.NO_PARENT] + counts[CopyOutcome.LEFT_OUT],
        dropped=len(dropped),
        refused=len(blobs) - len(taken),
        full=run.full or None,
        notes=notes,
    )


def barred(source: Reader, records: Mapping[bytes, NamespaceRecord]) -> dict[bytes, str]:
    """The namespaces of a source of which nothing may be copied, and why: a reset there has retired them, or may have.

    Another tier knows nothing of that reset: in it engines might find what was stored before.

    Raises:
        TierUnavailable: The epochs cannot be read.
    """
    kind = _PLACES[source.kind][1]
    judged = {
        digest: record
        for digest, record in records.items()
        # A bucket's numbers are drawn at random: no other tier comes to one that a reset has retired there.
        if (kind == "base" if record.namespace is None else numbered(record.namespace, kind))
    }
    if not judged:
        return {}  # and so what the source says of its epochs need not be sound
    epochs, reasons = source.epochs(), {}
    for digest, record in judged.items():
        if record.namespace is None:
            if epochs.has_begun:
                reasons[digest] = f"{UNKNOWN_EPOCH}: {record.problem}"
        elif epochs.has_retired(record.namespace):
            reasons[digest] = RETIRED
    return reasons


def notes_on_barred(source: Reader, blobs: Iterable[StoredBlob], wanted: Wanted) -> list[str]:
    """Say which namespaces are left out, and why."""
    counts = Counter(
        blob.name.namespace for blob in blobs if wanted.means(blob) and blob.name.namespace in wanted.barred
    )
    return [
        f"namespace {space.hex()} was left out, {counted(count, 'chunk')}: {wanted.barred[space]}. source={source.uri}"
        for space, count in sorted(counts.items())
    ]


def notes_on_resets(source: Reader, target: Reader, copied: Iterable[NamespaceRecord]) -> list[str]:
    """Say which namespaces a reset in the source has retired while their chunks were copied.

    Between tiers of one kind: engines in front of another one alone open none of them, and those with both go by the
    source's epochs.
    """
    if source.kind != target.kind:
        return []
    try:
        now = barred(source, {record.digest: record for record in copied})
    except TierUnavailable as exc:  # the copy itself is done, and its report is worth more
        return [f"whether a reset of {source.uri} retired what was copied meanwhile is not known: {exc}"]
    return [
        f"namespace {space.hex()} was reset in {source.uri} while it was copied, and what was copied is from before: "
        f"reset it in front of {target.uri}, too, or `tiered-kv evict {target.uri} --namespace {space.hex()}`"
        for space in sorted(now)
    ]


def notes_on_new_epochs(target: Reader, copied: Iterable[NamespaceRecord]) -> list[str]:
    """Say of which namespaces the target has begun a later epoch while they were copied into it.

    By a reset in front of it, or because another copy, from where that epoch is in force, began it at the same time.
    """
    place, kind = _PLACES[target.kind]
    spaces = [record.namespace for record in copied if record.namespace is not None]
    if not any(numbered(space, kind) for space in spaces):
        return []  # and so what the target says of its epochs need not be sound
    try:
        epochs = target.epochs()
    except TierUnavailable as exc:
        return [f"whether {target.uri} has begun a later epoch meanwhile is not known: {exc}"]
    return [
        f"engines in front of {target.uri} do not find the chunks of namespace {digest.hex()}: while they were copied "
        f"that {place} has begun a later epoch of this model, by a reset or with another copy; "
        f"`tiered-kv evict {target.uri} --namespace {digest.hex()}` removes them"
        for digest in sorted(space.digest for space in spaces if epochs.has_retired(space))
    ]


def carry_epochs(source: Storage, target: Storage, records: Iterable[NamespaceRecord]) -> dict[bytes, str]:
    """Have the target begin with the source's epochs: with others no engine would find the copies there.

    Between tiers of one kind. A tier that has an epoch of a model keeps it, and the server of a directory its own.
    Returns the namespaces whose number is not the target's, and why nothing of them may be copied: a reset of the
    target raises its number, and with that one engines would find what was never stored there.

    Raises:
        DirectoryLocked: Another command works on the directory.
        TierUnavailable: One of them does not answer.
    """
    if target.is_served():
        return {}
    place, kind = _PLACES[target.kind]
    judged = [
        (record, found)
        for record in records
        if record.namespace is not None and (found := numbered(record.namespace, kind)) is not None
    ]
    if not judged:
        return {}  # engines in front of the target alone open none of them, whatever is reset there
    epochs = source.epochs() if source.kind == target.kind else None
    refusals = {}
    for record, (base, number) in judged:
        is_in_force = epochs is not None and epochs.in_force(base) == number
        theirs = target.begin_with(base, number if is_in_force else 0)
        if theirs is None:
            refusals[record.digest] = (
                "epochs.json there cannot be understood, so a server that starts there begins afresh, and its engines "
                f"would not find what is copied: say it again to an empty directory. target={target.uri}"
            )
        elif theirs != number:
            begun = "none" if target.kind == "object" and not theirs else f"{kind}-{theirs}"
            refusals[record.digest] = (
                f"its chunks are of epoch {kind}-{number}, and that {place} has begun {begun} of this model: engines "
                f"there would not find them, or, once resets there reach that number, take them for their own. "
                f"target={target.uri}"
            )
    return refusals


class _Copier:
    """Chunks in flight. A chunk waits for its parent, which was handed out before it and is never behind it."""

    def __init__(self, source: Reader, target: Target) -> None:
        self._source = source
        self._target = target
        self._is_stopped = threading.Event()
        self.full = ""

    def all(
        self, pool: ThreadPoolExecutor, blobs: Sequence[StoredBlob], at_once: int
    ) -> Iterator[tuple[StoredBlob, CopyOutcome]]:
        """Every chunk with its outcome, in order."""
        futures: dict[Ident, Future[CopyOutcome]] = {}
        flying: deque[tuple[StoredBlob, Future[CopyOutcome]]] = deque()
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
            self._is_stopped.set()  # a copy raised, or the caller stopped iterating

    def _one(self, blob: StoredBlob, parent: Future[CopyOutcome] | None) -> CopyOutcome:
        if self._is_stopped.is_set():
            return CopyOutcome.LEFT_OUT
        if self._target.has(blob.name):
            return CopyOutcome.THERE
        data = self._source.read(blob)
        if data is None:
            return CopyOutcome.VANISHED
        try:
            parsed = check_named(data, blob.name)
        except ChunkMismatch:
            return CopyOutcome.FOREIGN
        except ChunkCorrupt:
            return CopyOutcome.CORRUPT
        try:
            if blob.name.chunk_index and (parent is None or parent.result() not in HELD):
                return CopyOutcome.NO_PARENT
            if self._is_stopped.is_set():
                return CopyOutcome.LEFT_OUT
            return CopyOutcome.COPIED if self._target.put(blob.name, memoryview(data), parsed) else CopyOutcome.THERE
        except ChunkMismatch:
            return CopyOutcome.CORRUPT
        except CapacityExceeded as exc:
            self.full = str(exc)
            self._is_stopped.set()
            return CopyOutcome.LEFT_OUT


def _ended(flying: deque[tuple[StoredBlob, Future[CopyOutcome]]]) -> tuple[StoredBlob, CopyOutcome]:
    blob, future = flying.popleft()
    return blob, future.result()


def check_named(data: bytes, name: BlobName) -> ParsedHeader:
    """Verify a blob and that its header matches its name.

    Raises:
        ChunkCorrupt, ChunkMismatch: It is not.
    """
    parsed = check_blob(memoryview(data))
    found = parsed.header.record
    if not name.is_whole_name_of(found):
        raise ChunkCorrupt(f"a blob lies under another's name. expected={name.key.hex()} observed={found.key.hex()}")
    return parsed
