"""Names of tails: the end of a prompt below a whole chunk, as the continuation of the chunk before it.

A tail of ``n`` tokens behind chunk ``i-1`` holds the first ``n`` tokens of what is, or may become, chunk ``i``. Several
tails may follow one chunk: of prompts that go on differently, or of one prompt as it grows::

    chunk 0 <- chunk 1 <- chunk 2       chunk 2 goes on where a tail ends, with these tokens or with others
                     ^
                     tails of 64 and of 192 tokens, of another prompt perhaps

    head   = MARK || u32 n
    body   = tokens, uint32 little-endian || extras of these tokens
    key    = first 8 bytes of xxh3_128(head || key[i-1] || body) || "tail" || u32 n
    digest = sha256(head || digest[i-1] || body)

The mark comes first and the length second, so neither a chunk nor a tail of another length has the digest of a tail,
whatever a client puts into its extras: what stands there otherwise is a digest.

The key says that it is a tail's and how long that is, wherever a key is: in host memory, in a file's name, in the
disk's index. One chunk's key in 2^48 says so, too, and then that chunk is kept as tails are; which bytes it holds is
its digest's to say, as for all others.
"""

import hashlib
from typing import Final

MARK: Final = b"tiered_kv tail"
KEY_MARK: Final = b"tail"
HASH_BYTES: Final = 8
LENGTH_BYTES: Final = 4
TAIL_TOKENS_MAX: Final = (1 << 16) - 1


def tail_name(parent: tuple[bytes, bytes], tokens: int, body: bytes) -> tuple[bytes, bytes]:
    """Key and digest of a tail.

    Args:
        parent: Key and digest of the chunk before it.
        tokens: Its length, from 1 to ``TAIL_TOKENS_MAX``.
        body: Its tokens as bytes, then their extras.
    """
    import xxhash  # noqa: PLC0415  # every verb imports this module, and its --help hashes nothing

    assert 0 < tokens <= TAIL_TOKENS_MAX, "a tail of an impossible length"
    key, digest = parent
    length = tokens.to_bytes(LENGTH_BYTES, "little")
    head = MARK + length
    hashed = xxhash.xxh3_128_digest(head + key + body)[:HASH_BYTES]
    return hashed + KEY_MARK + length, hashlib.sha256(head + digest + body).digest()


def tail_tokens(key: bytes) -> int:
    """Length of the tail whose key it is; 0: it is a chunk's, or that of a part of a state."""
    if key[HASH_BYTES : HASH_BYTES + len(KEY_MARK)] != KEY_MARK:
        return 0
    tokens = int.from_bytes(key[-LENGTH_BYTES:], "little")
    return tokens if tokens <= TAIL_TOKENS_MAX else 0
