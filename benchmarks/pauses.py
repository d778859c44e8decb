"""How long a server's loop stands still: a client that asks something small every millisecond, while others work it.

    python benchmarks/pauses.py [--chunks N] [--found N] [--seconds N] [--minutes N] [--keep]

A server whose index has so many chunks (as of ``lookup.py``, blobs of 8 KiB), and a client in a process of its own that
asks for something that takes no time, waits for the answer, and asks again. What it waits beyond what an idle server
takes is a pause of the loop, or of the machine. The server has a directory and, where an S3 server can be had
(scripts/s3_service.py), a bucket behind a proxy. One phase after the other, with ``--minutes`` in rounds until the time
is up:

With ``--found`` the server starts on a directory of so many blobs, and its index has those beside ``--chunks``: a large
index where memory is scarce. A chunk in host memory takes 8 KiB of it, one that is found 4 KiB of the disk.

    fill      the index grows by ``--chunks``, what it found at start not counted
    idle      nothing else happens
    lookups   prompts of 128k tokens from host memory and of nothing, one after the other
    growth    the index grows by a tenth
    erase     ``evict --tag``: a hundredth of the chunks
    evict     ``evict --tier host --all``
    reset     ``reset_prefix_cache``: a private epoch
    hanging   the same while the bucket takes requests and answers none, and until it answers again

    restart   once, at the end: another server starts on a directory of ``--chunks`` blobs (of ``cli.py``, 4 KiB each of
              the disk) and is asked from the moment it can be. How long it took to start is told apart: until then
              there is nobody to ask.

Milliseconds, per phase: how many answers, their median, the 99th of a hundred, the 99.9th, and the longest. Then the
99.9th and the longest without the time in which the loop's thread, or the client's, could have run and had no core, as
the kernel counts it (``schedstat``): what is left is the server's doing, and the time in which a thread of the server
that had the interpreter's lock had no core. ``machine`` is the longest time that another process, which only sleeps for
a millisecond again and again, was woken up too late. Then how many answers took how long, with the loop's waits for a
core and without; and what the server's own memory, without the arena, grew by for each chunk of the index.
"""

import json
import os
import random
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from bench_report import REPOSITORY, finish, machine, parser, percentile, table
from cli import USE, make_directory
from lookup import CHUNK, LONGEST, SLOT_BYTES, TAG, Node, ask

sys.path[:0] = [str(REPOSITORY / "scripts")]

from s3_service import NoServerError  # noqa: E402

from tests.kit.faults.proxy import Fault, FaultProxy, Mode  # noqa: E402
from tests.kit.s3 import open_s3  # noqa: E402
from tests.kit.server.probe import is_serving  # noqa: E402
from tiered_kv.config import Config  # noqa: E402
from tiered_kv.server import protocol as m  # noqa: E402
from tiered_kv.server.connect import is_answering, read_message, say_hello  # noqa: E402
from tiered_kv.server.directory import read_info  # noqa: E402

EVERY_S = 0.001
HANGING_S = 25.0
"""For two deadlines of an operation, 10 s each, and what comes after them."""

LARGE_DISK = {"disk_bytes": 1 << 40, "min_free_bytes": 1 << 20}
"""Settings of a server that has such a directory."""

PROGRAM = str(Path(sys.executable).with_name("tiered-kv"))
FIRST = 4096
"""Chunks of the index before the client begins to ask; the prompts of ``lookups`` are among them."""

COLUMNS = {
    "phase": "phase", "seconds": "s", "answers": "answers", "median_ms": "median", "p99_ms": "99 %",
    "p999_ms": "99.9 %", "longest_ms": "longest", "own_p999_ms": "99.9 % own", "own_longest_ms": "longest own",
    "machine_ms": "machine",
}  # fmt: skip
HISTOGRAM_COLUMNS = {"below_ms": "below, ms", "answers": "answers", "own": "own"}
BINS_MS = (1, 2, 5, 10, 20, 50, 100, float("inf"))


class Sample(NamedTuple):
    """One answer.

    Attributes:
        taken_ms: From the question to the answer.
        own_ms: The same without the time in which the loop's thread or the client's had no core.
    """

    taken_ms: float
    own_ms: float


