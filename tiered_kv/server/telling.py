"""What a session's scheduler is told: messages made from what the engine says. The server's loop only."""

import logging

from tiered_kv.chunks.header import BlobFormat
from tiered_kv.engine.engine import Engine
from tiered_kv.hierarchy.plan import LookupUpdate, Moves
from tiered_kv.metrics.figures import HOST
from tiered_kv.server import messages as m
from tiered_kv.server.connection import Connection
from tiered_kv.server.groups import Group

logger = logging.getLogger(__name__)

MOVES_OUTBOX_MAX = 1 << 20
"""Bytes that may wait for a scheduler before it is not told of moves any more: they are hints, and must not be what
ends the session of an engine that is slow to read."""

KEYS_MAX = m.FRAME_BYTES_MAX // (2 * m.KEY_BYTES)
"""Keys of one message, within what a frame may hold."""


def ready_message(engine: Engine, group: Group, blob_format: BlobFormat) -> m.Ready:
    """The session is open."""
    assert group.namespace is not None
    hierarchy = engine.hierarchy
    own_bytes = hierarchy.taken[None].most_bytes(group.namespace.digest)
    return m.Ready(
        record=group.namespace.record,
        slot_bytes=blob_format.blob_bytes,
        payload_offset=blob_format.header_bytes,
        rank_offsets=group.rank_offsets,
        chunks_leased_max=int(own_bytes * hierarchy.limits.request_share) // blob_format.blob_bytes,
        tiers=[HOST, *(tier.traits.name for tier in engine.tiers)],
    )


def tell_lookup(engine: Engine, group: Group, update: LookupUpdate) -> None:
    """Pass on what is known of a lookup now, unless it was released.

    Raises:
        ProtocolError, ConnectionError: The session's client is lost.
    """
    client_id = group.client_ids.get((update.session, update.lookup))
    if client_id is None or group.scheduler is None:
        return
    assert group.namespace is not None
    group.scheduler.send(
        m.Updated(
            lookup=client_id,
            held=update.held,
            slots=list(update.slots),
            ready=update.ready,
            is_done=update.is_done,
            parts=[] if update.is_done else engine.arrivals(group.namespace.digest, update.arriving),
            unknown=update.unknown,
            search_s=engine.search_s() if update.unknown else 0.0,
            sources=bytes(_place(source) for source in update.sources),
            queued=update.queued,
        )
    )


def tell_moves(connection: Connection, moves: Moves) -> None:
    """Pass on which chunks came into a tier or left it; dropped while the client is slow to read.

    Raises:
        ProtocolError, ConnectionError: The session's client is lost.
    """
    for start in range(0, len(moves.keys), KEYS_MAX):
        keys = moves.keys[start : start + KEYS_MAX]
        if connection.outbox_bytes > MOVES_OUTBOX_MAX:
            logger.debug("moves not told, the client is slow. pid=%d chunks=%d", connection.pid, len(keys))
            return
        connection.send(m.Moved(_place(moves.tier), moves.is_here, b"".join(keys)))


def _place(tier: int | None) -> int:
    """A tier's place among those that ``Ready`` names."""
    return 0 if tier is None else tier + 1
