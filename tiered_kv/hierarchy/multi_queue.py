"""Eviction by age and number of uses: a chunk that was asked for more often may lie unused for longer.

One LRU queue per number of uses, as in Multi-Queue (Zhou, Philbin, Li, "The Multi-Queue Replacement Algorithm for
Second Level Buffer Caches", USENIX ATC 2001). The next to go is, of the oldest of each queue, the one whose age divided
by its level is largest: the value of Hyperbolic Caching (Blankstein, Sen, Freedman, USENIX ATC 2017) with the age since
the last use, which keeps every queue in order. docs/decisions/0015-eviction.md has the figures.

    level                    asked for after it came      goes at age
    1   one-time prompts     never                        a
    2                        once                         2 a
    3                        twice                        3 a
    4   shared prefixes      three times or more          4 a

A chunk never goes before its children: it is as young and has been asked for as often as the youngest and the most used
of them, whatever is added. A queue is a list of groups, linked both ways: what was used at one time, root first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import lcm

from tiered_kv.hierarchy.eviction import EvictionPolicy

LEVELS = 4
"""More make no difference on the trace that was measured; two already give most of what there is."""

_FACTORS = [lcm(*range(1, LEVELS + 1)) // level for level in range(1, LEVELS + 1)]
"""Ages are multiplied by these instead of divided by 1, 2, ..: whole numbers compare exactly."""


class _Group:
    """Keys of one level that were last used at one time."""

    __slots__ = ("keys", "level", "newer", "older", "time")

    def __init__(self, level: int, time: int) -> None:
        self.level = level
        self.time = time
        self.keys: dict[bytes, None] = {}
        self.newer = self.older = self


class MultiQueue(EvictionPolicy):
    """Order by age and uses. Time is a count of uses of prefixes, and of keys that came without a parent.

    Every operation takes constant time per key, but for a key that is added behind a parent of a lower age: its place
    is looked for among the groups that were used since.
    """

    def __init__(self, uses: Callable[[bytes], int]) -> None:
        """Start empty; ``uses`` tells how often a chunk was asked for, and at least as much for its parent."""
        self._uses = uses
        self._now = 0
        self._groups: dict[bytes, _Group] = {}
        self._queues = [_Group(level, 0) for level in range(LEVELS)]  # each stands before its oldest group

    def add(self, key: bytes, parent: bytes | None) -> None:
        assert key not in self._groups, "a key was added twice"
        level = min(self._uses(key), LEVELS - 1)
        before = self._groups.get(parent) if parent is not None else None
        if before is None:
            self._now += 1
            self._put(key, level, self._now)
        else:
            self._put(key, min(level, before.level), before.time)

    def remove(self, key: bytes) -> None:
        group = self._groups.pop(key)
        del group.keys[key]
        if not group.keys:
            group.older.newer, group.newer.older = group.newer, group.older

    def record_use(self, prefix: Iterable[bytes]) -> None:
        self._now += 1
        level = 0
        found = []
        for key in prefix:
            if key in self._groups:
                level = max(level, min(self._uses(key), LEVELS - 1))  # no lower than the chunks behind it
                found.append((key, level))
        for key, level in reversed(found):
            self.remove(key)
            self._put(key, level, self._now)

    def _put(self, key: bytes, level: int, time: int) -> None:
        """Place a key behind all others of its group, which go after it."""
        older = self._queues[level].older
        while older.time > time:
            older = older.older
        if older.time == time:
            group = older
        else:
            group = _Group(level, time)
            group.older, group.newer = older, older.newer
            older.newer.older = older.newer = group
        group.keys[key] = None
        self._groups[key] = group

    def __iter__(self) -> Iterator[bytes]:
        now = self._now + 1
        oldest = [end.newer for end in self._queues if end.newer is not end]
        while oldest:
            group = max(oldest, key=lambda group: (now - group.time) * _FACTORS[group.level])
            yield from reversed(group.keys)
            place = oldest.index(group)
            if group.newer is self._queues[group.level]:
                del oldest[place]
            else:
                oldest[place] = group.newer

    def __contains__(self, key: bytes) -> bool:
        return key in self._groups

    def __len__(self) -> int:
        return len(self._groups)
