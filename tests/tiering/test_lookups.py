"""Lookups: what is promised, what is leased, and when a session is told."""

import pytest

from tests.kit.spaces import Space
from tests.kit.tiering.world import SMALL, Story, chunks_of
from tiered_kv.tiering.lookups import LookupRequest
from tiered_kv.tiering.types import HOST, Grow, Limits, Outcome, Read, Seal

PREFIX = (1, 2, 3, 4)


def test_an_unknown_prefix_is_a_miss_at_once():
    story = Story()
    assert story.figures(story.ask(PREFIX)) == (0, 0, 0, True)


def test_a_stored_prefix_is_ready_at_once():
    story = Story()
    story.store(PREFIX)
    assert story.figures(story.ask((*PREFIX, 9))) == (4, 4, 4, True)
    assert not story.waiting(Read)


def test_chunks_that_are_being_sealed_are_promised_but_not_ready():
    story = Story()
    story.commit_prefix(PREFIX[:2])
    lookup = story.ask(PREFIX)
    assert story.figures(lookup) == (2, 2, 0, False)
    story.end(Seal, PREFIX[:2])
    assert story.figures(lookup) == (2, 2, 0, False)  # the second alone is of no use
    story.end(Seal, PREFIX[:1])
    assert story.figures(lookup) == (2, 2, 2, True)


def test_a_prefix_on_disk_is_promoted_and_grows_in_order():
    story = Story()
    story.keep_only_below(PREFIX)
    lookup = story.ask(PREFIX)
    assert story.figures(lookup) == (4, 4, 0, False)
    for length, told in [(3, 0), (1, 1), (4, 1), (2, 4)]:
        story.end(Read, PREFIX[:length])
        assert story.answer(lookup).ready == told
    assert story.answer(lookup).is_done


def test_a_request_that_is_looked_up_anew_counts_once():
    """A queue that waits for long asks for its prompts every second: they are no more wanted for that."""
    story = Story()
    story.store(PREFIX[:2])
    waiting = story.ask(PREFIX)
    for _ in range(3):
        waiting = story.ask_anew(waiting, PREFIX)
    assert story.figures(waiting) == (2, 2, 2, True)
    assert story.uses(PREFIX) == [1, 1]
    story.store(PREFIX)  # another request computed the rest meanwhile
    waiting = story.ask_anew(waiting, PREFIX)
    assert story.figures(waiting) == (4, 4, 4, True)
    assert story.uses(PREFIX) == [1, 1, 1, 1]
    story.release(waiting)
    story.release(story.ask(PREFIX))
    assert story.uses(PREFIX) == [2, 2, 2, 2]


def test_an_answer_that_came_while_its_prompt_waited_is_asked_for_by_it():
    story = Story()
    story.store(PREFIX[:2])
    waiting = story.ask(PREFIX)
    assert story.commit(story.session, PREFIX[:3], is_answer=True)
    story.finish_all()
    assert not story.is_below(PREFIX[:3])
    story.release(story.ask_anew(waiting, PREFIX))
    story.finish_all()
    assert story.uses(PREFIX) == [1, 1, 1] and story.is_below(PREFIX[:3])


def test_two_lookups_share_one_promotion():
    story = Story()
    story.keep_only_below(PREFIX)
    first, second = story.ask(PREFIX), story.ask(PREFIX[:3])
    assert len(story.waiting(Read)) == 4
    story.release(first)
    story.end_every(Read)
    assert story.figures(second) == (3, 3, 3, True)


def test_a_question_leases_nothing_and_says_where_chunks_would_come_from():
    story = Story()
    story.keep_only_below(PREFIX)
    first = story.ask(PREFIX[:2])
    story.end_every(Read)
    reads = len(story.waiting(Read))
    lookup = story.lookup(story.session, (*PREFIX, 9), 1, leases=False)
    story.step()
    answer = story.answer(lookup)
    assert (answer.held, answer.slots, answer.is_done, answer.is_answered) == (4, (), True, True)
    assert [(run.tier, run.chunks) for run in answer.arriving] == [(HOST, 1), (HOST + 1, 2)]
    assert len(story.waiting(Read)) == reads, "nothing is promoted"
    story.release(first)
    story.tiering.hit_stats.take()
    story.release(lookup)
    (counts,) = story.tiering.hit_stats.take().values()
    assert (counts.lookups, counts.asked) == (1, 0)


@pytest.mark.parametrize("start", [1, 3, 4, 5, 9])
def test_chunks_before_the_start_are_held_but_not_leased(start):
    story = Story()
    story.store(PREFIX)
    wanted = max(0, 4 - start)
    assert story.figures(story.ask(PREFIX, start)) == (4, wanted, wanted, True)
    assert story.tiering.usage()["leased_bytes"] == wanted * SMALL.slot_bytes


