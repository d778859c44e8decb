"""The leader's side of the grants: which servers live, what each was granted, and how much room is left for sure.

The bound. Reports are read before a LIST; afterwards the bucket holds at most ``listed + sum(granted - spent as
reported then)``, whatever is in flight, lost or late, and that includes everything that may still be PUT. Deletions by
this leader lower it, a new LIST renews it. Nothing is granted beyond the capacity less this bound.

Nothing is granted, nor is the first LIST begun, before every server of an older term has followed (its old session is
gone) or is dead (its report has not changed for ``expiry_s``: by then it may not begin a PUT, and what it began has
landed). Sessions that were given up for dead are never answered again; their servers begin new ones.

Owns reading ``_tiered_kv/servers/``; must not write anything. Called by the keeper's turn while it leads.

Threads: one at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tiered_kv.fleet.layout import (
    NAMESPACES_MAX,
    SERVERS,
    Answer,
    MemberReport,
    Objects,
    decode,
    fetch_many,
    parse_session_path,
    session_path,
)
from tiered_kv.fleet.timing import Timing

AHEAD_SHARE = 16
"""At most one part in so many of the capacity is granted ahead, all servers together."""

RESERVE_SHARE = 64
RESERVE_BYTES_MAX = 16 << 20
RESERVE_SERVER_BYTES = 1 << 20
"""Of more than 16 servers each: its logs of 65,536 different chunks, until a pass merges them."""

STAMP_GRAIN_S = 2.0
"""Two writes within so long may carry the same LastModified."""


@dataclass(slots=True)
class MemberSession:
    """One server's session as the leader sees it."""

    report: MemberReport | None
    data: bytes
    changed_at: float
    stamp: tuple[float, int]
    stamped_at: float
    is_dead: bool = False
    granted: int = 0
    floor: int = 0
    next_floor: int = 0
    count_before: int = 0
    next_count: int = 0

    @property
    def unused(self) -> int:
        """Bytes granted ahead, as last reported."""
        assert self.report is not None
        return max(0, self.granted - self.report.returned_bytes - self.report.spent_bytes)

    @property
    def outstanding(self) -> int:
        """Bytes that may have been PUT since the last LIST's reports, or may still be."""
        assert self.report is not None
        return max(0, self.granted - self.report.returned_bytes - self.floor)