def ask_on() -> None:
    """The asking process: prints how long each answer took, and how much of that was waiting for a core; nanoseconds.

    It asks for something that the loop answers by itself, in microseconds: to evict a chunk that nobody has.
    """
    settings = Config.from_mapping(json.loads(sys.stdin.readline()))
    print("ready", flush=True)
    while (server := read_info(settings.server_directory())) is None or not is_answering(server.socket):
        time.sleep(EVERY_S)
    sock, _ = say_hello(settings, "admin", "", 0)
    threads = [os.open(f"/proc/{pid}/task/{pid}/schedstat", os.O_RDONLY) for pid in (server.pid, os.getpid())]
    with sock:
        rng = random.Random(0)
        while not select.select([sys.stdin], [], [], 0)[0]:
            waited_ns = waits_ns(threads)
            started_ns = time.monotonic_ns()
            sock.sendall(m.frame(m.Evict("host", bytes(16), rng.randbytes(16), holes=True)))
            read_message(sock)
            print(time.monotonic_ns() - started_ns, waits_ns(threads) - waited_ns)
            time.sleep(EVERY_S)


def waits_ns(threads: Sequence[int]) -> int:
    """How long threads have been without a core though they could have run, in nanoseconds."""
    return sum(int(os.pread(thread, 100, 0).split()[1]) for thread in threads)


def sleep_on() -> None:
    """The sleeping process: prints by how much longer each sleep took than it should, in nanoseconds."""
    sys.stdin.readline()
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        started_ns = time.monotonic_ns()
        time.sleep(EVERY_S)
        print(time.monotonic_ns() - started_ns - int(1e9 * EVERY_S), 0)


class Watcher:
    """A process that prints samples (``--be``)."""

    def __init__(self, root: Path, name: str, given: object = None) -> None:
        self._out = root.parent / name
        with self._out.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-u", __file__, "--be", name], stdin=subprocess.PIPE, stdout=output
            )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(given).encode() + b"\n")
        self._process.stdin.flush()
        while b"ready\n" not in self._out.read_bytes():
            if self._process.poll() is not None:
                raise RuntimeError(f"the process {name} ended")
            time.sleep(0.05)
        self._lines = self._out.open("rb")
        self._lines.readline()

    def samples(self) -> list[Sample]:
        """What came since the last call."""
        found = []
        while (line := self._lines.readline()).endswith(b"\n"):
            taken_ns, waited_ns = map(int, line.split())
            found.append(Sample(taken_ns / 1e6, max(0, taken_ns - waited_ns) / 1e6))
        self._lines.seek(self._lines.tell() - len(line))  # the last was not whole
        return found

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._lines.close()


