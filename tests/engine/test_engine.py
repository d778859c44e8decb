"""The engine around tiering: sessions, what a restart finds, estimates, and the end."""

import threading

import pytest

from tests.kit.engine_world import BLOB_BYTES, GEOMETRIES, NAMESPACES, SPACES, EngineWorld, geometry
from tests.kit.samples.formats import sample_namespace
from tests.kit.server.probe import wait_for
from tests.kit.step_executor import StepExecutor
from tiered_kv.chunks.geometry import ChunkGeometry, LayerPage
from tiered_kv.engine.engine import DATES_INTERVAL_S, RETRY_INTERVAL_S
from tiered_kv.engine.executor import LOCAL_THREADS, NOTIFY_INTERVAL_S, Pool, ThreadExecutor
from tiered_kv.engine.shared_jobs import BYTES_PER_READER, LOOK_READS, READERS, SLOW_READ_S, SharedJobs, tasks_for
from tiered_kv.errors import CapacityExceeded, ConfigError, TierUnavailable
from tiered_kv.testing.faults import Fault, FaultyTier, at
from tiered_kv.testing.memory import MemoryTier
from tiered_kv.tiering.lookups import LookupRequest
from tiered_kv.tiering.types import PROGRESS_INTERVAL_S, Arrival, Limits, LookupAnswer, LookupUpdate, Seal
from tiered_kv.tiers.base import BlobName


@pytest.fixture
def memory():
    return MemoryTier()


@pytest.fixture
def world(memory):
    world = EngineWorld(memory)
    yield world
    world.close()


def started(world, name="small"):
    session = world.open(name)
    world.settle()
    return session


def test_a_stored_prefix_comes_back_from_host_memory(world):
    session = started(world)
    world.store(session, (1, 2, 3))
    assert world.loaded(session, (1, 2, 3, 4)) == 3
    assert world.loaded(session, (1, 2, 9)) == 2


def test_a_prefix_that_left_host_memory_comes_back_from_the_tier(world, memory):
    session = started(world)
    for number in range(20):
        world.store(session, (number, 1))
    assert len(memory.names) == 40 and world.tiering.usage()["host_ready_chunks"] < 40
    assert [world.loaded(session, (number, 1)) for number in range(20)] == [2] * 20


def test_a_prefix_that_comes_piece_by_piece_is_not_walked_for_each_piece(world, monkeypatch):
    session = started(world)
    walks, prefix = [], world.tiering.index.prefix
    monkeypatch.setattr(world.tiering.index, "prefix", lambda entry: walks.append(entry) or prefix(entry))
    world.clock.advance(DATES_INTERVAL_S)
    path = tuple(range(6))
    for end in range(1, len(path) + 1):
        world.store(session, path[:end])
        world.engine.touch_prefix(SPACES["small"].key(path[:end]))
        world.step()
    assert len(walks) <= 1
    world.clock.advance(DATES_INTERVAL_S)
    world.step()
    assert [one.record.chunk_index for one in walks[-1:]] == [len(path) - 1], "the whole of it is dated in the end"
    assert world.loaded(session, path) == len(path)


LONG = tuple(range(24))


def sharing(tasks):
    """Those of these tasks that share jobs."""
    return [one for one in tasks if isinstance(getattr(getattr(one, "func", None), "__self__", None), SharedJobs)]


def promotion(memory, monkeypatch, *, is_followed):
    """A lookup of 24 chunks that are on the tier alone; each read is a task."""
    monkeypatch.setattr("tiered_kv.engine.engine.READERS", len(LONG))
    world = EngineWorld(memory, host_bytes=80 * BLOB_BYTES)
    session = started(world)
    world.store(session, LONG)
    for number in range(100, 140):
        world.store(session, (number, 1))
    assert world.tiering.usage()["host_ready_chunks"] < len(LONG) + 80
    lookup = world.lookup(session, LONG, is_followed=is_followed)
    world.step()
    assert world.lookups[lookup].update.ready == 0
    return world, lookup


@pytest.fixture
def promoting(memory, monkeypatch):
    world, lookup = promotion(memory, monkeypatch, is_followed=True)
    yield world, world.lookups[lookup]
    world.close()


