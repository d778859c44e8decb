"""The line: lookups that wait for room among the leases, who is next, and whose leases end for it.

Leases of all lookups together have a limit (rule 3). A lookup that meets it stands in line with what it still
wants, and goes on from where it was cut when there is room::

    next            the session that holds least; of its lookups the one whose request is admitted first
    gives way       a lookup of the same session whose request is admitted later; or the last one of another session
                    that holds more than its share, for a session that holds less
    ends by itself  what was leased for longer than its session's ``lease_s``

Nothing that was claimed gives way or ends by itself: a load may be running. And nobody waits for what will not come:
the first of a session that has its share, of which nothing but its own could come back, is content with that; and a
session that has less goes beyond the limit where claims of another one, which may be frozen, or what a lost client
leaves until its processes have exited, hold more than its share.

Owns order and dates; must not touch chunks or slots, and knows no clock: it is told the time. Called by ``lookups.py``.
docs/decisions/0025-leases-end.md.
"""

from __future__ import annotations

import bisect
import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.tiering.host_tier import HostTier
from tiered_kv.tiering.index import Entry, HostState
from tiered_kv.tiering.prefix_search import PrefixSearch
from tiered_kv.tiering.slot_grants import Session
from tiered_kv.tiering.types import Arrival, Turn

WANTED_CHUNKS_MAX = 1 << 19
"""Chunks of all prefixes in line, whose keys are kept for it: 70 MB. A lookup beyond it is cut for good, but where
others fill the line a session may have its part of half as many again."""

DUE_SPARE = 1024
"""Dates of leases that are over which may be kept, beside one for each that is not."""

OVERFLOW = 1.5
"""Of the limit, what all leases may take where claims hold more than a share: the rest of host memory is for stores."""

ENDED_AT_ONCE_MAX = 64
"""Lookups that give way for one lookup in one step, and that are told in one step to end because they are overdue."""


@dataclass(slots=True)
class Lookup:
    """One lookup; see :class:`~tiered_kv.tiering.types.LookupAnswer`.

    Attributes:
        entries: Leased chunks, from ``start`` on; only the first ``ready`` may be read.
        told: How many were ready when the session was told last.
        is_cut: No more chunks are leased: one of them did not come, or the lookup ends.
        search: What looks for more of its prefix, until that is done or of no use.
        length: Chunks of its prefix, also those before ``start``.
        sources: Per entry, the tier it was read from; ``HOST``: it needed not be read.
        turn: When its request is admitted.
        begun: Leading ``entries`` that are in slots or on their way; the others follow in later steps.
        keys, digests: Of its prefix, while it stands in line or is not begun with whole.
        queued: Chunks for which it stands in line.
        is_claimed: A load may be running: its leases end when it is released and not before.
        is_ending: Its session is told that its leases end.
        state_parts: Of the state it looks for; 0: it looks for a prefix alone. Once the state is found, ``keys``,
            ``held`` and ``entries`` are those of the chunks up to ``boundary`` and of the state's parts behind them;
            before that nothing is leased.
        boundary: Chunks before the state.
        prefix_held: Chunks of the prefix that are held, also behind the state.
        tails: Leased tails behind all that was held when it was opened.
        named_tails: Others that it is told of, which are not read for it.
        owner: The user's session that asks, if it is one's.
        end: Key of the last chunk of the prompt, where that counts in its miss-ratio curve.
        leases: Otherwise it is a question, and leases nothing.
        runs: Of a question, from which tiers what is held from ``start`` on would come.
        counted: Leading chunks whose use by this request an earlier lookup has counted, or that it has had itself.
        load: The load that it is a part of, for counting; 0: of none.
        is_followed: Its session is told of parts as they are ready.
    """

    id: int
    session: Session
    start: int
    held: int
    entries: list[Entry]
    begun: int = 0
    ready: int = 0
    told: int = 0
    is_cut: bool = False
    search: PrefixSearch | None = None
    length: int = 0
    sources: bytearray = field(default_factory=bytearray)
    turn: Turn = (0, 0)
    keys: Sequence[bytes] = ()
    digests: Sequence[bytes] = ()
    queued: int = 0
    is_claimed: bool = False
    is_ending: bool = False
    state_parts: int = 0
    boundary: int = 0
    prefix_held: int = 0
    tails: list[Entry] = field(default_factory=list)
    named_tails: list[ChunkRecord] = field(default_factory=list)
    owner: bytes = b""
    end: bytes = b""
    leases: bool = True
    runs: list[Arrival] = field(default_factory=list)
    counted: int = 0
    load: int = 0
    is_followed: bool = True

    @property
    def coming_tails(self) -> list[Entry]:
        """Leased tails that are being read into host memory."""
        return [tail for tail in self.tails if tail.host is not HostState.READY]

    @property
    def has_state(self) -> bool:
        """Whether all that its state needs is leased, or still waited for in line."""
        wanted = self.boundary - self.start + self.state_parts
        return bool(self.boundary) and len(self.entries) + self.queued == wanted


