"""Settings to tiers with their wrappers: the only place where they are stacked.

Owns the choice of the medium by the scheme of ``storage_uri``: the local disk, an object store, a Mooncake pool, or the
factory that an installed package registers as an entry point of the group ``tiered_kv.tiers`` (docs/extending.md).

::

    MeteredTier( GuardedTier( VerifiedTier( medium )))
                              \\__ trials of the breaker go in here
    PeersFirst( MeteredTier( peers ), the stack above around a bucket )
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tiered_kv.chunks.header import BlobFormat
from tiered_kv.config import Config, is_peer_address
from tiered_kv.errors import ConfigError
from tiered_kv.fleet.keeper import BucketKeeper, KeeperConfig
from tiered_kv.fleet.timing import Timing
from tiered_kv.location import Location, registered_medium
from tiered_kv.metrics.recorder import Recorder
from tiered_kv.tiers.base import Tier
from tiered_kv.tiers.disk.tier import DiskTier
from tiered_kv.tiers.mooncake.client import MooncakeClient
from tiered_kv.tiers.mooncake.tier import MooncakeTier
from tiered_kv.tiers.object.store import ObjectStore
from tiered_kv.tiers.object.tier import ObjectTier
from tiered_kv.tiers.wrappers.breaker import Breaker, GuardedTier
from tiered_kv.tiers.wrappers.metered import MeteredTier
from tiered_kv.tiers.wrappers.verified import VerifiedTier

if TYPE_CHECKING:
    from tiered_kv.tiers.peers.tier import PeersTier

TierFactory = Callable[[Location, Config], Tier]
"""What a package registers for its scheme; called once for each server."""

Formats = Callable[[bytes], BlobFormat | None]
Monotonic = Callable[[], float]


@dataclass(frozen=True, slots=True)
class OpenTier:
    """A tier with all its wrappers.

    Attributes:
        trial: The same medium past its breaker.
        store: The client of an object store; None for other media.
    """

    tier: Tier
    trial: Tier
    breaker: Breaker
    store: ObjectStore | None = None


def open_tiers(config: Config, formats: Formats, recorder: Recorder, monotonic: Monotonic) -> list[OpenTier]:
    """The tiers below host memory, highest first, as the engine uses them.

    Raises:
        ConfigError: A setting does not fit the machine or the store.
        DirectoryLocked: Another server owns the directory.
        TierUnavailable: The directory cannot be used.
    """
    tiers: list[OpenTier] = []
    with ExitStack() as undo:  # in a library's process, a failed start must not leave the directory locked
        root = config.disk_root()
        if root is not None:
            capacity_bytes = config.disk_bytes or config.resolved_disk_bytes(existing_bytes=_allocated_bytes(root))
            disk = DiskTier(root, capacity_bytes, min_free_bytes=config.min_free_bytes)
            undo.callback(disk.close)
            disk.remove_ended_namespaces()
            tiers.append(wrapped(disk, formats, recorder, monotonic))
        if config.location().kind == "object":
            bucket = _object_tier(config, formats, recorder, monotonic)
            undo.callback(bucket.tier.close)
            if config.peer_listen is not None:
                bucket = _with_door(config, bucket, monotonic)
            if config.peers is not None:
                bucket = _peers_first(config, formats, recorder, monotonic, bucket)
            tiers.append(bucket)
        elif config.peers is not None:
            tiers.append(_peers_tier(config, formats, recorder, monotonic))
        elif config.location().kind == "pool":
            tiers.append(wrapped(open_pool(config), formats, recorder, monotonic))
        elif config.location().kind == "extension":
            tiers.append(wrapped(extension_tier(config), formats, recorder, monotonic))
        undo.pop_all()
    return tiers


def _object_tier(config: Config, formats: Formats, recorder: Recorder, monotonic: Monotonic) -> OpenTier:
    store = ObjectStore(
        config.location(), timeout_s=config.storage_timeout_s, concurrency=2 * config.storage_concurrency
    )
    try:
        limits = KeeperConfig(
            config.storage_bytes, config.storage_ttl, config.single_writer, config.evict_other_namespaces
        )
        keeper = BucketKeeper(store, limits, Timing.for_timeout(config.storage_timeout_s))
        tier = ObjectTier(store, keeper=keeper, io_concurrency=config.storage_concurrency)
    except BaseException:
        store.close()
        raise
    return wrapped(tier, formats, recorder, monotonic, store)


def _peers_tier(config: Config, formats: Formats, recorder: Recorder, monotonic: Monotonic) -> OpenTier:
    """The tier of other machines. It verifies by itself, peer by peer.

    Raises:
        ConfigError: The key cannot be used, or a package is missing.
    """
    tier = _peers(config, formats, monotonic)
    breaker = Breaker(monotonic)
    record = partial(recorder.record, tier.traits.name)
    return OpenTier(MeteredTier(GuardedTier(tier, breaker), record, monotonic), tier, breaker)


def _peers_first(
    config: Config, formats: Formats, recorder: Recorder, monotonic: Monotonic, bucket: OpenTier
) -> OpenTier:
    """The same in front of a bucket, whose breaker and self-test are the tier's; each peer has a breaker of its own.

    Raises:
        ConfigError: The key cannot be used, or a package is missing.
    """
    peers = _peers(config, formats, monotonic, bucket.store)
    from tiered_kv.tiers.peers.first import PeersFirst  # noqa: PLC0415 - of the same extra

    metered = MeteredTier(peers, partial(recorder.record, peers.traits.name), monotonic)
    return dataclasses.replace(bucket, tier=PeersFirst(metered, bucket.tier, peers.is_promised))


def _with_door(config: Config, bucket: OpenTier, monotonic: Monotonic) -> OpenTier:
    """The bucket, in which other machines find this one's door.

    Raises:
        ConfigError: They would not find it.
    """
    from tiered_kv.tiers.peers.found import DoorRecord, door_url  # noqa: PLC0415 - who has no door needs none of it

    assert bucket.store is not None and config.peer_listen is not None
    url = door_url(config.peer_listen, config.peer_url)
    if not is_peer_address(url().removeprefix("https://")):
        raise ConfigError(
            f"other machines cannot find peer_listen at {url()}: give it a port of its own, or set peer_url"
        )
    return dataclasses.replace(bucket, tier=DoorRecord(bucket.tier, bucket.store, url, monotonic))


def _peers(config: Config, formats: Formats, monotonic: Monotonic, store: ObjectStore | None = None) -> "PeersTier":
    assert config.peers is not None and config.peer_key_file is not None, "settings were checked"
    try:
        from tiered_kv.tiers.peers.fleet_key import FleetKey  # noqa: PLC0415 - its packages are an extra
        from tiered_kv.tiers.peers.found import PeerFinder, own_urls  # noqa: PLC0415
        from tiered_kv.tiers.peers.peer import Peer  # noqa: PLC0415
        from tiered_kv.tiers.peers.tier import PeersTier  # noqa: PLC0415
    except ImportError as exc:
        raise ConfigError(f"peers needs more packages: pip install cryptography h11 ({exc})") from exc
    key = FleetKey.read(config.peer_key_file)
    context = key.client_context()
    return PeersTier(
        PeerFinder(config.peers, store, partial(own_urls, config.peer_listen, config.peer_url)),
        lambda url: Peer(url, key, context, monotonic),
        formats,
        timeout_s=config.peer_timeout_s,
        io_concurrency=config.storage_concurrency,
        monotonic=monotonic,
        is_alone=store is None,
    )


def open_pool(config: Config) -> MooncakeTier:
    """The tier of a Mooncake pool; nothing is started yet.

    Raises:
        ConfigError: The package is not installed.
    """
    location = config.location()
    client = MooncakeClient(location, timeout_s=config.storage_timeout_s, concurrency=config.storage_concurrency)
    return MooncakeTier(client, prefix=location.path.partition("/")[2])


def extension_tier(config: Config) -> Tier:
    """A tier of a medium that an installed package registers.

    Raises:
        ConfigError: Its factory cannot be imported, or gives no tier.
    """
    location = config.location()
    entry = registered_medium(location.scheme)
    assert entry is not None, "the location was parsed by it"
    try:
        factory: TierFactory = entry.load()
    except (ImportError, AttributeError) as exc:
        raise ConfigError(f"the medium of {location.scheme}:// cannot be imported ({entry.value}): {exc}") from exc
    tier = factory(location, config)
    if not isinstance(tier, Tier):
        raise ConfigError(f"the medium of {location.scheme}:// gives no Tier ({entry.value}): {type(tier).__name__}")
    return tier


def wrapped(
    medium: Tier, formats: Formats, recorder: Recorder, monotonic: Monotonic, store: ObjectStore | None = None
) -> OpenTier:
    """A medium in all its wrappers."""
    breaker = Breaker(monotonic)
    verified = VerifiedTier(medium, formats)
    record = partial(recorder.record, medium.traits.name)
    return OpenTier(MeteredTier(GuardedTier(verified, breaker), record, monotonic), verified, breaker, store)


def _allocated_bytes(root: Path) -> int:
    """What the directory holds already: a default capacity counts it as free, or every restart would shrink it."""
    total = 0
    for directory, _, names in os.walk(root):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # another server may own the directory and evict right now
                total += os.lstat(os.path.join(directory, name)).st_blocks * 512
    return total
