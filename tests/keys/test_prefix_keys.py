import os
import subprocess
import sys
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.samples.formats import sample_namespace
from tiered_kv.keys.extras import Lora, Multimodal, Salt, encode
from tiered_kv.keys.namespace import REQUIRED_FIELDS
from tiered_kv.keys.prefix_keys import PrefixKeys

NAMESPACE = sample_namespace()
CHUNK = 4
token = st.integers(0, 2**32 - 1)
tokens_of_chunks = st.integers(1, 6).flatmap(lambda n: st.lists(token, min_size=n * CHUNK, max_size=n * CHUNK))


def hashed(tokens, extras_for=None, namespace=NAMESPACE):
    keys = PrefixKeys(namespace, CHUNK)
    keys.extend(tokens, extras_for)
    return keys


def assert_differ_from(index, a, b):
    """Keys and digests are equal before ``index`` and differ from there on."""
    for ours, theirs in ((a.keys, b.keys), (a.digests, b.digests)):
        assert ours[:index] == theirs[:index]
        assert not set(ours[index:]) & set(theirs[index:])


@given(tokens_of_chunks, st.data())
def test_one_changed_token_changes_every_later_key(tokens, data):
    position = data.draw(st.integers(0, len(tokens) - 1))
    changed = list(tokens)
    changed[position] = data.draw(token.filter(lambda t: t != tokens[position]))
    assert_differ_from(position // CHUNK, hashed(tokens), hashed(changed))


@given(tokens_of_chunks, st.data())
def test_one_changed_extra_changes_every_later_key(tokens, data):
    at = data.draw(st.integers(0, len(tokens) // CHUNK - 1))
    extras = st.sampled_from([[], [Lora("a")], [Salt("a")], [Multimodal("a", 0)], [Multimodal("a", 1)], [Lora("b")]])
    ours = data.draw(extras)
    theirs = data.draw(extras.filter(lambda e: e != ours))
    a = hashed(tokens, lambda index: encode(ours if index == at else []))
    b = hashed(tokens, lambda index: encode(theirs if index == at else []))
    assert_differ_from(at, a, b)


@pytest.mark.parametrize("name", REQUIRED_FIELDS)
def test_one_changed_namespace_field_changes_every_key(name):
    tokens = list(range(12))
    assert_differ_from(0, hashed(tokens), hashed(tokens, namespace=sample_namespace(**{name: "another"})))


@given(st.lists(token, max_size=30), st.data())
def test_tokens_that_arrive_bit_by_bit_give_the_same_keys(tokens, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=5)))
    extras_for = {i: encode([Salt(str(i))]) for i in range(10)}.__getitem__
    grown = PrefixKeys(NAMESPACE, CHUNK)
    for cut in [*cuts, len(tokens)]:
        assert grown.extend(tokens[:cut], extras_for) == cut // CHUNK
    at_once = hashed(tokens, extras_for)
    assert grown.keys == at_once.keys
    assert grown.digests == at_once.digests


@pytest.mark.parametrize("cut", range(6))
def test_chunks_of_one_token_that_arrive_in_two_parts_give_the_same_keys(cut):
    """The shortest chunk there is: what is packed starts at the chunk and nowhere else."""
    tokens = [7, 8, 9, 10, 11]
    grown, at_once = PrefixKeys(NAMESPACE, 1), PrefixKeys(NAMESPACE, 1)
    grown.extend(tokens[:cut])
    grown.extend(tokens)
    at_once.extend(tuple(tokens))
    assert grown.keys == at_once.keys and len(grown.keys) == len(tokens)


class ListView:
    """A sequence that is no list and gives lists for slices, as vLLM's ConstantList does."""

    def __init__(self, items):
        self._items = items

    def __len__(self):
        return len(self._items)

    def __getitem__(self, index):
        return self._items[index]


@given(st.lists(st.integers(0, 2**31 - 1), max_size=20))
def test_kind_of_sequence_does_not_matter(tokens):
    expected = hashed(tokens).keys
    forms = [
        tuple(tokens),
        array("I", tokens),
        array("q", tokens),
        memoryview(array("I", tokens)),
        ListView(tokens),
        *(np.array(tokens, dtype=dtype) for dtype in ("<i4", "<u4", "<i8", "<u8", ">i4", ">i8")),
        np.repeat(np.array(tokens, dtype="<i8"), 2)[::2],
    ]
    for form in forms:
        assert hashed(form).keys == expected


def test_bytes_are_read_as_token_ids_not_as_memory():
    assert hashed(bytes([1, 2, 3, 4])).keys == hashed([1, 2, 3, 4]).keys


def test_array_of_the_caller_is_left_as_it_is():
    tokens = array("I", range(8))
    hashed(tokens)
    assert tokens == array("I", range(8))


def test_extend_asks_extras_for_new_chunks_only():
    asked = []
    keys = PrefixKeys(NAMESPACE, CHUNK)
    for length in (5, 8, 9, 17):
        keys.extend(list(range(length)), lambda index: asked.append(index) or b"")
    assert asked == [0, 1, 2, 3]


def test_extend_with_fewer_tokens_than_before_changes_nothing():
    keys = hashed(list(range(12)))
    before = list(keys.keys)
    assert keys.extend([1, 2]) == 3
    assert keys.keys == before


def test_parent_is_the_key_before_and_the_namespace_for_the_first():
    keys = hashed(list(range(12)))
    assert keys.parent(0) == NAMESPACE.digest
    assert [keys.parent(i) for i in (1, 2, 3)] == keys.keys


def test_keys_have_16_bytes_and_digests_32():
    keys = hashed(list(range(12)))
    assert {len(key) for key in keys.keys} == {16}
    assert {len(digest) for digest in keys.digests} == {32}


@pytest.mark.parametrize("bad", [-1, 2**32, -(2**70)])
@pytest.mark.parametrize("form", [list, tuple])
def test_token_outside_uint32_is_named_with_its_position(bad, form):
    keys = hashed(list(range(8)))
    tokens = [*range(8), 1, 2, bad, 3]
    with pytest.raises(ValueError, match=f"position=10 token={bad}$"):
        keys.extend(form(tokens))
    assert len(keys.keys) == len(keys.digests) == 2


def test_the_largest_token_is_one_and_the_next_is_named():
    with pytest.raises(ValueError, match=f"position=1 token={2**32}$"):
        hashed([2**32 - 1, 2**32, 0, 0])


def test_negative_token_in_a_numpy_array_is_refused():
    with pytest.raises(ValueError, match="position=1 token=-1"):
        hashed(np.array([0, -1, 0, 0], dtype=np.int32))


@pytest.mark.parametrize("tokens", [[1, 2, 3, 4.0], ["1", "2", "3", "4"], np.zeros(4), np.zeros((4, 4), dtype=int)])
def test_tokens_that_are_no_integers_are_refused(tokens):
    with pytest.raises(TypeError):
        hashed(tokens)


def test_chunk_of_no_tokens_is_refused():
    with pytest.raises(ValueError, match="chunk_tokens=0"):
        PrefixKeys(NAMESPACE, 0)


IN_A_PROCESS = """
from tests.kit.samples.formats import sample_namespace
from tiered_kv.keys.extras import Lora, Salt, encode
from tiered_kv.keys.prefix_keys import PrefixKeys
keys = PrefixKeys(sample_namespace(extra={"b": 1, "a": [None, True]}), 4)
keys.extend(list(range(9)), lambda index: encode([Salt("s"), Lora("l")]))
print(b"".join(keys.keys + keys.digests).hex())
"""


@pytest.mark.parametrize("hash_seed", ["0", "1", "random"])
def test_fresh_process_with_another_hash_seed_gives_the_same_keys(hash_seed):
    keys = PrefixKeys(sample_namespace(extra={"a": [None, True], "b": 1}), 4)
    keys.extend(list(range(9)), lambda index: encode([Lora("l"), Salt("s")]))
    environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    answer = subprocess.run(
        [sys.executable, "-c", IN_A_PROCESS], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert answer.stdout.strip() == b"".join(keys.keys + keys.digests).hex()
