"""Which bytes of a row of vLLM's host memory belong to which group of layers.

Pure arithmetic over vLLM's specs; called in a worker, used where rows are copied (``row_jobs.py``).

vLLM cuts one row for a chunk of *any* group, and of a chunk of one group it writes the pages of that group's layers and
nothing else. What is between them and behind them is what lay in that row before, KV of other prompts. So of each row
only its group's *spans* are stored, one after the other, and a load writes only these. There are three kinds of rows:

direct      Each rank has its own part, with room for the pages of all tensors that its worker made of the KV caches
            (``register_kv_caches``, ``create_next_worker_view``). The worker writes pages without their padding
            (``_fill_direct_ops``). Layers of several groups lie in one tensor where they share memory on the GPU::

    row     |-- tensor 0 ------------|-- tensor 1 ------------|-- pad --|
    group 0 [ layer 0       ][ old  ][ layer 2       ][ old  ]   old        unpadded pages of two layers
    group 1 [ layer 1               ] old                        old        a longer page of one layer

canonical   One part for all ranks (``canonical_layout``, ``create_next_canonical_view``), where the cell of a tensor is
            as large as its largest page of all ranks together. Where these pages do not depend on how many ranks there
            are, engines of another tensor parallelism have the same spans with the same bytes.

packed      Where blocks are outermost in the GPU's memory (DeepSeek V4), the worker writes whole blocks with the pages
            of all layers side by side. Those of other groups' layers are what the block's last owner left there::

    block   [ layer 0 | layer 2 | old ]     of group 0
    block   [ layer 1       | old     ]     of group 1

Where layers forget, a row of several blocks is written in part: of a window vLLM skips blocks that were freed, of a
recurrent group it writes the block with the state. It does not say which, so such models have rows of one block.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

from tiered_kv.errors import UnsupportedModel
from tiered_kv.vllm.kv_groups import is_recurrent, is_ring, local_tokens, window_tokens

Span = tuple[int, int]
"""Offset in a row, and length, in bytes."""


class _Place(NamedTuple):
    """Of a layer's pages on the GPU: where the first one begins, and each one after it."""

    offset: int
    block_stride: int


@dataclass(frozen=True, slots=True)
class RowGroup:
    """The rows of one group of layers.

    Attributes:
        number: vLLM's number of the group: the end of each of its keys.
        tokens: Of a row.
        window_rows: How many rows before a position continue a prompt there; None: all of them.
        spans: What belongs to the group, ascending; of one rank, or of all.
    """

    number: int
    tokens: int
    window_rows: int | None = None
    spans: tuple[Span, ...] = ()

    @property
    def stored_bytes(self) -> int:
        return sum(length for _, length in self.spans)


def row_groups(
    offloading: Any, kv_cache_config: Any, canonical_pages: Mapping[str, int] | None = None
) -> tuple[RowGroup, ...]:
    """The groups whose rows vLLM offloads, with their spans in this rank's part of a row.

    Args:
        offloading: vLLM's ``OffloadingConfig``.
        canonical_pages: Where rows are canonical: by layer, bytes of its page of all ranks (``canonical_pages`` of
            ``compat.py``). Then the spans are those of all ranks.

    Raises:
        UnsupportedModel: It cannot be said which bytes a group's rows have.
    """
    blocks = int(offloading.cache.blocks_per_chunk)
    groups = [(int(one.group_id), kv_cache_config.kv_cache_groups[int(one.group_id)]) for one in offloading.groups]
    tokens = [int(one.tokens_per_block) * blocks for one in offloading.groups]
    if blocks > 1 and any(_forgets(group.kv_cache_spec) for _, group in groups):
        raise UnsupportedModel(
            "where layers forget (windows, recurrent layers) vLLM's offloading writes rows of several blocks in part. "
            "Leave out block_size and blocks_per_chunk, and give vLLM a larger --block-size where rows are small. "
            f"blocks_per_chunk={blocks}"
        )
    _check_rings(groups, kv_cache_config)
    is_packed = _is_packed([group for _, group in groups], kv_cache_config)
    if canonical_pages is not None:
        spans = _canonical_spans(groups, kv_cache_config, blocks, canonical_pages)
    elif len(groups) == 1 and not _forgets(groups[0][1].kv_cache_spec):
        return (RowGroup(groups[0][0], tokens[0]),)  # a row is all its own
    elif is_packed:
        spans = _packed_spans(groups, kv_cache_config, blocks)
    else:
        spans = _direct_spans(groups, kv_cache_config, blocks)
    row_bytes = blocks * int(offloading.worker_kv_bytes_per_block)
    if canonical_pages is not None and not offloading.replicated_layout:
        row_bytes *= int(offloading.parallel.world_size)
    if (end := max(sum(span) for of_group in spans.values() for span in of_group)) > row_bytes:
        raise UnsupportedModel(f"the pages of all groups do not fit a row. bytes={end} row_bytes={row_bytes}")
    return tuple(
        RowGroup(number, row_tokens, _window_rows(group.kv_cache_spec, row_tokens), spans[number])
        for (number, group), row_tokens in zip(groups, tokens, strict=True)
    )


