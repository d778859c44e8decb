"""Recency in a bucket: what was used lately stays, whoever used it, and merging the logs of uses loses none of them."""

import pytest

from tests.kit.engine_world import BLOB_BYTES, EngineWorld
from tests.sim.bucket.keepers import (
    CHAIN,
    SIZE,
    Time,
    blobs,
    indexes_of,
    keeper_of,
    pass_seconds,
    put_patiently,
    turn,
)
from tests.sim.bucket.world import PACE as WORLD_PACE
from tests.sim.bucket.world import Chain, Server, World
from tiered_kv.errors import TierUnavailable
from tiered_kv.fleet import recency
from tiered_kv.fleet.keeper import BucketKeeper, KeeperConfig
from tiered_kv.fleet.layout import BASES, RECENCY
from tiered_kv.fleet.listing import Listing
from tiered_kv.fleet.recency import LOG_MAGIC, UseReader
from tiered_kv.fleet.timing import Timing
from tiered_kv.keys.naming import object_path, parse_object_path
from tiered_kv.testing.blobs import SampleChain
from tiered_kv.tiers.object.tier import ObjectTier

PACE = Timing(hole_grace_s=0.0, epoch_s=1.0, slice_s=1e9, recency_s=1.0, pass_s=20.0)
OLD, NEW, NEXT = (SampleChain(seed, payload_bytes=4096, namespace=CHAIN.namespace) for seed in (11, 12, 13))
LENGTH = 3
ROOM = 8
"""Blobs that the bucket may hold: both chains, and two blobs more."""


def fill(store, clock, keepers):
    """``OLD`` and a while later ``NEW``: without any use, ``OLD`` is the first to go."""
    for chain in (OLD, NEW):
        for index in range(LENGTH):
            put_patiently(store, clock, keepers, chain, index)
        pass_seconds(store, 2)


def use(clock, keepers, user, chain):
    """One server used a chain; all of them have turns until it is written."""
    user.record_use([chain.name(index) for index in reversed(range(LENGTH))])
    turn(clock, *keepers, times=3)


def press(store, clock, keepers, blob_count=3):
    """More blobs than there is room for."""
    for index in range(blob_count):
        put_patiently(store, clock, keepers, NEXT, index)


def paths(store, prefix=RECENCY):
    return [info.path for info in store.list(prefix)]


def uses(store):
    """Last use of every key that any log or base tells, read as a leader reads them."""
    found = {}

    class Sink:
        def use(self, key, used_s):
            found[key] = max(used_s, found.get(key, 0))

    reader = UseReader(store)
    assert sum(len(applied) for applied in reader.read(Sink())) == len(paths(store))
    assert not reader.malformed
    return found


def keys_of(chain):
    return {chain.key(index) for index in range(LENGTH)}


def test_a_log_that_cannot_be_read_is_asked_for_once_more(memory):
    """A pass that read a part of them would evict what was just used."""
    for number in range(3):
        memory.put(f"{RECENCY}a/{number}", LOG_MAGIC + bytes([number]) * 16)

    class Failing:
        def __init__(self, failures):
            self.left = failures

        def __getattr__(self, name):
            return getattr(memory, name)

        def get_many(self, names, size_max):
            found = memory.get_many(names, size_max)
            if found and self.left:
                self.left -= 1
                found[-1] = TierUnavailable("503")
            return found

    class Keys(set):
        def use(self, key, used_s):
            self.add(key)

    keys = Keys()
    assert sum(len(applied) for applied in UseReader(Failing(1)).read(keys)) == 3
    assert keys == {bytes([number]) * 16 for number in range(3)}
    with pytest.raises(TierUnavailable):
        list(UseReader(Failing(2)).read(keys))


