"""Whether rows are loaded below vLLM's offloading, and for how long a load is waited for: rule 8 for whole rows.

vLLM has a request wait until the rows that a tier calls a hit are there, or the tier reports that they are not; and it
tells a tier of no rate. So the steps that its scheduler plans are measured, as for the connector (``wait_policy.py``):
a row is a hit where reading it, and those before it, should take at most ``TRUSTED_SHARE`` of computing them, and is
waited for as long as that. What comes from a tier of unknown speed gets ``UNPROVEN_SHARE``.

Nothing is read here that no request waits for, so a tier that was once too slow, or failed, would not be measured again
by anybody: now and then one request has its rows loaded as from a tier of unknown speed.

Called by the tier, in vLLM's scheduler thread. Units: seconds, tokens.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from tiered_kv.vllm.wait_policy import TRUSTED_SHARE, UNPROVEN_SHARE, PrefillRate

RETRY_S: Final = 10.0
"""So long rows are taken for too slow, before one request loads them all the same, which may cost it
``UNPROVEN_SHARE``."""


class RowWaits:
    """The prefill rate of one engine, and what it says of rows.

    Threads: vLLM's scheduler thread only.
    """

    def __init__(
        self, fixed_ms: float | None, deadline_ms: float, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """Take the settings.

        Args:
            fixed_ms: Wait so long whatever was measured; None: as long as it pays.
            deadline_ms: Never longer than this while it pays.
        """
        self._fixed_s = None if fixed_ms is None else fixed_ms / 1e3
        self._deadline_s = deadline_ms / 1e3
        self._monotonic = monotonic
        self._prefill = PrefillRate()
        self._prompts: dict[str, int] = {}  # tokens of each, of requests that run
        self._retry_due_s: float | None = None  # None: nothing was too slow yet

    def step(self, output: Any) -> None:
        """Note a step that vLLM's scheduler has planned."""
        for request_id in output.finished_req_ids:
            self._prompts.pop(request_id, None)
        cached, scheduled = output.scheduled_cached_reqs, output.num_scheduled_tokens
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in output.scheduled_new_reqs:
            self._prompts[new.req_id], computed[new.req_id] = new.prompt_len, new.num_computed_tokens
        prefill = sum(
            tokens for name, tokens in scheduled.items() if computed.get(name, 0) + tokens <= self._prompts.get(name, 0)
        )
        self._prefill.note(self._monotonic(), scheduled, prefill)

    def worth(self, parts: Sequence[tuple[int, float | None]], row_tokens: float) -> int:
        """How many leading rows should be loaded rather than computed.

        Args:
            parts: Prefixes of what is held: how many rows, and the seconds until they are read; None: nobody knows.
            row_tokens: That a row saves to compute.
        """
        best = 0
        for rows, read_s in parts:
            limit_s = TRUSTED_SHARE * rows * row_tokens / self._prefill.tokens_per_s
            if read_s is None or self._fixed_s is not None or read_s <= limit_s:
                best = rows
        return 0 if self._fixed_s == 0 else best

    def tries_again(self) -> bool:
        """Whether a request is to load rows that are too slow, by what was measured: once in ``RETRY_S``."""
        now_s = self._monotonic()
        if self._retry_due_s is None:
            self._retry_due_s = now_s + RETRY_S
        if now_s < self._retry_due_s:
            return False
        self._retry_due_s = now_s + RETRY_S
        return True

    def load_s(self, tokens: float, *, is_measured: bool) -> float:
        """How long a load that saves so many tokens is waited for."""
        if self._fixed_s is not None:
            return self._fixed_s
        share = TRUSTED_SHARE if is_measured else UNPROVEN_SHARE
        return min(share * tokens / self._prefill.tokens_per_s, self._deadline_s)

    def search_s(self, tokens: float, longest_s: float) -> float:
        """How long what a search may find of so many tokens is waited for, ``longest_s`` at most."""
        if self._fixed_s is not None:
            return min(self._fixed_s, longest_s)
        return min(UNPROVEN_SHARE * tokens / self._prefill.tokens_per_s, longest_s)
