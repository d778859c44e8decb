"""What a peer is worth to a real vLLM: time to the first token from a peer, from a bucket and computed; and what a door
that gives all it can costs the engine beside it.

    python benchmarks/peer_engines.py [--repeats N] [--tokens N] [--pairs N]

Engines on CPU with the demo's model, each an engine core in a process of its own, with a server and a directory of its
own.

``ttft``   prompts that nobody saw, in turns. One engine computes and stores them; another one, whose only tier with
           them is the first one's door, answers them, once without the cache (computed) and once with it (peer). Then
           an engine over a real S3 server, its host memory and disk emptied before every answer (bucket). The first
           token has to be the computed one's, and its log-probability within 0.1.
``door``   seconds of batches on an engine that has the first core to itself, in pairs: while its door has nothing to
           do, and while a reader takes what it gives. Door, cache server and reader share the other core, so that what
           is measured is what they do to the engine, not the cores they take. The ratio is busy / idle.

Prints two tables, then JSON. Everything is on one machine, over loopback.
"""

import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import bench_report as report

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "scripts")]

from end_to_end import evict, interval  # noqa: E402  # beside this script
from serving import Timed, build_model_once, prompts, served, warm_up  # noqa: E402

from tests.kit.ports import free_port  # noqa: E402
from tests.kit.s3 import open_s3  # noqa: E402
from tests.kit.server.object_nodes import s3_place  # noqa: E402
from tests.kit.server.probe import server_pid, wait_written  # noqa: E402
from tests.kit.storage.disk_probe import blob_files  # noqa: E402
from tiered_kv.keys.naming import parse_path  # noqa: E402
from tiered_kv.tiers.object.medium import Deadline  # noqa: E402
from tiered_kv.tiers.peers.fleet_key import FleetKey  # noqa: E402
from tiered_kv.tiers.peers.peer import Peer  # noqa: E402

LIMITS = {"disk_bytes": "2GiB", "host_bytes": "512MiB", "strict": True}
LOGPROB_DIFFERENCE_MAX = 0.1
BATCH, BATCH_TOKENS, ANSWER_TOKENS = 4, 300, 16
READERS = 4


def same(timed: Timed, computed: Timed) -> Timed:
    """The answer, if it is the computed one."""
    assert timed.token == computed.token, (timed, computed)
    assert abs(timed.logprob - computed.logprob) <= LOGPROB_DIFFERENCE_MAX, (timed, computed)
    return timed


def measure_ttft(work: Path, key: Path, repeats: int, tokens: int) -> dict[str, list[Timed]]:
    """First tokens of the same prompts, by where their prefix was."""
    listen = f"127.0.0.1:{free_port()}"
    gives = {"storage_uri": f"file://{work / 'a'}", "peer_listen": listen, "peer_key_file": str(key), **LIMITS}
    takes = {"storage_uri": f"file://{work / 'b'}", "peers": [f"https://{listen}"], "peer_key_file": str(key), **LIMITS}
    taken: dict[str, list[Timed]] = {"computed": [], "peer": [], "bucket": []}
    asked = prompts(1, repeats + 2, tokens)  # the first two are for the tier's first measurements
    with served(work / "a.log", gives) as one, served(work / "b.log", takes) as other:
        warm_up(one, tokens)
        warm_up(other, tokens)
        for prompt in asked:
            one.ttft(prompt)
            one.forget()
            wait_written(work / "a")
            taken["computed"].append(other.ttft(prompt, skip_load=True, skip_save=True))
            other.forget()
            taken["peer"].append(same(other.ttft(prompt), taken["computed"][-1]))
            other.forget()
            wait_written(work / "b")
    with open_s3("bench") as s3:
        place = s3_place(s3, "peer-engines")
        bucket = {"storage_uri": place.uri, "storage_options": place.options, "disk_path": str(work / "c"), **LIMITS}
        with served(work / "c.log", bucket) as engine:
            warm_up(engine, tokens)
            for prompt, computed in zip(asked, taken["computed"], strict=True):
                engine.ttft(prompt)
                engine.forget()
                wait_written(work / "c")
                for tier in ("host", "disk"):
                    evict(work / "c", tier)
                taken["bucket"].append(same(engine.ttft(prompt), computed))
                engine.forget()
                wait_written(work / "c")
    return {name: timed[2:] for name, timed in taken.items()}


@contextmanager
def reader(listen: str, key: FleetKey, root: Path) -> Iterator[list[int]]:
    """Take every blob below ``root`` from the door again and again; the list gets the bytes of each."""
    sizes = {}
    for path in blob_files(root):
        name = parse_path(str(path.relative_to(root / "blobs")))
        assert name is not None, path
        sizes[name] = path.stat().st_size
    assert sizes, "nothing is stored"
    ended, got = threading.Event(), list[int]()

    def read() -> None:
        peer = Peer(f"https://{listen}", key, key.client_context(), time.monotonic)
        while not ended.is_set():
            for name, size in sizes.items():
                if peer._read(
                    name, memoryview(bytearray(size)), Deadline(10.0)
                ):  # unverified: the reader's core is shared
                    got.append(size)
        peer.close()

    with ThreadPoolExecutor(READERS) as threads:
        ends = [threads.submit(read) for _ in range(READERS)]
        try:
            yield got
        finally:
            ended.set()
            for end in ends:
                end.result()


