"""Look at a disk tier's directory from outside, as an operator's ``du`` and ``ls`` would."""

import mmap
import os
from pathlib import Path

from tiered_kv.keys.naming import SUFFIX, relative_path
from tiered_kv.testing.blobs import SampleBlob, SampleChain
from tiered_kv.tiers.base import BlobName, Tier
from tiered_kv.tiers.disk.tier import DiskTier

RESERVE_BYTES = 1 << 20
CHAIN = SampleChain()


def open_disk(root: Path, limit_bytes: int = 16 << 20, **options: int | bool | None) -> DiskTier:
    """A tier that may hold ``limit_bytes`` of blobs."""
    reserve = RESERVE_BYTES
    return DiskTier(
        root,
        limit_bytes + reserve,
        min_free_bytes=int(options.pop("min_free_bytes", 0) or 0),
        metadata_reserve_bytes=reserve,
        direct_io=options.pop("direct_io", None),  # type: ignore[arg-type]
    )


def fill(tier: Tier, count: int, chain: SampleChain = CHAIN) -> list[SampleBlob]:
    """Put the first blobs of a chain."""
    blobs = [chain.blob(index) for index in range(count)]
    for blob in blobs:
        tier.put(blob.name, blob.view())
    return blobs


def read(tier: Tier, blob: SampleBlob) -> bytes | None:
    """What the tier gives for a blob; None if it has none."""
    buffer = bytearray(len(blob.data))
    return bytes(buffer) if tier.get_into(blob.name, memoryview(buffer)) else None


def slot_of(data: bytes) -> memoryview:
    """The bytes in an aligned, writable buffer as the arena's slots are: what O_DIRECT takes."""
    slot = memoryview(mmap.mmap(-1, len(data)))
    slot[:] = data
    return slot


def blob_path(root: Path, name: BlobName) -> Path:
    return root / "blobs" / relative_path(name)


def blob_files(root: Path) -> list[Path]:
    """Beside a server, too: directories go with their last blob, and a glob ends with an error then."""
    walked = os.walk(root / "blobs")
    return sorted(Path(folder) / name for folder, _, names in walked for name in names if name.endswith(SUFFIX))


def temp_files(root: Path) -> list[Path]:
    return sorted((root / "tmp").iterdir())


def du_bytes(*directories: Path) -> int:
    """Allocated bytes of the files below; a file that is renamed meanwhile counts once."""
    found: dict[int, int] = {}
    for directory in directories:
        for place, _, names in os.walk(directory):
            for name in names:
                if name == "namespace.json":
                    continue  # paid for by the metadata reserve
                try:
                    status = os.lstat(os.path.join(place, name))
                except FileNotFoundError:
                    continue
                found[status.st_ino] = status.st_blocks * 512
    return sum(found.values())
