"""Messages of one step between scheduler and workers: small, frozen, pickled by vLLM."""

from dataclasses import dataclass, field

from tiered_kv.server.client import SessionInfo
from tiered_kv.tiering.types import SlotId
from tiered_kv.vllm.compat import KVConnectorMetadata, KVConnectorWorkerMetadata


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Blocks of one KV cache group of one chunk.

    Attributes:
        first_block: Which of the chunk's stored blocks goes with ``block_ids[0]``.
        block_ids: vLLM's blocks in token order; empty where a load has nothing to fill.
    """

    first_block: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChunkCopy:
    """Blocks of one chunk, per KV cache group, and the slot at the other end of the copy.

    A save copies all stored blocks, a load those that vLLM allocated.

    Attributes:
        state_part: The copy is of this part of a state, whose block is the only one of the only run; None: of a chunk.
    """

    slot: SlotId
    groups: tuple[BlockRun, ...]
    state_part: int | None = None


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Slots to scatter into a request's new blocks.

    Reported once, by request id, when the last byte is in place.
    """

    request_id: str
    generation: int
    copies: tuple[ChunkCopy, ...]


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Blocks to gather into granted slots.

    Reported by job id; the scheduler pins the blocks until then.
    """

    job_id: int
    generation: int
    copies: tuple[ChunkCopy, ...]


@dataclass(frozen=True)
class StepMetadata(KVConnectorMetadata):
    """Work of one step for every worker.

    Attributes:
        generation: The scheduler's session generation; a worker that is behind lets go of the old arena and joins anew.
        session: How slots of the open session are laid out; None while there is none.
    """

    generation: int
    session: SessionInfo | None
    loads: tuple[LoadJob, ...] = ()
    saves: tuple[SaveJob, ...] = ()


@dataclass
class SaveReport(KVConnectorWorkerMetadata):
    """Save jobs and adapter loads that workers finished since their last report.

    Attributes:
        ranks_done: How many ranks finished a save job.
        failed: Save jobs that failed on some rank.
        adapters: What each rank loaded last, by vLLM's id of the adapter and by rank: stamps of the files as text.
    """

    ranks_done: dict[int, int] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    adapters: dict[int, dict[int, str]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "SaveReport":
        """Add another worker's report."""
        assert isinstance(other, SaveReport)
        for job_id, ranks in other.ranks_done.items():
            self.ranks_done[job_id] = self.ranks_done.get(job_id, 0) + ranks
        self.failed |= other.failed
        for number, by_rank in other.adapters.items():
            self.adapters.setdefault(number, {}).update(by_rank)
        return self
