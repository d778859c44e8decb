"""One tier below host memory: what is there, what is to be written, what failed, and what is evicted.

Pure: no I/O, no clock. Two rules shape it (rule 5): a child appears in the tier only after its parent, and dropping a
chunk drops its queued descendants; so what a tier holds is closed under prefixes, up to the holes that failures leave.
Where the bytes of a write come from, and which chunks are offered, is its source's part:
``write_through.py`` (host memory) or ``upload.py`` (the tier above).

Life of a write::

    enqueue -> QUEUED -> (source is there, parent PRESENT*, room) -> WRITING -> PRESENT
                  |  drop                                               |  failed
                  +----------------------> ABSENT <---------------------+

    * or WRITING, where whoever performs the two keeps their order (``Source.may_follow``)

A shared tier is only partly known here, because other servers write and remove there, too: PRESENT is what was written
or found, most of it is forgotten some day (``HINTS_MAX``), and nothing is evicted from here. Before a chunk is written
behind one of which nothing was heard for a while, that one and the prefix's first chunk are asked for: others remove
from the end of a prefix, or all of it, or what is oldest. If one is gone, the prefix is written again as far as its
bytes are here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.tiering.admission import Admission
from tiered_kv.tiering.eviction import EvictionOrder
from tiered_kv.tiering.eviction_policy import EvictionPolicy
from tiered_kv.tiering.index import CLAIMED, BlobState, Entry, HostState, Index
from tiered_kv.tiering.quotas import NamespaceUsage, Quotas
from tiered_kv.tiering.stats import Outbox
from tiered_kv.tiering.types import HOST, Delete, Job, Outcome, Removal, TierSpec

HINTS_MAX = 1 << 18
"""Blobs of a shared tier that are remembered: 4 TiB of 16 MiB chunks; what is forgotten is found again by a search.
Other servers fill it, too, so there is no end to what may be found there."""

CONFIRMED_MAX = 1 << 14
"""Per generation, chunks of a shared tier that are known to be there now: what is written behind others is asked first
where more were written meanwhile."""

WRITTEN_AGAIN_AT_ONCE = 64
"""Chunks of a lost prefix that are queued in one step, the deepest first: before the next one more are found lost."""

EVICTED_AT_ONCE = 64
"""Chunks of its own that one write of a namespace pushes out after its maximum was lowered: about a millisecond."""


class Source(Protocol):
    """Where the bytes of a tier's writes come from, and which writes are offered to it.

    Attributes:
        waiting_first: Writes that waited for their parent go before those of other prefixes.
    """

    waiting_first: bool

    @property
    def is_available(self) -> bool:
        """Whether any bytes can be had now."""

    def has_bytes(self, entry: Entry) -> bool:
        """Whether the chunk's bytes can be had now."""

    def may_follow(self, entry: Entry, parent: Entry) -> bool:
        """Whether a write may be handed out while its parent's runs: it ends behind that one, or is not made."""

    def size_bytes(self, entry: Entry) -> int:
        """What the blob counts against the capacity."""

    def job(self, entry: Entry) -> Job:
        """The job that writes the chunk; the entry is WRITING already."""

    def drop_counter(self, entry: Entry) -> str:
        """How the names of the counters of dropped writes like this one's begin; asked before it is released."""

    def release(self, entry: Entry) -> None:
        """Let go of what a pending write holds."""

    def queue_again(self, chunks: Sequence[Entry]) -> bool:
        """Hold what was thought to be here, and has bytes, for a write; False: there is no room for that now."""

    def put_back(self, entry: Entry) -> None:
        """A write to a shared tier found no room or no answer: try it later. The entry is WRITING."""

    def enqueue_write(self, entry: Entry) -> None:
        """Queue the write if it is admitted and its parent is or will be here; otherwise it is not written."""

    def not_deleted(self, entry: Entry) -> None:
        """A chunk was to be written once its blob was deleted, and that failed."""


