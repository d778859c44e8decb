"""Who leads the bucket: whoever created the object of the highest term.

Only ``create`` (If-None-Match) decides; clocks of machines are never compared. An observer calls a lease expired when
its content has not changed for ``expiry_s`` by the observer's own monotonic clock. The leader overwrites its own term's
object; a leader that was overtaken does harm nobody by doing so, since nobody reads any term but the highest.
Owns the objects below ``_tiered_kv/lease/``; must not decide what is granted or deleted. Called by the keeper's turn.

Threads: one at a time.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tiered_kv.fleet.layout import (
    LEASES,
    Answer,
    Objects,
    Term,
    decode,
    encode,
    fetch,
    lease_path,
    parse_lease_path,
)
from tiered_kv.fleet.timing import Timing

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class View:
    """The highest term as last seen.

    Attributes:
        data: Its content.
        content: The same, decoded; None: it cannot be read (it expires like any other).
        unchanged_s: Since when nobody changed it, by observations only.
    """

    term: int
    data: bytes
    content: Term | None
    unchanged_s: float


@dataclass(frozen=True, slots=True)
class BucketLimits:
    """What a leader enforces; None: not limited, never expires."""

    capacity_bytes: int | None
    ttl_s: float | None


class Lease:
    """One server's part in the election."""

    def __init__(self, store: Objects, timing: Timing, clock: Callable[[], float], server_id: str) -> None:
        self._store = store
        self._timing = timing
        self._clock = clock
        self._server_id = server_id
        self._foreign: set[str] = set()
        self._seen: tuple[int, bytes, float] | None = None
        self._counter = 0
        self._highest_term = 0
        self.was_overtaken = False
        """Whether the last term was lost to another server; else its object was gone."""
        self._renewed_at = float("-inf")
        self.confirmed_at = float("-inf")
        """Sending time of the last renewal after which a LIST showed no higher term."""
        self.term: int | None = None
        """The term this server leads, if it does."""

    def look(self) -> View | None:
        """Read the highest term; None: there is none."""
        asked = self._clock()
        terms = self._terms()
        if not terms:
            self._seen = None
            return None
        term = max(terms)
        self._highest_term = max(term, self._highest_term)
        data = fetch(self._store, lease_path(term)) or b""
        if self._seen is None or self._seen[:2] != (term, data):
            self._seen = (term, data, self._clock())
        return View(term, data, decode(data, Term), asked - self._seen[2])

    def forget(self) -> None:
        """Observe anew: whoever did not look meanwhile knows nothing of what did not change."""
        self._seen = None

    def take(self, previous: View | None, limits: BucketLimits, *, by_force: bool) -> "Taken | None":
        """Try to lead the next term; None: somebody else does.

        Args:
            previous: The highest term, which has expired or was closed.
            by_force: The store cannot create atomically and this server is its only writer.
        """
        term = self._highest_term + 1  # also where a bucket was emptied: members tell terms apart by their number
        sent = self._clock()
        data = encode(Term(self._server_id, 0, limits.capacity_bytes, limits.ttl_s))
        if by_force:
            self._store.put(lease_path(term), data)
        elif not self._store.create(lease_path(term), data):
            return None
        # A term that was overtaken and cleaned up can be created again: only the highest counts.
        if max(self._terms(), default=term) > term:
            return None
        holder_is_gone = previous is None
        if previous is not None:
            # A renewal may have landed between our last look and the new term: then its sender may still be writing.
            again = fetch(self._store, lease_path(previous.term)) or b""
            holder_is_gone = again == previous.data and previous.unchanged_s >= self._timing.expiry_s
        self.term, self._counter = term, 0
        self._highest_term = term
        self._renewed_at = self.confirmed_at = sent
        return Taken(term, holder_is_gone)

    def is_renewal_due(self) -> bool:
        return self._clock() - self._renewed_at >= self._timing.heartbeat_s

    def may_act(self) -> bool:
        """Whether the lease was renewed lately enough to grant and delete on its strength."""
        return self._clock() - self._renewed_at < self._timing.expiry_s / 2

    def check(self, *, has_renewed: bool = False) -> bool:
        """Whether no higher term exists; if one does, or this one's object is gone, this server leads no more.

        A bucket that is emptied has no leader, and another server may begin with the same term. So the object is read
        before it is written; not again behind that (``has_renewed``).
        """
        if self.term is None:
            return False
        renewed_at = self._renewed_at
        terms = self._terms()
        highest = max(terms, default=0)
        content = None if has_renewed else decode(fetch(self._store, lease_path(self.term)) or b"", Term)
        is_own = has_renewed or (content is not None and content.holder == self._server_id)
        if highest != self.term or not is_own:
            self.was_overtaken = bool(terms) and (highest != self.term or content is not None)
            self.term = None
            return False
        self.confirmed_at = renewed_at
        lower = [path for term in terms if term < self.term and self._is_ours(path := lease_path(term))]
        if lower:
            self._store.delete(lower)
        return True

    def _is_ours(self, path: str) -> bool:
        """Whether a lower term's object is a lease, so that it may go; what is none stays, and is said once."""
        if path in self._foreign:
            return False
        data = fetch(self._store, path)
        if data is not None and decode(data, Term) is None:
            self._foreign.add(path)
            _log.warning("left alone: it has the name of a lease and is none. path=%s", path)
            return False
        return data is not None

    def renew(self, limits: BucketLimits, session: str, grants: Mapping[str, Answer], *, is_tight: bool) -> None:
        """Write heartbeat and grants."""
        self._write(limits, session=session, is_tight=is_tight, grants=dict(grants))

    def resign(self, limits: BucketLimits) -> None:
        """Give the lease up: the next server takes it at once."""
        if self.check():
            self._write(limits, is_closed=True)
            self.term = None

    def store_now(self) -> float | None:
        """The store's clock, seconds since 1970, as of the last renewal."""
        if self.term is None:
            return None
        info = self._store.head(lease_path(self.term))
        return info.modified_s if info else None

    def _write(
        self,
        limits: BucketLimits,
        *,
        session: str = "",
        is_closed: bool = False,
        is_tight: bool = False,
        grants: dict[str, Answer] | None = None,
    ) -> None:
        assert self.term is not None
        self._counter += 1
        content = Term(
            self._server_id,
            self._counter,
            limits.capacity_bytes,
            limits.ttl_s,
            session=session,
            is_closed=is_closed,
            is_tight=is_tight,
            grants=grants or {},
        )
        sent = self._clock()
        self._store.put(lease_path(self.term), encode(content))
        self._renewed_at = sent

    def _terms(self) -> list[int]:
        found = (parse_lease_path(info.path) for info in self._store.list(LEASES))
        return [term for term in found if term is not None]


@dataclass(frozen=True, slots=True)
class Taken:
    """A term this server just began to lead.

    Attributes:
        holder_is_gone: The leader before it can no longer be writing on its own grants.
    """

    term: int
    holder_is_gone: bool
