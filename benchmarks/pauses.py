"""How long a server's loop stands still: a client that asks something small every millisecond, while others work it.

    python benchmarks/pauses.py [--chunks N] [--seconds N] [--keep]

A server whose index has so many chunks (as of ``lookup.py``, blobs of 8 KiB), and a client in a process of its own that
asks for something that takes no time, waits for the answer, and asks again. What it waits beyond what an idle server
takes is a pause of the loop, or of the machine. One phase after the other:

    fill      the index grows to ``--chunks``
    idle      nothing else happens
    lookups   prompts of 128k tokens from host memory and of nothing, one after the other
    growth    the index grows by a tenth
    erase     ``evict --tag``: a hundredth of the chunks
    evict     ``evict --tier host --all``
    reset     ``reset_prefix_cache``: a private epoch

Milliseconds, per phase: how many answers, their median, the 99th of a hundred, the 99.9th, and the longest. Then what
the server's own memory, without the arena, grew by for each chunk of the index.
"""

import json
import os
import random
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench_report import finish, machine, parser, percentile, table
from lookup import CHUNK, LONGEST, SLOT_BYTES, TAG, Node, ask

from tiered_kv.config import Config
from tiered_kv.server import protocol as m
from tiered_kv.server.connect import read_message, say_hello
from tiered_kv.server.directory import read_info

EVERY_S = 0.001
FIRST = 4096
"""Chunks of the index before the client begins to ask; the prompts of ``lookups`` are among them."""

COLUMNS = {
    "phase": "phase", "seconds": "s", "answers": "answers", "median_ms": "median", "p99_ms": "99 %",
    "p999_ms": "99.9 %", "longest_ms": "longest",
}  # fmt: skip


def ask_on() -> None:
    """The asking process: prints when it asked, and how long the answer took, in nanoseconds.

    It asks for something that the loop answers by itself, in microseconds: to evict a chunk that nobody has.
    """
    config = Config.from_mapping(json.loads(sys.stdin.readline()))
    sock, _ = say_hello(config, "admin", "", 0)
    with sock:
        print("ready", flush=True)
        rng = random.Random(0)
        while not select.select([sys.stdin], [], [], 0)[0]:
            started_ns = time.monotonic_ns()
            sock.sendall(m.frame(m.Evict("host", bytes(16), rng.randbytes(16), holes=True)))
            read_message(sock)
            print(started_ns, time.monotonic_ns() - started_ns)
            time.sleep(EVERY_S)


class Asker:
    """The asking process; ``phase`` gives what it saw since the last call."""

    def __init__(self, root: Path, settings: str) -> None:
        self._out = root.parent / "answers"
        with self._out.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-u", __file__, "--ask"], stdin=subprocess.PIPE, stdout=output
            )
        assert self._process.stdin is not None
        self._process.stdin.write(settings.encode() + b"\n")
        self._process.stdin.flush()
        while b"ready" not in self._out.read_bytes():
            time.sleep(0.05)
        self._seen = 1
        self._since_s = time.monotonic()

    def phase(self, name: str) -> dict[str, Any]:
        lines = self._out.read_text().splitlines()[self._seen : -1]  # the last may not be whole
        self._seen += len(lines)
        taken = [int(line.split()[1]) / 1e6 for line in lines]
        now_s = time.monotonic()
        seconds, self._since_s = now_s - self._since_s, now_s
        row = {
            "phase": name,
            "seconds": round(seconds, 1),
            "answers": len(taken),
            "median_ms": round(percentile(taken, 0.5), 3),
            "p99_ms": round(percentile(taken, 0.99), 3),
            "p999_ms": round(sorted(taken)[-(-999 * len(taken) // 1000) - 1], 3),
            "longest_ms": round(max(taken), 3),
        }
        print(table([row], COLUMNS)[-1], flush=True)
        return row

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--chunks", type=int, default=1_000_000)
    options.add_argument("--seconds", type=float, default=20.0, help="of idle, and of lookups")
    options.add_argument("--ask", action="store_true", help="be the asking process, with settings on standard input")
    given = options.parse_args()
    if given.ask:
        ask_on()
        return
    rows = []
    with tempfile.TemporaryDirectory(prefix="tkv-", ignore_cleanup_errors=True) as work:
        root = Path(work) / "cache"
        node = Node(root, FIRST, LONGEST, most_chunks=int(1.15 * given.chunks))
        asker = Asker(root, json.dumps(node.settings))
        try:
            print("\n".join(table([], COLUMNS)), flush=True)
            before = own_bytes(node.server_pid)
            node.grow(given.chunks - FIRST, "fill")
            rows.append(asker.phase("fill"))
            chunk_bytes = round((own_bytes(node.server_pid) - before) / (given.chunks - FIRST))
            print(f"bytes per known chunk: {chunk_bytes}", flush=True)
            time.sleep(given.seconds)
            rows.append(asker.phase("idle"))
            end_s, number = time.monotonic() + given.seconds, 0
            while time.monotonic() < end_s:
                number += 1
                case = "host" if number % 2 else "miss"
                ask(node, f"r{number}", case, node.prompt(case, LONGEST, number))
            rows.append(asker.phase("lookups"))
            node.grow(given.chunks // 10, "growth")
            rows.append(asker.phase("growth"))
            evict_host(root, "--tag", TAG)
            rows.append(asker.phase("erase"))
            evict_host(root, "--tier", "host", "--all")
            time.sleep(1)
            rows.append(asker.phase("evict"))
            node.scheduler.reset_cache()
            time.sleep(2)
            rows.append(asker.phase("reset"))
        finally:
            asker.close()
            node.close()
    facts = machine("pauses", chunks=given.chunks, blob_bytes=SLOT_BYTES, chunk_tokens=CHUNK)
    finish("pauses", {"phases": rows, "bytes_per_chunk": chunk_bytes}, facts, is_kept=given.keep)


def own_bytes(pid: int) -> int:
    """Memory of a process that no other one shares, and no file."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon:")))


def evict_host(root: Path, *what: str) -> None:
    """What ``tiered-kv evict --server`` asks for."""
    done = subprocess.run(
        [
            *(
                str(Path(sys.executable).with_name("tiered-kv")),
                "evict",
                "--server",
                f"unix://{read_info(root).socket}",
            ),
            *(*what, "--yes"),
        ],
        check=False,
        capture_output=True,
        env=os.environ,
        text=True,
    )
    if done.returncode not in (0, 4):  # 4: some of a tag is in use, and stays
        raise RuntimeError(f"evict failed. status={done.returncode} {done.stderr}")


if __name__ == "__main__":
    main()
