"""Where the keepers' own objects lie in the bucket, and what is in them.

::

    _tiered_kv/lease/<term>                  who leads, its heartbeat, and the bytes it granted
    _tiered_kv/servers/<server_id>.<n>       a server's n-th session: the term it follows, bytes spent and wanted
    _tiered_kv/recency/<server_id>/<n>       keys used since the log before: magic, then 16 bytes each
    _tiered_kv/recency/base/<term>-<n>-<m>   what the leader made of merged logs: magic, then 16 + 4 bytes each
    _tiered_kv/usage                         the leader's last figures
    _tiered_kv/peers/HOST:PORT               an empty object: a door listens there (``tiers/peers/found.py``)
    _tiered_kv/pins/<namespace>/<key>.<end>  a chunk to keep, until <end>: seconds since 1970, 12 digits, 0 for good
    _tiered_kv/probe/<random>                a few bytes: a start's or a check's question to the store, removed at once

JSON unless said otherwise; unknown fields are ignored. A pin is an empty object, so that one LIST tells every pin: the
command line and the server write pins, the leader's pass reads them and removes those that have ended by the store's
clock. Content that cannot be read counts as absent, and is somebody else's or a later version's: whoever finds it
leaves it as it is. Owns paths and encodings; must not decide anything. Called by the other modules of this package.
"""

import re
import uuid
from collections.abc import Iterator, Sequence
from typing import Final, Protocol, TypeVar

import msgspec

from tiered_kv.config import is_peer_address
from tiered_kv.errors import ChunkCorrupt, TierUnavailable
from tiered_kv.keys.naming import BlobName

ROOT: Final = "_tiered_kv"
"""Where everything of ours lies that is no blob."""

LEASES: Final = f"{ROOT}/lease/"
SERVERS: Final = f"{ROOT}/servers/"
RECENCY: Final = f"{ROOT}/recency/"
BASES: Final = f"{RECENCY}base/"
USAGE: Final = f"{ROOT}/usage"
PEERS: Final = f"{ROOT}/peers/"
PINS: Final = f"{ROOT}/pins/"
PIN_UNTIL_MAX: Final = 10**12 - 1

JSON_BYTES_MAX: Final = 4 << 20
NAMESPACES_MAX: Final = 1024
SERVER_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,100}")

_TERM = re.compile(re.escape(LEASES) + r"([0-9]{20})")
_SESSION = re.compile(re.escape(SERVERS) + r"([A-Za-z0-9_-]{1,100}\.[0-9]{1,9})")
_PROBE = re.compile(rf"{ROOT}/probe/[0-9a-f]{{32}}")
_PIN = re.compile(re.escape(PINS) + r"([0-9a-f]{32})/([0-9a-f]{32})\.([0-9]{12})")

T = TypeVar("T")

Found = bytes | TierUnavailable | ChunkCorrupt | None
"""What became of one read of several: content, nothing there, or the error that ``get`` would have raised."""


class Info(Protocol):
    """What a LIST or a HEAD tells; ``tiers/object/medium.py`` has it."""

    @property
    def path(self) -> str: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def modified_s(self) -> float: ...


class Objects(Protocol):
    """What the keepers ask of a store; ``tiers/object/store.py`` is one.

    Each call may raise TierUnavailable, and ``get`` ChunkCorrupt for what is larger than ``size_max``.
    """

    def get(self, path: str, size_max: int | None = None) -> bytes | None: ...
    def get_many(self, paths: Sequence[str], size_max: int) -> list[Found]: ...
    def put(self, path: str, data: bytes | memoryview) -> None: ...
    def create(self, path: str, data: bytes | memoryview) -> bool | None: ...
    def head(self, path: str) -> Info | None: ...
    def list(self, prefix: str) -> Iterator[Info]: ...
    def delete(self, paths: Sequence[str]) -> None: ...
    def creates_atomically(self) -> bool: ...


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """What a leader grants a session: all bytes since it began, and the report it has seen."""

    seq: int
    granted_bytes: int


