"""The server's life: who starts it, when it ends, what keeps it from starting, and how its clients learn that."""

import json
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.kit.module_process import module_environment
from tests.kit.server.clients import SmallEngine, hello, poll_until, settings, worker_part
from tests.kit.server.probe import figures, is_serving, server_pid, wait_ended, wait_for
from tests.kit.server.processes import descriptors, is_alive, kill_server
from tiered_kv.config import Config
from tiered_kv.errors import ConfigError, TieredKVError, TierUnavailable
from tiered_kv.server import compose, server
from tiered_kv.server.client import SchedulerClient
from tiered_kv.server.connect import connect, find_server
from tiered_kv.server.directory import make_socket_directory, read_info, socket_place
from tiered_kv.server.http import ask_figures
from tiered_kv.server.listening import bind
from tiered_kv.server.worker_client import WorkerClient
from tiered_kv.tiers.disk.lock import DirectoryLock
from tiered_kv.tiers.disk.marker import claim

EngineStarter = Callable[..., SmallEngine]


# -- starting ----------------------------------------------------------------------------------------------------


def test_clients_that_race_to_start_the_server_meet_in_one(root: Path) -> None:
    answers: list[object] = []
    workers: list[WorkerClient] = []  # the server ends with the last of them

    def join(number: int) -> None:
        try:
            workers.append(WorkerClient(settings(root), f"engine-{number}", 0, worker_part()))
            answers.append(server_pid(root))
        except TieredKVError as exc:
            answers.append(exc)

    racers = [threading.Thread(target=join, args=(number,)) for number in range(4)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    for worker in workers:
        worker.leave()
    assert len(answers) == 4
    assert len(set(answers)) == 1, answers


def test_the_server_has_a_session_of_its_own_and_does_not_end_with_its_starter(root: Path) -> None:
    imports = "import sys; from pathlib import Path; from tests.kit.server.clients import hello, settings"
    code = f"{imports}; hello(settings(Path(sys.argv[1])))"
    subprocess.run([sys.executable, "-c", code, str(root)], env=module_environment(), check=True)
    pid = server_pid(root)
    assert is_alive(pid)
    assert os.getsid(pid) != os.getsid(0)
    assert Path(f"/proc/{pid}/cwd").resolve() == Path("/")


@pytest.mark.skipif(os.cpu_count() == 1, reason="one processor only")
def test_the_server_leaves_its_starters_processors_memory_policy_and_environment(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = os.sched_getaffinity(0)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("OMP_PROC_BIND", "close")
    monkeypatch.setenv("LD_PRELOAD", "/nowhere/libtcmalloc.so")
    # In a thread, whose affinity is its own and is what a child inherits.
    failures: list[Exception] = []

    def start() -> None:
        try:
            os.sched_setaffinity(0, {min(ours)})
            hello(settings(root)).close()
        except (OSError, TieredKVError) as exc:
            failures.append(exc)

    pinned = threading.Thread(target=start)
    pinned.start()
    pinned.join()
    assert not failures
    pid = server_pid(root)
    assert os.sched_getaffinity(pid) == ours
    for line in (
        Path(f"/proc/{pid}/numa_maps").read_text().splitlines() if Path("/proc/self/numa_maps").exists() else ()
    ):
        assert line.split()[1].startswith("default")
    assert b"LD_PRELOAD" not in Path(f"/proc/{pid}/environ").read_bytes()


def test_the_socket_is_private_and_short_whatever_the_directory_is_called(tmp_path: Path) -> None:
    root = tmp_path / ("long-" * 40) / ("name-" * 40) / "with spaces, ümläuts and 100 %"
    config = Config.from_mapping(
        {**settings(root).to_mapping(), "storage_uri": f"file://{str(root).replace('%', '%25')}"}
    )
    try:
        hello(config).close()
        info = read_info(root)
        assert info is not None
        path = Path(info.socket)
        assert len(os.fsencode(path)) < 104
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(root.stat().st_mode) == 0o700
        for name in ("server.json", "server.log"):
            assert stat.S_IMODE((root / name).stat().st_mode) == 0o600
    finally:
        kill_server(root)


def test_a_socket_directory_of_other_rights_is_refused(
    runtime_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime_directory / "x"))
    place = runtime_directory / "x" / f"tiered_kv-{os.getuid()}"
    place.mkdir(parents=True)
    place.chmod(0o755)
    with pytest.raises(ConfigError, match=r"must belong to this user alone \(mode 0700\).*mode=755"):
        make_socket_directory(socket_place(tmp_path))


def test_binding_keeps_its_hands_off_what_is_not_a_dead_socket(runtime_directory: Path) -> None:
    file = runtime_directory / "file"
    file.write_text("precious")
    with pytest.raises(ConfigError, match="not a socket"):
        bind(file)
    assert file.read_text() == "precious"
    place = runtime_directory / "live.sock"
    with bind(place):
        with pytest.raises(ConfigError, match="another server listens there"):
            bind(place)
    bind(place).close()  # its owner is gone now


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"disk_bytes": "1MiB"}, "disk capacity leaves no room for blobs. capacity=1048576"),
        ({"host_bytes": 1 << 60}, "host_bytes=1152921504606846976 is more than this machine or its cgroup has"),
    ],
)
def test_a_server_that_cannot_start_tells_its_client_why(root: Path, change: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError, match=f"the cache server cannot start: {expected}"):
        find_server(settings(root, **change))
    client = SchedulerClient(settings(root, **change), "e", 1)
    assert not client.wait_ready(20)
    assert expected in (client.refusal or "")
    client.close()


