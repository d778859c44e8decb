"""How the CLI speaks: tables for people, JSON for programs, and one exit code per kind of failure.

Exit codes are part of the interface; `tiered-kv --help` lists them.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import typer

from tiered_kv.errors import ConfigError, DirectoryLocked, TieredKVError

EXIT_UNAVAILABLE = 1
EXIT_SETTINGS = 2
EXIT_LOCKED = 3

EXIT_CODES = (
    "Exit codes: 0 done; 1 the storage or the server cannot be reached; 2 a setting or an argument is wrong; "
    "3 another server owns the directory."
)


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turn the errors of a verb into one sentence on standard error and an exit code."""
    try:
        yield
    except DirectoryLocked as exc:
        raise _ended(EXIT_LOCKED, exc) from exc
    except ConfigError as exc:
        raise _ended(EXIT_SETTINGS, exc) from exc
    except (TieredKVError, OSError) as exc:
        raise _ended(EXIT_UNAVAILABLE, exc) from exc


def _ended(code: int, exc: Exception) -> typer.Exit:
    print(f"tiered-kv: {exc}", file=sys.stderr, flush=True)
    return typer.Exit(code)


def print_json(value: object) -> None:
    """Print one JSON document."""
    print(json.dumps(value, indent=2))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table; columns whose values are numbers are aligned on the right."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        is_number = bool(rows) and all(isinstance(row[number], int | float) for row in rows)
        table.add_column(column, justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    Console(soft_wrap=False).print(table)
