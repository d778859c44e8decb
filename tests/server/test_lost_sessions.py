"""What a client that is gone leaves behind (rule 1), and what a server that stops or dies costs (rules 2 and 6)."""

import contextlib
import errno
import operator
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit.counts import count
from tests.kit.faults.syscalls import SyscallFaults
from tests.kit.server.clients import SmallEngine, payload_bytes, poll_until, settings, worker_part
from tests.kit.server.probe import figures, server_pid, wait_for, wait_written
from tests.kit.server.processes import WorkerProcess, descriptors, freeze, is_alive, kill_server, order, threads
from tiered_kv.errors import ProtocolError, TierUnavailable
from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.server import protocol as m
from tiered_kv.server.client import BACKOFF_FIRST_S, OUTBOX_BYTES_MAX, SchedulerClient
from tiered_kv.server.directory import hold_arena_lock, release_stale_arena_locks
from tiered_kv.server.row_loan import RowLoan
from tiered_kv.server.worker_client import WorkerClient
from tiered_kv.tiers.disk.marker import claim

EngineStarter = Callable[..., SmallEngine]
WorkerStarter = Callable[..., WorkerProcess]

CALLS = 10_000


def sessions(root: Path) -> dict[str, str]:
    return {row["engine"]: row["state"] for row in figures(root)["sessions"]}


def reserved(root: Path) -> int:
    count: int = figures(root)["hierarchy"]["reserved_slots"]
    return count


def leased(root: Path) -> int:
    size: int = figures(root)["hierarchy"]["leased_bytes"]
    return size


# -- quarantine --------------------------------------------------------------------------------------------------


@pytest.fixture
def scheduler(served: Path, worker_process: WorkerStarter) -> tuple[SchedulerClient, WorkerProcess]:
    """A session whose worker is a process of its own, with slots granted."""
    process = worker_process("e")
    client = SchedulerClient(settings(served), "e", 1)
    assert client.wait_ready(20), client.refusal
    poll_until(client, lambda: client.credit_count, "credits")
    return client, process


Scheduler = tuple[SchedulerClient, WorkerProcess]


def test_slots_of_a_lost_scheduler_stay_until_its_worker_unmaps(scheduler: Scheduler, served: Path) -> None:
    client, process = scheduler
    held = reserved(served)
    client.close()
    wait_for(lambda: sessions(served) == {"e/0": "lost"}, "the session's end")
    assert reserved(served) == held
    order(process, "unmap")
    wait_for(lambda: sessions(served) == {} and reserved(served) == 0, "the end of the quarantine")


def test_slots_of_a_lost_scheduler_stay_until_its_worker_exits(scheduler: Scheduler, served: Path) -> None:
    client, process = scheduler
    client.close()
    wait_for(lambda: sessions(served) == {"e/0": "lost"}, "the session's end")
    assert reserved(served) > 0
    process.kill()
    wait_for(lambda: sessions(served) == {} and reserved(served) == 0, "the end of the quarantine")


def test_a_worker_that_hangs_up_keeps_its_slots_quarantined_while_it_lives(scheduler: Scheduler, served: Path) -> None:
    client, process = scheduler
    order(process, "drop")  # the socket is gone, the arena is still mapped
    poll_until(client, lambda: client.generation == 1, "the session's end")
    assert sessions(served)["e/0"] == "lost"
    assert reserved(served) > 0
    assert is_alive(process.pid)
    process.kill()
    wait_for(lambda: "e/0" not in sessions(served) and reserved(served) == 0, "the end of the quarantine")
    client.close()


