"""The engine's rate for every real shape, each way, against one large copy of the same pinned memory."""

import threading
import time

from tiered_kv.chunks.device_copy import RING_SLICES, SLICE_BYTES
from tools.gpu_proof.host_memory import MIB
from tools.gpu_proof.section import Proof, gigabytes_per_s
from tools.gpu_proof.sections.ceilings import ceiling
from tools.gpu_proof.shapes import REAL, Shape
from tools.gpu_proof.world import WAYS, World, world

TARGET_SHARE = 0.95
"""Of the large copy's rate: what the engine is built for. Missed is noted, and no error: bytes were right."""

SLICES_TRIED = ((8 * MIB, 3), (32 * MIB, 3))
"""Beside the engine's own, for two shapes."""

DIRECT_TRIED_BYTES = 32 << 10
"""For pages from here on both ways are measured beside the one that a worker takes; below batched copies are slow."""


def run(proof: Proof) -> None:
    """Measure them."""
    shares: list[float] = []
    for shape in REAL:
        with world(proof, shape) as made:
            top = ceiling(proof, made.nbytes)
            shares.append(_measure(proof, made, shape, "chosen", top))
            for way in WAYS if shape.page_bytes >= DIRECT_TRIED_BYTES else ():
                _measure(proof, made, shape, way, top)
            if shape in (REAL[0], REAL[4]):
                for size, ring in SLICES_TRIED:
                    _measure(proof, made, shape, "staged", top, size, ring)
            if shape is REAL[0]:
                _both_ways(proof, made)
    with world(proof, REAL[0], chunk_tokens=16, chunks=1024) as made:
        _measure(proof, made, REAL[0], "staged", ceiling(proof, made.nbytes), note="chunks of 16 tokens")
    reached = sum(share >= TARGET_SHARE for share in shares)
    proof.headline = "every shape copied; rates are of this machine's memory"
    if not proof.is_dry:
        least = min(shares)
        proof.headline = f"{reached} of {len(shares)} shapes reach {TARGET_SHARE:g} of the link; the least {least:.2f}"


def _measure(
    proof: Proof,
    made: World,
    shape: Shape,
    way: str,
    top: dict[str, float],
    slice_bytes: int = SLICE_BYTES,
    ring: int = RING_SLICES,
    note: str = "",
) -> float:
    rank = made.engine(way, slice_bytes=slice_bytes, ring_slices=ring)
    began_s = time.thread_time()
    with rank.copying():
        save = gigabytes_per_s(made.nbytes, proof.median_s(lambda: made.save(rank).wait()))
        load = gigabytes_per_s(made.nbytes, proof.median_s(lambda: made.load(rank).wait()))
    cpu_s = time.thread_time() - began_s
    runs = 4 if proof.is_dry else 12
    share = min(save / top["save"], load / top["load"])
    proof.note(
        shape=shape.name,
        page_kib=shape.page_bytes / 1024,
        way=way,
        slice_mib=slice_bytes >> 20,
        ring=ring,
        chunks=made.chunks,
        save=save,
        load=load,
        of_save=save / top["save"],
        of_load=load / top["load"],
        cpu_s_per_gb=cpu_s / (runs * made.nbytes / 1e9),
        **({"note": note} if note else {}),
    )
    return share


def _both_ways(proof: Proof, made: World) -> None:
    rank = made.engine("staged")

    def save() -> None:
        with rank.copying():
            made.save(rank).wait()

    def both() -> None:
        thread = threading.Thread(target=save)
        thread.start()
        with rank.copying():
            made.load(rank).wait()
        thread.join()

    total = gigabytes_per_s(2 * made.nbytes, proof.median_s(both))
    proof.note(shape=made.shape.name, way="staged", both_ways_at_once=total)
