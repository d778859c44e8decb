"""How much room a model's KV takes: the blob of one chunk, how many fit into so many bytes, what so many tokens need.

The blob is that of ``chunks``: a real geometry and a real header are built, nothing of their arithmetic is repeated
here. Limits are judged as the server judges them. Reads and writes nothing. Called by ``__main__``.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tiered_kv.chunks.arena import SLAB_BYTES
from tiered_kv.chunks.geometry import DTYPE_BYTES, ChunkGeometry, LayerPage
from tiered_kv.chunks.header import BlobFormat
from tiered_kv.errors import ConfigError
from tiered_kv.keys.namespace import DIGEST_BYTES
from tiered_kv.tiering.types import Limits
from tiered_kv.tiers.disk.tier import metadata_reserve
from tools.kv_size.model_config import ModelShape
from tools.kv_size.recurrent import parts_of_state

RANKS_MAX: Final = 128
CHUNK_TOKENS_MAX: Final = 1 << 20
LAYER_NAME: Final = "model.layers.{}.self_attn.attn"
"""vLLM's usual name; others are a little longer or shorter, which may move the header's padding by 4096 bytes."""


@dataclass(frozen=True, slots=True)
class Run:
    """How the model is run.

    Attributes:
        tp: Tensor-parallel ranks.
        block_tokens: Tokens of vLLM's block; with recurrent layers what it is a multiple of.
        chunk_tokens: Tokens of a chunk.
    """

    tp: int = 1
    block_tokens: int = 16
    chunk_tokens: int = 256


@dataclass(frozen=True, slots=True)
class Chunk:
    """The blob of one chunk.

    Attributes:
        tokens: Its tokens.
        data_bytes: KV in it, of all ranks.
        header_bytes: Its header.
        blob_bytes: All of it, padding included: what it takes in every tier.
    """

    tokens: int
    data_bytes: int
    header_bytes: int
    blob_bytes: int

    @property
    def token_bytes(self) -> int:
        """Bytes of KV per token, rounded up."""
        return -(-self.data_bytes // self.tokens)


@dataclass(frozen=True, slots=True)
class States:
    """What the states of recurrent layers take.

    Attributes:
        parts: Parts of a state, each as large as a chunk.
        data_bytes: State at one boundary, of all ranks; the rest of its parts is padding.
    """

    parts: int = 0
    data_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Fit:
    """What fits into one tier's limit."""

    tier: str
    limit_bytes: int
    chunks: int


@dataclass(frozen=True, slots=True)
class Need:
    """What prompts without a common beginning need.

    Attributes:
        chunks: Whole chunks of one prompt.
        parts: Parts of the state at its last boundary.
        all_bytes: Of all prompts, in each tier that is to hold them.
        disk_bytes: The least ``disk_bytes`` that holds them.
        load_bytes: The least ``host_bytes`` with which one request loads such a prompt whole.
    """

    chunks: int
    parts: int
    all_bytes: int
    disk_bytes: int
    load_bytes: int


