"""KV caches of real models as vLLM lays them out: one allocation, per layer a view ``[B, H, N, C]``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from tiered_kv.chunks.geometry import LayerPage

DTYPE_NAMES: Final = {torch.bfloat16: "BF16", torch.uint8: "U8"}


@dataclass(frozen=True)
class Shape:
    """A rank's share of a model's KV.

    Attributes:
        tokens: Of a block.
        content: Elements per head and token: K and V, or a latent.
        indexer: Content of a second page per layer, in bytes, as DeepSeek V3.2's indexer has; 0: none.
    """

    name: str
    layout: str
    layers: int
    heads: int
    tokens: int
    content: int
    dtype: torch.dtype = torch.bfloat16
    indexer: int = 0

    @property
    def page_bytes(self) -> int:
        """Of the larger page of a layer."""
        return int(self.heads * self.tokens * self.content * self.dtype.itemsize)

    @property
    def indexer_bytes(self) -> int:
        """Of the smaller one; 0: there is none."""
        return self.tokens * self.indexer

    @property
    def block_bytes(self) -> int:
        """Of all layers."""
        return self.layers * (self.page_bytes + self.indexer_bytes)

    def scaled(self, layers: int) -> "Shape":
        """The same with fewer layers, for a dry run."""
        return Shape(self.name, self.layout, layers, self.heads, self.tokens, self.content, self.dtype, self.indexer)


REAL: Final = (
    Shape("Llama-8B", "LBHNC", 32, 8, 16, 256),
    Shape("Llama-8B, LBNHC", "LBNHC", 32, 8, 16, 256),
    Shape("Llama-8B, BLHNC", "BLHNC", 32, 8, 16, 256),
    Shape("Llama-8B, FlashInfer block 64", "LBHNC", 32, 8, 64, 256),
    Shape("Llama-8B, TP 8", "LBHNC", 32, 1, 16, 256),
    Shape("Llama-70B, TP 4", "LBHNC", 80, 2, 16, 256),
    Shape("Llama-70B, TP 8, fp8", "LBHNC", 80, 1, 16, 256, torch.uint8),
    Shape("Llama-70B, TP 8, BLHNC", "BLHNC", 80, 1, 16, 256),
    Shape("Qwen3-30B-A3B", "LBHNC", 48, 4, 16, 256),
    Shape("DeepSeek MLA, bf16", "LBHNC", 61, 1, 64, 576),
    Shape("DeepSeek MLA, fp8_ds_mla", "LBHNC", 61, 1, 64, 656, torch.uint8),
    Shape("DeepSeek V3.2, MLA and indexer", "LBHNC", 61, 1, 64, 656, torch.uint8, 132),
)
"""gpu.md, 1c: pages from 4 KiB to 256 KiB."""


@dataclass(frozen=True)
class Placed:
    """A layer's page: where block 0 begins in the allocation, bytes from one block to the next, bytes of the page."""

    page: LayerPage
    tensor: torch.Tensor
    offset: int
    stride: int

    def bytes_of(self, block: int) -> slice:
        """Where a block's page lies in the allocation."""
        start = self.offset + block * self.stride
        return slice(start, start + self.page.page_bytes)


def place(raw: torch.Tensor, shape: Shape, blocks: int) -> list[Placed]:
    """Lay a model's layers out in an allocation, in payload order.

    Args:
        raw: uint8, at least ``shape.block_bytes * blocks`` long.
    """
    placed, offset = [], 0
    for layer in range(shape.layers):
        for part, (content, size) in enumerate(_parts(shape)):
            dtype = torch.uint8 if part else shape.dtype
            stride = size if shape.layout.startswith("L") else shape.block_bytes
            view = _view(raw, offset, stride, blocks, shape, content, dtype)
            placed.append(Placed(_page(f"layer.{layer}.{part}", shape, content, dtype), view, offset, stride))
            offset += size * blocks if shape.layout.startswith("L") else size
    return placed


def _parts(shape: Shape) -> Sequence[tuple[int, int]]:
    """Content and bytes of each page of a layer."""
    second = [(shape.indexer, shape.indexer_bytes)] if shape.indexer else []
    return [(shape.content, shape.page_bytes), *second]


def _view(
    raw: torch.Tensor, offset: int, stride: int, blocks: int, shape: Shape, content: int, dtype: torch.dtype
) -> torch.Tensor:
    heads, tokens, item = shape.heads, shape.tokens, dtype.itemsize
    is_head_major = shape.layout.endswith("HNC")
    inner = (tokens * content, content, 1) if is_head_major else (content, heads * content, 1)
    whole = raw[: raw.numel() // item * item].view(dtype)
    return whole.as_strided((blocks, heads, tokens, content), (stride // item, *inner), offset // item)


def _page(name: str, shape: Shape, content: int, dtype: torch.dtype) -> LayerPage:
    extents = {"H": shape.heads, "N": shape.tokens, "C": content}
    axes = "HNC" if shape.layout.endswith("HNC") else "NHC"
    return LayerPage(name, DTYPE_NAMES[dtype], tuple(extents[axis] for axis in axes), axes)
