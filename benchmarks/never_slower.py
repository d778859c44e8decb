"""Whether a slow tier ever makes a request slower than no cache: the time to the first token over a sweep of media.

    python benchmarks/never_slower.py [--repeats N] [--tokens N] [--tiers disk object] [--rates ...] [--latencies ...]
        [--keep]

A real vLLM on CPU (the demo's model, its engine core in a process of its own) on a cache server whose disk, or object
store, has the latency and the bandwidth of a cell (``throttled_server.py``; the bandwidth is shared by all operations,
the latency is paid by each). In every cell, ``--repeats`` times: a new prompt is stored while the medium is fast, host
memory is emptied, vLLM's prefix cache too; then the medium takes the cell's speed and the prompt is asked again. Beside
it, alternating, a prompt that nobody saw is computed, on the same engine, told not to ask the cache: the roofline. What
the server knows of the medium's speed is from the cell before, so the first request of a cell meets a medium that has
just changed; it is counted like the others and shown apart.

The promise: TTFT at most 1.05 x recomputing + 10 ms in every cell, by medians. The engine computes on one core, so that
the other is left for the cache and the bucket's gateway, as a GPU would leave it; on both, computing alone scatters by
a tenth. A cell that misses the bound is measured twice more, and all of its pairs count. Prints a table, then JSON.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import bench_report as report

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "scripts")]

from end_to_end import evict  # noqa: E402  # beside this script
from serving import ServedEngine, Timed, build_model_once, prompts, served, warm_up  # noqa: E402

from tests.kit.s3 import open_s3  # noqa: E402
from tests.kit.server.object_nodes import s3_place  # noqa: E402
from tests.kit.server.probe import wait_written  # noqa: E402

RATES_MB = (10.0, 50.0, None)
LATENCIES_S = (0.001, 0.02, 0.2, 2.0)
FACTOR, ROOM_MS = 1.05, 10.0
ROUNDS = 3
HOST_BYTES = "1GiB"


@contextmanager
def server(settings: dict[str, Any], control: Path, work: Path) -> Iterator[None]:
    """A throttled server, as long as the ``with`` block."""
    given = work / "settings.json"
    given.write_text(json.dumps(settings))
    with (work / "server.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("throttled_server.py")), str(given), str(control)],
            stdout=subprocess.PIPE,
            stderr=log,
        )
        assert process.stdout is not None
        try:
            if process.stdout.readline().strip() != b"ready":
                raise RuntimeError(f"the server did not start. log={log.name}")
            yield
        finally:
            process.terminate()
            process.wait(60)


class Sweep:
    """One engine over one server, and the cells that were measured."""

    def __init__(self, engine: ServedEngine, root: Path, control: Path, tokens: int) -> None:
        self._engine, self._root, self._control, self._tokens = engine, root, control, tokens
        self._seeds = count(10)
        self.order({})

    def order(self, speeds: dict[str, dict[str, float | None]]) -> None:
        """Say how fast the media are from now on."""
        self._control.write_text(json.dumps(speeds))

    def prompt(self) -> list[int]:
        return prompts(next(self._seeds), 1, self._tokens)[0]

    def cell(self, tier: str, rate_mb: float | None, latency_s: float, repeats: int) -> dict[str, Any]:
        """Ask for prompts that only this tier has, and for new ones."""
        speed = {"latency_s": latency_s, "bytes_per_s": None if rate_mb is None else rate_mb * 1e6}
        hits: list[Timed] = []
        computed: list[float] = []
        while len(hits) < ROUNDS * repeats and not (hits and _holds(hits, computed)):
            self._measure(tier, speed, repeats, hits, computed)
        recompute_ms = statistics.median(computed)
        times = [1e3 * hit.ttft_s for hit in hits]
        return {
            "tier": tier,
            "rate_mb_per_s": rate_mb,
            "latency_s": latency_s,
            "pairs": len(hits),
            "recompute_ms": round(recompute_ms, 1),
            "ttft_ms": round(statistics.median(times), 1),
            "first_ms": round(times[0], 1),
            "most_ms": round(max(times), 1),
            "ratio": round(statistics.median(times) / recompute_ms, 3),
            "cached_tokens": [hit.cached_tokens for hit in hits],
            "holds": _holds(hits, computed),
        }

    def _measure(
        self, tier: str, speed: dict[str, float | None], repeats: int, hits: list[Timed], computed: list[float]
    ) -> None:
        """``repeats`` pairs; the results are added to ``hits`` and, in milliseconds, to ``computed``."""
        for number in range(repeats):
            stored = self.prompt()
            self.order({})
            self._engine.ttft(stored)
            wait_written(self._root)
            self._engine.forget()
            evict(self._root, "host")
            if tier == "object":
                evict(self._root, "disk")
            self.order({tier: speed})
            for which in ("hit", "computed") if number % 2 else ("computed", "hit"):
                if which == "hit":
                    hits.append(self._engine.ttft(stored))
                else:
                    computed.append(1e3 * self._engine.ttft(self.prompt(), skip_load=True).ttft_s)


def _holds(hits: list[Timed], computed: list[float]) -> bool:
    return statistics.median(1e3 * hit.ttft_s for hit in hits) <= FACTOR * statistics.median(computed) + ROOM_MS


def main() -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=544)
    parser.add_argument("--tiers", nargs="+", default=["disk", "object"], choices=["disk", "object"])
    parser.add_argument("--rates", nargs="+", type=float, default=None, help="MB/s; 0: unlimited")
    parser.add_argument("--latencies", nargs="+", type=float, default=list(LATENCIES_S), help="seconds")
    options = parser.parse_args()
    rates = RATES_MB if options.rates is None else [rate or None for rate in options.rates]
    build_model_once()
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = []
    with tempfile.TemporaryDirectory(prefix="tkv-", ignore_cleanup_errors=True) as directory, open_s3("bench") as s3:
        work = Path(directory)
        root, control = work / "cache", work / "control.json"
        control.write_text("{}")
        place = s3_place(s3, "never-slower")
        settings = {"storage_uri": place.uri, "storage_options": place.options, "disk_path": str(root)}
        settings |= {"disk_bytes": "4GiB", "host_bytes": HOST_BYTES}
        with server(settings, control, work), served(work / "engine.log", settings) as engine:
            sweep = Sweep(engine, root, control, options.tokens)
            warm_up(engine, options.tokens)
            print("| tier | MB/s | latency ms | recompute ms | TTFT ms | first | worst | x recompute | tokens loaded |")
            print("|---" * 9 + "|")
            for tier in options.tiers:
                for rate_mb in rates:
                    for latency_s in options.latencies:
                        row = sweep.cell(tier, rate_mb, latency_s, options.repeats)
                        rows.append(row)
                        print(
                            f"| {tier} | {rate_mb or 'all'} | {1e3 * latency_s:g} | {row['recompute_ms']} | "
                            f"{row['ttft_ms']} | {row['first_ms']} | {row['most_ms']} | {row['ratio']} | "
                            f"{statistics.median(row['cached_tokens']):g} |{'' if row['holds'] else ' BROKEN'}",
                            flush=True,
                        )
            sweep.order({})
    facts = report.machine("never_slower", prompt_tokens=options.tokens, repeats=options.repeats)
    report.finish("never_slower", rows, facts, is_kept=options.keep)
    return 0 if all(row["holds"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
