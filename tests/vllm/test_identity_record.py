"""The namespace's fields from real vLLM configurations, and what is refused before any tensor exists."""

import json
import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from transformers import GptOssConfig, LlamaConfig, Qwen3_5MoeConfig, Qwen3_5MoeTextConfig
from vllm.transformers_utils.config import get_config
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

from tests.kit.vllm.engine_identities import (
    BASE,
    CHANGES,
    SAME,
    Config,
    Identities,
    Settings,
    changed,
    engine_config,
    kv_config,
)
from tests.kit.vllm.tiny_models import YARN
from tiered_kv.errors import ConfigError, UnsupportedModel
from tiered_kv.keys.namespace import REQUIRED_FIELDS
from tiered_kv.vllm.identity.record import NULLS, attention_backends, base_fields, canonical_config
from tiered_kv.vllm.supported import check_drafts, check_supported


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory):
    return engine_config(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def identities(tmp_path_factory):
    return Identities(tmp_path_factory.mktemp("models"))


def test_fields_make_a_namespace_and_only_what_the_server_adds_is_missing(vllm_config):
    fields = base_fields(vllm_config, kv_config(), Settings())
    assert set(REQUIRED_FIELDS) - set(fields) == {"geometry", "kv_encoding", "epoch"}
    expected = {
        "weights": "dummy:0", "kv_dtype": "bfloat16", "model_dtype": "bfloat16", "attention_backend": "CPU_ATTN",
        "kv_layout": "LBHNC", "max_model_len": 512, "block_tokens": 32, "chunk_tokens": 256, "quantization": None,
        "kv_scales": "none", "tp": 1, "pp": 1, "dcp": 1, "model_runner": "v1",
        "vllm_version": "0.32",
    }  # fmt: skip
    assert {name: fields[name] for name in expected} == expected
    assert fields["text_config"]["rope_parameters"] == {"rope_theta": "10000.0", "rope_type": "default"}


def test_the_same_model_in_another_folder_is_the_same_namespace(identities, tmp_path):
    assert Identities(tmp_path).namespace(BASE) == identities.namespace(BASE)


@pytest.mark.parametrize("change", SAME)
def test_what_does_not_touch_kv_is_not_in_it(identities, change):
    identities.check_same(change)


@pytest.mark.parametrize("change", CHANGES)
def test_what_touches_kv_makes_another_namespace(identities, change):
    identities.check_apart(change)


def test_backend_is_not_guessed_where_there_are_no_layers(vllm_config):
    scheduler_side = changed(vllm_config, compilation_config={"static_forward_context": {}})
    with pytest.raises(ValueError, match="workers only"):
        attention_backends(scheduler_side, kv_config())


def test_config_becomes_plain_data():
    config = Config(
        torch_dtype=torch.float16,
        absent=None,
        factors=(1.0, 2, math.inf),
        nested={"_name_or_path": "x", "scale": 0.1, 3: True},
        names={"b", "a"},
        inner=Config(transformers_version="5", eps=1e-6),
        thing=object(),
    )
    assert canonical_config(config) == {
        "dtype": "float16",
        "factors": ["1.0", 2, "inf"],
        "nested": {"scale": "0.1", "<int> 3": True},
        "names": ["a", "b"],
        "inner": {"eps": "1e-06"},
        "thing": {"class": "builtins.object", "fields": {}},
        NULLS: ["absent"],
    }


def written_config(folder, of, change):
    """A config as vLLM reads it from a folder, whose JSON was changed by hand."""
    of.save_pretrained(folder)
    held = json.loads((folder / "config.json").read_text())
    change(held)
    (folder / "config.json").write_text(json.dumps(held))
    return get_config(str(folder), trust_remote_code=False)


@pytest.mark.parametrize(
    ("of", "part", "name"),
    [
        # vLLM: rope_parameters.get("truncate", True), and getattr(config, "norm_topk_prob", True).
        (GptOssConfig(rope_parameters=dict(YARN)), "rope_parameters", "truncate"),
        (Qwen3_5MoeTextConfig(), None, "norm_topk_prob"),
        (Qwen3_5MoeConfig(), "text_config", "norm_topk_prob"),
    ],
)
def test_null_of_a_field_that_no_class_declares_is_not_its_absence(tmp_path, of, part, name):
    def told(label, change):
        return canonical_config(written_config(tmp_path / label, of, lambda held: change(held[part] if part else held)))

    absent = told("absent", lambda held: held.pop(name, None))
    null = told("null", lambda held: held.update({name: None}))

    assert null == absent | {NULLS: [f"{part}.{name}" if part else name]}


def test_null_that_says_what_absence_says_changes_no_name(tmp_path):
    of = LlamaConfig()
    plain = written_config(tmp_path / "plain", of, lambda held: held.pop("head_dim"))
    nulls = {"head_dim": None, "prefix": None, "quantization_config": {"quant_method": "fp8", "ignored_layers": None}}
    full = written_config(tmp_path / "full", of, lambda held: held.update(nulls))

    expected = canonical_config(plain) | {"quantization_config": {"quant_method": "fp8"}}
    assert canonical_config(full) == expected
    assert NULLS not in expected


@pytest.mark.parametrize("chunk_tokens", [16, 250, 0])
def test_chunk_that_is_not_whole_blocks_is_refused_with_the_next_that_is(vllm_config, chunk_tokens):
    with pytest.raises(ConfigError, match=r"block_size=32 nearest=(32|256)$"):
        check_supported(vllm_config, chunk_tokens)


def test_chunk_must_be_whole_blocks_of_all_context_parallel_ranks(vllm_config):
    sharded = changed(vllm_config, parallel_config={"decode_context_parallel_size": 8})
    check_supported(sharded, 256)
    with pytest.raises(ConfigError, match="block_size=256"):
        check_supported(sharded, 128)


POOLING = {
    "is_encoder_decoder": False,
    "is_prefix_caching_supported": False,
    "pooler_config": SimpleNamespace(seq_pooling_type="MEAN", tok_pooling_type="ALL"),
}


@pytest.mark.parametrize(
    ("part", "fields", "message"),
    [
        ("model_config", {"is_encoder_decoder": True}, "encoder-decoder"),
        ("parallel_config", {"prefill_context_parallel_size": 2}, "prefill context"),
        ("parallel_config", {"nnodes": 2}, "share a machine"),
        ("cache_config", {"calculate_kv_scales": True}, "scales"),
        ("attention_config", {"hisparse_config": object()}, "HiSparse"),
        ("model_config", {"is_encoder_decoder": False, "enable_return_routed_experts": True}, "routed experts"),
        ("model_config", {**POOLING, "is_hybrid": True}, "no prefixes of pooling models with recurrent layers$"),
        ("model_config", {**POOLING, "is_hybrid": False}, "one step, .* seq_pooling_type=MEAN"),
        ("model_config", {"is_encoder_decoder": False, "rswa_window": 128}, "wrong as a prompt. rswa_window=128"),
        ("model_config", {"is_encoder_decoder": False, "is_diffusion": True}, "a diffusion model"),
        ("aux_output_config", {"enable_return_routed_experts": True}, "without --enable-return-routed-experts"),
    ],
)
def test_ways_to_run_that_cannot_be_right_are_refused(vllm_config, part, fields, message):
    # A property of the real one.
    value = SimpleNamespace(**fields) if part == "model_config" else fields
    with pytest.raises(UnsupportedModel, match=message):
        check_supported(changed(vllm_config, **{part: value}), 256)


def test_replicas_on_a_machine_each_are_supported(vllm_config):
    check_supported(
        changed(vllm_config, parallel_config={"nnodes": 2, "data_parallel_size": 2, "data_parallel_size_local": 1}), 256
    )


@pytest.mark.parametrize("method", ["medusa", "custom_class", "mlp_speculator", "dflash", "dspark"])
def test_speculation_by_an_unknown_method_is_refused(vllm_config, method):
    config = changed(vllm_config, speculative_config=SimpleNamespace(method=method))
    with pytest.raises(UnsupportedModel, match=f"method={method} supported=draft_model,eagle,eagle3,mtp,ngram,"):
        check_supported(config, 256)


class Speculative:
    """What the cache reads of vLLM's configuration of a draft."""

    def __init__(self, **fields):
        self.draft_parallel_config = self.draft_load_config = None
        self.num_speculative_tokens = 2
        vars(self).update(fields)

    def use_eagle_block_drop(self):
        return self.method != "draft_model"

    def use_multi_module_mtp(self):
        return getattr(self.draft_model_config, "has_several_modules", False)


def drafting(vllm_config, **fields):
    """The configuration with a draft, which has the model's own configuration."""
    given = {"method": "eagle", "draft_model_config": vllm_config.model_config} | fields
    return changed(vllm_config, speculative_config=Speculative(**given))


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "draft_model"])
def test_drafts_beside_full_attention_are_supported(vllm_config, method):
    config = drafting(vllm_config, method=method)
    check_supported(config, 256)
    check_drafts(config, kv_config(), "0.32.0")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"parallel_drafting": True}, "parallel_drafting"),
        ({"num_speculative_tokens_per_batch_size": [(1, 4, 2)]}, "num_speculative_tokens_per_batch_size"),
        (
            {"method": "mtp", "draft_model_config": SimpleNamespace(max_model_len=512, has_several_modules=True)},
            "several modules",
        ),
    ],
)
def test_drafts_that_were_never_run_are_refused(vllm_config, fields, message):
    with pytest.raises(UnsupportedModel, match=f"{message}.* method="):
        check_drafts(drafting(vllm_config, **fields), kv_config(), "0.32.0")


