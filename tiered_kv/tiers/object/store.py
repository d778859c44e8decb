"""Objects below one URI: a small blocking client for S3, Google's and Azure's stores, and shared directories.

Owns the deadline and the words of every failure, and the choice of the medium. Knows paths and bytes, nothing of blobs,
limits or retries of its own. Called by ``tier.py``, ``fleet`` and the CLI.
"""

import importlib.util
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final, TypeVar

from tiered_kv.errors import ChunkCorrupt, Closed, ConfigError, TieredKVError, TierUnavailable
from tiered_kv.fleet.layout import probe_path
from tiered_kv.location import Location
from tiered_kv.tiers.object.errors import (
    MissingFile,
    TakenUnsure,
    explain,
    is_missing,
    is_of_identity,
    is_taken,
    is_without_create,
)
from tiered_kv.tiers.object.medium import Deadline, ListPage, Medium, ObjectInfo
from tiered_kv.tiers.object.memory import open_memory
from tiered_kv.tiers.object.shared_directory import SharedDirectory

logger = logging.getLogger(__name__)

T = TypeVar("T")

READS_AT_ONCE: Final = 16
"""Objects that one call for many reads at the same time; more connections would be taken from blobs."""

ASK_AGAIN_S: Final = 600.0
"""Between questions, three requests each, whether a store that overwrote an object still does: for a while somebody
else may have answered in its place, and limits end with that answer."""

RENEW_S: Final = 30.0
"""Least age of a client that is made anew because its credentials are refused: one costs up to 0.5 s of a core."""

_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}
"""What a scheme needs; pip knows it by the same name."""

_SECRET_OPTIONS = ("key", "secret", "token", "account_key", "sas_token", "connection_string", "client_secret")
_SECRET_PARTS = ("AccountKey", "SharedAccessSignature")
"""Of a connection string of Azure's."""

_INHERITED: Final[list[Medium]] = []
"""Clients of a process that forked us, kept from being collected: their sockets and event loop's epoll are still the
parent's, and closing them here would cut the parent off (seen as read timeouts there)."""


class _MissingError(Exception):
    """The object is not there; never leaves this module."""


@dataclass(slots=True)
class _Client:
    """A medium in use; the store's lock guards it.

    Attributes:
        calls: How many are in it now.
        is_left: No further call takes it, and the last one in it closes it.
    """

    medium: Medium
    pid: int
    made_s: float
    calls: int = 0
    is_left: bool = False