def test_a_worker_that_the_server_hung_up_on_says_that_it_unmapped(engine: EngineStarter, served: Path) -> None:
    """It joins again in the next generation, for weeks: what nobody maps must not wait for the process to end."""
    one = engine()
    before = descriptors(server_pid(served))
    for generation in range(1, 4):
        one.take_slot()
        one.worker._sock.sendall(m.frame(m.Claim(1)))  # only a scheduler may say that
        poll_until(one.client, lambda wanted=generation: one.client.generation == wanted, "the session's end")
        assert sessions(served) == {f"e/{generation - 1}": "lost"} and reserved(served) > 0, "it has the arena mapped"
        one.rejoin()
        wait_for(lambda wanted=generation: sessions(served) == {f"e/{wanted}": "ready"}, "the end of the quarantine")
    wait_for(lambda: descriptors(server_pid(served)) <= before, "the end of the watches")
    one.store(2)
    one.wait_hits(2)


def test_rows_for_which_the_server_has_no_descriptor_are_lent_later(engine: EngineStarter, served: Path) -> None:
    one, pid = engine(), server_pid(served)
    region = os.memfd_create("rows")
    os.ftruncate(region, payload_bytes())
    limits, used = resource.prlimit(pid, resource.RLIMIT_NOFILE), {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    one_left = next(number for number in range(len(used) + 1) if number not in used) + 1
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (one_left, limits[1]))
    with pytest.raises(TierUnavailable, match="no descriptor left"):
        one.worker.lend_rows(region, 1, payload_bytes())
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    one.wait_lost()
    one.rejoin()
    assert isinstance(one.worker.lend_rows(region, 1, payload_bytes()), RowLoan)
    os.close(region)


def test_a_worker_that_cannot_map_the_arena_leaves_nothing_behind(served: Path) -> None:
    """It tries again in each generation, for as long as its engine lives: the server watches so many workers only."""
    limits, taken = resource.getrlimit(resource.RLIMIT_NOFILE), list[int]()
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
        for _ in range(2):  # for the socket and the lock of the arena: none is left for a slab
            os.close(taken.pop())
        for generation in range(3):
            with pytest.raises(ProtocolError, match="ulimit -n"):
                WorkerClient(settings(served), "e", generation, worker_part())
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert sessions(served) == {}


def test_a_killed_worker_ends_the_session_and_frees_its_slots(scheduler: Scheduler, served: Path) -> None:
    client, process = scheduler
    process.kill()
    poll_until(client, lambda: client.generation == 1, "the session's end")
    wait_for(lambda: reserved(served) == 0, "the slots")
    client.close()


def test_one_living_worker_of_two_keeps_the_quarantine(served: Path, worker_process: WorkerStarter) -> None:
    first = WorkerClient(settings(served), "two", 0, worker_part(0, 2))
    second = WorkerClient(settings(served), "two", 0, worker_part(1, 2))
    client = SchedulerClient(settings(served), "two", 2)
    assert client.wait_ready(20), client.refusal
    first.leave()
    poll_until(client, lambda: client.generation == 1, "the session's end")
    assert reserved(served) > 0
    second.leave()
    wait_for(lambda: reserved(served) == 0, "the end of the quarantine")
    client.close()


def test_leases_of_a_lost_scheduler_end_with_the_quarantine(engine: EngineStarter, served: Path) -> None:
    one = engine("one")
    one.store(4)
    one.wait_hits(4)
    one.look_up(4)
    assert leased(served) == 4 * one.client.info.slot_bytes
    one.client.close()
    wait_for(lambda: sessions(served) == {"one/0": "lost"}, "the session's end")
    assert leased(served) == 4 * one.client.info.slot_bytes
    one.worker.leave()
    wait_for(lambda: leased(served) == 0, "the leases")


def test_what_a_scheduler_committed_before_it_died_is_kept(engine: EngineStarter, served: Path) -> None:
    one, two = engine("one"), engine("two")
    one.store(6)
    one.client.close()
    two.wait_hits(6)


def test_a_worker_joins_the_next_generation(engine: EngineStarter, served: Path) -> None:
    one = engine()
    one.store(3)
    one.wait_hits(3)
    one.worker.leave()
    one.wait_lost()
    one.rejoin()
    assert one.client.generation == 1
    assert one.hits(3) == 3


