"""Models of the simulator whose KV is not one state per token of all tokens, or has a draft's, by vLLM's real specs.

A family names its layers with vLLM's own spec objects; what a layer keeps, attends to and compresses is read from them.
Block sizes, windows and ratios are small, so that a prompt of 130 tokens crosses many of them. The shapes follow vLLM
0.32: ``models/deepseek_v4`` (compressed pages, an indexer's, a window of MLA and the compressor's own),
``models/deepseek_v41`` (the window replayed), ``models/glm5next`` and ``models/qwen4_exp`` (a ring), Llama 4 (attention
in chunks).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from tests.sim.vllm.model import NEXT, OWN, Layer

BLOCK_TOKENS = 4
"""Of models with one state per token in all layers."""
LARGE_BLOCK_TOKENS = 8
"""Of compressed pages, and of what shares a group with them."""
KV_HEADS = 2
HEAD_SIZE = 8
STATE_PAGE_BYTES = LARGE_BLOCK_TOKENS * KV_HEADS * 2 * HEAD_SIZE * 2
"""Of a block of full attention, to which vLLM pads that of a state."""


@dataclass(frozen=True)
class Kind:
    """A layer by its spec.

    Attributes:
        tail: For compressed states: the number of the layer that has the tokens of the open group, one by one.
        group: For a ring: tokens of a group.
        draft: It belongs to a draft, of this kind (``Layer.draft``).
        span: Tokens that one compressed state is computed from, its last ones; 0: those it stands for.
    """

    spec: KVCacheSpec
    tail: int | None = None
    span: int = 0
    group: int = 1
    draft: str = ""

    def layer(self, number: int) -> Layer:
        """The layer as the simulated model sees it."""
        spec: Any = self.spec
        is_recurrent = isinstance(spec, MambaSpec)
        ratio = 1 if is_recurrent else int(spec.tokens_per_state)
        return Layer(
            name=f"model.layers.{number}.attn",
            number=number,
            is_recurrent=is_recurrent,
            draft=self.draft,
            window=getattr(spec, "sliding_window", None),
            local=getattr(spec, "attention_chunk_size", None),
            tokens_per_state=ratio,
            span=self.span or ratio,
            tail=self.tail,
            ring=spec.block_size if isinstance(spec, CircularBufferSpec) else None,
            group=self.group,
            replayed=spec.prefix_replay_tokens,
        )


def full(**changes: Any) -> Kind:
    """Full attention, two KV heads."""
    fields = {"num_kv_heads": KV_HEADS, "head_size": HEAD_SIZE, "dtype": torch.bfloat16}
    return Kind(FullAttentionSpec(**{"block_size": BLOCK_TOKENS} | fields | changes))


def draft(kind: str, like: Kind | None = None) -> Kind:
    """A draft's layer, which nothing tells from a layer of the model's own of its kind: full attention unless given."""
    return replace(like or full(), draft=kind)


def windowed(tokens: int, **changes: Any) -> Kind:
    """Sliding-window attention, two KV heads."""
    fields: dict[str, Any] = {"num_kv_heads": KV_HEADS, "head_size": HEAD_SIZE, "dtype": torch.bfloat16}
    return Kind(SlidingWindowSpec(**{"block_size": BLOCK_TOKENS, "sliding_window": tokens} | fields | changes))


def local(tokens: int) -> Kind:
    """Attention in chunks of so many tokens."""
    fields = {"num_kv_heads": KV_HEADS, "head_size": HEAD_SIZE, "dtype": torch.bfloat16}
    return Kind(ChunkedLocalAttentionSpec(block_size=BLOCK_TOKENS, attention_chunk_size=tokens, **fields))


def mla(ratio: int = 1, tail: int | None = None, span: int = 0, **changes: Any) -> Kind:
    """MLA, compressed where ``ratio`` is not 1."""
    fields = {"num_kv_heads": 1, "head_size": 16, "dtype": torch.bfloat16, "max_tp_shards": 1}
    spec = MLAAttentionSpec(block_size=LARGE_BLOCK_TOKENS, tokens_per_state=ratio, **fields | changes)
    return Kind(spec, tail, span)


def indexer(ratio: int = 1, tail: int | None = None) -> Kind:
    """An indexer's page: opaque bytes, padded to a multiple of 64 as DeepSeek V4 pads to 576."""
    return mla(ratio, tail, head_size=24, dtype=torch.uint8, alignment=64)


def mla_window(tokens: int, **changes: Any) -> Kind:
    """A sliding window of MLA."""
    fields = {"num_kv_heads": 1, "head_size": 24, "dtype": torch.bfloat16, "max_tp_shards": 1}
    return Kind(SlidingWindowMLASpec(block_size=BLOCK_TOKENS, sliding_window=tokens, **fields | changes))


def ring(capacity: int, group: int) -> Kind:
    """One block per request with the tokens of the open group, and room for drafts behind them."""
    spec = CircularBufferSpec(
        block_size=capacity, num_kv_heads=1, head_size=24, head_size_v=0, dtype=torch.bfloat16, max_tp_shards=1
    )
    return Kind(spec, group=group)


