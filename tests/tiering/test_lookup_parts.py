"""A lookup that takes many slots goes in parts, over several steps: what comes between two of them is seen."""

import pytest

from tests.kit.tiering.world import SMALL, Path, Story, chunks_of
from tiered_kv.tiering import host_tier, lookups
from tiered_kv.tiering.eviction import EvictionOrder
from tiered_kv.tiering.types import HOST, Limits, Outcome, Probe, Read, Seal

LONG = (1, 2, 3, 4, 5, 6)
AMPLE = Limits(leased_share=1.0, request_share=1.0)


@pytest.fixture(params=["READ_AT_ONCE", "EVICTED_AT_ONCE"])
def story(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Story:
    """A full cache whose disk has a long prefix; a step begins with one chunk of it, or has one go for it."""
    story = Story(host_bytes=100, limits=AMPLE, found=chunks_of(LONG))
    for number in range(100, 110):
        story.store((number,))
    story.rest(story.session)  # holds no empty slot
    monkeypatch.setattr(lookups, request.param, 1)
    story.step()
    assert story.tiering.usage()["host_ready_chunks"] >= 8, "there is room"
    return story


def begun(story: Story) -> int:
    return len(story.waiting(Read))


def test_its_session_is_told_of_what_is_begun_and_that_more_follows(story: Story) -> None:
    lookup = story.lookup(story.session, LONG)
    assert begun(story) == 0 and story.lookups[lookup].update is None
    story.step()
    answer = story.answer(lookup)
    first = len(answer.slots)
    assert 0 < first < 6 and first == begun(story)
    assert (answer.held, answer.ready, answer.queued, answer.is_done) == (6, 0, 6 - first, False)
    assert answer.unbegun == 6 - first and not answer.in_line, "it waits for nobody"
    assert [(run.tier, run.chunks) for run in answer.arriving] == [(HOST + 1, 6)], "what the waiting rule judges by"
    assert story.tiering.wants_turn
    story.finish_all()
    while story.tiering.wants_turn:
        story.step()
    story.finish_all()
    assert story.figures(lookup) == (6, 6, 6, True)
    assert story.answer(lookup).queued == 0 and not story.tiering.wants_turn


def test_another_lookup_is_answered_between_two_parts(story: Story) -> None:
    long = story.ask(LONG)
    assert not story.answer(long).is_done and story.answer(long).queued
    assert story.figures(story.ask((109,))) == (1, 1, 1, True)
    story.finish_all()
    assert story.figures(long) == (6, 6, 6, True)


def test_one_that_is_released_between_two_parts_frees_all(story: Story) -> None:
    lookup = story.ask(LONG)
    assert story.answer(lookup).queued and story.tiering.usage()["leased_bytes"] == 6 * SMALL.slot_bytes
    reads = begun(story)
    story.release(lookup)
    assert story.tiering.usage()["leased_bytes"] == 0
    story.step()
    assert begun(story) == reads and not story.tiering.wants_turn


@pytest.mark.parametrize("end", ["close", "suspend"])
def test_a_session_that_ends_between_two_parts_leaves_nothing(story: Story, end: str) -> None:
    story.ask(LONG)
    reads = begun(story)
    story.suspend(story.session)
    if end == "close":
        story.close(story.session)
    story.step()
    assert begun(story) == reads and not story.tiering.wants_turn
    story.wind_down()


def test_what_is_erased_between_two_parts_is_not_promised(story: Story) -> None:
    lookup = story.ask(LONG)
    told = len(story.answer(lookup).slots)
    assert told < 5
    for path in reversed(chunks_of(LONG)[4:]):
        story.remove(HOST + 1, SMALL.namespace, [SMALL.key(path)], leaves_holes=False)
    story.finish_all()
    assert story.figures(lookup) == (4, 4, 4, True)
    assert story.tiering.usage()["leased_bytes"] == 4 * SMALL.slot_bytes


def test_a_read_of_another_lookup_that_fails_between_two_parts_is_made_again(story: Story) -> None:
    long = story.ask(LONG)
    assert story.answer(long).queued
    for place in reversed(story.waiting(Read)):
        story.finish(place, Outcome.UNAVAILABLE)
    story.finish_all()
    answer = story.answer(long)
    assert answer.is_done and answer.ready == len(answer.slots) == 0, "it is cut where its own read failed"
    assert story.tiering.usage()["leased_bytes"] == 0
    story.release(long)
    again = story.ask(LONG)
    story.finish_all()
    assert story.figures(again) == (6, 6, 6, True)


def test_held_chunks_that_come_first_are_met_once_and_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases leave the order of eviction as it is; who looks for a chunk to evict takes out what it meets of them."""
    monkeypatch.setattr(host_tier, "HELD_TAKEN_OUT_AT_ONCE", 2)
    story = Story(host_bytes=100, limits=AMPLE)
    prefix: Path = (1, 2, 3, 4, 5)
    for path in chunks_of(prefix):
        story.store(path)
    order = story.tiering._host._orders[SMALL.slot_bytes, False]
    lookup = story.ask(prefix)
    assert len(order) == 5, "a lease takes nothing out"
    story.flush_host()
    assert len(order) == sum(not entry.leases for entry in order), "what is leased was met, and taken out"
    assert story.figures(lookup) == (5, 5, 5, True)
    assert all(story.is_in_host(path) for path in chunks_of(prefix))
    story.release(lookup)
    story.step()
    assert all(story.entry(path) in order for path in chunks_of(prefix))
    story.flush_host(avoid=prefix)
    story.wind_down()


def test_a_prompt_that_is_committed_chunk_by_chunk_is_dated_once_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story(host_bytes=800)
    dated: list[list[bytes]] = []
    record_use = EvictionOrder.record_use

    def noted(self: EvictionOrder, namespace: bytes, prefix: list[bytes]) -> None:
        if self is story.tiering._tiers[1].order:
            dated.append(list(prefix))
        record_use(self, namespace, prefix)

    monkeypatch.setattr(EvictionOrder, "record_use", noted)
    for path in [*chunks_of(LONG), (8,)]:
        assert story.commit(story.session, path)
        story.tiering.touch_prefix(SMALL.key(path))
    story.step()
    assert dated == [[SMALL.key(path) for path in reversed(chunks_of(LONG))], [SMALL.key((8,))]]
    story.end_every(Seal)
    story.finish_all()


def go_on(story: Story, steps: int = 12) -> None:
    """Step after step, as the server's loop does while there is something to go on with."""
    for _ in range(steps):
        if not story.tiering.wants_turn:
            return
        story.step()
    raise AssertionError("the loop never comes to rest")


def test_a_tail_that_is_removed_between_two_parts_is_given_up(story: Story) -> None:
    """An erasure, an eviction or a disk that fails: the last part finds that nobody has it."""
    story.restore_tail(HOST + 1, SMALL, LONG, "a")
    lookup = story.lookup(story.session, LONG, wants_tails=True)
    story.step()
    assert len(story.answer(lookup).slots) < len(LONG) and story.answer(lookup).tails
    story.remove(HOST + 1, SMALL.namespace, [SMALL.tail(LONG, "a").key], leaves_holes=False)
    go_on(story)
    story.finish_all()
    assert story.figures(lookup) == (6, 6, 6, True) and story.answer(lookup).tails == ()
    story.wind_down()


def test_a_tier_that_fails_between_two_parts_cuts_it_and_what_is_told_of_it(story: Story) -> None:
    lookup = story.ask(LONG)
    begun_chunks = len(story.answer(lookup).slots)
    story.tiering.set_readable(HOST + 1, False)
    go_on(story)
    story.finish_all()
    assert story.figures(lookup) == (begun_chunks, begun_chunks, begun_chunks, True)
    assert story.tiering.usage()["leased_bytes"] == begun_chunks * SMALL.slot_bytes
    story.tiering.set_readable(HOST + 1, True)
    story.release(lookup)
    again = story.ask(LONG)
    story.finish_all()
    go_on(story)
    story.finish_all()
    assert story.figures(again) == (6, 6, 6, True)


def test_what_a_search_finds_behind_a_gap_between_two_parts_is_not_called_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    story = Story(host_bytes=400, limits=AMPLE, is_last_shared=True)
    story.others_store(SMALL, LONG)
    known = LONG[:4]
    story.ask(known, start=4)
    story.finish_all()  # the first four are known to be there
    other = story.ask(known, start=3)
    assert story.waiting(Read, known), "another lookup reads the fourth"
    monkeypatch.setattr(lookups, "READ_AT_ONCE", 1)
    story.step()
    lookup = story.ask(LONG)
    assert story.waiting(Probe) and story.answer(lookup).queued
    story.damage(HOST + 1, SMALL.key(known), None)
    story.end(Read, known)
    assert story.figures(other) == (3, 0, 0, True)
    go_on(story)
    story.finish_all()
    assert story.figures(lookup) == (3, 3, 3, True)
    story.wind_down()


def test_one_whose_chunks_are_lost_while_it_looks_for_room_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tier, "HELD_TAKEN_OUT_AT_ONCE", 2)
    story = Story(host_bytes=100, limits=AMPLE, found=chunks_of(LONG))
    for number in range(100, 110):
        story.store((number,))
    story.rest(story.session)
    oldest = [number for number in range(100, 110) if story.is_in_host((number,))][:4]
    for number in oldest:
        story.ask((number,))
    for number in set(range(100, 110)) - set(oldest):
        story.tiering.touch_prefix(SMALL.key((number,)))  # used later than what is held
    story.step()
    lookup = story.lookup(story.session, LONG)
    first = sum(story.is_in_host(path) for path in chunks_of(LONG))
    assert first < 6 and story.tiering._promotions.wants_turn, "it did not meet what is held"
    for path in reversed(chunks_of(LONG)[first:]):
        story.remove(HOST + 1, SMALL.namespace, [SMALL.key(path)], leaves_holes=True)
    go_on(story)
    story.finish_all()
    assert story.figures(lookup) == (first, first, first, True)