def test_a_decliner_that_dies_is_forgotten(served: Path, worker_process: WorkerStarter) -> None:
    process = worker_process("declined")
    order(process, "unmap")
    order(process, "decline")
    assert sessions(served) == {"declined/0": "joining"}
    process.kill()
    wait_for(lambda: sessions(served) == {}, "the decliner's end")


# -- a server that stands still ----------------------------------------------------------------------------------


@pytest.fixture
def stopped(engine: EngineStarter, root: Path) -> SmallEngine:
    """An engine with stored chunks whose server has just been stopped; the end of the test kills it."""
    one = engine()
    one.store(4)
    one.wait_hits(4)
    wait_written(root)
    freeze(server_pid(root))
    return one


def test_every_call_goes_on_while_the_server_stands_still(stopped: SmallEngine) -> None:
    client = stopped.client
    keys = stopped.keys(20)
    slots = [slot for _ in range(client.credit_count) if (slot := client.take_slot()) is not None]
    sent = []
    for _ in range(CALLS):
        sent.append(client.lookup(keys.keys, keys.digests))
        assert client.take_slot() is None
        client.poll()
    digest = client.namespace.digest
    client.commit([(slots[0], ChunkRecord(digest, keys.keys[0], keys.parent(0), 0, keys.digests[0]))])
    client.give_back(slots[1:])
    dropped = sent.count(None)
    assert dropped > 0
    assert len(client._outbox) <= OUTBOX_BYTES_MAX + (1 << 16)
    assert len(client.lookups) == CALLS - dropped
    assert not any(answer.is_answered for answer in client.lookups.values())
    assert client.generation == 0


def test_a_server_that_goes_on_answers_what_was_sent(stopped: SmallEngine, root: Path) -> None:
    keys = stopped.keys(4)
    lookups = [stopped.client.lookup(keys.keys, keys.digests) for _ in range(100)]
    os.kill(server_pid(root), signal.SIGCONT)
    answers = stopped.client.lookups
    poll_until(stopped.client, lambda: all(answers[one].is_answered for one in lookups), "the answers")
    assert {answers[one].ready for one in lookups} == {4}


def test_orders_that_may_not_be_dropped_end_the_session_rather_than_grow_without_bound(stopped: SmallEngine) -> None:
    client = stopped.client
    for _ in range(CALLS):
        if client.generation == 0:
            client.give_back([1 << 20] * 1000)
    assert client.generation == 1
    assert not client._outbox and not client.lookups and client.credit_count == 0


def test_a_reset_that_no_server_heard_is_done_by_the_next_session(stopped: SmallEngine, root: Path) -> None:
    stopped.client.reset()
    kill_server(root)
    stopped.wait_lost()
    assert not stopped.client.is_ready
    stopped.rejoin()
    assert stopped.client.namespace.fields["epoch"].startswith("private-")
    assert stopped.hits(4) == 0


# -- a server that dies ------------------------------------------------------------------------------------------


def test_hits_come_back_from_disk_after_the_server_was_killed(engine: EngineStarter, root: Path) -> None:
    one = engine()
    one.store(30)
    one.wait_hits(30)
    wait_written(root)
    lookup, _ = one.look_up(30)
    first = server_pid(root)
    kill_server(root)
    one.wait_lost()
    assert one.client.lookups == {} and one.client.credit_count == 0
    assert one.client.lookup([bytes(16)], [bytes(32)]) is None
    one.client.release(lookup)
    one.rejoin()
    assert one.client.generation == 1
    assert server_pid(root) != first
    one.wait_hits(30)  # compares every byte with what was stored
    assert figures(root)["hierarchy"]["host_ready_chunks"] >= 30


def test_killing_the_server_among_commits_and_lookups_costs_misses_only(engine: EngineStarter, root: Path) -> None:
    one = engine()
    for round_ in range(count("SERVER_KILLS", 2)):
        for prompt in range(8):
            one.store(4, first_token=(round_ * 8 + prompt) * 1000)
            one.client.lookup(one.keys(4).keys, one.keys(4).digests)
        kill_server(root)
        one.wait_lost()
        one.rejoin()
        assert one.client.generation == round_ + 1
        for prompt in range(8):
            one.hits(4, first_token=(round_ * 8 + prompt) * 1000)  # none, some or all: each with the right bytes
    one.store(4, first_token=900_000)
    one.wait_hits(4, first_token=900_000)


