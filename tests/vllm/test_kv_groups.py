"""Which blocks of each KV cache group are stored and loaded, against a plain model of what vLLM keeps and needs."""

import random
from types import SimpleNamespace

import pytest

from tests.kit.counts import count, seed
from tiered_kv.vllm.kv_groups import NULL_BLOCK, CacheGroup, CacheGroups
from tiered_kv.vllm.step import BlockRun, ChunkCopy

pytestmark = pytest.mark.vllm

CHUNK = 64


def groups(*windows, block=16):
    """Full attention for None, else a sliding window of so many tokens."""
    specs = []
    for window in windows:
        kind = "FullAttentionSpec" if window is None else "SlidingWindowSpec"
        spec = type(kind, (), {"block_size": block, "sliding_window": window})()
        specs.append(SimpleNamespace(kv_cache_spec=spec))
    return CacheGroups.of(SimpleNamespace(kv_cache_groups=specs), CHUNK)


def table_after(end, window, block=16, first=100):
    """A request's block table when ``end`` tokens are computed: vLLM has freed what no later token attends to."""
    skipped = 0 if window is None else max(0, end - window + 1) // block
    return [NULL_BLOCK if i < skipped else first + i for i in range(-(-end // block))]


@pytest.mark.parametrize(
    ("window", "stored"), [(None, 4), (1, 1), (2, 1), (17, 1), (18, 2), (33, 2), (49, 3), (50, 4), (65, 4), (1000, 4)]
)
def test_so_much_of_a_chunk_is_stored_as_its_end_can_be_continued_from(window, stored):
    assert groups(window)[0] == CacheGroup(0, 16, 4, stored, window)


def test_window_with_tokens_that_vllm_retains_beyond_it_stores_them_too():
    spec = type("SlidingWindowSpec", (), {"block_size": 16, "sliding_window": 17, "extra_retained_tokens": 2})()
    found = CacheGroups.of(SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)]), CHUNK)
    assert found[0].stored_blocks == 2


def test_every_hit_fills_exactly_the_blocks_that_vllm_allocated():
    """Random windows, local hits, lengths: each allocated block is filled once, from the right block of its chunk."""
    source = random.Random(seed())
    for _ in range(count("EXAMPLES", 300)):
        windows = [None, *(source.choice([2, 16, 17, 40, 64, 65, 100, 200]) for _ in range(source.randint(0, 2)))]
        found = groups(*windows)
        chunks = source.randint(1, 6)
        end, computed = chunks * CHUNK, source.randrange(chunks * CHUNK // 16) * 16
        tables = [table_after(end, window, first=100 * (i + 1)) for i, window in enumerate(windows)]
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
        for table, of_group in zip(tables, filled, strict=True):
            wanted = {block: i for i, block in enumerate(table) if block != NULL_BLOCK and i >= computed // 16}
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
    torn = [whole[0], [NULL_BLOCK, NULL_BLOCK, 202, NULL_BLOCK]]
    assert found.load_copies([7], torn, 0, (0, CHUNK), CHUNK) is None


def test_window_leaves_the_last_token_to_be_computed():
    assert groups(None).loadable_tokens(128, 128, CHUNK) == 128
    assert groups(None, 40).loadable_tokens(128, 128, CHUNK) == 64
    assert groups(None, 40).loadable_tokens(128, 129, CHUNK) == 128
    assert groups(40).loadable_tokens(64, 64, CHUNK) == 0


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
