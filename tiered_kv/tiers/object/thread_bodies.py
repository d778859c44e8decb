"""Blobs straight between a socket and the caller's memory, in the caller's thread.

Owns how botocore and our connections share a request: botocore names the endpoint, signs, judges the answer, follows a
bucket to its region and tries again; the bytes between are ours. The seam is botocore's documented event
``before-send``, whose handler may answer a finished request in place of botocore's own HTTP. Called by ``s3.py``.

While a call is under way only its own thread touches the caller's memory, in system calls that end with the deadline:
nothing is left behind that could touch it later.
"""

import contextlib
import http.client
import io
import math
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionClosedError,
    ConnectTimeoutError,
    EndpointConnectionError,
    ReadTimeoutError,
    SSLError,
)
from s3fs.errors import translate_boto_error

from tiered_kv.tiers.object.connection import ConnectionPool, HttpConnection, Place, SilentError
from tiered_kv.tiers.object.errors import IncompleteRead, TakenUnsure, is_conflict, is_taken
from tiered_kv.tiers.object.loop_bodies import BufferLoan, LoanBody
from tiered_kv.tiers.object.marks import Marks
from tiered_kv.tiers.object.medium import Deadline, check_expected
from tiered_kv.tiers.object.s3_answers import (
    CONFLICT_WAIT_S,
    CREATE_TRIES,
    check_answer,
    first_bytes,
    is_beyond_the_end,
    refuse_nobodys,
    whole_bytes,
)

WORDS_MAX_BYTES: Final = 1 << 20
"""Of an answer that is no blob: error messages, and the answers to puts."""

_BACKOFF_MAX_S: Final = 20.0
_PORTS: Final = {"http": 80, "https": 443}
_OK: Final = (200, 206)
_PARSED: Final = ("Content-Length", "Content-Range", "Content-Type", "ETag")
_TRIED_AGAIN: Final = (400, 403, 408, 429, 500, 502, 503, 504)


class StreamedAnswer(io.RawIOBase):
    """An answer whose head was read; botocore's ``raw``.

    The connection goes back to the pool with the last byte, and is closed if the answer is left before that.
    """

    def __init__(self, response: http.client.HTTPResponse, connection: HttpConnection, pool: ConnectionPool) -> None:
        self._response = response
        self._connection: HttpConnection | None = connection
        self._pool = pool
        self._words: bytes | None = None

    def read_into(self, view: memoryview) -> int:
        """Read the body into ``view``, which has its size: the number of bytes that came."""
        if self._connection is None:
            return 0
        if self._response.length != len(view):  # no length was announced: it comes in chunks
            count = self._response.readinto(view)
            self._leave(is_read=self._response.isclosed() or not self._response.read(1))
            return count
        count = self._connection.wire.fill(view) if len(view) else 0
        self._leave(is_read=count == len(view))
        return count

    def read_words(self) -> None:
        """Read a body that is no blob, so that the connection is free again."""
        if self._connection is not None:
            self._connection.wire.acknowledge()
        words = self._response.read(WORDS_MAX_BYTES)
        self._words = words
        self._leave(is_read=self._response.isclosed() or len(words) < WORDS_MAX_BYTES)

    def stream(self) -> Iterator[bytes]:
        """The body of an answer that is no blob, as botocore asks for it."""
        if self._words:
            yield self._words

    def close(self) -> None:
        self._leave(is_read=False)
        super().close()

    def _leave(self, *, is_read: bool) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        may_stay = is_read and not self._response.will_close
        self._response.close()
        if may_stay:
            self._pool.give(connection)
        else:
            connection.wire.end()


class _BlobCall:
    """One call of ours, with all the requests that botocore makes for it."""

    def __init__(self, deadline: Deadline, body: LoanBody | None = None, memory: memoryview | bytes = b"") -> None:
        self.deadline = deadline
        self.body = body
        self.memory = memory
        self.answer: StreamedAnswer | None = None
        self.may_reconnect = True
        self.unclear_count = 0
        """Requests whose answer did not come or is the store's own failure: they may have been done."""


