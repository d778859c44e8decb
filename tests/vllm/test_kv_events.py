"""KV events: vLLM's own hashes of a chunk's blocks, told when the chunk comes into a tier and when it leaves it."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    get_request_block_hasher,
    init_none_hash,
    maybe_convert_block_hash,
)
from vllm.v1.request import Request

from tiered_kv.keys.namespace import REQUIRED_FIELDS, Namespace
from tiered_kv.keys.prefix_keys import PrefixKeys
from tiered_kv.server import protocol as m
from tiered_kv.server.client import EndedLookup
from tiered_kv.tiering.types import LookupAnswer
from tiered_kv.vllm import kv_events as module
from tiered_kv.vllm.kv_events import EventGroup, EventPublisher
from tiered_kv.vllm.requests import RequestState

pytestmark = pytest.mark.vllm

BLOCK, CHUNK = 16, 64
GROUP = EventGroup(index=0, block_tokens=BLOCK, hash_tokens=BLOCK, kind="full_attention")
HOST, DISK, BUCKET = 0, 1, 2


def namespace(name: str) -> Namespace:
    return Namespace.from_fields(dict.fromkeys(REQUIRED_FIELDS, name) | {"format_version": 1})


@dataclass
class Session:
    """What the announcer reads of a scheduler's client."""

    generation: int = 0
    namespace: Namespace | None = field(default_factory=lambda: namespace("a"))
    tiers: tuple[str, ...] = ("host", "disk", "object")
    moves: deque[m.Moved] = field(default_factory=deque)


class World:
    """An announcer, and requests of vLLM's own kind with hashes made by vLLM."""

    def __init__(self, group: EventGroup = GROUP) -> None:
        init_none_hash(sha256)
        self.session = Session()
        self.announcer = EventPublisher(self.session, group, CHUNK)  # type: ignore[arg-type]
        self.hasher = get_request_block_hasher(group.hash_tokens, sha256)

    def request(self, tokens: list[int], **more: Any) -> RequestState:
        """A request that was just added, all of its chunks named."""
        request = Request("id", tokens, SamplingParams(max_tokens=4), None, block_hasher=self.hasher, **more)
        extras: Any = None
        state = RequestState(request, extras)
        assert self.session.namespace is not None
        state.keys = PrefixKeys(self.session.namespace, CHUNK)
        state.keys.extend(tokens)
        self.announcer.note(state)
        return state

    def moved(self, tier: int, keys: list[bytes], *, is_here: bool = True) -> None:
        self.session.moves.append(m.Moved(tier, is_here, b"".join(keys)))

    def take(self) -> list[Any]:
        return list(self.announcer.take())


def keys(state: RequestState) -> list[bytes]:
    assert state.keys is not None
    return list(state.keys.keys)


def hashes(state: RequestState, first: int, last: int) -> list[Any]:
    return [maybe_convert_block_hash(one) for one in state.request.block_hashes[first:last]]


def test_a_chunk_is_told_with_its_blocks_as_vllm_hashes_them() -> None:
    world = World()
    tokens = list(range(5, 5 + 2 * CHUNK + 10))
    state = world.request(tokens)
    world.moved(HOST, keys(state))
    first, second = world.take()
    assert isinstance(first, BlockStored)
    assert (first.block_hashes, first.parent_block_hash) == (hashes(state, 0, 4), None)
    assert (first.token_ids, first.block_size) == (tokens[:CHUNK], BLOCK)
    assert (first.medium, first.locality, first.group_idx) == ("CPU", "LOCAL", 0)
    assert (first.lora_id, first.lora_name, first.extra_keys) == (None, None, [None] * 4)
    assert first.kv_cache_spec_kind == "full_attention"
    assert (second.block_hashes, second.parent_block_hash) == (hashes(state, 4, 8), first.block_hashes[-1])
    assert second.token_ids == tokens[CHUNK : 2 * CHUNK]


def test_tiers_are_told_by_medium_and_locality_and_each_thing_once() -> None:
    world = World()
    key = keys(world.request(list(range(CHUNK))))
    for tier in (HOST, DISK, HOST, BUCKET, DISK):
        world.moved(tier, key)
    assert [(e.medium, e.locality) for e in world.take()] == [
        ("CPU", "LOCAL"),
        ("STORAGE", "LOCAL"),
        ("STORAGE", "REMOTE"),
    ]
    for tier in (HOST, HOST, BUCKET):
        world.moved(tier, key, is_here=False)
    events = world.take()
    assert all(isinstance(event, BlockRemoved) for event in events)
    assert [(e.medium, e.locality) for e in events] == [("CPU", "LOCAL"), ("STORAGE", "REMOTE")]
    assert world.take() == []


def test_chunks_of_prompts_that_were_never_asked_here_are_nobodys() -> None:
    world = World()
    world.moved(HOST, [bytes(16)])
    world.moved(HOST, [bytes(16)], is_here=False)
    assert world.take() == []


