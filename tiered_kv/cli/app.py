"""The `tiered-kv` application: the table of verbs, each loaded on first use.

``tiered-kv --help`` must be quick, and shells run it for every completion: the list of verbs is a table here, and a
verb's module is imported when that verb or its help is run.
"""

import sys
from importlib import import_module
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from tiered_kv.cli.exits import EXIT_CODES, EXIT_SETTINGS
from tiered_kv.version import __version__

VERBS: Final = {
    "ls": "List the namespaces of a tier, then its chunks.",
    "du": "Show what takes a tier's room: by namespace and by last use, against its capacity.",
    "tree": "Draw the prefix trees of a tier: which prompts share their beginning, and where they part.",
    "inspect": "Show everything about one chunk: header, checksums, tensors, ancestry, namespace.",
    "export": "Write one chunk to a file that safetensors opens.",
    "stat": "Show what a cache holds, serves and drops: from its server if one runs, else from the tier itself.",
    "top": "Show what a running server does, live: tokens asked for and hit, bytes moved, queues, drops, per second.",
    "explain": "Say why a prompt is a hit in this tier, or where and why it stops being one.",
    "doctor": "Check whether a configuration would work here, and say what it comes to.",
    "verify": "Read blobs and check every byte of them; name what is bad, and remove what is corrupt if asked to.",
    "gc": "Remove what nobody can use any more: orphans, temp files and dead namespaces, after showing and asking.",
    "evict": "Remove chunks, the end of a prefix before its beginning, after showing what goes and asking.",
    "pin": "Keep a chunk, and the prefix before it, from eviction.",
    "unpin": "End a pin: the chunk and the prefix before it may be evicted again.",
    "warm": "Fill a tier from another one: the most recently used prefixes first, as much as fits.",
    "cp": "Copy chunks from one tier to another: all, a namespace, or the prefix up to one key.",
    "serve": "Serve a directory until SIGTERM, SIGINT or SIGHUP; then write what is held and end.",
    "config": "List the settings of vLLM's kv_connector_extra_config and of the server, with defaults.",
}
"""Every verb and the first line of its help, in the order of ``--help``. Verb ``x`` lives in ``tiered_kv.cli.x``."""

MODULES: Final[dict[str, str]] = {"cp": "tiered_kv.cli.warm", "unpin": "tiered_kv.cli.pin"}
"""Modules of the verbs that have none of their own name."""


MOVED: Final = {
    "size": "`size` is `python -m tools.kv_size` now, run in a clone of the repository: docs/sizing.md has examples."
}
"""Verbs of earlier versions, and where each went."""


class Verbs(TyperGroup):
    """The verbs of the table, each loaded on first use."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        for name, summary in VERBS.items():  # stand-ins: what --help and a misspelled verb need
            self.commands.setdefault(name, TyperCommand(name, help=summary))

    def list_commands(self, ctx: Any) -> list[str]:
        del ctx
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        del ctx
        if cmd_name in MOVED:
            return _moved(cmd_name)
        if cmd_name not in VERBS:
            return None
        import_module(MODULES.get(cmd_name, f"tiered_kv.cli.{cmd_name}"))  # which registers itself with `app`
        whole = typer.main.get_command(app)
        assert isinstance(whole, TyperGroup)
        return whole.commands[cmd_name]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


app = typer.Typer(
    name="tiered-kv",
    cls=Verbs,
    help="Keep, serve and look at the KV caches of LLM engines.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    context_settings={"max_content_width": 120},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich takes as long to import as all the rest
)


def _moved(verb: str) -> TyperCommand:
    """A command that takes any arguments, names the verb's new place and ends with 2."""

    def tell() -> None:
        print(f"tiered-kv: {MOVED[verb]}", file=sys.stderr)
        raise typer.Exit(EXIT_SETTINGS)

    ignore = {"ignore_unknown_options": True, "allow_extra_args": True}
    return TyperCommand(verb, callback=tell, context_settings=ignore, add_help_option=False)


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
