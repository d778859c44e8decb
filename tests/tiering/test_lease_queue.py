"""The line: who gets room among the leases, who gives way for it, and when a lease ends by itself."""

import sys

import pytest

from tests.kit.spaces import Space
from tests.kit.tiering.world import SMALL, Story
from tiered_kv.tiering.leases import ENDED_AT_ONCE_MAX
from tiered_kv.tiering.lookups import LookupRequest
from tiered_kv.tiering.types import LeaseEnd, Limits, LookupUpdate, Outcome, Read

OTHER = Space(b"other-namespace-", SMALL.slot_bytes)
CAP = 6
PATHS = [(n, n + 100, n + 200) for n in range(1, 9)]


def story_with_cap(**more: float) -> Story:
    """Leases of six chunks at most; eight prompts of three chunks are in host memory."""
    story = Story(host_bytes=600, limits=Limits(leased_share=CAP * SMALL.slot_bytes / 600, request_share=1.0))
    for path in PATHS:
        story.store(path)
    return story


def leased(story: Story) -> int:
    return story.tiering.usage()["leased_bytes"] // SMALL.slot_bytes


def ask(story: Story, number: int, session: int | None = None, priority: int = 0) -> int:
    lookup = story.lookup(session or story.session, PATHS[number], turn=(priority, number))
    story.step()
    return lookup


def test_what_is_cut_goes_on_in_the_order_of_turns():
    story = story_with_cap()
    first, second, later, sooner = ask(story, 0), ask(story, 1), ask(story, 3), ask(story, 2)
    assert [story.answer(one).queued for one in (first, second, later, sooner)] == [0, 0, 3, 3]
    story.release(first)
    story.step()
    assert (story.answer(sooner).ready, story.answer(later).ready) == (3, 0)
    assert leased(story) == CAP


def test_who_comes_while_others_wait_waits_behind_them():
    story = story_with_cap()
    first, second = ask(story, 0), ask(story, 1)
    waiting = ask(story, 2)
    story.release(first)
    late = story.lookup(story.session, PATHS[7], turn=(0, 7))  # in the same moment
    story.step()
    assert (story.answer(waiting).ready, story.answer(late).ready) == (3, 0)
    story.release(second)
    story.step()
    assert story.answer(late).ready == 3


def test_a_request_that_is_admitted_first_takes_the_room_of_the_last():
    story = story_with_cap()
    ask(story, 0)
    last = ask(story, 1)
    urgent = ask(story, 5, priority=-1)
    assert story.ended == [last] and story.counted("lease_gave_way") == 1
    story.step()
    assert story.answer(urgent).ready == 3


def test_who_holds_nothing_but_a_tail_gives_way_too():
    """The GPU has its chunks; of what it gives the tail counts."""
    story = story_with_cap()
    assert story.commit_tail(story.session, PATHS[0], "a")
    story.finish_all()
    ask(story, 1)
    last = story.lookup(story.session, (*PATHS[0], 9), 3, turn=(0, 9), wants_tails=True)
    story.step()
    assert len(story.answer(last).tails) == 1 and leased(story) == 4
    ask(story, 2)
    assert story.ended == [last] and story.counted("lease_gave_way") == 1
    story.step()
    assert leased(story) == CAP


def test_a_queue_gives_way_to_another_session_up_to_its_share():
    story = story_with_cap()
    for number in range(4):
        ask(story, number)
    other = story.open(SMALL)
    wanted = ask(story, 5, session=other)
    story.step()
    assert story.answer(wanted).ready == 3
    assert story.tiering._host.leased_by == {
        story.session: CAP * SMALL.slot_bytes // 2,
        other: CAP * SMALL.slot_bytes // 2,
    }