def pin(pid: int, core: int) -> None:
    """Keep a process, with all its threads, to one core."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), {core})


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def measure_door(work: Path, key: Path, pairs: int) -> dict[str, Any]:
    """Seconds of batches with an idle door and with a busy one."""
    engine_core, other_core = sorted(os.sched_getaffinity(0))[:2]
    root, listen = work / "door", f"127.0.0.1:{free_port()}"
    gives = {"storage_uri": f"file://{root}", "peer_listen": listen, "peer_key_file": str(key), **LIMITS}
    seconds: dict[str, list[float]] = {"idle": [], "busy": []}
    moved_bytes = moved_s = 0.0
    os.sched_setaffinity(0, {engine_core})  # what is started now inherits it
    with served(work / "door.log", gives) as engine:
        server = server_pid(root)
        for pid in (server, *children(server), os.getpid()):
            pin(pid, other_core)
        warm_up(engine, BATCH_TOKENS)
        engine.batch_s(prompts(4, BATCH, BATCH_TOKENS), ANSWER_TOKENS)
        wait_written(root)
        fresh = iter(prompts(2, 2 * BATCH * pairs, BATCH_TOKENS))
        for number in range(pairs):
            for state in ("idle", "busy") if number % 2 else ("busy", "idle"):
                batch = [next(fresh) for _ in range(BATCH)]
                with reader(listen, FleetKey.read(key), root) if state == "busy" else nullcontext([]) as got:
                    taken_s = engine.batch_s(batch, ANSWER_TOKENS)
                    moved_bytes += sum(got)
                seconds[state].append(taken_s)
                moved_s += taken_s if state == "busy" else 0.0
                wait_written(root)
    os.sched_setaffinity(0, {engine_core, other_core})
    ratios = [busy / idle for idle, busy in zip(seconds["idle"], seconds["busy"], strict=True)]
    low, high = interval(ratios)
    return {
        "pairs": pairs,
        "idle_s": round(statistics.median(seconds["idle"]), 3),
        "busy_s": round(statistics.median(seconds["busy"]), 3),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_low": round(low, 4),
        "ratio_high": round(high, 4),
        "door_gb_per_s": round(moved_bytes / 1e9 / moved_s, 3),
    }


def show(ttft: dict[str, Any] | None, door: dict[str, Any] | None) -> None:
    """Both tables."""
    if ttft is not None:
        print("| where the prefix was | TTFT ms, median | least | most | tokens not computed |")
        print("|---|---|---|---|---|")
        for name, row in ttft.items():
            tokens = ", ".join(map(str, row["cached_tokens"]))
            print(f"| {name} | {row['ttft_ms']} | {row['least_ms']} | {row['most_ms']} | {tokens} |")
    if door is not None:
        print("\n| pairs of batches | door idle, s | door busy, s | busy / idle | 95 % | door gave, GB/s |")
        print("|---|---|---|---|---|---|")
        print(
            f"| {door['pairs']} | {door['idle_s']} | {door['busy_s']} | {door['ratio']} | "
            f"{door['ratio_low']} to {door['ratio_high']} | {door['door_gb_per_s']} |"
        )


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=2_080)
    parser.add_argument("--pairs", type=int, default=10)
    options = parser.parse_args()
    build_model_once()
    ttft = door = None
    with tempfile.TemporaryDirectory(prefix="tkv-", ignore_cleanup_errors=True) as directory:
        work = Path(directory)
        key = work / "key"
        key.touch(0o600)
        key.write_text(os.urandom(32).hex())
        try:
            if options.repeats:
                ttft = {
                    name: {
                        "ttft_ms": round(statistics.median(1e3 * one.ttft_s for one in timed), 1),
                        "least_ms": round(min(1e3 * one.ttft_s for one in timed), 1),
                        "most_ms": round(max(1e3 * one.ttft_s for one in timed), 1),
                        "cached_tokens": sorted({one.cached_tokens for one in timed}),
                    }
                    for name, timed in measure_ttft(work, key, options.repeats, options.tokens).items()
                }
            if options.pairs:
                door = measure_door(work, key, options.pairs)
        except BaseException:
            for log in work.glob("*.log"):
                sys.stderr.write(log.read_text()[-4000:])
            raise
    show(ttft, door)
    facts = report.machine("peer_engines", prompt_tokens=options.tokens)
    report.finish("peer_engines", {"ttft": ttft, "door": door}, facts, is_kept=options.keep)


if __name__ == "__main__":
    main()
