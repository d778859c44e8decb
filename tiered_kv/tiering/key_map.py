"""A dictionary by keys of chunks that takes no longer for one operation because it has a million of them.

A dictionary of Python's that is full is copied: 33 ms at 700,000 keys (AMD EPYC), with every lookup waiting. This one
is 256 small dictionaries by the last byte of a key, each of which is copied, or listed, in well below a millisecond at
a million keys. Keys are hashes, so the parts are about as large as each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, Generic, TypeVar

PARTS: Final = 256

V = TypeVar("V")


class KeyMap(Generic[V]):
    """What a dictionary does, for keys of at least one byte.

    Unlike a dictionary's, its order is no order of time. Threads: one owner.
    """

    __slots__ = ("_len", "_parts")

    def __init__(self) -> None:
        self._parts: tuple[dict[bytes, V], ...] = tuple({} for _ in range(PARTS))
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def __contains__(self, key: bytes) -> bool:
        return key in self._parts[key[-1]]

    def __getitem__(self, key: bytes) -> V:
        return self._parts[key[-1]][key]

    def __setitem__(self, key: bytes, value: V) -> None:
        part = self._parts[key[-1]]
        before = len(part)
        part[key] = value
        self._len += len(part) - before

    def __delitem__(self, key: bytes) -> None:
        del self._parts[key[-1]][key]
        self._len -= 1

    def get(self, key: bytes) -> V | None:
        """The value of a key, None if it has none."""
        return self._parts[key[-1]].get(key)

    def get_all(self, keys: Iterable[bytes]) -> list[V | None]:
        """The same of each of these."""
        parts = self._parts
        return [parts[key[-1]].get(key) for key in keys]

    def pop(self, key: bytes) -> V | None:
        """Take a key out; its value, None if it had none."""
        part = self._parts[key[-1]]
        before = len(part)
        value = part.pop(key, None)
        self._len -= before - len(part)
        return value

    def __iter__(self) -> Iterator[bytes]:
        """Keys. Nothing may be added or taken out meanwhile."""
        return (key for part in self._parts for key in part)

    def values(self) -> Iterator[V]:
        """Values. Nothing may be added or taken out meanwhile."""
        return (value for part in self._parts for value in part.values())

    def walk(self) -> Iterator[V]:
        """Values, while others may be added and taken out.

        What stays all the time is given once. What is taken out meanwhile may be given, and what is added may not: a
        part is listed when it is come to.
        """
        for part in self._parts:
            yield from list(part.values())

    def pop_all(self) -> Iterator[V]:
        """Take all values out, one after the other, so that what nobody else knows goes one by one.

        A million objects that are let go of at once take 0.1 to 0.2 s.
        """
        for part in self._parts:
            while part:
                value = part.popitem()[1]
                self._len -= 1
                yield value
                del value
