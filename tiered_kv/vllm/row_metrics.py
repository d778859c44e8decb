"""What the tier below vLLM's offloading tells of itself, through vLLM's own metrics of tiers.

vLLM counts a tier's queries, hits, bytes and failed jobs already. Here is what it cannot know: rows that are not stored
and why, and rows that the server could not write, or dropped before it wrote them although they were reported stored.
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

DROPPED_UNWRITTEN: Final = (
    "rows that were reported stored were dropped before they were written: the disk takes less than is stored, or "
    "host_bytes is too small to hold what waits for it. host_bytes=%d dropped=%s"
)
FAILED_UNWRITTEN: Final = (
    "the disk does not take rows: it is full, or fails, as server.log in its directory says. host_bytes=%d dropped=%s"
)
UNWRITTEN_COUNTERS: Final = {"write_dropped_": ("", DROPPED_UNWRITTEN), "write_failed_": ("failed_", FAILED_UNWRITTEN)}
"""How the server's counters of these begin, what their reasons begin with, and what is said of the first ones."""

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
            documentation="Chunks of all engines of the server that are in no file: those in slots were reported "
            "stored and dropped before they were written. failed_*: the disk did not take them, from slots or rows.",
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
        self._told: set[str] = set()
        self._shown: dict[str, int] = {}
        self._is_serving: bool | None = None

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
        shown = dict.fromkeys(self._shown, 0)  # of a server that is no more, too: the next one begins at 0
        for start, (prefix, said) in UNWRITTEN_COUNTERS.items():
            reasons = {name.removeprefix(start): count for name, count in counters.items() if name.startswith(start)}
            unwritten = {
                prefix + reason: count for reason, count in reasons.items() if count and reason not in NOT_UNWRITTEN
            }
            shown |= unwritten
            if unwritten and start not in self._told:
                self._told.add(start)
                logger.warning(said, host_bytes, unwritten)
        for reason, count in shown.items():
            self._stats.set_gauge(PREFIX + UNWRITTEN, count, (reason,))
        self._shown = shown
