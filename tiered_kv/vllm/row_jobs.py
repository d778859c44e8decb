"""Jobs between rows of vLLM's host memory and the server: find, store, load.

Where the server has the rows (``row_memory.py``) it writes and reads them itself; a row is in a file then when it is
reported stored. Else, and for chunks that are not on this machine's disk, rows are copied to slots of the server's
arena and from them, by threads of this process. What a load copies was verified by the server before and is claimed
while it is copied; so rows that end well have right bytes, and those whose session was lost end badly.

    store   look up -> those not held:  written by the server, in the order of the prefix
                                   or:  slot granted -> copied -> committed, in that order
    load                                read and verified by the server
                                   or:  by pieces of what one session may lease: leased -> claimed -> copied -> released

Owns jobs and copies; must not know vLLM: ``offloading.py`` is the tier. Names of chunks:
``keys/row_names.py``.

    field                 written by
    _ended                copy threads append, the owner takes
    ArenaKeeper._worker   its thread, and the owner, under _idle
    all else              the owner: vLLM's scheduler thread
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np

from tiered_kv.config import Config
from tiered_kv.errors import TieredKVError
from tiered_kv.keys.namespace import Namespace
from tiered_kv.keys.row_names import RowNames
from tiered_kv.server import protocol as m
from tiered_kv.server.client import SchedulerClient, SessionInfo
from tiered_kv.server.worker_client import WorkerClient
from tiered_kv.tiering.slots import SLOTS_PER_SLAB_MAX
from tiered_kv.tiering.types import LookupAnswer, SlotId
from tiered_kv.vllm.row_groups import Span
from tiered_kv.vllm.row_memory import NotShared, RowUses, UseEnd, shared_region

logger = logging.getLogger("vllm." + __name__)

THREADS: Final = 2
"""That copy: one core's memory bandwidth is above what a disk gives."""

SLOT_WAIT_S: Final = 2.0
"""A chunk that gets no slot for so long is not stored: its row is pinned in vLLM's memory meanwhile."""

WRITE_WAIT_S: Final = 2.0
WRITE_LAST_S: Final = 10.0
"""Of rows that the server writes: how long a job waits for the next one, once it is their turn, and for all."""

READ_BYTES_MAX: Final = 256 << 20
READ_ROWS_MIN: Final = 8
"""Rows that the server reads at once for one engine; the disk has others to serve."""

QUEUED_MAX: Final = 1 << 14
"""Chunks that may wait for slots."""

PIECE_ROWS: Final = 32
"""Of a load that are looked up together: those behind them come up while these are copied."""

COMMITTED_MAX: Final = 1 << 12
"""Chunks that are remembered as committed: those of a few steps."""

POLLS_MIN: Final = 6
"""A load is not given up before so many polls, which are three of vLLM's steps: what is read takes two to be told."""

AGAIN_S: Final = 0.01
REJOIN_S: Final = 0.5
REJOIN_LAST_S: Final = 30.0
LOOK_S: Final = 0.02
DRAIN_S: Final = 0.001


@dataclass(slots=True)
class Find:
    """How much of a prefix is held.

    Attributes:
        first: The first chunk of interest.
        held: Leading chunks; None: it is not known yet.
        parts: Then, of those from ``first`` on: how many, and the seconds that reading so many should take; None: the
            tier that has them was never measured.
    """

    lookup: int
    generation: int
    sent_s: float
    first: int = 0
    held: int | None = None
    parts: list[tuple[int, float | None]] = field(default_factory=list)


class Done(NamedTuple):
    """A job that is over.

    Attributes:
        good: Per row of the job, in its order: stored, or loaded.
    """

    job: int
    good: list[bool]
    seconds: float
    copied_bytes: int


@dataclass(slots=True)
class _RowPiece:
    """Rows of a load whose chunks follow each other and are looked up together; else it is one row.

    Attributes:
        first: Its first row's place in the job.
        lookup: None: it is to be looked up, from ``again_s`` on.
        copied: Leading rows of which a copy was begun.
        running: Copies that run.
    """

    first: int
    count: int
    lookup: int | None = None
    again_s: float = 0.0
    copied: int = 0
    running: int = 0
    is_claimed: bool = False


