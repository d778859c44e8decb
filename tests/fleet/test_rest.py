"""A bucket that nobody uses costs next to nothing, and whoever comes back may store within the promised time."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from tests.sim.bucket.keepers import CHAIN, SIZE, Time, blobs, keeper_of, pass_seconds, put, turn
from tiered_kv.errors import CapacityExceeded
from tiered_kv.fleet.layout import LEASES, RECENCY, SERVERS, Found
from tiered_kv.fleet.timing import Timing
from tiered_kv.tiers.object.store import ObjectStore
from tiered_kv.tiers.object.tier import ObjectTier

HOUR_S = 3600
RESTLESS = Timing(rest_after_s=float("inf"))
QUICK = Timing(rest_after_s=20.0, recency_s=2.0, slice_s=1e9)


class Bucket:
    """A bucket in a dictionary."""

    def __init__(self, clock: Time) -> None:
        self.objects: dict[str, tuple[bytes, float]] = {}
        self.clock = clock


@dataclass
class Listed:
    """What a LIST of it tells."""

    path: str
    size_bytes: int
    modified_s: float


class Counted:
    """One server's requests to a bucket in a dictionary, counted; an hour of a real client's would take minutes."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self.requests: Counter[str] = Counter()

    def get(self, path: str, size_max: int | None = None) -> bytes | None:
        del size_max
        self.requests["get"] += 1
        return self._bucket.objects.get(path, (None, 0.0))[0]

    def get_many(self, paths: Sequence[str], size_max: int) -> list[Found]:
        return [self.get(path, size_max) for path in paths]

    def put(self, path: str, data: bytes | memoryview) -> None:
        self.requests["put"] += 1
        self._bucket.objects[path] = (bytes(data), self._bucket.clock())

    def create(self, path: str, data: bytes | memoryview) -> bool:
        if path in self._bucket.objects:
            self.requests["put"] += 1
            return False
        self.put(path, data)
        return True

    def head(self, path: str) -> Listed | None:
        self.requests["get"] += 1
        return next(self._found(path), None)

    def list(self, prefix: str) -> Iterator[Listed]:
        self.requests["list"] += 1
        return self._found(prefix)

    def _found(self, prefix: str) -> Iterator[Listed]:
        there = sorted(self._bucket.objects.items())
        return (Listed(path, len(data), at) for path, (data, at) in there if path.startswith(prefix))

    def delete(self, paths: Sequence[str]) -> None:
        self.requests["delete"] += bool(paths)
        for path in paths:
            self._bucket.objects.pop(path, None)

    def creates_atomically(self) -> bool:
        return True


def an_idle_hour(clock: Time, timing: Timing) -> list[Counter[str]]:
    """Requests of a leader and of two followers, once they have stored something and are idle."""
    bucket = Bucket(clock)
    stores = [Counted(bucket) for _ in range(3)]
    keepers = [keeper_of(one, clock, timing=timing) for one in stores]
    turn(clock, *keepers, times=5)
    for index, (one, keeper) in enumerate(zip(stores, keepers, strict=True)):
        put(one, keeper, CHAIN, index)
    turn(clock, *keepers, times=int(Timing().rest_after_s) + 60)
    for one in stores:
        one.requests.clear()
    turn(clock, *keepers, times=HOUR_S)
    return [one.requests for one in stores]


