"""Find and collect garbage: chunks behind a gap, temp files, dead namespaces.

Finding changes nothing; collecting removes what was found. Young, pinned and used content stays: a wrong removal of the
rest costs hits, never correctness. Called by ``cli/gc.py``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from tiered_kv.errors import TierUnavailable
from tiered_kv.keys.namespace import SELF_TEST_NAMESPACE
from tiered_kv.ops.eviction import NOT_DELETED
from tiered_kv.ops.forest import Forest, ident
from tiered_kv.ops.storage import (
    BaseEpochs,
    Content,
    NamespaceRecord,
    Progress,
    Storage,
    StoredBlob,
    Stray,
    is_private,
    no_progress,
)
from tiered_kv.ops.text import counted

YOUNG_S: Final = 300.0
"""A parent may be under way for so long after its child was written, and an engine elsewhere be silent."""

HOUR_S: Final = 3600.0
DAY_S: Final = 86400.0

KINDS: Final = {
    "orphans": "chunks behind a gap: no request reaches them",
    "partial": "parts of states whose other parts are gone: no request can use them",
    "temp": "left by writes and self-tests that were cut off",
    "retired": "a namespace from before a reset: no engine opens it again",
    "private": "a namespace that one engine used since its reset, unused for long",
    "empty": "the record and directories of a namespace without a chunk",
}
"""Every kind of garbage, in the order of a report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MinimumAges:
    """How long something must have been left alone.

    Attributes:
        temp_s: A temp file, since it was written.
        dead_s: A namespace that an engine may still use unseen, since its last use.
    """

    temp_s: float = HOUR_S
    dead_s: float = DAY_S


class GcItem(msgspec.Struct, frozen=True, kw_only=True):
    """Garbage of one kind, of one namespace where that matters.

    Attributes:
        kind: ``orphans``: chunks behind a gap. ``partial``: parts of states that lack others. ``temp``: left by writes
            that were cut off. ``retired``: a namespace from before a reset. ``private``: one that a single engine used
            since its reset, unused for long. ``empty``: the record and directories of a namespace without a chunk.
        namespace: Its digest; null for ``temp``.
        count: Chunks or files; 1 for an empty namespace.
        size_bytes: What they take.
        removed: How many of them are gone; 0 after a dry run.
        removed_bytes: What those took.
    """

    kind: str
    namespace: str | None
    count: int
    size_bytes: int
    removed: int
    removed_bytes: int


@dataclass(slots=True)
class Item:
    """Garbage that was found: a ``GcItem`` with the chunks and files themselves."""

    kind: str
    space: bytes | None = None
    blobs: list[StoredBlob] = field(default_factory=list)
    strays: list[Stray] = field(default_factory=list)
    removed: int = 0
    removed_bytes: int = 0
    failed: int = 0  # that the server could not delete

    @property
    def namespace(self) -> str | None:
        return None if self.space is None else self.space.hex()

    @property
    def count(self) -> int:
        return len(self.blobs) + len(self.strays) or 1

    @property
    def size_bytes(self) -> int:
        return sum(blob.size_bytes for blob in self.blobs) + sum(stray.size_bytes for stray in self.strays)


@dataclass(slots=True)
class Garbage:
    """What was found.

    Attributes:
        notes: What was left, and why, in words.
    """

    items: list[Item] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        return sum(item.size_bytes for item in self.items)


def find(storage: Storage, content: Content, ages: MinimumAges, now_s: float) -> Garbage:
    """Look for garbage. Changes nothing.

    Raises:
        TierUnavailable: The store or the server does not answer.
    """
    found = Garbage()
    is_served = storage.is_served()
    dead = _Dead(storage, content, ages, now_s).find(found)
    gone = {item.space for item in dead}
    found.items += _orphans(content, gone, found, now_s)
    found.items += _partial(content, gone, now_s)
    found.items += _temp(content, ages, found, now_s, is_served=is_served)
    found.items += dead
    if is_served and dead:
        found.items = [item for item in found.items if item.kind != "empty"]
        found.notes.append("a server runs: records and directories of dead namespaces are left until none does")
    order = list(KINDS)
    found.items.sort(key=lambda item: (order.index(item.kind), item.namespace or ""))
    return found


def collect(storage: Storage, garbage: Garbage, progress: Progress = no_progress) -> None:
    """Remove what was found, and note in its items what is gone.

    Raises:
        DirectoryLocked: A server came up meanwhile, or another command works on the directory.
        TierUnavailable: The store or the server does not answer; what is gone is gone. Or the pins cannot be read.
    """
    # A listing goes on without those that cannot be read, and whoever is asked to confirm takes a while to answer.
    pinned = {(name.namespace, name.key) for name in storage.pins()}
    spaces = {namespace for namespace, _ in pinned}
    is_served = storage.is_served()
    for item in garbage.items:
        is_whole = item.kind in ("retired", "private")  # so what was stored behind that since the listing counts, too
        if (is_whole and item.space in spaces) or any(ident(blob) in pinned for blob in item.blobs):
            text = f"{counted(len(item.blobs), 'chunk', 'stay')} ({item.kind}): some were pinned after the listing"
            garbage.notes.append(f"{text}; say it again for the rest")
            continue
        if item.strays:
            strays = storage.remove_strays(item.strays)
            item.removed += strays.removed
            item.removed_bytes += strays.removed_bytes
            if strays.kept:
                kept = counted(strays.kept, "temp file", "stay")
                garbage.notes.append(f"{kept}: another user's, or nothing that we write")
        if item.blobs:
            removal = storage.remove(item.blobs, progress)
            item.removed += removal.removed
            item.removed_bytes += removal.removed_bytes
            if removal.kept:
                kept = counted(removal.kept, "chunk", "stay")
                garbage.notes.append(f"{kept}: the server uses them, or stored more behind them")
            if removal.failed:
                item.failed = removal.failed
                garbage.notes.append(f"{counted(removal.failed, 'chunk', 'stay')}: {NOT_DELETED}")
        if item.kind in ("retired", "private", "empty") and item.space is not None and not is_served:
            is_gone = storage.remove_namespace(item.space)
            if item.kind == "empty":
                item.removed = int(is_gone)


