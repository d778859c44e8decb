"""`tiered-kv stat`: what a running server holds and does."""

import json
import os
import socket
from pathlib import Path
from typing import Annotated, Any

import typer

from tiered_kv.cli.app import app
from tiered_kv.cli.output import EXIT_CODES, exit_codes, print_json, print_table
from tiered_kv.cli.settings import Settings, parse_settings

TIMEOUT_S = 10.0


@app.command(epilog=EXIT_CODES)
def stat(
    uri: Annotated[
        str | None, typer.Argument(help="The lowest tier: file:///var/cache/tiered_kv, s3://bucket/prefix.")
    ] = None,
    server: Annotated[str | None, typer.Option(help="The server's socket, unix:///path.")] = None,
    more: Settings = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show capacity, usage, counters and operations of a running server. Starts none.

    It is found by its directory: of an object store with a disk in front, name that, too: --set disk_path=/directory.
    """
    with exit_codes():
        figures = _ask(_connect(uri, server, parse_settings(more)))
        if as_json:
            print_json(figures)
        else:
            _show(figures)


def _connect(uri: str | None, server: str | None, more: dict[str, object]) -> socket.socket:
    from tiered_kv.config import Config
    from tiered_kv.errors import ConfigError, TierUnavailable
    from tiered_kv.server.paths import read_info, server_directory
    from tiered_kv.server.spawn import SCHEME, connect

    if (uri is None) == (server is None):
        raise ConfigError("name either the storage URI or --server unix:///path/of/socket")
    if server is not None:
        if not server.startswith(f"{SCHEME}/"):
            raise ConfigError(f"option --server: expected unix:///path/of/socket, got {server!r}")
        sock = connect(server.removeprefix(SCHEME))
        if sock is None:
            raise TierUnavailable(f"no server answers at {server}")
        return sock
    directory = server_directory(Config.from_mapping({"storage_uri": uri} | more))
    info = read_info(directory)
    sock = connect(info.socket) if info is not None else None
    if sock is None:
        raise TierUnavailable(_nobody(directory))
    return sock


def _nobody(directory: Path) -> str:
    if not directory.exists():
        return f"no server is running, and there is no such directory. path={directory}"
    if not os.access(directory, os.R_OK | os.X_OK):
        return f"the directory cannot be read. path={directory}"
    return f"no server is running for this directory. path={directory}"


def _ask(sock: socket.socket) -> dict[str, Any]:
    from tiered_kv import __version__
    from tiered_kv.errors import ProtocolError, TierUnavailable
    from tiered_kv.server import messages as m
    from tiered_kv.server.handshake import read_message, shake_hands

    with sock:
        shake_hands(sock, m.Hello(m.PROTOCOL, __version__, "admin", os.getpid()), TIMEOUT_S)
        try:
            sock.sendall(m.frame(m.StatRequest()))
            answer = read_message(sock)
        except OSError as exc:
            raise TierUnavailable(f"the server went away while it was asked: {exc}") from exc
    if not isinstance(answer, m.Stat):
        raise ProtocolError(f"expected Stat, got {type(answer).__name__}")
    figures: dict[str, Any] = json.loads(answer.figures)
    return figures


def _show(figures: dict[str, Any]) -> None:
    from tiered_kv.config import size_text

    hierarchy = figures["hierarchy"]
    print(f"server    pid {figures['pid']}, version {figures['version']}, {figures['clients']} clients")
    print(f"directory {figures['directory']}\n")
    rows: list[tuple[object, ...]] = [
        (
            "host",
            size_text(hierarchy["host_assigned_bytes"]),
            size_text(hierarchy["host_capacity_bytes"]),
            hierarchy["host_ready_chunks"],
            "",
            "",
        )
    ]
    for tier in figures["tiers"]:
        capacity, rate = tier["capacity_bytes"], tier["read_bytes_per_s"]
        rows.append(
            (
                tier["name"],
                size_text(tier["used_bytes"]),
                "unbounded" if capacity is None else size_text(capacity),
                tier["blobs"],
                "" if rate is None else f"{size_text(int(rate))}/s",
                _state(tier),
            )
        )
    print_table("Tiers", ("tier", "used", "capacity", "chunks", "read rate", "state"), rows)
    for title, columns, lines in (
        ("Sessions", ("engine", "namespace", "workers", "state"), figures["sessions"]),
        ("Operations", ("tier", "operation", "outcome", "calls", "bytes", "seconds"), figures["operations"]),
    ):
        print()
        print_table(title, columns, [[line[column] for column in columns] for line in lines])
    print()
    counters = {"pending_writes": figures["pending_writes"], **figures["counters"]}
    print_table("Counters", ("counter", "value"), sorted(counters.items()))


def _state(tier: dict[str, Any]) -> str:
    """What the breaker says, and who keeps a shared bucket within its limits."""
    words = {"closed": "in use", "open": "left out", "half_open": "left out, being tried"}
    parts = [words.get(tier.get("breaker", ""), "")]
    if "breaker_reason" in tier:
        parts.append(tier["breaker_reason"])
    if bucket := tier.get("bucket"):
        parts.append(f"bucket: {bucket['role']}" + (f", term {bucket['term']}" if bucket["term"] else ""))
    return "; ".join(part for part in parts if part)