@dataclass(slots=True)
class _RowJob:
    """What stores and loads have in common.

    Attributes:
        places: Per row: its chunk's index among the names, ascending, and the row.
        spans: What of a row is copied.
        session: The user's session that asks for it, if it is one's.
        good: Per row: how it ended; None: it has not.
        running: Copies that run.
        is_lent: The server reads and writes the rows itself, if it can.
        used: Uses of rows by the server that are not over.
        is_asked_back: These are to end at once.
        is_over: Nothing more is begun for it; it is told once no copy of it runs.
    """

    id: int
    names: RowNames
    places: list[tuple[int, int]]
    spans: tuple[Span, ...]
    generation: int
    session: bytes
    started_s: float = field(default_factory=time.monotonic)
    deadline_s: float = 0.0
    good: list[bool | None] = field(init=False)
    running: int = 0
    is_lent: bool = False
    used: int = 0
    is_asked_back: bool = False
    is_over: bool = False

    def __post_init__(self) -> None:
        self.good = [None] * len(self.places)


@dataclass(slots=True)
class _StoreJob(_RowJob):
    """One store.

    Attributes:
        lookup: What asks how much is held; None: that is known.
        slots: Of rows copied to a slot that is not committed yet.
        copied: Leading rows of which a copy was begun, or that were held.
        committed: Leading rows that are stored.
        asked: Leading rows that are or will be.
        before: What stores the chunk before the first one of this job, and which of its rows that is.
    """

    tag: bytes = b""
    lookup: int | None = None
    slots: dict[int, SlotId] = field(default_factory=dict)
    copied: int = 0
    committed: int = 0
    asked: int = 0
    before: "tuple[_StoreJob, int] | None" = None


@dataclass(slots=True)
class _LoadJob(_RowJob):
    """One load.

    Attributes:
        pieces: Rows that are looked up.
        wanted: Places of rows that come through slots, ascending.
        asked: How many of these are or were in a piece.
        lent: Leading rows that the server was asked to read.
        polls: How often it was gone on with.
    """

    pieces: list[_RowPiece] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)
    asked: int = 0
    lent: int = 0
    polls: int = 0


