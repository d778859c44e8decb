"""Seal a blob right before its first put, verify it right after every get, and read headers of unknown namespaces.

Owns what makes a blob trustworthy (docs/format.md): the header's template, the two hashes and the order in which they
are checked. Must not read or write media. ``BlobFormat`` is the hot path and compares bytes at fixed offsets; ``peek``
serves scans; ``read_header`` and ``check_blob`` serve the CLI, which does not know the geometry. Nothing here copies a
payload; a whole payload is hashed without the GIL, in parallel by several threads (a piece of one with it: 20 us for
512 KiB).
"""

from collections.abc import Callable
from dataclasses import dataclass

import xxhash

from tiered_kv.chunks import fields as f
from tiered_kv.chunks.fields import MAX_HEADER_BYTES, PEEK_BYTES, BlobHeader, Bytes, SealFields
from tiered_kv.chunks.geometry import ChunkGeometry, align_up
from tiered_kv.chunks.table import TensorEntry, geometry_entries, read_table, write_table
from tiered_kv.errors import ChunkCorrupt, ChunkMismatch, ConfigError
from tiered_kv.keys.namespace import FORMAT_VERSION

__all__ = [
    "FORMAT_VERSION",
    "MAX_HEADER_BYTES",
    "PEEK_BYTES",
    "BlobCheck",
    "BlobFormat",
    "BlobHeader",
    "ParsedHeader",
    "SealFields",
    "TensorEntry",
    "check_blob",
    "peek",
    "read_header",
]

_SEALED_FIELDS = (
    f.HEADER_XXH3,
    f.KEY,
    f.PARENT,
    f.CHUNK_INDEX,
    f.PREFIX_SHA256,
    f.PAYLOAD_XXH3,
    f.CREATED_UNIX_S,
    f.TAG,
    f.STORED_BY,
)


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


class BlobFormat:
    """How the blobs of one namespace are written and checked.

    Threads: immutable; any number of threads may seal and verify different blobs at once.
    """

    __slots__ = ("_data_bytes", "_namespace", "_template", "blob_bytes", "header_bytes", "payload_bytes")

    def __init__(self, namespace_digest: bytes, geometry: ChunkGeometry) -> None:
        """Build the header's template.

        Raises:
            ConfigError: The geometry cannot be declared: too many layers for a header, or names that clash.
        """
        template = f.pack_metadata(namespace_digest, geometry.chunk_tokens, write_table(geometry_entries(geometry)))
        if len(template) > MAX_HEADER_BYTES:
            raise ConfigError(f"too many layers for one header. limit={MAX_HEADER_BYTES} observed={len(template)}")
        self._namespace = namespace_digest
        self._template = template
        self._data_bytes = geometry.data_bytes
        self.header_bytes = len(template)
        self.payload_bytes = geometry.payload_bytes
        self.blob_bytes = self.header_bytes + self.payload_bytes

    def seal(self, blob: memoryview, fields: SealFields) -> None:
        """Write padding and header around the payload that lies in ``blob``.

        Modifies:
            The first ``header_bytes`` of ``blob``, and the padding behind the last tensor: a slot used before must not
            carry another chunk's bytes into a file.

        Raises:
            ValueError: ``blob`` is not ``blob_bytes`` long.
        """
        if len(blob) != self.blob_bytes:
            raise ValueError(f"blob has another size. expected={self.blob_bytes} observed={len(blob)}")
        blob[self.header_bytes + self._data_bytes :] = bytes(self.payload_bytes - self._data_bytes)
        header = bytearray(self._template)
        header[f.KEY.slice] = f.KEY.encode(fields.key)
        header[f.PARENT.slice] = f.PARENT.encode(fields.parent)
        header[f.CHUNK_INDEX.slice] = f.CHUNK_INDEX.encode(fields.chunk_index)
        header[f.PREFIX_SHA256.slice] = f.PREFIX_SHA256.encode(fields.prefix_sha256)
        header[f.CREATED_UNIX_S.slice] = f.CREATED_UNIX_S.encode(fields.created_unix_s)
        header[f.TAG.slice] = f.TAG.encode(fields.tag)
        header[f.STORED_BY.slice] = f.STORED_BY.encode(fields.stored_by)
        header[f.PAYLOAD_XXH3.slice] = _payload_hash(blob, self.header_bytes).encode("ascii")
        header[f.HEADER_XXH3.slice] = f.header_hash(header).encode("ascii")
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
        header, metadata = _whole_header(blob)
        if metadata.namespace != self._namespace:
            raise ChunkMismatch(_difference("namespace", self._namespace.hex(), metadata.namespace.hex()))
        if len(blob) != self.blob_bytes:
            raise ChunkCorrupt(_difference("blob size", self.blob_bytes, len(blob)))
        self._check_constant_part(header)
        if metadata.key != key:
            raise ChunkCorrupt(_difference("key", key.hex(), metadata.key.hex()))
        if prefix_sha256 is not None and metadata.prefix_sha256 != prefix_sha256:
            raise ChunkCorrupt(_difference("prefix_sha256", prefix_sha256.hex(), metadata.prefix_sha256.hex()))
        _check_payload(metadata, hasher() if hasher else _payload_hash(blob, self.header_bytes))

    def _check_constant_part(self, header: bytes) -> None:
        constant = bytearray(header)
        for field in _SEALED_FIELDS:
            constant[field.slice] = self._template[field.slice]
        if constant != self._template:
            at = next(i for i, (x, y) in enumerate(zip(constant, self._template, strict=True)) if x != y)
            expected, observed = f.text_of(self._template[at : at + 32]), f.text_of(constant[at : at + 32])
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
    frame = f.read_frame(first)
    _check_version(frame)
    return f.read_metadata(first, frame.header_bytes)


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
    if header.namespace != namespace:
        raise ChunkMismatch(f"blob of another namespace. observed={header.namespace.hex()} expected={namespace.hex()}")


