"""A directory, a private place for its server's socket, and the command line as users run it."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kit.server.clients import SmallEngine, settings
from tests.kit.server.processes import end_server, private_runtime, start_serve
from tests.kit.storage.places import Place, open_place

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(autouse=True, scope="session")
def runtime_directory() -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch, private_runtime() as directory:
        patch.setenv("COLUMNS", "200")
        yield directory


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "cache"
    yield directory
    end_server(directory)


@pytest.fixture
def engine(root: Path) -> Iterator[SmallEngine]:
    """An engine on a server in that directory."""
    one = SmallEngine.start(settings(root))
    yield one
    one.close()


@pytest.fixture(params=["disk", "shared"])
def local_place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """A tier, for what does not depend on the medium."""
    with open_place(request.param, tmp_path, request.getfixturevalue) as place:
        yield place


@pytest.fixture
def cli() -> Command:
    """Run the command line to its end."""

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "tiered_kv.cli", *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    return run


@pytest.fixture
def serve() -> Iterator[Callable[..., tuple[subprocess.Popen[str], str]]]:
    """Start `tiered-kv serve`; returns the process and the line it prints when clients can connect."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: object) -> tuple[subprocess.Popen[str], str]:
        process, line = start_serve(*arguments)
        started.append(process)
        return process, line

    yield start
    for process in started:
        process.kill()
        process.communicate()
