"""Sessions: credits granted ahead, clients that are lost, and what their end gives back."""

import pytest

from tests.kit.tiering.world import LARGE, SMALL, Story
from tiered_kv.tiering.lookups import LookupRequest
from tiered_kv.tiering.slot_grants import CREDITS_MAX
from tiered_kv.tiering.tiering import Tiering
from tiered_kv.tiering.types import Grow, Limits, Outcome, Read, Seal, SlotGrant, SlotRecall, TierSpec

PREFIX = (1, 2, 3)


def granted(tiering, session):
    return [
        slot for u in tiering.take_updates() if isinstance(u, SlotGrant) and u.session == session for slot in u.slots
    ]


def test_credits_come_once_there_is_memory():
    tiering = Tiering(400, [TierSpec()])
    session = tiering.open_session(SMALL.namespace, SMALL.slot_bytes)
    [grow] = tiering.take_jobs()
    assert isinstance(grow, Grow) and granted(tiering, session) == []
    tiering.grown(grow, Outcome.OK)
    tiering.take_jobs()
    assert len(granted(tiering, session)) == 400 // SMALL.slot_bytes // 8


def test_a_spent_credit_is_replaced_and_told_in_one_message():
    story = Story(host_bytes=800)
    slots = story.credits[story.session]
    before = len(slots)
    for number in range(3):
        story.commit(story.session, (number,))
    story.give_back(story.session)
    jobs = story.tiering.take_jobs()
    grants = [update for update in story.tiering.take_updates() if isinstance(update, SlotGrant)]
    assert [len(grant.slots) for grant in grants] == [4] and len(slots) + 4 == before
    assert sum(isinstance(job, Seal) for job in jobs) == 3


def test_one_session_never_holds_more_than_two_steps_need():
    tiering = Tiering(100_000, [TierSpec()])
    session = tiering.open_session(SMALL.namespace, SMALL.slot_bytes)
    for job in tiering.take_jobs():
        tiering.grown(job, Outcome.OK)
    tiering.take_jobs()
    assert len(granted(tiering, session)) == CREDITS_MAX


def test_every_session_gets_a_credit_and_all_together_stay_within_the_share():
    story = Story(host_bytes=400)
    sessions = [story.session] + [story.open(SMALL) for _ in range(5)]
    story.finish_all()
    counts = [len(story.credits[session]) for session in sessions]
    assert all(counts) and sum(counts) * SMALL.slot_bytes <= 400 * 0.25 + SMALL.slot_bytes


def test_a_session_gets_credits_although_an_idle_one_holds_the_whole_share():
    story = Story(host_bytes=80)
    assert len(story.credits[story.session]) == 2
    late = story.open(SMALL)
    story.finish_all()
    assert len(story.credits[late]) == 1


def test_a_session_that_rests_has_no_credits_until_it_wakes():
    story = Story(host_bytes=800)
    story.commit(story.session, (1,))
    story.rest(story.session)
    story.finish_all()
    assert story.tiering.usage()["reserved_slots"] == 0 and story.is_in_host((1,))
    story.wake(story.session)
    story.finish_all()
    assert len(story.credits[story.session]) == story.tiering.usage()["reserved_slots"] > 1


def test_credits_that_a_session_was_not_told_of_go_when_it_rests():
    tiering = Tiering(400, [TierSpec()])
    session = tiering.open_session(SMALL.namespace, SMALL.slot_bytes)
    tiering.grown(tiering.take_jobs()[0], Outcome.OK)
    tiering.take_jobs()
    tiering.rest(session)
    tiering.take_jobs()
    assert tiering.take_updates() == [] and tiering.usage()["reserved_slots"] == 0


def test_without_a_lower_tier_credits_come_back_when_seals_end():
    story = Story(host_bytes=40, capacities=())
    while story.commit(story.session, (story.tiering.usage()["chunks"],)):
        story.step()
        story.end_every(Grow)
    assert len(story.waiting(Seal)) == 4
    story.end(Seal)
    assert story.credits[story.session]


def test_leases_and_slots_of_a_lost_client_are_kept_until_its_processes_are_gone():
    story = Story()
    story.store(PREFIX)
    other = story.open(SMALL)
    lookup = story.ask(PREFIX)
    usage = story.tiering.usage()
    story.suspend(story.session)
    story.finish_all()
    assert story.tiering.usage() == usage | {"reserved_slots": story.tiering.usage()["reserved_slots"]}
    held = set(story.credits[story.session])
    for number in range(60):  # the oracle fails if a promised or granted slot is used
        assert story.commit(other, (100 + number,))
        story.finish_all()
    assert story.figures(lookup) == (3, 3, 3, True) and held.isdisjoint(story.credits[other])
    story.close(story.session)
    story.finish_all()
    figures = story.tiering.usage()
    assert (figures["leased_bytes"], figures["sessions"], figures["reserved_slots"]) == (
        0,
        1,
        len(story.credits[other]),
    )


