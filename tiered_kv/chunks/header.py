"""The header of a blob: its fields and tensor table, how they are written, and how a blob is verified against them.

Owns offsets, widths and limits of the metadata (docs/format.md lists them; a test compares the two), the table of
tensors, the header's template, the two hashes and the order in which they are checked. Must not read or write media.
``BlobFormat`` is the hot path and compares bytes at fixed offsets: a tier's wrapper seals right before the first put
and verifies right after every get. ``peek`` serves scans; ``read_header`` and ``check_blob`` serve the CLI, which does
not know the geometry. Nothing here copies a payload; a whole payload is hashed without the GIL, in parallel by several
threads (a piece of one with it: 20 us for 512 KiB).

A header starts, in every format version to come, with the *frame*: u64 length, the text
``{"__metadata__":{"tiered_kv_format":"dddd","header_xxh3":"``, and the hash of the whole header with the hash's own 32
digits as zeros. So a reader tells a blob of another version, which it leaves alone, from a damaged one, which goes.

A tensor table is written in one way, as safetensors wants it, so reading one is parsing it and comparing what this
module would have written: no second set of rules to keep.
"""

import json
import re
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Annotated, Final, NamedTuple, NoReturn

import msgspec
import xxhash

from tiered_kv.chunks.geometry import ALIGNMENT_BYTES, DTYPE_BYTES, ChunkGeometry, align_up
from tiered_kv.errors import ChunkCorrupt, ChunkMismatch, ConfigError
from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.keys.namespace import DIGEST_BYTES, FORMAT_VERSION
from tiered_kv.keys.state_keys import is_state, next_key
from tiered_kv.keys.stored_by import STORED_BY_CHARS_MAX, shared_line
from tiered_kv.keys.tags import shared_tag
from tiered_kv.keys.tail_keys import tail_tokens

MAX_HEADER_BYTES: Final = 1 << 20
"""About 8,000 tensors. A header that claims more is damaged; nothing is ever allocated for it."""

PEEK_BYTES: Final = ALIGNMENT_BYTES
"""How much of a blob holds all of its metadata, whatever its namespace."""

LENGTH_BYTES: Final = 8

Bytes = bytes | bytearray | memoryview

PAD_NAME: Final = "_pad"
MAX_DIMENSIONS: Final = 16
MAX_EXTENT: Final = 2**48

# -- fields of the metadata --------------------------------------------------------------------------------------------

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
        """The value's characters.

        Raises:
            ValueError: They are not as many as the field has, or a number is negative.
        """
        if isinstance(value, bytes):
            text = value.hex()
        else:
            text = value.ljust(self.width) if isinstance(value, str) else f"{value:0{self.width}d}"
        if len(text) != self.width or text[0] == "-":
            raise ValueError(f"{self.name} does not fit its field. characters={self.width} observed={text}")
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

_METADATA_END: Final = TABLE_OFFSET + len(",")

assert _METADATA_END <= PEEK_BYTES


def _metadata_pattern(fields: tuple[Field, ...], end: str) -> re.Pattern[bytes]:
    members = ",".join(f'"{f.name}":"(?P<{f.name}>{f.digits})"' for f in fields)
    return re.compile((re.escape('{"__metadata__":{') + members + end).encode("ascii"))


_FRAME = _metadata_pattern((FORMAT, HEADER_XXH3), ",")
_METADATA = _metadata_pattern(FIELDS, re.escape("},"))
_FRAME_END = HEADER_XXH3.offset + HEADER_XXH3.width + len('",')

_SEALED = tuple(
    (field.slice, field.blank.encode("ascii"))
    for field in (
        HEADER_XXH3,
        KEY,
        PARENT,
        CHUNK_INDEX,
        PREFIX_SHA256,
        PAYLOAD_XXH3,
        CREATED_UNIX_S,
        TAG,
        STORED_BY,
    )
)
_NO_HASH = b"0" * HEADER_XXH3.width
"""In the place of a header's own hash while it is hashed."""

_HEADER_XXH3_SLICE = HEADER_XXH3.slice
_OURS = NAMESPACE.slice
_VERSION_END = FORMAT.offset + FORMAT.width
_VERIFIED_SLICES = PREFIX_SHA256.slice, TAG.slice, STORED_BY.slice


