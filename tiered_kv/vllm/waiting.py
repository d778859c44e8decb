"""How long a request may wait for chunks that come up from a slower tier: never slower than recomputing.

Pure arithmetic over what was measured; the scheduler side owns the clock. DESIGN rule 8: time spent waiting is paid on
top of recomputing what did not arrive.
"""

from dataclasses import dataclass

UNPROVEN_SHARE = 0.05
"""Of the time the missing prefill would take: what may be lost on chunks that never arrive."""

PREFILL_TOKENS_PER_S_DEFAULT = 20_000.0
"""Assumed until a prefill was measured: fast enough that nothing slow is waited for."""

MOSTLY = 0.8


class PrefillRate:
    """The engine's prefill rate, from steps that were mostly prefill and were followed by another busy step.

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

    def step(self, now_s: float, scheduled: dict[str, int], prefill_tokens: int) -> None:
        """Note a step at the moment it is planned; ``scheduled`` is tokens per request."""
        total = sum(scheduled.values())
        if self._previous is not None:
            then_s, tokens, requests = self._previous
            # Without a common request the engine may have been idle in between, and idle time is not prefill time.
            if requests & scheduled.keys() and now_s > then_s:
                rate = tokens / (now_s - then_s)
                old = self._tokens_per_s
                self._tokens_per_s = rate if old is None else old + self.WEIGHT * (rate - old)
        is_prefill = total > 0 and prefill_tokens >= MOSTLY * total and prefill_tokens >= 64
        self._previous = (now_s, prefill_tokens, frozenset(scheduled)) if is_prefill else None


@dataclass(frozen=True, slots=True)
class Wait:
    """What is known while a promotion runs.

    Attributes:
        waited_s: Since the lookup was sent.
        arrived_tokens: Verified in host memory, beyond what the GPU has.
        wanted_tokens: Held by the hierarchy, beyond what the GPU has; includes those that arrived.
        eta_s: Predicted time until the rest is here; None without samples of the tier.
        unknown_tokens: Behind them, being looked for in a shared tier: they may be held or not.
    """

    waited_s: float
    arrived_tokens: int
    wanted_tokens: int
    eta_s: float | None
    unknown_tokens: int = 0


def is_worth_waiting(wait: Wait, tokens_per_s: float, deadline_s: float) -> bool:
    """Whether to answer "ask again" rather than to take what arrived.

    What arrived has saved its own prefill time, so that much may be spent on the rest without a loss; beyond it only
    ``UNPROVEN_SHARE`` of what is still missing. A tier that is slower than prefill, or was never measured, gets no more
    than that share, and neither does a search.
    """
    missing = wait.wanted_tokens - wait.arrived_tokens
    if missing + wait.unknown_tokens <= 0 or wait.waited_s > deadline_s:
        return False
    unproven_s = UNPROVEN_SHARE * (missing + wait.unknown_tokens) / tokens_per_s
    if missing <= 0 or wait.eta_s is None or wait.eta_s > missing / tokens_per_s:
        return wait.waited_s <= unproven_s
    return wait.waited_s <= wait.arrived_tokens / tokens_per_s + unproven_s
