"""Undrafted blocks: the model's KV is computed, the draft's beside it is not.

vLLM runs the draft for all requests of a step or for none: not where the longest of them is too long for it, which
happens close to ``max_model_len``. What that step computed has the model's KV and, in the draft's layers, whatever was
in the blocks before. It is never written later. In vLLM's own prefix cache such blocks cost accepted drafts until they
are evicted; stored, they would cost them for ever and everywhere. So they are not stored, nor is what lies behind them
in a request, because the draft attends to all before it.

Owns the numbers of these blocks. A block stays among them, whoever holds it, until a step with a draft writes it from
its first token on, or a load fills it. Called by the scheduler side, in vLLM's scheduler thread.
"""

import math
from collections.abc import Mapping
from typing import Any

from tiered_kv.vllm.drafts import Drafts
from tiered_kv.vllm.kv_groups import BlockTables, CacheGroups
from tiered_kv.vllm.requests import RequestState


class UndraftedBlocks:
    """Blocks whose draft's KV was not written.

    Only its own methods write its fields. Threads: vLLM's scheduler thread only.
    """

    def __init__(self, drafts: Drafts | None, groups: CacheGroups) -> None:
        """``drafts``: None where nothing is drafted, and then no block ever counts."""
        self._drafts = drafts
        self._groups = groups
        self._blocks: set[int] = set()

    def step(self, requests: Mapping[str, RequestState], output: Any) -> None:
        """Note what vLLM's next step writes; call it before that step's chunks are queued."""
        if self._drafts is None:
            return
        spans = [
            (name, requests[name].request.num_computed_tokens, tokens)
            for name, tokens in output.num_scheduled_tokens.items()
            if name in requests
        ]
        longest = max((computed + tokens for _, computed, tokens in spans), default=0)
        is_drafted = self._drafts.are_run(longest)
        if is_drafted and not self._blocks:
            return
        for name, computed, tokens in spans:
            tables = output.kv_connector_block_state.get_block_ids(name)
            if tables is not None:
                self._wrote(tables, computed, computed + tokens, is_drafted=is_drafted)

    def loaded(self, tables: BlockTables, computed: int, end: int) -> None:
        """A load fills the request's blocks of these tokens, the draft's layers too."""
        if self._blocks:
            self._wrote(tables, computed, end, is_drafted=True)

    def _wrote(self, tables: BlockTables, start: int, end: int, *, is_drafted: bool) -> None:
        for group in self._groups:
            table = tables[group.number]
            first = -(-start // group.block_tokens) if is_drafted else start // group.block_tokens
            blocks = table[first : -(-end // group.block_tokens)]
            if is_drafted:
                self._blocks.difference_update(blocks)
            else:
                self._blocks.update(blocks)

    def drafted_chunks(self, tables: BlockTables, chunks: int) -> int:
        """Of the first ``chunks`` of a request, the leading ones that have the draft's KV."""
        if not self._blocks:
            return chunks
        for group in self._groups:
            for place, block in enumerate(tables[group.number][: chunks * group.chunk_blocks]):
                if block in self._blocks:
                    chunks = min(chunks, place // group.chunk_blocks)
                    break
        return chunks


class UndraftedTokens:
    """The same below vLLM's offloading, where nobody says which blocks a row is made of: by request, where it begins.

    A request that finds such blocks in vLLM's prefix cache, and stores them because vLLM's rows have them no more, is
    not known for one.

    Threads: vLLM's scheduler thread only.
    """

    def __init__(self, drafts: Drafts | None) -> None:
        """``drafts``: None where nothing is drafted, and then no token ever counts."""
        self._drafts = drafts
        self._first: dict[str, int] = {}

    def step(self, output: Any) -> None:
        """Note a step that vLLM's scheduler has planned."""
        if self._drafts is None:
            return
        cached, tokens = output.scheduled_cached_reqs, output.num_scheduled_tokens
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed.update((new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs)
        is_drafted = self._drafts.are_run(max((computed[name] + tokens[name] for name in tokens), default=0))
        for name in tokens:
            if not is_drafted:
                self._first[name] = min(self._first.get(name, computed[name]), computed[name])
            elif self._first.get(name, -1) >= computed[name]:  # it was preempted, and all of it is computed again
                del self._first[name]

    def first(self, name: str) -> float:
        """How many leading tokens of a request have the draft's KV, as far as they are computed."""
        return self._first.get(name, math.inf)

    def forget(self, name: str) -> None:
        """The request is over."""
        self._first.pop(name, None)
