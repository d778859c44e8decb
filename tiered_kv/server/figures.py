"""The server's figures: what ``stat`` shows, and whether a client expects the limits the server has."""

import os

from tiered_kv.config import Config
from tiered_kv.engine.engine import Engine
from tiered_kv.errors import ConfigError
from tiered_kv.server import messages as m
from tiered_kv.tiers.wrappers.breaker import Breaker


def check_limits(hello: m.Hello, config: Config, disk_bytes: int | None) -> None:
    """Compare the limits a client names with those the server runs with (DESIGN rule 6).

    Raises:
        ConfigError: They differ; the message names both.
    """
    for name, wanted, given, is_default in (
        ("host_bytes", hello.host_bytes, config.resolved_host_bytes(), config.host_bytes is None),
        ("disk_bytes", hello.disk_bytes, disk_bytes, config.disk_bytes is None),
        ("min_free_bytes", hello.min_free_bytes, config.min_free_bytes, False),
    ):
        if wanted is not None and wanted != given:
            default = " (the default)" if is_default else ""
            raise ConfigError(
                f"the server of this directory (pid {os.getpid()}) runs with {name}={given}{default}, this client was "
                f"configured with {name}={wanted}: use one value, or leave it out here"
            )
    storage = config.location().storage
    if hello.storage and hello.storage != storage:
        raise ConfigError(
            f"the server of this directory (pid {os.getpid()}) keeps it in front of {storage}, this client names "
            f"{hello.storage[:500]}: use one storage_uri, or another disk_path"
        )


def engine_figures(engine: Engine) -> dict[str, object]:
    """Capacity, usage and counters of an engine's hierarchy and tiers."""
    tiers = []
    for number, tier in enumerate(engine.tiers):
        usage = tier.usage()
        tiers.append(
            {
                "name": tier.traits.name,
                "used_bytes": usage.used_bytes,
                "capacity_bytes": usage.capacity_bytes,
                "blobs": usage.blob_count,
                "read_bytes_per_s": engine.read_bytes_per_s(number),
                **_breaker_figures(engine.guards.breaker(number)),
                **tier.figures(),
            }
        )
    hierarchy = engine.hierarchy
    return {
        "pending_writes": hierarchy.pending_writes,
        "hierarchy": hierarchy.usage(),
        "counters": dict(hierarchy.counters),
        "tiers": tiers,
    }


def _breaker_figures(breaker: Breaker | None) -> dict[str, object]:
    if breaker is None:
        return {}
    figures: dict[str, object] = {"breaker": breaker.state.value, "breaker_opened": breaker.opened_count}
    return figures | ({"breaker_reason": breaker.reason} if breaker.is_open else {})
