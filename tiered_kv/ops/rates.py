"""Compute rates per second from two answers of one server.

Pure. Every count only grows while a server lives; a server that was started anew in between has no common past.
"""

from collections.abc import Mapping

import msgspec

from tiered_kv.metrics.figures import HOST_NAME, CurveFigures, ServerFigures, TierFigures, sum_operations


class TierRates(msgspec.Struct, frozen=True, kw_only=True):
    """One tier, host memory included, between two polls.

    Attributes:
        tier: ``host``, ``disk`` or ``object``.
        used_bytes, capacity_bytes, chunks: As of the second poll; capacity null: not limited.
        hit_tokens_per_s: Tokens that lookups got from it; they count when a lookup ends.
        read_bytes_per_s, written_bytes_per_s: Blobs moved; 0 for host memory.
        reads_per_s, writes_per_s: Operations that ended, whatever came of them.
        read_s, write_s: Mean time of one; null: none ended.
        failures_per_s: Operations that ended neither well nor with "not there".
        jobs: Operations handed to threads that have not ended, as of the second poll.
        backlog_chunks, queued_bytes: Chunks that wait to be written there, and the host memory they hold.
        breaker: ``closed``: in use; null for host memory.
        admitted_per_s, declined_per_s: Chunks that were to be written there, and chunks that came once and were not.
    """

    tier: str
    used_bytes: int
    capacity_bytes: int | None
    chunks: int
    hit_tokens_per_s: float
    read_bytes_per_s: float = 0.0
    written_bytes_per_s: float = 0.0
    reads_per_s: float = 0.0
    writes_per_s: float = 0.0
    read_s: float | None = None
    write_s: float | None = None
    failures_per_s: float = 0.0
    jobs: int = 0
    backlog_chunks: int = 0
    queued_bytes: int = 0
    breaker: str | None = None
    admitted_per_s: float = 0.0
    declined_per_s: float = 0.0


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """A server between two polls.

    Attributes:
        pid, uptime_s: Which server, and its age at the second poll.
        interval_s: Time between the polls, by the server's clock.
        clients, sessions, lookups: As of the second poll.
        lookups_per_s: Lookups that ended.
        asked_tokens_per_s, hit_tokens_per_s: What they asked for and got.
        hit_share: Of the tokens asked for in between, those that were got; null: none were asked for.
        decisions_per_s: Lookups per second by what became of them; those without any are left out.
        drops_per_s: Chunks per second that were not written, by the reason; reasons without any are left out.
        tiers: Host memory first.
        curves: What tiers of other sizes would find, by namespace, from the server's start to the second poll.
    """

    pid: int
    uptime_s: float
    interval_s: float
    clients: int
    sessions: int
    lookups: int
    lookups_per_s: float
    asked_tokens_per_s: float
    hit_tokens_per_s: float
    hit_share: float | None
    decisions_per_s: dict[str, float]
    drops_per_s: dict[str, float]
    tiers: list[TierRates]
    curves: list[CurveFigures]


def rates(before: ServerFigures, after: ServerFigures) -> Rates:
    """What happened between two answers.

    Raises:
        ValueError: They are of two servers, or of one moment.
    """
    seconds = after.uptime_s - before.uptime_s
    if before.server_id != after.server_id or seconds <= 0:
        raise ValueError("figures of one server at two moments were expected")
    asked = after.tokens.asked_tokens - before.tokens.asked_tokens
    hit = after.tokens.hit_tokens - before.tokens.hit_tokens
    return Rates(
        pid=after.pid,
        uptime_s=after.uptime_s,
        interval_s=seconds,
        clients=after.clients,
        sessions=len(after.sessions),
        lookups=after.hierarchy["lookups"],
        lookups_per_s=(after.tokens.lookups - before.tokens.lookups) / seconds,
        asked_tokens_per_s=asked / seconds,
        hit_tokens_per_s=hit / seconds,
        hit_share=hit / asked if asked else None,
        decisions_per_s=_grown(before.tokens.decisions, after.tokens.decisions, seconds),
        drops_per_s=_grown(before.drops(), after.drops(), seconds),
        tiers=[_host(before, after, seconds), *(_tier(tier, before, after, seconds) for tier in after.tiers)],
        curves=after.curves,
    )


def _grown(before: Mapping[str, int], after: Mapping[str, int], seconds: float) -> dict[str, float]:
    gains = {name: count - before.get(name, 0) for name, count in after.items()}
    return {name: gain / seconds for name, gain in gains.items() if gain > 0}


def _host(before: ServerFigures, after: ServerFigures, seconds: float) -> TierRates:
    return TierRates(
        tier=HOST_NAME,
        used_bytes=after.hierarchy["host_assigned_bytes"],
        capacity_bytes=after.hierarchy["host_capacity_bytes"],
        chunks=after.hierarchy["host_ready_chunks"],
        hit_tokens_per_s=(_hits(after, HOST_NAME) - _hits(before, HOST_NAME)) / seconds,
    )


def _tier(tier: TierFigures, before: ServerFigures, after: ServerFigures, seconds: float) -> TierRates:
    name = tier.name

    def grown(operation: str, outcome: str = "") -> tuple[int, int, float]:
        old = sum_operations(before.operations, name, operation, outcome)
        new = sum_operations(after.operations, name, operation, outcome)
        return new.calls - old.calls, new.bytes - old.bytes, new.seconds - old.seconds

    old = next((one for one in before.tiers if one.name == name), tier)
    (reads, read_bytes, read_s), (writes, written_bytes, write_s) = grown("get"), grown("put")
    return TierRates(
        tier=name,
        used_bytes=tier.used_bytes,
        capacity_bytes=tier.capacity_bytes,
        chunks=tier.blobs,
        hit_tokens_per_s=(_hits(after, name) - _hits(before, name)) / seconds,
        read_bytes_per_s=read_bytes / seconds,
        written_bytes_per_s=written_bytes / seconds,
        reads_per_s=reads / seconds,
        writes_per_s=writes / seconds,
        read_s=read_s / reads if reads else None,
        write_s=write_s / writes if writes else None,
        failures_per_s=(_failures(after, name) - _failures(before, name)) / seconds,
        jobs=sum(tier.jobs.values()),
        backlog_chunks=tier.backlog_chunks,
        queued_bytes=tier.queued_bytes,
        breaker=tier.breaker,
        admitted_per_s=(tier.admitted_chunks - old.admitted_chunks) / seconds,
        declined_per_s=(tier.declined_chunks - old.declined_chunks) / seconds,
    )


def _hits(figures: ServerFigures, tier: str) -> int:
    return sum(row.tokens for row in figures.tokens.hits if row.tier == tier)


def _failures(figures: ServerFigures, tier: str) -> int:
    return sum(row.calls for row in figures.operations if row.tier == tier and row.outcome not in ("ok", "missing"))
