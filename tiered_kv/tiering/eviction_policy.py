"""What an eviction policy does, and the clock that the policies of one tier share.

A policy orders keys by worth and knows nothing else: no sizes, no tiers, no I/O. ``eviction.py`` holds the registry and
drives the policies; ``lru.py`` and ``multi_queue.py`` are two of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import ClassVar, Protocol, Self


class UseClock:
    """Time as a count of uses of prefixes, and of keys that came without a parent."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0

    def tick(self) -> int:
        """The next moment."""
        self.now += 1
        return self.now


class EvictionPolicy(Protocol):
    """An order of keys by worth. Every key is added once before it is used and removed once.

    A key always goes before its parent, whatever is added and used. Threads: one owner.

    Attributes:
        needs_uses: The order depends on how often a chunk was used; the index then remembers it for evicted chunks.
    """

    needs_uses: ClassVar[bool]

    def __init__(self, uses: Callable[[bytes], int], clock: UseClock) -> None:
        """Start empty.

        Args:
            uses: Returns how often a chunk was asked for; never less for a parent than for its child.
            clock: Time, shared by the policies of one tier, whose candidates are merged by rank.
        """

    def add(self, key: bytes, parent: bytes | None) -> None:
        """Start to order ``key``: right before ``parent`` if that is ordered, else as just used."""

    def remove(self, key: bytes) -> None:
        """Forget ``key``."""

    def record_use(self, prefix: Iterable[bytes]) -> None:
        """Note one use of a prefix, given from its deepest chunk to its root; unknown keys are ignored."""

    def move(self, to: Self, is_moved: Callable[[bytes], bool]) -> None:
        """Give keys to another policy of the same clock, each at its place there.

        Args:
            is_moved: Gives one answer for a key and all that were used together with it.
        """

    def candidates(self) -> Iterator[tuple[int, bytes]]:
        """Keys in the order in which they should go, children before parents, each with its rank.

        The largest rank goes first; policies of one clock merge by it. Nothing may change meanwhile.
        """

    def __contains__(self, key: bytes) -> bool: ...

    def __iter__(self) -> Iterator[bytes]: ...

    def __len__(self) -> int: ...
