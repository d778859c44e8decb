"""KV caches as vLLM's attention backends lay them out, made by the backends' and vLLM's own code, without a GPU.

A case names a model's layers by their backend and spec. The backend says what its pages hold (``customize_spec``) and
which layouts it takes; vLLM resolves one together with what our connector asks for, plans the allocation and views it.
What comes out is what ``register_kv_caches`` gets on an accelerator, in this machine's memory.

Owns no expectation: where a page lies is read from vLLM's placement (``Cache.pages``), not from a view's strides.
"""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import CacheConfig, KVTransferConfig
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    compute_layer_kv_cache_shape_bytes,
)
from vllm.v1.worker.utils import allocate_kv_cache

try:  # from 0.33 on
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups
except ImportError:
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups

BLOCKS: Final = 11
BACKENDS: Final = "vllm.v1.attention.backends"


@dataclass(frozen=True)
class Layers:
    """Layers of one kind: so many of a backend with a spec."""

    backend: str
    spec: Any
    count: int = 3

    @property
    def backend_class(self) -> Any:
        """The backend; None: FlashInfer's, whose module needs the flashinfer package and changes no spec."""
        if not self.backend:
            return None
        module, _, name = self.backend.partition(":")
        return getattr(importlib.import_module(f"{BACKENDS}.{module}"), name)

    @property
    def layout_spec(self) -> Any:
        """The spec with what the backend makes of it."""
        return self.spec if self.backend_class is None else self.backend_class.customize_spec(self.spec)


@dataclass(frozen=True)
class Case:
    """A model's layers on one machine.

    Attributes:
        groups: Per KV cache group its kinds of layers; several kinds share the group's blocks.
        layout: What vLLM has to resolve.
        kernel_tokens: Of a group's kernel blocks, where they are smaller than vLLM's blocks.
        takes: Layouts of a backend that cannot be imported here.
        user_layout: ``VLLM_KV_CACHE_LAYOUT``.
    """

    groups: Sequence[Sequence[Layers]]
    layout: str
    kernel_tokens: int | None = None
    takes: tuple[str, ...] = ()
    user_layout: str | None = None
    has_mla: bool = False

    @property
    def kinds(self) -> list[Layers]:
        return [kind for group in self.groups for kind in group]

    @property
    def specs(self) -> list[list[tuple[str, Any]]]:
        """Per group its layers by name, with their specs; layers of several kinds take turns, as in a model."""
        named = []
        for number, kinds in enumerate(self.groups):
            turns = range(max(kind.count for kind in kinds))
            named.append(
                [
                    (f"model.layers.{turn}.group{number}.kind{place}", kind.layout_spec)
                    for turn in turns
                    for place, kind in enumerate(kinds)
                    if turn < kind.count
                ]
            )
        return named


@dataclass(frozen=True)
class Cache:
    """What a worker registers, and where vLLM put each page.

    Attributes:
        raw: The whole allocation.
        places: Layer -> offset, distance of blocks and bytes of a page, as vLLM placed them.
    """

    kv: Mapping[str, torch.Tensor]
    config: Any
    raw: npt.NDArray[np.uint8]
    places: Mapping[str, tuple[int, int, int]] = field(repr=False)

    def page(self, layer: str, block: int) -> slice:
        """Where a block's page of a layer lies in ``raw``."""
        offset, stride, size = self.places[layer]
        return slice(offset + block * stride, offset + block * stride + size)

    def pages(self, layers: Sequence[str], blocks: Sequence[int]) -> Iterator[slice]:
        """In the payload's order: layer by layer, and in a layer block by block."""
        return (self.page(layer, block) for layer in layers for block in blocks)


def vllm_config(case: Case, device: str = "cuda") -> Any:
    """As much of vLLM's configuration as its layout code reads."""
    transfer = KVTransferConfig(
        kv_connector="TieredKVConnector", kv_connector_module_path="tiered_kv.vllm", kv_role="kv_both"
    )
    return SimpleNamespace(
        cache_config=CacheConfig(),
        kv_transfer_config=transfer,
        attention_config=SimpleNamespace(hisparse_config=None),
        device_config=SimpleNamespace(device_type=device),
        model_config=SimpleNamespace(use_mla=case.has_mla),
    )


