"""Threads for what must not hold up an engine's step, started later where the machine has none left now.

A process or a container at its limit of threads makes ``Thread.start`` raise, in whichever hook of vLLM's happened to
need one; an engine that runs must not end for that.
"""

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

PAUSE_S = 10.0
"""Between two tries to start a thread that the machine refused."""


class Background:
    """Starter of short-lived threads.

    Threads: one owner, who calls :meth:`go_on` now and then.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, Callable[[], None]] = {}
        self._again_s = 0.0

    def start(self, name: str, task: Callable[[], None]) -> None:
        """Run ``task`` in a thread of its own; where none can be had, later, unless a newer task took its name."""
        self._waiting.pop(name, None)
        try:
            threading.Thread(target=task, name=f"tiered_kv-{name}", daemon=True).start()
        except RuntimeError as exc:
            self._waiting[name] = task
            self._again_s = time.monotonic() + PAUSE_S
            logger.warning("cannot start a thread; trying again in %g s. thread=%s %s", PAUSE_S, name, exc)

    def go_on(self) -> None:
        """Try again what could not be started."""
        if self._waiting and time.monotonic() >= self._again_s:
            for name, task in list(self._waiting.items()):
                self.start(name, task)
