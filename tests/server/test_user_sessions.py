"""Users' sessions on a real server: what their end frees, what a newer state lets go, what a prefetch brings up."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.kit.server.clients import CHUNK, SmallEngine, hello, poll_until, settings, tell
from tests.kit.server.probe import counted, figures, in_memory, wait_for, wait_written
from tests.kit.server.processes import end_server
from tests.kit.storage.disk_probe import blob_files
from tiered_kv.keys.tags import NO_TAG, session_name, tag_digest
from tiered_kv.server import protocol as m
from tiered_kv.server.connect import read_message
from tiered_kv.server.user_sessions import LINES_MAX
from tiered_kv.tiers.disk.pins import read_pins

EngineStarter = Callable[..., SmallEngine]

ALICE, BOB = session_name("alice", NO_TAG), session_name("bob", NO_TAG)
OTHER = 1_000_000


def wait_counted(root: Path, name: str, value: int) -> None:
    wait_for(lambda: counted(root, name) == value, f"{name}={value}")


def files(root: Path) -> int:
    return len(blob_files(root))


def turn(one: SmallEngine, chunks: int, session: bytes, first_token: int = 0) -> None:
    """One request of a user's session: looked up, stored from where it was not held, and told of."""
    held = one.hits(chunks, first_token, session=session)
    one.store(chunks, first_token, start=held)
    wait_written(one.root)
    one.client.tell_state(session, NO_TAG, one.keys(chunks, first_token).keys[-1])


def prompt(shared: int, own: int, number: int) -> list[int]:
    """Chunks that every prompt begins with, and some of its own."""
    return [*range(shared * CHUNK), *range(number * OTHER, number * OTHER + own * CHUNK)]


def end(one: SmallEngine, session: bytes) -> None:
    assert one.client.hint("release", session, NO_TAG)


def ask(root: Path, hint: m.Hint) -> m.Hinted:
    """As a gateway's request arrives at the server."""
    with hello(settings(root, host_bytes=None, disk_bytes=None)) as sock:
        tell(sock, hint)
        answer = read_message(sock)
    assert isinstance(answer, m.Hinted)
    return answer


def test_the_end_of_a_session_frees_memory_and_disk_and_what_it_shares_stays(engine: EngineStarter, root: Path) -> None:
    one = engine()
    keys = one.store_tokens(prompt(4, 3, 1), ALICE), one.store_tokens(prompt(4, 6, 2), BOB)
    wait_counted(root, "session_states", 2)
    wait_for(lambda: (in_memory(root), files(root)) == (13, 13), "both sessions")
    end(one, ALICE)
    wait_for(lambda: (in_memory(root), files(root)) == (10, 10), "what only the first had, in memory and on disk")
    assert counted(root, "session_chunks_released") == 3
    assert one.hits_of(keys[1], session=BOB) == 10, "the other's, with right bytes"
    assert one.hits_of(keys[0], session=BOB) == 4
    end(one, BOB)
    wait_for(lambda: (in_memory(root), files(root)) == (4, 4), "what only the second had")
    end(one, BOB)
    wait_counted(root, "hints_of_nothing", 1)


def test_a_session_grows_and_its_newest_state_is_all_of_it(engine: EngineStarter, root: Path) -> None:
    one = engine()
    for chunks in (2, 5, 6):
        turn(one, chunks, ALICE)
    wait_counted(root, "session_states", 3)
    assert one.hits(6, session=ALICE) == 6
    end(one, ALICE)
    wait_for(lambda: (in_memory(root), files(root)) == (0, 0), "nothing left")


