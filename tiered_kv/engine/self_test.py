"""The start-up self-test of a tier: write, read back, verify, delete one blob, and time it.

A tier whose every write fails must be seen at start and not after a day without hits. The time of the read is the first
sample of the tier's throughput, so that the first request after a restart can judge whether waiting pays. A tier that
has no room for the blob is asked to read it, which must find nothing: what it holds can still be read. A read, because
S3 says only to a GET what is wrong (no such bucket, a wrong secret); the answer to a HEAD has no body.
"""

import mmap
import os
from dataclasses import dataclass

from tiered_kv.chunks.geometry import ChunkGeometry, LayerPage
from tiered_kv.chunks.header import BlobFormat
from tiered_kv.engine.clock import Clock
from tiered_kv.errors import CapacityExceeded, ChunkCorrupt, ChunkMismatch, TierUnavailable
from tiered_kv.keys.chunk_record import PREFIX_DIGEST_BYTES, ChunkRecord
from tiered_kv.keys.namespace import SELF_TEST_NAMESPACE
from tiered_kv.tiers.base import BlobName, Tier

TEST_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class SelfTest:
    """How the self-test of a tier ended; ``failure`` is None when it passed.

    Attributes:
        size_bytes: What was written and read; 0 when there was no room.
        left: The blob that could not be deleted.
    """

    size_bytes: int
    write_s: float
    read_s: float
    failure: str | None
    left: BlobName | None = None


def self_test_format() -> BlobFormat:
    """The format of the test blob."""
    page = LayerPage("self-test", "U8", (1, 1, TEST_BYTES), "HNC")
    return BlobFormat(SELF_TEST_NAMESPACE, ChunkGeometry(1, 1, ((page,),)))


def self_test(tier: Tier, clock: Clock, left: BlobName | None = None) -> SelfTest:
    """Test a tier. Never raises for what the tier does; removes what it wrote.

    Args:
        left: By the test before. It goes first, or nothing more is written: where a policy forbids to delete, a test
            every half minute would fill the store.
    """
    if left is not None:
        try:
            tier.delete(left)
        except TierUnavailable as exc:
            return SelfTest(0, 0.0, 0.0, str(exc), left)
    blob_format = self_test_format()
    key = os.urandom(16)
    record = ChunkRecord(SELF_TEST_NAMESPACE, key, SELF_TEST_NAMESPACE, 0, bytes(PREFIX_DIGEST_BYTES))
    name = BlobName.of(record)
    size = blob_format.blob_bytes
    with mmap.mmap(-1, size) as wrote, mmap.mmap(-1, size) as read:  # page-aligned, as slots are
        blob, back = memoryview(wrote), memoryview(read)
        try:
            blob[blob_format.header_bytes : blob_format.header_bytes + TEST_BYTES] = os.urandom(TEST_BYTES)
            blob_format.seal(blob, record, clock.wall())
            return _round_trip(tier, clock, name, blob, back)
        finally:
            blob.release()
            back.release()


def _round_trip(tier: Tier, clock: Clock, name: BlobName, blob: memoryview, back: memoryview) -> SelfTest:
    start_s = clock.monotonic()
    written_s = read_s = start_s
    failure: str | None = None
    left: BlobName | None = None
    try:
        try:
            tier.put(name, blob)
        except CapacityExceeded:
            failure = "what was never written is there" if tier.get_into(name, back) else None
            return SelfTest(0, 0.0, 0.0, failure)
        written_s = clock.monotonic()
        if not tier.get_into(name, back):
            failure = "what was written is not there"
        elif blob != back:
            failure = "what was read differs from what was written"
        read_s = clock.monotonic()
    except (ChunkCorrupt, ChunkMismatch, TierUnavailable) as exc:
        failure = str(exc)
    try:
        tier.delete(name)
    except TierUnavailable as exc:
        failure, left = failure or str(exc), name
    return SelfTest(len(blob), written_s - start_s, read_s - written_s, failure, left)
