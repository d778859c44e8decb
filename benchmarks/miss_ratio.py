"""The online miss-ratio curve beside an exact simulation of LRU, and what it costs.

    python benchmarks/miss_ratio.py [--conversations FILE] [--agents FILE] [--every N] [--keep]

- ``accuracy``: three traces, the two recorded ones of `tests/data/README.md` and a drawn one with popularities after
  Zipf. Caches of 2, 5, 10, 25 and 50 % of the chunks: the share of the prompts' chunks that LRU finds, simulated
  exactly, beside what the curve says.
- ``cost``: CPU time of a chunk of a looked up prompt in the curve, and in the product's tiering, which looks it up,
  stores and evicts, and moves no byte: there the beginnings of the traces, on a disk of a tenth of the chunks. Medians
  of 3, in turns. The curve's longest call. Memory of a full sample with 16 namespaces.
"""

import hashlib
import json
import random
import statistics
import sys
import time
import tracemalloc
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import bench_report as report
from agents_trace import read as read_agents  # beside this script
from trace_hierarchy import CHUNK, NAMESPACE, Replay
from trace_policies import Lru, replay

from tiered_kv.tiering.miss_ratio import NAMESPACES_MAX, SAMPLES_MAX, MissRatioCurves
from tiered_kv.tiering.tiering import CURVE_SPAN

DATA = report.REPOSITORY / "tests" / "data"
SHARES = (0.02, 0.05, 0.1, 0.25, 0.5)
"""Sizes of caches, of all chunks that a trace has."""

AGENT_CHUNK_TOKENS = 256
ROUNDS = 3
TIMED_CHUNKS = 15_000
"""Of a trace, how many chunks asked for go through the tiering: it takes 0.1 ms for each."""

Requests = list[list[int]]


def conversations(trace: Path) -> Requests:
    """Prompts by ids of their chunks."""
    with trace.open() as lines:
        return [json.loads(line)["hash_ids"] for line in lines]


def agents(trace: Path, every: int = 1) -> Requests:
    return [turn.chunks for turn in read_agents(trace, AGENT_CHUNK_TOKENS, every=every, sessions_per_hour=65)]


def zipf(requests: int = 20_000, documents: int = 4_000, seed: int = 1) -> Requests:
    """Documents of 1 to 40 chunks, asked for after Zipf's law, each time with a question of 2 chunks of its own."""
    draw = random.Random(seed)
    lengths = [draw.randint(1, 40) for _ in range(documents)]
    asked = draw.choices(range(documents), [1 / (rank + 1) for rank in range(documents)], k=requests)
    own = documents * 64
    return [
        [*range(64 * one, 64 * one + lengths[one]), own + 2 * number, own + 2 * number + 1]
        for number, one in enumerate(asked)
    ]


def keys_of(requests: Requests) -> list[list[bytes]]:
    """Keys as the product has them: hashes."""
    keys = {block: hashlib.md5(block.to_bytes(8, "big")).digest() for blocks in requests for block in blocks}
    return [[keys[block] for block in blocks] for blocks in requests]


def fed(prompts: Sequence[Sequence[bytes]], span_chunks: int, samples_max: int) -> MissRatioCurves:
    """A curve that has seen these prompts."""
    curves = MissRatioCurves(span_chunks * CHUNK, samples_max)
    for keys in prompts:
        curves.looked_up(NAMESPACE, keys, CHUNK)
    return curves


def accuracy(name: str, requests: Requests, samples_max: int = SAMPLES_MAX) -> list[dict[str, Any]]:
    """What LRU caches of five sizes find, exactly and by the curve, in percent of all chunks asked for."""
    asked = sum(map(len, requests))
    distinct = len({block for blocks in requests for block in blocks})
    sizes = [int(share * distinct) for share in SHARES]
    curves = fed(keys_of(requests), distinct, samples_max)
    rows = []
    for share, size in zip(SHARES, sizes, strict=True):
        exact = 100 * sum(replay(requests, Lru(size))) / asked
        said = 100 * curves.curves()[NAMESPACE].found_share(size * CHUNK)
        rows.append(
            {
                "trace": name,
                "chunks": distinct,
                "cache": f"{share:.0%}",
                "exact": exact,
                "curve": said,
                "difference": said - exact,
                "rate": curves.rate,
                "samples": curves.sample_count,
            }
        )
    return rows


