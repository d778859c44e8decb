"""Miss-ratio curves beside exact simulations of LRU: equal where every chunk is sampled, close where few are."""

import hashlib
import sys
import tracemalloc
from collections import OrderedDict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.tiering.world import SMALL, Story
from tiered_kv.tiering import miss_ratio
from tiered_kv.tiering.lookups import LookupRequest
from tiered_kv.tiering.miss_ratio import (
    ASKED_ANEW_MAX,
    NAMESPACES_MAX,
    SAMPLES_MAX,
    Curve,
    MissRatioCurves,
    OpenPrompts,
)

sys.path.append(str(Path(__file__).resolve().parent.parent.parent / "benchmarks"))

from miss_ratio import DATA, accuracy, agents, conversations, keys_of, memory_bytes, zipf
from trace_policies import Lru, replay

ONE, OTHER = b"one".ljust(16), b"other".ljust(16)
AMPLE = 1 << 60


def key(number: int) -> bytes:
    return hashlib.md5(number.to_bytes(8, "big")).digest()


@st.composite
def prompts(draw: st.DrawFn) -> list[list[int]]:
    """Prompts that begin as earlier ones do and go on by themselves."""
    made: list[list[int]] = [[]]
    for number in range(draw(st.integers(1, 30))):
        before = made[draw(st.integers(0, len(made) - 1))]
        shared = before[: draw(st.integers(0, len(before)))]
        made.append(shared + [100 * number + place + 1 for place in range(draw(st.integers(0, 6)))])
    return made[1:]


@given(prompts())
def test_a_curve_of_all_chunks_is_what_lru_finds_at_every_size(requests: list[list[int]]) -> None:
    curves = MissRatioCurves(AMPLE)
    for blocks in requests:
        curves.looked_up(ONE, [key(block) for block in blocks], 1)
    curves.check_integrity()
    asked = sum(map(len, requests))
    curve = curves.curves().get(ONE, Curve())
    for size in range(1, 32):  # up to there the histogram is exact
        assert curve.found_share(size) * asked == pytest.approx(sum(replay(requests, Lru(size))))


@given(prompts(), st.integers(2, 40))
def test_numbering_moments_anew_changes_nothing(requests: list[list[int]], samples_max: int) -> None:
    """A small sample runs out of moments all the time; a span that it never covers halves its rate, too."""
    curves, small = MissRatioCurves(AMPLE), MissRatioCurves(AMPLE, samples_max)
    for blocks in requests * 40:
        keys = [key(block) for block in blocks]
        for one in (curves, small):
            one.looked_up(ONE, keys, 1)
            one.used(keys, 1)
    small.check_integrity()
    assert small.sample_count <= samples_max
    if small.rate == 1:
        assert small.curves() == curves.curves()


def test_namespaces_share_one_stack_of_bytes() -> None:
    """Exact: an LRU of bytes, with chunks of 3 and of 5."""
    sizes = {ONE: 3, OTHER: 5}
    starts = [number * number % 3 for number in range(300)]
    requests = [(name, [n, 10 * n + k % 2 + 100]) for k, n in enumerate(starts) for name in (ONE, OTHER)]
    curves = MissRatioCurves(AMPLE)
    for name, blocks in requests:
        curves.looked_up(name, [key(block) + name for block in blocks], sizes[name])
    for capacity in (13, 20, 31):
        hits, order = dict.fromkeys(sizes, 0), OrderedDict[tuple[bytes, int], int]()
        for name, blocks in requests:
            place, deepest = {}, 0
            for held in reversed(order):
                place[held] = deepest = deepest + order[held]
            for block in blocks:
                hits[name] += place.get((name, block), AMPLE) <= capacity
            for block in reversed(blocks):
                order[name, block] = sizes[name]
                order.move_to_end((name, block))
        assert hits[ONE] and hits[OTHER]
        for name, curve in curves.curves().items():
            assert curve.found_share(capacity) * 600 == pytest.approx(hits[name])


TRACES = {
    "agents": lambda: agents(DATA / "agent_sessions_small.jsonl"),
    "conversations": lambda: conversations(DATA / "conversation_trace_small.jsonl"),
    "zipf": lambda: zipf(10_000),
}


