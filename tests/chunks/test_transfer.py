"""Gather and scatter against torch's own indexing, over the layouts vLLM has and some it has not."""

import statistics
import sys
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered_kv.chunks.geometry import LayerPage
from tiered_kv.chunks.layout_test import self_test
from tiered_kv.chunks.transfer import PagedKV
from tiered_kv.errors import UnsupportedModel

BLOCKS, HEADS, TOKENS, CONTENT = 13, 3, 4, 6
LAYERS = ("layer.0", "layer.1", "layer.2")
DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
}
# Physical order of [L, B, H, N, C], as in vLLM's KVCacheLayout, less those whose pages are not dense.
LAYOUTS = {"LBHNC": (0, 1, 2, 3, 4), "LBNHC": (0, 1, 3, 2, 4), "BLHNC": (1, 0, 2, 3, 4), "BLNHC": (1, 0, 3, 2, 4)}
KV = dict[str, torch.Tensor]


def random_kv(layout: str, dtype: str = "BF16", seed: int = 0) -> tuple[list[LayerPage], KV]:
    """Layers in one allocation, as vLLM makes them, filled with random bits."""
    order = LAYOUTS[layout]
    extents = (len(LAYERS), BLOCKS, HEADS, TOKENS, CONTENT)
    size = int(np.prod(extents)) * DTYPES[dtype].itemsize
    raw = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8))
    physical = raw.view(DTYPES[dtype]).view([extents[axis] for axis in order])
    logical = physical.permute([order.index(axis) for axis in range(5)])
    axes = "".join("LBHNC"[axis] for axis in order).replace("L", "").replace("B", "")
    shape = tuple(dict(zip("LBHNC", extents, strict=True))[axis] for axis in axes)
    pages = [LayerPage(name, dtype, shape, axes) for name in LAYERS]
    return pages, {name: logical[index] for index, name in enumerate(LAYERS)}


def page_bytes(page: LayerPage, tensor: torch.Tensor, block: int) -> bytes:
    """A block's page by logical indexing, in the order of the page's axes."""
    ratio = page.shape[0] if page.axes.startswith("K") else 1
    part = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])
    part = part[block * ratio : (block + 1) * ratio]
    axes = page.axes if ratio > 1 else "K" + page.axes
    return part.permute(["KHNC".index(axis) for axis in axes]).contiguous().numpy().tobytes()


def payload(pages: list[LayerPage], kv: KV, blocks: list[int]) -> bytes:
    return b"".join(page_bytes(page, kv[page.layer], block) for page in pages for block in blocks)


def buffer(paged: PagedKV) -> memoryview:
    return memoryview(bytearray(paged.group_bytes))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gather_gives_pages_in_payload_order(layout, dtype):
    pages, kv = random_kv(layout, dtype)
    paged = PagedKV(pages, kv, blocks_per_chunk=4)
    out = buffer(paged)
    done = paged.gather([7, 0, 12, 3], out)
    done.wait()
    assert done.is_done()
    assert out.tobytes() == payload(pages, kv, [7, 0, 12, 3])


@pytest.mark.parametrize("layout", LAYOUTS)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_scatter_of_any_part_writes_those_blocks_and_no_other(layout, data):
    source_pages, source = random_kv(layout, seed=1)
    pages, kv = random_kv(layout, seed=2)
    count = data.draw(st.integers(1, 6), "blocks per chunk")
    chunk = data.draw(st.lists(st.integers(0, BLOCKS - 1), min_size=count, max_size=count), "chunk")
    first = data.draw(st.integers(0, count - 1), "first block")
    size = data.draw(st.integers(1, count - first), "blocks to load")
    targets = data.draw(st.permutations(range(BLOCKS)).map(lambda ids: ids[:size]), "targets")
    before = {page.layer: [page_bytes(page, kv[page.layer], b) for b in range(BLOCKS)] for page in pages}

    sender = PagedKV(source_pages, source, count)
    slot = buffer(sender)
    sender.gather(chunk, slot).wait()
    PagedKV(pages, kv, count).scatter(slot, targets, first).wait()

    loaded = dict(zip(targets, chunk[first:], strict=False))
    for page in pages:
        for block in range(BLOCKS):
            came_from = loaded.get(block)
            expected = before[page.layer][block]
            if came_from is not None:
                expected = page_bytes(page, source[page.layer], came_from)
            assert page_bytes(page, kv[page.layer], block) == expected


def test_layers_of_one_allocation_are_copied_by_one_call():
    for layout in LAYOUTS:
        pages, kv = random_kv(layout)
        assert len(PagedKV(pages, kv, 2)._copier._runs) == 1


