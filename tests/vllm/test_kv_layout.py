"""Pages read from tensors made by vLLM's own view function, for its layouts and for what we refuse."""

from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from tiered_kv.chunks.layout_test import self_test
from tiered_kv.chunks.transfer import PagedKV, RankKV
from tiered_kv.errors import ConfigError, UnsupportedModel
from tiered_kv.vllm.kv_groups import CacheGroups
from tiered_kv.vllm.kv_layout import rank_pages
from tiered_kv.vllm.supported import check_groups

BLOCKS, BLOCK_TOKENS = 9, 32
NAMES = ["model.layers.0.attn", "model.layers.1.attn", "model.layers.10.attn"]


def full(**changes):
    return FullAttentionSpec(
        **{"block_size": BLOCK_TOKENS, "num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16} | changes
    )


def mla(**changes):
    return MLAAttentionSpec(
        **{"block_size": BLOCK_TOKENS, "num_kv_heads": 1, "head_size": 24, "dtype": torch.bfloat16} | changes
    )


def group_config(*groups, blocks=BLOCKS):
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=list(groups))


def pages_of(kv, config, block_tokens):
    """Pages of a model's only group; ``block_tokens`` is more than a rank's with decode context parallelism."""
    check_groups(config)
    dcp = block_tokens // BLOCK_TOKENS
    (pages,) = rank_pages(kv, config, CacheGroups.of(config, 4 * block_tokens, dcp))
    return pages


def registered(spec, layout, kernel_block=None, names=NAMES):
    """KV tensors as vLLM allocates and views them, with their config."""
    strides = compute_layout_strides(spec, BLOCKS, len(names), KVCacheLayout[layout])
    size = len(names) * BLOCKS * spec.page_size_bytes
    placement = KVCacheTensor(size, list(names), layer_stride=strides[0], block_stride=strides[1])
    raw = torch.zeros(placement.size, dtype=torch.int8)
    views = create_kv_cache_views(raw, spec, BLOCKS, KVCacheLayout[layout], placement, kernel_block)
    kv = {
        name: view.view(spec.dtype) if view.dtype == torch.int8 else view
        for name, view in zip(names, views, strict=True)
    }
    return kv, group_config(KVCacheGroupSpec(list(names), spec))


@pytest.mark.parametrize(("layout", "axes"), [("LBHNC", "HNC"), ("LBNHC", "NHC"), ("BLHNC", "HNC"), ("BLNHC", "NHC")])
def test_vllms_dense_layouts_are_described_and_proven_by_the_self_test(layout, axes):
    kv, config = registered(full(), layout)
    pages = pages_of(kv, config, BLOCK_TOKENS)
    extents = {"H": 2, "N": BLOCK_TOKENS, "C": 16}
    assert [page.layer for page in pages] == NAMES
    assert all(page.axes == axes and page.dtype == "BF16" for page in pages)
    assert pages[0].shape == tuple(extents[axis] for axis in axes)
    assert pages[0].page_bytes == full().page_size_bytes
    self_test(PagedKV(pages, kv, 4))


@pytest.mark.parametrize("layout", ["LHBNC", "BHLNC"])
def test_layouts_that_split_a_page_are_refused(layout):
    kv, config = registered(full(), layout)
    with pytest.raises(UnsupportedModel, match=r"not one dense run.*model\.layers\.0"):
        pages_of(kv, config, BLOCK_TOKENS)


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
def test_kernel_blocks_smaller_than_vllms_blocks_are_parts_of_the_page(layout):
    kv, config = registered(full(), layout, kernel_block=8)
    assert kv[NAMES[0]].shape[0] == 4 * BLOCKS
    pages = pages_of(kv, config, BLOCK_TOKENS)
    assert pages[0].axes == "K" + layout[2:] and pages[0].shape[0] == 4
    assert pages[0].page_bytes == full().page_size_bytes
    self_test(PagedKV(pages, kv, 4))


@pytest.mark.parametrize("kernel_block", [None, 16])
def test_mla_pages_have_equal_names_in_both_layouts(kernel_block):
    pages = {}
    for layout in ("LBHNC", "LBNHC"):
        kv, config = registered(mla(), layout, kernel_block)
        pages[layout] = pages_of(kv, config, BLOCK_TOKENS)
        self_test(PagedKV(pages[layout], kv, 2))
    assert pages["LBHNC"] == pages["LBNHC"]


def test_geometry_does_not_depend_on_the_number_of_blocks_or_on_packing():
    few, config = registered(full(), "LBHNC")
    packed, packed_config = registered(full(), "BLHNC")
    many = {name: torch.zeros(50, 2, BLOCK_TOKENS, 16, dtype=torch.bfloat16) for name in NAMES}
    more = group_config(KVCacheGroupSpec(NAMES, full()), blocks=50)
    assert (
        pages_of(few, config, BLOCK_TOKENS)
        == pages_of(many, more, BLOCK_TOKENS)
        == pages_of(packed, packed_config, BLOCK_TOKENS)
    )


