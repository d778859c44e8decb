"""Whatever answers on the socket in a server's place: its clients lose the cache, and nothing else."""

import array
import contextlib
import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.counts import count, seed
from tests.kit.faults.hostile_messages import INTEGERS, hostile_frame, types_of
from tests.kit.server.clients import PAGES, settings, worker_part
from tests.kit.server.probe import wait_for
from tests.kit.server.processes import descriptors
from tiered_kv.chunks.arena import SLAB_BYTES, Arena, create_slabs
from tiered_kv.errors import ConfigError, ProtocolError, TieredKVError, TierUnavailable
from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.keys.namespace import REQUIRED_FIELDS, Namespace
from tiered_kv.server import protocol as m
from tiered_kv.server.client import CREDITS_MAX, MOVES_BYTES_MAX, READ_BYTES, SchedulerClient
from tiered_kv.server.connect import shake_hands
from tiered_kv.server.directory import ServerInfo, read_info, write_info
from tiered_kv.server.http import ask_server
from tiered_kv.server.worker_client import WorkerClient, receive_slabs
from tiered_kv.tiering.types import Arrival, LookupAnswer

ID = "0123456789abcdef"
RECORD = Namespace.from_fields(dict.fromkeys(REQUIRED_FIELDS) | {"format_version": 1, "epoch": "base-0"}).record
READY = m.Ready(RECORD, 8192, 4096, [0], 100, ["host", "disk"], 1 << 30)
KEYS = [bytes([index]) * 16 for index in range(8)]
DIGESTS = [bytes([index]) * 32 for index in range(8)]


def welcome(**changed: object) -> bytes:
    fields = {"protocol": m.PROTOCOL, "version": "v", "server_id": ID, "pid": 1, "slab_count": 1, "directory": "/d"}
    return m.frame(m.Welcome(**fields | changed))


# -- the scheduler's client ----------------------------------------------------------------------------------------


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SchedulerClient]:
    """A scheduler's client that never joins by itself: ``wire`` gives it connections."""
    monkeypatch.setattr(SchedulerClient, "_start_joining", lambda self, delay_s: None)
    made = SchedulerClient(settings(tmp_path), "e", 1, is_watching=True)
    yield made
    made.close()


def wire(client: SchedulerClient) -> socket.socket:
    """Connect the client; returns the server's end."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    client._joined.append((client.generation, ours))
    return theirs


def tell(client: SchedulerClient, server: socket.socket, data: bytes) -> None:
    """Send bytes to the client, which polls as vLLM's scheduler would, until it has them all or has hung up."""
    left, generation = memoryview(data), client.generation
    while left and client.generation == generation:
        with contextlib.suppress(BlockingIOError):
            try:
                left = left[server.send(left) :]
            except (BrokenPipeError, ConnectionResetError):
                return
        client.poll()
        with contextlib.suppress(BlockingIOError):
            server.recv(1 << 20)  # an honest reader, so that nothing is dropped for being full
    client.poll()


def use(client: SchedulerClient, source: random.Random) -> None:
    """What a scheduler's side does between two polls."""
    lookup = client.lookup(KEYS, DIGESTS)
    for answer in client.lookups.values():
        assert 0 <= answer.ready <= len(answer.slots) == len(answer.sources)
        assert answer.held >= 0 and answer.unknown >= 0
    if (slot := client.take_slot()) is not None:
        record = ChunkRecord(bytes(16), KEYS[0], bytes(16), 0, DIGESTS[0])
        source.choice((lambda: client.commit([(slot, record)]), lambda: client.give_back([slot])))()
    client.ask_figures()
    client.pin(KEYS[0], 60.0)
    if lookup is not None and source.random() < 0.5:
        client.release(lookup)
    if source.random() < 0.02:
        client.reset()


