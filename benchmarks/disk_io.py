"""Blob files through O_DIRECT and through the page cache: throughput and CPU of writes and of cold and warm reads.

Run ``python benchmarks/disk_io.py``: prints a table, then the same as JSON on the last line. Works in a temporary
directory (about 400 MiB), whose files alone are dropped from the page cache between the runs.
"""

import argparse
import mmap
import os
import resource
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from bench_report import finish, machine

TOTAL_MIB = 384


def slot(size: int) -> memoryview:
    """An aligned buffer whose pages were touched, as a slot of the arena is."""
    buffer = mmap.mmap(-1, size)
    buffer.write(os.urandom(1 << 20) * (size >> 20))
    return memoryview(buffer)


def write(path: Path, buffer: memoryview, flags: int) -> None:
    temp = path.with_suffix(".tmp")
    descriptor = os.open(temp, os.O_CREAT | os.O_WRONLY | flags, 0o600)
    offset = 0
    while offset < len(buffer):
        offset += os.pwrite(descriptor, buffer[offset:], offset)
    os.close(descriptor)
    temp.replace(path)


def read(path: Path, buffer: memoryview, flags: int) -> None:
    descriptor = os.open(path, os.O_RDONLY | flags)
    offset = 0
    while offset < len(buffer):
        offset += os.preadv(descriptor, [buffer[offset:]], offset)
    os.close(descriptor)


def drop(paths: list[Path]) -> None:
    """Write back and forget the pages of these files."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def timed(
    work: Callable[[Path, memoryview, int], None], paths: list[Path], threads: int, flags: int
) -> dict[str, float]:
    """Do ``work`` on every path, shared out between threads."""
    size = TOTAL_MIB // len(paths) << 20
    buffers = [slot(size) for _ in range(threads)]

    def run(number: int) -> None:
        for path in paths[number::threads]:
            work(path, buffers[number], flags)

    workers = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    cpu, start = cpu_seconds(), time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    elapsed, used, gigabytes = time.perf_counter() - start, cpu_seconds() - cpu, size * len(paths) / 1e9
    return {"gb_per_s": round(gigabytes / elapsed, 2), "cpu_s_per_gb": round(used / gigabytes, 3)}


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure(directory: Path, mib: int, threads: int) -> dict[str, dict[str, float]]:
    """All five figures for one size and number of threads."""
    paths = [directory / f"{mib}-{number}" for number in range(TOTAL_MIB // mib)]
    results = {"write buffered": timed(write, paths, threads, 0)}
    drop(paths)
    for path in paths:
        path.unlink()
    results["write O_DIRECT"] = timed(write, paths, threads, os.O_DIRECT)
    results["read O_DIRECT"] = timed(read, paths, threads, os.O_DIRECT)
    results["read buffered cold"] = timed(read, paths, threads, 0)  # O_DIRECT left nothing in the page cache
    results["read buffered warm"] = timed(read, paths, threads, 0)
    for path in paths:
        path.unlink()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=None, help="where to make the temporary directory")
    options = parser.parse_args()
    results = []
    print(f"{'MiB':>4} {'threads':>7} {'run':>3}  {'':20} GB/s  CPU-s/GB")
    with tempfile.TemporaryDirectory(dir=options.directory) as temporary:
        for mib in (4, 16):
            for threads in (1, 4):
                for run in range(options.runs):
                    for name, figures in measure(Path(temporary), mib, threads).items():
                        results.append({"mib": mib, "threads": threads, "run": run, "what": name, **figures})
                        print(
                            f"{mib:4} {threads:7} {run:3}  {name:20} {figures['gb_per_s']:4}  {figures['cpu_s_per_gb']}"
                        )
    finish("disk_io", results, machine("disk_io"))


if __name__ == "__main__":
    main()
