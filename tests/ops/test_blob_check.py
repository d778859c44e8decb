"""Whether bytes are the blob that their name promises: every way to be wrong has its reason."""

import random
import struct

import pytest

from tests.kit.samples.formats import chosen_seed, golden_geometry, rehashed
from tests.kit.storage.stored_prompts import CHUNK, Model, tokens
from tiered_kv.chunks.geometry import ChunkGeometry
from tiered_kv.chunks.header import FIELDS, PEEK_BYTES, TABLE_OFFSET, BlobFormat
from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.keys.namespace import Namespace
from tiered_kv.keys.naming import BlobName
from tiered_kv.ops.blob_check import CORRUPT, REASONS, Expectation, judge
from tiered_kv.ops.storage import BaseEpochs, NamespaceRecord, is_private

MODEL = Model()
(NAME, DATA), (NEXT_NAME, NEXT_DATA) = MODEL.blobs(tokens(1, 2))


def reason(data: bytes, name: BlobName = NAME, usual_bytes: int | None = len(DATA)) -> str:
    verdict = judge(name, memoryview(data), usual_bytes)
    assert (verdict.form is None) == bool(verdict.reason) == bool(verdict.detail)
    return verdict.reason


def sealed(name: BlobName, **changes: object) -> bytes:
    data = bytearray(DATA)
    place = {"namespace": name.namespace, "key": name.key, "parent": name.parent, "chunk_index": name.chunk_index}
    MODEL.form.seal(memoryview(data), ChunkRecord(**place | changes, prefix_sha256=bytes(32)), 1)
    return bytes(data)


def test_a_sound_blob_has_no_reason() -> None:
    assert reason(DATA) == "" and reason(NEXT_DATA, NEXT_NAME, None) == ""


