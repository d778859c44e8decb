"""vLLM's KV cache groups: which blocks of a chunk are stored, which a load fills.

Pure arithmetic over block numbers; must not touch tensors (``kv_layout.py`` does). Called by both roles.

A group is a set of layers with one block table. Full attention and MLA keep every block. A sliding window of ``W``
tokens keeps those with the last ``W - 1`` tokens and frees the rest (block 0, the null block, takes their places in the
table), so of a chunk only its last blocks are stored: enough to continue at the chunk's end::

    chunk                  |--- c0 ---|--- c1 ---|--- c2 ---|
    full attention stores  [..........][..........][.........]
    a window stores              [....]     [....]     [....]       min(chunk, W - 1 tokens rounded up to blocks)
    a hit of 3 chunks loads all of full attention, and of the window the blocks vLLM allocated: c2's

A window longer than a chunk stores whole chunks and is loaded from several.

The rules by vLLM's kinds (``v1/core/single_type_kv_cache_manager.py`` of 0.32 and 0.33, unless a file is named). With
``n`` tokens computed, ``B`` tokens in a block and a hit of ``L`` tokens:

=================  ====================================  ================================  =============================
kind               vLLM keeps                            a hit needs                       of a chunk is stored
=================  ====================================  ================================  =============================
full, MLA          all blocks                            all blocks before ``L``           all blocks
MLA, ``R`` tokens  the same blocks: a page has ``B / R`` all blocks before ``L``; ``L`` is  all blocks
per state          states, each of ``R`` tokens          a multiple of ``R``, as ``B`` is
sliding window     blocks from token ``n - W + 1`` on    the last ``ceil((W - 1) / B)``    so many, its last ones
(also MLA's)       (``get_num_skipped_tokens``)          (``_contiguous_blocks_for_hit``)
attention in       blocks from ``n // A * A`` on         those from ``L // A * A`` on;     all blocks where chunks
chunks of ``A``    (``get_num_skipped_tokens``)          none where ``A`` divides ``L``    divide ``A``, none where
                                                                                           ``A`` divides chunks
ring               one block per request, never shared   nothing (``prefix_cacheable`` of  nothing
                   (``CircularBufferManager``)           kv_cache_interface.py is false)
window with        as a sliding window                   nothing: vLLM computes the hit's  nothing
bounded replay                                           last ``W`` tokens again
                                                         (sched/scheduler.py,
                                                         ``_mark_prefix_replay``)
=================  ====================================  ================================  =============================

A load must fill every block that vLLM allocated for it: those of ``[computed, L)`` that the group keeps at ``n = L``
(``allocate_external_computed_blocks``). Of groups that are left out it fills none.

``num_tokens - 1``: vLLM's own hits end there at the latest (``KVCacheManager.get_computed_blocks``), and of a prompt
that was loaded whole it computes the last token again (``Scheduler._update_waiting_for_remote_kv``), alone. That is
right only where a token's KV and what it attends to come from blocks that a load filled. A window lacks the token
before its oldest; the blocks of an attention chunk that ends with the prompt are freed; and a state of ``R`` tokens
that the last token completes would be computed from a ring that has nothing of the ``R - 1`` before it. So unless all
groups keep one state per token of all tokens, the last chunk of such a prompt is computed. (vLLM's scheduler knows of a
group its first layer's spec only. A compressed layer in the group of a full one has its tokens there, and needs no
ring.)

A group of recurrent layers (Mamba, gated delta nets, short convolutions) has no block per token but a state per
boundary between chunks, in one block; the chunk is that block then. What is stored of a boundary is the state of
every such group, a *part* each (``keys/state_keys.py``). A load of tokens up to ``end`` fills the block at ``end /
chunk - 1`` of the table, where vLLM's MambaManager puts the state that it goes on from (``mamba_cache_mode`` "align").
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any, Final

from tiered_kv.errors import ConfigError
from tiered_kv.keys.tail_keys import TAIL_TOKENS_MAX
from tiered_kv.vllm.drafts import Drafts, has_drafts_kv
from tiered_kv.vllm.step import BlockRun, ChunkCopy

NULL_BLOCK: Final = 0
"""vLLM's placeholder in block tables for blocks that no token needs any more."""

