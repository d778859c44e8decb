"""A storage URI to the tier it names, for an operator."""

from collections.abc import Mapping
from pathlib import Path

from tiered_kv.admin.storage import Storage
from tiered_kv.config import Config


def open_storage(uri: str, settings: Mapping[str, object] | None = None, *, to_change: bool = False) -> Storage:
    """Open exactly the tier a URI names, whatever may stand in front of it.

    Args:
        settings: More of them, as in vLLM's configuration: ``storage_options``, ``storage_timeout_s``, ``disk_bytes``.
        to_change: Something may be written or removed: a directory that is not ours is refused.

    Raises:
        ConfigError: The URI or a setting is wrong, or there is no such directory, or it is somebody else's.
        TierUnavailable: The directory cannot be read.
    """
    config = Config.from_mapping({"storage_uri": uri} | dict(settings or {}))
    location = config.location()
    if location.kind == "disk":
        from tiered_kv.admin.disk_storage import DiskStorage  # noqa: PLC0415 - only the one that is asked for

        storage = DiskStorage(Path(location.path), limit_bytes=config.disk_bytes)
        if to_change:
            from tiered_kv.tiers.disk_marker import require_ours  # noqa: PLC0415 - for changes only

            require_ours(storage.root)
        return storage
    from tiered_kv.admin.object_storage import ObjectStorage  # noqa: PLC0415 - as above

    return ObjectStorage(location, timeout_s=config.storage_timeout_s, concurrency=config.storage_concurrency)
