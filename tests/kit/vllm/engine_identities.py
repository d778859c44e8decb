"""Pairs of engines that differ in one thing which makes their KV incomparable, without starting any.

Each engine is a real vLLM configuration, read as the worker reads it and made a namespace as the server makes it. The
tests of identity and the mutation test, which drops fields from the namespace, run the same checks on the same pairs.
Called by tests that import vLLM.
"""

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

import msgspec
import torch
import vllm
from transformers import LlamaConfig
from vllm import envs
from vllm.config import KVTransferConfig, LoRAConfig, MultiModalConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVQuantMode

from tests.kit.vllm.starting import models_are_inspected_here
from tiered_kv.keys.namespace import FORMAT_VERSION, Namespace, diff
from tiered_kv.server import protocol as m
from tiered_kv.server.members import namespace_of
from tiered_kv.vllm.identity import model_code
from tiered_kv.vllm.identity import record as identity
from tiered_kv.vllm.kv_groups import cache_groups

LAYER: Final = "model.layers.0.self_attn.attn"
PAGE: Final = m.Page(LAYER, "BF16", (2, 32, 16), "HNC")
OTHER_PAGE: Final = m.Page("model.layers.1.self_attn.attn", "BF16", (2, 32, 16), "HNC")

Pages = tuple[m.Page, ...]


@dataclass(frozen=True)
class Settings:
    """The settings of tiered_kv that are part of the identity."""

    chunk_tokens: int = 256
    model_id: str | None = None
    share_vllm_versions: bool = False


def engine_config(folder: Path, **arguments: Any) -> Any:
    """What an engine started with these arguments works with, as a worker sees it after the model was loaded."""
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=256, architectures=["LlamaForCausalLM"], dtype="bfloat16",
    )  # fmt: skip
    config.save_pretrained(folder)
    defaults = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 512, "block_size": 32}
    with models_are_inspected_here():
        made = EngineArgs(model=str(folder), **defaults | arguments).create_engine_config()
    return with_backend(made, "CPU_ATTN")


def with_backend(vllm_config: Any, name: str, **attributes: Any) -> Any:
    """The configuration with a layer of this attention backend, as loading the model registers one."""
    return with_layers(vllm_config, {LAYER: attention_layer(name, **attributes)})


def attention_layer(backend: str, **attributes: Any) -> Any:
    """What the cache reads of one of vLLM's attention layers."""
    named = SimpleNamespace(get_name=lambda: backend)
    return SimpleNamespace(get_attn_backend=lambda: named, **attributes)


def with_layers(vllm_config: Any, layers: Mapping[str, Any]) -> Any:
    """The configuration with these attention layers."""
    return changed(vllm_config, compilation_config={"static_forward_context": dict(layers)})


def changed(vllm_config: Any, **parts: Any) -> Any:
    """A copy with some fields of its parts set, unchecked: ``cache_config={"cache_dtype": "fp8"}``.

    Or with a field of its own, for which the copy is no ``VllmConfig``: some of them are properties there.
    """
    derived = {"use_v2_model_runner": getattr(vllm_config, "use_v2_model_runner", None)}
    result = SimpleNamespace(**derived | vars(vllm_config))
    for part, value in parts.items():
        if isinstance(value, Mapping):
            inner = copy.copy(getattr(vllm_config, part))
            for name, item in value.items():
                object.__setattr__(inner, name, item)
            value = inner
        setattr(result, part, value)
    return result


def kv_config(layout: str = "LBHNC", **spec: Any) -> Any:
    """vLLM's KV cache of one layer."""
    fields = {"block_size": 32, "num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16} | spec
    group = KVCacheGroupSpec([LAYER], FullAttentionSpec(**fields))
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[group], kv_cache_layout=layout)


class Config:
    """A model's config as transformers gives it: something with ``to_dict``."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def to_dict(self) -> dict[str, Any]:
        return dict(self.fields)


PluginsModel: Final = type("PluginsModel", (LlamaForCausalLM,), {"__module__": __name__})
"""A class that a plugin has registered in the place of vLLM's."""


