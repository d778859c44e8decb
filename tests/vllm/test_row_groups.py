"""Which bytes of a row are a group's, by vLLM's own specs, against what vLLM's worker would write."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
)

from tiered_kv.errors import UnsupportedModel
from tiered_kv.vllm.row_groups import RowGroup, of_all_ranks, on_rank, row_groups

pytestmark = pytest.mark.vllm

BLOCKS = 8
SIZES = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(**SIZES)
PAGE = FULL.page_size_bytes
WINDOW = SlidingWindowSpec(**SIZES, sliding_window=40)
STATE = MambaSpec(
    block_size=16, shapes=((3, 20), (2, 30)), dtypes=(torch.bfloat16, torch.float32), page_size_padded=PAGE,
    mamba_cache_mode="align",
)  # fmt: skip
STATE_BYTES = 3 * 20 * 2 + 2 * 30 * 4


def config(*groups: tuple[Any, int], stride: int = PAGE) -> KVCacheConfig:
    """Groups of so many layers each, which lie over each other as vLLM lays them."""
    specs, tensors, region = [], [], BLOCKS * stride
    most = max(count for _, count in groups)
    for number, (spec, count) in enumerate(groups):
        layers = [f"group {number} layer {at}" for at in range(count)]
        specs.append(KVCacheGroupSpec(layers, spec))
        tensors.append(KVCacheTensor(most * region, layers, region, stride))
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=tensors, kv_cache_groups=specs)


def offloading(kv_cache_config: KVCacheConfig, blocks: int = 1, **more: Any) -> Any:
    groups = [
        SimpleNamespace(group_id=number, tokens_per_block=group.kv_cache_spec.block_size)
        for number, group in enumerate(kv_cache_config.kv_cache_groups)
    ]
    size = kv_cache_config.kv_cache_tensors[0].size // BLOCKS
    cache, parallel = SimpleNamespace(blocks_per_chunk=blocks), SimpleNamespace(world_size=more.get("ranks", 1))
    return SimpleNamespace(
        groups=groups, cache=cache, parallel=parallel, replicated_layout=False, worker_kv_bytes_per_block=size
    )


def test_a_row_of_one_group_of_full_attention_is_all_its_own() -> None:
    one = config((FULL, 3))
    assert row_groups(offloading(one, 4), one) == (RowGroup(0, 64),)


def test_each_group_has_the_unpadded_pages_of_its_layers() -> None:
    """Two layers that attend, a window of one, a state of two: tensor 0 is every group's, tensor 1 is of two."""
    kv = config((FULL, 2), (WINDOW, 1), (STATE, 2))
    full, window, state = row_groups(offloading(kv), kv)
    assert full == RowGroup(0, 16, None, ((0, 2 * PAGE),))
    assert window == RowGroup(1, 16, 3, ((0, PAGE),))
    assert state == RowGroup(2, 16, 1, ((0, STATE_BYTES), (PAGE, STATE_BYTES)))


def test_groups_that_forget_nothing_may_have_rows_of_several_blocks() -> None:
    kv = config((FULL, 2), (FULL, 1))
    first, second = row_groups(offloading(kv, 2), kv)
    assert first.spans == ((0, 4 * PAGE),)
    assert second.spans == ((0, 2 * PAGE),)  # both blocks of tensor 0


def test_each_rank_has_its_part_of_the_row() -> None:
    kv = config((WINDOW, 2), (STATE, 1))
    one = row_groups(offloading(kv), kv)
    window, state = of_all_ranks(on_rank(one, rank, 2 * PAGE) for rank in range(2))
    assert window.spans == ((0, 4 * PAGE),)
    assert state.spans == ((0, STATE_BYTES), (2 * PAGE, STATE_BYTES))
    assert of_all_ranks([one, one]) == one, "ranks with equal KV"


def test_attention_in_chunks_needs_the_rows_of_one() -> None:
    kv = config((FULL, 1), (ChunkedLocalAttentionSpec(**SIZES, attention_chunk_size=40), 1))
    assert row_groups(offloading(kv), kv)[1].window_rows == 3


