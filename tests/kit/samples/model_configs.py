"""What the published config.json of known models says of their KV: the values the sizes are worked out from.

Only fields that matter here are kept. docs/sizing.md has a row for each of ``KNOWN``; tests compare every figure.
"""

from typing import Any, Final

GEMMA_3_27B_TEXT: Final[dict[str, Any]] = {
    "model_type": "gemma3_text",
    "hidden_size": 5376,
    "num_attention_heads": 32,
    "num_hidden_layers": 62,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "sliding_window": 1024,
}


def _plain(model_type: str, sizes: tuple[int, int, int, int], **more: Any) -> dict[str, Any]:
    """Hidden size, attention heads, KV heads and layers of a model in bfloat16."""
    hidden, heads, kv_heads, layers = sizes
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": layers,
        "torch_dtype": "bfloat16",
        **more,
    }


DELTA_NETS: Final[dict[str, Any]] = {
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}

RECURRENT: Final[dict[str, dict[str, Any]]] = {
    "Qwen3-Next-80B-A3B": _plain("qwen3_next", (2048, 16, 2, 48), linear_num_value_heads=32, **DELTA_NETS),
    "Qwen3.6-27B": {
        "model_type": "qwen3_5",
        "text_config": _plain(
            "qwen3_5_text", (5120, 24, 4, 64), linear_num_value_heads=48, mamba_ssm_dtype="float32", **DELTA_NETS
        ),
    },
    "Granite-4.0-H-Small": _plain(
        "granitemoehybrid",
        (4096, 32, 8, 40),
        layer_types=(["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4,
        mamba_expand=2,
        mamba_d_conv=4,
        mamba_d_state=128,
        mamba_n_groups=1,
        mamba_n_heads=128,
    ),
}
"""Models with recurrent layers, which have a table of their own."""

KNOWN: Final[dict[str, dict[str, Any]]] = {
    "Llama-3.1-8B": _plain("llama", (4096, 32, 8, 32)),
    "Llama-3.1-70B": _plain("llama", (8192, 64, 8, 80)),
    "Qwen2.5-7B": _plain("qwen2", (3584, 28, 4, 28), sliding_window=131072, use_sliding_window=False),
    "Qwen3-8B": _plain("qwen3", (4096, 32, 8, 36), head_dim=128, sliding_window=None),
    "Qwen3-30B-A3B": _plain("qwen3_moe", (2048, 32, 4, 48), head_dim=128, sliding_window=None),
    "Mistral-7B-v0.3": _plain("mistral", (4096, 32, 8, 32), sliding_window=None),
    "Mixtral-8x7B-v0.1": _plain("mixtral", (4096, 32, 8, 32), sliding_window=None),
    "Gemma-3-27B": {"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": GEMMA_3_27B_TEXT},
    "gpt-oss-120b": {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "num_hidden_layers": 36,
        "head_dim": 64,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
    },
    "DeepSeek-V3": _plain("deepseek_v3", (7168, 128, 128, 61), kv_lora_rank=512, qk_rope_head_dim=64)
    | {"qk_nope_head_dim": 128, "v_head_dim": 128, "num_nextn_predict_layers": 1},
}
