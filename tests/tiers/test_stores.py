"""What goes wrong with Google's, Azure's and a second S3's servers, and CephFS's: killed, frozen, cut off, refused.

The servers are real (``tests/kit/stores``). Google's emulator checks no credentials: an HTTP server that answers as
Google does stands in where they are refused.
"""

import contextlib
import json
import os
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from fsspec.asyn import get_loop

from tests.kit.faults.proxy import Fault, FaultProxy, Mode
from tests.kit.missing import needed
from tests.kit.raw_server import RawServer
from tests.kit.server.probe import wait_for
from tests.kit.stores.child import read_by_child
from tests.kit.stores.session import ATOMIC, OVERWRITING
from tiered_kv.errors import ChunkCorrupt, TierUnavailable
from tiered_kv.keys.naming import object_path
from tiered_kv.location import parse_location
from tiered_kv.testing.blobs import SampleChain
from tiered_kv.tiers.object.loop_client import LoopClient
from tiered_kv.tiers.object.store import ObjectStore
from tiered_kv.tiers.object.tier import ObjectTier
from tiered_kv.tiers.wrappers.verified import VerifiedTier

CHAIN = SampleChain()


@pytest.fixture(params=ATOMIC)
def served(request, stores):
    return stores(request.param)


@pytest.fixture(params=["gs", "az"])
def cloud(request, stores):
    """Those that have media of their own; S3's faults are tried on Ceph's gateway."""
    return stores(request.param)


def open_store(uri, options, **more):
    return ObjectStore(parse_location(uri, options), **more)


def open_impatient(uri, options, timeout_s):
    """A store that has its client already: making one may take longer than its deadline on a busy machine."""
    store = open_store(uri, options, timeout_s=timeout_s)
    wait_for(lambda: is_done(lambda: store.head("nothing")), "the client")
    return store


def put_in_time(store, path, data):
    """Put an object, as often as it takes to meet the deadline on a busy machine."""
    wait_for(lambda: is_done(lambda: store.put(path, data)), "a put within the deadline")


def is_done(call):
    try:
        call()
    except TierUnavailable as exc:
        assert "in time" in str(exc)
        return False
    return True


def every_call(store):
    return {
        "get": lambda: store.get("x"),
        "put": lambda: store.put("x", b"1"),
        "create": lambda: store.create("x", b"1"),
        "head": lambda: store.head("x"),
        "list": lambda: list(store.list("")),
        "delete": lambda: store.delete(["x"]),
    }


def fails(store, words, *, but=()):
    """Every call fails in these words, within its deadline."""
    for operation, call in every_call(store).items():
        if operation not in but:
            with pytest.raises(TierUnavailable, match=f"{operation} failed: {words}"):
                call()


# -- bodies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*ATOMIC, *OVERWRITING])
def test_a_body_comes_back_whole_whatever_it_ends_in(stores, kind):
    served = stores(kind)
    store = open_store(served.uri(served.new_prefix()), served.options())
    bodies = [b"", b"\r", b"\n", b"\r\n", b"x\r", b"x\n", b"x\0", b"--==0==", b"\n--==0==\n", b"a\r\n--==0==--\r\nb"]
    for number, body in enumerate(bodies):
        store.put(f"put/{number}", body)
        store.create(f"create/{number}", body)
    assert [store.get(f"put/{number}") for number in range(len(bodies))] == bodies
    assert [store.get(f"create/{number}") for number in range(len(bodies))] == bodies
    store.close()


# -- the server -------------------------------------------------------------------------------------------------------


def test_a_server_that_is_killed_is_unavailable_and_used_again_when_it_is_back(served):
    store = open_store(served.uri(served.new_prefix()), served.options())
    store.put("before", b"1")
    served.server.kill()
    try:
        fails(store, "the connection was (refused|cut)")
    finally:
        served.start()
    store.put("x", b"after")
    assert store.get("x") == b"after"
    assert not store.create("x", b"other")
    store.close()


def test_a_server_that_stands_still_costs_the_deadline_and_is_used_again(served):
    prefix = served.new_prefix()
    store = open_impatient(served.uri(prefix), served.options(), timeout_s=3)
    put_in_time(store, "kept", b"before")
    with served.server.frozen():
        fails(store, "the store did not answer in time", but=("create", "head", "delete"))  # each costs the deadline
    store.close()
    store = open_store(served.uri(prefix), served.options())
    assert store.get("kept") == b"before"  # of "x" nobody knows: the server may do later what it had heard
    store.put("kept", b"after")
    assert store.get("kept") == b"after"
    store.close()


