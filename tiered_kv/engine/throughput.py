"""How fast a tier delivers, from what it did: the number that decides whether a prefix is worth waiting for."""


class Throughput:
    """Moving estimate of bytes per second over busy periods.

    A busy period lasts while at least one read is in flight, so concurrent reads are counted once and idle time not at
    all; a tier that is never idle is sampled once a second. Until bytes have arrived there is no estimate.

    Threads: one owner. Units: bytes, seconds.
    """

    WEIGHT = 0.3
    """Of the newest period in the estimate: a changed medium shows after a few promotions."""

    PERIOD_MAX_S = 1.0

    def __init__(self) -> None:
        self._in_flight = 0
        self._started_s = 0.0
        self._period_bytes = 0
        self._says_something = False
        self._bytes_per_s: float | None = None

    @property
    def bytes_per_s(self) -> float | None:
        """The estimate, or None without samples; never 0."""
        return self._bytes_per_s

    def started(self, now_s: float) -> None:
        """A read began."""
        if self._in_flight == 0:
            self._begin_period(now_s)
        self._in_flight += 1

    def finished(self, now_s: float, size_bytes: int | None) -> None:
        """A read ended with so many bytes: 0 if it failed (its time still counts), None if nothing was there to read.

        A blob that is not there says nothing about the speed of those that are.
        """
        self._in_flight -= 1
        if size_bytes is not None:
            self._period_bytes += size_bytes
            self._says_something = True
        if self._in_flight and now_s - self._started_s < self.PERIOD_MAX_S:
            return
        if self._says_something:
            self.sample(self._period_bytes, now_s - self._started_s)
        self._begin_period(now_s)

    def sample(self, size_bytes: int, seconds: float) -> None:
        """Add one measured period, e.g. of the self-test; one without bytes says nothing if it is the first."""
        rate = size_bytes / max(seconds, 1e-6)
        old = self._bytes_per_s
        if old is not None:
            self._bytes_per_s = old + self.WEIGHT * (rate - old)
        elif size_bytes:
            self._bytes_per_s = rate

    def _begin_period(self, now_s: float) -> None:
        self._started_s = now_s
        self._period_bytes = 0
        self._says_something = False
