"""What is read from config.json: layers, heads, windows, dtype; and what is refused rather than guessed."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.kit.samples.model_configs import GEMMA_3_27B_TEXT, KNOWN, RECURRENT
from tiered_kv.errors import ConfigError, UnsupportedModel
from tools.kv_size.model_config import read_config, shape_of

LLAMA = KNOWN["Llama-3.1-8B"]


def changed(name: str, **fields: Any) -> dict[str, Any]:
    return {**KNOWN[name], **fields}


def without(name: str, *fields: str) -> dict[str, Any]:
    return {field: value for field, value in KNOWN[name].items() if field not in fields}


def gemma(**fields: Any) -> dict[str, Any]:
    return {"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": {**GEMMA_3_27B_TEXT, **fields}}


def recurrent(name: str, **fields: Any) -> dict[str, Any]:
    return {**RECURRENT[name], **fields}


# -- shapes -----------------------------------------------------------------------------------------------------------


def test_grouped_heads_are_read_and_head_dim_is_worked_out() -> None:
    shape = shape_of(LLAMA)
    assert (len(shape.windows), set(shape.windows)) == (32, {None})
    assert (shape.kv_heads, shape.head_values, shape.dtype, shape.is_mla) == (8, 2 * 128, "BF16", False)
    assert shape.attention == "GQA, 8 KV heads of 128 values"
    assert shape.notes == ()


def test_without_kv_heads_every_attention_head_has_its_own() -> None:
    assert shape_of(without("Llama-3.1-8B", "num_key_value_heads")).kv_heads == 32
    assert shape_of(changed("Llama-3.1-8B", num_key_value_heads=1)).attention.startswith("MQA, one KV head")


def test_head_dim_of_the_file_wins_over_the_quotient() -> None:
    """Qwen3-30B-A3B has 32 heads of 128 values and a hidden size of 2048."""
    assert shape_of(KNOWN["Qwen3-30B-A3B"]).head_values == 2 * 128


def test_mla_keeps_one_latent_for_all_heads() -> None:
    shape = shape_of(KNOWN["DeepSeek-V3"])
    assert (shape.is_mla, shape.kv_heads, shape.head_values) == (True, 1, 512 + 64)
    assert "multi-token prediction" in shape.notes[0]


def test_windows_of_gemma_are_every_layer_but_each_sixth() -> None:
    shape = shape_of(gemma())
    assert shape.windows[:7] == (1024, 1024, 1024, 1024, 1024, None, 1024)
    assert (shape.windows.count(None), shape.windows.count(1024)) == (10, 52)
    assert shape.notes[0].startswith("of text_config")
    assert shape_of(gemma(sliding_window_pattern=2)).windows.count(None) == 31


def test_fields_that_gemma_leaves_out_are_those_of_its_class() -> None:
    """gemma-3-12b names no head_dim: it is 256, and not 3840 / 16."""
    text = {"model_type": "gemma3_text", "hidden_size": 3840, "num_attention_heads": 16, "num_hidden_layers": 48}
    shape = shape_of({"text_config": {**text, "num_key_value_heads": 8, "sliding_window": 1024}})
    assert shape.head_values == 2 * 256


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 4096}, {4096}),
        ({"model_type": "mistral"}, {4096}),
        ({"model_type": "mistral", "sliding_window": None}, {None}),
        ({"model_type": "mistral", "sliding_window": 0}, {None}),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}, {None}),
        ({"sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"] * 16}, {None, 64}),
    ],
)
def test_a_window_holds_where_the_type_or_the_list_says_so(fields: dict[str, Any], windows: set[int | None]) -> None:
    assert set(shape_of({**LLAMA, **fields}).windows) == windows


def test_layers_that_share_kv_count_once() -> None:
    shape = shape_of(changed("Llama-3.1-8B", num_kv_shared_layers=12))
    assert len(shape.windows) == 20 and "the last 12 layers" in shape.notes[0]


def test_attention_in_chunks_is_counted_as_full_attention_and_said() -> None:
    kinds = ["chunked_attention", "full_attention"] * 16
    shape = shape_of(changed("Llama-3.1-8B", layer_types=kinds, attention_chunk_size=8192))
    assert set(shape.windows) == {None} and "--disable-hybrid-kv-cache-manager" in shape.notes[0]


@pytest.mark.parametrize(
    ("name", "attending", "kind", "layers", "layer_bytes"),
    [
        ("Qwen3-Next-80B-A3B", 12, "gated delta nets", 36, 3 * 8192 * 2 + 32 * 128 * 128 * 2),
        ("Qwen3.6-27B", 16, "gated delta nets", 48, 3 * 10240 * 2 + 48 * 128 * 128 * 4),
        ("Granite-4.0-H-Small", 4, "Mamba 2", 36, 3 * (8192 + 2 * 128) * 2 + 128 * 64 * 128 * 2),
    ],
)
def test_layers_with_a_state_are_told_from_those_that_attend(name, attending, kind, layers, layer_bytes) -> None:
    shape = shape_of(RECURRENT[name])
    assert shape.windows == (None,) * attending and shape.recurrent is not None
    assert (shape.recurrent.kind, shape.recurrent.layers) == (kind, layers)
    assert shape.recurrent.layer_bytes(1) == layer_bytes
    assert shape_of(RECURRENT[name], "F8_E4M3").recurrent == shape.recurrent, "states are none of the KV's dtype"
    with pytest.raises(ConfigError, match="heads of recurrent layers evenly"):
        shape.recurrent.layer_bytes(5)


@pytest.mark.vllm
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", RECURRENT)
def test_states_are_as_large_as_vllm_makes_them(name: str, tp: int) -> None:
    import torch
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator, MambaStateShapeCalculator

    fields = RECURRENT[name].get("text_config", RECURRENT[name])
    if fields["model_type"] == "granitemoehybrid":
        inner, heads = fields["mamba_expand"] * fields["hidden_size"], fields["mamba_n_heads"]
        state = fields["mamba_d_state"], fields["mamba_d_conv"]
        shapes = MambaStateShapeCalculator.mamba2_state_shape(
            tp, inner, fields["mamba_n_groups"], heads, inner // heads, *state
        )
        dtypes = MambaStateDtypeCalculator.mamba2_state_dtype(torch.bfloat16, "auto", "auto")
    else:
        names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
        sizes = [fields[f"linear_{field}"] for field in names]
        shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(tp, *sizes)
        dtype = fields.get("mamba_ssm_dtype", "auto")
        dtypes = MambaStateDtypeCalculator.gated_delta_net_state_dtype(torch.bfloat16, "auto", dtype)
    expected = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))
    recurrent_layers = shape_of(RECURRENT[name]).recurrent
    assert recurrent_layers is not None and recurrent_layers.layer_bytes(tp) == expected


# -- dtypes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "dtype", "note"),
    [
        ({"torch_dtype": "float16"}, "F16", ""),
        ({"torch_dtype": "torch.bfloat16"}, "BF16", ""),
        ({"torch_dtype": None, "dtype": "float16"}, "F16", ""),
        ({"torch_dtype": "float32"}, "BF16", "casts float32"),
        ({"torch_dtype": None}, "BF16", "names no dtype"),
        ({"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}}, "F8_E4M3", "scheme"),
        ({"quantization_config": {"quant_method": "awq"}, "torch_dtype": "float16"}, "F16", ""),
    ],
)
def test_auto_takes_the_dtype_that_vllm_takes(fields: dict[str, Any], dtype: str, note: str) -> None:
    shape = shape_of(changed("Llama-3.1-8B", **fields))
    assert shape.dtype == dtype
    assert note in "".join(shape.notes) and bool(shape.notes) is bool(note)


def test_a_dtype_that_is_named_wins() -> None:
    assert shape_of(LLAMA, "F8_E4M3").dtype == "F8_E4M3"


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (changed("Llama-3.1-8B", layer_types=["linear_attention", "full_attention"] * 16), "linear attention"),
        (changed("Llama-3.1-8B", full_attention_interval=4), "field=full_attention_interval"),
        (changed("Llama-3.1-8B", mamba_d_state=128), "a state .Mamba"),
        (changed("Llama-3.1-8B", hybrid_override_pattern="M-M*"), "Mamba"),
        (changed("Llama-3.1-8B", is_encoder_decoder=True), "encoder-decoder"),
        (changed("Llama-3.1-8B", architectures=["BertForMaskedLM"]), "keeps no KV cache"),
        (changed("Llama-3.1-8B", cross_attention_layers=[3, 8]), "cross-attention"),
        (changed("Llama-3.1-8B", multi_query=True), "several shapes.*field=multi_query"),
        (changed("Llama-3.1-8B", v_head_dim=64), "v_head_dim"),
        (changed("Llama-3.1-8B", model_type="nemotron_h"), "a state .*model_type=nemotron_h"),
        (recurrent("Qwen3-Next-80B-A3B", layer_types=["linear_attention"] * 48), "recurrent layers only"),
        (changed("Llama-3.1-8B", model_type="gemma4_text"), "several shapes"),
        (changed("DeepSeek-V3", index_topk=2048), "field=index_topk"),
        (changed("DeepSeek-V3", model_type="minicpm3"), "kv_lora_rank says MLA.*deepseek_v3.*minicpm3"),
        (changed("Llama-3.1-8B", sliding_window=4096), "which layers it holds for.*layer_types.*model_type=llama"),
    ],
)
def test_what_is_not_cached_or_not_known_is_refused_by_name(config: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        shape_of(config)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "has no num_hidden_layers.*save_pretrained"),
        (without("Llama-3.1-8B", "num_attention_heads"), "has no num_attention_heads"),
        (without("Qwen2.5-7B", "num_key_value_heads"), "has no num_key_value_heads"),
        (changed("Llama-3.1-8B", model_type="glm4"), "has no head_dim"),
        (changed("Llama-3.1-8B", model_type="olmo3"), "has no sliding_window"),
        (without("Llama-3.1-8B", "hidden_size"), "has no hidden_size"),
        (changed("Llama-3.1-8B", num_key_value_heads=[8, 4]), r"expected num_key_value_heads from 1 .* got '\[8, 4\]'"),
        (changed("Llama-3.1-8B", num_key_value_heads=True), "got 'True'"),
        (changed("Llama-3.1-8B", num_hidden_layers=0), "expected num_hidden_layers from 1 to"),
        (changed("Llama-3.1-8B", num_hidden_layers=10**9), "expected num_hidden_layers"),
        (changed("Llama-3.1-8B", num_attention_heads=30), "no head_dim, and hidden_size is no multiple"),
        (changed("Llama-3.1-8B", torch_dtype="int4"), "expected a dtype of bfloat16.*--kv-cache-dtype"),
        (changed("Llama-3.1-8B", layer_types=["full_attention"]), "layers=32 listed=1"),
        (changed("Llama-3.1-8B", layer_types=["sliding_attention"] * 32), "no sliding_window"),
        (changed("DeepSeek-V3", qk_rope_head_dim=None), "has no qk_rope_head_dim"),
        (recurrent("Qwen3-Next-80B-A3B", linear_num_key_heads=None), "has no linear_num_key_heads"),
        (recurrent("Granite-4.0-H-Small", mamba_n_heads="many"), "expected mamba_n_heads"),
    ],
)
def test_a_field_that_is_missing_or_odd_is_named_with_what_was_expected(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        shape_of(config)


# -- the file ---------------------------------------------------------------------------------------------------------


def test_a_directory_or_its_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_config(str(tmp_path)) == read_config(str(tmp_path / "config.json")) == LLAMA


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "expected JSON"), (b"[1]", "expected a JSON object"), (b"[" * 100_000, "JSON"), (b"\xff", "expected JSON")],
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        read_config(str(tmp_path))


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-8B", "file:///x", "x" * 5000, "a\0b", "/dev/null", ""])
def test_what_is_no_file_is_said_and_nothing_is_fetched(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="^MODEL: "):
        read_config(name)
