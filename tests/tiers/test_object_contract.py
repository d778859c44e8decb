"""The shipped contract on the object tier: in memory, in shared directories, on real servers; bare and wrapped.

Then what only this tier promises: names with ancestry, whose blob lies there, what the keeper hears, an ordered end.
"""

import os
import threading
import uuid

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.kit.counts import only_in_proofs
from tests.kit.fake_clock import FakeClock
from tests.kit.faults.proxy import FaultProxy
from tests.kit.storage.wrapped_tiers import WRAPPINGS
from tiered_kv.errors import CapacityExceeded, ChunkCorrupt, ChunkMismatch, Closed, TierUnavailable
from tiered_kv.fleet.layout import BucketUsage
from tiered_kv.keys.naming import BlobName, object_path
from tiered_kv.location import parse_location
from tiered_kv.testing.blobs import SampleChain
from tiered_kv.testing.contract import TierContract
from tiered_kv.tiers.base import Usage
from tiered_kv.tiers.object.store import ObjectStore
from tiered_kv.tiers.object.tier import DESCRIBED_CHECK_S, ObjectTier
from tiered_kv.tiers.wrappers.verified import VerifiedTier

CHAIN = SampleChain()
ONE_BY_ONE = sorted(WRAPPINGS.keys() - {"bare", "all"})


class _ObjectContract(TierContract):
    """Subclasses say where the store is and how to reach behind it; each test runs bare and under every wrapper."""

    @pytest.fixture(autouse=True, params=WRAPPINGS)
    def wrapping(self, request):
        self.wrap = WRAPPINGS[request.param]

    def make_tier(self, tmp_path):
        return self.wrap(ObjectTier(self.make_store(tmp_path)))


class TestMemory(_ObjectContract):
    def make_store(self, tmp_path):
        self.root = uuid.uuid4().hex
        return ObjectStore(parse_location(f"memory://{self.root}/p"))

    def raw_put(self, tmp_path, name, data):
        MemoryFileSystem().pipe_file(f"{self.root}/p/{object_path(name)}", data)

    def raw_get(self, tmp_path, name):
        path = f"/{self.root}/p/{object_path(name)}"
        return MemoryFileSystem.store[path].getvalue() if path in MemoryFileSystem.store else None


class TestSharedDirectory(_ObjectContract):
    def make_store(self, tmp_path):
        return ObjectStore(parse_location(f"shared+file://{tmp_path}/root"))

    def raw_put(self, tmp_path, name, data):
        (tmp_path / "root" / object_path(name)).write_bytes(data)

    def raw_get(self, tmp_path, name):
        path = tmp_path / "root" / object_path(name)
        return path.read_bytes() if path.exists() else None


class TestCephFS(_ObjectContract):
    """Written through one mount, looked at through another; under all wrappers together."""

    @pytest.fixture(autouse=True, params=["all"])
    def wrapping(self, request):
        self.wrap = WRAPPINGS[request.param]

    @pytest.fixture(autouse=True)
    def mounted(self, cephfs):
        self.cephfs = cephfs

    def make_store(self, tmp_path):
        self.name = self.cephfs.new_name()
        here, there = self.cephfs.mounts
        self.there = there / self.name
        return ObjectStore(parse_location(f"shared+file://{here}/{self.name}"))

    def raw_put(self, tmp_path, name, data):
        (self.there / object_path(name)).write_bytes(data)

    def raw_get(self, tmp_path, name):
        path = self.there / object_path(name)
        return path.read_bytes() if path.exists() else None


class TestS3(_ObjectContract):
    """Bare and under all wrappers together; under each by itself, as in memory and in a directory, with the proofs."""

    @pytest.fixture(autouse=True, params=["bare", "all", *(pytest.param(w, marks=only_in_proofs) for w in ONE_BY_ONE)])
    def wrapping(self, request):
        self.wrap = WRAPPINGS[request.param]

    @pytest.fixture(autouse=True)
    def server(self, s3):
        self.s3 = s3

    def make_store(self, tmp_path):
        self.prefix = self.s3.new_prefix()
        return ObjectStore(parse_location(self.s3.uri(self.prefix), self.s3.options()))

    def key(self, name):
        return {"Bucket": self.s3.bucket, "Key": f"{self.prefix}/{object_path(name)}"}

    def raw_put(self, tmp_path, name, data):
        with self.s3.client() as client:
            client.put_object(**self.key(name), Body=data)

    def raw_get(self, tmp_path, name):
        with self.s3.client() as client:
            try:
                return client.get_object(**self.key(name))["Body"].read()
            except client.exceptions.NoSuchKey:
                return None


