"""The chunks of one tier that may be evicted, in the order in which they should go: suffix before prefix.

Owns membership, and the rule that a chunk always goes before its parent; which one is worth least is the policy's
business (``eviction.py``, ``multi_queue.py``). Called by ``host.py`` and ``lower.py``, each with its own orders.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tiered_kv.hierarchy.eviction import EvictionPolicy, LeastRecentlyUsed
from tiered_kv.hierarchy.index import Entry, Index
from tiered_kv.hierarchy.multi_queue import MultiQueue


class Order:
    """Entries of the index, first to go first.

    Threads: one owner.
    """

    def __init__(self, number: int, index: Index) -> None:
        """Start empty. A chunk is in at most one order of each ``number``: 0 host memory, 1 the first lower tier."""
        self._number = number
        self._index = index
        self._policy: EvictionPolicy = LeastRecentlyUsed() if index.eviction == "lru" else MultiQueue(index.uses_of)

    def add(self, entry: Entry) -> None:
        """Begin to order the chunk, as recently used as its parent, or as just used where its parent is not ordered.

        If chunks behind it are ordered already, it and the prefix before it count as just used: chunks come in any
        order, and it has to go after the ones and before the other.
        """
        parent = self._index.parent(entry)
        if entry.ordered_children[self._number]:
            self._policy.add(entry.record.key, None)
            self._policy.record_use(e.record.key for e in self._index.prefix(entry)[1:])
        else:
            self._policy.add(entry.record.key, entry.record.parent if parent else None)
        entry.ordered[self._number] = True
        if parent is not None:
            parent.ordered_children[self._number] += 1

    def remove(self, entry: Entry) -> None:
        """Order the chunk no more."""
        self._policy.remove(entry.record.key)
        entry.ordered[self._number] = False
        if (parent := self._index.parent(entry)) is not None:
            parent.ordered_children[self._number] -= 1

    def record_use(self, prefix: Iterable[bytes]) -> None:
        """Note the use of a prefix, from its deepest chunk to its root; chunks that are not ordered are ignored."""
        self._policy.record_use(prefix)

    def __iter__(self) -> Iterator[Entry]:
        for key in self._policy:
            entry = self._index.get(key)
            assert entry is not None, "a chunk is ordered that nobody knows"
            yield entry

    def __contains__(self, entry: Entry) -> bool:
        return entry.ordered[self._number] and entry.record.key in self._policy

    def __len__(self) -> int:
        return len(self._policy)

    def check_integrity(self) -> None:
        """Assert that chunks go before their parents."""
        gone: set[Entry] = set()
        for entry in self:
            gone.add(entry)
            for child in entry.children or ():
                assert child not in self or child in gone, "a chunk goes before its child"
