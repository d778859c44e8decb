"""Epochs kept in a bucket: a reset counts on every machine, and a bucket that does not answer holds up nobody."""

import logging
import re
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cache_clients import SmallEngine, poll_until, settings
from cache_probe import wait_written
from server_processes import end_server

from tiered_kv.errors import TierUnavailable
from tiered_kv.location import parse_location
from tiered_kv.machine import machine_name
from tiered_kv.server.epochs import Epochs
from tiered_kv.server.shared_epochs import RETRY_S, SharedEpochs
from tiered_kv.tiers.object_store import ObjectStore

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
        self.epochs = SharedEpochs(Epochs(root), store, self.questions.append, root=root, monotonic=lambda: self.now_s)

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
        assert not self.epochs.is_told(digest)
        self.answer()
        assert self.epochs.is_told(digest)
        return private


@pytest.fixture
def machine(tmp_path: Path, store: ObjectStore) -> Callable[..., Machine]:
    return lambda name, store=store: Machine(tmp_path / name, store)


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
        monkeypatch.setattr("tiered_kv.server.shared_epochs.machine_name", lambda name=name: name)
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
        assert machine_name((tmp_path / "none", there)) == "worker 0242ac110002"
        monkeypatch.setattr("uuid.getnode", lambda: 0x0342AC110002)  # made up: its multicast bit is set
        assert machine_name((there,)) != machine_name((there,))
    there.write_text("0123456789abcdef0123456789abcdef\n")
    assert machine_name((tmp_path / "none", there)) == "worker 0123456789abcdef0123456789abcdef"


def test_machines_of_one_bucket_agree_and_a_reset_on_one_counts_for_all(machine: Any) -> None:
    a, b = machine("a"), machine("b")
    assert a.ask() == b.ask() == "shared-0"
    private = a.retire()

    assert private.startswith("private-")
    assert a.ask() == b.ask() == machine("new").ask() == "shared-1"
    assert b.ask(TWO) == "shared-0"
    b.retire()
    assert a.ask() == "shared-2"


def test_two_resets_at_once_retire_the_old_epoch(machine: Any, store: ObjectStore, monkeypatch) -> None:
    a, b = machine("a"), machine("b")
    put = store.put

    def interrupted(path: str, data: bytes) -> None:
        monkeypatch.setattr(store, "put", put)
        b.retire()  # both saw the same highest number
        put(path, data)

    monkeypatch.setattr(store, "put", interrupted)
    a.retire()

    assert a.ask() == b.ask() == "shared-1"


def test_a_session_waits_for_the_answer_and_the_next_one_asks_anew(machine: Any) -> None:
    a, b = machine("a"), machine("b")
    assert [a.epochs.base(ONE) for _ in range(3)] == [None] * 3
    assert len(a.questions) == 1, "one question per session"
    a.answer()
    assert a.epochs.base(ONE) == "shared-0"
    b.retire()
    assert a.ask() == "shared-1"


def test_a_bucket_that_does_not_answer_gives_an_epoch_of_this_machine_alone(machine: Any, caplog) -> None:
    unreachable = ObjectStore(NOBODY, timeout_s=2)
    a, b = machine("a", unreachable), machine("b", unreachable)
    with caplog.at_level(logging.WARNING):
        epochs = [a.ask(), b.ask()]

    assert "nothing of it is shared" in caplog.text and "the connection was refused" in caplog.text
    assert all(epoch.startswith("base-0-of-") for epoch in epochs)
    assert epochs[0] != epochs[1], "two machines would share without knowing of each other's resets"
    assert machine("a", unreachable).ask() == epochs[0], "the same after a restart"
    unreachable.close()


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
    a.retire()
    assert "could not be told of a reset" in caplog.text
    assert a.ask().startswith("base-1-of-"), "a session here must not adopt the epoch that was retired"
    assert other.ask() == "shared-0", "another machine cannot know yet"

    outage.is_over = True
    a.now_s += RETRY_S
    a.answer()
    assert other.ask() == a.ask() == "shared-1"
    a.now_s += RETRY_S
    a.answer()
    assert other.ask() == "shared-1", "told once"


def test_a_reset_that_the_bucket_did_not_hear_of_outlives_the_server(machine: Any, store: ObjectStore) -> None:
    machine("a", Outage(store)).retire()

    restarted = machine("a")
    assert restarted.ask() == "shared-1", "the bucket is told before the first session here asks it"
    assert machine("other").ask() == "shared-1"
    assert machine("a").ask() == "shared-1", "paid"


def test_a_session_after_the_bucket_came_back_does_not_wait_for_the_next_try(machine: Any, store: ObjectStore) -> None:
    outage = Outage(store)
    a = machine("a", outage)
    a.retire()
    outage.is_over = True
    assert a.ask() == "shared-1"


def test_a_second_reset_while_the_bucket_hears_of_the_first_is_told_too(
    machine: Any, store: ObjectStore, monkeypatch
) -> None:
    a, b = machine("a"), machine("b")
    put = store.put

    def interrupted(path: str, data: bytes) -> None:
        monkeypatch.setattr(store, "put", put)
        put(path, data)
        assert b.ask() == "shared-1"
        a.epochs.retire(ONE)  # what b's session stores meanwhile is old, too

    monkeypatch.setattr(store, "put", interrupted)
    a.retire()
    assert b.ask() == "shared-2"


def test_what_is_no_number_is_ignored(machine: Any, store: ObjectStore) -> None:
    for name in ("x", "1x", "-3", "9" * 16, "deeper/7x"):
        store.put(f"_tiered_kv/epochs/{ONE.hex()}/{name}", b"")
    store.put(f"_tiered_kv/epochs/{TWO.hex()}/4", b"")

    a = machine("a")
    assert (a.ask(ONE), a.ask(TWO)) == ("shared-0", "shared-4")


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
        epochs = [one.client.namespace.fields["epoch"] for one in (b, later)]
        assert epochs == ["shared-0", "shared-1"]
        later.store(2)
        wait_written(tmp_path / "b")
        assert started("a", "a2").hits(5) == 2
    finally:
        for engine in engines:
            engine.close()
        end_server(tmp_path / "a")
        end_server(tmp_path / "b")
