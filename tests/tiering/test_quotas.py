"""Quotas of namespaces: nobody pushes another below its minimum, nobody passes its maximum, whatever comes and goes."""

import random

import pytest

from tests.kit.counts import count, seed
from tests.kit.spaces import Space
from tests.kit.tiering.world import SMALL, Story
from tiered_kv.tiering import secondary_tier
from tiered_kv.tiering.quotas import NamespaceUsage, Quota, Quotas
from tiered_kv.tiering.types import HOST, Delete, Grow, Limits, Outcome, Seal

SIZE = SMALL.slot_bytes
OTHER = Space(b"other-namespace-", SIZE)
THIRD = Space(b"third-namespace-", SIZE)
LARGE = Space(b"large-namespace-", 15)


class SharedStory(Story):
    """Namespaces with shares, each with one session."""

    def join(self, space: Space, at_least: float = 0.0, at_most: float = 1.0) -> int:
        """Open a session that states a share."""
        self.tiering.quotas.set(space.namespace, Quota(at_least, at_most, space.slot_bytes))
        if space == SMALL:
            return self.session
        return self.open_space(space.namespace, space.slot_bytes)

    def taken(self, space: Space, tier: int) -> int:
        return self.tiering.usage_of(tier).by_namespace().get(space.namespace, 0)

    def in_host(self, space: Space, number: int) -> int:
        """How many of the first chunks of prompts 0 to ``number`` are in host memory."""
        return sum(self.is_in_host((one,), space) for one in range(number))

    def below(self, space: Space, number: int) -> int:
        return sum(space.key((one,)) in self.media[1] for one in range(number))


def busy_neighbour(at_least: float) -> SharedStory:
    """Fifteen prompts of one that may keep so much, then two hundred of another."""
    story = SharedStory(host_bytes=20 * SIZE, capacities=(30 * SIZE,))
    story.join(SMALL, at_least=at_least)
    other = story.join(OTHER)
    for number in range(15):
        story.store((number,))
    for number in range(200):
        story.store((number,), other)
    return story


def test_a_minimum_is_kept_in_every_tier_however_much_others_store() -> None:
    story = busy_neighbour(at_least=0.5)
    assert story.taken(SMALL, 1) == 15 * SIZE and story.below(SMALL, 15) == 15
    assert 9 * SIZE <= story.taken(SMALL, HOST) <= 11 * SIZE
    assert story.taken(OTHER, 1) == 15 * SIZE, "the rest is the other's, all of it"


def test_without_a_minimum_the_same_traffic_pushes_everything_out() -> None:
    story = busy_neighbour(at_least=0.0)
    assert story.below(SMALL, 15) == 0 and story.in_host(SMALL, 15) == 0


def test_what_a_minimum_does_not_take_is_everybodys_until_its_namespace_stores() -> None:
    story = SharedStory(host_bytes=20 * SIZE, capacities=(20 * SIZE,))
    story.join(SMALL, at_least=0.5)
    other = story.join(OTHER)
    for number in range(50):
        story.store((number,), other)
    assert story.taken(OTHER, 1) == 20 * SIZE
    for number in range(10):
        story.store((number,))
    assert story.taken(SMALL, 1) == story.taken(OTHER, 1) == 10 * SIZE
    assert story.below(SMALL, 10) == 10


def test_above_its_minimum_a_namespace_loses_what_is_oldest_to_others() -> None:
    story = SharedStory(host_bytes=100 * SIZE, capacities=(20 * SIZE,))
    story.join(SMALL, at_least=0.25)
    other = story.join(OTHER)
    for number in range(20):
        story.store((number,))
    for number in range(15):
        story.store((number,), other)
    assert story.below(SMALL, 20) == 5 and all(SMALL.key((n,)) in story.media[1] for n in range(15, 20))
    story.store((15,), other)
    assert story.below(SMALL, 20) == 5, "now the other's own go"


def test_who_is_at_its_minimum_replaces_its_own_when_all_is_kept() -> None:
    story = SharedStory(host_bytes=100 * SIZE, capacities=(20 * SIZE,))
    story.join(SMALL, at_least=0.5)
    other = story.join(OTHER, at_least=0.5)
    for number in range(10):
        story.store((number,))
        story.store((number,), other)
    story.store((10,))
    assert story.below(OTHER, 10) == 10
    assert SMALL.key((0,)) not in story.media[1] and SMALL.key((10,)) in story.media[1]


