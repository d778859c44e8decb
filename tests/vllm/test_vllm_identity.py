"""The namespace's fields from real vLLM configurations, and what is refused before any tensor exists."""

import copy
import logging
import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from tiered_kv.errors import ConfigError, UnsupportedModel
from tiered_kv.keys.namespace import REQUIRED_FIELDS, Namespace
from tiered_kv.vllm import identity
from tiered_kv.vllm.identity import attention_backends, base_fields, canonical_config, check_supported

LAYER = "model.layers.0.self_attn.attn"


@dataclass(frozen=True)
class Settings:
    chunk_tokens: int = 256
    model_id: str | None = None


def engine_config(folder, **arguments):
    """What an engine started with these arguments works with, as a worker sees it after the model was loaded."""
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=256, architectures=["LlamaForCausalLM"], dtype="bfloat16",
    )  # fmt: skip
    config.save_pretrained(folder)
    defaults = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 512, "block_size": 32}
    vllm_config = EngineArgs(model=str(folder), **defaults | arguments).create_engine_config()
    layer = SimpleNamespace(get_attn_backend=lambda: CPUAttentionBackend)
    vllm_config.compilation_config.static_forward_context[LAYER] = layer
    return vllm_config


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory):
    return engine_config(tmp_path_factory.mktemp("model"))


def kv_config(layout="LBHNC", **spec):
    fields = {"block_size": 32, "num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16} | spec
    group = KVCacheGroupSpec([LAYER], FullAttentionSpec(**fields))
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[group], kv_cache_layout=layout)


def namespace(vllm_config, kv_cache_config=None, settings=Settings()):
    fields = base_fields(vllm_config, kv_cache_config or kv_config(), settings)
    return Namespace.from_fields(fields | {"geometry": [], "epoch": 0})


def changed(vllm_config, part, **fields):
    """A copy of the configuration with some fields of one part set, unchecked."""
    result = copy.copy(vllm_config)
    inner = copy.copy(getattr(vllm_config, part))
    for name, value in fields.items():
        object.__setattr__(inner, name, value)
    object.__setattr__(result, part, inner)
    return result


def test_fields_make_a_namespace_and_only_geometry_and_epoch_are_missing(vllm_config):
    fields = base_fields(vllm_config, kv_config(), Settings())
    assert set(REQUIRED_FIELDS) - set(fields) == {"geometry", "epoch"}
    expected = {
        "weights": "dummy:0", "kv_dtype": "bfloat16", "model_dtype": "bfloat16", "attention_backend": "CPU_ATTN",
        "kv_layout": "LBHNC", "max_model_len": 512, "block_tokens": 32, "chunk_tokens": 256, "quantization": None,
        "kv_scales": "none", "tp": 1, "pp": 1, "dcp": 1, "model_runner": "v1",
    }  # fmt: skip
    assert {name: fields[name] for name in expected} == expected
    assert fields["text_config"]["rope_parameters"] == {"rope_theta": "10000.0", "rope_type": "default"}
    namespace(vllm_config)


def test_the_same_model_in_another_folder_is_the_same_namespace(vllm_config, tmp_path):
    assert namespace(engine_config(tmp_path)) == namespace(vllm_config)


def test_settings_that_do_not_touch_kv_are_not_in_it(vllm_config, tmp_path):
    other = engine_config(
        tmp_path, num_gpu_blocks_override=17, max_num_seqs=3, enforce_eager=True, enable_prefix_caching=False,
        hf_overrides={"eos_token_id": 5, "use_cache": False, "initializer_range": 0.5},
    )  # fmt: skip
    assert namespace(other) == namespace(vllm_config)


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_model_len": 256},
        {"dtype": "float32"},
        {"seed": 3},
        {"hf_overrides": {"rope_parameters": {"rope_theta": 20000.0, "rope_type": "default"}}},
        {"hf_overrides": {"rms_norm_eps": 1e-5}},
        {"hf_overrides": {"unknown_new_field": 1}},
    ],
)
def test_arguments_that_touch_kv_are_in_it(vllm_config, tmp_path, arguments):
    assert namespace(engine_config(tmp_path, **arguments)) != namespace(vllm_config)


@pytest.mark.parametrize(
    ("part", "fields"),
    [
        ("parallel_config", {"tensor_parallel_size": 2}),
        ("parallel_config", {"pipeline_parallel_size": 2}),
        ("parallel_config", {"decode_context_parallel_size": 2}),
        ("parallel_config", {"decode_context_parallel_size": 2, "cp_kv_cache_interleave_size": 16}),
        ("cache_config", {"cache_dtype": "fp8_e5m2"}),
        ("model_config", {"quantization": "fp8"}),
        ("model_config", {"quantization_config": {"group_size": 64}}),
        ("model_config", {"hf_config": LlamaConfig(hidden_size=64)}),
    ],
)
def test_each_way_to_run_a_model_is_a_namespace_of_its_own(vllm_config, part, fields):
    assert namespace(changed(vllm_config, part, **fields)) != namespace(vllm_config)


