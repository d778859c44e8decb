"""Names of tails: the end of a prompt below a whole chunk, as the continuation of the chunk before it.

A tail of ``n`` tokens behind chunk ``i-1`` holds the first ``n`` tokens of what is, or may become, chunk ``i``. Several
tails may follow one chunk: of prompts that go on differently, or of one prompt as it grows::

    chunk 0 <- chunk 1 <- chunk 2       chunk 2 goes on where a tail ends, with these tokens or with others
                     ^
                     tails of 64 and of 192 tokens, of another prompt perhaps

    head   = MARK || u32 n
    key    = xxh3_128(head || key[i-1]    || tokens, uint32 little-endian || extras of the chunk)
    digest = sha256(head   || digest[i-1] || the same bytes)

The mark comes first and the length second, so neither a chunk nor a tail of another length has the digest of a tail,
whatever a client puts into its extras: what stands there otherwise is a digest.
"""

import hashlib
from typing import Final

import xxhash

MARK: Final = b"tiered_kv tail"
LENGTH_BYTES: Final = 4


def tail_name(parent: tuple[bytes, bytes], tokens: int, body: bytes) -> tuple[bytes, bytes]:
    """Key and digest of a tail.

    Args:
        parent: Key and digest of the chunk before it.
        tokens: Its length.
        body: Its tokens as bytes, then its chunk's extras.
    """
    key, digest = parent
    head = MARK + tokens.to_bytes(LENGTH_BYTES, "little")
    return xxhash.xxh3_128_digest(head + key + body), hashlib.sha256(head + digest + body).digest()
