"""What verifying every blob costs: reads of the disk tier with and without the verifying wrapper, in the same run.

    python benchmarks/verification.py [--runs N] [--mib SIZES] [--directory DIR]

Blobs of 4 and 16 MiB (256 tokens of a 1B and of an 8B model), read through the page cache as the server reads them:
``cold`` after their pages were dropped, as after a restart; ``warm`` from the page cache, where nothing is left of the
disk. ``raw`` is the tier alone, ``verified`` the tier in its wrapper, alternately, blob by blob; ``hash`` is the header
and payload check alone, on a blob that was just read; ``memcpy`` the copy of as many bytes. The share is the
verification's part of a load's time: (verified - raw) / verified. Prints a table, then JSON on the last line.
"""

import argparse
import json
import mmap
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY / "tests" / "support")]

from disk_io import drop  # noqa: E402  # beside this script
from disk_probe import blob_path, open_disk  # noqa: E402  # shared with the tests

from tiered_kv.testing.blobs import SampleChain  # noqa: E402
from tiered_kv.tiers.wrappers.verified import VerifiedTier  # noqa: E402

BLOBS = 12


def timed(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def measure(root: Path, mib: int, runs: int) -> list[dict[str, Any]]:
    """Rows for cold and warm reads of one size."""
    chain = SampleChain(payload_bytes=mib << 20)
    disk = open_disk(root, (BLOBS + 4) * (mib << 20) + (16 << 20))
    tier = VerifiedTier(disk, {chain.namespace: chain.form}.get)
    size = chain.form.blob_bytes
    slot, spare = memoryview(mmap.mmap(-1, size)), bytearray(size)
    names = []
    for index in range(BLOBS):
        slot[:] = chain.blob(index).data
        names.append(chain.name(index))
        disk.put(names[-1], slot)
    paths = [blob_path(root, name) for name in names]
    rows = []
    for state in ("cold", "warm"):
        taken: dict[str, list[float]] = {"raw": [], "verified": [], "hash": [], "memcpy": []}
        for run in range(runs):
            if state == "cold":
                drop(paths)
            for number, name in enumerate(names):
                kind, reader = (("raw", disk), ("verified", tier))[(run + number) % 2]
                taken[kind].append(timed(lambda reader=reader, name=name: reader.get_into(name, slot)))
                taken["hash"].append(timed(lambda name=name: chain.form.verify(slot, name.key, None)))
                taken["memcpy"].append(timed(lambda: spare.__setitem__(slice(None), slot)))
        rows.append(row(mib, state, {what: statistics.median(seconds) for what, seconds in taken.items()}, size))
    disk.close()
    return rows


def row(mib: int, state: str, medians: dict[str, float], size: int) -> dict[str, Any]:
    share = 1 - medians["raw"] / medians["verified"]
    return {
        "mib": mib,
        "pages": state,
        **{f"{what}_ms": round(1e3 * seconds, 3) for what, seconds in medians.items()},
        **{f"{what}_gb_per_s": round(size / seconds / 1e9, 2) for what, seconds in medians.items()},
        "share": round(share, 3),
        "hash_share": round(medians["hash"] / medians["verified"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--mib", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--directory", type=Path, default=None, help="where to make the temporary directory")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print(
        "| MiB | pages | raw GB/s | verified GB/s | hash GB/s | memcpy GB/s | share of the load |\n" + "|---" * 7 + "|"
    )
    for mib in options.mib:
        with tempfile.TemporaryDirectory(prefix="tkv-", dir=options.directory) as root:
            for one in measure(Path(root), mib, options.runs):
                rows.append(one)
                print(
                    f"| {one['mib']} | {one['pages']} | {one['raw_gb_per_s']} | {one['verified_gb_per_s']} | "
                    f"{one['hash_gb_per_s']} | {one['memcpy_gb_per_s']} | {one['share']:.1%} |",
                    flush=True,
                )
    machine = {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load": round(os.getloadavg()[0], 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "command": shlex.join(["python", "benchmarks/verification.py", *sys.argv[1:]]),
    }
    print(json.dumps({"machine": machine, "results": rows}))


if __name__ == "__main__":
    main()
