"""The start-up self-test: it passes on a tier that works, says why it fails on others, and leaves nothing behind."""

import errno
import os
import threading

import pytest

from tests.kit.fake_clock import FakeClock
from tests.kit.storage.disk_probe import open_disk
from tiered_kv.config import Config
from tiered_kv.engine.clock import SystemClock
from tiered_kv.engine.self_test import TEST_BYTES, self_test, self_test_format
from tiered_kv.engine.throughput import Throughput
from tiered_kv.errors import TierUnavailable
from tiered_kv.keys.namespace import SELF_TEST_NAMESPACE
from tiered_kv.metrics.recorder import Recorder
from tiered_kv.server.compose import build_engine
from tiered_kv.testing.blobs import SampleChain
from tiered_kv.testing.faults import Fault, FaultyTier, at
from tiered_kv.testing.memory import MemoryTier
from tiered_kv.tiers.wrappers.verified import VerifiedTier

PUT, GET, DELETE = 0, 1, 6  # operations of a test that passes; the reads at once are 2 to 5
DELETE_AFTER_A_READ_THAT_FAILED = 2


def run(memory, faults, clock=None, on_operation=None):
    tier = VerifiedTier(FaultyTier(memory, at(faults), on_operation), {SELF_TEST_NAMESPACE: self_test_format()}.get)
    return self_test(tier, clock or FakeClock())


def test_a_tier_that_works_is_measured_and_left_as_it_was():
    memory, clock = MemoryTier(), FakeClock()
    seconds = {"put": 2.0, "get": 0.5, "delete": 8.0}
    result = run(memory, {}, clock, lambda operation, _name: clock.advance(seconds[operation]))
    assert (result.failure, result.write_s, result.read_s) == (None, 2.0, 0.5)
    assert (result.reads_at_once, result.together_s) == (4, 4 * 0.5)
    assert result.size_bytes > TEST_BYTES and memory.names == []


def test_reads_after_the_first_are_made_at_once_as_many_as_the_medium_profits_from():
    reads, all_there = [], threading.Barrier(4)

    def on_operation(operation, _name):
        if operation == "get":
            reads.append(operation)
            if len(reads) > 1:
                all_there.wait(10)  # raises where they come one after the other

    result = run(MemoryTier(), {}, SystemClock(), on_operation)
    assert (result.failure, result.reads_at_once, len(reads)) == (None, 4, 5)


def test_one_of_the_reads_that_are_made_at_once_may_not_fail():
    for count in range(2, 6):
        memory = MemoryTier()
        assert "operation=get" in (run(memory, {count: Fault.ERROR}).failure or "") and memory.names == []


def test_without_a_thread_to_be_had_the_reads_are_made_one_after_the_other(monkeypatch):
    def start(_thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    memory = MemoryTier()
    result = run(memory, {})
    assert (result.failure, result.reads_at_once, memory.names) == (None, 4, [])


def test_a_tier_is_predicted_by_what_reads_give_together_and_how_soon_one_comes():
    """A bucket gives one stream a third of what it gives four: by one read, no request would wait for it."""
    throughput = Throughput()
    throughput.sample(4 << 24, 0.8, 0.6)  # alone it took 0.6 s, four took 0.8
    assert throughput.eta_s(1, 1, 0.0) == 0.6
    assert throughput.eta_s(1 << 28, 1 << 28, 0.0) == pytest.approx(3.2)


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        ({PUT: Fault.ERROR}, "operation=put"),
        ({PUT: Fault.VANISH}, "is not there"),
        ({PUT: Fault.TORN_WRITE}, "payload_xxh3 mismatch"),
        ({GET: Fault.ERROR}, "operation=get"),
        ({DELETE: Fault.ERROR}, "operation=delete"),
        ({GET: Fault.ERROR, DELETE_AFTER_A_READ_THAT_FAILED: Fault.ERROR}, "operation=get"),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(f"{n}-{fault.value}" for n, fault in value.items()),
)
def test_a_tier_that_does_not_work_says_why(faults, reason):
    assert reason in (run(MemoryTier(), faults).failure or "")


def test_a_tier_without_room_can_still_be_read_and_passes_unmeasured():
    memory = MemoryTier(TEST_BYTES // 2)
    result = run(memory, {})
    assert (result.failure, result.size_bytes, memory.names) == (None, 0, [])


def test_a_tier_without_room_that_does_not_answer_fails():
    result = run(MemoryTier(TEST_BYTES // 2), {1: Fault.ERROR})
    assert "operation=get" in (result.failure or "")


def test_without_verification_wrong_bytes_are_seen_all_the_same():
    result = self_test(FaultyTier(MemoryTier(), at({GET: Fault.BIT_FLIP})), FakeClock())
    assert result.failure == "what was read differs from what was written"


def test_the_machines_clock_never_goes_back():
    clock = SystemClock()
    assert clock.monotonic() <= clock.monotonic() and clock.wall() > 1_700_000_000


def test_a_server_starts_on_a_disk_that_fails_and_knows_what_it_will_hold(tmp_path, monkeypatch):
    disk = open_disk(tmp_path)
    chain = SampleChain()
    for index in range(3):
        disk.put(chain.name(index), chain.blob(index).view())
    disk.close()

    def fail(descriptor, *_arguments, **_options):
        os.close(descriptor)
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr("tiered_kv.tiers.disk.tier.write_file", fail)
    config = Config(storage_uri=f"file://{tmp_path}", host_bytes=1 << 24, disk_bytes=1 << 28)
    engine, _ = build_engine(config, Recorder())
    try:
        engine.step()
        breaker = engine.guards.breaker(1)
        assert breaker is not None and breaker.is_open and "errno=EIO" in breaker.reason
        assert engine.tiering.tier_usage(1).chunks == 3 and engine.tiering.index.readable == [True, False]
    finally:
        engine.close()


def test_a_tier_that_may_not_delete_gets_one_blob_and_no_more():
    """A policy without the right to delete fails every trial, one in half a minute: each would leave 4 MiB."""

    class Strict(MemoryTier):
        may_delete = False

        def delete(self, name):
            if not self.may_delete:
                raise TierUnavailable("AccessDenied")
            return super().delete(name)

    memory = Strict()
    left = None
    for _ in range(3):
        result = self_test(memory, SystemClock(), left)
        left = result.left
        assert result.failure == "AccessDenied"
        assert memory.names == [left]
    memory.may_delete = True
    assert self_test(memory, SystemClock(), left).failure is None
    assert memory.names == []
