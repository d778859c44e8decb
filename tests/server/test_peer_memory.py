"""What one machine has in host memory alone, the engine of another loads through the door; and what becomes of that
when a reader, the door or the server stands still or dies in the middle of it.

Chunks are written to disk only when they are asked for a second time, so what a machine stored is in its memory alone.
"""

import fcntl
import os
import signal
import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.kit.server.clients import BLOCK, content, hello, refusal, tell
from tests.kit.server.machines import calls, door_pid, evict, fleet_key, listening, machine, tier, url_of
from tests.kit.server.probe import figures, server_pid, wait_for, wait_written
from tests.kit.server.processes import freeze, frozen, stopped_server
from tiered_kv.chunks.geometry import LayerPage
from tiered_kv.chunks.header import check_blob
from tiered_kv.errors import TierBusy, TierUnavailable
from tiered_kv.keys.naming import BlobName
from tiered_kv.server import door_memory
from tiered_kv.server import protocol as m
from tiered_kv.server.connect import read_message
from tiered_kv.server.connection import Connection
from tiered_kv.server.directory import read_info
from tiered_kv.server.door_memory import HostMemory
from tiered_kv.server.lending import NAMES_MAX
from tiered_kv.server.worker_client import receive_slabs
from tiered_kv.tiering.slots import SLOTS_PER_SLAB_MAX
from tiered_kv.tiers.object.medium import Deadline
from tiered_kv.tiers.peers.fleet_key import FleetKey
from tiered_kv.tiers.peers.peer import BLOBS_PATH, Peer

CHUNKS = 20
IN_MEMORY = {"disk_admission": "second-touch", "host_bytes": "16MiB"}

BIG = (LayerPage("layer.0", "BF16", (2, BLOCK, 32 << 10), "HNC"),)
"""Chunks of 8 MiB: more than a connection takes from who does not read."""

FEW_BIG = {"disk_admission": "second-touch", "host_bytes": "96MiB"}
PUSHED_OUT = 30
"""As many chunks push everything else out of such a memory, two times over."""


@pytest.fixture
def key_file(tmp_path):
    return fleet_key(tmp_path / "key")


@pytest.fixture
def producer(tmp_path, key_file):
    """A machine that gives what it has in memory."""
    with machine(tmp_path / "a", **listening(key_file, **IN_MEMORY)) as engine:
        yield engine


@pytest.fixture
def consumer(tmp_path, key_file, producer):
    """A machine that reads from the producer."""
    with machine(tmp_path / "b", peers=[url_of(producer)], peer_key_file=str(key_file)) as engine:
        yield engine


def counter(engine, name):
    return figures(engine.root)["counters"].get(name, 0)


def lent_bytes(engine):
    return figures(engine.root)["hierarchy"]["lent_bytes"]


def store(engine, count=CHUNKS, first_token=0):
    """Store a prompt without looking it up: that would be its second touch."""
    ready = figures(engine.root)["hierarchy"]["host_ready_chunks"]
    engine.store(count, first_token)
    wait_for(lambda: figures(engine.root)["hierarchy"]["host_ready_chunks"] == ready + count, "the seals")


def on_disk(engine):
    return tier(engine.root, "disk")["blobs"]


# -- what a peer has in memory -----------------------------------------------------------------------------------------


def test_a_prefix_that_is_in_another_machines_memory_alone_is_loaded(producer, consumer):
    store(producer)
    assert consumer.hits(CHUNKS + 5) == CHUNKS  # hits() compares every byte
    assert calls(consumer.root, "ok") == CHUNKS
    assert (counter(producer, "loans"), on_disk(producer)) == (CHUNKS, 0)
    assert counter(producer, "loans_refused") == counter(producer, "loans_overdue") == 0
    wait_for(lambda: lent_bytes(producer) == 0, "the loans' end")
    wait_written(consumer.root)
    assert on_disk(consumer) == CHUNKS, "what came from a peer is on this disk from now on"


