"""The limit of a bucket while answers to PUTs get lost: the client asks again, and meets what it stored itself."""

import pytest

from tests.kit.faults.proxy import Fault, FaultProxy, Mode
from tests.sim.bucket.keepers import PACE, blobs
from tiered_kv.errors import CapacityExceeded
from tiered_kv.fleet.keeper import BucketKeeper, KeeperConfig
from tiered_kv.location import parse_location
from tiered_kv.testing.blobs import SampleChain
from tiered_kv.tiers.object.store import ObjectStore
from tiered_kv.tiers.object.tier import ObjectTier

CHAIN = SampleChain(1, payload_bytes=300 << 10)
SIZE = len(CHAIN.blob(0).data)
LIMIT_BYTES = 4 * SIZE

BY_THREADS: dict[str, object] = {}
BY_THE_LOOP = {"config_kwargs": {"request_checksum_calculation": "when_supported"}}


def stored_bytes_of_one_grant(uri, options, proxy, clock):
    """What lies in the bucket after a server has put all that it was granted, and heard of no put at the first try."""
    store = ObjectStore(parse_location(uri, options))
    keeper = BucketKeeper(store, KeeperConfig(storage_bytes=LIMIT_BYTES), PACE, clock)
    tier = ObjectTier(store, keeper=keeper)
    with pytest.raises(CapacityExceeded):
        keeper.reserve(SIZE)
    keeper.turn()
    for index in range(8):
        blob = CHAIN.blob(index)
        proxy.forget()
        with proxy.failing(Fault(Mode.LOST, kinds={"PUT", "POST"}, first=1)):
            try:
                tier.put(blob.name, blob.view())
            except CapacityExceeded:
                break
            assert proxy.count("PUT") + proxy.count("POST") > 1, "the client did not ask again"
    found = sum(blobs(store).values())
    store.close()
    return found


@pytest.mark.parametrize("way", [BY_THREADS, BY_THE_LOOP])
def test_what_a_put_with_a_lost_answer_stored_counts_against_the_limit(s3, clock, way):
    with FaultProxy(s3.endpoint_url) as proxy:
        found = stored_bytes_of_one_grant(s3.uri(s3.new_prefix()), {**s3.options(proxy.url), **way}, proxy, clock)
    assert 0 < found <= LIMIT_BYTES


def test_a_create_of_few_bytes_over_the_loop_does_not_meet_its_own_unseen(s3):
    """aiohttp sends a body of bytes again by itself where a connection that was kept ends: nobody hears of it."""
    with FaultProxy(s3.endpoint_url) as proxy:
        store = ObjectStore(parse_location(s3.uri(s3.new_prefix()), {**s3.options(proxy.url), **BY_THE_LOOP}))
        store.put("before", b"1")
        for number in range(4):
            with proxy.failing(Fault(Mode.LOST, kinds={"PUT"}, first=1)):
                assert store.create(f"x{number}", b"few") is not False, "nobody else has this name"
        store.close()


@pytest.mark.parametrize("kind", ["gs", "az"])
def test_what_a_put_with_a_lost_answer_stored_counts_in_other_clouds(stores, clock, kind):
    cloud = stores(kind)
    with FaultProxy(cloud.server.endpoint_url) as proxy:
        found = stored_bytes_of_one_grant(cloud.uri(cloud.new_prefix()), cloud.options(proxy.url), proxy, clock)
    assert 0 < found <= LIMIT_BYTES
