"""What is true in the cache simulation: every chunk's bytes, as a dictionary, and what was damaged on purpose.

Owns no engine. A chunk is a path of small numbers in one of three namespaces, as everywhere in the tests of the engine
(``engine_world.py``).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from tests.kit.engine_world import GEOMETRIES, NAMESPACES, SPACES, Path, payload_of
from tiered_kv.chunks.header import BlobFormat
from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.tiers.base import BlobName

NAMES = sorted(SPACES)
FORMATS = {name: BlobFormat(NAMESPACES[name].digest, GEOMETRIES[name]) for name in NAMES}
_BY_DIGEST = {NAMESPACES[name].digest: name for name in NAMES}


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk.

    Attributes:
        first, end: Where in its blob the payload lies.
    """

    space: str
    path: Path
    record: ChunkRecord
    name: BlobName
    payload: bytes
    first: int
    end: int

    @property
    def label(self) -> str:
        """A short name for traces."""
        return f"{self.space[0]}{'.'.join(map(str, self.path))}"


CHUNKS: dict[bytes, Chunk] = {}
"""Every chunk anybody asked for, by its key."""


@cache
def chunk(space: str, path: Path) -> Chunk:
    """The last chunk of a prefix."""
    record = SPACES[space].record(path)
    name = BlobName(record.namespace, record.key, record.parent, record.chunk_index)
    size, first = GEOMETRIES[space].data_bytes, FORMATS[space].header_bytes
    made = Chunk(space, path, record, name, payload_of(record.key, size), first, first + size)
    return CHUNKS.setdefault(record.key, made)


@cache
def prefix(space: str, path: Path) -> tuple[Chunk, ...]:
    """A prefix's chunks, first to last."""
    return tuple(chunk(space, path[: depth + 1]) for depth in range(len(path)))


class Asked:
    """Which chunks a prompt had, or two answers: others that were generated must be written nowhere."""

    def __init__(self) -> None:
        self._prompts: set[bytes] = set()
        self._generated: set[bytes] = set()

    def has_prompt(self, chunks: Iterable[Chunk]) -> None:
        """A request looks them up, or an operator pins them."""
        self._prompts.update(one.record.key for one in chunks)

    def has_generated(self, made: Chunk) -> None:
        """A request commits it as an answer's; a second time that counts for all before it, as a prompt would."""
        if made.record.key in self._generated:
            self.has_prompt(prefix(made.space, made.path))
        self._generated.add(made.record.key)

    def check(self, names: Iterable[BlobName]) -> None:
        """Assert that all of these may have been written."""
        for name in names:
            assert name.key in self._prompts or name.key not in self._generated, (
                f"an answer is written that no prompt has. chunk={label(name)}"
            )


def label(name: BlobName | None) -> str:
    """A short name for traces; self-tests make names of their own."""
    known = CHUNKS.get(name.key) if name is not None else None
    return known.label if known is not None else "-" if name is None else "test"


def is_right(name: BlobName, blob: bytes) -> bool:
    """Whether a blob is what its name says: judged by the dictionary, not by its own checksums."""
    known = CHUNKS.get(name.key)
    if known is None:
        return name.namespace not in _BY_DIGEST
    return len(blob) == FORMATS[known.space].blob_bytes and blob[known.first : known.end] == known.payload
