"""What a prefetch is worth to a session that comes back after a pause: its first token, told ahead and not.

    python benchmarks/prefetch.py [--repeats N] [--tokens N] [--keep]

A real vLLM with the connector over host memory and disk, and plain vLLM beside it, in turns. Each repeat is a session
of its own (``tiered_kv.session_id``) with a prompt of ``--tokens`` tokens that nobody saw:

``computed``   by plain vLLM
``host``       asked for again, from host memory: what a prefetch is measured by
``disk``       after other prompts have pushed the session out of host memory, and with its files dropped from the page
               cache; nobody said that it would come
``prefetched`` the same, but a request of another session has named this one (``tiered_kv.prefetch``), as a gateway does
               when a tool returns or a person types, ``AHEAD_S`` before

vLLM's own prefix cache is emptied before each. A short request comes right before every one that is timed, so that none
finds the engine warmer than another. Answers must be plain vLLM's. Prints a table, then JSON.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import bench_report as report

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY)]

from disk_io import drop  # noqa: E402  # beside this script
from rival_systems import until_still  # noqa: E402
from rivals import KV8B, MODEL  # noqa: E402
from serving import ServedEngine, prompts, served  # noqa: E402

from tests.kit.storage.disk_probe import blob_files  # noqa: E402
from tiered_kv.testing.model import build_model  # noqa: E402

CASES = ("computed", "host", "disk", "prefetched")
COLUMNS = {
    "case": "case", "ms": "first token, ms", "least": "least", "most": "most", "beside_host": "x host",
    "cached_tokens": "tokens not computed",
}  # fmt: skip
AHEAD_S = 2.0
HOST_BYTES = 1 << 30
SHORT_TOKENS = 64


class Session:
    """One prompt of one session through all cases."""

    def __init__(
        self, name: str, prompt: Sequence[int], cached: ServedEngine, root: Path, others: Iterator[Any]
    ) -> None:
        self._name = name
        self._prompt = prompt
        self._cached = cached
        self._root = root
        self._others = others

    def ask(self) -> Any:
        self._cached.forget()
        return self._cached.ttft(self._prompt, session_id=self._name)

    def push_out(self) -> None:
        """Have other prompts take all of host memory, and the page cache give the files up."""
        used = 0
        while used < 2 * HOST_BYTES:
            other = next(self._others)
            self._cached.ttft(other)
            used += len(other) * KV8B.kv_bytes_per_token
            until_still(self._root)  # a reset of vLLM's cache would drop what waits for a slot
        drop(list(blob_files(self._root)))

    def announce(self, short: Sequence[int]) -> None:
        """Have a request of somebody else's say that this session goes on soon."""
        self._cached.ttft(short, prefetch=self._name)
        time.sleep(AHEAD_S)


def measure(plain: ServedEngine, cached: ServedEngine, root: Path, repeats: int, tokens: int) -> list[dict[str, Any]]:
    """Milliseconds to the first token by case, and the tokens that were not computed."""
    taken: dict[str, list[float]] = {case: [] for case in CASES}
    hits: dict[str, set[int]] = {case: set() for case in CASES}
    others = iter(prompts(31, 1 << 10, tokens))
    shorts = iter(prompts(32, 1 << 10, SHORT_TOKENS))
    for number, prompt in enumerate(prompts(33, repeats, tokens)):
        session = Session(f"session-{number}", prompt, cached, root, others)
        plain.forget()
        expected = plain.ttft(prompt)
        timed = {"computed": expected}
        session.ask()
        until_still(root)
        cached.ttft(next(shorts))
        timed["host"] = session.ask()
        session.push_out()
        cached.ttft(next(shorts))
        timed["disk"] = session.ask()
        session.push_out()
        session.announce(next(shorts))
        cached.ttft(next(shorts))
        timed["prefetched"] = session.ask()
        for case, one in timed.items():
            if one.token != expected.token:
                raise RuntimeError(f"wrong token. case={case} expected={expected} observed={one}")
            taken[case].append(1e3 * one.ttft_s)
            hits[case].add(one.cached_tokens)
    host_ms = statistics.median(taken["host"])
    return [
        {
            "case": case,
            "ms": round(statistics.median(values), 1),
            "least": round(min(values), 1),
            "most": round(max(values), 1),
            "beside_host": round(statistics.median(values) / host_ms, 2),
            "cached_tokens": sorted(hits[case]),
        }
        for case, values in taken.items()
    ]


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=2_064)
    options = parser.parse_args()
    build_model(MODEL, shape=KV8B)
    engine: dict[str, Any] = {"model": str(MODEL), "dtype": "bfloat16", "environment": {"VLLM_CPU_KVCACHE_SPACE": "1"}}
    with tempfile.TemporaryDirectory(prefix="tkv-", ignore_cleanup_errors=True) as directory:
        root, log = Path(directory) / "cache", Path(directory) / "engines.log"
        connector = {"storage_uri": root.as_uri(), "disk_bytes": "16GiB", "host_bytes": HOST_BYTES, "strict": True}
        try:
            with served(log, **engine) as plain, served(log, connector, **engine) as cached:
                plain.ttft(prompts(34, 1, options.tokens)[0])
                cached.ttft(prompts(35, 1, options.tokens)[0])
                until_still(root)
                rows = measure(plain, cached, root, options.repeats, options.tokens)
        except BaseException:
            sys.stderr.write(log.read_text()[-4000:])
            raise
    print("\n".join(report.table(rows, COLUMNS)))
    facts = report.machine("prefetch", prompt_tokens=options.tokens, ahead_s=AHEAD_S)
    report.finish("prefetch", rows, facts, is_kept=options.keep)


if __name__ == "__main__":
    main()
