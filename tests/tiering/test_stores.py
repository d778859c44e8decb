"""Stores: dedupe, the write-through to the first secondary tier and its queue."""

import pytest

from tests.kit.tiering.oracle import Blob
from tests.kit.tiering.world import LARGE, LEVELS, SMALL, Story, chunks_of
from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.tiering.types import Delete, Grow, Limits, Outcome, Read, Seal, Write
from tiered_kv.tiering.write_through import WRITES_MAX

PREFIX = (1, 2, 3, 4)


def test_a_store_is_sealed_then_visible_then_written():
    story = Story()
    story.commit_prefix((1,))
    assert story.tiering.pending_writes == 1
    story.end(Seal)
    assert story.figures(story.ask((1,))) == (1, 1, 1, True)
    story.end(Write)
    assert story.is_below((1,)) and story.tiering.pending_writes == 0


def test_a_child_is_written_only_after_its_parent():
    story = Story()
    story.commit_prefix(PREFIX)
    for chunk in reversed(chunks_of(PREFIX)):
        story.end(Seal, chunk)
    for chunk in chunks_of(PREFIX):
        assert len(story.waiting(Write)) == 1
        story.end(Write, chunk)
    assert story.is_below(PREFIX)


def test_prefixes_are_written_side_by_side():
    story = Story()
    for number in range(3):
        story.commit_prefix((number,))
    story.end_every(Seal)
    assert len(story.waiting(Write)) == 3


def test_the_second_store_of_a_chunk_gives_its_slot_back():
    story = Story()
    other = story.open(SMALL)
    story.finish_all()
    story.commit_prefix((1,))
    story.commit_prefix((1,), session=other)
    story.finish_all()
    assert story.counted("store_duplicate") == 1 and story.counted("written") == 1
    assert story.figures(story.ask((1,), session=other)) == (1, 1, 1, True)


def test_a_store_of_a_chunk_that_is_only_on_disk_brings_it_back_without_a_write():
    story = Story()
    story.keep_only_below((1,))
    written = story.counted("written")
    story.store((1,))
    assert story.is_in_host((1,)) and story.counted("written") == written
    assert not story.waiting(Read)


@pytest.mark.parametrize(
    "changes",
    [{"prefix_sha256": bytes(32)}, {"parent": bytes(16)}, {"chunk_index": 7}, {"namespace": b"somebody elses.."}],
    ids=lambda changes: next(iter(changes)),
)
def test_a_record_that_contradicts_the_known_one_gives_its_slot_back(changes):
    story = Story()
    story.store((1,))
    known = SMALL.record((1,))
    fields = {name: getattr(known, name) for name in ChunkRecord.__slots__}
    slot = story.credits[story.session].pop()
    story.tiering.commit(story.session, slot, ChunkRecord(**(fields | changes)))
    story.finish_all()
    assert story.counted("store_collision") == 1
    assert story.figures(story.ask((1,))) == (1, 1, 1, True)


def test_a_record_of_another_namespace_than_the_sessions_is_not_taken():
    story = Story()
    slot = story.credits[story.session].pop()
    story.tiering.commit(story.session, slot, ChunkRecord(b"somebody elses..", b"k" * 16, b"p" * 16, 0, bytes(32)))
    story.finish_all()
    assert story.counted("store_collision") == 1 and story.tiering.usage()["chunks"] == 0


def test_records_that_name_each_other_as_parents_form_no_cycle():
    story = Story()
    for index, (key, parent) in enumerate([(b"a" * 16, b"b" * 16), (b"b" * 16, b"a" * 16), (b"c" * 16, b"c" * 16)]):
        record = ChunkRecord(SMALL.namespace, key, parent, index + 1, bytes(32))
        story.tiering.commit(story.session, story.credits[story.session].pop(), record)
        story.tiering.touch_prefix(key)
        for job in story.tiering.take_jobs():
            if isinstance(job, Seal):
                story.tiering.sealed(job, Outcome.OK)
        story.step()
    assert story.tiering.usage()["chunks"] == 3


def test_a_slot_that_was_not_granted_is_refused():
    story = Story()
    stranger = story.open(SMALL)
    story.finish_all()
    slot = story.credits[stranger][0]
    with pytest.raises(KeyError):
        story.tiering.commit(story.session, slot, SMALL.record((1,)))
    with pytest.raises(KeyError):
        story.tiering.give_back(story.session, slot)
    story.check()


def test_a_chunk_whose_parent_is_unknown_stays_in_host_memory():
    story = Story()
    story.commit(story.session, (1, 2))
    story.finish_all()
    assert story.counted("write_dropped_no_parent") == 1
    assert story.is_in_host((1, 2)) and not story.is_below((1, 2))


