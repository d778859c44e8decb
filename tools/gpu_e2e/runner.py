"""Starts the engines of each mode, judges what they answered, keeps it and shows it.

Must not import vLLM itself. Each engine is a process of its own, and the cache's server has ended before the next one
starts, so that what it holds is on disk. The verdict of a mode is ``right`` or ``wrong`` by the demo's checks
(``demo/report.py``), ``failed`` where an engine did not start or end. The record is ``build/gpu_e2e.json``, and of a
whole right run of a clean commit on a GPU ``docs/proofs/gpu_e2e.json``. Resumable, and with exit codes, as
``gpu-proof``.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from tiered_kv.errors import DirectoryLocked
from tiered_kv.tiers.disk.lock import DirectoryLock
from tools.gpu_e2e.modes import (
    CPU,
    CUDA,
    DEVICE_ENVIRONMENT,
    DEVICE_OPTIONS,
    ENVIRONMENT,
    FIRST,
    MODES,
    OPTIONS,
    PLAIN,
    ROLES,
    SCENARIOS,
    SECOND,
    Mode,
    Scenario,
    connector,
)
from tools.gpu_proof.runner import GOOD, RIGHT, WRONG, CannotRunError, check_names, git, keep, source_digest, write

ROOT: Final = Path(__file__).resolve().parents[2]
FILES: Final = ROOT / "build" / "gpu_e2e"
sys.path.append(str(ROOT / "demo"))
from report import OBJECT, Phase, broken_promises  # noqa: E402 - the demo's files are scripts

SOURCES: Final = ("tiered_kv", "tools/gpu_e2e", "tools/gpu_proof", "demo")
"""What a verdict is of."""

ENGINE: Final = "tools.gpu_e2e.engine_process"
FAILED: Final = "failed"
ENGINE_LIMIT_S: Final = 500.0
SERVER_END_LIMIT_S: Final = 60.0
LOG_TAIL_LINES: Final = 12

PROBE: Final = """
import json, sys
try:
    import torch
except ImportError:
    sys.exit("this Python has no torch")
try:
    import vllm
except ImportError as exc:
    sys.exit(f"this Python cannot import vLLM ({exc}); scripts/pack-vllm packs one for a machine without a network")
from vllm.platforms import current_platform
name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
print("PROBE" + json.dumps({"platform": current_platform.device_type, "gpu": name, "torch": torch.__version__,
                            "vllm": vllm.__version__}))
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for."""
    asked = _parser().parse_args(arguments)
    try:
        machine = probe()
        device = CUDA if machine["platform"] == CUDA else CPU
        known = [mode.name for mode in MODES if mode.device == device]
        check_names(asked.modes, known, "mode", device)
    except CannotRunError as exc:
        print(f"gpu-e2e: {exc}. Nothing was run.", file=sys.stderr)
        return 2
    wanted = [mode for mode in MODES if mode.name in (asked.modes or known)]
    scenario = SCENARIOS[asked.model or ("demo" if device == CUDA else "tiny")]
    kept: dict[str, Any] = {"modes": {}}
    if asked.out.is_file():
        kept = json.loads(asked.out.read_text())
    stands = {"source": source_digest(SOURCES), "on": machine}
    for mode in wanted:
        have = kept["modes"].get(mode.name, {})
        if (
            not asked.force
            and have.get("verdict") == RIGHT
            and all(have[key] == value for key, value in stands.items())
        ):
            print(f"gpu-e2e: {mode.name} is right on these sources already, skipped", flush=True)
            continue
        print(f"gpu-e2e: {mode.name} ...", flush=True)
        kept["modes"][mode.name] = run_mode(mode, scenario, asked.model_dir) | stands
        write(asked.out, kept | summary(kept["modes"], machine, device))
    whole = kept | summary(kept["modes"], machine, device)
    print("\n".join(table(kept["modes"], wanted)))
    print(
        f"gpu-e2e: the whole record is {os.path.relpath(asked.out, ROOT)}, logs are in {os.path.relpath(FILES, ROOT)}"
    )
    if device == CUDA:
        print(f"gpu-e2e: {keep(whole, 'gpu_e2e')}")
    return 0 if all(kept["modes"][mode.name]["verdict"] in GOOD for mode in wanted) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu-e2e", description="A real vLLM behind the cache, mode by mode.")
    parser.add_argument("modes", nargs="*", metavar="MODE", help=", ".join(mode.name for mode in MODES))
    parser.add_argument("--model", choices=list(SCENARIOS), help="what is built and asked; demo, on a CPU tiny")
    parser.add_argument("--model-dir", type=Path, default=ROOT / "build" / "models", help="where it is built")
    parser.add_argument("--force", action="store_true", help="also what was right on these sources already")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu_e2e.json", help="where the record goes")
    return parser


def probe() -> dict[str, Any]:
    """What vLLM there is, and for what.

    Raises:
        CannotRunError: There is none; in one sentence.
    """
    environment = os.environ | {"PYTHONPATH": _paths()}
    ran = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, env=environment, check=False)
    if ran.returncode:
        said = (ran.stderr.strip() or f"vLLM's import ended with status {ran.returncode}").splitlines()
        raise CannotRunError(said[-1])
    line = next(line for line in ran.stdout.splitlines() if line.startswith("PROBE"))
    found: dict[str, Any] = json.loads(line.removeprefix("PROBE"))
    return found


def _paths() -> str:
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))


def run_mode(mode: Mode, scenario: Scenario, models: Path) -> dict[str, Any]:
    """Run the three engines of a mode; its record, whatever became of them."""
    files = FILES / mode.name
    shutil.rmtree(files, ignore_errors=True)
    files.mkdir(parents=True)
    started, began_s = datetime.now(UTC), time.monotonic()
    record: dict[str, Any] = {"verdict": FAILED, "broken": [], "phases": []}
    results: dict[str, dict[str, Any]] = {}
    for role in ROLES:
        job = _job(mode, scenario, role, files, models, results)
        if why := _run_engine(mode, role, job, files):
            record["broken"] = [f"{role}: {why}", *_tail(files / f"{role}.log")]
            break
        results[role] = json.loads(Path(job["result"]).read_text())
    else:
        phases = [*results[FIRST]["phases"], *results[SECOND]["phases"]]
        record |= judged(phases, scenario)
        record["counters"] = {role: results[role]["counters"] for role in (FIRST, SECOND)}
    if PLAIN in results:
        record["engine"] = results[PLAIN]["engine"] | {"block_tokens": results[PLAIN]["block_tokens"]}
    return record | {
        "options": dict(mode.options),
        "environment": dict(mode.environment),
        "scenario": asdict(scenario),
        "started": started.isoformat(timespec="seconds"),
        "duration_s": round(time.monotonic() - began_s, 1),
    }


def judged(phases: Sequence[Mapping[str, Any]], scenario: Scenario) -> dict[str, Any]:
    """The verdict on what was answered, by the demo's checks but those of time."""
    skipped = {OBJECT: "no bucket takes part"}
    found = [Phase(**phase) for phase in phases]
    broken = broken_promises(found, scenario.shared_tokens, skipped, is_timed=False)
    return {"verdict": WRONG if broken else RIGHT, "broken": broken, "phases": list(phases)}


