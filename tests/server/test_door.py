"""Who may hold a connection to the door, and for how long: strangers in numbers, trickles, words that are no HTTP."""

import contextlib
import errno
import os
import select
import socket
import threading
import time

import pytest

from tests.kit.server.probe import wait_for
from tests.kit.storage.disk_probe import open_disk
from tiered_kv.config import Config
from tiered_kv.errors import TierUnavailable
from tiered_kv.server.door import DoorProcess
from tiered_kv.server.door_blobs import PIECE_BYTES, DoorBlobs
from tiered_kv.server.door_listener import (
    ANSWER_S,
    BODY_BYTES_MAX,
    CONNECTIONS_MAX,
    FIRST_S,
    HEAD_BYTES_MAX,
    IDLE_S,
    STRANGERS_MAX,
    STRANGERS_OF_ONE,
    DoorConnections,
    Listener,
)
from tiered_kv.server.door_pace import NICE, NICE_MAX, QUICK_BYTES_S
from tiered_kv.testing.blobs import SampleChain
from tiered_kv.tiers.object.connection import IDLE_MAX_S
from tiered_kv.tiers.peers.fleet_key import FleetKey
from tiered_kv.tiers.peers.found import PeerFinder
from tiered_kv.tiers.peers.peer import BLOBS_PATH, PREFIX_PATH, Peer
from tiered_kv.tiers.peers.tier import PeersTier

CHAIN = SampleChain(payload_bytes=1 << 20)
KEY = FleetKey(bytes(range(32)))


class Clock:
    """Stands still until a test moves it."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


# -- the limits, without a network -------------------------------------------------------------------------------------


@pytest.fixture
def sockets():
    """Makes connected sockets and closes them all."""
    made = []

    def make():
        ends = socket.socketpair()
        made.extend(ends)
        return ends[0]

    yield make
    for one in made:
        one.close()


def is_cut(connection):
    with contextlib.suppress(BlockingIOError):
        return connection.wire.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK) == b""
    return False


def test_the_oldest_stranger_of_an_address_that_opens_many_goes(sockets):
    connections = DoorConnections(Clock())
    other = connections.admit(sockets(), "b")
    made = [connections.admit(sockets(), "a") for _ in range(STRANGERS_OF_ONE + 3)]
    assert [is_cut(one) for one in made] == [True] * 3 + [False] * STRANGERS_OF_ONE
    assert not is_cut(other)


def test_where_strangers_are_too_many_the_address_that_has_most_loses_one(sockets):
    connections = DoorConnections(Clock())
    few = [connections.admit(sockets(), "few") for _ in range(8)]
    many = [connections.admit(sockets(), f"{number % 5}") for number in range(STRANGERS_MAX - 8)]
    assert not any(map(is_cut, [*few, *many]))
    newcomers = [connections.admit(sockets(), "new") for _ in range(8)]
    assert not any(map(is_cut, [*few, *newcomers]))
    assert sum(map(is_cut, many)) == 8


def test_who_has_shown_a_token_is_no_stranger(sockets):
    connections = DoorConnections(Clock())
    known = [connections.admit(sockets(), "a") for _ in range(STRANGERS_OF_ONE)]
    for one in known:
        connections.greet(one)
    for _ in range(2 * STRANGERS_OF_ONE):
        connections.admit(sockets(), "a")
    assert not any(map(is_cut, known))


def test_in_all_there_are_no_more_than_so_many(sockets):
    connections = DoorConnections(Clock())
    first = None
    for number in range(CONNECTIONS_MAX):
        one = connections.admit(sockets(), f"{number}")
        connections.greet(one)
        first = first or one
    assert connections.admit(sockets(), "a") is None
    connections.end(first)
    assert connections.admit(sockets(), "a") is not None


def test_each_stage_has_its_time(sockets):
    clock = Clock()
    connections = DoorConnections(clock)
    stranger, asker, idle = [connections.admit(sockets(), "a") for _ in range(3)]
    connections.greet(asker)
    connections.greet(idle)
    connections.rest(idle)
    ends = sorted([(FIRST_S, stranger), (IDLE_S, idle), (ANSWER_S, asker)], key=lambda end: end[0])
    for number, (end_s, _) in enumerate(ends):
        clock.now_s = end_s - 0.01
        connections.sweep()
        assert [is_cut(one) for _, one in ends] == [True] * number + [False] * (3 - number)
        clock.now_s = end_s
        connections.sweep()
        assert [is_cut(one) for _, one in ends] == [True] * (number + 1) + [False] * (2 - number)


def test_an_answer_has_as_long_as_peers_wait_for_a_blob(tmp_path, monkeypatch):
    """Cut before that, a blob that takes longer over a thin line would never come."""
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_text("42" * 32)
    told = []

    class Told(DoorProcess):
        def _start(self):
            told.append(self._settings)
            raise ChildProcessError("none is wanted")

    given = {"storage_uri": f"file://{tmp_path}/kv", "peer_listen": "127.0.0.1:0", "peer_key_file": str(key)}
    for more in ({}, {"peer_timeout_s": 600}):
        Told(Config.from_mapping(given | more)).close()
    assert [settings.answer_s for settings in told] == [ANSWER_S, 600]


def test_the_time_of_an_answer_can_be_longer(sockets):
    clock = Clock()
    connections = DoorConnections(clock, 600)
    asker = connections.admit(sockets(), "a")
    connections.greet(asker)
    for now_s, is_over in ((ANSWER_S, False), (599, False), (600, True)):
        clock.now_s = now_s
        connections.sweep()
        assert is_cut(asker) == is_over


def test_a_peer_lets_go_of_an_idle_connection_before_the_door_does():
    assert 2 * IDLE_MAX_S <= IDLE_S


# -- a real listener ---------------------------------------------------------------------------------------------------


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def listener(tmp_path, clock, monkeypatch):
    """A door in this process, with one blob and a clock of the test's."""
    monkeypatch.setattr("tiered_kv.server.door_listener.SWEEP_S", 0.02)  # by the test's clock nothing is due earlier
    disk = open_disk(tmp_path / "disk")
    blob = CHAIN.blob(0)
    disk.put(blob.name, blob.view())
    disk.close()

    def accepts(token):
        return KEY.accepts(token, time.time())

    blobs = DoorBlobs(tmp_path / "disk", None)
    made = Listener("127.0.0.1", 0, KEY.server_context(), accepts, blobs.answer, clock)
    thread = threading.Thread(target=made.run)
    thread.start()
    yield made
    made.close()
    thread.join()


