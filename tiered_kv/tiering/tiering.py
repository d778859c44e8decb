"""The state machine that decides which chunk is where: lookups, leases, stores, promotions, evictions.

Pure: no I/O, no clock, no threads. Every public method changes state and leaves jobs and updates to be collected
with :meth:`Tiering.take_jobs` and :meth:`Tiering.take_updates`; the engine performs the jobs and reports how each
ended. One owner; nothing here waits. Host memory is in ``host_tier.py``, the tiers below it in ``tiers.py``, leases and
reads into slots in ``lookups.py``, tails in ``tails.py``, what a shared tier may have in ``prefix_search.py``, empty
slots held by sessions in ``slot_grants.py``; this file is where they meet.

Life of a chunk::

    commit -> host SEALING -> READY -> tier 1 QUEUED -> WRITING -> PRESENT -> (host evicted) -> PROMOTING -> READY
                                            `-> tier 2 QUEUED -> WRITING -> PRESENT
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.keys.state_keys import state_records
from tiered_kv.keys.tail_keys import tail_tokens
from tiered_kv.tiering.admission import policy_class
from tiered_kv.tiering.eviction import EVICTION_POLICIES
from tiered_kv.tiering.eviction_policy import EvictionPolicy
from tiered_kv.tiering.host_tier import HostTier
from tiered_kv.tiering.index import SELECTIVE_GENERATION_MIN, SHARED, BlobState, Entry, GhostList, HostState, Index
from tiered_kv.tiering.leases import Lookup
from tiered_kv.tiering.loans import Loans
from tiered_kv.tiering.lookups import LookupRequest, Lookups, Promotions
from tiered_kv.tiering.miss_ratio import MissRatioCurves, OpenPrompts
from tiered_kv.tiering.owners import ReleaseCount, deepest, demoting, own_chunks, releasing, take_ownership
from tiered_kv.tiering.prefix_search import PrefixSearch, StateSearch
from tiered_kv.tiering.quotas import NamespaceUsage, Quotas
from tiered_kv.tiering.removal import REMOVED_AT_ONCE, IsMeant, erasing, removing
from tiered_kv.tiering.row_transfers import RowTransfers, is_stored
from tiered_kv.tiering.secondary_tier import SecondaryTier
from tiered_kv.tiering.slot_grants import Session, SlotGrants
from tiered_kv.tiering.stats import HitStats, Outbox, Stats
from tiered_kv.tiering.tails import Tails
from tiered_kv.tiering.tiers import SecondaryTiers
from tiered_kv.tiering.types import (
    HOST,
    Copy,
    Grow,
    Job,
    Limits,
    Outcome,
    Probe,
    Read,
    ReadRow,
    RemovalCount,
    RowUse,
    Seal,
    SlotId,
    SlotLoan,
    SlotRecall,
    TierSpec,
    TierUsage,
    Update,
    Write,
    WriteRow,
)

CURVE_SPAN = 4
"""How many times the largest tier of this machine the miss-ratio curves reach."""

GO_ON_MAX = 8
"""Lookups of those that wait for room that go on in one step, a millisecond of it for long prefixes."""

LEASES_ENDED_AT_ONCE = 1024
"""Leases of sessions that are over that end in one step, or all of one lookup: a millisecond of it."""

LEASES_OF_A_LOOKUP = 8
"""As many leases cost what a lookup costs beside its own."""


class Tiering:
    """Where every chunk is and what moves next.

    Attributes:
        limits: How much of host memory may be held for what.
        quotas: What namespaces keep and take of every tier. Written by the engine.
        index: The entries of all chunks.
        stats: What was inserted into each tier and removed from it, and the events for sessions that watch.
        counters: What happened how often, since the start.
        hit_stats: What lookups asked for and got, until the engine takes it.
        miss_ratio: What lookups would have found in tiers of other sizes.
        slots: The slots of host memory.

    Threads: one owner. Units: bytes.
    """

    def __init__(
        self,
        host_bytes: int,
        tiers: Sequence[TierSpec],
        limits: Limits | None = None,
        *,
        eviction: str = "multi-queue",
    ) -> None:
        """Start empty.

        Args:
            tiers: The tiers below host memory, highest first; only the last may be shared.
            eviction: Name of the policy that says which chunk goes first when a tier is full.
        """
        assert not any(spec.is_shared for spec in tiers[:-1]), "only the last tier may be shared"
        self.limits = limits or Limits()
        policy = EVICTION_POLICIES[eviction]
        self.quotas = Quotas()
        tier_count = 1 + len(tiers)
        self.index = Index(tier_count, _ghosts(policy, tiers))
        self.stats = Stats(tier_count)
        self._outbox = Outbox(self.stats)
        self.counters = self._outbox.counters
        self._host = HostTier(host_bytes, self.index, self.quotas, policy, self._outbox)
        self.slots = self._host.slots
        queue_limit_bytes = int(host_bytes * self.limits.write_queue_share)
        self._tiers = SecondaryTiers(
            tiers, self.index, self._host, self.quotas, policy, self._outbox, queue_limit_bytes
        )
        self._tails = Tails(self.index, self._host, self._tiers, self.limits, self._outbox)
        self._grants = SlotGrants(self._host, self.limits.credit_share)
        self._loans = Loans(self._host)
        self._sessions: dict[int, Session] = {}
        self._has_damaged = False  # more than one step evicts
        self._closed: dict[int, Session] = {}  # with lookups that have not ended
        self.hit_stats = HitStats()
        self._lookups = Lookups(self._host, self._outbox, self.hit_stats, self.limits, self.index.source)
        self._promotions = Promotions(self.index, self._host, self._tiers, self._lookups, self._outbox)
        self._rows = RowTransfers(self.index, self._tiers, self._outbox, self.hit_stats)
        sizes = [host_bytes, *(spec.capacity_bytes or 0 for spec in tiers if not spec.is_shared)]
        self.miss_ratio = MissRatioCurves(CURVE_SPAN * max(sizes))
        self._open_prompts = OpenPrompts()
        self._recalls: list[SlotRecall] = []
        self._last_session = 0
        self._used: deque[ChunkRecord] = deque()
        self._touched: dict[bytes, int] = {}  # the slot sizes of chunks whose prefixes were used, oldest use first
        self._nowhere = (BlobState.ABSENT,) * tier_count  # of a chunk that no secondary tier has or is getting

    # -- collected by the engine -------------------------------------------------------------------------------

    def take_jobs(self, *, grants: bool = True, dates: bool = True) -> list[Job]:
        """Jobs to perform now, in order; each ends in exactly one call of the method that reports it.

        Also shares out what became free since the last call; updates are complete only after it.

        Args:
            grants: Whether sessions are granted empty slots, and with them what they bring work by.
            dates: Whether prefixes that were touched are dated now, each from its end to its root. Until then a new
                chunk is as old as the one before it.
        """
        self._evict_damaged()
        self._tiers.erase_rest()
        if dates:
            self._date_touched()
        self._share_out(grants=grants)
        jobs = list(self._outbox.jobs)
        self._outbox.jobs.clear()
        return jobs

    def take_updates(self, *, with_progress: bool = True) -> list[Update]:
        """What sessions must be told: one update per changed lookup, then new credits and recalls.

        Without progress, lookups whose chunks arrive one after the other wait for a later call, until all are here.
        """
        updates: list[Update] = list(self._lookups.take_updates(with_progress=with_progress))
        updates.extend(self._grants.take_grants(self._sessions.values()))
        updates.extend(self._recalls)
        self._recalls.clear()
        updates.extend(self._rows.take_ended({one.id: one.namespace for one in self._sessions.values()}))
        updates.extend(self.stats.take_events())
        return updates

    @property
    def has_progress(self) -> bool:
        """Whether progress of lookups waits for a call that takes it."""
        return self._lookups.has_progress

    @property
    def sealing_count(self) -> int:
        """Chunks that were committed, and whose seals were not reported."""
        return self._host.sealing_count

    @property
    def wants_turn(self) -> bool:
        """Whether :meth:`take_jobs` has more to do at once: something that is done in parts."""
        parts = (self._tiers, self._grants, self._promotions, self._lookups.line, self._rows)
        is_left = bool(self._closed) or self._has_damaged or self._host.is_emptying
        return is_left or any(part.wants_turn for part in parts)

    def take_uses(self) -> list[ChunkRecord]:
        """Chunks of secondary tiers used since the last call, oldest use first: what tiers persist as recency."""
        uses, self._used = list(self._used), deque()
        return uses

    def _share_out(self, *, grants: bool) -> None:
        self._end_lookups()
        for unfinished in self._promotions.begin_step():
            self._promote_more(unfinished)
        for _ in range(GO_ON_MAX):
            if (lookup := self._lookups.line.next()) is None:
                break
            held = self.index.held_prefix(lookup.session.namespace, lookup.keys, lookup.digests)
            self._lookups.go_on(lookup, held)
            self._promote(lookup, held)
        self._lookups.make_room()
        self._tails.remove_superseded()
        self._tiers.recover_some()
        if self._tiers.write_through is not None:
            self._tiers.write_through.refill()
        self._rows.take_back_some()
        self._grants.top_up(self._sessions.values() if grants else ())
        self._host.finish_drains()
        if self._tiers.write_through is not None:
            self._tiers.write_through.tier.start_writes()  # of tails that were to be evicted in this step
        if self._host.take_new_drains():
            self._recalls.extend(self._grants.recalls(self._sessions.values()))

    # -- sessions ----------------------------------------------------------------------------------------------

    def open_session(self, namespace: bytes, slot_bytes: int, lease_s: float = math.inf) -> int:
        """Start a session that fills slots of ``slot_bytes``; returns its id.

        Its lookups hold leases that they do not claim for ``lease_s``.

        All chunks of one namespace have one size: the caller's duty, because the namespace names their geometry.
        """
        self._last_session += 1
        session = Session(self._last_session, namespace, slot_bytes, lease_s=lease_s)
        self._sessions[session.id] = session
        self._host.add_user(slot_bytes)
        self._tiers.recover(namespace)
        return session.id

    def suspend_session(self, session_id: int) -> None:
        """The client is lost, but processes may still copy: keep its slots and leases, tell and grant nothing more.

        Uses of its rows end in parts; as with :meth:`take_rows_back` nobody touches these any more.
        """
        session = self._sessions[session_id]
        session.is_suspended = True
        self.stats.unwatch(session_id)
        untold, session.untold = session.untold, []
        self._grants.take_back(session, untold)
        self._lookups.line.session_lost(session_id)
        self._rows.session_over(session_id)

    def close_session(self, session_id: int) -> None:
        """No process touches the session's slots any more: take everything back, many leases in parts."""
        session = self._sessions.pop(session_id)
        session.is_suspended = True
        self.stats.unwatch(session_id)
        self._grants.take_back(session, list(session.reserved))
        self._host.remove_user(session.slot_bytes)
        self._lookups.line.session_ends(session_id)
        self._rows.session_over(session_id)
        self._closed[session_id] = session
        self._end_lookups()

    def _end_lookups(self) -> None:
        """Go on with ending those of closed sessions: a thousand requests may have leased one long prefix each."""
        left = LEASES_ENDED_AT_ONCE
        while self._closed and left > 0:
            session = next(iter(self._closed.values()))
            for lookup_id in list(islice(session.lookups, 1 + left // LEASES_OF_A_LOOKUP)):
                lookup = self._lookups.get(lookup_id)
                assert lookup is not None, "a session has a lookup that is over"
                left -= LEASES_OF_A_LOOKUP + len(lookup.entries)
                self.release(session.id, lookup_id)
                if left <= 0:
                    break
            if not session.lookups:
                del self._closed[session.id]
                self.hit_stats.session_ended(session.id)

    # -- lookups -----------------------------------------------------------------------------------------------

    def lookup(self, session_id: int, wish: LookupRequest) -> int:
        """Lease the longest prefix that is in host memory or can be promoted now; returns the lookup's id.

        Chunks before its start are not wanted (the GPU has them): they are used, but neither leased nor promoted. An
        update follows at once; more follow while promotions end and room comes for what the limits cut, until one is
        done. Or a ``LeaseEnd``, unless the lookup is claimed before: room goes by its turn.

        Where a state is wanted the prefix ends at the deepest boundary behind its start whose state is held as well,
        and the state is leased with it; without a state nothing is leased. Tails are leased the newest first.
        """
        session = self._sessions[session_id]
        if wish.state_parts:
            return self._look_up_state(session, wish)
        held = self.index.held_prefix(session.namespace, wish.keys, wish.digests)
        if wish.may_search:
            self.counters["answers_asked"] += self.index.count_use(held, wish.owner, wish.counted)
        else:  # beside a request's lookup, and maybe of the middle of a prefix
            for entry in held:
                entry.is_asked_for_by(wish.owner)
        lookup = self._lookups.open(session, held, wish)
        if wish.wants_tails and held:
            self._lookups.offer_tails(lookup, self._tails.behind(held[-1]))
        self._record_use([*held, *lookup.coming_tails], session.slot_bytes)  # at one time, the tail before its chunk
        if wish.may_search and wish.keys:
            self._note_prompt(lookup, wish)
        self._promote(lookup, held)
        self._tiers.enqueue_if_used(held)
        if wish.may_search and self._tiers.searches is not None:
            search = self._tiers.searches.begin(session.namespace, wish.keys, wish.digests, lookup.held, wish.hint)
            if search is not None:
                lookup.search, search.lookup = search, lookup.id
                self._go_on(search)
        return lookup.id

    def _note_prompt(self, lookup: Lookup, wish: LookupRequest) -> None:
        """Note a prompt, from its beginning, in its namespace's miss-ratio curve: counted once per request."""
        session = lookup.session
        if not wish.is_prefetch:
            lookup.end = wish.keys[-1]
            if self._open_prompts.begins(lookup.end) and not wish.counted:
                self.miss_ratio.looked_up(session.namespace, wish.keys, session.slot_bytes)
                return
        self.miss_ratio.used(wish.keys, session.slot_bytes)

    def _look_up_state(self, session: Session, wish: LookupRequest) -> int:
        """The same for a state: first how much of the prefix is held, then the deepest state along that."""
        lookup = self._lookups.open(session, [], wish)
        held = self.index.held_prefix(session.namespace, wish.keys, wish.digests)
        self._lookups.prefix_found(lookup, len(held))
        for entry in held:
            entry.is_asked_for_by(wish.owner)
        search = None
        if self._tiers.searches is not None:
            search = self._tiers.searches.begin(session.namespace, wish.keys, wish.digests, len(held), wish.hint)
        self._search_state(lookup, search)
        return lookup.id

    def _search_state(self, lookup: Lookup, search: PrefixSearch | None) -> None:
        """Go on with a search of the shared tier; where there is none, with the states that are known here."""
        if search is not None:
            lookup.search, search.lookup = search, lookup.id
            self._go_on(search)
            return
        lookup.search = None
        self._lease_state(lookup)

    def _lease_state(self, lookup: Lookup, *, may_search: bool = True) -> None:
        """Lease the deepest state along what is held of its prefix, unless a deeper one may be in the shared tier."""
        held = self.index.held_prefix(lookup.session.namespace, lookup.keys, lookup.digests)
        self._lookups.prefix_found(lookup, len(held))
        longest = max(0, min(len(held), self._lookups.most_chunks(lookup)))
        boundary, state = 0, list[Entry]()
        for depth in range(longest, lookup.start, -1):
            if state := self.index.held_state(held[depth - 1], lookup.state_parts):
                boundary = depth
                break
        if may_search and self._tiers.searches is not None:
            keys, digests = lookup.keys[:longest], lookup.digests[:longest]
            above = max(boundary, lookup.start)
            namespace, parts = lookup.session.namespace, lookup.state_parts
            search = self._tiers.searches.begin_states(namespace, keys, digests, above, parts)
            if search is not None:
                self._search_state(lookup, search)
                return
        path = [*held[:boundary], *state]
        counted = len(path) if boundary <= lookup.counted else lookup.counted  # the state behind the chunks, too
        self.counters["answers_asked"] += self.index.count_use(path, lookup.owner, counted)
        self._record_use(path, lookup.session.slot_bytes)
        self._lookups.state_found(lookup, boundary, path)
        self._promote(lookup, path)
        self._tiers.enqueue_if_used(path)

    def _state_searched(self, lookup: Lookup, search: StateSearch) -> None:
        """Take in the state that the shared tier has, and lease the deepest one."""
        searches = self._tiers.searches
        assert searches is not None
        lookup.search = None
        if search.found is not None:
            for record in state_records(search.found, search.parts):
                entry = self.index.get(record.key) or self._add(record)
                if entry.record == record:
                    searches.found(record.key)
                    self._tiers.sources[searches.tier].found(entry)
                self.index.remove_if_gone(entry)
        self._lease_state(lookup, may_search=False)

    def _promote(self, lookup: Lookup, held: list[Entry]) -> None:
        """Start reading what the lookup leased of the prefix that is held."""
        evicted = self.counters["host_evicted"]
        self._promotions.start(lookup)
        if self.counters["host_evicted"] != evicted:  # reading some may push out others that were nowhere else
            left = next((n for n, e in enumerate(held) if not self.index.is_held(e)), len(held))
            self._lookups.lost(lookup, min(lookup.held, left))
        self._lookups.wait(lookup)

    def _promote_more(self, lookup: Lookup) -> None:
        """The same for the next part of it. What was held behind it may be gone meanwhile: the last part says so."""
        self._promotions.start(lookup)
        leased = lookup.start + len(lookup.entries)
        if leased < lookup.held and lookup.begun == len(lookup.entries):
            held = len(self.index.held_prefix(lookup.session.namespace, lookup.keys, lookup.digests))
            self._lookups.lost(lookup, min(lookup.held, max(held, leased)))
        self._lookups.wait(lookup)

    def _go_on(self, search: PrefixSearch) -> None:
        """Ask what is still unknown; take in what was found."""
        assert self._tiers.searches is not None
        self._tiers.searches.advance(search)
        if isinstance(search, StateSearch):
            owner = self._lookups.get(search.lookup)
            if search.is_over and owner is not None and owner.search is search:
                self._state_searched(owner, search)
            return
        found = self._take_found(search)
        if found:
            self._tiers.want(found[-1])  # stored by another machine, and asked for here
        lookup = self._lookups.get(search.lookup)
        if lookup is None or lookup.search is not search:
            return
        if lookup.state_parts:
            self._lookups.prefix_found(lookup, lookup.prefix_held + len(found))
            if search.is_over:
                self._search_state(lookup, None)
            return
        for entry in found:
            entry.is_asked_for_by(lookup.owner)
        if found:
            self._lookups.extend(lookup, found)
            self._record_use(self.index.prefix(found[-1])[::-1], lookup.session.slot_bytes)
            self._promotions.start(lookup)
            self._lookups.wait(lookup)
        if search.is_over:
            self._lookups.search_ended(lookup)

    def _take_found(self, search: PrefixSearch) -> list[Entry]:
        assert self._tiers.searches is not None
        found: list[Entry] = []
        while search.told < search.low:
            record = search.record(search.told)
            entry = self.index.get(record.key) or self._add(record)
            if entry.record == record:
                self._tiers.searches.found(record.key)
                self._tiers.sources[self._tiers.searches.tier].found(entry)
            if entry.record != record or not self.index.is_held(entry):
                self.index.remove_if_gone(entry)
                self._tiers.searches.stop(search)
                break
            search.told += 1
            found.append(entry)
        return found

    def claim(self, session_id: int, lookup_id: int) -> None:
        """A load begins of what is ready: the leases stay until ``release``. Too late once their end was told."""
        if (lookup := self._own_lookup(session_id, lookup_id)) is not None:
            self._lookups.claim(lookup)

    def follow(self, session_id: int, lookup_id: int) -> None:
        """Have the session told how much of a lookup is ready, and of parts from now on. Unknown ids are ignored."""
        if (lookup := self._own_lookup(session_id, lookup_id)) is not None:
            self._lookups.follow(lookup)

    def release(self, session_id: int, lookup_id: int, *, is_asked_anew: bool = False) -> None:
        """End a lookup and its leases. Unknown ids are ignored: the session may have been told late.

        One that another lookup of the same request replaces (``is_asked_anew``) is not counted.
        """
        if (lookup := self._own_lookup(session_id, lookup_id)) is not None:
            self._lookups.close(lookup, is_asked_anew=is_asked_anew)
            if lookup.end:
                self._open_prompts.ends(lookup.end, is_asked_anew=is_asked_anew)

    def _own_lookup(self, session_id: int, lookup_id: int) -> Lookup | None:
        """A lookup of a session; None: it has no such one any more."""
        lookup = self._lookups.get(lookup_id)
        return lookup if lookup is not None and lookup.session.id == session_id else None

    def expire_leases(self, now_s: float) -> None:
        """End leases that were held unclaimed for too long. Call it at every step, with a clock that only goes on."""
        self._lookups.end_leases(self._lookups.line.overdue(now_s), "lease_expired")

    # -- loans -------------------------------------------------------------------------------------------------

    def held_here(self, namespace: bytes, keys: Iterable[bytes]) -> int:
        """How many of these chunks this machine can give at once, from the first on: out of host memory or its tiers.

        Asked for another machine: no use of them.
        """
        own = [tier.number for tier in self._tiers if not tier.is_shared]
        count = 0
        for key in keys:
            entry = self._sealed(namespace, key)
            if entry is None:
                entry = self.index.get(key)
                if entry is None or entry.record.namespace != namespace:
                    break
                if not any(entry.blobs[tier] is BlobState.PRESENT for tier in own):
                    break
            count += 1
        return count

    def lend(self, namespace: bytes, key: bytes) -> SlotLoan | Outcome:
        """Keep a chunk in its slot, for somebody who is in no session, until :meth:`end_loan`.

        ``MISSING``: it is not in host memory, or not sealed (yet). ``NO_ROOM``: too much is lent.
        """
        entry = self._sealed(namespace, key)
        if entry is None:
            return Outcome.MISSING
        loan = self._loans.begin(entry)
        self.counters["loans" if isinstance(loan, SlotLoan) else "loans_refused"] += 1
        return loan

    def end_loan(self, loan_id: int) -> None:
        """The chunk is read no more."""
        self._loans.end(loan_id)

    def read_by_peers(self, namespace: bytes, keys: Iterable[bytes]) -> None:
        """Other machines have read these chunks: they, and the prefixes before them, are worth a write below.

        What they take from here they do not bring to the tier that all share.
        """
        known = [entry for key in keys if (entry := self.index.get(key)) is not None and not entry.tail_tokens]
        known.sort(key=lambda entry: entry.record.chunk_index, reverse=True)  # the deepest one takes its prefix along
        for entry in known:
            if entry.record.namespace == namespace and not entry.uses:
                self._tiers.want(entry)

    def _sealed(self, namespace: bytes, key: bytes) -> Entry | None:
        """The chunk, if host memory has a whole blob of it; a tail is none."""
        entry = self.index.get(key)
        if entry is None or entry.record.namespace != namespace or entry.host is not HostState.READY:
            return None
        return None if entry.tail_tokens or entry in self.index.damaged else entry

    # -- stores ------------------------------------------------------------------------------------------------

    def commit(self, session_id: int, slot: SlotId, record: ChunkRecord, *, is_answer: bool = False) -> None:
        """A granted slot was filled by every rank: take it into the cache, or back if the chunk is known already.

        Args:
            is_answer: It has generated tokens: it is written below when a prompt is seen to contain it.

        Raises:
            KeyError: The slot was not granted to this session.
        """
        session = self._sessions[session_id]
        self._grants.spend(session, slot)
        entry = self.index.get(record.key)
        if record.namespace != session.namespace or (entry is not None and entry.record != record):
            self.counters["store_collision"] += 1
            self._host.give(slot)
        elif entry is not None and entry.host is not HostState.ABSENT:
            self.counters["store_duplicate"] += 1
            entry.is_asked_for_by(SHARED)
            self.stats.republish(entry, self.index.tiers_with(entry))
            self._host.give(slot)
            self._tiers.want(entry)
        else:
            if entry is not None:  # a secondary tier has it, and it is stored again
                self._tiers.want(entry)
                entry.is_asked_for_by(SHARED)
            else:
                entry = self._add(record, is_answer=is_answer and not self.index.is_in_prompt(record))
                self.counters["answers"] += entry.is_answer
                self.counters["answers_asked"] += entry.is_answer and not entry.is_unasked  # generated once more
            entry.stored_for(record.tag)
            entry.bytes_are_of(record.stored_by)
            self.miss_ratio.stored(record.namespace, record.key, session.slot_bytes)
            self._host.place(entry, slot, session.slot_bytes, HostState.SEALING)
            self._outbox.jobs.append(Seal(entry.record, slot))
            if self._tiers.write_through is not None:
                self._tiers.write_through.enqueue_write(entry)

    def _add(self, record: ChunkRecord, *, is_answer: bool = False) -> Entry:
        """Make the entry of a chunk that came; one that is no answer's has the answers before it asked for.

        A prompt may have looked those up before they came. First of all: the uses of what is known to lie behind the
        chunk count for all before it.
        """
        parent = self.index.parent_of(record)
        if parent is not None and parent.is_unasked and not is_answer:
            self._tiers.want(parent)
        entry = self.index.add(record)
        entry.is_answer = is_answer
        return entry

    def commit_tail(self, session_id: int, slot: SlotId, record: ChunkRecord) -> None:
        """A granted slot was filled with a tail; see ``tails.py``.

        Raises:
            KeyError: The slot was not granted to this session.
        """
        session = self._sessions[session_id]
        self._grants.spend(session, slot)
        if record.namespace != session.namespace or not tail_tokens(record.key):
            self.counters["tail_refused"] += 1
            self._host.give(slot)
        else:
            self._tails.commit(slot, session.slot_bytes, record)

    def drop_tails(self, session_id: int, keys: Iterable[bytes]) -> None:
        """Chunks, or longer tails, now continue these tails: they go, once nobody uses them."""
        self._tails.drop(self._sessions[session_id].namespace, keys)

    def save_tails(self) -> None:
        """The server ends: date what was used last, and write the tails that are worth it to the first tier."""
        self._date_touched()
        self._tails.save_all()

    def give_back(self, session_id: int, slot: SlotId) -> None:
        """A granted slot will not be filled.

        Raises:
            KeyError: The slot was not granted to this session.
        """
        self._grants.take_back(self._sessions[session_id], [slot])

    def rest(self, session_id: int) -> None:
        """The session will fill none of its slots, and is granted none until :meth:`wake`."""
        session = self._sessions[session_id]
        session.is_resting = True
        session.untold = []
        self._grants.take_back(session, list(session.reserved))

    def wake(self, session_id: int) -> None:
        """The session fills slots again."""
        self._sessions[session_id].is_resting = False

    def removing(
        self, tier: int, namespace: bytes, keys: Sequence[bytes] | None, *, leaves_holes: bool
    ) -> Iterator[RemovalCount | None]:
        """Remove chunks from one tier because an operator said so; see :func:`removal.removing`."""
        return removing(self.index, self._tier(tier), namespace, keys, leaves_holes=leaves_holes)

    def erasing(self, tier: int, namespace: bytes, tag: bytes) -> Iterator[RemovalCount | None]:
        """Remove what was stored under a tag, and all behind it, from one tier; see :func:`removal.erasing`."""
        return self._erasing(tier, namespace, lambda entry: entry.record.tag == tag)

    def erasing_stored_by(
        self, tier: int, namespace: bytes, is_meant: Callable[[str], bool]
    ) -> Iterator[RemovalCount | None]:
        """Remove what somebody stored, as ``is_meant`` says of each, and all behind it; see :func:`removal.erasing`."""
        return self._erasing(tier, namespace, lambda entry: any(map(is_meant, entry.storers)))

    def _erasing(self, tier: int, namespace: bytes, is_meant: IsMeant) -> Iterator[RemovalCount | None]:
        return erasing(
            self.index,
            self._tier(tier),
            self._tiers.cancel_writes,
            self._tiers.forget_shared,
            self._promotions.judge_on_arrival,
            namespace,
            is_meant,
        )

    def _tier(self, number: int) -> HostTier | SecondaryTier:
        return self._host if number == HOST else self._tiers[number]

    def set_pinned(self, tier: int, keys: Iterable[bytes] | None) -> None:
        """What an operator wants kept in a secondary tier; None: that is not known yet."""
        for _ in self.pinning(tier, keys):
            pass

    def pinning(self, tier: int, keys: Iterable[bytes] | None) -> Iterator[None]:
        """The same in steps, the effect of which comes with the last ones; see :meth:`SecondaryTiers.pinning`."""
        return self._tiers.pinning(tier, keys)

    def want(self, namespace: bytes, key: bytes) -> None:
        """Somebody will ask for a chunk: it and the prefix before it are worth a write to every tier now."""
        if (entry := self.index.get(key)) is not None and entry.record.namespace == namespace:
            self._tiers.want(entry)

    # -- users' sessions ---------------------------------------------------------------------------------------

    def take_ownership(self, namespace: bytes, key: bytes, owner: bytes) -> list[bytes]:
        """The newest state of a user's session ends with a chunk; see ``owners.py``. Keys of its prefix, root first."""
        entry = self.index.get(key)
        if entry is None or entry.record.namespace != namespace:
            return []
        return [one.record.key for one in take_ownership(self.index, entry, owner)]

    def known_prefix(self, keys: Iterable[bytes], owner: bytes) -> list[ChunkRecord]:
        """What is known of a session's state, root first, given its last chunk and some before that."""
        entry = deepest(self.index, keys, owner)
        return [] if entry is None else [one.record for one in self.index.prefix(entry)[::-1]]

    def releasing(
        self, keys: Iterable[bytes], owner: bytes, kept: Iterable[Sequence[bytes]], is_pinned: Callable[[bytes], bool]
    ) -> Iterator[ReleaseCount | None]:
        """Remove a session's own chunks along a state of it from memory and from this machine's tiers, in steps.

        Args:
            keys: The state's last chunk and some before that.
            kept: The same of states of that session that stay.
            is_pinned: Whether a chunk is kept beside the pins that tiers know of.
        """
        entry = deepest(self.index, keys, owner)
        own = [] if entry is None else own_chunks(self.index, entry, owner)
        staying = self._staying(owner, kept)
        disks = [tier for tier in self._tiers if not tier.is_shared]
        if not all(disk.knows_pins for disk in disks):
            return iter([ReleaseCount(0, len(own))])  # as what is in use: it may go later

        def is_kept(one: Entry) -> bool:
            key = one.record.key
            end = self.index.parent(one) if one.tail_tokens else one
            return end in staying or is_pinned(key) or any(disk.is_pinned(one) for disk in disks)

        return releasing(self.index, self._host, disks, self._tiers.cancel_writes, own, owner, is_kept)

    def demoting(self, keys: Iterable[bytes], owner: bytes) -> Iterator[ReleaseCount | None]:
        """Let a session's own chunks along a state of it leave host memory, where a tier below has them; in steps."""
        entry = deepest(self.index, keys, owner)
        return demoting(self.index, self._host, [] if entry is None else own_chunks(self.index, entry, owner))

    def demoting_end(
        self, keys: Iterable[bytes], owner: bytes, kept: Iterable[Sequence[bytes]]
    ) -> Iterator[ReleaseCount | None]:
        """As :meth:`demoting`, but of the chunks on the way to this state only those that no state in ``kept`` has."""
        entry = deepest(self.index, keys, owner)
        staying = self._staying(owner, kept)
        end = [] if entry is None else [one for one in self.index.prefix(entry) if one not in staying]
        return demoting(self.index, self._host, [one for one in self.index.with_states(end) if one.owner == owner])

    def _staying(self, owner: bytes, kept: Iterable[Sequence[bytes]]) -> set[Entry]:
        """The chunks of a session's states, each given by its last chunk and some before that."""
        ends = [deepest(self.index, state, owner) for state in kept]
        return {one for end in ends if end is not None for one in self.index.prefix(end)}

    def touch_prefix(self, key: bytes) -> None:
        """Note a use of a chunk and all its ancestors, after commits along one prefix; :meth:`take_jobs` dates it."""
        if (entry := self.index.get(key)) is not None:
            self._touched[key] = entry.slot_bytes

    def _date_touched(self) -> None:
        """Note uses since the last call: of each prefix once, however many messages brought it piece by piece."""
        touched, self._touched = self._touched, {}
        prefixes = []
        seen: set[bytes] = set()
        for key, slot_bytes in reversed(touched.items()):
            if key not in seen and (entry := self.index.get(key)) is not None:
                prefix = self.index.prefix(entry)
                prefixes.append((prefix[::-1], slot_bytes))
                if len(touched) > 1:
                    seen.update(one.record.key for one in prefix)
        for prefix, slot_bytes in reversed(prefixes):
            self._record_use(prefix, slot_bytes)

    def sealed(self, job: Seal, outcome: Outcome) -> None:
        """A seal ended: the chunk is ready to be loaded now, or gone."""
        entry = self._entry(job.record)
        if outcome is Outcome.OK:
            self._promotions.filled(entry)
            if self._tiers.write_through is not None:
                self._tiers.write_through.sealed(entry)
        else:
            self.counters["seal_failed"] += 1
            if self._tiers.write_through is not None:
                self._tiers.write_through.tier.drop(entry, "seal_failed")
            self._promotions.lost(entry)

    # -- lent rows ---------------------------------------------------------------------------------------------

    def store_rows(self, session_id: int, rows: Sequence[tuple[RowUse, ChunkRecord]]) -> None:
        """Write chunks from lent rows to the first secondary tier; see ``row_transfers.py``.

        Only where that tier is this machine's own and takes every chunk: nothing else would keep one.
        """
        session = self._sessions[session_id]
        write_through = self._tiers.write_through
        assert write_through is not None and not write_through.tier.is_shared
        for use, record in rows:
            entry = self.index.get(record.key)
            if record.namespace != session.namespace or (entry is not None and entry.record != record):
                self.counters["store_collision"] += 1
                self._rows.stored_already(use, is_good=False)
                continue
            is_damaged = entry in self.index.damaged
            if entry is not None and (
                entry in write_through.rows or is_stored(entry, record, HOST + 1, is_damaged=is_damaged)
            ):
                self.counters["store_duplicate"] += 1
                entry.is_asked_for_by(SHARED)
                self.stats.republish(entry, self.index.tiers_with(entry))
                self._rows.store_duplicate(entry, use)
                self._tiers.want(entry)
                continue
            if entry is None:
                entry = self._add(record)
            else:
                entry.is_asked_for_by(SHARED)
            entry.stored_for(record.tag)
            entry.bytes_are_of(record.stored_by)
            self.miss_ratio.stored(record.namespace, record.key, session.slot_bytes)
            write_through.tier.admission.admitted += 1
            self._rows.store(entry, use, session.slot_bytes)

    def load_rows(self, session_id: int, rows: Sequence[tuple[RowUse, bytes, bytes]], owner: bytes) -> None:
        """Read chunks, by key and digest, from this machine's tiers into lent rows."""
        session = self._sessions[session_id]
        for use, key, digest in rows:
            entry = self.index.get(key)
            names = None if entry is None else (entry.record.namespace, entry.record.prefix_sha256)
            if names != (session.namespace, digest):
                entry = None
            if entry is not None:
                entry.is_asked_for_by(owner)
                self._touched[key] = session.slot_bytes
            self._rows.load(entry, use)

    def load_ended(self, session_id: int, load: int) -> None:
        """All that was looked up and read for a load has ended."""
        self.hit_stats.load_ended(session_id, load)

    def needs_uses(self, tier: int) -> bool:
        """Whether a secondary tier takes only what was asked for."""
        return self._tiers[tier].admission.policy.needs_uses

    def take_rows_back(self, uses: Iterable[RowUse]) -> None:
        """End uses of lent rows early, badly. The caller has seen to it that nobody touches the rows any more."""
        self._rows.take_back(uses)

    def open_rows(self, session_id: int) -> list[RowUse]:
        """A session's uses of lent rows that are not over."""
        return self._rows.of_session(session_id)

    def row_written(self, job: WriteRow, outcome: Outcome) -> None:
        """The write of a lent row ended."""
        self._tiers[job.tier].written(self._entry(job.record), outcome)
        if outcome is Outcome.OK:
            self._rows.written(job.record)
        self._rows.collect()

    def row_read(self, job: ReadRow, outcome: Outcome, tag: bytes | None, stored_by: str | None) -> None:
        """The read of a lent row ended; what its header says nobody knew of a chunk that was found at start."""
        entry = self.index.get(job.record.key)
        if entry is not None and entry.record.namespace == job.record.namespace:
            if tag is not None:
                entry.set_tag(tag)
            if stored_by is not None:
                entry.bytes_are_of(stored_by)
        self._rows.read(job, outcome)

    # -- transfers ---------------------------------------------------------------------------------------------

    def read(self, job: Read, outcome: Outcome, tag: bytes | None = None, stored_by: str | None = None) -> None:
        """A promotion ended; what its header says nobody knew of a chunk that a search found."""
        entry = self._entry(job.record)
        if tag is not None:
            entry.set_tag(tag)
        if stored_by is not None:
            entry.bytes_are_of(stored_by)
        self._promotions.ended(job, entry, outcome)

    def written(self, job: Write, outcome: Outcome, held: int = 0) -> None:
        """A write to a secondary tier ended; ``held`` of what it goes behind are there, from the first on."""
        entry = self._entry(job.record)
        self._tiers[job.tier].written(entry, outcome, job.behind, held)
        if outcome is Outcome.OK:
            self._rows.written(job.record)
        elif outcome is Outcome.CORRUPT and entry.host is HostState.READY:  # not what was sealed: somebody wrote there
            self.index.damaged[entry] = "damaged"
            self._lookups.damaged(entry)

    def _evict_damaged(self) -> None:
        """Of what was found damaged, or lies behind what was erased, what nobody uses any more, a part at a time."""
        idle = [one for one in self.index.damaged if one.host is HostState.READY and not one.holds]
        self._has_damaged = len(idle) > REMOVED_AT_ONCE
        for entry in idle[:REMOVED_AT_ONCE]:
            cause = self.index.damaged[entry]
            self._host.give(self._host.evict(entry, cause))
            if cause == "removed":
                self._tiers.erase(entry)

    def copied(self, job: Copy, outcome: Outcome, held: int = 0) -> None:
        """An upload ended; ``held`` as of :meth:`written`."""
        entry = self._entry(job.record)
        self._tiers[job.tier].written(entry, outcome, job.behind, held)
        self.index.remove_if_gone(entry)

    def probed(self, job: Probe, held: int | None) -> None:
        """A probe found so many of its blobs, from the first on; None: it got no answer."""
        assert self._tiers.searches is not None
        for search in self._tiers.searches.probed(job, held):
            self._go_on(search)

    def deleted(self, tier: int, record: ChunkRecord, outcome: Outcome) -> None:
        """A deletion from a secondary tier ended."""
        self._tiers[tier].deleted(self._entry(record), outcome)

    def grown(self, job: Grow, outcome: Outcome) -> None:
        """A slab has its memory, or the machine refused it; then nothing grows until :meth:`try_again`."""
        self._promotions.memory_came(job.slab, outcome is Outcome.OK)
        self._host.grown(job, outcome)

    def try_again(self) -> None:
        """The machine may have memory again, and media may delete again. Call it now and then, not at once."""
        self.slots.allow_growth()
        for tier in self._tiers:
            tier.evict_to_capacity()

    def make_room(self, tier: int, size_bytes: int) -> int:
        """Have a tier of this machine delete so much, although its limit is not reached; says how much it will."""
        return self._tiers[tier].evict(size_bytes)

    def set_readable(self, tier: int, is_readable: bool) -> None:
        """A tier stopped to answer, or does again. Until then what lies only there is not held, nothing is written.

        One that is asked while it is out has what is found then.
        """
        self.index.readable[tier] = is_readable
        if self._tiers.searches is not None and tier == self._tiers.searches.tier:
            self._tiers.searches.switched()
        if is_readable:
            self.resume_writes()

    def resume_writes(self) -> None:
        """A tier that had no room or gave no answer may do better now. Call it about once a second."""
        self._tiers.resume()

    def age_absences(self) -> None:
        """What a shared tier did not have may be there now. A steady pace of calls bounds how long absence counts."""
        if self._tiers.searches is not None:
            self._tiers.searches.age_absences()

    def age_confirmed(self) -> None:
        """What a shared tier had may be gone now. A steady pace of calls bounds how long that is not asked for."""
        for tier in self._tiers:
            tier.age_confirmed()

    def restore(self, tier: int, record: ChunkRecord, size_bytes: int) -> None:
        """A blob found in a secondary tier at start. Call least recently used first, before any session."""
        entry = self.index.get(record.key) or self.index.add(record)
        if entry.record != record or entry.blobs[tier] is not BlobState.ABSENT:
            self.counters["restore_conflict"] += 1  # two namespaces claim one key: the first is kept
            return
        self._tiers[tier].restore(entry, size_bytes)

    def restored(self, tier: int, unlisted_bytes: int = 0) -> None:
        """All blobs of the tier were told: evict what passes its capacity, less what else the medium counts."""
        self._tails.found_at_start(tier)
        self._tiers[tier].restored(unlisted_bytes)

    def _entry(self, record: ChunkRecord) -> Entry:
        entry = self.index.get(record.key)
        assert entry is not None, "a job outlived its entry"
        return entry

    def _record_use(self, prefix: Sequence[Entry], slot_bytes: int) -> None:
        """Touch a prefix, given root first, in every tier: deepest chunk first, so that suffixes age first."""
        keys = [entry.record.key for entry in reversed(prefix)]
        namespace = prefix[0].record.namespace if prefix else b""
        self._host.record_use(slot_bytes, namespace, keys)
        self._tiers.record_use(namespace, keys)
        self._used.extend(entry.record for entry in reversed(prefix) if entry.blobs != self._nowhere)

    def usage(self) -> dict[str, int]:
        """Bytes and counts now, but for the secondary tiers: see :meth:`tier_usage`."""
        return {
            "chunks": len(self.index),
            "host_assigned_bytes": self._host.slots.assigned_bytes,
            "host_capacity_bytes": self._host.slots.host_bytes,
            "host_ready_chunks": self._host.ready_count,
            "host_tails": self.stats[HOST].tails,
            "leased_bytes": self._host.leased_bytes,
            "lent_bytes": self._loans.lent_bytes,
            "reserved_slots": sum(len(session.reserved) for session in self._sessions.values()),
            "sessions": len(self._sessions),
            "lookups": len(self._lookups),
        }

    def tier_usage(self, number: int) -> TierUsage:
        """Bytes and counts of a secondary tier now."""
        source = self._tiers.sources[number]
        return TierUsage(
            used_bytes=source.tier.used_bytes,
            queued_bytes=source.queued_bytes,
            pending_writes=source.pending,
            backlog_chunks=source.backlog,
            chunks=source.tier.blob_count,
            tails=self.stats[number].tails,
            pinned_bytes=source.tier.pinned_bytes,
            admitted_chunks=source.tier.admission.admitted,
            declined_chunks=source.tier.admission.declined,
        )

    def usage_of(self, number: int) -> NamespaceUsage:
        """What each namespace takes of a tier."""
        return self._tier(number).usage

    @property
    def pending_writes(self) -> int:
        """Chunks that are to be written to secondary tiers: what a drain waits for."""
        return self._tiers.pending if len(self._tiers) else self._host.sealing_count

    def check_integrity(self) -> None:
        """Assert every invariant that ties the parts together; for tests and for an idle server in debug mode."""
        sessions = self._sessions.values()
        reserved = {slot: session.namespace for session in sessions for slot in session.reserved}
        assert len(reserved) == sum(len(session.reserved) for session in sessions), "a slot was granted twice"
        reserved_bytes = sum(len(s.reserved) * s.slot_bytes for s in sessions)
        assert self._grants.reserved_bytes == reserved_bytes, "slot grants drifted"
        entries = self.index.entries()
        for entry in entries:
            pending = sum(state in (BlobState.QUEUED, BlobState.WRITING) for state in entry.blobs[: HOST + 2])
            assert entry.holds == entry.leases + pending + self._loans.count_of(entry), (
                "holds do not match leases, writes and loans"
            )
            assert entry.leases or not entry.is_gone, "an entry nobody holds"
        self.index.check_integrity()
        self.miss_ratio.check_integrity()
        self._host.check_integrity(reserved)
        self._lookups.check_integrity(entries)
        self._promotions.check_integrity()
        self._loans.check_integrity()
        self._tiers.check_integrity()
        self._rows.check_integrity()


def _ghosts(policy: type[EvictionPolicy], tiers: Sequence[TierSpec]) -> GhostList | None:
    """The ghost list that the policies need: a larger one where chunks must be recognised before they are written."""
    if any(policy_class(spec.admission).needs_uses for spec in tiers):
        return GhostList(SELECTIVE_GENERATION_MIN)
    return GhostList() if policy.needs_uses else None
