"""Random lives of a copy engine on a simulated GPU: what the model and the server do around its copies.

A life draws a rank (layouts, KV cache groups, states, sizes of slices, depth of the rings), then steps: the model's
stream writes blocks, chunks are saved behind a mark, their blocks are given away and written again, the server reads
the slots, slots are loaded into blocks that the model's stream zeroed, and attention reads them. Each copy is compared
with one of page by page. What is not ordered, the detector says.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from tests.kit.gpu.device import SimulatedGpu, simulated_gpu
from tests.kit.gpu.pools import LAYOUTS, Pool, Shape, packed_pool, uniform_pool
from tests.kit.gpu.races import RaceDetector
from tiered_kv.chunks.device import TorchDevice
from tiered_kv.chunks.device_copy import ALIGN_BYTES, CopyEngine
from tiered_kv.chunks.transfer import RankKV

BLOCKS = 41
SLOTS = 8
STEPS = 4


@dataclass(frozen=True)
class Plan:
    """What a life is drawn from its seed.

    Attributes:
        stored_blocks: Of a chunk, per KV cache group.
        direct_bytes: The engine's limit for copies without staging; 1: all are.
        kind: Of the device: ``"cuda"`` or ``"torch"``.
    """

    seed: int
    shapes: tuple[tuple[Shape, ...], ...]
    stored_blocks: tuple[int, ...]
    states: tuple[Shape, ...]
    slice_bytes: int
    ring_slices: int
    direct_bytes: int
    kind: str

    @classmethod
    def draw(cls, seed: int) -> "Plan":
        source = random.Random(seed)
        shapes: list[tuple[Shape, ...]] = [(_layers(source, "BF16"),)]
        if source.random() < 0.3:
            mla = Shape("LBHNC", source.randint(2, 4), 1, 4, 64, "BF16")  # 512 bytes, and 256 of its indexer
            shapes = [(mla, replace(mla, content=64, dtype="U8"))]
        if source.random() < 0.5:
            shapes.append((_layers(source, source.choice(["U8", "F32"])),))
        blocks = tuple(source.randint(1, 4) for _ in shapes)
        sizes = [
            sum(shape.page_bytes * shape.layers for shape in of_group) * count
            for of_group, count in zip(shapes, blocks, strict=True)
        ]
        states = (Shape("LBHNC", 2, 1, 1, max(1, sum(sizes) // source.randint(4, 9)), "U8"),)
        smallest = ALIGN_BYTES + max(24, sum(sizes) // source.randint(4, 12))
        return cls(
            seed=seed,
            shapes=tuple(shapes),
            stored_blocks=blocks,
            states=states if source.random() < 0.4 else (),
            slice_bytes=source.choice([smallest, smallest, 3 * sum(sizes) + 64]),
            ring_slices=source.randint(1, 3),
            direct_bytes=source.choice([1, 700, 1 << 40]),
            kind=source.choice(["cuda", "cuda", "torch"]),
        )

    @property
    def chunk_bytes(self) -> int:
        sizes = [sum(shape.page_bytes * shape.layers for shape in of_group) for of_group in self.shapes]
        return sum(size * count for size, count in zip(sizes, self.stored_blocks, strict=True))

    def with_many_slices(self, *, direct: bool) -> "Plan":
        """The same life with more slices in a job than a ring has places, all staged or all direct."""
        return replace(
            self,
            slice_bytes=ALIGN_BYTES + max(24, self.chunk_bytes // 7),
            ring_slices=1 + self.seed % 2,
            direct_bytes=1 if direct else 1 << 40,
            kind="cuda",
        )


def _layers(source: random.Random, dtype: str) -> Shape:
    layout = source.choice(LAYOUTS)
    padding = 8 if layout.startswith("L") and source.random() < 0.3 else 0
    return Shape(layout, source.randint(1, 4), source.randint(1, 3), 4, 8, dtype, padding)


@dataclass
class Outcome:
    """What a life did, and what was wrong."""

    races: list[str]
    wrong: list[str]
    operations: int = 0
    compared: int = 0


@dataclass(frozen=True)
class _Chunk:
    """A stored chunk: its slot, and what has to be in it per group."""

    slot: int
    ids: tuple[tuple[int, ...], ...]
    payload: tuple[bytes, ...]


class Rank:
    """A rank's pools, its slots and the copy path on a simulated GPU."""

    def __init__(self, plan: Plan, machine: SimulatedGpu, device: TorchDevice) -> None:
        self.pools = [
            (uniform_pool(of_group[0], BLOCKS, number, f"group{number}") if len(of_group) == 1 else
             packed_pool(of_group, BLOCKS, number, f"group{number}"))
            for number, of_group in enumerate(plan.shapes)
        ]  # fmt: skip
        self.states = [uniform_pool(shape, BLOCKS, 9, "state") for shape in plan.states]
        detector = machine.detector
        detector.device_memory(*(pool.raw for pool in (*self.pools, *self.states)))
        self.engine = CopyEngine(
            device,
            slice_bytes=plan.slice_bytes,
            ring_slices=plan.ring_slices,
            direct_bytes=plan.direct_bytes,
        )
        tensors = {name: tensor for pool in (*self.pools, *self.states) for name, tensor in pool.tensors.items()}
        self.paged = RankKV(
            [pool.pages for pool in self.pools],
            tensors,
            plan.stored_blocks,
            [pool.pages for pool in self.states],
            self.engine,
        )
        self.arena = torch.zeros(SLOTS * self.paged.rank_bytes, dtype=torch.uint8)
        detector.host_memory(self.arena)

    def slot(self, number: int) -> torch.Tensor:
        size = self.paged.rank_bytes
        return self.arena[number * size : (number + 1) * size]

    def view(self, number: int) -> memoryview:
        return memoryview(self.slot(number).numpy())


