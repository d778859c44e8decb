"""Epochs kept in a bucket: a reset counts on every machine, and a bucket that does not answer holds up nobody."""

import logging
import os
import random
import re
import socket
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.kit.engine_world import EngineWorld
from tests.kit.faults.proxy import Fault, FaultProxy, Mode
from tests.kit.s3 import S3
from tests.kit.server.clients import SmallEngine, poll_until, settings, worker_part
from tests.kit.server.object_nodes import FOUND_S, s3_place, wait_uploaded
from tests.kit.server.probe import wait_for, wait_written
from tests.kit.server.processes import end_server
from tiered_kv.errors import TierUnavailable
from tiered_kv.location import parse_location
from tiered_kv.machine import machine_name
from tiered_kv.server import protocol as m
from tiered_kv.server.connection import Connection
from tiered_kv.server.epochs import REFRESH_S, RETRY_S, EpochFile, Epochs, begin_with
from tiered_kv.server.members import namespace_of
from tiered_kv.server.pins import Pinning
from tiered_kv.server.sessions import Sessions
from tiered_kv.testing.memory import MemoryTier
from tiered_kv.tiers.object.store import ObjectStore

ONE, TWO = b"1" * 16, b"2" * 16
NOBODY = parse_location("s3://bucket/p", {"endpoint_url": "http://127.0.0.1:9", "key": "k", "secret": "secret"})
"""The discard port: connecting is refused."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ObjectStore]:
    store = ObjectStore(parse_location(f"shared+file://{tmp_path}/bucket"))
    yield store
    store.close()


class Machine:
    """Shared epochs of one machine; what goes on in the background runs when the test says so."""

    def __init__(self, root: Path, store: ObjectStore) -> None:
        root.mkdir(exist_ok=True)
        self.now_s = 0.0
        self.questions: deque[Callable[[], None]] = deque()
        self.epochs = Epochs(EpochFile(root), self.questions.append, store, monotonic=lambda: self.now_s)

    def answer(self) -> None:
        self.epochs.turn()
        while self.questions:
            self.questions.popleft()()
            self.epochs.turn()

    def ask(self, digest: bytes = ONE) -> str:
        """The epoch a new session gets."""
        assert self.epochs.base(digest) is None, "answered before the bucket was asked"
        self.answer()
        epoch = self.epochs.base(digest)
        assert epoch is not None
        return epoch

    def retire(self, digest: bytes = ONE) -> str:
        """A reset, and the bucket hears of it or does not answer."""
        private = self.epochs.retire(digest)
        assert not self.epochs.is_settled(digest)
        self.answer()
        assert self.epochs.is_settled(digest)
        return private


@pytest.fixture
def machine(tmp_path: Path, store: ObjectStore) -> Callable[..., Machine]:
    return lambda name, store=store: Machine(tmp_path / name, store)


def after(epoch: str, resets: int) -> str:
    """The shared epoch that so many resets make of one."""
    assert epoch.startswith("shared-")
    return f"shared-{int(epoch.removeprefix('shared-')) + resets}"


def test_two_machines_of_one_host_name_and_one_directory_share_no_epoch_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cloned images: what one of them stored under its own epoch, before a reset, is not the other's."""
    monkeypatch.setattr("socket.gethostname", lambda: "worker")
    silent = ObjectStore(NOBODY, timeout_s=1)
    found = []
    for number in (1, 2, 1):
        (tmp_path / "machine-id").write_text(f"{number:032x}\n")
        name = machine_name((tmp_path / "machine-id",))
        monkeypatch.setattr("tiered_kv.server.epochs.machine_name", lambda name=name: name)
        found.append(Machine(tmp_path / "kv", silent).ask())
    silent.close()
    assert all(re.fullmatch(r"base-0-of-[0-9a-f]{16}", epoch) for epoch in found)
    assert found[0] != found[1] and found[0] == found[2], "the same machine again, after a restart"


