"""What a model's ``config.json`` says of the KV of one token: layers, windows, heads, dtype.

Reads the file as it was published, without transformers or vLLM, and follows vLLM's rules for the fields. Refuses what
it does not know rather than guess: a wrong size is worse than none. Must not know chunks or tiers (``sizing`` does).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tiered_kv.chunks.geometry import DTYPE_BYTES
from tiered_kv.errors import ConfigError, UnsupportedModel
from tools.kv_size.model_types import (
    ALL_HEADS,
    DEFAULTS,
    MLA_TYPES,
    OTHER_SHAPES,
    OWN_HEAD_DIM,
    OWN_WINDOW,
    REFUSED_FIELDS,
    REFUSED_TYPES,
    STATE,
    WINDOW_EVERYWHERE,
    WINDOW_PATTERNS,
)
from tools.kv_size.recurrent import ATTENDS, MAMBA_2, RECURRENT_TYPES, RecurrentLayers, layer_kinds, recurrent_layers

STATE_FIELDS: Final = (
    (
        "linear_num_key_heads",
        "linear_key_head_dim",
        "linear_num_value_heads",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
    ),
    ("mamba_expand", "hidden_size", "mamba_d_conv", "mamba_d_state", "mamba_n_groups", "mamba_n_heads"),
)
"""Fields that decide the size of a state: of gated delta nets, of Mamba 2."""

CONFIG_FILE: Final = "config.json"
CONFIG_BYTES_MAX: Final = 4 << 20
NUMBER_MAX: Final = 1 << 20
LAYERS_MAX: Final = 1000

TEXT_CONFIGS: Final = ("text_config", "llm_config", "language_config")
"""Where configs of models for images and speech keep their language model."""

DTYPES: Final[Mapping[str, str]] = {
    "bfloat16": "BF16",
    "float16": "F16",
    "half": "F16",
    "float32": "F32",
    "float": "F32",
}

ASSUMED_DTYPE: Final = "BF16"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What decides the bytes of KV.

    Attributes:
        model_type: As the file says it.
        windows: One entry per layer that stores KV: its window in tokens, None for full attention.
        attention_heads: Query heads, which tensor parallelism has to divide.
        kv_heads: KV heads of the whole model; 1 with MLA.
        head_values: Numbers per token, layer and KV head: K and V together, or MLA's latent with its rotary part.
        is_mla: Whether all ranks hold the same KV, which is stored once.
        dtype: safetensors name of the KV's dtype.
        notes: What was assumed, in words.
        recurrent: The layers with a state; None where there are none.
    """

    model_type: str
    windows: tuple[int | None, ...]
    attention_heads: int
    kv_heads: int
    head_values: int
    is_mla: bool
    dtype: str
    notes: tuple[str, ...] = ()
    recurrent: RecurrentLayers | None = None

    @property
    def attention(self) -> str:
        """The attention in words."""
        if self.is_mla:
            return f"MLA, a latent of {self.head_values} values"
        kind = "MHA" if self.kv_heads == self.attention_heads else "MQA" if self.kv_heads == 1 else "GQA"
        heads = "one KV head" if self.kv_heads == 1 else f"{self.kv_heads} KV heads"
        return f"{kind}, {heads} of {self.head_values // 2} values"


def read_config(model: str) -> dict[str, Any]:
    """The ``config.json`` that ``model`` is, or that lies in the directory it names.

    Raises:
        ConfigError: There is none, or it cannot be read.
    """
    path = Path(model)
    try:
        path = path / CONFIG_FILE if path.is_dir() else path
        if not path.is_file():
            raise ConfigError(
                f"MODEL: expected a directory with a {CONFIG_FILE}, or such a file, and {model[:200]!r} is neither; "
                "nothing is downloaded: fetch the file first, e.g. `hf download NAME config.json`"
            )
        with path.open("rb") as file:
            data = file.read(CONFIG_BYTES_MAX + 1)
    except OSError as exc:
        raise ConfigError(f"MODEL: {model[:200]!r} cannot be read: {exc.strerror}") from exc
    if len(data) > CONFIG_BYTES_MAX:
        raise ConfigError(f"MODEL: expected a {CONFIG_FILE} of at most {CONFIG_BYTES_MAX} bytes; name the right file")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"MODEL: expected JSON as Hugging Face writes it; {model[:200]!r} cannot be parsed") from exc
    if not isinstance(found, dict):
        raise ConfigError(f"MODEL: expected a JSON object in {model[:200]!r}; name the model's {CONFIG_FILE}")
    return found


