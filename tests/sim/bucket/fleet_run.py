"""What is asked of a fleet of a given size: it starts, works, loses its leader, is shaken, calms down, and rests.

``measure`` gives one row of figures; ``benchmarks/scale.py`` prints them, ``tests/fleet/test_scale.py`` judges them.
"""

import logging
import statistics
from dataclasses import dataclass
from typing import Any

from tests.sim.bucket.fleet import Fleet, Plan
from tiered_kv.fleet.layout import LEASES, SERVERS

START_MAX_S = 600.0
TAKEOVER_MAX_S = 600.0
WARM_S = 60.0
WORK_S = 120.0
SHAKEN_S = 180.0
CALM_S = 120.0
JUDGED_S = 60.0
REST_S = 300.0
"""``Timing.rest_after_s``: who neither stored nor used anything for so long rests."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One run. Times are virtual seconds, but for CPU's.

    Attributes:
        requests_per_s: To the store while everybody works, blobs not counted; by kind beside it.
        most_reads_per_s, most_writes_per_s: Of any second of the whole run, blobs counted.
        refused_requests: Requests beyond what the store takes, whole run.
        stored_per_s: PUTs of blobs that were begun, of all servers, while everybody works.
        listed_mb_per_s: Of answers to LISTs, while everybody works.
        term_bytes, report_bytes: Sizes of the leader's object and of the largest report.
        turn_s, turn_max_s, turn_cpu_s: A leader's turn while everybody works: median, longest, CPU time of the product.
        turn_requests: Requests in it, median.
        ready_s: From the first server's start until every one has stored.
        wait_s, wait_max_s: How long PUTs were refused before they began while everybody works: 99th of a hundred,
            longest.
        sessions_per_min: Sessions that each server begins while everybody works: each means that its grants ran out.
        starved: Servers that began no PUT in those two minutes.
        lead_s: From a leader's death to the next one's lease.
        first_put_s: From there to the first PUT under it.
        all_put_s: From its death until every server has stored under the next one; None: not within ten minutes.
        starved_after: Servers that began no PUT in a minute, two minutes after joins, leaves, stalls and deaths.
        peak_share: Most that ever lay in the bucket, of its limit.
        over_bytes: Beyond the limit.
        backward_puts: PUTs on grants of an overtaken term, after another one's PUTs.
        leaders_acting: Most leaders that could act at the same time.
        pass_s: What the last pass of garbage collection took while everybody worked.
        using_requests_per_min: By kind, of all servers, while they only use what is there.
        idle_requests_per_min: By kind, of all servers, while nothing is stored or used.
    """

    servers: int
    seed: int
    requests_per_s: float
    kinds_per_s: dict[str, float]
    most_reads_per_s: int
    most_writes_per_s: int
    refused_requests: int
    stored_per_s: float
    listed_mb_per_s: float
    term_bytes: int
    report_bytes: int
    turn_s: float
    turn_max_s: float
    turn_cpu_s: float
    turn_requests: int
    ready_s: float | None
    wait_s: float
    wait_max_s: float
    sessions_per_min: float
    starved: int
    lead_s: float | None
    first_put_s: float | None
    all_put_s: float | None
    starved_after: int
    peak_share: float
    over_bytes: int
    backward_puts: int
    leaders_acting: int
    pass_s: float
    using_requests_per_min: dict[str, float]
    idle_requests_per_min: dict[str, float]


def _start(fleet: Fleet) -> dict[str, Any]:
    """All begin within ten seconds, on a bucket that is nearly full."""
    is_ready = fleet.run(START_MAX_S, lambda: len(fleet.stored_by) == fleet.plan.servers)
    return {"ready_s": fleet.now_s if is_ready else None}


def _work(fleet: Fleet) -> dict[str, Any]:
    """Everybody stores and uses; the leader evicts as much."""
    fleet.run(WARM_S)
    fleet.begin()
    began_s, sessions = fleet.now_s, sum(server.session_count for server in fleet.servers)
    fleet.run(WORK_S)
    seconds, tally = fleet.now_s - began_s, fleet.bucket.tally
    kinds = {kind: count / seconds for kind, count in tally.requests.items() if kind != "put blob"}
    turns, leader = fleet.leader_turns, fleet.leader()
    begun = sum(server.session_count for server in fleet.servers) - sessions
    objects = fleet.bucket.objects
    return {
        "requests_per_s": sum(kinds.values()),
        "kinds_per_s": kinds,
        "stored_per_s": len(fleet.waits_s) / seconds,
        "listed_mb_per_s": tally.listed_bytes / seconds / 1e6,
        "term_bytes": max(one.size_bytes for path, one in objects.items() if path.startswith(LEASES)),
        "report_bytes": max(one.size_bytes for path, one in objects.items() if path.startswith(SERVERS)),
        "turn_s": statistics.median(turn.seconds for turn in turns) if turns else 0.0,
        "turn_max_s": max((turn.seconds for turn in turns), default=0.0),
        "turn_cpu_s": statistics.median(turn.cpu_s for turn in turns) if turns else 0.0,
        "turn_requests": round(statistics.median(turn.requests for turn in turns)) if turns else 0,
        "wait_s": statistics.quantiles(fleet.waits_s, n=100)[-1] if len(fleet.waits_s) > 1 else 0.0,
        "wait_max_s": max(fleet.waits_s, default=0.0),
        "sessions_per_min": 60 * begun / seconds / fleet.plan.servers,
        "starved": _starved(fleet),
        "pass_s": float(leader.keeper.figures()["last_pass_s"]) if leader else 0.0,
    }