def test_a_maximum_is_not_passed_though_there_is_room() -> None:
    story = SharedStory(host_bytes=40 * SIZE, capacities=(50 * SIZE,))
    story.join(SMALL, at_most=0.2)
    for number in range(60):
        story.store((number,))
        assert story.taken(SMALL, 1) <= 10 * SIZE
        assert story.taken(SMALL, HOST) <= 8 * SIZE
    assert story.below(SMALL, 60) == 10 and all(SMALL.key((n,)) in story.media[1] for n in range(50, 60))
    assert story.in_host(SMALL, 60) >= 4, "what its sessions hold empty is a part of it, not all"


def test_a_lookup_gets_what_fits_its_maximum_and_the_rest_is_a_miss() -> None:
    story = SharedStory(host_bytes=40 * SIZE, capacities=(None,), found=[tuple(range(d)) for d in range(1, 31)])
    story.join(SMALL, at_most=0.5)
    lookup = story.ask(tuple(range(30)))
    story.finish_all()
    held, promised, ready, is_done = story.figures(lookup)
    assert held == 30 and is_done and 1 <= ready == promised <= 7
    story.release(lookup)
    story.finish_all()


def test_a_write_that_fits_no_share_is_dropped_and_counted() -> None:
    story = SharedStory(host_bytes=40 * SIZE, capacities=(50 * SIZE,))
    story.join(SMALL, at_most=0.1)
    story.store((1, 2, 3, 4, 5))
    story.tiering.set_pinned(1, [SMALL.key((1, 2, 3, 4, 5))])
    story.store((9,))
    assert story.counted("write_dropped_over_share") == 1 and story.below(SMALL, 10) == 1
    story.tiering.set_pinned(1, [])
    story.store((10,))
    assert SMALL.key((10,)) in story.media[1]


def test_a_maximum_that_was_passed_because_a_deletion_failed_is_made_good_by_the_next_write() -> None:
    story = SharedStory(host_bytes=40 * SIZE, capacities=(50 * SIZE,))
    story.join(SMALL, at_most=0.1)
    for number in range(5):
        story.store((number,))
    story.commit_prefix((7,))
    while not story.waiting(Delete):
        story.finish(0)
    story.end(Delete, fault=Outcome.UNAVAILABLE)
    story.finish_all()
    assert story.taken(SMALL, 1) == 6 * SIZE
    story.store((8,))
    assert story.taken(SMALL, 1) == 5 * SIZE


def test_a_maximum_that_is_lowered_is_kept_again_after_some_more_chunks() -> None:
    """As an engine that comes back with another maximum to a server that ran on."""
    story = SharedStory(host_bytes=40 * SIZE, capacities=(1000 * SIZE,))
    story.join(SMALL)
    for number in range(60):
        story.store((number,))
    assert story.taken(SMALL, HOST) == 40 * SIZE
    story.tiering.quotas.set(SMALL.namespace, Quota(at_most=0.2, slot_bytes=SIZE))
    for number in range(100, 140):
        story.store((number,))
    for number in range(140, 150):
        story.store((number,))
        assert story.taken(SMALL, HOST) == 8 * SIZE, "all of it: one goes for each that comes"


def test_what_a_lowered_maximum_costs_is_deleted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secondary_tier, "EVICTED_AT_ONCE", 4)
    story = SharedStory(host_bytes=40 * SIZE, capacities=(100 * SIZE,))
    story.join(SMALL)
    for number in range(50):
        story.store((number,))
    story.tiering.quotas.set(SMALL.namespace, Quota(at_most=0.1, slot_bytes=SIZE))
    for number in range(60, 80):
        before = story.taken(SMALL, 1)
        story.store((number,))
        assert max(10 * SIZE, before - 3 * SIZE) == story.taken(SMALL, 1), "four go, and one comes"
        assert SMALL.key((number,)) in story.media[1]
    assert story.taken(SMALL, 1) == 10 * SIZE


def test_a_medium_that_is_too_full_takes_from_minima_too() -> None:
    story = SharedStory(host_bytes=40 * SIZE, capacities=(20 * SIZE,))
    story.join(SMALL, at_least=1.0)
    for number in range(20):
        story.store((number,))
    story.tiering.restored(1, unlisted_bytes=5 * SIZE)
    story.finish_all()
    assert story.below(SMALL, 20) == 15


def test_a_slot_size_below_what_it_keeps_gets_memory_of_one_that_has_more() -> None:
    story = SharedStory(host_bytes=1600, capacities=())
    story.join(SMALL)
    for number in range(200):
        story.store((number,))
    large = story.join(LARGE, at_least=0.75)
    for number in range(200):
        story.store((number,), large)
    assert story.taken(LARGE, HOST) >= 0.75 * 1600 - 200, "eight slabs: less one that is not worth a drain"
    for number in range(300, 600):
        story.store((number,))
    assert story.taken(LARGE, HOST) >= 0.75 * 1600 - 200


