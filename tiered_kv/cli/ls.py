"""`tiered-kv ls`: the namespaces of a tier, then its chunks."""

import time
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

import msgspec
import typer

from tiered_kv.cli.app import app
from tiered_kv.cli.exits import EXIT_CODES
from tiered_kv.cli.options import (
    AsJson,
    NamespaceOption,
    Settings,
    StoredByOption,
    Uri,
    find_namespace,
    look,
    look_for_origins,
    open_uri,
    parse_stored_by,
    parse_tag,
)
from tiered_kv.cli.output import exit_codes, note, print_json, print_table
from tiered_kv.cli.text import ago, end_of, pin_text, shortened, states_text
from tiered_kv.config import parse_time_s, size_text
from tiered_kv.keys.tags import tag_text
from tiered_kv.ops.blob_table import part
from tiered_kv.ops.forest import Forest, ident
from tiered_kv.ops.listing import LsNamespace, first, matching, orders, set_self_test_apart, sum_up
from tiered_kv.ops.report import Report
from tiered_kv.ops.storage import Content
from tiered_kv.ops.text import option_value


class LsChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One chunk.

    Attributes:
        key: Its key.
        namespace: Digest of its namespace.
        chunk_index: Its position in its prefix, 0 for the first.
        tokens: Its tokens, 0 for a part of a state; null if unknown.
        is_state: Whether it is a part of the state of recurrent layers that is behind the chunk before it.
        is_tail: Whether it is a tail: a prompt's end below a whole chunk.
        size_bytes: What it takes of the tier.
        written_s: When it was written.
        used_s: Last use; a use of a chunk is a use of the prefix before it.
        tier: ``disk`` or ``object``.
        is_pinned: Whether a pin keeps it, its own or that of a chunk behind it.
        pinned_until_s: When its own pin ends; null where it has none, or one without an end.
        tag: Digest of the tag it was stored with; null where it has none, and in a bucket without ``--tag`` and
            ``--stored-by``, because no header is read there.
        stored_by: Who stored it: package, engine, encoding; null where that is not said, and in a bucket likewise.
    """

    key: str
    namespace: str
    chunk_index: int
    tokens: int | None
    is_state: bool
    is_tail: bool
    size_bytes: int
    written_s: float
    used_s: float
    tier: str
    is_pinned: bool
    pinned_until_s: float | None
    tag: str | None
    stored_by: str | None


class LsReport(Report, frozen=True, kw_only=True):
    """What a tier holds.

    Attributes:
        uri: The tier.
        tier: ``disk`` or ``object``.
        namespaces: The largest first; all of them, or the one that was asked for.
        chunks: Those that were asked for, in the order that was asked for, at most ``--limit`` of them.
        chunk_count: How many chunks there are to list, shown or not.
        chunk_bytes: What these take.
        notes: What may make this incomplete, in words.
    """

    uri: str
    tier: str
    namespaces: list[LsNamespace]
    chunks: list[LsChunk]
    chunk_count: int
    chunk_bytes: int
    notes: list[str]


class Sort(StrEnum):
    """An order of chunks."""

    USED = "used"
    SIZE = "size"
    AGE = "age"
    KEY = "key"
    DEPTH = "depth"


@app.command(epilog=EXIT_CODES)
def ls(
    uri: Uri,
    namespace: NamespaceOption = None,
    sort: Annotated[
        Sort,
        typer.Option(
            help="What comes first: the chunk used last, the largest, the one written last, the lowest key, "
            "or the beginning of prefixes."
        ),
    ] = Sort.USED,
    is_reversed: Annotated[bool, typer.Option("--reverse", "-r", help="The other way round.")] = False,
    limit: Annotated[int, typer.Option(min=0, help="Most chunks to list; 0: all.")] = 50,
    older_than: Annotated[
        str | None, typer.Option(metavar="TIME", help="Only chunks that were not used for so long: 90m, 12h, 7d.")
    ] = None,
    tag: Annotated[
        str | None, typer.Option(metavar="T", help="Only chunks that requests with this tiered_kv.tag stored.")
    ] = None,
    stored_by: StoredByOption = None,
    more: Settings = None,
    as_json: AsJson = False,
) -> None:
    """List the namespaces of a tier, then its chunks.

    A namespace is one model run in one way: its digest, what its record says of the model, its epoch, what it holds,
    when it was last used, and which versions of this package and of the engine stored it, in which encoding of KV. Of
    each chunk: its key, its position in its prefix, tokens, size, when it was written, when it was last used, and
    whether a pin keeps it from eviction. A use of a chunk counts as a use of the prefix before it. Of a model with
    recurrent layers also the states that are stored, whose parts are listed as chunks, as tails are (the ends of
    prompts below a whole chunk); the column "tokens" tells them.

    Nothing is locked and no chunk is read, so this works beside a running server, and in a bucket by listing it once.
    But --tag and --stored-by read the header of every object of a bucket: nothing else tells whose it is and who
    stored it; without them the first who stored in a namespace is shown.
    On a terminal keys are shortened; in a pipe and in JSON they are whole. Any verb takes the beginning of a key.
    """
    with exit_codes():
        digest = None if tag is None else parse_tag(tag)
        conditions = parse_stored_by(stored_by)
        now_s = time.time()
        used_before_s = None if older_than is None else now_s - option_value("--older-than", parse_time_s, older_than)
        with open_uri(uri, more) as storage:
            content = look(storage)
            set_self_test_apart(content)
            space = find_namespace(content, namespace)
            if digest is not None or conditions is not None:
                look_for_origins(storage, content, space, conditions)
        forest = Forest(content.blobs)
        used = forest.last_uses()
        chosen = matching(forest, used, space, used_before_s, digest, conditions)
        shown = first(forest, chosen, orders(forest, used)[sort], limit or None, is_reversed=is_reversed)
        report = LsReport(
            uri=storage.uri,
            tier=storage.kind,
            namespaces=sum_up(content.records, forest, used, now_s, space)[0],
            chunks=_chunks(shown, storage.kind, content, forest, used),
            chunk_count=len(chosen),
            chunk_bytes=sum(part(forest.table.sizes, chosen)),
            notes=content.notes,
        )
        if as_json:
            print_json(report)
        else:
            _show(report, now_s)


def _chunks(rows: Sequence[int], tier: str, content: Content, forest: Forest, used: Sequence[float]) -> list[LsChunk]:
    kept = forest.pinned()
    tokens = {digest: record.chunk_tokens for digest, record in content.records.items()}
    return [
        LsChunk(
            key=blob.name.key.hex(),
            namespace=blob.name.namespace.hex(),
            chunk_index=blob.name.chunk_index,
            tokens=0 if blob.is_state else blob.tail_tokens or tokens.get(blob.name.namespace),
            is_state=blob.is_state,
            is_tail=blob.tail_tokens > 0,
            size_bytes=blob.size_bytes,
            written_s=blob.written_s,
            used_s=used[row],
            tier=tier,
            is_pinned=ident(blob) in kept,
            pinned_until_s=end_of(blob.pinned_until_s),
            tag=tag_text(blob.tag),
            stored_by=blob.stored_by or None,
        )
        for row in rows
        for blob in [forest.table[row]]
    ]


def _show(report: LsReport, now_s: float) -> None:
    print_table(
        "Namespaces",
        ("namespace", "model", "epoch", "chunks", "size", "states", "tails", "tokens/chunk", "last use", "stored by"),
        [
            (
                shortened(found.namespace),
                found.model or found.problem or "",
                found.epoch or "-",
                found.chunks,
                size_text(found.size_bytes),
                states_text(found.states, found.state_bytes),
                states_text(found.tails, found.tail_bytes),
                "-" if found.chunk_tokens is None else found.chunk_tokens,
                ago(now_s, found.used_s),
                "; ".join(found.stored_by) or found.first_stored_by or "-",
            )
            for found in report.namespaces
        ],
    )
    print()
    print_table(
        "Chunks",
        ("key", "namespace", "index", "tokens", "size", "written", "last use", "tier", "pinned"),
        [
            (
                shortened(chunk.key),
                shortened(chunk.namespace),
                chunk.chunk_index,
                _tokens_text(chunk),
                size_text(chunk.size_bytes),
                ago(now_s, chunk.written_s),
                ago(now_s, chunk.used_s),
                chunk.tier,
                pin_text(now_s, chunk.pinned_until_s, is_kept=chunk.is_pinned),
            )
            for chunk in report.chunks
        ],
    )
    if len(report.chunks) < report.chunk_count:
        note(f"{len(report.chunks)} of {report.chunk_count} chunks are shown; --limit 0 shows all.")


def _tokens_text(chunk: LsChunk) -> str | int:
    if chunk.is_state:
        return "state"
    if chunk.is_tail:
        return f"tail, {chunk.tokens}"
    return "-" if chunk.tokens is None else chunk.tokens
