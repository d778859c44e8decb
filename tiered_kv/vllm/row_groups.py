"""Which bytes of a row of vLLM's host memory belong to which group of layers.

Pure arithmetic over vLLM's specs; called in a worker, used where rows are copied (``row_jobs.py``).

vLLM cuts one row for a chunk of *any* group: room for the pages of all tensors that its worker made of the KV caches,
one after the other, on each rank (``OffloadingConnectorWorker.register_kv_caches``, ``create_next_worker_view``).
Layers of several groups lie in one tensor where they share memory on the GPU. For a chunk of one group the worker
writes the unpadded pages of that group's layers and nothing else (``_fill_direct_ops``); what is between them and
behind them is what lay in that row before, KV of other prompts::

    row     |-- tensor 0 ------------|-- tensor 1 ------------|-- pad --|
    group 0 [ layer 0       ][ old  ][ layer 2       ][ old  ]   old        unpadded pages of two layers
    group 1 [ layer 1               ] old                        old        a longer page of one layer

So of each row only its group's *spans* are stored, one after the other, and a load writes only these.

Where layers forget, a row of several blocks is written in part: of a window vLLM skips blocks that were freed, of a
recurrent group it writes the block with the state. It does not say which, so such models have rows of one block.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tiered_kv.errors import UnsupportedModel
from tiered_kv.vllm.kv_groups import is_recurrent, local_tokens, window_tokens

Span = tuple[int, int]
"""Offset in a row, and length, in bytes."""


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


def row_groups(offloading: Any, kv_cache_config: Any) -> tuple[RowGroup, ...]:
    """The groups whose rows vLLM offloads, with their spans in this rank's part of a row.

    Args:
        offloading: vLLM's ``OffloadingConfig``.

    Raises:
        UnsupportedModel: It cannot be said which bytes a group's rows have.
    """
    blocks = int(offloading.cache.blocks_per_chunk)
    groups = [(int(one.group_id), kv_cache_config.kv_cache_groups[int(one.group_id)]) for one in offloading.groups]
    tokens = [int(one.tokens_per_block) * blocks for one in offloading.groups]
    if len(groups) == 1 and not _forgets(groups[0][1].kv_cache_spec):
        return (RowGroup(groups[0][0], tokens[0]),)  # a row is all its own
    if blocks > 1 and any(_forgets(group.kv_cache_spec) for _, group in groups):
        raise UnsupportedModel(
            "where layers forget (windows, recurrent layers) vLLM's offloading writes rows of several blocks in part. "
            "Leave out block_size and blocks_per_chunk, and give vLLM a larger --block-size where rows are small. "
            f"blocks_per_chunk={blocks}"
        )
    if offloading.canonical_layout:
        raise UnsupportedModel("canonical_layout was not tried with several groups of layers. Leave it out")
    spans = _spans(groups, kv_cache_config, blocks, int(offloading.worker_kv_bytes_per_block))
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


def _spans(
    groups: list[tuple[int, Any]], kv_cache_config: Any, blocks: int, block_bytes: int
) -> dict[int, tuple[Span, ...]]:
    """By group, its layers' pages in a row of ``blocks`` blocks of ``block_bytes``."""
    places = {
        layer: (int(tensor.offset) + at * int(tensor.layer_stride), int(tensor.block_stride))
        for tensor in kv_cache_config.kv_cache_tensors
        for at, layer in enumerate(tensor.layers)
    }
    starts: dict[tuple[int, int], int] = {}  # by a tensor's place on the GPU, where it starts in a row
    end = 0
    for _, group in groups:
        for layer, spec in _layers(group):
            if places[layer][1] != int(spec.page_size_bytes):
                raise UnsupportedModel(
                    "vLLM moves a block of all layers as one, with KV of other prompts in it, and this was not tried. "
                    f"layer={layer} block_stride={places[layer][1]} page_bytes={spec.page_size_bytes}"
                )
            if places[layer] not in starts:
                starts[places[layer]] = end
                end += blocks * int(spec.page_size_bytes)
    if end > blocks * block_bytes:
        raise UnsupportedModel(
            f"the pages of all groups do not fit a row. bytes={end} row_bytes={blocks * block_bytes}"
        )
    return {
        number: _joined(
            (starts[places[layer]] + block * int(spec.page_size_bytes), _unpadded_bytes(spec))
            for layer, spec in _layers(group)
            for block in range(blocks)
        )
        for number, group in groups
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
    """What vLLM's ``get_sliding_window_size_in_chunks`` says."""
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
