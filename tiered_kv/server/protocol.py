"""What crosses the Unix socket: typed msgpack messages in length-prefixed frames.

A frame is a little-endian uint32 length and that many bytes of msgpack; both sides bound the length before they
allocate. Never pickle. ``PROTOCOL`` changes whenever a message does; peers of another protocol are refused with both
versions named.
"""

import struct
from collections.abc import Iterator
from typing import Annotated, Any, Final

import msgspec

from tiered_kv.errors import ProtocolError
from tiered_kv.keys.chunk_record import ChunkRecord, Key
from tiered_kv.keys.row_names import ROW_NAME_BYTES_MAX
from tiered_kv.keys.stored_by import UNKNOWN
from tiered_kv.keys.tags import NO_TAG
from tiered_kv.tiering.types import Arrival, LookupAnswer, SlotId

PROTOCOL = 23
FRAME_BYTES_MAX = 4 << 20
"""Room for a lookup of 80,000 chunks, far above any context length."""
HELLO_BYTES_MAX = 16 << 10
"""Most that a client may send before it has said Hello."""
NAME_CHARS_MAX = 200
"""Of engine ids, versions and roles: they stand in every log line."""
HINT_CHARS_MAX = 300
GENERATION_MAX = 1 << 31
LENGTH = struct.Struct("<I")
RANKS_MAX = 1024
LAYERS_MAX = 4096
STATE_PARTS_MAX = 64
DROPPED_TAILS_MAX = 1024
ROWS_AT_ONCE_MAX = 1 << 14
"""Uses of lent rows that one message begins or ends."""
ROW_USES_MAX = 1 << 17
"""Uses of lent rows of one engine at once."""
SIZE_MAX = 1 << 62
SECONDS_MAX = 1e9


RowNumber = Annotated[int, msgspec.Meta(ge=0, le=SIZE_MAX)]
RowName = Annotated[bytes, msgspec.Meta(min_length=1, max_length=ROW_NAME_BYTES_MAX)]


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages; the class name is the tag.

    ``Hello``, ``Welcome`` and ``Refused`` take unknown fields: peers of other protocols must understand them well
    enough to name both versions.
    """


# -- client to server ------------------------------------------------------------------------------------------


class Hello(Message, frozen=True, forbid_unknown_fields=False):
    """First message of every client.

    Attributes:
        role: ``scheduler`` opens a session, ``worker`` maps the arena for one, ``cache`` does both, ``admin`` asks,
            ``door`` reads for other machines.
        engine_id: Names the engine; workers and scheduler of one engine and generation form a session.
        generation: Counts the sessions of an engine: a lost session is never continued, only followed.
        host_bytes, disk_bytes, min_free_bytes: Limits the client was told to expect; None accepts what the server has.
        storage: The object store the client was told to use, or ``disk``; empty accepts what the server has.
    """

    protocol: int
    version: str
    role: str
    pid: int
    engine_id: str = ""
    generation: int = 0
    host_bytes: int | None = None
    disk_bytes: int | None = None
    min_free_bytes: int | None = None
    storage: str = ""


class Page(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One layer's page on the wire (see ``chunks/geometry.py``).

    ``encoding`` says what its bytes mean where name, dtype and shape do not; empty where the namespace's fields say it.
    """

    layer: str
    dtype: str
    shape: tuple[int, ...]
    axes: str
    blocks: int = 0
    encoding: str = ""
    tokens_per_state: int = 1


class JoinWorker(Message, frozen=True):
    """A worker's part of the identity; the server answers with the arena.

    Attributes:
        fields: The namespace's fields except geometry and epoch, as JSON; equal on all ranks.
        pages: The layers of this rank, in payload order.
        part: Which part of the payload is this rank's; None: one of its own. Ranks with equal KV name one part.
        stored_by: What the headers of this engine's blobs say of who stored them (``keys/stored_by.py``); equal on all
            ranks but for the encoding, and never empty: one who does not say it is refused.
        pins: Pins the arena for its GPU: no slab that it maps changes its pages until it has unmapped them.
    """

    rank: int
    world_size: int
    block_tokens: int
    chunk_tokens: int
    fields: bytes
    pages: list[Page]
    part: int | None = None
    stored_by: str = UNKNOWN
    pins: bool = False


