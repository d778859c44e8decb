"""Our log lines in vLLM's log."""

import logging
from collections.abc import Callable
from typing import Final

WARNINGS_MAX: Final = 20
WARNINGS_EVERY_S: Final = 60.0
"""So many warnings in so much time: requests come from clients, and one that errs must not fill the log."""


def show_our_logs() -> None:
    """vLLM configures its own loggers only: give ours its handlers, once, unless the application has done so."""
    ours, theirs = logging.getLogger("tiered_kv"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False


class RareWarnings:
    """Warnings of one kind about requests, of which the log gets ``WARNINGS_MAX`` in ``WARNINGS_EVERY_S``.

    Threads: one owner.
    """

    def __init__(self, logger: logging.Logger, monotonic: Callable[[], float]) -> None:
        self._logger = logger
        self._monotonic = monotonic
        self._count = 0
        self._since_s = -WARNINGS_EVERY_S

    def warn(self, text: str, *parts: object) -> None:
        """Say it, unless there were too many; the last one says that more are not told."""
        now_s = self._monotonic()
        if now_s - self._since_s >= WARNINGS_EVERY_S:
            self._since_s, self._count = now_s, 0
        self._count += 1
        if self._count <= WARNINGS_MAX:
            more = "; more of these are only counted for a while" if self._count == WARNINGS_MAX else ""
            self._logger.warning("%s%s", text % parts, more)
