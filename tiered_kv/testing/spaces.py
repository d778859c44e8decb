"""Namespaces whose chunks are named by paths of small numbers: keys and digests without tokens."""

import hashlib
from dataclasses import dataclass

from tiered_kv.hierarchy.plan import ChunkRecord


@dataclass(frozen=True, slots=True)
class Space:
    """A namespace: its digest and the bytes one of its blobs takes."""

    namespace: bytes
    slot_bytes: int

    def record(self, path: tuple[int, ...]) -> ChunkRecord:
        """The chunk that ends a prefix; ``path`` names every chunk of it."""
        parent = self.key(path[:-1]) if len(path) > 1 else self.namespace
        return ChunkRecord(self.namespace, self.key(path), parent, len(path) - 1, self.digest(path))

    def key(self, path: tuple[int, ...]) -> bytes:
        return hashlib.md5(self.namespace + repr(path).encode(), usedforsecurity=False).digest()

    def digest(self, path: tuple[int, ...]) -> bytes:
        return hashlib.sha256(self.namespace + repr(path).encode()).digest()

    def prefix(self, path: tuple[int, ...]) -> tuple[list[bytes], list[bytes]]:
        """Keys and digests from the root to the end of ``path``."""
        paths = [path[: depth + 1] for depth in range(len(path))]
        return [self.key(p) for p in paths], [self.digest(p) for p in paths]
