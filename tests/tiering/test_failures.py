"""What a failure leaves behind: rule 4, outcome by outcome."""

import itertools

import pytest

from tests.kit.tiering.oracle import Blob
from tests.kit.tiering.world import SMALL, Story, chunks_of
from tiered_kv.tiering.index import BlobState
from tiered_kv.tiering.types import HOST, Delete, Limits, Outcome, Read, Seal, Write

PREFIX = (1, 2, 3)


def promoted(damage, path=PREFIX[:2], **options):
    """A story in which a prefix was asked for and one of its blobs is not what it was."""
    story = Story(found=chunks_of(PREFIX), **options)
    story.damage(1, SMALL.key(path), damage)
    lookup = story.ask(PREFIX)
    story.end_every(Read)
    return story, lookup


def test_a_vanished_blob_is_forgotten_and_stored_again():
    story, lookup = promoted(None)
    assert story.figures(lookup) == (1, 1, 1, True)
    assert story.figures(story.ask(PREFIX)) == (1, 1, 1, True)
    assert story.tiering.tier_usage(1).used_bytes == 2 * SMALL.slot_bytes
    story.store(PREFIX)
    assert story.counted("written") == 1
    assert story.figures(story.ask(PREFIX)) == (3, 3, 3, True)


def test_every_failed_read_is_counted():
    story = Story(found=chunks_of((1, 2, 3)))
    story.damage(1, SMALL.key((1, 2)), Blob.CORRUPT)
    story.damage(1, SMALL.key((1, 2, 3)), Blob.CORRUPT)
    story.ask((1, 2, 3))
    story.end_every(Read)
    assert story.counted("read_failed_corrupt") == 2


def test_a_corrupt_blob_is_deleted_and_the_next_store_writes_again():
    story, lookup = promoted(Blob.CORRUPT)
    assert story.figures(lookup) == (1, 1, 1, True)
    story.end(Delete)
    assert not story.is_below(PREFIX[:2])
    story.store(PREFIX)
    assert story.media[1][SMALL.key(PREFIX[:2])] is Blob.GOOD


def test_a_store_during_the_deletion_is_written_after_it():
    story, _ = promoted(Blob.CORRUPT)
    story.commit_prefix(PREFIX)
    story.end_every(Seal)
    assert not story.waiting(Write)
    story.finish_all()
    assert story.media[1][SMALL.key(PREFIX[:2])] is Blob.GOOD


@pytest.mark.parametrize("order", list(itertools.permutations(chunks_of(PREFIX))))
def test_a_prefix_stored_while_its_bad_blobs_are_deleted_is_written_whole_whichever_is_gone_first(order):
    story = Story(found=chunks_of(PREFIX))
    for path in chunks_of(PREFIX):
        story.damage(1, SMALL.key(path), Blob.CORRUPT)
    story.ask(PREFIX)
    story.end_every(Read)
    story.commit_prefix(PREFIX)
    story.end_every(Seal)
    for path in order:
        story.end(Delete, path)
    story.finish_all()
    assert [story.media[1].get(SMALL.key(path)) for path in chunks_of(PREFIX)] == [Blob.GOOD] * 3
    assert story.counted("write_dropped_no_parent") == 0


@pytest.mark.parametrize("order", list(itertools.permutations(chunks_of(PREFIX))))
def test_a_prefix_whose_bad_blobs_in_a_bucket_are_deleted_is_uploaded_whole_whichever_is_gone_first(order):
    story = Story(capacities=(None, None), is_last_shared=True)
    story.store(PREFIX)
    for tier in (HOST, 1):
        story.remove(tier, SMALL.namespace, None, leaves_holes=True)
        story.finish_all()
    for path in chunks_of(PREFIX):
        story.damage(2, SMALL.key(path), Blob.CORRUPT)
    story.ask(PREFIX)
    story.end_every(Read)
    story.commit_prefix(PREFIX)
    story.end_every(Seal)
    while story.waiting(Write):
        story.end(Write)
    assert len(story.waiting(Delete)) == 3
    for path in order:
        story.end(Delete, path)
    story.finish_all()
    assert [story.media[2].get(SMALL.key(path)) for path in chunks_of(PREFIX)] == [Blob.GOOD] * 3
    assert story.counted("upload_dropped_no_parent") == 0