@pytest.mark.parametrize("trace", TRACES)
def test_a_sampled_curve_is_within_a_point_of_lru_at_five_sizes(trace: str) -> None:
    samples_max = SAMPLES_MAX // 4  # the traces are small
    rows = accuracy(trace, TRACES[trace](), samples_max)
    assert len(rows) == 5
    assert all(row["rate"] < 1 and row["samples"] <= samples_max for row in rows), "nothing was left out of the sample"
    assert max(row["exact"] for row in rows) > 15, "a trace that finds nothing shows nothing"
    assert [row["curve"] for row in rows] == pytest.approx([row["exact"] for row in rows], abs=1)


def test_a_sample_that_covers_the_span_forgets_the_oldest_and_keeps_its_rate() -> None:
    span, samples_max = 2_000, 600
    curves = MissRatioCurves(span, samples_max)
    for number in range(20_000):  # each comes back once: behind 150 others, or behind 5,000, beyond the span
        again = number - (150 if number % 2 else 5_000)
        curves.looked_up(ONE, [key(number)], 1)
        if again >= 0:
            curves.looked_up(OTHER if number % 2 else ONE, [key(again)], 1)
    curves.check_integrity()
    assert curves.rate == 1 / 4  # 600 for 2,400, of which an eighth goes at once
    assert curves.curves()[OTHER].found_share(span) == pytest.approx(1, abs=0.05)
    assert curves.curves()[ONE].found_share(span) < 0.05


def test_keys_that_are_no_hashes_keep_to_the_limits_too() -> None:
    curves = MissRatioCurves(AMPLE, 100)
    for number in range(2_000):
        curves.looked_up(ONE, [number.to_bytes(16, "big")], 1)
        curves.check_integrity()


def test_a_key_that_is_given_twice_counts_its_bytes_once() -> None:
    curves = MissRatioCurves(AMPLE)
    for _ in range(3):
        curves.looked_up(ONE, [key(1), key(2), key(1)], 4)
        curves.check_integrity()


def test_what_is_stored_is_found_by_the_next_prompt_and_is_not_asked_for() -> None:
    curves = MissRatioCurves(AMPLE)
    curves.stored(ONE, key(9), 1)  # nobody has looked anything up there
    assert curves.sample_count == 0
    curves.looked_up(ONE, [key(1)], 1)
    curves.stored(ONE, key(1), 1)
    curves.stored(ONE, key(2), 1)
    curves.looked_up(ONE, [key(1), key(2), key(3)], 1)
    curve = curves.curves()[ONE]
    assert (curve.chunks, curve.found_share(2)) == (4, 0.5)


def test_what_is_stored_piece_by_piece_takes_few_moments_and_a_prompt_between_begins_another() -> None:
    curves = MissRatioCurves(AMPLE)
    curves.looked_up(ONE, [key(0)], 10)
    for number in range(1, 1 + 4 * miss_ratio.STORED_TOGETHER):
        curves.stored(ONE, key(number), 10)
    assert len(curves._moments) == 1 + 4
    curves.stored(ONE, key(1000), 10)
    curves.looked_up(ONE, [key(1001)], 10)
    curves.stored(ONE, key(1002), 10)
    curves.stored(ONE, key(1003), 20)
    curves.check_integrity()
    assert len(curves._moments) == 1 + 4 + 4, "one of another size, or behind a use, was dated with others"


