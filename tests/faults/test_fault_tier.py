"""The fault tier does what its table says; a fault that does not happen proves nothing."""

import threading

import pytest

from tests.kit.storage.disk_probe import blob_path, open_disk
from tiered_kv.errors import CapacityExceeded, TierUnavailable
from tiered_kv.testing.blobs import SampleChain
from tiered_kv.testing.faults import Fault, FaultyTier, at, seeded
from tiered_kv.tiers.disk.pins import changing_pins

CHAIN = SampleChain()
BLOB = CHAIN.blob(0)


@pytest.fixture
def disk(tmp_path):
    tier = open_disk(tmp_path)
    yield tier
    tier.close()


def read(tier):
    buffer = bytearray(len(BLOB.data))
    return bytes(buffer) if tier.get_into(BLOB.name, memoryview(buffer)) else None


def test_error_at_an_operation_has_no_effect(disk):
    tier = FaultyTier(disk, at({0: Fault.ERROR, 2: Fault.ERROR}))
    with pytest.raises(TierUnavailable, match="number=0"):
        tier.put(BLOB.name, BLOB.view())
    assert not disk.contains(BLOB.name)
    tier.put(BLOB.name, BLOB.view())
    with pytest.raises(TierUnavailable):
        tier.delete(BLOB.name)
    assert disk.contains(BLOB.name)


def test_late_error_does_the_work_and_says_it_failed(disk):
    tier = FaultyTier(disk, at({0: Fault.LATE_ERROR}))
    with pytest.raises(TierUnavailable, match="after the fact"):
        tier.put(BLOB.name, BLOB.view())
    assert read(disk) == BLOB.data


def test_full_refuses_the_put(disk):
    tier = FaultyTier(disk, at({0: Fault.FULL}))
    with pytest.raises(CapacityExceeded):
        tier.put(BLOB.name, BLOB.view())
    assert not disk.contains(BLOB.name)


def test_torn_write_keeps_the_size_and_loses_the_tail(disk, tmp_path):
    FaultyTier(disk, at({0: Fault.TORN_WRITE})).put(BLOB.name, BLOB.view())
    half = len(BLOB.data) // 2
    assert blob_path(tmp_path, BLOB.name).read_bytes() == BLOB.data[:half] + bytes(half)


def test_bit_flip_changes_one_bit_of_the_answer_only(disk):
    tier = FaultyTier(disk, at({1: Fault.BIT_FLIP}))
    tier.put(BLOB.name, BLOB.view())
    found = int.from_bytes(read(tier), "big") ^ int.from_bytes(BLOB.data, "big")
    assert found.bit_count() == 1
    assert read(tier) == BLOB.data


def test_vanish_turns_an_answer_into_a_miss(disk):
    tier = FaultyTier(disk, at({1: Fault.VANISH}))
    tier.put(BLOB.name, BLOB.view())
    assert read(tier) is None
    assert not disk.contains(BLOB.name)


def test_the_hook_can_hold_an_operation_up(disk):
    entered, leave = threading.Event(), threading.Event()

    def hold(operation, name):
        assert (operation, name) == ("put", BLOB.name)
        entered.set()
        leave.wait()

    tier = FaultyTier(disk, at({}), hold)
    writer = threading.Thread(target=tier.put, args=(BLOB.name, BLOB.view()))
    writer.start()
    entered.wait()
    assert not disk.contains(BLOB.name)
    leave.set()
    writer.join()
    assert disk.contains(BLOB.name)


def test_a_seeded_plan_repeats_itself_and_another_seed_differs():
    drawn = [[seeded(seed, 0.5)(number) for number in range(64)] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert set(drawn[0]) == {None, *Fault}


def test_pins_of_the_medium_are_told_and_never_fail(disk, tmp_path):
    with changing_pins(tmp_path) as pins:
        pins[BLOB.name] = 0.0
    tier = FaultyTier(disk, lambda _number: None)
    tier.flush()
    assert set(tier.pinned()) == {BLOB.name.key} and tier.figures() == disk.figures()
