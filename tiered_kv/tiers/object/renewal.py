"""Credentials that are renewed while they are used: one asks for all calls, and none waits while what there is holds.

Owns when credentials are asked for again, and who waits for that. Called by ``s3_session.py``, ``loop_calls.py``,
``google.py`` and ``azure.py``.

What is not obvious, measured: for the last minutes of what they have (15 with botocore, 5 with Google's and Azure's
clients) all three ask for new ones before every request and wait for that, Google's on the event loop, which stands
still meanwhile. Where whatever gives credentials hangs, nothing is answered that the store would have answered.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final, Generic, TypeVar

from tiered_kv.tiers.object.errors import NoIdentity, explain
from tiered_kv.tiers.object.loop_client import this_call
from tiered_kv.tiers.object.medium import Deadline

logger = logging.getLogger(__name__)

T = TypeVar("T")

FRESH_S: Final = 30.0
"""Credentials are asked for again after this; what must be renewed is renewed then."""

ENDING_FRESH_S: Final = 1.0
"""The same where they expire within ``FRESH_S``, or had when they were given: others come in a moment."""

RENEWAL_MAX_S: Final = 60.0
"""After this a program or a service that gives credentials is given up."""

WAIT_SHARE: Final = 0.9
"""Of what a call has left, at most, for credentials: the rest is for saying that they, not the store, did not come."""


class Renewal(Generic[T]):
    """Credentials of one kind, asked for again after a while, not before every request.

    Those that have not expired are used meanwhile, and for as long as that fails or hangs; nobody waits for it.

    Threads: the loop's.
    """

    def __init__(self, ask: Callable[[], Awaitable[T]], expire_within: Callable[[T, float], bool]) -> None:
        """Nothing is asked for yet.

        Args:
            expire_within: Whether what was given ends within so many seconds.
        """
        self._ask = ask
        self._expire_within = expire_within
        self._kept: tuple[T, Deadline] | None = None
        self._was_over = False  # what is kept had expired when it was given: its service's clock may be another
        self._running: asyncio.Task[Exception | None] | None = None
        self._waiting = 0
        self._has_told = False

    def is_at_hand(self) -> bool:
        """Whether :meth:`current` waits for nothing; else others have been asked for."""
        if self._kept is not None and self._kept[1].left_s() > 0 and (self._was_over or self._is_in_force()):
            return True
        if self._running is None:
            self._running = asyncio.create_task(self._renew())
        return self._is_in_force()

    async def current(self) -> T:
        """What is in force.

        Raises:
            NoIdentity: Nothing is, and others cannot be had; its reason says why.
        """
        if not self.is_at_hand():
            assert self._running is not None
            await self._wait(self._running)
        assert self._kept is not None, "renewed, or it would have raised"
        return self._kept[0]

    def ends_within(self, seconds: float) -> bool:
        """Whether what is in force ends so soon; True where nothing is."""
        return self._kept is None or self._expire_within(self._kept[0], seconds)

    def _is_in_force(self) -> bool:
        return not self.ends_within(0)

    async def _wait(self, renewal: "asyncio.Task[Exception | None]") -> None:
        """Wait for others; the last one that gives up ends the program or the request that they would come from."""
        self._waiting += 1
        try:
            await asyncio.wait({renewal})
        finally:
            self._waiting -= 1
            if not self._waiting and not renewal.done():
                self._running = None
                renewal.cancel()
        failure = renewal.result()
        if failure is not None:
            raise NoIdentity(failure) from failure

    async def _renew(self) -> Exception | None:
        """Ask for credentials; returns why there are none."""
        try:
            async with asyncio.timeout(RENEWAL_MAX_S):
                found = await self._ask()
            if self._expire_within(found, 0) and self._is_in_force():
                raise RuntimeError("what was given in their place has expired already")
        except Exception as exc:  # noqa: BLE001 - whoever waits raises it, and who does not is told
            if self._kept is not None and self._is_in_force():
                self._keep(self._kept[0])
                self._tell(exc)
            return exc
        finally:
            if self._running is asyncio.current_task():
                self._running = None
        self._keep(found)
        self._has_told = False
        return None

    def _keep(self, credentials: T) -> None:
        fresh_s = ENDING_FRESH_S if self._expire_within(credentials, FRESH_S) else FRESH_S
        self._kept, self._was_over = (credentials, Deadline(fresh_s)), self._expire_within(credentials, 0)

    def _tell(self, exc: Exception) -> None:
        """Say once that nothing follows what is in force."""
        if not self._has_told:
            self._has_told = True
            words = explain(NoIdentity(exc), "")  # not the error: what a program says may hold anything
            logger.warning("credentials cannot be renewed; those in force are used until they expire. %s", words)


@asynccontextmanager
async def identifying() -> AsyncIterator[None]:
    """Find out in the block who asks, on the loop, for a call that is to tell of it if that comes late.

    Raises:
        NoIdentity: That failed or took too long, whatever it was, so the store is not asked.
    """
    call = this_call()
    call.unidentified += 1  # until that is known: where it fails, also if the call's time ends before it is told
    try:
        async with asyncio.timeout(call.left_s() * WAIT_SHARE):
            yield
        call.unidentified -= 1
    except NoIdentity:
        raise
    except Exception as exc:  # of files, of programs, of services that give credentials, or of settings
        raise NoIdentity(exc) from exc