# -- what a header says ------------------------------------------------------------------------------------------------


class Frame(NamedTuple):
    """What every format version says in the same place."""

    format_version: int
    header_bytes: int


@dataclass(frozen=True, slots=True)
class BlobHeader:
    """The metadata of one blob, as read.

    Attributes:
        record: Which chunk it is.
        created_unix_s: Wall clock when the chunk was sealed; for people and for eviction by age.
        header_bytes: Where the payload begins.
    """

    record: ChunkRecord
    format_version: int
    token_count: int
    payload_xxh3: bytes
    created_unix_s: int
    header_bytes: int


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of the payload; ``offset_bytes`` counts from the payload's first byte."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ParsedHeader:
    """A whole header: its metadata and what the payload holds; the last tensor is the padding."""

    header: BlobHeader
    tensors: tuple[TensorEntry, ...]

    @property
    def payload_bytes(self) -> int:
        last = self.tensors[-1]
        return last.offset_bytes + last.size_bytes

    @property
    def blob_bytes(self) -> int:
        return self.header.header_bytes + self.payload_bytes


# -- sealing and verifying ---------------------------------------------------------------------------------------------


class BlobFormat:
    """How the blobs of one namespace are written and checked.

    Threads: immutable; any number of threads may seal and verify different blobs at once.
    """

    __slots__ = (
        "_data_bytes",
        "_namespace",
        "_namespace_text",
        "_state_template",
        "_template",
        "blob_bytes",
        "header_bytes",
        "payload_bytes",
    )

    def __init__(self, namespace_digest: bytes, geometry: ChunkGeometry) -> None:
        """Build the header's templates: of a chunk, and of a part of a state, which has as many bytes.

        Raises:
            ConfigError: The geometry cannot be declared: too many layers for a header, or names that clash.
        """
        self._namespace = namespace_digest
        self._namespace_text = NAMESPACE.encode(namespace_digest)
        self._template, self._state_template = _templates(geometry)
        self._data_bytes = geometry.data_bytes
        self.header_bytes = len(self._template)
        self.payload_bytes = geometry.payload_bytes
        self.blob_bytes = self.header_bytes + self.payload_bytes

    def seal(self, blob: memoryview, record: ChunkRecord, created_unix_s: int) -> None:
        """Write padding and header around the payload that lies in ``blob``.

        Modifies:
            The first ``header_bytes`` of ``blob``, and the padding behind the last tensor: a slot used before must not
            carry another chunk's bytes into a file.

        Raises:
            ValueError: ``blob`` is not ``blob_bytes`` long, or the record is none of this namespace or does not fit.
        """
        if len(blob) != self.blob_bytes:
            raise ValueError(f"blob has another size. expected={self.blob_bytes} observed={len(blob)}")
        if record.namespace != self._namespace:
            raise ValueError(_difference("namespace", self._namespace.hex(), record.namespace.hex()))
        blob[self.header_bytes + self._data_bytes :] = bytes(self.payload_bytes - self._data_bytes)
        header = self._template_of(record.key, record.parent)
        sealed = (
            _NO_HASH,
            KEY.encode(record.key),
            PARENT.encode(record.parent),
            CHUNK_INDEX.encode(record.chunk_index),
            PREFIX_SHA256.encode(record.prefix_sha256),
            _payload_hash(blob, self.header_bytes).encode("ascii"),
            CREATED_UNIX_S.encode(created_unix_s),
            TAG.encode(record.tag),
            STORED_BY.encode(shared_line(record.stored_by)),
        )
        for (place, _), text in zip(_SEALED, sealed, strict=True):
            header[place] = text
        header[_HEADER_XXH3_SLICE] = xxhash.xxh3_128_hexdigest(header).encode("ascii")
        blob[: self.header_bytes] = header

    def verify(
        self, blob: memoryview, key: bytes, prefix_sha256: bytes | None, hasher: Callable[[], str] | None = None
    ) -> None:
        """Check that ``blob`` is, byte for byte, what was sealed under ``key`` in this namespace.

        Args:
            prefix_sha256: The digest of the tokens asked for; None where they are not known (warming, the CLI).
            hasher: Gives the payload's xxh3-128 in hexadecimal, where it is on its way already (``BlobCheck``).

        Raises:
            ChunkMismatch: A well-formed blob of another namespace or format version.
            ChunkCorrupt: Anything else; the message says which field, expected and observed.
        """
        header = bytes(blob[: self.header_bytes])
        is_ours = header[:_VERSION_END] == self._template[:_VERSION_END] and header[_OURS] == self._namespace_text
        if len(blob) != self.blob_bytes or not is_ours:
            self._refuse(blob)
        check_header_hash(header)
        found = _match_metadata(header)
        _stored_by(found)
        if (observed := found[KEY.name]) != KEY.encode(key):
            raise ChunkCorrupt(_difference("key", key.hex(), text_of(observed)))
        if prefix_sha256 is not None and (observed := found[PREFIX_SHA256.name]) != PREFIX_SHA256.encode(prefix_sha256):
            raise ChunkCorrupt(_difference("prefix_sha256", prefix_sha256.hex(), text_of(observed)))
        _check_constant_part(header, self._template_of(key, bytes.fromhex(found[PARENT.name].decode("ascii"))))
        payload_xxh3 = hasher() if hasher else _payload_hash(blob, self.header_bytes)
        _check_payload(found[PAYLOAD_XXH3.name].decode("ascii"), payload_xxh3, key)

    def _refuse(self, blob: memoryview) -> NoReturn:
        """Say what is wrong with a blob that has not the size, the version or the namespace of this format's."""
        _, metadata = _whole_header(blob)
        if metadata.record.namespace != self._namespace:
            raise ChunkMismatch(_difference("namespace", self._namespace.hex(), metadata.record.namespace.hex()))
        if len(blob) != self.blob_bytes:
            raise ChunkCorrupt(_difference("blob size", self.blob_bytes, len(blob)))
        raise ChunkCorrupt(_difference("header length", self.header_bytes, metadata.header_bytes))

    def _template_of(self, key: bytes, parent: bytes) -> bytearray:
        tokens = tail_tokens(key)
        is_state = not tokens and key == next_key(parent)
        template = bytearray(self._state_template if is_state else self._template)
        template[_OURS] = self._namespace_text
        if tokens:
            template[TOKEN_COUNT.slice] = TOKEN_COUNT.encode(tokens)
        return template


