"""Row d of ``rivals.py``: what a lookup costs vLLM's scheduler thread, and when its answer is there.

Engines whose model computes nothing (``stepped.py``), all up at once and in turns; a prompt of 128k tokens, 512 chunks
of 32 KiB (the least KV that vLLM's CPU backend can have: one layer, one head of 32). Every repetition takes a new one:
stored, then asked in host memory, on disk (host memory emptied, page cache warm), and one that nobody stored. The
connector is asked again in every step, as vLLM does. Hashing by vLLM itself, which ``native`` builds upon, is not
counted, for anybody. Called by ``rivals.py``. Not a benchmark by itself.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rival_systems import REPOSITORY, Setup, System, open_system
from rival_turns import summary, turned
from stepped import PATIENT, LookedUp, SteppedEngine

from tiered_kv.testing.model import ModelShape, build_model

MODEL = REPOSITORY / "build" / "models" / "lookups"
SHAPE = ModelShape(
    layers=1,
    hidden=64,
    intermediate=64,
    heads=1,
    kv_heads=1,
    head_dim=32,
    vocab=8192,
    weight_std=0.16,
    head_std=0.2,
    max_position=1 << 18,
)
SYSTEMS = ("ours", "lmcache", "native")
CASES = ("host", "disk", "miss")
SEEDS = 1_000
TOKENS = 128 << 10
NOTES = ("example: not in this row; it looks for one file of the whole prompt, not for chunks.",)
COLUMNS = {
    "system": "system", "case": "case", "thread_ms": "scheduler's thread, ms", "thread_least": "least",
    "thread_most": "most", "answer_ms": "answer, ms", "answer_least": "least", "answer_most": "most",
}  # fmt: skip


def measure(work: Path, repeats: int, names: Sequence[str], mode: str) -> list[dict[str, Any]]:
    """Rows by case and system."""
    build_model(MODEL, shape=SHAPE)
    taken: dict[tuple[str, str], list[LookedUp]] = {}
    with ExitStack() as stack:

        def start(name: str, transfer: Any, **more: Any) -> SteppedEngine:
            space = {"VLLM_CPU_KVCACHE_SPACE": "1"} | more.pop("environment", {})
            limits = {"max_model_len": 1 << 18, "max_num_batched_tokens": 8_192}
            options = {"model": str(MODEL), "dtype": "bfloat16", **limits, **more}
            return SteppedEngine(work / f"{name}.log", transfer, environment=space, **options)

        setup = Setup(host_gib=1.0, lmcache_mode=mode, ours=PATIENT)
        systems = [open_system(stack, work, name, start, setup) for name in SYSTEMS if name in names]
        for number in range(repeats + 1):
            for system in turned(systems, number):
                for case, looked_up in _repetition(system, number):
                    if number:  # the first is not counted
                        taken.setdefault((case, system.name), []).append(looked_up)
    return [_row(case, name, taken[case, name]) for case in CASES for name in SYSTEMS if name in names]


def _repetition(system: System[SteppedEngine], number: int) -> Sequence[tuple[str, LookedUp]]:
    stored, unknown = SEEDS + 2 * number, SEEDS + 2 * number + 1
    engine = system.engine
    engine.store(stored, TOKENS + 1)
    engine.forget()
    found = [("host", engine.look_up(stored, TOKENS + 1))]
    system.wait_stored()
    system.empty_memory()
    for path in filter(Path.is_file, system.folder.rglob("*") if system.folder else ()):
        path.read_bytes()  # what was written with O_DIRECT is not in the page cache
    found += [("disk", engine.look_up(stored, TOKENS + 1)), ("miss", engine.look_up(unknown, TOKENS + 1))]
    for case, looked_up in found:
        expected = 0 if case == "miss" else TOKENS
        if looked_up.tokens != expected:
            raise RuntimeError(f"wrong answer. system={system.name} case={case} {expected=} observed={looked_up}")
    return found


def _row(case: str, name: str, looked_up: Sequence[LookedUp]) -> dict[str, Any]:
    row: dict[str, Any] = {"system": name, "case": case}
    row |= summary("thread", "ms", [1e3 * one.thread_s for one in looked_up])
    return row | summary("answer", "ms", [1e3 * one.answer_s for one in looked_up])
