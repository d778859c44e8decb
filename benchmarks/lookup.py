"""What a lookup costs vLLM's scheduler thread, and when its answer is there: through the connector's own hooks.

    python benchmarks/lookup.py [--quick] [--runs N] [--sizes N ...] [--tokens N ...] [--steps MS ...] [--keep]

Prompts of 1k to 128k tokens in chunks of 256, against servers whose index has 10k, 100k and 1M chunks (``--quick``: the
first two). The blobs are of 8 KiB: the index is measured, not the arena. It is filled by ``Commit`` messages, with
chains of 64 chunks whose first chunk is missing, which therefore stay off the disk. The servers run side by side, and
prompts take turns among them and among three cases:

    host    every chunk is in host memory
    disk    every chunk is on disk only; read from there, warm, before the answer counts
    miss    nothing is known of it

``steps`` says when ``get_num_new_matched_tokens`` is called: as an engine does, once in every step of so many
milliseconds, whether anything has come or not, with the hooks that vLLM calls in a step that computes nothing in
between; or (``told``) at once and then 5 ms after something has come, as every figure before 2026-11-26 was taken.

``new`` is ``on_new_request``, which hashes the prompt and sends the lookup, or has a thread hash a long one, which is
looked up at a later call; ``first`` and ``second`` are calls of ``get_num_new_matched_tokens``; ``polls`` all calls
until the answer is given, and ``asked`` how many; ``end`` is what releasing takes. ``total`` is the sum of all of them,
on the scheduler's thread, and ``cpu`` the CPU time of that thread in them. What the other hooks of the steps take,
``between``, is not in it: an engine without a lookup pays for them, too. ``wall`` is the time from the request to the
answer. ``hash`` is the roofline of the one part: token ids packed, xxh3 and sha256 per chunk, nothing else; ``ping`` of
the other: as many bytes to another process and back as lookup and answer have. Medians, in milliseconds.
"""

import hashlib
import random
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import xxhash
from bare_engine import BareEngine
from bench_report import finish, machine, parser, table

from tests.kit.server.probe import figures, wait_for
from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.keys.prefix_keys import PrefixKeys
from tiered_kv.keys.tags import NO_TAG, tag_digest
from tiered_kv.server import protocol as m
from tiered_kv.server.connect import read_message, say_hello

CHUNK, BLOCK = 256, 16
SHAPE = (1, 1, 4, BLOCK)
SLOT_BYTES = 8192  # 4 KiB of header, 256 bytes for each of 16 blocks
CHAIN = 64
TAG = "tenant"
TOLD_STEP_S = 0.005
"""From what has come to the question, where one is only asked then."""
STEPS_MS = (0.0, 1.0, 5.0)
"""Between two questions; 0: asked when something has come."""
CASES = ("host", "disk", "miss")
DISK_BYTES = 128 << 20
LONGEST = 128 << 10
ECHO = """
import socket, sys
far = socket.socket(fileno=int(sys.argv[1]))
while head := far.recv(8, socket.MSG_WAITALL):
    far.recv(int.from_bytes(head[:4], "little"), socket.MSG_WAITALL)
    far.sendall(bytes(int.from_bytes(head[4:], "little")))
"""
COLUMNS = {
    "chunks_in_index": "index", "tokens": "tokens", "case": "case", "steps": "steps", "new_ms": "new",
    "first_ms": "first", "second_ms": "second", "asked": "asked", "polls_ms": "polls", "end_ms": "end",
    "total_ms": "total", "cpu_ms": "cpu", "between_ms": "between", "wall_ms": "wall", "hash_ms": "hash",
    "hash_cpu_ms": "hash cpu", "ping_ms": "ping",
}  # fmt: skip


