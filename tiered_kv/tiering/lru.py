"""Eviction by age alone: the chunk that was used longest ago goes first, and a suffix before its prefix.

A queue of groups: the keys that were used at one time, root first. Keys only: no sizes, no I/O.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import ClassVar

from tiered_kv.tiering.eviction_policy import UseClock
from tiered_kv.tiering.key_map import KeyMap


class Lru:
    """Least recently used; see :class:`~tiered_kv.tiering.eviction_policy.EvictionPolicy`.

    Threads: one owner.
    """

    needs_uses: ClassVar[bool] = False

    def __init__(self, uses: Callable[[bytes], int], clock: UseClock) -> None:
        """Start empty; how often a chunk was used does not matter here."""
        del uses
        self._clock = clock
        self._times = KeyMap[int]()
        self._groups: OrderedDict[int, dict[bytes, None]] = OrderedDict()  # by time, oldest first

    def add(self, key: bytes, parent: bytes | None) -> None:
        """Start to order ``key``: right before ``parent`` if that is ordered, else as just used."""
        assert key not in self._times, "a key was added twice"
        time = self._times.get(parent) if parent is not None else None
        self._put(key, self._clock.tick() if time is None else time)

    def remove(self, key: bytes) -> None:
        """Forget ``key``."""
        time = self._times[key]
        group = self._groups[time]
        del self._times[key], group[key]
        if not group:
            del self._groups[time]

    def record_use(self, prefix: Iterable[bytes]) -> None:
        """Note one use of a prefix, given from its deepest chunk to its root; unknown keys are ignored."""
        now = self._clock.tick()
        runs: list[tuple[int, dict[bytes, None]]] = []  # that were used at one time, deepest first
        keys = list(prefix)
        for key, time in zip(keys, self._times.get_all(keys), strict=True):
            if time is None:
                continue
            if runs and runs[-1][0] == time:
                runs[-1][1][key] = None
            else:
                runs.append((time, {key: None}))
        for time, run in reversed(runs):
            if run.keys() == self._groups.get(time, {}).keys():
                group = self._groups.pop(time)
                self._groups.setdefault(now, {}).update(group)
                for key in group:
                    self._times[key] = now
            else:
                for key in reversed(run):
                    self.remove(key)
                    self._put(key, now)

    def move(self, to: Lru, is_moved: Callable[[bytes], bool]) -> None:
        """Give keys to another queue of the same clock. What was used at one time goes as a whole."""
        for time, group in list(self._groups.items()):
            if is_moved(next(iter(group))):
                to._groups[time] = self._groups.pop(time)
                for key in group:
                    to._times[key] = time
                    del self._times[key]
        to._groups = OrderedDict(sorted(to._groups.items()))

    def candidates(self) -> Iterator[tuple[int, bytes]]:
        """Keys in the order in which they should go, children before parents, each with its age."""
        now = self._clock.now + 1
        return ((now - time, key) for time, group in self._groups.items() for key in reversed(group))

    def _put(self, key: bytes, time: int) -> None:
        """Place a key behind all others of its group, which go after it."""
        self._groups.setdefault(time, {})[key] = None
        self._times[key] = time

    def __iter__(self) -> Iterator[bytes]:
        return (key for _, key in self.candidates())

    def __contains__(self, key: bytes) -> bool:
        return key in self._times

    def __len__(self) -> int:
        return len(self._times)
