"""What becomes of a tier whose breaker opened: it is taken out of tiering, tried now and then, and taken back.

Owns no breaker (``tiers/wrappers/breaker.py``). Driven by the engine's step.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tiered_kv.engine.clock import Clock
from tiered_kv.engine.executor import Executor, Pool
from tiered_kv.engine.self_test import SelfTest, self_test
from tiered_kv.engine.stalls import STALL_S, Stalls
from tiered_kv.tiering.tiering import Tiering
from tiered_kv.tiers.base import BlobName, Tier
from tiered_kv.tiers.wrappers.breaker import Breaker

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Guarded:
    number: int
    breaker: Breaker
    trial: Tier
    is_out: bool = False
    left: BlobName | None = None
    """By the last trial, which could not delete it."""


class Guards:
    """The guarded tiers of an engine.

    Threads: one owner; trials run in the executor and report through ``_ended`` (appending is atomic).
    """

    def __init__(
        self,
        tiering: Tiering,
        executor: Executor,
        clock: Clock,
        stalls: Stalls,
        taken_out: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Guard nothing yet; ``taken_out`` hears the number of each tier that is taken out."""
        self._taken_out = taken_out
        self._stalls = stalls
        self._tiering = tiering
        self._executor = executor
        self._clock = clock
        self._guarded: list[_Guarded] = []
        self._ended: deque[tuple[_Guarded, SelfTest]] = deque()

    def add(self, number: int, breaker: Breaker, trial: Tier) -> None:
        """Guard a tier; ``trial`` reaches it past its breaker."""
        self._guarded.append(_Guarded(number, breaker, trial))

    def breaker(self, number: int) -> Breaker | None:
        """The breaker of a tier."""
        return next((one.breaker for one in self._guarded if one.number == number), None)

    def step(self) -> list[tuple[int, SelfTest]]:
        """Follow the breakers and start the trials that are due; returns trials that succeeded, by tier."""
        passed = []
        while self._ended:
            one, result = self._ended.popleft()
            one.breaker.end_trial(result.failure)
            if result.failure is None:
                passed.append((one.number, result))
        for one in self._guarded:
            self._check_stall(one)
            if one.breaker.is_open != one.is_out:
                self._switch(one)
            if one.is_out and one.breaker.begin_trial():
                self._executor.submit(Pool.UPKEEP, 0, partial(self._try, one))
        return passed

    def _check_stall(self, one: _Guarded) -> None:
        if not one.is_out and (age_s := self._stalls.oldest_s(one.number)) > STALL_S:
            self._stalls.forget(one.number)
            one.breaker.trip(f"an operation has not ended for {age_s:.0f} s")

    def _switch(self, one: _Guarded) -> None:
        one.is_out = not one.is_out
        name = one.trial.traits.name
        if one.is_out:
            logger.warning("tier taken out until it answers again. tier=%s reason=%s", name, one.breaker.reason)
            self._taken_out(one.number)
        else:
            logger.warning("tier answers again. tier=%s", name)
        self._tiering.set_readable(one.number, not one.is_out)

    def _try(self, one: _Guarded) -> None:
        try:
            result = self_test(one.trial, self._clock, one.left)
        except Exception as exc:  # whatever it is, the trial has ended, or there would never be another one
            logger.exception("a trial of a tier ended by itself. tier=%s", one.trial.traits.name)
            result = SelfTest(0, 0.0, 0.0, repr(exc), one.left)
        one.left = result.left
        self._ended.append((one, result))
        self._executor.notify()
