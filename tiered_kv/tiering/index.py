"""What tiering knows of each chunk: one entry per key, with its state in every tier.

The index is a hint and the tier is the truth: a blob that turns out to be gone is an ordinary miss. Entries exist
while some tier holds, or is about to hold, the chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import msgspec

from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.keys.state_keys import next_key, next_part
from tiered_kv.keys.stored_by import UNKNOWN
from tiered_kv.keys.tags import NO_TAG, shared_tag
from tiered_kv.tiering.types import HOST, SlotId

GENERATION_MIN = 1024
"""Keys of a generation while there are fewer chunks than that."""

SELECTIVE_GENERATION_MIN = 1 << 16
"""The same where second touches decide what is written: a tier that starts empty knows few chunks, and fills only with
what is recognised. Two generations take 12 MB."""


class HostState(Enum):
    """Where a chunk stands in host memory. Only READY bytes were verified and may be promised."""

    ABSENT = "absent"
    SEALING = "sealing"
    PROMOTING = "promoting"
    READY = "ready"


class BlobState(Enum):
    """Where a chunk stands in a secondary tier.

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


CLAIMED = frozenset({BlobState.QUEUED, BlobState.WRITING, BlobState.PRESENT})
"""States in which a chunk counts as a child of its parent in that tier."""


@dataclass(slots=True, eq=False)
class Entry:
    """One chunk.

    Lists have one place per tier, by its number.

    Attributes:
        blobs: Where it stands in each secondary tier; host memory has slots and no blobs (``host``, ``slot``).
        blob_bytes: Bytes counted against each secondary tier's capacity for this chunk.
        claimed_children: Per secondary tier, children in a CLAIMED state there.
        ordered: Whether the chunk is in an order of eviction (``eviction.py``) of the tier.
        ordered_children: How many of its children are in one.
        leases: Lookups that rely on the slot.
        holds: Leases and pending writes: what keeps a chunk in its slot.
        is_unwritten: Its write was put off: it is evicted only if there is nothing else.
        uses: How often it was asked for after it came, also before it was evicted; never less than its children's.
        children: Index entries whose parent is this chunk; None until there is one (most memory is in leaves).
        source: The tier its bytes are being read from, while it is PROMOTING; else ``HOST``.
        lookups: Ids of the lookups that want this slot and were not yet told it is ready; None if there is none.
        also_stored_by: Who else stored it: some tier may have that one's bytes; None if there is nobody.
    """

    record: ChunkRecord
    blobs: list[BlobState]
    blob_bytes: list[int]
    claimed_children: list[int]
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
    source: int = HOST
    lookups: set[int] | None = None
    also_stored_by: frozenset[str] | None = None

    @property
    def is_gone(self) -> bool:
        """Whether nothing is left to know about the chunk."""
        return self.host is HostState.ABSENT and all(state is BlobState.ABSENT for state in self.blobs)

    @property
    def is_busy(self) -> bool:
        """Whether somebody uses the chunk now: it is leased, sealed, read or written."""
        is_moving = self.host in (HostState.SEALING, HostState.PROMOTING) or BlobState.WRITING in self.blobs
        return is_moving or self.holds > 0

    def set_tag(self, tag: bytes) -> None:
        """Whose the chunk is, as its header says."""
        if tag != self.record.tag:
            self.record = msgspec.structs.replace(self.record, tag=shared_tag(tag))

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
        self.record = msgspec.structs.replace(self.record, stored_by=stored_by)
        if before != UNKNOWN:
            self.also_stored_by = (self.also_stored_by or frozenset()) | {before}

    @property
    def storers(self) -> frozenset[str]:
        """Everybody who stored it, in whatever tier, as far as it is known."""
        return (self.also_stored_by or frozenset()) | {self.record.stored_by}


class GhostList:
    """How often chunks that are gone were asked for: what recognises an evicted prompt when it comes back.

    A bounded list of keys without chunks, as the ghost queues of 2Q, ARC and S3-FIFO are. Uses by key, in two
    generations: when the younger is full, the older is forgotten as a whole.

    A plain dictionary that loses its oldest keys one by one would be searched through from its beginning each time.
    """

    def __init__(self, generation_min: int = GENERATION_MIN) -> None:
        self._generation_min = generation_min
        self._young: dict[bytes, int] = {}
        self._old: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def remember(self, key: bytes, uses: int, chunks: int) -> None:
        """Note what has gone; a generation is full when it has as many keys as there are ``chunks``."""
        self._young[key] = uses
        if len(self._young) >= max(chunks, self._generation_min):
            self._young, self._old = {}, self._young

    def recall(self, key: bytes) -> int | None:
        """What was noted of a key that is back, which is forgotten here; None: it is not known."""
        young, old = self._young.pop(key, None), self._old.pop(key, None)
        return old if young is None else young


