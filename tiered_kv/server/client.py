"""The scheduler's client: everything it is asked is answered from local state; the socket is never waited for.

A background thread finds (or starts) the server and shakes hands; from then on the owner's :meth:`SchedulerClient.poll`
moves bytes without blocking. When the connection is lost, the session is over: its lookups, slots and commits are
forgotten, ``generation`` counts up, and a new session is joined with back-off. Until it is ready every answer is
"nothing there", which is always right.

    field                                  owner
    _sock, _outbox, lookups, credits, ...  the caller of poll (vLLM's scheduler thread)
    _joined                                handed from the joining thread to poll (a deque: appends are atomic)
"""

import contextlib
import logging
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from tiered_kv.config import Config, size_text
from tiered_kv.errors import ConfigError, ProtocolError, TieredKVError
from tiered_kv.keys.chunk_record import KEY_BYTES, ChunkRecord
from tiered_kv.keys.namespace import Namespace
from tiered_kv.keys.tags import NO_TAG
from tiered_kv.machine import forgotten_in_children
from tiered_kv.server import protocol as m
from tiered_kv.server.connect import Background, refusal_error, say_hello
from tiered_kv.server.epochs import is_private_epoch
from tiered_kv.tiering.types import LookupAnswer, SlotId, Turn

logger = logging.getLogger(__name__)

OUTBOX_BYTES_MAX = 4 << 20
"""A server that does not read this much gets no more stores and lookups: they are dropped, which is a miss."""

READ_BYTES = 256 << 10
READS_MAX = 16
"""Of one poll: a server that floods its client must not hold the scheduler's step."""

ENDED_MAX = 1 << 14
"""Lookups that ended and were not counted yet; whoever counts them does so every step."""

MOVES_MAX = 1 << 12
"""Messages about moves that nobody has taken yet; where there are more, all of them are lost."""

MOVES_BYTES_MAX = 64 << 20
BACKOFF_FIRST_S = 0.2
BACKOFF_LAST_S = 10.0
PATIENCE_LAST_S = 3600.0
CREDITS_MAX: Final = 1 << 20
"""Slots a session may hold ahead: a quarter of an arena of 1 TiB, in chunks of 256 KiB."""

TIERS_MAX: Final = 16

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EndedLookup:
    """A lookup that was released.

    Attributes:
        generation: Of the session it belonged to.
        keys: The prefix that was looked up; chunks from ``start`` on were wanted.
        answer: What was known of it then.
        is_asked_anew: Another one of the same request has replaced it: it does not count.
        state_parts: Of the state it was for; 0: for a prefix alone.
    """

    id: int
    generation: int
    keys: Sequence[bytes]
    start: int
    answer: LookupAnswer
    is_asked_anew: bool = False
    state_parts: int = 0

    @property
    def asked(self) -> int:
        """Chunks that were wanted."""
        return max(0, len(self.keys) - self.start)


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """What workers must know of a session to copy for it."""

    generation: int
    slot_bytes: int
    payload_offset: int
    rank_offsets: tuple[int, ...]


