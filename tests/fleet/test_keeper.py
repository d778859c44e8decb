"""Keepers over the real client: in memory, in a shared directory, on a real S3 server; a clock that tests own."""

import logging
from contextlib import suppress

import pytest

from tests.sim.bucket.keepers import (
    CHAIN,
    OTHER,
    PACE,
    SIZE,
    SLACK,
    blobs,
    indexes_of,
    keeper_of,
    put,
    put_patiently,
    turn,
)
from tiered_kv.errors import CapacityExceeded, Closed, ConfigError, TierUnavailable
from tiered_kv.fleet import keeper as keeper_module
from tiered_kv.fleet.layout import PINS, BucketUsage, MemberReport, Term, decode, encode, lease_path, pin_path
from tiered_kv.fleet.recency import LOG_MAGIC
from tiered_kv.fleet.timing import Timing
from tiered_kv.keys.naming import object_path, parse_object_path
from tiered_kv.testing.blobs import SampleChain


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# -- on every store ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rests", [False, True])
def test_a_bucket_that_is_emptied_has_one_leader_again_that_counts_what_is_there(memory, clock, rests):
    """The leader went on with a term whose object was gone, and another server began with the same one."""
    first, second = keeper_of(memory, clock), keeper_of(memory, clock)
    turn(clock, first, times=3)
    for index in range(3):
        put_patiently(memory, clock, [first], CHAIN, index)
    turn(clock, first, *([] if rests else [second]), times=5)
    if rests:
        turn(clock, first, times=int(PACE.rest_after_s + PACE.expiry_s) + 5)
        assert first.figures()["is_resting"]
    memory.delete([info.path for info in memory.list("")])
    turn(clock, second, first, times=3)
    put_patiently(memory, clock, [second, first], OTHER, 0)
    turn(clock, second, first, times=int(2 * PACE.expiry_s + PACE.pass_s) + 5)
    (leader,) = [keeper for keeper in (first, second) if keeper.figures()["role"] == "leader"]
    assert leader.usage().blob_count == 1
    first.close()
    second.close()


def test_who_begins_an_emptied_bucket_with_the_leaders_term_is_no_second_leader(memory, clock):
    """The leader lists before it writes, and the highest term there is its own; only the object says whose it is."""
    first = keeper_of(memory, clock)
    turn(clock, first, times=3)
    memory.delete([info.path for info in memory.list("")])
    fresh = keeper_of(memory, clock)
    turn(clock, fresh)
    assert [keeper.figures()["role"] for keeper in (first, fresh)] == ["leader", "leader"], "this test shows nothing"
    turn(clock, first, fresh, times=int(PACE.expiry_s) + 5)
    assert sorted(keeper.figures()["role"] for keeper in (first, fresh)) == ["follower", "leader"]
    first.close()
    fresh.close()


def test_a_single_writer_whose_bucket_is_emptied_is_told_of_no_other_server(memory, clock, caplog):
    keeper = keeper_of(memory, clock, is_single_writer=True)
    turn(clock, keeper, times=3)
    memory.delete([info.path for info in memory.list("")])
    with caplog.at_level(logging.INFO):
        turn(clock, keeper, times=3)
    assert "the lease is gone from the bucket" in caplog.text
    assert "another server" not in caplog.text
    assert keeper.figures()["role"] == "leader"
    keeper.close()


def test_a_lone_server_may_put_after_its_first_turn(store, clock):
    keeper = keeper_of(store, clock)
    with pytest.raises(CapacityExceeded, match="no leader"):
        keeper.reserve(SIZE)
    keeper.turn()
    put(store, keeper, CHAIN, 0)
    assert keeper.figures()["role"] == "leader" and keeper.usage().used_bytes >= SIZE