def test_a_lookup_gives_writes_that_were_dropped_another_chance():
    story = Story()
    story.commit_prefix(PREFIX)
    story.end_every(Seal)
    story.end(Write, PREFIX[:1], fault=Outcome.UNAVAILABLE)
    assert story.tiering.pending_writes == 0 and story.counted("write_dropped_no_parent") == 3
    story.ask(PREFIX, start=4)  # also of chunks that the request does not want
    story.finish_all()
    assert story.is_below(PREFIX)


def test_a_failed_write_drops_its_queued_descendants_and_no_others():
    story = Story()
    story.commit_prefix((1, 2, 3))
    story.commit_prefix((7, 8))
    story.end_every(Seal)
    story.end(Write, (1,))
    story.end(Write, (1, 2), fault=Outcome.UNAVAILABLE)
    story.finish_all()
    assert [story.is_below(chunk) for chunk in [(1,), (1, 2), (1, 2, 3), (7,), (7, 8)]] == [
        True,
        False,
        False,
        True,
        True,
    ]


def test_a_child_that_is_sealed_after_its_write_was_dropped_waits_for_nobody():
    story = Story()
    story.commit_prefix((1, 2))
    story.end(Seal, (1,))
    story.end(Write, (1,), fault=Outcome.UNAVAILABLE)
    story.end(Seal, (1, 2))
    assert story.tiering.pending_writes == 0
    assert story.figures(story.ask((1, 2))) == (2, 2, 2, True)


def test_a_full_write_queue_puts_writes_off_until_it_has_room():
    story = Story(host_bytes=160, limits=Limits(write_queue_share=0.125, credit_share=0.5))
    for number in range(4):
        story.store_without_writes((number,))
    assert len(story.waiting(Write)) == 2 and story.counted("write_deferred") == 2
    assert story.tiering.pending_writes == 4
    story.finish_all()
    assert all(story.is_below((number,)) for number in range(4))


def test_descendants_of_a_write_that_was_put_off_follow_it():
    story = Story(host_bytes=160, limits=Limits(write_queue_share=0.125, credit_share=0.5))
    for number in range(2):
        story.store_without_writes((number,))
    story.store_without_writes((7,))
    story.store_without_writes((7, 8))
    assert story.counted("write_deferred") == 2 and story.counted("write_dropped_no_parent") == 0
    story.finish_all()
    assert story.is_below((7, 8))


def test_a_chunk_that_was_evicted_before_its_turn_is_never_written():
    story = Story(host_bytes=160, limits=Limits(write_queue_share=0.07, credit_share=0.5))
    for number in range(20):
        story.store_without_writes((number,))
    assert story.counted("write_deferred") > 10
    gone = [number for number in range(1, 20) if not story.is_in_host((number,))]
    story.finish_all()
    assert gone and not any(story.is_below((number,)) for number in gone)
    assert story.counted("write_dropped_evicted") == len(gone)


def test_only_so_many_writes_are_handed_out_at_once():
    story = Story(host_bytes=2000)
    for number in range(WRITES_MAX + 5):
        story.store_without_writes((number,))
    assert len(story.waiting(Write)) == WRITES_MAX
    story.finish_all()
    assert story.counted("written") == WRITES_MAX + 5


def test_a_promotion_takes_the_slot_of_a_store_that_is_not_being_written():
    limits = Limits(leased_share=1.0, request_share=1.0, write_queue_share=1.0)
    story = Story(host_bytes=800, limits=limits, found=chunks_of(tuple(range(70))))
    for number in range(60):  # three quarters of the slots: the rest are credits
        story.store_without_writes((1000 + number,))
    assert story.tiering.pending_writes == 60 and len(story.waiting(Write)) == WRITES_MAX
    lookup = story.ask(tuple(range(70)))
    assert story.counted("write_dropped_for_load") > 0
    story.finish_all()
    assert story.answer(lookup).ready > WRITES_MAX


def test_a_store_that_was_dropped_and_made_again_is_written_once_it_is_sealed():
    # The second tier has it, so that it stays known when it leaves host memory.
    story = Story(host_bytes=40, capacities=(30, None), found=[(7,), (8,), (9,)], found_behind=[(2,)])
    for path in [(1,), (2,)]:
        story.store_without_writes(path)  # both wait for room, the second behind the first
    story.ask((8,))
    story.ask((9,))  # takes the slot of the second store
    story.end_every(Read)
    assert not story.is_in_host((2,)) and story.counted("write_dropped_for_load") == 1
    assert story.commit(story.session, (2,))
    story.step()
    for kind in (Delete, Write):
        story.end_every(kind)  # the oracle fails if the second is written now
    assert story.waiting(Seal, (2,)) and not story.waiting(Write)
    story.finish_all()