def test_drafts_are_refused_on_other_ranks_versions_and_kinds_of_kv(vllm_config):
    config = drafting(vllm_config)
    for version in ("0.31.2", "dev"):
        with pytest.raises(UnsupportedModel, match=r"needs vLLM 0\.32 or newer"):
            check_drafts(config, kv_config(), version)
    staged = changed(config, parallel_config={"pipeline_parallel_size": 2})
    with pytest.raises(UnsupportedModel, match="pipeline_parallel_size=2"):
        check_drafts(staged, kv_config(), "0.32.0")
    on_two = {"parallel_config": {"tensor_parallel_size": 2}}
    with pytest.raises(UnsupportedModel, match="draft_tensor_parallel_size=1 tensor_parallel_size=2"):
        check_drafts(changed(config, **on_two), kv_config(), "0.32.0")
    config_on_two = drafting(vllm_config, draft_parallel_config=SimpleNamespace(tensor_parallel_size=2))
    check_drafts(changed(config_on_two, **on_two), kv_config(), "0.32.0")


@pytest.mark.parametrize(
    ("kind", "fields", "is_served"),
    [
        (SlidingWindowSpec, {"num_kv_heads": 2, "head_size": 8, "sliding_window": 64}, True),
        (MLAAttentionSpec, {"num_kv_heads": 1, "head_size": 576}, True),
        (MLAAttentionSpec, {"num_kv_heads": 1, "head_size": 576, "tokens_per_state": 4}, False),
        (ChunkedLocalAttentionSpec, {"num_kv_heads": 2, "head_size": 8, "attention_chunk_size": 64}, False),
    ],
)
def test_drafts_are_served_beside_some_kinds_of_kv(vllm_config, kind, fields, is_served):
    spec = kind(block_size=32, dtype=torch.bfloat16, **fields)
    groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=["a"])])
    with nullcontext() if is_served else pytest.raises(UnsupportedModel, match=f"spec={kind.__name__}"):
        check_drafts(drafting(vllm_config), groups, "0.32.0")


