"""`tiered-kv serve`: a cache server in the foreground, for several engines of one machine."""

import gc
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from tiered_kv.cli.app import app
from tiered_kv.cli.exits import EXIT_CODES
from tiered_kv.cli.logs import set_up
from tiered_kv.cli.options import Settings, parse_settings
from tiered_kv.cli.output import exit_codes
from tiered_kv.config import Config
from tiered_kv.errors import ConfigError
from tiered_kv.location import redact
from tiered_kv.server.compose import serve as run
from tiered_kv.server.daemonize import keep_heap_small, let_loop_answer, raise_descriptor_limit
from tiered_kv.server.directory import ServerInfo
from tiered_kv.server.hint_requests import HintsToken
from tiered_kv.server.http import OperationsPort
from tiered_kv.server.server import Server


@app.command(epilog=EXIT_CODES)
def serve(
    uri: Annotated[str, typer.Argument(help="The lowest tier: file:///var/cache/tiered_kv, s3://bucket/prefix.")],
    host_bytes: Annotated[
        str | None, typer.Option(help="Host memory, e.g. 8GiB. (default: 10 % of the memory limit, at most 8 GiB)")
    ] = None,
    disk_bytes: Annotated[
        str | None, typer.Option(help="Limit of the directory, e.g. 200GiB. (default: 10 % of the free space)")
    ] = None,
    min_free_bytes: Annotated[str | None, typer.Option(help="Free space to leave. (default: 1GiB)")] = None,
    drain_s: Annotated[
        float | None, typer.Option(help="Longest time to write what is held when told to end. (default: 30)")
    ] = None,
    socket: Annotated[
        Path | None, typer.Option(help="Where to listen. (default: a private place, known to clients of the directory)")
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Serve /metrics, /healthz and /readyz at this port; 0: any that is free."),
    ] = None,
    metrics_host: Annotated[
        str | None, typer.Option(help="Address to serve them at. Anybody there may read them. (default: 127.0.0.1)")
    ] = None,
    hints_token_file: Annotated[
        Path | None,
        typer.Option(help="Take hints of gateways at the metrics port, from whoever shows the token in this file."),
    ] = None,
    more: Settings = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "warning",
    log_format: Annotated[str, typer.Option(help="text, or json: one object a line.")] = "text",
) -> None:
    """Serve a directory until SIGTERM, SIGINT or SIGHUP; then write what is held and end.

    Engines of the same user find the server by its directory, or by "server": "unix:///path/of/socket". Once it can be
    reached it prints one line: "serving URI pid=... socket=...", with --metrics-port also "metrics=http://...". Logs go
    to standard error.
    """
    with exit_codes(), ExitStack() as at_end:
        set_up(log_level, log_format)
        given = {
            "storage_uri": uri,
            "host_bytes": host_bytes,
            "disk_bytes": disk_bytes,
            "min_free_bytes": min_free_bytes,
            "drain_s": drain_s,
        }
        more_settings = parse_settings(more)
        if twice := sorted(name for name in more_settings if given.get(name) is not None):
            raise ConfigError(f"option --set: {twice[0]} is given twice")
        settings = Config.from_mapping(given | more_settings)
        if socket is not None and not socket.is_absolute():
            raise ConfigError(f"option --socket: expected an absolute path without unix://, got {str(socket)!r}")
        if metrics_port is None:
            _refuse_without_port(metrics_host, hints_token_file)
        token = None if hints_token_file is None else HintsToken(hints_token_file)
        raise_descriptor_limit()
        keep_heap_small()
        let_loop_answer()
        metrics = (
            None if metrics_port is None else _open_metrics(metrics_host or "127.0.0.1", metrics_port, token, at_end)
        )

        def on_ready(info: ServerInfo) -> None:
            gc.collect()  # as in server/__main__.py
            gc.freeze()
            if metrics is not None:
                metrics.start(info.socket)
            shown = "" if metrics is None else f" metrics={metrics.url}"
            print(f"serving {redact(uri)} pid={info.pid} socket=unix://{info.socket}{shown}", flush=True)

        run(settings, until_idle=False, on_ready=on_ready, on_server=Server.install_signal_handlers, listen_at=socket)


def _refuse_without_port(host: str | None, hints_token_file: Path | None) -> None:
    if host is not None:
        raise ConfigError("option --metrics-host: nothing listens there: give --metrics-port, too")
    if hints_token_file is not None:
        raise ConfigError("option --hints-token-file: hints come to the metrics port: give --metrics-port, too")


def _open_metrics(host: str, port: int, hints_token: HintsToken | None, at_end: ExitStack) -> OperationsPort:
    """Take the port before the cache starts, which may take long; ``at_end`` gives it back."""
    metrics = OperationsPort(host, port, hints_token)
    at_end.callback(metrics.close)
    return metrics
