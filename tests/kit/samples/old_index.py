"""An index as older format versions wrote it, byte by byte: version 1 without tags and seed, 2 without who stored."""

import struct
from collections.abc import Iterable
from pathlib import Path

import xxhash

from tiered_kv.tiers.disk.index import DiskIndex, IndexRow, Shard

OLD_MAGICS = {1: b"TKX2", 2: b"TKX3"}
"""By format version."""

_ROW_1 = struct.Struct("<16s16s32sIQQI")
_ROW_2 = struct.Struct("<16s16s32sIQ16sQI")


def _place(row: IndexRow) -> tuple[bytes, bytes, bytes, int, int]:
    record = row.record
    return record.key, record.parent, record.prefix_sha256, record.chunk_index, row.size_bytes


def packed(rows: Iterable[IndexRow], magic: bytes = OLD_MAGICS[1]) -> bytes:
    """One shard's value; of a magic that no version had, as version 1 wrote it."""
    if magic == OLD_MAGICS[2]:
        body, seed = b"".join(_ROW_2.pack(*_place(r), r.record.tag, r.use_seq, r.used_s) for r in rows), 3
    else:
        body, seed = b"".join(_ROW_1.pack(*_place(r), r.use_seq, r.used_s) for r in rows), 0
    return magic + xxhash.xxh3_64_intdigest(body, seed=seed).to_bytes(8, "little") + body


def write_old_index(root: Path, shards: dict[Shard, list[IndexRow]], magic: bytes = OLD_MAGICS[1]) -> None:
    """What a server of an older version left in a directory; of another magic, what one to come may leave."""
    with DiskIndex(root)._open() as cache:
        for shard, rows in shards.items():
            cache.set(str(shard), packed(rows, magic))
