"""Lookups: which chunks each one leases, how much of it is ready, and what its session must be told.

Owns leases on behalf of lookups. Must not decide what is promoted or from where: tiering does that between
:meth:`Lookups.open` and :meth:`Lookups.wait`. Called by tiering only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice
from typing import Final

from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.keys.tail_keys import tail_tokens
from tiered_kv.tiering.host_tier import HostTier, NoSlot
from tiered_kv.tiering.index import SHARED, Entry, HostState, Index
from tiered_kv.tiering.leases import LeaseQueue, Lookup
from tiered_kv.tiering.removal import IsMeant
from tiered_kv.tiering.slot_grants import Session
from tiered_kv.tiering.slots import slab_of
from tiered_kv.tiering.stats import HitStats, Outbox
from tiered_kv.tiering.tiers import SecondaryTiers
from tiered_kv.tiering.types import (
    HOST,
    Arrival,
    LeaseEnd,
    Limits,
    LoadDamaged,
    LookupAnswer,
    LookupUpdate,
    Outcome,
    Read,
    SlotId,
    Tail,
    Turn,
)


@dataclass(frozen=True, slots=True)
class LookupRequest:
    """What a lookup asks for.

    Attributes:
        keys, digests: Of its prefix.
        start: Chunks before it are not wanted.
        turn: When its request is admitted.
        is_claimed: Its leases end when it is released and not before.
        state_parts: Wanted is the prefix up to the deepest state that is held, and that state, of so many parts.
        owner: The user's session that asks, if it is one's.
        may_search: What is not known here is looked for in a shared tier; the keys are those of a prefix from its
            beginning then.
        wants_tails: Wanted are the tails behind what is held, too.
        hint: Where the shared tier looks first, and for what was absent a moment ago, too.
        is_prefetch: No request asks for it yet: miss-ratio curves do not count it.
        leases: Otherwise it is a question: what is held, and from which tiers it would come. Not for a state or tails.
            One that does not search counts as no use.
        counted: Leading chunks that an earlier lookup of the same request found: their use is counted already. A
            request that waits for long is looked up anew every second. One that was preempted has had all of it, its
            own answer, too.
        load: The load that it is a part of (``HitStats``); 0: it is counted by itself.
        is_followed: Its session is told of parts as they are ready. Otherwise of what it finds, of what changes that,
            and of the end, until it begins to follow it.
    """

    keys: Sequence[bytes]
    digests: Sequence[bytes]
    start: int = 0
    turn: Turn = (0, 0)
    is_claimed: bool = False
    state_parts: int = 0
    owner: bytes = SHARED
    may_search: bool = True
    wants_tails: bool = False
    hint: str = ""
    is_prefetch: bool = False
    leases: bool = True
    counted: int = 0
    load: int = 0
    is_followed: bool = True


READ_AT_ONCE: Final = 128
EVICTED_AT_ONCE: Final = 24
"""Chunks that one step begins to read for lookups, and that are evicted for that: a millisecond of it."""

TOLD_AT_ONCE: Final = 8
"""Parts of a lookup of which sessions that follow it are told as soon as they are ready."""


class Lookups:
    """All lookups of all sessions.

    Threads: one owner, tiering.
    """

    def __init__(
        self,
        host: HostTier,
        outbox: Outbox,
        hit_stats: HitStats,
        limits: Limits,
        source_below: Callable[[Entry], int | None],
    ) -> None:
        """Start empty.

        Args:
            limits: What all lookups together, and one lookup, may hold.
            source_below: The secondary tier that a chunk would be read from.
        """
        self._limits = limits
        self._lookups: dict[int, Lookup] = {}
        self._dirty: dict[int, None] = {}  # what has changed since it was last told
        self._progress: dict[int, None] = {}  # the same where nothing but more chunks are ready, of more to come
        self._host = host
        self._source_below = source_below
        self._counters = outbox.counters
        self._hit_stats = hit_stats
        self._last_id = 0
        self._ends: list[LeaseEnd | LoadDamaged] = []
        self.line = LeaseQueue(host, lambda: int(host.slots.limit_bytes * limits.leased_share))

    def __len__(self) -> int:
        return len(self._lookups)

    def __iter__(self) -> Iterator[Lookup]:
        return iter(self._lookups.values())

    def get(self, lookup_id: int) -> Lookup | None:
        return self._lookups.get(lookup_id)

    def take_updates(self, *, with_progress: bool = True) -> list[LookupUpdate | LeaseEnd | LoadDamaged]:
        """One message per lookup that changed since the last call; suspended sessions are told nothing.

        Without progress those are left for a later call that have but a few more chunks ready, and wait for others.
        """
        if with_progress:
            self._dirty.update(self._progress)
            self._progress.clear()
        for lookup_id in self._dirty if self._progress else ():
            self._progress.pop(lookup_id, None)
        changed = [self._lookups[i] for i in self._dirty if i in self._lookups]
        self._dirty.clear()
        told = [one for one in changed if not (one.session.is_suspended or one.is_ending)]
        for lookup in changed:
            if not lookup.queued and lookup.search is None and lookup.begun == len(lookup.entries):
                lookup.keys = lookup.digests = ()
            lookup.told = lookup.ready
        ends, self._ends = self._ends, []
        return [*map(self._describe, told), *ends]

    def follow(self, lookup: Lookup) -> None:
        """Its session is told with the next updates, also if nothing is new, and from now on of parts."""
        lookup.is_followed = True
        self._dirty[lookup.id] = None

    @property
    def has_progress(self) -> bool:
        """Whether progress was left for a later call."""
        return bool(self._progress)

    # -- life of a lookup --------------------------------------------------------------------------------------

    def open(self, session: Session, held: list[Entry], wish: LookupRequest) -> Lookup:
        """Look up a prefix: lease the chunks of it that are held, as far as the limits allow."""
        self._last_id += 1
        lookup = Lookup(self._last_id, session, wish.start, 0, [], length=len(wish.keys), turn=wish.turn)
        lookup.keys, lookup.digests, lookup.state_parts = wish.keys, wish.digests, wish.state_parts
        lookup.owner, lookup.leases, lookup.counted = wish.owner, wish.leases, wish.counted
        lookup.load, lookup.is_followed = wish.load, wish.is_followed
        lookup.is_cut = not wish.leases
        if wish.is_claimed:
            lookup.is_claimed = True
            self.line.claimed(lookup)
        self._lookups[lookup.id] = lookup
        session.lookups.add(lookup.id)
        self.extend(lookup, held)
        return lookup

    def extend(self, lookup: Lookup, found: list[Entry]) -> None:
        """More of the prefix is held: lease it, too, as far as the limits allow."""
        wanted = found[max(0, lookup.start - lookup.held) :]
        lookup.held += len(found)
        self._dirty[lookup.id] = None
        if not lookup.leases:
            lookup.runs += [Arrival(tier, sum(1 for _ in run)) for tier, run in groupby(map(self._source, wanted))]
        elif lookup.queued:
            self._queue(lookup)
        elif self.line.is_making_room(lookup.session.id) and not lookup.is_claimed:
            # What is leased already would cost no room, but then its leases would never end: those told to end are
            # asked anew one after the other, each before the last one of its prefix has let go.
            self._queue(lookup)
        elif not lookup.is_cut:
            # Where others wait, so does this one: room goes by turns.
            room_bytes = self._limit_bytes - self._host.leased_bytes if self.line.is_empty else 0
            if not self._lease(lookup, wanted, room_bytes):
                self._counters["lease_cap_reached"] += 1
                self._queue(lookup)

    def _source(self, entry: Entry) -> int:
        """Where a chunk that is held would come from."""
        if entry.host is HostState.ABSENT:
            return self._source_below(entry) or HOST
        return entry.source  # HOST, but of one that is on its way up

    def offer_tails(self, lookup: Lookup, tails: list[Entry]) -> None:
        """Lease tails behind all that a new lookup found, as far as there is room, unless it waits for chunks of it.

        Where it wants nothing of what is held it is told of them, too: its client may be about to store what continues
        them. But then nothing is read for it; else one at most is that is not in host memory.
        """
        if lookup.is_cut or lookup.queued or lookup.start + len(lookup.entries) < lookup.held:
            return
        session, may_read = lookup.session, bool(lookup.entries)
        for entry in tails:
            room_bytes = self._limit_bytes - self._host.leased_bytes if self.line.is_empty else 0
            is_here = entry.host is HostState.READY
            if not (is_here or may_read):
                lookup.named_tails.append(entry.record)
                continue
            if not self._host.lease([entry], session.slot_bytes, session.id, room_bytes):
                break
            may_read &= is_here
            lookup.tails.append(entry)
            if not lookup.entries and len(lookup.tails) == 1 and not lookup.is_claimed:
                self.line.holds(lookup)

    def give_up_tail(self, lookup: Lookup, entry: Entry) -> None:
        """A tail that the lookup leased will not be read into a slot for it."""
        lookup.tails.remove(entry)
        _wait_no_more(entry, lookup)
        self._dirty[lookup.id] = None
        self._host.end_leases([entry], lookup.session.slot_bytes, lookup.session.id)

    def prefix_found(self, lookup: Lookup, held: int) -> None:
        """So much of the prefix is held for which a lookup seeks a state."""
        lookup.prefix_held = held
        self._dirty[lookup.id] = None

    def state_found(self, lookup: Lookup, boundary: int, path: list[Entry]) -> None:
        """Lease the prefix up to a boundary and the state there, as far as the limits allow; ``path`` is held."""
        lookup.boundary = boundary
        lookup.keys = [entry.record.key for entry in path]
        lookup.digests = [entry.record.prefix_sha256 for entry in path]
        self.extend(lookup, path)

    def most_chunks(self, lookup: Lookup) -> int:
        """Chunks of its prefix up to which a lookup may lease all that a state needs."""
        return lookup.start + self._longest(lookup) - lookup.state_parts

    def go_on(self, lookup: Lookup, held: list[Entry]) -> None:
        """There is room for the first in line: lease more of what it wants, of which ``held`` is there now."""
        first = lookup.start + len(lookup.entries)
        if held[lookup.start : first] != lookup.entries:
            lookup.is_cut = True  # what is before them is lost: more behind them is of no use
        else:
            self._now_held(lookup, min(lookup.held, len(held)))
            self._lease(lookup, held[first : lookup.held], self.line.free_bytes(lookup.session.id))
        self._queue(lookup)

    def lost(self, lookup: Lookup, held: int) -> None:
        """No more than so many chunks are held, after room was made for its first."""
        self._now_held(lookup, held)
        self._queue(lookup)

    @staticmethod
    def _now_held(lookup: Lookup, held: int) -> None:
        if held < lookup.held:
            lookup.search = None  # whatever it finds lies behind what is lost
        lookup.held = held
        if held < lookup.boundary:
            lookup.prefix_held = min(lookup.prefix_held, held)

    def _lease(self, lookup: Lookup, wanted: list[Entry], room_bytes: int) -> bool:
        """Lease chunks as far as there is room for new ones; says whether the room was enough."""
        session, was_empty = lookup.session, not lookup.entries
        wanted = wanted[: max(0, self._longest(lookup) - len(lookup.entries))]
        count = self._host.lease(wanted, session.slot_bytes, session.id, room_bytes)
        lookup.entries += wanted[:count]
        if was_empty and count and not lookup.is_claimed:
            self.line.holds(lookup)
        return count == len(wanted)

    def _queue(self, lookup: Lookup) -> None:
        """Note what the lookup still waits for in line, if it does."""
        wanted = min(lookup.held - lookup.start, self._longest(lookup)) - len(lookup.entries)
        before = lookup.queued
        lookup.is_cut |= lookup.is_claimed  # it must not wait for others while they wait for it
        lookup.queued = 0 if lookup.is_cut else max(0, wanted)
        if lookup.queued and not self.line.join(lookup):
            self._counters["line_full"] += 1
            lookup.queued, lookup.is_cut = 0, True
        if not lookup.queued:
            self.line.leave(lookup)
        if lookup.queued != before:
            self._dirty[lookup.id] = None

    def _longest(self, lookup: Lookup) -> int:
        """The most chunks it may lease."""
        own_bytes = self._host.usage.most_bytes(lookup.session.namespace)
        return int(own_bytes * self._limits.request_share) // lookup.session.slot_bytes

    @property
    def _limit_bytes(self) -> int:
        return int(self._host.slots.limit_bytes * self._limits.leased_share)

    def search_ended(self, lookup: Lookup) -> None:
        """No more of the prefix will be found."""
        lookup.search = None
        self._dirty[lookup.id] = None

    def wait(self, lookup: Lookup) -> None:
        """More leased chunks are in slots or on their way: count what is ready, wait for the rest.

        Where these are a part of what was leased, the session is told of the first part, and of the last one if it
        follows the lookup, or if nothing of it has to be waited for.
        """
        first = len(lookup.sources)
        lookup.sources.extend(entry.source for entry in lookup.entries[first : lookup.begun])
        self._advance(lookup)
        for entry in (*lookup.entries[max(first, lookup.ready) : lookup.begun], *lookup.coming_tails):
            if entry.lookups is None:
                entry.lookups = set()
            entry.lookups.add(lookup.id)
        is_first = not first and lookup.begun > 0
        is_last = lookup.begun == len(lookup.entries) and (lookup.is_followed or _is_done(lookup))
        if is_first or is_last:
            self._dirty[lookup.id] = None

    def truncate(self, lookup: Lookup, length: int) -> None:
        """Give up all but the first ``length`` chunks; promotions of the others go on for the next request."""
        lookup.is_cut = True
        self._queue(lookup)
        dropped = lookup.entries[length:]
        del lookup.entries[length:], lookup.sources[length:]
        lookup.begun, lookup.ready = min(lookup.begun, length), min(lookup.ready, length)
        for entry in dropped:
            if entry.lookups is not None:
                _wait_no_more(entry, lookup)
        self._host.end_leases(dropped, lookup.session.slot_bytes, lookup.session.id)
        for tail in lookup.coming_tails if dropped else ():
            self.give_up_tail(lookup, tail)

    def claim(self, lookup: Lookup) -> None:
        """A load of what is ready begins: the leases stay until the lookup is closed. Not if their end was told."""
        if not (lookup.is_ending or lookup.is_claimed):
            lookup.is_claimed = lookup.is_cut = True
            self._queue(lookup)
            self.line.claimed(lookup)

    def make_room(self) -> None:
        """For those in line: have leases of others end, or have them wait no longer where that is of no use."""
        if self.line.is_empty:
            return
        self.end_leases(self.line.giving_way(), "lease_gave_way")
        for lookup in self.line.in_vain():
            lookup.is_cut = True
            self._queue(lookup)

    def end_leases(self, lookups: list[Lookup], why: str) -> None:
        """Have sessions told that these leases end; they do when the lookup is closed."""
        for lookup in lookups:
            self._counters[why] += 1
            lookup.is_ending = lookup.is_cut = True
            self._queue(lookup)
            self.line.ends(lookup)
            self._ends.append(LeaseEnd(lookup.session.id, lookup.id))

    def damaged(self, entry: Entry) -> None:
        """The bytes in a chunk's slot are not what was sealed: whoever was promised them hears that they do not count.

        The leases end, but for those of running loads: whoever claimed them may read for long, and must find the slots
        as they were.
        """
        if not entry.leases:
            return
        relying = [
            one
            for one in self._lookups.values()
            if not (one.is_ending or one.session.is_suspended) and (entry in one.entries or entry in one.tails)
        ]
        claimed = [one for one in relying if one.is_claimed]
        self._counters["lease_damaged"] += len(claimed)
        self._ends += [LoadDamaged(one.session.id, one.id) for one in claimed]
        self.end_leases([one for one in relying if not one.is_claimed], "lease_damaged")

    def close(self, lookup: Lookup, *, is_asked_anew: bool = False) -> None:
        """End the lookup and its leases; only now is it known what it got.

        Not if it is asked anew: then it is not counted.
        """
        ready = lookup.ready
        if lookup.state_parts:  # chunks count; the state is what they are of no use without
            ready = lookup.boundary - lookup.start if ready and ready == len(lookup.entries) and lookup.has_state else 0
        sources = lookup.sources[:ready]
        has_more = not _is_done(lookup)
        if not is_asked_anew:
            start = lookup.start if lookup.leases else lookup.length  # a question asks for no chunk
            part_of = (lookup.session.id, lookup.load) if lookup.load else None
            self._hit_stats.ended(
                lookup.session.namespace, lookup.length, start, sources, has_more=has_more, part_of=part_of
            )
        self.truncate(lookup, 0)
        for entry in lookup.tails:
            _wait_no_more(entry, lookup)
        self._host.end_leases(lookup.tails, lookup.session.slot_bytes, lookup.session.id)
        self.line.released(lookup)
        del self._lookups[lookup.id]
        lookup.session.lookups.discard(lookup.id)

    # -- what happens to a chunk -------------------------------------------------------------------------------

    def chunk_ready(self, entry: Entry) -> None:
        """The chunk's bytes are verified.

        A session is told at once of the end of a lookup. If it follows it, also of every eighth, and of what is between
        them when progress is taken: an update describes all chunks, and one for each would take time that grows with
        their square.
        """
        for lookup_id in list(entry.lookups or ()):
            lookup = self._lookups[lookup_id]
            if entry in lookup.tails:
                _wait_no_more(entry, lookup)
                self._dirty[lookup_id] = None
                continue
            before = lookup.ready
            self._advance(lookup)
            if lookup.ready != before:
                is_much = TOLD_AT_ONCE * (lookup.ready - lookup.told) >= len(lookup.entries)
                if _is_done(lookup) or (is_much and lookup.is_followed):
                    self._dirty[lookup_id] = None
                elif lookup.is_followed:
                    self._progress[lookup_id] = None

    def chunk_failed(self, entry: Entry) -> None:
        """The chunk's bytes will not come: shorten every lookup that waits for them."""
        for lookup_id in list(entry.lookups or ()):
            lookup = self._lookups[lookup_id]
            if entry in lookup.tails:
                self.give_up_tail(lookup, entry)
                continue
            position = lookup.entries.index(entry)
            lookup.held = min(lookup.held, lookup.start + position)  # what failed must be stored again
            if lookup.start + position < lookup.boundary:
                lookup.prefix_held = min(lookup.prefix_held, lookup.held)
            lookup.search = None  # whatever it finds lies behind the gap
            self.truncate(lookup, position)
            self._dirty[lookup_id] = None

    def _advance(self, lookup: Lookup) -> None:
        entries = lookup.entries
        while lookup.ready < lookup.begun and (entry := entries[lookup.ready]).host is HostState.READY:
            if entry.lookups is not None:
                _wait_no_more(entry, lookup)
            lookup.ready += 1

    def _describe(self, lookup: Lookup) -> LookupUpdate:
        """The answer now. What is leased and not begun with has no slot yet: the session waits for it as in line."""
        begun = lookup.begun
        slots = tuple(entry.slot for entry in lookup.entries[:begun] if entry.slot is not None)
        assert len(slots) == begun, "a lookup wants a chunk that has no slot"
        is_done = _is_done(lookup)
        sources = chain(
            (entry.source for entry in lookup.entries[lookup.ready : begun]), map(self._source, lookup.entries[begun:])
        )
        runs = [] if is_done else [Arrival(tier, sum(1 for _ in run)) for tier, run in groupby(sources)]
        if begun == len(lookup.entries):
            runs += [Arrival(tail.source, 1) for tail in lookup.coming_tails]
        answer = LookupAnswer(
            held=lookup.prefix_held if lookup.state_parts else lookup.held,
            slots=slots,
            ready=lookup.ready,
            is_done=is_done,
            arriving=tuple(runs if lookup.leases else lookup.runs),
            unknown=_unknown(lookup),
            sources=bytes(lookup.sources),
            queued=lookup.queued + len(lookup.entries) - begun,
            is_answered=True,
            boundary=lookup.boundary if lookup.has_state else 0,
            tails=(
                *(_tail(one.record, one.slot if one.host is HostState.READY else None) for one in lookup.tails),
                *(_tail(record, None) for record in lookup.named_tails),
            ),
            unbegun=len(lookup.entries) - begun,
        )
        return LookupUpdate(lookup.session.id, lookup.id, answer)

    # -- tests -------------------------------------------------------------------------------------------------

    def check_integrity(self, entries: list[Entry]) -> None:
        """Assert that leases and waits match the index's entries."""
        lookups = self._lookups.values()
        leases: Counter[bytes] = Counter(entry.record.key for one in lookups for entry in one.entries)
        leases.update(entry.record.key for one in lookups for entry in one.tails)
        sizes = {entry: one.session.slot_bytes for one in lookups for entry in (*one.entries, *one.tails)}
        assert self._host.leased_bytes == sum(sizes.values()), "leased bytes drifted"
        for entry in entries:
            assert entry.leases == leases[entry.record.key], "leases do not match lookups"
            for lookup_id in entry.lookups or ():
                one = self._lookups[lookup_id]
                assert entry in (*one.entries, *one.tails), "a lookup waits for a chunk it gave up"
        self.line.check_integrity(self._lookups)
        for lookup in self._lookups.values():
            assert all(lookup.id in (tail.lookups or ()) for tail in lookup.coming_tails), "a tail comes unnoticed"
            states = [entry.host for entry in lookup.entries]
            assert len(lookup.sources) == lookup.begun, "where a chunk came from was not noted"
            assert HostState.ABSENT not in states[: lookup.begun], "a lookup wants a chunk that has no slot"
            assert lookup.begun <= len(states), "a lookup waits for chunks that it gave up"
            assert all(state is HostState.READY for state in states[: lookup.ready]), "an unverified chunk was promised"
            assert lookup.search is None or not lookup.search.is_over, "a lookup waits for a search that is over"
            assert not (lookup.is_cut and lookup.queued), "a lookup that gets no more stands in line"
            if lookup.ready < lookup.begun:
                waiting = lookup.entries[lookup.ready]
                assert waiting.host is not HostState.READY and lookup.id in (waiting.lookups or ()), "waits for nothing"