def write(pool: Pool, ids: Sequence[int]) -> None:
    """The model's stream writes whole blocks."""
    for tensor in pool.tensors.values():
        for block in ids:
            tensor[block].view(torch.uint8).random_(0, 256)


def read(pool: Pool, ids: Sequence[int]) -> None:
    """The model's stream reads whole blocks."""
    for tensor in pool.tensors.values():
        for block in ids:
            tensor[block].view(torch.uint8).sum()


class Life:
    """One life, step by step."""

    def __init__(self, plan: Plan, machine: SimulatedGpu) -> None:
        self._source = random.Random(plan.seed)
        self._plan = plan
        self._rank = Rank(plan, machine, machine.device(plan.kind))
        self._free_slots = list(range(SLOTS))
        self.outcome = Outcome([], [])

    def run(self) -> Outcome:
        torch.manual_seed(self._plan.seed)
        stored: list[_Chunk] = []
        for _ in range(STEPS):
            stored = self._step(stored)
            if self._rank.states:
                self._move_state()
        return self.outcome

    def _step(self, stored: Sequence[_Chunk]) -> list[_Chunk]:
        """Chunks are computed and saved, and those of the step before are loaded meanwhile."""
        ids = self._shuffled()
        new = [
            tuple(tuple(next(ids) for _ in range(count)) for count in self._plan.stored_blocks)
            for _ in range(self._source.randint(1, 2))
        ]
        for groups in new:
            self._all(write, groups)
        chunks = [
            _Chunk(
                self._free_slots.pop(),
                groups,
                tuple(pool.read(blocks) for pool, blocks in zip(self._rank.pools, groups, strict=True)),
            )
            for groups in new
        ]
        paged = self._rank.paged
        mark = paged.mark()
        self._all(write, self._one_each(ids))  # the next step is queued before the copy begins
        saving = paged.begin("save", mark)
        with paged.copying():
            for chunk in chunks:
                paged.gather(chunk.ids, self._rank.view(chunk.slot), saving)
            saving.launch()
        loaded = self._load(stored, ids)
        saving.wait()
        self._check_saved(chunks)
        for chunk in chunks:
            self._all(write, chunk.ids)  # the blocks are somebody else's now
        self._free_slots += [chunk.slot for chunk in stored]
        for chunk in stored:
            self._rank.slot(chunk.slot).zero_()
        self.outcome.compared += loaded
        return chunks

    def _load(self, stored: Sequence[_Chunk], ids: Iterator[int]) -> int:
        """Load chunks, some in part, into blocks that were zeroed before."""
        paged, targets = self._rank.paged, []
        for _ in stored:
            firsts = [
                self._source.randrange(count) if self._source.random() < 0.4 else 0
                for count in self._plan.stored_blocks
            ]
            runs = [
                (first, tuple(next(ids) for _ in range(count - first)) if self._source.random() < 0.9 else ())
                for first, count in zip(firsts, self._plan.stored_blocks, strict=True)
            ]
            targets.append(runs)
            self._all(write, [blocks for _, blocks in runs])
        mark = paged.mark()
        self._all(write, self._one_each(ids))
        wanted = [pool.raw.numpy().copy() for pool in self._rank.pools]
        for chunk, runs in zip(stored, targets, strict=True):
            for number, ((first, blocks), pool) in enumerate(zip(runs, self._rank.pools, strict=True)):
                there = replace(pool, raw=torch.from_numpy(wanted[number]))
                wanted[number] = there.overlaid(blocks, chunk.payload[number], first, self._plan.stored_blocks[number])
        job = paged.begin("load", mark)
        with paged.copying():
            for chunk, runs in zip(stored, targets, strict=True):
                paged.scatter(self._rank.view(chunk.slot), runs, job)
            job.launch()
        job.wait()
        for pool, memory in zip(self._rank.pools, wanted, strict=True):
            if (pool.raw.numpy() != memory).any():
                self.outcome.wrong.append("a load wrote other bytes than those of its slots, or beside its blocks")
        for runs in targets:
            self._all(read, [blocks for _, blocks in runs])
        return len(stored)

    def _check_saved(self, chunks: Sequence[_Chunk]) -> None:
        for chunk in chunks:
            slot = self._rank.slot(chunk.slot)
            slot.sum()  # the server seals it
            if slot.numpy().tobytes() != b"".join(chunk.payload):
                self.outcome.wrong.append("a slot holds other bytes than its blocks did")
            self.outcome.compared += 1

    def _move_state(self) -> None:
        """A state is saved and loaded into another block."""
        paged, (pool,) = self._rank.paged, self._rank.states
        slot = self._free_slots[-1]
        source, target = self._source.sample(range(BLOCKS), 2)
        write(pool, [source])
        wanted = pool.read([source])
        with paged.copying():
            job = paged.begin("save", paged.mark())
            paged.gather_state(0, source, self._rank.view(slot), job)
            job.launch()
            job.wait()
            self._rank.slot(slot).sum()
            write(pool, [source, target])
            job = paged.begin("load", paged.mark())
            paged.scatter_state(self._rank.view(slot), 0, target, job)
            job.launch()
            job.wait()
        read(pool, [target])
        if pool.read([target]) != wanted or any(self._rank.slot(slot).numpy()[len(wanted) :]):
            self.outcome.wrong.append("a state came back as another, or its slot holds more than it")
        self.outcome.compared += 1

    def _all(self, act: object, groups: Sequence[Sequence[int]]) -> None:
        for pool, ids in zip(self._rank.pools, groups, strict=True):
            act(pool, ids)  # type: ignore[operator]

    def _shuffled(self) -> Iterator[int]:
        """Blocks, none twice. Groups have pools of their own, so they need not differ between groups, but may."""
        ids = list(range(BLOCKS)) * 2
        head = ids[:BLOCKS]
        self._source.shuffle(head)
        return iter(head)

    def _one_each(self, ids: Iterator[int]) -> list[list[int]]:
        block = next(ids)
        return [[block] for _ in self._rank.pools]


def live(plan: Plan) -> Outcome:
    """Run a life; returns what was wrong with it."""
    with simulated_gpu() as machine:
        life = Life(plan, machine)
        outcome = life.run()
        detector: RaceDetector = machine.detector
        outcome.races, outcome.operations = detector.races, detector.operations
        return outcome
