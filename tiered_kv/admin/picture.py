"""The prefix tree of a namespace as a picture needs it: runs of chunks without a branch, and who follows whom. Pure.

Never recursive: a conversation can be tens of thousands of chunks long, with a branch at each of them. Called by
``cli/tree.py``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tiered_kv.admin.forest import Forest, Ident, ident
from tiered_kv.admin.storage import StoredBlob


@dataclass(frozen=True, slots=True)
class Run:
    """Chunks that follow each other without a branch between them.

    Attributes:
        level: How many runs lie before it in its prefix.
        parent: Place in the picture of the run before it; None for one that begins a prefix.
        used_s: Last use of its first chunk: no chunk behind it was used later.
        pinned: How many of its chunks have a pin of their own.
        continued: How many chunks follow its last one: 0 at a prefix's end, else 2 or more.
        hidden: Chunks behind it that the picture leaves out because they lie too deep.
    """

    level: int
    parent: int | None
    first: StoredBlob
    last: StoredBlob
    chunks: int
    size_bytes: int
    used_s: float
    pinned: int
    continued: int
    hidden: int


@dataclass(frozen=True, slots=True)
class Picture:
    """A namespace's tree.

    Attributes:
        runs: Each before those behind it; the most recently used first among equals.
        left_out: Runs that came after the last one that may be shown, and the chunks in them.
        hanging, hanging_bytes: Chunks behind a gap: no request reaches them.
        prefixes: How many first chunks there are.
    """

    runs: Sequence[Run]
    left_out: int
    left_out_chunks: int
    hanging: int
    hanging_bytes: int
    prefixes: int


def draw(forest: Forest, namespace: bytes, used: Mapping[Ident, float], levels: int, limit: int | None) -> Picture:
    """Draw one namespace.

    Args:
        levels: How many runs may follow each other, at least 1.
        limit: How many runs may be shown; None: all.
    """
    roots = [blob for blob in forest.roots if blob.name.namespace == namespace]
    runs = _runs(forest, roots, used, levels)
    shown = runs if limit is None else runs[:limit]
    rest = runs[len(shown) :]
    hanging = forest.behind(blob for blob in forest.orphans if blob.name.namespace == namespace)
    return Picture(
        runs=shown,
        left_out=len(rest),
        left_out_chunks=sum(run.chunks + run.hidden for run in rest),
        hanging=len(hanging),
        hanging_bytes=sum(blob.size_bytes for blob in hanging),
        prefixes=len(roots),
    )


def _runs(forest: Forest, roots: Sequence[StoredBlob], used: Mapping[Ident, float], levels: int) -> list[Run]:
    def by_use(blob: StoredBlob) -> tuple[float, bytes]:
        return used[ident(blob)], blob.name.key  # the most recent one last: that is where the stack is taken from

    found: list[Run] = []
    pending: list[tuple[int, int | None, StoredBlob]] = [(0, None, blob) for blob in sorted(roots, key=by_use)]
    while pending:
        level, parent, first = pending.pop()
        chain = _unbranched(forest, first)
        behind = forest.children.get(ident(chain[-1]), [])
        is_cut = level + 1 >= levels
        run = Run(
            level=level,
            parent=parent,
            first=first,
            last=chain[-1],
            chunks=len(chain),
            size_bytes=sum(blob.size_bytes for blob in chain),
            used_s=used[ident(first)],
            pinned=sum(blob.pinned_until_s > 0 for blob in chain),
            continued=len(behind),
            hidden=len(forest.behind(behind)) if is_cut else 0,
        )
        found.append(run)
        if not is_cut:
            pending.extend((level + 1, len(found) - 1, blob) for blob in sorted(behind, key=by_use))
    return found


def _unbranched(forest: Forest, first: StoredBlob) -> list[StoredBlob]:
    chain = [first]
    while len(behind := forest.children.get(ident(chain[-1]), [])) == 1:
        chain.append(behind[0])
    return chain
