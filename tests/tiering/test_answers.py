"""Answers: chunks with generated tokens stay in host memory until a prompt is seen to contain them."""

import pytest

from tests.kit.tiering.world import SMALL, LruStory, SelectiveStory, Story, chunks_of
from tests.tiering.test_states import PARTS, StateStory
from tiered_kv.keys.state_keys import state_records
from tiered_kv.tiering.types import Copy, Outcome, Write

PROMPT, ANSWERED, NEXT = (1, 2), (1, 2, 3, 4), (1, 2, 3, 4, 5)


def answer(story: Story, path: tuple[int, ...] = ANSWERED, prompt: tuple[int, ...] = PROMPT) -> None:
    """Store a prompt, then the chunks of its answer."""
    story.store(prompt)
    for depth in range(len(prompt) + 1, len(path) + 1):
        assert story.commit(story.session, path[:depth], is_answer=True)
        story.finish_all()


def counts(story: Story) -> tuple[int, int]:
    """Chunks of answers that came, and of these the ones that were asked for."""
    return story.counted("answers"), story.counted("answers_asked")


@pytest.mark.parametrize("story_of", [Story, SelectiveStory])
def test_an_answer_is_found_in_host_memory_and_written_once_it_was_asked_for(story_of):
    story = story_of()
    answer(story)
    assert story.is_below(PROMPT) == (story_of is Story)
    assert not any(map(story.is_below, chunks_of(ANSWERED)[2:])) and story.tiering.pending_writes == 0
    assert (story.entry(ANSWERED).holds, counts(story)) == (0, (2, 0))
    lookup = story.ask(NEXT)
    assert story.figures(lookup) == (4, 4, 4, True)
    story.release(lookup)
    for chunk in [chunk for chunk in chunks_of(ANSWERED) if not story.is_below(chunk)]:
        assert len(story.waiting(Write)) == 1, "a child is written after its parent"
        story.end(Write, chunk)
    assert story.is_below(ANSWERED) and counts(story) == (2, 2)
    story.release(story.ask(NEXT))
    assert counts(story) == (2, 2)


def test_what_the_gpu_has_of_an_answer_is_asked_for_as_well():
    story = Story()
    answer(story)
    story.release(story.ask(NEXT, start=4))
    story.finish_all()
    assert story.is_below(ANSWERED)


def test_branches_that_no_prompt_goes_on_from_are_never_written():
    """Reasoning that the next turn drops, an answer that was regenerated, the others of ``n``."""
    story = Story()
    for branch in range(10, 14):
        answer(story, (*PROMPT, branch, branch))
    story.release(story.ask((*PROMPT, 12, 99)))
    story.finish_all()
    assert story.is_below((*PROMPT, 12)) and not story.is_below((*PROMPT, 12, 12))
    assert not any(story.is_below((*PROMPT, branch)) for branch in (10, 11, 13))
    assert counts(story) == (8, 1)


def test_a_prompt_that_looked_an_answer_up_before_it_came_has_it_written():
    """The follow-up is faster than the copy: it finds the answer on the GPU, and stores what is behind it."""
    story = Story()
    answer(story)
    assert story.commit(story.session, NEXT)
    story.finish_all()
    assert story.is_below(NEXT) and all(map(story.is_below, chunks_of(NEXT))) and counts(story) == (2, 2)


def test_an_answer_that_memory_lost_is_an_ordinary_chunk_of_the_prompt_that_has_it():
    story = Story()
    answer(story)
    story.flush_host(avoid=ANSWERED)
    assert story.entry(ANSWERED) is None and story.is_below(PROMPT)
    story.store(NEXT)
    assert story.is_below(NEXT)


def test_memory_that_is_needed_takes_answers_without_a_write():
    story = Story(host_bytes=160)
    story.store((1,))
    for number in range(40):
        assert story.commit(story.session, (1, number), is_answer=True)
        story.finish_all()
    assert set(story.media[1]) == {SMALL.key((1,))} and story.counted("write_deferred") == 0
    assert story.counted("host_evicted") > 20


def test_what_a_prompt_was_known_to_go_on_from_is_no_answers():
    """The blob of the chunk behind it is there, so the hole before it is filled at once."""
    story = Story(found=[(1, 2)])
    assert story.commit(story.session, (1,), is_answer=True)
    story.finish_all()
    assert story.is_below((1,)) and counts(story) == (0, 0)


def test_a_chunk_that_is_held_already_stays_what_it_was():
    story = Story()
    story.store(PROMPT)
    story.flush_host(avoid=PROMPT)
    answer(story, PROMPT, prompt=())
    assert story.is_below(PROMPT) and counts(story) == (0, 0)


@pytest.mark.parametrize("how", ["want", "pin", "stored by another engine"])
def test_who_says_that_it_will_be_asked_for_has_it_written(how):
    story = Story()
    answer(story)
    if how == "want":
        story.tiering.want(SMALL.namespace, SMALL.key(ANSWERED))
    elif how == "pin":
        story.tiering.set_pinned(1, iter([SMALL.key(ANSWERED)]))
    else:
        other = story.open(SMALL)
        story.finish_all()
        for chunk in chunks_of(ANSWERED)[2:]:
            assert story.commit(other, chunk, is_answer=True)
    story.finish_all()
    assert story.is_below(ANSWERED)


