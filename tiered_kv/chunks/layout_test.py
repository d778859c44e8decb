"""The layout self-test: proves on the registered tensors that a gathered page is what docs/format.md says it is.

Owns the proof only; runs once per worker, before the first request, and leaves every byte as it was. Called by the
worker when vLLM has registered its KV tensors. It reads and writes elements by logical index ``[b, h, n, c]`` and
computes the documented order from the page's axes alone, so a mistake about strides cannot be on both sides.

Torch stays in ``paged_layer.py``: blocks come and go as numpy arrays.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tiered_kv.chunks.paged_layer import PagedLayer
from tiered_kv.chunks.transfer import LOGICAL_AXES, PagedKV
from tiered_kv.errors import UnsupportedModel

MIN_BLOCKS: Final = 3
"""A block to read, one to write and one between them that must stay as it is."""

TESTED_BLOCKS: Final = 3
"""Blocks read and blocks written; with their neighbours this bounds the test's memory to 18 blocks."""

Bits = npt.NDArray[Any]


def self_test(paged: PagedKV) -> None:
    """Gather and scatter a few blocks and compare every element of every layer by logical index.

    Modifies: nothing in the end; blocks of the pool hold test values for the time of the call.

    Raises:
        UnsupportedModel: An element is not where the documented layout has it, or the pool is too small to tell.
    """
    if paged.num_blocks < MIN_BLOCKS:
        raise UnsupportedModel(
            f"pool is too small for the layout test. expected>={MIN_BLOCKS} blocks={paged.num_blocks}"
        )
    blocks = _Blocks.of(paged.num_blocks, paged.blocks_per_chunk)
    saved = [{block: layer.read_block(block) for block in blocks.watched} for layer in paged.layers]
    try:
        for turn in range(_turns(paged, blocks)):
            _run_once(paged, blocks, turn)
    finally:
        for layer, contents in zip(paged.layers, saved, strict=True):
            for block, bits in contents.items():
                layer.write_block(block, bits)


@dataclass(frozen=True)
class _Blocks:
    """Which blocks take part: spread over the pool, first and last included, not in ascending order."""

    chunk: tuple[int, ...]
    targets: tuple[int, ...]
    watched: tuple[int, ...]

    @classmethod
    def of(cls, num_blocks: int, blocks_per_chunk: int) -> "_Blocks":
        count = min(TESTED_BLOCKS, blocks_per_chunk, (num_blocks - 1) // 2)
        picked = [int(x) for x in np.linspace(0, num_blocks - 1, 2 * count)]
        sources, targets = picked[0::2][::-1], picked[1::2][1:] + picked[1:2]
        chunk = tuple(sources[i % count] for i in range(blocks_per_chunk))
        watched = {near for block in picked for near in (block - 1, block, block + 1) if 0 <= near < num_blocks}
        return cls(chunk, tuple(targets), tuple(sorted(watched)))


def _elements(layer: PagedLayer) -> int:
    return layer.page.page_bytes // int(layer.tensor.element_size())


def _turns(paged: PagedKV, blocks: _Blocks) -> int:
    """How many turns until every element had a sequence of values of its own, however few bits an element has."""
    largest = max(_elements(layer) for layer in paged.layers)
    numbers = len(paged.layers) * len(blocks.watched) * largest
    narrowest = min(int(layer.tensor.element_size()) for layer in paged.layers)
    return -(-numbers.bit_length() // (8 * narrowest))


def _run_once(paged: PagedKV, blocks: _Blocks, turn: int) -> None:
    largest = max(_elements(layer) for layer in paged.layers)
    values: list[dict[int, Bits]] = []
    for index, layer in enumerate(paged.layers):
        number = index * len(blocks.watched) * largest
        values.append({b: _values(layer, number + i * largest, turn) for i, b in enumerate(blocks.watched)})
        for block, bits in values[-1].items():
            layer.write_block(block, bits)
    mark = (
        paged.mark()
    )  # on a GPU the copies have streams of their own, and wait for no write that is not before a mark
    slot = memoryview(bytearray(paged.group_bytes))
    paged.gather(blocks.chunk, slot, mark).wait()
    _check_slot(paged, blocks.chunk, values, slot)
    first = paged.blocks_per_chunk - len(blocks.targets)
    paged.scatter(slot, blocks.targets, first, mark).wait()
    for layer, wanted in zip(paged.layers, values, strict=True):
        expected = wanted | dict(zip(blocks.targets, (wanted[b] for b in blocks.chunk[first:]), strict=True))
        for block, bits in expected.items():
            what = "scattered block" if block in blocks.targets else "block beside the copied ones"
            _compare(layer, block, bits, layer.read_block(block), what)


def _values(layer: PagedLayer, first: int, turn: int) -> Bits:
    """Values of one block: digit ``turn`` of each element's number, numbered from ``first`` by logical index."""
    size = layer.tensor.element_size()
    shift = 8 * size * turn
    numbers = np.arange(first, first + _elements(layer), dtype=np.uint64)
    digits = numbers >> np.uint64(shift) if shift < 64 else np.zeros_like(numbers)
    return digits.astype(f"u{size}").view(f"i{size}").reshape(layer.ratio, *layer.tensor.shape[1:])


def _check_slot(paged: PagedKV, chunk: Sequence[int], values: Sequence[dict[int, Bits]], slot: memoryview) -> None:
    offset = 0
    for layer, wanted in zip(paged.layers, values, strict=True):
        order = [LOGICAL_AXES.index(axis) for axis in layer.page.axes]
        # An axis the page does not name has one element, so where it stands makes no difference.
        order = [axis for axis in range(len(LOGICAL_AXES)) if axis not in order] + order
        back = np.argsort(order)
        for block in chunk:
            extents = [wanted[block].shape[axis] for axis in order]
            got = np.frombuffer(slot[offset : offset + layer.page.page_bytes], dtype=wanted[block].dtype)
            _compare(layer, block, wanted[block], got.reshape(extents).transpose(back), "gathered block")
            offset += layer.page.page_bytes


def _compare(layer: PagedLayer, block: int, expected: Bits, observed: Bits, what: str) -> None:
    if np.array_equal(expected, observed):
        return
    k, h, n, c = (int(x) for x in np.argwhere(expected != observed)[0])
    raise UnsupportedModel(
        f"{what} differs from the documented layout. layer={layer.page.layer} axes={layer.page.axes} "
        f"b={block * layer.ratio + k} h={h} n={n} c={c} "
        f"expected={int(expected[k, h, n, c]):#x} observed={int(observed[k, h, n, c]):#x}"
    )
