"""The tier of peers against a real door over loopback TLS, and against peers that freeze, die, trickle and lie."""

import contextlib
import http.client
import os
import signal
import socket
import ssl
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.kit.fake_clock import FakeClock
from tests.kit.faults.false_peer import FalsePeer, body, head
from tests.kit.ports import free_port
from tests.kit.server.probe import wait_for
from tests.kit.server.processes import freeze
from tests.kit.storage.disk_probe import blob_path, open_disk
from tiered_kv.config import PEERS_MAX, Config
from tiered_kv.errors import CapacityExceeded, ChunkMismatch, Closed, ConfigError, TierUnavailable
from tiered_kv.location import parse_location
from tiered_kv.metrics.recorder import Recorder
from tiered_kv.server import door as door_module
from tiered_kv.server.door import DoorProcess
from tiered_kv.server.door_blobs import BURST_S, Budget
from tiered_kv.testing.blobs import SampleChain
from tiered_kv.testing.memory import MemoryTier
from tiered_kv.tiers.object.medium import Deadline
from tiered_kv.tiers.object.store import ObjectStore
from tiered_kv.tiers.open import open_tiers
from tiered_kv.tiers.peers.first import PeersFirst
from tiered_kv.tiers.peers.fleet_key import HOUR_S, FleetKey
from tiered_kv.tiers.peers.found import FIND_S, OLD_S, RECORD_S, DoorRecord, PeerFinder, door_url, own_urls
from tiered_kv.tiers.peers.peer import BLOBS_PATH, NAMES_MAX, PREFIX_PATH, Peer
from tiered_kv.tiers.peers.tier import PeersTier
from tiered_kv.tiers.wrappers.breaker import FAILURES_MAX, OPEN_FIRST_S, Breaker, GuardedTier

