"""What a process asks of its machine: memory, a name, a clock, what its children say, who it talks to, secrets."""

import logging
import os
import re
import secrets
import socket
import stat
import struct
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import IO, Final, Protocol

from tiered_kv.errors import ConfigError

LINE_BYTES_MAX: Final = 4096
"""Of what a child says, in one line of our log."""

SECRET_BYTES_MAX: Final = 4096
"""Of a file with a secret: more than any of ours is long."""

LINES_MAX: Final = 100
LINES_S: Final = 60.0
"""So many lines of a child are logged in so many seconds: the log is of 1 MiB, and holds what the server says, too."""

LINES_MORE: Final = 10
"""And so many where it said more just before: lines of 200 bytes fill the log, and the one before it, in most of
a day."""

LAST_LINES: Final = 20
"""Of those that were suppressed, logged when the child has ended: they may say why."""

_PEER: Final = struct.Struct("3i")


class Forgetful(Protocol):
    """What a child that is forked must not go on using, because its parent does."""

    def forget_after_fork(self) -> None:
        """In a child: let go of what it shares with its parent, whose other threads may have held any lock."""


_of_this_process: weakref.WeakSet[Forgetful] = weakref.WeakSet()


def forgotten_in_children(shared: Forgetful) -> None:
    """From now on a child that is forked lets go of something, as long as there is that."""
    _of_this_process.add(shared)


def _forget_after_fork() -> None:
    for shared in list(_of_this_process):
        shared.forget_after_fork()


os.register_at_fork(after_in_child=_forget_after_fork)


def repeat_in_log(said: IO[bytes], log: logging.Logger, *, monotonic: Callable[[], float] = time.monotonic) -> None:
    """Log what a child process says on its standard error, until it ends; then close that.

    A server that an engine started has no standard error which anybody reads, and one that logs for machines writes no
    other lines. Lines beyond the rate are suppressed and counted, but for the last ones before its end.
    """
    due_s, logged, suppressed, most = monotonic() + LINES_S, 0, 0, LINES_MAX
    last: deque[str] = deque(maxlen=LAST_LINES)
    with said:
        while line := said.readline(LINE_BYTES_MAX):
            if not (text := line.decode(errors="replace").strip()):
                continue
            if (now_s := monotonic()) >= due_s:
                if suppressed:
                    log.warning("suppressed lines of a child process. lines=%d", suppressed)
                most = LINES_MORE if suppressed and now_s < due_s + LINES_S else LINES_MAX
                due_s, logged, suppressed = now_s + LINES_S, 0, 0
                last.clear()
            if logged < most:
                log.warning("%s", text)
                logged += 1
                continue
            if not suppressed:
                log.warning("a child process says too much: more lines are suppressed for up to %g s", LINES_S)
            suppressed += 1
            last.append(text)
    if suppressed > len(last):
        log.warning("suppressed lines of a child process. lines=%d", suppressed - len(last))
    for text in last:
        log.warning("%s", text)


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Process and user at the other end of a Unix socket; the process is 0 in a PID namespace that cannot be seen."""
    pid, uid, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, uid


def read_secret(path: Path, named_by: str, pattern: re.Pattern[bytes], misfit: str, make: str) -> bytes:
    """A secret that a file holds for its owner alone; the texts are for errors: who names it, how one is made.

    Raises:
        ConfigError: There is none, others may read or write it, or it holds something else.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(SECRET_BYTES_MAX)
    except OSError as exc:
        raise ConfigError(f"{named_by}: cannot read {path}: {exc.strerror}; {make}") from exc
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(f"{named_by}: others may use {path}, mode {stat.S_IMODE(mode):o}: chmod 0600")
    if pattern.fullmatch(content) is None:
        raise ConfigError(f"{named_by}: {path} {misfit}; {make}")
    return content.rstrip()


MACHINE_IDS = (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id"))
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MULTICAST = 1 << 40
"""Set in what ``uuid`` makes up where it finds no network card."""


def since_boot_s() -> float:
    """Seconds that never go back and that count the time in suspend, too; only differences mean something.

    For whatever another machine measures as well: a lease or a grant runs out there while this machine sleeps, and
    ``time.monotonic`` (CLOCK_MONOTONIC) would say that no time has passed. What concerns this machine alone, e.g. how
    long a read took, is better off with ``time.monotonic``: a suspended disk is not a slow one.
    """
    return time.clock_gettime(_boot_clock())


@cache
def _boot_clock() -> int:
    """Asked once, because two clocks must not take turns; a sandbox may lend only the older one."""
    try:
        time.clock_gettime(time.CLOCK_BOOTTIME)
    except OSError:
        return time.CLOCK_MONOTONIC
    return time.CLOCK_BOOTTIME


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


def machine_name(machine_ids: tuple[Path, ...] = MACHINE_IDS, boot_id: Path = BOOT_ID) -> str:
    """What tells this machine from every other, also from one of the same host name; the same until it is booted again.

    The system's machine id; where there is none, the address of a network card. Where there is no card either, a name
    that this process alone has: two that wrongly think they are two lose hits, two that wrongly think they are one
    could load each other's KV. So the kernel's boot id comes behind it: a container may have its image's machine id,
    and the first one of a Docker host has the same card's address on every host.
    """
    try:
        boot = f" {boot_id.read_text('ascii').strip()}"
    except (OSError, UnicodeDecodeError):
        boot = ""
    for path in machine_ids:
        try:
            found = path.read_text("ascii").strip()
        except (OSError, UnicodeDecodeError):
            continue
        if re.fullmatch(r"[0-9a-f]{32}", found) and found.strip("0"):  # "uninitialized" while an image is made
            return f"{socket.gethostname()} {found}{boot}"
    card = uuid.getnode()
    return f"{socket.gethostname()} {secrets.token_hex(16) if card & _MULTICAST else f'{card:012x}'}{boot}"