# -- what was used lately stays ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("used", "evicted", "user"),
    [(OLD, NEW, "leader"), (OLD, NEW, "follower"), (NEW, OLD, "follower")],
    ids=["older-used-by-leader", "older-used-by-follower", "newer-used"],
)
def test_what_was_used_lately_stays(store, clock, used, evicted, user):
    """Two servers, one limit: whichever chain any of them used lately stays whole, and the other one gives way."""
    keepers = {name: keeper_of(store, clock, blobs=ROOM, timing=PACE) for name in ("leader", "follower")}
    turn(clock, *keepers.values(), times=6)
    assert [keeper.figures()["role"] for keeper in keepers.values()] == ["leader", "follower"]
    fill(store, clock, list(keepers.values()))
    use(clock, list(keepers.values()), keepers[user], used)
    press(store, clock, list(keepers.values()))

    assert keepers["leader"].figures()["evicted_blobs"] > 0
    assert indexes_of(store, used) == list(range(LENGTH))
    assert len(indexes_of(store, evicted)) < LENGTH
    assert indexes_of(store, NEXT) == list(range(3))


def test_what_an_engine_loads_stays_and_what_none_loads_goes(store):
    """End to end without vLLM: two machines on one bucket, the second loads a prefix, the first has no more room."""
    nodes = []
    try:
        _, writer = _machine(store, nodes)
        second, reader = _machine(store, nodes)
        prefixes = [(seed, seed, seed) for seed in (1, 2)]
        for prefix in prefixes:
            _store(store, nodes, writer, prefix)
            pass_seconds(store, 2)
        assert second.loaded(reader, prefixes[0]) == LENGTH, "nothing was loaded from the bucket"
        _turns(nodes, 5)
        assert set(_keys(second, reader, prefixes[0])) <= set(uses(store))
        _store(store, nodes, writer, (3, 3, 3))

        fresh = EngineWorld(ObjectTier(store), host_bytes=16 * BLOB_BYTES)
        nodes.append((fresh, Time()))
        newcomer = fresh.open()
        fresh.settle()
        assert [fresh.loaded(newcomer, (seed,) * LENGTH) for seed in (1, 3)] == [LENGTH, LENGTH]
        assert fresh.loaded(newcomer, prefixes[1]) < LENGTH
    finally:
        for world, _ in nodes:
            world.abandon()


def _machine(store, nodes):
    """A machine with memory for little, so that loads come from the bucket, and none of its own disk."""
    clock = Time()
    keeper = BucketKeeper(store, KeeperConfig(storage_bytes=9 * BLOB_BYTES), PACE, clock)
    world = EngineWorld(ObjectTier(store, keeper=keeper), host_bytes=8 * BLOB_BYTES)
    nodes.append((world, clock))
    session = world.open()
    _turns(nodes, 8)
    return world, session


def _store(store, nodes, session, prefix):
    """The first machine stores a prefix, again if need be: what no room was granted for yet is not kept in memory."""
    world, _ = nodes[0]
    wanted = set(_keys(world, session, prefix))
    for _ in range(30):
        world.store(session, prefix)
        _turns(nodes, 2)
        if wanted <= {parse_object_path(path).key for path in blobs(store)}:
            return
    pytest.fail(f"{prefix} was not stored in a minute")


def _turns(nodes, seconds):
    for _ in range(seconds):
        for world, clock in nodes:
            clock.now += 1
            world.clock.advance(1)
            world.settle()


def _keys(world, session, prefix):
    return world.clients[session].space.prefix(prefix)[0]


HOT, COLD = b"\x11" * 16, b"\x22" * 16


class Reading(Server):
    """A server that stores nothing and loads one chain again and again."""

    def _write(self):
        while self.is_alive:
            self.world.sleep(15)
            self.keeper.record_use([self.chains[0].name(index) for index in range(4)])


class Storing(Server):
    """A server whose prompts are ever new ones: one chain after another, none of them used again."""

    def _write(self):
        number = 0
        while self.is_alive:
            number += 1
            for index in range(4):
                self.world.sleep(self.world.draw.expovariate(1))
                self._put(Chain(HOT, number).name(index))


