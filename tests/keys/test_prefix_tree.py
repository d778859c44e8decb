"""Prefix trees over rows: against a plain reading of the same names, however they lie."""

import random

import pytest

from tiered_kv.keys.naming import BlobName
from tiered_kv.keys.prefix_tree import PrefixTree

SPACES = b"\x01" * 16, b"\x02" * 16


def key(number):
    return number.to_bytes(16, "big")


def chain(space, numbers, branch=None):
    """Names of a prefix; ``branch`` is the name it continues."""
    names = []
    for number in numbers:
        above = names[-1] if names else branch
        parent, depth = (space, 0) if above is None else (above.key, above.chunk_index + 1)
        names.append(BlobName(space, key(number), parent, depth))
    return names


def some_names(seed):
    """Trees with branches, gaps and names that lie, in any order."""
    draw = random.Random(seed)
    names = []
    for _ in range(draw.randrange(1, 8)):
        space = draw.choice(SPACES)
        branches = [name for name in names if name.namespace == space]
        branch = draw.choice(branches) if branches and draw.random() < 0.6 else None
        first = len(names) + 1000
        names += chain(space, range(first, first + draw.randrange(1, 9)), branch)
    names = [name for name in names if draw.random() < 0.85]
    for number in range(draw.randrange(4)):
        parent = draw.choice([*(name.key for name in names), key(7), *SPACES])
        names.append(BlobName(draw.choice(SPACES), key(number), parent, draw.randrange(4)))
    draw.shuffle(names)
    return names


def plain_parent(names, name):
    """The rule in words: one chunk above, in the same namespace, with the key that the name gives."""
    for other in names:
        is_above = other.chunk_index == name.chunk_index - 1
        if is_above and (other.namespace, other.key) == (name.namespace, name.parent):
            return other
    return None


def plain_prefix(names, name):
    found = [name]
    while (above := plain_parent(names, found[-1])) is not None:
        found.append(above)
    return found


def is_reached(names, name):
    first = plain_prefix(names, name)[-1]
    return first.chunk_index == 0 and first.parent == first.namespace


def tree_of(names):
    rows = {}
    for row, name in enumerate(names):
        rows.setdefault(name.namespace, {})[name.key] = row
    return PrefixTree.of([name.chunk_index for name in names], [name.parent for name in names], rows)


@pytest.mark.parametrize("seed", range(60))
def test_the_tree_is_what_the_names_say(seed):
    names = some_names(seed)
    tree = tree_of(names)

    def of(rows):
        return [names[row] for row in rows]

    lost = [name for name in names if not is_reached(names, name)]
    for row, name in enumerate(names):
        assert of(tree.prefix(row)) == plain_prefix(names, name)
        assert set(of(tree.children(row))) == {other for other in names if plain_parent(names, other) == name}
        assert set(of(tree.behind([row]))) == {other for other in names if name in plain_prefix(names, other)}
    assert {names[row] for row, is_lost in enumerate(tree.unreachable()) if is_lost} == set(lost)
    assert set(of(tree.behind(tree.orphans))) == set(lost)
    holes, walked = of(tree.holes()), of(tree.walk())
    assert set(holes) == set(lost) and len(holes) == len(lost)
    assert set(walked) == set(names) - set(lost) and len(walked) == len(names) - len(lost)
    assert sorted(tree.deepest_first()) == list(range(len(names)))


@pytest.mark.parametrize("seed", range(60))
def test_what_is_kept_keeps_what_lies_before_it(seed):
    names, draw = some_names(seed), random.Random(seed)
    tree = tree_of(names)
    keep = {name for name in names if draw.random() < 0.2}
    lost = {name for name in names if not is_reached(names, name)}
    found = [names[row] for row in tree.holes(lambda row: names[row] in keep)]
    assert set(found) == {
        name for name in lost if not any(name in plain_prefix(names, kept) for kept in keep if kept in lost)
    }
    for name in found:  # children before parents
        assert all(found.index(other) < found.index(name) for other in found if plain_parent(names, other) == name)
    marked = tree.with_prefixes(row for row, name in enumerate(names) if name in keep)
    before = {above for name in keep for above in plain_prefix(names, name)}
    assert {names[row] for row, mark in enumerate(marked) if mark} == before


@pytest.mark.parametrize("seed", range(60))
def test_a_use_dates_the_prefix_before_it(seed):
    names, draw = some_names(seed), random.Random(seed)
    used = [draw.randrange(100) for _ in names]
    expected = [
        max(used[other] for other, late in enumerate(names) if name in plain_prefix(names, late)) for name in names
    ]
    tree_of(names).spread_uses(used)
    assert used == expected


def test_siblings_are_walked_in_the_order_asked_for():
    trunk = chain(SPACES[0], range(2))
    names = [*trunk, *chain(SPACES[0], [30, 31], trunk[1]), *chain(SPACES[0], [20, 21], trunk[1])]
    tree = tree_of(names)
    assert list(tree.walk()) == [0, 1, 2, 3, 4, 5]
    assert list(tree.walk(lambda row: names[row].key)) == [0, 1, 4, 5, 2, 3]


def test_names_that_point_at_each_other_are_no_circle():
    one = BlobName(SPACES[0], key(1), key(2), 3)
    two = BlobName(SPACES[0], key(2), key(1), 2)
    tree = tree_of([one, two])
    assert tree.prefix(0) == [0, 1] and tree.prefix(1) == [1] and tree.orphans == [1]


def test_a_prefix_of_20_000_chunks_needs_no_recursion():
    names = chain(SPACES[0], range(20_000))
    tree = tree_of(names[::-1])
    assert [names[::-1][row].chunk_index for row in tree.walk()] == list(range(20_000))
    assert len(tree.behind(tree.roots)) == 20_000 and tree.holes() == []