class ThreadBodies:
    """Blobs through a botocore client whose requests go over connections of ours.

    Threads: any; each call stays in its own. Between calls they share the client, which is made for that, and the pool.
    """

    def __init__(
        self,
        client: Any,
        bucket: str,
        tls: Callable[[], ssl.SSLContext],
        *,
        deadline: Callable[[], Deadline],
        arguments: Callable[[str], Mapping[str, object]],
        marks: Marks,
    ) -> None:
        """Take over how ``client`` sends.

        Args:
            tls: Makes the context of https connections; asked once.
            deadline: That of the call which the calling thread is in.
            arguments: What the location's options add to a method's requests.
            marks: Learned together with the calls on the loop.
        """
        config = client.meta.config
        self._client = client
        self._bucket = bucket
        self._make_tls = tls
        self._tls: ssl.SSLContext | None = None
        self._tls_lock = threading.Lock()
        self._deadline = deadline
        self._marks = marks
        self._extra = {method: dict(arguments(method)) for method in ("get_object", "put_object")}
        longest_s = config.connect_timeout or math.inf, config.read_timeout or math.inf  # None: the deadline alone
        self._pool = ConnectionPool(config.max_pool_connections, *longest_s)
        self._calls = threading.local()
        for operation in ("GetObject", "PutObject"):  # what botocore asks for itself it sends itself
            client.meta.events.register_first(f"before-send.s3.{operation}", self._send)
        client.meta.events.register_first("needs-retry.s3", self._refuse_late_retry)

    def get_into(self, key: str, path: str, buffer: memoryview) -> None:
        with self._calling(_BlobCall(self._deadline())) as call:
            try:
                answer = self._ask("get_object", Key=key, Range=first_bytes(len(buffer)))
            except OSError as exc:
                if not is_beyond_the_end(exc):
                    raise
                check_expected(path, 0, len(buffer))
                return
            check_expected(path, whole_bytes(answer), len(buffer))
            if call.answer is None:
                raise RuntimeError("botocore sent a request by itself: its event before-send is not what it was")
            count = call.answer.read_into(buffer)
            if count != len(buffer):
                raise IncompleteRead(f"observed={count} expected={len(buffer)}")

    def put(self, key: str, data: memoryview, condition: Mapping[str, str]) -> None:
        with BufferLoan(data) as loan, self._calling(_BlobCall(self._deadline(), LoanBody(loan), data)) as call:
            for left in reversed(range(CREATE_TRIES)):
                try:
                    self._ask("put_object", Key=key, Body=call.body, **condition)
                    return
                except OSError as exc:
                    if call.unclear_count and is_taken(exc):
                        raise TakenUnsure from exc
                    if not (left and is_conflict(exc)):
                        raise
                time.sleep(call.deadline.wait_s(CONFLICT_WAIT_S))

    def close(self) -> None:
        """Close idle connections, and those in use once their calls end."""
        self._pool.close()
        self._client.close()

    def _ask(self, method: str, **arguments: object) -> Any:
        """Have botocore make a request, and try it again if it must.

        Raises:
            NotAStore: Somebody else answered.
            OSError: The store refused; botocore's ClientError is the cause.
        """
        try:
            answer = getattr(self._client, method)(Bucket=self._bucket, **self._extra[method], **arguments)
        except ClientError as exc:
            refuse_nobodys(exc, method)
            raise translate_boto_error(exc) from exc
        check_answer(method, answer, self._marks)
        return answer

    @contextmanager
    def _calling(self, call: _BlobCall) -> Iterator[_BlobCall]:
        self._calls.current = call
        try:
            yield call
        finally:
            self._calls.current = None
            if call.answer is not None:
                call.answer.close()

    def _send(self, request: AWSPreparedRequest, **_: object) -> AWSResponse | None:
        """Answer botocore's ``before-send``. None: no body of ours, so botocore sends it."""
        call: _BlobCall | None = getattr(self._calls, "current", None)
        if call is None or not (request.body is None or request.body is call.body):
            return None
        if call.answer is not None:  # of the try before
            call.answer.close()
        try:
            response, connection = self._exchange(request, call)
            call.answer = StreamedAnswer(response, connection, self._pool)
            if request.method != "GET" or response.status not in _OK:
                call.answer.read_words()
            if response.status < 500:
                call.unclear_count -= 1
        except SilentError as exc:
            raise ReadTimeoutError(endpoint_url=_shown(request), error=exc) from exc
        except (TimeoutError, BotoCoreError):
            raise  # TimeoutError: the time is over, and botocore does not try that again
        except (OSError, http.client.HTTPException) as exc:
            raise ConnectionClosedError(endpoint_url=_shown(request), error=exc) from exc
        return AWSResponse(request.url, response.status, _parsed_headers(request.method, response), call.answer)

    def _exchange(
        self, request: AWSPreparedRequest, call: _BlobCall
    ) -> tuple[http.client.HTTPResponse, HttpConnection]:
        """Send a request over a connection and read the head of its answer."""
        parts = urlsplit(request.url)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        headers = {"Host": _host(parts), **{name: _text(value) for name, value in request.headers.items()}}
        headers.pop("Expect", None)  # to be told to go on costs a round trip, and stores differ in whether they tell
        body = b"" if request.body is None else call.memory
        place = self._place(parts.scheme, parts.hostname or "", parts.port)
        while True:
            connection = self._pool.take(place) or self._connect(request, place, call.deadline)
            may_reconnect = call.may_reconnect and connection.is_suspect
            call.unclear_count += 1
            try:
                return connection.ask(request.method, target, headers, body, call.deadline), connection
            except (BrokenPipeError, ConnectionResetError):  # RemoteDisconnected is one, too
                connection.wire.end()
                if not may_reconnect:
                    raise
                call.may_reconnect = False
            except BaseException:
                connection.wire.end()
                raise

    def _connect(self, request: AWSPreparedRequest, place: Place, deadline: Deadline) -> HttpConnection:
        try:
            return self._pool.connect(place, deadline)
        except TimeoutError as exc:
            deadline.wait_s(0)
            raise ConnectTimeoutError(endpoint_url=_shown(request), error=exc) from exc
        except ssl.SSLError as exc:
            raise SSLError(endpoint_url=_shown(request), error=exc) from exc
        except OSError as exc:
            raise EndpointConnectionError(endpoint_url=_shown(request), error=exc) from exc

    def _place(self, scheme: str, host: str, port: int | None) -> Place:
        if scheme != "https":
            return Place(host, port or 80, None)
        with self._tls_lock:
            if self._tls is None:
                self._tls = self._make_tls()
        return Place(host, port or 443, self._tls)

    def _refuse_late_retry(
        self,
        response: tuple[Any, dict[str, Any]] | None,
        operation: Any,
        attempts: int,
        caught_exception: Exception | None,
        **_: object,
    ) -> None:
        """Raise what went wrong if the wait before another try could outlast the deadline; botocore sleeps in it."""
        call: _BlobCall | None = getattr(self._calls, "current", None)
        if call is None:
            return
        wait_s = min(2.0 ** (attempts - 1), _BACKOFF_MAX_S)
        if response is not None:
            with contextlib.suppress(ValueError):  # botocore obeys it with one of its retry modes
                wait_s = max(wait_s, int(response[0].headers.get("x-amz-retry-after", 0)) / 1e3)
        if call.deadline.left_s() > wait_s:
            return
        if caught_exception is not None:
            raise caught_exception
        if response is not None and response[0].status_code in _TRIED_AGAIN:
            raise ClientError(response[1], operation.name)


def _parsed_headers(method: str, response: http.client.HTTPResponse) -> Mapping[str, str]:
    """What botocore is to parse: of a success only what we look at, because its parsing of dates alone takes 0.2 ms."""
    if method == "HEAD" or response.status not in _OK:
        return dict(response.headers)
    found = {name: value for name in _PARSED if (value := response.headers.get(name))}
    return found if "ETag" in found else dict(response.headers)  # to tell whose answer it is


def _shown(request: AWSPreparedRequest) -> str:
    """Where a request went, without path and query."""
    parts = urlsplit(request.url)
    return f"{parts.scheme}://{_host(parts)}"


def _host(parts: SplitResult) -> str:
    """The Host that botocore signs: without a default port, and without user and password."""
    name = parts.hostname or ""
    host = f"[{name}]" if ":" in name else name
    return host if parts.port in (None, _PORTS.get(parts.scheme)) else f"{host}:{parts.port}"


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value