class Phases:
    """What both processes saw, phase by phase; phases of one name are counted together."""

    def __init__(self, root: Path) -> None:
        self._asker: Watcher | None = None
        self._sleeper = Watcher(root, "sleep")
        self._answers: dict[str, list[Sample]] = {}
        self._machine_ms: dict[str, float] = {}
        self._seconds: dict[str, float] = {}
        self._since_s = time.monotonic()

    def ask(self, root: Path, settings: Mapping[str, object]) -> None:
        """Ask this server from now on, or as soon as there is one; a phase begins."""
        self.stop_asking()
        self._asker = Watcher(root, "ask", settings)
        self._sleeper.samples()
        self._since_s = time.monotonic()

    def ended(self, name: str) -> None:
        """A phase has ended, which began when the one before it did."""
        assert self._asker is not None, "nobody asks"
        now_s = time.monotonic()
        self._seconds[name] = self._seconds.get(name, 0.0) + now_s - self._since_s
        self._since_s = now_s
        self._answers.setdefault(name, []).extend(self._asker.samples())
        late_ms = [sample.taken_ms for sample in self._sleeper.samples()]
        self._machine_ms[name] = max(self._machine_ms.get(name, 0.0), *late_ms)
        print(table([self._row(name)], COLUMNS)[-1], flush=True)

    def _row(self, name: str) -> dict[str, Any]:
        answers = self._answers[name]
        taken, own = [one.taken_ms for one in answers], [one.own_ms for one in answers]
        figures = {
            "median_ms": percentile(taken, 0.5),
            "p99_ms": percentile(taken, 0.99),
            "p999_ms": percentile(taken, 0.999),
            "longest_ms": max(taken),
            "own_p999_ms": percentile(own, 0.999),
            "own_longest_ms": max(own),
            "machine_ms": self._machine_ms[name],
        }
        rounded = {figure: round(value, 3) for figure, value in figures.items()}
        return {"phase": name, "seconds": round(self._seconds[name], 1), "answers": len(answers)} | rounded

    def rows(self) -> list[dict[str, Any]]:
        """A row for each name."""
        return list(map(self._row, self._answers))

    def histogram(self) -> list[dict[str, Any]]:
        """How many answers of all phases took less than so many milliseconds, and no less than the row before."""
        every = [one for answers in self._answers.values() for one in answers]
        rows, low = [], 0.0
        for high in BINS_MS:
            taken = sum(low <= one.taken_ms < high for one in every)
            own = sum(low <= one.own_ms < high for one in every)
            rows.append({"below_ms": None if high == BINS_MS[-1] else high, "answers": taken, "own": own})
            low = high
        return rows

    def close(self) -> None:
        """End the processes."""
        self.stop_asking()
        self._sleeper.close()

    def stop_asking(self) -> None:
        """Let the server alone, which may end then. Idempotent."""
        if self._asker is not None:
            self._asker.close()
            self._asker = None