class SchedulerClient:
    """One engine's session with the server.

    Threads: one owner for everything but :meth:`close`; joining happens in a thread of its own.

    Attributes:
        lookups: Lookups that were sent and not released, with what is known of them.
        told_s: Of each of those, when that came, or when it was sent.
        ended: Lookups that were released, for whoever counts them; neither questions nor lookups of a lost session are
            among them.
        moves: What the server told of chunks that came and went.
        tiers: Names of the server's tiers, from host memory downwards.
        chunks_leased_max: Most chunks that one lookup of the session may hold.
        host_bytes: Host memory of the server.
        is_silent: Its owner waited for an answer in vain, and nothing has come since.
        is_resting: Nothing is stored, and no slots are held for it.
        figures: The server's last answer to :meth:`ask_figures`, for the asker to take away.
        rows_ended: What the server told of uses of lent rows, for whoever began them to take away.
    """

    def __init__(
        self,
        config: Config,
        engine_id: str,
        world_size: int,
        *,
        is_watching: bool = False,
        rejoins: bool = False,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to join.

        Args:
            is_watching: The session is told which chunks come and go, in ``moves``.
            rejoins: The owner's workers join the sessions that follow a lost one: the server may end it for a better.
        """
        self._monotonic = monotonic
        self._config = config
        self._engine_id = engine_id
        self.world_size = world_size
        self._is_watching = is_watching
        self._rejoins = rejoins
        self.generation = 0
        self.refusal: str | None = None
        self.namespace: Namespace | None = None
        self.info: SessionInfo | None = None
        self.lookups: dict[int, LookupAnswer] = {}
        self.told_s: dict[int, float] = {}
        self.ended: deque[EndedLookup] = deque(maxlen=ENDED_MAX)
        self.moves: deque[m.Moved] = deque()
        self.tiers: tuple[str, ...] = ()
        self.chunks_leased_max = 0
        self.host_bytes = 0
        self.figures: bytes | None = None
        self.rows_ended: deque[m.RowsEnded] = deque()
        self.is_silent = False
        self._is_read_out = False
        self._asked: dict[int, tuple[Sequence[bytes], int, int, bool]] = {}
        self._credits: deque[SlotId] = deque()
        self._taken: set[SlotId] = set()
        self.is_resting = False
        self._rests_unanswered = 0  # what is granted meanwhile the server has taken back
        self._next_lookup = 1
        self._sock: socket.socket | None = None
        self._news = select.poll()  # of the socket: whether there is anything to read
        self._is_readable = False  # it said so, and nothing was read since
        self._reader = m.FrameReader(m.FromServer)
        self._outbox = bytearray()
        self._joined: deque[tuple[int, socket.socket]] = deque()
        self._is_resetting = False
        self._needs_reset = False  # a reset that no server has heard of yet
        self._private_epoch = ""  # once a reset gave one: what lies under a base epoch is of other weights
        self._backoff_s = BACKOFF_FIRST_S
        self._patience_s = config.start_timeout_s
        self._give_up_s = 0.0
        self._is_closed = threading.Event()
        self._background = Background()
        forgotten_in_children(self)
        self._start_joining(delay_s=0)

    @property
    def is_ready(self) -> bool:
        """Whether there is an open session: keys can be made, lookups and stores do something."""
        return self.info is not None and not self._is_resetting

    @property
    def credit_count(self) -> int:
        """Empty slots that can be taken now."""
        return len(self._credits)

    def wait_ready(self, timeout_s: float) -> bool:
        """Poll until the session is open or refused, for start-up only; blocks."""
        deadline_s = time.monotonic() + timeout_s
        while not self.is_ready and self.refusal is None and time.monotonic() < deadline_s:
            self.poll()
            time.sleep(0.005)
        return self.is_ready

    # -- asked by the scheduler; nothing blocks ----------------------------------------------------------------

    def lookup(
        self,
        keys: Sequence[bytes],
        digests: Sequence[bytes],
        start: int = 0,
        turn: Turn = (0, 0),
        *,
        is_claimed: bool = False,
        state_parts: int = 0,
        may_search: bool = True,
        wants_tails: bool = False,
        session: bytes = b"",
        hint: str = "",
        counted: int = 0,
        is_followed: bool = True,
    ) -> int | None:
        """Start a lookup whose answer appears in ``lookups``; chunks before ``start`` are not wanted.

        None when it could not be sent: a miss. ``turn`` says when its request is admitted, ``is_claimed`` that its
        leases are never ended by the server; with ``state_parts`` the prefix ends where a state of so many parts is.
        Where nothing may be searched in a shared tier, the keys may be any part of a prefix. With ``wants_tails`` the
        answer has the tails behind what is held. ``session`` is the name of the user's session that asks, if it is
        one's, ``hint`` the peer that is asked first. ``counted`` are the leading chunks that an earlier lookup of the
        same request found, and thereby used, or that it has computed before it was preempted. Where it is not followed
        the server tells of what it finds and of the end, of parts only from :meth:`follow` on.
        """
        names = b"".join(keys), b"".join(digests)
        number = self._next_lookup
        wanted = m.Lookup(
            number, start, *names, turn, is_claimed, state_parts, may_search, wants_tails, session, hint,
            counted=counted, is_followed=is_followed,
        )  # fmt: skip
        return self._look_up(wanted, keys)

    def follow(self, lookup: int) -> None:
        """Have the server tell how much of a lookup is ready, and from then on of parts as they are."""
        self._send(m.Follow(lookup), may_drop=False)

    def look_up_rows(
        self,
        names: Sequence[bytes],
        start: int = 0,
        *,
        leases: bool = True,
        may_search: bool = True,
        session: bytes = b"",
        hint: str = "",
        load: int = 0,
    ) -> int | None:
        """Start a lookup of rows by their names (``keys/row_names.py``); else as :meth:`lookup`.

        Without ``leases`` it is a question: the answer says from which tiers what is held from ``start`` on would come.
        All that is looked up for one ``load`` is counted as one lookup, at :meth:`load_ended`.
        """
        wanted = m.Lookup(
            self._next_lookup, start, b"", b"", may_search=may_search, session=session, hint=hint,
            leases=leases, names=list(names), load=load,
        )  # fmt: skip
        return self._look_up(wanted, names)

    def _look_up(self, wanted: m.Lookup, keys: Sequence[bytes]) -> int | None:
        if wanted.leases:
            self.wake()
        if not self.is_ready or not self._send(wanted):
            return None
        self._next_lookup += 1
        self._note(wanted.lookup, LookupAnswer())
        self._asked[wanted.lookup] = (keys, wanted.start, wanted.state_parts, wanted.leases)
        return wanted.lookup

    def claim(self, lookup: int) -> None:
        """A load from the lookup's slots begins; :meth:`is_leased` tells in the end whether it was in time."""
        self._send(m.Claim(lookup), may_drop=False)

    def is_leased(self, lookup: int, generation: int) -> bool:
        """Whether all that was copied from a lookup's slots until now is right, read from the socket to its end.

        The server says ``Ended`` before it uses a slot again, so what cannot be read yet was said after the copy. Of a
        session that was lost, or a server that floods, nobody knows.
        """
        self.poll()
        answer = self.lookups.get(lookup) if generation == self.generation else None
        return answer is not None and not answer.is_ended and self._is_read_out

    def release(self, lookup: int, *, is_asked_anew: bool = False) -> None:
        """End a lookup and its leases; it is not counted where another one of the same request has replaced it.

        Lookups of a lost session are forgotten already.
        """
        if (answer := self.lookups.pop(lookup, None)) is not None:
            keys, start, parts, leases = self._asked.pop(lookup)
            del self.told_s[lookup]
            if leases:
                self.ended.append(EndedLookup(lookup, self.generation, keys, start, answer, is_asked_anew, parts))
            elif answer.is_done:
                return  # the answer to a question has ended it
            self._send(m.Release(lookup, is_asked_anew), may_drop=False)

    def waited_in_vain(self) -> None:
        """Nothing is worth waiting for until the server is heard again; it is asked for something that it answers."""
        if not self.is_silent:
            self.is_silent = True
            self._send(m.StatRequest(), may_drop=False)

    def ask_figures(self) -> bool:
        """Ask for the server's figures, which appear in ``figures``; False when it could not be sent."""
        return self.is_ready and self._send(m.StatRequest())

    def pin(self, key: bytes, ttl_s: float, tag: bytes = NO_TAG) -> bool:
        """Keep a stored chunk and the prefix before it; False when it could not be said, and then nobody does.

        For 0 seconds: only have them written to the secondary tiers, whatever these take otherwise.
        """
        return self.is_ready and self._send(m.Pin(key, ttl_s, tag))

    def tell_state(self, session: bytes, tag: bytes, key: bytes) -> bool:
        """A request of a user's session is over, and stored up to a chunk; False when it could not be said."""
        return self.is_ready and self._send(m.SessionState(session, tag, key))

    def hint(self, action: str, session: bytes, tag: bytes) -> bool:
        """Have something done with a user's session (:class:`~protocol.Hint`); False when it could not be said."""
        return self.is_ready and self._send(m.Hint(action, session, tag))

    def take_slot(self) -> SlotId | None:
        """An empty slot to fill, if one was granted ahead."""
        self.wake()
        if not self._credits or not self.is_ready:
            return None
        slot = self._credits.popleft()
        self._taken.add(slot)
        return slot

    def rest(self) -> None:
        """Hold no slots until something is looked up or stored; to be called before its owner stops to poll.

        Else slots that are recalled for chunks of another size stay here, and with them the slabs they lie in. Does
        nothing while slots are being filled.
        """
        if self.is_resting or self._taken:
            return
        self.is_resting = True
        if self.is_ready:
            self._credits.clear()
            self._rests_unanswered += 1
            self._send(m.Rest(), may_drop=False)

    def wake(self) -> None:
        """Something will be stored: have slots granted ahead."""
        if self.is_resting:
            self.is_resting = False
            if self.is_ready:
                self._send(m.Wake(), may_drop=False)

    def commit(self, chunks: Sequence[tuple[SlotId, ChunkRecord]], answers: Collection[SlotId] = ()) -> None:
        """Slots that every rank has filled, in prefix order; those of ``answers`` have generated tokens in them."""
        if not chunks:
            return
        self._taken.difference_update(slot for slot, _ in chunks)
        if self._is_resetting:  # filled before the reset: nobody may find them
            self.give_back([slot for slot, _ in chunks])
            return
        self._send(m.Commit(list(chunks), frozenset(answers)), may_drop=False)

    def commit_tail(self, slot: SlotId, record: ChunkRecord) -> None:
        """A slot that every rank has filled with a tail; the chunk before it was committed."""
        self._taken.discard(slot)
        if self._is_resetting:
            self.give_back([slot])
            return
        self._send(m.CommitTail(slot, record), may_drop=False)

    def store_rows(self, rows: Sequence[tuple[int, int, ChunkRecord]]) -> bool:
        """Have lent rows written to the disk: per row the number of the use, the row, and its chunk.

        How each ends is told in ``rows_ended``, or by the end of the session's loan. False: no use has begun.
        """
        return self._send_rows([m.StoreRows(part) for part in _parts(rows)])

    def load_rows(self, rows: Sequence[tuple[int, int, bytes]], session: bytes = b"", load: int = 0) -> bool:
        """Have chunks read into lent rows: per row the number of the use, the row, and its name; as above."""
        return self._send_rows([m.LoadRows(part, session, load) for part in _parts(rows)])

    def load_ended(self, load: int) -> None:
        """Nothing more is looked up or read for a load, and all that was has ended."""
        self._send_rows([m.LoadEnded(load)])

    def take_rows_back(self, uses: Sequence[int]) -> None:
        """Have uses of lent rows ended now, and be told so in ``rows_ended``."""
        self._send_rows([m.TakeRowsBack(part) for part in _parts(uses)])

    def _send_rows(self, messages: Sequence[m.Message]) -> bool:
        if not self.is_ready:
            return False
        for message in messages:  # where one cannot be sent the session is lost, and how far it got nobody knows
            self._send(message, may_drop=False)
        return True

    def drop_tails(self, keys: Sequence[bytes]) -> None:
        """What was committed continues these tails: they may go."""
        if keys:
            self._send(m.DropTails(list(keys)))

    def give_back(self, slots: Sequence[SlotId]) -> None:
        """Taken slots that will not be committed."""
        if slots:
            self._taken.difference_update(slots)
            self._send(m.GiveBack(list(slots)), may_drop=False)

    def reset(self) -> None:
        """Old KV is invalid: nothing is looked up or stored until the server has opened a private epoch.

        In every state the next ``Ready`` that counts is one that was asked for after this call: a session that is just
        joined, or is just resetting, resets (again) before it is used.
        """
        if self.info is None or self._is_resetting:
            self._is_resetting = self._needs_reset = True
            return
        self._is_resetting = True  # first of all: if the session is lost while this is sent, the next one resets
        unused = list(self._credits)
        self._credits.clear()
        self.give_back(unused)
        self._send(m.Reset(), may_drop=False)

    def has_news(self) -> bool:
        """Whether :meth:`poll` has anything to do: in an open session a system call says that nothing has come."""
        if self._sock is None or self.info is None or self._outbox:
            return True
        self._is_readable = self._is_readable or bool(self._news.poll(0))
        return self._is_readable

    def poll(self) -> None:
        """Take in what the server sent, send what waits. Never blocks."""
        if not self.has_news():
            self._is_read_out = True
            return
        if self.info is None:
            self._background.go_on()
            self._adopt()
        sock = self._sock
        if sock is None:
            return
        try:
            self._receive(sock)
            if self._sock is sock:
                self._flush()
                self._check_patience()
        except (OSError, TieredKVError) as exc:
            if self._sock is sock:
                self._lose(exc)

    def _check_patience(self) -> None:
        """Go on to the next generation when this one's workers do not come.

        They may have joined a server that died since; what makes them join again is a higher generation.
        """
        if self.info is None and time.monotonic() > self._give_up_s:
            self._patience_s = min(2 * self._patience_s, PATIENCE_LAST_S)
            raise TimeoutError("the engine's workers did not come")

    def _receive(self, sock: socket.socket) -> None:
        """Read before writing: why the server hung up stands in what it sent last."""
        self._is_read_out = False
        for _ in range(READS_MAX):
            if not self._is_readable and not self._news.poll(0):  # cheaper than a read that fails
                self._is_read_out = True
                return
            self._is_readable = False
            data = sock.recv(READ_BYTES)
            if not data:
                raise ConnectionResetError("the server closed the connection")
            self.is_silent = False
            for message in self._reader.feed(data):
                self._take(message)
                if self._sock is not sock:
                    return  # lost while answering this message

    # -- messages ----------------------------------------------------------------------------------------------

    def _take(self, message: object) -> None:
        match message:
            case m.Progressed(lookup):
                told = self.lookups.get(lookup)
                if told is not None and not told.is_ended:
                    answer = message.after(told)
                    _check_answer(answer)
                    self._note(lookup, answer)
            case m.Updated(lookup, answer):
                _check_answer(answer)
                if lookup in self.lookups and not self.lookups[lookup].is_ended:
                    self._note(lookup, answer)
            case m.Ended(lookup):
                if lookup in self.lookups:
                    held = self.lookups[lookup].held
                    self._note(lookup, LookupAnswer(held=held, is_done=True, is_answered=True, is_ended=True))
            case m.Moved():
                check_moved(message, len(self.tiers))
                self._note_moves(message)
            case m.Stat(figures):
                self.figures = figures
            case m.RowsEnded():
                self.rows_ended.append(message)
            case m.Credits(slots):
                check_credits(slots, len(self._credits))
                if self._is_resetting and not self._rests_unanswered:
                    self.give_back(slots)
                elif not self._rests_unanswered:
                    self._credits.extend(slots)
            case m.Rested():
                if not self._rests_unanswered:
                    raise ProtocolError("the server answered a rest that nobody asked for")
                self._rests_unanswered -= 1
            case m.Recall(slots):
                unused = set(slots).intersection(self._credits)
                self._credits = deque(slot for slot in self._credits if slot not in unused)
                self.give_back(sorted(unused))
            case m.Ready():
                self._opened(message)
            case m.Refused():
                error = refusal_error(message)
                if isinstance(error, ConfigError):
                    self.refusal = message.reason
                raise error
            case _:
                raise ProtocolError(f"unexpected message. type={type(message).__name__}")

    def _note(self, lookup: int, answer: LookupAnswer) -> None:
        self.lookups[lookup], self.told_s[lookup] = answer, self._monotonic()

    def _note_moves(self, moved: m.Moved) -> None:
        if not self._is_watching:
            return
        is_large = len(moved.keys) > MOVES_BYTES_MAX // MOVES_MAX
        if len(self.moves) >= MOVES_MAX or (is_large and sum(len(x.keys) for x in self.moves) > MOVES_BYTES_MAX):
            self.moves.clear()
            self.moves.append(m.MOVES_LOST)
        self.moves.append(moved)

    def _note_host_bytes(self, host_bytes: int) -> None:
        """Say once where the server has less host memory than one that this engine had started."""
        own_bytes = self._config.resolved_host_bytes()
        if not self.host_bytes and host_bytes < own_bytes and not self._config.is_guest:
            logger.warning(
                "the cache server has host_bytes=%s; one that this engine starts has %s. Whoever started it named "
                "less, or is a tier below vLLM's offloading: if that is too little, name host_bytes in all engines "
                "that share the directory",
                size_text(host_bytes), size_text(own_bytes),
            )  # fmt: skip
        self.host_bytes = host_bytes

    def _opened(self, ready: m.Ready) -> None:
        check_ready(ready, self.world_size)
        self.namespace = Namespace.from_record(ready.record)
        epoch = str(self.namespace.fields["epoch"])
        self._private_epoch = epoch if is_private_epoch(epoch) else ""
        self.tiers, self.chunks_leased_max = tuple(ready.tiers), ready.chunks_leased_max
        self._note_host_bytes(ready.host_bytes)
        self.info = SessionInfo(self.generation, ready.slot_bytes, ready.payload_offset, tuple(ready.rank_offsets))
        if self._is_resetting and self._needs_reset:
            self._needs_reset = False
            self._send(m.Reset(), may_drop=False)
            return
        self._is_resetting = False
        if not self.is_resting:
            self._send(m.Wake(), may_drop=False)
        self._backoff_s = BACKOFF_FIRST_S
        self._patience_s = self._config.start_timeout_s
        logger.info(
            "cache session open. namespace=%s chunk_bytes=%d host_bytes=%d generation=%d",
            self.namespace.digest.hex(),
            ready.slot_bytes,
            ready.host_bytes,
            self.generation,
        )

    def _send(self, message: m.Message, *, may_drop: bool = True) -> bool:
        if self._sock is None:
            return False
        if may_drop and len(self._outbox) > OUTBOX_BYTES_MAX:
            return False
        try:
            data = m.frame(message)
        except ProtocolError as exc:  # a request of tens of millions of tokens: no lookup, no store
            logger.warning("not sent. %s", exc)
            if not may_drop:
                self._lose(exc)
            return False
        try:
            if not self._outbox:  # hardly ever does anything wait: no copy of what is sent at once
                data = data[self._try_send(data) :]
            self._outbox += data
            self._flush()
        except OSError as exc:
            self._lose(exc)
            return False
        if len(self._outbox) > 2 * OUTBOX_BYTES_MAX:
            self._lose(ProtocolError(f"the server does not read. waiting_bytes={len(self._outbox)}"))
            return False
        return True

    def _flush(self) -> None:
        while self._outbox and (sent := self._try_send(self._outbox)):
            del self._outbox[:sent]

    def _try_send(self, data: bytes | bytearray) -> int:
        """How many bytes the socket took."""
        assert self._sock is not None
        try:
            return self._sock.send(data, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0

    # -- joining -----------------------------------------------------------------------------------------------

    def _start_joining(self, delay_s: float) -> None:
        self._background.start("join", partial(self._join_server, self.generation, delay_s))

    def _join_server(self, generation: int, delay_s: float) -> None:
        backoff_s = delay_s
        while not self._is_closed.wait(backoff_s):
            try:
                sock, _ = say_hello(self._config, "scheduler", self._engine_id, generation)
                join = m.JoinScheduler(
                    self.world_size,
                    self._is_watching,
                    self._private_epoch,
                    self._config.min_share,
                    self._config.max_share,
                    self._config.lease_s,
                    self._rejoins,
                )
                sock.sendall(m.frame(join))
                sock.setblocking(False)
                self._joined.append((generation, sock))
                if self._is_closed.is_set():
                    self._close_joined()
                return
            except (TieredKVError, OSError) as exc:
                if isinstance(exc, ConfigError):
                    self.refusal = str(exc)
                backoff_s = min(max(2 * backoff_s, BACKOFF_FIRST_S), BACKOFF_LAST_S)
                logger.warning("no cache server; next try in %.1f s. %s", backoff_s, exc)

    def _adopt(self) -> None:
        while self._joined:
            generation, sock = self._joined.popleft()
            if generation != self.generation or self._sock is not None:
                sock.close()
                continue
            self._sock, self._news = sock, select.poll()
            self._is_readable = False
            self._news.register(sock, select.POLLIN)
            self._give_up_s = time.monotonic() + self._patience_s
            self.refusal = None

    def _lose(self, reason: Exception) -> None:
        """The session is over: forget all of it, and join again under the next generation."""
        assert self._sock is not None
        logger.warning("cache session lost; requests go on without it. generation=%d: %s", self.generation, reason)
        self._sock.close()
        self._sock = None
        self._outbox.clear()
        self._credits.clear()
        self._taken.clear()
        self._rests_unanswered = 0
        self.lookups.clear()
        self.told_s.clear()
        self._asked.clear()
        self.moves.clear()
        self.rows_ended.clear()
        self.info = None
        self._needs_reset = self._is_resetting
        self._reader = m.FrameReader(m.FromServer)
        self.generation += 1
        self._backoff_s = min(2 * self._backoff_s, BACKOFF_LAST_S)
        if not self._is_closed.is_set():
            self._start_joining(self._backoff_s)

    def close(self) -> None:
        """End the session. Idempotent; what was committed is the server's."""
        self._is_closed.set()
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        self._close_joined()

    def forget_after_fork(self) -> None:
        """In a child of this process: say nothing more in the session of the parent, whose leases would end for it."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        self._close_joined()

    def _close_joined(self) -> None:
        with contextlib.suppress(IndexError):  # close() and a join that comes too late may both be here
            while True:
                self._joined.popleft()[1].close()


def _parts(items: Sequence[T]) -> list[list[T]]:
    """Of one message each."""
    return [list(items[at : at + m.ROWS_AT_ONCE_MAX]) for at in range(0, len(items), m.ROWS_AT_ONCE_MAX)]


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


def _check_answer(answer: LookupAnswer) -> None:
    """Check that what is said to be ready has a slot and a source.

    Raises:
        ProtocolError: It is not so.
    """
    is_whole = answer.ready <= len(answer.slots) == len(answer.sources) and answer.unbegun <= answer.queued
    if not is_whole or answer.boundary > answer.held:
        raise ProtocolError(
            f"an impossible answer to a lookup. slots={len(answer.slots)} ready={answer.ready} "
            f"sources={len(answer.sources)} boundary={answer.boundary} held={answer.held} queued={answer.queued} "
            f"unbegun={answer.unbegun}"
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
    if not 0 <= moved.tier < max(tiers, 1) or len(moved.keys) % KEY_BYTES:
        raise ProtocolError(f"an impossible move. tier={moved.tier} tiers={tiers} key_bytes={len(moved.keys)}")
