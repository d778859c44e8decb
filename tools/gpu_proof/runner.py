"""Runs the sections, each in a process of its own, keeps what came out and shows it.

Must not import torch itself: a section that hangs or loses the GPU takes no other one with it. Resumable: a section
that passed on the same sources, GPU and torch is not run again. The record is ``build/gpu_proof.json``; a whole one of
a clean commit that passed is also ``docs/proofs/gpu.json``. Exit codes: 0 all is right, 1 something is wrong, failed or
was not reached, 2 this machine cannot run it.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
SOURCES: Final = ("tiered_kv/chunks", "tools/gpu_proof")
"""What a proof is of: a section is stale when one of their files changes."""

PYTHON_MIN: Final = (3, 11)
RIGHT, WRONG, MEASURED, FAILED, LATE = "right", "wrong", "measured", "failed", "not reached"
GOOD: Final = frozenset({RIGHT, MEASURED})


@dataclass(frozen=True)
class Section:
    """A part that runs in a process of its own.

    Attributes:
        limit_s: After so long it has hung.
        shows: What it is for, in the table.
    """

    name: str
    limit_s: int
    shows: str


SECTIONS: Final = (
    Section("machine", 60, "GPU, driver, link"),
    Section("pinning", 180, "seconds per GiB, errors, a second process, holes"),
    Section("ceilings", 120, "what the link gives"),
    Section("correctness", 400, "bytes, beside compute and both ways at once"),
    Section("hazards", 300, "each wait left out is noticed"),
    Section("fragments", 180, "from which page size on batched DMA is fast"),
    Section("rates", 500, "the engine against the link, real shapes"),
    Section("interference", 400, "a decode step beside copies and pinning"),
    Section("graphs", 200, "CUDA graphs captured beside copies and pinning"),
    Section("sanitizer", 500, "compute-sanitizer, torch's stream sanitizer"),
)

PROBE: Final = """
import json, sys
try:
    import numpy
except ImportError:
    sys.exit("this Python has no numpy")
try:
    import torch
except ImportError:
    sys.exit("this Python has no torch; name one that has: make gpu-proof GPU_PYTHON=/path/to/python3")
if "--dry" in sys.argv:
    print(json.dumps({"gpu": "none: a dry run", "torch": torch.__version__, "driver": ""}))
    sys.exit()
if torch.version.hip:
    sys.exit("this is an AMD GPU's torch; the proof is for NVIDIA, and the same code was never run on AMD")
if torch.version.cuda is None:
    sys.exit(f"torch {torch.__version__} is built without CUDA; the proof is of an NVIDIA GPU")
if not torch.cuda.is_available():
    sys.exit("torch finds no NVIDIA GPU here; the proof is of an NVIDIA GPU")
