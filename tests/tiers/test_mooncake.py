"""The tier of a Mooncake pool, on a real master and real members: the contract, what they answer, what they suffer."""

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import uuid
from itertools import pairwise

import pytest

from tests.kit.fake_clock import FakeClock
from tests.kit.ports import free_port
from tests.kit.server.probe import wait_for
from tests.kit.storage.wrapped_tiers import WRAPPINGS
from tiered_kv.errors import CapacityExceeded, ChunkCorrupt, ChunkMismatch, ConfigError, TierUnavailable
from tiered_kv.location import parse_location
from tiered_kv.testing.blobs import SampleChain
from tiered_kv.testing.contract import TierContract
from tiered_kv.tiers.mooncake.client import MooncakeClient
from tiered_kv.tiers.mooncake.tier import NAMES_MAX, MooncakeTier
from tiered_kv.tiers.wrappers.verified import VerifiedTier

CHAIN = SampleChain()
TIMEOUT_S = 30.0


def tier_of(uri, timeout_s=TIMEOUT_S, concurrency=8, **options):
    location = parse_location(uri, options)
    client = MooncakeClient(location, timeout_s=timeout_s, concurrency=concurrency)
    return MooncakeTier(client, location.path.partition("/")[2])


@pytest.fixture
def opened():
    """Opens tiers, which are closed at the end of the test."""
    with contextlib.ExitStack() as at_end:

        def open_tier(uri, **more):
            return at_end.enter_context(contextlib.closing(tier_of(uri, **more)))

        yield open_tier


def read(tier, blob):
    buffer = bytearray(len(blob.data))
    return bytes(buffer) if tier.get_into(blob.name, memoryview(buffer)) else None


def client_pid(tier):
    return tier._client._process._process.pid


class TestContract(TierContract):
    """The shipped contract under all wrappers, less what a pool cannot do: be listed, be counted, hold nothing."""

    @pytest.fixture(autouse=True)
    def served(self, mooncake_member):
        self.pool, self.member = mooncake_member
        self.name = uuid.uuid4().hex

    def make_tier(self, tmp_path):
        self.tier = tier_of(self.pool.uri(self.name))
        return WRAPPINGS["all"](self.tier)

    def raw_put(self, tmp_path, name, data):
        self.member.put(self.tier.key(name), data)

    def raw_get(self, tmp_path, name):
        return self.member.get(self.tier.key(name))

    @pytest.mark.parametrize("size", ["cut", "longer"])  # Mooncake stores no empty object
    def test_get_of_a_blob_of_the_wrong_size_says_corrupt(self, tmp_path, size):
        super().test_get_of_a_blob_of_the_wrong_size_says_corrupt(tmp_path, size)

    test_puts_beyond_the_capacity_are_refused_and_store_nothing = None

    def test_scan_yields_every_blob_with_its_ancestry(self, tmp_path):
        """A pool is not listed, and says so."""
        with self.opened(tmp_path) as tier:
            self.fill(tier, 1)
            with pytest.raises(TierUnavailable, match="cannot be listed"):
                tier.scan()

    def test_usage_is_the_sum_of_the_scanned_sizes(self, tmp_path):
        """What is there only the master knows."""
        with self.opened(tmp_path) as tier:
            self.fill(tier, 2)
            assert (tier.usage().used_bytes, tier.usage().capacity_bytes) == (0, None)

    def test_threads_on_one_name_see_one_whole_blob(self, tmp_path):
        versions = [self.chain.blob(0, version=version) for version in range(4)]

        def work(tier, blob, seen):
            for turn in range(12):
                tier.put(blob.name, blob.view())
                seen.add(self.read(tier, blob.name))
                if turn % 4 == 3:
                    tier.delete(blob.name)

        with self.opened(tmp_path) as tier:
            assert self._in_threads(tier, versions, work) <= {None} | {blob.data for blob in versions}

    def test_threads_on_different_names_do_not_disturb_each_other(self, tmp_path):
        blobs = [self.chain.blob(index) for index in range(32)]

        def work(tier, first, seen):
            for blob in blobs[first.record.chunk_index :: 4]:
                tier.put(blob.name, blob.view())
                seen.add(self.read(tier, blob.name))

        with self.opened(tmp_path) as tier:
            assert self._in_threads(tier, blobs[:4], work) == {blob.data for blob in blobs}
            assert tier.count_held([blob.name for blob in blobs]) == 32


