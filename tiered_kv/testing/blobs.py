"""Real, sealed blobs of a small geometry, for tests of tiers and for the contract suite.

Owns nothing. Every blob is a chain's chunk with random but seeded payload; equal arguments give equal bytes.
"""

import hashlib
import random
from dataclasses import dataclass

from tiered_kv.chunks.geometry import ChunkGeometry, LayerPage
from tiered_kv.chunks.header import BlobFormat
from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.keys.tags import TAG_BYTES
from tiered_kv.tiers.base import BlobName


@dataclass(frozen=True, slots=True)
class SampleBlob:
    """A blob and what its header says."""

    record: ChunkRecord
    data: bytes

    @property
    def name(self) -> BlobName:
        return BlobName.of(self.record)

    def view(self) -> memoryview:
        """The bytes as a tier takes them."""
        return memoryview(self.data)


class SampleChain:
    """Blobs of one prefix: chunk ``i`` names chunk ``i - 1`` as its parent.

    Attributes:
        form: The blob format of all of them.
    """

    def __init__(self, seed: int = 0, payload_bytes: int = 8192, namespace: bytes | None = None) -> None:
        """Make a chain.

        Args:
            payload_bytes: A multiple of 4096.
            namespace: 16 bytes; None: made from ``seed``, so that two seeds share nothing.
        """
        page = LayerPage("layer.0", "U8", (payload_bytes // 2,), "C")
        self.geometry = ChunkGeometry(block_tokens=16, chunk_tokens=32, ranks=((page,),))
        self.namespace = namespace or hashlib.md5(b"ns %d" % seed, usedforsecurity=False).digest()
        self.form = BlobFormat(self.namespace, self.geometry)
        self._seed = seed

    def key(self, index: int) -> bytes:
        """Key of chunk ``index``; the namespace digest stands before the first."""
        if index < 0:
            return self.namespace
        return hashlib.md5(b"key %d %d" % (self._seed, index), usedforsecurity=False).digest()

    def tag(self, index: int) -> bytes:
        """Whose chunk ``index`` is: nobody's, one's or another's."""
        return bytes([index % 3]) * TAG_BYTES

    def stored_by(self, index: int) -> str:
        """Who stored chunk ``index``: one of three versions."""
        return f"tiered_kv/0.9.{index % 3} vllm/0.32.{index % 3} cuda/FLASH_ATTN"

    def name(self, index: int) -> BlobName:
        return BlobName(self.namespace, self.key(index), self.key(index - 1), index)

    def blob(self, index: int, version: int = 0) -> SampleBlob:
        """Chunk ``index``; another ``version`` has other payload bytes under the same name."""
        data = bytearray(self.form.blob_bytes)
        payload = random.Random(f"{self._seed} {index} {version}").randbytes(self.geometry.data_bytes)
        start = self.form.header_bytes
        data[start : start + len(payload)] = payload
        digest = hashlib.sha256(b"prefix %d %d" % (self._seed, index)).digest()
        whose = self.tag(index), self.stored_by(index)
        record = ChunkRecord(self.namespace, self.key(index), self.key(index - 1), index, digest, *whose)
        self.form.seal(memoryview(data), record, 1_700_000_000)
        return SampleBlob(record, bytes(data))