def test_the_draft_is_a_field_of_its_own_and_only_where_there_is_one(vllm_config):
    plain = base_fields(vllm_config, kv_config(), Settings())
    guessing = changed(vllm_config, speculative_config=SimpleNamespace(method="ngram"))
    assert "draft" not in plain
    assert base_fields(guessing, kv_config(), Settings()) == plain, "n-grams change no KV"
    drafted = base_fields(drafting(vllm_config), kv_config(), Settings())
    assert {name: value for name, value in drafted.items() if name != "draft" and plain[name] != value} == {}
    assert drafted["draft"]["method"] == "eagle" and drafted["draft"]["weights"] == "dummy:0"


@pytest.mark.parametrize(
    ("fields", "is_same"),
    [
        ({"method": "eagle3"}, False),
        ({"kv_cache_dtype": "fp8"}, False),
        ({"disable_eagle_block_drop": True}, False),
        ({"use_heterogeneous_vocab": True}, False),
        ({"num_speculative_tokens": 5}, True),
        ({"rejection_sample_method": "block"}, True),
    ],
)
def test_what_changes_the_drafts_kv_is_in_it(vllm_config, fields, is_same):
    one = base_fields(drafting(vllm_config), kv_config(), Settings())
    other = base_fields(drafting(vllm_config, **fields), kv_config(), Settings())
    assert (one == other) is is_same


def test_speculation_without_a_draft_model_is_supported(vllm_config):
    for method in ("ngram", "ngram_gpu", "suffix"):
        check_supported(changed(vllm_config, speculative_config=SimpleNamespace(method=method)), 256)
