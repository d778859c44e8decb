"""What is a user's session's own, and what goes with it: never what another one asked for, is in use or is pinned."""

from tests.kit.tiering.world import SMALL, Story, chunks_of
from tiered_kv.tiering.index import SHARED
from tiered_kv.tiering.types import Delete, Outcome, Read, Seal, Write

ALICE, BOB = b"alice's session.", b"bob's session..."
LONG = (1, 2, 3, 4, 5)


def told(story, path, owner=ALICE):
    """A request of a session is over; how many chunks its state has."""
    return len(story.tiering.take_ownership(SMALL.namespace, SMALL.key(path), owner))


def turn(story, path, owner=ALICE):
    """A request of a session: looked up, stored from where it is not held, and told of."""
    lookup = story.ask(path, owner=owner)
    held = story.figures(lookup)[0]
    story.finish_all()
    story.release(lookup)
    for chunk in chunks_of(path)[held:]:
        assert story.commit(story.session, chunk), "no credit left"
        story.finish_all()
    return told(story, path, owner)


def release(story, path, owner=ALICE, kept=(), pinned=()):
    """Let a session's own chunks along a state go; its last chunk and those before it are named."""
    keys = [SMALL.key(chunk) for chunk in chunks_of(path)[::-1]]
    staying = [[SMALL.key(chunk) for chunk in chunks_of(other)[::-1]] for other in kept]
    *_, count = story.tiering.releasing(keys, owner, staying, {SMALL.key(chunk) for chunk in pinned}.__contains__)
    story.step()
    return count


def where(story, path):
    """For each chunk of a prefix, in how many places it is."""
    return [story.is_in_host(chunk) + story.is_below(chunk) for chunk in chunks_of(path)]


def test_a_session_that_nobody_shares_goes_from_memory_and_disk():
    story = Story()
    story.store(LONG)
    assert told(story, LONG) == 5
    assert release(story, LONG) == (5, 0)
    story.finish_all()
    assert where(story, LONG) == [0] * 5
    assert len(story.tiering.index) == 0 and story.tiering.tier_usage(1).used_bytes == 0


def test_what_somebody_else_asked_for_stays_whole():
    story = Story()
    story.store(LONG)
    told(story, LONG)
    story.release(story.ask((1, 2, 7)))
    assert release(story, LONG) == (3, 0)
    story.finish_all()
    assert where(story, LONG) == [2, 2, 0, 0, 0]
    lookup = story.ask((1, 2))
    assert story.figures(lookup) == (2, 2, 2, True)


def test_of_two_sessions_with_one_beginning_the_end_of_one_leaves_the_other_whole():
    story = Story()
    turn(story, (1, 2, 3), ALICE)
    turn(story, (1, 2, 4), BOB)
    assert release(story, (1, 2, 3)) == (1, 0)
    story.finish_all()
    assert where(story, (1, 2, 3)) == [2, 2, 0] and where(story, (1, 2, 4)) == [2, 2, 2]
    assert release(story, (1, 2, 4), BOB) == (1, 0), "the beginning is known to be shared, for good"


def test_two_sessions_that_store_one_prompt_at_once_own_nothing_of_it():
    story = Story()
    for owner in (ALICE, BOB):
        story.commit_prefix((1, 2))
        told(story, (1, 2), owner)
    story.finish_all()
    assert story.entry((1, 2)).owner == SHARED
    assert release(story, (1, 2)) == release(story, (1, 2), BOB) == (0, 0)


def test_what_was_asked_for_before_the_session_told_of_it_is_not_its_own():
    story = Story()
    story.store((1, 2))
    turn(story, (1, 2, 3))
    assert release(story, (1, 2, 3)) == (1, 0)
    story.finish_all()
    assert where(story, (1, 2, 3)) == [2, 2, 0]


def test_its_own_requests_take_nothing_from_a_session():
    story = Story()
    for length in (2, 4, 5):
        assert turn(story, LONG[:length]) == length
    assert release(story, LONG) == (5, 0)


def test_a_chunk_that_is_leased_stays_with_all_before_it_until_the_lease_ends():
    story = Story()
    story.store(LONG)
    told(story, LONG)
    lookup = story.ask((1, 2, 3), owner=ALICE)
    story.claim(lookup)
    assert release(story, LONG) == (2, 1), "what is behind it went"
    assert story.figures(lookup) == (3, 3, 3, True)
    story.check()
    story.release(lookup)
    assert release(story, LONG) == (3, 0)
    story.finish_all()
    assert where(story, LONG) == [0] * 5


def test_a_chunk_that_comes_up_from_disk_stays_until_it_is_there():
    story = Story()
    story.keep_only_below((1, 2))
    told(story, (1, 2))
    lookup = story.ask((1, 2), owner=ALICE)
    assert story.waiting(Read)
    assert release(story, (1, 2)) == (0, 1)
    story.finish_all()
    assert story.figures(lookup) == (2, 2, 2, True)
    story.release(lookup)
    assert release(story, (1, 2)) == (2, 0)


def test_writes_that_were_not_begun_are_not_made():
    story = Story()
    story.commit_prefix((1, 2, 3))
    story.end_every(Seal)
    assert len(story.waiting(Write)) == 1, "children wait for their parent"
    told(story, (1, 2, 3))
    assert release(story, (1, 2, 3)) == (2, 1), "the first chunk is being written"
    story.finish_all()
    assert where(story, (1, 2, 3)) == [2, 0, 0]
    assert release(story, (1, 2, 3)) == (1, 0)


