"""A turn of the server's loop takes in a part of what clients said: others are answered between, nothing is lost."""

import mmap
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.kit.server.clients import SmallEngine, content, hello, payload_bytes, poll_until, settings, tell
from tests.kit.server.probe import answer_to, figures, wait_for, wait_written
from tiered_kv.engine.engine import Engine
from tiered_kv.engine.performer import Performer
from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.keys.row_names import RowNames
from tiered_kv.keys.tags import NO_TAG
from tiered_kv.server import protocol as m
from tiered_kv.server import server as loop
from tiered_kv.server import sessions
from tiered_kv.server.compose import serve
from tiered_kv.server.connect import read_message
from tiered_kv.server.sessions import COMMITTED_AT_ONCE, Sessions
from tiered_kv.server.stats import FigureSource
from tiered_kv.tiering import row_transfers
from tiered_kv.tiering.lookups import Promotions
from tiered_kv.tiering.secondary_tier import SecondaryTier
from tiered_kv.tiering.write_through import WRITES_MAX

CHUNKS = 5 * COMMITTED_AT_ONCE + 3


@dataclass
class HeldServer:
    """A real server in a thread, whose turns take in one part of what was said, and which can be held between turns."""

    root: Path
    may_go_on: threading.Event = field(default_factory=threading.Event)
    servers: list[loop.Server] = field(default_factory=list)
    most_ended: int = 0  # jobs that had ended and were not taken in
    was_behind: bool = False

    def hold(self, server: loop.Server) -> None:
        self.servers.append(server)
        turn = server._turn

        def held(timeout_s: float) -> None:
            self.may_go_on.wait()
            turn(timeout_s)
            self.most_ended = max(self.most_ended, len(server._engine._finished))
            self.was_behind |= server._engine.is_behind

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
    one = begin(held.root, "one")
    filled = fill(one)
    if is_behind:  # also where as many jobs have ended as may wait, and more
        monkeypatch.setattr("tiered_kv.engine.engine.ENDED_MAX", 0)
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


def lend_rows(one: SmallEngine) -> mmap.mmap:
    """Lend the server as many rows as a prompt has chunks; their memory, filled."""
    region = os.memfd_create("rows")
    os.truncate(region, CHUNKS * payload_bytes())
    rows = mmap.mmap(region, CHUNKS * payload_bytes())
    for row in range(CHUNKS):
        rows[row * payload_bytes() : (row + 1) * payload_bytes()] = content(row)
    watched, lifeline = os.pipe()
    socket.send_fds(one.worker._sock, [m.frame(m.LendRows(CHUNKS, payload_bytes()))], [region, lifeline])
    for fd in (region, watched, lifeline):
        os.close(fd)
    assert read_message(one.worker._sock) == m.RowsTaken("")
    return rows


def ended_well(one: SmallEngine) -> set[int]:
    """Wait until all uses of rows are over; all must have ended well."""
    good: set[int] = set()

    def is_over() -> bool:
        one.client.poll()
        while one.client.rows_ended:
            ended = one.client.rows_ended.popleft()
            assert not (ended.bad or ended.elsewhere)
            good.update(ended.good)
        return len(good) == CHUNKS

    wait_for(is_over, "the rows")
    return good


