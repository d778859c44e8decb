"""Bookkeeping of the host arena's slots, as integers: which are free, which slab serves which slot size.

The arena has a fixed number of slabs. A slab without memory belongs to nobody; when a slot size needs room, a slab is
assigned to it and given exactly as many bytes as its slots take, so the sum over slabs never passes ``host_bytes``
and no slab wastes a part of a slot. A slab changes its slot size by being drained: its free slots are handed out no
more, and once all its slots are free it belongs to nobody again.

While some process has pinned slabs for its GPU (:meth:`SlotPool.keep_memory`), a slab's memory stays what it is: the
driver goes on with the pages it pinned, whatever the file has later. A slab is then given its full size at once, and
keeps it when it belongs to nobody. Another slot size cuts slots from that, and wastes less than one slot of it.

A :data:`~tiered_kv.tiering.types.SlotId` is ``slab * SLOTS_PER_SLAB_MAX + index``. Called by ``host_tier.py`` only,
which decides when to grow and what to drain; must not know what lies in a slot.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from tiered_kv.tiering.types import Grow, SlotId

SLOTS_PER_SLAB_MAX = 1 << 18
SLAB_BYTES_MAX = 1 << 30
SLABS_WANTED = 8
"""Slabs a full arena is cut into at least, so that several slot sizes can share a small one."""


@dataclass(slots=True)
class _Slab:
    """One slab.

    Attributes:
        returned: Free slots that were taken before. Each slab has its own: a list of all slots would stand still for
            10 ms whenever a slab of 131,072 comes or goes.
        fresh: The first of the slots that were never taken; all behind it are free, too.
        memory_bytes: What it has or is just getting. At least what its slots take.
        kept_bytes: Of that, what it had before and keeps if it gets no more.
    """

    slot_bytes: int = 0
    slot_count: int = 0
    returned: list[SlotId] = field(default_factory=list)
    fresh: int = 0
    memory_bytes: int = 0
    kept_bytes: int = 0
    is_growing: bool = False
    is_draining: bool = False

    @property
    def free_count(self) -> int:
        """Slots that are not taken."""
        return len(self.returned) + self.slot_count - self.fresh


@dataclass(slots=True)
class _Size:
    """Sums over the slabs of one slot size.

    Attributes:
        slot_count: Slots that have their memory.
        growing: Slabs that are just getting theirs.
        free_count: Slots that can be taken now; leaves out slabs that are drained.
        usable: Slabs that have such slots.
        early: Growing slabs that have free slots.
    """

    slot_count: int = 0
    assigned_bytes: int = 0
    growing: int = 0
    free_count: int = 0
    usable: dict[int, None] = field(default_factory=dict)
    early: dict[int, None] = field(default_factory=dict)


class SlotPool:
    """Free slots by slot size.

    Attributes:
        host_bytes: Memory the slabs may take together.
        limit_bytes: The same, but no more than the machine gave when it last refused some.
        assigned_bytes: Memory that slabs take now or are about to get.
        keeps_memory: No slab gives any of it back.

    Units: bytes. Threads: one owner.
    """

    def __init__(self, host_bytes: int) -> None:
        self.host_bytes = host_bytes
        self.limit_bytes = host_bytes
        self.assigned_bytes = 0
        self.keeps_memory = False
        self.slab_bytes_max = min(SLAB_BYTES_MAX, max(host_bytes // SLABS_WANTED, 1))
        slab_count = -(-host_bytes // self.slab_bytes_max) + SLABS_WANTED
        self._slabs = [_Slab() for _ in range(slab_count)]
        self._sizes: dict[int, _Size] = {}

    @property
    def slab_count(self) -> int:
        return len(self._slabs)

    @property
    def sizes(self) -> list[int]:
        """Slot sizes that memory was ever assigned to."""
        return list(self._sizes)

    def slot_bytes(self, slot: SlotId) -> int:
        """Size of a slot that was handed out."""
        return self._slabs[slab_of(slot)].slot_bytes

    def slot_count(self, slot_bytes: int) -> int:
        """Slots of this size that exist now."""
        size = self._sizes.get(slot_bytes)
        return size.slot_count if size else 0

    def slot_count_max(self, slot_bytes: int) -> int:
        """Slots of this size the arena could hold if it served no other size."""
        return self.host_bytes // slot_bytes

    def slab_bytes(self, slot_bytes: int) -> int:
        """Memory that one full slab of this slot size takes."""
        if self.keeps_memory:
            return max(self.slab_bytes_max, slot_bytes)
        return max(self.slab_bytes_max // slot_bytes, 1) * slot_bytes

    def assigned_to(self, slot_bytes: int) -> int:
        """Bytes of host memory that slabs of this size take now or are about to get."""
        size = self._sizes.get(slot_bytes)
        return size.assigned_bytes if size else 0

    def free_count(self, slot_bytes: int) -> int:
        """Slots of this size that can be taken now."""
        size = self._sizes.get(slot_bytes)
        return size.free_count if size else 0

    def take(self, slot_bytes: int) -> SlotId | None:
        """A free slot, or None; the caller may then grow, evict, or do without."""
        size = self._sizes.get(slot_bytes)
        if size is None or not size.usable:
            return None
        size.free_count -= 1
        return self._take_from(size.usable)

    def take_early(self, slot_bytes: int) -> SlotId | None:
        """A slot of a slab that is just getting its memory, or None. It must not be touched before :meth:`grown`."""
        size = self._sizes.get(slot_bytes)
        if size is None or not size.early:
            return None
        return self._take_from(size.early)

    def _take_from(self, slabs: dict[int, None]) -> SlotId:
        """A slot of the slab that was added last, which leaves with its last one."""
        index = next(reversed(slabs))
        slab = self._slabs[index]
        if slab.returned:
            slot = slab.returned.pop()
        else:
            slot = index * SLOTS_PER_SLAB_MAX + slab.fresh
            slab.fresh += 1
        if not slab.free_count:
            del slabs[index]
        return slot

    def has_memory(self, slot: SlotId) -> bool:
        """Whether the slot's slab has its memory."""
        return not self._slabs[slab_of(slot)].is_growing

    def give(self, slot: SlotId) -> None:
        """Return a slot taken before."""
        index = slab_of(slot)
        slab = self._slabs[index]
        slab.returned.append(slot)
        size = self._sizes[slab.slot_bytes]
        if slab.is_growing:
            size.early[index] = None
        elif not slab.is_draining:
            size.usable[index] = None
            size.free_count += 1

    # -- slabs -------------------------------------------------------------------------------------------------

    def keep_memory(self, *, is_kept: bool) -> None:
        """From now on no slab gives memory back, or slabs may again; then what belongs to nobody has none."""
        self.keeps_memory = is_kept
        if not is_kept:
            for index, slab in enumerate(self._slabs):
                slab.kept_bytes = 0
                if not slab.slot_count:
                    self.assigned_bytes -= slab.memory_bytes
                    self._slabs[index] = _Slab()

    def memory_bytes(self, slab_index: int) -> int:
        """Memory that a slab has or is just getting."""
        return self._slabs[slab_index].memory_bytes

    def memory_for(self, slab_index: int, slot_bytes: int) -> int:
        """Memory that a slab would have if it were assigned to this slot size now; too little for a slot: 0."""
        room = self.limit_bytes - self.assigned_bytes
        if self.keeps_memory:
            kept = self._slabs[slab_index].memory_bytes
            memory = max(kept, min(self.slab_bytes(slot_bytes), SLAB_BYTES_MAX, kept + room))
            return memory if memory >= slot_bytes else 0
        count = min(self.slab_bytes(slot_bytes), SLAB_BYTES_MAX, room) // slot_bytes
        return min(count, SLOTS_PER_SLAB_MAX) * slot_bytes

    def grow(self, slot_bytes: int) -> Grow | None:
        """Assign a slab to this slot size; its slots appear with :meth:`grown`. None when the budget is spent.

        One that kept its memory comes first, of these the largest: it costs nothing.
        """
        if not self.keeps_memory and self.limit_bytes - self.assigned_bytes < slot_bytes:
            return None  # asked for each slot that is taken in a full cache
        empty = sorted((i for i, s in enumerate(self._slabs) if not s.slot_count), key=lambda i: -self.memory_bytes(i))
        index = next((i for i in empty if self.memory_for(i, slot_bytes) > 0), None)
        if index is None:
            return None
        memory, kept = self.memory_for(index, slot_bytes), self._slabs[index].memory_bytes
        count = min(memory // slot_bytes, SLOTS_PER_SLAB_MAX)
        slab = _Slab(slot_bytes, count, memory_bytes=memory, kept_bytes=kept, is_growing=True)
        self._slabs[index] = slab
        size = self._sizes.setdefault(slot_bytes, _Size())
        size.growing += 1
        size.early[index] = None
        size.assigned_bytes += memory
        self.assigned_bytes += memory - kept
        return Grow(index, memory)

    def is_growing(self, slot_bytes: int) -> bool:
        """Whether a slab of this slot size is just getting its memory."""
        size = self._sizes.get(slot_bytes)
        return size is not None and size.growing > 0

    def grown(self, slab_index: int, *, succeeded: bool) -> None:
        """The slab has its memory, or could not get it and belongs to nobody again; then its slots must all be back.

        After a refusal nothing grows until :meth:`allow_growth`: asking again at once would only be refused again.
        """
        slab = self._slabs[slab_index]
        size = self._sizes[slab.slot_bytes]
        slab.is_growing = False
        size.growing -= 1
        size.early.pop(slab_index, None)
        if succeeded:
            size.slot_count += slab.slot_count
            if slab.free_count:
                size.free_count += slab.free_count
                size.usable[slab_index] = None
            return
        assert slab.free_count == slab.slot_count, "a slab without memory has slots in use"
        self._take_away(slab_index, slab.kept_bytes)
        self.limit_bytes = self.assigned_bytes

    def allow_growth(self) -> None:
        """Forget that the machine refused memory."""
        self.limit_bytes = self.host_bytes

    def slots_of(self, slab_index: int) -> range:
        """Ids of a slab's slots."""
        base = slab_index * SLOTS_PER_SLAB_MAX
        return range(base, base + self._slabs[slab_index].slot_count)

    def in_use(self, slab_index: int) -> int:
        """How many of a slab's slots are taken."""
        slab = self._slabs[slab_index]
        return slab.slot_count - slab.free_count

    def slabs(self, slot_bytes: int) -> Iterator[int]:
        """Slabs of a slot size that have their memory and are not drained."""
        for index, slab in enumerate(self._slabs):
            if slab.slot_count and slab.slot_bytes == slot_bytes and not (slab.is_growing or slab.is_draining):
                yield index

    def is_draining(self, slot: SlotId) -> bool:
        """Whether the slot's slab is being taken away from its slot size."""
        return self._slabs[slab_of(slot)].is_draining

    def drain(self, slab_index: int) -> None:
        """Hand out no more slots of this slab."""
        slab = self._slabs[slab_index]
        slab.is_draining = True
        size = self._sizes[slab.slot_bytes]
        size.free_count -= slab.free_count
        size.usable.pop(slab_index, None)

    def may_serve(self, slab_index: int, slot_bytes: int) -> bool:
        """Whether a slab would be of use to this slot size once it belongs to nobody."""
        return not self.keeps_memory or self.memory_for(slab_index, slot_bytes) > 0

    def reclaim(self, slab_index: int) -> None:
        """Take a drained slab, whose slots are all free, away from its slot size."""
        slab = self._slabs[slab_index]
        assert slab.is_draining, "a slab was reclaimed without being drained"
        assert slab.free_count == slab.slot_count, "a slab with slots in use was reclaimed"
        self._sizes[slab.slot_bytes].slot_count -= slab.slot_count
        self._take_away(slab_index, slab.memory_bytes if self.keeps_memory else 0)

    def _take_away(self, slab_index: int, kept_bytes: int) -> None:
        """The slab belongs to nobody again, with what memory it keeps."""
        slab = self._slabs[slab_index]
        self._sizes[slab.slot_bytes].assigned_bytes -= slab.memory_bytes
        self.assigned_bytes += kept_bytes - slab.memory_bytes
        self._slabs[slab_index] = _Slab(memory_bytes=kept_bytes)

    # -- tests -------------------------------------------------------------------------------------------------

    def check_integrity(self, in_use: set[SlotId]) -> None:
        """Assert that every slot is either free once or in use, and that memory stays under its limit."""
        free: list[SlotId] = []
        for index, slab in enumerate(self._slabs):
            free += [*slab.returned, *self.slots_of(index)[slab.fresh :]]
            size = self._sizes.get(slab.slot_bytes, _Size())
            is_takable = slab.free_count > 0 and not slab.is_draining
            assert (index in size.early) == (is_takable and slab.is_growing), "a growing slab's slots are not offered"
            assert (index in size.usable) == (is_takable and not slab.is_growing), "a slab's slots are not offered"
        assert len(free) == len(set(free)), "a slot is free twice"
        assert not set(free) & in_use, "a slot is free and in use"
        every = {slot for index in range(len(self._slabs)) for slot in self.slots_of(index)}
        assert in_use <= every, "a slot was invented"
        assert set(free) | in_use == every, "a slot leaked"
        for index in range(len(self._slabs)):
            used = sum(slab_of(slot) == index for slot in in_use)
            assert self.in_use(index) == used, "a slab's free slots were miscounted"
        assert self.assigned_bytes == sum(s.memory_bytes for s in self._slabs) <= self.host_bytes
        for slab in self._slabs:
            assert slab.slot_count * slab.slot_bytes <= slab.memory_bytes, "a slot lies behind its slab's memory"
            assert slab.kept_bytes <= slab.memory_bytes, "a slab kept more than it has"
            assert slab.slot_count or self.keeps_memory or not slab.memory_bytes, "memory belongs to nobody"
        for slot_bytes, size in self._sizes.items():
            slabs = [s for s in self._slabs if s.slot_bytes == slot_bytes]
            assert size.slot_count == sum(s.slot_count for s in slabs if not s.is_growing), "slots were miscounted"
            assert size.assigned_bytes == sum(s.memory_bytes for s in slabs), "a size's memory was miscounted"
            assert size.growing == sum(s.is_growing for s in slabs), "a slab grows unnoticed"
            free_count = sum(self._slabs[index].free_count for index in size.usable)
            assert size.free_count == free_count, "free slots were miscounted"


def slab_of(slot: SlotId) -> int:
    """Number of the slab a slot lies in."""
    return slot // SLOTS_PER_SLAB_MAX