def _wait_no_more(entry: Entry, lookup: Lookup) -> None:
    if entry.lookups is not None:
        entry.lookups.discard(lookup.id)
        if not entry.lookups:
            entry.lookups = None


def _tail(record: ChunkRecord, slot: SlotId | None) -> Tail:
    return Tail(tail_tokens(record.key), record.prefix_sha256, slot)


def _unknown(lookup: Lookup) -> int:
    if lookup.search is None:
        return 0
    if lookup.state_parts:  # its state may be anywhere, also while the length of the prefix is known
        return max(1, lookup.length - lookup.prefix_held)
    return max(0, lookup.search.high - lookup.held)


def _is_done(lookup: Lookup) -> bool:
    is_here = lookup.ready == len(lookup.entries) and not lookup.coming_tails
    return is_here and not _unknown(lookup) and not lookup.queued


def _is_behind(_: Entry) -> bool:
    """What an erasure meant of that which lies behind a chunk that was erased: all of it."""
    return True


class Promotions:
    """All promotions.

    Threads: one owner, tiering.
    """

    def __init__(
        self,
        index: Index,
        host: HostTier,
        tiers: SecondaryTiers,
        lookups: Lookups,
        outbox: Outbox,
    ) -> None:
        self._index = index
        self._host = host
        self._tiers = tiers
        self._lookups = lookups
        self._jobs = outbox.jobs
        self._counters = outbox.counters
        self._stats = outbox.stats
        self._early: dict[int, list[Read]] = {}  # by the slab whose memory they wait for
        self._unfinished: dict[int, dict[int, Lookup]] = {}  # by session: with chunks that a next step begins with
        self._judged: dict[Entry, list[IsMeant]] = {}  # what erasures meant that met the chunk while it was being read
        self._reads_left = READ_AT_ONCE
        self._most_evicted = EVICTED_AT_ONCE

    def begin_step(self) -> Iterator[Lookup]:
        """A step begins, which may read and evict so much; gives lookups of which some is left until that is used up.

        Of a session the one that began first; the sessions take turns, or one long lookup would hold up all engines.
        Those that end, or whose client is gone, are left as they are.
        """
        self._reads_left, self._most_evicted = READ_AT_ONCE, self._host.evicted_count + EVICTED_AT_ONCE
        sessions = list(self._unfinished)
        if sessions:
            self._unfinished[sessions[0]] = self._unfinished.pop(sessions[0])
        for session in list(self._unfinished):
            unfinished = self._unfinished[session]
            for lookup in list(unfinished.values()):
                if self._is_used_up:
                    return
                if lookup.session.is_suspended or lookup.is_ending:
                    self._lookups.truncate(lookup, lookup.begun)
                if lookup.begun < len(lookup.entries):
                    yield lookup
                if lookup.begun == len(lookup.entries):
                    del unfinished[lookup.id]
            if not unfinished:
                del self._unfinished[session]

    @property
    def _is_used_up(self) -> bool:
        return not self._reads_left or self._host.evicted_count >= self._most_evicted

    @property
    def wants_turn(self) -> bool:
        """Whether a next step has more to begin with."""
        return bool(self._unfinished)

    def start(self, lookup: Lookup) -> None:
        """Start reading what is not in host memory; takes slots that can be had now and never waits for more.

        In parts, over several steps, where that is much: thousands of chunks, for each of which another one goes.
        """
        slot_bytes, namespace = lookup.session.slot_bytes, lookup.session.namespace
        for entry in islice(lookup.entries, lookup.begun, None):
            if entry.host is HostState.ABSENT:
                if self._is_used_up:
                    self._goes_on(lookup)
                    return
                is_held = self._index.source(entry) is not None  # else it was lost since the part before
                slot = self._take_slot(slot_bytes, namespace) if is_held else NoSlot.NONE
                if slot is NoSlot.LOOKING:
                    self._reads_left = 0
                    self._goes_on(lookup)
                    return
                if isinstance(slot, NoSlot):
                    self._counters["promotion_without_slot"] += is_held
                    self._lookups.truncate(lookup, lookup.begun)
                    return
                self._reads_left -= 1
                self._read(entry, slot, slot_bytes)
            lookup.begun += 1
        for tail in [one for one in lookup.tails if one.host is HostState.ABSENT]:
            is_held = self._index.source(tail) is not None
            slot = self._host.take_for_load(slot_bytes, namespace) if is_held else NoSlot.NONE
            if isinstance(slot, NoSlot):
                self._lookups.give_up_tail(lookup, tail)
            else:
                self._read(tail, slot, slot_bytes)

    def _goes_on(self, lookup: Lookup) -> None:
        """The next step begins with more of it."""
        self._unfinished.setdefault(lookup.session.id, {})[lookup.id] = lookup

    def _take_slot(self, slot_bytes: int, namespace: bytes) -> SlotId | NoSlot:
        slot = self._host.take_for_load(slot_bytes, namespace)
        return self._take_from_stores(slot_bytes, namespace) if slot is NoSlot.NONE else slot

    def _read(self, entry: Entry, slot: SlotId, slot_bytes: int) -> None:
        tier = self._index.source(entry)
        assert tier is not None, "a chunk is called held that nobody can give"
        self._host.place(entry, slot, slot_bytes, HostState.PROMOTING)
        entry.source = tier
        job = Read(tier, entry.record, slot)
        if self._host.slots.has_memory(slot):
            self._jobs.append(job)
        else:
            self._early.setdefault(slab_of(slot), []).append(job)

    def _take_from_stores(self, slot_bytes: int, namespace: bytes) -> SlotId | NoSlot:
        """The slot of a chunk that waits for its write: under pressure stores are dropped first, loads never.

        What others keep stays, and who is at its maximum gives its own.
        """

        def may_go(entry: Entry) -> bool:
            owner, usage = entry.record.namespace, self._host.usage
            return owner == namespace or not (
                usage.excess_bytes(namespace, slot_bytes) > 0 or usage.keeps(owner, slot_bytes)
            )

        source = self._tiers.write_through
        while source is not None and (entry := source.give_up_store(slot_bytes, may_go)) is not None:
            if entry.slot is None:
                if (free := self._host.slots.take(slot_bytes)) is not None:
                    return free
                continue
            slot = self._host.evict(entry)
            if not self._host.slots.is_draining(slot):
                return slot
            self._host.give(slot)
        return NoSlot.NONE

    def memory_came(self, slab: int, succeeded: bool) -> None:
        """A slab has its memory, or the machine refused it: go on with the reads that wait for it, or give them up."""
        early = self._early.pop(slab, [])
        if succeeded:
            self._jobs.extend(early)
        else:
            for read in early:
                entry = self._index.get(read.record.key)
                assert entry is not None, "a read outlived its entry"
                self.lost(entry)

    def judge_on_arrival(self, entry: Entry, is_meant: IsMeant) -> None:
        """Something is erased while a chunk is being read: if it is of that, as its header will say, it is dropped,
        and all behind it with it.

        Only from a shared tier: whose the chunks of this machine's tiers are is known, and what is in use there stays.
        """
        if self._tiers[entry.source].is_shared:
            meant = self._judged.setdefault(entry, [])
            if is_meant not in meant:
                meant.append(is_meant)

    def ended(self, job: Read, entry: Entry, outcome: Outcome) -> None:
        """A read ended, and the entry says whose it is. Failures shorten the lookups that waited (rule 4).

        What was erased while it was read counts as missing: in the shared tier that it came from others erase it.
        """
        is_erased = outcome is Outcome.OK and any(is_meant(entry) for is_meant in self._judged.get(entry, ()))
        if is_erased:
            outcome = Outcome.MISSING
        if outcome is Outcome.OK:
            self.filled(entry)
            if job.tier > HOST + 1 and self._tiers.write_through is not None:
                self._tiers.write_through.keep_promoted(entry)
        else:
            # Who waited hears that it must be stored again. Who does not wait any more has computed it, and took it for
            # held: so it counts as absent, and the next one stores it, or a slow bucket that fails has each compute it.
            tier = self._tiers[job.tier]
            is_forgotten = outcome is Outcome.UNAVAILABLE and tier.is_shared and entry.lookups is None
            if is_forgotten and self._tiers.searches is not None:
                self._tiers.searches.count_as_absent(entry.record.key)
            if tier.is_shared or not is_erased:
                tier.read_failed(entry, outcome, is_forgotten=is_forgotten)
            self.lost(entry)

    def filled(self, entry: Entry) -> None:
        """The slot holds the chunk's verified bytes."""
        self._judged.pop(entry, None)
        self._host.now_ready(entry)
        self._stats.republish(entry, self._index.tiers_with(entry)[1:])
        self._lookups.chunk_ready(entry)

    def lost(self, entry: Entry) -> None:
        """The slot will not hold the chunk's bytes: free it.

        If something was erased while it was being read, it was of that, or nobody can tell: all behind it goes, too.
        """
        erased = [entry, *self._behind(entry)] if self._judged.pop(entry, None) else []
        self._lookups.chunk_failed(entry)
        self._host.give(self._host.vacate(entry))
        self._index.remove_if_gone(entry)
        for one in reversed(erased):  # the deepest first
            if self._index.get(one.record.key) is one:
                self._erase(one)

    def _behind(self, entry: Entry) -> list[Entry]:
        """What lies behind a chunk, each after those before it, but for what was seen to before."""
        found, pending = [], list(entry.children)
        while pending:
            one = pending.pop()
            if self._index.damaged.get(one) != "removed" and _is_behind not in self._judged.get(one, ()):
                found.append(one)
                pending.extend(one.children)
        return found

    def _erase(self, entry: Entry) -> None:
        """Remove a chunk from all tiers, as :func:`removal.erasing` does: now, when it comes, or when it is idle."""
        self._tiers.cancel_writes(entry)
        if entry.host is HostState.PROMOTING:
            self._judged.setdefault(entry, []).append(_is_behind)
            return
        if entry.host is not HostState.ABSENT:
            self._index.damaged[entry] = "removed"
        self._tiers.erase(entry)

    def check_integrity(self) -> None:
        """Assert that nothing which is leased is forgotten, and that no session waits without a lookup."""
        for lookup in self._lookups:
            is_begun = lookup.begun == len(lookup.entries)
            assert is_begun or lookup.id in self._unfinished.get(lookup.session.id, ()), "a lookup was not begun whole"
        assert all(self._unfinished.values()), "a session without lookups goes on"
        assert all(entry.host is HostState.PROMOTING for entry in self._judged), "a read that is over is judged"
