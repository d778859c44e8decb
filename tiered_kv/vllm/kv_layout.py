"""Reads the pages of one rank from the KV tensors that vLLM registered.

Refuses tensors that cannot be stored byte for byte.

Owns the reading of specs, shapes and strides. Must not copy KV nor believe a layout's name: what the tensors' strides
say counts, and the layout self-test (``chunks.self_test``) has the last word. Called by the worker when vLLM registers
its tensors.

Order of layers: group by group as vLLM lists them, and in a group as vLLM lists its layers, which is the model's order;
the same model gives the same order on every rank, machine and start. A layer that shares the tensor of a layer of its
group is stored once, under the name that comes first. Layers of different groups may lie in one tensor, too: they never
share a block.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import lcm
from typing import Any, Final

import torch

from tiered_kv.chunks.geometry import LayerPage
from tiered_kv.errors import UnsupportedModel
from tiered_kv.vllm.kv_groups import CacheGroup, tokens_per_state
from tiered_kv.vllm.supported import check_groups

DTYPE_NAMES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
}
"""torch dtypes of KV tensors with their safetensors names; torch has more than the format can name."""


LAYOUT: Final = "LBHNC"
"""A block's page is one dense run, heads outermost in it: what vLLM's own connectors ask for."""


def required_layout(vllm_config: Any) -> str | None:
    """The layout to ask vLLM for before it lays out the KV cache, or None: its own choice.

    vLLM calls this in the engine's core, and takes its own first choice with a warning where a backend cannot have what
    is asked for (``resolve_kv_cache_layout``). Asked on accelerators: backends for ROCm prefer LHBNC, which splits
    pages and would be refused; and where they take any layout, engines on cards with different backends share a cache.

    Not asked for where nothing would come of it but another name of the layout, which is part of the namespace, or a
    warning:

    * on a CPU, whose attention has this layout only and whose MLA has one head;
    * with MLA everywhere: a page with one head is the same bytes in every layout we take, and DeepSeek V4's backends
      take block-outermost ones only;
    * with HiSparse, which is served without the cache and has to have BLHNC.
    """
    # vLLM asks before any connector is made, so before its names are checked: what is gone must not end the engine.
    device = getattr(getattr(vllm_config, "device_config", None), "device_type", "cpu")
    has_mla = getattr(getattr(vllm_config, "model_config", None), "use_mla", True)
    is_sparse = getattr(getattr(vllm_config, "attention_config", None), "hisparse_config", None) is not None
    return None if device == "cpu" or has_mla or is_sparse else LAYOUT


def rank_pages(
    kv_caches: Mapping[str, Any], kv_cache_config: Any, cache_groups: Iterable[CacheGroup]
) -> list[list[LayerPage]]:
    """Describe one rank's pages per stored KV cache group, in the order they take in the payload.

    Args:
        kv_caches: What ``register_kv_caches`` got: layer name -> tensor ``[B, H, N, C]``.
        kv_cache_config: vLLM's ``KVCacheConfig`` of this worker.
        cache_groups: What is stored of each group's blocks.

    Raises:
        UnsupportedModel: A layer of a kind that is not stored, or a tensor whose dtype, shape or layout is not one we
            can store; the message names the layer and the reason.
    """
    check_groups(kv_cache_config)
    num_blocks = int(kv_cache_config.num_blocks)
    scheduler_block = lcm(*(group.block_tokens for group in cache_groups))
    result = []
    ordered = _ordered_names(kv_caches, kv_cache_config)
    for group in cache_groups:
        if not group.stored_blocks:
            continue
        names, spec = ordered[group.number], kv_cache_config.kv_cache_groups[group.number].kv_cache_spec
        specs = getattr(spec, "kv_cache_specs", {})
        states = {name: tokens_per_state(specs.get(name, spec)) for name in names}
        pages = [_page(name, kv_caches[name], num_blocks, group.block_tokens, states[name]) for name in names]
        _check_overlaps([kv_caches[name] for name in names], names)
        if group.block_tokens != scheduler_block or group.stored_blocks != group.chunk_blocks:
            pages = [replace(page, blocks=group.stored_blocks) for page in pages]
        result.append(pages)
    return result


def state_pages(kv_caches: Mapping[str, Any], kv_cache_config: Any, states: Sequence[int]) -> list[list[LayerPage]]:
    """Describe one rank's states per group of recurrent layers: a page of bytes per layer.

    vLLM registers one tensor ``[B, 1, 1, content]`` of int8 per layer: convolution and recurrent state of a block one
    behind the other, whatever their shapes and dtypes, and a gap up to the next block.

    Args:
        states: Places of these groups among vLLM's.

    Raises:
        UnsupportedModel: A tensor that is not of this kind.
    """
    result = []
    ordered = _ordered_names(kv_caches, kv_cache_config)
    for number in states:
        spec = kv_cache_config.kv_cache_groups[number].kv_cache_spec
        for name in ordered[number]:
            tensor, content = kv_caches[name], int(spec.state_content_size_bytes)
            if tensor.dtype != torch.int8 or tuple(tensor.shape[1:]) != (1, 1, content):
                raise UnsupportedModel(
                    f"a recurrent layer's state is not [blocks, 1, 1, {content}] of int8. layer={name} "
                    f"dtype={tensor.dtype} shape={tuple(tensor.shape)}"
                )
        num_blocks = int(kv_cache_config.num_blocks)
        result.append([_page(name, kv_caches[name], num_blocks, 1, 1) for name in ordered[number]])
        _check_overlaps([kv_caches[name] for name in ordered[number]], ordered[number])
    return result


def _ordered_names(kv_caches: Mapping[str, Any], kv_cache_config: Any) -> list[list[str]]:
    """Layers in their group's order, each tensor once; layers that only share a tensor may be missing in the groups."""
    groups = [list(group.layer_names) for group in kv_cache_config.kv_cache_groups]
    listed = {name for names in groups for name in names}
    if missing := [name for name in sorted(listed) if name not in kv_caches]:
        raise UnsupportedModel(f"vLLM registered no KV tensor for a layer of the group. layers={missing[:3]}")
    for name, tensor in kv_caches.items():
        if not isinstance(tensor, torch.Tensor):
            raise UnsupportedModel(f"layer has no single KV tensor. layer={name} observed={type(tensor).__name__}")
    places = {name: _place(tensor) for name, tensor in kv_caches.items()}
    shared = {places[name] for name in listed}
    for name in sorted(kv_caches.keys() - listed):
        if places[name] not in shared:
            raise UnsupportedModel(f"KV tensor belongs to no KV cache group and shares no layer's tensor. layer={name}")
    return [_first_of_each(names, places) for names in groups]