def read_header(data: memoryview) -> ParsedHeader:
    """Read and check a whole header of any namespace; ``data`` is the blob, or as much of it as holds the header.

    Never allocates more than 16 times ``MAX_HEADER_BYTES``.

    Raises:
        ChunkMismatch: A well-formed header of another format version.
        ChunkCorrupt: Anything else.
    """
    header, metadata = _whole_header(data)
    table = header[f.TABLE_OFFSET :].rstrip(b" ")
    tensors = read_table(table)
    if len(header) != align_up(f.TABLE_OFFSET + len(table)):
        raise ChunkCorrupt(_difference("header length", align_up(f.TABLE_OFFSET + len(table)), len(header)))
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
    _check_payload(parsed.header, _payload_hash(blob, parsed.header.header_bytes))
    return parsed


def _whole_header(data: Bytes) -> tuple[bytes, BlobHeader]:
    """Copy the header out, once its hash is right and its version ours, and read its metadata."""
    frame = f.read_frame(data)
    if len(data) < frame.header_bytes:
        raise ChunkCorrupt(f"header is truncated. expected_bytes={frame.header_bytes} observed_bytes={len(data)}")
    header = bytes(data[: frame.header_bytes])
    f.check_header_hash(header)
    _check_version(frame)
    return header, f.read_metadata(header, frame.header_bytes)


def _check_version(frame: f.Frame) -> None:
    if frame.format_version != FORMAT_VERSION:
        raise ChunkMismatch(_difference("format version", FORMAT_VERSION, frame.format_version))


def _check_payload(metadata: BlobHeader, observed: str) -> None:
    if observed != metadata.payload_xxh3.hex():
        raise ChunkCorrupt(
            f"{_difference('payload_xxh3', metadata.payload_xxh3.hex(), observed)} key={metadata.key.hex()}"
        )


def _payload_hash(blob: memoryview, header_bytes: int) -> str:
    # The object, not xxh3_128_hexdigest(): only the object's constructor gives the GIL up (measured with xxhash 4.1:
    # two threads hash 32 MiB each in the time of one; with the function they take twice as long).
    return xxhash.xxh3_128(blob[header_bytes:]).hexdigest()


def _difference(what: str, expected: object, observed: object) -> str:
    return f"{what} mismatch. expected={expected} observed={observed}"
