"""A server's membership in the fleet: its session's object, its reports, and what it makes of the answers.

A session follows one term and never changes it. It ends, and its object is deleted, when the term is overtaken or its
grant ran out of date; the next begins only when no PUT from before is in flight, so a session that is gone can never
again add a byte. Every session has an object of its own name, so nothing that an overtaken leader deletes late is ever
in use. Owns this server's object below ``_tiered_kv/servers/``. Called by the keeper's turn.

Threads: one at a time.
"""

from collections.abc import Callable, Sequence

from tiered_kv.tiers.bucket.account import Account
from tiered_kv.tiers.bucket.layout import Objects, Report, Term, encode, session_path
from tiered_kv.tiers.bucket.pace import Pace

SENT_MAX = 64
"""Reports whose sending time is remembered for their answers."""


class Membership:
    """This server's sessions, one after the other."""

    def __init__(
        self, store: Objects, pace: Pace, account: Account, clock: Callable[[], float], server_id: str
    ) -> None:
        self._store = store
        self._pace = pace
        self._account = account
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
        if self.term is None or not self._account.is_current():
            return
        if self._clock() - self._answered_at > self._pace.expiry_s:
            self._account.shut()  # given up for dead, or not seen: a new session asks anew
            return
        self._send(self.term, namespaces)

    def follow(self, term: int, content: Term, namespaces: Sequence[str]) -> None:
        """Take what the highest term answers, or begin a session under it."""
        self._is_tight = content.is_tight
        if self.term == term and self._account.is_current():
            answer = content.grants.get(self.session)
            sent_at = self._sent.get(answer.seq) if answer else None
            if answer is not None and sent_at is not None:
                self._answered_at = self._clock()
                self._account.grant(answer.granted_bytes, sent_at)
                self._sent = {seq: at for seq, at in self._sent.items() if seq >= answer.seq}
            return
        if self._begin(term):
            self._send(term, namespaces)

    def join(self, term: int, namespaces: Sequence[str], on_end: Callable[[str], None]) -> None:
        """The same for a leader, whose grants need no exchange: only its object has to be there."""
        if self.term == term and self._account.is_current():
            if self._written != tuple(namespaces):
                self._send(term, namespaces)
            return
        ended = self.session
        if self._begin(term):
            if ended:
                on_end(ended)
            self._send(term, namespaces)

    def own_report(self, is_tight: bool, namespaces: Sequence[str]) -> Report:
        """What a leader reports to itself."""
        assert self.term is not None
        self._seq += 1
        return self._account.report(self._seq, self.term, is_tight, list(namespaces))

    def leave(self) -> None:
        """End the session; its object stays, to be waited for, while a PUT is in flight."""
        self._account.shut()
        if self._account.is_drained():
            self._remove()

    def _begin(self, term: int) -> bool:
        self._account.shut()
        if not self._account.is_drained():
            return False
        self._remove()
        if not self._account.open():
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
        content = self._account.report(self._seq, term, self._is_tight, list(namespaces))
        self._sent[self._seq] = self._clock()
        while len(self._sent) > SENT_MAX:
            del self._sent[next(iter(self._sent))]
        self._store.put(session_path(self.session), encode(content))
        self._written = tuple(namespaces)