@lru_cache(maxsize=64)
def _templates(geometry: ChunkGeometry) -> tuple[bytes, bytes]:
    """Headers of a chunk and of a part of a state, without their namespace.

    Those of all namespaces of one geometry: each reset makes one, for weeks, and with many layers and ranks they take
    more than 100 KB.

    Raises:
        ConfigError: The geometry cannot be declared.
    """
    template = pack_metadata(bytes(DIGEST_BYTES), geometry.chunk_tokens, write_table(geometry_entries(geometry)))
    if len(template) > MAX_HEADER_BYTES:
        raise ConfigError(f"too many layers for one header. limit={MAX_HEADER_BYTES} observed={len(template)}")
    state_table = write_table(state_entries(geometry))
    return template, pack_metadata(bytes(DIGEST_BYTES), geometry.chunk_tokens, state_table, len(template))


def _check_constant_part(header: bytes, template: bytearray) -> None:
    constant = bytearray(header)
    for place, blank in _SEALED:
        constant[place] = blank
    if constant != template:
        at = next((i for i, (x, y) in enumerate(zip(constant, template, strict=False)) if x != y), len(template))
        expected, observed = text_of(template[at : at + 32]), text_of(constant[at : at + 32])
        raise ChunkCorrupt(f"{_difference('header template', expected, observed)} offset={at}")


