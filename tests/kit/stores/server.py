"""A server of an object store as a child process on 127.0.0.1, which a test may kill, freeze and start again."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

START_S = 60.0

Command = Callable[[int, Path], list[str]]
"""What to run for a port and a directory."""


class StoreServer:
    """One server; what it stores is in its directory and survives it.

    Attributes:
        name: What it is, for people.
    """

    def __init__(self, name: str, command: Command, directory: Path, environment: dict[str, str] | None = None) -> None:
        from s3_server import free_port  # late, as below: conftest imports this module, and few tests want a server

        self.name = name
        self._command = command
        self._directory = directory
        self._environment = os.environ | (environment or {})
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Bring it up on its port, the same one every time, and wait until it listens."""
        from tests.kit.server.probe import wait_for

        self._directory.mkdir(parents=True, exist_ok=True)
        log = self._directory.with_suffix(".log")
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                with_parent(self._command(self._port, self._directory)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self._directory,
                env=self._environment,
            )
        wait_for(self._listens, f"{self.name}, whose log is {log}", deadline_s=START_S)

    def _listens(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"{self.name} ended: {self._directory.with_suffix('.log').read_text()}"
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._port)) == 0

    def kill(self) -> None:
        """SIGKILL; nothing listens on its port any more."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """It takes connections and says nothing for the length of the block."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)  # else a thread may still give an answer
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)


def python(module: str, *arguments: object) -> list[str]:
    """The command that runs an installed module."""
    return [sys.executable, "-m", module, *map(str, arguments)]


def with_parent(command: list[str]) -> list[str]:
    """The command, killed with the process that starts it: a session that is killed leaves no server behind."""
    return ["setpriv", "--pdeathsig", "KILL", *command]
