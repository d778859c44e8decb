"""Answers that a benchmark gives an engine: every system then has the same history, and its choices can be compared.

vLLM's logits processor: of a request with ``forced`` among its ``extra_args`` each token is the one named there. The
log-probabilities that vLLM gives (``raw_logprobs``) are those before it, so they say what the engine would have chosen.
Not a benchmark by itself.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


class ForcedAnswers(AdapterLogitsProcessor):
    """Leaves one token to choose from. Threads: the model runner's."""

    def is_argmax_invariant(self) -> bool:
        """It is not: greedy sampling has to ask."""
        return False

    def new_req_logits_processor(self, params: Any) -> Callable[[list[int], torch.Tensor], torch.Tensor] | None:
        """What a request's logits become, by its tokens so far; None where its answer is its own."""
        answer: Sequence[int] | None = (params.extra_args or {}).get("forced")
        if answer is None:
            return None

        def force(given: list[int], logits: torch.Tensor) -> torch.Tensor:
            forced = torch.full_like(logits, float("-inf"))
            forced[answer[len(given)]] = 0.0
            return forced

        return force
