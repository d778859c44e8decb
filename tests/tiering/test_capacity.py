"""Capacity of a secondary tier: reserved before the write, given back after the deletion, leaves first."""

import pytest

from tests.kit.tiering.world import SMALL, LruStory, Story, chunks_of
from tiered_kv.tiering.types import Delete, Outcome, Read, Seal, Write

SIZE = SMALL.slot_bytes


def test_a_write_waits_for_the_deletion_that_makes_its_room():
    story = Story(capacities=(2 * SIZE,), found=[(7,), (8,)])
    story.commit_prefix((1,))
    story.end(Seal)
    assert story.waiting(Delete) and not story.waiting(Write)
    story.end(Delete)
    assert story.waiting(Write)


def test_the_least_recently_used_leaf_goes_first():
    story = LruStory(capacities=(4 * SIZE,), found=[(1,), (1, 2), (3,), (4,)])
    story.release(story.ask((1, 2)))
    story.release(story.ask((3,)))
    story.finish_all()
    for number, gone in enumerate([(4,), (1, 2), (1,), (3,)]):
        assert story.is_below(gone)
        story.store((90 + number,))
        assert not story.is_below(gone)


def test_a_leaf_that_was_asked_for_goes_after_younger_ones_but_goes():
    story = Story(capacities=(4 * SIZE,), found=[(1,), (2,), (3,), (4,)])
    story.release(story.ask((1,)))
    for number, gone in enumerate([(2,), (3,), (4,), (90,), (91,)]):
        assert story.is_below(gone)
        story.store((90 + number,))
        assert not story.is_below(gone)
    assert story.is_below((1,))
    for number in range(4):
        story.store((95 + number,))
    assert not story.is_below((1,))


def test_a_prefix_that_was_evicted_and_comes_back_counts_as_asked_for():
    story = Story(host_bytes=60, capacities=(4 * SIZE,), found=[(1,), (2,), (3,), (4,)])
    for number in (5, 1, 6, 7, 8):
        story.store((number,))
    assert story.is_below((1,)) and not story.is_below((5,))


def test_a_chain_goes_from_its_end_however_its_chunks_were_found():
    prefix = tuple(range(6))
    story = Story(capacities=(6 * SIZE,), found=chunks_of(prefix))  # root first: looks oldest
    for length in range(6, 0, -1):
        story.store((100 + length,))
        assert [story.is_below(chunk) for chunk in chunks_of(prefix)] == [depth < length for depth in range(1, 7)]


def test_a_parent_with_a_queued_child_is_not_evicted():
    story = Story(capacities=(2 * SIZE,))
    story.store((1, 2))
    story.store((1, 2, 3))  # would need the room of its own parents
    assert story.is_below((1, 2)) and not story.is_below((1, 2, 3))
    assert story.counted("write_dropped_no_room") == 1


def test_a_blob_that_is_being_read_is_not_evicted():
    story = Story(capacities=(2 * SIZE,), found=[(7,), (8,)])
    story.ask((7,))
    story.commit_prefix((1,))
    story.commit_prefix((2,))
    story.end_every(Seal)
    while story.waiting(Write) or story.waiting(Delete):
        story.end(Delete if story.waiting(Delete) else Write)
    assert story.is_below((7,)) and not story.is_below((8,))
    assert story.end(Read) is Outcome.OK


def test_a_chunk_larger_than_the_tier_evicts_nothing():
    story = Story(capacities=(SIZE + 2,), found=[(7,)])
    large = story.open_large()
    assert story.commit(large, (1,))
    story.finish_all()
    assert story.is_below((7,)) and story.counted("write_dropped_no_room") == 1


def test_a_capacity_that_shrank_is_met_at_once_leaves_first():
    story = Story(capacities=(3 * SIZE,), found=[*chunks_of((1, 2, 3)), *chunks_of((5, 6))])
    present = [chunk for chunk in [*chunks_of((1, 2, 3)), *chunks_of((5, 6))] if story.is_below(chunk)]
    assert present == [(1,), (5,), (5, 6)]


def test_bytes_the_tier_counts_beyond_its_blobs_leave_less_room():
    story = Story(capacities=(3 * SIZE,))
    story.tiering.restored(1, unlisted_bytes=SIZE)
    for number in range(4):
        story.store((number,))
    assert len(story.media[1]) == 2


@pytest.mark.parametrize("capacity", [5, 15, 47])
def test_capacity_is_never_passed_whatever_is_stored(capacity):
    story = Story(capacities=(capacity,))
    for number in range(12):
        story.store((number, number))
    assert story.tiering.tier_usage(1).used_bytes <= capacity  # and the oracle looked after every job


def test_a_key_found_twice_is_counted_once():
    story = Story(found=[(1,), (1,)])
    assert story.tiering.tier_usage(1).used_bytes == SIZE and story.counted("restore_conflict") == 1


def test_evicting_on_request_tells_what_will_come_back():
    story = Story(found=[(1,), (2,), (3,)])
    assert story.tiering._tiers[1].evict(SIZE + 1) == 2 * SIZE
    story.finish_all()
    assert story.tiering.tier_usage(1).used_bytes == SIZE
