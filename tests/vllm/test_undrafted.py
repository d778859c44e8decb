"""Blocks that lack the draft's KV: which count, for how long, and what is not stored because of them."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.kit.storage.stored_prompts import CHUNK as PROMPT_CHUNK
from tests.kit.storage.stored_prompts import Model, tokens
from tests.vllm.test_save_queue import World, state_to_store
from tiered_kv.ops.explain import explain
from tiered_kv.ops.open import open_storage
from tiered_kv.vllm.drafts import Drafts
from tiered_kv.vllm.kv_groups import NULL_BLOCK, CacheGroup, CacheGroups
from tiered_kv.vllm.undrafted import UndraftedBlocks, UndraftedTokens

pytestmark = pytest.mark.vllm

BLOCK, PER_CHUNK = 4, 2
CHUNK = BLOCK * PER_CHUNK
GROUPS = CacheGroups([CacheGroup(0, BLOCK, PER_CHUNK, PER_CHUNK)])
HYBRID = CacheGroups([CacheGroup(n, BLOCK, PER_CHUNK, PER_CHUNK, window) for n, window in enumerate((None, 5))])
DRAFTED_LEN = 20
EAGLE = Drafts(drops_block=True, draft_tokens=2, drafted_len=DRAFTED_LEN)
MODEL = Drafts(drops_block=False, draft_tokens=2, drafted_len=DRAFTED_LEN)


class Steps:
    """vLLM's steps over requests with the block tables that are given."""

    def __init__(self, drafts: Drafts | None = EAGLE) -> None:
        self.undrafted = UndraftedBlocks(drafts, GROUPS)
        self.requests: dict[str, Any] = {}
        self.tables: dict[str, tuple[list[int]]] = {}

    def request(self, name: str, blocks: list[int], computed: int = 0) -> None:
        self.requests[name] = SimpleNamespace(request=SimpleNamespace(num_computed_tokens=computed))
        self.tables[name] = (blocks,)

    def step(self, **tokens: int) -> None:
        state = SimpleNamespace(get_block_ids=self.tables.get)
        output = SimpleNamespace(num_scheduled_tokens=tokens, kv_connector_block_state=state)
        self.undrafted.step(self.requests, output)
        for name, count in tokens.items():
            self.requests[name].request.num_computed_tokens += count

    def drafted(self, name: str, chunks: int) -> int:
        return self.undrafted.drafted_chunks(self.tables[name], chunks)


def test_a_step_that_the_draft_takes_leaves_nothing_out():
    steps = Steps()
    steps.request("a", [1, 2, 3, 4, 5])
    steps.step(a=DRAFTED_LEN - 2)
    assert steps.drafted("a", 2) == 2


def test_one_request_that_is_too_long_leaves_the_whole_step_undrafted():
    steps = Steps()
    steps.request("long", [1, 2, 3, 4, 5])
    steps.request("short", [6, 7, 8, 9])
    steps.step(short=CHUNK)
    steps.step(long=DRAFTED_LEN - 1, short=CHUNK)
    assert steps.drafted("long", 2) == 0
    assert steps.drafted("short", 2) == 1, "its first chunk was drafted a step before"


def test_what_lies_behind_an_undrafted_block_is_not_drafted_either():
    steps = Steps()
    steps.request("long", [1, 2, 3, 4, 5])
    steps.request("short", [6, 7, 8, 9])
    steps.step(long=DRAFTED_LEN - 1, short=BLOCK)
    steps.step(short=3 * BLOCK)
    assert steps.drafted("short", 2) == 0, "the draft attends to its first block"


def test_another_request_that_finds_the_block_on_the_gpu_is_cut_there():
    steps = Steps()
    steps.request("long", [1, 2, 3, 4, 5])
    steps.step(long=DRAFTED_LEN - 1)
    steps.request("next", [1, 2, 6, 7], computed=CHUNK)
    steps.step(next=CHUNK)
    assert steps.drafted("next", 2) == 0


def test_a_block_counts_until_it_is_written_from_its_first_token_on():
    steps = Steps()
    steps.request("long", [1, 2, 3, 4, 5])
    steps.step(long=DRAFTED_LEN - 1)
    steps.request("middle", [9, 1], computed=BLOCK + 1)
    steps.step(middle=BLOCK - 1)
    assert steps.drafted("middle", 1) == 0, "only its end was written again"
    steps.request("anew", [1, 2])
    steps.step(anew=CHUNK)
    assert steps.drafted("anew", 1) == 1


def test_a_load_brings_the_drafts_kv():
    steps = Steps()
    steps.request("long", [1, 2, 3, 4, 5])
    steps.step(long=DRAFTED_LEN - 1)
    steps.request("loads", [1, 2, 3, 4])
    steps.undrafted.loaded(steps.tables["loads"], 0, CHUNK)
    assert steps.drafted("loads", 2) == 1, "its second chunk was not loaded"


def test_without_a_draft_nothing_is_ever_missing():
    steps = Steps(None)
    steps.request("long", [1, 2, 3, 4, 5])
    steps.step(long=DRAFTED_LEN)
    assert steps.drafted("long", 2) == 2


def planned(computed: dict[str, int], **tokens: int) -> Any:
    """vLLM's plan of a step: requests that have computed nothing are new."""
    old = [name for name in tokens if computed.get(name)]
    new = [SimpleNamespace(req_id=name, num_computed_tokens=0) for name in tokens if name not in old]
    cached = SimpleNamespace(req_ids=old, num_computed_tokens=[computed[name] for name in old])
    return SimpleNamespace(num_scheduled_tokens=tokens, scheduled_new_reqs=new, scheduled_cached_reqs=cached)


def test_below_vllms_offloading_a_request_is_drafted_up_to_the_first_step_without_the_draft():
    drafted = UndraftedTokens(EAGLE)
    drafted.step(planned({}, long=DRAFTED_LEN - 2, short=CHUNK))
    assert drafted.first("long") == drafted.first("short") == math.inf
    drafted.step(planned({"long": DRAFTED_LEN - 2, "short": CHUNK}, long=1, short=BLOCK))
    drafted.step(planned({"short": CHUNK + BLOCK}, short=BLOCK))
    assert (drafted.first("long"), drafted.first("short")) == (DRAFTED_LEN - 2, CHUNK)
    drafted.step(planned({"short": CHUNK}, short=BLOCK))
    assert drafted.first("short") == math.inf, "it was preempted, and computes again what lacked the draft"
    drafted.forget("long")
    assert drafted.first("long") == math.inf


def test_below_vllms_offloading_nothing_is_missing_without_a_draft():
    drafted = UndraftedTokens(None)
    drafted.step(planned({}, long=2 * DRAFTED_LEN))
    assert drafted.first("long") == math.inf


@pytest.mark.parametrize("tokens", range(1, 4 * CHUNK))
def test_as_much_may_be_loaded_as_vllm_would_find_by_itself(tokens: int):
    """vLLM matches whole blocks of all tokens but the last, and gives up one of them for an EAGLE draft."""
    held = tokens // CHUNK * CHUNK
    found = min(held, (tokens - 1) // BLOCK * BLOCK)
    assert GROUPS.loadable_tokens(held, tokens, CHUNK, MODEL) == found
    assert GROUPS.loadable_tokens(held, tokens, CHUNK, EAGLE) == max(0, found - BLOCK)
    assert GROUPS.loadable_tokens(held, tokens, CHUNK) == held
    # With several groups the block that is given up may end with the prompt.
    assert HYBRID.loadable_tokens(held, tokens, CHUNK, MODEL) == found
    assert HYBRID.loadable_tokens(held, tokens, CHUNK, EAGLE) == max(0, held - BLOCK)


@pytest.mark.parametrize("drafts", [MODEL, EAGLE])
@pytest.mark.parametrize("groups", [1, 2])
def test_explain_takes_a_hit_as_far(drafts: Drafts, groups: int, tmp_path: Path) -> None:
    """``tiered-kv explain`` works without vLLM, so it has the rule again."""
    method = "eagle" if drafts.drops_block else "draft_model"
    fields = {"method": method, "settings": {}} | ({"kv_cache_groups": groups} if groups > 1 else {})
    stored = Model(fields={"draft": fields})
    with open_storage(f"file://{tmp_path}", {"disk_bytes": 1 << 30}) as storage:
        stored.store(storage, tokens(1, 3))
        content = storage.look()
        for length in range(1, 4 * PROMPT_CHUNK):
            report = explain(storage, tokens(1, 4)[:length], content)
            here = min(length // PROMPT_CHUNK, 3) * PROMPT_CHUNK
            offered = drafts.loadable_tokens(here, length, 16, is_hybrid=groups > 1)
            assert (report.here_tokens, report.hit_tokens) == (here, offered), length


WINDOWED = CacheGroups([CacheGroup(0, 16, 4, 4), CacheGroup(1, 16, 4, 1, window_tokens=17)])
LEFT = 4
"""Leading chunks whose blocks have the draft's KV."""


@pytest.mark.parametrize(("passed", "outcomes"), [
    (1, {"store_dropped_window_passed": 7}),  # so are those behind an undrafted one
    (LEFT, {"store_dropped_undrafted": 4}),
    (9, {"store_dropped_undrafted": 4}),
])  # fmt: skip
def test_each_chunk_is_counted_once_where_windows_pass_and_drafts_lack(passed, outcomes):
    """Whatever ends it: three more chunks follow in the next step, and then the request ends."""
    world = World(groups=WINDOWED)
    world.server.is_ready = True
    keys, ids = world.prompt(11)
    windows = [block.block_id for block in world.pool.get_new_blocks(4 * 11)]
    windows[4 * passed :] = [NULL_BLOCK] * (4 * (11 - passed))
    saves = world.request_saves(keys, lambda chunks: min(chunks, LEFT))
    state = state_to_store(11 * 64)
    world.server.credits.extend(range(20))
    block_state = SimpleNamespace(get_block_ids=lambda name: (ids, windows))
    for computed in (8 * 64, 3 * 64):
        output = SimpleNamespace(num_scheduled_tokens={"r": computed}, kv_connector_block_state=block_state)
        saves.step({"r": state}, output)
        state.request.num_computed_tokens += computed
    saves.finish(state, (ids, windows))
    queued = len(world.saves.start_jobs()[0].copies)
    dropped = {name: count for name, count in world.counters.items() if name.startswith("store_dropped")}
    assert world.counters["store_chunks"] == 11 == queued + sum(dropped.values()), dropped
    assert queued == min(passed, LEFT)
    assert {name: dropped[name] - 3 for name in outcomes} == outcomes
