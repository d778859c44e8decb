"""What a server does as long as it leads: renew, read reports, grant, clean up.

The order in one turn matters. The leader's own session is written before the LIST that confirms the lease, and the LIST
comes after the renewal it confirms: its own PUTs rest on the sending time of that renewal. Called by the keeper's turn.

Threads: one at a time.
"""

from collections.abc import Callable, Sequence

from tiered_kv.tiers.bucket.account import Account
from tiered_kv.tiers.bucket.fleet import Fleet
from tiered_kv.tiers.bucket.janitor import Janitor
from tiered_kv.tiers.bucket.layout import Objects
from tiered_kv.tiers.bucket.lease import Lease, Limits
from tiered_kv.tiers.bucket.pace import Pace
from tiered_kv.tiers.bucket.session import Membership


class Reign:
    """One term of this server. Over when ``lease.term`` is None."""

    def __init__(self, store: Objects, pace: Pace, clock: Callable[[], float], lease: Lease, limits: Limits) -> None:
        assert lease.term is not None
        self._store = store
        self._lease = lease
        self._limits = limits
        self.fleet = Fleet(store, pace, clock, lease.term, limits.capacity_bytes)
        self.janitor = Janitor(store, pace, clock, lease, self.fleet, limits)

    def advance(self, membership: Membership, account: Account, namespaces: Sequence[str]) -> None:
        """Do one turn's work.

        Raises:
            TierUnavailable: The store failed; the term goes on with the next turn.
        """
        if not self._exchange(membership, account, namespaces):
            return
        was_counted = self.fleet.is_counted
        self.janitor.step()
        if self._lease.term is not None and not was_counted and self.fleet.is_counted:
            self._exchange(membership, account, namespaces)  # do not let PUTs wait for another turn

    def _exchange(self, membership: Membership, account: Account, namespaces: Sequence[str]) -> bool:
        """Renew, read reports, grant; False when another server leads by now."""
        fleet = self.fleet
        membership.join(fleet.term, namespaces, on_end=fleet.drop_own)
        own = membership.session
        fleet.refresh(own)
        if own:
            fleet.set_own(own, membership.own_report(fleet.is_tight(), namespaces))
        before = fleet.answers()
        if self._lease.may_act():
            fleet.grant()
        grants = fleet.answers()
        if grants != before or self._lease.is_renewal_due():
            if not self._lease.check():
                return False
            self._lease.renew(self._limits, own, grants, is_tight=fleet.is_tight())
        if not self._lease.check():
            return False
        if own:
            account.grant(fleet.granted_to(own), self._lease.confirmed_at)
        self._store.delete(fleet.removable())
        return True
