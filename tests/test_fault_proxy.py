"""The fault proxy in front of a real S3 server: what it damages, what it lets through, what it counts."""

import http.client
import socket
import threading
import time

import pytest
from botocore.exceptions import (
    ClientError,
    ConnectionClosedError,
    EndpointConnectionError,
    IncompleteReadError,
    ReadTimeoutError,
    ResponseStreamingError,
)

from tests.kit.faults.proxy import Fault, FaultProxy, Mode
from tests.kit.s3 import S3
from tests.kit.server.probe import wait_for

BODY = bytes(range(256)) * 4096  # 1 MiB

BROKEN = (ConnectionClosedError, ResponseStreamingError, IncompleteReadError)


@pytest.fixture
def proxy(s3: S3):
    with FaultProxy(s3.endpoint_url) as proxy:
        yield proxy


@pytest.fixture
def client(s3: S3, proxy: FaultProxy):
    """Talks through the proxy: the Host header it signs is the proxy's, which the server has to take."""
    with s3.client(proxy.url, read_timeout=30) as client:
        yield client


@pytest.fixture
def key(s3: S3) -> str:
    """A stored object of 1 MiB, put past the proxy."""
    key = f"{s3.new_prefix()}/one object & more"
    with s3.client() as client:
        client.put_object(Bucket=s3.bucket, Key=key, Body=BODY)
    return key


def get(client, s3: S3, key: str) -> bytes:
    return client.get_object(Bucket=s3.bucket, Key=key)["Body"].read()


def stored(s3: S3, key: str) -> bytes | None:
    """What the server has, asked past the proxy."""
    with s3.client() as direct:
        try:
            return get(direct, s3, key)
        except ClientError as exc:
            assert exc.response["Error"]["Code"] == "NoSuchKey"
            return None


def test_everything_passes_unchanged_and_is_counted(s3: S3, proxy: FaultProxy, client) -> None:
    prefix = s3.new_prefix()
    names = [f"{prefix}/{name}" for name in ("a", "b&c", "ü+ö")]
    for name in names:
        client.put_object(Bucket=s3.bucket, Key=name, Body=BODY)
    listed = client.list_objects_v2(Bucket=s3.bucket, Prefix=prefix)["Contents"]

    assert [item["Key"] for item in listed] == names
    assert client.head_object(Bucket=s3.bucket, Key=names[1])["ContentLength"] == len(BODY)
    assert all(get(client, s3, name) == BODY for name in names)
    part = client.get_object(Bucket=s3.bucket, Key=names[0], Range="bytes=5-9")
    assert part["ResponseMetadata"]["HTTPStatusCode"] == 206
    assert part["Body"].read() == BODY[5:10]
    orders = [{"Key": name} for name in names[:2]]
    client.delete_objects(Bucket=s3.bucket, Delete={"Objects": orders})
    client.delete_object(Bucket=s3.bucket, Key=names[2])
    assert s3.paths(prefix) == []
    assert proxy.counts() == {"PUT": 3, "LIST": 1, "HEAD": 1, "GET": 4, "POST": 1, "DELETE": 1}
    assert proxy.count("GET", "ü+ö") == 1
    assert proxy.requests[3].path == f"/{s3.bucket}/{prefix}"
    proxy.forget()
    assert proxy.requests == []


def test_missing_object_and_refused_condition_pass(s3: S3, proxy: FaultProxy, client, key: str) -> None:
    with pytest.raises(ClientError, match="NoSuchKey"):
        get(client, s3, key + "?")
    with pytest.raises(ClientError, match="404"):
        client.head_object(Bucket=s3.bucket, Key=key + "?")
    with pytest.raises(ClientError, match="PreconditionFailed"):
        client.put_object(Bucket=s3.bucket, Key=key, Body=b"new", IfNoneMatch="*")
    assert [request.is_conditional for request in proxy.requests] == [False, False, True]


@pytest.mark.parametrize(("status", "code"), [(403, "AccessDenied"), (500, "InternalError"), (503, "SlowDown")])
def test_error_status_carries_the_code_of_s3_and_hides_the_request(
    s3: S3, proxy: FaultProxy, client, key: str, status: int, code: str
) -> None:
    new = key + "-new"
    with proxy.failing(Fault(Mode.STATUS, status=status)):
        with pytest.raises(ClientError, match=code):
            get(client, s3, key)
        with pytest.raises(ClientError, match=code):
            client.put_object(Bucket=s3.bucket, Key=new, Body=BODY)
        with pytest.raises(ClientError, match=str(status)):
            client.head_object(Bucket=s3.bucket, Key=key)

    assert stored(s3, new) is None
    assert get(client, s3, key) == BODY