def test_the_limit_holds_and_suffixes_go_first(store, clock):
    keeper = keeper_of(store, clock, blobs=10)
    for _ in range(20):
        there = set(blobs(store))
        index = next(i for i in range(25) if object_path(CHAIN.name(i)) not in there)  # a child follows its parent
        put_patiently(store, clock, [keeper], CHAIN, index)
        assert sum(blobs(store).values()) <= 10 * SIZE + SLACK
    left = sorted(parse_object_path(path).chunk_index for path in blobs(store))
    assert keeper.figures()["evicted_blobs"] + keeper.figures()["holes_collected"] >= 20 - 10
    assert left[:5] == list(range(5)), "the start of the prefix is the last to go"


def test_a_second_server_follows_and_takes_over_at_once_when_the_first_is_closed(store, clock):
    first, second = keeper_of(store, clock, blobs=100), keeper_of(store, clock, blobs=100)
    turn(clock, first, second, times=4)
    assert [k.figures()["role"] for k in (first, second)] == ["leader", "follower"]
    put(store, second, CHAIN, 0)
    put(store, first, CHAIN, 1)
    first.close()
    turn(clock, second, times=3)
    assert second.figures()["role"] == "leader" and second.figures()["term"] == 2
    put(store, second, CHAIN, 2)
    second.close()
    assert [info.path for info in store.list("_tiered_kv/servers/")] == []


def test_a_server_that_is_gone_is_replaced_after_its_expiry_and_not_before(store, clock):
    first, second = keeper_of(store, clock, blobs=100), keeper_of(store, clock, blobs=100)
    turn(clock, first, second, times=4)
    turn(clock, second, times=int(PACE.expiry_s) - 1)
    assert second.figures()["role"] == "follower"
    with pytest.raises(CapacityExceeded):
        second.reserve(SIZE)
    turn(clock, second, times=6)
    assert second.figures()["role"] == "leader"
    put(store, second, CHAIN, 0)
    with pytest.raises(CapacityExceeded, match="not confirmed"):
        first.reserve(SIZE)
    turn(clock, first, second, times=4)
    assert first.figures()["role"] == "follower"
    put(store, first, CHAIN, 1)


def test_blobs_of_other_namespaces_and_foreign_objects_stay(store, clock, caplog, request):
    turns = 10 if request.node.callspec.params["store"] == "s3" else 40  # there each takes an eighth of a second
    store.put("README", b"x" * SIZE)
    for index in range(1, 10):
        store.put(object_path(OTHER.name(index)), OTHER.blob(index).view())
    before = set(blobs(store))
    keeper = keeper_of(store, clock, blobs=10)
    turn(clock, keeper, times=2 * turns)
    for index in range(6):
        with pytest.raises(CapacityExceeded):
            put(store, keeper, CHAIN, index)
        turn(clock, keeper, times=turns)
    assert before <= set(blobs(store)) and store.get("README") is not None
    assert sum(blobs(store).values()) + SIZE <= 10 * SIZE + SLACK
    assert len([text for text in warnings(caplog) if "evict_other_namespaces" in text]) == 1


def test_all_namespaces_go_when_told_so(store, clock):
    for index in range(9):
        store.put(object_path(OTHER.name(index)), OTHER.blob(index).view())
    keeper = keeper_of(store, clock, blobs=5, evicts_other_namespaces=True)
    turn(clock, keeper, times=3)
    put_patiently(store, clock, [keeper], CHAIN, 0)
    assert sum(blobs(store).values()) <= 5 * SIZE + SLACK


def test_holes_are_collected_after_their_grace(store, clock):
    for index in (0, 1, 3, 4):
        store.put(object_path(CHAIN.name(index)), CHAIN.blob(index).view())
    patient = keeper_of(store, clock, blobs=100, timing=Timing(slice_s=1e9))
    patient.turn()
    assert len(blobs(store)) == 4
    patient.close()
    keeper = keeper_of(store, clock, blobs=100, timing=Timing(hole_grace_s=-10.0, slice_s=1e9))
    keeper.turn()
    assert sorted(parse_object_path(path).chunk_index for path in blobs(store)) == [0, 1]
    assert keeper.figures()["holes_collected"] == 2