def test_a_scheduler_survives_every_message_with_any_content(client: SchedulerClient) -> None:
    source = random.Random(seed())
    kinds = types_of(m.FromServer)
    before, sessions, messages = descriptors(os.getpid()), 0, 0
    frames = count("SERVER_FUZZ", 3000)
    while messages < frames:
        with wire(client) as server:
            client.poll()
            sessions += 1
            if source.random() < 0.9:
                tell(client, server, m.frame(READY))
                assert client.is_ready or client._is_resetting
                tell(client, server, m.frame(m.Credits(list(range(8)))))
            generation = client.generation
            while client.generation == generation and messages < frames:
                use(client, source)
                ids = list(client.lookups)
                frame = hostile_frame(source, kinds)
                if ids and source.random() < 0.3:  # one that is about a lookup of ours
                    drawn = source.choice
                    slots = [drawn(INTEGERS) for _ in range(drawn((0, 3)))]
                    frame = m.frame(
                        m.Updated(
                            drawn(ids),
                            LookupAnswer(
                                held=drawn(INTEGERS),
                                slots=tuple(slots),
                                ready=drawn((0, 1, 3, -1)),
                                unknown=0,
                                sources=bytes(3),
                                is_answered=True,
                            ),
                        )
                    )
                tell(client, server, frame)
                messages += 1
                assert len(client._reader._buffer) <= m.FRAME_BYTES_MAX + READ_BYTES + m.LENGTH.size
                assert client.credit_count <= CREDITS_MAX
            client.lookups.clear()
    assert sessions > frames // 100, "nothing was ever refused"
    client._sock = None if client._sock is None else client._sock.close()
    assert descriptors(os.getpid()) <= before


def answer(**fields: Any) -> m.Updated:
    """A server's answer to the first lookup."""
    return m.Updated(1, LookupAnswer(is_answered=True, **fields))


@pytest.mark.parametrize(
    "message",
    [
        answer(held=3, slots=(7,), ready=3, is_done=True, sources=b"\0"),
        answer(held=3, slots=(7,), ready=1, is_done=True),
        answer(held=-1, is_done=True),
        answer(held=1, slots=(-7,), ready=1, is_done=True, sources=b"\0"),
        answer(slots=(7,), ready=-1, sources=b"\0"),
        answer(unknown=-1),
        answer(queued=-1),
        answer(queued=1, unbegun=2),
        answer(arriving=(Arrival(-1, 1),)),
        m.Progressed(1, 1, False, ()),
        m.Progressed(1, -1, False, ()),
        m.Credits([-1]),
        m.Moved(2, True, bytes(16)),
        m.Moved(-1, True, bytes(16)),
        m.Moved(0, True, bytes(15)),
        m.Ready(RECORD, 0, 4096, [0], 1, ["host"], 1 << 30),
        m.Ready(RECORD, 8192, -1, [0], 1, ["host"], 1 << 30),
        m.Ready(RECORD, 8192, 4096, [], 1, ["host"], 1 << 30),
        m.Ready(RECORD, 8192, 4096, [1 << 40], 1, ["host"], 1 << 30),
        m.Ready(RECORD, 8192, 4096, [-1], 1, ["host"], 1 << 30),
        m.Ready(RECORD, 8192, 4096, [0], 1, ["host\nforged line"], 1 << 30),
        m.Ready(RECORD, 8192, 4096, [0], 1, ["host"] * 100, 1 << 30),
        m.Ready(b"[" * 100_000, 8192, 4096, [0], 1, ["host"], 1 << 30),
        m.Ready(b"{}", 8192, 4096, [0], 1, ["host"], 1 << 30),
        m.Slabs(1),
    ],
)
def test_an_impossible_answer_ends_the_session_and_says_why(
    client: SchedulerClient, message: m.Message, caplog: pytest.LogCaptureFixture
) -> None:
    with wire(client) as server:
        client.poll()
        tell(client, server, m.frame(READY))
        assert client.lookup(KEYS, DIGESTS) == 1
        tell(client, server, m.frame(message))
    assert client.generation == 1 and not client.is_ready
    assert "cache session lost" in caplog.text


