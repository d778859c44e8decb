"""What an engine's lookups asked for and got since the start, in chunks and in tokens, by the tier that gave it."""

from collections import Counter
from dataclasses import dataclass, field

from tiered_kv.tiering.stats import HitCounts


@dataclass(slots=True)
class Totals:
    """Sums over all ended lookups of all namespaces; see :class:`tiered_kv.tiering.stats.HitCounts`.

    Attributes:
        tokens: As ``chunks``, each times the tokens of a chunk of its namespace. ``lookups`` and
            ``decisions`` are counted in ``chunks``.
    """

    chunks: HitCounts = field(default_factory=HitCounts)
    tokens: HitCounts = field(default_factory=HitCounts)

    def add(self, chunks: HitCounts, chunk_tokens: int) -> None:
        """Take in what was served to one namespace."""
        self.chunks.lookups += chunks.lookups
        self.chunks.decisions.update(chunks.decisions)
        for sums, factor in ((self.chunks, 1), (self.tokens, chunk_tokens)):
            sums.prefix += chunks.prefix * factor
            sums.asked += chunks.asked * factor
            sums.hits.update(Counter({source: count * factor for source, count in chunks.hits.items()}))
