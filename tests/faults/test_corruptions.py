"""Generated damage to stored blobs, all of which a read must notice; and sound blobs, none of which it may refuse.

Read as the server reads: the disk tier's contract, the verifying wrapper, the comparison with the index, the outcome.
``make prove`` generates 1,000,000 (``TIERED_KV_CORRUPTIONS``). What a writer with access could forge is another matter:
checksums are no signatures (docs/security.md).
"""

import random
from collections import Counter
from collections.abc import Callable

import pytest

from tests.kit.counts import count, seed
from tests.kit.engine_world import GEOMETRIES, NAMESPACES, SPACES, payload_of
from tests.kit.fake_clock import FakeClock
from tiered_kv.chunks.arena import Arena, create_slabs
from tiered_kv.chunks.header import BlobFormat
from tiered_kv.engine.performer import Performer
from tiered_kv.errors import ChunkCorrupt
from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.testing.memory import MemoryTier
from tiered_kv.tiering.types import Outcome, Read
from tiered_kv.tiers.base import BlobName
from tiered_kv.tiers.wrappers.verified import VerifiedTier

CORRUPTIONS = count("CORRUPTIONS", 20_000)
SOUND_EVERY = 10
"""So many corruptions to one sound read."""

FORMATS = {NAMESPACES[name].digest: BlobFormat(NAMESPACES[name].digest, GEOMETRIES[name]) for name in NAMESPACES}


def sealed(space: str, path: tuple[int, ...]) -> tuple[ChunkRecord, bytes]:
    """A sound blob, as it was stored."""
    record, form = SPACES[space].record(path), FORMATS[NAMESPACES[space].digest]
    blob = bytearray(form.blob_bytes)
    size = GEOMETRIES[space].data_bytes
    blob[form.header_bytes : form.header_bytes + size] = payload_of(record.key, size)
    form.seal(memoryview(blob), record, 1)
    return record, bytes(blob)


PATHS = [(1,), (1, 2), (1, 2, 3), (4,), (4, 5)]
STORED = {(space, path): sealed(space, path) for space in ("small", "other", "large") for path in PATHS}
OURS = [(space, path) for space, path in STORED if space == "small"]
HEADER_BYTES = FORMATS[NAMESPACES["small"].digest].header_bytes
Draw = random.Random