def test_without_a_lower_tier_a_store_is_pending_until_it_is_sealed():
    story = Story(capacities=())
    story.commit_prefix((1,))
    assert story.tiering.pending_writes == 1
    story.end(Seal)
    assert story.tiering.pending_writes == 0


def test_a_write_that_finds_the_slot_damaged_evicts_the_chunk():
    story = Story()
    story.commit_prefix((1,))
    story.end(Seal)
    story.end(Write, fault=Outcome.CORRUPT)
    assert not story.is_in_host((1,))
    assert story.figures(story.ask((1,))) == (0, 0, 0, True)


def test_a_chunk_whose_slot_was_found_damaged_is_promised_to_nobody_while_somebody_uses_it():
    story = Story()
    story.commit_prefix((1, 2))
    story.end(Seal, (1,))
    story.end(Seal, (1, 2))
    relies = story.ask((1, 2))
    assert story.figures(relies) == (2, 2, 2, True)
    story.claim(relies)
    story.end(Write, fault=Outcome.CORRUPT)
    assert story.is_in_host((1,)), "its slot is read from"
    assert story.figures(story.ask((1, 2))) == (0, 0, 0, True)
    assert story.tiering.held_here(SMALL.namespace, [SMALL.key((1,))]) == 0
    story.release(relies)
    story.step()
    assert not story.is_in_host((1,))
    story.finish_all()


def test_who_was_promised_a_chunk_hears_that_its_slot_was_found_damaged():
    """A load of it is worth nothing from then on; what was claimed keeps its slots until it is released."""
    story = Story()
    story.commit_prefix((1, 2))
    story.end(Seal, (1,))
    story.end(Seal, (1, 2))
    story.commit_prefix((7,))
    story.end(Seal, (7,))
    waits, loads, other = story.ask((1, 2)), story.ask((1, 2)), story.ask((7,))
    story.claim(loads)
    story.end(Write, (1,), fault=Outcome.CORRUPT)
    assert story.ended == [waits] and story.worthless == {loads} and story.counted("lease_damaged") == 2
    assert story.is_in_host((1,)), "its slot is read from"
    assert story.figures(story.ask((1, 2))) == (0, 0, 0, True)
    story.release(loads)
    story.step()
    assert not story.is_in_host((1,)) and story.is_in_host((1, 2))
    story.release(other)
    story.finish_all()


def test_of_damage_whoever_waits_hears_and_a_lost_client_does_not():
    story = Story()
    story.commit_prefix((1,))
    story.commit_prefix((2,))
    story.end_every(Seal)
    lost = story.open(SMALL)
    waits = [story.ask((1,)), story.ask((2,))]
    loads = story.ask((1,), session=lost)
    story.claim(loads)
    story.ask((2,), session=lost)
    story.suspend(lost)
    for write in [story.tiering.written] * 2:
        write(story.jobs.pop(story.waiting(Write)[0]), Outcome.CORRUPT)
    story.step()
    assert story.ended == waits and not story.worthless and story.counted("lease_damaged") == 2
    assert story.is_in_host((1,)) and story.is_in_host((2,)), "a process may still read them"
    story.close(lost)
    story.step()
    assert not story.is_in_host((1,)) and not story.is_in_host((2,))


def test_who_was_promised_a_tail_hears_that_its_slot_was_found_damaged():
    story = Story(limits=Limits(few_chunks=1))
    story.store((1, 2))
    assert story.commit_tail(story.session, (1, 2), "end")
    story.step()
    story.tiering.save_tails()
    lookup = story.lookup(story.session, (1, 2), wants_tails=True)
    story.step()
    assert [tail.slot is None for tail in story.answer(lookup).tails] == [False]
    story.end(Write, fault=Outcome.CORRUPT)
    assert story.ended == [lookup]
    assert not story.answer(story.ask((1, 2))).tails
    story.finish_all()


# -- stores that give way to loads -------------------------------------------------------------------------------------


def commit_until_full(story: Story, session: int) -> tuple[int, ...]:
    """Commit one prompt until no slot is left: its first chunk is written, all others wait behind it."""
    path: tuple[int, ...] = ()
    while story.commit(session, (*path, 100)):
        path = (*path, 100)
        story.step()
        story.end_every(Grow)
    return path


FOR_STORES = Limits(leased_share=1.0, request_share=1.0, write_queue_share=1.0, credit_share=0.2)


