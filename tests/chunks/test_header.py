import dataclasses
import threading
import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from tests.kit.samples.formats import (
    GOLDEN_NAMESPACE,
    GOLDEN_RECORD,
    GOLDEN_UNIX_S,
    golden_geometry,
    rehashed,
    sealed_blob,
)
from tiered_kv.chunks import header as f
from tiered_kv.chunks.geometry import DTYPE_BYTES, ChunkGeometry, LayerPage
from tiered_kv.chunks.header import (
    MAX_HEADER_BYTES,
    PEEK_BYTES,
    BlobCheck,
    BlobFormat,
    check_blob,
    peek,
    read_header,
)
from tiered_kv.errors import ChunkCorrupt, ChunkMismatch, ConfigError
from tiered_kv.keys.chunk_record import ChunkRecord

FORMAT = BlobFormat(GOLDEN_NAMESPACE, golden_geometry())
KEY, PREFIX = GOLDEN_RECORD.key, GOLDEN_RECORD.prefix_sha256
PAYLOAD = FORMAT.header_bytes
PAD = PAYLOAD + golden_geometry().data_bytes

ANOTHER_RECORD = msgspec.structs.replace(GOLDEN_RECORD, namespace=b"n" * 16)


def verify(blob, blob_format=FORMAT, key=KEY, prefix=PREFIX):
    blob_format.verify(memoryview(blob), key, prefix)


def many_layers(count):
    page = LayerPage("model.layers.00.self_attn.attn", "BF16", (2, 4, 8), "HNC")
    return ChunkGeometry(4, 8, (tuple(dataclasses.replace(page, layer=f"{page.layer}.{i}") for i in range(count)),))


# --- sealing ---------------------------------------------------------------------------------------------------------


def test_sealed_blob_verifies_with_and_without_prefix_digest():
    blob = sealed_blob(FORMAT)
    verify(blob)
    verify(blob, prefix=None)


def test_header_and_payload_are_multiples_of_4096():
    for layers in (1, 30, 100, 1000):
        blob_format = BlobFormat(GOLDEN_NAMESPACE, many_layers(layers))
        assert blob_format.header_bytes % 4096 == blob_format.payload_bytes % 4096 == 0
        assert blob_format.blob_bytes == blob_format.header_bytes + blob_format.payload_bytes
        assert peek(bytes(sealed_blob(blob_format)[:PEEK_BYTES])).header_bytes == blob_format.header_bytes


def test_sealing_again_with_other_fields_leaves_nothing_of_the_first():
    other = ChunkRecord(GOLDEN_NAMESPACE, b"k" * 16, b"p" * 16, 9_999_999_999, b"s" * 32)
    blob = sealed_blob(FORMAT)
    FORMAT.seal(memoryview(blob), other, 999_999_999_999)
    assert blob == sealed_blob(FORMAT, other, 999_999_999_999)
    assert peek(blob).created_unix_s == 999_999_999_999


def test_sealing_clears_what_an_earlier_chunk_left_in_the_padding():
    blob = bytearray(b"\xaa" * FORMAT.blob_bytes)
    FORMAT.seal(memoryview(blob), GOLDEN_RECORD, GOLDEN_UNIX_S)
    assert blob[PAD:] == bytes(FORMAT.blob_bytes - PAD)
    assert blob[PAD - 1] == 0xAA


def test_sealing_a_buffer_of_another_size_is_refused():
    with pytest.raises(ValueError, match=f"expected={FORMAT.blob_bytes} observed={FORMAT.blob_bytes - 1}"):
        FORMAT.seal(memoryview(bytearray(FORMAT.blob_bytes - 1)), GOLDEN_RECORD, GOLDEN_UNIX_S)


