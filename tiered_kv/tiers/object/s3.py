"""An S3 bucket as a medium: one request per operation, through s3fs' own call function.

Owns how s3fs is configured and how a blob gets from the caller's memory to the socket and back (``Loan``). Called by
``store.py`` only.

What is not obvious, measured against real servers: s3fs retries besides botocore, sends checksums as trailers that some
servers store as content, signs the payload a second time, and asks HEAD and LIST around a plain GET. All of it is off.
A whole blob in fresh memory costs more than its transfer (docs/decisions/0006-object-client.md), hence the loan.
"""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from tiered_kv.location import Location
from tiered_kv.tiers.object.errors import IncompleteRead, code_of, is_conflict, status_of
from tiered_kv.tiers.object.medium import ListPage, Medium, ObjectInfo, check_expected, check_size, run_on_loop

T = TypeVar("T")

DELETE_BATCH: Final = 1000
CREATE_TRIES: Final = 3
CONFLICT_WAIT_S: Final = 0.05
_TRIES: Final = 2

PIECE_BYTES: Final = 256 << 10
"""Small enough to come from memory that was used a moment ago, large enough that the turns of a loop do not count."""


def open_s3(location: Location, timeout_s: float, concurrency: int) -> Medium:
    """The bucket of a location; nothing is asked of it yet."""
    import fsspec.asyn  # noqa: PLC0415  # slow to import: only processes that use a bucket pay for it
    import s3fs  # noqa: PLC0415

    filesystem = s3fs.S3FileSystem(**s3_options(location, timeout_s, concurrency))
    filesystem.retries = 1  # botocore retries by itself; s3fs would repeat each of its rounds five times
    return S3Medium(filesystem, fsspec.asyn.get_loop(), location.path, timeout_s)


def s3_options(location: Location, timeout_s: float, concurrency: int) -> dict[str, Any]:
    """Arguments of ``S3FileSystem`` for a location. Public for tests: what is in here was measured."""
    given = dict(location.options)
    client: dict[str, Any] = dict(_mapping(given.pop("client_kwargs", None)))
    config: dict[str, Any] = dict(_mapping(given.pop("config_kwargs", None)))
    if "region" in given:
        client["region_name"] = given.pop("region")
    if "verify" in given:
        client["verify"] = given.pop("verify")
    endpoint = given.get("endpoint_url") or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    addressing = given.pop("addressing_style", "path" if endpoint else "auto")
    lean: dict[str, Any] = {
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "connect_timeout": timeout_s / 3,
        "read_timeout": timeout_s / 2,
        "retries": {"mode": "standard", "total_max_attempts": _TRIES},
        "max_pool_connections": concurrency,
    }
    s3 = {"payload_signing_enabled": False, "addressing_style": addressing, **_mapping(config.pop("s3", None))}
    return {
        **given,
        "client_kwargs": client,
        "config_kwargs": {**lean, **config, "s3": s3},
        "use_listings_cache": False,
        "skip_instance_cache": True,
        "asynchronous": True,  # its loop is run by us, with a deadline for each call
    }


class Loan:
    """A piece of the caller's memory until the ``with`` block ends.

    Threads: the block is one thread, ``take`` and ``give`` may be another.

    Raises:
        asyncio.CancelledError: From ``take`` and ``give``, once the loan has ended: whoever asks was given up.
    """

    def __init__(self, memory: memoryview) -> None:
        self._lock = threading.Lock()
        self._memory: memoryview | None = memory
        self.size_bytes = len(memory)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._memory = None

    def take(self, offset: int, data: bytes) -> None:
        """Copy ``data`` into the memory."""
        with self._lock:
            if self._memory is None:
                raise asyncio.CancelledError
            self._memory[offset : offset + len(data)] = data

    def give(self, offset: int, length: int) -> bytes:
        """Copy at most ``length`` bytes out of the memory."""
        with self._lock:
            if self._memory is None:
                raise asyncio.CancelledError
            return bytes(self._memory[offset : offset + length])


class LoanBody:
    """A request's body out of a loan: a file for botocore, which measures and may hash it, pieces for aiohttp.

    Not an ``io.IOBase``: aiohttp would read that in another thread, 64 KiB at a time.
    """

    def __init__(self, loan: Loan) -> None:
        self._loan = loan
        self._offset = 0

    def __len__(self) -> int:
        return self._loan.size_bytes

    def read(self, size: int | None = -1) -> bytes:
        length = self._loan.size_bytes if size is None or size < 0 else size
        data = self._loan.give(self._offset, length)
        self._offset += len(data)
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._offset, os.SEEK_END: self._loan.size_bytes}[whence]
        self._offset = max(0, start + offset)
        return self._offset

    def tell(self) -> int:
        return self._offset

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """All of it, from the beginning: a request that is tried again starts anew."""
        for offset in range(0, self._loan.size_bytes, PIECE_BYTES):
            yield self._loan.give(offset, PIECE_BYTES)


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

    def page(self, prefix: str, cursor: object | None) -> ListPage:
        more = {} if cursor is None else {"ContinuationToken": cursor}
        answer = self._run(
            self._fs._call_s3("list_objects_v2", Bucket=self._bucket, Prefix=self._prefix + prefix, **more)
        )
        objects = [
            ObjectInfo(item["Key"].removeprefix(self._prefix), int(item["Size"]), item["LastModified"].timestamp())
            for item in answer.get("Contents", [])
        ]
        return ListPage(objects, answer["NextContinuationToken"] if answer.get("IsTruncated") else None)

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


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
