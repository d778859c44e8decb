"""Whose turn it is: the requests that vLLM has not admitted, in the order in which it will.

vLLM asks for them in that order, those within a step's budget, at every step, and goes on to the next where the answer
is "ask again". So what is asked for after a request that still waits for the cache is ahead of its turn. Owns order and
dates of questions; must not send anything. Called by the scheduler side, in vLLM's scheduler thread.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import islice
from typing import Final

from tiered_kv.hierarchy.plan import Turn
from tiered_kv.vllm.requests import RequestState

NEXT_MAX: Final = 8
"""Requests whose lookups are kept fresh ahead of their turn."""

LOOK_EVERY_S: Final = 0.1
"""Between two looks at them."""

FRESH_S: Final = 1.0
"""A lookup older than this is made anew for its request's turn, if it found less than all."""


class Turns:
    """Requests that wait to be admitted.

    Threads: vLLM's scheduler thread only. Units: seconds.
    """

    def __init__(self, monotonic: Callable[[], float], longest_s: float, *, is_by_priority: bool) -> None:
        """Nobody waits.

        Args:
            longest_s: A request or a load in front that takes longer holds up nobody behind it any more.
            is_by_priority: vLLM admits by priority, not by arrival.
        """
        self._monotonic = monotonic
        self._longest_s = longest_s
        self._is_by_priority = is_by_priority
        self._waiting: dict[str, RequestState] = {}
        self._loading: dict[str, float] = {}
        self._numbers = 0
        self._is_held_up = False  # in this step somebody was told to ask again, because more is on its way
        self._look_at_s = 0.0
        self._front: Turn | None = None  # of this step

    def came(self, state: RequestState) -> None:
        """A request is new, or was preempted; then it keeps its turn."""
        if state.number is None:
            self._numbers += 1
            state.number = self._numbers
        state.turn_s = None
        self._waiting[state.request.request_id] = state

    def left(self, request_id: str) -> None:
        """It was admitted, or is over. Idempotent."""
        self._waiting.pop(request_id, None)

    def load_began(self, request_id: str) -> None:
        """Its leases come back when the load has ended."""
        self._loading[request_id] = self._monotonic()

    def load_ended(self, request_id: str) -> None:
        self._loading.pop(request_id, None)

    def of(self, state: RequestState) -> Turn:
        """When vLLM admits it among the others."""
        return int(state.request.priority) if self._is_by_priority else 0, state.number or 0

    # -- this step ---------------------------------------------------------------------------------------------

    def asked(self, state: RequestState) -> None:
        """vLLM asks for the request; where it did not for a while, another turn begins."""
        now_s = self._monotonic()
        if state.turn_s is None or now_s - state.asked_s > FRESH_S:
            self.begin(state)
        state.asked_s = now_s

    def begin(self, state: RequestState) -> None:
        """From now on the request waits at its own cost."""
        state.turn_s, state.is_asked_anew = self._monotonic(), False

    def has_come(self, state: RequestState) -> bool:
        """Whether vLLM is asking for the request."""
        return state.turn_s is not None and self._monotonic() - state.asked_s <= FRESH_S

    def is_held_up(self, state: RequestState) -> bool:
        """Whether the turn of a request that waits for room has yet to come; then it begins anew when it is asked next.

        While one that vLLM asks for before it waits for the cache, or loads from it, this one would not be computed yet
        had they been computed; and what they lease is the room it waits for. The first of all waits for loads alone,
        and not for ever.
        """
        is_held_up = self._is_held_up or self._is_loading()
        if is_held_up and self.of(state) == self._first():
            state.first_s = self._monotonic() if state.first_s is None else state.first_s
            is_held_up = self._monotonic() - state.first_s <= self._longest_s
        if is_held_up:
            state.turn_s = None
        return is_held_up

    def _first(self) -> Turn:
        if self._front is None:
            states = self._waiting.values()
            first = min(states, key=self.of, default=None) if self._is_by_priority else next(iter(states), None)
            self._front = (0, 0) if first is None else self.of(first)
        return self._front

    def _is_loading(self) -> bool:
        newest_s = next(reversed(self._loading.values()), None)
        return newest_s is not None and self._monotonic() - newest_s <= self._longest_s

    def waits(self) -> None:
        """The request just asked for is to ask again, because more for it is on its way."""
        self._is_held_up = True

    def step(self) -> list[RequestState]:
        """The step is planned; returns who is next, now and then."""
        self._is_held_up, self._front = False, None
        now_s = self._monotonic()
        if now_s < self._look_at_s or not self._waiting:
            return []
        self._look_at_s = now_s + LOOK_EVERY_S
        if self._is_by_priority:
            return heapq.nsmallest(NEXT_MAX, self._waiting.values(), key=self.of)
        return list(islice(self._waiting.values(), NEXT_MAX))
