"""Keepers over the real object client, turned by hand: who puts what, how time passes, what is there afterwards.

The keepers' own intervals run on a clock that tests own. The dates of objects are the store's own, so a test that is
about age lets the store's clock move on (:func:`pass_seconds`).
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tiered_kv.errors import CapacityExceeded
from tiered_kv.fleet.keeper import BucketKeeper, KeeperConfig
from tiered_kv.fleet.layout import Objects
from tiered_kv.fleet.timing import Timing
from tiered_kv.keys.naming import object_path, parse_object_path
from tiered_kv.location import parse_location
from tiered_kv.testing.blobs import SampleChain
from tiered_kv.tiers.object.store import ObjectStore

CHAIN = SampleChain(1, payload_bytes=4096)
OTHER = SampleChain(2, payload_bytes=4096)
SIZE = len(CHAIN.blob(0).data)
SLACK = SIZE // 2
"""The keepers' own objects count, too."""
PACE = Timing(hole_grace_s=0.0, epoch_s=1.0, slice_s=1e9, recency_s=10.0)
PROBE = "what-time-is-it"


@dataclass(slots=True)
class Time:
    """A keeper's clock."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def open_store(kind: str, request: pytest.FixtureRequest) -> Iterator[ObjectStore]:
    """An empty object store of a kind: ``memory``, ``directory`` or ``s3``."""
    name = request.getfixturevalue("tmp_path")
    if kind == "memory":
        location = parse_location(f"memory://{name.name}/prefix")
    elif kind == "directory":
        location = parse_location(f"shared+file://{name}/root")
    else:
        s3 = request.getfixturevalue("s3")
        location = parse_location(s3.uri(s3.new_prefix()), s3.options())
    opened = ObjectStore(location)
    yield opened
    opened.close()


def keeper_of(
    store: Objects, clock: Time, blobs: int | None = 100, timing: Timing = PACE, **config: Any
) -> BucketKeeper:
    """A server's keeper that serves ``CHAIN``'s namespace; room for ``blobs``, None: no limit."""
    limit = None if blobs is None else blobs * SIZE + SLACK
    keeper = BucketKeeper(store, KeeperConfig(storage_bytes=limit, **config), timing, clock)
    keeper.serve(CHAIN.namespace)
    return keeper


def put(store: Any, keeper: BucketKeeper, chain: SampleChain, index: int) -> None:
    """Store a blob as the object tier does.

    Raises:
        CapacityExceeded: The keeper was granted no room.
    """
    blob = chain.blob(index)
    keeper.reserve(len(blob.data))
    stored = store.create(object_path(blob.name), blob.view())
    keeper.finished(len(blob.data), stored)


def put_patiently(store: Any, clock: Time, keepers: list[BucketKeeper], chain: SampleChain, index: int) -> None:
    """Store a blob, letting everybody turn until there is room."""
    for _ in range(60):
        try:
            put(store, keepers[0], chain, index)
            return
        except CapacityExceeded:
            turn(clock, *keepers)
    pytest.fail("nothing was granted in a minute")


def turn(clock: Time, *keepers: BucketKeeper, times: int = 1) -> None:
    """A second each, in which every keeper has one turn."""
    for _ in range(times):
        clock.now += 1
        for keeper in keepers:
            keeper.turn()


def pass_seconds(store: Any, seconds: float) -> None:
    """Until the store's own clock has moved on so far: what dates objects."""
    store.put(PROBE, b"")
    first = store.head(PROBE).modified_s
    while store.head(PROBE).modified_s < first + seconds:
        time.sleep(0.05)
        store.put(PROBE, b"")
    store.delete([PROBE])


def blobs(store: Objects) -> dict[str, int]:
    """Sizes of the blobs that are there, by path."""
    return {info.path: info.size_bytes for info in store.list("") if parse_object_path(info.path)}


def indexes_of(store: Objects, chain: SampleChain = CHAIN) -> list[int]:
    """Positions of the chunks of a chain that are there."""
    there = blobs(store)
    return [index for index in range(20) if object_path(chain.name(index)) in there]