def test_a_directory_that_cannot_be_used_is_told_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for root, reason in (
        (tmp_path / "file" / "cache", "Not a directory"),
        (Path("/sys/cache"), "not permitted|denied"),
    ):
        with pytest.raises(ConfigError, match=f"the directory cannot be used: .*({reason})"):
            find_server(settings(root))


def test_an_interpreter_that_cannot_run_is_an_unavailable_server(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(TierUnavailable, match="cannot be started: .*/nowhere/python"):
        find_server(settings(root))


def test_a_server_that_ends_without_a_word_is_quoted(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    with pytest.raises(TierUnavailable, match="ended before it was ready. output=.*encodings"):
        find_server(settings(root))


def test_a_directory_that_is_locked_without_a_server_is_waited_for_and_named(root: Path) -> None:
    root.mkdir()
    claim(root)
    lock = DirectoryLock(root)
    try:
        with pytest.raises(TierUnavailable, match="no cache server answered.*another server owns the directory"):
            find_server(settings(root, start_timeout_s=12))  # a Python that only says this, on a busy machine
    finally:
        lock.release()
    hello(settings(root)).close()


def test_a_damaged_description_is_an_absent_one(root: Path) -> None:
    root.mkdir()
    claim(root)
    for text in (b"", b"\xff\xfe", b"{}", b'{"socket":"a\\u0000b","pid":1,"version":"","protocol":1}'):
        (root / "server.json").write_bytes(text)
        assert read_info(root) is None
    info = {"socket": "a\0b", "pid": 1, "version": "", "protocol": 1, "server_id": "", "config_digest": ""}
    (root / "server.json").write_text(json.dumps(info))
    assert connect("a\0b") is None
    hello(settings(root)).close()


@pytest.mark.parametrize("text", [b"\xff\xfe", b"{}", b'{"name": "web", "port": 8080}', b'{"socket": 1, "pid": 2}'])
def test_a_description_of_somebody_else_is_neither_replaced_nor_removed(root: Path, text: bytes) -> None:
    """In a directory of ours: whatever else may have been put there, a server does without it or not at all."""
    root.mkdir()
    claim(root)
    (root / "server.json").write_bytes(text)
    with pytest.raises(ConfigError, match=r"server\.json in the cache directory is not what .* so it stays: move it"):
        find_server(settings(root))
    assert (root / "server.json").read_bytes() == text
    (root / "server.json").unlink()
    hello(settings(root)).close()


def test_a_log_of_somebody_else_is_not_written_to(root: Path) -> None:
    root.mkdir()
    claim(root)
    for name in ("server.log", "server.log.1"):
        (root / name).write_bytes(b"127.0.0.1 - - GET / HTTP/1.1\n")
        with pytest.raises(ConfigError, match="not a log file of ours, move it away"):
            find_server(settings(root))
        assert (root / name).read_bytes() == b"127.0.0.1 - - GET / HTTP/1.1\n"
        (root / name).unlink()
    hello(settings(root)).close()


def test_a_log_that_is_moved_away_or_removed_is_begun_anew(served: Path) -> None:
    log, moved = served / "server.log", served.with_name("server.log-20261127")
    for move in (lambda: log.rename(moved), log.unlink):
        move()
        SmallEngine.start(settings(served), "one").close()
        wait_for(lambda: log.exists() and "session over. engine=one" in log.read_text(), "the next log's first lines")
        assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert "engine=one" not in moved.read_text()
    log.unlink()
    log.write_bytes(b"127.0.0.1 - - GET / HTTP/1.1\n")
    SmallEngine.start(settings(served), "two").close()
    wait_for(lambda: not figures(served)["sessions"], "the session's end")
    assert log.read_bytes() == b"127.0.0.1 - - GET / HTTP/1.1\n", "somebody else's"


def test_a_directory_that_is_not_ours_is_refused_to_an_engine_and_not_even_logged_into(root: Path) -> None:
    (root / "tmp").mkdir(parents=True)
    (root / "tmp" / "x").touch()
    with pytest.raises(ConfigError, match=r"the cache server cannot start: .* is not empty and has no tiered_kv\.json"):
        find_server(settings(root))
    assert sorted(path.name for path in root.rglob("*")) == ["tmp", "x"]


# -- out of descriptors ------------------------------------------------------------------------------------------


def test_a_server_without_free_descriptors_serves_on_and_accepts_again(root: Path) -> None:
    """Its hard limit is lowered after the start: as on a machine where the limit is low."""
    one = SmallEngine.start(settings(root))
    one.store(2)
    pid = server_pid(root)
    limit = descriptors(pid) + 4
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, limit))
    info = read_info(root)
    assert info is not None
    crowd = [sock for _ in range(20) if (sock := connect(info.socket)) is not None]
    wait_for(lambda: "cannot accept clients" in (root / "server.log").read_text(), "the limit")
    one.wait_hits(2)
    for sock in crowd:
        sock.close()
    wait_for(lambda: figures(root)["clients"] == 3, "the accepting")
    one.close()


