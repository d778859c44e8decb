"""Open what an operator names: the tier of a storage URI, a directory, a running server.

Each medium and the server's protocol are imported here when they are opened: a verb's help needs none of them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tiered_kv.config import Config
from tiered_kv.errors import ConfigError
from tiered_kv.ops.storage import Storage

if TYPE_CHECKING:
    from tiered_kv.ops.server_link import ServerLink


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
        return open_directory(Path(location.path), limit_bytes=config.disk_bytes, to_change=to_change)
    if location.kind == "pool":
        raise ConfigError(
            f"{location} is a Mooncake pool, and nobody can list what is in one: this works on directories and object "
            "stores only. doctor tests a pool, and stat --server shows what a running server does with it"
        )
    if location.kind == "extension":
        raise ConfigError(f"{location} is another package's medium: this works on directories and object stores only")
    from tiered_kv.ops.object_storage import ObjectStorage  # noqa: PLC0415 - see above

    return ObjectStorage(location, timeout_s=config.storage_timeout_s, concurrency=config.storage_concurrency)


def open_directory(root: Path, *, limit_bytes: int | None = None, to_change: bool = False) -> Storage:
    """Open the disk tier in a directory; arguments and errors as for :func:`open_storage`."""
    from tiered_kv.ops.disk_storage import DiskStorage  # noqa: PLC0415 - see above
    from tiered_kv.tiers.disk.marker import require_ours  # noqa: PLC0415

    storage = DiskStorage(root, limit_bytes=limit_bytes)
    if to_change:
        require_ours(storage.root)
    return storage


def open_server(address: str) -> "ServerLink":
    """Connect to the running server that listens at ``unix:///path``. The caller closes the connection.

    Raises:
        ConfigError: It is no such address.
        TierUnavailable: Nobody answers there.
    """
    from tiered_kv.ops.server_link import ServerLink  # noqa: PLC0415 - see above

    return ServerLink.of_socket(address)