class Node(BareEngine):
    """A server whose index has so many chunks, and an engine behind it.

    Attributes:
        settings: The cache's.
        prompts: The longest prompt of the cases ``host`` and ``disk``; shorter ones are its beginnings.
        found: Chunks that its index had from the start, of the directory.
    """

    def __init__(self, root: Path, chunks: int, longest: int = LONGEST, most_chunks: int = 0, **bucket: object) -> None:
        # A lookup may lease 37.5 % of host memory: small indexes need more of it than their chunks take.
        host_bytes = max(int(1.05 * max(chunks, most_chunks)) * SLOT_BYTES, 64 << 20) + (64 << 20)
        given = {"host_bytes": host_bytes, "disk_bytes": DISK_BYTES, "chunk_tokens": CHUNK, "drain_s": 0.0}
        more: dict[str, object] = {"promotion_wait_ms": 60_000, "lookup_timeout_ms": 20_000, "start_timeout_s": 60.0}
        more |= bucket
        self.settings: dict[str, object] = {"storage_uri": root.as_uri()} | given | more
        super().__init__(root, given | more, SHAPE)
        self.chunks = chunks
        self.open(blocks=64)
        self.found = self._figure("chunks")
        self.prompts = {case: tokens_of(f"{case} {chunks}", longest) for case in ("host", "disk")}
        for tokens in self.prompts.values():
            self.store(tokens)
        wait_for(lambda: figures(self.root)["tiers"][0]["pending_writes"] == 0, "the disk")
        self.leave_on_disk()
        self.grow(chunks + self.found - self._figure("chunks"), chunks)
        seals = "the last seals"
        wait_for(lambda: self._figure("host_ready_chunks") + 512 >= self._figure("chunks") - self.found, seals)

    def _figure(self, name: str) -> int:
        return int(figures(self.root)["hierarchy"][name])

    def known_chunks(self) -> int:
        """What its index has."""
        return self._figure("chunks")

    def _keys(self, tokens: list[int]) -> PrefixKeys:
        keys = PrefixKeys(self.client.namespace, CHUNK)
        keys.extend(tokens)
        return keys

    def store(self, tokens: list[int]) -> None:
        """Commit a prompt's chunks, as many at once as there are slots for."""
        keys, index = self._keys(tokens), 0
        while index < len(keys.keys):
            batch = []
            for slot in self._take_slots(min(CHAIN, len(keys.keys) - index)):
                namespace = self.client.namespace.digest
                batch.append(
                    (slot, ChunkRecord(namespace, keys.keys[index], keys.parent(index), index, keys.digests[index]))
                )
                index += 1
            self.client.commit(batch)

    def _take_slots(self, most: int) -> list[int]:
        self.client.wake()
        while not self.client.credit_count:
            select.select([self.client._sock], [], [])
            self.client.poll()
        return [self.client.take_slot() for _ in range(min(most, self.client.credit_count))]

    def grow(self, chunks: int, seed: int | str) -> None:
        """Commit so many chunks, of chains whose first chunk is missing; a hundredth of them under ``TAG``."""
        rng = random.Random(seed)
        while chunks > 0:
            parent, batch = rng.randbytes(16), []
            tag = tag_digest(TAG) if rng.random() < 0.01 else NO_TAG
            slots = self._take_slots(min(CHAIN, chunks))
            namespace = self.client.namespace.digest
            for depth, slot in enumerate(slots, 1):
                key = rng.randbytes(16)
                batch.append((slot, ChunkRecord(namespace, key, parent, depth, rng.randbytes(32), tag)))
                parent = key
            self.client.commit(batch)
            chunks -= len(batch)

    def leave_on_disk(self) -> None:
        """Take the chunks of the case ``disk`` out of host memory."""
        keys = b"".join(self._keys(self.prompts["disk"]).keys)
        sock, _ = say_hello(self.scheduler._scheduler.side._lookups._config, "admin", "", 0)
        with sock:
            sock.sendall(m.frame(m.Evict("host", self.client.namespace.digest, keys, holes=True)))
            told = read_message(sock)
        if not isinstance(told, m.Evicted) or told.kept:
            raise RuntimeError(f"chunks stayed in host memory: {told}")

    def prompt(self, case: str, tokens: int, run: int) -> list[int]:
        """The prompt and one more token, so that all of it may be loaded."""
        known = self.prompts.get(case)
        return [*(tokens_of(f"miss {run} {tokens}", tokens) if known is None else known[:tokens]), 1]


