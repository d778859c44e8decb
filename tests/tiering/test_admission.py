"""Admission by the second touch: what is written, when, in which order, and what nothing waits for."""

import pytest

from tests.kit.tiering.world import LARGE, SMALL, SelectiveStory, Story, chunks_of
from tiered_kv.tiering.admission import ALL, SECOND_TOUCH
from tiered_kv.tiering.types import Copy, Limits, Outcome, Probe, Seal, Write

PREFIX = (1, 2, 3)


class CarefulBucket(Story):
    """A disk that takes everything before a bucket that does not."""

    admissions = (ALL, SECOND_TOUCH)


def figures(story: Story, tier: int = 1) -> tuple[int, int]:
    """Chunks admitted and declined."""
    usage = story.tiering.tier_usage(tier)
    return usage.admitted_chunks, usage.declined_chunks


def push_out(story: Story, path: tuple[int, ...]) -> None:
    """Store other chunks until host memory has lost a prefix."""
    number = 1000
    while any(story.is_in_host(chunk) for chunk in chunks_of(path)):
        story.store((number,))
        number += 1


def test_what_is_stored_once_stays_in_host_memory_and_nothing_waits_for_it():
    story = SelectiveStory()
    story.commit_prefix(PREFIX)
    assert story.tiering.pending_writes == 0
    story.finish_all()
    assert not story.media[1] and story.is_in_host(PREFIX)
    entry = story.entry(PREFIX)
    assert (entry.holds, entry.is_unwritten) == (0, False)
    assert figures(story) == (0, 3)


def test_a_second_use_writes_the_whole_prefix_root_first():
    story = SelectiveStory()
    story.store(PREFIX)
    story.release(story.ask(PREFIX))
    assert story.tiering.pending_writes == 3
    for chunk in chunks_of(PREFIX):
        assert len(story.waiting(Write)) == 1
        story.end(Write, chunk)
    assert story.is_below(PREFIX) and figures(story) == (3, 3)


def test_only_what_was_asked_for_is_written():
    story = SelectiveStory()
    story.store((1, 2))
    story.commit(story.session, (1, 3))
    story.finish_all()
    story.release(story.ask((1, 2)))
    story.finish_all()
    assert story.is_below((1, 2)) and not story.is_below((1, 3))


def test_a_use_before_the_seal_has_ended_counts():
    story = SelectiveStory()
    story.commit_prefix(PREFIX)
    story.release(story.ask(PREFIX))
    assert not story.waiting(Write) and story.tiering.pending_writes == 3
    story.finish_all()
    assert story.is_below(PREFIX)


def test_a_seal_that_fails_after_the_use_leaves_no_write_behind():
    story = SelectiveStory()
    story.commit_prefix((1,))
    story.release(story.ask((1,)))
    story.end(Seal, fault=Outcome.UNAVAILABLE)
    story.finish_all()
    assert story.tiering.pending_writes == 0 and not story.is_below((1,))


def test_what_is_dropped_without_a_write_is_written_when_it_is_stored_again():
    story = SelectiveStory()
    story.store(PREFIX)
    push_out(story, PREFIX)
    assert story.entry(PREFIX) is None and not story.media[1]
    story.store(PREFIX)
    assert story.is_below(PREFIX)


def test_the_same_with_plain_lru():
    class Lru(SelectiveStory):
        eviction = "lru"

    story = Lru()
    story.store(PREFIX)
    push_out(story, PREFIX)
    story.store(PREFIX)
    assert story.is_below(PREFIX)


def test_a_second_engine_that_stores_the_same_is_a_second_touch():
    story = SelectiveStory()
    other = story.open(SMALL)
    story.finish_all()
    story.commit_prefix(PREFIX)
    story.commit_prefix(PREFIX, session=other)
    story.finish_all()
    assert story.counted("store_duplicate") == 3 and story.is_below(PREFIX)


def test_a_chunk_behind_an_admitted_prefix_is_not_admitted_with_it():
    story = SelectiveStory()
    story.store((1,))
    story.release(story.ask((1,)))
    story.finish_all()
    story.commit(story.session, (1, 2))
    story.finish_all()
    assert story.is_below((1,)) and not story.is_below((1, 2))


@pytest.mark.parametrize("how", ["want", "pin"])
def test_what_is_wanted_is_written_at_once_with_the_prefix_before_it(how):
    story = SelectiveStory()
    story.store(PREFIX)
    if how == "want":
        story.tiering.want(SMALL.namespace, SMALL.key(PREFIX[:2]))
    else:
        story.tiering.set_pinned(1, iter([SMALL.key(PREFIX[:2])]))
    story.finish_all()
    assert story.is_below(PREFIX[:2]) and not story.is_below(PREFIX)


@pytest.mark.parametrize("pins", [[PREFIX], chunks_of(PREFIX), [PREFIX[:2], PREFIX], chunks_of(PREFIX)[::-1]])
def test_what_many_pins_want_is_queued_in_parts_and_written_meanwhile(monkeypatch, pins):
    """The deepest chunk was wanted first, and with it, in one step, the whole prefix: 0.1 s at 4,096 chunks."""
    monkeypatch.setattr("tiered_kv.tiering.tiers.WANTED_AT_ONCE", 1)
    story = SelectiveStory()
    story.store(PREFIX)
    wanted = []
    for _ in story.tiering.pinning(1, map(SMALL.key, pins)):
        wanted.append(sum(story.uses(PREFIX)))
        story.step()
    assert wanted == [0, 1, 2]
    story.finish_all()
    assert story.is_below(PREFIX) and story.uses(PREFIX) == [1, 1, 1]