@pytest.mark.parametrize("mode", [Mode.RESET, Mode.TRUNCATE])
def test_answer_that_breaks_off_is_an_error_of_the_client(s3: S3, proxy: FaultProxy, client, key: str, mode) -> None:
    with proxy.failing(Fault(mode, kinds={"GET"})):
        with pytest.raises(BROKEN):
            get(client, s3, key)
        client.head_object(Bucket=s3.bucket, Key=key)

    assert get(client, s3, key) == BODY


@pytest.mark.parametrize("mode", [Mode.RESET, Mode.TRUNCATE])
def test_half_a_body_is_what_arrives(s3: S3, proxy: FaultProxy, key: str, mode: Mode) -> None:
    """By http.client, which shows bytes and end as they come: FIN is an early end, RST an error."""
    proxy.set(Fault(mode))
    with s3.client(proxy.url) as client:
        url = client.generate_presigned_url("get_object", {"Bucket": s3.bucket, "Key": key})
    connection = http.client.HTTPConnection("127.0.0.1", int(proxy.url.rpartition(":")[2]), timeout=30)
    connection.request("GET", url.removeprefix(proxy.url))
    answer = connection.getresponse()
    assert answer.status == 200
    assert answer.length == len(BODY)
    if mode is Mode.TRUNCATE:
        with pytest.raises(http.client.IncompleteRead) as caught:
            answer.read()
        assert caught.value.partial == BODY[: len(BODY) // 2]
    else:
        with pytest.raises(ConnectionResetError):
            answer.read()
    connection.close()


def test_put_that_breaks_off_stores_nothing(s3: S3, proxy: FaultProxy, client, key: str) -> None:
    with proxy.failing(Fault(Mode.RESET, kinds={"PUT"})):
        with pytest.raises((ConnectionClosedError, EndpointConnectionError)):
            client.put_object(Bucket=s3.bucket, Key=key, Body=b"other" * 100_000)

    assert stored(s3, key) == BODY


def test_lost_answer_means_done_but_unknown(s3: S3, proxy: FaultProxy, client, key: str) -> None:
    with proxy.failing(Fault(Mode.LOST, kinds={"PUT", "DELETE"}, first=1)):
        with pytest.raises(BROKEN):
            client.put_object(Bucket=s3.bucket, Key=key, Body=b"other")
        assert stored(s3, key) == b"other"
        client.delete_object(Bucket=s3.bucket, Key=key)

    assert stored(s3, key) is None


def test_flipped_bit_changes_one_bit(s3: S3, proxy: FaultProxy, client, key: str) -> None:
    with proxy.failing(Fault(Mode.FLIP)):
        got = get(client, s3, key)

    wrong = [(ours ^ theirs).bit_count() for ours, theirs in zip(BODY, got, strict=True)]
    assert sum(wrong) == 1
    assert wrong[len(BODY) // 2] == 1


def test_dripping_body_arrives_whole_and_late(s3: S3, proxy: FaultProxy, client, key: str) -> None:
    """At this speed the whole body would take a quarter of an hour: it ends because the fault is lifted."""
    got = []
    proxy.set(Fault(Mode.DRIP, kinds={"GET"}, bytes_per_s=1000))
    reader = threading.Thread(target=lambda: got.append(get(client, s3, key)))
    reader.start()
    wait_for(lambda: proxy.count("GET") == 1, "the request")
    time.sleep(0.3)
    assert got == []
    proxy.set()
    reader.join(30)

    assert got == [BODY]


def test_silence_ends_with_the_client_or_the_fault(s3: S3, proxy: FaultProxy, key: str) -> None:
    with s3.client(proxy.url, read_timeout=0.2) as impatient, proxy.failing(Fault(Mode.SILENCE)):
        with pytest.raises(ReadTimeoutError):
            get(impatient, s3, key)
        with pytest.raises(ReadTimeoutError):
            impatient.put_object(Bucket=s3.bucket, Key=key, Body=b"other")

    assert stored(s3, key) == BODY


def test_silent_connection_is_reset_when_the_fault_is_lifted(s3: S3, proxy: FaultProxy, client, key: str) -> None:
    raised = []

    def ask() -> None:
        try:
            get(client, s3, key)
        except BROKEN as exc:
            raised.append(exc)

    proxy.set(Fault(Mode.SILENCE))
    asker = threading.Thread(target=ask)
    asker.start()
    wait_for(lambda: proxy.count("GET") == 1, "the request")
    proxy.set()
    asker.join(30)

    assert len(raised) == 1


def test_down_refuses_and_up_serves_on_the_same_port(s3: S3, proxy: FaultProxy, client, key: str) -> None:
    assert get(client, s3, key) == BODY
    url = proxy.url
    proxy.down()
    with pytest.raises((ConnectionClosedError, EndpointConnectionError)):  # the pooled connection was reset
        get(client, s3, key)
    with pytest.raises(EndpointConnectionError):
        get(client, s3, key)
    proxy.down()
    proxy.up()
    proxy.up()

    assert proxy.url == url
    assert get(client, s3, key) == BODY


def test_going_down_resets_connections_that_wait(s3: S3, proxy: FaultProxy) -> None:
    idle = socket.create_connection(("127.0.0.1", int(proxy.url.rpartition(":")[2])), timeout=30)
    idle.sendall(b"GET / HT")
    wait_for(lambda: len(proxy._open) == 1, "the connection")
    proxy.down()

    with pytest.raises(ConnectionResetError):
        idle.recv(1)
    idle.close()


def test_only_the_first_requests_fail(s3: S3, proxy: FaultProxy, client, key: str) -> None:
    outcomes = []
    with proxy.failing(Fault(Mode.STATUS, kinds={"HEAD"}, path="one object", first=2)):
        for _ in range(4):
            get(client, s3, key)
            try:
                client.head_object(Bucket=s3.bucket, Key=key)
                outcomes.append("passed")
            except ClientError:
                outcomes.append("failed")

    assert outcomes == ["failed", "failed", "passed", "passed"]


def test_first_fault_that_fits_decides(s3: S3, proxy: FaultProxy, client, key: str) -> None:
    with proxy.failing(Fault(Mode.STATUS, status=403, first=1), Fault(Mode.STATUS, status=500, kinds={"GET"})):
        for code in ("AccessDenied", "InternalError"):
            with pytest.raises(ClientError, match=code):
                get(client, s3, key)
        client.head_object(Bucket=s3.bucket, Key=key)


def test_choice_by_probability_is_the_seeds(s3: S3) -> None:
    key = f"{s3.new_prefix()}/k"

    def outcomes(seed: int) -> str:
        with FaultProxy(s3.endpoint_url) as proxy, s3.client(proxy.url) as client:
            proxy.set(Fault(Mode.STATUS, probability=0.5, seed=seed))
            codes = []
            for _ in range(40):
                with pytest.raises(ClientError) as caught:
                    client.head_object(Bucket=s3.bucket, Key=key)
                codes.append("x" if caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 503 else ".")
            return "".join(codes)

    first = outcomes(1)
    assert outcomes(1) == first
    assert outcomes(2) != first
    assert 5 < first.count("x") < 35


def test_server_that_dies_looks_like_one_that_dies(s3: S3, proxy: FaultProxy, client, key: str) -> None:
    if s3.server is None:
        pytest.skip("the server is not ours to kill")
    s3.server.kill_gateway()
    try:
        with pytest.raises(BROKEN):
            get(client, s3, key)
    finally:
        s3.server.start_gateway()

    assert get(client, s3, key) == BODY


def test_threads_end_with_the_proxy(s3: S3, key: str) -> None:
    before = threading.active_count()
    proxy = FaultProxy(s3.endpoint_url)
    with s3.client(proxy.url, read_timeout=0.2) as client:
        get(client, s3, key)
        proxy.set(Fault(Mode.SILENCE))
        with pytest.raises(ReadTimeoutError):
            get(client, s3, key)
        proxy.close()
        proxy.close()

    assert threading.active_count() == before


def test_wrong_orders_are_refused() -> None:
    with pytest.raises(ValueError, match="bytes_per_s=0"):
        Fault(Mode.DRIP)
    with pytest.raises(ValueError, match="status=418"):
        Fault(Mode.STATUS, status=418)
    with pytest.raises(ValueError, match="url=https"):
        FaultProxy("https://s3.amazonaws.com")
