"""The memory tier takes the contract suite like any other tier."""

import pytest

from tests.kit.storage.wrapped_tiers import WRAPPINGS
from tiered_kv.errors import ChunkMismatch
from tiered_kv.testing.blobs import SampleChain
from tiered_kv.testing.contract import CONTRACT_BLOBS, TierContract
from tiered_kv.testing.memory import MemoryTier


class TestMemoryTier(TierContract):
    @pytest.fixture(autouse=True, params=WRAPPINGS)
    def wrapping(self, request):
        self.wrap = WRAPPINGS[request.param]

    def make_tier(self, tmp_path):
        self.tier = MemoryTier(2 * CONTRACT_BLOBS * self.chain.form.blob_bytes)
        return self.wrap(self.tier)

    def raw_put(self, tmp_path, name, data):
        self.tier.raw_put(name, data)

    def raw_get(self, tmp_path, name):
        return self.tier.raw_get(name)


def test_a_sound_blob_of_another_namespace_is_foreign_whatever_its_size():
    tier, ours, theirs = MemoryTier(), SampleChain(1), SampleChain(2, payload_bytes=16384)
    tier.raw_put(ours.name(0), theirs.blob(0).data)
    with pytest.raises(ChunkMismatch):
        tier.get_into(ours.name(0), memoryview(bytearray(ours.form.blob_bytes)))


def test_scan_yields_the_least_recently_used_first_and_leaves_out_what_is_no_blob():
    tier, chain = MemoryTier(), SampleChain()
    for index in range(3):
        tier.put(chain.name(index), chain.blob(index).view())
    tier.raw_put(chain.name(1), b"nonsense")
    tier.record_use([chain.name(0)])
    assert [info.record.chunk_index for info in tier.scan()] == [2, 0]


def test_a_reopened_tier_has_its_blobs_and_its_new_capacity():
    tier, chain = MemoryTier(), SampleChain()
    tier.put(chain.name(0), chain.blob(0).view())
    tier.close()
    tier.reopen(10)
    assert tier.contains(chain.name(0)) and tier.usage().capacity_bytes == 10
