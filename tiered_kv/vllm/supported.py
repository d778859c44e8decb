"""Refuses unsupported engines: configurations, kinds of KV.

Each refusal names its object and its reason. Both roles check configuration and KV cache groups
before any tensor exists, so that both refuse; the worker checks its attention layers, which no other role has. What is
served for certain is in docs/models.md. What vLLM itself has to have is checked in ``compat.py``.
"""

from collections.abc import Collection, Iterator, Sequence
from math import gcd
from typing import Any, Final

import vllm
from vllm import envs

from tiered_kv.errors import ConfigError, UnsupportedModel
from tiered_kv.vllm.compat import (
    DRAFTS,
    EVENTS,
    GROUP_FIELDS,
    OLDEST,
    SLEEP,
    SPEC_FIELDS,
    STATES,
    can_sleep,
    overwrites_scales,
    release,
    unknown_traits,
)
from tiered_kv.vllm.drafts import DRAFT_METHODS, has_drafts_kv
from tiered_kv.vllm.kv_groups import is_recurrent, tokens_per_state, window_tokens

DRAFTLESS_METHODS: Final = frozenset({"ngram", "ngram_gpu", "suffix"})
"""Speculation without a draft model of its own: no KV of other weights, and rejected tokens are only ever the last."""

SUPPORTED_SPECS: Final = frozenset({
    "FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec",
    "SlidingWindowMLASpec", "ChunkedLocalAttentionSpec", "CircularBufferSpec",
})  # fmt: skip
"""Exact class names: a subclass means other rules about which tokens a block holds (sinks, hidden states). The rules of
each are in ``kv_groups.py``; those of the second line were run in the engine simulator only (docs/models.md)."""

DRAFT_METHODS_WITH_STATES: Final = frozenset({"mtp"})
"""Methods whose draft is served with models that have recurrent layers."""

SPECS_BESIDE_DRAFTS: Final = frozenset({"FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec"})
"""Kinds of KV, of one state per token, beside which drafts are served."""

FIRST_VERSION_WITH_DRAFTS: Final = (0, 32)
"""vLLM before it was never run with a draft beside this connector."""

CPU_BACKEND: Final = "CPU_ATTN"

BACKENDS_VARYING_WITH_HITS: Final = frozenset({"FLASHINFER", "TRITON_MLA"})
"""For which vLLM turns its prefix cache off where batches may not matter, in its layers of attention and of MLA."""

GROUP_SPEC: Final = "UniformTypeKVCacheSpecs"
"""vLLM's spec of a group whose layers differ in page size; holds one spec per layer."""

REASONS: Final = {
    "CrossAttentionSpec": "cross-attention KV belongs to the encoder's input, not to the prompt's tokens",
    "EncoderOnlyAttentionSpec": "encoder layers keep no KV",
    "SinkFullAttentionSpec": "its layers write attention sinks into blocks that vLLM gives to requests, and vLLM 0.32 "
    "and 0.33 cannot make its block manager",
}


def features(vllm_config: Any, kv_cache_config: Any) -> set[str]:
    """What the engine has that relies on more of vLLM than other engines do."""
    events = vllm_config.kv_events_config
    has = {
        DRAFTS: has_drafts_kv(vllm_config),
        STATES: _has_states(kv_cache_config),
        EVENTS: events is not None and events.enable_kv_cache_events,
        SLEEP: can_sleep(vllm_config.model_config),
    }
    return {name for name, is_there in has.items() if is_there}