class Index:
    """Entries by key, linked to their children.

    A chunk and its parent are linked only if they are of one namespace and their positions follow each other: what a
    client sends can then form no cycle, and join no two models. Threads: one owner.

    Attributes:
        readable: Per tier, whether it can be read now; what lies only in others does not count as held.
    """

    def __init__(self, tier_count: int, ghosts: GhostList | None = None) -> None:
        """Start empty.

        Args:
            tier_count: Of all tiers, host memory included.
            ghosts: Remembers the uses of what goes; None: nobody does.
        """
        self._entries: dict[bytes, Entry] = {}
        # Children whose parent has no entry, by the parent's key and position.
        self._orphans: dict[tuple[bytes, bytes, int], set[Entry]] = {}
        self._tier_count = tier_count
        self.readable = [True] * tier_count
        self._ghosts = ghosts

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

    def mark_used(self, entry: Entry) -> list[Entry]:
        """A chunk will be asked for, though no lookup says so: with its prefix it counts as used at least once.

        Returns those for which that is new, root first.
        """
        wanted: list[Entry] = []
        node: Entry | None = entry
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
        """The highest secondary tier that can give the chunk's bytes now; None if none can."""
        for tier, state in enumerate(entry.blobs):
            if state is BlobState.PRESENT and self.readable[tier]:
                return tier
        return None

    def tiers_with(self, entry: Entry) -> list[int]:
        """Tiers that have the chunk now, highest first."""
        host = [HOST] if entry.host is HostState.READY else []
        return host + [tier for tier, state in enumerate(entry.blobs) if state is BlobState.PRESENT]

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
        entry = Entry(record, [BlobState.ABSENT] * count, [0] * count, [0] * count, [False] * count, [0] * count)
        self._entries[record.key] = entry
        children = self._orphans.pop((record.namespace, record.key, record.chunk_index), None)
        if children is not None:
            entry.children = children
            entry.claimed_children = [sum(child.blobs[t] in CLAIMED for child in children) for t in range(count)]
            entry.ordered_children = [sum(child.ordered[t] for child in children) for t in range(count)]
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
        gone = None if self._ghosts is None else self._ghosts.recall(entry.record.key)
        entry.uses = 0 if gone is None else gone + 1
        if parent is not None:
            entry.uses = min(entry.uses, parent.uses)
        if entry.children:
            entry.uses = max(entry.uses, *(child.uses for child in entry.children))
            while parent is not None and parent.uses < entry.uses:
                parent.uses = entry.uses
                parent = self.parent(parent)

    def set_blob_state(self, entry: Entry, tier: int, state: BlobState) -> None:
        """Change the state in a secondary tier, keeping the parent's count of children there."""
        change = (state in CLAIMED) - (entry.blobs[tier] in CLAIMED)
        entry.blobs[tier] = state
        if change and (parent := self.parent(entry)) is not None:
            parent.claimed_children[tier] += change

    def remove_if_gone(self, entry: Entry) -> None:
        """Forget an entry that no tier holds any more and nobody waits for."""
        if not entry.is_gone or entry.holds:
            return
        record = entry.record
        del self._entries[record.key]
        if self._ghosts is not None:
            self._ghosts.remember(record.key, entry.uses, len(self._entries))
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

    def with_states(self, prefix: Iterable[Entry]) -> list[Entry]:
        """These entries, each followed by the parts of the state behind it that the index knows."""
        found: list[Entry] = []
        for chunk in prefix:
            node: Entry | None = chunk
            while node is not None:
                found.append(node)
                child = self._entries.get(next_key(node.record.key)) if node.children else None
                node = child if child is not None and self.parent(child) is node else None
        return found

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

    def held_state(self, chunk: Entry, parts: int) -> list[Entry]:
        """Entries of the state behind a chunk, if some tier holds every part of it, else none."""
        found = [chunk]
        for _ in range(parts):
            last = found[-1]
            key, digest = next_part(last.record.key, last.record.prefix_sha256)
            entry = self._entries.get(key) if last.children else None
            if entry is None or entry.record.prefix_sha256 != digest or not self.is_held(entry):
                return []
            found.append(entry)
        return found[1:]

    def check_integrity(self) -> None:
        """Assert that links and counts between parents and children match."""
        linked: set[tuple[bytes, bytes]] = set()
        for entry in self._entries.values():
            for child in entry.children or ():
                assert self.parent(child) is entry, "a child is linked to the wrong parent"
                assert child.uses <= entry.uses, "a chunk was asked for without its parent"
                linked.add((entry.record.key, child.record.key))
            for tier, count in enumerate(entry.claimed_children):
                claimed = sum(child.blobs[tier] in CLAIMED for child in entry.children or ())
                assert count == claimed, "children count drifted"
            for tier, count in enumerate(entry.ordered_children):
                ordered = sum(child.ordered[tier] for child in entry.children or ())
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
