"""What the server knows of one engine: its workers, its scheduler, its sessions; and whether a worker's part is sound.

State and checks only; ``sessions.py`` moves it. A part is checked when it arrives, so that the worker that sent it gets
the reason and nothing unsound is ever combined.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tiered_kv.chunks.geometry import DTYPE_BYTES, ChunkGeometry, LayerPage
from tiered_kv.chunks.header import BlobFormat
from tiered_kv.errors import ConfigError, ProtocolError
from tiered_kv.hierarchy.plan import ChunkRecord
from tiered_kv.keys.namespace import DIGEST_BYTES, MAX_RECORD_BYTES, Namespace
from tiered_kv.metrics.figures import SessionFigures
from tiered_kv.server import messages as m
from tiered_kv.server.connection import Connection

CHUNK_INDEX_MAX = 1 << 31
"""Far above any context length, and within the ten digits that a header has for it."""

TOKENS_MAX = 1 << 20
"""Of a chunk; the longest context of a model seen so far is ten times that."""
DIMENSIONS_MAX = 15
EXTENT_MAX = 1 << 32


@dataclass(slots=True)
class Member:
    """A worker of a group; ``is_mapped`` until it said it unmapped the arena or its process exited."""

    connection: Connection
    join: m.JoinWorker
    is_mapped: bool = True


@dataclass(slots=True)
class Group:
    """One generation of one engine.

    Attributes:
        sessions: Engine sessions of this group: the last one is current, earlier ones (before a reset) only drain.
        granted: Slots the scheduler holds empty, per session.
        lookups: The scheduler's lookup id -> (engine session, engine lookup id).
        decliners: Connections of workers that cannot take part, until their processes exit.
    """

    engine_id: str
    generation: int
    scheduler: Connection | None = None
    world_size: int = 0
    members: dict[int, Member] = field(default_factory=dict)
    sessions: list[int] = field(default_factory=list)
    granted: dict[int, set[int]] = field(default_factory=dict)
    namespace: Namespace | None = None
    geometry: ChunkGeometry | None = None
    base_digest: bytes = b""
    lookups: dict[int, tuple[int, int]] = field(default_factory=dict)
    client_ids: dict[tuple[int, int], int] = field(default_factory=dict)
    early_credits: list[int] = field(default_factory=list)
    decliners: set[Connection] = field(default_factory=set)
    declined: str = ""
    is_ready: bool = False
    is_lost: bool = False

    @property
    def name(self) -> str:
        return f"{self.engine_id}/{self.generation}"

    @property
    def is_empty(self) -> bool:
        """Whether nobody takes part, or waits to be heard."""
        return self.scheduler is None and not self.members and not self.decliners

    @property
    def joins(self) -> list[m.JoinWorker]:
        """All workers' parts, by rank; call when all are in."""
        return [self.members[rank].join for rank in range(self.world_size)]

    def describe(self) -> SessionFigures:
        """Figures for ``stat``."""
        return SessionFigures(
            engine=self.name,
            namespace=self.namespace.digest.hex() if self.namespace else None,
            workers=len(self.members),
            declined=len(self.decliners),
            state="lost" if self.is_lost else "ready" if self.is_ready else "joining",
        )

    def is_drained(self, session: int) -> bool:
        """Whether the scheduler holds no slot and no lookup of a session any more."""
        return not self.granted[session] and all(owner != session for owner, _ in self.lookups.values())


def check_join(join: m.JoinWorker) -> None:
    """Check one worker's part by itself.

    Raises:
        ProtocolError: The rank or the world is out of range.
        ConfigError: No namespace or no blob can be made of it.
    """
    if not 0 <= join.rank < join.world_size <= m.RANKS_MAX:
        raise ProtocolError(f"rank or world out of range. rank={join.rank} world_size={join.world_size}")
    if not 0 < len(join.pages) <= m.LAYERS_MAX:
        raise ConfigError(f"layers out of range. layers={len(join.pages)} max={m.LAYERS_MAX}")
    if not 0 < join.block_tokens <= join.chunk_tokens <= TOKENS_MAX:
        raise ConfigError(
            f"block_tokens and chunk_tokens are out of range. block_tokens={join.block_tokens} "
            f"chunk_tokens={join.chunk_tokens} max={TOKENS_MAX}"
        )
    for page in join.pages:
        _check_page(page)
    try:
        BlobFormat(bytes(DIGEST_BYTES), geometry_of([join]))
    except ValueError as exc:
        raise ConfigError(str(exc)) from exc
    namespace_of([join], epoch="")


