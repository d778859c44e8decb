"""Store and load of the disk tier in all its wrappers, against raw files of the same size at the same concurrency.

    python benchmarks/disk_path.py [--runs N] [--mib SIZES] [--threads N] [--total-mib N] [--directory DIR] [--keep]

Sealed blobs of random bytes in aligned slots, as the arena's are; as many threads as the server loads with. ``store``
is ``put`` (name and header are checked, bytes reserved and accounted, temp file, rename), sealing apart (``seal``:
padding, header, hash). ``cold`` and ``warm`` are ``get_into`` with every byte verified: with the pages dropped before,
and with all of them in the page cache. The roofline does what a file needs and no more, with the same flags: a store
writes a temp file with O_DIRECT where that works and renames it; a load reads the whole file in one ``preadv``, and
``pieces`` in the pieces in which the tier reads it. The ways take turns within each run, on files of their own; a
ratio is the median of the runs' ratios. CPU seconds are those of this process, user and system.
"""

import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import bench_report as report

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY)]

from disk_io import cpu_seconds, drop, write  # noqa: E402  # beside this script

from tests.kit.storage.disk_probe import blob_path, open_disk  # noqa: E402
from tiered_kv.keys.chunk_record import ChunkRecord  # noqa: E402
from tiered_kv.metrics.recorder import Recorder  # noqa: E402
from tiered_kv.testing.blobs import SampleChain  # noqa: E402
from tiered_kv.tiers.disk.files import READ_PIECE_BYTES  # noqa: E402
from tiered_kv.tiers.open import wrapped  # noqa: E402

COLUMNS = {
    "mib": "MiB",
    "what": "what",
    "gb_per_s": "GB/s",
    "roofline_gb_per_s": "roofline",
    "pieces_gb_per_s": "by pieces",
    "ratio": "x roofline",
    "cpu_s_per_gb": "CPU s/GB",
    "roofline_cpu_s_per_gb": "roofline CPU",
}


class Place:
    """A tier and raw files side by side, with slots that hold the same blobs."""

    def __init__(self, root: Path, mib: int, blobs: int, threads: int) -> None:
        self.chain = SampleChain(payload_bytes=mib << 20)
        self.form = self.chain.form
        self.disk = open_disk(root, (blobs + 8) * (self.form.blob_bytes + (1 << 20)))
        opened = wrapped(self.disk, {self.chain.namespace: self.form}.get, Recorder(), time.monotonic)
        self.tier = opened.tier
        self.names = [self.chain.name(index) for index in range(blobs)]
        self.ours = [blob_path(root, name) for name in self.names]
        self.raw = [root / f"raw-{index}" for index in range(blobs)]
        self.slots = [memoryview(mmap.mmap(-1, self.form.blob_bytes)) for _ in range(blobs)]
        self.bytes = blobs * self.form.blob_bytes
        self.seal_s = 0.0
        noise = memoryview(os.urandom(self.form.blob_bytes))
        for index, slot in enumerate(self.slots):
            slot[:] = noise
            name = self.names[index]
            started_s = time.perf_counter()
            record = ChunkRecord(name.namespace, name.key, self.chain.key(index - 1), index, bytes(32))
            self.form.seal(slot, record, 0)
            self.seal_s += time.perf_counter() - started_s
        self._pool = ThreadPoolExecutor(threads)
        self._flags = os.O_DIRECT if self.disk.direct_io else 0

    def timed(self, work: Callable[[int], None]) -> tuple[float, float]:
        """Do it for every blob; seconds and CPU seconds."""
        cpu_s, started_s = cpu_seconds(), time.perf_counter()
        list(self._pool.map(work, range(len(self.slots))))
        return time.perf_counter() - started_s, cpu_seconds() - cpu_s

    def put(self, index: int) -> None:
        self.tier.put(self.names[index], self.slots[index])

    def put_raw(self, index: int) -> None:
        write(self.raw[index], self.slots[index], self._flags)

    def get(self, index: int) -> None:
        if not self.tier.get_into(self.names[index], self.slots[index]):
            raise RuntimeError("a blob is gone")

    def get_raw(self, index: int, piece_bytes: int | None = None) -> None:
        slot = self.slots[index]
        descriptor = os.open(self.raw[index], os.O_RDONLY)
        offset = 0
        while offset < len(slot):
            end = None if piece_bytes is None else offset + piece_bytes
            offset += os.preadv(descriptor, [slot[offset:end]], offset)
        os.close(descriptor)

    def remove(self) -> None:
        for name, path in zip(self.names, self.raw, strict=True):
            self.tier.delete(name)
            path.unlink(missing_ok=True)

    def close(self) -> None:
        self._pool.shutdown()
        self.tier.close()


