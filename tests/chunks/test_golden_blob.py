"""Blobs written down once from docs/format.md, without this package's code, and kept for ever: one of each version."""

from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from tests.kit.samples.formats import GOLDEN_NAMESPACE, GOLDEN_RECORD, GOLDEN_UNIX_S, golden_geometry
from tiered_kv.chunks.header import BlobFormat, BlobHeader, check_blob, peek, read_header, refuse_foreign
from tiered_kv.errors import ChunkMismatch

GOLDEN = Path(__file__).parents[1] / "golden"
PATH = GOLDEN / "blob_v3.safetensors"


@pytest.fixture
def golden():
    return memoryview(PATH.read_bytes())


def test_sealing_the_same_chunk_writes_the_golden_bytes(golden):
    blob_format = BlobFormat(GOLDEN_NAMESPACE, golden_geometry())
    blob = bytearray(blob_format.blob_bytes)
    blob[blob_format.header_bytes :] = golden[blob_format.header_bytes :]
    blob_format.seal(memoryview(blob), GOLDEN_RECORD, GOLDEN_UNIX_S)
    assert bytes(blob) == bytes(golden)


def test_golden_blob_verifies(golden):
    BlobFormat(GOLDEN_NAMESPACE, golden_geometry()).verify(golden, GOLDEN_RECORD.key, GOLDEN_RECORD.prefix_sha256)
    assert check_blob(golden) == read_header(golden[:4096])


def test_golden_header_is_read_from_its_first_4096_bytes(golden):
    assert peek(golden[:4096]) == BlobHeader(
        record=GOLDEN_RECORD,
        format_version=3,
        token_count=8,
        payload_xxh3=read_header(golden).header.payload_xxh3,
        created_unix_s=1_700_000_000,
        header_bytes=4096,
    )
    said = peek(golden[:4096]).record  # which are equal whoever stored it
    assert (said.tag, said.stored_by) == (GOLDEN_RECORD.tag, GOLDEN_RECORD.stored_by)


def test_safetensors_opens_the_golden_blob():
    with safe_open(PATH, framework="np") as opened:
        metadata = opened.metadata()
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # it is no dict
    assert metadata["tiered_kv_format"] == "0003"
    assert metadata["stored_by"].rstrip() == GOLDEN_RECORD.stored_by and len(metadata["stored_by"]) == 128
    assert metadata["tag"] == GOLDEN_RECORD.tag.hex()
    assert metadata["key"] == GOLDEN_RECORD.key.hex()
    assert {name: (t.dtype.name, t.shape) for name, t in tensors.items()} == {
        "rank0/model.layers.0.attn": ("float16", (2, 2, 4, 8)),
        'rank0/q"\\é': ("uint8", (2, 4, 3)),
        "rank1/l1": ("float32", (2, 1, 4, 5)),
        "_pad": ("uint8", (3656,)),
    }
    payload = PATH.read_bytes()[4096:]
    offsets = {segment.page.layer: segment.offset_bytes for segment in golden_geometry().segments}
    for name, tensor in tensors.items():
        offset = golden_geometry().data_bytes if name == "_pad" else offsets[name.partition("/")[2]]
        assert tensor.tobytes() == payload[offset : offset + tensor.nbytes]
    assert not np.any(tensors["_pad"])


@pytest.mark.parametrize("version", [1, 2])
def test_a_blob_of_an_older_version_is_somebody_elses_and_never_a_damaged_one_of_ours(version):
    old = memoryview((GOLDEN / f"blob_v{version}.safetensors").read_bytes())
    ours = BlobFormat(GOLDEN_NAMESPACE, golden_geometry())
    for read in (
        lambda: peek(old[:4096]),
        lambda: read_header(old),
        lambda: check_blob(old),
        lambda: ours.verify(old, GOLDEN_RECORD.key, GOLDEN_RECORD.prefix_sha256),
        lambda: refuse_foreign(old[:4096], GOLDEN_NAMESPACE),
    ):
        with pytest.raises(ChunkMismatch, match=f"format version mismatch. expected=3 observed={version}"):
            read()