print(json.dumps({
    "gpu": torch.cuda.get_device_name(0), "torch": torch.__version__, "cuda": torch.version.cuda,
    "memory_bytes": torch.cuda.get_device_properties(0).total_memory,
}))
"""
PROBE_LIMIT_S: Final = 120
LIMIT_MIN_S = 1.0
"""A section has this long also at the end of the time."""


class CannotRunError(Exception):
    """This machine cannot run what was asked for; the message says what is missing."""


def check_names(asked: Sequence[str], known: Sequence[str], kind: str, where: str = "") -> None:
    """Look whether all that was asked for exists, before anything runs.

    Args:
        kind: What the names are of: one word, whose plural ends with "s".
        where: On what, where there are others elsewhere.

    Raises:
        CannotRunError: Something does not; the message names what does.
    """
    if unknown := [name for name in asked if name not in known]:
        on = f" on {where}" if where else ""
        raise CannotRunError(f"there is no {kind} {', '.join(unknown)}{on}; {kind}s are {', '.join(known)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for."""
    asked = _parser().parse_args(arguments)
    if asked.section:
        from tools.gpu_proof.section import run_section  # noqa: PLC0415 - torch: only in a section's own process

        return run_section(asked.section, asked.record, is_dry=asked.dry, is_quick=asked.quick)
    try:
        check_names(asked.sections, [section.name for section in SECTIONS], "section")
        machine = probe(is_dry=asked.dry)
    except CannotRunError as exc:
        print(f"gpu-proof: {exc}. Nothing was run.", file=sys.stderr)
        return 2
    out = asked.out or ROOT / "build" / ("gpu_proof_dry.json" if asked.dry else "gpu_proof.json")
    kept = _kept(out)
    wanted = [section for section in SECTIONS if not asked.sections or section.name in asked.sections]
    end_s = time.monotonic() + asked.budget_s
    for section in wanted:
        have = kept["sections"].get(section.name)
        if have and not asked.force and is_proven(have, machine, is_quick=asked.quick):
            print(f"gpu-proof: {section.name}: {have['verdict']} on these sources already, skipped", flush=True)
            continue
        if time.monotonic() > end_s:
            print(f"gpu-proof: {section.name}: no time left; run again, what is done is kept", flush=True)
            continue
        kept["sections"][section.name] = run_one(section, machine, is_dry=asked.dry, is_quick=asked.quick, end_s=end_s)
        write(out, kept | summary(kept["sections"], machine, asked))
    whole = kept | summary(kept["sections"], machine, asked)
    print("\n".join(table(whole["sections"], wanted)))
    print(f"gpu-proof: the whole record is {_shown(out)}")
    if not asked.dry:
        print(f"gpu-proof: {keep(whole)}")
    return 0 if all(kept["sections"].get(section.name, {}).get("verdict") in GOOD for section in wanted) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu-proof", description="What only a GPU can show of the copies.")
    names = [section.name for section in SECTIONS]
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(names))
    parser.add_argument("--dry", action="store_true", help="without a GPU: what does not depend on one, small")
    parser.add_argument("--quick", action="store_true", help="a quarter of every size")
    parser.add_argument("--force", action="store_true", help="also what passed on these sources already")
    parser.add_argument("--budget-s", type=float, default=3600.0, help="begin no section after so many seconds")
    parser.add_argument("--out", type=Path, help="where the record goes; build/gpu_proof.json")
    parser.add_argument("--commit", help="the commit of these files, where git cannot be asked")
    parser.add_argument("--section", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    return parser


def probe(*, is_dry: bool) -> dict[str, Any]:
    """What the machine has.

    Raises:
        CannotRunError: It lacks something; in one sentence.
    """
    if sys.version_info < PYTHON_MIN:
        raise CannotRunError(f"Python {'.'.join(map(str, PYTHON_MIN))} is needed, this is {sys.version.split()[0]}")
    command = [sys.executable, "-c", PROBE, *(["--dry"] if is_dry else [])]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise CannotRunError(f"torch did not answer within {PROBE_LIMIT_S} s") from None
    if ran.returncode:
        said = (ran.stderr.strip() or f"torch ended with status {ran.returncode}").splitlines()
        raise CannotRunError(said[-1])
    found: dict[str, Any] = json.loads(ran.stdout.strip().splitlines()[-1])
    return found | {"python": sys.version.split()[0], "kernel": os.uname().release}


def run_one(
    section: Section, machine: Mapping[str, Any], *, is_dry: bool, is_quick: bool, end_s: float
) -> dict[str, Any]:
    """Run a section to its end, its limit or the end of the time; its record, whatever became of it."""
    print(f"gpu-proof: {section.name}: {section.shows}", flush=True)
    record = ROOT / "build" / f"gpu_proof_{os.getpid()}_{section.name}.json"
    record.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tools.gpu_proof", "--section", section.name, "--record", str(record)]
    command += ["--dry"] * is_dry + ["--quick"] * is_quick
    started, began_s = datetime.now(UTC), time.monotonic()
    limit_s = max(LIMIT_MIN_S, min(section.limit_s, end_s - began_s + 30))
    try:
        ran = subprocess.run(
            command, cwd=ROOT, env=os.environ | {"PYTHONPATH": python_path()}, timeout=limit_s, check=False
        )
        ended = f"ended with status {ran.returncode} and no record"
    except subprocess.TimeoutExpired:
        ended = f"hung: ended after {limit_s:.0f} s"
    result: dict[str, Any] = {"verdict": FAILED, "headline": ended, "checks": [], "rows": []}
    if record.is_file():
        result = json.loads(record.read_text())
        record.unlink()
    return result | {
        "started": started.isoformat(timespec="seconds"),
        "duration_s": round(time.monotonic() - began_s, 1),
        "source": source_digest(),
        "is_quick": is_quick,
        "on": {key: machine[key] for key in ("gpu", "torch")},
    }


def python_path() -> str:
    """PYTHONPATH for a process of its own: this repository before what is there."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))


def is_proven(have: Mapping[str, Any], machine: Mapping[str, Any], *, is_quick: bool) -> bool:
    """Whether a section's record stands for a new run."""
    same = have["source"] == source_digest() and have["on"] == {key: machine[key] for key in ("gpu", "torch")}
    return bool(same and have["verdict"] in GOOD and have["is_quick"] <= is_quick)


def source_digest(folders: Sequence[str] = SOURCES) -> str:
    """A digest of what is proven, by content: there may be no git where the GPU is."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:32]


def summary(sections: Mapping[str, Any], machine: Mapping[str, Any], asked: argparse.Namespace) -> dict[str, Any]:
    """What is said about all sections together."""
    whole = {section.name for section in SECTIONS} == set(sections)
    fresh = all(s["source"] == source_digest() and not s["is_quick"] for s in sections.values())
    passed = all(s["verdict"] in GOOD for s in sections.values())
    return {
        "commit": asked.commit or git("rev-parse", "HEAD"),
        "is_dirty": bool(git("status", "--porcelain", "--", *SOURCES)),
        "is_dry": asked.dry,
        "is_whole": whole and fresh,
        "exit_code": 0 if passed else 1,
        "machine": dict(machine),
    }


def git(*arguments: str) -> str | None:
    """What git says; None: it cannot be asked here."""
    try:
        ran = subprocess.run(("git", *arguments), cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return ran.stdout.strip() if ran.returncode == 0 else None


def keep(whole: Mapping[str, Any], name: str = "gpu") -> str:
    """Put a record that is worth keeping into docs/proofs; where it is, or why it is not there."""
    reasons = {
        "not everything ran at full size on these sources": not whole["is_whole"],
        "something is wrong": bool(whole["exit_code"]),
        "the files differ from the commit": whole["is_dirty"],
        "the commit is not known: give --commit": whole["commit"] is None,
    }
    if why := [reason for reason, holds in reasons.items() if holds]:
        return f"not kept in docs/proofs: {'; '.join(why)}"
    path = ROOT / "docs" / "proofs" / f"{name}.json"
    write(path, whole)
    return f"kept as {_shown(path)}"


def table(sections: Mapping[str, Any], wanted: Sequence[Section]) -> list[str]:
    """The sections for people."""
    lines = ["", f"{'section':<13}{'verdict':<13}{'seconds':>7}  what came out", "-" * 100]
    for section in wanted:
        have = sections.get(section.name, {"verdict": LATE, "headline": "run again", "checks": []})
        lines.append(f"{section.name:<13}{have['verdict']:<13}{have.get('duration_s', 0):>7.1f}  {have['headline']}")
        wrong = [check for check in have["checks"] if not check["passed"]]
        lines += [f"{'':<13}wrong: {check['what']}. seen={check['seen']}" for check in wrong]
    return [*lines, ""]


def _kept(out: Path) -> dict[str, Any]:
    """What an earlier run left."""
    if not out.is_file():
        return {"sections": {}}
    content: dict[str, Any] = json.loads(out.read_text())
    return content


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Readers see all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    os.replace(temporary, path)


def _shown(path: Path) -> str:
    return os.path.relpath(path, ROOT)
