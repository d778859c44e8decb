"""Caches of blocks for the replay of a request trace: ours, LRU, and the two limits.

Every cache is told of whole requests: :meth:`Cache.use` gets the blocks of one prompt, root first. A block counts as a
hit only if all blocks before it are in the cache, too. Blocks are handed to each policy deepest first, as the product
does, so that of one request the suffix is the older part. An OrderedDict has its oldest key first.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence

NEVER = 1 << 60


class Cache(ABC):
    """A cache of at most ``size`` blocks."""

    def __init__(self, size: int) -> None:
        self.size = size

    @abstractmethod
    def __contains__(self, block: int) -> bool:
        """Whether the block is in the cache."""

    @abstractmethod
    def use(self, blocks: Sequence[int]) -> None:
        """All blocks of a request were used, root first; those that were not here come in."""


class Lru(Cache):
    """Least recently used; exactly the product's of one level. Without a limit it is the infinite cache."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._order: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._order

    def use(self, blocks: Sequence[int]) -> None:
        order = self._order
        for block in reversed(blocks):
            order[block] = None
            order.move_to_end(block)
        while len(order) > self.size:
            order.popitem(last=False)


class Optimum(Cache):
    """Belady's MIN per block: keeps those whose next use comes first; what is used next last is not even taken in.

    A parent is used whenever its child is, so it is never used later: MIN, with ties broken towards the deeper block,
    keeps prefixes whole, and no cache of this size has more hits, whether it keeps prefixes whole or not.
    """

    def __init__(self, size: int, requests: Sequence[Sequence[int]]) -> None:
        super().__init__(size)
        coming: dict[int, int] = {}
        self._next: list[list[int]] = []
        for number in range(len(requests) - 1, -1, -1):
            self._next.append([coming.get(block, NEVER) for block in requests[number]])
            coming.update(dict.fromkeys(requests[number], number))
        self._cache: dict[int, int] = {}
        self._heap: list[tuple[int, int, int]] = []

    def __contains__(self, block: int) -> bool:
        return block in self._cache

    def use(self, blocks: Sequence[int]) -> None:
        for depth, (block, coming) in enumerate(zip(blocks, self._next.pop(), strict=True)):
            self._cache.pop(block, None)
            if coming != NEVER:
                self._cache[block] = coming
                heapq.heappush(self._heap, (-coming, -depth, block))
        while len(self._cache) > self.size:
            coming, _, block = heapq.heappop(self._heap)
            if self._cache.get(block) == -coming:
                del self._cache[block]


class MultiQueue(Cache):
    """The product's policy, as it comes out when requests are served one after the other; a test compares the two."""

    def __init__(self, size: int, levels: int = 4, generations: float = 1.0, generation_min: int = 1024) -> None:
        super().__init__(size)
        self._queues: list[OrderedDict[int, int]] = [OrderedDict() for _ in range(levels)]
        self._uses: dict[int, int] = {}
        self._level: dict[int, int] = {}
        self._gone: list[dict[int, int]] = [{}, {}]
        self._generation = max(size, generation_min) * generations
        self._now = 0

    def __contains__(self, block: int) -> bool:
        return block in self._level

    def use(self, blocks: Sequence[int]) -> None:
        hits = next((place for place, block in enumerate(blocks) if block not in self), len(blocks))
        for block in blocks[:hits]:
            self._uses[block] += 1
        self._touch(blocks[:hits])
        before = None if hits == 0 else blocks[hits - 1]
        for block in blocks[hits:]:
            young, old = self._gone[0].pop(block, None), self._gone[1].pop(block, None)
            gone = old if young is None else young
            uses = 0 if gone is None else gone + 1
            self._now += before is None
            self._uses[block] = uses if before is None else min(uses, self._uses[before])
            if len(self._level) >= self.size:
                self._evict()
            self._place(block)
            before = block
        if hits < len(blocks):
            self._touch(blocks)

    def _touch(self, blocks: Sequence[int]) -> None:
        self._now += 1
        for block in reversed(blocks):
            del self._queues[self._level[block]][block]
            self._place(block)

    def _place(self, block: int) -> None:
        level = min(self._uses[block], len(self._queues) - 1)
        self._level[block] = level
        self._queues[level][block] = self._now

    def _evict(self) -> None:
        largest, oldest = 0.0, self._queues[0]
        for level, queue in enumerate(self._queues):
            if queue and (age := (self._now + 1 - next(iter(queue.values()))) / (level + 1)) > largest:
                largest, oldest = age, queue
        block, _ = oldest.popitem(last=False)
        del self._level[block]
        self._gone[0][block] = self._uses.pop(block)
        if len(self._gone[0]) >= self._generation:
            self._gone = [{}, self._gone[0]]


def replay(requests: Sequence[Sequence[int]], cache: Cache) -> list[int]:
    """Blocks of each request that were there, all before them included."""
    hits = []
    for blocks in requests:
        count = 0
        while count < len(blocks) and blocks[count] in cache:
            count += 1
        hits.append(count)
        cache.use(blocks)
    return hits
