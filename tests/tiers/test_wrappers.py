"""Verification and metering around a real disk tier."""

import pytest

from tests.kit.storage.disk_probe import blob_path, open_disk
from tiered_kv.errors import CapacityExceeded, ChunkCorrupt, ChunkMismatch, Closed, TierUnavailable
from tiered_kv.testing.blobs import SampleChain
from tiered_kv.testing.faults import Fault, FaultyTier, at
from tiered_kv.testing.memory import MemoryTier
from tiered_kv.tiers.base import Tier, TierWrapper
from tiered_kv.tiers.wrappers.metered import MeteredTier
from tiered_kv.tiers.wrappers.verified import VerifiedTier

CHAIN = SampleChain()
FORMATS = {CHAIN.namespace: CHAIN.form}


@pytest.fixture
def disk(tmp_path):
    tier = open_disk(tmp_path)
    yield tier
    tier.close()


def read(tier, name):
    buffer = bytearray(CHAIN.form.blob_bytes)
    return bytes(buffer) if tier.get_into(name, memoryview(buffer)) else None


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


# -- verified ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", [0, 60, 200, 400, 4095, 4096, -1])
def test_a_flipped_bit_on_the_medium_is_never_served(disk, tmp_path, position):
    tier = VerifiedTier(disk, FORMATS.get)
    blob = CHAIN.blob(0)
    tier.put(blob.name, blob.view())
    flip(blob_path(tmp_path, blob.name), position)
    with pytest.raises(ChunkCorrupt):
        read(tier, blob.name)


def test_a_bit_flipped_on_the_way_is_healed_by_reading_again(disk):
    blob = CHAIN.blob(0)
    faulty = FaultyTier(disk, at({1: Fault.BIT_FLIP}))
    tier = VerifiedTier(faulty, FORMATS.get)
    tier.put(blob.name, blob.view())
    assert read(tier, blob.name) == blob.data
    assert faulty.operation_count == 3


def test_a_blob_is_read_at_most_twice(disk, tmp_path):
    blob = CHAIN.blob(0)
    faulty = FaultyTier(disk, at({}))
    tier = VerifiedTier(faulty, FORMATS.get)
    tier.put(blob.name, blob.view())
    flip(blob_path(tmp_path, blob.name), 5000)
    with pytest.raises(ChunkCorrupt):
        read(tier, blob.name)
    assert faulty.operation_count == 3


def test_swapped_files_are_never_served_for_each_other(disk, tmp_path):
    tier = VerifiedTier(disk, FORMATS.get)
    first, second = CHAIN.blob(0), CHAIN.blob(1)
    for blob in (first, second):
        tier.put(blob.name, blob.view())
    blob_path(tmp_path, first.name).write_bytes(second.data)
    blob_path(tmp_path, second.name).write_bytes(first.data)
    for blob in (first, second):
        with pytest.raises(ChunkCorrupt, match="key mismatch"):
            read(tier, blob.name)


def test_a_blob_of_another_namespace_is_a_mismatch(disk, tmp_path):
    tier = VerifiedTier(disk, FORMATS.get)
    ours, theirs = CHAIN.blob(0), SampleChain(seed=1).blob(0)
    tier.put(ours.name, ours.view())
    blob_path(tmp_path, ours.name).write_bytes(theirs.data)
    with pytest.raises(ChunkMismatch):
        read(tier, ours.name)
    assert blob_path(tmp_path, ours.name).read_bytes() == theirs.data


def test_an_unknown_namespace_cannot_be_verified_so_it_is_not_read(disk):
    other = SampleChain(seed=1).blob(0)
    tier = VerifiedTier(disk, FORMATS.get)
    tier.put(other.name, other.view())
    with pytest.raises(ChunkMismatch, match="no format is known"):
        read(tier, other.name)


def test_a_blob_under_another_name_is_not_stored(disk):
    tier = VerifiedTier(disk, FORMATS.get)
    with pytest.raises(ChunkCorrupt, match="not what its name says"):
        tier.put(CHAIN.name(1), CHAIN.blob(0).view())
    with pytest.raises(ChunkCorrupt):
        tier.put(CHAIN.name(1), memoryview(bytes(CHAIN.form.blob_bytes)))
    assert disk.usage().blob_count == 0


