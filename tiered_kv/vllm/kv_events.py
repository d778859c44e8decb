"""KV events for cache-aware routers: which of vLLM's blocks are in which tier.

Events are in vLLM's own words and hashes, and only where vLLM publishes events (``--kv-events-config``). A tier is
named by its medium, ``CPU`` for host memory and ``STORAGE`` below it, with the locality ``LOCAL``, or ``REMOTE`` for an
object store. An engine publishes the chunks it can name: those of prompts that it has seen itself, because hashes and
token ids come with requests, and the server knows neither.

A router believes in no chunk that is gone for longer than the engine takes to notice: a published chunk that the engine
forgets, because its server is lost, the cache was reset, too many are remembered, or it missed what the server told, is
published as removed. Events leave with vLLM's steps; an idle engine publishes nothing.
"""

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd
from typing import Any, Final

from tiered_kv.keys.chunk_record import KEY_BYTES
from tiered_kv.metrics.figures import HOST_NAME
from tiered_kv.server.client import EndedLookup, SchedulerClient
from tiered_kv.vllm.compat import (
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    generate_block_hash_extra_keys,
    get_kv_cache_spec_kind,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from tiered_kv.vllm.kv_groups import CacheGroups
from tiered_kv.vllm.requests import RequestState

NOTES_MAX: Final = 1 << 15
"""Chunks remembered, the least recently asked for are forgotten: 8 million tokens in about 70 MB."""

EVENTS_MAX: Final = 1024
"""Events that leave with one step: a reset, or a lost server, must not hold the scheduler up."""


@dataclass(slots=True)
class _Note:
    """The contents of one chunk's events.

    Attributes:
        hashes: vLLM's own hashes of the chunk's blocks, not yet as events tell them.
        parent: That of the block before it; None for a prompt's first.
        extra_keys: Per block, what besides tokens is in its hash.
        lora: Number and name of its LoRA adapter.
        places: Tiers for which it was published as stored.
    """

    hashes: tuple[Any, ...]
    parent: Any
    tokens: "array[int]"
    extra_keys: list[Any]
    lora: tuple[int, str] | None
    places: set[int]


@dataclass(frozen=True, slots=True)
class EventGroup:
    """The KV cache group that events name: one that keeps every block.

    Attributes:
        index: Its place among vLLM's groups.
        block_tokens: Tokens of one of its blocks.
        hash_tokens: Tokens per hash of a request; a divisor of ``block_tokens``.
        kind: vLLM's word for what kind of attention it is.
    """

    index: int
    block_tokens: int
    hash_tokens: int
    kind: str

    @classmethod
    def of(cls, groups: CacheGroups, kv_cache_config: Any) -> "EventGroup":
        """Choose the group; the first one where all have a window."""
        shared = [group for group in groups if group.is_shared]
        group = next((group for group in shared if not group.is_windowed), shared[0])
        kind = get_kv_cache_spec_kind(kv_cache_config.kv_cache_groups[group.number].kv_cache_spec)
        return cls(group.number, group.block_tokens, gcd(*(group.block_tokens for group in shared)), kind.value)


class EventPublisher:
    """Turns the server's moves of keys into events about blocks.

    Only its own methods write its fields; of the client it empties ``moves``. Threads: vLLM's scheduler thread only.
    """

    def __init__(self, client: SchedulerClient, group: EventGroup, chunk_tokens: int) -> None:
        self._client = client
        self._group = group
        self._chunk_tokens = chunk_tokens
        self._notes: OrderedDict[bytes, _Note] = OrderedDict()
        self._unpublished: deque[tuple[_Note, int, bool]] = deque()  # chunk, tier, whether it is there
        self._session: tuple[int, object] = (-1, None)

    # -- what chunks are called --------------------------------------------------------------------------------

    def note(self, state: RequestState | None) -> None:
        """Remember the blocks of a request's chunks, as far as they have keys."""
        if state is None or state.keys is None:
            return
        self._follow_session()
        for index, key in enumerate(state.keys.keys):
            if key in self._notes:
                self._notes.move_to_end(key)
            elif (note := self._describe(state.request, index)) is not None:
                self._notes[key] = note
        while len(self._notes) > NOTES_MAX:
            _, note = self._notes.popitem(last=False)
            self._forget(note)

    def is_noted(self, state: RequestState) -> bool:
        """Whether all that has keys is remembered: a request grows at its end."""
        return state.keys is None or not state.keys.keys or state.keys.keys[-1] in self._notes

    def _describe(self, request: Any, index: int) -> _Note | None:
        group, hashes = self._group, request.block_hashes
        start, stop = index * self._chunk_tokens, (index + 1) * self._chunk_tokens
        per_block = group.block_tokens // group.hash_tokens
        first, last = start // group.hash_tokens, stop // group.hash_tokens
        if len(hashes) < last:
            return None  # vLLM has not hashed the last generated tokens yet
        lora = request.lora_request
        return _Note(
            hashes=tuple(hashes[first + per_block - 1 : last : per_block]),  # a block's hash is that at its end
            parent=hashes[first - 1] if first else None,
            tokens=array("i", request.all_token_ids[start:stop]),
            extra_keys=_extra_keys(request, range(start, stop, group.block_tokens)),
            lora=None if lora is None else (lora.adapter_id, lora.name),
            places=set(),
        )

    # -- where they are ----------------------------------------------------------------------------------------

    def lookup_ended(self, ended: EndedLookup) -> None:
        """The chunks that a lookup had leased are in host memory; if they leave it, that is published later."""
        self._follow_session()
        if ended.generation != self._client.generation:
            return
        for key in ended.keys[ended.start : ended.start + ended.answer.ready]:
            self._moved(key, 0, is_here=True)

    def take(self) -> Iterable[KVCacheEvent]:
        """Events since the last call, a bounded number at a time."""
        self._follow_session()
        while self._client.moves:
            moved = self._client.moves.popleft()
            if not moved.keys:  # some were lost: of what was told before nobody knows what is true
                for note in self._notes.values():
                    self._forget(note)
            for start in range(0, len(moved.keys), KEY_BYTES):
                self._moved(moved.keys[start : start + KEY_BYTES], moved.tier, is_here=moved.is_here)
        moves = [self._unpublished.popleft() for _ in range(min(EVENTS_MAX, len(self._unpublished)))]
        return [self._stored(note, place) if is_here else self._removed(note, place) for note, place, is_here in moves]

    def publish_again(self) -> None:
        """vLLM empties its prefix cache and publishes that all blocks are gone: publish again those in tiers below."""
        self._follow_session()
        self._unpublished.clear()
        self._unpublished.extend((note, place, True) for note in self._notes.values() for place in sorted(note.places))

    def _follow_session(self) -> None:
        """Forget everything with another session, or another namespace after a reset."""
        session = (self._client.generation, self._client.namespace)
        if session == self._session:
            return
        self._session = session
        for note in self._notes.values():
            self._forget(note)
        self._notes.clear()

    def _moved(self, key: bytes, place: int, *, is_here: bool) -> None:
        note = self._notes.get(key)
        if note is None or (place in note.places) == is_here:
            return
        self._unpublished.append((note, place, is_here))
        (note.places.add if is_here else note.places.discard)(place)

    def _forget(self, note: _Note) -> None:
        self._unpublished.extend((note, place, False) for place in sorted(note.places))
        note.places.clear()

    def _stored(self, note: _Note, place: int) -> BlockStored:
        lora_id, lora_name = note.lora or (None, None)
        medium, locality = self._place(place)
        return BlockStored(
            block_hashes=[_external(block_hash) for block_hash in note.hashes],
            parent_block_hash=None if note.parent is None else _external(note.parent),
            token_ids=list(note.tokens),
            block_size=self._group.block_tokens,
            lora_id=lora_id,
            lora_name=lora_name,
            medium=medium,
            extra_keys=note.extra_keys,
            group_idx=self._group.index,
            kv_cache_spec_kind=self._group.kind,
            locality=locality,
        )

    def _removed(self, note: _Note, place: int) -> BlockRemoved:
        medium, locality = self._place(place)
        return BlockRemoved(
            block_hashes=[_external(block_hash) for block_hash in note.hashes],
            medium=medium,
            group_idx=self._group.index,
            locality=locality,
        )

    def _place(self, place: int) -> tuple[str, str]:
        """Medium and locality of a tier."""
        name = self._client.tiers[place] if place < len(self._client.tiers) else ""
        return "CPU" if name == HOST_NAME else "STORAGE", "REMOTE" if name in (
            "object",
            "peers",
            "mooncake",
        ) else "LOCAL"


def _external(block_hash: Any) -> Any:
    return maybe_convert_block_hash(block_hash)


def _extra_keys(request: Any, starts: range) -> list[Any]:
    """Per block, vLLM's extra keys as its own events give them; most requests have none."""
    if not (request.lora_request or request.cache_salt or request.mm_features or request.prompt_embeds is not None):
        return [None] * len(starts)
    keys = [generate_block_hash_extra_keys(request, at, at + starts.step, 0)[0] for at in starts]
    return list(to_event_extra_keys(keys))  # without the tags of vLLM's own hashes
