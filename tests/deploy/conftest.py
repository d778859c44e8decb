"""Fixtures of the deployment tests."""

from pathlib import Path

import pytest


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A cache directory; not there yet."""
    return tmp_path / "cache"
