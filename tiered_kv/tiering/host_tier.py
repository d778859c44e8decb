"""Host memory, as tiering sees it: which chunk lies in which slot, which one goes when a slot is needed.

The counterpart of ``secondary_tier.py``. Owns the slot pool, the order of eviction of each slot size, leases, and the
growing and draining of slabs; must not know sessions, lookups or write queues. Called by ``tiering.py`` and, for the
holds of pending writes, by the tier below.

A chunk is *idle* when it is ready and nothing holds it: no lease, no pending write, no loan. The orders of eviction
contain the idle chunks, and those that are held since they were idle: a lookup of hundreds would else take each out and
put it back. Who looks for a chunk to evict takes out what it meets of those, so it meets each once.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from itertools import islice

from tiered_kv.tiering.eviction import EvictionOrder
from tiered_kv.tiering.eviction_policy import EvictionPolicy
from tiered_kv.tiering.index import BlobState, Entry, HostState, Index
from tiered_kv.tiering.quotas import NamespaceUsage, Quotas
from tiered_kv.tiering.slots import SLOTS_PER_SLAB_MAX, SlotPool, slab_of
from tiered_kv.tiering.stats import Outbox
from tiered_kv.tiering.types import HOST, Grow, Outcome, Removal, SlotId

EVICTED_AT_ONCE = 64
LOOKED_AT_ONCE = 1024
"""Chunks that one step evicts from a slab that goes to another slot size, or looks at to find them: a millisecond. A
slab may have 131,072 small ones."""

HELD_TAKEN_OUT_AT_ONCE = 512
"""Held chunks that one look for an idle one takes out of the order: a millisecond. More may lie in a row there."""

VICTIMS_LOOKED_AT = 32
"""Idle chunks looked at for one whose going strands no chunk behind it; the order puts such chunks first."""


class NoSlot(Enum):
    """Why there is no slot for somebody."""

    NONE = "none"
    """None can be had now."""
    LOOKING = "looking"
    """So many chunks that are held, or in slabs that are drained, came first: ask once more, in a while."""


class HostTier:
    """Slots and the chunks in them.

    Attributes:
        leased_bytes: Slots that lookups rely on now.
        leased_by: The same by session; what several rely on counts for the one that does so longest.
        short_tail_bytes: Slots of tails that were said to be behind few chunks.
        ready_count, sealing_count: Chunks in these states.
        keeps_for_write: Asked before an idle chunk is evicted for room; where it says yes it holds the chunk, until it
            is written.
        usage: Bytes of each namespace: slots with its chunks, and empty ones its sessions hold.

    Units: bytes. Threads: one owner, tiering.
    """

    def __init__(
        self, host_bytes: int, index: Index, quotas: Quotas, policy: type[EvictionPolicy], outbox: Outbox
    ) -> None:
        self.slots = SlotPool(host_bytes)
        self.usage = NamespaceUsage(quotas, lambda: self.slots.limit_bytes)
        self.leased_bytes = 0
        self.leased_by: Counter[int] = Counter()
        self.short_tail_bytes = 0
        self._short_tails: OrderedDict[Entry, None] = OrderedDict()  # oldest first
        self._lessees: dict[bytes, dict[int, int]] = {}  # leases of each session, for whose first the chunk counts
        self.ready_count = 0
        self.sealing_count = 0
        self._orders: dict[tuple[int, bool], EvictionOrder] = {}  # idle chunks, by slot size and ``is_unwritten``
        self._idle_in_slab: Counter[int] = Counter()
        self._users: Counter[int] = Counter()  # open sessions by slot size
        self._drains: dict[int, int] = {}  # slab being drained, by the slot size that waits for its memory
        self._has_new_drains = False
        self._emptying: Iterator[None] | None = None
        self.keeps_for_write: Callable[[Entry], bool] = lambda _: False
        self._index = index
        self._quotas = quotas
        self._policy = policy
        self._jobs = outbox.jobs
        self._counters = outbox.counters
        self._stats = outbox.stats

    def add_user(self, slot_bytes: int) -> None:
        """A session fills slots of this size from now on."""
        self._users[slot_bytes] += 1
        for is_unwritten in (False, True):
            if (slot_bytes, is_unwritten) not in self._orders:
                self._orders[slot_bytes, is_unwritten] = EvictionOrder(HOST, self._index, self._quotas, self._policy)
        if self.slots.slot_count(slot_bytes) == 0:
            self._grow(slot_bytes)

    def remove_user(self, slot_bytes: int) -> None:
        """The session is over; its slot size keeps its memory until another size needs it."""
        self._users[slot_bytes] -= 1

    # -- slots -------------------------------------------------------------------------------------------------

    def take_for_store(self, slot_bytes: int, namespace: bytes) -> SlotId | NoSlot:
        """A free slot, else that of an idle chunk; none is evicted while memory is on its way."""
        if self.usage.excess_bytes(namespace, slot_bytes) > 0:
            return self._take_own(slot_bytes, namespace)
        slot = self.slots.take(slot_bytes)
        is_growing = self._grow_ahead(slot_bytes)
        if slot is not None:
            return slot
        return NoSlot.NONE if is_growing else self._take_idle(slot_bytes, namespace)

    def take_for_load(self, slot_bytes: int, namespace: bytes) -> SlotId | NoSlot:
        """A free slot, else one of memory that is on its way (the read follows it), else that of an idle chunk."""
        if self.usage.excess_bytes(namespace, slot_bytes) > 0:
            return self._take_own(slot_bytes, namespace)
        slot = self.slots.take(slot_bytes)
        self._grow_ahead(slot_bytes)
        if slot is None:
            slot = self.slots.take_early(slot_bytes)
        if slot is None and self._grow(slot_bytes):
            slot = self.slots.take_early(slot_bytes)
        return self._take_idle(slot_bytes, namespace) if slot is None else slot

    def give(self, slot: SlotId) -> None:
        """Return a slot that no chunk lies in."""
        self.slots.give(slot)

    def _take_own(self, slot_bytes: int, namespace: bytes) -> SlotId | NoSlot:
        """The slot of a chunk of a namespace that is at its maximum; above it, which was lowered, one more goes."""
        slot = self._take_idle(slot_bytes, namespace, only_own=True)
        if not isinstance(slot, NoSlot) and self.usage.excess_bytes(namespace, slot_bytes) > 0:
            another = self._take_idle(slot_bytes, namespace, only_own=True)
            if not isinstance(another, NoSlot):
                self.give(another)
        return slot

    def _take_idle(self, slot_bytes: int, namespace: bytes, *, only_own: bool = False) -> SlotId | NoSlot:
        for _ in range(EVICTED_AT_ONCE):
            entry = self._victim(slot_bytes, namespace, only_own=only_own)
            if isinstance(entry, NoSlot):
                return entry
            if self.keeps_for_write(entry):
                continue
            slot = self.evict(entry)
            if not self.slots.is_draining(slot):
                return slot
            self.slots.give(slot)
        return NoSlot.LOOKING

    def _victim(self, slot_bytes: int, namespace: bytes, *, only_own: bool) -> Entry | NoSlot:
        """The idle chunk to evict next: the first whose children lose nothing by it, else simply the first.

        The namespace that needs the slot gives one of its own where all the others are at their minima.
        """
        for is_unwritten in (False, True):
            order = self._orders[slot_bytes, is_unwritten]
            others = [] if only_own else [order.candidates(self._is_spare)]
            for candidates in (*others, order.candidates(only=namespace)):
                held: list[Entry] = []
                found = self._first_to_go(candidates, held)
                for entry in held:
                    order.remove(entry)
                if found is not None:
                    return found
                if len(held) == HELD_TAKEN_OUT_AT_ONCE:
                    return NoSlot.LOOKING
        return NoSlot.NONE

    def _first_to_go(self, candidates: Iterator[Entry], held: list[Entry]) -> Entry | None:
        """The chunk of an order to evict next; what it meets that is held is added to ``held``."""
        first: Entry | None = None
        looked_at = 0
        for entry in candidates:
            if entry.holds:
                held.append(entry)
                if len(held) == HELD_TAKEN_OUT_AT_ONCE:
                    break
                continue
            if BlobState.PRESENT in entry.blobs or not any(map(self._index.is_held, entry.children)):
                return entry
            first = first or entry
            looked_at += 1
            if looked_at == VICTIMS_LOOKED_AT:
                break
        return first

    def _is_spare(self, entry: Entry) -> bool:
        return not self.usage.keeps(entry.record.namespace, entry.slot_bytes)

    # -- chunks in slots ---------------------------------------------------------------------------------------

    def place(self, entry: Entry, slot: SlotId, slot_bytes: int, state: HostState) -> None:
        """The chunk's bytes are about to be in a slot that was taken for it."""
        assert entry.host is HostState.ABSENT
        entry.host, entry.slot, entry.slot_bytes = state, slot, slot_bytes
        self.usage.add(entry.record.namespace, slot_bytes)
        self.sealing_count += state is HostState.SEALING

    def now_ready(self, entry: Entry) -> None:
        """The chunk's bytes are verified."""
        self.sealing_count -= entry.host is HostState.SEALING
        cause = "new" if entry.host is HostState.SEALING else "promoted"
        entry.host, entry.source = HostState.READY, HOST
        self.ready_count += 1
        self._stats.inserted(entry, HOST, cause)
        if entry.holds == 0:
            self._now_idle(entry)

    def vacate(self, entry: Entry, cause: str = "evicted") -> SlotId:
        """Take the chunk's slot; it is the caller's."""
        slot = entry.slot
        assert slot is not None
        if entry.host is HostState.READY:
            self.ready_count -= 1
            self._stats.removed(entry, HOST, cause)
            if entry.holds == 0:
                self._not_idle(entry)
        self.sealing_count -= entry.host is HostState.SEALING
        if entry in self._short_tails:
            del self._short_tails[entry]
            self.short_tail_bytes -= entry.slot_bytes
        self.usage.remove(entry.record.namespace, entry.slot_bytes)
        self._index.damaged.pop(entry, None)
        entry.host, entry.slot, entry.source = HostState.ABSENT, None, HOST
        return slot

    def evict(self, entry: Entry, cause: str = "evicted") -> SlotId:
        """Take the slot of an idle chunk; it is the caller's."""
        assert entry.host is HostState.READY and entry.holds == 0
        slot = self.vacate(entry, cause)
        self._counters["host_evicted"] += 1
        self._index.remove_if_gone(entry)
        return slot

    @property
    def evicted_count(self) -> int:
        """Chunks that were evicted since the start."""
        return self._counters["host_evicted"]

    def contains(self, entry: Entry) -> bool:
        """Whether the chunk is here or is going to be."""
        return entry.host is not HostState.ABSENT

    @property
    def used_bytes(self) -> int:
        """Memory that slots have, with chunks and without."""
        return self.slots.assigned_bytes

    def remove(self, entry: Entry, *, leaves_hole: bool) -> Removal:
        """Evict a chunk because an operator said so, unless it is in use.

        Args:
            leaves_hole: Of no consequence here: chunks in slots do not depend on each other.
        """
        del leaves_hole
        if entry.host is not HostState.READY or entry.holds:
            return Removal.KEPT if self.contains(entry) else Removal.ABSENT
        self.give(self.evict(entry, "removed"))
        return Removal.REMOVED

    def count_short_tail(self, entry: Entry) -> None:
        """A tail that has a slot is one of those of which there are to be few (:attr:`short_tail_bytes`)."""
        self._short_tails[entry] = None
        self.short_tail_bytes += entry.slot_bytes

    def oldest_short_tails(self) -> list[Entry]:
        """Some of them, oldest first."""
        return list(islice(self._short_tails, VICTIMS_LOOKED_AT))

    def hold(self, entry: Entry) -> None:
        """Keep the chunk in its slot until :meth:`let_go`. No use of it: its age and its place in the order stay."""
        if entry.host is HostState.READY and not entry.holds:
            self._count_idle(entry, -1)
        entry.holds += 1

    def let_go(self, entry: Entry) -> None:
        """End one hold. The chunk counts as just used when it was the last, unless it has kept its place."""
        entry.holds -= 1
        if entry.holds == 0 and entry.host is HostState.READY:
            self._now_idle(entry)

    def set_unwritten(self, entry: Entry, is_unwritten: bool) -> None:
        """The chunk's write was put off, or is put off no longer."""
        if entry.is_unwritten == is_unwritten:
            return
        was_ordered = self._take_out(entry)
        entry.is_unwritten = is_unwritten
        if was_ordered:
            self._orders[entry.slot_bytes, entry.is_unwritten].add(entry)

    def lease(self, entries: Sequence[Entry], slot_bytes: int, session: int, room_bytes: int) -> int:
        """Hold chunks for a session's lookup, as far as there is room for those that no lookup holds yet.

        Returns:
            How many, from the first on.
        """
        lessees, idle = self._lessees, list[SlotId]()
        room, new, count = room_bytes // slot_bytes, 0, 0
        for entry in entries:
            if not entry.leases:
                if new >= room:
                    break
                new += 1
                lessees[entry.record.key] = {session: 1}
            else:
                others = lessees[entry.record.key]
                others[session] = others.get(session, 0) + 1
            entry.leases += 1
            if not entry.holds and entry.host is HostState.READY:
                assert entry.slot is not None
                idle.append(entry.slot)
            entry.holds += 1
            count += 1
        if new:
            self.leased_bytes += new * slot_bytes
            self.leased_by[session] += new * slot_bytes
        self._idle_in_slab.subtract(map(slab_of, idle))
        return count

    def end_leases(self, entries: Iterable[Entry], slot_bytes: int, session: int) -> None:
        """End a lease of a session on each. Where that was its last, the chunk counts for another that relies on it."""
        idle = list[SlotId]()
        for entry in entries:
            entry.leases -= 1
            lessees = self._lessees[entry.record.key]
            lessees[session] -= 1
            if not lessees[session]:
                counted = next(iter(lessees))
                del lessees[session]
                if counted == session:
                    self._count_for_next(session, slot_bytes, lessees)
            if not entry.leases:
                self.leased_bytes -= slot_bytes
                del self._lessees[entry.record.key]
            entry.holds -= 1
            if entry.host is HostState.ABSENT:
                self._index.remove_if_gone(entry)
            elif not entry.holds and entry.host is HostState.READY:
                self._put_in(entry)
                assert entry.slot is not None
                idle.append(entry.slot)
        self._idle_in_slab.update(map(slab_of, idle))

    def _count_for_next(self, session: int, slot_bytes: int, lessees: dict[int, int]) -> None:
        self.leased_by[session] -= slot_bytes
        if not self.leased_by[session]:
            del self.leased_by[session]
        if lessees:
            self.leased_by[next(iter(lessees))] += slot_bytes

    def record_use(self, slot_bytes: int, namespace: bytes, keys: Sequence[bytes]) -> None:
        """Note the use of a prefix, deepest chunk first."""
        for is_unwritten in (False, True):
            order = self._orders.get((slot_bytes, is_unwritten))
            if order is not None and len(order):
                order.record_use(namespace, keys)

    def _now_idle(self, entry: Entry) -> None:
        self._put_in(entry)
        self._count_idle(entry, 1)

    def _not_idle(self, entry: Entry) -> None:
        self._take_out(entry)
        self._count_idle(entry, -1)

    def _put_in(self, entry: Entry) -> None:
        """Put a chunk into its order, unless it has kept its place there."""
        if not entry.ordered >> HOST & 1:
            self._orders[entry.slot_bytes, entry.is_unwritten].add(entry)

    def _take_out(self, entry: Entry) -> bool:
        """Take a chunk out of its order; says whether it was in one."""
        is_ordered = bool(entry.ordered >> HOST & 1)
        if is_ordered:
            self._orders[entry.slot_bytes, entry.is_unwritten].remove(entry)
        return is_ordered

    def _count_idle(self, entry: Entry, change: int) -> None:
        assert entry.slot is not None
        self._idle_in_slab[slab_of(entry.slot)] += change

    # -- slabs -------------------------------------------------------------------------------------------------

    def grown(self, job: Grow, outcome: Outcome) -> None:
        """A slab has its memory, or the machine refused it and nothing lies in its slots."""
        if outcome is not Outcome.OK:
            self._counters["slab_refused"] += 1
        self.slots.grown(job.slab, succeeded=outcome is Outcome.OK)

    def finish_drains(self) -> None:
        """Go on with passing on every drained slab in which nothing is held any more."""
        if self._emptying is None and any(map(self._is_drained, self._drains)):
            self._emptying = self._empty_slabs()
        if self._emptying is not None and next(self._emptying, False) is False:
            self._emptying = None

    @property
    def is_emptying(self) -> bool:
        """Whether :meth:`finish_drains` has more to do at once."""
        return self._emptying is not None

    def _empty_slabs(self) -> Iterator[None]:
        """The same in steps. What is asked for between them stays, and the slab with it, until nobody holds it.

        Which chunks lie in a slab is looked up in the index: a map of a million slots would cost 75 bytes for each, and
        stand still to grow.
        """
        while (waiting := next(filter(self._is_drained, self._drains), None)) is not None:
            slab, evicted = self._drains[waiting], 0
            for looked_at, entry in enumerate(self._index.walk(), 1):
                is_here = entry.slot is not None and slab_of(entry.slot) == slab
                if is_here and entry.host is HostState.READY and not entry.holds and not self.keeps_for_write(entry):
                    self.slots.give(self.evict(entry))
                    evicted += 1
                    if not evicted % EVICTED_AT_ONCE:
                        yield
                if not looked_at % LOOKED_AT_ONCE:
                    yield
            if self.slots.in_use(slab):
                continue
            del self._drains[waiting]
            self.slots.reclaim(slab)
            self._counters["slab_reclaimed"] += 1
            if self._users[waiting]:
                self._grow(waiting)

    def _is_drained(self, waiting: int) -> bool:
        slab = self._drains[waiting]
        return self.slots.in_use(slab) <= self._idle_in_slab[slab]

    def take_new_drains(self) -> bool:
        """Whether a slab began to be drained since the last call."""
        has_new, self._has_new_drains = self._has_new_drains, False
        return has_new

    def _grow_ahead(self, slot_bytes: int) -> bool:
        """Get more memory before the last slot is taken; says whether some is on its way."""
        if self.slots.is_growing(slot_bytes):
            return True
        if self.slots.free_count(slot_bytes) > self.slots.slot_count(slot_bytes) // 8:
            return False
        return self._grow(slot_bytes)

    def _grow(self, slot_bytes: int) -> bool:
        """Get the slot size one more slab if it may have one, else begin to drain one that it may have later.

        A drain may yield less than another size needs for one slot; what it yielded is left alone until there is more.
        """
        own = self._unkept_bytes(slot_bytes)
        if any(self._unkept_bytes(waiting) < own for waiting in self._drains):
            return False
        job = self.slots.grow(slot_bytes)
        if job is None:
            self._drain_for(slot_bytes)
            return False
        self._jobs.append(job)
        return True

    def _drain_for(self, slot_bytes: int) -> None:
        """Begin to take a slab from a slot size that nobody uses or that has more memory than this one.

        Beyond what their namespaces keep: of that nothing is taken, except for a size that has no slab at all.
        """
        richer = None if slot_bytes in self._drains else self._richer_than(slot_bytes)
        if richer is not None:
            slabs = [index for index in self.slots.slabs(richer) if self.slots.may_serve(index, slot_bytes)]
            if not slabs:
                return
            slab = min(slabs, key=lambda index: self.slots.in_use(index) - self._idle_in_slab[index])
            self.slots.drain(slab)
            self._drains[slot_bytes] = slab
            self._has_new_drains = True

    def _richer_than(self, slot_bytes: int) -> int | None:
        """The slot size that can best do without a slab, if there is one."""
        own, has_none = self._unkept_bytes(slot_bytes), self.slots.assigned_to(slot_bytes) == 0
        best, most = None, -self.slots.host_bytes
        for other in self.slots.sizes:
            left = self._unkept_bytes(other) - self.slots.slab_bytes(other) * (1 + self._drained_from(other))
            is_poorer = (self._users[other] and left <= own) or (self._kept_bytes(other) and left < 0)
            if other == slot_bytes or left <= most or (is_poorer and not has_none):
                continue
            if len(list(islice(self.slots.slabs(other), 2))) > bool(self._users[other]):  # not the last of one in use
                best, most = other, left
        return best

    def _drained_from(self, slot_bytes: int) -> int:
        slabs = (slab * SLOTS_PER_SLAB_MAX for slab in self._drains.values())
        return sum(self.slots.slot_bytes(first) == slot_bytes for first in slabs)

    def _unkept_bytes(self, slot_bytes: int) -> int:
        """What a slot size has beyond what its namespaces keep; negative: less than that."""
        return self.slots.assigned_to(slot_bytes) - self._kept_bytes(slot_bytes)

    def _kept_bytes(self, slot_bytes: int) -> int:
        return self._quotas.floor_bytes(slot_bytes, self.slots.limit_bytes)

    # -- tests -------------------------------------------------------------------------------------------------

    def check_integrity(self, reserved: dict[SlotId, bytes]) -> None:
        """Assert that slots, states and orders of eviction fit.

        Args:
            reserved: The slots that sessions hold empty, with the session's namespace.
        """
        entries = [entry for entry in self._index.entries() if entry.slot is not None]
        tenants = {entry.slot: entry for entry in entries if entry.slot is not None}
        assert len(tenants) == len(entries), "a slot holds two chunks"
        assert not set(reserved) & set(tenants), "a granted slot holds a chunk"
        self.slots.check_integrity({*reserved, *tenants})
        held = [(e.record.namespace, e.slot_bytes) for e in entries]
        held += [(namespace, self.slots.slot_bytes(slot)) for slot, namespace in reserved.items()]
        self.usage.check_integrity(held)
        states = Counter(entry.host for entry in entries)
        assert self.ready_count == states[HostState.READY], "ready count drifted"
        ready_bytes = sum(entry.slot_bytes for entry in entries if entry.host is HostState.READY)
        stats = self._stats[HOST]
        assert (stats.chunks, stats.size_bytes) == (self.ready_count, ready_bytes), "what came and left is not what is"
        assert self.sealing_count == states[HostState.SEALING], "sealing count drifted"
        assert all(tenants.get(entry.slot or 0) is entry for entry in self._short_tails), (
            "a tail is counted that is gone"
        )
        assert self.short_tail_bytes == sum(entry.slot_bytes for entry in self._short_tails), "bytes of tails drifted"
        assert self.leased_bytes == self.leased_by.total(), "leased bytes of sessions drifted"
        leased = {entry.record.key for entry in self._index.entries() if entry.leases}
        assert self._lessees.keys() == leased, "who leases what drifted"
        idle = [entry for entry in entries if entry.host is HostState.READY and entry.holds == 0]
        ordered = [entry for entry in self._index.entries() if entry.ordered >> HOST & 1]
        assert sum(len(order) for order in self._orders.values()) == len(ordered), "orders and chunks disagree"
        assert all(entry.host is HostState.READY for entry in ordered), "what is not ready is ordered"
        assert all(entry in self._orders[entry.slot_bytes, entry.is_unwritten] for entry in idle), (
            "an idle chunk is not ordered"
        )
        assert +self._idle_in_slab == Counter(slab_of(entry.slot or 0) for entry in idle), "idle counts drifted"
        for order in self._orders.values():
            order.check_integrity()