def test_blobs_expire_by_the_stores_clock(store, clock):
    for index in range(4):
        store.put(object_path(CHAIN.name(index)), CHAIN.blob(index).view())
        store.put(object_path(OTHER.name(index)), OTHER.blob(index).view())
    keeper = keeper_of(store, clock, blobs=None, storage_ttl_s=3600.0)
    keeper.turn()
    assert len(blobs(store)) == 8
    put(store, keeper, CHAIN, 4)  # no limit on bytes: nothing to ask for
    keeper.close()
    keeper = keeper_of(store, clock, blobs=None, storage_ttl_s=-10.0)
    keeper.turn()
    assert {parse_object_path(path).namespace for path in blobs(store)} == {OTHER.namespace}
    assert keeper.figures()["expired_blobs"] == 5


def test_a_pinned_prefix_outlives_limit_age_and_holes(store, clock, caplog):
    for index in (0, 1, 2, 3, 4, 6, 7, 8):  # with a hole before 6
        store.put(object_path(CHAIN.name(index)), CHAIN.blob(index).view())
    for index in (2, 7):
        store.put(pin_path(CHAIN.name(index), 0), b"")
    store.put(pin_path(CHAIN.name(4), 1_600_000_000), b"")  # has ended
    pace = Timing(hole_grace_s=-10.0, epoch_s=1.0, slice_s=1e9)
    keeper = keeper_of(store, clock, blobs=3, timing=pace, storage_ttl_s=-10.0)
    turn(clock, keeper, times=3)
    assert indexes_of(store) == [0, 1, 2, 6, 7]
    assert [info.path for info in store.list(PINS)] == sorted(pin_path(CHAIN.name(index), 0) for index in (2, 7))
    assert len([text for text in warnings(caplog) if "unpin" in text and "pinned_blobs=5" in text]) == 1
    keeper.close()
    store.delete([info.path for info in store.list(PINS)])
    keeper = keeper_of(store, clock, blobs=3, timing=pace, storage_ttl_s=-10.0)
    turn(clock, keeper, times=3)
    assert indexes_of(store) == []


def test_a_full_bucket_evicts_around_a_pin(store, clock):
    keeper = keeper_of(store, clock, blobs=8)
    for index in range(4):
        put_patiently(store, clock, [keeper], CHAIN, index)
    store.put(pin_path(CHAIN.name(2), 4_000_000_000), b"")
    newer = SampleChain(11, payload_bytes=4096, namespace=CHAIN.namespace)
    for index in range(12):
        with suppress(CapacityExceeded):
            put(store, keeper, newer, index)
        turn(clock, keeper, times=12)
    assert {0, 1, 2} <= {i for i in range(4) if object_path(CHAIN.name(i)) in blobs(store)}
    assert keeper.figures()["evicted_blobs"] + keeper.figures()["holes_collected"] > 0
    assert sum(blobs(store).values()) <= 8 * SIZE + SLACK


def test_usage_is_known_after_a_restart_and_to_followers(store, clock):
    first = keeper_of(store, clock, blobs=100)
    first.turn()
    for index in range(5):
        put(store, first, CHAIN, index)
    turn(clock, first, times=20)
    follower = keeper_of(store, clock, blobs=100)
    turn(clock, first, follower, times=20)
    assert follower.usage().used_bytes == first.usage().used_bytes >= 5 * SIZE
    assert follower.usage().blob_count == first.usage().blob_count == 5
    put(store, follower, CHAIN, 5)
    assert follower.usage().blob_count == 6
    for keeper in (first, follower):
        keeper.close()
    restarted = keeper_of(store, clock, blobs=100)
    restarted.turn()
    assert restarted.usage().blob_count == 6


# -- what needs one store only ----------------------------------------------------------------------------------------


