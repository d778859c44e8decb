"""What the server lends to its door: chunks in host memory, each for as long as a reader takes it, at most so long.

A loan ends when the door says so, when its connection is gone, or after ``loan_s``: then the door hears ``Reclaimed``
first, and nobody writes into the slot before that is in its socket. A door only reads, so nothing is in quarantine when
it dies. Owns who borrowed what; what may be lent is tiering's to say. Called by ``server.py``.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from tiered_kv.engine.engine import Engine
from tiered_kv.errors import ProtocolError
from tiered_kv.keys.naming import NAME_BYTES
from tiered_kv.server import protocol as m
from tiered_kv.server.connection import Connection
from tiered_kv.tiering.types import Outcome, SlotLoan

logger = logging.getLogger(__name__)

NAMES_MAX: Final = 1024
"""Keys of one question."""

LOANS_MAX: Final = 256
"""Of one door at once: far more than it sends blobs."""

QUESTIONS_SHARE: Final = 0.05
"""Of the loop's time, for questions of all peers together: how many ask is not this machine's to say, and its own
engines wait meanwhile. At half a millisecond for 512 chunks that is a hundred long prompts a second."""

QUESTIONS_AT_ONCE_S: Final = 0.02
"""What may be asked at once after a rest."""


@dataclass(slots=True)
class _Borrowed:
    """One loan: tiering's, and when it ends by itself."""

    loan: int
    ends_s: float


@dataclass(slots=True)
class _Door:
    """One connection.

    Attributes:
        loans: By the door's number, oldest first.
        ending: Loans of tiering whose end was said and may not be in the door's socket yet.
        patient_s: Until then the door may leave them there; later it is dropped, which is an end that needs no room.
        slabs: Descriptors of the arena that may not be in the door's socket yet.
    """

    loans: dict[int, _Borrowed] = field(default_factory=dict)
    ending: list[int] = field(default_factory=list)
    patient_s: float = 0.0
    slabs: list[int] = field(default_factory=list)

    def close_slabs(self) -> None:
        """Nothing sends these descriptors any more."""
        while self.slabs:
            os.close(self.slabs.pop())