class _ServedContract(_ObjectContract):
    """On a server of another store, under all wrappers together: bare it is tried on Ceph's."""

    kind: str

    @pytest.fixture(autouse=True, params=["all"])
    def wrapping(self, request):
        self.wrap = WRAPPINGS[request.param]

    @pytest.fixture(autouse=True)
    def served(self, stores):
        self.served_by = stores(self.kind)

    def make_store(self, tmp_path):
        self.prefix = self.served_by.new_prefix()
        return ObjectStore(parse_location(self.served_by.uri(self.prefix), self.served_by.options()))

    def raw_put(self, tmp_path, name, data):
        self.served_by.put(self.prefix, object_path(name), data)

    def raw_get(self, tmp_path, name):
        return self.served_by.get(self.prefix, object_path(name))


class TestGoogle(_ServedContract):
    kind = "gs"


class TestAzure(_ServedContract):
    kind = "az"


class TestSecondS3(_ServedContract):
    kind = "localbucket"


# -- what only this tier promises -------------------------------------------------------------------------------------


class RecordingKeeper:
    """Writes down what the tier tells it; a limit of blobs stands for a grant."""

    def __init__(self, blobs_max=1 << 30):
        self.heard = []
        self.blobs_max = blobs_max

    def reserve(self, size_bytes):
        if self.blobs_max == 0:
            raise CapacityExceeded("the grant is used up")
        self.blobs_max -= 1
        self.heard.append(("reserve", size_bytes))

    def finished(self, size_bytes, stored):
        self.heard.append(("finished", size_bytes, stored))

    def expect(self):
        self.heard.append(("expect",))

    def record_use(self, names):
        self.heard.append(("record_use", [name.key for name in names]))

    def turn(self):
        self.heard.append(("turn",))

    capacity_bytes = 8

    def usage(self):
        return BucketUsage(7, 9)

    def forget(self, size_bytes):
        self.heard.append(("forget", size_bytes))

    def close(self):
        self.heard.append(("close",))


@pytest.fixture
def store(tmp_path):
    opened = ObjectStore(parse_location(f"shared+file://{tmp_path}/root"))
    yield opened
    opened.close()


def read(tier, name):
    buffer = bytearray(CHAIN.form.blob_bytes)
    return bytes(buffer) if tier.get_into(name, memoryview(buffer)) else None


def test_traits_say_what_kind_of_medium_it_is(store):
    traits = ObjectTier(store, io_concurrency=5).traits
    assert (traits.name, traits.io_concurrency, traits.is_shared, traits.keeps_first) == ("object", 5, True, True)
    assert traits.flush_interval_s == 1.0


def test_a_name_without_ancestry_has_no_object(store):
    tier = ObjectTier(store, keeper=RecordingKeeper())
    name = BlobName(CHAIN.namespace, CHAIN.key(0))
    for call in (
        lambda: tier.put(name, CHAIN.blob(0).view()),
        lambda: read(tier, name),
        lambda: tier.contains(name),
        lambda: tier.delete(name),
    ):
        with pytest.raises(ValueError, match="every part of a name has 16 bytes"):
            call()


def test_the_keeper_hears_of_every_put_and_delete(store):
    keeper = RecordingKeeper()
    tier = ObjectTier(store, keeper=keeper)
    blob, size = CHAIN.blob(0), CHAIN.form.blob_bytes
    assert not tier.contains(blob.name)
    tier.put(blob.name, blob.view())
    assert tier.contains(blob.name)
    tier.put(blob.name, blob.view())
    tier.delete(blob.name)
    tier.delete(blob.name)
    tier.record_use([blob.name])
    tier.flush()
    assert tier.usage() == Usage(7, 8, 9)
    tier.close()
    tier.close()
    assert keeper.heard == [
        ("expect",),
        ("reserve", size),
        ("finished", size, True),
        ("reserve", size),
        ("finished", size, False),
        ("forget", size),
        ("record_use", [blob.name.key]),
        ("turn",),
        ("close",),
    ]


def test_room_is_taken_behind_the_question_whether_the_store_creates_atomically(store):
    """It takes three requests, and room for as long as one: the put would end when others may have its bytes."""
    asked = []

    class Asking(RecordingKeeper):
        def reserve(self, size_bytes):
            asked.append(store._is_atomic)
            super().reserve(size_bytes)

    tier = ObjectTier(store, keeper=Asking())
    tier.put(CHAIN.name(0), CHAIN.blob(0).view())
    assert asked == [True]
    tier.close()


