"""Loads in flight and vLLM's blocks: what may be in flight together can always go on, and nobody waits for ever."""

import random
from collections import Counter

import pytest

from tests.kit.counts import count, seed
from tiered_kv.vllm.kv_groups import CacheGroup, CacheGroups
from tiered_kv.vllm.load_admission import LoadAdmission

BLOCK, STEP = 4, 48
FULL = CacheGroup(0, BLOCK, 2, 2)
WINDOW = CacheGroup(1, BLOCK, 2, 1, window_tokens=5)


def room(pool_blocks: int, *groups: CacheGroup) -> LoadAdmission:
    made = LoadAdmission(CacheGroups(groups or (FULL, WINDOW, WINDOW)), STEP, Counter())
    made.set_pool(pool_blocks)
    return made


@pytest.mark.parametrize(
    ("group", "tokens", "loaded", "expected"),
    [
        (FULL, 118, 64, 30),  # every block of the prompt
        (WINDOW, 118, 64, 1 + 12 + 1),  # the window's, those of one step, and one that both reach into
        (WINDOW, 83, 64, 1 + 5 + 1),  # 19 tokens are left
        (WINDOW, 20, 16, 3),
        (WINDOW, 8, 4, 2),  # no more than the prompt has
    ],
)
def test_blocks_a_request_needs_until_its_prompt_is_computed(
    group: CacheGroup, tokens: int, loaded: int, expected: int
) -> None:
    assert group.peak_blocks(tokens, loaded, STEP) == expected


def test_the_loads_that_stood_still_are_not_in_flight_together() -> None:
    """As the simulator found them: 70 blocks, two loads that had ended, and neither could go on."""
    one = room(69)
    assert one.admits("r19", 118, 64)
    one.begin("r19", 118, 64)
    assert not one.admits("r23", 83, 64)
    one.leave("r19")  # it runs
    assert one.admits("r23", 83, 64)


def test_one_alone_may_always_load() -> None:
    assert room(1).admits("large", 1000, 500)


def test_without_windows_vllms_own_count_is_right_and_nothing_is_put_off() -> None:
    one = room(10, FULL)
    one.begin("a", 1000, 500)
    assert one.admits("b", 1000, 500)


def test_nobody_overtakes_who_waits_for_room() -> None:
    counters: Counter[str] = Counter()
    one = LoadAdmission(CacheGroups([FULL, WINDOW]), STEP, counters)
    one.set_pool(60)
    one.begin("a", 80, 40)
    assert not one.admits("large", 160, 40)
    assert not one.admits("large", 160, 40) and counters["loads_put_off"] == 1
    assert not one.admits("small", 8, 4), "or the large one would wait as long as small ones come"
    one.leave("large")  # its client has gone
    assert one.admits("small", 8, 4)
    one.leave("a", "unknown")
    assert one.admits("large", 160, 40)


@pytest.mark.parametrize("number", range(seed(), seed() + count("SEEDS", 20)))
def test_whoever_comes_first_in_vllm_can_go_on_once_nothing_runs(number: int) -> None:
    """The case that stood still, for random loads: all that is in flight holds blocks, and any of it finds the rest."""
    source = random.Random(number)
    groups = CacheGroups([FULL, WINDOW, CacheGroup(2, BLOCK, 2, 2, window_tokens=source.choice([9, 33]))])
    pool_blocks = source.choice([70, 150, 400])
    one = LoadAdmission(groups, STEP, Counter())
    one.set_pool(pool_blocks)
    in_flight: dict[str, tuple[int, int]] = {}
    for turn in range(200):
        tokens = source.randrange(9, 130)
        loaded = source.randrange(1, tokens // 8 + 1) * 8
        name = f"r{turn}"
        if one.admits(name, tokens, loaded):
            one.begin(name, tokens, loaded)
            in_flight[name] = tokens, loaded
        if in_flight and source.random() < 0.5:
            gone = source.choice(sorted(in_flight))
            one.leave(gone)
            del in_flight[gone]
        if name not in in_flight and source.random() < 0.2:
            one.leave(name)  # who waited in front went away
        free = pool_blocks - sum(held_blocks(groups, *load) for load in in_flight.values())
        for tokens, loaded in in_flight.values() if len(in_flight) > 1 else ():
            new = -(-tokens // BLOCK) - loaded // BLOCK
            assert sum(min(new, STEP // BLOCK) for _ in groups) <= free


def held_blocks(groups: CacheGroups, _tokens: int, loaded: int) -> int:
    """What vLLM has given a load: all blocks of full attention, those of each window."""
    every = loaded // BLOCK
    return sum(every if g.window_tokens is None else min(every, -(-(g.window_tokens - 1) // BLOCK)) for g in groups)
