"""`tiered-kv gc`: remove what nobody can use any more."""

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from tiered_kv.cli.app import app
from tiered_kv.cli.options import AsJson, Settings, Uri, Yes, open_uri
from tiered_kv.cli.output import EXIT_CODES, Report, confirm, exit_codes, note, print_json, print_table, progress

if TYPE_CHECKING:
    from tiered_kv.admin.garbage import Garbage
    from tiered_kv.admin.storage import Storage


class GcItem(msgspec.Struct, frozen=True, kw_only=True):
    """Garbage of one kind, of one namespace where that matters.

    Attributes:
        kind: ``orphans``: chunks behind a gap. ``temp``: left by writes that were cut off. ``retired``: a namespace
            from before a reset. ``private``: one that a single engine used since its reset, unused for long. ``empty``:
            the record and directories of a namespace without a chunk.
        namespace: Its digest; null for ``temp``.
        count: Chunks or files; 1 for an empty namespace.
        size_bytes: What they take.
        removed: How many of them are gone; 0 after a dry run.
        removed_bytes: What those took.
    """

    kind: str
    namespace: str | None
    count: int
    size_bytes: int
    removed: int
    removed_bytes: int


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
        import time

        from tiered_kv.admin.garbage import Patience, collect, find
        from tiered_kv.admin.words import option_value
        from tiered_kv.config import parse_time_s

        patience = Patience(
            temp_s=option_value("--temp-older-than", parse_time_s, temp_older_than),
            dead_s=option_value("--dead-after", parse_time_s, dead_after),
        )
        with open_uri(uri, more, to_change=True) as storage:
            with progress("listing") as tick:
                content = storage.look(tick)
            garbage = find(storage, content, patience, time.time())
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


def _tell(garbage: "Garbage", start: int) -> int:
    """Show the notes from a position on; returns where they end."""
    for text in garbage.notes[start:]:
        note(text)
    return len(garbage.notes)


def _show(garbage: "Garbage", uri: str) -> None:
    from tiered_kv.admin.garbage import KINDS
    from tiered_kv.config import size_text

    if not garbage.items:
        print(f"no garbage in {uri}")
        return
    rows = [
        (item.kind, item.namespace.hex() if item.namespace else "", item.count, size_text(item.size_bytes))
        for item in garbage.items
    ]
    print_table(f"Garbage in {uri}", ("kind", "namespace", "count", "size"), rows)
    print()
    for kind, meaning in KINDS.items():
        if any(item.kind == kind for item in garbage.items):
            print(f"{kind}: {meaning}")


def _show_end(garbage: "Garbage") -> None:
    from tiered_kv.config import size_text

    for kind in dict.fromkeys(item.kind for item in garbage.items):
        items = [item for item in garbage.items if item.kind == kind]
        size = size_text(sum(item.removed_bytes for item in items))
        print(f"removed {sum(item.removed for item in items)} of {sum(item.count for item in items)} {kind}, {size}")


def _summary(garbage: "Garbage") -> str:
    from tiered_kv.config import size_text

    counts: dict[str, int] = {}
    for item in garbage.items:
        counts[item.kind] = counts.get(item.kind, 0) + item.count
    parts = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    return f"{parts}, {size_text(garbage.size_bytes)},"


def _report(storage: "Storage", garbage: "Garbage", *, is_dry_run: bool) -> GcReport:
    items = [
        GcItem(
            kind=item.kind,
            namespace=None if item.namespace is None else item.namespace.hex(),
            count=item.count,
            size_bytes=item.size_bytes,
            removed=item.removed,
            removed_bytes=item.removed_bytes,
        )
        for item in garbage.items
    ]
    return GcReport(uri=storage.uri, is_dry_run=is_dry_run, items=items, notes=garbage.notes)
