"""A Mooncake pool for tests: a real master, and members in processes of their own, all on 127.0.0.1."""

import ctypes.util
import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from tests.kit.missing import missing
from tests.kit.stores.mooncake_member import Member
from tests.kit.stores.server import StoreServer

CLIENT_TTL_S: Final = 1
"""How long the master believes in a member that says nothing."""

LIBRARIES: Final = ("ibverbs", "numa", "curl")
INSTALL: Final = "apt-get install libibverbs1 libnuma1 libcurl4"
"""The first comes with the gateway of the S3 tests, the second is vLLM's, too, the third is of the command curl."""

SEGMENT_BYTES: Final = 64 << 20


class Pool:
    """A master and its members.

    Attributes:
        master: Its process, to kill, freeze and start again.
    """

    def __init__(self, directory: Path) -> None:
        found = importlib.util.find_spec("mooncake")
        if found is None or found.origin is None:
            raise LookupError("the package mooncake-transfer-engine-non-cuda is not installed: make setup")
        for library in LIBRARIES:
            if ctypes.util.find_library(library) is None:
                raise LookupError(f"lib{library}, which Mooncake is linked with, is not installed: {INSTALL}")
        program = str(Path(found.origin).parent / "mooncake_master")

        def command(port: int, _: Path) -> list[str]:
            listens = ["-rpc_address=127.0.0.1", f"-rpc_port={port}", "-metrics_host=127.0.0.1", "-metrics_port=0"]
            return [program, *listens, f"-client_ttl={CLIENT_TTL_S}", "-logtostderr=true"]

        self._directory = directory
        self.master = StoreServer("mooncake_master", command, directory / "master")
        self._members: list[Member] = []

    @property
    def address(self) -> str:
        return self.master.endpoint_url.removeprefix("http://")

    def uri(self, name: str = "test") -> str:
        return f"mooncake://{self.address}/{name}"

    def start(self) -> None:
        """Bring the master up; it knows nothing of earlier objects."""
        self.master.start()

    def member(self, segment_bytes: int = SEGMENT_BYTES) -> Member:
        """One machine more, which gives so much memory; a pool without any takes nothing."""
        log = self._directory / f"member-{len(self._members)}.log"
        self._members.append(Member(self.address, segment_bytes, log))
        return self._members[-1]

    def close(self) -> None:
        for member in self._members:
            member.thaw()
            member.kill()
        self.master.kill()


def _pool(directory: Path) -> Pool:
    try:
        return Pool(directory)
    except LookupError as exc:
        missing("Mooncake cannot be tested", exc)


@pytest.fixture
def mooncake(tmp_path: Path) -> Iterator[Pool]:
    """A pool of the test's own, started, without members."""
    pool = _pool(tmp_path / "mooncake")
    with ExitStack() as at_end:
        at_end.callback(pool.close)
        pool.start()
        yield pool


@pytest.fixture(scope="session")
def mooncake_member(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Pool, Member]]:
    """A pool with one member that tests share; each takes a name of its own."""
    pool = _pool(tmp_path_factory.mktemp("mooncake"))
    with ExitStack() as at_end:
        at_end.callback(pool.close)
        pool.start()
        yield pool, pool.member()
