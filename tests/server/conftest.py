"""A directory for a server, a private place for its socket, and the end of whatever a test leaves behind."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kit.server.clients import SmallEngine, hello, settings
from tests.kit.server.processes import WorkerProcess, end_server, private_runtime, start_worker


@pytest.fixture(autouse=True, scope="session")
def runtime_directory() -> Iterator[Path]:
    with private_runtime() as directory:
        yield directory


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "cache"
    yield directory
    end_server(directory)


@pytest.fixture
def served(root: Path) -> Iterator[Path]:
    """A directory whose server runs until the test is over, with or without clients."""
    with hello(settings(root), "worker", "anchor"):
        yield root


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory whose server all tests of a module share; each uses an engine id of its own."""
    directory = tmp_path_factory.mktemp("shared")
    with hello(settings(directory), "worker", "anchor"):
        yield directory
    end_server(directory)


@pytest.fixture
def engine_id(request: pytest.FixtureRequest) -> str:
    """A name that no other test uses."""
    return f"engine-{abs(hash(request.node.nodeid)):x}"


@pytest.fixture
def engine(root: Path) -> Iterator[Callable[..., SmallEngine]]:
    """Start engines of one rank, which are closed with the test."""
    engines: list[SmallEngine] = []

    def start(engine_id: str = "e", *, weights: str = "w", **more: object) -> SmallEngine:
        engines.append(SmallEngine.start(settings(root, **more), engine_id, weights=weights))
        return engines[-1]

    yield start
    for one in engines:
        one.close()


@pytest.fixture
def worker_process(root: Path) -> Iterator[Callable[..., WorkerProcess]]:
    """Start workers in processes of their own."""
    started: list[WorkerProcess] = []

    def start(engine_id: str = "e", generation: int = 0) -> WorkerProcess:
        started.append(start_worker(root, engine_id, generation))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()
