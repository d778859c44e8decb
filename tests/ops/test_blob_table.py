"""Blobs in columns: the same blobs as were put in, whoever asks for one, some or all of them."""

import random

import msgspec

from tests.kit.storage.stored_prompts import Model, tokens
from tiered_kv.keys.naming import BlobName
from tiered_kv.keys.tail_keys import KEY_MARK
from tiered_kv.ops.blob_table import BlobTable, part
from tiered_kv.ops.storage import FOR_GOOD, StoredBlob

ONE, OTHER = bytes(16), bytes([1]) * 16


def some_blobs(seed: int) -> list[StoredBlob]:
    """Of two namespaces in turns, with pins, tails, tags, and origins that nobody has read."""
    draw = random.Random(seed)
    blobs = []
    for number in range(60):
        key = draw.randbytes(8) + (KEY_MARK + bytes([draw.randrange(1, 200), 0, 0, 0]))
        if draw.random() < 0.7:
            key = draw.randbytes(16)
        name = BlobName(draw.choice([ONE, ONE, ONE, OTHER]), key, draw.randbytes(16), number)
        until_s = draw.choice([0.0, 0.0, 0.0, 9e9, FOR_GOOD])
        origin = draw.choice([(None, None), (draw.randbytes(16), ""), (bytes(16), "tiered_kv/0.9.1 vllm/0.32.0 -")])
        blobs.append(StoredBlob(name, number, number + 0.5, number + 1.5, until_s, *origin))
    return blobs


def whole(blobs: list[StoredBlob]) -> list[tuple[object, ...]]:
    """All that blobs tell, also what names are equal without."""
    return [(*msgspec.structs.astuple(blob.name), *msgspec.structs.astuple(blob)[1:]) for blob in blobs]


def test_a_table_is_a_sequence_of_the_blobs_that_were_put_in() -> None:
    blobs, table = some_blobs(1), BlobTable()
    for blob in blobs:
        table.append(blob)
    assert len(table) == len(blobs) == 60 and table.size_bytes == sum(blob.size_bytes for blob in blobs)
    assert whole([table[row] for row in range(60)]) == whole(blobs), "one by one"
    assert whole([table[-1]]) == whole(blobs[-1:])
    assert whole(list(table)) == whole(blobs), "all at once"
    assert whole(table[7:20:3]) == whole(blobs[7:20:3])
    assert table[3] is list(table)[3], "made once"
    table.append(blobs[0])
    assert whole(list(table)) == whole([*blobs, blobs[0]]), "what is added later is there, too"
    assert BlobTable.of(table) is table and BlobTable.of(blobs) == blobs != table


def test_columns_and_rows_by_namespace_tell_what_the_blobs_do() -> None:
    blobs = some_blobs(2)
    for ordered in (blobs, sorted(blobs, key=lambda blob: blob.name.namespace)):
        table = BlobTable.of(ordered)
        rows = table.rows()
        assert set(rows) == {ONE, OTHER} and sorted(row for of in rows.values() for row in of) == list(range(60))
        for space, of in rows.items():
            assert [ordered[row].name.key for row in of] == list(part(table.keys, of))
            assert {ordered[row].name.namespace for row in of} == {space} == {table.namespace(row) for row in of}
        assert table.tails == {row: blob.tail_tokens for row, blob in enumerate(ordered) if blob.tail_tokens}
        assert table.pinned == {row: blob.pinned_until_s for row, blob in enumerate(ordered) if blob.pinned_until_s}
        assert table.tails and table.pinned


def test_an_empty_table_has_nothing() -> None:
    table = BlobTable()
    assert not table and table == [] and list(table) == [] and table.rows() == {} and table.size_bytes == 0


def test_a_mark_across_two_keys_makes_no_tail() -> None:
    one, two = (name.key for name in Model().names(tokens(1, 2)))
    keys = [one[:14] + KEY_MARK[:2], KEY_MARK[2:] + two[2:], KEY_MARK + two[4:]]
    table = BlobTable()
    table.extend(ONE, keys, keys, (0, 1, 2), (1, 1, 1), (1, 1, 1), (1, 1, 1), [(None, None)] * 3)
    assert table.tails == {} and [blob.tail_tokens for blob in table] == [0, 0, 0]
