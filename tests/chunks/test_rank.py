"""Chunks of several KV cache groups: each group's blocks go to its own place in a slot and come back from there."""

import pytest
import torch

from tiered_kv.chunks.geometry import ChunkGeometry, LayerPage
from tiered_kv.chunks.transfer import RankKV

BLOCKS, TOKENS, CONTENT = 12, 4, 6
PAGE = ("BF16", (1, TOKENS, CONTENT), "HNC")


def world():
    """Two groups of two layers that lie in one memory, as vLLM lays them: blocks tell them apart."""
    memory = torch.arange(2 * BLOCKS * TOKENS * CONTENT, dtype=torch.int16).view(torch.bfloat16)
    layers = memory.view(2, BLOCKS, 1, TOKENS, CONTENT)
    tensors = {"full.0": layers[0], "full.1": layers[1], "window.0": layers[0], "window.1": layers[1]}
    pages = [
        [LayerPage("full.0", *PAGE), LayerPage("full.1", *PAGE)],
        [LayerPage("window.0", *PAGE, blocks=2), LayerPage("window.1", *PAGE, blocks=2)],
    ]
    return RankKV(pages, tensors, [4, 2]), tensors, pages


def bits(tensor, blocks):
    return tensor[list(blocks)].view(torch.int16).contiguous().numpy().tobytes()


def test_slot_holds_every_group_at_the_place_that_the_geometry_declares():
    rank, tensors, pages = world()
    geometry = ChunkGeometry(TOKENS, 4 * TOKENS, (tuple(page for group in pages for page in group),))
    slot = memoryview(bytearray(rank.rank_bytes))

    rank.gather([(3, 1, 2, 5), (7, 6)], slot, rank.begin("save", None))

    assert rank.rank_bytes == geometry.data_bytes
    for segment, blocks in zip(geometry.segments, [(3, 1, 2, 5)] * 2 + [(7, 6)] * 2, strict=True):
        part = slot[segment.offset_bytes : segment.offset_bytes + segment.size_bytes]
        assert bytes(part) == bits(tensors[segment.page.layer], blocks)


def test_load_fills_the_asked_blocks_of_each_group_and_no_other():
    rank, tensors, _ = world()
    slot = memoryview(bytearray(rank.rank_bytes))
    rank.gather([(3, 1, 2, 5), (7, 6)], slot, rank.begin("save", None))
    stored = {name: {b: bits(tensor, [b]) for b in range(BLOCKS)} for name, tensor in tensors.items()}
    before = tensors["full.0"].clone(), tensors["full.1"].clone()

    rank.scatter(slot, [(1, (8, 9, 10)), (1, (11,))], rank.begin("load", None))

    for layer in ("full.0", "full.1"):
        assert [bits(tensors[layer], [b]) for b in (8, 9, 10)] == [stored[layer][b] for b in (1, 2, 5)]
        assert bits(tensors[f"window.{layer[-1]}"], [11]) == stored[f"window.{layer[-1]}"][6]
        assert bits(tensors[layer], range(8)) == bits(before[int(layer[-1])], range(8))


def test_group_without_blocks_to_fill_is_left_alone():
    rank, tensors, _ = world()
    slot = memoryview(bytearray(rank.rank_bytes))
    before = bits(tensors["full.0"], range(4, BLOCKS))
    rank.scatter(slot, [(0, (0, 1, 2, 3)), (0, ())], rank.begin("load", None))
    assert bits(tensors["full.0"], range(4, BLOCKS)) == before
    assert bits(tensors["full.0"], range(4)) == bytes(len(bits(tensors["full.0"], range(4))))


def test_buffer_of_another_size_is_refused():
    rank, _, _ = world()
    with pytest.raises(ValueError, match="another size"):
        rank.gather([(0, 1, 2, 3), (4, 5)], memoryview(bytearray(rank.rank_bytes + 1)), rank.begin("save", None))
    with pytest.raises(ValueError, match="another size"):
        rank.scatter(memoryview(bytearray(rank.rank_bytes - 1)), [(0, (0,)), (0, ())], rank.begin("load", None))
