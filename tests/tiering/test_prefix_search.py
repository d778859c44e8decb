"""How much of a prefix a shared tier has is found with few questions, and none twice."""

from itertools import permutations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.tiering.oracle import Blob, World
from tests.kit.tiering.world import LARGE, SMALL, Story, chunks_of
from tiered_kv.tiering.admission import ALL, SECOND_TOUCH
from tiered_kv.tiering.prefix_search import SEARCHES_MAX
from tiered_kv.tiering.tiering import Tiering
from tiered_kv.tiering.types import HOST, Copy, Outcome, Probe, Read, Seal, TierSpec, Write
from tiered_kv.tiering.upload import COPIES_MAX

LONG = tuple(range(512))
PROBES_MAX = 24


def shared(capacities=(None,), **options):
    return Story(host_bytes=20_000, capacities=capacities, is_last_shared=True, **options)


@pytest.mark.parametrize("there", [0, 1, 2, 63, 64, 65, 200, 448, 511, 512])
def test_512_unknown_chunks_cost_at_most_24_probes_and_none_once_known(there):
    story = shared()
    story.others_store(SMALL, LONG[:there])
    lookup = story.ask(LONG, start=len(LONG))  # nothing is wanted, so nothing is promoted
    story.finish_all()
    assert story.figures(lookup) == (there, 0, 0, True)
    assert 1 <= story.counted("probes") <= PROBES_MAX
    before = story.counted("probes")
    again = story.ask(LONG, start=len(LONG))
    story.finish_all()
    assert story.figures(again) == (there, 0, 0, True)
    assert story.counted("probes") == before


@pytest.mark.parametrize(
    ("there", "probes"),
    [(0, 1), (1, 1), (100, 1), (511, 1), (512, 1)],
    ids=["none", "one", "some", "all but one", "all"],
)
def test_a_tier_that_takes_many_names_is_asked_once(there, probes):
    story = shared(names_at_once=1024)
    story.others_store(SMALL, LONG[:there])
    lookup = story.ask(LONG, start=len(LONG))
    story.finish_all()
    assert story.figures(lookup) == (there, 0, 0, True) and story.counted("probes") == probes
    again = story.ask(LONG[: max(1, there)], start=max(1, there))
    story.finish_all()
    assert story.figures(again) == (there, 0, 0, True) and story.counted("probes") == probes


def test_a_prefix_longer_than_a_question_takes_several_in_turn():
    story = shared(names_at_once=100)
    story.others_store(SMALL, LONG[:250])
    lookup = story.ask(LONG, start=len(LONG))
    asked = []
    while story.jobs:
        asked += [len(job.records) for job in story.jobs if isinstance(job, Probe)]
        story.finish(0)
    assert story.figures(lookup) == (250, 0, 0, True) and asked == [100, 100, 100]


def test_only_what_was_looked_at_counts_as_absent():
    """A hole ends what one question tells: chunks behind it may be there."""
    story = shared(names_at_once=1024)
    story.others_store(SMALL, LONG[:8])
    story.damage(1, SMALL.key(LONG[:4]), None)
    lookup = story.ask(LONG[:8], start=8)
    story.finish_all()
    assert story.figures(lookup) == (3, 0, 0, True)
    searches = story.tiering._tiers.searches
    assert [searches._is_absent(SMALL.key(LONG[:depth])) for depth in range(1, 9)] == [False] * 3 + [True] + [False] * 4


def test_lookups_that_share_a_beginning_share_the_question_for_it():
    story = shared(names_at_once=1024)
    other = (*LONG[:20], *range(1000, 1010))
    story.others_store(SMALL, LONG[:40])
    story.others_store(SMALL, other)
    lookups = [story.ask(LONG), story.ask(other), story.ask(LONG)]
    probes = [job for job in story.jobs if isinstance(job, Probe)]
    assert [len(probe.records) for probe in probes] == [512, 10]
    story.finish_all()
    assert [story.figures(lookup) for lookup in lookups] == [(40, 40, 40, True), (30, 30, 30, True), (40, 40, 40, True)]