def test_order_is_the_groups_and_not_that_of_registration():
    kv, config = registered(full(), "LBHNC")
    backwards = dict(reversed(kv.items()))
    assert [page.layer for page in pages_of(backwards, config, BLOCK_TOKENS)] == NAMES


@pytest.mark.parametrize("in_group", [True, False])
def test_layer_that_shares_a_tensor_is_stored_once(in_group):
    kv, config = registered(full(), "LBNHC")
    kv["model.layers.11.attn"] = kv[NAMES[1]]
    if in_group:
        config.kv_cache_groups[0].layer_names.append("model.layers.11.attn")
    assert [page.layer for page in pages_of(kv, config, BLOCK_TOKENS)] == NAMES


def test_layers_with_different_pages_in_one_group_are_described_each():
    specs = {NAMES[0]: mla(), NAMES[1]: mla(head_size=16, dtype=torch.uint8)}
    kv = {
        NAMES[0]: torch.zeros(BLOCKS, 1, BLOCK_TOKENS, 24, dtype=torch.bfloat16),
        NAMES[1]: torch.zeros(BLOCKS, 1, BLOCK_TOKENS, 16, dtype=torch.uint8),
    }
    group = KVCacheGroupSpec(list(specs), UniformTypeKVCacheSpecs(block_size=BLOCK_TOKENS, kv_cache_specs=specs))
    pages = pages_of(kv, group_config(group), BLOCK_TOKENS)
    assert [(page.dtype, page.shape) for page in pages] == [("BF16", (1, 32, 24)), ("U8", (1, 32, 16))]
    self_test(PagedKV(pages, kv, 3))


def test_block_of_a_decode_context_group_spans_several_ranks_pages():
    kv, config = registered(full(), "LBHNC")
    assert pages_of(kv, config, 2 * BLOCK_TOKENS) == pages_of(kv, config, BLOCK_TOKENS)


REFUSED_SPECS = {
    "mamba_cache_mode=none": MambaSpec(block_size=BLOCK_TOKENS, shapes=((2, 2),), dtypes=(torch.float32,)),
    "encoder's input": CrossAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=8, dtype=torch.bfloat16),
    "sinks": SinkFullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=8, dtype=torch.bfloat16, sink_len=BLOCK_TOKENS
    ),
    "not causal": full(non_causal=True),
    "tokens_per_state=5 block_size=32": mla(tokens_per_state=5),
    "tokens_per_state=1/2": full(tokens_per_state=Fraction(1, 2)),
    "tokens_per_state=2": full(tokens_per_state=2),
    "tokens_per_state=4": SlidingWindowMLASpec(
        block_size=BLOCK_TOKENS,
        num_kv_heads=1,
        head_size=24,
        dtype=torch.bfloat16,
        sliding_window=64,
        tokens_per_state=4,
    ),
    "HiddenStateCacheSpec": HiddenStateCacheSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=24, dtype=torch.bfloat16
    ),
}


