"""What running processes use, read from /proc: CPU time and memory. Not a benchmark by itself."""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path


def cpu_s(pid: int | str = "self") -> float:
    """CPU time of all threads of a process so far."""
    total_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            total_ns += int((task / "schedstat").read_text().split()[0])
    return total_ns / 1e9


def pss_mib(pids: Iterable[int]) -> float:
    """Memory of these processes, what they share counted in parts."""
    kib = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                kib += int(line.split()[1])
    return kib / 1024


def tree(pid: int) -> list[int]:
    """A process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for child, parent in _parents():
        children.setdefault(parent, []).append(child)
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def _parents() -> Iterator[tuple[int, int]]:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            yield int(stat.parent.name), int(stat.read_text().rpartition(")")[2].split()[1])