@pytest.mark.parametrize("why", ["the queue is full", "the tier is out"])
def test_a_prefix_whose_first_chunk_is_put_off_when_its_bad_blob_is_gone_is_put_off_behind_it(why):
    """A full queue is full of the chunks behind it, but for the last three, which are put off before it."""
    prompt = tuple(range(1, 11))
    story = Story(found=[(1,)], limits=Limits(write_queue_share=0.15 if why == "the queue is full" else 0.5))
    story.damage(1, SMALL.key((1,)), Blob.CORRUPT)
    story.ask((1,))
    story.end_every(Read)
    story.commit_prefix(prompt)
    story.end_every(Seal)
    assert story.counted("write_deferred") == (3 if why == "the queue is full" else 0)
    if why == "the tier is out":
        story.tiering.set_readable(1, False)
    story.end(Delete)
    assert story.tiering.pending_writes == 10
    story.tiering.set_readable(1, True)
    story.finish_all()
    assert all(map(story.is_below, chunks_of(prompt))) and story.counted("write_dropped_no_parent") == 0


def test_a_corrupt_blob_that_cannot_be_deleted_is_never_held_nor_read_again():
    story, _ = promoted(Blob.CORRUPT)
    story.end(Delete, fault=Outcome.UNAVAILABLE)
    assert story.entry(PREFIX[:2]).blobs == (BlobState.ABSENT, BlobState.CORRUPT)
    lookup = story.ask(PREFIX)
    assert story.figures(lookup) == (1, 1, 1, True) and not story.waiting(Read)


def test_a_store_deletes_such_a_blob_first_and_then_writes():
    story, _ = promoted(Blob.CORRUPT)
    story.end(Delete, fault=Outcome.UNAVAILABLE)
    story.commit_prefix(PREFIX)
    story.end_every(Seal)
    assert story.waiting(Delete) and not story.waiting(Write)
    story.finish_all()
    assert story.media[1][SMALL.key(PREFIX[:2])] is Blob.GOOD


def test_such_a_blob_still_takes_its_room_until_it_is_evicted():
    story, _ = promoted(Blob.CORRUPT, path=PREFIX, capacities=(30,))
    story.end(Delete, fault=Outcome.UNAVAILABLE)
    assert story.tiering.tier_usage(1).used_bytes == 30
    story.store((9,))
    assert story.is_below((9,)) and not story.is_below(PREFIX)


def test_an_unavailable_tier_costs_this_lookup_and_nothing_else():
    story = Story(found=chunks_of(PREFIX))
    lookup = story.ask(PREFIX)
    story.end_every(Read, fault=Outcome.UNAVAILABLE)
    assert story.figures(lookup) == (0, 0, 0, True)
    again = story.ask(PREFIX)
    story.finish_all()
    assert story.figures(again) == (3, 3, 3, True)


def test_a_foreign_blob_found_by_a_read_is_a_miss_for_ever_and_left_alone():
    story, lookup = promoted(Blob.FOREIGN, path=PREFIX)
    assert story.figures(lookup) == (2, 2, 2, True)
    story.release(lookup)
    for _ in range(2):
        story.store(PREFIX)  # the oracle fails on any further job for the blob
        story.flush_host(avoid=PREFIX)
    assert story.media[1][SMALL.key(PREFIX)] is Blob.FOREIGN
    assert story.figures(story.ask(PREFIX))[0] == 2
    assert story.counted("read_failed_foreign") == 1


def test_a_foreign_blob_found_by_a_write_is_left_alone():
    story = Story()
    story.media[1][SMALL.key((1,))] = Blob.FOREIGN
    story.store((1,))
    assert story.entry((1,)).blobs == (BlobState.ABSENT, BlobState.FOREIGN)
    story.ask((1,))
    story.store((1, 2))
    assert story.media[1][SMALL.key((1,))] is Blob.FOREIGN and story.counted("write_failed_foreign") == 1
    assert story.figures(story.ask((1, 2))) == (2, 2, 2, True)  # host memory serves it all the same
    assert story.tiering.tier_usage(1).used_bytes == 0