# -- what lies there -------------------------------------------------------------------------------------------------


@pytest.fixture
def shared(mooncake_member, opened):
    """A tier in the session's pool under a name of its own, verified; its bare form; and the pool's member."""
    pool, member = mooncake_member
    bare = opened(pool.uri(uuid.uuid4().hex))
    return VerifiedTier(bare, {CHAIN.namespace: CHAIN.form}.get), bare, member


def test_another_client_s_wrong_bytes_under_our_key_are_never_served(shared):
    tier, bare, member = shared
    blob = CHAIN.blob(0)
    key = bare.key(blob.name)
    wrong = [
        bytearray(len(blob.data)),
        bytearray(os.urandom(len(blob.data))),
        bytearray(CHAIN.blob(1).data),
        bytearray(blob.data),
    ]
    wrong[-1][-1] ^= 1
    for data in wrong:
        member.put(key, bytes(data))
        with pytest.raises(ChunkCorrupt):
            read(tier, blob)
    assert tier.delete(blob.name)
    tier.put(blob.name, blob.view())
    assert read(tier, blob) == blob.data == member.get(key)


@pytest.mark.parametrize("payload_bytes", [4096, 8192, 16384], ids=["smaller", "equal", "larger"])
def test_a_sound_blob_of_another_namespace_is_told_from_a_damaged_one(shared, payload_bytes):
    tier, bare, member = shared
    blob, foreign = CHAIN.blob(0), SampleChain(1, payload_bytes).blob(0)
    member.put(bare.key(blob.name), foreign.data)
    larger = len(foreign.data) > len(blob.data)  # Mooncake gives nothing of an object that does not fit
    with pytest.raises(ChunkCorrupt if larger else ChunkMismatch):
        read(tier, blob)


def test_an_object_that_is_being_put_is_not_there_yet(shared):
    tier, bare, member = shared
    blob = CHAIN.blob(0)
    member.begin(bare.key(blob.name), blob.data)
    assert not tier.contains(blob.name)
    assert read(tier, blob) is None


def test_a_question_names_as_many_blobs_as_the_traits_say(shared):
    tier, _, _ = shared
    assert tier.traits.names_at_once == NAMES_MAX
    names = [CHAIN.name(index) for index in range(NAMES_MAX)]
    assert tier.count_held(names) == 0
    for index in (0, 1, 2, 4):
        tier.put(CHAIN.blob(index).name, CHAIN.blob(index).view())
    assert tier.count_held(names) == 3


def test_two_names_in_one_pool_share_nothing(mooncake_member, opened):
    pool, _ = mooncake_member
    one, other = (opened(pool.uri(f"{uuid.uuid4().hex}/v1")) for _ in range(2))
    blob = CHAIN.blob(0)
    one.put(blob.name, blob.view())
    assert read(one, blob) == blob.data and read(other, blob) is None


# -- room ------------------------------------------------------------------------------------------------------------

LARGE = SampleChain(2, payload_bytes=4 << 20)


def test_a_pool_without_memory_has_no_room(mooncake, opened):
    tier = opened(mooncake.uri())
    blob = CHAIN.blob(0)
    with pytest.raises(CapacityExceeded, match="no room"):
        tier.put(blob.name, blob.view())
    assert read(tier, blob) is None


