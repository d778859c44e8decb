"""Fixtures of the deployment tests."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A cache directory; not there yet."""
    return tmp_path / "cache"


@pytest.fixture
def run_directory() -> Iterator[Path]:
    """A directory for sockets, whose paths have at most 107 characters."""
    with tempfile.TemporaryDirectory(prefix="tkv-") as directory:
        yield Path(directory)
