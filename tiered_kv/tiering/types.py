"""The messages of tiering: jobs it wants done, outcomes it is told, updates it owes to sessions.

Pure values. The engine turns jobs into calls of tiers and of the arena, and outcomes back into calls of
:class:`~tiered_kv.tiering.tiering.Tiering`. The garbage collector does not know of jobs (see ``Entry``): tens of
thousands may wait for a thread, or for their end to be taken in.
"""

import math
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import Annotated, Final, NamedTuple

import msgspec

from tiered_kv.keys.chunk_record import ChunkRecord, PrefixDigest

HOST: Final = 0
"""The number of the host tier. The secondary tiers are 1, 2, ... from the highest to the lowest, here and wherever else
a tier has a number: in the engine, on the wire and in figures."""

PINNED_SHARE_MAX: Final = 0.9
"""Where pins keep more of a tier, hardly anything else is stored there, and somebody has to be told."""

PROGRESS_INTERVAL_S: Final = 0.02
"""Sessions are told so often of lookups that they follow, whose chunks arrive one after the other
(``Lookups.chunk_ready``): what one knows as its wait ends is older by no more, if it began to follow as long before."""

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
    NO_PARENT = "no_parent"
    """A blob was to be written behind one that is not there."""
    ROW_GONE = "row_gone"
    """A lent row may not be used any more; nothing was written of it."""
    ROW_CHANGED = "row_changed"
    """The same, but it was written: what is in the tier may not be what was sealed, and has to go."""


class Seal(msgspec.Struct, frozen=True, gc=False):
    """Write the header of a filled slot: hash the payload, then the chunk becomes visible."""

    record: ChunkRecord
    slot: SlotId


class Write(msgspec.Struct, frozen=True, gc=False):
    """Put a sealed slot's blob into a secondary tier.

    Attributes:
        behind: Chunks of its prefix that have to be there, or nothing is written: of a tier that others empty, too,
            what was believed for long.
    """

    tier: int
    record: ChunkRecord
    slot: SlotId
    behind: tuple[ChunkRecord, ...] = ()


class Read(msgspec.Struct, frozen=True, gc=False):
    """Get a blob from a secondary tier into a slot and verify it there (a promotion)."""

    tier: int
    record: ChunkRecord
    slot: SlotId


class Delete(msgspec.Struct, frozen=True, gc=False):
    """Remove a blob from a secondary tier; ``size_bytes`` come back to its capacity."""

    tier: int
    record: ChunkRecord
    size_bytes: int


class Grow(msgspec.Struct, frozen=True, gc=False):
    """Give a slab physical memory: ``size_bytes`` from its start."""

    slab: int
    size_bytes: int


class Copy(msgspec.Struct, frozen=True, gc=False):
    """Put a blob into a secondary tier from the one above it; no slot is involved (an upload).

    Attributes:
        is_asked_first: The blob may well be there already (put there before a restart): ask before moving its bytes.
        behind: As of a :class:`Write`.
    """

    tier: int
    source: int
    record: ChunkRecord
    is_asked_first: bool
    behind: tuple[ChunkRecord, ...] = ()


class Probe(msgspec.Struct, frozen=True, gc=False):
    """Ask a tier how many of these blobs it has, from the first on.

    Attributes:
        records: At least one; more than one only of a tier that takes them at once.
        hint: Where the tier is to look first.
    """

    tier: int
    records: tuple[ChunkRecord, ...]
    hint: str = ""

    @property
    def record(self) -> ChunkRecord:
        """The first one."""
        return self.records[0]


class RowUse(msgspec.Struct, frozen=True, gc=False):
    """One use of a row that an engine lent (``engine/lent_rows.py``).

    Attributes:
        session: The engine's.
        id: Its client's number of the use; never given twice in a session.
        row: Which of the region's rows.
        load: Of a read, the load that it is a part of (``HitStats``); 0: of none.
    """

    session: int
    id: int
    row: int
    load: int = 0


class WriteRow(msgspec.Struct, frozen=True, gc=False):
    """Seal a lent row and put it into a secondary tier; no slot is involved.

    It may be handed out while the chunk before it is being written, from a row too: it is put behind that one, or not.
    """

    tier: int
    record: ChunkRecord
    use: RowUse


class ReadRow(msgspec.Struct, frozen=True, gc=False):
    """Get a blob from a secondary tier into a lent row and verify it there; no slot is involved."""

    tier: int
    record: ChunkRecord
    use: RowUse


