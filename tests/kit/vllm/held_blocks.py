"""Which blocks of each KV cache group a request held in vLLM, and the KV bytes in them.

vLLM's prefix cache cannot tell: for some models it is off, and it forgets blocks that have left a sliding window. So
this looks at the block tables: after every allocation, and in the moment before the request's blocks are freed.
Called by end-to-end tests with an engine in their own process.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from tests.kit.vllm.harness import kv_layers, pages_digest

NULL_BLOCK: Final = 0
"""vLLM's placeholder for a block that no token needs any more."""


@dataclass
class Held:
    """One request.

    Attributes:
        most: Per group, the largest number of blocks it held at once.
        pages: Digest of a block's bytes over all layers, by group and place in the block table, when it ended.
    """

    most: dict[int, int] = field(default_factory=dict)
    pages: dict[tuple[int, int], str] = field(default_factory=dict)

    def pages_before(self, tokens: int, block_tokens: int) -> dict[tuple[int, int], str]:
        """Only the blocks that hold tokens before this one."""
        return {where: page for where, page in self.pages.items() if (where[1] + 1) * block_tokens <= tokens}


@contextmanager
def watching(llm: Any) -> Iterator[list[Held]]:
    """Requests that vLLM serves inside the block, in the order in which they end."""
    manager = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
    layers = kv_layers(llm)
    allocate, free = manager.allocate_slots, manager.free
    running: dict[str, Held] = {}
    ended: list[Held] = []

    def tables(request: Any) -> list[tuple[int, int, int]]:
        groups = manager.get_block_ids(request.request_id)
        found = ((g, place, block) for g, table in enumerate(groups) for place, block in enumerate(table))
        return [entry for entry in found if entry[2] != NULL_BLOCK]

    def allocate_slots(request: Any, *arguments: Any, **more: Any) -> Any:
        blocks = allocate(request, *arguments, **more)
        held = running.setdefault(request.request_id, Held())
        now = [group for group, _, _ in tables(request)]
        held.most = {group: max(held.most.get(group, 0), now.count(group)) for group in {*held.most, *now}}
        return blocks

    def free_blocks(request: Any) -> None:
        held = running.pop(request.request_id, Held())
        held.pages = {(group, place): pages_digest(layers, block) for group, place, block in tables(request)}
        ended.append(held)
        free(request)

    manager.allocate_slots, manager.free = allocate_slots, free_blocks
    try:
        yield ended
    finally:
        manager.allocate_slots, manager.free = allocate, free