CHAIN = SampleChain(payload_bytes=1 << 20)
SIZE = CHAIN.form.blob_bytes
KEY = FleetKey(bytes(range(32)))


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "key"
    path.write_text(bytes(range(32)).hex() + "\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def directory(tmp_path):
    """A disk tier's directory with two blobs; nobody has it open."""
    tier = open_disk(tmp_path / "disk")
    for index in range(2):
        blob = CHAIN.blob(index)
        tier.put(blob.name, blob.view())
    tier.close()
    return tmp_path / "disk"


@pytest.fixture
def door(directory, key_file):
    process = DoorProcess(door_config(directory, key_file))
    yield process
    process.close()


def door_config(directory, key_file, **more):
    given = {"storage_uri": f"file://{directory}", "peer_listen": "127.0.0.1:0", "peer_key_file": str(key_file)}
    return Config.from_mapping(given | more)


@contextmanager
def peers(*urls, key=KEY, timeout_s=5.0, clock=time.monotonic, store=None, is_alone=True):
    context = key.client_context()
    each = []

    def connect(url):
        each.append(Peer(url, key, context, clock))
        return each[-1]

    finder = PeerFinder(urls, store)
    form = {CHAIN.namespace: CHAIN.form}.get
    limits = {"timeout_s": timeout_s, "io_concurrency": 4}
    tier = PeersTier(finder, connect, form, **limits, monotonic=clock, is_alone=is_alone)
    tier.each = each
    try:
        yield tier
    finally:
        tier.close()


def url(door):
    return f"https://127.0.0.1:{door.port}"


def read(tier, index=0, buffer=None):
    buffer = bytearray(SIZE) if buffer is None else buffer
    return bytes(buffer) if tier.get_into(CHAIN.name(index), memoryview(buffer)) else None


def is_read(tier, index):
    with contextlib.suppress(TierUnavailable):
        return read(tier, index) == CHAIN.blob(index).data
    return False


def ask(door, method="GET", path=None, token=None, context=None, body=None):
    """One request, by a client of its own: status and body."""
    connection = http.client.HTTPSConnection(
        "127.0.0.1", door.port, context=context or KEY.client_context(), timeout=10
    )
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        connection.request(method, path or blob_url(0), body=body, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def blob_url(index):
    name = CHAIN.name(index)
    return f"{BLOBS_PATH}/{name.namespace.hex()}/{name.key.hex()}"


# -- what a peer has ---------------------------------------------------------------------------------------------------


def test_a_blob_of_another_machines_disk_is_read_byte_for_byte(door):
    with peers(url(door)) as tier:
        for index in range(2):
            assert tier.contains(CHAIN.name(index))
            assert read(tier, index) == CHAIN.blob(index).data
        assert not tier.contains(CHAIN.name(2))
        assert read(tier, 2) is None


def test_one_question_tells_how_much_of_a_prefix_is_there(door, directory):
    names = [CHAIN.name(index) for index in range(NAMES_MAX)]
    with peers(url(door)) as tier:
        assert tier.traits.names_at_once == NAMES_MAX
        assert tier.count_held(names) == 2
        assert tier.count_held(names[:1]) == 1
        assert tier.count_held(names[2:]) == 0
        blob_path(directory, CHAIN.name(0)).unlink()
        assert tier.count_held(names) == 0, "a prefix ends at its first hole"


def test_what_one_peer_lacks_of_a_prefix_the_next_one_may_have(door, tmp_path, key_file):
    tier = open_disk(tmp_path / "rest")
    for index in (2, 3):
        blob = CHAIN.blob(index)
        tier.put(blob.name, blob.view())
    tier.close()
    rest = DoorProcess(door_config(tmp_path / "rest", key_file))
    try:
        with peers(url(door), url(rest)) as tier:
            assert tier.count_held([CHAIN.name(index) for index in range(6)]) == 4
            assert [read(tier, index) for index in range(4)] == [CHAIN.blob(index).data for index in range(4)]
    finally:
        rest.close()


def test_the_peer_that_is_hinted_at_is_asked_first(door):
    asked = []

    def has_none(wire):
        asked.append(wire)
        wire.sendall(head(1) + b"0")

    names = [CHAIN.name(0), CHAIN.name(1)]
    with FalsePeer(KEY, has_none) as other, peers(other.url, url(door)) as tier:
        assert tier.count_held(names, url(door)) == 2 and not asked
        assert tier.count_held(names, other.url) == 2 and len(asked) == 1, "a hint that is wrong costs a question"
        assert tier.count_held(names, "https://127.0.0.1:1") == 2 and len(asked) == 1, "nobody else is ever asked"


def test_a_blob_is_read_from_whom_said_to_have_it(door, tmp_path, key_file):
    """Not from who had something last: requests that find their prefixes at several peers run at the same time."""
    tier = open_disk(tmp_path / "rest")
    blob = CHAIN.blob(2)
    tier.put(blob.name, blob.view())
    tier.close()
    rest = DoorProcess(door_config(tmp_path / "rest", key_file))
    try:
        with peers(url(door), url(rest)) as tier:
            assert tier.count_held([CHAIN.name(0)]) == 1
            assert tier.count_held([CHAIN.name(2)]) == 1
            rest.close()
            assert read(tier, 0) == CHAIN.blob(0).data
            assert not tier.each[1].breaker.is_open, "the one that had something last was not asked"
    finally:
        rest.close()


# -- beside a bucket ---------------------------------------------------------------------------------------------------


class Counted(MemoryTier):
    """A bucket that counts its questions."""

    questions = 0

    def contains(self, name):
        self.questions += 1
        return super().contains(name)


@pytest.mark.parametrize("held", [0, 1, 2, 3, 5, 8, 13, 39, 40])
def test_a_prefix_of_a_bucket_is_counted_in_few_questions(held):
    chain, bucket = SampleChain(), Counted(is_shared=True)
    for index in range(held):
        blob = chain.blob(index)
        bucket.put(blob.name, blob.view())
    with FalsePeer(KEY, body(b"0")) as empty, peers(empty.url) as others:
        both = PeersFirst(others, bucket, others.is_promised)
        names = [chain.name(index) for index in range(40)]
        assert both.count_held(names) == held
        assert bucket.questions <= 1 + 2 * held.bit_length()
        assert both.traits.is_shared


def test_a_bucket_is_asked_for_what_follows_the_peers_part(door):
    bucket = Counted(is_shared=True)
    blob = CHAIN.blob(2)
    bucket.put(blob.name, blob.view())
    with peers(url(door)) as others:
        both, names = PeersFirst(others, bucket, others.is_promised), [CHAIN.name(index) for index in range(4)]
        assert both.count_held(names) == 3
        assert [both.contains(name) for name in names] == [False, False, True, False], "a peer's copy is no upload"
        assert [read(both, index) for index in range(4)] == [*(CHAIN.blob(index).data for index in range(3)), None]
        door.close()
        assert both.count_held(names[2:]) == 1, "it is asked although no peer answers"
        assert read(both, 2) == CHAIN.blob(2).data and read(both, 1) is None


def test_what_peers_promise_is_there_though_the_bucket_does_not_answer(door):
    bucket = GuardedTier(Silent(is_shared=True), breaker := Breaker(time.monotonic))
    names = [CHAIN.name(index) for index in range(4)]
    with peers(url(door)) as others:
        both = PeersFirst(others, bucket, others.is_promised)
        for _ in range(FAILURES_MAX + 1):
            assert both.count_held(names) == 2
            assert [read(both, index) for index in range(2)] == [CHAIN.blob(index).data for index in range(2)]
        assert breaker.is_open, "the bucket's breaker hears of its own failures"
        with pytest.raises(TierUnavailable):
            both.count_held(names[2:])


class Silent(MemoryTier):
    """A bucket that does not answer."""

    def contains(self, name):
        raise TierUnavailable("no answer")


def test_a_peer_that_is_frozen_after_its_promise_leaves_the_read_to_the_bucket():
    bucket = Counted(is_shared=True)
    blob = CHAIN.blob(0)
    bucket.put(blob.name, blob.view())
    asked = []

    def promises_and_freezes(wire):
        asked.append(wire)
        if len(asked) == 1:
            body(b"1")(wire)
        else:
            time.sleep(2.0)
            wire.sendall(head(SIZE) + bytes(SIZE))

    with FalsePeer(KEY, promises_and_freezes) as frozen, peers(frozen.url) as others:
        both = PeersFirst(others, bucket, others.is_promised)
        assert both.count_held([CHAIN.name(0)]) == 1 and bucket.questions == 0
        buffer = bytearray(SIZE)
        assert both.get_into(CHAIN.name(0), memoryview(buffer)) and bytes(buffer) == blob.data
        time.sleep(2.0)  # until the peer has thawed
        assert bytes(buffer) == blob.data and len(asked) == 2, "a late answer reaches nothing"


# -- where peers are ---------------------------------------------------------------------------------------------------


def look(tier):
    """A flush, and the end of the look that it may have begun."""
    tier.flush()
    if tier._look is not None:
        tier._look.join()


@pytest.fixture
def store(tmp_path):
    (tmp_path / "bucket").mkdir()
    made = ObjectStore(parse_location(f"shared+file://{tmp_path / 'bucket'}"))
    yield made
    made.close()


@pytest.fixture
def listens(store, tmp_path):
    """Have it stand in the bucket that a door listens there."""

    def record(address, age_s=0.0):
        store.put(f"_tiered_kv/peers/{address}", b"")
        path = tmp_path / "bucket/_tiered_kv/peers" / address
        os.utime(path, (time.time() - age_s,) * 2)
        return path

    return record


def test_machines_of_a_bucket_find_each_other(door, store):
    clock = FakeClock()
    listening = DoorRecord(MemoryTier(), store, lambda: url(door), clock.monotonic)
    with peers("bucket", store=store, clock=clock.monotonic) as tier:
        look(tier)
        assert not tier.contains(CHAIN.name(0)) and not tier.each, "nobody listens, which is no failure"
        listening.flush()
        look(tier)
        assert not tier.each, "a bucket is listed now and then only"
        clock.advance(FIND_S)
        look(tier)
        assert tier.contains(CHAIN.name(0)) and read(tier) == CHAIN.blob(0).data
        listening.close()
        clock.advance(FIND_S)
        look(tier)
        assert not tier.is_promised(CHAIN.name(0)) and not tier.contains(CHAIN.name(0)) and read(tier) is None


def test_a_door_is_recorded_again_and_again_and_a_record_that_is_not_ends(store, listens):
    clock = FakeClock()
    listening = DoorRecord(MemoryTier(), store, lambda: "https://10.0.0.7:7460", clock.monotonic)
    listening.flush()
    path = listens("10.0.0.7:7460", age_s=OLD_S + 60)
    listening.flush()
    assert path.stat().st_mtime < time.time() - OLD_S, "it is not written at every flush"
    clock.advance(RECORD_S)
    listening.flush()
    assert PeerFinder(["bucket"], store).find([]) == ["https://10.0.0.7:7460"]
    listens("10.0.0.7:7460", age_s=OLD_S + 60)
    listens("10.0.0.8:7460")
    found = PeerFinder(["bucket"], store).find([])
    assert found == ["https://10.0.0.8:7460"] and path.exists(), "a reader removes nothing"


def test_a_door_whose_address_changes_is_recorded_at_the_new_one(store):
    """A server that began before its machine's network, or whose machine got another address."""
    clock, now = FakeClock(), ["https://127.0.0.1:7460"]
    listening = DoorRecord(MemoryTier(), store, lambda: now[0], clock.monotonic)
    listening.flush()
    now[0] = "https://10.0.0.7:7460"
    clock.advance(FIND_S)
    listening.flush()
    assert PeerFinder(["bucket"], store).find([]) == ["https://10.0.0.7:7460"]
    listening.close()
    assert PeerFinder(["bucket"], store).find([]) == []


def test_old_records_are_told_by_the_stores_clock_and_removed_by_who_listens(store, listens):
    """A machine whose clock is wrong, or that may only read, takes nobody's record for old."""
    hours_s = 3600.0
    young = [listens("10.0.0.1:1", age_s=50 * hours_s), listens("10.0.0.2:1", age_s=51 * hours_s)]
    old = listens("10.0.0.3:1", age_s=53 * hours_s)
    assert sorted(PeerFinder(["bucket"], store).find([])) == ["https://10.0.0.1:1", "https://10.0.0.2:1"]
    assert old.exists()
    DoorRecord(MemoryTier(), store, lambda: "https://10.0.0.7:7460", FakeClock().monotonic).flush()
    assert not any(path.exists() for path in [*young, old])
    assert PeerFinder(["bucket"], store).find([]) == ["https://10.0.0.7:7460"]


@pytest.mark.parametrize(
    "name",
    [
        "x",
        "a:b",
        "u@h:1",
        "h:1/p",
        "h:99999",
        "h:0",
        "h:1?q",
        "h h:1",
        "é:1",
        "h:1 ",
        "a..b:1",
        ".a:1",
        "[::::]:1",
        "[fe80::1%1]:1",
        "a" * 64 + ":1",
        "-a:1",
    ],
)
def test_what_is_no_address_in_a_bucket_is_no_peer(store, listens, tmp_path, name):
    listens("10.0.0.8:7460")
    path = tmp_path / "bucket/_tiered_kv/peers" / name  # as somebody else would write it
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.utime(path, (0, 0))
    assert PeerFinder(["bucket"], store).find([]) == ["https://10.0.0.8:7460"]
    assert path.exists(), "whosever it is, it is not ours"


def test_this_machines_own_door_is_no_peer(store, listens):
    own = own_urls("0.0.0.0:7460")
    listens(own[0].removeprefix("https://"))
    listens("10.0.0.8:7460")
    assert PeerFinder(["bucket"], store, lambda: own).find([]) == ["https://10.0.0.8:7460"]
    assert PeerFinder(["dns://127.0.0.1:7460"], None, lambda: own_urls("127.0.0.1:7460")).find([]) == []
    assert door_url("0.0.0.0:7460")() == own[0] and door_url("0.0.0.0:7460", "https://a:1")() == "https://a:1"
    assert door_url("10.0.0.7:7460")() == "https://10.0.0.7:7460"
    assert own_urls("node-a:7460") == ["https://node-a:7460"] and own_urls("[::1]:7460") == ["https://[::1]:7460"]


@pytest.mark.parametrize("host", ["localhost", "[0:0::1]"])
def test_a_machine_that_listens_under_a_name_finds_itself_by_its_address(host):
    places = [f"dns://{one}:7460" for one in ("127.0.0.1", "[::1]")]
    found = PeerFinder(places, None, lambda: own_urls(f"{host}:7460")).find([])
    assert f"https://{'127.0.0.1' if host == 'localhost' else '[::1]'}:7460" not in found


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="a machine without IPv6")
@pytest.mark.parametrize("host", ["[::]", "[0::0]"])
def test_a_door_that_listens_at_every_address_is_reached_where_it_says(directory, key_file, host):
    door = DoorProcess(door_config(directory, key_file, peer_listen=f"{host}:0"))
    with contextlib.closing(door), peers(own_urls(f"{host}:{door.port}")[0], url(door)) as tier:
        said, by_ipv4 = tier.each
        assert said.count_held([CHAIN.name(0)], Deadline(5.0)) == 1
        assert by_ipv4.count_held([CHAIN.name(0)], Deadline(5.0)) == 1


def test_a_look_that_hangs_holds_up_no_flush_of_the_bucket(monkeypatch):
    """A resolver has no deadline; a bucket's keeper has."""
    is_over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: is_over.wait() and [])
    with peers("dns://slow:1") as others:
        bucket = Flushed()
        both = PeersFirst(others, bucket, others.is_promised)
        for _ in range(3):
            both.flush()
        assert bucket.flushes == 3 and others._look.is_alive()
        is_over.set()
        others._look.join()


