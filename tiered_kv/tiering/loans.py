"""Loans: chunks in host memory that somebody who is in no session reads for a moment, and that stay meanwhile.

So other machines read host memory, through the door. A loan is no lease: engines have room of their own for those, and
loans neither take it nor wait for any. Knows no clock: who lends ends each loan. Called by ``tiering.py``.
"""

from __future__ import annotations

from collections import Counter

from tiered_kv.tiering.host_tier import HostTier
from tiered_kv.tiering.index import Entry
from tiered_kv.tiering.types import Outcome, SlotLoan

LENT_SHARE = 1 / 8
"""What all loans may hold together of host memory, and those of a namespace of what it may have there; one chunk always
may be lent."""


class Loans:
    """All loans.

    Attributes:
        lent_bytes: Slots that are lent now, each once.

    Units: bytes. Threads: one owner, tiering.
    """

    def __init__(self, host: HostTier) -> None:
        """Nothing is lent."""
        self.lent_bytes = 0
        self._host = host
        self._lent: dict[int, Entry] = {}
        self._loans_of: Counter[bytes] = Counter()  # by key
        self._bytes_of: Counter[bytes] = Counter()  # slots that are lent, by namespace
        self._last_id = 0

    def begin(self, entry: Entry) -> SlotLoan | Outcome:
        """Lend a chunk that is ready and sealed; ``NO_ROOM``: too much is lent already."""
        key, size_bytes = entry.record.key, entry.slot_bytes
        assert entry.slot is not None, "a chunk without a slot is lent"
        if not self.count_of(entry):
            if not self._has_room(entry):
                return Outcome.NO_ROOM
            self.lent_bytes += size_bytes
            self._bytes_of[entry.record.namespace] += size_bytes
        self._loans_of[key] += 1
        self._host.hold(entry)
        self._last_id += 1
        self._lent[self._last_id] = entry
        return SlotLoan(self._last_id, entry.slot, size_bytes)

    def end(self, loan_id: int) -> None:
        """The chunk is read no more for this loan, which has not ended yet."""
        entry = self._lent.pop(loan_id)
        key = entry.record.key
        self._loans_of[key] -= 1
        if not self._loans_of[key]:
            del self._loans_of[key]
            self.lent_bytes -= entry.slot_bytes
            self._bytes_of[entry.record.namespace] -= entry.slot_bytes
            if not self._bytes_of[entry.record.namespace]:
                del self._bytes_of[entry.record.namespace]
        self._host.let_go(entry)

    def _has_room(self, entry: Entry) -> bool:
        namespace, capacity_bytes = entry.record.namespace, self._host.slots.limit_bytes
        room_bytes = int(capacity_bytes * LENT_SHARE) - self.lent_bytes
        own_bytes = self._bytes_of[namespace]
        if own_bytes:  # all that a namespace may have must not be lent, or its engines could store nothing meanwhile
            room_bytes = min(room_bytes, int(self._host.usage.most_bytes(namespace) * LENT_SHARE) - own_bytes)
        return not self._lent or entry.slot_bytes <= room_bytes

    def count_of(self, entry: Entry) -> int:
        """Loans of a chunk now."""
        return self._loans_of.get(entry.record.key, 0)

    # -- tests -------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Assert that what is lent is there, and counted once."""
        assert self._loans_of == Counter(entry.record.key for entry in self._lent.values()), "loans drifted"
        lent = {entry.record.key: entry for entry in self._lent.values()}
        assert self.lent_bytes == sum(entry.slot_bytes for entry in lent.values()), "lent bytes drifted"
        assert self.lent_bytes == self._bytes_of.total(), "lent bytes of namespaces drifted"
        assert all(entry.slot is not None for entry in lent.values()), "a chunk left its slot while it was lent"
