"""The start-up self-test of a tier: write, read back, verify, delete one blob, and time it.

A tier whose every write fails must be seen at start and not after a day without hits. The reads are the first sample of
the tier's throughput, so that the first request after a restart can judge whether waiting pays: one alone says how soon
the first bytes come, some at once, as a load reads, how many come in all; a bucket gives several times what one stream
of it does. A tier that has no room for the blob is asked to read it, which must find nothing: what it holds can still
be read. A read, because S3 says only to a GET what is wrong (no such bucket, a wrong secret); the answer to a HEAD has
no body.
"""

import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from tiered_kv.chunks.geometry import ChunkGeometry, LayerPage
from tiered_kv.chunks.header import BlobFormat
from tiered_kv.engine.clock import Clock
from tiered_kv.errors import CapacityExceeded, ChunkCorrupt, ChunkMismatch, TierUnavailable
from tiered_kv.keys.chunk_record import PREFIX_DIGEST_BYTES, ChunkRecord
from tiered_kv.keys.namespace import SELF_TEST_NAMESPACE
from tiered_kv.tiers.base import BlobName, Tier

TEST_BYTES = 4 << 20
READS_AT_ONCE = 4
"""At most, of one blob: enough to see what a medium gives beyond one stream, and 16 MiB of a bucket's traffic."""


@dataclass(frozen=True, slots=True)
class SelfTest:
    """How the self-test of a tier ended; ``failure`` is None when it passed.

    Attributes:
        size_bytes: What was written, and each read; 0 when there was no room.
        read_s: The read that was alone.
        reads_at_once: How many were made at once after it, as many as the medium profits from.
        together_s: Until all of those were there.
        left: The blob that could not be deleted.
    """

    size_bytes: int
    write_s: float
    read_s: float
    failure: str | None
    left: BlobName | None = None
    reads_at_once: int = 1
    together_s: float = 0.0


def self_test_format() -> BlobFormat:
    """The format of the test blob."""
    page = LayerPage("self-test", "U8", (1, 1, TEST_BYTES), "HNC")
    return BlobFormat(SELF_TEST_NAMESPACE, ChunkGeometry(1, 1, ((page,),)))


SELF_TEST_FORMATS: Final = {SELF_TEST_NAMESPACE: self_test_format()}
"""What a tier's verification must know for its self-test."""


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
    with ExitStack() as at_end:
        # Page-aligned, as slots are.
        maps = [at_end.enter_context(mmap.mmap(-1, size)) for _ in range(1 + _reads_at_once(tier))]
        blob, *back = [at_end.enter_context(memoryview(one)) for one in maps]
        blob[blob_format.header_bytes : blob_format.header_bytes + TEST_BYTES] = os.urandom(TEST_BYTES)
        blob_format.seal(blob, record, clock.wall())
        return _round_trip(tier, clock, name, blob, back)


def _reads_at_once(tier: Tier) -> int:
    return min(READS_AT_ONCE, tier.traits.io_concurrency)


def _round_trip(tier: Tier, clock: Clock, name: BlobName, blob: memoryview, back: Sequence[memoryview]) -> SelfTest:
    start_s = clock.monotonic()
    written_s = read_s = together_s = start_s
    failure: str | None = None
    left: BlobName | None = None
    try:
        try:
            tier.put(name, blob)
        except CapacityExceeded:
            failure = "what was never written is there" if tier.get_into(name, back[0]) else None
            return SelfTest(0, 0.0, 0.0, failure)
        written_s = clock.monotonic()
        failure = _read(tier, name, blob, back[0])
        read_s = clock.monotonic()
        failure = failure or _read_at_once(tier, name, blob, back)
        together_s = clock.monotonic()
    except (ChunkCorrupt, ChunkMismatch, TierUnavailable) as exc:
        failure = str(exc)
    try:
        tier.delete(name)
    except TierUnavailable as exc:
        failure, left = failure or str(exc), name
    return SelfTest(len(blob), written_s - start_s, read_s - written_s, failure, left, len(back), together_s - read_s)


def _read_at_once(tier: Tier, name: BlobName, blob: memoryview, back: Sequence[memoryview]) -> str | None:
    if len(back) == 1:
        return _read(tier, name, blob, back[0])
    try:
        with ThreadPoolExecutor(len(back), "tiered_kv-self-test") as threads:
            wrong = list(threads.map(lambda into: _read(tier, name, blob, into), back))
    except RuntimeError:  # no thread to be had now: the tier is judged all the same, and taken for slower than it is
        wrong = [_read(tier, name, blob, into) for into in back]
    return next(filter(None, wrong), None)


def _read(tier: Tier, name: BlobName, blob: memoryview, into: memoryview) -> str | None:
    """Read the blob; returns what was wrong with it."""
    if not tier.get_into(name, into):
        return "what was written is not there"
    return None if blob == into else "what was read differs from what was written"
