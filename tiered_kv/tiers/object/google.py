"""A Google Cloud Storage bucket as a medium: one request of the JSON API per operation.

Owns how gcsfs is asked. Called by ``store.py`` only.

What is not obvious, read in gcsfs 2026.10 and measured: its file system for ``gs://`` asks over gRPC which kind of
bucket it is before the first request, and waits 60 s for an answer where there is no gRPC (a proxy, an emulator); the
one it is derived from never asks. Its ``info`` also lists, and a list costs twelve times what a read of metadata does;
its ``ls`` fetches all pages of a directory in one call. A request that fails is tried six times in a minute, refused
credentials too. A missing bucket is told like a missing object. Credentials are renewed on the loop, which would stand
still meanwhile, so a thread does it (``renewal.py``); where it finds none it asks without any. Its own uploads end
their lines in LF, not in CRLF as the standard has it: an object that ends in CR loses that byte where a server takes
both, and one that holds their boundary is refused.
"""

import asyncio
import json
import os
import secrets
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final

from tiered_kv.location import Location
from tiered_kv.tiers.object.errors import (
    BadKeyFile,
    MissingBucket,
    NoGoogleKeys,
    NoIdentity,
    NotGoogles,
    Refused,
    is_page,
    status_of,
)
from tiered_kv.tiers.object.loop_client import BEYOND_THE_END, DELETED_AT_ONCE, PAGE_MAX, LoopClient, all_of, twice
from tiered_kv.tiers.object.marks import Marks
from tiered_kv.tiers.object.medium import CallRunner, ListPage, Medium, ObjectInfo, check_size
from tiered_kv.tiers.object.renewal import Renewal, identifying

OF_GOOGLE: Final = frozenset({"x-guploader-uploadid", "etag", "x-goog-generation", "x-goog-hash"})
"""By which an answer may be known (``marks.py``). The first is on all of Google's, its 404 included (seen in
https://github.com/firebase/firebase-tools/pull/3647); servers of others send some of these with some answers."""

LIST: Final = "b/{}/o"
"""The path of a list of a bucket's objects."""

_answered: ContextVar[Mapping[str, str]] = ContextVar("headers of the answer to a request")


def open_google(location: Location, timeout_s: float) -> Medium:
    """The bucket of a location; nothing is asked of it yet."""
    bucket, _, prefix = location.path.partition("/")
    return GoogleMedium(LoopClient(lambda: _open_filesystem(location, timeout_s), timeout_s), bucket, prefix)


def _open_filesystem(location: Location, timeout_s: float) -> Any:
    from gcsfs.core import GCSFileSystem  # noqa: PLC0415  # slow to import: only processes that use a bucket pay for it

    token = location.options.get("token")
    options = {**location.options, "use_listings_cache": False, "skip_instance_cache": True}
    options["session_kwargs"] = _noting_headers(location.options.get("session_kwargs"))
    try:
        filesystem = GCSFileSystem(**options)
    except (KeyError, ValueError) as exc:
        if isinstance(token, str) and os.path.exists(token):
            raise BadKeyFile(token) from exc
        raise
    once = getattr(GCSFileSystem._request, "__wrapped__", GCSFileSystem._request)
    has_keys = filesystem.credentials.credentials is not None
    keys = _renew_in_thread(filesystem.credentials, timeout_s) if has_keys else None
    marks = Marks(OF_GOOGLE)

    async def request(*args: Any, **options: Any) -> Any:
        async def ask() -> Any:
            _answered.set({})
            try:
                answer = await once(filesystem, *args, **options)
            except FileNotFoundError as exc:
                if marks.are_missing("404", _answered.get()):
                    raise NotGoogles("a 404 has none of the store's headers") from exc
                raise
            except Exception as exc:
                is_forbidden = isinstance(exc, OSError) and str(exc).startswith("Forbidden:")
                if not has_keys and token != "anon" and (is_forbidden or status_of(exc) == 401):
                    raise NoIdentity(NoGoogleKeys()) from exc
                if is_forbidden:
                    raise Refused(403) from exc
                raise
            status, headers, _, content = answer
            _refuse_page(status, headers)
            if marks.are_missing(_kind_of(*args[:2]), headers) and not _is_list(args[1], content):
                raise NotGoogles("an answer has none of the store's headers")
            return answer

        if keys is not None:
            async with identifying():
                await keys.current()
        return await twice(ask)

    filesystem._request = request
    return filesystem


