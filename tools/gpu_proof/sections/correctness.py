"""Bytes: every layout and way, with the model's stream busy, parts of chunks, both directions at once.

The reference goes page by page on the host. Bytes beside the pages that are written must stay as they are.
"""

import threading

import numpy as np
import numpy.typing as npt
import torch

from tools.gpu_proof.host_memory import MIB
from tools.gpu_proof.section import Proof
from tools.gpu_proof.shapes import REAL, Shape
from tools.gpu_proof.world import WAYS, World, world

CHUNKS = 6
BUSY_PRODUCTS = 8
SMALL_SLICE_BYTES = 4 * MIB
"""So that even few chunks go round the ring."""


def run(proof: Proof) -> None:
    """Compare them all."""
    copied = 0
    for shape in REAL:
        for way in WAYS:
            with world(proof, shape, pool_bytes=CHUNKS * 1024 * MIB, chunks=CHUNKS) as made:
                copied += _compare(proof, made, shape, way)
    proof.headline = f"{len(REAL)} shapes x {len(WAYS)} ways, {copied / 1e9:.2f} GB compared"


def _compare(proof: Proof, made: World, shape: Shape, way: str) -> int:
    rank = made.engine(way, slice_bytes=SMALL_SLICE_BYTES, ring_slices=2)
    before = np.random.default_rng(5).integers(0, 256, made.raw.numel(), dtype=np.uint8)
    made.raw.copy_(torch.from_numpy(before))
    proof.synchronize()
    keep_busy(proof)
    with rank.copying():
        made.save(rank).wait()
    wrong_slots = sum(made.slot(c).tobytes() != made.expected_slot(before, c) for c in range(made.chunks))
    firsts = [chunk % made.per_chunk for chunk in range(made.chunks)]
    expected = before.copy()
    for chunk, first in enumerate(firsts):
        made.expect_loaded(expected, chunk, first)
    keep_busy(proof)
    with rank.copying():
        made.load(rank, firsts=firsts).wait()
    wrong_bytes = int((made.raw.cpu().numpy() != expected).sum())
    both_wrong = _both_at_once(made, way, expected)
    name = f"{shape.name}, {way}"
    proof.note(shape=shape.name, way=way, chunks=made.chunks, wrong_slots=wrong_slots, wrong_bytes=wrong_bytes)
    proof.check(f"{name}: saved chunks are their pages", wrong_slots == 0, wrong_slots)
    proof.check(f"{name}: loaded pages, and no byte beside them", wrong_bytes == 0, wrong_bytes)
    proof.check(f"{name}: loading and saving at once", both_wrong == 0, both_wrong)
    return 3 * made.nbytes


def _both_at_once(made: World, way: str, before: npt.NDArray[np.uint8]) -> int:
    """Save in one thread what is loaded beside it in another; how many bytes are wrong afterwards."""
    rank = made.engine(way, slice_bytes=SMALL_SLICE_BYTES, ring_slices=2)
    kept = [made.slot(chunk).copy() for chunk in range(made.chunks)]
    half = made.chunks // 2
    mark = rank.mark()
    failed: list[BaseException] = []

    def save() -> None:
        try:
            with rank.copying():
                job = rank.begin("save", mark)
                for chunk in range(half):
                    rank.gather([made.sources[chunk]], made.view(chunk), job)
                job.launch()
                job.wait()
        except BaseException as exc:  # noqa: BLE001 - in a thread: raised again below
            failed.append(exc)

    thread = threading.Thread(target=save)
    thread.start()
    with rank.copying():
        job = rank.begin("load", mark)
        for chunk in range(half, made.chunks):
            rank.scatter(made.view(chunk), [(0, made.targets[chunk])], job)
        job.launch()
        job.wait()
    thread.join()
    if failed:
        raise failed[0]
    expected = before.copy()
    for chunk in range(half, made.chunks):
        made.expect_loaded(expected, chunk, 0)
    wrong = int((made.raw.cpu().numpy() != expected).sum())
    return wrong + sum(int((made.slot(c) != kept[c]).sum()) for c in range(made.chunks))


def keep_busy(proof: Proof) -> None:
    """Queue work on the model's stream that takes some milliseconds; nothing in a dry run."""
    if proof.is_dry:
        return
    product = torch.randn(4096, 4096, device=proof.device)
    for _ in range(BUSY_PRODUCTS):
        product = (product @ product).clamp_(-1, 1)
