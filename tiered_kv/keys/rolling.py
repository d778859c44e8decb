"""Rolling keys and prefix digests: the names of one request's chunks.

Owns the derivation (docs/format.md draws it); must not look anything up nor know of vLLM's block hashes, which differ
between processes and releases. Called by the vLLM door and by library users.

    key[i]    = xxh3_128(key[i-1]  || tokens of chunk i, uint32 little-endian || extras)   key[-1]    = Namespace.digest
    digest[i] = sha256(digest[i-1] || the same bytes)                                      digest[-1] = Namespace.sha256

The key is quick and names the chunk; the digest stands in the blob's header and is compared on every hit, so that a
crafted xxhash collision is a miss and never another prompt's KV.
"""

import hashlib
import sys
from array import array
from collections.abc import Callable, Sequence
from typing import NewType

import xxhash

from tiered_kv.keys.namespace import Namespace

ChunkKey = NewType("ChunkKey", bytes)
"""16 bytes that name a chunk within its namespace."""

TOKEN_BYTES = 4
MAX_TOKEN = 2**32 - 1
_UINT32 = "I"
assert array(_UINT32).itemsize == TOKEN_BYTES


def next_key(parent: bytes, body: bytes) -> ChunkKey:
    """Key of a chunk from its parent's key and its own body: packed tokens, then encoded extras."""
    return ChunkKey(xxhash.xxh3_128_digest(parent + body))


def next_digest(parent: bytes, body: bytes) -> bytes:
    """Prefix digest of a chunk from its parent's digest and its own body: packed tokens, then encoded extras."""
    return hashlib.sha256(parent + body).digest()


class PrefixKeys:
    """Keys and digests of one request, computed once and extended as it grows.

    ``keys`` and ``digests`` are for reading. A request's tokens only grow: what was hashed is never looked at again.

    Threads: none; one owner.
    """

    __slots__ = ("_chunk_tokens", "_namespace", "digests", "keys")

    def __init__(self, namespace: Namespace, chunk_tokens: int) -> None:
        if chunk_tokens <= 0:
            raise ValueError(f"chunk_tokens must be positive. chunk_tokens={chunk_tokens}")
        self._namespace = namespace
        self._chunk_tokens = chunk_tokens
        self.keys: list[bytes] = []
        self.digests: list[bytes] = []

    def extend(self, tokens: Sequence[int], extras_for: Callable[[int], bytes] | None = None) -> int:
        """Hash the full chunks that are new in ``tokens`` and return how many chunks there are now.

        Args:
            tokens: All tokens of the request so far: a list, an ``array``, a numpy array or another sequence of ints.
            extras_for: Gives the encoded extras of the chunk with that index; none means no chunk has any.

        Raises:
            ValueError: A token id is outside uint32; no chunk was added.
            TypeError: A token id is not an integer; no chunk was added.
        """
        known = len(self.keys)
        count = len(tokens) // self._chunk_tokens
        if count <= known:
            return known
        # A view, not bytes: the copy's fresh pages would cost more than all the hashing.
        packed = memoryview(_pack(tokens, known * self._chunk_tokens, count * self._chunk_tokens)).cast("B")
        step = self._chunk_tokens * TOKEN_BYTES
        key = self.parent(known)
        digest = self.digests[-1] if known else self._namespace.sha256
        for index in range(known, count):
            start = (index - known) * step
            body = packed[start : start + step].tobytes()
            if extras_for is not None:
                body += extras_for(index)
            key = next_key(key, body)
            digest = next_digest(digest, body)
            self.keys.append(key)
            self.digests.append(digest)
        return count

    def parent(self, index: int) -> bytes:
        """Key of the chunk before ``index``; the namespace digest for the first."""
        return self.keys[index - 1] if index else self._namespace.digest


def _pack(tokens: Sequence[int], start: int, stop: int) -> "array[int]":
    """Copy ``tokens[start:stop]`` as little-endian uint32; array() takes a list twice as fast as struct.pack does."""
    part = tokens[start:stop]
    if isinstance(part, array) and part.typecode == _UINT32:
        packed = part
    else:
        # By value, whatever the item size and byte order: array() would read bytes and buffers as raw memory.
        values = part if isinstance(part, list) else part.tolist() if hasattr(part, "tolist") else list(part)
        try:
            packed = array(_UINT32, values)
        except OverflowError:
            position, token = next((i, t) for i, t in enumerate(values) if not 0 <= t <= MAX_TOKEN)
            raise ValueError(f"token id is outside uint32. position={start + position} token={token}") from None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed
