"""Draw the prefix trees of a tier: runs of chunks without a branch. Pure.

Never recursive: a conversation can be tens of thousands of chunks long, with a branch at each of them.
"""

from collections.abc import Sequence

import msgspec

from tiered_kv.ops.forest import Forest
from tiered_kv.ops.listing import describe
from tiered_kv.ops.report import Report
from tiered_kv.ops.storage import Content, NamespaceRecord, Reader, StoredBlob


class TreeRun(msgspec.Struct, frozen=True, kw_only=True):
    """Chunks that follow each other without a branch between them.

    Attributes:
        parent: Place in ``runs`` of the run before it; null for one that begins a prefix.
        level: How many runs lie before it.
        first_key: Key of its first chunk.
        last_key: Key of its last chunk.
        first_index: Position of its first chunk in the prefix, from 0.
        chunks: How many chunks it has.
        tokens: Their tokens; null if unknown.
        size_bytes: What they take of the tier.
        states: After how many of them a state of the model's recurrent layers is stored, or parts of one.
        state_bytes: What these states take of the tier.
        used_s: Last use of its first chunk: nothing behind it was used later.
        pinned: How many of its chunks have a pin of their own.
        continued: How many chunks follow its last one: 0 where a prefix ends, else 2 or more.
        hidden_chunks: Chunks behind it that ``--depth`` leaves out.
    """

    parent: int | None
    level: int
    first_key: str
    last_key: str
    first_index: int
    chunks: int
    tokens: int | None
    size_bytes: int
    states: int
    state_bytes: int
    used_s: float
    pinned: int
    continued: int
    hidden_chunks: int


class TreeNamespace(msgspec.Struct, frozen=True, kw_only=True):
    """The prefix trees of one namespace.

    Attributes:
        namespace: Its digest.
        model: The model in a few words, as the namespace's record says; null where there is none that can be read.
        prefixes: How many first chunks there are.
        runs: Each before those behind it; the most recently used first.
        left_out_runs: Runs that ``--limit`` leaves out.
        left_out_chunks: The chunks in them, and behind them.
        hanging_chunks: Chunks behind a gap: no request can reach them. ``tiered-kv gc`` removes them.
        hanging_bytes: What these take of the tier.
    """

    namespace: str
    model: str | None
    prefixes: int
    runs: list[TreeRun]
    left_out_runs: int
    left_out_chunks: int
    hanging_chunks: int
    hanging_bytes: int


class TreeReport(Report, frozen=True, kw_only=True):
    """The prefix trees of a tier.

    Attributes:
        uri: The tier.
        tier: ``disk`` or ``object``.
        namespaces: All that have chunks, or the one that was asked for.
        notes: What may make this incomplete, in words.
    """

    uri: str
    tier: str
    namespaces: list[TreeNamespace]
    notes: list[str]


def draw(storage: Reader, content: Content, namespace: bytes | None, levels: int, limit: int | None) -> TreeReport:
    """Draw a tier.

    Args:
        namespace: Only this one; None: all that have chunks.
        levels: How many runs may follow each other, at least 1.
        limit: How many runs of each namespace may be shown; None: all.
    """
    forest = Forest(content.blobs)
    used = forest.last_uses()
    spaces = sorted({blob.name.namespace for blob in content.blobs}) if namespace is None else [namespace]
    records = [content.records.get(space) or NamespaceRecord.missing(space) for space in spaces]
    drawn = [draw_namespace(forest, record, used, levels, limit) for record in records]
    return TreeReport(uri=storage.uri, tier=storage.kind, namespaces=drawn, notes=content.notes)


def draw_namespace(
    forest: Forest, record: NamespaceRecord, used: Sequence[float], levels: int, limit: int | None
) -> TreeNamespace:
    """Draw one namespace; ``levels`` and ``limit`` as for :func:`draw`."""
    roots = [blob for blob in forest.roots if blob.name.namespace == record.digest]
    runs = _runs(forest, roots, used, levels, record.chunk_tokens)
    shown = runs if limit is None else runs[:limit]
    rest = runs[len(shown) :]
    hanging = forest.behind(blob for blob in forest.orphans if blob.name.namespace == record.digest)
    return TreeNamespace(
        namespace=record.digest.hex(),
        model=None if record.problem else describe(record),
        prefixes=len(roots),
        runs=shown,
        left_out_runs=len(rest),
        left_out_chunks=sum(run.chunks + run.hidden_chunks for run in rest),
        hanging_chunks=len(hanging),
        hanging_bytes=sum(blob.size_bytes for blob in hanging),
    )


def _runs(
    forest: Forest, roots: Sequence[StoredBlob], used: Sequence[float], levels: int, chunk_tokens: int | None
) -> list[TreeRun]:
    def by_use(blob: StoredBlob) -> tuple[float, bytes]:
        return used[forest.row(blob)], blob.name.key  # the most recent one last: that is where the stack is taken from

    found: list[TreeRun] = []
    pending: list[tuple[int, int | None, StoredBlob]] = [(0, None, blob) for blob in sorted(roots, key=by_use)]
    while pending:
        level, parent, first = pending.pop()
        chain = _unbranched(forest, first)
        behind = forest.chunks_after(chain[-1])
        states = [state for chunk in chain if (state := forest.state(chunk))]
        is_cut = level + 1 >= levels
        run = TreeRun(
            level=level,
            parent=parent,
            first_key=first.name.key.hex(),
            last_key=chain[-1].name.key.hex(),
            first_index=first.name.chunk_index,
            chunks=len(chain),
            tokens=None if chunk_tokens is None else len(chain) * chunk_tokens,
            size_bytes=sum(blob.size_bytes for blob in chain),
            states=len(states),
            state_bytes=sum(part.size_bytes for state in states for part in state),
            used_s=used[forest.row(first)],
            pinned=sum(blob.pinned_until_s > 0 for blob in chain),
            continued=len(behind),
            hidden_chunks=len(forest.behind(behind)) if is_cut else 0,
        )
        found.append(run)
        if not is_cut:
            pending.extend((level + 1, len(found) - 1, blob) for blob in sorted(behind, key=by_use))
    return found


def _unbranched(forest: Forest, first: StoredBlob) -> list[StoredBlob]:
    chain = [first]
    while len(behind := forest.chunks_after(chain[-1])) == 1:
        chain.append(behind[0])
    return chain
