"""Refuses unsupported engines: versions of vLLM, configurations, kinds of KV.

Each refusal names its object and its reason. Both roles check version, configuration and KV cache groups
before any tensor exists, so that both refuse; the worker checks its attention layers, which no other role has. What is
served for certain is in docs/models.md and docs/versions.md.
"""

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import vllm
from vllm.v1.core.sched import output as sched_output

from tiered_kv.errors import ConfigError, UnsupportedModel
from tiered_kv.vllm.drafts import DRAFT_METHODS, DRAFT_METHODS_WITH_STATES
from tiered_kv.vllm.kv_groups import is_recurrent, window_tokens

logger = logging.getLogger("vllm." + __name__)

FIRST_VERSION: Final = (0, 30)
UNTESTED_FROM: Final = (0, 33)
REFUSED_FROM: Final = (0, 34)
"""From ``UNTESTED_FROM`` on versions start with a warning, until they are refused. Of those before it CI runs the
oldest and the newest; what lies between was run by hand (docs/versions.md)."""

DRAFTLESS_METHODS: Final = frozenset({"ngram", "ngram_gpu", "suffix"})
"""Speculation without a draft model of its own: no KV of other weights, and rejected tokens are only ever the last."""

SUPPORTED_SPECS: Final = frozenset({
    "FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec",
    "SlidingWindowMLASpec", "ChunkedLocalAttentionSpec", "CircularBufferSpec",
})  # fmt: skip
"""Exact class names: a subclass means other rules about which tokens a block holds (sinks, hidden states). The rules of
each are in ``kv_groups.py``; those of the second line were run in the engine simulator only (docs/models.md)."""

GROUP_SPEC: Final = "UniformTypeKVCacheSpecs"
"""vLLM's spec of a group whose layers differ in page size; holds one spec per layer."""

REASONS: Final = {
    "CrossAttentionSpec": "cross-attention KV belongs to the encoder's input, not to the prompt's tokens",
    "EncoderOnlyAttentionSpec": "encoder layers keep no KV",
    "SinkFullAttentionSpec": "its layers write attention sinks into blocks that vLLM gives to requests, and vLLM 0.32 "
    "and 0.33 cannot make its block manager",
}


def check_supported(vllm_config: Any, chunk_tokens: int, version: str = vllm.__version__) -> None:
    """Refuse what cannot be right before any tensor exists; warn about what was never tried.

    Speculative decoding is supported where it has no draft model (``DRAFTLESS_METHODS``), given that the scheduler side
    stores no token past ``num_tokens - 1``, and with the drafts of ``drafts.py``. Another draft's KV lies among the
    model's own, too, and nothing is known of when it is final.

    Raises:
        ConfigError: vLLM's version or ``chunk_tokens`` does not fit.
        UnsupportedModel: The model or the way it is run is not supported; the message says which and why.
    """
    _check_version(version)
    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    block = int(cache.block_size) * int(parallel.decode_context_parallel_size)
    if chunk_tokens <= 0 or chunk_tokens % block:
        raise ConfigError(
            "chunk_tokens must be a multiple of vLLM's block size. "
            f"chunk_tokens={chunk_tokens} block_size={block} nearest={-(-chunk_tokens // block) * block or block}"
        )
    if model.is_encoder_decoder:
        raise UnsupportedModel("encoder-decoder models are not supported: decoder KV depends on the encoder's input")
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
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in DRAFTLESS_METHODS | DRAFT_METHODS:
        raise UnsupportedModel(
            "speculative decoding by this method is not supported: what it keeps among the model's KV is not known. "
            f"method={speculative.method} supported={','.join(sorted(DRAFTLESS_METHODS | DRAFT_METHODS))}"
        )


def _check_version(version: str) -> None:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    release = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    if FIRST_VERSION <= release < UNTESTED_FROM:
        return
    first, untested, last = (".".join(map(str, v)) for v in (FIRST_VERSION, UNTESTED_FROM, REFUSED_FROM))
    if not UNTESTED_FROM <= release < REFUSED_FROM:
        raise ConfigError(f"vLLM's version is not supported. supported=>={first},<{last} observed={version}")
    logger.warning("vLLM %s is untested with tiered_kv. proven=>=%s,<%s", version, first, untested)


def check_states(vllm_config: Any, kv_cache_config: Any) -> None:
    """Refuse ways to run a model with recurrent layers whose states could not be put together.

    Raises:
        UnsupportedModel: Its layers are spread over pipeline stages or contexts, prefill and decode are apart, or it
            drafts by a method that was not tried with states.
    """
    if not any(is_recurrent(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups):
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


def check_groups(kv_cache_config: Any) -> None:
    """Refuse a model by its KV cache specs alone; both roles can do that before any tensor exists.

    Raises:
        UnsupportedModel: As for ``rank_pages``.
    """
    groups = kv_cache_config.kv_cache_groups
    for group in groups:
        if is_recurrent(group.kv_cache_spec):
            _check_recurrent(group.kv_cache_spec, group.layer_names, kv_cache_config)
            continue
        for spec in _layer_specs(group.kv_cache_spec):
            _check_spec(spec, group.layer_names)
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
    if not hasattr(spec, "state_content_size_bytes") or "boundary_state_offloads" not in _block_state_fields():
        raise UnsupportedModel(f"this version of vLLM offers no states at boundaries, 0.32 and later do. {where}")


def _block_state_fields() -> Iterable[str]:
    return getattr(getattr(sched_output, "KVConnectorBlockState", None), "__dataclass_fields__", ())


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
    """Refuse layers into whose pages vLLM itself writes after a load may have filled them; call it in a worker.

    Raises:
        UnsupportedModel: vLLM's Triton backend with a scale per token and head: at the first forward pass of each layer
            it sets all scales to 1, and without CUDA graphs a request whose prefix was loaded is the first.
    """
    layers = vllm_config.compilation_config.static_forward_context
    for group in kv_cache_config.kv_cache_groups:
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        for name in group.layer_names:
            mode = getattr(specs.get(name, group.kv_cache_spec), "kv_quant_mode", None)
            impl = getattr(layers.get(name), "impl", None)
            if getattr(mode, "is_per_token_head", False) and hasattr(impl, "_ensure_scale_caches"):
                raise UnsupportedModel(
                    "this attention backend overwrites the scales of loaded KV at its first forward pass. Use "
                    f"another --kv-cache-dtype, for instance fp8. layer={name} mode={getattr(mode, 'name', mode)}"
                )