@pytest.mark.parametrize("names_at_once", [1, 1024])
def test_a_hint_goes_with_every_question_and_past_what_was_absent(names_at_once):
    story = shared(names_at_once=names_at_once)
    story.ask(LONG[:20])
    story.finish_all()
    story.others_store(SMALL, LONG[:12])
    assert story.figures(story.ask(LONG[:20])) == (0, 0, 0, True), "absent a moment ago"
    lookup = story.lookup(story.session, LONG[:20], hint="there")
    story.step()
    hints = set()
    while story.jobs:
        hints |= {job.hint for job in story.jobs if isinstance(job, Probe)}
        story.finish(0)
    assert hints == {"there"}
    assert story.figures(lookup) == (12, 12, 12, True)


@given(length=st.integers(1, 80), data=st.data())
def test_any_prefix_is_found_to_the_chunk(length, data):
    there = data.draw(st.integers(0, length))
    story = shared(names_at_once=data.draw(st.sampled_from([1, 1, 2, 30, 1024])))
    path = tuple(range(length))
    story.others_store(SMALL, path[:there])
    lookup = story.ask(path)
    while story.jobs:
        story.finish(data.draw(st.integers(0, len(story.jobs) - 1)))
    assert story.figures(lookup) == (there, there, there, True)


def test_a_prompt_nobody_has_costs_one_probe():
    story = shared()
    lookup = story.ask(LONG)
    assert len(story.waiting(Probe)) == 1 and story.answer(lookup).unknown == 512
    story.finish_all()
    assert story.figures(lookup) == (0, 0, 0, True) and story.counted("probes") == 1


def test_what_was_absent_is_asked_for_again_after_a_while():
    story = shared()
    story.ask((1,))
    story.finish_all()
    story.others_store(SMALL, (1,))
    story.tiering.age_absences()
    assert story.figures(story.ask((1,))) == (0, 0, 0, True)
    story.tiering.age_absences()
    lookup = story.ask((1,))
    story.finish_all()
    assert story.figures(lookup) == (1, 1, 1, True) and story.counted("probes") == 2


def test_promotions_begin_while_the_search_goes_on():
    story = shared()
    story.others_store(SMALL, LONG)
    lookup = story.ask(LONG)
    story.end(Probe)
    assert story.waiting(Read, LONG[:1]) and story.waiting(Probe)
    story.end(Read)
    update = story.answer(lookup)
    assert (update.held, update.ready, update.unknown, update.is_done) == (1, 1, 511, False)


def test_lookups_that_ask_the_same_share_their_probes():
    story = shared()
    story.others_store(SMALL, LONG[:40])
    lookups = [story.ask(LONG) for _ in range(5)]
    story.finish_all()
    assert {story.figures(lookup) for lookup in lookups} == {(40, 40, 40, True)}
    assert story.counted("probes") <= PROBES_MAX


def test_a_search_goes_on_without_its_lookup_so_that_the_next_one_is_quick():
    story = shared()
    story.others_store(SMALL, LONG[:30])
    lookup = story.ask(LONG)
    story.end(Probe)
    story.release(lookup)
    story.finish_all()
    probes = story.counted("probes")
    again = story.ask(LONG)
    story.finish_all()
    assert story.figures(again) == (30, 30, 30, True) and story.counted("probes") == probes


def test_a_hole_is_an_ordinary_miss_at_the_read_and_is_stored_again():
    story = shared()
    story.others_store(SMALL, LONG[:8])
    story.damage(1, SMALL.key(LONG[:3]), None)
    lookup = story.ask(LONG[:8])
    story.finish_all()
    held, slots, ready, is_done = story.figures(lookup)
    assert (held, slots, ready, is_done) in [(2, 2, 2, True)]
    story.store(LONG[:8])
    again = story.ask(LONG[:8])
    story.finish_all()
    assert story.figures(again) == (8, 8, 8, True) and story.is_below(LONG[:3])


