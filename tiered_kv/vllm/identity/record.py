"""The fields of the namespace record, read from vLLM's configuration.

Owns the reading of ``VllmConfig`` for the namespace record. Must not touch tensors (``kv_layout.py`` does) nor read
weights (``model_files.py`` does). Called by the worker, because only there the attention layers and with them the
attention backend exist.

Three things make a field: what is observed where the KV lies (geometry, layout, encoding), what the weights are, and
every setting that ``config_fields.py`` does not excuse. Excused are switches that only change rounding from step to
step, as batch size does anyway: eager mode, compilation, scheduling. vLLM's minor version is a field of its own, since
a kernel or a model's code that is mended changes nothing else; ``share_vllm_versions`` leaves it out.
"""

import hashlib
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, Protocol

import vllm
from vllm import envs, platforms

from tiered_kv.keys.namespace import FORMAT_VERSION
from tiered_kv.vllm.compat import expert_precisions, platform_name
from tiered_kv.vllm.drafts import has_drafts_kv
from tiered_kv.vllm.identity.canonical import key_text, plain, written
from tiered_kv.vllm.identity.config_values import file_digest, kv_settings
from tiered_kv.vllm.identity.model_code import draft_code, model_code, transformers_version, uses_transformers
from tiered_kv.vllm.identity.model_files import draft_weights_identity, model_files, weights_identity
from tiered_kv.vllm.kv_groups import cache_groups, is_recurrent

PLAIN_DTYPES: Final = frozenset({"auto", "bfloat16", "float16", "half", "float", "float32"})
"""KV dtypes that hold numbers as they are; the page's dtype says which."""

EXPERTS_CHARS_MAX: Final = 100
"""An encoding has at most 200 characters (``messages.NAME_CHARS_MAX``); of more kinds of experts there is a digest."""

OPTIONS_FILE: Final = "quantization_config_file"
"""Key of an override that names a file with options of quantisation; its content counts."""

COSMETIC_FIELDS: Final = frozenset({
    "_name_or_path", "_commit_hash", "transformers_version", OPTIONS_FILE,  # where it came from
    "use_cache", "return_dict", "output_hidden_states", "output_attentions", "torchscript", "chunk_size_feed_forward",
    "id2label", "label2id", "problem_type", "task_specific_params", "finetuning_task",  # transformers' own running
    "sep_token_id", "decoder_start_token_id",  # where text ends; others are embedded with images or end n-grams
    "initializer_range", "attention_dropout", "hidden_dropout", "embd_pdrop", "attn_pdrop", "resid_pdrop",
    "hidden_dropout_prob", "attention_probs_dropout_prob", "pretraining_tp",  # training
})  # fmt: skip
"""Fields of HF configs that have no influence on KV; everything else counts, known to us or not."""

NULL_IS_ABSENT: Final = COSMETIC_FIELDS | {
    "sliding_window", "image_token_id",  # some classes set it themselves
    "quantization_config", "compression_config",  # read by schemas in which what is left out is null
    "bad_words_ids", "begin_suppress_tokens", "exponential_decay_length_penalty", "forced_bos_token_id",
    "forced_eos_token_id", "prefix", "suppress_tokens", "tokenizer_class", "tie_encoder_decoder",
    "cross_attention_hidden_size", "tf_legacy_loss",  # which transformers 4 wrote into every config
}  # fmt: skip
"""Fields whose null, and those below them, say what their absence says."""

NULLS: Final = "<null>"
"""No field of a config is called so: ``key_text`` escapes what begins like it."""


DRAFT_SETTINGS: Final = (
    "moe_backend", "kv_cache_dtype", "use_heterogeneous_vocab", "index_share_for_mtp_iteration",
    "disable_eagle_block_drop",
)  # fmt: skip
"""Settings of the draft that may change its KV and show nowhere else. Without the block drop a prompt goes on from the
slot that is another prompt's, and what follows it is of both."""


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
    states = recurrent_state(kv_cache_config)
    return ({"recurrent_state": states} if states else {}) | {
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
            **kv_settings(vllm_config, has_states=bool(states)),
            "model_files": model_files(vllm_config, is_named=settings.model_id is not None),
            "device_capability": _capability(model, kv_cache_config),
        },
        **_code_fields(model_code(vllm_config), model, settings),
        **draft_fields(vllm_config, kv_cache_config, settings),
    }


