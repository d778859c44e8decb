"""The metadata of a blob's header: fixed-width fields at fixed offsets, and the values read from and written to them.

Owns offsets, widths and limits (docs/format.md lists them; a test compares the two). Must not know the payload nor the
tensor table that follows the metadata. Used by ``header.py`` only; the rest of the package sees
``SealFields`` and ``BlobHeader``.

A header starts, in every format version to come, with the *frame*: u64 length, the text
``{"__metadata__":{"tiered_kv_format":"dddd","header_xxh3":"``, and the hash of the whole header with the hash's own 32
digits as zeros. So a reader tells a blob of another version, which it leaves alone, from a damaged one, which goes.
"""

import re
import struct
from dataclasses import dataclass
from typing import Final, NamedTuple

import xxhash

from tiered_kv.chunks.geometry import ALIGNMENT_BYTES, align_up
from tiered_kv.errors import ChunkCorrupt
from tiered_kv.keys.namespace import FORMAT_VERSION
from tiered_kv.keys.stored_by import STORED_BY_CHARS_MAX, UNKNOWN, shared_line
from tiered_kv.keys.tags import NO_TAG, TAG_BYTES, shared_tag

MAX_HEADER_BYTES: Final = 1 << 20
"""About 8,000 tensors. A header that claims more is damaged; nothing is ever allocated for it."""

PEEK_BYTES: Final = ALIGNMENT_BYTES
"""How much of a blob holds all of its metadata, whatever its namespace."""

LENGTH_BYTES: Final = 8
DIGEST_BYTES: Final = 16
SHA256_BYTES: Final = 32

Bytes = bytes | bytearray | memoryview


_HEX, _DECIMAL, _TEXT = "hex", "decimal", "text"
_DIGITS: Final = {_HEX: "[0-9a-f]", _DECIMAL: "[0-9]", _TEXT: r"[ !#-\[\]-~]"}
"""What a value of each kind is made of; text needs no escapes in JSON."""


class Field(NamedTuple):
    """One metadata value: ``width`` characters at ``offset`` bytes from the start of the blob.

    Attributes:
        kind: ``hex``, ``decimal`` with leading zeros, or ``text`` with spaces at its end.
    """

    name: str
    offset: int
    width: int
    kind: str

    @property
    def slice(self) -> slice:
        return slice(self.offset, self.offset + self.width)

    @property
    def digits(self) -> str:
        """What a value is made of, as a regular expression."""
        return f"{_DIGITS[self.kind]}{{{self.width}}}"

    @property
    def blank(self) -> str:
        """The value before a seal fills it in."""
        return (" " if self.kind == _TEXT else "0") * self.width

    def encode(self, value: int | bytes | str) -> bytes:
        if isinstance(value, str):
            text = value.ljust(self.width)
        else:
            text = value.hex() if isinstance(value, bytes) else f"{value:0{self.width}d}"
        assert len(text) == self.width, f"{self.name} does not fit its field: {text}"
        return text.encode("ascii")


def _lay_out(fields: tuple[tuple[str, int, str], ...]) -> tuple[Field, ...]:
    result = []
    position = LENGTH_BYTES + len('{"__metadata__":{')
    for name, width, kind in fields:
        position += len(f'"{name}":"')
        result.append(Field(name, position, width, kind))
        position += width + len('",')
    return tuple(result)


FIELDS: Final = _lay_out(
    (
        ("tiered_kv_format", 4, _DECIMAL),
        ("header_xxh3", 32, _HEX),
        ("namespace", 32, _HEX),
        ("key", 32, _HEX),
        ("parent", 32, _HEX),
        ("chunk_index", 10, _DECIMAL),
        ("token_count", 10, _DECIMAL),
        ("prefix_sha256", 64, _HEX),
        ("payload_xxh3", 32, _HEX),
        ("created_unix_s", 12, _DECIMAL),
        ("tag", 32, _HEX),
        ("stored_by", STORED_BY_CHARS_MAX, _TEXT),
    )
)
(
    FORMAT,
    HEADER_XXH3,
    NAMESPACE,
    KEY,
    PARENT,
    CHUNK_INDEX,
    TOKEN_COUNT,
    PREFIX_SHA256,
    PAYLOAD_XXH3,
    CREATED_UNIX_S,
    TAG,
    STORED_BY,
) = FIELDS

