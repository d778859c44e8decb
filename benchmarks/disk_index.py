"""Start-up of a disk tier with many blobs: with its index, without, and with a damaged one.

Run ``python benchmarks/disk_index.py --blobs 100000``: prints a table, then the same as JSON on the last line. Makes
sparse files of 8 KiB with real headers in a temporary directory, which it removes. Every start-up is a process of its
own, in which only the open is timed; the page cache is warm (making the files warmed it).
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench_report import finish, machine

from tiered_kv.keys.naming import relative_path
from tiered_kv.testing.blobs import SampleChain
from tiered_kv.tiers.disk.index import BytesOnlyDisk, DiskIndex
from tiered_kv.tiers.disk.tier import DiskTier

CAPACITY_BYTES = 1 << 40

OPEN = """
import json, sys, time
from pathlib import Path
from tiered_kv.tiers.disk.tier import DiskTier
start = time.perf_counter()
tier = DiskTier(Path(sys.argv[1]), 1 << 40, min_free_bytes=0)
opened = time.perf_counter()
blobs = sum(1 for _ in tier.scan())
scanned = time.perf_counter()
tier.close()
closed = time.perf_counter()
import resource
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"open_s": opened - start, "scan_s": scanned - opened, "close_s": closed - scanned,
                  "blobs": blobs, "peak_rss_mib": peak // 1024}))
"""


def make_blobs(root: Path, count: int) -> None:
    """Write ``count`` sparse files with the headers of one chain."""
    chain = SampleChain(payload_bytes=4096)
    for index in range(count):
        blob = chain.blob(index)
        path = root / "blobs" / relative_path(blob.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        os.write(descriptor, blob.data[:4096])
        os.ftruncate(descriptor, len(blob.data))
        os.close(descriptor)


def open_once(root: Path) -> dict[str, float]:
    """Open and close the tier in a new process."""
    done = subprocess.run([sys.executable, "-c", OPEN, str(root)], check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


def best(measure: Callable[[], dict[str, float]], runs: int) -> dict[str, float]:
    """Every figure's smallest value: what disturbed a run was not the code."""
    results = [measure() for _ in range(runs)]
    return {key: round(min(result[key] for result in results), 4) for key in results[0]}


def without_index(root: Path) -> dict[str, float]:
    shutil.rmtree(root / "index")
    return open_once(root)


def with_damaged_index(root: Path) -> dict[str, float]:
    database = root / "index" / "cache.db"
    with database.open("r+b") as file:
        file.seek(database.stat().st_size // 2)
        file.write(os.urandom(64 << 10))
    return open_once(root)


def flush_times(root: Path) -> dict[str, float]:
    """What persisting costs: every shard, one shard, nothing."""
    tier = DiskTier(root, CAPACITY_BYTES, min_free_bytes=0)
    names = [info.name for info in tier.scan()]
    result = {}
    for label, used in (("all_shards", names), ("one_blob", names[:1]), ("nothing", [])):
        tier.record_use(used)
        start = time.perf_counter()
        tier.flush()
        result[f"flush_{label}_s"] = round(time.perf_counter() - start, 4)
    tier.close()
    return result


def row_per_blob(root: Path, count: int) -> dict[str, float]:
    """The rejected layout: one diskcache row per blob, written in one transaction, read back one by one."""
    import diskcache

    directory = root / "row-per-blob"
    row = b"x" * 84
    cache = diskcache.Cache(
        str(directory), disk=BytesOnlyDisk, eviction_policy="none", cull_limit=0, sqlite_synchronous=0
    )
    start = time.perf_counter()
    with cache.transact():
        for number in range(count):
            cache.set(f"{number:032x}", row)
    written = time.perf_counter()
    for key in list(cache.iterkeys()):
        cache.get(key)
    read = time.perf_counter()
    cache.close()
    size = (directory / "cache.db").stat().st_size
    return {
        "write_all_s": round(written - start, 4),
        "load_s": round(read - written, 4),
        "database_mib": round(size / 2**20, 1),
    }


def index_alone(root: Path) -> dict[str, float]:
    """The chosen layout without the directory walk."""
    index = DiskIndex(root)
    start = time.perf_counter()
    shards = index.load()
    loaded = time.perf_counter() - start
    size = (root / "index" / "cache.db").stat().st_size
    return {"load_s": round(loaded, 4), "shards": len(shards), "database_mib": round(size / 2**20, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blobs", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=None, help="where to make the temporary directory")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as temporary:
        root = Path(temporary)
        start = time.perf_counter()
        make_blobs(root, options.blobs)
        print(f"made {options.blobs} blobs in {time.perf_counter() - start:.1f} s", file=sys.stderr)
        first = open_once(root)
        results = {
            "first start, no index": first,
            "start with index": best(lambda: open_once(root), options.runs),
            "start without index": best(lambda: without_index(root), options.runs),
            "start with damaged index": best(lambda: with_damaged_index(root), options.runs),
            "flush": flush_times(root),
            "index alone": best(lambda: index_alone(root), options.runs),
            "rejected: row per blob": row_per_blob(root, options.blobs),
        }
    for name, figures in results.items():
        print(f"{name:28}", "  ".join(f"{key}={value:g}" for key, value in figures.items()))
    finish("disk_index", results, machine("disk_index", blobs=options.blobs))


if __name__ == "__main__":
    main()