class JoinScheduler(Message, frozen=True):
    """Opens the session; the server answers ``Ready`` when all workers are in.

    Attributes:
        epoch: The private epoch that a reset gave this engine in an earlier session; empty before any.
        is_watching: Tell it by ``Moved`` which chunks of its namespace come into tiers and leave them.
        min_share, max_share: Of the limits of host memory and disk, what its namespace keeps and how much it may take.
            None: not said; if neither is, what others of its namespace said stays.
        lease_s: How long its lookups hold leases that it does not claim.
        rejoins: It opens another session where this one ends, which may then end for a better one.
    """

    world_size: int
    is_watching: bool = False
    epoch: str = ""
    min_share: float | None = None
    max_share: float | None = None
    lease_s: float = 30.0
    rejoins: bool = False


class Decline(Message, frozen=True):
    """A worker cannot take part (its KV cache is of an unsupported kind): the engine serves without the cache."""

    reason: str


class Lookup(Message, frozen=True):
    """Keys (16 bytes each) and prefix digests (32 bytes each) of a request's chunks, joined.

    Attributes:
        start: The first chunk that is wanted: those before it are in the GPU's prefix cache.
        turn: When its request is admitted among the engine's: by priority, lowest first, then by number. So room for
            leases is given and taken.
        is_claimed: As if ``Claim`` were said with it.
        state_parts: Wanted is the prefix up to the deepest boundary with a state of so many parts, and that state.
        may_search: What is not known here is sought in a shared tier; the keys are a prefix from its beginning then.
        wants_tails: Wanted are the tails behind what is held, too.
        session: Name of the user's session that asks (``keys/tags.py``); empty: of none.
        hint: Where a shared tier is to look first, as its medium names places: the URL of a peer. Unknown ones are
            ignored.
        leases: Otherwise it is a question: nothing is leased nor promoted, and an answer that ``is_done`` ends it.
        names: Of rows (``keys/row_names.py``), in place of keys and digests.
        counted: Leading chunks that an earlier lookup of the same request found, or that it has computed before it was
            preempted: asking again is no second use.
        load: Number of the load that this is a part of, for counting; 0: it is counted by itself.
        is_followed: Tell of parts as they are ready. Otherwise of what is found, of what changes that, and of the end,
            until ``Follow`` is said.
    """

    lookup: int
    start: int
    keys: bytes
    digests: bytes
    turn: tuple[int, int] = (0, 0)
    is_claimed: bool = False
    state_parts: Annotated[int, msgspec.Meta(ge=0, le=STATE_PARTS_MAX)] = 0
    may_search: bool = True
    wants_tails: bool = False
    session: bytes = b""
    hint: Annotated[str, msgspec.Meta(max_length=HINT_CHARS_MAX)] = ""
    leases: bool = True
    names: list[RowName] = []
    counted: Annotated[int, msgspec.Meta(ge=0, le=SIZE_MAX)] = 0
    load: RowNumber = 0
    is_followed: bool = True


class Follow(Message, frozen=True):
    """Tell at once how much of a lookup is ready, and from now on of parts as they are; nothing, if it has ended."""

    lookup: int


class Claim(Message, frozen=True):
    """A load of what a lookup has begins: its leases stay until it is released.

    Comes too late where the server has said ``Ended``: what that load copies is of no use.
    """

    lookup: int


class Release(Message, frozen=True):
    """End a lookup's leases.

    Attributes:
        is_asked_anew: Another lookup of the same request has replaced it, and is the one that counts.
    """

    lookup: int
    is_asked_anew: bool = False


