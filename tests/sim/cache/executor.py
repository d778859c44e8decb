"""The engine's pools in virtual time."""

import heapq
import itertools
from collections import Counter
from collections.abc import Mapping

from tests.sim.virtual_time import Event, Hub, Task
from tiered_kv.engine.executor import Pool


class SimExecutor:
    """A task occupies one of its pool's threads for as long as its calls take."""

    def __init__(self, hub: Hub, threads: Mapping[Pool, int], on_notify: Event) -> None:
        self._hub = hub
        self._threads = threads
        self._on_notify = on_notify
        self._waiting: dict[Pool, list[tuple[int, int, Event]]] = {pool: [] for pool in threads}
        self._busy: Counter[Pool] = Counter()  # threads that have a task or are about to get one
        self._running: dict[int, Task] = {}
        self._order = itertools.count()
        self._is_closed = False

    @property
    def is_idle(self) -> bool:
        return not self._busy.total()

    def submit(self, pool: Pool, priority: int, task: Event) -> None:
        if self._is_closed:
            return
        heapq.heappush(self._waiting[pool], (priority, next(self._order), task))
        if self._busy[pool] < self._threads[pool]:
            self._busy[pool] += 1
            self._hub.after(self._hub.draw.uniform(1e-6, 1e-4), lambda: self._begin(pool))

    def _begin(self, pool: Pool) -> None:
        if self._is_closed or not self._waiting[pool]:
            self._busy[pool] -= 1
            return
        _, number, task = heapq.heappop(self._waiting[pool])

        def perform() -> None:
            task()
            self._running.pop(number, None)
            self._hub.after(0.0, lambda: self._begin(pool))

        started = self._hub.start(perform)
        if not started.is_over:
            self._running[number] = started

    def notify(self) -> None:
        self._on_notify()

    def fileno(self) -> int:
        return -1

    def drain_notifications(self) -> None:
        """The owner is woken by an event."""

    def close(self) -> None:
        """Begin nothing more. What runs goes on: the owner closes an engine when it is idle."""
        self._is_closed = True

    def kill(self) -> None:
        """End every task where it is."""
        self._is_closed = True
        running, self._running = self._running, {}
        for started in running.values():
            self._hub.kill(started)
