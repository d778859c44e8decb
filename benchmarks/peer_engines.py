"""What a peer is worth to a real vLLM: time to the first token from a peer, from a bucket and computed; and what a door
that gives all it can costs the engine beside it.

    python benchmarks/peer_engines.py [--repeats N] [--tokens N] [--turns N]

Engines on CPU with the demo's model, each an engine core in a process of its own, with a server and a directory of its
own.

``ttft``   prompts that nobody saw, in turns. One engine computes and stores them; another one, whose only tier with
           them is the first one's door, answers them, first without the cache (computed), then from the first one's
           host memory (peer, memory), then from its disk (peer, disk), with its own memory and disk emptied before
           each. In the same turn an engine over a real S3 server, emptied in the same way, answers them (bucket). The
           first token has to be the computed one's, and its log-probability within 0.1.
``door``   seconds of batches on an engine that has the first core to itself, three in turns: while its door has nothing
           to do (idle); while a reader takes what it gives (busy), all of it from disk or all of it from host memory;
           and while nothing of ours is at work, but OpenSSL's own client reads from OpenSSL's own server (openssl):
           what that costs the engine is the machine's, its memory and its caches. Door, cache server and reader, or
           OpenSSL's two, share the other core, so that what is measured is what they do to the engine, not the cores
           they take. The reader throws away what it gets, piece by piece: a real one is on another machine, and puts
           nothing into this one's caches. Seconds are medians (least to most), ratios medians of the turns with their
           95 % interval. ``server`` is the CPU time of the cache server for each chunk given.

Prints two tables, then JSON. Everything is on one machine, over loopback.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import bench_report as report

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "scripts")]

from end_to_end import evict, interval  # noqa: E402  # beside this script
from peers import cpu_s, openssl_files  # noqa: E402
from serving import ServedEngine, Timed, build_model_once, prompts, served, warm_up  # noqa: E402

from tests.kit.ports import free_port  # noqa: E402
from tests.kit.s3 import open_s3  # noqa: E402
from tests.kit.server.object_nodes import s3_place  # noqa: E402
from tests.kit.server.probe import figures, server_pid, wait_for, wait_written  # noqa: E402
from tests.kit.storage.disk_probe import blob_files  # noqa: E402
from tiered_kv.keys.naming import BlobName, parse_path  # noqa: E402
from tiered_kv.tiers.object.medium import Deadline  # noqa: E402
from tiered_kv.tiers.peers.fleet_key import FleetKey  # noqa: E402
from tiered_kv.tiers.peers.peer import BLOBS_PATH, Peer  # noqa: E402

LIMITS = {"disk_bytes": "2GiB", "host_bytes": "512MiB", "strict": True}
LOGPROB_DIFFERENCE_MAX = 0.1
BATCH, BATCH_TOKENS, ANSWER_TOKENS = 4, 300, 16
READERS = 4
PIECE_BYTES = 256 << 10
CONTROL_BYTES = 64 << 20
CONTROL_STARTS_S = 0.5
CHUNK_TOKENS = 256
STATES = ("idle", "busy", "openssl")
COMPARED = (("busy", "idle"), ("openssl", "idle"), ("busy", "openssl"))


def same(timed: Timed, computed: Timed) -> Timed:
    """The answer, if it is the computed one."""
    assert timed.token == computed.token, (timed, computed)
    assert abs(timed.logprob - computed.logprob) <= LOGPROB_DIFFERENCE_MAX, (timed, computed)
    return timed


def measure_ttft(work: Path, key: Path, repeats: int, tokens: int) -> dict[str, list[Timed]]:
    """First tokens of the same prompts, by where their prefix was."""
    listen = f"127.0.0.1:{free_port()}"
    # Written when it is asked for a second time: until then it is in memory alone.
    gives = {"storage_uri": f"file://{work / 'a'}", "disk_admission": "second-touch", "peer_listen": listen, **LIMITS}
    takes = {"storage_uri": f"file://{work / 'b'}", "peers": [f"https://{listen}"], **LIMITS}
    taken: dict[str, list[Timed]] = {"computed": [], "peer, memory": [], "peer, disk": [], "bucket": []}
    with open_s3("bench") as s3:
        place = s3_place(s3, "peer-engines")
        bucket = {"storage_uri": place.uri, "storage_options": place.options, "disk_path": str(work / "c"), **LIMITS}
        with (
            served(work / "a.log", gives | {"peer_key_file": str(key)}) as one,
            served(work / "b.log", takes | {"peer_key_file": str(key)}) as other,
            served(work / "c.log", bucket) as third,
        ):
            for engine in (one, other, third):
                warm_up(engine, tokens)
            wanted = repeats + 2  # the first two are for the tiers' first measurements
            for prompt in prompts(1, 3 * wanted, tokens):
                if len(taken["bucket"]) == wanted:
                    break
                evict(work / "a", "host")
                soon = {name: stored_chunks(work / name) + tokens // CHUNK_TOKENS for name in "ac"}
                for engine in (one, third):
                    engine.ttft(prompt)
                    engine.forget()
                if not all(is_stored(work / name, chunks) for name, chunks in soon.items()):
                    print("a turn is left out: on a busy machine a prompt is not always stored whole", flush=True)
                    continue
                taken["computed"].append(computed := other.ttft(prompt, skip_load=True, skip_save=True))
                taken["peer, memory"].append(same(answer_anew(other, prompt, work / "b"), computed))
                one.ttft(prompt)
                one.forget()
                wait_written(work / "a")
                evict(work / "a", "host")
                taken["peer, disk"].append(same(answer_anew(other, prompt, work / "b"), computed))
                taken["bucket"].append(same(answer_anew(third, prompt, work / "c"), computed))
    return {name: timed[2:] for name, timed in taken.items()}


def answer_anew(engine: ServedEngine, prompt: list[int], root: Path) -> Timed:
    """Answer a prompt of which neither the engine nor its machine has anything."""
    engine.forget()
    wait_written(root)
    for tier in ("host", "disk"):
        evict(root, tier)
    return engine.ttft(prompt)


def stored_chunks(root: Path) -> int:
    """How many chunks that nobody had a machine has taken, and sealed."""
    return int(figures(root)["flows"][0]["stored"].get("new", 0))


def is_stored(root: Path, chunks: int) -> bool:
    """Whether a machine soon has taken so many: an engine stores after its answer."""
    try:
        wait_for(lambda: stored_chunks(root) >= chunks, "the seals", deadline_s=10.0)
    except TimeoutError:
        return False
    return True


@contextmanager
def openssl(directory: Path) -> Iterator[list[int]]:
    """OpenSSL's own client reads a file from its own server again and again; the list gets the bytes of each."""
    files = openssl_files(directory, CONTROL_BYTES)
    port, ended, got = free_port(), threading.Event(), list[int]()
    listen = f"openssl s_server -quiet -HTTP -accept 127.0.0.1:{port} -cert cert.pem -key key.pem -tls1_3"
    ask = f"openssl s_client -quiet -connect 127.0.0.1:{port} -tls1_3"
    quiet: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}

    def read() -> None:
        while not ended.is_set():
            with subprocess.Popen(ask.split(), **quiet) as client:
                assert client.stdin is not None
                client.stdin.write(b"GET /file HTTP/1.0\r\n\r\n")
                client.stdin.flush()
                while client.poll() is None and not ended.wait(0.01):
                    pass
                if client.poll() is None:
                    client.kill()
                else:
                    got.append(CONTROL_BYTES)

    with subprocess.Popen(listen.split(), cwd=files, **quiet) as server, ThreadPoolExecutor(1) as thread:
        time.sleep(CONTROL_STARTS_S)
        end = thread.submit(read)
        try:
            yield got
        finally:
            ended.set()
            end.result()
            server.kill()


