"""A breaker around any tier: after several failures in a row, calls fail at once until a trial has succeeded.

While it is open a request pays nothing for a medium that is down, and the medium is not hammered. It opens for a second
first and for longer after each trial that fails; a trial is a whole self-test past the breaker, started by the engine
(``engine/guards.py``), so that a tier that reads but does not write is not taken for well. Stacked by
``tiers/open.py``. The pattern is Nygard's (Release It!, "Circuit Breaker").
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum

from tiered_kv.errors import TierBusy, TierUnavailable
from tiered_kv.tiers.base import BlobName, Tier, TierWrapper

FAILURES_MAX = 5
"""In a row, each operation by itself: a store that fails one request in ten stays closed, one that is down opens within
a deadline, and so does one that answers probes and breaks off every body."""

OPEN_FIRST_S = 1.0
OPEN_LAST_S = 30.0


class BreakerState(Enum):
    """Closed: calls pass. Open: calls fail at once. Half-open: they still do, while a trial runs."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """The state of one breaker.

    Attributes:
        opened_count: How often it has opened.
        reason: Why it opened last.

    Threads: any; every field is guarded by one lock.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._failures: Counter[str] = Counter()
        self._open_s = OPEN_FIRST_S
        self._trial_due_s = 0.0
        self.state = BreakerState.CLOSED
        self.opened_count = 0
        self.reason = ""

    @property
    def is_open(self) -> bool:
        return self.state is not BreakerState.CLOSED

    @property
    def is_shut(self) -> bool:
        """Whether a call now would be no trial either."""
        return self.state is BreakerState.HALF_OPEN or (
            self.state is BreakerState.OPEN and self._monotonic() < self._trial_due_s
        )

    def check(self) -> None:
        """Let a call pass.

        Raises:
            TierUnavailable: The breaker is open.
        """
        with self._lock:
            if self.is_open:
                raise TierUnavailable(f"the tier is left alone until a trial succeeds. since={self.reason}")

    def succeeded(self, operation: str) -> None:
        """A call got an answer."""
        with self._lock:
            del self._failures[operation]

    def failed(self, operation: str, reason: str) -> None:
        """A call got none."""
        with self._lock:
            self._failures[operation] += 1
            if self._failures[operation] >= FAILURES_MAX and not self.is_open:
                self._open(reason)

    def trip(self, reason: str) -> None:
        """Open at once: the self-test at start failed, or an operation does not end."""
        with self._lock:
            if not self.is_open:
                self._open(reason)

    def begin_trial(self) -> bool:
        """Whether a trial is due; if so it has begun and :meth:`end_trial` follows."""
        with self._lock:
            if self.state is not BreakerState.OPEN or self._monotonic() < self._trial_due_s:
                return False
            self.state = BreakerState.HALF_OPEN
            return True

    def end_trial(self, failure: str | None) -> None:
        """The trial is over: close, or open for longer than the last time."""
        with self._lock:
            if failure is None:
                self.state, self._open_s = BreakerState.CLOSED, OPEN_FIRST_S
                self._failures.clear()
                return
            self.state, self.reason = BreakerState.OPEN, failure
            self._open_s = min(2 * self._open_s, OPEN_LAST_S)
            self._trial_due_s = self._monotonic() + self._open_s

    def _open(self, reason: str) -> None:
        self.state, self.reason = BreakerState.OPEN, reason
        self.opened_count += 1
        self._trial_due_s = self._monotonic() + self._open_s


class _GuardedCall:
    """A call that passed, as a context: what the breaker is told when it ends.

    Raises:
        TierUnavailable: The breaker is open; on entry.
    """

    __slots__ = ("_breaker", "_is_answer", "_operation")

    def __init__(self, breaker: Breaker, operation: str, *, is_answer: bool) -> None:
        """Take the parts; ``is_answer``: a call that raises nothing was answered by the medium."""
        self._breaker = breaker
        self._operation = operation
        self._is_answer = is_answer

    def __enter__(self) -> None:
        self._breaker.check()

    def __exit__(self, _: object, exc: BaseException | None, _traceback: object) -> None:
        if exc is None:
            if self._is_answer:
                self._breaker.succeeded(self._operation)
        elif isinstance(exc, TierUnavailable) and not isinstance(exc, TierBusy):
            self._breaker.failed(self._operation, str(exc))


class GuardedTier(TierWrapper):
    """Passes calls on while the breaker is closed, and tells it how they ended.

    ``scan`` passes also while it is open: a start reads once what a tier that failed its self-test will give.

    Threads: any; as thread-safe as ``inner``.
    """

    def __init__(self, inner: Tier, breaker: Breaker) -> None:
        super().__init__(inner)
        self._breaker = breaker

    def _call(self, operation: str) -> _GuardedCall:
        return _GuardedCall(self._breaker, operation, is_answer=True)

    def put(self, name: BlobName, blob: memoryview) -> None:
        with self._call("put"):
            self.inner.put(name, blob)

    def put_if(self, name: BlobName, blob: memoryview, is_wanted: Callable[[], bool]) -> bool:
        with _GuardedCall(self._breaker, "put", is_answer=False):
            is_stored = self.inner.put_if(name, blob, is_wanted)
        if is_stored:  # what was not wanted says nothing: those behind a put that fails always end so
            self._breaker.succeeded("put")
        return is_stored

    def get_into(self, name: BlobName, buffer: memoryview) -> bool:
        with self._call("get"):
            return self.inner.get_into(name, buffer)

    def contains(self, name: BlobName) -> bool:
        with self._call("contains"):
            return self.inner.contains(name)

    def count_held(self, names: Sequence[BlobName], hint: str = "") -> int:
        with self._call("contains"):
            return self.inner.count_held(names, hint)

    def delete(self, name: BlobName) -> bool:
        with self._call("delete"):
            return self.inner.delete(name)

    def describe(self, namespace: bytes, record: bytes) -> None:
        with self._call("describe"):
            self.inner.describe(namespace, record)

    def flush(self) -> None:
        """Persist what can be; while the breaker is open, nothing.

        What is only read has nothing to persist. Peers look for others then, which may be what ends their failure.
        """
        if self.traits.is_read_only or not self._breaker.is_open:
            self.inner.flush()
