"""How long operations of a tier have been running: what a medium that hangs shows instead of an error.

A store across the network has deadlines of its own; a local disk has none that a process could set. What hangs cannot
be ended, only left alone: its thread and its slot come back when the medium does.
"""

import itertools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from tiered_kv.engine.clock import Clock

P = ParamSpec("P")
T = TypeVar("T")

STALL_S = 10.0
"""A local operation that runs for longer has no answer to be waited for: blobs are read and written in milliseconds."""


class Stalls:
    """Start times of what runs, by tier.

    Threads: any; a dict's single operations are atomic.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._numbers = itertools.count()
        self._running: dict[int, tuple[int, float]] = {}

    def run(self, tier: int, operation: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Perform an operation, which counts from its start to its end."""
        number = next(self._numbers)
        self._running[number] = (tier, self._clock.monotonic())
        try:
            return operation(*args, **kwargs)
        finally:
            self._running.pop(number, None)

    def oldest_s(self, tier: int) -> float:
        """How long the oldest operation of a tier has been running; 0 without any."""
        now_s = self._clock.monotonic()
        return max((now_s - start_s for number, start_s in list(self._running.values()) if number == tier), default=0.0)

    def forget(self, tier: int) -> None:
        """Leave out what runs now: it was noticed, and may hang long after the medium answers others again."""
        for number, (of_tier, _) in list(self._running.items()):
            if of_tier == tier:
                self._running.pop(number, None)
