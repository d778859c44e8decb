"""Admission control for loads: every load in flight must be able to finish.

:class:`LoadAdmission` keeps enough of vLLM's blocks free that every load in flight can finish. A request whose load
runs, or has ended and was not scheduled yet, holds blocks and cannot be preempted. vLLM reserves what it still needs,
but for groups with a sliding window it compares the window's peak with the length of a table whose beginning the load
left empty (``SingleTypeKVCacheManager.get_num_blocks_to_allocate``), so it reserves nothing for them; and when the
first request that holds blocks finds no room, it looks at no other. Once nothing runs, the engine stands still for ever
(docs/simulator.md). So with such groups the connector counts by itself: all loads in flight fit into the pool with all
that they need until their prompts are computed.

:class:`LongestPrompt` warns where one request may lease less of host memory than the longest prompt needs (rule 3).
Such a prompt is loaded as far as the limit goes and computed from there on, which nothing else shows: hits look well
until prompts grow. The limit is the server's.

Called by the connector's scheduler role.
"""

import logging
from collections import Counter
from typing import Final

from tiered_kv.config import Config, size_text
from tiered_kv.server.client import SchedulerClient
from tiered_kv.tiering.types import Limits
from tiered_kv.vllm.kv_groups import CacheGroups

logger = logging.getLogger(__name__)

_MIB: Final = 1 << 20


class LoadAdmission:
    """Decides which loads may be in flight together.

    Only its own methods write its fields. Threads: vLLM's scheduler thread only. Units: blocks of all groups.
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
        self._first: str | None = None  # waits for blocks: no other load is admitted before it

    def set_pool(self, blocks: int) -> None:
        """How many blocks requests can hold."""
        self._pool_blocks = blocks if self._groups.has_windows else None

    def admits(self, request_id: str, tokens: int, loaded_tokens: int) -> bool:
        """Whether a request of so many tokens may load the first ``loaded_tokens`` now; otherwise it asks again.

        One that is alone always may: whether it fits at all is vLLM's decision.
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


class LongestPrompt:
    """Checks that one request may lease the longest prompt.

    Only its own methods write its fields. Threads: vLLM's scheduler thread only.
    """

    def __init__(self, config: Config, client: SchedulerClient, max_model_len: int, state_parts: int) -> None:
        """Take the settings.

        Args:
            max_model_len: In tokens, as vLLM has it.
            state_parts: Of the state at a hit's end, each of which is held like a chunk.
        """
        self._config = config
        self._client = client
        self._max_model_len = max_model_len
        self._state_parts = state_parts
        self._checked_generation = -1

    def check(self) -> None:
        """Warn once per session, as soon as it is open: the limit is known only then."""
        info = self._client.info
        if info is None or info.generation == self._checked_generation:
            return
        self._checked_generation = info.generation
        chunk_tokens, chunks = self._config.chunk_tokens, self._client.chunks_leased_max
        loadable = max(0, chunks - self._state_parts) * chunk_tokens
        if loadable >= self._max_model_len:
            return
        held_tokens = self._max_model_len + self._state_parts * chunk_tokens
        least_bytes = Limits().least_host_bytes(held_tokens, chunk_tokens, info.slot_bytes)
        if self._config.max_share:
            least_bytes = int(least_bytes / self._config.max_share)
        logger.warning(
            "the longest prompt cannot be loaded whole: of max_model_len %d tokens one request may load %d, because it "
            "may hold %d chunks of %s of the %s of host memory%s; the rest is computed. Set host_bytes to %dMiB or more"
            "%s",
            self._max_model_len,
            loadable,
            chunks,
            size_text(info.slot_bytes),
            size_text(self._client.host_bytes),
            f", {self._state_parts} of them for the state of its recurrent layers" if self._state_parts else "",
            -(-least_bytes // _MIB),
            ", or max_share higher" if self._config.max_share else "",
        )
