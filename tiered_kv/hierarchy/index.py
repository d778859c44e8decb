"""What the hierarchy knows of each chunk: one entry per key, with its state in every tier.

The index is a hint and the tier is the truth: a blob that turns out to be gone is an ordinary miss. Entries exist
while some tier holds, or is about to hold, the chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from tiered_kv.hierarchy.flows import Flows
from tiered_kv.hierarchy.gone import GENERATION_MIN, SELECTIVE_GENERATION_MIN, GoneUses
from tiered_kv.hierarchy.plan import ChunkRecord, SlotId
from tiered_kv.hierarchy.shares import Shares
from tiered_kv.keys.stored_by import UNKNOWN
from tiered_kv.keys.tags import NO_TAG, shared_tag


class HostState(Enum):
    """Where a chunk stands in host memory. Only READY bytes were verified and may be promised."""

    ABSENT = "absent"
    SEALING = "sealing"
    PROMOTING = "promoting"
    READY = "ready"


class LowerState(Enum):
    """Where a chunk stands in a tier below host memory.

    CORRUPT: the blob is known to be bad and could not be deleted. FOREIGN: the name is taken by a blob of another
    namespace or format, which is never touched. Neither counts as held.
    """

    ABSENT = "absent"
    QUEUED = "queued"
    WRITING = "writing"
    PRESENT = "present"
    DELETING = "deleting"
    CORRUPT = "corrupt"
    FOREIGN = "foreign"


CLAIMED = frozenset({LowerState.QUEUED, LowerState.WRITING, LowerState.PRESENT})
"""States in which a chunk counts as a child of its parent in that tier."""


@dataclass(slots=True, eq=False)
class Entry:
    """One chunk.

    Attributes:
        leases: Lookups that rely on the slot.
        holds: Leases and pending writes: what keeps a chunk in its slot.
        is_unwritten: Its write was put off: it is evicted only if there is nothing else.
        uses: How often it was asked for after it came, also before it was evicted; never less than its children's.
        children: Index entries whose parent is this chunk; None until there is one (most memory is in leaves).
        lower_bytes: Bytes counted against each lower tier's capacity for this chunk.
        lower_children: Per lower tier, children in a CLAIMED state there.
        ordered, ordered_children: Per order of eviction (``order.py``), whether the chunk is in it, and how many of
            its children are.
        source: The lower tier its bytes are being read from, while it is PROMOTING.
        lookups: Ids of the lookups that want this slot and were not yet told it is ready; None if there is none.
        also_stored_by: Who else stored it: some tier may have that one's bytes; None if there is nobody.
    """

    record: ChunkRecord
    lower: list[LowerState]
    lower_bytes: list[int]
    lower_children: list[int]
    ordered: list[bool]
    ordered_children: list[int]
    host: HostState = HostState.ABSENT
    slot: SlotId | None = None
    slot_bytes: int = 0
    leases: int = 0
    holds: int = 0
    is_unwritten: bool = False
    uses: int = 0
    children: set[Entry] | None = None
    source: int | None = None
    lookups: set[int] | None = None
    also_stored_by: frozenset[str] | None = None

    @property
    def is_gone(self) -> bool:
        """Whether nothing is left to know about the chunk."""
        return self.host is HostState.ABSENT and all(state is LowerState.ABSENT for state in self.lower)

    @property
    def is_busy(self) -> bool:
        """Whether somebody uses the chunk now: it is leased, sealed, read or written."""
        is_moving = self.host in (HostState.SEALING, HostState.PROMOTING) or LowerState.WRITING in self.lower
        return is_moving or self.holds > 0

    def set_tag(self, tag: bytes) -> None:
        """Whose the chunk is, as its header says."""
        if tag != self.record.tag:
            self.record = replace(self.record, tag=shared_tag(tag))

    def stored_for(self, tag: bytes) -> None:
        """It was stored under this tag; it stays whose it was, if it was anybody's."""
        if self.record.tag == NO_TAG:
            self.set_tag(tag)

    def bytes_are_of(self, stored_by: str) -> None:
        """Its bytes in host memory are this one's, as a header or a session says.

        Other tiers may hold another's. So who was known before stays known, and whoever is looked for is found.
        """
        before = self.record.stored_by
        if stored_by == before:
            return
        self.record = replace(self.record, stored_by=stored_by)
        if before != UNKNOWN:
            self.also_stored_by = (self.also_stored_by or frozenset()) | {before}

    @property
    def storers(self) -> frozenset[str]:
        """Everybody who stored it, in whatever tier, as far as it is known."""
        return (self.also_stored_by or frozenset()) | {self.record.stored_by}


