"""Check what a server needs: memory, descriptors and a socket; and find one that runs."""

import contextlib
import fcntl
import os
import resource
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tiered_kv.config import Config, size_text
from tiered_kv.errors import ConfigError, TieredKVError
from tiered_kv.machine import memory_limit_bytes
from tiered_kv.metrics.figures import ServerFigures
from tiered_kv.ops.findings import DoctorFinding, error, ok, warning
from tiered_kv.ops.server_link import ServerLink
from tiered_kv.server.connect import SCHEME, connect, hello_of
from tiered_kv.server.directory import check_private, read_info, socket_place
from tiered_kv.tiers.disk.lock import LOCK_FILE

DESCRIPTORS_LEAST: Final = 512
"""Slabs, connections to the store and a few clients; each client more takes two."""

MEMORY_SHARE: Final = 0.6
"""Of the memory limit, above which little is left for engines on the same machine."""

SHARED_MEMORY: Final = Path("/dev/shm")
REGIONS: Final = "vllm_offload_*.mmap"
"""Of vLLM's own offloading: host memory of one engine each."""


@dataclass(slots=True)
class Running:
    """The directory's current owner, if it has one.

    Attributes:
        figures: Of the server that runs; None where none answers.
        is_owned: Somebody holds the directory's lock, so nothing may be written into it.
    """

    figures: ServerFigures | None = None
    is_owned: bool = False
    findings: list[DoctorFinding] = field(default_factory=list)


def check_memory(config: Config, running: Running) -> list[DoctorFinding]:
    """Compare host memory with what the machine and its cgroups give."""
    host, limit = config.resolved_host_bytes(), memory_limit_bytes()
    text = f"host_bytes {size_text(host)} of {size_text(limit)} that this machine or its cgroup gives"
    if host > limit:
        return [error("memory", f"{text}: the server would not start", f"set host_bytes below {size_text(limit)}")]
    if host > limit * MEMORY_SHARE:
        return [warning("memory", text, "leave room for the engines, which count against the same limit")]
    available = _available_bytes()
    if running.figures is None and available is not None and available < host:
        hint = "free some, or set host_bytes lower; the server takes memory as it needs it and does with what it gets"
        return [warning("memory", f"{text}, of which {size_text(available)} are free now", hint)]
    return [ok("memory", text)]


def check_regions() -> list[DoctorFinding]:
    """Whether engines that were killed left host memory behind, which another engine would want."""
    if not (left := left_regions()):
        return []
    size = size_text(sum(place.stat().st_blocks * 512 for place in left))
    text = f"{size} of memory lie in regions that no process here has mapped: {', '.join(map(str, left))}"
    return [warning("memory", text, "engines of vLLM that were killed left them; remove what no container uses")]


def left_regions() -> list[Path]:
    """Regions of vLLM's offloading that are this user's and that no process which can be seen has mapped.

    vLLM's ``TieringOffloadingSpec`` (0.32) removes the file of its region, of ``cpu_bytes_to_use``, when its worker
    ends well, and only then. We remove none: it is not ours, and a process in another container may have it.
    """
    mapped = _mapped_files()
    places = [place for place in sorted(SHARED_MEMORY.glob(REGIONS)) if str(place) not in mapped]
    return [place for place in places if place.stat().st_uid == os.geteuid()]


def _mapped_files() -> set[str]:
    """Files that processes have mapped, of those that we may look at; our own user's are among them."""
    found: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            found.update(fields[5] for line in maps.read_text().splitlines() if len(fields := line.split(None, 5)) == 6)
    return found