def test_a_failed_promotion_shortens_what_is_held_from_there_on():
    story = Story()
    story.keep_only_below(PREFIX)
    lookup = story.ask(PREFIX, start=1)
    story.end(Read, PREFIX[:3], fault=Outcome.UNAVAILABLE)
    assert story.figures(lookup) == (2, 1, 0, False)
    story.end(Read, PREFIX[:2])
    assert story.figures(lookup) == (2, 1, 1, True)
    story.end(Read, PREFIX)  # goes on for the next request
    assert story.is_in_host(PREFIX)


def test_a_failed_seal_shortens_every_lookup_that_waits_for_it():
    story = Story()
    story.commit_prefix(PREFIX)
    lookups = [story.ask(PREFIX), story.ask(PREFIX, start=2)]
    story.end(Seal, PREFIX[:2], fault=Outcome.UNAVAILABLE)
    story.finish_all()
    assert [story.figures(lookup) for lookup in lookups] == [(1, 1, 1, True), (4, 2, 2, True)]
    assert not story.is_below(PREFIX[:2]) and not story.is_below(PREFIX)


def test_other_tokens_under_the_same_key_are_a_miss():
    story = Story()
    story.store(PREFIX)
    keys, digests = SMALL.prefix(PREFIX)
    digests[2] = bytes(32)
    lookup = story.tiering.lookup(story.session, LookupRequest(keys, digests))
    assert [u.answer.held for u in story.tiering.take_updates() if u.lookup == lookup] == [2]


def test_another_namespace_never_gets_the_chunk_even_with_its_key_and_digest():
    story = Story()
    story.store(PREFIX)
    thief = story.open(Space(b"another-namespace", SMALL.slot_bytes))
    story.finish_all()
    lookup = story.tiering.lookup(thief, LookupRequest(*SMALL.prefix(PREFIX)))
    assert [(u.answer.held, u.answer.slots) for u in story.tiering.take_updates() if u.lookup == lookup] == [(0, ())]


def test_one_request_leases_no_more_than_its_share():
    story = Story(limits=Limits(request_share=0.1))
    story.store(tuple(range(5)))
    assert story.figures(story.ask(tuple(range(5)))) == (5, 4, 4, True)


def test_leases_of_all_requests_stay_within_their_share():
    story = Story(limits=Limits(leased_share=0.1))
    story.store((1, 2, 3))
    story.store((5, 6, 7))
    first, second = story.ask((1, 2, 3)), story.ask((5, 6, 7))
    assert (story.figures(first), story.figures(second)) == ((3, 3, 3, True), (3, 1, 1, False))
    assert story.counted("lease_cap_reached") == 1
    again = story.ask((1, 2, 3))  # leased already: costs nothing more
    assert story.figures(again) == (3, 3, 3, True)
    assert story.answer(second).queued == 2
    story.release(first)
    story.step()
    assert story.figures(second) == (3, 1, 1, False), "what another lookup leases is no room"
    story.release(again)
    story.step()
    assert story.figures(second) == (3, 3, 3, True)


def test_a_lookup_released_twice_or_by_another_session_is_ignored():
    story = Story()
    story.store(PREFIX)
    lookup, stranger = story.ask(PREFIX), story.open(SMALL)
    story.tiering.release(stranger, lookup)
    assert story.tiering.usage()["lookups"] == 1
    story.release(lookup)
    story.tiering.release(story.session, lookup)
    assert story.tiering.usage()["leased_bytes"] == 0


def test_a_leased_chunk_is_never_evicted():
    story = Story(host_bytes=160)
    story.store(PREFIX)
    lookup = story.ask(PREFIX)
    for number in range(40):
        story.store((100 + number,))
    assert story.figures(lookup) == (4, 4, 4, True)
    assert all(story.is_in_host(chunk) for chunk in chunks_of(PREFIX))


def test_a_promotion_without_a_slot_shortens_the_prefix_and_waits_for_nothing():
    story = Story(host_bytes=160, limits=Limits(leased_share=1.0, request_share=1.0))
    prefix = tuple(range(20))
    for chunk in chunks_of(prefix):
        story.commit(story.session, chunk)
        story.finish_all()
    lookup = story.ask(prefix)
    story.finish_all()
    held, promised, ready, is_done = story.figures(lookup)
    assert (held, ready, is_done) == (20, promised, True)
    assert 10 < promised < 20
    assert story.counted("promotion_without_slot") == 1


def test_promotions_take_memory_that_is_still_on_its_way():
    prefix = tuple(range(30))
    story = Story(host_bytes=800, found=chunks_of(prefix))
    lookup = story.ask(prefix)
    assert story.figures(lookup) == (30, 30, 0, False)
    assert len(story.waiting(Grow)) >= 2 and len(story.waiting(Read)) < 30
    story.finish_all()
    assert story.figures(lookup) == (30, 30, 30, True)


def test_promotions_that_waited_for_refused_memory_shorten_the_prefix():
    prefix = tuple(range(30))
    story = Story(host_bytes=800, found=chunks_of(prefix))
    lookup = story.ask(prefix)
    story.end(Grow, fault=Outcome.NO_ROOM)
    story.finish_all()
    held, promised, ready, is_done = story.figures(lookup)
    assert is_done and promised == ready == held < 30
    assert story.counted("slab_refused") == 1
