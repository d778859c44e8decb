"""Hit rates on a request trace: ours, LRU, Belady's optimum and an infinite cache.

    python benchmarks/trace.py [--trace FILE] [--only SECTION] [--keep]

The trace has one JSON object a line: ``input_length`` in tokens, ``hash_ids`` with one id per 512 tokens of the prompt
(equal ids: equal prefix). Every cache sees the whole trace; hits of the first half, in which ours was tuned (on its
second quarter: the first fills the caches), and of the second half are counted apart. Sections:

- ``policies``: caches of blocks in plain Python, seconds for a pass; a hit has all blocks before it.
- ``neighbours``: ours with other parameters, relative to LRU.
- ``hierarchy``: the product's tiering with a disk of so many chunks, of whole blocks only, as vLLM stores them:
  tokens found of tokens asked for, and bytes written per byte that was found.
- ``admission``: the same with and without admission by the second touch, for two sizes of host memory.
- ``cost``: time per operation and memory per key of the product's two policies, in turns, medians of 5.

Prints tables, then JSON on the last line. Passes run on two processes; nothing but ``cost`` is a time.
"""

import json
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import bench_report as report
from trace_hierarchy import HOST_CHUNKS, Replay  # beside this script
from trace_policies import Cache, Lru, MultiQueue, Optimum, replay

from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.tiering.admission import ALL, SECOND_TOUCH
from tiered_kv.tiering.eviction import EvictionOrder
from tiered_kv.tiering.eviction_policy import EvictionPolicy, UseClock
from tiered_kv.tiering.index import BlobState, GhostList, Index
from tiered_kv.tiering.lru import Lru as ProductLru
from tiered_kv.tiering.multi_queue import MultiQueue as ProductMultiQueue
from tiered_kv.tiering.quotas import Quota, Quotas

REPOSITORY = Path(__file__).resolve().parent.parent
TRACE = REPOSITORY.parent / "shared" / "data" / "conversation_trace.jsonl"
SIZES = (1_000, 5_000, 10_000, 20_000, 50_000)
BLOCK_TOKENS = 512
UNLIMITED = 1 << 60
NEIGHBOURS = [
    *[(levels, 1.0) for levels in (1, 2, 3, 4, 6, 8)],
    *[(4, generations) for generations in (0.25, 0.5, 2.0)],
]
SECTIONS = ("policies", "neighbours", "hierarchy", "admission", "cost")
HOSTS = (HOST_CHUNKS, 1_000)
"""Chunks of host memory: next to none, and one that holds a first touch for a while."""
NAMESPACES = ((1, 0), (300, 0), (300, 1), (300, 4), (300, 20))
"""Of a tier, and how many of them have a share."""

_requests: list[list[int]] = []
_lengths: list[int] = []


def read(trace: Path) -> None:
    """Read the trace once in every process."""
    rows = [json.loads(line) for line in trace.read_text().splitlines()]
    _requests[:] = [row["hash_ids"] for row in rows]
    _lengths[:] = [row["input_length"] for row in rows]


def cache(name: str, size: int) -> Cache:
    if name == "infinite":
        return Lru(UNLIMITED)
    if name == "Belady":
        return Optimum(size, _requests)
    if name.startswith("ours "):
        levels, generations = name.split()[1:]
        return MultiQueue(size, int(levels), float(generations))
    makes: dict[str, Callable[[int], Cache]] = {"LRU": Lru, "ours": MultiQueue}
    return makes[name](size)


