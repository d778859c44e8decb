"""How objects are reached on each kind of store: S3, other fsspec file systems, a directory that machines share.

Owns one class per kind, all with the five operations of ``Medium``, and how a call is kept within its deadline. Raises
whatever the medium raises: ``ObjectStore``, its only caller, turns that into words. Imports no client: a file system
object is handed in, so that only ``tiers/object_store.py`` depends on fsspec.
"""

import asyncio
import contextlib
import datetime
import errno
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from tiered_kv.errors import ChunkCorrupt
from tiered_kv.tiers.loan import PIECE_BYTES, Loan, LoanBody
from tiered_kv.tiers.object_errors import IncompleteRead, code_of, is_conflict, is_missing, status_of

T = TypeVar("T")

STUCK_MAX: Final = 64
"""Calls that never came back, e.g. on a dead mount: beyond it new ones fail at once instead of leaving threads."""

DELETE_BATCH: Final = 1000
CREATE_TRIES: Final = 3
CONFLICT_WAIT_S: Final = 0.05


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
class Page:
    """A part of a list and where the next one starts; None: this was the last."""

    objects: list[ObjectInfo]
    cursor: object | None


class Medium(Protocol):
    """What ``ObjectStore`` needs of a store; paths are relative to its root.

    Missing objects are FileNotFoundError or the store's own way of saying so (``object_errors.is_missing``).
    """

    def get(self, path: str, length: int | None, size_max: int | None) -> bytes: ...

    def get_into(self, path: str, buffer: memoryview) -> None: ...

    def put(self, path: str, data: bytes | memoryview, only_if_absent: bool) -> None: ...

    def head(self, path: str) -> ObjectInfo: ...

    def page(self, prefix: str, cursor: object | None) -> Page: ...

    def delete(self, paths: Sequence[str]) -> None: ...

    def close(self) -> None: ...


