"""Turns, and medians with the least and the most: what the rows of ``rivals.py`` share. Not a benchmark by itself."""

import statistics
from collections.abc import Sequence
from typing import Any, TypeVar

One = TypeVar("One")


def turned(systems: Sequence[One], number: int) -> list[One]:
    """The order of a repetition: who was first is last in the next."""
    turn = number % len(systems)
    return [*systems[turn:], *systems[:turn]]


def summary(what: str, unit: str, values: Sequence[float]) -> dict[str, Any]:
    """The fields of a row for one figure: ``what_unit`` is the median, ``what_least`` and ``what_most`` the range."""
    return {
        f"{what}_{unit}": _rounded(statistics.median(values)),
        f"{what}_least": _rounded(min(values)),
        f"{what}_most": _rounded(max(values)),
    }


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