def tiering_s(requests: Requests, disk_chunks: int) -> float:
    """CPU time of the product's tiering, its curve included."""
    hierarchy = Replay(disk_chunks, "multi-queue")
    started_s = time.process_time()
    hierarchy.run(requests)
    return time.process_time() - started_s


def curve_s(prompts: Sequence[Sequence[bytes]], disk_chunks: int) -> tuple[float, float]:
    """CPU time of the curve alone under the same lookups, and of its longest call."""
    curves = MissRatioCurves(CURVE_SPAN * disk_chunks * CHUNK)
    longest_s = 0.0
    started_s = before_s = time.process_time()
    for keys in prompts:
        curves.looked_up(NAMESPACE, keys, CHUNK)
        now_s = time.process_time()
        longest_s = max(longest_s, now_s - before_s)
        before_s = now_s
    return before_s - started_s, longest_s


def cost(name: str, requests: Requests) -> dict[str, Any]:
    """What the curve takes beside the tiering, per chunk of the prompts."""
    sizes = list(accumulate(map(len, requests)))
    distinct = len({block for blocks in requests for block in blocks})
    disk_chunks, prompts = distinct // 10, keys_of(requests)
    timed = bisect_left(sizes, TIMED_CHUNKS) + 1
    beginning = [[int.from_bytes(key, "big") for key in keys] for keys in prompts[:timed]]
    whole, alone, longest = [], [], []
    for _ in range(ROUNDS):
        whole.append(tiering_s(beginning, disk_chunks) / sum(map(len, beginning)))
        own_s, longest_s = curve_s(prompts, disk_chunks)
        alone.append(own_s / sizes[-1])
        longest.append(longest_s)
    return {
        "trace": name,
        "chunks_asked": sizes[-1],
        "curve_us": 1e6 * statistics.median(alone),
        "tiering_us": 1e6 * statistics.median(whole),
        "percent_of_tiering": 100 * statistics.median(alone) / statistics.median(whole),
        "longest_ms": 1e3 * statistics.median(longest),
    }


def memory_bytes() -> int:
    """What a full sample takes: 16 namespaces, and prompts of one chunk, so that each is a moment of its own."""
    tracemalloc.start()
    curves = MissRatioCurves(1 << 62)
    for number in range(2 * SAMPLES_MAX):
        key = hashlib.md5(number.to_bytes(8, "big")).digest()
        curves.looked_up((number % NAMESPACES_MAX).to_bytes(16, "big"), [key], 1 << 25)
    size = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return size


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--conversations", type=Path, default=DATA / "conversation_trace_small.jsonl")
    parser.add_argument("--agents", type=Path, default=DATA / "agent_sessions_small.jsonl")
    parser.add_argument("--every", type=int, default=1, help="take every N-th session of agents")
    options = parser.parse_args()
    for trace in (options.conversations, options.agents):
        if not trace.exists():
            sys.exit(f"there is no trace at {trace}: name one")
    traces = {
        "conversations": conversations(options.conversations),
        "agents": agents(options.agents, options.every),
        "Zipf": zipf(),
    }
    result: dict[str, Any] = {"accuracy": [], "cost": [], "memory_mib": memory_bytes() / 2**20}
    for name, requests in traces.items():
        result["accuracy"] += accuracy(name, requests)
        result["cost"].append(cost(name, requests))
    for rows in (result["accuracy"], result["cost"]):
        print("\n".join(["", *report.table(rows, {field: field.replace("_", " ") for field in rows[0]})]))
    print(f"\nmemory of a full sample: {result['memory_mib']:.1f} MiB\n")
    report.finish("miss_ratio", result, report.machine("miss_ratio"), is_kept=options.keep)


if __name__ == "__main__":
    main()
