"""The chunks of a tier on their prefix trees: blobs in, blobs out (``keys/prefix_tree.py`` knows rows only)."""

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tiered_kv.keys.naming import BlobName
from tiered_kv.keys.prefix_tree import PrefixTree
from tiered_kv.ops.blob_table import BlobTable
from tiered_kv.ops.storage import StoredBlob

Ident = tuple[bytes, bytes]
"""Namespace and key of a chunk."""


@dataclass(frozen=True, slots=True)
class StateSums:
    """The states of a namespace.

    Attributes:
        states: Boundaries with all parts of their state.
        parts: Blobs of states, also of such that lack others.
        size_bytes: What these take.
        chunks_behind: Chunks behind the last state of their prefix, which no hit brings.
    """

    states: int = 0
    parts: int = 0
    size_bytes: int = 0
    chunks_behind: int = 0


def ident(blob: StoredBlob) -> Ident:
    """Namespace and key of a blob's chunk."""
    return blob.name.namespace, blob.name.key


def _rows_of(table: BlobTable) -> dict[bytes, dict[bytes, int]]:
    """Rows by namespace and key; of several blobs of one chunk the last."""
    return {
        space: dict(zip(map(table.keys.__getitem__, rows), rows, strict=True)) for space, rows in table.rows().items()
    }


def _without_copies(blobs: Sequence[StoredBlob]) -> tuple[BlobTable, dict[Ident, list[StoredBlob]]]:
    """One blob of each chunk, that which follows another if only one does, and the others by chunk."""
    found: dict[Ident, list[StoredBlob]] = {}
    for blob in blobs:
        found.setdefault(ident(blob), []).append(blob)

    def follows(blob: StoredBlob) -> bool:
        name = blob.name
        if name.chunk_index == 0:
            return name.parent == name.namespace
        return any(one.name.chunk_index == name.chunk_index - 1 for one in found.get((name.namespace, name.parent), ()))

    table, copies = [], {}
    for chunk, several in found.items():
        if len(several) > 1:
            several.sort(key=follows)
            copies[chunk] = several[:-1]
        table.append(several[-1])
    return BlobTable.of(table), copies