@dataclass(frozen=True)
class Engine:
    """One engine: how it was started, what vLLM made of that, and what its workers told the server.

    Attributes:
        arguments: vLLM's engine arguments.
        parts: Fields of parts of the configuration, set unchecked: what needs hardware that is not here.
        layer: Attributes of its attention layer.
        version: vLLM's.
        transformers: The transformers package's version.
        model_class: What vLLM makes of the model's architecture.
        variables: Values of ``vllm.envs``.
        pages: For each rank its layers.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, Any] = field(default_factory=dict)
    backend: str = "CPU_ATTN"
    layer: dict[str, Any] = field(default_factory=dict)
    version: str = "0.32.0"
    transformers: str = "5.19.0"
    model_class: type = LlamaForCausalLM
    variables: dict[str, Any] = field(default_factory=dict)
    kv: dict[str, Any] = field(default_factory=dict)
    settings: Settings = Settings()
    pages: tuple[Pages, ...] = ((PAGE, OTHER_PAGE),)
    epoch: str = "base-0"
    format_version: int = FORMAT_VERSION


BASE: Final = Engine()


def unlike_base(**changes: Any) -> tuple[Engine, Engine]:
    return BASE, replace(BASE, **changes)


def page(**changes: Any) -> tuple[Engine, Engine]:
    return unlike_base(pages=((msgspec.structs.replace(PAGE, **changes), OTHER_PAGE),))


def _rope(**parameters: Any) -> dict[str, Any]:
    return {"hf_overrides": {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"} | parameters}}


def _as(encoding: str, of: m.Page = PAGE) -> m.Page:
    return msgspec.structs.replace(of, encoding=encoding)


_IMAGES: Final = replace(BASE, parts={"model_config": {"multimodal_config": MultiModalConfig()}})
_CONTEXT_RANKS: Final = replace(BASE, parts={"parallel_config": {"decode_context_parallel_size": 2}})
_SCALED: Final = {"kv_quant_mode": KVQuantMode.FP8_PER_TENSOR}

CHANGES: Final[Mapping[str, tuple[Engine, Engine]]] = {
    "seed of the weights": unlike_base(arguments={"seed": 3}),
    "model_id": unlike_base(settings=Settings(model_id="mine")),
    "dtype": unlike_base(arguments={"dtype": "float32"}),
    "max_model_len": unlike_base(arguments={"max_model_len": 256}),
    "rope_theta": unlike_base(arguments=_rope(rope_theta=20000.0)),
    "rope_type": unlike_base(arguments=_rope(rope_type="linear", factor=2.0)),
    "rope scaling's factor": (
        replace(BASE, arguments=_rope(rope_type="linear", factor=2.0)),
        replace(BASE, arguments=_rope(rope_type="linear", factor=4.0)),
    ),
    "rms_norm_eps": unlike_base(arguments={"hf_overrides": {"rms_norm_eps": 1e-5}}),
    # LongCat's n-gram embeddings end at it, Moondream's images begin with the embedding of bos_token_id.
    "where text ends": unlike_base(arguments={"hf_overrides": {"eos_token_id": 5}}),
    "a field nobody knows": unlike_base(arguments={"hf_overrides": {"unknown_new_field": 1}}),
    "config around the text config": unlike_base(parts={"model_config": {"hf_config": Config(vision_layers=3)}}),
    "image encoder": (
        replace(BASE, parts={"model_config": {"hf_config": Config(vision_layers=3)}}),
        replace(BASE, parts={"model_config": {"hf_config": Config(vision_layers=4)}}),
    ),
    "quantised weights": unlike_base(parts={"model_config": {"quantization": "fp8"}}),
    "how weights are quantised": unlike_base(parts={"model_config": {"quantization_config": {"group_size": 64}}}),
    # Both lie in memory as bytes, so nothing else tells them apart.
    "quantised KV": (
        replace(BASE, parts={"cache_config": {"cache_dtype": "fp8_e4m3"}}),
        replace(BASE, parts={"cache_config": {"cache_dtype": "fp8_e5m2"}}),
    ),
    "KV with scales": unlike_base(kv=_SCALED),
    "KV's dtype": unlike_base(kv={"dtype": torch.float16}),
    "attention backend": unlike_base(backend="FLASH_ATTN"),
    "KV layout": unlike_base(kv={"layout": "LBNHC"}),
    "block size": unlike_base(kv={"block_size": 64}),
    "chunk size": unlike_base(settings=Settings(chunk_tokens=512)),
    "tensor parallel": unlike_base(parts={"parallel_config": {"tensor_parallel_size": 2}}),
    "pipeline parallel": unlike_base(parts={"parallel_config": {"pipeline_parallel_size": 2}}),
    "context parallel with as large blocks": (BASE, replace(_CONTEXT_RANKS, kv={"block_size": 16})),
    "context parallel, interleaved": (
        _CONTEXT_RANKS,
        replace(
            BASE,
            parts={"parallel_config": {"decode_context_parallel_size": 2, "cp_kv_cache_interleave_size": 16}},
        ),
    ),
    "model runner": unlike_base(parts={"use_v2_model_runner": True}),
    "minor version of vLLM": unlike_base(version="0.33.0"),
    "a plugin's class in the place of vLLM's": unlike_base(model_class=PluginsModel),
    "minor version of transformers, which processes images": (_IMAGES, replace(_IMAGES, transformers="5.20.0")),
    "an encoder of images of another precision": (
        _IMAGES,
        replace(BASE, parts={"model_config": {"multimodal_config": MultiModalConfig(mm_encoder_attn_dtype="fp8")}}),
    ),
    "a variable that chooses a precision": unlike_base(variables={"VLLM_MARLIN_INPUT_DTYPE": "int8"}),
    "instructions that the CPU backend is built for": (
        replace(BASE, layer={"isa": "amx"}),
        replace(BASE, layer={"isa": "vec"}),
    ),
    "one backend per kind of layer, swapped": (
        replace(BASE, pages=((_as("FLASH_ATTN"), _as("TRITON_ATTN", OTHER_PAGE)),)),
        replace(BASE, pages=((_as("TRITON_ATTN"), _as("FLASH_ATTN", OTHER_PAGE)),)),
    ),
    "format version": unlike_base(format_version=FORMAT_VERSION + 1),
    "epoch": unlike_base(epoch="base-1"),
    "page's layer": page(layer="model.layers.7.self_attn.attn"),
    "page's dtype": page(dtype="F16"),
    "page's shape": page(shape=(2, 32, 32)),
    "order of the page's extents": page(shape=(32, 2, 16)),
    "order of the page's axes": page(axes="NHC"),
    "page's blocks": page(blocks=2),
    "page's tokens per state": page(tokens_per_state=4),
    "order of layers": unlike_base(pages=((OTHER_PAGE, PAGE),)),
    "layers on two ranks": unlike_base(pages=((PAGE,), (OTHER_PAGE,))),
    "layers of the second rank": (
        replace(BASE, pages=((PAGE,), (OTHER_PAGE,))),
        replace(BASE, pages=((PAGE,), (PAGE,))),
    ),
}
"""What makes two namespaces of two engines."""

SAME: Final[Mapping[str, tuple[Engine, Engine]]] = {
    "scheduling": unlike_base(arguments={"num_gpu_blocks_override": 17, "max_num_seqs": 3, "enforce_eager": True}),
    "vLLM's own prefix cache": unlike_base(arguments={"enable_prefix_caching": False}),
    "training": unlike_base(arguments={"hf_overrides": {"use_cache": False, "initializer_range": 0.5}}),
    "patch version of vLLM": unlike_base(version="0.32.1+cpu"),
    "minor versions that share": (
        replace(BASE, settings=Settings(share_vllm_versions=True)),
        replace(BASE, settings=Settings(share_vllm_versions=True), version="0.31.0"),
    ),
    "transformers, where vLLM computes everything": unlike_base(transformers="5.20.0"),
    "minor versions of transformers that share": (
        replace(_IMAGES, settings=Settings(share_vllm_versions=True)),
        replace(_IMAGES, settings=Settings(share_vllm_versions=True), transformers="5.20.0"),
    ),
    "LoRA": unlike_base(parts={"lora_config": LoRAConfig(target_modules=["o_proj"])}),
    "memory of the machine": unlike_base(parts={"cache_config": {"num_gpu_blocks": 17, "kv_cache_size_tokens": 99}}),
    "replica, rank and role": unlike_base(
        parts={
            "parallel_config": {"data_parallel_size": 2, "data_parallel_rank": 1, "rank": 1, "master_port": 1},
            "kv_transfer_config": KVTransferConfig(kv_connector="c", kv_role="kv_producer", engine_id="e"),
            "instance_id": "another",
        }
    ),
    "KV's dtype by its name": unlike_base(parts={"cache_config": {"cache_dtype": "bfloat16"}}),
}
"""And what does not: a needless second namespace costs every hit."""


def _encoded(vllm_config: Any, kv: Any, pages: Pages) -> list[m.Page]:
    """The pages as a worker tells them; those of layers that this configuration lacks are as the first one's."""
    encodings = identity.page_encodings(vllm_config, kv)
    first = next(iter(encodings.values()))
    return [msgspec.structs.replace(p, encoding=p.encoding or encodings.get(p.layer, first)) for p in pages]