def test_another_namespace_cannot_want_a_chunk():
    story = SelectiveStory()
    story.store((1,))
    story.tiering.want(b"somebody elses..", SMALL.key((1,)))
    story.finish_all()
    assert not story.is_below((1,))


def test_memory_that_is_needed_is_there_without_a_write_and_admitted_writes_go_on():
    story = SelectiveStory(host_bytes=160)
    for number in range(40):
        story.store((number,))
    assert not story.media[1] and story.counted("store_deferred") == 0
    story.release(story.ask((39,)))
    story.finish_all()
    assert set(story.media[1]) == {SMALL.key((39,))}


def test_an_admitted_write_that_finds_no_room_in_the_queue_is_put_off_and_taken_up_again():
    story = SelectiveStory(host_bytes=160, limits=Limits(write_queue_share=0.125, credit_share=0.5))
    for number in range(4):
        story.store((number,))
    for number in range(4):
        story.release(story.ask((number,)))
    assert story.counted("write_deferred") == 2 and story.tiering.pending_writes == 4
    story.finish_all()
    assert all(story.is_below((number,)) for number in range(4))
    assert figures(story) == (4, 4)  # put off or not, each was admitted once


def test_a_failed_write_is_tried_again_when_the_chunk_is_used():
    story = SelectiveStory()
    story.store((1,))
    story.release(story.ask((1,)))
    story.end(Write, fault=Outcome.UNAVAILABLE)
    story.release(story.ask((1,)))
    story.finish_all()
    assert story.is_below((1,)) and figures(story) == (2, 1)


def test_a_blob_found_at_start_counts_as_unused_and_a_child_of_it_waits_for_its_second_touch():
    story = SelectiveStory(found=[(1,)])
    story.release(story.ask((1,)))
    story.finish_all()
    story.commit(story.session, (1, 2))
    story.finish_all()
    assert not story.is_below((1, 2))
    story.release(story.ask((1, 2)))
    story.finish_all()
    assert story.is_below((1, 2))


def test_what_a_lookup_itself_pushes_out_of_memory_is_not_called_held():
    """Else its client would not store it again, and nobody would have it."""
    story = SelectiveStory(host_bytes=60, limits=Limits(leased_share=1.0, request_share=0.17, credit_share=0.1))
    story.store((1,))
    story.release(story.ask((1,)))
    story.finish_all()
    push_out(story, (1,))
    story.commit(story.session, (1, 2))
    story.finish_all()
    for number in range(1000, 1020):
        if story.is_in_host((number,)):
            story.ask((number,))
    story.finish_all()
    assert story.is_in_host((1, 2)) and not story.is_in_host((1,))
    lookup = story.ask((1, 2))
    assert not story.is_in_host((1, 2)), "the only slot that could be had"
    assert story.answer(lookup).held == 1


# -- a bucket behind a disk --------------------------------------------------------------------------------------------


def test_a_disk_takes_what_the_bucket_behind_it_declines():
    story = CarefulBucket(capacities=(None, None))
    story.store(PREFIX)
    assert story.is_below(PREFIX) and not story.media[2]
    assert story.tiering.pending_writes == 0
    assert (figures(story, 1), figures(story, 2)) == ((3, 0), (0, 3))


def test_a_use_uploads_the_prefix_from_the_disk_also_when_host_memory_has_lost_it():
    story = CarefulBucket(capacities=(None, None))
    story.keep_only_below(PREFIX)
    story.release(story.ask(PREFIX, start=3))
    assert len(story.waiting(Copy)) == 1  # the root alone: a child follows its parent
    story.finish_all()
    assert all(story.is_below(chunk, 2) for chunk in chunks_of(PREFIX))
    assert figures(story, 2)[0] == 3


def test_what_an_earlier_life_has_not_uploaded_waits_for_its_use():
    story = CarefulBucket(capacities=(None, None), found=chunks_of(PREFIX))
    assert not story.media[2] and not story.waiting(Copy)
    story.release(story.ask(PREFIX[:2], start=2))
    story.finish_all()
    assert story.is_below(PREFIX[:2], 2) and not story.is_below(PREFIX, 2)


def test_what_is_pinned_at_start_is_uploaded_when_a_session_of_its_namespace_opens():
    story = CarefulBucket(capacities=(None, None))
    story.restore(1, LARGE, (1,))
    story.tiering.set_pinned(1, [LARGE.key((1,))])
    story.finish_all()
    assert not story.media[2]
    story.open_large()
    assert LARGE.key((1,)) in story.media[2]


def test_what_another_machine_stored_is_kept_on_disk_when_it_is_asked_for_here():
    story = SelectiveStory(capacities=(None, None), is_last_shared=True)
    story.others_store(SMALL, PREFIX)
    lookup = story.ask(PREFIX)
    story.end(Probe)
    story.finish_all()
    assert story.answer(lookup).ready == 3
    assert all(story.is_below(chunk) for chunk in chunks_of(PREFIX))


# -- accounts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Story, SelectiveStory])
def test_what_was_admitted_is_written_dropped_or_under_way(kind):
    story = kind(host_bytes=160)
    for number in range(8):
        story.store((number,))
        story.release(story.ask((number,)))
        story.finish_all()
    assert figures(story)[0] == story.counted("written") == 8
    assert figures(story)[1] == (8 if kind is SelectiveStory else 0)


def test_the_check_finds_a_write_that_nobody_admitted():
    story = SelectiveStory()
    story.commit_prefix((1,))
    story.release(story.ask((1,)))
    story.end(Seal)
    story.entry((1,)).uses = 0
    with pytest.raises(AssertionError, match="was not admitted"):
        story.tiering.check_integrity()
