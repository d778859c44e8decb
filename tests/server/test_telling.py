"""What a scheduler is told by a real server: where hits come from, which chunks come and go, and figures on demand."""

import socket
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.kit.server.clients import CHUNK, SmallEngine, payload_bytes, poll_until, settings, worker_part
from tests.kit.server.probe import figures, wait_ended, wait_written
from tiered_kv.metrics.figures import ServerFigures
from tiered_kv.ops.server_link import ServerLink
from tiered_kv.server import client, sessions
from tiered_kv.server import protocol as m
from tiered_kv.server.client import SchedulerClient
from tiered_kv.server.connection import Connection
from tiered_kv.server.worker_client import WorkerClient
from tiered_kv.tiering.types import HOST, LookupAnswer, TierEvents

KEY = bytes(range(16))


def watching(root: Path, engine_id: str) -> SmallEngine:
    """An engine that is told which chunks come and go."""
    config = settings(root)
    worker = WorkerClient(config, engine_id, 0, worker_part())
    client = SchedulerClient(config, engine_id, 1, is_watching=True)
    assert client.wait_ready(20), client.refusal
    return SmallEngine(client, worker, config, engine_id, "w")


def take_moves(engine: SmallEngine, count: int) -> list[tuple[str, bool, bytes]]:
    """The next ``count`` chunks told of, by the tier's name."""
    poll_until(engine.client, lambda: sum(len(one.keys) for one in engine.client.moves) >= 16 * count, "moves")
    moves = [
        (engine.client.tiers[one.tier], one.is_here, one.keys[at : at + 16])
        for one in engine.client.moves
        for at in range(0, len(one.keys), 16)
    ]
    engine.client.moves.clear()
    return moves


def test_who_watches_is_told_of_everybodys_chunks_and_nobody_else_is(
    root: Path, engine: Callable[..., SmallEngine]
) -> None:
    other = engine("other")
    mine = watching(root, "mine")
    other.store(2)
    keys = mine.keys(2).keys
    assert sorted(take_moves(mine, 4)) == sorted((tier, True, key) for tier in ("host", "disk") for key in keys)
    with ServerLink.of_socket(f"unix://{_socket(root)}", 20) as link:
        link.evict("disk", b"", None, holes=True)
    assert sorted(take_moves(mine, 2)) == sorted(("disk", False, key) for key in keys)
    other.client.poll()
    assert not other.client.moves
    mine.close()


def _socket(root: Path) -> Path:
    from tiered_kv.server.directory import read_info

    info = read_info(root)
    assert info is not None
    return Path(info.socket)


def test_after_a_reset_the_new_namespace_is_told_of(root: Path) -> None:
    mine = watching(root, "mine")
    before = mine.client.namespace
    mine.client.reset()
    poll_until(mine.client, lambda: mine.client.is_ready and mine.client.namespace != before, "the private epoch")
    mine.client.moves.clear()
    mine.store(1)
    assert take_moves(mine, 2) == [(tier, True, mine.keys(1).keys[0]) for tier in ("host", "disk")]
    mine.close()


def after_a_restart(root: Path, engine: Callable[..., SmallEngine], first: SmallEngine) -> SmallEngine:
    """Another engine, with a server that has on disk what the first one stored."""
    wait_written(root)
    first.close()
    wait_ended(root)
    return engine("second")


def on_disk(root: Path, engine: Callable[..., SmallEngine], count: int) -> SmallEngine:
    """An engine whose server finds so many chunks of a prompt on disk."""
    first = engine("first")
    first.store(count)
    first.wait_hits(count)
    return after_a_restart(root, engine, first)


def test_hits_name_the_tier_that_gave_them(root: Path, engine: Callable[..., SmallEngine]) -> None:
    first = engine("first")
    first.store(2)
    first.wait_hits(2)
    lookup, answer = first.look_up(3)
    assert (first.client.tiers, answer.sources) == (("host", "disk"), bytes([0, 0]))
    first.client.release(lookup)
    ended = first.client.ended.pop()
    assert (ended.asked, ended.answer.ready, ended.start) == (3, 2, 0)
    second = after_a_restart(root, engine, first)
    lookup, answer = second.look_up(2)
    assert answer.sources == bytes([1, 1])
    second.client.release(lookup)
    assert second.look_up(2)[1].sources == bytes([0, 0])