def tokens_of(seed: str, count: int) -> list[int]:
    """So many token ids, always the same of a seed."""
    rng = random.Random(seed)
    return [rng.randrange(1 << 17) for _ in range(count)]


def ask(node: BareEngine, name: str, case: str, prompt: list[int], step_s: float = 0.0) -> dict[str, float]:
    """One request from its arrival to its end, in seconds; asked when something has come where ``step_s`` is 0."""
    request = node.request(name, prompt)
    hooks = node.scheduler
    hooks.get_kv_connector_stats()
    taken: dict[str, float] = {}
    begun_s = time.perf_counter()
    cpu_s = time.thread_time()
    taken["new"] = _timed(lambda: hooks.on_new_request(request))
    taken["cpu"] = time.thread_time() - cpu_s
    polls: list[float] = []
    between_s = 0.0
    answer: Any = None
    while answer is None:
        if polls and step_s:
            between_s += _timed(lambda: _rest_of_a_step(hooks))
            time.sleep(step_s)
        elif polls:
            _until_told(node, name)
            time.sleep(TOLD_STEP_S if len(polls) > 1 else 0)
        started_s, cpu_s = time.perf_counter(), time.thread_time()
        answer, _ = hooks.get_num_new_matched_tokens(request, 0)
        taken["cpu"] += time.thread_time() - cpu_s
        polls.append(time.perf_counter() - started_s)
    taken["wall"] = time.perf_counter() - begun_s
    expected = 0 if case == "miss" else len(prompt) - 1
    if answer != expected:
        raise RuntimeError(f"wrong answer. case={case} tokens={len(prompt)} expected={expected} observed={answer}")
    taken["first"], taken["polls"], taken["asked"] = polls[0], sum(polls), len(polls)
    if step_s:
        taken["between"] = between_s
    if len(polls) > 1:
        taken["second"] = polls[1]
    cpu_s = time.thread_time()
    taken["end"] = _timed(lambda: node.finish(request))
    taken["cpu"] += time.thread_time() - cpu_s
    taken["total"] = taken["new"] + taken["polls"] + taken["end"]
    return taken


def _rest_of_a_step(hooks: Any) -> None:
    """What vLLM calls besides, in a step that computes nothing."""
    output = SimpleNamespace(num_scheduled_tokens={}, preempted_req_ids=None, kv_connector_block_state=None)
    hooks.build_connector_meta(output)
    hooks.get_kv_connector_stats()


def _until_told(node: BareEngine, name: str) -> None:
    """Wait as vLLM does between two steps: for the thread that hashes a long prompt, or for the server."""
    state = node.scheduler._scheduler.side.state(name)
    if state.lookup is None:
        while state.is_hashing:
            time.sleep(0.0002)
    else:
        select.select([node.client._sock], [], [])


