"""How fast tiers deliver and answer, from what they did: numbers that decide whether waiting pays."""

import math
import statistics
from collections import deque

RECENT = 3
"""Samples an estimate is made of."""

OVERDUE = 4.0
OVERDUE_MIN_S = 0.05


class Recent:
    """The slower of the newest sample and the median of the newest three.

    A medium that became slow shows with its first sample, because every request that trusts it pays; one that became
    fast shows with its second, so that a single lucky read does not count as a recovery.

    Threads: one owner. Units: seconds, or seconds per byte; ``math.inf`` for what failed.
    """

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=RECENT)

    @property
    def slow(self) -> float | None:
        """The estimate; None without samples."""
        if not self._samples:
            return None
        return max(self._samples[-1], statistics.median_high(self._samples))

    def add(self, value: float) -> None:
        """Take a sample in."""
        self._samples.append(value)


class Throughput:
    """Reads of one tier: bytes per second over busy periods, and how long the first bytes of a period take.

    A busy period lasts while at least one read is in flight, so concurrent reads are counted once and idle time not at
    all; a tier that is never idle is sampled once a second. Until bytes have arrived there is no estimate.

    Threads: one owner. Units: bytes, seconds.
    """

    PERIOD_MAX_S = 1.0

    def __init__(self) -> None:
        self._in_flight = 0
        self._in_flight_bytes = 0
        self._started_s = 0.0
        self._period_bytes = 0
        self._says_something = False
        self._has_first = False
        self._is_known = False
        self._s_per_byte = Recent()
        self._first_s = Recent()

    @property
    def bytes_per_s(self) -> float | None:
        """The estimate, or None without samples; 0 after a period in which everything failed."""
        slow = self._s_per_byte.slow
        return None if slow is None else 1 / slow

    def eta_s(self, size_bytes: int, own_bytes: int, now_s: float) -> float | None:
        """Seconds until the first ``size_bytes`` of ``own_bytes`` that are being read should be here.

        What else is being read is taken to come first. ``math.inf`` while the tier delivers nothing, or is overdue:
        nothing is here after ``OVERDUE`` times what the first bytes took before. None without samples.
        """
        slow, first_s = self._s_per_byte.slow, self._first_s.slow
        if slow is None or first_s is None:
            return None
        waits_s = now_s - self._started_s if self._in_flight and not self._has_first else 0.0
        if math.isinf(slow) or waits_s > max(OVERDUE * first_s, OVERDUE_MIN_S):
            return math.inf
        others_bytes = max(0, self._in_flight_bytes - own_bytes)
        return max(first_s, (others_bytes + size_bytes) * slow)

    def started(self, now_s: float, size_bytes: int) -> None:
        """A read of so many bytes began."""
        if self._in_flight == 0:
            self._begin_period(now_s)
            self._has_first = False
        self._in_flight += 1
        self._in_flight_bytes += size_bytes

    def finished(self, now_s: float, size_bytes: int, arrived_bytes: int | None) -> None:
        """A read of ``size_bytes`` ended with so many: 0 if it failed (its time still counts), None if nothing was
        there to read.

        A blob that is not there says nothing about the speed of those that are.
        """
        self._in_flight -= 1
        self._in_flight_bytes -= size_bytes
        if arrived_bytes is not None:
            self._period_bytes += arrived_bytes
            self._says_something = True
        if arrived_bytes and not self._has_first:
            self._has_first = True
            self._first_s.add(now_s - self._started_s)
        if self._in_flight and now_s - self._started_s < self.PERIOD_MAX_S:
            return
        if self._says_something:
            self._add(self._period_bytes, now_s - self._started_s)
        self._begin_period(now_s)

    def sample(self, size_bytes: int, seconds: float, first_s: float) -> None:
        """Add reads that were measured elsewhere: bytes, seconds until all were here, and until the first one was."""
        self._add(size_bytes, seconds)
        self._first_s.add(first_s)

    def forget(self) -> None:
        """What comes from now on comes from elsewhere: nothing was measured."""
        self._is_known = False
        self._s_per_byte, self._first_s = Recent(), Recent()

    def _add(self, size_bytes: int, seconds: float) -> None:
        """A period without bytes says nothing if it is the first."""
        self._is_known = self._is_known or size_bytes > 0
        if self._is_known:
            self._s_per_byte.add(max(seconds, 1e-6) / size_bytes if size_bytes else math.inf)

    def _begin_period(self, now_s: float) -> None:
        self._started_s = now_s
        self._period_bytes = 0
        self._says_something = False


class ProbeTimes:
    """How long questions to a shared tier take, one by one; failures count with the time they took.

    Threads: one owner. Units: seconds.
    """

    def __init__(self) -> None:
        self._started_s: dict[bytes, float] = {}
        self._recent = Recent()

    @property
    def slow_s(self) -> float | None:
        """The estimate; None without samples."""
        return self._recent.slow

    def started(self, key: bytes, now_s: float) -> None:
        """A chunk is being asked for; no other question for it is under way."""
        self._started_s[key] = now_s

    def finished(self, key: bytes, now_s: float) -> None:
        """The answer came, or none will."""
        started_s = self._started_s.pop(key, None)
        if started_s is not None:
            self._recent.add(now_s - started_s)

    def forget(self) -> None:
        """Others answer from now on: nothing was measured, and what was asked before will say nothing."""
        self._started_s.clear()
        self._recent = Recent()
