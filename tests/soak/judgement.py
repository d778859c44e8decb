"""When a series of samples counts as flat. Numbers only.

Flat means both: the slope of a least-squares line is below ``SLOPE_MAX_MIB_PER_H``, and the median of the last third is
at most 5 % and 8 MiB above that of the middle third. The slope finds a slow leak under noise; the medians find a step
that a line through everything would hide. The first third is for what any process does once: caches, thread stacks,
the allocator's arenas.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

SLOPE_MAX_MIB_PER_H = 30.0
SHARE_MAX = 0.05
ROOM_MIB = 8.0
SAMPLES_MIN = 6
KNOWN_CHUNK_MIB = 480 / 2**20
"""What a server remembers of a chunk it knows of, on disk or in the bucket; tests/tiering/test_index_memory.py."""

SPAN_S = 240.0
"""Of shorter series the slope is not judged: the noise alone would decide."""


@dataclass(frozen=True, slots=True)
class Trend:
    """What a series does over time.

    Attributes:
        slope_mib_per_h: None where the series is too short to tell.
        middle_mib, last_mib: Medians of the middle and the last third.
    """

    slope_mib_per_h: float | None
    middle_mib: float
    last_mib: float

    @property
    def is_flat(self) -> bool:
        is_steep = self.slope_mib_per_h is not None and self.slope_mib_per_h > SLOPE_MAX_MIB_PER_H
        return not is_steep and self.last_mib <= self.middle_mib * (1 + SHARE_MAX) + ROOM_MIB


def trend(times_s: Sequence[float], sizes_mib: Sequence[float]) -> Trend:
    """Judge sizes over time; at least ``SAMPLES_MIN`` samples."""
    if len(times_s) != len(sizes_mib) or len(times_s) < SAMPLES_MIN:
        raise ValueError(f"a trend needs {SAMPLES_MIN} samples. times={len(times_s)} sizes={len(sizes_mib)}")
    third = len(times_s) // 3
    later_times, later_sizes = times_s[third:], sizes_mib[third:]
    is_long = times_s[-1] - times_s[0] >= SPAN_S
    slope = statistics.linear_regression(later_times, later_sizes).slope * 3600 if is_long else None
    return Trend(slope, statistics.median(sizes_mib[third : 2 * third]), statistics.median(sizes_mib[2 * third :]))