def test_servers_store_on_within_a_minute_after_a_bucket_was_emptied(memory, clock):
    """By an operator, with all that the keepers have there; however much was stored in these sessions before."""
    first, second = keeper_of(memory, clock, blobs=16), keeper_of(memory, clock, blobs=16)
    turn(clock, first, second, times=4)
    chains = [SampleChain(number, payload_bytes=4096, namespace=CHAIN.namespace) for number in range(20, 36)]
    for chain in chains:
        for index in range(8):
            put_patiently(memory, clock, [second, first], chain, index)
    memory.delete([info.path for info in memory.list("")])
    turn(clock, first, second)
    put_patiently(memory, clock, [first, second], CHAIN, 0)
    put_patiently(memory, clock, [second, first], CHAIN, 1)
    assert len(blobs(memory)) == 2


def test_a_namespace_that_is_used_stays_served_whatever_resets_make_beside_it(memory, clock, monkeypatch):
    """Else its blobs count as nobody's, none of them is ever evicted, and a full bucket takes nothing any more."""
    monkeypatch.setattr(keeper_module, "NAMESPACES_MAX", 3)
    keeper = keeper_of(memory, clock, blobs=5)
    for index in range(5):
        put_patiently(memory, clock, [keeper], CHAIN, index)
    for number in range(5):
        keeper.serve(bytes([number]) * 16)
        keeper.record_use([CHAIN.name(0)])
    put_patiently(memory, clock, [keeper], SampleChain(11, payload_bytes=4096, namespace=CHAIN.namespace), 0)
    assert keeper.figures()["evicted_blobs"] > 0


def test_a_server_without_limits_follows_a_live_leader_and_ignores_a_dead_one(memory, clock, caplog):
    leader, watcher = keeper_of(memory, clock, blobs=50), keeper_of(memory, clock, blobs=None)
    watcher.turn()
    watcher.reserve(200 * SIZE)
    watcher.finished(200 * SIZE, False)
    leader.turn()
    turn(clock, leader, watcher, times=int(PACE.watch_s) + 5)
    with pytest.raises(CapacityExceeded):
        watcher.reserve(200 * SIZE)
    put(memory, watcher, CHAIN, 0)
    assert len([text for text in warnings(caplog) if "keeps within its grants" in text]) == 1
    turn(clock, watcher, times=3 * int(PACE.expiry_s))
    watcher.reserve(200 * SIZE)
    assert watcher.figures()["role"] == "alone"


def test_a_store_without_atomic_create_needs_a_single_writer(memory, clock):
    class Replacing:
        """A store whose create replaces: everything else is the real one."""

        def __getattr__(self, name):
            return getattr(memory, name)

        def create(self, path, data):
            memory.put(path, data)
            return True

        def creates_atomically(self):
            return False

    with pytest.raises(ConfigError, match="single_writer"):
        keeper_of(Replacing(), clock)
    first = keeper_of(Replacing(), clock, is_single_writer=True)
    first.turn()
    put(memory, first, CHAIN, 0)
    restarted = keeper_of(Replacing(), clock, is_single_writer=True)  # the first was killed: nobody is waited for
    restarted.turn()
    put(memory, restarted, CHAIN, 1)
    first.turn()
    assert restarted.figures()["role"] == "leader" and first.figures()["role"] != "leader"


def test_a_failing_store_is_logged_once_and_the_next_turn_goes_on(memory, clock, caplog):
    class Failing:
        is_failing = False

        def __getattr__(self, name):
            if self.is_failing:
                raise TierUnavailable("object store: it is on fire")
            return getattr(memory, name)

    store = Failing()
    keeper = keeper_of(store, clock)
    store.is_failing = True
    turn(clock, keeper, times=10)
    assert len([text for text in warnings(caplog) if "on fire" in text]) == 1
    store.is_failing = False
    turn(clock, keeper)
    put(memory, keeper, CHAIN, 0)


