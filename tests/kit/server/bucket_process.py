"""A server that shares a bucket, as a process of its own: stores chains within its grants until its input ends.

Started by tests: it reads one JSON line (``Order``), then writes ``stored <n>`` now and then,
``done`` when it has offered every blob, and ends in an orderly way when its input is closed.
"""

import sys
import threading
import time
from contextlib import suppress

import msgspec

from tiered_kv.errors import CapacityExceeded, TierUnavailable
from tiered_kv.fleet.keeper import BucketKeeper, KeeperConfig
from tiered_kv.fleet.timing import Timing
from tiered_kv.keys.naming import object_path
from tiered_kv.location import parse_location
from tiered_kv.testing.blobs import SampleChain
from tiered_kv.tiers.object.store import ObjectStore

PACE = Timing(
    expiry_s=10.0,
    put_timeout_s=4.0,
    settle_s=1.0,
    heartbeat_s=0.5,
    recency_s=2.0,
    pass_s=4.0,
    hole_grace_s=3.0,
    usage_s=1.0,
    slice_s=1.0,
    epoch_s=1.0,
    ahead_bytes=1 << 20,
    delete_batch=50,
)
NAMESPACE = b"\x5a" * 16
PAYLOAD_BYTES = 4096
TURN_S = 0.2


class Order(msgspec.Struct):
    """What a process is to do."""

    uri: str
    options: dict[str, str]
    server_id: str
    storage_bytes: int
    seeds: list[int]
    blobs_per_chain: int


def chain_of(seed: int) -> SampleChain:
    return SampleChain(seed, PAYLOAD_BYTES, NAMESPACE)


def main() -> None:
    order = msgspec.json.decode(sys.stdin.readline(), type=Order)
    store = ObjectStore(parse_location(order.uri, order.options), timeout_s=PACE.put_timeout_s)
    keeper = BucketKeeper(store, KeeperConfig(storage_bytes=order.storage_bytes), PACE, server_id=order.server_id)
    keeper.serve(NAMESPACE)
    ended = threading.Event()

    def turns() -> None:
        while not ended.wait(TURN_S):
            keeper.turn()

    turner = threading.Thread(target=turns)
    turner.start()
    try:
        stored = 0
        for seed in order.seeds:
            stored += store_chain(store, keeper, chain_of(seed), order.blobs_per_chain)
            sys.stdout.write(f"stored {stored}\n")
            sys.stdout.flush()
        sys.stdout.write("done\n")
        sys.stdout.flush()
        sys.stdin.read()
    finally:
        ended.set()
        turner.join()
        keeper.close()
        store.close()


def store_chain(store: ObjectStore, keeper: BucketKeeper, chain: SampleChain, length: int) -> int:
    """Store a chain from its first chunk on; its rest is dropped when a chunk is gone before its child is stored."""
    stored = 0
    for index in range(length):
        blob = chain.blob(index)
        if index and not is_there(store, object_path(chain.name(index - 1))):
            break
        while True:
            with suppress(CapacityExceeded):
                keeper.reserve(len(blob.data))
                break
            time.sleep(0.02)
        outcome: bool | None = None
        try:
            outcome = store.create(object_path(blob.name), blob.view())
        except TierUnavailable:
            break
        finally:
            keeper.finished(len(blob.data), outcome)
        stored += 1
        keeper.record_use([chain.name(i) for i in range(index + 1)])
    return stored


def is_there(store: ObjectStore, path: str) -> bool:
    try:
        return store.head(path) is not None
    except TierUnavailable:
        return False


if __name__ == "__main__":
    main()
