"""s3fs' session, asked for credentials as seldom as may be, and by one call for all.

Owns what becomes of credentials that expire. Called by ``s3.py``.

What is not obvious, measured: for the last ten minutes of credentials botocore asks for new ones before every request,
one request after the other, and takes none of the old ones where that fails. A program that prints what it has until
that expires, as ``aws configure export-credentials`` does, was run for each HEAD, and few were answered within their
deadline. And a program that a cancelled call was waiting for goes on running.
"""

import asyncio
import contextlib
import logging
import os
import signal
from typing import Any, Final

from aiobotocore.credentials import AioCredentials, AioProcessProvider
from aiobotocore.session import AioSession
from botocore.credentials import ReadOnlyCredentials

from tiered_kv.tiers.object.medium import Deadline

logger = logging.getLogger(__name__)

FRESH_S: Final = 30.0
"""Credentials are asked for again after this; what must be renewed is renewed then."""

ENDING_FRESH_S: Final = 1.0
"""The same where they expire within ``FRESH_S``: whoever gives them has others in a moment."""


RENEWAL_MAX_S: Final = 60.0
"""After this a program or a service that gives credentials is given up."""


class SeldomSession(AioSession):  # type: ignore[misc]
    """A session whose credentials are :class:`SeldomCredentials`.

    Threads: the loop's.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._seldom: SeldomCredentials | None = None

    async def get_credentials(self) -> "SeldomCredentials | None":
        if self._seldom is None:
            self._end_programs()
            found = await super().get_credentials()
            self._seldom = None if found is None else SeldomCredentials(found)
        return self._seldom

    def _end_programs(self) -> None:
        """Have a profile's ``credential_process`` ended with the call that waits for it; no source profile's."""
        providers = self.get_component("credential_provider").providers
        for index, provider in enumerate(providers):
            if type(provider) is AioProcessProvider:
                providers[index] = AioProcessProvider(
                    profile_name=self.get_config_variable("profile") or "default",
                    load_config=lambda: self.full_config,
                    popen=_start_program,
                )


class SeldomCredentials(AioCredentials):  # type: ignore[misc]
    """Credentials that are asked for again after a while, not before every request.

    Those that have not expired are used meanwhile, and for as long as that fails or hangs; nobody waits for it.

    Threads: the loop's.
    """

    def __init__(self, found: Any) -> None:
        super().__init__("", "")
        self._found = found
        self._kept: tuple[ReadOnlyCredentials, Deadline] | None = None
        self._renewal: asyncio.Task[Exception | None] | None = None
        self._waiting = 0
        self._has_told = False

    async def get_frozen_credentials(self) -> ReadOnlyCredentials:
        if self._kept is not None and self._kept[1].left_s() > 0:
            return self._kept[0]
        if self._renewal is None:
            self._renewal = asyncio.create_task(self._renew())
        if self._kept is None or self._expires_within(0):
            await self._wait(self._renewal)
        assert self._kept is not None, "renewed, or it would have raised"
        return self._kept[0]

    async def _wait(self, renewal: "asyncio.Task[Exception | None]") -> None:
        """Wait for others; the last one that gives up ends the program or the request that they would come from."""
        self._waiting += 1
        try:
            await asyncio.wait({renewal})
        finally:
            self._waiting -= 1
            if not self._waiting and not renewal.done():
                self._renewal = None
                renewal.cancel()
        failure = renewal.result()
        if failure is not None:
            raise failure

    async def _renew(self) -> Exception | None:
        """Ask for credentials; returns why there are none."""
        try:
            async with asyncio.timeout(RENEWAL_MAX_S):
                found = await self._found.get_frozen_credentials()
        except Exception as exc:  # noqa: BLE001 - whoever waits raises it, and who does not is told
            if self._kept is not None and not self._expires_within(0):
                self._keep(self._kept[0])
                self._tell(exc)
            return exc
        finally:
            if self._renewal is asyncio.current_task():
                self._renewal = None
        self._keep(found)
        self._has_told = False
        return None

    def _keep(self, credentials: ReadOnlyCredentials) -> None:
        self._kept = credentials, Deadline(ENDING_FRESH_S if self._expires_within(FRESH_S) else FRESH_S)

    def _tell(self, exc: Exception) -> None:
        """Say once that nothing follows what is in force."""
        if not self._has_told:
            self._has_told = True
            logger.warning("credentials cannot be renewed; those in force are used until they expire. %r", exc)

    def _expires_within(self, seconds: float) -> bool:
        asked = getattr(self._found, "refresh_needed", None)  # what never expires has none
        return asked is not None and asked(seconds)


async def _start_program(*command: str, **pipes: Any) -> "_Program":
    return _Program(await asyncio.create_subprocess_exec(*command, **pipes, start_new_session=True))


class _Program:
    """A running program as botocore uses it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    async def communicate(self) -> tuple[bytes, bytes]:
        try:
            return await self._process.communicate()
        except asyncio.CancelledError:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)  # what it started holds its pipes, too
            raise
