"""By which headers a store's answers are told from anybody else's.

Owns what a client has learned of that. Called by ``loop_calls.py``, ``thread_bodies.py`` and ``google.py``.

What is not obvious: a load balancer whose store is away may answer anything with 200 and nothing or a few words. Taken
for the store's, a put or a deletion was done, an object is damaged and is deleted once the store is back, and a missing
one is forgotten. No header is on every answer of every store, and a proxy may drop those that are; but a store that
sends one with its answers of a kind sends it with each of them, and a proxy drops it from each. Which store or proxy
that is may change while a server runs.
"""

import logging
import time
from collections.abc import Callable, Iterable
from typing import Final

logger = logging.getLogger(__name__)

FORGET_S: Final = 600.0
"""What was learned of a kind is forgotten once each answer was refused for so long: another store or proxy is there."""

ASKED_S: Final = 60.0
"""Longest time between two of these answers: two alone, ten minutes apart, would be two times that a store was away."""


class Marks:
    """Headers of a store, and the kinds of its answers that were seen with one.

    Threads: any.
    """

    def __init__(self, names: frozenset[str], *, monotonic: Callable[[], float] = time.monotonic) -> None:
        """Nothing was seen yet; ``names`` of headers in small letters, each of which is enough."""
        self._names = names
        self._monotonic = monotonic
        self._marked: set[str] = set()
        self._missed_s: dict[str, tuple[float, float]] = {}  # of kinds whose last answers had none: the first, the last

    def are_missing(self, kind: str, headers: Iterable[str]) -> bool:
        """Whether an answer has none of them, and an earlier one of its kind had."""
        if any(name.lower() in self._names for name in headers):
            self._marked.add(kind)
            self._missed_s.pop(kind, None)
            return False
        if kind not in self._marked:
            return False
        now_s = self._monotonic()
        first_s, last_s = self._missed_s.get(kind, (now_s, now_s))
        if now_s - last_s > ASKED_S:
            first_s = now_s
        self._missed_s[kind] = first_s, now_s
        if now_s - first_s < FORGET_S:
            return True
        self._marked.discard(kind)
        logger.warning("the store's answers lack the headers that they had; they are believed again. kind=%s", kind)
        return False
