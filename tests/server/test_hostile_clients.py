"""Clients that send garbage, half a frame, too much, or nothing, and that do not read: nobody else may notice."""

import os
import random
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.kit.counts import count, seed
from tests.kit.server.clients import CHUNK, SmallEngine, hello, refusal, settings, tell, worker_part
from tests.kit.server.probe import figures, server_pid, wait_for
from tests.kit.server.processes import descriptors
from tiered_kv.errors import TieredKVError, TierUnavailable
from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.server import protocol as m
from tiered_kv.server.connect import connect
from tiered_kv.server.directory import read_info
from tiered_kv.server.server import CLIENTS_MAX

NOW = m.PROTOCOL

MEMORY_MAX = 200 << 20
"""Of a server with an arena of 8 MiB: Python, the libraries, and every bound together."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("hostile")
    witness = SmallEngine.start(settings(path), "witness")
    witness.store(4)
    witness.wait_hits(4)
    global _witness, _pid
    _witness, _pid = witness, server_pid(path)
    yield path
    witness.close()


_witness: SmallEngine
_pid = 0


@pytest.fixture(autouse=True)
def nobody_notices(directory: Path) -> Iterator[None]:
    """After every test the same server serves the same session, within its memory."""
    yield
    assert _witness.hits(4) == 4
    assert _witness.client.generation == 0
    assert server_pid(directory) == _pid
    pages = int(Path(f"/proc/{_pid}/statm").read_text().split()[1])
    assert pages * os.sysconf("SC_PAGE_SIZE") < MEMORY_MAX


def raw(directory: Path) -> socket.socket:
    info = read_info(directory)
    assert info is not None
    sock = connect(info.socket)
    assert sock is not None
    sock.settimeout(10)
    return sock


def packed(**fields: object) -> bytes:
    body = msgspec.msgpack.encode(fields)
    return m.LENGTH.pack(len(body)) + body


def read_to_end(sock: socket.socket) -> bytes:
    data = b""
    try:
        while part := sock.recv(65536):
            data += part
    except ConnectionResetError:
        pass  # the server hung up before it had read everything
    return data


def send_for_ever(sock: socket.socket, data: bytes) -> None:
    while True:
        sock.sendall(data)


def engines(directory: Path) -> list[str]:
    return [session["engine"] for session in figures(directory)["sessions"]]


def wait_clients(directory: Path, number: int) -> None:
    wait_for(lambda: figures(directory)["clients"] == number, f"{number} clients")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "frame too long"),
        (b"\xff" * 8, "frame too long. bytes=4294967295"),
        (m.LENGTH.pack(m.HELLO_BYTES_MAX + 1), "frame too long"),
        (m.LENGTH.pack(3) + b"\xff\xff\xff", "not a message"),
        (m.LENGTH.pack(0), "not a message"),
        (m.frame(m.StatRequest()), "the first message must be Hello"),
        (m.frame(m.Commit([])), "the first message must be Hello"),
        (packed(type="Hello", protocol="1", version="v", role="admin", pid=1), "not a message"),
        (packed(type="Hello", protocol=NOW, version="v", role="king", pid=1), "unknown role 'king'"),
        (
            packed(type="Hello", protocol=NOW, version="v", role="admin", pid=1, engine_id="x" * 201),
            "bad engine id",
        ),
        (
            packed(type="Hello", protocol=NOW, version="v", role="admin", pid=1, engine_id="a\nb"),
            "bad engine id",
        ),
        (
            packed(type="Hello", protocol=NOW, version="v", role="admin", pid=1, generation=-1),
            "bad engine id or gen",
        ),
        (
            packed(type="Hello", protocol=NOW, version="v", role="admin", pid=1, engine_id=b"\xff"),
            "not a message",
        ),
        (packed(type="Hello", protocol=NOW, version="x" * 9999, role="admin" * 999, pid=1), "unknown role"),
    ],
)
def test_who_does_not_say_hello_properly_is_told_why(directory: Path, data: bytes, expected: str) -> None:
    with raw(directory) as sock:
        sock.sendall(data)
        assert expected in refusal(sock)
        assert sock.recv(1) == b""


@pytest.mark.parametrize(
    ("role", "data", "expected"),
    [
        ("worker", b"\xff\xff\xff\xff", "frame too long"),
        ("admin", m.LENGTH.pack(100_000) + b"\x91" * 100_000, "not a message"),
        ("admin", m.LENGTH.pack(4) + b"\xdd\xff\xff\xff", "not a message"),
        ("admin", m.frame(m.Hello(m.PROTOCOL, "v", "worker", 1)), "Hello is said once"),
        ("scheduler", m.frame(m.JoinScheduler(0)), "world out of range"),
        ("scheduler", m.frame(m.JoinScheduler(1 << 40)), "world out of range"),
        ("scheduler", m.frame(m.JoinScheduler(1, epoch="base-0")), "may name no epoch but its private one"),
        ("scheduler", m.frame(m.JoinScheduler(1, epoch="private-")), "may name no epoch but its private one"),
        ("worker", m.frame(worker_part(-1, 1)), "rank or world out of range"),
        ("scheduler", packed(type="Lookup", lookup=1.5, start=0, keys=b"", digests=b""), "not a message"),
        ("scheduler", packed(type="GiveBack", slots=["a"]), "not a message"),
    ],
)
def test_who_breaks_the_protocol_later_is_told_why(directory: Path, role: str, data: bytes, expected: str) -> None:
    with hello(settings(directory), role, "bad") as sock:
        sock.sendall(data)
        assert expected in refusal(sock)


def open_session(directory: Path, engine_id: str) -> SmallEngine:
    return SmallEngine.start(settings(directory), engine_id)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (m.Lookup(1, 0, bytes(15), bytes(32)), "bad lookup"),
        (m.Lookup(1, 0, bytes(16), bytes(31)), "bad lookup"),
        (m.Lookup(1, 2, bytes(16), bytes(32)), "bad lookup"),
        (m.Lookup(1, -1, bytes(16), bytes(32)), "bad lookup"),
        (m.Lookup(1, 0, b"", b"", names=[bytes(100)]), "not a message"),
        (m.Lookup(1, 0, bytes(16), bytes(32), names=[bytes(36)]), "bad lookup"),
        (m.Lookup(1, 2, b"", b"", leases=False, names=[bytes(36)]), "bad lookup"),
        (m.GiveBack([1 << 50]), "was not granted"),
        (m.GiveBack([-1]), "was not granted"),
    ],
)
def test_orders_that_make_no_sense_end_their_own_session_only(
    directory: Path, message: m.Message, expected: str
) -> None:
    check_refused(directory, lambda _namespace: message, expected)


@pytest.mark.parametrize(
    ("slot", "changes", "expected"),
    [
        (1 << 50, {}, "was not granted"),
        (0, {"namespace": b"n" * 16}, "of another namespace"),
        (0, {"namespace": b""}, "`bytes` of length >= 16"),
        (0, {"key": b"k" * 15}, "`bytes` of length >= 16"),
        (0, {"key": b"k" * 17}, "`bytes` of length <= 16"),
        (0, {"parent": b""}, "`bytes` of length >= 16"),
        (0, {"prefix_sha256": b"s" * 31}, "`bytes` of length >= 32"),
        (0, {"tag": b""}, "`bytes` of length >= 16"),
        (0, {"tag": b"t" * 17}, "`bytes` of length <= 16"),
        (0, {"chunk_index": 0}, "not where its parent says"),
        (0, {"chunk_index": -1}, "`int` >= 0"),
        (0, {"chunk_index": 1 << 60}, "`int` <= 2147483648"),
        (0, {"stored_by": "x" * 129}, "`str` of length <= 128"),
        (0, {"stored_by": "somebody"}, "does not say in a known way who stored it"),
    ],
)
def test_a_committed_chunk_that_cannot_be_is_refused(
    directory: Path, slot: int, changes: dict[str, Any], expected: str
) -> None:
    fields: dict[str, Any] = {"key": b"k" * 16, "parent": b"p" * 16, "chunk_index": 3, "prefix_sha256": bytes(32)}

    def commit(namespace: bytes) -> m.Message:
        return m.Commit([(slot, ChunkRecord(**{"namespace": namespace} | fields | changes))])

    check_refused(directory, commit, expected)


@pytest.mark.parametrize(
    ("slot", "tokens", "changes", "expected"),
    [
        (1 << 50, 1, {}, "was not granted"),
        (0, 0, {}, "a committed tail is none"),
        (0, CHUNK, {}, "a committed tail is none"),
        (0, 1, {"chunk_index": 0}, "a committed tail is none"),
        (0, 1, {"key": b"k" * 16}, "a committed tail is none"),
        (0, 1, {"namespace": b"n" * 16}, "of another namespace"),
        (0, 1, {"stored_by": "somebody"}, "does not say in a known way who stored it"),
    ],
)
def test_a_committed_tail_that_cannot_be_is_refused(
    directory: Path, slot: int, tokens: int, changes: dict[str, Any], expected: str
) -> None:
    key = b"k" * 8 + b"tail" + tokens.to_bytes(4, "little")
    fields: dict[str, Any] = {"key": key, "parent": b"p" * 16, "chunk_index": 3, "prefix_sha256": bytes(32)}

    def commit(namespace: bytes) -> m.Message:
        return m.CommitTail(slot, ChunkRecord(**{"namespace": namespace} | fields | changes))

    check_refused(directory, commit, expected)


def check_refused(directory: Path, message: Callable[[bytes], m.Message], expected: str) -> None:
    """Send a message to a session of its own, which ends by it; ``message`` is given the session's namespace."""
    one = open_session(directory, "senseless")
    assert one.client.namespace is not None
    one.client._send(message(one.client.namespace.digest), may_drop=False)
    one.wait_lost()
    one.close()
    assert expected in (directory / "server.log").read_text().rpartition("client refused")[2]
    wait_for(lambda: "senseless/0" not in engines(directory), "the session's end")


