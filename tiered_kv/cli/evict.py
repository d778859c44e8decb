"""`tiered-kv evict`: remove chunks by age, size or name, except pinned ones; by tag or storer, pinned ones too."""

import re
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from tiered_kv.cli.app import app
from tiered_kv.cli.exits import EXIT_CODES, EXIT_FOUND
from tiered_kv.cli.options import (
    AsJson,
    NamespaceOption,
    Settings,
    Yes,
    find_chunk,
    find_namespace,
    look,
    look_for_origins,
    open_uri,
    parse_stored_by,
    parse_tag,
)
from tiered_kv.cli.output import confirm, exit_codes, note, print_json, print_table, progress
from tiered_kv.config import parse_size, parse_time_s, size_text
from tiered_kv.errors import ConfigError
from tiered_kv.keys.conditions import Conditions
from tiered_kv.keys.tags import tag_text
from tiered_kv.location import redact
from tiered_kv.metrics.figures import HOST_NAME, PEERS_NAME
from tiered_kv.ops.eviction import (
    DISK,
    NOT_DELETED,
    Criteria,
    EvictReport,
    Selection,
    TierRemoval,
    note_on_foreign,
    select,
    used_bytes,
    without_pinned,
)
from tiered_kv.ops.forest import Forest
from tiered_kv.ops.open import open_directory, open_server
from tiered_kv.ops.storage import Content, NamespaceRecord, Origin, RemovalTotals, Storage, StoredBlob
from tiered_kv.ops.text import counted, option_value

if TYPE_CHECKING:
    from tiered_kv.ops.server_link import ServerLink

EXAMPLES_SHOWN = 5

ERASED_TIERS = frozenset({DISK, "object", PEERS_NAME})
"""Of a server, what this command erases, there or at another URI."""
NEVER_ERASED = (
    "may hold more of it, of which nothing can be erased, and from which it may be loaded again: docs/operations.md, "
    "'What an erasure does not cover'"
)

NONE_LEFT = "nothing of this tag was found here"
IS_HERE = "something of this tag is here"
WAS_ERASED = "something of this tag was found here, and is erased but for what stays: run it again"
CANNOT_BE_TOLD = "of some of what is here it cannot be told whose it is: the notes say what to do"

