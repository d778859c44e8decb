"""The dictionary in parts: it does what a dictionary does, and none of its steps is of all that it has."""

import random
import weakref

from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.tiering.key_map import PARTS, KeyMap

KEYS = st.binary(min_size=1, max_size=2)


@given(st.lists(st.tuples(st.sampled_from(["set", "del", "pop", "get"]), KEYS, st.integers())))
def test_it_does_what_a_dictionary_does(deeds):
    mine, theirs = KeyMap[int](), dict[bytes, int]()
    for deed, key, value in deeds:
        if deed == "set":
            mine[key] = theirs[key] = value
        elif deed == "del" and key in theirs:
            del mine[key], theirs[key]
        elif deed == "pop":
            assert mine.pop(key) == theirs.pop(key, None)
        assert mine.get(key) == theirs.get(key) and (key in mine) == (key in theirs)
        assert len(mine) == len(theirs)
    assert sorted(mine) == sorted(theirs) and all(mine[key] == value for key, value in theirs.items())
    assert sorted(mine.values()) == sorted(mine.walk()) == sorted(theirs.values())


def test_no_dictionary_has_more_than_a_small_part():
    """What takes time at once, growing and being listed, is of one part."""
    rng, mine = random.Random(0), KeyMap[int]()
    for number in range(20_000):
        mine[rng.randbytes(16)] = number
    assert max(map(len, mine._parts)) < 2 * 20_000 / PARTS


def test_a_walk_gives_what_stays_once_whatever_comes_and_goes():
    rng, mine = random.Random(1), KeyMap[bytes]()
    for _ in range(3000):
        key = rng.randbytes(16)
        mine[key] = key
    stays = set(mine)
    given_out = []
    for number, value in enumerate(mine.walk()):
        given_out.append(value)
        if number < 1000:
            gone, come = rng.choice(sorted(stays)), rng.randbytes(16)
            stays.discard(gone)
            mine.pop(gone)
            mine[come] = come
    assert stays <= set(given_out) and len(given_out) == len(set(given_out))


def test_values_are_taken_out_and_let_go_of_one_by_one():
    class Value:
        pass

    mine = KeyMap[Value]()
    refs = []
    for number in range(50):
        value = mine[bytes([number])] = Value()
        refs.append(weakref.ref(value))
    del value
    left = 50
    for _ in mine.pop_all():
        left -= 1
        assert len(mine) == left and sum(ref() is not None for ref in refs) <= left + 2
    assert len(mine) == 0
