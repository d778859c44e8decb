"""Other caches behind the same GPU pool, turn by turn in order of arrival, with no time passing.

- ``LMCache, modelled``: two LRUs of whole chunks, host memory and disk, both written at once and both touched with
  the whole prompt, suffix first. A hit lies in either. LMCache's default eviction; its code is not run.
- ``native``: vLLM's own ``CPUOffloadingManager`` with its LRU or ARC policy, run as it is, one pool of the bytes of
  host memory and disk together. Generous: its ``fs`` tier has no limit and would hold what is in memory twice.
- ``optimum``: Belady's of all bytes, the GPU's too, in one pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from agents_hierarchy import GpuPool, Sizes
from agents_trace import Turn
from trace_policies import Lru, Optimum, replay


@dataclass(slots=True)
class Found:
    """Tokens found per turn, and chunks found below the GPU and written to its lowest tier."""

    tokens: list[int] = field(default_factory=list)
    below_chunks: int = 0
    written: int = 0

    def add(self, turn: Turn, gpu: int, below: int, chunk_tokens: int) -> None:
        start = gpu // chunk_tokens
        below = max(0, min(below, (turn.tokens - 1) // chunk_tokens - start))
        self.tokens.append(max(gpu, (start + below) * chunk_tokens if below else 0))
        self.below_chunks += below


def lmcache(turns: Sequence[Turn], sizes: Sizes, chunk_tokens: int) -> Found:
    assert sizes.disk is not None, "the model has two bounded tiers"
    gpu, found = GpuPool(sizes.gpu, chunk_tokens), Found()
    host, disk = Lru(sizes.host // chunk_tokens), Lru(sizes.disk // chunk_tokens)
    for turn in turns:
        tokens = gpu.found(turn)
        wanted = turn.chunks[tokens // chunk_tokens :]
        below = next((n for n, chunk in enumerate(wanted) if chunk not in host and chunk not in disk), len(wanted))
        found.add(turn, tokens, below, chunk_tokens)
        found.written += sum(chunk not in disk for chunk in turn.chunks)
        gpu.use(turn)
        host.use(turn.chunks)
        disk.use(turn.chunks)
    return found


def native(turns: Sequence[Turn], sizes: Sizes, chunk_tokens: int, policy: str) -> Found:
    from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    assert sizes.disk is not None, "the pool is bounded"
    gpu, found = GpuPool(sizes.gpu, chunk_tokens), Found()
    manager = CPUOffloadingManager((sizes.host + sizes.disk) // chunk_tokens, policy)
    for number, turn in enumerate(turns):
        context = ReqContext(str(number))
        manager.on_new_request(context)
        keys = [make_offload_key(chunk.to_bytes(16, "big"), 0) for chunk in turn.chunks]
        for place, key in enumerate(keys):
            context.set_offload_key_position(key, (place + 1) * chunk_tokens)
        tokens = gpu.found(turn)
        start = end = min(tokens // chunk_tokens, len(keys))
        while end < len(keys) and manager.lookup(keys[end], context) is LookupResult.HIT:
            end += 1
        manager.prepare_load(keys[start:end], context)
        manager.complete_load(keys[start:end], context)
        found.add(turn, tokens, end - start, chunk_tokens)
        if (store := manager.prepare_store(keys, context)) is not None:  # None: the pool is smaller than the prompt
            found.written += len(store.keys_to_store)
            manager.complete_store(store.keys_to_store, context)
        manager.on_request_finished(context)
        gpu.use(turn)
    return found


def optimum(turns: Sequence[Turn], sizes: Sizes, chunk_tokens: int) -> Found:
    assert sizes.disk is not None, "the pool is bounded"
    requests = [turn.chunks for turn in turns]
    found = Found()
    cache = Optimum((sizes.gpu + sizes.host + sizes.disk) // chunk_tokens, requests)
    for turn, hits in zip(turns, replay(requests, cache), strict=True):
        found.tokens.append(min(hits, (turn.tokens - 1) // chunk_tokens) * chunk_tokens)
    return found