def run_round(
    node: Node, phases: Phases, root: Path, chunks: int, seconds: float, number: int, proxy: FaultProxy | None
) -> int:
    """One phase after the other; returns what a chunk takes of the server's own memory, in bytes."""
    if not node.client.wait_ready(60):  # after a reset while the bucket hung
        raise RuntimeError(f"no session. {node.client.refusal}")
    before, known = own_bytes(node.server_pid), node.known_chunks()
    node.store(node.prompts["host"])
    node.grow(chunks + node.found - node.known_chunks(), f"fill {number}")
    phases.ended("fill")
    chunk_bytes = round((own_bytes(node.server_pid) - before) / (chunks - known))
    time.sleep(seconds)
    phases.ended("idle")
    end_s, asked = time.monotonic() + seconds, 0
    while time.monotonic() < end_s:
        asked += 1
        case = "host" if asked % 2 else "miss"
        ask(node, f"r{number}-{asked}", case, node.prompt(case, LONGEST, asked))
    phases.ended("lookups")
    node.grow(chunks // 10, f"growth {number}")
    phases.ended("growth")
    evict_host(root, "--tag", TAG)
    phases.ended("erase")
    evict_host(root, "--tier", "host", "--all")
    time.sleep(1)
    phases.ended("evict")
    node.scheduler.reset_cache()
    time.sleep(2)
    phases.ended("reset")
    if proxy is not None:
        with proxy.failing(Fault(Mode.SILENCE)):
            node.scheduler.reset_cache()
            time.sleep(HANGING_S)
        time.sleep(2)
        phases.ended("hanging")
    return chunk_bytes


def make_found(root: Path, chunks: int) -> None:
    """A directory of so many blobs, with the index that a server leaves."""
    root.mkdir(parents=True)
    make_directory(root, chunks)
    subprocess.run([sys.executable, "-c", USE, str(root)], check=True)


def run_restart(phases: Phases, root: Path, chunks: int, seconds: float) -> float:
    """A server starts on a directory of so many blobs; returns after how many seconds it could be asked."""
    make_found(root, chunks)
    given = {"host_bytes": 256 << 20, "chunk_tokens": CHUNK, "drain_s": 0.0} | LARGE_DISK
    settings = {"storage_uri": root.as_uri()} | given
    phases.ask(root, settings)
    started_s = time.monotonic()
    options = [f"--set={name}={value}" for name, value in given.items()]
    server = subprocess.Popen([PROGRAM, "serve", root.as_uri(), *options], stdout=subprocess.DEVNULL)
    try:
        while not is_serving(root):
            if server.poll() is not None:
                raise RuntimeError(f"the server did not start. status={server.returncode}")
            time.sleep(0.01)
        start_s = time.monotonic() - started_s
        time.sleep(seconds)
        phases.ended("restart")
    finally:
        phases.stop_asking()
        server.kill()
        server.wait()
    return start_s


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--chunks", type=int, default=1_000_000)
    options.add_argument("--found", type=int, default=0, help="chunks that the index has from the start, of the disk")
    options.add_argument("--seconds", type=float, default=20.0, help="of idle, and of lookups")
    options.add_argument("--minutes", type=float, default=0.0, help="rounds of all phases are begun for so long")
    options.add_argument("--be", choices=("ask", "sleep"), help="be one of the processes that take samples")
    given = options.parse_args()
    if given.be is not None:
        {"ask": ask_on, "sleep": sleep_on}[given.be]()
        return
    with tempfile.TemporaryDirectory(prefix="tkv-", ignore_cleanup_errors=True) as work, ExitStack() as at_end:
        root = Path(work) / "cache"
        proxy, more = open_proxied_bucket(root, at_end)
        if given.found:
            make_found(root, given.found)
            more |= LARGE_DISK
        phases = Phases(root)
        at_end.callback(phases.close)
        node = Node(root, FIRST, LONGEST, int(1.15 * given.chunks), **more)
        try:
            phases.ask(root, node.settings)
            print("\n".join(table([], COLUMNS)), flush=True)
            end_s = time.monotonic() + 60 * given.minutes
            chunk_bytes = run_round(node, phases, root, given.chunks, given.seconds, 0, proxy)
            rounds = 1
            while time.monotonic() < end_s:  # what later ones fill is in part memory that was freed
                run_round(node, phases, root, given.chunks, given.seconds, rounds, proxy)
                rounds += 1
        finally:
            phases.stop_asking()
            node.close()
        start_s = round(run_restart(phases, Path(work) / "restarted" / "cache", given.chunks, given.seconds), 1)
    rows, histogram = phases.rows(), phases.histogram()
    print("\n".join(["", *table(rows, COLUMNS), "", *table(histogram, HISTOGRAM_COLUMNS)]))
    print(
        f"bytes per known chunk: {chunk_bytes}; seconds until a server of so many blobs answers: {start_s}", flush=True
    )
    facts = machine(
        "pauses",
        chunks=given.chunks,
        found=given.found,
        blob_bytes=SLOT_BYTES,
        chunk_tokens=CHUNK,
        rounds=rounds,
        has_bucket=proxy is not None,
    )
    results = {"phases": rows, "histogram": histogram, "bytes_per_chunk": chunk_bytes, "start_s": start_s}
    finish("pauses", results, facts, is_kept=given.keep)


def open_proxied_bucket(root: Path, at_end: ExitStack) -> tuple[FaultProxy | None, dict[str, object]]:
    """A bucket behind a proxy, and the settings of a server that has it; without an S3 server none."""
    try:
        s3 = at_end.enter_context(open_s3("benchmark"))
    except NoServerError as exc:
        print(f"there is no bucket, so the phase `hanging` is left out: {exc}", file=sys.stderr)
        return None, {}
    proxy = at_end.enter_context(FaultProxy(s3.endpoint_url))
    uri, options = s3.uri(s3.new_prefix()), s3.options(proxy.url)
    return proxy, {"storage_uri": uri, "storage_options": options, "disk_path": str(root)}


def own_bytes(pid: int) -> int:
    """Memory of a process that no other one shares, and no file."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon:")))


def evict_host(root: Path, *what: str) -> None:
    """What ``tiered-kv evict --server`` asks for."""
    info = read_info(root)
    assert info is not None, "the server has gone"
    done = subprocess.run(
        [PROGRAM, "evict", "--server", f"unix://{info.socket}", *what, "--yes"],
        check=False,
        capture_output=True,
        env=os.environ,
        text=True,
    )
    if done.returncode not in (0, 4):  # 4: some of a tag is in use, and stays
        raise RuntimeError(f"evict failed. status={done.returncode} {done.stderr}")


if __name__ == "__main__":
    main()
