"""How long a request may wait for chunks that come up from a slower tier: never slower than recomputing.

Pure arithmetic over what was measured; the scheduler side owns the clock. DESIGN rule 8: time spent waiting is paid on
top of recomputing what did not arrive.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

UNPROVEN_SHARE = 0.05
"""Of the time the missing prefill would take: what may be lost on chunks from a tier of unknown speed, or one that is
hardly faster than prefill."""

TRUSTED_SHARE = 0.5
"""A tier that should need at most this share of the prefill is waited for, and for at most so long if it is late."""

PREFILL_TOKENS_PER_S_DEFAULT = 20_000.0
"""Assumed until a prefill was measured: fast enough that nothing slow is waited for."""

MOSTLY = 0.8


class PrefillRate:
    """The engine's prefill rate, from steps that were mostly prefill, until the next busy step or their answer.

    Threads: one owner. Units: tokens per second.
    """

    WEIGHT = 0.3

    def __init__(self) -> None:
        self._tokens_per_s: float | None = None
        self._previous: tuple[float, int, frozenset[str]] | None = None

    @property
    def tokens_per_s(self) -> float:
        """The moving estimate, or the default before the first sample."""
        return self._tokens_per_s or PREFILL_TOKENS_PER_S_DEFAULT

    def step(self, now_s: float, scheduled: Mapping[str, int], requests: Mapping[str, Any]) -> None:
        """Note a step of vLLM at the moment it is planned.

        Args:
            scheduled: Tokens per request.
            requests: What is known of requests, by their ids; each has vLLM's own as ``request``.
        """
        prefill = 0
        for request_id, tokens in scheduled.items():
            state = requests.get(request_id)
            if state is not None and state.request.num_computed_tokens + tokens <= state.request.num_prompt_tokens:
                prefill += tokens
        self.note(now_s, scheduled, prefill)

    def note(self, now_s: float, scheduled: Mapping[str, int], prefill_tokens: int) -> None:
        """Note a step of which so many tokens are prefill."""
        total = sum(scheduled.values())
        if self._previous is not None:
            then_s, tokens, requests = self._previous
            # Without a common request the engine may have been idle in between, and idle time is not prefill time.
            if requests & scheduled.keys():
                self._sample(tokens, now_s - then_s)
        is_prefill = total > 0 and prefill_tokens >= MOSTLY * total and prefill_tokens >= 64
        self._previous = (now_s, prefill_tokens, frozenset(scheduled)) if is_prefill else None

    def finished(self, now_s: float, request_id: str) -> None:
        """Note that a request has ended: with its first token, where it is the step noted last that answered it.

        On an engine that only prefills, for others to decode, no step is ever followed by one with the same request.
        """
        if self._previous is not None and request_id in self._previous[2]:
            then_s, tokens, _ = self._previous
            self._sample(tokens, now_s - then_s)
            self._previous = None

    def _sample(self, tokens: int, seconds: float) -> None:
        if seconds > 0:
            rate, old = tokens / seconds, self._tokens_per_s
            self._tokens_per_s = rate if old is None else old + self.WEIGHT * (rate - old)


@dataclass(frozen=True, slots=True)
class Wait:
    """What is known while a promotion runs.

    Attributes:
        waited_s: Since the lookup was sent.
        told_s: The same when ``parts`` were told.
        arrived_tokens: Verified in host memory, beyond what the GPU has.
        parts: Prefixes of what is on its way behind them, shortest first, of which the first is one chunk: their
            tokens, and the predicted time until all of these are here; None without samples of a tier, ``math.inf``
            while a tier delivers nothing.
        unknown_tokens: Behind those, being looked for in a shared tier: they may be held or not.
        search_s: What one question to that tier takes; None without samples.
    """

    waited_s: float
    told_s: float
    arrived_tokens: int
    parts: Sequence[tuple[int, float | None]] = ()
    unknown_tokens: int = 0
    search_s: float | None = None


class Patience:
    """How long this engine's requests wait, by its prefill rate and its settings."""

    def __init__(self, prefill: PrefillRate, fixed_ms: float | None, deadline_ms: float) -> None:
        """Take the settings.

        Args:
            fixed_ms: Wait so long whatever was measured; None: as long as it pays.
            deadline_ms: Never longer than this while it pays.
        """
        self._prefill = prefill
        self._fixed_s = None if fixed_ms is None else fixed_ms / 1e3
        self._deadline_s = deadline_ms / 1e3

    @property
    def is_any(self) -> bool:
        """Whether this engine's requests wait at all."""
        return self._fixed_s != 0

    def lasts(self, wait: Wait) -> bool:
        """Whether to answer "ask again" rather than to take what arrived."""
        if self._fixed_s is not None:
            return wait.waited_s <= self._fixed_s
        return wait.waited_s <= self._deadline_s and is_worth_waiting(wait, self._prefill.tokens_per_s)


def is_worth_waiting(wait: Wait, tokens_per_s: float) -> bool:
    """Whether waiting pays for one of the parts, or for what is still being looked for.

    What arrived has saved prefill time, so that much may be spent on a tier that is faster than prefill without a loss.
    A tier that is much faster gets twice the time it should need: it is usually right, and where it is not (a medium
    has just become slow) the request is late by at most ``TRUSTED_SHARE`` of what it then computes, and the next one
    knows.
    """
    saved_s = wait.arrived_tokens / tokens_per_s
    next_s = wait.parts[0][1] if wait.parts else None
    for tokens, eta_s in wait.parts:
        prefill_s = tokens / tokens_per_s
        unproven_s = UNPROVEN_SHARE * prefill_s
        if eta_s is None:
            longest_s = unproven_s  # what arrived is not spent on it
        elif eta_s > prefill_s or prefill_s <= 0:
            continue  # computing is faster
        elif eta_s <= TRUSTED_SHARE * prefill_s:
            longest_s = saved_s + unproven_s + min(wait.told_s + 2 * eta_s, TRUSTED_SHARE * prefill_s)
        elif saved_s > 0 or (next_s or 0.0) <= unproven_s:
            longest_s = saved_s + unproven_s
        else:
            continue  # nothing would be here in the time that may be lost
        if wait.waited_s <= longest_s:
            return True
    unproven_s = UNPROVEN_SHARE * wait.unknown_tokens / tokens_per_s
    return wait.unknown_tokens > 0 and max(wait.waited_s, wait.search_s or 0.0) <= unproven_s
