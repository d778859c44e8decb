"""What verifying every blob costs: reads of the disk tier with and without the verifying wrapper, in the same run.

    python benchmarks/verification.py [--runs N] [--mib SIZES] [--directory DIR]

Blobs of 4 and 16 MiB (256 tokens of a 1B and of an 8B model), read through the page cache as the server reads them:
``cold`` after their pages were dropped, as after a restart; ``warm`` from the page cache, where nothing is left of the
disk. ``raw`` is the tier alone, ``verified`` the tier in its wrapper, which hashes each piece as it is read; ``plain``
reads the whole file in one call and without a tier; ``after`` does so and then checks the whole blob. The four take
turns, blob by blob. ``hash`` is the check alone, on a blob that was just read; ``memcpy`` the copy of as many bytes.
The share is the verification's part of a load's time: (verified - raw) / verified. Prints a table, then JSON.
"""

import argparse
import json
import mmap
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bench_report import machine

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY)]

from disk_io import drop, read  # noqa: E402  # beside this script

from tests.kit.storage.disk_probe import blob_path, open_disk  # noqa: E402
from tiered_kv.testing.blobs import SampleChain  # noqa: E402
from tiered_kv.tiers.wrappers.verified import VerifiedTier  # noqa: E402

BLOBS = 12
COLUMNS = ("plain", "after", "raw", "verified", "hash", "memcpy")


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

    def read_and_verify(index: int) -> None:
        read(paths[index], slot, 0)
        chain.form.verify(slot, names[index].key, None)

    ways: dict[str, Callable[[int], object]] = {
        "raw": lambda index: disk.get_into(names[index], slot),
        "verified": lambda index: tier.get_into(names[index], slot),
        "plain": lambda index: read(paths[index], slot, 0),
        "after": read_and_verify,
    }
    for state in ("cold", "warm"):
        taken: dict[str, list[float]] = {what: [] for what in (*ways, "hash", "memcpy")}
        for run in range(runs):
            if state == "cold":
                drop(paths)
            for index, name in enumerate(names):
                way = list(ways)[(run + index) % len(ways)]
                taken[way].append(timed(partial(ways[way], index)))
                taken["hash"].append(timed(partial(chain.form.verify, slot, name.key, None)))
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
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--mib", type=int, nargs="+", default=[4, 16, 32])
    parser.add_argument("--directory", type=Path, default=None, help="where to make the temporary directory")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print("| MiB | pages | " + " | ".join(f"{what} GB/s" for what in COLUMNS) + " | share |\n" + "|---" * 9 + "|")
    for mib in options.mib:
        with tempfile.TemporaryDirectory(prefix="tkv-", dir=options.directory) as root:
            for one in measure(Path(root), mib, options.runs):
                rows.append(one)
                speeds = " | ".join(str(one[f"{what}_gb_per_s"]) for what in COLUMNS)
                print(f"| {one['mib']} | {one['pages']} | {speeds} | {one['share']:.1%} |", flush=True)
    print(json.dumps({"machine": machine("verification"), "results": rows}))


if __name__ == "__main__":
    main()
