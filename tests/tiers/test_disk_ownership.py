"""One server per directory: the lock, what a newcomer is told, and when the directory is free again."""

import os
import threading
from pathlib import Path

import pytest

from tests.kit.storage.disk_probe import open_disk
from tiered_kv.errors import Closed, DirectoryLocked, TierUnavailable
from tiered_kv.testing.blobs import SampleChain

CHAIN = SampleChain()


def test_a_second_opener_is_told_who_holds_the_directory(tmp_path):
    tier = open_disk(tmp_path)
    with pytest.raises(DirectoryLocked, match="pid=unknown"):
        open_disk(tmp_path)
    (tmp_path / "server.json").write_text('{"socket":"/run/x.sock","pid":77,"version":"1","config_digest":"0"}')
    with pytest.raises(DirectoryLocked, match=r"pid=77 socket=/run/x\.sock"):
        open_disk(tmp_path)
    tier.close()
    open_disk(tmp_path).close()


def test_a_lock_held_by_another_process_ends_with_that_process(tmp_path):
    ready, holding = os.pipe()
    child = os.fork()
    if child == 0:
        open_disk(tmp_path)
        os.write(holding, b"x")
        threading.Event().wait()
    assert os.read(ready, 1) == b"x"
    try:
        with pytest.raises(DirectoryLocked):
            open_disk(tmp_path)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(holding)
    open_disk(tmp_path).close()


def test_a_lock_file_that_is_a_symbolic_link_is_refused(tmp_path):
    root = tmp_path / "cache"
    open_disk(root).close()
    (tmp_path / "elsewhere").touch()
    (root / "server.lock").unlink()
    (root / "server.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TierUnavailable, match="cannot open the lock file"):
        open_disk(root)


def test_a_failed_open_releases_the_directory(tmp_path):
    open_disk(tmp_path).close()
    (tmp_path / "blobs").rmdir()
    (tmp_path / "blobs").touch()
    with pytest.raises(TierUnavailable, match=r"operation=open errno=(EEXIST|ENOTDIR)"):
        open_disk(tmp_path)
    (tmp_path / "blobs").unlink()
    open_disk(tmp_path).close()


def refuses_calls(tier):
    """Wait until ``close`` has begun in its thread."""
    while True:
        try:
            tier.contains(CHAIN.name(0))
        except Closed:
            return True


def test_close_waits_for_calls_in_flight_before_it_unlocks(tmp_path):
    tier = open_disk(tmp_path)
    entered, leave = threading.Event(), threading.Event()

    def slow_names():
        entered.set()
        leave.wait()
        yield CHAIN.name(0)

    user = threading.Thread(target=tier.record_use, args=(slow_names(),))
    closer = threading.Thread(target=tier.close)
    user.start()
    entered.wait()
    closer.start()
    assert refuses_calls(tier)
    with pytest.raises(DirectoryLocked):
        open_disk(tmp_path)
    leave.set()
    user.join()
    closer.join()
    open_disk(tmp_path).close()


def test_a_close_that_fails_releases_the_directory_all_the_same(tmp_path, monkeypatch):
    """The last call of a cache's life (tests/faults/test_syscall_faults.py)."""
    tier, close = open_disk(tmp_path), os.close

    def failing(descriptor):
        close(descriptor)
        raise OSError(5, "input/output error")

    monkeypatch.setattr(tier, "_index", None)  # nothing else is closed
    monkeypatch.setattr(os, "close", failing)
    tier.close()
    monkeypatch.undo()
    open_disk(tmp_path).close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
@pytest.mark.parametrize("is_hidden", [False, True], ids=["below a directory of root", "below what it may not see"])
def test_a_user_who_may_not_make_the_directory_is_told_what_to_do(tmp_path: Path, is_hidden: bool) -> None:
    root = (tmp_path if is_hidden else Path("/")) / "caches-of-nobody" / "kv"
    told, telling = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setuid(65534)
            open_disk(root)
        except TierUnavailable as exc:
            os.write(telling, str(exc).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(telling)
    with open(told, "rb") as pipe:
        said = pipe.read().decode()
    assert f"this user may not make it: as root, install -d -m 0700 -o USER {root}" in said
    assert not root.parent.exists()