def test_a_blob_larger_than_the_pool_is_refused_and_the_next_one_taken(mooncake, opened):
    mooncake.member(16 << 20)
    tier = opened(mooncake.uri())
    large, blob = SampleChain(3, payload_bytes=32 << 20).blob(0), CHAIN.blob(0)
    with pytest.raises(CapacityExceeded, match="no machine gives it memory"):
        tier.put(large.name, large.view())
    with mooncake.master.frozen(), pytest.raises(CapacityExceeded, match="a moment ago"):
        tier.put(large.name, large.view())  # nobody is asked: each question makes the master evict
    assert read(tier, large) is None

    def is_taken():
        tier.put(blob.name, blob.view())
        return read(tier, blob) == blob.data

    wait_for(is_taken, "a pool in which the master does not make room for the large one any more", deadline_s=30.0)


def test_what_never_fits_is_asked_for_ever_more_rarely(mooncake):
    clock = FakeClock()
    location = parse_location(mooncake.uri())
    client = MooncakeClient(location, timeout_s=TIMEOUT_S)
    blob = CHAIN.blob(0)
    with contextlib.closing(MooncakeTier(client, "x", clock.monotonic)) as tier:
        asked = []
        for _ in range(800):
            with pytest.raises(CapacityExceeded) as caught:
                tier.put(blob.name, blob.view())
            if "a moment ago" not in str(caught.value):
                asked.append(clock.monotonic())
            clock.advance(0.25)
        assert [later - earlier for earlier, later in pairwise(asked)] == [0.5, 1, 2, 4, 8, 16, 32, 60, 60]
        mooncake.member()
        clock.advance(60)
        for index in range(3):
            tier.put(CHAIN.blob(index).name, CHAIN.blob(index).view())
        assert read(tier, blob) == blob.data


def test_what_the_master_evicts_is_a_miss_and_the_rest_is_right(mooncake, opened):
    mooncake.member(64 << 20)
    tier = opened(mooncake.uri())
    blobs = [LARGE.blob(index) for index in range(24)]  # 96 MiB

    def is_taken(blob):
        with contextlib.suppress(CapacityExceeded):  # the master makes room a moment later
            tier.put(blob.name, blob.view())
            return True
        return False

    for blob in blobs:
        wait_for(lambda blob=blob: is_taken(blob), "room in the pool", deadline_s=60.0)
    found = [read(tier, blob) for blob in blobs]
    assert 0 < found.count(None) < len(blobs)
    assert all(data in (None, blob.data) for data, blob in zip(found, blobs, strict=True))


def test_memory_that_a_server_gives_serves_others_until_it_ends(mooncake, opened):
    giver = opened(mooncake.uri(), global_segment_size=32 << 20)
    blob = CHAIN.blob(0)
    giver.put(blob.name, blob.view())
    reader = opened(mooncake.uri())
    assert read(reader, blob) == blob.data
    giver.close()
    assert read(reader, blob) is None


# -- what fails ------------------------------------------------------------------------------------------------------


def test_a_killed_master_costs_misses_and_its_successor_is_used(mooncake, opened):
    mooncake.member()
    tier = opened(mooncake.uri(), timeout_s=2.0)
    blob = CHAIN.blob(0)
    _store(tier, blob)
    mooncake.master.kill()
    for call in (lambda: tier.contains(blob.name), lambda: read(tier, blob), lambda: tier.put(blob.name, blob.view())):
        with pytest.raises(TierUnavailable):
            call()
    mooncake.master.start()

    def stored():
        with contextlib.suppress(TierUnavailable, CapacityExceeded):
            tier.put(blob.name, blob.view())
            return read(tier, blob) == blob.data
        return False

    wait_for(stored, "the member's memory in the new master's pool", deadline_s=60.0)


def test_a_frozen_master_ends_each_call_and_is_used_again_after_it(mooncake, opened):
    mooncake.member()
    tier = opened(mooncake.uri(), timeout_s=2.0)
    blob = CHAIN.blob(0)
    _store(tier, blob)
    with mooncake.master.frozen():
        for _ in range(2):
            with pytest.raises(TierUnavailable, match=r"in time|within 2 s"):
                tier.contains(blob.name)
    wait_for(lambda: _answers(tier, blob), "the thawed master", deadline_s=30.0)
    assert tier.figures() == {"client_starts": 1}