class Term(msgspec.Struct, frozen=True):
    """Content of a term's object; its leader overwrites it with a higher counter.

    Attributes:
        holder: The server that created it.
        session: The leader's own session, empty while it has none.
        is_closed: The leader gave it up: whoever is next need not wait.
        is_tight: Room is short: give back what you do not need.
        grants: By session.
    """

    holder: str
    counter: int
    capacity_bytes: int | None = None
    ttl_s: float | None = None
    session: str = ""
    is_closed: bool = False
    is_tight: bool = False
    grants: dict[str, Answer] = {}


class MemberReport(msgspec.Struct, frozen=True):
    """Content of a session's object. Bytes and counts are totals since the session began.

    Attributes:
        seq: Counts the reports of the session.
        term: The term it follows; a session never changes it.
        spent_bytes: Bytes of PUTs that have ended; a later LIST shows them unless they were deleted.
        returned_bytes: Granted bytes that it will never use.
        goal_bytes: What it would like ``granted_bytes`` to be.
        needed_bytes: Size of its largest blob: less is of no use to it.
        stored_count: Blobs stored.
        namespaces: Hex digests of the namespaces it serves.
    """

    seq: int
    term: int
    spent_bytes: int = 0
    returned_bytes: int = 0
    goal_bytes: int = 0
    needed_bytes: int = 0
    stored_count: int = 0
    namespaces: list[str] = []


class BucketUsage(msgspec.Struct, frozen=True):
    """What the leader knows of the whole bucket."""

    used_bytes: int
    blob_count: int
    term: int = 0


def encode(value: msgspec.Struct) -> bytes:
    """The bytes of a small object."""
    return msgspec.json.encode(value)


def decode(data: bytes | None, kind: type[T]) -> T | None:
    """The content of a small object; None where there is none or it cannot be read."""
    if data is None:
        return None
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError:  # ValidationError is one
        return None


def fetch(store: Objects, path: str) -> bytes | None:
    """An object of the keepers; None: it is not there. One that is larger than any of ours reads as empty.

    Raises:
        TierUnavailable: The store failed.
    """
    try:
        return store.get(path, JSON_BYTES_MAX)
    except ChunkCorrupt:
        return b""


def fetch_many(
    store: Objects, paths: Sequence[str], bytes_max: int = JSON_BYTES_MAX
) -> list[bytes | TierUnavailable | None]:
    """As ``fetch``, for several objects at once and in their order; a failure stands in its object's place."""
    return [b"" if isinstance(found, ChunkCorrupt) else found for found in store.get_many(paths, bytes_max)]


def lease_path(term: int) -> str:
    return f"{LEASES}{term:020d}"


def parse_lease_path(path: str) -> int | None:
    found = _TERM.fullmatch(path)
    return int(found[1]) if found else None


def session_path(session: str) -> str:
    return f"{SERVERS}{session}"


def parse_session_path(path: str) -> str | None:
    found = _SESSION.fullmatch(path)
    return found[1] if found else None


def pin_path(name: BlobName, until_s: int) -> str:
    """The object of a pin; ``until_s`` 0: for good."""
    return f"{PINS}{name.namespace.hex()}/{name.key.hex()}.{min(until_s, PIN_UNTIL_MAX):012d}"


def parse_peer_path(path: str) -> str | None:
    """``HOST:PORT`` of a door; None for anything else."""
    address = path.removeprefix(PEERS)
    return address if path.startswith(PEERS) and is_peer_address(address) else None


def probe_path() -> str:
    """A name that nobody else has, to ask the store what it does."""
    return f"{ROOT}/probe/{uuid.uuid4().hex}"


def is_probe(path: str) -> bool:
    """Whether something asked the store there what it does: no probe holds a blob."""
    return _PROBE.fullmatch(path) is not None


def parse_pin_path(path: str) -> tuple[BlobName, int] | None:
    """The chunk and the end of a pin; None for anything else."""
    found = _PIN.fullmatch(path)
    if found is None:
        return None
    return BlobName(bytes.fromhex(found[1]), bytes.fromhex(found[2])), int(found[3])
