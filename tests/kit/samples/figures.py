"""Figures of servers that never ran, for what computes with them."""

from typing import Any

from tiered_kv.metrics.figures import (
    BucketFigures,
    CurveFigures,
    CurvePoint,
    FlowFigures,
    HitFigures,
    OperationFigures,
    ServerFigures,
    SessionFigures,
    TierFigures,
    TokenFigures,
)


def operation(tier: str, name: str, outcome: str, calls: int, size_bytes: int, seconds: float) -> OperationFigures:
    return OperationFigures(tier=tier, operation=name, outcome=outcome, calls=calls, bytes=size_bytes, seconds=seconds)


def tokens(asked: int, **hits: int) -> TokenFigures:
    """Tokens in chunks of ten, so many asked for and got by tier, in one lookup per chunk asked for."""
    hit = sum(hits.values())
    return TokenFigures(
        lookups=asked // 10,
        prompt_chunks=asked // 5,
        prompt_tokens=asked * 2,
        asked_chunks=asked // 10,
        asked_tokens=asked,
        hit_chunks=hit // 10,
        hit_tokens=hit,
        missed_chunks=(asked - hit) // 10,
        missed_tokens=asked - hit,
        hits=[HitFigures(tier=tier, chunks=count // 10, tokens=count) for tier, count in hits.items()],
        decisions={"ready": hit // 10, "miss": (asked - hit) // 10},
    )


def tier(name: str, **changes: Any) -> TierFigures:
    given: dict[str, Any] = {
        "name": name,
        "used_bytes": 1000,
        "capacity_bytes": 5000,
        "blobs": 10,
        "read_bytes_per_s": None,
        "pending_writes": 0,
        "backlog_chunks": 0,
        "queued_bytes": 0,
        "jobs": {"get": 0, "put": 0, "contains": 0, "delete": 0},
        "corrupt": 0,
        "breaker": "closed",
    }
    return TierFigures(**given | changes)


def flow(name: str, chunks: int, **removed: int) -> FlowFigures:
    """A tier into which so many chunks came, less those removed; 100 bytes each."""
    gone = sum(removed.values())
    return FlowFigures(
        tier=name,
        stored={"written": chunks},
        removed=removed,
        stored_bytes=100 * chunks,
        removed_bytes=100 * gone,
        resident_chunks=chunks - gone,
        resident_bytes=100 * (chunks - gone),
    )


def bucket(role: str) -> BucketFigures:
    numbers: dict[str, Any] = dict.fromkeys(BucketFigures.__struct_fields__, 0)
    return BucketFigures(**numbers | {"role": role, "leader": "host-1", "term": 3, "evicted_blobs": 4})


def curve(namespace: str, *shares: float) -> CurveFigures:
    """Shares found with half a tier, the tier as it is, twice and four times of it: host memory, then disk."""
    sizes = [(tier, times) for tier in ("host", "disk") for times in (0.5, 1, 2, 4)]
    return CurveFigures(
        namespace=namespace,
        chunks=1000,
        points=[
            CurvePoint(tier=tier, times=times, size_bytes=int(times * 4000), found_share=share)
            for (tier, times), share in zip(sizes, shares, strict=True)
        ],
    )


def server(uptime_s: float, **changes: Any) -> ServerFigures:
    """A server with host memory, a disk and a bucket, that many seconds after its start."""
    given: dict[str, Any] = {
        "version": "1",
        "pid": 7,
        "server_id": "one",
        "directory": "/cache",
        "storage": "s3://bucket/kv",
        "started_unix_s": 1_700_000_000.0,
        "uptime_s": uptime_s,
        "clients": 3,
        "pending_writes": 0,
        "tokens": tokens(0, host=0, disk=0, object=0),
        "hierarchy": {
            "host_assigned_bytes": 2000,
            "host_capacity_bytes": 4000,
            "host_ready_chunks": 5,
            "leased_bytes": 0,
            "lookups": 1,
        },
        "counters": {},
        "flows": [flow("host", 5), flow("disk", 10), flow("object", 10)],
        "tiers": [tier("disk"), tier("object", capacity_bytes=None, bucket=bucket("leader"))],
        "namespaces": [],
        "sessions": [SessionFigures(engine="e/0", namespace=None, workers=1, declined=0, state="ready")],
        "operations": [],
    }
    return ServerFigures(**given | changes)