def test_an_idle_hour_costs_a_tenth_of_what_it_did(clock: Time) -> None:
    busy = an_idle_hour(clock, RESTLESS)
    idle = an_idle_hour(clock, Timing())
    assert sum(map(Counter.total, idle)) * 10 <= sum(map(Counter.total, busy)), (idle, busy)
    assert [requests.total() for requests in idle[1:]] == [0, 0], "a follower that rests asks nobody anything"
    assert idle[0] == {"list": HOUR_S // 10}, "the leader looks whether somebody came"


def test_what_expires_goes_while_everybody_rests(memory: ObjectStore, clock: Time) -> None:
    timing = Timing(rest_after_s=20.0, pass_s=30.0, rest_pass_s=60.0, slice_s=1e9, hole_grace_s=0.0)
    keeper = keeper_of(memory, clock, timing=timing, storage_ttl_s=2.0)
    turn(clock, keeper, times=3)
    put(memory, keeper, CHAIN, 0)
    turn(clock, keeper, times=21)
    assert keeper.figures()["is_resting"]
    pass_seconds(memory, 4)
    turn(clock, keeper, times=60)
    assert blobs(memory) == {} and keeper.figures()["expired_blobs"] == 1 and keeper.figures()["is_resting"]


def test_a_leader_that_wakes_up_goes_on_and_lists_nothing_anew(store: ObjectStore, clock: Time) -> None:
    keeper = keeper_of(store, clock, timing=QUICK)
    turn(clock, keeper, times=3)
    put(store, keeper, CHAIN, 0)
    turn(clock, keeper, times=30)
    passes = keeper.figures()["passes"]
    assert keeper.figures()["is_resting"] and keeper.figures()["role"] == "leader"
    with pytest.raises(CapacityExceeded):
        keeper.reserve(SIZE)  # nobody confirmed its lease since
    turn(clock, keeper, times=3)
    put(store, keeper, CHAIN, 1)
    figures = keeper.figures()
    assert (figures["passes"], figures["term"], figures["is_resting"]) == (passes, 1, False)


@pytest.mark.parametrize("limit", [100, None], ids=["limited", "without limits"])
def test_a_server_that_comes_back_or_is_new_is_granted_bytes_by_the_leader_that_rests(
    store: ObjectStore, clock: Time, limit: int | None
) -> None:
    leader = keeper_of(store, clock, timing=QUICK)
    turn(clock, leader, times=3)
    other = keeper_of(store, clock, blobs=limit, timing=QUICK)
    turn(clock, leader, other, times=30)
    assert leader.figures()["is_resting"] and other.figures()["is_resting"]
    assert len(list(store.list(SERVERS))) <= 1, "who rests has left"
    servers = [leader, other]
    for number in range(2):
        with pytest.raises(CapacityExceeded):
            servers[-1].reserve(SIZE)
        turn(clock, *servers, times=int(QUICK.rest_watch_s) + 4)
        put(store, servers[-1], CHAIN, number)
        servers.append(keeper_of(store, clock, blobs=limit, timing=QUICK))  # the second is new
    assert [keeper.figures()["role"] for keeper in servers[:3]] == ["leader", "follower", "follower"]
    assert len(list(store.list(LEASES))) == 1, "nobody took the lease"


def test_who_looks_in_vain_at_rest_has_its_grant_before_its_first_put(memory: ObjectStore, clock: Time) -> None:
    """What a prompt's lookup does not find is computed and put: seconds later, and the leader needs as long."""
    leader, other = keeper_of(memory, clock, timing=QUICK), keeper_of(memory, clock, timing=QUICK)
    turn(clock, leader, other, times=30)
    assert leader.figures()["is_resting"] and other.figures()["is_resting"]
    tier = ObjectTier(memory, keeper=other)
    assert not tier.contains(CHAIN.name(0))
    turn(clock, leader, other, times=int(QUICK.rest_watch_s) + 4)
    put(memory, other, CHAIN, 0)
    assert other.figures()["refused_puts"] == 0
    turn(clock, leader, other, times=30)
    assert other.figures()["is_resting"]
    assert tier.contains(CHAIN.name(0))
    turn(clock, other)
    assert other.figures()["is_resting"], "nothing is put after a hit"


def test_a_leader_that_died_at_rest_is_replaced_when_somebody_comes_back(memory: ObjectStore, clock: Time) -> None:
    leader, other = keeper_of(memory, clock, timing=QUICK), keeper_of(memory, clock, timing=QUICK)
    turn(clock, leader, other, times=30)
    with pytest.raises(CapacityExceeded):
        other.reserve(SIZE)
    turn(clock, other, times=int(Timing().expiry_s) - 2)
    with pytest.raises(CapacityExceeded):
        other.reserve(SIZE)
    turn(clock, other, times=8)
    put(memory, other, CHAIN, 0)
    assert other.figures()["role"] == "leader" and other.figures()["term"] == 2
    turn(clock, leader, times=2)
    with pytest.raises(CapacityExceeded):
        leader.reserve(SIZE)
    turn(clock, leader, other, times=5)
    assert leader.figures()["role"] == "follower"


def test_a_server_that_only_reads_goes_on_telling_what_was_used(memory: ObjectStore, clock: Time) -> None:
    keeper = keeper_of(memory, clock, timing=QUICK)
    turn(clock, keeper, times=30)
    keeper.record_use([CHAIN.name(0)])
    turn(clock, keeper, times=3)
    assert list(memory.list(RECENCY)), "uses were not written"
    assert keeper.figures()["is_resting"], "written, and at rest again"
