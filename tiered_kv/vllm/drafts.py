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

Owns which drafts have KV that is stored, and how far a held prefix may be loaded with them; which of them are refused
is in ``supported.py``. Must not touch tensors. Called by both roles.
"""

from dataclasses import dataclass
from typing import Any, Final

DRAFT_METHODS: Final = frozenset({"eagle", "eagle3", "mtp", "draft_model"})
"""vLLM's names of the methods that are served with the draft's KV."""


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

    def are_run(self, longest_tokens: int) -> bool:
        """Whether vLLM drafts in a step after which its longest request has so many tokens."""
        return longest_tokens + self.draft_tokens <= self.drafted_len

    def hit_tokens(self, request_tokens: int, block_tokens: int, *, is_hybrid: bool) -> int:
        """Longest hit of vLLM's own prefix cache for a prompt all of which it has.

        With several KV cache groups (``HybridKVCacheCoordinator``) the block that is given up is looked for behind the
        last one that may be used, and so may end with the prompt; with one group it may not.
        """
        whole = (request_tokens - 1) // block_tokens * block_tokens
        if not self.drops_block:
            return whole
        return max(0, (request_tokens // block_tokens * block_tokens if is_hybrid else whole) - block_tokens)

    def loadable_tokens(self, held_tokens: int, request_tokens: int, block_tokens: int, *, is_hybrid: bool) -> int:
        """How much of a held prefix vLLM's own prefix cache would give the request, had it the same blocks."""
        given_up = block_tokens if self.drops_block else 0
        most = self.hit_tokens(request_tokens, block_tokens, is_hybrid=is_hybrid)
        return max(0, min(held_tokens - given_up, most))


def has_drafts_kv(vllm_config: Any) -> bool:
    """Whether a draft keeps KV among the model's, by a method that is served."""
    speculative = getattr(vllm_config, "speculative_config", None)
    return getattr(speculative, "method", None) in DRAFT_METHODS
