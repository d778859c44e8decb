"""Bounds of what hints and users' sessions can make a server remember and do, on an engine that is stepped by hand."""

import json
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import pytest

from tests.kit.engine_world import BLOB_BYTES, SPACES, EngineWorld
from tests.kit.samples.formats import sample_namespace
from tiered_kv.keys.tags import NO_TAG, session_name, tag_digest
from tiered_kv.server import prefetching, user_sessions
from tiered_kv.server import protocol as m
from tiered_kv.server.hint_requests import BODY_BYTES_MAX, CHUNKS_MAX, HintRefused, HintRequests
from tiered_kv.server.prefetching import PREFETCH_MAX_S, Prefetching, WantedPrefix
from tiered_kv.server.user_sessions import GIVE_UP_S, RETRY_S, Line, UserSessions
from tiered_kv.testing.memory import MemoryTier
from tiered_kv.tiering.lookups import LookupRequest

SPACE = SPACES["small"]
MINE, THEIRS = tag_digest("mine"), tag_digest("theirs")


@pytest.fixture
def world() -> Iterator[EngineWorld]:
    made = EngineWorld(MemoryTier(1 << 30), host_bytes=16 * BLOB_BYTES)
    yield made
    made.close()


def test_a_prompt_of_more_chunks_than_a_message_holds_is_refused_before_it_is_hashed() -> None:
    space = sample_namespace(chunk_tokens=16)
    framed: list[bytes] = []

    def pass_on(message: m.Message, expected: type[Any]) -> Any:
        framed.append(m.frame(message))
        return m.NamespaceRecord(space.record, []) if expected is m.NamespaceRecord else m.Hinted("done", 1)

    def prefetch(chunks: int) -> HTTPStatus:
        body = json.dumps({"token_ids": [1] * (16 * chunks)}, separators=(",", ":")).encode()
        assert len(body) <= BODY_BYTES_MAX
        return HintRequests(pass_on).answer("prefetch", lambda: body)[0]

    assert prefetch(CHUNKS_MAX) == HTTPStatus.ACCEPTED
    assert len(framed) == 2 and len(framed[1]) > m.FRAME_BYTES_MAX - 5000
    with pytest.raises(HintRefused, match=f"at most {CHUNKS_MAX} chunks of 16") as refused:
        prefetch(CHUNKS_MAX + 1)
    assert refused.value.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE


def name(number: int, tag: bytes = NO_TAG) -> bytes:
    return session_name(f"run {number}", tag)


def tell(users: UserSessions, path: tuple[int, ...], number: int, tag: bytes = NO_TAG) -> None:
    users.told(SPACE.namespace, m.SessionState(name(number, tag), tag, SPACE.key(path)))


def count(world: EngineWorld, counter: str) -> int:
    return world.tiering.counters[counter]


def test_of_a_state_its_end_and_ever_fewer_chunks_before_it_are_remembered() -> None:
    prefix = [bytes([number]) * 16 for number in range(100)]
    assert [key[0] for key in Line.of(b"", prefix).keys] == [99, 98, 97, 95, 91, 83, 67, 35]
    assert [key[0] for key in Line.of(b"", prefix[:1]).keys] == [0]
    assert [key[0] for key in Line.of(b"", prefix[:3]).keys] == [2, 1, 0]


def test_what_is_remembered_is_bounded_in_all_and_for_each_tag(
    world: EngineWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_sessions, "TENANT_MAX", 3)
    monkeypatch.setattr(user_sessions, "SESSIONS_MAX", 5)
    session = world.open()
    world.settle()
    world.store(session, (1,))
    users = UserSessions(world.engine, lambda _: False)
    tell(users, (1,), 0, THEIRS)
    for number in range(10):
        tell(users, (1,), number, MINE)
    assert len(users) == 4, "one tag's many sessions leave the other's"
    assert users.end(name(0, THEIRS)) == 1 and users.end(name(0, MINE)) == 0 and users.end(name(9, MINE)) == 1
    for number in range(10):
        tell(users, (1,), number, tag_digest(f"tenant {number}"))
    assert len(users) == 5
    assert users.end(name(4, tag_digest("tenant 4"))) == 0 and users.end(name(5, tag_digest("tenant 5"))) == 1


def test_what_is_in_use_is_tried_again_for_a_while_and_then_left(world: EngineWorld) -> None:
    session = world.open()
    world.settle()
    world.store(session, (1, 2))
    users = UserSessions(world.engine, lambda _: False)
    tell(users, (1, 2), 0)
    keys, digests = SPACE.prefix((1, 2))
    lookup = world.engine.lookup(session, LookupRequest(keys, digests, owner=name(0)))
    world.settle()
    assert users.end(name(0)) == 1
    for _ in range(int(GIVE_UP_S / RETRY_S) + 2):
        users.step()
        world.clock.advance(RETRY_S)
    assert not users.wants_turn and count(world, "session_chunks_released") == 0
    world.engine.release(session, lookup)
    users.step()
    world.settle()
    assert world.loaded(session, (1, 2)) == 2, "it is left to eviction"
    world.check_idle()