class CallRunner:
    """Runs calls that cannot be cancelled, each in a thread of its own, so that a hang costs the caller its deadline.

    Threads: any. A call that comes back too late is forgotten; it holds no buffer of the caller.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._running_count = 0

    def run(self, function: Callable[..., T], *args: object) -> T:
        with self._lock:
            if self._running_count >= STUCK_MAX:
                raise TimeoutError(f"{self._running_count} earlier calls did not come back")
            self._running_count += 1
        future: Future[T] = Future()

        def work() -> None:
            try:
                future.set_result(function(*args))
            except BaseException as exc:  # noqa: BLE001  # raised again in the caller's thread
                future.set_exception(exc)
            finally:
                with self._lock:
                    self._running_count -= 1

        try:
            threading.Thread(target=work, name="object-store-call", daemon=True).start()
        except RuntimeError as exc:
            with self._lock:
                self._running_count -= 1
            raise OSError(errno.EAGAIN, f"cannot start a thread: {exc}") from exc
        return future.result(self._timeout_s)


def run_on_loop(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
    """Run a coroutine on another thread's loop; what is not done in time is cancelled.

    Raises:
        TimeoutError: It was not done in time.
    """
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        return future.result(timeout_s)
    except BaseException:
        future.cancel()
        raise


def check_size(path: str, size_bytes: int, size_max: int | None) -> None:
    """Refuse an object that is larger than it can be, before its bytes are fetched."""
    if size_max is not None and size_bytes > size_max:
        raise ChunkCorrupt(f"object is larger than expected. observed={size_bytes} expected_max={size_max} path={path}")


def check_expected(path: str, size_bytes: int, expected: int) -> None:
    """Refuse an object that has not the size its reader made room for."""
    if size_bytes != expected:
        raise ChunkCorrupt(f"blob has the wrong size. observed={size_bytes} expected={expected} path={path}")


class S3Medium:
    """Objects in an S3 bucket through s3fs' own call function: one request per operation.

    The path-like methods of s3fs are not used: they ask for sizes first and LIST after a miss.
    """

    def __init__(self, filesystem: Any, loop: asyncio.AbstractEventLoop, root: str, timeout_s: float) -> None:
        self._fs = filesystem
        self._loop = loop
        self._timeout_s = timeout_s
        self._bucket, _, prefix = root.partition("/")
        self._prefix = f"{prefix}/" if prefix else ""

    def get(self, path: str, length: int | None, size_max: int | None) -> bytes:
        return self._run(self._get(path, length, size_max))

    async def _get(self, path: str, length: int | None, size_max: int | None) -> bytes:
        answer = await self._open(path, length)
        if answer is None:
            return b""
        body = answer["Body"]
        try:
            expected = int(answer["ContentLength"])
            if length is None:
                check_size(path, expected, size_max)
            data = bytes(await body.read())
        finally:
            body.close()
        if len(data) != expected:
            raise IncompleteRead(f"observed={len(data)} expected={expected}")
        return data if length is None else data[:length]

    def get_into(self, path: str, buffer: memoryview) -> None:
        with Loan(buffer) as loan:
            self._run(self._get_into(path, loan))

    async def _get_into(self, path: str, loan: Loan) -> None:
        # A range although it is the whole: Ceph's gateway sends that a tenth sooner (docs/decisions/0006).
        answer = await self._open(path, loan.size_bytes)
        if answer is None:
            check_expected(path, 0, loan.size_bytes)
            return
        body, offset = answer["Body"], 0
        try:
            check_expected(path, _whole_bytes(answer), loan.size_bytes)
            while piece := await body.read(PIECE_BYTES):
                loan.take(offset, piece)
                offset += len(piece)
        finally:
            body.close()
        if offset != loan.size_bytes:
            raise IncompleteRead(f"observed={offset} expected={loan.size_bytes}")

    async def _open(self, path: str, length: int | None) -> Any:
        """The answer to a GET of the first ``length`` bytes; None for an empty object, which has no first byte."""
        wanted = {} if length is None else {"Range": f"bytes=0-{length - 1}"}
        try:
            return await self._call("get_object", path, **wanted)
        except OSError as exc:
            if length is not None and (code_of(exc) == "InvalidRange" or status_of(exc) == 416):
                return None
            raise

    def put(self, path: str, data: bytes | memoryview, only_if_absent: bool) -> None:
        condition = {"IfNoneMatch": "*"} if only_if_absent else {}
        if len(data) <= PIECE_BYTES:
            self._run(self._put(path, bytes(data), condition))
            return
        with Loan(memoryview(data)) as loan:
            self._run(self._put(path, LoanBody(loan), condition))

    async def _put(self, path: str, data: bytes | LoanBody, condition: Mapping[str, str]) -> None:
        for left in reversed(range(CREATE_TRIES)):
            try:
                await self._call("put_object", path, Body=data, **condition)
                return
            except OSError as exc:
                if not (left and is_conflict(exc)):
                    raise
            await asyncio.sleep(CONFLICT_WAIT_S)

    def head(self, path: str) -> ObjectInfo:
        answer = self._run(self._call("head_object", path))
        return ObjectInfo(path, int(answer["ContentLength"]), answer["LastModified"].timestamp())

    def page(self, prefix: str, cursor: object | None) -> Page:
        more = {} if cursor is None else {"ContinuationToken": cursor}
        answer = self._run(
            self._fs._call_s3("list_objects_v2", Bucket=self._bucket, Prefix=self._prefix + prefix, **more)
        )
        objects = [
            ObjectInfo(item["Key"].removeprefix(self._prefix), int(item["Size"]), item["LastModified"].timestamp())
            for item in answer.get("Contents", [])
        ]
        return Page(objects, answer["NextContinuationToken"] if answer.get("IsTruncated") else None)

    def delete(self, paths: Sequence[str]) -> None:
        if len(paths) == 1:
            self._run(self._call("delete_object", paths[0]))
            return
        for start in range(0, len(paths), DELETE_BATCH):
            keys = [{"Key": self._prefix + path} for path in paths[start : start + DELETE_BATCH]]
            answer = self._run(
                self._fs._call_s3("delete_objects", Bucket=self._bucket, Delete={"Objects": keys, "Quiet": True})
            )
            failed = [e for e in answer.get("Errors", []) if e.get("Code") != "NoSuchKey"]
            if failed:
                first = failed[0]
                raise OSError(f"{len(failed)} of {len(keys)} objects were not deleted, the first with {first['Code']}")

    def close(self) -> None:
        creator = getattr(self._fs, "_s3creator", None)
        if creator is not None:
            run_on_loop(self._loop, creator.__aexit__(None, None, None), self._timeout_s)

    def _call(self, method: str, path: str, **arguments: object) -> Coroutine[Any, Any, Any]:
        call: Coroutine[Any, Any, Any] = self._fs._call_s3(
            method, Bucket=self._bucket, Key=self._prefix + path, **arguments
        )
        return call

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return run_on_loop(self._loop, coroutine, self._timeout_s)


def _whole_bytes(answer: Mapping[str, Any]) -> int:
    """Size of the whole object, from the answer to a GET of a part of it; some stores send all of it instead."""
    total = str(answer.get("ContentRange", "")).rpartition("/")[2]
    return int(total) if total.isdecimal() else int(answer["ContentLength"])


class FilesystemMedium:
    """Objects in any other fsspec file system: Google, Azure, memory.

    A file system that is asynchronous inside runs on its own loop, any other in threads.
    """

    _create_lock = threading.Lock()
    """fsspec's memory file system looks and then writes: this makes its create atomic within the process."""

    def __init__(self, filesystem: Any, root: str, timeout_s: float) -> None:
        self._fs = filesystem
        self._root = root.strip("/")
        self._timeout_s = timeout_s
        self._runner = CallRunner(timeout_s)

    def get(self, path: str, length: int | None, size_max: int | None) -> bytes:
        if length is None:
            data = self._call("cat_file", self._full(path))
            check_size(path, len(data), size_max)
        else:
            data = self._call("cat_file", self._full(path), start=0, end=length)
        return bytes(data)

    def get_into(self, path: str, buffer: memoryview) -> None:
        data = self.get(path, None, None)
        check_expected(path, len(data), len(buffer))
        buffer[:] = data

    def put(self, path: str, data: bytes | memoryview, only_if_absent: bool) -> None:
        whole = bytes(data)  # a call that was given up goes on with it
        with self._create_lock if only_if_absent and not self._is_async else contextlib.nullcontext():
            mode = {"mode": "create"} if only_if_absent else {}
            self._call("pipe_file", self._full(path), whole, **mode)

    def head(self, path: str) -> ObjectInfo:
        found = self._call("info", self._full(path))
        if found.get("type") == "directory":
            raise FileNotFoundError(path)
        return ObjectInfo(path, int(found["size"]), _modified_s(found))

    def page(self, prefix: str, cursor: object | None) -> Page:
        """One directory per page: the cursor holds those still to be read."""
        pending = list(cursor) if isinstance(cursor, tuple) else [prefix.rpartition("/")[0]]
        directory = pending.pop()
        try:
            found = self._call("ls", self._full(directory), detail=True)
        except FileNotFoundError as exc:
            if not is_missing(exc):
                raise
            found = []
        objects: list[ObjectInfo] = []
        for item in found:
            path = str(item["name"]).strip("/").removeprefix(f"{self._root}/").rstrip("/")
            if item["type"] == "directory":
                if path != directory and (path.startswith(prefix) or prefix.startswith(f"{path}/")):
                    pending.append(path)
            elif path.startswith(prefix):
                objects.append(ObjectInfo(path, int(item["size"]), _modified_s(item)))
        return Page(sorted(objects, key=lambda info: info.path), tuple(pending) or None)

    def delete(self, paths: Sequence[str]) -> None:
        for path in paths:
            try:
                self._call("rm_file", self._full(path))
            except FileNotFoundError as exc:
                if not is_missing(exc):
                    raise

    def close(self) -> None:
        """Nothing to give back: fsspec closes a file system's connections with the object."""

    @property
    def _is_async(self) -> bool:
        return bool(getattr(self._fs, "async_impl", False))

    def _call(self, method: str, *args: object, **options: object) -> Any:
        if self._is_async:
            return run_on_loop(self._fs.loop, getattr(self._fs, f"_{method}")(*args, **options), self._timeout_s)
        return self._runner.run(lambda: getattr(self._fs, method)(*args, **options))

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root


def _modified_s(info: Mapping[str, Any]) -> float:
    """When an object was written, from the names that file systems have for it."""
    for name in ("LastModified", "last_modified", "mtime", "updated", "created"):
        value = info.get(name)
        if isinstance(value, datetime.datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, str):
            return datetime.datetime.fromisoformat(value).timestamp()
    raise OSError("the store does not say when an object was written")