@pytest.mark.parametrize("options", [{}, {"names_at_once": 1024}], ids=["probes", "one question"])
def test_a_tier_that_does_not_answer_ends_the_search_and_is_remembered_as_nothing(options):
    story = shared(**options)
    story.others_store(SMALL, LONG[:5])
    lookup = story.ask(LONG[:5])
    story.end(Probe, fault=Outcome.UNAVAILABLE)
    assert story.figures(lookup) == (0, 0, 0, True)
    again = story.ask(LONG[:5])
    story.finish_all()
    assert story.figures(again) == (5, 5, 5, True)


def test_an_unreadable_tier_costs_a_lookup_nothing_and_its_hits_come_back():
    story = Story(is_last_shared=True)
    story.others_store(SMALL, LONG[:5])
    lookup = story.ask(LONG[:5])
    story.finish_all()
    assert story.figures(lookup) == (5, 5, 5, True)
    story.release(lookup)
    story.flush_host(avoid=LONG[:5])
    story.tiering.set_readable(1, False)
    lookup = story.ask(LONG[:5])
    assert story.figures(lookup) == (0, 0, 0, True) and not story.waiting(Probe) and not story.waiting(Read)
    story.tiering.set_readable(1, True)
    again = story.ask(LONG[:5])
    story.finish_all()
    assert story.figures(again) == (5, 5, 5, True)


def out(capacities=(None,), **options):
    """A tier that is out, of which others have a part; ``beside`` says which."""
    story = Story(
        host_bytes=240,
        capacities=capacities,
        is_last_shared=True,
        names_at_once=1024,
        is_asked_while_out=True,
        **options,
    )
    story.beside = set()
    return story


def others_have_beside(story, path):
    story.others_store(SMALL, path)
    story.beside.update(SMALL.prefix(path)[0])


def test_while_a_tier_is_out_what_is_found_beside_it_is_read_and_nothing_else():
    story = out()
    story.others_store(SMALL, LONG[:8])
    lookup = story.ask(LONG[:8])
    story.finish_all()
    assert story.figures(lookup) == (8, 8, 8, True)
    story.release(lookup)
    story.flush_host(avoid=LONG[:8])
    story.tiering.set_readable(1, False)
    story.beside.update(SMALL.prefix(LONG[:3])[0])
    lookup = story.ask(LONG[:8])
    assert story.figures(lookup)[0] == 0 and not story.waiting(Read), "what was known of it holds no more"
    story.finish_all()
    assert story.figures(lookup) == (3, 3, 3, True)
    assert story.counted("read_failed_unavailable") == 0, "what lies in the tier alone takes no slot"
    story.release(lookup)
    story.tiering.set_readable(1, True)
    lookup = story.ask(LONG[:8])
    story.finish_all()
    assert story.figures(lookup) == (8, 8, 8, True)


def test_what_is_found_beside_a_tier_that_is_out_is_asked_for_once_and_so_is_what_is_not():
    story = out()
    story.tiering.set_readable(1, False)
    others_have_beside(story, LONG[:3])
    for _ in range(3):
        lookup = story.ask(LONG[:8], start=8)
        story.finish_all()
        assert story.figures(lookup) == (3, 0, 0, True)
        nothing = story.ask((7, 7))
        story.end_every(Probe, fault=Outcome.UNAVAILABLE)  # nobody beside it has any, and it does not answer
        assert story.figures(nothing) == (0, 0, 0, True)
        story.release(lookup)
        story.release(nothing)
    assert story.counted("probes") == 2
    story.tiering.set_readable(1, True)
    story.others_store(SMALL, (7, 7))
    lookup = story.ask((7, 7))
    story.finish_all()
    assert story.figures(lookup) == (2, 2, 2, True), "what nobody knew is asked for as soon as it is back"


