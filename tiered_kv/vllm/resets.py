"""What a reset of vLLM's caches needs beside forgetting: a pool that can be emptied, and a reset that lasts.

vLLM empties its block pool first and asks the connector second. Blocks that are pinned for a copy would make the first
fail: ``reset_prefix_cache`` then returns False, and sleeping or pausing raises ``RuntimeError``. An engine whose core
lives in the caller's process is stepped by ``generate`` alone, so that there the last step's copies would stay pinned
for ever. Called by the connector.
"""

import logging
import time
from collections.abc import Callable
from typing import Any, Final

from tiered_kv.server.client import SchedulerClient
from tiered_kv.vllm.stores import Stores
from tiered_kv.vllm.worker import WorkerSide

logger = logging.getLogger(__name__)

DURABLE_S: Final = 5.0
"""How long a reset waits for the server: it answers in milliseconds, or is dead or hung. Weights change in seconds."""


def before_emptying(block_pool: Any, let_go: Callable[[], None]) -> None:
    """Have ``let_go`` called whenever vLLM is about to forget all blocks of its pool; there is no hook for that."""
    empty = block_pool.reset_prefix_cache

    def reset_prefix_cache() -> bool:
        let_go()
        return bool(empty())

    block_pool.reset_prefix_cache = reset_prefix_cache


def let_go_of_blocks(stores: Stores, worker: WorkerSide | None) -> None:
    """End pins: finish the copies of a worker in this process, and drop what is left if only that is in the way."""
    if worker is not None and stores.has_work:
        worker.finish_copies()
        report = worker.take_finished_saves()
        if report is not None:
            stores.finished(report)
    stores.let_go()


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