class Lending:
    """All loans of a server, and what peers ask before they borrow.

    Threads: the server's loop only.
    """

    def __init__(self, engine: Engine, loan_s: float) -> None:
        """Nothing is lent; a loan lasts for ``loan_s`` at most."""
        self._engine = engine
        self._loan_s = loan_s
        self._doors: dict[Connection, _Door] = {}
        self._left_s = QUESTIONS_AT_ONCE_S  # of the time for questions, at ``_counted_s``
        self._counted_s = engine.clock.monotonic()

    def join(self, connection: Connection, _: m.JoinDoor) -> None:
        """Give a door the arena, to read only.

        Raises:
            ProtocolError: It has it already.
        """
        if connection in self._doors:
            raise ProtocolError("a connection joins once")
        door = self._doors[connection] = _Door()
        slabs = self._engine.arena.slab_fds
        for start in range(0, len(slabs), m.SLABS_PER_FRAME):
            part = slabs[start : start + m.SLABS_PER_FRAME]
            for fd in part:
                door.slabs.append(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY))
            connection.send(m.Slabs(len(part)), door.slabs[-len(part) :])
            if not connection.wants_write:
                door.close_slabs()

    def count(self, connection: Connection, request: m.HeldRequest) -> None:
        """Say how many of some chunks are here; none where peers have asked too much.

        Raises:
            ProtocolError: The question is none.
        """
        keys = _split(request.keys)
        if keys is None or len(request.namespace) != NAME_BYTES:
            raise ProtocolError(f"bad question. keys={len(request.keys)} namespace={len(request.namespace)}")
        now_s = self._engine.clock.monotonic()
        self._left_s = min(QUESTIONS_AT_ONCE_S, self._left_s + QUESTIONS_SHARE * (now_s - self._counted_s))
        self._counted_s = now_s
        held = 0
        if self._left_s > 0:
            begun_cpu_s = time.thread_time()  # a core that others have is not the peers' doing
            held = self._engine.held_here(request.namespace, keys)
            self._left_s -= time.thread_time() - begun_cpu_s
        else:
            self._engine.count("peer_questions_refused")
        connection.send(m.Held(request.question, held))

    def lend(self, connection: Connection, borrow: m.Borrow) -> None:
        """Lend a chunk, if it is there and not too much is lent.

        Raises:
            ProtocolError: The door has not joined, the number is in use, or what it names is no chunk.
        """
        door = self._of(connection)
        if len(borrow.namespace) != NAME_BYTES or len(borrow.key) != NAME_BYTES:
            raise ProtocolError(f"bad loan. namespace={len(borrow.namespace)} key={len(borrow.key)}")
        if borrow.loan in door.loans:
            raise ProtocolError(f"bad loan. id={borrow.loan} is in use")
        found: SlotLoan | Outcome = Outcome.NO_ROOM
        if len(door.loans) + len(door.ending) < LOANS_MAX:
            found = self._engine.lend(borrow.namespace, borrow.key)
        if isinstance(found, Outcome):
            connection.send(m.Lent(borrow.loan, found.value))
            return
        door.loans[borrow.loan] = _Borrowed(found.id, self._engine.clock.monotonic() + self._loan_s)
        connection.send(m.Lent(borrow.loan, Outcome.OK.value, found.slot, found.size_bytes))

    def repaid(self, connection: Connection, repay: m.Repay) -> None:
        """The door reads a chunk no more.

        Raises:
            ProtocolError: The door has not joined.
        """
        borrowed = self._of(connection).loans.pop(repay.loan, None)
        if borrowed is not None:
            self._engine.end_loan(borrowed.loan)

    def given(self, connection: Connection, given: m.Given) -> None:
        """Peers have read chunks: a use of them, for the tier that all machines share.

        Raises:
            ProtocolError: The door has not joined, or what it names are no chunks.
        """
        self._of(connection)
        keys = _split(given.keys)
        if keys is None or len(given.namespace) != NAME_BYTES:
            raise ProtocolError(f"bad names. keys={len(given.keys)} namespace={len(given.namespace)}")
        self._engine.read_by_peers(given.namespace, keys)

    def _of(self, connection: Connection) -> _Door:
        door = self._doors.get(connection)
        if door is None:
            raise ProtocolError("a door joins first")
        return door

    def step(self, lost: Callable[[Connection], None]) -> None:
        """Reclaim what was lent for too long, and end loans whose end is in their doors' sockets.

        Args:
            lost: Told of a door that is gone or does not read.
        """
        now_s = self._engine.clock.monotonic()
        for connection, door in self._doors.items():
            try:
                while door.loans and (first := next(iter(door.loans.items())))[1].ends_s <= now_s:
                    number, borrowed = first
                    del door.loans[number]
                    door.patient_s = door.patient_s if door.ending else now_s + self._loan_s
                    door.ending.append(borrowed.loan)
                    self._engine.count("loans_overdue")
                    connection.send(m.Reclaimed(number))
            except (ProtocolError, OSError):
                lost(connection)
            if not connection.wants_write:
                self._end(door.ending)
                door.close_slabs()
            if door.ending and now_s > door.patient_s:
                logger.warning("the door to peers does not read, and is dropped. pid=%d", connection.pid)
                lost(connection)

    def _end(self, loans: list[int]) -> None:
        while loans:
            self._engine.end_loan(loans.pop())

    def disconnected(self, connection: Connection) -> None:
        """A door's connection is closed: whatever it reads from now on, it finds that end behind it."""
        door = self._doors.pop(connection, None)
        if door is not None:
            door.close_slabs()
            self._end([borrowed.loan for borrowed in door.loans.values()] + door.ending)


def _split(keys: bytes) -> list[bytes] | None:
    """Keys that were joined; None: they are none, or too many."""
    if len(keys) % NAME_BYTES or len(keys) > NAMES_MAX * NAME_BYTES:
        return None
    return [keys[start : start + NAME_BYTES] for start in range(0, len(keys), NAME_BYTES)]