LARGE = b"[" + b"0," * (3 << 20) + b"0]"
"""More than any small object of ours."""


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff" * 50, b'{"holder":1}', b"null", LARGE])
def test_what_is_not_ours_below_our_names_counts_as_absent_and_stays(memory, clock, caplog, content):
    """By its name each of these would be overwritten, merged or cleaned up: by its content it is somebody else's."""
    ended = pin_path(CHAIN.name(5), 1)
    paths = {lease_path(7), "_tiered_kv/servers/other-1.1", "_tiered_kv/usage", "_tiered_kv/recency/x/1"}
    paths |= {"_tiered_kv/notes.txt", "_tiered_kv/tmp/draft", *([ended] if content else [])}
    for path in paths:
        memory.put(path, content)
    keeper = keeper_of(memory, clock, blobs=10_000)
    turn(clock, keeper, times=60)
    put(memory, keeper, CHAIN, 0)
    keeper.record_use([CHAIN.name(0)])
    turn(clock, keeper, times=600)
    assert keeper.figures()["term"] == 8 and keeper.figures()["passes"] > 1
    assert keeper.figures()["malformed"] > 0
    keeper.close()
    assert {path: memory.get(path) for path in paths} == dict.fromkeys(paths, content)
    said = [text for text in warnings(caplog) if text.startswith("left alone: ")]
    assert len(said) == 3, "a lease, the figures, and the logs of use: once each"


def test_what_is_ours_and_over_is_cleaned_up_beside_what_is_not(memory, clock):
    """The pair of the test above: of objects of the same names, with content of ours, nothing is left."""
    ended = pin_path(CHAIN.name(5), 1)
    old = {
        lease_path(7): encode(Term("other-1", 3, is_closed=True)),
        "_tiered_kv/servers/other-1.1": encode(MemberReport(1, 7)),
        "_tiered_kv/recency/x/1": LOG_MAGIC + CHAIN.key(0),
        ended: b"",
    }
    for path, data in old.items():
        memory.put(path, data)
    memory.put("_tiered_kv/usage", encode(BucketUsage(1, 1, 7)))
    keeper = keeper_of(memory, clock, blobs=10_000)
    turn(clock, keeper, times=60)
    put(memory, keeper, CHAIN, 0)
    turn(clock, keeper, times=600)
    keeper.close()
    assert [path for path in old if memory.get(path) is not None] == []
    assert decode(memory.get("_tiered_kv/usage"), BucketUsage).term == 8


def test_unknown_fields_are_ignored():
    assert decode(b'{"seq":1,"term":2,"later":[1]}', MemberReport) == MemberReport(1, 2)
    assert decode(b'{"holder":"a","counter":3,"grants":{"s.1":[1,2,3]}}', Term).grants["s.1"].granted_bytes == 2


def test_a_server_that_nobody_limits_leaves_no_log_of_uses_when_it_ends(memory, clock):
    """Only a leader merges and removes such logs: they would be one more with each stop of a server, for good."""
    for _ in range(2):
        keeper = keeper_of(memory, clock, blobs=None)
        turn(clock, keeper, times=2)
        keeper.record_use([CHAIN.name(0)])
        keeper.close()
    assert list(memory.list("_tiered_kv/")) == []


def test_a_server_that_follows_writes_what_was_used_when_it_ends(memory, clock):
    leader, follower = keeper_of(memory, clock, blobs=50), keeper_of(memory, clock, blobs=None)
    leader.turn()
    turn(clock, leader, follower, times=4)
    assert follower.figures()["role"] == "follower"
    follower.record_use([CHAIN.name(0)])
    follower.close()
    assert len(list(memory.list("_tiered_kv/recency/"))) == 1


def test_a_closed_keeper_turns_no_more(memory, clock):
    keeper = keeper_of(memory, clock)
    keeper.turn()
    keeper.close()
    keeper.close()
    with pytest.raises(Closed):
        keeper.turn()
    with pytest.raises(CapacityExceeded):
        keeper.reserve(1)


@pytest.mark.parametrize("wrong", [{"expiry_s": 14.0}, {"low_water": 1.0}, {"delete_batch": 0}])
def test_intervals_that_cannot_work_are_refused(wrong):
    with pytest.raises(ConfigError):
        Timing(**wrong)
    assert Timing.for_timeout(60.0).grant_use_s > 2 * PACE.heartbeat_s
