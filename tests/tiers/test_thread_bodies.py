"""Blobs in the caller's thread: connections, deadlines, refusals, certificates, and when s3fs' loop is used instead."""

import asyncio
import logging
import mmap
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import s3fs
from botocore.auth import _host_from_url
from botocore.credentials import ReadOnlyCredentials
from botocore.exceptions import NoCredentialsError
from botocore.httpsession import URLLib3Session

from tests.kit.raw_server import OK, Asked, RawServer, refusal
from tests.kit.s3 import S3
from tests.kit.server.probe import wait_for
from tiered_kv.errors import ChunkCorrupt, TierUnavailable
from tiered_kv.location import parse_location
from tiered_kv.tiers.object import s3_signer
from tiered_kv.tiers.object.connection import IDLE_MAX_S, ConnectionPool, Place
from tiered_kv.tiers.object.errors import NoIdentity
from tiered_kv.tiers.object.loop_bodies import LoopBodies
from tiered_kv.tiers.object.medium import CallRunner, Deadline
from tiered_kv.tiers.object.s3_signer import LoopCredentials
from tiered_kv.tiers.object.store import ObjectStore
from tiered_kv.tiers.object.thread_bodies import ThreadBodies, _host

SIZE = 1 << 20
DATA = os.urandom(SIZE)
BLOB = (
    f"HTTP/1.1 206 Part\r\nContent-Length: {SIZE}\r\nContent-Range: bytes 0-{SIZE - 1}/{SIZE}\r\n\r\n".encode() + DATA
)


def open_store(url: str, timeout_s: float = 30.0, **options: object) -> ObjectStore:
    given = {"endpoint_url": url, "key": "AKIAhidden", "secret": "hidden-secret", "region": "x", **options}
    return ObjectStore(parse_location("s3://bucket/p", given), timeout_s=timeout_s)


def open_impatient(url: str, timeout_s: float, **options: object) -> ObjectStore:
    """A store that has its clients already: making them may take longer than its deadline on a busy machine."""
    store = open_store(url, timeout_s, **options)

    def is_ready() -> bool:
        with suppress(TimeoutError, NoIdentity):
            with store._using() as medium:
                medium._choose_bodies()
            return True
        return False

    wait_for(is_ready, "the clients")
    return store


def once(**more: object) -> dict[str, object]:
    """One try, so that whatever is free of cost shows."""
    return {"config_kwargs": {"retries": {"total_max_attempts": 1}, **more}}


def read(store: ObjectStore) -> bytes:
    buffer = bytearray(SIZE)
    assert store.get_into("x", memoryview(buffer))
    return bytes(buffer)


def store_and_hold(asked: Asked) -> bytes:
    """Take every put, and have the one blob."""
    if asked.line.startswith("PUT"):
        asked.read_body()
        return OK
    return BLOB


# -- connections ------------------------------------------------------------------------------------------------------


def test_calls_one_after_the_other_share_a_connection() -> None:
    with RawServer(store_and_hold) as server:
        store = open_store(server.url)
        for _ in range(3):
            assert read(store) == DATA
            store.put("x", memoryview(DATA))
        store.close()
    assert (server.connections_count, len(server.asked)) == (1, 6)


def test_an_answer_that_ends_its_connection_is_read_whole_and_not_reused() -> None:
    with RawServer(lambda _: BLOB.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)) as server:
        store = open_store(server.url)
        assert read(store) == read(store) == DATA
        store.close()
    assert server.connections_count == 2


def test_an_answer_in_chunks_is_read() -> None:
    half = SIZE // 2
    chunks = b"".join(b"%x\r\n%s\r\n" % (half, DATA[at : at + half]) for at in (0, half)) + b"0\r\n\r\n"
    head = f"HTTP/1.1 206 Part\r\nTransfer-Encoding: chunked\r\nContent-Range: bytes 0-{SIZE - 1}/{SIZE}\r\n\r\n"
    with RawServer(lambda _: head.encode() + chunks) as server:
        store = open_store(server.url)
        assert read(store) == read(store) == DATA
        store.close()
    assert server.connections_count == 1


