"""What an engine said last is heard, whatever lies before it: its last prompts must not be lost with its goodbye."""

import os
import signal
from pathlib import Path

import pytest

from tests.kit.server.clients import SmallEngine, content, settings
from tests.kit.server.probe import server_pid, wait_for, wait_written
from tests.kit.server.processes import is_alive, stopped_server
from tests.kit.storage.disk_probe import blob_files, open_disk
from tiered_kv.keys.chunk_record import ChunkRecord

CHUNKS, LAST, LOOKUPS = 300, 20, 12
LAST_TOKEN = 900_000


def files(root: Path) -> int:
    return len(blob_files(root))


@pytest.mark.parametrize("end", ["close", "SIGTERM"])
def test_commits_behind_much_else_are_kept(root: Path, end: str) -> None:
    """A server that was busy finds lookups, commits and the end of the engine, or of itself, at once."""
    config = settings(root, host_bytes=64 << 20)
    one = SmallEngine.start(config, "e")
    anchor = SmallEngine.start(config, "anchor", weights="other") if end == "close" else None
    one.store(CHUNKS)
    one.wait_hits(CHUNKS)
    wait_written(root)
    before, pid = files(root), server_pid(root)
    keys, last = one.keys(CHUNKS), one.keys(LAST, LAST_TOKEN)
    assert one.client.namespace is not None
    committed = []
    for index in range(LAST):
        slot = one.take_slot()
        with one.payload(slot) as view:
            view[:] = content(index, LAST_TOKEN)
        place = one.client.namespace.digest, last.keys[index], last.parent(index), index, last.digests[index]
        committed.append((slot, ChunkRecord(*place)))
    one.client.poll()
    with stopped_server(root):
        for _ in range(LOOKUPS):
            one.client.lookup(keys.keys, keys.digests)
        one.client.commit(committed)
        one.client._flush()
        assert not one.client._outbox
        if end == "close":
            one.close()
        else:
            os.kill(pid, signal.SIGTERM)
    if anchor is None:
        wait_for(lambda: not is_alive(pid), "the server's end")
        one.close()
    else:
        wait_for(lambda: files(root) == before + LAST, "the last chunks")
        anchor.close()
    assert files(root) == before + LAST


def test_a_prompt_that_was_stored_last_is_evicted_from_its_end_after_a_restart(root: Path) -> None:
    one = SmallEngine.start(settings(root), "e")
    one.store(1, 500_000)
    wait_written(root)  # slots are granted by then
    one.store(LAST, LAST_TOKEN)
    pid, keys = server_pid(root), one.keys(LAST, LAST_TOKEN).keys
    os.kill(pid, signal.SIGTERM)
    wait_for(lambda: not is_alive(pid), "the server's end")
    one.close()
    tier = open_disk(root, 1 << 30)
    order = [info.record.chunk_index for info in tier.scan() if info.record.key in keys]
    tier.close()
    assert order == list(reversed(range(LAST)))
