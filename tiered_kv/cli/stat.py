"""`tiered-kv stat`: statistics of a running server, or sums of a tier without one."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from tiered_kv.cli.app import app
from tiered_kv.cli.exits import EXIT_CODES
from tiered_kv.cli.options import AsJson, Settings, open_uri, parse_settings
from tiered_kv.cli.output import exit_codes, note, print_json, print_table, progress
from tiered_kv.cli.text import (
    BREAKER,
    age_text,
    capacity_text,
    count_text,
    decisions_text,
    pins_text,
    points_text,
    rate_text,
    share_text,
    states_text,
    time_text,
)
from tiered_kv.config import Config, size_text
from tiered_kv.errors import ConfigError, TierUnavailable
from tiered_kv.metrics.figures import (
    HOST_NAME,
    CurveFigures,
    ServerFigures,
    SessionFigures,
    TierFigures,
    TokenFigures,
    sum_operations,
)
from tiered_kv.ops.report import Report
from tiered_kv.ops.server_link import ServerLink
from tiered_kv.ops.summary import BucketState, StorageFigures, summarize
from tiered_kv.ops.text import counted


class StatReport(Report, frozen=True, kw_only=True):
    """What is known of a tier or a server.

    Attributes:
        version: Of this description.
        server: What the running server says; null: none runs for the URI.
        storage: What the tier itself shows; null: a server runs for the directory and says it better, or only a server
            was named, or the bucket could not be read.
        notes: What may make this incomplete.
    """

    server: ServerFigures | None
    storage: StorageFigures | None
    notes: list[str]


ServerOption = Annotated[
    str | None, typer.Option("--server", metavar="SOCKET", help="A server by its socket, unix:///path, without a URI.")
]
OptionalUri = Annotated[
    str | None, typer.Argument(help="The tier: file:///var/cache/tiered_kv, s3://bucket/prefix.", show_default=False)
]


@app.command(epilog=EXIT_CODES)
def stat(uri: OptionalUri = None, server: ServerOption = None, more: Settings = None, as_json: AsJson = False) -> None:
    """Show what a cache holds, serves and drops: from its server if one runs, else from the tier itself.

    A server is found by its directory: of an object store with a disk in front, name that, too: --set
    disk_path=/directory. It tells hit tokens of asked tokens by tier, capacity and usage, bandwidths, queues, drops,
    damaged chunks and breakers, all since its start. Without one the tier is listed: namespaces, chunks, bytes, what
    does not belong there, and of a bucket, whose server tells only its own part, who leads and what each server
    reported. With --server nothing is listed. Starts no server.
    """
    with exit_codes():
        report = _report(uri, server, more)
        if as_json:
            print_json(report)
            return
        if report.server is not None:
            _show_server(report.server)
        if report.storage is not None:
            if report.server is not None:
                print()
            _show_storage(report.storage, has_server=report.server is not None)


def connect(uri: str | None, server: str | None, more: list[str] | None) -> ServerLink | None:
    """The running server that a URI or a socket means; None: none runs for the URI. The caller closes it.

    Raises:
        ConfigError: Both or neither were given, or one is wrong.
        TierUnavailable: Nobody answers at the socket.
    """
    if (uri is None) == (server is None):
        raise ConfigError("name either the storage URI or --server unix:///path/of/socket")
    if server is not None:
        return ServerLink.of_socket(server)
    directory = _config(uri, more).server_directory()
    return ServerLink.of_directory(Path(os.path.realpath(directory)))


def _config(uri: str | None, more: list[str] | None) -> Config:
    return Config.from_mapping({"storage_uri": uri} | parse_settings(more))


def _report(uri: str | None, server: str | None, more: list[str] | None) -> StatReport:
    figures, storage, notes = None, None, list[str]()
    link = connect(uri, server, more)
    if link is not None:
        with link:
            figures = link.stat()
    if uri is not None and (figures is None or _config(uri, more).location().kind == "object"):
        try:
            with open_uri(uri, more) as opened, progress("listing") as tick:
                storage, notes = summarize(opened, tick)
        except TierUnavailable as exc:
            if figures is None:
                raise
            notes = [f"the bucket could not be read from here: {exc}"]
    for text in notes:
        note(text)
    return StatReport(server=figures, storage=storage, notes=notes)


# -- a server ---------------------------------------------------------------------------------------------------------


def _session_text(session: SessionFigures) -> str:
    if not session.declined:
        return session.state
    return f"without the cache: {counted(session.declined, 'worker')} cannot take part, as vLLM's log explains"


def _pinned_text(session: SessionFigures) -> str:
    if not session.pinned_bytes:
        return ""
    return f"{size_text(session.pinned_bytes)} in {session.pinning_s:.1f} s"


def _show_server(figures: ServerFigures) -> None:
    print(f"tokens    {_tokens_text(figures.tokens)}")
    counts = {name: count_text(count) for name, count in figures.tokens.decisions.items() if count}
    print(f"lookups   {decisions_text(counts)}")
    print(f"server    pid {figures.pid}, version {figures.version}, up {age_text(figures.uptime_s)}, ", end="")
    print(f"{counted(figures.clients, 'client')}, {counted(figures.hierarchy['lookups'], 'open lookup')}")
    if not figures.sessions:
        print("sessions  none: no engine takes part; the log of one that runs says why")
    print(f"directory {figures.directory}")
    print(f"storage   {figures.storage}\n")
    columns = ("tier", "used", "capacity", "chunks", "hit tokens", "read", "written", "read rate", "waiting", "state")
    print_table("Tiers", columns, [_host_row(figures), *(_tier_row(figures, tier) for tier in figures.tiers)])
    _show_part(
        "Sessions",
        ("engine", "namespace", "workers", "pinned", "state"),
        [
            (one.engine, one.namespace or "", one.workers, _pinned_text(one), _session_text(one))
            for one in figures.sessions
        ],
    )
    _show_part(
        "Namespaces",
        ("namespace", "host memory", "disk", "keeps", "may take"),
        [
            (
                one.namespace,
                size_text(one.host_bytes),
                size_text(one.disk_bytes),
                f"{one.min_share:.0%}" if one.min_share else "",
                f"{one.max_share:.0%}" if one.max_share < 1 else "",
            )
            for one in figures.namespaces
        ],
    )
    _show_part(
        "Prompt chunks found with tiers of other sizes (estimated)",
        ("namespace", "tier", "found", "half of it", "twice", "four times"),
        [row for curve in figures.curves for row in _curve_rows(curve)],
    )
    _show_part(
        "Operations",
        ("tier", "operation", "outcome", "calls", "bytes", "mean time", "rate"),
        [
            (
                row.tier,
                row.operation,
                row.outcome,
                row.calls,
                size_text(row.bytes) if row.bytes else "",
                time_text(row.seconds / row.calls),
                rate_text(row.bytes / row.seconds if row.seconds else None),
            )
            for row in figures.operations
        ],
    )
    drops = figures.drops()
    _show_part("Chunks not written", ("reason", "chunks"), list(drops.items()))
    others = {"pending_writes": figures.pending_writes, **figures.counters}
    _show_part("Counters", ("counter", "value"), sorted((n, v) for n, v in others.items() if n not in drops))


def _curve_rows(curve: CurveFigures) -> list[tuple[object, ...]]:
    tiers = dict.fromkeys(point.tier for point in curve.points)
    return [
        (
            curve.namespace,
            tier,
            share_text(curve.found(tier, 1) or 0.0, 1),
            *(points_text(curve.gain(tier, times)) for times in (0.5, 2, 4)),
        )
        for tier in tiers
    ]


def _show_part(title: str, columns: tuple[str, ...], rows: list[tuple[object, ...]]) -> None:
    if rows:
        print()
        print_table(title, columns, rows)


def _host_row(figures: ServerFigures) -> tuple[object, ...]:
    hierarchy = figures.hierarchy
    used, capacity = size_text(hierarchy["host_assigned_bytes"]), size_text(hierarchy["host_capacity_bytes"])
    leased = f"{size_text(hierarchy['leased_bytes'])} leased" if hierarchy["leased_bytes"] else ""
    tails = f"{hierarchy['host_tails']} of these are tails" if hierarchy.get("host_tails") else ""
    return (
        HOST_NAME,
        used,
        capacity,
        hierarchy["host_ready_chunks"],
        _hit_text(figures, HOST_NAME),
        "",
        "",
        "",
        "",
        ", ".join(filter(None, (leased, tails))),
    )


def _tier_row(figures: ServerFigures, tier: TierFigures) -> tuple[object, ...]:
    moved = [sum_operations(figures.operations, tier.name, operation).bytes for operation in ("get", "put")]
    state = [
        _state_text(tier),
        f"{tier.corrupt} damaged chunks read" if tier.corrupt else "",
        f"{tier.tails} of these are tails" if tier.tails else "",
        pins_text(tier.kept_by_pins_bytes, tier.capacity_bytes),
        _admission_text(tier),
    ]
    return (
        tier.name,
        size_text(tier.used_bytes),
        capacity_text(tier.capacity_bytes),
        tier.blobs,
        _hit_text(figures, tier.name),
        *(size_text(size_bytes) if size_bytes else "" for size_bytes in moved),
        rate_text(tier.read_bytes_per_s),
        counted(tier.backlog_chunks, "chunk") if tier.backlog_chunks else "",
        "; ".join(text for text in state if text),
    )


def _hit_text(figures: ServerFigures, tier: str) -> str:
    tokens = sum(hit.tokens for hit in figures.tokens.hits if hit.tier == tier)
    return f"{count_text(tokens)} ({share_text(tokens, figures.tokens.asked_tokens)})" if tokens else ""


def _tokens_text(tokens: TokenFigures) -> str:
    """The hit rate in one line."""
    if not tokens.asked_tokens:
        return "none asked yet"
    shares = ", ".join(f"{share_text(hit.tokens, tokens.asked_tokens)} {hit.tier}" for hit in tokens.hits)
    share = share_text(tokens.hit_tokens, tokens.asked_tokens)
    return f"{count_text(tokens.asked_tokens)} asked, {count_text(tokens.hit_tokens)} hit ({share}): {shares}"


def _admission_text(tier: TierFigures) -> str:
    """How much of what came was worth a write; empty where everything is."""
    if not tier.declined_chunks:
        return ""
    return f"{count_text(tier.admitted_chunks)} chunks admitted, {count_text(tier.declined_chunks)} declined"


def _state_text(tier: TierFigures) -> str:
    """State of the breaker, and this server's role in a shared bucket."""
    parts = [BREAKER.get(tier.breaker or "", ""), tier.breaker_reason or ""]
    if tier.bucket is not None:
        rests = " (at rest)" if tier.bucket.is_resting else ""
        parts.append(f"bucket: {tier.bucket.role}{rests}" + (f", term {tier.bucket.term}" if tier.bucket.term else ""))
    return "; ".join(part for part in parts if part)


