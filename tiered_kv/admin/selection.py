"""Which chunks go when an operator wants room: the least recently used first, a parent only after its children.

Pure. Pinned chunks and the prefixes before them go only where a tag is erased, or what a bad version stored; what was
asked for and stays because of a pin is told, so that nobody wonders. Called by ``cli/evict.py``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tiered_kv.admin.forest import Forest, Ident, ident
from tiered_kv.admin.storage import StoredBlob
from tiered_kv.errors import ConfigError
from tiered_kv.keys.conditions import Conditions
from tiered_kv.keys.stored_by import UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class Criteria:
    """What shall go: one of all but ``namespace``, or a namespace alone.

    Attributes:
        free_bytes: The least recently used, until at least so many bytes go. What no request can reach goes first.
        used_before_s: What was not used since then.
        key: This chunk, with everything behind it.
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
        """Check that exactly one thing is asked for.

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
        if self.key is not None and self.namespace not in (None, self.key.name.namespace):
            raise ConfigError(
                f"the chunk of --key lies in namespace {self.key.name.namespace.hex()}, and --namespace names another"
            )


@dataclass(frozen=True, slots=True)
class Selection:
    """What goes, and what was asked for and stays.

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

    def by_namespace(self) -> dict[bytes, tuple[int, int]]:
        """Chunks and bytes that go, by namespace."""
        counts: dict[bytes, tuple[int, int]] = {}
        for blob in self.blobs:
            chunks, size_bytes = counts.get(blob.name.namespace, (0, 0))
            counts[blob.name.namespace] = chunks + 1, size_bytes + blob.size_bytes
        return dict(sorted(counts.items()))


def select(forest: Forest, criteria: Criteria) -> Selection:
    """Choose what goes; whatever goes leaves no chunk behind it that stays, pinned ones beyond a gap excepted."""
    used = forest.last_uses()
    wanted = list(forest.blobs.values())
    if criteria.tag is not None:
        wanted = forest.behind(blob for blob in wanted if blob.tag == criteria.tag)
    elif criteria.stored_by is not None:
        is_meant = criteria.stored_by.matches
        wanted = forest.behind(blob for blob in wanted if is_meant(blob.stored_by or UNKNOWN))
    elif criteria.key is not None:
        wanted = forest.behind([criteria.key])
    wanted = [
        blob
        for blob in wanted
        if criteria.namespace in (None, blob.name.namespace)
        and (criteria.used_before_s is None or used[ident(blob)] < criteria.used_before_s)
    ]
    ordered = _ordered(forest, wanted, used)
    kept = forest.pinned() if criteria.tag is None and criteria.stored_by is None else set()
    free = [blob for blob in ordered if ident(blob) not in kept]
    pinned = [blob for blob in ordered if ident(blob) in kept]
    return Selection(free if criteria.free_bytes is None else _first(free, criteria.free_bytes), pinned)


def _ordered(forest: Forest, blobs: Sequence[StoredBlob], used: dict[Ident, float]) -> list[StoredBlob]:
    """Unreachable ones first, then by last use: a parent was used no earlier than its children, so it comes later."""
    lost = {ident(blob) for blob in forest.unreachable()}
    return sorted(blobs, key=lambda blob: (ident(blob) not in lost, used[ident(blob)], -blob.name.chunk_index))


def _first(blobs: Sequence[StoredBlob], size_bytes: int) -> list[StoredBlob]:
    found: list[StoredBlob] = []
    total = 0
    for blob in blobs:
        if total >= size_bytes:
            break
        found.append(blob)
        total += blob.size_bytes
    return found
