"""What a disk that fails, hangs or crawls adds to a request's latency: the connector's own waiting rule, a real server.

    python benchmarks/disk_faults.py [--requests N] [--chunks N]

The cache lies on a file system in user space (bindfs, a Debian package; needs /dev/fuse), which fails like a disk:

    none       it works
    dead       its process is killed: every system call answers ENOTCONN
    stalled    its process is stopped: every system call hangs, the server's own included
    slow       it reads 2 MB/s

Every request is for a prefix that only the disk has. Its added latency is the time from its arrival until the scheduler
side answers how many tokens it may load; asked once a millisecond. Requests that came while the breaker was open, or
while the server did not answer and was not waited for, are counted apart. ``fast`` and ``slow`` are the shipped rule
for engines that compute 1000 and 50 tokens a second. Prints a table and writes build/disk_faults.json.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "scripts")]

from bench_report import finish, machine, percentile, table  # noqa: E402  # beside this script
from object_faults import GROUPS  # noqa: E402  # beside this script
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.v1.request import Request  # noqa: E402

from tests.kit.server.clients import CHUNK, SmallEngine, settings  # noqa: E402
from tests.kit.server.probe import server_pid, wait_for, wait_written  # noqa: E402
from tiered_kv.vllm.engine_role import EngineRole  # noqa: E402
from tiered_kv.vllm.identity.adapters import Adapters  # noqa: E402
from tiered_kv.vllm.scheduler import SchedulerSide  # noqa: E402

STEP_S = 0.001
PREFILL = {"fast": 1000.0, "slow": 50.0}
FAULTS = ("none", "dead", "stalled", "slow")
PAUSE_S = {"none": 0.0, "dead": 0.0, "stalled": 0.05, "slow": 0.0}
"""Between requests: a stall is noticed after ten seconds."""
SLOW_RATE = "2M"
COLUMNS = {
    "fault": "fault", "rule": "rule", "requests": "requests", "hits": "hits", "p50_ms": "p50 ms", "p99_ms": "p99 ms",
    "max_ms": "max ms", "left_alone": "left alone", "left_alone_p99_ms": "p99 ms then",
}  # fmt: skip
ROLE = EngineRole(may_load=True, may_store=False, has_prefix_caching=False)


@dataclass(frozen=True)
class Sample:
    """One request: how long it waited, what it was offered, and whether the disk was left alone."""

    wait_s: float
    tokens: int
    is_left_alone: bool


class UserDisk:
    """A directory seen through a process that can be killed or stopped."""

    def __init__(self, work: Path, *options: str) -> None:
        self.real, self.point = work / "real", work / "mounted"
        self.point.mkdir(exist_ok=True)
        self.real.mkdir(exist_ok=True)
        command = ["bindfs", "-f", "--no-allow-other", *options, str(self.real), str(self.point)]
        self.process = subprocess.Popen(command)
        wait_for(self.point.is_mount, "the mount")

    def end(self) -> None:
        """Unmount, whatever state it is in."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
        subprocess.run(["umount", "-l", str(self.point)], check=False)
        self.process.kill()
        self.process.wait()


def prompt(number: int, chunks: int) -> tuple[int, list[int]]:
    """First token and tokens of a request's prefix."""
    first = number * chunks * CHUNK
    return first, list(range(first, first + chunks * CHUNK))


def fill(root: Path, requests: int, chunks: int) -> None:
    """Have a server write the prefixes of all requests, and end it: the next one has nothing in memory."""
    engine = SmallEngine.start(settings(root), "filler")
    for number in range(requests):
        engine.store(chunks, prompt(number, chunks)[0])
        if number % 20 == 0:
            wait_written(root)
    wait_written(root)
    pid = server_pid(root)
    engine.close()
    os.kill(pid, signal.SIGKILL)


@contextmanager
def failing(disk: UserDisk, fault: str) -> Iterator[None]:
    if fault == "dead":
        disk.process.kill()
    elif fault == "stalled":
        disk.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        disk.end()


def measure(work: Path, fault: str, rule: str, options: argparse.Namespace) -> list[Sample]:
    """The requests of one cell, one after the other."""
    work.mkdir()
    disk = UserDisk(work)
    fill(disk.point / "cache", options.requests, options.chunks)
    if fault == "slow":
        disk.end()
        disk = UserDisk(work, f"--read-rate={SLOW_RATE}")
    engine = SmallEngine.start(settings(disk.point / "cache", start_timeout_s=60.0), rule)
    pid = server_pid(disk.point / "cache")
    side = SchedulerSide(engine.config, engine.client, Adapters(""), GROUPS, ROLE)
    side.prefill.tokens_per_s = PREFILL[rule]
    samples = []
    with failing(disk, fault):
        for number in range(options.requests):
            samples.append(ask(side, engine, number, options.chunks))
            time.sleep(PAUSE_S[fault])
    os.kill(pid, signal.SIGKILL)
    engine.close()
    return samples


def ask(side: SchedulerSide, engine: SmallEngine, number: int, chunks: int) -> Sample:
    """One request, from its arrival to the answer."""
    request = Request(f"r{number}", [*prompt(number, chunks)[1], 1], SamplingParams(max_tokens=1), None)
    is_left_alone = is_out(engine)
    start_s = time.perf_counter()
    side.add_request(request)
    while (tokens := side.matched_tokens(request, 0)) is None:
        time.sleep(STEP_S)
    wait_s = time.perf_counter() - start_s
    side.finish_request(request, [])
    engine.client.ask_figures()
    side.poll()
    return Sample(wait_s, tokens, is_left_alone and is_out(engine))


def is_out(engine: SmallEngine) -> bool:
    """Whether the server's last figures, or its silence, say that the disk is not asked."""
    said = engine.client.figures
    breaker = json.loads(said)["tiers"][0]["breaker"] if said else "closed"
    return engine.client.is_silent or breaker != "closed"


def row(fault: str, rule: str, samples: list[Sample]) -> dict[str, Any]:
    waits = [sample.wait_s for sample in samples]
    alone = [sample.wait_s for sample in samples if sample.is_left_alone]
    return {
        "fault": fault,
        "rule": rule,
        "requests": len(samples),
        "hits": sum(sample.tokens > 0 for sample in samples),
        "p50_ms": 1e3 * statistics.median(waits),
        "p99_ms": 1e3 * percentile(waits, 0.99),
        "max_ms": 1e3 * max(waits),
        "left_alone": len(alone),
        "left_alone_p99_ms": 1e3 * percentile(alone, 0.99) if alone else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--chunks", type=int, default=4, help=f"per prompt, of {CHUNK} tokens")
    options = parser.parse_args()
    if shutil.which("bindfs") is None or not os.access("/dev/fuse", os.W_OK):
        print("skipped: this benchmark needs bindfs (apt-get install bindfs) and /dev/fuse")
        return
    rows = []
    with tempfile.TemporaryDirectory(prefix="tkv-", ignore_cleanup_errors=True) as work:
        for fault in FAULTS:
            for rule in PREFILL:
                rows.append(row(fault, rule, measure(Path(work) / f"{fault}-{rule}", fault, rule, options)))
                print(table(rows, COLUMNS)[-1], flush=True)
    facts = machine("disk_faults")
    print("\nadded latency per request:\n")
    print("\n".join(table(rows, COLUMNS)))
    finish("disk_faults", rows, facts)


if __name__ == "__main__":
    main()