def bit_flip(draw: Draw, data: bytes) -> bytes:
    at = draw.randrange(len(data) * 8)
    return data[: at // 8] + bytes([data[at // 8] ^ 1 << at % 8]) + data[at // 8 + 1 :]


def several_flips(draw: Draw, data: bytes) -> bytes:
    damaged = bytearray(data)
    for _ in range(draw.randrange(2, 9)):
        damaged[draw.randrange(len(data))] ^= draw.randrange(1, 256)
    return bytes(damaged)


def truncation(draw: Draw, data: bytes) -> bytes:
    return data[: draw.randrange(len(data))]


def extension(draw: Draw, data: bytes) -> bytes:
    return data + bytes(draw.randrange(1, 5000))


def torn_write(draw: Draw, data: bytes) -> bytes:
    """From some page on, or only some pages, nothing was written."""
    damaged = bytearray(data)
    pages = range(0, len(data), 4096)
    for at in draw.choice((pages[draw.randrange(len(pages)) :], draw.sample(pages, draw.randrange(1, len(pages) + 1)))):
        damaged[at : at + 4096] = bytes(4096)
    return bytes(damaged)


def pages_of_another(draw: Draw, data: bytes) -> bytes:
    """A lost write: pages of the file's former life, sound ones of another blob of the same size."""
    other = STORED[draw.choice(OURS)][1]
    at = draw.randrange(0, len(data), 512)
    size = draw.choice((512, 4096, len(data)))
    return data[:at] + other[at : at + size] + data[at + size :]


def swap(draw: Draw, _data: bytes) -> bytes:
    """A whole sound blob of another chunk under this name."""
    return STORED[draw.choice(OURS)][1]


def from_another_namespace(draw: Draw, _data: bytes) -> bytes:
    space, path = draw.choice([place for place in STORED if place not in OURS])
    return STORED[space, path][1]


def header_edit(draw: Draw, data: bytes) -> bytes:
    """A field made to say something else, by whoever does not know of its checksum."""
    damaged = bytearray(data)
    text = data[8:HEADER_BYTES]
    digits = [8 + i for i, byte in enumerate(text) if byte in b"0123456789abcdef"]
    start = draw.randrange(len(digits))
    for at in digits[start : start + draw.randrange(1, 40)]:
        damaged[at] = draw.choice(b"0123456789abcdef")
    return bytes(damaged)


def header_of_another(draw: Draw, data: bytes) -> bytes:
    """Somebody's whole header before our payload."""
    return STORED[draw.choice(list(STORED))][1][:HEADER_BYTES] + data[HEADER_BYTES:]


def payload_of_another(draw: Draw, data: bytes) -> bytes:
    return data[:HEADER_BYTES] + STORED[draw.choice(OURS)][1][HEADER_BYTES:]


def shifted(draw: Draw, data: bytes) -> bytes:
    at = draw.randrange(len(data))
    by = draw.randrange(1, 64)
    return (data[:at] + bytes(by) + data[at:])[: len(data)]


CORRUPTERS: list[Callable[[Draw, bytes], bytes]] = [
    bit_flip,
    several_flips,
    truncation,
    extension,
    torn_write,
    pages_of_another,
    swap,
    from_another_namespace,
    header_edit,
    header_of_another,
    payload_of_another,
    shifted,
]


class Reader:
    """A tier with blobs that are not what they were, and what a server makes of them."""

    def __init__(self) -> None:
        self.memory = MemoryTier()
        self.arena = Arena(create_slabs(1))
        self.arena.allocate(0, 1 << 20)
        tier = VerifiedTier(self.memory, FORMATS.get)
        self.performer = Performer([tier], self.arena, FakeClock(), dict(FORMATS))

    def read(self, record: ChunkRecord, data: bytes) -> Outcome:
        self.memory.raw_put(BlobName(record.namespace, record.key), data)
        return self.performer.perform(Read(0, record, 0)).outcome

    def slot(self, size_bytes: int) -> bytes:
        with self.performer.slot_view(0, size_bytes) as view:
            return bytes(view)

    def close(self) -> None:
        self.arena.close()


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_corruption_is_noticed_and_no_sound_blob_refused() -> None:
    draw, reader = Draw(f"corruptions {seed()}"), Reader()
    done: Counter[str] = Counter()
    while sum(done.values()) - done["sound"] < CORRUPTIONS:
        record, data = STORED[draw.choice(OURS)]
        corrupter = draw.choice(CORRUPTERS)
        damaged = corrupter(draw, data)
        if damaged == data:
            continue
        outcome = reader.read(record, damaged)
        assert outcome in (Outcome.CORRUPT, Outcome.FOREIGN), (
            f"seed={seed()} number={sum(done.values())} {corrupter.__name__}: {outcome}"
        )
        done[corrupter.__name__] += 1
        if sum(done.values()) % SOUND_EVERY == 0:
            assert reader.read(record, data) is Outcome.OK, "a sound blob was refused"
            assert reader.slot(len(data)) == data
            done["sound"] += 1
    print(dict(done))
    assert len(done) == len(CORRUPTERS) + 1 and min(done.values()) > CORRUPTIONS // 100
    reader.close()


@pytest.mark.parametrize("corrupter", CORRUPTERS, ids=lambda corrupter: corrupter.__name__)
def test_a_tier_alone_serves_all_but_other_sizes(corrupter: Callable[[Draw, bytes], bytes]) -> None:
    """The control: what the wrapper is for."""
    memory, draw = MemoryTier(), Draw(1)
    record, data = STORED[OURS[1]]
    damaged = next(one for one in (corrupter(draw, data) for _ in range(99)) if one != data)
    name, slot = BlobName(record.namespace, record.key), bytearray(len(data))
    memory.raw_put(name, damaged)
    if len(damaged) != len(data):
        with pytest.raises(ChunkCorrupt):
            memory.get_into(name, memoryview(slot))
    else:
        assert memory.get_into(name, memoryview(slot))
        assert bytes(slot) == damaged