def _job(
    mode: Mode, scenario: Scenario, role: str, files: Path, models: Path, results: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    cache = files / "cache"
    job: dict[str, Any] = {
        "role": role,
        "scenario": asdict(scenario),
        "model": str(models / f"gpu-e2e-{scenario.model.lower()}"),
        "options": OPTIONS | dict(DEVICE_OPTIONS[mode.device]) | dict(mode.options),
        "connector": None if role == PLAIN else connector(cache, mode.device),
        "cache": str(cache),
        "result": str(files / f"{role}.json"),
    }
    if role != PLAIN:
        job["plain"] = results[PLAIN]
    if role == SECOND:
        job["cold_kv_digests"] = results[FIRST]["cold_kv_digests"]
    return job


def _run_engine(mode: Mode, role: str, job: Mapping[str, Any], files: Path) -> str:
    """Run one engine to its end, and its cache server; why that did not work, or nothing."""
    path = files / f"{role}.job.json"
    path.write_text(json.dumps(job, indent=1))
    own = ENVIRONMENT | dict(DEVICE_ENVIRONMENT[mode.device]) | dict(mode.environment) | {"PYTHONPATH": _paths()}
    with open(files / f"{role}.log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", ENGINE, str(path)],
            cwd=ROOT,
            env=os.environ | own,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            status = process.wait(ENGINE_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return f"the engine did not end within {ENGINE_LIMIT_S:g} s"
    if status or not Path(job["result"]).is_file():
        return f"the engine ended with status {status}"
    return "" if role == PLAIN else _wait_for_server_end(Path(job["cache"]))


def _wait_for_server_end(cache: Path) -> str:
    """Wait until no server owns the directory: what it held is on disk then."""
    end_s = time.monotonic() + SERVER_END_LIMIT_S
    while True:
        try:
            DirectoryLock(cache).release()
            return ""
        except DirectoryLocked as exc:
            if time.monotonic() > end_s:
                return f"the cache server does not end: {exc}"
        time.sleep(0.05)


def _tail(log: Path) -> list[str]:
    return [f"| {line}" for line in log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]]


def summary(modes: Mapping[str, Any], machine: Mapping[str, Any], device: str) -> dict[str, Any]:
    """What is said about all modes together."""
    wanted = {mode.name for mode in MODES if mode.device == device}
    fresh = all(mode["source"] == source_digest(SOURCES) for mode in modes.values())
    return {
        "commit": git("rev-parse", "HEAD"),
        "is_dirty": bool(git("status", "--porcelain", "--", *SOURCES)),
        "is_whole": wanted == set(modes) and fresh,
        "exit_code": 0 if all(mode["verdict"] == RIGHT for mode in modes.values()) else 1,
        "machine": dict(machine),
    }


def table(modes: Mapping[str, Any], wanted: Sequence[Mode]) -> list[str]:
    """The modes for people."""
    lines = ["", f"{'mode':<22}{'verdict':<9}{'seconds':>7}  {'KV layout':<11}{'TTFT cold, host, disk':<26}", "-" * 80]
    for mode in wanted:
        have = modes[mode.name]
        times = " / ".join(f"{phase['ttft_s']:.3f}" for phase in have["phases"][:3])
        layout = have.get("engine", {}).get("kv_layout") or "?"
        lines.append(f"{mode.name:<22}{have['verdict']:<9}{have['duration_s']:>7.1f}  {layout:<11}{times}")
        lines += [f"{'':<22}{line}" for line in have["broken"]]
    return [*lines, ""]
