"""Random histories of tiering against the oracle: any order of jobs, any outcome, several sessions and sizes.

Among what is checked after every step is the law of conservation, per tier: what was asked for is what was got and what
was missed (here, against what the sessions were told); what was stored less what was removed is there (by
``check_integrity``, which the oracle calls); and a session that watches knows exactly what is where.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.kit.counts import count
from tests.kit.spaces import Space
from tests.kit.tiering.accounts import Accounts
from tests.kit.tiering.oracle import Blob
from tests.kit.tiering.parts import PARTS
from tests.kit.tiering.touches import TouchedWorld
from tests.kit.tiering.world import tier_specs
from tiered_kv.tiering.admission import ALL, SECOND_TOUCH
from tiered_kv.tiering.index import CLAIMED, BlobState, HostState
from tiered_kv.tiering.quotas import Quota
from tiered_kv.tiering.tiering import Tiering
from tiered_kv.tiering.types import HOST, Copy, Delete, Grow, Job, Limits, Outcome, Probe, Read, Seal, SlotLoan, Write

SPACES = [Space(b"A" * 16, 10, is_tagged=True), Space(b"B" * 16, 15, is_tagged=True), Space(b"C" * 16, 10)]
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple)
PICK = st.integers(0, 1 << 16)
OWNERS = [b"one user's......", b"another user's.."]

FAULTS: dict[type[Job], list[Outcome]] = {
    Seal: [Outcome.UNAVAILABLE],
    Write: [Outcome.UNAVAILABLE, Outcome.NO_ROOM, Outcome.CORRUPT],
    Read: [Outcome.UNAVAILABLE],
    Copy: [Outcome.UNAVAILABLE, Outcome.NO_ROOM, Outcome.NO_SOURCE],
    Probe: [Outcome.UNAVAILABLE],
    Delete: [Outcome.UNAVAILABLE],
    Grow: [Outcome.NO_ROOM],
}


def tail_length(name):
    """Tokens of the tail of that name."""
    return 1 + ord(name) % 5


def prefixes(path):
    """Every chunk of a prompt, root first."""
    return [path[:depth] for depth in range(1, len(path) + 1)]


class Histories(RuleBasedStateMachine):
    """Every rule is something a client, a medium or the engine may do at any time."""

    @initialize(
        host_bytes=st.sampled_from([60, 160, 200]),
        capacities=st.sampled_from([[], [None], [45], [100], [300], [100, None], [300, 100]]),
        is_shared=st.booleans(),
        eviction=st.sampled_from(["multi-queue", "lru"]),
        admissions=st.lists(st.sampled_from([ALL, SECOND_TOUCH]), min_size=2, max_size=2),
        stored=st.lists(st.tuples(PICK, PATHS), max_size=8),
        tails=st.lists(st.tuples(PICK, PATHS, st.sampled_from("abcdef")), max_size=3),
        few_chunks=st.sampled_from([1, 2, 5]),
        at_once=st.sampled_from([1, 2, 100]),
    )
    def start(self, host_bytes, capacities, is_shared, eviction, admissions, stored, tails, few_chunks, at_once):
        self.patch = pytest.MonkeyPatch()
        for module, name in PARTS:
            self.patch.setattr(module, name, at_once)
        self.is_shared = is_shared and bool(capacities)
        if self.is_shared:
            capacities = [*capacities[:-1], None]
        specs = tier_specs(capacities, admissions, is_last_shared=self.is_shared)
        tiering = Tiering(host_bytes, specs, Limits(few_chunks=few_chunks), eviction=eviction)
        self.world = TouchedWorld(tiering, capacities, admissions)
        for tier in self.own_tiers:
            for pick, path in {(pick % 3, path): None for pick, path in stored}:
                self.world.restore(tier, SPACES[pick], path)
            for pick, path, name in {(pick % 3, path, name): None for pick, path, name in tails if tier == HOST + 1}:
                self.world.restore_tail(tier, SPACES[pick], path, name, tail_length(name))
            self.world.tiering.restored(tier)
        self.accounts = Accounts(self.world)
        self.loans = {}
        self.now_s = 0.0
        self.world.open(SPACES[0])
        self.world.step()

    @property
    def own_tiers(self):
        """Secondary tiers that are not shared."""
        return [*self.world.media][: len(self.world.media) - self.is_shared]

    def session(self, pick):
        live = [s for s in self.world.spaces if s not in self.world.suspended]
        return live[pick % len(live)] if live else None

    # -- clients -------------------------------------------------------------------------------------------------------

    @rule(space=st.sampled_from(SPACES))
    def open(self, space):
        if len(self.world.spaces) < 4:
            self.world.open(space)

    @rule(
        pick=PICK,
        path=PATHS,
        start=st.integers(0, 7),
        turn=st.integers(0, 3),
        wants_tails=st.booleans(),
        is_followed=st.booleans(),
    )
    def lookup(self, pick, path, start, turn, wants_tails, is_followed):
        if (session := self.session(pick)) is not None:
            self.world.lookup(session, path, start, (0, turn), wants_tails=wants_tails, is_followed=is_followed)

    @rule(pick=PICK)
    @precondition(lambda self: self.world.lookups)
    def claim(self, pick):
        """A load of what is ready begins: its leases end when it is released and not before."""
        lookup = sorted(self.world.lookups)[pick % len(self.world.lookups)]
        if self.world.lookups[lookup].session not in self.world.suspended:
            self.world.claim(lookup)

    @rule(pick=PICK)
    @precondition(lambda self: any(not one.update.is_done for one in self.world.lookups.values()))
    def follow(self, pick):
        """Whoever asks how much is ready hears it, and of parts from then on."""
        waiting = sorted(number for number, one in self.world.lookups.items() if not one.update.is_done)
        asked = self.world.lookups[waiting[pick % len(waiting)]]
        if asked.session not in self.world.suspended:
            before = asked.update
            self.world.tiering.follow(asked.session, waiting[pick % len(waiting)])
            self.world.step()
            assert asked.update is not before or asked not in self.world.lookups.values()

    @rule()
    def leases_are_held_for_too_long(self):
        for session in self.world.tiering._sessions.values():
            session.lease_s = 1.0
        for _ in range(2):  # they are dated, and over
            self.now_s += 2.0
            self.world.tiering.expire_leases(self.now_s)

    @rule()
    def prefixes_are_dated_now_and_then(self):
        self.world.dates = not self.world.dates

    @rule()
    def a_loop_that_is_behind_grants_nothing(self):
        for job in self.world.tiering.take_jobs(grants=False):
            self.world._begin(job)
        assert not self.world.tiering._grants.wants_turn

    @rule(pick=PICK)
    @precondition(lambda self: self.world.lookups)
    def release(self, pick):
        lookup = sorted(self.world.lookups)[pick % len(self.world.lookups)]
        if self.world.lookups[lookup].session not in self.world.suspended:
            self.accounts.release(lookup)

    @rule(pick=PICK)
    @precondition(lambda self: self.world.lookups)
    def look_up_anew(self, pick):
        """A request waits for long: its next lookup counts as no use of what an earlier one found."""
        before = sorted(self.world.lookups)[pick % len(self.world.lookups)]
        asked, index = self.world.lookups[before], self.world.tiering.index
        if asked.session in self.world.suspended:
            return
        counted = asked.update.held
        found = [entry for key in asked.keys[:counted] if (entry := index.get(key)) is not None]
        uses = {entry: entry.uses for entry in found}
        self.world.lookup(asked.session, asked.path, asked.start, counted=counted)
        assert all(entry.uses in (uses[entry], 1) for entry in found)
        self.world.release(before, is_asked_anew=True)

    @rule(pick=PICK)
    def watch(self, pick):
        if (session := self.session(pick)) is not None:
            self.accounts.watch(session)

    @rule(pick=PICK, path=PATHS)
    def commit(self, pick, path):
        if (session := self.session(pick)) is not None:
            self.world.commit(session, path)

    @rule(pick=PICK, path=PATHS)
    def commit_an_answer(self, pick, path):
        if (session := self.session(pick)) is not None:
            self.world.commit(session, path, is_answer=True)

    @rule(pick=PICK, path=PATHS)
    def commit_a_prefix(self, pick, path):
        """Every chunk of a prompt, a step's credits at a time."""
        if (session := self.session(pick)) is None:
            return
        for depth in range(1, len(path) + 1):
            if not self.world.commit(session, path[:depth]):
                break
            self.world.tiering.touch_prefix(self.world.spaces[session].key(path[:depth]))
            self.world.step()

    @rule(pick=PICK, path=PATHS)
    def store_a_prefix(self, pick, path):
        """The same without haste: all of it is where it belongs at the end."""
        if (session := self.session(pick)) is not None:
            self.store(session, prefixes(path))

    def store(self, session, paths):
        for path in paths:
            self.world.commit(session, path)
            self.world.finish_all()

    @rule(pick=PICK, first=st.integers(0, 3))
    def fill_host_memory(self, pick, first):
        """Prompts that share nothing push everything else out."""
        if (session := self.session(pick)) is not None:
            for number in range(8):
                self.world.commit(session, (100 * first + number,))
                self.world.step()

    @rule(pick=PICK, path=PATHS, name=st.sampled_from("abcdef"))
    def commit_tail(self, pick, path, name):
        """Also behind what is not held, and of a chunk that has as many tails as it may."""
        if (session := self.session(pick)) is not None:
            self.world.commit_tail(session, path, name, tail_length(name))

    @rule(pick=PICK, path=PATHS, name=st.sampled_from("abcdef"))
    def drop_tail(self, pick, path, name):
        """What continues it was stored; a lookup may hold it."""
        if (session := self.session(pick)) is not None:
            self.world.drop_tail(session, path, name, tail_length(name))

    @rule(pick=PICK, path=PATHS, name=st.sampled_from("abcdef"))
    def store_a_prefix_and_its_tail(self, pick, path, name):
        self.store_a_prefix(pick, path)
        self.commit_tail(pick, path, name)

    @rule()
    def save_tails(self):
        """The server is about to end, but does not."""
        self.world.tiering.save_tails()

    @rule(pick=PICK, path=PATHS)
    def want(self, pick, path):
        """A request's pin, or another engine that is to go on with it."""
        if (session := self.session(pick)) is not None:
            self.world.want(session, path)

    @precondition(lambda self: self.world.media)
    @rule(pick=PICK, path=PATHS)
    def pin(self, pick, path):
        """An operator's pin, that ends with the next one."""
        if (session := self.session(pick)) is not None:
            self.world.want(session, path)
            self.world.tiering.set_pinned(1 + pick % len(self.world.media), [self.world.spaces[session].key(path)])

    @rule(space=st.sampled_from(SPACES), shares=st.lists(st.sampled_from([0.0, 0.2, 0.5, 1.0]), min_size=2, max_size=2))
    def share(self, space, shares):
        """An engine states what its namespace keeps and may take."""
        self.world.tiering.quotas.set(space.namespace, Quota(*sorted(shares), space.slot_bytes))

    @rule(pick=PICK, tenant=st.integers(0, 1), namespace=st.sampled_from([b"", b"A" * 16]))
    def erase(self, pick, tenant, namespace):
        """Nothing of it waits to be written afterwards; what nobody uses is gone, and what stays is told."""
        tiers = [HOST, *self.own_tiers]
        tier, tag = tiers[pick % len(tiers)], SPACES[0].tag((tenant,))
        *_, count = self.world.tiering.erasing(tier, namespace, tag)
        kept = count[1]
        index = self.world.tiering.index
        mine = [e for e in index.entries() if e.record.tag == tag and namespace in (b"", e.record.namespace)]
        assert not any(BlobState.QUEUED in e.blobs or e.is_unwritten for e in mine)
        here = [
            e
            for e in mine
            if (e.host is not HostState.ABSENT if tier == HOST else e.blobs[tier] in (*CLAIMED, BlobState.CORRUPT))
        ]
        assert len(here) <= kept
        assert not here or any(e.is_busy for e in index.entries())

    @rule(pick=PICK, path=PATHS, owner=st.sampled_from(OWNERS))
    def look_up_for_a_users_session(self, pick, path, owner):
        if (session := self.session(pick)) is not None:
            self.world.lookup(session, path, owner=owner)

    @rule(pick=PICK, path=PATHS, owner=st.sampled_from(OWNERS))
    def take_ownership(self, pick, path, owner):
        """A request of a user's session is over."""
        if (session := self.session(pick)) is not None:
            space = self.world.spaces[session]
            self.world.tiering.take_ownership(space.namespace, space.key(path), owner)

    @rule(space=st.sampled_from(SPACES), path=PATHS, owner=st.sampled_from(OWNERS), is_whole=st.booleans())
    def release_what_a_users_session_has(self, space, path, owner, is_whole):
        """Nothing goes that another one asked for or that is in use; what only leaves memory is held below.

        A tail goes with the chunk that it continues, whoever stored it.
        """
        tiering, index = self.world.tiering, self.world.tiering.index

        def is_own(entry):
            chunk = index.parent(entry) if entry.tail_tokens else entry
            return entry.owner == owner or (chunk is not None and chunk.owner == owner)

        held = [entry for entry in index.entries() if index.is_held(entry)]
        is_moving = (HostState.SEALING, HostState.PROMOTING)
        staying = [
            entry
            for entry in held
            if not is_whole
            or not is_own(entry)
            or entry.leases
            or BlobState.WRITING in entry.blobs
            or entry.host in is_moving
        ]
        keys = [space.key(path[:depth]) for depth in range(len(path), 0, -1)]
        release = tiering.releasing(keys, owner, [], lambda _: False) if is_whole else tiering.demoting(keys, owner)
        *_, count = release
        assert count is not None and all(map(index.is_held, staying))
        gone = [entry for entry in held if not index.is_held(entry)]
        assert all(child in gone or not index.is_held(child) for entry in gone for child in entry.children)

    @rule(space=st.sampled_from(SPACES), path=PATHS)
    def lend(self, space, path):
        """A peer reads a chunk that is in host memory."""
        loan = self.world.tiering.lend(space.namespace, space.key(path))
        if isinstance(loan, SlotLoan):
            self.loans[loan.id] = loan, space.key(path)

    @precondition(lambda self: self.loans)
    @rule(pick=PICK)
    def end_loan(self, pick):
        loan = sorted(self.loans)[pick % len(self.loans)]
        del self.loans[loan]
        self.world.tiering.end_loan(loan)

    @rule(
        pick=PICK, path=PATHS, owner=st.sampled_from(OWNERS), kept=st.lists(PATHS, max_size=2), is_stored=st.booleans()
    )
    def demote_an_end_that_a_users_session_has_left(self, pick, path, owner, kept, is_stored):
        """Nothing is lost; what another one asked for, or another state of the session needs, stays in host memory."""
        if (session := self.session(pick)) is None:
            return
        tiering, index, space = self.world.tiering, self.world.tiering.index, self.world.spaces[session]
        for state_of in [path, *kept] if is_stored else ():  # a moment ago
            self.store(session, [of for of in prefixes(state_of) if index.get(space.key(of)) is None])
            tiering.take_ownership(space.namespace, space.key(state_of), owner)

        def state(of):
            return [space.key(of[:depth]) for depth in range(len(of), 0, -1)]

        held = [entry for entry in index.entries() if index.is_held(entry)]
        # Behind a gap, as damage leaves it, nobody can load a state: what is before the gap may go.
        whole = [one for one in kept if all(index.get(key) is not None for key in state(one))]
        needed = {key for one in whole for key in state(one)}
        is_known = index.get(space.key(path)) is not None  # else it is another end of the session, from there on
        staying = [
            entry
            for entry in held
            if entry.host is HostState.READY
            and (
                entry.record.key in needed
                or entry.owner != owner
                or entry.is_busy
                or index.source(entry) is None
                or (is_known and entry.record.key not in state(path))
            )
        ]
        *_, count = tiering.demoting_end(state(path), owner, [state(one) for one in kept])
        assert count is not None and all(map(index.is_held, held))
        assert all(entry.host is HostState.READY for entry in staying)

    @rule(pick=PICK)
    def give_back(self, pick):
        if (session := self.session(pick)) is not None:
            self.world.give_back(session)

    @rule(pick=PICK)
    def rest(self, pick):
        if (session := self.session(pick)) is not None:
            self.world.rest(session)

    @rule(pick=PICK)
    def wake(self, pick):
        if (session := self.session(pick)) is not None:
            self.world.wake(session)

    @precondition(lambda self: len(self.world.spaces) > 1)
    @rule(pick=PICK)
    def suspend(self, pick):
        if (session := self.session(pick)) is not None and len(self.world.spaces) > 1:
            self.accounts.unwatch(session)
            self.world.suspend(session)

    @precondition(lambda self: len(self.world.spaces) > 1)
    @rule(pick=PICK)
    def close(self, pick):
        sessions = sorted(self.world.spaces)
        if len(sessions) > 1:
            self.accounts.close(sessions[pick % len(sessions)])

    # -- media ---------------------------------------------------------------------------------------------------------

    @rule(pick=PICK)
    @precondition(lambda self: self.world.jobs)
    def finish(self, pick):
        self.world.finish(pick % len(self.world.jobs))

    @rule(picks=st.lists(PICK, min_size=3, max_size=8))
    def finish_some(self, picks):
        for pick in picks:
            if self.world.jobs:
                self.world.finish(pick % len(self.world.jobs))

    @rule(pick=PICK, other=PICK)
    @precondition(lambda self: self.world.jobs)
    def fail(self, pick, other):
        index = pick % len(self.world.jobs)
        faults = FAULTS[type(self.world.jobs[index])]
        self.world.finish(index, faults[other % len(faults)])

    @rule()
    def finish_all(self):
        self.world.finish_all()

    @precondition(lambda self: any(self.world.media.values()))
    @rule(pick=PICK, blob=st.sampled_from([None, Blob.CORRUPT, Blob.FOREIGN]))
    def damage(self, pick, blob):
        blobs = [(tier, key) for tier, medium in self.world.media.items() for key in sorted(medium)]
        if blobs:
            self.world.damage(*blobs[pick % len(blobs)], blob)

    @rule()
    def try_again(self):
        self.world.tiering.try_again()

    @rule(is_kept=st.booleans())
    def keep_memory(self, is_kept):
        """The first process that pins slabs for its GPU comes, or the last one goes."""
        self.world.keep_memory(is_kept=is_kept)

    @rule()
    def resume_writes(self):
        self.world.tiering.resume_writes()

    @rule(pick=PICK, is_readable=st.booleans())
    @precondition(lambda self: self.world.media)
    def set_readable(self, pick, is_readable):
        self.world.tiering.set_readable(1 + pick % len(self.world.media), is_readable)

    # -- other machines on a shared tier -------------------------------------------------------------------------------

    @rule(space=st.sampled_from(SPACES), path=PATHS)
    @precondition(lambda self: self.is_shared)
    def others_store(self, space, path):
        self.world.others_store(space, path)

    @rule(pick=PICK)
    @precondition(lambda self: self.is_shared and self.world.media[max(self.world.media)])
    def others_evict(self, pick):
        shared = max(self.world.media)
        keys = sorted(self.world.media[shared])
        self.world.damage(shared, keys[pick % len(keys)], None)

    @rule(pick=PICK)
    @precondition(lambda self: self.is_shared and self.world.media[max(self.world.media)])
    def others_evict_much(self, pick):
        """A namespace, what one prompt began with, or all."""
        shared = max(self.world.media)
        for number, key in enumerate(sorted(self.world.media[shared])):
            if not pick >> number % 3 & 1:
                self.world.damage(shared, key, None)

    @rule()
    def age_absences(self):
        self.world.tiering.age_absences()

    @rule()
    def age_confirmed(self):
        self.world.tiering.age_confirmed()

    @invariant()
    def everything_holds(self):
        if hasattr(self, "world"):
            self.world.step()

    @invariant()
    def what_is_lent_stays_where_it_is(self):
        for loan, key in self.loans.values() if hasattr(self, "world") else ():
            entry = self.world.tiering.index.get(key)
            assert (entry.host, entry.slot, entry.slot_bytes) == (HostState.READY, loan.slot, loan.size_bytes)

    @invariant()
    def what_lookups_asked_for_is_what_they_got_and_missed(self):
        if hasattr(self, "world"):
            self.accounts.check_served()

    @invariant()
    def who_watches_knows_what_is_where(self):
        if hasattr(self, "world"):
            self.accounts.check_told()

    @invariant()
    def answers_were_asked_for_or_lost_or_wait_for_it(self):
        if hasattr(self, "world"):
            self.accounts.check_answers()

    def teardown(self):
        if hasattr(self, "patch"):
            self.patch.undo()
        if hasattr(self, "world"):
            for space in SPACES:  # a share of less than a few chunks, which a server refuses, lets nobody go on
                self.world.tiering.quotas.drop(space.namespace)
            for loan in self.loans:
                self.world.tiering.end_loan(loan)
            self.world.wind_down()
            self.accounts.check_flows()


Histories.TestCase.settings = settings(max_examples=4 * count("EXAMPLES", 30), stateful_step_count=60)
TestHistories = Histories.TestCase