class Commit(Message, frozen=True):
    """Slots that every rank has filled, with their chunks, along one prefix in order.

    A record without ``stored_by`` is of what this engine stores; one with it is a copy.

    Attributes:
        answers: Slots of those with generated tokens.
    """

    chunks: list[tuple[SlotId, ChunkRecord]]
    answers: frozenset[SlotId] = frozenset()


class CommitTail(Message, frozen=True):
    """A slot that every rank has filled with a tail; its bytes behind the tail's tokens say nothing.

    Comes after the ``Commit`` of the chunk before it.
    """

    slot: SlotId
    record: ChunkRecord


class DropTails(Message, frozen=True):
    """Chunks or longer tails that were committed now continue these tails."""

    keys: Annotated[list[Key], msgspec.Meta(max_length=DROPPED_TAILS_MAX)]


class GiveBack(Message, frozen=True):
    """Granted slots that will not be filled."""

    slots: list[int]


class Rest(Message, frozen=True):
    """Until ``Wake`` the session stores nothing: it has filled none of its slots, and all of them are given back.

    The server answers ``Rested``.
    """


class Wake(Message, frozen=True):
    """The session may store, and wants slots: every session is at rest when it is opened."""


class Reset(Message, frozen=True):
    """Old KV is invalid (weights changed): retire the epoch; the server answers ``Ready`` with a private namespace."""


class Pin(Message, frozen=True):
    """A request wants a chunk, and the prefix before it, kept from eviction for so many seconds; nothing answers.

    For 0 seconds: not kept, but written to the secondary tiers at once, whatever these take otherwise (``admission``).

    Attributes:
        tag: Whose the request is (``keys/tags.py``).
    """

    key: bytes
    ttl_s: float
    tag: bytes = NO_TAG


class SessionState(Message, frozen=True):
    """A request of a user's session is over, and stored up to this chunk; nothing answers.

    Attributes:
        session: Its name (``keys/tags.py``).
        tag: Of its owner.
    """

    session: bytes
    tag: bytes
    key: bytes


class Hint(Message, frozen=True):
    """What will be asked for, or not any more. An admin is answered ``Hinted``, a scheduler is not.

    Attributes:
        action: ``prefetch``: have it in host memory. ``pin``: keep it for so many seconds. ``demote``: not in host
            memory. ``release``: not at all. A scheduler does not pin so; the last two are of sessions only.
        session: Name of a user's session; empty: the keys say what is meant.
        tag: Of the owner.
        namespace: Of an admin's keys.
        keys, digests: 16 and 32 bytes each, joined: of a prefix from its beginning.
    """

    action: str
    session: bytes = b""
    tag: bytes = NO_TAG
    namespace: bytes = b""
    keys: bytes = b""
    digests: bytes = b""
    ttl_s: float = 0.0


class NamespaceRequest(Message, frozen=True):
    """Ask for the record of a namespace whose digest, in hex, begins so, and of which an engine is here."""

    digits: str


class Pinned(Message, frozen=True):
    """How much of the arena the worker has pinned for its GPU, and how long that took so far; nothing answers."""

    size_bytes: Annotated[int, msgspec.Meta(ge=0, le=SIZE_MAX)]
    seconds: Annotated[float, msgspec.Meta(ge=0, le=SECONDS_MAX)]


class LendRows(Message, frozen=True):
    """An only worker lends its engine's rows: the server may read and write them for uses that the scheduler begins.

    Comes with two descriptors: of the region, and of a pipe's end for writing, which the server closes when it can
    touch no row any more. The server answers ``RowsTaken``.
    """

    rows: Annotated[int, msgspec.Meta(ge=1, le=SIZE_MAX)]
    row_bytes: Annotated[int, msgspec.Meta(ge=1, le=SIZE_MAX)]


