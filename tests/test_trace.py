"""The figures of ``benchmarks/trace.py`` are of the product: its fast caches and the real tiering agree."""

import itertools
import json
import random
import sys
from pathlib import Path

import pytest

from tests.kit.samples.conversations import conversations
from tiered_kv.tiering.eviction_policy import UseClock
from tiered_kv.tiering.lru import Lru as ProductLru

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))

from trace_hierarchy import Replay
from trace_policies import Lru, MultiQueue, Optimum, replay

TRACE = Path(__file__).resolve().parent / "data" / "conversation_trace_small.jsonl"
SIZE = 1500
FAST = {"lru": Lru, "multi-queue": MultiQueue}


@pytest.fixture(scope="module", params=["drawn", "recorded"])
def requests(request: pytest.FixtureRequest) -> list[list[int]]:
    if request.param == "drawn":
        return conversations(1, 800)
    with TRACE.open() as lines:
        return [json.loads(next(lines))["hash_ids"] for _ in range(600)]


@pytest.mark.parametrize("eviction", FAST)
def test_the_fast_cache_and_the_hierarchy_find_the_same_blocks(requests: list[list[int]], eviction: str) -> None:
    real = Replay(SIZE, eviction)

    hits = real.run(requests).hits

    assert hits == replay(requests, FAST[eviction](SIZE))
    assert sum(hits) > len(requests)  # more than what all of them share
    real.tiering.check_integrity()


def test_the_policies_differ_where_conversations_come_back() -> None:
    requests = conversations(1, 2000)
    lru, ours, best = (sum(replay(requests, c)) for c in (Lru(SIZE), MultiQueue(SIZE), Optimum(SIZE, requests)))
    assert lru < ours < best


def test_the_fast_lru_is_the_policy_of_the_product(requests: list[list[int]]) -> None:
    fast, real = Lru(SIZE), ProductLru(lambda _: 0, UseClock())
    for blocks in requests:
        keys = [block.to_bytes(4, "big") for block in blocks]
        parent = None
        for key in keys:
            if key not in real:
                real.add(key, parent)
            parent = key
        real.record_use(reversed(keys))
        while len(real) > SIZE:
            real.remove(next(iter(real)))
        fast.use(blocks)
        assert [int.from_bytes(key, "big") for key in real] == list(fast._order)


def test_no_cache_has_more_hits_than_the_optimum(requests: list[list[int]]) -> None:
    best = sum(replay(requests, Optimum(SIZE, requests)))
    infinite = sum(replay(requests, Lru(1 << 60)))
    for make in (Lru, MultiQueue):
        cache = make(SIZE)
        assert sum(replay(requests, cache)) <= best <= infinite
        assert sum(block in cache for block in {block for blocks in requests for block in blocks}) <= SIZE


def leading(blocks: list[int], cache: frozenset[int]) -> int:
    return next((place for place, block in enumerate(blocks) if block not in cache), len(blocks))


def best_of_all(requests: list[list[int]], size: int) -> int:
    """Hits of the best cache, by trying every set of blocks that could be kept after every request."""
    hits = {frozenset[int](): 0}
    for blocks in requests:
        after: dict[frozenset[int], int] = {}
        for cache, before in hits.items():
            known = sorted(cache.union(blocks))
            for kept in itertools.combinations(known, min(size, len(known))):
                key = frozenset(kept)
                after[key] = max(after.get(key, 0), before + leading(blocks, cache))
        hits = after
    return max(hits.values())


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_optimum_is_the_best_of_all_choices(size: int) -> None:
    source = random.Random(size)
    for _ in range(30):
        paths = [[source.randrange(2) for _ in range(source.randint(1, 3))] for _ in range(8)]
        # the id of a block is its path: 1 is the root, 2 n and 2 n + 1 are the children of n
        requests = [list(itertools.accumulate(path, lambda node, bit: 2 * node + bit, initial=1)) for path in paths]
        assert sum(replay(requests, Optimum(size, requests))) == best_of_all(requests, size)