def test_an_end_that_the_session_has_left_leaves_memory_alone_once_it_has_gone_on(
    engine: EngineStarter, root: Path
) -> None:
    one = engine()
    old = one.store_tokens(prompt(6, 2, 1), ALICE)
    one.store_tokens(prompt(6, 1, 2), ALICE)
    wait_counted(root, "session_states", 2)
    assert one.hits_of(old, session=ALICE) == 8, "it may be another line"
    new = one.store_tokens(prompt(6, 3, 2), ALICE)
    wait_for(lambda: (in_memory(root), files(root)) == (9, 11), "the older one's end is on disk only")
    assert one.hits_of(new, session=ALICE) == 9 and one.hits_of(old, session=ALICE) == 8
    assert counted(root, "session_chunks_demoted") == 2 and counted(root, "session_chunks_released") == 0


def test_a_name_that_all_users_share_costs_none_of_them_a_chunk(engine: EngineStarter, root: Path) -> None:
    """A constant ``session_id``: conversations behind one long system prompt that go on in any order."""
    one = engine()
    numbers = range(1, LINES_MAX + 3)
    for own in (1, 2, 3):
        for number in numbers:
            one.store_tokens(prompt(9, own, number), ALICE)
            one.store_tokens(prompt(9, own, number), ALICE)
    wait_counted(root, "session_states", 2 * 3 * len(numbers))
    assert [one.hits_of(one.keys_of(prompt(9, 3, number)), session=ALICE) for number in numbers] == [12] * len(numbers)
    assert counted(root, "session_chunks_released") == 0 and files(root) == 9 + 3 * len(numbers)


def test_lines_that_go_on_in_turns_or_have_much_of_their_own_stay(engine: EngineStarter, root: Path) -> None:
    one = engine()
    for own in (1, 2, 3):
        for number in (1, 2):
            one.store_tokens(prompt(9, own, number), ALICE)
    one.store_tokens(prompt(9, 4, 1), ALICE)
    wait_counted(root, "session_states", 7)
    assert counted(root, "session_chunks_demoted") == 0
    assert one.hits_of(one.keys_of(prompt(9, 3, 2)), session=ALICE) == 12
    one.store_tokens(prompt(4, 8, 3), ALICE)
    one.store_tokens(prompt(4, 9, 3), ALICE)
    one.store_tokens(prompt(4, 10, 3), ALICE)
    wait_counted(root, "session_states", 10)
    assert counted(root, "session_chunks_demoted") == 0, "a helper that waits for another one"
    end(one, ALICE)
    wait_for(lambda: (in_memory(root), files(root)) == (0, 0), "all lines")


def test_a_helper_with_a_prompt_of_its_own_is_another_line_and_its_end_ends_those_that_are_forgotten(
    engine: EngineStarter, root: Path
) -> None:
    one = engine()
    main = one.store_tokens(prompt(1, 5, 1), ALICE)
    for number in (2, 3, 4):
        one.store_tokens(prompt(1, 2, number), ALICE)
    wait_counted(root, "session_states", 4)
    assert one.hits_of(main, session=ALICE) == 6 and in_memory(root) == 12
    one.store_tokens(prompt(1, 2, 5), ALICE)
    wait_counted(root, "session_states", 5)
    assert one.hits_of(main, session=ALICE) == 6 and in_memory(root) == 14
    end(one, ALICE)
    wait_for(lambda: (in_memory(root), files(root)) == (0, 0), "all lines")


def test_a_shorter_state_of_the_same_prompt_takes_nothing_away(engine: EngineStarter, root: Path) -> None:
    one = engine()
    for chunks in (6, 2):
        turn(one, chunks, ALICE)
    wait_counted(root, "session_states", 2)
    assert one.hits(6, session=ALICE) == 6
    end(one, ALICE)
    wait_for(lambda: (in_memory(root), files(root)) == (0, 0), "all of it")


def test_a_release_during_a_load_waits_for_it(engine: EngineStarter, root: Path) -> None:
    """The slots that a load copies from stay what they are until it is over; then they are free."""
    one = engine()
    turn(one, 5, ALICE)
    lookup, answer = one.look_up(3, session=ALICE)
    one.client.claim(lookup)
    wait_counted(root, "session_states", 1)
    end(one, ALICE)
    wait_counted(root, "session_chunks_released", 2)  # behind what is loaded
    assert in_memory(root) == 3
    one.check_slots(answer.slots[: answer.ready])
    one.client.release(lookup)
    wait_for(lambda: (in_memory(root), files(root)) == (0, 0), "the rest, once the load is over")


