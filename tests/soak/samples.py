"""What a process and a server's directory look like from outside, as ``ps``, ``ls -l /proc`` and ``du`` would tell."""

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.kit.storage.disk_probe import du_bytes
from tiered_kv.errors import TieredKVError
from tiered_kv.metrics.figures import ServerFigures
from tiered_kv.ops.server_link import ServerLink
from tiered_kv.server.connect import SCHEME
from tiered_kv.server.directory import read_info

ASK_S = 0.5
SLAB = "memfd:tiered_kv-slab"


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """One process at one moment.

    Attributes:
        rss_kib, anonymous_kib, shared_kib: Resident memory in all, private to it, and of shared memory.
        descriptors: Open ones by kind: ``slab``, ``unix``, ``tcp``, ``file``, ``other``.
        slabs_mapped: Parts of the host arena in its address space.
        slab_inodes: Of the slabs it has open, which nobody else's have.
        zombies: Children that ended and were not waited for.
    """

    pid: int
    rss_kib: int
    anonymous_kib: int
    shared_kib: int
    threads: int
    descriptors: dict[str, int]
    slabs_mapped: int
    slab_inodes: frozenset[int]
    zombies: int


def sample_process(pid: int) -> ProcessSample | None:
    """None when it is gone, or going."""
    place = Path(f"/proc/{pid}")
    try:
        status = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines())
        if "VmRSS" not in status:
            return None
        kinds, inodes = _descriptors(place)
        return ProcessSample(
            pid,
            rss_kib=int(status["VmRSS"].split()[0]),
            anonymous_kib=int(status["RssAnon"].split()[0]),
            shared_kib=int(status["RssShmem"].split()[0]),
            threads=int(status["Threads"]),
            descriptors=kinds,
            slabs_mapped=(place / "maps").read_text().count(SLAB),
            slab_inodes=inodes,
            zombies=sum(_is_zombie(child) for child in children(pid)),
        )
    except (FileNotFoundError, ProcessLookupError):
        return None


def _descriptors(place: Path) -> tuple[dict[str, int], frozenset[int]]:
    kinds: Counter[str] = Counter()
    inodes = set()
    tcp = {line.split()[9] for name in ("tcp", "tcp6") for line in _lines(place / "net" / name)[1:]}
    for fd in os.listdir(place / "fd"):
        with contextlib.suppress(FileNotFoundError):
            target = os.readlink(place / "fd" / fd)
            if SLAB in target:
                kinds["slab"] += 1
                inodes.add(os.stat(place / "fd" / fd).st_ino)
            elif target.startswith("socket:"):
                kinds["tcp" if target[8:-1] in tcp else "unix"] += 1
            else:
                kinds["file" if target.startswith("/") else "other"] += 1
    return dict(kinds), frozenset(inodes)


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += map(int, (task / "children").read_text().split())
    return found


def _is_zombie(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return False


def slab_holders(inodes: set[int]) -> list[int]:
    """Processes that have one of these slabs open or mapped, whoever they are."""
    return sorted({pid for pid, inode in _open_slabs() if inode in inodes})


def _open_slabs() -> Iterator[tuple[int, int]]:
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended, or belongs to somebody else
            for fd in os.listdir(place / "fd"):
                with contextlib.suppress(FileNotFoundError):
                    if SLAB in os.readlink(place / "fd" / fd):
                        yield int(place.name), os.stat(place / "fd" / fd).st_ino
            for line in (place / "maps").read_text().splitlines():
                if SLAB in line:
                    yield int(place.name), int(line.split()[4])


@dataclass(frozen=True, slots=True)
class DirectorySample:
    """A server's directory at one moment; ``figures`` is None while the server does not answer."""

    du_bytes: int
    temp_files: int
    figures: ServerFigures | None
    pid: int | None
    process: ProcessSample | None = field(default=None)

    def of_tier(self, name: str) -> Any:
        """The figures of a tier."""
        assert self.figures is not None
        return next(tier for tier in self.figures.tiers if tier.name == name)


def sample_directory(root: Path) -> DirectorySample:
    """Look at a directory and its server, if there is one."""
    info = read_info(root)
    figures = None
    if info is not None:
        with contextlib.suppress(TieredKVError), ServerLink.of_socket(f"{SCHEME}{info.socket}", ASK_S) as link:
            figures = link.stat()
    try:
        temp_files = len(os.listdir(root / "tmp"))
    except FileNotFoundError:
        temp_files = 0
    pid = None if info is None else info.pid
    process = None if pid is None else sample_process(pid)
    return DirectorySample(du_bytes(root / "blobs", root / "tmp"), temp_files, figures, pid, process)
