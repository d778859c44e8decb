"""Names of states: a chain behind a chunk that no chunk can have, told by the name alone."""

import hashlib

import pytest
import xxhash

from tests.kit.engine_world import NAMESPACES
from tests.kit.spaces import Space
from tiered_kv.keys.prefix_keys import PrefixKeys
from tiered_kv.keys.state_keys import MARK, is_state, next_part, state_records

SPACE = Space(b"state-namespace-", 100)


def test_parts_are_a_chain_behind_their_chunk():
    chunk = SPACE.record((1, 2, 3))
    first, second = state_records(chunk, 2)
    assert (first.parent, second.parent) == (chunk.key, first.key)
    assert (first.chunk_index, second.chunk_index) == (3, 4)
    assert first.key == xxhash.xxh3_128_digest(chunk.key + b"tiered_kv state")
    assert first.prefix_sha256 == hashlib.sha256(chunk.prefix_sha256 + b"tiered_kv state").digest()
    assert (second.key, second.prefix_sha256) == next_part(first.key, first.prefix_sha256)
    assert state_records(chunk, 0) == []


def test_a_state_is_told_from_a_chunk_by_its_name():
    chunk = SPACE.record((1, 2))
    assert all(map(is_state, state_records(chunk, 3)))
    assert not is_state(chunk) and not is_state(SPACE.record((1,)))


def test_two_boundaries_have_different_states():
    names = {record.key for path in ((1,), (1, 2), (1, 3)) for record in state_records(SPACE.record(path), 2)}
    assert len(names) == 6


@pytest.mark.parametrize("chunk_tokens", [4, 16, 256])
def test_no_chunk_has_the_name_of_a_state(chunk_tokens):
    keys = PrefixKeys(next(iter(NAMESPACES.values())), chunk_tokens)
    keys.extend(list(range(4 * chunk_tokens)))
    assert len(MARK) < 4 * 4, "the tokens of the shortest chunk are longer"
    for before, key in zip(keys.keys, keys.keys[1:], strict=False):
        assert key != xxhash.xxh3_128_digest(before + MARK)
