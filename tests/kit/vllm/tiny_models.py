"""Small models of the kinds vLLM serves, with seeded weights, written as ordinary Hugging Face directories.

Owns the models of the end-to-end tests beside the Llama of ``tiered_kv.testing.model``, which ships with the package.
transformers gives the names and shapes of each kind's tensors; every value is drawn here, with a standard deviation
large enough that the KV cache decides the tokens (the tests of a model begin with a load that brings nothing, and ask
for another answer). Called by tests marked ``vllm`` only; transformers and torch are imported when a model is built.
"""

import fcntl
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

FORMAT: Final = 1
"""Part of what a built model is remembered by: raise it when the same kind would give other files."""

WINDOW: Final = 128
WIDE_WINDOW: Final = 600
"""Tokens a layer with a sliding window attends to: half a chunk, and more than two."""

IMAGE_SIDE: Final = 112
IMAGE_TOKENS: Final = 16
"""What the images of the multimodal model are scaled to, in pixels, and the tokens one of them takes."""

SPECIAL_WORDS: Final = {
    1020: "<image>",
    1021: "<fake_token_around_image>",
    1022: "<global-img>",
    1023: "<end_of_utterance>",
}
IMAGE_ID: Final = 1020

WEIGHT_STD: Final = 0.08
HEAD_STD: Final = 0.25
BIAS_STD: Final = 0.02

_STAMP: Final = "tiered_kv_model.json"

# Sizes as those of the Llama.
TEXT: Final[Mapping[str, Any]] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

YARN: Final = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
}


def _text(without: tuple[str, ...] = (), **fields: Any) -> dict[str, Any]:
    return {name: value for name, value in TEXT.items() if name not in without} | fields


def _alternating(layers: int, window: int = WINDOW) -> dict[str, Any]:
    """Layers with a window and layers without, in turn: two KV-cache groups."""
    kinds = ["sliding_attention", "full_attention"] * (layers // 2)
    return {"num_hidden_layers": layers, "sliding_window": window, "layer_types": kinds}


def _qwen2(transformers: Any) -> Any:
    return transformers.Qwen2Config(**_text(without=("head_dim",)))


def _qwen3(transformers: Any) -> Any:
    return transformers.Qwen3Config(**_text())


def _mistral(transformers: Any) -> Any:
    return transformers.MistralConfig(**_text(sliding_window=WINDOW))


def _gemma3(transformers: Any) -> Any:
    return transformers.Gemma3TextConfig(**_text(query_pre_attn_scalar=64, **_alternating(4)))


def _gemma3_wide(transformers: Any) -> Any:
    return transformers.Gemma3TextConfig(**_text(query_pre_attn_scalar=64, **_alternating(4, WIDE_WINDOW)))


def _gpt_oss(transformers: Any) -> Any:
    """Mixture of experts, attention sinks, every other layer with a window."""
    fields = _text(rope_parameters=dict(YARN), num_local_experts=4, num_experts_per_tok=2, **_alternating(4))
    return transformers.GptOssConfig(**fields)


def _deepseek_v2(transformers: Any) -> Any:
    """MLA: one latent of 576 values per token, the only size vLLM's CPU kernel takes. Both layers are dense.

    With YaRN like the real ones: vLLM 0.32's CPU kernel for plain rotary embeddings takes the strides of MLA's queries
    and keys for those of a matrix, so that a token's KV depends on its place in the batch.
    """
    latent = {
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
    }
    experts = {
        "first_k_dense_replace": 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
    }
    routing = {"n_shared_experts": 1, "topk_method": "greedy", "n_group": 1, "topk_group": 1}
    fields = _text(
        without=("head_dim",), num_key_value_heads=4, rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}
    )
    return transformers.DeepseekV2Config(**fields, **latent, **experts, **routing)


def _mamba2(transformers: Any) -> Any:
    """No attention at all: a state per request."""
    fields = {
        name: TEXT[name] for name in ("vocab_size", "hidden_size", "bos_token_id", "eos_token_id", "pad_token_id")
    }
    sizes = {"num_hidden_layers": 2, "num_heads": 8, "head_dim": 64, "state_size": 16, "n_groups": 1, "expand": 2}
    return transformers.Mamba2Config(**fields, **sizes, tie_word_embeddings=False)


def _lfm2(transformers: Any) -> Any:
    """A layer that convolves over a state, then one that attends."""
    fields = _text(without=("head_dim", "rms_norm_eps"), layer_types=["conv", "full_attention"])
    # vLLM asks for names that transformers' own class no longer has.
    sizes = {
        "conv_dim": TEXT["hidden_size"],
        "block_dim": TEXT["hidden_size"],
        "block_ff_dim": TEXT["intermediate_size"],
    }
    return transformers.Lfm2Config(**fields, **sizes, block_auto_adjust_ff_dim=False)


def _qwen3_next(transformers: Any) -> Any:
    """Three layers of gated delta nets, then one that attends. vLLM's CPU kernel wants heads of 64 and an expert."""
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    return transformers.Qwen3NextConfig(
        **_text(num_hidden_layers=4, rms_norm_eps=1e-6, head_dim=64),
        **heads,
        linear_value_head_dim=64,
        **experts,
        shared_expert_intermediate_size=128,
    )


def _qwen3_5(transformers: Any) -> Any:
    """As Qwen3-Next, without experts. vLLM imports torchvision for it."""
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64}
    fields = _text(num_hidden_layers=4, rms_norm_eps=1e-6)
    return transformers.Qwen3_5TextConfig(**fields, **heads, linear_value_head_dim=64)


_MAMBA2: Final = {
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_d_state": 32,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 256,
}


