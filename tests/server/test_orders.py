"""Orders of an operator over the socket: what a running server removes and refuses, and what its engines notice."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tests.kit.server.clients import SmallEngine, hello, poll_until, refusal, settings, tell
from tests.kit.server.probe import figures, wait_for, wait_written
from tests.kit.storage.disk_probe import blob_files
from tiered_kv.errors import ConfigError
from tiered_kv.ops.server_link import ServerLink
from tiered_kv.server import protocol as m
from tiered_kv.server.connect import read_message
from tiered_kv.tiering.removal import STEP

EngineStarter = Callable[..., SmallEngine]


def evict(root: Path, tier: str, namespace: bytes, keys: list[bytes] | None, *, holes: bool = False):
    link = ServerLink.of_directory(root)
    assert link is not None
    with link:
        answer = link.evict(tier, namespace, keys, holes=holes)
        return answer.removed, answer.kept, answer.missing


def files(root: Path) -> int:
    return len(blob_files(root))


def test_evicted_chunks_are_misses_and_others_stay(engine: EngineStarter, root: Path) -> None:
    one = engine()
    one.store(6)
    one.store(3, first_token=100_000)
    wait_written(root)
    keys, space = one.keys(6), one.client.namespace.digest
    assert evict(root, "disk", space, list(keys.keys[4:])) == (2, 0, 0)
    assert evict(root, "host", space, list(keys.keys[4:])) == (2, 0, 0)
    wait_for(lambda: files(root) == 7, "the deletions")
    assert one.hits(6) == 4 and one.hits(3, first_token=100_000) == 3
    assert evict(root, "disk", space, list(keys.keys[4:])) == (0, 0, 2)
    one.store(6, start=4)
    one.wait_hits(6)


def test_an_order_of_many_chunks_goes_on_in_steps_beside_others(engine: EngineStarter, root: Path) -> None:
    """More chunks than one step looks at, by two operators at once, one of whom leaves."""
    one = engine(host_bytes=64 << 20)
    for number in range(4):
        one.store(200, first_token=number * 1_000_000)
    one.wait_hits(200, first_token=3_000_000)
    wait_written(root)
    known = figures(root)["hierarchy"]["host_ready_chunks"]
    assert known > STEP
    space = one.client.namespace.digest
    links = [ServerLink.of_directory(root) for _ in range(2)]
    for link in links:
        link._sock.sendall(m.frame(m.Evict("host", space, b"", False)))
    links[0].close()
    answer = read_message(links[1]._sock)
    links[1].close()
    assert isinstance(answer, m.Evicted) and answer.kept == 0
    wait_for(lambda: figures(root)["hierarchy"]["host_ready_chunks"] == 0, "the order whose operator has left")
    assert one.hits(5) == 5, "from the disk"


def test_one_order_at_a_time(engine: EngineStarter, root: Path) -> None:
    one = engine()
    one.store(1)
    with closing(ServerLink.of_directory(root)) as link:
        for _ in range(50):  # where the loop's turn is over between the two, the second finds none under way
            link._sock.sendall(m.frame(m.Evict("host", b"", b"", False)) + m.frame(m.Evict("host", b"", b"", False)))
            if isinstance(read_message(link._sock), m.Refused):
                return
            read_message(link._sock)
    raise AssertionError("two orders at once were never refused")


def test_a_leased_chunk_stays_in_host_memory_until_its_release(engine: EngineStarter, root: Path) -> None:
    one = engine()
    one.store(3)
    one.wait_hits(3)
    wait_written(root)
    lookup, answer = one.look_up(3)
    space = one.client.namespace.digest
    assert evict(root, "host", space, None) == (0, 3, 0)
    with one.payload(answer.slots[0]) as view:
        assert bytes(view[:1]) == bytes([1])
    one.client.release(lookup)
    poll_until(one.client, lambda: figures(root)["hierarchy"]["leased_bytes"] == 0, "the lease's end")
    assert evict(root, "host", space, None) == (3, 0, 0)
    assert figures(root)["hierarchy"]["host_ready_chunks"] == 0
    assert one.hits(3) == 3, "from the disk"


def test_a_chunk_that_others_need_stays_on_disk_unless_holes_are_allowed(engine: EngineStarter, root: Path) -> None:
    one = engine()
    one.store(2)
    wait_written(root)
    first, space = [one.keys(2).keys[0]], one.client.namespace.digest
    assert evict(root, "disk", space, first) == (0, 1, 0)
    assert evict(root, "disk", space, first, holes=True) == (1, 0, 0)
    assert evict(root, "disk", space, None) == (1, 0, 0)


def test_an_empty_namespace_means_every_one(engine: EngineStarter, root: Path) -> None:
    one, two = engine("one"), engine("two", weights="other")
    for small in (one, two):
        small.store(2)
    wait_written(root)
    assert evict(root, "disk", one.client.namespace.digest, None) == (2, 0, 0)
    assert evict(root, "host", b"", None) == (4, 0, 0)
    assert evict(root, "disk", b"", None) == (2, 0, 0)
    wait_for(lambda: files(root) == 0, "the deletions")
    assert one.hits(2) == 0 and two.hits(2) == 0


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (m.Evict("tape", bytes(16), b"", False), "no tier 'tape' to evict from; there are host, disk"),
        (m.Evict("host", bytes(16), bytes(15), False), "keys have 16 bytes each. observed=15"),
        (m.Evict("host", bytes(15), b"", False), "a namespace has 16 bytes. observed=15"),
        (m.Evict("host", b"", bytes(16), False), "a namespace has 16 bytes. observed=0"),
        (m.Evict("host", b"", b"", False, b"t" * 15), "a tag has 16 bytes"),
        (m.Evict("host", b"", b"", False, b"t" * 500), "a tag has 16 bytes"),
        (m.Evict("host", b"", b"", False, bytes(16)), "a tag has 16 bytes, not all zero"),
        (m.Evict("host", bytes(16), b"k" * 16, False, b"t" * 16), "goes without keys. keys=1"),
        (m.Evict("tape", b"", b"", False, b"t" * 16), "no tier 'tape'"),
    ],
)
def test_orders_that_mean_nothing_are_refused(served: Path, order: m.Evict, expected: str) -> None:
    with hello(settings(served)) as sock:
        tell(sock, order)
        assert expected in refusal(sock)
    with hello(settings(served)) as sock:
        tell(sock, m.Evict("host", bytes(16), b"", False))
        assert read_message(sock) == m.Evicted(0, 0, 0), "the server goes on"


@pytest.mark.parametrize("role", ["scheduler", "worker", "cache"])
def test_only_operators_may_order(served: Path, role: str) -> None:
    with hello(settings(served), role, "some-engine") as sock:
        tell(sock, m.Evict("host", b"", b"", False))
        assert "Evict" in refusal(sock)


def test_a_refusal_reaches_the_operator_as_it_was_said(served: Path) -> None:
    with pytest.raises(ConfigError, match="no tier 'object'"):
        evict(served, "object", bytes(16), None)


def test_a_link_never_takes_no_keys_for_all_keys(engine: EngineStarter, root: Path) -> None:
    one = engine()
    one.store(2)
    wait_written(root)
    assert evict(root, "host", one.client.namespace.digest, []) == (0, 0, 0)
    assert one.hits(2) == 2 and files(root) == 2
