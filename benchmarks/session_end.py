"""How long it takes until a session that is over has left memory and disk.

    python benchmarks/session_end.py [--chunks N ...] [--chunk-kib SIZE ...] [--repeats N] [--keep]

A server process and a client without vLLM. Two sessions begin with the same ``SHARED`` chunks and go on with chunks of
their own, in host memory and on disk: as many as ``--chunks`` says, as large as ``--chunk-kib`` says at the same place.
Then one of them ends (``release``): measured is the time from that word until none of its own chunks is in host memory,
and until none of their files is left. What both had stays, and is compared byte by byte with what was stored. Medians
and the longest of all repeats; the disk is asked for nothing else meanwhile. Prints a table, then JSON.
"""

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import bench_report as report

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY)]

from tests.kit.server.clients import BLOCK, CHUNK, SmallEngine, settings  # noqa: E402
from tests.kit.server.probe import figures, in_memory, wait_for, wait_written  # noqa: E402
from tests.kit.server.processes import end_server, private_runtime  # noqa: E402
from tests.kit.storage.disk_probe import blob_files  # noqa: E402
from tiered_kv.chunks.geometry import LayerPage  # noqa: E402
from tiered_kv.keys.prefix_keys import PrefixKeys  # noqa: E402
from tiered_kv.keys.tags import NO_TAG, session_name  # noqa: E402

SHARED = 8
DEADLINE_S = 60.0
DISK_METADATA_BYTES = 128 << 20
COLUMNS = {
    "chunks": "chunks of its own", "chunk_kib": "KiB each", "memory_ms": "gone from memory, ms",
    "memory_most_ms": "longest", "disk_ms": "gone from disk, ms", "disk_most_ms": "longest",
}  # fmt: skip


def prompt(number: int, own: int) -> list[int]:
    """A prompt that begins as all do."""
    first = number * 10_000_000
    return [*range(SHARED * CHUNK), *range(first, first + own * CHUNK)]


class Sessions:
    """Two sessions of one server, of which one ends again and again."""

    def __init__(self, engine: SmallEngine, own: int) -> None:
        self._engine = engine
        self._root = engine.root
        self._own = own
        self._stays = engine.store_tokens(prompt(1, 1), session_name("stays", NO_TAG))
        wait_written(self._root)

    def end(self, number: int) -> tuple[float, float]:
        """Seconds until another session has left memory, and disk."""
        name = session_name(f"ends {number}", NO_TAG)
        before = set(blob_files(self._root))
        keys = self._engine.store_tokens(prompt(2 + number, self._own), name)
        wait_written(self._root)
        whole = SHARED + 1 + self._own
        wait_for(lambda: in_memory(self._root) == whole, "all chunks in memory")
        files = sorted(set(blob_files(self._root)) - before)
        assert len(files) == self._own, f"files of its own: {len(files)}"
        wait_for(lambda: self._told() == number + 2, "the session's state")
        took = self._time(name, files)
        self._check(keys)
        return took

    def _told(self) -> int:
        told: int = figures(self._root)["counters"].get("session_states", 0)
        return told

    def _time(self, name: bytes, files: list[Path]) -> tuple[float, float]:
        memory_s = disk_s = 0.0
        started_s = time.monotonic()
        assert self._engine.client.hint("release", name, NO_TAG)
        while not (memory_s and disk_s):
            while files and not files[-1].exists():
                files.pop()
            disk_s = disk_s or (0.0 if files else time.monotonic() - started_s)
            if not memory_s and in_memory(self._root) == SHARED + 1:
                memory_s = time.monotonic() - started_s
            if time.monotonic() - started_s > DEADLINE_S:
                raise RuntimeError(f"the session is not gone. files={len(files)} in_memory={in_memory(self._root)}")
        return memory_s, disk_s

    def _check(self, keys: PrefixKeys) -> None:
        """What both had is there, with its bytes, and nothing else of the session that ended."""
        stays, left = self._engine.hits_of(self._stays), self._engine.hits_of(keys)
        if (stays, left) != (SHARED + 1, SHARED):
            raise RuntimeError(f"wrong chunks left. of the other one: {stays}, of the one that ended: {left}")


def measure(own: int, chunk_kib: int, repeats: int) -> dict[str, Any]:
    """One size's row."""
    width = chunk_kib * 1024 // (CHUNK // BLOCK * 2 * BLOCK * 2)
    pages = (LayerPage("layer.0", "BF16", (2, BLOCK, width), "HNC"),)
    room = 2 * (own + SHARED + 16) * chunk_kib * 1024
    with private_runtime() as directory:
        root = directory / "cache"
        engine = SmallEngine.start(
            settings(root, host_bytes=room, disk_bytes=room + DISK_METADATA_BYTES, drain_s=60.0), pages=pages
        )
        try:
            sessions = Sessions(engine, own)
            memory_s, disk_s = zip(*(sessions.end(number) for number in range(repeats)), strict=True)
        finally:
            engine.close()
            end_server(root)
    return {
        "chunks": own,
        "chunk_kib": chunk_kib,
        "memory_ms": round(1e3 * statistics.median(memory_s), 1),
        "memory_most_ms": round(1e3 * max(memory_s), 1),
        "disk_ms": round(1e3 * statistics.median(disk_s), 1),
        "disk_most_ms": round(1e3 * max(disk_s), 1),
    }


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--chunks", type=int, nargs="+", default=[64, 512, 2048, 64])
    parser.add_argument("--chunk-kib", type=int, nargs="+", default=[32, 32, 32, 16384])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    if len(options.chunks) != len(options.chunk_kib):
        parser.error(f"--chunks has {len(options.chunks)} values and --chunk-kib {len(options.chunk_kib)}: give pairs")
    rows = [measure(*sizes, options.repeats) for sizes in zip(options.chunks, options.chunk_kib, strict=True)]
    print("\n".join(report.table(rows, COLUMNS)))
    report.finish("session_end", rows, report.machine("session_end", shared_chunks=SHARED), is_kept=options.keep)


if __name__ == "__main__":
    main()
