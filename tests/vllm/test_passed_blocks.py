"""Blocks that vLLM frees before their chunk is whole: they are pinned, stored with it, and let go of.

A window of 17 tokens, blocks of 16, chunks of 64, and a block more for a draft: the last two blocks are stored, and the
first of them is free again when vLLM plans the step behind the chunk's last token. The block pool is vLLM's own.
``tests/sim/vllm/hits.py`` shows the same with vLLM's scheduler, ``tests/e2e/test_drafts.py`` with an engine.
"""

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from tests.vllm.test_save_queue import BLOCKS, World, state_to_store
from tiered_kv.vllm.kv_groups import NULL_BLOCK, CacheGroup, CacheGroups
from tiered_kv.vllm.step import SaveReport

CHUNK, BLOCK = 64, 16
GROUPS = CacheGroups([CacheGroup(0, BLOCK, 4, 4), CacheGroup(1, BLOCK, 4, 2, window_tokens=17)])
PROMPT = 60


class Answering:
    """One request that answers, a token a step, with its blocks as vLLM's KV cache manager keeps them."""

    def __init__(self, *, save_decode: bool = True) -> None:
        self.world = World(groups=GROUPS)
        self.world.server.is_ready = True
        self.keys, whole = self.world.prompt(2)
        self.tables = [whole, [block.block_id for block in self.world.pool.get_new_blocks(len(whole))]]
        self.saves = self.world.request_saves(self.keys, lambda chunks: chunks, save_decode=save_decode, tail_tokens=0)
        self.state = state_to_store(PROMPT)
        self.request = self.state.request
        self.tables_read = 0
        self.step(PROMPT)

    def read_tables(self, name: str) -> list[list[int]]:
        self.tables_read += 1
        return self.tables

    def step(self, tokens: int = 1) -> None:
        window = self.tables[1]
        for place in range(GROUPS[1].first_kept(self.request.num_computed_tokens)):
            if window[place] != NULL_BLOCK:
                self.world.free([window[place]])
                window[place] = NULL_BLOCK
        block_state = SimpleNamespace(get_block_ids=self.read_tables)
        output = SimpleNamespace(num_scheduled_tokens={"r": tokens}, kv_connector_block_state=block_state)
        self.saves.step({"r": self.state}, output)
        self.request.num_computed_tokens += tokens
        self.request.num_tokens += 1

    def to(self, computed: int) -> None:
        while self.request.num_computed_tokens < computed:
            self.step()

    def free(self) -> None:
        for table in self.tables:
            self.world.free([block for block in table if block != NULL_BLOCK])
            table[:] = [NULL_BLOCK] * len(table)

    @property
    def pinned(self) -> int:
        """Blocks that the request's tables do not hold and that are in use all the same."""
        held = sum(block != NULL_BLOCK for table in self.tables for block in table)
        return BLOCKS - 1 - held - self.world.free_blocks


def test_an_answers_chunk_is_stored_with_the_block_that_its_window_has_passed() -> None:
    answering = Answering()
    world = answering.world
    first = answering.tables[1][2]
    world.server.credits.extend([10])
    answering.to(CHUNK)
    assert answering.tables[1][2] == first
    assert answering.state.stored == 0, "its last token may still change"
    answering.step()
    assert answering.tables[1][2] == NULL_BLOCK, "vLLM has not freed it, so this test shows nothing"
    assert answering.state.stored == 1
    (job,) = world.saves.start_jobs()
    assert job.copies[0].groups[1].block_ids[0] == first
    world.saves.finished(SaveReport({job.job_id: 1}))
    assert (world.server.committed, answering.pinned) == ([10], 0)
    assert not [name for name in world.counters if name.startswith("store_dropped")]


def test_a_chunk_without_a_slot_keeps_its_block_until_it_is_queued() -> None:
    answering = Answering()
    answering.world.saves._may_pin = lambda: False
    answering.to(CHUNK + 4)
    assert (answering.state.stored, answering.pinned) == (0, 1)
    del answering.world.saves._may_pin
    answering.world.server.credits.extend([10])
    answering.step()
    assert answering.state.stored == 1


ENDS: dict[str, Callable[[Answering], object]] = {
    "preempted": lambda answering: answering.saves.preempted(answering.state),
    "reset": lambda answering: answering.world.saves.reset(),
    "the pool is emptied": lambda answering: answering.world.saves.let_go(),
    "blocks are wanted": lambda answering: answering.world.saves.frees_soon(),
    "nothing runs": lambda answering: answering.world.saves.make_room(is_standing=True),
    "over": lambda answering: answering.world.saves.passed.let_go("r"),
}


@pytest.mark.parametrize("end", ENDS)
def test_what_is_pinned_is_let_go_of(end: str) -> None:
    answering = Answering()
    answering.to(CHUNK)
    answering.free()
    assert answering.pinned == 1
    ENDS[end](answering)
    assert answering.pinned == 0


def test_what_vllm_wants_back_is_there_at_once() -> None:
    answering = Answering()
    answering.to(CHUNK)
    answering.free()
    assert answering.world.saves.frees_soon()
    assert answering.pinned == 0


def test_a_block_that_two_requests_have_passed_is_free_when_both_let_go_of_it() -> None:
    answering = Answering()
    answering.to(CHUNK)
    answering.world.saves.passed.keep("other", 0, answering.tables, CHUNK)
    answering.free()
    assert answering.pinned == 1
    assert answering.world.saves.frees_soon()
    assert answering.pinned == 0


def test_what_its_request_still_holds_stays_pinned() -> None:
    """Letting go of it would give vLLM nothing, nor empty its pool, and would lose the chunk."""
    answering = Answering()
    answering.to(CHUNK)
    saves = answering.world.saves
    answering.world.server.credits.extend([10])
    assert not saves.frees_soon()
    saves.make_room(is_standing=True)
    saves.let_go()
    answering.step()
    assert answering.state.stored == 1


def test_nothing_is_pinned_of_an_answer_that_is_not_stored_and_no_table_is_read() -> None:
    answering = Answering(save_decode=False)
    answering.to(CHUNK + 4)
    answering.free()
    assert (answering.pinned, answering.tables_read) == (0, 0)


def test_tables_are_read_when_something_is_to_be_pinned_or_stored() -> None:
    answering = Answering()
    answering.world.server.credits.extend([10])
    answering.to(2 * CHUNK - 1)
    assert answering.tables_read == 2


def test_only_these_blocks_are_passed_early() -> None:
    """A window as vLLM has it without drafts; attention chunks of two of our chunks; all tokens."""
    window = CacheGroups([CacheGroup(0, BLOCK, 4, 1, window_tokens=17)])
    attention_chunks = CacheGroups([CacheGroup(0, BLOCK, 4, 4, local_tokens=2 * CHUNK)])
    assert GROUPS.passed_tokens == CHUNK
    assert window.passed_tokens == CHUNK + BLOCK
    assert attention_chunks.passed_tokens == CHUNK
    for groups in (GROUPS, window, attention_chunks):
        chunk = 5
        start = groups[-1].stored_range(chunk).start
        freed = [n for n in range(chunk * CHUNK, (chunk + 2) * CHUNK) if groups[-1].first_kept(n) > start]
        assert freed[0] - chunk * CHUNK == groups.passed_tokens
