"""Tables, trees, progress and live screens for a terminal, set by rich (which obeys ``NO_COLOR``).

Imported only where there is a terminal: rich takes as long to import as all the rest.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table
from rich.text import Text
from rich.tree import Tree


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], aligned_right: Sequence[bool]
) -> None:
    """Print a table that folds cells which are too wide."""
    table = Table(title=escape(title), title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column, is_right in zip(columns, aligned_right, strict=True):
        table.add_column(column, justify="right" if is_right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    Console(soft_wrap=False).print(table)


def print_tree(head: str, lines: Iterable[tuple[int, str]]) -> None:
    """Print a tree: the level of each line, from 0, and its text."""
    root = Tree(Text(head, style="bold"), guide_style="dim")
    branches = [root]
    for level, text in lines:
        del branches[level + 1 :]
        branches.append(branches[-1].add(Text(text)))
    Console().print(root)


@contextmanager
def progress(label: str) -> Iterator[Callable[[int, int | None], None]]:
    """Show a progress bar on standard error."""
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


Block = str | tuple[Sequence[str], Sequence[tuple[Sequence[str], bool]]]
"""A line of a screen; or a table: its columns, and its rows, each with whether it is an alarm."""


@contextmanager
def screen() -> Iterator[Callable[[Iterable[Block]], None]]:
    """Take the whole terminal; gives what replaces its content."""
    with Live(Text("waiting for the first interval"), console=Console(), screen=True, auto_refresh=False) as live:
        yield lambda blocks: live.update(Group(*map(_set, blocks)), refresh=True)


def _set(block: Block) -> Text | Table:
    if isinstance(block, str):
        return Text(block)
    columns, rows = block
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if column in ("tier", "state") else "right")
    for cells, is_alarm in rows:
        table.add_row(*cells, style="red" if is_alarm else None)
    return table
