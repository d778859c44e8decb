"""Find and end the processes of one S3 server (scripts/s3_server.py), and no others.

A process is ours if it is one of Ceph's programs and was started with the configuration file of our directory. That is
asked anew right before it is killed, through a handle on the process: a pid that was reused meanwhile is safe.
"""

import os
import select
import signal
from pathlib import Path

ROLES = {"mon": "ceph-mon", "osd": "ceph-osd", "gateway": "radosgw"}
END_TIMEOUT_S = 60.0


def processes(directory: Path) -> dict[str, int]:
    """The running processes of this directory, role -> pid."""
    found = {}
    for entry in Path("/proc").iterdir():
        role = role_of(entry.name, directory) if entry.name.isdigit() else None
        if role is not None:
            found[role] = int(entry.name)
    return found


def role_of(pid: int | str, directory: Path) -> str | None:
    """What a process is to this directory's server; None: nothing, or it has ended."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:  # ended, or another user's under a restricted /proc
        return None
    if str(directory / "ceph.conf").encode() not in arguments:
        return None
    program = os.path.basename(arguments[0].decode(errors="replace"))
    return next((role for role, name in ROLES.items() if name == program), None)


def end(directory: Path, roles: tuple[str, ...]) -> None:
    """Kill these processes of the directory and wait until they are gone; none is fine.

    Raises:
        TimeoutError: One is still there after a minute.
    """
    for role, pid in processes(directory).items():
        if role not in roles:
            continue
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            if role_of(pid, directory) == role:  # the pid is held by the handle now: it is still the same process
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                if not select.select([handle], [], [], END_TIMEOUT_S)[0]:
                    raise TimeoutError(f"{ROLES[role]} does not end after SIGKILL. pid={pid}")
        except ProcessLookupError:
            continue
        finally:
            os.close(handle)
