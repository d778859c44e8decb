"""The object-store client: facts of every store (memory, a shared directory, real servers), then each one's own."""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from botocore.credentials import ReadOnlyCredentials
from fsspec.implementations.memory import MemoryFileSystem

from tests.kit.fake_clock import FakeClock
from tests.kit.faults.proxy import FaultProxy
from tests.kit.raw_server import RawServer, refusal
from tests.kit.server.probe import wait_for
from tests.kit.stores.child import read_by_child
from tests.kit.stores.session import ATOMIC
from tiered_kv.errors import ChunkCorrupt, Closed, ConfigError, TierUnavailable
from tiered_kv.location import parse_location
from tiered_kv.tiers.object.marks import ASKED_S, FORGET_S, Marks
from tiered_kv.tiers.object.medium import Medium
from tiered_kv.tiers.object.s3 import s3_options
from tiered_kv.tiers.object.s3_session import SeldomCredentials
from tiered_kv.tiers.object.shared_directory import STALE_S, TEMPORARY
from tiered_kv.tiers.object.store import ASK_AGAIN_S, RENEW_S, ObjectStore


def open_store(uri, options=None, **more):
    return ObjectStore(parse_location(uri, options), **more)


@pytest.fixture(params=["memory", "directory", "cephfs", "s3", *ATOMIC])
def store(request, tmp_path):
    if request.param == "memory":
        opened = open_store(f"memory://{uuid.uuid4().hex}/prefix")
    elif request.param == "directory":
        opened = open_store(f"shared+file://{tmp_path}/root")
    elif request.param == "cephfs":
        system = request.getfixturevalue("cephfs")
        opened = open_store(f"shared+file://{system.mounts[0]}/{system.new_name()}")
    else:
        served = (
            request.getfixturevalue("s3") if request.param == "s3" else request.getfixturevalue("stores")(request.param)
        )
        opened = open_store(served.uri(served.new_prefix()), served.options())
    yield opened
    opened.close()


def paths(store, prefix=""):
    return sorted(info.path for info in store.list(prefix))


# -- on every store ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 5000, 3 << 20])
def test_what_was_put_is_got(store, size):
    data = os.urandom(size)
    store.put("a/b c/x+y.bin", memoryview(data))
    assert store.get("a/b c/x+y.bin") == data
    assert store.get("a/b c/x+y.bin", size_max=size) == data
    assert store.get_head("a/b c/x+y.bin", 4096) == data[:4096]
    found = store.head("a/b c/x+y.bin")
    assert (found.path, found.size_bytes) == ("a/b c/x+y.bin", size)
    assert abs(found.modified_s - time.time()) < 3600


def test_what_is_not_there_is_none_or_empty(store):
    assert store.get("a/x") is None
    assert store.get_head("a/x", 10) is None
    assert store.head("a/x") is None
    assert paths(store) == []
    store.delete(["a/x", "a/y"])
    store.delete([])
    store.put("a/x/y", b"1")
    assert store.head("a/x") is None
    assert store.get("a") is None


def test_a_put_replaces_and_a_create_does_not(store):
    store.put("x", b"one")
    store.put("x", b"two!")
    assert store.get("x") == b"two!"
    assert not store.create("x", b"three")
    assert store.get("x") == b"two!"
    assert store.create("y", b"")
    assert not store.create("y", b"more")
    assert store.get("y") == b""


def test_an_object_that_is_too_large_is_corrupt(store):
    store.put("x", bytes(100))
    with pytest.raises(ChunkCorrupt, match="observed=100 expected_max=99"):
        store.get("x", size_max=99)
    assert store.get("x", size_max=100) == bytes(100)


def test_many_are_got_in_their_order_each_with_its_own_outcome(store):
    names = [f"m/{number}" for number in range(40)]
    for number, name in enumerate(names):
        if number != 7:
            store.put(name, b"x" * number)
    found = store.get_many(names, size_max=38)
    assert [data if number == 7 else len(data) for number, data in enumerate(found[:-1])] == [
        *range(7),
        None,
        *range(8, 39),
    ]
    assert isinstance(found[-1], ChunkCorrupt)
    assert store.get_many([], size_max=1) == []
    assert store.get_many(["m/1"], size_max=1) == [b"x"]


def test_many_are_got_at_the_same_time():
    gate = threading.Barrier(8)

    class Gated(ObjectStore):
        def get(self, path, size_max=None):
            gate.wait(30)  # raises where fewer than eight wait
            return super().get(path, size_max)

    store = Gated(parse_location(f"memory://{uuid.uuid4().hex}/p"))
    assert store.get_many(["x"] * 16, size_max=1) == [None] * 16
    store.close()


def test_a_store_that_fails_fails_each_of_many_within_one_deadline():
    store = open_store(f"memory://{uuid.uuid4().hex}/p", timeout_s=0.0)
    found = store.get_many(["a", "b"], size_max=1)
    assert [type(one) for one in found] == [TierUnavailable] * 2 and "no time was left" in str(found[1])
    store.close()


def test_a_list_holds_what_begins_with_the_prefix(store):
    names = ["a/1", "a/2/deep/3", "ab/4", "b/5", "c"]
    for name in names:
        store.put(name, name.encode())
    assert paths(store) == names
    assert paths(store, "a") == names[:3]
    assert paths(store, "a/") == names[:2]
    assert paths(store, "a/2/de") == ["a/2/deep/3"]
    assert paths(store, "zz/") == []
    assert {info.size_bytes for info in store.list("a/")} == {3, 10}


def test_a_delete_takes_several_and_missing_ones(store):
    for number in range(5):
        store.put(f"d/{number}", b"x")
    store.delete(["d/0"])
    store.delete([*(f"d/{number}" for number in range(4)), "d/missing"])
    assert paths(store) == ["d/4"]


