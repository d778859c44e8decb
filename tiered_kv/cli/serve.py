"""`tiered-kv serve`: a cache server in the foreground, for several engines of one machine."""

import logging
from pathlib import Path
from typing import Annotated

import typer

from tiered_kv.cli.app import app
from tiered_kv.cli.output import EXIT_CODES, exit_codes
from tiered_kv.cli.settings import Settings, parse_settings


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
    more: Settings = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "warning",
) -> None:
    """Serve a directory until SIGTERM or SIGINT; then write what is held and end.

    Engines of the same user find the server by its directory, or by "server": "unix:///path/of/socket".
    """
    with exit_codes():
        _set_log_level(log_level)
        from tiered_kv.config import Config
        from tiered_kv.errors import ConfigError
        from tiered_kv.location import redact
        from tiered_kv.server.compose import serve as run
        from tiered_kv.server.detach import raise_descriptor_limit
        from tiered_kv.server.paths import ServerInfo
        from tiered_kv.server.server import Server

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
            raise ConfigError(f"option --socket: expected an absolute path, got {str(socket)!r}")
        raise_descriptor_limit()

        def on_ready(info: ServerInfo) -> None:
            print(f"serving {redact(uri)} pid={info.pid} socket=unix://{info.socket}", flush=True)

        run(settings, until_idle=False, on_ready=on_ready, on_server=Server.install_signal_handlers, listen_at=socket)


def _set_log_level(name: str) -> None:
    from tiered_kv.errors import ConfigError

    level = logging.getLevelNamesMapping().get(name.upper())
    if level is None:
        raise ConfigError(f"option --log-level: expected debug, info, warning or error, got {name!r}")
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