def _available_bytes() -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def check_descriptors(config: Config) -> list[DoctorFinding]:
    """Whether the server may open as many files as it needs; it raises its soft limit by itself."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = DESCRIPTORS_LEAST + (4 * config.storage_concurrency if config.location().kind == "object" else 0)
    if hard != resource.RLIM_INFINITY and hard < needed:
        hint = f"raise the hard limit (ulimit -Hn, LimitNOFILE) to {needed} or more"
        return [warning("descriptors", f"a process may open {hard} files, which is little", hint)]
    shown = "any number of" if hard == resource.RLIM_INFINITY else str(hard)
    return [ok("descriptors", f"a process may open {shown} files")]


def check_socket(config: Config) -> list[DoctorFinding]:
    """Whether the server finds a private place with a short path for its socket."""
    if config.server is not None:
        return []
    directory = config.server_directory()
    try:
        place = socket_place(Path(os.path.realpath(directory)))
        if os.path.lexists(place.parent):
            check_private(place.parent, "XDG_RUNTIME_DIR")
        if config.disk_root() is None:
            for state in (directory.parent, directory):
                if os.path.lexists(state):
                    check_private(state, "XDG_STATE_HOME")
    except ConfigError as exc:
        return [error("socket", str(exc).partition(" path=")[0].partition(" tried=")[0], "set XDG_RUNTIME_DIR")]
    return [ok("socket", f"a private place with a path of {len(os.fsencode(place))} bytes")]


def find_running(config: Config) -> Running:
    """Find the server of the directory, if there is one, and whether it would take an engine with these settings."""
    running = Running()
    directory = Path(os.path.realpath(config.server_directory()))
    running.is_owned = _is_locked(directory)
    try:
        link = _link(config, directory)
    except ConfigError as exc:
        running.findings.append(error("server", str(exc), "use the same values, or end that server"))
        running.figures = _figures_anyway(config, directory)
        return running
    except TieredKVError as exc:
        running.findings.append(error("server", str(exc), "wait, or end that server"))
        return running
    if link is None:
        running.findings.append(_nobody(config, directory, is_owned=running.is_owned))
        return running
    with link:
        try:
            figures = link.stat()
        except TieredKVError as exc:
            running.findings.append(error("server", str(exc), "wait, or end that server"))
            return running
        is_another = config.server is not None and not link.owns(directory)
    running.figures = figures
    if is_another:
        text = f"the server that is named serves another directory (pid {figures.pid})"
        running.findings.append(error("server", text, "name the same directory in storage_uri or disk_path"))
    else:
        who = f"pid {figures.pid}, version {figures.version}, {figures.clients - 1} clients"
        text = f"one runs ({who}) within these limits"
        running.findings.append(ok("server", text))
    return running


def _link(config: Config, directory: Path) -> ServerLink | None:
    hello = hello_of(config, "admin")
    if config.server is None:
        return ServerLink.of_directory(directory, hello)
    sock = connect(config.server.removeprefix(SCHEME))
    return None if sock is None else ServerLink(sock, hello)


def _figures_anyway(config: Config, directory: Path) -> ServerFigures | None:
    """Statistics of a server that refuses these limits; None where it refuses any client, e.g. by version."""
    try:
        link = ServerLink.of_directory(directory) if config.server is None else ServerLink.of_socket(config.server)
        if link is None:
            return None
        with link:
            return link.stat()
    except TieredKVError:
        return None  # the first refusal is in the findings already


def _nobody(config: Config, directory: Path, *, is_owned: bool) -> DoctorFinding:
    if config.server is not None:
        return error("server", "no server answers at the socket that is named", "start it: `tiered-kv serve`")
    if not is_owned:
        return ok("server", "none runs; the first engine starts one")
    info = read_info(directory)
    if info is not None:
        text = f"the directory is locked, and its server (pid {info.pid}, version {info.version}) does not answer"
        return error("server", text, "it starts, ends or hangs: wait, look at server.log, or end it")
    return warning("server", "another command or a server that is starting has the directory locked", "wait for it")


def _is_locked(directory: Path) -> bool:
    """Whether a process holds the directory's lock. Creates no file; takes the lock for a moment."""
    try:
        descriptor = os.open(directory / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False  # no lock file, or a directory that is judged elsewhere
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # a file system without locks, where the server's own try will say so
    finally:
        os.close(descriptor)
    return False