def test_of_many_that_create_one_object_one_wins(store):
    won = []
    gate = threading.Barrier(8)

    def work(number):
        gate.wait()
        if store.create("lease/1", b"%d" % number):
            won.append(b"%d" % number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert store.get("lease/1") == won[0]


def test_every_store_here_creates_atomically_and_leaves_no_probe(store):
    assert store.creates_atomically()
    assert store.creates_atomically()
    assert paths(store) == []


def test_readers_see_old_or_new_bytes(store):
    versions = [bytes([number]) * 200_000 for number in range(4)]
    store.put("x", versions[0])
    seen, stop = set(), threading.Event()

    def read():
        while not stop.is_set():
            seen.add(store.get("x"))

    reader = threading.Thread(target=read)
    reader.start()
    for turn in range(20):
        store.put("x", versions[turn % 4])
    stop.set()
    reader.join()
    assert seen <= set(versions)


def test_a_closed_store_refuses_calls_and_closes_again(store):
    store.put("x", b"1")
    store.close()
    store.close()
    for call in (
        lambda: store.get("x"),
        lambda: store.put("x", b""),
        lambda: store.create("x", b""),
        lambda: store.head("x"),
        lambda: store.delete(["x"]),
        lambda: list(store.list("")),
    ):
        with pytest.raises(Closed):
            call()


def test_two_stores_of_one_process_share_nothing_but_the_objects(store):
    other = ObjectStore(store._location)
    store.put("x", b"1")
    assert other.get("x") == b"1"
    other.put("x", b"2")
    other.close()
    assert store.get("x") == b"2"


# -- a store without a conditional create -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ignores", "refuses"])
def test_a_store_that_cannot_create_atomically_is_found_out(monkeypatch, kind):
    original = MemoryFileSystem.pipe_file

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        if kind == "refuses" and mode == "create":
            raise NotImplementedError("exclusive write")
        return original(self, path, value, mode="overwrite")

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", pipe_file)
    store = open_store(f"memory://{uuid.uuid4().hex}")
    assert not store.creates_atomically()
    assert paths(store) == []
    store.close()


def test_a_store_that_seemed_to_overwrite_is_asked_again(monkeypatch):
    """A proxy said 200 to everything for a while: limits ended for the server's life."""
    clock = FakeClock()
    store = open_store(f"memory://{uuid.uuid4().hex}", monotonic=clock.monotonic)
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "pipe_file", lambda *_, **__: None)
        assert not store.creates_atomically()
    assert not store.creates_atomically(), "it was asked again at once"
    clock.advance(ASK_AGAIN_S)
    assert store.creates_atomically()
    store.close()


def test_one_of_many_puts_asks_an_overwriting_store_again(monkeypatch):
    clock, asked, is_asked, goes_on = FakeClock(), [], threading.Event(), threading.Event()
    store = open_store(f"memory://{uuid.uuid4().hex}", monotonic=clock.monotonic)

    def overwrite(_filesystem, path, *_, **__):
        asked.append(path)
        is_asked.set()
        goes_on.wait(60)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", overwrite)
    goes_on.set()
    assert not store.creates_atomically() and len(asked) == 2
    clock.advance(ASK_AGAIN_S)
    is_asked.clear()
    goes_on.clear()
    with ThreadPoolExecutor(1) as pool:
        again = pool.submit(store.creates_atomically)
        assert is_asked.wait(60)
        assert not store.creates_atomically(), "it goes by what is known meanwhile"
        assert len(asked) == 3
        goes_on.set()
        assert not again.result(60)
    store.close()


def test_a_store_that_does_not_say_whether_it_overwrites_still_gets_puts(monkeypatch):
    clock = FakeClock()
    store = open_store(f"memory://{uuid.uuid4().hex}", monotonic=clock.monotonic)
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", lambda *_, **__: None)
    assert not store.creates_atomically()

    def refuse(*_, **__):
        raise PermissionError("no")

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", refuse)
    clock.advance(ASK_AGAIN_S)
    assert not store.creates_atomically(), "each put failed before it was sent"
    monkeypatch.undo()
    assert not store.creates_atomically(), "it was asked again at once"
    clock.advance(ASK_AGAIN_S)
    assert store.creates_atomically()
    store.close()


# -- deadlines --------------------------------------------------------------------------------------------------------


