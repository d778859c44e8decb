"""The engine as it runs in the server: real threads, a real disk tier, the owner asleep on the executor's eventfd."""

import random
import select

import pytest

from tests.kit.counts import count, seed
from tests.kit.engine_world import BLOB_BYTES, EngineWorld
from tests.kit.storage.disk_probe import blob_files, open_disk, temp_files
from tiered_kv.engine.executor import ThreadExecutor

HOST_BYTES = 24 * BLOB_BYTES
DEADLINE_S = 60


class ThreadedWorld(EngineWorld):
    """An engine whose jobs run by themselves."""

    def __init__(self, root, limit_bytes=16 << 20):
        super().__init__(open_disk(root, limit_bytes), HOST_BYTES, ThreadExecutor())

    def until(self, is_true, what):
        """Turn the owner's loop until something holds."""
        self.step()
        while not is_true():
            assert select.select([self.executor.fileno()], [], [], DEADLINE_S)[0], (
                f"nothing happens. waiting for {what}"
            )
            self.step()

    def store_all(self, session, path):
        for depth in range(1, len(path) + 1):
            self.until(lambda: self.clients[session].credits, "a credit")
            self.commit(session, path[:depth])

    def load(self, session, path):
        lookup = self.lookup(session, path)
        self.until(lambda: (update := self.lookups[lookup].update) is not None and update.is_done, "a lookup")
        ready = self.lookups[lookup].update.ready
        self.release(lookup)
        return ready

    def drain(self):
        self.until(lambda: not self.tiering.pending_writes, "the drain")

    def started(self):
        session = self.open()
        self.until(lambda: self.clients[session].credits, "the first credit")
        return session


@pytest.fixture
def prefixes():
    return [(number, *range(5)) for number in range(12)]  # 72 chunks, three times host memory


def test_more_than_host_memory_is_stored_and_comes_back_byte_for_byte(tmp_path, prefixes):
    world = ThreadedWorld(tmp_path)
    session = world.started()
    for prefix in prefixes:
        world.store_all(session, prefix)
        world.drain()
    assert [world.load(session, prefix) for prefix in prefixes] == [6] * 12
    assert len(blob_files(tmp_path)) == 72
    world.check_idle()
    world.close()


def test_a_restart_serves_from_disk_what_was_drained(tmp_path, prefixes):
    world = ThreadedWorld(tmp_path)
    session = world.started()
    for prefix in prefixes:
        world.store_all(session, prefix)
        world.drain()
    world.close()
    again = ThreadedWorld(tmp_path)
    session = again.started()
    assert [again.load(session, prefix) for prefix in prefixes] == [6] * 12
    assert again.engine.read_bytes_per_s(1) is not None
    again.close()


def test_the_disk_never_holds_more_than_it_may_and_keeps_prefixes_whole(tmp_path):
    limit, smaller_limit = 2 << 20, 1 << 20
    prefixes = [(number, *range(5)) for number in range(40)]
    world = ThreadedWorld(tmp_path, limit)
    session = world.started()
    for prefix in prefixes:
        world.store_all(session, prefix)
        world.drain()
        assert world.engine.tiers[1].usage().used_bytes <= limit
    assert world.tiering.counters["write_failed_no_room"] == 0
    assert world.tiering.counters["lower_evicted"] > 60
    world.close()
    smaller = ThreadedWorld(tmp_path, smaller_limit)
    session = smaller.started()
    smaller.until(lambda: smaller.engine.tiers[1].usage().used_bytes <= smaller_limit, "the eviction")
    found = sum(smaller.load(session, prefix) for prefix in prefixes)
    assert found == len(blob_files(tmp_path)) > 60, "a chunk without its parent is left"
    smaller.close()


@pytest.mark.parametrize("number", range(seed(), seed() + count("SEEDS", 4)))
def test_sessions_that_do_everything_at_once_read_only_what_was_stored(tmp_path, number):
    source = random.Random(number)
    world = ThreadedWorld(tmp_path, 1 << 20)
    sessions = [world.started() for _ in range(2)] + [world.open("large")]
    for _ in range(300):
        session = source.choice(sessions)
        path = tuple(source.randrange(4) for _ in range(source.randrange(1, 6)))
        action = source.random()
        if action < 0.5:
            for depth in range(1, len(path) + 1):
                world.commit(session, path[:depth])
        elif action < 0.8 or not world.lookups:
            world.lookup(session, path, source.randrange(2))
        else:
            world.release(source.choice(sorted(world.lookups)))
        world.step()
    for lookup in list(world.lookups):
        world.release(lookup)
    world.drain()
    world.check_idle()
    world.close()
    assert temp_files(tmp_path) == []
