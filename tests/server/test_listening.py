"""The server's socket is removed under it: cleaners of /tmp do that, and the end of a user's last login."""

import os
import shutil
import signal
import stat
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tests.kit.fake_clock import FakeClock
from tests.kit.server.clients import SmallEngine, settings
from tests.kit.server.probe import figures, is_serving, server_pid, wait_for
from tests.kit.server.processes import is_alive, start_serve
from tiered_kv.server.connect import is_answering
from tiered_kv.server.directory import LOOK_INTERVAL_S, read_info
from tiered_kv.server.listening import Listening

EngineStarter = Callable[..., SmallEngine]
LOST = "cannot be made anew"
CHUNKS = 4


def socket_file(root: Path) -> Path:
    info = read_info(root)
    assert info is not None
    return Path(info.socket)


@pytest.mark.parametrize("removed", ["the socket", "its directory"])
def test_a_removed_socket_is_made_anew_for_who_comes_and_nobody_who_is_there_notices(
    root: Path, engine: EngineStarter, removed: str
) -> None:
    first = engine()
    first.store(CHUNKS)
    first.wait_hits(CHUNKS)
    generation, pid, place = first.client.generation, server_pid(root), socket_file(root)
    for _ in range(2):
        if removed == "the socket":
            place.unlink()
        else:
            shutil.rmtree(place.parent)
        wait_for(lambda: is_answering(str(place)), "another socket")
        assert stat.S_IMODE(place.lstat().st_mode) == 0o600 and stat.S_IMODE(place.parent.lstat().st_mode) == 0o700
        assert figures(root)["pid"] == pid
        with closing(SmallEngine.start(settings(root), "newcomer")) as second:
            assert second.hits(CHUNKS) == CHUNKS
    assert first.hits(CHUNKS) == CHUNKS and first.client.generation == generation, "its session is the one it had"
    first.close()
    wait_for(lambda: not is_alive(pid), "the server's end")
    assert not place.exists()


def test_where_it_cannot_be_made_anew_the_log_says_so_and_it_comes_back_when_it_can(
    root: Path, engine: EngineStarter
) -> None:
    first = engine()
    place, log = socket_file(root), root / "server.log"
    shutil.rmtree(place.parent)
    place.parent.write_text("in its way")
    try:
        wait_for(lambda: LOST in log.read_text(), "the reason in the server's log")
        first.store(CHUNKS)
        first.wait_hits(CHUNKS)
    finally:
        place.parent.unlink()
    wait_for(lambda: is_serving(root), "another socket")
    assert log.read_text().count(LOST) == 1
    with closing(SmallEngine.start(settings(root), "newcomer")) as second:
        assert second.hits(CHUNKS) == CHUNKS


def test_what_somebody_else_puts_in_its_place_is_left_alone_while_it_is_there(runtime_directory: Path) -> None:
    place, clock = runtime_directory / "ours.sock", FakeClock()
    with Listening(lambda: place, lambda look: look(), clock.monotonic) as listening:
        place.unlink()
        os.mkfifo(place)
        for _ in range(2):
            clock.advance(LOOK_INTERVAL_S)
            assert listening.anew() is None
        assert stat.S_ISFIFO(place.lstat().st_mode)
        place.unlink()
        clock.advance(LOOK_INTERVAL_S)
        listener = listening.anew()
        assert listener is not None and is_answering(str(place))
        assert listening.anew() is None, "it is told of once"
        listening.socket.close()
    assert not place.exists() and listener.fileno() == -1


def test_a_named_socket_is_made_anew(root: Path, runtime_directory: Path) -> None:
    place = runtime_directory / "named.sock"
    process, line = start_serve(f"file://{root}", "--host-bytes", "8MiB", "--disk-bytes", "160MiB", "--socket", place)
    try:
        assert line.startswith("serving ")
        place.unlink()
        wait_for(lambda: is_answering(str(place)), "another socket")
        named = settings(root, server=f"unix://{place}")
        with closing(SmallEngine.start(named)) as joined:
            joined.store(CHUNKS)
            joined.wait_hits(CHUNKS)
    finally:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate()
    assert process.returncode == 0 and errors.count("was made anew") == 1
    assert not place.exists()
