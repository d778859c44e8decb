"""What every benchmark needs besides its measurement: facts of the machine, percentiles, and the report.

A report is a table in Markdown, one line of JSON, the same JSON in build/NAME.json, and with ``--keep`` in
docs/figures/NAME.json, from where ``charts.py`` draws. Owns how results are written down and nothing of what is
measured.
"""

import argparse
import json
import math
import os
import platform
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
FIGURES = REPOSITORY / "docs" / "figures"

Row = Mapping[str, Any]


def parser(about: str | None) -> argparse.ArgumentParser:
    """A parser with what all benchmarks take."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--keep", action="store_true", help="write the results to docs/figures/, too")
    return made


def machine(name: str, **more: object) -> dict[str, object]:
    """Where, when and how the benchmark ``name`` was run; ``more`` is what it alone has to say."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load": round(os.getloadavg()[0], 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        **more,
        "command": shlex.join(["python", f"benchmarks/{name}.py", *sys.argv[1:]]),
    }


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all does not pass."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(round(share * len(ordered), 6)) - 1)]


def table(rows: Sequence[Row], columns: Mapping[str, str]) -> list[str]:
    """Rows in Markdown; ``columns`` maps a field to its heading."""
    lines = ["| " + " | ".join(columns.values()) + " |", "|---" * len(columns) + "|"]
    return lines + ["| " + " | ".join(_shown(row.get(name)) for name in columns) + " |" for row in rows]


def _shown(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) and abs(value) < 1000 else str(value)


def finish(name: str, results: object, facts: Mapping[str, object], *, is_kept: bool = False) -> None:
    """Write the report's JSON: to build/, with ``is_kept`` to docs/figures/, and as the last line."""
    report = {"machine": dict(facts), "results": results}
    for folder in [REPOSITORY / "build", FIGURES] if is_kept else [REPOSITORY / "build"]:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