def recurrent(page_bytes: int = STATE_PAGE_BYTES) -> Kind:
    """A recurrent layer as of gated delta nets: a convolution's state and a recurrent one, of two dtypes.

    vLLM pads its page to that of the attention it shares a pool with; what is padding is nobody's.
    """
    spec = MambaSpec(
        block_size=LARGE_BLOCK_TOKENS,
        shapes=((3, 8), (2, 4, 4)),
        dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=page_bytes,
        mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
        mamba_cache_mode="align",
    )
    return Kind(spec)


FAMILIES: Mapping[str, tuple[Kind, ...]] = {
    # One group, pages of several sizes: a sparse MLA with its indexer, and pages compressed from the first layer's KV.
    "compressed": (mla(), indexer(), mla(4, tail=0), mla(8, tail=0), indexer(4, tail=0)),
    # DeepSeek V4: compressed pages, whose compressors keep windows of their own; states of 4 tokens overlap.
    "mla_windows": (
        mla_window(9),
        mla_window(8, head_size=32),
        mla(4, tail=1, span=8),
        mla_window(16, head_size=40),
        mla(8, tail=3),
        indexer(4, tail=1),
    ),
    # Llama 4, with chunks of attention that hold chunks of the cache, and the other way round.
    "local": (full(), local(48), local(48), local(48)),
    "local_short": (full(), local(8), local(8), local(8)),
    # GLM 5.3 and Qwen 4: pages compressed from a ring that no hit brings.
    "ring": (full(block_size=LARGE_BLOCK_TOKENS), ring(8, group=4), mla(4, tail=1), indexer(4, tail=1)),
    # DeepSeek V4.1: the window is computed again behind a hit. It is whole blocks: vLLM frees those in front of it.
    "replayed": (mla_window(8, bounded_replay=True), mla(), indexer(), mla(4, tail=1)),
    # Qwen3-Next: three recurrent layers to one that attends, in a group each.
    "state": (recurrent(), recurrent(), recurrent(), full(block_size=LARGE_BLOCK_TOKENS)),
    # The same kinds, two layers to a group, beside windows.
    "state_window": (
        recurrent(),
        recurrent(),
        full(block_size=LARGE_BLOCK_TOKENS),
        full(block_size=LARGE_BLOCK_TOKENS),
        windowed(20, block_size=LARGE_BLOCK_TOKENS),
        windowed(20, block_size=LARGE_BLOCK_TOKENS),
    ),
    # The same as "state", with a prefix cache that finds prefixes inside blocks (``MATCH_UNIT``).
    "state_tail": (recurrent(), recurrent(), recurrent(), full(block_size=LARGE_BLOCK_TOKENS)),
    # Qwen3-Next with its MTP layer, which vLLM finds by its place: the last one, in the group of its kind.
    "state_draft": (
        recurrent(),
        recurrent(),
        recurrent(),
        full(block_size=LARGE_BLOCK_TOKENS),
        draft(NEXT, full(block_size=LARGE_BLOCK_TOKENS)),
    ),
    # A draft beside the model's layers: an EAGLE head, or a model of its own.
    "draft_eagle": (full(), full(), draft(NEXT)),
    "draft_model": (full(), full(), draft(OWN)),
    # The same beside windows, as EAGLE3 with gpt-oss; and an MTP layer that has the window itself (MiMo V2). vLLM takes
    # no draft whose layers are of two groups.
    "draft_window": (full(), windowed(9), full(), windowed(9), draft(NEXT)),
    "draft_model_window": (full(), windowed(9), draft(OWN)),
    "windowed_draft": (full(), windowed(9), draft(NEXT, windowed(9))),
    # DeepSeek V3 with its MTP layer.
    "draft_mla": (mla(), mla(), draft(NEXT, mla())),
}

STATES = frozenset({"state", "state_window", "state_tail", "state_draft"})
"""Families with recurrent layers. vLLM needs its prefix cache for them."""
LARGE_BLOCKS = STATES | {"draft_mla", "compressed", "mla_windows", "ring", "replayed"}
"""Families whose full attention has large blocks."""
LAYER_OUTERMOST = frozenset({"compressed", "local", "local_short"})
"""Families that vLLM also lays out layer by layer: those of one group, or of equal pages."""
ONLY_V2 = frozenset({"replayed"})
"""Families that vLLM runs with model runner V2 only."""

DRAFTS: Mapping[str, str] = {
    "draft_eagle": "eagle",
    "draft_model": "draft_model",
    "draft_window": "eagle",
    "draft_model_window": "draft_model",
    "windowed_draft": "eagle",
    "draft_mla": "mtp",
    "state_draft": "mtp",
}
"""Families with a draft, and vLLM's name of its method."""
MATCH_UNIT: Mapping[str, int] = {"state_tail": 2}
"""Families that are run with vLLM's ``prefix_match_unit``, in tokens, and ``prefix_cache_retention_interval`` None:
with another one vLLM itself is wrong, and refused (``test_simulator_states.py``)."""
ATTENTION = tuple(name for name in FAMILIES if name not in STATES and name not in DRAFTS)
"""Families of neither."""