class ObjectStore:
    """Objects below one URI.

    Threads: any, at any time until ``close``. Every call ends within ``timeout_s`` (a page of a list and a batch of a
    delete count as one call). The client is made on first use, in the process that uses it: it does not survive a fork.
    It reads credentials and certificates once, so another one is made when the store or we refuse these: they may have
    been replaced meanwhile.

    Every method raises TierUnavailable for whatever the medium does, and Closed after ``close``.

    Attributes:
        uri: Where it is, safe to show.
        timeout_s: Deadline of one call.
    """

    def __init__(
        self,
        location: Location,
        *,
        timeout_s: float = 10.0,
        concurrency: int = 16,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Name a store; nothing is opened yet.

        Raises:
            ConfigError: The location is no object store, or the package for its scheme is not installed.
        """
        if location.kind != "object":
            raise ConfigError(f"{location} is no object store")
        package = _PACKAGES.get(location.scheme)
        if package is not None and importlib.util.find_spec(package) is None:
            raise ConfigError(f"{location.scheme}:// needs the package {package}: pip install {package}")
        self.uri = str(location)
        self._location = location
        self.timeout_s = timeout_s
        self._concurrency = concurrency
        self._secrets = _secrets(location)
        self._state = threading.Condition()
        self._is_closed = False
        self._in_flight_count = 0
        self._monotonic = monotonic
        self._client: _Client | None = None
        self._is_atomic: bool | None = None
        self._asked_s = 0.0  # for that, last

    def __repr__(self) -> str:
        return f"ObjectStore({self.uri!r})"

    def get(self, path: str, size_max: int | None = None) -> bytes | None:
        """A whole object, in one request; None when it is not there.

        Raises:
            ChunkCorrupt: It is larger than ``size_max`` bytes.
        """
        with suppress(_MissingError):
            return self._call("get", path, lambda medium: medium.get(path, None, size_max))
        return None

    def get_head(self, path: str, length: int) -> bytes | None:
        """The first ``length`` bytes of an object, fewer if it is shorter; None when it is not there."""
        with suppress(_MissingError):
            return self._call("get", path, lambda medium: medium.get(path, length, None))
        return None

    def get_into(self, path: str, buffer: memoryview) -> bool:
        """Read a whole object into ``buffer``, in one request; False when it is not there.

        After an error the buffer's content is undefined, but nobody writes into it any more.

        Raises:
            ChunkCorrupt: Its size is not that of the buffer.
        """
        with suppress(_MissingError):
            self._call("get", path, lambda medium: medium.get_into(path, buffer))
            return True
        return False

    def get_many(self, paths: Sequence[str], size_max: int) -> list[bytes | TierUnavailable | ChunkCorrupt | None]:
        """As ``get`` of each, up to ``READS_AT_ONCE`` at a time: in place of what it raises stands the error.

        All together are one call: what was not begun by its deadline is unavailable.
        """
        deadline = Deadline(self.timeout_s)

        def read(path: str) -> bytes | TierUnavailable | ChunkCorrupt | None:
            if deadline.left_s() <= 0:
                return TierUnavailable(f"object store: no time was left to get it. path={path} store={self.uri}")
            try:
                return self.get(path, size_max)
            except (TierUnavailable, ChunkCorrupt) as exc:
                return exc

        if len(paths) < 2:
            return [read(path) for path in paths]
        try:
            with ThreadPoolExecutor(min(READS_AT_ONCE, len(paths)), thread_name_prefix="object-store-get") as threads:
                return list(threads.map(read, paths))
        except RuntimeError as exc:
            raise TierUnavailable(f"object store: get failed: cannot start a thread: {exc}. store={self.uri}") from exc

    def put(self, path: str, data: bytes | memoryview) -> None:
        """Store an object in place of what is there; readers see all or nothing. After an error either may be there.

        ``data`` is the caller's again when this returns, however it returns.
        """
        self._call("put", path, lambda medium: medium.put(path, data, only_if_absent=False))

    def create(self, path: str, data: bytes | memoryview) -> bool | None:
        """Store an object unless there is one; False: there is one.

        None: there is one, which may be our own, because a request whose answer was lost was sent a second time. Who
        must know compares content.
        """
        try:
            self._call("create", path, lambda medium: medium.put(path, data, only_if_absent=True))
        except FileExistsError as exc:
            return None if isinstance(exc.__cause__, TakenUnsure) else False
        return True

    def head(self, path: str) -> ObjectInfo | None:
        """Size and age of an object, in one request; None when it is not there (or its bucket: S3 does not say)."""
        with suppress(_MissingError):
            return self._call("head", path, lambda medium: medium.head(path))
        return None

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Everything below ``prefix``, a page at a time; raises while it is iterated."""
        cursor: object | None = None
        while True:
            page = self._page(prefix, cursor)
            yield from page.objects
            cursor = page.cursor
            if cursor is None:
                return

    def _page(self, prefix: str, cursor: object | None) -> ListPage:
        return self._call("list", prefix, lambda medium: medium.page(prefix, cursor))

    def delete(self, paths: Sequence[str]) -> None:
        """Remove objects; those that are not there are fine."""
        if paths:
            shown = paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
            with suppress(_MissingError):
                self._call("delete", shown, lambda medium: medium.delete(list(paths)))

    def creates_atomically(self) -> bool:
        """Whether ``create`` refuses a name that is taken. Asked by creating an object twice, until it is so.

        What is known holds while one call asks again, and where the store does not answer that.
        """
        with self._state:
            known, now_s = self._is_atomic, self._monotonic()
            if known or (known is not None and now_s - self._asked_s < ASK_AGAIN_S):
                return known
            self._asked_s = now_s
        try:
            return self._ask_whether_atomic()
        except TierUnavailable as exc:
            if known is None:
                raise
            logger.info("whether the store still overwrites objects is not known; next_try_s=%g %s", ASK_AGAIN_S, exc)
            return known

    def _ask_whether_atomic(self) -> bool:
        path = probe_path()
        try:
            # A first refusal is one, too: nobody else has this name, so it met its own lost answer.
            is_atomic = not self.create(path, b"probe") or not self.create(path, b"probe")
        except TierUnavailable as exc:
            if exc.__cause__ is None or not is_without_create(exc.__cause__):
                raise
            is_atomic = False
        self._is_atomic = is_atomic
        with suppress(TierUnavailable):  # gc removes what is left of it
            self.delete([path])
        return is_atomic

    def close(self) -> None:
        """Refuse further calls, wait for those in flight (at most the deadline), give connections back. Idempotent."""
        with self._state:
            self._is_closed = True
            self._state.wait_for(lambda: self._in_flight_count == 0, self.timeout_s)
            client, self._client = self._client, None
        if client is not None:
            _close(client)

    def _call(self, operation: str, path: str, work: Callable[[Medium], T]) -> T:
        """Run one operation and put what fails into words; FileExistsError only if the object is there."""
        with self._state:
            if self._is_closed:
                raise Closed("the object store is closed")
            self._in_flight_count += 1
        try:
            with self._using() as medium:
                return work(medium)
        except TieredKVError:
            raise
        except Exception as exc:  # every backend has its own errors, and none of them may reach a request
            if operation not in ("put", "create", "list") and is_missing(exc):  # a list has no object that could be
                raise _MissingError from None
            if operation == "create" and is_taken(exc):
                raise FileExistsError(path) from exc
            words = self._scrub(explain(exc, self._location.path.partition("/")[0]))
            raise TierUnavailable(
                f"object store: {operation} failed: {words}. path={path} store={self.uri} timeout_s={self.timeout_s:g}"
            ) from exc
        finally:
            with self._state:
                self._in_flight_count -= 1
                self._state.notify_all()

    @contextmanager
    def _using(self) -> Iterator[Medium]:
        """The client for one call; the next one has another if this one's credentials or certificates are refused."""
        client = self._take()
        try:
            yield client.medium
        except Exception as exc:
            if is_of_identity(exc):
                self._leave(client)
            raise
        finally:
            with self._state:
                client.calls -= 1
                is_over = client.is_left and not client.calls
            if is_over:
                _close(client)

    def _take(self) -> _Client:
        with self._state:
            if self._client is not None and self._client.pid != os.getpid():
                _close(self._client)
                self._client = None
            if self._client is None:
                medium = _open_medium(self._location, self.timeout_s, self._concurrency)
                self._client = _Client(medium, os.getpid(), self._monotonic())
            self._client.calls += 1
            return self._client

    def _leave(self, client: _Client) -> None:
        with self._state:
            if self._client is not client or self._monotonic() - client.made_s < RENEW_S:
                return
            client.is_left, self._client = True, None
        logger.info("credentials and certificates are read anew with the next call. store=%s", self.uri)

    def _scrub(self, text: str) -> str:
        """Take out what a client may have put into its message: our secrets, and users and queries of addresses."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return re.sub(r"(https?://)\S*@|\?\S+", r"\1***", text)


def _close(client: _Client) -> None:
    """Close a client, or keep it where it is the parent's."""
    if client.pid != os.getpid():
        _INHERITED.append(client.medium)
        return
    try:
        client.medium.close()
    except Exception as exc:  # noqa: BLE001  # the client's own clean-up; nothing is lost with it
        logger.debug("the object store's client did not close. error=%s", type(exc).__name__)


def _secrets(location: Location) -> list[str]:
    """Values that no message may hold; long ones first, so that none hides inside another."""
    values = [location.options.get(name) for name in _SECRET_OPTIONS]
    nested = location.options.get("client_kwargs")
    if isinstance(nested, dict):
        values += [value for name, value in nested.items() if name.startswith("aws_")]
    token = location.options.get("token")
    if isinstance(token, dict):  # a service account of Google's
        values += [value for name, value in token.items() if "key" in name or "secret" in name or "token" in name]
    for part in str(location.options.get("connection_string", "")).split(";"):
        name, _, value = part.partition("=")
        if name.strip() in _SECRET_PARTS:
            values.append(value)
    return sorted({value for value in values if isinstance(value, str) and len(value) > 3}, key=len, reverse=True)


def _check_files(location: Location) -> None:
    """Clients say "unhandled exception" of a CA bundle that is missing, and send a path as if it were a token.

    Raises:
        MissingFile: An option names a file that cannot be read now; it is looked for again with the next call.
    """
    for name in ("verify", "token"):
        value = location.options.get(name)
        if not isinstance(value, str) or os.access(value, os.R_OK):
            continue
        if name == "verify" or (location.scheme == "gs" and value.startswith("/")):
            raise MissingFile(name)


def _open_medium(location: Location, timeout_s: float, concurrency: int) -> Medium:
    _check_files(location)  # then import what this scheme needs: asyncio is no small part of a server's start
    if location.scheme == "shared+file":
        return SharedDirectory(location.path, timeout_s)
    if location.scheme == "s3":
        from tiered_kv.tiers.object.s3 import open_s3  # noqa: PLC0415

        return open_s3(location, timeout_s, concurrency)
    if location.scheme == "gs":
        from tiered_kv.tiers.object.google import open_google  # noqa: PLC0415

        return open_google(location, timeout_s)
    if location.scheme == "az":
        from tiered_kv.tiers.object.azure import open_azure  # noqa: PLC0415

        return open_azure(location, timeout_s)
    return open_memory(location, timeout_s)
