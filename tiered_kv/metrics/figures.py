"""What a running server says of itself: the answer to ``StatRequest``, shown by ``stat``, ``top`` and the metrics.

Values only. Counts and sums grow from the server's start on, so differences of two answers are rates; everything else
is as of now. Written by ``server/stats.py``.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from tiered_kv.metrics.names import ShownIn, server_event

HOST_NAME: Final = "host"
"""Name of host memory among the tiers."""

PEERS_NAME: Final = "peers"
"""Name of other machines among the tiers."""


class HitFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What one tier gave to lookups.

    Attributes:
        tier: ``host``: it was in host memory when it was asked for, or just being stored. ``disk``, ``object``: it was
            read from there for the lookup.
        chunks, tokens: How much.
    """

    tier: str
    chunks: int
    tokens: int


class TokenFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What lookups asked for and got, counted when they ended; in whole chunks of the prompts.

    Attributes:
        lookups: How many ended.
        prompt_chunks, prompt_tokens: In the prompts that were looked up.
        asked_chunks, asked_tokens: Of those, what the engine did not have in its own memory.
        hit_chunks, hit_tokens: Of the asked ones, what it got.
        missed_chunks, missed_tokens: Of the asked ones, what it did not get.
        hits: What it got by tier, highest first.
        decisions: How many lookups that asked for anything ended in which way: ``ready``, all that was held was in host
            memory; ``awaited``, some of it came up from a lower tier; ``took_what_arrived``, the engine went on with
            less than was on its way; ``not_awaited``, without any of it; ``miss``, nothing was held.
    """

    lookups: int
    prompt_chunks: int
    prompt_tokens: int
    asked_chunks: int
    asked_tokens: int
    hit_chunks: int
    hit_tokens: int
    missed_chunks: int
    missed_tokens: int
    hits: list[HitFigures]
    decisions: dict[str, int]


class BucketFigures(msgspec.Struct, frozen=True, kw_only=True):
    """This server's part in keeping a shared object store within its limits.

    Attributes:
        role: ``leader``, ``follower`` or ``alone`` (nobody leads).
        is_resting: Nothing was stored or used here for minutes, so it exchanges nothing; ``used_bytes`` is of then.
        term: Which lease it leads or follows; 0 without one.
        leader: Id of this server as a candidate.
        granted_bytes, spent_bytes: What it may put and has put since its session began.
        refused_puts: Puts for which no grant was left.
        used_bytes: In the whole bucket, as far as this server knows.
        evicted_blobs, evicted_bytes, expired_blobs, expired_bytes, holes_collected: What it deleted as a leader.
        passes, last_pass_s: Lists of the whole bucket, and how long the last took.
        merged_logs, dropped_uses, malformed: Recency logs merged, uses not written, objects that could not be read.
    """

    role: str
    term: int
    leader: str
    granted_bytes: int
    spent_bytes: int
    refused_puts: int
    used_bytes: int
    evicted_blobs: int
    evicted_bytes: int
    expired_blobs: int
    expired_bytes: int
    holes_collected: int
    passes: int
    last_pass_s: float
    merged_logs: int
    dropped_uses: int
    malformed: int
    is_resting: bool = False


class TierFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One tier below host memory.

    Attributes:
        name: ``disk`` or ``object``.
        used_bytes: Bytes it holds; in a shared one those of all machines, as last known.
        capacity_bytes: None: not limited.
        blobs: Blobs it holds; in a shared one those of all machines, as last known.
        tails: How many of them are tails (prompts' ends below a whole chunk); a shared one has none.
        kept_by_pins_bytes: Bytes of blobs that pins keep; of a shared one not known here.
        read_bytes_per_s: How fast reads run while some run; None before the first.
        pending_writes: Chunks that a server that ends still writes here.
        backlog_chunks: All chunks that wait to be written here, also those that may wait for the next start.
        queued_bytes: Host memory that pending writes hold.
        jobs: Operations handed to threads and not ended, by kind: ``get``, ``put``, ``contains``, ``delete``.
        corrupt: Reads whose bytes were damaged.
        admitted_chunks: Chunks that were to be written here; each was written, dropped, or waits.
        declined_chunks: Chunks that came and were not to be: they were asked for or stored once only, or have generated
            tokens that no prompt has. Those that were admitted later, when they were asked for, are counted there, too.
        breaker: ``closed``: in use. ``open``, ``half_open``: left out until a trial succeeds.
        breaker_opened: How often it opened.
        breaker_reason: Why it is open.
        bucket: Of a shared object store only.
    """

    name: str
    used_bytes: int
    capacity_bytes: int | None
    blobs: int
    read_bytes_per_s: float | None
    pending_writes: int
    backlog_chunks: int
    queued_bytes: int
    jobs: dict[str, int]
    corrupt: int
    tails: int = 0
    kept_by_pins_bytes: int = 0
    admitted_chunks: int = 0
    declined_chunks: int = 0
    breaker: str | None = None
    breaker_opened: int = 0
    breaker_reason: str | None = None
    bucket: BucketFigures | None = None


class FlowFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What came into a tier and what left it, as this server knows: what was stored less what was removed is there.

    Attributes:
        tier: ``host``, ``disk`` or ``object``. Of a shared one: what this server wrote or found, and has not forgotten.
        stored: Chunks by how they came: ``new`` from an engine, ``promoted`` from below, ``written`` from above,
            ``found`` at the start or by a search, ``kept`` because they could not be deleted.
        removed: Chunks by why they went: ``evicted`` to make room, ``removed`` by an operator, ``missing``,
            ``corrupt`` or ``foreign`` when they were read, ``damaged`` in memory, ``forgotten`` in a shared tier.
        stored_bytes, removed_bytes: The same in bytes; 0 for what others put into a shared tier.
        resident_chunks, resident_bytes: What is there.
    """

    tier: str
    stored: dict[str, int]
    removed: dict[str, int]
    stored_bytes: int
    removed_bytes: int
    resident_chunks: int
    resident_bytes: int


class SessionFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One generation of one engine.

    Attributes:
        engine: Its id and generation.
        namespace: Hex digits; None until all workers are in.
        workers, declined: Workers that take part, and that cannot.
        state: ``joining``, ``ready`` or ``lost``.
        pinned_bytes: Of host memory, what its workers have pinned for their GPUs, all of them together: several pin
            the same memory.
        pinning_s: Time that took, all workers together.
    """

    engine: str
    namespace: str | None
    workers: int
    declined: int
    state: str
    pinned_bytes: int = 0
    pinning_s: float = 0.0


class NamespaceFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What one namespace takes of this machine's tiers, and what its engines stated.

    Attributes:
        namespace: Hex digits.
        host_bytes: Of host memory, with the empty slots that its engines hold ahead.
        disk_bytes: Of the disk tier, without what is being deleted.
        min_share, max_share: Of each tier's limit, what it keeps and the most it may take.
    """

    namespace: str
    host_bytes: int
    disk_bytes: int
    min_share: float
    max_share: float


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True):
    """What a tier of another size would find.

    Attributes:
        tier: ``host``: what would be in host memory when it is asked for. ``disk``: what would be in host memory or on
            disk, most of it in both.
        times: Size of the tier, in times of what it has.
        size_bytes: Of the cache that this comes to: of host memory alone, or of the larger of host memory and disk.
        found_share: Of all chunks of the prompts looked up, what the engine had itself included.
    """

    tier: str
    times: float
    size_bytes: int
    found_share: float


class CurveFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The miss-ratio curve of one namespace: what its lookups would find in tiers of other sizes.

    Estimated from a sample of the reuse distances, for a cache that keeps what was used last, and stores all that is
    asked for. All namespaces share it. Recurrent layers have no curve.

    Attributes:
        namespace: Hex digits.
        chunks: Of the prompts that count. From some millions on older ones fade.
        points: By tier, host memory first, and by size, smallest first.
    """

    namespace: str
    chunks: int
    points: list[CurvePoint]

    def found(self, tier: str, times: float) -> float | None:
        """The share found with a tier of that size; None: not told."""
        return next((p.found_share for p in self.points if (p.tier, p.times) == (tier, times)), None)

    def gain(self, tier: str, times: float) -> float | None:
        """The same less what is found with the tier as it is: shares of all, negative for a smaller tier."""
        now, then = self.found(tier, 1), self.found(tier, times)
        return None if now is None or then is None else then - now


class OperationFigures(msgspec.Struct, frozen=True, kw_only=True):
    """All calls of one kind to a tier.

    Attributes:
        tier, operation: ``get``, ``put``, ``contains``, ``delete``, ``scan``, ``flush`` or ``describe`` of which tier.
        outcome: ``ok``, ``missing``, ``corrupt``, ``foreign``, ``no_room``, ``unavailable``, ``closed`` or ``error``.
        calls: How many ended.
        bytes: Moved by those that were ``ok``.
        seconds: Sum of their times.
    """

    tier: str
    operation: str
    outcome: str
    calls: int
    bytes: int
    seconds: float


class ServerFigures(msgspec.Struct, frozen=True, kw_only=True):
    """A running server.

    Attributes:
        version: Of the package.
        pid, server_id: Its process, and what names this life of it.
        directory: What it owns, as it sees it.
        storage: The tier its URI names, without credentials.
        started_unix_s, uptime_s: When it started, and how long ago, by a clock that never jumps.
        clients: Connections, the asking one included.
        pending_writes: Chunks that a server that ends still writes, to all tiers.
        tokens: What lookups asked for and got.
        hierarchy: Host memory and chunks as of now: bytes assigned, capacity, leases, lookups, sessions.
        counters: What happened how often; ``names.py`` says what each of them is.
        tiers: Below host memory, highest first.
        flows: What came and went, from host memory downwards.
        sessions: Engines that take part.
        namespaces: Who takes how much: first those with a share, then the largest, a thousand at most.
        curves: What tiers of other sizes would find, by namespace, at most 16: what was looked up last comes first.
        operations: Calls to tiers by tier, kind and outcome.
    """

    version: str
    pid: int
    server_id: str
    directory: str
    storage: str
    started_unix_s: float
    uptime_s: float
    clients: int
    pending_writes: int
    tokens: TokenFigures
    hierarchy: dict[str, int]
    counters: dict[str, int]
    tiers: list[TierFigures]
    flows: list[FlowFigures]
    sessions: list[SessionFigures]
    namespaces: list[NamespaceFigures]
    operations: list[OperationFigures]
    curves: list[CurveFigures] = []

    def drops(self) -> dict[str, int]:
        """Chunks that were not written to a tier, by the reason."""
        drops = [name for name in self.counters if server_event(name).shown_in is ShownIn.DROPPED_CHUNKS]
        return {name: self.counters[name] for name in sorted(drops) if self.counters[name]}


def sum_operations(
    operations: Sequence[OperationFigures], tier: str, operation: str, outcome: str = ""
) -> OperationFigures:
    """All calls of a tier's operation as one row; ``outcome`` empty: whatever came of them."""
    rows = [
        row for row in operations if (row.tier, row.operation) == (tier, operation) and outcome in ("", row.outcome)
    ]
    return OperationFigures(
        tier=tier,
        operation=operation,
        outcome=outcome,
        calls=sum(row.calls for row in rows),
        bytes=sum(row.bytes for row in rows),
        seconds=sum(row.seconds for row in rows),
    )