def test_a_worker_for_whose_watch_no_descriptor_is_left_does_not_keep_the_server(root: Path) -> None:
    with hello(settings(root)):
        pid = server_pid(root)
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
        one_left = next(number for number in range(len(used) + 1) if number not in used) + 1
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (one_left, before[1]))
        with pytest.raises(TierUnavailable):  # its connection takes that one
            WorkerClient(settings(root, start_timeout_s=2), "e", 0, worker_part())
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        assert figures(root)["sessions"] == []
    wait_ended(root)


# -- ending ------------------------------------------------------------------------------------------------------


def test_an_embedded_server_writes_what_it_holds_and_ends_with_its_last_client(root: Path) -> None:
    one = SmallEngine.start(settings(root))
    one.store(40)
    pid = server_pid(root)
    one.close()
    wait_ended(root)
    wait_for(lambda: not is_alive(pid), "the process's end")
    DirectoryLock(root).release()
    left = {path.name for path in root.iterdir()}
    assert left == {"tiered_kv.json", "blobs", "index", "tmp", "server.lock", "server.log"}
    two = SmallEngine.start(settings(root), "two")
    assert two.hits(40) == 40
    two.close()


def test_a_child_that_was_forked_keeps_nothing_of_the_arena(root: Path) -> None:
    """Else the next server of the directory waits for it with every session."""
    one = SmallEngine.start(settings(root))
    one.store(2)
    wait, go_on = os.pipe()
    child = os.fork()
    if not child:
        os.close(go_on)
        os.read(wait, 1)
        os._exit(0)
    try:
        assert one.hits(2) == 2, "the parent goes on"
        one.close()
        wait_ended(root)
        two = SmallEngine.start(settings(root), "two")
        assert two.hits(2) == 2
        two.close()
    finally:
        os.close(go_on)
        os.close(wait)
        os.waitpid(child, 0)


