"""Eviction policies of the literature that are made of queues, in plain Python and written from the papers.

They were made for blocks without parents: each is handed the blocks of a request deepest first, but may evict a parent
before its child all the same, and then holds what nobody can use. ``trace_ranked.py`` has those that rank.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

from trace_policies import Cache  # beside this module


class TwoQueue(Cache):
    """2Q (Johnson, Shasha, VLDB 1994): a FIFO of a quarter, ghosts of half the size, an LRU for what comes back."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._first: OrderedDict[int, None] = OrderedDict()
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        self._main: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._main or block in self._first

    def use(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            if block in self._main:
                self._main.move_to_end(block)
            elif block not in self._first:
                is_known = self._ghosts.pop(block, self) is None
                (self._main if is_known else self._first)[block] = None
        while len(self._main) + len(self._first) > self.size:
            if len(self._first) > self.size // 4 or not self._main:
                block, _ = self._first.popitem(last=False)
                self._ghosts[block] = None
                if len(self._ghosts) > self.size // 2:
                    self._ghosts.popitem(last=False)
            else:
                self._main.popitem(last=False)


class Arc(Cache):
    """ARC (Megiddo, Modha, FAST 2003): two LRU lists and their ghosts share the size by which ghosts are hit."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._once, self._often, self._once_gone, self._often_gone = (OrderedDict[int, None]() for _ in range(4))
        self._share = 0.0

    def __contains__(self, block: int) -> bool:
        return block in self._often or block in self._once

    def use(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self._request(block)

    def _request(self, block: int) -> None:
        once, often, once_gone, often_gone = self._once, self._often, self._once_gone, self._often_gone
        if block in once or block in often:
            (once if block in once else often).pop(block)
            often[block] = None
        elif block in once_gone:
            self._share = min(self.size, self._share + max(1.0, len(often_gone) / len(once_gone)))
            self._replace(is_often=False)
            del once_gone[block]
            often[block] = None
        elif block in often_gone:
            self._share = max(0.0, self._share - max(1.0, len(once_gone) / len(often_gone)))
            self._replace(is_often=True)
            del often_gone[block]
            often[block] = None
        else:
            self._make_room()
            once[block] = None

    def _make_room(self) -> None:
        known = len(self._once) + len(self._once_gone)
        if known >= self.size:
            if len(self._once) < self.size:
                self._once_gone.popitem(last=False)
                self._replace(is_often=False)
            else:
                self._once.popitem(last=False)
        elif known + len(self._often) + len(self._often_gone) >= self.size:
            if known + len(self._often) + len(self._often_gone) >= 2 * self.size:
                self._often_gone.popitem(last=False)
            self._replace(is_often=False)

    def _replace(self, *, is_often: bool) -> None:
        if len(self._once) + len(self._often) < self.size:
            return
        count = len(self._once)
        if count and (count > self._share or (is_often and count == self._share) or not self._often):
            self._once_gone[self._once.popitem(last=False)[0]] = None
        else:
            self._often_gone[self._often.popitem(last=False)[0]] = None


class S3Fifo(Cache):
    """S3-FIFO (Yang et al., SOSP 2023): a small FIFO of a tenth, a main FIFO that gives second chances, ghosts."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._small: OrderedDict[int, None] = OrderedDict()
        self._main: OrderedDict[int, None] = OrderedDict()
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        self._uses: dict[int, int] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._uses

    def use(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            if block in self._uses:
                self._uses[block] = min(3, self._uses[block] + 1)
                continue
            is_known = self._ghosts.pop(block, self) is None
            (self._main if is_known else self._small)[block] = None
            self._uses[block] = 0
        while len(self._uses) > self.size:
            if len(self._small) > self.size // 10 or not self._main:
                self._evict_small()
            else:
                self._evict_main()

    def _evict_small(self) -> None:
        block, _ = self._small.popitem(last=False)
        if self._uses[block] > 1:
            self._main[block] = None
            self._uses[block] = 0
            return
        del self._uses[block]
        self._ghosts[block] = None
        if len(self._ghosts) > self.size:
            self._ghosts.popitem(last=False)

    def _evict_main(self) -> None:
        block, _ = self._main.popitem(last=False)
        if self._uses[block]:
            self._uses[block] -= 1
            self._main[block] = None
        else:
            del self._uses[block]


class Sieve(Cache):
    """SIEVE (Zhang et al., NSDI 2024): a FIFO; a hand walks from old to new and spares once what was used."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._used: dict[int, bool] = {}
        self._newer: dict[int, int] = {-1: -1}
        self._older: dict[int, int] = {-1: -1}
        self._hand = -1

    def __contains__(self, block: int) -> bool:
        return block in self._used

    def use(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            if block in self._used:
                self._used[block] = True
                continue
            self._used[block] = False
            newest = self._older[-1]
            self._newer[block], self._older[block] = -1, newest
            self._newer[newest] = self._older[-1] = block
        while len(self._used) > self.size:
            self._evict()

    def _evict(self) -> None:
        block = self._hand
        while block == -1 or self._used[block]:
            if block != -1:
                self._used[block] = False
            block = self._newer[block]
        newer, older = self._newer.pop(block), self._older.pop(block)
        self._newer[older], self._older[newer] = newer, older
        self._hand = newer
        del self._used[block]


class WTinyLfu(Cache):
    """W-TinyLFU (Einziger, Friedman, Manes, ToS 2017): a window of 1 %; into the main SLRU only what is asked more."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._window, self._first, self._kept = (OrderedDict[int, None]() for _ in range(3))
        self._asked: Counter[int] = Counter()  # exact, where the paper has a sketch
        self._count = 0

    def __contains__(self, block: int) -> bool:
        return block in self._kept or block in self._first or block in self._window

    def use(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self._ask(block)
            if block in self._kept:
                self._kept.move_to_end(block)
            elif block in self._first:
                del self._first[block]
                self._kept[block] = None
                if len(self._kept) > self.size * 0.99 * 0.8:
                    self._first[self._kept.popitem(last=False)[0]] = None
            else:
                self._window[block] = None
                self._window.move_to_end(block)
        while len(self._window) > max(1, self.size // 100):
            block, _ = self._window.popitem(last=False)
            self._first[block] = None
            if len(self._window) + len(self._first) + len(self._kept) > self.size:
                victim = next(iter(self._first))
                del self._first[block if self._asked[block] <= self._asked[victim] else victim]

    def _ask(self, block: int) -> None:
        self._asked[block] += 1
        self._count += 1
        if self._count >= 10 * self.size:
            self._count //= 2
            self._asked = Counter({b: n // 2 for b, n in self._asked.items() if n > 1})


QUEUES: dict[str, type[Cache]] = {
    "2Q": TwoQueue,
    "ARC": Arc,
    "S3-FIFO": S3Fifo,
    "SIEVE": Sieve,
    "W-TinyLFU": WTinyLfu,
}
