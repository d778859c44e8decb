"""What tiering knows of each chunk: one entry per key, with its state in every tier.

The index is a hint and the tier is the truth: a blob that turns out to be gone is an ordinary miss. Entries exist
while some tier holds, or is about to hold, the chunk.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from enum import Enum
from itertools import islice
from typing import Any, Final, TypeVar

import msgspec

from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.keys.state_keys import next_key, next_part
from tiered_kv.keys.stored_by import UNKNOWN
from tiered_kv.keys.tags import NO_TAG, shared_tag
from tiered_kv.keys.tail_keys import tail_tokens
from tiered_kv.tiering.key_map import KeyMap
from tiered_kv.tiering.types import HOST, SlotId

GENERATION_MIN = 1024
"""Keys of a generation while there are fewer chunks than that."""

SELECTIVE_GENERATION_MIN = 1 << 16
"""The same where second touches decide what is written: a tier that starts empty knows few chunks, and fills only with
what is recognised. Two generations take 12 MB."""

FORGOTTEN_AT_ONCE = 4
"""Keys of a forgotten generation whose memory is given back when one more chunk goes. A generation has at least half as
many as the one before it, so all of that are through by then."""

LOOKED_UP_AT_ONCE = 64
"""Keys of a prefix, of which most are not known for most prompts."""

SHARED_MAX = 1 << 12
"""Tuples that are remembered, to be shared; sizes of blobs and counts of children could make ever more."""

SHARED: Final = b""
"""Owner of a chunk that several have asked for."""

T = TypeVar("T")


class HostState(Enum):
    """Where a chunk stands in host memory. Only READY bytes were verified and may be promised."""

    ABSENT = "absent"
    SEALING = "sealing"
    PROMOTING = "promoting"
    READY = "ready"

    __hash__ = object.__hash__  # there is one of each; an enum's own hash is a call of Python's


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

    __hash__ = object.__hash__  # as above: tuples of these are looked up with each change


CLAIMED = frozenset({BlobState.QUEUED, BlobState.WRITING, BlobState.PRESENT})
"""States in which a chunk counts as a child of its parent in that tier."""


class Entry(msgspec.Struct, eq=False, gc=False):
    """One chunk.

    Python's garbage collector does not know of entries, or a full collection would walk millions of objects: 1 s at
    300,000 chunks, with every lookup waiting. So nothing that an entry refers to may lead back to it, and what most
    of them have in common is shared (``Index``).

    Tuples have one place per tier, by its number; the index alone writes them.

    Attributes:
        blobs: Where it stands in each secondary tier; host memory has slots and no blobs (``host``, ``slot``).
        blob_bytes: Bytes counted against each secondary tier's capacity for this chunk.
        claimed_children: Per secondary tier, children in a CLAIMED state there.
        ordered: A bit per tier: whether the chunk is in an order of eviction (``eviction.py``) of it.
        ordered_children: How many of its children are in one.
        kin: The index entries whose parent is this chunk: none, one, or a set of several.
        leases: Lookups that rely on the slot.
        holds: Leases and pending writes: what keeps a chunk in its slot.
        is_unwritten: Its write was put off: it is evicted only if there is nothing else.
        is_answer: It came with generated tokens in it, and no prompt was known to go on from it.
        uses: How often it was asked for after it came, also before it was evicted; never less than its children's.
        source: The tier its bytes are being read from, while it is PROMOTING; else ``HOST``.
        lookups: Ids of the lookups that want this slot and were not yet told it is ready; None if there is none.
        also_stored_by: Who else stored it: some tier may have that one's bytes; None if there is nobody.
        owner: The user's session whose own it is (``owners.py``); ``SHARED``: others asked for it, too; None: nobody's.
    """

    record: ChunkRecord
    blobs: tuple[BlobState, ...]
    blob_bytes: tuple[int, ...]
    claimed_children: tuple[int, ...]
    ordered_children: tuple[int, ...]
    ordered: int = 0
    kin: Entry | set[Entry] | None = None
    host: HostState = HostState.ABSENT
    slot: SlotId | None = None
    slot_bytes: int = 0
    leases: int = 0
    holds: int = 0
    is_unwritten: bool = False
    is_answer: bool = False
    uses: int = 0
    source: int = HOST
    lookups: set[int] | None = None
    also_stored_by: frozenset[str] | None = None
    owner: bytes | None = None

    @property
    def children(self) -> Collection[Entry]:
        """Index entries whose parent is this chunk."""
        return () if self.kin is None else _members(self.kin)

    @property
    def is_gone(self) -> bool:
        """Whether nothing is left to know about the chunk."""
        return self.host is HostState.ABSENT and all(state is BlobState.ABSENT for state in self.blobs)

    @property
    def is_unasked(self) -> bool:
        """Whether it is an answer's that no prompt was seen to contain. Then its children are so, too."""
        return self.is_answer and not self.uses

    @property
    def tail_tokens(self) -> int:
        """Of a tail its length; 0: it is none."""
        return tail_tokens(self.record.key)

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

    def is_asked_for_by(self, owner: bytes) -> None:
        """A user's session, or somebody without one (``SHARED``), asks for it or stored it, too."""
        if self.owner is not None and self.owner != owner:
            self.owner = SHARED

    @property
    def storers(self) -> frozenset[str]:
        """Everybody who stored it, in whatever tier, as far as it is known."""
        return (self.also_stored_by or frozenset()) | {self.record.stored_by}