def told_while_all_runs(world, asked):
    told = []
    is_run = True
    while is_run:
        before = world.seen[LookupUpdate]
        is_run = world.run_one()
        if world.seen[LookupUpdate] > before:
            told.append(asked.update.ready)
    return told


def test_of_chunks_that_arrive_one_after_the_other_sessions_are_told_in_eighths_and_of_the_end(promoting):
    """An answer describes all chunks of its lookup: one per chunk would grow with the square of their number."""
    world, asked = promoting
    world.clock.advance(-PROGRESS_INTERVAL_S)  # the first progress is not due either
    assert told_while_all_runs(world, asked) == list(range(3, 25, 3))
    assert asked.update.is_done and world.engine.wait_s is None


def test_of_a_lookup_that_is_not_followed_sessions_are_told_what_comes_and_when_all_is_here(memory, monkeypatch):
    world, lookup = promotion(memory, monkeypatch, is_followed=False)
    asked = world.lookups[lookup]
    world.clock.advance(10 * PROGRESS_INTERVAL_S)
    assert sum(run.chunks for run in asked.update.arriving) == len(asked.update.slots) == 24
    assert told_while_all_runs(world, asked) == [24]
    assert asked.update.is_done and world.engine.wait_s is None
    world.close()


def test_who_begins_to_follow_a_lookup_is_told_at_once_and_then_of_parts(memory, monkeypatch):
    """Also where nothing is new: whoever asks waits for an answer."""
    world, lookup = promotion(memory, monkeypatch, is_followed=False)
    asked = world.lookups[lookup]
    for _ in range(5):
        world.run_one()
    assert asked.update.ready == 0 and world.engine.wait_s is None
    world.engine.follow(asked.session, lookup)
    world.step()
    assert asked.update.ready == 5
    before = world.seen[LookupUpdate]
    world.engine.follow(asked.session, lookup)
    world.step()
    assert world.seen[LookupUpdate] == before + 1 and asked.update.ready == 5
    told = told_while_all_runs(world, asked)
    assert len(told) >= 6 and told == sorted(told) and told[-1] == 24
    world.engine.follow(asked.session + 1, lookup)  # another's
    world.engine.follow(asked.session, lookup + 1)  # or none
    before = world.seen[LookupUpdate]
    world.step()
    assert world.seen[LookupUpdate] == before
    world.close()


def test_progress_is_told_when_its_time_has_come_though_nothing_else_happens(promoting):
    world, asked = promoting
    while asked.update.ready < 3 or world.engine.wait_s is None:
        world.run_one()
    ready = asked.update.ready
    assert 0 < world.engine.wait_s <= PROGRESS_INTERVAL_S
    world.step()
    assert asked.update.ready == ready
    world.clock.advance(world.engine.wait_s)
    world.step()
    assert asked.update.ready > ready
    assert world.engine.wait_s is None


def test_a_read_that_hangs_keeps_no_other_one(memory):
    """A few tasks share many reads; what one of them has not begun another one takes."""
    release, started_to_hang = threading.Event(), threading.Event()

    class HangingTier(MemoryTier):
        def get_into(self, name, buffer):
            if name.chunk_index == 1:
                started_to_hang.set()
                release.wait(60)
            return super().get_into(name, buffer)

    tier = HangingTier()
    first = EngineWorld(tier, host_bytes=80 * BLOB_BYTES)
    first.store(started(first), LONG)
    first.close()
    tier.reopen(None)
    world = EngineWorld(tier, host_bytes=80 * BLOB_BYTES, executor=ThreadExecutor())
    session = world.open()
    lookup = world.lookup(session, LONG)
    try:
        wait_for(lambda: world.step() or started_to_hang.is_set(), "the read that hangs")
        world.clock.advance(2 * LOOK_READS * SLOW_READ_S)
        wait_for(lambda: world.step() or world.engine.jobs(1)["get"] == 1, "all reads but the one that hangs")
    finally:
        release.set()
    wait_for(lambda: world.step() or world.lookups[lookup].update.is_done, "the last one")
    assert world.lookups[lookup].update.ready == len(LONG)
    world.release(lookup)
    world.close()


