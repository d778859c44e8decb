"""Which blocks of each KV cache group are stored and loaded, against a plain model of what vLLM keeps and needs."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.single_type_kv_cache_manager import get_manager_for_kv_cache_spec
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from tests.kit.counts import count, seed
from tiered_kv.vllm.drafts import Drafts
from tiered_kv.vllm.kv_groups import NULL_BLOCK, CacheGroup, CacheGroups
from tiered_kv.vllm.step import BlockRun, ChunkCopy

pytestmark = pytest.mark.vllm

CHUNK = 64


def groups(*windows, block=16, blocks=(), spare_blocks=0):
    """Full attention for None, else a sliding window of so many tokens; ``blocks``: of each group, if they differ."""
    specs = []
    for window, tokens in zip(windows, blocks or [block] * len(windows), strict=True):
        kind = "FullAttentionSpec" if window is None else "SlidingWindowSpec"
        spec = type(kind, (), {"block_size": tokens, "sliding_window": window})()
        specs.append(SimpleNamespace(kv_cache_spec=spec))
    return CacheGroups.of(SimpleNamespace(kv_cache_groups=specs), CHUNK, spare_blocks=spare_blocks)


def table_after(end, window, block=16, first=100):
    """A request's block table when ``end`` tokens are computed: vLLM has freed what no later token attends to."""
    skipped = 0 if window is None else max(0, end - window + 1) // block
    return [NULL_BLOCK if i < skipped else first + i for i in range(-(-end // block))]


@pytest.mark.parametrize(
    ("window", "stored"), [(None, 4), (1, 1), (2, 1), (17, 1), (18, 2), (33, 2), (49, 3), (50, 4), (65, 4), (1000, 4)]
)
def test_so_much_of_a_chunk_is_stored_as_its_end_can_be_continued_from(window, stored):
    assert groups(window)[0] == CacheGroup(0, 16, 4, stored, window)


@pytest.mark.parametrize(("window", "stored"), [(None, 4), (1, 2), (17, 2), (18, 3), (49, 4), (50, 4)])
def test_beside_a_draft_a_block_more_of_a_window_is_stored(window, stored):
    assert groups(window, spare_blocks=1)[0].stored_blocks == stored


def test_window_with_tokens_that_vllm_retains_beyond_it_stores_them_too():
    spec = type("SlidingWindowSpec", (), {"block_size": 16, "sliding_window": 17, "extra_retained_tokens": 2})()
    found = CacheGroups.of(SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)]), CHUNK)
    assert found[0].stored_blocks == 2


