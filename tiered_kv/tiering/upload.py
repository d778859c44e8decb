"""Writes to a tier behind the first secondary one: their bytes come from the tier above, never from host memory.

After the write to the tier above, a chunk's slot is free (rule 5), so an upload that takes minutes holds no host
memory and survives a restart: what the tier above has and this one is not known to have is queued again. Called by
``tiers.py``, by the tier above and by the tier it feeds.

    queued because                        asked first whether the blob is there
    it was just written above             no: most likely nobody else has it
    it is used, or a session of its       yes: it was uploaded before the restart, or by another machine
    namespace opens after a restart
    a chunk behind it was to be           yes: others may have removed only some of the prefix
    uploaded, and its prefix is gone
"""

from __future__ import annotations

from collections.abc import Sequence

from tiered_kv.tiering.eviction_policy import EvictionPolicy
from tiered_kv.tiering.index import BlobState, Entry, Index
from tiered_kv.tiering.quotas import Quotas
from tiered_kv.tiering.secondary_tier import SecondaryTier
from tiered_kv.tiering.stats import Outbox
from tiered_kv.tiering.types import Copy, Job, TierSpec

COPIES_MAX = 8
"""Uploads at once; each takes memory of its own for one or two blobs."""


class Upload:
    """The source of a tier that takes its bytes from the tier above it.

    See :class:`~tiered_kv.tiering.secondary_tier.Source`.

    Attributes:
        tier: The tier that it feeds.

    Threads: one owner, tiering.
    """

    waiting_first = True
    """Finish a prefix before the next one."""

    def __init__(
        self,
        number: int,
        spec: TierSpec,
        index: Index,
        quotas: Quotas,
        policy: type[EvictionPolicy],
        outbox: Outbox,
        *,
        next_source: Upload | None,
    ) -> None:
        """Start with an empty tier; ``next_source`` takes its bytes from it."""
        self._above = number - 1
        self._asked_first: set[Entry] = set()
        self._index = index
        self._counters = outbox.counters
        self.tier = SecondaryTier(number, spec, self, index, quotas, policy, outbox, COPIES_MAX, next_source)

    # -- asked by the tier -------------------------------------------------------------------------------------

    @property
    def is_available(self) -> bool:
        return self._index.readable[self._above]

    def has_bytes(self, entry: Entry) -> bool:
        return entry.blobs[self._above] is BlobState.PRESENT

    def may_follow(self, entry: Entry, parent: Entry) -> bool:  # noqa: ARG002 - all of its writes are alike
        return False

    def not_deleted(self, entry: Entry) -> None:
        """Nothing waits: what is in this machine's tier is offered again some day."""

    def size_bytes(self, entry: Entry) -> int:
        return entry.blob_bytes[self._above]

    def job(self, entry: Entry) -> Job:
        is_asked_first, behind = entry in self._asked_first, self.tier.unconfirmed_before(entry)
        return Copy(self.tier.number, self._above, entry.record, is_asked_first, behind)

    def drop_counter(self, entry: Entry) -> str:  # noqa: ARG002 - all of its writes are alike
        return "write_dropped"

    def release(self, entry: Entry) -> None:
        self._asked_first.discard(entry)

    def queue_again(self, chunks: Sequence[Entry]) -> bool:
        self._asked_first.update(chunks)  # some may be there: those that are missing are not always all
        return True

    def put_back(self, entry: Entry) -> None:
        is_first = entry.record.chunk_index == 0
        parent = self._index.parent(entry)
        if not is_first and (parent is None or not self.tier.is_coming(parent)):
            self._counters["upload_dropped_no_parent"] += 1  # it was lost while this one was on its way
        elif self.has_bytes(entry):
            self.tier.requeue(entry)
            return
        self.tier.release_bytes(entry, BlobState.ABSENT)
        self.tier.drop_descendants(entry)
        self.release(entry)

    # -- asked by the tier above -------------------------------------------------------------------------------

    def is_reading(self, entry: Entry) -> bool:
        """Whether the blob in the tier above is being copied."""
        return entry.blobs[self.tier.number] is BlobState.WRITING

    def source_lost(self, entry: Entry) -> None:
        """The tier above does not have the chunk any more."""
        self.tier.drop(entry, "source_evicted")

    # -- writes ------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """Uploads that no earlier life of the cache has done: what a drain waits for, unless the tier does not answer.

        The next life makes them: they are on the tier above.
        """
        if not self._index.readable[self.tier.number]:
            return 0
        return self.tier.backlog - len(self._asked_first)

    @property
    def backlog(self) -> int:
        """Chunks that wait to be written here or are being written, also those no drain waits for."""
        return self.tier.backlog

    @property
    def queued_bytes(self) -> int:
        """Host memory that pending writes hold: none."""
        return 0

    def enqueue_write(self, entry: Entry) -> None:
        """Queue the upload of a chunk, and of the prefix before it that the tier above has, if it is admitted.

        Never that of a tail (docs/decisions/0036-tails.md).
        """
        admission = self.tier.admission
        if entry.tail_tokens:
            return
        if not admission.admits(entry):
            admission.declined += entry.blobs[self.tier.number] is BlobState.ABSENT
            return
        self.tier.enqueue_after_delete(entry)
        self._enqueue_prefix(entry, is_asked_first=False)

    def enqueue_recovered(self, entry: Entry) -> None:
        """The same for a chunk that was in the tier above before: its blob may be here already."""
        if not entry.tail_tokens and self.tier.admission.admits(entry):
            self._enqueue_prefix(entry, is_asked_first=True)

    def enqueue_if_used(self, entry: Entry) -> None:
        """The chunk is used: a write that was dropped, or that an earlier life did not make, gets another chance."""
        self.enqueue_recovered(entry)

    def _enqueue_prefix(self, entry: Entry, *, is_asked_first: bool) -> None:
        number = self.tier.number
        prefix = []
        node: Entry | None = entry
        while node is not None and node.blobs[number] is BlobState.ABSENT and self.has_bytes(node):
            prefix.append(node)
            node = self._index.parent(node)
        if not prefix:
            return
        self.tier.admission.admitted += len(prefix)
        if prefix[-1].record.chunk_index and (node is None or not self.tier.is_coming(node)):
            self._counters["upload_dropped_no_parent"] += 1
            return
        if not is_asked_first and node is not None:
            self.tier.prioritize(node)  # it may stand behind everything found at start
        for chunk in reversed(prefix):
            self.tier.queue(chunk)
            if is_asked_first or chunk is not entry:
                self._asked_first.add(chunk)
            self.tier.start_or_wait(chunk)
        self.tier.start_writes()

    def cancel_write(self, entry: Entry) -> None:
        self.tier.cancel_write(entry)

    def found(self, entry: Entry) -> None:
        if entry.blobs[self.tier.number] is BlobState.QUEUED:
            self.tier.found_queued(entry)
        else:
            self.tier.found(entry)

    def check_integrity(self) -> None:
        """Assert the tier's invariants, and that what is asked first is to be written."""
        self.tier.check_integrity()
        states = (BlobState.QUEUED, BlobState.WRITING)
        assert all(e.blobs[self.tier.number] in states for e in self._asked_first), "a mark outlived its upload"