@pytest.mark.parametrize(("read_s", "blocks", "tasks"), [(0.0, 0, 1), (0.0, 1, 2), (2 * SLOW_READ_S, 0, 2)])
def test_one_task_reads_small_blobs_and_has_another_help_where_it_waits_for_its_medium(
    monkeypatch, read_s, blocks, tasks
):
    class Medium(MemoryTier):
        blocks_read = 0

        def get_into(self, name, buffer):
            world.clock.advance(read_s)
            self.blocks_read += blocks
            return super().get_into(name, buffer)

    class CountingExecutor(StepExecutor):
        def submit(self, pool, priority, task):
            submitted.append(task)
            super().submit(pool, priority, task)

    medium = Medium()
    world = EngineWorld(medium, host_bytes=80 * BLOB_BYTES)
    world.store(started(world), LONG)
    world.close()
    medium.reopen(None)
    monkeypatch.setattr("tiered_kv.engine.shared_jobs._blocks_read", lambda: medium.blocks_read)
    submitted = []
    world = EngineWorld(medium, host_bytes=80 * BLOB_BYTES, executor=CountingExecutor())
    assert world.loaded(started(world), LONG) == len(LONG)
    assert len(sharing(submitted)) == tasks
    world.close()


def test_larger_blobs_have_more_tasks():
    assert [tasks_for(n * BYTES_PER_READER) for n in (0, 1, 2, READERS, 2 * READERS)] == [1, 1, 2, READERS, READERS]


def restarted_with_long(tier, monkeypatch, **engine):
    """A world that has a prefix on its tier alone, and begins to read a part of it per step."""
    monkeypatch.setattr("tiered_kv.tiering.lookups.READ_AT_ONCE", READERS + 1)
    first = EngineWorld(tier, host_bytes=80 * BLOB_BYTES)
    first.store(started(first), LONG)
    first.close()
    tier.reopen(None)
    return EngineWorld(tier, host_bytes=80 * BLOB_BYTES, **engine)


def test_reads_that_come_in_several_steps_are_shared_by_as_few_tasks(memory, monkeypatch):
    world = restarted_with_long(memory, monkeypatch)
    session = started(world)
    lookup = world.lookup(session, LONG)
    while world.engine.jobs(1)["get"] < len(LONG):
        others = [n for n, task in enumerate(world.executor.waiting) if not sharing([task])]  # memory for the slots
        assert others or world.engine.wait_s == 0.0
        world.run_one(lambda _, others=others: others[0]) if others else world.step()
    assert len(sharing(world.executor.waiting)) == 1
    world.settle()
    assert world.lookups[lookup].update.ready == len(LONG)
    world.release(lookup)
    world.close()


def test_a_task_whose_read_hangs_leaves_those_of_later_steps_to_others(memory, monkeypatch):
    """Those that are begun then hang, too, until each of the pool's threads but one does."""
    release = threading.Event()
    hanging = threading.Semaphore(0)
    hang = LOCAL_THREADS[Pool.LOAD] - 1

    class HangingTier(MemoryTier):
        def get_into(self, name, buffer):
            if name.chunk_index < hang:
                hanging.release()
                release.wait(60)
            return super().get_into(name, buffer)

    world = restarted_with_long(HangingTier(), monkeypatch, executor=ThreadExecutor())
    session = world.open()
    lookup = world.lookup(session, LONG)
    try:
        for _ in range(hang):
            wait_for(lambda: world.step() or hanging.acquire(blocking=False), "a read that hangs")
            world.clock.advance(2 * LOOK_READS * SLOW_READ_S)
        wait_for(lambda: world.step() or world.engine.jobs(1)["get"] == hang, "all other reads")
    finally:
        release.set()
    wait_for(lambda: world.step() or world.lookups[lookup].update.is_done, "those that hung")
    assert world.lookups[lookup].update.ready == len(LONG)
    world.release(lookup)
    world.close()


