"""Lookups for a state: the deepest boundary whose chunks and state are held, wherever they are."""

import random

import msgspec
import pytest

from tests.kit.spaces import Space
from tests.kit.tiering.world import SMALL, Path, Story
from tiered_kv.keys.state_keys import state_records
from tiered_kv.tiering.admission import SECOND_TOUCH
from tiered_kv.tiering.prefix_search import STATES_ASKED_MAX
from tiered_kv.tiering.types import HOST, Delete, Limits, Outcome, Probe, Read

PARTS = 2
PROMPT = (1, 2, 3, 4, 5)
MOST = 5
"""Chunks that one lookup may hold of 150 bytes of host memory."""


class StateStory(Story):
    """A story whose prompts have states of two parts at some boundaries."""

    def commit_state(self, path: Path, parts: int = PARTS) -> None:
        for record in state_records(SMALL.record(path), PARTS)[:parts]:
            assert self.commit_record(self.session, record), "no credit left"
            self.step()

    def store_states(self, path: Path, *boundaries: int) -> None:
        """Commit a prompt and its states, as an engine does."""
        for chunk in (path[:depth] for depth in range(1, len(path) + 1)):
            assert self.commit(self.session, chunk), "no credit left"
            self.finish_all()
        for boundary in boundaries:
            self.commit_state(path[:boundary])
            self.finish_all()

    def seek(self, path: Path, start: int = 0) -> int:
        lookup = self.lookup(self.session, path, start, state_parts=PARTS)
        self.step()
        self.finish_all()
        return lookup

    def found(self, lookup: int) -> tuple[int, int, int, int]:
        """Held, boundary, slots and ready of an answer that is done."""
        answer = self.answer(lookup)
        assert answer.is_done
        return answer.held, answer.boundary, len(answer.slots), answer.ready

    def key(self, path: Path, part: int) -> bytes:
        return state_records(SMALL.record(path), PARTS)[part].key


class SelectiveStates(StateStory):
    """One whose disk takes what was used twice."""

    admissions = (SECOND_TOUCH,)


def test_a_request_that_seeks_its_state_anew_counts_once():
    story = StateStory()
    story.store_states(PROMPT, 2)

    def uses() -> list[int]:
        records = [*map(SMALL.record, (PROMPT[:1], PROMPT[:2])), *state_records(SMALL.record(PROMPT[:2]), PARTS)]
        return [story.tiering.index.uses_of(record.key) for record in records]

    waiting = story.seek(PROMPT)
    for _ in range(2):
        before, counted = waiting, story.answer(waiting).boundary
        waiting = story.lookup(story.session, PROMPT, state_parts=PARTS, counted=counted)
        story.finish_all()
        story.release(before, is_asked_anew=True)
    assert story.answer(waiting).boundary == 2 and uses() == [1, 1, 1, 1]
    story.store_states(PROMPT, 4)  # another request computed more meanwhile
    story.lookup(story.session, PROMPT, state_parts=PARTS, counted=2)
    story.finish_all()
    assert uses()[:2] == [1, 1]
    deeper = [SMALL.record(PROMPT[:3]), SMALL.record(PROMPT[:4]), *state_records(SMALL.record(PROMPT[:4]), PARTS)]
    assert [story.tiering.index.uses_of(record.key) for record in deeper] == [1, 1, 1, 1]


def shared(**more) -> StateStory:
    return StateStory(host_bytes=20_000, capacities=(None,), is_last_shared=True, **more)


def test_the_deepest_state_along_the_prefix_is_leased_with_the_chunks_before_it():
    story = StateStory()
    story.store_states(PROMPT, 2, 4)
    lookup = story.seek((*PROMPT, 9))
    assert story.found(lookup) == (5, 4, 4 + PARTS, 4 + PARTS)
    slots = [story._contents[slot] for slot in story.answer(lookup).slots]
    assert slots == [*SMALL.prefix(PROMPT[:4])[0], story.key(PROMPT[:4], 0), story.key(PROMPT[:4], 1)]


def test_of_another_branch_only_what_is_before_the_fork_counts():
    story = StateStory()
    story.store_states(PROMPT, 2, 4)
    assert story.found(story.seek((1, 2, 3, 7, 8)))[:2] == (3, 2)
    assert story.found(story.seek((1, 7))) == (1, 0, 0, 0)


