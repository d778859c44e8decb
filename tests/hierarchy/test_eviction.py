"""The order of eviction by itself: LRU, and what every policy promises, a chunk before its parent."""

import random

import pytest
from counts import count, seed

from tiered_kv.hierarchy.eviction import LeastRecentlyUsed
from tiered_kv.hierarchy.index import Index
from tiered_kv.hierarchy.order import Order
from tiered_kv.hierarchy.plan import ChunkRecord


def ordered(policy):
    return b"".join(policy).decode()


def test_keys_go_in_the_order_in_which_they_were_used():
    policy = LeastRecentlyUsed()
    for key in (b"a", b"b", b"c", b"d"):
        policy.add(key, None)
    policy.record_use([b"b", b"x", b"a"])
    policy.remove(b"c")
    assert ordered(policy) == "dba" and len(policy) == 3 and b"c" not in policy


def test_a_key_is_added_right_before_its_parent():
    policy = LeastRecentlyUsed()
    for key, parent in [(b"a", None), (b"z", None), (b"b", b"a"), (b"c", b"b"), (b"d", b"gone")]:
        policy.add(key, parent)
    assert ordered(policy) == "cbazd"


def test_a_key_added_twice_is_our_bug():
    policy = LeastRecentlyUsed()
    policy.add(b"a", None)
    with pytest.raises(AssertionError, match="twice"):
        policy.add(b"a", None)


def test_an_empty_order_ends_at_once():
    policy = LeastRecentlyUsed()
    policy.add(b"a", None)
    policy.remove(b"a")
    assert list(policy) == [] and len(policy) == 0


@pytest.mark.parametrize("eviction", ["multi-queue", "lru"])
@pytest.mark.parametrize("number", range(seed(), seed() + count("SEEDS", 20)))
def test_chunks_go_before_their_parents_whatever_comes_and_goes(number, eviction):
    source = random.Random(number)
    index, order, entries = Index(0, eviction), None, []
    order = Order(0, index)
    for place in range(30):
        parent = source.choice(entries).record if entries and source.random() < 0.8 else None
        record = ChunkRecord(
            bytes(16),
            bytes([place]) * 16,
            parent.key if parent else bytes(16),
            parent.chunk_index + 1 if parent else 0,
            bytes(32),
        )
        entries.append(index.add(record))
    for _ in range(200):
        entry = source.choice(entries)
        action = source.random()
        if action < 0.3:
            if action < 0.2:
                index.count_use(index.prefix(entry)[::-1])
            order.record_use(e.record.key for e in index.prefix(entry))
        elif entry in order:
            order.remove(entry)
        else:
            order.add(entry)
        order.check_integrity()
        index.check_integrity()