def test_a_flood_is_bounded(client: SchedulerClient) -> None:
    with wire(client) as server:
        client.poll()
        tell(client, server, m.frame(READY))
        for _ in range(60):
            tell(client, server, m.frame(m.Moved(0, True, bytes(2 << 20))))
            assert sum(len(moved.keys) for moved in client.moves) <= MOVES_BYTES_MAX + (2 << 20)
        assert client.generation == 0
        grant = m.frame(m.Credits(list(range(300_000))))
        for _ in range(4):
            tell(client, server, grant)
    assert client.generation == 1 and client.credit_count == 0


def test_a_long_refusal_is_shown_short_and_on_one_line(
    client: SchedulerClient, caplog: pytest.LogCaptureFixture
) -> None:
    with wire(client) as server:
        client.poll()
        tell(client, server, m.frame(m.Refused("unavailable", "no\n2026 ERROR forged\x1b[2J" * 100_000)))
    (record,) = (r for r in caplog.records if "cache session lost" in r.message)
    assert len(record.message) < 3000 and record.message.isprintable()


# -- shaking hands, and the worker's client --------------------------------------------------------------------------


def test_shaking_hands_survives_any_answer() -> None:
    source = random.Random(seed())
    kinds = types_of(m.FromServer)
    hello = m.Hello(m.PROTOCOL, "v", "worker", os.getpid())
    before, outcomes = descriptors(os.getpid()), set()
    for _ in range(count("SERVER_FUZZ", 3000) // 3):
        ours, theirs = socket.socketpair()
        data = source.choice((hostile_frame(source, (m.Welcome,)), hostile_frame(source, kinds), welcome()))
        data += b"".join(hostile_frame(source, source.choice(((m.Slabs,), kinds))) for _ in range(2))
        sender = threading.Thread(target=_send, args=(theirs, data)) if len(data) > 100_000 else None
        with ours, theirs:
            sender.start() if sender else _send(theirs, data)
            try:
                answer = shake_hands(ours, hello, 5.0)
                assert answer.server_id.isalnum() and answer.slab_count >= 0
                for fd in receive_slabs(ours, answer.slab_count):
                    os.close(fd)
                outcomes.add("welcome")
            except (TieredKVError, OSError) as exc:
                outcomes.add(type(exc).__name__)
                assert len(str(exc)) < 3000
            if sender:
                ours.close()
                sender.join()
    assert {"ProtocolError", "ConfigError"} <= outcomes
    assert descriptors(os.getpid()) == before


def _send(sock: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)


Answers = Callable[[socket.socket], None]


@pytest.fixture
def imposter(tmp_path: Path, runtime_directory: Path) -> Iterator[Callable[[Answers], Path]]:
    """Something else that listens where the directory's description says: gives the directory."""
    listener = socket.socket(socket.AF_UNIX)
    path = runtime_directory / "imposter.sock"
    listener.bind(str(path))
    listener.listen()
    root = tmp_path / "cache"
    root.mkdir(0o700)
    write_info(root, ServerInfo(str(path), 1, "v", m.PROTOCOL, ID, "x"))

    def serve(answers: Answers) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listener.accept()
                with sock, contextlib.suppress(OSError):
                    sock.recv(4096)  # Hello, and perhaps more
                    answers(sock)

    def start(answers: Answers) -> Path:
        threading.Thread(target=serve, args=(answers,), daemon=True).start()
        return root

    yield start
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    path.unlink()


def slabs(sock: socket.socket, descriptors: list[int], said: int | None = None) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    sock.sendmsg([m.frame(m.Slabs(len(descriptors) if said is None else said))], rights)
    for fd in descriptors:
        os.close(fd)


def memfd(size_bytes: int) -> int:
    fd = os.memfd_create("imposter", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    return fd


def endless(sock: socket.socket) -> None:
    sock.sendall(welcome(slab_count=4))
    while True:
        slabs(sock, [])


def then(first: bytes, more: Callable[[socket.socket], None]) -> Answers:
    def answer(sock: socket.socket) -> None:
        sock.sendall(first)
        more(sock)

    return answer


IMPOSTERS: dict[str, tuple[Answers, str]] = {
    "no frame": (lambda sock: sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "frame too long"),
    "no message": (lambda sock: sock.sendall(m.LENGTH.pack(3) + b"\xff\xff\xff"), "not a message"),
    "no welcome": (lambda sock: sock.sendall(m.frame(READY)), "expected Welcome, got Ready"),
    "another protocol": (lambda sock: sock.sendall(welcome(protocol=99, version="9" * 100_000)), "speaks protocol 99"),
    "an id that is a path": (lambda sock: sock.sendall(welcome(server_id="../../../tmp/owned")), "not 16 hex digits"),
    "no id": (lambda sock: sock.sendall(welcome(server_id="")), "not 16 hex digits"),
    "slabs below zero": (lambda sock: sock.sendall(welcome(slab_count=-1)), "slabs out of range"),
    "a petabyte of slabs": (lambda sock: sock.sendall(welcome(slab_count=1 << 40)), "slabs out of range"),
    "slabs without end": (endless, "expected slabs, got Slabs with 0 descriptors"),
    "a slab that is not there": (then(welcome(), lambda sock: slabs(sock, [], 1)), "got Slabs with 0 descriptors"),
    "a slab too few": (
        then(welcome(), lambda sock: slabs(sock, [memfd(SLAB_BYTES)], 2)),
        "got Slabs with 1 descriptors",
    ),
    "a small slab": (then(welcome(), lambda sock: slabs(sock, [memfd(4096)])), "not a slab: size_bytes=4096"),
    "a slab that may shrink": (
        then(welcome(), lambda sock: slabs(sock, [memfd(SLAB_BYTES)])),
        "not a slab: .* seals=0x0",
    ),
    "a device": (then(welcome(), lambda sock: slabs(sock, [os.open("/dev/zero", os.O_RDWR)])), "not a slab"),
    "a long refusal": (
        then(welcome(), lambda sock: sock.sendall(m.frame(m.Refused("config", "x\n" * 100_000)))),
        "refused: x x",
    ),
}


@pytest.mark.parametrize("case", IMPOSTERS)
def test_a_worker_is_told_what_is_wrong_with_its_server(
    imposter: Callable[[Answers], Path], case: str, tmp_path: Path
) -> None:
    answers, expected = IMPOSTERS[case]
    root = imposter(answers)
    before = descriptors(os.getpid())
    with pytest.raises((ProtocolError, ConfigError), match=expected) as caught:
        WorkerClient(settings(root), "e", 0, worker_part(pages=PAGES))
    assert len(str(caught.value)) < 3000
    wait_for(lambda: descriptors(os.getpid()) <= before, "the imposter's end of the connection to close")
    assert {path.name for path in tmp_path.iterdir()} == {"cache"}
    assert {path.name for path in root.iterdir()} <= {"server.json", f"arena-{ID}.lock"}


def test_a_server_that_hangs_after_its_welcome_is_not_said_to_be_gone(imposter: Callable[[Answers], Path]) -> None:
    def hang(sock: socket.socket) -> None:
        sock.sendall(welcome())
        while sock.recv(4096):  # what is asked, and in the end that nobody waits any more
            pass

    info = read_info(imposter(hang))
    assert info is not None
    with pytest.raises(TierUnavailable, match=r"does not answer: it hangs, was stopped, .*waited_s=0\.2"):
        ask_server(info.socket, m.StatRequest(), m.Stat, 0.2)


def test_a_slab_cannot_be_cut_shorter_by_its_maker() -> None:
    (fd,) = create_slabs(1)
    theirs = os.dup(fd)
    arena = Arena([fd])
    with pytest.raises(PermissionError):
        os.ftruncate(theirs, 0)
    assert arena.view(0, SLAB_BYTES - 1, 1).tobytes() == b"\0"  # SIGBUS, were it gone
    arena.close()
    os.close(theirs)