def resolved(case: Case, config: Any) -> Any:
    """The layout that vLLM takes: of those that every backend takes what our connector asks for, or the first."""
    backends = [kind.backend_class for kind in case.kinds if kind.backend_class is not None]
    taken = list(case.takes) or [layout.name for layout in get_supported_kv_cache_layouts(backends)]
    return resolve_kv_cache_layout(config, [taken], [spec for group in case.specs for _, spec in group])


def allocate(case: Case, config: Any) -> Cache:
    """Plan and allocate the KV cache as a worker does, filled with bytes that tell every place from every other."""
    groups = [_group(named) for named in case.specs]
    layout = config.cache_config.get_resolved_kv_cache_layout()
    size = BLOCKS * sum(spec.page_size_bytes + spec.get_block_stride_alignment() for g in case.specs for _, spec in g)
    config.cache_config.num_gpu_blocks_override = BLOCKS
    kv_config = get_kv_cache_config_from_groups(config, groups, size)
    kernel = None if case.kernel_tokens is None else [case.kernel_tokens] * len(groups)
    kv = allocate_kv_cache(kv_config, torch.device("cpu"), layout, kernel)
    storage = next(iter(kv.values())).untyped_storage()
    raw = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    raw[:] = np.random.default_rng(7).integers(0, 256, raw.size, dtype=np.uint8)
    specs = {name: spec for group in case.specs for name, spec in group}
    places = {
        name: (
            tensor.offset + number * tensor.layer_stride,
            tensor.block_stride,
            prod(compute_layer_kv_cache_shape_bytes(specs[name], 1)[1:]),
        )
        for tensor in kv_config.kv_cache_tensors
        for number, name in enumerate(tensor.layers)
    }
    return Cache(kv, kv_config, raw, places)


def _group(named: Sequence[tuple[str, Any]]) -> Any:
    names, specs = [name for name, _ in named], dict(named)
    first = specs[names[0]]
    if all(spec == first for spec in specs.values()):
        return KVCacheGroupSpec(names, first)
    return KVCacheGroupSpec(names, UniformTypeKVCacheSpecs(block_size=first.block_size, kv_cache_specs=specs))


def full(**changes: Any) -> Any:
    """Llama's attention, small: two KV heads, blocks of 16."""
    fields = {"block_size": 16, "num_kv_heads": 2, "head_size": 16, "dtype": torch.bfloat16}
    return FullAttentionSpec(**fields | changes)


def window(**changes: Any) -> Any:
    """The same with a sliding window."""
    fields = {"block_size": 16, "num_kv_heads": 2, "head_size": 16, "dtype": torch.bfloat16, "sliding_window": 40}
    return SlidingWindowSpec(**fields | changes)


