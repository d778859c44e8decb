"""What this machine lets a process have."""

import os
from pathlib import Path


def memory_limit_bytes(cgroup: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int:
    """Memory this process may use: the machine's, or less where its cgroup or one above it says so."""
    limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _limit_files(cgroup, membership):
        try:
            text = path.read_text().strip()
        except OSError:
            continue  # the other version of cgroups, or no limit file at the root: the machine's memory holds
        if text.isdigit():
            limit = min(limit, int(text))
    return limit


def _limit_files(cgroup: Path, membership: Path) -> list[Path]:
    """Where limits of this process may stand; lines of ``membership`` are ``id:controllers:/path``."""
    result = [cgroup / "memory.max", cgroup / "memory" / "memory.limit_in_bytes"]
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return result  # no cgroups here
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            root, name = cgroup, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = cgroup / "memory", "memory.limit_in_bytes"
        else:
            continue
        place = root / path.lstrip("/")
        while place != root and root in place.parents:
            result.append(place / name)
            place = place.parent
    return result
