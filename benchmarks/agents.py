"""Coding agents' sessions through the product's own tiering, in virtual time, beside other caches of equal bytes.

    python benchmarks/agents.py [--trace FILE] [--json OUT] [--every N] [--sizes GPU,HOST,DISK[,bucket] ...]
                                [--systems NAME ...] [--dropped SHARE] [--reasoning TOKENS] [--keep]

The trace has one session a line, as `tests/data/README.md` says. Every N-th session is taken; they start at a steady
rate. Sizes are in tokens, ``2M`` is two million. What is modelled and what is real: `agents_hierarchy.py` and
`agents_rivals.py`. Prints, then as JSON on the last line:

- ``units``: what an infinite cache of whole units leaves to compute, with and without answers in it. A tail kept below
  a chunk counts as its own unit: chunks of 256 tokens with tails of 16 find what units of 16 find.
- "ours" keeps ends of prompts below a chunk where a next turn is likely (decisions/0048), as its defaults do; "tails of
  all" of every turn, "tails in memory" those not on disk, "no tails" none.
- ``systems``: for every size and system the share of what an infinite cache of chunks finds, what is computed, also for
  follow-up turns beside an unlimited prefix cache (16 tokens, answers kept), bytes written to disk per byte found below
  the GPU, and requests to the bucket per 1,000 turns. Ours keeps answers and writes them when they are asked for; "at
  once" writes them as prompts are, "no answers" keeps none, as the others. Others are replayed without time, as "ours,
  no time" is; those with a bounded pool are left out where there is a bucket.
- ``gaps``: how long first tokens of follow-up turns take after gaps of so many seconds, ours, in virtual seconds.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import agents_rivals as rivals
import bench_report as report
from agents_hierarchy import BUCKET, DISK, GPU_BLOCK_TOKENS, AgentReplay, Served, Sizes, Speeds  # beside this script
from agents_trace import Turn, computed_by_unit, read

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

TRACE = report.REPOSITORY.parent / "shared" / "data" / "agent_sessions.jsonl"
SIZES = ("500k,500k,1M", "1M,4M,16M,bucket")
UNITS = (16, 32, 64, 128, 256)
OURS: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours, answers at once": {"answers": "at once"},
    "ours, no answers": {"answers": "none"},
    "ours, LRU": {"eviction": "lru"},
    "ours, second touch": {"admission": "second-touch"},
    "ours, no tails": {"tail_tokens": 0},
    "ours, tails of all": {"tails_of_all": True},
    "ours, tails in memory": {"tails_of_all": True, "tails_on_disk": False},
    "ours, no time": {},
}
NO_TIME = Speeds(1, 1e15, 1e15, (0.0, 0.0), (1e15, 1e15))
"""Every turn has ended before the next one: as the others are replayed."""

RIVALS = ("LMCache, modelled", "native, LRU", "native, ARC", "optimum")
GAPS = {
    "at most 10 s": 10.0,
    "10 s to 1 min": 60.0,
    "1 to 5 min": 300.0,
    "5 min to 1 h": 3600.0,
    "longer": float("inf"),
}
COLUMNS = {
    "system": "cache",
    "of_infinite_percent": "% of what an infinite one finds",
    "computed_percent": "% computed",
    "follow_up_mean": "tokens a follow-up computes",
    "times_unlimited": "x unlimited prefix cache",
    "written": "chunks written",
    "written_per_found": "bytes written per byte found",
    "bucket_requests": "bucket requests per 1,000 turns",
}
GAP_COLUMNS = {
    "gap": "gap",
    "turns": "turns",
    "first_token_s": "first token s, median",
    "p90_s": "p90",
    "wait_s": "waits for the cache s, p90",
}

_turns: list[Turn] = []


def sizes_of(text: str) -> Sizes:
    """``1M,4M,16M,bucket`` as sizes in tokens."""
    parts = text.split(",")
    has_bucket = parts[-1] == "bucket"
    try:
        gpu, host, disk = (int(float(part.rstrip("kM")) * {"k": 1e3, "M": 1e6}.get(part[-1], 1)) for part in parts[:3])
    except (ValueError, IndexError):
        gpu = host = disk = 0
    if gpu <= 0 or len(parts) != 3 + has_bucket:
        raise argparse.ArgumentTypeError(
            f"sizes should be GPU,HOST,DISK or GPU,HOST,DISK,bucket in tokens, not {text!r}"
        )
    return Sizes(gpu, host, disk, has_bucket)


def load(trace: Path, chunk_tokens: int, every: int, rate: float, dropped: float, reasoning: int) -> None:
    """Read the trace once in every process; ``rate``: sessions per hour."""
    _turns[:] = read(trace, chunk_tokens, every=every, sessions_per_hour=rate, dropped=dropped, reasoning=reasoning)


def simulate(job: tuple[str, str, int, Speeds]) -> dict[str, Any]:
    """One cache of one size."""
    system, sizes_text, chunk_tokens, speeds = job
    sizes = sizes_of(sizes_text)
    row: dict[str, Any] = {"sizes": sizes_text, "system": system}
    if system in OURS:
        speeds = NO_TIME if system == "ours, no time" else speeds
        ours = AgentReplay(sizes, chunk_tokens, speeds=speeds, **{"tail_tokens": GPU_BLOCK_TOKENS} | OURS[system])
        ours.run(_turns)
        row |= _rates([(one.turn, one.found) for one in ours.served], chunk_tokens)
        below = sum(one.below_chunks for one in ours.served)
        row["written"] = ours.operations[DISK, "Write"]
        row["written_per_found"] = row["written"] / max(1, below)
        if sizes.has_bucket:
            requests = sum(number for (tier, _), number in ours.operations.items() if tier == BUCKET)
            row["bucket_requests"] = round(1000 * requests / len(_turns))
        row |= {"dropped": ours.dropped, "gaps": _by_gap(ours.served)}
        if ours.tail_tokens:
            row |= {"tails_left": ours.tails_left, "tails_found": ours.tails_found, "tails_most": ours.tails_most}
            row |= {"tails_written": ours.tails_written, "tails_read": ours.tails_read}
        return row
    if system == "optimum":
        found = rivals.optimum(_turns, sizes, chunk_tokens)
    elif system.startswith("native"):
        found = rivals.native(_turns, sizes, chunk_tokens, system.split()[-1].lower())
    else:
        found = rivals.lmcache(_turns, sizes, chunk_tokens)
    row |= _rates(list(zip(_turns, found.tokens, strict=True)), chunk_tokens)
    if found.below_chunks:
        row["written"] = found.written
        row["written_per_found"] = found.written / found.below_chunks
    return row


def _rates(found: Sequence[tuple[Turn, int]], chunk_tokens: int) -> dict[str, float]:
    asked = sum(turn.tokens for turn, _ in found)
    ever = [turn.found_ever(chunk_tokens, with_answers=False) for turn, _ in found]
    both = sum(min(tokens, most) for (_, tokens), most in zip(found, ever, strict=True))  # answers are no part of it
    followed = [(turn, tokens) for turn, tokens in found if turn.gap_s is not None]
    least = sum(turn.tokens - turn.found_ever(UNITS[0], with_answers=True) for turn, _ in followed)
    computed = sum(turn.tokens - tokens for turn, tokens in followed)
    return {
        "of_infinite_percent": 100 * both / sum(ever),
        "found_percent": 100 * sum(tokens for _, tokens in found) / asked,
        "computed_percent": 100 * sum(turn.tokens - tokens for turn, tokens in found) / asked,
        "follow_up_mean": round(computed / len(followed)),
        "times_unlimited": computed / least,
    }


def _by_gap(served: Sequence[Served]) -> list[dict[str, Any]]:
    rows, above_s = [], -1.0
    for name, most_s in GAPS.items():
        some = [one for one in served if one.turn.gap_s is not None and above_s < one.turn.gap_s <= most_s]
        above_s = most_s
        if some:
            first = [one.first_token_s for one in some]
            rows.append(
                {
                    "gap": name,
                    "turns": len(some),
                    "first_token_s": statistics.median(first),
                    "p90_s": report.percentile(first, 0.9),
                    "wait_s": report.percentile([one.wait_s for one in some], 0.9),
                }
            )
    return rows


def main() -> None:
    parser = report.parser(__doc__)
    speeds = Speeds()
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--json", type=Path, help="write the results there, too")
    parser.add_argument("--every", type=int, default=1, help="take every N-th session")
    parser.add_argument("--sessions-per-hour", type=float, default=65, help="that start")
    parser.add_argument("--dropped", type=float, default=0.0, help="share of answers that the next turn leaves out")
    parser.add_argument("--reasoning", type=int, default=0, help="tokens more that every answer begins with and drops")
    parser.add_argument("--chunk-tokens", type=int, default=256, help="a multiple of 64")
    parser.add_argument("--sizes", nargs="+", type=str, default=SIZES, help="in tokens: GPU,HOST,DISK or with ,bucket")
    parser.add_argument("--systems", nargs="+", choices=[*OURS, *RIVALS], default=[*OURS, *RIVALS], metavar="NAME")
    parser.add_argument("--token-bytes", type=int, default=speeds.token_bytes, help="KV of one token")
    parser.add_argument("--prefill", type=float, default=speeds.prefill_tokens_per_s, help="tokens per second")
    parser.add_argument("--disk-gb-s", type=float, default=speeds.bytes_per_s[0] / 1e9)
    parser.add_argument("--bucket-gb-s", type=float, default=speeds.bytes_per_s[1] / 1e9)
    parser.add_argument("--bucket-latency-s", type=float, default=speeds.latency_s[1])
    options = parser.parse_args()
    if not options.trace.exists():
        sys.exit(f"there is no trace at {options.trace}: name one with --trace")
    if options.chunk_tokens % 64:
        parser.error(f"--chunk-tokens should be a multiple of 64, the trace's own unit, not {options.chunk_tokens}")
    for text in options.sizes:
        try:
            sizes_of(text)
        except argparse.ArgumentTypeError as error:
            parser.error(str(error))
    speeds = Speeds(
        options.token_bytes,
        options.prefill,
        speeds.load_bytes_per_s,
        (speeds.latency_s[0], options.bucket_latency_s),
        (options.disk_gb_s * 1e9, options.bucket_gb_s * 1e9),
    )
    rate, dropped, reasoning = options.sessions_per_hour, options.dropped, options.reasoning
    taken = (options.trace, options.chunk_tokens, options.every, rate, dropped, reasoning)
    load(*taken)
    result: dict[str, Any] = {"turns": len(_turns), "units": computed_by_unit(_turns, UNITS), "systems": []}
    print("\n".join(["", f"{len(_turns)} turns", "", *report.table(result["units"], _headings(result["units"]))]))
    with ProcessPoolExecutor(2, initializer=load, initargs=taken) as pool:
        for text in options.sizes:
            systems = [name for name in options.systems if name in OURS or not sizes_of(text).has_bucket]
            rows = list(pool.map(simulate, [(name, text, options.chunk_tokens, speeds) for name in systems]))
            result["systems"] += rows
            print("\n".join(["", f"GPU, host, disk: {text}", "", *report.table(rows, COLUMNS)]))
            for gaps in [row["gaps"] for row in rows if row["system"] == "ours"]:
                print("\n".join(["", *report.table(gaps, GAP_COLUMNS)]), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    report.finish("agents", result, report.machine("agents"), is_kept=options.keep)


def _headings(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    return {name: name.replace("_", " ") for name in rows[0]}


if __name__ == "__main__":
    main()