class StoreRows(Message, frozen=True):
    """Write lent rows to the disk: per row the number of the use, the row, and its chunk. Ends with ``RowsEnded``.

    Along a prefix in order, or each row a prefix by itself. A number is never given twice in a session.
    """

    rows: Annotated[list[tuple[RowNumber, RowNumber, ChunkRecord]], msgspec.Meta(max_length=ROWS_AT_ONCE_MAX)]


class LoadRows(Message, frozen=True):
    """Read chunks into lent rows: per row the number of the use, the row, and its name. Ends with ``RowsEnded``.

    Attributes:
        session, load: As in ``Lookup``.
    """

    rows: Annotated[list[tuple[RowNumber, RowNumber, RowName]], msgspec.Meta(max_length=ROWS_AT_ONCE_MAX)]
    session: bytes = b""
    load: RowNumber = 0


class LoadEnded(Message, frozen=True):
    """All parts of a load have ended, lookups and uses of rows: together they are counted as one lookup."""

    load: RowNumber


class TakeRowsBack(Message, frozen=True):
    """End uses of lent rows now; ``RowsEnded`` says it, at once. Those that are over are ignored."""

    uses: Annotated[list[RowNumber], msgspec.Meta(max_length=ROWS_AT_ONCE_MAX)]


class Unmapped(Message, frozen=True):
    """The worker has finished its copies and unmapped the arena."""


class StatRequest(Message, frozen=True):
    """Ask for ``Stat``."""


class Evict(Message, frozen=True):
    """Have chunks removed from one tier of this machine; the server answers ``Evicted``.

    Attributes:
        tier: ``host``, or a secondary tier by its name.
        namespace: Empty: every namespace; then without keys.
        keys: 16 bytes each, joined; empty: all of the namespace.
        holes: Also chunks on which others depend that stay in the tier.
        tag: Then without keys: only what was stored under this digest of a tag, and all behind it, whoever pinned it.
            Empty: whatever the tag.
        stored_by: Then without keys and tag: only what was stored by whom these conditions mean
            (``keys/conditions.py``), and all behind it, whoever pinned it. Empty: whoever stored it.
    """

    tier: str
    namespace: bytes
    keys: bytes
    holes: bool
    tag: bytes = b""
    stored_by: tuple[str, ...] = ()


class JoinDoor(Message, frozen=True):
    """The server answers with the arena's slabs, to be read only and nothing but what is lent."""


class HeldRequest(Message, frozen=True):
    """Ask how many of these chunks this machine has, from the first on; answered by ``Held`` with this number.

    Attributes:
        keys: 16 bytes each, joined.
    """

    question: int
    namespace: bytes
    keys: bytes


class Borrow(Message, frozen=True):
    """Have a chunk kept in its slot while it is read; answered by ``Lent`` with this number, ended by ``Repay``."""

    loan: int
    namespace: bytes
    key: bytes


class Repay(Message, frozen=True):
    """What was lent is read no more; one that has ended is ignored."""

    loan: int


class Given(Message, frozen=True):
    """Other machines have read these chunks through the door, from memory or from disk.

    Attributes:
        keys: 16 bytes each, joined.
    """

    namespace: bytes
    keys: bytes


# -- server to client ------------------------------------------------------------------------------------------


class Welcome(Message, frozen=True, forbid_unknown_fields=False):
    """Accepted. Workers get ``slab_count`` file descriptors with the following frames, ``SLABS_PER_FRAME`` each.

    Attributes:
        directory: The server's disk directory, as the server sees it.
    """

    protocol: int
    version: str
    server_id: str
    pid: int
    slab_count: int
    directory: str


class Slabs(Message, frozen=True):
    """Carries ``count`` slab descriptors as ancillary data."""

    count: int


class RowsTaken(Message, frozen=True):
    """The answer to ``LendRows``: empty, or why rows go through slots."""

    refusal: str


class Refused(Message, frozen=True, forbid_unknown_fields=False):
    """The server will not serve this client; ``kind`` is ``config``, ``protocol`` or ``unavailable``."""

    kind: str
    reason: str