class NextSource(Protocol):
    """The source of the tier behind, which reads the blobs of this one."""

    def is_reading(self, entry: Entry) -> bool:
        """Whether the blob here is being read."""

    def source_lost(self, entry: Entry) -> None:
        """The blob here cannot be had any more."""

    def enqueue_write(self, entry: Entry) -> None:
        """The blob was written here: it may be written there."""

    def enqueue_recovered(self, entry: Entry) -> None:
        """The blob was here before: it may be there already."""


class SecondaryTier:
    """Bookkeeping of one secondary tier: the write queue, the blobs that are there, the bytes they take.

    The only writer of ``Entry.blobs`` and ``Entry.blob_bytes`` of its tier, through the index.

    Attributes:
        is_shared: Other servers write and remove there, too; see the module's text.
        is_paused: No write is begun until :meth:`resume`: the last one found no room or no answer.
        admission: Which chunks are worth a write. Its counts are written by the source.
        order: Blobs that may be evicted or forgotten: PRESENT or CORRUPT.
        usage: Bytes of each namespace, without what is being deleted.
        used_bytes: Bytes of all blobs here or being written or deleted.
        reserved_bytes: Bytes on the medium that are not ours to evict (foreign files found at start).
        pinned_bytes: Of the blobs that pins keep, as of the last look at the pins.

    Written here only, but for ``admission``. Threads: one owner, tiering. Units: bytes.
    """

    def __init__(
        self,
        number: int,
        spec: TierSpec,
        source: Source,
        index: Index,
        quotas: Quotas,
        policy: type[EvictionPolicy],
        outbox: Outbox,
        writes_max: int,
        next_source: NextSource | None,
    ) -> None:
        """Start empty.

        Args:
            writes_max: Writes handed out at once.
            next_source: Takes its bytes from this tier.
        """
        self.number = number
        self.capacity_bytes = None if spec.is_shared else spec.capacity_bytes
        self.is_shared = spec.is_shared
        self.is_paused = False
        self.admission = Admission(spec.admission)
        self.order = EvictionOrder(number, index, quotas, policy)
        self.usage = NamespaceUsage(quotas, lambda: self.capacity_bytes)
        self.used_bytes = 0
        self.reserved_bytes = 0
        self.pinned_bytes = 0
        self._source = source
        self._next_source = next_source
        self._writes_max = writes_max
        self._found_bytes = 0  # used at start, which may be more than the capacity
        self._deleting_bytes = 0
        self._queue: OrderedDict[Entry, None] = OrderedDict()  # QUEUED, oldest first
        self._ready: OrderedDict[Entry, None] = OrderedDict()  # of these, what may be written once there is room
        self._waiting: dict[Entry, dict[Entry, None]] = {}  # and the children whose write waits for this chunk
        self._writing = 0
        self._corrupt: set[Entry] = set()  # CORRUPT, or DELETING because of it
        self._enqueue_after_delete: set[Entry] = set()  # DELETING but stored again
        self._evicting: set[Entry] = set()  # DELETING to make room, not because somebody wants it gone
        self._pinned: set[bytes] | None = set()
        self._confirmed: set[bytes] = set()  # keys of what a shared tier has, by its own word, since the last aging
        self._confirmed_before: set[bytes] = set()
        self._tried_again: set[Entry] = set()  # queued or WRITING; the prefix before it was lost once, and queued again
        self._index = index
        self._jobs = outbox.jobs
        self._counters = outbox.counters
        self._stats = outbox.stats

    @property
    def backlog(self) -> int:
        """Chunks that wait to be written here or are being written."""
        return len(self._queue) + self._writing

    @property
    def blob_count(self) -> int:
        """Blobs that can be had from here."""
        return len(self.order)

    @property
    def takes_writes(self) -> bool:
        """Whether a write may begin now."""
        return self._index.readable[self.number] and not self.is_paused and self._source.is_available

    def contains(self, entry: Entry) -> bool:
        """Whether the blob is here or is going to be."""
        return entry.blobs[self.number] in CLAIMED

    def resume(self) -> None:
        """Begin writes again, after a pause or when the tier is back."""
        self.is_paused = False
        self.start_writes()

    # -- writes ------------------------------------------------------------------------------------------------

    # The next ones are called by the source.

    def queue(self, entry: Entry) -> None:
        """Put a chunk that is ABSENT here at the end of the queue."""
        self._index.set_blob_state(entry, self.number, BlobState.QUEUED)
        self._queue[entry] = None

    def requeue(self, entry: Entry) -> None:
        """Queue a chunk again whose write was put back: it is the next to be written, once its parent is here."""
        self.release_bytes(entry, BlobState.QUEUED)
        self._queue[entry] = None
        if self._may_write(entry):
            self._write_next(entry)
        else:
            self.start_or_wait(entry)

    def newest_queued(self) -> Iterator[Entry]:
        """Queued chunks, newest first. The queue must not change while more are asked for."""
        return reversed(self._queue)

    def prioritize(self, entry: Entry) -> None:
        """A new chunk waits for this one: write it, or what it waits for itself, next."""
        node: Entry | None = entry
        while node is not None and node.blobs[self.number] is BlobState.QUEUED:
            if self._may_write(node):
                self._write_next(node)
                return
            node = self._index.parent(node)

    def enqueue_after_delete(self, entry: Entry) -> None:
        """A chunk that is stored again while its bad blob is being deleted is written after that."""
        if entry.blobs[self.number] is BlobState.CORRUPT:
            self.order.remove(entry)
            self._stats.removed(entry, self.number, "corrupt")
            self._delete(entry)
        if entry.blobs[self.number] is BlobState.DELETING:
            self._enqueue_after_delete.add(entry)

    def is_coming(self, entry: Entry) -> bool:
        """Whether the blob is here or is going to be, also behind the deletion of a bad one."""
        return self.contains(entry) or entry in self._enqueue_after_delete

    def start_or_wait(self, entry: Entry) -> None:
        """Write a queued chunk now if its parent is here, else when the parent gets here."""
        if self._may_write(entry):
            self._ready[entry] = None
            return
        parent = self._index.parent(entry)
        assert parent is not None and self.is_coming(parent), "a queued write waits for nobody"
        self._waiting.setdefault(parent, {})[entry] = None

    def _write_next(self, entry: Entry) -> None:
        self._ready[entry] = None
        self._ready.move_to_end(entry, last=False)

    def _may_write(self, entry: Entry) -> bool:
        if entry.blobs[self.number] is not BlobState.QUEUED or not self._source.has_bytes(entry):
            return False
        if not entry.record.chunk_index:
            return True
        parent = self._index.parent(entry)
        state = BlobState.ABSENT if parent is None else parent.blobs[self.number]
        return state is BlobState.PRESENT or (
            state is BlobState.WRITING and parent is not None and self._source.may_follow(entry, parent)
        )

    def start_writes(self) -> None:
        """Start every write that fits; make room for the next one."""
        while self._ready and self._writing < self._writes_max and self.takes_writes:
            entry = next(iter(self._ready))
            if (lack := self._make_room(entry)) is not None:
                if self._deleting_bytes:
                    return
                self.drop(entry, lack)
                continue
            self._leave_queue(entry)
            self._index.set_blob_state(entry, self.number, BlobState.WRITING)
            self._writing += 1
            self._count(entry, self._source.size_bytes(entry))
            self._jobs.append(self._source.job(entry))
            if entry in self._waiting:
                self._let_follow(entry)

    def _let_follow(self, parent: Entry) -> None:
        """The parent's write is handed out: so may those that can be made behind it."""
        waiting = self._waiting[parent]
        for entry in list(filter(self._may_write, waiting)):
            del waiting[entry]
            self._ready[entry] = None
        if not waiting:
            del self._waiting[parent]

    def _count(self, entry: Entry, size_bytes: int) -> None:
        self._index.set_blob_bytes(entry, self.number, size_bytes)
        self.used_bytes += size_bytes
        self.usage.add(entry.record.namespace, size_bytes)

    def _make_room(self, entry: Entry) -> str | None:
        """Start to delete what is in a write's way, if that can help; says what is lacking, None where it fits now."""
        if self.capacity_bytes is None:
            return None
        size, namespace = self._source.size_bytes(entry), entry.record.namespace
        own = min(self.usage.excess_bytes(namespace, size), EVICTED_AT_ONCE * size)
        if own > 0 and self._evict(own, self.order.candidates(only=namespace)) < own:
            return "over_share"
        limit = self.capacity_bytes - self.reserved_bytes
        excess = self.used_bytes + size - limit
        if excess > self._deleting_bytes and size <= limit:
            self.evict(excess - self._deleting_bytes, namespace)
        return "no_room" if excess > 0 else None

    def written(self, entry: Entry, outcome: Outcome, behind: Sequence[ChunkRecord] = (), held: int = 0) -> None:
        """A write ended.

        Args:
            behind: Chunks that it asked for first.
            held: Of a write without its prefix, how many of these are there, from the first on.
        """
        self._writing -= 1
        if outcome is Outcome.OK:
            self._confirm([*behind, entry.record])
            self._tried_again.discard(entry)
            self._index.set_blob_state(entry, self.number, BlobState.PRESENT)
            self.order.add(entry)
            self._stats.inserted(entry, self.number, "written")
            self._counters["written" if self.number == HOST + 1 else "uploaded"] += 1
            self._source.release(entry)
            self._release_waiting(entry)
            self._forget_oldest()
            if self._next_source is not None:
                self._next_source.enqueue_write(entry)
        elif self.is_shared and outcome in (Outcome.UNAVAILABLE, Outcome.NO_ROOM):
            self._counters[f"write_put_off_{outcome.value}"] += 1
            self.is_paused = True
            self._source.put_back(entry)
        elif self.is_shared and outcome is Outcome.NO_PARENT:
            self._counters["upload_prefix_lost"] += 1
            self._confirm(behind[:held])
            self._write_again(entry, behind[held])
        else:
            if outcome in (Outcome.ROW_GONE, Outcome.ROW_CHANGED):  # the tier did not fail
                self._counters[f"{self._source.drop_counter(entry)}_taken_back"] += 1
            elif outcome is Outcome.NO_PARENT:
                self._counters[f"{self._source.drop_counter(entry)}_no_parent"] += 1
            else:
                self._counters[f"write_failed_{outcome.value}"] += 1
            if outcome is Outcome.ROW_CHANGED:
                self._corrupt.add(entry)  # takes its room until it is deleted
                self._delete(entry)
            else:
                self.release_bytes(entry, BlobState.FOREIGN if outcome is Outcome.FOREIGN else BlobState.ABSENT)
            self.drop_descendants(entry)
            if outcome is Outcome.NO_ROOM:
                self.evict(
                    self._source.size_bytes(entry), entry.record.namespace
                )  # fuller than we thought: room for the next
            self._source.release(entry)
        self.start_writes()

    def _release_waiting(self, parent: Entry) -> None:
        """The parent is here: the writes that waited for it may begin."""
        waiting = self._waiting.pop(parent, {})
        if not self._source.waiting_first:
            self._ready.update(waiting)
            return
        for entry in reversed(waiting):
            self._write_next(entry)

    def _leave_queue(self, entry: Entry) -> None:
        """The chunk is not QUEUED any more; nothing here remembers it.

        A tier that takes no writes may drop and queue chunks for days.
        """
        del self._queue[entry]
        self._ready.pop(entry, None)
        parent = self._index.parent(entry)
        if parent is not None and (siblings := self._waiting.get(parent)) is not None:
            siblings.pop(entry, None)
            if not siblings:
                del self._waiting[parent]

    def drop(self, entry: Entry, reason: str) -> None:
        """Give up a queued write and those of its descendants."""
        if entry.blobs[self.number] is BlobState.QUEUED:
            self._unqueue(entry, reason)
            self.drop_descendants(entry)

    def _unqueue(self, entry: Entry, reason: str | None) -> None:
        self._tried_again.discard(entry)
        self._index.set_blob_state(entry, self.number, BlobState.ABSENT)
        self._leave_queue(entry)
        if reason is not None:
            self._counters[f"{self._source.drop_counter(entry)}_{reason}"] += 1
        self._source.release(entry)

    def drop_descendants(self, entry: Entry, may_wait: Callable[[Entry], bool] | None = None) -> list[Entry]:
        """Give up the queued writes behind a chunk.

        Args:
            may_wait: Whether the caller puts off a write, which is not given up then.

        Returns:
            What the caller is to put off, parents first.
        """
        self._waiting.pop(entry, None)
        put_off = []
        stack = list(entry.children) if entry.claimed_children[self.number] else []
        while stack:
            child = stack.pop()
            if child.blobs[self.number] is not BlobState.QUEUED:
                continue
            waits = may_wait is not None and may_wait(child)
            self._unqueue(child, None if waits else "no_parent")
            self._waiting.pop(child, None)
            if waits:
                put_off.append(child)
            stack.extend(child.children)
        return put_off

    # -- what others may have removed --------------------------------------------------------------------------

    def unconfirmed_before(self, entry: Entry) -> tuple[ChunkRecord, ...]:
        """Chunks before one that a shared tier was not asked for lately: the first of its prefix, and its parent.

        None where its parent was written or asked for lately: then its first chunk was asked for a while before that.
        """
        parent = self._index.parent(entry)
        if not self.is_shared or parent is None or self._is_confirmed(parent):
            return ()
        first = self._index.prefix(parent)[-1]
        asked = (parent,) if first is parent or self._is_confirmed(first) else (first, parent)
        return tuple(one.record for one in asked)

    def _is_confirmed(self, entry: Entry) -> bool:
        return entry.record.key in self._confirmed or entry.record.key in self._confirmed_before

    def _confirm(self, records: Sequence[ChunkRecord]) -> None:
        if self.is_shared:
            if len(self._confirmed) >= CONFIRMED_MAX:
                self.age_confirmed()
            self._confirmed.update(record.key for record in records)

    def age_confirmed(self) -> None:
        """Ask again for what was there before the last call; a steady pace of calls bounds how long it is believed."""
        self._confirmed_before, self._confirmed = self._confirmed, set()

    def _write_again(self, entry: Entry, lost: ChunkRecord) -> None:
        """A chunk was not written, because one before it is gone: write its prefix again, or not this one, either.

        Once for each chunk: where a limit pushes out what is written, prefixes would be written for ever.
        """
        gone = self._index.get(lost.key)
        if gone is not None and self._is_only_believed(gone) and not self._source.has_bytes(gone):
            self._lost(gone, "missing", BlobState.ABSENT)
            self.drop_descendants(gone)
            self._index.remove_if_gone(gone)
        chunks: list[Entry] = []
        node = self._index.parent(entry)
        while node is not None and len(chunks) < WRITTEN_AGAIN_AT_ONCE:
            if not self._is_only_believed(node) or not self._source.has_bytes(node):
                break
            chunks.append(node)
            node = self._index.parent(node)
        is_whole = bool(chunks) and not chunks[-1].record.chunk_index
        is_behind_others = node is not None and node.blobs[self.number] in CLAIMED
        may_follow = bool(chunks) and (is_whole or is_behind_others) and entry not in self._tried_again
        if not may_follow or not self._source.queue_again(chunks):
            self._counters[f"{self._source.drop_counter(entry)}_no_parent"] += 1
            self.release_bytes(entry, BlobState.ABSENT)
            self.drop_descendants(entry)
            self._source.release(entry)
            return
        for chunk in reversed(chunks):
            self._lost(chunk, "missing", BlobState.QUEUED)
            self._queue[chunk] = None
            for child in [one for one in chunk.children if one in self._ready]:
                del self._ready[child]
                self._waiting.setdefault(chunk, {})[child] = None
            self.start_or_wait(chunk)
        self._tried_again.add(entry)
        self.requeue(entry)

    def _is_only_believed(self, entry: Entry) -> bool:
        """Whether all that is known of a blob is that it is here; of one that is being read its read will tell."""
        is_read = entry.host is HostState.PROMOTING and entry.source == self.number
        return entry.blobs[self.number] is BlobState.PRESENT and not is_read

    def _lost(self, entry: Entry, why: str, state: BlobState) -> None:
        self._confirmed.discard(entry.record.key)
        self._confirmed_before.discard(entry.record.key)
        self.order.remove(entry)
        self._stats.removed(entry, self.number, why)
        self.release_bytes(entry, state)

    # -- what is found and what is not -------------------------------------------------------------------------

    def found(self, entry: Entry) -> None:
        """Another server has put the blob here."""
        if entry.blobs[self.number] is BlobState.ABSENT:
            self._now_found(entry)
            self._forget_oldest()

    def found_queued(self, entry: Entry) -> None:
        """Another server has put a blob here that was queued: it need not be written."""
        self._leave_queue(entry)
        self._tried_again.discard(entry)
        self._source.release(entry)
        self._now_found(entry)
        self._release_waiting(entry)
        self.start_writes()

    def _now_found(self, entry: Entry) -> None:
        self._confirm([entry.record])  # if a peer alone has it, that puts it there within minutes
        self._index.set_blob_state(entry, self.number, BlobState.PRESENT)
        self.order.add(entry)
        self._stats.inserted(entry, self.number, "found")

    def read_failed(self, entry: Entry, outcome: Outcome, *, is_forgotten: bool = False) -> None:
        """What a failed promotion leaves behind (rule 4).

        Args:
            is_forgotten: A tier that gave no answer is taken to have nothing under that name.
        """
        self._counters[f"read_failed_{outcome.value}"] += 1
        self._index.found_beside[self.number].discard(entry.record.key)
        if is_forgotten:
            outcome = Outcome.MISSING
        if outcome not in (Outcome.MISSING, Outcome.CORRUPT, Outcome.FOREIGN):
            return
        assert entry.blobs[self.number] is BlobState.PRESENT, "a blob was evicted while it was read"
        self.order.remove(entry)
        self._stats.removed(entry, self.number, outcome.value)
        if outcome is Outcome.MISSING:
            self.release_bytes(entry, BlobState.ABSENT)
        elif outcome is Outcome.CORRUPT:
            self._corrupt.add(entry)
            self._delete(entry)
        else:
            self._index.set_blob_state(entry, self.number, BlobState.FOREIGN)  # its bytes still take their room
        self._source_lost(entry)
        self.drop_descendants(entry)
        self.start_writes()

    def _source_lost(self, entry: Entry) -> None:
        if self._next_source is not None:
            self._next_source.source_lost(entry)

    def release_bytes(self, entry: Entry, state: BlobState) -> None:
        """The blob takes no room any more; its entry gets another state."""
        if state is not BlobState.QUEUED:
            self._tried_again.discard(entry)
        self.used_bytes -= entry.blob_bytes[self.number]
        if entry.blobs[self.number] is not BlobState.DELETING:
            self.usage.remove(entry.record.namespace, entry.blob_bytes[self.number])
        self._index.set_blob_bytes(entry, self.number, 0)
        self._index.set_blob_state(entry, self.number, state)

    def evict(self, size_bytes: int, namespace: bytes | None = None) -> int:
        """Start deleting at least ``size_bytes``, leaves first, by the order of eviction.

        Args:
            namespace: Needs the room: its own blobs go where all other namespaces are at their minima. None: there
                minima give way.

        Returns:
            The bytes of what is being deleted.
        """
        found = self._evict(size_bytes, self.order.candidates(self._is_spare))
        if found < size_bytes:
            found += self._evict(size_bytes - found, self.order.candidates(only=namespace))
        return found

    def _is_spare(self, entry: Entry) -> bool:
        """Whether the entry's namespace stays at its minimum without the blob."""
        return not self.usage.keeps(entry.record.namespace, entry.blob_bytes[self.number])

    def _evict(self, size_bytes: int, candidates: Iterable[Entry]) -> int:
        pinned = self._pinned
        if pinned is None or self.is_shared:
            return 0
        found = 0
        victims: list[Entry] = []
        for entry in candidates:
            if found >= size_bytes:
                break
            if entry.claimed_children[self.number] or self.is_used(entry) or entry.record.key in pinned:
                continue
            found += entry.blob_bytes[self.number]
            victims.append(entry)
            self._delete(entry)  # its parent, which comes later in the order, is a leaf now
            self._evicting.add(entry)
        for entry in victims:
            self.order.remove(entry)
            self._stats.removed(entry, self.number, "evicted")
        self._counters["lower_evicted"] += len(victims)
        return found

    def remove(self, entry: Entry, *, leaves_hole: bool) -> Removal:
        """Delete a blob because an operator said so, unless it is in use or blobs here depend on it.

        Args:
            leaves_hole: Also one on which blobs here depend.
        """
        if entry not in self.order:
            return Removal.KEPT if self.contains(entry) else Removal.ABSENT
        if self.is_used(entry) or (entry.claimed_children[self.number] and not leaves_hole):
            return Removal.KEPT
        self.order.remove(entry)
        self._stats.removed(entry, self.number, "removed")
        self._delete(entry)
        self.drop_descendants(entry)
        return Removal.REMOVED

    def cancel_write(self, entry: Entry) -> None:
        """Nothing of the chunk is written any more that was not begun; nor of those behind it."""
        if entry in self._enqueue_after_delete:
            self._enqueue_after_delete.remove(entry)
            self.drop_descendants(entry)
        self._evicting.discard(entry)
        self.drop(entry, "erased")

    def set_pinned(self, keys: set[bytes], size_bytes: int) -> None:
        """Keep these from eviction, which have so many bytes here, and no others."""
        self._pinned, self.pinned_bytes = keys, size_bytes

    def keep_all(self) -> None:
        """Evict nothing until it is known what is pinned."""
        self._pinned = None

    @property
    def knows_pins(self) -> bool:
        """Whether it is known what operators and requests want kept here."""
        return self._pinned is not None

    def is_pinned(self, entry: Entry) -> bool:
        """Whether an operator or a request wants the chunk kept here, as far as that is known."""
        return self._pinned is not None and entry.record.key in self._pinned

    def is_used(self, entry: Entry) -> bool:
        """Whether the blob is being read, into host memory or into the tier behind."""
        is_copied = self._next_source is not None and self._next_source.is_reading(entry)
        return is_copied or entry.host is HostState.PROMOTING

    def _delete(self, entry: Entry) -> None:
        size = entry.blob_bytes[self.number]
        self._deleting_bytes += size
        self.usage.remove(entry.record.namespace, size)
        self._index.set_blob_state(entry, self.number, BlobState.DELETING)
        self._jobs.append(Delete(self.number, entry.record, size))
        self._source_lost(entry)

    def deleted(self, entry: Entry, outcome: Outcome) -> None:
        """A deletion ended. One that failed leaves the blob where it is and costs the write that needed its room."""
        self._deleting_bytes -= entry.blob_bytes[self.number]
        is_stored_again, was_evicted = entry in self._enqueue_after_delete, entry in self._evicting
        self._enqueue_after_delete.discard(entry)
        self._evicting.discard(entry)
        if outcome in (Outcome.OK, Outcome.MISSING):
            self._corrupt.discard(entry)
            self.release_bytes(entry, BlobState.ABSENT)
            if is_stored_again:
                self._source.enqueue_write(entry)
                if not self.contains(entry):
                    self.drop_descendants(entry)
            self._index.remove_if_gone(entry)
        else:
            self._counters["delete_failed"] += 1
            state = BlobState.CORRUPT if entry in self._corrupt else BlobState.PRESENT
            self._index.set_blob_state(entry, self.number, state)
            self.usage.add(entry.record.namespace, entry.blob_bytes[self.number])
            self.order.add(entry)
            self._stats.inserted(entry, self.number, "kept", is_usable=state is BlobState.PRESENT)
            if was_evicted and self._next_source is not None:  # its upload was given up when the deletion began
                self._next_source.enqueue_recovered(entry)
            if is_stored_again:
                self._source.not_deleted(entry)
            if self._ready:
                self.drop(next(iter(self._ready)), "no_room")
            if state is BlobState.PRESENT:
                self._release_waiting(entry)
            else:
                self.drop_descendants(entry)
        self.start_writes()

    def restore(self, entry: Entry, size_bytes: int) -> None:
        """A blob found at start."""
        self._index.set_blob_state(entry, self.number, BlobState.PRESENT)
        self._count(entry, size_bytes)
        self.order.add(entry)
        self._stats.inserted(entry, self.number, "found")

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

    def _forget_oldest(self) -> None:
        """Keep the number of remembered blobs of a shared tier bounded: leaves first, as everywhere."""
        while self.is_shared and len(self.order) > HINTS_MAX:
            entry = next((e for e in self.order if not e.claimed_children[self.number] and not self.is_used(e)), None)
            if entry is None:
                return
            self.forget(entry)

    def forget(self, entry: Entry) -> None:
        """Forget that a shared tier has a blob, unless it is being read, or something here depends on it."""
        if entry in self.order and not entry.claimed_children[self.number] and not self.is_used(entry):
            self._corrupt.discard(entry)
            self._lost(entry, "forgotten", BlobState.ABSENT)
            self._index.remove_if_gone(entry)

    # -- tests -------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Assert that counts match the entries and that no write waits for nothing."""
        by_state: dict[BlobState, set[Entry]] = {state: set() for state in BlobState}
        for entry in self._index.entries():
            by_state[entry.blobs[self.number]].add(entry)
        entries = self._index.entries()
        queued, writing = by_state[BlobState.QUEUED], by_state[BlobState.WRITING]
        assert all(map(self.admission.admits, queued | writing)), "a chunk is written that was not admitted"
        assert self.used_bytes == sum(entry.blob_bytes[self.number] for entry in entries), "used bytes drifted"
        kept = (e for e in entries if e.blobs[self.number] is not BlobState.DELETING)
        self.usage.check_integrity((e.record.namespace, e.blob_bytes[self.number]) for e in kept)
        assert queued == set(self._queue), "the queue and the states disagree"
        assert self._writing == len(writing), "writing count drifted"
        here = by_state[BlobState.PRESENT] | by_state[BlobState.CORRUPT]
        stats, here_bytes = self._stats[self.number], sum(entry.blob_bytes[self.number] for entry in here)
        assert len(self.order) == len(here)
        assert (stats.chunks, stats.size_bytes) == (len(here), here_bytes), "what came and left is not what is there"
        assert all(e in self.order for e in by_state[BlobState.PRESENT]), "a blob can never be evicted"
        self.order.check_integrity()
        deleting = by_state[BlobState.DELETING]
        assert self._deleting_bytes == sum(e.blob_bytes[self.number] for e in deleting), "deleting bytes drifted"
        assert by_state[BlobState.CORRUPT] <= self._corrupt <= by_state[BlobState.CORRUPT] | deleting
        assert self._enqueue_after_delete | self._evicting <= deleting, "a claim waits for a deletion that ended"
        assert all(map(self.is_coming, self._waiting)), "a write waits for a lost parent"
        waiting = [child for children in self._waiting.values() for child in children]
        assert set(self._ready) == set(filter(self._may_write, queued)), "a write was forgotten, or given up and not"
        assert queued.issuperset(waiting), "a write that was given up is remembered"
        assert self._tried_again <= queued | writing, "a write that has ended counts as tried again"
        for entry in queued:
            self._check_queued(entry)
        if self.capacity_bytes is not None:
            limit = max(self.capacity_bytes, self._found_bytes)
            assert self.used_bytes <= limit, "a tier passes its capacity"

    def _check_queued(self, entry: Entry) -> None:
        parent = self._index.parent(entry)
        if entry.record.chunk_index:
            assert parent is not None and self.is_coming(parent), "a child is queued without its parent"
        if self._may_write(entry):
            is_busy = self._writing == self._writes_max or self._deleting_bytes
            assert is_busy or not self.takes_writes, "a write waits for nothing"
        elif self._source.has_bytes(entry):
            assert parent is not None and entry in self._waiting.get(parent, ()), (
                "a write waits for a parent that forgot it"
            )
