"""What a bucket's keepers cost and do when many servers share it, in virtual time; no store, no network, no GPU.

    python benchmarks/scale.py [--servers N ...] [--seed N] [--latency-ms N] [--blobs N] [--page N]
                               [--reads-at-once N] [--failing SHARE] [--keep]

Fleets of the product's keepers on a simulated bucket (``tests/sim/bucket/fleet_run.py``): all start, work for two
minutes, lose their leader, are shaken by joins, leaves, deaths and stalls, calm down, and rest. Requests are counted as
the keepers send them, blobs left out. Times are virtual, but for the CPU time of a leader's turn, which is this
machine's.

    requests   per second to the store, of the whole fleet, while everybody stores and uses; and blobs stored
    turn       of the leader, median and longest; its CPU time and requests
    wait       how long a PUT was refused before it began: 99th of a hundred, and longest
    sessions   that a server begins in a minute: each says that its grants ran out unanswered
    starved    servers that stored nothing in two minutes of work, and in a minute after all was shaken
    lead       from a leader's death to the next lease; to the first PUT under it; from the death until all have PUT
    over       bytes beyond the limit, and PUTs on grants of an overtaken term: both are to be 0
    USD        that the whole fleet's keepers cost in a month of such work; of only using what is there; of resting

The second table is arithmetic by the search's own code (``tiering/prefix_search.py``): HEAD requests of a lookup that
knows nothing of a prompt of which a part is in the bucket, over all lengths of that part.
"""

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from bench_report import REPOSITORY, finish, machine, parser, table

import sys  # isort: skip

sys.path[:0] = [str(REPOSITORY)]

from tests.sim.bucket.fleet import Plan  # noqa: E402
from tests.sim.bucket.fleet_run import measure  # noqa: E402
from tests.sim.bucket.fleet_store import Service  # noqa: E402
from tiered_kv.tiering.prefix_search import PrefixSearch  # noqa: E402
from tiered_kv.tiers.object.store import READS_AT_ONCE  # noqa: E402

MONTH_MIN = 730 * 60
USD_PER_REQUEST = {"put": 5e-6, "list": 5e-6, "get": 4e-7, "head": 4e-7, "delete": 0.0}
"""S3 Standard, us-east-1."""
PROMPTS = (16, 64, 128, 512)
"""Chunks of a prompt."""

COLUMNS = {
    "servers": "servers", "requests_per_s": "requests/s", "stored_per_s": "stored/s",
    "turn_s": "turn s", "turn_max_s": "longest",
    "turn_cpu_ms": "CPU ms", "turn_requests": "requests", "wait_s": "wait s 99 %", "wait_max_s": "longest",
    "sessions_per_min": "sessions/min", "starved": "starved", "starved_after": "after", "lead_s": "lead s",
    "first_put_s": "first PUT", "all_put_s": "all PUT", "peak_share": "peak", "over_bytes": "over",
    "work_usd": "USD", "using_usd": "using", "idle_usd": "idle",
}  # fmt: skip
SEARCHES = {
    "chunks": "chunks of a prompt", "miss": "HEADs, nothing there", "mean": "mean, some of it there", "most": "most",
    "rounds": "rounds",
}  # fmt: skip


def usd(requests_per_min: Mapping[str, float]) -> float:
    """A month's price of so many requests."""
    return MONTH_MIN * sum(count * USD_PER_REQUEST[kind] for kind, count in requests_per_min.items())


def searches(chunks: int) -> dict[str, Any]:
    """What searches for a prompt ask, none of whose chunks is known."""
    asked = [probes(chunks, there) for there in range(chunks + 1)]
    some = [count for count, _ in asked[1:]]
    most_rounds = max(rounds for _, rounds in asked)
    return {
        "chunks": chunks,
        "miss": asked[0][0],
        "mean": sum(some) / len(some),
        "most": max(some),
        "rounds": most_rounds,
    }


def probes(chunks: int, there: int) -> tuple[int, int]:
    """HEADs and rounds of a search where the first ``there`` chunks are in the bucket."""
    search, count, rounds = PrefixSearch(b"", [b""] * chunks, [b""] * chunks, 0, chunks), 0, 0
    while not search.is_done:
        asked = search.next_positions()
        search.answers |= {position: position < there for position in asked}
        search.narrow()
        count, rounds = count + len(asked), rounds + 1
    if search.low != there:
        raise RuntimeError(f"the search is wrong. expected={there} observed={search.low}")
    return count, rounds


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--servers", type=int, nargs="+", default=[3, 20, 50, 100, 200])
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--latency-ms", type=float, default=20.0, help="median of a request to the store")
    options.add_argument("--blobs", type=int, default=100, help="room for so many per server")
    options.add_argument("--stores", type=float, default=0.2, help="blobs that each server wants to store, per second")
    options.add_argument(
        "--page", type=int, default=1000, help="objects on a LIST's page: fewer stand for a larger bucket"
    )
    options.add_argument("--reads-at-once", type=int, default=READS_AT_ONCE, help="1: as it was before")
    options.add_argument("--failing", type=float, default=0.0, help="share of requests that fail")
    given = options.parse_args()
    rows = []
    print("\n".join(table([], COLUMNS)), flush=True)
    for servers in given.servers:
        service = Service(
            request_s=given.latency_ms / 1000,
            page_objects=given.page,
            reads_at_once=given.reads_at_once,
            failing_share=given.failing,
        )
        began_s = time.process_time()
        plan = Plan(servers, given.seed, blobs_per_server=given.blobs, stores_per_s=given.stores, service=service)
        found = asdict(measure(plan))
        row = found | {
            "turn_cpu_ms": 1000 * found["turn_cpu_s"],
            "work_usd": round(usd({kind: 60 * count for kind, count in found["kinds_per_s"].items()}), 2),
            "using_usd": round(usd(found["using_requests_per_min"]), 2),
            "idle_usd": round(usd(found["idle_requests_per_min"]), 2),
            "simulation_cpu_s": round(time.process_time() - began_s, 1),
        }
        rows.append(row)
        print(table([row], COLUMNS)[-1], flush=True)
    searched = [searches(chunks) for chunks in PROMPTS]
    print("\n".join(["", *table(searched, SEARCHES)]), flush=True)
    facts = machine("scale", **{name: value for name, value in vars(given).items() if name != "keep"})
    finish("scale", {"fleets": rows, "searches": searched}, facts, is_kept=given.keep)


if __name__ == "__main__":
    main()