def test_a_short_lookup_of_another_engine_does_not_wait_for_all_of_a_long_one(story: Story) -> None:
    """Nor for one long lookup after the other."""
    story.restore(HOST + 1, SMALL, (7,))
    other = story.open(SMALL)
    story.rest(other)
    story.step()
    longs = [story.lookup(story.session, LONG), story.lookup(story.session, LONG[:5])]
    story.step()
    short = story.lookup(other, (7,))
    for _ in range(3):
        story.step()
    assert len(story.answer(short).slots) == 1, "it waits behind the long ones"
    assert any(story.answer(one).queued for one in longs)
    while story.jobs or story.tiering.wants_turn:
        story.finish_all()
    assert story.figures(longs[0]) == (6, 6, 6, True) and story.figures(short) == (1, 1, 1, True)


def test_of_one_engine_the_lookup_that_began_first_goes_on_first(story: Story) -> None:
    story.restore(HOST + 1, SMALL, (7,))
    first = story.lookup(story.session, LONG)
    second = story.lookup(story.session, (7,))
    story.step()
    while story.answer(first).queued:
        assert not story.answer(second).slots
        story.step()
    while story.jobs or story.tiering.wants_turn:
        story.finish_all()
    assert story.figures(first) == (6, 6, 6, True) and story.figures(second) == (1, 1, 1, True)


def test_a_chunk_that_is_stored_again_between_two_parts_needs_no_read(story: Story) -> None:
    """Its file was removed meanwhile: the part whose turn it is takes what a client has brought."""
    lookup = story.ask(LONG)
    lost = LONG[:5]
    for path in (LONG, lost):
        story.remove(HOST + 1, SMALL.namespace, [SMALL.key(path)], leaves_holes=False)
    other = story.open(SMALL)
    while not story.credits[other]:
        for place in reversed(range(len(story.jobs))):
            story.finish(place)
        story.step()
    story.commit(other, lost)
    story.finish_all()
    go_on(story)
    story.finish_all()
    held = story.figures(lookup)[0]
    assert held in (4, 5) and story.figures(lookup) == (held, held, held, True)
    story.wind_down()