class Identities:
    """Namespaces of engines whose model lies in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._configs: dict[str, Any] = {}

    def namespace(self, engine: Engine) -> Namespace:
        """What the server makes of what this engine's workers tell it."""
        vllm_config = changed(with_backend(self.config(engine), engine.backend, **engine.layer), **engine.parts)
        kv = kv_config(**engine.kv)
        variables = {name: (lambda value=value: value) for name, value in engine.variables.items()}
        with (
            mock.patch.object(identity, "FORMAT_VERSION", engine.format_version),
            mock.patch.object(vllm, "__version__", engine.version),
            mock.patch.object(identity, "transformers_version", return_value=engine.transformers),
            mock.patch.object(model_code, "model_class", return_value=engine.model_class),
            mock.patch.dict(envs.environment_variables, variables),
        ):
            fields = json.dumps(identity.base_fields(vllm_config, kv, engine.settings)).encode()
        chunk_tokens = engine.settings.chunk_tokens
        block_tokens = cache_groups(vllm_config, kv, chunk_tokens).block_tokens
        joins = [
            m.JoinWorker(rank, len(engine.pages), block_tokens, chunk_tokens, fields, _encoded(vllm_config, kv, pages))
            for rank, pages in enumerate(engine.pages)
        ]
        return namespace_of(joins, engine.epoch)

    def config(self, engine: Engine) -> Any:
        """What vLLM makes of this engine's arguments."""
        arguments = repr(engine.arguments)
        if arguments not in self._configs:
            self._configs[arguments] = engine_config(self._folder, **engine.arguments)
        return self._configs[arguments]

    def check_apart(self, change: str) -> None:
        """Assert that this change makes another namespace."""
        one, other = map(self.namespace, CHANGES[change])
        assert one.digest != other.digest, f"{change}: KV that must not meet has one namespace"

    def check_same(self, change: str) -> None:
        """Assert that this change makes no other namespace."""
        one, other = map(self.namespace, SAME[change])
        assert diff(one, other) == []
