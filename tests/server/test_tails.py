"""Tails over the socket: committed by one engine, told to another, with the bytes that were stored."""

from collections.abc import Callable
from pathlib import Path

from tests.kit.server.clients import CHUNK, SmallEngine, content, poll_until
from tests.kit.server.probe import figures, server_pid, wait_for, wait_written
from tests.kit.server.processes import end_softly, kill_server
from tests.kit.storage.disk_probe import blob_files
from tiered_kv.tiering.types import Limits, LookupAnswer

LONG = Limits().few_chunks

EngineStarter = Callable[..., SmallEngine]


def answer(engine: SmallEngine, count: int) -> tuple[int, LookupAnswer]:
    keys, client = engine.keys(count), engine.client
    lookup = client.lookup(keys.keys, keys.digests, wants_tails=True)
    assert lookup is not None
    poll_until(client, lambda: client.lookups[lookup].is_answered and client.lookups[lookup].is_done, "the answer")
    return lookup, client.lookups[lookup]


def store_with_tail(engine: SmallEngine, root: Path) -> None:
    """A prompt long enough that its tail is worth a file; returns when its chunks are on disk."""
    engine.store(LONG)
    engine.store_tail(LONG, CHUNK // 2)
    engine.wait_hits(LONG)
    wait_written(root)


def test_a_tail_of_one_engine_is_told_to_another_with_its_digest_and_bytes(engine: EngineStarter, root: Path) -> None:
    first, second = engine("one"), engine("two")
    first.store(2)
    first.store_tail(2, CHUNK // 2)
    second.wait_hits(2)
    lookup, found = answer(second, 3)
    (tail,) = found.tails
    keys = second.keys(2)
    assert (found.held, found.ready, tail.tokens) == (2, 2, CHUNK // 2)
    assert tail.digest == keys.tail(range(3 * CHUNK), 2, CHUNK // 2)[1]
    assert tail.slot is not None
    with second.payload(tail.slot) as view:
        assert view == content(1000 + CHUNK // 2, 0)
    assert figures(root)["hierarchy"]["host_tails"] == 1
    assert second.look_up(3)[1].tails == (), "nobody is told who did not ask"

    second.client.drop_tails([keys.tail(range(3 * CHUNK), 2, CHUNK // 2)[0]])
    assert figures(root)["hierarchy"]["host_tails"] == 1, "it is leased"
    second.client.release(lookup)
    wait_for(lambda: figures(root)["hierarchy"]["host_tails"] == 0, "the tail's end")


def test_a_tail_is_no_file_while_host_memory_has_it(engine: EngineStarter, root: Path) -> None:
    one = engine("one")
    store_with_tail(one, root)
    assert len(list(blob_files(root))) == LONG
    assert figures(root)["hierarchy"]["host_tails"] == 1


def test_a_server_that_is_told_to_end_writes_it_and_the_next_one_gives_it_back(
    engine: EngineStarter, root: Path
) -> None:
    """Then something continues it, and its file goes."""
    first = engine("one")
    store_with_tail(first, root)
    end_softly(server_pid(root))
    assert len(list(blob_files(root))) == LONG + 1
    first.close()

    second = engine("two")
    disk = figures(root)["tiers"][0]
    assert (disk["tails"], disk["used_bytes"]) == (1, sum(file.stat().st_size for file in blob_files(root)))
    lookup, found = answer(second, LONG + 1)
    (tail,) = found.tails
    keys = second.keys(LONG)
    key, digest = keys.tail(range((LONG + 1) * CHUNK), LONG, CHUNK // 2)
    assert (found.held, found.ready, tail.tokens, tail.digest) == (LONG, LONG, CHUNK // 2, digest)
    assert tail.slot is not None
    with second.payload(tail.slot) as view:
        assert view == content(1000 + CHUNK // 2, 0)
    second.client.drop_tails([key])
    second.client.release(lookup)
    wait_for(lambda: len(list(blob_files(root))) == LONG, "its file to go")
    assert figures(root)["tiers"][0]["tails"] == 0


def test_a_server_that_is_killed_loses_it_and_nothing_else(engine: EngineStarter, root: Path) -> None:
    first = engine("one")
    store_with_tail(first, root)
    kill_server(root)
    first.close()
    lookup, found = answer(engine("two"), LONG + 1)
    assert (lookup, found.ready, found.tails) == (lookup, LONG, ())
