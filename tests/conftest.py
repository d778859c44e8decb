"""Fixtures every test may ask for. Must stay cheap to import: torch and vLLM come in with the first engine."""

from pathlib import Path

import pytest
from counts import count
from hypothesis import settings
from s3 import s3  # noqa: F401 - a fixture

REPOSITORY = Path(__file__).parent.parent

# No deadline: the machine is shared, and no test here asserts on time. A failure prints what reproduces it.
settings.register_profile("tiered_kv", max_examples=count("EXAMPLES", 50), deadline=None, print_blob=True)
settings.load_profile("tiered_kv")


@pytest.fixture(scope="session")
def repository() -> Path:
    return REPOSITORY


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """A Llama model that starts in seconds and whose tokens depend on its KV; built once, kept under build/."""
    from tiered_kv.testing.model import TINY, build_model

    return build_model(REPOSITORY / "build" / "models" / "tiny", shape=TINY)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs an S3 server, so that ``-m "not s3"`` works without a mark on every test."""
    for item in items:
        if "s3" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.s3)