def _orphans(content: Content, dead: set[bytes | None], found: Garbage, now_s: float) -> list[Item]:
    """Chunks behind a gap, less what a young or pinned one behind them needs."""
    forest = Forest(content.blobs)
    lost = [blob for blob in forest.unreachable() if blob.name.namespace not in dead]
    young = {ident(blob) for blob in lost if blob.written_s > now_s - YOUNG_S}
    kept = {ident(b) for blob in lost if blob.pinned_until_s or ident(blob) in young for b in forest.prefix(blob)}
    if kept:
        stay = "stays" if len(kept) == 1 else "stay"
        found.notes.append(
            f"{counted(len(kept), 'chunk')} behind a gap {stay}: they, or chunks behind them, are pinned or were "
            f"written within {YOUNG_S / 60:.0f} minutes"
        )
    items: dict[bytes, Item] = {}
    for blob in lost:
        if ident(blob) not in kept:
            items.setdefault(blob.name.namespace, Item("orphans", blob.name.namespace)).blobs.append(blob)
    return list(items.values())


def _partial(content: Content, dead: set[bytes | None], now_s: float) -> list[Item]:
    """Parts of states that lack others, unless a part of it is young, whose others may be under way, or has a pin."""
    forest = Forest(content.blobs)
    items: dict[bytes, Item] = {}
    for blob in forest.partial_states(content.state_parts()):
        space, state = blob.name.namespace, forest.whole_state(blob)
        is_kept = any(part.pinned_until_s or part.written_s > now_s - YOUNG_S for part in state)
        if space not in dead and not is_kept:
            items.setdefault(space, Item("partial", space)).blobs.append(blob)
    return list(items.values())


def _temp(content: Content, ages: MinimumAges, found: Garbage, now_s: float, *, is_served: bool) -> list[Item]:
    """Temp files, and blobs of self-tests whose server was killed."""
    until_s = now_s - ages.temp_s
    strays = [stray for stray in content.strays if stray.kind == "temp" and stray.modified_s < until_s]
    tests = [b for b in content.blobs if b.name.namespace == SELF_TEST_NAMESPACE and b.written_s < until_s]
    if strays and is_served:
        found.notes.append(f"a server runs: it removes its temp files by itself ({len(strays)} old ones now)")
        strays = []
    return [Item("temp", blobs=tests, strays=strays)] if strays or tests else []


class _Dead:
    """Looks for namespaces that no engine opens again."""

    def __init__(self, storage: Storage, content: Content, ages: MinimumAges, now_s: float) -> None:
        self._storage = storage
        self._content = content
        self._ages = ages
        self._now_s = now_s
        self._blobs: dict[bytes, list[StoredBlob]] = {space: [] for space in content.records}
        for blob in content.blobs:
            self._blobs.setdefault(blob.name.namespace, []).append(blob)
        self._strewn = {stray.path.removeprefix("blobs/").partition("/")[0] for stray in content.strays}
        """Where something lies that is no blob."""

    def find(self, found: Garbage) -> list[Item]:
        epochs, live = self._epochs(found), self._storage.live_namespaces()
        items = []
        for space, blobs in self._blobs.items():
            record = self._content.records.get(space)
            if record is None or space in live or space == SELF_TEST_NAMESPACE:
                continue
            kind = self._kind(record, blobs, epochs)
            if kind is None:
                continue
            if any(blob.pinned_until_s for blob in blobs):
                found.notes.append(f"namespace {space.hex()} stays, although it is dead: chunks of it are pinned")
                continue
            items.append(Item(kind, space, list(blobs)))
        return items

    def _epochs(self, found: Garbage) -> BaseEpochs | None:
        try:
            return self._storage.epochs()
        except TierUnavailable as exc:
            found.notes.append(f"which namespaces resets have retired cannot be told: {exc}")
            return None

    def _kind(self, record: NamespaceRecord, blobs: Sequence[StoredBlob], epochs: BaseEpochs | None) -> str | None:
        """Why a namespace is dead; None for one that is not."""
        is_shared = self._storage.kind == "object"
        used_s = max([record.written_s, *(max(blob.used_s, blob.written_s) for blob in blobs)])
        idle_s = self._now_s - used_s
        if not blobs:
            # In a bucket, an engine that stores its first chunk tomorrow would do so without a record beside it.
            is_bare = record.digest.hex() not in self._strewn
            return "empty" if is_bare and (not is_shared or idle_s > self._ages.dead_s) else None
        if record.namespace is None:
            return None
        if epochs is not None and epochs.has_retired(record.namespace):
            # Engines of other machines may not know of the reset yet, and nothing here shows that they run.
            return "retired" if not is_shared or idle_s > YOUNG_S else None
        if is_private(record.namespace) and idle_s > self._ages.dead_s:
            return "private"
        return None