class Flushed(MemoryTier):
    flushes = 0

    def flush(self):
        self.flushes += 1


def test_peers_that_are_left_alone_hide_nobody(door):
    dead = [f"https://127.0.0.1:{port}" for port in range(1, PEERS_MAX + 1)]
    with peers(*dead, url(door)) as tier:
        for _ in range(PEERS_MAX):
            with contextlib.suppress(TierUnavailable):
                tier.count_held([CHAIN.name(0)])
        assert tier.count_held([CHAIN.name(0)]) == 1 and read(tier) == CHAIN.blob(0).data


def test_a_promise_that_was_not_kept_is_forgotten(door):
    """And before a bucket nobody but who promised is asked."""
    asked = []

    def promises_and_has_none(wire):
        asked.append(wire)
        wire.sendall(head(1) + b"1" if len(asked) == 1 else b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")

    with FalsePeer(KEY, promises_and_has_none) as other, peers(other.url, url(door), is_alone=False) as tier:
        assert tier.count_held([CHAIN.name(0)]) == 1 and tier.is_promised(CHAIN.name(0))
        assert read(tier) is None and not tier.is_promised(CHAIN.name(0)) and len(asked) == 2


def test_a_late_answer_does_not_take_back_a_newer_promise():
    """The peer stored the blob between a read that it answers late and the question that follows the read."""
    is_asked, may_answer = threading.Event(), threading.Event()
    asked = []

    def stores_it_late(wire):
        asked.append(wire)
        if len(asked) == 2:  # the first read
            is_asked.set()
            may_answer.wait(10)
            wire.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        else:
            body(CHAIN.blob(0).data if len(asked) == 4 else b"1")(wire)

    with FalsePeer(KEY, stores_it_late) as other, peers(other.url, is_alone=False, timeout_s=15.0) as tier:
        assert tier.count_held([CHAIN.name(0)]) == 1
        with ThreadPoolExecutor(1) as thread:
            late = thread.submit(read, tier)
            assert is_asked.wait(10)
            assert tier.count_held([CHAIN.name(0)]) == 1
            may_answer.set()
            assert late.result() is None
        assert tier.is_promised(CHAIN.name(0)), "a newer promise was forgotten"
        assert read(tier) == CHAIN.blob(0).data


def test_a_peer_that_is_gone_is_not_remembered(door, store, listens):
    clock = FakeClock()
    record = listens(f"127.0.0.1:{door.port}")
    listens("127.0.0.1:1")
    with peers("bucket", store=store, clock=clock.monotonic) as tier:
        look(tier)
        (gone,) = [peer for peer in tier.each if peer.url == url(door)]
        record.unlink()
        clock.advance(FIND_S)
        look(tier)
        tier._remember(gone, [CHAIN.name(0)])  # an answer that was under way
        assert not tier.is_promised(CHAIN.name(0))


def test_every_address_of_a_name_is_a_peer(door):
    with peers(f"dns://localhost:{door.port}") as tier:
        look(tier)
        assert f"https://127.0.0.1:{door.port}" in [peer.url for peer in tier.each]
        assert tier.contains(CHAIN.name(0)) and read(tier) == CHAIN.blob(0).data


def test_of_a_name_that_does_not_resolve_the_machines_that_were_found_stay(caplog):
    finder = PeerFinder(["dns://name.invalid:7460", "https://b:1"], None)
    assert finder.find(["https://10.0.0.8:7460"]) == ["https://10.0.0.8:7460", "https://b:1"]
    assert "dns://name.invalid:7460" in caplog.text


def test_machines_in_the_place_of_all_that_were_known_are_found(door, key_file, tmp_path, monkeypatch):
    """In Kubernetes a machine that starts anew has another address: nobody answers at those that the name had."""
    addresses = ["127.0.0.9"]
    resolve = socket.getaddrinfo

    def named(host, *rest, **more):
        hosts = addresses if host == "machines" else [host]
        return [entry for one in hosts for entry in resolve(one, *rest, **more)]

    monkeypatch.setattr(socket, "getaddrinfo", named)
    given = {"storage_uri": f"file://{tmp_path / 'own'}", "peers": [f"dns://machines:{door.port}"]}
    config = Config.from_mapping(given | {"peer_key_file": str(key_file), "disk_bytes": "1GiB"})
    clock, forms = FakeClock(), {CHAIN.namespace: CHAIN.form}
    disk, others = open_tiers(config, forms.get, Recorder(), clock.monotonic)
    with contextlib.closing(disk.tier), contextlib.closing(others.tier):
        others.tier.flush()
        others.trial._look.join()
        for _ in range(FAILURES_MAX):
            with pytest.raises(TierUnavailable):
                others.tier.contains(CHAIN.name(0))
        assert others.breaker.is_open
        addresses[:] = ["127.0.0.1"]
        clock.advance(FIND_S)
        others.tier.flush()
        others.trial._look.join()
        assert others.trial.contains(CHAIN.name(0)), "its trials ask machines that are no more, for ever"


def test_no_more_than_sixteen_of_many_are_asked_and_a_hint_reaches_the_others(door, store, listens):
    """Each machine asks others than its neighbours do, so that together they ask all."""
    for number in range(40):
        listens(f"127.0.0.1:{number + 1}")
    listens(f"127.0.0.1:{door.port}")
    with peers("bucket", store=store) as tier:
        look(tier)
        with contextlib.suppress(TierUnavailable):
            tier.count_held([CHAIN.name(0)])
        assert len(tier.each) == 41 and sum(peer.breaker.is_open for peer in tier.each) <= PEERS_MAX
        assert tier.count_held([CHAIN.name(0)], url(door)) == 1 and read(tier) == CHAIN.blob(0).data
    orders = {tuple(PeerFinder(["bucket"], store).find([])) for _ in range(5)}
    assert len(orders) > 1


@pytest.mark.parametrize(
    "count", [b"3", b"-1", b"", b"two", b"9" * 5000], ids=["too many", "negative", "", "a", "long"]
)
def test_a_peer_that_counts_wrongly_is_left_alone(count, monkeypatch):
    monkeypatch.setattr("tiered_kv.tiers.peers.tier.QUESTION_S", 10.0)  # a busy machine is no peer's fault
    with FalsePeer(KEY, body(count)) as liar, peers(liar.url) as tier:
        with pytest.raises(TierUnavailable, match="nonsense"):
            tier.count_held([CHAIN.name(0), CHAIN.name(1)])
        assert tier.each[0].breaker.is_open


def test_a_peer_that_promises_what_it_has_not_costs_a_miss():
    def promises(wire):
        text = b"2"
        wire.sendall(head(len(text)) + text)

    with FalsePeer(KEY, promises) as liar, peers(liar.url) as tier:
        assert tier.count_held([CHAIN.name(0), CHAIN.name(1)]) == 2
        assert read(tier, 0) is None


@pytest.mark.parametrize("length", [0, 16, 31, 33, 16 * (2 + NAMES_MAX)])
def test_a_question_of_another_form_is_refused(door, length):
    assert ask(door, "POST", PREFIX_PATH, KEY.token(time.time()), body=bytes(length))[0] == 400


def test_nothing_is_ever_written_deleted_or_listed(door, directory):
    before = sorted(path for path in directory.rglob("*") if path.is_file())
    with peers(url(door)) as tier:
        blob = CHAIN.blob(2)
        with pytest.raises(CapacityExceeded, match="read only"):
            tier.put(blob.name, blob.view())
        assert not tier.delete(CHAIN.name(0))
        assert list(tier.scan()) == []
        assert tier.usage().blob_count == 0
    assert sorted(path for path in directory.rglob("*") if path.is_file()) == before


def test_a_closed_tier_refuses(door):
    with peers(url(door)) as tier:
        assert tier.contains(CHAIN.name(0))
    with pytest.raises(Closed):
        tier.contains(CHAIN.name(0))


def test_a_namespace_that_is_not_known_here_is_not_asked_for(door):
    other = SampleChain(seed=1).blob(0)
    with peers(url(door)) as tier, pytest.raises(ChunkMismatch, match="no format is known"):
        tier.get_into(other.name, memoryview(bytearray(len(other.data))))


def test_the_peer_that_had_something_is_asked_first_next_time(door, tmp_path, key_file):
    open_disk(tmp_path / "empty").close()
    empty = DoorProcess(door_config(tmp_path / "empty", key_file))
    try:
        with peers(url(empty), url(door)) as tier:
            assert tier.contains(CHAIN.name(0))
            empty.close()
            assert read(tier, 0) == CHAIN.blob(0).data
            assert not tier.each[0].breaker.is_open, "the empty one was asked again"
    finally:
        empty.close()


# -- who may ask, and for what -----------------------------------------------------------------------------------------


def test_only_a_token_of_this_hour_opens_the_door(door):
    now_s = time.time()
    assert ask(door, token=KEY.token(now_s)) == (200, CHAIN.blob(0).data)
    stranger = FleetKey(bytes(32))
    for token in (None, "", "00", KEY.token(now_s - 3 * HOUR_S), KEY.token(now_s + 3 * HOUR_S), stranger.token(now_s)):
        assert ask(door, token=token) == (401, b"")
    assert ask(door, path="/", token=None)[0] == 401, "not even what is not there is told without a token"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("GET", BLOBS_PATH),
        ("GET", f"{BLOBS_PATH}/{CHAIN.namespace.hex()}"),
        ("GET", f"{BLOBS_PATH}/{CHAIN.namespace.hex()}/"),
        ("GET", f"{BLOBS_PATH}/{CHAIN.namespace.hex()}/{CHAIN.key(0).hex()[:-1]}"),
        ("GET", f"{BLOBS_PATH}/{CHAIN.namespace.hex()}/{CHAIN.key(0).hex().upper()}"),
        ("GET", f"{BLOBS_PATH}/{CHAIN.namespace.hex()}/{CHAIN.key(0).hex()}.safetensors"),
        ("GET", f"{BLOBS_PATH}/../tiered_kv.json"),
        ("GET", f"{BLOBS_PATH}/%2e%2e/%2e%2e/tiered_kv.json"),
        ("PUT", blob_url(0)),
        ("POST", blob_url(0)),
        ("HEAD", blob_url(0)),
        ("GET", PREFIX_PATH),
        ("POST", f"{PREFIX_PATH}/"),
        ("DELETE", blob_url(0)),
        ("OPTIONS", blob_url(0)),
    ],
)
def test_everything_but_a_named_blob_is_refused(door, directory, method, path):
    status, answer = ask(door, method, path, KEY.token(time.time()))
    assert status in (404, 405)
    assert CHAIN.key(0).hex().encode() not in answer
    assert blob_path(directory, CHAIN.name(0)).exists()


