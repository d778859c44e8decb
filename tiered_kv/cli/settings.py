"""Settings on a command line: ``--set NAME=VALUE`` for every setting that has no option of its own."""

import json
from collections.abc import Sequence
from typing import Annotated

import typer

Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Any setting of `tiered-kv config`; may be repeated. Values may be JSON. Keep secrets in the environment.",
    ),
]


def parse_settings(given: Sequence[str] | None) -> dict[str, object]:
    """Settings by name; values are JSON where they can be read as such, else text.

    Raises:
        ConfigError: One has no ``=``, or a name is given twice.
    """
    from tiered_kv.errors import ConfigError

    settings: dict[str, object] = {}
    for text in given or ():
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise ConfigError(f"option --set: expected NAME=VALUE, got {name!r}")
        if name in settings:
            raise ConfigError(f"option --set: {name} is given twice")
        try:
            settings[name] = json.loads(value)
        except ValueError:
            settings[name] = value
    return settings