def test_a_body_that_is_cut_is_unavailable_and_its_connection_is_left() -> None:
    def half(asked: Asked) -> bytes | None:
        if asked.nth:
            return None
        asked.connection.sendall(BLOB[: SIZE // 2])
        return None

    with RawServer(half) as server:
        store = open_store(server.url)
        for _ in range(2):
            with pytest.raises(TierUnavailable, match="the answer ended before all of its bytes came"):
                read(store)
        store.close()
    assert server.connections_count == 2


def hang_up_on_the_second(asked: Asked) -> bytes | None:
    return None if asked.nth else store_and_hold(asked)


@pytest.mark.parametrize("operation", ["get", "put"])
def test_a_connection_that_went_stale_costs_no_try(monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    monkeypatch.setattr("tiered_kv.tiers.object.connection.IDLE_SUSPECT_S", 0.0)
    with RawServer(hang_up_on_the_second) as server:
        store = open_store(server.url, **once())
        call = {"get": lambda: read(store), "put": lambda: store.put("x", memoryview(DATA))}[operation]
        call()
        call()
        store.close()
    assert (server.connections_count, len(server.asked)) == (2, 3)


def test_a_connection_that_was_just_used_is_not_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its failure is the request's own, and costs a try."""
    monkeypatch.setattr("tiered_kv.tiers.object.connection.IDLE_SUSPECT_S", 60.0)
    with RawServer(hang_up_on_the_second) as server:
        store = open_store(server.url, **once())
        read(store)
        with pytest.raises(TierUnavailable, match="the connection was cut"):
            read(store)
        store.close()


def test_a_stale_connection_is_replaced_once_in_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiered_kv.tiers.object.connection.IDLE_SUSPECT_S", -60.0)
    with RawServer(lambda asked: None) as server:
        store = open_store(server.url, **once())
        with pytest.raises(TierUnavailable, match="the connection was cut"):
            read(store)
        store.close()
    assert len(server.asked) <= 2


def test_a_connection_that_ended_while_idle_is_not_used() -> None:
    with RawServer(store_and_hold) as server:
        store = open_store(server.url, **once())
        read(store)
        server._open[0].shutdown(socket.SHUT_RDWR)
        time.sleep(0.1)
        assert read(store) == DATA
        store.close()
    assert (server.connections_count, len(server.asked)) == (2, 2)


@pytest.mark.parametrize("reason", ["ended", "old"])
def test_an_idle_connection_that_nobody_can_use_is_closed_without_another_blob(
    monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    monkeypatch.setattr("tiered_kv.tiers.object.connection.IDLE_CHECK_S", 0.02)
    with RawServer(lambda _: OK) as server:
        pool = ConnectionPool(2, 5.0, 5.0)
        place = Place("localhost", int(server.url.rpartition(":")[2]), None)
        for count in (1, 2):  # its thread ends with the last idle connection, and comes back
            connection = pool.connect(place, Deadline(30))
            descriptor = connection.wire._socket
            wait_for(lambda: len(server._open) == count, "the server's side")  # noqa: B023  # called here
            pool.give(connection)
            if reason == "old":
                connection.idle_since_s -= IDLE_MAX_S
            else:
                server._open[-1].shutdown(socket.SHUT_RDWR)
            wait_for(lambda: descriptor.fileno() == -1, "the client's side")  # noqa: B023  # called here
            wait_for(lambda: not pool._is_watched, "its thread's end")
        pool.close()


def test_what_is_idle_and_alive_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[object] = []
    monkeypatch.setattr("tiered_kv.tiers.object.connection.IDLE_CHECK_S", 0.01)
    monkeypatch.setattr("tiered_kv.tiers.object.connection._is_usable", lambda one: not looks.append(one))
    with RawServer(lambda _: OK) as server:
        pool = ConnectionPool(2, 5.0, 5.0)
        place = Place("localhost", int(server.url.rpartition(":")[2]), None)
        connection = pool.connect(place, Deadline(30))
        pool.give(connection)
        wait_for(lambda: len(looks) > 2, "looks at what is idle")
        assert pool.take(place) is connection
        assert connection.wire.is_quiet()
        connection.wire.end()
        pool.close()


def test_the_pool_keeps_few_and_young_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    with RawServer(lambda _: OK) as server:
        pool = ConnectionPool(2, 5.0, 5.0)
        place = Place("localhost", int(server.url.rpartition(":")[2]), None)
        made = [pool.connect(place, Deadline(30)) for _ in range(3)]
        for connection in made:
            pool.give(connection)
        assert pool.take(Place("localhost", 1, None)) is None
        assert pool.take(place) is made[2]
        assert made[0].wire._socket.fileno() == -1
        monkeypatch.setattr("tiered_kv.tiers.object.connection.IDLE_MAX_S", 0.0)
        assert pool.take(place) is None
        pool.close()
        pool.give(made[2])
        assert {connection.wire._socket.fileno() for connection in made} == {-1}


def test_what_comes_too_late_is_given_to_whoever_cleans_up() -> None:
    gate, late = threading.Event(), threading.Event()
    runner = CallRunner(30.0)
    with pytest.raises(TimeoutError):
        runner.run(lambda: gate.wait(30), timeout_s=0.05, late=lambda _: late.set())
    gate.set()
    assert late.wait(30)
    assert runner.run(lambda: 7) == 7


def test_of_a_name_server_that_hangs_the_deadline_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    store = open_impatient("http://no-such-host.invalid:80", timeout_s=0.6)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: gate.wait(30))
    start = time.monotonic()
    with pytest.raises(TierUnavailable, match="did not answer in time"):
        read(store)
    assert time.monotonic() - start < 5
    gate.set()
    store.close()


# -- deadlines and refusals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["head", "body"])
def test_a_server_that_drips_costs_the_deadline(part: str) -> None:
    is_over = threading.Event()

    def drip(asked: Asked) -> None:
        sent = b"HTTP/1.1 206 P" if part == "head" else BLOB[:500]
        asked.connection.sendall(sent)
        while not is_over.wait(0.05):
            asked.connection.sendall(b"a")

    with RawServer(drip) as server:
        store = open_impatient(server.url, timeout_s=1.5)
        start = time.monotonic()
        with pytest.raises(TierUnavailable, match="did not answer in time"):
            read(store)
        assert time.monotonic() - start < 4
        is_over.set()
        store.close()
    assert len(server.asked) == 1


def test_a_server_that_does_not_read_costs_the_deadline() -> None:
    is_over = threading.Event()

    def ignore(asked: Asked) -> None:
        is_over.wait(30)

    with RawServer(ignore) as server:
        store = open_impatient(server.url, timeout_s=1.5)
        start = time.monotonic()
        with pytest.raises(TierUnavailable, match="did not answer in time"):
            store.put("x", memoryview(bytes(64 << 20)))
        assert time.monotonic() - start < 4
        is_over.set()
        store.close()
    assert len(server.asked) == 1


def test_no_retry_is_waited_for_that_could_come_too_late() -> None:
    with RawServer(lambda asked: refusal(503, "SlowDown")) as server:
        store = open_impatient(server.url, timeout_s=0.9)
        with pytest.raises(TierUnavailable, match="asks for fewer requests"):
            read(store)
        store.close()
    assert len(server.asked) == 1


def test_a_refusal_before_the_body_was_sent_is_heard() -> None:
    def refuse(asked: Asked) -> None:
        asked.connection.sendall(refusal(403, "InvalidAccessKeyId"))
        time.sleep(0.2)  # the answer is there before the reset that closing on unread bytes causes

    with RawServer(refuse) as server:
        store = open_store(server.url)
        with pytest.raises(TierUnavailable, match="does not know the access key"):
            store.put("x", memoryview(bytes(64 << 20)))
        store.close()


def test_a_conflict_is_tried_again() -> None:
    answers = [refusal(409, "ConditionalRequestConflict"), refusal(409, "ConditionalRequestConflict"), OK]

    def answer(asked: Asked) -> bytes:
        asked.read_body()
        return answers[len(server.asked) - 1]

    with RawServer(answer) as server:
        store = open_store(server.url)
        assert store.create("x", memoryview(DATA))
        store.close()
    assert [asked.headers["If-None-Match"] for asked in server.asked] == ["*"] * 3


# -- what is sent -----------------------------------------------------------------------------------------------------


def test_requests_are_signed_and_carry_what_options_ask_for() -> None:
    with RawServer(store_and_hold) as server:
        extra = {"ServerSideEncryption": "AES256"}
        store = open_store(server.url, token="a-token", requester_pays=True, s3_additional_kwargs=extra)
        store.put("x y+z", memoryview(DATA))
        read(store)
        store.close()
    put, get = server.asked
    assert put.line == "PUT /bucket/p/x%20y%2Bz HTTP/1.1"
    for asked in (put, get):
        assert asked.headers["Authorization"].startswith("AWS4-HMAC-SHA256 Credential=AKIAhidden/")
        assert asked.headers["X-Amz-Content-SHA256"] == "UNSIGNED-PAYLOAD"
        assert asked.headers["x-amz-request-payer"] == "requester"
        assert asked.headers["X-Amz-Security-Token"] == "a-token"
        assert asked.headers["Host"] == server.url.partition("//")[2]
    assert put.headers["x-amz-server-side-encryption"] == "AES256"
    assert get.headers["x-amz-server-side-encryption"] is None
    assert get.headers["Range"] == f"bytes=0-{SIZE - 1}"
    assert [name for name in put.headers if name.lower() == "expect" or "checksum" in name.lower()] == []


def test_a_bucket_is_followed_to_its_region() -> None:
    def answer(asked: Asked) -> bytes:
        asked.read_body()
        if "/eu-west-9/s3/" in asked.headers["Authorization"]:
            return BLOB if asked.line.startswith("GET") else OK
        if asked.line.startswith("HEAD"):
            return OK.replace(b"\r\n", b"\r\nx-amz-bucket-region: eu-west-9\r\n", 1)
        return refusal(301, "PermanentRedirect")

    with RawServer(answer) as server:
        store = open_store(server.url)
        store.put("x", memoryview(DATA))
        assert read(store) == DATA
        store.close()
    assert [asked.line.partition(" ")[0] for asked in server.asked] == ["PUT", "HEAD", "PUT", "GET"]


def test_clients_that_are_slow_to_be_made_cost_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = []

    async def set_session(self: object, **_: object) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(s3fs.S3FileSystem, "set_session", set_session)
    store = open_store("http://127.0.0.1:1", timeout_s=1.0)
    with store._using():
        pass

    def get() -> None:
        with pytest.raises(TierUnavailable, match="the client or its credentials did not come in time") as caught:
            read(store)
        failures.append(caught)

    threads = [threading.Thread(target=get) for _ in range(5)]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert time.monotonic() - start < 3
    assert len(failures) == 5
    store.close()


def test_whoever_is_anonymous_signs_nothing() -> None:
    with RawServer(store_and_hold) as server:
        location = parse_location("s3://bucket/p", {"endpoint_url": server.url, "region": "x", "anon": True})
        store = ObjectStore(location)
        assert read(store) == DATA
        store.close()
    assert "Authorization" not in server.asked[0].headers


def test_credentials_of_the_environment_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAenvironment")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    with RawServer(store_and_hold) as server:
        store = ObjectStore(parse_location("s3://bucket/p", {"endpoint_url": server.url, "region": "x"}))
        assert read(store) == DATA
        store.close()
    assert "Credential=AKIAenvironment/" in server.asked[0].headers["Authorization"]


class Renewed:
    """Stands in for the loop, its client and credentials that change with every question."""

    def __init__(self, found: bool = True, ends_soon: bool = False) -> None:
        self.count, self.found, self.ends_soon = 0, found, ends_soon

    def run(self, coroutine):
        try:
            coroutine.send(None)
        except StopIteration as exc:
            return exc.value
        raise AssertionError("waits for something")

    async def client(self) -> None: ...

    async def credentials(self) -> ReadOnlyCredentials | None:
        self.count += 1
        return ReadOnlyCredentials(f"key {self.count}", "s", None) if self.found else None

    def credentials_end_within(self, seconds: float) -> bool:
        return self.ends_soon


def test_credentials_are_asked_for_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    credentials = LoopCredentials(Renewed())
    assert [credentials.get_frozen_credentials().access_key for _ in range(2)] == ["key 1", "key 1"]
    monkeypatch.setattr(s3_signer, "FRESH_S", -1.0)
    credentials = LoopCredentials(Renewed())
    assert [credentials.get_frozen_credentials().access_key for _ in range(2)] == ["key 1", "key 2"]
    with pytest.raises(NoCredentialsError):
        LoopCredentials(Renewed(found=False)).get_frozen_credentials()


def test_credentials_that_end_soon_are_asked_for_each_time() -> None:
    """The store refuses what is signed with them behind their end."""
    credentials = LoopCredentials(Renewed(ends_soon=True))
    assert [credentials.get_frozen_credentials().access_key for _ in range(2)] == ["key 1", "key 2"]


# -- which way bodies go ----------------------------------------------------------------------------------------------


def test_botocore_sends_nothing_by_itself(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where botocore's event is no longer what it was, or a body no longer reaches it as it was given."""

    def send(self: object, request: object) -> None:
        raise AssertionError(f"botocore sent {request}")

    monkeypatch.setattr(URLLib3Session, "send", send)
    store = ObjectStore(parse_location(s3.uri(s3.new_prefix()), s3.options()))
    for size in (0, 1, SIZE):
        assert store.create(str(size), memoryview(DATA)[:size])
        buffer = bytearray(size)
        assert store.get_into(str(size), memoryview(buffer))
        assert buffer == DATA[:size]
    assert not store.get_into("missing", memoryview(bytearray(1)))
    assert isinstance(store._client.medium._bodies, ThreadBodies)
    store.close()


def test_no_private_name_of_s3fs_is_used(repository: Path) -> None:
    used = [path.name for path in (repository / "tiered_kv").rglob("*.py") if "_call_s3" in path.read_text()]
    used += [path.name for path in (repository / "tiered_kv").rglob("*.py") if "_s3creator" in path.read_text()]
    assert used == []


UNFIT = {
    "there is a proxy": {"config_kwargs": {"proxies": {"http": "http://127.0.0.1:1"}}},
    "retries are adaptive": {"config_kwargs": {"retries": {"mode": "adaptive"}}},
    "request_checksum_calculation is set": {"config_kwargs": {"request_checksum_calculation": "when_supported"}},
    "response_checksum_validation is set": {"config_kwargs": {"response_checksum_validation": "when_supported"}},
    "s3_additional_kwargs has ChecksumAlgorithm": {"s3_additional_kwargs": {"ChecksumAlgorithm": "CRC32"}},
    "config_kwargs has an option of s3fs' own client": {"config_kwargs": {"connector_args": {}}},
}


@pytest.mark.parametrize("reason", UNFIT)
def test_what_threads_cannot_honour_goes_over_the_loop(s3: S3, caplog: pytest.LogCaptureFixture, reason: str) -> None:
    caplog.set_level(logging.INFO, "tiered_kv")
    store = ObjectStore(parse_location(s3.uri(s3.new_prefix()), {**s3.options(), **UNFIT[reason]}), timeout_s=10)
    if "proxy" in reason:
        with pytest.raises(TierUnavailable):
            store.put("x", memoryview(DATA))
    else:
        store.put("x", memoryview(DATA))
        assert read(store) == DATA
    assert isinstance(store._client.medium._bodies, LoopBodies)
    assert caplog.text.count(f"event loop, which takes more CPU. reason={reason} bucket=") == 1
    store.close()


@pytest.mark.parametrize("address", ["http://store.invalid:80", "HTTP://store.invalid:80", " http://store.invalid:80"])
def test_a_proxy_of_the_environment_is_honoured(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """However the store's address is written: blobs went past it."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with RawServer(store_and_hold) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        options: dict[str, object] = {"key": "AKIAhidden", "secret": "hidden-secret", "addressing_style": "path"}
        options["client_kwargs"] = {"endpoint_url": address}
        store = ObjectStore(parse_location("s3://bucket/p", options), timeout_s=30)
        assert read(store) == DATA
        store.close()
    assert proxy.asked[0].line.startswith("GET http://store.invalid")


def test_a_client_that_is_unlike_s3fs_is_not_used(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_signer, "_given", lambda filesystem: {"endpoint_url": "http://127.0.0.1:1"})
    store = ObjectStore(parse_location(s3.uri(s3.new_prefix()), s3.options()))
    store.put("x", memoryview(DATA))
    assert read(store) == DATA
    assert isinstance(store._client.medium._bodies, LoopBodies)
    store.close()


# -- TLS --------------------------------------------------------------------------------------------------------------


def tls_server(
    certificate: tuple[str, str], *, asks_back: bool = False, answer: Callable[[Asked], bytes | None] = store_and_hold
) -> RawServer:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    if asks_back:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(certificate[0])
    return RawServer(answer, context)


@pytest.mark.parametrize("how", ["bundle", "bundle of the environment", "not verified", "client certificate"])
def test_blobs_go_over_tls(monkeypatch: pytest.MonkeyPatch, certificate: tuple[str, str], how: str) -> None:
    options: dict[str, object] = {"verify": how != "not verified" and certificate[0]}
    if how == "bundle of the environment":
        monkeypatch.setenv("AWS_CA_BUNDLE", certificate[0])
        options = {}
    if how == "client certificate":
        options["config_kwargs"] = {"client_cert": certificate}
    with tls_server(certificate, asks_back=how == "client certificate") as server:
        store = open_store(server.url, **options)
        for _ in range(2):
            store.put("x", memoryview(DATA))
            assert read(store) == DATA
        assert isinstance(store._client.medium._bodies, ThreadBodies)
        store.close()
    assert server.connections_count == 1


def test_a_certificate_that_nobody_vouches_for_is_refused(certificate: tuple[str, str]) -> None:
    with tls_server(certificate) as server:
        store = open_store(server.url)
        with pytest.raises(TierUnavailable, match="the TLS connection failed; .*verify"):
            read(store)
        store.close()
    assert server.asked == []


def test_a_server_that_is_silent_over_tls_costs_the_deadline(certificate: tuple[str, str]) -> None:
    is_over = threading.Event()
    with tls_server(certificate) as server:
        server._answer = lambda asked: asked.connection.sendall(BLOB[:70000]) or (is_over.wait(30) and None)
        store = open_impatient(server.url, timeout_s=1.5, verify=certificate[0])
        start = time.monotonic()
        with pytest.raises(TierUnavailable, match="did not answer in time"):
            read(store)
        assert time.monotonic() - start < 4
        is_over.set()
        store.close()


# -- what a failed call leaves behind ----------------------------------------------------------------------------------


def refuse(asked: Asked) -> bytes:
    asked.read_body()
    return refusal(403, "AccessDenied")


def hang_up(_: Asked) -> None:
    return None


def stay_silent(asked: Asked) -> None:
    asked.read_body()
    time.sleep(2)


@pytest.mark.parametrize("answer", [refuse, hang_up, stay_silent])
@pytest.mark.parametrize("is_tls", [False, True])
def test_what_a_failed_put_wrote_from_can_be_closed(
    answer: Callable[[Asked], bytes | None], is_tls: bool, certificate: tuple[str, str]
) -> None:
    """As the self-test of a tier does, and a copy between tiers: an error's traceback must hold no view of it."""
    with tls_server(certificate, answer=answer) if is_tls else RawServer(answer) as server:
        store = open_impatient(server.url, 1.0, **once(), **({"verify": certificate[0]} if is_tls else {}))
        memory = mmap.mmap(-1, 1 << 20)
        errors = []
        with memoryview(memory) as view:
            try:
                store.put("x", view)
            except TierUnavailable as exc:
                errors.append(exc)  # and its traceback with it
        assert errors
        memory.close()
        store.close()


def test_an_interim_answer_is_not_taken_for_one() -> None:
    """The real one would be taken for the answer to the connection's next request."""

    def early(asked: Asked) -> bytes:
        asked.connection.sendall(b"HTTP/1.1 103 Early Hints\r\n\r\n")
        time.sleep(0.2)
        return BLOB

    with RawServer(early) as server:
        store = open_store(server.url, **once())
        for _ in range(2):
            with pytest.raises(TierUnavailable):
                read(store)
        store.close()
    assert server.connections_count == 2


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("http://store:80/b", "store"),
        ("https://store:443/b", "store"),
        ("https://store:80/b", "store:80"),
        ("http://user:secret@store:9000/b", "store:9000"),
        ("http://[::1]:9000/b", "[::1]:9000"),
        ("https://[::1]/b", "[::1]"),
    ],
)
def test_the_host_that_is_sent_is_the_one_that_is_signed(url: str, host: str) -> None:
    assert _host(urlsplit(url)) == host
    assert host == _host_from_url(url)


def test_an_address_that_does_not_answer_leaves_time_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    with RawServer(store_and_hold) as server:
        port = urlsplit(server.url).port
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in ("127.0.0.9", "127.0.0.1")]
        waits = []

        class Dead(socket.socket):
            def connect(self, address: Any) -> None:
                waits.append(self.gettimeout() or 0)
                if address[0] == "127.0.0.9":
                    raise TimeoutError("nobody is there")
                super().connect(address)

        monkeypatch.setattr("tiered_kv.tiers.object.connection.socket.getaddrinfo", lambda *_, **__: found)
        monkeypatch.setattr("tiered_kv.tiers.object.connection.socket.socket", Dead)
        place = Place("store", port or 0, None)
        wire = ConnectionPool(1, 4.0, 1.0)._dial(place, 4.0)
        wire.end()
    assert waits[0] <= 2.0 < waits[1] <= 4.0


def cut_short(_: Asked) -> bytes:
    return BLOB[:70000]


def of_another_size(_: Asked) -> bytes:
    return b'HTTP/1.1 200 OK\r\nETag: "e"\r\nContent-Length: 5\r\n\r\n12345'


@pytest.mark.parametrize("answer", [refuse, hang_up, stay_silent, cut_short, of_another_size])
@pytest.mark.parametrize("way", [{}, {"config_kwargs": {"request_checksum_calculation": "when_supported"}}])
def test_what_a_failed_get_read_into_can_be_closed(
    answer: Callable[[Asked], bytes | None], way: dict[str, object]
) -> None:
    """As above: the memory is the caller's again, whatever becomes of the error."""
    with RawServer(answer) as server:
        store = open_impatient(server.url, 1.0, **(once() | way))
        memory = mmap.mmap(-1, 1 << 20)
        errors = []
        with memoryview(memory) as view:
            try:
                store.get_into("x", view)
            except (TierUnavailable, ChunkCorrupt) as exc:
                errors.append(exc)  # and its traceback with it
        assert errors
        memory.close()
        store.close()
