"""Eviction by age and uses against a reference that sorts; what is remembered of chunks that are gone is bounded."""

from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.tiering.eviction_policy import UseClock
from tiered_kv.tiering.index import GhostList, Index
from tiered_kv.tiering.lru import Lru
from tiered_kv.tiering.multi_queue import LEVELS, MultiQueue

PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(bytes)
STEPS = st.lists(st.tuples(st.sampled_from(["add", "remove", "use", "use again", "count"]), PATHS), max_size=60)


def prefix(path):
    """A chunk's key is its path here: all its prefixes, deepest first."""
    return [path[:length] for length in range(len(path), 0, -1)]


class Reference:
    """Per key its level, the time of its last use and its place among those of that time; the order by sorting."""

    def __init__(self, uses):
        self.uses = uses
        self.now = 0
        self.places = 0
        self.keys = {}

    def put(self, key, level, time):
        self.places += 1
        self.keys[key] = (level, time, self.places)

    def add(self, key, parent):
        level = min(self.uses(key), LEVELS - 1)
        if parent in self.keys:
            self.put(key, min(level, self.keys[parent][0]), self.keys[parent][1])
        else:
            self.now += 1
            self.put(key, level, self.now)

    def record_use(self, keys):
        self.now += 1
        known = [key for key in keys if key in self.keys]
        levels = [max(min(self.uses(key), LEVELS - 1), self.keys[key][0]) for key in known]
        for place, key in reversed(list(enumerate(known))):
            self.put(key, max(levels[: place + 1]), self.now)

    def order(self):
        def rank(item):
            level, time, place = item[1]
            return -Fraction(self.now + 1 - time, level + 1), level, -place

        return [key for key, _ in sorted(self.keys.items(), key=rank)]


@given(STEPS)
def test_the_order_is_that_of_the_reference(steps):
    uses = {}
    policy, reference = MultiQueue(lambda key: uses.get(key, 0), UseClock()), Reference(lambda key: uses.get(key, 0))
    for step, path in steps:
        if step == "add" and path not in policy:
            policy.add(path, path[:-1] or None)
            reference.add(path, path[:-1] or None)
        elif step == "remove" and path in policy:
            policy.remove(path)
            del reference.keys[path]
        elif step == "count":  # of a chunk alone: its parent was counted by somebody who forgot it
            uses[path] = uses.get(path, 0) + 1
        elif step.startswith("use"):
            for key in prefix(path) if step == "use" else ():
                uses[key] = uses.get(key, 0) + 1
            policy.record_use(prefix(path))
            reference.record_use(prefix(path))
        assert list(policy) == reference.order()
        assert len(policy) == len(reference.keys)
        assert all((key in policy) == (key in reference.keys) for key in prefix(path))


@given(STEPS)
def test_a_policy_keeps_nothing_of_keys_that_were_removed(steps):
    policy = MultiQueue(len, UseClock())
    for step, path in steps:
        if step == "add" and path not in policy:
            policy.add(path, path[:-1] or None)
        elif step.startswith("use"):
            policy.record_use(prefix(path))
    groups = set(policy._groups.values())
    assert all(group.keys for group in groups) and sum(len(group.keys) for group in groups) == len(policy)
    for key in list(policy):
        policy.remove(key)
    assert list(policy) == [] and not policy._groups
    assert all(end.newer is end and end.older is end for end in policy._queues)


@given(STEPS)
def test_lru_is_the_order_of_use_whatever_was_asked_for(steps):
    """Against the simplest LRU there is: a dict in the order of use."""
    policy, lru = Lru(lambda _: 3, UseClock()), {}
    for step, path in steps:
        if step == "remove":
            if path in lru:
                policy.remove(path)
                del lru[path]
            continue
        if step == "add" and path not in lru:  # as tiering does it: what is stored was used
            policy.add(path, path[:-1] or None)
            lru[path] = None
        used = [key for key in prefix(path) if key in lru]
        policy.record_use(prefix(path))
        for key in used:
            lru[key] = lru.pop(key)
        assert list(policy) == list(lru)


@given(STEPS)
@example([("add", b"\0\0"), ("count", b"\0\0"), ("use", b"\0\0"), ("use", b"\0")])
def test_children_go_first_even_if_the_counts_of_their_parents_are_lost(steps):
    uses = {}
    policy = MultiQueue(lambda key: uses.get(key, 0), UseClock())
    for step, path in steps:
        if step == "add":
            for length in range(1, len(path) + 1):
                if path[:length] not in policy:
                    policy.add(path[:length], path[: length - 1] or None)
        elif step == "remove" and path in policy:
            for key in [key for key in policy if key.startswith(path)]:
                policy.remove(key)
        elif step == "count":
            uses[path] = uses.get(path, 0) + 1
        elif step.startswith("use"):
            policy.record_use(prefix(path))
        gone = set()
        for key in policy:
            gone.add(key)
            assert all(child in gone or child not in policy for child in (key + b"\0", key + b"\1"))