def test_few_tasks_seal_many_chunks_and_make_way_for_reads(memory, monkeypatch):
    """A read that comes while 20 seals are to be done waits for one of them, and none is lost."""
    world = EngineWorld(memory, host_bytes=120 * BLOB_BYTES, limits=Limits(credit_share=0.5))
    session = started(world)
    world.store(session, (0,))
    *_, count = world.tiering.removing(0, b"", None, leaves_holes=True)
    assert count is not None and count.removed == 1
    perform = world.engine._performer.perform

    def slowly(job):
        world.clock.advance(2 * NOTIFY_INTERVAL_S)
        performed.append(type(job))
        return perform(job)

    performed = []
    monkeypatch.setattr(world.engine._performer, "perform", slowly)
    paths = [(number,) for number in range(1, 21)]
    assert all(world.commit(session, path) for path in paths)
    world.step()
    assert len(sharing(world.executor.waiting)) == 1
    world.run_one(lambda count: count - 1)
    assert performed == [Seal], "the others make way"
    assert world.loaded(session, (0,)) == 1
    assert performed.count(Seal) == len(paths)
    assert all(world.loaded(session, path) == 1 for path in paths)
    world.close()


def test_a_restart_finds_what_was_written(memory):
    first = EngineWorld(memory)
    first.store(started(first), (1, 2, 3))
    first.close()
    memory.reopen(None)
    second = EngineWorld(memory)
    assert second.loaded(started(second), (1, 2, 3)) == 3
    second.close()


def test_two_namespaces_of_different_chunk_sizes_share_one_engine(world):
    small, large = started(world), started(world, "large")
    world.store(small, (1, 2))
    world.store(large, (1, 2))
    assert (world.loaded(small, (1, 2)), world.loaded(large, (1, 2))) == (2, 2)


def test_the_namespaces_record_is_kept_beside_its_blobs(world, memory):
    started(world)
    assert memory.descriptions == {NAMESPACES["small"].digest: NAMESPACES["small"].record}


def test_a_record_that_cannot_be_written_costs_nothing_but_itself(memory):
    world = EngineWorld(FaultyTier(memory, at({1: Fault.ERROR})))
    session = started(world)
    world.store(session, (1,))
    assert world.loaded(session, (1,)) == 1 and memory.descriptions == {}
    world.close()


def test_a_namespace_has_one_geometry(world):
    started(world)
    with pytest.raises(ConfigError, match="another geometry"):
        world.engine.open_session(NAMESPACES["small"], geometry(1234))


def test_host_memory_must_hold_a_few_chunks(memory):
    world = EngineWorld(memory, host_bytes=3 * BLOB_BYTES)
    with pytest.raises(ConfigError, match=f"set host_bytes to {4 * BLOB_BYTES} or more"):
        world.open()
    world.close()


def test_a_chunk_must_fit_into_a_slab(memory):
    world = EngineWorld(memory, host_bytes=16 << 30)
    huge = ChunkGeometry(4, 8, ((LayerPage("layer", "U8", (1 << 29, 1), "NC"),),))
    with pytest.raises(ConfigError, match="chunk_tokens to less"):
        world.engine.open_session(sample_namespace(epoch="huge"), huge)
    world.close()


def test_the_smallest_arena_loads_and_stores(memory):
    world = EngineWorld(memory, host_bytes=4 * BLOB_BYTES)
    session = started(world)
    for number in range(6):
        world.store(session, (number,))
    assert [world.loaded(session, (number,)) for number in range(6)] == [1] * 6
    world.close()


def test_chunks_larger_than_a_slab_are_warned_of_and_served_while_an_engine_pins(memory, caplog):
    world = EngineWorld(memory, host_bytes=4 * BLOB_BYTES)
    world.engine.keep_memory(is_kept=True)
    session = started(world)
    assert "chunks are larger than a slab" in caplog.text
    for number in range(6):
        world.store(session, (number,))
    assert [world.loaded(session, (number,)) for number in range(6)] == [1] * 6
    world.close()


def test_an_engine_that_pins_ends_with_memory_as_its_slots_take_it(memory):
    world = EngineWorld(memory)
    session = started(world)
    world.store(session, (1, 2))
    before = [world.arena.memory_bytes(slab) for slab in range(len(world.arena.slab_fds))]
    for is_kept in (True, True, False, False):
        world.engine.keep_memory(is_kept=is_kept)
        assert world.engine.tiering.slots.keeps_memory is is_kept
        assert world.loaded(session, (1, 2)) == 2
        assert before == [world.arena.memory_bytes(slab) for slab in range(len(world.arena.slab_fds))]
    world.close()