@pytest.mark.parametrize(
    ("groups", "given", "told"),
    [
        (((FULL, 1), (STATE, 1)), {"blocks": 2}, "blocks_per_chunk=2"),
        (((WINDOW, 1),), {"blocks": 2}, "Leave out block_size"),
    ],
)
def test_what_would_be_stored_in_part_is_refused_by_name(groups: Any, given: dict[str, Any], told: str) -> None:
    kv = config(*groups)
    with pytest.raises(UnsupportedModel, match=told):
        row_groups(offloading(kv, **given), kv)


def packed(*groups: tuple[Any, int], layer_stride: int = 0, padding: int = 0) -> KVCacheConfig:
    """Groups as vLLM lays them where blocks are outermost: a block has the pages of a group's layers side by side."""
    stride = max(count * spec.page_size_bytes for spec, count in groups) + padding
    specs, tensors = [], []
    for number, (spec, count) in enumerate(groups):
        layers = [f"group {number} layer {at}" for at in range(count)]
        specs.append(KVCacheGroupSpec(layers, spec))
        tensors.append(KVCacheTensor(BLOCKS * stride, layers, layer_stride or spec.page_size_bytes, stride))
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=tensors, kv_cache_groups=specs)


def test_of_blocks_that_vllm_moves_as_one_each_group_has_its_layers_pages() -> None:
    kv = packed((FULL, 3), (FULL, 1), (WINDOW, 2), padding=24)
    full, one, window = row_groups(offloading(kv), kv)
    assert (full.spans, one.spans, window.spans) == (((0, 3 * PAGE),), ((0, PAGE),), ((0, 2 * PAGE),))
    kv = packed((FULL, 3), (FULL, 1), padding=24)
    stride = 3 * PAGE + 24
    assert row_groups(offloading(kv, 2), kv)[1].spans == ((0, PAGE), (stride, PAGE))


@pytest.mark.parametrize(
    ("kv", "told"),
    [
        (config((FULL, 2), (FULL, 1), stride=PAGE + 64), "blocks are not outermost"),
        (config((FULL, 2), stride=PAGE + 64), "blocks are not outermost"),
        (packed((FULL, 2), (FULL, 1), layer_stride=PAGE // 2), "heads lie apart"),
    ],
    ids=["padded, several groups", "padded, one group", "heads apart"],
)
def test_layouts_of_which_vllm_moves_too_little_or_pages_in_pieces_are_refused(kv: KVCacheConfig, told: str) -> None:
    with pytest.raises(UnsupportedModel, match=told):
        row_groups(offloading(kv), kv)


def test_canonical_pages_of_all_ranks_lie_in_cells_as_large_as_the_tensors_largest() -> None:
    """Two ranks: pages of attention are put together of both, states lie one after the other."""
    kv = config((FULL, 2), (STATE, 1))
    pages = {"group 0 layer 0": 2 * PAGE, "group 0 layer 1": 2 * PAGE, "group 1 layer 0": 2 * STATE_BYTES}
    full, state = row_groups(offloading(kv, ranks=2), kv, pages)
    assert (full.spans, state.spans) == (((0, 4 * PAGE),), ((0, 2 * STATE_BYTES),))
    with pytest.raises(UnsupportedModel, match="do not fit"):
        row_groups(offloading(kv), kv, pages)
    with pytest.raises(UnsupportedModel, match="no canonical page"):
        row_groups(offloading(kv, ranks=2), kv, {})


def test_one_group_with_canonical_pages_stores_them_without_the_rows_padding() -> None:
    """MLA of two ranks: a row has room for both their copies, and is filled once."""
    kv = config((FULL, 3))
    (group,) = row_groups(offloading(kv, 2, ranks=2), kv, {f"group 0 layer {at}": PAGE for at in range(3)})
    assert group == RowGroup(0, 32, None, ((0, 6 * PAGE),))
