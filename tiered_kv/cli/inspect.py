"""`tiered-kv inspect`: header, checksums, ancestry and record of one chunk."""

import json
import time
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
import typer

from tiered_kv.cli.app import app
from tiered_kv.cli.exits import EXIT_CODES, EXIT_FOUND
from tiered_kv.cli.options import AsJson, Settings, Uri, find_stored, look, open_uri
from tiered_kv.cli.output import exit_codes, print_json, print_table
from tiered_kv.cli.text import ago, end_of, pin_text
from tiered_kv.config import size_text
from tiered_kv.keys.tags import tag_text
from tiered_kv.ops.forest import Forest, ident
from tiered_kv.ops.inspection import BlobFinding, examine, is_complete
from tiered_kv.ops.report import Report
from tiered_kv.ops.storage import Content, Reader, StoredBlob
from tiered_kv.ops.text import counted, printable

FIELD_MAX = 100
"""Of a field of the namespace record in a table; ``geometry`` takes kilobytes."""

TENSORS_SHOWN = 12


class InspectTensor(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of the payload.

    Attributes:
        name: ``rank<r>/<layer>``, or ``_pad``: the zeros up to the next multiple of 4096 bytes.
        dtype: As safetensors calls it.
        shape: Blocks of the chunk, then the extents of a page.
        size_bytes: Its bytes.
    """

    name: str
    dtype: str
    shape: list[int]
    size_bytes: int


class InspectReport(Report, frozen=True, kw_only=True):
    """One chunk.

    Attributes:
        uri: The tier.
        tier: ``disk`` or ``object``.
        key: The chunk's key.
        namespace: Digest of its namespace.
        path: Where its blob lies, relative to the tier's root.
        is_sound: Whether the blob is what was sealed, byte for byte, and lies under its own name.
        header: ``sound``, or what is wrong with the header.
        payload: ``sound``, or what is wrong with the payload; ``unknown`` where the header is not sound.
        parent: Key of the chunk before it; null for the first of a prefix.
        chunk_index: Its position in its prefix, from 0.
        tokens: Its tokens, by the header, 0 for a part of a state; null if that is not sound.
        is_state: Whether it is a part of the state of recurrent layers that is behind the chunk before it.
        is_tail: Whether it is a tail: a prompt's end below a whole chunk.
        prefix_sha256: Digest of all tokens up to its end, by the header; null if that is not sound.
        created_s: When it was computed, by the header; null if that is not sound.
        tag: Digest of the tag it was stored with, by the header; null where it has none, or if that is not sound.
        stored_by: Who stored it, by the header: the package, the engine and the encoding; null if that is not sound.
        header_bytes: Length of the header; null if that is not sound.
        payload_bytes: Length of the payload, by the header; null if that is not sound.
        blob_bytes: Length of the whole blob.
        size_bytes: What it takes of the tier.
        written_s: When it was written here.
        used_s: Last use; a use of a chunk is a use of the prefix before it.
        is_pinned: Whether a pin keeps it, its own or that of a chunk behind it.
        pinned_until_s: When its own pin ends; null where it has none, or one without an end.
        is_reachable: Whether the chain of parents is complete: if not, no request can reach it.
        chain: Keys of the chunks before it that are here, the nearest first.
        children: Keys of the chunks that continue it.
        behind_chunks: All chunks that depend on it.
        behind_bytes: What these take of the tier.
        record: The namespace's record, all fields; null where there is none that can be read.
        record_problem: Why there is no ``record``; null where there is.
        tensors: What the payload holds; empty if the header is not sound.
        notes: What may make this incomplete, in words.
    """

    uri: str
    tier: str
    key: str
    namespace: str
    path: str
    is_sound: bool
    header: str
    payload: str
    parent: str | None
    chunk_index: int
    tokens: int | None
    is_state: bool
    is_tail: bool
    prefix_sha256: str | None
    created_s: float | None
    tag: str | None
    stored_by: str | None
    header_bytes: int | None
    payload_bytes: int | None
    blob_bytes: int
    size_bytes: int
    written_s: float
    used_s: float
    is_pinned: bool
    pinned_until_s: float | None
    is_reachable: bool
    chain: list[str]
    children: list[str]
    behind_chunks: int
    behind_bytes: int
    record: dict[str, Any] | None
    record_problem: str | None
    tensors: list[InspectTensor]
    notes: list[str]


@app.command(epilog=EXIT_CODES)
def inspect(
    uri: Uri,
    key: Annotated[str, typer.Argument(help="The chunk's key, or how it begins.", show_default=False)],
    more: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Show everything about one chunk: header, checksums, tensors, ancestry, namespace.

    Its whole blob is read and checked as an engine would check it. Shown are the fields of the header, the record of
    the namespace, the chain of chunks before it and whether that is complete, the chunks that continue it, the shapes
    of its tensors, its times and its pin. Token ids are stored nowhere, so none are shown.

    If the blob is damaged, or lies under another one's name, this says how and ends with 4.
    """
    with exit_codes():
        now_s = time.time()
        with open_uri(uri, more) as storage:
            content = look(storage)
            forest = Forest(content.blobs)
            blob = find_stored(content, forest, key)
            finding = examine(storage, blob)
            report = _report(storage, content, forest, blob, finding)
        if as_json:
            print_json(report)
        else:
            _show(report, now_s)
        if not finding.is_sound:
            raise typer.Exit(EXIT_FOUND)


def _report(storage: Reader, content: Content, forest: Forest, blob: StoredBlob, finding: BlobFinding) -> InspectReport:
    chain = forest.prefix(blob)
    children = forest.children(blob)
    behind = forest.behind(children)
    record = content.records.get(blob.name.namespace)
    parsed = finding.parsed
    header = None if parsed is None else parsed.header
    parent = None if blob.name.chunk_index == 0 else blob.name.parent.hex()
    return InspectReport(
        uri=storage.uri,
        tier=storage.kind,
        key=blob.name.key.hex(),
        namespace=blob.name.namespace.hex(),
        path=storage.path(blob.name),
        is_sound=finding.is_sound,
        header=finding.header,
        payload=finding.payload,
        parent=parent or None,
        chunk_index=blob.name.chunk_index,
        tokens=None if header is None else 0 if blob.is_state else header.token_count,
        is_state=blob.is_state,
        is_tail=blob.tail_tokens > 0,
        prefix_sha256=None if header is None else header.record.prefix_sha256.hex(),
        created_s=None if header is None else float(header.created_unix_s),
        tag=None if header is None else tag_text(header.record.tag),
        stored_by=None if header is None else header.record.stored_by or None,
        header_bytes=None if header is None else header.header_bytes,
        payload_bytes=None if parsed is None else parsed.payload_bytes,
        blob_bytes=len(finding.data),
        size_bytes=blob.size_bytes,
        written_s=blob.written_s,
        used_s=max(other.used_s for other in (blob, *behind)),
        is_pinned=ident(blob) in forest.pinned(),
        pinned_until_s=end_of(blob.pinned_until_s),
        is_reachable=is_complete(chain),
        chain=[before.name.key.hex() for before in chain[1:]],
        children=sorted(child.name.key.hex() for child in children),
        behind_chunks=len(behind),
        behind_bytes=sum(other.size_bytes for other in behind),
        record=None if record is None or record.namespace is None else record.namespace.fields,
        record_problem="there is no namespace.json" if record is None else record.problem or None,
        tensors=[] if parsed is None else msgspec.convert(parsed.tensors, list[InspectTensor], from_attributes=True),
        notes=content.notes,
    )


def _show(report: InspectReport, now_s: float) -> None:
    print_table("Chunk", ("field", "value"), _facts(report, now_s))
    print()
    print_table("Prefix", ("field", "value"), _place(report))
    print()
    if report.record is None:
        print_table("Namespace", ("field", "value"), [("record", report.record_problem)])
    else:
        fields = [
            (name, printable(value if isinstance(value, str) else json.dumps(value), FIELD_MAX))
            for name, value in sorted(report.record.items())
        ]
        print_table("Namespace", ("field", "value"), fields)
    if report.tensors:
        print()
        rows = [
            (printable(t.name, FIELD_MAX), t.dtype, "x".join(map(str, t.shape)), size_text(t.size_bytes))
            for t in report.tensors[:TENSORS_SHOWN]
        ]
        print_table(f"Tensors ({len(report.tensors)})", ("tensor", "dtype", "shape", "size"), rows)
        if len(report.tensors) > TENSORS_SHOWN:
            print(f"... and {len(report.tensors) - TENSORS_SHOWN} more: --json shows all")


def _facts(report: InspectReport, now_s: float) -> list[tuple[str, object]]:
    return [
        ("key", report.key),
        ("namespace", report.namespace),
        ("path", report.path),
        ("header", report.header),
        ("payload", report.payload),
        ("tokens", _tokens_text(report)),
        ("prefix_sha256", report.prefix_sha256 or "-"),
        ("blob", f"{size_text(report.blob_bytes)} ({report.blob_bytes} bytes)"),
        ("header bytes", "-" if report.header_bytes is None else report.header_bytes),
        ("takes", size_text(report.size_bytes)),
        ("tag", report.tag or "-"),
        ("stored by", report.stored_by or "-"),
        ("computed", _time(report.created_s, now_s)),
        ("written", _time(report.written_s, now_s)),
        ("last use", _time(report.used_s, now_s)),
        ("pinned", pin_text(now_s, report.pinned_until_s, is_kept=report.is_pinned)),
    ]


def _tokens_text(report: InspectReport) -> str | int:
    if report.is_state:
        return "none: a part of a state"
    if report.tokens is None:
        return "-"
    return f"{report.tokens}: a tail, the end of a prompt" if report.is_tail else report.tokens


def _place(report: InspectReport) -> list[tuple[str, object]]:
    missing = report.chunk_index - len(report.chain)
    chain = "complete" if report.is_reachable else f"{missing} of {report.chunk_index} missing: it is an orphan"
    return [
        ("index", report.chunk_index),
        ("parent", report.parent or "none: the first of its prefix"),
        ("chain", chain),
        ("continued by", ", ".join(report.children[:4]) + (", ..." if len(report.children) > 4 else "") or "nothing"),
        ("behind it", f"{counted(report.behind_chunks, 'chunk')}, {size_text(report.behind_bytes)}"),
    ]


def _time(then_s: float | None, now_s: float) -> str:
    if then_s is None:
        return "-"
    try:
        when = f"{datetime.fromtimestamp(then_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):  # beyond the year 9999: a wrong clock's, or made up
        when = f"{then_s:.0f} s since 1970"
    return f"{when}, {ago(now_s, then_s)}"