def _noting_headers(given: object) -> dict[str, Any]:
    """Arguments of the client's HTTP session that have it note an answer's headers: of a 404 gcsfs tells none."""
    from aiohttp import TraceConfig  # noqa: PLC0415  # as above

    async def note(_session: object, _context: object, ended: Any) -> None:
        _answered.set(ended.response.headers)  # in the task that asks

    trace = TraceConfig()
    trace.on_request_end.append(note)
    mine = dict(given) if isinstance(given, dict) else {}
    return {**mine, "trace_configs": [*mine.get("trace_configs", []), trace]}


def _kind_of(method: str, path: str) -> str:
    """What was asked for: gcsfs names the objects beside the path, but for their content."""
    return f"{method} {path if '{' in path else 'content'}"


def _is_list(path: str, content: bytes) -> bool:
    """Whether an answer is a list, by its own word: of a store, also of one behind a proxy that drops headers now."""
    if path != LIST:
        return False
    try:
        said = json.loads(content)
    except ValueError:
        return False
    return isinstance(said, dict) and said.get("kind") == "storage#objects"


def _renew_in_thread(keys: Any, timeout_s: float) -> Renewal[None]:
    """Renew gcsfs' credentials in a thread; gcsfs itself does it no more.

    Nothing ends that thread but what it waits for, so there is one.
    """
    refresh = keys.maybe_refresh
    keys.maybe_refresh = lambda *_, **__: None  # asked on the loop, before each request
    runner = CallRunner(timeout_s)
    running: Future[Exception | None] | None = None

    def work() -> Exception | None:
        try:
            refresh()
        except Exception as exc:  # noqa: BLE001  # raised where it is waited for, if anybody still does
            said = exc.__cause__  # gcsfs calls whatever it is a 401
            return said if isinstance(said, Exception) else exc
        return None

    async def renew() -> None:
        nonlocal running
        if running is None or running.done():
            running = runner.begin(work)
        failure = await asyncio.shield(asyncio.wrap_future(running))
        if failure is not None:
            raise failure

    def expire_within(_: None, seconds: float) -> bool:
        end = keys.credentials.expiry  # UTC, though it does not say so
        return end is not None and end.replace(tzinfo=UTC) - datetime.now(UTC) < timedelta(seconds=seconds)

    return Renewal(renew, expire_within)


def _refuse_page(status: int, headers: Mapping[str, str]) -> None:
    """Refuse a success that Google does not say so: with an object it tells the ETag, all else is JSON, or nothing.

    Raises:
        NotGoogles: It is a page for people. Of a put or a deletion that was never done, or in place of a whole blob.
    """
    if is_page(status, headers.get("Content-Type", ""), has_etag="ETag" in headers):
        raise NotGoogles("a page came in place of the answer")


