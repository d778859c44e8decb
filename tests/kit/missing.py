"""A real part that this machine lacks: its tests are skipped, and fail where all parts have to be there."""

import importlib
import os
from types import ModuleType
from typing import NoReturn

import pytest


def missing(what: str, why: object) -> NoReturn:
    """Skip the test with the reason; with ``CI=true`` fail it, for ``what`` that is so."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"CI=true, and {what}: {why}", pytrace=False)
    pytest.skip(str(why))


def needed(module: str) -> ModuleType:
    """A module of a package that ``scripts/setup`` installs and a user may lack."""
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        missing(f"{module} cannot be imported", exc)
