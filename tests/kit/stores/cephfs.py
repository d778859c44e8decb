"""CephFS, mounted twice over FUSE: a file system that two machines share, on the Ceph that also serves S3 here.

Each mount is a client of its own: what one writes the other hears of through the metadata server, as between machines.
"""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

import pytest

from tests.kit.missing import missing
from tests.kit.module_process import REPOSITORY
from tests.kit.s3 import S3
from tests.kit.stores.server import with_parent

PROGRAMS = REPOSITORY / ".cache" / "cephfs" / "usr" / "bin"
SCRIPT = REPOSITORY / "scripts" / "cephfs"
POOLS = ("fs.meta", "fs.data")
START_S = 90.0
TRIES = 3
"""On a busy machine a mount may end because the metadata server was not heard of in time."""


class CephFS:
    """A file system of the session.

    Attributes:
        mounts: Two directories that show the same files.
    """

    def __init__(self, mounts: tuple[Path, Path], metadata_server: subprocess.Popen[bytes]) -> None:
        self.mounts = mounts
        self._metadata_server = metadata_server
        self._numbers = count()

    def new_name(self) -> str:
        """A directory that no other test uses; it is not made."""
        return f"p{next(self._numbers)}"

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """No name can be looked up or made for the length of the block."""
        self._metadata_server.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._metadata_server.pid, os.WSTOPPED | os.WNOWAIT)  # else a thread may still answer
        try:
            yield
        finally:
            self._metadata_server.send_signal(signal.SIGCONT)


@pytest.fixture(scope="session")
def cephfs(s3: S3) -> Iterator[CephFS]:
    """The file system; skipped where this machine cannot run it, and failed with ``CI=true``."""
    if s3.server is None:
        pytest.skip("CephFS needs the Ceph that scripts/s3-server runs, and another S3 server was chosen")
    installed = subprocess.run([str(SCRIPT), "install"], capture_output=True, text=True, check=False)
    if installed.returncode != 0:
        missing("CephFS cannot be tested", installed.stderr.strip())
    with _running(s3.server.directory) as system:
        yield system


@contextmanager
def _running(ceph: Path) -> Iterator[CephFS]:
    from tests.kit.server.probe import wait_for

    configuration = ("-c", str(ceph / "ceph.conf"))
    orders = [f"osd pool create {pool} 4 4" for pool in POOLS] + [f"fs new fs {' '.join(POOLS)}"]

    def is_made() -> bool:
        """A monitor that is busy refuses (EPERM) to tell its commands; then nothing was done yet."""
        ordered = subprocess.run(
            ["ceph", *configuration],
            input="\n".join(orders) + "\n",
            text=True,
            capture_output=True,
            timeout=60,
            check=False,
        )
        is_busy = "getting command descriptions from mon" in ordered.stderr
        assert ordered.returncode == 0 or is_busy, f"Ceph made no file system: {ordered.stderr}"
        return ordered.returncode == 0

    wait_for(is_made, "Ceph's file system", deadline_s=START_S)
    with ExitStack() as at_end:
        place = Path(tempfile.mkdtemp(prefix="tiered-kv-cephfs-"))
        at_end.callback(shutil.rmtree, place)
        log = at_end.enter_context((place / "log").open("wb"))

        def start(program: str, *arguments: str) -> subprocess.Popen[bytes]:
            command = with_parent([str(PROGRAMS / program), "-f", *configuration, *arguments])
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
            at_end.callback(_end, process)
            return process

        def is_mounted(mount: Path) -> bool:
            options = ("--fuse_require_active_mds=false", "--pid-file", f"{place}/{mount.name}.pid")
            client = start("ceph-fuse", *options, str(mount))
            wait_for(lambda: os.path.ismount(mount) or client.poll() is not None, str(mount), deadline_s=START_S)
            return client.poll() is None

        server = start("ceph-mds", "-i", "a", "--pid-file", str(place / "mds.pid"))
        mounts = (place / "a", place / "b")
        for mount in mounts:
            mount.mkdir()
            at_end.callback(subprocess.run, ["umount", "--lazy", str(mount)], capture_output=True, check=False)
            if not any(is_mounted(mount) for _ in range(TRIES)):
                raise AssertionError(f"ceph-fuse ended: {(place / 'log').read_text(errors='replace')}")
        yield CephFS(mounts, server)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