def test_a_link_in_a_blobs_place_is_not_followed(door, directory, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    place = blob_path(directory, CHAIN.name(0))
    place.unlink()
    place.symlink_to(secret)
    assert ask(door, token=KEY.token(time.time()))[0] == 404


def test_a_door_of_another_fleet_is_not_believed(door):
    stranger = FleetKey(bytes(32))
    with pytest.raises(ssl.SSLCertVerificationError):
        ask(door, token=KEY.token(time.time()), context=stranger.client_context())
    with peers(url(door), key=stranger) as tier, pytest.raises(TierUnavailable, match="certificate"):
        tier.contains(CHAIN.name(0))


def test_every_machine_makes_the_same_certificate_of_the_key():
    again = FleetKey(bytes(range(32)))
    context = again.server_context()
    assert context.minimum_version == ssl.TLSVersion.TLSv1_3
    assert KEY.client_context().get_ca_certs(binary_form=True) == again.client_context().get_ca_certs(binary_form=True)


@pytest.mark.parametrize(
    ("content", "mode", "what"),
    [("ab" * 32, 0o640, "others may use"), ("ab" * 31, 0o600, "64 hex digits"), ("x" * 64, 0o600, "64 hex digits")],
)
def test_a_key_that_cannot_be_used_is_named(tmp_path, content, mode, what):
    path = tmp_path / "key"
    path.write_text(content)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=what):
        FleetKey.read(path)
    with pytest.raises(ConfigError, match="openssl rand"):
        FleetKey.read(tmp_path / "absent")