class BlobCheck:
    """``BlobFormat.verify`` for a blob that is just being read: hashes what is there while more is coming.

    A piece that was read a moment ago is still in the processor's cache, and the kernel reads ahead meanwhile
    (benchmarks/verification.py). Threads: one.
    """

    __slots__ = ("_blob", "_done_bytes", "_form", "_hasher")

    def __init__(self, form: BlobFormat, blob: memoryview) -> None:
        """Begin with nothing of ``blob`` read."""
        self._form = form
        self._blob = blob
        self._done_bytes = form.header_bytes
        self._hasher = xxhash.xxh3_128()

    def advance(self, upto_bytes: int) -> None:
        """Hash up to this byte of the blob; it is final up to there."""
        if upto_bytes > self._done_bytes:
            self._hasher.update(self._blob[self._done_bytes : upto_bytes])
            self._done_bytes = upto_bytes

    def finish(self, key: bytes, prefix_sha256: bytes | None) -> None:
        """Check the blob, which is all there; raises what ``BlobFormat.verify`` does."""
        self._form.verify(self._blob, key, prefix_sha256, self._payload_hash)

    def _payload_hash(self) -> str:
        if self._done_bytes == self._form.header_bytes:  # nothing was told: all of it at once, without the GIL
            return _payload_hash(self._blob, self._form.header_bytes)
        self.advance(len(self._blob))
        return self._hasher.hexdigest()


def peek(first: bytes | memoryview) -> BlobHeader:
    """Read the metadata from the first ``PEEK_BYTES`` of a blob of any namespace, without checking any hash.

    Raises:
        ChunkMismatch: Another format version.
        ChunkCorrupt: This is not the start of a blob.
    """
    return _peek(bytes(first[:_METADATA_END]))


@lru_cache(maxsize=64)
def _peek(first: bytes) -> BlobHeader:
    """The same; kept for a moment, as a put asks at its check of the name and again where its blob is accounted for."""
    frame = read_frame(first)
    _check_version(frame)
    return read_metadata(first, frame.header_bytes)


def verified_fields(blob: memoryview) -> tuple[bytes, bytes, str]:
    """Prefix digest, tag and ``stored_by`` of a blob that was just verified: read where they are, without a check."""
    digest, tag, line = (str(blob[place], "ascii") for place in _VERIFIED_SLICES)
    return bytes.fromhex(digest), shared_tag(bytes.fromhex(tag)), shared_line(line.rstrip(" "))


def refuse_foreign(first: bytes | memoryview, namespace: bytes) -> None:
    """Tell a blob of somebody else, which may well have another size, from a damaged one of ours.

    Args:
        first: The first ``PEEK_BYTES`` of a blob whose size is not the expected one.

    Raises:
        ChunkMismatch: It is of another namespace or another format version.
    """
    try:
        header = peek(first)
    except ChunkCorrupt:
        return
    observed = header.record.namespace
    if observed != namespace:
        raise ChunkMismatch(f"blob of another namespace. observed={observed.hex()} expected={namespace.hex()}")


def read_header(data: memoryview) -> ParsedHeader:
    """Read and check a whole header of any namespace; ``data`` is the blob, or as much of it as holds the header.

    Never allocates more than 16 times ``MAX_HEADER_BYTES``.

    Raises:
        ChunkMismatch: A well-formed header of another format version.
        ChunkCorrupt: Anything else.
    """
    header, metadata = _whole_header(data)
    table = header[TABLE_OFFSET:].rstrip(b" ")
    tensors = read_table(table)
    expected = align_up(TABLE_OFFSET + len(table))
    if is_state(metadata.record):
        expected = max(expected, len(header))  # as long as the headers of its namespace's chunks
    if len(header) != expected:
        raise ChunkCorrupt(_difference("header length", expected, len(header)))
    return ParsedHeader(metadata, tensors)


def check_blob(blob: memoryview) -> ParsedHeader:
    """Verify a blob of any namespace against its own header; whether it is the blob asked for, the caller compares.

    Raises:
        ChunkMismatch: A well-formed header of another format version.
        ChunkCorrupt: Anything else.
    """
    parsed = read_header(blob)
    if len(blob) != parsed.blob_bytes:
        raise ChunkCorrupt(_difference("blob size", parsed.blob_bytes, len(blob)))
    header = parsed.header
    _check_payload(header.payload_xxh3.hex(), _payload_hash(blob, header.header_bytes), header.record.key)
    return parsed


def _whole_header(data: Bytes) -> tuple[bytes, BlobHeader]:
    """Copy the header out, once its hash is right and its version ours, and read its metadata."""
    frame = read_frame(data)
    if len(data) < frame.header_bytes:
        raise ChunkCorrupt(f"header is truncated. expected_bytes={frame.header_bytes} observed_bytes={len(data)}")
    header = bytes(data[: frame.header_bytes])
    check_header_hash(header)
    _check_version(frame)
    return header, read_metadata(header, frame.header_bytes)