class Ready(Message, frozen=True):
    """The session is open.

    Attributes:
        record: The namespace record, canonical JSON.
        slot_bytes: Size of a slot of this session.
        payload_offset: Where the payload starts in a slot.
        rank_offsets: Where each rank's bytes start in the payload.
        chunks_leased_max: Most chunks one lookup may lease.
        tiers: Their names, from host memory downwards; other messages name a tier by its place here.
        host_bytes: The server's limit of host memory, which a client may not have named.
    """

    record: bytes
    slot_bytes: int
    payload_offset: int
    rank_offsets: list[int]
    chunks_leased_max: int
    tiers: list[str]
    host_bytes: Annotated[int, msgspec.Meta(ge=1, le=SIZE_MAX)]


class Updated(Message, frozen=True):
    """What is known of a lookup has changed."""

    lookup: int
    answer: LookupAnswer


class Progressed(Message, frozen=True):
    """More of a lookup's chunks are ready; all else is as its last ``Updated`` said, slots and sources above all.

    Attributes:
        ready, is_done, arriving: As in :class:`~tiered_kv.tiering.types.LookupAnswer`.
    """

    lookup: int
    ready: Annotated[int, msgspec.Meta(ge=0)]
    is_done: bool
    arriving: tuple[Arrival, ...]

    def after(self, told: LookupAnswer) -> LookupAnswer:
        """The lookup's answer now, by the one before."""
        return msgspec.structs.replace(told, ready=self.ready, is_done=self.is_done, arriving=self.arriving)


class Ended(Message, frozen=True):
    """A lookup's leases end: it held them unclaimed for too long, or gave way. Its slots are no longer its own.

    Or one of its slots was found damaged: nothing that was read of them counts. Where a load was begun they stay its
    own until it is released.

    The server uses none of them before all of this message is in the client's socket. So a client that has read its
    socket to the end, after its last byte was copied, knows whether the slots were still leased.
    """

    lookup: int


class Credits(Message, frozen=True):
    """Empty slots the session may fill."""

    slots: list[int]


class Rested(Message, frozen=True):
    """The answer to ``Rest``: slots of ``Credits`` that were sent before are not the session's any more."""


class Recall(Message, frozen=True):
    """Granted slots that are wanted back if they are still unused: their memory goes to another slot size."""

    slots: list[int]


class RowsEnded(Message, frozen=True):
    """Uses of lent rows that are over: the server touches those rows for them no more.

    Attributes:
        good: Stored, or read and verified.
        bad: What lies in a row that was to be read into is undefined.
        elsewhere: To be read, but not from the disk: through a slot, then.
    """

    good: list[RowNumber]
    bad: list[RowNumber]
    elsewhere: list[RowNumber]


class Moved(Message, frozen=True):
    """Chunks of the session's namespace are in a tier now, or are no more.

    Attributes:
        tier: Its place among the tiers of ``Ready``.
        keys: 16 bytes each, joined. None: moves were lost, nobody knows which, so what was told before may be wrong.
    """

    tier: int
    is_here: bool
    keys: bytes


MOVES_LOST: Final = Moved(0, False, b"")


class Stat(Message, frozen=True):
    """Figures of the server, as JSON."""

    figures: bytes


class Evicted(Message, frozen=True):
    """Chunks that are being removed, that stay because they are in use or needed, and that are not there.

    ``left``: so many were not looked at yet, because many are going already; the same order again goes on with them.
    """

    removed: int
    kept: int
    missing: int
    left: int = 0


class NamespaceRecord(Message, frozen=True):
    """The record that was asked for, canonical JSON; empty if not one was meant, and which there are in hex."""

    record: bytes
    known: list[str]


