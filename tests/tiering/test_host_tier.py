"""Host memory: what is evicted first, how memory grows, and how slot sizes share it."""

import pytest

from tests.kit.tiering.world import LARGE, SMALL, LruStory, Story, chunks_of
from tiered_kv.tiering import host_tier
from tiered_kv.tiering.types import Grow, Limits, Outcome, Seal, SlotRecall, Write

SIZE = SMALL.slot_bytes


def test_the_least_recently_used_chunk_is_evicted_first():
    story = LruStory(host_bytes=160)
    for number in range(6):
        story.store((number,))
    story.release(story.ask((0,)))
    order = []
    for number in range(100, 130):
        before = {n for n in range(6) if story.is_in_host((n,))}
        story.store((number,))
        order += [n for n in before if not story.is_in_host((n,))]
    assert order == [1, 2, 3, 4, 5, 0]


def test_a_suffix_is_evicted_before_its_prefix_in_whatever_order_it_was_sealed():
    for order in [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)]:
        story = Story(host_bytes=160, capacities=())
        prefix = (1, 2, 3, 4)
        for chunk in chunks_of(prefix):
            story.commit(story.session, chunk)
            story.step()
            story.end_every(Grow)
        for index in order:
            story.end(Seal, prefix[: index + 1])
        present = [4]
        for number in range(100, 130):
            story.store((number,))
            held = [story.is_in_host(chunk) for chunk in chunks_of(prefix)]
            assert held == sorted(held, reverse=True), "a prefix went before its suffix"
            present.append(sum(held))
        assert present[-1] == 0


def test_a_chunk_without_its_write_is_evicted_after_its_children():
    story = Story(host_bytes=160)
    story.commit_prefix((1, 2))
    story.end_every(Seal)
    story.end(Write, fault=Outcome.UNAVAILABLE)
    for number in range(100, 130):
        story.store((number,))
        assert story.is_in_host((1,)) or not story.is_in_host((1, 2))
    assert not story.is_in_host((1,))


def test_memory_grows_until_its_limit_and_no_further():
    story = Story(host_bytes=165)
    for number in range(50):
        story.store((number,))
    assert story.tiering.usage()["host_assigned_bytes"] == 160
    assert story.tiering.slots.slot_count(SIZE) == 16


def test_refused_memory_is_not_asked_for_again_at_once():
    story = Story(host_bytes=400)
    have = story.tiering.usage()["host_assigned_bytes"]
    refused = 0
    for number in range(60):
        story.commit(story.session, (number,))
        story.step()
        while story.waiting(Grow):
            story.end(Grow, fault=Outcome.NO_ROOM)
            refused += 1
        story.finish_all()
    assert refused == 1 and story.tiering.usage()["host_assigned_bytes"] == have
    story.tiering.try_again()
    for number in range(60, 120):
        story.store((number,))
    assert story.tiering.usage()["host_assigned_bytes"] > have


def test_leases_are_bounded_by_the_memory_there_is():
    story = Story(host_bytes=400, found=chunks_of(tuple(range(10))))
    while not story.waiting(Grow):
        story.commit(story.session, (100 + len(story.jobs),))
        story.step()
    story.end(Grow, fault=Outcome.NO_ROOM)
    story.finish_all()
    story.ask(tuple(range(10)))
    have = story.tiering.usage()["host_assigned_bytes"]
    assert story.tiering.usage()["leased_bytes"] <= have // 2 < 100


def test_a_second_slot_size_gets_memory_from_a_full_arena():
    story = full_of_small_chunks()
    large = story.open_large()
    assert story.credits[large]
    story.commit(large, (1,))
    story.finish_all()
    assert story.is_in_host((1,), LARGE)


def test_two_busy_slot_sizes_end_with_about_the_same_memory():
    story = full_of_small_chunks()
    large = story.open_large()
    for number in range(80):
        for session in (large, story.session):
            if story.commit(session, (2000 + number,)):
                story.finish_all()
    small_bytes, large_bytes = (story.tiering.slots.assigned_to(space.slot_bytes) for space in (SMALL, LARGE))
    assert abs(small_bytes - large_bytes) <= 2 * story.tiering.slots.slab_bytes_max
    before = story.counted("slab_reclaimed")
    for number in range(40):
        for session in (large, story.session):
            if story.commit(session, (5000 + number,)):
                story.finish_all()
    assert story.counted("slab_reclaimed") == before, "slabs go to and fro"


def test_a_slab_in_which_something_is_leased_is_drained_and_then_taken():
    story = full_of_small_chunks(space_bytes=8 * SIZE)
    lookups = [story.ask((number,)) for number in range(500) if story.is_in_host((number,))][:4]
    large = story.open_large()
    story.step()
    promised = [story.figures(lookup) for lookup in lookups]
    for lookup in lookups:
        story.release(lookup)
    story.finish_all()
    assert promised.count((1, 1, 1, True)) == len(lookups)
    assert story.credits[large]


