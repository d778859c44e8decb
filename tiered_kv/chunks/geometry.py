"""Shapes and byte offsets of a chunk, as integers only: what a blob's payload looks like.

Built by the vLLM door from the registered KV tensors and sent to the server; used by ``header.py`` to declare the
payload's tensors, by the arena to size slots and by ``transfer.py`` to gather and scatter. Knows no torch and no vLLM.

Payload, in this order and without gaps (``P`` = blocks of a chunk that are stored for the layer: all of them, or the
last ones where the layer attends to a sliding window)::

    rank 0: layer 0: page of block 0 | page of block 1 | ... | page of block P-1
            layer 1: ...
    rank 1: ...
    _pad    zero bytes up to the next multiple of 4096

Ranks that hold the same bytes (MLA) are one rank here: a *part* of the payload that one of them writes and all of them
read.
"""

from dataclasses import dataclass
from functools import cached_property

ALIGNMENT_BYTES = 4096
"""Headers and payloads start and end on this boundary: what O_DIRECT needs on every file system we know."""

DTYPE_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1}
"""safetensors dtype names we accept for KV pages, with their element size."""


def align_up(size_bytes: int) -> int:
    """Round up to the next multiple of ``ALIGNMENT_BYTES``."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class LayerPage:
    """One layer's page: the bytes of one block in one layer on one rank.

    Attributes:
        layer: The layer's name in the model.
        dtype: safetensors dtype name of an element.
        shape: Extents in the order the page lies in memory, outermost first (for vLLM's [B, H, N, C] views: the
            inner three dimensions sorted by stride).
        axes: What the extents are, e.g. ``"HNC"`` or ``"NHC"``: same extents in another order are other bytes.
        blocks: How many of a chunk's blocks are stored, its last ones; 0 means all of the geometry's
            ``blocks_per_chunk``. Layers with a sliding window, or with blocks of another size, say their own number.
        tokens_per_state: Tokens that one entry of axis ``N`` stands for. Where it is not 1 the page is opaque: its
            bytes are states that the model compressed, and stored as they are.
    """

    layer: str
    dtype: str
    shape: tuple[int, ...]
    axes: str
    blocks: int = 0
    tokens_per_state: int = 1

    @property
    def page_bytes(self) -> int:
        size = DTYPE_BYTES[self.dtype]
        for extent in self.shape:
            size *= extent
        return size


@dataclass(frozen=True, slots=True)
class Segment:
    """Where one layer of one rank lies in the payload."""

    rank: int
    page: LayerPage
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True)
class ChunkGeometry:
    """What one chunk's payload holds: every rank's pages of every layer.

    Attributes:
        block_tokens: Tokens in one of vLLM's blocks; where layers differ, the least common multiple.
        chunk_tokens: Tokens in one chunk; a multiple of ``block_tokens``.
        ranks: For each rank of the world, its layers in order. Ranks may hold different layers (pipeline stages).
    """

    block_tokens: int
    chunk_tokens: int
    ranks: tuple[tuple[LayerPage, ...], ...]

    def __post_init__(self) -> None:
        if self.block_tokens <= 0 or self.chunk_tokens <= 0 or self.chunk_tokens % self.block_tokens:
            raise ValueError(
                "chunk_tokens must be a positive multiple of block_tokens. "
                f"chunk_tokens={self.chunk_tokens} block_tokens={self.block_tokens}"
            )
        if not self.ranks or not all(self.ranks):
            raise ValueError("every rank must have at least one layer")
        if any(not 0 <= page.blocks <= self.chunk_tokens for pages in self.ranks for page in pages):
            raise ValueError(f"a layer stores no blocks, or more than a chunk has tokens ({self.chunk_tokens})")

    @property
    def blocks_per_chunk(self) -> int:
        return self.chunk_tokens // self.block_tokens

    def stored_blocks(self, page: LayerPage) -> int:
        """Blocks of a chunk that are stored for a layer."""
        return page.blocks or self.blocks_per_chunk

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """All segments in payload order; offsets are relative to the payload's first byte."""
        result = []
        offset = 0
        for rank, pages in enumerate(self.ranks):
            for page in pages:
                size = page.page_bytes * self.stored_blocks(page)
                result.append(Segment(rank, page, offset, size))
                offset += size
        return tuple(result)

    def rank_segments(self, rank: int) -> tuple[Segment, ...]:
        """The segments one rank writes and reads; they are contiguous in the payload."""
        return tuple(s for s in self.segments if s.rank == rank)

    @cached_property
    def data_bytes(self) -> int:
        """Bytes of KV in one chunk, without padding."""
        last = self.segments[-1]
        return last.offset_bytes + last.size_bytes

    @cached_property
    def payload_bytes(self) -> int:
        """Bytes of the payload, padded to ``ALIGNMENT_BYTES``."""
        return align_up(self.data_bytes)
