"""`tiered-kv evict`: remove chunks by age, by size, by name, never pinned ones; by tag or by who stored them, any."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from tiered_kv.cli.app import app
from tiered_kv.cli.looking import look, look_for_origins
from tiered_kv.cli.options import AsJson, NamespaceOption, Settings, Yes, find_chunk, find_namespace, open_uri
from tiered_kv.cli.output import (
    EXIT_CODES,
    EXIT_FOUND,
    Report,
    confirm,
    exit_codes,
    note,
    print_json,
    print_table,
    progress,
)

if TYPE_CHECKING:
    from tiered_kv.admin.selection import Selection
    from tiered_kv.admin.server_link import ServerLink
    from tiered_kv.admin.storage import Content, Origin, Removal, Storage
    from tiered_kv.keys.conditions import Conditions

EXAMPLES_SHOWN = 5

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


class NamespaceShare(msgspec.Struct, frozen=True, kw_only=True):
    """What goes from one namespace.

    Attributes:
        namespace: Its digest.
        chunks: How many chunks go.
        size_bytes: What they take.
    """

    namespace: str
    chunks: int
    size_bytes: int


class TierRemoval(msgspec.Struct, frozen=True, kw_only=True):
    """What was done in one tier.

    Attributes:
        tier: ``host``, ``disk`` or ``object``.
        removed: Chunks that are gone, or are going.
        removed_bytes: What they took; null for host memory, which does not say.
        kept: Chunks that stay because they are in use at the moment.
        missing: Chunks that were gone already.
    """

    tier: str
    removed: int
    removed_bytes: int | None
    kept: int
    missing: int


class EvictReport(Report, frozen=True, kw_only=True):
    """What ``evict`` chose and did.

    Attributes:
        uri: The tier that was named, null with ``--server``.
        server: The server that was named, null without.
        tag: Digest of the tag that was named, null without.
        stored_by: The conditions on who stored it, none without.
        is_dry_run: Whether nothing was changed because of ``--dry-run``.
        selected: Chunks that were chosen to go from the listed tier; 0 where only host memory was meant.
        selected_bytes: What they take.
        pinned: Chunks that were asked for and stay, because they are pinned or a chunk behind them is.
        pinned_bytes: What they take.
        namespaces: The chosen chunks by namespace.
        tiers: What was done; empty after a dry run, or where nothing was chosen.
        notes: What may make this incomplete, in words.
    """

    uri: str | None
    server: str | None
    tag: str | None
    stored_by: list[str]
    is_dry_run: bool
    selected: int
    selected_bytes: int
    pinned: int
    pinned_bytes: int
    namespaces: list[NamespaceShare]
    tiers: list[TierRemoval]
    notes: list[str]


@dataclass(frozen=True, kw_only=True)
class _Order:
    """What the command line says, unread."""

    uri: str | None
    server: str | None
    tier: str | None
    free: str | None
    to: str | None
    older_than: str | None
    namespace: str | None
    key: str | None
    tag: bytes | None
    stored_by: "Conditions | None"
    is_all: bool
    is_dry_run: bool
    is_confirmed: bool
    as_json: bool

    @property
    def origin(self) -> "Origin | None":
        """By what all that is meant is found, on a server and whatever pins say; None where something else is said."""
        from tiered_kv.admin.storage import Origin

        if self.tag is None and self.stored_by is None:
            return None
        return Origin(self.tag or b"", () if self.stored_by is None else self.stored_by.texts)


@app.command(epilog=EXIT_CODES)
def evict(
    uri: Annotated[
        str | None,
        typer.Argument(help="The tier: file:///var/cache/tiered_kv, s3://bucket/prefix.", show_default=False),
    ] = None,
    server: Annotated[
        str | None, typer.Option(metavar="SOCK", help="Evict from a running server instead: unix:///path/of/socket.")
    ] = None,
    tier: Annotated[
        str | None, typer.Option(help="With --server: host or disk. (default: both)", show_default=False)
    ] = None,
    free: Annotated[
        str | None, typer.Option("--bytes", metavar="SIZE", help="Free so much, e.g. 10GiB: the longest unused first.")
    ] = None,
    to: Annotated[
        str | None, typer.Option("--to", metavar="SHARE", help="Free down to 80% of the capacity, or to a size.")
    ] = None,
    older_than: Annotated[
        str | None, typer.Option(metavar="TIME", help="What was not used for so long: 12h, 7d. Units s, m, h, d.")
    ] = None,
    namespace: NamespaceOption = None,
    key: KeyOption = None,
    tag: TagOption = None,
    stored_by: StoredByOption = None,
    is_all: Annotated[bool, typer.Option("--all", help="Everything.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would go; change nothing.")] = False,
    yes: Yes = False,
    more: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Remove chunks, the end of a prefix before its beginning, after showing what goes and asking.

    Say what shall go by one of --bytes, --to, --older-than, --key, --tag, --stored-by and --all; --namespace alone
    takes all of that namespace, and beside another limits it to that namespace. Pinned chunks and the prefixes before
    them stay, also with --all: unpin them first. But --tag erases, and so does --stored-by: pinned chunks go, too, and
    their pins with them, and in a bucket every object's header is read, because nothing else tells whose it is and who
    stored it. If some of it is in use at the moment, the command ends with 4: say it again. A running server is told,
    keeps what it is using at the moment, and goes on; what was removed is computed again when it is asked for.

    --stored-by also takes what others stored behind a chunk that is meant: it was computed from what was loaded. What
    engines have loaded by now they keep, and store more behind it: operations.md says in which order to do what after
    a bad version.

    --server acts on what a running server holds: its disk tier, where pins count, and its host memory, where they do
    not. It goes with --namespace, --key, --tag, --stored-by or --all.
    """
    with exit_codes():
        from tiered_kv.admin.origins import parse_stored_by, parse_tag

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
            is_confirmed=yes,
            as_json=as_json,
        )
        report = _carry_out(order, more)
        if as_json:
            print_json(report)
        if order.origin is not None and any(done.kept for done in report.tiers):
            raise typer.Exit(EXIT_FOUND)


