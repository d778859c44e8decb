"""Scattered fragments on the GPU and one run on the host, by fragment size: batched DMA against a call for each.

Decides from which size on pages go without staging (``DIRECT_BYTES``).
"""

from typing import Any

import numpy as np
import torch

from tools.gpu_proof.host_memory import GIB, MIB, HostMemory
from tools.gpu_proof.section import Proof, gigabytes_per_s

FRAGMENTS = (4 << 10, 8 << 10, 16 << 10, 28 << 10, 32 << 10, 64 << 10, 128 << 10, 512 << 10, 2 * MIB)
COUNT_MAX = 16_384
SINGLE_MAX = 2_048


def run(proof: Proof) -> None:
    """Measure them."""
    kit = proof.engine_device(has_batch=True)
    if kit.copy_batch is None:
        proof.headline = "the driver has no batched copies (CUDA 12.8 and later): everything is staged"
        return
    memory = HostMemory(proof.size(2 * GIB))
    cuda = proof.cuda()
    if cuda is not None:
        memory.register(cuda)
    pool = torch.zeros(proof.size(4 * GIB), dtype=torch.uint8, device=proof.device)
    stream = kit.stream(for_kernels=False)
    reached = []
    for size in FRAGMENTS:
        count = min(memory.size // size, pool.numel() // size, COUNT_MAX, max(1, proof.size(GIB) // size))
        places = np.random.default_rng(0).permutation(pool.numel() // size)[:count].astype(np.int64) * size
        row = {}
        for side in ("load", "save"):
            batch = _batch(kit, memory, pool, places, size, side, stream)
            row[side] = gigabytes_per_s(count * size, proof.median_s(batch, 3))
            single = _single(kit, memory, pool, places[:SINGLE_MAX], size, side, stream)
            row[f"{side}_one_call_each"] = gigabytes_per_s(len(places[:SINGLE_MAX]) * size, proof.median_s(single, 3))
        proof.note(fragment_kib=size / 1024, count=count, **row)
        reached.append((size, min(row["load"], row["save"])))
    best = max(rate for _, rate in reached)
    least = next(size for size, rate in reached if rate >= 0.9 * best)
    proof.headline = "every size copied; rates are of this machine's memory"
    if not proof.is_dry:
        proof.headline = f"batched DMA reaches 90 % of {best:.1f} GB/s from fragments of {least >> 10} KiB on"
    memory.close()


def _batch(kit: Any, memory: HostMemory, pool: Any, places: Any, size: int, side: str, stream: Any) -> Any:
    device = places + pool.data_ptr()
    host = memory.address + np.arange(len(places), dtype=np.int64) * size
    sizes = np.full(len(places), size, dtype=np.int64)

    def copy() -> None:
        if side == "load":
            kit.copy_batch(device, host, sizes, stream, False)
        else:
            kit.copy_batch(host, device, sizes, stream, True)

    return copy


def _single(kit: Any, memory: HostMemory, pool: Any, places: Any, size: int, side: str, stream: Any) -> Any:
    host = torch.from_numpy(memory.array)

    def copy() -> None:
        with kit.on(stream):
            for number, place in enumerate(places.tolist()):
                ours, theirs = host[number * size : (number + 1) * size], pool[place : place + size]
                if side == "load":
                    theirs.copy_(ours, non_blocking=True)
                else:
                    ours.copy_(theirs, non_blocking=True)

    return copy