@pytest.mark.parametrize(
    "change",
    [
        {"namespace": b"n" * 16},
        {"key": b"k" * 15},
        {"parent": b"p" * 17},
        {"prefix_sha256": b"s" * 31},
        {"chunk_index": -1},
        {"chunk_index": 10**10},
        {"tag": b"t" * 17},
        {"created_unix_s": -1},
        {"created_unix_s": 10**12},
    ],
    ids=str,
)
def test_field_that_does_not_fit_is_refused(change):
    created_unix_s = change.get("created_unix_s", GOLDEN_UNIX_S)
    changed = {name: value for name, value in change.items() if name != "created_unix_s"}
    with pytest.raises(ValueError, match="observed="):
        sealed_blob(FORMAT, msgspec.structs.replace(GOLDEN_RECORD, **changed), created_unix_s)


def test_sealing_and_verifying_copy_no_payload():
    page = LayerPage("layer", "U8", (8 << 20,), "C")
    blob_format = BlobFormat(GOLDEN_NAMESPACE, ChunkGeometry(1, 1, ((page,),)))
    blob = memoryview(bytearray(blob_format.blob_bytes))
    tracemalloc.start()
    try:
        blob_format.seal(blob, GOLDEN_RECORD, GOLDEN_UNIX_S)
        blob_format.verify(blob, KEY, PREFIX)
        check_blob(blob)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 << 10


def test_threads_seal_and_verify_different_blobs_with_one_format():
    failures = []

    def work(number):
        own = msgspec.structs.replace(GOLDEN_RECORD, key=bytes([number] * 16), chunk_index=number)
        try:
            for _ in range(50):
                verify(sealed_blob(FORMAT, own), key=own.key)
        except ChunkCorrupt as exc:
            failures.append(exc)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# --- what a blob may hold --------------------------------------------------------------------------------------------

layer_names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
pages = st.builds(
    LayerPage,
    layer_names,
    st.sampled_from(["F32", "F16", "U8", "I8"]),
    st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple),
    st.just("HNC"),
)
ranks = st.lists(
    st.lists(pages, min_size=1, max_size=4, unique_by=lambda page: page.layer).map(tuple), min_size=1, max_size=3
)


@given(ranks.map(tuple))
def test_any_geometry_is_sealed_verified_and_opened_by_safetensors(tmp_path_factory, all_ranks):
    geometry = ChunkGeometry(2, 6, all_ranks)
    blob_format = BlobFormat(GOLDEN_NAMESPACE, geometry)
    blob = sealed_blob(blob_format)
    verify(blob, blob_format)
    parsed = check_blob(memoryview(blob))
    assert parsed.blob_bytes == len(blob)
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    path.write_bytes(blob)
    with safe_open(path, framework="np") as opened:
        assert sorted(opened.keys()) == sorted(entry.name for entry in parsed.tensors)
        for segment, entry in zip(geometry.segments, parsed.tensors, strict=False):
            assert entry.shape == (3, *segment.page.shape)
            start = blob_format.header_bytes + segment.offset_bytes
            assert opened.get_tensor(entry.name).tobytes() == blob[start : start + segment.size_bytes]


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_every_dtype_is_declared_as_safetensors_names_it(tmp_path, dtype):
    blob_format = BlobFormat(GOLDEN_NAMESPACE, ChunkGeometry(4, 8, ((LayerPage("l", dtype, (2, 3), "NC"),),)))
    path = tmp_path / "blob.safetensors"
    path.write_bytes(sealed_blob(blob_format))
    with safe_open(path, framework="np") as opened:
        assert opened.get_slice("rank0/l").get_dtype() == dtype
        assert opened.get_slice("rank0/l").get_shape() == [2, 2, 3]


def test_payload_that_needs_no_padding_declares_an_empty_pad(tmp_path):
    blob_format = BlobFormat(GOLDEN_NAMESPACE, ChunkGeometry(4, 8, ((LayerPage("l", "U8", (2048,), "C"),),)))
    blob = sealed_blob(blob_format)
    assert blob_format.payload_bytes == 4096
    assert check_blob(memoryview(blob)).tensors[-1].shape == (0,)
    path = tmp_path / "blob.safetensors"
    path.write_bytes(blob)
    with safe_open(path, framework="np") as opened:
        assert opened.get_tensor("_pad").shape == (0,)