def test_a_session_that_goes_on_is_not_over(engine: EngineStarter, root: Path) -> None:
    one = engine()
    turn(one, 3, ALICE)
    lookup, _ = one.look_up(3, session=ALICE)
    end(one, ALICE)
    wait_counted(root, "session_ends", 1)
    assert one.hits(3, session=ALICE) == 3
    one.client.release(lookup)
    turn(one, 4, ALICE)
    wait_counted(root, "session_states", 2)
    assert one.hits(4, session=ALICE) == 4
    end(one, ALICE)
    wait_for(lambda: (in_memory(root), files(root)) == (0, 0), "all of it, now")


def test_pins_outlive_their_session(engine: EngineStarter, root: Path) -> None:
    one = engine()
    turn(one, 5, ALICE)
    assert one.client.pin(one.keys(2).keys[-1], 600)
    end(one, ALICE)
    wait_counted(root, "session_chunks_released", 3)
    wait_for(lambda: bool(read_pins(root)), "pins.json")
    assert (in_memory(root), one.hits(5)) == (2, 2)


def test_a_restart_forgets_sessions_and_loses_no_chunk(engine: EngineStarter, root: Path) -> None:
    one = engine()
    turn(one, 4, ALICE)
    wait_counted(root, "session_states", 1)
    one.close()
    end_server(root)
    one = engine()
    assert ask(root, m.Hint("release", ALICE)) == m.Hinted("unknown")
    assert one.hits(4, session=ALICE) == 4
    one.store(6, start=4)
    one.client.tell_state(ALICE, NO_TAG, one.keys(6).keys[-1])
    end(one, ALICE)
    wait_counted(root, "session_chunks_released", 2)
    assert one.hits(6) == 4, "what was found at the start may be anybody's"


def test_after_a_reset_the_old_state_is_neither_prefetched_nor_kept(engine: EngineStarter, root: Path) -> None:
    one = engine()
    turn(one, 4, ALICE)
    wait_counted(root, "session_states", 1)
    before = one.client.namespace
    one.client.reset()
    poll_until(one.client, lambda: one.client.is_ready and one.client.namespace != before, "the private epoch")
    assert ask(root, m.Hint("prefetch", ALICE)) == m.Hinted("unknown")
    turn(one, 2, ALICE)
    wait_counted(root, "session_states", 2)
    assert ask(root, m.Hint("release", ALICE)) == m.Hinted("done")
    wait_for(lambda: (in_memory(root), files(root)) == (0, 0), "both epochs'")


def churn(one: SmallEngine, root: Path) -> None:
    """Push everything out of host memory; how often differs with what was asked for."""
    for number in range(2, 12):
        one.store(20, first_token=number * OTHER)
        wait_written(root)


def promoted(root: Path) -> int:
    (host,) = [flow for flow in figures(root)["flows"] if flow["tier"] == "host"]
    count: int = host["stored"].get("promoted", 0)
    return count


def test_a_prefetch_brings_a_session_back_into_memory_before_its_request(engine: EngineStarter, root: Path) -> None:
    one = engine(host_bytes="2MiB")
    turn(one, 8, ALICE)
    wait_counted(root, "session_states", 1)
    churn(one, root)
    assert ask(root, m.Hint("prefetch", ALICE)) == m.Hinted("done", 8)
    wait_for(lambda: promoted(root) == 8, "its chunks")
    wait_for(lambda: figures(root)["hierarchy"]["leased_bytes"] == 0, "the end of the prefetch's leases")
    lookups = figures(root)["tokens"]["lookups"]
    lookup, answer = one.look_up(8, session=ALICE)
    assert answer.ready == 8 and set(answer.sources) == {0}, "all of it was in memory"
    one.check_slots(answer.slots)
    one.client.release(lookup)
    wait_for(lambda: figures(root)["tokens"]["lookups"] == lookups + 1, "the request alone is counted")
    assert promoted(root) == 8
    end(one, ALICE)
    wait_counted(root, "session_chunks_released", 8)