def test_a_machine_without_an_id_is_known_by_its_network_card_or_by_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "worker")
    there = tmp_path / "machine-id"
    for text in ("", "uninitialized\n", "0" * 32, "x" * 32):
        there.write_text(text)
        monkeypatch.setattr("uuid.getnode", lambda: 0x0242AC110002)
        assert machine_name((tmp_path / "none", there), tmp_path / "none") == "worker 0242ac110002"
        monkeypatch.setattr("uuid.getnode", lambda: 0x0342AC110002)  # made up: its multicast bit is set
        assert machine_name((there,)) != machine_name((there,))
    there.write_text("0123456789abcdef0123456789abcdef\n")
    assert machine_name((tmp_path / "none", there), tmp_path / "none") == "worker 0123456789abcdef0123456789abcdef"


def test_containers_of_one_image_name_and_address_on_two_hosts_are_two_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine id may come with the image, and Docker's first container has this card on every host."""
    monkeypatch.setattr(socket, "gethostname", lambda: "vllm-0")
    monkeypatch.setattr(uuid, "getnode", lambda: 0x0242AC110002)
    from_image, none = tmp_path / "machine-id", tmp_path / "none"
    from_image.write_text("0123456789abcdef0123456789abcdef\n")
    for machine_ids in ((from_image,), (none,)):
        names = []
        for host in ("one", "two"):
            (tmp_path / host).write_text(f"{host}\n")
            names.append(machine_name(machine_ids, tmp_path / host))
            assert machine_name(machine_ids, tmp_path / host) == names[-1]
        assert names[0] != names[1]
    assert machine_name() == machine_name()


def test_machines_of_one_bucket_agree_and_a_reset_on_one_counts_for_all(machine: Any) -> None:
    a, b = machine("a"), machine("b")
    first, of_two = a.ask(), b.ask(TWO)
    assert b.ask() == first
    private = a.retire()

    assert private.startswith("private-")
    assert a.ask() == b.ask() == machine("new").ask() == after(first, 1)
    assert b.ask(TWO) == of_two
    b.retire()
    assert a.ask() == after(first, 2)


def test_two_machines_that_begin_a_namespace_at_once_agree(machine: Any, store: ObjectStore, monkeypatch) -> None:
    a, b = machine("a"), machine("b")
    put = store.put
    theirs: list[str] = []

    def interrupted(path: str, data: bytes) -> None:
        monkeypatch.setattr(store, "put", put)
        theirs.append(b.ask())  # both saw none
        put(path, data)

    monkeypatch.setattr(store, "put", interrupted)
    ours = a.ask()
    assert int(ours.removeprefix("shared-")) >= int(theirs[0].removeprefix("shared-"))
    assert a.ask() == b.ask() == machine("new").ask() == ours, "who had the lower number meets it at the next session"


def test_two_resets_at_once_retire_the_old_epoch(machine: Any, store: ObjectStore, monkeypatch) -> None:
    a, b = machine("a"), machine("b")
    first = a.ask()
    put = store.put

    def interrupted(path: str, data: bytes) -> None:
        monkeypatch.setattr(store, "put", put)
        b.retire()  # both saw the same highest number
        put(path, data)

    monkeypatch.setattr(store, "put", interrupted)
    a.retire()

    assert a.ask() == b.ask() == after(first, 1)


def test_a_session_waits_for_the_answer_and_the_next_one_asks_anew(machine: Any) -> None:
    a, b = machine("a"), machine("b")
    assert [a.epochs.base(ONE) for _ in range(3)] == [None] * 3
    assert len(a.questions) == 1, "one question per session"
    a.answer()
    first = a.epochs.base(ONE)
    b.retire()
    assert a.ask() == after(first, 1)


@pytest.mark.parametrize("when", ["answered", "on its way"])
def test_who_comes_after_a_session_that_did_not_open_asks_anew(machine: Any, when: str) -> None:
    a, b = machine("a"), machine("b")
    first = b.ask()
    assert a.epochs.base(ONE) is None
    if when == "answered":
        a.answer()
        a.epochs.forget(ONE)
    else:
        a.epochs.forget(ONE)
        a.answer()
    b.retire()
    assert a.ask() == after(first, 1)


