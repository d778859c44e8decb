"""What makes KV bytes comparable, read from vLLM's configuration, and which configurations are refused.

Owns the reading of ``VllmConfig`` for the namespace record. Must not touch tensors (``geometry.py`` does) nor read
weights (``weights.py`` does). Called by the worker for the fields, because only there the attention layers and with
them the attention backend exist, and by both roles for ``check_supported``.

Three things make a field: what is observed where the KV lies (geometry, layout, encoding), what the weights are, and
every setting that ``config_fields.py`` does not excuse. Excused are switches that only change rounding from step to
step, as batch size does anyway: eager mode, compilation, scheduling. vLLM's minor version is a field of its own, since
a kernel or a model's code that is mended changes nothing else; ``share_vllm_versions`` leaves it out.
"""

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from typing import Any, Final, Protocol

import vllm
from vllm import envs, platforms

from tiered_kv.errors import ConfigError, UnsupportedModel
from tiered_kv.keys.namespace import FORMAT_VERSION
from tiered_kv.vllm.groups import CacheGroups
from tiered_kv.vllm.model_files import model_files
from tiered_kv.vllm.settings import kv_settings, plain
from tiered_kv.vllm.weights import weights_identity

logger = logging.getLogger("vllm." + __name__)

FIRST_VERSION: Final = (0, 30)
UNTESTED_FROM: Final = (0, 33)
REFUSED_FROM: Final = (0, 34)
"""From ``UNTESTED_FROM`` on versions start with a warning, until they are refused. Of those before it CI runs the
oldest and the newest; what lies between was run by hand (docs/versions.md)."""

PLAIN_DTYPES: Final = frozenset({"auto", "bfloat16", "float16", "half", "float", "float32"})
"""KV dtypes that hold numbers as they are; the page's dtype says which."""

DRAFTLESS_METHODS: Final = frozenset({"ngram", "ngram_gpu", "suffix"})
"""Speculation without a draft model of its own: no KV of other weights, and rejected tokens are only ever the last."""

EXPERTS_CHARS_MAX: Final = 100
"""An encoding has at most 200 characters (``messages.NAME_CHARS_MAX``); of more kinds of experts there is a digest."""

COSMETIC_FIELDS: Final = frozenset({
    "_name_or_path", "_commit_hash", "transformers_version",  # where it came from
    "use_cache", "return_dict", "output_hidden_states", "output_attentions", "torchscript", "chunk_size_feed_forward",
    "id2label", "label2id", "problem_type", "task_specific_params", "finetuning_task",  # transformers' own running
    "sep_token_id", "decoder_start_token_id",  # where text ends; others are embedded with images or end n-grams
    "initializer_range", "attention_dropout", "hidden_dropout", "embd_pdrop", "attn_pdrop", "resid_pdrop",
    "hidden_dropout_prob", "attention_probs_dropout_prob", "pretraining_tp",  # training
})  # fmt: skip
"""Fields of HF configs that have no influence on KV; everything else counts, known to us or not."""


class IdentitySettings(Protocol):
    """The settings that are part of the identity."""

    @property
    def chunk_tokens(self) -> int: ...

    @property
    def model_id(self) -> str | None: ...

    @property
    def share_vllm_versions(self) -> bool: ...