TABLE_OFFSET: Final = STORED_BY.offset + STORED_BY.width + len('"}')
"""Where the metadata ends and the tensor table begins, with the comma before its first name."""

assert TABLE_OFFSET <= PEEK_BYTES


def _metadata_pattern(fields: tuple[Field, ...], end: str) -> re.Pattern[bytes]:
    members = ",".join(f'"{f.name}":"({f.digits})"' for f in fields)
    return re.compile((re.escape('{"__metadata__":{') + members + end).encode("ascii"))


_FRAME = _metadata_pattern((FORMAT, HEADER_XXH3), ",")
_METADATA = _metadata_pattern(FIELDS, re.escape("},"))
_FRAME_END = HEADER_XXH3.offset + HEADER_XXH3.width + len('",')


@dataclass(frozen=True, slots=True)
class SealFields:
    """What differs between the headers of one namespace's blobs, as far as the payload does not say it.

    Attributes:
        created_unix_s: Wall clock when the chunk was sealed; for people and for eviction by age.
        tag: Digest of whose it is (``keys/tags.py``); the namespace digest and the key do not depend on it.
        stored_by: Who stored it (``keys/stored_by.py``), on which they do not depend either.
    """

    key: bytes
    parent: bytes
    chunk_index: int
    prefix_sha256: bytes
    created_unix_s: int
    tag: bytes = NO_TAG
    stored_by: str = UNKNOWN

    def __post_init__(self) -> None:
        if len(self.key) != DIGEST_BYTES or len(self.parent) != DIGEST_BYTES:
            raise ValueError(f"key and parent have {DIGEST_BYTES} bytes. observed={len(self.key)},{len(self.parent)}")
        if len(self.prefix_sha256) != SHA256_BYTES:
            raise ValueError(f"prefix_sha256 has {SHA256_BYTES} bytes. observed={len(self.prefix_sha256)}")
        if len(self.tag) != TAG_BYTES:
            raise ValueError(f"tag has {TAG_BYTES} bytes. observed={len(self.tag)}")
        if not 0 <= self.chunk_index < 10**CHUNK_INDEX.width:
            raise ValueError(f"chunk_index is out of range. observed={self.chunk_index}")
        if not 0 <= self.created_unix_s < 10**CREATED_UNIX_S.width:
            raise ValueError(f"created_unix_s is out of range. observed={self.created_unix_s}")
        shared_line(self.stored_by)


@dataclass(frozen=True, slots=True)
class BlobHeader:
    """The metadata of one blob, as read.

    Attributes:
        parent: Key of the chunk before this one; the namespace digest for the first chunk of a prefix.
        header_bytes: Where the payload begins.
    """

    format_version: int
    namespace: bytes
    key: bytes
    parent: bytes
    chunk_index: int
    token_count: int
    prefix_sha256: bytes
    payload_xxh3: bytes
    created_unix_s: int
    tag: bytes
    stored_by: str
    header_bytes: int


class Frame(NamedTuple):
    """What every format version says in the same place."""

    format_version: int
    header_bytes: int


def read_frame(data: Bytes) -> Frame:
    """Read the version-independent start of a blob.

    Raises:
        ChunkCorrupt: This is not the start of a tiered_kv blob.
    """
    if len(data) < _FRAME_END:
        raise ChunkCorrupt(f"blob is truncated. expected_bytes>={_FRAME_END} observed_bytes={len(data)}")
    header_bytes = LENGTH_BYTES + int(struct.unpack_from("<Q", data)[0])
    if not ALIGNMENT_BYTES <= header_bytes <= MAX_HEADER_BYTES or header_bytes % ALIGNMENT_BYTES:
        raise ChunkCorrupt(
            f"header length is not possible. expected=multiple of {ALIGNMENT_BYTES} up to {MAX_HEADER_BYTES} "
            f"observed={header_bytes}"
        )
    found = _FRAME.match(data, LENGTH_BYTES)
    if found is None:
        raise ChunkCorrupt(f"blob does not start as ours. observed={bytes(data[LENGTH_BYTES:_FRAME_END])!r}")
    return Frame(int(found[1]), header_bytes)