def _check_version(frame: Frame) -> None:
    if frame.format_version != FORMAT_VERSION:
        raise ChunkMismatch(_difference("format version", FORMAT_VERSION, frame.format_version))


def _check_payload(expected: str, observed: str, key: bytes) -> None:
    if observed != expected:
        raise ChunkCorrupt(f"{_difference('payload_xxh3', expected, observed)} key={key.hex()}")


def _payload_hash(blob: memoryview, header_bytes: int) -> str:
    # The object, not xxh3_128_hexdigest(): only the object's constructor gives the GIL up (measured with xxhash 4.1:
    # two threads hash 32 MiB each in the time of one; with the function they take twice as long).
    return xxhash.xxh3_128(blob[header_bytes:]).hexdigest()


def _difference(what: str, expected: object, observed: object) -> str:
    return f"{what} mismatch. expected={expected} observed={observed}"


# -- the metadata ------------------------------------------------------------------------------------------------------


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
    found = _match_metadata(data)
    (version, _, namespace, key, parent, chunk_index, token_count, prefix_sha256, payload_xxh3, created, tag, _) = (
        text.decode("ascii") for text in found.groups()
    )
    record = ChunkRecord(
        namespace=bytes.fromhex(namespace),
        key=bytes.fromhex(key),
        parent=bytes.fromhex(parent),
        chunk_index=int(chunk_index),
        prefix_sha256=bytes.fromhex(prefix_sha256),
        tag=shared_tag(bytes.fromhex(tag)),
        stored_by=_stored_by(found),
    )
    return BlobHeader(
        record=record,
        format_version=int(version),
        token_count=int(token_count),
        payload_xxh3=bytes.fromhex(payload_xxh3),
        created_unix_s=int(created),
        header_bytes=header_bytes,
    )


def _match_metadata(data: Bytes) -> re.Match[bytes]:
    found = _METADATA.match(data, LENGTH_BYTES)
    if found is None:
        raise ChunkCorrupt(_first_bad_field(data))
    return found


def _stored_by(found: re.Match[bytes]) -> str:
    try:
        return shared_line(found[STORED_BY.name].decode("ascii").rstrip(" "))
    except ValueError as exc:
        raise ChunkCorrupt(f"{STORED_BY.name} is not well-formed: {exc}") from exc


def header_hash(header: Bytes) -> str:
    """Hash a whole header, length prefix and padding included, with the digits of its own hash as zeros."""
    zeroed = bytearray(header)
    zeroed[_HEADER_XXH3_SLICE] = _NO_HASH
    return xxhash.xxh3_128_hexdigest(zeroed)


def check_header_hash(header: Bytes) -> None:
    """Compare a whole header with the hash it holds.

    Raises:
        ChunkCorrupt: They differ.
    """
    expected, observed = bytes(header[HEADER_XXH3.slice]), header_hash(header)
    if observed.encode("ascii") != expected:
        raise ChunkCorrupt(f"header_xxh3 mismatch. expected={text_of(expected)} observed={observed}")


def pack_metadata(namespace: bytes, token_count: int, table: bytes, least_bytes: int = 0) -> bytes:
    """Write a header in which all that a seal fills in is zeros, or spaces: what is constant in a namespace.

    Args:
        table: The JSON after the metadata, from the comma to the last brace.
        least_bytes: Of the header.
    """
    constant: dict[Field, int | bytes] = {FORMAT: FORMAT_VERSION, NAMESPACE: namespace, TOKEN_COUNT: token_count}
    members = ",".join(
        f'"{f.name}":"{f.encode(constant[f]).decode("ascii") if f in constant else f.blank}"' for f in FIELDS
    )
    text = f'{{"__metadata__":{{{members}}}'.encode("ascii") + table
    json_bytes = max(align_up(LENGTH_BYTES + len(text)), least_bytes) - LENGTH_BYTES
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


# -- the tensor table --------------------------------------------------------------------------------------------------