def test_a_server_that_may_not_drain_ends_anyway(root: Path) -> None:
    one = SmallEngine.start(settings(root, drain_s=0))
    one.store(40)
    pid = server_pid(root)
    one.close()
    wait_for(lambda: not is_alive(pid), "the process's end")


def test_clients_that_come_while_the_server_drains_get_the_next_one(root: Path) -> None:
    pids = set()
    for number in range(4):
        one = SmallEngine.start(settings(root), f"engine-{number}")
        one.store(20)
        pid = server_pid(root)
        pids.add(pid)
        os.kill(pid, signal.SIGTERM)
        wait_for(lambda: not is_serving(root), "the end of listening")
        one.close()
    assert len(pids) == 4


def test_a_scheduler_whose_workers_joined_a_server_that_died_goes_on_to_the_next_generation(root: Path) -> None:
    worker = WorkerClient(settings(root), "e", 0, worker_part())
    kill_server(root)
    config = settings(root, start_timeout_s=2)
    client = SchedulerClient(config, "e", 1)
    poll_until(client, lambda: client.generation == 1, "the next generation")
    worker.leave()
    worker = WorkerClient(settings(root), "e", 1, worker_part())
    poll_until(client, lambda: client.is_ready, "the session")
    client.close()
    worker.leave()


def test_who_says_nothing_does_not_keep_the_server_alive(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Ten seconds are long for a test: the server runs in this process, where the limit can be lowered.
    monkeypatch.setattr(server, "HELLO_S", 0.2)
    monkeypatch.setattr(server, "FIRST_CLIENT_S", 0.5)
    running = threading.Event()
    thread = threading.Thread(
        target=compose.serve, args=(settings(root),), kwargs={"until_idle": True, "on_ready": lambda _: running.set()}
    )
    thread.start()
    assert running.wait(20)
    info = read_info(root)
    assert info is not None
    silent = connect(info.socket)
    assert silent is not None
    with silent:
        assert silent.recv(1) == b""
    thread.join(20)
    assert not thread.is_alive()


def test_an_admin_does_not_keep_the_server_alive(root: Path) -> None:
    with hello(settings(root), "admin") as admin:
        SmallEngine.start(settings(root)).close()
        admin.settimeout(20)
        assert admin.recv(1) == b""
    wait_ended(root)


def test_admins_that_come_and_go_do_not_keep_the_server_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "cache"
    monkeypatch.setattr(server, "FIRST_CLIENT_S", 1.0)
    running = threading.Event()
    thread = threading.Thread(
        target=compose.serve, args=(settings(root),), kwargs={"until_idle": True, "on_ready": lambda _: running.set()}
    )
    thread.start()
    assert running.wait(20)

    def is_over_once_it_was_asked() -> bool:
        if (info := read_info(root)) is not None:
            with suppress(TierUnavailable):  # it ends while it is asked
                ask_figures(info.socket, 10)
        return not thread.is_alive()

    wait_for(is_over_once_it_was_asked, "the server's end", deadline_s=20)


def test_sigterm_ends_an_embedded_server_and_its_engine_starts_another(engine: EngineStarter, root: Path) -> None:
    one = engine()
    one.store(10)
    one.wait_hits(10)
    pid = server_pid(root)
    os.kill(pid, signal.SIGTERM)
    one.wait_lost()
    one.rejoin()
    assert server_pid(root) != pid
    one.wait_hits(10)
    assert figures(root)["counters"].get("read_failed_corrupt", 0) == 0
