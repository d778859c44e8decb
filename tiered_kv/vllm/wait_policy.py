"""Wait policy: the order of waiting requests, and how long waiting pays.

vLLM asks for the requests that it has not admitted in the order in which it will admit them, those within a step's
budget, at every step, and goes on to the next where the answer is "ask again". So a request that is asked for after one
that still waits for the cache is ahead of its turn (:class:`WaitingQueue`).

A request waits for chunks on their way up from a slower tier only while that is no slower than recomputing them
(:class:`WaitPolicy`, rule 8): time spent waiting is paid on top of recomputing what did not arrive. That part is pure
arithmetic over measurements.

Called by the scheduler side, in vLLM's scheduler thread. Must not send anything.
"""

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from tiered_kv.tiering.types import Turn
from tiered_kv.vllm.requests import RequestState

NEXT_MAX: Final = 8
"""Requests whose lookups are kept fresh ahead of their turn."""

LOOK_EVERY_S: Final = 0.1
"""Between two looks at them."""

FRESH_S: Final = 1.0
"""A lookup older than this is made anew for its request's turn, if it found less than all."""

TURNS_MAX: Final = 8
"""Turns of a request that vLLM asks for again and again after pauses; the last one does not end by a pause."""

REPLY_MAX_S: Final = 0.05
"""A wait that ends is prolonged by no more than this for a server that was asked what is ready."""

UNPROVEN_SHARE = 0.05
"""Of the time the missing prefill would take: what may be lost on chunks from a tier of unknown speed, or one that is
hardly faster than prefill."""

TRUSTED_SHARE = 0.5
"""A tier that should need at most this share of the prefill is waited for, and for at most so long if it is late."""

PREFILL_TOKENS_PER_S_DEFAULT = 20_000.0
"""Assumed until a prefill was measured: fast enough that nothing slow is waited for."""

MOSTLY = 0.8


class WaitingQueue:
    """The requests that vLLM has not admitted yet, in its order.

    Writes of each :class:`~tiered_kv.vllm.requests.RequestState`: ``number``, ``asked_s``, ``asked_step``, ``step_s``,
    ``turn_s``, ``pauses``, ``first_s``, and ``is_asked_anew`` at the begin of a turn. Only its own methods write its
    fields.

    Threads: vLLM's scheduler thread only. Units: seconds.
    """

    def __init__(self, monotonic: Callable[[], float], longest_s: float, *, is_by_priority: bool) -> None:
        """Start empty.

        Args:
            longest_s: A request or a load that takes longer no longer holds up those after it.
            is_by_priority: vLLM admits by priority, not by arrival.
        """
        self._monotonic = monotonic
        self._longest_s = longest_s
        self._is_by_priority = is_by_priority
        self._waiting: dict[str, RequestState] = {}
        self._loading: dict[str, float] = {}
        self._numbers = 0
        self._steps = 0
        self._is_held_up = False  # in this step a request was answered "ask again", because more is on its way
        self._look_at_s = 0.0
        self._front: set[Turn] | None = None  # of this step

    def add(self, state: RequestState) -> None:
        """A request is new, or was preempted; then it keeps its turn."""
        if state.number is None:
            self._numbers += 1
            state.number = self._numbers
        state.turn_s, state.pauses = None, 0
        self._waiting[state.request.request_id] = state

    def remove(self, request_id: str) -> None:
        """It was admitted, or is over. Idempotent."""
        self._waiting.pop(request_id, None)

    def is_waiting(self, state: RequestState) -> bool:
        """Whether the request was not admitted yet."""
        return state.request.request_id in self._waiting

    def load_began(self, request_id: str) -> None:
        """Its leases come back when the load has ended."""
        self._loading[request_id] = self._monotonic()

    def load_ended(self, request_id: str) -> None:
        self._loading.pop(request_id, None)

    def turn_of(self, state: RequestState) -> Turn:
        """When vLLM admits it among the others."""
        return int(state.request.priority) if self._is_by_priority else 0, state.number or 0

    # -- this step ---------------------------------------------------------------------------------------------

    def asked(self, state: RequestState) -> None:
        """vLLM asks for the request; after a pause in which it did not, another turn begins.

        Not where a single step took so long, and not without end: what a turn allows once, a request could wait for at
        each question, and a turn that has just begun has cost nothing yet.
        """
        now_s = self._monotonic()
        is_left_out = state.asked_step < self._steps - 1
        state.step_s = 0.0 if is_left_out or state.turn_s is None else now_s - state.asked_s
        was_left_out = is_left_out and now_s - state.asked_s > FRESH_S
        if state.turn_s is None:
            self.begin_turn(state)
        elif was_left_out and state.pauses < TURNS_MAX - 1:
            state.pauses += 1
            self.begin_turn(state)
        state.asked_s, state.asked_step = now_s, self._steps

    def goes_on(self, state: RequestState, now_s: float) -> bool:
        """vLLM asks for a request that waits on in its turn, and holds up those after it.

        False, and nothing is noted: a turn may have to begin, and :meth:`asked` says it.
        """
        if state.turn_s is None or state.asked_step < self._steps - 1:
            return False
        state.step_s = now_s - state.asked_s
        state.asked_s, state.asked_step = now_s, self._steps
        self._is_held_up = True
        return True

    def begin_turn(self, state: RequestState) -> None:
        """From now on the request waits at its own cost."""
        state.turn_s, state.is_asked_anew = self._monotonic(), False

    def is_asked_for(self, state: RequestState) -> bool:
        """Whether vLLM is asking for the request."""
        return state.turn_s is not None and self._monotonic() - state.asked_s <= FRESH_S

    def is_held_up(self, state: RequestState) -> bool:
        """Whether the turn of a request that waits for room has yet to come; its turn then begins anew.

        While a request that vLLM asks for earlier waits for the cache, or loads from it, this one would not be computed
        yet had that one been computed; and its leases are the room that this one waits for. The first of all requests
        does not wait for ever.
        """
        is_held_up = self._is_held_up or self._is_loading()
        if is_held_up and self._is_first(state):
            state.first_s = self._monotonic() if state.first_s is None else state.first_s
            is_held_up = self._monotonic() - state.first_s <= self._longest_s
        if is_held_up:
            state.turn_s = None
        return is_held_up

    def _is_first(self, state: RequestState) -> bool:
        """Whether it is the next to be admitted, or has waited longest: priority must not hold it up for ever."""
        if self._front is None:
            waiting = self._waiting.values()
            firsts = [next(iter(waiting), state)]
            if self._is_by_priority:
                firsts.append(min(waiting, key=self.turn_of, default=state))
            self._front = {self.turn_of(first) for first in firsts}
        return self.turn_of(state) in self._front

    def _is_loading(self) -> bool:
        newest_s = next(reversed(self._loading.values()), None)
        return newest_s is not None and self._monotonic() - newest_s <= self._longest_s

    def hold_up_others(self) -> None:
        """Hold up the requests after the one just asked for: more chunks for that one are on their way."""
        self._is_held_up = True

    def end_step(self) -> list[RequestState]:
        """The step is planned; returns the next requests, once in a while."""
        self._is_held_up, self._front = False, None
        self._steps += 1
        now_s = self._monotonic()
        if now_s < self._look_at_s or not self._waiting:
            return []
        self._look_at_s = now_s + LOOK_EVERY_S
        if self._is_by_priority:
            return heapq.nsmallest(NEXT_MAX, self._waiting.values(), key=self.turn_of)
        return list(islice(self._waiting.values(), NEXT_MAX))


