"""How the command line speaks: tables for people, JSON for programs, one exit code per kind of outcome.

Results go to standard output, everything else to standard error. On a terminal tables are set by rich (which obeys
``NO_COLOR``); in a pipe they are plain columns that no width cuts. Exit codes are part of the interface;
``tiered-kv --help`` lists them.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
import typer

from tiered_kv.cli.exits import (
    EXIT_CODES,
    EXIT_FOUND,
    EXIT_LOCKED,
    EXIT_SETTINGS,
    EXIT_UNAVAILABLE,
    EXIT_UNCONFIRMED,
)
from tiered_kv.errors import ConfigError, DirectoryLocked, TieredKVError

__all__ = [
    "EXIT_CODES",
    "EXIT_FOUND",
    "EXIT_LOCKED",
    "EXIT_SETTINGS",
    "EXIT_UNAVAILABLE",
    "EXIT_UNCONFIRMED",
    "Report",
    "age_text",
    "confirm",
    "exit_codes",
    "note",
    "plain",
    "print_json",
    "print_table",
    "progress",
]


class Report(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of what verbs print with ``--json``: one object per call, described by docs/cli-schema.json.

    Digests and keys are hex digits, sizes whole bytes, times seconds since 1970, what is unknown null. Fields are added
    and never change their meaning; ``version`` counts what breaks that promise.
    """

    version: int = 1


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turn the errors of a verb into one sentence on standard error and an exit code."""
    try:
        yield
    except BrokenPipeError:
        raise  # `tiered-kv ls | head`: whoever read has seen enough, and nothing is wrong
    except DirectoryLocked as exc:
        raise _ended(EXIT_LOCKED, exc) from exc
    except ConfigError as exc:
        raise _ended(EXIT_SETTINGS, exc) from exc
    except (TieredKVError, OSError) as exc:
        raise _ended(EXIT_UNAVAILABLE, exc) from exc


def _ended(code: int, exc: Exception) -> typer.Exit:
    print(f"tiered-kv: {plain(exc)}", file=sys.stderr, flush=True)
    return typer.Exit(code)


def note(text: str) -> None:
    """Tell people something beside the result."""
    print(f"tiered-kv: {plain(text)}", file=sys.stderr, flush=True)


def plain(value: object) -> str:
    """Text for people: what records and names of files say must not give orders to their terminal."""
    text = str(value)
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else " " if character.isspace() else "?" for character in text)


def print_json(value: object) -> None:
    """Print one JSON document, in UTF-8 as JSON is."""
    try:
        text = msgspec.json.format(msgspec.json.encode(value), indent=2)
    except UnicodeEncodeError:  # a file's name that is no text; escaped it is JSON all the same
        text = json.dumps(msgspec.to_builtins(value), indent=2).encode()
    sys.stdout.flush()
    sys.stdout.buffer.write(text + b"\n")
    sys.stdout.buffer.flush()


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table; columns whose values are numbers are aligned on the right."""
    is_number = [
        bool(rows) and all(isinstance(row[number], int | float) for row in rows) for number in range(len(columns))
    ]
    if not sys.stdout.isatty():
        _print_plain(title, columns, rows, is_number)
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if is_number[number] else "left", overflow="fold")
    for row in rows:
        table.add_row(*(escape(plain(cell)) for cell in row))
    Console(soft_wrap=False).print(table)


def _print_plain(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], is_number: Sequence[bool]
) -> None:
    lines = [[plain(cell) for cell in row] for row in (columns, *rows)]
    widths = [max(len(line[number]) for line in lines) for number in range(len(columns))]
    if title:
        print(title)
    for line in lines:
        cells = (c.rjust(w) if right else c.ljust(w) for c, w, right in zip(line, widths, is_number, strict=True))
        print("  ".join(cells).rstrip())


@contextmanager
def progress(label: str) -> Iterator[Callable[[int, int | None], None]]:
    """A progress bar on standard error if that is a terminal; gives what long work reports to."""
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def confirm(question: str, *, is_confirmed: bool) -> None:
    """Ask before something is destroyed, unless ``--yes`` was said.

    Raises:
        typer.Exit: The answer was no, or nobody can be asked.
    """
    if is_confirmed:
        return
    if not sys.stdin.isatty():
        note(f"{question} Say --yes: there is no terminal to ask at. Nothing was changed.")
        raise typer.Exit(EXIT_UNCONFIRMED)
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        note("nothing was changed.")
        raise typer.Exit(EXIT_UNCONFIRMED)


def age_text(seconds: float) -> str:
    """A time span as people read it: ``42s``, ``3h``, ``12d``."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f}{unit}"
    return f"{max(seconds, 0):.0f}s"