Job = Seal | Write | Read | Delete | Grow | Copy | Probe | WriteRow | ReadRow

Turn = tuple[int, int]
"""When a request is admitted among those of its session: by priority, lowest first, then by number."""

Count = Annotated[int, msgspec.Meta(ge=0)]


class Arrival(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Chunks in a row that come from one tier.

    Attributes:
        tier: The chunks are being read from there; ``HOST``: they need not be read.
        eta_s: Seconds until the last of them should be here. None: the tier was never measured, or it is not said.
    """

    tier: Count
    chunks: Count
    eta_s: float | None = None


class Tail(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tail that follows what a lookup found (``keys/tail_keys.py``).

    Attributes:
        tokens: Its length.
        digest: Names its tokens and all before them: it is of use to a request only if the request's tokens give it.
        slot: It is leased to the lookup with the chunks before it. None: it is on disk; where an answer is not done it
            may be on its way up.
    """

    tokens: Annotated[int, msgspec.Meta(ge=1)]
    digest: PrefixDigest
    slot: Annotated[SlotId, msgspec.Meta(ge=0)] | None


class LookupAnswer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The state of one lookup: made by the tiering, timed by the engine, sent as it is, read by the scheduler.

    ``LookupAnswer()`` is that of a lookup without an answer. Ranges are checked where it is decoded.

    Attributes:
        held: Leading chunks of the prefix that any tier holds: these need not be stored again.
        slots: Slots granted to the lookup, from the chunk it starts at. Only the first ``ready`` may be read.
        ready: Chunks from the start that are verified in host memory and leased to this lookup.
        is_done: Nothing more will arrive.
        arriving: Chunks from ``ready`` on, in runs by the tier they come from, and behind them a tail; empty when the
            answer is done. Of a question, which leases nothing: what is held from its start on, by the tier it would
            come from.
        unknown: Chunks behind ``held`` that a shared tier may have and that are being looked for; ``held`` and
            ``slots`` may grow by as many.
        search_s: Seconds that one question to that tier takes, if known; 0 when nothing is looked for.
        sources: Per slot one byte: the tier its chunk was read from for this lookup, ``HOST`` where it was not read.
        queued: Chunks behind ``slots`` that are held and wait for room among the leases; ``slots`` may grow by as many.
        is_answered: Anything is known at all.
        is_ended: The leases have ended: nothing may be read from its slots any more.
        boundary: Of a lookup for a state: how many chunks are before the deepest one that is held. Then ``slots`` are
            those of the chunks up to there and of the state's parts, of use only if all are ready. 0: there is none,
            or it is not known yet.
        tails: What is held of the chunk behind ``held``, if the lookup wants it: of prompts that went on in various
            ways. Of use only if all slots are ready; where ``held`` has changed since, none has the digest any more.
        unbegun: Of ``queued``, those that are leased already: they get their slots in the next steps, whatever others
            do.
    """

    held: Count = 0
    slots: tuple[Annotated[SlotId, msgspec.Meta(ge=0)], ...] = ()
    ready: Count = 0
    is_done: bool = False
    arriving: tuple[Arrival, ...] = ()
    unknown: Count = 0
    search_s: float | None = None
    sources: bytes = b""
    queued: Count = 0
    is_answered: bool = False
    is_ended: bool = False
    boundary: Count = 0
    tails: tuple[Tail, ...] = ()
    unbegun: Count = 0

    @property
    def in_line(self) -> int:
        """Chunks that wait for others to release theirs."""
        return self.queued - self.unbegun

    @property
    def parts(self) -> list[tuple[int, float | None]]:
        """Prefixes of what arrives: how many chunks, and the seconds until all of them should be here."""
        counts = accumulate(run.chunks for run in self.arriving)
        return [(count, run.eta_s) for count, run in zip(counts, self.arriving, strict=True)]


@dataclass(frozen=True, slots=True)
class LookupUpdate:
    """A lookup's answer has changed; only its session may know it."""

    session: int
    lookup: int
    answer: LookupAnswer


@dataclass(frozen=True, slots=True)
class LeaseEnd:
    """A lookup's leases are about to end, although its session did not say so.

    Its slots stay as they are until :meth:`~tiered_kv.tiering.tiering.Tiering.release`: whoever passes this on
    calls that, once the session is sure to read this before anything it could read in those slots later.
    """

    session: int
    lookup: int


@dataclass(frozen=True, slots=True)
class LoadDamaged:
    """A load that may be running reads damaged bytes: nothing of it counts. Its session releases it, as ever."""

    session: int
    lookup: int


@dataclass(frozen=True, slots=True)
class SlotLoan:
    """A chunk in host memory that stays as it is until the loan is ended: a sealed blob of so many bytes in a slot."""

    id: int
    slot: SlotId
    size_bytes: int


@dataclass(frozen=True, slots=True)
class SlotGrant:
    """Empty slots the session may fill and commit without asking first."""

    session: int
    slots: tuple[SlotId, ...]


@dataclass(frozen=True, slots=True)
class SlotRecall:
    """Granted slots that should come back unless they are being filled: their memory is wanted elsewhere.

    A request: a session that gives none of them back only delays another slot size.
    """

    session: int
    slots: tuple[SlotId, ...]


@dataclass(frozen=True, slots=True)
class TierEvents:
    """Chunks of the session's namespace that came into a tier or left it, for a session that asked to be told."""

    session: int
    tier: int
    is_here: bool
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class RowsEnded:
    """Uses of lent rows are over, by their numbers: nobody reads or writes those rows for them any more.

    Attributes:
        good: Stored, or read and verified.
        bad: What lies in a row that was to be read into is undefined.
        elsewhere: Of rows to be read: the chunk is in host memory or a shared tier, and comes through a slot.
    """

    session: int
    good: tuple[int, ...]
    bad: tuple[int, ...]
    elsewhere: tuple[int, ...]


Update = LookupUpdate | LeaseEnd | LoadDamaged | SlotGrant | SlotRecall | TierEvents | RowsEnded


@dataclass(frozen=True, slots=True)
class TierSpec:
    """One secondary tier, as the engine finds it.

    Attributes:
        capacity_bytes: None: not limited from here.
        admission: Name of the policy that says what is worth a write.
        is_shared: Other servers write and remove there, too, and keep it within its limits; only of the last tier.
        names_at_once: Blobs that one question to the tier may name.
        is_asked_while_out: While it does not answer, questions still find what is in another place that belongs to it.
    """

    capacity_bytes: int | None = None
    admission: str = "all"
    is_shared: bool = False
    names_at_once: int = 1
    is_asked_while_out: bool = False


class Removal(Enum):
    """What became of a chunk that an operator wants removed from a tier."""

    REMOVED = "removed"
    KEPT = "kept"
    """In use, or needed by others."""
    ABSENT = "absent"


class RemovalCount(NamedTuple):
    """How many chunks are going.

    Attributes:
        kept: Stay because they, or some that depend on them, are in use.
        left: Were not there; of an erasure: were not looked at yet.
    """

    removed: int
    kept: int
    left: int


@dataclass(frozen=True, slots=True)
class TierUsage:
    """One secondary tier now.

    Attributes:
        queued_bytes: Host memory that its pending writes hold.
        pending_writes: What a drain waits for.
        backlog_chunks: The same, and writes that the next life of the cache makes.
        chunks: Blobs that can be had from there.
        tails: How many of these are tails.
        pinned_bytes: Of those that pins keep, as of the last look at the pins.
        admitted_chunks, declined_chunks: By its admission policy, since the start.
    """

    used_bytes: int
    queued_bytes: int
    pending_writes: int
    backlog_chunks: int
    chunks: int
    tails: int
    pinned_bytes: int
    admitted_chunks: int
    declined_chunks: int


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of tiering, as shares of host memory.

    Attributes:
        leased_share: Host memory that lookups may hold at once.
        request_share: Host memory one lookup may hold.
        credit_share: Host memory that empty granted slots may hold, all sessions together; up to twice as much if that
            is what it takes to give every session one.
        write_queue_share: Host memory that may be held for its write to a secondary tier; past it writes are put off,
            and chunks that are evicted before their turn are never written.
        few_chunks: A tail takes a slot as large as a chunk's: behind so many chunks it is at most a fifth more. Tails
            behind fewer are bounded instead, or short prompts could double what they hold, and are not written, because
            a short prompt is cheap to compute again.
        short_tails_share: Host memory that tails behind few chunks may take together.
    """

    leased_share: float = 0.5
    request_share: float = 0.375
    credit_share: float = 0.25
    write_queue_share: float = 0.5
    few_chunks: int = 5
    short_tails_share: float = 1 / 16

    def least_host_bytes(self, tokens: int, chunk_tokens: int, chunk_bytes: int) -> int:
        """Host memory with which one lookup may hold a prompt of so many tokens."""
        return math.ceil(-(-tokens // chunk_tokens) * chunk_bytes / self.request_share)
