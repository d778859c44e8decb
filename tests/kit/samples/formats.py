"""Samples of namespaces, geometries and blobs for the tests of keys and chunks."""

import os
from typing import Any

from tiered_kv.chunks.geometry import ChunkGeometry, LayerPage
from tiered_kv.chunks.header import HEADER_XXH3, BlobFormat, header_hash, read_frame
from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.keys.namespace import FORMAT_VERSION, Namespace

GOLDEN_NAMESPACE = bytes(range(16))
GOLDEN_UNIX_S = 1_700_000_000
GOLDEN_RECORD = ChunkRecord(
    namespace=GOLDEN_NAMESPACE,
    key=bytes(range(0x20, 0x30)),
    parent=bytes(range(0x30, 0x40)),
    chunk_index=3,
    prefix_sha256=bytes(range(0x40, 0x60)),
    tag=bytes(range(0x60, 0x70)),
    stored_by="tiered_kv/0.9.1 vllm/0.32.0 cpu/CPU_ATTN:amx",
)


def namespace_fields(**changes: object) -> dict[str, Any]:
    """All required fields of a namespace, with ``changes``."""
    fields: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "weights": "hf:0123456789abcdef0123456789abcdef01234567",
        "text_config": {"hidden_size": 1024, "rope_theta": "10000.0", "rope_scaling": None},
        "kv_dtype": "bfloat16",
        "quantization": None,
        "attention_backend": "FLASH_ATTN",
        "kv_layout": "HND",
        "geometry": [[["model.layers.0.self_attn.attn", "BF16", [8, 16, 64], "HNC"]]],
        "max_model_len": 4096,
        "kv_scales": None,
        "block_tokens": 4,
        "chunk_tokens": 4,
        "tp": 1,
        "pp": 1,
        "dcp": 1,
        "model_runner": "v1",
        "vllm_version": "0.32",
        "kv_encoding": {"platform": "cuda", "groups": [["FLASH_ATTN"]]},
        "settings": {"mamba_config.enable_stochastic_rounding": False, "multimodal_config.mm_processor_kwargs": None},
        "epoch": "base",
    }
    return fields | changes


def sample_namespace(**changes: object) -> Namespace:
    return Namespace.from_fields(namespace_fields(**changes))


def golden_geometry() -> ChunkGeometry:
    """Two ranks with different layers, two dtypes, and a name that JSON has to escape."""
    first = (LayerPage("model.layers.0.attn", "F16", (2, 4, 8), "HNC"), LayerPage('q"\\é', "U8", (4, 3), "NC"))
    return ChunkGeometry(block_tokens=4, chunk_tokens=8, ranks=(first, (LayerPage("l1", "F32", (1, 4, 5), "HNC"),)))


def sealed_blob(
    blob_format: BlobFormat, record: ChunkRecord = GOLDEN_RECORD, created_unix_s: int = GOLDEN_UNIX_S
) -> bytearray:
    """A sealed blob whose payload counts up, modulo 251."""
    blob = bytearray(blob_format.blob_bytes)
    blob[blob_format.header_bytes :] = bytes(i % 251 for i in range(blob_format.payload_bytes))
    blob_format.seal(memoryview(blob), record, created_unix_s)
    return blob


def rehashed(blob: bytearray) -> bytearray:
    """The blob with its header's hash made right again, as a buggy or foreign writer would leave it."""
    header_bytes = read_frame(blob).header_bytes
    blob[HEADER_XXH3.slice] = header_hash(blob[:header_bytes]).encode("ascii")
    return blob


def chosen_seed(default: int) -> int:
    """Seed of a randomised test, printed so that a failure can be repeated with TIERED_KV_TEST_SEED."""
    seed = int(os.environ.get("TIERED_KV_TEST_SEED", default))
    print(f"seed={seed}")
    return seed
