"""The world around a tiering, as dictionaries: what every slot and every medium really holds.

Performs tiering's jobs in the order and with the outcomes a test picks, plays the sessions' clients, and asserts
on the way whatever must never happen: a promised slot with other bytes than the key's, a slot used by two, a blob
written before its parent or beyond the capacity, a foreign blob touched, a chunk called held that nobody has. Knows no
bytes: a slot's content is the key that was last sealed or read into it.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from tests.kit.spaces import Space
from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.keys.state_keys import next_part
from tiered_kv.keys.tail_keys import tail_tokens
from tiered_kv.tiering.leases import OVERFLOW
from tiered_kv.tiering.lookups import LookupRequest
from tiered_kv.tiering.slots import slab_of
from tiered_kv.tiering.tiering import Tiering
from tiered_kv.tiering.types import (
    HOST,
    Copy,
    Delete,
    Grow,
    Job,
    LeaseEnd,
    LoadDamaged,
    LookupAnswer,
    LookupUpdate,
    Outcome,
    Probe,
    Read,
    RemovalCount,
    Seal,
    SlotGrant,
    SlotId,
    SlotRecall,
    TierEvents,
    Turn,
    Write,
)

CHECKED_PER_STEP = 64
"""Chunks known to tiering up to which its whole state is checked after every step."""

IDLE_STEPS_MAX = 2000
"""Steps in a row without a job, in each of which tiering says that it has more to do at once."""


class Blob(Enum):
    """What a medium has under a name."""

    GOOD = "good"
    CORRUPT = "corrupt"
    FOREIGN = "foreign"


@dataclass(slots=True)
class Asked:
    """A lookup as its session sees it; ``update`` is the latest, ``path`` what it asked for."""

    session: int
    keys: list[bytes]
    start: int
    state_parts: int = 0
    update: LookupAnswer | None = None
    path: tuple[int, ...] = ()

    @property
    def wanted(self) -> list[bytes]:
        """Keys of the chunks whose slots are promised, and of the state behind them."""
        if not self.state_parts or self.update is None:
            return self.keys[self.start :]
        found = self.keys[self.start : self.update.boundary]
        for _ in range(self.state_parts if self.update.boundary else 0):
            found.append(next_part(found[-1], b"")[0])
        return found


class World:
    """Tiering and everything it is not.

    Attributes:
        jobs: Handed out and not yet reported.
        media: Per secondary tier, by its number, what it really has. In a shared one others store and evict, too.
        credits: Per open session, empty slots its client was told of.
        beside: Keys of what a shared tier that is out has in another place, which is asked then; None: it has none.
        dates: Whether steps date what was used.
    """

    def __init__(self, tiering: Tiering, capacities: list[int | None]) -> None:
        """``capacities`` are those of the secondary tiers, highest first."""
        self.tiering = tiering
        self._capacities = dict(enumerate(capacities, HOST + 1))
        self.jobs: list[Job] = []
        self.media: dict[int, dict[bytes, Blob]] = {tier: {} for tier in self._capacities}
        self.beside: set[bytes] | None = None
        self.dates = True
        self.spaces: dict[int, Space] = {}
        self.suspended: set[int] = set()
        self.resting: set[int] = set()
        self.credits: dict[int, list[SlotId]] = defaultdict(list)
        self.lookups: dict[int, Asked] = {}
        self.claimed: set[int] = set()
        self.ended: list[int] = []  # lookups whose leases ended although nobody released them
        self.worthless: set[int] = set()  # claimed ones of which nothing that was read counts
        self.gave_way: list[Asked] = []  # what these had asked for
        self.moves: list[TierEvents] = []  # what watching sessions were told
        self._contents: dict[SlotId, bytes] = {}  # sealed bytes, as the key they belong to
        self._filled: dict[SlotId, bytes] = {}  # committed and not yet sealed
        self._tails: dict[bytes, bytes] = {}  # keys of tails by their digests
        self._shunned: set[tuple[int, bytes]] = set()  # tiering was told that these are foreign
        self._damaged: set[tuple[int, bytes]] = set()
        self._known_corrupt: set[tuple[int, bytes]] = set()
        self._believed: dict[int, set[bytes]] = {tier: set() for tier in self.media}  # what tiering was told is there
        self._asked: list[list[bytes]] = []
        self._sizes: dict[bytes, int] = {}
        self._slabs_with_memory: set[int] = set()
        self._kept: dict[int, int] = {}  # what slabs have since no page of theirs may change
        self._shrunk: set[int] = set(self.media)  # tiers that may hold too much since the start
        self._spaces_seen: list[Space] = []
        self._unchecked_steps = 0

    # -- the sessions' clients ---------------------------------------------------------------------------------

    def restore(self, tier: int, space: Space, path: tuple[int, ...]) -> None:
        """A blob is there when tiering starts."""
        self._restore(tier, space.record(path), space.slot_bytes)

    def _restore(self, tier: int, record: ChunkRecord, size_bytes: int) -> None:
        self._sizes[record.key] = size_bytes
        self.media[tier][record.key] = Blob.GOOD
        self._believed[tier].add(record.key)
        self.tiering.restore(tier, record, size_bytes)

    def remove(self, tier: int, namespace: bytes, keys: Sequence[bytes] | None, *, leaves_holes: bool) -> RemovalCount:
        """An operator removes chunks from one tier, in one step of ours."""
        *_, count = self.tiering.removing(tier, namespace, keys, leaves_holes=leaves_holes)
        assert count is not None, "a removal ended without its count"
        return count

    def open(self, space: Space) -> int:
        session = self.tiering.open_session(space.namespace, space.slot_bytes)
        self.spaces[session] = space
        if space not in self._spaces_seen:
            self._spaces_seen.append(space)
        return session

    def lookup(
        self,
        session: int,
        path: tuple[int, ...],
        start: int = 0,
        turn: Turn = (0, 0),
        *,
        state_parts: int = 0,
        wants_tails: bool = False,
        owner: bytes = b"",
        hint: str = "",
        leases: bool = True,
        counted: int = 0,
        is_followed: bool = True,
    ) -> int:
        keys, digests = self.spaces[session].prefix(path)
        wish = LookupRequest(
            keys, digests, start, turn, state_parts=state_parts, owner=owner, wants_tails=wants_tails, hint=hint,
            leases=leases, counted=counted, is_followed=is_followed,
        )  # fmt: skip
        lookup = self.tiering.lookup(session, wish)
        self.lookups[lookup] = Asked(session, keys, start, state_parts, path=path)
        if keys not in self._asked:
            self._asked.append(keys)
        return lookup

    def claim(self, lookup: int) -> None:
        """A load begins: what is ready is read until the lookup is released."""
        self.claimed.add(lookup)
        self.tiering.claim(self.lookups[lookup].session, lookup)

    def release(self, lookup: int, *, is_asked_anew: bool = False) -> None:
        self.claimed.discard(lookup)
        self.tiering.release(self.lookups.pop(lookup).session, lookup, is_asked_anew=is_asked_anew)

    def commit(self, session: int, path: tuple[int, ...], *, is_answer: bool = False) -> bool:
        """Fill the session's next empty slot with a chunk and hand it over; False when it has none."""
        return self.commit_record(session, self.spaces[session].record(path), is_answer=is_answer)

    def commit_record(self, session: int, record: ChunkRecord, *, is_answer: bool = False) -> bool:
        if not self.credits[session]:
            return False
        slot = self.credits[session].pop(0)
        self._sizes[record.key] = self.spaces[session].slot_bytes
        self._contents.pop(slot, None)
        self._filled[slot] = record.key
        self.tiering.commit(session, slot, record, is_answer=is_answer)
        return True

    def commit_tail(self, session: int, path: tuple[int, ...], name: str, tokens: int = 4) -> bool:
        """Fill the session's next empty slot with a tail behind a prefix; False when it has none."""
        if not self.credits[session]:
            return False
        slot, record = self.credits[session].pop(0), self.spaces[session].tail(path, name, tokens)
        self._sizes[record.key] = self.spaces[session].slot_bytes
        self._contents.pop(slot, None)
        self.tiering.commit_tail(session, slot, record)
        entry = self.tiering.index.get(record.key)
        if entry is not None and entry.slot == slot:  # ready without being sealed
            self._contents[slot] = record.key
        self._tails[record.prefix_sha256] = record.key
        return True

    def drop_tail(self, session: int, path: tuple[int, ...], name: str, tokens: int = 4) -> None:
        """Something was stored that continues a tail."""
        self.tiering.drop_tails(session, [self.spaces[session].tail(path, name, tokens).key])

    def restore_tail(self, tier: int, space: Space, path: tuple[int, ...], name: str, tokens: int = 4) -> None:
        """A tail's blob is there when tiering starts."""
        record = space.tail(path, name, tokens)
        self._tails[record.prefix_sha256] = record.key
        self._restore(tier, record, space.slot_bytes)

    def give_back(self, session: int) -> None:
        if self.credits[session]:
            self.tiering.give_back(session, self.credits[session].pop())

    def rest(self, session: int) -> None:
        """The session stores nothing for a while; it has filled none of its slots."""
        self.tiering.rest(session)
        self.credits[session] = []
        self.resting.add(session)

    def wake(self, session: int) -> None:
        self.tiering.wake(session)
        self.resting.discard(session)

    def suspend(self, session: int) -> None:
        """The client is gone, but its processes go on writing to its slots and reading from its leases."""
        self.tiering.suspend_session(session)
        self.suspended.add(session)

    def close(self, session: int) -> None:
        self.tiering.close_session(session)
        self.lookups = {i: asked for i, asked in self.lookups.items() if asked.session != session}
        self.credits.pop(session, None)
        self.suspended.discard(session)
        self.resting.discard(session)
        del self.spaces[session]

    # -- what the engine does ----------------------------------------------------------------------------------

    def step(self) -> None:
        """Collect jobs and updates, and check everything."""
        jobs = self.tiering.take_jobs(dates=self.dates)
        updates = self.tiering.take_updates()
        for job in jobs:
            self._begin(job)
        for update in updates:
            match update:
                case LookupUpdate(session, lookup):
                    assert session not in self.suspended, "a lost client was told something"
                    self._learn(self.lookups[lookup], update.answer)
                case SlotGrant(session, slots):
                    assert session not in self.suspended, "a lost client was granted something"
                    assert session not in self.resting, "a client that stores nothing was granted something"
                    self.credits[session].extend(slots)
                    for slot in slots:  # the client writes into it from now on
                        assert slab_of(slot) in self._slabs_with_memory, "a slot is granted before it has memory"
                        self._forget(slot)
                case SlotRecall(session, slots):
                    for slot in [slot for slot in slots if slot in self.credits[session]]:
                        self.credits[session].remove(slot)
                        self.tiering.give_back(session, slot)
                case LeaseEnd(session, lookup):
                    assert lookup not in self.claimed, "the leases of a running load end"
                    self._end_lease(session, lookup)
                case LoadDamaged(session, lookup):
                    assert lookup in self.claimed, "the leases of what waits go on"
                    assert session not in self.suspended, "a lost client was told something"
                    self.worthless.add(lookup)
                case TierEvents():
                    self.moves.append(update)
        self.check()

    def _end_lease(self, session: int, lookup: int) -> None:
        """A client that reads: it forgets the lookup, and the leases are back."""
        assert session not in self.suspended, "a lost client was told something"
        if lookup in self.lookups:
            self.gave_way.append(self.lookups[lookup])
            self.release(lookup)
            self.ended.append(lookup)

    def _learn(self, asked: Asked, update: LookupAnswer) -> None:
        before = asked.update
        if before is not None:
            length = min(len(before.slots), len(update.slots))
            assert before.slots[:length] == update.slots[:length], "a promised slot was exchanged"
            assert before.ready <= update.ready, "a promise was taken back"
            assert not before.is_done, "a lookup that was done changed"
            assert update.held <= before.held + before.unknown, "more is held than was looked for"
            assert update.unknown <= before.unknown, "a search grew"
            assert len(before.slots) >= len(update.slots) or before.queued or before.unknown, "nobody waited for room"
        assert update.ready <= len(update.slots)
        coming_tails = 0
        if update.tails and not update.is_done:
            coming = sum(run.chunks for run in update.arriving) - (len(update.slots) - update.ready)
            coming_tails = max(0, coming - update.queued)  # of which some may be leased and not begun with
            assert coming_tails in (0, 1) and coming_tails <= sum(tail.slot is None for tail in update.tails)
        has_all = update.ready == len(update.slots) and not coming_tails
        assert update.is_done == (has_all and not update.unknown and not update.queued)
        if asked.state_parts:
            wanted = update.boundary - asked.start + asked.state_parts
            assert not update.boundary or wanted == len(update.slots) + update.queued, "a state is promised in part"
        else:
            assert not update.boundary, "a state that nobody asked for"
            assert asked.start + len(update.slots) <= max(asked.start, update.held)
        known = 0 if before is None else before.held  # of these some may have been evicted since
        for key in asked.keys[known : update.held]:
            assert self._is_somewhere(key), "a chunk is called held that nobody has"
        asked.update = update

    def _is_somewhere(self, key: bytes) -> bool:
        in_host = key in self._contents.values() or key in self._filled.values()
        return in_host or any(key in believed for believed in self._believed.values())

    def _begin(self, job: Job) -> None:
        match job:
            case Seal(record, slot):
                assert self._filled[slot] == record.key, "a slot is sealed that was not committed"
            case Write(tier, record, slot):
                assert self._contents.get(slot) == record.key, "other bytes are written than the key's"
                assert tier == HOST + 1 or not tail_tokens(record.key), "a tail is written below the first tier"
                if record.chunk_index and (tier, record.parent) not in self._damaged:
                    assert record.parent in self.media[tier], "a child is written before its parent"
            case Copy(tier, _, record):
                assert not tail_tokens(record.key), "a tail is uploaded"
                if record.chunk_index and (tier, record.parent) not in self._damaged:
                    assert record.parent in self.media[tier], "a child is uploaded before its parent"
            case Read(_, _, slot):
                self._forget(slot)
            case Delete(tier, record):
                self._believed[tier].discard(record.key)
            case Grow(slab, size_bytes):
                self._slabs_with_memory.discard(slab)
                assert size_bytes >= self._kept.get(slab, 0), "pages are taken from a slab that a process pins"
        if isinstance(job, Write | Copy) or (isinstance(job, Probe) and self.beside is None):
            assert self.tiering.index.readable[job.tier], "a tier that does not answer is asked"
        self._check_alone(job)
        self.jobs.append(job)

    def _forget(self, slot: SlotId) -> None:
        self._contents.pop(slot, None)
        self._filled.pop(slot, None)  # a duplicate's slot came back without being sealed

    def _check_alone(self, job: Job) -> None:
        if isinstance(job, Read | Write | Delete | Copy):
            assert (job.tier, job.record.key) not in self._shunned, "a foreign blob is touched"
            others = [j for j in self.jobs if isinstance(j, Read | Write | Delete | Copy) and j.tier == job.tier]
            assert job.record not in [other.record for other in others], "two jobs on one blob"
        if isinstance(job, Read | Write | Seal):
            users = [other for other in self.jobs if isinstance(other, Read | Write | Seal) and other.slot == job.slot]
            assert not users, "two jobs on one slot"
            assert slab_of(job.slot) in self._slabs_with_memory, "a slot is used before it has memory"
            granted = [slot for slots in self.credits.values() for slot in slots]
            assert job.slot not in granted, "a job uses a slot that a client may be filling"

    def finish(self, index: int, fault: Outcome | None = None) -> Outcome:
        """End one of the jobs as its medium would, or with a fault that leaves the medium as it was."""
        job = self.jobs.pop(index)
        outcome = self._perform(job, fault)
        self._believe(job, outcome)
        match job:
            case Seal():
                self.tiering.sealed(job, outcome)
            case Write():
                self.tiering.written(job, outcome, self._count_behind(job))
            case Copy():
                self.tiering.copied(job, outcome, self._count_behind(job))
            case Probe():
                self.tiering.probed(job, self._held(job) if outcome is Outcome.OK else None)
            case Read():
                self.tiering.read(job, outcome)
            case Delete():
                self.tiering.deleted(job.tier, job.record, outcome)
            case Grow():
                self.tiering.grown(job, outcome)
        self.step()
        return outcome

    def _believe(self, job: Job, outcome: Outcome) -> None:
        match job:
            case Probe(tier, records, _) if outcome is Outcome.OK:
                for record in records[: self._held(job)]:
                    self._believed[tier].add(record.key)
                    for keys in self._asked:  # where a chunk is, its prefix is taken to be
                        if keys[record.chunk_index : record.chunk_index + 1] == [record.key]:
                            self._believed[tier].update(keys[: record.chunk_index])
            case Write(tier, record) | Copy(tier, _, record) if outcome is Outcome.OK:
                self._believed[tier].add(record.key)
                self._known_corrupt.discard((tier, record.key))
            case Read(tier, record) if outcome not in (Outcome.OK, Outcome.UNAVAILABLE):
                self._believed[tier].discard(record.key)
                if outcome is Outcome.CORRUPT:
                    self._known_corrupt.add((tier, record.key))
            case Delete(tier, record) if outcome is Outcome.UNAVAILABLE:
                if (tier, record.key) not in self._known_corrupt:
                    self._believed[tier].add(record.key)

    def _perform(self, job: Job, fault: Outcome | None) -> Outcome:
        if isinstance(job, Read | Probe) and self._is_out(job.tier) and job.record.key not in (self.beside or ()):
            fault = fault or Outcome.UNAVAILABLE
        if isinstance(job, Write | Copy) and fault is None and self._count_behind(job) < len(job.behind):
            return Outcome.NO_PARENT
        if isinstance(job, Copy | Probe):
            return fault or self._perform_remotely(job)
        match job:
            case Seal(_, slot):
                key = self._filled.pop(slot)
                if fault is None:
                    self._contents[slot] = key
            case Write(tier, record, slot):
                assert self._contents.get(slot) == record.key, "a slot changed while it was written"
                if self.media[tier].get(record.key) is Blob.FOREIGN:
                    self._shunned.add((tier, record.key))
                    return Outcome.FOREIGN
                if fault is None:
                    self.media[tier][record.key] = Blob.GOOD
                    self._damaged.discard((tier, record.key))
            case Read(tier, record, slot):
                if fault is None:
                    return self._read(tier, record.key, slot)
            case Grow(slab, size_bytes):
                if fault is None:
                    self._slabs_with_memory.add(slab)
                    if self.tiering.slots.keeps_memory:
                        self._kept[slab] = max(size_bytes, self._kept.get(slab, 0))
            case Delete(tier, record):
                if self.media[tier].get(record.key, Blob.FOREIGN) is Blob.FOREIGN:
                    return fault or Outcome.MISSING
                if fault is None:
                    del self.media[tier][record.key]
        return fault or Outcome.OK

    def _read(self, tier: int, key: bytes, slot: SlotId) -> Outcome:
        blob = self.media[tier].get(key)
        if blob is Blob.GOOD:
            self._contents[slot] = key
        elif blob is Blob.FOREIGN:
            self._shunned.add((tier, key))
        outcomes = {None: Outcome.MISSING, Blob.GOOD: Outcome.OK, Blob.CORRUPT: Outcome.CORRUPT}
        return outcomes.get(blob, Outcome.FOREIGN)

    def _held(self, job: Probe) -> int:
        """How many of a probe's blobs are there, from the first on."""
        place = self.beside if self._is_out(job.tier) else self.media[job.tier]
        there = [record.key in (place or ()) for record in job.records]
        return there.index(False) if False in there else len(there)

    def _count_behind(self, job: Write | Copy) -> int:
        """How many of the chunks that a write goes behind are there, from the first on."""
        there = [record.key in self.media[job.tier] for record in job.behind]
        return there.index(False) if False in there else len(there)

    def _is_out(self, tier: int) -> bool:
        return self.beside is not None and not self.tiering.index.readable[tier]

    def _perform_remotely(self, job: Copy | Probe) -> Outcome:
        tier, key = job.tier, job.record.key
        if isinstance(job, Probe):
            return Outcome.OK
        if self.media[tier].get(key) is Blob.FOREIGN:
            self._shunned.add((tier, key))
            return Outcome.FOREIGN
        if self.media[job.source].get(key) is not Blob.GOOD:
            return Outcome.NO_SOURCE
        self.media[tier][key] = Blob.GOOD
        self._damaged.discard((tier, key))
        return Outcome.OK

    def keep_memory(self, *, is_kept: bool) -> None:
        """A process pins slabs from now on, or none does any more."""
        slots = self.tiering.slots
        slots.keep_memory(is_kept=is_kept)
        growing = {job.slab for job in self.jobs if isinstance(job, Grow)}
        slabs = range(slots.slab_count) if is_kept else ()
        self._kept = {slab: slots.memory_bytes(slab) for slab in slabs if slab not in growing}

    def others_store(self, space: Space, path: tuple[int, ...]) -> None:
        """Another machine puts a prefix into the shared tier."""
        self.others_store_records([space.record(path[:depth]) for depth in range(1, len(path) + 1)], space.slot_bytes)

    def others_store_records(self, records: Iterable[ChunkRecord], size_bytes: int) -> None:
        for record in records:
            self._sizes[record.key] = size_bytes
            self.media[max(self.media)].setdefault(record.key, Blob.GOOD)

    def damage(self, tier: int, key: bytes, blob: Blob | None) -> None:
        """Change what a medium has behind tiering's back; None removes it."""
        if self.media[tier][key] is Blob.FOREIGN:
            return
        self._damaged.add((tier, key))
        if blob is None:
            del self.media[tier][key]
        else:
            self.media[tier][key] = blob

    def finish_all(self) -> None:
        """End all jobs, and those that follow, without faults, and what goes in parts."""
        self.step()
        idle_steps = 0
        while self.jobs or self.tiering.wants_turn:
            idle_steps = 0 if self.jobs else idle_steps + 1
            assert idle_steps < IDLE_STEPS_MAX, "the loop turns for nothing"
            if self.jobs:
                self.finish(0)
            else:
                self.step()
        for number, asked in self.lookups.items():
            if asked.session not in self.suspended and number not in self.worthless:
                assert asked.update is not None
                assert asked.update.is_done or self._waits(number), "the end of a lookup was not told"

    def _waits(self, number: int) -> bool:
        """Whether a lookup waits for others' leases or for an answer that nobody gives."""
        lookup = self.tiering._lookups.get(number)
        assert lookup is not None
        return bool(lookup.queued or lookup.search is not None)

    # -- what must always hold ---------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert that promises are kept and limits are respected.

        Tiering's whole state takes time for every chunk it knows. With many it is looked at every few steps: what is
        wrong in there stays wrong, and histories of few chunks meet the rest.
        """
        self._unchecked_steps += 1
        if self._unchecked_steps * CHECKED_PER_STEP >= len(self.tiering.index):
            self.tiering.check_integrity()
            self._unchecked_steps = 0
        for asked in self.lookups.values():
            if asked.update is None:
                continue
            promised = asked.update.slots[: asked.update.ready]
            for key, slot in zip(asked.wanted, promised, strict=False):
                assert self._contents.get(slot) == key, "a promised slot holds other bytes"
            for tail in asked.update.tails:
                is_right = tail.slot is None or self._contents.get(tail.slot) == self._tails[tail.digest]
                assert is_right, "a tail's slot holds other bytes"
        for tier, capacity in self._capacities.items():
            if capacity is not None and self._used(tier) <= capacity:
                self._shrunk.discard(tier)
            elif capacity is not None:
                assert tier in self._shrunk, "a medium holds more than it may"
        limits, usage = self.tiering.limits, self.tiering.usage()
        host_bytes = self.tiering.slots.host_bytes
        assert usage["host_assigned_bytes"] <= host_bytes
        assert sum(self._kept.values()) <= host_bytes, "pinned slabs take more memory than there is"
        # Beyond the share only for a session that has less than its own, while claims of others hold more than theirs.
        overflow = OVERFLOW if len({asked.session for asked in self.lookups.values()}) > 1 else 1.0
        assert usage["leased_bytes"] <= host_bytes * limits.leased_share * overflow
        pending = sum(isinstance(job, Write) for job in self.jobs)
        assert self.tiering.pending_writes >= (pending if self.media else 0)

    def _used(self, tier: int) -> int:
        writing = [job.record.key for job in self.jobs if isinstance(job, Write) and job.tier == tier]
        ours = [key for key, blob in self.media[tier].items() if blob is not Blob.FOREIGN]
        return sum(self._sizes[key] for key in {*ours, *writing})

    def wind_down(self) -> None:
        """Let all faults and sessions end, and assert that nothing is left behind."""
        self.tiering.check_integrity()
        for session in list(self.spaces):
            self.close(session)
        self.keep_memory(is_kept=False)
        for tier in self.media:
            self.tiering.set_readable(tier, True)
        self.finish_all()
        self.tiering.resume_writes()  # what was put off a moment ago
        self.finish_all()
        usage = self.tiering.usage()
        assert not self.tiering.pending_writes, "writes are pending and none is running"
        left = {name: usage[name] for name in ("leased_bytes", "lookups", "reserved_slots", "sessions")}
        assert not any(left.values()), left
        self.tiering.try_again()
        self.finish_all()
        for tier, capacity in self._capacities.items():
            assert capacity is None or self._used(tier) <= capacity, "a medium stays above its capacity"
        for number, space in enumerate(list(self._spaces_seen)):
            self._prove_progress(space, number)

    def _prove_progress(self, space: Space, number: int) -> None:
        """A new session can store a chunk and have it again, whatever happened before."""
        session = self.open(space)
        self.finish_all()
        path = (-1 - number,)
        assert self.commit(session, path), "a new session gets no slot"
        self.finish_all()
        lookup = self.lookup(session, path)
        self.finish_all()
        update = self.lookups[lookup].update
        assert update is not None and update.is_done and (update.held, update.ready) == (1, 1), "a stored chunk is lost"
        self.close(session)