def test_a_foreign_blob_under_our_name_is_left_alone(world, memory):
    large = started(world, "large")
    world.store(large, (5,))
    foreign = memory.raw_get(name_of("large", (5,)))
    session = started(world)
    for number in range(20):
        world.store(session, (number,))
    memory.raw_put(name_of("small", (0,)), foreign)
    assert world.loaded(session, (0,)) == 0
    world.store(session, (0,))
    assert world.loaded(session, (0,)) == 1  # from host memory
    assert memory.raw_get(name_of("small", (0,))) == foreign


@pytest.mark.parametrize("damage", ["flip", "cut", "swap"])
def test_a_damaged_blob_is_a_miss_and_stored_again(world, memory, damage):
    session = started(world)
    for number in range(20):
        world.store(session, (number,))
    name = name_of("small", (0,))
    good = memory.raw_get(name)
    damaged = bytearray(good)
    damaged[-3000] ^= 1
    other = memory.raw_get(name_of("small", (1,)))
    memory.raw_put(name, {"flip": bytes(damaged), "cut": good[:-4096], "swap": other}[damage])
    assert world.loaded(session, (0,)) == 0
    assert memory.raw_get(name) is None
    world.store(session, (0,))
    assert memory.raw_get(name) == resealed(world, memory, name) and world.loaded(session, (0,)) == 1


def test_a_blob_that_vanished_is_missing_and_not_corrupt(world, memory):
    session = started(world)
    for number in range(20):
        world.store(session, (number,))
    memory.delete(name_of("small", (0,)))
    assert world.loaded(session, (0,)) == 0
    assert world.tiering.counters["read_failed_missing"] == 1
    assert world.tiering.tier_usage(1).chunks == 19


def resealed(world, memory, name):
    data = memory.raw_get(name)
    world.engine.format_of(name.namespace).verify(memoryview(data), name.key, None)
    return data


def test_a_blob_of_other_tokens_under_our_key_is_dropped(world, memory):
    """A crafted collision of the key: the blob is sound, its prefix digest is another."""
    session = started(world)
    for number in range(20):
        world.store(session, (number,))
    entry = world.tiering.index.get(SPACES["small"].key((0,)))
    forged = type(entry.record)(
        *(getattr(entry.record, f) for f in ("namespace", "key", "parent", "chunk_index")), bytes(32)
    )
    entry.record = forged
    lookup = world.tiering.lookup(session, LookupRequest([forged.key], [bytes(32)]))
    world.settle()
    assert world.tiering.counters["read_failed_corrupt"] == 1
    world.tiering.release(session, lookup)


def test_capacity_is_kept_and_foreign_bytes_count(memory):
    filler = EngineWorld(memory)
    filler.store(started(filler), (1,))
    filler.close()
    [name] = memory.names
    memory.raw_put(name, b"not a blob")  # the scan leaves it out, the tier still counts it
    memory.reopen(4 * BLOB_BYTES)
    world = EngineWorld(memory)
    session = started(world)
    for number in range(100, 110):
        world.store(session, (number,))
    assert world.tiering.tier_usage(1).chunks == 3
    assert world.tiering.counters["write_failed_no_room"] == 0
    world.close()


# -- estimates and time ------------------------------------------------------------------------------------------------


def parts(world: EngineWorld, *runs: tuple[int, int]) -> list[tuple[int, float | None]]:
    """What the engine says of chunks that arrive in these runs of ``(tier, chunks)``."""
    answer = LookupAnswer(arriving=tuple(Arrival(tier, chunks) for tier, chunks in runs))
    return world.engine.timed(SPACES["small"].namespace, answer).parts


def test_without_samples_there_is_no_estimate_and_failures_make_none(memory):
    is_broken = []
    world = EngineWorld(FaultyTier(memory, lambda _number: Fault.ERROR if is_broken else None))
    session = started(world)
    for number in range(20):
        world.store(session, (number,))
    is_broken.append(True)
    assert parts(world, (1, 1)) == [(1, None)]
    world.loaded(session, (0,))
    assert world.tiering.counters["read_failed_unavailable"] == 1
    assert parts(world, (1, 1)) == [(1, None)]
    assert world.engine.read_bytes_per_s(1) is None
    world.close()


