"""Server and worker processes that tests start, signal and end."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.kit.module_process import module_command, module_environment
from tests.kit.server.probe import server_pid, wait_for
from tiered_kv.server.directory import read_info

WorkerProcess = subprocess.Popen[str]


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and was not waited for by its parent does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def start_time(pid: int) -> int | None:
    """When the process began, in the kernel's ticks since boot: with it a number tells processes apart for ever.

    A machine that starts many gives each number out again within the hour. None: there is no such process.
    """
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return None


def still_running(processes: Iterable[tuple[int, int | None]]) -> list[int]:
    """Those of the processes, told by number and start time, that still run."""
    return sorted(pid for pid, started in processes if is_alive(pid) and start_time(pid) == started)


def freeze(pid: int) -> None:
    """Stop a process; no thread of it does anything more when this returns: a signal is on its way when it was sent."""
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: _is_stopped(pid), f"the threads of {pid} to stop")


def strike(pid: int, number: signal.Signals) -> None:
    """Send a signal; one that stops a process has when this returns."""
    if number is signal.SIGSTOP:
        freeze(pid)
    else:
        os.kill(pid, number)


def _is_stopped(pid: int) -> bool:
    try:
        stats = [(thread / "stat").read_text() for thread in Path(f"/proc/{pid}/task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):  # a thread has just ended
        return False
    return all(stat.rpartition(") ")[2].startswith("T") for stat in stats)


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """The process stands still, and goes on in the end."""
    try:
        freeze(pid)
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def stopped_server(root: Path) -> Iterator[None]:
    """The directory's server stands still, and goes on in the end."""
    with frozen(server_pid(root)):
        yield


def end_softly(pid: int) -> None:
    """As an operator ends a server: it drains first. Left by all, it may do so by itself."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    wait_for(lambda: not is_alive(pid), "the server's end")


@contextmanager
def private_runtime() -> Iterator[Path]:
    """A place for servers' sockets, whose paths have at most 107 bytes: short, unlike a test's directory."""
    with tempfile.TemporaryDirectory(prefix="tkv-", ignore_cleanup_errors=True) as directory:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_RUNTIME_DIR", directory)
            yield Path(directory)


def end_server(root: Path) -> None:
    """End the directory's server, whatever state it is in; none is fine."""
    info = read_info(root)
    if info is None or not is_alive(info.pid):
        return
    os.kill(info.pid, signal.SIGKILL)
    wait_for(lambda: not is_alive(info.pid), "the server's end")


def kill_server(root: Path) -> None:
    """SIGKILL the directory's server."""
    pid = server_pid(root)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not is_alive(pid), "the server's end")


def start_serve(
    *arguments: object, before: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> tuple[subprocess.Popen[str], str]:
    """Start `tiered-kv serve`, behind the command ``before``; the process and its line, empty if it could not start.

    As from a terminal: the end of one is ignored by what was started behind nohup, as these tests may be.
    """
    process = subprocess.Popen(
        ["env", "--default-signal=HUP", *before, sys.executable, "-m", "tiered_kv.cli", "serve", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | (environment or {}),
    )
    assert process.stdout is not None
    return process, process.stdout.readline()


def start_worker(root: Path, engine_id: str, generation: int = 0) -> WorkerProcess:
    """Start a worker process and wait until it has joined."""
    process = subprocess.Popen(
        module_command("tests.kit.server.worker_process", root, engine_id, generation),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=module_environment(),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == f"joined {process.pid}\n"
    return process


def order(process: WorkerProcess, word: str) -> None:
    """Have a worker process do something, and wait until it has."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{word}\n")
    process.stdin.flush()
    assert process.stdout.readline() == "done\n"


def descriptors(pid: int) -> int:
    """Open file descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def threads(pid: int) -> int:
    """Threads of a process."""
    return len(os.listdir(f"/proc/{pid}/task"))