def read_metadata(data: Bytes, header_bytes: int) -> BlobHeader:
    """Read the fields of a blob of this format version, whose frame was read.

    Raises:
        ChunkCorrupt: A field or what stands between the fields is not as a seal writes it.
    """
    found = _METADATA.match(data, LENGTH_BYTES)
    if found is None:
        raise ChunkCorrupt(_first_bad_field(data))
    (version, _, namespace, key, parent, chunk_index, token_count, prefix_sha256, payload_xxh3, created, tag, line) = (
        text.decode("ascii") for text in found.groups()
    )
    try:
        stored_by = shared_line(line.rstrip(" "))
    except ValueError as exc:
        raise ChunkCorrupt(f"{STORED_BY.name} is not well-formed: {exc}") from exc
    return BlobHeader(
        format_version=int(version),
        namespace=bytes.fromhex(namespace),
        key=bytes.fromhex(key),
        parent=bytes.fromhex(parent),
        chunk_index=int(chunk_index),
        token_count=int(token_count),
        prefix_sha256=bytes.fromhex(prefix_sha256),
        payload_xxh3=bytes.fromhex(payload_xxh3),
        created_unix_s=int(created),
        tag=shared_tag(bytes.fromhex(tag)),
        stored_by=stored_by,
        header_bytes=header_bytes,
    )


def header_hash(header: Bytes) -> str:
    """Hash a whole header, length prefix and padding included, with the digits of its own hash as zeros."""
    zeroed = bytearray(header)
    zeroed[HEADER_XXH3.slice] = b"0" * HEADER_XXH3.width
    return xxhash.xxh3_128_hexdigest(zeroed)


def check_header_hash(header: Bytes) -> None:
    """Compare a whole header with the hash it holds.

    Raises:
        ChunkCorrupt: They differ.
    """
    expected, observed = bytes(header[HEADER_XXH3.slice]), header_hash(header)
    if observed.encode("ascii") != expected:
        raise ChunkCorrupt(f"header_xxh3 mismatch. expected={text_of(expected)} observed={observed}")


def pack_metadata(namespace: bytes, token_count: int, table: bytes) -> bytes:
    """Write a header in which all that a seal fills in is zeros, or spaces: what is constant in a namespace.

    Args:
        table: The JSON after the metadata, from the comma to the last brace.
    """
    constant: dict[Field, int | bytes] = {FORMAT: FORMAT_VERSION, NAMESPACE: namespace, TOKEN_COUNT: token_count}
    members = ",".join(
        f'"{f.name}":"{f.encode(constant[f]).decode("ascii") if f in constant else f.blank}"' for f in FIELDS
    )
    text = f'{{"__metadata__":{{{members}}}'.encode("ascii") + table
    json_bytes = align_up(LENGTH_BYTES + len(text)) - LENGTH_BYTES
    return struct.pack("<Q", json_bytes) + text.ljust(json_bytes, b" ")


def text_of(observed: Bytes) -> str:
    """Show bytes of a header in a message, whatever they are."""
    return ascii(bytes(observed).decode("latin-1"))[1:-1]


def _first_bad_field(data: Bytes) -> str:
    for field in FIELDS:
        observed = bytes(data[field.slice])
        if re.fullmatch(field.digits.encode("ascii"), observed) is None:
            expected = f"{field.width} {field.kind} {'characters' if field.kind == _TEXT else 'digits'}"
            return f"{field.name} is not well-formed. expected={expected} observed={text_of(observed)}"
    return f"metadata between the fields is not well-formed. expected_bytes={TABLE_OFFSET} observed_bytes={len(data)}"
