"""Many jobs of one kind that a few tasks share: reads of a local tier, or seals.

Each task that is handed over wakes a thread, which the owner then shares the interpreter with: 256 of them took it 2 to
5 ms. So jobs stand in a line of their own, and tasks take one after the other from it. What a task has not begun
another one takes, so that a read that hangs keeps nothing but itself.

Called by ``engine.py``.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from tiered_kv.engine.clock import Clock
from tiered_kv.engine.executor import LOCAL_THREADS, NOTIFY_INTERVAL_S, Executor, Pool
from tiered_kv.tiering.types import Read, ReadRow, Seal

READERS: Final = 2 * LOCAL_THREADS[Pool.LOAD]
"""Tasks that share jobs, at most."""

SMALL_BYTES: Final = 256 << 10
SMALL_READERS: Final = 2
"""As many tasks begin to read or seal blobs of up to so many bytes, however many steps bring them. Those of a quick
disk are work for the interpreter, not for the disk, and threads that want its lock at once hold each other up: 512
blobs of 36 KiB from the page cache take two threads 60 ms and four 90 (benchmarks/rival_lookups.py)."""

SLOW_READ_S: Final = 0.001
SLOW_READS: Final = 8
"""A task whose first reads took this long each, so many of them, waits for the disk, and has another task help. One
whose read takes as long as so many counts for nothing while it does."""

SharedJob = Read | ReadRow | Seal


class SharedJobs:
    """Jobs of one pool and priority, and of one size of blob.

    Threads: the owner adds; tasks run in the pool's threads. Single operations of a deque and a dict are atomic.
    """

    def __init__(
        self, executor: Executor, turn: tuple[Pool, int], perform: Callable[[SharedJob], None], clock: Clock, tasks: int
    ) -> None:
        """Start empty.

        Args:
            turn: The tasks' pool and their priority in it.
            perform: Performs a job and notes how it ended. Never raises.
            tasks: As many take jobs at once, and more only where the medium is slow.
        """
        self._executor = executor
        self._turn = turn
        self._perform = perform
        self._clock = clock
        self._tasks = tasks
        self._jobs: deque[SharedJob] = deque()
        self._numbers = itertools.count()
        self._begun_s: dict[int, float | None] = {}  # by task: when its job began; None: no thread has taken it up
        self._is_closed = False

    def add(self, jobs: Iterable[SharedJob]) -> None:
        """Perform jobs, behind those that were added before, from the next :meth:`begin_tasks` on."""
        self._jobs.extend(jobs)

    def begin_tasks(self) -> None:
        """Have tasks for what stands in line: to be called after each addition, and now and then while reads hang."""
        if not self._jobs:
            return
        late_s = self._clock.monotonic() - SLOW_READS * SLOW_READ_S
        busy = sum(begun_s is None or begun_s >= late_s for begun_s in list(self._begun_s.values()))
        for _ in range(min(self._tasks, len(self._jobs)) - busy):
            self._begin_task()

    def close(self) -> None:
        """Nothing more is begun."""
        self._is_closed = True

    def _begin_task(self) -> None:
        number = next(self._numbers)
        self._begun_s[number] = None
        self._executor.submit(*self._turn, partial(self._run, number))

    def _run(self, number: int) -> None:
        """A task: jobs until there are none. Seals make way for reads of the same pool now and then."""
        begun_s = noticed_s = now_s = self._clock.monotonic()
        count = 0
        while self._jobs and not self._is_closed:
            self._begun_s[number] = now_s
            try:
                job = self._jobs.popleft()
            except IndexError:  # another task took the last one
                break
            self._perform(job)
            now_s, count = self._clock.monotonic(), count + 1
            if isinstance(job, Seal):
                if now_s - begun_s >= NOTIFY_INTERVAL_S:
                    break
            elif count == SLOW_READS and now_s - begun_s > SLOW_READS * SLOW_READ_S:
                self._begin_task()
            if now_s - noticed_s >= NOTIFY_INTERVAL_S:
                noticed_s = now_s
                self._executor.notify()
        del self._begun_s[number]
        if self._jobs and not self._is_closed:  # a seal's task made way, or jobs came after the last look
            self.begin_tasks()
        self._executor.notify()
