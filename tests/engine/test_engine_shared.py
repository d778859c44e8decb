"""The engine over a disk tier and a shared one behind it: uploads, searches, restarts, two machines on one bucket."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.kit.counts import count
from tests.kit.engine_world import BLOB_BYTES, EngineWorld
from tests.kit.storage.disk_probe import open_disk
from tiered_kv.engine.engine import CONFIRMED_S
from tiered_kv.keys.naming import parse_object_path
from tiered_kv.location import parse_location
from tiered_kv.testing.faults import Fault, FaultyTier
from tiered_kv.testing.memory import MemoryTier
from tiered_kv.tiering.secondary_tier import SecondaryTier
from tiered_kv.tiers.object.store import ObjectStore
from tiered_kv.tiers.object.tier import ObjectTier

PREFIX = (1, 2, 3, 4, 5)
PICK = st.integers(0, 1 << 16)
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple)


@pytest.fixture
def bucket():
    return MemoryTier(name="object", is_shared=True)


def node(tiers, **options):
    world = EngineWorld(tiers, **options)
    session = world.open()
    world.settle()
    return world, session


def test_what_is_stored_goes_to_disk_and_from_there_to_the_bucket(tmp_path, bucket):
    world, session = node([open_disk(tmp_path), bucket])
    world.store(session, PREFIX)
    assert len(bucket.names) == 5 and world.tiering.counters["uploaded"] == 5
    world.check_idle()
    world.close()


def test_an_empty_machine_gets_everything_from_the_bucket_and_keeps_it_on_disk(tmp_path, bucket):
    first, session = node([open_disk(tmp_path / "a"), bucket])
    first.store(session, PREFIX)
    first.abandon()
    second, session = node([open_disk(tmp_path / "b"), bucket])
    assert second.loaded(session, PREFIX) == 5
    assert second.tiering.counters["probes"] <= 5
    second.check_idle()
    second.abandon()
    bucket.reopen(None)
    for name in bucket.names:
        bucket.delete(name)
    third, session = node([open_disk(tmp_path / "c"), bucket])
    assert third.loaded(session, PREFIX) == 0
    third.close()
    bucket.reopen(None)
    again, session = node([open_disk(tmp_path / "b2"), bucket])
    again.close()


def test_two_machines_share_without_a_restart(tmp_path, bucket):
    one, session_of_one = node([open_disk(tmp_path / "a"), bucket])
    other, session_of_other = node([open_disk(tmp_path / "b"), bucket])
    one.store(session_of_one, PREFIX[:3])
    assert other.loaded(session_of_other, PREFIX) == 3
    other.store(session_of_other, PREFIX)
    one.clock.advance(60)  # what it found absent may be there by now
    one.settle()
    one.clock.advance(60)
    one.settle()
    assert one.loaded(session_of_one, PREFIX) == 5
    one.abandon()
    other.abandon()


def test_uploads_that_were_not_made_before_the_end_are_made_after_it(tmp_path, bucket):
    faulty = FaultyTier(bucket, lambda _number: Fault.ERROR)
    world, session = node([open_disk(tmp_path), faulty])
    world.store(session, PREFIX)
    assert bucket.names == [] and world.tiering.pending_writes > 0
    world.close()
    bucket.reopen(None)
    again, session = node([open_disk(tmp_path), bucket])
    assert len(bucket.names) == 5
    assert again.loaded(session, PREFIX) == 5
    again.close()


def test_a_blob_damaged_in_the_bucket_is_replaced_by_the_next_store(tmp_path, bucket):
    world, session = node([bucket])
    world.store(session, PREFIX)
    victim = next(name for name in bucket.names if name.chunk_index == 2)
    data = bytearray(bucket.raw_get(victim))
    data[-5000] ^= 1
    bucket.raw_put(victim, bytes(data))
    for number in range(40):
        world.store(session, (1000 + number,))
    assert world.loaded(session, PREFIX) == 2
    world.store(session, PREFIX)
    for number in range(40):
        world.store(session, (2000 + number,))
    assert world.loaded(session, PREFIX) == 5
    world.close()


def delete(bucket, from_depth=1, to_depth=100):
    """Somebody deletes what lies so deep in prefixes."""
    for name in bucket.names:
        if from_depth <= name.chunk_index + 1 <= to_depth:
            bucket.delete(name)


def pass_minutes(world):
    for _ in range(2):
        world.clock.advance(CONFIRMED_S / 2)
        world.settle()


LONG = (1, 2, 3, 4, 5, 6, 7, 8)


@pytest.mark.parametrize("has_disk", [True, False])
@pytest.mark.parametrize("lost", [(1, 100), (1, 1), (5, 6), (6, 6)])
@pytest.mark.parametrize("at_once", [1, 64])
def test_a_prefix_that_others_deleted_is_uploaded_again_before_what_goes_on_from_it(
    tmp_path, bucket, monkeypatch, has_disk, lost, at_once
):
    monkeypatch.setattr("tiered_kv.tiering.secondary_tier.WRITTEN_AGAIN_AT_ONCE", at_once)
    world, session = node([open_disk(tmp_path / "a"), bucket] if has_disk else [bucket], host_bytes=64 * BLOB_BYTES)
    world.store(session, LONG[:6])
    delete(bucket, *lost)
    pass_minutes(world)
    world.store(session, LONG)
    assert sorted(name.chunk_index for name in bucket.names) == list(range(8))
    assert world.tiering.pending_writes == 0
    world.check_idle()
    other, session_of_other = node([open_disk(tmp_path / "b"), bucket], host_bytes=64 * BLOB_BYTES)
    assert other.loaded(session_of_other, LONG) == 8
    other.abandon()
    world.abandon()


def test_a_prefix_that_was_deleted_on_an_s3_server_is_put_there_again_and_found_by_another_machine(tmp_path, s3):
    store = ObjectStore(parse_location(s3.uri(s3.new_prefix()), s3.options()))
    world, session = node([open_disk(tmp_path / "a"), ObjectTier(store)], host_bytes=64 * BLOB_BYTES)

    def blobs():
        return [one.path for one in store.list("") if parse_object_path(one.path)]

    world.store(session, LONG[:6])
    assert len(blobs()) == 6
    store.delete(blobs())
    world.store(session, LONG[:7])
    assert len(blobs()) == 1, "within minutes what was put is believed to be there"
    pass_minutes(world)
    world.store(session, LONG)
    assert len(blobs()) == 8
    other, session_of_other = node([open_disk(tmp_path / "b"), ObjectTier(store)], host_bytes=64 * BLOB_BYTES)
    assert other.loaded(session_of_other, LONG) == 8
    other.abandon()
    world.abandon()
    store.close()


def test_what_came_from_a_bucket_is_put_there_again_by_a_machine_that_kept_it(tmp_path, bucket):
    world, session = node([open_disk(tmp_path / "a"), bucket])
    world.store(session, LONG[:6])
    world.abandon()
    again, session = node([open_disk(tmp_path / "b"), bucket])
    assert again.loaded(session, LONG[:6]) == 6
    delete(bucket)
    pass_minutes(again)
    again.store(session, LONG)
    assert sorted(name.chunk_index for name in bucket.names) == list(range(8))
    again.check_idle()
    again.abandon()


@pytest.mark.parametrize("lost", [(1, 100), (1, 1), (6, 6)])
def test_what_goes_on_from_a_lost_chunk_that_nobody_has_is_not_put_until_it_is_stored_again(bucket, lost):
    world, session = node([bucket], host_bytes=32 * BLOB_BYTES)
    world.store(session, LONG[:6])
    for number in range(80):
        world.store(session, (1000 + number,))
    delete(bucket, *lost)
    pass_minutes(world)
    world.commit(session, LONG[:7])
    world.settle()
    assert 6 not in [name.chunk_index for name in bucket.names]
    assert world.tiering.counters["write_dropped_no_parent"] == 1 and world.tiering.pending_writes == 0
    world.check_idle()
    assert world.loaded(session, LONG) == (lost[0] - 1 if lost != (6, 6) else 5)
    world.store(session, LONG)
    assert world.loaded(session, LONG) == 8  # a use gives writes that were dropped another chance
    assert {name.chunk_index for name in bucket.names} >= set(range(8))
    world.check_idle()
    world.close()


class Full(FaultyTier):
    """A bucket whose limit pushes out whatever is put, from some moment on."""

    def __init__(self, inner):
        super().__init__(inner, lambda _number: None)
        self.keeps, self.puts = True, 0

    def put(self, name, blob):
        super().put(name, blob)
        self.puts += 1
        if not self.keeps and self.puts < 500:  # else the test would not end
            delete(self.inner)


def test_a_prefix_that_does_not_stay_is_not_put_again_for_ever(tmp_path, bucket, monkeypatch):
    """And puts that take minutes, so that nothing is believed that long."""
    monkeypatch.setattr(SecondaryTier, "_is_confirmed", lambda _self, _entry: False)
    full = Full(bucket)
    world, session = node([open_disk(tmp_path / "a"), full], host_bytes=64 * BLOB_BYTES)
    world.store(session, LONG[:6])
    full.keeps = False
    delete(bucket)
    world.store(session, LONG)
    assert full.puts < 100 and world.tiering.pending_writes == 0
    world.check_idle()
    world.abandon()


class Asked(FaultyTier):
    """Counts what a bucket is asked for."""

    def __init__(self, inner):
        super().__init__(inner, lambda _number: None)
        self.asked = 0

    def contains(self, name):
        self.asked += 1
        return super().contains(name)


def test_a_bucket_is_asked_twice_for_a_prompt_that_goes_on_after_minutes_and_not_at_all_within_them(tmp_path, bucket):
    asked = Asked(bucket)
    world, session = node([open_disk(tmp_path), asked], host_bytes=64 * BLOB_BYTES)
    world.store(session, LONG[:3])
    for turn in range(4, 7):
        world.store(session, LONG[:turn])
    assert asked.asked == 0
    pass_minutes(world)
    assert asked.asked == 0, "an idle bucket was asked"
    world.store(session, LONG)
    assert asked.asked == 2, "the prefix's first chunk and its last one"
    world.store(session, (1, 2, 99))
    assert asked.asked == 3, "its first chunk is known to be there"
    world.store(session, (7, 8, 9))
    assert asked.asked == 3, "a new prompt has nothing before it"
    world.check_idle()
    world.abandon()


def test_what_a_search_found_is_not_asked_for_again(tmp_path, bucket):
    """A peer may have it alone, and puts it there soon: two machines would put it at once."""
    first, session = node([open_disk(tmp_path / "a"), bucket])
    first.store(session, LONG[:4])
    first.abandon()
    asked = Asked(bucket)
    world, session = node([open_disk(tmp_path / "b"), asked])
    assert world.loaded(session, LONG[:4]) == 4
    before = asked.asked
    world.store(session, LONG[:5])
    assert asked.asked == before and len(bucket.names) == 5
    world.check_idle()
    world.abandon()


def test_a_prefix_is_not_asked_for_in_vain_where_the_bucket_does_not_answer(tmp_path, bucket):
    faults = []
    world, session = node([open_disk(tmp_path), FaultyTier(bucket, lambda _number: faults.pop() if faults else None)])
    world.store(session, PREFIX[:3])
    delete(bucket)
    pass_minutes(world)
    faults += [Fault.ERROR] * 3
    world.store(session, PREFIX)
    assert not faults or world.tiering.pending_writes
    for _ in range(5):
        world.clock.advance(2)
        world.settle()
    assert sorted(name.chunk_index for name in bucket.names) == list(range(5))
    world.check_idle()
    world.abandon()


class SharedHistories(RuleBasedStateMachine):
    """Two machines, each with host memory and a tier of its own, on one bucket that fails and that others clean up."""

    @initialize(host_blobs=st.sampled_from([6, 16]), local_blobs=st.sampled_from([3, 12]))
    def start(self, host_blobs, local_blobs):
        self.bucket = MemoryTier(name="object", is_shared=True)
        self.faults = []
        self.host_bytes = host_blobs * BLOB_BYTES
        self.locals = [MemoryTier(local_blobs * BLOB_BYTES) for _ in range(2)]
        self.nodes = [self.boot(number) for number in range(2)]

    def boot(self, number):
        faulty = FaultyTier(self.bucket, lambda _number: self.faults.pop() if self.faults else None)
        return node([self.locals[number], faulty], host_bytes=self.host_bytes)

    @rule(pick=PICK, path=PATHS)
    def store(self, pick, path):
        world, session = self.nodes[pick % 2]
        world.store(session, path)

    @rule(pick=PICK, path=PATHS)
    def commit(self, pick, path):
        world, session = self.nodes[pick % 2]
        for depth in range(1, len(path) + 1):
            world.commit(session, path[:depth])
        world.step()

    @rule(pick=PICK, path=PATHS)
    def lookup(self, pick, path):
        world, session = self.nodes[pick % 2]
        world.lookup(session, path)
        world.step()

    @rule(pick=PICK)
    def release_all(self, pick):
        world, _ = self.nodes[pick % 2]
        for lookup in sorted(world.lookups):
            world.release(lookup)
        world.step()

    @rule(pick=PICK, picks=st.lists(PICK, min_size=1, max_size=6))
    def run(self, pick, picks):
        world, _ = self.nodes[pick % 2]
        for one in picks:
            world.run_one(lambda count, one=one: one % count)

    @rule(pick=PICK, seconds=st.sampled_from([1.0, 6.0, 40.0, 700.0]))
    def pass_time(self, pick, seconds):
        world, _ = self.nodes[pick % 2]
        world.clock.advance(seconds)
        world.step()

    @rule(fault=st.sampled_from([*Fault, None]))
    def plan_a_fault(self, fault):
        self.faults.insert(0, fault)

    @precondition(lambda self: self.bucket.names)
    @rule(pick=PICK)
    def others_evict(self, pick):
        names = self.bucket.names
        self.bucket.delete(names[pick % len(names)])

    @rule()
    def an_operator_empties_the_bucket(self):
        for name in self.bucket.names:
            self.bucket.delete(name)

    @precondition(lambda self: self.bucket.names)
    @rule(pick=PICK)
    def flip(self, pick):
        names = self.bucket.names
        data = bytearray(self.bucket.raw_get(names[pick % len(names)]))
        data[pick % len(data)] ^= 1
        self.bucket.raw_put(names[pick % len(names)], bytes(data))

    @rule(pick=PICK)
    def restart(self, pick):
        number = pick % 2
        self.nodes[number][0].abandon()
        self.nodes[number] = self.boot(number)

    def teardown(self):
        if not hasattr(self, "nodes"):
            return
        self.faults.clear()
        for world, _session in self.nodes:
            for lookup in sorted(world.lookups):
                world.release(lookup)
            for _ in range(3):
                world.settle()
                world.clock.advance(40)
            world.settle()
            world.check_idle()
            world.abandon()


SharedHistories.TestCase.settings = settings(max_examples=count("EXAMPLES", 30) // 2, stateful_step_count=40)
TestSharedHistories = SharedHistories.TestCase