class Hinted(Message, frozen=True):
    """What came of a hint.

    Attributes:
        outcome: ``done``; ``unknown``: nothing is known of what it names; ``no_engine``: no engine is here that could
            use it; ``refused``: too many, or too much; ``nowhere``: no tier of this server keeps pins.
        chunks: How many it is about: of a prefetch what is to come up, of a pin what is kept; of others 0.
    """

    outcome: str
    chunks: int = 0


class Held(Message, frozen=True):
    """So many of the chunks of a ``HeldRequest`` are here, from the first on."""

    question: int
    count: Annotated[int, msgspec.Meta(ge=0)]


class Lent(Message, frozen=True):
    """The answer to ``Borrow``.

    Attributes:
        outcome: ``ok``; ``missing``: it is not in host memory; ``no_room``: too much is lent.
        slot, size_bytes: Where the blob lies, header first, and stays as it is until ``Repay`` or ``Reclaimed``.
    """

    loan: int
    outcome: str
    slot: Annotated[SlotId, msgspec.Meta(ge=0)] = 0
    size_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0


class Reclaimed(Message, frozen=True):
    """A loan ends: it took too long. The server uses no such slot before all of this message is in the door's socket.

    So a door that has read its socket to the end, after it has read a part of a slot, knows whether it was still lent.
    """

    loan: int


SLABS_PER_FRAME = 64

FromClient = (
    Hello
    | JoinWorker
    | Decline
    | JoinScheduler
    | Lookup
    | Follow
    | Claim
    | Release
    | Commit
    | CommitTail
    | DropTails
    | GiveBack
    | Rest
    | Wake
    | Reset
    | Pin
    | SessionState
    | Hint
    | NamespaceRequest
    | Pinned
    | LendRows
    | StoreRows
    | LoadRows
    | LoadEnded
    | TakeRowsBack
    | Unmapped
    | StatRequest
    | Evict
    | JoinDoor
    | HeldRequest
    | Borrow
    | Repay
    | Given
)
FromServer = (
    Welcome
    | Slabs
    | Refused
    | Ready
    | Updated
    | Progressed
    | Ended
    | Credits
    | Rested
    | Recall
    | RowsTaken
    | RowsEnded
    | Moved
    | Stat
    | Evicted
    | NamespaceRecord
    | Hinted
    | Held
    | Lent
    | Reclaimed
)

_encoder = msgspec.msgpack.Encoder()


def frame(message: Message) -> bytes:
    """A message as bytes to send.

    Raises:
        ProtocolError: It is larger than a frame may be.
    """
    body = _encoder.encode(message)
    if len(body) > FRAME_BYTES_MAX:
        raise ProtocolError(f"message too large. type={type(message).__name__} bytes={len(body)} max={FRAME_BYTES_MAX}")
    return LENGTH.pack(len(body)) + body


class FrameReader:
    """Collects received bytes and yields whole messages; holds at most one frame and one read of bytes.

    Threads: one owner.

    Attributes:
        frame_bytes_max: Longest frame that is accepted from now on.
    """

    def __init__(self, types: Any, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self.frame_bytes_max = frame_bytes_max
        self._decoder = msgspec.msgpack.Decoder(types)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Add received bytes, yield the messages they complete.

        Raises:
            ProtocolError: A frame is too long or is not a message of the protocol.
        """
        self._buffer += data
        while len(self._buffer) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._buffer)
            if length > self.frame_bytes_max:
                raise ProtocolError(f"frame too long. bytes={length} max={self.frame_bytes_max}")
            end = LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(memoryview(self._buffer)[LENGTH.size : end])
            del self._buffer[:end]
            try:
                message = self._decoder.decode(body)
            except (ValueError, RecursionError) as exc:
                # ValueError: msgspec's own errors, and the UnicodeDecodeError it lets through. The reason quotes what
                # was sent, of any length.
                raise ProtocolError(
                    f"not a message of protocol {PROTOCOL}. bytes={length}: {str(exc)[:NAME_CHARS_MAX]!a}"
                ) from exc
            yield message
