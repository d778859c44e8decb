"""What has to be known of model types to read their ``config.json``: a file leaves out what equals its class's default.

Tables only, for ``model_config``. Tests compare them with the classes of transformers, where that is installed.
"""

from collections.abc import Mapping
from typing import Final

DEFAULTS: Final[Mapping[str, Mapping[str, int]]] = {
    "gemma": {"head_dim": 256},
    "gemma2": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096},
    "gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096},
    "gpt_oss": {"num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": {"num_key_value_heads": 8},
    "qwen3": {"head_dim": 128},
    "qwen3_next": {"head_dim": 256},
}
"""Fields that the published files of well-known types leave out, with what the class fills in."""

ALL_HEADS: Final = frozenset(
    {"cohere", "granite", "gpt_neox", "llama", "olmo", "olmo2", "opt", "persimmon", "phi", "phi3"}
)
"""Types that have as many KV heads as attention heads where ``num_key_value_heads`` is left out."""

OWN_HEAD_DIM: Final = frozenset(
    {
        *(
            "afmoe",
            "axk1",
            "cohere2_moe",
            "cosmos3_edge_text",
            "cwm",
            "ernie4_5",
            "gemma3n_text",
            "glm",
            "glm4",
            "helium",
        ),
        *("higgs_audio_v2", "hrm_text", "hy_v3", "hy_v4", "inkling_text", "jetmoe", "laguna", "llama4_text", "mellum"),
        *("mimo_v2_flash", "minicpm3", "minimax_m2", "minimax_m3_vl_text", "ministral3", "muse_glimmer_assistant"),
        *("muse_glimmer_text", "openai_privacy_filter"),
        *("paddleocr_vl_text", "qwen2_5_omni_talker", "qwen3_vl_text", "seed_oss", "solar_open", "step3p5"),
        *("vaultgemma", "zaya"),
    }
)
"""Types whose ``head_dim``, where it is left out, is a number of their class and not hidden size by heads."""

OWN_WINDOW: Final = frozenset(
    {
        *(
            "afmoe",
            "cohere2",
            "cohere2_moe",
            "cohere_compass_text",
            "cwm",
            "exaone4",
            "exaone_moe",
            "gemma3n_text",
            "granite_swa",
        ),
        *("granitemoe_swa", "inkling_text", "laguna", "mellum", "mimo_v2_flash", "ministral", "modernbert", "olmo3"),
        *("muse_glimmer_assistant", "muse_glimmer_text", "openai_privacy_filter"),
        *("vaultgemma", "voxtral_realtime_text"),
    }
)
"""Types that have a window where ``sliding_window`` is left out."""

WINDOW_PATTERNS: Final[Mapping[str, int]] = {"gemma2": 2, "gemma3_text": 6}
"""Every so manieth layer has no window, where the file does not list ``layer_types``."""

WINDOW_EVERYWHERE: Final = frozenset({"ministral", "mistral", "mixtral", "phi3", "starcoder2"})
"""Types whose ``sliding_window`` holds for every layer."""

MLA_TYPES: Final = frozenset({"deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2", "pangu_ultra_moe"})
"""Types with a ``kv_lora_rank`` that vLLM serves as MLA: one latent per token and layer."""

STATE: Final = (
    "it has layers with a state (Mamba, linear attention, convolution) of a kind that this does not compute; once one "
    "is stored `tiered-kv ls` says what it takes"
)
OTHER_SHAPES: Final = "its layers keep KV of several shapes, or caches beside the KV, which this does not compute"

REFUSED_TYPES: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        (
            *("bamba", "falcon_h1", "falcon_mamba", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "mamba", "mamba2"),
            *("minimax", "nemotron_h", "qwen4_exp_text"),
            *("recurrent_gemma", "rwkv", "zamba", "zamba2"),
        ),
        STATE,
    ),
    **dict.fromkeys(
        (
            *("deepseek_v32", "deepseek_v4", "diffusion_gemma_text", "embedding_gemma2_text", "gemma4_text"),
            *("gemma4_unified_text", "glm_moe_dsa", "longcat_flash"),
        ),
        OTHER_SHAPES,
    ),
}
"""Types refused whatever their files say."""

REFUSED_FIELDS: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        (
            *("mamba_d_state", "mamba_d_conv", "mamba_d_ssm", "state_size", "ssm_cfg", "conv_L_cache"),
            *("linear_num_key_heads", "linear_conv_kernel_dim", "linear_attn_config", "full_attention_interval"),
            *("hybrid_override_pattern", "layers_block_type", "attn_layer_period", "attn_layer_indices"),
            *("attn_type_list", "rwkv_version", "lru_width", "block_types"),
        ),
        STATE,
    ),
    **dict.fromkeys(
        (
            *("index_topk", "index_head_dim", "compress_ratios", "global_head_dim", "num_global_key_value_heads"),
            *("attention_k_eq_v", "block_configs", "per_layer_config", "attn_config"),
            *("multi_query", "new_decoder_architecture", "num_kv_heads", "multi_query_group_num", "n_head_kv"),
            *("num_attention_groups", "hidden_size_per_head", "attention_head_dim"),
        ),
        OTHER_SHAPES,
    ),
    "cross_attention_layers": "cross-attention KV belongs to an image and not to the prompt's tokens; it is not cached",
}
"""Fields that stand for something else than one K and one V vector per token, layer and KV head."""