def test_promotions_give_the_estimate(world):
    session = started(world)
    for number in range(20):
        world.store(session, (number,))
    lookup = world.lookup(session, (0,))
    world.step()
    world.clock.advance(0.5)
    world.settle()
    world.release(lookup)
    assert world.engine.read_bytes_per_s(1) == 2 * BLOB_BYTES
    assert parts(world, (1, 4)) == [(1, 0.5), (4, 2.0)]
    assert parts(world, (0, 2), (1, 1), (0, 3), (1, 3)) == [
        (1, 0.0),
        (2, 0.0),
        (3, 0.5),
        (6, 0.5),
        (9, 2.0),
    ], "what needs not be read is here with the chunk before it"


@pytest.mark.parametrize("is_flushed", [True, False])
def test_uses_reach_the_tier_so_that_a_restart_evicts_the_oldest(memory, is_flushed):
    """With the next flush, or at the end."""
    world = EngineWorld(memory)
    session = started(world)
    for number in range(3):
        world.store(session, (number,))
    world.loaded(session, (0,))
    used = [SPACES["small"].key((number,)) for number in (1, 2, 0)]
    if is_flushed:
        world.clock.advance(memory.traits.flush_interval_s)
        world.settle()
        assert [name.key for name in memory.names] == used
    world.close()
    assert [name.key for name in memory.names] == used


def test_while_a_tier_hangs_only_so_many_uses_wait_for_it(memory, monkeypatch):
    monkeypatch.setattr("tiered_kv.engine.engine.USES_MAX", 4)
    world = EngineWorld(memory)
    session = started(world)
    for number in range(6):
        world.store(session, (number,))
    for number in range(6):
        world.loaded(session, (number,))
    assert [name.key for name in memory.names] == [SPACES["small"].key((number,)) for number in range(6)]
    world.clock.advance(memory.traits.flush_interval_s)
    world.settle()
    assert [name.key for name in memory.names] == [SPACES["small"].key((number,)) for number in (0, 1, 2, 3, 4, 5)]
    world.close()


def test_recency_is_persisted_now_and_then(memory):
    calls = []
    tier = FaultyTier(memory, at({}), on_operation=lambda operation, _name: calls.append(operation))
    world = EngineWorld(tier)
    started(world)
    assert calls.count("flush") == 0
    for _ in range(3):
        world.clock.advance(MemoryTier().traits.flush_interval_s)
        world.step()
        world.step()  # one that runs is enough
        world.settle()
    assert calls.count("flush") == 3
    world.close()


def test_a_flush_that_fails_is_tried_again(memory, caplog):
    failures = []

    def fail_once(operation, _name):
        if operation == "flush" and not failures:
            failures.append(operation)
            raise TierUnavailable("planned")

    world = EngineWorld(FaultyTier(memory, at({}), on_operation=fail_once))
    started(world)
    for _ in range(2):
        world.clock.advance(MemoryTier().traits.flush_interval_s)
        world.settle()
    assert "recency was not persisted" in caplog.text and failures
    world.close()


def test_pins_of_many_chunks_take_a_part_of_each_step(memory, monkeypatch):
    """A later look at them waits until the one before has had its effect: or there might never be any."""
    monkeypatch.setattr("tiered_kv.tiering.tiers.PINNED_AT_ONCE", 1)
    world = EngineWorld(memory)
    world.store(started(world), (1, 2, 3, 4, 5))
    pins = [SPACES["small"].key((1, 2, 3, 4, 5))]
    monkeypatch.setattr(memory, "pinned", lambda: list(pins))

    def look():
        world.clock.advance(memory.traits.flush_interval_s)
        world.step()
        while world.executor.step():
            pass

    def kept():
        return world.tiering.tier_usage(1).pinned_bytes // BLOB_BYTES, world.engine.wait_s == 0.0

    look()
    assert kept() == (0, False), "nobody has taken it in"
    world.step()
    assert kept() == (0, True)
    pins[:] = [SPACES["small"].key((1,))]
    look()
    seen = []
    for _ in range(7):
        world.step()
        seen.append(kept())
    assert seen == [*[(0, True)] * 4, *[(5, True)] * 2, (1, False)]
    world.close()


