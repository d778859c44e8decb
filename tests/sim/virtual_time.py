"""Virtual time of the simulators: events in a heap, and tasks in threads of which only one runs at a time.

The product's code is called as it is, so a task that waits for its medium has to wait inside a call: it hands the baton
back to the thread that runs the events, and goes on when its time has come. Nothing sleeps, and nothing depends on how
the machine schedules threads: the order of everything follows from the heap, ties by the order of arrival.
"""

import hashlib
import heapq
import itertools
import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

Event = Callable[[], None]

SHOWN_EVENTS = 40
EVENTS_MAX = 60_000
"""A schedule of the cache has a few thousand; one that passes this does not end."""

EPOCH_S = 1_700_000_000


class Killed(BaseException):
    """Unwinds a task whose server was killed: what it does on the way out reaches no medium."""


class PromiseBroken(BaseException):
    """A check failed inside a call of the product, which may catch every ``Exception`` and must not catch this."""


def require(condition: bool, message: str) -> None:
    """Assert, also inside calls of the product.

    Raises:
        PromiseBroken: It does not hold.
    """
    if not condition:
        raise PromiseBroken(message)


class _Worker:
    """A thread that performs one task after the other and runs only while it has the baton."""

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.turn.acquire()
        self.hub: Hub | None = None
        self.work: Event | None = None
        self.ticket = 0  # counts its tasks: what was to wake an earlier one wakes nobody
        self.is_killed = False
        threading.Thread(target=self._run, name="simulated", daemon=True).start()

    def _run(self) -> None:
        while True:
            self.turn.acquire()
            hub, work = self.hub, self.work
            assert hub is not None and work is not None
            try:
                work()
            except Killed:
                pass
            except BaseException as exc:  # noqa: BLE001  # handed to the thread that runs the events
                hub.failure = hub.failure or exc
            self.hub = self.work = None
            self.ticket += 1
            _IDLE.append(self)
            hub.baton.release()


_IDLE: list[_Worker] = []
"""Workers without a task, for the next one: a thread costs more than a task."""


@dataclass(frozen=True, slots=True)
class Task:
    """A task that was started."""

    worker: _Worker
    ticket: int

    @property
    def is_over(self) -> bool:
        return self.worker.ticket != self.ticket


class Hub:
    """Time, chance and who runs now.

    Attributes:
        draw: The only source of chance of a schedule.
        on_event: Called after every event, with everything at rest.
        recent: The last events, for the message of a failure.
    """

    def __init__(self, seed: str, events_max: int = EVENTS_MAX) -> None:
        self.draw = random.Random(seed)
        self.now_s = 0.0
        self.failure: BaseException | None = None
        self.baton = threading.Lock()
        self.baton.acquire()
        self.on_event: Event = lambda: None
        self.event_count = 0
        self._events_max = events_max
        self.recent: deque[str] = deque(maxlen=SHOWN_EVENTS)
        self._digest = hashlib.sha256()
        self._events: list[tuple[float, int, Event]] = []
        self._order = itertools.count()
        self._current: _Worker | None = None
        self._horizon_s = 0.0

    # -- the trace -----------------------------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        """Add a line to the trace."""
        line = f"{self.now_s:11.6f} {text}"
        self.recent.append(line)
        self._digest.update(line.encode())

    def digest(self) -> str:
        """Of all lines so far: equal for equal seeds."""
        return self._digest.hexdigest()

    # -- time ----------------------------------------------------------------------------------------------------------

    def after(self, seconds: float, event: Event) -> None:
        heapq.heappush(self._events, (self.now_s + seconds, next(self._order), event))

    def run(self, seconds: float, is_enough: Callable[[], bool] = lambda: False) -> bool:
        """Let that much time pass, or less if it is enough before; says whether it was."""
        self._horizon_s = until_s = self.now_s + seconds
        while not is_enough():
            if not self._events or self._events[0][0] > until_s:
                self.now_s = until_s
                return is_enough()
            self.now_s, _, event = heapq.heappop(self._events)
            event()
            self.event_count += 1
            assert self.event_count < self._events_max, "livelock: the events do not end"
            self.on_event()
        return True

    def sleep(self, seconds: float) -> None:
        """Let time pass for the task that calls; for the owner of an engine nothing takes time."""
        worker = self._current
        if worker is None:
            return
        if worker.is_killed:
            raise Killed
        due_s = self.now_s + seconds
        if due_s <= self._horizon_s and (not self._events or self._events[0][0] > due_s):
            self.now_s = due_s  # nothing happens before: no need to hand over
            return
        task = Task(worker, worker.ticket)
        self.after(seconds, lambda: self._wake(task))
        self.baton.release()
        worker.turn.acquire()
        if worker.is_killed:
            raise Killed

    # -- tasks ---------------------------------------------------------------------------------------------------------

    def start(self, work: Event) -> Task:
        """Run a task until it waits or ends."""
        worker = _IDLE.pop() if _IDLE else _Worker()
        worker.hub, worker.work, worker.is_killed = self, work, False
        task = Task(worker, worker.ticket)
        self._resume(worker)
        return task

    def kill(self, task: Task) -> None:
        """End a task where it is, unless it has ended."""
        if not task.is_over:
            task.worker.is_killed = True
            self._resume(task.worker)

    def _wake(self, task: Task) -> None:
        if not task.is_over:
            self._resume(task.worker)

    def _resume(self, worker: _Worker) -> None:
        assert self._current is None, "a task cannot run another"
        self._current = worker
        worker.turn.release()
        self.baton.acquire()
        self._current = None
        if self.failure is not None:
            raise self.failure


class SimClock:
    """The clocks of one machine: monotonic, of its own origin and rate, and a wall clock that somebody may set."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._origin_s = hub.draw.uniform(0, 1e5)
        self._rate = hub.draw.uniform(0.98, 1.02)
        self.jumped_s = 0.0

    def monotonic(self) -> float:
        return self._origin_s + self._hub.now_s * self._rate

    def wall(self) -> int:
        return max(0, int(EPOCH_S + self._hub.now_s + self.jumped_s))  # Linux sets no clock before 1970
