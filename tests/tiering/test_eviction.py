"""The order of eviction by itself: LRU, and what every policy promises, a chunk before its parent."""

import random

import pytest

from tests.kit.counts import count, seed
from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.tiering.eviction import EVICTION_POLICIES, EvictionOrder
from tiered_kv.tiering.eviction_policy import UseClock
from tiered_kv.tiering.index import GhostList, Index
from tiered_kv.tiering.lru import Lru
from tiered_kv.tiering.multi_queue import MultiQueue
from tiered_kv.tiering.quotas import Quota, Quotas


def lru():
    return Lru(lambda _: 9, UseClock())


def ordered(policy):
    return b"".join(policy).decode()


def test_keys_go_in_the_order_in_which_they_were_used():
    policy = lru()
    for key in (b"a", b"b", b"c", b"d"):
        policy.add(key, None)
    policy.record_use([b"b", b"x", b"a"])
    policy.remove(b"c")
    assert ordered(policy) == "dba" and len(policy) == 3 and b"c" not in policy


def test_a_key_is_added_right_before_its_parent():
    policy = lru()
    for key, parent in [(b"a", None), (b"z", None), (b"b", b"a"), (b"c", b"b"), (b"d", b"gone")]:
        policy.add(key, parent)
    assert ordered(policy) == "cbazd"


def test_a_key_added_twice_is_our_bug():
    policy = lru()
    policy.add(b"a", None)
    with pytest.raises(AssertionError, match="twice"):
        policy.add(b"a", None)


def test_an_empty_order_ends_at_once():
    policy = lru()
    policy.add(b"a", None)
    policy.remove(b"a")
    assert list(policy) == [] and len(policy) == 0


@pytest.mark.parametrize("eviction", EVICTION_POLICIES)
@pytest.mark.parametrize("number", range(seed(), seed() + count("SEEDS", 20)))
def test_chunks_go_before_their_parents_whatever_comes_and_goes(number, eviction):
    source = random.Random(number)
    index, quotas, entries = Index(1, GhostList()), Quotas(), []
    order = EvictionOrder(0, index, quotas, EVICTION_POLICIES[eviction])
    for place in range(30):
        parent = source.choice(entries).record if entries and source.random() < 0.8 else None
        namespace = bytes([source.randrange(3)]) * 16  # also where its parent is of another: somebody made that up
        record = ChunkRecord(
            namespace,
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
            order.record_use(entry.record.namespace, [e.record.key for e in index.prefix(entry)])
        elif action < 0.4:
            quotas.set(entry.record.namespace, Quota(at_most=source.choice([0.5, 1.0])))
        elif entry in order:
            order.remove(entry)
        else:
            order.add(entry)
        order.check_integrity()
        index.check_integrity()


def test_a_walk_stops_a_namespace_that_keeps_the_rest_and_goes_on_with_the_others():
    index, quotas = Index(1), Quotas()
    order = EvictionOrder(0, index, quotas, MultiQueue)
    keeps, others = b"k" * 16, b"o" * 16
    quotas.set(keeps, Quota(0.5))
    for number in range(6):
        namespace = others if number % 2 else keeps
        order.add(index.add(ChunkRecord(namespace, bytes([number]) * 16, namespace, 0, bytes(32))))
    left = [2]

    def may_go(entry):
        if entry.record.namespace == keeps:
            left[0] -= 1
        return entry.record.namespace == others or left[0] >= 0

    assert [entry.record.key[0] for entry in order.candidates(may_go)] == [0, 1, 2, 3, 5]
    assert [entry.record.key[0] for entry in order.candidates(only=keeps)] == [0, 2, 4]
    assert [entry.record.key[0] for entry in order.candidates(only=others)] == [1, 3, 5]
    quotas.drop(keeps)
    assert [entry.record.key[0] for entry in order] == list(range(6)) and len(order) == 6
