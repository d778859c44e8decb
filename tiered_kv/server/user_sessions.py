"""Users' sessions: where each one's requests have come to, and what goes when it ends or has gone on elsewhere.

A user's session is what vLLM calls ``session_id``: a conversation or an agent's run, of which the next request mostly
continues the last one. (A session in ``sessions.py`` is an engine's.) When a request of one ends, its engine tells the
last chunk that is stored of it. That is remembered, in a bounded memory and not across a restart, for three things:

* a newer state lets an older one's end leave host memory: what lies behind the place where they part, once the session
  has gone on from the newer one, and if that is little of the older one. What parts earlier, or goes on in turns with
  others, is another line of the session, an agent's helper for example;
* its end lets all of it go;
* a hint names the session instead of its tokens (``hints.py``).

Nobody asked for the first one, and a gateway may give one name to all that its users do. So it takes nothing that no
tier below has, and a line that is one too many is forgotten, not let go of: eviction finds it.

Only chunks go that are the session's own (``tiering/owners.py``); with its end those that nobody has pinned, from
memory and disk. What is in use then is tried again for a while. A bucket keeps what it has: other machines may have
asked for it there.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import takewhile
from typing import Final

from tiered_kv.engine.engine import Engine
from tiered_kv.errors import ProtocolError
from tiered_kv.keys.chunk_record import KEY_BYTES, ChunkRecord
from tiered_kv.keys.tags import SESSION_BYTES, TAG_BYTES
from tiered_kv.server import protocol as m
from tiered_kv.tiering.owners import ReleaseCount

SESSIONS_MAX: Final = 1 << 15
"""Sessions that are remembered, 0.6 to 1.5 KB each."""

TENANT_MAX: Final = 1 << 14
"""Of one tag, or without any."""

LINES_MAX: Final = 4
"""Lines of one session; the one that went on longest ago is forgotten first."""

END_SHARE: Final = 0.25
"""Of a state, what may go as its end. A line that has more of its own may be a helper that waits for another one."""

RELEASES_MAX: Final = 1 << 12
"""What is being let go of at once. What comes then stays, until it is evicted."""

SLICE_S: Final = 0.001
"""How long a turn of the loop works at that."""

RETRY_S: Final = 0.1
GIVE_UP_S: Final = 30.0
"""What is in use is tried again so often, and for so long."""


@dataclass(frozen=True, slots=True)
class Line:
    """A state of a session.

    Attributes:
        joined: Keys of its last chunk, and of those 1, 2, 4 and so on before it: the last ones are evicted first.
        length: In chunks.
    """

    namespace: bytes
    joined: bytes
    length: int

    @property
    def end(self) -> bytes:
        """Key of its last chunk."""
        return self.joined[:KEY_BYTES]

    @property
    def keys(self) -> list[bytes]:
        """The keys one by one, the last chunk's first."""
        return [self.joined[start : start + KEY_BYTES] for start in range(0, len(self.joined), KEY_BYTES)]

    @classmethod
    def of(cls, namespace: bytes, prefix: Sequence[bytes]) -> Line:
        """The state with these keys, root first."""
        back = [1, *(1 + (1 << power) for power in range(len(prefix).bit_length()))]
        return cls(namespace, b"".join(prefix[-n] for n in back if n <= len(prefix)), len(prefix))


@dataclass(slots=True)
class UserSession:
    """One session that is remembered; ``lines`` are in the order in which they went on, the newest last."""

    name: bytes
    tenant: bytes
    lines: list[Line] = field(default_factory=list)


class Why(Enum):
    """Why a line is let go of."""

    END = "its session is over"
    LEFT = "its session has gone on elsewhere: its end leaves host memory only"
    DEMOTION = "its session pauses: it leaves host memory only"


@dataclass(slots=True)
class _Departure:
    """A line that is let go of.

    Attributes:
        name: Of its session.
        steps: Of this try, once it has begun.
    """

    name: bytes
    line: Line
    why: Why
    until_s: float
    due_s: float
    steps: Iterator[ReleaseCount | None] | None = None


