"""The tensor table of a blob's header: which tensor lies where in the payload, as safetensors wants it written.

Owns the JSON after the metadata; must not know keys or hashes. Used by ``header.py`` only. A table is written in one
way, so reading one is parsing it and comparing what this module would have written: no second set of rules to keep.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Annotated, Final

import msgspec

from tiered_kv.chunks.geometry import ALIGNMENT_BYTES, DTYPE_BYTES, ChunkGeometry
from tiered_kv.errors import ChunkCorrupt, ConfigError

PAD_NAME: Final = "_pad"
MAX_DIMENSIONS: Final = 16
MAX_EXTENT: Final = 2**48


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of the payload; ``offset_bytes`` counts from the payload's first byte."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int


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
