"""A turn of the server's loop takes in a part of what clients said: others are answered between, nothing is lost."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from tests.kit.server.clients import SmallEngine, content, hello, settings, tell
from tests.kit.server.probe import wait_for
from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.server import protocol as m
from tiered_kv.server import server as loop
from tiered_kv.server.compose import serve
from tiered_kv.server.connect import read_message
from tiered_kv.server.sessions import COMMITTED_AT_ONCE

CHUNKS = 5 * COMMITTED_AT_ONCE + 3


@dataclass
class HeldServer:
    """A real server in a thread, whose turns take in one part of what was said, and which can be held between turns."""

    root: Path
    may_go_on: threading.Event = field(default_factory=threading.Event)
    servers: list[loop.Server] = field(default_factory=list)

    def hold(self, server: loop.Server) -> None:
        self.servers.append(server)
        turn = server._turn

        def held(timeout_s: float) -> None:
            self.may_go_on.wait()
            turn(timeout_s)

        server._turn = held  # type: ignore[method-assign]

    def stop(self) -> None:
        self.may_go_on.set()
        for server in self.servers:
            server.stop()


@pytest.fixture
def held(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldServer]:
    monkeypatch.setattr(loop, "HEAR_S", 0.0)
    one, is_ready = HeldServer(root), threading.Event()
    one.may_go_on.set()
    config = settings(root, host_bytes=128 << 20)
    thread = threading.Thread(
        target=serve,
        args=(config,),
        kwargs={"until_idle": False, "on_ready": lambda _: is_ready.set(), "on_server": one.hold},
    )
    thread.start()
    assert is_ready.wait(20)
    try:
        yield one
    finally:
        one.stop()
        thread.join(20)
        assert not thread.is_alive()


def begin(root: Path, engine_id: str) -> SmallEngine:
    return SmallEngine.start(settings(root, host_bytes=128 << 20), engine_id)


def fill(one: SmallEngine) -> list[tuple[int, ChunkRecord]]:
    """A prompt's chunks in slots, to be committed with one message."""
    assert one.client.namespace is not None
    keys, filled = one.keys(CHUNKS), []
    for index in range(CHUNKS):
        slot = one.take_slot()
        with one.payload(slot) as view:
            view[:] = content(index)
        place = one.client.namespace.digest, keys.keys[index], keys.parent(index), index, keys.digests[index]
        filled.append((slot, ChunkRecord(*place)))
    return filled


def say(held: HeldServer, one: SmallEngine, filled: list[tuple[int, ChunkRecord]]) -> None:
    """Commit all of it while the server is held."""
    held.may_go_on.clear()
    one.client.commit(filled)
    one.client._flush()
    assert not one.client._outbox


def known(answer: m.Message) -> int:
    assert isinstance(answer, m.Stat)
    return int(msgspec.json.decode(answer.figures)["hierarchy"]["chunks"])


@pytest.mark.parametrize("is_behind", [False, True])
def test_others_are_answered_between_the_parts_of_a_commit(
    held: HeldServer, monkeypatch: pytest.MonkeyPatch, is_behind: bool
) -> None:
    if is_behind:  # also where as many jobs have ended as may wait, and more
        monkeypatch.setattr("tiered_kv.engine.engine.ENDED_MAX", 0)
    one = begin(held.root, "one")
    filled = fill(one)
    with hello(one.config) as sock:
        say(held, one, filled)
        tell(sock, m.StatRequest())
        held.may_go_on.set()
        assert known(read_message(sock)) < CHUNKS, "the commit was taken in whole before the question"
    one.wait_hits(CHUNKS)
    one.close()


def test_a_commit_that_is_being_taken_in_is_kept_when_its_worker_leaves(held: HeldServer) -> None:
    one, two = begin(held.root, "one"), begin(held.root, "two")
    filled = fill(one)
    say(held, one, filled)
    one.worker.leave()
    held.may_go_on.set()
    one.wait_lost()
    two.wait_hits(CHUNKS)
    one.close()
    two.close()


def test_what_follows_a_commit_comes_after_all_of_it(held: HeldServer) -> None:
    """A reset: chunks that were committed before it are of the namespace before it, and found there by others."""
    one, two = begin(held.root, "one"), begin(held.root, "two")
    filled = fill(one)
    say(held, one, filled)
    one.client.reset()
    one.client._flush()
    held.may_go_on.set()
    wait_for(lambda: one.client.poll() or one.client.is_ready, "the private epoch")
    assert one.hits(CHUNKS) == 0
    two.wait_hits(CHUNKS)
    one.close()
    two.close()