def test_a_read_beside_a_tier_that_is_out_which_fails_is_not_tried_again_unasked():
    story = out()
    story.tiering.set_readable(1, False)
    others_have_beside(story, LONG[:3])
    lookup = story.ask(LONG[:3])
    story.end(Probe)
    story.end(Read, fault=Outcome.UNAVAILABLE)
    story.beside.clear()
    story.finish_all()
    assert story.figures(lookup) == (0, 0, 0, True), "what failed is to be stored again"
    story.release(lookup)
    assert not story.tiering.index.held_prefix(SMALL.namespace, *SMALL.prefix(LONG[:3]))
    again = story.ask(LONG[:3])
    assert not story.waiting(Read)
    story.finish_all()
    assert story.figures(again) == (0, 0, 0, True)


def test_what_a_tier_that_is_out_lends_says_nothing_of_the_tier_above_it():
    story = out(capacities=(None, None))
    story.keep_only_below((1, 2, 3))
    story.tiering.set_readable(2, False)
    others_have_beside(story, (1, 2, 3, 4, 5))
    lookup = story.ask((1, 2, 3, 4, 5))
    story.finish_all()
    assert story.figures(lookup) == (5, 5, 5, True)
    story.release(lookup)
    story.flush_host(avoid=(1, 2, 3, 4, 5))
    story.tiering.set_readable(1, False)
    lookup = story.ask((1, 2, 3, 4, 5))
    assert not [job for job in story.jobs if isinstance(job, Read) and job.tier == 1]
    story.finish_all()
    assert story.figures(lookup) == (5, 5, 5, True)


@pytest.mark.parametrize("is_asked", [False, True])
def test_nothing_is_written_to_a_tier_that_is_out(is_asked):
    story = out(capacities=(None, None)) if is_asked else shared(capacities=(None, None))
    story.tiering.set_readable(2, False)
    story.store((1, 2, 3))
    assert not story.waiting(Copy) and not story.is_below((1,), tier=2)
    story.tiering.set_readable(2, True)
    story.finish_all()
    assert story.is_below((1, 2, 3), tier=2)


def test_what_a_tier_did_not_give_when_nobody_waited_any_more_is_stored_by_the_next_who_computes_it():
    story = Story(host_bytes=240, capacities=(None, None), is_last_shared=True)
    story.others_store(SMALL, (1, 2, 3))
    lookup = story.ask((1, 2, 3))
    story.end_every(Probe)
    assert story.figures(lookup)[:2] == (3, 3)
    story.release(lookup)  # it was computed, and not stored: it is held
    story.end(Read)
    story.end_every(Read, fault=Outcome.UNAVAILABLE)
    again = story.ask((1, 2, 3))
    story.finish_all()
    assert story.figures(again) == (1, 1, 1, True) and story.counted("read_failed_unavailable") == 2
    story.store((1, 2, 3))
    assert story.is_below((1, 2, 3), tier=1), "on this machine's disk from now on"


def test_what_a_tier_did_not_give_is_asked_for_again_after_a_while():
    story = Story(host_bytes=160, is_last_shared=True)
    story.others_store(SMALL, (1, 2))
    lookup = story.ask((1, 2))
    story.end_every(Probe)
    story.release(lookup)
    story.end_every(Read, fault=Outcome.UNAVAILABLE)
    for _ in range(2):
        story.tiering.age_absences()
    lookup = story.ask((1, 2))
    story.finish_all()
    assert story.figures(lookup) == (2, 2, 2, True)


def test_too_many_searches_at_once_are_refused():
    story = shared()
    for number in range(SEARCHES_MAX + 3):
        story.ask((number, 1))
    assert story.counted("search_refused") == 3 and len(story.waiting(Probe)) == SEARCHES_MAX
    story.finish_all()
    story.ask((SEARCHES_MAX + 2, 1))
    assert story.waiting(Probe)


