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

Keys only: no sizes, no I/O. Queues that share a clock can be merged by rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import lcm
from typing import ClassVar, Self

import msgspec

from tiered_kv.tiering.eviction_policy import UseClock
from tiered_kv.tiering.key_map import KeyMap

LEVELS = 4
"""More make no difference on the trace that was measured; two already give most of what there is."""

_FACTORS = [lcm(*range(1, LEVELS + 1)) // level for level in range(1, LEVELS + 1)]
"""Ages are multiplied by these instead of divided by 1, 2, ..: whole numbers compare exactly."""


class _Group(msgspec.Struct, eq=False, gc=False):
    """Keys of one level that were last used at one time.

    The garbage collector does not know of groups (see ``Entry``): one that is taken out of its queue is referred to by
    nobody, though it still refers to its neighbours.
    """

    level: int
    time: int
    keys: dict[bytes, None]
    newer: _Group = None  # type: ignore[assignment]
    older: _Group = None  # type: ignore[assignment]

    @classmethod
    def alone(cls, level: int, time: int) -> Self:
        """A group that is its own neighbour."""
        group = cls(level, time, {})
        group.newer = group.older = group
        return group


class MultiQueue:
    """Order by age and uses. Every key is added once before it is used and removed once.

    Every operation takes constant time per key, but for a key that is added behind a parent of a lower age and a higher
    level: its place is looked for among the groups that were used since. Threads: one owner.
    """

    needs_uses: ClassVar[bool] = True

    def __init__(self, uses: Callable[[bytes], int], clock: UseClock) -> None:
        """Start empty; see :class:`~tiered_kv.tiering.eviction_policy.EvictionPolicy`."""
        self._uses = uses
        self._clock = clock
        self._groups = KeyMap[_Group]()
        self._queues = [_Group.alone(level, 0) for level in range(LEVELS)]  # each stands before its oldest group

    def __del__(self) -> None:
        # Groups refer to their neighbours, in rings, and the garbage collector does not know of them.
        for end in self._queues:
            group = end
            while group is not None:
                following, group.newer, group.older = group.newer, None, None  # type: ignore[assignment]
                group = following

    def add(self, key: bytes, parent: bytes | None) -> None:
        """Start to order ``key``: right before ``parent`` if that is ordered, else as just used."""
        assert key not in self._groups, "a key was added twice"
        level = self._level(key)
        before = self._groups.get(parent) if parent is not None else None
        if before is None:
            self._put(key, level, self._clock.tick())
        elif before.level <= level:
            before.keys[key] = None
            self._groups[key] = before
        else:
            self._put(key, level, before.time)

    def _level(self, key: bytes) -> int:
        return min(self._uses(key), len(self._queues) - 1)

    def remove(self, key: bytes) -> None:
        """Forget ``key``."""
        group = self._groups[key]
        del self._groups[key], group.keys[key]
        if not group.keys:
            group.older.newer, group.newer.older = group.newer, group.older

    def record_use(self, prefix: Iterable[bytes]) -> None:
        """Note one use of a prefix, given from its deepest chunk to its root; unknown keys are ignored.

        Stores are uses, too: how often somebody asked for a chunk is counted by the index (``index.py``).
        """
        now = self._clock.tick()
        level = top = 0
        runs: list[tuple[_Group, int, dict[bytes, None]]] = []  # of one group and one level, deepest first
        keys = list(prefix)
        groups = self._groups.get_all(keys)
        for key, group in zip(reversed(keys), reversed(groups), strict=True):
            if group is not None:
                top = self._level(key)  # nobody in the prefix is asked for more often than its root
                break
        last = None
        for key, group in zip(keys, groups, strict=True):
            if group is None:
                continue
            before = level
            if level < top:
                level = max(level, self._level(key))
            level = max(level, group.level)  # no lower than the chunks behind it, now or before
            if group is not last or level != before:
                runs.append((group, level, {}))
                last = group
            runs[-1][2][key] = None
        for group, new_level, run in reversed(runs):
            if run.keys() == group.keys.keys():
                self._put_all(group, new_level, now)
            else:
                for key in reversed(run):
                    self.remove(key)
                    self._put(key, new_level, now)

    def _put_all(self, group: _Group, level: int, time: int) -> None:
        """Place a whole group, which nothing is newer than, as it is: what was used together is used together again."""
        group.older.newer, group.newer.older = group.newer, group.older
        older = self._queues[level].older
        if older.time == time and older is not self._queues[level]:
            older.keys.update(group.keys)
            for key in group.keys:
                self._groups[key] = older
            return
        group.level, group.time, group.newer, group.older = level, time, older.newer, older
        older.newer.older = older.newer = group

    def move(self, to: MultiQueue, is_moved: Callable[[bytes], bool]) -> None:
        """Give keys to another of the same clock, each at its place there. Takes time for all keys of both.

        What was used at one time goes as a whole.
        """
        for end, to_end in zip(self._queues, to._queues, strict=True):
            group, newer = end.newer, to_end.newer
            while group is not end:
                following = group.newer
                if is_moved(next(iter(group.keys))):
                    while newer is not to_end and newer.time < group.time:
                        newer = newer.newer
                    for key in group.keys:
                        to._groups[key] = group
                        del self._groups[key]
                    group.older.newer, group.newer.older = group.newer, group.older
                    group.older, group.newer = newer.older, newer
                    newer.older.newer = newer.older = group
                group = following

    def _put(self, key: bytes, level: int, time: int) -> None:
        """Place a key behind all others of its group, which go after it."""
        older = self._queues[level].older
        while older.time > time:
            older = older.older
        if older.time == time:
            group = older
        else:
            group = _Group(level, time, {}, newer=older.newer, older=older)
            older.newer.older = older.newer = group
        group.keys[key] = None
        self._groups[key] = group

    def __iter__(self) -> Iterator[bytes]:
        return (key for _, key in self.candidates())

    def candidates(self) -> Iterator[tuple[int, bytes]]:
        """Keys in the order in which they should go, children before parents, each with its rank.

        The largest goes first; queues of one clock merge by it. Nothing may change meanwhile.
        """
        now = self._clock.now + 1
        oldest = [end.newer for end in self._queues if end.newer is not end]
        while oldest:
            group = max(oldest, key=lambda group: (now - group.time) * _FACTORS[group.level])
            rank = (now - group.time) * _FACTORS[group.level]
            for key in reversed(group.keys):
                yield rank, key
            place = oldest.index(group)
            if group.newer is self._queues[group.level]:
                del oldest[place]
            else:
                oldest[place] = group.newer

    def __contains__(self, key: bytes) -> bool:
        return key in self._groups

    def __len__(self) -> int:
        return len(self._groups)