@contextmanager
def reader(listen: str, key: FleetKey, sizes: Mapping[BlobName, int]) -> Iterator[list[int]]:
    """Take these blobs from the door again and again; the list gets the bytes of each."""
    assert sizes, "nothing is stored"
    ended, got = threading.Event(), list[int]()

    def read() -> None:
        peer = Peer(f"https://{listen}", key, key.client_context(), time.monotonic)
        piece = memoryview(bytearray(PIECE_BYTES))
        while not ended.is_set():
            for name in sizes:
                if ended.is_set():
                    break
                target = f"{BLOBS_PATH}/{name.namespace.hex()}/{name.key.hex()}"
                with peer._answer("GET", target, Deadline(10.0)) as (response, connection):
                    if response is None:
                        continue
                    left = response.length or 0
                    while left and (count := connection.wire.fill(piece[:left])):
                        left -= count
                    assert not left, f"{left} bytes of {name} did not come"
                got.append(sizes[name])
        peer.close()

    with ThreadPoolExecutor(READERS) as threads:
        ends = [threads.submit(read) for _ in range(READERS)]
        try:
            yield got
        finally:
            ended.set()
            for end in ends:
                end.result()


def blobs_below(root: Path) -> dict[BlobName, int]:
    """Names and sizes of what is on a disk."""
    sizes = {}
    for path in blob_files(root):
        name = parse_path(str(path.relative_to(root / "blobs")))
        assert name is not None, path
        sizes[name] = path.stat().st_size
    return sizes


