"""Eviction policies of the literature that give each block a rank; see ``trace_candidates.py``."""

from __future__ import annotations

import heapq
import random
from abc import abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Sequence

from trace_policies import NEVER, Cache  # beside this module


class Ranked(Cache):
    """Evicts what has the least rank: a number that a block is given when it is used, looked up in a heap."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._rank: dict[int, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, int]] = []
        self._count = 0
        self.evicted: float = 0.0

    def __contains__(self, block: int) -> bool:
        return block in self._rank

    @abstractmethod
    def rank(self, block: int) -> float:
        """What the block is worth, now that it was used."""

    def use(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self._count += 1
            self._rank[block] = (self.rank(block), self._count)
            heapq.heappush(self._heap, (*self._rank[block], block))
        while len(self._rank) > self.size:
            rank, count, block = heapq.heappop(self._heap)
            if self._rank.get(block) == (rank, count):
                del self._rank[block]
                self.evicted = rank
                self.gone(block)

    def gone(self, block: int) -> None:
        """The block was evicted."""


class LruTwo(Ranked):
    """LRU-2 (O'Neil, O'Neil, Weikum, SIGMOD 1993): by the use before the last; histories outlive their blocks."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._last: OrderedDict[int, int] = OrderedDict()

    def rank(self, block: int) -> float:
        before = self._last.pop(block, None)
        self._last[block] = self._count
        if len(self._last) > 3 * self.size:
            self._last.popitem(last=False)
        return before if before is not None else self._count - NEVER


class LfuDa(Ranked):
    """LFU with dynamic aging (Arlitt et al., 2000), which GDSF is for blocks of one size: uses + rank last evicted."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._uses: Counter[int] = Counter()

    def rank(self, block: int) -> float:
        self._uses[block] += 1
        return self.evicted + self._uses[block]

    def gone(self, block: int) -> None:
        del self._uses[block]


class Sampled(Cache):
    """Evicts the worst of 64 blocks drawn at random (from a fixed seed); blocks lie in one list."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._blocks: list[int] = []
        self._place: dict[int, int] = {}
        self._draw = random.Random(7)
        self.now = 0

    def __contains__(self, block: int) -> bool:
        return block in self._place

    @abstractmethod
    def used(self, block: int, *, is_new: bool) -> None:
        """The block was used."""

    @abstractmethod
    def worth(self, block: int) -> float:
        """What the block is worth now."""

    def gone(self, block: int) -> None:
        """The block was evicted."""

    def use(self, blocks: Sequence[int]) -> None:
        self.now += 1
        for block in reversed(blocks):
            is_new = block not in self._place
            if is_new:
                self._place[block] = len(self._blocks)
                self._blocks.append(block)
            self.used(block, is_new=is_new)
        while len(self._blocks) > self.size:
            drawn = [self._blocks[int(self._draw.random() * len(self._blocks))] for _ in range(64)]
            victim = min(drawn, key=self.worth)
            place, last = self._place.pop(victim), self._blocks.pop()
            if last != victim:
                self._blocks[place] = last
                self._place[last] = place
            self.gone(victim)


class Hyperbolic(Sampled):
    """Hyperbolic caching (Blankstein, Sen, Freedman, ATC 2017): uses divided by the time since the block came."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._came: dict[int, int] = {}
        self._uses: Counter[int] = Counter()

    def used(self, block: int, *, is_new: bool) -> None:
        if is_new:
            self._came[block] = self.now
        self._uses[block] += 1

    def worth(self, block: int) -> float:
        return self._uses[block] / (self.now + 1 - self._came[block])

    def gone(self, block: int) -> None:
        del self._came[block], self._uses[block]


class Lhd(Sampled):
    """LHD (Beckmann, Chen, Cidon, NSDI 2018): hits per time still to be spent, learnt per age and class of uses."""

    AGES, CLASSES, EVERY = 128, 4, 20_000

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._last: dict[int, int] = {}
        self._uses: Counter[int] = Counter()
        self._step = max(1, size // 24 * 8 // self.AGES)  # requests; 24 blocks each: ages up to 8 times the cache's
        self._hits, self._ends = ([[0.0] * self.AGES for _ in range(self.CLASSES)] for _ in range(2))
        self._worths = [[(uses + 1) / (age + 1) for age in range(self.AGES)] for uses in range(self.CLASSES)]
        self._events = 0

    def _where(self, block: int) -> tuple[int, int]:
        age = (self.now - self._last[block]) // self._step
        return min(self._uses[block] - 1, self.CLASSES - 1), min(age, self.AGES - 1)

    def used(self, block: int, *, is_new: bool) -> None:
        if not is_new:
            uses, age = self._where(block)
            self._hits[uses][age] += 1
        self._uses[block] += 1
        self._last[block] = self.now
        self._events += 1
        if self._events % self.EVERY == 0:
            self._learn()

    def worth(self, block: int) -> float:
        uses, age = self._where(block)
        return self._worths[uses][age]

    def gone(self, block: int) -> None:
        uses, age = self._where(block)
        self._ends[uses][age] += 1
        del self._last[block], self._uses[block]

    def _learn(self) -> None:
        for uses in range(self.CLASSES):
            hits = events = time = 0.0
            for age in range(self.AGES - 1, -1, -1):
                hits += self._hits[uses][age]
                events += self._hits[uses][age] + self._ends[uses][age]
                time += events
                self._worths[uses][age] = hits / time if time else 0.0
            for table in (self._hits, self._ends):
                table[uses] = [0.9 * count for count in table[uses]]


RANKED: dict[str, type[Cache]] = {"LRU-2": LruTwo, "LFU-DA, GDSF": LfuDa, "hyperbolic": Hyperbolic, "LHD": Lhd}