def test_memory_that_the_machine_refused_is_asked_for_again_later(memory, monkeypatch):
    world = EngineWorld(memory)
    refusals = []

    def refuse(slab, size_bytes):
        refusals.append(slab)
        raise CapacityExceeded("planned")

    monkeypatch.setattr(world.arena, "allocate", refuse)
    session = started(world)
    for _ in range(5):
        world.settle()
    assert len(refusals) == 1 and world.loaded(session, (1,)) == 0
    monkeypatch.undo()
    world.clock.advance(RETRY_INTERVAL_S)
    world.settle()
    world.store(session, (1,))
    assert world.loaded(session, (1,)) == 1
    world.close()


def test_an_undeclared_failure_of_a_tier_is_a_miss_and_logged(memory, caplog):
    def explode(operation, _name):
        if operation == "get":
            raise ZeroDivisionError("planned")

    world = EngineWorld(FaultyTier(memory, at({}), on_operation=explode))
    session = started(world)
    for number in range(20):
        world.store(session, (number,))
    assert world.loaded(session, (0,)) == 0
    assert "job failed in a way no tier declared. job=Read" in caplog.text
    caplog.clear()
    world.close()


def test_closing_closes_everything_even_if_a_tier_fails_to(memory):
    world = EngineWorld(memory)
    started(world)

    def fail():
        raise TierUnavailable("planned")

    memory.close = fail
    with pytest.raises(TierUnavailable):
        world.close()
    assert world.arena.slab_fds == []


def name_of(name, path):
    return BlobName(SPACES[name].namespace, SPACES[name].key(path))


def test_sizes_of_the_two_geometries_differ_and_are_padded():
    assert SPACES["small"].slot_bytes == BLOB_BYTES < SPACES["large"].slot_bytes
    assert all(geometry.data_bytes % 4096 for geometry in GEOMETRIES.values())


def test_a_session_opens_while_its_disk_hangs():
    """An engine that starts, or resets its cache, writes into the directory: in another thread than all lookups."""
    may_go_on = threading.Event()
    waiting = []

    class HangingTier(MemoryTier):
        def describe(self, namespace, record):
            waiting.append(threading.current_thread())
            if threading.current_thread() is not threading.main_thread():
                may_go_on.wait()
            super().describe(namespace, record)

    tier = HangingTier()
    world = EngineWorld(tier, executor=ThreadExecutor())
    try:
        world.open()
        wait_for(lambda: waiting, "the record's thread")
        assert waiting != [threading.main_thread()] and not tier.descriptions
        may_go_on.set()
        wait_for(lambda: tier.descriptions, "the namespace's record")
    finally:
        may_go_on.set()
        world.close()


def test_a_namespace_is_described_once_its_tier_answers_again(memory):
    """An engine that starts while its bucket is down, and runs for weeks."""
    faults = []
    world = EngineWorld(FaultyTier(memory, lambda _number: faults.pop() if faults else None))
    faults += [Fault.ERROR] * 3
    world.open()
    world.open("other")
    world.settle()
    assert not memory.descriptions
    for _ in range(3):
        world.clock.advance(RETRY_INTERVAL_S)
        world.settle()
    assert set(memory.descriptions) == {NAMESPACES[name].digest for name in ("small", "other")}
    assert not any(world.engine._undescribed.values()) and not world.engine._describing
    world.close()


def test_a_loop_that_is_behind_because_a_pool_hangs_sleeps_and_grants_slots_afterwards(memory, monkeypatch):
    """A seal that waits behind reads that hang: until it ends no slots are granted, and nothing turns for that."""
    monkeypatch.setattr("tiered_kv.tiering.slot_grants.EVICTED_AT_ONCE", 1)
    world = EngineWorld(memory, host_bytes=64 * BLOB_BYTES)
    session = started(world)
    for number in range(80):
        world.store(session, (number,))
    other = world.open()
    assert world.engine.wait_s == 0, "the cache is full: a session that comes gets its slots in parts"
    monkeypatch.setattr("tiered_kv.engine.engine.ENDED_MAX", 1)
    assert world.commit(session, (900,))
    for _ in range(3):
        world.step()
    assert world.engine.is_behind and world.engine.wait_s is None
    had = len(world.clients[other].credits)
    world.settle()
    while world.engine.wait_s == 0:
        world.settle()
    assert len(world.clients[other].credits) > had
    assert world.loaded(session, (900,)) == 1
    world.close()