def test_a_demotion_frees_memory_and_the_disk_gives_it_back(engine: EngineStarter, root: Path) -> None:
    one = engine()
    turn(one, 4, ALICE)
    assert one.client.hint("demote", ALICE, NO_TAG)
    wait_for(lambda: in_memory(root) == 0, "host memory")
    assert files(root) == 4
    assert one.hits(4, session=ALICE) == 4
    assert counted(root, "session_chunks_demoted") == 4 and promoted(root) == 4


def test_a_prefetch_of_what_is_gone_finds_the_rest(engine: EngineStarter, root: Path) -> None:
    one = engine(disk_bytes="67MiB", host_bytes="2MiB")
    turn(one, 8, ALICE)
    wait_counted(root, "session_states", 1)
    for number in range(2, 40):
        one.store(10, first_token=number * OTHER)
        one.hits(10, first_token=number * OTHER)
        wait_written(root)
        hinted = ask(root, m.Hint("prefetch", ALICE))
        assert hinted.outcome in ("done", "unknown") and hinted.chunks <= 8
    assert one.hits(8, session=ALICE) <= hinted.chunks
    end(one, ALICE)


def test_without_an_engine_nothing_can_be_prefetched(engine: EngineStarter, root: Path, served: Path) -> None:
    del served
    one = engine()
    turn(one, 2, ALICE)
    wait_counted(root, "session_states", 1)
    one.close()
    wait_for(lambda: ask(root, m.Hint("prefetch", ALICE)).outcome == "no_engine", "the engine's end")


def test_a_session_of_another_tag_or_salt_is_another_one(engine: EngineStarter, root: Path) -> None:
    one = engine()
    mine, theirs = tag_digest("tenant-a"), tag_digest("tenant-b")
    one.store(3)
    one.client.tell_state(session_name("run", mine, "salt"), mine, one.keys(3).keys[-1])
    wait_counted(root, "session_states", 1)
    for name in (session_name("run", theirs, "salt"), session_name("run", mine), session_name("run", mine, "pepper")):
        assert ask(root, m.Hint("release", name, theirs)) == m.Hinted("unknown")
    assert one.hits(3, session=session_name("run", mine, "salt")) == 3


def test_a_state_behind_recurrent_layers_goes_with_its_chunks(root: Path) -> None:
    with closing(SmallEngine.start(settings(root), state_parts=2)) as one:
        one.store(3)
        one.store_state(3)
        wait_written(root)
        one.client.tell_state(ALICE, NO_TAG, one.keys(3).keys[-1])
        wait_counted(root, "session_states", 1)
        assert ask(root, m.Hint("prefetch", ALICE)).outcome == "done"
        end(one, ALICE)
        wait_for(lambda: (in_memory(root), files(root)) == (0, 0), "chunks and the state")


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (m.SessionState(b"short", NO_TAG, bytes(16)), "bad state of a session"),
        (m.SessionState(bytes(16), NO_TAG, b""), "bad state of a session"),
        (m.Hint("burn", bytes(16)), "bad hint"),
        (m.Hint("release", b"short"), "bad hint"),
        (m.Hint("prefetch", keys=bytes(16), digests=bytes(32)), "no user's session"),
    ],
)
def test_what_means_nothing_ends_the_connection_with_the_reason(
    engine: EngineStarter, root: Path, served: Path, message: Any, reason: str
) -> None:
    del served
    one = engine()
    one.client._send(message)
    poll_until(one.client, lambda: one.client.generation == 1, "the session's end")
    wait_for(lambda: reason in (root / "server.log").read_text(), "the reason")
