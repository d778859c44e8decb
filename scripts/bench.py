"""Run benchmarks, one after the other, each in a process of its own, and draw their charts.

    python scripts/bench.py [--keep] [--list] [SECTION ...]

Without a name: the sections of docs/performance.md, about 15 minutes on 2 cores (each was timed by itself). Each
prints its table and writes its JSON to build/; with ``--keep`` also to docs/figures/, and the charts are drawn anew.
Every script in benchmarks/ can be run by itself, too, and has options of its own.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
BENCHMARKS = REPOSITORY / "benchmarks"

PERFORMANCE: dict[str, tuple[str, ...]] = {
    "host_path": ("--runs", "5"),
    "disk_path": (),
    "lookup": (),
    "end_to_end": ("--repeats", "5", "--pairs", "10"),
    "never_slower": ("--repeats", "2", "--latencies", "0.001", "0.2", "2"),
    "trace": ("--only", "policies"),
    "agents": ("--trace", "tests/data/agent_sessions_small.jsonl", "--sizes", "500k,500k,1M", "1M,4M,16M,bucket"),
    "agents_engine": ("--turns", "8"),
}
"""What docs/performance.md shows, with arguments meant to keep all of it under 15 minutes."""

OTHERS = (
    *("cli", "disk_faults", "disk_index", "disk_io", "engines", "frozen_server", "gpu_engine", "miss_ratio", "naming"),
    *("object_faults", "object_store", "offloading", "pauses", "peer_engines", "peer_questions", "peers", "prefetch"),
    *("rivals", "scale", "session_end", "timeline", "transfer", "verification"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help="see --list")
    parser.add_argument("--keep", action="store_true", help="keep results in docs/figures/ and draw docs/charts/")
    parser.add_argument("--list", action="store_true", help="name all sections and end")
    options = parser.parse_args()
    known = PERFORMANCE | dict.fromkeys(OTHERS, ())
    if options.list:
        print("\n".join(known))
        return 0
    if unknown := sorted(set(options.sections) - set(known)):
        parser.error(f"unknown section: {', '.join(unknown)}. known: {', '.join(known)}")
    failed = []
    for name in options.sections or PERFORMANCE:
        keep = ("--keep",) if options.keep and name in PERFORMANCE else ()
        started_s = time.monotonic()
        print(f"== {name}", flush=True)
        command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *known[name], *keep]
        if subprocess.run(command, cwd=REPOSITORY, check=False).returncode:
            failed.append(name)
        print(f"== {name}: {time.monotonic() - started_s:.0f} s", flush=True)
    if options.keep:
        subprocess.run([sys.executable, str(BENCHMARKS / "charts.py")], cwd=REPOSITORY, check=True)
    if failed:
        print(f"bench: failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