@pytest.fixture
def strangers(listener):
    """Connects to the listener without a word, from an address of this machine."""
    with contextlib.ExitStack() as made:

        def connect(source="127.0.0.1", *, says_tls=False):
            plain = made.enter_context(
                socket.create_connection(("127.0.0.1", listener.port), source_address=(source, 0), timeout=20)
            )
            return made.enter_context(KEY.client_context().wrap_socket(plain)) if says_tls else plain

        yield connect


@contextlib.contextmanager
def peer_of(listener):
    finder = PeerFinder([f"https://127.0.0.1:{listener.port}"], None)
    form = {CHAIN.namespace: CHAIN.form}.get
    tier = PeersTier(
        finder, lambda url: Peer(url, KEY, KEY.client_context(), time.monotonic), form, timeout_s=5.0, io_concurrency=4
    )
    try:
        yield tier
    finally:
        tier.close()


def read(tier):
    buffer = bytearray(CHAIN.form.blob_bytes)
    assert tier.get_into(CHAIN.name(0), memoryview(buffer))
    return bytes(buffer)


def test_what_a_request_needs_goes_at_the_engines_priority_and_what_is_more_gives_way(listener, clock, monkeypatch):
    """Nobody who has shown no token does; who has given way does so again after a rest."""
    monkeypatch.setattr("tiered_kv.server.door_pace.QUICK_BYTES", 3 * CHAIN.form.blob_bytes)
    before, seen = os.getpriority(os.PRIO_PROCESS, 0), []
    accepts, answer = listener._accepts, listener._answer

    def accepts_there(token):
        seen.append(("token", own_niceness(before)))
        return accepts(token)

    def answer_there(question, reply):
        seen.append(("answer", own_niceness(before)))
        answer(question, reply)

    monkeypatch.setattr(listener, "_accepts", accepts_there)
    monkeypatch.setattr(listener, "_answer", answer_there)
    with peer_of(listener) as tier:
        for _ in range(5):
            assert read(tier) == CHAIN.blob(0).data
        clock.now_s += 3 * CHAIN.form.blob_bytes / QUICK_BYTES_S
        for _ in range(2):
            assert read(tier) == CHAIN.blob(0).data
    answers, low = [nice for what, nice in seen if what == "answer"], given_way(before)
    assert answers == [0, 0, 0, low, low, 0, 0]
    assert seen[0] == ("token", low)


