"""An index as format version 1 wrote it, byte by byte: rows without a tag, a checksum without a seed."""

import struct
from collections.abc import Iterable
from pathlib import Path

import xxhash

from tiered_kv.tiers.disk_index import DiskIndex, IndexRow, Shard

_ROW = struct.Struct("<16s16s32sIQQI")


def packed(rows: Iterable[IndexRow], magic: bytes = b"TKX2") -> bytes:
    """One shard's value."""
    body = b"".join(
        _ROW.pack(r.key, r.parent, r.prefix_sha256, r.chunk_index, r.size_bytes, r.use_seq, r.used_s) for r in rows
    )
    return magic + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little") + body


def write_old_index(root: Path, shards: dict[Shard, list[IndexRow]], magic: bytes = b"TKX2") -> None:
    """What a server of an older version left in a directory; of another magic, what one to come may leave."""
    with DiskIndex(root)._open() as cache:
        for shard, rows in shards.items():
            cache.set(str(shard), packed(rows, magic))
