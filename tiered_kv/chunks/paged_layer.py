"""One layer's KV tensor: where the page of a block lies in its storage, and its elements by logical index.

Owns the check that a block's page is one dense run of bytes. Must not copy between devices and slots (``transfer.py``,
``device_copy.py``). Threads: any.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tiered_kv.chunks.geometry import LayerPage
from tiered_kv.errors import UnsupportedModel

Rows = npt.NDArray[np.intp]
"""Numbers of rows of a storage, or of blocks."""


@dataclass(frozen=True)
class PagedLayer:
    """One layer's tensor with its page, checked: where the page of a block lies in the tensor's storage, in bytes."""

    page: LayerPage
    tensor: torch.Tensor

    @cached_property
    def ratio(self) -> int:
        return self.page.shape[0] if self.page.axes.startswith("K") else 1

    @cached_property
    def offset_bytes(self) -> int:
        return int(self.tensor.storage_offset() * self.tensor.element_size())

    @cached_property
    def block_stride_bytes(self) -> int:
        return int(self.tensor.stride(0) * self.ratio * self.tensor.element_size())

    def check(self) -> None:
        tensor, name = self.tensor, self.page.layer
        if tensor.dim() != 4 or tensor.shape[0] < self.ratio or tensor.shape[0] % self.ratio:
            raise UnsupportedModel(
                "KV tensor is not [blocks, heads, tokens, content]. "
                f"layer={name} shape={tuple(tensor.shape)} kernel_blocks={self.ratio}"
            )
        inner = sum((extent - 1) * stride for extent, stride in zip(tensor.shape[1:], tensor.stride()[1:], strict=True))
        span = (inner + (self.ratio - 1) * tensor.stride(0) + 1) * tensor.element_size()
        size = tensor[0].numel() * self.ratio * tensor.element_size()
        if not span == size == self.page.page_bytes <= self.block_stride_bytes:
            raise UnsupportedModel(
                f"a block's page is not one dense run of bytes. layer={name} span={span} size={size} "
                f"page={self.page.page_bytes} block_stride={self.block_stride_bytes}"
            )

    def shares_storage(self, other: "PagedLayer") -> bool:
        """Whether both tensors are views of one allocation."""
        return bool(self.tensor.untyped_storage().data_ptr() == other.tensor.untyped_storage().data_ptr())

    def storage(self) -> torch.Tensor:
        """The whole allocation as bytes."""
        empty = torch.empty(0, dtype=torch.uint8, device=self.tensor.device)
        return empty.set_(self.tensor.untyped_storage())

    def rows(self, row_bytes: int) -> torch.Tensor:
        """The allocation as rows of so many bytes, as many as are whole; the layer begins with one."""
        storage, origin = self.storage(), self.offset_bytes % row_bytes
        count = (storage.numel() - origin) // row_bytes
        return storage[origin : origin + count * row_bytes].view(count, row_bytes)

    def read_block(self, block: int) -> npt.NDArray[Any]:
        """Copy a block's elements out by logical index, as signed integers [K, H, N, C]."""
        bits: npt.NDArray[Any] = self._bits(block).cpu().contiguous().numpy().copy()
        return bits

    def write_block(self, block: int, bits: npt.NDArray[Any]) -> None:
        """Set a block's elements by logical index; takes what ``read_block`` gives."""
        self._bits(block).copy_(torch.from_numpy(bits))

    def _bits(self, block: int) -> torch.Tensor:
        same_size = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[self.tensor.element_size()]
        return self.tensor.view(same_size)[block * self.ratio : (block + 1) * self.ratio]
