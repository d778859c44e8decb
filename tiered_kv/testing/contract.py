"""The suite every tier has to pass: subclass ``TierContract``, say how to make one, and pytest does the rest.

Owns the tests only. Works on real sealed blobs of one size (``testing/blobs.py``), so that tiers made of fixed slots
and verifying wrappers can take it too. Used by this package's tests and by authors of other tiers::

    class TestMyTier(TierContract):
        def make_tier(self, tmp_path): ...
        def raw_put(self, tmp_path, name, data): ...
        def raw_get(self, tmp_path, name): ...
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tiered_kv.errors import CapacityExceeded, ChunkCorrupt, Closed
from tiered_kv.testing.blobs import SampleBlob, SampleChain
from tiered_kv.tiers.base import BlobName, Tier

CONTRACT_BLOBS = 64
"""Blobs of ``SampleChain()`` that a tier of ``make_tier`` must have room for."""

Work = Callable[[Tier, SampleBlob, set[bytes | None]], None]
"""What one thread of a test does: with the tier and its blob; it adds what it read to the set."""


class TierContract:
    """Facts that hold for every tier."""

    chain = SampleChain()

    def make_tier(self, tmp_path: Path) -> Tier:
        """Open an empty tier with room for ``CONTRACT_BLOBS`` blobs and not much more than a thousand."""
        raise NotImplementedError

    def raw_put(self, tmp_path: Path, name: BlobName, data: bytes) -> None:
        """Replace a stored blob's bytes behind the back of the tier that ``make_tier`` opened last."""
        raise NotImplementedError

    def raw_get(self, tmp_path: Path, name: BlobName) -> bytes | None:
        """Read a blob behind the tier's back; None when the medium has none of that name."""
        raise NotImplementedError

    def read(self, tier: Tier, name: BlobName) -> bytes | None:
        """Get a blob as bytes; None when it is not there."""
        buffer = bytearray(self.chain.form.blob_bytes)
        return bytes(buffer) if tier.get_into(name, memoryview(buffer)) else None

    @contextlib.contextmanager
    def opened(self, tmp_path: Path) -> Iterator[Tier]:
        """A tier that is closed at the end of the test."""
        tier = self.make_tier(tmp_path)
        try:
            yield tier
        finally:
            tier.close()

    def fill(self, tier: Tier, count: int) -> list[SampleBlob]:
        """Store the first chunks of the chain."""
        blobs = [self.chain.blob(index) for index in range(count)]
        for blob in blobs:
            tier.put(blob.name, blob.view())
        return blobs

    # -- one blob -----------------------------------------------------------------------------------------------------

    def test_get_returns_the_bytes_that_were_put(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            [blob] = self.fill(tier, 1)
            assert self.read(tier, blob.name) == blob.data
            assert self.raw_get(tmp_path, blob.name) == blob.data

    def test_get_of_a_name_never_put_is_a_miss(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            self.fill(tier, 1)
            assert self.read(tier, self.chain.name(7)) is None
            assert not tier.contains(self.chain.name(7))

    def test_put_again_replaces_or_keeps_the_bytes_and_counts_once(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            [blob] = self.fill(tier, 1)
            before = tier.usage()
            newer = self.chain.blob(0, version=1)
            tier.put(newer.name, newer.view())
            assert newer.name == blob.name and newer.data != blob.data
            kept = blob if tier.traits.keeps_first else newer
            assert self.read(tier, newer.name) == kept.data
            assert tier.usage() == before

    def test_delete_removes_the_blob_and_gives_its_bytes_back(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            empty = tier.usage()
            [blob] = self.fill(tier, 1)
            assert tier.delete(blob.name)
            assert self.read(tier, blob.name) is None
            assert not tier.contains(blob.name)
            assert self.raw_get(tmp_path, blob.name) is None
            assert tier.usage() == empty

    def test_delete_of_a_missing_blob_answers_false(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            [blob] = self.fill(tier, 1)
            assert not tier.delete(self.chain.name(5))
            assert tier.delete(blob.name)
            assert not tier.delete(blob.name)

    def test_contains_follows_put_and_delete(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            name = self.chain.name(0)
            assert not tier.contains(name)
            self.fill(tier, 1)
            assert tier.contains(name)
            tier.delete(name)
            assert not tier.contains(name)

    def test_a_count_ends_at_the_first_blob_that_is_not_there(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            names = [self.chain.name(index) for index in range(4)]
            assert tier.count_held(names) == 0
            self.fill(tier, 3)
            assert [tier.count_held(names), tier.count_held(names, "nowhere"), tier.count_held(names[3:])] == [3, 3, 0]
            tier.delete(names[1])
            assert tier.count_held(names) == 1

    def test_names_are_kept_apart_by_namespace(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            [blob] = self.fill(tier, 1)
            twin = BlobName(bytes(16), blob.name.key, blob.name.parent, blob.name.chunk_index)
            assert not tier.contains(twin)
            assert not tier.delete(twin)
            assert self.read(tier, blob.name) == blob.data

    def test_put_leaves_the_callers_buffer_alone(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            blob = self.chain.blob(0)
            buffer = bytearray(blob.data)
            tier.put(blob.name, memoryview(buffer))
            assert buffer == blob.data
            buffer[-1] ^= 1  # the slot is reused right after: the tier must not have kept a reference
            assert self.read(tier, blob.name) == blob.data

    def test_a_put_asks_once_and_before_anybody_can_see_the_blob(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            blob, empty = self.chain.blob(0), tier.usage()
            asked: list[bool] = []

            def is_wanted() -> bool:
                asked.append(tier.contains(blob.name))
                return len(asked) > 1

            assert not tier.put_if(blob.name, blob.view(), is_wanted)
            assert not tier.contains(blob.name) and tier.usage() == empty
            assert tier.put_if(blob.name, blob.view(), is_wanted)
            assert self.read(tier, blob.name) == blob.data
            assert asked == [False, False]

    # -- damage -------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("size", ["empty", "cut", "longer"])
    def test_get_of_a_blob_of_the_wrong_size_says_corrupt(self, tmp_path: Path, size: str) -> None:
        with self.opened(tmp_path) as tier:
            [blob] = self.fill(tier, 1)
            wrong = {"empty": b"", "cut": blob.data[:-4096], "longer": blob.data + bytes(4096)}[size]
            self.raw_put(tmp_path, blob.name, wrong)
            with pytest.raises(ChunkCorrupt):
                self.read(tier, blob.name)

    def test_a_corrupt_blob_can_be_deleted_and_put_again(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            [blob] = self.fill(tier, 1)
            before = tier.usage()
            self.raw_put(tmp_path, blob.name, blob.data[:100])
            assert tier.delete(blob.name)
            tier.put(blob.name, blob.view())
            assert self.read(tier, blob.name) == blob.data
            if not tier.traits.is_shared:  # whoever shares a medium does not know what was changed behind its back
                assert tier.usage() == before

    # -- many blobs ---------------------------------------------------------------------------------------------------

    def test_scan_yields_every_blob_with_its_ancestry(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            blobs = self.fill(tier, 9)
            tier.delete(blobs[4].name)
            del blobs[4]
            found = {info.name: info for info in tier.scan()}
            assert set(found) == {blob.name for blob in blobs}
            for blob in blobs:
                record = found[blob.name].record
                assert record == blob.record
                assert (record.tag, record.stored_by) == (blob.record.tag, blob.record.stored_by)

    def test_usage_is_the_sum_of_the_scanned_sizes(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            assert (tier.usage().used_bytes, tier.usage().blob_count) == (0, 0)
            blobs = self.fill(tier, 7)
            tier.delete(blobs[2].name)
            usage = tier.usage()
            sizes = [info.size_bytes for info in tier.scan()]
            assert (usage.used_bytes, usage.blob_count) == (sum(sizes), 6)
            assert min(sizes) > 0

    def test_recency_and_flush_and_describe_change_no_blob(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            blobs = self.fill(tier, 3)
            before = tier.usage()
            tier.record_use([blobs[0].name, self.chain.name(50)])
            tier.describe(self.chain.namespace, b'{"format":1}')
            tier.flush()
            assert tier.usage() == before
            assert [self.read(tier, blob.name) for blob in blobs] == [blob.data for blob in blobs]

    def test_puts_beyond_the_capacity_are_refused_and_store_nothing(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            capacity = tier.usage().capacity_bytes
            if capacity is None:
                pytest.skip("this tier has no limit")
            stored, refused = self._fill_up(tier, capacity)
            assert not tier.contains(refused)
            assert tier.usage().used_bytes <= capacity
            assert tier.delete(self.chain.name(0))
            last = self.chain.blob(stored)
            tier.put(last.name, last.view())
            assert self.read(tier, last.name) == last.data

    def _fill_up(self, tier: Tier, capacity_bytes: int) -> tuple[int, BlobName]:
        most = capacity_bytes // self.chain.form.blob_bytes + 1
        for index in range(most):
            blob = self.chain.blob(index)
            try:
                tier.put(blob.name, blob.view())
            except CapacityExceeded:
                return index, blob.name
        raise AssertionError(f"took {most} blobs into {capacity_bytes} bytes")

    # -- threads and the end ------------------------------------------------------------------------------------------

    def test_threads_on_one_name_see_one_whole_blob(self, tmp_path: Path) -> None:
        versions = [self.chain.blob(0, version=version) for version in range(4)]
        allowed = {None} | {blob.data for blob in versions}
        name = versions[0].name

        def work(tier: Tier, blob: SampleBlob, seen: set[bytes | None]) -> None:
            for turn in range(12):
                tier.put(name, blob.view())
                seen.add(self.read(tier, name))
                if turn % 4 == 3:
                    tier.delete(name)

        with self.opened(tmp_path) as tier:
            seen = self._in_threads(tier, versions, work)
            tier.put(name, versions[0].view())
            assert seen <= allowed
            sizes = [info.size_bytes for info in tier.scan()]
            assert len(sizes) == 1
            if not tier.traits.is_shared:  # of two that delete at once, neither knows that it came second
                assert (tier.usage().used_bytes, tier.usage().blob_count) == (sizes[0], 1)
            tier.delete(name)
            assert not tier.contains(name)
            if tier.traits.is_shared:
                return
            assert (tier.usage().used_bytes, tier.usage().blob_count) == (0, 0)

    def test_threads_on_different_names_do_not_disturb_each_other(self, tmp_path: Path) -> None:
        blobs = [self.chain.blob(index) for index in range(32)]

        def work(tier: Tier, first: SampleBlob, seen: set[bytes | None]) -> None:
            for blob in blobs[first.record.chunk_index :: 4]:
                tier.put(blob.name, blob.view())
                seen.add(self.read(tier, blob.name))

        with self.opened(tmp_path) as tier:
            assert self._in_threads(tier, blobs[:4], work) == {blob.data for blob in blobs}
            assert tier.usage().blob_count == 32

    def _in_threads(self, tier: Tier, blobs: list[SampleBlob], work: Work) -> set[bytes | None]:
        seen: list[set[bytes | None]] = [set() for _ in blobs]
        errors: list[Exception] = []

        def run(number: int) -> None:
            try:
                work(tier, blobs[number], seen[number])
            except Exception as exc:  # noqa: BLE001  # told to the test's own thread below
                errors.append(exc)

        threads = [threading.Thread(target=run, args=(number,)) for number in range(len(blobs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors
        return set[bytes | None]().union(*seen)

    def test_a_closed_tier_refuses_calls_and_closes_again(self, tmp_path: Path) -> None:
        tier = self.make_tier(tmp_path)
        [blob] = self.fill(tier, 1)
        tier.close()
        tier.close()
        with pytest.raises(Closed):
            tier.put(blob.name, blob.view())
        with pytest.raises(Closed):
            self.read(tier, blob.name)
        with pytest.raises(Closed):
            tier.contains(blob.name)
        with pytest.raises(Closed):
            tier.delete(blob.name)
        with pytest.raises(Closed):
            tier.scan()