# -- peers that fail ---------------------------------------------------------------------------------------------------


def flipped(data):
    return data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]


@pytest.mark.parametrize(
    "answer",
    [
        body(flipped(CHAIN.blob(0).data)),
        body(CHAIN.blob(1).data),
        body(CHAIN.blob(0).data[:-4096]),
        body(CHAIN.blob(0).data + bytes(4096)),
        body(bytes(SIZE)),
        body(SampleChain(seed=1, payload_bytes=1 << 20).blob(0).data),
    ],
    ids=["flipped", "another chunk", "shorter", "longer", "zeros", "another namespace"],
)
def test_a_peer_that_lies_costs_a_miss_and_the_next_one_is_asked(door, answer):
    with FalsePeer(KEY, answer) as liar:
        with peers(liar.url) as tier:
            assert read(tier, 0) is None
        with peers(liar.url, url(door)) as tier:
            assert read(tier, 0) == CHAIN.blob(0).data


def test_a_peer_that_lies_again_and_again_is_left_alone():
    with FalsePeer(KEY, body(bytes(SIZE))) as liar, peers(liar.url) as tier:
        for _ in range(5):
            assert read(tier, 0) is None
        with pytest.raises(TierUnavailable):
            read(tier, 0)


@pytest.mark.parametrize(
    "answer",
    [
        lambda wire: wire.sendall(head(SIZE) + CHAIN.blob(0).data[: SIZE // 2]),
        lambda wire: None,
        lambda wire: wire.sendall(b"SSH-2.0-OpenSSH\r\n"),
        lambda wire: wire.sendall(head(0, "500 Internal Server Error")),
    ],
    ids=["cut off in the body", "cut off before the answer", "not HTTP", "error"],
)
def test_a_peer_that_gives_no_answer_is_left_alone_at_once_and_tried_again(answer):
    now_s = [0.0]
    with FalsePeer(KEY, answer) as sick, peers(sick.url, clock=lambda: now_s[0]) as tier:
        with pytest.raises(TierUnavailable, match="a peer does not answer"):
            read(tier, 0)
        assert tier.each[0].breaker.is_open
        with pytest.raises(TierUnavailable, match="left alone"):
            read(tier, 0)
        now_s[0] += OPEN_FIRST_S
        with pytest.raises(TierUnavailable, match="a peer does not answer"):
            read(tier, 0)


def test_a_peer_that_says_much_of_what_it_has_not_is_left_alone():
    """The rest would be taken for the answer to the next question on that connection."""
    said = head(9000, "404 Not Found") + b"x" * 4096
    with FalsePeer(KEY, lambda wire: wire.sendall(said)) as false, peers(false.url) as tier:
        with pytest.raises(TierUnavailable, match="says too much"):
            read(tier, 0)
        assert tier.each[0].breaker.is_open and not tier.each[0]._pool._idle


def test_a_busy_peer_is_no_sick_one():
    with FalsePeer(KEY, lambda wire: wire.sendall(head(0, "503 Service Unavailable"))) as busy, peers(busy.url) as tier:
        for _ in range(3):
            with pytest.raises(TierUnavailable, match="status=503"):
                read(tier, 0)
        assert not tier.each[0].breaker.is_open


def test_peers_that_are_all_busy_are_no_sick_tier():
    """A door past its ``peer_serve_bytes_s`` refuses a row of reads: the next question is still asked."""
    with FalsePeer(KEY, lambda wire: wire.sendall(head(0, "503 Service Unavailable"))) as busy, peers(busy.url) as tier:
        breaker = Breaker(time.monotonic)
        guarded = GuardedTier(tier, breaker)
        for _ in range(2 * FAILURES_MAX):
            with pytest.raises(TierUnavailable, match="status=503"):
                read(guarded, 0)
        assert not breaker.is_open
    with peers(busy.url) as gone:
        guarded = GuardedTier(gone, breaker)
        for _ in range(FAILURES_MAX):
            with pytest.raises(TierUnavailable):
                read(guarded, 0)
        assert breaker.is_open, "no answer is something else"


def test_a_trickle_ends_with_the_deadline():
    fake = []

    def trickle(wire):
        wire.sendall(head(SIZE))
        while not fake[0].wait_end(0.02):
            wire.sendall(b"x")

    with FalsePeer(KEY, trickle) as slow, peers(slow.url, timeout_s=0.5) as tier:
        fake.append(slow)
        with pytest.raises(TierUnavailable, match="time is over"):
            read(tier, 0)
        assert tier.each[0].breaker.is_open


def test_with_the_shortest_time_that_may_be_set_a_peer_is_asked_all_the_same():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0)
        with peers(f"https://127.0.0.1:{listener.getsockname()[1]}", timeout_s=0.1) as tier:

            def is_asked():
                with pytest.raises(TierUnavailable):
                    tier.contains(CHAIN.name(0))
                try:
                    listener.accept()[0].close()
                except BlockingIOError:
                    return False
                return True

            wait_for(is_asked, "a question")


def test_a_handshake_that_trickles_is_given_up_on_both_sides():
    """Whoever writes into a bucket may name such a machine; it needs no key for that."""
    is_ended = threading.Event()

    def trickle(listener):
        connected, _ = listener.accept()
        with connected, contextlib.suppress(OSError):
            connected.sendall(b"\x16\x03\x03\x40\x00")  # the head of a record of 16 KiB
            for _ in range(200):
                connected.sendall(b"\x00")
                time.sleep(0.05)
            return
        is_ended.set()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=trickle, args=(listener,), daemon=True).start()
        with peers(f"https://127.0.0.1:{listener.getsockname()[1]}") as tier:
            with pytest.raises(TierUnavailable):
                tier.contains(CHAIN.name(0))
            assert is_ended.wait(30), "its socket and its thread stay for as long as the other side likes"


