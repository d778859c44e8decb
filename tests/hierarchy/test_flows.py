"""What came into each tier and what left it, by why; and what watching sessions are told of it."""

import pytest
from hierarchy_world import LARGE, SMALL, Story

from tiered_kv.hierarchy import flows
from tiered_kv.hierarchy.plan import Copy, Delete, Moves, Outcome, Read, Write
from tiered_kv.testing.oracle import Blob

PREFIX = (1, 2, 3)


def came(story: Story, tier: int | None) -> dict[str, int]:
    return dict(story.hierarchy.index.flows[tier].came)


def left(story: Story, tier: int | None) -> dict[str, int]:
    return dict(story.hierarchy.index.flows[tier].left)


def test_a_store_comes_into_memory_and_then_into_each_tier_below():
    story = Story(capacities=(None, None))
    story.store(PREFIX)
    assert (came(story, None), left(story, None)) == ({"new": 3}, {})
    assert (came(story, 0), came(story, 1)) == ({"written": 3}, {"written": 3})
    flow = story.hierarchy.index.flows[0]
    assert (flow.chunks, flow.size_bytes) == (3, 3 * SMALL.slot_bytes)


def test_a_write_that_fails_is_not_in_the_tier():
    story = Story()
    story.store_without_writes(PREFIX[:1])
    story.end(Write, fault=Outcome.UNAVAILABLE)
    assert came(story, None) == {"new": 1}
    assert (came(story, 0), left(story, 0)) == ({}, {})


def test_memory_gives_way_and_what_is_promoted_comes_again():
    story = Story()
    story.keep_only_below(PREFIX)
    gone = left(story, None)["evicted"]
    assert gone >= 3
    story.ask(PREFIX)
    story.end_every(Read)
    assert came(story, None)["promoted"] == 3
    assert left(story, None) == {"evicted": gone + 3}


def test_a_full_tier_evicts():
    story = Story(capacities=(4 * SMALL.slot_bytes,))
    for number in range(6):
        story.store((number,))
    assert (came(story, 0), left(story, 0)) == ({"written": 6}, {"evicted": 2})


def test_what_is_found_at_the_start_came_then():
    story = Story(found=[PREFIX[:1], PREFIX[:2]])
    assert came(story, 0) == {"found": 2}


@pytest.mark.parametrize(
    ("blob", "why"), [(None, "missing"), (Blob.CORRUPT, "corrupt"), (Blob.FOREIGN, "foreign")], ids=str
)
def test_a_blob_that_is_not_what_it_should_be_has_left(blob: Blob | None, why: str):
    story = Story()
    story.keep_only_below(PREFIX[:1])
    before = came(story, 0)["written"]
    story.damage(0, SMALL.key(PREFIX[:1]), blob)
    story.ask(PREFIX[:1])
    story.end(Read)
    assert left(story, 0) == {why: 1}
    assert came(story, 0) == {"written": before}


def test_a_blob_that_cannot_be_deleted_is_kept():
    story = Story()
    story.keep_only_below(PREFIX[:1])
    story.damage(0, SMALL.key(PREFIX[:1]), Blob.CORRUPT)
    story.ask(PREFIX[:1])
    story.end(Read)
    story.end(Delete, fault=Outcome.UNAVAILABLE)
    assert (came(story, 0)["kept"], left(story, 0)) == (1, {"corrupt": 1})


def test_an_operator_removes():
    story = Story()
    story.store(PREFIX)
    story.hierarchy.remove(None, b"", None, leaves_holes=False)
    story.hierarchy.remove(0, b"", None, leaves_holes=False)
    story.finish_all()
    assert (left(story, None), left(story, 0)) == ({"removed": 3}, {"removed": 3})


def test_bytes_that_others_stored_do_not_count_here():
    story = Story(capacities=(None,), is_last_shared=True)
    story.others_store(SMALL, PREFIX)
    story.ask(PREFIX)
    story.finish_all()
    flow = story.hierarchy.index.flows[0]
    assert (dict(flow.came), flow.chunks, flow.size_bytes) == ({"found": 3}, 3, 0)


def told(story: Story) -> list[tuple[int | None, bool, int]]:
    """Tier, whether it is there now, and how many chunks, as told since the last call."""
    moves = [(m.tier, m.is_here, len(m.keys)) for m in story.moves]
    assert all(isinstance(m, Moves) and m.session == story.session for m in story.moves)
    story.moves.clear()
    return moves


def test_nobody_is_told_who_did_not_ask():
    story = Story()
    story.store(PREFIX)
    assert told(story) == []


def test_who_watches_is_told_what_comes_and_goes_in_its_namespace():
    story = Story()
    other = story.open_large()
    story.hierarchy.index.flows.watch(story.session, SMALL.namespace)
    story.store(PREFIX[:1])
    story.store(PREFIX[:1], other)
    assert told(story) == [(None, True, 1), (0, True, 1)]
    assert story.entry(PREFIX[:1], LARGE) is not None
    story.hierarchy.remove(0, SMALL.namespace, None, leaves_holes=False)
    story.hierarchy.remove(None, SMALL.namespace, None, leaves_holes=False)
    story.finish_all()
    assert told(story) == [(0, False, 1), (None, False, 1)]


def test_a_chunk_that_is_promoted_or_stored_twice_is_told_of_again():
    story = Story(found=[PREFIX[:1]])
    story.hierarchy.index.flows.watch(story.session, SMALL.namespace)
    story.ask(PREFIX[:1])
    story.end_every(Read)
    assert told(story) == [(None, True, 1), (0, True, 1)]
    story.commit_prefix(PREFIX[:1])
    assert story.counted("store_duplicate") == 1
    assert told(story) == [(None, True, 1), (0, True, 1)]


def test_a_lost_session_is_told_nothing_more():
    story = Story()
    story.hierarchy.index.flows.watch(story.session, SMALL.namespace)
    other = story.open(SMALL)
    story.suspend(story.session)
    story.finish_all()
    story.store(PREFIX[:1], other)
    assert told(story) == []


def test_what_waits_to_be_told_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(flows, "MOVES_MAX", 2)
    story = Story()
    story.store(PREFIX)
    story.hierarchy.index.flows.watch(story.session, SMALL.namespace)
    story.hierarchy.remove(0, b"", None, leaves_holes=False)
    story.step()
    assert told(story) == [(0, False, 2)]
    assert story.hierarchy.index.flows.untold == 1


def test_uploads_that_are_asked_for_first_come_like_others():
    story = Story(capacities=(None, None), found=[PREFIX[:1]])
    story.ask(PREFIX[:1])
    story.end_every(Read)
    story.end_every(Copy)
    assert came(story, 1) == {"written": 1}
