"""What came into each tier and what left it, counted by why; and which chunks, for sessions that asked to be told.

For every tier, what came less what left is what is there, in chunks and in bytes; the tiers' own checks assert it. Owns
the sums and the moves that were not told yet, and nothing else. Written by ``host.py`` and the lower tiers; read by the
server.

    tier     came                          left
    host     new, promoted                 evicted, removed, damaged
    lower    written, found, kept          evicted, removed, missing, corrupt, foreign, forgotten

``found`` was there at the start, or was put there by another machine; ``kept`` could not be deleted; ``removed``
because an operator said so; ``damaged`` in its slot; ``forgotten`` is a blob of a shared tier that may still be there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

from tiered_kv.hierarchy.plan import Moves

if TYPE_CHECKING:
    from tiered_kv.hierarchy.index import Entry

MOVES_MAX = 1 << 16
"""Moves that wait to be told; a bound on memory for the time between two steps. The rest are counted, not told."""


@dataclass(slots=True)
class Flow:
    """One tier's sums since the start.

    Attributes:
        came, left: Chunks, by how and by why.
        came_bytes, left_bytes: The same in bytes; 0 for blobs that others put into a shared tier.
    """

    came: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    came_bytes: int = 0
    left_bytes: int = 0

    @property
    def chunks(self) -> int:
        """Chunks that are there."""
        return self.came.total() - self.left.total()

    @property
    def size_bytes(self) -> int:
        """Bytes that are there."""
        return self.came_bytes - self.left_bytes


class Flows:
    """All tiers of a hierarchy; None names host memory.

    Attributes:
        untold: Moves that were not told because too many waited.

    Threads: one owner, the hierarchy.
    """

    def __init__(self, tier_count: int) -> None:
        self.untold = 0
        self._flows: dict[int | None, Flow] = {None: Flow(), **{tier: Flow() for tier in range(tier_count)}}
        self._watchers: dict[int, bytes] = {}  # namespace by session
        self._moves: list[tuple[bytes, int | None, bool, bytes]] = []

    def __getitem__(self, tier: int | None) -> Flow:
        return self._flows[tier]

    def came(self, entry: Entry, tier: int | None, how: str, *, is_usable: bool = True) -> None:
        """A chunk is in a tier now."""
        flow = self._flows[tier]
        flow.came[how] += 1
        flow.came_bytes += _size_bytes(entry, tier)
        if is_usable:
            self._note(entry, tier, is_here=True)

    def left(self, entry: Entry, tier: int | None, why: str) -> None:
        """A chunk is in a tier no more, or is on its way out."""
        flow = self._flows[tier]
        flow.left[why] += 1
        flow.left_bytes += _size_bytes(entry, tier)
        self._note(entry, tier, is_here=False)

    # -- sessions that are told --------------------------------------------------------------------------------

    def watch(self, session: int, namespace: bytes) -> None:
        """Tell a session from now on which chunks of its namespace came and left."""
        self._watchers[session] = namespace

    def unwatch(self, session: int) -> None:
        """Tell a session no more. Idempotent."""
        self._watchers.pop(session, None)

    def tell_again(self, entry: Entry, tiers: list[int | None]) -> None:
        """Say once more where a chunk is: somebody may have missed it when it came."""
        for tier in tiers:
            self._note(entry, tier, is_here=True)

    def _note(self, entry: Entry, tier: int | None, *, is_here: bool) -> None:
        if entry.record.namespace not in self._watchers.values():
            return
        if len(self._moves) >= MOVES_MAX:
            self.untold += 1
            return
        self._moves.append((entry.record.namespace, tier, is_here, entry.record.key))

    def take_moves(self) -> Iterator[Moves]:
        """What to tell, in the order it happened; neighbours of one kind are one message."""
        moves, self._moves = self._moves, []
        for kind, group in groupby(moves, key=lambda move: move[:3]):
            namespace, tier, is_here = kind
            keys = tuple(key for *_, key in group)
            for session in [s for s, watched in self._watchers.items() if watched == namespace]:
                yield Moves(session, tier, is_here, keys)


def _size_bytes(entry: Entry, tier: int | None) -> int:
    return entry.slot_bytes if tier is None else entry.lower_bytes[tier]
