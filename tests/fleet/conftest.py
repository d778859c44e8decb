"""Object stores that hold nothing yet, and the clock of the keepers that tests turn by hand."""

from collections.abc import Iterator

import pytest

from tests.sim.bucket.keepers import Time, open_store
from tiered_kv.tiers.object.store import ObjectStore


@pytest.fixture(params=["memory", "directory", pytest.param("s3", marks=pytest.mark.s3)])
def store(request: pytest.FixtureRequest) -> Iterator[ObjectStore]:
    yield from open_store(request.param, request)


@pytest.fixture
def memory(request: pytest.FixtureRequest) -> Iterator[ObjectStore]:
    yield from open_store("memory", request)


@pytest.fixture
def clock() -> Time:
    return Time()