def _code_fields(code: dict[str, object] | None, model: Any, settings: IdentitySettings) -> dict[str, object]:
    """What computes the model besides vLLM; nothing where vLLM alone does, which its version names."""
    is_shared = settings.share_vllm_versions or not uses_transformers(model)
    return ({} if code is None else {"model_code": code}) | (
        {} if is_shared else {"transformers_version": _minor_version(transformers_version())}
    )


def draft_fields(vllm_config: Any, kv_cache_config: Any, settings: IdentitySettings) -> dict[str, object]:
    """The field ``draft``: what made the KV of the draft's layers, which lie in the chunks; nothing without such KV.

    How many tokens it guesses at a time is no part of it: what it writes for a guess is written again once the token
    is known. Its pages' encodings are in ``kv_encoding``, with those of all layers.
    """
    if not has_drafts_kv(vllm_config):
        return {}
    speculative = vllm_config.speculative_config
    draft = speculative.draft_model_config
    parallel = speculative.draft_parallel_config
    groups = len(kv_cache_config.kv_cache_groups)
    return {
        "draft": {
            "method": str(speculative.method),
            "weights": draft_weights_identity(vllm_config, settings.model_id),
            "config": canonical_config(draft.hf_config),
            "model_files": model_files(vllm_config, is_named=settings.model_id is not None, model=draft),
            "model_dtype": _plain(draft.dtype),
            "quantization": _quantization(draft),
            "max_model_len": int(draft.max_model_len),  # LongRoPE, as for the model
            "tp": int(parallel.tensor_parallel_size) if parallel is not None else 1,
            "settings": {name: plain(getattr(speculative, name, None)) for name in DRAFT_SETTINGS},
            **_code_fields(draft_code(draft), draft, settings),
            **({"kv_cache_groups": groups} if groups > 1 else {}),  # how long a hit is depends on it (drafts.py)
        }
    }


