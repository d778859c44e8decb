"""Calls through a client of fsspec's that works on fsspec's event loop, each within a deadline.

Owns when the client is made and how often a request is sent. Called by ``google.py`` and ``azure.py``; those of S3 have
their own (``loop_calls.py``), and wait for several with ``all_of``.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import ContextVar
from typing import Any, Final, TypeVar

from tiered_kv.tiers.object.errors import NoClientYet, NoIdentity, TakenUnsure, is_passing, is_taken
from tiered_kv.tiers.object.medium import CallRunner, Deadline

T = TypeVar("T")

DELETED_AT_ONCE: Final = 16
"""Objects of a delete that are asked for at the same time, within one deadline, where there is no batch that the server
knows."""

PAGE_MAX: Final = 1000
"""Objects of one page of a list."""

BEYOND_THE_END: Final = 416
"""HTTP's status of a range that begins behind an object's last byte."""

PAUSE_S: Final = 0.5
"""Before a request is sent a second time."""


class LoopClient:
    """A client of fsspec's, made by the first call that needs it.

    Made in a thread, because both look for credentials meanwhile, in the network too and without a deadline. A client
    that comes too late for its call is there for the next one.

    Threads: any.
    """

    def __init__(self, make: Callable[[], Any], timeout_s: float) -> None:
        """Every call, and making the client, ends within ``timeout_s``."""
        self._make = make
        self._timeout_s = timeout_s
        self._runner = CallRunner(timeout_s)
        self._making = threading.Lock()
        self._client: Any = None

    def run(self, work: Callable[[Any], Coroutine[Any, Any, T]]) -> T:
        """Run what ``work`` makes of the client on the client's loop.

        Raises:
            TimeoutError, NoIdentity: It was not done in time, and is cancelled.
        """
        deadline = Deadline(self._timeout_s)
        client = self._open(deadline)
        return run_on_loop(client.loop, work(client), max(deadline.left_s(), 0.0))

    def close(self, end: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        """End the client, if there is one."""
        client, self._client = self._client, None
        if client is not None:
            run_on_loop(client.loop, end(client), self._timeout_s)

    def _open(self, deadline: Deadline) -> Any:
        if self._client is not None:
            return self._client
        if not self._making.acquire(timeout=deadline.wait_s(self._timeout_s)):
            raise NoClientYet("another call is still making the client")
        try:
            if self._client is None:
                self._make_one(deadline)
            return self._client
        finally:
            self._making.release()

    def _make_one(self, deadline: Deadline) -> None:
        try:
            self._keep(self._runner.run(self._make, timeout_s=deadline.wait_s(self._timeout_s), late=self._keep))
        except TimeoutError as exc:
            raise NoClientYet("the client is still being made") from exc

    def _keep(self, client: Any) -> None:
        self._client = client


class LoopCall:
    """A call while its coroutines run on the loop.

    Attributes:
        unidentified: Of these coroutines, those that do not know yet as whom the store is to be asked.
        awaited: Renewals of credentials that they have waited for: what came is used, however soon it expires.
    """

    def __init__(self, timeout_s: float) -> None:
        self._deadline = Deadline(timeout_s)
        self.unidentified = 0
        self.awaited = set[object]()

    def left_s(self) -> float:
        return self._deadline.left_s()


_call: ContextVar[LoopCall] = ContextVar("a call on the loop")


def this_call() -> LoopCall:
    """The call for which this coroutine runs on the loop."""
    return _call.get()


def run_on_loop(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
    """Run a coroutine on another thread's loop; what is not done in time is cancelled.

    Raises:
        TimeoutError: It was not done in time.
        NoIdentity: The same, and until then nobody had said as whom the store is to be asked.
    """
    call = LoopCall(timeout_s)
    before = _call.set(call)
    try:
        future = asyncio.run_coroutine_threadsafe(coroutine, loop)  # which takes this thread's context along
    finally:
        _call.reset(before)
    try:
        return future.result(timeout_s)
    except TimeoutError as exc:
        if not future.cancel():
            return future.result()  # it came at this very moment, or the error is the coroutine's own
        if call.unidentified:
            raise NoIdentity(exc) from exc
        raise
    except BaseException:
        future.cancel()
        raise


async def twice(ask: Callable[[], Awaitable[T]]) -> T:
    """Send a request, and once more if what it died of may have passed.

    The clients' own policies are off: they wait longer than a call may take, and what went wrong is never heard of.

    Raises:
        TakenUnsure: The second request met what the first one may have stored.
    """
    try:
        return await ask()
    except Exception as exc:
        if not is_passing(exc):
            raise
    await asyncio.sleep(PAUSE_S)
    try:
        return await ask()
    except Exception as exc:
        if is_taken(exc):
            raise TakenUnsure from exc
        raise


async def all_of(asked: list[Coroutine[Any, Any, object]], is_fine: Callable[[BaseException], bool]) -> None:
    """Wait for all of these, then raise the first error that is not fine."""
    for ended in await asyncio.gather(*asked, return_exceptions=True):
        if isinstance(ended, BaseException) and not is_fine(ended):
            raise ended
