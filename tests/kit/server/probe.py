"""Looks at a running cache server from outside, as an operator would: figures, pid, waiting until it is quiet."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from tiered_kv.server import protocol as m
from tiered_kv.server.connect import connect, is_answering, read_message
from tiered_kv.server.directory import read_info

DEADLINE_S = 60.0


def wait_for(condition: Callable[[], bool], what: str, *, deadline_s: float = DEADLINE_S) -> None:
    """Poll until ``condition`` holds.

    Raises:
        TimeoutError: It did not within the deadline.
    """
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"still waiting after {deadline_s:g} s for {what}")
        time.sleep(0.01)


def socket_of(root: Path) -> str:
    """The address of the directory's server, as ``--server`` and the setting take it."""
    info = read_info(root)
    assert info is not None, f"no server in {root}"
    return f"unix://{info.socket}"


def server_pid(root: Path) -> int:
    """The process that owns the directory."""
    info = read_info(root)
    assert info is not None, f"no server in {root}"
    return info.pid


def is_serving(root: Path) -> bool:
    """Whether a server answers for the directory; a killed one leaves its description behind."""
    info = read_info(root)
    return info is not None and is_answering(info.socket)


def answer_to(root: Path, message: m.Message) -> object:
    """What the directory's server answers an operator."""
    info = read_info(root)
    assert info is not None, f"no server in {root}"
    sock = connect(info.socket)
    assert sock is not None, "the server does not answer"
    with sock:
        sock.settimeout(DEADLINE_S)
        sock.sendall(m.frame(m.Hello(m.PROTOCOL, "test", "admin", 0)))
        assert isinstance(read_message(sock), m.Welcome)
        sock.sendall(m.frame(message))
        return read_message(sock)


def figures(root: Path) -> dict[str, Any]:
    """What ``tiered-kv stat`` would show."""
    stat = answer_to(root, m.StatRequest())
    assert isinstance(stat, m.Stat)
    state: dict[str, Any] = msgspec.json.decode(stat.figures)
    return state


def counted(root: Path, name: str) -> int:
    """How often something happened, by the name of its counter."""
    count: int = figures(root)["counters"].get(name, 0)
    return count


def in_memory(root: Path) -> int:
    """Chunks that lie in host memory and can be loaded."""
    chunks: int = figures(root)["hierarchy"]["host_ready_chunks"]
    return chunks


def wait_written(root: Path) -> None:
    """Until everything that was committed is in the disk tier."""
    wait_for(lambda: figures(root)["pending_writes"] == 0, "pending writes")


def lock_holder(root: Path) -> int | None:
    """The process that holds a directory's lock, as the kernel knows it."""
    try:
        inode = (root / "server.lock").stat().st_ino
    except FileNotFoundError:
        return None
    for line in Path("/proc/locks").read_text().splitlines():
        parts = line.split()
        if parts[1] == "FLOCK" and int(parts[5].rpartition(":")[2]) == inode:
            return int(parts[4])
    return None


def wait_ended(root: Path) -> None:
    """Until the directory's server has drained and ended by itself, and the directory is anybody's."""
    wait_for(lambda: read_info(root) is None and lock_holder(root) is None, "the server's end")
