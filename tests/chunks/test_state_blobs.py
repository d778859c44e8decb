"""Blobs of states: of a chunk's size, told by name, and described as bytes."""

import msgspec
import pytest
from safetensors import safe_open

from tests.chunks.test_header import many_layers
from tests.kit.samples.formats import GOLDEN_NAMESPACE, GOLDEN_RECORD, golden_geometry, rehashed, sealed_blob
from tiered_kv.chunks.header import KEY, PARENT, BlobFormat, check_blob, peek, read_header
from tiered_kv.errors import ChunkCorrupt
from tiered_kv.keys.state_keys import state_records

FIRST, SECOND = state_records(GOLDEN_RECORD, 2)


@pytest.mark.parametrize("geometry", [golden_geometry(), many_layers(1), many_layers(200)], ids=["golden", "1", "200"])
def test_a_state_is_sealed_verified_and_read_as_bytes_of_each_rank(geometry, tmp_path):
    form = BlobFormat(GOLDEN_NAMESPACE, geometry)
    blob = sealed_blob(form, SECOND)
    form.verify(memoryview(blob), SECOND.key, SECOND.prefix_sha256)
    assert len(blob) == len(sealed_blob(form)), "as large as a chunk"
    assert peek(memoryview(blob)).record == SECOND
    parsed = check_blob(memoryview(blob))
    assert parsed.header.header_bytes == form.header_bytes
    ranks = range(len(geometry.ranks))
    assert [(t.name, t.dtype) for t in parsed.tensors] == [*((f"rank{r}/state", "U8") for r in ranks), ("_pad", "U8")]
    for rank, tensor in zip(ranks, parsed.tensors, strict=False):
        segments = geometry.rank_segments(rank)
        assert tensor.offset_bytes == segments[0].offset_bytes
        assert tensor.size_bytes == sum(segment.size_bytes for segment in segments)
    (tmp_path / "state.safetensors").write_bytes(blob)
    with safe_open(tmp_path / "state.safetensors", "np") as file:
        assert set(file.keys()) == {tensor.name for tensor in parsed.tensors}


@pytest.mark.parametrize(("theirs", "ours"), [(GOLDEN_RECORD, FIRST), (FIRST, GOLDEN_RECORD), (FIRST, SECOND)])
def test_a_blob_under_another_ones_name_is_corrupt(theirs, ours):
    """Also where its header's hash is right: a buggy writer called a chunk a state, or a state a chunk."""
    form = BlobFormat(GOLDEN_NAMESPACE, golden_geometry())
    blob = sealed_blob(form, theirs)
    with pytest.raises(ChunkCorrupt):
        form.verify(memoryview(blob), ours.key, ours.prefix_sha256)
    blob[KEY.slice], blob[PARENT.slice] = KEY.encode(ours.key), PARENT.encode(ours.parent)
    with pytest.raises(ChunkCorrupt):
        form.verify(memoryview(rehashed(blob)), ours.key, ours.prefix_sha256)


def test_a_states_header_may_be_as_long_as_its_chunks_and_no_chunk_may():
    form = BlobFormat(GOLDEN_NAMESPACE, many_layers(200))
    assert form.header_bytes > 4096
    assert read_header(memoryview(sealed_blob(form, FIRST))).header.header_bytes == form.header_bytes
    blob = sealed_blob(form, FIRST)
    changed = msgspec.structs.replace(FIRST, key=b"k" * 16)
    blob[KEY.slice] = KEY.encode(changed.key)
    with pytest.raises(ChunkCorrupt, match="header length mismatch"):
        read_header(memoryview(rehashed(blob)))
