"""`tiered-kv tree`: the prefix trees of a tier as a picture."""

import sys
import time
from collections.abc import Iterator
from typing import Annotated

import typer

from tiered_kv.cli.app import app
from tiered_kv.cli.exits import EXIT_CODES
from tiered_kv.cli.options import AsJson, NamespaceOption, Settings, Uri, find_namespace, look, open_uri
from tiered_kv.cli.output import exit_codes, print_json
from tiered_kv.cli.text import ago, shortened
from tiered_kv.config import size_text
from tiered_kv.ops.text import counted
from tiered_kv.ops.tree import TreeNamespace, TreeReport, TreeRun, draw

LEVELS_MAX = 50
"""Levels of a picture: an indent of four columns each, and deeper than is readable."""


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
    and size, when they were last used, and how many states of recurrent layers are stored along them. Where prompts
    part, the line says how many ways the prefix continues. The most recently used come first. Pins are marked. Chunks
    whose parent is gone are orphans: no request can reach them.
    """
    with exit_codes():
        now_s = time.time()
        with open_uri(uri, more) as storage:
            content = look(storage)
        report = draw(storage, content, find_namespace(content, namespace), depth, limit or None)
        if as_json:
            print_json(report)
        else:
            _show(report, now_s)


def _show(report: TreeReport, now_s: float) -> None:
    if not report.namespaces:
        print("There are no chunks.")
    for found in report.namespaces:
        lines = [*_lines(found, now_s)]
        head = f"{shortened(found.namespace)}  {found.model or 'no record'}"
        if sys.stdout.isatty():
            from tiered_kv.cli import terminal  # noqa: PLC0415 - on a terminal only

            terminal.print_tree(head, lines)
        else:
            _draw_plain(head, lines)


def _lines(found: TreeNamespace, now_s: float) -> Iterator[tuple[int, str]]:
    """What stands below a namespace: the level and the text of every line."""
    for run in found.runs:
        yield run.level, _text(run, now_s)
        if run.hidden_chunks:
            yield run.level + 1, f"{counted(run.hidden_chunks, 'chunk')} more, deeper: --depth shows them"
    if found.left_out_runs:
        left = f"{counted(found.left_out_runs, 'line')} more with {counted(found.left_out_chunks, 'chunk')}"
        yield 0, f"{left}: --limit 0 shows them"
    if found.hanging_chunks:
        hanging = f"{counted(found.hanging_chunks, 'chunk')}, {size_text(found.hanging_bytes)}"
        yield 0, f"orphans: {hanging}; their parents are gone"


def _text(run: TreeRun, now_s: float) -> str:
    parts = [counted(run.chunks, "chunk")]
    if run.tokens is not None:
        parts.append(counted(run.tokens, "token"))
    parts += [size_text(run.size_bytes), f"used {ago(now_s, run.used_s)}"]
    if run.states:
        parts.append(f"{counted(run.states, 'state')} of {size_text(run.state_bytes)}")
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
