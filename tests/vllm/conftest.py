"""An engine without vLLM, and a cache directory, for tests of one side that need a real server behind it."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.server.clients import SmallEngine, lone_engine
from tests.kit.server.processes import end_server, private_runtime


@pytest.fixture(scope="module")
def engine() -> Iterator[SmallEngine]:
    with lone_engine(lookup_timeout_ms=20_000) as engine:
        yield engine


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A cache directory; a server that the test had started in it is ended."""
    with private_runtime():
        yield tmp_path / "cache"
        end_server(tmp_path / "cache")


@pytest.fixture
def quiet() -> Iterator[None]:
    """Failures that a simulation injects are logged with their tracebacks; what counts is in its outcome."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)
