"""What is remembered, put off or done at once has a bound: what happens at it, and that nothing is lost beyond it."""

import gc
from types import FunctionType, ModuleType

import pytest

from tests.kit.tiering.oracle import World
from tests.kit.tiering.world import SMALL, Path, Story
from tiered_kv.keys.state_keys import state_records
from tiered_kv.tiering import leases, prefix_search, secondary_tier, tiering, tiers, write_through
from tiered_kv.tiering.index import BlobState, Entry
from tiered_kv.tiering.tiering import Tiering
from tiered_kv.tiering.types import HOST, Limits, Read, Seal, TierSpec, Write


def remembered(story: Story, *paths: Path) -> list[bool]:
    """Which of these chunks the first secondary tier is known to have."""
    entries = [story.entry(path) for path in paths]
    return [entry is not None and entry.blobs[1] is BlobState.PRESENT for entry in entries]


def story_with_six_leases() -> Story:
    return Story(host_bytes=800, limits=Limits(leased_share=6 * SMALL.slot_bytes / 800, request_share=1.0))


def test_what_is_remembered_of_a_shared_tier_is_bounded_leaves_first(monkeypatch):
    monkeypatch.setattr(secondary_tier, "HINTS_MAX", 4)
    story = Story(is_last_shared=True)
    story.store((1, 2))
    for number in (3, 4):
        story.store((number,))
    assert story.tiering.tier_usage(1).chunks == 4, "so many are remembered"
    for number in (5, 6):
        story.store((number,))
    flow = story.tiering.stats[1]
    assert (flow.chunks, dict(flow.removed)) == (4, {"forgotten": 2})
    assert remembered(story, (1,), (1, 2), (3,), (4,), (5,), (6,)) == [False, False, True, True, True, True]
    assert all(story.is_below(path) for path in [(1,), (1, 2)]), "nothing is deleted"
    story.remove(HOST, b"", None, leaves_holes=False)
    assert story.entry((1,)) is None and story.entry((3,)) is not None
    lookup = story.ask((1, 2))
    story.finish_all()
    assert story.figures(lookup) == (2, 2, 2, True), "a search finds them"


def test_a_blob_of_a_shared_tier_is_not_forgotten_while_it_is_read_or_one_behind_it_is_to_be_written(monkeypatch):
    monkeypatch.setattr(secondary_tier, "HINTS_MAX", 2)
    story = Story(is_last_shared=True)
    story.store((1,))
    story.store((2,))
    story.remove(HOST, b"", None, leaves_holes=False)
    lookups = [story.ask((1,)), story.ask((2,))]
    assert len(story.waiting(Read)) == 2
    story.commit_prefix((3, 4))
    story.end_every(Seal)
    story.end(Write)
    assert remembered(story, (1,), (2,), (3,)) == [True, True, True]
    story.end(Write)
    assert remembered(story, (1,), (2,), (3,), (3, 4)) == [True, True, False, False]
    story.finish_all()
    assert [story.figures(lookup) for lookup in lookups] == [(1, 1, 1, True)] * 2


@pytest.mark.parametrize("state_parts", [0, 1])
def test_what_a_search_has_just_found_may_be_what_is_forgotten_for_it(monkeypatch, state_parts):
    """All else that is remembered was used a moment ago: a few prompts as long as all that is remembered."""
    monkeypatch.setattr(secondary_tier, "HINTS_MAX", 2)
    story = Story(is_last_shared=True)
    others = [(2,), (3,)]
    for path in others:
        story.store(path)
    story.commit_prefix((1,))  # whose state another machine has stored
    story.end_every(Seal)
    story.finish_all()
    story.others_store_records([SMALL.record((4,)), *state_records(SMALL.record((1,)), 1)], SMALL.slot_bytes)
    for path in others * 3:
        story.release(story.ask(path))
    forgotten = story.tiering.stats[1].removed["forgotten"]
    lookup = story.lookup(story.session, (1,) if state_parts else (4,), state_parts=state_parts)
    story.finish_all()
    assert story.answer(lookup).is_done and not story.answer(lookup).slots
    assert story.tiering.stats[1].removed["forgotten"] > forgotten


def test_a_tier_that_is_not_shared_forgets_nothing(monkeypatch):
    monkeypatch.setattr(secondary_tier, "HINTS_MAX", 2)
    story = Story(capacities=(1000,))
    for number in range(4):
        story.store((number,))
    assert remembered(story, (0,), (1,), (2,), (3,)) == [True] * 4


def test_writes_that_are_put_off_are_bounded_and_the_rest_are_counted(monkeypatch):
    monkeypatch.setattr(write_through, "DEFERRED_MAX", 2)
    story = Story(host_bytes=800, limits=Limits(write_queue_share=0.02))
    for number in range(5):
        story.store_without_writes((number,))
    assert (story.counted("write_deferred"), story.counted("write_dropped_queue_full")) == (2, 2)
    assert story.tiering.pending_writes == 3
    story.finish_all()
    assert [story.is_below((number,)) for number in range(5)] == [True, True, True, False, False]