class UserSessions:
    """All users' sessions that this server remembers.

    Threads: the server's loop only.
    """

    def __init__(self, engine: Engine, is_pinned: Callable[[bytes], bool]) -> None:
        """Start empty; ``is_pinned`` tells of a chunk whether a request's pin keeps it."""
        self._engine = engine
        self._is_pinned = is_pinned
        self._known: OrderedDict[bytes, UserSession] = OrderedDict()  # the one that was told of last at the end
        self._of_tenant: dict[bytes, OrderedDict[bytes, None]] = {}
        self._departures: deque[_Departure] = deque()

    def __len__(self) -> int:
        return len(self._known)

    @property
    def wants_turn(self) -> bool:
        """Whether there is something to go on with now."""
        return any(one.steps is not None for one in self._departures)

    def told(self, namespace: bytes, state: m.SessionState) -> None:
        """A request of a session is over, and stored up to a chunk.

        Raises:
            ProtocolError: The session, the tag or the key is none.
        """
        if (len(state.session), len(state.tag), len(state.key)) != (SESSION_BYTES, TAG_BYTES, KEY_BYTES):
            raise ProtocolError(f"bad state of a session. key_bytes={len(state.key)}")
        self.goes_on(state.session)
        known = self._known.get(state.session)
        name = state.session if known is None else known.name  # one object for all entries
        prefix = self._engine.take_ownership(namespace, state.key, name)
        if not prefix:
            self._engine.count("session_states_of_nothing")
            return
        self._engine.count("session_states")
        self._add(self._remembered(name, state.tag), Line.of(namespace, prefix), prefix)

    def _add(self, session: UserSession, new: Line, prefix: list[bytes]) -> None:
        """Remember a line in place of those that it goes on from, and demote ends that the session has left."""
        keys = set(prefix)
        has_gone_on = bool(session.lines) and session.lines[-1].end in keys
        staying: list[Line] = []
        left: list[Line] = []
        for line in session.lines:
            if line.namespace != new.namespace:
                staying.append(line)
                continue
            if line.end in keys:
                continue  # the new one goes on from its end
            known = self._engine.known_prefix(line.keys, session.name)
            common = sum(1 for _ in takewhile(lambda record: record.key in keys, known))
            if common == len(prefix):
                new = line  # the new one is a part of it: an older question asked again, or one beside it
            elif known:
                is_left = has_gone_on and line.length - common <= END_SHARE * line.length
                (left if is_left else staying).append(line)
        session.lines = [*(line for line in staying if line is not new), new]
        if len(session.lines) > LINES_MAX:
            del session.lines[0]
        for line in left:
            self._let_go(session.name, line, Why.LEFT)

    def end(self, name: bytes) -> int:
        """A session is over: let its own chunks go; returns how many states were known of it."""
        session = self._forget(name)
        if session is None:
            self._engine.count("session_ends_of_nothing")
            return 0
        self._engine.count("session_ends")
        for line in session.lines:
            self._let_go(name, line, Why.END)
        return len(session.lines)

    def demote(self, name: bytes) -> int:
        """Let a session's own chunks leave host memory where the disk has them; returns how many states it has."""
        session = self._known.get(name)
        if session is None:
            return 0
        for line in session.lines:
            self._let_go(name, line, Why.DEMOTION)
        return len(session.lines)

    def goes_on(self, name: bytes) -> None:
        """A request of a session is here: what was going because of its end, or to make room, stays from now on."""
        if name and any(one.name == name for one in self._departures):
            going = (one for one in self._departures if one.name != name or one.why is Why.LEFT)
            self._departures = deque(going)

    def state_of(self, name: bytes, is_open: Callable[[bytes], bool]) -> tuple[bytes, list[ChunkRecord]] | None:
        """The newest state of a session whose namespace is open, as far as it is known; None: nothing is."""
        session = self._known.get(name)
        for line in reversed(session.lines if session is not None else ()):
            if is_open(line.namespace) and (known := self._engine.known_prefix(line.keys, name)):
                return line.namespace, known
        return None

    # -- what is remembered --------------------------------------------------------------------------------------------

    def _remembered(self, name: bytes, tenant: bytes) -> UserSession:
        session = self._known.get(name)
        if session is None:
            session = self._known[name] = UserSession(name, tenant)
        self._known.move_to_end(name)
        own = self._of_tenant.setdefault(session.tenant, OrderedDict())
        own[name] = None
        own.move_to_end(name)
        if len(own) > TENANT_MAX:
            self._forget(next(iter(own)))
        if len(self._known) > SESSIONS_MAX:
            self._forget(next(iter(self._known)))
        return session

    def _forget(self, name: bytes) -> UserSession | None:
        session = self._known.pop(name, None)
        if session is not None:
            own = self._of_tenant[session.tenant]
            del own[name]
            if not own:
                del self._of_tenant[session.tenant]
        return session

    # -- what is let go of ---------------------------------------------------------------------------------------------

    def _let_go(self, name: bytes, line: Line, why: Why) -> None:
        if len(self._departures) >= RELEASES_MAX:
            self._engine.count("session_releases_dropped")
            return
        now_s = self._engine.clock.monotonic()
        self._departures.append(_Departure(name, line, why, now_s + GIVE_UP_S, now_s))

    def step(self) -> None:
        """Go on with what is due, for ``SLICE_S``; the loop only."""
        now_s = self._engine.clock.monotonic()
        for _ in range(len(self._departures)):
            departure = self._departures.popleft()
            if departure.due_s > now_s or self._goes_on(departure, now_s + SLICE_S):
                self._departures.append(departure)
            if self._engine.clock.monotonic() >= now_s + SLICE_S:
                return

    def _goes_on(self, departure: _Departure, until_s: float) -> bool:
        """Go on with one; says whether it has to be looked at again."""
        if departure.steps is None:
            departure.steps = self._begin(departure)
        for count in departure.steps:
            if count is not None:
                what = "session_chunks_released" if departure.why is Why.END else "session_chunks_demoted"
                self._engine.count(what, count.removed)
                now_s = self._engine.clock.monotonic()
                departure.steps, departure.due_s = None, now_s + RETRY_S
                return bool(count.busy) and now_s < departure.until_s
            if self._engine.clock.monotonic() >= until_s:
                return True
        raise AssertionError("a release ended without its count")

    def _begin(self, departure: _Departure) -> Iterator[ReleaseCount | None]:
        name, line = departure.name, departure.line
        if departure.why is Why.DEMOTION:
            return self._engine.demoting(line.keys, name)
        session = self._known.get(name)
        if departure.why is Why.LEFT and session is None:
            return iter([ReleaseCount(0, 0)])  # forgotten meanwhile: nobody knows what it still needs
        kept = [other.keys for other in session.lines] if session is not None else []
        if departure.why is Why.LEFT:
            return self._engine.demoting_end(line.keys, name, kept)
        return self._engine.releasing(line.keys, name, kept, self._is_pinned)
