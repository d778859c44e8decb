"""What ended lookups asked for and what they got, in chunks, by the tier that gave them.

Owns sums and nothing else. Filled by ``lookups.py`` when a lookup ends, emptied by the engine, which knows how many
tokens a chunk of a namespace has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class Chunks:
    """Sums over ended lookups of one namespace.

    ``prefix`` chunks = those the client had no need of (before ``start``) + ``asked`` ones; ``asked`` = ``hits`` of all
    tiers + what was missed.

    Attributes:
        lookups: How many ended.
        prefix: Chunks of the prefixes looked up.
        asked: Chunks from ``start`` on.
        hits: Chunks that were ready, by the lower tier they were read from for this lookup; None: they were in host
            memory, or on their way into it from a client, when the lookup wanted them.
    """

    lookups: int = 0
    prefix: int = 0
    asked: int = 0
    hits: Counter[int | None] = field(default_factory=Counter)


class Served:
    """Sums by namespace since the last :meth:`take`.

    Threads: one owner, the hierarchy.
    """

    def __init__(self) -> None:
        self._by_namespace: dict[bytes, Chunks] = {}

    def ended(self, namespace: bytes, prefix: int, start: int, sources: Iterable[int | None]) -> None:
        """Count a lookup of ``prefix`` chunks, wanted from ``start`` on; ``sources`` gave those that were ready."""
        chunks = self._by_namespace.setdefault(namespace, Chunks())
        chunks.lookups += 1
        chunks.prefix += prefix
        chunks.asked += max(0, prefix - start)
        chunks.hits.update(sources)

    def take(self) -> Mapping[bytes, Chunks]:
        """The sums, which begin at zero again."""
        taken, self._by_namespace = self._by_namespace, {}
        return taken
