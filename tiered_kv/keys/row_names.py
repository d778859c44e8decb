"""Names of rows: chunks that another system has named already.

vLLM's own offloading names a row of its host memory by a hash that chains the whole prefix, and the number of a group
of layers (``vllm/offloading.py``). So each row is named by itself::

    name   = vLLM's hash || number of the group, 4 bytes
    key    = xxh3_128(Namespace.digest || name)
    digest = vLLM's hash, where that is SHA-256; else sha256(Namespace.sha256 || name)

A scheduler sends names as they are, and the server makes keys of them: hashing hundreds of rows takes longer than a
scheduler should spend on a lookup.
"""

import hashlib
from collections.abc import Sequence
from typing import Final

import xxhash

from tiered_kv.keys.chunk_record import PREFIX_DIGEST_BYTES, ChunkRecord
from tiered_kv.keys.namespace import Namespace

GROUP_BYTES: Final = 4
"""Of a name: its end, the number of the group of layers."""

ROW_NAME_BYTES_MAX: Final = 64 + GROUP_BYTES
"""Longest name: of a hash of 512 bits."""


def row_key(namespace: Namespace, name: bytes) -> bytes:
    """The key of a row."""
    return xxhash.xxh3_128_digest(namespace.digest + name)


def row_digest(namespace: Namespace, name: bytes) -> bytes:
    """The digest that is compared where keys are equal."""
    if len(name) == PREFIX_DIGEST_BYTES + GROUP_BYTES:
        return name[:PREFIX_DIGEST_BYTES]
    return hashlib.sha256(namespace.sha256 + name).digest()


class RowNames:
    """The names of one prefix's rows, or of rows that are each a prefix by itself.

    Rows of layers that forget are the latter: a window or a state continues a prompt without what is before it, and
    vLLM keeps few of them.

    Attributes:
        names: In the order of the prefix; whoever made the list may append to it.
        is_chain: They are those of one prefix.
    """

    __slots__ = ("is_chain", "names", "namespace")

    def __init__(self, namespace: Namespace, names: Sequence[bytes], *, is_chain: bool = True) -> None:
        self.namespace = namespace
        self.names = names
        self.is_chain = is_chain

    def key(self, index: int) -> bytes:
        """The key of one row."""
        return row_key(self.namespace, self.names[index])

    def record(self, index: int, tag: bytes) -> ChunkRecord:
        """The record of one row."""
        place = index if self.is_chain else 0
        parent = self.key(index - 1) if place else self.namespace.digest
        digest = row_digest(self.namespace, self.names[index])
        return ChunkRecord(self.namespace.digest, self.key(index), parent, place, digest, tag)