def measure(root: Path, mib: int, total_mib: int, threads: int, runs: int) -> list[dict[str, Any]]:
    """Rows for one size of blobs."""
    place = Place(root, mib, max(threads, total_mib // mib), threads)
    stores: dict[str, Callable[[int], None]] = {"ours": place.put, "raw": place.put_raw}
    loads: dict[str, Callable[[int], None]] = {
        "ours": place.get,
        "raw": place.get_raw,
        "pieces": lambda index: place.get_raw(index, READ_PIECE_BYTES),
    }
    taken: dict[str, list[dict[str, tuple[float, float]]]] = {"store": [], "cold": [], "warm": []}
    for run in range(runs + 1):
        place.remove()
        taken["store"].append({way: place.timed(stores[way]) for way in turned(list(stores), run)})
        cold = {}
        for way in turned(list(loads), run):
            drop([*place.ours, *place.raw])
            cold[way] = place.timed(loads[way])
        taken["cold"].append(cold)
        for way in ("ours", "raw"):
            place.timed(loads[way])  # O_DIRECT left nothing in the page cache
        taken["warm"].append({way: place.timed(loads[way]) for way in turned(list(loads), run)})
    rows = [row(what, mib, place, samples[1:]) for what, samples in taken.items()]  # the first run warms up
    rows.append({"mib": mib, "what": "seal", "gb_per_s": round(place.bytes / place.seal_s / 1e9, 2)})
    place.close()
    return rows


def turned(ways: list[str], run: int) -> list[str]:
    return ways[run % len(ways) :] + ways[: run % len(ways)]


def row(what: str, mib: int, place: Place, samples: list[dict[str, tuple[float, float]]]) -> dict[str, Any]:
    def speed(way: str) -> float | None:
        times = [sample[way][0] for sample in samples if way in sample]
        return round(place.bytes / statistics.median(times) / 1e9, 2) if times else None

    def cpu(way: str) -> float:
        return round(statistics.median(sample[way][1] for sample in samples) / place.bytes * 1e9, 3)

    return {
        "mib": mib,
        "what": what,
        "gb_per_s": speed("ours"),
        "roofline_gb_per_s": speed("raw"),
        "pieces_gb_per_s": speed("pieces"),
        "ratio": round(statistics.median(sample["raw"][0] / sample["ours"][0] for sample in samples), 3),
        "cpu_s_per_gb": cpu("ours"),
        "roofline_cpu_s_per_gb": cpu("raw"),
    }


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--mib", type=int, nargs="+", default=[2, 32])
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--total-mib", type=int, default=512)
    parser.add_argument("--directory", type=Path, default=None, help="where to make the temporary directory")
    options = parser.parse_args()
    rows = []
    for mib in options.mib:
        with tempfile.TemporaryDirectory(prefix="tkv-", dir=options.directory) as root:
            rows += measure(Path(root), mib, options.total_mib, options.threads, options.runs)
    print("\n".join(report.table(rows, COLUMNS)))
    report.finish("disk_path", rows, report.machine("disk_path", threads=options.threads), is_kept=options.keep)


if __name__ == "__main__":
    main()