def test_a_put_that_the_keeper_refuses_reaches_no_store(store):
    keeper = RecordingKeeper(blobs_max=0)
    tier = ObjectTier(store, keeper=keeper)
    with pytest.raises(CapacityExceeded):
        tier.put(CHAIN.name(0), CHAIN.blob(0).view())
    assert keeper.heard == [] and not tier.contains(CHAIN.name(0)) and keeper.heard == [("expect",)]


def test_a_put_that_fails_leaves_the_keeper_in_doubt(store, monkeypatch):
    keeper = RecordingKeeper()
    tier = ObjectTier(store, keeper=keeper)

    def create(path, data):
        raise TierUnavailable("cut off")

    monkeypatch.setattr(store, "create", create)
    monkeypatch.setattr(store, "creates_atomically", lambda: True)
    with pytest.raises(TierUnavailable):
        tier.put(CHAIN.name(0), CHAIN.blob(0).view())
    assert keeper.heard[-1] == ("finished", CHAIN.form.blob_bytes, None)


def test_a_store_without_room_is_a_capacity_that_is_exceeded(store, monkeypatch):
    keeper = RecordingKeeper()
    tier = ObjectTier(store, keeper=keeper)
    assert store.creates_atomically()

    def link(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(CapacityExceeded, match="no room left"):
        tier.put(CHAIN.name(0), CHAIN.blob(0).view())
    assert keeper.heard[-1] == ("finished", CHAIN.form.blob_bytes, False)


def test_a_store_that_cannot_create_is_written_plainly(store, monkeypatch):
    tier = ObjectTier(store)
    monkeypatch.setattr(store, "creates_atomically", lambda: False)
    monkeypatch.setattr(store, "create", lambda *args: pytest.fail("create was used"))
    for version in range(2):
        blob = CHAIN.blob(0, version=version)
        tier.put(blob.name, blob.view())
        assert read(tier, blob.name) == blob.data


@pytest.mark.parametrize("payload_bytes", [4096, 8192, 16384])
def test_a_blob_of_another_namespace_is_no_corruption(store, payload_bytes):
    tier = VerifiedTier(ObjectTier(store), {CHAIN.namespace: CHAIN.form}.get)
    theirs = SampleChain(seed=1, payload_bytes=payload_bytes).blob(0)
    store.put(object_path(CHAIN.name(0)), theirs.data)
    with pytest.raises(ChunkMismatch):
        read(tier, CHAIN.name(0))
    assert tier.contains(CHAIN.name(0))


def test_a_scan_is_oldest_first_and_leaves_out_what_is_no_blob_of_its_name(store, tmp_path):
    tier = ObjectTier(store)
    for index in range(40):
        tier.put(CHAIN.name(index), CHAIN.blob(index).view())
        path = tmp_path / "root" / object_path(CHAIN.name(index))
        os.utime(path, (1000 - index, 1000 - index))
    store.put(object_path(CHAIN.name(7)), CHAIN.blob(8).data)
    store.put(object_path(CHAIN.name(9)), b"damaged")
    store.put(object_path(CHAIN.name(50)), SampleChain(seed=1).blob(0).data)
    store.put(f"{CHAIN.namespace.hex()}/notes.txt", b"x")
    tier.describe(CHAIN.namespace, b"{}")
    assert [info.record.chunk_index for info in tier.scan()] == [i for i in reversed(range(40)) if i not in (7, 9)]


def test_a_namespace_is_described_once(store, monkeypatch):
    path = f"{CHAIN.namespace.hex()}/namespace.json"
    tier = ObjectTier(store)
    tier.describe(CHAIN.namespace, b'{"a":1}')
    assert store.get(path) == b'{"a":1}'
    monkeypatch.setattr(store, "create", lambda *args: pytest.fail("described again"))
    tier.describe(CHAIN.namespace, b'{"a":1}')


def test_a_namespace_whose_record_somebody_deleted_is_described_by_the_next_session(store):
    tier = ObjectTier(store)
    path = f"{CHAIN.namespace.hex()}/namespace.json"
    tier.describe(CHAIN.namespace, b'{"a":1}')
    store.delete([path])
    tier.describe(CHAIN.namespace, b'{"a":1}')
    assert store.get(path) == b'{"a":1}'


def test_a_namespace_whose_record_somebody_deleted_is_described_again_beside_its_blobs(store):
    clock = FakeClock()
    tier = ObjectTier(store, monotonic=clock.monotonic)
    path = f"{CHAIN.namespace.hex()}/namespace.json"
    tier.describe(CHAIN.namespace, b'{"a":1}')
    store.delete([path])
    clock.advance(DESCRIBED_CHECK_S)
    tier.flush()
    assert store.get(path) is None, "nothing is put there any more: a reset may have retired it"
    tier.put(CHAIN.name(0), CHAIN.blob(0).view())
    tier.flush()
    assert store.get(path) == b'{"a":1}'


def test_records_are_looked_at_seldom_and_only_where_blobs_were_put(store, monkeypatch):
    clock = FakeClock()
    tier = ObjectTier(store, monotonic=clock.monotonic)
    tier.describe(CHAIN.namespace, b'{"a":1}')
    asked = []
    monkeypatch.setattr(store, "head", asked.append)
    monkeypatch.setattr(store, "create", lambda *_: True)
    for index in range(3):
        tier.put(CHAIN.name(index), CHAIN.blob(index).view())
        tier.flush()
    assert asked == []
    for _ in range(3):
        clock.advance(DESCRIBED_CHECK_S)
        tier.flush()
    assert asked == [f"{CHAIN.namespace.hex()}/namespace.json"]


def test_records_that_cannot_be_looked_at_are_looked_at_later(store, monkeypatch):
    clock = FakeClock()
    tier = ObjectTier(store, monotonic=clock.monotonic)
    path = f"{CHAIN.namespace.hex()}/namespace.json"
    tier.describe(CHAIN.namespace, b'{"a":1}')
    tier.put(CHAIN.name(0), CHAIN.blob(0).view())
    store.delete([path])
    with monkeypatch.context() as broken:
        broken.setattr(store, "head", refuse)
        clock.advance(DESCRIBED_CHECK_S)
        tier.flush()
    assert store.get(path) is None
    clock.advance(DESCRIBED_CHECK_S)
    tier.flush()
    assert store.get(path) == b'{"a":1}'


def refuse(*_: object) -> None:
    raise TierUnavailable("refused")


def test_close_waits_for_calls_in_flight(store, monkeypatch):
    keeper = RecordingKeeper()
    tier = ObjectTier(store, keeper=keeper)
    blob = CHAIN.blob(0)
    entered, release = threading.Event(), threading.Event()
    original = store.create

    def create(path, data):
        entered.set()
        release.wait(60)
        return original(path, data)

    assert store.creates_atomically()
    monkeypatch.setattr(store, "create", create)
    putting = threading.Thread(target=tier.put, args=(blob.name, blob.view()))
    putting.start()
    assert entered.wait(60)
    closing = threading.Thread(target=tier.close)
    closing.start()
    while True:  # closed for new calls, while the old one is still on its way
        try:
            tier.contains(blob.name)
        except Closed:
            break
    release.set()
    putting.join(60)
    closing.join(60)
    assert keeper.heard[-2:] == [("finished", CHAIN.form.blob_bytes, True), ("close",)]


def test_each_operation_of_the_tier_is_one_request(s3):
    with FaultProxy(s3.endpoint_url) as proxy:
        tier = ObjectTier(ObjectStore(parse_location(s3.uri(s3.new_prefix()), s3.options(proxy.url))))
        tier.put(CHAIN.name(0), CHAIN.blob(0).view())  # asks once whether the store creates atomically
        operations = {
            "put": (lambda: tier.put(CHAIN.name(1), CHAIN.blob(1).view()), ["PUT"]),
            "put again": (lambda: tier.put(CHAIN.name(1), CHAIN.blob(1).view()), ["PUT"]),
            "get": (lambda: read(tier, CHAIN.name(1)), ["GET"]),
            "get missing": (lambda: read(tier, CHAIN.name(5)), ["GET"]),
            "contains": (lambda: tier.contains(CHAIN.name(1)), ["HEAD"]),
            "contains missing": (lambda: tier.contains(CHAIN.name(5)), ["HEAD"]),
            "delete": (lambda: tier.delete(CHAIN.name(1)), ["HEAD", "DELETE"]),
            "flush": (tier.flush, []),
        }
        for operation, (run, expected) in operations.items():
            proxy.forget()
            run()
            assert [request.kind for request in proxy.requests] == expected, operation
        tier.close()


def test_a_wrong_size_beside_a_sound_header_is_corrupt(store):
    tier = ObjectTier(store)
    data = CHAIN.blob(0).data
    for wrong in (data[:-1], data + b"x"):
        store.put(object_path(CHAIN.name(0)), wrong)
        with pytest.raises(ChunkCorrupt):
            read(tier, CHAIN.name(0))
