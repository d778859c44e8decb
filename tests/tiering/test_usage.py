"""What ``stat`` shows of tiering: every figure is what is there, and none is missing."""

import pytest

from tests.kit.tiering.world import SMALL, Story
from tiered_kv.tiering.admission import ALL, SECOND_TOUCH
from tiered_kv.tiering.types import Limits, Read, Seal, TierUsage, Write

SIZE = SMALL.slot_bytes


class CarefulBucket(Story):
    """A disk that takes everything before a bucket that does not."""

    admissions = (ALL, SECOND_TOUCH)


def test_every_figure_says_what_is_there():
    story = CarefulBucket(host_bytes=400, capacities=(1000, None), found=[(7,)])
    story.store((1,))
    story.ask((1,))  # leased, and worth an upload that no drain waits for
    story.commit_prefix((2,))
    story.end(Seal)
    assert story.waiting(Write) and not story.waiting(Read)
    assert story.tiering.usage() == {
        "chunks": 3,
        "host_assigned_bytes": 10 * SIZE,
        "host_capacity_bytes": 400,
        "host_ready_chunks": 2,
        "host_tails": 0,
        "leased_bytes": SIZE,
        "lent_bytes": 0,
        "reserved_slots": len(story.credits[story.session]),
        "sessions": 1,
        "lookups": 1,
    }
    disk, bucket = story.tiering.tier_usage(1), story.tiering.tier_usage(2)
    assert disk == TierUsage(
        used_bytes=3 * SIZE,
        queued_bytes=SIZE,
        pending_writes=1,
        backlog_chunks=1,
        chunks=2,
        tails=0,
        pinned_bytes=0,
        admitted_chunks=2,
        declined_chunks=0,
    )
    assert bucket == TierUsage(
        used_bytes=SIZE,
        queued_bytes=0,
        pending_writes=0,
        backlog_chunks=1,
        chunks=0,
        tails=0,
        pinned_bytes=0,
        admitted_chunks=1,
        declined_chunks=1,
    )


@pytest.mark.parametrize(("tokens", "least"), [(1, 200), (256, 200), (257, 400), (1024, 800)])
def test_memory_for_a_prompt_is_that_with_which_one_lookup_may_hold_all_its_chunks(tokens, least):
    limits = Limits(request_share=0.5)
    assert limits.least_host_bytes(tokens, chunk_tokens=256, chunk_bytes=100) == least


def test_memory_for_a_prompt_is_rounded_up():
    assert Limits(request_share=0.375).least_host_bytes(1, 1, 1) == 3
