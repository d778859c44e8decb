"""The chunks of a tier as prefix trees: who follows whom, what hangs in the air, and in which order chunks may go."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property

from tiered_kv.admin.storage import StoredBlob

Ident = tuple[bytes, bytes]
"""Namespace and key of a chunk."""


def ident(blob: StoredBlob) -> Ident:
    """What names a chunk in a forest."""
    return blob.name.namespace, blob.name.key


class Forest:
    """Every namespace's chunks, linked to their parents.

    A parent that is not exactly one chunk above is none: names may lie, and a circle must not be possible.
    """

    def __init__(self, blobs: Iterable[StoredBlob]) -> None:
        # Here and in last_uses nothing is called for each chunk, of which there may be a million.
        self.blobs = {(blob.name.namespace, blob.name.key): blob for blob in blobs}
        self.roots: list[StoredBlob] = []
        self.orphans: list[StoredBlob] = []
        """Those whose parent is not there: with all behind them they can be reached by no request."""
        self._depths = [blob.name.chunk_index for blob in self.blobs.values()]
        self._parents: list[int] = []
        """Of each chunk in the order of ``blobs``: the place of its parent; -1 without one."""
        depths, parents = self._depths, self._parents
        place_of = {key: place for place, key in enumerate(self.blobs)}.get
        for (space, _), blob in self.blobs.items():
            depth, above = blob.name.chunk_index, blob.name.parent
            place = place_of((space, above), -1) if depth else -1
            if place >= 0 and depths[place] == depth - 1:
                parents.append(place)
                continue
            parents.append(-1)
            if depth == 0 and above == space:
                self.roots.append(blob)
            else:
                self.orphans.append(blob)

    @cached_property
    def children(self) -> dict[Ident, list[StoredBlob]]:
        """The chunks that continue each chunk; none where a prefix ends."""
        idents, found = list(self.blobs), dict[Ident, list[StoredBlob]]()
        for blob, place in zip(self.blobs.values(), self._parents, strict=True):
            if place >= 0:
                found.setdefault(idents[place], []).append(blob)
        return found

    def parent(self, blob: StoredBlob) -> StoredBlob | None:
        """The chunk before this one; None for the first of a prefix and for an orphan."""
        if blob.name.chunk_index == 0:
            return None
        parent = self.blobs.get((blob.name.namespace, blob.name.parent))
        if parent is None or parent.name.chunk_index != blob.name.chunk_index - 1:
            return None
        return parent

    def prefix(self, blob: StoredBlob) -> list[StoredBlob]:
        """The chunk and those before it, deepest first, as far as they are there."""
        chain = [blob]
        while (parent := self.parent(chain[-1])) is not None:
            chain.append(parent)
        return chain

    def behind(self, blobs: Iterable[StoredBlob]) -> list[StoredBlob]:
        """These chunks and everything that depends on them, each once."""
        found: dict[Ident, StoredBlob] = {}
        pending = list(blobs)
        while pending:
            blob = pending.pop()
            if ident(blob) not in found:
                found[ident(blob)] = blob
                pending.extend(self.children.get(ident(blob), ()))
        return list(found.values())

    def unreachable(self) -> list[StoredBlob]:
        """Everything behind a gap."""
        return self.behind(self.orphans)

    def last_uses(self) -> dict[Ident, float]:
        """When each chunk was last used: a use of a chunk is a use of the prefix before it."""
        used = [blob.used_s for blob in self.blobs.values()]
        for place in sorted(range(len(used)), key=self._depths.__getitem__, reverse=True):
            above = self._parents[place]
            if above >= 0 and used[above] < used[place]:
                used[above] = used[place]
        return dict(zip(self.blobs, used, strict=True))

    def pinned(self) -> set[Ident]:
        """Pinned chunks and the prefixes before them."""
        return {ident(b) for pin in self.blobs.values() if pin.pinned_until_s for b in self.prefix(pin)}

    def walk(self, order: Callable[[StoredBlob], float] | None = None) -> Iterator[tuple[int, StoredBlob]]:
        """Every reachable chunk with its depth, each tree before the next, parents before children."""
        pending = [(0, blob) for blob in _sorted(self.roots, order)[::-1]]
        while pending:
            depth, blob = pending.pop()
            yield depth, blob
            children = _sorted(self.children.get(ident(blob), ()), order)
            pending.extend((depth + 1, child) for child in children[::-1])


def _sorted(blobs: Sequence[StoredBlob], order: Callable[[StoredBlob], float] | None) -> list[StoredBlob]:
    return list(blobs) if order is None else sorted(blobs, key=order)