class GhostList:
    """How often chunks that are gone were asked for: what recognises an evicted prompt when it comes back.

    A bounded list of keys without chunks, as the ghost queues of 2Q, ARC and S3-FIFO are. Uses by key, in two
    generations: when the younger is full, the older is forgotten as a whole. Its memory is given back key by key, while
    others come.

    A plain dictionary that loses its oldest keys one by one would be searched through from its beginning each time.
    """

    def __init__(self, generation_min: int = GENERATION_MIN) -> None:
        self._generation_min = generation_min
        self._young = KeyMap[int]()
        self._old = KeyMap[int]()
        self._forgotten: Iterator[int] = iter(())

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def remember(self, key: bytes, uses: int, chunks: int) -> None:
        """Note what has gone; a generation is full when it has as many keys as there are ``chunks``."""
        self._young[key] = uses
        for _ in islice(self._forgotten, FORGOTTEN_AT_ONCE):
            pass
        if len(self._young) >= max(chunks, self._generation_min):
            self._forgotten = self._old.pop_all()
            self._young, self._old = KeyMap(), self._young

    def recall(self, key: bytes) -> int | None:
        """What was noted of a key that is back, which is forgotten here; None: it is not known."""
        young, old = self._young.pop(key), self._old.pop(key)
        return old if young is None else young


