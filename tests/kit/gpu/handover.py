"""What crosses between host threads, so that the race detector sees it: who takes gets to know what the giver knew.

They stand in for the queue, the deque and the condition of ``tiered_kv.vllm.worker``.
"""

import queue
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.kit.gpu.races import Clock, RaceDetector
from tiered_kv.vllm import worker


class WatchedQueue:
    """A ``queue.SimpleQueue``."""

    def __init__(self, detector: RaceDetector) -> None:
        self._detector = detector
        self._items: queue.SimpleQueue[tuple[Clock, Any]] = queue.SimpleQueue()

    def put(self, item: Any) -> None:
        self._items.put((self._detector.clock_of(self._detector.me), item))

    def get(self) -> Any:
        clock, item = self._items.get()
        self._detector.learn(self._detector.me, clock)
        return item


class WatchedDeque:
    """A ``collections.deque``, as far as the worker uses it."""

    def __init__(self, detector: RaceDetector, items: Iterable[Any] = ()) -> None:
        self._detector = detector
        self._items: deque[tuple[Clock, Any]] = deque((Clock(), item) for item in items)

    def append(self, item: Any) -> None:
        self._items.append((self._detector.clock_of(self._detector.me), item))

    def popleft(self) -> Any:
        clock, item = self._items.popleft()
        self._detector.learn(self._detector.me, clock)
        return item

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        return (item for _, item in self._items)


class WatchedCondition(threading.Condition):
    """A ``threading.Condition``: who holds it comes after all that held it before."""

    def __init__(self, detector: RaceDetector) -> None:
        super().__init__()
        self._detector = detector
        self._clock = Clock()

    def __enter__(self) -> bool:
        entered = super().__enter__()
        self._detector.learn(self._detector.me, self._clock)
        return entered

    def __exit__(self, *error: object) -> None:
        self._clock.join(self._detector.clock_of(self._detector.me))
        super().__exit__(None, None, None)

    def wait(self, timeout: float | None = None) -> bool:
        self._clock.join(self._detector.clock_of(self._detector.me))
        woken = super().wait(timeout)
        self._detector.learn(self._detector.me, self._clock)
        return woken


@contextmanager
def watched_threads(detector: RaceDetector) -> Iterator[None]:
    """The threads of workers that are made inside the ``with`` block hand over where the detector sees it."""
    names = {name: getattr(threading, name) for name in ("Thread", "Event")}
    with (
        mock.patch.object(worker, "queue", SimpleNamespace(SimpleQueue=partial(WatchedQueue, detector))),
        mock.patch.object(worker, "deque", partial(WatchedDeque, detector)),
        mock.patch.object(worker, "threading", SimpleNamespace(Condition=partial(WatchedCondition, detector), **names)),
    ):
        yield
