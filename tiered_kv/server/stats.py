"""The server's figures: what ``stat`` shows, and whether a client expects the limits the server has.

The figures' types are in ``metrics/figures.py``.
"""

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from tiered_kv.config import Config
from tiered_kv.engine.engine import Engine, EngineStats
from tiered_kv.metrics.figures import (
    HOST_NAME,
    BucketFigures,
    CurveFigures,
    CurvePoint,
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
from tiered_kv.tiering.quotas import Quota
from tiered_kv.tiering.stats import DECISIONS
from tiered_kv.tiering.types import HOST, TierUsage
from tiered_kv.version import __version__

CURVE_TIMES = (0.5, 1, 2, 4)
"""Sizes of a tier for which is told what it would find, in times of its own; none beyond ``CURVE_SPAN``."""

NAMESPACES_SHOWN = 1000
"""A directory may hold blobs of many more, and an answer has to fit a frame."""


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
        self._names = {HOST: HOST_NAME} | {number: tier.traits.name for number, tier in engine.tiers.items()}
        self._started_s = engine.clock.monotonic()
        self._started_unix_s = float(engine.clock.wall())

    def now(self, clients: int, sessions: Iterable[SessionFigures]) -> ServerFigures:
        """Everything, as of now. No I/O: about a millisecond."""
        stats = self._engine.stats()
        operations = self._recorder.snapshot()
        return ServerFigures(
            version=__version__,
            pid=os.getpid(),
            server_id=self._server_id,
            directory=str(self._root),
            storage=self._storage,
            started_unix_s=self._started_unix_s,
            uptime_s=self._engine.clock.monotonic() - self._started_s,
            clients=clients,
            pending_writes=self._engine.pending_writes,
            tokens=self._tokens(),
            hierarchy=stats.host,
            counters=stats.counters,
            tiers=[self._tier(number, usage, operations) for number, usage in stats.secondary.items()],
            flows=self._flows(stats),
            sessions=list(sessions),
            namespaces=_namespaces(stats, is_disk_ours=not self._engine.tiers[HOST + 1].traits.is_shared),
            operations=operations,
            curves=self._curves(stats),
        )

    def _curves(self, stats: EngineStats) -> list[CurveFigures]:
        """What the tiers of this machine that have a limit would find if they had another one."""
        host_bytes, disk_bytes = stats.host["host_capacity_bytes"], self._engine.capacity_bytes(HOST + 1)
        sizes = [(HOST_NAME, times, int(times * host_bytes)) for times in CURVE_TIMES]
        if disk_bytes is not None:  # it holds a copy of what is in host memory
            name = self._names[HOST + 1]
            sizes += [(name, times, max(host_bytes, int(times * disk_bytes))) for times in CURVE_TIMES]
        return [
            CurveFigures(
                namespace=namespace.hex(),
                chunks=round(curve.chunks),
                points=[
                    CurvePoint(tier=tier, times=times, size_bytes=size, found_share=curve.found_share(size))
                    for tier, times, size in sizes
                ],
            )
            for namespace, curve in reversed(stats.curves.items())
        ]

    def _flows(self, stats: EngineStats) -> list[FlowFigures]:
        return [
            FlowFigures(
                tier=name,
                stored=dict(stats.events[number].inserted),
                removed=dict(stats.events[number].removed),
                stored_bytes=stats.events[number].inserted_bytes,
                removed_bytes=stats.events[number].removed_bytes,
                resident_chunks=stats.host["host_ready_chunks"] if number == HOST else stats.secondary[number].chunks,
                resident_bytes=stats.events[number].size_bytes,
            )
            for number, name in self._names.items()
        ]

    def _tokens(self) -> TokenFigures:
        served = self._engine.served()
        chunks, tokens = served.chunks, served.tokens
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
            hits=[
                HitFigures(tier=name, chunks=chunks.hits[n], tokens=tokens.hits[n]) for n, name in self._names.items()
            ],
            decisions={decision: chunks.decisions[decision] for decision in DECISIONS},
        )

    def _tier(self, number: int, usage: TierUsage, operations: Iterable[OperationFigures]) -> TierFigures:
        tier, breaker = self._engine.tiers[number], self._engine.guards.breaker(number)
        medium, name, bucket = tier.usage(), tier.traits.name, tier.figures().get("bucket")
        return TierFigures(
            name=name,
            used_bytes=medium.used_bytes,
            capacity_bytes=medium.capacity_bytes,
            blobs=medium.blob_count,
            read_bytes_per_s=self._engine.read_bytes_per_s(number),
            pending_writes=usage.pending_writes,
            backlog_chunks=usage.backlog_chunks,
            queued_bytes=usage.queued_bytes,
            jobs=self._engine.jobs(number),
            corrupt=sum(row.calls for row in operations if (row.tier, row.outcome) == (name, "corrupt")),
            tails=usage.tails,
            kept_by_pins_bytes=usage.pinned_bytes,
            admitted_chunks=usage.admitted_chunks,
            declined_chunks=usage.declined_chunks,
            breaker=None if breaker is None else breaker.state.value,
            breaker_opened=0 if breaker is None else breaker.opened_count,
            breaker_reason=breaker.reason if breaker is not None and breaker.is_open else None,
            bucket=None if bucket is None else msgspec.convert(bucket, BucketFigures),
        )


def _namespaces(stats: EngineStats, *, is_disk_ours: bool) -> list[NamespaceFigures]:
    """What each namespace keeps and takes of host memory and disk; those with quotas first, then the largest."""
    host = stats.usage[HOST]
    disk = stats.usage[HOST + 1] if is_disk_ours else {}
    rows = []
    for namespace in {*host, *disk, *stats.quotas}:
        quota = stats.quotas.get(namespace, Quota())
        rows.append(
            NamespaceFigures(
                namespace=namespace.hex(),
                host_bytes=host.get(namespace, 0),
                disk_bytes=disk.get(namespace, 0),
                min_share=quota.at_least,
                max_share=quota.at_most,
            )
        )
    rows.sort(key=lambda row: (row.min_share == 0, row.max_share == 1, -row.host_bytes - row.disk_bytes))
    return rows[:NAMESPACES_SHOWN]
