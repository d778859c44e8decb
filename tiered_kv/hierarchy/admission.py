"""Which chunks are worth writing to a lower tier: all, or those that were asked for or stored a second time.

    rule            a chunk is written to the tier
    all             when it is stored
    second-touch    when its prefix is asked for or stored again, or is pinned, or a client says that it will be

A second touch is what the index counts as a use (``index.py``): kept across eviction by the memory of what is gone, and
never less for a parent than for its child, so what is admitted is closed under prefixes. Until then a chunk lies in the
tiers above only, and nothing waits for its write: it is neither queued, nor put off, nor drained. Each lower tier has a
rule of its own. docs/decisions/0017-admission.md has the figures.
"""

from __future__ import annotations

from typing import Final

from tiered_kv.hierarchy.index import Entry

ALL: Final = "all"
SECOND_TOUCH: Final = "second-touch"


class Admission:
    """One tier's rule, and what came of it.

    Attributes:
        is_selective: Some chunks are not written.
        admitted: Writes that were queued or put off, those of one chunk again after its first was dropped included.
        declined: Chunks that came and were not admitted; each may be admitted later.

    Threads: one owner, the hierarchy.
    """

    def __init__(self, rule: str = ALL) -> None:
        assert rule in (ALL, SECOND_TOUCH), rule
        self.is_selective = rule == SECOND_TOUCH
        self.admitted = 0
        self.declined = 0

    def admits(self, entry: Entry) -> bool:
        """Whether the chunk may be written now; what was admitted once always is, while the index knows it."""
        return not self.is_selective or entry.uses > 0
