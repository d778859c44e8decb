"""KV tensors as vLLM lays them out, and where each page lies in memory: worked out apart from the code under test.

A pool is one allocation of bytes. A page's place is ``offset + block * stride``, in bytes; ``PLACES`` says it for each
layout. ``packed`` has pages of several sizes one behind the other in each block, as layers with an indexer have.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tiered_kv.chunks.geometry import LayerPage

DTYPES = {"BF16": torch.bfloat16, "U8": torch.uint8, "F32": torch.float32}
LAYOUTS = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")


@dataclass(frozen=True)
class Shape:
    """One kind of layer.

    Attributes:
        padding_bytes: Behind each page; where layers come first only.
    """

    layout: str
    layers: int
    heads: int
    tokens: int
    content: int
    dtype: str = "BF16"
    padding_bytes: int = 0

    @property
    def page_bytes(self) -> int:
        return self.heads * self.tokens * self.content * int(DTYPES[self.dtype].itemsize)


@dataclass(frozen=True)
class Place:
    """Where a layer's pages lie in the pool, in bytes."""

    offset: int
    stride: int
    size: int


@dataclass(frozen=True)
class Pool:
    """One allocation, with random bytes.

    Attributes:
        pages: Layers in payload order, with tensors of the same names.
    """

    raw: torch.Tensor
    pages: list[LayerPage]
    tensors: dict[str, torch.Tensor]
    places: list[Place]

    def read(self, ids: Sequence[int]) -> bytes:
        """The pages of blocks in payload order, one memory copy each."""
        memory = self.raw.numpy()
        return b"".join(_page(memory, place, block).tobytes() for place in self.places for block in ids)

    def overlaid(self, ids: Sequence[int], payload: bytes, first: int, blocks: int) -> npt.NDArray[np.uint8]:
        """The pool's bytes as they are once the blocks ``first`` and following of a chunk were loaded into ``ids``."""
        memory: npt.NDArray[np.uint8] = self.raw.numpy().copy()
        at = 0
        for place in self.places:
            for number, block in enumerate(ids):
                start = at + (first + number) * place.size
                _page(memory, place, block)[:] = np.frombuffer(payload[start : start + place.size], np.uint8)
            at += blocks * place.size
        return memory


def _page(memory: npt.NDArray[np.uint8], place: Place, block: int) -> npt.NDArray[np.uint8]:
    start = place.offset + block * place.stride
    return memory[start : start + place.size]


def uniform_pool(shape: Shape, blocks: int, seed: int, name: str = "layer") -> Pool:
    """Layers of one kind."""
    step = shape.page_bytes + shape.padding_bytes
    if shape.layout.startswith("L"):
        places = [Place(layer * step * blocks, step, shape.page_bytes) for layer in range(shape.layers)]
    else:
        assert not shape.padding_bytes
        places = [Place(layer * step, step * shape.layers, shape.page_bytes) for layer in range(shape.layers)]
    return _pool([shape] * shape.layers, places, blocks * step * shape.layers, blocks, seed, name)


def packed_pool(shapes: Sequence[Shape], blocks: int, seed: int, name: str = "layer") -> Pool:
    """A layer of each shape in turn; a block is one run of bytes over all of them."""
    order = [shape for _ in range(shapes[0].layers) for shape in shapes]
    offsets = np.cumsum([0, *(shape.page_bytes for shape in order)])
    places = [
        Place(int(offset), int(offsets[-1]), shape.page_bytes) for offset, shape in zip(offsets, order, strict=False)
    ]
    return _pool(order, places, int(offsets[-1]) * blocks, blocks, seed, name)


def _pool(shapes: Sequence[Shape], places: list[Place], size: int, blocks: int, seed: int, name: str) -> Pool:
    raw = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8))
    pages, tensors = [], {}
    for number, (shape, place) in enumerate(zip(shapes, places, strict=True)):
        axes = "HNC" if shape.layout.endswith("HNC") else "NHC"
        extents = {"H": shape.heads, "N": shape.tokens, "C": shape.content}
        steps = {"C": 1, axes[1]: shape.content, axes[0]: shape.content * extents[axes[1]]}
        item = DTYPES[shape.dtype].itemsize
        tensors[f"{name}.{number}"] = raw.view(DTYPES[shape.dtype]).as_strided(
            (blocks, shape.heads, shape.tokens, shape.content),
            (place.stride // item, steps["H"], steps["N"], 1),
            place.offset // item,
        )
        pages.append(LayerPage(f"{name}.{number}", shape.dtype, tuple(extents[axis] for axis in axes), axes))
    return Pool(raw, pages, tensors, places)