def check_supported(vllm_config: Any, chunk_tokens: int) -> None:
    """Refuse what cannot be right before any tensor exists.

    Speculative decoding is supported where it has no draft model (``DRAFTLESS_METHODS``), given that the scheduler side
    stores no token past ``num_tokens - 1``, and with the drafts of ``drafts.py``. Another draft's KV lies among the
    model's own, too, and nothing is known of when it is final.

    Raises:
        ConfigError: ``chunk_tokens`` does not fit.
        UnsupportedModel: The model or the way it is run is not supported; the message says which and why.
    """
    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    block = int(cache.block_size) * int(parallel.decode_context_parallel_size)
    if chunk_tokens <= 0 or chunk_tokens % block:
        raise ConfigError(
            "chunk_tokens must be a multiple of vLLM's block size. "
            f"chunk_tokens={chunk_tokens} block_size={block} nearest={-(-chunk_tokens // block) * block or block}"
        )
    if model.is_encoder_decoder:
        raise UnsupportedModel("encoder-decoder models are not supported: decoder KV depends on the encoder's input")
    _check_attention(model)
    if (pooler := getattr(model, "pooler_config", None)) is not None and not model.is_prefix_caching_supported:
        # Whatever --enable-prefix-caching says. vLLM 0.32 asks connectors all the same, and a hit ends the engine.
        if model.is_hybrid:
            raise UnsupportedModel("vLLM caches no prefixes of pooling models with recurrent layers")
        raise UnsupportedModel(
            "the pooling of this model needs all of a prompt's tokens computed in one step, and a hit leaves some out. "
            f"seq_pooling_type={pooler.seq_pooling_type} tok_pooling_type={pooler.tok_pooling_type}"
        )
    if (pcp := int(getattr(parallel, "prefill_context_parallel_size", 1))) > 1:
        raise UnsupportedModel(f"prefill context parallelism is not supported. prefill_context_parallel_size={pcp}")
    if (nodes := int(getattr(parallel, "nnodes_within_dp", getattr(parallel, "nnodes", 1)))) > 1:
        raise UnsupportedModel(f"ranks of one engine must share a machine and its memory. nodes={nodes}")
    if getattr(cache, "calculate_kv_scales", False):
        raise UnsupportedModel(
            "KV scales computed from the first batch differ between engine starts: calculate_kv_scales"
        )
    if getattr(getattr(vllm_config, "attention_config", None), "hisparse_config", None) is not None:
        raise UnsupportedModel("HiSparse keeps KV in a host pool of its own")
    returning = (model, getattr(vllm_config, "aux_output_config", None))  # of 0.30, and since
    if any(getattr(part, "enable_return_routed_experts", False) for part in returning):
        # vLLM 0.32 remembers them by block, for about as many as the GPU holds, and ends the engine where it has none.
        raise UnsupportedModel(
            "vLLM has no routed experts of tokens that it did not compute itself, and ends the engine where it needs "
            "them after a hit. Start it without --enable-return-routed-experts, or without the cache"
        )
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in DRAFTLESS_METHODS | DRAFT_METHODS:
        raise UnsupportedModel(
            "speculative decoding by this method is not supported: what it keeps among the model's KV is not known. "
            f"method={speculative.method} supported={','.join(sorted(DRAFTLESS_METHODS | DRAFT_METHODS))}"
        )


def _check_attention(model: Any) -> None:
    """Refuse models whose KV of a token is another one as an answer's than as a prompt's."""
    if (window := getattr(model, "rswa_window", None)) is not None:
        # Of Unlimited-OCR, which vLLM has no prefix cache for either. No spec tells: it keeps full attention's pages.
        raise UnsupportedModel(
            "generated tokens attend to a window, and the same tokens in a prompt to all: what was stored as an answer "
            f"would be wrong as a prompt. rswa_window={window}"
        )
    if getattr(model, "is_diffusion", False):
        raise UnsupportedModel(
            "a diffusion model writes many tokens at once and again, and which of them are final was never tried"
        )


