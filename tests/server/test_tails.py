"""Tails over the socket: committed by one engine, told to another, with the bytes that were stored."""

from collections.abc import Callable
from pathlib import Path

from tests.kit.server.clients import CHUNK, SmallEngine, content, poll_until
from tests.kit.server.probe import figures, wait_for, wait_written
from tests.kit.storage.disk_probe import blob_files
from tiered_kv.tiering.types import LookupAnswer

EngineStarter = Callable[..., SmallEngine]


def answer(engine: SmallEngine, count: int) -> tuple[int, LookupAnswer]:
    keys, client = engine.keys(count), engine.client
    lookup = client.lookup(keys.keys, keys.digests, wants_tails=True)
    assert lookup is not None
    poll_until(client, lambda: client.lookups[lookup].is_answered and client.lookups[lookup].is_done, "the answer")
    return lookup, client.lookups[lookup]


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
    with second.payload(tail.slot) as view:
        assert view == content(1000 + CHUNK // 2, 0)
    assert figures(root)["hierarchy"]["host_tails"] == 1
    assert second.look_up(3)[1].tails == (), "nobody is told who did not ask"

    second.client.drop_tails([keys.tail(range(3 * CHUNK), 2, CHUNK // 2)[0]])
    assert figures(root)["hierarchy"]["host_tails"] == 1, "it is leased"
    second.client.release(lookup)
    wait_for(lambda: figures(root)["hierarchy"]["host_tails"] == 0, "the tail's end")


def test_a_tail_is_no_file(engine: EngineStarter, root: Path) -> None:
    one = engine("one")
    one.store(2)
    one.store_tail(2, CHUNK // 2)
    one.wait_hits(2)
    wait_written(root)
    assert len(list(blob_files(root))) == 2
    assert figures(root)["hierarchy"]["host_tails"] == 1
