"""The real hierarchy under a request trace: jobs end at once, bytes are not there, its decisions are its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.tiering.admission import ALL
from tiered_kv.tiering.lookups import LookupRequest
from tiered_kv.tiering.tiering import Tiering
from tiered_kv.tiering.types import (
    Delete,
    Grow,
    LookupAnswer,
    LookupUpdate,
    Outcome,
    Seal,
    SlotGrant,
    SlotId,
    TierSpec,
    Write,
)

CHUNK = 1 << 10
"""Bytes of a chunk, as tiering counts them."""

HOST_CHUNKS = 8
"""HitCounts of host memory: so few that what is found is what lies on disk."""

NAMESPACE = b"trace".ljust(16, b"\0")


@dataclass(slots=True)
class HitStats:
    """What a replay came to: per request the chunks that were found, and chunks written to the disk tier so far."""

    hits: list[int]
    written: list[int]


class Replay:
    """A hierarchy with a disk of so many chunks, and one client that sends one request after the other."""

    def __init__(
        self, disk_chunks: int | None, eviction: str, admission: str = ALL, host_chunks: int = HOST_CHUNKS
    ) -> None:
        capacity = None if disk_chunks is None else disk_chunks * CHUNK
        self.tiering = Tiering(host_chunks * CHUNK, [TierSpec(capacity, admission)], eviction=eviction)
        self.tiering.restored(1)
        self._credits: list[SlotId] = []
        self._held = 0
        self._written = 0
        self._session = self.tiering.open_session(NAMESPACE, CHUNK)
        self._settle()

    def run(self, requests: Sequence[Sequence[int]]) -> HitStats:
        served = HitStats([], [])
        for blocks in requests:
            served.hits.append(self._request(blocks))
            served.written.append(self._written)
        return served

    def _request(self, blocks: Sequence[int]) -> int:
        keys = [block.to_bytes(16, "big") for block in blocks]
        digests = [key * 2 for key in keys]
        wish = LookupRequest(keys, digests, len(keys))  # the GPU has it: nothing is read
        lookup = self.tiering.lookup(self._session, wish)
        self._settle()
        self.tiering.release(self._session, lookup)
        held = self._held
        for index in range(held, len(keys)):
            parent = keys[index - 1] if index else NAMESPACE
            record = ChunkRecord(NAMESPACE, keys[index], parent, index, digests[index])
            self.tiering.commit(self._session, self._credits.pop(), record)
            self._settle()
        if held < len(keys):
            self.tiering.touch_prefix(keys[-1])
            self._settle()  # a step's uses are dated at its end
        return held

    def _settle(self) -> None:
        """End every job well, and those that follow."""
        while jobs := self.tiering.take_jobs():
            for job in jobs:
                match job:
                    case Seal():
                        self.tiering.sealed(job, Outcome.OK)
                    case Write():
                        self._written += 1
                        self.tiering.written(job, Outcome.OK)
                    case Delete(tier, record):
                        self.tiering.deleted(tier, record, Outcome.OK)
                    case Grow():
                        self.tiering.grown(job, Outcome.OK)
                    case _:
                        raise AssertionError(f"unexpected job: {job}")
        for update in self.tiering.take_updates():
            match update:
                case SlotGrant(_, slots):
                    self._credits.extend(slots)
                case LookupUpdate(answer=LookupAnswer(held=held)):
                    self._held = held
        self.tiering.take_uses()