# -- a tier by itself -------------------------------------------------------------------------------------------------


def _show_storage(storage: StorageFigures, *, has_server: bool) -> None:
    now_s = time.time()

    def ago(when_s: float | None) -> str:
        return "-" if when_s is None else f"{age_text(now_s - when_s)} ago"

    runs = "" if has_server or storage.kind == "object" else ", no server is running for this directory"
    print(f"storage   {storage.uri}{runs}")
    spaces = counted(len(storage.namespaces), "namespace")
    print(f"chunks    {storage.chunks} in {spaces}, {count_text(storage.tokens)} tokens")
    limit = f" of {size_text(storage.capacity_bytes)}" if storage.capacity_bytes is not None else ""
    free = f", {size_text(storage.free_bytes)} free on this file system" if storage.free_bytes is not None else ""
    print(f"size      {size_text(storage.bytes)}{limit}{free}")
    print(f"besides   {size_text(storage.own_bytes)} of records, indexes, leases and logs")
    if storage.strays:
        kinds = ", ".join(f"{count} {kind}" for kind, count in storage.stray_kinds.items())
        what = "`tiered-kv verify` names them" if storage.stray_kinds.keys() - {"temp"} else "left by writes cut off"
        gc = "; `tiered-kv gc` removes old temp files of ours" if "temp" in storage.stray_kinds else ""
        print(f"strays    {storage.strays} ({kinds}), {size_text(storage.stray_bytes)}: {what}{gc}")
    print(f"pinned    {counted(storage.pinned_chunks, 'chunk')}")
    print(f"last use  {ago(storage.last_used_unix_s)}")
    if storage.bucket is not None:
        print(f"leader    {_leader(storage.bucket, ago)}")
        _show_part(
            "Servers",
            ("server and session", "term", "reported", "granted", "put", "chunks put"),
            [
                (
                    one.session,
                    one.term,
                    ago(one.reported_unix_s),
                    "" if one.granted_bytes is None else size_text(one.granted_bytes),
                    size_text(one.spent_bytes),
                    one.stored_chunks,
                )
                for one in storage.bucket.servers
            ],
        )
    _show_part(
        "Namespaces",
        ("namespace", "chunks", "size", "tokens", "states", "pinned", "last use"),
        [
            (
                space.namespace,
                space.chunks,
                size_text(space.bytes),
                "" if space.tokens is None else count_text(space.tokens),
                states_text(space.states, space.state_bytes),
                space.pinned_chunks,
                ago(space.last_used_unix_s),
            )
            for space in storage.namespaces
        ],
    )


def _leader(bucket: BucketState, ago: Callable[[float | None], str]) -> str:
    if bucket.term is None:
        return "nobody ever led: no server has limits"
    if bucket.leader is None:
        return f"the lease of term {bucket.term} cannot be read"
    said = f"{bucket.leader}, term {bucket.term}"
    return f"nobody; the last was {said}" if bucket.is_closed else f"{said}, renewed {ago(bucket.renewed_unix_s)}"
