"""Run the cache simulation: many seeds, one schedule each, in as many processes as there are cores.

A schedule is the cache's own engine in virtual time, with faults, judged by a dictionary (docs/simulation.md). Prints a
table, writes build/simulate.json, and exits with 1 when a schedule failed; a failure is shown with its seed, its plan,
its last events and the command that repeats it.

Usage: python scripts/simulate.py [--first N] [--seeds N] [--processes N] [--failures N]
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.sim.cache.run import Result, SimulationFailed, simulate  # noqa: E402

REPORT = ROOT / "build" / "simulate.json"
BATCH = 20
SHOWN_KINDS = ("requests", "asked", "hits", "stores")


@dataclass(slots=True)
class Batch:
    """What some seeds did."""

    digests: dict[int, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, object]] = field(default_factory=list)


def run_batch(seeds: range) -> Batch:
    """Run some seeds, one after the other."""
    batch = Batch()
    for seed in seeds:
        try:
            result = simulate(seed)
        except SimulationFailed as exc:
            batch.failures.append({"seed": seed, "reason": exc.reason, "again": exc.again, "text": str(exc)})
        else:
            batch.digests[seed] = result.digest
            batch.counts.update(_sums(result))
    return batch


def _sums(result: Result) -> Counter[str]:
    whole = {
        "events": result.events,
        "virtual_ms": int(1000 * result.virtual_s),
        "bytes_compared": result.bytes_compared,
    }
    return Counter(whole) + result.counts


def use_one_core(number: "Synchronized[int]") -> None:
    """Keep to one core: a schedule hands a baton between threads, and between cores that takes four times as long."""
    cores = sorted(os.sched_getaffinity(0))
    with number.get_lock():
        number.value += 1
        os.sched_setaffinity(0, {cores[number.value % len(cores)]})


def batches(first: int, count: int) -> Iterator[range]:
    """All seeds, a few at a time."""
    for start in range(first, first + count, BATCH):
        yield range(start, min(start + BATCH, first + count))


def run(first: int, count: int, processes: int, failures_max: int) -> tuple[Batch, float]:
    """Run all seeds, or until so many have failed; returns what they did and the seconds it took."""
    total, began = Batch(), time.monotonic()
    context = multiprocessing.get_context("spawn")
    number = context.Value("i", -1)
    with context.Pool(processes, use_one_core, (number,)) as pool:
        for batch in pool.imap_unordered(run_batch, batches(first, count)):
            total.digests.update(batch.digests)
            total.counts.update(batch.counts)
            for failure in batch.failures:
                print(failure["text"], file=sys.stderr, flush=True)
            total.failures += batch.failures
            if len(total.failures) >= failures_max:
                break
    return total, time.monotonic() - began


def report(total: Batch, first: int, seconds: float) -> dict[str, object]:
    """The report as it is written."""
    done = len(total.digests) + len(total.failures)
    trace = "".join(total.digests[seed] for seed in sorted(total.digests))

    def kinds(prefix: str) -> dict[str, int]:
        return {k.removeprefix(prefix): n for k, n in sorted(total.counts.items()) if k.startswith(prefix)}

    return {
        "first": first,
        "schedules": done,
        "failed": len(total.failures),
        "seconds": round(seconds, 1),
        "schedules_per_minute": round(60 * done / seconds),
        "trace_sha256": hashlib.sha256(trace.encode()).hexdigest(),
        **{name: total.counts[name] for name in ("events", "virtual_ms", "bytes_compared", *SHOWN_KINDS)},
        "faults": kinds("fault "),
        "mishaps": kinds("mishap "),
        "engine": kinds("engine "),
        "failures": [{k: v for k, v in failure.items() if k != "text"} for failure in total.failures],
    }


def show(found: dict[str, object]) -> None:
    """The report, to be read."""
    for name in ("schedules", "failed", "schedules_per_minute", "events", "bytes_compared", *SHOWN_KINDS):
        print(f"{name:24} {found[name]:>16,}")
    for group in ("faults", "mishaps"):
        counts = found[group]
        assert isinstance(counts, dict)
        print(f"-- {group}")
        for name, count in counts.items():
            print(f"{name:24} {count:>16,}")
    failures = found["failures"]
    assert isinstance(failures, list)
    for failure in failures:
        print(f"failed: seed {failure['seed']}: {failure['reason']}\n  again: {failure['again']}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--first", type=int, default=int(os.environ.get("TIERED_KV_SEED", "0")), help="the first seed")
    parser.add_argument("--seeds", type=int, default=int(os.environ.get("TIERED_KV_SCHEDULES", "1000")))
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--failures", type=int, default=5, metavar="N", help="stop after N failures")
    arguments = parser.parse_args()
    total, seconds = run(arguments.first, arguments.seeds, arguments.processes, arguments.failures)
    found = report(total, arguments.first, seconds)
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(json.dumps(found, indent=2) + "\n")
    show(found)
    print(f"written: {REPORT.relative_to(ROOT)}")
    return 1 if total.failures else 0


if __name__ == "__main__":
    sys.exit(main())