def test_what_a_foreign_blob_hides_is_not_asked_for_again():
    story = shared()
    story.media[1][SMALL.key((1,))] = Blob.FOREIGN
    first = story.ask((1, 2))
    story.finish_all()
    assert story.figures(first) == (0, 0, 0, True)
    probes = story.counted("probes")
    story.ask((1, 2))
    story.finish_all()
    assert story.counted("probes") == probes


# -- uploads -----------------------------------------------------------------------------------------------------------


def test_what_is_on_disk_is_uploaded_parents_first():
    story = shared(capacities=(None, None))
    story.store(LONG[:6])
    assert all(story.is_below(chunk, 2) for chunk in chunks_of(LONG[:6]))
    assert story.counted("uploaded") == 6


def test_uploads_hold_no_host_memory():
    story = Story(host_bytes=100, capacities=(None, None), is_last_shared=True)
    for number in range(30):
        story.commit_prefix((number,))
        while jobs := [place for place, job in enumerate(story.jobs) if not isinstance(job, Copy)]:
            story.finish(jobs[0])
    assert all(story.is_below((number,)) for number in range(30))
    assert story.tiering.tier_usage(2).pending_writes == 30


def test_uploads_that_an_earlier_life_did_not_make_are_made_when_the_namespace_opens():
    story = shared(capacities=(None, None), found=chunks_of(LONG[:5])[::-1])
    assert all(story.is_below(chunk, 2) for chunk in chunks_of(LONG[:5]))


def test_uploads_of_an_earlier_life_are_asked_for_first_and_do_not_hold_up_new_ones():
    world = World(Tiering(20_000, [TierSpec(), TierSpec(is_shared=True)]), [None, None])
    for number in range(40):
        world.restore(1, SMALL, (number,))
    session = world.open(SMALL)
    world.step()
    first = [job for job in world.jobs if isinstance(job, Copy)]
    assert len(first) == COPIES_MAX and all(job.is_asked_first for job in first)
    assert world.tiering.pending_writes == 0
    root = next((number,) for number in range(40) if SMALL.record((number,)) == first[0].record)
    while not world.commit(session, (*root, 1)):  # behind a chunk found at start
        world.finish(next(place for place, job in enumerate(world.jobs) if not isinstance(job, Copy)))
    world.step()
    while any(not isinstance(job, Copy) for job in world.jobs):
        world.finish(next(place for place, job in enumerate(world.jobs) if not isinstance(job, Copy)))
    world.finish(next(place for place, job in enumerate(world.jobs) if job.record == SMALL.record(root)))
    assert Copy(2, 1, SMALL.record((*root, 1)), is_asked_first=False) in world.jobs


@pytest.mark.parametrize("fault", [Outcome.UNAVAILABLE, Outcome.NO_ROOM])
def test_an_upload_without_room_or_answer_is_made_later(fault):
    story = shared(capacities=(None, None))
    story.commit_prefix(LONG[:4])
    while not story.waiting(Copy):
        story.finish(0)
    story.end(Copy, fault=fault)
    story.finish_all()
    assert not story.is_below(LONG[:1], 2) and story.tiering.pending_writes
    story.tiering.resume_writes()
    story.finish_all()
    assert all(story.is_below(chunk, 2) for chunk in chunks_of(LONG[:4])) and not story.tiering.pending_writes


@pytest.mark.parametrize("fault", [Outcome.UNAVAILABLE, Outcome.NO_ROOM])
def test_a_write_to_a_shared_first_tier_is_made_later_too(fault):
    story = shared()
    story.commit_prefix(LONG[:4])
    while not story.waiting(Write):
        story.finish(0)
    story.end(Write, fault=fault)
    story.finish_all()
    assert not story.is_below(LONG[:1])
    story.tiering.resume_writes()
    story.finish_all()
    assert all(story.is_below(chunk) for chunk in chunks_of(LONG[:4]))


