"""Random histories of a whole engine with a tier that fails: promised bytes are always the bytes that were stored."""

from counts import count
from engine_world import BLOB_BYTES, SPACES, EngineWorld
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tiered_kv.testing.faults import Fault, FaultyTier
from tiered_kv.testing.memory import MemoryTier
from tiered_kv.tiers.base import BlobName

PICK = st.integers(0, 1 << 16)
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple)
NAMES = st.sampled_from(sorted(SPACES))


class EngineHistories(RuleBasedStateMachine):
    """Rules are what clients, threads and the medium do; ``EngineWorld`` compares every promised byte on the way."""

    @initialize(host_blobs=st.sampled_from([6, 16]), capacity_blobs=st.sampled_from([None, 3, 12]))
    def start(self, host_blobs, capacity_blobs):
        self.faults: list[Fault | None] = []
        self.capacity = None if capacity_blobs is None else capacity_blobs * BLOB_BYTES
        self.memory = MemoryTier(self.capacity)
        self.host_bytes = host_blobs * BLOB_BYTES
        self.boot()

    def boot(self):
        tier = FaultyTier(self.memory, lambda _number: self.faults.pop() if self.faults else None)
        self.world = EngineWorld(tier, self.host_bytes)
        self.world.open("small")
        self.world.step()

    def session(self, pick):
        return sorted(self.world.clients)[pick % len(self.world.clients)]

    @rule(name=NAMES)
    def open(self, name):
        if len(self.world.clients) < 3:
            self.world.open(name)
            self.world.step()

    @rule(pick=PICK, path=PATHS)
    def commit_a_prefix(self, pick, path):
        for depth in range(1, len(path) + 1):
            self.world.commit(self.session(pick), path[:depth])
        self.world.step()

    @rule(pick=PICK, path=PATHS)
    def store_a_prefix(self, pick, path):
        self.world.store(self.session(pick), path)

    @rule(pick=PICK, first=st.integers(0, 3))
    def fill_host_memory(self, pick, first):
        """Prompts that share nothing push everything else out."""
        for number in range(8):
            self.world.commit(self.session(pick), (100 * first + number,))
            self.world.settle()

    @rule(pick=PICK, path=PATHS, start=st.integers(0, 2))
    def lookup(self, pick, path, start):
        self.world.lookup(self.session(pick), path, start)
        self.world.step()

    @rule(pick=PICK)
    @precondition(lambda self: self.world.lookups)
    def release(self, pick):
        self.world.release(sorted(self.world.lookups)[pick % len(self.world.lookups)])
        self.world.step()

    @precondition(lambda self: len(self.world.clients) > 1)
    @rule(pick=PICK)
    def close_session(self, pick):
        if len(self.world.clients) > 1:
            self.world.close_session(self.session(pick))
            self.world.step()

    @rule(picks=st.lists(PICK, min_size=1, max_size=4))
    def run(self, picks):
        for pick in picks:
            self.world.run_one(lambda count, pick=pick: pick % count)

    @rule(seconds=st.sampled_from([0.1, 6.0, 40.0]))
    def pass_time(self, seconds):
        self.world.clock.advance(seconds)
        self.world.step()

    @rule(fault=st.sampled_from([*Fault, None]))
    def plan_a_fault(self, fault):
        self.faults.insert(0, fault)

    @precondition(lambda self: self.memory.names)
    @rule(pick=PICK, how=st.sampled_from(["flip", "cut", "foreign"]))
    def damage(self, pick, how):
        if names := self.memory.names:
            name = names[pick % len(names)]
            data = self.memory.raw_get(name)
            self.memory.raw_put(name, damaged(data, how) if data else b"")

    @rule()
    def restart(self):
        """As after a SIGKILL: nothing is drained, the medium keeps what it has."""
        self.faults.clear()
        self.world.abandon()
        self.boot()

    def teardown(self):
        if not hasattr(self, "world"):
            return
        self.faults.clear()
        world = self.world
        world.settle()
        for session in list(world.clients):
            world.close_session(session)
        world.settle()
        world.clock.advance(60)  # refused memory is asked for again
        world.settle()
        world.check_idle()
        for number, name in enumerate(sorted(SPACES)):
            session = world.open(name)
            world.settle()
            world.store(session, (-1 - number,))
            assert world.loaded(session, (-1 - number,)) == 1, "the engine no longer stores"
            world.close_session(session)
            world.settle()
        world.close()


def damaged(data, how):
    if how == "foreign":
        return FOREIGN
    middle = len(data) // 2
    return data[:middle] if how == "cut" else data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :]


def foreign_blob():
    """A sound blob of somebody else, which has another size as well."""
    memory = MemoryTier()
    world = EngineWorld(memory)
    session = world.open("large")
    world.settle()
    world.store(session, (77,))
    space = SPACES["large"]
    data = memory.raw_get(BlobName(space.namespace, space.key((77,))))
    world.close()
    assert data is not None
    return data


FOREIGN = foreign_blob()

EngineHistories.TestCase.settings = settings(max_examples=3 * count("EXAMPLES", 30), stateful_step_count=40)
TestEngineHistories = EngineHistories.TestCase