def _carry_out(order: _Order, more: list[str] | None) -> EvictReport:
    from tiered_kv.admin.server_link import ServerLink
    from tiered_kv.errors import ConfigError

    if order.server is not None and order.uri is None:
        with ServerLink.of_socket(order.server) as link:
            return _evict_server(link, order)
    if order.uri is None or order.server is not None:
        raise ConfigError("name either the storage URI or --server")
    if order.tier is not None:
        raise ConfigError("option --tier goes with --server: the URI names the tier already")
    with open_uri(order.uri, more, to_change=True) as storage:
        return _evict_tier(storage, look(storage), order)


def _look_for_origin(storage: "Storage", content: "Content", order: _Order) -> None:
    """Learn whose everything is and who stored it, and say what may be missing."""
    look_for_origins(storage, content, find_namespace(content, order.namespace), order.stored_by)
    unfinished, is_served, text = sum(stray.kind == "temp" for stray in content.strays), storage.is_served(), None
    if is_served and order.server is None:
        text = "the memory of this directory's server may hold more of it: say it with --server, too"
    elif unfinished and not is_served:
        text = (
            f"{unfinished} writes were cut off when a server ended, and nobody knows whose they are: `tiered-kv gc` "
            "removes what they left"
        )
    if text is not None:
        content.notes.append(text)
        note(text)


def _evict_tier(storage: "Storage", content: "Content", order: _Order) -> EvictReport:
    from tiered_kv.admin.eviction import Amount, make_criteria
    from tiered_kv.admin.forest import Forest
    from tiered_kv.admin.origins import note_on_foreign
    from tiered_kv.admin.selection import select

    origin = order.origin
    if origin is not None:
        _look_for_origin(storage, content, order)
    forest = Forest(content.blobs)
    place = find_namespace(content, order.namespace), None if order.key is None else find_chunk(forest, order.key)
    if origin is None and (text := note_on_foreign(content, place[0])):
        content.notes.append(text)
        note(text)
    amount = Amount(order.free, order.to, order.older_than)
    whose = order.tag, order.stored_by
    criteria = make_criteria(storage, content, amount, place=place, whose=whose, is_all=order.is_all)
    selection = select(forest, criteria)
    if not order.as_json:
        _show_selection(selection, storage.uri)
    tiers: list[TierRemoval] = []
    is_any = selection.blobs or (origin is not None and storage.is_served())  # which may be about to write some
    if is_any and not order.is_dry_run:
        confirm(f"{_chunks(len(selection.blobs))} go from {storage.uri}. Go on?", is_confirmed=order.is_confirmed)
        with progress("evicting") as tick:
            if origin is not None:
                removal = storage.erase(selection.blobs, origin, criteria.namespace, tick)
            else:
                removal = storage.remove(selection.blobs, tick)
        tiers.append(_done(storage.kind, removal, removal.removed_bytes, as_json=order.as_json))
    return _report(order, selection, tiers, content.notes)


