"""Slot grants: empty slots that sessions hold ahead, so that reserving one asks nobody (rule 2).

Owns who holds which empty slot and how many. Must not know chunks. Called by tiering, which tops everybody up
once per step rather than after every event.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from tiered_kv.tiering.host_tier import HostTier, NoSlot
from tiered_kv.tiering.types import SlotGrant, SlotId, SlotRecall

CREDITS_MAX = 256
"""Empty slots a session holds ahead: eight steps of 8k tokens in 256-token chunks, half a step in 16-token ones. Where
chunks are large, the share of host memory is the narrower bound."""

EVICTED_AT_ONCE = 24
"""Chunks that are evicted for the grants of one step, a millisecond of it; 256 in a full cache took 7 to 28."""


@dataclass(slots=True)
class Session:
    """One client's share of tiering.

    Attributes:
        reserved: Slots granted and neither committed nor given back.
        untold: The newest of them, which the client has not been told of yet.
        granted: When it was granted one last, in grants.
        lookups: Ids of its lookups.
        is_suspended: The client is lost, but processes may still copy.
        is_resting: It stores nothing now, and holds no slots.
        lease_s: How long its lookups hold leases that it does not claim.
    """

    id: int
    namespace: bytes
    slot_bytes: int
    reserved: set[SlotId] = field(default_factory=set)
    untold: list[SlotId] = field(default_factory=list)
    granted: int = 0
    lookups: set[int] = field(default_factory=set)
    is_suspended: bool = False
    is_resting: bool = False
    lease_s: float = math.inf


class SlotGrants:
    """Grants of empty slots.

    Attributes:
        reserved_bytes: All slots granted now.
        wants_turn: :meth:`top_up` has more to do at once.

    Units: bytes. Threads: one owner, tiering.
    """

    def __init__(self, host: HostTier, share: float) -> None:
        self.reserved_bytes = 0
        self.wants_turn = False
        self._grants = 0
        self._host = host
        self._share = share

    def top_up(self, sessions: Collection[Session]) -> None:
        """Grant what sessions may hold and memory allows.

        A session gets at most half of what the others leave, so that one more session finds something; one that has
        nothing may even pass the share, because one that does not rest never gives its credits back by itself. Those
        that have none come first, and of those who waited longest. Where chunks have to go for it, in parts.
        """
        most_evicted = self._host.evicted_count + EVICTED_AT_ONCE
        self.wants_turn = False
        cap = int(self._host.slots.limit_bytes * self._share)
        least = 2 if len(sessions) == 1 else 1
        held: Counter[bytes] = Counter()  # by namespace, whose maximum bounds it as host memory bounds all
        for session in sessions:
            held[session.namespace] += len(session.reserved) * session.slot_bytes
        storing = (one for one in sessions if not (one.is_suspended or one.is_resting))
        for session in sorted(storing, key=lambda one: (bool(one.reserved), one.granted)):
            size, name = session.slot_bytes, session.namespace
            own_cap = int(self._host.usage.most_bytes(name) * self._share)
            own_bytes = len(session.reserved) * size
            left = min(cap - self.reserved_bytes, own_cap - held[name]) + own_bytes
            wanted = min(CREDITS_MAX, max(least, left // (2 * size)))
            while len(session.reserved) < wanted:
                if self._host.evicted_count >= most_evicted:
                    self.wants_turn = True
                    return
                factor = 1 if session.reserved else 2
                if self.reserved_bytes + size > factor * cap or held[name] + size > factor * own_cap:
                    break
                slot = self._host.take_for_store(size, name)
                if isinstance(slot, NoSlot):
                    self.wants_turn |= slot is NoSlot.LOOKING
                    break
                session.reserved.add(slot)
                session.untold.append(slot)
                self._grants += 1
                session.granted = self._grants
                self.reserved_bytes += size
                held[name] += size
                self._host.usage.add(name, size)

    def take_grants(self, sessions: Iterable[Session]) -> list[SlotGrant]:
        """One message per session that was granted slots since the last call."""
        grants = []
        for session in sessions:
            if session.untold:
                grants.append(SlotGrant(session.id, tuple(session.untold)))
                session.untold = []
        return grants

    def spend(self, session: Session, slot: SlotId) -> None:
        """The session's slot was filled, or will not be.

        Raises:
            KeyError: The slot was not granted to this session.
        """
        session.reserved.remove(slot)
        self.reserved_bytes -= session.slot_bytes
        self._host.usage.remove(session.namespace, session.slot_bytes)

    def take_back(self, session: Session, slots: Iterable[SlotId]) -> None:
        """Nobody will fill these slots of the session."""
        for slot in slots:
            self.spend(session, slot)
            self._host.give(slot)

    def recalls(self, sessions: Iterable[Session]) -> list[SlotRecall]:
        """What to ask back, now that a slab has begun to be drained."""
        recalls = []
        for session in sessions:
            slots = tuple(sorted(slot for slot in session.reserved if self._host.slots.is_draining(slot)))
            if slots and not session.is_suspended:
                recalls.append(SlotRecall(session.id, slots))
        return recalls