ServerOption = Annotated[
    str | None, typer.Option(metavar="SOCK", help="Evict from a running server instead: unix:///path/of/socket.")
]
TierOption = Annotated[
    str | None, typer.Option(help="With --server: host or disk. (default: both)", show_default=False)
]
BytesOption = Annotated[
    str | None, typer.Option("--bytes", metavar="SIZE", help="Free so much, e.g. 10GiB: the longest unused first.")
]
ToOption = Annotated[
    str | None, typer.Option("--to", metavar="SHARE", help="Free down to 80% of the capacity, or to a size.")
]
OlderThanOption = Annotated[
    str | None, typer.Option(metavar="TIME", help="What was not used for so long: 12h, 7d. Units s, m, h, d.")
]
ExpectNoneOption = Annotated[
    bool, typer.Option("--expect-none", help="With --tag: end with 4 unless nothing of it was found here: a proof.")
]
KeyOption = Annotated[
    str | None, typer.Option(metavar="DIGITS", help="This chunk and everything behind it: its key, or how it begins.")
]
TagOption = Annotated[
    str | None,
    typer.Option(
        metavar="T", help="What requests with this tiered_kv.tag stored, and everything behind it, pinned or not."
    ),
]
StoredByOption = Annotated[
    list[str] | None,
    typer.Option(
        "--stored-by",
        metavar="CONDITION",
        help="What such versions stored, or in such an encoding, and everything behind it, pinned or not: "
        "'vllm<0.32.1', 'tiered_kv==0.9.0', 'encoding=CPU_ATTN/cpu/amx'. May be repeated: all have to be met.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class _Order:
    """The arguments of the command line, mostly unparsed."""

    uri: str | None
    server: str | None
    tier: str | None
    free: str | None
    to: str | None
    older_than: str | None
    namespace: str | None
    key: str | None
    tag: bytes | None
    stored_by: Conditions | None
    is_all: bool
    is_dry_run: bool
    is_none_expected: bool
    is_confirmed: bool
    as_json: bool

    @property
    def origin(self) -> Origin | None:
        """The origin to erase, pinned chunks included; None where chunks are selected otherwise."""
        if self.tag is None and self.stored_by is None:
            return None
        return Origin(self.tag or b"", () if self.stored_by is None else self.stored_by.texts)


@app.command(epilog=EXIT_CODES)
def evict(
    uri: Annotated[
        str | None,
        typer.Argument(help="The tier: file:///var/cache/tiered_kv, s3://bucket/prefix.", show_default=False),
    ] = None,
    server: ServerOption = None,
    tier: TierOption = None,
    free: BytesOption = None,
    to: ToOption = None,
    older_than: OlderThanOption = None,
    namespace: NamespaceOption = None,
    key: KeyOption = None,
    tag: TagOption = None,
    stored_by: StoredByOption = None,
    is_all: Annotated[bool, typer.Option("--all", help="Everything.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would go; change nothing.")] = False,
    expect_none: ExpectNoneOption = False,
    yes: Yes = False,
    more: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Remove chunks, the end of a prefix before its beginning, after showing what goes and asking.

    Say what shall go by one of --bytes, --to, --older-than, --key, --tag, --stored-by and --all; --namespace alone
    takes all of that namespace, and beside another limits it to that namespace. Pinned chunks and the prefixes before
    them stay, also with --all: unpin them first. But --tag erases, and so does --stored-by: pinned chunks go, too, and
    their pins with them, and in a bucket every object's header is read, because nothing else tells whose it is and who
    stored it. If some of it is in use at the moment, or cannot be read, the command ends with 4: say it again. A
    running server is told, keeps what it is using at the moment, and goes on; what was removed is computed again when
    it is asked for. What it cannot delete stays, and the command ends with 4.

    --stored-by also takes what others stored behind a chunk that is meant: it was computed from what was loaded. What
    engines have loaded by now they keep, and store more behind it: docs/operations.md says in which order to do what
    after a bad version.

    --expect-none is for the last round of an erasure, and for who has to show that it is done: what is found goes as
    without it, and the command ends with 4 if anything was found, or does not tell whose it is. With --dry-run nothing
    goes; then a server's memory cannot be looked into.

    --server acts on what a running server holds: its disk tier, where pins count, and its host memory, where they do
    not. It goes with --namespace, --key, --tag, --stored-by or --all.
    """
    with exit_codes():
        order = _Order(
            uri=uri,
            server=server,
            tier=tier,
            free=free,
            to=to,
            older_than=older_than,
            namespace=namespace,
            key=key,
            tag=None if tag is None else parse_tag(tag),
            stored_by=parse_stored_by(stored_by),
            is_all=is_all,
            is_dry_run=dry_run,
            is_none_expected=expect_none,
            is_confirmed=yes,
            as_json=as_json,
        )
        report = _carry_out(order, more)
        if expect_none:
            report = _with_answer(report, order)
        if as_json:
            print_json(report)
        elif expect_none:
            _show_proof(report)
        is_kept = any(done.failed or (order.origin is not None and done.kept) for done in report.tiers)
        if report.unread or is_kept or report.is_none_left is False:
            raise typer.Exit(EXIT_FOUND)


def _tell(notes: list[str], text: str) -> None:
    """Say what may make the report incomplete, now and in it."""
    notes.append(text)
    note(text)


def _with_answer(report: EvictReport, order: _Order) -> EvictReport:
    """The report with what ``--expect-none`` asked for."""
    notes = list(report.notes)
    if order.namespace is not None:
        _tell(notes, "only this namespace was looked at: another may hold more of this tag")
    is_none_left = not _has_found(report) and not _is_untold(report)
    return msgspec.structs.replace(report, is_none_left=is_none_left, notes=notes)


def _has_found(report: EvictReport) -> bool:
    """Whether there was anything that was to go, from the tier or from a server's memory."""
    return report.selected > 0 or any(done.removed or done.kept or done.failed for done in report.tiers)


def _is_untold(report: EvictReport) -> bool:
    """Whether there is anything that does not tell whose it is."""
    return report.unread + report.unjudged > 0


def _show_proof(report: EvictReport) -> None:
    if report.is_none_left:
        print(NONE_LEFT)
    if _has_found(report):
        print(IS_HERE if report.is_dry_run else WAS_ERASED)
    if _is_untold(report):
        print(CANNOT_BE_TOLD)


def _carry_out(order: _Order, more: list[str] | None) -> EvictReport:
    if order.is_none_expected and order.tag is None:
        raise ConfigError("option --expect-none goes with --tag")
    if order.is_none_expected and order.tier is not None:
        raise ConfigError(
            "option --expect-none: one tier of a server proves nothing, because the other may hold more of it: leave "
            "out --tier"
        )
    if order.is_none_expected and order.is_dry_run and order.server is not None:
        raise ConfigError(
            "option --expect-none: a server's memory cannot be looked into without erasing: leave out --dry-run"
        )
    if order.server is not None and order.uri is None:
        with open_server(order.server) as link:
            return _evict_server(link, order)
    if order.uri is None or order.server is not None:
        raise ConfigError("name either the storage URI or --server")
    if order.tier is not None:
        raise ConfigError("option --tier goes with --server: the URI names the tier already")
    with open_uri(order.uri, more, to_change=True) as storage:
        return _evict_tier(storage, look(storage), order)


def _look_for_origin(storage: Storage, content: Content, order: _Order) -> None:
    """Read all tags and storers, and note what an erasure may miss."""
    from tiered_kv.ops.origins import unfinished_writes  # noqa: PLC0415 - takes the headers' parser

    if order.is_none_expected:
        _check_place(storage, content, order)
    look_for_origins(storage, content, find_namespace(content, order.namespace), order.stored_by)
    unfinished, is_served, text = unfinished_writes(content), storage.is_served(), None
    if is_served and order.server is None:
        if order.is_none_expected:
            raise ConfigError(
                "option --expect-none: the memory of this directory's server may hold more of it: name --server instead"
            )
        text = "the memory of this directory's server may hold more of it: say it with --server, too"
    elif unfinished and not is_served:
        content.unjudged += unfinished
        text = (
            f"{counted(unfinished, 'write')} under way or cut off, and nobody knows whose: what is left of such a one "
            "after an hour `tiered-kv gc` removes"
        )
    if text is not None:
        _tell(content.notes, text)


def _check_place(storage: Storage, content: Content, order: _Order) -> None:
    """Check that the place is that of a cache: behind a slip in its name nothing of any tag is found.

    A cache that lies deeper in that of another is not looked at, and a note says so; where one does, only chunks and
    records make a cache of the place: other files a server may have left that was started there by the same slip.
    Memory of a server that was named is erased by now, and its directory is a cache's whatever lies in it.

    Raises:
        ConfigError: It is none, or that of a cache of another medium.
    """
    from tiered_kv.ops.origins import HERE, caches_below  # noqa: PLC0415 - takes the headers' parser

    is_cache = order.server is not None or content.blobs or content.records
    if below := caches_below(content.strays):
        text = (
            f"files of another cache lie in {storage.uri}, below {', '.join(below[:3])}"
            f"{', ...' if len(below) > 3 else ''}, of which this proves nothing: name the place where that cache is"
        )
        if HERE in below or not is_cache:
            raise ConfigError(f"option --expect-none: {text}")
        _tell(content.notes, text)
    elif not (is_cache or content.own_bytes):
        raise ConfigError(
            f"option --expect-none: no file of a cache lies in {storage.uri}, which proves nothing: name the place "
            "where the cache is"
        )


def _evict_tier(storage: Storage, content: Content, order: _Order) -> EvictReport:
    origin = order.origin
    if origin is not None:
        _look_for_origin(storage, content, order)
    forest = Forest(content.blobs)
    namespace = find_namespace(content, order.namespace)
    chunk = None if order.key is None else find_chunk(forest, order.key)
    if origin is None and (text := note_on_foreign(content, namespace)):
        _tell(content.notes, text)
    criteria = _criteria(order, storage, content, namespace, chunk)
    if content.blobs and not content.has_uses and (criteria.free_bytes or criteria.used_before_s is not None):
        _tell(content.notes, "nothing here tells when chunks were used: they count as used when they were written")
    selection = select(forest, criteria, content.state_parts())
    if not order.as_json:
        _show_selection(selection, storage.uri)
    tiers: list[TierRemoval] = []
    is_any = selection.blobs or (origin is not None and storage.is_served())  # which may be about to write some
    if is_any and not order.is_dry_run:
        confirm(
            f"{counted(len(selection.blobs), 'chunk')} go from {storage.uri}. Go on?", is_confirmed=order.is_confirmed
        )
        with progress("evicting") as tick:
            if origin is not None:
                removal = storage.erase(selection.blobs, origin, criteria.namespace, tick)
            else:
                selection = without_pinned(forest, selection, storage.pins())
                removal = storage.remove(selection.blobs, tick)
        tiers.append(_done(storage.kind, removal, removal.removed_bytes, as_json=order.as_json))
    return _report(order, selection, tiers, content)


def _criteria(
    order: _Order, storage: Storage, content: Content, namespace: bytes | None, chunk: StoredBlob | None
) -> Criteria:
    """The criteria of the command line, resolved against the listing.

    Raises:
        ConfigError: It is empty or contradictory, or needs a capacity that is unknown.
    """
    if order.free is not None and order.to is not None:
        raise ConfigError("say either --bytes or --to: they contradict each other")
    free_bytes = None
    if order.free is not None:
        free_bytes = option_value("--bytes", parse_size, order.free)
    elif order.to is not None:
        free_bytes = max(0, used_bytes(storage, content) - _goal(storage, order.to))
    used_before_s = None
    if order.older_than is not None:
        used_before_s = time.time() - option_value("--older-than", parse_time_s, order.older_than)
    return Criteria(
        free_bytes=free_bytes,
        used_before_s=used_before_s,
        key=chunk,
        tag=order.tag,
        stored_by=order.stored_by,
        is_all=order.is_all,
        namespace=namespace,
    )


def _goal(storage: Storage, text: str) -> int:
    share = re.fullmatch(r"\s*(\d{1,3}(?:\.\d+)?)\s*%\s*", text)
    if share is None:
        return option_value("--to", parse_size, text)
    percent = float(share[1])
    if percent > 100:
        raise ConfigError(f"option --to: expected at most 100%, got {text!r}")
    capacity = storage.capacity_bytes()
    if capacity is None:
        raise ConfigError(
            "option --to: the capacity is not known, because no server is running that enforces one: give --bytes, "
            "--to with a size such as 10GiB, or the limit of a directory as --set disk_bytes=SIZE"
        )
    return int(capacity * percent / 100)


def _evict_server(link: "ServerLink", order: _Order) -> EvictReport:
    """The server's disk tier as if its URI had been named, then its memory."""
    if any(one is not None for one in (order.free, order.to, order.older_than)):
        raise ConfigError(
            "--server goes with --namespace, --key, --tag, --stored-by or --all; for the rest name the directory's URI"
        )
    if not link.owns(link.directory):
        raise ConfigError(
            f"option --server: the server owns {link.directory}, and what has that path here is not its directory: say "
            "it where the server runs, or where the directory is mounted as there"
        )
    figures = link.stat()
    there = [HOST_NAME, *(tier.name for tier in figures.tiers if tier.name == DISK)]
    if order.tier not in (None, *there):
        raise ConfigError(f"option --tier: expected {' or '.join(there)}, got {order.tier!r}")
    tiers = there if order.tier is None else [order.tier]
    if order.key is not None and DISK not in there:
        raise ConfigError("option --key: only a disk tier tells what is behind a chunk; say --namespace or --all")
    with open_directory(link.directory) as storage:
        content = look(storage)
        for digest in {bytes.fromhex(session.namespace) for session in figures.sessions if session.namespace}:
            content.records.setdefault(digest, NamespaceRecord(digest, None))
        forest = Forest(content.blobs)
        namespace = find_namespace(content, order.namespace)
        chunk = None if order.key is None else find_chunk(forest, order.key)
        # Says what contradicts.
        Criteria(namespace=namespace, key=chunk, tag=order.tag, stored_by=order.stored_by, is_all=order.is_all)
        if order.origin is not None:
            for name in sorted({tier.name for tier in figures.tiers} - ERASED_TIERS):
                _tell(content.notes, f"this server's {name} tier {NEVER_ERASED}")
        if order.is_dry_run and HOST_NAME in tiers:
            _tell(content.notes, "what the server's memory holds of it goes, too; a dry run does not look there")
        report = _report(order, Selection([], []), [], content)
        if order.origin is not None and HOST_NAME in tiers:
            return _erase_server(link, storage, content, order, tiers)
        if DISK in tiers:
            report = _evict_tier(storage, content, order)
    if HOST_NAME in tiers and not order.is_dry_run:
        keys = None if chunk is None else _keys_behind(forest, chunk)
        space = chunk.name.namespace if chunk is not None else namespace
        what = "all chunks" if keys is None else counted(len(keys), "chunk")
        where = "" if space is None else f" of namespace {space.hex()}"
        if not report.tiers:  # else it was confirmed already
            confirm(f"{what}{where} go from the server's memory. Go on?", is_confirmed=order.is_confirmed)
        done = _done(HOST_NAME, link.evict(HOST_NAME, space or b"", keys, holes=True), None, as_json=order.as_json)
        report = msgspec.structs.replace(report, tiers=[*report.tiers, done])
    return report


def _keys_behind(forest: Forest, chunk: StoredBlob) -> list[bytes]:
    """A chunk and everything behind it, pinned or not: pins keep what is stored, not what is in memory."""
    found = sorted(forest.behind([chunk]), key=lambda blob: -blob.name.chunk_index)
    return [blob.name.key for blob in found]


def _erase_server(
    link: "ServerLink", storage: Storage, content: Content, order: _Order, tiers: list[str]
) -> EvictReport:
    """The server's memory, then its disk tier, which what is in memory might be written to again."""
    assert order.origin is not None
    done: list[TierRemoval] = []
    if not order.is_dry_run:
        where = " and disk" if DISK in tiers else ""
        what = "all of this tag" if order.tag is not None else "all that was stored by these, and all behind it,"
        confirm(f"{what} goes from the server's memory{where}. Go on?", is_confirmed=order.is_confirmed)
        removal = link.erase(HOST_NAME, find_namespace(content, order.namespace) or b"", order.origin)
        done.append(_done(HOST_NAME, removal, None, as_json=order.as_json))
    report = _report(order, Selection([], []), [], content)
    if DISK in tiers:
        report = _evict_tier(storage, content, replace(order, is_confirmed=True))
    return msgspec.structs.replace(report, tiers=[*done, *report.tiers])


def _report(order: _Order, selection: Selection, tiers: list[TierRemoval], content: Content) -> EvictReport:
    return EvictReport(
        uri=None if order.uri is None else redact(order.uri),
        server=order.server,
        tag=tag_text(order.tag),
        stored_by=[] if order.stored_by is None else list(order.stored_by.texts),
        is_dry_run=order.is_dry_run,
        selected=len(selection.blobs),
        selected_bytes=selection.size_bytes,
        pinned=len(selection.pinned),
        pinned_bytes=selection.pinned_bytes,
        unread=content.unread,
        unjudged=content.unjudged,
        is_none_left=None,
        namespaces=selection.by_namespace(),
        tiers=tiers,
        notes=content.notes,
    )


def _show_selection(selection: Selection, uri: str) -> None:
    if selection.blobs:
        print(f"{counted(len(selection.blobs), 'chunk')}, {size_text(selection.size_bytes)}, to go from {uri}")
        rows = [(one.namespace, one.chunks, size_text(one.size_bytes)) for one in selection.by_namespace()]
        print_table("", ("namespace", "chunks", "size"), rows)
        names = ", ".join(blob.name.key.hex() for blob in selection.blobs[:EXAMPLES_SHOWN])
        print(f"first: {names}{', ...' if len(selection.blobs) > EXAMPLES_SHOWN else ''}")
    else:
        print(f"nothing to remove from {uri}")
    if selection.pinned:
        size = size_text(selection.pinned_bytes)
        print(f"{counted(len(selection.pinned), 'chunk')}, {size}, stay because of pins; `tiered-kv unpin` ends them")


def _done(tier: str, removal: RemovalTotals, removed_bytes: int | None, *, as_json: bool) -> TierRemoval:
    if not as_json:
        size = "" if removed_bytes is None else f", {size_text(removed_bytes)},"
        where = "the server's memory" if tier == "host" else f"the {tier} tier"
        print(f"removed {counted(removal.removed, 'chunk')}{size} from {where}")
        if removal.kept:
            print(f"{counted(removal.kept, 'chunk')} stay because they are in use; say it again later")
        if removal.failed:
            print(f"{counted(removal.failed, 'chunk', 'stay')}: {NOT_DELETED}")
    return TierRemoval(
        tier=tier,
        removed=removal.removed,
        removed_bytes=removed_bytes,
        kept=removal.kept,
        missing=removal.missing,
        failed=removal.failed,
    )
