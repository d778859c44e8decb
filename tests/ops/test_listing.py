"""Sums by namespace and age, orders of chunks, and a namespace in a few words."""

import pytest

from tests.kit.samples.formats import sample_namespace
from tiered_kv.keys.naming import BlobName
from tiered_kv.ops.forest import Forest
from tiered_kv.ops.listing import DuAge, LsNamespace, describe, epoch_of, first, matching, orders, sum_up
from tiered_kv.ops.storage import Content, NamespaceRecord, StoredBlob
from tiered_kv.ops.text import printable

NOW_S = 10_000_000.0
ONE, OTHER = bytes(16), bytes([1]) * 16


def blob(number: int, size_bytes: int, age_s: float, space: bytes = ONE, parent: int | None = None) -> StoredBlob:
    """A chunk that is written and used at the same time; first of a prefix, or the second behind ``parent``."""
    name = BlobName(space, bytes([number]) * 16, space if parent is None else bytes([parent]) * 16, parent is not None)
    return StoredBlob(name, size_bytes, NOW_S - age_s, NOW_S - age_s, 0.0)


def summed(content: Content, namespace: bytes | None = None) -> tuple[list[LsNamespace], list[DuAge]]:
    forest = Forest(content.blobs)
    return sum_up(content.records, forest, forest.last_uses(), NOW_S, namespace)


def test_bytes_and_chunks_are_summed_by_namespace_and_last_use() -> None:
    content = Content(
        [
            blob(10, 1, 10),
            blob(11, 2, 3600 + 10),
            blob(12, 4, 86400 + 10),
            blob(13, 8, 7 * 86400 + 10, OTHER),
            blob(14, 16, 30 * 86400 + 10, OTHER),
            blob(15, 32, -5, OTHER),
        ]
    )
    content.records = {ONE: NamespaceRecord(ONE, None, "why"), bytes(15) + b"e": NamespaceRecord(b"e", None, "empty")}
    namespaces, ages = summed(content)
    assert [(age.last_use, age.chunks, age.size_bytes) for age in ages] == [
        ("hour", 2, 33),
        ("day", 1, 2),
        ("week", 1, 4),
        ("month", 1, 8),
        ("older", 1, 16),
    ]
    found = [(s.namespace, s.chunks, s.size_bytes, s.used_s, s.problem) for s in namespaces]
    assert found == [
        (OTHER.hex(), 3, 56, NOW_S + 5, "there is no namespace.json"),
        (ONE.hex(), 3, 7, NOW_S - 10, "why"),
        ((bytes(15) + b"e").hex(), 0, 0, None, "empty"),
    ]
    (one,), ages = summed(content, ONE)
    assert (one.namespace, one.size_bytes) == (ONE.hex(), 7)
    assert sum(age.size_bytes for age in ages) == 7


def test_a_parent_counts_as_used_when_its_child_was() -> None:
    content = Content([blob(10, 1, 90 * 86400), blob(11, 2, 10, parent=10)])
    _, ages = summed(content)
    assert (ages[0].chunks, ages[0].size_bytes) == (2, 3)


def test_what_lies_twice_under_a_key_is_counted_where_it_lies() -> None:
    wrong = StoredBlob(BlobName(ONE, bytes([11]) * 16, bytes([99]) * 16, 7), 16, NOW_S - 90 * 86400, 0.0, 0.0)
    content = Content([blob(10, 1, 10), blob(11, 2, 10, parent=10), wrong, blob(12, 4, 10, OTHER)])
    namespaces, ages = summed(content)
    assert [(one.namespace, one.chunks, one.size_bytes) for one in namespaces] == [
        (ONE.hex(), 3, 19),
        (OTHER.hex(), 1, 4),
    ]
    assert (sum(age.chunks for age in ages), sum(age.size_bytes for age in ages)) == (4, 23)


@pytest.mark.parametrize(
    ("order", "expected"), [("used", "cab"), ("size", "bca"), ("age", "cba"), ("key", "abc"), ("depth", "acb")]
)
def test_orders(order: str, expected: str) -> None:
    """a is old and was used through its child b; ties go by key."""
    blobs = {"a": blob(10, 1, 300), "b": blob(11, 9, 200, parent=10), "c": blob(12, 5, 100)}
    forest = Forest(blobs.values())
    used = forest.last_uses()
    names = {chunk: label for label, chunk in blobs.items()}
    by = orders(forest, used)[order]

    def found(limit: int | None, *, is_reversed: bool) -> str:
        rows = first(forest, range(len(blobs)), by, limit, is_reversed=is_reversed)
        return "".join(names[forest.blobs[row]] for row in rows)

    assert found(None, is_reversed=False) == expected
    assert found(None, is_reversed=True) == expected[::-1]
    assert found(2, is_reversed=False) == expected[:2]
    assert found(2, is_reversed=True) == expected[::-1][:2]


def test_only_what_was_not_used_since_a_time_matches() -> None:
    forest = Forest([blob(10, 1, 300), blob(11, 9, 200, parent=10), blob(12, 5, 250, OTHER)])
    used = forest.last_uses()
    assert list(matching(forest, used, None, NOW_S - 225)) == [2]
    assert list(matching(forest, used, ONE, None)) == [0, 1] and list(matching(forest, used)) == [0, 1, 2]
    assert matching(forest, used, ONE, NOW_S - 225) == []


def test_a_namespace_in_a_few_words() -> None:
    space = sample_namespace(text_config={"model_type": "llama"}, tp=4)
    record = NamespaceRecord(space.digest, space)
    assert describe(record) == "llama hf:0123456789ab bfloat16 tp=4"
    assert epoch_of(record) == "base"
    assert describe(NamespaceRecord(ONE, None, "no record")) == "no record"
    assert epoch_of(NamespaceRecord(ONE, None, "no record")) is None


@pytest.mark.parametrize(
    ("weights", "shown"),
    [
        ("sha256v2:" + "ab" * 32, "sha256v2:" + "ab" * 6),
        ("user:my model:2", "user:my model:2"),
    ],
)
def test_names_of_weights_are_shortened(weights: str, shown: str) -> None:
    space = sample_namespace(weights=weights)
    assert f" {shown} " in f" {describe(NamespaceRecord(space.digest, space))} "


def test_what_others_wrote_cannot_steer_a_terminal() -> None:
    space = sample_namespace(weights="user:\x1b[2Jmine\n" + "x" * 500)
    text = describe(NamespaceRecord(space.digest, space))
    assert text.isprintable() and "user:?[2Jmine?" in text and len(text) == 80
    assert printable("abc", 3) == "abc" and printable("abcdefg", 5) == "ab..."
