"""Latency, bytes and outcome of every call to a tier, told to one callable.

Owns no counters (``metrics`` does) and changes no behaviour. Stacked by ``tiers/open.py`` on the outside, so that
verification and re-reads are part of the time it tells.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Self

from tiered_kv.errors import CapacityExceeded, ChunkCorrupt, ChunkMismatch, Closed, TierUnavailable
from tiered_kv.tiers.base import BlobInfo, BlobName, Tier, TierWrapper

Record = Callable[[str, float, int, str], None]
"""Takes operation, seconds, bytes moved (0 unless the outcome is ``ok``) and outcome."""

_OUTCOMES: dict[type[BaseException], str] = {
    CapacityExceeded: "no_room",
    ChunkCorrupt: "corrupt",
    ChunkMismatch: "foreign",
    Closed: "closed",
    TierUnavailable: "unavailable",
}


class _TimedCall:
    """One call in progress, as a context: what to report when it returns."""

    __slots__ = ("_clock", "_operation", "_record", "_start_s", "moved_bytes", "outcome", "waited_s")

    def __init__(self, record: Record, clock: Callable[[], float], operation: str) -> None:
        self._record = record
        self._clock = clock
        self._operation = operation
        self.moved_bytes = 0
        self.outcome = "ok"
        self.waited_s = 0.0

    def __enter__(self) -> Self:
        self._start_s = self._clock()
        return self

    def __exit__(self, raised: type[BaseException] | None, *_: object) -> None:
        if raised is not None:
            self.outcome, self.moved_bytes = _OUTCOMES.get(raised, "error"), 0
        seconds = self._clock() - self._start_s - self.waited_s
        self._record(self._operation, seconds, self.moved_bytes, self.outcome)

    def found(self, found: bool, moved_bytes: int = 0) -> bool:
        """Note a yes-or-no answer and pass it on."""
        self.outcome = "ok" if found else "missing"
        self.moved_bytes = moved_bytes if found else 0
        return found


class MeteredTier(TierWrapper):
    """Reports put, get, contains, delete, scan, flush and describe, each exactly once, also when they raise.

    Threads: any; ``record`` is called in the caller's thread.
    """

    def __init__(self, inner: Tier, record: Record, clock: Callable[[], float]) -> None:
        """Wrap ``inner``; ``clock`` is monotonic and in seconds."""
        super().__init__(inner)
        self._record = record
        self._clock = clock

    def _timed(self, operation: str) -> _TimedCall:
        return _TimedCall(self._record, self._clock, operation)

    def put(self, name: BlobName, blob: memoryview) -> None:
        with self._timed("put") as call:
            self.inner.put(name, blob)
            call.moved_bytes = blob.nbytes

    def put_if(self, name: BlobName, blob: memoryview, is_wanted: Callable[[], bool]) -> bool:
        """A put; the time that it waits for others is not the medium's and does not count."""
        with self._timed("put") as call:

            def timed() -> bool:
                start = self._clock()
                try:
                    return is_wanted()
                finally:
                    call.waited_s += self._clock() - start

            is_stored = self.inner.put_if(name, blob, timed)
            call.outcome, call.moved_bytes = ("ok", blob.nbytes) if is_stored else ("not_wanted", 0)
            return is_stored

    def get_into(self, name: BlobName, buffer: memoryview) -> bool:
        with self._timed("get") as call:
            return call.found(self.inner.get_into(name, buffer), buffer.nbytes)

    def contains(self, name: BlobName) -> bool:
        with self._timed("contains") as call:
            return call.found(self.inner.contains(name))

    def count_held(self, names: Sequence[BlobName], hint: str = "") -> int:
        with self._timed("contains") as call:
            count = self.inner.count_held(names, hint)
            call.found(count > 0)
            return count

    def delete(self, name: BlobName) -> bool:
        with self._timed("delete") as call:
            return call.found(self.inner.delete(name))

    def scan(self) -> Iterator[BlobInfo]:
        with self._timed("scan"):
            return self.inner.scan()

    def flush(self) -> None:
        with self._timed("flush"):
            self.inner.flush()

    def describe(self, namespace: bytes, record: bytes) -> None:
        with self._timed("describe"):
            self.inner.describe(namespace, record)