def test_every_flipped_bit_of_the_header_is_found() -> None:
    """Metadata, table and the padding behind it; also where the size of the namespace's blobs is not known."""
    ends = {field.name: field.offset + field.width for field in FIELDS}
    assert max(ends.values()) < TABLE_OFFSET < PEEK_BYTES
    for bit in [*range(600 * 8), *range(600 * 8, PEEK_BYTES * 8, 97)]:
        data = bytearray(DATA)
        data[bit // 8] ^= 1 << bit % 8
        assert reason(data) == "header", bit
        assert reason(data, usual_bytes=None) == "header", bit


def test_every_flipped_bit_of_the_payload_is_found() -> None:
    at = random.Random(chosen_seed(4))
    places = [PEEK_BYTES * 8, len(DATA) * 8 - 1, *(at.randrange(PEEK_BYTES * 8, len(DATA) * 8) for _ in range(300))]
    for bit in places:
        data = bytearray(DATA)
        data[bit // 8] ^= 1 << bit % 8
        assert reason(data) == "payload", bit


@pytest.mark.parametrize("length", [0, 1, 7, 8, 100, 450, 4095, 4096, 4097, len(DATA) - 1])
def test_a_cut_blob_is_found(length: int) -> None:
    assert reason(DATA[:length]) == "truncated"


@pytest.mark.parametrize("more", [b"\0", b"x" * 4096, DATA])
def test_a_longer_blob_is_found(more: bytes) -> None:
    assert reason(DATA + more) == "longer"


def test_a_sound_blob_of_another_key_is_found() -> None:
    assert reason(NEXT_DATA) == "swapped"


def test_a_damaged_blob_of_another_key_is_damaged_first() -> None:
    data = bytearray(NEXT_DATA)
    data[-1] ^= 1
    assert reason(data) == "payload"


def test_a_blob_of_another_namespace_is_left_alone_even_if_it_is_damaged() -> None:
    foreign = Model(weights="hf:fedcba9876543210fedcba9876543210fedcba98", payload_bytes=8192)
    data = foreign.blobs(tokens(1, 1))[0][1]
    for found in (data, data[:-1], data + b"x", data[:4096], data[:-1] + b"x"):
        assert reason(found) == "foreign"


def test_another_format_version_is_left_alone_only_if_its_hash_is_right() -> None:
    data = bytearray(DATA)
    data[45:49] = b"0004"
    assert reason(data) == "header"
    assert reason(rehashed(data)) == "version"


@pytest.mark.parametrize(
    "changes",
    [{"parent": bytes(16)}, {"chunk_index": 1}, {"parent": bytes(16), "chunk_index": 1}],
)
def test_a_blob_whose_header_tells_another_place_is_found(changes: dict) -> None:
    assert reason(sealed(NAME)) == ""
    assert reason(sealed(NAME, **changes)) == "misplaced"


@pytest.mark.parametrize("changes", [{"parent": bytes(16)}, {"chunk_index": 1}])
def test_a_header_that_contradicts_itself_is_found_where_the_name_tells_no_place(changes: dict) -> None:
    assert reason(sealed(NAME, **changes), BlobName(NAME.namespace, NAME.key)) == "misplaced"


def test_an_impossible_length_is_damage() -> None:
    data = bytearray(DATA)
    data[:8] = struct.pack("<Q", 8192 - 8)
    assert reason(rehashed(data)) == "header"


def test_what_may_be_somebodys_data_is_not_corrupt() -> None:
    assert set(REASONS) - CORRUPT == {"foreign", "version", "stray", "unreadable", "record"}


def record(**changes: object) -> NamespaceRecord:
    namespace = Namespace.from_fields(MODEL.namespace.fields | changes)
    return NamespaceRecord(namespace.digest, namespace)


def test_a_record_tells_what_its_blobs_look_like() -> None:
    geometry = golden_geometry()
    ranks = [
        [{"layer": p.layer, "dtype": p.dtype, "shape": list(p.shape), "axes": p.axes} for p in rank]
        for rank in geometry.ranks
    ]
    said = record(geometry={"ranks": ranks}, block_tokens=4, chunk_tokens=8)
    expected = Expectation.of(said)
    blob_format = BlobFormat(said.digest, geometry)
    assert expected.blob_bytes == blob_format.blob_bytes and expected.chunk_tokens == 8
    for other, objection in (
        (geometry, ""),
        (ChunkGeometry(4, 16, geometry.ranks), "another number of tokens"),
        (ChunkGeometry(4, 8, geometry.ranks[::-1]), "the tensors in its header"),
    ):
        form = BlobFormat(said.digest, other)
        data = bytearray(form.blob_bytes)
        form.seal(memoryview(data), ChunkRecord(said.digest, NAME.key, said.digest, 0, bytes(32)), 1)
        verdict = judge(BlobName(said.digest, NAME.key, said.digest, 0), memoryview(data))
        assert verdict.form is not None
        assert expected.objection(verdict.form).startswith(objection)
        assert bool(expected.objection(verdict.form)) == bool(objection)


@pytest.mark.parametrize("geometry", [None, [], "x", {"ranks": []}, {"ranks": [[{"layer": "a"}]]}, {"ranks": 3}])
def test_a_record_without_a_servers_geometry_tells_the_tokens_only(geometry: object) -> None:
    expected = Expectation.of(record(geometry=geometry))
    assert (expected.chunk_tokens, expected.form, expected.blob_bytes) == (CHUNK, None, None)


def test_no_record_expects_nothing() -> None:
    verdict = judge(NAME, memoryview(DATA))
    for missing in (None, NamespaceRecord(NAME.namespace, None, "there is no namespace.json")):
        assert verdict.form is not None and Expectation.of(missing).objection(verdict.form) == ""


@pytest.mark.parametrize(
    ("kind", "epoch", "is_retired"),
    [
        ("base", "base-0", True),
        ("base", "base-6", True),
        ("base", "base-7", False),
        ("base", "base-8", False),
        ("base", "shared-0", False),
        ("base", "base-0-of-0123456789abcdef", False),
        ("base", "private-00", False),
        ("base", "base-", False),
        ("base", "", False),
        ("shared", "shared-6", True),
        ("shared", "shared-7", False),
        ("shared", "base-0", False),
    ],
)
def test_epochs_below_the_one_in_force_are_retired(kind: str, epoch: str, is_retired: bool) -> None:
    base = Model(epoch="").namespace.digest.hex()
    model, other = Model(epoch=epoch).namespace, Model(epoch=epoch, weights="other").namespace
    for epochs in (BaseEpochs(kind, {base: 7}), BaseEpochs(kind, {base: 3, "00" * 16: 99}, floor=4)):
        assert epochs.has_retired(model) == is_retired
        assert not epochs.has_retired(other) or epochs.floor
    assert is_private(model) == (epoch == "private-00")