def recurrent_state(kv_cache_config: Any) -> list[dict[str, object]]:
    """What the state of each group of recurrent layers consists of, in the order of its parts; empty without such.

    Shapes depend on more than the model: a convolution is wider by the drafts of a step, and vLLM chooses dtypes.
    """
    groups = (group for group in kv_cache_config.kv_cache_groups if is_recurrent(group.kv_cache_spec))
    return [
        {
            "layers": list(group.layer_names),
            "kind": str(getattr(group.kv_cache_spec.mamba_type, "name", group.kv_cache_spec.mamba_type)),
            "shapes": [list(shape) for shape in group.kv_cache_spec.shapes],
            "dtypes": [_plain(dtype) for dtype in group.kv_cache_spec.dtypes],
        }
        for group in groups
    ]


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
    """Encoding of each layer's page, which name, dtype and shape do not give: ``"CPU_ATTN cpu amx"``.

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
    kinds = sorted(set(filter(None, map(_expert_precision, layers))))
    if len(" ".join(kinds)) > EXPERTS_CHARS_MAX:
        kinds = [f"experts:{_digest(kinds)}"]
    return {name: " ".join((text, *kinds)) for name, text in encodings.items()}


def _expert_precision(layer: Any) -> str:
    """``experts:Mxfp4MoEMethod:mxfp8``: the method and the precision of its inputs; empty for plain ones."""
    method = getattr(getattr(layer, "routed_experts", layer), "quant_method", None)
    kinds = [plain(dtype) for dtype in expert_precisions(method) or ()]
    if not any(kinds):
        return ""
    return f"experts:{type(method).__name__}:{','.join('-' if kind is None else str(kind) for kind in kinds)}"


def _encoding(layer: Any) -> str:
    platform = platforms.current_platform
    parts = [layer.get_attn_backend().get_name(), platform_name(platform)]
    if (isa := getattr(layer, "isa", None)) is not None:
        parts.append(str(isa))
    if (held := str(getattr(layer, "kv_cache_dtype", "auto"))) not in PLAIN_DTYPES:
        parts.append(held)
        if held.startswith("fp8"):
            parts.append(str(plain(platform.fp8_dtype())))
    if platform.is_rocm() and envs.VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT:
        parts.append("shuffled")
    return " ".join(parts)


def canonical_config(config: Any) -> dict[str, object]:
    """A HF config as plain data for the namespace: no cosmetic fields, no floats, and no ``None``.

    ``None`` is what a field's absence comes to, but where nobody declares the field: what reads it with
    ``getattr(config, name, True)`` or ``.get(name, True)`` tells the two apart. Such names are listed.
    """
    fields = config.to_dict()
    # transformers 5 renamed it.
    if "torch_dtype" in fields:
        fields.setdefault("dtype", fields.pop("torch_dtype"))
    form = _plain(fields)
    assert isinstance(form, dict)
    nulls = sorted(_undeclared_nulls(config))
    return form | ({NULLS: nulls} if nulls else {})


def _undeclared_nulls(config: Any) -> Iterator[str]:
    """Where a config says null of something that its class gives no default: ``rope_parameters.truncate``."""
    declared = _declared(type(config))
    for name, value in config.to_dict().items():
        held = vars(config).get(name, value)  # some classes refuse to be asked what differs by layer
        if name in NULL_IS_ABSENT or (value is None and name in declared):
            continue
        below = _undeclared_nulls(held) if hasattr(held, "to_dict") else _nulls_in(value)
        yield from (f"{name}.{place}".rstrip(".") for place in below)


def _nulls_in(value: object) -> Iterator[str]:
    if value is None:
        yield ""
    elif isinstance(value, Mapping | list | tuple):
        for name, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            if name not in NULL_IS_ABSENT:
                yield from (f"{name}.{place}".rstrip(".") for place in _nulls_in(item))


def _declared(of: type) -> set[str]:
    """What a class of configs has a value for when nothing is given."""
    inits = [vars(one)["__init__"] for one in of.__mro__ if "__init__" in vars(one)]
    names = {name for init in inits for name in inspect.signature(init).parameters}
    return names.union(dir(of), *(vars(one).get("__annotations__", ()) for one in of.__mro__))


def _plain(value: object) -> object:
    """As ``plain``, but cosmetic and absent fields go, at every depth of what a config holds."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, Mapping):
        kept = {key_text(k): v for k, v in value.items() if v is not None and k not in COSMETIC_FIELDS}
        return {name: _plain(item) for name, item in kept.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((_plain(item) for item in value), key=written)
    if hasattr(value, "to_dict"):
        return _plain(value.to_dict())
    return plain(value)


def _digest(plain: object) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _minor_version(version: str) -> str:
    """``"0.32"`` of ``"0.32.1+cpu"``; a text that is no version, whole."""
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
    """Dtype of the KV cache, ``auto`` resolved: ``"bfloat16"``, ``"fp8_e5m2:FP8_PER_TENSOR"``."""
    configured = str(vllm_config.cache_config.cache_dtype)
    if configured == "auto":
        configured = str(_plain(getattr(_first_spec(kv_cache_config), "dtype", None)))
    mode = _quant_mode(kv_cache_config)
    return configured if mode == "NONE" else f"{configured}:{mode}"


def _quantization(model: Any) -> dict[str, object] | None:
    """Method and options given at start; those of the checkpoint are in its config."""
    options = getattr(model, "quantization_config", None)
    overrides = getattr(model, "hf_overrides", None)
    path = overrides.get(OPTIONS_FILE) if isinstance(overrides, Mapping) else None
    if model.quantization is None and options is None and path is None:
        return None
    if options is not None and not isinstance(options, Mapping):
        options = vars(options)
    named = {} if path is None else {"file": file_digest(f"hf_overrides.{OPTIONS_FILE}", str(path))}
    return {"method": _plain(model.quantization), "options": _plain(options)} | named


def _interleave(parallel: Any) -> int:
    """Tokens in a row on one rank under decode context parallelism; renamed on the way through the window."""
    if parallel.decode_context_parallel_size == 1:
        return 1
    return int(getattr(parallel, "cp_kv_cache_interleave_size", getattr(parallel, "dcp_kv_cache_interleave_size", 1)))


def _model_runner(vllm_config: Any) -> str:
    generation = getattr(vllm_config, "use_v2_model_runner", None)
    return "unknown" if generation is None else "v2" if generation else "v1"