def test_what_is_to_leave_the_sample_goes_on_leaving_while_moments_are_numbered_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(miss_ratio, "DROPPED_AT_ONCE", 1)
    curves = MissRatioCurves(AMPLE, samples_max=256)
    renumbered = 0
    for number in range(6000):
        before, leaving = len(curves._moments), len(curves._leaving)
        curves.looked_up(ONE, [key(number), key(number // 2), key(number // 3)], 10)
        if len(curves._moments) < before:
            renumbered += 1
            assert len(curves._leaving) >= leaving - 5 or not curves._leaving, "all of it left at once"
            curves.check_integrity()
    curves.check_integrity()
    assert renumbered > 2 and curves.sample_count <= 256
    gone = [one for one in curves._last_uses if one >= curves._limit]
    assert set(gone) <= set(curves._leaving), "something stays that is not sampled any more"


def test_old_prompts_fade(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(miss_ratio, "COUNTED_MAX", 1000)
    curves = MissRatioCurves(AMPLE)
    for _ in range(100):
        curves.looked_up(ONE, [key(number) for number in range(10)], 1)
    assert curves.curves()[ONE].found_share(10) == 0.99
    for number in range(50):
        curves.looked_up(ONE, [key(10 * number + place) for place in range(1000, 1010)], 1)
    assert curves.curves()[ONE].chunks == 1000
    assert curves.curves()[ONE].found_share(10) == pytest.approx(0.495)  # 990 that weigh half, and 500 not found


def test_few_namespaces_have_curves_and_that_which_was_asked_for_longest_ago_goes() -> None:
    curves = MissRatioCurves(AMPLE)
    names = [number.to_bytes(16, "big") for number in range(NAMESPACES_MAX + 1)]
    for name in (*names[:NAMESPACES_MAX], names[0], names[-1]):
        curves.looked_up(name, [name], 1)
    assert list(curves.curves()) == [*names[2:NAMESPACES_MAX], names[0], names[-1]]


def test_an_empty_prompt_and_no_cache_are_no_trouble() -> None:
    curves = MissRatioCurves(AMPLE)
    curves.looked_up(ONE, [], 1)
    assert curves.curves() == {}
    assert (Curve().found_share(100), Curve(chunks=1, sampled=1).found_share(0)) == (0, 0)


def test_a_full_sample_takes_less_than_16_mib() -> None:
    assert not tracemalloc.is_tracing()
    assert memory_bytes() < 16 << 20


def test_who_asks_again_is_not_counted_again() -> None:
    prompts = OpenPrompts()
    assert prompts.begins(b"a")
    assert not prompts.begins(b"a")  # a renewal, before the first ends
    prompts.ends(b"a", is_asked_anew=True)
    prompts.ends(b"a", is_asked_anew=False)
    assert prompts.begins(b"a")  # another request
    prompts.ends(b"a", is_asked_anew=True)  # its leases ended: it will ask again
    assert not prompts.begins(b"a")
    prompts.ends(b"a", is_asked_anew=False)
    assert prompts.begins(b"a")


def test_prompts_that_are_never_asked_for_again_are_not_remembered_for_ever() -> None:
    prompts = OpenPrompts()
    for number in range(ASKED_ANEW_MAX + 1):
        prompts.begins(key(number))
        prompts.ends(key(number), is_asked_anew=True)
    assert prompts.begins(key(0))
    assert not prompts.begins(key(1))


def test_the_tiering_counts_each_request_once_and_what_it_stores() -> None:
    story = Story()
    story.store((1, 2, 3))  # nobody asked
    tiering, counted = story.tiering, lambda: story.tiering.miss_ratio.curves()[SMALL.namespace]
    first = story.ask((1, 2, 3, 4))
    assert (counted().chunks, counted().found_share(1 << 20)) == (4, 0)
    again = story.ask((1, 2, 3, 4))
    tiering.release(story.lookups.pop(first).session, first, is_asked_anew=True)
    story.release(again)
    assert counted().chunks == 4
    story.store((1, 2, 3, 4))
    story.release(story.ask((1, 2, 3, 4, 5)))
    assert (counted().chunks, counted().found_share(1 << 20)) == (9, pytest.approx(4 / 9))
    assert counted().found_share(3 * SMALL.slot_bytes) == pytest.approx(3 / 9)
    tiering.check_integrity()


def test_pieces_of_a_prompt_are_not_counted() -> None:
    story = Story()
    session, piece = story.session, keys_of([[1, 2]])[0]
    lookup = story.tiering.lookup(session, LookupRequest(piece, [2 * key for key in piece], may_search=False))
    story.tiering.release(session, lookup)
    assert story.tiering.miss_ratio.curves() == {}
