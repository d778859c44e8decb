"""By which headers a store's answers are told from anybody else's.

Owns what a client has learned of that. Called by ``loop_calls.py``, ``thread_bodies.py`` and ``google.py``.

What is not obvious: a load balancer whose store is away may answer anything with 200 and nothing or a few words. Taken
for the store's, a put or a deletion was done, an object is damaged and is deleted once the store is back, and a missing
one is forgotten. No header is on every answer of every store, and a proxy may drop those that are; but a store that
sends one with its answers of a kind sends it with each of them, and a proxy drops it from each.
"""

from collections.abc import Iterable


class Marks:
    """Headers of a store, and the kinds of its answers that were seen with one.

    Threads: any; kinds are only ever added.
    """

    def __init__(self, names: frozenset[str]) -> None:
        """Nothing was seen yet; ``names`` of headers in small letters, each of which is enough."""
        self._names = names
        self._marked: set[str] = set()

    def are_missing(self, kind: str, headers: Iterable[str]) -> bool:
        """Whether an answer has none of them, and an earlier one of its kind had."""
        if any(name.lower() in self._names for name in headers):
            self._marked.add(kind)
            return False
        return kind in self._marked
