"""Soak the cache: random traffic through servers and full tiers, with kills and faults; then nothing may be left.

    python scripts/soak.py [--minutes M] [--seed N] [--store auto|s3|directory]

Two machines (directories in a file system of their own where mounting is allowed) with three engines each share one
object store: a real S3 server behind the fault proxy of the tests, or a shared directory where there is none. Engines
draw prompts of Zipf-like popularity that share beginnings, compare every byte they load, and hold leases. Servers and
engines are killed, stopped, damaged, filled up and operated on, drawn from the seed; samples are taken every second.
What is checked, and how "flat" is judged: tests/soak/run.py and judgement.py.

Prints a table and writes build/soak.json. Ends with 1 when a check fails.
"""

import argparse
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "scripts")]

from prove import git, is_dirty, machine  # noqa: E402
from s3_service import NoServerError  # noqa: E402

from tests.kit.faults.proxy import FaultProxy  # noqa: E402
from tests.kit.s3 import open_s3  # noqa: E402
from tests.soak.faults import Pace  # noqa: E402
from tests.soak.run import Plan, Soak  # noqa: E402
from tests.soak.stores import DirectoryStore, S3Store, Store  # noqa: E402

RESULT = REPOSITORY / "build" / "soak.json"
ROWS = 60
"""Of the samples, kept in the report."""

RECOVERY_S = 30.0
AGAIN_S = 30.0
PACE = Pace(machine_s=3.0, store_s=12.0, operator_s=12.0)


@contextmanager
def opened(wanted: str, work: Path) -> Iterator[Store]:
    """The object store: the first that there is, or the one that is wanted.

    Raises:
        NoServerError: S3 is wanted, and there is no server.
    """
    with ExitStack() as at_end:
        if wanted != "directory":
            try:
                s3 = at_end.enter_context(open_s3("soak"))
            except NoServerError as exc:
                if wanted == "s3":
                    raise
                print(f"soak: no S3 server, a shared directory instead: {exc}")
            else:
                yield S3Store(s3, at_end.enter_context(FaultProxy(s3.endpoint_url)))
                return
        yield DirectoryStore(work / "bucket")


def report(soak: Soak, options: argparse.Namespace, started: datetime, seconds: float) -> dict[str, Any]:
    counted = soak.counts()
    return {
        "command": shlex.join(["python", "scripts/soak.py", *sys.argv[1:]]),
        "commit": git("rev-parse", "HEAD"),
        "is_dirty": is_dirty(),
        "machine": machine(),
        "started": started.isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        "seed": options.seed,
        "minutes": options.minutes,
        "store": type(soak.store).__name__,
        "has_file_systems": all(node.is_mounted for node in soak.nodes),
        "operations": dict(sorted(counted.items())),
        "faults": dict(sorted((+soak.faults).items())),
        "wrong_chunks": counted["wrong_chunks"],
        "verdicts": soak.verdicts,
        "trends": {who: asdict(trend) for who, trend in soak.trends.items()},
        "bucket": soak.bucket.thinned(ROWS),
        "samples": {name: series.thinned(ROWS) for name, series in soak.series.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0, help="of traffic with faults and of what follows it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--store", choices=("auto", "s3", "directory"), default="auto")
    options = parser.parse_args()
    started, start_s = datetime.now(UTC), time.monotonic()
    faults_s = max(10.0, 60 * options.minutes - RECOVERY_S - AGAIN_S)
    print(f"soak: seed={options.seed} minutes={options.minutes:g}")
    with tempfile.TemporaryDirectory(prefix="tkv-", ignore_cleanup_errors=True) as directory:
        work = Path(directory)
        with opened(options.store, work) as store:
            soak = Soak(Plan(options.seed, faults_s, RECOVERY_S, AGAIN_S, PACE), store, work, say)
            try:
                soak.run()
            finally:
                RESULT.parent.mkdir(exist_ok=True)
                found = report(soak, options, started, time.monotonic() - start_s)
                RESULT.write_text(json.dumps(found, separators=(",", ":")) + "\n")
                keep_logs(work)
    print("\n".join(table(found)))
    failed = [check for check, verdict in soak.verdicts.items() if not verdict["holds"]]
    print(f"soak: {'failed: ' + '; '.join(failed) if failed else 'every check holds'}. report=build/soak.json")
    return 1 if failed else 0


def say(line: str) -> None:
    print(line, flush=True)


def keep_logs(work: Path) -> None:
    """For whoever looks into a failure."""
    for log in work.glob("*/*.log*"):
        target = RESULT.parent / "soak-logs" / log.relative_to(work)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(log.read_bytes())


def table(found: dict[str, Any]) -> list[str]:
    lines = ["", "| fault or verb | times |", "|---|---|"]
    lines += [f"| {name} | {count} |" for name, count in found["faults"].items()]
    lines += ["", "| check | holds | seen |", "|---|---|---|"]
    for check, verdict in found["verdicts"].items():
        lines.append(f"| {check} | {'yes' if verdict['holds'] else 'NO'} | {verdict['seen']} |")
    return [*lines, ""]


if __name__ == "__main__":
    sys.exit(main())
