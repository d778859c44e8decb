"""Loads in flight hold no more of vLLM's blocks together than lets each of them go on.

A request whose load runs, or has ended and was not scheduled yet, holds blocks and cannot be preempted. vLLM reserves
what it still needs, but for groups with a sliding window it compares the window's peak with the length of a table whose
beginning the load left empty (``SingleTypeKVCacheManager.get_num_blocks_to_allocate``), so it reserves nothing for
them; and when the first request that holds blocks finds no room, it looks at no other. Once nothing runs, the engine
stands still for ever (docs/simulator.md). So with such groups the connector counts by itself: all loads in flight fit
into the pool with all that they need until their prompts are computed. Pure arithmetic, called by the scheduler side.
"""

from __future__ import annotations

from collections import Counter

from tiered_kv.vllm.groups import CacheGroups


class LoadRoom:
    """Which loads may be in flight together.

    Threads: vLLM's scheduler thread only. Units: blocks of all groups.
    """

    def __init__(self, groups: CacheGroups, step_tokens: int, counters: Counter[str]) -> None:
        """Start with a pool without end.

        Args:
            step_tokens: vLLM's budget of a step.
            counters: Gets ``loads_put_off``, once per request that has to wait in front.
        """
        self._groups = groups
        self._step_tokens = step_tokens
        self._counters = counters
        self._pool_blocks: int | None = None
        self._needs: dict[str, int] = {}
        self._first: str | None = None  # waits for room: nobody overtakes it

    def set_pool(self, blocks: int) -> None:
        """How many blocks requests can hold."""
        self._pool_blocks = blocks if self._groups.has_windows else None

    def admits(self, request_id: str, tokens: int, loaded_tokens: int) -> bool:
        """Whether a request of so many tokens may load the first ``loaded_tokens`` now; otherwise it asks again.

        One that is alone may always: whether it fits at all is vLLM's to say.
        """
        need = self._need(tokens, loaded_tokens)
        is_next = self._first in (None, request_id)
        if self._pool_blocks is None or not self._needs:
            return True
        if is_next and sum(self._needs.values()) + need <= self._pool_blocks:
            return True
        if self._first is None:
            self._first = request_id
            self._counters["loads_put_off"] += 1
        return False

    def begin(self, request_id: str, tokens: int, loaded_tokens: int) -> None:
        """The request has its blocks, and its load begins."""
        self.leave(request_id)
        self._needs[request_id] = self._need(tokens, loaded_tokens)

    def leave(self, *request_ids: str) -> None:
        """These requests run and can be preempted, or wait for nothing any more. Idempotent."""
        for request_id in request_ids:
            self._needs.pop(request_id, None)
            if self._first == request_id:
                self._first = None

    def _need(self, tokens: int, loaded_tokens: int) -> int:
        return self._groups.peak_blocks(tokens, loaded_tokens, self._step_tokens)
