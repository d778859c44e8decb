"""Sessions: who must come before one opens, what is refused and with which reason, what a reset does in every state."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kit.server.clients import (
    PAGES,
    SmallEngine,
    hello,
    poll_until,
    refusal,
    settings,
    tell,
    worker_part,
)
from tests.kit.server.probe import figures, wait_for, wait_written
from tests.kit.server.processes import kill_server
from tiered_kv.chunks.geometry import LayerPage
from tiered_kv.errors import ConfigError, TierUnavailable
from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.server import protocol as m
from tiered_kv.server.client import SchedulerClient
from tiered_kv.server.connect import read_message
from tiered_kv.server.sessions import Group, GroupLookup
from tiered_kv.server.worker_client import WorkerClient, decline

EngineStarter = Callable[..., SmallEngine]


def sessions(root: Path) -> dict[str, str]:
    return {row["engine"]: row["state"] for row in figures(root)["sessions"]}


def test_what_one_engine_commits_another_of_the_same_namespace_hits(engine: EngineStarter) -> None:
    first, second = engine("one"), engine("two")
    assert first.client.namespace == second.client.namespace
    first.store(20)
    second.wait_hits(20)


def test_engines_of_other_weights_do_not_share(engine: EngineStarter) -> None:
    first, second = engine("one", weights="a"), engine("two", weights="b")
    first.store(3)
    first.wait_hits(3)
    assert second.hits(3) == 0


def test_a_scheduler_may_come_before_its_workers(shared: Path, engine_id: str) -> None:
    client = SchedulerClient(settings(shared), engine_id, 2)
    wait_for(lambda: (client.poll(), sessions(shared).get(f"{engine_id}/0") == "joining")[1], "the scheduler")
    workers = [WorkerClient(settings(shared), engine_id, 0, worker_part(rank, 2)) for rank in (1, 0)]
    assert client.wait_ready(10), client.refusal
    assert client.info.rank_offsets == (0, len(PAGES) * PAGES[0].page_bytes * 4)
    client.close()
    for worker in workers:
        worker.leave()


def test_a_worker_that_never_comes_keeps_the_session_closed_and_nothing_else(root: Path, engine: EngineStarter) -> None:
    waiting = SchedulerClient(settings(root), "lonely", 2)
    worker = WorkerClient(settings(root), "lonely", 0, worker_part(0, 2))
    other = engine("other")
    other.store(2)
    other.wait_hits(2)
    waiting.poll()
    assert not waiting.is_ready and waiting.refusal is None
    assert waiting.lookup([bytes(16)], [bytes(32)]) is None
    waiting.close()
    worker.leave()


def test_a_duplicate_rank_is_refused_and_the_first_one_stays(engine: EngineStarter, root: Path) -> None:
    first = engine()
    with pytest.raises(ConfigError, match="rank 0 of engine e/0 has joined already, as pid"):
        WorkerClient(settings(root), "e", 0, worker_part())
    first.store(1)
    first.wait_hits(1)


def test_a_second_scheduler_is_refused_and_the_first_one_stays(engine: EngineStarter, root: Path) -> None:
    first = engine()
    second = SchedulerClient(settings(root), "e", 1)
    assert not second.wait_ready(10)
    assert "has a scheduler already" in (second.refusal or "")
    second.close()
    first.store(1)
    first.wait_hits(1)


@pytest.mark.parametrize("is_scheduler_first", [True, False])
def test_scheduler_and_workers_of_other_world_sizes_are_told_both(
    shared: Path, engine_id: str, is_scheduler_first: bool
) -> None:
    expected = "disagree on world_size: the scheduler has 1, a worker has 2"
    if is_scheduler_first:
        client = SchedulerClient(settings(shared), engine_id, 1)
        wait_for(lambda: (client.poll(), f"{engine_id}/0" in sessions(shared))[1], "the scheduler")
        with pytest.raises(ConfigError, match=expected):
            WorkerClient(settings(shared), engine_id, 0, worker_part(1, 2))
    else:
        worker = WorkerClient(settings(shared), engine_id, 0, worker_part(1, 2))
        client = SchedulerClient(settings(shared), engine_id, 1)
        assert not client.wait_ready(10)
        assert expected in (client.refusal or "")
        worker.leave()
    client.close()


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        (worker_part(1, 3), "disagree on world_size: rank 1 has 3, rank 0 has 2"),
        (worker_part(1, 2, weights="other"), "weights=other and not w"),
    ],
)
def test_workers_that_disagree_are_told_on_what(
    shared: Path, engine_id: str, second: m.JoinWorker, expected: str
) -> None:
    first = WorkerClient(settings(shared), engine_id, 0, worker_part(0, 2))
    with pytest.raises(ConfigError, match=expected):
        WorkerClient(settings(shared), engine_id, 0, second)
    first.leave()


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (worker_part(1, 1), "rank or world out of range"),
        (worker_part(0, 1 << 20), "rank or world out of range"),
        (worker_part(pages=[]), "layers out of range"),
        (worker_part(pages=[LayerPage("l", "BF17", (1,), "H")]), "dtype cannot be stored"),
        (worker_part(pages=[LayerPage("l", "U8", (1, -1), "H")]), "impossible shape"),
        (worker_part(pages=[PAGES[0], PAGES[0]]), "two layers of one name"),
        (m.JoinWorker(0, 1, 16, 40, b"{}", worker_part().pages), "multiple of block_tokens"),
        (m.JoinWorker(0, 1, 16, 1 << 40, b"{}", worker_part().pages), "block_tokens and chunk_tokens"),
        (m.JoinWorker(0, 1, 16, 64, b"[]", worker_part().pages), "must be a JSON object"),
        (m.JoinWorker(0, 1, 16, 64, b"{", worker_part().pages), "not JSON"),
        (m.JoinWorker(0, 1, 16, 64, b"[" * 100_000, worker_part().pages), "not JSON"),
        (m.JoinWorker(0, 1, 16, 64, b"{}", worker_part().pages), "lacks required fields"),
    ],
)
def test_a_part_that_cannot_be_cached_is_refused_with_the_reason(
    shared: Path, engine_id: str, part: m.JoinWorker, expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        WorkerClient(settings(shared), engine_id, 0, part)
    assert f"{engine_id}/0" not in sessions(shared)


def test_host_memory_that_holds_too_few_chunks_is_told_to_the_scheduler(root: Path) -> None:
    config = settings(root, host_bytes="64KiB")
    worker = WorkerClient(config, "e", 0, worker_part())
    client = SchedulerClient(config, "e", 1)
    assert not client.wait_ready(10)
    assert "host_bytes=65536 holds" in (client.refusal or "")
    client.close()
    worker.leave()


def test_a_worker_that_declines_is_heard_by_its_scheduler(shared: Path, engine_id: str) -> None:
    decline(settings(shared), engine_id, "Mamba is not supported")
    client = SchedulerClient(settings(shared), engine_id, 1)
    assert not client.wait_ready(10)
    assert client.refusal == "Mamba is not supported"
    client.close()


def test_a_session_that_was_lost_is_not_joined_again(engine: EngineStarter, root: Path) -> None:
    first = engine()
    first.client.close()
    wait_for(lambda: sessions(root) == {"e/0": "lost"}, "the session's end")
    with pytest.raises(TierUnavailable, match="session e/0 was lost; join with the next generation"):
        WorkerClient(settings(root), "e", 0, worker_part())


def test_a_connection_joins_once(shared: Path, engine_id: str) -> None:
    with hello(settings(shared), "worker", engine_id) as sock:
        tell(sock, worker_part(0, 2), worker_part(1, 2))
        assert isinstance(read_message(sock), m.Slabs)
        assert refusal(sock) == "a connection joins once"


def test_a_role_may_only_do_what_is_its_own(shared: Path, engine_id: str) -> None:
    for role, message in (
        ("worker", m.JoinScheduler(1)),
        ("scheduler", worker_part()),
        ("admin", m.Commit([])),
        ("scheduler", m.Unmapped()),
    ):
        with hello(settings(shared), role, engine_id) as sock:
            tell(sock, message)
            assert refusal(sock) == f"a client of role {role} may not send {type(message).__name__}"


def test_work_before_the_session_is_open_is_refused(shared: Path, engine_id: str) -> None:
    for message in (
        m.Lookup(1, 0, b"", b""),
        m.Commit([]),
        m.GiveBack([]),
        m.Rest(),
        m.Wake(),
        m.Reset(),
        m.Release(1),
    ):
        with hello(settings(shared), "scheduler", engine_id) as sock:
            tell(sock, message)
            assert "no open session on this connection" in refusal(sock)


def test_who_leaves_while_joining_leaves_the_place_to_the_next(shared: Path, engine_id: str) -> None:
    half = m.frame(worker_part())
    with hello(settings(shared), "worker", engine_id) as sock:
        sock.sendall(half[: len(half) // 2])
    with hello(settings(shared), "scheduler", engine_id) as sock:
        tell(sock, m.JoinScheduler(1))
        wait_for(lambda: f"{engine_id}/0" in sessions(shared), "the scheduler")
    wait_for(lambda: f"{engine_id}/0" not in sessions(shared), "its end")
    worker = WorkerClient(settings(shared), engine_id, 0, worker_part())
    client = SchedulerClient(settings(shared), engine_id, 1)
    assert client.wait_ready(10), client.refusal
    client.close()
    worker.leave()


def test_generations_of_one_engine_do_not_mix(shared: Path, engine_id: str) -> None:
    late = WorkerClient(settings(shared), engine_id, 0, worker_part())
    with hello(settings(shared), "scheduler", engine_id, 1) as sock:
        tell(sock, m.JoinScheduler(1))
        wait_for(lambda: f"{engine_id}/1" in sessions(shared), "the next generation")
        assert sessions(shared)[f"{engine_id}/1"] == "joining", "the worker of generation 0 does not count"
    late.leave()


# -- reset -------------------------------------------------------------------------------------------------------


def test_after_a_reset_nothing_old_is_found_and_nothing_leaks(engine: EngineStarter, root: Path) -> None:
    one = engine()
    before = figures(root)["hierarchy"]["reserved_slots"]
    for round_ in range(5):
        one.store(4)
        one.wait_hits(4)
        namespace = one.client.namespace
        one.client.reset()
        assert not one.client.is_ready
        poll_until(one.client, lambda: one.client.is_ready, "the private epoch")
        assert one.client.namespace != namespace, round_
        assert one.hits(4) == 0
    hierarchy = figures(root)["hierarchy"]
    assert (hierarchy["sessions"], hierarchy["reserved_slots"], hierarchy["leased_bytes"]) == (1, before, 0)


def test_slots_and_leases_from_before_a_reset_stay_held_until_given_back(engine: EngineStarter, root: Path) -> None:
    one = engine()
    one.store(2)
    one.wait_hits(2)
    lookup, answer = one.look_up(2)
    slot = one.take_slot()
    one.client.reset()
    poll_until(one.client, lambda: one.client.is_ready, "the private epoch")
    hierarchy = figures(root)["hierarchy"]
    assert hierarchy["sessions"] == 2 and hierarchy["leased_bytes"] == len(answer.slots) * one.client.info.slot_bytes
    one.client.release(lookup)
    one.client.give_back([slot])
    wait_for(lambda: figures(root)["hierarchy"]["sessions"] == 1, "the old session's end")


def test_a_release_behind_a_reset_looks_for_others_of_the_old_session_no_further_than_the_first() -> None:
    """An engine whose weights change has ten thousand requests in its queue, and releases the lookups of all."""
    looked_at = 0

    class Counted(dict[tuple[int, int], GroupLookup]):
        def __iter__(self) -> Iterator[tuple[int, int]]:
            nonlocal looked_at
            for item in super().__iter__():
                looked_at += 1
                yield item

    group = Group("e", 0, sessions=[1, 2], granted={1: set(), 2: set()})
    group.by_engine = Counted({(1, number): GroupLookup(number, is_question=False) for number in range(1000)})
    while group.by_engine:
        assert not group.is_drained(1)
        group.by_engine.pop((1, 1000 - len(group.by_engine)))
    assert group.is_drained(1) and looked_at == 1000


def test_a_slot_filled_before_a_reset_is_not_committed_after_it(engine: EngineStarter) -> None:
    one = engine()
    slot = one.take_slot()
    one.client.reset()
    keys = one.keys(1)
    one.client.commit([(slot, ChunkRecord(one.client.namespace.digest, keys.keys[0], keys.parent(0), 0, bytes(32)))])
    poll_until(one.client, lambda: one.client.is_ready, "the private epoch")
    assert one.client.generation == 0
    assert one.hits(1) == 0


def test_a_reset_while_joining_resets_before_the_session_is_used(root: Path) -> None:
    config = settings(root)
    worker = WorkerClient(config, "e", 0, worker_part())
    client = SchedulerClient(config, "e", 1)
    client.reset()
    assert client.wait_ready(10)
    assert client.namespace.fields["epoch"].startswith("private-")
    assert client.generation == 0
    client.close()
    worker.leave()


def test_a_reset_of_a_joined_session_that_is_not_open_yet_waits_for_it(shared: Path, engine_id: str) -> None:
    client = SchedulerClient(settings(shared), engine_id, 1)
    wait_for(lambda: (client.poll(), f"{engine_id}/0" in sessions(shared))[1], "the scheduler")
    client.reset()
    worker = WorkerClient(settings(shared), engine_id, 0, worker_part())
    assert client.wait_ready(10), client.refusal
    assert client.namespace.fields["epoch"].startswith("private-")
    assert client.generation == 0
    client.close()
    worker.leave()


def test_a_second_reset_during_a_reset_ends_in_a_third_epoch(
    engine: EngineStarter, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A quick server's second answer would be taken in by the poll that took the first.
    monkeypatch.setattr("tiered_kv.server.client.READS_MAX", 1)
    one = engine()
    one.client.reset()
    one.client.reset()
    epochs = []
    while not one.client.is_ready:
        before = one.client.namespace
        one.client.poll()
        if one.client.namespace != before:
            epochs.append(one.client.namespace.fields["epoch"])
    assert len(set(epochs)) == 2


def test_later_engines_use_the_epoch_that_a_reset_began(engine: EngineStarter) -> None:
    one = engine("one")
    one.store(2)
    one.wait_hits(2)
    one.client.reset()
    poll_until(one.client, lambda: one.client.is_ready, "the private epoch")
    two = engine("two")
    assert two.client.namespace.fields["epoch"] == "base-1"
    assert two.hits(2) == 0


def test_a_neighbour_that_did_not_reset_and_the_engine_that_did_share_nothing_any_more(engine: EngineStarter) -> None:
    one, neighbour = engine("one"), engine("neighbour")
    one.store(2)
    neighbour.wait_hits(2)
    one.client.reset()
    poll_until(one.client, lambda: one.client.is_ready, "the private epoch")

    neighbour.store(3, first_token=1000)
    neighbour.wait_hits(3, first_token=1000)
    one.store(4, first_token=2000)
    one.wait_hits(4, first_token=2000)

    assert neighbour.hits(2) == 2, "its weights are still those of the base epoch"
    assert one.hits(2) == one.hits(3, first_token=1000) == 0
    assert neighbour.hits(4, first_token=2000) == 0


def test_after_a_reset_an_engine_keeps_its_private_epoch_over_the_loss_of_the_server(
    engine: EngineStarter, root: Path
) -> None:
    one = engine("one")
    one.client.reset()
    poll_until(one.client, lambda: one.client.is_ready, "the private epoch")
    private = one.client.namespace
    one.store(2)
    wait_written(root)
    kill_server(root)
    one.wait_lost()
    one.rejoin()
    two = engine("two")

    assert one.client.namespace == private, "the base epoch's KV is of other weights"
    assert one.hits(2) == 2
    assert two.client.namespace.fields["epoch"] == "base-1"
    assert two.hits(2) == 0


def test_a_reset_that_cannot_be_made_durable_ends_the_session_and_is_tried_again(
    engine: EngineStarter, root: Path
) -> None:
    one = engine()
    one.store(2)
    one.wait_hits(2)
    (root / "epochs.json").mkdir()  # which no file replaces
    one.client.reset()
    one.wait_lost()
    assert one.client.refusal is None, "it may pass"
    (root / "epochs.json").rmdir()
    one.rejoin()
    assert one.client.namespace.fields["epoch"].startswith("private-")
    assert one.hits(2) == 0