def test_a_slot_size_in_use_keeps_one_slab_whatever_others_keep() -> None:
    """Memory moves by slabs, an eighth of all of it here: who may have a tenth gets one, or keeps the one it has."""
    for is_first in (True, False):
        story = SharedStory(host_bytes=1600, capacities=(None,))
        large = story.join(LARGE) if is_first else 0
        story.join(SMALL, at_least=0.9)
        for number in range(200):
            story.store((number,))
        large = large or story.join(LARGE)
        for number in range(200, 400):
            story.store((number,))
        assert story.credits[large] and story.tiering.slots.slot_count(LARGE.slot_bytes) == 13
        assert story.taken(SMALL, HOST) >= 1600 - 200 - SIZE, "all but that slab"


def test_three_slot_sizes_share_what_two_of_them_nearly_keep() -> None:
    story = SharedStory(host_bytes=1600, capacities=())
    story.join(SMALL, at_least=0.45)
    large = story.join(LARGE, at_least=0.45)
    for number in range(150):
        story.store((number,))
        story.store((number,), large)
    third = story.join(Space(b"middl-namespace-", 12))
    for number in range(150, 300):
        story.store((number,))
        story.store((number,), large)
    assert story.credits[third]
    assert min(story.taken(SMALL, HOST), story.taken(LARGE, HOST)) >= 0.45 * 1600 - 200


def test_engines_of_one_model_hold_no_more_empty_slots_together_than_their_share_allows() -> None:
    story = SharedStory(host_bytes=8000, capacities=(None,))
    sessions = [story.join(OTHER, at_most=0.1), *(story.open_space(OTHER.namespace, SIZE) for _ in range(11))]
    empty = [len(story.credits[session]) for session in sessions]
    assert sum(empty) <= 0.5 * 0.1 * 8000 / SIZE and all(empty), "half of its share, and everybody has some"
    for prompt in range(20):
        story.store(tuple(range(100 * prompt, 100 * prompt + 8)), sessions[0])
    lookup = story.ask(tuple(range(8)), session=sessions[-1])
    story.finish_all()
    assert story.figures(lookup) == (8, 8, 8, True)


def test_engines_of_a_small_maximum_take_turns() -> None:
    story = SharedStory(host_bytes=800, capacities=(None,))
    sessions = [story.join(OTHER, at_most=0.05), *(story.open_space(OTHER.namespace, SIZE) for _ in range(3))]
    stored = dict.fromkeys(sessions, 0)
    for number in range(40):
        for session in sessions:
            stored[session] += story.commit(session, (1000 * session + number,))
        story.finish_all()
    assert min(stored.values()) >= 10, "two slots for four engines"


@pytest.mark.parametrize("is_at_maximum", [False, True])
def test_a_load_drops_no_write_that_another_keeps(is_at_maximum: bool) -> None:
    limits = Limits(write_queue_share=1.0)
    story = SharedStory(host_bytes=200, capacities=(None,), limits=limits, found=[(1,), (2,), (3,)])
    story.join(SMALL, at_most=0.3 if is_at_maximum else 1.0)
    other = story.join(OTHER, at_least=0.8)
    path: tuple[int, ...] = ()
    while story.commit(other, (*path, 9)):
        path = (*path, 9)
        story.step()
        story.end_every(Seal)
        story.end_every(Grow)
    before = story.taken(OTHER, HOST)
    while story.commit(story.session, (50 + len(path),)):  # its own writes wait, too
        path = (*path, 9)
        story.step()
        story.end_every(Seal)
    for number in (1, 2, 3):
        story.ask((number,))
    assert story.taken(OTHER, HOST) >= min(before, 0.8 * 200)
    assert story.taken(SMALL, HOST) <= (60 if is_at_maximum else 200)
    assert story.counted("write_dropped_for_load") > 0, "its own went instead"
    story.finish_all()


@pytest.mark.parametrize(("most_bytes", "dropped"), [(29, 1), (30, 2)])
def test_a_load_drops_a_write_of_another_up_to_its_own_maximum_and_not_a_byte_beyond(
    most_bytes: int, dropped: int
) -> None:
    limits = Limits(leased_share=1.0, request_share=1.0, write_queue_share=1.0, credit_share=0.2)
    story = SharedStory(host_bytes=160, capacities=(None,), limits=limits)
    for number in (1, 2):
        story.restore(1, OTHER, (number,))
    other = story.join(OTHER, at_most=most_bytes / 160)
    path: tuple[int, ...] = ()
    while story.credits[story.session]:
        path = (*path, 9)
        story.store_without_writes(path)
    assert story.taken(OTHER, HOST) == SIZE, "an empty slot"
    first = story.ask((1,), session=other)
    assert len(story.answer(first).slots) == 1 and story.counted("write_dropped_for_load") == 1
    second = story.ask((2,), session=other)
    assert len(story.answer(second).slots) == dropped - 1 and story.counted("write_dropped_for_load") == dropped
    assert story.taken(OTHER, HOST) == (1 + dropped) * SIZE
    story.finish_all()