def _first_of_each(names: Sequence[str], places: Mapping[str, tuple[Any, ...]]) -> list[str]:
    first: dict[tuple[Any, ...], str] = {}
    for name in names:
        first.setdefault(places[name], name)
    return list(first.values())


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _page(name: str, tensor: torch.Tensor, num_blocks: int, block_tokens: int, state_tokens: int) -> LayerPage:
    what = f"layer={name} shape={tuple(tensor.shape)} strides={tensor.stride()} blocks={num_blocks}"
    if tensor.dtype not in DTYPE_NAMES:
        raise UnsupportedModel(f"KV dtype is not supported. dtype={tensor.dtype} {what}")
    if tensor.dim() != 4 or num_blocks <= 0 or tensor.shape[0] == 0 or tensor.shape[0] % num_blocks:
        raise UnsupportedModel(f"KV tensor is not [blocks, heads, tokens, content]. {what}")
    # vLLM splits its blocks where the attention kernel wants smaller ones: so many of the tensor's make one of vLLM's.
    ratio = tensor.shape[0] // num_blocks
    tokens = ratio * tensor.shape[2] * state_tokens
    if tokens == 0 or block_tokens % tokens:
        raise UnsupportedModel(f"tokens per block do not divide vLLM's block size. block_tokens={block_tokens} {what}")
    axes = _memory_order(tensor, what)
    page = ratio * tensor[0].numel()
    if ratio > 1:
        axes.insert(0, ("K", ratio))
        if tensor.stride(0) * ratio != page:
            raise UnsupportedModel(f"kernel blocks of one block do not follow each other. kernel_blocks={ratio} {what}")
    if tensor.stride(0) * ratio < page:
        raise UnsupportedModel(f"blocks overlap. {what}")
    return LayerPage(
        layer=name,
        dtype=DTYPE_NAMES[tensor.dtype],
        shape=tuple(extent for _, extent in axes),
        axes="".join(axis for axis, _ in axes),
        tokens_per_state=state_tokens,
    )


def _memory_order(tensor: torch.Tensor, what: str) -> list[tuple[str, int]]:
    """Sort a kernel block's axes as they lie in memory, outermost first.

    The stride of an axis with one element says nothing: such axes come first, so that equal bytes get equal names.
    """
    axes = list(zip("HNC", tensor.shape[1:], tensor.stride()[1:], strict=True))
    axes.sort(key=lambda axis: (axis[1] > 1, -axis[2] if axis[1] > 1 else 0))
    dense = 1
    for axis, extent, stride in reversed(axes):
        if extent > 1 and stride != dense:
            raise UnsupportedModel(
                "a block's page is not one dense run of bytes (in vLLM's layouts LBHNC, LBNHC, BLHNC and BLNHC it is). "
                f"axis={axis} expected_stride={dense} {what}"
            )
        dense *= extent
    return [(axis, extent) for axis, extent, _ in axes]


def _check_overlaps(tensors: Sequence[torch.Tensor], names: Sequence[str]) -> None:
    """Refuse two layers at the same address; finer overlaps are what the layout self-test is for."""
    seen: dict[int, str] = {}
    for name, tensor in zip(names, tensors, strict=True):
        if (other := seen.setdefault(tensor.data_ptr(), name)) != name:
            raise UnsupportedModel(f"two layers lie at one address with different shapes. layers={other},{name}")
