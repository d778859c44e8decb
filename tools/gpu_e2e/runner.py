"""Starts the engines of each mode, judges what they answered, keeps it and shows it.

Must not import vLLM itself. Each engine is a process of its own, and the cache's server has ended before the next one
starts, so that what it holds is on disk. With ``--at-once`` modes run beside each other, each in a thread that starts
its engines and waits for them; they share the model's directory, and the main thread alone writes the record. The
verdict of a mode is ``right`` or ``wrong`` by the demo's checks (``demo/report.py``), ``failed`` where an engine did
not start or end. The record is ``build/gpu_e2e.json``, and of a whole right run of a clean commit on a GPU
``docs/proofs/gpu_e2e.json``. Resumable, and with exit codes, as ``gpu-proof``; 130 after Ctrl-C or SIGTERM.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from tools.gpu_e2e.modes import (
    CHECK,
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
from tools.gpu_proof.runner import (
    GOOD,
    LATE,
    RIGHT,
    WRONG,
    CannotRunError,
    check_names,
    git,
    keep,
    python_path,
    source_digest,
    write,
)

ROOT: Final = Path(__file__).resolve().parents[2]
FILES: Final = ROOT / "build" / "gpu_e2e"
sys.path.append(str(ROOT / "demo"))
from asking import wait_for_server_end  # noqa: E402 - the demo's files are scripts
from report import OBJECT, Phase, broken_promises  # noqa: E402 - the demo's files are scripts

SOURCES: Final = ("tiered_kv", "tools/gpu_e2e", "tools/gpu_proof", "demo")
"""What a verdict is of."""

ENGINE: Final = "tools.gpu_e2e.engine_process"
FAILED: Final = "failed"
ENGINE_LIMIT_S: Final = 500.0
LOG_TAIL_LINES: Final = 12
RAISED: Final = re.compile(r"(\[rank\d+\]: )?[\w.]*(Error|Exception)\b")
"""The last line of a traceback, as torch writes it in a process of a group."""
INTERRUPTED: Final = 130
"""The exit code that shells give a process that Ctrl-C ended."""

BUILD: Final = """
import sys
from pathlib import Path
from tiered_kv.testing import model
model.build_model(Path(sys.argv[1]), shape=getattr(model, sys.argv[2]))
"""

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
    if asked.check:
        return _check(wanted[0], scenario, asked.model_dir)
    kept: dict[str, Any] = {"modes": {}}
    if asked.out.is_file():
        kept = json.loads(asked.out.read_text())
    stands = {"source": source_digest(SOURCES), "on": machine, "scenario": asdict(scenario)}
    to_run = []
    for mode in wanted:
        have = kept["modes"].get(mode.name, {})
        if (
            not asked.force
            and have.get("verdict") == RIGHT
            and all(have.get(key) == value for key, value in stands.items())
        ):
            print(f"gpu-e2e: {mode.name} is right on these sources already, skipped", flush=True)
        else:
            to_run.append(mode)
    try:
        for name, record in _ended(to_run, scenario, asked):
            kept["modes"][name] = record | stands
            write(asked.out, kept | summary(kept["modes"], machine, device, asked.commit))
    except CannotRunError as exc:
        print(f"gpu-e2e: {exc}. Nothing was run.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("gpu-e2e: interrupted; the modes that had ended are kept", file=sys.stderr)
        return INTERRUPTED
    whole = kept | summary(kept["modes"], machine, device, asked.commit)
    print("\n".join(table(kept["modes"], wanted)))
    print(
        f"gpu-e2e: the whole record is {os.path.relpath(asked.out, ROOT)}, logs are in {os.path.relpath(FILES, ROOT)}"
    )
    if device == CUDA:
        print(f"gpu-e2e: {keep(whole, 'gpu_e2e')}")
    return 0 if all(kept["modes"].get(mode.name, {}).get("verdict") in GOOD for mode in wanted) else 1


def _check(mode: Mode, scenario: Scenario, models: Path) -> int:
    """Start one plain engine of a mode for one token, after all that the modes import; say what is missing."""
    files = FILES / CHECK
    shutil.rmtree(files, ignore_errors=True)
    files.mkdir(parents=True)
    began_s = time.monotonic()
    engines = _Engines()
    try:
        job = _job(mode, scenario, PLAIN, files, _build_model(scenario, models), {}) | {"role": CHECK}
        why = _run_engine(mode, PLAIN, job, files, engines)
    except CannotRunError as exc:
        why = str(exc)
    except KeyboardInterrupt:
        print(f"gpu-e2e: the check was interrupted; its log is in {os.path.relpath(files, ROOT)}", file=sys.stderr)
        return INTERRUPTED
    finally:
        engines.end()
    if why:
        log = files / f"{PLAIN}.log"
        lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
        # vLLM and torch still write behind the traceback of what ended the engine.
        said = next((line for line in reversed(lines) if RAISED.match(line)), "")
        print(f"gpu-e2e: no engine can run here: {why}{said and ': ' + said}. Log: {log}", file=sys.stderr)
        return 2
    print(f"gpu-e2e: an engine answered after {time.monotonic() - began_s:.0f} s; the modes can be run")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu-e2e", description="A real vLLM behind the cache, mode by mode.")
    parser.add_argument("modes", nargs="*", metavar="MODE", help=", ".join(mode.name for mode in MODES))
    parser.add_argument("--model", choices=list(SCENARIOS), help="what is built and asked; demo, on a CPU tiny")
    parser.add_argument("--model-dir", type=Path, default=ROOT / "build" / "models", help="where it is built")
    parser.add_argument("--check", action="store_true", help="start one engine, say whether that works, and end")
    parser.add_argument("--force", action="store_true", help="also what was right on these sources already")
    parser.add_argument("--at-once", type=_count, default=1, metavar="N", help="so many modes beside each other; 1")
    parser.add_argument("--budget-s", type=float, default=7200.0, help="begin no mode after so many seconds")
    parser.add_argument("--commit", help="the commit of these files, where git cannot be asked")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu_e2e.json", help="where the record goes")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number from 1 on is expected, not {text!r}")
    return int(text)


def probe() -> dict[str, Any]:
    """What vLLM there is, and for what.

    Raises:
        CannotRunError: There is none; in one sentence.
    """
    environment = os.environ | {"PYTHONPATH": python_path()}
    ran = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, env=environment, check=False)
    if ran.returncode:
        said = (ran.stderr.strip() or f"vLLM's import ended with status {ran.returncode}").splitlines()
        raise CannotRunError(said[-1])
    line = next(line for line in ran.stdout.splitlines() if line.startswith("PROBE"))
    found: dict[str, Any] = json.loads(line.removeprefix("PROBE"))
    return found


class _Engines:
    """The engine processes that run now, of all modes.

    Threads: all; ``_lock`` guards both fields.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._is_ended = False

    def run(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> str:
        """Run one to its end or its limit; why that did not work, or nothing."""
        with self._lock, open(log, "wb") as output:
            if self._is_ended:
                return "not started: interrupted"
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            self._running.add(process)
        try:
            status = process.wait(ENGINE_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return f"the engine did not end within {ENGINE_LIMIT_S:g} s"
        finally:
            with self._lock:
                self._running.discard(process)
        return f"the engine ended with status {status}" if status else ""

    def end(self) -> None:
        """Kill all, and start no other one. Each one's cache server ends with its last client."""
        with self._lock:
            self._is_ended = True
            for process in self._running:
                process.kill()


def _ended(
    modes: Sequence[Mode], scenario: Scenario, asked: argparse.Namespace
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run modes, at most ``asked.at_once`` beside each other and in their order; each one's record when it has ended.

    Raises:
        CannotRunError: The model cannot be built.
        KeyboardInterrupt: Ctrl-C; no engine is left then.
    """
    if not modes:
        return
    end_s = time.monotonic() + asked.budget_s
    model = _build_model(scenario, asked.model_dir)
    engines = _Engines()

    def run(mode: Mode) -> dict[str, Any] | None:
        if time.monotonic() > end_s:
            print(f"gpu-e2e: {mode.name}: no time left; run again, what is done is kept", flush=True)
            return None
        print(f"gpu-e2e: {mode.name} begins", flush=True)
        return run_mode(mode, scenario, model, engines)

    with ThreadPoolExecutor(asked.at_once) as pool:
        running = {pool.submit(run, mode): mode.name for mode in modes}
        try:
            for future in as_completed(running):
                if (record := future.result()) is None:
                    continue
                name = running[future]
                print(f"gpu-e2e: {name}: {record['verdict']} after {record['duration_s']:.0f} s", flush=True)
                yield name, record
        finally:
            # Nothing is left to do here unless this ends early: Ctrl-C, or a defect of ours.
            pool.shutdown(wait=False, cancel_futures=True)
            engines.end()


def _build_model(scenario: Scenario, models: Path) -> Path:
    """Build what all engines read, before any of them starts.

    Raises:
        CannotRunError: That did not work.
    """
    path = models / f"gpu-e2e-{scenario.model.lower()}"
    command = [sys.executable, "-c", BUILD, str(path), scenario.model]
    environment = os.environ | {"PYTHONPATH": python_path()}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if ran.returncode:
        said = (ran.stderr.strip() or f"status {ran.returncode}").splitlines()
        raise CannotRunError(f"the model cannot be built in {models}: {said[-1]}")
    return path


def run_mode(mode: Mode, scenario: Scenario, model: Path, engines: _Engines) -> dict[str, Any]:
    """Run the three engines of a mode; its record, whatever became of them."""
    files = FILES / mode.name
    shutil.rmtree(files, ignore_errors=True)
    files.mkdir(parents=True)
    started, began_s = datetime.now(UTC), time.monotonic()
    record: dict[str, Any] = {"verdict": FAILED, "broken": [], "phases": []}
    results: dict[str, dict[str, Any]] = {}
    for role in ROLES:
        job = _job(mode, scenario, role, files, model, results)
        if why := _run_engine(mode, role, job, files, engines):
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
    mode: Mode, scenario: Scenario, role: str, files: Path, model: Path, results: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    cache = files / "cache"
    job: dict[str, Any] = {
        "role": role,
        "scenario": asdict(scenario),
        "model": str(model),
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


def _run_engine(mode: Mode, role: str, job: Mapping[str, Any], files: Path, engines: _Engines) -> str:
    """Run one engine to its end, and its cache server; why that did not work, or nothing."""
    path = files / f"{role}.job.json"
    path.write_text(json.dumps(job, indent=1))
    # What vLLM compiles is kept for a mode's next engines alone: modes beside each other would write the same files.
    own = {"PYTHONPATH": python_path(), "VLLM_CACHE_ROOT": str(files / "compiled")}
    environment = ENVIRONMENT | dict(DEVICE_ENVIRONMENT[mode.device]) | dict(mode.environment) | own
    if why := engines.run([sys.executable, "-m", ENGINE, str(path)], environment, files / f"{role}.log"):
        return why
    if not Path(job["result"]).is_file():
        return "the engine ended with status 0 and no result"
    return "" if role == PLAIN else wait_for_server_end(Path(job["cache"]))


def _tail(log: Path) -> list[str]:
    return [f"| {line}" for line in log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]]


def summary(
    modes: Mapping[str, Any], machine: Mapping[str, Any], device: str, commit: str | None = None
) -> dict[str, Any]:
    """What is said about all modes together."""
    wanted = {mode.name for mode in MODES if mode.device == device}
    fresh = all(mode["source"] == source_digest(SOURCES) for mode in modes.values())
    return {
        "commit": commit or git("rev-parse", "HEAD"),
        "is_dirty": bool(git("status", "--porcelain", "--", *SOURCES)),
        "is_whole": wanted == set(modes) and fresh,
        "exit_code": 0 if all(mode["verdict"] == RIGHT for mode in modes.values()) else 1,
        "machine": dict(machine),
    }


def table(modes: Mapping[str, Any], wanted: Sequence[Mode]) -> list[str]:
    """The modes for people."""
    lines = ["", f"{'mode':<22}{'verdict':<13}{'seconds':>7}  {'KV layout':<11}{'TTFT cold, host, disk':<26}", "-" * 84]
    for mode in wanted:
        have = modes.get(mode.name, {"verdict": LATE, "duration_s": 0, "phases": [], "broken": ["run again"]})
        times = " / ".join(f"{phase['ttft_s']:.3f}" for phase in have["phases"][:3])
        layout = have.get("engine", {}).get("kv_layout") or "?"
        lines.append(f"{mode.name:<22}{have['verdict']:<13}{have['duration_s']:>7.1f}  {layout:<11}{times}")
        lines += [f"{'':<22}{line}" for line in have["broken"]]
    return [*lines, ""]