def check_states(vllm_config: Any, kv_cache_config: Any) -> None:
    """Refuse ways to run a model with recurrent layers whose states could not be put together.

    Raises:
        UnsupportedModel: Its layers are spread over pipeline stages or contexts, prefill and decode are apart, it
            drafts by a method that was not tried with states, or vLLM itself computes wrong KV the way it is run.
    """
    if not _has_states(kv_cache_config):
        return
    parallel, role = vllm_config.parallel_config, vllm_config.kv_transfer_config.kv_role
    for name in ("pipeline_parallel_size", "decode_context_parallel_size"):
        if (size := int(getattr(parallel, name, 1))) > 1:
            raise UnsupportedModel(f"recurrent layers with {name} above 1 are not supported yet. {name}={size}")
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is not None and speculative.method not in DRAFT_METHODS_WITH_STATES:
        raise UnsupportedModel(
            "recurrent layers together with speculative decoding by this method are not supported yet. "
            f"method={speculative.method} supported={','.join(sorted(DRAFT_METHODS_WITH_STATES))}"
        )
    if role != "kv_both":
        raise UnsupportedModel(f"recurrent layers with prefill and decode apart are not supported yet. kv_role={role}")
    _check_partial_hits(vllm_config.cache_config, kv_cache_config)


def _check_partial_hits(cache: Any, kv_cache_config: Any) -> None:
    """Refuse what vLLM 0.32 and 0.33 do wrong without us, because it would be stored.

    Two requests of one step that its prefix cache continues inside the same block: the second one's copy of the block
    is taken from the first one's, before that is filled, unless every block's state is kept.
    """
    blocks = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    cached = [int(spec.block_size) for spec in blocks if getattr(spec, "prefix_cacheable", True)]
    unit = getattr(cache, "prefix_match_unit", None) or gcd(*cached)
    interval = getattr(cache, "prefix_cache_retention_interval", None)
    if interval is not None and any(is_recurrent(spec) and spec.block_size > unit for spec in blocks):
        raise UnsupportedModel(
            "vLLM 0.32 and 0.33 compute wrong KV for requests that its prefix cache continues inside one block in one "
            "step. Start vLLM without --prefix-match-unit, or with --prefix-cache-retention-interval None. "
            f"prefix_match_unit={unit} prefix_cache_retention_interval={interval}"
        )


def copies_blocks(vllm_config: Any, kv_cache_config: Any) -> bool:
    """Whether vLLM may fill a block with another's content before a forward pass: the states of recurrent layers, and
    hits of its prefix cache that end inside a block."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    unit = getattr(vllm_config.cache_config, "prefix_match_unit", None)
    return any(map(is_recurrent, specs)) or len({int(spec.block_size) for spec in specs} | {unit} - {None}) > 1


def check_drafts(vllm_config: Any, kv_cache_config: Any, version: str = vllm.__version__) -> None:
    """Refuse drafts of a kind, or beside a kind of KV, that was never run.

    Raises:
        UnsupportedModel: The message says which.
    """
    if not has_drafts_kv(vllm_config):
        return
    speculative, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    if release(version, OLDEST) < FIRST_VERSION_WITH_DRAFTS:
        first = ".".join(map(str, FIRST_VERSION_WITH_DRAFTS))
        raise _refusal(speculative, f"needs vLLM {first} or newer, observed={version}")
    for name in ("pipeline_parallel_size", "decode_context_parallel_size"):
        if (size := int(getattr(parallel, name, 1))) > 1:
            raise _refusal(speculative, f"was not tried with {name} above 1. {name}={size}")
    draft_ranks, ranks = _draft_ranks(speculative), int(parallel.tensor_parallel_size)
    if draft_ranks != ranks:
        raise _refusal(
            speculative,
            "was tried on the model's own ranks only. "
            f"draft_tensor_parallel_size={draft_ranks} tensor_parallel_size={ranks}",
        )
    if getattr(speculative, "parallel_drafting", False):
        raise _refusal(speculative, "drafts all its tokens at once (parallel_drafting), which was not tried")
    if getattr(speculative, "num_speculative_tokens_per_batch_size", None) is not None:
        raise _refusal(speculative, "may draft nothing in a step (num_speculative_tokens_per_batch_size)")
    if (kind := _mtp_kind(speculative)) is not None:
        raise _refusal(speculative, kind)
    for group in kv_cache_config.kv_cache_groups:
        kinds = getattr(group.kv_cache_spec, "kv_cache_specs", {"": group.kv_cache_spec}).values()
        if is_recurrent(group.kv_cache_spec):
            continue  # a draft has attention layers only; what of it goes with states is said by check_states
        for spec in kinds:
            if type(spec).__name__ not in SPECS_BESIDE_DRAFTS or tokens_per_state(spec) > 1:
                raise _refusal(speculative, f"was not tried beside this kind of KV. spec={type(spec).__name__}")


def _draft_ranks(speculative: Any) -> int:
    draft_parallel = speculative.draft_parallel_config
    return int(draft_parallel.tensor_parallel_size) if draft_parallel is not None else 1


def _mtp_kind(speculative: Any) -> str | None:
    """What is wrong with a model's own draft layers, if anything is."""
    if speculative.method != "mtp":
        return None
    if speculative.use_multi_module_mtp():
        return "of several modules takes several tokens ahead of each position, which is not supported yet"
    model_type = getattr(speculative.draft_model_config.hf_config, "model_type", None)
    if model_type == "gemma4_mtp":
        return "reads the model's own KV, which was not tried. model_type=gemma4_mtp"
    return None