def test_slots_are_told_once_and_then_only_how_many_are_ready(
    root: Path, engine: Callable[..., SmallEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler decodes the slots of a prompt once, however many parts it arrives in."""
    second, told = on_disk(root, engine, 24), list[m.Message]()
    take = second.client._take

    def noted(message: object) -> None:
        assert isinstance(message, m.Message)
        told.append(message)
        take(message)

    monkeypatch.setattr(second.client, "_take", noted)
    lookup, answer = second.look_up(24)
    second.check_slots(answer.slots)
    assert (answer.ready, answer.is_done, answer.held, answer.sources) == (24, True, 24, bytes([1] * 24))
    about = [one for one in told if isinstance(one, m.Updated | m.Progressed)]
    assert [type(one) for one in about] == [m.Updated, *[m.Progressed] * (len(about) - 1)] and len(about) > 1
    second.client.release(lookup)
    lookup, again = second.look_up(24)
    assert (again.ready, again.sources) == (24, bytes(24)), "another lookup is told whole"
    second.client.release(lookup)


def test_a_lookup_that_is_not_followed_is_told_of_twice(
    root: Path, engine: Callable[..., SmallEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes, and that all is here; and once more for whoever begins to follow it then."""
    second = on_disk(root, engine, 24)
    keys, told = second.keys(24), list[LookupAnswer]()
    note = second.client._note

    def noted(number: int, answer: LookupAnswer) -> None:
        note(number, answer)
        if answer.is_answered:
            told.append(answer)

    monkeypatch.setattr(second.client, "_note", noted)
    lookup = second.client.lookup(keys.keys, keys.digests, is_followed=False)
    assert lookup is not None
    poll_until(second.client, lambda: told[-1:] and told[-1].is_done, "the end")
    coming, here = told
    assert (coming.held, coming.is_done, sum(run.chunks for run in coming.arriving)) == (24, False, 24 - coming.ready)
    assert (here.ready, here.is_done, here.sources) == (24, True, bytes([1] * 24))
    second.check_slots(here.slots)
    second.client.follow(lookup)
    poll_until(second.client, lambda: len(told) == 3, "the answer")
    assert told[2] == here
    second.client.release(lookup)
    second.client.follow(lookup)  # crosses its end
    assert second.hits(24) == 24


def test_progress_keeps_all_but_what_has_arrived() -> None:
    before = LookupAnswer(held=2, slots=(4, 5), sources=bytes(2), is_answered=True)
    after = m.Progressed(1, 2, True, ()).after(before)
    assert after == LookupAnswer(2, (4, 5), 2, True, sources=bytes(2), is_answered=True)
    assert after.slots is before.slots


def test_a_scheduler_may_ask_for_figures_and_what_was_stored_less_removed_is_there(
    root: Path, engine: Callable[..., SmallEngine]
) -> None:
    one = engine()
    one.store(5)
    one.wait_hits(5)
    wait_written(root)
    assert one.client.ask_figures()
    poll_until(one.client, lambda: one.client.figures is not None, "the figures")
    assert one.client.figures is not None
    told = msgspec.json.decode(one.client.figures, type=ServerFigures)
    host, disk = told.flows
    assert (host.tier, host.stored, host.removed) == ("host", {"new": 5}, {})
    assert (disk.tier, disk.stored, disk.resident_chunks) == ("disk", {"written": 5}, 5)
    assert disk.stored_bytes == disk.resident_bytes == 5 * (payload_bytes() + 4096) == told.tiers[0].used_bytes
    assert told.tokens.hit_tokens + told.tokens.missed_tokens == told.tokens.asked_tokens >= 5 * CHUNK


def test_moves_never_end_the_session_of_a_client_that_is_slow_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MOVES_OUTBOX_MAX", 1000)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection = Connection(ours)
        moves = TierEvents(1, HOST, is_here=True, keys=(KEY,) * 10_000)
        lacks_some = False
        for _ in range(100):
            lacks_some = sessions.tell_moves(connection, moves, lacks_some=lacks_some)
        waiting = connection.outbox_bytes
        assert 1000 < waiting < 400_000
        assert sessions.tell_moves(connection, moves, lacks_some=lacks_some)
        assert connection.outbox_bytes == waiting
        reader, received = m.FrameReader(m.FromServer), list[m.Moved]()
        while connection.wants_write:
            received += reader.feed(theirs.recv(1 << 20))
            connection.flush()
        last = TierEvents(1, HOST, is_here=False, keys=(KEY,))
        assert not sessions.tell_moves(connection, last, lacks_some=True)
        received += reader.feed(theirs.recv(1 << 20))
        assert received[-1] == m.Moved(HOST, False, KEY)
        assert received[-3:-1] == [m.MOVES_LOST] * 2, "behind what was told, and before what is told again"
        assert m.MOVES_LOST not in received[:-3]


def test_more_moves_than_are_kept_for_a_router_are_said_to_be_lost(
    served: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "MOVES_MAX", 3)
    one = watching(served, "watcher")
    told = [m.Moved(HOST, True, bytes([number]) * 16) for number in range(7)]
    for moved in told:
        one.client._take(moved)
    assert list(one.client.moves) == [m.MOVES_LOST, *told[5:]]
    one.close()


def test_many_moves_are_told_in_frames_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "KEYS_MAX", 3)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        keys = tuple(bytes([i]) * 16 for i in range(7))
        sessions.tell_moves(Connection(ours), TierEvents(1, 1, is_here=False, keys=keys), lacks_some=False)
        received = list(m.FrameReader(m.FromServer).feed(theirs.recv(1 << 20)))
    assert [(one.tier, one.is_here, len(one.keys)) for one in received] == [
        (1, False, 48),
        (1, False, 48),
        (1, False, 16),
    ]


def test_figures_of_a_server_have_every_tier(served: Path) -> None:
    assert [flow["tier"] for flow in figures(served)["flows"]] == ["host", "disk"]