def test_two_layers_of_one_name_are_refused():
    page = LayerPage("same", "U8", (4,), "C")
    with pytest.raises(ConfigError, match="two layers of one name"):
        BlobFormat(GOLDEN_NAMESPACE, ChunkGeometry(4, 8, ((page, page),)))


def test_layer_name_that_is_not_unicode_is_refused():
    page = LayerPage("\ud800", "U8", (4,), "C")
    with pytest.raises(ConfigError, match=r"rank=0 layer='\\ud800'"):
        BlobFormat(GOLDEN_NAMESPACE, ChunkGeometry(4, 8, ((page,),)))


def test_more_layers_than_a_header_holds_are_refused():
    with pytest.raises(ConfigError, match=f"too many layers for one header. limit={MAX_HEADER_BYTES}"):
        BlobFormat(GOLDEN_NAMESPACE, many_layers(12_000))


# --- damage ----------------------------------------------------------------------------------------------------------

PLACES = {
    "length, low byte": 0,
    "length, second byte": 1,
    "length, high byte": 7,
    "opening brace": 8,
    "name of a field": f.KEY.offset - 4,
    **{f"{field.name}, first": field.offset for field in f.FIELDS},
    **{f"{field.name}, last": field.offset + field.width - 1 for field in f.FIELDS},
    "tensor table": f.TABLE_OFFSET + 5,
    "header padding, last": FORMAT.header_bytes - 1,
    "payload, first": PAYLOAD,
    "payload, last": PAD - 1,
    "_pad, first": PAD,
    "_pad, last": FORMAT.blob_bytes - 1,
}


@pytest.mark.parametrize("place", PLACES)
def test_any_flipped_bit_is_corrupt(place):
    good = sealed_blob(FORMAT)
    for bit in range(8):
        blob = bytearray(good)
        blob[PLACES[place]] ^= 1 << bit
        with pytest.raises(ChunkCorrupt):
            verify(blob)
        with pytest.raises(ChunkCorrupt):
            check_blob(memoryview(blob))


@pytest.mark.parametrize("field", f.FIELDS, ids=lambda field: field.name)
def test_changed_field_under_a_right_header_hash_is_named(field):
    blob = sealed_blob(FORMAT)
    other = b"tiered_kv/7 vllm/7 7".ljust(field.width) if field is f.STORED_BY else b"7" * field.width
    blob[field.slice] = other
    if field is not f.HEADER_XXH3:
        rehashed(blob)
    if field in (f.PARENT, f.CHUNK_INDEX, f.CREATED_UNIX_S, f.TAG, f.STORED_BY):
        verify(blob)  # whoever looks a chunk up does not know these
        return
    error = ChunkMismatch if field in (f.FORMAT, f.NAMESPACE) else ChunkCorrupt
    named = {f.FORMAT: "format version", f.TOKEN_COUNT: "header template"}.get(field, field.name)
    # A hash in the header is what is expected of the bytes; every other field is what was observed.
    values = "expected=7+ observed=[0-9a-f]+" if "xxh3" in field.name else "expected=.+ observed=7+"
    with pytest.raises(error, match=f"^{named} mismatch. {values}") as caught:
        verify(blob)
    assert isinstance(caught.value, ChunkMismatch) == (error is ChunkMismatch)


