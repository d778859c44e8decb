"""An S3 bucket as a medium: one request per operation.

Owns how s3fs is configured, what goes through its loop and what through threads. Called by ``store.py`` only.

    anything but blobs   s3fs' client on fsspec's loop (``loop_calls.py``), which also has the credentials
    blobs                botocore's client in the caller's thread, over connections of ours (``thread_bodies.py``), or
                         s3fs' client, too (``loop_bodies.py``), where ``s3_signer.py`` finds a setting that asks for it

What is not obvious, measured against real servers: s3fs retries besides botocore, sends checksums as trailers that some
servers store as content, signs the payload a second time, and asks HEAD and LIST around a plain GET. All of it is off.
"""

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from tiered_kv.location import Location
from tiered_kv.tiers.object.errors import IncompleteRead, NoClientYet, NotAStore, is_missing, is_unknown
from tiered_kv.tiers.object.loop_client import DELETED_AT_ONCE, all_of
from tiered_kv.tiers.object.medium import ListPage, Medium, ObjectInfo, check_size
from tiered_kv.tiers.object.s3_answers import check_list, first_bytes, is_beyond_the_end, is_by_a_store

if TYPE_CHECKING:
    from tiered_kv.tiers.object.loop_calls import LoopCalls

logger = logging.getLogger(__name__)

DELETE_BATCH: Final = 1000
_TRIES: Final = 2


def open_s3(location: Location, timeout_s: float, concurrency: int) -> Medium:
    """The bucket of a location; nothing is asked of it yet."""
    import fsspec.asyn  # noqa: PLC0415  # slow to import: only processes that use a bucket pay for it
    import s3fs  # noqa: PLC0415

    from tiered_kv.tiers.object.loop_calls import LoopCalls  # noqa: PLC0415
    from tiered_kv.tiers.object.s3_session import SeldomSession  # noqa: PLC0415

    filesystem = s3fs.S3FileSystem(**s3_options(location, timeout_s, concurrency))
    filesystem.session = SeldomSession(**filesystem.kwargs)
    bucket, _, prefix = location.path.partition("/")
    return S3Medium(LoopCalls(filesystem, fsspec.asyn.get_loop(), bucket, timeout_s), prefix)


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


class Bodies(Protocol):
    """A way to move blobs; ``path`` is for messages."""

    def get_into(self, key: str, path: str, buffer: memoryview) -> None: ...

    def put(self, key: str, data: memoryview, condition: Mapping[str, str]) -> None: ...

    def close(self) -> None: ...