def test_chunks_that_the_gpu_has_are_not_leased_and_a_state_there_is_of_no_use():
    story = StateStory()
    story.store_states(PROMPT, 2, 4)
    assert story.found(story.seek(PROMPT, start=3)) == (5, 4, 1 + PARTS, 1 + PARTS)
    assert story.found(story.seek(PROMPT, start=4)) == (5, 0, 0, 0)


def test_without_a_whole_state_nothing_is_leased():
    story = StateStory()
    story.store(PROMPT)
    story.commit_state(PROMPT[:3], parts=1)
    story.finish_all()
    assert story.found(story.seek(PROMPT)) == (5, 0, 0, 0)
    assert story.tiering.usage()["leased_bytes"] == 0


def test_what_is_below_host_memory_is_promoted_state_and_all():
    story = StateStory(host_bytes=200)
    story.store_states(PROMPT, 3)
    story.flush_host(avoid=PROMPT)
    lookup = story.lookup(story.session, PROMPT, state_parts=PARTS)
    story.step()
    assert story.answer(lookup).boundary == 3 and not story.answer(lookup).is_done
    story.finish_all()
    assert story.found(lookup) == (5, 3, 3 + PARTS, 3 + PARTS)
    assert story.answer(lookup).sources == bytes([HOST + 1]) * (3 + PARTS)


@pytest.mark.parametrize("part", range(PARTS))
def test_a_state_that_fails_leaves_nothing_to_load_and_is_not_found_again(part):
    story = StateStory(host_bytes=200)
    story.store_states(PROMPT, 2, 4)
    story.flush_host(avoid=PROMPT)
    lookup = story.lookup(story.session, PROMPT, state_parts=PARTS)
    story.step()
    place = next(i for i, job in enumerate(story.jobs) if job.record.key == story.key(PROMPT[:4], part))
    story.finish(place, Outcome.CORRUPT)
    story.finish_all()
    assert story.answer(lookup).boundary == 0 and story.answer(lookup).held == 5
    story.release(lookup)
    story.finish_all()
    assert story.found(story.seek(PROMPT))[:2] == (5, 2)


def test_a_chunk_that_fails_is_to_be_stored_again():
    story = StateStory(host_bytes=200)
    story.store_states(PROMPT, 4)
    story.flush_host(avoid=PROMPT)
    lookup = story.lookup(story.session, PROMPT, state_parts=PARTS)
    story.step()
    story.end(Read, PROMPT[:2], fault=Outcome.MISSING)
    assert (story.answer(lookup).held, story.answer(lookup).boundary) == (1, 0)


def test_no_state_is_leased_that_does_not_fit_into_what_one_lookup_may_hold():
    story = StateStory(host_bytes=400, limits=Limits(request_share=5 * SMALL.slot_bytes / 400))
    story.store_states(PROMPT, 2, 4)
    assert story.found(story.seek(PROMPT)) == (5, 2, 2 + PARTS, 2 + PARTS), "three chunks and two parts fit"
    assert story.found(story.seek(PROMPT, start=1)) == (5, 4, 3 + PARTS, 3 + PARTS)


def test_where_not_even_a_state_fits_nothing_is_looked_for():
    story = shared(limits=Limits(request_share=SMALL.slot_bytes / 20_000))
    story.others_store(SMALL, PROMPT)
    story.others_store_records(state_records(SMALL.record(PROMPT), PARTS), SMALL.slot_bytes)
    assert story.found(story.seek(PROMPT)) == (5, 0, 0, 0) and not story.counted("state_searches")


def test_a_state_that_waits_for_room_goes_on_when_there_is_some():
    story = StateStory(host_bytes=400, limits=Limits(leased_share=8 * SMALL.slot_bytes / 400, request_share=1.0))
    story.store_states(PROMPT, 4)
    story.store((11, 12, 13, 14))
    other = story.ask((11, 12, 13, 14))
    lookup = story.lookup(story.session, PROMPT, turn=(1, 0), state_parts=PARTS)
    story.step()
    answer = story.answer(lookup)
    assert (answer.boundary, len(answer.slots), answer.queued) == (4, 4, 2)
    story.release(other)
    story.step()
    assert story.found(lookup) == (5, 4, 4 + PARTS, 4 + PARTS)


