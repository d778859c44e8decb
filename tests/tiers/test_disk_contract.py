"""The shipped contract on the disk tier: bare, without O_DIRECT, and under each wrapper."""

import pytest

from tests.kit.storage.wrapped_tiers import WRAPPINGS
from tiered_kv.keys.naming import relative_path
from tiered_kv.testing.contract import TierContract
from tiered_kv.testing.faults import FaultyTier, at
from tiered_kv.tiers.disk.tier import DiskTier


class TestDisk(TierContract):
    direct_io = None

    @pytest.fixture(autouse=True, params=WRAPPINGS)
    def wrapping(self, request):
        self.wrap = WRAPPINGS[request.param]

    def make_disk(self, tmp_path):
        return DiskTier(
            tmp_path / "d", 3 << 20, min_free_bytes=0, metadata_reserve_bytes=1 << 20, direct_io=self.direct_io
        )

    def make_tier(self, tmp_path):
        return self.wrap(self.make_disk(tmp_path))

    def raw_path(self, tmp_path, name):
        return tmp_path / "d" / "blobs" / relative_path(name)

    def raw_put(self, tmp_path, name, data):
        self.raw_path(tmp_path, name).write_bytes(data)

    def raw_get(self, tmp_path, name):
        path = self.raw_path(tmp_path, name)
        return path.read_bytes() if path.exists() else None


class TestBufferedDisk(TestDisk):
    direct_io = False

    @pytest.fixture(autouse=True)
    def wrapping(self):
        self.wrap = WRAPPINGS["bare"]


class TestFaultlessFaultyDisk(TestDisk):
    """The fault tier with an empty plan is a plain tier: a suite under faults tests the faults, not the wrapper."""

    def make_tier(self, tmp_path):
        return self.wrap(FaultyTier(self.make_disk(tmp_path), at({})))
