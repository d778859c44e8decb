"""What a server says, checked before a client acts on it: a garbled answer ends a session and never an engine.

The server is trusted with bytes: one that wants to hand out wrong KV can (docs/security.md). It is not trusted to be
whole: whatever listens on the socket, a client's owner must not crash, wait for ever or collect without bound.
"""

import re
from collections.abc import Sequence
from typing import Final

from tiered_kv.errors import ProtocolError
from tiered_kv.server import messages as m

CREDITS_MAX: Final = 1 << 20
"""Slots a session may hold ahead: a quarter of an arena of 1 TiB, in chunks of 256 KiB."""

TIERS_MAX: Final = 16
SLABS_MAX: Final = 1 << 16
SHOWN_MAX: Final = 2000
"""Characters of what a server says that an error or a log line repeats."""

_SERVER_ID = re.compile(r"[0-9a-f]{16}")


def check_welcome(welcome: m.Welcome) -> None:
    """Check what names files and counts descriptors.

    Raises:
        ProtocolError: The server's id is none, or the slabs are out of range.
    """
    if _SERVER_ID.fullmatch(welcome.server_id) is None:
        raise ProtocolError(f"the server's id is not 16 hex digits. server_id={welcome.server_id[:40]!a}")
    if not 0 <= welcome.slab_count <= SLABS_MAX:
        raise ProtocolError(f"slabs out of range. slab_count={welcome.slab_count} max={SLABS_MAX}")


def check_ready(ready: m.Ready, world_size: int) -> None:
    """Check what copies are placed by, and what metrics are labelled with.

    Raises:
        ProtocolError: Sizes or offsets are impossible, or tiers are too many or have no proper names.
    """
    offsets = ready.rank_offsets
    if not 0 < ready.payload_offset < ready.slot_bytes or len(offsets) != world_size:
        raise ProtocolError(
            f"impossible slots. slot_bytes={ready.slot_bytes} payload_offset={ready.payload_offset} "
            f"rank_offsets={len(offsets)} world_size={world_size}"
        )
    if not all(0 <= offset < ready.slot_bytes - ready.payload_offset for offset in offsets):
        raise ProtocolError(f"a rank's bytes lie outside of the slot. slot_bytes={ready.slot_bytes}")
    names = ready.tiers
    if not 0 < len(names) <= TIERS_MAX or not all(0 < len(one) <= 64 and one.isidentifier() for one in names):
        raise ProtocolError(f"tiers without proper names. count={len(names)} max={TIERS_MAX}")


def check_updated(update: m.Updated) -> None:
    """Check that what is said to be ready has a slot and a source.

    Raises:
        ProtocolError: It is not so, or a count is below zero.
    """
    slots = update.slots
    if (
        not 0 <= update.ready <= len(slots)
        or len(update.sources) != len(slots)
        or update.held < 0
        or update.unknown < 0
        or update.queued < 0
        or (slots and min(slots) < 0)
    ):
        raise ProtocolError(
            f"an impossible answer to a lookup. held={update.held} slots={len(slots)} ready={update.ready} "
            f"sources={len(update.sources)} unknown={update.unknown}"
        )


def check_credits(slots: Sequence[int], held: int) -> None:
    """Check slots that are granted beside ``held`` others.

    Raises:
        ProtocolError: They are too many, or none that an arena has.
    """
    if held + len(slots) > CREDITS_MAX or (slots and min(slots) < 0):
        raise ProtocolError(f"impossible credits. slots={len(slots)} held={held} max={CREDITS_MAX}")


def check_moved(moved: m.Moved, tiers: int) -> None:
    """Check that a move is of whole keys and of one of so many tiers.

    Raises:
        ProtocolError: It is not.
    """
    if not 0 <= moved.tier < max(tiers, 1) or len(moved.keys) % m.KEY_BYTES:
        raise ProtocolError(f"an impossible move. tier={moved.tier} tiers={tiers} key_bytes={len(moved.keys)}")


def shown(text: str) -> str:
    """A server's words as a log line may repeat them: on one line, and not too many."""
    cut = text[:SHOWN_MAX]
    return "".join(character if character.isprintable() else " " for character in cut)