def test_a_foreign_child_does_not_pin_its_parent_in_host_memory():
    story, lookup = promoted(Blob.FOREIGN, path=(1, 2))
    story.release(lookup)
    assert story.tiering._tiers[1].evict(40) == 2 * SMALL.slot_bytes
    story.finish_all()
    assert story.is_in_host((1,)) and not story.is_below((1,))
    story.flush_host(avoid=(1,))


@pytest.mark.parametrize("damage", [None, Blob.CORRUPT, Blob.FOREIGN])
def test_a_failed_read_drops_the_queued_writes_behind_it(damage):
    story = Story(host_bytes=800, found=[(1,)])
    story.damage(1, SMALL.key((1,)), damage)
    story.ask((1,))
    story.commit(story.session, (1, 2))
    story.step()
    story.end(Read)
    story.end(Seal)
    assert not story.waiting(Write), "a child would be written without its parent"
    assert story.counted("write_dropped_no_parent") == 1


def test_a_write_without_room_makes_room_for_the_next():
    story = Story(found=[(7,), (8,)])
    story.commit_prefix((1,))
    story.end(Seal)
    story.end(Write, fault=Outcome.NO_ROOM)
    assert len(story.waiting(Delete)) == 1
    story.store((2,))
    assert story.is_below((2,)) and not story.is_below((1,)) and not story.is_below((7,))


def test_a_failed_eviction_keeps_the_blob_and_costs_the_write_that_needed_room():
    story = Story(capacities=(20,), found=[(7,), (8,)])
    story.commit_prefix((1,))
    story.end(Seal)
    story.end(Delete, fault=Outcome.UNAVAILABLE)
    assert story.tiering.pending_writes == 0 and story.counted("write_dropped_no_room") == 1
    lookup = story.ask((7,))
    story.finish_all()
    assert story.figures(lookup) == (1, 1, 1, True)


def test_a_blob_that_had_vanished_when_it_was_evicted_gives_its_room_back():
    story = Story(capacities=(20,), found=[(7,), (8,)])
    story.damage(1, SMALL.key((7,)), None)
    story.store((1,))
    assert story.is_below((1,)) and story.tiering.tier_usage(1).used_bytes == 20


def test_two_tiers_serve_from_the_first_that_has_the_chunk():
    story = Story(capacities=(None, None), found=[(1,)], found_behind=[(1,)])
    story.damage(1, SMALL.key((1,)), None)
    lookup = story.ask((1,))
    story.finish_all()
    assert story.figures(lookup) == (0, 0, 0, True)
    again = story.ask((1,))
    assert [job.tier for job in story.jobs if isinstance(job, Read)] == [2]
    story.finish_all()
    assert story.figures(again) == (1, 1, 1, True)


def test_a_blob_that_could_not_be_deleted_is_uploaded_all_the_same():
    story = Story(capacities=(None, None), is_last_shared=True)  # a disk that was remounted read-only, and a bucket
    story.tiering.set_readable(2, False)
    for number in range(3):
        story.store((number,))
    story.commit_prefix((9,))
    story.end_every(Seal)
    story.end(Write, (9,), fault=Outcome.NO_ROOM)
    story.end_every(Delete, fault=Outcome.UNAVAILABLE)
    story.tiering.set_readable(2, True)
    story.finish_all()
    assert story.counted("delete_failed") == 1
    assert [story.is_below((number,), 2) for number in range(3)] == [True, True, True]


def test_a_blob_that_an_operator_removed_and_that_could_not_be_deleted_is_not_uploaded():
    story = Story(capacities=(None, None), is_last_shared=True)
    story.tiering.set_readable(2, False)
    story.store((1,))
    story.remove(1, SMALL.namespace, [SMALL.key((1,))], leaves_holes=False)
    story.step()
    story.end_every(Delete, fault=Outcome.UNAVAILABLE)
    story.tiering.set_readable(2, True)
    story.finish_all()
    assert story.counted("delete_failed") == 1 and story.is_below((1,))
    assert not story.is_below((1,), 2)