def test_wrappers_forward_recency_and_records(tmp_path):
    disk = open_disk(tmp_path)
    tier = MeteredTier(VerifiedTier(disk, FORMATS.get), lambda *call: None, lambda: 0.0)
    for index in range(3):
        tier.put(CHAIN.name(index), CHAIN.blob(index).view())
    tier.record_use([CHAIN.name(0)])
    tier.describe(CHAIN.namespace, b"{}")
    tier.flush()
    assert [info.record.chunk_index for info in disk.scan()] == [1, 2, 0]
    assert (tmp_path / "blobs" / CHAIN.namespace.hex() / "namespace.json").exists()
    tier.close()
    with pytest.raises(Closed):
        disk.usage()


# -- metered ----------------------------------------------------------------------------------------------------------


def test_every_call_is_reported_once_with_its_outcome(disk, tmp_path):
    calls = []
    ticks = iter(range(1000))
    size = CHAIN.form.blob_bytes
    faults = {6: Fault.ERROR, 7: Fault.FULL}
    inner = FaultyTier(VerifiedTier(disk, FORMATS.get), at(faults))
    tier = MeteredTier(inner, lambda *call: calls.append(call), lambda: float(next(ticks)))
    blob = CHAIN.blob(0)
    tier.put(blob.name, blob.view())
    read(tier, blob.name)
    read(tier, CHAIN.name(1))
    tier.contains(blob.name)
    flip(blob_path(tmp_path, blob.name), -1)
    with pytest.raises(ChunkCorrupt):
        read(tier, blob.name)
    tier.delete(blob.name)
    with pytest.raises(TierUnavailable):
        tier.contains(blob.name)
    with pytest.raises(CapacityExceeded):
        tier.put(blob.name, blob.view())
    list(tier.scan())
    tier.close()
    with pytest.raises(Closed):
        tier.flush()
    assert calls == [
        ("put", 1.0, size, "ok"),
        ("get", 1.0, size, "ok"),
        ("get", 1.0, 0, "missing"),
        ("contains", 1.0, 0, "ok"),
        ("get", 1.0, 0, "corrupt"),
        ("delete", 1.0, 0, "ok"),
        ("contains", 1.0, 0, "unavailable"),
        ("put", 1.0, 0, "no_room"),
        ("scan", 1.0, 0, "ok"),
        ("flush", 1.0, 0, "closed"),
    ]


def test_an_interrupt_is_not_reported_as_success(disk):
    calls = []

    def interrupt(operation, name):
        raise KeyboardInterrupt

    tier = MeteredTier(FaultyTier(disk, at({}), interrupt), lambda *call: calls.append(call), lambda: 0.0)
    with pytest.raises(KeyboardInterrupt):
        tier.contains(CHAIN.name(0))
    assert calls == [("contains", 0.0, 0, "error")]


def test_a_put_that_waits_for_another_is_timed_without_that_and_may_be_dropped(disk):
    calls, now = [], [0.0]
    tier = MeteredTier(disk, lambda *call: calls.append(call), lambda: now[0])
    blob = CHAIN.blob(0)

    def waits(*, is_wanted):
        now[0] += 7.0
        return is_wanted

    assert not tier.put_if(blob.name, blob.view(), lambda: waits(is_wanted=False))
    assert not tier.contains(blob.name)
    assert tier.put_if(blob.name, blob.view(), lambda: waits(is_wanted=True))
    assert tier.contains(blob.name)
    assert [call for call in calls if call[0] == "put"] == [
        ("put", 0.0, 0, "not_wanted"),
        ("put", 0.0, len(blob.data), "ok"),
    ]


def test_a_wrapper_that_changes_nothing_is_the_tier_inside():
    """Every method but those that end in another, so that a new one of ``Tier`` cannot be forgotten."""
    public = {name for name, what in vars(Tier).items() if callable(what) and not name.startswith("_")}
    assert public - vars(TierWrapper).keys() == {"get_into_by_pieces", "put_if"}
    inner, blob = MemoryTier(1 << 20), SampleChain().blob(0)
    outer = TierWrapper(inner)
    outer.put(blob.name, blob.view())
    outer.describe(blob.name.namespace, b"{}")
    buffer = bytearray(len(blob.data))
    assert outer.get_into_by_pieces(blob.name, memoryview(buffer), lambda _: None) and bytes(buffer) == blob.data
    assert (
        outer.contains(blob.name)
        and outer.count_held([blob.name]) == 1
        and [info.name for info in outer.scan()] == [blob.name]
    )
    assert outer.usage() == inner.usage() and inner.descriptions and outer.traits is inner.traits
    assert outer.delete(blob.name) and not inner.names
    outer.close()
    with pytest.raises(Closed):
        inner.contains(blob.name)