def _refusal(speculative: Any, reason: str) -> UnsupportedModel:
    return UnsupportedModel(f"a draft of this kind {reason}. method={speculative.method}")


def _has_states(kv_cache_config: Any) -> bool:
    return any(is_recurrent(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups)


def check_groups(kv_cache_config: Any) -> None:
    """Refuse a model by its KV cache specs alone; both roles can do that before any tensor exists.

    Raises:
        UnsupportedModel: As for ``rank_pages``.
    """
    groups = kv_cache_config.kv_cache_groups
    for group in groups:
        _check_traits(group, group.layer_names, GROUP_FIELDS)
        if is_recurrent(group.kv_cache_spec):
            _check_recurrent(group.kv_cache_spec, group.layer_names, kv_cache_config)
            _check_traits(group.kv_cache_spec, group.layer_names)
            continue
        for spec in _layer_specs(group.kv_cache_spec):
            _check_spec(spec, group.layer_names)
            _check_traits(spec, group.layer_names)
        if len(windows := {window_tokens(spec) for spec in _layer_specs(group.kv_cache_spec)}) > 1:
            raise UnsupportedModel(f"layers of one KV cache group have different windows. windows={windows}")
        if getattr(group, "host_resident", False) or not getattr(group, "enable_kv_transfer", True):
            raise UnsupportedModel(
                f"vLLM marks this KV cache group as not transferable. layers={group.layer_names[:2]}"
            )
    if not groups:
        raise UnsupportedModel("the model has no KV cache")
    if all(is_recurrent(group.kv_cache_spec) for group in groups):
        raise UnsupportedModel("the model has recurrent layers only, and vLLM caches no prefixes of such")


def _check_recurrent(spec: Any, layer_names: Sequence[str], kv_cache_config: Any) -> None:
    where = f"first_layer={layer_names[0] if layer_names else None}"
    if (mode := spec.mamba_cache_mode) != "align":
        raise UnsupportedModel(
            "the states of recurrent layers are kept at no boundary that could be stored. Start vLLM with "
            f"--enable-prefix-caching and --mamba-cache-mode align. mamba_cache_mode={mode} {where}"
        )
    if int(getattr(kv_cache_config, "kv_tp_replicas", 1)) > 1 or getattr(spec, "tp_replicated", False):
        raise UnsupportedModel(f"states that only some of several equal ranks hold are not supported yet. {where}")


def _check_traits(described: Any, layer_names: Sequence[str], known: Collection[str] = SPEC_FIELDS) -> None:
    """Refuse a spec, or a group, that says what nobody here has read: it may be about which tokens a block holds."""
    if unknown := unknown_traits(described, known):
        raise UnsupportedModel(
            f"vLLM says of this KV cache what this version of tiered_kv does not know: {', '.join(unknown)}. "
            f"spec={type(described).__name__} first_layer={layer_names[0] if layer_names else None}"
        )


def _layer_specs(spec: Any) -> Iterator[Any]:
    if type(spec).__name__ == GROUP_SPEC:
        yield from spec.kv_cache_specs.values()
    else:
        yield spec


def _check_spec(spec: Any, layer_names: Sequence[str]) -> None:
    kind = type(spec).__name__
    where = f"spec={kind} first_layer={layer_names[0] if layer_names else None}"
    if kind not in SUPPORTED_SPECS:
        reason = REASONS.get(kind, f"supported are {', '.join(sorted(SUPPORTED_SPECS))}")
        raise UnsupportedModel(f"KV cache of this kind cannot be stored: {reason}. {where}")
    if getattr(spec, "non_causal", False) or getattr(spec, "non_causal_multi_token_decode", False):
        raise UnsupportedModel(f"attention is not causal, so a prefix's KV depends on what follows it. {where}")
    states = getattr(spec, "tokens_per_state", 1)
    if states != 1 and (kind != "MLAAttentionSpec" or states < 1 or spec.block_size % states):
        raise UnsupportedModel(
            f"one state per token, or in MLA several tokens per state of which a block holds whole ones, is supported. "
            f"tokens_per_state={states} block_size={spec.block_size} {where}"
        )


def check_layers(vllm_config: Any, kv_cache_config: Any) -> None:
    """Refuse layers that write elsewhere than into the pages of their tokens, or into loaded ones; call it in a worker.

    Raises:
        UnsupportedModel: vLLM's Triton backend with a scale per token and head: at the first forward pass of each layer
            it sets all scales to 1, and without CUDA graphs a request whose prefix was loaded is the first. Or vLLM's
            CPU backend with pages of narrower numbers than the model's: what a block holds lies in other blocks' pages.
            Or a backend behind whose hits vLLM's batch invariance does not hold.
    """
    layers = vllm_config.compilation_config.static_forward_context
    for group in kv_cache_config.kv_cache_groups:
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        for name in group.layer_names:
            spec, layer = specs.get(name, group.kv_cache_spec), layers.get(name)
            mode = getattr(spec, "kv_quant_mode", None)
            if getattr(mode, "is_per_token_head", False) and overwrites_scales(getattr(layer, "impl", None)):
                raise UnsupportedModel(
                    "this attention backend overwrites the scales of loaded KV at its first forward pass. Use "
                    f"another --kv-cache-dtype, for instance fp8. layer={name} mode={getattr(mode, 'name', mode)}"
                )
            _check_invariance(name, layer)
            if getattr(mode, "name", "NONE") == "NONE":
                _check_width(name, layer, spec, vllm_config.model_config.dtype)


def _check_invariance(name: str, layer: Any) -> None:
    """vLLM turns its own prefix cache off for these, and asks connectors all the same."""
    if not envs.VLLM_BATCH_INVARIANT or not hasattr(layer, "get_attn_backend"):
        return
    if (backend := layer.get_attn_backend().get_name()) in BACKENDS_VARYING_WITH_HITS:
        raise UnsupportedModel(
            "with VLLM_BATCH_INVARIANT an answer is to be the same in every batch, and by this attention backend it is "
            f"not behind a hit. Unset it, or choose another --attention-backend. layer={name} backend={backend}"
        )


def _check_width(name: str, layer: Any, spec: Any, computed: Any) -> None:
    """vLLM's CPU backend takes pages for pages of what it computes in: with wider numbers it leaves its own page."""
    held = getattr(spec, "dtype", computed)
    if not held.is_floating_point:  # pages of bytes, which other kernels fill
        return
    if layer is not None and held.itemsize != computed.itemsize and layer.get_attn_backend().get_name() == CPU_BACKEND:
        raise UnsupportedModel(
            "vLLM's CPU backend writes KV in the model's dtype, past the pages of this KV cache's. Start vLLM with "
            f"--kv-cache-dtype auto, or with a --dtype as wide. layer={name} kv_cache_dtype={held} dtype={computed}"
        )