LINES = {
    "no line": b"7",
    "one part less": b"tiered_kv/0.9.1 vllm/0.32.0",
    "one part more": b"tiered_kv/0.9.1 vllm/0.32.0 cpu amx",
    "a space too many": b"tiered_kv/0.9.1  vllm/0.32.0 cpu",
    "a space before it": b" tiered_kv/0.9.1 vllm/0.32.0 cpu",
    "not this package": b"other_kv/0.9.1 vllm/0.32.0 cpu",
    "no version": b"tiered_kv/ vllm/0.32.0 cpu",
    "a version too long": b"tiered_kv/0.9.1 vllm/" + b"1" * 41 + b" cpu",
    "a door in capitals": b"tiered_kv/0.9.1 VLLM/0.32.0 cpu",
    "a quote": b'tiered_kv/0.9.1 vllm/0.32.0 cpu"amx',
    "a backslash": b"tiered_kv/0.9.1 vllm/0.32.0 cpu\\amx",
    "a line feed": b"tiered_kv/0.9.1 vllm/0.32.0 cpu\n",
    "not ASCII": "tiered_kv/0.9.1 vllm/0.32.0 cpü".encode(),
    "zeros": bytes(20),
}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_who_stored_it_is_told_in_one_way_only(line):
    blob = sealed_blob(FORMAT)
    blob[f.STORED_BY.slice] = line.ljust(f.STORED_BY.width)
    for read in (verify, lambda b: read_header(memoryview(b)), peek):
        with pytest.raises(ChunkCorrupt, match="stored_by is not well-formed"):
            read(rehashed(blob))
    if line.isascii():
        with pytest.raises(ValueError, match="who stored a chunk reads like"):
            sealed_blob(FORMAT, msgspec.structs.replace(GOLDEN_RECORD, stored_by=line.decode()))


def test_a_blob_may_leave_open_who_stored_it():
    blob = sealed_blob(FORMAT, msgspec.structs.replace(GOLDEN_RECORD, stored_by=""))
    verify(blob)
    assert peek(blob).record.stored_by == ""


def test_the_longest_line_fits():
    line = f"tiered_kv/{'1' * 24} {'d' * 12}/{'2' * 40} {'e' * 39}"
    assert len(line) == f.STORED_BY.width
    blob = sealed_blob(FORMAT, msgspec.structs.replace(GOLDEN_RECORD, stored_by=line))
    verify(blob)
    assert peek(blob).record.stored_by == line


@pytest.mark.parametrize("offset", [f.TABLE_OFFSET + 5, FORMAT.header_bytes - 1])
def test_changed_template_under_a_right_header_hash_is_corrupt(offset):
    blob = sealed_blob(FORMAT)
    blob[offset] ^= 1
    with pytest.raises(ChunkCorrupt, match=rf"header template mismatch.*offset={offset}$"):
        verify(rehashed(blob))


@pytest.mark.parametrize("place", [f.KEY.offset - 4, f.PARENT.offset, f.NAMESPACE.offset, f.CREATED_UNIX_S.offset])
def test_malformed_metadata_under_a_right_header_hash_is_corrupt(place):
    blob = sealed_blob(FORMAT)
    blob[place] = ord("G")
    with pytest.raises(ChunkCorrupt, match="not well-formed"):
        verify(rehashed(blob))


def test_blob_asked_for_by_another_key_or_prefix_is_corrupt():
    blob = sealed_blob(FORMAT)
    with pytest.raises(ChunkCorrupt, match=f"key mismatch. expected={'00' * 16} observed={KEY.hex()}"):
        verify(blob, key=bytes(16))
    with pytest.raises(ChunkCorrupt, match=f"prefix_sha256 mismatch. expected={'00' * 32} observed={PREFIX.hex()}"):
        verify(blob, prefix=bytes(32))


def test_payload_damage_names_both_hashes_and_the_key():
    blob = sealed_blob(FORMAT)
    blob[PAYLOAD] ^= 1
    with pytest.raises(ChunkCorrupt, match=rf"payload_xxh3 mismatch. expected=\w+ observed=\w+ key={KEY.hex()}"):
        verify(blob)


@pytest.mark.parametrize("size", [0, 7, 8, 45, 120, 4095, 4096, FORMAT.blob_bytes - 1, FORMAT.blob_bytes + 1])
def test_blob_of_another_size_is_corrupt(size):
    blob = sealed_blob(FORMAT).ljust(size, b"\0")[:size]
    with pytest.raises(ChunkCorrupt, match=r"truncated|size mismatch"):
        verify(blob)
    with pytest.raises(ChunkCorrupt, match=r"truncated|size mismatch"):
        check_blob(memoryview(blob))