@pytest.mark.parametrize("is_read", [True, False], ids=["read", "not-read"])
def test_a_chain_that_another_server_reads_outlives_many_evictions_and_merges(is_read):
    """Two servers for an hour of virtual time, with the intervals of production in proportion."""
    world = World("recency")
    hot = Chain(HOT, 0)
    for index in range(4):
        world.put(object_path(hot.name(index)), bytes(100))
    config = KeeperConfig(storage_bytes=60 * 100 + 4096)
    storing = Storing(world, "storing", config, [Chain(HOT, 1)])
    reading = Reading(world, "reading", config, [hot]) if is_read else None
    servers = [server for server in (storing, reading) if server is not None]
    world.run(3600)
    left = [index for index in range(4) if object_path(hot.name(index)) in world.objects]
    swept = [server.keeper.figures() for server in servers]
    for server in servers:
        server.crash()
    world.run(100)

    assert sum(figures["evicted_blobs"] for figures in swept) > 100
    if is_read:
        assert left == [0, 1, 2, 3]
        assert sum(figures["merged_logs"] for figures in swept) > 3600 / (2 * WORLD_PACE.pass_s)
    else:
        assert left == []


# -- merging logs -----------------------------------------------------------------------------------------------------


def used_and_led(store, clock):
    """A full bucket whose ``OLD`` was used, as one log that no leader has merged yet, and its keeper."""
    keeper = keeper_of(store, clock, blobs=ROOM, timing=PACE)
    turn(clock, keeper)
    fill(store, clock, [keeper])
    keeper.record_use([OLD.name(index) for index in range(LENGTH)])
    turn(clock, keeper)
    assert len(paths(store)) == 1 and not paths(store, BASES), "the log was merged before the test began"
    return keeper


def end_abruptly(keeper):
    """As SIGKILL would: nothing is written or given up. The keeper has no thread, so it is enough to forget it."""
    keeper.turn = None


def test_a_merge_keeps_every_use_and_its_date_and_a_new_leader_evicts_by_it(store, clock):
    keeper = used_and_led(store, clock)
    before = uses(store)
    (log,) = store.list(RECENCY)
    assert before == {key: int(log.modified_s) for key in keys_of(OLD)}
    turn(clock, keeper, times=int(PACE.pass_s) + 1)

    assert [info.path.startswith(BASES) for info in store.list(RECENCY)] == [True]
    assert uses(store) == before
    assert keeper.figures()["merged_logs"] == 1 and keeper.figures()["malformed"] == 0
    keeper.close()  # only the base is left: what it does not hold nobody remembers
    heir = keeper_of(store, clock, blobs=ROOM, timing=PACE)
    turn(clock, heir, times=3)
    press(store, clock, [heir])

    assert heir.figures()["evicted_blobs"] > 0
    assert indexes_of(store, OLD) == list(range(LENGTH)) and len(indexes_of(store, NEW)) < LENGTH


def test_a_base_holds_what_was_used_and_not_what_was_only_continued(memory, clock):
    keeper = keeper_of(memory, clock, timing=PACE)
    turn(clock, keeper)
    put_patiently(memory, clock, [keeper], NEW, 0)
    pass_seconds(memory, 2)
    put_patiently(memory, clock, [keeper], NEW, 1)
    put_patiently(memory, clock, [keeper], OLD, 0)
    pass_seconds(memory, 2)
    keeper.record_use([OLD.name(0)])
    turn(clock, keeper, times=int(PACE.pass_s) + 1)

    assert len(paths(memory)) == len(paths(memory, BASES)) == 1
    assert list(uses(memory)) == [OLD.key(0)]


class Killed(BaseException):
    """The machine went down in the middle of a request."""


class Failing:
    """The real store; an operation of a kind on the recency log fails, by itself or with the whole process."""

    def __init__(self, store):
        self._store = store
        self.fails = None
        self.after = 0
        self.failed = 0

    def __getattr__(self, name):
        return getattr(self._store, name)

    def put(self, path, data):
        self._maybe("put", [path] if path.startswith(BASES) else [])
        self._store.put(path, data)

    def delete(self, to_delete):
        self._maybe("delete", [path for path in to_delete if path.startswith(RECENCY)])
        self._store.delete(to_delete)

    def _maybe(self, operation, about):
        if self.fails is None or self.fails[0] != operation or not about:
            return
        if self.after:
            self.after -= 1
            return
        self.failed += 1
        raise self.fails[1]