def test_a_session_that_waits_while_another_engine_resets_does_not_open_with_the_retired_epoch(machine: Any) -> None:
    a = machine("a")
    first = a.ask()
    assert a.epochs.base(ONE) is None
    a.answer()
    a.epochs.retire(ONE)
    epoch = None
    while epoch is None:  # the server's loop asks in every turn
        a.epochs.turn()
        epoch = a.epochs.base(ONE)
        if epoch is None:
            a.questions.popleft()()
    assert epoch == after(first, 1)


def test_an_engine_that_dies_before_its_session_opens_leaves_no_answer_to_the_next_one(machine: Any) -> None:
    a, b, base = machine("a"), machine("b"), namespace_of([worker_part()], epoch="").digest
    world = EngineWorld(MemoryTier(1 << 30), host_bytes=8 << 20)
    pinning = Pinning(world.engine, lambda task: task(), 0.0, disk_root=None, store=None)
    sessions, sockets = Sessions(world.engine, a.epochs, pinning), ExitStack()

    def joined(generation: int) -> list[Connection]:
        members = []
        for role in ("worker", "scheduler"):
            ours, _ = map(sockets.enter_context, socket.socketpair())
            members.append(Connection(ours))
            members[-1].welcome(role, "e", generation)
        sessions.join_worker(members[0], worker_part())
        sessions.join_scheduler(members[1], m.JoinScheduler(1))
        sessions.open_complete()
        return members

    with sockets:
        worker, _ = joined(0)
        a.answer()
        sessions.exited(worker)
        before = b.ask(base)
        b.retire(base)
        joined(1)
        a.answer()
        sessions.open_complete()
        (group,) = sessions.groups
        assert group.namespace is not None and group.namespace.fields["epoch"] == after(before, 1)
    world.close()


def test_a_bucket_that_does_not_answer_gives_an_epoch_of_this_machine_alone(machine: Any, caplog) -> None:
    unreachable = ObjectStore(NOBODY, timeout_s=10)  # botocore asks twice, a second apart
    a, b = machine("a", unreachable), machine("b", unreachable)
    with caplog.at_level(logging.WARNING):
        epochs = [a.ask(), b.ask()]

    assert "nothing of it is shared" in caplog.text and "the connection was refused" in caplog.text
    assert all(epoch.startswith("base-0-of-") for epoch in epochs)
    assert epochs[0] != epochs[1], "two machines would share without knowing of each other's resets"
    assert machine("a", unreachable).ask() == epochs[0], "the same after a restart"
    unreachable.close()


def test_who_has_an_epoch_of_this_machine_alone_hears_that_the_bucket_is_back(machine: Any, store: ObjectStore) -> None:
    outage = Outage(store)
    a = machine("a", outage)
    assert a.epochs.is_own(a.ask())
    for _ in range(3):
        assert not a.epochs.is_back(ONE)
        a.now_s += RETRY_S
        assert not a.epochs.is_back(ONE)
        a.answer()
        assert not a.epochs.is_back(ONE), "it does not answer yet"
    outage.is_over = True
    a.now_s += RETRY_S
    assert not a.epochs.is_back(ONE)
    a.answer()
    assert a.epochs.is_back(ONE)
    assert a.ask() == machine("other").ask() and not a.epochs.is_own(a.ask())
    assert not a.epochs.is_back(ONE) and not a.questions, "a session that got no answer again is not ended at once"


def test_a_bucket_that_is_owed_a_reset_is_not_back(machine: Any, store: ObjectStore) -> None:
    outage = Outage(store)
    a = machine("a", outage)
    a.retire()
    assert a.epochs.is_own(a.ask()) and not a.epochs.is_back(ONE)
    outage.is_over = True
    a.now_s += RETRY_S
    assert not a.epochs.is_back(ONE)
    a.answer()
    assert a.epochs.is_back(ONE)


