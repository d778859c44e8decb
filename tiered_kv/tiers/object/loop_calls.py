"""Requests through s3fs' client on fsspec's event loop, each within a deadline.

Owns how s3fs is asked: through what it and botocore document (``set_session``, a client's methods and ``meta``), not
through its call function, which is private. Called by ``s3.py`` and ``loop_bodies.py``.
"""

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from botocore.exceptions import ClientError
from s3fs.errors import translate_boto_error

from tiered_kv.location import is_usable_endpoint
from tiered_kv.tiers.object.errors import BadEndpoint, NotAStore
from tiered_kv.tiers.object.loop_client import run_on_loop
from tiered_kv.tiers.object.marks import Marks
from tiered_kv.tiers.object.medium import Deadline
from tiered_kv.tiers.object.renewal import identifying
from tiered_kv.tiers.object.s3_answers import OF_STORES, check_answer, note_result, refuse_nobodys

T = TypeVar("T")

_ELSEWHERE: Final = (301, 302, 307, 308)


class LoopCalls:
    """One bucket's requests on the loop.

    Threads: any; coroutines run on the loop's own thread.
    """

    def __init__(self, filesystem: Any, loop: asyncio.AbstractEventLoop, bucket: str, timeout_s: float) -> None:
        self.filesystem = filesystem
        self.bucket = bucket
        self.timeout_s = timeout_s
        self.marks = Marks(OF_STORES)
        self._loop = loop
        self._client: Any = None
        self._found: Any = None
        self._current = threading.local()

    @contextmanager
    def one_deadline(self) -> Iterator[None]:
        """Let all that this thread asks in the block share one deadline, which begins now."""
        self._current.deadline = Deadline(self.timeout_s)
        try:
            yield
        finally:
            self._current.deadline = None

    def deadline(self) -> Deadline:
        """That of the block the calling thread is in, else a new one."""
        current: Deadline | None = getattr(self._current, "deadline", None)
        return Deadline(self.timeout_s) if current is None else current

    async def client(self) -> Any:
        """The client that s3fs made or makes now; it makes a new one after its connections were closed.

        Raises:
            NoIdentity: There is none, or its credentials could not be found or renewed. Told here, before a request is
                signed: a token file that is missing would read as an object that is.
        """
        async with identifying():
            client = await self.filesystem.set_session()
            if client is not self._client:
                _refuse_endpoint(client.meta.endpoint_url)
                self._found = await self._find()
                events, own = client.meta.events, f"{__name__}."  # an id is one for all events
                events.register("before-send.s3", _ask_nobody_to_go_on, unique_id=f"{own}go-on")
                events.register("before-parse.s3.DeleteObjects", note_result, unique_id=f"{own}result")
                follow_no_blind_redirect(client)
                self._client = client
            await self.credentials()
        return client

    async def credentials(self) -> Any:
        """What s3fs' session has found, renewed if it must; None: nothing, or the location itself says who asks."""
        return None if self._found is None else await self._found.get_frozen_credentials()

    def credentials_end_within(self, seconds: float) -> bool:
        """Whether those in force end so soon; the loop's thread alone asks."""
        return self._found is not None and bool(self._found.end_within(seconds))

    async def _find(self) -> Any:
        filesystem = self.filesystem
        is_given = filesystem.anon or filesystem.key or filesystem.client_kwargs.get("aws_access_key_id")
        return None if is_given else await filesystem.session.get_credentials()

    async def call(self, method: str, **arguments: object) -> Any:
        """Make one request.

        Raises:
            NoIdentity: As of ``client``; the store was not asked.
            NotAStore: Somebody else answered.
            OSError: The store refused; botocore's ClientError is the cause.
        """
        client = await self.client()
        try:
            answer = await getattr(client, method)(
                Bucket=self.bucket, **additional_arguments(client, self.filesystem, method), **arguments
            )
        except ClientError as exc:
            refuse_nobodys(exc, method)
            raise translate_boto_error(exc) from exc
        try:
            check_answer(method, answer, self.marks)
        except NotAStore:
            if "Body" in answer:
                answer["Body"].close()
            raise
        return answer

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run on the loop until done, or until the deadline.

        Raises:
            TimeoutError: It was not done in time, and is cancelled.
        """
        return run_on_loop(self._loop, coroutine, max(self.deadline().left_s(), 0.0))

    def close(self) -> None:
        """Close the client's connections. Idempotent."""
        client, self._client = self._client, None
        if client is not None:
            self.run(client.close())


def _refuse_endpoint(url: str) -> None:
    """Refuse an address that no client can use; our own option was checked when it was read.

    Raises:
        BadEndpoint: The environment, a profile or ``client_kwargs`` names such a one.
    """
    if not is_usable_endpoint(url):
        raise BadEndpoint("endpoint")


def _ask_nobody_to_go_on(request: Any, **_: object) -> None:
    """Send a body with its head: aiohttp would wait for a 100 until the deadline, and not every server sends one."""
    request.headers.pop("Expect", None)


def follow_no_blind_redirect(client: Any) -> None:
    """Have a client, s3fs' or botocore's, end with the answer that sends it elsewhere and names no region.

    It asks for the bucket's region then, is sent elsewhere again, and asks for that: a hundred requests, until Python
    can recurse no deeper. A load balancer that redirects http to https answers so.
    """
    client.meta.events.register_first("needs-retry.s3.HeadBucket", _refuse_blind_redirect)


def _refuse_blind_redirect(response: tuple[Any, dict[str, Any]] | None, operation: Any, **_: object) -> None:
    if response is None or response[0].status_code not in _ELSEWHERE:
        return
    if "x-amz-bucket-region" not in response[1].get("ResponseMetadata", {}).get("HTTPHeaders", {}):
        raise ClientError(response[1], operation.name)


def additional_arguments(client: Any, filesystem: Any, method: str) -> Mapping[str, object]:
    """What the options of the location add to requests of a kind, as s3fs does: encryption, who pays."""
    asked = {"RequestPayer": "requester"} if filesystem.requester_pays else {}
    asked = {**filesystem.s3_additional_kwargs, **asked}
    if not asked:
        return asked
    shape = client.meta.service_model.operation_model(client.meta.method_to_api_mapping[method]).input_shape
    return {name: value for name, value in asked.items() if shape is not None and name in shape.members}
