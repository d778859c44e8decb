"""How long the command line takes: to say its help, and to look at a directory of many chunks.

Run ``python benchmarks/cli.py --chunks 100000``: prints a table, then the same as JSON on the last line. Makes sparse
files of 8 KiB with real headers in a temporary directory, which it removes: three models, prompts that share their
beginnings, chains of up to 10,000 chunks. The index is what a server leaves behind: the tier is opened, some blobs are
used, it is closed. Every figure is of a whole process, from start to end, its output into a file, and the median
of some runs; the page cache is warm. ``without index`` is the same directory with its index removed, so that every
header is read.
"""

import argparse
import hashlib
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bench_report import finish, machine

from tiered_kv.chunks.geometry import ChunkGeometry, LayerPage
from tiered_kv.chunks.header import BlobFormat
from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.keys.namespace import REQUIRED_FIELDS, Namespace
from tiered_kv.keys.naming import BlobName, relative_path

MODELS = 3
DEEP = 10_000
"""Chunks of the one long chain, at most a tenth of all."""

SHARED, OWN = 24, 40
"""Chunks that the prompts of an agent share, and chunks that are a prompt's own."""

PROMPTS_OF_AGENT = 20
HELP_RUNS = 10

USE = """
import sys
from pathlib import Path
from tiered_kv.tiers.disk.tier import DiskTier
tier = DiskTier(Path(sys.argv[1]), 1 << 40, min_free_bytes=0)
names = [info.name for info in tier.scan()]
tier.record_use(names[: len(names) // 100])
tier.close()
"""


class Figures(NamedTuple):
    """Of one process."""

    wall_s: float
    cpu_s: float
    peak_rss_mib: float
    output_bytes: int


def namespace(number: int) -> Namespace:
    """A model's record."""
    fields: dict[str, object] = dict.fromkeys(REQUIRED_FIELDS, "benchmark")
    fields |= {"format_version": 1, "block_tokens": 16, "chunk_tokens": 256, "tp": 1, "pp": 1, "dcp": 1}
    fields |= {"weights": f"user:model-{number}", "kv_dtype": "bfloat16", "epoch": "base-0"}
    return Namespace.from_fields(fields)


def chains(count: int, rng: random.Random) -> Iterator[list[bytes]]:
    """Keys of prompts, as many as it takes: the first is long, others share their beginning with their agent's."""
    deep = min(DEEP, count // 10)
    yield [rng.randbytes(16) for _ in range(deep)]
    count -= deep
    while count > 0:
        shared = [rng.randbytes(16) for _ in range(min(SHARED, count))]
        yield shared
        count -= len(shared)
        for _ in range(PROMPTS_OF_AGENT):
            own = [rng.randbytes(16) for _ in range(min(OWN, count))]
            if own:
                yield shared + own
            count -= len(own)


def make_directory(root: Path, count: int) -> None:
    """Write ``count`` sparse blobs with sound headers, and their models' records."""
    rng = random.Random("cli")
    page = LayerPage("layer.0", "BF16", (2, 16, 16), "HNC")
    geometry = ChunkGeometry(16, 256, ((page,),))
    written = set[bytes]()
    for model in range(MODELS):
        space = namespace(model)
        form = BlobFormat(space.digest, geometry)
        directory = root / "blobs" / space.digest.hex()
        directory.mkdir(parents=True)
        (directory / "namespace.json").write_bytes(space.record)
        for fan_out in range(256):
            (directory / f"{fan_out:02x}").mkdir()
        share = count // MODELS + (model < count % MODELS)
        for keys in chains(share, rng):
            for index, key in enumerate(keys):
                if key not in written:
                    written.add(key)
                    _write(root, form, BlobName(space.digest, key, keys[index - 1] if index else space.digest, index))


def _write(root: Path, form: BlobFormat, name: BlobName) -> None:
    blob = bytearray(form.blob_bytes)
    digest = hashlib.sha256(name.key).digest()
    record = ChunkRecord(name.namespace, name.key, name.parent, name.chunk_index, digest)
    form.seal(memoryview(blob), record, 1_700_000_000)
    path = root / "blobs" / relative_path(name)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    os.write(descriptor, blob[: form.header_bytes])
    os.ftruncate(descriptor, len(blob))
    os.close(descriptor)
    age_s = int.from_bytes(name.key[:4]) % (60 * 86400)
    os.utime(path, (time.time() - age_s,) * 2)


def run_once(*arguments: str) -> Figures:
    """Run the command line as users do, to its end."""
    program = str(Path(sys.executable).with_name("tiered-kv"))
    with tempfile.TemporaryFile() as output:
        start = time.perf_counter()
        process = subprocess.Popen([program, *arguments], stdout=output)
        _, status, used = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"tiered-kv {' '.join(arguments)} ended with {process.returncode}")
        size = output.seek(0, os.SEEK_END)
    return Figures(wall_s, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024, size)


def median(runs: int, *arguments: str) -> Figures:
    """The median of every figure."""
    run_once(*arguments)  # warms the caches
    found = [run_once(*arguments) for _ in range(runs)]
    return Figures(*(statistics.median(values) for values in zip(*found, strict=True)))


def measure(root: Path, runs: int) -> dict[str, Figures]:
    """All verbs that look at the whole directory, with its index and without."""
    uri = f"file://{root}"
    results = {"--help": median(HELP_RUNS, "--help"), "ls --help": median(HELP_RUNS, "ls", "--help")}
    looks = {
        "ls": ("ls", uri),
        "ls --json": ("ls", uri, "--json"),
        "ls --sort used --older-than 7d": ("ls", uri, "--sort", "used", "--older-than", "7d"),
        "ls --limit 0": ("ls", uri, "--limit", "0"),
        "ls --limit 0 --json": ("ls", uri, "--limit", "0", "--json"),
        "du": ("du", uri),
        "stat": ("stat", uri),
        "tree": ("tree", uri),
    }
    for label, arguments in looks.items():
        results[label] = median(runs, *arguments)
    shutil.rmtree(root / "index")
    for label in ("ls", "du", "stat"):
        results[f"{label}, without index"] = median(runs, *looks[label])
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=None, help="where to make the temporary directory")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as temporary:
        root = Path(temporary)
        start = time.perf_counter()
        make_directory(root, options.chunks)
        subprocess.run([sys.executable, "-c", USE, str(root)], check=True)
        print(f"made {options.chunks} chunks in {time.perf_counter() - start:.1f} s", file=sys.stderr)
        results = measure(root, options.runs)
    for label, figures in results.items():
        print(
            f"{label:32} {figures.wall_s:7.3f} s wall {figures.cpu_s:7.3f} s CPU "
            f"{figures.peak_rss_mib:6.0f} MiB peak {figures.output_bytes:>10.0f} bytes printed"
        )
    shown = {label: {name: round(value, 4) for name, value in f._asdict().items()} for label, f in results.items()}
    finish("cli", shown, machine("cli", chunks=options.chunks))


if __name__ == "__main__":
    main()
