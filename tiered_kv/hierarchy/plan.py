"""The messages of the hierarchy: jobs it wants done, outcomes it is told, updates it owes to sessions.

Pure values. The engine turns jobs into calls of tiers and of the arena, and outcomes back into calls of
:class:`~tiered_kv.hierarchy.hierarchy.Hierarchy`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from tiered_kv.keys.stored_by import UNKNOWN
from tiered_kv.keys.tags import NO_TAG

SlotId = int
"""Place of one blob in the arena: slab number and index in the slab (see ``slots.py``)."""


class Outcome(Enum):
    """How one tier operation ended. Absence and refusal are outcomes, not errors."""

    OK = "ok"
    MISSING = "missing"
    CORRUPT = "corrupt"
    FOREIGN = "foreign"
    NO_ROOM = "no_room"
    UNAVAILABLE = "unavailable"
    NO_SOURCE = "no_source"
    """A copy between tiers found nothing usable in the tier it reads from."""


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """What names one chunk and ties it to its prefix.

    Attributes:
        namespace: Digest of the namespace, 16 bytes.
        parent: Key of the chunk before it; the namespace digest for chunk 0.
        tag: Digest of whose it is (``keys/tags.py``). No part of what it is: a chunk that two ask for is one chunk.
        stored_by: Who stored it (``keys/stored_by.py``), as far as it is known; no part of what it is either.
    """

    namespace: bytes
    key: bytes
    parent: bytes
    chunk_index: int
    prefix_sha256: bytes
    tag: bytes = field(default=NO_TAG, compare=False)
    stored_by: str = field(default=UNKNOWN, compare=False)


@dataclass(frozen=True, slots=True)
class Seal:
    """Write the header of a filled slot: hash the payload, then the chunk becomes visible."""

    record: ChunkRecord
    slot: SlotId


@dataclass(frozen=True, slots=True)
class Write:
    """Put a sealed slot's blob into a lower tier."""

    tier: int
    record: ChunkRecord
    slot: SlotId


@dataclass(frozen=True, slots=True)
class Read:
    """Get a blob from a lower tier into a slot and verify it there (a promotion)."""

    tier: int
    record: ChunkRecord
    slot: SlotId


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove a blob from a lower tier; ``size_bytes`` come back to its capacity."""

    tier: int
    record: ChunkRecord
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Grow:
    """Give a slab physical memory: ``size_bytes`` from its start."""

    slab: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Put a blob into a lower tier from the tier above it; no slot is involved (an upload).

    Attributes:
        is_asked_first: The blob may well be there already (put there before a restart): ask before moving its bytes.
    """

    tier: int
    source: int
    record: ChunkRecord
    is_asked_first: bool


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask a tier whether it has a blob: OK or MISSING."""

    tier: int
    record: ChunkRecord


Job = Seal | Write | Read | Delete | Grow | Copy | Probe

Turn = tuple[int, int]
"""When a request is admitted among those of its session: by priority, lowest first, then by number."""

Arriving = Sequence[tuple[int | None, int]]
"""Chunks of a prefix in runs of ``(tier, chunks)``; see :class:`LookupUpdate`."""


@dataclass(frozen=True, slots=True)
class LookupUpdate:
    """What a session may know of one of its lookups now.

    Attributes:
        held: Leading chunks of the prefix the hierarchy holds in any tier: these need not be stored again.
        unknown: Chunks behind them that a shared tier may have and that are being looked for; ``held`` and ``slots``
            may grow by as many.
        slots: Slots granted to the lookup, from the chunk it starts at. Only the first ``ready`` may be read.
        ready: Chunks from the start that are verified in host memory and leased to this lookup.
        queued: Chunks behind ``slots`` that are held and wait for room among the leases; ``slots`` may grow by as many.
        is_done: Nothing more will arrive.
        arriving: Chunks from ``ready`` on, as runs of ``(tier, chunks)``: the lower tier they are being read from, or
            None where they need not be read.
        sources: Per slot, the lower tier it was read from for this lookup; None: it needed not be read.
    """

    session: int
    lookup: int
    held: int
    slots: tuple[SlotId, ...]
    ready: int
    is_done: bool
    unknown: int = 0
    arriving: Arriving = ()
    sources: tuple[int | None, ...] = ()
    queued: int = 0


@dataclass(frozen=True, slots=True)
class LeaseEnd:
    """A lookup's leases are about to end, although its session did not say so.

    Its slots stay as they are until :meth:`~tiered_kv.hierarchy.hierarchy.Hierarchy.release`: whoever passes this on
    calls that, once the session is sure to read this before anything it could read in those slots later.
    """

    session: int
    lookup: int


@dataclass(frozen=True, slots=True)
class CreditGrant:
    """Empty slots the session may fill and commit without asking first."""

    session: int
    slots: tuple[SlotId, ...]


@dataclass(frozen=True, slots=True)
class CreditRecall:
    """Granted slots that should come back unless they are being filled: their memory is wanted elsewhere.

    A request: a session that gives none of them back only delays another slot size.
    """

    session: int
    slots: tuple[SlotId, ...]


@dataclass(frozen=True, slots=True)
class Moves:
    """Chunks of the session's namespace that came into a tier or left it, for a session that asked to be told.

    Attributes:
        tier: A lower tier; None: host memory.
    """

    session: int
    tier: int | None
    is_here: bool
    keys: tuple[bytes, ...]


Update = LookupUpdate | LeaseEnd | CreditGrant | CreditRecall | Moves