def test_layout_spec_chunk_size_and_model_id_are_in_it(vllm_config):
    variants = [
        namespace(vllm_config),
        namespace(vllm_config, kv_config(layout="LBNHC")),
        namespace(vllm_config, kv_config(block_size=64)),
        namespace(vllm_config, kv_config(dtype=torch.float16)),
        namespace(vllm_config, settings=Settings(chunk_tokens=512)),
        namespace(vllm_config, settings=Settings(model_id="mine")),
    ]
    assert len({variant.digest for variant in variants}) == len(variants)


def test_explicit_kv_dtype_that_auto_resolves_to_is_the_same(vllm_config):
    explicit = changed(vllm_config, "cache_config", cache_dtype="bfloat16")
    assert namespace(explicit) == namespace(vllm_config)


def test_backend_is_not_guessed_where_there_are_no_layers(vllm_config):
    scheduler_side = changed(vllm_config, "compilation_config", static_forward_context={})
    with pytest.raises(ValueError, match="workers only"):
        attention_backends(scheduler_side, kv_config())


class _Config:
    def __init__(self, **fields):
        self.fields = fields

    def to_dict(self):
        return dict(self.fields)


def test_config_becomes_plain_data():
    config = _Config(
        torch_dtype=torch.float16,
        absent=None,
        factors=(1.0, 2, math.inf),
        nested={"_name_or_path": "x", "scale": 0.1, 3: True},
        names={"b", "a"},
        inner=_Config(transformers_version="5", eps=1e-6),
        thing=object(),
    )
    assert canonical_config(config) == {
        "dtype": "float16",
        "factors": ["1.0", 2, "inf"],
        "nested": {"scale": "0.1", "3": True},
        "names": ["a", "b"],
        "inner": {"eps": "1e-06"},
        "thing": "object",
    }


@pytest.fixture
def logged():
    """Messages of the module's logger; vLLM's loggers do not pass them on to where caplog listens."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    identity.logger.addHandler(handler)
    yield messages
    identity.logger.removeHandler(handler)


@pytest.mark.parametrize("version", ["0.30.0", "0.31.2", "0.32.0", "0.32.1+cpu"])
def test_proven_versions_start_silently(vllm_config, logged, version):
    check_supported(vllm_config, 256, version)
    assert not logged


def test_untested_version_starts_with_a_warning(vllm_config, logged):
    check_supported(vllm_config, 256, "0.33.0rc1")
    assert logged == ["vLLM 0.33.0rc1 is untested with tiered_kv. proven=>=0.30,<0.33"]


@pytest.mark.parametrize("version", ["0.29.0", "0.34.0", "1.0.0", "0.3.4", "dev"])
def test_other_versions_are_refused(vllm_config, version):
    with pytest.raises(ConfigError, match=r">=0\.30,<0\.34"):
        check_supported(vllm_config, 256, version)


@pytest.mark.parametrize("chunk_tokens", [16, 250, 0])
def test_chunk_that_is_not_whole_blocks_is_refused_with_the_next_that_is(vllm_config, chunk_tokens):
    with pytest.raises(ConfigError, match=r"block_size=32 nearest=(32|256)$"):
        check_supported(vllm_config, chunk_tokens)


def test_chunk_must_be_whole_blocks_of_all_context_parallel_ranks(vllm_config):
    sharded = changed(vllm_config, "parallel_config", decode_context_parallel_size=8)
    check_supported(sharded, 256)
    with pytest.raises(ConfigError, match="block_size=256"):
        check_supported(sharded, 128)


@pytest.mark.parametrize(
    ("part", "fields", "message"),
    [
        ("model_config", {"is_encoder_decoder": True}, "encoder-decoder"),
        ("parallel_config", {"prefill_context_parallel_size": 2}, "prefill context"),
        ("parallel_config", {"nnodes": 2}, "share a machine"),
        ("cache_config", {"calculate_kv_scales": True}, "scales"),
        ("attention_config", {"hisparse_config": object()}, "HiSparse"),
    ],
)
def test_ways_to_run_that_cannot_be_right_are_refused(vllm_config, part, fields, message):
    config = changed(vllm_config, part, **fields) if part != "model_config" else copy.copy(vllm_config)
    if part == "model_config":  # a property of the real one
        object.__setattr__(config, part, SimpleNamespace(**fields))
    with pytest.raises(UnsupportedModel, match=message):
        check_supported(config, 256)


@pytest.mark.parametrize("method", ["eagle3", "mtp", "draft_model", "medusa", "custom_class"])
def test_speculation_with_a_draft_model_is_refused(vllm_config, method):
    config = copy.copy(vllm_config)
    object.__setattr__(config, "speculative_config", SimpleNamespace(method=method))
    with pytest.raises(UnsupportedModel, match=f"method={method} supported=ngram,"):
        check_supported(config, 256)


def test_speculation_without_a_draft_model_is_supported(vllm_config):
    config = copy.copy(vllm_config)
    for method in ("ngram", "ngram_gpu", "suffix"):
        object.__setattr__(config, "speculative_config", SimpleNamespace(method=method))
        check_supported(config, 256)