def shares(hits: Sequence[int], asked: Sequence[int]) -> dict[str, float]:
    """Hit rates in percent of the first half, of its second quarter and of the second half."""
    half = len(asked) // 2
    parts = {"first": slice(half), "quarter": slice(half // 2, half), "second": slice(half, None)}
    return {part: 100 * sum(hits[which]) / sum(asked[which]) for part, which in parts.items()}


def simulate(job: tuple[str, int]) -> dict[str, Any]:
    name, size = job
    hits = replay(_requests, cache(name, size))
    return {"policy": name, "blocks": size, **shares(hits, [len(blocks) for blocks in _requests])}


def through_hierarchy(job: tuple[str, int | None]) -> dict[str, Any]:
    """Tokens found, and chunks written per chunk found in the second half."""
    name, size = job
    return replayed(name, size, Replay(size, "lru" if name == "LRU" else "multi-queue"))


def admitted(job: tuple[str, int, int | None]) -> dict[str, Any]:
    """The same with a rule of admission and so many chunks of host memory."""
    rule, host_chunks, size = job
    return replayed(f"{rule}, {host_chunks}", size, Replay(size, "multi-queue", rule, host_chunks))


def replayed(name: str, size: int | None, replay: Replay) -> dict[str, Any]:
    """What the trace's whole blocks come to."""
    whole = [blocks[: length // BLOCK_TOKENS] for blocks, length in zip(_requests, _lengths, strict=True)]
    served = replay.run(whole)
    half = len(whole) // 2
    written = served.written[-1] - served.written[half - 1]
    found = sum(served.hits[half:])
    rates = shares([hits * BLOCK_TOKENS for hits in served.hits], _lengths)
    return {"policy": name, "blocks": size, **rates, "written": written, "written_per_found": written / found}


class PolicyCost:
    """Prefixes of 64 chunks in one policy, as many as there are keys for."""

    def __init__(self, make: Callable[[], EvictionPolicy], key_count: int) -> None:
        self.policy = make()
        keys = [number.to_bytes(16, "big") for number in range(key_count)]
        self.prefixes = [keys[start : start + 64][::-1] for start in range(0, key_count, 64)]
        tracemalloc.start()
        for prefix in self.prefixes:
            self._add(prefix)
        self.bytes_per_key = tracemalloc.get_traced_memory()[0] / key_count
        tracemalloc.stop()

    def _add(self, prefix: list[bytes]) -> None:
        parent = None
        for key in reversed(prefix):
            self.policy.add(key, parent)
            parent = key

    def use_all(self) -> None:
        for prefix in self.prefixes:
            self.policy.record_use(prefix)

    def exchange_all(self) -> None:
        """Look for the next to go and remove it, once per key; after every 64 they come again, as one prefix."""
        for prefix in self.prefixes:
            victims = []
            for _ in prefix:
                victims.append(next(iter(self.policy)))
                self.policy.remove(victims[-1])
            self._add(victims)


def costs(key_count: int = 1 << 17) -> list[dict[str, Any]]:
    makes: dict[str, Callable[[], EvictionPolicy]] = {
        "LRU": partial(ProductLru, lambda _: 0, UseClock()),
        "ours": partial(ProductMultiQueue, {n.to_bytes(16, "big"): n // 64 % 5 for n in range(key_count)}.__getitem__),
    }
    policies = {name: PolicyCost(make, key_count) for name, make in makes.items()}
    taken: dict[tuple[str, str], list[float]] = {}
    for _ in range(5):
        for what in ("use_all", "exchange_all"):
            for name, cost in policies.items():
                start_s = time.perf_counter()
                getattr(cost, what)()
                taken.setdefault((name, what), []).append((time.perf_counter() - start_s) / key_count * 1e6)
    rows = []
    for name, cost in policies.items():
        median = {what: statistics.median(taken[name, what]) for what in ("use_all", "exchange_all")}
        rows.append(
            {
                "policy": name,
                "keys": key_count,
                "use_us": median["use_all"],
                "exchange_us": median["exchange_all"],
                "bytes_per_key": cost.bytes_per_key,
            }
        )
    return rows


def eviction_us(namespace_count: int, share_count: int, chunk_count: int = 1 << 15) -> float:
    """Find, remove and add one chunk of a tier with so many namespaces, in the product's order; some have a share."""
    index, quotas = Index(2), Quotas()
    for number in range(share_count):
        quotas.set(number.to_bytes(16, "big"), Quota(at_least=0.001))
    order = EvictionOrder(1, index, quotas, ProductMultiQueue)
    for number in range(chunk_count):
        namespace = (number % namespace_count).to_bytes(16, "big")
        record = ChunkRecord(namespace, (1 << 20 | number).to_bytes(16, "big"), namespace, 0, bytes(32))
        entry = index.add(record)
        index.set_blob_state(entry, 1, BlobState.PRESENT)
        order.add(entry)
    times_s = []
    for _ in range(5):
        start_s = time.perf_counter()
        for _ in range(2000):
            entry = next(iter(order))
            order.remove(entry)
            order.add(entry)
        times_s.append((time.perf_counter() - start_s) / 2000)
    return statistics.median(times_s) * 1e6


def gone_bytes(key_count: int = 1 << 17) -> float:
    """Memory of one key that is gone, its bytes included."""
    tracemalloc.start()
    gone = GhostList()
    for number in range(key_count):
        gone.remember(number.to_bytes(16, "big"), 1, key_count)
    size = tracemalloc.get_traced_memory()[0] / len(gone)
    tracemalloc.stop()
    return size


def show(title: str, rows: list[dict[str, Any]], part: str, *, is_relative: bool = False) -> None:
    """One line per policy, one column per size."""
    sizes = sorted({row["blocks"] for row in rows if row["blocks"] is not None})
    value = {(row["policy"], row["blocks"]): row[part] for row in rows}
    print(f"\n{title}\n{'':>16}" + "".join(f"{size:>9}" for size in sizes))
    for name in dict.fromkeys(row["policy"] for row in rows):
        cells = [value.get((name, size), value.get((name, None))) for size in sizes]
        if is_relative:
            cells = [cell / value["LRU", size] for cell, size in zip(cells, sizes, strict=True)]
        print(f"{name:>16}" + "".join(f"{cell:9.{3 if is_relative else 2}f}" for cell in cells))


def run_section(section: str, pool: ProcessPoolExecutor) -> list[dict[str, Any]]:
    if section == "policies":
        names = ["LRU", "ours", "Belady", "infinite"]
        rows = list(pool.map(simulate, [(name, size) for size in SIZES for name in names]))
        show("policies: hits in % of blocks, first half", rows, "first")
        show("policies: hits in % of blocks, second half", rows, "second")
        show("the same relative to LRU", rows, "second", is_relative=True)
    elif section == "neighbours":
        names = ["LRU", *[f"ours {levels} {generations:g}" for levels, generations in NEIGHBOURS]]
        rows = list(pool.map(simulate, [(name, size) for size in SIZES for name in names]))
        show("levels and size of a generation, relative to LRU, second quarter", rows, "quarter", is_relative=True)
        show("the same, second half", rows, "second", is_relative=True)
    elif section == "hierarchy":
        jobs: list[tuple[str, int | None]] = [(name, size) for size in SIZES[1:] for name in ("LRU", "ours")]
        rows = list(pool.map(through_hierarchy, [*jobs, ("infinite", None)]))
        show("the product's tiering: tokens found, in % of those asked for, second half", rows, "second")
        show("bytes written to the disk tier per byte found, second half", rows, "written_per_found")
    elif section == "admission":
        many = 1 << 20  # more than the trace has: a disk without a limit that fits the table
        cases = [(rule, host, size) for host in HOSTS for rule in (ALL, SECOND_TOUCH) for size in (*SIZES[1:], many)]
        rows = list(pool.map(admitted, cases))
        show("admission and chunks of host memory: tokens found, in % of those asked for, second half", rows, "second")
        show("chunks written to the disk tier, second half", rows, "written")
        show("bytes written to the disk tier per byte found, second half", rows, "written_per_found")
    else:
        rows = costs()
        for row in rows:
            print(
                f"\n{row['policy']}: {row['use_us']:.2f} us per key used, {row['exchange_us']:.2f} us to find, remove "
                f"and add one, {row['bytes_per_key']:.0f} bytes per key"
            )
        for spaces, shared in NAMESPACES:
            rows.append({"policy": f"{spaces} namespaces, {shared} shares", "exchange_us": eviction_us(spaces, shared)})
            print(f"\n{rows[-1]['policy']}: {rows[-1]['exchange_us']:.2f} us to find, remove and add one chunk")
        rows.append({"policy": "gone", "bytes_per_key": gone_bytes()})
        print(f"\n{rows[-1]['bytes_per_key']:.0f} bytes per key that is gone and remembered")
    return rows


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--only", choices=SECTIONS, help="one section; those that were kept stay as they are")
    options = parser.parse_args()
    if not options.trace.exists():
        sys.exit(f"there is no trace at {options.trace}: name one with --trace")
    result: dict[str, Any] = {}
    kept = report.FIGURES / "trace.json"
    if options.only and kept.exists():
        result |= json.loads(kept.read_text())["results"]
    with ProcessPoolExecutor(2, initializer=read, initargs=(options.trace,)) as pool:
        for section in SECTIONS:
            if options.only in (None, section):
                result[section] = run_section(section, pool)
    report.finish("trace", result, report.machine("trace"), is_kept=options.keep)


if __name__ == "__main__":
    main()
