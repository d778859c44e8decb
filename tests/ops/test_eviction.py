"""Which chunks go: the order, the limits, the pins, and that no chunk is left without the prefix before it."""

import random

import msgspec
import pytest

from tests.kit.storage.stored_prompts import CHUNK, Model, tokens
from tiered_kv.errors import ConfigError
from tiered_kv.ops.eviction import Criteria, Selection, select
from tiered_kv.ops.forest import Forest, ident
from tiered_kv.ops.storage import FOR_GOOD, StoredBlob

ONE, TWO = Model(), Model(weights="two")
SIZE = 100


def chain(seed: int, length: int, used_s: float, *, model: Model = ONE) -> list[StoredBlob]:
    """A prompt that was used once, whole."""
    return [StoredBlob(name, SIZE, 1.0, used_s, 0.0) for name in model.names(tokens(seed, length))]


def pinned(blob: StoredBlob) -> StoredBlob:
    return msgspec.structs.replace(blob, pinned_until_s=FOR_GOOD)


def indexes(selection: Selection, of: list[StoredBlob]) -> list[int]:
    """Positions of what goes from one prompt, in order."""
    mine = {ident(blob) for blob in of}
    return [blob.name.chunk_index for blob in selection.blobs if ident(blob) in mine]


def test_the_least_recently_used_prompt_goes_first_from_its_end() -> None:
    old, new = chain(1, 3, 10.0), chain(2, 3, 20.0)
    selection = select(Forest(new + old), Criteria(free_bytes=4 * SIZE))
    assert [blob.name for blob in selection.blobs] == [old[2].name, old[1].name, old[0].name, new[2].name]
    assert selection.size_bytes == 4 * SIZE and not selection.pinned


@pytest.mark.parametrize(("wanted", "chunks"), [(1, 1), (SIZE, 1), (SIZE + 1, 2), (10**9, 3)])
def test_so_many_bytes_go_and_no_chunk_more(wanted: int, chunks: int) -> None:
    assert len(select(Forest(chain(1, 3, 10.0)), Criteria(free_bytes=wanted)).blobs) == chunks


def test_a_shared_beginning_is_as_recent_as_its_latest_continuation() -> None:
    prompt = tokens(1, 3)
    names = ONE.names(prompt) + ONE.names(prompt[:CHUNK] + tokens(2, 2))
    blobs = [
        StoredBlob(name, SIZE, 1.0, 50.0 if at >= 3 else 10.0, 0.0) for at, name in enumerate(dict.fromkeys(names))
    ]
    chosen = select(Forest(blobs), Criteria(used_before_s=20.0))
    assert [blob.name for blob in chosen.blobs] == [names[2], names[1]]


def test_what_no_request_can_reach_goes_before_anything_else() -> None:
    holed, old = chain(1, 4, 99.0), chain(2, 2, 1.0)
    del holed[1]
    selection = select(Forest(holed + old), Criteria(free_bytes=3 * SIZE))
    assert [blob.name for blob in selection.blobs] == [holed[2].name, holed[1].name, old[1].name]


def test_pins_keep_their_prefix_whatever_is_asked() -> None:
    blobs, other = chain(1, 4, 10.0), chain(2, 2, 20.0)
    blobs[1] = pinned(blobs[1])
    forest = Forest(blobs + other)
    for criteria in (
        Criteria(is_all=True),
        Criteria(free_bytes=10**9),
        Criteria(used_before_s=1e12),
        Criteria(namespace=ONE.namespace.digest),
    ):
        selection = select(forest, criteria)
        assert indexes(selection, blobs) == [3, 2] and indexes(selection, other) == [1, 0]
        assert [blob.name for blob in selection.pinned] == [blobs[1].name, blobs[0].name]
        assert selection.pinned_bytes == 2 * SIZE
    selection = select(forest, Criteria(key=blobs[0]))
    assert (indexes(selection, blobs), indexes(selection, other)) == ([3, 2], [])
    assert len(select(forest, Criteria(key=blobs[2])).pinned) == 0


def test_a_key_takes_what_is_behind_it_and_nothing_before_it() -> None:
    blobs = chain(1, 5, 10.0)
    assert indexes(select(Forest(blobs), Criteria(key=blobs[2])), blobs) == [4, 3, 2]


def test_a_namespace_limits_every_other_criterion() -> None:
    mine, theirs = chain(1, 2, 10.0), chain(1, 2, 5.0, model=TWO)
    forest, space = Forest(mine + theirs), ONE.namespace.digest
    for criteria in (
        Criteria(namespace=space),
        Criteria(namespace=space, is_all=True),
        Criteria(namespace=space, free_bytes=10**9),
        Criteria(namespace=space, used_before_s=1e9),
        Criteria(namespace=space, key=mine[0]),
    ):
        selection = select(forest, criteria)
        assert [(s.namespace, s.chunks, s.size_bytes) for s in selection.by_namespace()] == [(space.hex(), 2, 2 * SIZE)]
        assert indexes(selection, mine) == [1, 0]


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({}, "say what shall go"),
        ({"free_bytes": 1, "is_all": True}, "contradict each other"),
        ({"free_bytes": 1, "used_before_s": 1.0}, "contradict each other"),
        ({"key": chain(1, 1, 1.0)[0], "is_all": True}, "contradict each other"),
        ({"key": chain(1, 1, 1.0)[0], "namespace": bytes(16)}, "--namespace names another"),
    ],
)
def test_criteria_that_say_nothing_or_too_much_are_refused(wrong: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        Criteria(**wrong)


@pytest.mark.parametrize("seed", range(20))
def test_no_order_of_going_leaves_a_child_without_its_parent(seed: int) -> None:
    draw = random.Random(seed)
    blobs: dict[object, StoredBlob] = {}
    for number in range(8):
        shared = tokens(draw.randrange(3), draw.randrange(4))
        for name in ONE.names(shared + tokens(100 + number, draw.randrange(4))):
            until_s = FOR_GOOD if draw.random() < 0.05 else 0.0
            blobs.setdefault(name, StoredBlob(name, SIZE, 1.0, float(draw.randrange(4)), until_s))
    forest = Forest(blobs.values())
    before = len(forest.orphans)
    criteria = draw.choice([Criteria(free_bytes=draw.randrange(1, 2000)), Criteria(used_before_s=2.0)])
    left = {ident(blob): blob for blob in forest.blobs}
    for blob in select(forest, criteria).blobs:
        del left[ident(blob)]
        assert len(Forest(left.values()).orphans) == before == 0
    assert all(ident(b) in left for b in blobs.values() if b.pinned_until_s)
