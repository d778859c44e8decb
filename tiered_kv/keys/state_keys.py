"""Names of recurrent states: what continues a prefix beside its attention chunks.

A model with recurrent layers (Mamba, gated delta nets, short convolutions) needs, to go on at a boundary, the state of
every such layer there. A state is stored in *parts*, one per group of recurrent layers, each of a chunk's size. The
parts follow the last chunk before the boundary as its continuation, in the same chain of names as chunks do::

    chunk 0 <- chunk 1 <- chunk 2 <- chunk 3
                  ^          ^
                  |          part 0 <- part 1      the state after chunk 2
                  part 0 <- part 1                 the state after chunk 1

    key[part]    = xxh3_128(key of what is before it || MARK)
    digest[part] = sha256(digest of what is before it || MARK)

So everything that holds for prefixes holds for states: no tier keeps a state without the chunks before it, a state goes
before them, and its digest names all their tokens. No chunk has such a name: its tokens alone are longer than the mark.
"""

import hashlib
from typing import Final, Protocol

from tiered_kv.keys.chunk_record import ChunkRecord

MARK: Final = b"tiered_kv state"


class _Named(Protocol):
    """What has a key, and that of what is before it."""

    @property
    def key(self) -> bytes: ...

    @property
    def parent(self) -> bytes: ...


def next_part(key: bytes, digest: bytes) -> tuple[bytes, bytes]:
    """Key and digest of the part behind a chunk or another part."""
    return next_key(key), hashlib.sha256(digest + MARK).digest()


def next_key(key: bytes) -> bytes:
    """Key of the part behind a chunk or another part."""
    import xxhash  # noqa: PLC0415  # every verb imports this module, and its --help hashes nothing

    return xxhash.xxh3_128_digest(key + MARK)


def state_records(before: ChunkRecord, parts: int) -> list[ChunkRecord]:
    """The records of the state behind a chunk, part by part; they are whose the chunk's record says."""
    records: list[ChunkRecord] = []
    for _ in range(parts):
        last = records[-1] if records else before
        key, digest = next_part(last.key, last.prefix_sha256)
        records.append(ChunkRecord(last.namespace, key, last.key, last.chunk_index + 1, digest, last.tag))
    return records


def is_state(named: _Named) -> bool:
    """Whether a record or a blob's whole name is that of a part of a state."""
    return named.key == next_key(named.parent)
