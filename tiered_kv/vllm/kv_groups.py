"""vLLM's KV cache groups: which blocks of a chunk are stored, which a load fills.

Pure arithmetic over block numbers; must not touch tensors (``kv_layout.py`` does). Called by both roles.

A group is a set of layers with one block table. Full attention and MLA keep every block. A sliding window of ``W``
tokens keeps those with the last ``W - 1`` tokens and frees the rest (block 0, the null block, takes their places in the
table), so of a chunk only its last blocks are stored: enough to continue at the chunk's end::

    chunk                  |--- c0 ---|--- c1 ---|--- c2 ---|
    full attention stores  [..........][..........][.........]
    a window stores              [....]     [....]     [....]       min(chunk, W - 1 tokens rounded up to blocks)
    a hit of 3 chunks loads all of full attention, and of the window the blocks vLLM allocated: c2's

A window longer than a chunk stores whole chunks and is loaded from several. The rule for how many blocks continue a
window is that of vLLM's SlidingWindowManager: ``ceil((W - 1) / block)``.

A group of recurrent layers (Mamba, gated delta nets, short convolutions) has no block per token but a state per
boundary between chunks, in one block; the chunk is vLLM's block then. What is stored of a boundary is the state of
every such group, a *part* each (``keys/state_keys.py``). A load of tokens up to ``end`` fills the block at ``end /
block - 1`` of the table, where vLLM's MambaManager puts the state that it goes on from (``mamba_cache_mode`` "align").
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any, Final

from tiered_kv.errors import ConfigError
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
        stored_blocks: How many of them are stored, its last ones.
        window_tokens: vLLM frees the blocks in front of so many tokens; None: it keeps all.
    """

    number: int
    block_tokens: int
    chunk_blocks: int
    stored_blocks: int
    window_tokens: int | None = None

    @property
    def is_windowed(self) -> bool:
        return self.window_tokens is not None

    def peak_blocks(self, tokens: int, computed_tokens: int, step_tokens: int) -> int:
        """Most blocks that a request of ``tokens`` holds while it computes, step by step, those not computed yet."""
        every = -(-tokens // self.block_tokens)
        if self.window_tokens is None:
            return every
        kept, new = self.window_tokens - 1, min(tokens - computed_tokens, step_tokens)
        return min(every, -(-kept // self.block_tokens) + -(-new // self.block_tokens) + 1)

    def stored_range(self, chunk: int) -> range:
        """Places in the block table of a chunk's blocks that are stored."""
        end = (chunk + 1) * self.chunk_blocks
        return range(end - self.stored_blocks, end)


@dataclass(frozen=True, slots=True)
class CacheGroups:
    """The groups of a model. Iterates over those that have blocks per token, in vLLM's order.

    Attributes:
        groups: These.
        states: Places of the groups of recurrent layers among vLLM's groups; each is a part of a stored state.
    """

    groups: Sequence[CacheGroup]
    states: tuple[int, ...] = ()

    def __iter__(self) -> Iterator[CacheGroup]:
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, place: int) -> CacheGroup:
        return self.groups[place]

    @classmethod
    def of(cls, kv_cache_config: Any, chunk_tokens: int, dcp: int = 1) -> "CacheGroups":
        """Read vLLM's groups; ``dcp`` ranks share the tokens of a block.

        Raises:
            ConfigError: ``chunk_tokens`` is no multiple of the blocks' common size.
        """
        groups, states, blocks = [], [], []
        for number, group in enumerate(kv_cache_config.kv_cache_groups):
            spec = group.kv_cache_spec
            if is_recurrent(spec):
                states.append(number)
                blocks.append(int(spec.block_size))
                continue
            block = int(spec.block_size) * (dcp if getattr(spec, "dcp_sharded", True) else 1)
            window = window_tokens(spec)
            per_chunk = chunk_tokens // block
            stored = per_chunk if window is None else min(per_chunk, max(1, -(-(window - 1) // block)))
            groups.append(CacheGroup(number, block, per_chunk, stored, window))
            blocks.append(block)
        result = cls(groups, tuple(states))
        if chunk_tokens % (block := lcm(*blocks)) or (states and chunk_tokens != block):
            raise ConfigError(
                "chunk_tokens must be a multiple of the block sizes of all KV cache groups. "
                f"chunk_tokens={chunk_tokens} block_sizes={blocks} "
                f"nearest={-(-chunk_tokens // block) * block}"
            )
        return result

    @property
    def block_tokens(self) -> int:
        """The unit in which vLLM counts hits: a multiple of every group's block."""
        return lcm(*(group.block_tokens for group in self))

    @property
    def has_windows(self) -> bool:
        """Whether some group keeps only the end of a prefix."""
        return any(group.is_windowed for group in self)

    @property
    def stored_blocks(self) -> int:
        """Blocks of one chunk over all groups: those that a save pins."""
        return sum(group.stored_blocks for group in self)

    def whole_blocks(self, tokens: int) -> int:
        """Most blocks that so many tokens take in all groups, with one more each for drafts."""
        return sum(-(-tokens // group.block_tokens) + 1 for group in self) + STATE_BLOCKS * len(self.states)

    def peak_blocks(self, tokens: int, computed_tokens: int, step_tokens: int) -> int:
        """The same over all groups."""
        peaks = (group.peak_blocks(tokens, computed_tokens, step_tokens) for group in self)
        return sum(peaks) + STATE_BLOCKS * len(self.states)

    def loadable_tokens(self, held_tokens: int, request_tokens: int, chunk_tokens: int) -> int:
        """How much of a held prefix may be loaded.

        With a window the last token must not be part of it: vLLM computes that token again, and the blocks of the
        window before it would be one token short.
        """
        if self.has_windows and held_tokens >= request_tokens:
            return (request_tokens - 1) // chunk_tokens * chunk_tokens
        return held_tokens

    def cached_chunks(self, hashes: Sequence[Any], cached: Callable[[Any, list[int]], object]) -> int:
        """Leading whole chunks that vLLM's prefix cache can continue from, judged by their blocks' hashes.

        A guess that costs a lookup anew when it is wrong: vLLM's own answer comes later.

        Args:
            hashes: The request's block hashes, one per block; 0 is returned where groups differ in block size.
            cached: Gives the cached blocks of a hash in some groups, or None: ``BlockPool.get_cached_block``.
        """
        if len({group.block_tokens for group in self}) > 1:
            return 0
        per_chunk = self[0].chunk_blocks
        whole = [group.number for group in self if not group.is_windowed]
        states = list(self.states)
        count = 0
        while (last := (count + 1) * per_chunk - 1) < len(hashes) and (not whole or cached(hashes[last], whole)):
            count += 1
        windowed = [group for group in self if group.is_windowed]
        while count and not (
            all(cached(hashes[at], [group.number]) for group in windowed for at in group.stored_range(count - 1))
            and (not states or cached(hashes[count * per_chunk - 1], states))
        ):
            count -= 1
        return count

    def stored_ids(self, tables: BlockTables, chunk: int) -> tuple[tuple[int, ...], ...] | None:
        """The blocks of a chunk to store, per group; None when vLLM has none of them any more: too late."""
        places = [(group.stored_range(chunk), tables[group.number]) for group in self]
        if any(wanted.stop > len(table) for wanted, table in places):
            return None
        ids = tuple(tuple(table[i] for i in wanted) for wanted, table in places)
        return None if any(NULL_BLOCK in of_group for of_group in ids) else ids

    def whole_copy(self, slot: int, ids: tuple[tuple[int, ...], ...]) -> ChunkCopy:
        """A copy of everything that is stored of a chunk."""
        return ChunkCopy(slot, tuple(BlockRun(0, of_group) for of_group in ids))

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
                table = tables[group.number]
                low = max(computed // group.block_tokens, chunk * group.chunk_blocks)
                high = min(end // group.block_tokens, (chunk + 1) * group.chunk_blocks)
                wanted = [i for i in range(low, high) if table[i] != NULL_BLOCK]
                stored = group.stored_range(chunk)
                if wanted and (wanted[0] < stored.start or wanted != list(range(wanted[0], high))):
                    return None
                runs.append(BlockRun(wanted[0] - stored.start if wanted else 0, tuple(table[i] for i in wanted)))
            if any(run.block_ids for run in runs):
                if chunk - first_chunk >= len(slots):
                    return None  # the server takes back what it said was ready
                copies.append(ChunkCopy(slots[chunk - first_chunk], tuple(runs)))
        return tuple(copies)

    def state_copies(self, slots: Sequence[int], tables: BlockTables, end: int) -> tuple[ChunkCopy, ...] | None:
        """Copies that fill the states of a load of tokens up to ``end``, from one slot per part.

        None when vLLM has no block for one of them, or a part has no slot: nothing may be loaded then.
        """
        copies = []
        for part, number in enumerate(self.states):
            place = end // self.block_tokens - 1
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
    if hasattr(spec, "kv_cache_specs"):
        spec = next(iter(spec.kv_cache_specs.values()))
    if type(spec).__name__ != "SlidingWindowSpec":
        return None  # full attention; also with a window of its own when vLLM's hybrid manager is off
    return int(spec.sliding_window) + int(getattr(spec, "extra_retained_tokens", 0))


def cache_groups(vllm_config: Any, kv_cache_config: Any, chunk_tokens: int) -> CacheGroups:
    """The model's KV cache groups, with blocks over all ranks that share their tokens.

    Raises:
        ConfigError: ``chunk_tokens`` is no multiple of their block sizes.
    """
    dcp = int(vllm_config.parallel_config.decode_context_parallel_size)
    return CacheGroups.of(kv_cache_config, chunk_tokens, dcp)