@given(STEPS, STEPS, st.sampled_from([Lru, MultiQueue]))
def test_keys_that_are_moved_away_and_back_stand_where_they_stood(steps, more, kind):
    uses, clock = {}, UseClock()
    whole = kind(lambda key: uses.get(key, 0), UseClock())
    one, other = (kind(lambda key: uses.get(key, 0), clock) for _ in range(2))

    def is_moved(key):
        return key[0] == 1

    def play(steps, policy_of):
        for step, path in steps:
            for policy in (whole, policy_of(path)):
                if step == "add" and path not in policy:
                    policy.add(path, path[:-1] or None)
                elif step == "remove" and path in policy:
                    policy.remove(path)
                elif step.startswith("use"):
                    policy.record_use(prefix(path))
            if step == "use":
                uses.update((key, uses.get(key, 0) + 1) for key in prefix(path))

    play(steps, lambda _: one)
    one.move(other, is_moved)
    assert sorted(map(is_moved, one)) == [False] * len(one) and all(map(is_moved, other))
    play(more, lambda path: other if is_moved(path) else one)
    ranks = {key: rank for policy in (one, other) for rank, key in policy.candidates()}
    assert ranks == {key: rank for rank, key in whole.candidates()}
    other.move(one, lambda _: True)
    assert list(one.candidates()) == list(whole.candidates()) and list(other) == []
    for key in list(one):
        one.remove(key)
    assert not one._groups and not other._groups


def test_a_chunk_that_was_asked_for_stays_longer_but_not_for_ever():
    uses = {b"old": 1}
    policy = MultiQueue(lambda key: uses.get(key, 0), UseClock())
    policy.add(b"old", None)
    policy.record_use([b"old"])
    orders = []
    for number in range(4):
        policy.add(b"%d" % number, None)
        orders.append(b" ".join(policy).decode())
    # ages at the end: old 5 / 2, the others 4, 3, 2, 1; of equals goes what was not asked for
    assert orders == ["0 old", "0 old 1", "0 1 old 2", "0 1 old 2 3"]


def test_a_key_added_twice_is_our_bug():
    policy = MultiQueue(lambda _: 0, UseClock())
    policy.add(b"a", None)
    with pytest.raises(AssertionError, match="twice"):
        policy.add(b"a", None)


def record(path):
    return ChunkRecord(bytes(16), path, path[:-1] or bytes(16), len(path) - 1, bytes(32))


def test_what_comes_back_was_asked_for_once_more_and_never_more_often_than_its_parent():
    index = Index(0, GhostList())
    root, leaf = index.add(record(b"a")), index.add(record(b"ab"))
    index.count_use([root, leaf])
    index.count_use([root])
    for entry in (leaf, root):
        index.remove_if_gone(entry)
    root, leaf = index.add(record(b"a")), index.add(record(b"ab"))
    assert (root.uses, leaf.uses) == (3, 2)
    for _ in range(3):
        index.remove_if_gone(leaf)
        leaf = index.add(record(b"ab"))
    assert leaf.uses == 3


def test_a_parent_that_comes_back_unknown_has_the_uses_of_its_children():
    index = Index(0)  # remembers nothing
    path = [index.add(record(b"abc"[:length])) for length in (1, 2, 3)]
    index.count_use(path)
    for entry in path[:2]:
        index.remove_if_gone(entry)
    assert [index.add(record(key)).uses for key in (b"a", b"ab")] == [0, 1]
    assert index.uses_of(b"a") == 1
    index.check_integrity()


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=200), st.integers(2, 10))
def test_what_is_remembered_is_bounded_and_the_last_is_known(steps, chunks):
    gone, last = GhostList(1), {}
    for is_back, number in steps:
        key = bytes([number])
        if is_back:
            recalled = gone.recall(key)
            assert recalled is None or recalled == last[key]
            assert gone.recall(key) is None
        else:
            last[key] = last.get(key, 0) + 1
            gone.remember(key, last[key], chunks)
            assert len(gone) < 2 * chunks
            assert gone.recall(key) == last[key]
            gone.remember(key, last[key], chunks)