def test_an_engine_that_started_while_the_bucket_was_away_shares_once_it_is_back(s3: S3, tmp_path: Path) -> None:
    """Else it shares nothing for as long as it runs, which may be months, because of one answer that did not come."""
    prefix = s3.new_prefix()

    def started(name: str, url: str | None = None) -> SmallEngine:
        place = s3_place(s3, prefix, url)
        bucket: dict[str, Any] = {"storage_uri": place.uri, "storage_options": place.options, "storage_timeout_s": 2}
        config = settings(tmp_path, **bucket, disk_path=str(tmp_path / name), disk_bytes="160MiB")
        engines.append(SmallEngine.start(config, name, rejoins=True))
        return engines[-1]

    engines: list[SmallEngine] = []
    try:
        with FaultProxy(s3.endpoint_url) as proxy:
            a = started("a")
            a.store(6)
            wait_uploaded(tmp_path / "a")
            with proxy.failing(Fault(Mode.STATUS, kinds={"LIST"}, path="/epochs/", status=503)):
                b = started("b", proxy.url)
                assert "-of-" in b.client.namespace.fields["epoch"]
                b.store(2)
                b.wait_hits(2)
                assert b.hits(6) == 2
            b.wait_lost()
            b.rejoin()
            assert b.client.namespace.fields["epoch"] == a.client.namespace.fields["epoch"]
            wait_for(lambda: b.hits(6) == 6, "what the other machine stored", deadline_s=FOUND_S)
            b.close()
            end_server(tmp_path / "b")
    finally:
        for engine in engines:
            engine.close()
        end_server(tmp_path / "a")
        end_server(tmp_path / "b")


def test_a_closed_store_gives_an_epoch_of_this_machine_alone(machine: Any, store: ObjectStore) -> None:
    store.close()
    assert machine("a").ask().startswith("base-0-of-")


