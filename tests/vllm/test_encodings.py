"""What a page's bytes mean where name, dtype and shape are equal, and layers that vLLM itself writes into."""

from types import SimpleNamespace

import pytest
import torch
from vllm import _custom_ops, platforms
from vllm.model_executor.layers.fused_moe.config import (
    FUSED_MOE_UNQUANTIZED_CONFIG,
    mxfp4_mxfp8_moe_quant_config,
    mxfp4_w4a16_moe_quant_config,
)
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl
from vllm.v1.kv_cache_interface import KVQuantMode

from tests.kit.vllm.engine_identities import LAYER, attention_layer, changed, engine_config, kv_config, with_layers
from tiered_kv.config import Config
from tiered_kv.errors import UnsupportedModel
from tiered_kv.server.protocol import NAME_CHARS_MAX
from tiered_kv.vllm.identity import record as identity
from tiered_kv.vllm.identity.record import attention_backends, page_encodings, with_experts
from tiered_kv.vllm.identity.rows import row_identity
from tiered_kv.vllm.supported import check_layers

OTHER = "model.layers.1.self_attn.attn"


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory):
    return engine_config(tmp_path_factory.mktemp("model"))


def two_layers():
    """One KV cache group of two layers."""
    config = kv_config()
    config.kv_cache_groups[0].layer_names.append(OTHER)
    return config


def encoding(vllm_config, **attributes):
    return page_encodings(with_layers(vllm_config, {LAYER: attention_layer("CPU_ATTN", **attributes)}), kv_config())[
        LAYER
    ]


def test_instructions_that_vllm_chooses_for_this_processor_are_told(vllm_config, monkeypatch):
    """AMX packs keys and values in tiles, the vector code does not: vLLM's own choice, on two processors."""
    told = []
    for has_amx in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda has_amx=has_amx: has_amx)
        monkeypatch.setattr(cpu_attn.current_platform, "get_cpu_architecture", lambda: platforms.CpuArchEnum.X86)
        told.append(encoding(vllm_config, isa=_get_attn_isa(torch.bfloat16, 32, 64)))
    assert told == ["CPU_ATTN cpu amx", "CPU_ATTN cpu vec"]


def test_backends_are_told_layer_by_layer_where_a_sorted_set_has_one_name(vllm_config):
    kv = two_layers()
    first, second = attention_layer("FLASH_ATTN"), attention_layer("TRITON_ATTN")
    one = with_layers(vllm_config, {LAYER: first, OTHER: second})
    swapped = with_layers(vllm_config, {LAYER: second, OTHER: first})
    assert attention_backends(one, kv) == attention_backends(swapped, kv)
    assert page_encodings(one, kv) == {LAYER: "FLASH_ATTN cpu", OTHER: "TRITON_ATTN cpu"}
    assert page_encodings(swapped, kv) == {LAYER: "TRITON_ATTN cpu", OTHER: "FLASH_ATTN cpu"}


def test_rows_of_layers_that_swapped_their_encodings_have_other_names(vllm_config):
    """``--kv-cache-dtype-skip-layers 0`` or ``1``: rows of equal length, of which another half is FP8."""
    kv, settings = two_layers(), Config.from_mapping({"storage_uri": "file:///unused", "chunk_tokens": 32})
    plain, fp8 = attention_layer("CPU_ATTN"), attention_layer("CPU_ATTN", kv_cache_dtype="fp8_e4m3")
    said = [
        row_identity(with_layers(vllm_config, {LAYER: first, OTHER: second}), kv, settings, {}, ())
        for first, second in ((plain, fp8), (fp8, plain), (plain, fp8), (plain, plain))
    ]
    assert not any(one.refusal for one in said)
    assert said[0].fields == said[2].fields and len({one.fields for one in said}) == 3


def test_rows_of_pipeline_stages_are_refused_by_name(vllm_config):
    """Each stage says layers of its own, and "workers of one engine disagree" tells a user nothing."""
    settings = Config.from_mapping({"storage_uri": "file:///unused", "chunk_tokens": 32})
    staged = changed(vllm_config, parallel_config={"pipeline_parallel_size": 2})
    assert "pipeline_parallel_size=2" in row_identity(staged, kv_config(), settings, {}, ()).refusal