class GrantLedger:
    """Sessions of one term, and the bytes of the bucket."""

    def __init__(
        self, store: Objects, timing: Timing, clock: Callable[[], float], term: int, capacity_bytes: int | None
    ) -> None:
        self._store = store
        self._timing = timing
        self._clock = clock
        self.term = term
        self._capacity = capacity_bytes
        self._sessions: dict[str, MemberSession] = {}
        self._gone: set[str] = set()
        self._residual = 0
        self._next_residual = 0
        self._is_listing = False
        self._listed: int | None = None
        self._freed = 0
        self._own = 0
        self._listed_count = self._freed_count = 0
        self.malformed_count = 0
        self.lacks_room = False
        """Somebody wants more than could be granted."""

    # -- who lives ----------------------------------------------------------------------------------------------------

    def assume_gone(self, session: str) -> None:
        """The leader before can no longer be writing on its own grants: its lease ran out unrenewed."""
        self._gone.add(session)

    def assume_all_gone(self) -> None:
        """This server is the only writer: what is there was left behind."""
        for info in self._store.list(SERVERS):
            session = parse_session_path(info.path)
            if session is not None:
                self._gone.add(session)

    def refresh(self, own: str) -> None:
        """Read the reports that changed, several at once; ``own`` is kept by ``set_own``.

        One that cannot be read now stays as it was: only what was read, and was the same, makes its server dead.

        Raises:
            TierUnavailable: The store failed, or did not tell the report of a session that is not known yet.
        """
        asked = self._clock()
        there = set()
        due: list[tuple[str, tuple[float, int]]] = []
        for info in list(self._store.list(SERVERS)):
            name = parse_session_path(info.path)
            if name is None or name == own:
                continue
            there.add(name)
            stamp = (info.modified_s, info.size_bytes)
            known = self._sessions.get(name)
            is_news = known is None or known.stamp != stamp
            is_unsure = known is not None and asked - known.stamped_at < STAMP_GRAIN_S
            is_overdue = known is not None and not known.is_dead and asked - known.changed_at > self._timing.expiry_s
            if is_news or is_unsure or is_overdue:
                due.append((name, stamp))
        found = fetch_many(self._store, [session_path(name) for name, _ in due])
        for (name, stamp), data in zip(due, found, strict=True):
            if isinstance(data, bytes):
                self._take(name, stamp, data, asked)
            elif data is not None and name not in self._sessions:
                raise data  # it may be writing, so it has to be waited for
        for name in [name for name in self._sessions if name not in there and name != own]:
            self._drop(name)
        self._gone &= there

    def set_own(self, name: str, report: MemberReport) -> None:
        """Take the leader's own report straight from its budget."""
        session = self._sessions.get(name)
        if session is None:
            self._sessions[name] = MemberSession(report, b"", self._clock(), (0.0, 0), 0.0)
        else:
            session.report = report
            session.changed_at = self._clock()

    def drop_own(self, name: str) -> None:
        """The leader's own session ended."""
        if name in self._sessions:
            self._drop(name)

    def removable(self) -> list[str]:
        """Paths of reports of the dead, long enough ago that nobody can be confused by their absence.

        What was never understood as a report is not ours to remove.
        """
        now = self._clock()
        return [
            session_path(name)
            for name, session in self._sessions.items()
            if session.is_dead and session.report is not None and now - session.changed_at > 10 * self._timing.expiry_s
        ]

    def waits_for(self) -> list[str]:
        """Sessions that have not followed to this term and may still be writing."""
        return [name for name, session in self._sessions.items() if not session.is_dead and not self._follows(session)]

    def has_others(self, own: str) -> bool:
        """Whether any session but ``own`` may be of a server that lives."""
        return any(not session.is_dead for name, session in self._sessions.items() if name != own)

    def live(self) -> list[MemberSession]:
        return [session for session in self._sessions.values() if not session.is_dead and self._follows(session)]

    def namespaces(self) -> set[bytes]:
        """Namespaces that some live server serves."""
        found = set()
        for session in self._sessions.values():
            if session.is_dead or session.report is None:
                continue
            for digits in session.report.namespaces[:NAMESPACES_MAX]:
                try:
                    found.add(bytes.fromhex(digits))
                except ValueError:
                    self.malformed_count += 1
        return found

    # -- the bound ----------------------------------------------------------------------------------------------------

    def begin_list(self) -> None:
        """Remember what was reported before a LIST begins."""
        self._is_listing = True
        self._next_residual = 0
        for session in self._sessions.values():
            session.next_floor = session.report.spent_bytes if session.report else 0
            session.next_count = session.report.stored_count if session.report else 0

    def abandon_list(self) -> None:
        self._is_listing = False

    def end_list(self, listed_bytes: int, own_bytes: int, blob_count: int) -> None:
        """Rest the bound on what a LIST found; ``own_bytes`` of it are the keepers' own objects."""
        self._is_listing = False
        self._listed, self._freed = listed_bytes, 0
        self._own = own_bytes
        self._listed_count, self._freed_count = blob_count, 0
        self._residual = self._next_residual
        for session in self._sessions.values():
            session.floor = session.next_floor
            session.count_before = session.next_count

    def freed(self, size_bytes: int, count: int) -> None:
        """Blobs of the last LIST were deleted, for sure."""
        self._freed += size_bytes
        self._freed_count += count

    def own_changed(self, size_bytes: int) -> None:
        """The leader wrote or removed objects of the keepers' own."""
        assert self._listed is not None
        self._listed += size_bytes
        self._own += size_bytes

    @property
    def is_counted(self) -> bool:
        """Whether this term's first LIST is done."""
        return self._listed is not None

    def room(self) -> int:
        """Bytes that can be granted without ever passing the capacity; below zero: it is passed already."""
        assert self._capacity is not None and self._listed is not None
        outstanding = sum(session.outstanding for session in self.live())
        growth = max(0, self.reserve_bytes() - self._own)
        return self._capacity - (self._listed - self._freed + growth + outstanding + self._residual)

    def reserve_bytes(self) -> int:
        """Room kept for the keepers' own small objects, which nobody asks a grant for: logs, reports, the lease."""
        assert self._capacity is not None
        most = max(RESERVE_BYTES_MAX, RESERVE_SERVER_BYTES * len(self.live()))
        return min(self._capacity // RESERVE_SHARE, most)

    def used_bytes(self) -> int:
        """The best figure for what the bucket holds; not the bound."""
        reported = sum(s.report.spent_bytes - s.floor for s in self.live() if s.report)
        return max(0, (self._listed or 0) - self._freed + reported)

    def blob_count(self) -> int:
        reported = sum(s.report.stored_count - s.count_before for s in self.live() if s.report)
        return max(0, self._listed_count - self._freed_count + reported)

    def needed_bytes(self) -> int:
        """Room that an eviction pass should leave so that every server gets on."""
        return sum(
            2 * session.report.needed_bytes
            for session in self.live()
            if session.report and session.report.goal_bytes > session.granted
        )

    # -- grants -------------------------------------------------------------------------------------------------------

    def grant(self) -> None:
        """Give each server what it wants, as far as its share of the room goes."""
        self.lacks_room = False
        if self._capacity is None or self._listed is None:
            return
        live = self.live()
        room = self.room()
        is_low = room < self.low_room()
        # What lies granted and unused must not be what others are evicted for.
        ahead = self._capacity // (AHEAD_SHARE * max(1, len(live)))
        for session in sorted(live, key=lambda session: session.outstanding):
            assert session.report is not None
            needed = min(session.report.needed_bytes, self._capacity // 4)
            wanted = min(session.report.goal_bytes - session.granted, max(ahead, needed) - session.unused)
            if wanted <= 0:
                continue
            given = max(0, min(wanted, room, max(room // (2 * len(live)), needed)))
            session.granted += given
            room -= given
            if given < wanted and (given < needed or is_low):
                self.lacks_room = True

    def low_room(self) -> int:
        """Less room than this is too little: time to evict."""
        assert self._capacity is not None
        return int(self._capacity * (1 - self._timing.low_water) / 2)

    def is_tight(self) -> bool:
        return self._capacity is not None and self.is_counted and self.room() < self.low_room()

    def answers(self) -> dict[str, Answer]:
        """What the term's object tells each live session."""
        return {
            name: Answer(session.report.seq, session.granted)
            for name, session in self._sessions.items()
            if session.report is not None and not session.is_dead and self._follows(session)
        }

    def granted_to(self, name: str) -> int:
        session = self._sessions.get(name)
        return session.granted if session else 0

    # -- within -------------------------------------------------------------------------------------------------------

    def _follows(self, session: MemberSession) -> bool:
        return session.report is not None and session.report.term == self.term

    def _was_lost(self, report: MemberReport) -> bool:
        """Whether a report that is read for the first time is of a session that was granted bytes and was gone since.

        Somebody emptied the bucket, or a LIST left it out. How much it was granted nobody knows any more; from nothing
        it would be granted for hours what it spent long ago. Its server begins a new one when nobody answers.
        """
        return self._capacity is not None and report.term == self.term and report.spent_bytes > 0

    def _take(self, name: str, stamp: tuple[float, int], data: bytes, asked: float) -> None:
        """Take a report in that was read a moment ago; ``asked`` is when the LIST before it began."""
        now = self._clock()
        session = self._sessions.get(name)
        if session is None:
            session = self._sessions[name] = MemberSession(None, b"", now, stamp, now)
            session.is_dead = name in self._gone
        if session.stamp != stamp:
            session.stamp, session.stamped_at = stamp, now
        if session.data != data:
            report = decode(data, MemberReport)
            if report is None:
                self.malformed_count += 1
            elif session.report is None or report.term == session.report.term:
                session.is_dead |= session.report is None and self._was_lost(report)
                session.report = report
            session.data, session.changed_at = data, now
        elif asked - session.changed_at > self._timing.expiry_s:
            self._bury(session)

    def _bury(self, session: MemberSession) -> None:
        if not session.is_dead:
            self._keep_residual(session)
            session.is_dead = True

    def _drop(self, name: str) -> None:
        session = self._sessions.pop(name)
        if not session.is_dead:
            self._keep_residual(session)

    def _keep_residual(self, session: MemberSession) -> None:
        """What a session may have PUT since the last LIST counts until the next one."""
        if session.report is None or not self._follows(session):
            return
        self._residual += session.outstanding
        if self._is_listing:
            self._next_residual += max(0, session.granted - session.report.returned_bytes - session.next_floor)