def test_a_call_that_hangs_costs_the_deadline_and_harms_nothing_later(monkeypatch):
    store = open_store(f"memory://{uuid.uuid4().hex}", timeout_s=0.2)
    wait_for(lambda: is_done(lambda: store.put("x", b"1")), "a put in so short a time")
    release, finished = threading.Event(), threading.Event()
    original = MemoryFileSystem.cat_file

    def cat_file(self, *args, **kwargs):
        release.wait(60)
        finished.set()
        return original(self, *args, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    with pytest.raises(
        TierUnavailable, match=r"get failed: the store did not answer in time\. path=x .*timeout_s=0\.2"
    ):
        store.get("x")
    release.set()
    assert finished.wait(60)
    found = []
    wait_for(lambda: is_done(lambda: found.append(store.get("x"))), "a get in so short a time")
    assert found == [b"1"]
    store.close()


def is_done(call):
    """Whether a call met its deadline, which is short for a busy machine."""
    with suppress(TierUnavailable):
        call()
        return True
    return False


def test_calls_that_never_come_back_do_not_pile_up(monkeypatch):
    store = open_store(f"memory://{uuid.uuid4().hex}", timeout_s=0.1)
    release = threading.Event()
    calls = []

    def info(self, path):
        calls.append(path)
        release.wait(60)
        raise FileNotFoundError(path)

    monkeypatch.setattr(MemoryFileSystem, "info", info)
    monkeypatch.setattr("tiered_kv.tiers.object.medium.STUCK_MAX", 3)
    for _ in range(6):
        with pytest.raises(TierUnavailable):
            store.head("x")
    wait_for(lambda: len(calls) >= 3, "the threads of those that were begun")
    assert len(calls) == 3
    release.set()
    store.close()


@pytest.fixture
def silent_port():
    """A port that accepts connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(16)
        yield listener.getsockname()[1]


def s3_at(port, timeout_s=0.6):
    options = {"endpoint_url": f"http://127.0.0.1:{port}", "key": "AKIAhidden", "secret": "hidden", "region": "x"}
    return open_store("s3://bucket/p", options, timeout_s=timeout_s)


def every_call(store):
    return {
        "get": lambda: store.get("x"),
        "put": lambda: store.put("x", b"1"),
        "create": lambda: store.create("x", b"1"),
        "head": lambda: store.head("x"),
        "list": lambda: list(store.list("")),
        "delete": lambda: store.delete(["x"]),
    }


def test_what_lies_below_an_object_is_an_empty_list(store):
    store.put("a", b"1")
    assert paths(store, "a/b/") == []


def test_a_server_that_is_silent_costs_the_deadline(silent_port):
    store = s3_at(silent_port)
    for make_the_client in (lambda: store.head("x"), lambda: store.get_into("x", memoryview(bytearray(4)))):
        with pytest.raises(TierUnavailable):  # on a busy machine that takes all of the first call's time, and is said
            make_the_client()
    for operation, call in every_call(store).items():
        with pytest.raises(
            TierUnavailable, match=f"object store: {operation} failed: the store did not answer in time"
        ):
            call()
    store.close()


def test_a_port_without_a_server_is_a_refused_connection():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        store = s3_at(taken.getsockname()[1], timeout_s=10)
        for operation, call in every_call(store).items():
            with pytest.raises(TierUnavailable, match=f"{operation} failed: the connection was refused") as caught:
                call()
            assert "hidden" not in str(caught.value)
        store.close()


def test_a_host_name_that_is_unknown_is_told():
    options = {"endpoint_url": "http://no-such-host.invalid:80", "key": "k", "secret": "s"}
    store = open_store("s3://bucket/p", options)
    with pytest.raises(TierUnavailable, match="host name is not known|cannot be reached|did not answer in time"):
        store.get("x")
    store.close()


# -- S3 ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def proxy(s3):
    with FaultProxy(s3.endpoint_url) as proxy:
        yield proxy


def asked(proxy):
    return [request.kind for request in proxy.requests]


def test_every_operation_is_one_request(s3, proxy):
    store = open_store(s3.uri(s3.new_prefix()), s3.options(proxy.url))
    store.put("x", b"data")

    def made_by(call):
        proxy.forget()
        call()
        return asked(proxy)

    assert made_by(lambda: store.get("x")) == ["GET"]
    assert made_by(lambda: store.get("missing")) == ["GET"]
    assert made_by(lambda: store.get_into("x", memoryview(bytearray(4)))) == ["GET"]
    assert made_by(lambda: store.get_into("missing", memoryview(bytearray(4)))) == ["GET"]
    assert made_by(lambda: store.get_head("x", 2)) == ["GET"]
    assert made_by(lambda: store.head("x")) == ["HEAD"]
    assert made_by(lambda: store.head("missing")) == ["HEAD"]
    assert made_by(lambda: store.create("y", b"1")) == ["PUT"]
    assert made_by(lambda: store.create("y", b"1")) == ["PUT"]
    assert made_by(lambda: store.put("x", b"1")) == ["PUT"]
    assert made_by(lambda: list(store.list(""))) == ["LIST"]
    assert made_by(lambda: store.delete(["x"])) == ["DELETE"]
    assert made_by(lambda: store.delete(["x", "y"])) == ["POST"]
    store.close()


def test_a_list_and_a_delete_of_many_come_in_parts(s3, proxy, monkeypatch):
    monkeypatch.setattr("tiered_kv.tiers.object.s3.DELETE_BATCH", 10)
    few = {"s3_additional_kwargs": {"MaxKeys": 10}}  # of a page; s3fs hands it to the LIST alone
    store = open_store(s3.uri(s3.new_prefix()), s3.options(proxy.url) | few)
    names = [f"n/{number:02d}" for number in range(25)]
    for name in names:
        store.put(name, b"1")
    proxy.forget()
    assert [info.path for info in store.list("")] == names
    assert asked(proxy) == ["LIST"] * 3
    store.delete(names)
    assert asked(proxy)[3:] == ["POST"] * 3
    assert paths(store) == []
    store.close()


def test_where_no_server_knows_batches_a_missing_object_keeps_none_of_the_others():
    """Google's S3 refuses a batch, and says of a single one that it is not there."""
    deleted, together = [], threading.Barrier(2)

    def answer(asked):
        asked.read_body()
        if asked.line.startswith("POST"):
            return refusal(501, "NotImplemented")
        deleted.append(asked.line.split()[1].rpartition("/")[2])
        with suppress(threading.BrokenBarrierError):
            together.wait(5)
        return refusal(404, "NoSuchKey") if "gone" in asked.line else b"HTTP/1.1 204 No Content\r\n\r\n"

    with RawServer(answer) as server:
        store = open_store("s3://bucket/p", {"endpoint_url": server.url, "key": "k", "secret": "s", "region": "x"})
        store.delete(["gone", "one", "two", "three"])
        store.close()
    assert sorted(deleted) == ["gone", "one", "three", "two"]
    assert not together.broken, "one waited for the other: a batch of 500 would outlast the leader's lease"


PAGE = b"<!DOCTYPE html><html><head><title>Soon</title></head><body><p>We are back soon.<br/></p></body></html>"


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_a_server_that_tells_nobody_to_go_on_gets_blobs_over_the_loop(size):
    """To be told costs a round trip, and stores differ in whether they tell: blobs in threads never ask, either."""
    got = []

    def answer(asked):
        got.append(asked.read_body())
        return b'HTTP/1.1 200 OK\r\nETag: "e"\r\nContent-Length: 0\r\n\r\n'

    options = {"key": "k", "secret": "s", "region": "x", "config_kwargs": {"retries": {"mode": "adaptive"}}}
    with RawServer(answer) as server:
        store = open_store("s3://bucket/p", {"endpoint_url": server.url, **options}, timeout_s=5)
        store.put("x", bytes(size))
        assert store.create("y", bytes(size))
        store.close()
    assert [len(body) for body in got] == [size, size]


@pytest.mark.parametrize("paths", [["x"], ["x", "y"]], ids=len)
def test_a_page_for_people_is_no_deletion(paths):
    """The leader counted the bytes of what it believed to be gone as free, and granted them."""

    def answer(asked):
        if "Expect" in asked.headers:
            asked.connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        asked.read_body()
        return f"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: {len(PAGE)}\r\n\r\n".encode() + PAGE

    with RawServer(answer) as server:
        store = open_store("s3://bucket/p", {"endpoint_url": server.url, "key": "k", "secret": "s", "region": "x"})
        with pytest.raises(TierUnavailable, match="delete failed: what answers there is no S3 server"):
            store.delete(paths)
        store.close()


NOT_THERE = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
NOT_THERE_IN_S3 = NOT_THERE.replace(b"\r\n\r\n", b"\r\nx-amz-request-id: 1\r\n\r\n")
"""A store's answer to a HEAD."""

NOBODY_THERE = {
    "page": (b"Content-Type: text/html\r\n", PAGE),
    "words": (b"Content-Type: text/plain; charset=utf-8\r\n", b"default backend - 404"),
    "nothing": (b"", b""),
}
"""What nginx, an ingress without a server behind it, and Envoy say of everything."""


def nobody_there(kind, asked):
    header, body = NOBODY_THERE[kind]
    head = b"HTTP/1.1 404 Not Found\r\n%sContent-Length: %d\r\n\r\n" % (header, len(body))
    return head + (b"" if asked.line.startswith("HEAD") else body)


@pytest.mark.parametrize("way", [{}, {"config_kwargs": {"retries": {"mode": "adaptive"}}}], ids=["threads", "loop"])
@pytest.mark.parametrize("kind", NOBODY_THERE)
def test_a_404_that_is_no_stores_is_no_missing_object(kind, way):
    """An ingress said so while its store began anew: blobs, leases and epochs were forgotten, deletions were done."""

    def answer(asked):
        asked.read_body()
        return nobody_there(kind, asked)

    options = {"key": "k", "secret": "s", "region": "x", **way}
    with RawServer(answer) as server:
        store = open_store("s3://bucket/p", {"endpoint_url": server.url, **options})
        for operation, call in every_call(store).items():
            with pytest.raises(TierUnavailable, match=f"{operation} failed: what answers there is no S3 server"):
                call()
        for call in (
            lambda: store.get_head("x", 4),
            lambda: store.get_into("x", memoryview(bytearray(4))),
            lambda: store.delete(["x", "y"]),
        ):
            with pytest.raises(TierUnavailable, match="failed: what answers there is no S3 server"):
                call()
        store.close()


def test_a_404_that_is_no_stores_ends_no_list():
    """The leader's pass took the pages that it did not see for an end: their chunks were gaps, their pins were none."""
    entry = "<Contents><Key>p/x</Key><Size>1</Size><LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
    more = "<IsTruncated>true</IsTruncated><NextContinuationToken>more</NextContinuationToken>"
    page = f"<ListBucketResult><Name>bucket</Name>{more}{entry}</ListBucketResult>".encode()

    def answer(asked):
        if "continuation-token" in asked.line:
            return nobody_there("page", asked)
        return b"HTTP/1.1 200 OK\r\nContent-Type: application/xml\r\nContent-Length: %d\r\n\r\n" % len(page) + page

    with RawServer(answer) as server:
        store = open_store("s3://bucket/p", {"endpoint_url": server.url, "key": "k", "secret": "s", "region": "x"})
        found = store.list("")
        assert next(found).path == "x"
        with pytest.raises(TierUnavailable, match="list failed: what answers there is no S3 server"):
            list(found)
        store.close()


def test_a_head_whose_404_may_be_anybodys_is_asked_again_by_a_get():
    """Stores that send no header of S3's own with it: a HEAD's refusal has no code, and that of a GET has."""
    answers = {"HEAD": NOT_THERE, "GET": refusal(404, "NoSuchKey")}
    with RawServer(lambda asked: answers[asked.line.split()[0]]) as server:
        store = open_store("s3://bucket/p", {"endpoint_url": server.url, "key": "k", "secret": "s", "region": "x"})
        assert store.head("x") is None
        answers["HEAD"] = NOT_THERE_IN_S3
        assert store.head("x") is None
        assert [asked.line.split()[0] for asked in server.asked] == ["HEAD", "GET", "HEAD"]
        answers["HEAD"] = NOT_THERE.replace(b"Content", b"x-amz-cf-id: 1\r\nContent")  # of a network before the store
        assert store.head("x") is None
        assert [asked.line.split()[0] for asked in server.asked][3:] == ["HEAD", "GET"]
        answers["HEAD"], answers["GET"] = NOT_THERE, refusal(404, "NoSuchBucket")
        with pytest.raises(TierUnavailable, match="there is no bucket 'bucket'"):
            store.head("x")
        store.close()


def test_an_object_that_is_stored_between_a_head_and_its_get_is_there():
    """Two machines that compute one prefix meet there; where a HEAD goes on finding nothing no store answers it."""
    there = b"HTTP/1.1 200 OK\r\nETag: 1\r\nLast-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\nContent-Length: 4\r\n\r\n"
    part = there.replace(b"200 OK", b"206 Partial\r\nContent-Range: bytes 0-0/4").replace(b"Length: 4", b"Length: 1")
    heads = [NOT_THERE, there, NOT_THERE, NOT_THERE]
    with RawServer(lambda asked: heads.pop(0) if asked.line.startswith("HEAD") else part + b"K") as server:
        store = open_store("s3://bucket/p", {"endpoint_url": server.url, "key": "k", "secret": "s", "region": "x"})
        assert store.head("x").size_bytes == 4
        with pytest.raises(TierUnavailable, match="head failed: what answers there is no S3 server"):
            store.head("x")
        store.close()


@pytest.mark.parametrize("way", [{}, {"config_kwargs": {"retries": {"mode": "adaptive"}}}])
def test_a_page_for_people_is_no_empty_bucket_no_stored_object_and_no_damaged_blob(way):
    """A load balancer under maintenance, or the portal of a network, answers everything with 200."""

    def answer(asked):
        if "Expect" in asked.headers:
            asked.connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        asked.read_body()
        head = f"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\nContent-Length: {len(PAGE)}\r\n\r\n"
        return head.encode() + (b"" if asked.line.startswith("HEAD") else PAGE)

    options = {"key": "k", "secret": "s", "region": "x", **way}
    with RawServer(answer) as server:
        store = open_store("s3://bucket/p", {"endpoint_url": server.url, **options})
        for operation in ("list", "put", "create", "get", "head"):
            with pytest.raises(TierUnavailable, match=f"{operation} failed: what answers there is no S3 server"):
                every_call(store)[operation]()
        with pytest.raises(TierUnavailable, match="get failed: what answers there is no S3 server"):
            store.get_into("x", memoryview(bytearray(5000)))  # as damaged it would be deleted, and it may be whole
        store.close()


LISTED = b"<ListBucketResult><Name>bucket</Name><IsTruncated>false</IsTruncated></ListBucketResult>"
MODIFIED = b"Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n"


def holds_four_bytes(asked, marks=b""):
    """A store in which every object is there, with more headers to each answer."""
    verb, body = asked.line.split()[0], b""
    if "list-type" in asked.line:
        body = LISTED
    elif verb == "GET":
        body = b"data"
    elif verb == "POST":
        body = b"<DeleteResult></DeleteResult>"
    length = 4 if verb == "HEAD" else len(body)
    return b"HTTP/1.1 200 OK\r\n%s%sContent-Length: %d\r\n\r\n%s" % (marks, MODIFIED, length, body)


def every_read_and_write(store):
    return {
        **{name: call for name, call in every_call(store).items() if name != "list"},
        "get of a part": lambda: store.get_head("x", 4),
        "get of a blob": lambda: store.get_into("x", memoryview(bytearray(4))),
        "delete of two": lambda: store.delete(["x", "y"]),
    }


@pytest.mark.parametrize("way", [{}, {"config_kwargs": {"retries": {"mode": "adaptive"}}}], ids=["threads", "loop"])
@pytest.mark.parametrize(
    "marks", [b'ETag: "e"\r\nx-amz-request-id: 1\r\n', b"x-amz-id-2: 1\r\n"], ids=["S3", "a proxy"]
)
@pytest.mark.parametrize("said", [b"", b'{"status": "ok"}'], ids=["nothing", "JSON"])
def test_a_200_that_lacks_a_store_s_headers_is_nobody_s_once_it_has_sent_them(said, marks, way):
    """A put that was never done counted as done, and a whole blob for a damaged one, which was deleted."""
    is_away = threading.Event()

    def answer(asked):
        asked.read_body()
        if not is_away.is_set():
            return holds_four_bytes(asked, marks)
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(said)
        return head + (b"" if asked.line.startswith("HEAD") else said)

    options = {"key": "k", "secret": "s", "region": "x", **way}
    with RawServer(answer) as server:
        store = open_store("s3://bucket/p", {"endpoint_url": server.url, **options})
        for call in every_read_and_write(store).values():
            call()
        is_away.set()
        for operation, call in every_read_and_write(store).items():
            failed = f"{operation.partition(' ')[0]} failed: "
            with pytest.raises(TierUnavailable, match=failed + "(what answers there is no S3 server|the store failed)"):
                call()  # of a put that is answered with words botocore itself makes a failure
        is_away.clear()
        assert store.get("x") == b"data"
        store.close()


def test_lists_and_batches_of_another_store_behind_the_same_name_are_believed():
    """A failover to one that sends no request's id ended lists and deletions until the server was restarted."""
    marks = b"x-amz-request-id: 1\r\n"

    def answer(asked):
        asked.read_body()
        return holds_four_bytes(asked, marks)

    options = {"key": "k", "secret": "s", "region": "x"}
    with RawServer(answer) as server:
        store = open_store("s3://bucket/p", {"endpoint_url": server.url, **options})
        for _ in range(2):
            assert paths(store) == []
            store.delete(["x", "y"])
            marks = b""
        store.close()


def test_a_deletion_by_another_store_behind_the_same_name_is_believed_once_the_object_is_gone():
    """Its answer has no content, and nothing that tells a store's from anybody's; the same one says what it has."""
    marks, gone = b"x-amz-request-id: 1\r\n", set()
    missing = b"<Error><Code>NoSuchKey</Code></Error>"

    def answer(asked):
        asked.read_body()
        verb, target = asked.line.split()[:2]
        if verb == "DELETE":
            if "kept" not in target:
                gone.add(target)
            return b"HTTP/1.1 204 No Content\r\n%s\r\n" % marks
        if target in gone:
            body = b"" if verb == "HEAD" else missing
            return b"HTTP/1.1 404 Not Found\r\n%sContent-Length: %d\r\n\r\n%s" % (marks, len(body), body)
        return holds_four_bytes(asked, b'ETag: "e"\r\n' + marks)

    options = {"key": "k", "secret": "s", "region": "x"}
    with RawServer(answer) as server:
        store = open_store("s3://bucket/p", {"endpoint_url": server.url, **options})
        store.delete(["x"])
        marks = b""
        store.delete(["y"])
        with pytest.raises(TierUnavailable, match="what answers there is no S3 server"):
            store.delete(["kept"])
        store.close()


def test_what_a_store_s_answers_had_is_forgotten_after_a_while_without_it():
    clock = FakeClock()
    marks = Marks(frozenset({"etag"}), monotonic=clock.monotonic)
    assert not marks.are_missing("get", ["ETag"])
    for _ in range(2):
        for _ in range(int(FORGET_S / ASKED_S)):
            assert marks.are_missing("get", []) and not marks.are_missing("put", [])
            clock.advance(ASKED_S)
        clock.advance(-1)
        assert marks.are_missing("get", [])
        assert not marks.are_missing("get", ["ETag"]), "one is enough to go on"
    for _ in range(3):
        assert marks.are_missing("get", []), "seldom answers are forgotten"
        clock.advance(FORGET_S)
    for _ in range(int(FORGET_S / ASKED_S)):
        assert marks.are_missing("get", [])
        clock.advance(ASKED_S)
    assert not marks.are_missing("get", []) and not marks.are_missing("get", [])
    assert not marks.are_missing("get", ["ETag"])
    assert marks.are_missing("get", []), "it was not learned anew"


def test_a_proxy_that_drops_all_of_a_store_s_headers_is_used():
    def answer(asked):
        asked.read_body()
        return holds_four_bytes(asked)

    with RawServer(answer) as server:
        store = open_store("s3://bucket/p", {"endpoint_url": server.url, "key": "k", "secret": "s", "region": "x"})
        for _ in range(2):
            for call in every_read_and_write(store).values():
                call()
        store.close()


@pytest.mark.parametrize("where", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "profile", "client_kwargs"])
@pytest.mark.parametrize("more", ["me:hidden@localhost:9", "localhost:9?sign=hidden"], ids=["user", "query"])
def test_an_address_in_the_environment_that_no_client_can_use_is_told(tmp_path, monkeypatch, where, more):
    """A client sends it along, and signs without it: the store refuses the signature, or the name is not found."""
    without_credentials(monkeypatch, tmp_path, f"endpoint_url = http://{more}" if where == "profile" else "")
    if where.startswith("AWS"):
        monkeypatch.setenv(where, f"http://{more}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIA")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    options = {"client_kwargs": {"endpoint_url": f"http://{more}"}} if where == "client_kwargs" else {}
    store = open_store("s3://bucket/p", options)
    for call in (*every_call(store).values(), lambda: store.get_into("x", memoryview(bytearray(4)))):
        with pytest.raises(TierUnavailable, match="the address in AWS_ENDPOINT_URL, .* a user or a query") as caught:
            call()
        assert "hidden" not in str(caught.value)
    store.close()


