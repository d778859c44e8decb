"""A machine that was suspended: its monotonic clock stood still, and the other servers of the bucket went on."""

import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tiered_kv import machine
from tiered_kv.config import Config
from tiered_kv.engine import clock as engine_clock
from tiered_kv.errors import CapacityExceeded
from tiered_kv.fleet.keeper import BucketKeeper, KeeperConfig
from tiered_kv.fleet.timing import Timing
from tiered_kv.location import parse_location
from tiered_kv.metrics.recorder import Recorder
from tiered_kv.testing.blobs import SampleChain
from tiered_kv.tiers.object.store import ObjectStore
from tiered_kv.tiers.open import open_tiers

CHAIN = SampleChain(1, payload_bytes=4096)
SUSPENDED_S = 60.0


class Laptop:
    """A machine's clocks, as the kernel keeps them: CLOCK_MONOTONIC does not count the time in suspend."""

    def __init__(self) -> None:
        self.monotonic_s = 1000.0
        self.boot_s = 1000.0

    def run(self, seconds: float) -> None:
        self.monotonic_s += seconds
        self.boot_s += seconds

    def suspend(self, seconds: float) -> None:
        self.boot_s += seconds

    def clock_gettime(self, clock: int) -> float:
        return {time.CLOCK_MONOTONIC: self.monotonic_s, time.CLOCK_BOOTTIME: self.boot_s}[clock]

    def as_module(self) -> SimpleNamespace:
        return SimpleNamespace(
            monotonic=lambda: self.monotonic_s,
            clock_gettime=self.clock_gettime,
            CLOCK_BOOTTIME=time.CLOCK_BOOTTIME,
            CLOCK_MONOTONIC=time.CLOCK_MONOTONIC,
        )


@pytest.fixture
def laptop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Laptop]:
    laptop = Laptop()
    for module in (machine, engine_clock):
        monkeypatch.setattr(module, "time", laptop.as_module())
    machine._boot_clock.cache_clear()
    yield laptop
    machine._boot_clock.cache_clear()


def in_bucket(run: Callable[[float], None], *turns: Callable[[], None], seconds: int) -> None:
    for _ in range(seconds):
        run(1.0)
        for turn in turns:
            turn()


def test_a_server_that_wakes_up_has_no_grant_left(laptop: Laptop, tmp_path: Path) -> None:
    """As the server is put together, with the tier that it PUTs through; the other server never slept."""
    uri = f"memory://{uuid.uuid4().hex}/prefix"
    config = Config.from_mapping(
        {"storage_uri": uri, "disk_path": str(tmp_path), "disk_bytes": "160MiB", "storage_bytes": "1GiB"}
    )
    opened = open_tiers(config, lambda namespace: CHAIN.form, Recorder(), engine_clock.SystemClock().monotonic)
    sleeper, world_s = opened[-1].tier, 0.0
    other_store = ObjectStore(parse_location(uri))
    other = BucketKeeper(other_store, KeeperConfig(storage_bytes=1 << 30), Timing(), lambda: world_s)

    def run(seconds: float) -> None:
        nonlocal world_s
        world_s += seconds
        laptop.run(seconds)

    try:
        in_bucket(run, sleeper.flush, other.turn, seconds=6)
        first = CHAIN.blob(0)
        sleeper.put(first.name, first.view())
        assert other.figures()["role"] == "follower", "the one that will sleep leads"

        laptop.suspend(SUSPENDED_S)
        for _ in range(int(SUSPENDED_S)):
            world_s += 1.0
            other.turn()
        assert other.figures()["role"] == "leader", "it was counted for gone, and its bytes may be another's"

        second = CHAIN.blob(1)
        with pytest.raises(CapacityExceeded, match="has not confirmed this server's grant lately"):
            sleeper.put(second.name, second.view())
        in_bucket(run, sleeper.flush, other.turn, seconds=8)
        sleeper.put(second.name, second.view())
        assert other.figures()["role"] == "leader", "the one that woke up follows and is granted anew"
    finally:
        other.close()
        other_store.close()
        for one in opened:
            one.tier.close()


def test_a_machine_without_that_clock_uses_the_one_it_has(laptop: Laptop, monkeypatch: pytest.MonkeyPatch) -> None:
    def only_monotonic(clock: int) -> float:
        if clock == time.CLOCK_BOOTTIME:
            raise OSError(22, "Invalid argument")
        return laptop.clock_gettime(clock)

    monkeypatch.setattr(machine.time, "clock_gettime", only_monotonic)
    laptop.suspend(SUSPENDED_S)
    laptop.run(1.0)
    assert machine.since_boot_s() == 1001.0


SHIPPED = """
import inspect, time
from tiered_kv.fleet.keeper import BucketKeeper
clock = inspect.signature(BucketKeeper).parameters["clock"].default
print(clock() - time.monotonic())
"""


def test_the_shipped_keeper_counts_what_the_monotonic_clock_leaves_out() -> None:
    """In a time namespace the two clocks are 100,000 s apart, as after a day of suspend."""
    inside = ["unshare", "--user", "--map-root-user", "--time", "--boottime", "100000", "--fork"]
    command = [*inside, sys.executable, "-c", SHIPPED]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    if "unshare" in done.stderr:
        pytest.skip(f"this machine lends no time namespaces: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert 99_990 < float(done.stdout) < 100_010
