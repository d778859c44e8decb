"""How the door shares cores with the engine: what a request needs goes at its priority, all beyond gives way.

Beside engines that leave no core idle, a thread that always gives way (nice 10) took twice as long to send what a
request on another machine waits for (0034). Owns the measure of what goes quickly, and the threads for it: to raise a
thread's priority takes a privilege, so one that is to go on quickly does so in a new thread, made by one that never
gave way. Knows no connection. Called by ``door_listener.py``.
"""

import logging
import os
import queue
import threading
from collections.abc import Callable
from typing import Final

logger = logging.getLogger(__name__)

NICE: Final = 10
NICE_MAX: Final = 19

QUICK_BYTES: Final = 512 << 20
"""What may be sent quickly at once: half a second of two cores, a prompt of 16,000 tokens of 32 KiB each."""

QUICK_BYTES_S: Final = 64 << 20
"""What may be so for long: a twentieth of a core."""


class Pace:
    """Bytes that were sent and are not yet forgotten.

    Threads: any; guarded by a lock. Units: bytes, seconds.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        """Nothing was sent."""
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._bytes = 0.0  # at ``_then_s``
        self._then_s = monotonic()

    def sent(self, size_bytes: int) -> None:
        """So much is sent, at whatever priority."""
        with self._lock:
            self._bytes = min(QUICK_BYTES, self._left() + size_bytes)
            self._then_s = self._monotonic()

    def goes_on(self) -> bool:
        """Whether who sends quickly may go on so."""
        with self._lock:
            return self._left() < QUICK_BYTES

    def may_begin(self) -> bool:
        """Whether who gives way may send quickly: only after a rest, or every second answer would change threads."""
        with self._lock:
            return self._left() < QUICK_BYTES / 2

    def _left(self) -> float:
        return max(0.0, self._bytes - QUICK_BYTES_S * (self._monotonic() - self._then_s))


class OwnPace:
    """One thread's part in it: gives way for good once too much goes quickly.

    Attributes:
        is_quick: It goes at the engine's priority still.

    Threads: its own.
    """

    def __init__(self, pace: Pace, *, is_quick: bool) -> None:
        self.is_quick = is_quick
        self._pace = pace

    def look(self) -> None:
        """Give way if it is time."""
        if self.is_quick and not self._pace.goes_on():
            give_way()  # where that is refused, it was said when the connection began
            self.is_quick = False

    def sends(self, size_bytes: int) -> None:
        """So much is sent next. Counted before, or who breaks off each answer would have all of them quickly."""
        self.look()
        self._pace.sent(size_bytes)


class QuickThreads:
    """Makes threads of the priority that the process has.

    Threads: any; one of its own makes them.
    """

    def __init__(self) -> None:
        """Make none yet."""
        self._waiting = queue.SimpleQueue[tuple[Callable[[], None], Callable[[str], None]] | None]()

    def begin(self) -> None:
        """Have the thread that makes them. Called by one that gives way to nobody."""
        threading.Thread(target=self._run, name="tiered_kv-door-quick", daemon=True).start()

    def start(self, task: Callable[[], None], refused: Callable[[str], None]) -> None:
        """Run a task in a new thread; ``refused`` hears why there is none to be had."""
        self._waiting.put((task, refused))

    def end(self) -> None:
        """Make no more."""
        self._waiting.put(None)

    def _run(self) -> None:
        while (wanted := self._waiting.get()) is not None:
            task, refused = wanted
            try:
                threading.Thread(target=task, name="tiered_kv-door", daemon=True).start()
            except RuntimeError as exc:
                refused(str(exc))


def give_way() -> bool:
    """Lower the calling thread's priority below the process's, for good; False: a sandbox refuses."""
    nice = min(NICE_MAX, os.getpriority(os.PRIO_PROCESS, os.getpid()) + NICE)
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
    except PermissionError:
        return False
    return True