def test_every_hit_fills_exactly_the_blocks_that_vllm_allocated():
    """With drafts and without: each allocated block is filled once, from the right block of its chunk.

    A window's blocks may be smaller than those of the layers that hits are counted by, a draft's with few heads, say.
    """
    source = random.Random(seed())
    for _ in range(count("EXAMPLES", 300)):
        windows = [None, *(source.choice([2, 16, 17, 40, 64, 65, 100, 200]) for _ in range(source.randint(0, 2)))]
        blocks = [16, *(source.choice([4, 8, 16]) for _ in windows[1:])]
        spare_blocks, chunks = source.randint(0, 1), source.randint(1, 6)
        found = groups(*windows, blocks=blocks, spare_blocks=spare_blocks)
        end = chunks * CHUNK - 16 * source.randint(0, spare_blocks)  # a draft gives up a block
        computed = source.randrange(end // 16) * 16
        shapes = zip(windows, blocks, strict=True)
        tables = [table_after(end, window, block, first=100 * (i + 1)) for i, (window, block) in enumerate(shapes)]
        first_chunk = source.randint(0, computed // CHUNK)
        slots = list(range(1000 + first_chunk, 1000 + chunks))

        copies = found.load_copies(slots, tables, first_chunk, (computed, end), CHUNK)

        filled = [{} for _ in windows]
        for copy in copies:
            for number, (group, run) in enumerate(zip(found, copy.groups, strict=True)):
                stored = group.stored_range(copy.slot - 1000)
                for place, block in enumerate(run.block_ids, run.first_block):
                    assert block not in filled[number]
                    filled[number][block] = stored[place]
        for table, of_group, tokens in zip(tables, filled, blocks, strict=True):
            wanted = {block: i for i, block in enumerate(table) if block != NULL_BLOCK and i >= computed // tokens}
            assert of_group == wanted


def test_chunk_is_stored_in_the_step_that_completes_it_and_not_when_its_window_has_passed():
    found = groups(None, 40)
    # A step computes tokens [64, 192): vLLM frees what was in front of the window when the step began.
    tables = [table_after(192, None), [NULL_BLOCK, *range(201, 212)]]
    assert found.stored_ids(tables, 1) == ((104, 105, 106, 107), (205, 206, 207))
    assert found.stored_ids(tables, 2) == ((108, 109, 110, 111), (209, 210, 211))
    passed = [table_after(192, None), table_after(192, 40)]
    assert found.stored_ids(passed, 1) is None
    assert found.stored_ids(passed, 2) is not None
    assert found.stored_ids(passed, 3) is None, "a chunk behind the end of the tables"


def test_block_that_is_allocated_and_not_stored_forbids_the_load():
    """vLLM would take it for computed."""
    found = groups(None, 18)
    whole = [list(range(100, 104)), list(range(200, 204))]
    assert found.load_copies([7], whole, 0, (0, CHUNK), CHUNK) is None
    allocated = [whole[0], [NULL_BLOCK, NULL_BLOCK, 202, 203]]
    expected = ChunkCopy(7, (BlockRun(0, (100, 101, 102, 103)), BlockRun(0, (202, 203))))
    assert found.load_copies([7], allocated, 0, (0, CHUNK), CHUNK) == (expected,)
    with_hole = [whole[0], [NULL_BLOCK, NULL_BLOCK, 202, NULL_BLOCK]]
    assert found.load_copies([7], with_hole, 0, (0, CHUNK), CHUNK) is None


def test_window_leaves_the_last_token_to_be_computed():
    assert groups(None).loadable_tokens(128, 128, CHUNK) == 128
    assert groups(None, 40).loadable_tokens(128, 128, CHUNK) == 64
    assert groups(None, 40).loadable_tokens(128, 129, CHUNK) == 128
    assert groups(40).loadable_tokens(64, 64, CHUNK) == 0


def of_specs(*specs, chunk=CHUNK):
    return CacheGroups.of(SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=s) for s in specs]), chunk)


def spec_of(kind, **fields):
    return type(kind, (), {"block_size": 16} | fields)()


@pytest.mark.parametrize(("attention_chunk", "stored"), [(64, 0), (32, 0), (128, 4), (192, 4)])
def test_of_attention_in_chunks_all_is_stored_or_nothing(attention_chunk, stored):
    """All where a later chunk of the cache may attend to it, nothing where each one ends an attention chunk."""
    local = spec_of("ChunkedLocalAttentionSpec", attention_chunk_size=attention_chunk)
    found = of_specs(spec_of("FullAttentionSpec"), local)
    assert found[1].stored_blocks == stored
    assert len(found.stored) == 1 + bool(stored)
    assert found.loadable_tokens(128, 128, CHUNK) == 64


def test_attention_chunks_are_filled_as_vllm_allocates_them():
    found = of_specs(spec_of("FullAttentionSpec"), spec_of("ChunkedLocalAttentionSpec", attention_chunk_size=128))
    whole = list(range(100, 112))
    three = [whole, [NULL_BLOCK] * 8 + list(range(208, 212))]  # 192 tokens: those from 128 on are attended to
    copies = found.load_copies([7, 8, 9], three, 0, (0, 192), CHUNK)
    assert [copy.groups[1].block_ids for copy in copies] == [(), (), (208, 209, 210, 211)]
    two = [whole[:8], [NULL_BLOCK] * 8]
    assert [copy.groups[1].block_ids for copy in found.load_copies([7, 8], two, 0, (0, 128), CHUNK)] == [(), ()]


def test_short_attention_chunks_that_vllm_allocates_forbid_the_load():
    """Nothing of them is stored, because vLLM keeps none at a chunk's end. One it kept it would take for computed."""
    found = of_specs(spec_of("FullAttentionSpec"), spec_of("ChunkedLocalAttentionSpec", attention_chunk_size=32))
    whole = list(range(100, 104))
    assert found.load_copies([7], [whole, [NULL_BLOCK] * 4], 0, (0, CHUNK), CHUNK) is not None
    assert found.load_copies([7], [whole, [NULL_BLOCK] * 3 + [203]], 0, (0, CHUNK), CHUNK) is None


