"""Blobs go straight to and from the caller's memory, which is the caller's again when a call ends, however it ends."""

import asyncio
import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from tests.kit.faults.proxy import Fault, FaultProxy, Mode
from tests.kit.s3 import S3
from tests.kit.server.probe import wait_for
from tiered_kv.errors import ChunkCorrupt, TierUnavailable
from tiered_kv.location import parse_location
from tiered_kv.tiers.object.loop_bodies import PIECE_BYTES, BufferLoan, LoanBody, LoopBodies
from tiered_kv.tiers.object.loop_calls import LoopCalls
from tiered_kv.tiers.object.store import ObjectStore

SIZE = 3 * PIECE_BYTES + 4097


@pytest.fixture
def proxy(s3: S3):
    with FaultProxy(s3.endpoint_url) as proxy:
        yield proxy


@pytest.fixture
def prefix(s3: S3) -> str:
    return s3.new_prefix()


def open_store(s3: S3, prefix: str, proxy: FaultProxy, timeout_s: float = 30.0, **options: object) -> ObjectStore:
    return ObjectStore(parse_location(s3.uri(prefix), {**s3.options(proxy.url), **options}), timeout_s=timeout_s)


@pytest.fixture
def store(s3: S3, prefix: str, proxy: FaultProxy):
    opened = open_store(s3, prefix, proxy)
    yield opened
    opened.close()


def open_impatient(s3: S3, prefix: str, proxy: FaultProxy) -> ObjectStore:
    """A store that gives up after 3 s and has its client already: making one may take longer on a busy machine."""
    store = open_store(s3, prefix, proxy, timeout_s=3.0)
    wait_for(lambda: answers(store), "the first answer")
    return store


def answers(store: ObjectStore) -> bool:
    try:
        return store.head("x") is not None
    except TierUnavailable as exc:
        assert "in time" in str(exc)
        return False


def stored(s3: S3, prefix: str, path: str) -> bytes:
    with s3.client() as client:
        body: bytes = client.get_object(Bucket=s3.bucket, Key=f"{prefix}/{path}")["Body"].read()
        return body


def test_memory_is_out_of_reach_once_the_loan_ends() -> None:
    memory = bytearray(b"12345678")
    with BufferLoan(memoryview(memory)) as loan:
        loan.take(2, b"ab")
        assert loan.give(1, 4) == b"2ab5"
    for late in (lambda: loan.take(0, b"x"), lambda: loan.give(0, 1)):
        with pytest.raises(asyncio.CancelledError):
            late()
    memory.append(0)  # not possible while anybody holds a view
    assert memory[:8] == b"12ab5678"


def test_end_of_a_loan_waits_for_nobody_but_the_copy_under_way() -> None:
    loan = BufferLoan(memoryview(bytearray(8)))
    with loan._lock:
        ending = threading.Thread(target=loan.__exit__, args=(None, None, None))
        ending.start()
        ending.join(0.1)
        assert ending.is_alive()
    ending.join(10)
    assert not ending.is_alive()


def test_body_reads_like_a_file() -> None:
    data = os.urandom(1000)
    with BufferLoan(memoryview(data)) as loan:
        body = LoanBody(loan)
        assert len(body) == 1000
        assert body.read(10) + body.read(None) == data
        assert (body.read(), body.tell()) == (b"", 1000)
        assert (body.seek(-5, os.SEEK_END), body.read()) == (995, data[995:])
        assert (body.seek(0), body.seek(3, os.SEEK_CUR), body.read(1)) == (0, 3, data[3:4])


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, PIECE_BYTES + 1, SIZE])
def test_any_size_goes_out_and_comes_back(s3: S3, prefix: str, store: ObjectStore, size: int) -> None:
    data = os.urandom(size)
    assert store.create("new", memoryview(data))
    assert not store.create("new", memoryview(bytes(size)))
    store.put("new", memoryview(data))
    buffer = bytearray(size)

    assert stored(s3, prefix, "new") == data
    assert store.get_into("new", memoryview(buffer))
    assert buffer == data
    assert not store.get_into("other", memoryview(buffer))


@pytest.mark.parametrize("observed", [SIZE - 1, SIZE + 1, 0])
def test_object_of_another_size_is_not_read(store: ObjectStore, proxy: FaultProxy, observed: int) -> None:
    store.put("x", bytes(observed))
    buffer = bytearray(b"k" * SIZE)
    with pytest.raises(ChunkCorrupt, match=f"observed={observed} expected={SIZE} path=x"):
        store.get_into("x", memoryview(buffer))
    assert buffer == b"k" * SIZE