def base_fields(vllm_config: Any, kv_cache_config: Any, settings: IdentitySettings) -> dict[str, object]:
    """Collect all fields of the namespace but ``geometry``, ``kv_encoding`` and ``epoch``; the same on every rank.

    Call it in a worker when KV tensors are registered: the scheduler side has no attention layers to ask.

    Raises:
        ConfigError: The weights cannot be identified, or a file that belongs to the model cannot be read.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    text_config = model.hf_text_config
    return {
        "format_version": FORMAT_VERSION,
        "weights": weights_identity(vllm_config, settings.model_id),
        "text_config": canonical_config(text_config),
        # Multimodal models: the rest of the config shapes the embeddings that stand in for images.
        "outer_config_sha256": None if model.hf_config is text_config else _digest(canonical_config(model.hf_config)),
        "model_dtype": _plain(model.dtype),
        "kv_dtype": _kv_dtype(vllm_config, kv_cache_config),
        "quantization": _quantization(model),
        "attention_backend": attention_backends(vllm_config, kv_cache_config),
        "kv_layout": getattr(kv_cache_config, "kv_cache_layout", None),
        "max_model_len": int(model.max_model_len),
        # Scales come with the checkpoint, which the weights' identity covers; scales computed at run time are refused.
        "kv_scales": "none" if _quant_mode(kv_cache_config) == "NONE" else "checkpoint",
        "block_tokens": cache_groups(vllm_config, kv_cache_config, settings.chunk_tokens).block_tokens,
        "chunk_tokens": int(settings.chunk_tokens),
        "tp": int(parallel.tensor_parallel_size),
        "pp": int(parallel.pipeline_parallel_size),
        "dcp": int(parallel.decode_context_parallel_size),
        "dcp_interleave": _interleave(parallel),
        "model_runner": _model_runner(vllm_config),
        "vllm_version": None if settings.share_vllm_versions else _minor_version(vllm.__version__),
        "settings": {
            **kv_settings(vllm_config),
            "model_files": model_files(vllm_config, is_named=settings.model_id is not None),
            "device_capability": _capability(model, kv_cache_config),
        },
    }


def check_supported(vllm_config: Any, chunk_tokens: int, version: str = vllm.__version__) -> None:
    """Refuse what cannot be right before any tensor exists; warn about what was never tried.

    Speculative decoding is supported where it has no draft model (``DRAFTLESS_METHODS``), given that the scheduler side
    stores no token past ``num_tokens - 1``. A draft model's KV lies among the model's own, computed from weights that
    the namespace does not know.

    Raises:
        ConfigError: vLLM's version or ``chunk_tokens`` does not fit.
        UnsupportedModel: The model or the way it is run is not supported; the message says which and why.
    """
    _check_version(version)
    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    block = int(cache.block_size) * int(parallel.decode_context_parallel_size)
    if chunk_tokens <= 0 or chunk_tokens % block:
        raise ConfigError(
            "chunk_tokens must be a multiple of vLLM's block size. "
            f"chunk_tokens={chunk_tokens} block_size={block} nearest={-(-chunk_tokens // block) * block or block}"
        )
    if model.is_encoder_decoder:
        raise UnsupportedModel("encoder-decoder models are not supported: decoder KV depends on the encoder's input")
    if (pcp := int(getattr(parallel, "prefill_context_parallel_size", 1))) > 1:
        raise UnsupportedModel(f"prefill context parallelism is not supported. prefill_context_parallel_size={pcp}")
    if (nodes := int(getattr(parallel, "nnodes_within_dp", getattr(parallel, "nnodes", 1)))) > 1:
        raise UnsupportedModel(f"ranks of one engine must share a machine and its memory. nodes={nodes}")
    if getattr(cache, "calculate_kv_scales", False):
        raise UnsupportedModel(
            "KV scales computed from the first batch differ between engine starts: calculate_kv_scales"
        )
    if getattr(getattr(vllm_config, "attention_config", None), "hisparse_config", None) is not None:
        raise UnsupportedModel("HiSparse keeps KV in a host pool of its own")
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in DRAFTLESS_METHODS:
        raise UnsupportedModel(
            "speculative decoding with a draft model is not supported yet: its KV lies among the model's own. "
            f"method={speculative.method} supported={','.join(sorted(DRAFTLESS_METHODS))}"
        )


def _check_version(version: str) -> None:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    release = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    if FIRST_VERSION <= release < UNTESTED_FROM:
        return
    first, untested, last = (".".join(map(str, v)) for v in (FIRST_VERSION, UNTESTED_FROM, REFUSED_FROM))
    if not UNTESTED_FROM <= release < REFUSED_FROM:
        raise ConfigError(f"vLLM's version is not supported. supported=>={first},<{last} observed={version}")
    logger.warning("vLLM %s is untested with tiered_kv. proven=>=%s,<%s", version, first, untested)


def cache_groups(vllm_config: Any, kv_cache_config: Any, chunk_tokens: int) -> CacheGroups:
    """The model's KV cache groups, with blocks over all ranks that share their tokens.

    Raises:
        ConfigError: ``chunk_tokens`` is no multiple of their block sizes.
    """
    dcp = int(vllm_config.parallel_config.decode_context_parallel_size)
    return CacheGroups.of(kv_cache_config, chunk_tokens, dcp)


def attention_backends(vllm_config: Any, kv_cache_config: Any) -> str:
    """Names of the attention backends that read and write the group's KV, sorted: ``"CPU_ATTN"``.

    Raises:
        ValueError: Called outside a worker. A guess here would give each role a namespace of its own.
    """
    layers = vllm_config.compilation_config.static_forward_context
    names = [name for group in kv_cache_config.kv_cache_groups for name in group.layer_names]
    backends = {layers[name].get_attn_backend().get_name() for name in names if name in layers}
    if not backends:
        raise ValueError("attention layers exist in workers only, and after the model was loaded")
    return ",".join(sorted(backends))


def page_encodings(vllm_config: Any, kv_cache_config: Any) -> dict[str, str]:
    """What the bytes of each layer's page mean where name, dtype and shape are equal: ``"CPU_ATTN cpu amx"``.

    A CPU backend orders a page by the instructions it was built for, ROCm by a switch and with an FP8 of its own, and a
    model may have a backend per kind of layer. Call it in a worker, as ``base_fields``.
    """
    layers = vllm_config.compilation_config.static_forward_context
    names = [name for group in kv_cache_config.kv_cache_groups for name in group.layer_names]
    return {name: _encoding(layers[name]) for name in names if name in layers}


def with_experts(vllm_config: Any, encodings: Mapping[str, str]) -> dict[str, str]:
    """The encodings of one rank's layers, with the precisions its quantised experts are computed in, if it has any.

    vLLM chooses those while it builds the model, by more than ``moe_backend``: W4A16 where an engine takes LoRA, or has
    expert parallelism of some kinds, and W4A8 or W4A4 of the same weights elsewhere. Told per rank, as encodings are:
    pipeline stages have different experts. Call it in a worker, as ``base_fields``.
    """
    layers = vllm_config.compilation_config.static_forward_context.values()
    told = sorted(set(filter(None, map(_expert_precision, layers))))
    if len(" ".join(told)) > EXPERTS_CHARS_MAX:
        told = [f"experts:{_digest(told)}"]
    return {name: " ".join((text, *told)) for name, text in encodings.items()}


def _expert_precision(layer: Any) -> str:
    """``experts:Mxfp4MoEMethod:mxfp8``: the method, and what its inputs are quantised to; empty for plain ones."""
    method = getattr(getattr(layer, "routed_experts", layer), "quant_method", None)
    config = getattr(method, "moe_quant_config", None)
    if config is None or getattr(config, "_w1", None) is None:
        return ""
    kinds = [plain(getattr(getattr(config, part, None), "dtype", None)) for part in ("_a1", "_a2", "_w1", "_w2")]
    if not any(kinds):
        return ""
    return f"experts:{type(method).__name__}:{','.join('-' if kind is None else str(kind) for kind in kinds)}"


def _encoding(layer: Any) -> str:
    platform = platforms.current_platform
    parts = [layer.get_attn_backend().get_name(), str(platform._enum.name).lower()]
    if (isa := getattr(layer, "isa", None)) is not None:
        parts.append(str(isa))
    if (held := str(getattr(layer, "kv_cache_dtype", "auto"))) not in PLAIN_DTYPES:
        parts.append(held)
        if held.startswith("fp8"):
            parts.append(str(plain(platform.fp8_dtype())))
    if platform.is_rocm() and envs.VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT:
        parts.append("shuffled")
    return " ".join(parts)


def check_layers(vllm_config: Any, kv_cache_config: Any) -> None:
    """Refuse layers into whose pages vLLM itself writes after a load may have filled them; call it in a worker.

    Raises:
        UnsupportedModel: vLLM's Triton backend with a scale per token and head: at the first forward pass of each layer
            it sets all scales to 1, and without CUDA graphs a request whose prefix was loaded is the first.
    """
    layers = vllm_config.compilation_config.static_forward_context
    for group in kv_cache_config.kv_cache_groups:
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        for name in group.layer_names:
            mode = getattr(specs.get(name, group.kv_cache_spec), "kv_quant_mode", None)
            impl = getattr(layers.get(name), "impl", None)
            if getattr(mode, "is_per_token_head", False) and hasattr(impl, "_ensure_scale_caches"):
                raise UnsupportedModel(
                    "this attention backend overwrites the scales of loaded KV at its first forward pass. Use "
                    f"another --kv-cache-dtype, for instance fp8. layer={name} mode={getattr(mode, 'name', mode)}"
                )


def canonical_config(config: Any) -> dict[str, object]:
    """A HF config as plain data for the namespace: no cosmetic fields, no ``None`` (it means absent), no floats."""
    fields = config.to_dict()
    # transformers 5 renamed it.
    if "torch_dtype" in fields:
        fields.setdefault("dtype", fields.pop("torch_dtype"))
    plain = _plain(fields)
    assert isinstance(plain, dict)
    return plain


def _plain(value: object) -> object:
    """Floats become their ``repr``, unknown objects their text, and cosmetic or absent fields go, at every depth."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, Mapping):
        kept = {str(k): v for k, v in value.items() if v is not None and k not in COSMETIC_FIELDS}
        return {name: _plain(item) for name, item in kept.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(str(item) for item in value)
    if hasattr(value, "to_dict"):
        return _plain(value.to_dict())
    text = str(value)
    # The default text of an object holds its address, which would make every start a namespace of its own.
    return type(value).__qualname__ if " at 0x" in text else text.removeprefix("torch.")


def _digest(plain: object) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _minor_version(version: str) -> str:
    """``"0.32"`` of ``"0.32.1+cpu"``; whatever is no version, whole."""
    numbers = re.match(r"\d+\.\d+", version)
    return numbers[0] if numbers else version


def _capability(model: Any, kv_cache_config: Any) -> str | None:
    """The GPU's generation, which chooses the precision of quantised products; else it only changes rounding."""
    if model.quantization is None and _quant_mode(kv_cache_config) == "NONE":
        return None
    capability = platforms.current_platform.get_device_capability()
    return None if capability is None else capability.as_version_str()


def _first_spec(kv_cache_config: Any) -> Any:
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    return next(iter(spec.kv_cache_specs.values())) if hasattr(spec, "kv_cache_specs") else spec


def _quant_mode(kv_cache_config: Any) -> str:
    mode = getattr(_first_spec(kv_cache_config), "kv_quant_mode", None)
    return str(getattr(mode, "name", "NONE"))


def _kv_dtype(vllm_config: Any, kv_cache_config: Any) -> str:
    """What the cache holds, ``auto`` resolved: ``"bfloat16"``, ``"fp8_e5m2:FP8_PER_TENSOR"``."""
    configured = str(vllm_config.cache_config.cache_dtype)
    if configured == "auto":
        configured = str(_plain(getattr(_first_spec(kv_cache_config), "dtype", None)))
    mode = _quant_mode(kv_cache_config)
    return configured if mode == "NONE" else f"{configured}:{mode}"


def _quantization(model: Any) -> dict[str, object] | None:
    """Method and options given at start; what the checkpoint says of itself is in its config."""
    options = getattr(model, "quantization_config", None)
    if model.quantization is None and options is None:
        return None
    if options is not None and not isinstance(options, Mapping):
        options = vars(options)
    return {"method": _plain(model.quantization), "options": _plain(options)}


def _interleave(parallel: Any) -> int:
    """Tokens in a row on one rank under decode context parallelism; renamed on the way through the window."""
    if parallel.decode_context_parallel_size == 1:
        return 1
    return int(getattr(parallel, "cp_kv_cache_interleave_size", getattr(parallel, "dcp_kv_cache_interleave_size", 1)))


def _model_runner(vllm_config: Any) -> str:
    generation = getattr(vllm_config, "use_v2_model_runner", None)
    return "unknown" if generation is None else "v2" if generation else "v1"
