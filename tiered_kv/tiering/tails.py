"""Tails: which are kept, where, and when they go (docs/decisions/0036-tails.md).

A tail lies in a slot as a chunk does, is ready once it is committed, and is a leaf to every order of eviction. It is
written to this machine's first tier when host memory is about to let go of it, or when the server ends, and then leaves
host memory; never to a shared tier. Few are: those behind ``Limits.few_chunks`` and more, and of a chunk's only the
newest::

    commit -> host READY -> (to be evicted) QUEUED -> WRITING -> PRESENT, host ABSENT
                   ^                                                 |
                   +------------------- PROMOTING <-- (a lookup) ----+

Pure, like tiering that calls it. Must not know lookups. Threads: one owner, tiering.
"""

from __future__ import annotations

from collections.abc import Iterable

from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.tiering.host_tier import HostTier
from tiered_kv.tiering.index import CLAIMED, Entry, HostState, Index
from tiered_kv.tiering.stats import Outbox
from tiered_kv.tiering.tiers import SecondaryTiers
from tiered_kv.tiering.types import HOST, Limits, SlotId

TAILS_MAX = 4
"""Tails behind one chunk. Where many conversations leave a common stem, few of their tails are asked for again, and
each takes a slot; all of them are leased to a lookup that ends there, because only its client can tell which fits."""


class Tails:
    """The tails of all chunks.

    Threads: one owner, tiering.
    """

    def __init__(self, index: Index, host: HostTier, tiers: SecondaryTiers, limits: Limits, outbox: Outbox) -> None:
        """Host memory asks here before it lets go of a chunk."""
        self._index = index
        self._host = host
        self._tiers = tiers
        self._limits = limits
        self._counters = outbox.counters
        self._superseded: dict[bytes, None] = {}  # go once nobody uses them
        host.keeps_for_write = self.save

    def commit(self, slot: SlotId, slot_bytes: int, record: ChunkRecord) -> None:
        """A slot was filled with a tail: it is ready at once.

        It is sealed when it is written, because nothing else needs its header. Where a chunk has many tails the oldest
        that nobody uses goes.
        """
        parent, known = self._index.parent_of(record), self._index.get(record.key)
        if parent is None or (known is not None and known.record != record):
            self._counters["tail_refused"] += 1
        elif known is not None and known.host is not HostState.ABSENT:
            self._counters["tail_duplicate"] += 1
        elif known is None and not self._has_room(parent, record, slot_bytes):
            self._counters["tail_no_room"] += 1
        else:
            entry = known or self._index.add(record)
            entry.stored_for(record.tag)
            entry.bytes_are_of(record.stored_by)
            self._host.place(entry, slot, slot_bytes, HostState.SEALING)
            self._host.now_ready(entry)
            if record.chunk_index < self._limits.few_chunks:
                self._host.count_short_tail(entry)
            self._superseded.pop(record.key, None)
            self._counters["tail_stored"] += 1
            return
        self._host.give(slot)

    def _has_room(self, parent: Entry, record: ChunkRecord, slot_bytes: int) -> bool:
        """Whether the chunk may have one more tail, and tails behind few chunks too, or older ones have gone for it."""
        tails = self._held_behind(parent)
        if len(tails) >= TAILS_MAX and not any(self._removes(tail, "tail_gave_way") for tail in tails):
            return False
        return record.chunk_index >= self._limits.few_chunks or self._has_room_for_short(slot_bytes)

    def _has_room_for_short(self, slot_bytes: int) -> bool:
        room_bytes = int(self._host.slots.host_bytes * self._limits.short_tails_share) - slot_bytes
        for entry in self._host.oldest_short_tails() if room_bytes >= 0 else ():
            if self._host.short_tail_bytes <= room_bytes:
                break
            self._removes(entry, "tail_gave_way")
        return self._host.short_tail_bytes <= room_bytes

    def behind(self, chunk: Entry) -> list[Entry]:
        """Those to offer: newest first, none that is about to go, and all of them held."""
        return [one for one in self._held_behind(chunk)[::-1] if one.record.key not in self._superseded]

    def _held_behind(self, chunk: Entry) -> list[Entry]:
        """Those that can be had, oldest first: of one that is on its way out the file may be there for long."""
        return [one for one in self._index.tails_behind(chunk) if self._index.is_held(one)]

    # -- the end of tails --------------------------------------------------------------------------------------

    def drop(self, namespace: bytes, keys: Iterable[bytes]) -> None:
        """Chunks, or longer tails, now continue these tails: they go, once nobody uses them."""
        for key in keys:
            entry = self._index.get(key)
            if entry is not None and entry.record.namespace == namespace and entry.tail_tokens:
                self._superseded[key] = None
        self.remove_superseded()

    def remove_superseded(self) -> None:
        """Remove those that something continues and nobody uses any more."""
        for key in list(self._superseded):
            entry = self._index.get(key)
            if entry is None or self._removes(entry, "tail_superseded"):
                del self._superseded[key]

    def _removes(self, entry: Entry, counter: str) -> bool:
        """Remove a tail from host memory and from disk unless it is in use; says whether it is going."""
        self._tiers.cancel_writes(entry)
        if entry.is_busy:
            return False
        for tier in self._tiers:
            if not tier.is_shared:
                tier.remove(entry, leaves_hole=False)
        self._host.remove(entry, leaves_hole=False)
        self._counters[counter] += 1
        return True

    # -- tails on disk -----------------------------------------------------------------------------------------

    def save(self, entry: Entry, *, may_wait: bool = False) -> bool:
        """Host memory is about to let go of a chunk: says whether it is a tail that stays until it is written.

        Args:
            may_wait: Behind other writes, for as long as it takes.
        """
        source = self._tiers.write_through
        if source is None or entry.record.chunk_index < self._limits.few_chunks or not entry.tail_tokens:
            return False
        if source.tier.is_shared or entry.record.key in self._superseded or entry in self._index.damaged:
            return False
        parent = self._index.parent(entry)
        if parent is None or parent.blobs[source.tier.number] not in CLAIMED:
            return False
        tails = self._held_behind(parent)
        older = [one for one in tails if one is not entry and one.blobs[source.tier.number] in CLAIMED]
        if tails[-1] is not entry or any(one.is_busy for one in older):
            return False
        if not source.writes_tail(entry, may_wait=may_wait):
            return False
        for one in older:
            source.tier.remove(one, leaves_hole=False)
        self._counters["tail_saved"] += 1
        return True

    def save_all(self) -> None:
        """The server ends: write those that are worth it."""
        for chunk in self._index.chunks_with_tails():
            for tail in self._index.tails_behind(chunk):
                if tail.host is HostState.READY:
                    self.save(tail, may_wait=True)

    def found_at_start(self, tier: int) -> None:
        """All blobs of a tier were told: of a chunk's tails there one stays, should a crash have left two."""
        for chunk in self._index.chunks_with_tails() if tier == HOST + 1 else ():
            for tail in self._index.tails_behind(chunk)[:-1]:
                self._tiers[tier].remove(tail, leaves_hole=False)
