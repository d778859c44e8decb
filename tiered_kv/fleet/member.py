"""A server as a member of the fleet: the bytes it was granted, its sessions and their reports.

A session is a stretch of time under one term during which the local budget is never out of date. It follows one term
and never changes it. It ends, and its object is deleted, when the term is overtaken or its grant ran out of date; the
next begins only when no PUT from before is in flight, so a session that is gone can never again add a byte. Totals
start at zero with each session. Every session has an object of its own name, so nothing that an overtaken leader
deletes late is ever in use.

Owns this server's object below ``_tiered_kv/servers/``. Called by the keeper's turn; ``reserve`` and ``finished`` by
the threads that PUT.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence

from tiered_kv.errors import CapacityExceeded
from tiered_kv.fleet.layout import MemberReport, Objects, Term, encode, session_path
from tiered_kv.fleet.timing import Timing

SENT_MAX = 64
"""Reports whose sending time is remembered for their answers."""


class LocalBudget:
    """Bytes granted to this server, and where they went.

    Threads: any.
    """

    def __init__(self, timing: Timing, clock: Callable[[], float]) -> None:
        self._timing = timing
        self._clock = clock
        self._lock = threading.Lock()
        self._is_free = False
        self._is_open = False
        self._valid_until = 0.0
        self._granted = self._spent = self._returned = self._stored_count = 0
        self._flying = 0
        self._unsure: deque[tuple[float, int]] = deque()
        self._unsure_bytes = 0
        self._sizes = (0, 0)
        self._was_refused = False
        self._asked_at = self._window_start = clock()
        self._windows = (0, 0)
        self.refused_count = 0
        self._changed_bytes = self._changed_count = 0

    # -- threads that PUT ---------------------------------------------------------------------------------------------

    def reserve(self, size_bytes: int) -> None:
        """Take bytes out of the grant for a PUT that begins now.

        Raises:
            CapacityExceeded: The grant is used up, or no leader has confirmed it lately.
        """
        with self._lock:
            now = self._asked_at = self._clock()
            self._settle(now)
            self._roll(now)
            self._windows = (self._windows[0], self._windows[1] + size_bytes)
            self._sizes = (self._sizes[0], max(self._sizes[1], size_bytes))
            if not self._is_free:
                cause = self._refusal(size_bytes, now)
                if cause:
                    self._was_refused = True
                    self.refused_count += 1
                    raise CapacityExceeded(cause)
            self._flying += size_bytes

    def finished(self, size_bytes: int, stored: bool | None) -> None:
        """Account for the end of a PUT: stored, not stored, or (None) nobody knows."""
        with self._lock:
            self._flying -= size_bytes
            if stored is None:
                self._unsure.append((self._clock() + self._timing.settle_s, size_bytes))
                self._unsure_bytes += size_bytes
            elif stored:
                self._spend(size_bytes)

    def expect(self) -> None:
        """A PUT is likely soon; counts as one that was begun for :meth:`idle_s`."""
        with self._lock:
            self._asked_at = self._clock()

    def forget(self, size_bytes: int) -> None:
        """Note a blob that this server deleted; the leader learns of it from its next LIST."""
        with self._lock:
            self._changed_bytes -= size_bytes
            self._changed_count -= 1

    # -- the keeper's turn --------------------------------------------------------------------------------------------

    def set_free(self, is_free: bool) -> None:
        """Whether PUTs need no grant: nobody limits this bucket."""
        with self._lock:
            self._is_free = is_free

    def shut(self) -> None:
        """End the session: nothing more is PUT under it."""
        with self._lock:
            self._is_open = False

    def is_drained(self) -> bool:
        """Whether no PUT is in flight, those of unknown outcome included."""
        with self._lock:
            self._settle(self._clock())
            return self._flying == 0 and not self._unsure

    def open(self) -> bool:
        """Begin a session with nothing granted; False while a PUT from before is in flight."""
        with self._lock:
            self._settle(self._clock())
            if self._flying or self._unsure:
                return False
            self._is_open = True
            self._valid_until = float("-inf")
            self._granted = self._spent = self._returned = self._stored_count = 0
            return True

    def is_current(self) -> bool:
        """Whether the session goes on: open, and its grant, if it ever had one, not out of date."""
        with self._lock:
            return self._is_open and (self._granted == 0 or self._clock() < self._valid_until)

    def grant(self, granted_bytes: int, valid_since: float) -> None:
        """Take the leader's answer to a report that was sent at ``valid_since`` (this clock)."""
        with self._lock:
            if self._granted and self._clock() >= self._valid_until:
                return  # too late: the leader may have given these bytes to others. A new session asks again.
            self._granted = max(self._granted, granted_bytes)
            self._valid_until = max(self._valid_until, valid_since + self._timing.grant_use_s)

    def report(self, seq: int, term: int, is_tight: bool, namespaces: list[str]) -> MemberReport:
        """What to tell the leader; gives idle bytes back when room is tight."""
        with self._lock:
            now = self._clock()
            self._settle(now)
            self._roll(now)
            rate_bytes, largest = 2 * max(self._windows), max(self._sizes)
            if is_tight:
                target = max(rate_bytes, largest)
                excess = self._available() - target
                if excess > 0:
                    self._returned += excess
            else:
                target = max(rate_bytes, 16 * largest, self._timing.ahead_bytes)
            self._was_refused = False
            goal = self._granted + max(0, target - self._available())
            return MemberReport(
                seq=seq,
                term=term,
                spent_bytes=self._spent,
                returned_bytes=self._returned,
                goal_bytes=goal,
                needed_bytes=largest,
                stored_count=self._stored_count,
                namespaces=namespaces,
            )

    def idle_s(self) -> float:
        """Since when no PUT was begun, refused, nor expected; 0 while one is in flight."""
        with self._lock:
            now = self._clock()
            self._settle(now)
            return 0.0 if self._flying or self._unsure else now - self._asked_at

    def is_hungry(self) -> bool:
        """Whether the exchange should not wait for the next heartbeat."""
        with self._lock:
            if self._is_free:
                return False
            return self._was_refused or self._granted == 0 or self._available() < max(self._windows)

    @property
    def granted_bytes(self) -> int:
        with self._lock:
            return self._granted

    @property
    def spent_bytes(self) -> int:
        with self._lock:
            return self._spent

    def take_changes(self) -> tuple[int, int]:
        """Bytes and blobs that this server added and removed since the last call."""
        with self._lock:
            changed = self._changed_bytes, self._changed_count
            self._changed_bytes = self._changed_count = 0
            return changed

    def changes(self) -> tuple[int, int]:
        """As ``take_changes``, leaving them."""
        with self._lock:
            return self._changed_bytes, self._changed_count

    # -- under the lock -----------------------------------------------------------------------------------------------

    def _available(self) -> int:
        return self._granted - self._returned - self._spent - self._flying - self._unsure_bytes

    def _refusal(self, size_bytes: int, now: float) -> str:
        if not self._is_open or self._granted == 0:
            return f"no leader of the bucket has granted this server any bytes yet. size_bytes={size_bytes}"
        if now >= self._valid_until:
            return (
                "the leader of the bucket has not confirmed this server's grant lately. "
                f"size_bytes={size_bytes} overdue_s={now - self._valid_until:.1f}"
            )
        if self._available() < size_bytes:
            return f"the bytes granted to this server are used up. size_bytes={size_bytes} left={self._available()}"
        return ""

    def _spend(self, size_bytes: int) -> None:
        self._spent += size_bytes
        self._stored_count += 1
        self._changed_bytes += size_bytes
        self._changed_count += 1

    def _settle(self, now: float) -> None:
        """PUTs of unknown outcome: once they can no longer land, they count as stored until a LIST says otherwise."""
        while self._unsure and self._unsure[0][0] <= now:
            size_bytes = self._unsure.popleft()[1]
            self._unsure_bytes -= size_bytes
            self._spend(size_bytes)

    def _roll(self, now: float) -> None:
        passed = now - self._window_start
        if passed >= self._timing.demand_s:
            is_recent = passed < 2 * self._timing.demand_s
            self._windows = (self._windows[1] if is_recent else 0, 0)
            self._sizes = (self._sizes[1] if is_recent else 0, 0)
            self._window_start = now