def geometry_entries(geometry: ChunkGeometry) -> tuple[TensorEntry, ...]:
    """Declare a geometry's segments, named ``rank<r>/<layer>``, and the padding behind them.

    Raises:
        ConfigError: A rank has two layers of one name, or a name is not valid Unicode.
    """
    entries = []
    for segment in geometry.segments:
        name = f"rank{segment.rank}/{segment.page.layer}"
        if not _is_unicode(name):
            raise ConfigError(f"layer name is not valid Unicode. rank={segment.rank} layer={segment.page.layer!a}")
        shape = (geometry.stored_blocks(segment.page), *segment.page.shape)
        entries.append(TensorEntry(name, segment.page.dtype, shape, segment.offset_bytes, segment.size_bytes))
    if len({entry.name for entry in entries}) != len(entries):
        raise ConfigError("a rank has two layers of one name")
    pad_bytes = geometry.payload_bytes - geometry.data_bytes
    # Declared also when it is empty, so that a reader always finds the payload's end in the last tensor.
    entries.append(TensorEntry(PAD_NAME, "U8", (pad_bytes,), geometry.data_bytes, pad_bytes))
    return tuple(entries)


def state_entries(geometry: ChunkGeometry) -> tuple[TensorEntry, ...]:
    """Declare a part of a state: bytes of each rank in its own range of the payload, named ``rank<r>/state``."""
    entries = []
    for rank in range(len(geometry.ranks)):
        segments = geometry.rank_segments(rank)
        size = sum(segment.size_bytes for segment in segments)
        entries.append(TensorEntry(f"rank{rank}/state", "U8", (size,), segments[0].offset_bytes, size))
    pad_bytes = geometry.payload_bytes - geometry.data_bytes
    return (*entries, TensorEntry(PAD_NAME, "U8", (pad_bytes,), geometry.data_bytes, pad_bytes))


def write_table(entries: Iterable[TensorEntry]) -> bytes:
    """Write the table as it follows the metadata, from the comma before the first name to the last brace."""
    members = []
    for entry in entries:
        shape = ",".join(map(str, entry.shape))
        end = entry.offset_bytes + entry.size_bytes
        members.append(
            f',{json.dumps(entry.name)}:{{"dtype":"{entry.dtype}","shape":[{shape}],'
            f'"data_offsets":[{entry.offset_bytes},{end}]}}'
        )
    return ("".join(members) + "}").encode("ascii")


def read_table(table: bytes) -> tuple[TensorEntry, ...]:
    """Read a table that ``write_table`` wrote; allocates at most a small multiple of its length.

    Raises:
        ChunkCorrupt: It is not one: other JSON, tensors that overlap, leave a gap or do not fit their shape.
    """
    try:
        # Typed decoding: what does not fit the two declared structures fails before anything is built from it.
        members = _DECODER.decode(b"{" + table[1:])
    except (ValueError, RecursionError) as exc:
        # The reason quotes the table: damaged bytes, of any length.
        raise ChunkCorrupt(f"tensor table cannot be read. reason={str(exc)[:200]!a}") from exc
    entries = []
    position = 0
    for name, member in members.items():
        begin, end = member.data_offsets
        size = DTYPE_BYTES.get(member.dtype, 0) * prod(member.shape)
        if begin != position or end != position + size or member.dtype not in DTYPE_BYTES:
            raise ChunkCorrupt(
                f"tensor does not lie where it must. tensor={name[:200]!a} dtype={member.dtype!a} "
                f"expected={position},{position + size} observed={begin},{end}"
            )
        entries.append(TensorEntry(name, member.dtype, tuple(member.shape), begin, size))
        position = end
    if not entries or entries[-1].name != PAD_NAME or entries[-1].dtype != "U8" or position % ALIGNMENT_BYTES:
        raise ChunkCorrupt(f"tensor table does not end in padding to {ALIGNMENT_BYTES}. payload_bytes={position}")
    if write_table(entries) != table:
        raise ChunkCorrupt("tensor table is not written as a seal writes it (spaces, escapes or a repeated name)")
    return tuple(entries)


class _Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: Annotated[str, msgspec.Meta(max_length=16)]
    shape: Annotated[list[Annotated[int, msgspec.Meta(ge=0, le=MAX_EXTENT)]], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    data_offsets: tuple[int, int]


_DECODER: Final = msgspec.json.Decoder(dict[str, _Member])


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