def test_what_is_in_memory_and_what_is_on_disk_may_come_in_any_order(producer, consumer):
    store(producer)
    producer.wait_hits(CHUNKS)
    wait_for(lambda: on_disk(producer) == CHUNKS, "the writes")
    keys = producer.keys(CHUNKS).keys
    for key in (*keys[3:5], *keys[10:12]):
        (path,) = producer.root.rglob(f"{key.hex()}.safetensors")
        path.unlink()
    assert consumer.hits(CHUNKS) == CHUNKS
    assert counter(producer, "loans") == 4, "what is on disk costs the server nothing"


def test_what_was_evicted_from_memory_is_a_miss(producer, consumer):
    store(producer)
    assert evict(producer.root) == (CHUNKS, 0)
    assert consumer.hits(CHUNKS) == 0
    assert calls(consumer.root, "ok") == 0 and tier(consumer.root)["breaker"] == "closed"


def test_a_machine_without_a_disk_tier_gives_its_memory(tmp_path, key_file):
    """The bucket takes what is asked for twice, by whomever."""
    (tmp_path / "bucket").mkdir()
    shared = {"storage_uri": f"shared+file://{tmp_path / 'bucket'}", "storage_admission": "second-touch"}
    more = {"disk_bytes": None, "storage_timeout_s": 5.0, **shared}
    with machine(tmp_path / "a", **listening(key_file, **more), disk_path=None) as one:
        assert [row["name"] for row in figures(one.root)["tiers"]] == ["object"]
        store(one)
        takes = {"peers": [url_of(one)], "peer_key_file": str(key_file), "disk_path": str(tmp_path / "b"), **more}
        with machine(tmp_path / "b", **takes | {"disk_bytes": "160MiB"}) as other:
            assert other.hits(CHUNKS) == CHUNKS
            assert (calls(other.root, "ok"), calls(other.root, "ok", name="object")) == (CHUNKS, 0)
            assert counter(one, "loans") == CHUNKS
            blobs = (tmp_path / "bucket").rglob
            wait_for(lambda: len(list(blobs("*.safetensors"))) == CHUNKS, "the uploads")


def test_the_limit_of_what_a_machine_serves_counts_what_is_in_memory(tmp_path, key_file):
    given = listening(key_file, **IN_MEMORY, peer_serve_bytes_s=600)  # a chunk is a minute's
    with machine(tmp_path / "a", **given) as engine:
        store(engine)
        with peer_of(engine, key_file) as peer:
            assert read(peer, engine, 0) is not None
            with pytest.raises(TierBusy):
                read(peer, engine, 1)
            assert not peer.breaker.is_open
        assert counter(engine, "loans") == 1, "the server is not asked for what is not sent"


# -- when somebody stands still or dies in the middle ------------------------------------------------------------------


@contextmanager
def peer_of(engine, key_file):
    key = FleetKey.read(key_file)
    peer = Peer(url_of(engine), key, key.client_context(), time.monotonic)
    try:
        yield peer
    finally:
        peer.close()


def size_of(engine):
    """Bytes of a chunk's blob."""
    assert engine.client.info is not None
    return engine.client.info.slot_bytes


def read(peer, engine, index, first_token=0):
    """Read one chunk, unverified; its blob."""
    buffer = bytearray(size_of(engine))
    name = name_of(engine, index, first_token)
    with peer._guarded():
        return buffer if peer._read(name, memoryview(buffer), Deadline(10.0), lambda _: None) else None


def name_of(engine, index, first_token=0):
    return BlobName(engine.client.namespace.digest, engine.keys(index + 1, first_token).keys[index])


class Reader:
    """A client of a door that takes an answer as slowly as a test wants."""

    def __init__(self, engine, key_file, index=0):
        name = name_of(engine, index)
        key = FleetKey.read(key_file)
        host, _, port = engine.config.peer_listen.rpartition(":")
        plain = socket.socket()
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        plain.settimeout(20)
        plain.connect((host, int(port)))
        self.wire = key.client_context().wrap_socket(plain)
        target = f"{BLOBS_PATH}/{name.namespace.hex()}/{name.key.hex()}"
        token = key.token(time.time())
        self.wire.sendall(f"GET {target} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {token}\r\n\r\n".encode())
        head = b""
        while b"\r\n\r\n" not in head:
            head += self.wire.recv(1)
        assert head.startswith(b"HTTP/1.1 200 "), head
        self.size_bytes = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        self.body = bytearray()

    def take(self, upto_bytes):
        """Read the body up to there, or as far as it comes; says whether it came."""
        while len(self.body) < upto_bytes:
            try:
                part = self.wire.recv(min(64 << 10, upto_bytes - len(self.body)))
            except (ssl.SSLError, ConnectionError):
                return False
            if not part:
                return False
            self.body += part
        return True

    def close(self):
        self.wire.close()