def pin(pid: int, core: int) -> None:
    """Keep a process, with all its threads, to one core."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), {core})


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def measure_door(work: Path, key: Path, turns: int, source: str) -> dict[str, Any]:
    """Seconds of batches beside an idle door, beside one that gives from ``disk`` or ``memory``, and beside OpenSSL."""
    engine_core, other_core = sorted(os.sched_getaffinity(0))[:2]
    root, listen = work / f"door-{source}", f"127.0.0.1:{free_port()}"
    gives = {"storage_uri": f"file://{root}", "peer_listen": listen, "peer_key_file": str(key), **LIMITS}
    seconds: dict[str, list[float]] = {state: [] for state in STATES}
    server_s = dict.fromkeys(STATES, 0.0)
    given: dict[str, list[int]] = {state: [] for state in STATES}
    os.sched_setaffinity(0, {engine_core})  # what is started now inherits it
    try:
        with served(work / f"door-{source}.log", gives) as engine:
            server = server_pid(root)
            for pid in (server, *children(server), os.getpid()):
                pin(pid, other_core)
            warm_up(engine, BATCH_TOKENS)
            engine.batch_s(prompts(4, BATCH, BATCH_TOKENS), ANSWER_TOKENS)
            wait_written(root)
            sizes = blobs_below(root)
            if source == "memory":  # the server still has it there, and so the door does not find it on disk
                for path in blob_files(root):
                    path.unlink()
            fresh = iter(prompts(2, len(STATES) * BATCH * turns, BATCH_TOKENS))
            beside: dict[str, Callable[[], AbstractContextManager[list[int]]]] = {
                "idle": lambda: nullcontext([]),
                "busy": lambda: reader(listen, FleetKey.read(key), sizes),
                "openssl": lambda: openssl(work),
            }
            for number in range(turns):
                first = number % len(STATES)
                for state in STATES[first:] + STATES[:first]:
                    batch = [next(fresh) for _ in range(BATCH)]
                    before_s = cpu_s(server)
                    with beside[state]() as got:
                        seconds[state].append(engine.batch_s(batch, ANSWER_TOKENS))
                        given[state] += got
                    server_s[state] += cpu_s(server) - before_s
                    wait_written(root)
            assert given["busy"], "the door gave nothing"
            lent = figures(root)["counters"].get("loans", 0)
            assert bool(lent) == (source == "memory"), f"it gave {lent} chunks of {len(given['busy'])} from memory"
    finally:
        os.sched_setaffinity(0, {engine_core, other_core})
    return {
        "source": source,
        "turns": turns,
        **{
            f"{state}_s": [round(at(taken), 3) for at in (statistics.median, min, max)]
            for state, taken in seconds.items()
        },
        **{f"{one}_to_{other}": ratios(seconds[one], seconds[other]) for one, other in COMPARED},
        **{f"{state}_gb_per_s": round(sum(given[state]) / 1e9 / sum(seconds[state]), 3) for state in STATES[1:]},
        "server_us_per_chunk": round(1e6 * (server_s["busy"] - server_s["idle"]) / len(given["busy"])),
    }


def ratios(one: list[float], other: list[float]) -> list[float]:
    """The median of one's seconds over the other's, turn by turn, and the ends of its 95 % interval."""
    taken = [mine / theirs for mine, theirs in zip(one, other, strict=True)]
    return [round(value, 4) for value in (statistics.median(taken), *interval(taken))]


def show(ttft: dict[str, Any] | None, doors: list[dict[str, Any]]) -> None:
    """Both tables."""
    if ttft is not None:
        print("| where the prefix was | TTFT ms, median | least | most | tokens not computed |")
        print("|---|---|---|---|---|")
        for name, row in ttft.items():
            tokens = ", ".join(map(str, row["cached_tokens"]))
            print(f"| {name} | {row['ttft_ms']} | {row['least_ms']} | {row['most_ms']} | {tokens} |")
    if doors:
        columns = [f"{state}, s" for state in STATES] + [f"{one} / {other}" for one, other in COMPARED]
        columns = ["door gives from", "turns", *columns, "GB/s, busy and openssl", "server, us a chunk"]
        print("\n" + "| " + " | ".join(columns) + " |")
        print("|---" * len(columns) + "|")
    for door in doors:
        spans = [door[f"{state}_s"] for state in STATES] + [door[f"{one}_to_{other}"] for one, other in COMPARED]
        cells = [door["source"], door["turns"], *("{} ({} to {})".format(*span) for span in spans)]
        cells += [f"{door['busy_gb_per_s']}, {door['openssl_gb_per_s']}", door["server_us_per_chunk"]]
        print("| " + " | ".join(map(str, cells)) + " |")


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=2_080)
    parser.add_argument("--turns", type=int, default=10)
    options = parser.parse_args()
    build_model_once()
    ttft, doors = None, list[dict[str, Any]]()
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
            for source in ("disk", "memory") if options.turns else ():
                doors.append(measure_door(work, key, options.turns, source))
        except BaseException:
            for log in work.glob("*.log"):
                sys.stderr.write(log.read_text()[-4000:])
            raise
    show(ttft, doors)
    facts = report.machine("peer_engines", prompt_tokens=options.tokens)
    report.finish("peer_engines", {"ttft": ttft, "doors": doors}, facts, is_kept=options.keep)


if __name__ == "__main__":
    main()