@pytest.mark.parametrize("form", ["HTTP://{}", "http://{}/", "http://{}/#x", "http://{}/?", " http://{}"])
@pytest.mark.parametrize("where", ["environment", "client_kwargs"])
def test_an_address_that_clients_understand_is_used_as_it_is(tmp_path, monkeypatch, where, form):
    without_credentials(monkeypatch, tmp_path)
    options = {"key": "k", "secret": "s", "addressing_style": "path"}

    def answer(asked):
        asked.read_body()
        return holds_four_bytes(asked)

    with RawServer(answer) as server:
        address = form.format(server.url.removeprefix("http://"))
        if where == "environment":
            monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        else:
            options["client_kwargs"] = {"endpoint_url": address}
        store = open_store("s3://bucket/p", options)
        for call in every_read_and_write(store).values():
            call()
        store.close()


def test_a_missing_bucket_is_told(s3):
    store = open_store("s3://tiered-kv-no-such-bucket/p", s3.options())
    for operation in ("get", "put", "create", "list", "delete"):
        with pytest.raises(TierUnavailable, match="there is no bucket 'tiered-kv-no-such-bucket'; create it"):
            every_call(store)[operation]()
    store.close()


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"key": "AKIAwrongwrong"}, r"does not know the access key; check AWS_ACCESS_KEY_ID"),
        ({"secret": "wrongwrongwrong"}, r"the secret does not fit the key; check AWS_SECRET_ACCESS_KEY"),
    ],
)
def test_wrong_credentials_are_told_and_not_shown(s3, wrong, expected, caplog):
    if s3.server is None:
        pytest.skip("the words differ between servers; ours is known")
    options = s3.options() | wrong
    store = open_store(s3.uri(s3.new_prefix()), options)
    with pytest.raises(TierUnavailable, match=f"the store refuses these credentials: .*{expected}"):
        store.get("x")
    for operation, call in every_call(store).items():
        with pytest.raises(TierUnavailable, match=f"{operation} failed: the store refuses these credentials") as caught:
            call()
        for secret in (options["key"], options["secret"]):
            assert secret not in str(caught.value) and secret not in repr(store) and secret not in caplog.text
    store.close()