def test_ring_is_left_out_and_counted_as_the_one_block_it_is():
    ring = spec_of("CircularBufferSpec", block_size=8, prefix_cacheable=False)
    found = of_specs(ring, spec_of("MLAAttentionSpec", tokens_per_state=4))
    assert found.stored_ids([[5], list(range(100, 108))], 1) == ((104, 105, 106, 107),)
    copies = found.load_copies([7], [[5], list(range(100, 104))], 0, (0, CHUNK), CHUNK)
    assert copies == (ChunkCopy(7, (BlockRun(0, (100, 101, 102, 103)),)),)
    assert found.loadable_tokens(128, 128, CHUNK) == 64, "the last token alone cannot complete a state"
    assert found[0].peak_blocks(1000, 0, 1000) == 1 and found.whole_blocks(64) == 2 + 5
    assert found.cached_chunks(list(range(8)), lambda h, ids: ids == [1]) == 2


def test_bounded_replay_is_left_out_and_counted_as_a_window():
    replayed = spec_of("SlidingWindowMLASpec", sliding_window=32, prefix_cacheable=False)
    found = of_specs(replayed, spec_of("MLAAttentionSpec"))
    assert [group.stored_blocks for group in found] == [0, 4]
    assert found[0].peak_blocks(1000, 0, 64) == 2 + 4 + 1
    whole = list(range(100, 104))
    copies = found.load_copies([7], [[NULL_BLOCK, NULL_BLOCK, 5, 6], whole], 0, (0, CHUNK), CHUNK)
    assert copies == (ChunkCopy(7, (BlockRun(0, tuple(whole)),)),)


def vllm_specs(source, block):
    """vLLM's own specs of every kind that is stored, with random windows and attention chunks."""
    heads = {"block_size": block, "num_kv_heads": 1, "head_size": 16, "dtype": torch.bfloat16}
    window = source.randrange(2, 200)
    return {
        "full": FullAttentionSpec(**heads),
        "compressed": MLAAttentionSpec(**heads, tokens_per_state=4),
        "window": SlidingWindowSpec(**heads, sliding_window=window),
        "MLA window": SlidingWindowMLASpec(**heads, sliding_window=window, extra_retained_tokens=source.choice([0, 2])),
        "local": ChunkedLocalAttentionSpec(**heads, attention_chunk_size=source.choice([16, 32, 64, 128, 192, 320])),
        "ring": CircularBufferSpec(**heads | {"block_size": 8}),
        "replayed": SlidingWindowMLASpec(**heads, sliding_window=64, bounded_replay=True),
    }