def _lose_leader(fleet: Fleet) -> dict[str, Any]:
    """The leader is killed in the middle of what it does; it comes back as a new server a moment later."""
    leader = fleet.leader()
    if leader is None:
        return {"lead_s": None, "first_put_s": None, "all_put_s": None}
    fleet.run(fleet.draw.uniform(0, 3))
    died_s, term = fleet.now_s, int(leader.keeper.figures()["term"])
    leader.crash()
    fleet.join(after_s=5.0)
    fleet.begin(since_term=term)
    has_all = fleet.run(TAKEOVER_MAX_S, lambda: len(fleet.stored_by) >= fleet.plan.servers)
    led_s = next((at_s for at_s in fleet.led_at_s if at_s > died_s), None)
    put_s = next((at_s for later, at_s in sorted(fleet.term_puts_at_s.items()) if later > term), None)
    return {
        "lead_s": None if led_s is None else led_s - died_s,
        "first_put_s": None if led_s is None or put_s is None else put_s - led_s,
        "all_put_s": fleet.now_s - died_s if has_all else None,
    }


def _shake(fleet: Fleet) -> dict[str, Any]:
    """Every ten seconds a fiftieth of the fleet is killed, ends, or stands still; as many join. Then all is calm."""
    count = max(1, fleet.plan.servers // 50)
    end_s = fleet.now_s + SHAKEN_S
    while fleet.now_s < end_s:
        for server in fleet.draw.sample(fleet.alive(), min(count, len(fleet.alive()))):
            chance = fleet.draw.random()
            if chance < 0.5:
                server.freeze(fleet.draw.uniform(2, 60))
                continue
            (server.crash if chance < 0.75 else server.close)()
            fleet.join(fleet.draw.uniform(0, 20))
        fleet.run(10)
    fleet.run(CALM_S)
    fleet.begin()
    fleet.run(JUDGED_S)
    return {"starved_after": _starved(fleet)}


def _starved(fleet: Fleet) -> int:
    return sum(server.number not in fleet.stored_by for server in fleet.alive())


def _rest(fleet: Fleet) -> dict[str, Any]:
    """Nobody stores any more; then nobody uses anything either."""
    fleet.is_storing = False
    fleet.run(REST_S + CALM_S)
    fleet.begin()
    fleet.run(JUDGED_S)
    using = {kind: count * 60 / JUDGED_S for kind, count in fleet.bucket.tally.requests.items()}
    fleet.is_using = False
    fleet.run(CALM_S)
    fleet.begin()
    fleet.run(JUDGED_S)
    idle = {kind: count * 60 / JUDGED_S for kind, count in fleet.bucket.tally.requests.items()}
    return {"using_requests_per_min": using, "idle_requests_per_min": idle}


def measure(plan: Plan) -> Figures:
    """Run a fleet; about a second of CPU for 3 servers, a minute for 200."""
    logging.getLogger("tiered_kv").setLevel(logging.CRITICAL)  # hundreds of servers say what one would say once
    fleet = Fleet(plan)
    try:
        found = _start(fleet) | _work(fleet) | _lose_leader(fleet) | _shake(fleet) | _rest(fleet)
    finally:
        fleet.end()
    return Figures(
        servers=plan.servers,
        seed=plan.seed,
        most_reads_per_s=max(tally.most_per_s(reads=True) for tally in fleet.tallies),
        most_writes_per_s=max(tally.most_per_s(reads=False) for tally in fleet.tallies),
        refused_requests=sum(tally.refused_requests for tally in fleet.tallies),
        peak_share=fleet.bucket.most_bytes / plan.capacity_bytes,
        over_bytes=fleet.over_bytes,
        backward_puts=fleet.backward_count,
        leaders_acting=fleet.acting_max,
        **found,
    )