def test_a_frozen_engine_whose_loads_hold_all_that_may_be_leased_keeps_nobody_from_its_share():
    """Nothing ends a claim, so the others go beyond the limit: up to their shares, and to half as much again in all."""
    story = story_with_cap()
    for number in (0, 1):
        story.claim(ask(story, number))
    other, third = story.open(SMALL), story.open(SMALL)
    first = ask(story, 5, session=other)
    story.step()
    second = ask(story, 6, session=other)
    story.step()
    assert story.ended == []
    assert (story.answer(first).ready, story.answer(second).ready) == (3, 0)
    assert leased(story) == CAP + CAP // 2
    story.claim(first)
    last = ask(story, 7, session=third)
    story.step()
    assert (story.answer(last).ready, leased(story)) == (0, CAP + CAP // 2), "stores need the rest of host memory"
    story.release(first)
    for _ in range(3):
        story.step()
    assert story.answer(last).ready + story.answer(second).ready == 3
    story.tiering.check_integrity()


def test_what_a_session_beyond_its_share_can_still_give_is_waited_for():
    story = story_with_cap()
    story.claim(ask(story, 0))
    given = ask(story, 1)
    other = story.open(SMALL)
    wanted = ask(story, 5, session=other)
    assert story.ended == [given]
    story.step()
    assert (story.answer(wanted).ready, leased(story)) == (3, CAP)


def test_neither_of_two_queues_takes_more_than_half():
    story = story_with_cap()
    other = story.open(SMALL)
    for number in range(4):
        ask(story, number)
        ask(story, 4 + number, session=other)
    for _ in range(4):
        story.step()
    host = story.tiering._host
    assert host.leased_by[story.session] == host.leased_by[other] == CAP * SMALL.slot_bytes // 2


def test_what_another_session_goes_on_relying_on_counts_for_that_one():
    """Its share is its own: the load of a frozen engine must not fill that of who looked the prefix up before it."""
    story = story_with_cap()
    frozen = story.open(SMALL)
    first = ask(story, 0)
    for number in (0, 1):
        story.claim(ask(story, number, session=frozen))
    story.release(first)
    story.step()
    assert story.tiering._host.leased_by == {frozen: CAP * SMALL.slot_bytes}
    story.tiering.check_integrity()


def test_leases_end_by_the_clock_unless_they_are_claimed():
    story = story_with_cap()
    session = story.tiering.open_session(SMALL.namespace, SMALL.slot_bytes, 30.0)
    story.spaces[session] = SMALL
    claimed, held, waits = ask(story, 0, session), ask(story, 1, session), ask(story, 2, session)
    story.claim(claimed)
    story.tiering.expire_leases(100.0)
    story.tiering.expire_leases(130.0)
    story.step()
    assert story.ended == []
    story.tiering.expire_leases(130.1)
    story.step()
    story.step()
    assert story.ended == [held] and story.counted("lease_expired") == 1
    assert story.answer(waits).ready == 3, "the room of what ended is nobody's"
    story.tiering.expire_leases(130.2)
    story.tiering.expire_leases(160.3)
    story.step()
    assert story.ended == [held, waits], "its time begins with its first lease"
    assert leased(story) == 3


def test_slots_stay_until_the_client_was_told():
    story = story_with_cap()
    session = story.tiering.open_session(SMALL.namespace, SMALL.slot_bytes, 1.0)
    story.spaces[session] = SMALL
    lookup = ask(story, 0, session)
    story.tiering.expire_leases(0.0)
    story.tiering.expire_leases(2.0)
    assert leased(story) == 3, "the end was not even told"
    story.tiering.claim(session, lookup)  # too late
    story.step()
    assert story.ended == [lookup] and leased(story) == 0


def test_a_lost_clients_leases_never_end_by_the_clock():
    story = story_with_cap()
    session = story.tiering.open_session(SMALL.namespace, SMALL.slot_bytes, 1.0)
    story.spaces[session] = SMALL
    ask(story, 0, session)
    story.suspend(session)
    story.tiering.expire_leases(0.0)
    story.tiering.expire_leases(1e9)
    story.step()
    assert story.ended == [] and leased(story) == 3


@pytest.mark.parametrize("was_told", [False, True])
def test_a_lost_clients_leases_give_way_to_nobody_and_keep_nobody_from_its_share(was_told):
    """Its processes may read them until they have exited; whoever wants room goes beyond the limit, as by claims."""
    story = story_with_cap()
    other = story.open(SMALL)
    for number in (0, 1):
        ask(story, number)
    if was_told:  # that some are to end, a moment before it is lost
        aborted = story.lookup(other, PATHS[4])
        story.tiering.take_jobs()
        assert [type(one) for one in story.tiering.take_updates()] == [LookupUpdate, LeaseEnd]
        story.release(aborted)
    story.suspend(story.session)
    wanted = ask(story, 5, session=other)
    story.step()
    assert story.ended == [] and story.answer(wanted).ready == 3
    assert leased(story) == CAP + CAP // 2
    story.close(story.session)
    story.step()
    assert leased(story) == 3


def test_leases_end_also_where_each_of_two_is_asked_anew_before_the_other_lets_go(monkeypatch):
    story = story_with_cap()
    shared = [story.lookup(story.session, PATHS[0], turn=(1, number)) for number in range(2)]
    held = ask(story, 1)
    forget = story._end_lease

    def ask_anew(session: int, lookup: int) -> None:
        forget(session, lookup)
        shared[shared.index(lookup)] = story.lookup(session, PATHS[0], turn=(1, 0))

    monkeypatch.setattr(story, "_end_lease", ask_anew)
    first = story.lookup(story.session, PATHS[2], turn=(0, 5))
    for _ in range(20):
        story.step()
    assert len(story.ended) == 2 and story.answer(first).ready == 3
    for lookup in (first, held):
        story.release(lookup)
        story.step()
    assert [story.answer(one).ready for one in shared] == [3, 3]


def test_nobody_waits_for_room_that_only_its_own_chunks_could_give():
    story = story_with_cap()
    long = tuple(range(50, 59))
    story.store(long)
    lookup = story.lookup(story.session, long)
    story.step()
    assert story.figures(lookup) == (9, CAP, CAP, True)


def test_two_that_share_what_they_hold_do_not_wait_for_each_other():
    story = story_with_cap()
    stem = tuple(range(50, 50 + CAP))
    story.store((*stem, 1))
    story.store((*stem, 2))
    first = story.lookup(story.session, (*stem, 1), turn=(0, 1))
    second = story.lookup(story.session, (*stem, 2), turn=(0, 2))
    for _ in range(3):
        story.step()
    assert [story.figures(one)[1:] for one in (first, second)] == [(CAP, CAP, True)] * 2


def test_a_lookup_whose_first_chunk_fails_holds_nobody_up():
    story = Story(host_bytes=600, limits=Limits(leased_share=CAP * SMALL.slot_bytes / 600, request_share=1.0))
    story.keep_only_below(PATHS[0])
    failing = ask(story, 0)
    story.finish(story.waiting(Read, PATHS[0][:1])[0], Outcome.UNAVAILABLE)
    long = tuple(range(50, 59))
    story.store(long)
    lookup = story.lookup(story.session, long, turn=(0, 9))
    story.step()
    assert story.figures(lookup)[1:] == (CAP, CAP, True) and story.answer(failing).ready == 0


def test_what_is_claimed_from_its_beginning_takes_what_there_is():
    story = story_with_cap()
    ask(story, 0)
    ask(story, 1)
    keys, digests = SMALL.prefix(PATHS[2])
    lookup = story.tiering.lookup(story.session, LookupRequest(keys, digests, is_claimed=True))
    story.tiering.take_jobs()
    (update,) = [one for one in story.tiering.take_updates() if isinstance(one, LookupUpdate)]
    assert (update.lookup, update.answer.slots, update.answer.is_done) == (lookup, (), True)


def test_a_queue_that_fills_the_line_leaves_another_session_its_part(monkeypatch):
    monkeypatch.setattr("tiered_kv.tiering.leases.WANTED_CHUNKS_MAX", 12)
    story = story_with_cap()
    for number in range(8):
        ask(story, number)
    assert story.counted("line_full") == 2, "it holds six chunks and stands in line for twelve"
    wanted = ask(story, 5, session=story.open(SMALL))
    story.step()
    story.step()
    assert story.answer(wanted).ready == 3
    story.tiering.check_integrity()


def test_dates_of_leases_that_are_over_are_not_kept(monkeypatch):
    monkeypatch.setattr("tiered_kv.tiering.leases.DUE_SPARE", 4)
    story = story_with_cap()
    for number in range(20):
        story.release(ask(story, number % 8))
        story.tiering.expire_leases(float(number))
    assert len(story.tiering._lookups.line._due) <= 5


def test_who_has_left_the_line_is_not_kept_in_it_and_the_order_of_turns_stays():
    story = story_with_cap()
    first, second = ask(story, 0), ask(story, 1)
    later, sooner = ask(story, 7), ask(story, 6)
    for number in range(200):
        story.release(ask(story, 2, priority=number))
    assert len(story.tiering._lookups.line._order[story.session]) <= 2 * 2 + 64 + 1
    story.release(first)
    story.step()
    assert (story.answer(sooner).ready, story.answer(later).ready) == (3, 0)
    story.release(second)
    story.step()
    assert story.answer(later).ready == 3


def lines_of_a_step(holding: int) -> int:
    """Lines of Python that a step runs in which nothing has changed, while so many hold one prefix and others wait."""
    story = story_with_cap()
    for number in range(holding):
        story.lookup(story.session, (1, 101, 5000 + number), turn=(0, 100 + number))
    for number in range(1, 8):  # the first of them takes the rest of the room
        ask(story, number)
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        story.tiering.take_jobs()
    finally:
        sys.settrace(before)
    assert not story.tiering._lookups.line.is_empty
    return count


def test_a_step_does_not_look_at_all_that_hold_what_they_share():
    few, many = lines_of_a_step(2 * ENDED_AT_ONCE_MAX), lines_of_a_step(4 * ENDED_AT_ONCE_MAX)
    assert many < few + ENDED_AT_ONCE_MAX