def test_layers_with_storages_and_page_sizes_of_their_own_are_copied():
    kv = {
        "a": torch.arange(5 * 24, dtype=torch.int32).view(5, 2, 3, 4),
        "b": torch.arange(5 * 7, dtype=torch.uint8).view(5, 1, 1, 7),
        "c": torch.arange(5 * 14, dtype=torch.uint8).view(5, 1, 2, 7)[:, :, :1],
    }
    pages = [
        LayerPage("a", "F32", (2, 3, 4), "HNC"),
        LayerPage("b", "U8", (1, 1, 7), "HNC"),
        LayerPage("c", "U8", (1, 1, 7), "HNC"),
    ]
    kv["a"] = kv["a"].view(torch.float32)
    paged = PagedKV(pages, kv, 3)
    out = buffer(paged)
    paged.gather([4, 1, 2], out).wait()
    assert out.tobytes() == payload(pages, kv, [4, 1, 2])
    self_test(paged)


def test_slot_at_an_odd_address_is_copied():
    pages, kv = random_kv("LBHNC")
    paged = PagedKV(pages, kv, 2)
    memory = memoryview(bytearray(paged.group_bytes + 1))
    out = memory[1:] if np.frombuffer(memory, np.uint8).ctypes.data % 8 == 0 else memory[:-1]
    paged.gather([5, 6], out).wait()
    assert out.tobytes() == payload(pages, kv, [5, 6])
    paged.scatter(out, [8], 1).wait()
    assert page_bytes(pages[1], kv["layer.1"], 8) == page_bytes(pages[1], kv["layer.1"], 6)


def test_blocks_with_a_gap_behind_each_page_are_copied():
    wide = torch.arange(9 * 40, dtype=torch.int16).view(9, 40)
    kv = {"a": wide[:, 8:32].view(9, 2, 3, 4).view(torch.float16)}
    pages = [LayerPage("a", "F16", (2, 3, 4), "HNC")]
    paged = PagedKV(pages, kv, 2)
    out = buffer(paged)
    paged.gather([8, 3], out).wait()
    assert out.tobytes() == payload(pages, kv, [8, 3])
    before = wide.clone()
    self_test(paged)
    assert torch.equal(wide, before)


@pytest.mark.parametrize("ids", [[-1, 0], [0, BLOCKS]])
def test_block_id_outside_the_pool_is_an_error_not_another_block(ids):
    pages, kv = random_kv("LBHNC")
    paged = PagedKV(pages, kv, 2)
    with pytest.raises(ValueError, match="outside the pool"):
        paged.gather(ids, buffer(paged))
    with pytest.raises(ValueError, match="outside the pool"):
        paged.scatter(buffer(paged), ids)


def test_wrong_counts_and_sizes_are_errors():
    pages, kv = random_kv("LBHNC")
    paged = PagedKV(pages, kv, 2)
    with pytest.raises(ValueError, match="a chunk has 2 blocks"):
        paged.gather([1], buffer(paged))
    with pytest.raises(ValueError, match="another size"):
        paged.gather([1, 2], buffer(paged)[1:])
    for ids, first in (([1, 2], 1), ([], 0), ([1], -1), ([1], 2)):
        with pytest.raises(ValueError, match="blocks outside the chunk"):
            paged.scatter(buffer(paged), ids, first)


