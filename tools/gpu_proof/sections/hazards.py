"""Each wait of the copy engine is left out once: does a byte go wrong? With all of them none may.

Slow kernels make the order that is wrong without a wait the one that happens: they hold up what the wait is for. The
same arrangement with every wait has to give right bytes, and without the one wrong ones: or the check has no power. A
dry run has no order; it only shows that each wait is there and is the one that is left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tiered_kv.chunks.transfer import RankKV
from tools.gpu_proof.devices import ARRIVED, DONE, GATHERED, MARK, REUSE, WAITS, Leaky
from tools.gpu_proof.host_memory import GIB, MIB
from tools.gpu_proof.section import Proof
from tools.gpu_proof.shapes import Shape
from tools.gpu_proof.world import World, world

SPIN_CYCLES = 120_000_000
"""About 60 ms: long against everything that is copied here."""

TURNS = 3
SHAPE = Shape("hazards", "LBNHC", 8, 8, 16, 256)
CHUNKS = 16
SLICE_BYTES = 4 * MIB
RING, RING_OF_ALL = 2, 40
"""Where the last wait is left out every slice has a place of its own, or the host would wait for most of them."""

SIDES = {
    MARK: ("save", "load"),
    GATHERED: ("save",),
    ARRIVED: ("load",),
    REUSE: ("save", "load"),
    DONE: ("save", "load"),
}
"""Directions that have the wait."""

BEFORE, SAVED, NEXT, LOADED = 0x1100, 0x2200, 0x3300, 0x4400


@dataclass
class _Model:
    """Writes a value per chunk into its blocks, as a forward pass would: on the model's stream, without the host."""

    made: World
    index: dict[str, torch.Tensor]
    number: torch.Tensor

    @classmethod
    def of(cls, made: World) -> "_Model":
        device = made.proof.device
        chosen = {"sources": made.sources, "targets": made.targets}
        # Ahead: a copy from pageable memory would wait for the kernels that are to be slow.
        index = {name: torch.tensor([b for ids in of for b in ids], device=device) for name, of in chosen.items()}
        chunks = torch.arange(made.chunks, dtype=torch.int16, device=device).repeat_interleave(made.per_chunk)
        return cls(made, index, chunks[:, None, None, None])

    def write(self, which: str, value: int) -> None:
        for placed in self.made.placed:
            view = placed.tensor.view(torch.int16)
            view[self.index[which]] = (self.number + value).expand(-1, *view.shape[1:])

    def read(self, which: str) -> list[torch.Tensor]:
        return [placed.tensor.view(torch.int16)[self.index[which]] for placed in self.made.placed]

    def wrong(self, read: Sequence[torch.Tensor], value: int) -> int:
        return sum(int((layer != self.number + value).any().item()) for layer in read)


def run(proof: Proof) -> None:
    """Leave out each."""
    noticed = 0
    with world(proof, SHAPE, pool_bytes=2 * GIB, chunks=CHUNKS) as made:
        for way in ("staged", "direct"):
            for wait in WAITS:
                if way == "direct" and wait == REUSE:
                    continue  # nothing is staged
                noticed += _with_and_without(proof, made, way, wait)
    of = sum(len(SIDES[wait]) for wait in WAITS) * 2 - len(SIDES[REUSE])
    proof.headline = "every wait is there; what happens without it only a GPU can show"
    if not proof.is_dry:
        proof.headline = f"{noticed} of {of} waits noticed when left out"


def _with_and_without(proof: Proof, made: World, way: str, wait: str) -> int:
    noticed = 0
    model = _Model.of(made)
    for without in ("", wait):
        leaky = Leaky(proof.engine_device(has_batch=way == "direct"), without)
        ring = RING_OF_ALL if wait == DONE else RING
        rank = made.engine(way, slice_bytes=SLICE_BYTES, ring_slices=ring, device=leaky)
        wrong = {"save": 0, "load": 0}
        with rank.copying():
            for turn in range(1 if proof.is_dry else TURNS):
                wrong["save"] += _save(proof, model, rank, leaky, wait, turn)
                wrong["load"] += _load(proof, model, rank, leaky, wait, turn)
        proof.note(way=way, wait=wait, left_out=bool(without), waits_left_out=leaky.left_out, **wrong)
        name = f"{way}, {wait}"
        if not without:
            proof.check(f"{name}: right with every wait", wrong == {"save": 0, "load": 0}, wrong)
            continue
        proof.check(f"{name}: the wait was there to be left out", leaky.left_out > 0, leaky.left_out)
        for side in SIDES[wait]:
            noticed += bool(wrong[side])
            if not proof.is_dry:
                proof.check(f"{name}: {side} is noticed to be wrong without it", wrong[side] > 0, wrong[side])
    return noticed


def _save(proof: Proof, model: _Model, rank: RankKV, leaky: Leaky, wait: str, turn: int) -> int:
    made = model.made
    value = SAVED + turn * 0x20
    model.write("sources", BEFORE)
    proof.synchronize()
    _spin(proof)
    model.write("sources", value)
    mark = leaky.mark()
    _spin(proof)
    model.write("targets", NEXT)  # the next step is queued before the copy begins
    if wait == REUSE:
        _stall(proof, leaky, for_kernels=False)
    job = made.save(rank, mark)
    with leaky.last_wait():
        job.wait()
    slots = [made.slot(chunk).view("<i2") for chunk in range(made.chunks)]
    wrong = sum(int((slot != value + chunk).any()) for chunk, slot in enumerate(slots))
    proof.synchronize()
    return wrong


def _load(proof: Proof, model: _Model, rank: RankKV, leaky: Leaky, wait: str, turn: int) -> int:
    made = model.made
    value = LOADED + turn * 0x20
    for chunk in range(made.chunks):
        made.slot(chunk).view("<i2")[:] = value + chunk
    if wait != ARRIVED:
        _spin(proof)
    model.write("targets", 0)  # as vLLM zeroes new blocks
    if wait == ARRIVED:
        proof.synchronize()  # the mark is to hold up nothing, or it would do the other wait's work
    mark = leaky.mark()
    if wait in (ARRIVED, DONE):
        _stall(proof, leaky, for_kernels=False)
    job = made.load(rank, mark)
    with leaky.last_wait():
        job.wait()
    read = model.read("targets")
    proof.synchronize()
    return model.wrong(read, value)


def _spin(proof: Proof) -> None:
    """Hold up the model's stream."""
    if not proof.is_dry:
        torch.cuda._sleep(SPIN_CYCLES)


def _stall(proof: Proof, leaky: Leaky, *, for_kernels: bool) -> None:
    """Hold up the engine's streams of one kind, longer than the model's is."""
    if proof.is_dry:
        return
    for is_for_kernels, stream in leaky.streams:
        if is_for_kernels == for_kernels:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(4 * SPIN_CYCLES)
