"""The blobs of a listing in columns: a million are summed up, sorted and linked without an object for each.

``DiskStorage`` fills one; ``forest.py``, ``listing.py`` and ``summary.py`` read the columns. For everybody else it is a
sequence of blobs.
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import Final, TypeVar, overload

from tiered_kv.keys.naming import BlobName
from tiered_kv.keys.tail_keys import KEY_MARK, tail_tokens
from tiered_kv.ops.storage import StoredBlob

Origin = tuple[bytes | None, str | None]
"""Tag and storer of a blob."""

_T = TypeVar("_T")


def part(column: Sequence[_T], rows: Sequence[int]) -> Sequence[_T]:
    """What a column says of these rows, in their order."""
    if isinstance(rows, range):
        return column[rows.start : rows.stop]
    return [column[row] for row in rows]


class BlobTable(Sequence[StoredBlob]):
    """Blobs by row. As a sequence it makes them: one where one is asked for, and all, once, where they are walked.

    Attributes:
        keys, parents, depths: Of each row what its name tells.
        sizes, written_s, used_s: Of each row what ``StoredBlob`` says.
        origins: Of each row its tag and storer.
        pinned: Until when, of the rows that are.
        tails: How many tokens, of the rows that are tails.

    Threads: one at a time.
    """

    def __init__(self) -> None:
        self.keys: Final = list[bytes]()
        self.parents: Final = list[bytes]()
        self.depths: Final = array("I")
        self.sizes: Final = array("q")
        self.written_s: Final = array("d")
        self.used_s: Final = array("d")
        self.origins: Final = list[Origin]()
        self.pinned: Final = dict[int, float]()
        self.tails: Final = dict[int, int]()
        # Blobs of one namespace mostly come one after the other: where each such run begins, and of which it is.
        self._starts: Final = list[int]()
        self._spaces: Final = list[bytes]()
        self._made: list[StoredBlob] | None = None

    @classmethod
    def of(cls, blobs: Iterable[StoredBlob]) -> "BlobTable":
        """These blobs in a table; itself, if it is one."""
        if isinstance(blobs, BlobTable):
            return blobs
        table, made = cls(), list(blobs)
        for blob in made:
            table.append(blob)
        table._made = made
        return table

    def append(self, blob: StoredBlob) -> None:
        """Add one blob."""
        name = blob.name
        if blob.pinned_until_s:
            self.pinned[len(self)] = blob.pinned_until_s
        self.extend(
            name.namespace,
            (name.key,),
            (name.parent,),
            (name.chunk_index,),
            (blob.size_bytes,),
            (blob.written_s,),
            (blob.used_s,),
            ((blob.tag, blob.stored_by),),
        )

    def extend(
        self,
        namespace: bytes,
        keys: Sequence[bytes],
        parents: Iterable[bytes],
        depths: Iterable[int],
        sizes: Iterable[int],
        written_s: Iterable[float],
        used_s: Iterable[float],
        origins: Iterable[Origin],
    ) -> None:
        """Add blobs of one namespace, column by column; ``pinned`` is the caller's to fill in."""
        self._made = None
        if not self._spaces or self._spaces[-1] != namespace:
            self._starts.append(len(self))
            self._spaces.append(namespace)
        if KEY_MARK in b"".join(keys):
            self.tails.update((row, tokens) for row, key in enumerate(keys, len(self)) if (tokens := tail_tokens(key)))
        self.keys.extend(keys)
        self.parents.extend(parents)
        self.depths.extend(depths)
        self.sizes.extend(sizes)
        self.written_s.extend(written_s)
        self.used_s.extend(used_s)
        self.origins.extend(origins)

    # -- by column ----------------------------------------------------------------------------------------------------

    @property
    def size_bytes(self) -> int:
        """What all of them take."""
        return sum(self.sizes)

    def rows(self) -> Mapping[bytes, Sequence[int]]:
        """Rows by namespace."""
        runs: dict[bytes, list[range]] = {}
        for space, (start, end) in zip(self._spaces, pairwise((*self._starts, len(self))), strict=True):
            runs.setdefault(space, []).append(range(start, end))
        return {space: found[0] if len(found) == 1 else list(chain(*found)) for space, found in runs.items()}

    def namespace(self, row: int) -> bytes:
        """The namespace of a row."""
        return self._spaces[bisect_right(self._starts, row) - 1]

    # -- as a sequence ------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.keys)

    @overload
    def __getitem__(self, row: int) -> StoredBlob: ...

    @overload
    def __getitem__(self, row: slice) -> list[StoredBlob]: ...

    def __getitem__(self, row: int | slice) -> StoredBlob | list[StoredBlob]:
        if isinstance(row, slice):
            return self._all()[row]
        if self._made is not None:
            return self._made[row]
        return self._blob(range(len(self))[row])

    def __iter__(self) -> Iterator[StoredBlob]:
        return iter(self._all())

    def __eq__(self, other: object) -> bool:
        """Whether these are the blobs of another sequence, in its order."""
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and self._all() == list(other)

    __hash__ = None  # type: ignore[assignment]  # it grows

    def _blob(self, row: int) -> StoredBlob:
        name = BlobName(self.namespace(row), self.keys[row], self.parents[row], self.depths[row])
        until_s = self.pinned.get(row, 0.0)
        return StoredBlob(name, self.sizes[row], self.written_s[row], self.used_s[row], until_s, *self.origins[row])

    def _all(self) -> list[StoredBlob]:
        if self._made is None:
            spaces = chain.from_iterable(
                (space,) * (end - start)
                for space, (start, end) in zip(self._spaces, pairwise((*self._starts, len(self))), strict=True)
            )
            names = map(BlobName, spaces, self.keys, self.parents, self.depths)
            columns = zip(names, self.sizes, self.written_s, self.used_s, self.origins, strict=True)
            self._made = [
                StoredBlob(name, size_bytes, written_s, used_s, 0.0, tag, stored_by)
                for name, size_bytes, written_s, used_s, (tag, stored_by) in columns
            ]
            for row in self.pinned:
                self._made[row] = self._blob(row)
        return self._made