class Forest:
    """Every namespace's chunks, linked to their parents.

    Attributes:
        table: By row of the tree, one blob of each chunk.
        copies: What else a bucket has under a chunk's key: its name says another place in the prefix.
    """

    def __init__(self, blobs: Iterable[StoredBlob]) -> None:
        self.table = BlobTable.of(blobs)
        self._rows = _rows_of(self.table)
        self.copies: dict[Ident, list[StoredBlob]] = {}
        if sum(map(len, self._rows.values())) < len(self.table):
            self.table, self.copies = _without_copies(self.table)
            self._rows = _rows_of(self.table)
        self._tree = PrefixTree.of(self.table.depths, self.table.parents, self._rows)

    @cached_property
    def blobs(self) -> list[StoredBlob]:
        """The same as objects."""
        return list(self.table)

    def row(self, blob: StoredBlob) -> int:
        """Where a chunk is in ``blobs``.

        Raises:
            KeyError: It is not in the forest.
        """
        return self._rows[blob.name.namespace][blob.name.key]

    def with_copies(self, blobs: Iterable[StoredBlob]) -> list[StoredBlob]:
        """These chunks of the forest, each with what else lies under its key."""
        return [one for blob in blobs for one in (blob, *self.copies.get(ident(blob), ()))]

    def find(self, name: BlobName) -> StoredBlob | None:
        """The chunk of this name; None: it is not in the forest."""
        row = self._find(name)
        return None if row is None else self.blobs[row]

    def _find(self, name: BlobName) -> int | None:
        return self._rows.get(name.namespace, {}).get(name.key)

    def _at(self, rows: Iterable[int]) -> list[StoredBlob]:
        return [self.blobs[row] for row in rows]

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
        row = self._find(blob.name)
        return [] if row is None else self._at(self._tree.children(row))

    def prefix(self, blob: StoredBlob) -> list[StoredBlob]:
        """The chunk and those before it, deepest first, up to the first that is missing."""
        row = self._find(blob.name)
        return [blob] if row is None else self._at(self._tree.prefix(row))

    def behind(self, blobs: Iterable[StoredBlob]) -> list[StoredBlob]:
        """These chunks of the forest and everything that depends on them, each once."""
        return self._at(self._tree.behind(map(self.row, blobs)))

    def unreachable(self) -> list[StoredBlob]:
        """Everything behind a gap."""
        return self._at(self._tree.behind(self._tree.orphans))

    def last_uses(self) -> "array[float]":
        """When each chunk was last used, by row: a use of a chunk is a use of the prefix before it."""
        used = array("d", self.table.used_s)
        self._tree.spread_uses(used)
        return used

    def pinned(self) -> set[Ident]:
        """Pinned chunks, the prefixes before them, and the states along these: a prefix without any is of no use."""
        return set(map(ident, self.with_states(map(self.table.__getitem__, self.table.pinned))))

    def with_states(self, blobs: Iterable[StoredBlob]) -> list[StoredBlob]:
        """These chunks of the forest, those before them, and the states that lie along them; parents first."""
        marked = self._tree.with_prefixes(map(self.row, blobs))
        if not any(marked):
            return []
        self._tree.mark_behind(marked, lambda row: self.blobs[row].is_state)
        return [self.blobs[row] for row in self._tree.shallowest_first if marked[row]]

    # -- states -------------------------------------------------------------------------------------------------------

    def chunks_after(self, blob: StoredBlob) -> list[StoredBlob]:
        """The chunks that continue this one, without its state and tails."""
        return [child for child in self.children(blob) if not (child.is_state or child.tail_tokens)]

    def state(self, chunk: StoredBlob) -> list[StoredBlob]:
        """The parts of the state behind a chunk, in their order, up to the first that is missing."""
        found, last = [], chunk
        while (part := next((child for child in self.children(last) if child.is_state), None)) is not None:
            found.append(part)
            last = part
        return found

    def whole_state(self, part: StoredBlob) -> list[StoredBlob]:
        """All that is here of the state that a part belongs to; the deepest first, as it has to go."""
        found, row = self.state(part)[::-1], self.row(part)
        while row >= 0 and self.blobs[row].is_state:  # not the whole prefix: this is asked for every part
            found.append(self.blobs[row])
            row = self._tree.parents[row]
        return found

    def sum_up_states(self, blobs: Iterable[StoredBlob], parts: int) -> "StateSums":
        """Count the states of a namespace.

        Args:
            blobs: All of it.
            parts: Of a state; 0: it has none.
        """
        if not parts:
            return StateSums()
        chunks: list[StoredBlob] = []
        stored: list[StoredBlob] = []
        for blob in blobs:
            (stored if blob.is_state else chunks).append(blob)
        states = [(chunk, state) for chunk in chunks if len(state := self.state(chunk)) == parts]
        before = self._tree.with_prefixes(self.row(chunk) for chunk, _ in states)
        return StateSums(
            states=len(states),
            parts=len(stored),
            size_bytes=sum(part.size_bytes for part in stored),
            chunks_behind=sum(not before[self.row(chunk)] for chunk in chunks),
        )

    def partial_states(self, parts: Mapping[bytes, int]) -> list[StoredBlob]:
        """Parts of states whose last parts are missing: no request can use them.

        Args:
            parts: Of a state, by namespace; of namespaces that are not in it none is partial.
        """
        found = []
        for blob in self._at(self._tree.walk()) if parts else ():
            wanted = parts.get(blob.name.namespace, 0)
            if wanted and not blob.is_state and 0 < len(held := self.state(blob)) < wanted:
                found += held
        return found

    def walk(self, order: Callable[[StoredBlob], float] | None = None) -> Iterator[StoredBlob]:
        """Every reachable chunk, each tree before the next, parents before children.

        Args:
            order: Sort key of siblings and of roots; None: as the blobs were given.
        """
        by_row = None if order is None else (lambda row: order(self.blobs[row]))
        return (self.blobs[row] for row in self._tree.walk(by_row))
