"""What a server does as long as it leads: renew, read reports, grant, clean up.

The order in one turn matters. The leader's own session is written before the LIST that confirms the lease, and the LIST
comes after the renewal it confirms: its own PUTs rest on the sending time of that renewal. Called by the keeper's turn.

Threads: one at a time.
"""

from collections.abc import Callable, Sequence

from tiered_kv.fleet.gc import GarbageCollector
from tiered_kv.fleet.grants import GrantLedger
from tiered_kv.fleet.layout import Objects
from tiered_kv.fleet.lease import BucketLimits, Lease
from tiered_kv.fleet.member import LocalBudget, Membership
from tiered_kv.fleet.timing import Timing


class LeaderTerm:
    """One term of this server. Over when ``lease.term`` is None."""

    def __init__(
        self, store: Objects, timing: Timing, clock: Callable[[], float], lease: Lease, limits: BucketLimits
    ) -> None:
        assert lease.term is not None
        self._store = store
        self._timing = timing
        self._clock = clock
        self._looked_at = float("-inf")
        self._lease = lease
        self._limits = limits
        self.ledger = GrantLedger(store, timing, clock, lease.term, limits.capacity_bytes)
        self.collector = GarbageCollector(store, timing, clock, lease, self.ledger, limits)

    def advance(self, member: Membership, budget: LocalBudget, namespaces: Sequence[str]) -> None:
        """Do one turn's work.

        Raises:
            TierUnavailable: The store failed; the term goes on with the next turn.
        """
        if not self._exchange(member, budget, namespaces):
            return
        was_counted = self.ledger.is_counted
        self.collector.step()
        if self._lease.term is not None and not was_counted and self.ledger.is_counted:
            self._exchange(member, budget, namespaces)  # do not let PUTs wait for another turn

    def rests(self, own: str) -> bool:
        """Whether nothing is to be done where this server stores nothing: nobody else is there, nothing expires.

        Looks for others now and then. The lease is not renewed meanwhile, so nothing may be granted, deleted or PUT on
        its strength until it was renewed and confirmed again; to the others this server may as well be frozen.

        Raises:
            TierUnavailable: The store failed.
        """
        if self.ledger.has_others(own) or not self.collector.may_rest():
            return False
        now = self._clock()
        if now - self._looked_at >= self._timing.rest_watch_s:
            self._looked_at = now
            self.ledger.refresh(own)
        return not self.ledger.has_others(own)

    def _exchange(self, member: Membership, budget: LocalBudget, namespaces: Sequence[str]) -> bool:
        """Renew, read reports, grant; False when another server leads by now."""
        ledger = self.ledger
        member.join(ledger.term, namespaces, on_end=ledger.drop_own)
        own = member.session
        ledger.refresh(own)
        if own:
            ledger.set_own(own, member.own_report(ledger.is_tight(), namespaces))
        before = ledger.answers()
        if self._lease.may_act():
            ledger.grant()
        grants = ledger.answers()
        if grants != before or self._lease.is_renewal_due():
            if not self._lease.check():
                return False
            self._lease.renew(self._limits, own, grants, is_tight=ledger.is_tight())
        if not self._lease.check(has_renewed=True):
            return False
        if own:
            budget.grant(ledger.granted_to(own), self._lease.confirmed_at)
        self._store.delete(ledger.removable())
        return True
