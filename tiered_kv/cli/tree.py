"""`tiered-kv tree`: the prefix trees of a tier as a picture."""

import sys
import time
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from tiered_kv.admin.words import counted
from tiered_kv.cli.app import app
from tiered_kv.cli.looking import ago, look, shortened
from tiered_kv.cli.options import AsJson, NamespaceOption, Settings, Uri, find_namespace, open_uri
from tiered_kv.cli.output import EXIT_CODES, Report, exit_codes, print_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiered_kv.admin.picture import Picture, Run
    from tiered_kv.admin.storage import Content, NamespaceRecord, Storage

LEVELS_MAX = 50
"""Levels of a picture: an indent of four columns each, and more than anybody reads."""


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


@app.command(epilog=EXIT_CODES)
def tree(
    uri: Uri,
    namespace: NamespaceOption = None,
    depth: Annotated[int, typer.Option(min=1, max=LEVELS_MAX, help="Levels of branches to show.")] = 6,
    limit: Annotated[int, typer.Option(min=0, help="Most lines of each namespace to show; 0: all.")] = 40,
    more: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Draw the prefix trees of a tier: which prompts share their beginning, and where they part.

    Chunks that follow each other without a branch are one line: the key of the first, how many there are, their tokens
    and size, when they were last used. Where prompts part, the line says how many ways the prefix continues. The most
    recently used come first. Pins are marked. Chunks whose parent is gone hang in the air: no request can reach them.
    """
    with exit_codes():
        now_s = time.time()
        with open_uri(uri, more) as storage:
            content = look(storage)
        report = _report(storage, content, find_namespace(content, namespace), depth, limit or None)
        if as_json:
            print_json(report)
        else:
            _show(report, now_s)


def _report(storage: "Storage", content: "Content", space: bytes | None, levels: int, limit: int | None) -> TreeReport:
    from tiered_kv.admin.forest import Forest
    from tiered_kv.admin.picture import draw
    from tiered_kv.admin.storage import NamespaceRecord

    forest = Forest(content.blobs)
    used = forest.last_uses()
    spaces = sorted({blob.name.namespace for blob in content.blobs}) if space is None else [space]
    found = []
    for digest in spaces:
        record = content.records.get(digest) or NamespaceRecord(digest, None, "there is no namespace.json")
        found.append(_namespace(record, draw(forest, digest, used, levels, limit)))
    return TreeReport(uri=storage.uri, tier=storage.kind, namespaces=found, notes=content.notes)


def _namespace(record: "NamespaceRecord", picture: "Picture") -> TreeNamespace:
    from tiered_kv.admin.listing import describe

    return TreeNamespace(
        namespace=record.digest.hex(),
        model=None if record.problem else describe(record),
        prefixes=picture.prefixes,
        runs=[_run(run, record.chunk_tokens) for run in picture.runs],
        left_out_runs=picture.left_out,
        left_out_chunks=picture.left_out_chunks,
        hanging_chunks=picture.hanging,
        hanging_bytes=picture.hanging_bytes,
    )


def _run(run: "Run", chunk_tokens: int | None) -> TreeRun:
    return TreeRun(
        parent=run.parent,
        level=run.level,
        first_key=run.first.name.key.hex(),
        last_key=run.last.name.key.hex(),
        first_index=run.first.name.chunk_index,
        chunks=run.chunks,
        tokens=None if chunk_tokens is None else run.chunks * chunk_tokens,
        size_bytes=run.size_bytes,
        used_s=run.used_s,
        pinned=run.pinned,
        continued=run.continued,
        hidden_chunks=run.hidden,
    )


def _show(report: TreeReport, now_s: float) -> None:
    if not report.namespaces:
        print("There are no chunks.")
    for found in report.namespaces:
        lines = [*_lines(found, now_s)]
        head = f"{shortened(found.namespace)}  {found.model or 'no record'}"
        if sys.stdout.isatty():
            _draw_rich(head, lines)
        else:
            _draw_plain(head, lines)


def _lines(found: TreeNamespace, now_s: float) -> "Iterator[tuple[int, str]]":
    """What stands below a namespace: the level and the text of every line."""
    from tiered_kv.config import size_text

    for run in found.runs:
        yield run.level, _text(run, now_s)
        if run.hidden_chunks:
            yield run.level + 1, f"{counted(run.hidden_chunks, 'chunk')} more, deeper: --depth shows them"
    if found.left_out_runs:
        left = f"{counted(found.left_out_runs, 'line')} more with {counted(found.left_out_chunks, 'chunk')}"
        yield 0, f"{left}: --limit 0 shows them"
    if found.hanging_chunks:
        hanging = f"{counted(found.hanging_chunks, 'chunk')}, {size_text(found.hanging_bytes)}"
        yield 0, f"hang in the air: {hanging}; their parents are gone"


def _text(run: TreeRun, now_s: float) -> str:
    from tiered_kv.config import size_text

    parts = [counted(run.chunks, "chunk")]
    if run.tokens is not None:
        parts.append(counted(run.tokens, "token"))
    parts += [size_text(run.size_bytes), f"used {ago(now_s, run.used_s)}"]
    if run.pinned:
        parts.append("pinned" if run.pinned == run.chunks else f"{run.pinned} pinned")
    if run.continued:
        parts.append(f"continued {run.continued} ways")
    return f"{shortened(run.first_key)}  {', '.join(parts)}"


def _draw_plain(head: str, lines: list[tuple[int, str]]) -> None:
    """In the characters that the output can take."""
    try:
        "├└│─".encode(sys.stdout.encoding or "ascii")
        tee, corner, bar = "├── ", "└── ", "│   "
    except UnicodeEncodeError:
        tee, corner, bar = "|-- ", "`-- ", "|   "
    print(head)
    is_last = _last_ones(lines)
    guides: list[str] = []
    for (level, text), last in zip(lines, is_last, strict=True):
        del guides[level:]
        print("".join(guides) + (corner if last else tee) + text)
        guides.append("    " if last else bar)


def _last_ones(lines: list[tuple[int, str]]) -> list[bool]:
    """Whether each line is the last of its level below what it hangs from."""
    result, has_later = [False] * len(lines), set[int]()
    for place in range(len(lines) - 1, -1, -1):
        level = lines[place][0]
        result[place] = level not in has_later
        has_later = {other for other in has_later if other < level} | {level}
    return result


def _draw_rich(head: str, lines: list[tuple[int, str]]) -> None:
    from rich.console import Console
    from rich.text import Text
    from rich.tree import Tree

    root = Tree(Text(head, style="bold"), guide_style="dim")
    branches = [root]
    for level, text in lines:
        del branches[level + 1 :]
        branches.append(branches[-1].add(Text(text)))
    Console().print(root)
