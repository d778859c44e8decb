"""Modules of the tests as processes of their own: ``python -m tests.kit...``, wherever the process works."""

import os
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
SEARCHED = (str(REPOSITORY), str(REPOSITORY / "scripts"))
"""Where the modules of the tests and what they import are found."""


def module_command(module: str, *arguments: object) -> list[str]:
    """The command that runs a module, by its full name, with :func:`module_environment`."""
    return [sys.executable, "-P", "-m", module, *map(str, arguments)]


def module_environment(**more: str) -> dict[str, str]:
    """This process's environment, with the folders of the modules before what ``PYTHONPATH`` has, and ``more``."""
    search = os.pathsep.join([*SEARCHED, *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": search} | more
