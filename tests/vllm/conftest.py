"""An engine without vLLM, for tests of one side of the connector that need a real server behind it."""

from collections.abc import Iterator

import pytest

from tests.kit.server.clients import SmallEngine, lone_engine


@pytest.fixture(scope="module")
def engine() -> Iterator[SmallEngine]:
    with lone_engine(lookup_timeout_ms=20_000) as engine:
        yield engine
