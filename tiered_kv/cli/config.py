"""`tiered-kv config`: every setting with its default, made from the settings' own help."""

from typing import Annotated

import typer

from tiered_kv.cli.app import app
from tiered_kv.cli.output import EXIT_CODES, exit_codes, print_json, print_table


@app.command(epilog=EXIT_CODES)
def config(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the settings of vLLM's kv_connector_extra_config and of the server, with defaults."""
    with exit_codes():
        from tiered_kv.config import Config

        settings = Config.settings()
        if as_json:
            print_json([{"name": s.name, "default": s.default, "help": s.help} for s in settings])
        else:
            print_table("", ("setting", "default", "meaning"), [(s.name, s.default or "-", s.help) for s in settings])
