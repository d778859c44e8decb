"""Print tables for people and JSON for programs; map errors to exit codes.

Results go to standard output, everything else to standard error. On a terminal tables are set by ``terminal.py``; in a
pipe they are plain columns that no width cuts. Exit codes are part of the interface; ``tiered-kv --help`` lists them.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import msgspec
import typer

from tiered_kv.cli.exits import (
    EXIT_LOCKED,
    EXIT_SETTINGS,
    EXIT_UNAVAILABLE,
    EXIT_UNCONFIRMED,
)
from tiered_kv.errors import ConfigError, DirectoryLocked, TieredKVError


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turn the errors of a verb into one sentence on standard error and an exit code."""
    try:
        yield
    except BrokenPipeError:
        raise  # `tiered-kv ls | head`: the reader closed the pipe, which is no error
    except DirectoryLocked as exc:
        raise _ended(EXIT_LOCKED, exc) from exc
    except ConfigError as exc:
        raise _ended(EXIT_SETTINGS, exc) from exc
    except (TieredKVError, OSError) as exc:
        raise _ended(EXIT_UNAVAILABLE, exc) from exc


def _ended(code: int, exc: Exception) -> typer.Exit:
    note(str(exc))
    return typer.Exit(code)


def note(text: str) -> None:
    """Tell people something beside the result.

    What standard error does not take ends no verb: it may be a log on the disk that the verb is to make room on.
    """
    _say(f"tiered-kv: {plain(text)}\n")


def _say(text: str) -> None:
    with suppress(OSError):
        print(text, end="", file=sys.stderr, flush=True)


def plain(value: object) -> str:
    """Text made safe for a terminal: records and file names may contain control characters."""
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
    from tiered_kv.cli import terminal  # noqa: PLC0415 - on a terminal only

    terminal.print_table(title, columns, [[plain(cell) for cell in row] for row in rows], is_number)


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
    from tiered_kv.cli import terminal  # noqa: PLC0415 - on a terminal only

    with terminal.progress(label) as tick:
        yield tick


def confirm(question: str, *, is_confirmed: bool) -> None:
    """Ask before something is destroyed, unless ``--yes`` was given.

    Raises:
        typer.Exit: The answer was no, or there is no terminal.
    """
    if is_confirmed:
        return
    if not sys.stdin.isatty():
        note(f"{question} Say --yes: there is no terminal to ask at. Nothing was changed.")
        raise typer.Exit(EXIT_UNCONFIRMED)
    _say(f"{question} [y/N] ")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        note("nothing was changed.")
        raise typer.Exit(EXIT_UNCONFIRMED)
