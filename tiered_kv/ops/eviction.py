"""Eviction by an operator: which chunks go, and what `evict` reports of it.

The least recently used go first, a parent only after its children. A state goes as a whole, and with the chunk before
it. Pinned chunks, the prefixes before them and their states go only where a tag, or the chunks of a bad version, are
erased; the report counts what a pin keeps. Pure, but for the reports' base.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from tiered_kv.errors import ConfigError
from tiered_kv.keys.conditions import Conditions
from tiered_kv.keys.naming import BlobName
from tiered_kv.keys.stored_by import UNKNOWN
from tiered_kv.ops.forest import Forest, Ident, ident
from tiered_kv.ops.report import Report
from tiered_kv.ops.storage import Content, Reader, StoredBlob
from tiered_kv.ops.text import counted

DISK = "disk"
NOT_DELETED = "the server could not delete them, or does not know of them; its log says more"


class NamespaceShare(msgspec.Struct, frozen=True, kw_only=True):
    """What goes from one namespace.

    Attributes:
        namespace: Its digest.
        chunks: How many chunks go.
        size_bytes: What they take.
    """

    namespace: str
    chunks: int
    size_bytes: int


class TierRemoval(msgspec.Struct, frozen=True, kw_only=True):
    """What was done in one tier.

    Attributes:
        tier: ``host``, ``disk`` or ``object``.
        removed: Chunks that are gone, or are going.
        removed_bytes: What they took; null for host memory, which does not say.
        kept: Chunks that stay because they are in use at the moment.
        missing: Chunks that were gone already.
        failed: Chunks that stay because the server could not delete them, or does not know of them.
    """

    tier: str
    removed: int
    removed_bytes: int | None
    kept: int
    missing: int
    failed: int


class EvictReport(Report, frozen=True, kw_only=True):
    """What ``evict`` chose and did.

    Attributes:
        uri: The tier that was named, null with ``--server``.
        server: The server that was named, null without.
        tag: Digest of the tag that was named, null without.
        stored_by: The conditions on who stored it, none without.
        is_dry_run: Whether nothing was changed because of ``--dry-run``.
        selected: Chunks that were chosen to go from the listed tier; 0 where only host memory was meant.
        selected_bytes: What they take.
        pinned: Chunks that were asked for and stay, because they are pinned or a chunk behind them is.
        pinned_bytes: What they take.
        namespaces: The chosen chunks by namespace.
        unread: Chunks whose headers the medium does not give now, so that an erasure, which is not complete then, does
            not know whose they are; 0 where chunks were chosen otherwise.
        unjudged: Likewise chunks that do not tell: with a damaged header, or of another format version; and writes that
            are under way or were cut off.
        is_none_left: Whether nothing was found that was erased, stays, or does not tell whose it is, so that nothing is
            left here; null without ``--expect-none``.
        tiers: What was done; empty after a dry run, or where nothing was chosen.
        notes: What may make this incomplete, in words.
    """

    uri: str | None
    server: str | None
    tag: str | None
    stored_by: list[str]
    is_dry_run: bool
    selected: int
    selected_bytes: int
    pinned: int
    pinned_bytes: int
    unread: int
    unjudged: int
    is_none_left: bool | None
    namespaces: list[NamespaceShare]
    tiers: list[TierRemoval]
    notes: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Criteria:
    """What shall go: one of all but ``namespace``, or a namespace alone.

    Attributes:
        free_bytes: The least recently used, until at least so many bytes go. What no request can reach goes first.
        used_before_s: What was not used since then.
        key: This chunk, with everything behind it; of a part of a state the whole state.
        tag: What was stored under this digest of a tag, with everything behind it, pinned or not.
        stored_by: What was stored by whom these mean, with everything behind it, pinned or not: that was computed from
            it, or from what was loaded in its place.
        is_all: Everything.
        namespace: Only there; with nothing else: everything there.
    """

    free_bytes: int | None = None
    used_before_s: float | None = None
    key: StoredBlob | None = None
    tag: bytes | None = None
    stored_by: Conditions | None = None
    is_all: bool = False
    namespace: bytes | None = None

    def __post_init__(self) -> None:
        """Check that exactly one selection is given.

        Raises:
            ConfigError: None is, or several that contradict each other.
        """
        values = self.free_bytes, self.used_before_s, self.key, self.tag, self.stored_by
        ways = sum(value is not None for value in values) + self.is_all
        if ways > 1:
            raise ConfigError(
                "say one of --bytes, --to, --older-than, --key, --tag, --stored-by and --all: they contradict each "
                "other"
            )
        if not ways and self.namespace is None:
            raise ConfigError(
                "say what shall go: --bytes, --to, --older-than, --namespace, --key, --tag, --stored-by or --all"
            )
        check_key_within(self.key, self.namespace)


def check_key_within(key: StoredBlob | None, namespace: bytes | None) -> None:
    """Refuse a chunk of ``--key`` that does not lie in the namespace of ``--namespace``.

    Raises:
        ConfigError: It does not.
    """
    if key is not None and namespace not in (None, key.name.namespace):
        raise ConfigError(
            f"the chunk of --key lies in namespace {key.name.namespace.hex()}, and --namespace names another"
        )


@dataclass(frozen=True, slots=True)
class Selection:
    """The chunks to remove, and those that match and are kept by a pin.

    Attributes:
        blobs: In the order of their going: children before parents.
        pinned: Those that a pin keeps, on them or on a chunk behind them.
    """

    blobs: Sequence[StoredBlob]
    pinned: Sequence[StoredBlob]

    @property
    def size_bytes(self) -> int:
        return sum(blob.size_bytes for blob in self.blobs)

    @property
    def pinned_bytes(self) -> int:
        return sum(blob.size_bytes for blob in self.pinned)

    def by_namespace(self) -> list[NamespaceShare]:
        """What goes from each namespace."""
        sizes: dict[bytes, list[int]] = {}
        for blob in self.blobs:
            sizes.setdefault(blob.name.namespace, []).append(blob.size_bytes)
        return [
            NamespaceShare(namespace=space.hex(), chunks=len(found), size_bytes=sum(found))
            for space, found in sorted(sizes.items())
        ]


def select(forest: Forest, criteria: Criteria, state_parts: Mapping[bytes, int] | None = None) -> Selection:
    """Choose what goes; whatever goes leaves no chunk behind it that stays, pinned ones beyond a gap excepted.

    Args:
        state_parts: Of a state, by namespace (``Content.state_parts``).
    """
    used = forest.last_uses()
    wanted = list(forest.blobs)
    owned = forest.with_copies(wanted)
    if criteria.tag is not None:
        wanted = _behind(forest, (blob for blob in owned if blob.tag == criteria.tag))
    elif criteria.stored_by is not None:
        is_meant = criteria.stored_by.matches
        wanted = _behind(forest, (blob for blob in owned if is_meant(blob.stored_by or UNKNOWN)))
    elif criteria.key is not None:
        wanted = _behind(forest, [criteria.key])
    wanted = [
        blob
        for blob in wanted
        if criteria.namespace in (None, blob.name.namespace)
        and (criteria.used_before_s is None or used[forest.row(blob)] < criteria.used_before_s)
    ]
    ordered = _ordered(forest, wanted, used, state_parts or {})
    kept = forest.pinned() if criteria.tag is None and criteria.stored_by is None else set()
    free = [blob for blob in ordered if ident(blob) not in kept]
    pinned = [blob for blob in ordered if ident(blob) in kept]
    free = free if criteria.free_bytes is None else _first(forest, free, criteria.free_bytes)
    return Selection(forest.with_copies(free), forest.with_copies(pinned))


def without_pinned(forest: Forest, selection: Selection, pins: Iterable[BlobName]) -> Selection:
    """The same, less what these keep: a listing takes a while, and whoever is asked to confirm takes longer."""
    found = [blob for name in pins if (blob := forest.find(name)) is not None]
    kept = set(map(ident, forest.with_states(found)))
    late = [blob for blob in selection.blobs if ident(blob) in kept]
    return Selection([b for b in selection.blobs if ident(b) not in kept], [*selection.pinned, *late])


def _behind(forest: Forest, blobs: Iterable[StoredBlob]) -> list[StoredBlob]:
    """These chunks and all behind them; of a part of a state all of that state."""
    firsts = (forest.whole_state(blob)[-1] if blob.is_state else blob for blob in blobs)
    return forest.behind(firsts)


def _ordered(
    forest: Forest, blobs: Sequence[StoredBlob], used: Sequence[float], state_parts: Mapping[bytes, int]
) -> list[StoredBlob]:
    """Of no use first, then by last use: a parent was used no earlier than its children, so it comes later."""
    lost = {ident(blob) for blob in (*forest.unreachable(), *forest.partial_states(state_parts))}
    return sorted(blobs, key=lambda blob: (ident(blob) not in lost, used[forest.row(blob)], -blob.name.chunk_index))


def _first(forest: Forest, blobs: Sequence[StoredBlob], size_bytes: int) -> list[StoredBlob]:
    """The first so many bytes, and what is left of a state of which parts go."""
    free = set(map(ident, blobs))
    found: dict[Ident, StoredBlob] = {}
    total = 0
    for blob in blobs:
        if total >= size_bytes:
            break
        for one in forest.whole_state(blob) if blob.is_state else (blob,):
            if ident(one) in free and ident(one) not in found:
                found[ident(one)] = one
                total += one.size_bytes
    return list(found.values())


def used_bytes(storage: Reader, content: Content) -> int:
    """What counts against the tier's capacity: on disk a reserve beside it is for what is no blob."""
    own_bytes = content.own_bytes if storage.kind == "object" else 0
    return content.blob_bytes + own_bytes + sum(stray.size_bytes for stray in content.strays)


def note_on_foreign(content: Content, namespace: bytes | None) -> str:
    """What has a blob's name and a header that is not ours to read, so that no selection means it; empty without any.

    Args:
        namespace: None: in all of the tier.
    """
    count = content.count_strays("foreign", namespace=namespace)
    if not count:
        return ""
    place = "blobs" if namespace is None else f"blobs/{namespace.hex()}"
    return (
        f"{counted(count, 'blob')} of another format version or namespace that no index tells of cannot be selected, "
        f"not even by --namespace: to be rid of them, end the server and remove {place}"
        f"{'/NAMESPACE by its digits (`tiered-kv verify` names them)' if namespace is None else ''}"
    )