class Membership:
    """This server's sessions, one after the other."""

    def __init__(
        self, store: Objects, timing: Timing, budget: LocalBudget, clock: Callable[[], float], server_id: str
    ) -> None:
        self._store = store
        self._timing = timing
        self._budget = budget
        self._clock = clock
        self._server_id = server_id
        self._number = 0
        self._seq = 0
        self._sent: dict[int, float] = {}
        self._answered_at = 0.0
        self._is_tight = False
        self._written: tuple[str, ...] | None = None
        self.term: int | None = None
        """The term that is followed."""

    @property
    def session(self) -> str:
        """Name of the session whose object is in the bucket; empty between two."""
        return f"{self._server_id}.{self._number}" if self.term is not None else ""

    def report(self, namespaces: Sequence[str]) -> None:
        """Send the next report of a session that goes on."""
        if self.term is None or not self._budget.is_current():
            return
        if self._clock() - self._answered_at > self._timing.expiry_s:
            self._budget.shut()  # given up for dead, or not seen: a new session asks anew
            return
        self._send(self.term, namespaces)

    def follow(self, term: int, content: Term, namespaces: Sequence[str]) -> None:
        """Take what the highest term answers, or begin a session under it."""
        self._is_tight = content.is_tight
        if self.term == term and self._budget.is_current():
            answer = content.grants.get(self.session)
            sent_at = self._sent.get(answer.seq) if answer else None
            if answer is not None and sent_at is not None:
                self._answered_at = self._clock()
                self._budget.grant(answer.granted_bytes, sent_at)
                self._sent = {seq: at for seq, at in self._sent.items() if seq >= answer.seq}
            return
        if self._begin(term):
            self._send(term, namespaces)

    def join(self, term: int, namespaces: Sequence[str], on_end: Callable[[str], None]) -> None:
        """The same for a leader, whose grants need no exchange: only its object has to be there."""
        if self.term == term and self._budget.is_current():
            if self._written != tuple(namespaces):
                self._send(term, namespaces)
            return
        ended = self.session
        if self._begin(term):
            if ended:
                on_end(ended)
            self._send(term, namespaces)

    def own_report(self, is_tight: bool, namespaces: Sequence[str]) -> MemberReport:
        """What a leader reports to itself."""
        assert self.term is not None
        self._seq += 1
        return self._budget.report(self._seq, self.term, is_tight, list(namespaces))

    def leave(self) -> None:
        """End the session; its object stays, to be waited for, while a PUT is in flight."""
        self._budget.shut()
        if self._budget.is_drained():
            self._remove()

    def _begin(self, term: int) -> bool:
        self._budget.shut()
        if not self._budget.is_drained():
            return False
        self._remove()
        if not self._budget.open():
            return False
        self._number += 1
        self._seq = 0
        self._sent = {}
        self._answered_at = self._clock()
        self._written = None
        self.term = term
        return True

    def _remove(self) -> None:
        if self.term is not None:
            self._store.delete([session_path(self.session)])
            self.term = None

    def _send(self, term: int, namespaces: Sequence[str]) -> None:
        self._seq += 1
        content = self._budget.report(self._seq, term, self._is_tight, list(namespaces))
        self._sent[self._seq] = self._clock()
        while len(self._sent) > SENT_MAX:
            del self._sent[next(iter(self._sent))]
        self._store.put(session_path(self.session), encode(content))
        self._written = tuple(namespaces)