def test_a_bucket_gets_an_answer_after_the_disk_has_it():
    story = Story(capacities=(None, None))
    answer(story)
    assert not story.waiting(Copy) and SMALL.key(PROMPT) in story.media[2]
    story.release(story.ask(NEXT))
    story.finish_all()
    assert {SMALL.key(chunk) for chunk in chunks_of(ANSWERED)} == set(story.media[1]) == set(story.media[2])


def test_a_state_in_an_answer_is_written_with_what_is_before_it():
    story = StateStory()
    story.store_states(PROMPT, len(PROMPT))
    for record in (SMALL.record(ANSWERED[:3]), *state_records(SMALL.record(ANSWERED[:3]), PARTS)):
        assert story.commit_record(story.session, record, is_answer=True)
        story.finish_all()
    keys = [SMALL.key(ANSWERED[:3]), *(story.key(ANSWERED[:3], part) for part in range(PARTS))]
    assert not set(keys) & set(story.media[1])
    lookup = story.seek(NEXT)
    assert story.found(lookup) == (3, 3, 3 + PARTS, 3 + PARTS)
    assert set(keys) <= set(story.media[1]) and counts(story) == (1 + PARTS, 1 + PARTS)


def test_a_write_that_failed_is_tried_again_when_the_answer_is_asked_for_again():
    story = Story()
    answer(story)
    story.release(story.ask(NEXT))
    story.end(Write, ANSWERED[:3], fault=Outcome.UNAVAILABLE)
    story.finish_all()
    assert not story.is_below(ANSWERED[:3])
    story.release(story.ask(NEXT))
    story.finish_all()
    assert story.is_below(ANSWERED)


def test_an_answer_before_a_hole_is_asked_for_when_a_chunk_fills_it():
    """What lies behind the hole was asked for once; plain LRU remembers nothing of what filled the hole then."""
    story = LruStory()
    story.keep_only_below(NEXT)
    story.release(story.ask(NEXT))
    story.finish_all()
    story.flush_host(avoid=NEXT)
    gone = [SMALL.key(chunk) for chunk in chunks_of(NEXT)[2:4]]
    assert story.remove(1, SMALL.namespace, gone, leaves_holes=True).removed == 2
    story.finish_all()
    assert story.commit(story.session, NEXT[:3], is_answer=True)
    story.finish_all()
    assert story.entry(NEXT[:3]).is_unasked and counts(story) == (1, 0)
    assert story.commit(story.session, NEXT[:4])
    story.finish_all()
    assert all(map(story.is_below, chunks_of(NEXT))) and counts(story) == (1, 1)


def test_an_answer_that_is_generated_again_after_memory_lost_it_was_asked_for():
    story = Story()
    answer(story)
    story.release(story.ask(PROMPT))
    story.flush_host(avoid=ANSWERED)
    answer(story, prompt=PROMPT)
    assert story.is_below(ANSWERED) and counts(story) == (4, 2)


def test_an_answer_is_one_also_where_what_it_goes_on_with_came_first():
    """Its copy failed, say, and another request generated it again; a tail behind it is no prompt either."""
    story = Story()
    story.store(PROMPT)
    assert story.commit(story.session, ANSWERED, is_answer=True)
    story.finish_all()
    assert story.commit_tail(story.session, ANSWERED, "a", 3)
    assert story.commit(story.session, ANSWERED[:3], is_answer=True)
    story.finish_all()
    assert not story.is_below(ANSWERED[:3]) and counts(story) == (2, 0)
    story.release(story.ask(NEXT))
    story.finish_all()
    assert story.is_below(ANSWERED) and counts(story) == (2, 2)


def test_a_tail_that_is_left_alone_makes_no_prompt_of_the_answer_before_it():
    story = Story()
    answer(story)
    assert story.commit_tail(story.session, ANSWERED, "a", 3)
    assert story.remove(0, SMALL.namespace, [SMALL.key(ANSWERED)], leaves_holes=False).removed == 1
    assert story.commit(story.session, ANSWERED, is_answer=True)
    story.finish_all()
    assert story.entry(ANSWERED).children and not story.is_below(ANSWERED)


@pytest.mark.parametrize("story_of", [Story, LruStory])
def test_a_request_that_was_preempted_is_no_prompt_that_has_its_own_answer(story_of):
    """It has computed all that it looks up; the next turn, which has it in its prompt, asks for it."""
    story = story_of()
    answer(story)
    lookup = story.lookup(story.session, ANSWERED, counted=len(ANSWERED))
    story.step()
    assert story.figures(lookup) == (4, 4, 4, True), "it finds all of it"
    story.release(lookup)
    story.finish_all()
    assert counts(story) == (2, 0) and not any(map(story.is_below, chunks_of(ANSWERED)[2:]))
    story.release(story.ask(NEXT))
    story.finish_all()
    assert counts(story) == (2, 2) and story.is_below(ANSWERED)
