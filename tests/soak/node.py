"""One machine of the soak: a directory with its server and the engines on it, what can be done to them, what they show.

The server is the one the engines start. One engine is never killed, so the server lives as long as nobody kills it; the
others come and go. Where it is allowed, the directory is a file system of its own, which can be filled up.
"""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.kit.server.clients import settings
from tests.kit.server.probe import wait_for
from tests.kit.server.processes import is_alive, start_time
from tests.kit.storage.disk_probe import du_bytes
from tests.kit.storage.stored_blobs import live_blobs
from tests.soak.client import ClientProcess, Order
from tests.soak.samples import DirectorySample, ProcessSample, sample_directory, sample_process
from tests.soak.stores import Store, damage_file
from tiered_kv.server.directory import read_info

RESERVE_BYTES = 64 << 20
ROOM_BYTES = 16 << 20
BUCKET_BYTES = 64 << 20
FILE_SYSTEM_BYTES = 48 << 20
OVERTAKEN = ("no chunk here has a key", "no server is running that enforces one")
"""What a verb may answer because a chunk was evicted, or a server killed, since it was chosen."""
OPERATOR_CODES = (0, 1, 3, 4)
"""What a verb may end with here: done, the store does not answer, another command is at it, something bad was found."""

FAILED = ("Traceback", "internal error")


