"""A container of Azure Blob Storage as a medium: one request per operation, for a blob of up to 32 MiB.

Owns how adlfs is asked: it finds the account and the credentials, and what it made of them, Azure's own client, is
asked for the rest. Called by ``store.py`` only.

What is not obvious, read in adlfs 2026.8: its ``info`` lists where a blob is missing, its ``ls`` has no pages. Azure's
client waits 15 s before it tries again, longer than a call may take, and has all calls wait for one another while one
of them asks for a token.
"""

import inspect
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from tiered_kv.location import Location
from tiered_kv.tiers.object.errors import is_missing, status_of
from tiered_kv.tiers.object.loop_client import (
    BEYOND_THE_END,
    DELETED_AT_ONCE,
    PAGE_MAX,
    LoopClient,
    all_of,
    this_call,
    twice,
)
from tiered_kv.tiers.object.medium import ListPage, Medium, ObjectInfo, check_size
from tiered_kv.tiers.object.renewal import Renewal, identifying

T = TypeVar("T")

PARTS_AT_ONCE: Final = 4
"""Azure's client reads what is larger than 32 MiB, and writes what is larger than 64 MiB, in parts of 4 MiB."""

_requests = logging.getLogger(f"{__name__}.requests")
_requests.setLevel(logging.WARNING)  # it gets two lines at INFO for every request

ONCE: Final = {"retry_total": 0, "logger": _requests}
"""Of every request; see :func:`twice`."""


def open_azure(location: Location, timeout_s: float) -> Medium:
    """The container of a location; nothing is asked of it yet."""
    container, _, prefix = location.path.partition("/")
    return AzureMedium(LoopClient(lambda: _open_filesystem(location), timeout_s), container, prefix)


def _open_filesystem(location: Location) -> Any:
    from adlfs import AzureBlobFileSystem  # noqa: PLC0415  # slow to import: only processes that use one pay for it

    options = {**location.options, "use_listings_cache": False, "skip_instance_cache": True}
    filesystem = AzureBlobFileSystem(**options)
    found = filesystem.credential
    if hasattr(found, "get_token_info"):
        filesystem.credential = _SeldomTokens(found)
        filesystem.do_connect()
    return filesystem


class _SeldomTokens:
    """An identity's tokens, renewed as :class:`Renewal` does it: Azure's client waits for it while they still hold.

    Threads: the loop's.
    """

    def __init__(self, found: Any) -> None:
        self._found = found
        self._renewals: dict[object, Renewal[Any]] = {}
        self.get_token = (
            found.get_token
        )  # by which Azure's client knows credentials of this kind; it asks for the other
        self.close = found.close

    async def get_token_info(self, *scopes: str, options: Mapping[str, Any] | None = None) -> Any:
        """What Azure's client asks for.

        Raises:
            _TokenToCome: There is none yet. Waited for here, the time of all other calls would pass behind a lock of
                that client's, and what they had left at their turn would be too little to say why.
            NoIdentity: There is none.
        """

        async def ask() -> Any:
            return await self._found.get_token_info(*scopes, options=options)

        asked = options or {}
        renewal = Renewal(ask, _expires_within)
        if asked.get("claims"):  # which answer one refusal, and are not asked for again
            async with identifying():
                return await renewal.current()
        renewal = self._renewals.setdefault((scopes, *sorted(asked.items())), renewal)
        if not renewal.is_at_hand() and renewal not in this_call().awaited:
            raise _TokenToCome(renewal)
        return await renewal.current()


class _TokenToCome(Exception):
    """A request was not sent, or was refused, and a token for it is being asked for."""

    def __init__(self, renewal: Renewal[Any]) -> None:
        super().__init__()
        self.renewal = renewal


async def _ask(ask: Callable[[], Awaitable[T]]) -> T:
    """Send a request, as :func:`twice` does, with a token that is waited for before.

    Raises:
        NoIdentity: None came.
    """

    async def ask_with_token() -> T:
        while True:
            try:
                return await ask()
            except _TokenToCome as exc:
                renewal = exc.renewal
            async with identifying():
                await renewal.current()
            this_call().awaited.add(renewal)  # once: one that always expires too soon would be asked for until the end

    return await twice(ask_with_token)