def test_a_lost_client_is_told_nothing_and_keeps_no_slot_it_was_not_told_of():
    tiering = Tiering(400, [TierSpec()])
    session = tiering.open_session(SMALL.namespace, SMALL.slot_bytes)
    tiering.grown(tiering.take_jobs()[0], Outcome.OK)
    tiering.take_jobs()
    tiering.lookup(session, LookupRequest(*SMALL.prefix(PREFIX)))
    tiering.suspend_session(session)
    tiering.take_jobs()
    assert tiering.take_updates() == [] and tiering.usage()["reserved_slots"] == 0
    tiering.check_integrity()


def test_promotions_of_a_lost_client_go_on_for_others():
    story = Story(found=[(1,)])
    other = story.open(SMALL)
    story.ask((1,))
    story.suspend(story.session)
    lookup = story.ask((1,), session=other)
    story.end(Read)
    assert story.figures(lookup) == (1, 1, 1, True)


@pytest.mark.parametrize("is_read", [True, False])
def test_closing_a_session_leaves_its_running_jobs_to_end_well(is_read):
    story = Story(found=[(1,)])
    other = story.open(SMALL)
    story.ask((1,)) if is_read else story.commit_prefix((2,))
    story.suspend(story.session)
    story.close(story.session)
    story.finish_all()
    story.session = other
    assert story.figures(story.ask((1,) if is_read else (2,)))[2] == 1


def test_closing_a_session_whose_grant_was_never_collected_tells_nobody():
    tiering = Tiering(400, [TierSpec()])
    session = tiering.open_session(SMALL.namespace, SMALL.slot_bytes)
    tiering.grown(tiering.take_jobs()[0], Outcome.OK)
    tiering.take_jobs()
    tiering.close_session(session)
    assert tiering.take_updates() == []
    tiering.check_integrity()


def test_uses_are_told_oldest_first_deepest_chunk_first():
    story = Story(found=[(1,), (1, 2)])
    story.ask((1, 2))
    keys = [record.key for record in story.tiering.take_uses()]
    assert keys == [SMALL.key((1, 2)), SMALL.key((1,))]
    assert story.tiering.take_uses() == []


def test_slots_of_a_full_cache_are_granted_in_parts(monkeypatch):
    """Each takes an eviction: those for 256 slots at once stood still for 13 ms."""
    monkeypatch.setattr("tiered_kv.tiering.slot_grants.EVICTED_AT_ONCE", 2)
    story = Story(host_bytes=2000, limits=Limits(credit_share=0.5))
    for number in range(200):
        story.store((number,))
    story.finish_all()
    before = story.counted("host_evicted")
    assert before, "the cache is not full"
    other = story.tiering.open_session(SMALL.namespace, SMALL.slot_bytes)
    parts = []
    while not parts or story.tiering.wants_turn:
        story.tiering.take_jobs()
        parts.append(len(granted(story.tiering, other)))
        story.tiering.check_integrity()
    assert len(parts) > 4 and max(parts) == 2
    assert story.counted("host_evicted") - before == sum(parts)
    assert not granted(story.tiering, other) and not story.tiering.take_jobs(), "nothing is left, and nothing spins"


def test_a_step_that_grants_nothing_leaves_nothing_of_it_to_do_at_once(monkeypatch):
    """An engine may be behind for as long as a medium hangs: its loop must not turn for nothing meanwhile."""
    monkeypatch.setattr("tiered_kv.tiering.slot_grants.EVICTED_AT_ONCE", 2)
    story = Story(host_bytes=2000, limits=Limits(credit_share=0.5))
    for number in range(200):
        story.store((number,))
    other = story.tiering.open_session(SMALL.namespace, SMALL.slot_bytes)
    story.tiering.take_jobs()
    assert story.tiering.wants_turn
    story.tiering.take_jobs(grants=False)
    assert not story.tiering.wants_turn
    had = len(granted(story.tiering, other))
    while story.tiering.take_jobs() or story.tiering.wants_turn:
        pass
    assert len(granted(story.tiering, other)) > 4 > had, "grants go on with the next step that makes some"