class Index:
    """Entries by key, linked to their children.

    A chunk and its parent are linked only if they are of one namespace and their positions follow each other: what a
    client sends can then form no cycle, and join no two models. Threads: one owner.

    Most entries are in the same few states, so their tuples are shared.

    Attributes:
        readable: Per tier, whether it can be read now; what lies only in others does not count as held.
        found_beside: Per tier that cannot, keys of what was found in another place that belongs to it: these can.
        damaged: Chunks in host memory whose bytes are not what was sealed, or lie behind a chunk that was erased, and
            why they go: they count as held nowhere, whatever a tier has, and go once nobody uses them.
    """

    def __init__(self, tier_count: int, ghosts: GhostList | None = None) -> None:
        """Start empty.

        Args:
            tier_count: Of all tiers, host memory included.
            ghosts: Remembers the uses of what goes; None: nobody does.
        """
        self._entries = KeyMap[Entry]()
        # Children whose parent has no entry and may get one, by the parent's key and position.
        self._orphans: dict[tuple[bytes, bytes, int], Entry | set[Entry]] = {}
        self._tails: dict[bytes, dict[bytes, None]] = {}  # keys, oldest first, by the parent's key
        self._nothing = (BlobState.ABSENT,) * tier_count, (0,) * tier_count
        self._shared: dict[tuple[object, ...], tuple[Any, ...]] = {}
        self.readable = [True] * tier_count
        self.found_beside: list[set[bytes]] = [set() for _ in range(tier_count)]
        self.damaged: dict[Entry, str] = {}
        self._ghosts = ghosts

    def __del__(self) -> None:
        # A chain of a hundred thousand entries would be freed one within the other, deeper than a stack is.
        for entry in self._entries.values():
            entry.kin = None

    def __len__(self) -> int:
        return len(self._entries)

    def entries(self) -> list[Entry]:
        """All of them at once: for tests. A million take too long (:meth:`walk`)."""
        return list(self._entries.values())

    def walk(self) -> Iterator[Entry]:
        """All entries, while others come and go; of those that come meanwhile not all."""
        return self._entries.walk()

    def get(self, key: bytes) -> Entry | None:
        return self._entries.get(key)

    def count_use(self, prefix: Sequence[Entry], owner: bytes = SHARED, counted: int = 0) -> int:
        """A user's session, or somebody without one (``SHARED``), asked for a prefix, given whole; once per request.

        Args:
            counted: Leading chunks that the same request has asked for before: those that went and came back meanwhile
                count as used once, and what lies behind them has no more uses than they have. An answer among them that
                nobody has asked for is its own, and it was preempted: that is no use.

        Returns:
            How many answers' were new to that.
        """
        answers = 0
        most: int | None = None
        for number, entry in enumerate(prefix):
            uses = entry.uses
            if entry.is_answer and not uses:
                answers += number >= counted
            if number >= counted or not (uses or entry.is_answer):
                entry.uses = uses = uses + 1 if most is None else min(uses + 1, most)
            most = uses if counted else None
            if entry.owner is not None:
                entry.is_asked_for_by(owner)
        return answers

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
            if state is BlobState.PRESENT and (self.readable[tier] or entry.record.key in self.found_beside[tier]):
                return tier
        return None

    def tiers_with(self, entry: Entry) -> list[int]:
        """Tiers that have the chunk now, highest first."""
        host = [HOST] if entry.host is HostState.READY else []
        return host + [tier for tier, state in enumerate(entry.blobs) if state is BlobState.PRESENT]

    def is_held(self, entry: Entry) -> bool:
        """Whether some tier that can be read has the bytes, or is just getting them from us."""
        if entry in self.damaged:
            return False
        return entry.host is not HostState.ABSENT or self.source(entry) is not None

    def parent(self, entry: Entry) -> Entry | None:
        """The entry of the chunk before this one; None for the first chunk and for an orphan."""
        return self.parent_of(entry.record)

    def parent_of(self, record: ChunkRecord) -> Entry | None:
        """The same of a chunk that need not have an entry."""
        parent = self._entries.get(record.parent)
        if parent is None or parent.record.chunk_index != record.chunk_index - 1:
            return None
        return parent if parent.record.namespace == record.namespace else None

    def is_in_prompt(self, record: ChunkRecord) -> bool:
        """Whether a prompt is known to go on from a chunk that has no entry."""
        kin = self._orphans.get((record.namespace, record.key, record.chunk_index))
        behind = () if kin is None else _members(kin)
        return any(not (child.is_unasked or child.tail_tokens) for child in behind)

    def add(self, record: ChunkRecord) -> Entry:
        """Make the entry of a key that has none."""
        assert record.key not in self._entries
        absent, zeros = self._nothing
        entry = Entry(self._with_shared_parent(record), absent, zeros, zeros, zeros)
        self._entries[record.key] = entry
        if tail_tokens(record.key):
            self._tails.setdefault(record.parent, {})[record.key] = None
        entry.kin = self._orphans.pop((record.namespace, record.key, record.chunk_index), None)
        for child in entry.children:
            child.record = self._with_shared_parent(child.record)
            for tier, state in enumerate(child.blobs):
                self._count_child(entry, tier, claimed=state in CLAIMED, ordered=child.ordered >> tier & 1)
        parent = self.parent(entry)
        if parent is not None:
            parent.kin = _with(parent.kin, entry)
        elif record.chunk_index:
            place = record.namespace, record.parent, record.chunk_index - 1
            self._orphans[place] = _with(self._orphans.get(place), entry)
        self._set_uses(entry, parent)
        return entry

    # -- tails -------------------------------------------------------------------------------------------------

    def tails_behind(self, chunk: Entry) -> list[Entry]:
        """The tails that follow a chunk, in the order in which they came."""
        tails = map(self._entries.__getitem__, self._tails.get(chunk.record.key, ()))
        return [tail for tail in tails if self.parent(tail) is chunk]

    def chunks_with_tails(self) -> list[Entry]:
        """Every chunk that tails follow, as far as it is known."""
        return [chunk for key in self._tails if (chunk := self._entries.get(key)) is not None]

    def _forget_tail(self, record: ChunkRecord) -> None:
        tails = self._tails[record.parent]
        del tails[record.key]
        if not tails:
            del self._tails[record.parent]

    # -- the state of an entry ---------------------------------------------------------------------------------

    def _with_shared_parent(self, record: ChunkRecord) -> ChunkRecord:
        """The same record; its parent's key is the very object that the parent has, if that is known: 64 bytes less."""
        parent = self._entries.get(record.parent)
        if parent is None or parent.record.key is record.parent:
            return record
        return msgspec.structs.replace(record, parent=parent.record.key)

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
        entry.blobs = self._changed(entry.blobs, tier, state)
        if change and (parent := self.parent(entry)) is not None:
            self._count_child(parent, tier, claimed=change)

    def set_blob_bytes(self, entry: Entry, tier: int, size_bytes: int) -> None:
        """Note what counts against a tier's capacity for the chunk."""
        entry.blob_bytes = self._changed(entry.blob_bytes, tier, size_bytes)

    def set_ordered(self, entry: Entry, tier: int, *, is_ordered: bool) -> None:
        """Note whether the chunk is in an order of the tier, keeping the parent's count of such children."""
        change = is_ordered - (entry.ordered >> tier & 1)
        entry.ordered += change << tier
        if change and (parent := self.parent(entry)) is not None:
            self._count_child(parent, tier, ordered=change)

    def _count_child(self, entry: Entry, tier: int, *, claimed: int = 0, ordered: int = 0) -> None:
        """Count a child more or less that is in a CLAIMED state, or in an order, of the tier."""
        if claimed:
            count = entry.claimed_children[tier] + claimed
            entry.claimed_children = self._changed(entry.claimed_children, tier, count)
        if ordered:
            count = entry.ordered_children[tier] + ordered
            entry.ordered_children = self._changed(entry.ordered_children, tier, count)

    def _changed(self, values: tuple[T, ...], tier: int, value: T) -> tuple[T, ...]:
        """The values with another one in a tier's place; the same object whenever they are the same."""
        wanted = (*values[:tier], value, *values[tier + 1 :])
        if len(self._shared) >= SHARED_MAX:
            self._shared.clear()
        return self._shared.setdefault(wanted, wanted)

    def remove_if_gone(self, entry: Entry) -> None:
        """Forget an entry that no tier holds any more and nobody waits for. Idempotent."""
        if not entry.is_gone or entry.holds or self._entries.get(entry.record.key) is not entry:
            return
        record = entry.record
        del self._entries[record.key]
        if tail_tokens(record.key):
            self._forget_tail(record)
        if self._ghosts is not None:
            self._ghosts.remember(record.key, entry.uses, len(self._entries))
        if entry.kin is not None:
            self._orphans[record.namespace, record.key, record.chunk_index] = entry.kin
            entry.kin = None
        parent = self.parent(entry)
        if parent is not None:
            parent.kin = _without(parent.kin, entry)
        if parent is not None or not record.chunk_index:
            return
        place = (record.namespace, record.parent, record.chunk_index - 1)
        siblings = _without(self._orphans[place], entry)
        if siblings is None:
            del self._orphans[place]
        else:
            self._orphans[place] = siblings

    def prefix(self, entry: Entry) -> list[Entry]:
        """The entry and its ancestors, deepest first, as far as the index knows them."""
        chain, record, get = [entry], entry.record, self._entries.get
        while (parent := get(record.parent)) is not None:
            above = parent.record
            if above.chunk_index != record.chunk_index - 1 or above.namespace != record.namespace:
                break
            chain.append(parent)
            record = above
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
        run: list[Entry] = []
        for first in range(0, len(keys), LOOKED_UP_AT_ONCE):
            last = first + LOOKED_UP_AT_ONCE
            for entry, digest in zip(self._entries.get_all(keys[first:last]), digests[first:last], strict=True):
                if entry is None or (entry.host is HostState.ABSENT and self.source(entry) is None):
                    return run
                record = entry.record
                if record.prefix_sha256 != digest or record.namespace != namespace or entry in self.damaged:
                    return run
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
            for child in entry.children:
                assert self.parent(child) is entry, "a child is linked to the wrong parent"
                assert child.uses <= entry.uses, "a chunk was asked for without its parent"
                is_placed = child.is_unasked or not entry.is_unasked or child.tail_tokens
                assert is_placed, "a prompt's chunk behind one that no prompt has"
                linked.add((entry.record.key, child.record.key))
            for tier, count in enumerate(entry.claimed_children):
                claimed = sum(child.blobs[tier] in CLAIMED for child in entry.children)
                assert count == claimed, "children count drifted"
            for tier, count in enumerate(entry.ordered_children):
                ordered = sum(child.ordered >> tier & 1 for child in entry.children)
                assert count == ordered, "ordered children count drifted"
        orphans = {child.record.key for kin in self._orphans.values() for child in _members(kin)}
        for entry in self._entries.values():
            parent = self.parent(entry)
            if parent is None:
                assert (entry.record.key in orphans) == (entry.record.chunk_index > 0), "orphans drifted"
            else:
                assert (parent.record.key, entry.record.key) in linked, "a parent does not know its child"
        first = sum(entry.record.chunk_index == 0 for entry in self._entries.values())
        assert len(linked) + len(orphans) + first == len(self._entries), "an entry is linked twice"
        for parent_key, tails in self._tails.items():
            assert tails, "a chunk without tails is remembered"
            for key in tails:
                tail = self._entries.get(key)
                assert tail is not None and tail.record.parent == parent_key, "a tail outlived its entry"
                assert set(tail.blobs[HOST + 2 :]) <= {BlobState.ABSENT}, "a tail was written below the first tier"
        known = {key for tails in self._tails.values() for key in tails}
        assert known == {e.record.key for e in self._entries.values() if e.tail_tokens}, "a tail is not known as one"
        sets = [
            kin for kin in (*self._orphans.values(), *(e.kin for e in self._entries.values())) if isinstance(kin, set)
        ]
        assert all(len(kin) > 1 for kin in sets), "a set of one or none was left behind"


def _with(kin: Entry | set[Entry] | None, entry: Entry) -> Entry | set[Entry]:
    if kin is None:
        return entry
    if isinstance(kin, Entry):
        return {kin, entry}
    kin.add(entry)
    return kin


def _without(kin: Entry | set[Entry] | None, entry: Entry) -> Entry | set[Entry] | None:
    if isinstance(kin, set):
        kin.remove(entry)
        return kin if len(kin) > 1 else kin.pop()
    assert kin is entry, "a child is not linked where it should be"
    return None


def _members(kin: Entry | set[Entry]) -> Collection[Entry]:
    return kin if isinstance(kin, set) else (kin,)
