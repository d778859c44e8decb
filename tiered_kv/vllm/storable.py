"""Which of a request's tokens are known for good, and so may be named by keys and stored (DESIGN rule 9).

::

    token ids     |------- prompt -------|-- generated --|last|
    KV            computed as far as the scheduler has come; the last token's never
    named         [......................................)
    stored        [......................)   and behind the prompt with ``save_decode`` only

The last generated token stays out. Its KV is computed by a later step, if at all; a streaming session may cut it off
and go on with other tokens; and behind it lie drafts, of which vLLM counts as computed what may still be rejected. What
is before it is never touched again: an accepted draft is a token like any other, and a rejected one's place is written
again before the token that takes it is known to the scheduler.
"""

from typing import Any


def final_tokens(request: Any) -> int:
    """Leading tokens whose ids are known and will not change."""
    return int(min(max(request.num_prompt_tokens, request.num_tokens - 1), request.num_tokens))


def storable_tokens(request: Any, computed_tokens: int, *, saves_generated: bool) -> int:
    """Leading tokens that may be stored once the steps up to ``computed_tokens`` have run."""
    return min(computed_tokens, final_tokens(request) if saves_generated else request.num_prompt_tokens)