def test_leases_of_a_session_that_is_closed_end_in_parts_and_its_lookups_are_counted(monkeypatch):
    """A thousand requests that leased one long prefix: ending all at once would stand still for half a second."""
    monkeypatch.setattr("tiered_kv.tiering.tiering.LEASES_ENDED_AT_ONCE", 2)
    story = Story(host_bytes=800)
    story.store((1, 2, 3))
    other = story.open(SMALL)
    lookups = [story.ask((1, 2, 3), session=other) for _ in range(4)]
    story.close(other)
    left = [story.tiering.usage()["lookups"]]
    while story.tiering.wants_turn:
        assert story.tiering.usage()["leased_bytes"] == 3 * SMALL.slot_bytes, "what others of it lease stays leased"
        story.step()
        left.append(story.tiering.usage()["lookups"])
    assert left == [3, 2, 1, 0] and story.tiering.usage()["leased_bytes"] == 0
    assert story.tiering.hit_stats.take()[SMALL.namespace].lookups == len(lookups)
    story.wind_down()


def test_each_lookup_of_a_session_that_is_closed_is_looked_at_once():
    """Its engine had ten thousand requests in its queue: who looks for the first of them each time stands still."""

    class Counted(set):  # type: ignore[type-arg]
        seen = 0

        def __iter__(self):
            for item in super().__iter__():
                self.seen += 1
                yield item

    story = Story()
    other = story.open(SMALL)
    lookups = [story.tiering.lookup(other, LookupRequest([], [])) for _ in range(2000)]
    counted = story.tiering._sessions[other].lookups = Counted(lookups)
    story.close(other)
    parts = 1
    while story.tiering.wants_turn:
        story.tiering.take_jobs()
        parts += 1
    assert not counted and parts > 10 and counted.seen < 2 * len(lookups)


def test_leases_that_are_over_at_once_are_told_so_in_parts(monkeypatch):
    monkeypatch.setattr("tiered_kv.tiering.leases.ENDED_AT_ONCE_MAX", 2)
    story = Story(host_bytes=800)
    story.store((1, 2, 3))
    for session in story.tiering._sessions.values():
        session.lease_s = 1.0
    lookups = [story.ask((1, 2, 3)) for _ in range(5)]
    for now_s in (0.0, 2.0, 2.0, 2.0, 2.0):
        story.tiering.expire_leases(now_s)
        before = len(story.ended)
        story.step()
        assert len(story.ended) - before <= 2
    assert story.ended == lookups and story.tiering.usage()["leased_bytes"] == 0


def test_what_was_deferred_is_queued_in_parts(monkeypatch):
    """A disk that is back after an hour has room for tens of thousands of chunks at once."""
    monkeypatch.setattr("tiered_kv.tiering.write_through.REFILLED_AT_ONCE", 3)
    story = Story(host_bytes=2000)
    story.tiering.set_readable(1, False)
    for number in range(10):
        story.store((number,))
    assert story.tiering.tier_usage(1).pending_writes == 10
    story.tiering.set_readable(1, True)
    queued = []
    while not queued or story.tiering.wants_turn:
        story.tiering.take_jobs()
        queued.append(story.tiering.tier_usage(1).queued_bytes // SMALL.slot_bytes)
        story.tiering.check_integrity()
    assert queued == [3, 6, 9, 10]


def test_credits_never_starve_promotions():
    prefix = tuple(range(12))
    story = Story(host_bytes=400, limits=Limits(), found=[prefix[:n] for n in range(1, 13)])
    for _ in range(8):
        story.open(SMALL)
    story.finish_all()
    lookup = story.ask(prefix)
    story.finish_all()
    assert story.figures(lookup) == (12, 12, 12, True)


def test_a_lost_client_is_not_asked_for_the_slots_that_hold_a_slab():
    story = Story(host_bytes=160, limits=Limits(leased_share=1.0))
    lost, slots = story.session, set(story.credits[story.session])
    story.session = story.open(SMALL)
    for number in range(20):
        story.finish_all()
        story.store((number,))
    for number in range(20):  # every slot but the credits is leased
        story.ask((number,))
    story.suspend(lost)
    story.open(LARGE)
    story.tiering.take_jobs()
    assert [u for u in story.tiering.take_updates() if isinstance(u, SlotRecall) and u.session == lost] == []
    assert slots and any(map(story.tiering.slots.is_draining, slots)), "its slab is what another size waits for"


def test_a_session_that_watched_is_told_nothing_once_it_is_closed():
    story = Story()
    story.tiering.stats.watch(story.session, SMALL.namespace)
    other = story.open(SMALL)
    story.finish_all()
    story.close(story.session)
    story.store((1,), other)
    assert story.moves == []
