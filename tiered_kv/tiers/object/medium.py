"""The operations of an object store, and how a call keeps its deadline.

Owns the protocol ``Medium`` and what its implementations share (``s3.py``, ``google.py``, ``azure.py``, ``memory.py``,
``shared_directory.py``). They raise whatever their client raises: ``ObjectStore``, their only caller, turns that into
words.
"""

import errno
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from tiered_kv.errors import ChunkCorrupt

T = TypeVar("T")

STUCK_MAX: Final = 64
"""Calls that never came back, e.g. on a dead mount: beyond it new ones fail at once instead of leaving threads."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object as the store tells of it.

    Attributes:
        path: Relative to the store's root.
        modified_s: Seconds since 1970 by the store's clock, to about a second.
    """

    path: str
    size_bytes: int
    modified_s: float


@dataclass(frozen=True, slots=True)
class ListPage:
    """A part of a list and where the next one starts; None: this was the last."""

    objects: list[ObjectInfo]
    cursor: object | None


class Medium(Protocol):
    """What ``ObjectStore`` needs of a store; paths are relative to its root.

    Missing objects are FileNotFoundError or the store's own way of saying so (``errors.is_missing``).
    """

    @abstractmethod
    def get(self, path: str, length: int | None, size_max: int | None) -> bytes: ...

    def get_into(self, path: str, buffer: memoryview) -> None:
        """Through memory of its own, unless overridden: a read that was given up must not hold ``buffer``."""
        data = self.get(path, None, len(buffer))
        check_expected(path, len(data), len(buffer))
        buffer[:] = data

    @abstractmethod
    def put(self, path: str, data: bytes | memoryview, only_if_absent: bool) -> None: ...

    @abstractmethod
    def head(self, path: str) -> ObjectInfo: ...

    @abstractmethod
    def page(self, prefix: str, cursor: object | None) -> ListPage: ...

    @abstractmethod
    def delete(self, paths: Sequence[str]) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


class Deadline:
    """A moment by which a call is over."""

    def __init__(self, timeout_s: float) -> None:
        self._end_s = time.monotonic() + timeout_s

    def left_s(self) -> float:
        """Time that is left; negative once it is over."""
        return self._end_s - time.monotonic()

    def wait_s(self, longest_s: float) -> float:
        """How long a single wait may take.

        Raises:
            TimeoutError: The deadline has passed.
        """
        left = self.left_s()
        if left <= 0:
            raise TimeoutError("the call's time is over")
        return min(left, longest_s)


class CallRunner:
    """Runs calls that cannot be cancelled, each in a thread of its own, so that a hang costs the caller its deadline.

    Threads: any. A call that comes back too late is forgotten; it holds no buffer of the caller.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._running_count = 0

    def run(
        self,
        function: Callable[..., T],
        *args: object,
        timeout_s: float | None = None,
        late: Callable[[T], object] | None = None,
    ) -> T:
        """Run it in a thread; ``timeout_s`` in place of the usual deadline, ``late`` for what comes after it.

        Raises:
            TimeoutError: It was not done in time.
        """
        future = self.begin(function, *args, late=late)
        try:
            return future.result(self._timeout_s if timeout_s is None else timeout_s)
        except TimeoutError:
            if future.cancel():
                raise
            return future.result()  # it came at this very moment, or the error is the function's own

    def begin(self, function: Callable[..., T], *args: object, late: Callable[[T], object] | None = None) -> Future[T]:
        """Run it in a thread; what comes after the future was cancelled is given to ``late``.

        Raises:
            TimeoutError: Too many never came back.
        """
        with self._lock:
            if self._running_count >= STUCK_MAX:
                raise TimeoutError(f"{self._running_count} earlier calls did not come back")
            self._running_count += 1
        future: Future[T] = Future()

        def work() -> None:
            try:
                result = function(*args)
            except BaseException as exc:  # noqa: BLE001  # raised again in the caller's thread
                if future.set_running_or_notify_cancel():
                    future.set_exception(exc)
            else:
                if future.set_running_or_notify_cancel():
                    future.set_result(result)
                elif late is not None:
                    late(result)
            finally:
                with self._lock:
                    self._running_count -= 1

        try:
            threading.Thread(target=work, name="object-store-call", daemon=True).start()
        except RuntimeError as exc:
            with self._lock:
                self._running_count -= 1
            raise OSError(errno.EAGAIN, f"cannot start a thread: {exc}") from exc
        return future


def check_size(path: str, size_bytes: int, size_max: int | None) -> None:
    """Refuse an object that is larger than it can be, before its bytes are fetched."""
    if size_max is not None and size_bytes > size_max:
        raise ChunkCorrupt(f"object is larger than expected. observed={size_bytes} expected_max={size_max} path={path}")


def check_expected(path: str, size_bytes: int, expected: int) -> None:
    """Refuse an object that has not the size its reader made room for."""
    if size_bytes != expected:
        raise ChunkCorrupt(f"blob has the wrong size. observed={size_bytes} expected={expected} path={path}")
