"""Drafts: speculative decoding whose draft keeps KV of its own, beside the model's in vLLM's paged KV.

The draft's layers are attention layers of the same KV cache groups, so they are stored and loaded with the model's, in
the same chunk. Without them a hit would give the same tokens, and nothing that the draft guesses would be right.

What differs is when they are final. A draft that reads the model's hidden states (EAGLE, EAGLE3, MTP) takes at each
position the token *behind* it::

    position          0    1    2    3 |  4           block of 4 tokens, keyed by tokens 0 to 3
    model's KV of     t0   t1   t2   t3|
    draft's KV of     t1   t2   t3   t4|              its last slot is of t4, which another prompt may not have

So vLLM's own prefix cache gives up the last block that it matched, and computes it again; the same is done here, so
that a hit is as long as vLLM's own of the same prompt would be. A separate draft model takes the token at its position,
and gives nothing up.

Owns which drafts are served, how far a held prefix may be loaded with them, and which settings of them vLLM reads. Must
not touch tensors. Called by both roles.
"""

from dataclasses import dataclass
from typing import Any, Final

import vllm

from tiered_kv.errors import UnsupportedModel
from tiered_kv.vllm.compat import OLDEST, release
from tiered_kv.vllm.kv_groups import CacheGroups, is_recurrent, window_tokens

DRAFT_METHODS: Final = frozenset({"eagle", "eagle3", "mtp", "draft_model"})
"""vLLM's names of the methods that are served with the draft's KV."""

DRAFT_METHODS_WITH_STATES: Final = frozenset({"mtp"})
"""Those of them that are served with models that have recurrent layers."""

FIRST_VERSION_WITH_DRAFTS: Final = (0, 32)
"""vLLM before it was never run with a draft beside this connector."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """How an engine drafts.

    Attributes:
        drops_block: vLLM gives up the last block of a prefix that it matched.
        draft_tokens: Tokens guessed in a step.
        drafted_len: Longest sequence, drafts included, that the draft takes: in a step with a longer one vLLM runs it
            for no request, and the draft's KV of that step is never written.
    """

    drops_block: bool
    draft_tokens: int
    drafted_len: int

    @classmethod
    def of(cls, vllm_config: Any) -> "Drafts | None":
        """Read it; None where nothing is drafted, or by a method that keeps no KV."""
        if not has_drafts_kv(vllm_config):
            return None
        speculative = vllm_config.speculative_config
        draft = speculative.draft_model_config
        drafted_len = getattr(draft, "max_model_len", None) or vllm_config.model_config.max_model_len
        return cls(
            drops_block=bool(speculative.use_eagle_block_drop()),
            draft_tokens=int(speculative.num_speculative_tokens),
            drafted_len=int(drafted_len),
        )

    def loadable_tokens(self, held_tokens: int, request_tokens: int, block_tokens: int) -> int:
        """How much of a held prefix vLLM's own prefix cache would give the request, had it the same blocks."""
        most = min(held_tokens, (request_tokens - 1) // block_tokens * block_tokens)
        return max(0, most - block_tokens) if self.drops_block else most

    def state_boundary(self, request_tokens: int, block_tokens: int) -> int:
        """The last boundary of a prompt at which vLLM keeps a state, and from which it goes on when it is asked again.

        The block that is dropped leaves something to compute, so no more than that is left out.
        """
        if self.drops_block:
            return max(0, request_tokens // block_tokens - 1) * block_tokens
        return (request_tokens - 1) // block_tokens * block_tokens


def has_drafts_kv(vllm_config: Any) -> bool:
    """Whether a draft keeps KV among the model's, by a method that is served."""
    speculative = getattr(vllm_config, "speculative_config", None)
    return getattr(speculative, "method", None) in DRAFT_METHODS


def loadable_tokens(
    groups: CacheGroups, drafts: Drafts | None, held_tokens: int, request_tokens: int, chunk_tokens: int
) -> int:
    """How much of a held prefix of whole chunks may be loaded for a request of so many tokens."""
    if drafts is not None:
        return drafts.loadable_tokens(held_tokens, request_tokens, groups.block_tokens)
    return groups.loadable_tokens(held_tokens, request_tokens, chunk_tokens)


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
    if int(parallel.world_size) > 1:
        raise _refusal(speculative, f"was not tried on several ranks. world_size={parallel.world_size}")
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
        if window_tokens(group.kv_cache_spec) is not None:
            raise _refusal(speculative, f"was not tried beside sliding windows. layers={group.layer_names[:2]}")
        if other := [type(spec).__name__ for spec in kinds if type(spec).__name__ != "FullAttentionSpec"]:
            raise _refusal(speculative, f"was tried beside full attention only. spec={other[0]}")


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
