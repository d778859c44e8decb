"""Names of tails: those of their tokens and of all before them, and of nothing else."""

import hashlib

import pytest
import xxhash

from tests.kit.engine_world import NAMESPACES
from tiered_kv.keys.prefix_keys import PrefixKeys
from tiered_kv.keys.state_keys import next_key
from tiered_kv.keys.tail_keys import MARK, TAIL_TOKENS_MAX, tail_name, tail_tokens

CHUNK = 16
TOKENS = [7 * n % 1000 for n in range(3 * CHUNK + 10)]
NAMESPACE = next(iter(NAMESPACES.values()))


def keys_of(tokens: list[int]) -> PrefixKeys:
    keys = PrefixKeys(NAMESPACE, CHUNK)
    keys.extend(tokens)
    return keys


def test_a_tail_is_named_as_the_document_says():
    keys = keys_of(TOKENS)
    body = b"".join(token.to_bytes(4, "little") for token in TOKENS[3 * CHUNK : 3 * CHUNK + 8]) + b"extras"
    head = b"tiered_kv tail" + bytes([8, 0, 0, 0])
    assert keys.tail(TOKENS, 3, 8, b"extras") == (
        xxhash.xxh3_128_digest(head + keys.keys[2] + body)[:8] + b"tail" + bytes([8, 0, 0, 0]),
        hashlib.sha256(head + keys.digests[2] + body).digest(),
    )


def test_other_tokens_another_length_another_prefix_and_other_extras_are_other_tails():
    keys, other = keys_of(TOKENS), keys_of([1, *TOKENS[1:]])
    changed = [*TOKENS[:-3], 999, *TOKENS[-2:]]
    names = [
        keys.tail(TOKENS, 3, 8),
        keys.tail(TOKENS, 3, 4),
        keys.tail(TOKENS, 2, 8),
        keys.tail(changed, 3, 8),
        keys.tail(TOKENS, 3, 8, b"salt"),
        other.tail(TOKENS, 3, 8),
    ]
    for part in zip(*names, strict=True):
        assert len(set(part)) == len(names)
    assert keys.tail(changed, 3, 4) == keys.tail(TOKENS, 3, 4), "what is behind a tail is no part of it"


def test_a_chunk_that_goes_on_from_a_tail_keeps_its_own_name():
    short, grown = keys_of(TOKENS[: 2 * CHUNK + 8]), keys_of(TOKENS)
    assert short.tail(TOKENS[: 2 * CHUNK + 8], 2, 8) == grown.tail(TOKENS, 2, 8)
    assert grown.tail(TOKENS, 2, 8)[0] not in grown.keys


@pytest.mark.parametrize("tokens", [4, 8])
def test_extras_of_a_clients_choice_make_a_tail_no_chunk_and_no_tail_of_another_length(tokens):
    """A salt may continue the bytes of the tokens: then only what comes first tells them apart."""
    parent = keys_of(TOKENS).keys[0], keys_of(TOKENS).digests[0]
    whole = b"".join(token.to_bytes(4, "little") for token in TOKENS[CHUNK : 2 * CHUNK])
    crafted = tail_name(parent, tokens, whole)
    assert crafted[1] != hashlib.sha256(parent[1] + whole).digest() != hashlib.sha256(parent[1] + MARK + whole).digest()
    assert crafted != tail_name(parent, tokens + 4, whole)


@pytest.mark.parametrize("tokens", [1, 8, 255, 256, TAIL_TOKENS_MAX])
def test_a_tails_key_says_how_long_it_is(tokens):
    assert tail_tokens(tail_name((bytes(16), bytes(32)), tokens, b"body")[0]) == tokens


def test_other_keys_say_that_they_are_none():
    keys = keys_of(list(range(CHUNK * 200))).keys
    assert not any(map(tail_tokens, [*keys, *map(next_key, keys), bytes(16)]))
    assert tail_tokens(bytes(8) + b"tail" + bytes(4)) == 0
    assert tail_tokens(bytes(8) + b"tail" + (TAIL_TOKENS_MAX + 1).to_bytes(4, "little")) == 0
