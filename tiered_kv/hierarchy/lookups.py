"""Lookups: which chunks each one leases, how much of it is ready, and what its session must be told.

Owns leases on behalf of lookups. Must not decide what is promoted or from where: the hierarchy does that between
:meth:`Lookups.open` and :meth:`Lookups.wait`. Called by the hierarchy only.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import groupby

from tiered_kv.hierarchy.credits import Session
from tiered_kv.hierarchy.host import HostMemory
from tiered_kv.hierarchy.index import Entry, HostState
from tiered_kv.hierarchy.plan import LookupUpdate
from tiered_kv.hierarchy.searches import Search
from tiered_kv.hierarchy.served import Served


@dataclass(slots=True)
class Lookup:
    """One lookup; see :class:`~tiered_kv.hierarchy.plan.LookupUpdate`.

    Attributes:
        entries: Leased chunks, from ``start`` on; only the first ``ready`` may be read.
        is_cut: No more chunks are leased: a limit was reached, or one of them did not come.
        search: What looks for more of its prefix, until that is done or of no use.
        length: Chunks of its prefix, also those before ``start``.
        sources: Per entry, the lower tier it was read from; None: it needed not be read.
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

    def __len__(self) -> int:
        return len(self._lookups)

    def get(self, lookup_id: int) -> Lookup | None:
        return self._lookups.get(lookup_id)

    def take_updates(self) -> list[LookupUpdate]:
        """One message per lookup that changed since the last call; suspended sessions are told nothing."""
        changed = [self._lookups[i] for i in self._dirty if i in self._lookups]
        self._dirty.clear()
        return [_describe(lookup) for lookup in changed if not lookup.session.is_suspended]

    # -- life of a lookup --------------------------------------------------------------------------------------

    def open(self, session: Session, held: list[Entry], length: int, start: int) -> Lookup:
        """Look up a prefix of ``length`` chunks: lease held ones from ``start`` on, as far as the limits allow."""
        self._last_id += 1
        lookup = Lookup(self._last_id, session, start, 0, [], length=length)
        self._lookups[lookup.id] = lookup
        session.lookups.add(lookup.id)
        self.extend(lookup, held)
        return lookup

    def extend(self, lookup: Lookup, found: list[Entry]) -> None:
        """More of the prefix is held: lease it, too, as far as the limits allow."""
        slot_bytes = lookup.session.slot_bytes
        limit_bytes = int(self._host.slots.limit_bytes * self._shares[0])
        length = int(self._host.taken.most_bytes(lookup.session.namespace) * self._shares[1]) // slot_bytes
        wanted = found[max(0, lookup.start - lookup.held) :]
        lookup.held += len(found)
        self._dirty[lookup.id] = None
        for entry in wanted:
            if lookup.is_cut or len(lookup.entries) >= length:
                return
            if not self._host.lease(entry, slot_bytes, limit_bytes):
                self._counters["lease_cap_reached"] += 1
                lookup.is_cut = True
                return
            lookup.entries.append(entry)

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
        dropped = lookup.entries[length:]
        del lookup.entries[length:], lookup.sources[length:]
        lookup.ready = min(lookup.ready, length)
        for entry in dropped:
            _wait_no_more(entry, lookup)
            self._host.end_lease(entry, lookup.session.slot_bytes)

    def close(self, lookup: Lookup) -> None:
        """End the lookup and its leases; only now is it known what it got."""
        sources = lookup.sources[: lookup.ready]
        has_more = not _is_done(lookup)
        self._served.ended(lookup.session.namespace, lookup.length, lookup.start, sources, has_more=has_more)
        self.truncate(lookup, 0)
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
        for lookup in self._lookups.values():
            states = [entry.host for entry in lookup.entries]
            assert len(lookup.sources) == len(states), "where a chunk came from was not noted"
            assert HostState.ABSENT not in states, "a lookup wants a chunk that has no slot"
            assert all(state is HostState.READY for state in states[: lookup.ready]), "an unverified chunk was promised"
            assert lookup.search is None or not lookup.search.is_over, "a lookup waits for a search that is over"
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
    )


def _unknown(lookup: Lookup) -> int:
    return max(0, lookup.search.high - lookup.held) if lookup.search is not None else 0


def _is_done(lookup: Lookup) -> bool:
    return lookup.ready == len(lookup.entries) and not _unknown(lookup)