def _expires_within(token: Any, seconds: float) -> bool:
    return bool(token.expires_on - time.time() < seconds)


class AzureMedium(Medium):
    """Block blobs in a container of Azure Blob Storage.

    Threads: any; coroutines run on fsspec's loop.
    """

    def __init__(self, client: LoopClient, container: str, prefix: str) -> None:
        self._client = client
        self._name = container
        self._prefix = f"{prefix}/" if prefix else ""

    def get(self, path: str, length: int | None, size_max: int | None) -> bytes:
        return self._client.run(lambda filesystem: _ask(lambda: self._get(filesystem, path, length, size_max)))

    async def _get(self, filesystem: Any, path: str, length: int | None, size_max: int | None) -> bytes:
        limits = {} if length is None else {"offset": 0, "length": length}
        try:
            stream = await self._container(filesystem).download_blob(
                self._prefix + path, max_concurrency=PARTS_AT_ONCE, **limits, **ONCE
            )
        except Exception as exc:
            if length is not None and status_of(exc) == BEYOND_THE_END:
                return b""
            raise
        if length is None:
            check_size(path, int(stream.size), size_max)
        return bytes(await stream.readall())

    def put(self, path: str, data: bytes | memoryview, only_if_absent: bool) -> None:
        whole = bytes(data)  # a request that was given up may still send it
        self._client.run(lambda filesystem: _ask(lambda: self._put(filesystem, path, whole, only_if_absent)))

    async def _put(self, filesystem: Any, path: str, data: bytes, only_if_absent: bool) -> None:
        await self._container(filesystem).upload_blob(
            self._prefix + path,
            data,
            overwrite=not only_if_absent,
            max_concurrency=PARTS_AT_ONCE,
            raw_request_hook=_send_body_once if only_if_absent else None,
            **ONCE,
        )

    def head(self, path: str) -> ObjectInfo:
        return self._client.run(lambda filesystem: _ask(lambda: self._head(filesystem, path)))

    async def _head(self, filesystem: Any, path: str) -> ObjectInfo:
        blob = self._container(filesystem).get_blob_client(self._prefix + path)
        return _info(path, await blob.get_blob_properties(**ONCE))

    def page(self, prefix: str, cursor: object | None) -> ListPage:
        return self._client.run(lambda filesystem: _ask(lambda: self._page(filesystem, prefix, cursor)))

    async def _page(self, filesystem: Any, prefix: str, cursor: object | None) -> ListPage:
        listed = self._container(filesystem).list_blobs(
            name_starts_with=self._prefix + prefix, results_per_page=PAGE_MAX, **ONCE
        )
        pages = listed.by_page(cursor)
        objects = [_info(item.name.removeprefix(self._prefix), item) async for item in await anext(pages)]
        return ListPage(objects, pages.continuation_token or None)

    def delete(self, paths: Sequence[str]) -> None:
        for start in range(0, len(paths), DELETED_AT_ONCE):
            part = paths[start : start + DELETED_AT_ONCE]
            self._client.run(partial(self._delete, paths=part))

    async def _delete(self, filesystem: Any, paths: Sequence[str]) -> None:
        container = self._container(filesystem)

        def delete_one(path: str) -> Any:
            return _ask(lambda: container.delete_blob(self._prefix + path, **ONCE))

        await all_of([delete_one(path) for path in paths], is_missing)

    def close(self) -> None:
        self._client.close(_close)

    def _container(self, filesystem: Any) -> Any:
        return filesystem.service_client.get_container_client(self._name)


def _send_body_once(request: Any) -> None:
    """Make a stream of a request's body: aiohttp sends bytes again without a word, and a create would meet its own."""
    asked = request.http_request
    if isinstance(asked.data, bytes):
        asked.data = _pieces(asked.data)


async def _pieces(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def _close(filesystem: Any) -> None:
    await filesystem.service_client.close()
    end = getattr(filesystem.credential, "close", None)
    ended = end() if end is not None else None
    if inspect.isawaitable(ended):
        await ended


def _info(path: str, properties: Any) -> ObjectInfo:
    return ObjectInfo(path, int(properties.size), properties.last_modified.timestamp())
