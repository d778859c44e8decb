"""From vLLM's registered KV tensors to the pages of one rank; refuses what cannot be stored byte for byte.

Owns the reading of specs, shapes and strides. Must not copy KV nor believe a layout's name: what the tensors' strides
say counts, and the layout self-test (``chunks.self_test``) has the last word. Called by the worker when vLLM registers
its tensors.

Order of layers: group by group as vLLM lists them, and in a group as vLLM lists its layers, which is the model's order;
the same model gives the same order on every rank, machine and start. A layer that shares the tensor of a layer of its
group is stored once, under the name that comes first. Layers of different groups may lie in one tensor, too: they never
share a block.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import lcm
from typing import Any, Final

import torch

from tiered_kv.chunks.geometry import LayerPage
from tiered_kv.errors import UnsupportedModel
from tiered_kv.vllm.groups import CacheGroup, window_tokens

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

SUPPORTED_SPECS: Final = frozenset({"FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec"})
"""Exact class names: a subclass means other rules about which tokens a block holds (sinks, hidden states)."""

GROUP_SPEC: Final = "UniformTypeKVCacheSpecs"
"""vLLM's spec of a group whose layers differ in page size; holds one spec per layer."""

REASONS: Final = {
    "MambaSpec": "the state of Mamba and linear-attention layers is not addressed by token",
    "CrossAttentionSpec": "cross-attention KV belongs to the encoder's input, not to the prompt's tokens",
    "EncoderOnlyAttentionSpec": "encoder layers keep no KV",
    "SlidingWindowMLASpec": "its blocks hold compressed states that are replayed, not one per token",
    "ChunkedLocalAttentionSpec": "blocks outside the attention chunk are freed; start vLLM with "
    "--disable-hybrid-kv-cache-manager",
    "SinkFullAttentionSpec": "its first blocks hold attention sinks instead of prompt tokens",
}


def rank_pages(
    kv_caches: Mapping[str, Any], kv_cache_config: Any, cache_groups: Sequence[CacheGroup]
) -> list[list[LayerPage]]:
    """Describe one rank's pages per KV cache group, in the order they take in the payload.

    Args:
        kv_caches: What ``register_kv_caches`` got: layer name -> tensor ``[B, H, N, C]``.
        kv_cache_config: vLLM's ``KVCacheConfig`` of this worker.
        cache_groups: What is stored of each group's blocks.

    Raises:
        UnsupportedModel: A layer that is neither attention over all tokens or a window of them nor MLA, or a tensor
            whose dtype, shape or layout is not one we can store; the message names the layer and the reason.
    """
    check_groups(kv_cache_config)
    num_blocks = int(kv_cache_config.num_blocks)
    scheduler_block = lcm(*(group.block_tokens for group in cache_groups))
    result = []
    for names, group in zip(_ordered_names(kv_caches, kv_cache_config), cache_groups, strict=True):
        pages = [_page(name, kv_caches[name], num_blocks, group.block_tokens) for name in names]
        _check_overlaps([kv_caches[name] for name in names], names)
        if group.block_tokens != scheduler_block or group.stored_blocks != group.chunk_blocks:
            pages = [replace(page, blocks=group.stored_blocks) for page in pages]
        result.append(pages)
    return result


def check_groups(kv_cache_config: Any) -> None:
    """Refuse a model by its KV cache specs alone; both roles can do that before any tensor exists.

    Raises:
        UnsupportedModel: As for ``rank_pages``.
    """
    groups = kv_cache_config.kv_cache_groups
    for group in groups:
        for spec in _layer_specs(group.kv_cache_spec):
            _check_spec(spec, group.layer_names)
        if len(windows := {window_tokens(spec) for spec in _layer_specs(group.kv_cache_spec)}) > 1:
            raise UnsupportedModel(f"layers of one KV cache group have different windows. windows={windows}")
        if getattr(group, "host_resident", False) or not getattr(group, "enable_kv_transfer", True):
            raise UnsupportedModel(
                f"vLLM marks this KV cache group as not transferable. layers={group.layer_names[:2]}"
            )
    if not groups:
        raise UnsupportedModel("the model has no KV cache")


def _layer_specs(spec: Any) -> Iterator[Any]:
    if type(spec).__name__ == GROUP_SPEC:
        yield from spec.kv_cache_specs.values()
    else:
        yield spec


def _check_spec(spec: Any, layer_names: Sequence[str]) -> None:
    kind = type(spec).__name__
    where = f"spec={kind} first_layer={layer_names[0] if layer_names else None}"
    if kind not in SUPPORTED_SPECS:
        reason = REASONS.get(kind, "only full attention, sliding windows and MLA are supported")
        raise UnsupportedModel(f"KV cache of this kind cannot be stored: {reason}. {where}")
    if getattr(spec, "non_causal", False) or getattr(spec, "non_causal_multi_token_decode", False):
        raise UnsupportedModel(f"attention is not causal, so a prefix's KV depends on what follows it. {where}")
    if getattr(spec, "tokens_per_state", 1) != 1:
        raise UnsupportedModel(f"KV that is not one state per token is not supported yet. {where}")


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


def _page(name: str, tensor: torch.Tensor, num_blocks: int, block_tokens: int) -> LayerPage:
    what = f"layer={name} shape={tuple(tensor.shape)} strides={tensor.stride()} blocks={num_blocks}"
    if tensor.dtype not in DTYPE_NAMES:
        raise UnsupportedModel(f"KV dtype is not supported. dtype={tensor.dtype} {what}")
    if tensor.dim() != 4 or num_blocks <= 0 or tensor.shape[0] == 0 or tensor.shape[0] % num_blocks:
        raise UnsupportedModel(f"KV tensor is not [blocks, heads, tokens, content]. {what}")
    # vLLM splits its blocks where the attention kernel wants smaller ones: so many of the tensor's make one of vLLM's.
    ratio = tensor.shape[0] // num_blocks
    tokens = ratio * tensor.shape[2]
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
