"""One peer: questions and blobs over HTTPS, straight into the caller's memory, and what becomes of one that fails.

Only the calling thread touches the caller's memory, in system calls that end with the deadline, and the socket is
closed before a failed call returns: a peer that thaws later reaches nothing. Knows no tier; called by ``tier.py``.
"""

import http.client
import logging
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final
from urllib.parse import urlsplit

from tiered_kv.chunks.header import BlobCheck, BlobFormat
from tiered_kv.errors import ChunkCorrupt, ChunkMismatch, TierBusy, TierUnavailable
from tiered_kv.tiers.base import BlobName
from tiered_kv.tiers.object.connection import ConnectionPool, HttpConnection, Place
from tiered_kv.tiers.object.medium import Deadline
from tiered_kv.tiers.peers.fleet_key import FleetKey
from tiered_kv.tiers.wrappers.breaker import Breaker

logger = logging.getLogger(__name__)

BLOBS_PATH: Final = "/v1/blobs"
"""Below it lies ``<namespace>/<key>``, in hex: GET reads a blob."""

PREFIX_PATH: Final = "/v1/prefix"
"""POST with a namespace and keys, 16 bytes each, asks how many of these blobs are there, from the first on."""

NAMES_MAX: Final = 1024
"""Keys of one such question."""

SILENCE_S: Final = 1.0
"""Longest wait for a connection, and for the next byte of an answer."""

READS_MAX: Final = 4
"""Blobs that are read from a peer at once: more are no faster, and a slow link would starve each of them."""

_WORDS_MAX_BYTES: Final = 4096
_VERIFY: Final = "verify"
_COUNT = re.compile(rb"[0-9]{1,4}")


