"""`tiered-kv du`: space used, by namespace and by last use."""

import time
from collections.abc import Sequence

from tiered_kv.cli.app import app
from tiered_kv.cli.exits import EXIT_CODES
from tiered_kv.cli.options import AsJson, Settings, Uri, look, open_uri
from tiered_kv.cli.output import exit_codes, note, print_json, print_table
from tiered_kv.cli.text import ago, shortened, states_text
from tiered_kv.config import size_text
from tiered_kv.errors import TieredKVError
from tiered_kv.ops.blob_table import BlobTable
from tiered_kv.ops.forest import Forest
from tiered_kv.ops.listing import DuAge, LsNamespace, set_self_test_apart, sum_up
from tiered_kv.ops.report import Report
from tiered_kv.ops.storage import Content, Reader


class DuReport(Report, frozen=True, kw_only=True):
    """What takes a tier's room.

    Attributes:
        uri: The tier.
        tier: ``disk`` or ``object``.
        chunks: Chunks stored.
        chunk_bytes: What they take; of a disk, what is allocated for them.
        stray_count: Files or objects that are no chunks that could be read here; ``tiered-kv verify`` names them.
        stray_bytes: What these take.
        own_bytes: What we keep there besides chunks: records, index, logs, leases.
        capacity_bytes: The limit in force; null if there is none, or it cannot be known from here.
        namespaces: By namespace, the largest first.
        ages: By last use, the most recent first.
        notes: What may make this incomplete, in words.
    """

    uri: str
    tier: str
    chunks: int
    chunk_bytes: int
    stray_count: int
    stray_bytes: int
    own_bytes: int
    capacity_bytes: int | None
    namespaces: list[LsNamespace]
    ages: list[DuAge]
    notes: list[str]


@app.command(epilog=EXIT_CODES)
def du(uri: Uri, more: Settings = None, as_json: AsJson = False) -> None:
    """Show what takes a tier's room: by namespace and by last use, against its capacity.

    Sizes are what chunks take of the capacity: on a disk what is allocated for their files, in a bucket their bytes.
    Strays are files or objects that are no chunks that could be read here: what a write that was cut off left behind,
    which `tiered-kv gc` removes, and others, which `tiered-kv verify` names. What we keep besides (records, index,
    logs) is counted apart.

    The capacity is that of whoever enforces it now: of the server that runs on the directory, or of the servers that
    share the bucket. Without a server a directory has none, unless one is given by --set disk_bytes=SIZE.
    """
    with exit_codes():
        now_s = time.time()
        with open_uri(uri, more) as storage:
            content = look(storage)
            set_self_test_apart(content)
            report = _report(storage, content, now_s)
        if as_json:
            print_json(report)
        else:
            _show(report, now_s)


def _report(storage: Reader, content: Content, now_s: float) -> DuReport:
    table = BlobTable.of(content.blobs)
    forest = Forest(table)
    namespaces, ages = sum_up(content.records, forest, forest.last_uses(), now_s)
    capacity_bytes = _capacity(storage, content.notes)
    return DuReport(
        uri=storage.uri,
        tier=storage.kind,
        chunks=len(table),
        chunk_bytes=table.size_bytes,
        stray_count=len(content.strays),
        stray_bytes=sum(stray.size_bytes for stray in content.strays),
        own_bytes=content.own_bytes,
        capacity_bytes=capacity_bytes,
        namespaces=namespaces,
        ages=ages,
        notes=content.notes,
    )


def _capacity(storage: Reader, notes: list[str]) -> int | None:
    """The capacity; None with a note if its server cannot be reached."""
    try:
        return storage.capacity_bytes()
    except TieredKVError as exc:
        text = f"the capacity is not known: {exc}"
        note(text)
        notes.append(text)
        return None


def _show(report: DuReport, now_s: float) -> None:
    print_table(
        "By namespace",
        ("namespace", "model", "chunks", "size", "share", "states", "tails", "last use"),
        [
            (
                shortened(found.namespace),
                found.model or found.problem or "",
                found.chunks,
                size_text(found.size_bytes),
                _share(found.size_bytes, report.chunk_bytes),
                states_text(found.states, found.state_bytes),
                states_text(found.tails, found.tail_bytes),
                ago(now_s, found.used_s),
            )
            for found in report.namespaces
        ],
    )
    print()
    print_table(
        "By last use",
        ("last use", "chunks", "size", "share"),
        [
            (AGE_TEXTS[age.last_use], age.chunks, size_text(age.size_bytes), _share(age.size_bytes, report.chunk_bytes))
            for age in report.ages
        ],
    )
    print()
    print_table("Together", ("", "count", "size", "of capacity"), _totals(report))


AGE_TEXTS = {
    "hour": "within an hour",
    "day": "within a day",
    "week": "within a week",
    "month": "within 30 days",
    "older": "older",
}


def _totals(report: DuReport) -> Sequence[Sequence[object]]:
    capacity = report.capacity_bytes
    rows: list[tuple[object, ...]] = [
        (what, count, size_text(size_bytes), "-" if capacity is None else _share(size_bytes, capacity))
        for what, count, size_bytes in (
            ("chunks", report.chunks, report.chunk_bytes),
            ("strays", report.stray_count, report.stray_bytes),
            ("our own", "-", report.own_bytes),
        )
    ]
    rows.append(("capacity", "-", "unknown or unlimited" if capacity is None else size_text(capacity), ""))
    return rows


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"