def on_rank(groups: Iterable[RowGroup], rank: int, rank_bytes: int) -> tuple[RowGroup, ...]:
    """The same spans where a rank has them: its part of a row begins behind those of the ranks before it."""
    at = rank * rank_bytes
    return tuple(replace(one, spans=tuple((at + start, length) for start, length in one.spans)) for one in groups)


def of_all_ranks(ranks: Iterable[tuple[RowGroup, ...]]) -> tuple[RowGroup, ...]:
    """Groups with the spans that any rank has; ranks with equal KV name the same ones."""
    return tuple(
        replace(same[0], spans=_joined(span for one in same for span in one.spans)) for same in zip(*ranks, strict=True)
    )


def _check_rings(groups: Iterable[tuple[int, Any]], kv_cache_config: Any) -> None:
    """Refuse pages that are made of a ring: vLLM 0.32 computes wrong KV for them behind a hit, with no tier of ours.

    A ring has the last tokens one by one until a state is made of them. vLLM's offloading neither stores it nor ends
    its hits where a ring is empty, so what follows a hit inside such a group of tokens is made of other tokens.
    """
    offloaded = {number for number, _ in groups}
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        for layer, spec in _layers(group):
            if number not in offloaded and is_ring(spec):
                raise UnsupportedModel(
                    "pages that are made of a ring: vLLM's offloading does not store the ring, and computes wrong KV "
                    f"behind its hits. Use TieredKVConnector. layer={layer}"
                )


def _is_packed(groups: Iterable[Any], kv_cache_config: Any) -> bool:
    """Whether vLLM moves a block of all layers as one, because blocks are outermost in memory.

    Raises:
        UnsupportedModel: Blocks lie apart for another reason. vLLM's worker takes that for the same, and then moves
            the blocks of the first layer only.
    """
    places = _places(kv_cache_config)
    layers = [(layer, spec) for group in groups for layer, spec in _layers(group)]
    if all(places[layer].block_stride == int(spec.page_size_bytes) for layer, spec in layers):
        return False
    block_bytes = int(kv_cache_config.kv_cache_tensors[0].size) // int(kv_cache_config.num_blocks)
    for layer, spec in layers:
        place, page = places[layer], int(spec.page_size_bytes)
        if place.block_stride != block_bytes or place.offset + page > block_bytes:
            raise UnsupportedModel(
                "the pages of a layer lie apart, and blocks are not outermost: vLLM's offloading moves the first "
                "layer's only. Leave TieringOffloadingSpec to models whose pages are not padded. "
                f"layer={layer} block_stride={place.block_stride} page_bytes={page} block_bytes={block_bytes}"
            )
    return True


def _direct_spans(groups: Iterable[tuple[int, Any]], kv_cache_config: Any, blocks: int) -> dict[int, tuple[Span, ...]]:
    """By group, its layers' unpadded pages in a row: one padded page for each block, tensor by tensor."""
    groups, places = list(groups), _places(kv_cache_config)
    starts: dict[_Place, int] = {}  # where a tensor starts in a row; layers that share memory share a tensor
    end = 0
    for _, group in groups:
        for layer, spec in _layers(group):
            if places[layer] not in starts:
                starts[places[layer]] = end
                end += blocks * int(spec.page_size_bytes)
    return {
        number: _joined(
            (starts[places[layer]] + block * int(spec.page_size_bytes), _unpadded_bytes(spec))
            for layer, spec in _layers(group)
            for block in range(blocks)
        )
        for number, group in groups
    }


