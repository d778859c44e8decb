"""Format figures for people: counts, shares, rates, durations, ages, keys, pins, states."""

import sys
from collections.abc import Mapping
from typing import Final

from tiered_kv.config import size_text

KEY_DIGITS: Final = 12
"""Of a key in a table on a terminal: enough for a verb that takes KEY, in a tier of any size."""

BREAKER = {"closed": "in use", "open": "left out", "half_open": "left out, being tried"}


def count_text(count: float) -> str:
    """A count: ``940``, ``12.3k``, ``1.2M``."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size * 0.9995:
            return f"{count / size:.1f}".removesuffix(".0") + unit
    return f"{count:.0f}" if count >= 10 or count == int(count) else f"{count:.1f}"


def share_text(part: float, whole: float) -> str:
    """A share: ``75 %``; ``-`` of nothing."""
    return f"{100 * part / whole:.0f} %" if whole else "-"


def rate_text(bytes_per_s: float | None) -> str:
    """Bytes per second; empty where unknown or zero."""
    return f"{size_text(int(bytes_per_s))}/s" if bytes_per_s else ""


def time_text(seconds: float | None) -> str:
    """A duration of an operation: ``340 us``, ``12.5 ms``, ``1.2 s``; empty where there was none."""
    if seconds is None:
        return ""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds * 1e6:.0f} us"


def capacity_text(size_bytes: int | None) -> str:
    """A limit, or that there is none."""
    return "unbounded" if size_bytes is None else size_text(size_bytes)


def decisions_text(counts: Mapping[str, str]) -> str:
    """What became of lookups in one line: ``12 ready, 3 not awaited``; ``none`` where there were none."""
    return ", ".join(f"{count} {decision.replace('_', ' ')}" for decision, count in counts.items()) or "none"


def points_text(share: float | None) -> str:
    """A difference of two shares: ``+1.8 points``; empty where unknown."""
    return "" if share is None else f"{100 * share:+.1f} points"


def age_text(seconds: float) -> str:
    """A time span as people read it: ``42s``, ``3h``, ``12d``."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f}{unit}"
    return f"{max(seconds, 0):.0f}s"


def shortened(digits: str) -> str:
    """A key or digest: whole where a program may read it, its beginning on a terminal."""
    return digits[:KEY_DIGITS] if sys.stdout.isatty() else digits


def ago(now_s: float, then_s: float | None) -> str:
    """Time since then; ``-`` where unknown."""
    return "-" if then_s is None else f"{age_text(now_s - then_s)} ago"


def end_of(pinned_until_s: float) -> float | None:
    """The end of a pin as JSON has it: null where there is no pin, or none with an end."""
    return None if pinned_until_s in (0.0, float("inf")) else pinned_until_s


def pin_text(now_s: float, end_s: float | None, *, is_kept: bool) -> str:
    """Whether a pin keeps a chunk, its own or that of a chunk behind it, and how long its own does so."""
    if end_s is not None:
        return f"{age_text(end_s - now_s)} more"
    return "yes" if is_kept else "-"


def pins_text(pinned_bytes: int, capacity_bytes: int | None) -> str:
    """What pins keep of a tier, and whether that is more than it may hold; empty where they keep nothing."""
    if not pinned_bytes:
        return ""
    over = ", more than its capacity" if capacity_bytes is not None and pinned_bytes > capacity_bytes else ""
    return f"{size_text(pinned_bytes)} pinned{over}"


def states_text(states: int, size_bytes: int) -> str:
    """How many states of recurrent layers, or tails, are stored, and what they take; ``-`` where there are none."""
    return f"{states}, {size_text(size_bytes)}" if size_bytes else "-"
