"""The chunks of a tier as prefix trees: who follows whom, what hangs in the air, and in which order chunks may go."""

from collections.abc import Callable, Iterable, Iterator, Sequence

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
        self.blobs = {ident(blob): blob for blob in blobs}
        self.children: dict[Ident, list[StoredBlob]] = {}
        self.roots: list[StoredBlob] = []
        self.orphans: list[StoredBlob] = []
        """Those whose parent is not there: with all behind them they can be reached by no request."""
        for blob in self.blobs.values():
            parent = self.parent(blob)
            if parent is not None:
                self.children.setdefault(ident(parent), []).append(blob)
            elif blob.name.chunk_index == 0 and blob.name.parent == blob.name.namespace:
                self.roots.append(blob)
            else:
                self.orphans.append(blob)

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
        used = {key: blob.used_s for key, blob in self.blobs.items()}
        for blob in sorted(self.blobs.values(), key=lambda blob: -blob.name.chunk_index):
            parent = self.parent(blob)
            if parent is not None:
                used[ident(parent)] = max(used[ident(parent)], used[ident(blob)])
        return used

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