def test_a_load_takes_the_newest_store_that_is_sealed_and_that_nobody_reads():
    story = Story(host_bytes=160, limits=FOR_STORES, found=[(5,)])
    path = commit_until_full(story, story.session)
    for chunk in chunks_of(path)[:-1]:
        story.end(Seal, chunk)
    story.ask(path[:-1], start=len(path) - 2)  # the newest that is sealed
    lookup = story.ask((5,))
    story.end_every(Read)
    assert story.figures(lookup) == (1, 1, 1, True)
    assert [story.is_in_host(chunk) for chunk in chunks_of(path)] == [True] * 13 + [False, True, True]
    assert (story.counted("write_dropped_for_load"), story.counted("write_dropped_no_parent")) == (1, 2)
    assert story.tiering.pending_writes == 13


def test_a_load_takes_no_store_of_another_slot_size():
    story = Story(host_bytes=160, limits=FOR_STORES, found=[(5,)])
    large = story.open_large()
    path = commit_until_full(story, story.session)
    newest = commit_until_full(story, large)
    story.end_every(Seal)
    lookup = story.ask((5,))
    story.end_every(Read)
    assert story.figures(lookup) == (1, 1, 1, True)
    assert story.is_in_host(newest, LARGE) and not story.is_in_host(path)
    assert story.counted("write_dropped_for_load") == 1


def test_a_slot_that_another_size_waits_for_goes_to_no_load():
    story = Story(host_bytes=160, limits=FOR_STORES, found=[(5,)])
    story.store_without_writes((9,))
    path: tuple[int, ...] = ()
    for _ in range(15):
        path = (*path, 100)
        story.store_without_writes(path)
    story.end(Write, (9,))  # its slot, in the first slab, is the last that can be had
    path = (*path, 100)
    story.store_without_writes(path)
    large = story.open(LARGE)
    story.step()
    is_draining = story.tiering.slots.is_draining
    assert is_draining(story.entry(path).slot) and not is_draining(story.entry(path[:-1]).slot)
    lookup = story.ask((5,))
    assert story.counted("write_dropped_for_load") == 2 and not story.is_in_host(path[:-1])
    story.end(Read)
    assert story.figures(lookup) == (1, 1, 1, True)
    story.finish_all()
    assert story.credits[large], "the slab was emptied for it"


def test_a_write_that_was_put_off_waits_for_no_seal_where_its_chunk_is_being_read_again():
    """It left host memory meanwhile and comes back from the bucket: what was read is written, and nothing stays."""
    story = Story(capacities=(None, None), found_behind=[(1,), (1, 2)])
    story.tiering.set_readable(1, False)
    story.commit_prefix((1, 2))
    story.end_every(Seal)
    keys = [SMALL.key(chunk) for chunk in chunks_of((1, 2))]
    assert story.remove(0, SMALL.namespace, keys, leaves_holes=True).removed == 2
    lookup = story.ask((1, 2))
    assert len(story.waiting(Read)) == 2 and story.tiering.pending_writes == 2
    story.tiering.set_readable(1, True)
    story.step()
    story.finish_all()
    assert story.figures(lookup) == (2, 2, 2, True)
    assert story.is_below((1,)) and story.is_below((1, 2)) and story.tiering.pending_writes == 0
    story.release(lookup)
    assert not story.entry((1, 2)).holds


def test_a_chunk_that_was_stored_over_a_bad_blob_and_left_is_written_once_it_is_read_again():
    story = Story(capacities=(None, None), found_behind=[(1,)])
    story.store((1,))
    story.remove(0, SMALL.namespace, [SMALL.key((1,))], leaves_holes=True)
    story.damage(1, SMALL.key((1,)), Blob.CORRUPT)
    story.release(story.ask((1,)))
    story.end(Read)
    assert story.waiting(Delete) and story.commit(story.session, (1,))
    story.step()
    story.end_every(Seal)
    story.remove(0, SMALL.namespace, [SMALL.key((1,))], leaves_holes=True)
    lookup = story.ask((1,))
    assert story.waiting(Read) and story.waiting(Delete)
    story.end(Delete)
    story.finish_all()
    assert story.figures(lookup) == (1, 1, 1, True) and story.is_below((1,))
    story.release(lookup)
    assert not story.entry((1,)).holds and story.tiering.pending_writes == 0


def test_a_prefix_that_is_not_dated_yet_is_evicted_from_its_end(monkeypatch):
    story = Story()
    monkeypatch.setattr(story.tiering, "_date_touched", lambda: None)
    story.store((0,))
    story.store(PREFIX)
    held = []
    for number in range(LEVELS * story.tiering.slots.slot_count_max(SMALL.slot_bytes)):
        story.store((1000 + number,))
        held.append([story.is_in_host(chunk) for chunk in chunks_of(PREFIX)])
        assert held[-1] == sorted(held[-1], reverse=True)
    assert sum(held[0]) == 4 and not any(held[-1])
