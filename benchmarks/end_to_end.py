"""What the cache gives and costs a real vLLM: time to the first token from every tier, and throughput with no hits.

    python benchmarks/end_to_end.py [--repeats N] [--pairs N] [--tokens N] [--keep]

Two engines on CPU with the demo's model, each an engine core in a process of its own: plain vLLM, and vLLM with the
connector over disk and a real S3 server. They take turns.

``ttft``     prompts of ``--tokens`` tokens that nobody saw: computed (by either engine), then from the GPU's prefix
             cache (on this machine: vLLM's paged KV in memory), from host memory, from disk (pages dropped before),
             from the bucket. Each repeat takes a new prompt through all of them; each hit is paired with one of plain's
             prefix cache, right before or after it. Before every one the tiers above are emptied with ``tiered-kv
             evict``.
``nothing``  batches of prompts that never come again, one after the other on each engine, in pairs of which every
             other one begins with the connector. The ratio is plain's seconds / the connector's, so above 1 the
             connector was faster. After a batch of the connector's its server is waited for, so that its writes do not
             fall into plain's time; how long is in the table. With the disk tier alone: a bucket's server would have to
             run on the same cores, where no user has it.

The roofline of a hit is vLLM's own prefix cache: the time of a request that computes only the end of its prompt. Prints
two tables, then JSON.
"""

import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import bench_report as report

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "scripts")]

from disk_io import drop  # noqa: E402  # beside this script
from serving import ServedEngine, build_model_once, prompts, served, warm_up  # noqa: E402

from tests.kit.s3 import open_s3  # noqa: E402
from tests.kit.server.object_nodes import s3_place  # noqa: E402
from tests.kit.server.probe import wait_written  # noqa: E402
from tests.kit.storage.disk_probe import blob_files  # noqa: E402
from tiered_kv.server.directory import read_info  # noqa: E402

TIERS = ("gpu", "host", "disk", "object")
BATCH = 6
BATCH_TOKENS = 500
ANSWER_TOKENS = 16
RESAMPLES = 10_000


def evict(root: Path, tier: str) -> None:
    """Empty a tier of the running server, as an operator would."""
    info = read_info(root)
    assert info is not None
    command = [str(Path(sys.executable).with_name("tiered-kv")), "evict", "--server", f"unix://{info.socket}"]
    subprocess.run([*command, "--tier", tier, "--all", "--yes"], check=True, capture_output=True)


def measure_ttft(plain: ServedEngine, cached: ServedEngine, root: Path, repeats: int, tokens: int) -> dict[str, Any]:
    """Milliseconds to the first token by where the prefix was; medians, and the tokens that were not computed."""
    taken: dict[str, list[float]] = {name: [] for name in ("plain", "plain gpu", "computed", *TIERS)}
    hits: dict[str, set[int]] = {name: set() for name in taken}

    def note(name: str, engine: ServedEngine, prompt: Sequence[int]) -> None:
        timed = engine.ttft(prompt)
        taken[name].append(1e3 * timed.ttft_s)
        hits[name].add(timed.cached_tokens)

    turns = count()
    for prompt in prompts(1, repeats, tokens):
        plain.forget()
        note("plain", plain, prompt)
        note("computed", cached, prompt)
        wait_written(root)
        for tier, above in (("gpu", ()), ("host", ()), ("disk", ("host",)), ("object", ("host", "disk"))):
            if tier != "gpu":
                cached.forget()
            for name in above:
                evict(root, name)
            drop(list(blob_files(root)))
            pair = [("plain gpu", plain), (tier, cached)]
            for name, engine in reversed(pair) if next(turns) % 2 else pair:
                note(name, engine, prompt)
            wait_written(root)
    return {
        name: {
            "ttft_ms": round(statistics.median(values), 1),
            "least_ms": round(min(values), 1),
            "most_ms": round(max(values), 1),
            "cached_tokens": sorted(hits[name]),
        }
        for name, values in taken.items()
    }


