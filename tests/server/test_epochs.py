"""Epochs: retired durably, never adopted twice, never guessed from a damaged file."""

import os
import resource
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.kit.server.clients import SmallEngine, poll_until, settings
from tests.kit.server.probe import figures, wait_for
from tiered_kv.config import Config
from tiered_kv.errors import ConfigError, TierUnavailable
from tiered_kv.keys.namespace import Namespace
from tiered_kv.server.compose import serve
from tiered_kv.server.epochs import EPOCHS, EpochFile, Epochs
from tiered_kv.server.server import Server
from tiered_kv.tiers.object.store import ObjectStore

ONE, TWO = b"1" * 16, b"2" * 16


def test_a_reset_is_remembered_for_its_namespace_only(tmp_path: Path) -> None:
    epochs = Epochs(EpochFile(tmp_path))
    assert epochs.base(ONE) == epochs.base(TWO) == "base-0"
    private = {epochs.retire(ONE) for _ in range(3)}
    assert len(private) == 3 and all(name.startswith("private-") for name in private)
    for known in (epochs, Epochs(EpochFile(tmp_path))):
        assert (known.base(ONE), known.base(TWO)) == ("base-3", "base-0")


@contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    """Files that this process writes end there, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe\x00", b'{"\xff": 1}', b"\0" * 40])
def test_a_damaged_file_retires_every_epoch_and_is_kept(tmp_path: Path, text: bytes) -> None:
    Epochs(EpochFile(tmp_path)).retire(ONE)
    (tmp_path / "epochs.json").write_bytes(text)
    epochs = Epochs(EpochFile(tmp_path))
    assert epochs.base(TWO) not in {"base-0", "base-1"}
    assert epochs.base(TWO) == Epochs(EpochFile(tmp_path)).base(TWO), "a start later it is the same"
    (kept,) = tmp_path.glob("epochs.damaged-*.json")
    assert kept.read_bytes() == text
    before = epochs.base(ONE)
    epochs.retire(ONE)
    assert epochs.base(ONE) != before


@pytest.mark.parametrize("text", [b"[]", b'{"a": "b"}', b"null", b'{"model": {"epochs": 3}}'])
def test_a_file_of_somebody_else_stops_the_start_and_stays(tmp_path: Path, text: bytes) -> None:
    """A training run's ``epochs.json``, say: what it holds is nothing that a crash makes of ours."""
    (tmp_path / "epochs.json").write_bytes(text)
    with pytest.raises(ConfigError, match=r"epochs\.json .* is not what a cache server writes, so it stays"):
        Epochs(EpochFile(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["epochs.json"]
    assert (tmp_path / "epochs.json").read_bytes() == text


def test_a_reset_that_is_not_durable_is_none(tmp_path: Path) -> None:
    epochs = Epochs(EpochFile(tmp_path))
    epochs.retire(ONE)
    with files_of_at_most(8), pytest.raises(TierUnavailable, match="cannot write the epochs"):
        epochs.retire(ONE)
    assert epochs.base(ONE) == Epochs(EpochFile(tmp_path)).base(ONE) == "base-1"


def test_a_file_that_cannot_be_read_is_not_a_damaged_one(tmp_path: Path) -> None:
    (tmp_path / "epochs.json").mkdir()
    with pytest.raises(TierUnavailable, match="cannot read the epochs"):
        Epochs(EpochFile(tmp_path))


def test_a_damaged_file_that_cannot_be_replaced_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "epochs.json").write_bytes(b"damaged")
    for _ in range(2):
        with files_of_at_most(8), pytest.raises(TierUnavailable, match="cannot write the epochs"):
            Epochs(EpochFile(tmp_path))
    assert (tmp_path / "epochs.json").read_bytes() == b"damaged"


class Background:
    """What the server's loop handed to another thread; runs when the test says so."""

    def __init__(self) -> None:
        self.tasks: deque[Callable[[], None]] = deque()

    def run(self, epochs: Epochs | EpochFile) -> None:
        self.tasks.popleft()()
        epochs.turn()


def test_a_reset_counts_when_it_is_written_and_nobody_adopts_an_epoch_before(tmp_path: Path) -> None:
    background = Background()
    epochs = Epochs(EpochFile(tmp_path, background.tasks.append))
    epochs.retire(ONE)
    assert (epochs.is_settled(ONE), epochs.base(ONE)) == (False, None)
    assert (epochs.is_settled(TWO), epochs.base(TWO)) == (True, "base-0"), "nobody else waits"
    assert Epochs(EpochFile(tmp_path)).base(ONE) == "base-0", "nothing is written by the loop itself"

    background.run(epochs)
    assert epochs.is_settled(ONE)
    assert epochs.base(ONE) == Epochs(EpochFile(tmp_path)).base(ONE) == "base-1"


def test_resets_during_a_save_are_written_by_the_next_one_in_their_order(tmp_path: Path) -> None:
    background = Background()
    epochs = EpochFile(tmp_path, background.tasks.append)
    epochs.retire(ONE, owes=True)
    epochs.pay(ONE)
    epochs.retire(ONE, owes=True)
    epochs.retire(TWO)
    assert len(background.tasks) == 1, "one save at a time, or an old one could replace a new one"

    background.run(epochs)
    assert not epochs.is_durable(ONE) and not epochs.is_durable(TWO)
    assert (EpochFile(tmp_path).base(ONE), epochs.owed) == ("base-1", [ONE])
    background.run(epochs)
    assert not background.tasks
    for known in (epochs, EpochFile(tmp_path)):
        assert (known.base(ONE), known.base(TWO), known.owed) == ("base-2", "base-1", [ONE])


def test_a_save_that_fails_fails_its_resets_and_not_the_next(tmp_path: Path) -> None:
    background = Background()
    epochs = Epochs(EpochFile(tmp_path, background.tasks.append))
    failing = epochs.retire(ONE)
    following = epochs.retire(TWO)
    with files_of_at_most(8):
        background.run(epochs)
    with pytest.raises(TierUnavailable, match="cannot write the epochs"):
        epochs.check(failing)
    background.run(epochs)
    epochs.check(following)
    assert (epochs.base(ONE), epochs.base(TWO)) == ("base-0", "base-1")


@contextmanager
def served_here(config: Config) -> Iterator[None]:
    """A server in a thread of this process, so that its calls can be held up."""
    is_ready = threading.Event()
    servers: list[Server] = []
    thread = threading.Thread(
        target=serve,
        args=(config,),
        kwargs={"until_idle": False, "on_ready": lambda info: is_ready.set(), "on_server": servers.append},
    )
    thread.start()
    try:
        assert is_ready.wait(20)
        yield
    finally:
        servers[0].stop()
        thread.join()


def test_a_disk_that_is_slow_to_write_a_reset_keeps_nobody_elses_lookups_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, may_go_on = os.fsync, threading.Event()
    begun = threading.Event()

    def slow(descriptor: int) -> None:
        begun.set()
        assert may_go_on.wait(60)
        fsync(descriptor)

    with served_here(settings(tmp_path)):
        one, other = (SmallEngine.start(settings(tmp_path), name, weights=name) for name in ("one", "other"))
        try:
            other.store(3)
            other.wait_hits(3)
            monkeypatch.setattr(os, "fsync", slow)
            one.client.reset()
            assert begun.wait(20)
            assert other.hits(3) == 3
            one.client.poll()
            assert not one.client.is_ready, "the reset is not durable yet"
            may_go_on.set()
            poll_until(one.client, lambda: one.client.is_ready, "the private epoch")
            assert one.client.namespace.fields["epoch"].startswith("private-")
            assert Epochs(EpochFile(tmp_path)).base(base_digest(one)) == "base-1"
        finally:
            may_go_on.set()
            for engine in (one, other):
                engine.close()


def test_a_bucket_that_hangs_at_a_reset_keeps_nobody_elses_lookups_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor an operator's questions; and so it is while it is asked for the epoch of one more engine."""
    may_go_on, hung = threading.Event(), []
    call = ObjectStore._call

    def hang(store: ObjectStore, operation: str, path: str, work: Callable[[Any], Any]) -> Any:
        hung.append(path)
        assert may_go_on.wait(60)
        return call(store, operation, path, work)

    bucket = f"shared+file://{tmp_path}/bucket"
    root = tmp_path / "cache"
    config = settings(root, storage_uri=bucket, disk_path=str(root), disk_bytes="160MiB")
    with served_here(config):
        one, other = (SmallEngine.start(config, name, weights=name) for name in ("one", "other"))
        late: list[SmallEngine] = []
        starting = threading.Thread(target=lambda: late.append(SmallEngine.start(config, "late", weights="late")))
        try:
            other.store(3)
            other.wait_hits(3)
            monkeypatch.setattr(ObjectStore, "_call", hang)
            one.client.reset()
            wait_for(lambda: any(EPOCHS in path for path in hung), "the bucket is told of the reset")
            hung.clear()
            starting.start()
            wait_for(lambda: any(EPOCHS in path for path in hung), "the bucket is asked for the late one's epoch")
            assert other.hits(3) == 3 and figures(root)["hierarchy"]["sessions"] >= 2
            one.client.poll()
            assert not one.client.is_ready and not late
            may_go_on.set()
            poll_until(one.client, lambda: one.client.is_ready, "the private epoch")
            assert one.client.namespace.fields["epoch"].startswith("private-")
            starting.join()
        finally:
            may_go_on.set()
            for engine in (one, other, *late):
                engine.close()


def base_digest(engine: SmallEngine) -> bytes:
    """The digest under which a directory counts the engine's resets."""
    return Namespace.from_fields(engine.client.namespace.fields | {"epoch": ""}).digest
