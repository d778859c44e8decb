"""What a server remembers of each chunk it knows of: the figure that sizing and the soak count with."""

import gc
import hashlib
import tracemalloc

from tests.soak.judgement import KNOWN_CHUNK_MIB
from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.tiering.eviction import EvictionOrder
from tiered_kv.tiering.index import BlobState, Index
from tiered_kv.tiering.multi_queue import MultiQueue
from tiered_kv.tiering.quotas import Quotas

CHUNKS = 20_000
PREFIX = 6


def digest(number: int, length: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8)).digest()[:length]


def test_a_known_chunk_takes_about_a_kilobyte():
    """In a tier that remembers its order: 10,000,000 chunks of a bucket would take 10 GB, so they are bounded."""
    index = Index(3)
    order = EvictionOrder(2, index, Quotas(), MultiQueue)
    namespace, parent = digest(0, 16), digest(0, 16)
    tracemalloc.start()
    try:
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for number in range(CHUNKS):
            position = number % PREFIX
            key = digest(1 + number, 16)
            record = ChunkRecord(
                namespace, key, parent if position else namespace, position, digest(1 + CHUNKS + number, 32)
            )
            entry = index.add(record)
            index.set_blob_state(entry, 2, BlobState.PRESENT)
            order.add(entry)
            parent = key
        gc.collect()
        each_bytes = (tracemalloc.get_traced_memory()[0] - before) / CHUNKS
    finally:
        tracemalloc.stop()
    assert 0.8 * KNOWN_CHUNK_MIB <= each_bytes / 2**20 <= 1.05 * KNOWN_CHUNK_MIB