class S3Medium(Medium):
    """Objects in an S3 bucket: blobs in the caller's thread, all else on s3fs' loop; one request per operation.

    The path-like methods of s3fs are not used: they ask for sizes first and LIST after a miss.
    """

    def __init__(self, calls: "LoopCalls", prefix: str) -> None:
        self._calls = calls
        self._prefix = f"{prefix}/" if prefix else ""
        self._bodies: Bodies | None = None  # what fits the location, chosen with the first blob
        self._choosing = threading.Lock()
        self._deletes_batches = True

    def get(self, path: str, length: int | None, size_max: int | None) -> bytes:
        return self._calls.run(self._get(path, length, size_max))

    async def _get(self, path: str, length: int | None, size_max: int | None) -> bytes:
        wanted = {} if length is None else {"Range": first_bytes(length)}
        try:
            answer = await self._calls.call("get_object", Key=self._prefix + path, **wanted)
        except OSError as exc:
            if length is not None and is_beyond_the_end(exc):
                return b""
            raise
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
        with self._calls.one_deadline():
            self._choose_bodies().get_into(self._prefix + path, path, buffer)

    def put(self, path: str, data: bytes | memoryview, only_if_absent: bool) -> None:
        condition = {"IfNoneMatch": "*"} if only_if_absent else {}
        # Released, because an error's traceback lives longer: the caller could not close what it wrote from.
        with self._calls.one_deadline(), memoryview(data) as view:
            self._choose_bodies().put(self._prefix + path, view, condition)

    def head(self, path: str) -> ObjectInfo:
        answer = self._calls.run(self._head(path))
        return ObjectInfo(path, int(answer["ContentLength"]), answer["LastModified"].timestamp())

    async def _head(self, path: str) -> Any:
        try:
            return await self._calls.call("head_object", Key=self._prefix + path)
        except FileNotFoundError as exc:
            if is_by_a_store(exc):
                raise
        # Whoever is between here and the store has this number, too; to a GET the store says its code with it.
        await self._get(path, 1, None)
        try:
            return await self._calls.call("head_object", Key=self._prefix + path)  # it may have been stored meanwhile
        except FileNotFoundError as exc:
            raise NotAStore("a HEAD finds nothing where a GET finds an object") from exc

    def page(self, prefix: str, cursor: object | None) -> ListPage:
        more = {} if cursor is None else {"ContinuationToken": cursor}
        answer = self._calls.run(self._calls.call("list_objects_v2", Prefix=self._prefix + prefix, **more))
        check_list(answer)
        objects = [
            ObjectInfo(item["Key"].removeprefix(self._prefix), int(item["Size"]), item["LastModified"].timestamp())
            for item in answer.get("Contents", [])
        ]
        return ListPage(objects, answer["NextContinuationToken"] if answer.get("IsTruncated") else None)

    def delete(self, paths: Sequence[str]) -> None:
        """Delete in batches; each by itself where a server knows no batches, as Google's and some small ones do not."""
        if len(paths) > 1 and self._deletes_batches:
            try:
                self._delete_batches(paths)
                return
            except OSError as exc:
                if not is_unknown(exc):
                    raise
                self._deletes_batches = False
        for start in range(0, len(paths), DELETED_AT_ONCE):
            part = paths[start : start + DELETED_AT_ONCE]
            self._calls.run(all_of([self._delete_one(path) for path in part], is_missing))

    async def _delete_one(self, path: str) -> None:
        try:
            await self._calls.call("delete_object", Key=self._prefix + path)
        except NotAStore:
            if not await self._is_gone(path):
                raise

    async def _is_gone(self, path: str) -> bool:
        """Whether a store says that there is no such object; it may be another one than was there before."""
        try:
            await self._head(path)
        except FileNotFoundError:
            return True
        except Exception:  # noqa: BLE001 - nobody says so, and the caller raises what came in place of the deletion
            return False
        return False

    def _delete_batches(self, paths: Sequence[str]) -> None:
        for start in range(0, len(paths), DELETE_BATCH):
            keys = [{"Key": self._prefix + path} for path in paths[start : start + DELETE_BATCH]]
            answer = self._calls.run(self._calls.call("delete_objects", Delete={"Objects": keys, "Quiet": True}))
            failed = [e for e in answer.get("Errors", []) if e.get("Code") != "NoSuchKey"]
            if failed:
                first = failed[0]
                raise OSError(f"{len(failed)} of {len(keys)} objects were not deleted, the first with {first['Code']}")

    def close(self) -> None:
        if self._bodies is not None:
            self._bodies.close()
        self._calls.close()

    def _choose_bodies(self) -> Bodies:
        if self._bodies is not None:
            return self._bodies
        if not self._choosing.acquire(timeout=self._calls.deadline().wait_s(self._calls.timeout_s)):
            raise NoClientYet("another call is still making the client")
        try:
            if self._bodies is None:
                self._bodies = _open_bodies(self._calls)
            return self._bodies
        except TimeoutError as exc:  # the store is asked for nothing there
            raise NoClientYet("the client is still being made") from exc
        finally:
            self._choosing.release()


def _open_bodies(calls: "LoopCalls") -> Bodies:
    """Blobs in the caller's thread, or on the loop where threads cannot honour what is set; said once in the log."""
    from tiered_kv.tiers.object.loop_bodies import LoopBodies  # noqa: PLC0415
    from tiered_kv.tiers.object.loop_calls import additional_arguments  # noqa: PLC0415
    from tiered_kv.tiers.object.s3_signer import UnfitError, open_client, tls_context  # noqa: PLC0415
    from tiered_kv.tiers.object.thread_bodies import ThreadBodies  # noqa: PLC0415

    try:
        client = open_client(calls)
    except UnfitError as exc:
        logger.info("blobs go through s3fs' event loop, which takes more CPU. reason=%s bucket=%s", exc, calls.bucket)
        return LoopBodies(calls)
    return ThreadBodies(
        client,
        calls.bucket,
        lambda: tls_context(calls.filesystem, client),
        deadline=calls.deadline,
        arguments=lambda method: additional_arguments(client, calls.filesystem, method),
        marks=calls.marks,
    )


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
