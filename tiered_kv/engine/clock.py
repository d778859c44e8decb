"""Time as a component, so that tests own it."""

import time
from typing import Protocol


class Clock(Protocol):
    """What the engine and the server ask of time."""

    def monotonic(self) -> float:
        """Seconds that never go back; only differences mean something.

        Stands still while the machine is suspended: what it measures is this machine's own. Leases and grants between
        machines use ``machine.since_boot_s``.
        """

    def wall(self) -> int:
        """Seconds since 1970, for people to read; never used to order or to expire anything."""


class SystemClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> int:
        return int(time.time())
