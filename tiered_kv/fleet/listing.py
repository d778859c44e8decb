"""A listing of the bucket, compact: about 70 bytes a blob, so that a million of them fit.

Columns of fixed width and an open-addressing table over the keys (which are hashes already) instead of objects and a
dict: a dict of keys alone takes 150 bytes a blob. Pure; the names carry the ancestry (``keys/naming.py``), so the order
in which blobs may go is known without reading one (``keys/prefix_tree.py``). Called by the leader's passes (``gc.py``).

Threads: one at a time.
"""

from array import array
from collections.abc import Collection, Iterable, Iterator
from typing import Final

from tiered_kv.keys.naming import NAME_BYTES, BlobName
from tiered_kv.keys.prefix_tree import GAP, ROOT, PrefixTree
from tiered_kv.keys.state_keys import is_state

NO_ROW: Final = -2
SECONDS_MAX: Final = (1 << 32) - 1


def seconds(value: float) -> int:
    """A moment as the columns hold it: whole seconds since 1970, until the year 2106."""
    return min(max(0, int(value)), SECONDS_MAX)


class Listing:
    """Blobs of one LIST, with their ancestry and last use."""

    def __init__(self) -> None:
        self.spaces: list[bytes] = []
        self._space_numbers: dict[bytes, int] = {}
        self._keys = bytearray()
        self._parents = bytearray()
        self._depths = array("I")
        self._sizes = array("Q")
        self._modified = array("I")
        self._used = array("I")
        self._space = array("I")
        self._table = array("I")
        self._mask = 0
        self._tree = PrefixTree((), ())

    def add(self, name: BlobName, size_bytes: int, modified_s: float) -> None:
        """Take one listed blob; before ``seal``."""
        number = self._space_numbers.get(name.namespace)
        if number is None:
            number = self._space_numbers[name.namespace] = len(self.spaces)
            self.spaces.append(name.namespace)
        self._keys += name.key
        self._parents += name.parent
        self._depths.append(name.chunk_index)
        self._sizes.append(size_bytes)
        self._modified.append(seconds(modified_s))
        self._space.append(number)

    def __len__(self) -> int:
        return len(self._depths)

    def memory_bytes(self) -> int:
        """Bytes of the columns."""
        columns = (self._depths, self._sizes, self._modified, self._used, self._space, self._table)
        names = len(self._keys) + len(self._parents)
        return names + sum(len(column) * column.itemsize for column in columns) + self._tree.memory_bytes()

    def seal(self) -> None:
        """No more blobs come: find everybody's parent."""
        count = len(self)
        size = 1 << max(4, (count * 3 // 2).bit_length())
        self._mask = size - 1
        self._table = array("I", bytes(4 * size))
        for row in range(count):
            place = self._place(self._keys[NAME_BYTES * row : NAME_BYTES * row + 8])
            while self._table[place]:
                place = (place + 1) & self._mask
            self._table[place] = row + 1
        self._used = array("I", self._modified)
        self._tree = PrefixTree(self._depths, map(self._named_parent, range(count)))

    # -- one row ------------------------------------------------------------------------------------------------------

    def find(self, key: bytes) -> int:
        """Row of a key (keys are unique across namespaces), or ``NO_ROW``."""
        if not self._depths:
            return NO_ROW
        place = self._place(key[:8])
        while row := self._table[place]:
            row -= 1
            if self._keys[NAME_BYTES * row : NAME_BYTES * (row + 1)] == key:
                return row
            place = (place + 1) & self._mask
        return NO_ROW

    def name(self, row: int) -> BlobName:
        return BlobName(self.spaces[self._space[row]], self._key(row), self._parent(row), self._depths[row])

    def size_bytes(self, row: int) -> int:
        return self._sizes[row]

    def modified_s(self, row: int) -> int:
        return self._modified[row]

    def used_s(self, row: int) -> int:
        return self._used[row]

    # -- last use -----------------------------------------------------------------------------------------------------

    def use(self, key: bytes, used_s: int) -> None:
        """A log says that this chunk was used then, by the store's clock."""
        row = self.find(key)
        if row >= 0 and used_s > self._used[row]:
            self._used[row] = seconds(used_s)

    def logged_uses(self, grain_s: float) -> Iterator[tuple[bytes, int]]:
        """Keys whose last use is later than their own LastModified tells, and when that was."""
        for row, used_s in enumerate(self._used):
            if used_s - self._modified[row] >= grain_s:
                yield self._key(row), used_s

    def use_prefixes(self) -> None:
        """Count a use of a chunk as a use of its prefix: no parent is older than its child."""
        self._tree.spread_uses(self._used)

    def with_prefixes(self, keys: Iterable[bytes]) -> bytearray:
        """Marks the rows of these keys, of what is before them, and of the states along that.

        Keys that are not in the bucket mark nothing.
        """
        marked = self._tree.with_prefixes(map(self.find, keys))
        self._tree.mark_behind(marked, lambda row: is_state(self.name(row)))
        return marked

    # -- blobs that may go ---------------------------------------------------------------------------------------------

    def holes(
        self, spaces: Collection[bytes] | None, modified_before_s: float, pinned: bytearray | None = None
    ) -> list[int]:
        """Rows whose prefix has a gap, children before parents.

        A blob that is younger or marked in ``pinned`` is left, and so is whatever stands between it and the gap.
        ``spaces`` limits what is taken to these namespaces (None: all).
        """
        wanted = self._wanted(spaces)

        def is_kept(row: int) -> bool:
            return bool(pinned and pinned[row]) or self._modified[row] >= modified_before_s

        return [row for row in self._tree.holes(is_kept) if wanted[self._space[row]]]

    def expired(self, spaces: Collection[bytes] | None, used_before_s: float, taken: bytearray) -> list[int]:
        """Rows not used since, children before parents; those marked in ``taken`` are left out, the found marked."""
        wanted = self._wanted(spaces)
        found = []
        for row in self._tree.deepest_first():
            if not taken[row] and wanted[self._space[row]] and self._used[row] < used_before_s:
                taken[row] = 1
                found.append(row)
        return found

    def oldest(
        self, spaces: Collection[bytes] | None, excess_bytes: int, epoch_s: float, taken: bytearray
    ) -> list[int]:
        """Rows to evict so that ``excess_bytes`` go: by coarse last use, the deepest first, children before parents."""
        wanted = self._wanted(spaces)
        epochs: dict[int, int] = {}
        for row, used_s in enumerate(self._used):
            if not taken[row] and wanted[self._space[row]]:
                epoch = int(used_s // epoch_s)
                epochs[epoch] = epochs.get(epoch, 0) + self._sizes[row]
        limit, total = None, 0
        for epoch in sorted(epochs):
            limit, total = epoch, total + epochs[epoch]
            if total >= excess_bytes:
                break
        if limit is None or excess_bytes <= 0:
            return []
        by_epoch: dict[int, array[int]] = {}
        for row in self._tree.deepest_first():
            if not taken[row] and wanted[self._space[row]] and (epoch := int(self._used[row] // epoch_s)) <= limit:
                by_epoch.setdefault(epoch, array("I")).append(row)
        found: list[int] = []
        freed = 0
        for epoch in sorted(by_epoch):
            for row in by_epoch[epoch]:
                if freed >= excess_bytes:
                    return found
                found.append(row)
                freed += self._sizes[row]
        return found

    # -- within -------------------------------------------------------------------------------------------------------

    def _wanted(self, spaces: Collection[bytes] | None) -> list[bool]:
        return [spaces is None or space in spaces for space in self.spaces]

    def _key(self, row: int) -> bytes:
        return bytes(self._keys[NAME_BYTES * row : NAME_BYTES * (row + 1)])

    def _parent(self, row: int) -> bytes:
        return bytes(self._parents[NAME_BYTES * row : NAME_BYTES * (row + 1)])

    def _place(self, start: bytes | bytearray) -> int:
        return int.from_bytes(start, "little") & self._mask

    def _named_parent(self, row: int) -> int:
        """The row that a name gives as its parent; a chunk of another namespace is none."""
        parent = self._parent(row)
        if parent == self.spaces[self._space[row]]:
            return ROOT
        found = self.find(parent)
        return found if found >= 0 and self._space[found] == self._space[row] else GAP
