"""Resets of vLLM's caches: blocks that can be let go, and a reset that lasts.

vLLM empties its block pool first and asks the connector second. Blocks that are pinned for a copy would make the first
fail: ``reset_prefix_cache`` then returns False, and sleeping or pausing raises ``RuntimeError``. An engine whose core
lives in the caller's process is stepped by ``generate`` alone, so that there the last step's copies would stay pinned
for ever, and be lost when it ends. Called by the connector.
"""

import logging
import time
from collections.abc import Callable
from typing import Final

from tiered_kv.server.client import SchedulerClient
from tiered_kv.vllm.save_queue import SaveQueue
from tiered_kv.vllm.step import SaveReport
from tiered_kv.vllm.worker import WorkerSide

logger = logging.getLogger(__name__)

DURABLE_S: Final = 5.0
"""How long a reset waits for the server: it answers in milliseconds, or is dead or hung. Weights change in seconds."""

COMMITTED_S: Final = 1.0
"""How long the end of an engine waits until the server has taken its last commits: milliseconds, unless it hangs."""


TakeReport = Callable[[SaveReport], None]
"""Takes a worker's report as if a step had brought it (``SchedulerSide.saves_finished``)."""


def let_go_of_blocks(stores: SaveQueue, worker: WorkerSide | None, take_report: TakeReport) -> None:
    """End pins: finish the copies of a worker in this process, and drop the rest if only that is in the way."""
    if worker is not None and stores.has_work:
        _finish_saves(worker, take_report)
    stores.let_go()


def commit_last(stores: SaveQueue, worker: WorkerSide, client: SchedulerClient, take_report: TakeReport) -> None:
    """Commit the last step's copies of an engine that ends: no later step will report them.

    With its first worker the session ends, and no commit counts after it. So the server is asked for something that it
    answers in order, and not for long: it may be frozen.
    """
    if not stores.has_work:
        return
    _finish_saves(worker, take_report)
    client.figures = None
    until_s = time.monotonic() + COMMITTED_S
    if client.ask_figures():
        while client.figures is None and client.is_ready and time.monotonic() < until_s:
            time.sleep(0.002)
            client.poll()


def _finish_saves(worker: WorkerSide, take_report: TakeReport) -> None:
    """Wait for the copies of a worker in this process, and take its report, whatever else it says: it says it once."""
    worker.finish_copies()
    if (report := worker.take_finished_saves()) is not None:
        take_report(report)


def wait_until_durable(
    client: SchedulerClient,
    poll: Callable[[], None],
    *,
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until the server has retired the epoch durably, which it says by opening a private one.

    Whatever becomes of it, this engine neither loads nor stores before; at stake is the next start of an engine.
    """
    generation, started_s = client.generation, monotonic()
    while client.info is not None and not client.is_ready and client.generation == generation:
        if monotonic() - started_s > DURABLE_S:
            break
        sleep(0.002)
        poll()
    if not client.is_ready:
        logger.error(
            "the reset holds for this engine but is not durable, because no cache server has confirmed it. It is asked "
            "for again when the next session opens; an engine that starts before finds what was stored before. "
            "waited_s=%.1f",
            monotonic() - started_s,
        )