class Outage:
    """A bucket that does not answer until it is over."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.is_over = False

    def __getattr__(self, name: str) -> Any:
        if not self.is_over:
            raise TierUnavailable("object store: injected outage")
        return getattr(self.store, name)


def test_a_reset_that_does_not_reach_the_bucket_holds_here_and_is_told_when_the_bucket_is_back(
    machine: Any, store: ObjectStore, caplog
) -> None:
    outage = Outage(store)
    a, other = machine("a", outage), machine("other")
    first = other.ask()
    a.retire()
    assert "could not be told of a reset" in caplog.text
    assert a.ask().startswith("base-1-of-"), "a session here must not adopt the epoch that was retired"
    assert other.ask() == first, "another machine cannot know yet"

    outage.is_over = True
    a.now_s += RETRY_S
    a.answer()
    assert other.ask() == a.ask() == after(first, 1)
    a.now_s += RETRY_S
    a.answer()
    assert other.ask() == after(first, 1), "told once"


def test_a_reset_that_the_bucket_did_not_hear_of_outlives_the_server(machine: Any, store: ObjectStore) -> None:
    first = machine("other").ask()
    machine("a", Outage(store)).retire()

    restarted = machine("a")
    assert restarted.ask() == after(first, 1), "the bucket is told before the first session here asks it"
    assert machine("other").ask() == after(first, 1)
    assert machine("a").ask() == after(first, 1), "paid"


def test_a_session_after_the_bucket_came_back_does_not_wait_for_the_next_try(machine: Any, store: ObjectStore) -> None:
    first = machine("other").ask()
    outage = Outage(store)
    a = machine("a", outage)
    a.retire()
    outage.is_over = True
    assert a.ask() == after(first, 1)


def test_a_second_reset_while_the_bucket_hears_of_the_first_is_told_too(
    machine: Any, store: ObjectStore, monkeypatch
) -> None:
    a, b = machine("a"), machine("b")
    first = a.ask()
    put = store.put

    def interrupted(path: str, data: bytes) -> None:
        monkeypatch.setattr(store, "put", put)
        put(path, data)
        assert b.ask() == after(first, 1)
        a.epochs.retire(ONE)  # what b's session stores meanwhile is old, too

    monkeypatch.setattr(store, "put", interrupted)
    a.retire()
    assert b.ask() == after(first, 2)


def test_what_is_no_number_is_ignored(machine: Any, store: ObjectStore) -> None:
    names = {f"_tiered_kv/epochs/{ONE.hex()}/{name}" for name in ("x", "1x", "-3", "9" * 16, "deeper/7x")}
    for name in names:
        store.put(name, b"")
    store.put(f"_tiered_kv/epochs/{ONE.hex()}/3", b"")
    store.put(f"_tiered_kv/epochs/{TWO.hex()}/4", b"")

    a = machine("a")
    assert (a.ask(ONE), a.ask(TWO)) == ("shared-3", "shared-4")
    a.retire(ONE)
    assert names <= {info.path for info in store.list("_tiered_kv/epochs/")}, "nor deleted"


# -- what a lifecycle rule deletes ------------------------------------------------------------------------------------


@pytest.fixture
def memory() -> Iterator[ObjectStore]:
    store = ObjectStore(parse_location(f"memory://{uuid.uuid4().hex}/prefix"))
    yield store
    store.close()


def numbers(store: ObjectStore, digest: bytes = ONE) -> list[int]:
    return sorted(int(info.path.rpartition("/")[2]) for info in store.list(f"_tiered_kv/epochs/{digest.hex()}/"))


def expire(store: ObjectStore, *which: int, digest: bytes = ONE) -> None:
    store.delete([f"_tiered_kv/epochs/{digest.hex()}/{number}" for number in which])


def test_a_retired_epoch_stays_retired_when_the_number_has_expired(machine: Any, memory: ObjectStore) -> None:
    """The case of the review: the highest number falls, and what it had retired would be in force again."""
    a = machine("a", memory)
    before = a.ask()
    a.retire()
    retired = {before, a.ask()}
    a.retire()
    expire(memory, *numbers(memory))

    new = machine("new", memory).ask()
    assert new not in {*retired, "shared-0", "shared-1"}
    assert machine("newer", memory).ask() == new, "machines agree on what comes after"
    assert {a.ask(), machine("a", memory).ask()} & retired == set()
    assert machine("new", memory).ask() == a.ask(), "also the machine that remembers"


def test_no_number_of_a_retired_epoch_is_left_to_be_the_highest(machine: Any, memory: ObjectStore) -> None:
    a = machine("a", memory)
    first = a.ask()
    a.retire()
    a.retire()
    (left,) = numbers(memory)
    assert f"shared-{left}" == after(first, 2)

    memory.put(f"_tiered_kv/epochs/{ONE.hex()}/{left - 1}", b"")  # as a version before this one leaves it
    assert a.ask() == after(first, 2)
    assert numbers(memory) == [left]


def test_a_machine_believes_no_number_below_one_that_it_has_seen(machine: Any, memory: ObjectStore, caplog) -> None:
    a = machine("a", memory)
    first = a.ask()
    a.retire()
    assert a.ask() == after(first, 1)
    (number,) = numbers(memory)
    expire(memory, number)
    memory.put(f"_tiered_kv/epochs/{ONE.hex()}/{number - 1}", b"")  # a restored backup, say

    again = machine("a", memory).ask()
    assert again not in {first, after(first, 1), after(first, 2)}, "the next one may have been retired elsewhere"
    assert "exempt _tiered_kv/epochs/ from lifecycle rules" in caplog.text
    assert machine("new", memory).ask() == again


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_deleted_whenever_no_retired_epoch_comes_back(machine: Any, memory: ObjectStore, seed: int) -> None:
    draw = random.Random(seed)
    machines = [machine(f"m{i}", memory) for i in range(3)]
    used: set[str] = set()
    retired: set[str] = set()
    counts = dict.fromkeys(("ask", "retire", "delete", "restart", "refresh"), 0)
    for step in range(120):
        action = draw.choices(list(counts), [6, 2, 3, 1, 1])[0]
        counts[action] += 1
        at = draw.randrange(len(machines))
        if action == "ask":
            epoch = machines[at].ask()
            assert epoch not in retired, f"step {step}: {counts}"
            used.add(epoch)
        elif action == "retire":
            machines[at].retire()
            retired |= used
        elif action == "delete":
            expire(memory, *(number for number in numbers(memory) if draw.random() < 0.7))
        elif action == "restart":  # or a machine that was never there before
            machines[at] = machine(draw.choice([f"m{at}", f"new{step}"]), memory)
        else:
            machines[at].now_s += REFRESH_S
            machines[at].answer()
    assert all(counts.values()) and retired


def test_a_number_in_force_does_not_age(machine: Any, store: ObjectStore, tmp_path: Path) -> None:
    """While a server runs, and when one starts; what somebody retired or deleted meanwhile is not brought back."""
    a = machine("a")
    first = a.ask()
    (file,) = (tmp_path / "bucket" / "_tiered_kv" / "epochs" / ONE.hex()).iterdir()
    long_ago_s = time.time() - 2 * REFRESH_S

    def is_fresh_after(event: Callable[[], object]) -> bool:
        os.utime(file, (long_ago_s, long_ago_s))
        event()
        return file.stat().st_mtime > time.time() - REFRESH_S

    def hours_pass() -> None:
        a.now_s += REFRESH_S
        a.answer()

    assert not is_fresh_after(a.answer), "not at every turn"
    assert is_fresh_after(hours_pass)
    assert is_fresh_after(lambda: machine("b").ask())

    file.unlink()
    hours_pass()
    assert numbers(store) == []
    machine("c").retire()
    later = numbers(store)
    hours_pass()
    assert numbers(store) == later
    assert a.ask() != first


def test_a_number_that_is_retired_while_it_is_written_anew_stays_retired(
    machine: Any, memory: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = machine("a", memory), machine("b", memory)
    first = a.ask()
    put = memory.put

    def interrupted(path: str, data: bytes) -> None:
        monkeypatch.setattr(memory, "put", put)
        b.retire()
        put(path, data)

    monkeypatch.setattr(memory, "put", interrupted)
    a.now_s += REFRESH_S
    a.answer()
    assert numbers(memory) == [int(after(first, 1).removeprefix("shared-"))]


class OnlyReads:
    """A bucket whose credentials do not let this machine write."""

    def __init__(self, store: ObjectStore) -> None:
        self.list = store.list

    def put(self, path: str, data: bytes) -> None:
        raise TierUnavailable("object store: put failed: AccessDenied")

    def delete(self, paths: list[str]) -> None:
        raise TierUnavailable("object store: delete failed: AccessDenied")


def test_who_may_only_read_takes_the_number_that_others_made(machine: Any, memory: ObjectStore) -> None:
    reader = machine("reader", OnlyReads(memory))
    assert reader.ask().startswith("base-0-of-"), "there is none yet"
    assert machine("writer", memory).ask() == reader.ask()
    memory.put(f"_tiered_kv/epochs/{ONE.hex()}/1", b"")
    assert machine("writer", memory).ask() == reader.ask()


def test_after_a_reset_on_one_node_another_finds_nothing_old(tmp_path: Path) -> None:
    """Two nodes with servers of their own; the other node's running session keeps what it has."""

    def started(name: str, engine_id: str) -> SmallEngine:
        bucket = f"shared+file://{tmp_path}/bucket"
        config = settings(tmp_path, storage_uri=bucket, disk_path=str(tmp_path / name), disk_bytes="160MiB")
        engines.append(SmallEngine.start(config, engine_id))
        return engines[-1]

    engines: list[SmallEngine] = []
    try:
        a, b = started("a", "a1"), started("b", "b1")
        a.store(5)
        a.wait_hits(5)
        wait_written(tmp_path / "a")
        assert b.hits(5) == 5
        a.client.reset()
        poll_until(a.client, lambda: a.client.is_ready, "the private epoch")
        later = started("b", "b2")

        assert a.hits(5) == 0
        assert later.hits(5) == 0
        first, second = (one.client.namespace.fields["epoch"] for one in (b, later))
        assert second == after(first, 1)
        later.store(2)
        wait_written(tmp_path / "b")
        assert started("a", "a2").hits(5) == 2
    finally:
        for engine in engines:
            engine.close()
        end_server(tmp_path / "a")
        end_server(tmp_path / "b")


def test_of_two_copies_that_begin_a_bucket_at_once_each_is_told_the_number_in_force(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has found none there; the higher number counts, and under the other one nobody finds anything."""
    put = store.put

    def put_second(path: str, data: bytes) -> None:
        monkeypatch.undo()
        assert begin_with(store, ONE, 9) == 9
        put(path, data)

    monkeypatch.setattr(store, "put", put_second)
    assert begin_with(store, ONE, 5) == 9
