"""One tier below host memory, as the hierarchy sees it: what is there, what is to be written, what failed, what goes.

Pure, like the hierarchy it belongs to. Two rules shape it (DESIGN rule 5): a child is written only after its parent is
present in the tier, and dropping a chunk drops its queued descendants; so what a tier holds is closed under prefixes,
up to the holes that failures leave. Where the bytes of a write come from is a subclass's business: ``front.py`` takes
them from host memory, ``back.py`` from the tier above.

Life of a write::

    claim -> QUEUED -> (source is there, parent PRESENT, room) -> WRITING -> PRESENT
                |  drop                                              |  failed
                +----------------------> ABSENT <--------------------+

What a shared tier holds is only partly known here, because others write and remove there, too: PRESENT is what was
written or found, most of them are forgotten some day (``hints.py``), and nothing is evicted from here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tiered_kv.hierarchy.admission import Admission
from tiered_kv.hierarchy.hints import forget_oldest
from tiered_kv.hierarchy.index import CLAIMED, Entry, HostState, Index, LowerState
from tiered_kv.hierarchy.lower_check import check_lower
from tiered_kv.hierarchy.order import Order
from tiered_kv.hierarchy.plan import Delete, Job, Outcome
from tiered_kv.hierarchy.shares import Taken

if TYPE_CHECKING:
    from tiered_kv.hierarchy.back import BackTier

WRITING_MAX = 16
"""Writes handed out at once: enough for every thread to have the next one; the rest can still be dropped."""


class LowerTier(ABC):
    """Bookkeeping of one lower tier.

    Attributes:
        is_shared: Others write and remove there, too; see the module's text.
        is_paused: No write is begun until :meth:`resume`: the last one found no room or no answer.
        behind: The tier that takes its bytes from this one, if there is one.
        admission: What is worth a write; set by the hierarchy.
        taken: What each namespace takes, without what is being deleted.
        queued_bytes: Host memory that pending writes hold.
        reserved_bytes: Bytes on the medium that are not ours to evict (foreign files found at start).

    Threads: one owner, the hierarchy. Units: bytes.
    """

    def __init__(self, tier: int, capacity_bytes: int | None, index: Index, jobs: list[Job], counters: Counter[str]):
        self.tier = tier
        self.capacity_bytes = capacity_bytes
        self.is_shared = False
        self.is_paused = False
        self.behind: BackTier | None = None
        self.admission = Admission()
        self.order = Order(1 + tier, index)  # blobs that may be evicted or forgotten: PRESENT or CORRUPT
        self.taken = Taken(index.shares, lambda: self.capacity_bytes)
        self.used_bytes = 0
        self.reserved_bytes = 0
        self.queued_bytes = 0
        self._writes_max = WRITING_MAX
        self._found_bytes = 0  # used at start, which may be more than the capacity
        self._deleting_bytes = 0
        self._ready: deque[Entry] = deque()  # may be written as soon as there is room; may hold dropped ones
        self._queue: OrderedDict[Entry, None] = OrderedDict()  # QUEUED, oldest claim first
        self._waiting: dict[Entry, list[Entry]] = {}  # children whose write waits for this chunk
        self._writing = 0
        self._corrupt: set[Entry] = set()  # CORRUPT, or DELETING because of it
        self._claims_after_delete: set[Entry] = set()  # DELETING but stored again
        self._pinned: set[bytes] = set()
        self._index = index
        self._jobs = jobs
        self._counters = counters

    @property
    @abstractmethod
    def pending(self) -> int:
        """Chunks that are to be written: what a drain waits for."""

    @property
    def backlog(self) -> int:
        """Chunks that wait to be written here or are being written, also those no drain waits for."""
        return len(self._queue) + self._writing

    @property
    def blob_count(self) -> int:
        """Blobs that can be had from here."""
        return len(self.order)

    @property
    def takes_writes(self) -> bool:
        """Whether a write may begin now."""
        return self._index.readable[self.tier] and not self.is_paused

    def resume(self) -> None:
        """Begin writes again, after a pause or when the tier is back."""
        self.is_paused = False
        self._pump()

    # -- writes ------------------------------------------------------------------------------------------------

    @abstractmethod
    def claim(self, entry: Entry) -> None:
        """Queue the entry's write if it is admitted and its parent is or will be here; otherwise it is not written."""

    @abstractmethod
    def _has_source(self, entry: Entry) -> bool:
        """Whether the bytes can be had now."""

    @abstractmethod
    def _size_bytes(self, entry: Entry) -> int:
        """What the blob counts against the capacity."""

    @abstractmethod
    def _begin(self, entry: Entry) -> None:
        """Hand out the job; the entry is WRITING already."""

    @abstractmethod
    def _end(self, entry: Entry) -> None:
        """Let go of what a pending write holds."""

    @abstractmethod
    def _put_off(self, entry: Entry) -> None:
        """A write to a shared tier found no room or no answer: try it later. The entry is WRITING."""

    def _claim_after_delete(self, entry: Entry) -> None:
        """A chunk that is stored again while its bad blob is being deleted is written after that."""
        if entry.lower[self.tier] is LowerState.CORRUPT:
            self.order.remove(entry)
            self._index.flows.left(entry, self.tier, "corrupt")
            self._delete(entry)
        if entry.lower[self.tier] is LowerState.DELETING:
            self._claims_after_delete.add(entry)

    def _start_or_wait(self, entry: Entry) -> None:
        """Write a queued chunk now if its parent is here, else when the parent gets here."""
        if self._may_write(entry):
            self._ready.append(entry)
            return
        parent = self._index.parent(entry)
        assert parent is not None and parent.lower[self.tier] in CLAIMED, "a queued write waits for nobody"
        self._waiting.setdefault(parent, []).append(entry)

    def _may_write(self, entry: Entry) -> bool:
        if entry.lower[self.tier] is not LowerState.QUEUED or not self._has_source(entry):
            return False
        parent = self._index.parent(entry)
        return entry.record.chunk_index == 0 or (parent is not None and parent.lower[self.tier] is LowerState.PRESENT)

    def _pump(self) -> None:
        """Start every write that fits; make room for the next one."""
        while self._ready and self._writing < self._writes_max and self.takes_writes:
            entry = self._ready[0]
            if not self._may_write(entry):  # dropped meanwhile; if it was claimed again, it is queued behind again
                self._ready.popleft()
                continue
            if (lack := self._make_room(entry)) is not None:
                if self._deleting_bytes:
                    return
                self.drop(entry, lack)
                continue
            self._ready.popleft()
            self._index.set_lower(entry, self.tier, LowerState.WRITING)
            del self._queue[entry]
            self._writing += 1
            self._count(entry, self._size_bytes(entry))
            self._begin(entry)

    def _count(self, entry: Entry, size_bytes: int) -> None:
        entry.lower_bytes[self.tier] = size_bytes
        self.used_bytes += size_bytes
        self.taken.add(entry.record.namespace, size_bytes)

    def _make_room(self, entry: Entry) -> str | None:
        """Start to delete what is in a write's way, if that can help; says what is lacking, None where it fits now."""
        if self.capacity_bytes is None:
            return None
        size, namespace = self._size_bytes(entry), entry.record.namespace
        own = self.taken.excess_bytes(namespace, size)
        if own > 0 and self._evict(own, self.order.walk(only=namespace)) < own:
            return "over_share"
        limit = self.capacity_bytes - self.reserved_bytes
        excess = self.used_bytes + size - limit
        if excess > self._deleting_bytes and size <= limit:
            self.evict(excess - self._deleting_bytes, namespace)
        return "no_room" if excess > 0 else None

    def written(self, entry: Entry, outcome: Outcome) -> None:
        """A write ended."""
        self._writing -= 1
        if outcome is Outcome.OK:
            self._index.set_lower(entry, self.tier, LowerState.PRESENT)
            self.order.add(entry)
            self._index.flows.came(entry, self.tier, "written")
            self._counters["written" if self.tier == 0 else "uploaded"] += 1
            self._end(entry)
            self._release(self._waiting.pop(entry, []))
            forget_oldest(self, self._index)
            if self.behind is not None:
                self.behind.claim(entry)
        elif self.is_shared and outcome in (Outcome.UNAVAILABLE, Outcome.NO_ROOM):
            self._counters[f"write_put_off_{outcome.value}"] += 1
            self.is_paused = True
            self._put_off(entry)
        else:
            self._counters[f"write_failed_{outcome.value}"] += 1
            self.forget(entry, LowerState.FOREIGN if outcome is Outcome.FOREIGN else LowerState.ABSENT)
            self._drop_descendants(entry)
            if outcome is Outcome.NO_ROOM:
                self.evict(self._size_bytes(entry), entry.record.namespace)  # fuller than we thought: room for the next
            self._end(entry)
        self._pump()

    def _release(self, waiting: list[Entry]) -> None:
        """Their parent is here: the writes that waited for it may begin."""
        self._ready.extend(waiting)

    def drop(self, entry: Entry, reason: str) -> None:
        """Give up a queued write and those of its descendants."""
        if entry.lower[self.tier] is LowerState.QUEUED:
            self._unqueue(entry, reason)
            self._drop_descendants(entry)

    def _unqueue(self, entry: Entry, reason: str) -> None:
        self._index.set_lower(entry, self.tier, LowerState.ABSENT)
        del self._queue[entry]
        self._counters[f"write_dropped_{reason}"] += 1
        self._end(entry)

    def _drop_descendants(self, entry: Entry) -> list[Entry]:
        """Give up the queued writes behind a chunk; returns them, parents first."""
        self._waiting.pop(entry, None)
        dropped = []
        stack = list(entry.children or ()) if entry.lower_children[self.tier] else []
        while stack:
            child = stack.pop()
            if child.lower[self.tier] is not LowerState.QUEUED:
                continue
            self._unqueue(child, "no_parent")
            self._waiting.pop(child, None)
            dropped.append(child)
            stack.extend(child.children or ())
        return dropped

    # -- what is found and what is not -------------------------------------------------------------------------

    def found(self, entry: Entry) -> None:
        """Somebody else has put the blob here."""
        if entry.lower[self.tier] is LowerState.ABSENT:
            self._index.set_lower(entry, self.tier, LowerState.PRESENT)
            self.order.add(entry)
            self._index.flows.came(entry, self.tier, "found")
            forget_oldest(self, self._index)

    def read_failed(self, entry: Entry, outcome: Outcome) -> None:
        """What a failed promotion leaves behind (DESIGN rule 4)."""
        self._counters[f"read_failed_{outcome.value}"] += 1
        if outcome not in (Outcome.MISSING, Outcome.CORRUPT, Outcome.FOREIGN):
            return
        assert entry.lower[self.tier] is LowerState.PRESENT, "a blob was evicted while it was read"
        self.order.remove(entry)
        self._index.flows.left(entry, self.tier, outcome.value)
        if outcome is Outcome.MISSING:
            self.forget(entry, LowerState.ABSENT)
        elif outcome is Outcome.CORRUPT:
            self._corrupt.add(entry)
            self._delete(entry)
        else:
            self._index.set_lower(entry, self.tier, LowerState.FOREIGN)  # its bytes still take their room
        self._tell_behind(entry)
        self._drop_descendants(entry)
        self._pump()

    def _tell_behind(self, entry: Entry) -> None:
        if self.behind is not None:
            self.behind.source_lost(entry)

    def forget(self, entry: Entry, state: LowerState) -> None:
        self.used_bytes -= entry.lower_bytes[self.tier]
        if entry.lower[self.tier] is not LowerState.DELETING:
            self.taken.remove(entry.record.namespace, entry.lower_bytes[self.tier])
        entry.lower_bytes[self.tier] = 0
        self._index.set_lower(entry, self.tier, state)

    def evict(self, size_bytes: int, namespace: bytes | None = None) -> int:
        """Start deleting at least ``size_bytes``, leaves first, by the order of eviction; returns what was found.

        The ``namespace`` that needs the room gives its own where all others are at their minima; None: minima give way.
        """
        tier = self.tier
        spare = self.order.walk(lambda one: not self.taken.keeps(one.record.namespace, one.lower_bytes[tier]))
        found = self._evict(size_bytes, spare)
        if found < size_bytes:
            found += self._evict(size_bytes - found, self.order.walk(only=namespace))
        return found

    def _evict(self, size_bytes: int, candidates: Iterable[Entry]) -> int:
        found = 0
        victims: list[Entry] = []
        for entry in candidates if not self.is_shared else ():
            if found >= size_bytes:
                break
            if entry.lower_children[self.tier] or self.is_used(entry) or entry.record.key in self._pinned:
                continue
            found += entry.lower_bytes[self.tier]
            victims.append(entry)
            self._delete(entry)  # its parent, which comes later in the order, is a leaf now
        for entry in victims:
            self.order.remove(entry)
            self._index.flows.left(entry, self.tier, "evicted")
        self._counters["lower_evicted"] += len(victims)
        return found

    def remove(self, entry: Entry, *, leaves_hole: bool) -> bool | None:
        """Delete a blob because somebody said so; False: it is in use or needed by others, None: it is not here."""
        if entry not in self.order:
            return False if entry.lower[self.tier] in CLAIMED else None
        if self.is_used(entry) or (entry.lower_children[self.tier] and not leaves_hole):
            return False
        self.order.remove(entry)
        self._index.flows.left(entry, self.tier, "removed")
        self._delete(entry)
        self._drop_descendants(entry)
        return True

    def disclaim(self, entry: Entry) -> None:
        """Nothing of the chunk is written any more that was not begun; nor of those behind it."""
        self._claims_after_delete.discard(entry)
        self.drop(entry, "erased")

    def set_pinned(self, keys: Iterable[bytes]) -> None:
        """Keep these chunks, and the prefixes before them, from eviction from now on, and no others."""
        self._pinned = {
            e.record.key for pin in filter(None, map(self._index.get, keys)) for e in self._index.prefix(pin)
        }

    def is_used(self, entry: Entry) -> bool:
        """Whether the blob is being read, into host memory or into the tier behind."""
        is_copied = self.behind is not None and entry.lower[self.behind.tier] is LowerState.WRITING
        return is_copied or entry.host is HostState.PROMOTING

    def _delete(self, entry: Entry) -> None:
        size = entry.lower_bytes[self.tier]
        self._deleting_bytes += size
        self.taken.remove(entry.record.namespace, size)
        self._index.set_lower(entry, self.tier, LowerState.DELETING)
        self._jobs.append(Delete(self.tier, entry.record, size))
        self._tell_behind(entry)

    def deleted(self, entry: Entry, outcome: Outcome) -> None:
        """A deletion ended. One that failed leaves the blob where it is and costs the write that needed its room."""
        self._deleting_bytes -= entry.lower_bytes[self.tier]
        is_claimed = entry in self._claims_after_delete
        self._claims_after_delete.discard(entry)
        if outcome in (Outcome.OK, Outcome.MISSING):
            self._corrupt.discard(entry)
            self.forget(entry, LowerState.ABSENT)
            if is_claimed:
                self.claim(entry)
            self._index.remove_if_gone(entry)
        else:
            self._counters["delete_failed"] += 1
            state = LowerState.CORRUPT if entry in self._corrupt else LowerState.PRESENT
            self._index.set_lower(entry, self.tier, state)
            self.taken.add(entry.record.namespace, entry.lower_bytes[self.tier])
            self.order.add(entry)
            self._index.flows.came(entry, self.tier, "kept", is_usable=state is LowerState.PRESENT)
            if self._ready:
                self.drop(self._ready[0], "no_room")
        self._pump()

    def restore(self, entry: Entry, size_bytes: int) -> None:
        """A blob found at start."""
        self._index.set_lower(entry, self.tier, LowerState.PRESENT)
        self._count(entry, size_bytes)
        self.order.add(entry)
        self._index.flows.came(entry, self.tier, "found")

    def restored(self, unlisted_bytes: int) -> None:
        """All blobs found at start were told: start deleting what passes the capacity (it may have shrunk)."""
        self.reserved_bytes = unlisted_bytes
        self._found_bytes = self.used_bytes
        self.evict_to_capacity()

    def evict_to_capacity(self) -> None:
        """Start deleting what passes the capacity: after a start, until the medium has really done it."""
        if self.capacity_bytes is not None:
            excess = self.used_bytes + self.reserved_bytes - self.capacity_bytes - self._deleting_bytes
            self.evict(max(0, excess))

    def check_integrity(self) -> None:
        """Assert that counts match the entries and that no write waits for nothing."""
        check_lower(self)
