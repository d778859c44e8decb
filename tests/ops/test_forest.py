"""Prefix trees of chunks: links, gaps, last use, pins, order."""

import msgspec
import pytest

from tests.kit.storage.stored_prompts import CHUNK, Model, tokens
from tiered_kv.keys.naming import BlobName
from tiered_kv.ops.forest import Forest, ident
from tiered_kv.ops.storage import StoredBlob


def chain(seed: int, length: int, *, model: Model | None = None, used_s: float = 100.0) -> list[StoredBlob]:
    names = (model or Model()).names(tokens(seed, length))
    return [StoredBlob(name, 1, 1.0, used_s + name.chunk_index, 0.0) for name in names]


def test_a_shared_beginning_has_two_continuations() -> None:
    prompt = tokens(1, 3)
    names = Model().names(prompt) + Model().names(prompt[: 2 * CHUNK] + tokens(2, 2))
    forest = Forest(StoredBlob(name, 1, 1.0, 1.0, 0.0) for name in names)
    assert len(forest.blobs) == 5 and len(forest.roots) == 1 and not forest.orphans
    shared = next(blob for blob in forest.blobs if blob.name == names[1])
    assert {b.name for b in forest.children(shared)} == {names[2], names[5]}
    assert {b.name for b in forest.behind([shared])} == {*names[1:3], *names[5:]}
    assert [b.name for b in forest.prefix(shared)] == [names[1], names[0]]


def test_a_gap_leaves_everything_behind_it_unreachable() -> None:
    blobs = chain(1, 5)
    forest = Forest(blobs[:2] + blobs[3:])
    assert forest.orphans == [blobs[3]]
    assert {b.name for b in forest.unreachable()} == {b.name for b in blobs[3:]}
    assert [b.name for b in forest.walk()] == [b.name for b in blobs[:2]]


@pytest.mark.parametrize("lie", ["depth", "circle", "namespace"])
def test_names_that_lie_make_orphans_and_no_circle(lie: str) -> None:
    one, two = chain(1, 2)
    space, key = one.name.namespace, two.name.key
    lied = {
        "depth": BlobName(space, key, one.name.key, 7),
        "circle": BlobName(space, key, key, 1),
        "namespace": BlobName(bytes(16), key, one.name.key, 1),
    }[lie]
    forest = Forest([one, msgspec.structs.replace(two, name=lied)])
    assert [b.name.key for b in forest.orphans] == [key] and forest.roots == [one]
    assert len(forest.behind(forest.orphans)) == 1 and len(forest.prefix(forest.orphans[0])) == 1


def misplaced(blob: StoredBlob) -> StoredBlob:
    """What a bucket has under the chunk's key a second time."""
    name = blob.name
    return msgspec.structs.replace(blob, name=BlobName(name.namespace, name.key, name.parent, name.chunk_index + 5))


@pytest.mark.parametrize("is_first", [True, False])
def test_of_two_blobs_of_one_key_the_one_that_follows_another_is_the_chunk(is_first: bool) -> None:
    blobs = chain(1, 3)
    wrong = misplaced(blobs[1])
    forest = Forest([wrong, *blobs] if is_first else [*blobs, wrong])
    assert forest.orphans == [] and len(list(forest.walk())) == 3
    assert forest.blobs[forest.row(wrong)].name.chunk_index == 1
    assert forest.copies == {ident(wrong): [wrong]}


def test_a_root_of_another_namespace_hangs_in_the_air() -> None:
    (blob,) = chain(1, 1)
    forest = Forest([msgspec.structs.replace(blob, name=BlobName(blob.name.namespace, blob.name.key, bytes(16), 0))])
    assert forest.roots == [] and len(forest.orphans) == 1


def test_a_use_and_a_pin_of_a_chunk_are_those_of_its_prefix() -> None:
    blobs = chain(1, 4, used_s=0.0)
    blobs[2] = msgspec.structs.replace(blobs[2], used_s=50.0, pinned_until_s=9e9)
    forest = Forest(blobs)
    assert [forest.last_uses()[forest.row(b)] for b in blobs] == [50.0, 50.0, 50.0, 3.0]
    assert forest.pinned() == {ident(b) for b in blobs[:3]}


def test_a_walk_of_a_deep_prefix_is_in_order() -> None:
    blobs = [
        StoredBlob(
            BlobName(bytes(16), i.to_bytes(16, "big"), (i - 1).to_bytes(16, "big") if i > 1 else bytes(16), i - 1),
            1,
            1,
            1,
            0,
        )
        for i in range(1, 20_001)
    ]
    forest = Forest(reversed(blobs))
    assert [b.name.chunk_index for b in forest.walk()] == list(range(20_000))
    assert len(forest.behind(forest.roots)) == 20_000


def test_roots_are_walked_in_the_order_asked_for() -> None:
    old, new = chain(1, 2, used_s=10.0), chain(2, 1, used_s=99.0)
    forest = Forest(old + new)
    assert list(forest.walk(order=lambda b: -b.used_s)) == new + old