def test_the_memory_of_absences_is_bounded(monkeypatch):
    monkeypatch.setattr(prefix_search, "ABSENCES_MAX", 2)
    story = Story(host_bytes=20_000, is_last_shared=True)
    for number in range(5):
        story.ask((number,))
        story.finish_all()
    assert story.counted("probes") == 5
    for number in (2, 3, 4):
        story.ask((number,))
    assert story.counted("probes") == 5, "two generations are remembered"
    story.ask((1,))
    assert story.counted("probes") == 6, "what is older is forgotten"


def test_what_an_earlier_life_did_not_upload_is_claimed_in_parts(monkeypatch):
    monkeypatch.setattr(tiers, "RECOVERED_AT_ONCE", 2)
    world = World(Tiering(20_000, [TierSpec(), TierSpec(is_shared=True)]), [None, None])
    for number in range(5):
        world.restore(1, SMALL, (number,))
    world.open(SMALL)
    backlog = []
    for _ in range(4):
        world.step()
        backlog.append(world.tiering.tier_usage(2).backlog_chunks)
    assert backlog == [2, 4, 5, 5]
    world.open(SMALL)
    world.step()
    assert world.tiering.tier_usage(2).admitted_chunks == 5, "a second session claims nothing again"


def story_where_four_wait_for_room():
    """With the lookup that holds all the room, and those that wait for it."""
    story = story_with_six_leases()
    paths = [(number,) for number in range(4)]
    long = tuple(range(50, 56))
    for path in (*paths, long):
        story.store(path)
    first = story.ask(long)
    waiting = [story.ask(path) for path in paths]
    return story, first, waiting


def test_only_so_many_of_those_that_wait_for_room_go_on_in_one_step(monkeypatch):
    monkeypatch.setattr(tiering, "GO_ON_MAX", 2)
    story, first, waiting = story_where_four_wait_for_room()
    story.release(first)
    story.step()
    assert [story.answer(one).ready for one in waiting] == [1, 1, 0, 0]
    story.step()
    assert [story.answer(one).ready for one in waiting] == [1, 1, 1, 1]


def test_while_more_of_those_that_wait_for_room_can_go_on_a_turn_is_wanted(monkeypatch):
    monkeypatch.setattr(tiering, "GO_ON_MAX", 2)
    story, first, waiting = story_where_four_wait_for_room()
    assert not story.tiering.wants_turn, "nobody can go on"
    story.release(first)
    story.step()
    assert story.tiering.wants_turn, "two went on"
    story.step()
    assert not story.tiering.wants_turn
    assert [story.answer(one).ready for one in waiting] == [1, 1, 1, 1]


def test_only_so_many_give_way_for_one_in_one_step(monkeypatch):
    monkeypatch.setattr(leases, "ENDED_AT_ONCE_MAX", 2)
    story = story_with_six_leases()
    paths = [(number,) for number in range(6)]
    long = tuple(range(50, 55))
    for path in (*paths, long):
        story.store(path)
    lookups = [story.lookup(story.session, path, turn=(0, 10 + place)) for place, path in enumerate(paths)]
    story.step()
    urgent = story.lookup(story.session, long, turn=(0, 1))
    story.step()
    assert story.ended == lookups[:3:-1], "the last first"
    for _ in range(4):
        story.step()
    assert story.answer(urgent).ready == 5 and story.ended == lookups[:0:-1]


@pytest.mark.parametrize("length", [1, 3])
def test_writes_that_are_given_up_while_a_tier_takes_none_leave_nothing_behind(length):
    """A bucket is down for hours, and the disk in front of it is full: what it evicts is not uploaded any more."""
    story = Story(host_bytes=100, capacities=(60, None), is_last_shared=True)
    story.store(tuple(range(length)))
    story.tiering.set_readable(2, False)
    before = _entries_alive(story) - len(story.tiering.index)
    for number in range(1, 40):
        for _ in range(2):  # and what is stored again waits again
            story.store((number % 20 + 100, *range(length - 1)))
    assert story.counted("write_dropped_source_evicted") > 20
    assert _entries_alive(story) - len(story.tiering.index) == before


def _entries_alive(story) -> int:
    """Entries that something in tiering refers to. The garbage collector does not know of them."""
    seen: set[int] = set()
    stack: list[object] = [story.tiering]
    count = 0
    while stack:
        found = stack.pop()
        if id(found) in seen or isinstance(found, type | ModuleType | FunctionType):
            continue
        seen.add(id(found))
        count += type(found) is Entry
        stack += found.children if isinstance(found, Entry) else gc.get_referents(found)
    return count
