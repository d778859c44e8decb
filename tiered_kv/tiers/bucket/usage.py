"""What the whole bucket holds, as far as one server knows: written by the leader, read by everybody.

Owns the object ``_tiered_kv/usage``. ``now`` by any thread; ``refresh`` by the keeper's turn.
"""

import logging
from collections.abc import Callable

from tiered_kv.tiers.bucket.account import Account
from tiered_kv.tiers.bucket.fleet import Fleet
from tiered_kv.tiers.bucket.layout import USAGE, Objects, UsageFigures, decode, encode, fetch
from tiered_kv.tiers.bucket.pace import Pace

_log = logging.getLogger(__name__)


class UsageBoard:
    """The last known figures, and what this server changed since.

    Threads: see the module.
    """

    def __init__(self, store: Objects, pace: Pace, clock: Callable[[], float], account: Account) -> None:
        self._store = store
        self._pace = pace
        self._clock = clock
        self._account = account
        self._known = UsageFigures(0, 0)
        self._written: UsageFigures | None = None
        self._has_warned = False
        self._exchanged_at = float("-inf")

    def now(self) -> tuple[int, int]:
        """Bytes and blobs in the bucket."""
        changed_bytes, changed_count = self._account.changes()
        return max(0, self._known.used_bytes + changed_bytes), max(0, self._known.blob_count + changed_count)

    def refresh(self, fleet: Fleet | None) -> None:
        """Take the leader's figures: from ``fleet`` if this server leads and has counted, else from the bucket.

        Raises:
            TierUnavailable: The store failed.
        """
        now = self._clock()
        is_due = now - self._exchanged_at >= self._pace.usage_s
        if fleet is not None and fleet.is_counted:
            self._learn(UsageFigures(fleet.used_bytes(), fleet.blob_count(), fleet.term))
            if is_due and self._known != self._written:
                self._exchanged_at = now
                if self._may_write():
                    self._store.put(USAGE, encode(self._known))
                    self._written = self._known
        elif is_due:
            self._exchanged_at = now
            found = decode(fetch(self._store, USAGE), UsageFigures)
            if found is not None and found != self._known:
                self._learn(found)

    def _may_write(self) -> bool:
        """Whether the name is free or holds figures: asked before the first write, and again while it does not."""
        if self._written is not None:
            return True
        data = fetch(self._store, USAGE)
        is_foreign = data is not None and decode(data, UsageFigures) is None
        if is_foreign and not self._has_warned:
            _log.warning("left alone: it has the name of the bucket's figures and holds none. path=%s", USAGE)
        self._has_warned = is_foreign
        return not is_foreign

    def _learn(self, figures: UsageFigures) -> None:
        self._account.take_changes()
        self._known = figures
