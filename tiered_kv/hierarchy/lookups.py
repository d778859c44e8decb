"""Lookups: which chunks each one leases, how much of it is ready, and what its session must be told.

Owns leases on behalf of lookups. Must not decide what is promoted or from where: the hierarchy does that between
:meth:`Lookups.open` and :meth:`Lookups.wait`. Called by the hierarchy only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from tiered_kv.hierarchy.credits import Session
from tiered_kv.hierarchy.host import HostMemory
from tiered_kv.hierarchy.index import Entry, HostState
from tiered_kv.hierarchy.line import Line
from tiered_kv.hierarchy.plan import LeaseEnd, LookupUpdate, Turn
from tiered_kv.hierarchy.searches import Search
from tiered_kv.hierarchy.served import Served


@dataclass(slots=True)
class Lookup:
    """One lookup; see :class:`~tiered_kv.hierarchy.plan.LookupUpdate`.

    Attributes:
        entries: Leased chunks, from ``start`` on; only the first ``ready`` may be read.
        is_cut: No more chunks are leased: one of them did not come, or the lookup ends.
        search: What looks for more of its prefix, until that is done or of no use.
        length: Chunks of its prefix, also those before ``start``.
        sources: Per entry, the lower tier it was read from; None: it needed not be read.
        turn: When its request is admitted.
        keys, digests: Of its prefix, while it stands in line.
        queued: Chunks for which it stands in line.
        is_claimed: A load may be running: its leases end when it is released and not before.
        is_ending: Its session is told that its leases end.
    """

    id: int
    session: Session
    start: int
    held: int
    entries: list[Entry]
    ready: int = 0
    is_cut: bool = False
    search: Search | None = None
    length: int = 0
    sources: list[int | None] = field(default_factory=list)
    turn: Turn = (0, 0)
    keys: Sequence[bytes] = ()
    digests: Sequence[bytes] = ()
    queued: int = 0
    is_claimed: bool = False
    is_ending: bool = False


@dataclass(frozen=True, slots=True)
class Wish:
    """What a lookup asks for.

    Attributes:
        keys, digests: Of its prefix.
        start: Chunks before it are not wanted.
        turn: When its request is admitted.
        is_claimed: Its leases end when it is released and not before.
    """

    keys: Sequence[bytes]
    digests: Sequence[bytes]
    start: int = 0
    turn: Turn = (0, 0)
    is_claimed: bool = False


class Lookups:
    """All lookups of all sessions.

    Threads: one owner, the hierarchy.
    """

    def __init__(self, host: HostMemory, counters: Counter[str], served: Served, shares: tuple[float, float]) -> None:
        """Start empty; ``shares`` of host memory are what all lookups together, and one lookup, may hold."""
        self._shares = shares
        self._lookups: dict[int, Lookup] = {}
        self._dirty: dict[int, None] = {}  # what has changed since it was last told
        self._host = host
        self._counters = counters
        self._served = served
        self._last_id = 0
        self._ends: list[LeaseEnd] = []
        self.line = Line(host, lambda: int(host.slots.limit_bytes * shares[0]))

    def __len__(self) -> int:
        return len(self._lookups)

    def get(self, lookup_id: int) -> Lookup | None:
        return self._lookups.get(lookup_id)

    def take_updates(self) -> list[LookupUpdate | LeaseEnd]:
        """One message per lookup that changed since the last call; suspended sessions are told nothing."""
        changed = [self._lookups[i] for i in self._dirty if i in self._lookups]
        self._dirty.clear()
        told = [one for one in changed if not (one.session.is_suspended or one.is_ending)]
        for lookup in changed:
            if not lookup.queued and lookup.search is None:
                lookup.keys = lookup.digests = ()
        ends, self._ends = self._ends, []
        return [*map(_describe, told), *ends]

    # -- life of a lookup --------------------------------------------------------------------------------------

    def open(self, session: Session, held: list[Entry], wish: Wish) -> Lookup:
        """Look up a prefix: lease the chunks of it that are held, as far as the limits allow."""
        self._last_id += 1
        lookup = Lookup(self._last_id, session, wish.start, 0, [], length=len(wish.keys), turn=wish.turn)
        lookup.keys, lookup.digests = wish.keys, wish.digests
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
        if lookup.queued:
            self._queue(lookup)
        elif not lookup.is_cut:
            # Where others wait, so does this one: room goes by turns.
            room_bytes = self._limit_bytes - self._host.leased_bytes if self.line.is_empty else 0
            if not self._lease(lookup, wanted, room_bytes):
                self._counters["lease_cap_reached"] += 1
                self._queue(lookup)

    def go_on(self, lookup: Lookup, held: list[Entry]) -> None:
        """There is room for the first in line: lease more of what it wants, of which ``held`` is there now."""
        first = lookup.start + len(lookup.entries)
        if held[lookup.start : first] != lookup.entries:
            lookup.is_cut = True  # what is before them is lost: more behind them is of no use
        else:
            lookup.held = min(lookup.held, len(held))
            self._lease(lookup, held[first : lookup.held], self.line.free_bytes(lookup.session.id))
        self._queue(lookup)

    def lost(self, lookup: Lookup, held: int) -> None:
        """No more than so many chunks are held, after room was made for its first."""
        lookup.held = held
        self._queue(lookup)

    def _lease(self, lookup: Lookup, wanted: list[Entry], room_bytes: int) -> bool:
        """Lease chunks as far as there is room for new ones; says whether the room was enough."""
        session = lookup.session
        length = self._longest(lookup)
        for entry in wanted:
            if len(lookup.entries) >= length:
                return True
            before = self._host.leased_bytes
            if not self._host.lease(entry, session.slot_bytes, session.id, room_bytes):
                return False
            room_bytes -= self._host.leased_bytes - before
            lookup.entries.append(entry)
            if len(lookup.entries) == 1 and not lookup.is_claimed:
                self.line.holds(lookup)
        return True

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
        own_bytes = self._host.taken.most_bytes(lookup.session.namespace)
        return int(own_bytes * self._shares[1]) // lookup.session.slot_bytes

    @property
    def _limit_bytes(self) -> int:
        return int(self._host.slots.limit_bytes * self._shares[0])

    def search_ended(self, lookup: Lookup) -> None:
        """No more of the prefix will be found."""
        lookup.search = None
        self._dirty[lookup.id] = None

    def wait(self, lookup: Lookup) -> None:
        """All leased chunks are in slots or on their way: count what is ready, wait for the rest."""
        lookup.sources.extend(entry.source for entry in lookup.entries[len(lookup.sources) :])
        self._advance(lookup)
        for entry in lookup.entries[lookup.ready :]:
            if entry.lookups is None:
                entry.lookups = set()
            entry.lookups.add(lookup.id)
        self._dirty[lookup.id] = None

    def truncate(self, lookup: Lookup, length: int) -> None:
        """Give up all but the first ``length`` chunks; promotions of the others go on for the next request."""
        lookup.is_cut = True
        self._queue(lookup)
        dropped = lookup.entries[length:]
        del lookup.entries[length:], lookup.sources[length:]
        lookup.ready = min(lookup.ready, length)
        for entry in dropped:
            _wait_no_more(entry, lookup)
            self._host.end_lease(entry, lookup.session.slot_bytes, lookup.session.id)

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

    def close(self, lookup: Lookup, *, is_asked_anew: bool = False) -> None:
        """End the lookup and its leases; only now is it known what it got.

        Not if it is asked anew: then it is not counted.
        """
        sources = lookup.sources[: lookup.ready]
        has_more = not _is_done(lookup)
        if not is_asked_anew:
            self._served.ended(lookup.session.namespace, lookup.length, lookup.start, sources, has_more=has_more)
        self.truncate(lookup, 0)
        self.line.released(lookup)
        del self._lookups[lookup.id]
        lookup.session.lookups.discard(lookup.id)

    # -- what happens to a chunk -------------------------------------------------------------------------------

    def chunk_ready(self, entry: Entry) -> None:
        """The chunk's bytes are verified."""
        for lookup_id in list(entry.lookups or ()):
            lookup = self._lookups[lookup_id]
            before = lookup.ready
            self._advance(lookup)
            if lookup.ready != before:
                self._dirty[lookup_id] = None

    def chunk_failed(self, entry: Entry) -> None:
        """The chunk's bytes will not come: shorten every lookup that waits for them."""
        for lookup_id in list(entry.lookups or ()):
            lookup = self._lookups[lookup_id]
            position = lookup.entries.index(entry)
            lookup.held = min(lookup.held, lookup.start + position)  # what failed must be stored again
            lookup.search = None  # whatever it finds lies behind the gap
            self.truncate(lookup, position)
            self._dirty[lookup_id] = None

    def _advance(self, lookup: Lookup) -> None:
        entries = lookup.entries
        while lookup.ready < len(entries) and entries[lookup.ready].host is HostState.READY:
            _wait_no_more(entries[lookup.ready], lookup)
            lookup.ready += 1

    # -- tests -------------------------------------------------------------------------------------------------

    def check_integrity(self, entries: list[Entry]) -> None:
        """Assert that leases and waits match the index's entries."""
        leases: Counter[bytes] = Counter(e.record.key for lookup in self._lookups.values() for e in lookup.entries)
        for entry in entries:
            assert entry.leases == leases[entry.record.key], "leases do not match lookups"
            for lookup_id in entry.lookups or ():
                assert entry in self._lookups[lookup_id].entries, "a lookup waits for a chunk it gave up"
        self.line.check_integrity(self._lookups)
        for lookup in self._lookups.values():
            states = [entry.host for entry in lookup.entries]
            assert len(lookup.sources) == len(states), "where a chunk came from was not noted"
            assert HostState.ABSENT not in states, "a lookup wants a chunk that has no slot"
            assert all(state is HostState.READY for state in states[: lookup.ready]), "an unverified chunk was promised"
            assert lookup.search is None or not lookup.search.is_over, "a lookup waits for a search that is over"
            assert not (lookup.is_cut and lookup.queued), "a lookup that gets no more stands in line"
            if lookup.ready < len(states):
                waiting = lookup.entries[lookup.ready]
                assert waiting.host is not HostState.READY and lookup.id in (waiting.lookups or ()), "waits for nothing"


def _wait_no_more(entry: Entry, lookup: Lookup) -> None:
    if entry.lookups is not None:
        entry.lookups.discard(lookup.id)
        if not entry.lookups:
            entry.lookups = None


def _describe(lookup: Lookup) -> LookupUpdate:
    slots = tuple(entry.slot for entry in lookup.entries if entry.slot is not None)
    assert len(slots) == len(lookup.entries), "a lookup wants a chunk that has no slot"
    sources = groupby(entry.source for entry in lookup.entries[lookup.ready :])
    return LookupUpdate(
        lookup.session.id,
        lookup.id,
        lookup.held,
        slots,
        lookup.ready,
        _is_done(lookup),
        _unknown(lookup),
        tuple((source, sum(1 for _ in run)) for source, run in sources),
        tuple(lookup.sources),
        lookup.queued,
    )


def _unknown(lookup: Lookup) -> int:
    return max(0, lookup.search.high - lookup.held) if lookup.search is not None else 0


def _is_done(lookup: Lookup) -> bool:
    return lookup.ready == len(lookup.entries) and not _unknown(lookup) and not lookup.queued