class LeaseQueue:
    """Who waits for leases, who holds some, and until when.

    Threads: one owner, tiering. Units: bytes, seconds.
    """

    def __init__(self, host: HostTier, limit_bytes: Callable[[], int]) -> None:
        """Nobody waits; ``limit_bytes`` tells what all leases together may take now."""
        self._host = host
        self._limit_bytes = limit_bytes
        self._waiting: dict[int, dict[int, Lookup]] = {}  # by session and lookup
        self._order: dict[int, list[tuple[Turn, int]]] = {}  # heaps of them, with some that have left
        self._holding: dict[int, dict[int, Lookup]] = {}  # not claimed, not ending
        self._turns: dict[int, list[tuple[Turn, int]]] = {}  # of those that hold, sorted
        self._claimed: Counter[int] = Counter()  # by session: with loads that may be running
        self._ending: Counter[int] = Counter()  # by session: told to end, and not released
        self._undated: list[Lookup] = []
        self._due: list[tuple[float, int, Lookup]] = []
        self._wanted_chunks: Counter[int] = Counter()  # by session
        self._lost: set[int] = set()  # sessions whose client hears of nothing: what they hold ends with them

    # -- room --------------------------------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """Whether nobody waits for room."""
        return not self._waiting

    def is_making_room(self, session: int) -> bool:
        """Whether leases of a session were told to end for somebody in line, and have not.

        Not those of another one: an engine that is frozen may never let go, and must not hold up anybody.
        """
        return bool(self._waiting) and self._ending[session] > 0

    def free_bytes(self, session: int) -> int:
        """What a session may lease from the line now: what is free, and while others want some, up to its share."""
        limit_bytes, leased_bytes = self._limit_bytes(), self._host.leased_bytes
        if self._host.leased_by.keys() | self._waiting.keys() <= {session}:
            return limit_bytes - leased_bytes
        free_bytes = min(
            limit_bytes + self._stuck_bytes(session) - leased_bytes,
            int(OVERFLOW * limit_bytes) - leased_bytes,
        )
        return min(free_bytes, self._share_bytes() - self._host.leased_by[session])

    def _stuck_bytes(self, session: int) -> int:
        """What others hold beyond their shares and cannot give: all of it is claimed, or their client is lost."""
        share_bytes = self._share_bytes()
        return sum(
            max(0, leased_bytes - share_bytes)
            for other, leased_bytes in self._host.leased_by.items()
            if other != session and (other in self._lost or not (self._holding.get(other) or self._ending[other]))
        )

    def _share_bytes(self) -> int:
        return self._limit_bytes() // max(1, len(self._host.leased_by.keys() | self._waiting.keys()))

    # -- who waits ---------------------------------------------------------------------------------------------

    def join(self, lookup: Lookup) -> bool:
        """A lookup waits for room; False when too much waits already."""
        if lookup.id in self._waiting.get(lookup.session.id, ()):
            return True
        session = lookup.session.id
        is_full = self._wanted_chunks.total() + lookup.length > WANTED_CHUNKS_MAX
        own_max = WANTED_CHUNKS_MAX // (2 * len(self._waiting.keys() | {session}))
        if is_full and self._wanted_chunks[session] + lookup.length > own_max:
            return False
        self._wanted_chunks[session] += lookup.length
        waiting, order = self._waiting.setdefault(session, {}), self._order.setdefault(session, [])
        waiting[lookup.id] = lookup
        heapq.heappush(order, (lookup.turn, lookup.id))
        if len(order) > 2 * len(waiting) + 64:  # many have left: aborted
            order[:] = [(one.turn, one.id) for one in waiting.values()]
            heapq.heapify(order)
        return True

    def leave(self, lookup: Lookup) -> None:
        """It waits no more. Idempotent."""
        session = lookup.session.id
        waiting = self._waiting.get(session, {})
        if waiting.pop(lookup.id, None) is not None:
            self._wanted_chunks[session] -= lookup.length
        if not waiting:
            self._wanted_chunks.pop(session, None)
            self._waiting.pop(session, None)
            self._order.pop(session, None)

    def next(self) -> Lookup | None:
        """The lookup that may go on now; it stays in line until it leaves."""
        for session in self._sessions():
            lookup = self._first(session)
            if self.free_bytes(session) >= lookup.session.slot_bytes:
                return lookup
        return None

    @property
    def wants_turn(self) -> bool:
        """Whether somebody may go on now: more could than one step takes, or others have left the line behind them."""
        return self.next() is not None

    def _sessions(self) -> list[int]:
        """Sessions that wait, who holds least first."""
        open_ones = [one for one in self._waiting if not self._first(one).session.is_suspended]
        return sorted(open_ones, key=lambda one: (self._host.leased_by[one], one))

    def _first(self, session: int) -> Lookup:
        waiting, order = self._waiting[session], self._order[session]
        while order[0][1] not in waiting:
            heapq.heappop(order)
        return waiting[order[0][1]]

    # -- who gives way -----------------------------------------------------------------------------------------

    def giving_way(self) -> list[Lookup]:
        """Lookups whose leases should end, so that those in line that are due before them can go on.

        None of a session while earlier ones of it have not been released.
        """
        found: dict[int, Lookup] = {}
        for session in self._sessions():
            first = self._first(session)
            need_bytes = first.queued * first.session.slot_bytes
            own = () if self._ending[session] else self._latest(session, first.turn)
            if last := self._last(own, need_bytes):
                found |= last
                continue
            share_bytes = self._share_bytes()
            need_bytes = min(need_bytes, share_bytes - self._host.leased_by[session])
            richest = self._richest(share_bytes)
            if need_bytes >= first.session.slot_bytes and richest is not None and richest != session:
                surplus_bytes = self._host.leased_by[richest] - share_bytes
                found |= self._last(self._latest(richest), min(need_bytes, surplus_bytes))
        return list(found.values())

    def _richest(self, share_bytes: int) -> int | None:
        """The session furthest above its share that has something to give."""
        over = [one for one, leased in self._host.leased_by.items() if leased > share_bytes]
        giving = [one for one in over if self._holding.get(one) and not self._ending[one] and one not in self._lost]
        return max(giving, key=lambda one: self._host.leased_by[one], default=None)

    def _latest(self, session: int, after: Turn | None = None) -> Iterator[Lookup]:
        """Lookups of a session that hold leases and are due after a turn, the last first; as many as may give way.

        By an order that is kept: thousands that wait may hold the one prefix they share, and this is asked every step.
        """
        holding = self._holding.get(session, {})
        for turn, lookup_id in islice(reversed(self._turns.get(session, ())), ENDED_AT_ONCE_MAX):
            if after is not None and turn <= after:
                return
            yield holding[lookup_id]

    @staticmethod
    def _last(lookups: Iterable[Lookup], need_bytes: int) -> dict[int, Lookup]:
        """Of these lookups, the first that give so much room together; none if they give nothing."""
        found: dict[int, Lookup] = {}
        ended: Counter[bytes] = Counter()
        gain_bytes = 0
        for lookup in lookups:
            if gain_bytes >= need_bytes:
                break
            found[lookup.id] = lookup
            for entry in (*lookup.entries, *lookup.tails):
                ended[entry.record.key] += 1
                if ended[entry.record.key] == entry.leases:  # nobody else holds it
                    gain_bytes += lookup.session.slot_bytes
        return found if gain_bytes else {}

    def in_vain(self) -> list[Lookup]:
        """The first of each session that gets no more however long it waits; call it after :meth:`giving_way`.

        Else two that each hold a part of what they want would wait for each other.
        """
        found = []
        for session in self._sessions():
            first = self._first(session)
            is_below = self._host.leased_by[session] + first.session.slot_bytes <= self._share_bytes()
            if is_below or self._ending[session] or self._claimed[session]:
                continue
            own = {entry.record.key for entry in first.entries}
            others = (
                one.entries for one in self._holding.get(session, {}).values() if one is not first and one.entries
            )
            if all({entries[0].record.key, entries[-1].record.key} <= own for entries in others):
                found.append(first)
        return found

    # -- who holds, and until when -----------------------------------------------------------------------------

    def holds(self, lookup: Lookup) -> None:
        """The lookup has its first lease."""
        session = lookup.session.id
        holding = self._holding.setdefault(session, {})
        if lookup.id not in holding:
            holding[lookup.id] = lookup
            bisect.insort(self._turns.setdefault(session, []), (lookup.turn, lookup.id))
        self._undated.append(lookup)

    def claimed(self, lookup: Lookup) -> None:
        """A load may be running: it neither gives way nor ends by itself."""
        self._claimed[lookup.session.id] += 1
        self._forget(lookup)

    def session_lost(self, session: int) -> None:
        """Its client is gone, and its processes may read what it leased: nothing of that ends before it does."""
        self._lost.add(session)

    def session_ends(self, session: int) -> None:
        """Its leases come back from now on. Also of one that was not lost."""
        self._lost.discard(session)

    def _forget(self, lookup: Lookup) -> None:
        self.leave(lookup)
        session = lookup.session.id
        holding = self._holding.get(session, {})
        if holding.pop(lookup.id, None) is not None:
            turns = self._turns[session]
            del turns[bisect.bisect_left(turns, (lookup.turn, lookup.id))]
        if not holding:
            self._holding.pop(session, None)
            self._turns.pop(session, None)

    def ends(self, lookup: Lookup) -> None:
        """Its session is told that its leases end."""
        self._forget(lookup)
        self._ending[lookup.session.id] += 1

    def released(self, lookup: Lookup) -> None:
        """It holds nothing any more."""
        self._forget(lookup)
        if lookup.is_ending:
            self._ending[lookup.session.id] -= 1
            self._ending += Counter()
        if lookup.is_claimed:
            self._claimed[lookup.session.id] -= 1
            self._claimed += Counter()

    def overdue(self, now_s: float) -> list[Lookup]:
        """Some lookups that have held leases for too long; call it now and then, with a clock that never goes back."""
        for lookup in self._undated:
            heapq.heappush(self._due, (now_s + lookup.session.lease_s, lookup.id, lookup))
        self._undated.clear()
        if len(self._due) > DUE_SPARE + 2 * sum(map(len, self._holding.values())):  # most were claimed or released
            self._due = [one for one in self._due if one[1] in self._holding.get(one[2].session.id, ())]
            heapq.heapify(self._due)
        found: list[Lookup] = []
        while self._due and self._due[0][0] < now_s and len(found) < ENDED_AT_ONCE_MAX:
            lookup = heapq.heappop(self._due)[2]
            if lookup.id in self._holding.get(lookup.session.id, ()) and not lookup.session.is_suspended:
                found.append(lookup)
        return found

    # -- tests -------------------------------------------------------------------------------------------------

    def check_integrity(self, lookups: dict[int, Lookup]) -> None:
        """Assert that those who wait and hold are lookups that do."""
        waiting = {one.id: one for ones in self._waiting.values() for one in ones.values()}
        holding = {one.id: one for ones in self._holding.values() for one in ones.values()}
        assert all(ones for ones in (*self._waiting.values(), *self._holding.values())), "an empty session stays"
        assert {**waiting, **holding}.items() <= lookups.items(), "one that is over waits or holds"
        turns = {name: sorted((one.turn, one.id) for one in ones.values()) for name, ones in self._holding.items()}
        assert self._turns == turns, "the order of those that hold drifted"
        wanted = {name: sum(one.length for one in ones.values()) for name, ones in self._waiting.items()}
        assert self._wanted_chunks == Counter(wanted), "chunks in line drifted"
        for lookup in lookups.values():
            assert (lookup.id in waiting) == bool(lookup.queued), "who wants more is not in line"
            assert not lookup.queued or lookup.keys, "one in line has forgotten what it wants"
            is_free = bool(lookup.entries) and not (lookup.is_claimed or lookup.is_ending)
            assert lookup.id in holding or not is_free, "one whose leases may end is not known"
            assert not (lookup.queued and lookup.is_claimed), "one that is claimed stands in line"
        claimed = Counter(one.session.id for one in lookups.values() if one.is_claimed)
        assert self._claimed == claimed, "claims drifted"
        ending = Counter(one.session.id for one in lookups.values() if one.is_ending)
        assert +self._ending == ending, "ends that were told drifted"