def write_credentials(path, key, secret):
    """Replace a profile's file, as a rotation does."""
    path.with_suffix(".new").write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")
    path.with_suffix(".new").rename(path)


@pytest.mark.parametrize("way", [{}, {"config_kwargs": {"retries": {"mode": "adaptive"}}}], ids=["threads", "loop"])
@pytest.mark.parametrize(("before", "last"), [("wrong key", "head"), ("wrong secret", "list"), ("none", "delete")])
def test_credentials_that_were_replaced_are_read_anew(s3, tmp_path, monkeypatch, before, last, way):
    """Clients read a profile's file once: without this a rotated key left the bucket out until the server ended."""
    if s3.server is None:
        pytest.skip("which error a wrong key has differs between servers; ours is known")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    profile = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(profile))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    if before != "none":
        wrong = {"wrong key": ("AKIAwrongwrong", s3.secret_key), "wrong secret": (s3.access_key, "wrongwrongwrong")}
        write_credentials(profile, *wrong[before])
    clock = FakeClock()
    store = open_store(s3.uri(s3.new_prefix()), {"endpoint_url": s3.endpoint_url, **way}, monotonic=clock.monotonic)
    for call in every_call(store).values():
        with pytest.raises(TierUnavailable, match="credentials"):
            call()
    write_credentials(profile, s3.access_key, s3.secret_key)
    clock.advance(RENEW_S)
    with pytest.raises(TierUnavailable, match="credentials"):
        every_call(store)[last]()  # the last call that the old client fails
    store.put("x", b"data")
    assert store.get("x") == b"data" and paths(store) == ["x"]
    store.delete(["x"])
    assert store.head("x") is None
    store.close()