def test_a_state_of_another_prompt_under_the_same_key_is_none():
    """A crafted collision of xxhash: the digest names all tokens before it."""
    story = StateStory()
    story.store(PROMPT)
    for record in state_records(SMALL.record(PROMPT), PARTS):
        assert story.commit_record(story.session, msgspec.structs.replace(record, prefix_sha256=b"x" * 32))
        story.step()
    story.finish_all()
    assert story.found(story.seek(PROMPT)) == (5, 0, 0, 0)


def test_a_state_in_a_tier_that_cannot_be_read_is_not_there_for_now():
    story = StateStory(host_bytes=400)
    story.store_states(PROMPT, 2, 5)
    story.flush_host(avoid=(*PROMPT,))
    story.release(story.ask(PROMPT))  # the chunks alone come back
    story.finish_all()
    story.tiering.set_readable(1, False)
    assert story.found(story.seek(PROMPT)) == (5, 0, 0, 0)
    story.tiering.set_readable(1, True)
    assert story.found(story.seek(PROMPT))[:2] == (5, 5)


def test_a_state_goes_before_its_chunk():
    story = StateStory(host_bytes=200, capacities=(12 * SMALL.slot_bytes,))
    story.store_states(PROMPT, 5)
    for number in range(20):
        story.store((50 + number,))
        left = [path for path in ((1,), PROMPT) if story.is_below(path)]
        if story.key(PROMPT, 0) in story.media[1]:
            assert len(left) == 2, "a state is kept without its chunks"
    assert story.key(PROMPT, 0) not in story.media[1]


def test_room_is_never_made_from_the_states_of_a_pinned_prefix():
    story = StateStory(host_bytes=400, capacities=(8 * SMALL.slot_bytes,))
    story.store_states((1, 2, 3), 1, 2)
    story.tiering.set_pinned(1, [SMALL.key((1, 2))])
    for number in range(20):
        story.store((50 + number,))
        states = {story.key(path, part) for path in ((1,), (1, 2)) for part in range(PARTS)}
        assert story.media[1].keys() >= {SMALL.key((1,)), SMALL.key((1, 2)), *states}
    assert not story.is_below((1, 2, 3))


@pytest.mark.parametrize("how", ["want", "pin"])
def test_states_of_what_is_wanted_are_written_with_it(how):
    story = SelectiveStates(host_bytes=20_000)
    story.store_states(PROMPT, 2, 4)
    assert not story.media[1]
    if how == "want":
        story.tiering.want(SMALL.namespace, SMALL.key(PROMPT[:3]))
    else:
        story.tiering.set_pinned(1, [SMALL.key(PROMPT[:3])])
    story.finish_all()
    assert story.media[1].keys() == {*SMALL.prefix(PROMPT[:3])[0], *(story.key(PROMPT[:2], part) for part in (0, 1))}


def test_a_state_is_whose_its_request_is():
    chunk = msgspec.structs.replace(SMALL.record(PROMPT), tag=b"t" * 16)
    assert {record.tag for record in state_records(chunk, PARTS)} == {b"t" * 16}


class TestShared:
    def test_another_machines_state_is_found(self):
        story = shared()
        story.others_store(SMALL, PROMPT)
        story.others_store_records(state_records(SMALL.record(PROMPT[:3]), PARTS), SMALL.slot_bytes)
        assert story.found(story.seek(PROMPT)) == (5, 3, 3 + PARTS, 3 + PARTS)

    def test_a_deeper_state_there_beats_one_that_is_here(self):
        story = shared()
        story.store_states(PROMPT, 2)
        story.others_store_records(state_records(SMALL.record(PROMPT[:4]), PARTS), SMALL.slot_bytes)
        assert story.found(story.seek(PROMPT))[:2] == (5, 4)

    def test_a_prompt_nobody_has_costs_one_probe_and_a_prefix_without_states_a_bounded_number(self):
        story = shared()
        assert story.found(story.seek((7, 8))) == (0, 0, 0, 0) and story.counted("probes") == 1
        long = tuple(range(100, 100 + 3 * STATES_ASKED_MAX))
        story.others_store(SMALL, long)
        story.seek(long)
        before = story.counted("probes")
        assert story.found(story.seek(long)) == (len(long), 0, 0, 0)
        assert story.counted("probes") == before, "what is not there is remembered"
        assert before <= 1 + 24 + STATES_ASKED_MAX

    def test_it_is_not_known_where_the_state_is_until_it_is(self):
        story = shared()
        story.others_store(SMALL, PROMPT)
        story.others_store_records(state_records(SMALL.record(PROMPT), PARTS), SMALL.slot_bytes)
        lookup = story.lookup(story.session, PROMPT, state_parts=PARTS)
        story.step()
        while story.waiting(Probe):
            answer = story.answer(lookup)
            assert answer.unknown and not answer.is_done and not answer.slots
            story.end(Probe)
        assert story.answer(lookup).boundary == 5

    def test_a_tier_that_does_not_answer_leaves_what_is_here(self):
        story = shared()
        story.store_states(PROMPT, 2)
        story.others_store_records(state_records(SMALL.record(PROMPT[:4]), PARTS), SMALL.slot_bytes)
        lookup = story.lookup(story.session, PROMPT, state_parts=PARTS)
        story.step()
        story.end_every(Probe, Outcome.UNAVAILABLE)
        story.finish_all()
        assert story.found(lookup)[:2] == (5, 2)

    def test_a_lookup_that_ends_while_it_searches_leaves_nothing(self):
        story = shared()
        story.others_store(SMALL, PROMPT)
        lookup = story.lookup(story.session, PROMPT, state_parts=PARTS)
        story.step()
        story.release(lookup)
        story.finish_all()
        assert story.tiering.usage()["leased_bytes"] == story.tiering.usage()["lookups"] == 0