def test_minima_are_of_the_memory_that_the_machine_gives() -> None:
    story = SharedStory(host_bytes=1600, capacities=(None,))

    def settle() -> None:
        """The machine has 600 bytes to give."""
        story.step()
        while story.jobs:
            is_refused = isinstance(story.jobs[0], Grow) and story.tiering.slots.assigned_bytes > 600
            story.finish(0, Outcome.NO_ROOM if is_refused else None)
            story.step()

    story.join(SMALL, at_least=0.5)
    for number in range(100):
        story.commit(story.session, (number,))
        settle()
    assert story.tiering.slots.limit_bytes == 600
    story.tiering.quotas.set(OTHER.namespace, Quota(0.5, 1.0, SIZE))
    other = story.open(OTHER)
    for number in range(200):
        story.commit(other, (number,))
        settle()
        story.commit(story.session, (1000 + number,))
        settle()
    assert story.taken(OTHER, HOST) >= 0.5 * 600 - SIZE and story.taken(SMALL, HOST) >= 0.5 * 600 - SIZE
    story.tiering.try_again()
    assert story.tiering.usage_of(HOST).capacity_bytes == 1600


def test_without_a_minimum_two_slot_sizes_share_memory_equally() -> None:
    story = SharedStory(host_bytes=1600, capacities=())
    for number in range(200):
        story.store((number,))
    large = story.join(LARGE)
    for number in range(200):
        story.store((number,), large)
    assert story.taken(LARGE, HOST) <= 0.5 * 1600 + 200


@pytest.mark.parametrize("number", range(seed(), seed() + count("SEEDS", 20)))
def test_minima_and_maxima_hold_in_any_history_of_stores_and_lookups(number: int) -> None:
    source = random.Random(number)
    spaces = [SMALL, OTHER, THIRD]
    story = SharedStory(host_bytes=source.choice([200, 400]), capacities=(source.choice([150, 300, 600]),))
    minima = [source.choice([0.0, 0.1, 0.3]) for _ in spaces]
    shares = [Quota(least, max(least, source.choice([0.2, 0.5, 1.0]))) for least in minima]
    sessions = [story.join(space, one.at_least, one.at_most) for space, one in zip(spaces, shares, strict=True)]
    most_empty = dict.fromkeys(spaces, 0)
    reached: set[tuple[bytes, int | None]] = set()
    for _ in range(150):
        pick = source.randrange(3)
        path = tuple(source.randrange(4) for _ in range(source.randrange(1, 4)))
        if source.random() < 0.3:
            story.release(story.ask(path, session=sessions[pick]))
            story.finish_all()
        else:
            for depth in range(1, len(path) + 1):
                story.commit(sessions[pick], path[:depth])
                story.finish_all()
        for space, session in zip(spaces, sessions, strict=True):  # they count, and come and go
            empty_bytes = len(story.credits[session]) * SIZE
            most_empty[space] = max(most_empty[space], empty_bytes)
        for space, share in zip(spaces, shares, strict=True):
            for tier in (HOST, *story.media):
                size_bytes, capacity_bytes = story.taken(space, tier), story.tiering.usage_of(tier).capacity_bytes
                assert capacity_bytes is not None
                assert size_bytes <= share.at_most * capacity_bytes, "more than its maximum"
                slack = SIZE if tier == 1 else SIZE + most_empty[space]
                if size_bytes >= share.at_least * capacity_bytes - slack:
                    reached.add((space.namespace, tier))
                else:
                    assert (space.namespace, tier) not in reached, "others pushed it below its minimum"


def test_taken_counts_and_forgets() -> None:
    shares = Quotas()
    taken = NamespaceUsage(shares, lambda: 100)
    taken.add(b"a", 30)
    taken.add(b"a", 0)
    assert not taken.keeps(b"a", 30) and taken.excess_bytes(b"a", 1000) < 0, "no share, no rule"
    shares.set(b"a", Quota(0.3, 0.4))
    assert taken.keeps(b"a", 1) and taken.excess_bytes(b"a", 10) == 0 and taken.excess_bytes(b"a", 20) == 10
    taken.remove(b"a", 30)
    assert taken.by_namespace() == {}
    shares.set(b"a", Quota())
    assert shares.get(b"a") is None
    with pytest.raises(KeyError):
        taken.remove(b"a", 1)
    NamespaceUsage(shares, lambda: None).check_integrity([(b"a", 0)])
