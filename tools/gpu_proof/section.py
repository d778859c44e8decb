"""What a section of the proof gets: the device, notes and checks. Run in a process of its own (``run_section``)."""

import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch

from tiered_kv.chunks.cuda import Cuda
from tiered_kv.chunks.device import TorchDevice
from tools.gpu_proof.devices import DryDevice, cuda_device
from tools.gpu_proof.host_memory import GIB, MIB

DRY_SHARE: Final = 1 / 256
"""Of every size, in a dry run."""


@dataclass(frozen=True)
class Check:
    """Something that has to hold; what was seen where it does not."""

    what: str
    passed: bool
    seen: str


@dataclass
class Proof:
    """One section's run.

    Attributes:
        rows: What was measured, one mapping per line of the table.
        checks: What had to hold.
        headline: The section in a few words of its own figures.
    """

    name: str
    device: torch.device
    is_dry: bool = False
    is_quick: bool = False
    rows: list[dict[str, Any]] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    headline: str = ""

    def note(self, **row: Any) -> None:
        """Keep a line of figures, and show it."""
        shown = {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}
        self.rows.append(shown)
        print(f"  {self.name}: " + "  ".join(f"{key}={value}" for key, value in shown.items()), flush=True)

    def check(self, what: str, passed: bool, seen: object = "") -> None:
        """Keep whether something holds; show it if not."""
        self.checks.append(Check(what, passed, "" if passed else str(seen)))
        if not passed:
            print(f"  {self.name}: WRONG: {what}. seen={seen}", flush=True)

    def size(self, full: int) -> int:
        """A size in bytes for this run: the full one, or a small part of it in a dry or quick run."""
        return max(MIB // 4, int(full * DRY_SHARE)) if self.is_dry else full // 4 if self.is_quick else full

    def engine_device(self, *, has_batch: bool) -> TorchDevice:
        """What a copy engine runs on."""
        return DryDevice(has_batch=has_batch) if self.is_dry else cuda_device(self.device, has_batch=has_batch)

    def cuda(self) -> Cuda | None:
        """The calls for pinned memory; None in a dry run."""
        return None if self.is_dry else Cuda.loaded()

    def synchronize(self) -> None:
        """Wait for all that was queued on the GPU."""
        if not self.is_dry:
            torch.cuda.synchronize(self.device)

    def median_s(self, action: Callable[[], Any], repeats: int = 5) -> float:
        """Seconds of an action with all that it queues; one run more to warm up."""
        action()
        self.synchronize()
        took = []
        for _ in range(1 if self.is_dry else repeats):
            started_s = time.perf_counter()
            action()
            self.synchronize()
            took.append(time.perf_counter() - started_s)
        return statistics.median(took)

    @property
    def verdict(self) -> str:
        """``right`` or ``wrong`` by its checks; ``measured`` without any."""
        if not self.checks:
            return "measured"
        return "right" if all(check.passed for check in self.checks) else "wrong"

    def record(self) -> dict[str, Any]:
        """What is kept of it."""
        return {
            "verdict": self.verdict,
            "headline": self.headline,
            "checks": [asdict(check) for check in self.checks],
            "rows": self.rows,
        }


def gigabytes_per_s(size: int, seconds: float) -> float:
    """10^9 bytes per second."""
    return size / seconds / 1e9


def gib(size: int) -> float:
    """2^30 bytes."""
    return size / GIB


def percentiles(values: list[float]) -> Mapping[str, float]:
    """Mean, median and the 99th of a hundred."""
    ordered = sorted(values)
    last = min(len(ordered) - 1, int(len(ordered) * 0.99))
    return {"mean": statistics.mean(ordered), "p50": ordered[len(ordered) // 2], "p99": ordered[last]}


def run_section(name: str, record: Path, *, is_dry: bool, is_quick: bool) -> int:
    """Run one section in this process and write its record; what it raises is in the record.

    Returns:
        0, or 1 where something failed.
    """
    device = torch.device("cpu" if is_dry else "cuda:0")
    if not is_dry:
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)  # the context, which bare calls of the runtime need
    proof = Proof(name, device, is_dry, is_quick)
    kept: dict[str, Any] = {}
    try:
        import_module(f"tools.gpu_proof.sections.{name}").run(proof)
        kept = proof.record()
    except Exception as exc:  # noqa: BLE001 - whatever it was is the section's result
        traceback.print_exc(file=sys.stdout)
        kept = proof.record() | {"verdict": "failed", "headline": f"{type(exc).__name__}: {exc}"[:300]}
    record.write_text(json.dumps(kept))
    sys.stdout.flush()
    code = 0 if kept["verdict"] in ("right", "measured") else 1
    if code and not is_dry:
        os._exit(code)  # a context that an error has lost must not fail once more as Python ends
    return code