def measure_nothing(plain: ServedEngine, cached: ServedEngine, root: Path, pairs: int) -> dict[str, Any]:
    """Seconds of batches that hit nothing, in pairs."""
    fresh = iter(prompts(2, 2 * BATCH * pairs, BATCH_TOKENS))
    rows = []
    for number in range(pairs):
        seconds: dict[str, float] = {}
        for name in ("plain", "cached") if number % 2 else ("cached", "plain"):
            engine = plain if name == "plain" else cached
            seconds[name] = engine.batch_s([next(fresh) for _ in range(BATCH)], ANSWER_TOKENS)
            if name == "cached":
                ended_s = time.perf_counter()
                wait_written(root)
                seconds["writes"] = time.perf_counter() - ended_s
        rows.append(seconds)
    ratios = [row["plain"] / row["cached"] for row in rows]
    low, high = interval(ratios)
    return {
        "pairs": pairs,
        "tokens_per_batch": BATCH * (BATCH_TOKENS + ANSWER_TOKENS),
        "plain_s": round(statistics.median(row["plain"] for row in rows), 3),
        "cached_s": round(statistics.median(row["cached"] for row in rows), 3),
        "writes_after_s": round(statistics.median(row["writes"] for row in rows), 3),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_low": round(low, 4),
        "ratio_high": round(high, 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
    }


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % of the medians of samples drawn anew from ``values`` (the percentile bootstrap)."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return medians[RESAMPLES // 40], medians[-RESAMPLES // 40]


def show_ttft(ttft: dict[str, Any]) -> None:
    """The table of first tokens."""
    print(
        "| where the prefix was | TTFT ms, median | least | most | tokens not computed | x plain's own prefix cache |"
    )
    print("|---|---|---|---|---|---|")
    for name, row in ttft.items():
        ratio = row["ttft_ms"] / ttft["plain gpu"]["ttft_ms"]
        tokens = ", ".join(map(str, row["cached_tokens"]))
        print(f"| {name} | {row['ttft_ms']} | {row['least_ms']} | {row['most_ms']} | {tokens} | {ratio:.2f} |")


def show_nothing(nothing: dict[str, Any]) -> None:
    """The table of batches that hit nothing."""
    print("\n| nothing to hit, pairs | plain s | connector s | its writes after s | plain / connector | 95 % |")
    print("|---|---|---|---|---|---|")
    print(
        f"| {nothing['pairs']} | {nothing['plain_s']} | {nothing['cached_s']} | {nothing['writes_after_s']} | "
        f"{nothing['ratio']} | {nothing['ratio_low']} to {nothing['ratio_high']} |"
    )


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=2_080)
    options = parser.parse_args()
    build_model_once()
    with tempfile.TemporaryDirectory(prefix="tkv-", ignore_cleanup_errors=True) as directory, open_s3("bench") as s3:
        work = Path(directory)
        root = work / "cache"
        place = s3_place(s3, "end-to-end")
        connector: dict[str, Any] = {"storage_uri": place.uri, "storage_options": place.options}
        connector |= {"disk_path": str(root), "disk_bytes": "4GiB", "host_bytes": "2GiB", "strict": True}
        log = work / "engines.log"
        try:
            with served(log) as plain, served(log, connector) as cached:
                for prompt in prompts(3, 2, options.tokens):
                    plain.ttft(prompt)
                warm_up(cached, options.tokens)
                ttft = measure_ttft(plain, cached, root, options.repeats, options.tokens)
        except BaseException:
            sys.stderr.write(log.read_text()[-4000:])
            raise
    show_ttft(ttft)
    nothing = None
    if options.pairs:
        nothing = with_nothing_to_hit(options.pairs)
        show_nothing(nothing)
    facts = report.machine("end_to_end", prompt_tokens=options.tokens)
    report.finish("end_to_end", {"ttft": ttft, "nothing": nothing}, facts, is_kept=options.keep)


def with_nothing_to_hit(pairs: int) -> dict[str, Any]:
    """Both engines anew, the connector over host memory and disk."""
    with tempfile.TemporaryDirectory(prefix="tkv-", ignore_cleanup_errors=True) as directory:
        root, log = Path(directory) / "cache", Path(directory) / "engines.log"
        connector = {"storage_uri": root.as_uri(), "disk_bytes": "4GiB", "host_bytes": "2GiB", "strict": True}
        try:
            with served(log) as plain, served(log, connector) as cached:
                warm_up(cached, BATCH_TOKENS)
                for engine in (plain, cached):
                    engine.batch_s(prompts(4, BATCH, BATCH_TOKENS), ANSWER_TOKENS)
                return measure_nothing(plain, cached, root, pairs)
        except BaseException:
            sys.stderr.write(log.read_text()[-4000:])
            raise


if __name__ == "__main__":
    main()
