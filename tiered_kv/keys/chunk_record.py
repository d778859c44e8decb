"""The identity of a chunk: what names it, ties it to its prefix, and says who stored it.

One type from end to end: the scheduler sends it to the server with the slot that it filled, tiering keeps it in the
index, headers of blobs are written from it and read back into it, and tiers tell by it what they hold.
"""

from typing import Annotated, Final

import msgspec

from tiered_kv.keys.stored_by import STORED_BY_CHARS_MAX, UNKNOWN
from tiered_kv.keys.tags import NO_TAG, TAG_BYTES

KEY_BYTES: Final = 16
PREFIX_DIGEST_BYTES: Final = 32

CHUNK_INDEX_MAX: Final = 1 << 31
"""Far above any context length, and within the ten digits that a header has for it."""

Key = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
PrefixDigest = Annotated[bytes, msgspec.Meta(min_length=PREFIX_DIGEST_BYTES, max_length=PREFIX_DIGEST_BYTES)]
ChunkIndex = Annotated[int, msgspec.Meta(ge=0, le=CHUNK_INDEX_MAX)]
Tag = Annotated[bytes, msgspec.Meta(min_length=TAG_BYTES, max_length=TAG_BYTES)]
StoredByLine = Annotated[str, msgspec.Meta(max_length=STORED_BY_CHARS_MAX)]


class ChunkRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One chunk; equal if it is the same chunk, whoever stored it. Its bounds are checked where it is decoded.

    Attributes:
        namespace: Digest of the namespace.
        parent: Key of the chunk before it; the namespace digest for chunk 0.
        chunk_index: Its position in its prefix, from 0.
        prefix_sha256: Rolling SHA-256 of the whole prefix up to and including this chunk.
        tag: Digest of whose it is (``keys/tags.py``). No part of what it is: a chunk that two ask for is one chunk.
        stored_by: Who stored it (``keys/stored_by.py``), as far as it is known; no part of what it is either.
    """

    namespace: Key
    key: Key
    parent: Key
    chunk_index: ChunkIndex
    prefix_sha256: PrefixDigest
    tag: Tag = NO_TAG
    stored_by: StoredByLine = UNKNOWN

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ChunkRecord):
            return NotImplemented
        return (
            self.key == other.key
            and self.prefix_sha256 == other.prefix_sha256
            and self.namespace == other.namespace
            and self.parent == other.parent
            and self.chunk_index == other.chunk_index
        )

    def __hash__(self) -> int:
        return hash((self.namespace, self.key))
