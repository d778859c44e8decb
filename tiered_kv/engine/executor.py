"""Threads that perform jobs, and a queue of what they finished.

Pools, so that a load never waits behind a store and nothing local behind the network: LOAD (promotions, seals, memory)
and STORE (writes, deletions) for what this machine has, REMOTE_LOAD and REMOTE_STORE for shared tiers, UPKEEP for what
must be done in time whatever else is going on (persisting, heartbeats, trials of a tier that failed). Inside a pool
lower priority numbers go first. Results are collected by the engine's owner, who sleeps on
:meth:`Executor.fileno`.
"""

import contextlib
import itertools
import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Final, Protocol

from tiered_kv.errors import TierUnavailable

logger = logging.getLogger(__name__)


class Pool(Enum):
    """Which threads perform a task."""

    LOAD = "load"
    STORE = "store"
    REMOTE_LOAD = "remote_load"
    REMOTE_STORE = "remote_store"
    UPKEEP = "upkeep"


NOTIFY_INTERVAL_S: Final = 0.002
"""A task that does one job after the other says so often that something has ended; seals make way for reads then."""

LOCAL_THREADS: Mapping[Pool, int] = {Pool.LOAD: 4, Pool.STORE: 8, Pool.UPKEEP: 4}
"""Of an engine without a shared tier. A local disk that hangs takes up to three of UPKEEP: a flush, a trial, a look at
``server.json``; what keeps a bucket's grants alive must not wait behind them."""


class Executor(Protocol):
    """Performs tasks and returns their results later, in any order."""

    def submit(self, pool: Pool, priority: int, task: Callable[[], None]) -> None:
        """Queue a task. It reports by itself and must not raise."""

    def notify(self) -> None:
        """Wake the owner; called by tasks when they have something to report."""

    def fileno(self) -> int:
        """A descriptor that is readable when tasks have reported; -1 if tasks run only when told to."""

    def drain_notifications(self) -> None:
        """Make the descriptor unreadable again."""

    def close(self) -> None:
        """Finish what runs, forget what is queued, end the threads. Idempotent."""


class ThreadExecutor:
    """Real threads. Their number bounds the I/O in flight; their queues are bounded by the arena's slots."""

    def __init__(self, threads: Mapping[Pool, int] | None = None) -> None:
        """Start the threads; pools that are not named have none and take no tasks. None: ``LOCAL_THREADS``.

        Raises:
            TierUnavailable: The machine refuses one of them; none is left then.
        """
        counts = LOCAL_THREADS if threads is None else threads
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_notified = False
        self._order = itertools.count()
        self._is_closed = False
        self._queues: dict[Pool, queue.PriorityQueue[tuple[int, int, Callable[[], None] | None]]] = {
            pool: queue.PriorityQueue() for pool, count in counts.items() if count
        }
        self._counts = counts
        self._threads = [
            threading.Thread(target=self._run, args=(pool,), name=f"tiered_kv-{pool.value}-{n}", daemon=True)
            for pool, count in counts.items()
            for n in range(count)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError as exc:
            wanted, self._threads = self._threads, [thread for thread in self._threads if thread.ident is not None]
            self.close()
            raise TierUnavailable(
                f"{exc}: raise the limit of processes and threads (ulimit -u, TasksMax, a container's pids limit). "
                f"started={len(self._threads)} wanted={len(wanted)}"
            ) from exc

    def submit(self, pool: Pool, priority: int, task: Callable[[], None]) -> None:
        self._queues[pool].put((priority, next(self._order), task))

    def notify(self) -> None:
        if not self._is_notified:
            self._is_notified = True
            os.eventfd_write(self._event, 1)

    def fileno(self) -> int:
        return self._event

    def drain_notifications(self) -> None:
        with contextlib.suppress(BlockingIOError):  # nobody reported since the last call
            os.eventfd_read(self._event)
        # Behind the read, which would take away what the next one writes, and before the owner looks at what there is.
        self._is_notified = False

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for pool, waiting in self._queues.items():
            for _ in range(self._counts[pool]):
                waiting.put((-1, next(self._order), None))
        for thread in self._threads:
            thread.join()
        os.close(self._event)

    def _run(self, pool: Pool) -> None:
        waiting = self._queues[pool]
        while True:
            _, _, task = waiting.get()
            if task is None:
                return
            try:
                task()
            except Exception:  # a dead thread would hang every later job
                logger.exception("a task raised; it should have reported an outcome")
