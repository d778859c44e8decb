"""Which chunks are copied in which order, and what a copy does when something is not as it should be."""

import threading
from pathlib import Path

import msgspec
import pytest

from tests.kit.storage.stored_prompts import CHUNK, Model, tokens
from tiered_kv.errors import CapacityExceeded, ChunkCorrupt, TierUnavailable
from tiered_kv.keys.naming import relative_path
from tiered_kv.ops.copying import Wanted, check_named, choose, copy
from tiered_kv.ops.forest import Forest
from tiered_kv.ops.open import open_storage
from tiered_kv.ops.storage import StoredBlob

ONE, TWO = Model(), Model(weights="two")
SIZE = 100


def stored(prompt: list[int], used_s: float, model: Model = ONE) -> list[StoredBlob]:
    return [StoredBlob(name, SIZE, 1.0, used_s, 0.0) for name in model.names(prompt)]


def names(blobs) -> list:
    return [blob.name for blob in blobs]


# -- what is chosen --------------------------------------------------------------------------------------------------


def test_the_most_recently_used_prefix_comes_first_and_whole() -> None:
    old, new, newest = stored(tokens(1, 3), 10.0), stored(tokens(2, 3), 20.0), stored(tokens(3, 1), 30.0, TWO)
    forest = Forest(old + new + newest)
    assert names(choose(forest, Wanted())) == names(newest + new + old)
    assert names(choose(forest, Wanted(namespace=ONE.namespace.digest))) == names(new + old)


def test_a_shared_beginning_comes_once_with_its_latest_continuation() -> None:
    prompt = tokens(1, 4)
    branch = prompt[: 2 * CHUNK] + tokens(2, 2)
    blobs = stored(prompt, 10.0)[2:] + stored(branch, 20.0)
    chosen = choose(Forest(blobs), Wanted())
    assert names(chosen) == ONE.names(branch) + ONE.names(prompt)[2:]


def test_a_beginning_that_is_used_more_than_what_follows_comes_before_other_prompts() -> None:
    hot, other = stored(tokens(1, 4), 10.0), stored(tokens(2, 3), 20.0)
    hot[1] = msgspec.structs.replace(hot[1], used_s=30.0)
    assert names(choose(Forest(hot + other), Wanted())) == names(hot[:2] + other + hot[2:])


def test_prompts_of_one_second_stay_whole() -> None:
    """An object store tells times in whole seconds."""
    one, two = stored(tokens(1, 3), 10.0), stored(tokens(2, 3), 10.0)
    assert names(choose(Forest(two + one), Wanted(size_bytes=3 * SIZE))) in (names(one), names(two))


@pytest.mark.parametrize(("size", "count"), [(1, 0), (SIZE, 1), (4 * SIZE + SIZE - 1, 4), (10**9, 6)])
def test_a_limit_in_bytes_cuts_the_least_recent_end(size: int, count: int) -> None:
    old, new = stored(tokens(1, 3), 10.0), stored(tokens(2, 3), 20.0)
    assert names(choose(Forest(old + new), Wanted(size_bytes=size))) == names(new + old)[:count]


def test_a_key_takes_the_prefix_up_to_it() -> None:
    blobs, other = stored(tokens(1, 4), 10.0), stored(tokens(2, 2), 20.0)
    assert names(choose(Forest(blobs + other), Wanted(key=blobs[2]))) == names(blobs[:3])
    assert choose(Forest(blobs[:1] + blobs[2:]), Wanted(key=blobs[3])) == []


def test_what_no_request_can_reach_is_not_copied() -> None:
    blobs = stored(tokens(1, 5), 10.0)
    assert names(choose(Forest(blobs[:2] + blobs[3:]), Wanted())) == names(blobs[:2])


# -- what happens on the way -----------------------------------------------------------------------------------------


class Shelf:
    """A target in memory, with room for so many blobs."""

    uri = "memory://shelf"

    def __init__(self, room: int = 1000) -> None:
        self.blobs: dict = {}
        self.room = room
        self.lock = threading.Lock()
        self.refused: dict[bytes, str] = {}
        self.dropped: set[bytes] = set()

    def begin(self, record) -> str:
        return self.refused.get(record.digest, "")

    def has(self, name) -> bool:
        return name in self.blobs

    def put(self, name, blob, parsed) -> bool:
        with self.lock:
            if len(self.blobs) >= self.room:
                raise CapacityExceeded("the shelf is full")
            assert not name.chunk_index or any(other.key == name.parent for other in self.blobs), "no parent"
            self.blobs[name] = bytes(blob)
            return True

    def end(self) -> set[bytes]:
        return self.dropped