def _check_page(page: m.Page) -> None:
    if page.dtype not in DTYPE_BYTES:
        raise ConfigError(f"dtype cannot be stored. dtype={page.dtype[:16]!a} known={','.join(DTYPE_BYTES)}")
    if not 0 < len(page.shape) <= DIMENSIONS_MAX or not all(0 < extent <= EXTENT_MAX for extent in page.shape):
        raise ConfigError(f"page has an impossible shape. layer={page.layer[:100]!a} shape={page.shape[:16]}")
    if not 0 < len(page.layer) <= m.NAME_CHARS_MAX or len(page.axes) > m.NAME_CHARS_MAX:
        raise ConfigError(f"names have 1 to {m.NAME_CHARS_MAX} characters. layer={page.layer[:100]!a}")


def check_same_engine(join: m.JoinWorker, other: m.JoinWorker) -> None:
    """Check that two workers' parts belong together.

    Raises:
        ConfigError: They differ; the message names the setting and both values.
    """
    for name in ("world_size", "block_tokens", "chunk_tokens"):
        ours, theirs = getattr(join, name), getattr(other, name)
        if ours != theirs:
            raise ConfigError(
                f"workers of one engine disagree on {name}: rank {join.rank} has {ours}, rank {other.rank} has {theirs}"
            )
    if join.fields != other.fields:
        raise ConfigError(
            f"workers of one engine disagree on what they serve: rank {join.rank} has {_difference(join, other)}, "
            f"the other value is rank {other.rank}'s"
        )


def _difference(join: m.JoinWorker, other: m.JoinWorker) -> str:
    ours, theirs = json.loads(join.fields), json.loads(other.fields)
    names = [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
    shown = [f"{name}={str(ours.get(name))[:200]} and not {str(theirs.get(name))[:200]}" for name in names[:3]]
    return "; ".join(shown) or "the same fields written otherwise"


def geometry_of(joins: Sequence[m.JoinWorker]) -> ChunkGeometry:
    """The geometry of a chunk, from every rank's part in order.

    Raises:
        ValueError: The parts give none.
    """
    ranks = tuple(tuple(LayerPage(p.layer, p.dtype, p.shape, p.axes) for p in join.pages) for join in joins)
    return ChunkGeometry(joins[0].block_tokens, joins[0].chunk_tokens, ranks)


def namespace_of(joins: Sequence[m.JoinWorker], epoch: str) -> Namespace:
    """The namespace of an engine, from every rank's part in order.

    Raises:
        ConfigError: The fields give none.
    """
    if len(joins[0].fields) > MAX_RECORD_BYTES:
        raise ConfigError(f"namespace fields are too long. bytes={len(joins[0].fields)} max={MAX_RECORD_BYTES}")
    try:
        fields = json.loads(joins[0].fields)
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"the namespace's fields are not JSON: {exc}") from exc
    if not isinstance(fields, dict):
        raise ConfigError("the namespace's fields must be a JSON object")
    ranks = [
        [{"layer": p.layer, "dtype": p.dtype, "shape": list(p.shape), "axes": p.axes} for p in join.pages]
        for join in joins
    ]
    fields.update(
        geometry={"ranks": ranks},
        epoch=epoch,
        block_tokens=joins[0].block_tokens,
        chunk_tokens=joins[0].chunk_tokens,
    )
    return Namespace.from_fields(fields)


def recorded_geometry(fields: Mapping[str, Any]) -> ChunkGeometry:
    """The geometry that a record of :func:`namespace_of` tells.

    Raises:
        ConfigError: It tells none: somebody else wrote it.
    """
    try:
        ranks = tuple(
            tuple(LayerPage(page["layer"], page["dtype"], tuple(page["shape"]), page["axes"]) for page in rank)
            for rank in fields["geometry"]["ranks"]
        )
        return ChunkGeometry(fields["block_tokens"], fields["chunk_tokens"], ranks)
    except (KeyError, TypeError, ValueError) as exc:
        raise ConfigError("its record does not say in a known way what a chunk holds (geometry)") from exc


def chunk_record(group: Group, chunk: m.Chunk) -> ChunkRecord:
    """What the hierarchy calls a committed chunk.

    Raises:
        ProtocolError: It is no chunk of the group's namespace.
    """
    assert group.namespace is not None
    lengths = (len(chunk.key), len(chunk.parent), len(chunk.prefix_sha256))
    if lengths != (m.KEY_BYTES, m.KEY_BYTES, m.DIGEST_BYTES):
        raise ProtocolError(f"a committed chunk has a key or digest of the wrong length. lengths={lengths}")
    is_first = chunk.parent == group.namespace.digest
    if not 0 <= chunk.chunk_index <= CHUNK_INDEX_MAX or is_first != (chunk.chunk_index == 0):
        raise ProtocolError(f"a committed chunk is not where its parent says. chunk_index={chunk.chunk_index}")
    return ChunkRecord(group.namespace.digest, chunk.key, chunk.parent, chunk.chunk_index, chunk.prefix_sha256)


def other_world(group: Group, workers_say: int) -> str:
    """Why a scheduler and its workers cannot form a session."""
    return (
        f"scheduler and workers of engine {group.name} disagree on world_size: the scheduler has {group.world_size}, "
        f"a worker has {workers_say}"
    )
