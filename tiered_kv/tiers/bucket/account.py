"""A server's own side of the grants: what it may PUT now, what is in flight, what it would like to have.

Pure bookkeeping under one lock; must not touch the store. ``reserve`` and ``finished`` come from the threads that PUT,
everything else from the keeper's turn. A session is a stretch of time under one term during which the account is never
out of date; totals start at zero with each, and it begins only when no PUT from before is in flight.

Ownership: every field is guarded by ``_lock``.
"""

import threading
from collections import deque
from collections.abc import Callable

from tiered_kv.errors import CapacityExceeded
from tiered_kv.tiers.bucket.layout import Report
from tiered_kv.tiers.bucket.pace import Pace


class Account:
    """Bytes granted to this server, and where they went.

    Threads: any.
    """

    def __init__(self, pace: Pace, clock: Callable[[], float]) -> None:
        self._pace = pace
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
        self._window_start = clock()
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
            now = self._clock()
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
                self._unsure.append((self._clock() + self._pace.settle_s, size_bytes))
                self._unsure_bytes += size_bytes
            elif stored:
                self._spend(size_bytes)

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
            self._valid_until = max(self._valid_until, valid_since + self._pace.grant_use_s)

    def report(self, seq: int, term: int, is_tight: bool, namespaces: list[str]) -> Report:
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
                target = max(rate_bytes, 16 * largest, self._pace.ahead_bytes)
            self._was_refused = False
            goal = self._granted + max(0, target - self._available())
            return Report(
                seq=seq,
                term=term,
                spent_bytes=self._spent,
                returned_bytes=self._returned,
                goal_bytes=goal,
                needed_bytes=largest,
                stored_count=self._stored_count,
                namespaces=namespaces,
            )

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
        if passed >= self._pace.demand_s:
            is_recent = passed < 2 * self._pace.demand_s
            self._windows = (self._windows[1] if is_recent else 0, 0)
            self._sizes = (self._sizes[1] if is_recent else 0, 0)
            self._window_start = now
