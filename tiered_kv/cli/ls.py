"""`tiered-kv ls`: the namespaces of a tier, then its chunks."""

import time
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
import typer

from tiered_kv.cli.app import app
from tiered_kv.cli.looking import ago, end_of, look, look_for_origins, pin_text, shortened
from tiered_kv.cli.options import AsJson, NamespaceOption, Settings, StoredByOption, Uri, find_namespace, open_uri
from tiered_kv.cli.output import EXIT_CODES, Report, exit_codes, note, print_json, print_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tiered_kv.admin.forest import Forest, Ident
    from tiered_kv.admin.listing import NamespaceSum
    from tiered_kv.admin.storage import Content, Storage, StoredBlob
    from tiered_kv.keys.conditions import Conditions


class LsNamespace(msgspec.Struct, frozen=True, kw_only=True):
    """One namespace: one model, run in one way.

    Attributes:
        namespace: Its digest.
        model: The model in a few words, as the namespace's record says; null where there is none that can be read.
        problem: Why there is no ``model``; null where there is.
        epoch: Changes when the cache is reset; null if unknown.
        chunks: Chunks stored.
        size_bytes: What they take of the tier.
        chunk_tokens: Tokens of a chunk; null if unknown.
        used_s: Last use of any chunk; null without chunks.
        first_stored_by: Who opened the namespace here first: package, engine, encoding; null where that is not said.
        stored_by: How many of its chunks each stored, whether ``--stored-by`` means them or not; empty in a bucket
            where no header is read.
    """

    namespace: str
    model: str | None
    problem: str | None
    epoch: str | None
    chunks: int
    size_bytes: int
    chunk_tokens: int | None
    used_s: float | None
    first_stored_by: str | None
    stored_by: dict[str, int]


class LsChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One chunk.

    Attributes:
        key: Its key.
        namespace: Digest of its namespace.
        chunk_index: Its position in its prefix, 0 for the first.
        tokens: Its tokens; null if unknown.
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
    whether a pin keeps it from eviction. A use of a chunk counts as a use of the prefix before it.

    Nothing is locked and no chunk is read, so this works beside a running server, and in a bucket by listing it once.
    But --tag and --stored-by read the header of every object of a bucket: nothing else tells whose it is and who
    stored it; without them the first who stored in a namespace is shown.
    On a terminal keys are shortened; in a pipe and in JSON they are whole. Any verb takes the beginning of a key.
    """
    with exit_codes():
        from tiered_kv.admin.listing import set_self_test_apart
        from tiered_kv.admin.origins import parse_stored_by, parse_tag
        from tiered_kv.admin.words import option_value
        from tiered_kv.config import parse_time_s

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
        wish = _Wish(space, used_before_s, sort, is_reversed, limit or None, digest, conditions)
        report = _report(storage, content, wish, now_s)
        if as_json:
            print_json(report)
        else:
            _show(report, now_s)


class _Wish(NamedTuple):
    """Which chunks are asked for, in which order."""

    namespace: bytes | None
    used_before_s: float | None
    sort: Sort
    is_reversed: bool
    limit: int | None
    tag: bytes | None
    stored_by: "Conditions | None"


def _report(storage: "Storage", content: "Content", wish: _Wish, now_s: float) -> LsReport:
    from tiered_kv.admin.forest import Forest
    from tiered_kv.admin.listing import first, matching, orders, sum_up

    forest = Forest(content.blobs)
    used = forest.last_uses()
    chosen = matching(forest, used, wish.namespace, wish.used_before_s)
    if wish.tag is not None:
        chosen = [blob for blob in chosen if blob.tag == wish.tag]
    if wish.stored_by is not None:
        chosen = [blob for blob in chosen if wish.stored_by.matches(blob.stored_by or "")]
    usage = sum_up(content.records, forest, used, now_s, wish.namespace)
    shown = first(chosen, orders(used)[wish.sort], wish.limit, is_reversed=wish.is_reversed)
    return LsReport(
        uri=storage.uri,
        tier=storage.kind,
        namespaces=[_namespace(found) for found in usage.namespaces],
        chunks=_chunks(shown, storage.kind, content, forest, used),
        chunk_count=len(chosen),
        chunk_bytes=sum(blob.size_bytes for blob in chosen),
        notes=content.notes,
    )


def _namespace(found: "NamespaceSum") -> LsNamespace:
    from tiered_kv.admin.listing import describe, epoch_of

    record = found.record
    return LsNamespace(
        namespace=found.digest.hex(),
        model=None if record.problem else describe(record),
        problem=record.problem or None,
        epoch=epoch_of(record),
        chunks=found.chunks,
        size_bytes=found.size_bytes,
        chunk_tokens=record.chunk_tokens,
        used_s=found.used_s,
        first_stored_by=record.first_stored_by or None,
        stored_by={line: count for line, count in found.storers.most_common() if line},
    )


def _chunks(
    blobs: "Sequence[StoredBlob]", tier: str, content: "Content", forest: "Forest", used: "Mapping[Ident, float]"
) -> list[LsChunk]:
    from tiered_kv.admin.forest import ident
    from tiered_kv.keys.tags import tag_text

    kept = forest.pinned()
    tokens = {digest: record.chunk_tokens for digest, record in content.records.items()}
    return [
        LsChunk(
            key=blob.name.key.hex(),
            namespace=blob.name.namespace.hex(),
            chunk_index=blob.name.chunk_index,
            tokens=tokens.get(blob.name.namespace),
            size_bytes=blob.size_bytes,
            written_s=blob.written_s,
            used_s=used[ident(blob)],
            tier=tier,
            is_pinned=ident(blob) in kept,
            pinned_until_s=end_of(blob.pinned_until_s),
            tag=tag_text(blob.tag),
            stored_by=blob.stored_by or None,
        )
        for blob in blobs
    ]


def _show(report: LsReport, now_s: float) -> None:
    from tiered_kv.config import size_text

    print_table(
        "Namespaces",
        ("namespace", "model", "epoch", "chunks", "size", "tokens/chunk", "last use", "stored by"),
        [
            (
                shortened(found.namespace),
                found.model or found.problem or "",
                found.epoch or "-",
                found.chunks,
                size_text(found.size_bytes),
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
                "-" if chunk.tokens is None else chunk.tokens,
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
