"""Promotions: chunks that are read from a lower tier into a slot, and what becomes of them.

Owns reads that wait for memory. Must not decide which chunks are wanted: lookups do. Called by the hierarchy.
"""

from __future__ import annotations

from collections import Counter

from tiered_kv.hierarchy.host import HostMemory
from tiered_kv.hierarchy.index import CLAIMED, Entry, HostState, Index, LowerState
from tiered_kv.hierarchy.lookups import Lookup, Lookups
from tiered_kv.hierarchy.plan import Job, Outcome, Read, SlotId
from tiered_kv.hierarchy.slots import slab_of
from tiered_kv.hierarchy.stack import LowerTiers


class Promotions:
    """All promotions.

    Threads: one owner, the hierarchy.
    """

    def __init__(
        self,
        index: Index,
        host: HostMemory,
        lower: LowerTiers,
        lookups: Lookups,
        jobs: list[Job],
        counters: Counter[str],
    ) -> None:
        self._index = index
        self._host = host
        self._lower = lower
        self._lookups = lookups
        self._jobs = jobs
        self._counters = counters
        self._early: dict[int, list[Read]] = {}  # by the slab whose memory they wait for

    def start(self, lookup: Lookup) -> None:
        """Start reading what is not in host memory; takes slots that can be had now and never waits for more."""
        slot_bytes, namespace = lookup.session.slot_bytes, lookup.session.namespace
        for position, entry in enumerate(lookup.entries):
            if entry.host is not HostState.ABSENT:
                continue
            slot = self._host.take_for_load(slot_bytes, namespace)
            if slot is None:
                slot = self._take_from_stores(slot_bytes, namespace)
            if slot is None:
                self._counters["promotion_without_slot"] += 1
                self._lookups.truncate(lookup, position)
                return
            self._read(entry, slot, slot_bytes)

    def _read(self, entry: Entry, slot: SlotId, slot_bytes: int) -> None:
        tier = self._index.source(entry)
        assert tier is not None, "a chunk is called held that nobody can give"
        self._host.place(entry, slot, slot_bytes, HostState.PROMOTING)
        entry.source = tier
        job = Read(tier, entry.record, slot)
        if self._host.slots.has_memory(slot):
            self._jobs.append(job)
        else:
            self._early.setdefault(slab_of(slot), []).append(job)

    def _take_from_stores(self, slot_bytes: int, namespace: bytes) -> SlotId | None:
        """The slot of a chunk that waits for its write: under pressure stores are dropped first, loads never.

        What others keep stays, and who is at its maximum gives its own.
        """

        def may_go(entry: Entry) -> bool:
            owner, taken = entry.record.namespace, self._host.taken
            return owner == namespace or not (
                taken.excess_bytes(namespace, slot_bytes) > 0 or taken.keeps(owner, slot_bytes)
            )

        front = self._lower.front
        while front is not None and (entry := front.give_up_store(slot_bytes, may_go)) is not None:
            slot = self._host.evict(entry)
            if not self._host.slots.is_draining(slot):
                return slot
            self._host.give(slot)
        return None

    def memory_came(self, slab: int, succeeded: bool) -> None:
        """A slab has its memory, or the machine refused it: go on with the reads that wait for it, or give them up."""
        early = self._early.pop(slab, [])
        if succeeded:
            self._jobs.extend(early)
        else:
            for read in early:
                entry = self._index.get(read.record.key)
                assert entry is not None, "a read outlived its entry"
                self.lost(entry)

    def ended(self, job: Read, entry: Entry, outcome: Outcome) -> None:
        """A read ended. Failures shorten the lookups that waited; what they leave behind is DESIGN rule 4."""
        if outcome is Outcome.OK:
            self.filled(entry)
            if job.tier:
                self._keep(entry)
        else:
            self._lower[job.tier].read_failed(entry, outcome)
            self.lost(entry)

    def filled(self, entry: Entry) -> None:
        """The slot holds the chunk's verified bytes."""
        self._host.now_ready(entry)
        self._index.flows.tell_again(entry, self._index.places(entry)[1:])
        self._lookups.chunk_ready(entry)

    def lost(self, entry: Entry) -> None:
        """The slot will not hold the chunk's bytes: free it."""
        self._lookups.chunk_failed(entry)
        self._host.give(self._host.vacate(entry))
        self._index.remove_if_gone(entry)

    def _keep(self, entry: Entry) -> None:
        """Write a chunk that came from further below to the first tier, and those behind it that came before it."""
        assert self._lower.front is not None
        stack = [entry]
        while stack:
            chunk = stack.pop()
            if chunk.host is not HostState.READY or chunk.lower[0] is not LowerState.ABSENT:
                continue
            if not self._lower.front.admission.admits(chunk):
                continue
            parent = self._index.parent(chunk)
            if chunk.record.chunk_index == 0 or (parent is not None and parent.lower[0] in CLAIMED):
                self._lower.front.claim(chunk)
                stack.extend(chunk.children or ())
