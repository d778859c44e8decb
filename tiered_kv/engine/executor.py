"""Threads that perform jobs, and a queue of what they finished.

Two pools, so that a load never waits behind a store: LOAD (promotions, seals, memory) and STORE (writes, deletions,
persisting). Inside a pool lower priority numbers go first. Results are collected by the engine's owner, who sleeps on
:meth:`Executor.fileno`.
"""

import contextlib
import itertools
import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Protocol

logger = logging.getLogger(__name__)


class Pool(Enum):
    """Which threads perform a task."""

    LOAD = "load"
    STORE = "store"


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

    def __init__(self, load_threads: int = 4, store_threads: int = 4) -> None:
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._order = itertools.count()
        self._is_closed = False
        self._queues: dict[Pool, queue.PriorityQueue[tuple[int, int, Callable[[], None] | None]]] = {
            Pool.LOAD: queue.PriorityQueue(),
            Pool.STORE: queue.PriorityQueue(),
        }
        self._threads = [
            threading.Thread(target=self._run, args=(pool,), name=f"tiered_kv-{pool.value}-{n}", daemon=True)
            for pool, count in ((Pool.LOAD, load_threads), (Pool.STORE, store_threads))
            for n in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, pool: Pool, priority: int, task: Callable[[], None]) -> None:
        self._queues[pool].put((priority, next(self._order), task))

    def notify(self) -> None:
        os.eventfd_write(self._event, 1)

    def fileno(self) -> int:
        return self._event

    def drain_notifications(self) -> None:
        with contextlib.suppress(BlockingIOError):  # nobody reported since the last call
            os.eventfd_read(self._event)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for pool, waiting in self._queues.items():
            count = sum(f"-{pool.value}-" in thread.name for thread in self._threads)
            for _ in range(count):
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


class StepExecutor:
    """No threads: tasks run when a test says so, in an order the test picks.

    ``step(choose)`` runs one waiting task: ``choose(n)`` returns which of the ``n`` waiting ones, e.g. a seeded
    ``random.Random.randrange`` or a Hypothesis draw.
    """

    def __init__(self) -> None:
        self.waiting: deque[Callable[[], None]] = deque()

    def submit(self, pool: Pool, priority: int, task: Callable[[], None]) -> None:
        del pool, priority
        self.waiting.append(task)

    def step(self, choose: Callable[[int], int] = lambda _count: 0) -> bool:
        """Run one task; False when none waits."""
        if not self.waiting:
            return False
        index = choose(len(self.waiting))
        self.waiting.rotate(-index)
        task = self.waiting.popleft()
        self.waiting.rotate(index)
        task()
        return True

    def notify(self) -> None:
        """Nobody sleeps."""

    def fileno(self) -> int:
        return -1

    def drain_notifications(self) -> None:
        """Nothing to drain."""

    def close(self) -> None:
        self.waiting.clear()