RECURRENT_SPEC: Final = "MambaSpec"
"""vLLM's spec of all recurrent layers, whatever they compute."""

STATE_BLOCKS: Final = 3
"""Most blocks of a group of recurrent layers that a request holds without drafts: the state it goes on from, the one it
computes, and a copy at a boundary (MambaSpec.max_memory_usage_bytes)."""

BlockTables = Sequence[Sequence[int]]
"""Block ids of one request, per group."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One KV cache group.

    Attributes:
        number: Its place among vLLM's groups, and so its block table's.
        block_tokens: Tokens of one block.
        chunk_blocks: Blocks of a chunk.
        stored_blocks: How many of them are stored, its last ones; 0: the group is left out.
        window_tokens: vLLM frees the blocks in front of so many tokens; None: it keeps all.
        local_tokens: vLLM frees the blocks of an attention chunk of so many tokens when it ends; None: it keeps all.
        state_tokens: Tokens of one stored state.
        is_shared: vLLM's prefix cache has its blocks. Otherwise a request fills them by itself, after a load, too.
        fixed_blocks: Blocks that a request holds, whatever its length; 0: it depends on that.
    """

    number: int
    block_tokens: int
    chunk_blocks: int
    stored_blocks: int
    window_tokens: int | None = None
    local_tokens: int | None = None
    state_tokens: int = 1
    is_shared: bool = True
    fixed_blocks: int = 0

    @property
    def is_windowed(self) -> bool:
        """Whether vLLM frees blocks of a request that runs."""
        return self.window_tokens is not None or self.local_tokens is not None

    @property
    def may_compute_last_token_alone(self) -> bool:
        """Whether a prompt's last token can be computed again when all of the prompt was loaded."""
        return self.is_shared and not self.is_windowed and self.state_tokens == 1

    def peak_blocks(self, tokens: int, computed_tokens: int, step_tokens: int) -> int:
        """Most blocks that a request of ``tokens`` holds while it computes, step by step, those not computed yet."""
        every = self.whole_blocks(tokens)
        if not self.is_windowed:
            return every
        kept, new = self.local_tokens or (self.window_tokens or 0) - 1, min(tokens - computed_tokens, step_tokens)
        return min(every, -(-kept // self.block_tokens) + -(-new // self.block_tokens) + 1)

    def whole_blocks(self, tokens: int) -> int:
        """Blocks that so many tokens take before vLLM frees any."""
        return self.fixed_blocks or -(-tokens // self.block_tokens)

    def first_kept(self, computed_tokens: int) -> int:
        """Place of the first block that vLLM keeps when so many tokens are computed."""
        skipped = 0
        if self.window_tokens is not None:
            skipped = max(0, computed_tokens - self.window_tokens + 1)
        elif self.local_tokens is not None:
            skipped = computed_tokens // self.local_tokens * self.local_tokens
        return skipped // self.block_tokens

    @property
    def passed_tokens(self) -> int:
        """How far behind a chunk's start vLLM frees the first of its stored blocks, at the earliest."""
        if self.local_tokens is not None:
            return self.chunk_blocks * self.block_tokens
        if self.window_tokens is None:
            return sys.maxsize
        return (self.chunk_blocks - self.stored_blocks + 1) * self.block_tokens + self.window_tokens - 1

    def stored_range(self, chunk: int) -> range:
        """Places in the block table of a chunk's blocks that are stored."""
        end = (chunk + 1) * self.chunk_blocks
        return range(end - self.stored_blocks, end)

    def needed_range(self, chunk: int) -> range:
        """Places of a chunk's blocks that a prefix which ends with the chunk needs."""
        end = (chunk + 1) * self.chunk_blocks
        return range(max(self.first_kept(end * self.block_tokens), end - self.chunk_blocks), end)


@dataclass(frozen=True, slots=True)
class CacheGroups:
    """The groups of a model. Iterates over those that have blocks per token, in vLLM's order.

    Attributes:
        groups: These.
        states: Places of the groups of recurrent layers among vLLM's groups; each is a part of a stored state.
        hash_tokens: Tokens of one of vLLM's block hashes; 0: unknown, and then those of a block.
        state_blocks: Most blocks of such a group that a request holds: with drafts, one more for each token guessed.
    """

    groups: Sequence[CacheGroup]
    states: tuple[int, ...] = ()
    hash_tokens: int = 0
    state_blocks: int = STATE_BLOCKS

    def __iter__(self) -> Iterator[CacheGroup]:
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, place: int) -> CacheGroup:
        return self.groups[place]

    @classmethod
    def of(cls, kv_cache_config: Any, chunk_tokens: int, dcp: int = 1, spare_blocks: int = 0) -> "CacheGroups":
        """Read vLLM's groups.

        Args:
            dcp: So many ranks share the tokens of a block.
            spare_blocks: Stored of a window beyond what continues at a chunk's end, to continue so many blocks earlier:
                of ``block_tokens``, the unit of hits, which may be several blocks of the window's group.

        Raises:
            ConfigError: ``chunk_tokens`` is no multiple of the blocks' common size.
        """
        groups, states, blocks, guessed = [], [], [], 0
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        spare_tokens = spare_blocks * lcm(*(_block_tokens(spec, dcp) for spec in specs if not is_recurrent(spec)))
        for number, spec in enumerate(specs):
            if is_recurrent(spec):
                states.append(number)
                blocks.append(int(spec.block_size))
                guessed = int(spec.num_speculative_blocks)
                continue
            groups.append(_cache_group(number, spec, chunk_tokens, dcp, spare_tokens))
            blocks.append(groups[-1].block_tokens)
        hash_tokens = int(getattr(kv_cache_config, "hash_block_size", None) or 0)
        result = cls(groups, tuple(states), hash_tokens, STATE_BLOCKS + guessed)
        if chunk_tokens % (block := lcm(*blocks)) or any(blocks[number] != chunk_tokens for number in states):
            raise ConfigError(
                "chunk_tokens must be a multiple of the block sizes of all KV cache groups. "
                f"chunk_tokens={chunk_tokens} block_sizes={blocks} "
                f"nearest={-(-chunk_tokens // block) * block}"
            )
        for group in result:
            _check_local_attention(group, chunk_tokens)
        if len(result) and not result.stored:
            raise ConfigError(f"no KV cache group has anything to store in a chunk. chunk_tokens={chunk_tokens}")
        return result

    @property
    def stored(self) -> tuple[CacheGroup, ...]:
        """Those of which something is stored, in vLLM's order: copies and pages have a place for each of them."""
        return tuple(group for group in self if group.stored_blocks)

    @property
    def block_tokens(self) -> int:
        """The unit in which vLLM counts hits: a multiple of every group's block."""
        return lcm(*(group.block_tokens for group in self))

    @property
    def has_windows(self) -> bool:
        """Whether some group keeps only the end of a prefix."""
        return any(group.is_windowed for group in self)

    @property
    def passed_tokens(self) -> int:
        """How far behind a chunk's start vLLM frees the first of its stored blocks; ``sys.maxsize``: it keeps them."""
        return min((group.passed_tokens for group in self.stored), default=sys.maxsize)

    @property
    def stored_blocks(self) -> int:
        """Blocks of one chunk over all groups: those that a save pins."""
        return sum(group.stored_blocks for group in self)

    def whole_blocks(self, tokens: int) -> int:
        """Most blocks that so many tokens take in all groups, with one more each for drafts."""
        return sum(group.whole_blocks(tokens) + 1 for group in self) + self.state_blocks * len(self.states)

    def peak_blocks(self, tokens: int, computed_tokens: int, step_tokens: int) -> int:
        """The same over all groups."""
        peaks = (group.peak_blocks(tokens, computed_tokens, step_tokens) for group in self)
        return sum(peaks) + self.state_blocks * len(self.states)

    def loadable_tokens(
        self, held_tokens: int, request_tokens: int, chunk_tokens: int, drafts: Drafts | None = None
    ) -> int:
        """How much of a held prefix of whole chunks may be loaded for a request of so many tokens.

        With drafts as much as vLLM's own prefix cache would give (``drafts.py``). Else, unless every group keeps one
        state per token of all tokens, the last token must not be part of it: vLLM computes that token again, alone (see
        the module's docstring).
        """
        if drafts is not None:
            is_hybrid = len(self.groups) + len(self.states) > 1
            return drafts.loadable_tokens(held_tokens, request_tokens, self.block_tokens, is_hybrid=is_hybrid)
        is_right = not self.states and all(group.may_compute_last_token_alone for group in self)
        if not is_right and held_tokens >= request_tokens:
            return (request_tokens - 1) // chunk_tokens * chunk_tokens
        return held_tokens

    def cached_chunks(self, hashes: Sequence[Any], cached: Callable[[Any, list[int]], object]) -> int:
        """Leading whole chunks that vLLM's prefix cache can continue from, judged by their blocks' hashes.

        A guess that costs a lookup anew when it is wrong: vLLM's own answer comes later.

        Args:
            hashes: The request's block hashes, of ``hash_tokens`` each. A block's is that of its last tokens, since
                each names all tokens before it. 0 is returned where their unit is unknown and groups differ in it.
            cached: Gives the cached blocks of a hash in some groups, or None: ``BlockPool.get_cached_block``.
        """
        shared = [group for group in self if group.is_shared]
        unit = self.hash_tokens or shared[0].block_tokens
        if any(group.block_tokens % unit for group in shared):
            return 0
        if not self.hash_tokens and len({group.block_tokens for group in shared}) > 1:
            return 0
        chunk_hashes = shared[0].chunk_blocks * shared[0].block_tokens // unit
        whole = [group.number for group in shared if not group.is_windowed]
        states = list(self.states)
        count = 0
        while (last := (count + 1) * chunk_hashes - 1) < len(hashes) and (not whole or cached(hashes[last], whole)):
            count += 1
        windows = [(group, group.block_tokens // unit) for group in shared if group.is_windowed]
        while count and not (
            all(
                cached(hashes[(at + 1) * per_block - 1], [group.number])
                for group, per_block in windows
                for at in group.needed_range(count - 1)
            )
            and (not states or cached(hashes[count * chunk_hashes - 1], states))
        ):
            count -= 1
        return count

    def stored_ids(self, tables: BlockTables, chunk: int) -> tuple[tuple[int, ...], ...] | None:
        """The blocks of a chunk to store, per stored group; None when vLLM has some no more: too late."""
        places = [(group.stored_range(chunk), tables[group.number]) for group in self.stored]
        if any(wanted.stop > len(table) for wanted, table in places):
            return None
        ids = tuple(tuple(table[i] for i in wanted) for wanted, table in places)
        return None if any(NULL_BLOCK in of_group for of_group in ids) else ids

    def whole_copy(self, slot: int, ids: tuple[tuple[int, ...], ...]) -> ChunkCopy:
        """A copy of everything that is stored of a chunk."""
        return ChunkCopy(slot, tuple(BlockRun(0, of_group) for of_group in ids))

    @property
    def keeps_parts(self) -> bool:
        """Whether any leading blocks of a chunk are right by themselves, wherever a prefix ends.

        Not where something is stored for chunks' ends only: windows, attention in chunks, states of several tokens or
        of recurrent layers; nor where vLLM computes what is left out from its beginning.
        """
        return not self.states and all(
            group.may_compute_last_token_alone and group.stored_blocks == group.chunk_blocks for group in self
        )

    def tail_unit(self, tail_tokens: int | None, chunk_tokens: int, drafts: Drafts | None) -> int:
        """The unit of tails' lengths: whole blocks of every group, at least ``tail_tokens``. 0: no tails are kept.

        Without ``tail_tokens`` a block.

        With a draft's KV in the blocks the last one of a hit is computed again, and of tails that would be most.
        """
        if tail_tokens == 0 or drafts is not None or not self.keeps_parts:
            return 0
        unit = lcm(self.block_tokens, tail_tokens or 1)
        return unit if unit < chunk_tokens <= TAIL_TOKENS_MAX else 0

    def tail_ids(self, tables: BlockTables, chunk: int, tokens: int) -> tuple[tuple[int, ...], ...] | None:
        """The blocks to store of a tail of so many tokens where a chunk begins, per group; None when vLLM has not all.

        As many as of a whole chunk: behind the tail its last block stands again, since a copy has a fixed length. What
        is there is the request's own, and is never read.
        """
        ids = []
        for group in self.stored:
            first, blocks = chunk * group.chunk_blocks, tokens // group.block_tokens
            own = tuple(tables[group.number][first : first + blocks])
            if len(own) < blocks or NULL_BLOCK in own:
                return None
            ids.append(own + own[-1:] * (group.chunk_blocks - blocks))
        return tuple(ids)

    def load_copies(
        self, slots: Sequence[int], tables: BlockTables, first_chunk: int, span: tuple[int, int], chunk_tokens: int
    ) -> tuple[ChunkCopy, ...] | None:
        """Copies that fill the blocks vLLM allocated for tokens [computed, end).

        ::

            chunk      |--- c0 ---|--- c1 ---|--- c2 ---|
            computed   [on the GPU....)
            loaded                    [..............)      the first copy starts inside c0 or c1

        Args:
            slots: Slots of chunks ``first_chunk`` and following.
            tables: The request's blocks.
            span: ``computed`` and ``end``, multiples of ``block_tokens``.

        Returns None when a block that was allocated is not stored, or its chunk has no slot: nothing may be loaded
        then, because vLLM would take that block for computed.
        """
        computed, end = span
        copies = []
        for chunk in range(computed // chunk_tokens, -(-end // chunk_tokens)):
            runs = []
            for group in self:
                if not group.is_shared:
                    continue
                table = tables[group.number]
                low = max(computed // group.block_tokens, chunk * group.chunk_blocks)
                high = min(end // group.block_tokens, (chunk + 1) * group.chunk_blocks)
                wanted = [i for i in range(low, high) if table[i] != NULL_BLOCK]
                stored = group.stored_range(chunk)
                if wanted and (wanted[0] < stored.start or wanted != list(range(wanted[0], high))):
                    return None
                if not group.stored_blocks:
                    continue
                runs.append(BlockRun(wanted[0] - stored.start if wanted else 0, tuple(table[i] for i in wanted)))
            if any(run.block_ids for run in runs):
                if chunk - first_chunk >= len(slots):
                    return None  # the server takes back what it said was ready
                copies.append(ChunkCopy(slots[chunk - first_chunk], tuple(runs)))
        return tuple(copies)

    def state_copies(self, slots: Sequence[int], tables: BlockTables, chunks: int) -> tuple[ChunkCopy, ...] | None:
        """Copies that fill the states of a load of so many chunks of a prompt, from one slot per part.

        None when vLLM has no block for one of them, or a part has no slot: nothing may be loaded then.
        """
        copies = []
        for part, number in enumerate(self.states):
            place = chunks - 1
            if place >= len(tables[number]) or tables[number][place] == NULL_BLOCK or part >= len(slots):
                return None
            copies.append(self.state_copy(slots[part], part, tables[number][place]))
        return tuple(copies)

    @staticmethod
    def state_copy(slot: int, part: int, block: int) -> ChunkCopy:
        """A copy of one part of a state."""
        return ChunkCopy(slot, (BlockRun(0, (block,)),), part)


def is_recurrent(spec: Any) -> bool:
    """Whether a group's layers keep a state per boundary instead of blocks per token."""
    return type(spec).__name__ == RECURRENT_SPEC


def chunk_tokens_of(kv_cache_config: Any, configured: int) -> int:
    """Tokens of a chunk: as configured, or vLLM's block where a model has states, which exist at its ends only."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if not any(map(is_recurrent, specs)):
        return configured
    return lcm(*(int(spec.block_size) for spec in specs))


def window_tokens(spec: Any) -> int | None:
    """Tokens that a group's layers attend to, if vLLM frees the blocks before them; None: it keeps all blocks."""
    if not _is_kind(spec := _first_spec(spec), "SlidingWindowSpec", "SlidingWindowMLASpec"):
        return None  # full attention; also with a window of its own when vLLM's hybrid manager is off
    return int(spec.sliding_window) + int(getattr(spec, "extra_retained_tokens", 0))


def local_tokens(spec: Any) -> int | None:
    """Tokens of an attention chunk, if vLLM frees a chunk's blocks when it ends; None: it does not."""
    return int(spec.attention_chunk_size) if _is_kind(spec := _first_spec(spec), "ChunkedLocalAttentionSpec") else None


def is_ring(spec: Any) -> bool:
    """Whether a group has one block per request, for the tokens of which no state was made yet."""
    return _is_kind(_first_spec(spec), "CircularBufferSpec")


def tokens_per_state(spec: Any) -> int:
    """Tokens of one stored state of a layer."""
    return int(getattr(spec, "tokens_per_state", 1))


def _first_spec(spec: Any) -> Any:
    """The spec of a group's first layer: vLLM puts layers into one group only where they free blocks alike."""
    return next(iter(spec.kv_cache_specs.values())) if hasattr(spec, "kv_cache_specs") else spec


def _is_kind(spec: Any, *kinds: str) -> bool:
    return type(spec).__name__ in kinds


def _block_tokens(spec: Any, dcp: int) -> int:
    """Tokens of one block of a group that is not recurrent, over all ranks that share them."""
    return int(spec.block_size) * (dcp if getattr(spec, "dcp_sharded", True) else 1)


def _cache_group(number: int, spec: Any, chunk_tokens: int, dcp: int, spare_tokens: int) -> CacheGroup:
    block = _block_tokens(spec, dcp)
    per_chunk = chunk_tokens // block
    if not getattr(spec, "prefix_cacheable", True):
        fixed = 1 if is_ring(spec) else 0
        return CacheGroup(number, block, per_chunk, 0, window_tokens(spec), is_shared=False, fixed_blocks=fixed)
    window, local, stored = window_tokens(spec), local_tokens(spec), per_chunk
    if window is not None:
        stored = min(per_chunk, max(1, -(-(window - 1) // block)) + spare_tokens // block)
    elif local is not None and chunk_tokens % local == 0:
        stored = 0  # every chunk ends an attention chunk: nothing in front of it is attended to any more
    layers = spec.kv_cache_specs.values() if hasattr(spec, "kv_cache_specs") else [spec]
    return CacheGroup(number, block, per_chunk, stored, window, local, max(map(tokens_per_state, layers)))


def _check_local_attention(group: CacheGroup, chunk_tokens: int) -> None:
    """Chunks that cut attention chunks at varying places would need another number of blocks each."""
    if (local := group.local_tokens) and local % chunk_tokens and chunk_tokens % local:
        raise ConfigError(
            "chunk_tokens must divide the attention chunk, or be a multiple of it. "
            f"chunk_tokens={chunk_tokens} attention_chunk_size={local}"
        )


def cache_groups(vllm_config: Any, kv_cache_config: Any, chunk_tokens: int) -> CacheGroups:
    """The model's KV cache groups, with blocks over all ranks that share their tokens.

    Raises:
        ConfigError: ``chunk_tokens`` is no multiple of their block sizes.
    """
    dcp = int(vllm_config.parallel_config.decode_context_parallel_size)
    # A draft has the last block of a hit computed again (drafts.py).
    return CacheGroups.of(kv_cache_config, chunk_tokens, dcp, spare_blocks=int(has_drafts_kv(vllm_config)))