def test_uploads_to_a_tier_that_does_not_answer_hold_up_no_drain():
    story = shared(capacities=(None, None))
    story.tiering.set_readable(2, False)
    story.store(LONG[:4])
    assert story.tiering.pending_writes == 0 and not story.is_below(LONG[:1], 2)
    story.tiering.set_readable(2, True)
    assert story.tiering.pending_writes == 4
    story.finish_all()
    assert all(story.is_below(chunk, 2) for chunk in chunks_of(LONG[:4]))


def test_a_chunk_evicted_from_disk_before_its_upload_is_not_uploaded():
    story = Story(host_bytes=400, capacities=(30, None), is_last_shared=True)
    story.tiering.set_readable(2, False)
    for number in range(6):
        story.store((number,))
    story.tiering.set_readable(2, True)
    story.finish_all()
    assert sum(story.is_below((number,), 2) for number in range(6)) == 3
    assert story.counted("write_dropped_source_evicted") == 3


def test_what_comes_from_the_shared_tier_is_kept_on_disk():
    story = shared(capacities=(None, None))
    story.others_store(SMALL, LONG[:6])
    lookup = story.ask(LONG[:6])
    story.finish_all()
    assert story.figures(lookup) == (6, 6, 6, True)
    assert all(story.is_below(chunk, 1) for chunk in chunks_of(LONG[:6])) and story.counted("uploaded") == 0


def test_a_search_ends_when_the_tier_stops_to_answer():
    story = shared()
    story.others_store(SMALL, LONG)
    lookup = story.ask(LONG, start=len(LONG))
    story.tiering.set_readable(1, False)
    story.finish_all()  # the oracle fails on any further probe
    assert story.figures(lookup) == (0, 0, 0, True)


@pytest.mark.parametrize("order", list(permutations((1, 2, 3))))
def test_what_comes_from_the_shared_tier_in_any_order_is_written_to_disk_with_its_parent(order):
    story = shared(capacities=(None, None), found_behind=chunks_of(LONG[:3]))
    lookup = story.ask(LONG[:3])
    for length in order:
        story.end(Read, LONG[:length])
    story.finish_all()
    assert story.figures(lookup) == (3, 3, 3, True)
    assert all(story.is_below(chunk) for chunk in chunks_of(LONG[:3]))
    assert story.counted("write_dropped_no_parent") == 0 and story.tiering.tier_usage(1).admitted_chunks == 3


def test_what_comes_from_the_shared_tier_behind_a_lost_chunk_is_not_written_to_disk():
    story = shared(capacities=(None, None), found_behind=chunks_of(LONG[:2]))
    story.damage(2, SMALL.key(LONG[:1]), None)
    story.ask(LONG[:2])
    story.end(Read, LONG[:1])
    story.end(Read, LONG[:2])
    story.finish_all()
    assert story.is_in_host(LONG[:2]) and not story.is_below(LONG[:2])


def test_a_search_stops_at_a_chunk_whose_key_another_prompt_has():
    story = shared()
    story.others_store(SMALL, LONG[:60])
    known = SMALL.record(LONG[:4])
    slot = story.credits[story.session].pop(0)
    story._filled[slot] = known.key
    story.tiering.commit(story.session, slot, msgspec.structs.replace(known, prefix_sha256=bytes(32)))
    story.finish_all()
    lookup = story.ask(LONG[:60])
    story.finish_all()
    assert story.figures(lookup) == (3, 3, 3, True)
    assert story.counted("probes") == 15, "one, then seven, and seven that were asked before the chunk was looked at"


# -- uploads that are put off ------------------------------------------------------------------------------------------


def finish_all_but_uploads(story: Story) -> None:
    while places := [place for place, job in enumerate(story.jobs) if not isinstance(job, Copy)]:
        story.finish(places[0])


def test_an_upload_that_was_put_off_is_made_before_those_that_came_later():
    story = shared(capacities=(None, None))
    for number in range(COPIES_MAX + 2):
        story.commit_prefix((number,))
        finish_all_but_uploads(story)
    assert len(story.waiting(Copy)) == COPIES_MAX
    story.finish(3, Outcome.UNAVAILABLE)
    assert len(story.waiting(Copy)) == COPIES_MAX - 1, "nothing is begun before it is tried again"
    story.tiering.resume_writes()
    story.step()
    assert story.jobs[-1].record == SMALL.record((3,))


