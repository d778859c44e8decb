"""Slabs that a process pins for its GPU: their memory stays what it is, and slots of any size are cut from it.

The oracle asserts on every way that no slab is given less than it has (``World.keep_memory``).
"""

import tracemalloc

import pytest

from tests.kit.tiering.world import LARGE, SMALL, Story
from tiered_kv.tiering.slots import SLABS_WANTED, SlotPool
from tiered_kv.tiering.types import Grow

HOST_BYTES = 8 * 100


def pinning_story(host_bytes: int = HOST_BYTES) -> Story:
    story = Story(host_bytes=host_bytes)
    story.keep_memory(is_kept=True)
    return story


def fill(story: Story, session: int, first: int, count: int) -> None:
    for number in range(first, first + count):
        if story.commit(session, (number,)):
            story.finish_all()


def memory(story: Story) -> list[int]:
    slots = story.tiering.slots
    return [slots.memory_bytes(slab) for slab in range(slots.slab_count)]


def test_every_slab_is_given_its_full_size_at_once() -> None:
    story = Story(host_bytes=HOST_BYTES)
    story.close(story.session)
    story.keep_memory(is_kept=True)
    large = story.open_large()
    fill(story, large, 0, 100)
    full = HOST_BYTES // SLABS_WANTED
    assert [size for size in memory(story) if size] == [full] * SLABS_WANTED
    assert story.tiering.slots.slot_count(LARGE.slot_bytes) == SLABS_WANTED * (full // LARGE.slot_bytes)


def test_a_slab_that_changes_its_slot_size_keeps_its_memory() -> None:
    story = pinning_story()
    fill(story, story.session, 0, 100)
    before = memory(story)
    large = story.open_large()
    for number in range(80):
        fill(story, large, 2000 + number, 1)
        fill(story, story.session, 4000 + number, 1)
    assert story.counted("slab_reclaimed") > 0
    assert memory(story) == before
    full = HOST_BYTES // SLABS_WANTED
    per_size = {space.slot_bytes: story.tiering.slots.slot_count(space.slot_bytes) for space in (SMALL, LARGE)}
    slabs = sum(count // (full // size) for size, count in per_size.items())
    assert slabs == SLABS_WANTED, "less than a slot of each slab is wasted"


def test_slabs_do_not_go_to_and_fro_between_two_sizes() -> None:
    story = pinning_story()
    fill(story, story.session, 0, 100)
    large = story.open_large()
    for number in range(100):
        fill(story, large, 2000 + number, 1)
        fill(story, story.session, 4000 + number, 1)
    before = story.counted("slab_reclaimed")
    for number in range(100):
        fill(story, large, 6000 + number, 1)
        fill(story, story.session, 8000 + number, 1)
    assert story.counted("slab_reclaimed") == before


def grown(pool: SlotPool, slot_bytes: int) -> int:
    """The slab that one more ``grow`` was given its memory by."""
    job = pool.grow(slot_bytes)
    assert job is not None
    pool.grown(job.slab, succeeded=True)
    return job.slab


def reclaimed(pool: SlotPool, slab: int) -> None:
    pool.drain(slab)
    pool.reclaim(slab)


def test_slots_cost_nothing_before_they_are_taken() -> None:
    """A slab of small slots has 131,072 of them: lists of all would be made, searched and freed at once."""
    pool = SlotPool(8 << 30)
    tracemalloc.start()
    try:
        slab = grown(pool, 8192)
        other = grown(pool, 8192)
        reclaimed(pool, slab)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert pool.free_count(8192) == pool.slot_count(8192) == 131_072
    assert peak_bytes < 64 << 10
    assert pool.take(8192) == pool.slots_of(other)[0]


def test_a_slot_that_was_given_back_early_is_there_when_the_slab_is() -> None:
    pool = SlotPool(HOST_BYTES)
    job = pool.grow(20)
    assert job is not None
    early = [pool.take_early(20) for _ in range(5)]
    assert None not in early and pool.take_early(20) is None and pool.take(20) is None
    for slot in early[:2]:
        pool.give(slot or 0)
    pool.grown(job.slab, succeeded=True)
    assert pool.free_count(20) == 2
    assert {pool.take(20), pool.take(20)} == set(early[:2]) and pool.take(20) is None
    pool.check_integrity({slot for slot in early if slot is not None})


def test_memory_that_was_given_before_may_grow_and_never_shrinks() -> None:
    pool = SlotPool(HOST_BYTES)
    slab = grown(pool, 7)
    assert pool.memory_bytes(slab) == 98
    pool.keep_memory(is_kept=True)
    reclaimed(pool, slab)
    assert pool.assigned_bytes == 98 and pool.assigned_to(7) == 0
    assert pool.grow(10) == Grow(slab, 100), "its own memory, and what the budget has left up to the full size"
    pool.grown(slab, succeeded=True)
    reclaimed(pool, slab)
    assert pool.grow(15) == Grow(slab, 100)
    pool.grown(slab, succeeded=True)
    assert pool.slot_count(15) == 6 and pool.assigned_bytes == pool.assigned_to(15) == 100
    pool.check_integrity(set())


def test_a_refusal_leaves_a_slab_what_it_has() -> None:
    pool = SlotPool(HOST_BYTES)
    slab = grown(pool, 7)
    pool.keep_memory(is_kept=True)
    reclaimed(pool, slab)
    assert pool.grow(10) == Grow(slab, 100)
    pool.grown(slab, succeeded=False)
    assert pool.memory_bytes(slab) == pool.assigned_bytes == 98
    pool.check_integrity(set())
    assert pool.grow(10) == Grow(slab, 98), "without another byte of the machine"
    assert pool.grow(10) is None
    pool.allow_growth()
    assert pool.grow(10) == Grow(slab + 1, 100)


def test_a_slab_of_nobody_that_is_large_enough_comes_first() -> None:
    pool = SlotPool(HOST_BYTES)
    small, large = grown(pool, 60), grown(pool, 10)
    pool.keep_memory(is_kept=True)
    for slab in (small, large):
        reclaimed(pool, slab)
    pool.limit_bytes = pool.assigned_bytes
    assert pool.grow(80) == Grow(large, 100)
    assert pool.grow(80) is None
    assert pool.grow(60) == Grow(small, 60)


def test_a_slot_that_fits_no_slab_takes_none_from_others() -> None:
    story = pinning_story(host_bytes=160)
    fill(story, story.session, 0, 30)
    huge = story.open_space(b"huge-namespace--", 40)
    fill(story, huge, 0, 30)
    assert story.tiering.slots.slot_count(40) == 0 and story.counted("slab_reclaimed") == 0
    story.keep_memory(is_kept=False)
    fill(story, huge, 100, 30)
    fill(story, story.session, 200, 10)
    assert story.tiering.slots.slot_count(40) > 0, "when nobody pins any more it gets memory as ever"


def test_memory_of_nobody_is_counted_until_the_last_pinning_process_is_gone() -> None:
    pool = SlotPool(HOST_BYTES)
    slabs = [grown(pool, 7) for _ in range(3)]
    pool.keep_memory(is_kept=True)
    reclaimed(pool, slabs[0])
    job = pool.grow(15)
    assert job == Grow(slabs[0], 100)
    reclaimed(pool, slabs[1])
    assert pool.assigned_bytes == 100 + 98 + 98
    pool.keep_memory(is_kept=False)
    assert pool.assigned_bytes == 100 + 98 == pool.assigned_to(15) + pool.assigned_to(7)
    assert pool.memory_bytes(slabs[1]) == 0
    pool.grown(slabs[0], succeeded=False)
    assert pool.assigned_bytes == 98 and pool.memory_bytes(slabs[0]) == 0
    pool.check_integrity(set())


@pytest.mark.parametrize(("slot_bytes", "memory"), [(10, 100), (15, 90), (40, 80), (99, 99), (150, 150)])
def test_without_a_pinning_process_slabs_take_what_their_slots_take(slot_bytes: int, memory: int) -> None:
    pool = SlotPool(HOST_BYTES)
    slab = grown(pool, slot_bytes)
    assert pool.memory_bytes(slab) == memory
    reclaimed(pool, slab)
    assert pool.memory_bytes(slab) == pool.assigned_bytes == 0
