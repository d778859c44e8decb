"""Extras of a chunk: everything besides its tokens that changes its KV, encoded.

No two sets of extras share their bytes.

Owns the encoding; must not decide which extras apply to a chunk (the vLLM door reads them from the request). Called by
the vLLM door; the bytes go into ``prefix_keys.PrefixKeys`` behind the chunk's tokens.

Each extra is a record, and records are sorted, so the order in which they were found does not matter::

    u8 tag | u32 length of the payload, little-endian | payload
    1 Lora         identity, UTF-8
    2 Salt         salt, UTF-8
    3 Multimodal   u32 offset, little-endian, then the identifier, UTF-8
    4 Embeds       32 bytes of SHA-256
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

MAX_OFFSET: Final = 2**32 - 1
SHA256_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class Lora:
    """The adapter of a request, identified by its weights and not by its name."""

    identity: str


@dataclass(frozen=True, slots=True)
class Salt:
    """The request's cache salt: only requests with the same salt share KV."""

    salt: str


@dataclass(frozen=True, slots=True)
class Multimodal:
    """An image, video or audio item that this chunk holds a part of.

    Attributes:
        identifier: vLLM's content hash of the item.
        offset: Position of the item's first placeholder token, counted from the start of the prompt: which part of
            the item a chunk holds follows from it.
    """

    identifier: str
    offset: int

    def __post_init__(self) -> None:
        if not 0 <= self.offset <= MAX_OFFSET:
            raise ValueError(f"offset of a multimodal item is outside uint32. offset={self.offset}")


@dataclass(frozen=True, slots=True)
class Embeds:
    """Digest of the prompt embeddings that stand in for this chunk's tokens."""

    sha256: bytes

    def __post_init__(self) -> None:
        if len(self.sha256) != SHA256_BYTES:
            raise ValueError(f"sha256 has another length. expected={SHA256_BYTES} observed={len(self.sha256)}")


Extra = Lora | Salt | Multimodal | Embeds


def encode(extras: Sequence[Extra]) -> bytes:
    """Encode the extras of one chunk; empty for none. Equal bytes mean equal extras and the other way round."""
    return b"".join(sorted(_record(extra) for extra in extras)) if extras else b""


def _record(extra: Extra) -> bytes:
    match extra:
        case Lora(identity):
            return _tagged(1, _text(identity))
        case Salt(salt):
            return _tagged(2, _text(salt))
        case Multimodal(identifier, offset):
            return _tagged(3, struct.pack("<I", offset) + _text(identifier))
        case Embeds(sha256):
            return _tagged(4, sha256)


def _tagged(tag: int, payload: bytes) -> bytes:
    return struct.pack("<BI", tag, len(payload)) + payload


def _text(value: str) -> bytes:
    # A salt is a user's JSON string and may hold a lone surrogate, which strict UTF-8 refuses: still one encoding each.
    return value.encode("utf-8", "surrogatepass")