class Index:
    """Entries by key, linked to their children.

    A chunk and its parent are linked only if they are of one namespace and their positions follow each other: what a
    client sends can then form no cycle, and join no two models. Threads: one owner.

    Attributes:
        readable: Per lower tier, whether it can be read now; what lies only in others does not count as held.
        flows: What came into each tier and what left it.
        eviction: Name of the policy that orders what may go from a tier.
        is_selective: Some tier takes only what was used (``admission.py``).
        shares: What namespaces keep and take of every tier.
    """

    def __init__(self, tier_count: int, eviction: str = "multi-queue", *, is_selective: bool = False) -> None:
        self._entries: dict[bytes, Entry] = {}
        # Children whose parent has no entry, by the parent's key and position.
        self._orphans: dict[tuple[bytes, bytes, int], set[Entry]] = {}
        self._tier_count = tier_count
        self.readable = [True] * tier_count
        self.flows = Flows(tier_count)
        self.eviction = eviction
        self.is_selective = is_selective
        self.shares = Shares()
        self._gone = GoneUses(SELECTIVE_GENERATION_MIN if is_selective else GENERATION_MIN)

    def __len__(self) -> int:
        return len(self._entries)

    def entries(self) -> list[Entry]:
        return list(self._entries.values())

    def get(self, key: bytes) -> Entry | None:
        return self._entries.get(key)

    def count_use(self, prefix: Sequence[Entry]) -> None:
        """Somebody asked for a prefix; once per request, given whole."""
        for entry in prefix:
            entry.uses += 1

    def want(self, entry: Entry) -> list[Entry]:
        """A chunk is wanted again, though no lookup says so: with its prefix it counts as asked for at least once.

        Returns those for which that is new, root first. Does nothing where no tier goes by it.
        """
        wanted: list[Entry] = []
        node: Entry | None = entry if self.is_selective else None
        while node is not None and not node.uses:
            wanted.append(node)
            node = self.parent(node)
        for chunk in wanted:
            chunk.uses = 1
        return wanted[::-1]

    def uses_of(self, key: bytes) -> int:
        """How often a chunk that is known was asked for."""
        return self._entries[key].uses

    def source(self, entry: Entry) -> int | None:
        """The highest lower tier that can give the chunk's bytes now; None if none can."""
        for tier, state in enumerate(entry.lower):
            if state is LowerState.PRESENT and self.readable[tier]:
                return tier
        return None

    def places(self, entry: Entry) -> list[int | None]:
        """Tiers that have the chunk now; None is host memory."""
        host: list[int | None] = [None] if entry.host is HostState.READY else []
        return host + [tier for tier, state in enumerate(entry.lower) if state is LowerState.PRESENT]

    def is_held(self, entry: Entry) -> bool:
        """Whether some tier that can be read has the bytes, or is just getting them from us."""
        return entry.host is not HostState.ABSENT or self.source(entry) is not None

    def parent(self, entry: Entry) -> Entry | None:
        """The entry of the chunk before this one; None for the first chunk and for an orphan."""
        parent = self._entries.get(entry.record.parent)
        if parent is None or parent.record.chunk_index != entry.record.chunk_index - 1:
            return None
        return parent if parent.record.namespace == entry.record.namespace else None

    def add(self, record: ChunkRecord) -> Entry:
        """Make the entry of a key that has none."""
        assert record.key not in self._entries
        count = self._tier_count
        states = [LowerState.ABSENT] * count
        entry = Entry(record, states, [0] * count, [0] * count, [False] * (count + 1), [0] * (count + 1))
        self._entries[record.key] = entry
        children = self._orphans.pop((record.namespace, record.key, record.chunk_index), None)
        if children is not None:
            entry.children = children
            entry.lower_children = [sum(child.lower[t] in CLAIMED for child in children) for t in range(count)]
            entry.ordered_children = [sum(child.ordered[n] for child in children) for n in range(count + 1)]
        parent = self.parent(entry)
        if parent is None:
            self._orphans.setdefault((record.namespace, record.parent, record.chunk_index - 1), set()).add(entry)
        elif parent.children is None:
            parent.children = {entry}
        else:
            parent.children.add(entry)
        self._set_uses(entry, parent)
        return entry

    def _set_uses(self, entry: Entry, parent: Entry | None) -> None:
        """A chunk that comes back was asked for once more; a chunk has no more uses than its parent."""
        gone = self._gone.recall(entry.record.key)
        entry.uses = 0 if gone is None else gone + 1
        if parent is not None:
            entry.uses = min(entry.uses, parent.uses)
        if entry.children:
            entry.uses = max(entry.uses, *(child.uses for child in entry.children))
            while parent is not None and parent.uses < entry.uses:
                parent.uses = entry.uses
                parent = self.parent(parent)

    def set_lower(self, entry: Entry, tier: int, state: LowerState) -> None:
        """Change a tier's state, keeping the parent's count of children there."""
        change = (state in CLAIMED) - (entry.lower[tier] in CLAIMED)
        entry.lower[tier] = state
        if change and (parent := self.parent(entry)) is not None:
            parent.lower_children[tier] += change

    def remove_if_gone(self, entry: Entry) -> None:
        """Forget an entry that no tier holds any more and nobody waits for."""
        if not entry.is_gone or entry.holds:
            return
        record = entry.record
        del self._entries[record.key]
        if self.eviction != "lru" or self.is_selective:
            self._gone.remember(record.key, entry.uses, len(self._entries))
        if entry.children:
            self._orphans[record.namespace, record.key, record.chunk_index] = entry.children
        parent = self.parent(entry)
        if parent is not None:
            assert parent.children is not None
            parent.children.remove(entry)
            return
        place = (record.namespace, record.parent, record.chunk_index - 1)
        siblings = self._orphans[place]
        siblings.remove(entry)
        if not siblings:
            del self._orphans[place]

    def prefix(self, entry: Entry) -> list[Entry]:
        """The entry and its ancestors, deepest first, as far as the index knows them."""
        chain = [entry]
        while (parent := self.parent(chain[-1])) is not None:
            chain.append(parent)
        return chain

    def held_prefix(self, namespace: bytes, keys: Sequence[bytes], digests: Sequence[bytes]) -> list[Entry]:
        """Entries of the longest leading run of keys that some tier holds.

        An entry whose namespace or prefix digest differs belongs to another prompt (a crafted xxhash collision): a
        miss.
        """
        run = []
        for key, digest in zip(keys, digests, strict=True):
            entry = self._entries.get(key)
            if entry is None or not self.is_held(entry):
                break
            if entry.record.prefix_sha256 != digest or entry.record.namespace != namespace:
                break
            run.append(entry)
        return run

    def check_integrity(self) -> None:
        """Assert that links and counts between parents and children match."""
        linked: set[tuple[bytes, bytes]] = set()
        for entry in self._entries.values():
            for child in entry.children or ():
                assert self.parent(child) is entry, "a child is linked to the wrong parent"
                assert child.uses <= entry.uses, "a chunk was asked for without its parent"
                linked.add((entry.record.key, child.record.key))
            for tier, count in enumerate(entry.lower_children):
                claimed = sum(child.lower[tier] in CLAIMED for child in entry.children or ())
                assert count == claimed, "children count drifted"
            for number, count in enumerate(entry.ordered_children):
                ordered = sum(child.ordered[number] for child in entry.children or ())
                assert count == ordered, "ordered children count drifted"
        orphans = {child.record.key for children in self._orphans.values() for child in children}
        for entry in self._entries.values():
            parent = self.parent(entry)
            if parent is None:
                assert entry.record.key in orphans, "an orphan is not remembered"
            else:
                assert (parent.record.key, entry.record.key) in linked, "a parent does not know its child"
        assert len(linked) + len(orphans) == len(self._entries), "an entry is linked twice"
        assert all(self._orphans.values()), "an empty set of orphans was left behind"
