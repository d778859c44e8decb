"""The server's figures: what ``stat`` shows, and whether a client expects the limits the server has.

The figures' types are in ``metrics/figures.py``.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from tiered_kv import __version__
from tiered_kv.config import Config
from tiered_kv.engine.engine import Engine
from tiered_kv.errors import ConfigError
from tiered_kv.hierarchy.served import DECISIONS
from tiered_kv.hierarchy.shares import Share
from tiered_kv.metrics.figures import (
    HOST,
    BucketFigures,
    FlowFigures,
    HitFigures,
    NamespaceFigures,
    OperationFigures,
    ServerFigures,
    SessionFigures,
    TierFigures,
    TokenFigures,
)
from tiered_kv.metrics.recorder import Recorder
from tiered_kv.server import messages as m

NAMESPACES_SHOWN = 1000
"""A directory may hold blobs of many more, and an answer has to fit a frame."""


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


class FigureSource:
    """Collects what a server says of itself.

    Threads: the server's loop only.
    """

    def __init__(self, engine: Engine, recorder: Recorder, config: Config, *, server_id: str, root: Path) -> None:
        self._engine = engine
        self._recorder = recorder
        self._storage = str(config.location())
        self._server_id = server_id
        self._root = root
        self._started_s = engine.clock.monotonic()
        self._started_unix_s = float(engine.clock.wall())

    def now(self, clients: int, sessions: Iterable[SessionFigures]) -> ServerFigures:
        """Everything, as of now. No I/O: about a millisecond."""
        hierarchy = self._engine.hierarchy
        operations = self._recorder.snapshot()
        usage = hierarchy.usage()
        return ServerFigures(
            version=__version__,
            pid=os.getpid(),
            server_id=self._server_id,
            directory=str(self._root),
            storage=self._storage,
            started_unix_s=self._started_unix_s,
            uptime_s=self._engine.clock.monotonic() - self._started_s,
            clients=clients,
            pending_writes=hierarchy.pending_writes,
            tokens=self._tokens(),
            hierarchy=usage,
            counters=dict(hierarchy.counters),
            tiers=[self._tier(number, usage, operations) for number in range(len(self._engine.tiers))],
            flows=self._flows(usage),
            sessions=list(sessions),
            namespaces=self._namespaces(),
            operations=operations,
        )

    def _flows(self, usage: Mapping[str, int]) -> list[FlowFigures]:
        flows = self._engine.hierarchy.index.flows
        names = [(None, HOST), *((number, tier.traits.name) for number, tier in enumerate(self._engine.tiers))]
        return [
            FlowFigures(
                tier=name,
                stored=dict(flows[number].came),
                removed=dict(flows[number].left),
                stored_bytes=flows[number].came_bytes,
                removed_bytes=flows[number].left_bytes,
                resident_chunks=usage["host_ready_chunks" if number is None else f"tier{number}_chunks"],
                resident_bytes=flows[number].size_bytes,
            )
            for number, name in names
        ]

    def _namespaces(self) -> list[NamespaceFigures]:
        hierarchy, shares = self._engine.hierarchy, self._engine.hierarchy.index.shares
        host = hierarchy.taken[None].by_namespace()
        disks = [n for n, tier in enumerate(self._engine.tiers) if not tier.traits.is_shared]
        disk = hierarchy.taken[disks[0]].by_namespace() if disks else {}
        rows = []
        for namespace in {*host, *disk, *shares.namespaces()}:
            share = shares.get(namespace) or Share()
            rows.append(
                NamespaceFigures(
                    namespace=namespace.hex(),
                    host_bytes=host.get(namespace, 0),
                    disk_bytes=disk.get(namespace, 0),
                    min_share=share.at_least,
                    max_share=share.at_most,
                )
            )
        rows.sort(key=lambda row: (row.min_share == 0, row.max_share == 1, -row.host_bytes - row.disk_bytes))
        return rows[:NAMESPACES_SHOWN]

    def _tokens(self) -> TokenFigures:
        served = self._engine.served()
        chunks, tokens = served.chunks, served.tokens
        sources = [(None, HOST), *enumerate(tier.traits.name for tier in self._engine.tiers)]
        return TokenFigures(
            lookups=chunks.lookups,
            prompt_chunks=chunks.prefix,
            prompt_tokens=tokens.prefix,
            asked_chunks=chunks.asked,
            asked_tokens=tokens.asked,
            hit_chunks=chunks.hits.total(),
            hit_tokens=tokens.hits.total(),
            missed_chunks=chunks.asked - chunks.hits.total(),
            missed_tokens=tokens.asked - tokens.hits.total(),
            hits=[HitFigures(tier=name, chunks=chunks.hits[n], tokens=tokens.hits[n]) for n, name in sources],
            decisions={decision: chunks.decisions[decision] for decision in DECISIONS},
        )

    def _tier(self, number: int, hierarchy: Mapping[str, int], operations: Iterable[OperationFigures]) -> TierFigures:
        tier, breaker = self._engine.tiers[number], self._engine.guards.breaker(number)
        usage, name, bucket = tier.usage(), tier.traits.name, tier.figures().get("bucket")
        return TierFigures(
            name=name,
            used_bytes=usage.used_bytes,
            capacity_bytes=usage.capacity_bytes,
            blobs=usage.blob_count,
            read_bytes_per_s=self._engine.read_bytes_per_s(number),
            pending_writes=hierarchy[f"tier{number}_pending_writes"],
            backlog_chunks=hierarchy[f"tier{number}_backlog"],
            queued_bytes=hierarchy[f"tier{number}_queued_bytes"],
            jobs=self._engine.jobs(number),
            corrupt=sum(row.calls for row in operations if (row.tier, row.outcome) == (name, "corrupt")),
            admitted_chunks=hierarchy[f"tier{number}_admitted"],
            declined_chunks=hierarchy[f"tier{number}_declined"],
            breaker=None if breaker is None else breaker.state.value,
            breaker_opened=0 if breaker is None else breaker.opened_count,
            breaker_reason=breaker.reason if breaker is not None and breaker.is_open else None,
            bucket=None if bucket is None else msgspec.convert(bucket, BucketFigures),
        )