class Node:
    """One machine.

    Threads: faults and samples come from several; ``_lock`` guards the clients and the counts.

    Attributes:
        problems: What an operator's verb or a client did that it may never do.
    """

    def __init__(self, name: str, work: Path, store: Store, clients: int, *, seed: int, gap_s: float) -> None:
        self.name, self._work, self._store = name, work / name, store
        self._draw = random.Random(f"{seed} {name}")
        self._gap_s = gap_s
        self._disk = self._work / "disk"
        self._disk.mkdir(parents=True)
        self.is_mounted = _mount(self._disk)
        self.root = self._disk / "cache"
        self.disk_bytes = RESERVE_BYTES + ROOM_BYTES
        self._lock = threading.Lock()
        self._clients: list[ClientProcess] = []
        self._ended: Counter[str] = Counter()
        self._number = 0
        self.processes: set[tuple[int, int | None]] = set()  # number and start time
        self.slab_inodes: set[int] = set()
        self.problems: list[str] = []
        self.start_again(clients)

    def config(self) -> dict[str, Any]:
        """The settings of its engines, and of the server they start."""
        given = {"disk_path": str(self.root), "disk_bytes": self.disk_bytes, "storage_bytes": BUCKET_BYTES}
        more = {"min_free_bytes": 4096, "storage_timeout_s": 5.0, "start_timeout_s": 120.0, "drain_s": 60.0}
        return settings(self.root, **given, **more, **self._store.settings).to_mapping()

    # -- engines -------------------------------------------------------------------------------------------------

    def start_again(self, clients: int) -> None:
        """Begin with new engines."""
        with self._lock:
            self._clients = [self._new_client() for _ in range(clients)]

    def _new_client(self) -> ClientProcess:
        self._number += 1
        weights = "w" if not self._clients else self._draw.choice("wwv")
        order = Order(self.config(), f"{self.name}-{self._number}", self._draw.randrange(1 << 30), self._gap_s, weights)
        client = ClientProcess(order, self._work / "clients.log")
        self.processes.add((client.pid, start_time(client.pid)))
        return client

    def counts(self) -> Counter[str]:
        """What its engines counted, those that are gone included."""
        with self._lock:
            total = Counter(self._ended)
            for client in self._clients:
                total.update(client.counts)
            return total

    def kill_client(self) -> None:
        """SIGKILL one of the engines that come and go, whatever it holds, and start another."""
        with self._lock:
            client = self._clients.pop(self._draw.randrange(1, len(self._clients)))
            client.kill()
            self._ended.update(client.counts)
            self._clients.append(self._new_client())

    def reset(self) -> bool:
        """One of the engines that come and go gets new weights; False when none is of the kind that does."""
        with self._lock:
            those = [client for client in self._clients[1:] if client.order.weights == "v"]
            if those:
                self._draw.choice(those).order_to("reset")
            return bool(those)

    def tell(self, word: str) -> None:
        with self._lock:
            for client in self._clients:
                client.order_to(word)

    @property
    def is_idle(self) -> bool:
        return all(client.is_idle for client in self._clients)

    @property
    def is_ready(self) -> bool:
        return all(client.is_ready for client in self._clients)

    def end_clients(self) -> None:
        with self._lock:
            while self._clients:
                client = self._clients.pop()
                if code := client.end():
                    self.problems.append(f"{self.name}: an engine ended with code {code}; see clients.log")
                self._ended.update(client.counts)

    def check_clients(self) -> None:
        with self._lock:
            gone = [client.pid for client in self._clients if not client.is_running]
        if gone:
            raise RuntimeError(f"engines of the soak ended by themselves. pids={gone} log={self._work}/clients.log")

    # -- the server ----------------------------------------------------------------------------------------------

    def server_pid(self) -> int | None:
        info = read_info(self.root)
        return info.pid if info is not None and is_alive(info.pid) else None

    def kill_server(self) -> bool:
        pid = self.server_pid()
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return pid is not None

    def stop_server(self, seconds: float) -> bool:
        """SIGSTOP for a while."""
        pid = self.server_pid()
        if pid is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            try:
                time.sleep(seconds)
            finally:
                os.kill(pid, signal.SIGCONT)
        return True

    def wait_server_ended(self) -> None:
        """Until it has drained and ended by itself, as it does after its last client."""
        pid = self.server_pid()
        wait_for(lambda: pid is None or not is_alive(pid), "the server's own end", deadline_s=180)

    def exact_du_bytes(self) -> int:
        """What is on disk while nobody writes: a walk beside deletions counts blobs that were never there at once."""
        pid = self.server_pid()
        with contextlib.suppress(ProcessLookupError):
            if pid is not None:
                os.kill(pid, signal.SIGSTOP)
        try:
            return du_bytes(self.root / "blobs", self.root / "tmp")
        finally:
            with contextlib.suppress(ProcessLookupError):
                if pid is not None:
                    os.kill(pid, signal.SIGCONT)

    # -- the disk ------------------------------------------------------------------------------------------------

    def fill_disk(self, seconds: float) -> bool:
        """Take all that is left of the file system for a while; False without one of its own."""
        if not self.is_mounted:
            return False
        ballast = self._disk / "ballast"
        try:
            with ballast.open("wb", buffering=0) as file:
                for piece_bytes in (1 << 20, 4 << 10):
                    with contextlib.suppress(OSError):
                        while file.write(bytes(piece_bytes)):
                            pass
            time.sleep(seconds)
        finally:
            ballast.unlink(missing_ok=True)
        return True

    def damage(self, how: str) -> bool:
        """``flip``, ``truncate`` or ``remove`` some blobs behind the server's back."""
        files = live_blobs(self.root / "blobs")
        chosen = self._draw.sample(files, min(len(files), 4))
        return sum(damage_file(path, how, self._draw) for path in chosen) > 0

    # -- the operator --------------------------------------------------------------------------------------------

    def operate(self, verb: str) -> bool:
        """Run a verb of ``tiered-kv`` on the directory, or on the bucket."""
        arguments = self._arguments(verb)
        if arguments is None:
            return False
        done = subprocess.run(
            [sys.executable, "-m", "tiered_kv.cli", *arguments],
            check=False,
            capture_output=True,
            text=True,
            env=self._store.cli_environment,
        )
        said = done.stdout + done.stderr
        is_overtaken = any(words in said for words in OVERTAKEN)
        if (done.returncode not in OPERATOR_CODES and not is_overtaken) or any(word in said for word in FAILED):
            self.problems.append(f"{self.name}: tiered-kv {verb} ended with {done.returncode}: {said[-500:]}")
        return True

    def _arguments(self, verb: str) -> list[str] | None:
        disk = f"file://{self.root}"
        if verb == "pin":
            files = live_blobs(self.root / "blobs")
            return ["pin", disk, self._draw.choice(files).stem, "--ttl", "5s"] if files else None
        if verb == "evict from host":
            info = read_info(self.root)
            return (
                None
                if info is None
                else ["evict", "--server", f"unix://{info.socket}", "--all", "--tier", "host", "-y"]
            )
        given = {
            "verify": ["verify", disk, "--repair", "-y"],
            "verify the bucket": ["verify", self._store.cli_uri, "--sample", "20%", "--repair", "-y"],
            "verify all of the bucket": ["verify", self._store.cli_uri, "--repair", "-y"],
            "evict": ["evict", disk, "--to", "60%", "-y"],
            "gc": ["gc", disk, "-y"],
            "stat": ["stat", disk, "--json"],
            "du": ["du", disk, "--json"],
        }
        return given[verb]

    # -- samples -------------------------------------------------------------------------------------------------

    def sample(self) -> tuple[DirectorySample, ProcessSample | None]:
        """The directory with its server, and the engine that is never killed."""
        found = sample_directory(self.root)
        if found.pid is not None:
            self.processes.add((found.pid, start_time(found.pid)))
        if found.process is not None:
            self.slab_inodes |= found.process.slab_inodes
        with self._lock:
            first = self._clients[0].pid if self._clients else None
        return found, None if first is None else sample_process(first)

    def close(self) -> None:
        """Leave nothing behind, whatever happened before."""
        with contextlib.suppress(RuntimeError):
            self.end_clients()
        with self._lock:
            for client in self._clients:
                client.kill()
        if self.kill_server():
            self.wait_server_ended()
        for log in self.root.glob("server.log*"):
            shutil.copy(log, self._work)
        if self.is_mounted:
            subprocess.run(["umount", "--lazy", self._disk], check=True)


def _mount(place: Path) -> bool:
    """A file system of its own in memory, if that is allowed."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        return False
    command = ["mount", "-t", "tmpfs", "-o", f"size={FILE_SYSTEM_BYTES},mode=0700", "none", str(place)]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0
