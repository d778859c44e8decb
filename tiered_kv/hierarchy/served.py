"""What ended lookups asked for and what they got, in chunks, by the tier that gave them.

Owns sums and nothing else. Filled by ``lookups.py`` when a lookup ends, emptied by the engine, which knows how many
tokens a chunk of a namespace has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

DECISIONS: Final = ("ready", "awaited", "took_what_arrived", "not_awaited", "miss")
"""What became of a lookup. ``ready``: all that was promised was in host memory. ``awaited``: some of it came up from a
lower tier, and the client had it all. ``took_what_arrived``: the client was content with less than was on its way, or
gave up what was still being looked for. ``not_awaited``: it took nothing of what was on its way. ``miss``: there was
nothing."""


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
        decisions: What became of the lookups that asked for anything, by ``DECISIONS``.
    """

    lookups: int = 0
    prefix: int = 0
    asked: int = 0
    hits: Counter[int | None] = field(default_factory=Counter)
    decisions: Counter[str] = field(default_factory=Counter)


class Served:
    """Sums by namespace since the last :meth:`take`.

    Threads: one owner, the hierarchy.
    """

    def __init__(self) -> None:
        self._by_namespace: dict[bytes, Chunks] = {}

    def ended(
        self, namespace: bytes, prefix: int, start: int, sources: Sequence[int | None], *, has_more: bool
    ) -> None:
        """Count a lookup of ``prefix`` chunks, wanted from ``start`` on.

        Args:
            sources: What gave those that were ready.
            has_more: More was on its way, or being looked for.
        """
        chunks = self._by_namespace.setdefault(namespace, Chunks())
        chunks.lookups += 1
        chunks.prefix += prefix
        chunks.asked += max(0, prefix - start)
        chunks.hits.update(sources)
        if prefix > start:
            chunks.decisions[_decision(sources, has_more=has_more)] += 1

    def take(self) -> Mapping[bytes, Chunks]:
        """The sums, which begin at zero again."""
        taken, self._by_namespace = self._by_namespace, {}
        return taken


def _decision(sources: Sequence[int | None], *, has_more: bool) -> str:
    if not sources:
        return "not_awaited" if has_more else "miss"
    if has_more:
        return "took_what_arrived"
    return "ready" if all(source is None for source in sources) else "awaited"