class RowJobs:
    """One engine's jobs.

    Threads: vLLM's scheduler thread, for every public method.

    Attributes:
        client: The session with the server.
    """

    def __init__(self, config: Config, engine_id: str, join: m.JoinWorker, rows: "np.ndarray[Any, Any]") -> None:
        """Begin to join the server.

        Args:
            join: This process's part as the session's only worker: one page, what is stored of a row.
            rows: vLLM's host memory, uint8 of shape (rows, bytes of a row).
        """
        self._config = config
        self._rows = rows
        self._whole: tuple[Span, ...] = ((0, rows.shape[1]),)
        self.client = SchedulerClient(config, engine_id, 1, rejoins=True)
        self.client.rest()  # until something is looked up or stored
        self.uses = RowUses(self.client)
        self._read_max = max(READ_ROWS_MIN, READ_BYTES_MAX // rows.shape[1])
        self._is_in_line = False  # while all jobs go on: a load waits for room among what is read, and all behind it
        self._arena = ArenaKeeper(config, engine_id, join, _lending(rows, self.uses))
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tiered_kv-rows")
        self._ended: deque[tuple[_RowJob, int, bool, _RowPiece | None]] = deque()
        self._jobs: dict[int, _StoreJob | _LoadJob] = {}
        self._waiting: deque[tuple[_StoreJob, int]] = deque()  # rows for slots, in the order of their prefixes
        self._storing: dict[bytes, tuple[_StoreJob, int]] = {}  # by its name, what running jobs store
        self._committed: dict[bytes, int] = {}  # names of late, and the session's generation: an answer may be older
        self._leased = 0  # rows in pieces
        self._done: list[Done] = []
        self._is_closed = False

    # -- asked by the tier; nothing blocks -----------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether there is a session, and its arena is here."""
        return self.client.is_ready and self._arena.generation == self.client.generation

    @property
    def is_running(self) -> bool:
        """Whether there is a job that is not over."""
        return bool(self._jobs)

    @property
    def namespace(self) -> Namespace | None:
        return self.client.namespace

    def wait_ready(self, timeout_s: float) -> bool:
        """Poll until it is so or the server refused, for start-up only; blocks."""
        deadline_s = time.monotonic() + timeout_s
        self.client.wait_ready(timeout_s)
        while not self.is_ready and self.client.refusal is None and time.monotonic() < deadline_s:
            self.poll()
            time.sleep(0.005)
        return self.is_ready

    def find(
        self, names: RowNames, first: int = 0, *, session: bytes = b"", peer: str = "", may_search: bool = True
    ) -> Find | None:
        """Ask how much of a prefix is held, or whether the row ``first`` is that is no part of one.

        None where it could not be asked: nothing is.

        Args:
            first: Of a prefix, the first row that would be loaded.
            session: The user's session that asks, if it is one's.
            peer: Which peer a search asks first.
        """
        if not self.is_ready or self.client.is_silent:
            return None
        asked = names.names if names.is_chain else names.names[first : first + 1]
        start = first if names.is_chain else 0
        lookup = self.client.look_up_rows(asked, start, leases=False, may_search=may_search, session=session, hint=peer)
        return None if lookup is None else Find(lookup, self.client.generation, time.monotonic(), start)

    def answer(self, find: Find, search_s: float) -> int | None:
        """How much is held, or None while it is not known. What is looked for in a bucket counts once it is found.

        Args:
            search_s: How long to wait for that; the server's first answer is waited for ``lookup_timeout_ms``.
        """
        if find.held is not None:
            return find.held
        if find.generation != self.client.generation:
            find.held = 0
            return 0
        answer = self.client.lookups.get(find.lookup, LookupAnswer())
        waited_s = time.monotonic() - find.sent_s
        is_late = waited_s > (search_s if answer.is_answered else self._config.lookup_timeout_ms / 1e3)
        if is_late and not answer.is_answered:
            self.client.waited_in_vain()
        if (answer.is_answered and not answer.unknown) or is_late or self.client.is_silent:
            find.held, find.parts = answer.held, answer.parts
            self.client.release(find.lookup)
        return find.held

    def forget(self, find: Find) -> None:
        """Nobody wants the answer any more."""
        if find.held is None and find.generation == self.client.generation:
            self.client.release(find.lookup)
            find.held = 0

    def store(
        self,
        job: int,
        names: RowNames,
        places: list[tuple[int, int]],
        tag: bytes,
        spans: tuple[Span, ...] = (),
        session: bytes = b"",
    ) -> None:
        """Store rows, which stay as they are until the job is done; those of a prefix held already are not copied.

        Args:
            places: Each row with its chunk's index among the names: ``(index, row)``.
            spans: What of each row is stored; none: all of it.
        """
        places = sorted(places)
        made = _StoreJob(job, names, places, spans or self._whole, self.client.generation, session, tag=tag)
        self._begin(made)
        if made.is_over:
            return
        if not names.is_chain:
            self._queue(made, list(range(len(places))))  # vLLM had computed them: hardly any is held
        else:
            count = places[-1][0] + 1
            made.lookup = self.client.look_up_rows(
                names.names[:count], count, leases=False, may_search=False, session=session
            )
            made.is_over = made.lookup is None

    def load(
        self,
        job: int,
        names: RowNames,
        places: list[tuple[int, int]],
        wait_s: float,
        spans: tuple[Span, ...] = (),
        session: bytes = b"",
    ) -> None:
        """Load rows, which nobody reads until the job is done; what is not here after ``wait_s`` ends badly."""
        places = sorted(places)
        made = _LoadJob(job, names, places, spans or self._whole, self.client.generation, session)
        made.deadline_s = made.started_s + wait_s
        self._begin(made)
        if not made.is_lent:
            made.wanted = list(range(len(places)))

    def take_done(self) -> list[Done]:
        """Jobs that are over since the last call; each is told once."""
        self.poll()
        done, self._done = self._done, []
        return done

    def poll(self) -> None:
        """Take in what the server and the copies said, and go on."""
        self.client.poll()
        self.client.ended.clear()  # for whoever counts lookups: vLLM counts ours
        is_mapped = self._arena.generation == self.client.generation
        if not is_mapped:
            self._arena.want(self.client.generation)
        if self._jobs or not is_mapped:
            self._go_on()
        if not self._jobs and not self.client.lookups:
            self.client.rest()  # vLLM may stop to step now

    def _go_on(self) -> None:
        """Go on with all jobs."""
        while self._ended:
            self._copy_ended(*self._ended.popleft())
        for number, place, end in self.uses.take_ended():
            self._use_ended(self._jobs[number], place, end)
        self._is_in_line = False
        for job in list(self._jobs.values()):
            job.is_over |= job.generation != self.client.generation
            if job.is_over:
                if job.used and not job.is_asked_back:
                    job.is_asked_back = True
                    self.uses.take_back(job.id)
            elif isinstance(job, _LoadJob):
                self._go_on_loading(job)
            elif job.lookup is not None:
                self._wait_for_held(job)
            elif job.is_lent:
                self._wait_for_written(job)
            else:
                self._commit(job)
        self._give_slots()
        for job in [job for job in self._jobs.values() if job.is_over and not (job.running or job.used)]:
            self._finish(job)

    def drain(self) -> None:
        """End all jobs: running copies are waited for, everything else ends badly. Blocks for the time of a copy."""
        for job in self._jobs.values():
            job.is_over = True
        self._waiting.clear()
        while self._jobs:
            self.poll()
            if self._jobs:
                time.sleep(DRAIN_S)

    def reset(self) -> None:
        """What is held is of other weights from now on."""
        self._committed.clear()
        self.client.reset()

    def close(self) -> None:
        """Leave the server. Blocks for running copies. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._threads.shutdown()
            self.client.close()
            self._arena.close()
            self.uses.close()
            self._rows = np.empty((0, 0), np.uint8)  # vLLM unmaps it

    # -- a job's way ---------------------------------------------------------------------------------------------------

    def _begin(self, job: _StoreJob | _LoadJob) -> None:
        job.is_over = not self.is_ready or self.client.is_silent or job.names.namespace is not self.client.namespace
        job.is_lent = job.spans == self._whole and self.uses.is_lent
        self._jobs[job.id] = job

    def _use_ended(self, job: _StoreJob | _LoadJob, place: int, end: UseEnd) -> None:
        """The server touches a row no more."""
        job.used -= 1
        if isinstance(job, _StoreJob):
            job.good[place] = end is UseEnd.GOOD
            job.deadline_s = time.monotonic() + WRITE_WAIT_S
            if end is UseEnd.GOOD:
                self._remember(job, place)
        elif end is UseEnd.ELSEWHERE:
            job.wanted.append(place)
            job.wanted.sort()
        else:
            job.good[place] = end is UseEnd.GOOD
            if end is UseEnd.BAD and job.names.is_chain:
                job.lent = len(job.places)  # what lies behind is of no use

    def _wait_for_held(self, job: _StoreJob) -> None:
        """Go on with a store once the server has said what is held: the rest waits for slots."""
        assert job.lookup is not None
        answer = self.client.lookups.get(job.lookup, LookupAnswer())
        if not answer.is_answered:
            if time.monotonic() - job.started_s > self._config.lookup_timeout_ms / 1e3:
                self.client.waited_in_vain()
                job.is_over = True
            return
        self.client.release(job.lookup)
        job.lookup = None
        rest = [number for number, (index, _) in enumerate(job.places) if index >= answer.held]
        job.committed = job.copied = len(job.places) - len(rest)
        first = job.places[rest[0]][0] if rest else 0
        if first > answer.held:
            job.before = self._storing.get(job.names.names[first - 1])
        self._queue(job, rest[: self._unbroken(job, rest, answer.held)])

    def _queue(self, job: _StoreJob, rest: list[int]) -> None:
        """Have these rows of a store wait for slots."""
        job.asked = job.committed + len(rest)
        if not rest or len(self._waiting) + len(rest) > QUEUED_MAX:
            job.is_over = True
            return
        for number in rest:
            self._storing.setdefault(job.names.names[job.places[number][0]], (job, number))
        if job.is_lent:
            job.deadline_s = time.monotonic() + WRITE_WAIT_S
            indexes = [(number, *job.places[number]) for number in rest]
            rows = [(number, row, job.names.record(index, job.tag)) for number, index, row in indexes]
            job.used = len(rows) if self.uses.store(job.id, rows) else 0
            return
        job.deadline_s = time.monotonic() + SLOT_WAIT_S
        self._waiting.extend((job, number) for number in rest)

    def _wait_for_written(self, job: _StoreJob) -> None:
        """End a store whose rows are all written, or of which none was for too long since it was their turn."""
        now_s = time.monotonic()
        if job.before is not None:  # it stands in line, or did until now
            job.deadline_s = now_s + WRITE_WAIT_S
            other, number = job.before
            if other.id not in self._jobs or other.good[number] is not None:
                job.before = None
        job.is_over = not job.used or now_s > min(job.deadline_s, job.started_s + WRITE_LAST_S)

    def _unbroken(self, job: _StoreJob, rest: list[int], held: int) -> int:
        """How many rows of a store can be found once they are stored: the chunk before each is there or on its way.

        On its way, as another job stores it, or was committed after the server counted what it held.
        """
        for count, number in enumerate(rest):
            index = job.places[number][0]
            before = job.names.names[index - 1] if index else b""
            follows = index == held or (count > 0 and job.places[rest[count - 1]][0] == index - 1)
            is_coming = before in self._storing or self._committed.get(before) == job.generation
            if not (follows or is_coming):
                return count
        return len(rest)

    def _give_slots(self) -> None:
        now_s = time.monotonic()
        while self._waiting:
            job, number = self._waiting[0]
            if job.is_over:
                self._waiting.popleft()
            elif (slot := self.client.take_slot()) is not None:
                self._waiting.popleft()
                job.slots[number] = slot
                job.copied = number + 1
                self._copy(job, number, slot)
            elif now_s > job.deadline_s:
                job.is_over = True
            else:
                return

    def _go_on_loading(self, job: _LoadJob) -> None:
        """Look up as many pieces as the session may lease, and copy what is ready of them."""
        if job.is_lent:
            self._lend(job)
        most = max(1, self.client.chunks_leased_max // 2)
        while job.asked < len(job.wanted) and not job.is_over:
            run = _run_length(job.places, job.wanted, job.asked) if job.names.is_chain else 1
            count = min(run, PIECE_ROWS, most)
            if self._leased and self._leased + count > most:
                break
            job.pieces.append(_RowPiece(job.wanted[job.asked], count))
            job.asked += count
            self._leased += count
        for piece in list(job.pieces):
            self._go_on_with_piece(job, piece)
        job.polls += 1
        is_asked = job.asked == len(job.wanted) and (not job.is_lent or job.lent == len(job.places))
        is_done = is_asked and not job.pieces and not job.used
        job.is_over |= is_done or (job.polls >= POLLS_MIN and time.monotonic() > job.deadline_s)

    def _lend(self, job: _LoadJob) -> None:
        """Have the server read what it may read at once."""
        rest, room = len(job.places) - job.lent, self._read_max - self.uses.reading
        if not rest or self._is_in_line:
            return
        if room < min(rest, self._read_max // 4):  # some of them at a time: each message is a turn of the server's loop
            self._is_in_line = True  # or small loads that came later would take each room that comes
            return
        count = min(rest, room)
        places = [(number, *job.places[number]) for number in range(job.lent, job.lent + count)]
        rows = [(number, row, job.names.names[index]) for number, index, row in places]
        job.lent += count
        if self.uses.load(job.id, rows, job.session):
            job.used += count
        else:
            job.is_over = True

    def _go_on_with_piece(self, job: _LoadJob, piece: _RowPiece) -> None:
        if piece.lookup is None:
            if time.monotonic() >= piece.again_s:
                self._look_up(job, piece)
            return
        answer = self.client.lookups.get(piece.lookup, LookupAnswer())
        if answer.is_ended and not piece.is_claimed:
            self._ask_again(job, piece)
            return
        is_whole = answer.is_done or len(answer.slots) == piece.count
        if answer.ready and is_whole and not piece.is_claimed:
            self.client.claim(piece.lookup)
            piece.is_claimed = True
        while piece.is_claimed and piece.copied < answer.ready:
            self._copy(job, piece.first + piece.copied, answer.slots[piece.copied], piece)
            piece.copied += 1
        if piece.running or not (answer.is_done or piece.copied == piece.count):
            return
        if piece.copied < piece.count <= answer.held:
            self._ask_again(job, piece)
        else:
            self._end_piece(job, piece)

    def _look_up(self, job: _LoadJob, piece: _RowPiece) -> None:
        first = job.places[piece.first][0]
        names = job.names.names[first : first + piece.count]
        piece.lookup = self.client.look_up_rows(names, may_search=False, session=job.session, load=job.id)
        job.is_over |= piece.lookup is None

    def _ask_again(self, job: _LoadJob, piece: _RowPiece) -> None:
        """The rest is held, but its leases gave way, or host memory had no room for it: once more, in a moment."""
        job.is_over |= not self._confirm(job, piece)
        self._leased -= piece.copied
        piece.first, piece.count, piece.copied = piece.first + piece.copied, piece.count - piece.copied, 0
        piece.lookup, piece.is_claimed, piece.again_s = None, False, time.monotonic() + AGAIN_S

    def _end_piece(self, job: _LoadJob, piece: _RowPiece) -> None:
        self._confirm(job, piece)
        job.pieces.remove(piece)
        self._leased -= piece.count
        # What lies behind a chunk that does not come is of no use.
        job.is_over |= not all(job.good[piece.first : piece.first + piece.count])

    def _confirm(self, job: _LoadJob, piece: _RowPiece) -> bool:
        """Copies of a piece have ended: what was leased until now is right. False where rows are not."""
        is_leased = piece.lookup is not None and self.client.is_leased(piece.lookup, job.generation)
        is_right = is_leased or not piece.copied
        if not is_right:
            for number in range(piece.first, piece.first + piece.copied):
                job.good[number] = False
        if piece.lookup is not None and job.generation == self.client.generation:
            self.client.release(piece.lookup)
        return is_right

    def _copy(self, job: _RowJob, number: int, slot: SlotId, piece: _RowPiece | None = None) -> None:
        assert self.client.info is not None
        job.running += 1
        if piece is not None:
            piece.running += 1
        self._threads.submit(self._run_copy, job, number, slot, self.client.info, piece)

    def _run_copy(self, job: _RowJob, number: int, slot: SlotId, info: SessionInfo, piece: _RowPiece | None) -> None:
        """In a thread of the pool."""
        is_copied, row = False, job.places[number][1]
        try:
            is_copied = self._arena.copy(info, slot, self._rows[row], job.spans, is_load=isinstance(job, _LoadJob))
        except Exception:  # the job would never end
            logger.exception("a row could not be copied. row=%d slot=%d", row, slot)
        self._ended.append((job, number, is_copied, piece))

    def _copy_ended(self, job: _RowJob, number: int, is_copied: bool, piece: _RowPiece | None) -> None:
        job.running -= 1
        job.good[number] = is_copied
        job.is_over |= not is_copied
        if piece is not None:
            piece.running -= 1

    def _commit(self, job: _StoreJob) -> None:
        """Hand the server what was copied, in the order of the prefix."""
        if job.before is not None:
            other, number = job.before
            if other.committed <= number:
                job.is_over |= other.id not in self._jobs  # it was given up
                return
            job.before = None
        filled = []
        while job.committed < job.copied and job.good[job.committed]:
            slot = job.slots.pop(job.committed)
            index = job.places[job.committed][0]
            filled.append((slot, job.names.record(index, job.tag)))
            job.committed += 1
            self._remember(job, job.committed - 1)
        self.client.commit(filled)
        job.is_over |= job.committed == job.asked

    def _remember(self, job: _StoreJob, number: int) -> None:
        """A row of a store is stored; what the server says of it next may be older."""
        self._committed[job.names.names[job.places[number][0]]] = job.generation
        while len(self._committed) > COMMITTED_MAX:
            del self._committed[next(iter(self._committed))]

    def _finish(self, job: _StoreJob | _LoadJob) -> None:
        """No copy of it runs: tell how each row ended, and give back what it has."""
        del self._jobs[job.id]
        if isinstance(job, _StoreJob):
            is_same = job.generation == self.client.generation
            for index, _ in job.places:
                if self._storing.get(job.names.names[index], (None, 0))[0] is job:
                    del self._storing[job.names.names[index]]
            if is_same:
                self.client.give_back([slot for _, slot in sorted(job.slots.items())])
                if job.lookup is not None:
                    self.client.release(job.lookup)
            ended = enumerate(job.good)
            good = [is_same and (number < job.committed or (bool(one) and job.is_lent)) for number, one in ended]
        else:
            for piece in list(job.pieces):
                self._end_piece(job, piece)
            if job.generation == self.client.generation:
                self.client.load_ended(job.id)
            good = [bool(one) for one in job.good]
        copied = sum(1 for one in job.good if one) * sum(length for _, length in job.spans)
        self._done.append(Done(job.id, good, time.monotonic() - job.started_s, copied))


def _run_length(places: Sequence[tuple[int, int]], wanted: Sequence[int], start: int) -> int:
    """How many of the wanted rows from there on follow each other, and have chunks that do."""
    end = start + 1
    while end < len(wanted) and wanted[end] == wanted[end - 1] + 1:
        if places[wanted[end]][0] != places[wanted[end - 1]][0] + 1:
            break
        end += 1
    return end - start


@dataclass(frozen=True, slots=True)
class RowLending:
    """What an engine lends a session's server.

    Attributes:
        region_fd: Of the file of its rows.
        uses: Take the loan.
    """

    region_fd: int
    rows: int
    row_bytes: int
    uses: RowUses


def _lending(rows: "np.ndarray[Any, Any]", uses: RowUses) -> RowLending | None:
    """The engine's rows, if another process can map them."""
    try:
        return RowLending(shared_region(rows), len(rows), rows.shape[1], uses)
    except (NotShared, OSError) as exc:
        logger.warning("rows go through slots of the cache server, and are copied: %s", exc)
        return None


def _copy_spans(
    payload: "np.ndarray[Any, Any]", row: "np.ndarray[Any, Any]", spans: Sequence[Span], *, is_load: bool
) -> None:
    at = 0
    for start, length in spans:
        inside, outside = payload[at : at + length], row[start : start + length]
        if is_load:
            np.copyto(outside, inside)
        else:
            np.copyto(inside, outside)
        at += length
    if not is_load:
        payload[at:] = 0  # of whoever had the slot before


class ArenaKeeper:
    """Keeps the arena of the newest session mapped, in a thread of its own.

    Threads: the owner calls ``want`` and ``close``, copy threads call ``copy``.

    Attributes:
        generation: Of the session whose arena is mapped; -1: none is.
    """

    def __init__(self, config: Config, engine_id: str, join: m.JoinWorker, lending: RowLending | None = None) -> None:
        self._lending = lending
        self._config = config
        self._engine_id = engine_id
        self._join = join
        self._payload_bytes = sum(prod(page.shape) for page in join.pages)  # bytes, as rows are
        self.generation = -1
        self._wanted = 0
        self._worker: WorkerClient | None = None
        self._idle = threading.Condition()
        self._running = 0
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tiered_kv-arena", daemon=True)
        self._thread.start()

    def want(self, generation: int) -> None:
        """The session of this generation is the one to map; leaves the one before, unless something copies."""
        self._wanted = generation
        with self._idle:
            worker = self._worker
            if worker is None or worker.generation == generation or self._running:
                return
            self._worker, self.generation = None, -1
        worker.leave()

    def copy(
        self,
        info: SessionInfo,
        slot: SlotId,
        row: "np.ndarray[Any, Any]",
        spans: Sequence[Span],
        *,
        is_load: bool,
    ) -> bool:
        """Copy spans of a row to or from a slot, where they lie one after the other, and zeros behind them.

        False where the arena of that session is not here any more.
        """
        with self._idle:
            worker = self._worker
            if worker is None or worker.generation != info.generation:
                return False
            self._running += 1
        try:
            slab, index = divmod(slot, SLOTS_PER_SLAB_MAX)
            view = worker.arena.view(slab, index * info.slot_bytes + info.payload_offset, self._payload_bytes)
            _copy_spans(np.frombuffer(view, np.uint8), row, spans, is_load=is_load)
            view.release()
            return True
        finally:
            with self._idle:
                self._running -= 1
                self._idle.notify_all()

    def close(self) -> None:
        """Unmap and end the thread. Idempotent."""
        self._is_closed.set()
        with self._idle:
            worker, self._worker, self.generation = self._worker, None, -1
            while self._running:
                self._idle.wait()
        if worker is not None:
            worker.leave()
        self._thread.join(self._config.start_timeout_s)
        if self._lending is not None:
            os.close(self._lending.region_fd)
            self._lending = None

    def _run(self) -> None:
        mapped, backoff_s = -1, REJOIN_S
        while not self._is_closed.is_set():
            wanted = self._wanted
            if wanted == mapped:
                # This session's worker is gone, and so is the session, as its owner will see. Else it is joined again.
                mapped = -1
                self._wait_for_another(wanted, REJOIN_S)
                continue
            try:
                worker = WorkerClient(self._config, self._engine_id, wanted, self._join)
                self._lend(worker)
            except Exception as exc:  # the thread goes on, whatever it was: without it there is no tier any more
                is_known = isinstance(exc, (TieredKVError, OSError))
                text = "the cache's arena is not mapped; next try in %.1f s. %s"
                logger.warning(text, backoff_s, exc, exc_info=not is_known)
                self._wait_for_another(wanted, backoff_s)
                backoff_s = min(2 * backoff_s, REJOIN_LAST_S)
                continue
            mapped, backoff_s = wanted, REJOIN_S
            with self._idle:
                is_closed = self._is_closed.is_set()
                if not is_closed:
                    self._worker, self.generation = worker, wanted
            if is_closed:  # close() saw none to leave
                worker.leave()
                return
            worker.wait_lost()
            with self._idle:
                if self._worker is worker:
                    self._worker, self.generation = None, -1
                while self._running:
                    self._idle.wait()
            worker.leave()

    def _lend(self, worker: WorkerClient) -> None:
        """Lend the server the engine's rows, where they can be lent.

        Raises:
            TieredKVError, OSError: The server is gone; the worker has left.
        """
        lending = self._lending
        if lending is None:
            return
        try:
            loan = worker.lend_rows(lending.region_fd, lending.rows, lending.row_bytes)
        except BaseException:
            worker.leave()
            raise
        if isinstance(loan, str):
            logger.warning("rows go through slots of the cache server, and are copied: %s", loan)
        else:
            logger.info("the cache server reads and writes rows itself. rows=%d", lending.rows)
            lending.uses.lend(loan)

    def _wait_for_another(self, generation: int, longest_s: float) -> None:
        """Wait, but no longer than until another session is wanted."""
        end_s = time.monotonic() + longest_s
        while self._wanted == generation and time.monotonic() < end_s and not self._is_closed.wait(LOOK_S):
            pass