def test_adapters_salts_and_other_extras_are_told_as_vllm_tells_them() -> None:
    world = World()
    adapter = LoRARequest("tuned", 3, "/nowhere")
    state = world.request(list(range(2 * CHUNK)), lora_request=adapter, cache_salt="tenant")
    world.moved(HOST, keys(state))
    first, second = world.take()
    assert (first.lora_id, first.lora_name) == (3, "tuned")
    ours = [first.extra_keys[0], first.extra_keys[1], second.extra_keys[0]]
    tagged = [generate_block_hash_extra_keys(state.request, at, at + BLOCK, 0)[0] for at in (0, BLOCK, CHUNK)]
    assert ours == list(module.to_event_extra_keys(tagged))
    assert "tenant" in ours[0] and "tenant" not in ours[1]
    assert first.block_hashes == hashes(state, 0, 4)


def test_what_a_lookup_held_is_in_memory() -> None:
    world = World()
    state = world.request(list(range(4 * CHUNK)))
    answer = LookupAnswer(held=3, slots=(7, 8), ready=2, sources=bytes(2), is_answered=True)
    world.announcer.lookup_ended(EndedLookup(1, 0, keys(state), 1, answer))
    assert [(e.medium, e.block_hashes) for e in world.take()] == [
        ("CPU", hashes(state, 4, 8)),
        ("CPU", hashes(state, 8, 12)),
    ]
    world.session.generation = 1
    world.announcer.lookup_ended(EndedLookup(2, 0, keys(state), 0, answer))
    assert all(isinstance(event, BlockRemoved) for event in world.take())


@pytest.mark.parametrize("what", ["another server", "a reset"])
def test_after_a_lost_session_or_a_reset_nothing_of_before_is_true(what: str) -> None:
    world = World()
    state = world.request(list(range(CHUNK)))
    world.moved(HOST, keys(state))
    world.moved(DISK, keys(state))
    world.take()
    if what == "a reset":
        world.session.namespace = namespace("private")
    else:
        world.session.generation += 1
    assert [(type(e).__name__, e.medium) for e in world.take()] == [
        ("BlockRemoved", "CPU"),
        ("BlockRemoved", "STORAGE"),
    ]
    world.moved(HOST, keys(state), is_here=False)
    assert world.take() == []
    assert not world.announcer.is_noted(state) or what == "a reset"
    again = world.request(list(range(CHUNK)))
    world.moved(HOST, keys(again))
    assert [event.medium for event in world.take()] == ["CPU"]


def test_what_is_told_is_told_again_when_vllm_clears_its_own() -> None:
    world = World()
    state = world.request(list(range(2 * CHUNK)))
    world.moved(HOST, keys(state))
    world.moved(DISK, keys(state)[:1])
    before = world.take()
    world.announcer.publish_again()
    again = world.take()
    assert sorted(map(repr, again)) == sorted(map(repr, before))


def test_what_is_forgotten_is_told_as_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NOTES_MAX", 3)
    world = World()
    first = world.request(list(range(2 * CHUNK)))
    world.moved(HOST, keys(first))
    assert len(world.take()) == 2
    world.announcer.note(first)  # used again: what comes next is forgotten before it
    world.request([7] * CHUNK)
    world.request([8] * CHUNK)
    (removed,) = world.take()
    assert (type(removed), removed.block_hashes) == (BlockRemoved, hashes(first, 0, 4))
    assert len(world.announcer._notes) == 3


def test_where_moves_were_lost_nothing_that_was_told_before_is_believed() -> None:
    world = World()
    first, second = keys(world.request(list(range(2 * CHUNK))))
    world.moved(HOST, [first, second])
    world.moved(DISK, [first])
    assert len(world.take()) == 3
    world.session.moves.append(m.MOVES_LOST)
    world.moved(DISK, [first])
    *removed, stored = world.take()
    assert [(type(one), one.medium) for one in removed] == [
        (BlockRemoved, "CPU"),
        (BlockRemoved, "STORAGE"),
        (BlockRemoved, "CPU"),
    ]
    assert (type(stored), stored.medium) == (BlockStored, "STORAGE")


def test_a_step_tells_a_bounded_number_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVENTS_MAX", 4)
    world = World()
    state = world.request(list(range(10 * CHUNK)))
    world.moved(HOST, keys(state))
    told = [world.take() for _ in range(4)]
    assert [len(events) for events in told] == [4, 4, 2, 0]
    assert [e.block_hashes[0] for events in told for e in events] == hashes(state, 0, 40)[::4]


def test_hashes_of_smaller_units_than_the_groups_blocks_are_those_at_the_blocks_ends() -> None:
    world = World(EventGroup(index=1, block_tokens=32, hash_tokens=16, kind="full_attention"))
    state = world.request(list(range(2 * CHUNK)))
    world.moved(HOST, keys(state))
    first, second = world.take()
    assert (first.block_size, first.group_idx) == (32, 1)
    assert first.block_hashes == [hashes(state, 0, 8)[1], hashes(state, 0, 8)[3]]
    assert second.parent_block_hash == first.block_hashes[-1]


def test_a_chunk_that_vllm_has_not_hashed_yet_is_noted_later() -> None:
    world = World()
    state = world.request(list(range(CHUNK)))
    hasher = world.hasher
    world.hasher = lambda _request: []
    short = world.request([9] * CHUNK)
    assert world.announcer.is_noted(state) and not world.announcer.is_noted(short)
    short.request._block_hasher = hasher
    short.request.update_block_hashes()
    world.announcer.note(short)
    world.moved(HOST, keys(short))
    assert [event.block_hashes for event in world.take()] == [hashes(short, 0, 4)]
