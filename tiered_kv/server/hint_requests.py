"""Hints that come over HTTP from a gateway: read, checked, and passed on to the server through its own socket.

::

    POST /prefetch   {"session_id": ...}  or  {"token_ids": [...], "namespace": ...}
    POST /pin        the same, and "ttl": "5m"
    POST /release    {"session_id": ...}

each with a ``"tag"`` and a ``"cache_salt"`` where the requests had one. Keys of token ids are computed here, by the
code that computes everybody's and outside of the server's loop. Nothing of a body stands in a log or an answer.
docs/operations.md describes the port to whoever calls it.
"""

import hmac
import logging
import re
import threading
from collections.abc import Callable
from email.message import Message
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from tiered_kv.config import parse_time_s
from tiered_kv.errors import ConfigError, TieredKVError
from tiered_kv.keys.chunk_record import KEY_BYTES, PREFIX_DIGEST_BYTES
from tiered_kv.keys.extras import Salt, encode
from tiered_kv.keys.namespace import Namespace
from tiered_kv.keys.prefix_keys import MAX_TOKEN, PrefixKeys, keys_in_parts
from tiered_kv.keys.tags import NO_TAG, session_name, tag_digest
from tiered_kv.machine import read_secret
from tiered_kv.server import protocol as m
from tiered_kv.server.pins import PIN_TTL_MAX_S

logger = logging.getLogger(__name__)

ACTIONS: Final = ("prefetch", "pin", "release")

BODY_BYTES_MAX: Final = 4 << 20
"""A million token ids of four digits."""

AT_ONCE_MAX: Final = 4
"""Bodies that are read and hashed at once: they share the interpreter with the server's loop."""

CHUNKS_MAX: Final = (m.FRAME_BYTES_MAX - 4096) // (KEY_BYTES + PREFIX_DIGEST_BYTES)
"""Of one prompt: its keys and digests are one message to the server."""

_TOKEN: Final = re.compile(rb"[\x21-\x7e]{16,1024}\n?")


class HintBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a request.

    Attributes:
        session_id: What requests said as ``session_id``, to vLLM or to us.
        token_ids: A prompt, or its beginning, from its first token on.
        namespace: First hex digits of the namespace of these; empty: of the only one that engines serve.
        cache_salt: That of the requests.
        ttl: Seconds, or ``5m``, ``1h``.
        tag: ``tiered_kv.tag`` of the requests.
    """

    session_id: str | None = None
    token_ids: list[Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN)]] | None = None
    namespace: str = ""
    cache_salt: str | None = None
    ttl: str | int | float | None = None
    tag: str | None = None


class HintRefused(Exception):
    """A request is answered with an error.

    Attributes:
        status: Of HTTP.
    """

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


class HintsToken:
    """The token that callers show, in a file that may be replaced while the server runs.

    Threads: any; ``_said`` is written by all, and at worst something is logged twice.
    """

    def __init__(self, path: Path) -> None:
        """Look at the file.

        Raises:
            ConfigError: There is none, others may read or write it, or it holds something else.
        """
        self._path = path
        self._said = ""
        _read_token(path)

    def now(self) -> bytes:
        """What the file holds now: a token that leaked is good for nothing once another one is there.

        Raises:
            HintRefused: It cannot be used any more.
        """
        try:
            token = _read_token(self._path)
        except ConfigError as exc:
            if self._said != str(exc):
                self._said = str(exc)
                logger.warning("hints are refused until their token can be read again. cause=%s", exc)
            raise HintRefused(
                HTTPStatus.SERVICE_UNAVAILABLE, "the file of this server's token cannot be used: its log says why"
            ) from exc
        self._said = ""
        return token


def _read_token(path: Path) -> bytes:
    """The token that callers show; raises as :func:`read_secret`."""
    make = "make one with: (umask 077; openssl rand -hex 32 > FILE)"
    misfit = "does not hold one line of 16 to 1024 characters"
    return read_secret(path, "option --hints-token-file", _TOKEN, misfit, make)


def admit(token: bytes, headers: Message) -> int:
    """Check who asks before anything of the body is read; returns the body's length.

    Raises:
        HintRefused: Another one, or the body has no length or is too long.
    """
    kind, _, given = (headers.get("Authorization") or "").partition(" ")
    if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("utf-8", "replace"), token):
        raise HintRefused(HTTPStatus.UNAUTHORIZED, "expected the header Authorization: Bearer TOKEN of this server")
    length = headers.get("Content-Length") or ""
    if not (length.isascii() and length.isdigit()):
        raise HintRefused(HTTPStatus.LENGTH_REQUIRED, "expected the header Content-Length: the body's bytes")
    if len(length) > len(str(BODY_BYTES_MAX)) or int(length) > BODY_BYTES_MAX:
        raise HintRefused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"expected a body of at most {BODY_BYTES_MAX} bytes")
    return int(length)


class HintRequests:
    """Answers requests of those who were admitted.

    Threads: any.
    """

    def __init__(self, ask: Callable[[m.Message, type[Any]], Any]) -> None:
        """``ask`` sends a message to the server and returns its answer of that type."""
        self._ask = ask
        self._slots = threading.BoundedSemaphore(AT_ONCE_MAX)

    def answer(self, action: str, read_body: Callable[[], bytes]) -> tuple[HTTPStatus, dict[str, object]]:
        """Do what a request says.

        Raises:
            HintRefused: It cannot be understood, or cannot be done; says why.
        """
        if not self._slots.acquire(blocking=False):
            raise HintRefused(HTTPStatus.SERVICE_UNAVAILABLE, f"{AT_ONCE_MAX} hints are being read: try again")
        try:
            hint = self._hint(action, _parse(action, read_body()))
            hinted = self._ask(hint, m.Hinted)
        except TieredKVError as exc:
            raise HintRefused(HTTPStatus.SERVICE_UNAVAILABLE, f"the cache server does not answer: {exc}") from exc
        finally:
            self._slots.release()
        if hinted.outcome != "done":
            status, why = _OUTCOMES[hinted.outcome]
            raise HintRefused(status, why)
        status = HTTPStatus.ACCEPTED if action == "prefetch" else HTTPStatus.OK
        return status, {"action": action} | ({} if action == "release" else {"chunks": hinted.chunks})

    def _hint(self, action: str, body: HintBody) -> m.Hint:
        tag = NO_TAG if body.tag is None else _digest("tag", lambda: tag_digest(body.tag or ""))
        ttl_s = _ttl_s(body.ttl) if action == "pin" else 0.0
        if body.session_id is not None:
            session = _digest("session_id", lambda: session_name(body.session_id or "", tag, body.cache_salt))
            return m.Hint(action, session, tag, ttl_s=ttl_s)
        space = self._namespace(body.namespace)
        keys = _keys(space, body.token_ids or [], body.cache_salt)
        names = b"".join(keys.keys), b"".join(keys.digests)
        return m.Hint(action, tag=tag, namespace=space.digest, keys=names[0], digests=names[1], ttl_s=ttl_s)

    def _namespace(self, digits: str) -> Namespace:
        """The namespace that is meant.

        Raises:
            HintRefused: None is, or more than one.
        """
        if re.fullmatch(r"[0-9a-f]{0,32}", digits) is None:
            raise HintRefused(
                HTTPStatus.BAD_REQUEST, "namespace: expected the first hex digits of one, as `ls` shows it"
            )
        found = self._ask(m.NamespaceRequest(digits), m.NamespaceRecord)
        if found.record:
            return Namespace.from_record(found.record)
        if not found.known:
            raise HintRefused(*_OUTCOMES["no_engine"])
        raise HintRefused(
            HTTPStatus.CONFLICT, f"namespace: expected the first digits of one of these: {', '.join(found.known)}"
        )


_OUTCOMES: Final = {
    "unknown": (HTTPStatus.NOT_FOUND, "nothing is known of this session or prefix: it was never stored, or is gone"),
    "no_engine": (HTTPStatus.CONFLICT, "no engine of this namespace is connected: start it, or name another namespace"),
    "nowhere": (
        HTTPStatus.CONFLICT,
        "no tier of this server keeps pins: a disk (disk_path) or a bucket does, a pool not",
    ),
    "refused": (HTTPStatus.TOO_MANY_REQUESTS, "too much at once, or of one tag: try again later"),
}


def _parse(action: str, data: bytes) -> HintBody:
    """Read a body.

    Raises:
        HintRefused: It is none; what was given is not repeated.
    """
    try:
        body = msgspec.json.decode(data, type=HintBody)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise HintRefused(HTTPStatus.BAD_REQUEST, f"expected a JSON object as documented: {str(exc)[:200]}") from exc
    if action == "release" and body.session_id is None:
        raise HintRefused(HTTPStatus.BAD_REQUEST, "expected session_id: only a session can be released")
    if (body.session_id is None) == (not body.token_ids):
        raise HintRefused(HTTPStatus.BAD_REQUEST, "expected either session_id or token_ids")
    if action == "pin" and body.ttl is None:
        raise HintRefused(HTTPStatus.BAD_REQUEST, 'expected ttl: seconds, or a time such as "5m" or "1h"')
    if action != "pin" and body.ttl is not None:
        raise HintRefused(HTTPStatus.BAD_REQUEST, f"ttl is for /pin, not for /{action}")
    return body


def _digest(field: str, make: Callable[[], bytes]) -> bytes:
    try:
        return make()
    except ValueError as exc:
        raise HintRefused(HTTPStatus.BAD_REQUEST, f"{field}: expected {exc}") from exc


def _ttl_s(value: object) -> float:
    try:
        seconds = parse_time_s(value)
    except ValueError as exc:
        raise HintRefused(HTTPStatus.BAD_REQUEST, f"ttl: {exc}") from exc
    if seconds > PIN_TTL_MAX_S:
        raise HintRefused(HTTPStatus.BAD_REQUEST, f"ttl: expected at most {PIN_TTL_MAX_S} seconds; renew it later")
    return seconds


def _keys(space: Namespace, tokens: list[int], salt: str | None) -> PrefixKeys:
    """The keys of a prompt, in parts.

    Raises:
        HintRefused: It has no whole chunk, or too many for one message.
    """
    chunk_tokens = int(space.fields["chunk_tokens"])
    chunks = len(tokens) // chunk_tokens
    if not chunks:
        raise HintRefused(
            HTTPStatus.BAD_REQUEST, f"token_ids: expected at least one chunk of {chunk_tokens}, got {len(tokens)}"
        )
    if chunks > CHUNKS_MAX:
        raise HintRefused(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"token_ids: expected at most {CHUNKS_MAX} chunks of {chunk_tokens}, got {chunks}",
        )
    first = encode([Salt(salt)]) if salt else b""
    return keys_in_parts(space, chunk_tokens, tokens, lambda index: b"" if index else first, chunks)