@pytest.mark.parametrize("filler", [b"\x00", b"\xff"])
def test_blob_of_nothing_but_zeros_or_ones_is_corrupt(filler):
    with pytest.raises(ChunkCorrupt, match="header length is not possible"):
        verify(filler * FORMAT.blob_bytes)


def test_another_namespace_of_another_geometry_is_a_mismatch():
    other = BlobFormat(ANOTHER_RECORD.namespace, many_layers(100))
    assert other.header_bytes != FORMAT.header_bytes
    with pytest.raises(ChunkMismatch, match=f"namespace mismatch. expected={GOLDEN_NAMESPACE.hex()}"):
        verify(sealed_blob(other, ANOTHER_RECORD))


def test_another_namespace_with_a_damaged_header_is_corrupt():
    blob = sealed_blob(BlobFormat(ANOTHER_RECORD.namespace, golden_geometry()), ANOTHER_RECORD)
    blob[f.TABLE_OFFSET + 5] ^= 1
    with pytest.raises(ChunkCorrupt):
        verify(blob)


def test_another_format_version_is_a_mismatch_for_every_reader():
    blob = sealed_blob(FORMAT)
    blob[f.FORMAT.slice] = b"0004"
    # What version 4 writes behind the frame is its own affair.
    blob[f.NAMESPACE.offset - 5 : f.NAMESPACE.offset + 60] = b"#" * 65
    with pytest.raises(ChunkMismatch, match=r"format version mismatch\. expected=3 observed=4"):
        peek(blob)
    rehashed(blob)
    for read in (verify, lambda b: read_header(memoryview(b)), lambda b: check_blob(memoryview(b))):
        with pytest.raises(ChunkMismatch, match=r"format version mismatch\. expected=3 observed=4"):
            read(blob)


def test_flipped_version_is_corrupt_not_another_version():
    blob = sealed_blob(FORMAT)
    blob[f.FORMAT.offset + 3] ^= 2
    with pytest.raises(ChunkCorrupt, match="header_xxh3"):
        verify(blob)


# --- while it is read ------------------------------------------------------------------------------------------------


@given(data=st.data())
def test_a_blob_checked_by_pieces_is_judged_as_one_checked_at_once(data):
    """Whatever the pieces and whatever the damage: the same verdict, word for word."""
    blob = sealed_blob(FORMAT)
    for _ in range(data.draw(st.integers(0, 2), label="flips")):
        blob[data.draw(st.integers(0, len(blob) - 1), label="at")] ^= 1 << data.draw(st.integers(0, 7), label="bit")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(blob)), max_size=6), label="cuts"))
    key = data.draw(st.sampled_from([KEY, bytes(16)]), label="key")
    buffer = bytearray(len(blob))
    check, done = BlobCheck(FORMAT, memoryview(buffer)), 0
    for cut in cuts:
        buffer[done:cut], done = blob[done:cut], cut
        check.advance(cut)
    buffer[done:] = blob[done:]
    assert verdict(lambda: check.finish(key, PREFIX)) == verdict(lambda: verify(blob, key=key))


def verdict(work):
    try:
        work()
    except (ChunkCorrupt, ChunkMismatch) as exc:
        return type(exc), str(exc)
    return None


def test_a_thousand_namespaces_of_one_geometry_share_what_is_the_same_in_their_headers():
    """Each reset makes one, and a server keeps the format of each."""
    pages = tuple(LayerPage(f"layer.{number}", "BF16", (2, 16, 8), "HNC") for number in range(80))
    geometry = ChunkGeometry(16, 64, (pages,))
    kept = [BlobFormat(bytes(16), geometry)]
    tracemalloc.start()
    try:
        kept += [BlobFormat(number.to_bytes(16, "big"), geometry) for number in range(1, 1000)]
        each = tracemalloc.get_traced_memory()[0] / len(kept)
    finally:
        tracemalloc.stop()
    assert each < kept[0].header_bytes / 8
