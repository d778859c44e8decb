"""Small Llama models with seeded weights, written as ordinary Hugging Face directories.

Owns the models that the tests and the demo run on a real vLLM: nothing is downloaded. The weights are drawn with a
standard deviation large enough that attention is selective, so the KV cache decides the tokens. (With vLLM's own dummy
weights it does not: a zeroed cache gives the same text, and an end-to-end test on them proves nothing.) The standard
deviation follows the width, ``weight_std * sqrt(hidden) = 1.28``: at twice that, the wide model's bfloat16 rounding
grows from layer to layer until batching alone turns tokens over (measured: 9 of 16 prompts).
Called by tests and by demo/run.py. Must not import vLLM. The only module of ``testing`` that imports torch.
"""

import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

FORMAT = 1
"""Part of what a built model is remembered by: raise it when the same parameters would give other weights."""

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")

_STAMP = "tiered_kv_model.json"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Extents of a Llama model.

    Attributes:
        weight_std: Standard deviation of every weight but the norms', which are 1.
        head_std: The same for the output projection alone. Larger values spread the logits, so that the best token
            leads the second by more than rounding can turn over.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    weight_std: float
    head_std: float
    max_position: int = 8192

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV one token takes in bfloat16."""
        return self.layers * self.kv_heads * self.head_dim * 2 * 2

    @property
    def parameters(self) -> int:
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        per_layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.layers * per_layer + 2 * self.vocab * self.hidden + self.hidden


TINY = ModelShape(
    layers=2, hidden=256, intermediate=512, heads=4, kv_heads=4, head_dim=64, vocab=1024, weight_std=0.08, head_std=0.25
)
"""Starts and answers in seconds: for tests."""

DEMO = ModelShape(
    layers=12,
    hidden=1024,
    intermediate=2816,
    heads=16,
    kv_heads=4,
    head_dim=64,
    vocab=8192,
    weight_std=0.04,
    head_std=0.125,
)
"""Big enough that recomputing a prompt of 3,000 tokens is felt on a laptop: for the demo."""

LLAMA_8B = ModelShape(
    layers=32,
    hidden=4096,
    intermediate=14336,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocab=32000,
    weight_std=0.02,
    head_std=0.02,
    max_position=40960,
)
"""What a GPU is bought for, 15 GB: for timings with vLLM's own dummy weights (``describe_model``), never built."""


def build_model(path: Path, *, seed: int = 0, shape: ModelShape = TINY) -> Path:
    """Write the model into the directory ``path`` unless the same one is there already; returns ``path``.

    A directory that is interrupted while being written is never taken for a model: its stamp is written last.
    """
    stamp = json.dumps({"format": FORMAT, "seed": seed, "shape": asdict(shape)}, sort_keys=True)
    stamp_file = path / _STAMP
    if stamp_file.is_file() and stamp_file.read_text() == stamp:
        return path
    path.mkdir(parents=True, exist_ok=True)
    stamp_file.unlink(missing_ok=True)
    describe_model(path, shape)
    _write_weights(path / "model.safetensors", _weights(seed, shape))
    _replace(stamp_file, stamp)
    return path


def describe_model(path: Path, shape: ModelShape) -> None:
    """Write all of a model but its weights into the directory ``path``, for vLLM's ``load_format="dummy"``.

    Enough to time an engine and to compare the bytes of its KV; what it answers depends on nothing.
    """
    path.mkdir(parents=True, exist_ok=True)
    _write(path / "config.json", _config(shape))
    _write(path / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "do_sample": False})
    _write(path / "tokenizer.json", _tokenizer(shape))
    _write(path / "tokenizer_config.json", _tokenizer_config(shape))


def _config(shape: ModelShape) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.max_position,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _tokenizer(shape: ModelShape) -> dict[str, object]:
    """One word per token id (``t17``), so that text and ids can be turned into each other by eye."""
    words = [*SPECIAL_TOKENS, *(f"t{i}" for i in range(len(SPECIAL_TOKENS), shape.vocab))]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": word, **flags} for i, word in enumerate(SPECIAL_TOKENS)],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(words)}, "unk_token": "<unk>"},
    }


def _tokenizer_config(shape: ModelShape) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": shape.max_position,
        "clean_up_tokenization_spaces": False,
    }


def _weights(seed: int, shape: ModelShape) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(rows: int, columns: int, std: float = shape.weight_std) -> torch.Tensor:
        return torch.empty(rows, columns).normal_(0.0, std, generator=generator).to(torch.bfloat16)

    ones = torch.ones(shape.hidden, dtype=torch.bfloat16)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    weights = {"model.embed_tokens.weight": normal(shape.vocab, shape.hidden)}
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.self_attn.q_proj.weight": normal(queries, shape.hidden),
            f"{prefix}.self_attn.k_proj.weight": normal(keys, shape.hidden),
            f"{prefix}.self_attn.v_proj.weight": normal(keys, shape.hidden),
            f"{prefix}.self_attn.o_proj.weight": normal(shape.hidden, queries),
            f"{prefix}.mlp.gate_proj.weight": normal(shape.intermediate, shape.hidden),
            f"{prefix}.mlp.up_proj.weight": normal(shape.intermediate, shape.hidden),
            f"{prefix}.mlp.down_proj.weight": normal(shape.hidden, shape.intermediate),
            f"{prefix}.input_layernorm.weight": ones.clone(),
            f"{prefix}.post_attention_layernorm.weight": ones.clone(),
        }
    weights["model.norm.weight"] = ones.clone()
    weights["lm_head.weight"] = normal(shape.vocab, shape.hidden, shape.head_std)
    return weights


def _write(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _write_weights(path: Path, weights: dict[str, torch.Tensor]) -> None:
    """As ``_replace`` does: an engine may be reading what another process has just built."""
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        save_file(weights, os.path.join(directory, path.name), metadata={"format": "pt"})
        os.replace(os.path.join(directory, path.name), path)


def _replace(path: Path, text: str) -> None:
    """Write through a temporary name: two processes may build the same model at once."""
    descriptor, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    os.replace(name, path)