def test_a_slab_is_taken_in_parts_and_what_is_asked_for_between_them_stays(monkeypatch: pytest.MonkeyPatch):
    """A slab of small chunks has 131,072: evicting all at once would stand still for most of a second."""
    monkeypatch.setattr(host_tier, "EVICTED_AT_ONCE", 2)
    story = full_of_small_chunks(space_bytes=80 * SIZE)
    before = [number for number in range(500) if story.is_in_host((number,))]
    large = story.open(LARGE)
    story.tiering.take_jobs()
    assert story.tiering.wants_turn
    left = [number for number in before if story.is_in_host((number,))]
    assert len(left) == len(before) - 2
    going = [number for number in left if story.tiering.slots.is_draining(story.entry((number,)).slot)]
    lookup = story.ask((going[-1],))
    assert story.figures(lookup) == (1, 1, 1, True)
    while story.tiering.wants_turn:
        story.tiering.take_jobs()
    assert [number for number in going if story.is_in_host((number,))] == going[-1:]
    assert not story.counted("slab_reclaimed"), "the slab went with a chunk that was promised"
    story.release(lookup)
    story.finish_all()
    assert story.counted("slab_reclaimed") == 1 and story.credits[large]


def test_an_idle_session_is_asked_for_the_credits_that_hold_a_slab():
    story = Story(host_bytes=160, limits=Limits(leased_share=1.0))
    idle, idle_slots = story.session, list(story.credits[story.session])  # all of the first slab
    story.session = story.open(SMALL)
    for number in range(20):
        story.finish_all()
        story.store((number,))
    for number in range(20):  # every slot but the credits is leased
        story.ask((number,))
    large = story.open(LARGE)
    story.tiering.take_jobs()
    [recall] = [update for update in story.tiering.take_updates() if isinstance(update, SlotRecall)]
    assert (recall.session, sorted(recall.slots)) == (idle, sorted(idle_slots))
    for slot in idle_slots:
        story.credits[idle].remove(slot)
        story.tiering.give_back(idle, slot)
    story.finish_all()
    assert story.credits[large]


def test_a_session_that_rests_holds_no_slab():
    """One that neither rests nor answers keeps the last slab that could be had from another slot size for ever."""
    story = Story(host_bytes=160, limits=Limits(leased_share=1.0))
    idle = story.session
    story.session = story.open(SMALL)
    for number in range(20):
        story.finish_all()
        story.store((number,))
    for number in range(20):
        story.ask((number,))
    large = story.open(LARGE)
    story.credits[idle] = []  # it does not hear what is recalled
    for _ in range(10):
        story.finish_all()
    assert not story.credits[large]
    story.rest(idle)
    story.finish_all()
    assert story.credits[large]


def test_memory_of_a_slot_size_that_nobody_uses_goes_to_who_needs_it():
    story = full_of_small_chunks()
    story.close(story.session)
    story.session = 0
    large = story.open_large()
    for number in range(200):
        story.commit(large, (number,))
        story.finish_all()
    assert story.tiering.slots.assigned_to(LARGE.slot_bytes) > story.tiering.slots.host_bytes // 2
    assert story.tiering.slots.assigned_to(SIZE) < story.tiering.slots.slab_bytes_max


def test_a_slot_size_that_needs_several_slabs_for_one_slot_gets_them():
    story = full_of_small_chunks(space_bytes=160)
    huge = story.open_space(b"huge-namespace--", 40)
    assert story.tiering.slots.slot_count(40) > 0 and story.credits[huge]


def full_of_small_chunks(space_bytes=400):
    story = Story(host_bytes=space_bytes)
    for number in range(space_bytes // SIZE + 20):
        story.store((number,))
    assert story.tiering.usage()["host_assigned_bytes"] > space_bytes - SIZE
    return story


def stores_until_gone(story: Story, path: tuple[int, ...]) -> int:
    stores = 0
    while story.is_in_host(path):
        story.store((1000 + stores,))
        stores += 1
    return stores


def test_a_lease_does_not_cost_a_chunk_its_uses():
    leased, other = Story(capacities=()), Story(capacities=())
    for story in (leased, other):
        story.store((1,))
    leased.release(leased.ask((1,)))  # out of the order of eviction and in again
    assert stores_until_gone(leased, (1,)) > 1.5 * stores_until_gone(other, (1,))


def test_a_slot_is_not_looked_for_through_a_whole_slab_that_is_drained(monkeypatch: pytest.MonkeyPatch):
    """The oldest chunks lie in one slab. While one of them is held it waits, and who wants a slot meets the others."""
    monkeypatch.setattr(host_tier, "EVICTED_AT_ONCE", 2)
    story = full_of_small_chunks(space_bytes=80 * SIZE)
    numbers = [number for number in range(500) if story.is_in_host((number,))]
    lookups = [story.ask((number,)) for number in numbers[::3]]  # one of every slab at least
    story.open(LARGE)
    story.tiering.take_jobs()
    draining = [n for n in numbers if story.tiering.slots.is_draining(story.entry((n,)).slot)]
    assert len(draining) > 4
    host, most, slots = story.tiering._host, 0, []
    for _ in range(2 * len(numbers)):
        before = host.evicted_count
        slot = host.take_for_store(SIZE, SMALL.namespace)
        most = max(most, host.evicted_count - before)
        if slot is host_tier.NoSlot.NONE:
            break
        if slot is not host_tier.NoSlot.LOOKING:
            slots.append(slot)
    assert most == 2
    for slot in slots:
        host.give(slot)
    for lookup in lookups:
        story.release(lookup)
    story.finish_all()
