"""Sizes of chunks, against figures worked out by hand and against the real blob."""

import pytest

from tests.kit.samples.model_configs import KNOWN
from tiered_kv.chunks.geometry import ALIGNMENT_BYTES, ChunkGeometry, LayerPage
from tiered_kv.chunks.header import BlobFormat, check_blob
from tiered_kv.errors import ConfigError
from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.tiering.slots import SlotPool
from tiered_kv.tiers.disk.tier import metadata_reserve
from tools.kv_size.model_config import ModelShape, shape_of
from tools.kv_size.sizing import Run, chunk_of, fits, geometry_of, loadable_tokens, need_of

TOKEN_BYTES = {
    "Llama-3.1-8B": 2 * 32 * 8 * 128 * 2,  # K and V, layers, KV heads, head_dim, bytes of bfloat16
    "Llama-3.1-70B": 2 * 80 * 8 * 128 * 2,
    "Qwen2.5-7B": 2 * 28 * 4 * 128 * 2,
    "Qwen3-8B": 2 * 36 * 8 * 128 * 2,
    "Qwen3-30B-A3B": 2 * 48 * 4 * 128 * 2,
    "Mistral-7B-v0.3": 2 * 32 * 8 * 128 * 2,
    "Mixtral-8x7B-v0.1": 2 * 32 * 8 * 128 * 2,
    "Gemma-3-27B": 2 * 62 * 16 * 128 * 2,  # windows of 1024 tokens: of a chunk of 256 all is stored
    "gpt-oss-120b": 2 * 18 * 8 * 64 * 2 + 2 * 18 * 8 * 64 * 2 // 2,  # windows of 128 tokens: half of a chunk
    "DeepSeek-V3": 61 * (512 + 64) * 2,
}


def chunk(name: str, **run: int):  # type: ignore[no-untyped-def]
    return chunk_of(geometry_of(shape_of(KNOWN[name]), Run(**run)))


@pytest.mark.parametrize("name", KNOWN)
def test_bytes_per_token_are_those_worked_out_by_hand(name: str) -> None:
    found = chunk(name)
    assert found.token_bytes == TOKEN_BYTES[name]
    assert found.data_bytes == 256 * TOKEN_BYTES[name]
    assert found.blob_bytes % ALIGNMENT_BYTES == 0
    assert found.header_bytes + found.data_bytes <= found.blob_bytes < 1.01 * found.data_bytes


def test_llama_takes_131072_bytes_per_token() -> None:
    assert chunk("Llama-3.1-8B").token_bytes == 131_072


def test_a_chunk_is_the_blob_that_the_real_format_seals() -> None:
    """The geometry as an engine's worker sends it, written down here once more; and a blob that passes its check."""
    pages = tuple(LayerPage(f"model.layers.{n}.self_attn.attn", "BF16", (2, 16, 256), "HNC") for n in range(28))
    geometry = ChunkGeometry(16, 256, (pages, pages))
    form = BlobFormat(bytes(16), geometry)
    found = chunk("Qwen2.5-7B", tp=2)
    assert geometry_of(shape_of(KNOWN["Qwen2.5-7B"]), Run(tp=2)) == geometry
    assert (found.header_bytes, found.blob_bytes) == (form.header_bytes, form.blob_bytes)
    blob = memoryview(bytearray(found.blob_bytes))
    form.seal(blob, ChunkRecord(bytes(16), bytes(16), bytes(16), 0, bytes(32)), 0)
    assert check_blob(blob).blob_bytes == found.blob_bytes


@pytest.mark.parametrize(("tp", "times"), [(1, 1), (2, 1), (8, 1), (16, 2), (32, 4)])
def test_more_ranks_than_kv_heads_store_copies(tp: int, times: int) -> None:
    assert chunk("Llama-3.1-8B", tp=tp).data_bytes == times * chunk("Llama-3.1-8B").data_bytes


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_mla_is_stored_once_whatever_the_ranks(tp: int) -> None:
    assert chunk("DeepSeek-V3", tp=tp) == chunk("DeepSeek-V3")


@pytest.mark.parametrize(
    ("window", "block", "stored_tokens"), [(128, 16, 128), (129, 16, 128), (130, 16, 144), (1, 16, 16), (128, 64, 128)]
)
def test_of_a_window_the_blocks_are_stored_that_continue_it(window: int, block: int, stored_tokens: int) -> None:
    shape = ModelShape("test", (window, None), 4, 4, 64, is_mla=False, dtype="BF16")
    found = chunk_of(geometry_of(shape, Run(block_tokens=block)))
    assert found.data_bytes == (256 + stored_tokens) * 4 * 64 * 2


@pytest.mark.parametrize(
    ("name", "run", "said"),
    [
        ("Llama-3.1-8B", {"chunk_tokens": 100}, "multiple of vLLM's block size. chunk_tokens=100 block_tokens=16"),
        ("Llama-3.1-8B", {"tp": 3}, "a divisor of 32. tp=3"),
        ("Llama-3.1-8B", {"tp": 4096}, "tp from 1 to 128"),
        ("Llama-3.1-8B", {"block_tokens": 512}, "block_tokens <= chunk_tokens"),
        ("Llama-3.1-70B", {"chunk_tokens": 8192}, "more than the 1073741824 that a server takes: lower --chunk-tokens"),
        ("Qwen2.5-7B", {"tp": 7}, "KV heads to be a multiple of tp, or the reverse. kv_heads=4 tp=7"),
    ],
)
def test_what_vllm_or_a_server_would_refuse_is_refused(name: str, run: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError) as told:
        chunk(name, **run)
    assert said in str(told.value)


def test_what_fits_is_what_the_server_would_hold() -> None:
    found = chunk("Llama-3.1-8B")
    size = found.blob_bytes
    host, disk, bucket = fits(found, {"host": 8 << 30, "disk": 200 << 30, "bucket": 2 << 40})
    assert host.chunks == SlotPool(8 << 30).slot_count_max(size) == (8 << 30) // size
    assert disk.chunks == ((200 << 30) - metadata_reserve(200 << 30)) // size
    assert bucket.chunks == (2 << 40) // size
    assert fits(found, {"host": None, "disk": 1 << 20, "bucket": None})[0].chunks == 0


@pytest.mark.parametrize("tokens", [256, 300, 7936, 131072])
@pytest.mark.parametrize("prompts", [1, 7, 1000])
def test_what_is_needed_is_the_least_that_fits(tokens: int, prompts: int) -> None:
    found = chunk("Qwen2.5-7B")
    need = need_of(found, tokens, prompts)
    assert need.chunks == tokens // 256
    assert need.all_bytes == need.chunks * prompts * found.blob_bytes
    assert fits(found, {"disk": need.disk_bytes})[0].chunks >= need.chunks * prompts
    assert fits(found, {"disk": need.disk_bytes - 2})[0].chunks < need.chunks * prompts
    assert loadable_tokens(found, need.load_bytes) >= need.chunks * 256
    assert loadable_tokens(found, need.load_bytes - 8) < need.chunks * 256


def test_a_prompt_shorter_than_a_chunk_needs_nothing() -> None:
    assert need_of(chunk("Llama-3.1-8B"), 255, 1000) == (need_of(chunk("Llama-3.1-8B"), 0, 1))
    assert need_of(chunk("Llama-3.1-8B"), 255, 1000).all_bytes == 0