@pytest.fixture
def big(tmp_path, key_file):
    """A machine with few large chunks in memory, whose loans last."""
    with machine(tmp_path / "a", pages=BIG, **listening(key_file, **FEW_BIG, peer_timeout_s=120.0)) as engine:
        store(engine, 2)
        yield engine


@pytest.fixture
def hasty(tmp_path, key_file):
    """The same, but nobody may take longer than half a second for one."""
    with machine(tmp_path / "a", pages=BIG, **listening(key_file, **FEW_BIG, peer_timeout_s=0.5)) as engine:
        store(engine, 2)
        yield engine


@contextmanager
def reader(engine, key_file):
    """Somebody who has taken the first 64 KiB of a chunk."""
    one = Reader(engine, key_file)
    try:
        assert one.size_bytes == size_of(engine) and one.take(64 << 10)
        yield one
    finally:
        one.close()


def push_out(engine, first_token=77):
    """Fill memory with other chunks, two times over."""
    engine.store(PUSHED_OUT, first_token)
    assert on_disk(engine) == 0


def assert_is_a_part(engine, body, index=0):
    """Every byte of a payload that came is the chunk's."""
    offset = engine.client.info.payload_offset
    expected = content(index, pages=BIG)
    assert body[offset:] == expected[: max(0, len(body) - offset)]


def test_a_chunk_stays_as_it_is_while_it_is_lent_whatever_else_wants_its_slot(big, key_file):
    with reader(big, key_file) as slow:
        assert lent_bytes(big) == slow.size_bytes
        push_out(big)
        assert evict(big.root)[1] >= 1, "an operator removes what is not lent"
        push_out(big, first_token=5000)
        assert slow.take(slow.size_bytes)
        check_blob(memoryview(slow.body))
        assert_is_a_part(big, slow.body)
    wait_for(lambda: lent_bytes(big) == 0, "the loan's end")
    assert counter(big, "loans_overdue") == 0


def test_a_reset_in_the_middle_leaves_what_is_lent_as_it_is(big, key_file):
    with reader(big, key_file) as slow:
        namespace = big.client.namespace.digest
        big.client.reset()
        wait_for(lambda: not big.client.poll() and big.client.is_ready, "the reset")
        assert big.client.namespace.digest != namespace
        push_out(big)
        assert slow.take(slow.size_bytes)
        check_blob(memoryview(slow.body))
        assert_is_a_part(big, slow.body)


@pytest.mark.parametrize("trickles", [False, True], ids=["frozen", "trickling"])
def test_a_slow_reader_loses_its_chunk_and_gets_no_byte_of_another(hasty, key_file, trickles):
    with reader(hasty, key_file) as slow:

        def is_over():
            if trickles:
                slow.take(len(slow.body) + 16)
            return lent_bytes(hasty) == 0 and counter(hasty, "loans_overdue") == 1

        wait_for(is_over, "the loan's end")
        push_out(hasty)
        assert not slow.take(slow.size_bytes), "the rest of it is gone"
        assert_is_a_part(hasty, slow.body)
    with peer_of(hasty, key_file) as peer:
        assert read(peer, hasty, PUSHED_OUT - 1, 77) is not None, "the door goes on"


def test_a_door_that_stands_still_keeps_no_memory_and_sends_nothing_of_it_later(hasty, key_file):
    door = door_pid(hasty.root)
    with reader(hasty, key_file) as slow:
        with frozen(door):
            wait_for(lambda: lent_bytes(hasty) == 0, "the loan's end")
            push_out(hasty)
        assert not slow.take(slow.size_bytes)
        assert_is_a_part(hasty, slow.body)
    assert door_pid(hasty.root) == door