class Peer:
    """A machine that may have blobs.

    The first call without an answer opens its breaker, and so do five blobs in a row that are not what their names say.
    While it is open the peer is not asked, until a call is due that is the trial. A busy peer is neither.

    Threads: any; each call stays in its own.
    """

    def __init__(self, url: str, key: FleetKey, context: ssl.SSLContext, monotonic: Callable[[], float]) -> None:
        """Talk to ``url``, which is ``https://host:port``; nothing is connected until the first call."""
        parts = urlsplit(url)
        self.url = url
        self.breaker = Breaker(monotonic)
        self._key = key
        self._host = parts.netloc
        self._place = Place(parts.hostname or "", parts.port or 443, context)
        self._pool = ConnectionPool(2 * READS_MAX, SILENCE_S, SILENCE_S)
        self._reads = threading.BoundedSemaphore(READS_MAX)

    def count_held(self, names: Sequence[BlobName], deadline: Deadline) -> int:
        """How many of these blobs, at most ``NAMES_MAX`` of one namespace, the peer says it has, from the first on.

        Raises:
            TierUnavailable: No answer in time, or it is not asked now.
        """
        assert len(names) <= NAMES_MAX, len(names)
        body = names[0].namespace + b"".join(name.key for name in names)
        with self._guarded(), self._answer("POST", PREFIX_PATH, deadline, body) as (response, _):
            if response is None:
                raise http.client.HTTPException(f"the peer does not know the question. path={PREFIX_PATH}")
            text = response.read(_WORDS_MAX_BYTES)
            if _COUNT.fullmatch(text) is None or int(text) > len(names):
                raise http.client.HTTPException(f"the peer says nonsense. observed={text[:40]!r}")
            return int(text)

    def get_into(self, name: BlobName, buffer: memoryview, form: BlobFormat, deadline: Deadline) -> bool:
        """Read a blob and verify it; False when the peer has none.

        Raises:
            ChunkCorrupt, ChunkMismatch: The peer gave something else. The buffer's content is undefined.
            TierUnavailable: No answer in time, or it is not asked now. The buffer's content is undefined.
            TierBusy: The peer has no time for it.
        """
        if not self._reads.acquire(timeout=max(deadline.left_s(), 0)):
            raise TierUnavailable(f"no turn to read from the peer in time. peer={self.url}")
        try:
            check = BlobCheck(form, buffer)
            with self._guarded():
                found = self._read(name, buffer, deadline, check.advance)
        finally:
            self._reads.release()
        if not found:
            return False
        try:
            check.finish(name.key, None)
        except (ChunkCorrupt, ChunkMismatch) as exc:
            self._lied(exc)
            raise
        self.breaker.succeeded(_VERIFY)
        return True

    def _read(self, name: BlobName, buffer: memoryview, deadline: Deadline, on_piece: Callable[[int], object]) -> bool:
        target = f"{BLOBS_PATH}/{name.namespace.hex()}/{name.key.hex()}"
        with self._answer("GET", target, deadline) as (response, connection):
            if response is None:
                return False
            if response.length != len(buffer):
                exc = ChunkCorrupt(f"a peer's blob has the wrong size. peer={self.url} observed={response.length}")
                self._lied(exc)
                raise exc
            count = connection.wire.fill(buffer, on_piece)
            if count != len(buffer):
                raise http.client.IncompleteRead(b"", len(buffer) - count)
        return True

    def _lied(self, what: Exception) -> None:
        logger.warning("a peer gave what it should not have. peer=%s %s", self.url, what)
        self.breaker.failed(_VERIFY, str(what))

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Let a call through the breaker, as its trial if one is due, and tell the breaker whether it was answered."""
        is_trial = self.breaker.begin_trial()
        if not is_trial:
            self.breaker.check()
        failure: str | None = "the trial was broken off"
        try:
            yield
            failure = None
        except (ChunkCorrupt, TierBusy):
            failure = None  # an answer, if no good one
            raise
        except (OSError, UnicodeError, http.client.HTTPException) as exc:  # TierUnavailable and ssl.SSLError are such
            failure = str(exc) or type(exc).__name__
            raise TierUnavailable(f"a peer does not answer. peer={self.url} cause={failure}") from exc
        finally:
            if is_trial:
                self.breaker.end_trial(failure)
            elif failure is not None:
                if not self.breaker.is_open:
                    logger.warning("a peer is left alone for a while. peer=%s cause=%s", self.url, failure)
                self.breaker.trip(failure)

    @contextmanager
    def _answer(
        self, method: str, target: str, deadline: Deadline, body: bytes = b""
    ) -> Iterator[tuple[http.client.HTTPResponse | None, HttpConnection]]:
        """Ask; None: the peer has none. The connection is kept if the whole answer was read."""
        response, connection = self._ask(method, target, deadline, body)
        try:
            if response.status not in (200, 404):
                raise (TierBusy if response.status == 503 else TierUnavailable)(
                    f"a peer refuses. peer={self.url} status={response.status} "
                    + ("(do the keys differ, or the clocks?)" if response.status == 401 else "")
                )
            if response.status == 404:
                response.read(_WORDS_MAX_BYTES)
                if response.length != 0:  # the rest would be taken for the next answer
                    raise http.client.HTTPException("the peer says too much of what it has not")
            yield (response if response.status == 200 else None), connection
        except BaseException:
            connection.wire.end()
            raise
        finally:
            response.close()
        if response.will_close:
            connection.wire.end()
        else:
            self._pool.give(connection)

    def _ask(
        self, method: str, target: str, deadline: Deadline, body: bytes
    ) -> tuple[http.client.HTTPResponse, HttpConnection]:
        headers = {"Host": self._host, "Authorization": f"Bearer {self._key.token(time.time())}"}
        if body:
            headers["Content-Length"] = str(len(body))
        while True:
            kept = self._pool.take(self._place)
            connection = kept or self._pool.connect(self._place, deadline)
            try:
                return connection.ask(method, target, headers, body, deadline), connection
            except ConnectionError:  # RemoteDisconnected is one, too
                connection.wire.end()
                if kept is None:  # else the peer may have ended what lay idle: reading twice does no harm
                    raise
            except BaseException:
                connection.wire.end()
                raise

    def close(self) -> None:
        """Close idle connections, and those in use once their calls end."""
        self._pool.close()
