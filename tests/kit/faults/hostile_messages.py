"""Messages that no honest peer sends: every type of a union with hostile values in its fields, derived from the code.

A message type that is added to the protocol is fuzzed from the same day on. Values are plain objects, not structs, so
that they may be of the wrong type, and frames may be damaged once more as bytes.
"""

import random
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.server import protocol as m

INTEGERS = (0, 1, 2, -1, 255, 1 << 18, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1)
FLOATS = (0.0, -1.0, 1e-300, 1e300, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    "",
    "a",
    "\x00",
    "a\nb",
    "../../etc",
    "\x1b[2J",
    "%s%n",
    "é",
    "\ud7ff",
    "x" * 201,
    "x" * 70_000,
    "private-",
    "0" * 16,
)
BYTES = (b"", b"\xff", bytes(15), bytes(16), bytes(17), bytes(32), b"{}", b"[" * 3000, b'{"epoch":1}', bytes(1 << 16))
OTHER: tuple[object, ...] = (None, True, 1.5, "text", b"bytes", [], {}, [[]], {"type": "Hello"}, -1)
LENGTHS = (0, 1, 1, 2, 3, 17)
LONG = 1000


def types_of(union: Any) -> tuple[type[m.Message], ...]:
    """The message types of ``FromClient`` or ``FromServer``."""
    return typing.get_args(union)


def body(source: random.Random, kind: type[m.Message], *, wrong_types: float = 0.05) -> bytes:
    """One message of a type with drawn values, as msgpack; ``wrong_types`` of its fields are of another type."""
    fields: dict[str, Any] = {"type": kind.__name__}
    for name, value in typing.get_type_hints(kind).items():
        if name.startswith("__") or source.random() < 0.02:  # sometimes one is missing
            continue
        fields[name] = source.choice(OTHER) if source.random() < wrong_types else _value(source, value)
    if source.random() < 0.02:
        fields["more"] = source.choice(OTHER)
    return msgspec.msgpack.encode(fields)


def _value(source: random.Random, kind: Any) -> Any:
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        return _value(source, source.choice(typing.get_args(kind)))
    if origin in (list, tuple, frozenset):
        (item, *_) = typing.get_args(kind)
        length = LONG if source.random() < 0.02 else source.choice(LENGTHS)
        return [_value(source, item) for _ in range(length)]
    if kind is ChunkRecord and source.random() < 0.3:  # parts drawn one by one are hardly ever all of their lengths
        return [*(bytes([source.randrange(3)] * 16) for _ in range(3)), source.randrange(1, 3), bytes(32)]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind)
        return [_value(source, hints[name]) for name in kind.__struct_fields__]
    return _DRAWN[kind](source)


_DRAWN: dict[Any, Callable[[random.Random], Any]] = {
    int: lambda source: source.choice(INTEGERS) if source.random() < 0.6 else source.randrange(8),
    float: lambda source: source.choice(FLOATS),
    str: lambda source: source.choice(TEXTS),
    bytes: lambda source: source.choice(BYTES),
    bool: lambda source: source.random() < 0.5,
    type(None): lambda source: None,
}


def damaged(source: random.Random, data: bytes) -> bytes:
    """A frame with its length right, wrong or huge, and its bytes flipped, cut, doubled or as they were."""
    changed = bytearray(data)
    for _ in range(source.choice((0, 0, 0, 1, 3))):
        if changed:
            changed[source.randrange(len(changed))] ^= 1 << source.randrange(8)
    cut = source.random()
    if cut < 0.03:
        changed = changed[: source.randrange(len(changed) + 1)]
    elif cut < 0.06:
        changed += changed[: source.randrange(len(changed) + 1)]
    length = len(changed)
    if source.random() < 0.03:
        length = source.choice((0, 1, length + 1, m.FRAME_BYTES_MAX, m.FRAME_BYTES_MAX + 1, 0xFFFFFFFF))
    return m.LENGTH.pack(length) + bytes(changed)


def hostile_frame(source: random.Random, kinds: Sequence[type[m.Message]]) -> bytes:
    """A frame of one of the types, or one of a good message's with damage."""
    return damaged(source, body(source, source.choice(kinds), wrong_types=source.choice((0.0, 0.0, 0.05, 0.5))))