def without_credentials(monkeypatch, tmp_path, config=""):
    """An environment in which nothing but this profile says who asks."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    (tmp_path / "config").write_text(f"[default]\n{config}\n")


@pytest.mark.parametrize("missing", ["program", "role's token", "token's directory", "container's token", "role"])
def test_credentials_that_cannot_be_had_are_no_empty_bucket(tmp_path, monkeypatch, missing):
    """The error of a file that is missing read as that of an object: lists were empty, deletions done, blobs gone."""
    config = f"credential_process = {tmp_path}/program" if missing == "program" else ""
    without_credentials(monkeypatch, tmp_path, config)
    (tmp_path / "token").write_text("a token")
    with (
        RawServer(lambda _: refusal(404, "NoSuchKey")) as sts,
        RawServer(lambda _: refusal(404, "NoSuchKey")) as server,
    ):
        if missing == "container's token":
            monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", sts.url)
            monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "gone"))
        elif missing != "program":
            token = {"role's token": "gone", "token's directory": "", "role": "token"}[missing]
            monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / token))
            monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/x")
            monkeypatch.setenv("AWS_ENDPOINT_URL_STS", sts.url)
        store = open_store("s3://bucket/p", {"endpoint_url": server.url})
        said = "what gives credentials refuses" if missing == "role" else "credentials could not be fetched: /"
        for call in every_call(store).values():
            with pytest.raises(TierUnavailable, match=said):
                call()
        with pytest.raises(TierUnavailable, match=said):
            store.get_into("x", memoryview(bytearray(4)))
        assert server.asked == []
        store.close()


def test_a_program_that_gives_credentials_again_is_asked_again(s3, tmp_path, monkeypatch):
    program = tmp_path / "program"
    without_credentials(monkeypatch, tmp_path, f"credential_process = {program}")
    store = open_store(s3.uri(s3.new_prefix()), {"endpoint_url": s3.endpoint_url})
    with pytest.raises(TierUnavailable, match="credentials could not be fetched"):
        store.put("x", b"data")
    given = {"Version": 1, "AccessKeyId": s3.access_key, "SecretAccessKey": s3.secret_key}
    (tmp_path / "new").write_text(f"#!/bin/sh\necho '{json.dumps(given)}'\n")
    (tmp_path / "new").chmod(0o700)
    (tmp_path / "new").rename(program)
    store.put("x", b"data")
    assert store.get("x") == b"data"
    store.close()


def make_program(path, lines, **given):
    """A program that gives credentials for the next five minutes, after it has written its process's id to a file."""
    expires = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 300))
    printed = json.dumps({"Version": 1, "Expiration": expires, **given})
    path.write_text(f"#!/bin/sh\necho $$ >> '{path}.runs'\n{lines}\necho '{printed}'\n")
    path.chmod(0o700)