def test_plain_dtypes_are_left_to_the_page(vllm_config):
    assert {encoding(vllm_config, kv_cache_dtype=name) for name in ("auto", "bfloat16")} == {"CPU_ATTN cpu"}
    assert encoding(vllm_config, kv_cache_dtype="fp8_e4m3") == "CPU_ATTN cpu fp8_e4m3 float8_e4m3fn"
    assert encoding(vllm_config, kv_cache_dtype="turboquant_k8v4") == "CPU_ATTN cpu turboquant_k8v4"


class Rocm(platforms.interface.Platform):
    """What the cache asks of vLLM's ROCm platform, which cannot be imported without that hardware."""

    _enum = platforms.PlatformEnum.ROCM
    flavour = torch.float8_e4m3fnuz

    @classmethod
    def fp8_dtype(cls):
        return cls.flavour


def test_rocm_tells_its_flavour_of_fp8_and_its_shuffle(vllm_config, monkeypatch):
    monkeypatch.setattr(identity.platforms, "_current_platform", Rocm())
    older = encoding(vllm_config, kv_cache_dtype="fp8")
    monkeypatch.setattr(Rocm, "flavour", torch.float8_e4m3fn)
    newer = encoding(vllm_config, kv_cache_dtype="fp8")
    monkeypatch.setenv("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "1")
    shuffled = encoding(vllm_config, kv_cache_dtype="fp8")
    assert older == "CPU_ATTN rocm fp8 float8_e4m3fnuz"
    assert newer == "CPU_ATTN rocm fp8 float8_e4m3fn"
    assert shuffled == "CPU_ATTN rocm fp8 float8_e4m3fn shuffled"


def triton_layer():
    """A layer of vLLM's own class of implementation; nothing of it is run."""
    return attention_layer("TRITON_ATTN", impl=object.__new__(TritonAttentionImpl))


@pytest.mark.parametrize("mode", [mode for mode in KVQuantMode if mode.is_per_token_head], ids=lambda mode: mode.name)
def test_scales_that_vllm_overwrites_after_a_load_are_refused(vllm_config, mode):
    layers = with_layers(vllm_config, {LAYER: triton_layer()})
    with pytest.raises(UnsupportedModel, match=f"overwrites the scales.*layer={LAYER} mode={mode.name}"):
        check_layers(layers, kv_config(kv_quant_mode=mode))


def test_a_page_that_vllm_filled_at_the_first_forward_pass_has_lost_its_scales():
    """Why it is refused: vLLM's own code, over a page that a load has just filled."""
    impl = object.__new__(TritonAttentionImpl)
    page = torch.full((1, 1, 4, 2 * (8 + 4)), 7, dtype=torch.int8)
    impl._ensure_scale_caches(page)
    assert not torch.equal(page, torch.full_like(page, 7))


def test_other_quantised_kv_and_other_backends_are_taken(vllm_config):
    triton, other = (with_layers(vllm_config, {LAYER: layer}) for layer in (triton_layer(), attention_layer("X")))
    check_layers(triton, kv_config())
    check_layers(triton, kv_config(kv_quant_mode=KVQuantMode.FP8_PER_TENSOR))
    check_layers(other, kv_config(kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD))


@pytest.mark.parametrize("backend", ["FLASHINFER", "TRITON_MLA"])
def test_a_backend_whose_answers_a_hit_may_change_is_refused_where_batches_may_not_matter(
    vllm_config, monkeypatch, backend
):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    layers = {LAYER: attention_layer("FLASH_ATTN"), OTHER: attention_layer(backend)}
    varying = with_layers(vllm_config, layers)
    with pytest.raises(UnsupportedModel, match=f"VLLM_BATCH_INVARIANT .* layer={OTHER} backend={backend}"):
        check_layers(varying, two_layers())
    check_layers(varying, kv_config())
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    check_layers(varying, two_layers())


def cpu_pages(dtype, *, block):
    """Pages that vLLM's CPU kernel writes to for one block of float32 keys and values."""
    keys, values = (torch.zeros(8, 2, 32, 64, dtype=dtype) for _ in range(2))
    new = torch.ones(32, 2, 64)
    slots = torch.arange(32 * block, 32 * (block + 1))
    _custom_ops.cpu_attn_reshape_and_cache(new, new, keys, values, slots, "vec")
    return [page for page in range(8) if keys[page].any()]


def test_the_cpu_backend_leaves_the_pages_of_its_block_where_these_are_narrower():
    """Why it is refused: vLLM's own kernel. It reads there, too: an answer is right until another block is written."""
    assert cpu_pages(torch.float32, block=1) == [1]
    assert cpu_pages(torch.bfloat16, block=1) == [2, 3]


def test_pages_narrower_than_what_the_cpu_backend_computes_are_refused(vllm_config):
    cpu = changed(with_layers(vllm_config, {LAYER: attention_layer("CPU_ATTN")}), model_config={"dtype": torch.float32})
    with pytest.raises(UnsupportedModel, match=f"layer={LAYER} kv_cache_dtype=torch.bfloat16 dtype=torch.float32"):
        check_layers(cpu, kv_config())
    check_layers(cpu, kv_config(dtype=torch.float32))
    check_layers(cpu, kv_config(dtype=torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR))
    triton = changed(cpu, compilation_config={"static_forward_context": {LAYER: triton_layer()}})
    check_layers(triton, kv_config())


def test_generation_of_the_gpu_counts_where_it_chooses_a_precision(monkeypatch):
    hopper = platforms.interface.DeviceCapability(9, 0)
    kind = type(platforms.current_platform)
    monkeypatch.setattr(kind, "get_device_capability", classmethod(lambda cls, device_id=0: hopper))
    plain, quantised = SimpleNamespace(quantization=None), SimpleNamespace(quantization="mxfp4")
    assert identity._capability(plain, kv_config()) is None
    assert identity._capability(quantised, kv_config()) == "9.0"
    assert identity._capability(plain, kv_config(kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)) == "9.0"


def experts(activations):
    """A MoE layer of vLLM with MXFP4 weights, whose inputs are quantised to this or, ``None``, are not."""
    config = mxfp4_mxfp8_moe_quant_config if activations == "mxfp8" else mxfp4_w4a16_moe_quant_config
    scale = torch.ones(1)
    method = SimpleNamespace(moe_quant_config=config(w1_scale=scale, w2_scale=scale))
    return SimpleNamespace(routed_experts=SimpleNamespace(quant_method=method))


def test_what_the_inputs_of_quantised_experts_are_rounded_to_is_told(vllm_config):
    """Of the same weights vLLM computes W4A16 in an engine that takes LoRA and W4A8 in one that does not."""
    told = {
        activations: with_experts(
            with_layers(
                vllm_config, {LAYER: attention_layer("FLASH_ATTN"), "model.layers.0.mlp": experts(activations)}
            ),
            {LAYER: "FLASH_ATTN cuda"},
        )[LAYER]
        for activations in ("mxfp8", None)
    }
    assert told == {
        "mxfp8": "FLASH_ATTN cuda experts:SimpleNamespace:mxfp8,mxfp8,mxfp4,mxfp4",
        None: "FLASH_ATTN cuda experts:SimpleNamespace:-,-,mxfp4,mxfp4",
    }


def test_experts_that_are_not_quantised_say_nothing(vllm_config):
    plain = SimpleNamespace(
        routed_experts=SimpleNamespace(quant_method=SimpleNamespace(moe_quant_config=FUSED_MOE_UNQUANTIZED_CONFIG))
    )
    layers = {LAYER: attention_layer("FLASH_ATTN"), "model.layers.0.mlp": plain, "other": SimpleNamespace()}
    assert with_experts(with_layers(vllm_config, layers), {LAYER: "FLASH_ATTN cuda"}) == {LAYER: "FLASH_ATTN cuda"}


def test_many_kinds_of_experts_have_one_digest_that_fits_a_message(vllm_config):
    kinds = {f"mlp{i}": experts("mxfp8") for i in range(9)}
    for i, layer in enumerate(kinds.values()):
        method = layer.routed_experts.quant_method
        layer.routed_experts.quant_method = type(f"Method{i}", (SimpleNamespace,), {})(**vars(method))
    text = with_experts(with_layers(vllm_config, kinds), {LAYER: "FLASH_ATTN cuda"})[LAYER]
    assert text.startswith("FLASH_ATTN cuda experts:") and len(text) <= NAME_CHARS_MAX