@pytest.mark.parametrize("reason", REFUSED_SPECS)
def test_specs_without_a_page_of_tokens_are_refused_with_the_reason(reason):
    kv, _ = registered(full(), "LBHNC")
    with pytest.raises(UnsupportedModel, match=rf"{reason}.*first_layer=model\.layers\.0"):
        pages_of(kv, group_config(KVCacheGroupSpec(NAMES, REFUSED_SPECS[reason])), BLOCK_TOKENS)


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
@pytest.mark.parametrize("changes", [{}, {"head_size": 132, "dtype": torch.uint8, "alignment": 576}])
def test_compressed_pages_are_opaque_and_say_their_tokens_per_state(layout, changes):
    spec = mla(tokens_per_state=4, **changes)
    kv, config = registered(spec, layout)
    pages = pages_of(kv, config, BLOCK_TOKENS)
    assert {(page.tokens_per_state, page.shape) for page in pages} == {(4, (1, BLOCK_TOKENS // 4, spec.head_size))}
    assert pages[0].page_bytes == spec.unpadded_page_size_bytes <= spec.page_size_bytes
    self_test(PagedKV(pages, kv, 4))


def test_page_with_another_compression_than_its_spec_says_is_refused():
    kv, _ = registered(mla(), "LBHNC")
    with pytest.raises(UnsupportedModel, match="do not divide"):
        pages_of(kv, group_config(KVCacheGroupSpec(NAMES, mla(tokens_per_state=4))), BLOCK_TOKENS)


def test_ring_has_no_pages_and_its_tensors_are_not_looked_at():
    kv, config = registered(full(), "LBHNC")
    ring = CircularBufferSpec(block_size=8, num_kv_heads=1, head_size=24, head_size_v=0, dtype=torch.bfloat16)
    config.kv_cache_groups.append(KVCacheGroupSpec(["ring"], ring))
    groups = CacheGroups.of(config, 4 * BLOCK_TOKENS)
    (pages,) = rank_pages(kv | {"ring": torch.zeros(3, dtype=torch.int32)}, config, groups)
    assert [page.layer for page in pages] == NAMES


def window(tokens, **changes):
    fields = {"block_size": BLOCK_TOKENS, "num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16}
    return SlidingWindowSpec(**fields | {"sliding_window": tokens} | changes)


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
def test_groups_that_lie_in_one_memory_have_pages_of_their_own(layout):
    """vLLM lays the groups' layers over each other: a block belongs to one group at a time."""
    kv, _ = registered(full(), layout)
    others = [f"{name}.windowed" for name in NAMES]
    kv |= dict(zip(others, kv.values(), strict=True))
    config = group_config(KVCacheGroupSpec(list(NAMES), full()), KVCacheGroupSpec(others, window(40)))
    groups = CacheGroups.of(config, 4 * BLOCK_TOKENS)

    pages = rank_pages(kv, config, groups)

    assert [[page.layer for page in of_group] for of_group in pages] == [NAMES, others]
    assert {page.blocks for page in pages[0]} == {0}, "all of a chunk: as without a second group"
    assert {page.blocks for page in pages[1]} == {2}
    ranks = RankKV(pages, kv, [group.stored_blocks for group in groups])
    assert ranks.rank_bytes == len(NAMES) * full().page_size_bytes * (4 + 2)
    for of_group in ranks.groups:
        self_test(of_group)


@pytest.mark.parametrize(("name", "value"), [("host_resident", True), ("enable_kv_transfer", False)])
def test_a_group_that_vllm_does_not_let_go_is_refused(name, value):
    group = SimpleNamespace(layer_names=NAMES[:1], kv_cache_spec=window(64), **{name: value})
    with pytest.raises(UnsupportedModel, match="not transferable"):
        check_groups(SimpleNamespace(kv_cache_groups=[group]))


def test_layers_of_one_group_with_different_windows_are_refused():
    specs = {NAMES[0]: window(64), NAMES[1]: window(96)}
    config = group_config(KVCacheGroupSpec(NAMES[:2], UniformTypeKVCacheSpecs(BLOCK_TOKENS, specs)))
    with pytest.raises(UnsupportedModel, match="different windows"):
        check_groups(config)


def test_chunks_must_hold_whole_blocks_of_every_group():
    config = group_config(KVCacheGroupSpec(NAMES[:1], full()), KVCacheGroupSpec(NAMES[1:], window(64, block_size=96)))
    with pytest.raises(ConfigError, match=r"block_sizes=\[32, 96\] nearest=288"):
        CacheGroups.of(config, 256)
    assert [g.stored_blocks for g in CacheGroups.of(config, 288)] == [9, 1]
    assert CacheGroups.of(config, 288).block_tokens == 96


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(BLOCKS, 2, BLOCK_TOKENS, 16, dtype=torch.int32), "dtype"),
        (torch.zeros(BLOCKS, 2, BLOCK_TOKENS, dtype=torch.bfloat16), "not \\[blocks"),
        (torch.zeros(BLOCKS + 1, 2, BLOCK_TOKENS, 16, dtype=torch.bfloat16), "not \\[blocks"),
        (torch.zeros(BLOCKS, 2, 24, 16, dtype=torch.bfloat16), "do not divide"),
        (torch.zeros(BLOCKS, 2, BLOCK_TOKENS, 32, dtype=torch.bfloat16)[..., ::2], "not one dense run"),
        (torch.zeros(1, 2, BLOCK_TOKENS, 16, dtype=torch.bfloat16).expand(BLOCKS, -1, -1, -1), "overlap"),
        (torch.zeros(2 * BLOCKS, 2, 16, 17, dtype=torch.bfloat16)[..., :16], "not one dense run"),
        (torch.zeros(2 * BLOCKS, 3, 16, 16, dtype=torch.bfloat16)[:, :2], "do not follow each other"),
        ([torch.zeros(1)], "no single KV tensor"),
    ],
)
def test_tensors_that_are_no_pages_are_refused(tensor, message):
    kv, config = registered(full(), "LBHNC")
    with pytest.raises(UnsupportedModel, match=rf"(?s){message}.*"):
        pages_of(kv | {NAMES[1]: tensor}, config, BLOCK_TOKENS)


def test_layers_without_tensor_or_group_are_refused():
    kv, config = registered(full(), "LBHNC")
    with pytest.raises(UnsupportedModel, match="no KV tensor for a layer"):
        pages_of({name: kv[name] for name in NAMES[:2]}, config, BLOCK_TOKENS)
    with pytest.raises(UnsupportedModel, match="no KV cache group"):
        pages_of(kv | {"draft.layers.0": kv[NAMES[0]].clone()}, config, BLOCK_TOKENS)
    kv[NAMES[2]] = kv[NAMES[0]][:, :1]
    with pytest.raises(UnsupportedModel, match="one address"):
        pages_of(kv, config, BLOCK_TOKENS)
