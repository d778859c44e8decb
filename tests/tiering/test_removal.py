"""Removing chunks by order, and pins: what goes, what stays, and that nothing is left half removed."""

import pytest

from tests.kit.tiering.world import LARGE, SMALL, Story, chunks_of
from tiered_kv.tiering.types import HOST, Delete, Outcome, Seal, Write

SIZE = SMALL.slot_bytes
DISK = 1


def remove(story, tier, *paths, holes=False, space=SMALL):
    """Remove chunks, or without any the whole namespace; then let jobs wait, and check everything."""
    keys = [space.key(path) for path in paths] or None
    counts = story.remove(tier, space.namespace, keys, leaves_holes=holes)
    story.step()
    story.check()
    return counts


def test_idle_chunks_leave_host_memory_and_stay_below():
    story = Story()
    story.store((1, 2, 3))
    assert remove(story, HOST, (1, 2), (1, 2, 3), (9,)) == (2, 0, 1)
    assert [story.is_in_host(chunk) for chunk in chunks_of((1, 2, 3))] == [True, False, False]
    assert all(story.is_below(chunk) for chunk in chunks_of((1, 2, 3)))
    lookup = story.ask((1, 2, 3))
    story.finish_all()
    assert story.figures(lookup) == (3, 3, 3, True), "they come up again"


def test_leased_chunks_stay_in_host_memory_until_the_lease_ends():
    story = Story()
    story.store((1, 2))
    story.store((5,))
    lookup = story.ask((1, 2))
    assert remove(story, HOST) == (1, 2, 0)
    assert story.is_in_host((1, 2)) and not story.is_in_host((5,))
    story.release(lookup)
    assert remove(story, HOST) == (2, 0, 0)
    assert not story.is_in_host((1,)) and story.tiering.usage()["host_ready_chunks"] == 0


def test_a_chunk_that_is_sealed_or_written_stays_in_host_memory():
    story = Story()
    story.commit_prefix((1,))
    assert remove(story, HOST, (1,)) == (0, 1, 0)
    story.end(Seal)
    assert story.waiting(Write)
    assert remove(story, HOST, (1,)) == (0, 1, 0)
    story.finish_all()
    assert remove(story, HOST, (1,)) == (1, 0, 0)
    assert story.is_below((1,))


def test_only_the_named_namespace_is_removed_and_none_means_all():
    story = Story(host_bytes=800)
    large = story.open_large()
    story.store((1,))
    story.store((1,), large)
    assert remove(story, HOST, (1,), space=LARGE) == (1, 0, 0)
    assert story.is_in_host((1,)) and not story.is_in_host((1,), LARGE)
    assert story.remove(DISK, SMALL.namespace, [LARGE.key((1,))], leaves_holes=True) == (0, 0, 1)
    assert story.remove(DISK, b"", None, leaves_holes=False) == (2, 0, 0)
    story.finish_all()
    assert not story.media[1]


def test_a_whole_prefix_leaves_the_disk_from_its_end():
    story = Story(found=[(1, 2, 3), (7,)])
    story.restore(1, SMALL, (1, 2))
    story.restore(1, SMALL, (1,))
    assert remove(story, DISK, *chunks_of((1, 2, 3))) == (3, 0, 0)
    deleted = [story.jobs[place].record.chunk_index for place in story.waiting(Delete)]
    assert deleted == [2, 1, 0]
    story.finish_all()
    assert not any(story.is_below(chunk) for chunk in chunks_of((1, 2, 3))) and story.is_below((7,))
    assert story.tiering.tier_usage(1).used_bytes == SIZE


@pytest.mark.parametrize(("holes", "counts"), [(False, (0, 1, 0)), (True, (1, 0, 0))])
def test_a_chunk_that_others_need_goes_only_when_holes_are_allowed(holes, counts):
    story = Story(found=chunks_of((1, 2)))
    assert remove(story, DISK, (1,), holes=holes) == counts
    story.finish_all()
    assert story.is_below((1,)) != holes and story.is_below((1, 2))
    lookup = story.ask((1, 2))
    story.finish_all()
    assert story.figures(lookup)[0] == (0 if holes else 2)


def test_a_blob_that_is_being_read_stays():
    story = Story(found=[(7,)])
    story.ask((7,))
    assert remove(story, DISK, (7,), holes=True) == (0, 1, 0)
    story.finish_all()
    assert story.is_below((7,))
    assert remove(story, DISK, (7,)) == (1, 0, 0)
    story.finish_all()
    assert not story.is_below((7,))


def test_a_chunk_that_is_being_written_stays():
    story = Story()
    story.commit_prefix((1,))
    assert remove(story, DISK, (1,)) == (0, 1, 0), "queued"
    story.end(Seal)
    assert story.waiting(Write)
    assert remove(story, DISK, (1,)) == (0, 1, 0), "writing"
    story.finish_all()
    assert story.is_below((1,))


