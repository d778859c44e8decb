"""What a client and a server must agree on: limits, protocol, user, directory; and how each learns of a difference."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from tests.kit.server.clients import SmallEngine, hello, settings, worker_part
from tests.kit.server.probe import socket_of
from tiered_kv import __version__
from tiered_kv.config import Config
from tiered_kv.errors import ConfigError
from tiered_kv.server import protocol as m
from tiered_kv.server.client import SchedulerClient
from tiered_kv.server.connect import connect, find_server, read_message, say_hello, shake_hands
from tiered_kv.server.directory import read_info
from tiered_kv.server.listening import bind
from tiered_kv.server.members import check_same_engine
from tiered_kv.server.sessions import Group, GroupWorker


def welcome(config: Config) -> m.Welcome:
    sock, answer = say_hello(config, "admin", "", 0)
    sock.close()
    return answer


@pytest.mark.parametrize("name", ["host_bytes", "disk_bytes", "min_free_bytes"])
def test_other_limits_are_refused_with_both_values(served: Path, name: str) -> None:
    running = {"host_bytes": 8 << 20, "disk_bytes": 160 << 20, "min_free_bytes": 1 << 30}[name]
    with pytest.raises(ConfigError, match=rf"runs with {name}={running}, .* configured with {name}={running + 1}"):
        say_hello(settings(served, **{name: running + 1}), "worker", "e", 0)
    client = SchedulerClient(settings(served, **{name: running + 1}), "e", 1)
    assert not client.wait_ready(10)
    assert f"{name}={running + 1}" in (client.refusal or "")
    client.close()


def test_a_limit_that_the_server_took_by_default_conflicts_with_a_wanted_one(root: Path) -> None:
    with hello(Config.from_mapping({"storage_uri": f"file://{root}", "host_bytes": "8MiB"})):
        with pytest.raises(ConfigError, match=r"disk_bytes=\d+ \(the default\).*disk_bytes=167772160"):
            welcome(settings(root))


def test_limits_that_are_left_out_are_taken_as_they_are(served: Path) -> None:
    assert welcome(Config.from_mapping({"storage_uri": f"file://{served}"})).directory == str(served)


def test_a_server_below_vllms_offloading_is_small_and_engines_of_the_connector_take_what_it_has(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nobody_named = settings(root, host_bytes=None)
    monkeypatch.setattr("tiered_kv.config.OFFLOADING_HOST_BYTES", 16 << 20)  # as with more memory
    first = SmallEngine.start(nobody_named.below_offloading(), "below")
    assert "the cache server has host_bytes" not in caplog.text
    other = SmallEngine.start(nobody_named, "beside", weights="other")
    assert caplog.text.count("the cache server has host_bytes=16 MiB; one that this engine starts has") == 1
    assert first.client.host_bytes == other.client.host_bytes == 16 << 20 < nobody_named.resolved_host_bytes()
    other.store(6)
    assert other.hits(6) == 6
    named = settings(root, host_bytes="8MiB").below_offloading()
    with pytest.raises(ConfigError, match=rf"runs with host_bytes={16 << 20}, .* configured with host_bytes={8 << 20}"):
        say_hello(named, "worker", "e", 0)
    first.close()
    other.close()


def test_another_protocol_is_refused_with_both_versions(served: Path) -> None:
    for protocol, more in ((m.PROTOCOL + 1, {"new_field": [1, {"deep": None}]}), (m.PROTOCOL - 1, {})):
        body = msgspec.msgpack.encode(
            {"type": "Hello", "protocol": protocol, "version": "9.9", "role": "worker", "pid": 1, **more}
        )
        with find_server(settings(served)) as sock:
            sock.sendall(m.LENGTH.pack(len(body)) + body)
            answer = read_message(sock)
        assert isinstance(answer, m.Refused)
        assert f"version {__version__}) speaks protocol {m.PROTOCOL}" in answer.reason
        assert f"version 9.9) speaks {protocol}" in answer.reason


def test_a_server_of_another_protocol_is_named_by_its_client(runtime_directory: Path) -> None:
    with bind(runtime_directory / "old.sock") as listener:

        def answer() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.recv(4096)
                sock.sendall(m.frame(m.Welcome(m.PROTOCOL + 1, "9.9", "id", 1, 0, "/d")))

        answering = threading.Thread(target=answer)
        answering.start()
        sock = connect(str(runtime_directory / "old.sock"))
        assert sock is not None
        with (
            sock,
            pytest.raises(ConfigError, match=rf"version 9.9\) speaks protocol {m.PROTOCOL + 1}, .* {m.PROTOCOL}:"),
        ):
            shake_hands(sock, m.Hello(m.PROTOCOL, __version__, "admin", 1), 5)
        answering.join()


@pytest.mark.skipif(os.getuid() != 0, reason="needs another user")
def test_a_client_of_another_user_is_refused(
    root: Path, runtime_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = runtime_directory / "open to all"
    place.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    hello(settings(root)).close()
    info = read_info(root)
    assert info is not None
    path = Path(info.socket)
    path.chmod(0o666)
    for directory in (path.parent, place, runtime_directory):
        directory.chmod(0o711)
    code = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]);"
        "sys.stdout.buffer.write(s.recv(4096))"
    )
    python = getattr(sys, "_base_executable", sys.executable)
    result = subprocess.run([python, "-I", "-S", "-c", code, str(path)], capture_output=True, check=False)
    if b"Permission denied" in result.stderr:
        pytest.skip("the other user cannot run the interpreter")
    (message,) = m.FrameReader(m.FromServer).feed(result.stdout)
    assert message == m.Refused("config", "this server serves uid 0 only, the client has uid 65534")


# -- a named server ----------------------------------------------------------------------------------------------


def test_a_named_server_serves_its_directory_only(served: Path, tmp_path: Path) -> None:
    name = socket_of(served)
    assert welcome(settings(served, server=name)).directory == str(served)
    link = tmp_path / "the same by another path"
    link.symlink_to(served)
    assert welcome(settings(link, server=name)).directory == str(served)
    with pytest.raises(ConfigError, match=rf"serves {served}, and storage_uri names {tmp_path}/other"):
        welcome(settings(tmp_path / "other", server=name))
    assert not (tmp_path / "other").exists()


def test_ranks_say_alike_who_stores_and_may_have_encodings_of_their_own() -> None:
    first, second = (
        worker_part(rank, 2, stored_by=f"tiered_kv/0.9.1 vllm/0.32.0 {encoding}")
        for rank, encoding in enumerate(("FLASH_ATTN/cuda", "FLASHINFER/cuda"))
    )
    check_same_engine(first, second)
    group = Group("e", 0, world_size=2)
    for join in (first, second):
        group.members[join.rank] = GroupWorker(connection=None, join=join)  # type: ignore[arg-type]  # nobody is told
    group.set_geometry()
    assert group.stored_by == "tiered_kv/0.9.1 vllm/0.32.0 FLASH_ATTN/cuda,FLASHINFER/cuda"
    other = worker_part(1, 2, stored_by="tiered_kv/0.9.1 vllm/0.32.1 FLASH_ATTN/cuda")
    with pytest.raises(ConfigError, match=r"disagree on who stores: rank 0 says .*0\.32\.0 .* rank 1 says .*0\.32\.1"):
        check_same_engine(first, other)
