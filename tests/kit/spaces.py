"""Namespaces whose chunks are named by paths of small numbers: keys and digests without tokens."""

import hashlib
from dataclasses import dataclass

from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.keys.stored_by import UNKNOWN
from tiered_kv.keys.tags import NO_TAG
from tiered_kv.keys.tail_keys import tail_name


@dataclass(frozen=True, slots=True)
class Space:
    """A namespace: its digest and the bytes one of its blobs takes.

    Attributes:
        is_tagged: A chunk is that tenant's whose number ends its path.
        stored_by: Who stores its chunks.
    """

    namespace: bytes
    slot_bytes: int
    is_tagged: bool = False
    stored_by: str = UNKNOWN

    def record(self, path: tuple[int, ...]) -> ChunkRecord:
        """The chunk that ends a prefix; ``path`` names every chunk of it."""
        parent = self.key(path[:-1]) if len(path) > 1 else self.namespace
        place = self.namespace, self.key(path), parent, len(path) - 1
        return ChunkRecord(*place, self.digest(path), self.tag(path), self.stored_by)

    def tag(self, path: tuple[int, ...]) -> bytes:
        return bytes([1 + path[-1] % 255]) * len(NO_TAG) if self.is_tagged else NO_TAG

    def key(self, path: tuple[int, ...]) -> bytes:
        return hashlib.md5(self.namespace + repr(path).encode(), usedforsecurity=False).digest()

    def digest(self, path: tuple[int, ...]) -> bytes:
        return hashlib.sha256(self.namespace + repr(path).encode()).digest()

    def tail(self, path: tuple[int, ...], name: str, tokens: int = 4) -> ChunkRecord:
        """A tail of so many tokens behind the prefix that ``path`` names."""
        key, digest = tail_name((self.key(path), self.digest(path)), tokens, name.encode())
        return ChunkRecord(self.namespace, key, self.key(path), len(path), digest, self.tag(path), self.stored_by)

    def prefix(self, path: tuple[int, ...]) -> tuple[list[bytes], list[bytes]]:
        """Keys and digests from the root to the end of ``path``."""
        paths = [path[: depth + 1] for depth in range(len(path))]
        return [self.key(p) for p in paths], [self.digest(p) for p in paths]