def test_it_counts_as_a_hit_only_with_its_state():
    story = StateStory()
    story.store_states(PROMPT, 3)
    story.tiering.hit_stats.take()
    story.release(story.seek(PROMPT))
    story.release(story.seek((9, 9)))
    (stats,) = story.tiering.hit_stats.take().values()
    assert (stats.lookups, stats.asked, stats.hits.total()) == (2, 7, 3)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("is_shared", [False, True])
def test_random_stores_evictions_and_questions(seed, is_shared):
    """Against what is really there: no deeper state is missed that host memory or a tier of this machine has."""
    draw = random.Random(f"{seed} {is_shared}")
    story = StateStory(host_bytes=150, capacities=(240,) if not is_shared else (240, None), is_last_shared=is_shared)
    paths = [tuple(draw.randrange(2) for _ in range(draw.randint(1, 6))) for _ in range(8)]
    open_ones: list[int] = []
    for _ in range(150):
        path = draw.choice(paths)
        what = draw.random()
        if what < 0.3:
            for depth in range(1, len(path) + 1):
                story.commit(story.session, path[:depth])
                story.step()
            if draw.random() < 0.7 and len(story.credits[story.session]) >= PARTS:
                story.commit_state(path[: draw.randint(1, len(path))])
        elif what < 0.6:
            open_ones.append(story.lookup(story.session, path, draw.randrange(len(path)), state_parts=PARTS))
            story.step()
        elif what < 0.8 and open_ones:
            lookup = open_ones.pop(draw.randrange(len(open_ones)))
            if lookup in story.lookups:
                story.release(lookup)
                story.step()
        elif story.jobs:
            place = draw.randrange(len(story.jobs))
            is_bad = draw.random() < 0.1 and not isinstance(story.jobs[place], Delete)
            story.finish(place, Outcome.UNAVAILABLE if is_bad else None)
    story.finish_all()
    for path in paths:
        entries = story.tiering.index.held_prefix(SMALL.namespace, *SMALL.prefix(path))
        held = len(entries)
        deepest = max(
            (
                depth
                for depth in range(1, min(held, MOST - PARTS) + 1)
                if all(
                    (entry := story.tiering.index.get(record.key)) and story.tiering.index.is_held(entry)
                    for record in state_records(SMALL.record(path[:depth]), PARTS)
                )
            ),
            default=0,
        )
        lookup = story.seek(path)
        assert story.answer(lookup).held >= held
        if not is_shared and story.answer(lookup).is_done and len(story.answer(lookup).slots):
            assert story.answer(lookup).boundary == deepest
        story.release(lookup)
        story.finish_all()
    for lookup in [one for one in open_ones if one in story.lookups]:
        story.release(lookup)
    story.finish_all()
    assert story.tiering.usage()["leased_bytes"] == 0


def test_the_space_of_a_test_names_states_as_any():
    space = Space(b"another-namespac", 10)
    assert state_records(space.record((1,)), 1)[0].namespace == space.namespace