def test_more_releases_at_once_than_may_wait_are_dropped(world: EngineWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_sessions, "RELEASES_MAX", 2)
    session = world.open()
    world.settle()
    users = UserSessions(world.engine, lambda _: False)
    for number in range(4):
        world.store(session, (number,))
        tell(users, (number,), number)
    for number in range(4):
        assert users.end(name(number)) == 1
    users.step()
    world.settle()
    assert count(world, "session_releases_dropped") == 2 and count(world, "session_chunks_released") == 2


def test_a_long_release_goes_on_turn_by_turn(world: EngineWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice of no time: one step of it in each turn."""
    monkeypatch.setattr("tiered_kv.tiering.owners.STEP", 2)
    monkeypatch.setattr(user_sessions, "SLICE_S", 0.0)
    session = world.open()
    world.settle()
    world.store(session, tuple(range(7)))
    users = UserSessions(world.engine, lambda _: False)
    tell(users, tuple(range(7)), 0)
    users.end(name(0))
    turns = 0
    while not count(world, "session_chunks_released"):
        users.step()
        world.settle()
        turns += 1
    assert turns > 3 and count(world, "session_chunks_released") == 7
    assert world.loaded(session, tuple(range(7))) == 0
    world.check_idle()


def test_the_end_of_a_session_that_is_just_prefetched_waits_for_that(world: EngineWorld) -> None:
    session = world.open()
    world.settle()
    world.store(session, (1, 2))
    users, one = UserSessions(world.engine, lambda _: False), Prefetching(world.engine, lambda _: True)
    tell(users, (1, 2), 0)
    keys, digests = SPACE.prefix((1, 2))
    list(world.tiering.removing(0, SPACE.namespace, keys, leaves_holes=False))
    assert one.begin(session, WantedPrefix(SPACE.namespace, keys, digests, owner=name(0)), NO_TAG)
    users.end(name(0))
    users.step()
    assert count(world, "session_chunks_released") == 0, "its blobs are being read"
    settle(world, one)
    world.clock.advance(RETRY_S)
    users.step()
    settle(world, one)
    assert count(world, "session_chunks_released") == 2 and world.loaded(session, (1, 2)) == 0
    world.check_idle()


def prefetch(one: Prefetching, session: int, path: tuple[int, ...], tag: bytes = NO_TAG) -> bool:
    keys, digests = SPACE.prefix(path)
    return one.begin(session, WantedPrefix(SPACE.namespace, keys, digests), tag)


def settle(world: EngineWorld, one: Prefetching) -> None:
    """As the server's loop does."""
    while True:
        for update in world.engine.step():
            one.take(update)
        one.step()
        if not world.executor.step(lambda _count: 0):  # type: ignore[attr-defined]
            return


def test_prefetches_are_bounded_in_all_and_for_each_tag(world: EngineWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetching, "TENANT_MAX", 2)
    monkeypatch.setattr(prefetching, "AT_ONCE_MAX", 3)
    session = world.open()
    world.settle()
    one = Prefetching(world.engine, lambda _: True)
    begun = [prefetch(one, session, (1,), tag) for tag in (MINE, MINE, MINE, THEIRS, NO_TAG)]
    assert begun == [True, True, False, True, False]
    settle(world, one)
    assert prefetch(one, session, (1,), MINE), "those have ended"
    assert count(world, "prefetches_refused") == 2
    settle(world, one)
    world.check_idle()


def test_a_prefetch_that_hangs_or_whose_engine_leaves_holds_nothing(world: EngineWorld) -> None:
    session = world.open()
    world.settle()
    world.store(session, (1, 2))
    keys, _ = SPACE.prefix((1, 2))
    list(world.tiering.removing(0, SPACE.namespace, keys, leaves_holes=False))
    gone = set[int]()
    one = Prefetching(world.engine, lambda number: number not in gone)
    assert prefetch(one, session, (1, 2))
    for update in world.engine.step():
        one.take(update)
    assert world.tiering.usage()["lookups"] == 1, "its read has not ended"
    world.clock.advance(PREFETCH_MAX_S)
    one.step()
    assert world.tiering.usage()["lookups"] == 0
    assert prefetch(one, session, (1, 2))
    world.engine.close_session(session)
    gone.add(session)
    one.step()
    settle(world, one)
    del world.clients[session]
    world.check_idle()


def test_a_prefetch_is_no_prompt_of_the_miss_ratio_curve(world: EngineWorld) -> None:
    """The request that follows counts, also the one whose prompt is just what was prefetched."""
    session = world.open()
    world.settle()
    world.store(session, (1, 2))
    one, curves = Prefetching(world.engine, lambda _: True), world.tiering.miss_ratio
    assert prefetch(one, session, (1, 2))
    assert (curves.curves(), curves.sample_count) == ({}, 2)
    world.release(world.lookup(session, (1, 2)))
    assert curves.curves()[SPACE.namespace].chunks == 2, "while it runs"
    settle(world, one)
    world.release(world.lookup(session, (1, 2)))
    assert curves.curves()[SPACE.namespace].chunks == 4, "after its end"
    settle(world, one)
    world.check_idle()
