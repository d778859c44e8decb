"""s3fs' session, asked for credentials as seldom as may be, and by one call for all.

Owns what becomes of credentials that expire. Called by ``s3.py``.

What is not obvious, measured: for the last ten minutes of credentials botocore asks for new ones before every request,
one request after the other, and takes none of the old ones where that fails. A program that prints what it has until
that expires, as ``aws configure export-credentials`` does, was run for each HEAD, and few were answered within their
deadline. And a program that a cancelled call was waiting for goes on running.
"""

import asyncio
import contextlib
import os
import signal
from typing import Any, Final

from aiobotocore.credentials import AioCredentials, AioProcessProvider
from aiobotocore.session import AioSession
from botocore.credentials import ReadOnlyCredentials

from tiered_kv.tiers.object.medium import Deadline

FRESH_S: Final = 30.0
"""Credentials are asked for again after this; what must be renewed is renewed then."""

ENDING_FRESH_S: Final = 1.0
"""The same where they expire within ``FRESH_S``: whoever gives them has others in a moment."""


RENEWAL_S: Final = 2.0
"""How long a call waits for others while it has some that have not expired: its own deadline is for the store."""


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

    Where renewing fails or hangs those that have not expired stay in use.

    Threads: the loop's.
    """

    def __init__(self, found: Any) -> None:
        super().__init__("", "")
        self._found = found
        self._asking = asyncio.Lock()
        self._kept: tuple[ReadOnlyCredentials, Deadline] | None = None

    async def get_frozen_credentials(self) -> ReadOnlyCredentials:
        if (fresh := self._fresh()) is not None:
            return fresh
        async with self._asking:
            if (fresh := self._fresh()) is not None:
                return fresh
            in_force = None if self._kept is None or self._expires_within(0) else self._kept[0]
            try:
                async with asyncio.timeout(None if in_force is None else RENEWAL_S):
                    found = await self._found.get_frozen_credentials()
            except Exception:
                if in_force is None or self._expires_within(0):
                    raise
                found = in_force
            self._kept = found, Deadline(ENDING_FRESH_S if self._expires_within(FRESH_S) else FRESH_S)
            return found

    def _fresh(self) -> ReadOnlyCredentials | None:
        return self._kept[0] if self._kept is not None and self._kept[1].left_s() > 0 else None

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
        finally:
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)  # what it started holds its pipes, too