def test_a_peer_that_thaws_after_the_deadline_changes_no_byte(door):
    """The late write: the slot holds another chunk by then."""
    stopped = door._process.pid
    buffer = bytearray(SIZE)
    with peers(url(door), timeout_s=0.3) as tier:
        wait_for(lambda: is_read(tier, 0), "a connection")  # a busy machine needs longer to make one
        try:
            freeze(stopped)
            with pytest.raises(TierUnavailable):
                read(tier, 0, buffer)
            buffer[:] = bytes(SIZE)
        finally:
            os.kill(stopped, signal.SIGCONT)
        other = FleetKey(bytes(range(32)))
        with peers(url(door), key=other) as again:
            assert read(again, 1) == CHAIN.blob(1).data  # it is awake, and has had its time
        assert bytes(buffer) == bytes(SIZE)


def test_bytes_that_come_after_the_deadline_reach_no_memory():
    """The same in the middle of a body: half of it came in time, the rest when nobody reads any more."""
    asked, fake = [], []

    def late(wire):
        wire.sendall(head(SIZE) + CHAIN.blob(0).data[: SIZE // 2])
        fake[0].wait_end(1.0)
        asked.append(wire)
        wire.sendall(CHAIN.blob(0).data[SIZE // 2 :])

    buffer = bytearray(SIZE)
    with FalsePeer(KEY, late) as frozen, peers(frozen.url, timeout_s=0.5) as tier:
        fake.append(frozen)
        with pytest.raises(TierUnavailable):
            read(tier, 0, buffer)
        buffer[:] = bytes(SIZE)
        wait_for(lambda: bool(asked), "the late bytes")
        assert bytes(buffer) == bytes(SIZE)


def test_a_frozen_peer_leaves_its_work_to_the_next_one_from_then_on(door, tmp_path, directory, key_file):
    frozen = DoorProcess(door_config(directory, key_file))
    freeze(frozen._process.pid)
    try:
        with peers(url(frozen), url(door), timeout_s=3.0) as tier:
            assert read(tier, 0) == CHAIN.blob(0).data, "silence is not waited for until the deadline"
            assert tier.each[0].breaker.is_open
    finally:
        frozen.close()


def test_a_killed_door_is_opened_again_and_found_again(door):
    now_s = [0.0]
    with peers(url(door), clock=lambda: now_s[0]) as tier:
        assert read(tier, 0) == CHAIN.blob(0).data
        first = door._process.pid
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: door._process.pid != first, "the next door")

        def is_found() -> bool:
            now_s[0] += OPEN_FIRST_S
            try:
                return tier.contains(CHAIN.name(0))
            except TierUnavailable:
                return False

        wait_for(is_found, "the peer")
        assert read(tier, 0) == CHAIN.blob(0).data


# -- the door's process ------------------------------------------------------------------------------------------------


def test_a_door_ends_with_the_server_that_opened_it(directory, key_file, tmp_path):
    script = (
        "import sys\nfrom tests.tiers.test_peers import DoorProcess, door_config\nfrom pathlib import Path\n"
        "door = DoorProcess(door_config(Path(sys.argv[1]), Path(sys.argv[2])))\n"
        "print(door._process.pid, flush=True)\nsys.stdin.read()\n"
    )
    command = [os.sys.executable, "-c", script, str(directory), str(key_file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        pid = int(server.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        server.kill()
        wait_for(lambda: is_gone(pid), "the door's end")


def is_gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_door_that_dies_as_it_starts_is_a_warning_and_is_started_again(directory, key_file, monkeypatch, caplog):
    """Killed, say, where memory is short: the server goes on without it, and has it as soon as it can start."""
    died = []

    class DiesTwice(subprocess.Popen):
        def __init__(self, *args, **more):
            super().__init__(*args, **more)
            if len(died) < 2:  # before it is told its settings
                self.kill()
                self.wait()
                died.append(self.pid)

    monkeypatch.setattr(door_module.subprocess, "Popen", DiesTwice)
    monkeypatch.setattr(door_module, "RESTART_S", 0.01)
    port = free_port()
    door = DoorProcess(door_config(directory, key_file, peer_listen=f"127.0.0.1:{port}"))
    try:
        assert len(died) == 1 and door.port == port
        with peers(f"https://127.0.0.1:{port}") as tier:
            wait_for(lambda: len(died) == 2 and is_open(port), "the third door")
            assert read(tier, 0) == CHAIN.blob(0).data
        assert caplog.text.count("does not start yet") == caplog.text.count("cannot be started") == 1
    finally:
        door.close()
    assert not is_open(port)


def test_a_door_that_is_ready_and_dies_each_time_is_started_ever_less_often(
    directory, key_file, tmp_path, monkeypatch, caplog
):
    """Each start takes a second of a core, beside engines that need it."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nread -r settings\necho ready 4711\n")
    python.chmod(0o700)
    monkeypatch.setattr(door_module.sys, "executable", str(python))
    monkeypatch.setattr(door_module, "RESTART_S", 0.01)

    def waited_s():
        return [record.args[0] for record in caplog.records if "is started again" in record.msg]

    door = DoorProcess(door_config(directory, key_file))
    try:
        wait_for(lambda: len(waited_s()) >= 4, "four starts more")
    finally:
        door.close()
    assert waited_s()[:4] == [0.01, 0.02, 0.04, 0.08]


def test_a_door_that_is_started_again_has_the_key_of_its_server(directory, tmp_path):
    """A new key counts when a server starts anew, or its door would refuse those whom the server still asks."""
    key_file = tmp_path / "changed.key"
    key_file.touch(0o600)
    key_file.write_text("42" * 32)
    door = DoorProcess(door_config(directory, key_file))
    try:
        port, first = door.port, door._process
        key_file.write_text("17" * 32)
        first.kill()
        wait_for(lambda: door._process is not first and is_open(port), "another door")
        with peers(f"https://127.0.0.1:{port}", key=FleetKey(bytes.fromhex("42" * 32))) as tier:
            assert read(tier, 0) == CHAIN.blob(0).data
    finally:
        door.close()


def test_a_door_whose_start_gets_no_thread_is_started_again(directory, key_file, monkeypatch):
    refusals = iter([True, True])

    class Refused(threading.Timer):
        def start(self):
            if next(refusals, False):
                raise RuntimeError("can't start new thread")
            super().start()

    monkeypatch.setattr(door_module.threading, "Timer", Refused)
    monkeypatch.setattr(door_module, "RESTART_S", 0.01)
    port = free_port()
    door = DoorProcess(door_config(directory, key_file, peer_listen=f"127.0.0.1:{port}"))
    try:
        wait_for(lambda: is_open(port), "the third door")
    finally:
        door.close()


def is_open(port):
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def test_a_door_that_never_starts_ends_with_its_server(directory, key_file, monkeypatch):
    monkeypatch.setattr(door_module.sys, "executable", "/nowhere/python")
    door = DoorProcess(door_config(directory, key_file))
    door.close()


def test_a_port_that_is_taken_is_named(door, directory, key_file):
    config = door_config(directory, key_file, peer_listen=f"127.0.0.1:{door.port}")
    with pytest.raises(ConfigError, match=rf"cannot listen at 127.0.0.1:{door.port}.*in use"):
        DoorProcess(config)


def test_a_door_gives_no_more_than_its_budget(directory, key_file):
    door = DoorProcess(door_config(directory, key_file, peer_serve_bytes_s=SIZE // 60))
    try:
        token = KEY.token(time.time())
        assert ask(door, token=token)[0] == 200
        assert ask(door, token=token)[0] == 503, "the first one has to be paid for a minute"
        names = CHAIN.namespace + CHAIN.key(0)
        assert ask(door, "POST", PREFIX_PATH, token, body=names) == (200, b"1"), "questions are free"
    finally:
        door.close()


def test_a_budget_is_paid_back_as_time_goes_by():
    budget = Budget(1000)
    assert budget.take(1500, 10.0)
    assert not budget.take(1, 10.0)
    assert budget.take(500, 11.5 - BURST_S)
    assert not budget.take(1, 10.6)
    assert Budget(None).take(1 << 40, 0.0)
