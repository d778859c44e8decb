"""The sizes that `tools.kv_size` tells are those of vLLM's own specs and of the pages a worker registers.

No engine is started: vLLM's configuration classes read the same config.json, its specs give the page sizes.
"""

import json

import pytest
import torch

from tests.kit.samples.model_configs import KNOWN
from tests.kit.vllm.starting import models_are_inspected_here
from tiered_kv.chunks.geometry import ChunkGeometry
from tiered_kv.vllm.kv_groups import CacheGroups
from tiered_kv.vllm.kv_layout import rank_pages
from tools.kv_size.model_config import shape_of
from tools.kv_size.model_types import (
    ALL_HEADS,
    DEFAULTS,
    MLA_TYPES,
    OWN_HEAD_DIM,
    OWN_WINDOW,
    REFUSED_TYPES,
    WINDOW_PATTERNS,
)
from tools.kv_size.sizing import LAYER_NAME, Run, geometry_of

pytestmark = pytest.mark.vllm

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}


@pytest.mark.parametrize("name", KNOWN)
def test_vllm_reads_the_same_heads_and_layers(name, tmp_path):
    """Of a model for images the language model alone: the rest of its file is not kept here."""
    from vllm.config import ModelConfig, ParallelConfig

    config = KNOWN[name].get("text_config", KNOWN[name])
    shape = shape_of(config)
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [ARCHITECTURES[shape.model_type]]}))
    with models_are_inspected_here():
        theirs = ModelConfig(model=str(tmp_path), skip_tokenizer_init=True, max_model_len=2048)
    assert theirs.get_total_num_hidden_layers() == len(shape.windows)
    assert theirs.get_num_kv_heads(ParallelConfig()) == shape.kv_heads
    assert theirs.get_head_size() * (1 if shape.is_mla else 2) == shape.head_values
    assert theirs.use_mla is shape.is_mla


@pytest.mark.parametrize(("block", "windows"), [(16, (None, 100)), (32, (100, None)), (16, (None, None)), (64, (500,))])
def test_a_chunk_is_the_one_that_a_worker_registers(block, windows):
    """Specs of vLLM, tensors of their sizes, and what the connector makes of both."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

    names = [LAYER_NAME.format(number) for number in range(len(windows))]
    sizes = {"block_size": block, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
    specs = [SlidingWindowSpec(**sizes, sliding_window=w) if w else FullAttentionSpec(**sizes) for w in windows]
    of_kind = {}
    for name, spec, window in zip(names, specs, windows, strict=True):
        of_kind.setdefault(window, ([], spec))[0].append(name)
    groups = [KVCacheGroupSpec(layers, spec) for layers, spec in of_kind.values()]
    config = KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=groups)
    tensors = {name: torch.zeros(4, 2, block, 128, dtype=torch.bfloat16) for name in names}
    pages = rank_pages(tensors, config, CacheGroups.of(config, 256))
    theirs = ChunkGeometry(block, 256, (tuple(page for of_group in pages for page in of_group),))
    shape = shape_of(
        {
            "model_type": "llama",
            "num_hidden_layers": len(windows),
            "num_attention_heads": 4,
            "head_dim": 64,
            "num_key_value_heads": 2,
            "torch_dtype": "bfloat16",
            "sliding_window": next((w for w in windows if w), None),
            "layer_types": ["sliding_attention" if w else "full_attention" for w in windows],
        }
    )
    ours = geometry_of(shape, Run(block_tokens=block))
    assert ours.data_bytes == theirs.data_bytes
    assert {p.layer: ours.stored_blocks(p) * p.page_bytes for p in ours.ranks[0]} == {
        p.layer: theirs.stored_blocks(p) * p.page_bytes for p in theirs.ranks[0]
    }
    assert ours.ranks[0][0].page_bytes == specs[0].page_size_bytes


@pytest.mark.parametrize("model_type", DEFAULTS)
def test_defaults_are_those_of_transformers(model_type):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    theirs = CONFIG_MAPPING[model_type]()
    assert {name: getattr(theirs, name) for name in DEFAULTS[model_type]} == DEFAULTS[model_type]


@pytest.mark.parametrize("model_type", WINDOW_PATTERNS)
def test_patterns_of_windows_are_those_of_transformers(model_type):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    theirs = CONFIG_MAPPING[model_type](num_hidden_layers=13, sliding_window=64)
    fields = {"model_type": model_type, "num_hidden_layers": 13, "sliding_window": 64, "hidden_size": 64}
    assert [w is None for w in shape_of(fields).windows] == [kind == "full_attention" for kind in theirs.layer_types]


LAYERS, HEADS, QUOTIENT = 4, 40, 48


def class_defaults():
    """What classes of transformers make of a file that has sizes and heads only, by model type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from vllm.model_executor.models.registry import ModelRegistry

    served = " ".join(ModelRegistry.get_supported_archs()).lower()
    for model_type in CONFIG_MAPPING:
        if model_type.removesuffix("_text").replace("_", "") not in served or model_type in REFUSED_TYPES:
            continue
        try:
            made = CONFIG_MAPPING[model_type](
                hidden_size=QUOTIENT * HEADS, num_attention_heads=HEADS, num_hidden_layers=LAYERS
            )
            if made.num_attention_heads == HEADS and not getattr(made, "is_encoder_decoder", False):
                yield model_type, made
        except Exception:  # noqa: BLE001, S112 - classes that name their fields in another way, which files show
            continue


def field(made, name):
    try:
        return getattr(made, name, None)
    except Exception as exc:  # noqa: BLE001 - a class of transformers says that it differs by layer
        return type(exc).__name__


def test_no_type_that_vllm_serves_has_a_default_that_would_be_guessed_wrong():
    """A type that is new to transformers fails here: add it to the tables of ``tools.kv_size.model_types``."""
    wrong = []
    for model_type, made in class_defaults():
        known = DEFAULTS.get(model_type, {})
        head_dim, window = field(made, "head_dim"), field(made, "sliding_window")
        if head_dim not in (None, QUOTIENT) and "head_dim" not in known and model_type not in OWN_HEAD_DIM | MLA_TYPES:
            wrong.append((model_type, "head_dim", head_dim))
        if window and "sliding_window" not in known and model_type not in OWN_WINDOW:
            wrong.append((model_type, "sliding_window", window))
        if model_type in ALL_HEADS and getattr(made, "num_key_value_heads", HEADS) not in (None, HEADS):
            wrong.append((model_type, "num_key_value_heads", made.num_key_value_heads))
    assert not wrong, " ".join(map(str, wrong))
