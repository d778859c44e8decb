"""Which chunk goes first when a tier is full. One policy object per tier; keys only, no sizes, no I/O, no clock.

Plain LRU is here; what tells chunks apart by how often they were asked for is in ``multi_queue.py``.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator


class EvictionPolicy(ABC):
    """Order of eviction over the keys of one tier.

    The hierarchy walks the order and skips what must stay (being read, with children there); a policy only orders.
    Every key is added once before it is used and removed once.
    """

    @abstractmethod
    def add(self, key: bytes, parent: bytes | None) -> None:
        """Start to order ``key``: right before ``parent`` if that is ordered, else as just used."""

    @abstractmethod
    def remove(self, key: bytes) -> None:
        """Forget ``key``."""

    @abstractmethod
    def record_use(self, prefix: Iterable[bytes]) -> None:
        """Note one use of a prefix, given from its deepest chunk to its root; unknown keys are ignored.

        Stores are uses, too: how often somebody asked for a chunk is counted by the index (``index.py``).
        """

    @abstractmethod
    def __iter__(self) -> Iterator[bytes]:
        """Keys in the order in which they should go, children before parents, as far as these were added right.

        The policy must not change while this is walked.
        """

    @abstractmethod
    def __contains__(self, key: bytes) -> bool:
        """Whether ``key`` is ordered."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of keys ordered."""


_END = b""
"""Stands before the oldest and after the newest key; no chunk has an empty key."""


class LeastRecentlyUsed(EvictionPolicy):
    """LRU over chunks, suffix before prefix.

    A use touches a whole prefix from its deepest chunk to its root, and a chunk that is added takes the place right
    before its parent, so plain LRU order sends leaves first. A list linked both ways, because OrderedDict inserts at
    its ends only.
    """

    def __init__(self) -> None:
        self._newer: dict[bytes, bytes] = {_END: _END}
        self._older: dict[bytes, bytes] = {_END: _END}

    def add(self, key: bytes, parent: bytes | None) -> None:
        assert key not in self._newer, "a key was added twice"
        self._insert(key, parent if parent is not None and parent in self._newer else _END)

    def remove(self, key: bytes) -> None:
        newer, older = self._newer.pop(key), self._older.pop(key)
        self._newer[older], self._older[newer] = newer, older

    def record_use(self, prefix: Iterable[bytes]) -> None:
        known = self._newer
        for key in prefix:
            if key in known:
                self.remove(key)
                self._insert(key, _END)

    def _insert(self, key: bytes, newer: bytes) -> None:
        older = self._older[newer]
        self._newer[key], self._older[key] = newer, older
        self._newer[older] = self._older[newer] = key

    def __iter__(self) -> Iterator[bytes]:
        key = self._newer[_END]
        while key != _END:
            yield key
            key = self._newer[key]

    def __contains__(self, key: bytes) -> bool:
        return key in self._newer

    def __len__(self) -> int:
        return len(self._newer) - 1
