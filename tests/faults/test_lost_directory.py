"""``rm -rf`` of the directory of a running server: its engines go on, with another server in a new directory."""

import shutil
from pathlib import Path

import pytest

from tests.kit.server.clients import SmallEngine, settings
from tests.kit.server.probe import figures, server_pid, wait_for, wait_written
from tests.kit.server.processes import end_server, is_alive
from tests.kit.storage.disk_probe import blob_files


@pytest.mark.parametrize("removed", ["everything", "what is in it", "server.json", "server.lock"])
def test_a_server_whose_directory_was_removed_ends_and_its_engine_starts_another(tmp_path: Path, removed: str) -> None:
    root = tmp_path / "cache"
    engine = SmallEngine.start(settings(root, drain_s=0.5))
    try:
        lose(engine, root, removed)
    finally:
        engine.close()
        end_server(root)


def lose(engine: SmallEngine, root: Path, removed: str) -> None:
    engine.store(4)
    wait_written(root)
    old = server_pid(root)
    if removed == "everything":
        shutil.rmtree(root)
    elif removed == "what is in it":
        for entry in root.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    else:
        (root / removed).unlink()
    if removed == "server.lock":
        # Connected engines are served on, from memory; nothing is written any more, because another may own it now.
        engine.store(8, start=4)
        engine.wait_hits(8)
        assert len(blob_files(root)) == 4
        log = root / "server.log"
        wait_for(lambda: "the directory or its lock is gone" in log.read_text(), "the reason in the server's log")
        assert len(blob_files(root)) == 4
        return
    engine.wait_lost()
    engine.rejoin()
    new = server_pid(root)
    assert new != old
    wait_for(lambda: not is_alive(old), "the old server's end")
    engine.store(4)
    engine.wait_hits(4)
    wait_written(root)
    assert figures(root)["tiers"][0]["breaker"] == "closed"
    assert len(blob_files(root)) == 4
    SmallEngine.start(engine.config, "newcomer").close()  # the old server's end took nothing of the new one's along
