"""Counters of tier operations: how many, how many bytes, how long, by tier, operation and outcome.

Fed by the metering wrapper from I/O threads, read by ``stat``. Every value only grows, so differences of two snapshots
are rates and nothing is lost between two readers.
"""

import threading
from dataclasses import dataclass

from tiered_kv.metrics.figures import OperationFigures


@dataclass(slots=True)
class OperationTotals:
    """Sums over all calls of one kind."""

    calls: int = 0
    size_bytes: int = 0
    seconds: float = 0.0


class Recorder:
    """Totals per (tier, operation, outcome).

    Threads: any.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: dict[tuple[str, str, str], OperationTotals] = {}

    def record(self, tier: str, operation: str, seconds: float, size_bytes: int, outcome: str) -> None:
        """Add one call."""
        with self._lock:
            totals = self._totals.setdefault((tier, operation, outcome), OperationTotals())
            totals.calls += 1
            totals.size_bytes += size_bytes
            totals.seconds += seconds

    def snapshot(self) -> list[OperationFigures]:
        """One row per kind of call seen so far."""
        with self._lock:
            return [
                OperationFigures(
                    tier=tier,
                    operation=operation,
                    outcome=outcome,
                    calls=totals.calls,
                    bytes=totals.size_bytes,
                    seconds=round(totals.seconds, 6),
                )
                for (tier, operation, outcome), totals in sorted(self._totals.items())
            ]
