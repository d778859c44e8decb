"""Token files: every way in which they may be written, and that no message shows what is in them."""

import pytest

from tests.kit.storage.stored_prompts import CHUNK, Model, tokens
from tiered_kv.errors import ConfigError
from tiered_kv.keys.extras import Salt, encode
from tiered_kv.keys.prefix_keys import PrefixKeys
from tiered_kv.ops.prompts import prompt_keys, read_tokens


@pytest.mark.parametrize(
    "text",
    [
        "[7, 4294967295, 0]",
        " [7,4294967295,\n0] ",
        "7 4294967295 0",
        "7,4294967295,0",
        "7\n4294967295\n0\n",
        '{"count": 3, "max_model_len": 2048, "tokens": [7, 4294967295, 0], "token_strs": null}',
    ],
)
def test_tokens_may_be_written_in_many_ways(text: str) -> None:
    assert read_tokens(text) == [7, 4294967295, 0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "holds none"),
        ("[]", "holds none"),
        ("[1, 31337", "begins as JSON and is none"),
        ('{"prompt_token_ids": [31337]}', "JSON that is no list"),
        ('{"tokens": 31337}', "JSON that is no list"),
        ('{"tokens": ["31337"]}', "number 0 is no token id"),
        ('"31337"', "JSON that is no list"),
        ("[" * 100_000, "begins as JSON and is none"),
        ("[1, 313370000000]", "number 1 is no token id"),
        ("[1, -31337]", "number 1 is no token id"),
        ("[1, 31337.5]", "number 1 is no token id"),
        ('[1, "31337"]', "number 1 is no token id"),
        ("[1, true]", "number 1 is no token id"),
        ("1 2 31337x", "word 2 is no whole number"),
        ("1 -31337", "word 1 is no whole number"),
        ("1 4294967296", "number 1 is no token id"),
        ("1 \uff13\uff11", "word 1 is no whole number"),
    ],
)
def test_what_is_no_prompt_is_refused_without_showing_it(text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_tokens(text)
    assert expected in str(caught.value)
    assert "31337" not in str(caught.value)


def test_a_salt_is_in_the_first_chunk_as_an_engine_has_it() -> None:
    namespace, prompt = Model().namespace, tokens(1, 3)
    expected = PrefixKeys(namespace, CHUNK)
    expected.extend(prompt, lambda index: encode([Salt("s")]) if index == 0 else b"")
    assert prompt_keys(namespace, CHUNK, prompt, "s").keys == expected.keys
    assert prompt_keys(namespace, CHUNK, prompt, "").keys == Model().keys(prompt).keys != expected.keys
