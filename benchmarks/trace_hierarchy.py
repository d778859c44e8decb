"""The real hierarchy under a request trace: jobs end at once, bytes are not there, its decisions are its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tiered_kv.hierarchy.admission import ALL
from tiered_kv.hierarchy.hierarchy import Hierarchy
from tiered_kv.hierarchy.plan import ChunkRecord, CreditGrant, Delete, Grow, LookupUpdate, Outcome, Seal, SlotId, Write

CHUNK = 1 << 10
"""Bytes of a chunk, as the hierarchy counts them."""

HOST_CHUNKS = 8
"""Chunks of host memory: so few that what is found is what lies on disk."""

NAMESPACE = b"trace".ljust(16, b"\0")


@dataclass(slots=True)
class Served:
    """What a replay came to: per request the chunks that were found, and chunks written to the disk tier so far."""

    hits: list[int]
    written: list[int]


class Replay:
    """A hierarchy with a disk of so many chunks, and one client that sends one request after the other."""

    def __init__(
        self, disk_chunks: int | None, eviction: str, admission: str = ALL, host_chunks: int = HOST_CHUNKS
    ) -> None:
        capacity = None if disk_chunks is None else disk_chunks * CHUNK
        self.hierarchy = Hierarchy(host_chunks * CHUNK, [capacity], eviction=eviction, admissions=[admission])
        self.hierarchy.restored(0)
        self._credits: list[SlotId] = []
        self._held = 0
        self._written = 0
        self._session = self.hierarchy.open_session(NAMESPACE, CHUNK)
        self._settle()

    def run(self, requests: Sequence[Sequence[int]]) -> Served:
        served = Served([], [])
        for blocks in requests:
            served.hits.append(self._request(blocks))
            served.written.append(self._written)
        return served

    def _request(self, blocks: Sequence[int]) -> int:
        keys = [block.to_bytes(16, "big") for block in blocks]
        digests = [key * 2 for key in keys]
        lookup = self.hierarchy.lookup(self._session, keys, digests, len(keys))  # the GPU has it: nothing is read
        self._settle()
        self.hierarchy.release(self._session, lookup)
        held = self._held
        for index in range(held, len(keys)):
            parent = keys[index - 1] if index else NAMESPACE
            record = ChunkRecord(NAMESPACE, keys[index], parent, index, digests[index])
            self.hierarchy.commit(self._session, self._credits.pop(), record)
            self._settle()
        if held < len(keys):
            self.hierarchy.touch_prefix(keys[-1])
        return held

    def _settle(self) -> None:
        """End every job well, and those that follow."""
        while jobs := self.hierarchy.take_jobs():
            for job in jobs:
                match job:
                    case Seal():
                        self.hierarchy.sealed(job, Outcome.OK)
                    case Write():
                        self._written += 1
                        self.hierarchy.written(job, Outcome.OK)
                    case Delete(tier, record):
                        self.hierarchy.deleted(tier, record, Outcome.OK)
                    case Grow():
                        self.hierarchy.grown(job, Outcome.OK)
                    case _:
                        raise AssertionError(f"unexpected job: {job}")
        for update in self.hierarchy.take_updates():
            match update:
                case CreditGrant(_, slots):
                    self._credits.extend(slots)
                case LookupUpdate(held=held):
                    self._held = held
        self.hierarchy.take_uses()