def _canonical_spans(
    groups: Iterable[tuple[int, Any]], kv_cache_config: Any, blocks: int, pages: Mapping[str, int]
) -> dict[int, tuple[Span, ...]]:
    """By group, its layers' canonical pages in a row: one cell for each block, as large as the tensor's largest page.

    vLLM starts each layer's page at its cell's first byte, and its ranks fill all of it.
    """
    groups, places = list(groups), _places(kv_cache_config)
    cells: dict[_Place, int] = {}
    for _, group in groups:
        for layer, _spec in _layers(group):
            if layer not in pages:
                raise UnsupportedModel(f"vLLM has no canonical page of a layer. Leave out canonical_layout. {layer=}")
            cells[places[layer]] = max(cells.get(places[layer], 0), pages[layer])
    starts = dict(zip(cells, accumulate((blocks * cell for cell in cells.values()), initial=0), strict=False))
    return {
        number: _joined(
            (starts[places[layer]] + block * cells[places[layer]], pages[layer])
            for layer, _spec in _layers(group)
            for block in range(blocks)
        )
        for number, group in groups
    }


def _packed_spans(groups: Iterable[tuple[int, Any]], kv_cache_config: Any, blocks: int) -> dict[int, tuple[Span, ...]]:
    """By group, its layers' unpadded pages in a row of whole blocks.

    Raises:
        UnsupportedModel: A layer's page is not in one piece.
    """
    groups, places = list(groups), _places(kv_cache_config)
    layers = {layer: spec for _, group in groups for layer, spec in _layers(group)}
    for tensor in kv_cache_config.kv_cache_tensors:
        apart = [
            one for one in tensor.layers[1:] if one in layers and tensor.layer_stride < layers[one].page_size_bytes
        ]
        if apart:
            raise UnsupportedModel(
                "several groups of layers whose heads lie apart in a block are not supported. Leave out "
                f"VLLM_KV_CACHE_LAYOUT, or set BLHNC. layer={apart[0]} layer_stride={tensor.layer_stride}"
            )
    return {
        number: _joined(
            (block * places[layer].block_stride + places[layer].offset, _unpadded_bytes(spec))
            for layer, spec in _layers(group)
            for block in range(blocks)
        )
        for number, group in groups
    }


def _places(kv_cache_config: Any) -> dict[str, _Place]:
    """By layer, where its pages are on the GPU."""
    return {
        layer: _Place(int(tensor.offset) + at * int(tensor.layer_stride), int(tensor.block_stride))
        for tensor in kv_cache_config.kv_cache_tensors
        for at, layer in enumerate(tensor.layers)
    }


def _layers(group: Any) -> Iterator[tuple[str, Any]]:
    of_layers = getattr(group.kv_cache_spec, "kv_cache_specs", {})
    for layer in group.layer_names:
        yield layer, of_layers.get(layer, group.kv_cache_spec)


def _unpadded_bytes(spec: Any) -> int:
    if is_recurrent(spec):
        spec = replace(spec, page_size_padded=None)
        return int(spec.page_size_bytes)
    return int(spec.unpadded_page_size_bytes)


def _forgets(spec: Any) -> bool:
    return is_recurrent(spec) or window_tokens(spec) is not None or local_tokens(spec) is not None


def _window_rows(spec: Any, row_tokens: int) -> int | None:
    """What vLLM's ``get_sliding_window_size_in_chunks`` says, or one more where it keeps tokens for drafts."""
    if is_recurrent(spec):
        return 1
    tokens = window_tokens(spec) or local_tokens(spec)
    return None if tokens is None else -(-tokens // row_tokens)


def _joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Ascending, each byte once, neighbours as one."""
    joined: list[Span] = []
    for start, length in sorted(spans):
        if joined and start <= sum(joined[-1]):
            first, before = joined[-1]
            joined[-1] = (first, max(before, start + length - first))
        else:
            joined.append((start, length))
    return tuple(joined)