def test_a_child_process_makes_a_client_of_its_own(cloud):
    store = open_store(cloud.uri(cloud.new_prefix()), cloud.options())
    store.put("x", b"parent")
    assert read_by_child(store, "x") == b"parent"
    assert store.get("x") == b"parent"
    store.close()


def test_two_mounts_of_cephfs_see_what_the_other_writes_and_one_creates(cephfs):
    name = cephfs.new_name()
    one, other = (open_store(f"shared+file://{mount}/{name}", {}) for mount in cephfs.mounts)
    for number in range(20):
        path, stores = f"lease/{number}", (one, other) if number % 2 else (other, one)
        won, gate = [], threading.Barrier(8)

        def create(store, data, path=path, won=won, gate=gate):
            gate.wait()
            if store.create(path, data):
                won.append(data)

        threads = [threading.Thread(target=create, args=(stores[i % 2], b"%d" % i)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1 and one.get(path) == other.get(path) == won[0]
    one.put("x", b"1")
    assert other.get("x") == b"1"
    other.put("x", b"22")
    assert one.get("x") == b"22" and one.head("x").size_bytes == 2
    other.delete(["x"])
    assert one.get("x") is None
    assert {info.path for info in one.list("")} == {info.path for info in other.list("")}


def test_a_metadata_server_of_cephfs_that_stands_still_costs_the_deadline(cephfs):
    store = open_store(f"shared+file://{cephfs.mounts[0]}/{cephfs.new_name()}", {}, timeout_s=2)
    put_in_time(store, "before", b"1")
    with cephfs.frozen(), pytest.raises(TierUnavailable, match="put failed: the store did not answer in time"):
        store.put("x", b"1")
    store = open_store(f"shared+file://{cephfs.mounts[1]}/{cephfs.new_name()}", {}, timeout_s=60)
    store.put("x", b"after")
    assert store.get("x") == b"after"


@pytest.mark.parametrize("operation", ["put", "create"])
def test_what_a_mount_that_hung_does_later_is_not_published(cephfs, operation):
    """Its server was told that it is unavailable, and by then may have granted its bytes to another."""
    store = open_store(f"shared+file://{cephfs.mounts[0]}/{cephfs.new_name()}", {}, timeout_s=3)
    put_in_time(store, "before", b"1")
    with cephfs.frozen(), pytest.raises(TierUnavailable, match=f"{operation} failed: the store did not answer in time"):
        getattr(store, operation)("x", b"late")
    wait_for(lambda: not [t for t in threading.enumerate() if t.name == "object-store-call"], "the call to come back")
    assert store.get("x") is None
    assert [info.path for info in store.list("")] == ["before"]


def test_a_client_that_takes_too_long_costs_the_deadline_and_is_there_for_the_next_call():
    release, made = threading.Event(), []

    class Client:
        loop = get_loop()

    async def answer():
        return 7

    def make():
        release.wait(60)
        made.append(Client())
        return made[0]

    client = LoopClient(make, timeout_s=0.3)
    with pytest.raises(TimeoutError):
        client.run(lambda _: answer())
    release.set()
    wait_for(lambda: client._client is not None, "the late client")
    assert client.run(lambda opened: answer() if opened is made[0] else None) == 7
    assert len(made) == 1


# -- the way ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def behind(cloud):
    """A proxy before the server, and a store behind it."""
    prefix = cloud.new_prefix()
    with FaultProxy(cloud.server.endpoint_url) as proxy:
        store = open_store(cloud.uri(prefix), cloud.options(proxy.url))
        yield proxy, store, prefix
        store.close()


def test_every_operation_is_one_request(behind):
    proxy, store, _ = behind
    store.put("x", b"data")

    def made_by(call):
        proxy.forget()
        call()
        return len(proxy.requests)

    for call in every_call(store).values():
        assert made_by(call) == 1
    assert made_by(lambda: store.get("missing")) == 1
    assert made_by(lambda: store.head("missing")) == 1
    assert made_by(lambda: store.get_head("missing", 4)) == 1
    assert made_by(lambda: store.delete(["missing"])) == 1
    assert made_by(lambda: store.delete([f"missing-{number}" for number in range(20)])) == 20


def test_a_list_comes_in_pages_and_a_delete_in_parts(cloud, monkeypatch):
    module = {"gs": "google", "az": "azure"}[cloud.uri("").partition(":")[0]]
    monkeypatch.setattr(f"tiered_kv.tiers.object.{module}.PAGE_MAX", 10)
    prefix = cloud.new_prefix()
    names = [f"n/{number:02d}" for number in range(25)]
    with FaultProxy(cloud.server.endpoint_url) as proxy:
        store = open_store(cloud.uri(prefix), cloud.options(proxy.url))
        for name in names:
            store.put(name, b"1")
        proxy.forget()
        assert sorted(info.path for info in store.list("n/")) == names
        assert len(proxy.requests) == 3
        store.delete([*names, "n/missing"])
        assert cloud.sizes(prefix) == {}
        store.close()


def test_a_blob_of_many_megabytes_is_created_once_and_whole(cloud):
    store = open_store(cloud.uri(cloud.new_prefix()), cloud.options(), timeout_s=60)
    first, second = os.urandom(72 << 20), bytes(72 << 20)
    assert store.create("x", memoryview(first))
    assert not store.create("x", memoryview(second))
    back = bytearray(len(first))
    assert store.get_into("x", memoryview(back)) and back == first
    store.close()


@pytest.mark.parametrize("mode", [Mode.RESET, Mode.LOST, Mode.STATUS])
def test_what_fails_once_is_asked_a_second_time(behind, mode):
    proxy, store, _ = behind
    store.put("x", b"one")
    with proxy.failing(Fault(mode, first=1)):
        assert store.get("x") == b"one"
    with proxy.failing(Fault(mode, first=1)):
        store.put("x", b"two")
    assert store.get("x") == b"two"
    with proxy.failing(Fault(mode, first=1)):
        assert store.head("x").size_bytes == 3


def test_a_create_whose_answer_was_lost_is_not_done_twice(behind, cloud):
    proxy, store, prefix = behind
    with proxy.failing(Fault(Mode.LOST, first=1)):
        assert not store.create("x", b"one")  # it met its own
    assert cloud.get(prefix, "x") == b"one"


def test_what_fails_twice_is_unavailable_and_said_in_words(behind):
    proxy, store, _ = behind
    store.put("kept", b"one")
    # The proxy words its 503 as S3 does, SlowDown, which Azure's client understands.
    inside = "(the store failed inside .HTTP 503|the store asks for fewer requests)"
    for mode, words in ((Mode.STATUS, inside), (Mode.RESET, "(the connection was cut|the answer ended)")):
        with proxy.failing(Fault(mode)):
            fails(store, words)
    with proxy.failing(Fault(Mode.TRUNCATE)), pytest.raises(TierUnavailable, match="get failed: the answer ended|cut"):
        store.get("kept")
    assert store.get("kept") == b"one"


def test_a_flipped_bit_is_found(behind, cloud):
    proxy, store, prefix = behind
    blob = CHAIN.blob(0)
    cloud.put(prefix, object_path(blob.name), blob.data)
    tier = VerifiedTier(ObjectTier(store), {CHAIN.namespace: CHAIN.form}.get)
    buffer = bytearray(CHAIN.form.blob_bytes)
    with proxy.failing(Fault(Mode.FLIP)), pytest.raises(ChunkCorrupt):
        tier.get_into(blob.name, memoryview(buffer))
    assert tier.get_into(blob.name, memoryview(buffer)) and buffer == blob.data


@pytest.mark.parametrize("fault", [Fault(Mode.SILENCE), Fault(Mode.DRIP, bytes_per_s=1000)], ids=["silence", "drip"])
def test_a_read_that_hangs_on_the_way_costs_the_deadline_and_reaches_no_memory_later(cloud, fault):
    prefix, blob = cloud.new_prefix(), CHAIN.blob(0)
    cloud.put(prefix, object_path(blob.name), blob.data)
    with FaultProxy(cloud.server.endpoint_url) as proxy:
        store = open_impatient(cloud.uri(prefix), cloud.options(proxy.url), timeout_s=1)
        tier, buffer = verified(store), bytearray(CHAIN.form.blob_bytes)
        with proxy.failing(fault), pytest.raises(TierUnavailable, match="get failed: the store did not answer in time"):
            tier.get_into(blob.name, memoryview(buffer))
        buffer[:] = bytes(len(buffer))  # the caller has given it to somebody else
        other = bytearray(len(buffer))
        wait_for(lambda: is_read(tier, blob.name, other), "the store to answer again")
        assert other == blob.data and buffer == bytes(len(buffer))
        store.close()


def test_writes_that_hang_on_the_way_cost_the_deadline_and_leave_nothing_half(cloud):
    prefix, blob = cloud.new_prefix(), CHAIN.blob(0)
    with FaultProxy(cloud.server.endpoint_url) as proxy:
        store = open_impatient(cloud.uri(prefix), cloud.options(proxy.url), timeout_s=1)
        tier = verified(store)
        with proxy.failing(Fault(Mode.SILENCE)), pytest.raises(TierUnavailable, match="did not answer in time"):
            tier.put(blob.name, blob.view())
        assert cloud.sizes(prefix) == {}
        assert put_again(tier, blob), "the store to answer again"
        assert cloud.get(prefix, object_path(blob.name)) == blob.data
        store.close()


@pytest.mark.parametrize("mode", [Mode.RESET, Mode.STATUS])
def test_a_write_that_is_cut_off_leaves_nothing_half(behind, cloud, mode):
    proxy, store, prefix = behind
    blob, tier = CHAIN.blob(0), verified(store)
    with proxy.failing(Fault(mode)), pytest.raises(TierUnavailable):
        tier.put(blob.name, blob.view())
    assert cloud.sizes(prefix) == {}
    tier.put(blob.name, blob.view())
    assert cloud.get(prefix, object_path(blob.name)) == blob.data


@pytest.mark.parametrize("mode", [Mode.RESET, Mode.TRUNCATE])
def test_a_blob_that_is_cut_short_on_the_way_is_unavailable_and_not_taken_for_damaged(behind, cloud, mode):
    """It would be deleted, and it is whole."""
    proxy, store, prefix = behind
    blob, tier, buffer = CHAIN.blob(0), verified(store), bytearray(CHAIN.form.blob_bytes)
    cloud.put(prefix, object_path(blob.name), blob.data)
    with proxy.failing(Fault(mode, kinds={"GET"})), pytest.raises(TierUnavailable):
        tier.get_into(blob.name, memoryview(buffer))
    assert cloud.get(prefix, object_path(blob.name)) == blob.data
    assert tier.get_into(blob.name, memoryview(buffer)) and buffer == blob.data


@pytest.mark.parametrize("length", ["none", "less", "more"])
def test_a_blob_of_another_length_is_damaged(cloud, length):
    prefix, blob = cloud.new_prefix(), CHAIN.blob(0)
    store = open_store(cloud.uri(prefix), cloud.options())
    tier, buffer = verified(store), bytearray(CHAIN.form.blob_bytes)
    cloud.put(prefix, object_path(blob.name), {"none": b"", "less": blob.data[:-1], "more": blob.data + b"x"}[length])
    with pytest.raises(ChunkCorrupt):
        tier.get_into(blob.name, memoryview(buffer))
    cloud.put(prefix, object_path(blob.name), blob.data)
    assert tier.get_into(blob.name, memoryview(buffer)) and buffer == blob.data
    store.close()


@pytest.mark.parametrize(("kind", "status"), [("gs", 429), ("gs", 503), ("az", 503), ("az", 429)])
def test_a_store_that_is_asked_too_much_is_asked_twice_and_not_for_as_long_as_it_wants(stores, kind, status):
    """It answers as the cloud does, and wants the next request in a minute."""
    served = stores(kind)
    busy = {
        "gs": google_error(status, "The rate of change requests to the object exceeds the rate limit."),
        "az": b"\xef\xbb\xbf<?xml version='1.0' encoding='utf-8'?><Error><Code>ServerBusy</Code>"
        b"<Message>The server is busy.</Message></Error>",
    }[kind]
    more = {"Retry-After": "60"} | ({"x-ms-error-code": "ServerBusy"} if kind == "az" else {})
    with answering(status, busy, more) as (url, asked):
        store = open_store(served.uri("p"), served.options(url))
        fails(store, "(the store asks for fewer requests|the store failed inside .HTTP 503)")
        assert len(asked) == 2 * len(every_call(store))
        store.close()


def verified(store):
    return VerifiedTier(ObjectTier(store), {CHAIN.namespace: CHAIN.form}.get)


def is_read(tier, name, buffer):
    with contextlib.suppress(TierUnavailable):
        return tier.get_into(name, memoryview(buffer))
    return False


def put_again(tier, blob):
    for _ in range(20):  # a client may have to notice first that its connections are gone
        with contextlib.suppress(TierUnavailable):
            tier.put(blob.name, blob.view())
            return True
    return False


# -- what is wrong on this side ---------------------------------------------------------------------------------------


def test_a_missing_bucket_is_told(cloud):
    scheme = cloud.uri("").partition(":")[0]
    store = open_store(f"{scheme}://tiered-kv-no-such-bucket/p", cloud.options())
    # Google's answers do not tell a missing bucket from a missing object; what writes or lists knows.
    unclear = {"gs": ("get", "head", "delete"), "az": ()}[scheme]
    fails(store, "there is no bucket or container 'tiered-kv-no-such-bucket'; create it", but=unclear)
    store.close()


def test_a_wrong_key_of_an_azure_account_is_told_and_not_shown(stores, caplog):
    served = stores("az")
    wrong = "d3Jvbmcgd3Jvbmcgd3Jvbmc="
    store = open_store(served.uri("p"), served.options(key=wrong))
    for operation, call in every_call(store).items():
        with pytest.raises(TierUnavailable, match=f"{operation} failed: the store refuses these credentials") as caught:
            call()
        assert wrong not in str(caught.value) and wrong not in repr(store) and wrong not in caplog.text
    store.close()


@contextmanager
def answering(status, body, more=None):
    """A server that gives the same answer to everything: its URL, and what it was asked."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            asked.append((self.command, self.path))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            for name, value in {"Content-Type": "application/json", **(more or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(b"" if self.command == "HEAD" else body)

        do_GET = do_POST = do_DELETE = do_PUT = do_HEAD = answer  # noqa: N815

        def log_message(self, *args):
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


def google_error(status, message):
    return json.dumps({"error": {"code": status, "message": message, "errors": [{"reason": "x"}]}}).encode()


@pytest.mark.parametrize(
    ("uri", "option", "package"),
    [("s3://bucket/p", "verify", "s3fs"), ("gs://bucket/p", "token", "gcsfs")],
)
def test_a_file_that_an_option_names_and_that_is_not_there_is_told(uri, option, package, tmp_path):
    """A CA bundle that no volume brings into the container, or a service account's file: a token is not a path."""
    needed(package)
    store = open_store(uri, {"endpoint_url": "https://127.0.0.1:1", option: str(tmp_path / "hidden.pem")})
    fails(store, f"the file that the option {option} names cannot be read")
    with pytest.raises(TierUnavailable) as caught:
        store.get("x")
    assert "hidden" not in str(caught.value)
    store.close()


@pytest.mark.parametrize(
    ("status", "message"),
    [(401, "Invalid Credentials"), (403, "me@x does not have storage.objects.get access"), (401, "Anonymous caller")],
)
def test_credentials_that_google_refuses_are_told_at_once(status, message, monkeypatch):
    needed("gcsfs")
    monkeypatch.setenv("FETCH_RAW_TOKEN_EXPIRY", "false")  # else gcsfs asks Google how long the token holds
    with answering(status, google_error(status, message)) as (url, asked):
        store = open_store("gs://bucket/p", {"endpoint_url": url, "token": "ya29.hidden"})
        fails(store, "the store refuses these credentials")
        assert len(asked) == len(every_call(store)), "it was asked again and again"
        with pytest.raises(TierUnavailable) as caught:
            store.get("x")
        assert "hidden" not in str(caught.value)
        store.close()


def test_a_page_for_people_is_no_stored_object_no_deletion_and_no_damaged_blob_of_googles(monkeypatch):
    """A load balancer under maintenance, or the portal of a network, answers everything with 200."""
    needed("gcsfs")
    monkeypatch.setenv("FETCH_RAW_TOKEN_EXPIRY", "false")
    page = b"<!DOCTYPE html><html><head><title>Soon</title></head><body><p>We are back soon.<br/></p></body></html>"
    with answering(200, page, {"Content-Type": "text/html; charset=utf-8"}) as (url, asked):
        store = open_store("gs://bucket/p", {"endpoint_url": url, "token": "ya29.hidden"})
        fails(store, "what answers there is no object store")
        assert len(asked) == len(every_call(store)), "it was asked again"
        with pytest.raises(TierUnavailable, match="get failed: what answers there is no object store"):
            store.get_into("x", memoryview(bytearray(5000)))  # as damaged it would be deleted, and it may be whole
        store.close()


@pytest.mark.parametrize("status", [200, 404])
def test_an_answer_that_lacks_google_s_headers_is_nobody_s_once_it_has_sent_them(monkeypatch, status):
    """A missing object is forgotten, a damaged one deleted; Google's 404 to a read of content is a page, too."""
    needed("gcsfs")
    monkeypatch.setenv("FETCH_RAW_TOKEN_EXPIRY", "false")
    is_away, holds = threading.Event(), threading.Event()
    info = b'{"name": "p/x", "size": "4", "updated": "2026-01-01T00:00:00Z"}'
    holds.set()

    def answer(asked):
        asked.read_body()
        if is_away.is_set():
            return b"HTTP/1.1 %d Nobody\r\nContent-Length: 0\r\n\r\n" % status
        found = b"data" if "alt=media" in asked.line else b"" if asked.line.startswith("DELETE") else info
        code, said = (200, found) if holds.is_set() else (404, b"No such object: bucket/p/x")
        head = b"HTTP/1.1 %d Google\r\nX-GUploader-UploadID: 1\r\nContent-Type: text/html\r\nETag: e\r\n" % code
        return head + b"Content-Length: %d\r\n\r\n%s" % (len(said), said)

    with RawServer(answer) as server:
        store = open_store("gs://bucket/p", {"endpoint_url": server.url, "token": "ya29.hidden"})
        calls = {name: call for name, call in every_call(store).items() if name not in ("list", "create")}
        for call in calls.values():
            call()
        holds.clear()
        assert store.get("x") is None and store.head("x") is None
        holds.set()
        is_away.set()
        calls["delete"] = lambda: store.delete(["x", "y"])
        for operation, call in calls.items():
            with pytest.raises(TierUnavailable, match=f"{operation} failed: what answers there is no object store"):
                call()
        with pytest.raises(TierUnavailable, match="get failed: what answers there is no object store"):
            store.get_into("x", memoryview(bytearray(4)))
        is_away.clear()
        assert store.get("x") == b"data"
        store.close()


def test_a_list_of_google_s_is_believed_without_its_headers_and_nothing_else_in_its_place(monkeypatch):
    """A proxy began to drop headers that it does not know: no lease and no epoch was seen for ten minutes."""
    needed("gcsfs")
    monkeypatch.setenv("FETCH_RAW_TOKEN_EXPIRY", "false")
    marks, said = b"X-GUploader-UploadID: 1\r\n", [b'{"kind": "storage#objects"}'] * 2
    said += [b"{}", b"[]", b"", b'{"kind": "storage#object"}']

    def answer(asked):
        assert "kind%2Citems%28" in asked.line or "kind,items(" in asked.line
        body = said.pop(0)
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n%sContent-Length: %d\r\n\r\n"
        return head % (marks, len(body)) + body

    with RawServer(answer) as server:
        store = open_store("gs://bucket/p", {"endpoint_url": server.url, "token": "ya29.hidden"})
        assert list(store.list("")) == []
        marks = b""
        assert list(store.list("")) == []
        while said:
            with pytest.raises(TierUnavailable, match="list failed: what answers there is no object store"):
                list(store.list(""))
        store.close()


def test_a_service_account_that_google_does_not_know_any_more_is_told_at_once(tmp_path):
    needed("gcsfs")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(65537, 2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    with answering(400, b'{"error": "invalid_grant", "error_description": "Invalid JWT Signature."}') as (url, asked):
        account = {
            "type": "service_account",
            "client_email": "cache@project.iam.gserviceaccount.com",
            "private_key_id": "1",
            "private_key": key.decode(),
            "token_uri": f"{url}/token",
        }
        file = tmp_path / "account.json"
        file.write_text(json.dumps(account))
        store = open_store("gs://bucket/p", {"endpoint_url": url, "token": str(file)})
        fails(store, "what gives credentials refuses or is not there .invalid_grant: Invalid JWT Signature.")
        assert {path for _, path in asked} == {"/token"}
        store.close()