def given_way(before):
    """By how much a thread gives way: as far as there is anything below, where these tests give way themselves."""
    return min(NICE_MAX, before + NICE) - before


def own_niceness(before):
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) - before


def test_a_long_answer_gives_way_in_its_middle(listener, clock, monkeypatch):
    """Else as many as are sent at once go quickly to their ends, whatever they hold."""
    monkeypatch.setattr("tiered_kv.server.door_pace.QUICK_BYTES", CHAIN.form.blob_bytes // 2)
    before, seen, preadv = os.getpriority(os.PRIO_PROCESS, 0), [], os.preadv

    def noted(*asked):
        seen.append(own_niceness(before))
        return preadv(*asked)

    with peer_of(listener) as tier, monkeypatch.context() as patched:
        patched.setattr(os, "preadv", noted)
        assert read(tier) == CHAIN.blob(0).data
    assert seen[0] == 0 and seen[-1] == given_way(before) and seen == sorted(seen)


def test_answers_that_are_broken_off_count_as_what_was_sent(listener, monkeypatch):
    monkeypatch.setattr("tiered_kv.server.door_pace.QUICK_BYTES", 6 * PIECE_BYTES)
    for _ in range(6):
        with socket.socket() as plain:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # so that the answer cannot be sent to its end
            plain.settimeout(20)
            plain.connect(("127.0.0.1", listener.port))
            with KEY.client_context().wrap_socket(plain) as wire:
                wire.sendall(asked("GET", BLOB))
                assert wire.recv(1024).startswith(b"HTTP/1.1 200 ")
    wait_for(lambda: not listener._connections._open, "the threads' ends")
    assert not listener._pace.goes_on()


def test_where_a_sandbox_lets_nobody_give_way_the_door_serves_and_says_so(listener, monkeypatch, caplog):
    def refuse(*_):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr("tiered_kv.server.door_pace.QUICK_BYTES", CHAIN.form.blob_bytes // 2)
    monkeypatch.setattr(os, "setpriority", refuse)
    with peer_of(listener) as tier:
        for _ in range(3):
            assert read(tier) == CHAIN.blob(0).data
    assert caplog.text.count("may not lower its own") == 1


def test_a_connection_that_cannot_begin_leaves_nothing(listener, strangers, monkeypatch):
    """Whatever the reason: the door takes only so many connections in."""
    ends = []
    monkeypatch.setattr(threading, "excepthook", lambda end: ends.append(end.exc_type))

    def refuse(*_):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr("tiered_kv.server.door_listener.DoorWire", refuse)
        assert strangers().recv(1) == b""
    wait_for(lambda: not listener._connections._open, "its end")
    wait_for(lambda: ends == [MemoryError], "the end of its thread")
    with peer_of(listener) as tier:
        assert read(tier) == CHAIN.blob(0).data


def test_a_connection_for_which_there_is_no_quick_thread_ends(listener, monkeypatch, caplog):
    start = threading.Thread.start

    def refuse(thread):
        if threading.current_thread().name == "tiered_kv-door-quick":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with peer_of(listener) as tier, pytest.raises(TierUnavailable):
            read(tier)
        assert "no thread for a connection. cause=can't start new thread" in caplog.text
    with peer_of(listener) as tier:
        assert read(tier) == CHAIN.blob(0).data


def open_count(connections):
    poll = select.poll()
    for one in connections:
        poll.register(one, select.POLLIN)
    return len(connections) - len(poll.poll(0))


def test_a_blob_is_read_while_strangers_hold_all_connections_they_can_get(listener, strangers):
    with peer_of(listener) as before:
        assert read(before) == CHAIN.blob(0).data  # its connection stays
        held = [strangers(f"127.0.0.{number % 6 + 2}") for number in range(3 * STRANGERS_MAX)]
        wait_for(lambda: open_count(held) <= STRANGERS_MAX, "the strangers' end")
        assert read(before) == CHAIN.blob(0).data
        with peer_of(listener) as newcomer:
            assert read(newcomer) == CHAIN.blob(0).data
    assert open_count(held) > 0, "the limit was reached, and no more were closed than had to be"


def test_one_address_gets_no_more_than_its_part(listener, strangers):
    held = [strangers() for _ in range(4 * STRANGERS_OF_ONE)]
    wait_for(lambda: open_count(held) == STRANGERS_OF_ONE, "the end of most of them")


def test_who_says_nothing_is_cut_off(listener, strangers, clock):
    silent = strangers()
    wait_for(lambda: listener._connections._open, "the connection")
    clock.now_s += FIRST_S
    assert silent.recv(1) == b""
    with peer_of(listener) as tier:
        assert read(tier) == CHAIN.blob(0).data


def test_a_head_that_trickles_is_cut_off(listener, strangers, clock):
    slow = strangers(says_tls=True)
    for byte in b"GET / HTTP/1.1\r\n":
        slow.sendall(bytes([byte]))
    clock.now_s += FIRST_S
    slow.settimeout(20)
    with contextlib.suppress(OSError):  # an end, or a reset
        assert slow.recv(1) == b""
    wait_for(lambda: not listener._connections._open, "the thread's end")


def test_who_does_not_take_an_answer_is_cut_off(listener, strangers, clock):
    slow = strangers(says_tls=True)
    name = CHAIN.name(0)
    slow.sendall(
        f"GET {BLOBS_PATH}/{name.namespace.hex()}/{name.key.hex()} HTTP/1.1\r\nHost: a\r\n"
        f"Authorization: Bearer {KEY.token(time.time())}\r\n\r\n".encode()
        * 64  # more than the sockets' buffers take
    )
    wait_for(lambda: any(one.is_known for one in list(listener._connections._open)), "the answer's beginning")

    def is_cut_off() -> bool:
        clock.now_s += ANSWER_S  # again and again: the next of the answers may only just have begun
        return not listener._connections._open

    wait_for(is_cut_off, "the thread's end")


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", 401),
        (b"GET / HTTP/1.1\r\nHost: a\r\nAuthorization: Basic %(token)s\r\n\r\n", 401),
        (b"GET / HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer %(token)s\r\n\r\n", 404),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 20\r\n\r\n" + bytes(20), 401),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 999999\r\n\r\n" + bytes(BODY_BYTES_MAX + 1), 401),
        (
            b"POST / HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer %(token)s\r\nContent-Length: 999999\r\n\r\n"
            + bytes(BODY_BYTES_MAX + 1),
            413,
        ),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * HEAD_BYTES_MAX, 431),
        (b"SSH-2.0-OpenSSH\r\n\r\n", 400),
        (b"\x00\x01\x02\r\n\r\n", 400),
    ],
    ids=["no token", "other scheme", "token", "body", "long body", "long body and token", "long head", "ssh", "bytes"],
)
def test_what_is_refused_is_refused_in_http(listener, strangers, said, status):
    wire = strangers(says_tls=True)
    wire.sendall(said.replace(b"%(token)s", KEY.token(time.time()).encode()))
    assert wire.recv(4096).startswith(f"HTTP/1.1 {status} ".encode())
    with peer_of(listener) as tier:
        assert read(tier) == CHAIN.blob(0).data