def test_a_new_server_waits_until_the_old_arena_is_unmapped(engine: EngineStarter, root: Path) -> None:
    one = engine()
    kill_server(root)
    one.wait_lost()
    two = WorkerClient(settings(root), "two", 0, worker_part())
    client = SchedulerClient(settings(root), "two", 1)
    wait_for(lambda: (client.poll(), sessions(root).get("two/0"))[1] == "joining", "the second engine")
    assert figures(root)["hierarchy"]["host_assigned_bytes"] == 0
    assert not client.is_ready
    one.worker.leave()
    assert client.wait_ready(20), client.refusal
    client.close()
    two.leave()


def test_a_place_that_is_no_lock_of_ours_does_not_stop_the_server(engine: EngineStarter, root: Path) -> None:
    root.mkdir(0o700)
    claim(root)
    (root / f"arena-{'1' * 16}.lock").symlink_to("/nowhere")
    (root / f"arena-{'2' * 16}.lock").mkdir()
    (root / f"arena-{'3' * 16}.lock").write_bytes(b"precious")
    (root / "arena-somebody.lock").touch()
    os.close(hold_arena_lock(root, "4" * 16))
    one = engine()
    one.store(1)
    one.wait_hits(1)
    assert not (root / f"arena-{'4' * 16}.lock").exists()
    assert (root / f"arena-{'3' * 16}.lock").read_bytes() == b"precious", "a lock is empty"
    assert (root / "arena-somebody.lock").exists(), "a server's id is 16 digits"


def test_an_engine_without_server_is_told_so(root: Path) -> None:
    root.mkdir()
    config = settings(root, server=f"unix://{root}/none.sock", start_timeout_s=1)
    with pytest.raises(TierUnavailable, match=r"no cache server answers at unix://.*tiered-kv serve"):
        WorkerClient(config, "e", 0, worker_part())


def test_reconnects_leak_neither_threads_nor_descriptors(engine: EngineStarter, served: Path) -> None:
    one = engine("again")
    server = server_pid(served)

    def reconnect() -> None:
        one.worker.leave()
        one.client._backoff_s = 0.0  # as a back-off that has passed
        one.wait_lost()
        one.rejoin()
        assert one.client._backoff_s == BACKOFF_FIRST_S, "the back-off starts anew with a session that opened"

    def held() -> tuple[int, ...]:
        return (descriptors(os.getpid()), threads(os.getpid()), descriptors(server), threads(server))

    reconnect()
    before = held()  # and what the first session leaves, which may still be on its way out
    for _ in range(count("RECONNECTS", 50)):
        reconnect()
    wait_for(lambda: all(map(operator.le, held(), before)), "no more descriptors and threads than before")


def test_an_arena_whose_lock_cannot_be_asked_counts_as_mapped(tmp_path: Path) -> None:
    """Out of descriptors, a server took the lock for nobody's, and would have allocated a second arena beside that."""
    os.close(hold_arena_lock(tmp_path, "0" * 16))
    directory = SyscallFaults(tmp_path)
    with directory.active():
        list(tmp_path.glob("*"))
    for at in range(len(directory.calls) + 1):  # the directory's own calls, then the lock's open
        with SyscallFaults(tmp_path, at, errno.EMFILE).active():
            assert release_stale_arena_locks(tmp_path, own_id="") == 1
    with SyscallFaults(tmp_path, len(directory.calls), errno.EIO).active():
        assert release_stale_arena_locks(tmp_path, own_id="") == 0, "for good, and no engine would ever be served"
    assert len(list(tmp_path.iterdir())) == 1
    assert release_stale_arena_locks(tmp_path, own_id="") == 0
    assert list(tmp_path.iterdir()) == []