@pytest.mark.parametrize("is_asked_first", [False, True])
def test_an_upload_that_is_put_off_after_the_disk_lost_the_chunk_is_given_up_with_those_behind_it(is_asked_first):
    story, path = shared(capacities=(None, None)), LONG[:3]
    if is_asked_first:  # because it was found at start
        for chunk in chunks_of(path):
            story.restore(1, LARGE, chunk)
        story.session = story.open(LARGE)
        story.step()
    else:
        story.commit_prefix(path)
    space = story.spaces[story.session]
    finish_all_but_uploads(story)
    story.remove(HOST, space.namespace, None, leaves_holes=False)
    story.damage(1, space.key(path[:1]), None)
    story.ask(path[:1])
    story.end(Read)
    story.end(Copy, fault=Outcome.UNAVAILABLE)
    story.tiering.resume_writes()
    story.finish_all()
    assert story.entry(path[:1], space) is None and not story.media[2]
    assert story.tiering.tier_usage(2).backlog_chunks == 0 and story.tiering.pending_writes == 0
    assert story.counted("write_dropped_no_parent") == 2
    story.store(path)
    story.ask(path, start=3)
    story.finish_all()
    assert all(space.key(chunk) in story.media[2] for chunk in chunks_of(path))


@pytest.mark.parametrize("is_stored_again", [False, True])
def test_an_upload_that_is_put_off_after_the_chunk_before_it_was_lost_waits_for_that_or_is_given_up(is_stored_again):
    story = shared(capacities=(None, None))
    story.commit_prefix((1, 2, 3))
    finish_all_but_uploads(story)
    story.end(Copy)
    for tier in (1, 2):  # the first chunk's file is damaged, and its object was evicted by others
        story.remove(HOST, SMALL.namespace, [SMALL.key((1,))], leaves_holes=True)
        story.damage(tier, SMALL.key((1,)), None)
        story.ask((1,))
        story.end(Read)
    if is_stored_again:
        story.commit_prefix((1,))
        finish_all_but_uploads(story)
    story.end(Copy, fault=Outcome.UNAVAILABLE)
    story.tiering.resume_writes()
    story.finish_all()
    assert [story.is_below(chunk, 2) for chunk in chunks_of((1, 2, 3))] == [is_stored_again] * 3
    assert story.tiering.tier_usage(2).backlog_chunks == 0
    assert story.counted("upload_dropped_no_parent") == (not is_stored_again)


def test_chunks_beside_it_that_are_on_their_way_keep_none_from_the_disk():
    paths = [(1, number) for number in range(10, 15)]
    story = shared(capacities=(None, None), found_behind=[(1,), (1, 2), *paths])
    for path in ((1, 2), *paths):
        story.ask(path)
    story.end(Read, (1, 2))
    story.end(Read, (1,))
    story.finish_all()
    assert all(story.is_below(path) for path in [(1,), (1, 2), *paths])


def test_a_chunk_that_is_not_worth_a_write_keeps_none_beside_it_from_the_disk():
    """In whatever order those that came before their parent are looked at."""

    class Selective(Story):
        admissions = (SECOND_TOUCH, ALL)

    story = Selective(host_bytes=400, capacities=(None, None), found_behind=chunks_of((1, 2)), is_last_shared=True)
    story.ask((1, 2))
    for number in range(10, 14):
        story.commit(story.session, (1, number))
        story.step()
        story.end_every(Seal)
    story.end(Read, (1, 2))
    story.end(Read, (1,))
    story.finish_all()
    assert story.is_below((1,)) and story.is_below((1, 2))
    assert not any(story.is_below((1, number)) for number in range(10, 14))
