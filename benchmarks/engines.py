"""What one server's loop costs for each engine that is connected: idle, and by lookups, over the real sockets.

    python benchmarks/engines.py [--engines N ...] [--chunks N] [--requests N] [--seconds N] [--keep]

A server of its own process, and so many engines as vLLM would run them on one machine: each has a scheduler's session
and a worker's. First nobody asks anything; then they ask in turns for a prompt of 32k tokens that is in host memory,
and for one that nobody knows; then all at once, which is the worst that independent engines can do to each other.

    idle    CPU of the server in a second, of all sessions together
    cpu     CPU of the server's process per lookup
    turns   from a request to its answer, one engine after the other: median
    burst   the same where all ask at the same moment: until the last has its answer, median
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bare_engine import BareEngine
from bench_report import finish, machine, parser, table
from lookup import SHAPE, Node, ask
from processes import cpu_s

from tests.kit.server.probe import figures

TOKENS = 32 << 10
COLUMNS = {
    "engines": "engines", "sessions": "sessions", "idle_ms_per_s": "idle ms/s", "host_cpu_ms": "host cpu ms",
    "host_turns_ms": "host turns ms", "host_burst_ms": "host burst ms", "miss_cpu_ms": "miss cpu ms",
    "miss_turns_ms": "miss turns ms", "miss_burst_ms": "miss burst ms",
}  # fmt: skip


def measure(node: Node, engines: list[BareEngine], requests: int, seconds: float) -> dict[str, Any]:
    """One row, with these engines connected."""
    pid, count = node.server_pid, len(engines)
    begun_s = cpu_s(pid)
    time.sleep(seconds)
    row: dict[str, Any] = {
        "engines": count,
        "sessions": len(figures(node.root)["sessions"]),
        "idle_ms_per_s": round(1e3 * (cpu_s(pid) - begun_s) / seconds, 3),
    }
    for case in ("host", "miss"):
        walls, begun_s = [], cpu_s(pid)
        for number in range(requests):
            prompt = node.prompt(case, TOKENS, 1000 * count + number)
            walls.append(ask(engines[number % count], f"{case}{count}-{number}", case, prompt)["wall"])
        row[f"{case}_cpu_ms"] = round(1e3 * (cpu_s(pid) - begun_s) / requests, 3)
        row[f"{case}_turns_ms"] = round(1e3 * statistics.median(walls), 3)
        bursts = [burst(node, engines, case, number) for number in range(max(3, requests // count))]
        row[f"{case}_burst_ms"] = round(1e3 * statistics.median(bursts), 3)
    return row


def burst(node: Node, engines: list[BareEngine], case: str, number: int) -> float:
    """All engines ask at the same moment; seconds until the last one has its answer."""
    asked = []
    for place, engine in enumerate(engines):
        prompt = node.prompt(case, TOKENS, 1_000_000 + 1000 * number + place)
        asked.append((engine, engine.request(f"{case}-b{number}-{place}", prompt), len(prompt) - 1))
    begun_s = time.perf_counter()
    for engine, request, _ in asked:
        engine.scheduler.on_new_request(request)
    waiting = list(asked)
    while waiting:
        still = []
        for engine, request, whole in waiting:
            answer, _ = engine.scheduler.get_num_new_matched_tokens(request, 0)
            if answer is None:
                still.append((engine, request, whole))
            elif answer != (whole if case == "host" else 0):
                raise RuntimeError(f"wrong answer. case={case} observed={answer}")
        waiting = still
        time.sleep(0.0002)
    taken_s = time.perf_counter() - begun_s
    for engine, request, _ in asked:
        engine.finish(request)
    return taken_s


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--engines", type=int, nargs="+", default=[1, 2, 4, 8])
    options.add_argument("--chunks", type=int, default=100_000, help="of the server's index")
    options.add_argument("--requests", type=int, default=40, help="of each case and number of engines")
    options.add_argument("--seconds", type=float, default=10.0, help="of doing nothing")
    given = options.parse_args()
    rows: list[dict[str, Any]] = []
    others: list[BareEngine] = []
    with tempfile.TemporaryDirectory(prefix="tkv-", ignore_cleanup_errors=True) as work:
        node = Node(Path(work) / "cache", given.chunks, TOKENS)
        try:
            print("\n".join(table([], COLUMNS)), flush=True)
            for count in sorted(given.engines):
                while len(others) + 1 < count:
                    others.append(another(node))
                rows.append(measure(node, [node, *others], given.requests, given.seconds))
                print(table([rows[-1]], COLUMNS)[-1], flush=True)
        finally:
            for engine in others:
                engine.scheduler.shutdown()
                engine.worker.shutdown()
            node.close()
    finish("engines", rows, machine("engines", chunks=given.chunks, tokens=TOKENS), is_kept=given.keep)


def another(node: Node) -> BareEngine:
    """One more engine of the same model on the same server."""
    settings = {name: value for name, value in node.settings.items() if name != "storage_uri"}
    engine = BareEngine(node.root, settings, SHAPE)
    engine.open(blocks=64)
    return engine


if __name__ == "__main__":
    main()