@pytest.fixture
def source(tmp_path: Path):
    """Six prompts with a common beginning."""
    with open_storage(make(tmp_path / "source")) as storage:
        for number in range(6):
            ONE.store(storage, tokens(1, 2) + tokens(10 + number, 3))
        yield storage


def make(path: Path) -> str:
    path.mkdir()
    return f"file://{path}"


def copied(source, target, at_once: int = 4):
    content = source.look()
    return copy(source, target, choose(Forest(content.blobs), Wanted()), content, at_once)


@pytest.mark.parametrize("at_once", [1, 2, 16])
def test_everything_is_copied_byte_for_byte_parents_first(source, at_once: int) -> None:
    shelf = Shelf()
    done = copied(source, shelf, at_once)
    assert (done.selected, done.copied, done.left_out, done.full) == (20, 20, 0, None)
    for number in range(6):
        for name, data in ONE.blobs(tokens(1, 2) + tokens(10 + number, 3)):
            assert shelf.blobs[name] == data
    assert copied(source, shelf, at_once).there == 20


@pytest.mark.parametrize("room", [0, 1, 7, 19])
def test_a_full_target_has_whole_prefixes_and_the_rest_is_counted(source, room: int) -> None:
    shelf = Shelf(room)
    done = copied(source, shelf)
    assert (done.copied, done.left_out, done.full) == (room, 20 - room, "the shelf is full")
    assert len(shelf.blobs) == room


def test_a_damaged_blob_is_left_with_everything_behind_it(source, tmp_path: Path) -> None:
    victim = ONE.names(tokens(1, 2) + tokens(12, 3))[2]
    path = tmp_path / "source" / "blobs" / relative_path(victim)
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    shelf = Shelf()
    done = copied(source, shelf)
    assert (done.copied, done.corrupt, done.left_out) == (17, 1, 2) and victim not in shelf.blobs


def test_a_blob_under_anothers_name_is_none(source) -> None:
    (one, data), (two, _) = ONE.blobs(tokens(1, 2))
    assert check_named(data, one).header.record.key == one.key
    with pytest.raises(ChunkCorrupt, match="under another's name"):
        check_named(data, two)


def test_a_blob_that_goes_meanwhile_is_counted(source, tmp_path: Path) -> None:
    content = source.look()
    victim = ONE.names(tokens(1, 2) + tokens(12, 3))[4]
    (tmp_path / "source" / "blobs" / relative_path(victim)).unlink()
    done = copy(source, Shelf(), choose(Forest(content.blobs), Wanted()), content, 4)
    assert (done.copied, done.vanished, done.left_out) == (19, 1, 0)


def test_a_refused_namespace_is_told_and_the_others_are_copied(source) -> None:
    TWO.store(source, tokens(1, 2))
    shelf = Shelf()
    shelf.refused[ONE.namespace.digest] = "it was retired"
    done = copied(source, shelf)
    assert (done.selected, done.copied) == (2, 2)
    assert done.notes == [f"namespace {ONE.namespace.digest.hex()} was left out: it was retired"]


def test_what_the_target_drops_was_not_copied(source) -> None:
    shelf = Shelf()
    shelf.dropped = {name.key for name in ONE.names(tokens(1, 2) + tokens(12, 3))[2:]}
    done = copied(source, shelf)
    assert (done.copied, done.dropped, done.copied_bytes) == (17, 3, 17 * done.selected_bytes // 20)


@pytest.mark.parametrize("at_once", [1, 8])
def test_a_target_that_fails_ends_the_copy_and_hangs_nobody(source, at_once: int) -> None:
    class Failing(Shelf):
        def put(self, name, blob, parsed) -> bool:
            if len(self.blobs) == 5:
                raise TierUnavailable("it is on fire")
            return super().put(name, blob, parsed)

    with pytest.raises(TierUnavailable, match="on fire"):
        copied(source, Failing(), at_once)
