"""What is counted of lookups: asked for, got, and from which tier, once they end."""

import pytest

from tests.kit.tiering.world import SMALL, Story
from tiered_kv.tiering.stats import HitCounts
from tiered_kv.tiering.types import HOST, Grow, Outcome, Read, Seal

PREFIX = (1, 2, 3, 4)


def served(story: Story) -> HitCounts:
    """What was counted since the last call, all of one namespace."""
    taken = dict(story.tiering.hit_stats.take())
    assert set(taken) <= {SMALL.namespace}
    return taken.get(SMALL.namespace, HitCounts())


def release(story: Story, lookup: int) -> tuple[int, int, dict[int, int]]:
    """HitCounts of the prefix, asked for, and got by tier, of one lookup that ends now."""
    assert served(story) == HitCounts(), "something was counted before the lookup ended"
    story.release(lookup)
    found = served(story)
    assert found.lookups == 1
    return found.prefix, found.asked, dict(found.hits)


def test_what_is_in_host_memory_is_got_from_there():
    story = Story()
    story.store(PREFIX)
    assert release(story, story.ask((*PREFIX, 9))) == (5, 5, {HOST: 4})
    assert served(story) == HitCounts()


def test_an_unknown_prefix_is_asked_for_and_missed():
    story = Story()
    assert release(story, story.ask(PREFIX)) == (4, 4, {})


def test_what_is_promoted_is_got_from_its_tier_and_the_next_time_from_host_memory():
    story = Story()
    story.keep_only_below(PREFIX)
    first = story.ask(PREFIX)
    second = story.ask(PREFIX[:3])  # joins the promotion that is going on
    story.end_every(Read)
    assert release(story, first) == (4, 4, {1: 4})
    assert release(story, second) == (3, 3, {1: 3})
    assert release(story, story.ask(PREFIX)) == (4, 4, {HOST: 4})


def test_a_lookup_that_ends_early_has_got_what_was_ready():
    story = Story()
    story.keep_only_below(PREFIX)
    lookup = story.ask(PREFIX)
    for path in (PREFIX[:1], PREFIX[:2], PREFIX):
        story.end(Read, path)
    assert release(story, lookup) == (4, 4, {1: 2})


@pytest.mark.parametrize(("start", "asked"), [(1, 3), (3, 1), (4, 0), (9, 0)])
def test_what_the_client_has_itself_is_not_asked_for(start: int, asked: int):
    story = Story()
    story.store(PREFIX)
    expected = {HOST: asked} if asked else {}
    assert release(story, story.ask(PREFIX, start)) == (4, asked, expected)


def test_a_chunk_that_does_not_come_ends_what_is_got():
    story = Story()
    story.keep_only_below(PREFIX)
    lookup = story.ask(PREFIX)
    story.end(Read, PREFIX[:1])
    story.end(Read, PREFIX[:3], Outcome.CORRUPT)
    story.end_every(Read)
    assert release(story, lookup) == (4, 4, {1: 2})


def test_chunks_that_are_just_being_stored_count_as_host_memory():
    story = Story()
    story.commit_prefix(PREFIX[:2])
    lookup = story.ask(PREFIX)
    story.end_every(Grow)
    story.end_every(Seal)
    assert release(story, lookup) == (4, 4, {HOST: 2})


def test_each_chunk_counts_for_the_tier_that_gave_it():
    story = Story(capacities=(None, None), found=[PREFIX[:1]], found_behind=[PREFIX[:1], PREFIX[:2], PREFIX[:3]])
    lookup = story.ask(PREFIX)
    story.end_every(Read)
    assert release(story, lookup) == (4, 4, {1: 1, 2: 2})


def test_what_a_search_finds_counts_for_the_shared_tier():
    story = Story(capacities=(None,), is_last_shared=True)
    story.others_store(SMALL, PREFIX[:2])
    lookup = story.ask(PREFIX)
    story.finish_all()
    assert story.figures(lookup) == (2, 2, 2, True)
    assert release(story, lookup) == (4, 4, {1: 2})


def test_lookups_of_a_session_that_is_closed_have_ended():
    story = Story()
    story.store(PREFIX)
    story.ask(PREFIX)
    story.ask(PREFIX)
    story.close(story.session)
    found = served(story)
    assert (found.lookups, found.asked, dict(found.hits)) == (2, 8, {HOST: 8})


def decision(story: Story, lookup: int) -> str:
    story.release(lookup)
    (found,) = served(story).decisions.elements()
    return found


def test_what_became_of_a_lookup_is_counted():
    story = Story()
    assert decision(story, story.ask(PREFIX)) == "miss"
    story.store(PREFIX)
    assert decision(story, story.ask((*PREFIX, 9))) == "ready", "the last chunk is nowhere, and nothing to wait for"
    story.keep_only_below(PREFIX)
    assert decision(story, story.ask(PREFIX)) == "not_awaited"
    story.end_every(Read)
    story.keep_only_below(PREFIX)
    partly = story.ask(PREFIX)
    story.end(Read, PREFIX[:1])
    assert decision(story, partly) == "took_what_arrived"
    story.end_every(Read)
    story.keep_only_below(PREFIX)
    whole = story.ask(PREFIX)
    story.end_every(Read)
    assert decision(story, whole) == "awaited"
    assert decision(story, story.ask(PREFIX)) == "ready"


def test_a_lookup_that_asks_for_nothing_decides_nothing():
    story = Story()
    story.store(PREFIX)
    story.release(story.ask(PREFIX, 4))
    assert served(story).decisions.total() == 0
