"""What came into each tier and what left it, by why; and what watching sessions are told of it."""

import pytest

from tests.kit.tiering.oracle import Blob
from tests.kit.tiering.world import LARGE, SMALL, Story
from tiered_kv.tiering import stats
from tiered_kv.tiering.types import HOST, Copy, Delete, Outcome, Read, TierEvents, Write

PREFIX = (1, 2, 3)


def came(story: Story, tier: int | None) -> dict[str, int]:
    return dict(story.tiering.stats[tier].inserted)


def left(story: Story, tier: int | None) -> dict[str, int]:
    return dict(story.tiering.stats[tier].removed)


def test_a_store_comes_into_memory_and_then_into_each_tier_below():
    story = Story(capacities=(None, None))
    story.store(PREFIX)
    assert (came(story, HOST), left(story, HOST)) == ({"new": 3}, {})
    assert (came(story, 1), came(story, 2)) == ({"written": 3}, {"written": 3})
    flow = story.tiering.stats[1]
    assert (flow.chunks, flow.size_bytes) == (3, 3 * SMALL.slot_bytes)


def test_a_write_that_fails_is_not_in_the_tier():
    story = Story()
    story.store_without_writes(PREFIX[:1])
    story.end(Write, fault=Outcome.UNAVAILABLE)
    assert came(story, HOST) == {"new": 1}
    assert (came(story, 1), left(story, 1)) == ({}, {})


def test_memory_gives_way_and_what_is_promoted_comes_again():
    story = Story()
    story.keep_only_below(PREFIX)
    gone = left(story, HOST)["evicted"]
    assert gone >= 3
    story.ask(PREFIX)
    story.end_every(Read)
    assert came(story, HOST)["promoted"] == 3
    assert left(story, HOST) == {"evicted": gone + 3}


def test_a_full_tier_evicts():
    story = Story(capacities=(4 * SMALL.slot_bytes,))
    for number in range(6):
        story.store((number,))
    assert (came(story, 1), left(story, 1)) == ({"written": 6}, {"evicted": 2})


def test_what_is_found_at_the_start_came_then():
    story = Story(found=[PREFIX[:1], PREFIX[:2]])
    assert came(story, 1) == {"found": 2}


@pytest.mark.parametrize(
    ("blob", "why"), [(None, "missing"), (Blob.CORRUPT, "corrupt"), (Blob.FOREIGN, "foreign")], ids=str
)
def test_a_blob_that_is_not_what_it_should_be_has_left(blob: Blob | None, why: str):
    story = Story()
    story.keep_only_below(PREFIX[:1])
    before = came(story, 1)["written"]
    story.damage(1, SMALL.key(PREFIX[:1]), blob)
    story.ask(PREFIX[:1])
    story.end(Read)
    assert left(story, 1) == {why: 1}
    assert came(story, 1) == {"written": before}


def test_a_blob_that_cannot_be_deleted_is_kept():
    story = Story()
    story.keep_only_below(PREFIX[:1])
    story.damage(1, SMALL.key(PREFIX[:1]), Blob.CORRUPT)
    story.ask(PREFIX[:1])
    story.end(Read)
    story.end(Delete, fault=Outcome.UNAVAILABLE)
    assert (came(story, 1)["kept"], left(story, 1)) == (1, {"corrupt": 1})


def test_an_operator_removes():
    story = Story()
    story.store(PREFIX)
    story.remove(HOST, b"", None, leaves_holes=False)
    story.remove(1, b"", None, leaves_holes=False)
    story.finish_all()
    assert (left(story, HOST), left(story, 1)) == ({"removed": 3}, {"removed": 3})


def test_bytes_that_others_stored_do_not_count_here():
    story = Story(capacities=(None,), is_last_shared=True)
    story.others_store(SMALL, PREFIX)
    story.ask(PREFIX)
    story.finish_all()
    flow = story.tiering.stats[1]
    assert (dict(flow.inserted), flow.chunks, flow.size_bytes) == ({"found": 3}, 3, 0)


def told(story: Story) -> list[tuple[int, bool, int]]:
    """Tier, whether it is there now, and how many chunks, as told since the last call."""
    moves = [(m.tier, m.is_here, len(m.keys)) for m in story.moves]
    assert all(isinstance(m, TierEvents) and m.session == story.session for m in story.moves)
    story.moves.clear()
    return moves


def test_nobody_is_told_who_did_not_ask():
    story = Story()
    story.store(PREFIX)
    assert told(story) == []


def test_who_watches_is_told_what_comes_and_goes_in_its_namespace():
    story = Story()
    other = story.open_large()
    story.tiering.stats.watch(story.session, SMALL.namespace)
    story.store(PREFIX[:1])
    story.store(PREFIX[:1], other)
    assert told(story) == [(HOST, True, 1), (1, True, 1)]
    assert story.entry(PREFIX[:1], LARGE) is not None
    story.remove(1, SMALL.namespace, None, leaves_holes=False)
    story.remove(HOST, SMALL.namespace, None, leaves_holes=False)
    story.finish_all()
    assert told(story) == [(1, False, 1), (HOST, False, 1)]


def test_a_chunk_that_is_promoted_or_stored_twice_is_told_of_again():
    story = Story(found=[PREFIX[:1]])
    story.tiering.stats.watch(story.session, SMALL.namespace)
    story.ask(PREFIX[:1])
    story.end_every(Read)
    assert told(story) == [(HOST, True, 1), (1, True, 1)]
    story.commit_prefix(PREFIX[:1])
    assert story.counted("store_duplicate") == 1
    assert told(story) == [(HOST, True, 1), (1, True, 1)]


def test_a_lost_session_is_told_nothing_more():
    story = Story()
    story.tiering.stats.watch(story.session, SMALL.namespace)
    other = story.open(SMALL)
    story.suspend(story.session)
    story.finish_all()
    story.store(PREFIX[:1], other)
    assert told(story) == []


def test_what_waits_to_be_told_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stats, "EVENTS_MAX", 2)
    story = Story()
    story.store(PREFIX)
    story.tiering.stats.watch(story.session, SMALL.namespace)
    story.remove(1, b"", None, leaves_holes=False)
    story.step()
    assert told(story) == [(1, False, 2), (0, False, 0)], "and that some are lost"
    assert story.tiering.stats.undelivered == 1
    story.step()
    assert told(story) == [], "once: whoever hears it believes in nothing of before"


def test_uploads_that_are_asked_for_first_come_like_others():
    story = Story(capacities=(None, None), found=[PREFIX[:1]])
    story.ask(PREFIX[:1])
    story.end_every(Read)
    story.end_every(Copy)
    assert came(story, 2) == {"written": 1}
