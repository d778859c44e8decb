"""Random lives of a worker's side on a simulated GPU: its own threads, jobs and reports, step by step.

The model's thread does what vLLM's runners do: it begins a step, launches the forward pass, asks for loads and saves,
and takes the reports. Blocks of a save are written again only after its report, blocks of a load are read only after
its own; a slot is read by the server when its save is reported and cleared when its load is.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from tests.kit.gpu.device import SimulatedGpu, Watched
from tests.kit.gpu.handover import watched_threads
from tests.kit.gpu.lives import BLOCKS, SLOTS, Plan, Rank, read, write
from tiered_kv.chunks.device import TorchDevice
from tiered_kv.config import Config
from tiered_kv.server.client import SessionInfo
from tiered_kv.vllm.step import BlockRun, ChunkCopy, LoadJob, SaveJob, StepMetadata
from tiered_kv.vllm.worker import CopyThread, WorkerSide

STEPS = 12


@dataclass
class _Chunk:
    slot: int
    ids: tuple[tuple[int, ...], ...]
    payload: tuple[bytes, ...]


@dataclass
class WorkerLife:
    """A worker's side without a server, and the model that it works for.

    Attributes:
        wrong: What was wrong with bytes or reports.
        compared: Copies that were compared.
    """

    machine: SimulatedGpu
    plan: Plan
    is_v2: bool
    wrong: list[str] = field(default_factory=list)
    compared: int = 0

    def __post_init__(self) -> None:
        detector = self.machine.detector
        device = cast(TorchDevice, Watched(self.machine.device(), detector))
        self.rank = Rank(self.plan, self.machine, device)
        self.session = SessionInfo(0, self.rank.paged.rank_bytes, 0, (0,))
        with watched_threads(detector):
            config = SimpleNamespace(
                parallel_config=SimpleNamespace(rank=0, world_size=1), use_v2_model_runner=self.is_v2
            )
            self.side = WorkerSide(
                Config.from_mapping({"storage_uri": "memory://lives"}), config, SimpleNamespace(), "e"
            )
            self.side._threads = {kind: CopyThread(kind) for kind in ("load", "save")}
        self.side._paged = self.rank.paged
        self.side._client = self._client()
        self._source = random.Random(self.plan.seed)
        self._free = list(range(BLOCKS))
        self._slots = list(range(SLOTS))
        self._saving: dict[int, _Chunk] = {}
        self._loading: dict[str, tuple[_Chunk, list[tuple[int, ...]]]] = {}
        self._stored: list[_Chunk] = []
        self._jobs = 0

    def _client(self) -> Any:
        def view(slab: int, offset: int, size: int) -> memoryview:
            assert slab == 0 and size == self.rank.paged.rank_bytes
            return self.rank.view(offset // size)

        arena = SimpleNamespace(view=view)
        return SimpleNamespace(generation=0, is_lost=False, arena=arena, pinned=None, leave=lambda: None)

    def run(self) -> None:
        for _ in range(STEPS):
            self.step(self._new_loads(), self._new_chunk())
            if self._source.random() < 0.5:
                self.side.finish_copies()
            self.take_reports()
        self.side.finish_copies()
        self.take_reports()
        self.side.close()
        if self._saving or self._loading:
            self.wrong.append("a job was never reported")

    def step(self, loads: Sequence[LoadJob], chunk: _Chunk | None) -> StepMetadata:
        """One step of vLLM's, with at most one chunk that it completes."""
        saves: tuple[SaveJob, ...] = ()
        if chunk is not None:
            self._jobs += 1
            self._saving[self._jobs] = chunk
            runs = tuple(BlockRun(0, ids) for ids in chunk.ids)
            saves = (SaveJob(self._jobs, 0, (ChunkCopy(chunk.slot, runs),)),)
        metadata = StepMetadata(0, self.session, tuple(loads), saves)
        self.side.begin_step(metadata)
        if chunk is not None:
            for pool, ids in zip(self.rank.pools, chunk.ids, strict=True):
                write(pool, ids)
            chunk.payload = tuple(pool.read(ids) for pool, ids in zip(self.rank.pools, chunk.ids, strict=True))
        self.side.start_loads(metadata)
        self.side.start_saves(metadata)
        return metadata

    def _new_chunk(self) -> _Chunk | None:
        if not self._slots or len(self._free) < 2 * sum(self.plan.stored_blocks):
            return None
        ids = tuple(self._take(count) for count in self.plan.stored_blocks)
        return _Chunk(self._slots.pop(), ids, ())

    def _new_loads(self) -> list[LoadJob]:
        jobs = []
        while self._stored and self._source.random() < 0.6 and len(self._free) > sum(self.plan.stored_blocks):
            chunk = self._stored.pop(0)
            targets = [self._take(count) for count in self.plan.stored_blocks]
            for pool, ids in zip(self.rank.pools, targets, strict=True):
                read(pool, ids)  # the attention of who had them, in the step before
            self._jobs += 1
            self._loading[f"r{self._jobs}"] = (chunk, targets)
            runs = tuple(BlockRun(0, ids) for ids in targets)
            jobs.append(LoadJob(f"r{self._jobs}", 0, (ChunkCopy(chunk.slot, runs),)))
        return jobs

    def take_reports(self) -> None:
        """What vLLM does with what was reported."""
        report = self.side.take_finished_saves()
        for job_id in () if report is None else report.ranks_done:
            chunk = self._saving.pop(job_id)
            slot = self.rank.slot(chunk.slot)
            slot.sum()
            if job_id in report.failed or slot.numpy().tobytes() != b"".join(chunk.payload):  # type: ignore[union-attr]
                self.wrong.append("a save")
            for pool, ids in zip(self.rank.pools, chunk.ids, strict=True):
                write(pool, ids)
                self._free += ids
            self._stored.append(chunk)
            self.compared += 1
        finished, failed = self.side.take_finished_loads()
        for request_id in sorted(finished):
            chunk, targets = self._loading.pop(request_id)
            for pool, ids, payload in zip(self.rank.pools, targets, chunk.payload, strict=True):
                read(pool, ids)
                if request_id in failed or pool.read(ids) != payload:
                    self.wrong.append("a load")
                self._free += ids
            self.rank.slot(chunk.slot).zero_()
            self._slots.append(chunk.slot)
            self.compared += 1

    def _take(self, count: int) -> tuple[int, ...]:
        picked = self._source.sample(self._free, count)
        self._free = [block for block in self._free if block not in picked]
        return tuple(picked)
