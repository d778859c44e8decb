"""Passed blocks: those that a window or an attention chunk has passed, so that vLLM frees them, before they are stored.

A chunk is stored when its last token's id is known: of a prompt before the step that computes it, of an answer one step
after it. By then vLLM has the first block of these back::

    window of 9 tokens, blocks of 4, chunk of 16; a draft needs one block more (drafts.py)
    chunk    |................|        stored with a draft: its last three blocks
    at 15          kkkkkkkkkkk         vLLM keeps the 8 tokens before the next one, in whole blocks
    at 16              kkkkkkkk        the chunk's last token is computed and not known to be final: the first is free

So such a block is pinned in the last step in which its request has it, until its chunk is queued (a step or a few, as a
rule), vLLM lacks blocks, or the request ends or loses what it computed. Without drafts windows have no such blocks, and
attention chunks (Llama 4) all those of every chunk that ends with one.

Owns these pins. Called by the save queue, in vLLM's scheduler thread.
"""

from collections import Counter
from collections.abc import Iterator

from tiered_kv.vllm.compat import PagedBlocks
from tiered_kv.vllm.kv_groups import NULL_BLOCK, BlockTables, CacheGroups


class PassedBlocks:
    """Blocks of one chunk of each request, by their place: group, and index in the group's block table.

    Only its own methods write its fields. Threads: vLLM's scheduler thread only.
    """

    def __init__(self, groups: CacheGroups) -> None:
        self._groups = groups
        self._blocks: PagedBlocks | None = None
        self._kept: dict[str, dict[tuple[int, int], int]] = {}

    def bind(self, blocks: PagedBlocks) -> None:
        """Take vLLM's block pool."""
        self._blocks = blocks

    def lacks(self, request_id: str, chunk: int, computed_tokens: int) -> bool:
        """Whether vLLM frees more of a request's chunk than is pinned when it plans the step behind so many tokens."""
        kept = self._kept.get(request_id, {})
        return any(place not in kept for place in self._freed(chunk, computed_tokens))

    def _freed(self, chunk: int, computed_tokens: int) -> Iterator[tuple[int, int]]:
        """Places of a chunk's stored blocks that vLLM frees by then."""
        for group in self._groups.stored:
            places = group.stored_range(chunk)
            for place in range(places.start, min(places.stop, group.first_kept(computed_tokens))):
                yield group.number, place

    def keep(self, request_id: str, chunk: int, tables: BlockTables, computed_tokens: int) -> None:
        """Pin what vLLM frees of a request's chunk when it plans the step behind so many tokens.

        Args:
            chunk: The same until the request's blocks are let go.
            tables: Its blocks, of the step before that one.
        """
        assert self._blocks is not None
        kept = self._kept.get(request_id, {})
        for number, place in self._freed(chunk, computed_tokens):
            block = tables[number][place] if place < len(tables[number]) else NULL_BLOCK
            if block != NULL_BLOCK and (number, place) not in kept:
                self._blocks.hold([block])
                kept[number, place] = block
        if kept:
            self._kept[request_id] = kept

    def whole_tables(self, request_id: str, tables: BlockTables) -> BlockTables:
        """A request's blocks, with those that are pinned where vLLM has them no more."""
        if request_id not in self._kept:
            return tables
        whole = [list(table) for table in tables]
        for (number, place), block in self._kept[request_id].items():
            whole[number][place] = block
        return whole

    def let_go(self, request_id: str) -> None:
        """Unpin a request's blocks, if it has any: their chunk is queued, or cannot be stored any more."""
        if kept := self._kept.pop(request_id, None):
            assert self._blocks is not None
            self._blocks.let_go(list(kept.values()))

    @property
    def blocks(self) -> list[int]:
        """All that are pinned."""
        return [block for kept in self._kept.values() for block in kept.values()]

    def let_all_go(self) -> None:
        """Unpin all: what was computed so far is not to be stored, or vLLM's pool is to be empty."""
        for request_id in list(self._kept):
            self.let_go(request_id)

    def let_idle_go(self) -> None:
        """Unpin those of requests where vLLM then has a block more."""
        assert self._blocks is not None
        idle = {block for block, pins in Counter(self.blocks).items() if self._blocks.holders(block) == pins}
        for request_id, kept in list(self._kept.items()):
            if not idle.isdisjoint(kept.values()):
                self.let_go(request_id)
