"""Parse a prompt's token ids from a file, and compute their keys in a namespace.

No message of this module contains a token id: error messages may be read by people who must not see the prompt.
"""

import json
import re
from collections.abc import Sequence
from typing import Final

from tiered_kv.errors import ConfigError
from tiered_kv.keys.extras import Salt, encode
from tiered_kv.keys.namespace import Namespace
from tiered_kv.keys.prefix_keys import MAX_TOKEN, PrefixKeys

EXPECTED: Final = (
    "expected a JSON list of token ids, what vLLM's /tokenize answers, or whole numbers separated by spaces, commas or "
    "new lines"
)


def read_tokens(text: str) -> list[int]:
    """Token ids of a text.

    Raises:
        ConfigError: It is no list of token ids, or an empty one.
    """
    found = _json_list(text) if text.lstrip().startswith(("[", "{", '"')) else _numbers(text)
    if not found:
        raise ConfigError(f"the file of tokens holds none: {EXPECTED}")
    for position, token in enumerate(found):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= MAX_TOKEN:
            raise ConfigError(f"the file of tokens: number {position} is no token id (0 to {MAX_TOKEN}): {EXPECTED}")
    return [int(token) for token in found]


def _json_list(text: str) -> list[int]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigError(f"the file of tokens begins as JSON and is none: {EXPECTED}") from None
    if isinstance(found, dict):
        found = found.get("tokens")
    if not isinstance(found, list):
        raise ConfigError(f"the file of tokens holds JSON that is no list, nor has one as tokens: {EXPECTED}")
    return found


def _numbers(text: str) -> list[int]:
    words = [word for word in re.split(r"[\s,]+", text) if word]
    for position, word in enumerate(words):
        if not (word.isascii() and word.isdigit() and len(word) <= 10):
            raise ConfigError(f"the file of tokens: word {position} is no whole number: {EXPECTED}")
    return [int(word) for word in words]


def prompt_keys(namespace: Namespace, chunk_tokens: int, tokens: Sequence[int], salt: str) -> PrefixKeys:
    """Keys and digests of a prompt's full chunks, as an engine of this namespace derives them.

    Args:
        salt: The request's cache salt; empty for none. It stands in the first chunk, from where later keys inherit it.
    """
    keys = PrefixKeys(namespace, chunk_tokens)
    salted = encode([Salt(salt)]) if salt else b""
    keys.extend(tokens, lambda index: salted if index == 0 else b"")
    return keys