def test_the_loans_of_a_door_that_is_killed_end_with_it(big, key_file):
    with reader(big, key_file) as slow:
        os.kill(door_pid(big.root), signal.SIGKILL)
        wait_for(lambda: lent_bytes(big) == 0, "the loan's end")
        push_out(big)
        assert not slow.take(slow.size_bytes)
        assert_is_a_part(big, slow.body)

    def is_open_again():
        with peer_of(big, key_file) as peer:
            try:
                return read(peer, big, PUSHED_OUT - 1, 77) is not None
            except TierUnavailable:
                return False

    wait_for(is_open_again, "the next door")


@pytest.mark.parametrize("is_frozen", [False, True], ids=["runs", "stands still"])
def test_a_door_ends_with_a_server_that_is_killed(big, key_file, is_frozen):
    door = door_pid(big.root)
    with reader(big, key_file) as slow:
        if is_frozen:
            freeze(door)
        os.kill(server_pid(big.root), signal.SIGKILL)
        wait_for(lambda: not Path(f"/proc/{door}").exists(), "the door's end")
        assert not slow.take(slow.size_bytes)
        assert_is_a_part(big, slow.body)
    big.wait_lost()
    big.rejoin()  # the next server does not wait for the memory of the first
    store(big, 2, first_token=9)


def test_a_server_that_stands_still_costs_what_is_in_memory_and_nothing_else(producer, key_file):
    store(producer)
    producer.wait_hits(8)
    wait_for(lambda: on_disk(producer) == 8, "the writes")
    names = [name_of(producer, index) for index in range(CHUNKS)]
    with peer_of(producer, key_file) as peer:
        assert peer.count_held(names, Deadline(5.0)) == CHUNKS
        with stopped_server(producer.root):
            assert peer.count_held(names, Deadline(0.5)) == 8
            assert read(peer, producer, 0) is not None
            with pytest.raises(TierBusy):
                read(peer, producer, 10)
            assert not peer.breaker.is_open
        wait_for(lambda: peer.count_held(names, Deadline(5.0)) == CHUNKS, "the server")
        assert read(peer, producer, 10) is not None
    wait_for(lambda: lent_bytes(producer) == 0, "the end of what was lent too late")


def test_a_server_that_nobody_uses_ends_though_its_door_is_there(tmp_path, key_file):
    with machine(tmp_path / "a", **listening(key_file, **IN_MEMORY)) as engine:
        pid, door = server_pid(engine.root), door_pid(engine.root)
        engine.close()
        wait_for(lambda: not Path(f"/proc/{pid}").exists(), "the server's end")
        assert not Path(f"/proc/{door}").exists()
        assert not list(engine.root.glob("arena-*.lock"))


# -- the socket between door and server --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lender(tmp_path_factory):
    """A machine with a prompt in memory, whose server all of these talk to."""
    directory = tmp_path_factory.mktemp("lender")
    with machine(directory / "a", **listening(fleet_key(directory / "key"), **IN_MEMORY)) as engine:
        store(engine)
        yield engine


@contextmanager
def joined(engine):
    """A connection in a door's place, and the descriptors that it got."""
    with hello(engine.config, "door") as sock:
        tell(sock, m.JoinDoor())
        slabs = receive_slabs(sock, len(engine.worker.arena.slab_fds))
        try:
            yield sock, slabs
        finally:
            for slab in slabs:
                os.close(slab)


def test_a_door_gets_memory_that_it_can_only_read(lender):
    key = lender.keys(1).keys[0]
    with joined(lender) as (sock, slabs):
        tell(sock, m.Borrow(1, lender.client.namespace.digest, key))
        lent = read_message(sock)
        assert isinstance(lent, m.Lent) and lent.outcome == "ok"
        slab, index = divmod(lent.slot, SLOTS_PER_SLAB_MAX)
        place = index * lent.size_bytes
        blob = os.pread(slabs[slab], lent.size_bytes, place)
        assert check_blob(memoryview(blob)).header.record.key == key
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(slabs[slab], b"x", place)
        tell(sock, m.Repay(1), m.Repay(1), m.Repay(2))
        wait_for(lambda: lent_bytes(lender) == 0, "the loan's end")