def _granite4(transformers: Any) -> Any:
    """Two layers of Mamba 2, one that attends, one of Mamba 2."""
    kinds = ["mamba", "mamba", "attention", "mamba"]
    fields = _text(without=("head_dim",), num_hidden_layers=4, layer_types=kinds, position_embedding_type="rope")
    experts = {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 512}
    return transformers.GraniteMoeHybridConfig(**fields, **experts, **_MAMBA2)


def _falcon_h1(transformers: Any) -> Any:
    """Mamba 2 and attention side by side in every layer."""
    return transformers.FalconH1Config(**_text(), **_MAMBA2, mamba_d_ssm=512)


def _nemotron_h(transformers: Any) -> Any:
    """Mamba 2, MLP, attention, MLP: layers that have nothing to store among them."""
    sizes = {"mamba_num_heads": 8, "mamba_head_dim": 64, "ssm_state_size": 32, "n_groups": 1, "conv_kernel": 4}
    fields = _text(without=("rms_norm_eps",), num_hidden_layers=4, hybrid_override_pattern="M-*-")
    return transformers.NemotronHConfig(**fields, **sizes, expand=2, chunk_size=256, layer_norm_epsilon=1e-5)


def _idefics3(transformers: Any) -> Any:
    """Images through a small encoder into a Llama; chosen because its processor needs no torchvision."""
    vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"image_size": IMAGE_SIDE, "patch_size": 14}
    return transformers.Idefics3Config(
        text_config=_text(model_type="llama", architectures=["LlamaForCausalLM"], dtype="bfloat16"),
        vision_config=vision,
        image_token_id=IMAGE_ID,
        scale_factor=2,
        tie_word_embeddings=False,
        pad_token_id=0,
    )


KINDS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mistral": _mistral,
    "gemma3": _gemma3,
    "gemma3_wide": _gemma3_wide,
    "gpt_oss": _gpt_oss,
    "deepseek_v2": _deepseek_v2,
    "mamba2": _mamba2,
    "lfm2": _lfm2,
    "qwen3_next": _qwen3_next,
    "qwen3_5": _qwen3_5,
    "granite4": _granite4,
    "falcon_h1": _falcon_h1,
    "nemotron_h": _nemotron_h,
    "idefics3": _idefics3,
}


def build_kind(models: Path, kind: str, *, seed: int = 0) -> Path:
    """Write the model of this kind below ``models`` unless it is there already; returns its directory."""
    models.mkdir(parents=True, exist_ok=True)
    with (models / f"{kind}.lock").open("w") as lock:  # test files run two at a time
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _build_kind(models / kind, kind, seed)


def _build_kind(path: Path, kind: str, seed: int) -> Path:
    import transformers

    config = KINDS[kind](transformers)
    content = {"format": FORMAT, "seed": seed, "config": config.to_dict(), "transformers": transformers.__version__}
    stamp, stamp_file = json.dumps(content, sort_keys=True, default=str), path / _STAMP
    if stamp_file.is_file() and stamp_file.read_text() == stamp:
        return path
    path.mkdir(parents=True, exist_ok=True)
    stamp_file.unlink(missing_ok=True)
    _model(transformers, config, seed).save_pretrained(path)
    if kind == "idefics3":
        from tiered_kv.testing.model import TINY, build_model

        _write_processor(path, like=build_model(path.parent / "tiny", shape=TINY))
    stamp_file.write_text(stamp)
    return path


def _model(transformers: Any, config: Any, seed: int) -> Any:
    import torch

    family = transformers.AutoModelForImageTextToText if hasattr(config, "vision_config") else None
    model = (family or transformers.AutoModelForCausalLM).from_config(config, dtype=torch.bfloat16)
    # Gemma, Qwen3-Next and Qwen3.5 add 1 to the weight of a norm, the latter two not to that of their delta nets.
    adds_one = config.model_type.startswith(("gemma", "qwen3_next", "qwen3_5"))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in sorted(model.named_parameters()):
            if "norm" in name and tensor.dim() == 1 and not name.endswith("bias"):
                tensor.fill_(0.0 if adds_one and "linear_attn.norm" not in name else 1.0)
            elif tensor.dim() > 1:
                tensor.normal_(0.0, HEAD_STD if name.startswith("lm_head") else WEIGHT_STD, generator=generator)
            elif name.endswith("A_log"):  # decays that forget slowly, so that a state matters for long
                tensor.uniform_(0.0, 1.0, generator=generator)
            elif name.endswith("dt_bias"):
                tensor.uniform_(-2.0, 0.5, generator=generator)
            elif name.endswith(("bias", "sinks")):
                tensor.normal_(0.0, BIAS_STD, generator=generator)
    return model


def _write_processor(path: Path, *, like: Path) -> None:
    """Image processor of the multimodal model, and the tokenizer of the model in ``like`` with the words for images."""
    tokenizer: dict[str, Any] = json.loads((like / "tokenizer.json").read_text())
    words = {SPECIAL_WORDS.get(number, word): number for word, number in tokenizer["model"]["vocab"].items()}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["model"]["vocab"] = words
    tokenizer["added_tokens"] += [{"id": number, "content": word, **flags} for number, word in SPECIAL_WORDS.items()]
    image = {
        "image_processor_type": "Idefics3ImageProcessorPil",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"longest_edge": IMAGE_SIDE},
        "max_image_size": {"longest_edge": IMAGE_SIDE},
        "do_image_splitting": False,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "resample": 1,
        "do_pad": True,
    }
    files: dict[str, dict[str, Any]] = {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": json.loads((like / "tokenizer_config.json").read_text()),
        "preprocessor_config.json": image,
        "processor_config.json": {"processor_class": "Idefics3Processor", "image_seq_len": IMAGE_TOKENS},
    }
    for name, content in files.items():
        (path / name).write_text(json.dumps(content, indent=2) + "\n")
