"""What the server knows of one engine: its workers, its scheduler, its sessions; and whether a worker's part is sound.

State and checks only; ``sessions.py`` moves it. A part is checked when it arrives, so that the worker that sent it gets
the reason and nothing unsound is ever combined.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from tiered_kv.chunks.geometry import DTYPE_BYTES, ChunkGeometry, LayerPage
from tiered_kv.chunks.header import BlobFormat
from tiered_kv.errors import ConfigError, ProtocolError
from tiered_kv.keys.namespace import DIGEST_BYTES, MAX_RECORD_BYTES, Namespace
from tiered_kv.keys.stored_by import StoredBy, shared_line, stored_by
from tiered_kv.server import protocol as m
from tiered_kv.server.epochs import is_private_epoch
from tiered_kv.tiering.quotas import Quota

TOKENS_MAX = 1 << 20
"""Of a chunk; the longest context of a model seen so far is ten times that."""

DIMENSIONS_MAX = 15
LEASE_S_MIN, LEASE_S_MAX = 1, 3600
EXTENT_MAX = 1 << 32


def check_scheduler(join: m.JoinScheduler) -> Quota | None:
    """Check a scheduler's part; returns the quota it states, if it states one.

    Raises:
        ProtocolError: The world or a share is out of range, or the epoch is no private one.
    """
    if not 0 < join.world_size <= m.RANKS_MAX:
        raise ProtocolError(f"world out of range. world_size={join.world_size} max={m.RANKS_MAX}")
    least, most = join.min_share or 0.0, 1.0 if join.max_share is None else join.max_share
    if not 0 <= least <= most <= 1 or most == 0:
        raise ProtocolError(f"shares out of range. min_share={join.min_share} max_share={join.max_share}")
    if not LEASE_S_MIN <= join.lease_s <= LEASE_S_MAX:
        raise ProtocolError(f"lease_s out of range. lease_s={join.lease_s} min={LEASE_S_MIN} max={LEASE_S_MAX}")
    if join.epoch and not is_private_epoch(join.epoch):
        raise ProtocolError(f"an engine may name no epoch but its private one. epoch={join.epoch[:100]!a}")
    return None if join.min_share is None and join.max_share is None else Quota(least, most)


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
    try:
        StoredBy.parse(join.stored_by)
    except ValueError as exc:
        raise ConfigError(f"a worker says who stores its chunks: {exc}") from exc


def _check_page(page: m.Page) -> None:
    if page.dtype not in DTYPE_BYTES:
        raise ConfigError(f"dtype cannot be stored. dtype={page.dtype[:16]!a} known={','.join(DTYPE_BYTES)}")
    if not 0 < len(page.shape) <= DIMENSIONS_MAX or not all(0 < extent <= EXTENT_MAX for extent in page.shape):
        raise ConfigError(f"page has an impossible shape. layer={page.layer[:100]!a} shape={page.shape[:16]}")
    if not 0 < len(page.layer) <= m.NAME_CHARS_MAX or max(len(page.axes), len(page.encoding)) > m.NAME_CHARS_MAX:
        raise ConfigError(f"names have 1 to {m.NAME_CHARS_MAX} characters. layer={page.layer[:100]!a}")
    if not 0 <= page.blocks <= TOKENS_MAX:
        raise ConfigError(f"stored blocks are out of range. layer={page.layer[:100]!a} blocks={page.blocks}")
    if not 0 < page.tokens_per_state <= TOKENS_MAX:
        raise ConfigError(
            f"tokens per state are out of range. layer={page.layer[:100]!a} tokens_per_state={page.tokens_per_state}"
        )


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
    ours, theirs = (StoredBy.parse(one.stored_by) for one in (join, other))
    if replace(ours, encoding=theirs.encoding) != theirs:  # layers of another kind may have another encoding
        raise ConfigError(
            f"workers of one engine disagree on who stores: rank {join.rank} says {join.stored_by}, rank {other.rank} "
            f"says {other.stored_by}"
        )
    if join.fields != other.fields:
        raise ConfigError(
            f"workers of one engine disagree on what they serve: rank {join.rank} has {_difference(join, other)}, "
            f"the other value is rank {other.rank}'s"
        )


def stored_by_all(joins: Sequence[m.JoinWorker]) -> str:
    """Who stores what all ranks copy together: their encodings in order, each once."""
    first = StoredBy.parse(joins[0].stored_by)
    encodings = dict.fromkeys(StoredBy.parse(join.stored_by).encoding for join in joins)
    return shared_line(stored_by(first.package, first.door, first.version, ",".join(encodings)))


def _difference(join: m.JoinWorker, other: m.JoinWorker) -> str:
    ours, theirs = _by_path(json.loads(join.fields)), _by_path(json.loads(other.fields))
    names = [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
    shown = [f"{name}={str(ours.get(name))[:200]} and not {str(theirs.get(name))[:200]}" for name in names[:3]]
    return "; ".join(shown) or "the same fields written otherwise"


def _by_path(fields: Mapping[str, Any], before: str = "") -> dict[str, object]:
    """Fields below their paths, through all objects: ``settings.kernel_config.moe_backend``."""
    found: dict[str, object] = {}
    for name, value in fields.items():
        found |= _by_path(value, f"{before}{name}.") if isinstance(value, dict) else {f"{before}{name}": value}
    return found


def parts_of(joins: Sequence[m.JoinWorker]) -> list[int]:
    """Which part of the payload each rank's bytes are, from 0 in the order of the ranks: ``[0, 0, 1, 1]``.

    Raises:
        ConfigError: Ranks that say they hold equal KV have different pages.
    """
    first: dict[tuple[bool, int], tuple[int, m.JoinWorker]] = {}
    parts = []
    for join in joins:
        name = (join.part is None, join.rank if join.part is None else join.part)
        number, other = first.setdefault(name, (len(first), join))
        if join.pages != other.pages:
            raise ConfigError(
                f"ranks {other.rank} and {join.rank} say that their KV is the same, and their layers differ. "
                f"part={join.part}"
            )
        parts.append(number)
    return parts


def _part_pages(joins: Sequence[m.JoinWorker]) -> list[list[m.Page]]:
    """The pages of every part, in order."""
    pages: dict[int, list[m.Page]] = {}
    for part, join in zip(parts_of(joins), joins, strict=True):
        pages.setdefault(part, join.pages)
    return list(pages.values())


def geometry_of(joins: Sequence[m.JoinWorker]) -> ChunkGeometry:
    """The geometry of a chunk, from every rank's part in order.

    Raises:
        ConfigError, ValueError: The parts give none.
    """
    ranks = tuple(
        tuple(LayerPage(p.layer, p.dtype, p.shape, p.axes, p.blocks, p.tokens_per_state) for p in pages)
        for pages in _part_pages(joins)
    )
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
    ranks = [[_page_record(page) for page in pages] for pages in _part_pages(joins)]
    fields.update(
        geometry={"ranks": ranks},
        epoch=epoch,
        block_tokens=joins[0].block_tokens,
        chunk_tokens=joins[0].chunk_tokens,
    )
    encodings = [_runs([page.encoding for page in pages]) for pages in _part_pages(joins)]
    if any(text for runs in encodings for text, _ in runs):
        fields["kv_encoding"] = {"ranks": encodings}
    return Namespace.from_fields(fields)


def _runs(encodings: Iterable[str]) -> list[tuple[str, int]]:
    """Encodings of a part's layers in order, equal ones in a row together: ``[("FLASH_ATTN cuda", 28)]``."""
    return [(text, len(list(run))) for text, run in groupby(encodings)]


def _page_record(page: m.Page) -> dict[str, object]:
    record: dict[str, object] = {
        "layer": page.layer,
        "dtype": page.dtype,
        "shape": list(page.shape),
        "axes": page.axes,
    }
    if page.blocks:
        record["blocks"] = page.blocks
    if page.tokens_per_state != 1:
        record["tokens_per_state"] = page.tokens_per_state
    return record


def recorded_geometry(fields: Mapping[str, Any]) -> ChunkGeometry:
    """The geometry that a record of :func:`namespace_of` tells.

    Raises:
        ConfigError: It tells none: somebody else wrote it.
    """
    try:
        ranks = tuple(
            tuple(
                LayerPage(
                    page["layer"],
                    page["dtype"],
                    tuple(page["shape"]),
                    page["axes"],
                    page.get("blocks", 0),
                    page.get("tokens_per_state", 1),
                )
                for page in rank
            )
            for rank in fields["geometry"]["ranks"]
        )
        return ChunkGeometry(fields["block_tokens"], fields["chunk_tokens"], ranks)
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        raise ConfigError("its record does not say in a known way what a chunk holds (geometry)") from exc
