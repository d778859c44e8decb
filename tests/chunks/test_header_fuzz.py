"""Damaged headers through every reader: only the declared errors, and no memory beyond the declared bound."""

import random
import tracemalloc
from collections.abc import Callable

from tests.kit.counts import count
from tests.kit.samples.formats import (
    GOLDEN_NAMESPACE,
    GOLDEN_RECORD,
    chosen_seed,
    golden_geometry,
    sealed_blob,
)
from tiered_kv.chunks import header as f
from tiered_kv.chunks.header import MAX_HEADER_BYTES, PEEK_BYTES, BlobFormat, peek, read_header
from tiered_kv.errors import ChunkCorrupt, ChunkMismatch

MUTATIONS = count("FUZZ", 25_000)
ALLOCATION_BOUND = 16 * MAX_HEADER_BYTES

FORMAT = BlobFormat(GOLDEN_NAMESPACE, golden_geometry())
GOOD = bytes(sealed_blob(FORMAT))
TEXT_END = len(GOOD[: FORMAT.header_bytes].rstrip(b" "))
TOKENS = [
    *(b"{", b"}", b"[", b"]", b'"', b",", b":", b"\\", b"\\u0000", b"\\ud800", b"\xff", b"\x00", b" ", b"\n"),
    *(b"-1", b"0", b"1e999", b"NaN", b"null", b"true", b"9" * 30, b"[" * 40, b'"_pad"', b'"dtype"', b"data_offsets"),
    *(b"__metadata__", b"U8", b"F4", b"rank0/", b"\xc3\xa9", b"\xed\xa0\x80"),
    *(b"tiered_kv/0.9.1 ", b"vllm/dev", b"tiered_kv/ ", b"stored_by", b" " * 128),
]


def flip(source: random.Random, blob: bytearray) -> None:
    blob[source.randrange(TEXT_END)] ^= 1 << source.randrange(8)


def overwrite(source: random.Random, blob: bytearray) -> None:
    at, token = source.randrange(TEXT_END), source.choice(TOKENS)
    blob[at : at + len(token)] = token


def insert(source: random.Random, blob: bytearray) -> None:
    # The padding gives way, so that the header's length still fits.
    at, token = source.randrange(8, TEXT_END), source.choice(TOKENS)
    blob[at : FORMAT.header_bytes] = (token + blob[at : FORMAT.header_bytes])[: FORMAT.header_bytes - at]


def cut_out(source: random.Random, blob: bytearray) -> None:
    at, size = source.randrange(8, TEXT_END), source.randrange(1, 60)
    blob[at : FORMAT.header_bytes] = blob[at + size : FORMAT.header_bytes].ljust(FORMAT.header_bytes - at)


def copy_about(source: random.Random, blob: bytearray) -> None:
    at, start, size = source.randrange(TEXT_END), source.randrange(TEXT_END), source.randrange(1, 60)
    piece = blob[start : start + size]
    blob[at : at + len(piece)] = piece


def change_digit(source: random.Random, blob: bytearray) -> None:
    digits = [i for i in range(f.TABLE_OFFSET, TEXT_END) if 48 <= blob[i] <= 57]
    if digits:
        blob[source.choice(digits)] = source.choice(b"0123456789")


def change_length(source: random.Random, blob: bytearray) -> None:
    length = source.choice([0, 1, 2**63, 2**64 - 1, 4096, 4088, 8184, MAX_HEADER_BYTES, source.getrandbits(64)])
    blob[:8] = length.to_bytes(8, "little")


def truncate(source: random.Random, blob: bytearray) -> None:
    del blob[source.randrange(len(blob)) :]


MUTATORS: list[Callable[[random.Random, bytearray], None]] = [
    *([flip, overwrite, insert, cut_out, copy_about, change_digit] * 4),
    change_length,
    truncate,
]