def is_running(pid):
    """Whether a process runs; a child that nobody waits for any more may lie about for a while."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def runs_of(program):
    return program.with_suffix(".runs").read_text().split()


def test_credentials_that_end_soon_are_not_asked_for_before_every_request(tmp_path, monkeypatch):
    """botocore does, and each request waits for a program, behind those of all other requests."""
    program = tmp_path / "program"
    without_credentials(monkeypatch, tmp_path, f"credential_process = {program}")
    make_program(program, "", AccessKeyId="AKIA", SecretAccessKey="hidden")
    with RawServer(lambda asked: NOT_THERE_IN_S3) as server:
        store = open_store("s3://bucket/p", {"endpoint_url": server.url})
        assert [store.head("x") for _ in range(20)] == [None] * 20
        with pytest.raises(TierUnavailable):  # asked for by the other way to ask
            store.get_into("x", memoryview(bytearray(4)))
        assert len(runs_of(program)) < 20
        store.close()


EXPIRED = {"Version": 1, "AccessKeyId": "OLD", "SecretAccessKey": "old", "Expiration": "2026-01-01T00:00:00Z"}
WAYS_NOT_TO_RENEW = {
    "fails": "exit 1",
    "hangs": "exec sleep 600",
    "older": f"{{ echo '{json.dumps(EXPIRED)}'; exit; }}",
}


@pytest.mark.parametrize("how", WAYS_NOT_TO_RENEW.values(), ids=WAYS_NOT_TO_RENEW)
def test_credentials_that_cannot_be_renewed_are_used_until_they_expire(tmp_path, monkeypatch, how):
    """botocore takes none of the last ten minutes then, although the store takes them all."""
    monkeypatch.setattr("tiered_kv.tiers.object.renewal.FRESH_S", -1.0)
    program = tmp_path / "program"
    without_credentials(monkeypatch, tmp_path, f"credential_process = {program}")
    fails_from_the_third_on = f"[ $(wc -l < '{program}.runs') -lt 3 ] || {how}"
    make_program(program, fails_from_the_third_on, AccessKeyId="AKIA", SecretAccessKey="hidden")
    with RawServer(lambda asked: NOT_THERE_IN_S3) as server:
        store = open_store("s3://bucket/p", {"endpoint_url": server.url})
        asked = 3 if "sleep" in how else 4  # one that hangs is the only one
        wait_for(lambda: store.head("x") is None and len(runs_of(program)) >= asked, "other questions to the program")
        assert [store.head("x") for _ in range(3)] == [None] * 3
        assert "sleep" not in how or len(runs_of(program)) == asked
        assert all("Credential=AKIA/" in asked.headers["Authorization"] for asked in server.asked)
        store.close()


def test_credentials_that_have_ended_are_used_no_longer():
    """For a moment after their end they were, and the store refused what they signed."""
    first, second = (ReadOnlyCredentials(key, "secret", "token") for key in ("one", "two"))
    left, ended = [second, first], []

    class Found:
        async def get_frozen_credentials(self):
            self.given = left.pop()
            return self.given

        def refresh_needed(self, seconds):
            return self.given in ended

    async def ask():
        seldom = SeldomCredentials(Found())
        assert [await seldom.get_frozen_credentials() for _ in range(2)] == [first] * 2
        ended.append(first)
        assert await seldom.get_frozen_credentials() is second

    asyncio.run(ask())


def test_nobody_waits_for_a_renewal_that_takes_long_and_it_counts(monkeypatch):
    """Programs and services take seconds; for a quarter of an hour botocore would have every request wait for them."""
    monkeypatch.setattr("tiered_kv.tiers.object.renewal.FRESH_S", -1.0)
    first, second = (ReadOnlyCredentials(key, "secret", "token") for key in ("one", "two"))

    async def ask():
        gate = asyncio.Event()
        gate.set()
        asked = []

        async def find():
            asked.append(None)
            await gate.wait()
            return second if len(asked) > 1 else first

        seldom = SeldomCredentials(
            SimpleNamespace(get_frozen_credentials=find, refresh_needed=lambda seconds: seconds > 0)
        )
        assert await seldom.get_frozen_credentials() is first
        gate.clear()
        assert [await seldom.get_frozen_credentials() for _ in range(3)] == [first] * 3
        gate.set()
        await asyncio.sleep(0.01)  # turns of the loop, none of them long
        assert await seldom.get_frozen_credentials() is second
        assert len(asked) <= 3, "it was asked by each call"

    asyncio.run(ask())


def test_a_program_that_hangs_is_ended_with_the_call_that_waits_for_it(tmp_path, monkeypatch):
    program = tmp_path / "program"
    without_credentials(monkeypatch, tmp_path, f"credential_process = {program}")
    make_program(program, f"sleep 600 & echo $! >> '{program}.runs'; wait")
    store = open_store("s3://bucket/p", {"endpoint_url": "http://localhost:9"}, timeout_s=5.0)
    with pytest.raises(TierUnavailable, match="in time"):
        store.head("x")
    assert len(runs_of(program)) >= 2
    wait_for(lambda: not any(is_running(pid) for pid in runs_of(program)), "the end of the program and of its child")
    store.close()


@pytest.mark.parametrize("status", [301, 307])
def test_who_is_sent_elsewhere_and_not_told_where_asks_no_hundred_times(status):
    """botocore asks for the bucket's region, is sent elsewhere again, and asks for that, as deep as Python goes."""
    page = b"<html>Moved</html>"

    def send_elsewhere(asked):
        asked.read_body()
        body = b"" if asked.line.startswith("HEAD") else page
        return (
            b"HTTP/1.1 %d Moved\r\nContent-Type: text/html\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body
        )

    with RawServer(send_elsewhere) as server:
        store = s3_at(int(server.url.rpartition(":")[2]), timeout_s=10.0)
        calls = {**every_call(store), "get_into": lambda: store.get_into("x", memoryview(bytearray(4)))}
        for call in calls.values():
            with pytest.raises(TierUnavailable, match="sends requests elsewhere: check endpoint_url .http in place"):
                call()
        assert len(server.asked) <= 3 * len(calls)
        store.close()


def test_the_client_is_lean_and_bounded():
    location = parse_location(
        "s3://b/p?endpoint_url=http://h:1&region=r&verify=false", {"config_kwargs": {"s3": {"x": 1}, "read_timeout": 7}}
    )
    options = s3_options(location, timeout_s=9, concurrency=5)
    assert options["client_kwargs"] == {"region_name": "r", "verify": False}
    assert options["config_kwargs"] == {
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "connect_timeout": 3.0,
        "read_timeout": 7,
        "retries": {"mode": "standard", "total_max_attempts": 2},
        "max_pool_connections": 5,
        "s3": {"payload_signing_enabled": False, "addressing_style": "path", "x": 1},
    }
    assert options["skip_instance_cache"] is True and options["use_listings_cache"] is False
    assert {"endpoint_url", "region", "verify"} & set(options) == {"endpoint_url"}


def test_the_addressing_follows_the_endpoint(monkeypatch):
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)

    def style(uri):
        return s3_options(parse_location(uri), 1, 1)["config_kwargs"]["s3"]["addressing_style"]

    assert style("s3://b") == "auto"
    assert style("s3://b?endpoint_url=http://h") == "path"
    assert style("s3://b?endpoint_url=http://h&addressing_style=virtual") == "virtual"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://h")
    assert style("s3://b") == "path"


def test_a_body_that_is_cut_short_is_unavailable_not_corrupt(monkeypatch):
    """A server that announces 100 bytes, sends 10 and ends the connection."""

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\nConnection: close\r\n\r\n" + bytes(10))
        await writer.drain()
        writer.close()

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server = asyncio.run_coroutine_threadsafe(asyncio.start_server(serve, "127.0.0.1", 0), loop).result(10)
    store = s3_at(server.sockets[0].getsockname()[1], timeout_s=10)
    with pytest.raises(TierUnavailable, match="the answer ended before all of its bytes came"):
        store.get("x")
    store.close()
    loop.call_soon_threadsafe(server.close)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