def run_of(shape: ModelShape, run: Run) -> Run:
    """How the model is run: with recurrent layers the chunk is vLLM's block, which is as large as a layer's state.

    Raises:
        ConfigError: vLLM would not run it so.
    """
    if shape.recurrent is None:
        return run
    token = _heads_per_rank(shape, run.tp) * shape.head_values * DTYPE_BYTES[shape.dtype]
    block = run.block_tokens * -(-shape.recurrent.layer_bytes(run.tp) // (run.block_tokens * token))
    return Run(run.tp, block, block)


def states_of(shape: ModelShape, run: Run) -> States:
    """What the state at one boundary takes."""
    if shape.recurrent is None:
        return States()
    layers = shape.recurrent.layers
    parts = parts_of_state(len(shape.windows), layers)
    return States(parts, layers * shape.recurrent.layer_bytes(run.tp) * run.tp)


def geometry_of(shape: ModelShape, run: Run) -> ChunkGeometry:
    """The chunks that an engine with this model stores.

    Raises:
        ConfigError: vLLM would not run it so, or no chunk can be made of it.
    """
    if not (1 <= run.tp <= RANKS_MAX and 1 <= run.block_tokens <= run.chunk_tokens <= CHUNK_TOKENS_MAX):
        raise ConfigError(
            f"expected tp from 1 to {RANKS_MAX} and block_tokens <= chunk_tokens <= {CHUNK_TOKENS_MAX}. "
            f"tp={run.tp} block_tokens={run.block_tokens} chunk_tokens={run.chunk_tokens}"
        )
    if run.chunk_tokens % run.block_tokens:
        raise ConfigError(
            "chunk_tokens must be a multiple of vLLM's block size. "
            f"chunk_tokens={run.chunk_tokens} block_tokens={run.block_tokens}"
        )
    if shape.attention_heads % run.tp:
        raise ConfigError(
            f"vLLM splits the attention heads over the ranks evenly: choose a divisor of {shape.attention_heads}. "
            f"tp={run.tp}"
        )
    heads, ranks = _heads_per_rank(shape, run.tp), 1 if shape.is_mla else run.tp
    blocks = run.chunk_tokens // run.block_tokens
    page = (heads, run.block_tokens, shape.head_values)
    pages = tuple(
        LayerPage(LAYER_NAME.format(number), shape.dtype, page, "HNC", _stored(window, run.block_tokens, blocks))
        for number, window in enumerate(shape.windows)
    )
    return ChunkGeometry(run.block_tokens, run.chunk_tokens, (pages,) * ranks)


def _heads_per_rank(shape: ModelShape, tp: int) -> int:
    """KV heads of one rank: with more ranks than heads each rank keeps, and stores, its own copy of one."""
    if shape.is_mla:
        return 1
    if shape.kv_heads % tp and tp % shape.kv_heads:
        raise ConfigError(
            f"vLLM needs the KV heads to be a multiple of tp, or the reverse. kv_heads={shape.kv_heads} tp={tp}"
        )
    return max(1, shape.kv_heads // tp)


def _stored(window: int | None, block_tokens: int, blocks: int) -> int:
    """Blocks of a chunk that are stored for a layer, as in ``vllm.groups``; 0 stands for all of them."""
    if window is None:
        return 0
    stored = min(blocks, max(1, -(-(window - 1) // block_tokens)))
    return 0 if stored == blocks else stored


def chunk_of(geometry: ChunkGeometry) -> Chunk:
    """The blob of one chunk.

    Raises:
        ConfigError: Its header would be too long, or it is larger than a server takes.
    """
    form = BlobFormat(bytes(DIGEST_BYTES), geometry)
    if form.blob_bytes > SLAB_BYTES:
        raise ConfigError(
            f"a chunk would take {form.blob_bytes} bytes, more than the {SLAB_BYTES} that a server takes: "
            f"lower --chunk-tokens. chunk_tokens={geometry.chunk_tokens}"
        )
    return Chunk(geometry.chunk_tokens, geometry.data_bytes, form.header_bytes, form.blob_bytes)


def fits(chunk: Chunk, limits: Mapping[str, int | None]) -> list[Fit]:
    """How many chunks fit into ``host``, ``disk`` and ``bucket``; tiers without a limit are left out."""
    found = []
    for tier, limit in limits.items():
        if limit is not None:
            usable = limit - metadata_reserve(limit) if tier == "disk" else limit
            found.append(Fit(tier, limit, max(0, usable) // chunk.blob_bytes))
    return found


def loadable_tokens(chunk: Chunk, host_bytes: int, parts: int = 0) -> int:
    """The longest prefix that one request may load, with a state of so many parts."""
    return max(0, int(host_bytes * Limits().request_share) // chunk.blob_bytes - parts) * chunk.tokens


def need_of(chunk: Chunk, tokens: int, prompts: int, state_parts: int = 0) -> Need:
    """What so many prompts of so many tokens need, each with the state at the last boundary before its end."""
    chunks = tokens // chunk.tokens
    parts = state_parts if (tokens - 1) // chunk.tokens else 0
    one = (chunks + parts) * chunk.blob_bytes
    return Need(chunks, parts, one * prompts, _with_reserve(one * prompts), math.ceil(one / Limits().request_share))


def _with_reserve(stored_bytes: int) -> int:
    """The least limit of a disk that leaves so much after its reserve for metadata."""
    if not stored_bytes:
        return 0
    limit = max(stored_bytes + metadata_reserve(0), -(-stored_bytes * 100 // 99))
    return limit if limit - metadata_reserve(limit) >= stored_bytes else limit + 1