def test_a_door_that_reads_late_gets_the_memory_all_the_same(lender):
    """Its socket is full when the arena is sent: what is lent then has to be there when it reads."""
    waiting = 3000
    with hello(lender.config, "door") as sock:
        for _ in range(waiting):
            tell(sock, m.HeldRequest(1, bytes(16), bytes(16)))
        tell(sock, m.JoinDoor())
        with hello(lender.config) as other:  # told after all that came before it
            for _ in range(waiting // 10):
                tell(other, m.StatRequest())
                assert isinstance(read_message(other), m.Stat)
        for _ in range(waiting):
            assert isinstance(read_message(sock), m.Held)
        slabs = receive_slabs(sock, len(lender.worker.arena.slab_fds))
        try:
            assert [os.fstat(slab).st_ino for slab in slabs] == [
                os.fstat(fd).st_ino for fd in lender.worker.arena.slab_fds
            ]
            assert all(fcntl.fcntl(slab, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY for slab in slabs)
        finally:
            for slab in slabs:
                os.close(slab)


def test_a_door_is_told_what_is_not_there_and_how_much_is(lender):
    namespace, keys = lender.client.namespace.digest, lender.keys(CHUNKS + 3).keys
    with joined(lender) as (sock, _):
        tell(sock, m.Borrow(1, namespace, keys[CHUNKS]), m.Borrow(2, bytes(16), keys[0]))
        assert [read_message(sock), read_message(sock)] == [m.Lent(1, "missing"), m.Lent(2, "missing")]
        tell(sock, m.HeldRequest(7, namespace, b"".join(keys)), m.HeldRequest(8, namespace, b""))
        assert [read_message(sock), read_message(sock)] == [m.Held(7, CHUNKS), m.Held(8, 0)]


def test_questions_without_end_are_answered_none_until_the_loop_has_rested(lender):
    """Chunks are named more than once in them: looked up they are all the same."""
    namespace, keys = lender.client.namespace.digest, lender.keys(CHUNKS).keys
    question = b"".join(keys) * (NAMES_MAX // CHUNKS)
    everything = len(question) // 16
    with joined(lender) as (sock, _):

        def ask(number):
            tell(sock, m.HeldRequest(number, namespace, question))
            return read_message(sock).count

        wait_for(lambda: ask(0) == everything, "a rested loop")
        refused = counter(lender, "peer_questions_refused")
        tell(sock, *(m.HeldRequest(number, namespace, question) for number in range(200)))  # all of them at once
        told = [read_message(sock).count for _ in range(200)]
        assert set(told) == {0, everything}
        wait_for(lambda: counter(lender, "peer_questions_refused") - refused == told.count(0), "the figures")
        tell(sock, m.Borrow(1, namespace, keys[0]))
        assert read_message(sock).outcome == "ok", "what was promised is lent"
        tell(sock, m.Repay(1))
        wait_for(lambda: ask(0) == everything, "a rested loop")


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([m.Borrow(1, bytes(16), bytes(16))], "a door joins first"),
        ([m.Repay(1)], "a door joins first"),
        ([m.JoinDoor(), m.Borrow(1, b"", bytes(16))], "bad loan. namespace=0 key=16"),
        ([m.JoinDoor(), m.Borrow(1, bytes(16), bytes(17))], "bad loan. namespace=16 key=17"),
        ([m.JoinDoor(), m.JoinDoor()], "a connection joins once"),
        ([m.HeldRequest(1, bytes(16), bytes(15))], "bad question. keys=15"),
        ([m.HeldRequest(1, bytes(15), bytes(16))], "bad question. keys=16 namespace=15"),
        ([m.HeldRequest(1, bytes(16), bytes(16 * (NAMES_MAX + 1)))], "bad question"),
        ([m.JoinWorker(0, 1, 16, 64, b"{}", [])], "a client of role door may not send JoinWorker"),
    ],
)
def test_a_door_that_breaks_the_protocol_is_told_why(lender, messages, expected):
    with hello(lender.config, "door") as sock:
        tell(sock, *messages)
        while isinstance(answer := read_message(sock), m.Slabs):
            pass
        assert isinstance(answer, m.Refused) and expected in answer.reason


def test_only_a_door_borrows(lender):
    with hello(lender.config, "admin") as sock:
        tell(sock, m.Borrow(1, bytes(16), bytes(16)))
        assert "may not send Borrow" in refusal(sock)


def test_a_loan_whose_number_is_in_use_is_refused_and_all_loans_end(lender):
    namespace, keys = lender.client.namespace.digest, lender.keys(2).keys
    with joined(lender) as (sock, _):
        tell(sock, m.Borrow(1, namespace, keys[0]), m.Borrow(1, namespace, keys[1]))
        assert read_message(sock).outcome == "ok"
        assert "id=1 is in use" in refusal(sock)
    wait_for(lambda: lent_bytes(lender) == 0, "the loan's end")


def test_a_door_of_another_version_asks_its_server_ever_more_rarely(lender, monkeypatch, caplog):
    """A package that was replaced below a running server: each try is a line in the server's log."""
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 9:
            raise InterruptedError

    memory = HostMemory(read_info(lender.root).socket, lender.root)
    with monkeypatch.context() as patched:
        patched.setattr(m, "PROTOCOL", m.PROTOCOL + 1)
        patched.setattr(door_memory.time, "sleep", sleep)
        with pytest.raises(InterruptedError):
            memory.run()
    assert waits == sorted(waits) and waits[0] < waits[-1] == door_memory.RETRY_MAX_S
    assert caplog.text.count("until its server takes it in") == 1


def test_a_connection_ends_though_another_process_has_its_descriptor_for_a_moment():
    """As one that is just being started: what is read from a slot after its loan is over must not count."""
    ours, theirs = socket.socketpair()
    with theirs, ours.dup():
        Connection(ours).close()
        theirs.setblocking(False)
        assert theirs.recv(1) == b""


def test_who_asks_while_too_much_is_lent_has_the_chunk_when_another_loan_ends(big, monkeypatch):
    """A reader asks for some chunks at once, and where memory holds few of them one is all that may be lent."""
    monkeypatch.setattr(door_memory, "ROOM_S", 60.0)
    memory = HostMemory(read_info(big.root).socket, big.root)
    threading.Thread(target=memory.run, daemon=True).start()
    namespace, keys = big.client.namespace.digest, big.keys(2).keys
    wait_for(lambda: memory.count_held(namespace, b"".join(keys)) == 2, "the door's place")

    def size_of_second():
        with memory.lent(namespace, keys[1]) as blob:
            return None if blob is None else blob.size_bytes

    with ThreadPoolExecutor(1) as other:
        with memory.lent(namespace, keys[0]) as blob:
            second = other.submit(size_of_second)
            wait_for(lambda: counter(big, "loans_refused") == 1, "the refusal")
        assert second.result() == blob.size_bytes
    wait_for(lambda: lent_bytes(big) == 0, "the loans' end")
    monkeypatch.setattr(door_memory, "ROOM_S", 0.01)
    with (
        memory.lent(namespace, keys[0]),
        pytest.raises(TierBusy, match="lends no more"),
        memory.lent(namespace, keys[1]),
    ):
        pass


def test_the_end_of_a_loan_is_told_with_the_next_question_or_soon_where_there_is_none(lender):
    memory = HostMemory(read_info(lender.root).socket, lender.root)
    threading.Thread(target=memory.run, daemon=True).start()
    namespace, keys = lender.client.namespace.digest, lender.keys(3).keys
    wait_for(lambda: memory.count_held(namespace, b"".join(keys)) == 3, "the door's place")
    with memory.lent(namespace, keys[0]) as first:
        with memory.lent(namespace, keys[1]):
            pass
        assert memory._repaid, "while another one is lent it waits"
        with memory.lent(namespace, keys[2]):
            assert not memory._repaid
            wait_for(lambda: lent_bytes(lender) == 2 * first.size_bytes, "the second one's end")
        wait_for(lambda: lent_bytes(lender) == first.size_bytes, "the third one's end, though nothing is asked for")
    wait_for(lambda: lent_bytes(lender) == 0, "the loans' end")