def test_pins_keep_a_chunk_and_what_is_before_it():
    story = Story()
    story.store(LONG)
    told(story, LONG)
    story.tiering.set_pinned(1, [SMALL.key((1, 2))])
    assert release(story, LONG, pinned=[(1, 2, 3)]) == (2, 0)
    assert release(story, LONG) == (1, 0)
    story.finish_all()
    assert where(story, LONG) == [2, 2, 0, 0, 0]


def test_while_nobody_knows_what_is_pinned_it_stays_and_is_tried_again():
    story = Story()
    story.store(LONG)
    told(story, LONG)
    story.tiering.set_pinned(1, None)
    assert release(story, LONG) == (0, 5)
    story.finish_all()
    assert where(story, LONG) == [2] * 5
    story.tiering.set_pinned(1, [SMALL.key((1, 2))])
    assert release(story, LONG) == (3, 0)


def test_an_end_that_is_left_behind_goes_and_the_state_that_stays_does_not():
    story = Story()
    turn(story, (1, 2, 3, 4))
    turn(story, (1, 2, 3, 9))
    assert release(story, (1, 2, 3, 4), kept=[(1, 2, 3, 9)]) == (1, 0)
    story.finish_all()
    assert where(story, (1, 2, 3, 9)) == [2] * 4 and where(story, (1, 2, 3, 4)) == [2, 2, 2, 0]


def test_a_state_whose_last_chunks_were_evicted_is_found_by_those_before_them():
    story = Story()
    story.store(LONG)
    told(story, LONG)
    for tier in (0, 1):
        story.remove(tier, SMALL.namespace, [SMALL.key(LONG)], leaves_holes=False)
        story.finish_all()
    sparse = [SMALL.key(LONG), SMALL.key((1, 2))]
    known = story.tiering.known_prefix(sparse, ALICE)
    assert [record.key for record in known] == [SMALL.key(chunk) for chunk in chunks_of((1, 2, 3, 4))]
    assert story.tiering.known_prefix([SMALL.key((8,))], ALICE) == []
    assert release(story, LONG) == (4, 0)


def test_a_deletion_that_fails_leaves_a_hit_of_right_bytes():
    story = Story()
    story.store((1, 2))
    told(story, (1, 2))
    assert release(story, (1, 2)) == (2, 0)
    for _ in range(2):
        story.end(Delete, fault=Outcome.UNAVAILABLE)
    lookup = story.ask((1, 2))
    story.finish_all()
    assert story.figures(lookup) == (2, 2, 2, True)


def test_what_is_demoted_leaves_memory_only_where_the_disk_has_it():
    story = Story()
    story.store((1, 2))
    told(story, (1, 2))
    story.store_without_writes((5,))
    told(story, (5,))
    count = None
    for path in ((1, 2), (5,)):
        *_, count = story.tiering.demoting([SMALL.key(path)], ALICE)
    assert count == (0, 1), "it is being written"
    assert not story.is_in_host((1, 2)) and story.is_below((1, 2)) and story.is_in_host((5,))
    lookup = story.ask((1, 2), owner=ALICE)
    story.finish_all()
    assert story.figures(lookup) == (2, 2, 2, True)


def test_without_a_disk_nothing_is_demoted():
    story = Story(capacities=())
    story.store((1,))
    told(story, (1,))
    *_, count = story.tiering.demoting([SMALL.key((1,))], ALICE)
    assert count == (0, 0) and story.is_in_host((1,))


def test_a_bucket_keeps_what_it_has():
    story = Story(capacities=(None, None), is_last_shared=True)
    story.store((1, 2))
    told(story, (1, 2))
    assert release(story, (1, 2)) == (2, 0)
    story.finish_all()
    assert [story.is_below((1, 2), tier) for tier in (1, 2)] == [False, True] and not story.is_in_host((1, 2))
    lookup = story.ask((1, 2))
    story.finish_all()
    assert story.figures(lookup) == (2, 2, 2, True)


def test_another_namespaces_chunk_is_no_state():
    story = Story()
    story.store((1,))
    assert story.tiering.take_ownership(b"another-one-----", SMALL.key((1,)), ALICE) == []
    assert story.entry((1,)).owner is None


def test_a_sessions_tails_go_with_it_but_not_behind_a_state_that_stays():
    story = Story()
    story.store(LONG)
    told(story, LONG)
    assert story.commit_tail(story.session, LONG, "end", 4) and story.commit_tail(story.session, LONG[:3], "fork", 4)
    story.finish_all()
    assert story.tiering.usage()["host_tails"] == 2
    assert release(story, LONG, kept=[LONG[:3]]) == (3, 0)
    story.finish_all()
    assert where(story, LONG) == [2, 2, 2, 0, 0] and story.tiering.usage()["host_tails"] == 1
    assert release(story, LONG[:3]) == (4, 0)
    story.finish_all()
    assert len(story.tiering.index) == 0


def test_an_end_that_was_left_leaves_memory_and_what_stays_has_all_of_it():
    story = Story()
    for path in (LONG, (*LONG[:3], 7, 8), (*LONG[:2], 9)):
        turn(story, path)
    left, kept = LONG, (*LONG[:3], 7, 8)
    *_, count = story.tiering.demoting_end(
        [SMALL.key(chunk) for chunk in chunks_of(left)[::-1]],
        ALICE,
        [[SMALL.key(chunk) for chunk in chunks_of(kept)[::-1]]],
    )
    assert count == (2, 0)
    assert where(story, left) == [2, 2, 2, 1, 1] and where(story, kept) == [2] * 5
    assert where(story, (*LONG[:2], 9)) == [2] * 3, "a line that nobody remembers stays"