def mutated(source: random.Random) -> bytearray:
    blob = bytearray(GOOD)
    for _ in range(source.choice((1, 1, 1, 2, 4))):
        source.choice(MUTATORS)(source, blob)
        if len(blob) < TEXT_END:
            return blob
    if source.random() < 0.7 and len(blob) > FORMAT.header_bytes:
        # Under a right hash, or nothing behind it would ever be read. Our own hash function is used as it is.
        blob[f.HEADER_XXH3.slice] = f.header_hash(blob[: FORMAT.header_bytes]).encode("ascii")
    return blob


def outcomes(blob: bytearray) -> list[str]:
    """How each reader ended; an error that is not declared ends the test."""
    view = memoryview(blob)
    readers: list[Callable[[], object]] = [
        lambda: peek(view[:PEEK_BYTES]),
        lambda: read_header(view),
        lambda: FORMAT.verify(view, GOLDEN_RECORD.key, GOLDEN_RECORD.prefix_sha256),
    ]
    result = []
    messages = []
    for read in readers:
        try:
            read()
        except (ChunkCorrupt, ChunkMismatch) as exc:
            messages.append(str(exc))
            result.append(type(exc).__name__)
        else:
            result.append("ok")
    # A message goes to logs: damaged bytes must not come through raw, nor at length.
    assert all(message.isascii() and len(message) < 1000 for message in messages)
    return result


def test_damaged_headers_raise_declared_errors_only():
    source = random.Random(chosen_seed(20_240_229))
    seen: dict[tuple[str, ...], int] = {}
    for _ in range(MUTATIONS):
        blob = mutated(source)
        ended = tuple(outcomes(blob))
        seen[ended] = seen.get(ended, 0) + 1
        if ended[2] == "ok":
            assert ended[:2] == ("ok", "ok")
            # What verify lets through differs at most in fields that a lookup does not know.
            for field in (f.HEADER_XXH3, f.PARENT, f.CHUNK_INDEX, f.CREATED_UNIX_S, f.TAG, f.STORED_BY):
                blob[field.slice] = GOOD[field.slice]
            assert bytes(blob) == GOOD
    # The mutations must reach every outcome of every reader, else they prove little.
    for reader in range(3):
        assert {ended[reader] for ended in seen} == {"ok", "ChunkCorrupt", "ChunkMismatch"}


def peak_of(blob: bytearray) -> int:
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    outcomes(blob)
    return tracemalloc.get_traced_memory()[1] - before


def largest_header(member: bytes) -> bytearray:
    """A header of the largest size, full of ``member``, under a right hash."""
    room = MAX_HEADER_BYTES - f.TABLE_OFFSET
    blob = bytearray(MAX_HEADER_BYTES)
    blob[:8] = (MAX_HEADER_BYTES - 8).to_bytes(8, "little")
    blob[8 : f.TABLE_OFFSET] = GOOD[8 : f.TABLE_OFFSET]
    table = b"," + (member * (room // len(member)))
    blob[f.TABLE_OFFSET :] = table[:room].ljust(room)
    blob[f.HEADER_XXH3.slice] = f.header_hash(blob).encode("ascii")
    return blob


def test_damaged_headers_allocate_no_more_than_the_declared_bound():
    source = random.Random(chosen_seed(20_240_301))
    worst = {
        "numbers": largest_header(b"0,"),
        "lists": largest_header(b"["),
        "strings": largest_header(b'"",'),
        "name": largest_header(b"a"),
        "quoted name": largest_header(b'"' + b"\\u00e9" * 10),
        "tensors": largest_header(
            b"".join(b'"%04x":{"dtype":"U8","shape":[],"data_offsets":[%d,%d]},' % (i, i, i + 1) for i in range(16_000))
        ),
        "shape": largest_header(b'"a":{"dtype":"U8","shape":[' + b"0," * 400_000),
        "escapes": largest_header(b'"a\\u00e9":{"dtype":"U8","shape":[],"data_offsets":[0,1]},'),
    }
    tracemalloc.start()
    try:
        peaks = {name: peak_of(blob) for name, blob in worst.items()}
        small = max(peak_of(mutated(source)) for _ in range(500))
    finally:
        tracemalloc.stop()
    assert max(peaks.values()) <= ALLOCATION_BOUND
    # A blob that merely claims a large header makes nobody allocate one.
    assert small <= 256 << 10
