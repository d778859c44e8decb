"""Chunks as prefix trees: parents and children, gaps, last use of prefixes, and the order in which chunks may go.

Owns which chunk follows which. Knows chunks by row number only: a caller keeps names, sizes and times in columns or
lists of the same order. Pure. Used by the listing of a bucket (``fleet/listing.py``) and by the operator's tools.
"""

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence, Sequence
from functools import cached_property
from typing import Any, Final, Self

ROOT: Final = -1
"""Parent of the first chunk of a prefix."""

GAP: Final = -2
"""Parent of a chunk whose parent is not there."""


class PrefixTree:
    """Rows linked to their parents: every prefix tree of every namespace in one set of columns.

    Attributes:
        depths: Of each row its chunk's position in its prefix.
        parents: Of each row the row of its parent, ``ROOT`` or ``GAP``.

    Threads: one at a time. Nothing is changed after construction; what is derived is computed once, on first use.
    """

    def __init__(self, depths: Sequence[int], candidates: Iterable[int]) -> None:
        """Link the rows.

        A parent that is not exactly one chunk above is none: names may lie, and a circle must not be possible.

        Args:
            candidates: Of each row the row of the chunk in its namespace that its parent's key names; ``ROOT`` where
                that key is the namespace digest, ``GAP`` where there is no such chunk.
        """
        # Nothing is called for each chunk, here and in all that is done with every row: there may be a million.
        self.depths: Final = depths
        self.parents: Final = array(
            "i",
            [
                candidate
                if candidate >= 0 and depths[candidate] == depth - 1
                else (ROOT if depth == 0 and candidate == ROOT else GAP)
                for depth, candidate in zip(depths, candidates, strict=True)
            ],
        )

    @classmethod
    def of(cls, depths: Sequence[int], parents: Sequence[bytes], rows: Mapping[bytes, Mapping[bytes, int]]) -> Self:
        """Link chunks by their names, which tell their ancestry.

        Args:
            parents: Of each row the key of its parent; the namespace digest for the first of a prefix.
            rows: Of each chunk its row, by namespace, then by key.
        """
        candidates = array("i", bytes(4 * len(depths)))
        for space, by_key in rows.items():
            find = by_key.get
            for row in by_key.values():
                parent = parents[row]
                candidates[row] = ROOT if parent == space else find(parent, GAP)
        return cls(depths, candidates)

    def __len__(self) -> int:
        return len(self.parents)

    def memory_bytes(self) -> int:
        """Bytes of the columns that every tree has; ``depths`` are the caller's."""
        return self.parents.itemsize * len(self) + self.shallowest_first.itemsize * len(self)

    # -- who follows whom ---------------------------------------------------------------------------------------------

    @cached_property
    def roots(self) -> list[int]:
        """First chunks of a prefix."""
        return [row for row, parent in enumerate(self.parents) if parent == ROOT]

    @cached_property
    def orphans(self) -> list[int]:
        """Chunks right behind a gap: with all that follows them no request can reach them."""
        return [row for row, parent in enumerate(self.parents) if parent == GAP]

    def prefix(self, row: int) -> list[int]:
        """The row and those before it, deepest first, as far as they are there."""
        chain = [row]
        while (row := self.parents[row]) >= 0:
            chain.append(row)
        return chain

    def children(self, row: int) -> Sequence[int]:
        """Rows that continue this one, in row order."""
        starts, rows = self._children
        return rows[starts[row] : starts[row + 1]]

    def behind(self, rows: Iterable[int]) -> list[int]:
        """These rows and everything that depends on them, each once."""
        found: dict[int, None] = {}
        pending = list(rows)
        while pending:
            row = pending.pop()
            if row not in found:
                found[row] = None
                pending.extend(self.children(row))
        return list(found)

    def walk(self, order: Callable[[int], Any] | None = None) -> Iterator[int]:
        """Every row that a request can reach, each tree before the next, parents before children.

        Args:
            order: Sort key of siblings and of roots; None: row order.
        """
        pending = self._sorted(self.roots, order)
        while pending:
            row = pending.pop()
            yield row
            pending.extend(self._sorted(self.children(row), order))

    # -- gaps ---------------------------------------------------------------------------------------------------------

    def with_prefixes(self, rows: Iterable[int]) -> bytearray:
        """Marks these rows and what is before them."""
        marked = bytearray(len(self))
        for row in rows:
            while row >= 0 and not marked[row]:
                marked[row] = 1
                row = self.parents[row]
        return marked

    def mark_behind(self, marked: bytearray, belongs: Callable[[int], object]) -> None:
        """Mark also the rows right behind marked ones that belong to these, and those that belong behind them.

        Modifies:
            ``marked``.
        """
        parents = self.parents
        for row in self.shallowest_first if any(marked) else ():
            parent = parents[row]
            if parent >= 0 and marked[parent] and not marked[row] and belongs(row):
                marked[row] = 1

    def unreachable(self) -> bytearray:
        """Marks every row behind a gap."""
        dead = bytearray(len(self))
        for row in self.shallowest_first:
            parent = self.parents[row]
            dead[row] = parent == GAP or (parent >= 0 and dead[parent])
        return dead

    def holes(self, is_kept: Callable[[int], object] | None = None) -> list[int]:
        """Rows behind a gap, children before parents, less those to keep and whatever lies between them and the gap."""
        dead = self.unreachable()
        kept = bytearray(len(self))
        if is_kept is not None:
            kept = self.with_prefixes(row for row, is_dead in enumerate(dead) if is_dead and is_kept(row))
        return [row for row in self.deepest_first() if dead[row] and not kept[row]]

    # -- last use and order -------------------------------------------------------------------------------------------

    def spread_uses(self, used: MutableSequence[Any]) -> None:
        """Date prefixes: a use of a chunk is a use of what is before it, so no parent is older than its child.

        Modifies:
            ``used``: of each row when it was last used.
        """
        parents = self.parents
        for row in self.deepest_first():
            parent = parents[row]
            if parent >= 0 and used[parent] < used[row]:
                used[parent] = used[row]

    def deepest_first(self) -> Iterator[int]:
        """Every row, children before parents."""
        return reversed(self.shallowest_first)

    @cached_property
    def shallowest_first(self) -> "array[int]":
        """Every row, parents before children; those of one depth in their order."""
        by_depth: defaultdict[int, array[int]] = defaultdict(lambda: array("I"))
        for row, depth in enumerate(self.depths):
            by_depth[depth].append(row)
        ordered = array("I")
        for _, rows in sorted(by_depth.items()):
            ordered.extend(rows)
        return ordered

    # -- within -------------------------------------------------------------------------------------------------------

    @cached_property
    def _children(self) -> "tuple[array[int], array[int]]":
        """Where each row's children begin in the second column, which holds all of them."""
        starts = array("I", bytes(4 * (len(self) + 1)))
        for parent in self.parents:
            if parent >= 0:
                starts[parent + 1] += 1
        for row in range(len(self)):
            starts[row + 1] += starts[row]
        free = array("I", starts)
        rows = array("I", bytes(4 * starts[-1]))
        for row, parent in enumerate(self.parents):
            if parent >= 0:
                rows[free[parent]] = row
                free[parent] += 1
        return starts, rows

    def _sorted(self, rows: Sequence[int], order: Callable[[int], Any] | None) -> list[int]:
        """Rows so that the first one is popped first."""
        return list(rows)[::-1] if order is None else sorted(rows, key=order)[::-1]
