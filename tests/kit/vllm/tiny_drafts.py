"""Small drafts for the tiny models: EAGLE and EAGLE3 heads, a model with an MTP layer, separate draft models.

Owns their files: seeded weights in the form that vLLM's loaders expect. A draft with random weights guesses nothing
right; one that has the model's own weights guesses everything, and is what acceptance is tested with. Called by tests
marked ``vllm`` only.
"""

import json
from pathlib import Path
from typing import Any, Final

from tests.kit.vllm.tiny_models import HEAD_STD, TEXT, WEIGHT_STD, build_kind

HIDDEN: Final = int(TEXT["hidden_size"])
INNER: Final = int(TEXT["intermediate_size"])
MTP_LAYER: Final = "model.mtp_layers.0."


def eagle_head(path: Path, model: Path, *, seed: int = 3) -> Path:
    """An EAGLE head of one layer for a Llama-like ``model``, written to ``path``."""
    return _head(path, model, seed, architecture="EagleLlamaForCausalLM", layer="layers.0.", features=2, is_third=False)


def eagle3_head(path: Path, model: Path, *, seed: int = 3) -> Path:
    """An EAGLE3 head, which reads three of the model's hidden states."""
    return _head(path, model, seed, architecture="LlamaForCausalLMEagle3", layer="midlayer.", features=3, is_third=True)


def _head(path: Path, model: Path, seed: int, *, architecture: str, layer: str, features: int, is_third: bool) -> Path:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int, std: float = WEIGHT_STD) -> Any:
        return torch.empty(*shape).normal_(0.0, std, generator=generator).to(torch.bfloat16)

    config = json.loads((model / "config.json").read_text())
    kv = config["num_key_value_heads"] * config["head_dim"]
    ones = torch.ones(HIDDEN, dtype=torch.bfloat16)
    width = 2 * HIDDEN if is_third else HIDDEN  # EAGLE3's attention sees embedding and feature side by side
    tensors = {
        "fc.weight": drawn(HIDDEN, features * HIDDEN),
        f"{layer}self_attn.q_proj.weight": drawn(HIDDEN, width),
        f"{layer}self_attn.k_proj.weight": drawn(kv, width),
        f"{layer}self_attn.v_proj.weight": drawn(kv, width),
        f"{layer}self_attn.o_proj.weight": drawn(HIDDEN, HIDDEN),
        f"{layer}mlp.gate_proj.weight": drawn(INNER, HIDDEN),
        f"{layer}mlp.up_proj.weight": drawn(INNER, HIDDEN),
        f"{layer}mlp.down_proj.weight": drawn(HIDDEN, INNER),
        f"{layer}post_attention_layernorm.weight": ones.clone(),
    }
    if config["model_type"] != "llama":  # the head is one, whatever it guesses for
        config = {name: config[name] for name in (*TEXT, "head_dim") if name in config} | {"model_type": "llama"}
    config |= {"num_hidden_layers": 1, "architectures": [architecture]}
    if is_third:
        config |= {"draft_vocab_size": TEXT["vocab_size"], "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
        norms = ("norm.weight", f"{layer}hidden_norm.weight", f"{layer}input_layernorm.weight")
        tensors |= {name: ones.clone() for name in norms}
        tensors["lm_head.weight"] = drawn(int(TEXT["vocab_size"]), HIDDEN, std=HEAD_STD)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def mimo(path: Path, models: Path) -> Path:
    """A MiMo: the tiny Qwen2 with an MTP layer, which is a copy of its last layer behind a random projection."""
    import torch
    from safetensors.torch import load_file, save_file

    source = build_kind(models, "qwen2")
    tensors = load_file(source / "model.safetensors")
    last = "model.layers.1."
    for name in [name for name in tensors if name.startswith(last)]:
        tensors[MTP_LAYER + name.removeprefix(last)] = tensors[name].clone()
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        tensors[f"{MTP_LAYER}{name}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(9)
    projection = torch.empty(HIDDEN, 2 * HIDDEN).normal_(0.0, WEIGHT_STD, generator=generator)
    tensors[f"{MTP_LAYER}input_proj.weight"] = projection.to(torch.bfloat16)
    config = json.loads((source / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def qwen3_next_mtp(path: Path, models: Path) -> Path:
    """The tiny Qwen3-Next with an MTP layer: a copy of the layer that attends, behind a random projection."""
    import torch
    from safetensors.torch import load_file, save_file

    source = build_kind(models, "qwen3_next")
    tensors = load_file(source / "model.safetensors")
    last = "model.layers.3."
    for name in [name for name in tensors if name.startswith(last)]:
        tensors["mtp.layers.0." + name.removeprefix(last)] = tensors[name].clone()
    for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):  # weights to which 1 is added
        tensors[f"mtp.{name}.weight"] = torch.zeros(HIDDEN, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(5)
    projection = torch.empty(HIDDEN, 2 * HIDDEN).normal_(0.0, WEIGHT_STD, generator=generator)
    tensors["mtp.fc.weight"] = projection.to(torch.bfloat16)
    config = json.loads((source / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path
