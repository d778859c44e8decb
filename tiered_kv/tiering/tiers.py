"""All secondary tiers together: their sources in order, and the searches of a shared last tier.

Owns how they are tied together and what concerns all of them. Called by ``tiering.py`` and ``lookups.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import islice

from tiered_kv.tiering.eviction_policy import EvictionPolicy
from tiered_kv.tiering.host_tier import HostTier
from tiered_kv.tiering.index import BlobState, Entry, Index
from tiered_kv.tiering.prefix_search import PrefixSearches
from tiered_kv.tiering.quotas import Quotas
from tiered_kv.tiering.removal import REMOVED_AT_ONCE
from tiered_kv.tiering.secondary_tier import SecondaryTier
from tiered_kv.tiering.stats import Outbox
from tiered_kv.tiering.types import HOST, Removal, TierSpec
from tiered_kv.tiering.upload import Upload
from tiered_kv.tiering.write_through import WriteThrough

RECOVERED_AT_ONCE = 128
"""Known chunks that are looked at in one step for those of an earlier life: there may be a million, and the owner must
not stop."""

PINNED_AT_ONCE = 256
"""Pinned chunks that are looked at in one step, about 0.5 ms: there may be as many as a tier has room for."""

WANTED_AT_ONCE = 32
"""Of these, chunks that are wanted in one step, about 0.3 ms: each has writes queued, where admission counts uses."""


class SecondaryTiers:
    """All tiers below host memory, highest first.

    Attributes:
        sources: Where each tier's bytes come from, and its deferred writes, by the tier's number; highest tier first.
        write_through: The first of them; None if there is no tier.
        searches: What a shared last tier may have; None if the last is not shared.

    Threads: one owner, tiering.
    """

    def __init__(
        self,
        specs: Sequence[TierSpec],
        index: Index,
        host: HostTier,
        quotas: Quotas,
        policy: type[EvictionPolicy],
        outbox: Outbox,
        queue_limit_bytes: int,
    ) -> None:
        """Start with empty tiers; ``queue_limit_bytes`` of host memory may wait for the first of them."""
        uploads: list[Upload] = []  # lowest tier first: each tier is made with the source that reads from it
        for number, spec in reversed([*enumerate(specs, HOST + 1)][1:]):
            behind = uploads[-1] if uploads else None
            uploads.append(Upload(number, spec, index, quotas, policy, outbox, next_source=behind))
        self.write_through: WriteThrough | None = None
        if specs:
            self.write_through = WriteThrough(
                specs[0],
                index,
                host,
                quotas,
                policy,
                outbox,
                queue_limit_bytes=queue_limit_bytes,
                next_source=uploads[-1] if uploads else None,
            )
        self.sources: dict[int, WriteThrough | Upload] = {}
        if self.write_through is not None:
            self.sources[self.write_through.tier.number] = self.write_through
        self.sources |= {upload.tier.number: upload for upload in reversed(uploads)}
        self.searches: PrefixSearches | None = None
        if specs and specs[-1].is_shared:
            self.searches = PrefixSearches(max(self.sources), specs[-1], index, outbox)
        self._has_uploads = bool(uploads)
        self._opened: set[bytes] = set()
        self._unerased: dict[Entry, None] = {}  # deeper ones before those before them
        self._recovering: deque[tuple[bytes, Iterator[Entry]]] = deque()
        self._index = index
        self._counters = outbox.counters

    def __getitem__(self, number: int) -> SecondaryTier:
        return self.sources[number].tier

    def __iter__(self) -> Iterator[SecondaryTier]:
        return (source.tier for source in self.sources.values())

    def __len__(self) -> int:
        return len(self.sources)

    @property
    def pending(self) -> int:
        """Chunks that are to be written, to any of them."""
        return sum(source.pending for source in self.sources.values())

    def enqueue_if_used(self, prefix: Sequence[Entry]) -> None:
        """A prefix is used, given root first: a write that was dropped gets another chance."""
        for number, source in self.sources.items():
            for entry in prefix:
                if entry.blobs[number] is not BlobState.PRESENT:  # what is there is not written
                    source.enqueue_if_used(entry)

    def want(self, entry: Entry) -> None:
        """A chunk will be asked for, though no lookup says so: it, its prefix and the states along it are admitted now.

        One that was found at start is queued when its namespace's first session opens (:meth:`recover`). Does nothing
        where every tier takes it anyway.
        """
        if entry.is_unasked or self._needs_uses:
            self._want(self._index.with_states(self._index.prefix(entry)[::-1]))

    @property
    def _needs_uses(self) -> bool:
        return any(tier.admission.policy.needs_uses for tier in self)

    def _want(self, entries: Sequence[Entry]) -> None:
        wanted = [new for one in entries for new in self._index.mark_used(one)]
        self._counters["answers_asked"] += sum(one.is_answer for one in wanted)
        if entries[0].record.namespace in self._opened:
            self.enqueue_if_used(wanted)

    def pinning(self, number: int, keys: Iterable[bytes] | None) -> Iterator[None]:
        """Keep these chunks, the prefixes before them and the states along these in a tier, and no others, in steps.

        They are kept once each was looked at; then those that were never asked for are wanted. Each is looked at once,
        however many pins it is before. None: which are pinned is not known yet, so everything is kept.
        """
        if keys is None:
            self[number].keep_all()
            return
        pinned: set[bytes] = set()
        pinned_bytes = 0
        unasked: list[Entry] = []  # parents first: to want a chunk is to want all before it, in one step
        before_pin: list[Entry] = []  # of these, what one pin adds, deepest first
        needs_uses = self._needs_uses
        for looked_at, entry in enumerate(self._pinned_prefixes(keys, pinned), 1):
            if looked_at % PINNED_AT_ONCE == 0:
                yield
            if entry is None:
                unasked.extend(reversed(before_pin))
                before_pin.clear()
                continue
            for one in reversed(self._index.with_states((entry,))):
                if one.record.key not in pinned:
                    pinned.add(one.record.key)
                    pinned_bytes += one.blob_bytes[number]
                    if one.is_unasked or (needs_uses and not one.uses):
                        before_pin.append(one)
        self[number].set_pinned(pinned, pinned_bytes)
        for looked_at, one in enumerate(unasked, 1):
            if looked_at % WANTED_AT_ONCE == 0:
                yield
            if self._index.get(one.record.key) is one:
                self._want((one,))

    def _pinned_prefixes(self, keys: Iterable[bytes], pinned: Container[bytes]) -> Iterator[Entry | None]:
        """Chunks and those before them, as far as the caller has not put these into ``pinned``; None after each key."""
        for entry in map(self._index.get, keys):
            while entry is not None and entry.record.key not in pinned:  # of what is pinned, all before it is
                yield entry
                entry = self._index.parent(entry)
            yield None

    def recover(self, namespace: bytes) -> None:
        """Queue again what an earlier life did not upload: the size of a namespace's blobs is known from now on."""
        if namespace in self._opened:
            return
        self._opened.add(namespace)
        if self._has_uploads:
            self._recovering.append((namespace, self._index.walk()))

    def recover_some(self) -> None:
        """Go on with that, a bounded part at a time."""
        if not self._recovering:
            return
        namespace, entries = self._recovering[0]
        looked_at = 0
        for entry in islice(entries, RECOVERED_AT_ONCE):
            looked_at += 1
            if entry.record.namespace == namespace and self._index.get(entry.record.key) is entry:
                for source in self.sources.values():
                    source.enqueue_recovered(entry)
        if looked_at < RECOVERED_AT_ONCE:
            self._recovering.popleft()

    @property
    def wants_turn(self) -> bool:
        """Whether some of what is done in parts is left to do at once."""
        return bool(self._recovering) or (self.write_through is not None and self.write_through.is_refilling)

    def cancel_writes(self, entry: Entry) -> None:
        """Nothing of the chunk is written any more, in any tier, that was not begun; nor of those behind it."""
        for source in self.sources.values():
            source.cancel_write(entry)

    def forget_shared(self, entry: Entry) -> None:
        """Forget that shared tiers have a chunk, which is not in use; a search finds what is there."""
        for tier in self:
            if tier.is_shared:
                tier.forget(entry)

    def erase(self, entry: Entry) -> None:
        """Delete a chunk from this machine's tiers, and forget that shared ones have it; while it is in use there, or
        one behind it is, :meth:`erase_rest` tries it again.
        """
        removals = [tier.remove(entry, leaves_hole=False) for tier in self if not tier.is_shared]
        if not entry.is_busy:
            self.forget_shared(entry)
        if entry.is_busy or Removal.KEPT in removals:
            self._unerased[entry] = None
        else:
            self._unerased.pop(entry, None)

    def erase_rest(self) -> None:
        """Erase some of what could not be erased before."""
        for entry in list(islice(self._unerased, REMOVED_AT_ONCE)):
            if self._index.get(entry.record.key) is entry:
                self.erase(entry)
            else:
                del self._unerased[entry]

    def resume(self) -> None:
        """A tier that had no room or gave no answer may do better now."""
        for tier in self:
            tier.resume()

    def record_use(self, namespace: bytes, keys: Sequence[bytes]) -> None:
        """Note the use of a prefix, deepest chunk first."""
        for tier in self:
            tier.order.record_use(namespace, keys)

    def check_integrity(self) -> None:
        """Assert the invariants of every tier."""
        for source in self.sources.values():
            source.check_integrity()
        if self.searches is not None:
            self.searches.check_integrity()
