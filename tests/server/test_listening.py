"""The server's socket is removed under it: cleaners of /tmp do that, and the end of a user's last login."""

import errno
import os
import shutil
import signal
import socket
import stat
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.kit.fake_clock import FakeClock
from tests.kit.limits import no_descriptors
from tests.kit.server.clients import SmallEngine, settings
from tests.kit.server.probe import figures, is_serving, server_pid, wait_for
from tests.kit.server.processes import is_alive, start_serve
from tiered_kv.errors import ConfigError
from tiered_kv.server.connect import is_answering
from tiered_kv.server.directory import LOOK_INTERVAL_S, read_info, socket_place
from tiered_kv.server.listening import ASK_INTERVAL_S, Listening, bind

EngineStarter = Callable[..., SmallEngine]
LOST = "cannot be made anew"
CHUNKS = 4


def listening_at(place: Path, clock: FakeClock) -> Listening:
    """A server's socket whose file is looked at in the caller's thread, when the clock says so."""
    return Listening(place, lambda look: look(), clock.monotonic, is_private=False)


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


def test_what_somebody_else_puts_in_its_place_is_left_alone_while_it_is_there(
    runtime_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place, clock = runtime_directory / "ours.sock", FakeClock()
    with listening_at(place, clock) as listening:
        place.unlink()
        os.mkfifo(place)
        for _ in range(2):
            clock.advance(LOOK_INTERVAL_S)
            assert listening.anew() is None
        assert stat.S_ISFIFO(place.lstat().st_mode)
        assert caplog.text.count(LOST) == caplog.text.count("its place is taken") == 1
        place.unlink()
        clock.advance(LOOK_INTERVAL_S)
        listener = listening.anew()
        assert listener is not None and is_answering(str(place))
        assert listening.anew() is None, "it is told of once"
        listening.socket.close()
    assert not place.exists() and listener.fileno() == -1


def test_another_server_in_its_place_is_left_alone_and_told_of(
    runtime_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place, clock = runtime_directory / "shared.sock", FakeClock()
    with listening_at(place, clock) as listening:
        place.unlink()
        with bind(place):
            found = place.lstat()
            assert listening.anew() is None
            assert caplog.text.count(LOST) == caplog.text.count("its place is taken") == 1
        assert os.path.samestat(place.lstat(), found)
        listening.socket.close()
    assert os.path.samestat(place.lstat(), found), "nor is it removed at the end"
    place.unlink()


def test_the_place_of_another_server_that_died_in_it_is_taken_back(runtime_directory: Path) -> None:
    place, clock = runtime_directory / "left.sock", FakeClock()
    with listening_at(place, clock) as listening:
        place.unlink()
        with bind(place):
            assert listening.anew() is None
        clock.advance(LOOK_INTERVAL_S)
        assert listening.anew() is None, "a living one is not asked with every look"
        clock.advance(ASK_INTERVAL_S)
        assert listening.anew() is not None and is_answering(str(place))
        listening.socket.close()


def test_a_look_for_which_no_descriptor_is_left_is_not_the_last_one(
    runtime_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place, clock = runtime_directory / "short.sock", FakeClock()
    with listening_at(place, clock) as listening:
        place.unlink()
        with no_descriptors():
            assert listening.anew() is None
        assert caplog.text.count(LOST) == caplog.text.count("Too many open files") == 1
        clock.advance(LOOK_INTERVAL_S)
        assert listening.anew() is not None and is_answering(str(place))
        listening.socket.close()


def test_a_socket_that_could_not_be_completed_does_not_keep_the_place(
    runtime_directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place, clock = runtime_directory / "half.sock", FakeClock()

    def fail(path: Path, mode: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    with listening_at(place, clock) as listening:
        place.unlink()
        with monkeypatch.context() as patched:
            patched.setattr(Path, "chmod", fail)
            assert listening.anew() is None
        assert LOST in caplog.text and not os.path.lexists(place)
        clock.advance(LOOK_INTERVAL_S)
        assert listening.anew() is not None and is_answering(str(place))
        listening.socket.close()


def test_after_the_last_login_nothing_is_made_elsewhere_and_the_next_one_brings_it_back(
    runtime_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    users, clock = runtime_directory / "user", FakeClock()
    runtime, elsewhere = users / "1000", Path(tempfile.mkdtemp(dir=runtime_directory))
    runtime.mkdir(0o700, parents=True)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))  # where a server that starts now would have its socket
    place = socket_place(tmp_path)
    with Listening(place, lambda look: look(), clock.monotonic, is_private=True) as listening:
        shutil.rmtree(users)
        users.write_text("no user may make it, but root may, who often runs the tests")
        for _ in range(2):
            assert listening.anew() is None
            clock.advance(LOOK_INTERVAL_S)
        assert caplog.text.count(LOST) == 1 and list(elsewhere.iterdir()) == []
        users.unlink()
        runtime.mkdir(0o700, parents=True)
        assert listening.anew() is not None and is_answering(str(place))
        listening.socket.close()


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


def fill_queue(place: Path, clients: ExitStack) -> None:
    """Connect until no more fit."""
    while True:
        client = clients.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
        try:
            client.connect(str(place))
        except BlockingIOError:
            return


def test_a_socket_of_somebody_who_does_not_answer_now_is_left_alone(tmp_path: Path) -> None:
    place = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as another_kind:
        another_kind.bind(str(place))
        with pytest.raises(ConfigError, match="another server listens there"):
            bind(place)
    place.unlink()
    with ExitStack() as clients, socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind(str(place))
        stopped.listen(0)
        fill_queue(place, clients)
        with pytest.raises(ConfigError, match="another server listens there"):
            bind(place)
    bind(place).close()  # the dead one's
