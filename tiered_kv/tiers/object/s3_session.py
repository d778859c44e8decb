"""s3fs' session, whose credentials are renewed by ``renewal.py`` and not by botocore.

Owns whose programs end with the call that waits for them. Called by ``s3.py``.

What is not obvious, measured: a program that prints what it has until that expires, as ``aws configure
export-credentials`` does, was run for each HEAD, and few were answered within their deadline. And a program that a
cancelled call was waiting for goes on running.
"""

import asyncio
import contextlib
import copy
import os
import signal
from typing import Any

from aiobotocore.credentials import AioCredentials, AioProcessProvider
from aiobotocore.session import AioSession
from botocore.credentials import ReadOnlyCredentials

from tiered_kv.tiers.object.renewal import Renewal


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
    """Credentials that are renewed as :class:`Renewal` does it.

    Threads: the loop's.
    """

    def __init__(self, found: Any) -> None:
        super().__init__("", "")

        async def ask() -> tuple[ReadOnlyCredentials, Any]:
            given = await found.get_frozen_credentials()
            return given, copy.copy(found)  # which goes on telling when these end; ``found`` tells of the next ones

        self._renewal: Renewal[tuple[ReadOnlyCredentials, Any]] = Renewal(ask, _end_within)

    async def get_frozen_credentials(self) -> ReadOnlyCredentials:
        return (await self._renewal.current())[0]

    def end_within(self, seconds: float) -> bool:
        """Whether those in force end so soon."""
        return self._renewal.ends_within(seconds)


def _end_within(given: tuple[ReadOnlyCredentials, Any], seconds: float) -> bool:
    ends = getattr(given[1], "refresh_needed", None)  # what never expires has none
    return ends is not None and bool(ends(seconds))


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