def test_the_head_of_an_answer_is_sent_at_once(listener, strangers):
    wire = strangers(says_tls=True)
    wire.sendall(asked("GET", BLOB))
    assert wire.recv(4096).endswith(b"\r\n\r\n"), "a record and a system call for each of its lines"


def test_what_is_no_tls_ends_its_own_connection_alone(listener, strangers):
    plain = strangers()
    plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with contextlib.suppress(ConnectionResetError):
        while plain.recv(4096):
            pass
    with peer_of(listener) as tier:
        assert read(tier) == CHAIN.blob(0).data


def test_a_listener_that_is_full_closes_newcomers_and_goes_on(listener, strangers, monkeypatch, caplog):
    monkeypatch.setattr("tiered_kv.server.door_listener.CONNECTIONS_MAX", 2)
    held = [strangers(), strangers()]
    wait_for(lambda: len(listener._connections._open) == 2, "the connections")
    assert strangers().recv(1) == b""
    assert "too many connections" in caplog.text
    held[0].close()
    wait_for(lambda: len(listener._connections._open) == 1, "room")
    with peer_of(listener) as tier:
        assert read(tier) == CHAIN.blob(0).data


# -- words that no client of ours says ---------------------------------------------------------------------------------


def asked(method, target, *headers, body=b""):
    lines = [f"{method} {target} HTTP/1.1", "Host: a", f"Authorization: Bearer {KEY.token(time.time())}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


BLOB = f"{BLOBS_PATH}/{CHAIN.name(0).namespace.hex()}/{CHAIN.name(0).key.hex()}"
NAMES = CHAIN.name(0).namespace + CHAIN.name(0).key
LENGTH = f"Content-Length: {len(NAMES)}"


def chunked(body, size=1):
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


ODD = {
    "two questions at once": (lambda: asked("GET", BLOB) * 2, [200, 200]),
    "twenty with bodies": (lambda: asked("POST", PREFIX_PATH, LENGTH, body=NAMES) * 20, [200] * 20),
    "two bodies": (lambda: asked("POST", PREFIX_PATH, LENGTH, body=2 * NAMES), [200, 400]),
    "two lengths": (lambda: asked("POST", PREFIX_PATH, LENGTH, "Content-Length: 64", body=NAMES), [400]),
    "length and chunks": (
        lambda: asked("POST", PREFIX_PATH, LENGTH, "Transfer-Encoding: chunked", body=chunked(NAMES)),
        [200],
    ),
    "a byte a chunk": (lambda: asked("POST", PREFIX_PATH, "Transfer-Encoding: chunked", body=chunked(NAMES)), [200]),
    "chunks without end": (
        lambda: asked("POST", PREFIX_PATH, "Transfer-Encoding: chunked", body=chunked(bytes(1 << 17), 64)),
        [413],
    ),
    "another encoding": (lambda: asked("POST", PREFIX_PATH, "Transfer-Encoding: gzip", body=NAMES), [501]),
    "a byte short": (lambda: asked("POST", PREFIX_PATH, LENGTH, body=NAMES[:-1]), []),
    "half a head": (lambda: asked("GET", BLOB)[:-2], []),
    "less than nothing": (lambda: asked("POST", PREFIX_PATH, "Content-Length: -1", body=NAMES), [400]),
    "a body where none belongs": (lambda: asked("GET", BLOB, LENGTH, body=NAMES), [200]),
    "a head is asked for": (lambda: asked("HEAD", BLOB), [404]),
    "a tunnel": (lambda: asked("CONNECT", "a:1"), [404]),
    "an upgrade": (lambda: asked("GET", BLOB, "Connection: upgrade", "Upgrade: h2c"), [200]),
    "wants to be told to go on": (lambda: asked("GET", BLOB, "Expect: 100-continue"), [200]),
    "two tokens, the last one wrong": (lambda: asked("GET", BLOB, "Authorization: Bearer x"), [401]),
    "other paths": (
        lambda: asked("GET", BLOB.upper()) + asked("GET", f"{BLOB}/../x") + asked("GET", f"{BLOB}%00"),
        [404] * 3,
    ),
    "HTTP of the future": (lambda: b"GET * HTTP/9.9\r\n\r\n", [401]),
    "HTTP/2": (lambda: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(4096), [401]),
}


@pytest.mark.parametrize("what", ODD)
def test_framing_that_is_odd_gets_one_answer_for_each_question(listener, strangers, clock, what):
    """Bytes of a body are never taken for a question, and no thread is left or ends with an error."""
    said, statuses = ODD[what]
    wire = strangers(says_tls=True)
    with contextlib.suppress(OSError):  # it may refuse before it has read all
        wire.sendall(said())
    heard = b""
    with contextlib.suppress(OSError):
        while part := wire.recv(1 << 16) if heard.count(b"HTTP/1.1 ") < len(statuses) else b"":
            heard += part
    wait_for(lambda: not listener._connections._open or tick(clock), "the thread's end")
    with contextlib.suppress(OSError):
        while part := wire.recv(1 << 16):
            heard += part
    assert [int(part[:3]) for part in heard.split(b"HTTP/1.1 ")[1:]] == statuses
    with peer_of(listener) as tier:
        assert read(tier) == CHAIN.blob(0).data


def tick(clock):
    """Let time go by until whoever waits has waited for too long; False."""
    clock.now_s += 1.0
    return False