def test_a_cycle_of_parents_does_not_hang_the_server(directory: Path) -> None:
    one = open_session(directory, "cycle")
    a, b = b"a" * 16, b"b" * 16
    slots = [one.take_slot() for _ in range(3)]
    chunks = [(slots[0], a, b, 5), (slots[1], b, a, 6), (slots[2], b"c" * 16, b"c" * 16, 7)]
    assert one.client.namespace is not None
    space = one.client.namespace.digest
    records = [(slot, ChunkRecord(space, *place, bytes(32))) for slot, *place in chunks]
    one.client._send(m.Commit(records), may_drop=False)
    one.store(2)
    one.wait_hits(2)
    one.close()


def test_half_a_frame_and_then_silence_holds_up_nobody(directory: Path) -> None:
    before = figures(directory)["clients"]
    data = m.frame(m.Decline("x" * 100_000))
    with hello(settings(directory), "worker", "half") as sock:
        sock.sendall(data[: len(data) // 2])
        assert _witness.hits(4) == 4
        sock.sendall(data[len(data) // 2 :])  # it may still go on
        wait_for(lambda: "half/0" in engines(directory), "the decline")
        tell(sock, m.Unmapped())
        assert refusal(sock) == "this client maps no arena"
    with raw(directory) as silent:
        silent.sendall(b"\x10\x00")
        assert _witness.hits(4) == 4
    wait_clients(directory, before)


def test_a_client_that_does_not_read_is_dropped_before_it_costs_memory(directory: Path) -> None:
    with hello(settings(directory), "admin") as sock:
        sock.settimeout(20)
        request = m.frame(m.StatRequest())
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            send_for_ever(sock, request * 100)
    assert "does not read" in (directory / "server.log").read_text()


def test_a_worker_that_does_not_read_its_slabs_is_no_burden(directory: Path) -> None:
    with hello(settings(directory), "worker", "blind") as sock:
        tell(sock, worker_part(0, 2))
        wait_for(lambda: "blind/0" in engines(directory), "the worker")
        tell(sock, m.Unmapped())
    wait_for(lambda: "blind/0" not in engines(directory), "the worker's end")


def test_more_clients_than_the_server_takes_are_refused_and_leave_room_again(directory: Path) -> None:
    before = figures(directory)["clients"]
    crowd: list[socket.socket] = []
    try:
        while True:
            sock = raw(directory)
            crowd.append(sock)
            try:
                sock.sendall(m.frame(m.Hello(m.PROTOCOL, "v", "admin", 1)))
                message = sock.recv(4096)
            except ConnectionError:
                break
            if b"too many clients" in message:
                break
            assert len(crowd) <= CLIENTS_MAX
        assert len(crowd) > CLIENTS_MAX // 2
        with pytest.raises(TierUnavailable, match="too many clients|went away"):
            hello(settings(directory, start_timeout_s=1))
    finally:
        for sock in crowd:
            sock.close()
    hello(settings(directory)).close()  # tries again until there is room
    wait_clients(directory, before)


def test_random_clients_find_no_way_to_hurt(directory: Path) -> None:
    before, clients = descriptors(_pid), figures(directory)["clients"]
    random_ = random.Random(seed())
    frames = [
        m.frame(message)
        for message in (
            m.Hello(m.PROTOCOL, "v", "worker", 1, "fuzz"),
            m.Hello(m.PROTOCOL, "v", "scheduler", 1, "fuzz"),
            m.Hello(m.PROTOCOL, "v", "cache", 1, "fuzz"),
            worker_part(),
            worker_part(1, 2),
            m.JoinScheduler(1),
            m.Decline("no"),
            m.Lookup(1, 0, bytes(32), bytes(64)),
            m.Release(1),
            m.Commit([(0, ChunkRecord(bytes(16), bytes(16), bytes(16), 1, bytes(32), b"t" * 16))]),
            m.CommitTail(0, ChunkRecord(bytes(16), bytes(8) + b"tail\1\0\0\0", bytes(16), 1, bytes(32))),
            m.DropTails([bytes(16)]),
            m.GiveBack([0, 1]),
            m.Rest(),
            m.Wake(),
            m.Reset(),
            m.Unmapped(),
            m.StatRequest(),
        )
    ]
    for _ in range(count("CLIENT_FUZZ", 300)):
        chosen = [random_.choice(frames[:3]), *random_.choices(frames, k=random_.randrange(6))]
        data = bytearray(b"".join(chosen))
        for _ in range(random_.choice((0, 0, 1, 3))):
            data[random_.randrange(len(data))] ^= 1 << random_.randrange(8)
        with raw(directory) as sock:
            try:
                sock.sendall(data[: random_.choice((len(data), random_.randrange(len(data) + 1)))])
                if random_.random() < 0.5:
                    sock.shutdown(socket.SHUT_WR)
                    read_to_end(sock)
            except (BrokenPipeError, TimeoutError, TieredKVError):
                continue  # hung up on, or left waiting: both are the server's right
    wait_clients(directory, clients)
    # Who joined stays watched while its process lives, and that is this one.
    watched = sum(s["workers"] + s["declined"] for s in figures(directory)["sessions"])
    wait_for(lambda: descriptors(_pid) <= before + watched - 1, "descriptors; the witness was there before")