def test_put_that_is_tried_again_starts_from_the_beginning(
    s3: S3, prefix: str, store: ObjectStore, proxy: FaultProxy
) -> None:
    data = os.urandom(SIZE)
    for fault in (Fault(Mode.STATUS, first=1), Fault(Mode.RESET, first=1), Fault(Mode.LOST, first=1)):
        proxy.forget()
        with proxy.failing(fault):
            store.put("x", memoryview(data))
        assert proxy.count("PUT") == 2
        assert stored(s3, prefix, "x") == data


def test_body_can_be_hashed_for_whoever_wants_signed_payloads(s3: S3, prefix: str, proxy: FaultProxy) -> None:
    data = os.urandom(SIZE)
    signing = open_store(s3, prefix, proxy, config_kwargs={"s3": {"payload_signing_enabled": True}})
    signing.put("x", memoryview(data))
    signing.close()

    assert stored(s3, prefix, "x") == data


def _nothing(*_: object, **__: object) -> None:
    pass


class SlowWaker:
    """Stands in for s3fs' client where a real server cannot be made to hit the moment: the loop wakes up only after the
    caller has given up, and before it has heard of that."""

    def __init__(self) -> None:
        self.asked, self.gate, self.over = threading.Event(), threading.Event(), threading.Event()
        self.sent: list[bytes] = []
        self.requester_pays, self.s3_additional_kwargs, self.anon = False, {}, True
        events = SimpleNamespace(register=_nothing, register_first=_nothing)
        self.meta = SimpleNamespace(events=events, endpoint_url="http://127.0.0.1")

    async def set_session(self) -> "SlowWaker":
        return self

    async def get_object(self, **arguments: object) -> object:
        return {"Body": self, "ContentLength": SIZE}

    async def put_object(self, **arguments: object) -> object:
        try:
            self.wait()
            self.sent = [piece async for piece in arguments["Body"]]
            return {}
        finally:
            self.over.set()

    async def read(self, size: int) -> bytes:
        self.wait()
        return b"o" * size

    def close(self) -> None:
        self.over.set()

    def wait(self) -> None:
        self.asked.set()
        assert self.gate.wait(30)


@pytest.mark.parametrize("operation", ["get", "put"])
def test_request_that_wakes_up_too_late_finds_no_memory(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, loop = SlowWaker(), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    run = asyncio.run_coroutine_threadsafe

    def run_until_it_asks(*given: Any) -> Any:
        future = run(*given)
        assert slow.asked.wait(30)  # the call's time may end before that on a busy machine
        return future

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", run_until_it_asks)
    bodies = LoopBodies(LoopCalls(slow, loop, "bucket", timeout_s=0.2))
    buffer = bytearray(b"o" * SIZE)
    view = memoryview(buffer)
    call = {"get": lambda: bodies.get_into("x", "x", view), "put": lambda: bodies.put("x", view, {})}
    try:
        with pytest.raises(TimeoutError):
            call[operation]()
        assert slow.asked.is_set()
        buffer[:] = b"n" * SIZE  # the next blob in this slot
        slow.gate.set()
        assert slow.over.wait(30)
    finally:
        slow.gate.set()
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()

    assert buffer == b"n" * SIZE
    assert slow.sent == []


def test_get_that_was_given_up_writes_no_more(s3: S3, prefix: str, store: ObjectStore, proxy: FaultProxy) -> None:
    store.put("x", memoryview(os.urandom(SIZE)))
    impatient = open_impatient(s3, prefix, proxy)
    buffer = bytearray(SIZE)
    proxy.set(Fault(Mode.DRIP, kinds={"GET"}, bytes_per_s=SIZE // 20))
    with pytest.raises(TierUnavailable, match="did not answer in time"):
        impatient.get_into("x", memoryview(buffer))
    buffer[:] = b"n" * SIZE  # the next blob in this slot
    proxy.set()
    wait_for(lambda: answers(impatient), "the loop, which has then been through everything that was due before")

    assert buffer == b"n" * SIZE
    impatient.close()


def test_put_that_was_given_up_sends_nothing_of_the_next_blob(
    s3: S3, prefix: str, store: ObjectStore, proxy: FaultProxy
) -> None:
    """Whatever the store has in the end, it is not a mixture."""
    old, new = os.urandom(16 << 20), b"n" * (16 << 20)
    store.put("x", b"what was there")
    impatient = open_impatient(s3, prefix, proxy)
    buffer = bytearray(old)
    proxy.forget()
    proxy.set(Fault(Mode.DRIP, kinds={"PUT"}, bytes_per_s=1 << 20))
    with pytest.raises(TierUnavailable, match="did not answer in time"):
        impatient.put("x", memoryview(buffer))
    buffer[:] = new
    proxy.set()
    impatient.close()
    store.close()  # which has an idle connection, too
    wait_for(lambda: not proxy._open, "the end of the connections")

    assert proxy.count("PUT") == 1
    assert stored(s3, prefix, "x") in (b"what was there", old)