def _store(tier, blob):
    """Have a blob stored, and no lane late."""

    def is_stored():
        with contextlib.suppress(TierUnavailable):
            tier.put(blob.name, blob.view())
            return not tier._client._process._late
        return False

    wait_for(is_stored, "a stored blob", deadline_s=60.0)


def _answers(tier, blob):
    with contextlib.suppress(TierUnavailable):
        return tier.contains(blob.name) or True
    return False


def test_calls_that_all_hang_end_with_their_process_and_a_new_one_answers(mooncake, opened):
    mooncake.member()
    tier = opened(mooncake.uri(), timeout_s=2.0, concurrency=2, MC_RPC_TIMEOUT_MS=600_000)
    blob = CHAIN.blob(0)
    _store(tier, blob)
    first = client_pid(tier)
    with mooncake.master.frozen():
        for _ in range(2):
            with pytest.raises(TierUnavailable, match="no answer within 2 s"):
                tier.contains(blob.name)
        with pytest.raises(TierUnavailable, match="no call got an answer"):
            tier.contains(blob.name)
        assert not os.path.exists(f"/proc/{first}")
    wait_for(lambda: _answers(tier, blob), "a new client", deadline_s=30.0)
    assert tier.figures()["client_starts"] >= 2 and client_pid(tier) != first


def test_a_transfer_that_ends_late_changes_no_slot(mooncake, opened):
    """The member freezes, the call gives up, its memory belongs to another chunk; then the member thaws and sends."""
    member = mooncake.member()
    slow = {"MC_TCP_PROGRESS_TIMEOUT_SEC": 600, "MC_RPC_TIMEOUT_MS": 600_000}
    tier = opened(mooncake.uri(), timeout_s=2.0, concurrency=2, **slow)
    blob = LARGE.blob(0)
    _store(tier, blob)
    slot = bytearray(len(blob.data))
    member.freeze()
    with pytest.raises(TierUnavailable, match="no answer within 2 s"):
        tier.get_into(blob.name, memoryview(slot))
    process = tier._client._process
    (lane,) = process._late
    pattern = os.urandom(len(slot))
    slot[:] = pattern
    os.pwrite(lane.descriptor, bytes(len(slot)), 0)  # the put left the blob there
    member.thaw()
    wait_for(lambda: process._look_for_late_answers() == 0, "the late answer", deadline_s=30.0)
    assert os.pread(lane.descriptor, len(slot), 0) == blob.data, "nothing was written late: the test shows nothing"
    assert slot == pattern
    assert client_pid(tier) == process._process.pid


def test_a_killed_member_costs_misses_and_another_one_is_used(mooncake, opened):
    member = mooncake.member()
    tier = opened(mooncake.uri())
    blobs = [CHAIN.blob(index) for index in range(3)]
    for blob in blobs:
        tier.put(blob.name, blob.view())
    member.kill()
    for blob in blobs:
        with contextlib.suppress(TierUnavailable):
            assert read(tier, blob) is None
    wait_for(lambda: not tier.contains(blobs[0].name), "the master to miss the member", deadline_s=30.0)
    assert read(tier, blobs[0]) is None
    mooncake.member()
    tier.put(blobs[0].name, blobs[0].view())
    assert read(tier, blobs[0]) == blobs[0].data


def test_a_client_process_that_is_killed_is_started_again(mooncake_member, opened):
    pool, _ = mooncake_member
    tier = opened(pool.uri(uuid.uuid4().hex))
    blob = CHAIN.blob(0)
    tier.put(blob.name, blob.view())
    for number in (2, 3):
        os.kill(client_pid(tier), signal.SIGKILL)
        with contextlib.suppress(TierUnavailable):  # one call may find that out
            tier.contains(blob.name)
        assert read(tier, blob) == blob.data
        assert tier.figures() == {"client_starts": number}