@pytest.mark.parametrize("moment", ["before-any-base", "between-two-bases", "before-the-logs-go"])
@pytest.mark.parametrize("end", ["killed", "store-failed"])
def test_a_merge_that_is_cut_short_loses_no_use_and_counts_none_twice(memory, clock, monkeypatch, moment, end):
    monkeypatch.setattr(recency, "BASE_ROWS", 2)  # three uses are two bases
    store = Failing(memory)
    keeper = used_and_led(store, clock)
    before = uses(memory)
    operation, store.after = {
        "before-any-base": ("put", 0),
        "between-two-bases": ("put", 1),
        "before-the-logs-go": ("delete", 0),
    }[moment]
    store.fails = (operation, Killed() if end == "killed" else TierUnavailable("object store: it is on fire"))
    bases = {"before-any-base": 0, "between-two-bases": 1, "before-the-logs-go": 2}[moment]
    if end == "killed":
        with pytest.raises(Killed):
            turn(clock, keeper, times=int(PACE.pass_s) + 1)
        end_abruptly(keeper)
    else:
        turn(clock, keeper, times=int(PACE.pass_s) + 1)
    assert store.failed >= 1
    assert len(paths(memory, BASES)) >= bases and len(paths(memory)) > len(paths(memory, BASES)), "the log went first"
    assert uses(memory) == before
    store.fails = None
    heir = keeper if end == "store-failed" else keeper_of(memory, clock, blobs=ROOM, timing=PACE)
    turn(clock, heir, times=int(PACE.expiry_s + PACE.pass_s) + 5)

    assert heir.figures()["role"] == "leader"
    assert len(paths(memory)) == len(paths(memory, BASES)) == 2, "logs and what the first try left are merged, too"
    assert uses(memory) == before
    press(memory, clock, [heir])
    assert indexes_of(memory, OLD) == list(range(LENGTH)) and len(indexes_of(memory, NEW)) < LENGTH


def test_two_leaders_that_merge_at_once_take_nothing_from_each_other(memory):
    """One was overtaken without knowing it: the names of bases tell their terms, and all of them are read."""
    inventories = []
    for chain, used_s in ((OLD, 500), (NEW, 700)):
        inventory = Listing()
        for other in (OLD, NEW):
            for index in range(LENGTH):
                inventory.add(other.name(index), SIZE, 100)
        inventory.seal()
        for key in keys_of(chain):
            inventory.use(key, used_s)
        inventories.append(inventory)
    reader = UseReader(memory)
    for term, inventory in enumerate(inventories, 1):
        written_bytes, removed = reader.merge(f"{term:020d}-1", inventory, [], 10.0)
        assert removed == [] and written_bytes == sum(info.size_bytes for info in memory.list(BASES)) / term
    assert uses(memory) == dict.fromkeys(keys_of(OLD), 500) | dict.fromkeys(keys_of(NEW), 700)


def test_a_use_within_the_grain_of_the_blobs_own_date_is_not_kept(memory):
    """It orders nothing that LastModified does not order, and a bucket of a million blobs stays one of few rows."""
    inventory = Listing()
    for index in range(2):
        inventory.add(OLD.name(index), SIZE, 100)
    inventory.seal()
    inventory.use(OLD.key(0), 109)
    inventory.use(OLD.key(1), 110)
    UseReader(memory).merge("1", inventory, [], 10.0)
    assert uses(memory) == {OLD.key(1): 110}


@pytest.mark.parametrize("size", [9 << 20, 25])
def test_an_object_that_is_no_log_is_counted_and_stops_nothing(memory, clock, size):
    """Larger than any log of ours, or of no form at all."""
    memory.put(f"{RECENCY}somebody/1", bytes(size))
    keeper = keeper_of(memory, clock, blobs=ROOM + 2 * size // SIZE, timing=PACE)
    put_patiently(memory, clock, [keeper], OLD, 0)
    assert keeper.figures()["malformed"] > 0 and keeper.figures()["passes"] > 0