def test_a_hole_takes_the_queued_writes_behind_it_along():
    story = Story(capacities=(None,))
    story.store((1,))
    story.commit_prefix((1, 2))
    assert remove(story, DISK, (1,), holes=True) == (1, 0, 0)
    story.finish_all()
    assert not story.is_below((1,)) and not story.is_below((1, 2))
    story.check()


def test_a_deletion_that_fails_leaves_the_blob_as_it_was():
    story = Story(found=[(1,)])
    assert remove(story, DISK, (1,)) == (1, 0, 0)
    story.end(Delete, fault=Outcome.UNAVAILABLE)
    story.check()
    assert story.is_below((1,)) and story.tiering.tier_usage(1).used_bytes == SIZE
    assert remove(story, DISK, (1,)) == (1, 0, 0)
    story.finish_all()
    assert not story.is_below((1,))


# -- pins ------------------------------------------------------------------------------------------------------------


def test_room_is_never_made_from_a_pinned_prefix():
    story = Story(capacities=(4 * SIZE,), found=[(1,), (1, 2), (1, 2, 3), (5,)])
    story.tiering.set_pinned(DISK, [SMALL.key((1, 2))])
    for number in range(10, 16):
        story.store((number,))
        assert story.is_below((1,)) and story.is_below((1, 2))
    assert not story.is_below((5,)) and not story.is_below((1, 2, 3)), "what is behind a pin is not kept"


def test_pins_are_replaced_as_a_whole_and_an_unknown_one_does_nothing():
    story = Story(capacities=(2 * SIZE,), found=[(1,), (2,)])
    story.tiering.set_pinned(DISK, [SMALL.key((1,)), bytes(16)])
    story.store((10,))
    assert story.is_below((1,)) and not story.is_below((2,))
    story.tiering.set_pinned(DISK, [SMALL.key((10,))])
    story.store((11,))
    assert not story.is_below((1,)) and story.is_below((10,))
    story.tiering.set_pinned(DISK, [])
    story.store((12,))
    assert not story.is_below((10,))


def test_a_tier_full_of_pins_refuses_writes_and_keeps_its_limit():
    story = Story(capacities=(2 * SIZE,), found=[(1,), (2,)])
    story.tiering.set_pinned(DISK, [SMALL.key((1,)), SMALL.key((2,))])
    story.store((3,))
    assert story.is_below((1,)) and story.is_below((2,)) and not story.is_below((3,))
    assert story.is_in_host((3,)) and story.counted("write_dropped_no_room") == 1
    story.check()


def test_many_pins_are_looked_at_in_parts_and_kept_with_the_last_of_them(monkeypatch):
    """The server's loop stood still for 0.15 s at 100,000 pinned chunks, every five seconds."""
    monkeypatch.setattr("tiered_kv.tiering.tiers.PINNED_AT_ONCE", 8)
    prompt = tuple(range(1, 13))
    story = Story(capacities=(14 * SIZE,), found=[*chunks_of(prompt), (20,)])
    story.tiering.set_pinned(DISK, [SMALL.key((20,))])
    parts = story.tiering.pinning(DISK, [SMALL.key(chunk) for chunk in chunks_of(prompt)])
    for _ in range(3):  # 12 chunks, and the end of the way before each pin
        next(parts)
        assert story.tiering.tier_usage(DISK).pinned_bytes == SIZE
    assert list(parts) == [], "each chunk is looked at once, however many pins it is before"
    assert story.tiering.tier_usage(DISK).pinned_bytes == 12 * SIZE


def test_what_comes_and_goes_while_pins_are_looked_at_is_right_with_the_next_look(monkeypatch):
    monkeypatch.setattr("tiered_kv.tiering.tiers.PINNED_AT_ONCE", 1)
    story = Story(capacities=(4 * SIZE,), found=[(1,), (1, 2), (1, 2, 3)])
    pins = [SMALL.key((1, 2, 3)), SMALL.key((5,))]
    parts = story.tiering.pinning(DISK, pins)
    next(parts)
    assert remove(story, DISK) == (3, 0, 0)
    story.finish_all()
    story.store((5,))
    assert len(list(parts)) == 3 and story.tiering.tier_usage(DISK).pinned_bytes == SIZE
    story.store((1, 2, 3))
    story.tiering.set_pinned(DISK, pins)
    assert story.tiering.tier_usage(DISK).pinned_bytes == 4 * SIZE
    for number in range(10, 14):
        story.store((number,))
    assert all(story.is_below(chunk) for chunk in [(1,), (1, 2), (1, 2, 3), (5,)])
    story.check()


def test_who_says_it_by_name_removes_a_pinned_chunk():
    """The command line asks for the pins itself: an order that names a chunk is one."""
    story = Story(found=[(1,)])
    story.tiering.set_pinned(DISK, [SMALL.key((1,))])
    assert remove(story, DISK, (1,)) == (1, 0, 0)
    story.finish_all()
    assert not story.is_below((1,))
