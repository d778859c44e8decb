"""The `tiered-kv` application that verbs add themselves to: one verb per file."""

from typing import Annotated

import typer

from tiered_kv import __version__
from tiered_kv.cli.output import EXIT_CODES

app = typer.Typer(
    name="tiered-kv",
    help="Keep, serve and look at the KV caches of LLM engines.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"tiered-kv {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Keep, serve and look at the KV caches of LLM engines."""