def _evict_server(link: "ServerLink", order: _Order) -> EvictReport:
    """The server's disk tier as if its URI had been named, then its memory."""
    from tiered_kv.admin.disk_storage import DiskStorage
    from tiered_kv.admin.eviction import DISK, HOST, evict_host, host_selection, lower_tiers, open_namespaces
    from tiered_kv.admin.forest import Forest
    from tiered_kv.admin.selection import Criteria, Selection
    from tiered_kv.admin.storage import NamespaceRecord
    from tiered_kv.errors import ConfigError

    if order.free or order.to or order.older_than:
        raise ConfigError(
            "--server goes with --namespace, --key, --tag, --stored-by or --all; for the rest name the directory's URI"
        )
    there = [HOST, *(name for name in lower_tiers(link) if name == DISK)]
    if order.tier not in (None, *there):
        raise ConfigError(f"option --tier: expected {' or '.join(there)}, got {order.tier!r}")
    tiers = there if order.tier is None else [order.tier]
    if order.key is not None and DISK not in there:
        raise ConfigError("option --key: only a disk tier tells what is behind a chunk; say --namespace or --all")
    with DiskStorage(link.directory) as storage:
        content = look(storage)
        for digest in open_namespaces(link):
            content.records.setdefault(digest, NamespaceRecord(digest, None))
        forest = Forest(content.blobs)
        namespace = find_namespace(content, order.namespace)
        chunk = None if order.key is None else find_chunk(forest, order.key)
        # Says what contradicts.
        Criteria(namespace=namespace, key=chunk, tag=order.tag, stored_by=order.stored_by, is_all=order.is_all)
        report = _report(order, Selection([], []), [], content.notes)
        if order.origin is not None and HOST in tiers:
            return _erase_server(link, storage, content, order, tiers)
        if DISK in tiers:
            report = _evict_tier(storage, content, order)
    if HOST in tiers and not order.is_dry_run:
        keys = None if chunk is None else [b.name.key for b in host_selection(forest, chunk).blobs]
        space = chunk.name.namespace if chunk is not None else namespace
        what = "all chunks" if keys is None else _chunks(len(keys))
        where = "" if space is None else f" of namespace {space.hex()}"
        if not report.tiers:  # else it was asked already
            confirm(f"{what}{where} go from the server's memory. Go on?", is_confirmed=order.is_confirmed)
        done = _done(HOST, evict_host(link, space, keys), None, as_json=order.as_json)
        report = msgspec.structs.replace(report, tiers=[*report.tiers, done])
    return report


def _erase_server(
    link: "ServerLink", storage: "Storage", content: "Content", order: _Order, tiers: list[str]
) -> EvictReport:
    """The server's memory, then its disk tier, which what is in memory might be written to again."""
    from tiered_kv.admin.eviction import DISK, HOST, erase_host
    from tiered_kv.admin.selection import Selection

    assert order.origin is not None
    done: list[TierRemoval] = []
    if not order.is_dry_run:
        where = " and disk" if DISK in tiers else ""
        what = "all of this tag" if order.tag is not None else "all that was stored by these, and all behind it,"
        confirm(f"{what} goes from the server's memory{where}. Go on?", is_confirmed=order.is_confirmed)
        removal = erase_host(link, find_namespace(content, order.namespace), order.origin)
        done.append(_done(HOST, removal, None, as_json=order.as_json))
    report = _report(order, Selection([], []), [], content.notes)
    if DISK in tiers:
        report = _evict_tier(storage, content, replace(order, is_confirmed=True))
    return msgspec.structs.replace(report, tiers=[*done, *report.tiers])


def _report(order: _Order, selection: "Selection", tiers: list[TierRemoval], notes: list[str]) -> EvictReport:
    from tiered_kv.keys.tags import tag_text
    from tiered_kv.location import redact

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
        namespaces=[
            NamespaceShare(namespace=digest.hex(), chunks=chunks, size_bytes=size_bytes)
            for digest, (chunks, size_bytes) in selection.by_namespace().items()
        ],
        tiers=tiers,
        notes=notes,
    )


def _show_selection(selection: "Selection", uri: str) -> None:
    from tiered_kv.config import size_text

    if selection.blobs:
        print(f"{_chunks(len(selection.blobs))}, {size_text(selection.size_bytes)}, to go from {uri}")
        rows = [(d.hex(), chunks, size_text(size)) for d, (chunks, size) in selection.by_namespace().items()]
        print_table("", ("namespace", "chunks", "size"), rows)
        names = ", ".join(blob.name.key.hex() for blob in selection.blobs[:EXAMPLES_SHOWN])
        print(f"first: {names}{', ...' if len(selection.blobs) > EXAMPLES_SHOWN else ''}")
    else:
        print(f"nothing to remove from {uri}")
    if selection.pinned:
        size = size_text(selection.pinned_bytes)
        print(f"{_chunks(len(selection.pinned))}, {size}, stay because of pins; `tiered-kv unpin` ends them")


def _done(tier: str, removal: "Removal", removed_bytes: int | None, *, as_json: bool) -> TierRemoval:
    from tiered_kv.config import size_text

    if not as_json:
        size = "" if removed_bytes is None else f", {size_text(removed_bytes)},"
        where = "the server's memory" if tier == "host" else f"the {tier} tier"
        print(f"removed {_chunks(removal.removed)}{size} from {where}")
        if removal.kept:
            print(f"{_chunks(removal.kept)} stay because they are in use; say it again later")
    return TierRemoval(
        tier=tier, removed=removal.removed, removed_bytes=removed_bytes, kept=removal.kept, missing=removal.missing
    )


def _chunks(count: int) -> str:
    return f"{count} chunk{'' if count == 1 else 's'}"
