"""What a hit costs a real vLLM on a real GPU: ours from host memory and disk, and vLLM's own offloading.

    python benchmarks/gpu_engine.py [--tokens N] [--repeats N] [--shape llama-8b|tiny] [--budget-s N] [--keep]

A model of the shape of Llama 8B with vLLM's dummy weights, eager, one request at a time; the time to the first token,
medians over prompts that are asked once each. Each engine is a process of its own, one after the other on the GPU:

    ours        a prompt is computed (and stored), found in vLLM's prefix cache, found in host memory
    ours again  after all of the first have ended: the same prompts from disk (the page cache may hold the files)
    native      vLLM's OffloadingConnector over host memory: computed, prefix cache, host memory
    plain       no connector: computed, prefix cache

    more ms     a hit beside the hit in the prefix cache of the same engine and prompt
    GB/s        the bytes that were loaded in that time; link is one pinned copy of 1 GiB by torch, in the same process
    itl         between tokens of one request that decodes, from when a second, long prompt has been computed and is
                being stored; or with no other request: p50, p99, most

A row is ``right`` where the hit was one and all loaded blocks have the bytes that were computed; ``wrong`` or
``failed`` has a message, and the exit status is 1. What was measured before stays. ``--budget-s`` ends all. Without a
GPU, ``--shape tiny --tokens 1100`` tries the program; vLLM's own is a stand-in there
(``tests/kit/vllm/host_offloading.py``).
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "demo")]

import torch  # noqa: E402
from asking import wait_for_server_end  # noqa: E402
from bench_report import finish, machine, parser, table  # noqa: E402  # beside this script

from tiered_kv.testing.model import LLAMA_8B, TINY, ModelShape, describe_model  # noqa: E402
from tools.gpu_e2e.modes import CPU, CUDA, DEVICE_ENVIRONMENT, ENVIRONMENT, OPTIONS, connector  # noqa: E402
from tools.gpu_proof.runner import python_path  # noqa: E402

SHAPES = {"llama-8b": LLAMA_8B, "tiny": TINY}
HOST_BYTES = {CUDA: 16 << 30, CPU: 512 << 20}
DISK_BYTES = {CUDA: "40GiB", CPU: "4GiB"}
DEVICE_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    CUDA: {"gpu_memory_utilization": 0.6, "kv_cache_memory_bytes": 12 << 30},  # said, so that vLLM need not profile
    CPU: {},
}
END_LIMIT_S = 20.0
OURS, AGAIN, NATIVE, PLAIN = "ours", "ours again", "native", "plain"
ROLES = (OURS, AGAIN, NATIVE, PLAIN)
HITS = {OURS: "host memory", AGAIN: "disk", NATIVE: "host memory", PLAIN: ""}
LATE_S = 3.0
"""An engine is not begun in the last seconds of the budget: it would show nothing."""

COLUMNS = {
    "system": "system", "phase": "first token", "ttft_ms": "ms", "cached_tokens": "found", "more_ms": "more ms",
    "gb_per_s": "GB/s", "link_gb_per_s": "link GB/s", "link_share": "of the link", "itl_p50_ms": "itl p50",
    "itl_p99_ms": "p99", "itl_max_ms": "most", "verdict": "verdict", "message": "",
}  # fmt: skip


@dataclass
class Run:
    """One engine's: its process, from when it imports to when it has ended, and its samples.

    Attributes:
        failure: Why it did not end well, or nothing.
        ran_s: From its job to its end.
    """

    role: str
    process: "subprocess.Popen[bytes]"
    log: Path
    samples_file: Path
    failure: str = ""
    ran_s: float = 0.0
    samples: list[dict[str, Any]] = field(default_factory=list)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--tokens", type=int, default=16_384, help="of a prompt")
    options.add_argument("--repeats", type=int, default=3, help="prompts")
    options.add_argument("--shape", choices=SHAPES, default="llama-8b", help="of the model")
    options.add_argument("--systems", nargs="+", choices=ROLES, default=ROLES, help="engines to start")
    options.add_argument("--budget-s", type=float, default=95.0, help="after which everything is ended")
    given = options.parse_args()
    device, shape = CUDA if torch.cuda.is_available() else CPU, SHAPES[given.shape]
    if refusal := _refusal(given.tokens, given.repeats, shape, HOST_BYTES[device]):
        options.error(refusal)
    end_s = time.monotonic() + given.budget_s
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="tkv-", ignore_cleanup_errors=True) as folder:
        work = Path(folder)
        describe_model(work / "model", shape)
        runs = [_start(work, device, role) for role in ROLES if role in given.systems]
        print("\n".join(table([], COLUMNS)), flush=True)
        try:
            for number, run in enumerate(runs):
                job = _job(work, device, shape, run, runs[:number], given.tokens, given.repeats)
                _finish_run(run, job, end_s)
                if run.role in (OURS, AGAIN) and (work / "cache").is_dir():
                    limit_s = min(END_LIMIT_S, end_s - time.monotonic())
                    run.failure = run.failure or wait_for_server_end(work / "cache", limit_s)
                rows += (new := _rows(run))
                print("\n".join(table(new, COLUMNS)[2:]), flush=True)
                if run.failure or any("failed" in sample for sample in run.samples):
                    print(f"-- the end of the log of {run.role}:\n{_tail(run.log, 25)}", file=sys.stderr, flush=True)
        finally:
            for run in runs:
                _end(run.process)
    facts = machine("gpu_engine", device=_device_name(), shape=given.shape, tokens=given.tokens, **_facts(runs))
    finish("gpu_engine", rows, facts, is_kept=given.keep)
    return 0 if all(row["verdict"] == "right" for row in rows) else 1


def _refusal(tokens: int, repeats: int, shape: ModelShape, host_bytes: int) -> str:
    """Why this cannot be measured, or nothing."""
    most = min(shape.max_position - 1_024, int(0.9 * host_bytes / shape.kv_bytes_per_token / (max(repeats, 1) + 2)))
    if repeats >= 1 and 512 <= tokens <= most:
        return ""
    return (
        "expected a repeat or more and 512 tokens or more, and no more of both than the model and host memory take. "
        f"tokens_max_at_these_repeats={most} observed: tokens={tokens} repeats={repeats}"
    )


def _start(work: Path, device: str, role: str) -> Run:
    """Start a process, which imports and then waits for its job."""
    name = role.replace(" ", "-")
    environment = ENVIRONMENT | dict(DEVICE_ENVIRONMENT[device]) | {"PYTHONPATH": python_path()}
    samples = work / f"{name}.jsonl"
    samples.touch()
    log = work / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("gpu_engine_process.py"))],
            cwd=REPOSITORY,
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    return Run(role, process, log, samples)


def _job(
    work: Path, device: str, shape: ModelShape, run: Run, before: Sequence[Run], tokens: int, repeats: int
) -> dict[str, Any]:
    job = {
        "role": run.role,
        "model": str(work / "model"),
        "vocabulary": shape.vocab,
        "tokens": tokens,
        "repeats": repeats,
        "hit": HITS[run.role],
        "samples": str(run.samples_file),
        "options": OPTIONS
        | dict(DEVICE_OPTIONS[device])
        | {
            "load_format": "dummy",
            "enforce_eager": True,
            "max_model_len": min(tokens + 3_616, shape.max_position),
            "max_num_batched_tokens": tokens + 1_024,  # a prompt is one step
        },
        "connector": None,
        "transfer": None,
        "digests": None,
    }
    if run.role in (OURS, AGAIN):
        own = {
            "host_bytes": HOST_BYTES[device],
            "disk_bytes": DISK_BYTES[device],
            "model_id": "gpu-engine",  # there are no weights that could be named
        }
        job["connector"] = connector(work / "cache", device) | own
    if run.role == AGAIN:
        computed = [sample for one in before if one.role == OURS for sample in one.samples if "digests" in sample]
        job["digests"] = {str(sample["number"]): sample["digests"] for sample in computed}
    if run.role == NATIVE:
        job["transfer"] = _native(work, device)
    return job


def _native(work: Path, device: str) -> dict[str, Any]:
    """vLLM's own, as its documentation sets it up; on the CPU build, which vLLM refuses, as ``rival_systems.py``."""
    extra: dict[str, Any] = {"cpu_bytes_to_use": HOST_BYTES[device]}
    if device == CPU:
        extra |= {
            "spec_name": "HostTieringSpec",
            "spec_module_path": "tests.kit.vllm.host_offloading",
            "block_size": 256,
            "secondary_tiers": [{"type": "fs", "root_dir": str(work / "native")}],
        }
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def _finish_run(run: Run, job: Mapping[str, Any], end_s: float) -> None:
    """Hand the process its job, wait for its end, and read its samples."""
    left_s = end_s - time.monotonic()
    if run.role == AGAIN and not job["digests"]:
        run.failure = f"not begun: {OURS} computed nothing that could be found"
    elif left_s < LATE_S:
        run.failure = "not begun: the budget is used"
    if run.failure:
        _end(run.process)
        return
    try:
        run.process.communicate((json.dumps(job) + "\n").encode(), timeout=left_s)
    except subprocess.TimeoutExpired:
        _end(run.process)
        run.failure = "ended: the budget is used"
    run.ran_s = round(time.monotonic() - end_s + left_s, 1)
    lines = run.samples_file.read_text().splitlines(keepends=True)
    run.samples = [json.loads(line) for line in lines if line.endswith("\n")]
    if run.process.returncode and not run.failure and not any("failed" in sample for sample in run.samples):
        run.failure = f"ended with status {run.process.returncode}: {_tail(run.log, 1)}"


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a process; nothing where it has ended."""
    process.kill()
    process.wait()
    with contextlib.suppress(BrokenPipeError):  # what it did not read any more
        if process.stdin is not None:
            process.stdin.close()


def _rows(run: Run) -> list[dict[str, Any]]:
    """One row for each phase of which there are samples, and one for what failed outside of them; at least one."""
    kv_bytes = _one(run, "facts").get("kv_bytes_per_token")
    link = _one(run, "link").get("gb_per_s")
    prefix = {s["number"]: s["ttft_s"] for s in run.samples if s["phase"] == "prefix cache" and "ttft_s" in s}
    rows = []
    for phase in dict.fromkeys(sample["phase"] for sample in run.samples):
        taken = [sample for sample in run.samples if sample["phase"] == phase]
        measured = [sample for sample in taken if "ttft_s" in sample or "itl_p50_ms" in sample]
        messages = [text for sample in taken if (text := sample.get("failed") or sample.get("wrong"))]
        if not measured and not messages:
            continue  # facts, the link, the start
        is_wrong = any(not sample["is_right"] for sample in measured)
        verdict = "wrong" if is_wrong else "failed" if messages else "right"
        row: dict[str, Any] = {"system": run.role, "phase": phase, "verdict": verdict}
        row["message"] = messages[0] if messages else None
        if times := [sample for sample in measured if "ttft_s" in sample]:
            row["ttft_ms"] = round(1e3 * statistics.median(s["ttft_s"] for s in times), 2)
            row["all_ttft_ms"] = [round(1e3 * s["ttft_s"], 2) for s in times]
            row["cached_tokens"] = min(s["cached_tokens"] for s in times)
            more = [s["ttft_s"] - prefix[s["number"]] for s in times if s["number"] in prefix]
            if phase == HITS[run.role] and more and kv_bytes:
                row |= _cost(statistics.median(more), row["cached_tokens"] * kv_bytes, link)
        elif measured:
            row |= {key: round(value, 2) for key, value in measured[0].items() if key.startswith("itl_")}
            row["gaps"] = measured[0]["gaps"]
        rows.append(row)
    if failure := run.failure or ("" if rows else "it ended without a word of what it measured"):
        rows.append({"system": run.role, "phase": "all", "verdict": "failed", "message": failure})
    return rows


def _cost(more_s: float, loaded_bytes: float, link: float | None) -> dict[str, Any]:
    """What a hit takes beside one in the prefix cache, and the rate that this would be."""
    cost: dict[str, Any] = {"more_ms": round(1e3 * more_s, 2), "loaded_mib": round(loaded_bytes / 2**20, 1)}
    if more_s > 0:
        cost["gb_per_s"] = round(loaded_bytes / more_s / 1e9, 2)
        if link:
            cost |= {"link_gb_per_s": round(link, 2), "link_share": round(cost["gb_per_s"] / link, 3)}
    return cost


def _facts(runs: Sequence[Run]) -> dict[str, Any]:
    """What each engine became, and how long it took to start."""
    engines = {}
    for run in runs:
        facts = {key: value for key, value in _one(run, "facts").items() if key != "phase"}
        seconds = {f"{phase}_s": round(_one(run, phase).get("seconds", 0.0), 2) for phase in ("start", "warm-up")}
        engines[run.role] = facts | seconds | {"ran_s": run.ran_s, "link_gb_per_s": _one(run, "link").get("gb_per_s")}
    return {"engines": engines}


def _one(run: Run, phase: str) -> dict[str, Any]:
    return next((s for s in run.samples if s["phase"] == phase and "failed" not in s), {})


def _device_name() -> str:
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"


def _tail(log: Path, lines: int) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


if __name__ == "__main__":
    sys.exit(main())