def shape_of(config: Mapping[str, Any], kv_dtype: str | None = None) -> ModelShape:
    """Work out the shape of a model's KV.

    Args:
        config: The content of ``config.json``.
        kv_dtype: safetensors name; None: what vLLM takes for ``auto``.

    Raises:
        UnsupportedModel: Its KV is of a kind that is not cached, or that cannot be told from the file.
        ConfigError: A field is missing or makes no sense.
    """
    text, notes = _text_config(config)
    model_type = str(text.get("model_type") or config.get("model_type") or "unknown")
    fields = {**DEFAULTS.get(model_type, {}), **text}
    _refuse(config, fields, model_type)
    layers = _number(fields, "num_hidden_layers", LAYERS_MAX)
    recurrent = None
    if model_type in RECURRENT_TYPES:
        recurrent, windows = _recurrent(config, fields, model_type, layers)
    else:
        windows = _windows(fields, model_type, layers, notes)
    if shared := _number(fields, "num_kv_shared_layers", layers - 1, 0):
        windows = windows[: layers - shared]
        notes.append(f"the last {shared} layers use the KV of layers before them, so it is stored once")
    heads = _number(fields, "num_attention_heads")
    is_mla = fields.get("kv_lora_rank") is not None
    if is_mla:
        kv_heads, values = 1, _latent(fields, model_type)
    else:
        rule = heads if model_type in ALL_HEADS else None
        kv_heads = _number(fields, "num_key_value_heads", default=rule)
        values = 2 * _head_dim(fields, model_type, heads)
        if fields.get("v_head_dim") not in (None, values // 2):
            raise UnsupportedModel(f"this model's KV is not computed: {OTHER_SHAPES}. field=v_head_dim")
    if fields.get("num_nextn_predict_layers"):
        notes.append("without the layers for multi-token prediction, which vLLM loads for speculative decoding only")
    dtype = kv_dtype or _auto_dtype(config, text, notes)
    return ModelShape(model_type, windows, heads, kv_heads, values, is_mla, dtype, tuple(notes), recurrent)


def _recurrent(
    config: Mapping[str, Any], fields: Mapping[str, Any], model_type: str, layers: int
) -> tuple[RecurrentLayers | None, tuple[int | None, ...]]:
    """The layers with a state, and the windows of those that attend, which have none."""
    kinds = layer_kinds(fields, layers)
    attending = sum(kind in ATTENDS for kind in kinds)
    if not attending:
        raise UnsupportedModel(f"recurrent layers only: vLLM caches no prefixes of such. model_type={model_type}")
    named = {name: value for name, value in config.items() if name != "quantization_config"}
    dtype_bytes = DTYPE_BYTES[_auto_dtype(named, {**fields, "quantization_config": None}, [])]
    for name in STATE_FIELDS[model_type in MAMBA_2]:
        _number(fields, name)
    return recurrent_layers(fields, model_type, kinds, dtype_bytes), (None,) * attending


def _text_config(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    for name in TEXT_CONFIGS:
        found = config.get(name)
        if isinstance(found, dict):
            return found, [f"of {name}; images and the like are tokens like any others"]
    return config, []


def _refuse(config: Mapping[str, Any], fields: Mapping[str, Any], model_type: str) -> None:
    if config.get("is_encoder_decoder"):
        raise UnsupportedModel("an encoder-decoder is not cached: its KV belongs to the encoder's input")
    architectures = config.get("architectures")
    if isinstance(architectures, list) and any(str(name).endswith("ForMaskedLM") for name in architectures):
        raise UnsupportedModel(f"an encoder keeps no KV cache. architectures={architectures[:3]}")
    if model_type in REFUSED_TYPES:
        reason = REFUSED_TYPES[model_type]
        raise UnsupportedModel(f"this model's KV is not computed: {reason}. model_type={model_type}")
    for name, reason in REFUSED_FIELDS.items():
        if reason == STATE and model_type in RECURRENT_TYPES:
            continue
        if fields.get(name) not in (None, False):
            raise UnsupportedModel(f"this model's KV is not computed: {reason}. model_type={model_type} field={name}")


def _number(fields: Mapping[str, Any], name: str, most: int = NUMBER_MAX, default: int | None = None) -> int:
    """A field that has to be a whole number; ``default`` stands for one that is absent or null."""
    value = fields.get(name)
    if value is None:
        if default is None:
            raise ConfigError(
                f"config.json has no {name}, which decides the size; save the whole configuration with transformers "
                "(AutoConfig.from_pretrained(NAME).save_pretrained(DIRECTORY)) and name that directory"
            )
        return default
    least = 1 if default is None else min(default, 1)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(f"config.json: expected {name} from {least} to {most}, got {str(value)[:60]!r}")
    return value


def _head_dim(fields: Mapping[str, Any], model_type: str, heads: int) -> int:
    if fields.get("head_dim") is not None or model_type in OWN_HEAD_DIM:
        return _number(fields, "head_dim")
    hidden = _number(fields, "hidden_size")
    if hidden % heads:
        raise ConfigError(
            "config.json has no head_dim, and hidden_size is no multiple of num_attention_heads: add head_dim. "
            f"hidden_size={hidden} num_attention_heads={heads}"
        )
    return hidden // heads


def _latent(fields: Mapping[str, Any], model_type: str) -> int:
    if model_type not in MLA_TYPES:
        known = ", ".join(sorted(MLA_TYPES))
        raise UnsupportedModel(
            f"kv_lora_rank says MLA, and vLLM is known to serve only these types so: {known}. model_type={model_type}"
        )
    return _number(fields, "kv_lora_rank") + _number(fields, "qk_rope_head_dim")


def _windows(fields: Mapping[str, Any], model_type: str, layers: int, notes: list[str]) -> tuple[int | None, ...]:
    """The window of each layer, None for those that attend to everything."""
    window = fields.get("sliding_window")
    if "sliding_window" not in fields and model_type in OWN_WINDOW:
        _number(fields, "sliding_window")
    if not window or fields.get("use_sliding_window") is False:
        window = None
    else:
        window = _number(fields, "sliding_window", 1 << 30)
    kinds = fields.get("layer_types")
    if isinstance(kinds, list) and kinds:
        return _listed_windows(kinds, window, layers, notes)
    if fields.get("attention_chunk_size"):
        notes.append(_CHUNKED)
    if window is None:
        return (None,) * layers
    if model_type in WINDOW_EVERYWHERE:
        return (window,) * layers
    if model_type in WINDOW_PATTERNS:
        name = "sliding_window_pattern" if "sliding_window_pattern" in fields else "_sliding_window_pattern"
        every = _number(fields, name, LAYERS_MAX, WINDOW_PATTERNS[model_type])
        return tuple(None if (number + 1) % max(every, 1) == 0 else window for number in range(layers))
    raise UnsupportedModel(
        f"sliding_window is {window}, and which layers it holds for is not known for this type; write layer_types into "
        "config.json, as transformers does when it saves the configuration "
        f"(AutoConfig.from_pretrained(NAME).save_pretrained(DIRECTORY)). model_type={model_type}"
    )


_CHUNKED: Final = "attention in chunks is cached with --disable-hybrid-kv-cache-manager only, as full attention"


def _listed_windows(kinds: list[Any], window: int | None, layers: int, notes: list[str]) -> tuple[int | None, ...]:
    if len(kinds) != layers:
        raise ConfigError(f"config.json: expected one of layer_types per layer. layers={layers} listed={len(kinds)}")
    result: list[int | None] = []
    for number, kind in enumerate(kinds):
        if kind == "sliding_attention" and window is None:
            raise ConfigError("config.json: layer_types has sliding_attention, and there is no sliding_window: add it")
        if kind not in ("full_attention", "sliding_attention", "chunked_attention"):
            raise UnsupportedModel(
                f"this model's KV is not computed: {STATE}, or others that are not known here. "
                f"layer={number} layer_type={str(kind)[:60]!r}"
            )
        result.append(window if kind == "sliding_attention" else None)
    if "chunked_attention" in kinds:
        notes.append(_CHUNKED)
    return tuple(result)


def _auto_dtype(config: Mapping[str, Any], text: Mapping[str, Any], notes: list[str]) -> str:
    """What vLLM makes of ``--dtype auto`` and ``--kv-cache-dtype auto``, on a device that has bfloat16."""
    quantization = config.get("quantization_config") or text.get("quantization_config")
    if isinstance(quantization, dict) and quantization.get("kv_cache_scheme"):
        notes.append("fp8: the checkpoint brings a scheme for its KV cache, which vLLM follows for auto")
        return "F8_E4M3"
    named = next(
        (str(of[name]) for of in (text, config) for name in ("dtype", "torch_dtype") if of.get(name) is not None), None
    )
    if named is None:
        notes.append("bf16: the file names no dtype; say --kv-cache-dtype if the weights are of another")
        return ASSUMED_DTYPE
    dtype = DTYPES.get(named.removeprefix("torch."))
    if dtype is None:
        known = ", ".join(DTYPES)
        raise ConfigError(f"config.json: expected a dtype of {known}, got {named[:60]!r}; say --kv-cache-dtype")
    if dtype == "F32":
        notes.append("bf16: vLLM casts float32 models for auto; say --kv-cache-dtype fp32 with --dtype float32")
        return ASSUMED_DTYPE
    return dtype
