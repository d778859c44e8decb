"""Writes of lent rows: those of one prefix run beside each other, and get into the tier one behind the other.

A child is in a tier only after its parent (rule 5), and an engine stores a whole prompt at once: written one by one its
rows would wait for one seal, one write and one turn of the owner each. So tiering hands out a row while its parent is
being written, and it is sealed and written meanwhile; what waits for the parent is the step in which it becomes
visible (``Tier.put_if``). It is not taken where the parent's write has failed.

Owns the order. The tasks are the engine's; called by ``engine.py``.
"""

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from tiered_kv.engine.clock import Clock
from tiered_kv.engine.executor import NOTIFY_INTERVAL_S, Executor, Pool
from tiered_kv.tiering.types import WriteRow

WRITES_AT_ONCE: Final = 6
"""Of one prefix: a virtual disk wrote 1.4 to 1.7 GB/s by two or three at once, 2 to 3 by eight, and more than six of
ours hold each other up at the interpreter's lock. A write that hangs holds its thread, and those that wait for it
theirs until the engine takes their rows back (``row_jobs.py``: after 2 s): two threads are left for deletions and for
other prefixes."""

LOOK_S: Final = 0.05
"""So often a write that waits for its parent's looks whether its row was taken back."""

TURN_S: Final = 0.005
"""A task makes way for others after that long; it goes on behind them."""


class _Prefix:
    """Rows of one prefix that have not ended.

    Attributes:
        waiting: Not begun, parents first.
        tasks: Tasks that take from these, or are about to.
    """

    __slots__ = ("ended", "tasks", "waiting")

    def __init__(self, lock: threading.Lock) -> None:
        self.waiting: deque[RowWrite] = deque()
        self.tasks = 0
        self.ended = threading.Condition(lock)


class RowWrite:
    """One row's write.

    Attributes:
        is_stored: Whether it is in the tier; None: it has not ended.
    """

    __slots__ = ("_parent", "_prefix", "is_stored", "job")

    def __init__(self, job: WriteRow, prefix: _Prefix, parent: "RowWrite | None") -> None:
        self.job = job
        self.is_stored: bool | None = None
        self._prefix = prefix
        self._parent = parent

    def follows(self, is_wanted: Callable[[], bool]) -> bool:
        """Wait until the parent's write has ended; says whether it is in the tier.

        To be called once. Its task has begun before this one's, so it goes on; where it hangs in the disk the engine
        takes its rows back, and nothing waits for it any more.

        Args:
            is_wanted: Whether the row is lent still.
        """
        parent, self._parent = self._parent, None  # a prompt's rows are no chain in memory
        if parent is None:  # it was there when this one was handed out
            return True
        with self._prefix.ended:
            while parent.is_stored is None and is_wanted():
                self._prefix.ended.wait(LOOK_S)
        return parent.is_stored is True


class RowWrites:
    """All writes of lent rows that were handed out and not reported.

    Threads: the owner calls the public methods. One lock guards the prefixes.
    """

    def __init__(self, executor: Executor, priority: int, perform: Callable[[RowWrite], bool], clock: Clock) -> None:
        """Take the parts.

        Args:
            priority: Of the tasks, in the pool of local writes.
            perform: Performs a write and notes how it ended; says whether it is in the tier now. Never raises.
        """
        self._executor = executor
        self._priority = priority
        self._perform = perform
        self._clock = clock
        self._lock = threading.Lock()
        self._writes: dict[bytes, tuple[RowWrite, _Prefix]] = {}  # by their chunks' keys; the owner's
        self._noticed_s = 0.0  # when the owner was woken last; threads may both do it
        self._reported: list[RowWrite] = []  # of these; the owner's
        self._is_closed = False

    def add(self, job: WriteRow) -> None:
        """Perform a write, behind its parent's if that had not been reported when this one was handed out."""
        parent, prefix = self._writes.get(job.record.parent) or (None, _Prefix(self._lock))
        write = RowWrite(job, prefix, parent)
        self._writes[job.record.key] = write, prefix
        with self._lock:
            prefix.waiting.append(write)
            is_enough = prefix.tasks >= WRITES_AT_ONCE
            prefix.tasks += not is_enough
        if not is_enough:
            self._submit(prefix)

    def reported(self, job: WriteRow) -> None:
        """The owner has taken in how a write ended; what it has handed out before that may still come, behind it."""
        self._reported.append(self._writes[job.record.key][0])

    def all_added(self) -> None:
        """The owner has added all that it has handed out: nobody comes behind a write that was reported."""
        for write in self._reported:
            key = write.job.record.key
            if self._writes[key][0] is write:  # the chunk may have been handed out once more
                del self._writes[key]
        self._reported.clear()

    def close(self) -> None:
        """Nothing more is begun."""
        self._is_closed = True

    def _submit(self, prefix: _Prefix) -> None:
        self._executor.submit(Pool.STORE, self._priority, partial(self._run, prefix))

    def _run(self, prefix: _Prefix) -> None:
        """A task: writes of one prefix, in its order, until none waits or others have waited long enough."""
        begun_s = self._clock.monotonic()
        while (write := self._next(prefix)) is not None:
            is_stored = self._perform(write)
            with self._lock:
                write.is_stored = is_stored
                prefix.ended.notify_all()
            now_s = self._clock.monotonic()
            if now_s - self._noticed_s >= NOTIFY_INTERVAL_S:
                self._noticed_s = now_s
                self._executor.notify()
            if now_s - begun_s >= TURN_S:
                self._submit(prefix)
                return
        self._executor.notify()

    def _next(self, prefix: _Prefix) -> RowWrite | None:
        with self._lock:
            if prefix.waiting and not self._is_closed:
                return prefix.waiting.popleft()
            prefix.tasks -= 1
            return None
