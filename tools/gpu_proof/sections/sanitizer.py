"""Two sanitizers over a small copy: NVIDIA's compute-sanitizer, where it is installed, and torch's own for streams."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tools.gpu_proof.host_memory import MIB
from tools.gpu_proof.section import Proof
from tools.gpu_proof.shapes import Shape
from tools.gpu_proof.world import world

SHAPE = Shape("small", "LBNHC", 4, 4, 16, 64)
LIMIT_S = 400
CHILD = "TIERED_KV_PROOF_CHILD"
TOOLS = ("memcheck", "initcheck")
TORCH, PLAIN = "torch", "plain"
FIND, SAID_MAX = "CSAN detected", 4000


def run(proof: Proof) -> None:
    """Run both, or in a process that one of them started what they watch."""
    if child := os.environ.get(CHILD):
        _copy(proof, child)
        return
    if proof.is_dry:
        _copy(proof, PLAIN)
        proof.headline = "nothing to sanitize without a GPU"
        return
    ended = _run(proof, [sys.executable], TORCH)
    is_clean = ended.returncode == 0 and "CUDASanitizerErrors" not in ended.stdout + ended.stderr
    proof.note(sanitizer="torch's, for streams", status=ended.returncode)
    proof.check("torch's stream sanitizer finds nothing", is_clean, _found(ended.stdout + ended.stderr))
    found = _compute_sanitizer()
    if found is None:
        proof.note(sanitizer="compute-sanitizer", status="not installed")
        proof.headline = "torch's stream sanitizer; compute-sanitizer is not installed"
        return
    for tool in TOOLS:
        command = [found, "--tool", tool, "--error-exitcode", "9", "--target-processes", "all", sys.executable]
        ended = _run(proof, command, PLAIN)
        proof.note(sanitizer=f"compute-sanitizer {tool}", status=ended.returncode)
        if tool == "memcheck":  # initcheck also tells of torch's own uninitialised memory
            proof.check(f"compute-sanitizer's {tool} finds nothing", ended.returncode == 0, ended.stdout[-500:])
    proof.headline = f"torch's stream sanitizer and compute-sanitizer's {' and '.join(TOOLS)}"


def _copy(proof: Proof, child: str) -> None:
    if child == TORCH:
        from torch.cuda import _sanitizer  # noqa: PLC0415 - only where it is meant to watch

        _sanitizer.enable_cuda_sanitizer()
    with world(proof, SHAPE, pool_bytes=64 * MIB, chunks=6) as made:
        made.raw.zero_()
        rank = made.engine("staged", slice_bytes=MIB, ring_slices=2)
        for _ in range(3):
            made.save(rank).wait()
            made.load(rank).wait()
    proof.headline = "copied"


def _run(proof: Proof, command: list[str], child: str) -> "subprocess.CompletedProcess[str]":
    record = Path(os.devnull)
    section = ["-m", "tools.gpu_proof", "--section", proof.name, "--record", str(record)]
    return subprocess.run(
        [*command, *section],
        env=os.environ | {CHILD: child},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def _found(said: str) -> str:
    """What torch's sanitizer found first, whose first lines name the operations; without a find the end."""
    at = said.find(FIND)
    return said[at : at + SAID_MAX] if at >= 0 else said[-SAID_MAX:]


def _compute_sanitizer() -> str | None:
    return shutil.which("compute-sanitizer") or next(
        (path for path in ("/usr/local/cuda/bin/compute-sanitizer",) if os.access(path, os.X_OK)), None
    )
