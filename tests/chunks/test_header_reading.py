"""Reading headers without knowing the geometry: what scans and the CLI do."""

import pytest

from tests.kit.samples.formats import GOLDEN_NAMESPACE, golden_geometry, rehashed, sealed_blob
from tiered_kv.chunks import header as f
from tiered_kv.chunks.header import MAX_HEADER_BYTES, BlobFormat, peek, read_header
from tiered_kv.errors import ChunkCorrupt

FORMAT = BlobFormat(GOLDEN_NAMESPACE, golden_geometry())


@pytest.mark.parametrize("field", f.FIELDS, ids=lambda field: field.name)
def test_peek_names_the_field_that_is_not_well_formed(field):
    for bad in (b"G", b"A", b" ", b'"', b"\xff"):
        blob = sealed_blob(FORMAT)
        blob[field.offset + 1 : field.offset + 2] = bad
        with pytest.raises(ChunkCorrupt, match=r"does not start as ours|" + field.name):
            peek(blob)


def test_peek_sees_damage_between_the_fields():
    blob = sealed_blob(FORMAT)
    blob[f.KEY.offset - 4] ^= 1
    with pytest.raises(ChunkCorrupt, match="between the fields"):
        peek(blob)


@pytest.mark.parametrize("size", [0, 7, 40, 200, f.TABLE_OFFSET])
def test_peek_of_too_few_bytes_is_corrupt(size):
    with pytest.raises(ChunkCorrupt):
        peek(sealed_blob(FORMAT)[:size])


@pytest.mark.parametrize("header_bytes", [8, 4095, 4097, 0, MAX_HEADER_BYTES + 4096, 2**63])
def test_header_of_an_impossible_length_is_corrupt(header_bytes):
    blob = sealed_blob(FORMAT)
    blob[:8] = ((header_bytes - 8) % 2**64).to_bytes(8, "little")
    with pytest.raises(ChunkCorrupt, match="header length is not possible"):
        peek(blob)


TABLES = {
    "empty": b"}",
    "no comma": b'"_pad":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
    "not closed": b',"_pad":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}',
    "no padding": b',"a":{"dtype":"U8","shape":[4096],"data_offsets":[0,4096]}}',
    "padding of another type": b',"_pad":{"dtype":"I8","shape":[4096],"data_offsets":[0,4096]}}',
    "payload not aligned": b',"_pad":{"dtype":"U8","shape":[4095],"data_offsets":[0,4095]}}',
    "gap": b',"_pad":{"dtype":"U8","shape":[4096],"data_offsets":[1,4097]}}',
    "backwards": b',"_pad":{"dtype":"U8","shape":[4096],"data_offsets":[4096,0]}}',
    "size and shape differ": b',"_pad":{"dtype":"U8","shape":[4097],"data_offsets":[0,4096]}}',
    "unknown type": b',"_pad":{"dtype":"X8","shape":[0],"data_offsets":[0,0]}}',
    "unknown member": b',"_pad":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"x":[[[[]]]]}}',
    "missing member": b',"_pad":{"dtype":"U8","shape":[0]}}',
    "three offsets": b',"_pad":{"dtype":"U8","shape":[0],"data_offsets":[0,0,0]}}',
    "negative extent": b',"_pad":{"dtype":"U8","shape":[-1,-4096],"data_offsets":[0,4096]}}',
    "float": b',"_pad":{"dtype":"U8","shape":[0.5],"data_offsets":[0,0]}}',
    "huge extents": b',"_pad":{"dtype":"U8","shape":[' + b"281474976710656," * 16 + b"2]" + b',"data_offsets":[0,0]}}',
    "huge integer": b',"_pad":{"dtype":"U8","shape":[' + b"9" * 3000 + b'],"data_offsets":[0,0]}}',
    "spaces": b', "_pad":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
    "repeated name": b',"_pad":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' * 2 + b"}",
    "needless escape": b',"\\u005fpad":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
    "lone surrogate": b',"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
    "not unicode": b',"\xff":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
    "deep nesting": b',"_pad":' + b"[" * 3000,
    "deep nesting of objects": b',"_pad":' + b'{"dtype":' * 300,
}


@pytest.mark.parametrize("name", TABLES)
def test_table_that_no_seal_writes_is_corrupt_even_under_a_right_hash(name):
    blob = sealed_blob(FORMAT)
    blob[f.TABLE_OFFSET : FORMAT.header_bytes] = TABLES[name].ljust(FORMAT.header_bytes - f.TABLE_OFFSET)
    with pytest.raises(ChunkCorrupt, match=r"tensor|between the fields"):
        read_header(memoryview(rehashed(blob)))


def test_header_longer_than_it_has_to_be_is_corrupt():
    blob = sealed_blob(FORMAT)
    blob[:8] = (8192 - 8).to_bytes(8, "little")
    blob[4096:8192] = b" " * 4096
    with pytest.raises(ChunkCorrupt, match=r"header length mismatch\. expected=4096 observed=8192"):
        read_header(memoryview(rehashed(blob)))