def test_calls_of_a_client_that_dies_fail_and_leave_nothing_open(mooncake, opened):
    mooncake.member()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    tier = opened(mooncake.uri(), timeout_s=30.0, concurrency=4)
    blob = CHAIN.blob(0)
    tier.put(blob.name, blob.view())
    failures = []

    def ask():
        try:
            tier.contains(blob.name)
        except TierUnavailable as exc:
            failures.append(str(exc))

    with mooncake.master.frozen():
        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        wait_for(lambda: tier._client._process._free.qsize() == 1, "three calls under way", deadline_s=30.0)
        os.kill(client_pid(tier), signal.SIGKILL)
        for thread in threads:
            thread.join()
    assert len(failures) == 3 and all("ended" in text for text in failures)
    tier.close()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_the_client_ends_with_a_server_that_is_killed(mooncake_member, repository):
    pool, _ = mooncake_member
    script = (
        "import sys, time; from tests.tiers.test_mooncake import *; tier = tier_of(sys.argv[1]);"
        "tier.contains(CHAIN.name(0)); print(client_pid(tier), flush=True); time.sleep(600)"
    )
    environment = os.environ | {"PYTHONPATH": str(repository)}
    with subprocess.Popen(
        [sys.executable, "-c", script, pool.uri()], stdout=subprocess.PIPE, env=environment
    ) as server:
        pid = int(server.stdout.readline())
        assert os.path.exists(f"/proc/{pid}")
        server.kill()
    wait_for(lambda: not _lives(pid), "the end of the client", deadline_s=30.0)


def _lives(pid):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"
    return False


def test_a_forked_child_has_a_client_of_its_own(mooncake_member, opened):
    pool, _ = mooncake_member
    tier = opened(pool.uri(uuid.uuid4().hex))
    blob = CHAIN.blob(0)
    tier.put(blob.name, blob.view())
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            code = 0 if read(tier, blob) == blob.data else 2
            tier.close()
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert read(tier, blob) == blob.data and tier.figures() == {"client_starts": 1}


def test_where_nobody_listens_the_port_is_named(opened):
    tier = opened(f"mooncake://127.0.0.1:{free_port()}/x")
    with pytest.raises(TierUnavailable, match="connection was refused.*check that the master runs and its port"):
        tier.contains(CHAIN.name(0))


def test_a_listener_that_says_nothing_is_no_master(opened):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tier = opened(f"mooncake://127.0.0.1:{silent.getsockname()[1]}/x", timeout_s=2.0)
        with pytest.raises(TierUnavailable, match="RPC port"):
            tier.contains(CHAIN.name(0))


def test_a_host_name_that_nobody_knows(opened):
    with pytest.raises(TierUnavailable, match="host name is not known"):
        opened("mooncake://nowhere.invalid:50051").contains(CHAIN.name(0))


def test_without_the_package_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mooncake", None)
    with pytest.raises(ConfigError, match="pip install mooncake-transfer-engine"):
        tier_of("mooncake://127.0.0.1:50051")


def test_a_start_that_gets_no_thread_is_tried_again(mooncake_member, opened, monkeypatch):
    pool, _ = mooncake_member
    tier, blob = opened(pool.uri(uuid.uuid4().hex)), CHAIN.blob(0)

    def refused(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as short:
        short.setattr(threading.Thread, "start", refused)
        with pytest.raises(TierUnavailable, match="can't start new thread"):
            tier.put(blob.name, blob.view())
    tier.put(blob.name, blob.view())
    assert read(tier, blob) == blob.data


def test_an_option_that_no_environment_holds_fails_the_calls_as_a_tier_does(mooncake_member, opened):
    pool, _ = mooncake_member
    tier, blob = opened(pool.uri(uuid.uuid4().hex), MC_ANY="a\0b"), CHAIN.blob(0)
    with pytest.raises(TierUnavailable, match="null byte"):
        tier.put(blob.name, blob.view())