class PrefillRate:
    """The engine's prefill rate, a moving estimate.

    A step that is mostly prefill is a sample; it lasts until the next step of the same requests or their answer. Only
    its own methods write its fields. Threads: vLLM's scheduler thread only. Units: tokens per second.

    Attributes:
        tokens_per_s: The moving estimate, or the default before the first sample.
    """

    __slots__ = ("_is_measured", "_previous", "tokens_per_s")
    WEIGHT = 0.3

    def __init__(self) -> None:
        self.tokens_per_s = PREFILL_TOKENS_PER_S_DEFAULT
        self._is_measured = False
        self._previous: tuple[float, int, frozenset[str]] | None = None

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
            rate, old = tokens / seconds, self.tokens_per_s
            self.tokens_per_s = old + self.WEIGHT * (rate - old) if self._is_measured else rate
            self._is_measured = True


@dataclass(frozen=True, slots=True)
class WaitState:
    """The progress of one request's promotion, by the newest answer.

    Attributes:
        told_s: When that answer came, since the request's turn.
        arrived_tokens: Verified in host memory, beyond what the GPU has.
        parts: Prefixes of what is on its way behind them, shortest first, of which the first is one chunk: their
            tokens, and the predicted time until all of these are here; None without samples of a tier, ``math.inf``
            while a tier delivers nothing.
        unknown_tokens: Behind those, being looked for in a shared tier: they may be held or not.
        search_s: What one question to that tier takes; None without samples.
    """

    told_s: float
    arrived_tokens: int
    parts: Sequence[tuple[int, float | None]] = ()
    unknown_tokens: int = 0
    search_s: float | None = None


class WaitPolicy:
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
    def may_wait(self) -> bool:
        """Whether this engine's requests wait at all."""
        return self._fixed_s != 0

    def longest_s(self, wait: WaitState) -> float:
        """How long the request waits for more, since its turn; negative: not at all.

        It is another time as soon as there is a newer answer, or the engine's prefill rate has changed.
        """
        if self._fixed_s is not None:
            return self._fixed_s
        return min(self._deadline_s, longest_wait_s(wait, self._prefill.tokens_per_s))


def longest_wait_s(wait: WaitState, tokens_per_s: float) -> float:
    """How long waiting pays, for one of the parts or for chunks that a search may still find; negative: not at all.

    What arrived has saved prefill time, so that much may be spent on a tier that is faster than prefill without a loss.
    A tier that is much faster gets twice the time it should need: it is usually right, and where it is not (a medium
    has just become slow) the request is late by at most ``TRUSTED_SHARE`` of what it then computes, and the next one
    knows.
    """
    saved_s = wait.arrived_tokens / tokens_per_s
    next_s = wait.parts[0][1] if wait.parts else None
    longest_s = -math.inf
    for tokens, eta_s in wait.parts:
        prefill_s = tokens / tokens_per_s
        unproven_s = UNPROVEN_SHARE * prefill_s
        if eta_s is None:
            part_s = unproven_s  # what arrived is not spent on it
        elif eta_s > prefill_s or prefill_s <= 0:
            continue  # computing is faster
        elif eta_s <= TRUSTED_SHARE * prefill_s:
            part_s = saved_s + unproven_s + min(wait.told_s + 2 * eta_s, TRUSTED_SHARE * prefill_s)
        elif saved_s > 0 or (next_s or 0.0) <= unproven_s:
            part_s = saved_s + unproven_s
        else:
            continue  # nothing would be here in the time that may be lost
        longest_s = max(longest_s, part_s)
    unproven_s = UNPROVEN_SHARE * wait.unknown_tokens / tokens_per_s
    if wait.unknown_tokens > 0 and (wait.search_s or 0.0) <= unproven_s:
        longest_s = max(longest_s, unproven_s)
    return longest_s