def test_page_that_is_not_dense_is_refused():
    pages, kv = random_kv("LBHNC")
    kv["layer.1"] = kv["layer.1"][:, :, :, ::2]
    pages[1] = LayerPage("layer.1", "BF16", (HEADS, TOKENS, CONTENT // 2), "HNC")
    with pytest.raises(UnsupportedModel, match=r"not one dense run.*layer\.1"):
        PagedKV(pages, kv, 2)


def test_layers_with_different_block_counts_are_refused():
    pages, kv = random_kv("LBHNC")
    kv["layer.2"] = kv["layer.2"][:-1]
    with pytest.raises(UnsupportedModel, match="block count"):
        PagedKV(pages, kv, 2)


def turns_of_another_thread(copy, repeats: int = 15) -> float:
    """How often another Python thread runs during a copy, as a median.

    With this switch interval nobody is ever asked for the GIL, so the thread runs only while it is given away.
    """
    turns, stop = [0], threading.Event()

    def take_turns() -> None:
        while not stop.is_set():
            turns[0] += 1
            time.sleep(0)  # gives the GIL back at once

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    thread = threading.Thread(target=take_turns)
    seen = []
    try:
        thread.start()
        for _ in range(repeats):
            before = turns[0]
            copy()
            seen.append(turns[0] - before)
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        thread.join()
    return statistics.median(seen)


def gil_case(tokens: int):
    pages = [LayerPage("a", "U8", (64, tokens, 1024), "HNC")]
    paged = PagedKV(pages, {"a": torch.zeros(24, 64, tokens, 1024, dtype=torch.uint8)}, 16)
    return paged, buffer(paged)


@pytest.mark.parametrize("direction", ["gather", "scatter", "partial scatter"])
def test_copies_run_without_the_gil(direction):
    """The same calls once with 1 MiB and once with 64: what runs beside them grows only if the copying lets it."""

    def turns(tokens: int) -> float:
        paged, slot = gil_case(tokens)
        copy = {
            "gather": lambda: paged.gather(range(16), slot),
            "scatter": lambda: paged.scatter(slot, range(8, 24)),
            "partial scatter": lambda: paged.scatter(slot, range(8, 20), 4),
        }
        return turns_of_another_thread(copy[direction])

    assert turns(64) > 5 * (turns(1) + 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_self_test_passes_and_leaves_every_byte_as_it_was(layout, dtype):
    pages, kv = random_kv(layout, dtype)
    before = payload(pages, kv, list(range(BLOCKS)))
    self_test(PagedKV(pages, kv, 4))
    assert payload(pages, kv, list(range(BLOCKS))) == before


@pytest.mark.parametrize(("num_blocks", "blocks_per_chunk"), [(3, 1), (3, 8), (4, 2), (7, 3), (13, 16)])
def test_self_test_works_with_small_pools(num_blocks, blocks_per_chunk):
    pages, kv = random_kv("BLNHC")
    self_test(PagedKV(pages, {name: tensor[:num_blocks] for name, tensor in kv.items()}, blocks_per_chunk))


def test_self_test_refuses_a_pool_it_could_prove_nothing_with():
    pages, kv = random_kv("LBHNC")
    with pytest.raises(UnsupportedModel, match="too small"):
        self_test(PagedKV(pages, {name: tensor[:2] for name, tensor in kv.items()}, 1))


def test_self_test_finds_axes_in_another_order_and_restores_the_bytes():
    pages, kv = random_kv("LBHNC")
    wrong = [LayerPage(p.layer, p.dtype, (TOKENS, HEADS, CONTENT), "NHC") for p in pages]
    before = payload(pages, kv, list(range(BLOCKS)))
    with pytest.raises(UnsupportedModel, match=r"gathered block.*layer=layer\.0 axes=NHC b=\d+ h=\d+ n=\d+ c=\d+"):
        self_test(PagedKV(wrong, kv, 4))
    assert payload(pages, kv, list(range(BLOCKS))) == before


def test_self_test_finds_layers_that_alias():
    pages, kv = random_kv("LBHNC")
    kv["layer.2"] = kv["layer.0"]
    with pytest.raises(UnsupportedModel, match=r"layer\.0"):
        self_test(PagedKV(pages, kv, 4))


class _SwapsBlocks(PagedKV):
    """Gathers the right pages in the wrong order."""

    def gather(self, block_ids, out, mark=None):
        return super().gather(list(block_ids)[::-1], out, mark)


class _WritesBeside(PagedKV):
    """Scatters to the blocks asked for and to one more."""

    def scatter(self, src, block_ids, first_block=0, mark=None):
        super().scatter(src, [block_ids[0] + 1], 0, mark)
        return super().scatter(src, block_ids, first_block, mark)


class _IgnoresFirstBlock(PagedKV):
    """Loads the chunk's first blocks whatever part was asked for."""

    def scatter(self, src, block_ids, first_block=0, mark=None):
        return super().scatter(src, block_ids, 0, mark)


@pytest.mark.parametrize(
    ("broken", "message"),
    [(_SwapsBlocks, "gathered block"), (_WritesBeside, "block beside"), (_IgnoresFirstBlock, "scattered block")],
)
def test_self_test_finds_a_broken_copier(broken, message):
    pages, kv = random_kv("LBNHC", "U8")
    with pytest.raises(UnsupportedModel, match=message):
        self_test(broken(pages, kv, 5))


class _StreamsOfItsOwn(PagedKV):
    """Copies as a GPU may: beside the model's stream, of which they know no more than what is before their mark."""

    def mark(self):
        return self._contents()

    def gather(self, block_ids, out, mark=None):
        """Read what was there when the mark was taken: later writes may still be under way."""
        now = self._contents()
        self._write(mark)
        try:
            return super().gather(block_ids, out)
        finally:
            self._write(now)

    def scatter(self, src, block_ids, first_block=0, mark=None):
        """Write before the model's stream does what is not before the mark."""
        now = self._contents()
        done = super().scatter(src, block_ids, first_block)
        for layer, noted, late in zip(self.layers, mark, now, strict=True):
            for block in range(self.num_blocks):
                if not np.array_equal(noted[block], late[block]):
                    layer.write_block(block, late[block])
        return done

    def _contents(self):
        return [[layer.read_block(block).copy() for block in range(self.num_blocks)] for layer in self.layers]

    def _write(self, contents):
        for layer, blocks in zip(self.layers, contents, strict=True):
            for block, bits in enumerate(blocks):
                layer.write_block(block, bits)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_self_test_marks_its_writes_before_it_copies_them(layout):
    pages, kv = random_kv(layout, "U8")
    before = payload(pages, kv, list(range(BLOCKS)))
    self_test(_StreamsOfItsOwn(pages, kv, 4))
    assert payload(pages, kv, list(range(BLOCKS))) == before
