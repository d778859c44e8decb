"""Warns when one request may hold less of host memory than the longest prompt needs (DESIGN rule 3).

Owns the sentence; the limits are the server's. Such a prompt is loaded as far as the limit goes and computed from there
on, which nothing else says: hits look well until prompts grow. Called by the connector's scheduler role.
"""

import logging
from typing import Final

from tiered_kv.config import Config, size_text
from tiered_kv.hierarchy.limits import Limits
from tiered_kv.server.client import SchedulerClient

logger = logging.getLogger(__name__)

_MIB: Final = 1 << 20


class LongestPrompt:
    """Whether the longest prompt fits.

    Threads: vLLM's scheduler thread only.
    """

    def __init__(self, config: Config, client: SchedulerClient, max_model_len: int) -> None:
        """``max_model_len`` in tokens, as vLLM has it."""
        self._config = config
        self._client = client
        self._max_model_len = max_model_len
        self._looked_at = -1

    def look(self) -> None:
        """Warn once per session, as soon as it is open; what fits is known only then."""
        info = self._client.info
        if info is None or info.generation == self._looked_at:
            return
        self._looked_at = info.generation
        chunk_tokens, chunks = self._config.chunk_tokens, self._client.chunks_leased_max
        if chunks * chunk_tokens >= self._max_model_len:
            return
        least_bytes = Limits().least_host_bytes(self._max_model_len, chunk_tokens, info.slot_bytes)
        if self._config.max_share:
            least_bytes = int(least_bytes / self._config.max_share)
        logger.warning(
            "the longest prompt cannot be loaded whole: of max_model_len %d tokens one request may load %d, because it "
            "may hold %d chunks of %s of the %s of host memory; the rest is computed. Set host_bytes to %dMiB or more"
            "%s",
            self._max_model_len,
            chunks * chunk_tokens,
            chunks,
            size_text(info.slot_bytes),
            size_text(self._config.resolved_host_bytes()),
            -(-least_bytes // _MIB),
            ", or max_share higher" if self._config.max_share else "",
        )
