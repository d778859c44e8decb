"""What a server does for the files by which it is found, while it runs for weeks."""

import os
import subprocess
from pathlib import Path

from tests.kit.fake_clock import FakeClock
from tests.kit.limits import no_descriptors
from tiered_kv.server.directory import LOOK_INTERVAL_S, YOUNG_S, DirectoryWatch, ServerInfo, hold_arena_lock
from tiered_kv.tiers.disk.lock import DirectoryLock
from tiered_kv.tiers.disk.marker import claim

DAY_S = 86400
SERVER_ID = "0" * 16


def clean(root: Path) -> None:
    """As a cleaner of /tmp: remove what nobody has written or read for ten days."""
    subprocess.run(["find", str(root), "-type", "f", "-mtime", "+10", "-atime", "+10", "-delete"], check=True)


def age(root: Path, seconds: float) -> None:
    """Let files grow older, as if so much time had passed."""
    for path in root.iterdir():
        status = path.lstat()
        os.utime(path, (status.st_atime - seconds, status.st_mtime - seconds))


def test_what_a_server_needs_of_its_directory_never_gets_old(tmp_path: Path) -> None:
    root, clock = tmp_path / "state", FakeClock()
    root.mkdir(0o700)
    claim(root, is_private=True)
    lock, held = DirectoryLock(root), hold_arena_lock(root, SERVER_ID)
    (root / "epochs.json").write_text("{}")
    (root / "abandoned").write_text("of nobody")
    try:
        info = ServerInfo("/run/s.sock", os.getpid(), "1", 1, SERVER_ID, "d")
        watch = DirectoryWatch(root, info, lambda look: look(), clock.monotonic)
        kept = {path.name for path in root.iterdir()} - {"abandoned"}
        for _ in range(int(14 * DAY_S / YOUNG_S)):
            clock.advance(YOUNG_S)
            age(root, YOUNG_S)
            clean(root)
            assert watch.is_found() and watch.is_found(), "the second one knows what the first one's look has seen"
        assert {path.name for path in root.iterdir()} == kept
        assert kept == {"server.json", "server.lock", "tiered_kv.json", "epochs.json", f"arena-{SERVER_ID}.lock"}
    finally:
        lock.release()
        os.close(held)


def test_a_look_for_which_no_descriptor_is_left_is_not_the_last_one(tmp_path: Path) -> None:
    clock, info = FakeClock(), ServerInfo("/run/s.sock", os.getpid(), "1", 1, SERVER_ID, "d")
    watch = DirectoryWatch(tmp_path, info, lambda look: look(), clock.monotonic)
    with no_descriptors():
        assert watch.is_found()
    (tmp_path / "server.json").unlink()
    clock.advance(LOOK_INTERVAL_S)
    assert not watch.is_found()
