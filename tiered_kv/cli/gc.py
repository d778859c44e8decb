"""`tiered-kv gc`: remove garbage: orphans, temp files and dead namespaces."""

import time
from typing import Annotated

import msgspec
import typer

from tiered_kv.cli.app import app
from tiered_kv.cli.exits import EXIT_CODES, EXIT_FOUND
from tiered_kv.cli.options import AsJson, Settings, Uri, Yes, open_uri
from tiered_kv.cli.output import confirm, exit_codes, note, print_json, print_table, progress
from tiered_kv.config import parse_time_s, size_text
from tiered_kv.ops.garbage import KINDS, Garbage, GcItem, MinimumAges, collect, find
from tiered_kv.ops.report import Report
from tiered_kv.ops.storage import Storage
from tiered_kv.ops.text import option_value


class GcReport(Report, frozen=True, kw_only=True):
    """What ``gc`` found and did.

    Attributes:
        uri: The tier.
        is_dry_run: Whether nothing was changed because of ``--dry-run``.
        items: What was found, by kind.
        notes: What was left and why, and what may make this incomplete, in words.
    """

    uri: str
    is_dry_run: bool
    items: list[GcItem]
    notes: list[str]


@app.command(epilog=EXIT_CODES)
def gc(
    uri: Uri,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would go; change nothing.")] = False,
    temp_older_than: Annotated[
        str, typer.Option(metavar="TIME", help="Temp files that were written so long ago: 90m, 12h. Units s, m, h, d.")
    ] = "1h",
    dead_after: Annotated[
        str, typer.Option(metavar="TIME", help="A namespace that may be in use unseen is dead when unused for so long.")
    ] = "1d",
    yes: Yes = False,
    more: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Remove what nobody can use any more: orphans, temp files and dead namespaces, after showing and asking.

    Orphans are chunks whose prefix has a gap; those written within the last 5 minutes stay, because the chunk before
    them may be under way. A namespace is dead if a reset retired it, if only one engine used it since its reset and it
    was not used for --dead-after, or if it has no chunks; what a running server or the reports in a bucket name as in
    use is not. Namespaces with pinned chunks stay. Beside a running server only chunks are removed: it sweeps its temp
    files itself, and records and directories go when none runs.
    """
    with exit_codes():
        ages = MinimumAges(
            temp_s=option_value("--temp-older-than", parse_time_s, temp_older_than),
            dead_s=option_value("--dead-after", parse_time_s, dead_after),
        )
        with open_uri(uri, more, to_change=True) as storage:
            now_s = time.time()  # not behind the listing: of a large bucket it takes longer than a chunk is young
            with progress("listing") as tick:
                content = storage.look(tick)
            garbage = find(storage, content, ages, now_s)
            garbage.notes[:0] = content.notes
            if not as_json:
                _show(garbage, storage.uri)
            told = _tell(garbage, 0)
            if garbage.items and not dry_run:
                confirm(f"{_summary(garbage)} go from {storage.uri}. Go on?", is_confirmed=yes)
                with progress("collecting") as tick:
                    collect(storage, garbage, tick)
                _tell(garbage, told)
            if as_json:
                print_json(_report(storage, garbage, is_dry_run=dry_run))
            elif garbage.items and not dry_run:
                _show_end(garbage)
            if any(item.failed for item in garbage.items):
                raise typer.Exit(EXIT_FOUND)


def _tell(garbage: Garbage, start: int) -> int:
    """Show the notes from a position on; returns where they end."""
    for text in garbage.notes[start:]:
        note(text)
    return len(garbage.notes)


def _show(garbage: Garbage, uri: str) -> None:
    if not garbage.items:
        print(f"no garbage in {uri}")
        return
    rows = [(item.kind, item.namespace or "", item.count, size_text(item.size_bytes)) for item in garbage.items]
    print_table(f"Garbage in {uri}", ("kind", "namespace", "count", "size"), rows)
    print()
    for kind, meaning in KINDS.items():
        if any(item.kind == kind for item in garbage.items):
            print(f"{kind}: {meaning}")


def _show_end(garbage: Garbage) -> None:
    for kind in dict.fromkeys(item.kind for item in garbage.items):
        items = [item for item in garbage.items if item.kind == kind]
        size = size_text(sum(item.removed_bytes for item in items))
        print(f"removed {sum(item.removed for item in items)} of {sum(item.count for item in items)} {kind}, {size}")


def _summary(garbage: Garbage) -> str:
    counts: dict[str, int] = {}
    for item in garbage.items:
        counts[item.kind] = counts.get(item.kind, 0) + item.count
    parts = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    return f"{parts}, {size_text(garbage.size_bytes)},"


def _report(storage: Storage, garbage: Garbage, *, is_dry_run: bool) -> GcReport:
    items = msgspec.convert(garbage.items, list[GcItem], from_attributes=True)
    return GcReport(uri=storage.uri, is_dry_run=is_dry_run, items=items, notes=garbage.notes)