def test_others_are_answered_between_the_parts_of_a_store_and_of_a_load_of_rows(
    held: HeldServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    for name in ("store_rows", "load_rows"):
        monkeypatch.setattr(Engine, name, noting(getattr(Engine, name), name, events))
    monkeypatch.setattr(FigureSource, "now", noting(FigureSource.now, "answer", events))
    one = begin(held.root, "one")
    memory, space = lend_rows(one), one.client.namespace
    assert space is not None
    names = RowNames(space, [index.to_bytes(32, "little") + bytes(4) for index in range(CHUNKS)])
    records = [names.record(index, NO_TAG) for index in range(CHUNKS)]
    stores = [(row, row, record) for row, record in enumerate(records)]
    loads = [(CHUNKS + row, row, name) for row, name in enumerate(names.names)]
    with hello(one.config) as sock:
        for message in (m.StoreRows(stores), m.LoadRows(loads)):
            held.may_go_on.clear()
            events.clear()
            one.client._send(message)
            one.client._flush()
            tell(sock, m.StatRequest())
            held.may_go_on.set()
            assert isinstance(read_message(sock), m.Stat)
            assert len(ended_well(one)) == CHUNKS
            parts = len(events) - 1
            assert parts == -(-CHUNKS // COMMITTED_AT_ONCE), "it was not taken in in parts"
            assert events.index("answer") < parts, "it was taken in in whole before the question"
            assert all(memory[row * payload_bytes() :][: payload_bytes()] == content(row) for row in range(CHUNKS))
            memory[:] = bytes(len(memory))
    one.close()


@pytest.mark.parametrize("is_leaving", [False, True])
def test_others_are_answered_while_a_hanging_disks_rows_are_taken_back_or_their_engine_leaves(
    held: HeldServer, monkeypatch: pytest.MonkeyPatch, is_leaving: bool
) -> None:
    for module in (sessions, row_transfers):
        monkeypatch.setattr(module, "TAKEN_BACK_AT_ONCE", 8, raising=False)
    events: list[str] = []
    monkeypatch.setattr(Engine, "store_rows", noting(Engine.store_rows, "store", events))
    monkeypatch.setattr(SecondaryTier, "drop", noting(SecondaryTier.drop, "dropped", events))
    monkeypatch.setattr(Engine, "step", noting(Engine.step, "turn", events))
    may_write, write = threading.Event(), Performer.write_row

    def hanging(*args: Any) -> Any:
        may_write.wait(60)
        return write(*args)

    monkeypatch.setattr(Performer, "write_row", hanging)
    one = begin(held.root, "one")
    memory, space = lend_rows(one), one.client.namespace
    assert space is not None
    names = RowNames(space, [index.to_bytes(32, "little") + bytes(4) for index in range(CHUNKS)])
    one.client._send(m.StoreRows([(row, row, names.record(row, NO_TAG)) for row in range(CHUNKS)]))
    one.client._flush()
    wait_for(lambda: events.count("store") == -(-CHUNKS // COMMITTED_AT_ONCE), "the store")
    with hello(one.config) as sock:
        held.may_go_on.clear()
        events.clear()
        if is_leaving:
            one.client.close()
        else:
            one.client._send(m.TakeRowsBack(list(range(CHUNKS))))
            one.client._flush()
        tell(sock, m.StatRequest())
        held.may_go_on.set()
        assert isinstance(read_message(sock), m.Stat)
        bad: list[int] = []

        def is_over() -> bool:
            one.client.poll()
            while one.client.rows_ended:
                bad.extend(one.client.rows_ended.popleft().bad)
            return len(bad) >= CHUNKS

        try:
            wait_for(lambda: is_leaving or is_over(), "the rows")
            wait_for(lambda: events.count("dropped") == CHUNKS - WRITES_MAX, "all that was not begun")
        finally:
            may_write.set()
    assert is_leaving or sorted(bad) == list(range(CHUNKS)), "a use ended twice, or another one"
    most = max(len(list(run)) for event, run in groupby(events) if event == "dropped")
    assert most <= 8, "a turn took back more of them than a part"
    wait_for(lambda: figures(held.root)["hierarchy"]["chunks"] == 0, "the writes")
    memory.close()
    one.close()


def test_others_are_answered_between_the_parts_of_a_lookup_from_disk_and_its_bytes_are_right(
    held: HeldServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = begin(held.root, "one")
    one.store(CHUNKS)
    wait_written(held.root)
    answer_to(held.root, m.Evict("host", b"", b"", holes=True))
    assert figures(held.root)["hierarchy"]["host_ready_chunks"] == 0
    monkeypatch.setattr("tiered_kv.tiering.lookups.READ_AT_ONCE", 4)
    events: list[str] = []
    monkeypatch.setattr(Promotions, "start", noting(Promotions.start, "part", events))
    monkeypatch.setattr(FigureSource, "now", noting(FigureSource.now, "answer", events))
    with hello(one.config) as sock:
        held.may_go_on.clear()
        keys = one.keys(CHUNKS)
        lookup = one.client.lookup(keys.keys, keys.digests)
        assert lookup is not None
        one.client._flush()
        tell(sock, m.StatRequest())
        held.may_go_on.set()
        assert isinstance(read_message(sock), m.Stat)
        poll_until(one.client, lambda: one.client.lookups[lookup].is_done, "the answer")
    answer = one.client.lookups[lookup]
    assert (answer.held, answer.ready, answer.queued, set(answer.sources)) == (CHUNKS, CHUNKS, 0, {1})
    one.check_slots(answer.slots)
    assert len(events) - 1 >= CHUNKS // 4, "it was not looked up in parts"
    assert events.index("answer") < len(events) - 1, "it was through before the question"
    one.client.release(lookup)
    one.close()


def noting(method: Callable[..., Any], name: str, events: list[str]) -> Callable[..., Any]:
    """The method, which notes that it was called."""

    def noted(*args: Any, **options: Any) -> Any:
        events.append(name)
        return method(*args, **options)

    return noted


def test_leases_that_are_over_at_once_end_in_parts(held: HeldServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiered_kv.server.sessions.END_S", 0.0)
    events: list[str] = []
    monkeypatch.setattr(Engine, "release", noting(Engine.release, "release", events))
    monkeypatch.setattr(Sessions, "end_leases", noting(Sessions.end_leases, "turn", events))
    config = settings(held.root, host_bytes=128 << 20, lease_s=1.0)
    one = SmallEngine.start(config, "one")
    one.store(CHUNKS)
    one.wait_hits(CHUNKS)
    wait_for(lambda: figures(held.root)["hierarchy"]["leased_bytes"] == 0, "the lookups before")
    keys = one.keys(CHUNKS)
    events.clear()
    lookups = [one.client.lookup(keys.keys, keys.digests) for _ in range(8)]
    poll_until(one.client, lambda: all(one.client.lookups[number].is_ended for number in lookups), "the ends")
    wait_for(lambda: figures(held.root)["hierarchy"]["leased_bytes"] == 0, "the leases")
    assert events.count("release") == len(lookups)
    assert all("turn" in pair for pair in pairwise(events)), "a turn ended the leases of several lookups"
    one.close()


def test_a_loop_that_is_behind_is_brought_no_more_than_it_has_granted(
    held: HeldServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three engines store small chunks as fast as they get slots, and a step takes in one job that has ended."""
    ended_max, slots, chunks = 40, 32, 300
    monkeypatch.setattr("tiered_kv.engine.engine.ENDED_MAX", ended_max)
    monkeypatch.setattr("tiered_kv.engine.engine.SLICE_S", 0.0)
    monkeypatch.setattr("tiered_kv.tiering.slot_grants.CREDITS_MAX", slots)
    engines = [begin(held.root, str(number)) for number in range(3)]
    stored = [0] * len(engines)
    keys = [one.keys(chunks, number) for number, one in enumerate(engines)]
    for one in engines:
        one.client.wake()
    while min(stored) < chunks:
        for number, one in enumerate(engines):
            one.client.poll()
            filled = []
            while one.client.credit_count and stored[number] < chunks:
                slot, index = one.client.take_slot(), stored[number]
                assert slot is not None and one.client.namespace is not None
                with one.payload(slot) as view:
                    view[:] = content(index, number)
                key = keys[number]
                place = one.client.namespace.digest, key.keys[index], key.parent(index), index, key.digests[index]
                filled.append((slot, ChunkRecord(*place)))
                stored[number] += 1
            if filled:
                one.client.commit(filled)
    for number, one in enumerate(engines):
        one.wait_hits(chunks, number)
    # When it fell behind, each engine had so many slots, of which each becomes a seal, and then one of few writes.
    most = ended_max + len(engines) * slots + WRITES_MAX
    assert held.was_behind and held.most_ended <= most
    for one in engines:
        one.close()
