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
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Final

import xxhash

from tiered_kv.keys.namespace import Namespace
from tiered_kv.keys.tail_keys import tail_name

TOKEN_BYTES = 4
MAX_TOKEN = 2**32 - 1
HASHED_IN_PART: Final = 8192
YIELD_S: Final = 50e-6
"""Between two parts of so many tokens each: another thread gets the interpreter lock without having to ask for it,
which takes 5 ms (``sys.getswitchinterval``)."""

_UINT32 = "I"
assert array(_UINT32).itemsize == TOKEN_BYTES


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

    def extend(
        self, tokens: Sequence[int], extras_for: Callable[[int], bytes] | None = None, chunks: int | None = None
    ) -> int:
        """Hash the full chunks that are new in ``tokens`` and return how many chunks there are now.

        Args:
            tokens: All tokens of the request so far: a list, an ``array``, a numpy array or another sequence of ints.
            extras_for: Gives the encoded extras of the chunk with that index; none means no chunk has any.
            chunks: No more than so many are wanted; None: all.

        Raises:
            ValueError: A token id is outside uint32; no chunk was added.
            TypeError: A token id is not an integer; no chunk was added.
        """
        known = len(self.keys)
        count = len(tokens) // self._chunk_tokens
        count = count if chunks is None else min(count, chunks)
        if count <= known:
            return known
        # A view, not bytes: the copy's fresh pages would cost more than all the hashing.
        packed = memoryview(_pack(tokens, known * self._chunk_tokens, count * self._chunk_tokens)).cast("B")
        step = self._chunk_tokens * TOKEN_BYTES
        key: bytes = self.parent(known)
        digest = self.digests[-1] if known else self._namespace.sha256
        key_of, digest_of = xxhash.xxh3_128_digest, hashlib.sha256  # looked up once: 128k tokens are 512 chunks
        for index in range(known, count):
            start = (index - known) * step
            body = packed[start : start + step].tobytes()
            if extras_for is not None:
                body += extras_for(index)
            key = key_of(key + body)
            digest = digest_of(digest + body).digest()
            self.keys.append(key)
            self.digests.append(digest)
        return count

    def parent(self, index: int) -> bytes:
        """Key of the chunk before ``index``; the namespace digest for the first."""
        return self.keys[index - 1] if index else self._namespace.digest

    def tail(self, tokens: Sequence[int], index: int, length: int, extras: bytes = b"") -> tuple[bytes, bytes]:
        """Key and digest of the tail of ``length`` tokens where chunk ``index`` begins (``tail_keys.py``).

        Args:
            tokens: All tokens of the request so far.
            index: At least 1; the chunk before it must have a key.
            extras: Encoded extras of these tokens.
        """
        start = index * self._chunk_tokens
        body = _pack(tokens, start, start + length).tobytes() + extras
        return tail_name((self.keys[index - 1], self.digests[index - 1]), length, body)


def keys_in_parts(
    namespace: Namespace, chunk_tokens: int, tokens: Sequence[int], extras_for: Callable[[int], bytes], chunks: int
) -> PrefixKeys:
    """The keys of so many chunks, computed in a thread that shares the interpreter with one that must not wait.

    Raises:
        TypeError, ValueError: As ``PrefixKeys.extend``.
    """
    keys, step = PrefixKeys(namespace, chunk_tokens), max(1, HASHED_IN_PART // chunk_tokens)
    for stop in range(step, chunks + step, step):
        keys.extend(tokens, extras_for, min(stop, chunks))
        time.sleep(YIELD_S)
    return keys


def _pack(tokens: Sequence[int], start: int, stop: int) -> "array[int]":
    """Copy ``tokens[start:stop]``, and perhaps some that follow, as little-endian uint32.

    array() takes a list twice as fast as struct.pack does. A list that is wanted but for a few tokens at its end is
    taken whole: cutting them off first would copy it.
    """
    if start == 0 and isinstance(tokens, list) and len(tokens) - stop <= stop >> 4:
        try:
            return _little_endian(array(_UINT32, tokens))
        except OverflowError:
            pass  # perhaps behind stop, where it does not matter; otherwise told below
    part = tokens[start:stop]
    if isinstance(part, array) and part.typecode == _UINT32:
        return _little_endian(part)
    # By value, whatever the item size and byte order: array() would read bytes and buffers as raw memory.
    values = part if isinstance(part, list) else part.tolist() if hasattr(part, "tolist") else list(part)
    try:
        return _little_endian(array(_UINT32, values))
    except OverflowError:
        position, token = next((i, t) for i, t in enumerate(values) if not 0 <= t <= MAX_TOKEN)
        raise ValueError(f"token id is outside uint32. position={start + position} token={token}") from None


def _little_endian(packed: "array[int]") -> "array[int]":
    if sys.byteorder == "big":
        packed.byteswap()
    return packed