class GoogleMedium(Medium):
    """Objects in a bucket of Google Cloud Storage.

    Threads: any; coroutines run on fsspec's loop.
    """

    def __init__(self, client: LoopClient, bucket: str, prefix: str) -> None:
        self._client = client
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""

    def get(self, path: str, length: int | None, size_max: int | None) -> bytes:
        return self._client.run(lambda filesystem: self._get(filesystem, path, length, size_max))

    async def _get(self, filesystem: Any, path: str, length: int | None, size_max: int | None) -> bytes:
        # One byte more than there may be tells what is too large without fetching it.
        end = size_max + 1 if length is None and size_max is not None else length
        limits = {} if end is None else {"start": 0, "end": end}
        try:
            data = bytes(await filesystem._cat_file(self._full(path), **limits))
        except Exception as exc:
            if end is None or status_of(exc) != BEYOND_THE_END:
                raise
            data = b""  # an object without a byte has no range
        check_size(path, len(data), size_max)
        return data

    def put(self, path: str, data: bytes | memoryview, only_if_absent: bool) -> None:
        boundary = secrets.token_hex(16)
        whole = _multipart(self._prefix + path, data, boundary)  # a copy: a request that was given up may still send it
        condition = {"ifGenerationMatch": 0} if only_if_absent else {}
        try:
            self._client.run(lambda filesystem: self._put(filesystem, whole, boundary, condition))
        except FileNotFoundError as exc:
            raise MissingBucket(self._bucket) from exc

    def _put(self, filesystem: Any, whole: bytes, boundary: str, condition: dict[str, int]) -> Coroutine[Any, Any, Any]:
        asked: Coroutine[Any, Any, Any] = filesystem._call(
            "POST",
            f"{filesystem._location}/upload/storage/v1/b/{{}}/o",
            self._bucket,
            uploadType="multipart",
            headers={"Content-Type": f'multipart/related; boundary="{boundary}"'},
            data=whole,
            **condition,
        )
        return asked

    def head(self, path: str) -> ObjectInfo:
        return _info(path, self._client.run(lambda filesystem: self._head(filesystem, path)))

    def _head(self, filesystem: Any, path: str) -> Coroutine[Any, Any, Any]:
        place = (self._bucket, self._prefix + path)
        asked: Coroutine[Any, Any, Any] = filesystem._call(
            "GET", "b/{}/o/{}", *place, json_out=True, fields="size,updated"
        )
        return asked

    def page(self, prefix: str, cursor: object | None) -> ListPage:
        try:
            found = self._client.run(lambda filesystem: self._page(filesystem, prefix, cursor))
        except FileNotFoundError as exc:
            raise MissingBucket(self._bucket) from exc
        objects = [_info(item["name"].removeprefix(self._prefix), item) for item in found.get("items", [])]
        return ListPage(objects, found.get("nextPageToken") or None)

    def _page(self, filesystem: Any, prefix: str, cursor: object | None) -> Coroutine[Any, Any, Any]:
        asked: Coroutine[Any, Any, Any] = filesystem._call(
            "GET",
            LIST,
            self._bucket,
            json_out=True,
            prefix=self._prefix + prefix,
            pageToken=cursor,
            maxResults=PAGE_MAX,
            fields="kind,items(name,size,updated),nextPageToken",
        )
        return asked

    def delete(self, paths: Sequence[str]) -> None:
        for start in range(0, len(paths), DELETED_AT_ONCE):
            part = [self._full(path) for path in paths[start : start + DELETED_AT_ONCE]]
            self._client.run(partial(_delete, paths=part))

    def close(self) -> None:
        self._client.close(_close)

    def _full(self, path: str) -> str:
        return f"{self._bucket}/{self._prefix}{path}"


def _multipart(name: str, data: bytes | memoryview, boundary: str) -> bytes:
    """The body of an upload: name and object in one request, so that a create is refused or done as a whole.

    Format: RFC 2046, section 5.1; https://cloud.google.com/storage/docs/uploading-objects, "multipart".
    """
    before = (
        f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n"
        f"{json.dumps({'name': name})}\r\n"
        f"--{boundary}\r\nContent-Type: application/octet-stream\r\n\r\n"
    )
    return b"".join([before.encode(), data, f"\r\n--{boundary}--\r\n".encode()])


async def _delete(filesystem: Any, paths: list[str]) -> None:
    await all_of([filesystem._rm_file(path) for path in paths], lambda exc: isinstance(exc, FileNotFoundError))


async def _close(filesystem: Any) -> None:
    if filesystem.session is not None:
        await filesystem.session.close()


def _info(path: str, found: dict[str, Any]) -> ObjectInfo:
    return ObjectInfo(path, int(found.get("size", 0)), datetime.fromisoformat(found["updated"]).timestamp())