def _timed(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def hash_only(tokens: list[int]) -> None:
    """Roofline: what naming the chunks needs at least."""
    packed = memoryview(array("I", tokens)).cast("B")
    key, digest = b"\0" * 16, b"\0" * 32
    for start in range(0, len(packed) - len(packed) % (4 * CHUNK), 4 * CHUNK):
        body = packed[start : start + 4 * CHUNK].tobytes()
        key = xxhash.xxh3_128_digest(key + body)
        digest = hashlib.sha256(digest + body).digest()


class Echo:
    """Another process that answers so many bytes with so many; the ping-pong's other end."""

    def __init__(self) -> None:
        self.near, far = socket.socketpair()
        with far:
            command = [sys.executable, "-c", ECHO, str(far.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[far.fileno()])

    def ping(self, chunks: int) -> None:
        """As many bytes as a lookup of so many chunks, and its answer, have."""
        size, back = 48 * chunks + 64, 4 * chunks + 64
        self.near.sendall(size.to_bytes(4, "little") + back.to_bytes(4, "little") + bytes(size))
        self.near.recv(back, socket.MSG_WAITALL)

    def is_answered(self) -> bool:
        """Whether there is anything to read."""
        return bool(select.select([self.near], [], [], 0)[0])

    def close(self) -> None:
        """End it."""
        self.near.close()
        self._process.wait()


def measure(
    nodes: list[Node], echo: Echo, lengths: list[int], steps_ms: Sequence[float], runs: int
) -> list[dict[str, Any]]:
    """Rows by length, size of the index, case and steps."""
    numbers = count()
    rows = []
    for tokens in lengths:
        taken: dict[tuple[int, str, float], list[dict[str, float]]] = {}
        rooflines: dict[str, list[float]] = {"hash": [], "hash_cpu": [], "ping": []}
        for run in range(runs + 1):  # the first is not counted
            for node in nodes:
                for step_ms in steps_ms:
                    for case, sample in _ask_all(node, tokens, numbers, step_ms):
                        if run:
                            taken.setdefault((node.chunks, case, step_ms), []).append(sample)
                known = node.prompts["host"][:tokens]
                cpu_s = time.thread_time()
                rooflines["hash"].append(_timed(partial(hash_only, known)))
                rooflines["hash_cpu"].append(time.thread_time() - cpu_s)
                rooflines["ping"].append(_timed(partial(echo.ping, len(known) // CHUNK)))
        for (chunks, case, step_ms), samples in sorted(taken.items()):
            row: dict[str, Any] = {"chunks_in_index": chunks, "tokens": tokens, "case": case}
            row |= {"steps": f"{step_ms:g} ms" if step_ms else "told", "requests": len(samples)}
            row["asked"] = statistics.median(sample["asked"] for sample in samples)
            for what in ("new", "first", "second", "polls", "end", "total", "cpu", "between", "wall"):
                values = [1e3 * sample[what] for sample in samples if what in sample]
                row[f"{what}_ms"] = round(statistics.median(values), 4) if values else None
                row[f"{what}_max_ms"] = round(max(values), 4) if values else None
            row |= {f"{what}_ms": round(1e3 * statistics.median(values), 4) for what, values in rooflines.items()}
            rows.append(row)
            print(table([row], COLUMNS)[-1], flush=True)
    return rows


def _ask_all(node: Node, tokens: int, numbers: Iterator[int], step_ms: float) -> Iterator[tuple[str, dict[str, float]]]:
    """One request of each case."""
    for case in CASES:
        number = next(numbers)
        yield case, ask(node, f"r{number}", case, node.prompt(case, tokens, number), step_ms / 1e3)
        if case == "disk":
            wait_for(lambda: node._figure("leased_bytes") == 0, "the end of the leases")
            node.leave_on_disk()


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true", help="without the index of 1M chunks")
    options.add_argument("--runs", type=int, default=11)
    options.add_argument("--sizes", type=int, nargs="+", default=[10_000, 100_000, 1_000_000], help="of the index")
    options.add_argument("--tokens", type=int, nargs="+", default=[1 << 10, 4 << 10, 16 << 10, 64 << 10, LONGEST])
    options.add_argument("--steps", type=float, nargs="+", default=STEPS_MS, help="ms; 0: when something has come")
    given = options.parse_args()
    sizes = [size for size in given.sizes if not (given.quick and size >= 1_000_000)]
    fill_s = {}
    nodes: list[Node] = []
    echo = Echo()
    with tempfile.TemporaryDirectory(prefix="tkv-", ignore_cleanup_errors=True) as work:
        try:
            for size in sizes:
                started_s = time.monotonic()
                nodes.append(Node(Path(work) / f"index-{size}", size, max(given.tokens)))
                fill_s[size] = round(time.monotonic() - started_s, 1)
            print("\n".join(table([], COLUMNS)), flush=True)
            rows = measure(nodes, echo, given.tokens, given.steps, given.runs)
        finally:
            echo.close()
            for node in nodes:
                node.close()
    finish("lookup", rows, machine("lookup", runs=given.runs, fill_s=fill_s), is_kept=given.keep)


if __name__ == "__main__":
    main()