# -- a shared directory -----------------------------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path):
    opened = open_store(f"shared+file://{tmp_path}/root")
    yield opened
    opened.close()


def test_files_and_directories_are_private(directory, tmp_path):
    directory.put("a/b/c", b"1")
    directory.create("a/d", b"1")
    root = tmp_path / "root"
    assert {path.stat().st_mode & 0o777 for path in (root / "a/b/c", root / "a/d")} == {0o600}
    assert {path.stat().st_mode & 0o777 for path in (root, root / "a", root / "a/b", root / TEMPORARY)} == {0o700}
    assert list((root / TEMPORARY).iterdir()) == []


def test_a_mount_that_is_not_there_is_not_made_up(tmp_path):
    store = open_store(f"shared+file://{tmp_path}/not/mounted")
    with pytest.raises(TierUnavailable, match="put failed: the directory is not there; check that it is mounted"):
        store.put("x", b"1")
    assert store.get("x") is None and paths(store) == []
    assert not (tmp_path / "not").exists()
    store.close()


def test_temporary_files_of_dead_writers_are_swept_by_age(tmp_path):
    place = tmp_path / "root" / TEMPORARY
    place.mkdir(parents=True)
    old, young, foreign = f"host-7-{'a' * 32}", f"host-7-{'b' * 32}", "upload.part"
    past = time.time() - STALE_S - 60
    for name in (old, young, foreign):
        (place / name).write_bytes(b"half")
    for name in (old, foreign):
        os.utime(place / name, (past, past))
    (place / ("c" * 32)).symlink_to("/nowhere")
    os.utime(place / ("c" * 32), (past, past), follow_symlinks=False)
    store = open_store(f"shared+file://{tmp_path}/root")
    assert paths(store) == []
    store.put("x", b"1")
    assert {path.name for path in place.iterdir()} == {young, foreign, "c" * 32}
    assert paths(store) == ["x"]
    store.close()


def test_a_write_that_fails_leaves_nothing(directory, tmp_path):
    directory.put("a/x", b"1")
    with pytest.raises(TierUnavailable):
        directory.put("a", b"2")  # a directory lies there
    assert list((tmp_path / "root" / TEMPORARY).iterdir()) == []
    assert directory.get("a/x") == b"1"


def test_symbolic_links_are_not_listed(directory, tmp_path):
    directory.put("a/x", b"1")
    (tmp_path / "root/a/link").symlink_to(tmp_path / "root/a/x")
    (tmp_path / "root/loop").symlink_to(tmp_path / "root")
    assert paths(directory) == ["a/x"]


MOUNTED = """
import subprocess, sys
from pathlib import Path
from tiered_kv.errors import TierUnavailable
from tiered_kv.location import parse_location
from tiered_kv.tiers.object.store import ObjectStore

mount, other, root = map(Path, sys.argv[1:4])

def run(*command):
    subprocess.run(command, check=True)

def says(call, *arguments):
    try:
        return call(*arguments)
    except TierUnavailable as exc:
        return str(exc)

def put(name):
    return says(store.put, name, b"x")

writes = root / "_tiered_kv/tmp"
if sys.argv[4:]:
    writes.mkdir(parents=True)  # an earlier server made it there
left = sorted(mount.rglob("*"))
run("mount", "-t", "tmpfs", "one", mount)
run("mount", "-t", "tmpfs", "two", other)
store = ObjectStore(parse_location(f"shared+file://{root}"))
assert put("a/1") is None
number = writes.stat().st_ino
run("mount", "--bind", mount, other)
run("umount", "-l", mount)
calls = (put, "a/2"), (store.get, "a/1"), (store.head, "a/1"), (list, store.list("")), (store.delete, ["a/1"])
for call, argument in calls:
    said = says(call, argument)
    assert "check that it is mounted" in str(said), (call, said)
assert sorted(mount.rglob("*")) == left, "something was written below the mount"
run("mount", "-t", "tmpfs", "three", mount)  # with another number, as after a detach and an attach
writes.parent.mkdir(parents=True)
writes.mkdir()
while writes.stat().st_ino < number:  # it counts up; what is attached again has the numbers that it had
    writes.rmdir()
    writes.mkdir()
assert writes.stat().st_ino == number
run("cp", "-r", f"{other}/.", mount)
assert put("a/2") is None
assert store.get("a/1") == store.get("a/2") == b"x"
store.close()
"""


@pytest.mark.parametrize("left", [[], ["left"]], ids=["nothing below", "an earlier server's below"])
@pytest.mark.parametrize("place", [".", "kv"], ids=["the mount itself", "a directory on it"])
def test_below_a_mount_that_went_away_nothing_is_written_and_nothing_is_missing(tmp_path, place, left):
    mount, other = tmp_path / "mount", tmp_path / "other"
    mount.mkdir()
    other.mkdir()
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine gives out no mount namespaces")
    command = ["unshare", "--mount", sys.executable, "-c", MOUNTED, mount, other, mount / place, *left]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_directory_that_was_deleted_is_made_again(tmp_path):
    store = open_store(f"shared+file://{tmp_path}/root")
    store.put("a", b"1")
    shutil.rmtree(tmp_path / "root")
    store.put("b", b"2")
    assert paths(store) == ["b"]
    store.close()


# -- opening ----------------------------------------------------------------------------------------------------------


OPERATIONS = {"get", "put", "head", "page", "delete", "close"}


@pytest.mark.parametrize("lacking", sorted(OPERATIONS))
def test_a_medium_that_lacks_an_operation_cannot_be_made(lacking):
    with pytest.raises(TypeError, match=f"abstract method '?{lacking}"):
        type("Half", (Medium,), dict.fromkeys(OPERATIONS - {lacking}))()


def test_a_store_of_another_kind_or_without_its_package_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match="is no object store"):
        open_store("file:///dir")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for uri, package in (("gs://b/p", "gcsfs"), ("az://b/p", "adlfs"), ("s3://b/p", "s3fs")):
        with pytest.raises(ConfigError, match=f"needs the package {package}: pip install {package}"):
            open_store(uri)


def test_a_child_process_makes_a_client_of_its_own(s3):
    store = open_store(s3.uri(s3.new_prefix()), s3.options())
    store.put("x", b"parent")
    assert read_by_child(store, "x") == b"parent"
    assert store.get("x") == b"parent"
    store.close()
