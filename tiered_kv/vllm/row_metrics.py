"""What the tier below vLLM's offloading tells of itself, through vLLM's own metrics of tiers.

vLLM counts a tier's queries, hits, bytes and failed jobs already. Here is what it cannot know: rows that are not stored
and why, and rows that were reported stored and that the server dropped afterwards, before they were in a file.
"""

import logging
import time
from typing import Any, Final

import msgspec

from tiered_kv.metrics.figures import ServerFigures
from tiered_kv.server.client import SchedulerClient
from tiered_kv.vllm.compat import OffloadingConnectorStats, OffloadingCounterMetadata, OffloadingGaugeMetadata

logger = logging.getLogger("vllm." + __name__)

PREFIX: Final = "vllm:tiered_kv_rows_"
STORED: Final = "stored"
LOADED: Final = "loaded"
DROPPED: Final = "dropped"
NOT_LOADED: Final = "not_loaded"
HINTS: Final = "hints"
SERVING: Final = "serving"
UNWRITTEN: Final = "unwritten"

UNWRITTEN_COUNTERS: Final = "write_dropped_"
"""How the server's counters of these begin."""

NOT_UNWRITTEN: Final = ("source_evicted", "erased")
"""Reasons of others: of an upload whose blob was on disk, and of what an operator wanted gone."""

FIGURES_INTERVAL_S: Final = 10.0


def definitions() -> dict[str, Any]:
    """By name, as vLLM wants them."""
    return {
        PREFIX + STORED: OffloadingCounterMetadata(documentation="Rows stored, or held already."),
        PREFIX + LOADED: OffloadingCounterMetadata(documentation="Rows loaded."),
        PREFIX + DROPPED: OffloadingCounterMetadata(
            documentation="Rows that were not stored: no_session, not_wanted (skip_save, older than a reset, of an "
            "adapter that not every rank has reported, or behind a streaming session), not_whole (the end of a prompt "
            "inside a row), undrafted (computed in a step without the draft, or behind one), failed (not written in "
            "time, no slot in time, or behind a row that failed).",
            labelnames=("reason",),
        ),
        PREFIX + NOT_LOADED: OffloadingCounterMetadata(
            documentation="Rows that were held and did not come: failed, too_slow (computing them is faster), or "
            "no_room among vLLM's rows.",
            labelnames=("reason",),
        ),
        PREFIX + HINTS: OffloadingCounterMetadata(
            documentation="Hints and parameters of requests: sent, dropped (no session with the server), of_nothing "
            "(nothing of the request is held), unknown (an action of kv_hints), refused (a parameter, or a hint for a "
            "model of several groups of layers).",
            labelnames=("outcome",),
        ),
        PREFIX + SERVING: OffloadingGaugeMetadata(documentation="1 while the tier has a server, else 0."),
        PREFIX + UNWRITTEN: OffloadingGaugeMetadata(
            documentation="Chunks in slots, of all engines of the server, that were reported stored and dropped before "
            "they were written.",
            labelnames=("reason",),
        ),
    }


class RowMetrics:
    """Counts since vLLM last asked, and the server's counts of rows that it dropped.

    Threads: vLLM's scheduler thread.
    """

    def __init__(self) -> None:
        self._stats = OffloadingConnectorStats()
        self._ask_at_s = 0.0
        self._has_warned = False
        self._is_serving: bool | None = None
        self._told: set[str] = set()

    def count(self, name: str, number: int, label: str = "") -> None:
        if number:
            self._stats.increase_counter(PREFIX + name, number, (label,) if label else ())

    def watch(self, client: SchedulerClient | None, *, is_serving: bool) -> None:
        """Once in a step: note whether the tier serves, and at times what the server dropped."""
        if is_serving != self._is_serving:
            self._is_serving = is_serving
            self._stats.set_gauge(PREFIX + SERVING, int(is_serving))
        if client is None:
            return
        if time.monotonic() >= self._ask_at_s and client.ask_figures():
            self._ask_at_s = time.monotonic() + FIGURES_INTERVAL_S
        text, client.figures = client.figures, None
        if text is not None:
            self._take_figures(text, client.host_bytes)

    def take(self) -> Any:
        """What was counted since the last call; None if nothing."""
        if self._stats.is_empty():
            return None
        taken, self._stats = self._stats, OffloadingConnectorStats()
        return taken

    def _take_figures(self, text: bytes, host_bytes: int) -> None:
        try:
            counters = msgspec.json.decode(text, type=ServerFigures).counters
        except (ValueError, RecursionError) as exc:  # ValueError: every error of msgspec's
            if not self._has_warned:
                logger.warning("the server's figures are not shown, it is of another version. cause=%.200s", exc)
            self._has_warned = True
            return
        drops = {
            name.removeprefix(UNWRITTEN_COUNTERS): count
            for name, count in counters.items()
            if name.startswith(UNWRITTEN_COUNTERS)
        }
        dropped = {reason: count for reason, count in drops.items() if count and reason not in NOT_UNWRITTEN}
        self._told |= dropped.keys()
        for reason in self._told:  # of a server that is no more, too: the next one begins at 0
            self._stats.set_gauge(PREFIX + UNWRITTEN, dropped.get(reason, 0), (reason,))
        if dropped and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "rows that were reported stored were dropped before they were written: the disk takes less than is "
                "stored, or host_bytes is too small to hold what waits for it. host_bytes=%d dropped=%s",
                host_bytes, dropped,
            )  # fmt: skip
