"""URI and settings to a tier with its wrappers: the only place where they are stacked."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from tiered_kv.chunks.header import BlobFormat
from tiered_kv.config import Config
from tiered_kv.metrics.recorder import Recorder
from tiered_kv.tiers.base import Tier
from tiered_kv.tiers.disk import DiskTier
from tiered_kv.tiers.wrappers.metered import MeteredTier
from tiered_kv.tiers.wrappers.verified import VerifiedTier


def open_tiers(
    config: Config, formats: Callable[[bytes], BlobFormat | None], recorder: Recorder, monotonic: Callable[[], float]
) -> list[Tier]:
    """The tiers below host memory, highest first, as the engine uses them.

    Raises:
        ConfigError: A setting does not fit the machine.
        DirectoryLocked: Another server owns the directory.
        TierUnavailable: The directory cannot be used.
    """
    root = config.disk_root()
    capacity_bytes = config.disk_bytes or config.resolved_disk_bytes(existing_bytes=_allocated_bytes(root))
    disk = DiskTier(root, capacity_bytes, min_free_bytes=config.min_free_bytes)

    def record(operation: str, seconds: float, size_bytes: int, outcome: str) -> None:
        recorder.record(disk.traits.name, operation, seconds, size_bytes, outcome)

    return [MeteredTier(VerifiedTier(disk, formats), record, monotonic)]


def _allocated_bytes(root: Path) -> int:
    """What the directory holds already: a default capacity counts it as free, or every restart would shrink it."""
    total = 0
    for directory, _, names in os.walk(root):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # another server may own the directory and evict right now
                total += os.lstat(os.path.join(directory, name)).st_blocks * 512
    return total
