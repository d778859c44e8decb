"""Many jobs of one kind that a few tasks share: reads of a local tier, or seals.

Each task that is handed over wakes a thread, which the owner then shares the interpreter with: 256 of them took it 2 to
5 ms. So jobs stand in a line of their own, and tasks take one after the other from it. What a task has not begun
another one takes, so that a read that hangs keeps nothing but itself.

Called by ``engine.py``.
"""

import itertools
import resource
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from tiered_kv.engine.clock import Clock
from tiered_kv.engine.executor import LOCAL_THREADS, NOTIFY_INTERVAL_S, Executor, Pool
from tiered_kv.tiering.types import Read, ReadRow, Seal

READERS: Final = 2 * LOCAL_THREADS[Pool.LOAD]
"""Tasks that share jobs, at most."""

BYTES_PER_READER: Final = 128 << 10
"""A task more for each of these that a blob has, however many steps bring jobs. Reading from memory, or sealing, a blob
of 36 KiB is work for the interpreter, and threads that want its lock at once hold each other up: 512 of them from the
page cache take one thread 21 ms, two 23, three 35 to 70, and the owner's is one of these."""

SMALL_NOTIFY_INTERVAL_S: Final = 0.006
"""Where one task reads, it says so often that something has ended: each time the owner takes the interpreter from it.
With ``NOTIFY_INTERVAL_S`` the answer for 512 blobs of 36 KiB took 48 and 55 ms, so 46 and 52."""

LOOK_READS: Final = 8
"""After each so many reads a task looks whether they waited for the medium: then others help, and wait beside it."""

SLOW_READ_S: Final = 0.001
SLOW_LOOKS: Final = 2
"""Reads that wait for a slow medium take longer, at so many looks one after the other. A task whose read takes as long
as those of a whole look counts for nothing while it does."""

SharedJob = Read | ReadRow | Seal


def tasks_for(blob_bytes: int) -> int:
    """How many tasks take jobs of blobs of this size at once, while no medium is waited for."""
    return min(max(1, blob_bytes // BYTES_PER_READER), READERS)


class SharedJobs:
    """Jobs of one pool and priority, of blobs of about one size.

    Threads: the owner adds; tasks run in the pool's threads. Single operations of a deque and a dict are atomic.
    """

    def __init__(
        self, executor: Executor, turn: tuple[Pool, int], perform: Callable[[SharedJob], None], clock: Clock, tasks: int
    ) -> None:
        """Start empty.

        Args:
            turn: The tasks' pool and their priority in it.
            perform: Performs a job and notes how it ended. Never raises.
            tasks: As many take jobs at once (:func:`tasks_for`), and more where they wait for the medium.
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
        late_s = self._clock.monotonic() - LOOK_READS * SLOW_READ_S
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
        interval_s = NOTIFY_INTERVAL_S if self._tasks > 1 else SMALL_NOTIFY_INTERVAL_S
        begun_s = noticed_s = now_s = self._clock.monotonic()
        medium = _Medium(now_s)
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
            elif count % LOOK_READS == 0 and medium.wants_help(now_s, len(self._begun_s)):
                self._begin_task()
            if now_s - noticed_s >= interval_s:
                noticed_s = now_s
                self._executor.notify()
        del self._begun_s[number]
        if self._jobs and not self._is_closed:  # a seal's task made way, or jobs came after the last look
            self.begin_tasks()
        self._executor.notify()


class _Medium:
    """Whether the last reads of a thread waited for what they read from."""

    __slots__ = ("_looked_s", "_read_blocks", "_slow_looks")

    def __init__(self, now_s: float) -> None:
        self._looked_s = now_s
        self._read_blocks = _blocks_read()
        self._slow_looks = 0

    def wants_help(self, now_s: float, tasks: int) -> bool:
        """Whether another task should read beside those that do, after ``LOOK_READS`` more.

        Two, where a disk of this machine was read from. More only where reads are slow twice in a row: once, they may
        have waited for the interpreter, while the owner had it.
        """
        is_slow, self._looked_s = now_s - self._looked_s > LOOK_READS * SLOW_READ_S, now_s
        read_before, self._read_blocks = self._read_blocks, _blocks_read()
        self._slow_looks = self._slow_looks + 1 if is_slow else 0
        if self._slow_looks == SLOW_LOOKS:
            self._slow_looks = 0
            return tasks < READERS
        return tasks == 1 and self._read_blocks > read_before


def _blocks_read() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_inblock
