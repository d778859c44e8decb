"""What the fault proxy (proxy.py) can do to a request, and what it understands of one. Values only."""

from dataclasses import dataclass
from email.message import Message
from enum import Enum
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

CODES = {
    403: ("Forbidden", "AccessDenied"),
    500: ("Internal Server Error", "InternalError"),
    503: ("Service Unavailable", "SlowDown"),
}


class Mode(Enum):
    """What becomes of a request. "Its body" is the request's where it has one (PUT, POST), else the answer's."""

    STATUS = "an error status with S3's XML; the server never sees the request"
    RESET = "RST in the middle of its body; without a body before the answer"
    TRUNCATE = "the answer's head promises the whole body, half of it comes, then FIN"
    FLIP = "one bit in the middle of the answer's body is wrong"
    DRIP = "bodies pass at bytes_per_s"
    SILENCE = "read and never answered; ends when the fault is lifted or the client gives up"
    LOST = "the server does it, RST instead of the answer: the client cannot know"


@dataclass(frozen=True, slots=True)
class Fault:
    """Which requests fail, and how.

    Attributes:
        kinds: ``GET``, ``LIST``, ``HEAD``, ``PUT``, ``POST``, ``DELETE``; empty: all.
        path: Only requests whose path contains this.
        first: Only so many of the requests that fit; None: all of them.
        probability: Share of the fitting requests that fail, chosen by ``seed``.
    """

    mode: Mode
    kinds: frozenset[str] | set[str] = frozenset()
    path: str = ""
    first: int | None = None
    probability: float = 1.0
    seed: int = 0
    status: int = 503
    bytes_per_s: int = 0

    def __post_init__(self) -> None:
        if self.mode is Mode.DRIP and self.bytes_per_s <= 0:
            raise ValueError(f"a dripping fault needs its speed. bytes_per_s={self.bytes_per_s}")
        if self.mode is Mode.STATUS and self.status not in CODES:
            raise ValueError(f"unknown status. status={self.status} known={sorted(CODES)}")


@dataclass(frozen=True, slots=True)
class Request:
    """One request as it was asked, failed or not.

    Attributes:
        kind: The method, but ``LIST`` for the GETs that list a bucket.
        path: ``/bucket/key``, unquoted; for a LIST ``/bucket/prefix``.
        is_conditional: It carried If-None-Match or If-Match.
    """

    kind: str
    method: str
    path: str
    is_conditional: bool
    content_bytes: int


def describe(method: str, target: str, headers: Message) -> Request:
    """Understand a request's head.

    Raises:
        ValueError: It is of a kind the proxy does not speak.
    """
    if "chunked" in headers.get("Transfer-Encoding", ""):
        raise ValueError("a request body without a length is not supported: S3 clients send Content-Length")
    parts = urlsplit(target)
    query = parse_qs(parts.query, keep_blank_values=True)
    path = unquote(parts.path)
    is_list = method == "GET" and ("list-type" in query or path.strip("/").count("/") == 0)
    if is_list:
        path = f"{path.rstrip('/')}/{query.get('prefix', [''])[0]}"
    return Request(
        kind="LIST" if is_list else method,
        method=method,
        path=path,
        is_conditional="If-None-Match" in headers or "If-Match" in headers,
        content_bytes=int(headers.get("Content-Length", "0")),
    )


def error_answer(request: Request, status: int) -> bytes:
    """An answer as S3 words it, whole."""
    reason, code = CODES[status]
    body = (
        f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>ordered by a test</Message>'
        f"<Resource>{escape(request.path)}</Resource><RequestId>fault-proxy</RequestId></Error>"
    ).encode()
    head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + (b"" if request.method == "HEAD" else body)
