"""A tier behind the first lower one: written from the tier above it, never from host memory.

After the write to the tier above, a chunk's slot is free (DESIGN rule 5), so an upload that takes minutes holds no host
memory and survives a restart: what the tier above has and this one is not known to have is queued again. Called by the
hierarchy.

    claimed because                       asked first whether the blob is there
    it was just written above             no: most likely nobody else has it
    it is used, or a session of its       yes: it was uploaded before the restart, or by another machine
    namespace opens after a restart
"""

from __future__ import annotations

from collections import Counter

from tiered_kv.hierarchy.index import CLAIMED, Entry, Index, LowerState
from tiered_kv.hierarchy.lower import LowerTier
from tiered_kv.hierarchy.plan import Copy, Job

COPIES_MAX = 8
"""Uploads at once; each takes memory of its own for one or two blobs."""


class BackTier(LowerTier):
    """Bookkeeping of a tier that takes its bytes from ``above``."""

    def __init__(
        self, above: LowerTier, capacity_bytes: int | None, index: Index, jobs: list[Job], counters: Counter[str]
    ):
        super().__init__(above.tier + 1, capacity_bytes, index, jobs, counters)
        self._above = above
        self._writes_max = COPIES_MAX
        self._asked_first: set[Entry] = set()
        above.behind = self

    @property
    def pending(self) -> int:
        """Uploads that no earlier life of the cache has done: what a drain waits for, unless the tier does not answer.

        The next life makes them: they are on the tier above.
        """
        if not self._index.readable[self.tier]:
            return 0
        return len(self._queue) + self._writing - len(self._asked_first)

    @property
    def takes_writes(self) -> bool:
        return super().takes_writes and self._index.readable[self._above.tier]

    def claim(self, entry: Entry) -> None:
        """Queue the upload of a chunk, and of the prefix before it that the tier above has, if it is admitted."""
        if not self.admission.admits(entry):
            self.admission.declined += entry.lower[self.tier] is LowerState.ABSENT
            return
        self._claim_after_delete(entry)
        self._claim_prefix(entry, is_asked_first=False)

    def claim_known(self, entry: Entry) -> None:
        """The same for a chunk that was in the tier above before: its blob may be here already."""
        if self.admission.admits(entry):
            self._claim_prefix(entry, is_asked_first=True)

    def _claim_prefix(self, entry: Entry, *, is_asked_first: bool) -> None:
        prefix = []
        node: Entry | None = entry
        while node is not None and node.lower[self.tier] is LowerState.ABSENT and self._has_source(node):
            prefix.append(node)
            node = self._index.parent(node)
        if not prefix:
            return
        self.admission.admitted += len(prefix)
        if prefix[-1].record.chunk_index and (node is None or node.lower[self.tier] not in CLAIMED):
            self._counters["upload_dropped_no_parent"] += 1
            return
        if not is_asked_first and node is not None:
            self._hurry(node)
        for chunk in reversed(prefix):
            self._index.set_lower(chunk, self.tier, LowerState.QUEUED)
            self._queue[chunk] = None
            if is_asked_first or chunk is not entry:
                self._asked_first.add(chunk)
            self._start_or_wait(chunk)
        self._pump()

    def _hurry(self, entry: Entry) -> None:
        """A new chunk waits for this one, which may stand behind everything found at start: put it first."""
        node: Entry | None = entry
        while node is not None and node.lower[self.tier] is LowerState.QUEUED:
            if self._may_write(node):
                self._ready.appendleft(node)  # its second place is skipped when its turn comes
                return
            node = self._index.parent(node)

    def source_lost(self, entry: Entry) -> None:
        """The tier above does not have the chunk any more."""
        self.drop(entry, "source_evicted")

    def found(self, entry: Entry) -> None:
        if entry.lower[self.tier] is LowerState.QUEUED:
            del self._queue[entry]
            self._end(entry)
            self._index.set_lower(entry, self.tier, LowerState.PRESENT)
            self.order.add(entry)
            self._index.flows.came(entry, self.tier, "found")
            self._release(self._waiting.pop(entry, []))
            self._pump()
        else:
            super().found(entry)

    def _release(self, waiting: list[Entry]) -> None:
        self._ready.extendleft(reversed(waiting))  # finish a prefix before the next one

    def _has_source(self, entry: Entry) -> bool:
        return entry.lower[self._above.tier] is LowerState.PRESENT

    def _size_bytes(self, entry: Entry) -> int:
        return entry.lower_bytes[self._above.tier]

    def _begin(self, entry: Entry) -> None:
        self._jobs.append(Copy(self.tier, self._above.tier, entry.record, entry in self._asked_first))

    def _end(self, entry: Entry) -> None:
        self._asked_first.discard(entry)

    def _put_off(self, entry: Entry) -> None:
        if not self._has_source(entry):
            self.forget(entry, LowerState.ABSENT)
            self._drop_descendants(entry)
            self._end(entry)
            return
        self.forget(entry, LowerState.QUEUED)
        self._queue[entry] = None
        self._queue.move_to_end(entry, last=False)
        self._ready.appendleft(entry)

    def check_integrity(self) -> None:
        super().check_integrity()
        states = (LowerState.QUEUED, LowerState.WRITING)
        assert all(e.lower[self.tier] in states for e in self._asked_first), "a claim outlived its upload"