def mla(**changes: Any) -> Any:
    """DeepSeek's latent: 512 and 64 of bfloat16 per token, blocks of 64."""
    fields = {"block_size": 64, "num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16, "max_tp_shards": 1}
    return MLAAttentionSpec(**fields | changes)


def ds_mla(**changes: Any) -> Any:
    """The same quantised, ``fp8_ds_mla``: 656 opaque bytes per token."""
    traits = {"dtype": torch.uint8, "state_content_bytes": 656, "cache_dtype_str": "fp8_ds_mla"}
    return mla(**{"kv_quant_mode": KVQuantMode.FP8_PER_TENSOR} | traits | changes)


def indexer(**changes: Any) -> Any:
    """DeepSeek V3.2's indexer: 128 of fp8 and a scale per token."""
    return mla(**{"head_size": 132, "dtype": torch.uint8} | changes)


FLASH = "flash_attn:FlashAttentionBackend"
TRITON = "triton_attn:TritonAttentionBackend"
FLASHINFER = ""
SPARSE = "mla.flashmla_sparse:FlashMLASparseBackend"
INDEXER = "mla.indexer:DeepseekV32IndexerBackend"
INDEXER_V4 = "mla.indexer:DeepseekV4IndexerBackend"
FP8: Final = {"dtype": torch.uint8, "kv_quant_mode": KVQuantMode.FP8_PER_TENSOR}

CASES: Final[Mapping[str, Case]] = {
    "FlashAttention": Case([[Layers(FLASH, full())]], "LBHNC"),
    "FlashAttention, the user's LBNHC": Case([[Layers(FLASH, full())]], "LBNHC", user_layout="LBNHC"),
    "FlashAttention, the user's BLHNC": Case([[Layers(FLASH, full())]], "BLHNC", user_layout="BLHNC"),
    "FlashAttention, the user's BLNHC": Case([[Layers(FLASH, full())]], "BLNHC", user_layout="BLNHC"),
    "FlashAttention, one head of eight ranks": Case([[Layers(FLASH, full(num_kv_heads=1))]], "LBHNC"),
    "FlashAttention, fp8 per tensor": Case([[Layers(FLASH, full(**FP8))]], "LBHNC"),
    "FlashAttention, windows beside it": Case([[Layers(FLASH, full())], [Layers(FLASH, window())]], "LBHNC"),
    "FlashInfer": Case(
        [[Layers(FLASHINFER, full())]], "LBHNC", takes=("LBNHC", "LBHNC", "BLNHC", "BLHNC", "BHLNC", "LHBNC")
    ),
    "FlashInfer on sm100": Case([[Layers(FLASHINFER, full(block_size=64))]], "LBHNC", takes=("LBHNC", "BLHNC")),
    "Triton": Case([[Layers(TRITON, full())]], "LBHNC"),
    "Triton, fp8 per token and head": Case(
        [[Layers(TRITON, full(dtype=torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TOKEN_HEAD))]], "LBHNC"
    ),
    "Triton, int4 per token and head": Case(
        [[Layers(TRITON, full(dtype=torch.uint8, kv_quant_mode=KVQuantMode.INT4_PER_TOKEN_HEAD))]], "LBHNC"
    ),
    "FlexAttention": Case([[Layers("flex_attention:FlexAttentionBackend", full())]], "LBNHC"),
    "TurboQuant": Case(
        [
            [
                Layers(
                    "turboquant_attn:TurboQuantAttentionBackend",
                    full(head_size=128, dtype=torch.uint8, kv_quant_mode=KVQuantMode.TURBOQUANT_4BIT_NC),
                )
            ]
        ],
        "LBNHC",
    ),
    "B12x: K and V in head slots of their own": Case([[Layers("b12x:B12xPagedAttentionBackend", full())]], "LBHNC"),
    "kernel blocks of 16 in blocks of 64": Case([[Layers(FLASH, full(block_size=64))]], "LBHNC", kernel_tokens=16),
    "kernel blocks of 16 in blocks of 64, LBNHC": Case(
        [[Layers(FLASH, full(block_size=64))]], "LBNHC", kernel_tokens=16, user_layout="LBNHC"
    ),
    "padded pages": Case([[Layers(TRITON, full(page_size_padded=2304))]], "LBHNC"),
    "padded pages, blocks outermost": Case(
        [[Layers(TRITON, full(page_size_padded=2304))]], "BLHNC", user_layout="BLHNC"
    ),
    "FlashMLA": Case([[Layers("mla.flashmla:FlashMLABackend", mla())]], "LBNHC", has_mla=True),
    "FlashMLA, kernel blocks of 64 in blocks of 128": Case(
        [[Layers("mla.flashmla:FlashMLABackend", mla(block_size=128))]], "LBNHC", kernel_tokens=64, has_mla=True
    ),
    "FlashMLA, fp8_ds_mla": Case([[Layers(SPARSE, ds_mla())]], "LBNHC", has_mla=True),
    "DeepSeek V3.2: an indexer's page behind each latent": Case(
        [[Layers(SPARSE, ds_mla()), Layers(INDEXER, indexer())]], "LBNHC", has_mla=True
    ),
    "DeepSeek V3.2 in bfloat16": Case([[Layers(SPARSE, mla()), Layers(INDEXER, indexer())]], "LBNHC", has_mla=True),
    "DeepSeek V4: padded indexer pages inside each block": Case(
        [
            [
                Layers(SPARSE, ds_mla(block_size=256, tokens_per_state=4)),
                Layers(INDEXER_V4, indexer(block_size=256, tokens_per_state=4, alignment=576)),
            ]
        ],
        "BLHNC",
        has_mla=True,
    ),
    "ROCm": Case([[Layers("rocm_attn:RocmAttentionBackend", full())]], "LBHNC"),
    "ROCm, AITER": Case([[Layers("rocm_aiter_fa:AiterFlashAttentionBackend", full())]], "LBHNC"),
    "ROCm, sparse MLA": Case(
        [[Layers("mla.rocm_aiter_mla_sparse:ROCMAiterMLASparseBackend", ds_mla()), Layers(INDEXER, indexer())]],
        "LBNHC",
        has_mla=True,
    ),
}
