"""LoRA adapters: with seeded weights for the tiny Llama, as PEFT writes them, and files alone for tests of identity."""

import json
from pathlib import Path
from typing import Any, Final

RANK: Final = 8
STD: Final = 0.1
"""Of both factors: with ``alpha = 2 * RANK`` an adapter moves its layers about as much as their own weights spread."""


def write_adapter(folder: Path, *, seed: int) -> Path:
    """Write an adapter of all attention projections into ``folder``, which is returned; equal seeds, equal files."""
    import torch
    from safetensors.torch import save_file

    from tiered_kv.testing.model import TINY

    generator = torch.Generator().manual_seed(seed)
    queries, keys = TINY.heads * TINY.head_dim, TINY.kv_heads * TINY.head_dim
    sizes = {
        "q_proj": (TINY.hidden, queries),
        "k_proj": (TINY.hidden, keys),
        "v_proj": (TINY.hidden, keys),
        "o_proj": (queries, TINY.hidden),
    }
    weights = {}
    for layer in range(TINY.layers):
        for name, (inputs, outputs) in sizes.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for factor, shape in (("lora_A", (RANK, inputs)), ("lora_B", (outputs, RANK))):
                values = torch.empty(shape).normal_(0.0, STD, generator=generator).to(torch.bfloat16)
                weights[f"{prefix}.{factor}.weight"] = values
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(sizes),
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, str(folder / "adapter_model.safetensors"), metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder


def adapter_files(folder: Path, seed: int) -> Path:
    """Make ``folder`` with an adapter's files that no model could apply; it is returned; equal seeds, equal files."""
    import numpy as np
    from safetensors.numpy import save_file

    folder.mkdir()
    values = np.random.default_rng(seed).standard_normal((4, 8), dtype=np.float32)
    save_file({"q_proj.lora_A.weight": values}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"r": 4}')
    return folder


def lora(name: str, path: Path, number: int = 1) -> Any:
    """What vLLM calls an adapter in a request."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, number, str(path))