def allocated(spec, computed, end):
    """The block table that vLLM's own block manager gives a request with a hit on the GPU and a load behind it."""
    pool = BlockPool(200, enable_caching=True, hash_block_size=8)
    manager = get_manager_for_kv_cache_spec(
        spec,
        max_in_flight_tokens=64,
        max_model_len=1000,
        block_pool=pool,
        enable_caching=True,
        kv_cache_group_id=0,
        scheduler_block_size=spec.block_size,
    )
    cached = pool.get_new_blocks(computed // spec.block_size)
    pool.free_blocks(cached)
    manager.add_local_computed_blocks("r", cached, computed, end - computed)
    manager.allocate_external_computed_blocks("r", computed, end - computed)
    return [block.block_id for block in manager.req_to_blocks["r"]]


@pytest.mark.parametrize("kind", vllm_specs(random.Random(0), 16))
def test_loads_fill_what_vllms_own_block_managers_allocate(kind):
    """Every block that vLLM allocated for a load and shares is filled, each once, from its own place; no other is."""
    source = random.Random(f"{seed()} {kind}")
    filled_blocks = 0
    for _ in range(count("EXAMPLES", 300)):
        spec = vllm_specs(source, 16)[kind]
        found = of_specs(FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=16, dtype=torch.bfloat16), spec)
        chunks = source.randint(1, 6)
        end, computed = chunks * CHUNK, source.randrange(chunks * CHUNK // 16) * 16
        table = allocated(spec, computed, end)
        copies = found.load_copies(
            list(range(chunks)), [list(range(500, 500 + end // 16)), table], 0, (computed, end), CHUNK
        )
        assert copies is not None
        wanted = [i for i, block in enumerate(table) if block != NULL_BLOCK and i >= computed // 16]
        if not found[1].stored_blocks:
            assert all(len(copy.groups) == 1 for copy in copies)
            assert not wanted or not found[1].is_shared, "vLLM would take blocks for computed that nothing fills"
            continue
        filled = []
        for copy in copies:
            stored = found[1].stored_range(copy.slot)
            run = copy.groups[1]
            filled += [(stored[place], block) for place, block in enumerate(run.block_ids, run.first_block)]
        assert filled == [(i, table[i]) for i in wanted]
        filled_blocks += len(filled)
        assert found[1].first_kept(end) == next(i for i, block in enumerate([*table, 1]) if block != NULL_BLOCK)
    assert filled_blocks or kind in ("ring", "replayed")


def test_prefix_cache_is_believed_where_every_group_can_continue():
    found = groups(None, 40)
    hashes = list(range(12))
    held = {0: set(hashes), 1: {5, 6, 7}}
    assert found.cached_chunks(hashes, lambda h, ids: all(h in held[i] for i in ids)) == 2
    held[1] = {9, 10, 11}
    assert found.cached_chunks(hashes, lambda h, ids: all(h in held[i] for i in ids)) == 3
    held[1] = {6, 7}
    assert found.cached_chunks(hashes, lambda h, ids: all(h in held[i] for i in ids)) == 0
    assert groups(None).cached_chunks(hashes, lambda h, ids: h < 8) == 2


# -- tails -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "tail_tokens", "unit"),
    [(16, 16, 16), (16, 24, 48), (16, 1, 16), (32, 16, 32), (16, 64, 0), (16, 0, 0), (16, None, 16), (64, None, 0)],
)
def test_the_unit_of_tails_is_whole_blocks_below_a_chunk(block, tail_tokens, unit):
    assert groups(None, block=block).tail_unit(tail_tokens, CHUNK, None) == unit


def test_no_tails_where_a_part_of_a_chunk_is_not_right_by_itself():
    assert groups(None, None).tail_unit(16, CHUNK, None) == 16
    assert groups(None, 40).tail_unit(16, CHUNK, None) == groups(None, 40).tail_unit(None, CHUNK, None) == 0
    assert groups(None).tail_unit(16, CHUNK, Drafts(drops_block=True, draft_tokens=2, drafted_len=4096)) == 0
    full = CacheGroup(0, 16, 4, 4)
    assert CacheGroups([full], (1,)).tail_unit(16, CHUNK, None) == 0, "recurrent layers"
    assert CacheGroups([replace(full, state_tokens=4)]).tail_unit(16, CHUNK, None) == 0, "states of several tokens"
    left_out = CacheGroup(1, 16, 4, 0, is_shared=False)
    assert CacheGroups([full, left_out]).tail_unit(16, CHUNK, None) == 0, "a ring"


def test_behind_a_tail_its_last_block_stands_again():
    found = groups(None)
    assert found.tail_ids([[10, 11, 12, 13, 14, 15, 16]], 1, 32) == ((14, 15, 15, 15),)
    assert found.tail_ids([[10, 11, 12, 13, 14, 15, 16]], 1, 48) == ((14, 15, 16, 16),)
    assert found.tail_ids([[10, 11, 12, 13, 14]], 1, 32) is None, "vLLM has taken its blocks back"
    assert found.tail_ids([[10, 11, 12, 13, 14, NULL_BLOCK]], 1, 32) is None


def test_a_load_that_ends_with_a_tail_fills_its_blocks_and_no_others():
    found, table = groups(None), [10, 11, 12, 13, 14, 15, 16]
    copies = found.load_copies([50, 51], [table], 0, (32, CHUNK + 32), CHUNK)
    assert copies == (ChunkCopy(50, (BlockRun(2, (12, 13)),)), ChunkCopy(51, (BlockRun(0, (14, 15)),)))
    assert found.load_copies([50], [table], 0, (32, CHUNK + 32), CHUNK) is None, "without its slot nothing is loaded"
