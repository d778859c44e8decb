"""Time that a test owns: none passes until it says so."""


class FakeClock:
    """A clock that stands still.

    Attributes:
        now_s: What ``monotonic`` answers.
    """

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def monotonic(self) -> float:
        return self.now_s

    def wall(self) -> int:
        return 1_700_000_000 + int(self.now_s)

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds
