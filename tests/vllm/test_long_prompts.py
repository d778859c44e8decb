"""Keys of long prompts are computed by another thread: the same keys, and the request is none the worse for it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request, RequestStatus

from tests.kit.fake_clock import FakeClock
from tests.kit.server.clients import BLOCK, CHUNK, SmallEngine, poll_until
from tests.kit.server.probe import wait_for
from tiered_kv.keys.namespace import Namespace
from tiered_kv.keys.prefix_keys import PrefixKeys
from tiered_kv.vllm import requests
from tiered_kv.vllm.engine_role import EngineRole
from tiered_kv.vllm.identity.adapters import Adapters
from tiered_kv.vllm.kv_groups import CacheGroup, CacheGroups
from tiered_kv.vllm.request_lookups import HASHING_MAX_S
from tiered_kv.vllm.requests import RequestState, SentLookup
from tiered_kv.vllm.scheduler import SchedulerSide

pytestmark = pytest.mark.vllm

CHUNKS = 5
ROLE = EngineRole(may_load=True, may_store=True, has_prefix_caching=False)
GROUPS = CacheGroups([CacheGroup(0, BLOCK, CHUNK // BLOCK, CHUNK // BLOCK)])


@pytest.fixture(autouse=True)
def long_from_two_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of more than two chunks are long; they are hashed two chunks at a time."""
    monkeypatch.setattr(requests, "HASHED_AT_ONCE", 2 * CHUNK)
    monkeypatch.setattr("tiered_kv.keys.prefix_keys.HASHED_IN_PART", 2 * CHUNK)


@pytest.fixture
def side(engine: SmallEngine) -> Iterator[SchedulerSide]:
    side = SchedulerSide(engine.config, engine.client, Adapters(""), GROUPS, ROLE)
    yield side
    side._lookups.close()


@contextmanager
def busy(side: SchedulerSide) -> Iterator[None]:
    """The thread has something else to do."""
    gate = threading.Event()
    side._lookups._hasher.submit(gate.wait)
    try:
        yield
    finally:
        gate.set()


def request(name: str, first_token: int, chunks: int = CHUNKS) -> Request:
    tokens = [*range(first_token, first_token + chunks * CHUNK), 1]
    return Request(name, tokens, SamplingParams(max_tokens=9), None)


def until_told(side: SchedulerSide, asked: Request) -> int:
    told: list[int | None] = []

    def is_told() -> bool:
        told.append(side.matched_tokens(asked, 0))
        return told[-1] is not None

    wait_for(is_told, "an answer")
    assert told[-1] is not None
    return told[-1]


def keys_of(engine: SmallEngine, asked: Request) -> PrefixKeys:
    assert engine.client.namespace is not None
    keys = PrefixKeys(engine.client.namespace, CHUNK)
    keys.extend(list(asked.all_token_ids))
    return keys


def test_a_long_prompt_is_asked_for_again_until_it_has_the_same_keys_and_hits(
    engine: SmallEngine, side: SchedulerSide
) -> None:
    engine.store(CHUNKS, first_token=700_000)
    engine.wait_hits(CHUNKS, first_token=700_000)
    asked = request("asked", 700_000)
    with busy(side):
        side.add_request(asked)
        assert side.matched_tokens(asked, 0) is None
        state = side.state("asked")
        assert state is not None and state.is_hashing and state.lookup is None
    assert until_told(side, asked) == CHUNKS * CHUNK
    expected = keys_of(engine, asked)
    assert state.keys is not None
    assert (state.keys.keys, state.keys.digests) == (expected.keys, expected.digests)
    assert side.counters["lookups"] == 1
    side.finish_request(asked, ())
    assert not engine.client.lookups


def test_keys_that_are_there_just_when_vllm_asks_are_no_miss(
    engine: SmallEngine, side: SchedulerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two looks at the other thread it may end."""
    engine.store(CHUNKS, first_token=705_000)
    engine.wait_hits(CHUNKS, first_token=705_000)
    asked = request("asked", 705_000)
    send = side._lookups.send
    gate = threading.Event()
    side._lookups._hasher.submit(gate.wait)

    def send_and_end(state: RequestState, start: int) -> SentLookup | None:
        sent = send(state, start)
        gate.set()
        if state.hashing is not None:
            state.hashing.result()
        return sent

    side.add_request(asked)
    monkeypatch.setattr(side._lookups, "send", send_and_end)
    assert side.matched_tokens(asked, 0) is None
    assert until_told(side, asked) == CHUNKS * CHUNK
    assert side.counters["lookups"] == 1
    side.finish_request(asked, ())


def test_a_request_whose_turn_it_is_waits_for_no_queue_of_long_prompts(engine: SmallEngine) -> None:
    clock = FakeClock()
    side = SchedulerSide(engine.config, engine.client, Adapters(""), GROUPS, ROLE, clock.monotonic)
    asked = request("asked", 706_000)
    with busy(side):
        side.add_request(asked)
        assert side.matched_tokens(asked, 0) is None
        clock.advance(HASHING_MAX_S + 0.01)
        assert side.matched_tokens(asked, 0) is None
        state = side.state("asked")
        assert state is not None and state.lookup is not None, "it waits for the thread"
        assert state.keys is not None and state.keys.keys == keys_of(engine, asked).keys
        side.finish_request(asked, ())
    side._lookups.close()


def test_a_request_that_ends_at_once_waits_for_no_thread(engine: SmallEngine, side: SchedulerSide) -> None:
    asked = request("aborted", 707_000)
    with busy(side):
        side.add_request(asked)
        state = side.state("aborted")
        assert state is not None and state.hashing is not None
        side.finish_request(asked, ())  # with the thread busy for ever, this would never return
        assert state.hashing.cancelled() and not side._lookups.hashing


def test_a_short_prompt_is_looked_up_at_once(engine: SmallEngine, side: SchedulerSide) -> None:
    asked = request("short", 710_000, chunks=2)
    side.add_request(asked)
    state = side.state("short")
    assert state is not None and state.hashing is None and state.lookup is not None
    side.finish_request(asked, ())


def test_a_long_prompt_that_vllm_does_not_ask_for_is_looked_up_when_it_has_its_keys(
    engine: SmallEngine, side: SchedulerSide
) -> None:
    """One that may not be loaded, or waits behind others: what is held must not be stored again."""
    engine.store(CHUNKS, first_token=720_000)
    engine.wait_hits(CHUNKS, first_token=720_000)
    pool = BlockPool(100, enable_caching=True, hash_block_size=BLOCK)
    side.bind_block_pool(pool)
    asked = request("unasked", 720_000)
    table = [block.block_id for block in pool.get_new_blocks(CHUNKS * CHUNK // BLOCK + 1)]
    blocks = SimpleNamespace(get_block_ids=lambda _: (table,))

    def step(tokens: int) -> int:
        metadata = side.plan_step(
            SimpleNamespace(
                preempted_req_ids=set(), num_scheduled_tokens={"unasked": tokens}, kv_connector_block_state=blocks
            )
        )
        asked.num_computed_tokens += tokens
        return len(metadata.saves)

    with busy(side):
        side.add_request(asked)
        asked.status = RequestStatus.RUNNING
        side.allocated(asked, (table,), 0)
        assert step(CHUNKS * CHUNK) == 0
        assert side.state("unasked").is_hashing

    def is_answered() -> bool:
        side.poll()
        lookups = engine.client.lookups.values()
        return bool(lookups) and all(one.is_answered for one in lookups)

    wait_for(is_answered, "the answer")
    assert not any(one.slots for one in engine.client.lookups.values()), "chunks are leased that nobody loads"
    assert step(1) == 0
    assert (side.counters["store_held"], side.counters["stores"]) == (CHUNKS, 0)
    assert not engine.client.lookups
    side.finish_request(asked, (table,))


def test_a_long_prompt_that_ends_while_its_keys_are_computed_is_stored_whole(
    engine: SmallEngine, side: SchedulerSide
) -> None:
    pool = BlockPool(100, enable_caching=True, hash_block_size=BLOCK)
    side.bind_block_pool(pool)
    asked = request("ends", 730_000)
    table = [block.block_id for block in pool.get_new_blocks(CHUNKS * CHUNK // BLOCK + 1)]
    poll_until(engine.client, lambda: engine.client.credit_count >= CHUNKS, "slots")
    with busy(side):
        side.add_request(asked)
    asked.status, asked.num_computed_tokens = RequestStatus.RUNNING, CHUNKS * CHUNK
    side.finish_request(asked, (table,))
    metadata = side.plan_step(
        SimpleNamespace(
            preempted_req_ids=set(),
            num_scheduled_tokens={},
            kv_connector_block_state=SimpleNamespace(get_block_ids=lambda _: None),
        )
    )
    assert sum(len(job.copies) for job in metadata.saves) == CHUNKS
    assert not engine.client.lookups and not side._lookups.hashing


def test_keys_that_were_begun_under_another_namespace_are_not_used(engine: SmallEngine, side: SchedulerSide) -> None:
    """A reset, or another server: what is right is computed anew."""
    asked = request("reset", 740_000)
    with busy(side):
        side.add_request(asked)
    state = side.state("reset")
    assert state is not None and state.hashing is not None
    state.hashing.result()
    assert engine.client.namespace is not None
    other = Namespace.from_fields({**engine.client.namespace.fields, "epoch": "another"})
    keys = state.update_keys(other, CHUNK)
    expected = PrefixKeys(other, CHUNK)
    expected.extend(list(asked.all_token_ids))
    assert keys.keys == expected.keys
    side.finish_request(asked, ())


@pytest.mark.parametrize("chunks", [1, CHUNKS], ids=["short", "long"])
@pytest.mark.parametrize("place", [0, -2], ids=["in a chunk", "behind all chunks"])
def test_a_token_id_that_has_no_name_costs_its_request_the_cache_and_no_engine(
    engine: SmallEngine, side: SchedulerSide, chunks: int, place: int
) -> None:
    """Without a tokenizer vLLM checks no token ids, and with several ranks it embeds one that it does not know as 0."""
    tokens = [*range(750_000, 750_000 + chunks * CHUNK + BLOCK), 1]
    tokens[place] = -1
    asked = Request("asked", tokens, SamplingParams(max_tokens=9), None)
    side.add_request(asked)
    assert until_told(side, asked) == 0
    state = side.state("asked")
    assert state is not None
    assert side._lookups.tail_name(state, 1, BLOCK) is None or (place, chunks) == (-2, CHUNKS)
    assert side._lookups.tail_name(state, chunks, BLOCK) is None
    assert state.extras.reason is not None and "token=-1" in state.extras.reason
    side.finish_request(asked, ())
