"""The chunks of a tier on their prefix trees: blobs in, blobs out (``keys/prefix_tree.py`` knows rows only)."""

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property

from tiered_kv.keys.prefix_tree import PrefixTree
from tiered_kv.ops.storage import StoredBlob

Ident = tuple[bytes, bytes]
"""Namespace and key of a chunk."""


def ident(blob: StoredBlob) -> Ident:
    """Namespace and key of a blob's chunk."""
    return blob.name.namespace, blob.name.key


class Forest:
    """Every namespace's chunks, linked to their parents.

    Attributes:
        blobs: By namespace and key; of two blobs of one chunk the later one.
    """

    def __init__(self, blobs: Iterable[StoredBlob]) -> None:
        self.blobs = {(blob.name.namespace, blob.name.key): blob for blob in blobs}
        self._stored = list(self.blobs.values())  # by row of the tree
        self._tree = PrefixTree.of([blob.name for blob in self._stored])

    @cached_property
    def _rows(self) -> dict[Ident, int]:
        return {key: row for row, key in enumerate(self.blobs)}

    def _at(self, rows: Iterable[int]) -> list[StoredBlob]:
        return [self._stored[row] for row in rows]

    @property
    def roots(self) -> list[StoredBlob]:
        """First chunks of a prefix."""
        return self._at(self._tree.roots)

    @property
    def orphans(self) -> list[StoredBlob]:
        """Chunks whose parent is missing: no request can reach them, or any chunk behind them."""
        return self._at(self._tree.orphans)

    def children(self, blob: StoredBlob) -> list[StoredBlob]:
        """The chunks that continue this one; none where a prefix ends, or where the blob is not in the forest."""
        row = self._rows.get(ident(blob))
        return [] if row is None else self._at(self._tree.children(row))

    def prefix(self, blob: StoredBlob) -> list[StoredBlob]:
        """The chunk and those before it, deepest first, up to the first that is missing."""
        row = self._rows.get(ident(blob))
        return [blob] if row is None else self._at(self._tree.prefix(row))

    def behind(self, blobs: Iterable[StoredBlob]) -> list[StoredBlob]:
        """These chunks of the forest and everything that depends on them, each once."""
        return self._at(self._tree.behind(self._rows[ident(blob)] for blob in blobs))

    def unreachable(self) -> list[StoredBlob]:
        """Everything behind a gap."""
        return self._at(self._tree.behind(self._tree.orphans))

    def last_uses(self) -> dict[Ident, float]:
        """When each chunk was last used: a use of a chunk is a use of the prefix before it."""
        used = [blob.used_s for blob in self._stored]
        self._tree.spread_uses(used)
        return dict(zip(self.blobs, used, strict=True))

    def pinned(self) -> set[Ident]:
        """Pinned chunks and the prefixes before them."""
        marked = self._tree.with_prefixes(row for row, blob in enumerate(self._stored) if blob.pinned_until_s)
        return {ident(blob) for blob, is_kept in zip(self._stored, marked, strict=True) if is_kept}

    def walk(self, order: Callable[[StoredBlob], float] | None = None) -> Iterator[StoredBlob]:
        """Every reachable chunk, each tree before the next, parents before children.

        Args:
            order: Sort key of siblings and of roots; None: as the blobs were given.
        """
        by_row = None if order is None else (lambda row: order(self._stored[row]))
        return (self._stored[row] for row in self._tree.walk(by_row))
